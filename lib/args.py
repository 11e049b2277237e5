"""Flags: read from the command line and checked before torch is imported, which takes seconds; no torch here.

`read_flags` is a script's first act. What needs a model, data or a process group is checked in main().
"""

import contextlib
import importlib.util
import io
import json
import math
import operator
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import tyro
from annotated_types import Ge, Gt, Interval, Le, Lt

from lib import InputError, is_first_on_node, launched_ranks, report_mistake
from lib.secrets import secret_in
from lib.user_code import load_object

T = TypeVar("T")
AdvEstimator = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "maxrl",
    "grpo_passk",
    "grpo_leave_one_out",
    "grpo_batch_std",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]
"""names in lib/core_algos/advantages.py, without the estimators that ppo.py and remax.py are for"""
PolicyLoss = Literal[
    "vanilla",
    "gspo",
    "cispo",
    "geo_mean",
    "sapo",
    "gpg",
    "reinforce",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "two_sided",
    "decoupled",
    "clip_cov",
    "kl_cov",
]
"""names in lib/core_algos/policy_losses.py"""
HOLDS = {Ge: operator.ge, Gt: operator.gt, Le: operator.le, Lt: operator.lt}
WORDS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<split>\w+))?")


def read_flags(args_class: type[T], check: Callable[[T], None]) -> T:
    """Args of the command line, for which `check` raises no InputError. A mistake ends the process with exit code 2."""
    said = io.StringIO()  # by tyro, which a launcher's report wants too
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(sys.stdout if is_first_on_node() else said):
            args = tyro.cli(args_class)
        sys.stderr.write(said.getvalue())
        check(args)
    except InputError as error:
        report_mistake(f"error: {error}")
        sys.exit(2)
    except SystemExit as stop:
        if stop.code:
            report_mistake(said.getvalue().strip())
        raise
    return args


def as_flag(name: str) -> str:
    """The flag of a field of Args."""
    return f"--{name.replace('_', '-')}"


def parse_json(args: Any, name: str) -> dict:
    """The JSON object of the field `name`, its numbers finite. Raises InputError."""
    text = getattr(args, name)
    try:
        settings = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise InputError(f"{as_flag(name)}: nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{as_flag(name)} {text}: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise InputError(f'{as_flag(name)} {text}: give a JSON object, such as {{"name": 1}}')
    return settings


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


def check_ranges(args: Any) -> None:
    """Raises InputError for a number, alone or in a tuple, that is not finite or not in the range at its field."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value, bounds = getattr(args, name), []
        for given in getattr(hint, "__metadata__", ()):
            bounds += given if isinstance(given, Interval) else [given]
        for number in value if isinstance(value, tuple) else [value]:
            if not isinstance(number, int | float):
                continue
            if not abs(number) < math.inf:
                raise InputError(f"{as_flag(name)} {number}: must be a finite number")
            if not all(HOLDS[type(bound)](number, *astuple(bound)) for bound in bounds):
                must = " and ".join(f"{WORDS[type(bound)]} {astuple(bound)[0]}" for bound in bounds)
                raise InputError(f"{as_flag(name)} {number}: must be {must}")


# ---- sizes ---------------------------------------------------------------------------------------


@dataclass
class Sizes:
    """The arithmetic of a step. No prefix: over all ranks; local: on one rank."""

    local_prompts: int
    local_rows: int
    local_mini_batch_rows: int
    updates_per_step: int


def step_sizes(args: Any, world_size: int) -> Sizes:
    """Checks the batch arithmetic. Raises InputError with the formula and its numbers."""
    if not args.val_only and args.prompts_per_step % (world_size * args.num_mini_batches):
        raise InputError(
            "prompts_per_step / (ranks x num_mini_batches) must be a whole number: "
            f"{args.prompts_per_step} / ({world_size} x {args.num_mini_batches}) = "
            f"{args.prompts_per_step / (world_size * args.num_mini_batches):g}"
        )
    for name in ("sequence_parallel", "tensor_parallel"):
        if world_size % getattr(args, name):
            raise InputError(f"{as_flag(name)} {getattr(args, name)}: must divide the number of ranks, {world_size}")
    if args.sequence_parallel * args.micro_batch_tokens < args.max_prompt_length + args.max_response_length:
        raise InputError(
            "sequence_parallel x micro_batch_tokens must hold one row, max_prompt_length + max_response_length: "
            f"{args.sequence_parallel} x {args.micro_batch_tokens} < "
            f"{args.max_prompt_length} + {args.max_response_length}"
        )
    local_prompts = args.prompts_per_step // world_size
    local_rows = local_prompts * args.group_size
    return Sizes(
        local_prompts, local_rows, local_rows // args.num_mini_batches, args.num_mini_batches * args.update_epochs
    )


# ---- what all scripts check ----------------------------------------------------------------------


def check_common_flags(args: Any) -> None:
    """Raises InputError for values and combinations that make no sense in any of the scripts."""
    check_secrets(args)
    check_ranges(args)
    for field in fields(args):
        if field.default == "{}":
            parse_json(args, field.name)
    world_size = args.dry_run or launched_ranks()
    step_sizes(args, world_size)
    check_engine(args.rollout_engine, args.engine_ranks, world_size)
    _check_models_and_files(args)
    if not args.dry_run:
        check_output_dir(args.output_dir)
    _check_patterns(args)
    _check_sampling(args)
    _check_kl(args)
    _check_parallel(args)
    _check_reward(args)
    if args.resume == "auto" and not args.run_name:
        raise InputError("--resume auto needs the --run-name of the run to resume")


def check_secrets(args: Any) -> None:
    """Raises InputError, which does not repeat it, for a key or password in a flag."""
    for field in fields(args):
        if found := secret_in(getattr(args, field.name), as_flag(field.name)):
            raise InputError(
                f"{found}; flags stand in config.json and logs: put it in the environment and name the variable "
                "(docs/security.md)"
            )


def check_engine(name: str, ranks: int, world_size: int) -> None:
    """Raises InputError when there is no such engine or it cannot run here."""
    if world_size % ranks:
        raise InputError(f"--engine-ranks {ranks}: the number of ranks, {world_size}, must be a multiple of it")
    if ranks > 1 and name != "vllm":
        raise InputError(
            f"--engine-ranks {ranks} splits a vLLM engine: it needs --rollout-engine vllm (a server is split by its "
            "own --tensor-parallel-size)"
        )
    if name not in ("hf", "vllm") and not all(url.startswith(("http://", "https://")) for url in name.split(",")):
        raise InputError(f"--rollout-engine {name}: must be hf, vllm or the URL of a vLLM server (http://host:port)")
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise InputError("--rollout-engine vllm: vLLM is not installed; use --rollout-engine hf")


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


def check_source(source: str) -> None:
    """Raises InputError unless it is a file, a folder or may be the id of a data set on the hub."""
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix in (".parquet", ".json", ".jsonl") or not HUB_ID.fullmatch(source)):
        raise InputError(f"{path}: no such file; check the path, or write it with one of the scripts in data/")


def _check_models_and_files(args: Any) -> None:
    if not args.dry_run:
        check_model_path(args.model)
        if args.reward_model:
            check_model_path(args.reward_model, "--reward-model")
    if not args.dataset_class:  # which may take other sources than ours
        validates = args.val_before_train or args.val_every or args.val_only
        for source in (*(() if args.val_only else args.train_files), *(args.val_files if validates else ())):
            check_source(source)


def check_output_dir(folder: str) -> None:
    """Raises InputError for a folder in which nothing can be written, or that cannot be made."""
    there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if not there.is_dir():
        raise InputError(f"--output-dir {folder}: {there} is not a folder")
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        raise InputError(f"--output-dir {folder}: {there} cannot be written: {error.strerror}") from error


def _check_patterns(args: Any) -> None:
    for name in ("freeze", "lora_target_modules"):
        try:
            re.compile(getattr(args, name))
        except re.error as error:
            raise InputError(f"{as_flag(name)} {getattr(args, name)}: not a regular expression: {error}") from error


def _check_sampling(args: Any) -> None:
    if args.val_samples > 1 and args.val_temperature == 0:
        raise InputError(f"--val-samples {args.val_samples} are all the same at --val-temperature 0: raise it")
    if args.async_level and args.rollout_engine in ("hf", "vllm"):
        raise InputError(
            f"--async-level {args.async_level} needs --rollout-engine http://host:port, not a shared device"
        )
    if args.async_level and parse_json(args, "multi_turn"):
        raise InputError(f"--async-level {args.async_level}: episodes of --multi-turn do not run ahead; drop one")
    if args.old_log_probs == "rollout" and parse_json(args, "rollout_correction"):
        raise InputError("--old-log-probs rollout is the correction itself: drop it or --rollout-correction")
    reading = {"top_entropy", "optimal_token_baseline", "tir_optimal_token_baseline"} & {
        *parse_json(args, "token_masks"),
        getattr(args, "adv_estimator", None),
    }
    if args.old_log_probs == "rollout" and reading:
        raise InputError(f"--old-log-probs rollout spares the forward pass that {reading.pop()} needs: drop one")


def _check_kl(args: Any) -> None:
    if args.kl_target is not None and not (args.kl_coef and args.kl_placement == "reward"):
        raise InputError("--kl-target steers the KL in the reward: it needs --kl-placement reward and a --kl-coef")
    if args.kl_target is not None and args.kl_horizon <= 0.2 * args.prompts_per_step * args.group_size:
        raise InputError(f"--kl-horizon {args.kl_horizon}: must be above 0.2 x the responses of a step, or beta dies")


def _check_parallel(args: Any) -> None:
    for name in ("sequence_parallel", "tensor_parallel"):
        if getattr(args, name) > 1 and not (args.padding_free and args.attn_implementation == "packed_sdpa"):
            raise InputError(
                f"{as_flag(name)} {getattr(args, name)}: needs --padding-free and --attn-implementation packed_sdpa"
            )
    without_tensor_parallel = {
        "--rollout-engine hf": args.rollout_engine == "hf",
        "--lora-rank": args.lora_rank > 0,
        "--replicas": args.replicas > 1,
        "--sequence-parallel": args.sequence_parallel > 1,
        "--dry-run": args.dry_run > 0,
    }
    for name, given in without_tensor_parallel.items():
        if args.tensor_parallel > 1 and given:
            raise InputError(f"--tensor-parallel {args.tensor_parallel} does not work with {name}")


def _check_reward(args: Any) -> None:
    if not (args.reward or args.reward_model or parse_json(args, "multi_turn").get("interaction")):
        raise InputError("--reward without a scorer: name one, or a --reward-model")
    for name in ("reward", "val_reward"):
        for spec in getattr(args, name):
            if spec != "data_source":
                load_object(as_flag(name), spec)
    if len(args.reward_weights) not in (0, len(args.reward)):
        raise InputError(
            f"--reward-weights has {len(args.reward_weights)} numbers for the {len(args.reward)} scorers of --reward"
        )
