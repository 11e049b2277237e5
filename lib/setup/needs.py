"""What the flags of a run decide before data or a model loads: sizes, columns, correction, dtype, attention."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

from lib import InputError, core_algos
from lib import model as models
from lib.args import Reads, ScriptArgs, Sizes, step_sizes, training_ranks
from lib.columns import COLUMNS
from lib.distributed import all_reduce_max, has_flash_attention, on_first_rank, total_memory
from lib.rollout import engine_class

ON_CPU = "fp8_per_channel"
ONLINE_FP8 = ("fp8", "fp8_per_tensor", ON_CPU, "fp8_per_block")  # vLLM quantizes the 16-bit weights that it loads


@dataclass(frozen=True)
class Needs:
    """What a run needs, as its flags say (`check`)."""

    sizes: Sizes
    dtype: torch.dtype  # in which models compute
    loss_scale_factor: float  # --loss-scale-factor, or its default
    correction: dict[str, Any]  # keywords of compute_rollout_correction; {}: no correction
    columns: tuple[str, ...]  # that add_advantages reads besides those that are always gathered
    log_probs: tuple[str, ...]  # columns of the policy's pass before the update; (): no pass
    reads_log_probs: bool  # whether the loss reads rollout_log_probs
    effective: dict[str, Any]
    """{flag: value} of flags that are left to the run (auto, None), for config.json"""


def check(args: ScriptArgs, device: torch.device, sizes: Sizes | None = None) -> Needs:
    """Raises InputError for sizes and corrections that do not fit. sizes: None: those of this job."""
    sizes = sizes or step_sizes(args, training_ranks(args))
    dtype = get_compute_dtype(args.model.compute_dtype, device)
    correction = rollout_correction(args, dtype)
    if correction:
        core_algos.compute_rollout_correction(*[torch.ones(2, 1)] * 3, **correction)  # raises InputError
    reads_log_probs = bool(correction) or loss_corrects(args)
    check_engine(args, device, dtype, reads_log_probs)
    columns, log_probs = read_columns(args, correction, sizes.updates_per_step)
    scale = args.loss_scale_factor or args.rollout.max_response_length
    shard = args.shard
    if shard.sharding == "auto" and not shard.auto_sharding:
        shard.auto_sharding = choose_sharding(args, device)
    effective = effective_settings(args, device, dtype, correction, log_probs) | {"sharding": shard.chosen}
    return Needs(sizes, dtype, scale, correction, columns, log_probs, reads_log_probs, effective)


def get_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def has_estimate(args: ScriptArgs, device: torch.device) -> bool:
    """Whether the run is on GPUs, or a --dry-run of some, with flags that the estimate of memory knows."""
    if args.model.model.endswith(".gguf") or args.shard.tensor_parallel_size > 1 or args.validation.val_only:
        return False
    return args.run.dry_run > 0 or device.type != "cpu"


def least_memory(args: ScriptArgs, device: torch.device) -> int:
    """Bytes of the smallest GPU of all ranks; with --dry-run of the GPU here, or of an H100. A collective."""
    if args.run.dry_run:
        from planner.estimate import gpu_here

        return gpu_here().memory
    return -all_reduce_max(-total_memory(device), device)


def choose_sharding(args: ScriptArgs, device: torch.device) -> Literal["fsdp2", "zero1"]:
    """What --sharding auto is: zero1 if no flag needs fsdp2 and, on GPUs, the estimate fits; without an estimate on one
    GPU. A collective."""
    if args.shard.needs_fsdp2():
        return "fsdp2"
    ranks = training_ranks(args)
    if has_estimate(args, device):
        from planner.estimate import zero1_fits

        gpu = least_memory(args, device)
        return "zero1" if on_first_rank(lambda: zero1_fits(args, ranks, gpu)) else "fsdp2"
    return "zero1" if device.type == "cpu" or ranks == 1 else "fsdp2"


def get_attention(name: str, dtype: torch.dtype, device: torch.device, path: str, **trust: bool) -> str:
    """auto: varlen where GPU, dtype and the model at `path` allow it, else packed_sdpa. Raises InputError if varlen has
    no kernel here, or flash_attention_2 no package."""
    if name == "flash_attention_2" and not find_spec("flash_attn"):
        raise InputError("--attn-implementation flash_attention_2: its package flash-attn is not installed; take auto")
    if name == "varlen" and (device.type == "cpu" or dtype == torch.float32):
        raise InputError(
            "--attn-implementation varlen is FlashAttention, for a GPU and 16 bits (--compute-dtype); here they are "
            f"{device.type} and {str(dtype).removeprefix('torch.')}; take auto"
        )
    if name != "auto":
        return name
    runs = has_flash_attention(device, dtype) and models.takes_varlen(path, **trust)
    return "varlen" if runs else "packed_sdpa"


def loss_corrects(args: ScriptArgs) -> bool:
    """Whether the loss itself accounts for the difference between engine and trainer."""
    _, read_by_update = Reads(args).columns()
    return args.old_log_probs == "rollout" or "rollout_log_probs" in read_by_update


def rollout_correction(args: ScriptArgs, dtype: torch.dtype) -> dict[str, Any]:
    """The settings of the rollout correction, which may be its default; {} means no correction."""
    correction = args.rollout_correction.settings()
    merged = args.model.lora_rank > 0 and not engine_class(args.rollout.engine).shares_weights
    rounded = merged and dtype != torch.float32  # the engine may get W + dW, which 16 bits may round to W
    if (args.rollout.async_level or rounded) and not loss_corrects(args):
        return correction or {"level": "token", "bounds": (0, 2)}
    return correction


def check_engine(args: ScriptArgs, device: torch.device, dtype: torch.dtype, reads_log_probs: bool) -> None:
    """Raises InputError for what vLLM cannot do on this device, and for a quantization of its weights that no sync of
    weights reaches, or that nothing corrects."""
    if name := args.rollout.quantization:
        flag = f'--vllm-kwargs {{"quantization": "{name}"}}'
        if name not in ONLINE_FP8:
            others = f"others need weights in their own format: take one of {', '.join(ONLINE_FP8)}"
            raise InputError(f"{flag}: vLLM quantizes the weights of each sync itself only as FP8; {others}")
        if device.type == "cpu" and name != ON_CPU:
            raise InputError(f"{flag}: on a CPU vLLM has kernels for {ON_CPU} only: take that")
        if dtype == torch.float32:
            raise InputError(f"{flag}: vLLM quantizes 16-bit weights: set --compute-dtype bfloat16")
        if not (reads_log_probs or args.validation.val_only):
            fix = "set --rollout-correction.level token (docs/algorithms.md)"
            raise InputError(f"{flag}: the engine samples from other probabilities than the loss assumes: {fix}")
    if args.model.routing_replay == "R3" and args.rollout.starts_vllm and device.type == "cpu" and not args.run.dry_run:
        why = "on a CPU vLLM does not return the experts"
        raise InputError(f"--routing-replay R3 with --rollout-engine vllm: {why}: take --rollout-engine hf, or R2")


def read_columns(args: ScriptArgs, correction: dict, updates_per_step: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(columns that add_advantages gathers only if something reads them, columns of the policy's pass before the
    update). No pass, where nothing reads it: with one update a step the ratio is 1."""
    gathered, of_update = Reads(args, correction=correction).columns()
    columns = tuple(name for name, column in COLUMNS.items() if name in gathered and column.gathered == "if read")
    read = gathered | of_update
    if "squared_score" in read:
        return columns, ("old_log_probs", "entropys", "squared_score")
    needed = updates_per_step > 1 or args.old_log_probs == "recompute" or {"old_log_probs", "entropys"} & read
    return columns, ("old_log_probs", "entropys") if needed else ()


def effective_settings(
    args: ScriptArgs, device: torch.device, dtype: torch.dtype, correction: dict, log_probs: tuple[str, ...]
) -> dict[str, Any]:
    """{flag: value} for flags that are left to the run (auto, None)."""
    model, name = args.model, str(dtype).removeprefix("torch.")
    trust = {"trust_remote_code": model.trust_remote_code}
    settings: dict[str, Any] = {
        "rollout_engine": args.rollout.engine,
        "compute_dtype": name,
        "attn_implementation": get_attention(model.attn_implementation, dtype, device, model.model, **trust),
        "old_log_probs": "rollout" if args.old_log_probs == "rollout" else "recompute" if log_probs else "not needed",
        "rollout_correction": correction or "none",
    }
    if args.loss_agg_mode == "seq-mean-token-sum-norm":
        settings["loss_scale_factor"] = args.loss_scale_factor or args.rollout.max_response_length
    if args.run.export_model:
        settings["export_dtype"] = name
    if args.rollout.starts_vllm:
        settings["gpu_memory_utilization"] = args.rollout.gpu_share
    return settings
