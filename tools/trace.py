"""Traces a step of a script for a config.json, without weights, tokenizer, data or a network.

    python -m tools.trace grpo.py benchmarks/shapes/qwen2.5-7b.json --dry-run 8 --gradient-checkpointing

The other flags are the script's, a copy's beside the four too. It prints the memory that the step takes beside the
estimate (planner/traced_step.py), and the speed that the roofline of an H100 predicts (planner/roofline.py).
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import planner
from lib import InputError, report_mistake, setup
from lib.args import ScriptArgs
from lib.cli.flags import parse_flags
from planner.dry_run import describe_trace
from planner.estimate import H100
from planner.traced_step import Traced, trace_step


@contextmanager
def traced(script: str, config: str, *flags: str) -> Iterator[tuple[ScriptArgs, Traced]]:
    """(the script's args, its traced step). flags: --dry-run N among them. Once in a process."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(config, Path(folder, "config.json"))
        Path(folder, "model.safetensors").touch()  # the check of the flags wants weights
        args_class = import_module(script.removesuffix(".py")).Args
        args = parse_flags(args_class, ["--model", folder, "--train-files", config, *flags])  # no row is read
        planner.traces = True
        setup.choose_by_memory(args, setup.join(args))
        yield args, trace_step(args)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        with traced(*sys.argv[1:]) as (args, step):
            print(describe_trace(args, step, H100))
    except (InputError, OSError) as error:
        report_mistake(f"error: {error}")
        sys.exit(2)
