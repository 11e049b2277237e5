"""What flags decide before data or a model loads: settings, columns, dtypes, attention."""

from importlib.util import find_spec
from typing import Any

import torch

from lib import InputError, core_algos
from lib import model as models
from lib.args import Reads, ScriptArgs, Sizes
from lib.cli.flags import non_default
from lib.columns import COLUMNS
from lib.distributed import has_flash_attention
from lib.rollout import engine_class

ON_CPU = "fp8_per_channel"
ONLINE_FP8 = ("fp8", "fp8_per_tensor", ON_CPU, "fp8_per_block")  # vLLM quantizes the 16-bit weights that it loads


def get_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


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


def check_algorithm(args: ScriptArgs, device: torch.device) -> dict:
    """Checks names and hyper-parameters of the estimator, loss, masks and correction. Raises InputError. Returns the
    settings of the rollout correction, which may be its default; {} means no correction."""
    if args.adv_estimator:
        settings = {"singleton": args.singleton} | non_default(args.adv_kwargs)
        core_algos.get_adv_estimator_fn(args.adv_estimator, settings)
    core_algos.get_policy_loss_fn(args.loss, non_default(args.loss_kwargs))
    core_algos.check_token_masks(args.token_masks.settings(args.loss))
    correction = args.rollout_correction.settings()
    merged = args.model.lora_rank > 0 and not engine_class(args.rollout.engine).shares_weights
    merged &= args.rollout.lora_sync != "adapter"
    # the engine gets W + dW, which 16 bits may round to W
    rounded = merged and get_compute_dtype(args.model.compute_dtype, device) != torch.float32
    loss_corrects = args.old_log_probs == "rollout" or "rollout_log_probs" in Reads(args).columns()[1]
    if (args.rollout.async_level or rounded) and not loss_corrects:
        correction = correction or {"level": "token", "bounds": (0, 2)}
    if correction:
        core_algos.get_rollout_correction_fn(correction)
    if args.rollout.quantization:
        corrected = bool(correction) or loss_corrects or args.validation.val_only
        dtype = get_compute_dtype(args.model.compute_dtype, device)
        check_quantization(args.rollout.quantization, dtype, device, corrected)
    if args.model.routing_replay == "R3" and args.rollout.starts_vllm and device.type == "cpu" and not args.run.dry_run:
        why = "on a CPU vLLM does not return the experts"
        raise InputError(f"--routing-replay R3 with --rollout-engine vllm: {why}: take --rollout-engine hf, or R2")
    return correction


def check_quantization(name: str, dtype: torch.dtype, device: torch.device, corrected: bool) -> None:
    """Raises InputError for a quantization of vLLM's weights that no sync of weights reaches, or that nothing corrects.
    corrected: whether the loss accounts for the difference between engine and trainer."""
    flag = f'--vllm-kwargs {{"quantization": "{name}"}}'
    if name not in ONLINE_FP8:
        others = f"others need weights in their own format: take one of {', '.join(ONLINE_FP8)}"
        raise InputError(f"{flag}: vLLM quantizes the weights of each sync itself only as FP8; {others}")
    if device.type == "cpu" and name != ON_CPU:
        raise InputError(f"{flag}: on a CPU vLLM has kernels for {ON_CPU} only: take that")
    if dtype == torch.float32:
        raise InputError(f"{flag}: vLLM quantizes 16-bit weights: set --compute-dtype bfloat16")
    if not corrected:
        fix = "set --rollout-correction.level token (docs/algorithms.md)"
        raise InputError(f"{flag}: the engine samples from other probabilities than the loss assumes: {fix}")


def needed_log_probs(args: ScriptArgs, sizes: Sizes, correction: dict) -> tuple[str, ...]:
    """What must be computed with the policy before the update: old_log_probs and entropys, and for some estimators
    squared_score. Nothing, where nothing reads it: with one update a step the ratio is 1."""
    read = set.union(*Reads(args, correction=correction).columns())
    if "squared_score" in read:
        return "old_log_probs", "entropys", "squared_score"
    needed = sizes.updates_per_step > 1 or args.old_log_probs == "recompute" or {"old_log_probs", "entropys"} & read
    return ("old_log_probs", "entropys") if needed else ()


def advantage_columns(args: ScriptArgs, correction: dict) -> list[str]:
    """Columns of the rows of all ranks that this run's estimator, correction, token masks and KL read, besides those
    that are always gathered."""
    read, _ = Reads(args, correction=correction).columns()
    return [name for name, column in COLUMNS.items() if name in read and column.gathered == "if read"]


def effective_settings(
    args: ScriptArgs, device: torch.device, correction: dict, needed: tuple[str, ...]
) -> dict[str, Any]:
    """{flag: value} for flags that are left to the run (auto, None), for config.json. correction: of `check_algorithm`;
    needed: of `needed_log_probs`."""
    dtype, model = get_compute_dtype(args.model.compute_dtype, device), args.model
    trust = {"trust_remote_code": model.trust_remote_code}
    name = str(dtype).removeprefix("torch.")
    settings: dict[str, Any] = {
        "rollout_engine": args.rollout.engine,
        "compute_dtype": name,
        "attn_implementation": get_attention(model.attn_implementation, dtype, device, model.model, **trust),
        "old_log_probs": "rollout" if args.old_log_probs == "rollout" else "recompute" if needed else "not needed",
        "rollout_correction": correction or "none",
    }
    if args.loss_agg_mode == "seq-mean-token-sum-norm":
        settings["loss_scale_factor"] = args.loss_scale_factor or args.rollout.max_response_length
    if args.run.export_model:
        settings["export_dtype"] = name
    if args.rollout.starts_vllm:
        settings["gpu_memory_utilization"] = args.rollout.gpu_share
    return settings


def make_kl_control(args: ScriptArgs) -> core_algos.AdaptiveKLController:
    """The controller of the KL coefficient beta: fixed or adaptive."""
    if args.kl_target is None:
        return core_algos.FixedKLController(args.kl_coef)
    return core_algos.AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
