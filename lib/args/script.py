"""What the Args of all scripts have in common: the groups and flags that lib reads."""

from dataclasses import Field
from typing import Any, ClassVar, Literal, Protocol

from lib.args.groups import (
    DataArgs,
    ModelArgs,
    OptimizerArgs,
    RewardArgs,
    RolloutArgs,
    RunArgs,
    ShardArgs,
    ValidationArgs,
)
from lib.args.settings import (
    AdvEstimator,
    AdvKwargs,
    AggMode,
    LossKwargs,
    MultiTurnArgs,
    PolicyLoss,
    RolloutCorrectionArgs,
    TokenMaskArgs,
)


class ScriptArgs(Protocol):
    """The Args of any script."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    run: RunArgs
    model: ModelArgs
    shard: ShardArgs
    data: DataArgs
    rollout: RolloutArgs
    multi_turn: MultiTurnArgs
    reward: RewardArgs
    optimizer: OptimizerArgs
    validation: ValidationArgs

    prompts_per_step: int
    group_size: int
    num_mini_batches: int
    update_epochs: int

    loss: PolicyLoss
    loss_kwargs: LossKwargs
    loss_agg_mode: AggMode
    loss_scale_factor: float | None
    token_masks: TokenMaskArgs
    old_log_probs: Literal["auto", "recompute", "rollout"]
    rollout_correction: RolloutCorrectionArgs

    kl_coef: float
    kl_placement: Literal["loss", "reward"]
    kl_target: float | None
    kl_horizon: int


class GroupScriptArgs(ScriptArgs, Protocol):
    """The Args of a script with --adv-estimator, whose advantages compare the responses to a prompt."""

    adv_estimator: AdvEstimator
    adv_kwargs: AdvKwargs
    singleton: Literal["raw", "zero"]
    reward_keys: tuple[str, ...]
