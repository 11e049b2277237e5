"""--plan: the seconds of a step for every split of the GPUs into those that train and those that sample."""

import copy
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from lib import InputError
from lib.args import ScriptArgs, engine_rows, step_sizes, training_ranks
from lib.cli.flags import as_flag, check_flags
from lib.model.flops import flops_of
from planner.estimate import MFU, Gpu, choose_auto
from planner.meta import kv_bytes_per_token, meta_model
from planner.plan import EngineRates, Split, plan_table, predict, read_lengths
from planner.step_flops import StepFlops, flops_of_step, log_prob_passes
from planner.traced_step import Traced

MEMORY_TBPS = {"H100 PCIe": 2.0, "H100 NVL": 3.9, "H100": 3.35, "H800": 3.35, "H200": 4.8, "H20": 4.0, "B200": 8.0}
MEMORY_TBPS |= {"A100": 2.0, "A800": 2.0, "L40S": 0.86, "A10": 0.6}
"""TB/s that a GPU reads its memory with, by NVIDIA's data sheets; the first name that is found counts."""
NODE = 8  # GPUs that NVLink joins
NVLINK, NETWORK = 300e9, 40e9  # bytes/s of a GPU to the others of its node, and to other nodes: assumptions
READS = 0.8  # share of MEMORY_TBPS that decoding reaches: an assumption
PREFILL_MFU = 0.5  # of decoding many rows, too: an assumption
STEP_S = 2e-3  # of the host for each step of vLLM (docs/gpu.md, H200)
ROW_S = 10.9e-6  # and for each of its rows: 1.1 schedule it, 2.2 and 2.0 take its token, 5.6 prepare the next (a CPU)
VLLM_ROW_S = 24e-6  # with vLLM's own scheduler (docs/gpu.md, H200)
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
    gpus, prompts = args.run.dry_run, args.prompts_per_step
    training = [n for n in range(1, gpus) if prompts % (n * args.num_mini_batches) == 0]
    training = [n for n in training if n >= gpus / 16] or training
    every = -(-len(training) // MOST_SPLITS) or 1
    planner = _Planner(args, gpu, lengths, traced)
    splits = [split for ranks in [*training[::every], gpus] for split in planner.levels(gpus - ranks)]
    if not splits:
        with_split(args, 0, 1, 0)  # raises what is wrong with all of them
        raise InputError(f"--plan: no engine on {max(ENGINE_GPUS)} GPUs or fewer holds the model and one response")
    return splits


class _Planner:
    def __init__(self, args: ScriptArgs, gpu: Gpu, lengths: np.ndarray, traced: Traced | None):
        self.args, self.gpu, self.lengths, self.traced = args, gpu, lengths, traced
        self.policy = DecoderCosts.of(args)
        # of a step at level 0, and above, where rollouts are corrected for older weights
        self.flops = [mean_flops(args, lengths, level) for level in (0, 1)]

    def levels(self, rollout_gpus: int) -> list[Split]:
        """A split for each --async-level that is possible. The first has the size of its engines chosen."""
        found: dict[int, Split] = {}
        for first in (1, 2, 0) if rollout_gpus else (0,):  # --async-order finished needs 2
            found = {size: own for size in ENGINE_GPUS if (own := self.split(rollout_gpus, size, first))}
            if found:
                break
        if not found:
            return []
        fastest = min(own.step.seconds for own in found.values())
        size = next(size for size, own in found.items() if own.step.seconds <= 1.02 * fastest)
        changed = with_split(self.args, rollout_gpus, size, first)
        fit = choose_auto(changed, training_ranks(changed), self.gpu.memory).fits
        levels = [level for level in range(LEVELS) if rollout_gpus and level != first]
        others = [self.split(rollout_gpus, size, level) for level in levels]
        return [own._replace(fits=fit) for own in (found[size], *others) if own]

    def split(self, rollout_gpus: int, engine_gpus: int, level: int) -> Split | None:
        """None: the flags are not valid, or an engine does not hold the model and one response."""
        args, policy = self.args, self.policy
        try:
            changed = with_split(args, rollout_gpus, engine_gpus, level)
        except InputError:
            return None
        rates, prompt = engine_rates(changed, policy, self.gpu), args.data.max_prompt_length
        sampling = rollout_gpus or args.run.dry_run
        holds = rates.cache >= prompt + args.rollout.max_response_length
        if not holds or policy.heads % engine_gpus or sampling % engine_gpus:
            return None
        engines = sampling // engine_gpus
        step = predict(
            self.lengths,
            rates,
            prompt=prompt,
            groups=args.prompts_per_step,
            group_size=args.group_size,
            engines=engines,
            level=level,
            sync=SYNC_S + policy.weights / link(args.run.dry_run),
            train=self.training_seconds(changed),
        )
        flags = [(name, getattr(changed.rollout, name)) for name in OF_SPLIT]
        words = [f"{as_flag(name)} {value}" for name, value in flags if value != getattr(args.rollout, name)]
        text = " ".join(words) or "the flags as they are"
        return Split(text, training_ranks(changed), rollout_gpus, engines, level, step, True)

    def training_seconds(self, args: ScriptArgs) -> float:
        """Log-probs before the update, and update, or the exchange of weights and fp32 gradients between ranks where
        that takes longer. They take the FLOPs at MFU of the peak; with a trace the update takes its FLOPs at the
        trace's MFU, and a pass the trace's share of it."""
        assert self.gpu.peak is not None
        ranks, flops = training_ranks(args), self.flops[args.rollout.async_level > 0]
        sizes, passes, peak = step_sizes(args, ranks), log_prob_passes(args), 1e12 * self.gpu.peak * ranks
        if self.traced is None:
            log_probs, update = flops.log_probs / (MFU * peak), (flops.update + flops.recomputed) / (MFU * peak)
        else:
            speed = self.traced.speed(ranks)
            update = flops.update / (speed.mfu * peak)
            policies = passes + (args.critic_model is not None)  # a critic's values take what the policy's do
            log_probs = update / args.update_epochs * policies * speed.log_probs / speed.update
            update += sizes.updates_per_step * speed.optimizer
        tokens = sizes.local_prompts * (args.data.max_prompt_length + args.group_size * self.lengths.mean())
        micro_batches = max(math.ceil(tokens / args.optimizer.micro_batch_limit), args.num_mini_batches)
        in_updates = micro_batches * args.update_epochs
        reduced = in_updates if args.shard.reduce_each_micro_batch else sizes.updates_per_step
        seconds_a_byte = 0.0 if ranks == 1 else 1 / link(ranks // args.shard.dp_replicate_size)
        exchange = self.policy.weights * seconds_a_byte
        gathered = exchange * micro_batches * passes
        exchanged = exchange * 2 * (in_updates + reduced)
        return max(log_probs, gathered) + max(update, exchanged)


def with_split(args: ScriptArgs, rollout_gpus: int, engine_gpus: int, level: int) -> ScriptArgs:
    """The flags with this split. Raises InputError if they are not valid."""
    changed = copy.deepcopy(args)
    changed.shard.auto_sharding, rollout = "", changed.rollout
    rollout.rollout_gpus = rollout_gpus
    rollout.rollout_engine = args.rollout.rollout_engine if rollout.starts_vllm else "vllm"
    rollout.rollout_tensor_parallel_size, rollout.async_level = engine_gpus, level
    if rollout.gpu_memory_utilization and bool(rollout_gpus) != bool(args.rollout.rollout_gpus):
        rollout.gpu_memory_utilization = 0.9 if rollout_gpus else 0.4  # the defaults: it was meant for the other one
    check_flags(changed)
    return changed


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
    known = zip(*(flops_of_step(changed, length) for length in at))
    return StepFlops(*(float(np.polynomial.Polynomial.fit(at, flops, 2)(lengths).mean()) for flops in known))


def link(ranks: int) -> float:
    """bytes/s of a GPU to the other ranks."""
    return NVLINK if ranks <= NODE else NETWORK
