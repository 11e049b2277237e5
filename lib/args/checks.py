"""The batch sizes of a step, and the ranks that train. Checks of flags against each other, and of the models and files
that they name."""

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lib import InputError, is_first_on_node, launched_ranks, node_begins
from lib.args.groups import PACKED
from lib.args.reads import Reads, check_read
from lib.args.run import StopWhen
from lib.args.script import ScriptArgs
from lib.cli.flags import as_flag

HUB_ANSWER_S = 5.0
BY_STD = ("grpo_passk", "gigpo", "mt_grpo")  # unless --adv-kwargs norm_adv_by_std_in_grpo=False
GIVE_NO_REWARD = {"calculator", "python", "zoom", "bash", "search", "mcp"}  # to a call: kinds of --multi-turn.tools
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+)(?=:))?(:(?P<split>\w+))?")
URL = re.compile(r"[a-z][a-z0-9+.-]*://.")  # s3://bucket/model: lib/data/remote.py copies what is there


@dataclass
class Sizes:
    """The batch sizes of a step. Those named local_ are per rank."""

    group_size: int
    num_mini_batches: int
    update_epochs: int
    local_prompts: int

    @property
    def local_rows(self) -> int:
        return self.local_prompts * self.group_size

    @property
    def updates_per_step(self) -> int:
        return self.num_mini_batches * self.update_epochs


def training_ranks(args: ScriptArgs) -> int:
    """The ranks that train, of this job or of the one that --dry-run asks about. Raises InputError if there is none."""
    ranks, engines = args.run.dry_run or launched_ranks(), args.rollout.rollout_gpus
    if engines and ranks == 1 and not args.run.dry_run:
        why = "this is one process, and it trains: start several by accelerate launch (docs/scaling.md)"
        raise InputError(f"--rollout-gpus {engines}: {why}")
    if engines >= ranks:
        raise InputError(f"--rollout-gpus {engines}: of {ranks} ranks at least one must train: at most {ranks - 1}")
    return ranks - engines


def step_sizes(args: ScriptArgs, world_size: int) -> Sizes:
    """The batch sizes of a step. Raises InputError, with the formula and its numbers, where they do not fit."""
    prompts, parts = args.prompts_per_step, world_size * args.num_mini_batches
    if not args.validation.val_only and prompts % parts:
        raise InputError(
            "prompts_per_step / (ranks x num_mini_batches) must be a whole number: "
            f"{prompts} / ({world_size} x {args.num_mini_batches}) = {prompts / parts:g}"
        )
    for name, size in args.shard.parallel_sizes().items():
        if world_size % size:
            raise InputError(f"{as_flag(name)} {size}: must divide the number of ranks, {world_size}")
    P, T = args.data.max_prompt_length, args.rollout.max_response_length
    ranks, tokens = args.shard.sequence_parallel_size, args.optimizer.micro_batch_tokens
    if tokens != "auto" and ranks * tokens < P + T:
        raise InputError(
            "sequence_parallel_size x micro_batch_tokens must hold one row, max_prompt_length + max_response_length: "
            f"{ranks} x {tokens} < {P} + {T}"
        )
    return Sizes(args.group_size, args.num_mini_batches, args.update_epochs, prompts // world_size)


def least_micro_batch(args: ScriptArgs) -> int:
    """The tokens that --micro-batch-tokens auto is at least: it holds one row."""
    row = args.data.max_prompt_length + args.rollout.max_response_length
    return max(16384, -(-row // args.shard.sequence_parallel_size))


def engine_rows(args: ScriptArgs, ranks: int) -> int:
    """The rows that a vLLM engine samples at a time (max_num_seqs): what it has of a step, from 256 to 1024. Each takes
    counts of the whole vocabulary: 0.6 GiB for 1024 rows of 152k tokens. ranks: those that train."""
    rollout = args.rollout
    engines = max(1, (rollout.rollout_gpus or ranks) // rollout.rollout_tensor_parallel_size)
    rows = args.prompts_per_step * args.group_size * (1 + rollout.async_level) // engines
    return min(max(256, rows), 1024)


# ---- checks ------------------------------------------------------------------------------------


def check_common_flags(args: ScriptArgs) -> None:
    """Raises InputError for combinations of flags that make no sense in any script."""
    args.optimizer.lr = args.lr
    world_size = training_ranks(args)
    step_sizes(args, world_size)
    _check_engine_ranks(args, world_size)
    _check_models_and_files(args)
    _check_sampling(args)
    if args.rollout.agent and args.multi_turn.enabled:
        name = "tools" if args.multi_turn.tools else "interaction"
        why = "an agent has its own tools and decides when its episode ends"
        raise InputError(f"--agent with --multi-turn.{name}: {why}: drop one")
    _check_context(args)
    _ = args.loss_settings, args.mask_settings  # raises InputError for a wrong --loss-kwargs or --token-masks
    _check_groups(args)
    _check_kl(args)
    _check_parallel(args)
    _check_goals(args)
    if args.validation.val_only and (args.run.record or args.run.replay):
        flag = "--record" if args.run.record else "--replay"
        raise InputError(f"{flag} is about training steps, and --val-only has none: drop one")
    turns = args.multi_turn
    of_episodes = turns.interaction or args.rollout.agent or any(spec.startswith("bash:") for spec in turns.tools)
    if not (args.reward.reward or args.reward.reward_model or of_episodes):
        raise InputError("--reward without a scorer: name one, or a --reward-model")
    check_read(args)


def _check_context(args: ScriptArgs) -> None:
    turns, prompt = args.multi_turn, args.data.max_prompt_length
    turn, window = turns.max_turn_tokens, turns.context_window
    if window and window <= prompt:
        raise InputError(f"--multi-turn.context-window {window}: must be above --max-prompt-length {prompt}")
    if not turns.compact_at:
        return
    flag = f"--multi-turn.compact-at {turns.compact_at}"
    if not turn:
        raise InputError(f"{flag} needs --multi-turn.max-turn-tokens, which also limits a summary")
    if turns.compact_at <= prompt + turn:
        sizes = f"--max-prompt-length {prompt} + --multi-turn.max-turn-tokens {turn}"
        raise InputError(f"{flag}: must be above the tokens of the prompt and a summary, {sizes}")
    if args.adv_estimator == "mt_grpo":
        why = "it compares turns by their number, which a summary shifts"
        raise InputError(f"{flag} with --adv-estimator mt_grpo: {why}: use gigpo or grpo")


def _check_goals(args: ScriptArgs) -> None:
    validates, best, stop = args.validation.enabled, args.run.keep_best, args.run.stop_when
    if best and not (validates and args.validation.val_every):
        raise InputError(f"--keep-best {best} needs validations during training: --val-files and --val-every")
    if stop and StopWhen.parse(stop).metric.startswith("val/") and not validates:
        raise InputError(f"--stop-when {stop!r} needs validation: --val-files and --val-every")


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


def _check_models_and_files(args: ScriptArgs) -> None:
    model, train_files = args.model.model, args.data.train_files
    neither = "without both, the embedded arithmetic task runs"
    if not model:
        given = f"--train-files {train_files[0]} without" if train_files else "no"
        raise InputError(f"{given} --model: name the model; {neither}")
    if not args.run.dry_run:
        check_model_path(model)
        if args.reward.reward_model:
            check_model_path(args.reward.reward_model, "--reward-model")
    elif model.endswith(".gguf"):
        raise InputError(f"--dry-run with --model {model}: no estimate for .gguf: name an id or a folder")
    elif not Path(model).exists() and not URL.match(model):
        check_hub(model)
    if args.validation.val_only:
        train_files = ()
    elif not train_files:
        raise InputError(f"--model {model} without --train-files: name the files to train on; {neither}")
    val_files = args.validation.val_files if args.validation.enabled else ()
    for source in (*train_files, *val_files):
        if not args.data.dataset_class and not URL.match(source):  # your own class may take other sources
            check_source(source)


def _check_sampling(args: ScriptArgs) -> None:
    if (sampling := args.data.prompt_sampling) != "uniform" and args.group_size == 1:
        raise InputError(f"--prompt-sampling {sampling} compares a prompt's responses: it needs --group-size 2")
    asked = args.rollout.starts_vllm and not args.rollout.auto_engine
    if asked and not args.run.replay and importlib.util.find_spec("vllm") is None:
        raise InputError("--rollout-engine vllm: vLLM is not installed; use --rollout-engine hf")
    for choice in Reads(args).needs_pass() if args.old_log_probs == "rollout" else ():
        raise InputError(f"--old-log-probs rollout skips the forward pass that {choice} needs: drop one")
    correction = args.rollout_correction
    if args.loss == "decoupled" and correction.settings() and correction.level != "measure":
        why = "a rollout correction would apply its weight pi_old / pi_rollout twice"
        raise InputError(f"--loss decoupled: {why}: drop it, or set --rollout-correction.level measure")


def _check_groups(args: ScriptArgs) -> None:
    estimator, kwargs, turns = args.adv_estimator, args.adv_settings, args.multi_turn
    episodes = turns.enabled or args.rollout.agent
    is_zero = kwargs.get("singleton") == "zero"
    if args.group_size == 1 and (estimator in ("maxrl", "grpo_passk") or is_zero):
        flag = "--adv-kwargs singleton=zero" if is_zero else f"--adv-estimator {estimator}"
        raise InputError(f"{flag} with --group-size 1: every advantage is 0, and nothing trains; raise --group-size")
    if args.zero_variance == "drop_from_denominator" and args.loss_agg_mode == "token-sum":
        raise InputError("--zero-variance drop_from_denominator: --loss-agg-mode token-sum has none; use mask")
    if "epsilon" in kwargs and kwargs.get("norm_adv_by_std_in_grpo") is False:
        raise InputError("--adv-kwargs epsilon has no effect with norm_adv_by_std_in_grpo=False: drop it")
    if estimator in ("gigpo", "mt_grpo"):
        _check_turns(args)
    if estimator != "gdpo":
        return
    if not args.reward_keys:
        raise InputError("--adv-estimator gdpo weighs several rewards: name them, --adv-kwargs reward_keys=a,b")
    if twice := [key for key in args.reward_keys if args.reward_keys.count(key) > 1]:
        raise InputError(f"--adv-kwargs reward_keys names {twice[0]} twice: weigh it by reward_weights")
    ignored = {
        "--kl-placement loss": args.kl_coef > 0 and args.kl_placement == "reward",
        "--overlong-buffer 0": args.overlong_buffer > 0,
        "--multi-turn.reward-coef 0": episodes and turns.reward_coef,
        "reward_keys=...,reward_model": args.reward.reward_model and "reward_model" not in args.reward_keys,
    }
    if needed := [flag for flag, is_ignored in ignored.items() if is_ignored]:
        raise InputError(f"--adv-estimator gdpo weighs its reward_keys and ignores all other rewards: {needed[0]}")
    if 0 in kwargs.get("reward_weights", ()):
        raise InputError("--adv-kwargs reward_weights: a reward of weight 0 trains nothing: drop it from reward_keys")


def _check_turns(args: ScriptArgs) -> None:
    flag, turns = f"--adv-estimator {args.adv_estimator}", args.multi_turn
    plays_agent = args.adv_estimator == "mt_grpo" and args.rollout.agent  # which may reward its answers
    if not (turns.enabled or plays_agent):
        raise InputError(f"{flag} credits the turns of an episode: it needs --multi-turn.tools or .interaction")
    if turns.enabled and turns.max_turns == 1:
        raise InputError(f"{flag} with --multi-turn.max-turns 1: an episode has one turn, so this is GRPO: use grpo")
    if args.loss == "geo_mean":
        why = "its gradient uses the row's mean advantage, so single turns get no credit"
        raise InputError(f"{flag} with --loss geo_mean: {why}; use --loss gspo")
    if args.adv_estimator == "mt_grpo" and not turns.reward_coef:
        raise InputError(f"{flag} compares the rewards of turns: --multi-turn.reward-coef 0 leaves none")
    silent = [spec for spec in turns.tools if spec.partition(":")[0] in GIVE_NO_REWARD]
    if args.adv_estimator == "mt_grpo" and turns.enabled and not turns.interaction and len(silent) == len(turns.tools):
        why = f"--multi-turn.tools {' '.join(silent)} give none: write a tool that does, or use gigpo"
        raise InputError(f"{flag} compares the rewards of turns, and {why}")


def _check_kl(args: ScriptArgs) -> None:
    in_reward, estimator = args.kl_placement == "reward", args.adv_estimator
    if args.kl_target is not None and args.kl_horizon <= 0.2 * args.prompts_per_step * args.group_size:
        raise InputError(f"--kl-horizon {args.kl_horizon}: must be above 0.2 x the responses of a step, or beta hits 0")
    by_std = estimator in BY_STD and args.adv_settings.get("norm_adv_by_std_in_grpo", True)
    if args.kl_coef > 0 and in_reward and (by_std or estimator in ("grpo", "grpo_leave_one_out", "maxrl")):
        why = "it divides by a group's deviation or mean, which with equal scores comes from the KL alone"
        raise InputError(f"--kl-placement reward with --adv-estimator {estimator}: {why}: take loss, or rloo")
    if estimator == "maxrl" and args.overlong_buffer:
        raise InputError("--adv-estimator maxrl needs rewards of 0 or more: add --overlong-buffer 0")


def _check_parallel(args: ScriptArgs) -> None:
    for name, size in args.shard.parallel_sizes().items():
        if size > 1 and args.model.attn_implementation not in PACKED:
            raise InputError(f"{as_flag(name)} {size}: needs --attn-implementation packed_sdpa or varlen")
    without_tensor_parallel = {
        "--rollout-engine hf": args.rollout.allowed_engine == "hf",
        "--lora-rank": args.model.lora_rank > 0,
        "--dp-replicate-size": args.shard.dp_replicate_size > 1,
        "--sequence-parallel-size": args.shard.sequence_parallel_size > 1,
        "--dry-run": args.run.dry_run > 0,
        "--compile": args.model.compile,
    }
    if args.validation.enabled:
        without_tensor_parallel["the validation of --replay (--val-every 0 --no-val-before-train)"] = bool(
            args.run.replay
        )
    wrong = [name for name, is_given in without_tensor_parallel.items() if is_given]
    if wrong and (size := args.shard.tensor_parallel_size) > 1:
        raise InputError(f"--tensor-parallel-size {size} does not work with {wrong[0]}")


def check_model_path(path: str, flag: str = "--model") -> None:
    """Raises InputError for a folder that cannot hold a model; what is at a URL is checked when it is copied."""
    local = Path(path)
    if URL.match(path):
        return
    if path.endswith(".gguf"):
        if not local.is_file():
            raise InputError(f"{flag} {path}: no such file")
    elif local.is_dir():
        if not (local / "config.json").is_file():
            raise InputError(f"{flag} {path}: no config.json there; give a folder saved by save_pretrained")
        if not (any(local.glob("*.safetensors")) or any(local.glob("pytorch_model*.bin"))):
            raise InputError(f"{flag} {path}: no weights (*.safetensors) there; is the download complete?")
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
        raise InputError(f"{path}: no such file; check the path, or write it with a script in data/")
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
