"""Checks of flags against each other, and of the models and files that they name."""

import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path

from lib import InputError, is_first_on_node, node_begins
from lib.args.groups import TOY, TOY_VAL
from lib.args.script import ScriptArgs
from lib.args.sizes import step_sizes, training_ranks
from lib.cli.flags import ReadIf, as_flag

HUB_ANSWER_S = 5.0
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<split>\w+))?")
PASS_READ_BY = {"optimal_token_baseline", "tir_optimal_token_baseline", "top_entropy"}  # entropies, or sums of pi^2
PASS_READ_BY |= {"decoupled", "m2po", "off_policy_sequence"}  # pi_old / pi_rollout, which would be 1
"""estimators, losses and token masks that need the trainer's own pass over the responses before the update"""

CLIP_RATIOS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
CLIP_COV = ("token_masks.clip_cov_ratio", "token_masks.clip_cov_bounds")
WEIGHTS = ("rollout_correction.action", "rollout_correction.bounds", "rollout_correction.batch_normalize")
SUM_NORM = "seq-mean-token-sum-norm"

# Not here: flags of what a run shows, saves and validates, whose switch is off on purpose. --loss-kwargs and
# --adv-kwargs are checked against the parameters of the loss and the estimator (lib/core_algos/settings.py).
CONDITIONS = (
    ReadIf(("lora_alpha", "lora_target_modules"), lambda a: a.model.lora_rank, "without --lora-rank"),
    ReadIf(("freeze",), lambda a: not a.model.lora_rank, "with --lora-rank, which trains the adapters only"),
    ReadIf(("truncation",), lambda a: a.data.may_truncate, "where --filter-overlong-prompts drops longer prompts"),
    ReadIf(("prompt_skip_after",), lambda a: a.data.prompt_sampling == "skip", "without --prompt-sampling skip"),
    ReadIf(("prompt_share",), lambda a: a.data.prompt_sampling != "uniform", "with --prompt-sampling uniform"),
    ReadIf(("shuffle",), lambda a: a.data.prompt_sampling != "variance", "with --prompt-sampling variance"),
    ReadIf(("gpu_memory_utilization",), lambda a: a.rollout.starts_vllm, "where this job starts no vLLM"),
    ReadIf(("reward_weights", "reward_model_coef"), lambda a: a.adv_estimator != "gdpo", "with --adv-estimator gdpo"),
    ReadIf(("reward_model_coef",), lambda a: a.reward.reward_model, "without --reward-model"),
    ReadIf(("reward_timeout", "reward_memory"), lambda a: a.reward.reward_workers, "with --reward-workers 0"),
    ReadIf(("singleton",), lambda a: a.adv_estimator != "maxrl", "with --adv-estimator maxrl: it is always 0"),
    ReadIf(("singleton",), lambda a: a.adv_estimator != "reinforce_plus_plus", "with reinforce_plus_plus: no groups"),
    ReadIf(("adv_kwargs.norm_adv_by_std_in_grpo",), lambda a: a.adv_estimator != "dr_grpo", "with dr_grpo: it is off"),
    ReadIf(("adv_kwargs.epsilon",), lambda a: a.adv_estimator != "dr_grpo", "with dr_grpo: it does not divide"),
    ReadIf(("adv_kwargs.epsilon",), lambda a: a.adv_kwargs.norm_adv_by_std_in_grpo is not False, "without a division"),
    ReadIf(("zero_variance",), lambda a: a.group_size > 1 or a.zero_variance == "keep", "with --group-size 1"),
    ReadIf(("max_gen_batches",), lambda a: a.zero_variance == "refill", "without --zero-variance refill"),
    ReadIf(("overlong_factor",), lambda a: a.overlong_buffer, "with --overlong-buffer 0"),
    ReadIf(CLIP_RATIOS, lambda a: a.loss == "vanilla", "without --loss vanilla (the other losses have --loss-kwargs)"),
    ReadIf(("loss_scale_factor",), lambda a: a.loss_agg_mode == SUM_NORM, f"without --loss-agg-mode {SUM_NORM}"),
    ReadIf(CLIP_COV, lambda a: a.loss == "clip_cov", "without --loss clip_cov"),
    ReadIf(("token_masks.kl_cov_ratio",), lambda a: a.loss == "kl_cov", "without --loss kl_cov"),
    ReadIf(WEIGHTS, lambda a: a.rollout_correction.level != "measure", "with level measure, which has no weights"),
    ReadIf(("kl_estimator", "kl_placement"), lambda a: a.kl_coef, "without --kl-coef"),
    ReadIf(("kl_horizon",), lambda a: a.kl_target is not None, "without --kl-target"),
)


def check_common_flags(args: ScriptArgs) -> None:
    """Raises InputError for combinations of flags that make no sense in any script."""
    world_size = training_ranks(args)
    step_sizes(args, world_size)
    _check_engine_ranks(args, world_size)
    args.multi_turn.check()
    _check_models_and_files(args)
    _set_val_files(args)
    _check_sampling(args)
    _check_groups(args)
    _check_kl(args)
    _check_parallel(args)
    if args.validation.val_only and (args.run.record or args.run.replay):
        flag = "--record" if args.run.record else "--replay"
        raise InputError(f"{flag} is about training steps, and --val-only has none: drop one")
    if not (args.reward.reward or args.reward.reward_model or args.multi_turn.interaction):
        raise InputError("--reward without a scorer: name one, or a --reward-model")


def _check_engine_ranks(args: ScriptArgs, world_size: int) -> None:
    """world_size: the ranks that train."""
    ranks, gpus = args.rollout.rollout_tensor_parallel_size, args.rollout.rollout_gpus
    flag = f"--rollout-tensor-parallel-size {ranks}"
    if (gpus or world_size) % ranks:
        what = f"--rollout-gpus {gpus}" if gpus else f"the number of ranks, {world_size},"
        raise InputError(f"{flag}: {what} must be a multiple of it")
    if gpus and not args.run.dry_run and (cut := node_begins() - world_size) > 0 and cut % ranks:
        where = f"{cut} of the --rollout-gpus {gpus} are on the nodes before this one"
        raise InputError(f"{flag}: a server would be on two nodes, as {where}: that must be a multiple of {ranks}")


def _set_val_files(args: ScriptArgs) -> None:
    """The toy's prompts validate a model that is trained on the toy, or on nothing. Raises InputError for others."""
    validation = args.validation
    if validation.val_files or not validation.enabled:
        return
    own = [file for file in args.data.train_files if not Path(file).expanduser().resolve().is_relative_to(TOY)]
    if own and not validation.val_only:
        raise InputError(f"--train-files {own[0]} without --val-files: name the files to validate on, or none")
    validation.val_files = TOY_VAL


def _check_models_and_files(args: ScriptArgs) -> None:
    model, reward_model = args.model.model, args.reward.reward_model
    if not args.run.dry_run:
        check_model_path(model)
        if reward_model:
            check_model_path(reward_model, "--reward-model")
    elif not Path(model).exists():
        check_hub(model)
    if not args.data.dataset_class:  # your own class may take other sources
        train_files = () if args.validation.val_only else args.data.train_files
        for source in (*train_files, *(args.validation.val_files if args.validation.enabled else ())):
            check_source(source)


def _check_sampling(args: ScriptArgs) -> None:
    if (sampling := args.data.prompt_sampling) != "uniform" and args.group_size == 1:
        raise InputError(f"--prompt-sampling {sampling} compares the responses to a prompt: it needs --group-size 2")
    if args.rollout.starts_vllm and not args.run.replay and importlib.util.find_spec("vllm") is None:
        raise InputError("--rollout-engine vllm: vLLM is not installed; use --rollout-engine hf")
    if args.old_log_probs == "rollout" and args.rollout_correction.settings():
        raise InputError("--old-log-probs rollout is the correction itself: drop it or --rollout-correction")
    names = {args.loss, args.adv_estimator, *args.token_masks.settings(args.loss)}
    if args.old_log_probs == "rollout" and (reading := PASS_READ_BY & names):
        raise InputError(f"--old-log-probs rollout spares the forward pass that {reading.pop()} needs: drop one")
    if args.loss == "decoupled" and args.rollout_correction.settings() and args.rollout_correction.level != "measure":
        why = "--loss decoupled has the weight pi_old / pi_rollout, and a rollout correction would apply it twice"
        raise InputError(f"{why}: drop it, or set --rollout-correction.level measure, which may still reject")


def _check_groups(args: ScriptArgs) -> None:
    estimator, turns = args.adv_estimator, args.multi_turn
    if args.group_size == 1 and (estimator == "maxrl" or args.singleton == "zero"):
        flag = "--adv-estimator maxrl" if estimator == "maxrl" else "--singleton zero"
        raise InputError(f"{flag} with --group-size 1: every advantage is 0, and nothing trains; raise --group-size")
    if (estimator == "gdpo") != bool(args.reward_keys):
        raise InputError("--adv-estimator gdpo and --reward-keys, the rewards that it weighs, go together")
    if estimator != "gdpo":
        return
    ignored = {
        "--kl-placement loss": args.kl_coef > 0 and args.kl_placement == "reward",
        "--overlong-buffer 0": args.overlong_buffer > 0,
        "--multi-turn.reward-coef 0": turns.enabled and turns.reward_coef,
        "--reward-keys ... reward_model": args.reward.reward_model and "reward_model" not in args.reward_keys,
    }
    if needed := [flag for flag, is_ignored in ignored.items() if is_ignored]:
        raise InputError(f"--adv-estimator gdpo weighs --reward-keys and ignores all other rewards: {needed[0]}")
    if 0 in (args.adv_kwargs.reward_weights or ()):
        raise InputError("--adv-kwargs.reward-weights 0: this reward trains nothing: drop it from --reward-keys")


def _check_kl(args: ScriptArgs) -> None:
    if args.kl_target is not None and not (args.kl_coef and args.kl_placement == "reward"):
        raise InputError("--kl-target steers the KL in the reward: it needs --kl-placement reward and a --kl-coef")
    if args.kl_target is not None and args.kl_horizon <= 0.2 * args.prompts_per_step * args.group_size:
        raise InputError(f"--kl-horizon {args.kl_horizon}: must be above 0.2 x the responses of a step, or beta dies")


def _check_parallel(args: ScriptArgs) -> None:
    packed = args.model.padding_free and args.model.attn_implementation in ("auto", "packed_sdpa", "varlen")
    for name, size in args.shard.parallel_sizes().items():
        if size > 1 and not packed:
            raise InputError(f"{as_flag(name)} {size}: needs --padding-free, and packed_sdpa or varlen attention")
    without_tensor_parallel = {
        "--rollout-engine hf": args.rollout.rollout_engine == "hf",
        "--lora-rank": args.model.lora_rank > 0,
        "--dp-replicate-size": args.shard.dp_replicate_size > 1,
        "--sequence-parallel-size": args.shard.sequence_parallel_size > 1,
        "--dry-run": args.run.dry_run > 0,
        "--compile": args.model.compile,
        "the validation of --replay (--val-every 0 --no-val-before-train)": args.run.replay and args.validation.enabled,
    }
    wrong = [name for name, is_given in without_tensor_parallel.items() if is_given]
    if wrong and (size := args.shard.tensor_parallel_size) > 1:
        raise InputError(f"--tensor-parallel-size {size} does not work with {wrong[0]}")


def check_model_path(path: str, flag: str = "--model") -> None:
    """Raises InputError for a folder that cannot hold a model."""
    local = Path(path)
    if path.endswith(".gguf"):
        if not local.is_file():
            raise InputError(f"{flag} {path}: no such file")
    elif local.is_dir():
        if not (local / "config.json").is_file():
            raise InputError(f"{flag} {path}: the folder has no config.json; give a folder saved by save_pretrained")
        if not (any(local.glob("*.safetensors")) or any(local.glob("pytorch_model*.bin"))):
            raise InputError(f"{flag} {path}: the folder has no weights (*.safetensors); is the download complete?")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise InputError(f"{flag} {path}: no such folder")
    else:
        check_hub(path)


def check_source(source: str) -> None:
    """Raises InputError unless `source` is a file, a folder, or could be the id of a data set on the hub."""
    path = Path(source).expanduser()
    if path.exists():
        return
    if path.suffix in (".parquet", ".json", ".jsonl") or not HUB_ID.fullmatch(source):
        raise InputError(f"{path}: no such file; check the path, or write it with one of the scripts in data/")
    check_hub(source)


@cache
def check_hub(name: str) -> None:
    """If the hub does not answer, lets its libraries read their cache only, also in processes that the run starts. They
    would try for 25 s or more for each file."""
    import httpx

    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        return
    try:
        httpx.head(hub, timeout=HUB_ANSWER_S, verify=False)  # whoever answers
    except (httpx.TransportError, httpx.InvalidURL) as error:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are still to be imported
        if imported := sys.modules.get("huggingface_hub.constants"):
            vars(imported)["HF_HUB_OFFLINE"] = True
        if is_first_on_node():
            why = f"{name}: no such path here, and {hub} cannot be reached ({error})"
            print(f"{why}: looking for it in the hub's cache only", file=sys.stderr, flush=True)
