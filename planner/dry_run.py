"""What --dry-run prints: memory and FLOPs of a step, what it allocates (--trace), and its seconds (--plan)."""

import planner
from lib.args import ScriptArgs, step_sizes, training_ranks
from lib.setup import Inputs
from planner.estimate import Gpu, describe_needs, gpu_here, memory_of
from planner.splits import describe_plan
from planner.traced_step import Traced, speed_table, trace_step, trace_table


def describe_dry_run(args: ScriptArgs, inputs: Inputs) -> str:
    gpu = gpu_here()
    traced = trace_step(args, inputs) if planner.traces else None  # before any backward pass
    lines = [describe_needs(args, gpu)]
    lines += [describe_trace(args, traced, gpu)] if traced else []
    lines += [describe_plan(args, gpu, traced)] if args.run.plan else []
    return "\n".join(lines)


def describe_trace(args: ScriptArgs, traced: Traced, gpu: Gpu) -> str:
    """Tables of a traced step: its memory beside the estimate, its predicted speed."""
    ranks = training_ranks(args)
    estimated = memory_of(args, ranks, gpu.memory)
    return f"{trace_table(traced.memory, estimated)}\n{speed_table(args, step_sizes(args, ranks), traced, ranks)}"
