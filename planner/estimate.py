"""What a step needs in memory and time, for --dry-run. Flags that do not fit the GPU are refused."""

import copy
import math
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import planner
from lib import InputError
from lib.args import ScriptArgs, Sizes, engine_rows, step_sizes, training_ranks
from lib.cli.flags import as_flag, check_flags
from lib.columns import COLUMNS, TABLE
from lib.distributed import (
    ESTIMATED,
    accelerator,
    device_name,
    total_memory,
)
from lib.log.throughput import PEAK_TFLOPS, peak_tflops
from lib.model.flops import flops_of
from lib.setup import Inputs, advantage_columns, check_algorithm, get_compute_dtype, needed_log_probs
from planner.memory import GIB, Moments, estimate_memory, fits, kv_bytes_per_token, memory_table, meta_model
from planner.plan import EngineRates, Split, plan_table, predict, read_lengths
from planner.roofline import Speed
from planner.step_flops import StepFlops, estimate_flops
from planner.traced_step import Traced, speed_table, trace_step, trace_table

MFU = 0.3  # of an update, for its time: an assumption
NO_SAVER = "no flags that change no result make it fit: take more GPUs, a smaller model or --lora-rank"


class Gpu(NamedTuple):
    name: str
    memory: int  # bytes
    peak: float | None  # TFLOP/s, if it is known


H100 = Gpu("H100", 80 * GIB, PEAK_TFLOPS["H100"])


def describe_dry_run(args: ScriptArgs, sizes: Sizes, inputs: Inputs) -> str:
    """Tables of what a step needs on the --dry-run GPUs; with the planner's --trace what it allocates, with --plan its
    seconds."""
    gpu = gpu_here()
    traced = trace_step(args, inputs) if planner.traces else None  # before any backward pass
    lines = [describe_needs(args, sizes, gpu)]
    lines += [describe_trace(args, sizes, traced, gpu)] if traced else []
    lines += [describe_plan(args, gpu, traced)] if args.run.plan else []
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


def describe_trace(args: ScriptArgs, sizes: Sizes, traced: Traced, gpu: Gpu) -> str:
    """Tables of a traced step: its memory beside the estimate, its predicted speed."""
    ranks = training_ranks(args)
    estimated = memory_of(args, sizes, ranks, gpu.memory)
    return f"{trace_table(traced.memory, estimated)}\n{speed_table(args, sizes, traced, ranks)}"


def gpu_here() -> Gpu:
    """An H100 where there is none."""
    if (device := accelerator()) is None:
        return H100
    return Gpu(device_name(device), total_memory(device), peak_tflops(device))


def log_prob_passes(args: ScriptArgs, sizes: Sizes) -> int:
    """Forward passes with the policy or its reference before the update, on a GPU."""
    needed = needed_log_probs(args, sizes, check_algorithm(args, ESTIMATED))
    return bool(needed) + (args.kl_coef > 0)


def flops_of_step(args: ScriptArgs, sizes: Sizes, response_length: int | None = None) -> StepFlops:
    """What estimate_flops says of these flags on a GPU. response_length: of each response; None: the limit."""
    return estimate_flops(
        args.model.model,
        prompts=args.prompts_per_step,
        group_size=args.group_size,
        max_prompt_length=args.data.max_prompt_length,
        max_response_length=response_length or args.rollout.max_response_length,
        update_epochs=args.update_epochs,
        log_prob_passes=log_prob_passes(args, sizes),
        share_prompts=args.model.shares_prompts,
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
    dtype = get_compute_dtype(model.compute_dtype, ESTIMATED)
    share = int(rollout.gpu_share * gpu) if rollout.starts_vllm else 0
    rows_a_prompt = args.group_size if model.shares_prompts else 1
    row = args.data.max_prompt_length / rows_a_prompt + rollout.max_response_length  # tokens
    one_micro_batch = sizes.local_mini_batch_rows * row <= args.optimizer.micro_batch_tokens
    whole_or_sharded: Literal["whole", "sharded"] = "sharded" if shard.reduce_each_micro_batch else "whole"
    return estimate_memory(
        model.model,
        ranks=ranks // shard.dp_replicate_size,
        compute_dtype=dtype,
        frozen_dtype=dtype,
        micro_batch_tokens=args.optimizer.micro_batch_tokens,
        rows=sizes.local_rows,
        mini_batch_rows=sizes.local_mini_batch_rows,
        rows_a_prompt=rows_a_prompt,
        max_prompt_length=args.data.max_prompt_length,
        max_response_length=rollout.max_response_length,
        accumulation="none" if one_micro_batch else whole_or_sharded,
        entropy_in_loss=bool(args.entropy_coef) or args.entropy_target is not None,
        gradient_checkpointing=model.gradient_checkpointing,
        reference=args.kl_coef > 0 and not model.lora_rank,
        reward_model=args.reward.reward_model,
        cpu_offload="actor" in shard.cpu_offload,
        offload_activations="activations" in shard.cpu_offload,
        engine_bytes=None if rollout.on_servers else share,
        engine_ranks=rollout.rollout_tensor_parallel_size,
        scores_awake=args.max_gen_batches > 0 or args.validation.enabled,
        gathered_bytes=ranks * sizes.local_rows * rollout.max_response_length * gathered_bytes_per_token(args),
        use_liger_kernel=model.use_liger_kernel,
        **models_of(args),
    )


def gathered_bytes_per_token(args: ScriptArgs) -> int:
    """At most, of a response token: its gathered columns, and those that add_advantages writes."""
    read = advantage_columns(args, check_algorithm(args, ESTIMATED))
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


# ---- --plan: the seconds of a step, for every split of the GPUs ------------------------------------
MEMORY_TBPS = {"H100 PCIe": 2.0, "H100 NVL": 3.9, "H100": 3.35, "H800": 3.35, "H200": 4.8, "H20": 4.0, "B200": 8.0}
MEMORY_TBPS |= {"A100": 2.0, "A800": 2.0, "L40S": 0.86, "A10": 0.6}
"""TB/s that a GPU reads its memory with, by NVIDIA's data sheets; the first name that is found counts."""
NODE = 8  # GPUs that NVLink joins
NVLINK, NETWORK = 300e9, 40e9  # bytes/s of a GPU to the others of its node, and to other nodes: assumptions
READS = 0.8  # share of MEMORY_TBPS that decoding reaches: an assumption
PREFILL_MFU = 0.5  # of decoding many rows, too: an assumption
STEP_S, ROW_S = 2e-3, 24e-6  # of vLLM's scheduler and launches: each step, and each of its rows (docs/gpu.md, H200)
ALL_REDUCE_S = 1e-5  # twice a layer, in an engine on several GPUs: an assumption
REQUEST_S = 5e-4  # of an HTTP request to a server, on a CPU: benchmarks/results/server_rollout.json
SYNC_S = 1.0  # of a sync, besides the weights: pause or wake-up, checksum, probe: an assumption
LEVELS = 5  # --async-level 0 to 4
ENGINE_GPUS = (1, 2, 4, 8)  # of one node
MOST_SPLITS = 8
OF_SPLIT = ("rollout_engine", "rollout_gpus", "rollout_tensor_parallel_size", "async_level", "gpu_memory_utilization")


class DecoderCosts(NamedTuple):
    """Of the policy in an engine."""

    weights: int  # bytes
    cache: int  # bytes of keys and values, a token
    token: float  # FLOPs of a forward pass, of a token
    seen: float  # and of attention, for each token that it sees
    layers: int
    heads: int

    @classmethod
    def of(cls, args: ScriptArgs) -> "DecoderCosts":
        trust: dict[str, Any] = {"trust_remote_code": args.model.trust_remote_code}
        model = meta_model(AutoModelForCausalLM, args.model.model, "--model", torch.bfloat16, **trust)
        config, flops = model.config.get_text_config(), flops_of(model.requires_grad_(False))
        weights, token = 2 * sum(p.numel() for p in model.parameters()), (flops.token + flops.prediction) / 2
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        return cls(weights, kv_bytes_per_token(model), token, flops.pair / 3, layers, heads)


def describe_plan(args: ScriptArgs, gpu: Gpu, traced: Traced | None = None) -> str:
    """A table of the seconds of a step for each split of the --dry-run GPUs, and the flags of the best. traced: the
    step of --trace, whose speed takes the place of the assumed MFU. Raises InputError."""
    prompt, rows = args.data.max_prompt_length, args.prompts_per_step * args.group_size
    lengths = read_lengths(args.run.plan, args.rollout.max_response_length)
    table = plan_table(plan_splits(args, gpu, lengths, traced), rows * (prompt + lengths.mean()))
    what = f"responses {args.run.plan} (mean {lengths.mean():.0f} tokens, longest {lengths.max()}), prompts of {prompt}"
    return f"predicted for {args.run.dry_run} x {gpu.name}, {what} (docs/scaling.md, Planning the split):\n{table}"


def plan_splits(args: ScriptArgs, gpu: Gpu, lengths: np.ndarray, traced: Traced | None = None) -> list[Split]:
    """Of the --dry-run GPUs: all sample and train, or the last ones sample, at each --async-level. Engines have the
    size that is fastest at level 1, or another one (within 2 %, the smallest). Raises InputError if there is none."""
    if args.rollout.engine not in ("hf", "vllm"):
        raise InputError(f"--plan compares vLLM engines of this job, not --rollout-engine {args.rollout.engine}")
    policy, gpus, splits = DecoderCosts.of(args), args.run.dry_run, []
    flops = [mean_flops(args, lengths, level) for level in (0, 1)]  # asynchronous rollouts are corrected for
    training = [n for n in range(1, gpus) if args.prompts_per_step % (n * args.num_mini_batches) == 0]
    training = [n for n in training if n >= gpus / 16] or training
    for ranks in [*training[:: -(-len(training) // MOST_SPLITS) or 1], gpus]:
        speed = traced and traced.speed(ranks)
        split = partial(plan_split, args, policy, flops, gpu, lengths, speed, gpus - ranks)
        for first in (1, 2, 0) if gpus > ranks else (0,):  # --async-order finished needs 2
            found = {size: own for size in ENGINE_GPUS if (own := split(size, first))}
            if found:
                break
        if found:
            fastest = min(own.step.seconds for own in found.values())
            size = next(size for size, own in found.items() if own.step.seconds <= 1.02 * fastest)
            changed = with_split(args, gpus - ranks, size, first)
            fit = fits(memory_of(changed, step_sizes(changed, ranks), ranks, gpu.memory), gpu.memory)
            others = [split(size, level) for level in range(LEVELS) if gpus > ranks and level != first]
            splits += [own._replace(fits=fit) for own in (found[size], *others) if own]
    if not splits:
        with_split(args, 0, 1, 0)  # raises what is wrong with all of them
        raise InputError(f"--plan: no engine on {max(ENGINE_GPUS)} GPUs or fewer holds the model and one response")
    return splits


def with_split(args: ScriptArgs, rollout_gpus: int, engine_gpus: int, level: int) -> ScriptArgs:
    """The flags with this split. Raises InputError if they are not valid."""
    changed = copy.deepcopy(args)
    rollout = changed.rollout
    rollout.rollout_gpus = rollout_gpus
    rollout.rollout_engine = args.rollout.rollout_engine if rollout.starts_vllm else "vllm"
    rollout.rollout_tensor_parallel_size, rollout.async_level = engine_gpus, level
    if rollout.gpu_memory_utilization and bool(rollout_gpus) != bool(args.rollout.rollout_gpus):
        rollout.gpu_memory_utilization = 0.9 if rollout_gpus else 0.4  # the defaults: it was meant for the other one
    check_flags(changed)
    return changed


def plan_split(
    args: ScriptArgs,
    policy: DecoderCosts,
    flops: list[StepFlops],
    gpu: Gpu,
    lengths: np.ndarray,
    speed: Speed | None,
    rollout_gpus: int,
    engine_gpus: int,
    level: int,
) -> Split | None:
    """flops: of a step at level 0, and above. None: the flags are not valid, or an engine does not hold the model and
    one response."""
    try:
        changed = with_split(args, rollout_gpus, engine_gpus, level)
    except InputError:
        return None
    rates = engine_rates(changed, policy, gpu)
    longest = args.data.max_prompt_length + args.rollout.max_response_length
    if rates.cache < longest or policy.heads % engine_gpus or (rollout_gpus or args.run.dry_run) % engine_gpus:
        return None
    ranks, engines = training_ranks(changed), (rollout_gpus or args.run.dry_run) // engine_gpus
    sizes: dict[str, Any] = {"groups": args.prompts_per_step, "group_size": args.group_size, "engines": engines}
    train = sum(training_seconds(changed, ranks, gpu, flops[level > 0], lengths.mean(), policy.weights, speed))
    times: dict[str, Any] = {"sync": SYNC_S + policy.weights / link(args.run.dry_run), "train": train}
    step = predict(lengths, rates, prompt=args.data.max_prompt_length, level=level, **sizes, **times)
    flags = [(name, getattr(changed.rollout, name)) for name in OF_SPLIT]
    words = [f"{as_flag(name)} {value}" for name, value in flags if value != getattr(args.rollout, name)]
    return Split(" ".join(words) or "the flags as they are", ranks, rollout_gpus, engines, level, step, True)


def engine_rates(args: ScriptArgs, policy: DecoderCosts, gpu: Gpu) -> EngineRates:
    """A roofline of the engine. Raises InputError for a GPU that is not in the tables."""
    bandwidth = next((tbps for words, tbps in MEMORY_TBPS.items() if words in gpu.name), None)
    if bandwidth is None or gpu.peak is None:
        raise InputError(f"--plan: the memory bandwidth of {gpu.name} is not known; run it on a machine without a GPU")
    gpus, prompt = args.rollout.rollout_tensor_parallel_size, args.data.max_prompt_length
    read, computed = READS * gpus * bandwidth * 1e12, PREFILL_MFU * gpus * gpu.peak * 1e12
    room = args.rollout.gpu_share * gpu.memory * gpus - policy.weights
    rows = engine_rows(args, training_ranks(args))
    slots = args.rollout.engine_args.get("max_num_seqs", rows)
    if type(slots) is not int or slots < 1:
        raise InputError(f"--vllm-kwargs max_num_seqs {slots}: give a number of rows, such as 256")
    return EngineRates(
        fixed=STEP_S + 2 * policy.layers * ALL_REDUCE_S * (gpus > 1),
        row=ROW_S,
        weights=policy.weights / read,
        computed=policy.token / computed,
        context=policy.cache / read,
        prefill=(policy.token + policy.seen * prompt / 2) / computed,
        request=REQUEST_S if args.rollout.rollout_gpus else 0.0,
        slots=slots,
        cache=room / policy.cache if policy.cache else math.inf,
    )


def mean_flops(args: ScriptArgs, lengths: np.ndarray, level: int) -> StepFlops:
    """flops_of_step with responses of these lengths, at that --async-level."""
    changed, longest = copy.deepcopy(args), int(lengths.max())
    changed.rollout.rollout_engine, changed.rollout.async_level = "vllm", level
    at = [1, longest + 1, 2 * longest + 1]  # FLOPs are a polynomial of the second degree in the length
    known = zip(*(flops_of_step(changed, step_sizes(args, training_ranks(args)), length) for length in at))
    return StepFlops(*(float(np.polynomial.Polynomial.fit(at, flops, 2)(lengths).mean()) for flops in known))


def training_seconds(
    args: ScriptArgs, ranks: int, gpu: Gpu, flops: StepFlops, length: float, weights: int, speed: Speed | None = None
) -> tuple[float, float]:
    """(log-probs before the update, update) of a step, or the exchange of `weights` (bytes) and fp32 gradients between
    ranks, where that takes longer. They take the FLOPs at MFU of the peak; with the `speed` of a trace the update takes
    its FLOPs at the trace's MFU, and a pass the trace's share of it. length: the mean of the responses."""
    assert gpu.peak is not None
    sizes, passes = step_sizes(args, ranks), log_prob_passes(args, step_sizes(args, ranks))
    peak = 1e12 * gpu.peak * ranks
    if speed is None:
        log_probs, update = flops.log_probs / (MFU * peak), (flops.update + flops.recomputed) / (MFU * peak)
    else:
        update = flops.update / (speed.mfu * peak)
        policies = passes + (args.critic_model is not None)  # a critic's values take what the policy's log-probs do
        log_probs = update / args.update_epochs * policies * speed.log_probs / speed.update
        update += sizes.updates_per_step * speed.optimizer
    tokens = sizes.local_prompts * (args.data.max_prompt_length + args.group_size * length)
    micro_batches = max(math.ceil(tokens / args.optimizer.micro_batch_tokens), args.num_mini_batches)
    reduced = micro_batches * args.update_epochs if args.shard.reduce_each_micro_batch else sizes.updates_per_step
    sent = 0.0 if ranks == 1 else 1 / link(ranks // args.shard.dp_replicate_size)  # seconds a byte
    gathered = weights * micro_batches * passes * sent
    exchanged = (2 * weights * micro_batches * args.update_epochs + 2 * weights * reduced) * sent
    return max(log_probs, gathered), max(update, exchanged)


def link(ranks: int) -> float:
    """bytes/s of a GPU to the other ranks."""
    return NVLINK if ranks <= NODE else NETWORK
