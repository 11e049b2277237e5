"""What lib reads of a script's Args."""

from collections.abc import Collection
from dataclasses import Field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from lib.args import groups
from lib.args.data import DataArgs, ValidationArgs
from lib.args.run import RunArgs
from lib.cli.flags import Preset
from lib.declared import ADV_ESTIMATORS, MASKS_OF, POLICY_LOSSES, parsed, read_masks, read_words, settings_of_loss

ROOT = Path(__file__).parent.parent.parent


class ScriptArgs:
    """The base of every script's Args: the groups and flags that all have, and values for those that only some have."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    preset: ClassVar[Preset] = Preset(
        file=ROOT / "data/toy/preset.yaml",
        folder=ROOT,
        unless=("--model", "--train-files"),
        what="the embedded arithmetic task",
        script="grpo",
    )

    def __init_subclass__(cls, script: str = ""):
        cls.preset = replace(cls.preset, script=script or cls.preset.script)

    run: RunArgs
    model: groups.ModelArgs
    shard: groups.ShardArgs
    data: DataArgs
    rollout: groups.RolloutArgs
    multi_turn: groups.MultiTurnArgs
    reward: groups.RewardArgs
    optimizer: groups.OptimizerArgs
    validation: ValidationArgs

    prompts_per_step: int
    group_size: int
    num_mini_batches: int
    update_epochs: int

    loss: groups.PolicyLoss
    loss_kwargs: tuple[str, ...]
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    loss_agg_mode: groups.AggMode
    loss_scale_factor: float | None
    token_masks: tuple[str, ...]
    entropy_coef: float
    entropy_target: float | None
    old_log_probs: Literal["auto", "recompute", "rollout"]
    rollout_correction: groups.RolloutCorrectionArgs

    kl_coef: float
    kl_estimator: groups.KLEstimator | None
    kl_placement: Literal["loss", "reward"]
    kl_target: float | None
    kl_horizon: int

    # not flags: the names of those that the command line gives and what to say of the preset (parse_flags), and those
    # of them that change nothing
    given: Collection[str] = ()
    preset_note = ""
    no_effect: tuple[str, ...] = ()

    @property
    def default_lr(self) -> float:
        return 1e-5 if self.model.lora_rank else 1e-6

    @property
    def lr(self) -> float:
        """--lr, or its default: 1e-6, and 1e-5 for LoRA."""
        return self.default_lr if self.optimizer.lr is None else self.optimizer.lr

    @property
    def adv_settings(self) -> dict[str, Any]:
        if not self.adv_kwargs:
            return {}
        estimator = ADV_ESTIMATORS[self.adv_estimator]
        return parsed(estimator.choice, read_words("--adv-kwargs", self.adv_kwargs), estimator.settings)

    @property
    def reward_keys(self) -> tuple[str, ...]:
        return self.adv_settings.get("reward_keys", ())

    @property
    def loss_settings(self) -> dict[str, Any]:
        """The hyper-parameters in --loss-kwargs, without those of token masks."""
        return {name: value for name, value in self._loss_kwargs.items() if name in POLICY_LOSSES[self.loss].settings}

    @property
    def mask_settings(self) -> dict[str, dict[str, Any]]:
        """{token mask: its hyper-parameters} of --token-masks, and of the masks that the loss reads as columns."""
        masks = read_masks(self.token_masks) if self.token_masks else {}
        for name, mask in MASKS_OF[self.loss].items():
            masks[name] = {key: value for key, value in self._loss_kwargs.items() if key in mask.settings}
        return masks

    @property
    def _loss_kwargs(self) -> dict[str, Any]:
        texts = read_words("--loss-kwargs", self.loss_kwargs)
        return parsed(f"--loss {self.loss}", texts, settings_of_loss(self.loss))

    # flags of some scripts only; in a class that is no dataclass they are not flags of the others
    adv_estimator = ""
    adv_kwargs: tuple[str, ...] = ()
    zero_variance = "keep"
    overlong_buffer = 0
    max_gen_batches = 0  # DAPO's: it scores between rollouts
    critic_model: str | None = None
