"""A seeded adversary breaks runs at any moment; what is started again ends as if nothing had happened.

Nothing is lost or mixed: the metrics, samples and weights of the last start are those of a run without faults, each
start ends in at most one line, and nothing that it started outlives it.

`python -m tests.scripts.test_faults 0 200` plays the schedules 0 to 199, and prints how the starts of a fault ended.
Schedules from 1000 on have a vLLM server of the job's own.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.common import ROOT, SMALL, fork, metrics, ran, rollouts, wait_until, with_slow
from tests.scripts.test_scripts import TOOLS, saved

STEPS = 3
RUNS = {  # name: script, ranks, flags
    "grpo": ("grpo", 1, ["--prompt-sampling", "variance"]),
    "grpo on 2 ranks": ("grpo", 2, ["--reward-workers", "1"]),
    "ppo": ("ppo", 1, ["--reward-workers", "1"]),
    "dapo, several turns": ("dapo", 1, ["--group-size", "8", *TOOLS]),
}
SERVED = "grpo and its server"  # vLLM's start takes half a minute: in the program only
RUNS[SERVED] = ("grpo", 2, ["--rollout-gpus", "1", "--reward-workers", "1"])
FLAGS = [*SMALL, "--save-every", "1", "--keep-checkpoints", "0", "--reward-timeout", "60", "--resume", "auto"]
FLAGS += ["--total-steps", str(STEPS), "--stage-timeout", "120"]
FIRST_SERVED = 1000  # number of a schedule
MOMENTS = 1500  # audit events of a run, about: files, processes, sockets


class Fault(NamedTuple):
    kind: str
    moment: int  # number of the audit event, of the process that it strikes
    amount: int


def schedule(seed: int) -> tuple[str, list[Fault]]:
    """(name of a run, its faults: one a start)."""
    draw = random.Random(seed)
    moments = (int(MOMENTS ** draw.uniform(0.3, 1)) for _ in range(4))
    faults = [Fault(draw.choice([*FAULTS]), moment, draw.randrange(1 << 16)) for moment in moments]
    run = draw.choice([name for name in RUNS if name != SERVED])
    return (SERVED if seed >= FIRST_SERVED else run), faults[: draw.randint(1, 4)]


# ---- in the process that the fault strikes -------------------------------------------------------
def kill_a_child(amount: int) -> None:
    """A worker of the scorers, or the process that supervises them."""
    if children := psutil.Process().children(recursive=True):
        children[amount % len(children)].kill()


def fill_the_disk(amount: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (amount, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def turn_the_clock(amount: int) -> None:
    """By up to a day, in either direction."""
    real, by = time.time, (amount - (1 << 15)) * 2.6
    time.time = lambda: real() + by


def send(number: signal.Signals, amount: int) -> None:
    os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[int], None]] = {
    "kill": partial(send, signal.SIGKILL),
    "terminate": partial(send, signal.SIGTERM),
    "interrupt": partial(send, signal.SIGINT),
    "child": kill_a_child,
    "disk": fill_the_disk,
    "clock": turn_the_clock,
}
STRIKER = """
import runpy, sys
sys.path.insert(0, {root!r})
from tests.scripts.test_faults import strike_at
strike_at({fault!r}, {rank})
runpy.run_path({script!r}, run_name="__main__")
"""


def strike_at(fault: tuple, rank: int) -> None:
    """Arms the fault for this process, if it is that rank."""
    kind, moment, amount = fault
    seen = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        if os.getpid() != struck:
            return
        seen += 1
        if seen == moment:
            FAULTS[kind](amount)

    struck = os.getpid()
    if int(os.environ.get("RANK", "0")) == rank:
        sys.addaudithook(hook)


# ---- outside -------------------------------------------------------------------------------------
def start(name: str, folder: Path, fault: Fault | None = None) -> subprocess.CompletedProcess:
    script, ranks, flags = RUNS[name]
    program = str(ROOT / script)
    if fault is not None:
        values = {"root": str(ROOT), "fault": tuple(fault), "rank": fault.amount % ranks, "script": f"{program}.py"}
        program = str(folder / "struck")
        Path(f"{program}.py").write_text(STRIKER.format(**values))
    return fork(program, folder, *FLAGS, *flags, "--run-name", "run", ranks=ranks)


def check_end(done: subprocess.CompletedProcess, ranks: int) -> str:
    """How a start ended, in a word. Fails if it said nothing, or more than a line a rank."""
    said = [line for line in done.stderr.splitlines() if re.match(r"(error: |interrupted|\w+(Lost|Timeout)\b)", line)]
    assert "Traceback" not in done.stderr, done.stderr
    if done.returncode == 0:
        assert said == [], done.stderr
        return "went on"
    if done.returncode == -signal.SIGKILL and ranks == 1:
        return "killed"
    assert 1 <= len(said) <= ranks or done.returncode == -signal.SIGTERM, (done.returncode, done.stderr, done.stdout)
    return said[0].partition(":")[0] if said else "terminated"


def left_behind(folder: Path) -> list:
    """Processes with the run's folder in their command line, and files that are half written."""
    processes = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    return [p for p in processes if str(folder) in " ".join(p or ())] + [*(folder / "run").rglob("*.tmp")]


def play(seed: int, folder: Path, whole: Callable[[str], Path]) -> list[tuple[str, str]]:
    """(fault, ending) of each start of the schedule; then the run is started until its end, and compared."""
    name, faults = schedule(seed)
    ranks = RUNS[name][1]
    endings = [(fault.kind, check_end(start(name, folder, fault), ranks)) for fault in faults]
    ran(start(name, folder))
    run, other = folder / "run", whole(name)
    rows = metrics(run)
    assert [row["step"] for row in rows] == [row["step"] for row in metrics(other)]
    if failed := sum(row.get(f"reward/{kind}_count", 0) for row in rows for kind in ("crash", "timeout")):
        assert "child" in dict(endings), f"{failed} scorers failed by themselves"
    else:
        assert rows == metrics(other)
        assert rollouts(run) == rollouts(other)
        mine, theirs = (saved(at / f"checkpoints/step_{STEPS:06}") for at in (run, other))
        assert mine == theirs, [file for file in theirs if mine.get(file) != theirs[file]]
    wait_until(lambda: not left_behind(folder), 120)  # workers end by themselves without their rank
    return endings


def unbroken(folder: Path) -> Callable[[str], Path]:
    """Gives a function: a run without faults, by its name."""

    @cache
    def run_of(name: str) -> Path:
        own = folder / name.replace(" ", "_")
        own.mkdir()
        ran(start(name, own))
        return own / "run"

    return run_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return unbroken(tmp_path_factory.mktemp("whole"))


SHORT = (6, 45, 68, 77, 94, 95, 110, 150, 168, 435)  # one fault each: all kinds, all runs, early and late


@pytest.mark.parametrize("seed", with_slow(SHORT, *{*SHORT} - {6, 68, 110}))
def test_a_run_that_is_broken_at_any_moment_ends_as_one_that_is_not(seed, tmp_path, whole):
    play(seed, tmp_path, whole)


def main(first: int, end: int) -> None:
    endings: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        whole = unbroken(Path(folder))
        for seed in range(first, end):
            own = Path(folder, str(seed))
            own.mkdir()
            try:
                endings.update(play(seed, own, whole))
            except AssertionError as error:
                print(f"schedule {seed} {schedule(seed)}: {error}", flush=True)
    print(json.dumps([[*key, count] for key, count in sorted(endings.items())], indent=1))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
