"""A rank joins its job, checks all that it can before a model loads, and says what it found. Only --dry-run and a GPU's
check of memory load the planner."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lib import InputError
from lib import model as models
from lib.args import ROOT, ScriptArgs, Sizes, training_ranks
from lib.args.checks import least_micro_batch
from lib.cli.flags import check_flags
from lib.distributed import (
    World,
    accelerator,
    advise_out_of_memory,
    has_flash_attention,
    init_distributed,
    on_first_rank,
)
from lib.rollout import vllm_refuses
from lib.run.run_config import describe_start, read_json
from lib.sampling import set_seed
from lib.setup.inputs import Inputs, load_inputs
from lib.setup.needs import Needs, check, has_estimate, least_memory


def start(args: ScriptArgs) -> tuple[World, Needs, Inputs]:
    """Joins the job, checks flags, data and memory, and prints what it found. Raises InputError. See `join`."""
    world = join(args)
    needs = check(args, world.device)
    inputs = load_inputs(args)
    needs.effective.update(choose_by_memory(args, world))
    if world.rank == 0:
        print(describe(args, needs.sizes, world, inputs), flush=True)
    if not args.run.dry_run:
        check_memory(args, world)
    return world, needs, inputs


def join(args: ScriptArgs) -> World:
    """Joins the job (init_distributed), whose ranks must have the same flags, code and files. An engine rank of
    --rollout-gpus does not come back: it runs its vLLM server until the job is over."""
    set_seed(args.run.seed)  # the same on all ranks: a dataset class may draw which rows it keeps
    rollout, device = args.rollout, accelerator() or torch.device("cpu")
    if rollout.batch_invariant and not args.run.dry_run:
        use_batch_invariant_kernels(device)
    why = choose_engine(args, device) if rollout.rollout_engine == "auto" else ""
    engine_ranks = 0 if args.run.dry_run else rollout.rollout_gpus
    describe = partial(describe_start, args, Path(sys.argv[0]))
    world = init_distributed(args.run.stage_timeout, rollout.rollout_engine, engine_ranks, describe)
    if why:
        if world.rank == 0:
            print(f"--rollout-engine auto: {rollout.engine}, {why}", flush=True)
        check_flags(args)  # with this engine
    if world.rank >= world.size:
        from servers.managed import serve

        serve(world, rollout.rollout_tensor_parallel_size)
    return world


def choose_engine(args: ScriptArgs, device: torch.device) -> str:
    """Sets what --rollout-engine auto is here. Returns why. A replay has the engine of the recorded run, which decides
    whether there is a rollout correction. Without a GPU, --dry-run assumes one."""
    model, run, rollout = args.model, args.run, args.rollout
    if rollout.rollout_gpus:
        rollout.auto_engine, why = "vllm", "which --rollout-gpus needs"
    elif run.replay:
        recorded = (read_json(Path(run.replay, "config.json")) or {}).get("effective", {}).get("rollout_engine")
        rollout.auto_engine, why = recorded if recorded == "vllm" else "hf", "as recorded"
    elif device.type == "cpu":
        assumed = "if the GPUs have it and it knows the model"
        rollout.auto_engine, why = ("vllm", assumed) if run.dry_run else ("hf", "because this machine has no GPU")
    else:
        refused = vllm_refuses(models.config_of(model.model, "--model", model.trust_remote_code), device.type)
        rollout.auto_engine, why = ("hf", f"because {refused}") if refused else ("vllm", "which knows the model")
    return why


def use_batch_invariant_kernels(device: torch.device) -> None:
    """For vLLM in this process and in those that it starts, and for what torch compiles. Call it before vLLM is
    imported. Raises InputError if vLLM has none for the device."""
    if not has_flash_attention(device, torch.bfloat16):  # they need the same GPUs
        why = "vLLM has batch-invariant kernels for GPUs from compute capability 8.0 on, and ignores it on a CPU"
        raise InputError(f"--vllm-kwargs batch_invariant: {why}: drop it (docs/diagnostics.md)")
    from torch._inductor import config as inductor

    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if hasattr(inductor, "batch_invariant"):  # torch 2.11 has none
        inductor.batch_invariant = True


# ---- what a run says, and its memory -------------------------------------------------------------
def describe(args: ScriptArgs, sizes: Sizes, world: World, inputs: Inputs) -> str:
    """The model, the data and the sizes of a step; with --dry-run also the memory and FLOPs that a step needs."""

    def shown(paths: tuple[str, ...]) -> str:
        return ", ".join(path.removeprefix(f"{ROOT}/") for path in paths)

    def rows_of(dataset, files: tuple[str, ...]) -> str:
        counts = dict(getattr(dataset, "dropped", {}))
        if escaped := getattr(dataset, "escaped", 0):
            counts["special_tokens_as_text"] = escaped
        if incomplete := getattr(dataset, "incomplete", 0):
            counts["without a message that the chat template leaves out"] = incomplete
        return f"{len(dataset)} ({', '.join(f'{name} {n}' for name, n in counts.items())}) from {shown(files)}"

    train_data, val_sets = inputs.train_data, list(zip(args.validation.sets(), inputs.val_data))
    ranks = f"on {training_ranks(args)} rank(s) of {world.device.type}"
    if args.rollout.rollout_gpus:
        servers = args.rollout.rollout_gpus // args.rollout.rollout_tensor_parallel_size
        ranks += f" (and {servers} vLLM server(s) on {args.rollout.rollout_gpus} more)"
    lines = [f"model: {shown((args.model.model,))}"]
    if train_data is not None:
        lines += [f"training prompts: {rows_of(train_data, args.data.train_files)}"]
    lines += [f"no effect here: {'; '.join(args.no_effect)}"] * bool(args.no_effect)
    lines += [f"validation prompts: {rows_of(data, val_set.files)}" for val_set, data in val_sets]
    lines += ["validation prompts: none"] * (not val_sets)
    for dataset in (train_data, *inputs.val_data):
        if note := getattr(dataset, "note", None):
            lines += [f"note: {note}"]
    if train_data is None:  # --val-only
        sampled = [(len(data), val_set.samples) for val_set, data in val_sets]
        of_sets = " + ".join(f"{rows} x {n}" for rows, n in sampled)
        return "\n".join([*lines, f"{of_sets} = {sum(rows * n for rows, n in sampled)} responses {ranks}"])
    responses, total_steps = args.prompts_per_step * args.group_size, args.run.total_steps
    lines += [
        f"{args.prompts_per_step} prompts x {args.group_size} = {responses} responses a step {ranks}, "
        f"{sizes.updates_per_step} update(s) of {responses // args.num_mini_batches} rows; {total_steps} steps = "
        f"{total_steps * args.prompts_per_step / len(train_data):.2f} epochs",
    ]
    if args.lr == 0:
        lines += ["note: --lr 0 leaves the policy as it is"]
    if args.group_size == 1 and args.adv_estimator not in ("", "reinforce_plus_plus"):  # which have no groups
        lines += ["note: --group-size 1: a response's advantage is its reward (--adv-kwargs singleton)"]
    if args.run.dry_run:
        from planner.dry_run import describe_dry_run

        lines += [describe_dry_run(args, inputs)]
    return "\n".join(lines)


def choose_by_memory(args: ScriptArgs, world: World) -> dict[str, Any]:
    """Sets what --micro-batch-tokens auto and --gradient-checkpointing auto are here, by the estimate for the smallest
    GPU of all ranks, and says so. Returns both as they are in effect. A collective."""
    model, optimizer = args.model, args.optimizer
    optimizer.auto_tokens = least_micro_batch(args)
    if "auto" in (optimizer.micro_batch_tokens, model.gradient_checkpointing) and has_estimate(args, world.device):
        from planner.estimate import choose_auto

        gpu = least_memory(args, world.device)
        chosen = on_first_rank(lambda: choose_auto(args, training_ranks(args), gpu))
        optimizer.auto_tokens, model.auto_recomputed = chosen.tokens, chosen.recomputed
        if world.rank == 0:
            print(chosen.said, flush=True)
    share = {0.0: "off", 1.0: "on"}.get(model.recomputed, f"{model.recomputed:.3g} of the layers")
    return {"micro_batch_tokens": optimizer.micro_batch_limit, "gradient_checkpointing": share}


def check_memory(args: ScriptArgs, world: World) -> None:
    """On a GPU, before a model loads: raises InputError if the estimate of the flags does not fit. A collective.
    Skipped without an estimate, and with --no-memory-check."""

    def advice(stage: str) -> str:
        from planner.estimate import memory_advice

        return memory_advice(args, world.size, stage)

    advise_out_of_memory(advice)
    if args.run.memory_check and has_estimate(args, world.device):
        from planner.estimate import refuse_what_does_not_fit

        gpu = least_memory(args, world.device)
        on_first_rank(lambda: refuse_what_does_not_fit(args, world.size, gpu))
