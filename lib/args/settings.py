"""Settings: flags with a prefix, such as --multi-turn.tools calculator."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from lib.cli.flags import Names, OnReplay, non_default

FILES, AS_RECORDED = Names.FILES, OnReplay.AS_RECORDED
LONGEST_WAIT = 1e9  # seconds: clocks of the system and of libraries take no more
SECONDS = Interval(gt=0, le=LONGEST_WAIT)
AdvEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "opo", "gpg", "maxrl", "grpo_passk", "grpo_leave_one_out", "grpo_batch_std",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "optimal_token_baseline",
    "tir_optimal_token_baseline", "gigpo", "mt_grpo",
]  # fmt: skip
"""names in lib/core_algos/advantages.py"""
PolicyLoss = Literal[
    "vanilla", "gspo", "cispo", "geo_mean", "sapo", "gpg", "reinforce", "dppo_tv", "dppo_kl", "dro", "two_sided",
    "decoupled", "clip_cov", "kl_cov",
]  # fmt: skip
"""names in lib/core_algos/policy_losses.py"""
AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k1_unbiased", "k2_unbiased", "k3_unbiased"]
Bounds = tuple[float, float] | None


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
class RejectArgs:
    """A token (token_...) or row (seq_...) that fails a criterion is left out of the loss. k1: bounds on r. k2, k3:
    upper limits of (log r)^2 / 2 and r - 1 - log r. seq_sum: r of the row, and sums of k2, k3. seq_mean: the geometric
    mean of r, and means of k2, k3. seq_max: every token of the row must pass."""

    token_k1: Bounds = None
    token_k2: float | None = None
    token_k3: float | None = None
    seq_sum_k1: Bounds = None
    seq_sum_k2: float | None = None
    seq_sum_k3: float | None = None
    seq_mean_k1: Bounds = None
    """such as 0.99 1.01"""
    seq_mean_k2: float | None = None
    seq_mean_k3: float | None = None
    seq_max_k1: Bounds = None
    """such as 1e-4 100: a veto of outliers"""
    seq_max_k2: float | None = None
    seq_max_k3: float | None = None


@dataclass
class RolloutCorrectionArgs:
    """How r = pi_old / pi_rollout corrects the loss (lib/core_algos/rollout_correction.py). Without any of these flags
    there is no correction, except with --async-level above 0 or LoRA in bfloat16 with vLLM: level token, bounds 0 2."""

    level: Literal["token", "sequence", "geometric", "measure"] | None = None
    """level of the importance weights; measure: metrics only. Default if another of these flags is given: token"""
    action: Literal["truncate", "mask"] | None = None
    """r outside the bounds: truncate to the bound (TIS), or mask with weight 0 (IcePop); truncate by default"""
    bounds: Bounds = None
    """bounds of the weights; 0 2 by default"""
    batch_normalize: bool | None = None
    """divide the weights by their mean"""
    reject: RejectArgs = field(default_factory=RejectArgs)

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of compute_rollout_correction; {} if none of these flags is given."""
        settings = non_default(self)
        return settings | {"level": None} if self.level == "measure" else settings


@dataclass
class TokenMaskArgs:
    """Which tokens stay in the loss (lib/core_algos/policy_losses.py). The last three flags are for --loss clip_cov and
    kl_cov."""

    top_entropy: Annotated[float | None, Interval(gt=0, le=1)] = None
    """keep only this share of tokens, those with the highest entropy, such as 0.2 (2506.01939)"""
    m2po: Annotated[float | None, Gt(0)] = None
    """drop tokens of largest log(pi_old / pi_rollout)^2 until the rest's mean is below this, like 0.04 (2510.01161)"""
    off_policy_sequence: Annotated[float | None, Ge(0)] = None
    """drop tokens with A < 0 in rows whose mean of log(pi_rollout / pi_old) is above this (2512.02556)"""
    clip_cov_ratio: Annotated[float | None, Interval(gt=0, le=1)] = None
    """share of tokens that clip_cov masks; 2e-4 by default (2505.22617)"""
    clip_cov_bounds: Bounds = None
    """clip_cov draws among tokens whose covariance is between these; 1 5 by default"""
    kl_cov_ratio: Annotated[float | None, Interval(gt=0, le=1)] = None
    """share of the tokens that kl_cov penalises; 2e-4 by default"""

    def settings(self, loss: str) -> dict[str, dict]:
        """{mask: its keyword arguments}, as compute_token_masks takes them, for this policy loss."""
        masks: dict[str, dict] = {
            "top_entropy": {"fraction": self.top_entropy},
            "m2po": {"threshold": self.m2po},
            "off_policy_sequence": {"delta": self.off_policy_sequence},
            "clip_cov": {"ratio": self.clip_cov_ratio, "cov": self.clip_cov_bounds},
            "kl_cov": {"ratio": self.kl_cov_ratio},
        }
        given = {mask: {name: v for name, v in kwargs.items() if v is not None} for mask, kwargs in masks.items()}
        return {
            mask: kwargs for mask, kwargs in given.items() if mask == loss or (kwargs and not mask.endswith("_cov"))
        }


@dataclass
class LossKwargs:
    """Hyper-parameters of --loss, each for the losses in brackets; lib/core_algos/policy_losses.py has the defaults."""

    cliprange_low: Annotated[float | None, Ge(0)] = None
    """lower clip [cispo, gspo, geo_mean, two_sided, decoupled, clip_cov]"""
    cliprange_high: Annotated[float | None, Ge(0)] = None
    """upper clip [the same]"""
    ratio_high: Annotated[float | None, Gt(0)] = None
    """largest importance weight [reinforce, dppo_tv, dppo_kl]"""
    tau_pos: Annotated[float | None, Gt(0)] = None
    """steepness of the gate where A > 0 [sapo]"""
    tau_neg: Annotated[float | None, Gt(0)] = None
    """the same where A < 0 [sapo]"""
    delta_low: Annotated[float | None, Gt(0)] = None
    """maximum divergence of pi from pi_old at a token with A < 0 [dppo_tv, dppo_kl]"""
    delta_high: Annotated[float | None, Gt(0)] = None
    """the same with A > 0 [dppo_tv, dppo_kl]"""
    dro_beta: Annotated[float | None, Ge(0)] = None
    """weight of the squared log ratio [dro, which needs it]"""
    delta: Annotated[float | None, Gt(0)] = None
    """largest ratio where A < 0 [two_sided]"""
    cap: Annotated[float | None, Gt(0)] = None
    """largest weight pi_old / pi_rollout [decoupled]"""
    kl_coef: Annotated[float | None, Ge(0)] = None
    """weight of |log ratio| at the selected tokens [kl_cov]"""


@dataclass
class AdvKwargs:
    """Hyper-parameters of --adv-estimator, each for the estimators in brackets; lib/core_algos/advantages.py has the
    defaults."""

    epsilon: Annotated[float | None, Gt(0)] = None
    """added to the standard deviation [grpo, grpo_passk, grpo_leave_one_out, grpo_batch_std, gigpo, mt_grpo]"""
    norm_adv_by_std_in_grpo: bool | None = None
    """divide by the group's standard deviation [grpo_passk, gigpo, mt_grpo]"""
    gamma: Annotated[float | None, Interval(ge=0, le=1)] = None
    """discount, by token [reinforce_plus_plus] or by turn [gigpo]"""
    turn_coef: Annotated[float | None, Ge(0)] = None
    """weight of the turn's advantage, beside that of its episode [gigpo, mt_grpo]"""
    f_norm: Annotated[float | None, Gt(0)] = None
    """divisor of the advantages [gpg]"""
    reward_weights: Annotated[tuple[float, ...] | None, Interval(ge=-1e4, le=1e4)] = None
    """a weight for each of --reward-keys [gdpo]"""
