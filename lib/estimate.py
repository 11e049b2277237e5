"""What a run will do, and what a step of it needs in memory and time. Flags that do not fit the GPU are refused."""

import copy
from functools import partial
from typing import Any, NamedTuple

import torch

from lib import InputError
from lib.args import ROOT, ScriptArgs, Sizes, training_ranks
from lib.columns import COLUMNS, TABLE
from lib.distributed import World, advise_out_of_memory, on_first_rank
from lib.model.flops import StepFlops, estimate_flops
from lib.model.memory import GIB, Moments, estimate_memory, fits, memory_table
from lib.run.throughput import PEAK_TFLOPS, peak_tflops
from lib.setup import Inputs, advantage_columns, check_algorithm, get_compute_dtype, needed_log_probs

MFU = 0.3  # of an update, for its time: an assumption
NO_SAVER = "no flags that change no result make it fit: take more GPUs, a smaller model or --lora-rank"
NO_GROUPS = "reinforce_plus_plus"  # the estimator of grpo.py and dapo.py that has none


class Gpu(NamedTuple):
    name: str
    memory: int  # bytes
    peak: float | None  # TFLOP/s, if it is known


H100 = Gpu("H100", 80 * GIB, PEAK_TFLOPS["H100"])


def describe(args: ScriptArgs, sizes: Sizes, world: World, inputs: Inputs) -> str:
    """The model, the data and the sizes of a step; with --dry-run also the memory and FLOPs that a step needs."""

    def shown(paths: tuple[str, ...]) -> str:
        return ", ".join(path.removeprefix(f"{ROOT}/") for path in paths)

    def rows_of(dataset, files: tuple[str, ...]) -> str:
        counts = dict(getattr(dataset, "dropped", {}))
        if escaped := getattr(dataset, "escaped", 0):
            counts["special_tokens_as_text"] = escaped
        return f"{len(dataset)} ({', '.join(f'{name} {n}' for name, n in counts.items())}) from {shown(files)}"

    train_data, val_data, samples = inputs.train_data, inputs.val_data, args.validation.val_samples
    ranks = f"on {training_ranks(args)} rank(s) of {world.device.type}"
    if args.rollout.rollout_gpus:
        servers = args.rollout.rollout_gpus // args.rollout.rollout_tensor_parallel_size
        ranks += f" (and {servers} vLLM server(s) on {args.rollout.rollout_gpus} more)"
    lines = [f"model: {shown((args.model.model,))}"]
    if train_data is not None:
        lines += [f"training prompts: {rows_of(train_data, args.data.train_files)}"]
    lines += [f"no effect here: {'; '.join(args.no_effect)}"] * bool(args.no_effect)
    lines += [f"validation prompts: {rows_of(val_data, args.validation.val_files) if val_data else 'none'}"]
    if train_data is None:
        assert val_data is not None  # --val-only
        return "\n".join([*lines, f"{len(val_data)} x {samples} = {len(val_data) * samples} responses {ranks}"])
    responses, total_steps = args.prompts_per_step * args.group_size, args.run.total_steps
    lines += [
        f"{args.prompts_per_step} prompts x {args.group_size} = {responses} responses a step {ranks}, "
        f"{sizes.updates_per_step} update(s) of {responses // args.num_mini_batches} rows; {total_steps} steps = "
        f"{total_steps * args.prompts_per_step / len(train_data):.2f} epochs",
    ]
    if args.optimizer.lr == 0:
        lines += ["note: --lr 0 leaves the policy as it is"]
    if args.group_size == 1 and args.adv_estimator not in ("", NO_GROUPS):
        lines += ["note: --group-size 1 leaves no baseline: the advantage of a response is its reward (--singleton)"]
    if args.run.dry_run:
        lines += [describe_needs(args, sizes, gpu_here())]
    return "\n".join(lines)


def describe_needs(args: ScriptArgs, sizes: Sizes, gpu: Gpu) -> str:
    """A table of the memory that each of the --dry-run GPUs needs at each moment of a step, and the FLOPs of a step."""
    ranks, flops = training_ranks(args), flops_of_step(args, sizes)
    update, log_probs, again = (f"{n:.1e}" if n else "none" for n in flops)
    text = memory_table(memory_of(args, sizes, ranks, gpu.memory), gpu.memory)
    text += f"\nFLOPs of a step at its limits: update {update}, log-probs before it {log_probs}, recomputed {again}"
    if gpu.peak is None:
        return text
    seconds = sum(flops) / (MFU * 1e12 * gpu.peak * ranks)
    return f"{text}:\n{seconds:.0f} s on {ranks} x {gpu.name} at {MFU:.0%} of the peak, without the rollout"


def gpu_here() -> Gpu:
    """An H100 where there is none."""
    if not torch.cuda.is_available():
        return H100
    properties = torch.cuda.get_device_properties(0)
    return Gpu(properties.name, properties.total_memory, peak_tflops(torch.device("cuda", 0)))


def flops_of_step(args: ScriptArgs, sizes: Sizes) -> StepFlops:
    """What estimate_flops says of these flags on a GPU."""
    needed = needed_log_probs(args, sizes, check_algorithm(args, torch.device("cuda")))
    return estimate_flops(
        args.model.model,
        prompts=args.prompts_per_step,
        group_size=args.group_size,
        max_prompt_length=args.data.max_prompt_length,
        max_response_length=args.rollout.max_response_length,
        update_epochs=args.update_epochs,
        log_prob_passes=bool(needed) + (args.kl_coef > 0),
        share_prompts=args.model.share_prompts and args.model.padding_free,
        gradient_checkpointing=args.model.gradient_checkpointing,
        **models_of(args),
    )


def models_of(args: ScriptArgs) -> dict[str, Any]:
    """The critic, and what of the models trains."""
    model = args.model
    return {
        "critic_model": "" if args.critic_model is None else args.critic_model or model.model,
        "lora_rank": model.lora_rank,
        "lora_target_modules": model.lora_target_modules,
        "freeze_pattern": model.freeze,
        "trust_remote_code": model.trust_remote_code,
    }


def memory_of(args: ScriptArgs, sizes: Sizes, ranks: int, gpu: int) -> Moments:
    """What estimate_memory says of these flags. gpu: the bytes that a GPU has."""
    model, shard, rollout = args.model, args.shard, args.rollout
    dtype = get_compute_dtype(model.compute_dtype, torch.device("cuda"))
    share = int(rollout.gpu_share * gpu) if rollout.starts_vllm else 0
    return estimate_memory(
        model.model,
        ranks=ranks // shard.dp_replicate_size,
        compute_dtype=dtype,
        frozen_dtype=dtype,
        micro_batch_tokens=args.optimizer.micro_batch_tokens,
        rows=sizes.local_rows,
        max_prompt_length=args.data.max_prompt_length,
        max_response_length=rollout.max_response_length,
        accumulation="sharded" if shard.reduce_each_micro_batch else "whole",
        gradient_checkpointing=model.gradient_checkpointing,
        reference=args.kl_coef > 0 and not model.lora_rank,
        reward_model=args.reward.reward_model,
        cpu_offload="actor" in shard.cpu_offload,
        offload_activations="activations" in shard.cpu_offload,
        engine_bytes=None if rollout.on_servers else share,
        engine_ranks=rollout.rollout_tensor_parallel_size,
        gathered_bytes=ranks * sizes.local_rows * rollout.max_response_length * gathered_bytes_per_token(args),
        **models_of(args),
    )


def gathered_bytes_per_token(args: ScriptArgs) -> int:
    """At most, of a response token: its gathered columns, and those that add_advantages writes."""
    read = advantage_columns(args, check_algorithm(args, torch.device("cuda")))
    gathered = [column for name, column in COLUMNS.items() if name in read or column.gathered == "always"]
    columns = [*gathered, *TABLE["grpo.py: add_advantages"]]
    return sum(getattr(torch, column.dtype).itemsize for column in columns if column.width == "T")


def check_memory(args: ScriptArgs, sizes: Sizes, world: World) -> None:
    """On a GPU, before a model loads: raises InputError if the estimate of the flags does not fit. A collective.
    Skipped with --no-memory-check, a .gguf model and tensor parallelism, which the estimate does not know."""
    advise_out_of_memory(partial(memory_advice, args, world.size))
    unknown = args.model.model.endswith(".gguf") or args.shard.tensor_parallel_size > 1
    if world.device.type != "cuda" or unknown or not args.run.memory_check or args.validation.val_only:
        return
    gpu = torch.cuda.get_device_properties(world.device).total_memory
    on_first_rank(lambda: refuse_what_does_not_fit(args, sizes, world.size, gpu))


def memory_advice(args: ScriptArgs, ranks: int, stage: str) -> str:
    """What to change where a stage, such as "step 3 update", ran out of the GPU's memory."""
    if any(word in stage for word in ("rollout", "weight_sync", "validation")) and not args.rollout.on_servers:
        if args.rollout.starts_vllm:
            return f"lower --gpu-memory-utilization (it is {args.rollout.gpu_share:g})"
        return "set --rollout-engine vllm, whose cache has a limit, or fewer --prompts-per-step"
    flags = [saver.flag for saver in memory_savers(args, ranks)]
    more = f"set {flags[0]}, then {', '.join(flags[1:])}" if flags[1:] else "".join(flags) or "take more GPUs"
    return f"{more}; --dry-run {ranks} prints the estimate of each moment of a step"


def refuse_what_does_not_fit(args: ScriptArgs, sizes: Sizes, ranks: int, gpu: int) -> None:
    """Raises InputError if the estimate for `ranks` GPUs of `gpu` bytes does not fit. It names the first of
    `memory_savers` that make it fit, without those that are not needed."""
    needed = memory_of(args, sizes, ranks, gpu)
    if fits(needed, gpu):
        return

    def fit(savers: list[Saver]) -> bool:
        changed = copy.deepcopy(args)
        for saver in savers:
            setattr(getattr(changed, saver.group), saver.name, saver.value)
        return fits(memory_of(changed, sizes, ranks, gpu), gpu)

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


class Saver(NamedTuple):
    """A flag that saves memory and changes no result: what it sets in args."""

    flag: str
    group: str
    name: str
    value: Any


def memory_savers(args: ScriptArgs, ranks: int) -> list[Saver]:
    """Those that args do not have yet, the cheapest in time first."""
    tokens = max(args.data.max_prompt_length + args.rollout.max_response_length, args.optimizer.micro_batch_tokens // 4)
    having = {"critic": args.critic_model is not None, "ref": args.kl_coef, "reward_model": args.reward.reward_model}
    models = ["actor", *(name for name, there in having.items() if there)]
    savers = [
        Saver("--reduce-each-micro-batch", "shard", "reduce_each_micro_batch", True),
        Saver(f"--micro-batch-tokens {tokens}", "optimizer", "micro_batch_tokens", tokens),
        Saver("--gradient-checkpointing", "model", "gradient_checkpointing", True),
    ]
    for parts in (["activations"], ["activations", *models]):
        offloaded = tuple(dict.fromkeys([*args.shard.cpu_offload, *parts]))
        savers.append(Saver(f"--cpu-offload {' '.join(offloaded)}", "shard", "cpu_offload", offloaded))
    return [s for s in savers[ranks == 1 :] if getattr(getattr(args, s.group), s.name) != s.value]
