"""A rank joins its job, and checks all that it can before a model loads."""

import os
import sys
from functools import partial
from pathlib import Path

import torch

from lib import InputError
from lib import model as models
from lib.args import ScriptArgs
from lib.cli.flags import check_flags
from lib.distributed import World, accelerator, has_flash_attention, init_distributed
from lib.rollout import vllm_refuses
from lib.run.run_config import describe_start, read_json
from lib.seeds import set_seed
from lib.setup.inputs import Inputs, load_inputs
from lib.setup.needs import Needs, check
from lib.setup.report import check_memory, choose_by_memory, describe


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
