"""Plants a bug in a function, and runs a script in this process to see which of its own checks finds it."""

import contextlib
import importlib
import inspect
import io
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from lib import InputError
from lib.log import tracking
from tests.common import ROOT, parse_flags
from tests.mutants.mutants import Mutant

CHEAP = [
    *("--prompts-per-step", "8", "--group-size", "4", "--total-steps", "5"),
    *("--train-files", str(ROOT / "data/toy/val.jsonl"), "--val-files", "none", "--reward-workers", "0"),
    *("--save-every", "0", "--save-rollouts", "0", "--no-export-model", "--stage-timeout", "0"),
]


@contextlib.contextmanager
def planted(where: str, old: str, new: str) -> Iterator[None]:
    """In the block the function "module:name" has `new` where its source has `old`, for whoever holds the function."""
    module, _, path = where.partition(":")
    function: Any = inspect.unwrap(reduce(getattr, path.split("."), importlib.import_module(module)))
    source = textwrap.dedent(inspect.getsource(function))
    source = source[re.search(r"^(async )?def ", source, re.MULTILINE).start() :]  # without decorators
    assert source.count(old) == 1, f"{where} has {old!r} {source.count(old)} times"
    made: dict[str, Any] = {}
    exec(source.replace(old, new), function.__globals__, made)
    [changed], before = made.values(), function.__code__
    function.__code__ = changed.__code__
    try:
        yield
    finally:
        function.__code__ = before


@dataclass
class Outcome:
    """A run's alerts or error up to the first step that has one. step: of it, 0 before the first; None: none."""

    step: int | None
    alerts: list[str]
    rows: list[dict[str, float]]


class Found(Exception):
    """Ends a run at its first alert."""


def notes(printed: str) -> list[str]:
    """What a run says before its first step."""
    return [line for line in printed.partition("step 1/")[0].splitlines() if line.startswith("note: ")]


def run(script: str, folder: Path, *flags: str, stop: bool = True) -> Outcome:
    """Runs the script with CHEAP and these flags until something fires, or with stop=False to its end."""
    module = importlib.import_module(script)
    rows: list[dict[str, float]] = []
    found: list[str] = []
    log = tracking.Tracker.log

    def log_and_look(self, metrics, step):
        log(self, metrics, step)
        rows.append({"step": step, **metrics})
        found.extend(notes(printed.getvalue()) if len(rows) == 1 else [])
        found.extend(tracking.alerts_of_step(metrics))
        if found and stop:
            raise Found

    args = parse_flags(module.Args, [*CHEAP, "--output-dir", str(folder), *flags])
    before, printed, step = os.environ.copy(), io.StringIO(), 0
    try:
        with (
            mock.patch.object(tracking.Tracker, "log", log_and_look),
            mock.patch.object(tracking.Tracker, "curve"),  # the seconds of a run go into drawing,
            mock.patch("lib.run.opening.write_start"),  # and into listing all installed packages
            mock.patch("atexit.register"),  # a tracker that is not closed draws at the end of the process
            contextlib.redirect_stdout(printed),
        ):
            module.main(args)
        step = None
    except Found:
        step = 0 if found[0].startswith("note: ") else int(rows[-1]["step"])
    except (InputError, AssertionError) as error:
        found, step = [f"{type(error).__name__}: {error}"], len(rows) + bool("step" in printed.getvalue())
    finally:
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized():
            dist.destroy_process_group()
    return Outcome(step, found, rows)


def run_mutant(mutant: Mutant, folder: Path) -> Outcome:
    with contextlib.ExitStack() as stack:
        for change in mutant.changes:
            stack.enter_context(planted(*change))
        return run(mutant.script, folder, *mutant.flags, *(mutant.prepare(folder) if mutant.prepare else []))


def finds(mutant: Mutant, outcome: Outcome) -> bool:
    """Whether the check that the mutant names has found it."""
    fault = bool(outcome.rows) and f"faults/{mutant.check}" in outcome.rows[-1]
    return fault or any(mutant.check in text for text in outcome.alerts)
