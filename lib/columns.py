"""The table of columns: what a step's batch can have, one line a column, in the order in which they are written.
docs/columns.md explains it; `python -m lib.columns` writes the table there."""

from pathlib import Path
from typing import Literal, NamedTuple


class Column(NamedTuple):
    name: str
    shape: str
    dtype: str
    meaning: str
    readers: str = ""
    gathered: Literal["always", "if read", ""] = ""  # if read: by an estimator, correction or mask of the run
    saved: str = ""  # columns of the training samples made of it; "name: type", or ": type" of the same name: a copy
    fill: int = 0  # padding of a row that is made wider

    @property
    def copied(self) -> tuple[str, str]:
        """(name, type) of its copy in the training samples; ("", "") without."""
        name, colon, type = self.saved.partition(": ")
        return (name or self.name, type) if colon else ("", "")

    @property
    def width(self) -> str:
        """The last dimension but K: "P" is padded on the left, "L" on both sides, "T" on the right, others are not."""
        return self.shape.removesuffix(", K").rpartition(", ")[2]


TABLE: dict[str, tuple[Column, ...]] = {  # by the function that writes them
    "lib/data/dataset.py: __getitem__": (
        Column("data_source", "B", "str", "selects the row's scorer", "rewards", saved=": str"),
        Column("raw_prompt", "B", "list", "the prompt's messages", "agent, samples", saved="prompt, row_hash"),
        Column("raw_prompt_ids", "B", "list", "the prompt's tokens, images not expanded", "engines, replay"),
        Column("reward_model", "B", "dict", "ground_truth, and more for the scorer", "rewards", saved="ground_truth"),
        Column("extra_info", "B", "dict", "other values of the row", "rewards"),
        Column("index", "B", "object", "extra_info's index, or the row's number"),
        Column("tools_kwargs", "B", "dict", "arguments for the row's tools", "agent"),
        Column("interaction_kwargs", "B", "dict", "arguments for the row's interaction", "agent"),
        Column("multi_modal_data", "B", "dict", "images and videos", "engines, samples", saved="images"),
        Column("multi_modal_inputs", "B", "dict", "the processor's tensors", "forward passes"),
        Column("multi_modal_hash", "B", "int64", "hash of the images", "shared prompts, replay", saved="row_hash"),
    ),
    "lib/data/loader.py: __iter__": (
        Column("data_row", "B", "int", "number of the row, with --prompt-sampling", "record_scores"),
    ),
    "lib/rollout/stream.py: _next_prompts": (
        Column("uid", "B", "str", "step-number of the prompt", "gather_rows", saved="group, sample"),
    ),
    "lib/rollout/engine.py: add_responses": (
        Column("prompts", "B, P", "int64", "tokens, left-padded", "samples", saved="prompt_ids: int32"),
        Column("responses", "B, T", "int64", "tokens, right-padded", "forward passes", saved="response_ids: int32"),
        Column("input_ids", "B, L", "int64", "prompts and responses; (B, P) before the rollout", "forward passes"),
        Column("attention_mask", "B, L", "int64", "1: a token, 0: padding", "forward passes", saved="tokens"),
        Column("position_ids", "B, L or B, 4, L", "int64", "positions; with mrope in four rows", "forward passes"),
        Column("response_mask", "B, T", "int64", "1: sampled by the policy", "all", "always", ": bool"),
        Column("rollout_log_probs", "B, T", "float32", "log-probs of the engine", "correction", "if read", ": float"),
        Column("routed_experts", "B", "Tensor", "int16 (tokens, layers, k), -1: not known", "forward passes"),
        Column("finish_reason", "B", "str", "stop, length, abort, error, given, ...", "metrics", saved=": str"),
    ),
    "lib/rollout/stream.py: generate": (
        Column("max_response_length", "B", "int", "limit of the response's tokens", "engines, scorers"),
    ),
    "lib/rollout/stream.py: add_origin": (
        Column("policy_version", "B", "int64", "training steps of the weights that sampled it", "check_rows"),
    ),
    "lib/rollout/stream.py: given": (
        Column("given_mask", "B, T", "int64", "1: given by prefixes or given(), not sampled", "check_rows", "always"),
    ),
    "lib/rollout/engine.py: add_weight_versions": (
        Column("weight_versions", "B, T", "int64", "weights that sampled it, or -1", "metrics", "", ": int32", -1),
    ),
    "agent/loop.py: _as_batch": (
        Column("turn_rewards", "B, T", "float32", "rewards of tools, interactions and agents", "add_to", saved="turns"),
        Column("anchor_states", "B, T", "int64", "hash of the answer before the turn, or 0", "gigpo", "if read"),
        Column("turn_numbers", "B, T", "int64", "number of the turn, from 1, or 0", "gigpo, mt_grpo", "if read"),
        Column("messages", "B", "list", "the episode"),
        Column("answer", "B", "str", "the last answer of --agent, or None if the agent gave a reward", "rewards"),
        Column("num_turns", "B", "int", "turns of the policy", "metrics"),
        Column("segments", "B", "list", "start and end of each context in the response", "metrics"),
        Column("weight_version", "B", "int", "version of the weights at the episode's start"),
        Column("agent_metrics", "B", "dict", "numbers of the episode", "metrics"),
        Column("tool_errors", "B", "list", "a line for each error of a tool", "samples", saved="tool_errors"),
        Column("tool_rewards", "B", "list", "turn, tool and reward of each call", "metrics", saved="tool_rewards"),
    ),
    "lib/data/balance.py: exchange_groups": (
        Column("mini_batch", "B", "int64", "number of the mini-batch", "split_mini_batches"),
    ),
    "lib/reward/scores.py: add_to": (
        Column("token_level_scores", "B, T", "float32", "reward, on the last token", "advantages", "always", "score"),
        Column("reward_components", "B, K", "float32", "the rewards of reward_keys", "gdpo", "always"),
        Column("reward_extra_info", "B", "dict", "other values of the scorer", "samples", saved="rewards"),
    ),
    "lib/model/trained.py: check_rows": (
        Column("is_fresh", "B", "bool", "sampled by the weights of this step", "checks, mismatch metrics"),
    ),
    "lib/model/trained.py: batched_log_probs": (
        Column("old_log_probs", "B, T", "float32", "log-probs before the update", "losses", "if read", ": float"),
        Column("entropys", "B, T", "float32", "entropy before the update", "token masks", "if read"),
        Column("squared_score", "B, T", "float32", "1 - 2 p + sum of p^2 over the vocabulary", "advantages", "if read"),
    ),
    "lib/core_algos/vocabulary.py: top_k": (
        Column("teacher_ids", "B, T, K", "int64", "the teacher's likeliest tokens", "a copy's loss"),
        Column("teacher_top_k", "B, T, K", "float32", "its log-probs of these and, last, the rest", "a copy's loss"),
    ),
    "grpo.py: main": (
        Column("ref_log_prob", "B, T", "float32", "log-probs of reference", "KL", "if read", "ref_log_probs: float"),
    ),
    "ppo.py: main": (
        Column("values", "B, T", "float32", "of the critic", "advantages, value loss", "always", ": float"),
    ),
    "remax.py: main": (
        Column("reward_baselines", "B", "float32", "score of the greedy response", "advantages", "always"),
    ),
    "dapo.py: sample_groups": (
        Column("truncated", "B", "bool", "cut off by the limit", "overlong filtering", "always"),
    ),
    "grpo.py: add_advantages": (
        Column("row", "B", "int64", "number of the row, over all ranks", "samples"),
        Column("group", "B", "int64", "number of the uid, over all ranks", "advantages"),
        Column("rollout_is_weights", "B, T", "float32", "weights of the rollout correction", "update, advantages"),
        Column("token_level_rewards", "B, T", "float32", "scores, minus the KL in the reward", "advantages"),
        Column("advantages", "B, T", "float32", "advantage of the token", "losses, token masks", saved=": float"),
        Column("returns", "B, T", "float32", "target of the critic", "value loss"),
        Column("cov_keep", "B, T", "bool", "tokens that Clip-Cov does not detach", "clip_cov"),
        Column("cov_pick", "B, T", "bool", "tokens that get KL-Cov's penalty", "kl_cov"),
        Column("loss_mask", "B, T", "bool", "trained on", "update", saved=": bool"),
        Column("denominator_mask", "B, T", "bool", "counted in the means", "update"),
        Column("valid_mask", "B, T", "bool", "in a group", "value loss"),
    ),
    "lib/log/rollouts.py: add_outputs": (
        Column("log_probs", "B, T", "float32", "log-probs in the last pass of the update", "samples", saved=": float"),
        Column("entropy", "B, T", "float32", "entropy in the last pass of the update", "samples", saved=": float"),
    ),
}  # fmt: skip

OF_PROMPTS = {column.name for writer in [*TABLE][:3] for column in TABLE[writer]}
COLUMNS = {column.name: column for columns in TABLE.values() for column in columns}
PAGE = Path(__file__).parents[1] / "docs/columns.md"


def page() -> str:
    """The text of docs/columns.md, with this table."""
    head, rule, _ = PAGE.read_text().partition("|---|---|---|---|---|---|---|\n")
    rows = []
    for writer, columns in TABLE.items():
        file, function = writer.split(": ")
        for column in columns:
            saved = (column.copied[0] or column.saved).replace(", ", "`, `")
            cells = [f"`{column.name}`", f"({column.shape}) {column.dtype}", column.meaning]
            cells += [f"[`def {function}(`](../{file})", column.readers, column.gathered, saved and f"`{saved}`"]
            rows.append(f"| {' | '.join(cells)} |\n")
    return head + rule + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
