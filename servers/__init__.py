"""vLLM servers (--rollout-engine URL, --rollout-gpus), and rollouts that they sample while ranks train (--async-level).

Only lib/setup imports it, and agent/ for its types."""
