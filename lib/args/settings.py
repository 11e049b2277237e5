"""Settings: flags with a prefix, such as --multi-turn.tools calculator."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt, Interval

from lib.cli.flags import Names, OnReplay
from lib.declared import ADV_ESTIMATORS, CRITERIA, POLICY_LOSSES, Bounds, parsed, read_words

FILES, AS_RECORDED = Names.FILES, OnReplay.AS_RECORDED
LONGEST_WAIT = 1e9  # seconds: clocks of the system and of libraries take no more
SECONDS = Interval(gt=0, le=LONGEST_WAIT)
if TYPE_CHECKING:
    AdvEstimator = str
    PolicyLoss = str
else:
    AdvEstimator = Literal[*ADV_ESTIMATORS]
    PolicyLoss = Literal[*POLICY_LOSSES]
AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k1_unbiased", "k2_unbiased", "k3_unbiased"]


@dataclass
class MultiTurnArgs:
    """Episodes of several turns; they need tools or an interaction (docs/multi_turn.md)."""

    tools: Annotated[tuple[str, ...], AS_RECORDED, FILES] = ()
    """calculator, python, zoom, bash:FOLDER, search:FILE, mcp:COMMAND, path/to/file.py:name or YAML"""
    interaction: Annotated[str, FILES] = ""
    """reasoning_gym, openenv:URL, gym:path/to/file.py:Class, verifiers:NAME or path/to/file.py:Class"""
    parser: str = "auto"
    """of tool calls: auto (by the chat template), hermes, llama3_json, qwen3_coder, one of vLLM's"""
    max_turns: Annotated[int, Gt(0)] = 8
    """maximum number of turns of the policy in an episode"""
    max_tool_calls: Annotated[int, Gt(0)] = 4
    """maximum number of tool calls in a turn, which run concurrently; the others get an error"""
    max_turn_tokens: Annotated[int | None, Gt(0)] = None
    """maximum number of tokens of a turn; empty: the rest of the row"""
    context_window: Annotated[int | None, Gt(0)] = None
    """maximum number of tokens of a context and the turn sampled from it; empty: a row's"""
    compact_at: Annotated[int | None, Gt(0)] = None
    """before a turn whose context has more tokens, the policy writes a summary; empty: never"""
    compact_prompt: str = (
        "Summarize the conversation so far. You will go on from the first message, your summary and the next message: "
        "keep all that you need of the rest."
    )
    """the message that asks for the summary"""
    max_tool_output: Annotated[int, Gt(0)] = 2000
    """maximum number of characters of an answer of a tool or the interaction"""
    truncate: Literal["left", "middle", "right"] = "middle"
    """where longer answers are truncated"""
    tool_timeout: Annotated[float, SECONDS] = 30.0
    """timeout of a call of a tool or the interaction, in seconds"""
    episode_timeout: Annotated[float | None, SECONDS] = None
    """timeout of an episode in seconds; a longer one is not trained on"""
    reward_coef: Annotated[float, Interval(ge=-1e4, le=1e4)] = 1.0
    """weight of the rewards of tools and the interaction, added to the scorers'"""

    @property
    def enabled(self) -> bool:
        return bool(self.tools or self.interaction)


@dataclass
class RolloutCorrectionArgs:
    """How r = pi_old / pi_rollout corrects the loss (lib/core_algos/rollout_correction.py). Without any of these flags
    there is no correction, except with --async-level above 0 or LoRA in bfloat16 with vLLM: level token, bounds 0 2."""

    level: Literal["token", "sequence", "geometric", "measure"] | None = None
    """level of the importance weights; measure: metrics only. Default if another of these flags is given: token"""
    action: Literal["truncate", "mask"] | None = None
    """r outside the bounds: truncate to the bound (TIS), or mask with weight 0 (IcePop); truncate by default"""
    bounds: Bounds | None = None
    """bounds of the weights; 0 2 by default"""
    batch_normalize: bool | None = None
    """divide the weights by their mean"""
    reject: tuple[str, ...] = ()
    """criteria NAME=LIMIT, such as seq_mean_k1=0.99,1.01 token_k2=0.1: a token (token_...) or row (seq_...) that fails
    one is left out. k1: bounds on r; k2, k3: largest value; seq_sum, seq_mean, seq_max (docs/algorithms.md)"""

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of compute_rollout_correction; {} if none of these flags is given."""
        settings = {name: value for name, value in vars(self).items() if value not in (None, ())}
        if self.reject:
            flag = "--rollout-correction.reject"
            settings["reject"] = parsed(flag, read_words(flag, self.reject), CRITERIA)
        return settings | {"level": None} if self.level == "measure" else settings
