"""The folder from which vLLM starts: one path for equal files, so that vLLM finds what an earlier run has compiled."""
