"""What the flags of a run need in memory and FLOPs. Flags that do not fit the GPU are refused."""

import copy
from bisect import bisect_left
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

import planner
from lib import InputError
from lib.args import ScriptArgs, step_sizes, training_ranks
from lib.args.checks import least_micro_batch
from lib.columns import COLUMNS, TABLE
from lib.distributed import ESTIMATED, accelerator, device_name, total_memory
from lib.log.metrics import PEAK_TFLOPS, peak_tflops
from lib.model.load import config_of
from lib.setup import get_compute_dtype, read_columns, rollout_correction
from planner.fake_gpu import register_fake_gpu
from planner.memory import GIB, Moments, StepSettings, estimate_memory, fits, memory_table, worst_moment
from planner.step_flops import flops_of_step, models_of

estimated = lru_cache(64)(estimate_memory)  # searches ask for the same settings again
MFU = 0.3  # of an update, for its time: an assumption
NO_SAVER = "no flags that change no result make it fit: take more GPUs, a smaller model or --lora-rank"


class Gpu(NamedTuple):
    name: str
    memory: int  # bytes
    peak: float | None  # TFLOP/s, if it is known


H100 = Gpu("H100", 80 * GIB, PEAK_TFLOPS["H100"])


def describe_needs(args: ScriptArgs, gpu: Gpu) -> str:
    """A table of the memory that each of the --dry-run GPUs needs at each moment of a step, and the FLOPs of a step."""
    ranks, flops = training_ranks(args), flops_of_step(args)
    update, log_probs, again = (f"{n:.1e}" if n else "none" for n in flops)
    text = memory_table(memory_of(args, ranks, gpu.memory), gpu.memory)
    text += f"\nFLOPs of a step at its limits: update {update}, log-probs before it {log_probs}, recomputed {again}"
    if gpu.peak is None:
        return text
    seconds = sum(flops) / (MFU * 1e12 * gpu.peak * ranks)
    return f"{text}:\n{seconds:.0f} s on {ranks} x {gpu.name} at {MFU:.0%} of the peak, without the rollout"


def gpu_here() -> Gpu:
    """An H100 where there is none."""
    if (device := accelerator()) is None:
        return H100
    return Gpu(device_name(device), total_memory(device), peak_tflops(device))


def memory_of(args: ScriptArgs, ranks: int, gpu: int) -> Moments:
    """What estimate_memory says of these flags. gpu: the bytes that a GPU has."""
    shard = args.shard
    sharding = shard.chosen
    if shard.sharding == "auto" and shard.needs_fsdp2():  # a flag that was added after the choice
        sharding = "fsdp2"
    zero1 = sharding == "zero1" if sharding else zero1_fits(args, ranks, gpu)
    return _memory_of(args, ranks, gpu, zero1)


def zero1_fits(args: ScriptArgs, ranks: int, gpu: int) -> bool:
    """With the smallest micro-batches, and all layers recomputed, that auto may choose."""
    args = copy.deepcopy(args)
    args.optimizer.auto_tokens, args.model.auto_recomputed = least_micro_batch(args), 1.0
    return fits(_memory_of(args, ranks, gpu, zero1=True), gpu)


def _memory_of(args: ScriptArgs, ranks: int, gpu: int, zero1: bool) -> Moments:
    if planner.traces and accelerator() is None:
        register_fake_gpu()  # torch counts accelerators at a process's first backward pass, as the estimate has
    model, shard, rollout, sizes = args.model, args.shard, args.rollout, step_sizes(args, ranks)
    dtype = get_compute_dtype(model.compute_dtype, ESTIMATED)
    mini_batch_rows = sizes.local_rows // sizes.num_mini_batches
    one_micro_batch = mini_batch_rows * row_tokens(args) <= args.optimizer.micro_batch_limit
    several: Literal["whole", "sharded"] = "sharded" if shard.reduce_each_micro_batch else "whole"
    step = StepSettings(
        ranks=ranks // shard.dp_replicate_size,
        zero1=zero1,
        compute_dtype=dtype,
        frozen_dtype=dtype,
        micro_batch_tokens=args.optimizer.micro_batch_limit,
        rows=sizes.local_rows,
        mini_batch_rows=mini_batch_rows,
        rows_a_prompt=rows_a_prompt(args),
        max_prompt_length=args.data.max_prompt_length,
        max_response_length=rollout.max_response_length,
        accumulation="none" if one_micro_batch else several,
        entropy_in_loss=bool(args.entropy_coef) or args.entropy_target is not None,
        recomputed=model.recomputed,
        reference=args.kl_coef > 0,
        reward_model=args.reward.reward_model,
        cpu_offload="actor" in shard.cpu_offload,
        offload_optimizer="optimizer" in shard.cpu_offload,
        offload_activations="activations" in shard.cpu_offload,
        on_servers=rollout.on_servers,
        engine_bytes=int(rollout.gpu_share * gpu) if rollout.starts_vllm else 0,
        engine_ranks=rollout.rollout_tensor_parallel_size,
        scores_awake=args.max_gen_batches > 0 or args.validation.enabled,
        gathered_bytes=ranks * sizes.local_rows * rollout.max_response_length * gathered_bytes_per_token(args),
        use_liger_kernel=model.fuses_layers,
        **models_of(args),
    )
    return estimated(step)


def rows_a_prompt(args: ScriptArgs) -> int:
    return args.group_size if args.model.shares_prompts else 1


def row_tokens(args: ScriptArgs) -> float:
    """Of a response, and its share of the prompt."""
    return args.data.max_prompt_length / rows_a_prompt(args) + args.rollout.max_response_length


def gathered_bytes_per_token(args: ScriptArgs) -> int:
    """At most, of a response token: its gathered columns, and those that add_advantages writes."""
    correction = rollout_correction(args, get_compute_dtype(args.model.compute_dtype, ESTIMATED))
    read, _ = read_columns(args, correction, updates_per_step=1)
    gathered = [column for name, column in COLUMNS.items() if name in read or column.gathered == "always"]
    columns = [*gathered, *TABLE["grpo.py: add_advantages"]]
    return sum(getattr(torch, column.dtype).itemsize for column in columns if column.width == "T")


def memory_advice(args: ScriptArgs, ranks: int, stage: str) -> str:
    """What to change where a stage, such as "step 3 update", ran out of the GPU's memory."""
    if any(word in stage for word in ("rollout", "weight_sync", "validation")) and not args.rollout.on_servers:
        if args.rollout.starts_vllm:
            return f"lower --gpu-memory-utilization (it is {args.rollout.gpu_share:g})"
        return "set --rollout-engine vllm, whose cache has a limit, or fewer --prompts-per-step"
    flags = [saver.flag for saver in memory_savers(args, ranks)]
    more = f"set {flags[0]}, then {', '.join(flags[1:])}" if flags[1:] else "".join(flags) or "take more GPUs"
    return f"{more}; --dry-run {ranks} prints the estimate of each moment of a step"


def refuse_what_does_not_fit(args: ScriptArgs, ranks: int, gpu: int) -> None:
    """Raises InputError if the estimate for `ranks` GPUs of `gpu` bytes does not fit. It names the first of
    `memory_savers` that make it fit, without those that are not needed."""
    needed = memory_of(args, ranks, gpu)
    if fits(needed, gpu):
        return

    def fit(savers: list[Saver]) -> bool:
        changed = copy.deepcopy(args)
        for saver in savers:
            setattr(getattr(changed, saver.group), saver.name, saver.value)
        possible = changed.shard.sharding != "zero1" or not changed.shard.needs_fsdp2()
        return possible and fits(memory_of(changed, ranks, gpu), gpu)

    savers = memory_savers(args, ranks)
    enough = next((savers[: n + 1] for n in range(len(savers)) if fit(savers[: n + 1])), [])
    for saver in enough[:-1]:
        if fit(without := [other for other in enough if other is not saver]):
            enough = without
    flags = " ".join(saver.flag for saver in enough)
    advice = f"it fits with {flags}" if flags else NO_SAVER
    raise InputError(
        f"these flags do not fit the GPU's memory by this estimate (--no-memory-check starts anyway); {advice}\n"
        f"{memory_table(needed, gpu)}"
    )


class Chosen(NamedTuple):
    """What --micro-batch-tokens auto and --gradient-checkpointing auto are."""

    tokens: int
    recomputed: float  # share of the layers
    fits: bool
    said: str


def choose_auto(args: ScriptArgs, ranks: int, gpu: int) -> Chosen:
    """By the estimate for `ranks` GPUs of `gpu` bytes: as few recomputed layers as let micro-batches of
    `least_micro_batch` fit. If none has to be, twice as many tokens as long as they fit and an update has more: more
    tokens hide the host's time. By doubling, so that a small change of the estimate does not change micro-batches."""
    args = copy.deepcopy(args)
    model, optimizer = args.model, args.optimizer
    optimizer.auto_tokens = least_micro_batch(args)
    layers = config_of(model.model, "--model", model.trust_remote_code).get_text_config().num_hidden_layers

    def fit(count: int) -> bool:
        model.auto_recomputed = count / layers
        return fits(memory_of(args, ranks, gpu), gpu)

    count, said = 0, []
    if model.gradient_checkpointing == "auto":
        count = bisect_left(range(layers), True, key=fit)
        said += [f"--gradient-checkpointing auto: {count} of {layers} layers"]
    if optimizer.micro_batch_tokens == "auto":
        of_update = step_sizes(args, ranks).local_rows // args.num_mini_batches * row_tokens(args)
        while count == 0 and optimizer.auto_tokens < of_update:
            optimizer.auto_tokens *= 2
            if not fit(0):
                optimizer.auto_tokens //= 2
                break
        said = [f"--micro-batch-tokens auto: {optimizer.auto_tokens}", *said]
    model.auto_recomputed = count / layers
    moments = memory_of(args, ranks, gpu)
    worst, size = worst_moment(moments)
    room = f"an estimate of {size / GIB:.1f} GiB ({worst}) on GPUs of {gpu / GIB:.0f}"
    return Chosen(optimizer.auto_tokens, model.auto_recomputed, fits(moments, gpu), f"{', '.join(said)}, by {room}")


class Saver(NamedTuple):
    """A flag that saves memory and changes no result: what it sets in args."""

    flag: str
    group: str
    name: str
    value: Any


def memory_savers(args: ScriptArgs, ranks: int) -> list[Saver]:
    """Those that args do not have yet, the cheapest in time first."""
    tokens = max(args.data.max_prompt_length + args.rollout.max_response_length, args.optimizer.micro_batch_limit // 4)
    having = {"critic": args.critic_model is not None, "ref": args.kl_coef, "reward_model": args.reward.reward_model}
    models = ["actor", *(name for name, there in having.items() if there)]
    savers = [
        *([Saver("--sharding fsdp2", "shard", "sharding", "fsdp2")] if args.shard.chosen == "zero1" else []),
        Saver("--reduce-each-micro-batch", "shard", "reduce_each_micro_batch", True),
        Saver(f"--micro-batch-tokens {tokens}", "optimizer", "micro_batch_tokens", tokens),
        Saver("--gradient-checkpointing", "model", "gradient_checkpointing", "on"),
    ]
    for parts in (["optimizer"], ["optimizer", "activations"], ["activations", *models]):
        offloaded = tuple(dict.fromkeys([*args.shard.cpu_offload, *parts]))
        savers.append(Saver(f"--cpu-offload {' '.join(offloaded)}", "shard", "cpu_offload", offloaded))
    without = {"reduce_each_micro_batch"} if ranks == 1 else set()
    if args.model.recomputed == 1:
        without.add("gradient_checkpointing")
    return [s for s in savers if getattr(getattr(args, s.group), s.name) != s.value and s.name not in without]
