"""The table of what a run reads: which flags, and which columns of its batch, act where something is chosen. A given
flag that nothing reads is reported (docs/defaults.md)."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from lib import InputError
from lib.args.script import ScriptArgs
from lib.cli.flags import OnResume, as_flag, walk
from lib.columns import COLUMNS
from lib.declared import ADV_ESTIMATORS, MASKS_OF, POLICY_LOSSES, TOKEN_MASKS, read_words, settings_of_loss


class Row(NamedTuple):
    when: str
    """"lora_rank" (it is on), "loss vanilla", "no group_size 1", several joined by "and", "or", "|"; "": always"""
    flags: str
    """the flags that are read then; the name of a setting has dots"""
    columns: str = ""
    """the columns that `add_advantages` reads then, of the rows of all ranks"""
    update: str = ""
    """the columns that `update` reads then"""


FACTS = {  # what no flag says alone
    "vision": "a --model that reads images",
    "correction": "a rollout correction",
    "ratio": "a second update a step",
}
NOTED = {"val_only": False, "replay": "", "ratio": True}  # what leaves out a part of any run, as it is in a whole one
NEVER_IDLE = {"vllm_kwargs", "reward_timeout", "reward_memory"}  # an error, whatever a resume does
OF_THE_PASS = ("entropys", "squared_score", "rollout_log_probs", "routed_experts")
DRIFT = "rollout_log_probs old_log_probs"
WEIGHTS = "rollout_correction.action rollout_correction.bounds"
LIMITS = "max_turns max_turn_tokens max_tool_output truncate tool_timeout episode_timeout reward_coef"


def _declared_rows() -> Iterator[Row]:
    """Of each estimator, loss and token mask, by what lib/core_algos declares."""
    for name, estimator in ADV_ESTIMATORS.items():
        yield Row(f"adv_estimator {name}", "adv_kwargs" if estimator.settings else "", " ".join(estimator.columns))
    for name, loss in POLICY_LOSSES.items():
        of_masks = [column for mask in MASKS_OF[name].values() for column in mask.columns]
        update = ("old_log_probs", *loss.columns) if loss.columns else ()
        flags = "loss_kwargs" if settings_of_loss(name) else ""
        yield Row(f"loss {name}", flags, " ".join(of_masks), " ".join(update))
    for name, mask in TOKEN_MASKS.items():
        if name not in COLUMNS:
            flags = "old_log_probs" if "old_log_probs" in mask.columns else ""
            yield Row(f"token_masks {name}", flags, " ".join(mask.columns))


DECLARED = (*_declared_rows(),)
TABLE: tuple[Row, ...] = (
    Row("", "run_name output_dir config seed dry_run memory_check resume record replay stage_timeout track"),
    Row("", "model compute_dtype attn_implementation trust_remote_code lora_rank"),
    Row("", "compile use_liger_kernel"),
    Row("", "sharding dp_replicate_size sequence_parallel_size tensor_parallel_size cpu_offload micro_batch_tokens"),
    Row("", "dataset_class max_prompt_length overlong_prompts chat_template_kwargs allow_special_tokens"),
    Row("", "columns prompt_template system_prompt chat_template"),
    Row("", "rollout_gpus max_response_length stop multi_turn.tools multi_turn.interaction agent"),
    Row("", "reward reward_kwargs reward_workers sandbox_level reward_failure_score reward_model val_files val_only"),
    Row("", "shadow_reward"),
    Row("no val_only", "train_files train_weights max_train_samples loader_workers prompt_sampling async_level"),
    Row("no val_only", "temperature top_p top_k min_p max_mismatch"),
    Row("no val_only", "prompts_per_step group_size num_mini_batches update_epochs total_steps profile_steps plan"),
    Row("no val_only", "lr lr_schedule warmup_steps weight_decay adam_betas max_grad_norm reduce_each_micro_batch"),
    Row("no val_only", "gradient_checkpointing routing_replay save_every save_rollouts export_model"),
    Row("no val_only", "stop_when max_seconds keep_best"),
    Row("no val_only", "adv_estimator loss loss_agg_mode entropy_coef entropy_target kl_coef"),
    Row("no val_only", "rollout_correction.level rollout_correction.reject overlong_buffer overlong_filtering"),
    Row("no val_only", "token_masks"),
    Row("no val_only", "gamma gae_lambda gae_lambda_policy length_adaptive_alpha"),
    Row("no val_only", "critic_model critic_lr critic_warmup_steps cliprange_value"),
    # the run
    Row("no resume never", "resume_override"),
    Row("save_every or keep_best", "keep_checkpoints"),
    # model and data
    Row("lora_rank", "lora_alpha lora_target_modules"),
    Row("no lora_rank and no val_only", "freeze"),
    Row("attn_implementation auto|packed_sdpa|varlen", "share_prompts"),
    Row("vision", "vision_kwargs"),
    Row("no prompt_sampling variance* and no val_only", "shuffle"),
    # rollouts and rewards
    Row("no replay", "rollout_engine"),
    Row("rollout_engine vllm", "rollout_tensor_parallel_size gpu_memory_utilization vllm_kwargs"),
    Row("async_level", "async_order"),
    Row("multi_turn.tools or multi_turn.interaction", " ".join(f"multi_turn.{name}" for name in LIMITS.split())),
    Row("multi_turn.tools or multi_turn.interaction or agent", "multi_turn.context_window multi_turn.compact_at"),
    Row("multi_turn.compact_at", "multi_turn.compact_prompt"),
    Row("multi_turn.tools", "multi_turn.parser multi_turn.max_tool_calls"),
    Row("agent", "agent_kwargs multi_turn.parser multi_turn.max_turn_tokens"),
    Row("agent", "multi_turn.reward_coef"),
    Row("no reward_workers 0", "reward_timeout reward_memory"),
    Row("no adv_estimator gdpo", "reward_weights"),
    Row("reward_model and no adv_estimator gdpo", "reward_model_coef"),
    Row("overlong_buffer", "overlong_factor"),
    # validation
    Row("val_files and no val_files none and no val_only", "val_before_train val_every"),
    Row("val_only or val_before_train or val_every", "val_reward val_samples val_temperature val_kwargs"),
    Row("val_only or val_before_train or val_every", "max_val_samples"),
    # advantages
    Row("no group_size 1 and no val_only or zero_variance keep", "zero_variance"),
    Row("zero_variance refill", "max_gen_batches"),
    Row("no rollout_correction.level measure and no val_only", f"{WEIGHTS} rollout_correction.batch_normalize"),
    Row("routing_replay R2", "old_log_probs", update="old_log_probs routed_experts"),
    Row("correction", "old_log_probs", DRIFT),
    # losses
    Row("no loss gpg and no val_only", "old_log_probs"),
    Row("loss vanilla and ratio", "clip_ratio_low clip_ratio_high clip_ratio_c"),
    Row("loss_agg_mode seq-mean-token-sum-norm", "loss_scale_factor"),
    # KL
    Row("kl_coef", "kl_estimator kl_placement"),
    Row("kl_placement loss", "", update="ref_log_prob"),
    Row("kl_estimator *_unbiased", "old_log_probs"),
    Row("kl_placement reward", "kl_target old_log_probs", "old_log_probs ref_log_prob"),
    Row("kl_target", "kl_horizon"),
    *DECLARED,
)  # fmt: skip


class Reads:
    """What a run with these Args reads. facts: of FACTS, where they are known."""

    def __init__(self, args: ScriptArgs, **facts: Any):
        flags = {name: value for name, value, _ in walk(args)}
        updates, off_policy = args.num_mini_batches * args.update_epochs, args.old_log_probs == "rollout"
        ratio = updates > 1 or off_policy or args.zero_variance == "refill"  # whose leftovers are of older weights
        known = {"vision": True, "correction": args.rollout_correction.settings(), "ratio": ratio}
        known["rollout_engine"] = args.rollout.allowed_engine
        self._values = flags | known | facts
        self._read: dict[str, bool] = {}

    def reads(self, flag: str) -> bool:
        """Also one that is not in the table, a script's own, or not a flag of this script."""
        if flag not in self._read:
            self._read[flag] = True  # for a row about the flag itself
            rows = rows_with(flag)
            self._read[flag] = flag not in self._values or not rows or any(self.holds(row.when) for row in rows)
        return self._read[flag]

    def holds(self, when: str) -> bool:
        return not when or any(all(map(self._is, terms.split(" and "))) for terms in when.split(" or "))

    def _is(self, term: str) -> bool:
        """Whether the choice is made, by a flag that is read."""
        negated, name, patterns = _parts(term)
        return (self._has(name, patterns) and self.reads(name)) != negated

    def _has(self, name: str, patterns: list[str]) -> bool:
        value = self._values.get(name)  # None: not a flag of this script
        if patterns:
            words = value if isinstance(value, tuple) else [value]
            texts = [str(word).partition("=")[0] for word in words]  # of NAME=VALUE the name
            return any(fnmatchcase(text, pattern) for text in texts for pattern in patterns)
        return any(value) if isinstance(value, tuple) else bool(value)

    def columns(self) -> tuple[set[str], set[str]]:
        """The columns that `add_advantages` and `update` read."""
        rows = [row for row in TABLE if row.columns + row.update and self.holds(row.when)]
        return {c for row in rows for c in row.columns.split()}, {c for row in rows for c in row.update.split()}

    def needs_pass(self) -> Iterator[str]:
        """The choices that need the trainer's own pass over the responses before the update: for entropies, squared
        scores, or pi_old / pi_rollout, which would be 1."""
        for row in TABLE:
            if not {*OF_THE_PASS}.isdisjoint(f"{row.columns} {row.update}".split()) and self.holds(row.when):
                yield _said(*_parts(row.when)[1:])

    def why_not(self, flag: str) -> str:
        """Why nothing reads the flag: with ..., without ..."""
        present: list[str] = []
        missing: dict[str, list[str]] = {}
        for term in re.split(" and | or ", " or ".join(row.when for row in rows_with(flag))):
            negated, name, patterns = _parts(term)
            if self._is(term) or name == flag:
                continue
            if negated:
                present += [_said(name, patterns)]
            elif self._has(name, patterns):  # but nothing reads it either
                return self.why_not(name)
            else:
                missing.setdefault(name, []).extend(patterns)
        without = [_said(name, patterns) for name, patterns in missing.items()]
        return " and ".join(
            f"{word} {_join(names)}" for word, names in (("with", present), ("without", without)) if names
        )


@cache
def rows_with(flag: str) -> list[Row]:
    return [row for row in TABLE if any(fnmatchcase(flag, pattern) for pattern in row.flags.split())]


def _parts(term: str) -> tuple[bool, str, list[str]]:
    """Whether it is a "no", the name, the patterns of values; without any, it is about whether the flag is on."""
    name, _, patterns = term.removeprefix("no ").partition(" ")
    return term.startswith("no "), name, patterns.split("|") if patterns else []


def _said(name: str, patterns: list[str]) -> str:
    return f"{FACTS.get(name) or as_flag(name)} {_join(patterns)}".rstrip()


def _join(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def check_read(args: ScriptArgs, **facts: Any) -> None:
    """Raises InputError for a given flag that the run does not read, if it would change the loss or the samples. The
    others become `args.no_effect`."""
    run, whole = Reads(args, **facts), Reads(args, **facts | NOTED)
    notes: dict[str, list[str]] = {}
    for name, _, marks in walk(args):
        if name not in args.given or run.reads(name):
            continue
        noted = whole.reads(name)
        why = (run if noted else whole).why_not(name)
        changes_results = {OnResume.MAY_CHANGE, OnResume.NOT_COMPARED}.isdisjoint(marks) or name in NEVER_IDLE
        if changes_results and not noted:
            raise InputError(f"{as_flag(name)} has no effect {why}: drop it")
        notes.setdefault(why, []).append(as_flag(name))
    if args.loss_kwargs and run.reads("loss_kwargs") and not run.holds("ratio"):
        settings = settings_of_loss(args.loss)
        given = [name for name in read_words("--loss-kwargs", args.loss_kwargs) if settings[name].of_ratio]
        notes.setdefault(f"without {FACTS['ratio']}", []).extend(f"--loss-kwargs {name}" for name in given)
    args.no_effect = tuple(f"{', '.join(flags)} ({why})" for why, flags in notes.items() if flags)
