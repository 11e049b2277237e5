"""Runs a script for each setting of a grid or a list, with each seed, on the cores or the GPUs of this machine.

    python -m launch.sweep sweep.yaml                         runs what has not ended yet, in runs/sweep
    python -m launch.sweep sweep.yaml --gpus 0 1 2 3          a run on each of four GPUs
    python -m launch.sweep sweep.yaml --gpus 0 1 2 3 --gpus-per-run 2
    python -m launch.sweep sweep.yaml --dry-run               prints the commands

The file:

    script: grpo.py
    flags: {model: Qwen/Qwen2.5-0.5B-Instruct, train-files: data/gsm8k/train.parquet, total-steps: 200}
    grid: {lr: [1e-6, 3e-6], loss: [vanilla, gspo]}           # or `settings`, a list of {flag: value}
    seeds: [1, 2, 3]

A run is named by its setting and seed, lr=1e-6,loss=gspo,seed=2. A sweep that was stopped goes on when it is started
again: with the checkpoints of its runs (--resume auto), and without those that have ended. Runs that fail do not stop
the others. `python -m tools.page runs/sweep` shows them all."""

import itertools
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from lib import InputError, how_it_ended
from lib.cli.process import command_line
from lib.run.run import take_lock

ROOT = Path(__file__).parents[1]
KEYS = {"script", "flags", "grid", "settings", "seeds"}
OWN = {"seed", "run-name", "output-dir", "resume"}  # flags that a sweep sets itself
LONGEST_NAME = 200  # characters of a folder's name


@dataclass
class Args:
    file: Annotated[Path, tyro.conf.Positional]
    """the sweep, as YAML"""
    output_dir: Path = Path("runs")
    """the runs are in a folder of the file's name in it"""
    jobs: int = 0
    """runs at a time on the CPU, one thread each; 0: one for each core"""
    gpus: tuple[str, ...] = ()
    """GPUs to use, by the numbers or names that CUDA_VISIBLE_DEVICES takes; none: the runs are on the CPU"""
    gpus_per_run: int = 1
    """GPUs of a run"""
    dry_run: bool = False
    """print the commands and stop"""

    def __post_init__(self) -> None:
        if self.jobs < 0 or self.gpus_per_run < 1:
            raise InputError("--jobs must be 0 or more, --gpus-per-run 1 or more")
        if self.jobs and self.gpus:
            raise InputError("--jobs is for the CPU: with --gpus as many runs at a time as there are GPUs for")
        if self.gpus and len(self.gpus) % self.gpus_per_run:
            raise InputError(f"--gpus-per-run {self.gpus_per_run} does not divide the {len(self.gpus)} of --gpus")


@dataclass
class Run:
    name: str
    command: list[str]


def read_sweep(file: Path, folder: Path) -> list[Run]:
    """The runs of the file, in its order. Raises InputError."""
    try:
        sweep = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{file}: {' '.join(str(error).split())}") from error
    if not isinstance(sweep, dict) or "script" not in sweep or not sweep.keys() <= KEYS:
        raise InputError(f"{file}: must have `script`, and may have {', '.join(sorted(KEYS - {'script'}))}")
    if "grid" in sweep and "settings" in sweep:
        raise InputError(f"{file}: has `grid` and `settings`: give one of them")
    flags, grid = flags_of(sweep.get("flags", {}), file), flags_of(sweep.get("grid", {}), file)
    if bad := [name for name, values in grid.items() if not isinstance(values, list) or not values]:
        raise InputError(f"{file}: grid: {bad[0]}: give a list of values")
    settings = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    if "settings" in sweep:
        if not isinstance(sweep["settings"], list):
            raise InputError(f"{file}: settings: give a list of {{flag: value}}")
        settings = [flags_of(setting, file) for setting in sweep["settings"]]
    seeds = sweep.get("seeds", [1])
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise InputError(f"{file}: seeds: give a list of integers")
    runs = [make_run(str(sweep["script"]), flags, setting, seed, folder) for setting in settings for seed in seeds]
    names = [run.name for run in runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{file}: {names.count(twice[0])} runs would be named {twice[0]}: make their settings differ")
    return runs


def flags_of(given: Any, file: Path) -> dict[str, Any]:
    """{flag without its dashes: value}. Raises InputError."""
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise InputError(f"{file}: {given!r}: give {{flag: value}}")
    flags = {name.lstrip("-").replace("_", "-"): value for name, value in given.items()}
    if taken := OWN & flags.keys():
        raise InputError(f"{file}: {min(taken)}: a sweep sets it itself (seeds, --output-dir)")
    return flags


def make_run(script: str, flags: dict, setting: dict, seed: int, folder: Path) -> Run:
    parts = [f"{name}={' '.join(words(name, value)[1:]) or value}" for name, value in setting.items()]
    name = re.sub(r"[^\w.=,+-]+", "_", ",".join([*parts, f"seed={seed}"]))[-LONGEST_NAME:]
    own = {"seed": seed, "run-name": name, "output-dir": str(folder), "resume": "auto"}
    return Run(
        name, [script, *(word for flag, value in (flags | setting | own).items() for word in words(flag, value))]
    )


def words(flag: str, value: Any) -> list[str]:
    """Of the command line. A flag with dots is a setting's: its `no-` is before the last part."""
    if isinstance(value, bool):
        before, _, last = flag.rpartition(".")
        return [f"--{before}{'.' if before else ''}{'' if value else 'no-'}{last}"]
    return [f"--{flag}", *(str(item) for item in (value if isinstance(value, list) else [value]))]


def launched(run: Run, gpus: list[str]) -> tuple[list[str], dict[str, str]]:
    """(the command, its environment)."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    if len(gpus) > 1:
        return [str(ROOT / "launch/one_node.sh"), *run.command], env | {"GPUS": str(len(gpus))}
    return [sys.executable, *run.command], env


def ended_before(folder: Path, runs: list[Run]) -> set[str]:
    """The names of the runs that have ended well. Raises InputError if one of them had other flags."""
    ended = {}
    if (record := folder / "sweep.jsonl").exists():
        lines = record.read_text().splitlines(keepends=True)
        ended = {row["name"]: row for row in (json.loads(line) for line in lines if line.endswith("\n"))}
    for run in runs:
        if run.name in ended and ended[run.name]["command"] != run.command:
            was = shlex.join(ended[run.name]["command"])
            raise InputError(f"{folder}: {run.name} was run as {was}: give the sweep another file's name")
    return {name for name, row in ended.items() if row["exit_code"] == 0}


def run_all(runs: list[Run], folder: Path, slots: list[list[str]]) -> list[str]:
    """Runs them, as many at a time as there are slots (the GPUs of one). Returns the names of those that failed."""
    free: queue.Queue[list[str]] = queue.Queue()
    for slot in slots:
        free.put(slot)

    def play(run: Run) -> int:
        gpus = free.get()
        command, env = launched(run, gpus)
        with open(folder / f"{run.name}.log", "a") as log:
            code = subprocess.run(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL).returncode
        if code in (-signal.SIGINT, 130):
            time.sleep(1)  # after Ctrl-C the main thread cancels the runs that have not begun; it may come second
        free.put(gpus)
        with open(folder / "sweep.jsonl", "a") as record:
            record.write(json.dumps({"name": run.name, "command": run.command, "exit_code": code}) + "\n")
        print(f"{run.name}: {'done' if code == 0 else how_it_ended(code) + f': {folder / run.name}.log'}", flush=True)
        return code

    pool = ThreadPoolExecutor(len(slots))
    try:
        codes = [*pool.map(play, runs)]
    finally:  # Ctrl-C: those that run have it too, and the others do not begin
        pool.shutdown(cancel_futures=True)
    return [run.name for run, code in zip(runs, codes) if code]


def main(args: Args) -> int:
    folder = args.output_dir / args.file.stem
    runs = read_sweep(args.file, folder)
    n = args.gpus_per_run
    slots = [list(args.gpus[i : i + n]) for i in range(0, len(args.gpus), n)]
    slots = slots or [[] for _ in range(args.jobs or len(os.sched_getaffinity(0)))]
    if args.dry_run:
        print(*(shlex.join(launched(run, slots[0])[0]) for run in runs), sep="\n")
        return 0
    with take_lock(folder, "sweep.yaml"):
        left = [run for run in runs if run.name not in ended_before(folder, runs)]
        print(f"{len(left)} of {len(runs)} runs, {len(slots)} at a time, in {folder}", flush=True)
        failed = run_all(left, folder, slots)
    print(f"{len(failed)} of {len(left)} failed. The page of all runs: python -m tools.page {shlex.quote(str(folder))}")
    return bool(failed)


if __name__ == "__main__":
    with command_line():
        sys.exit(main(tyro.cli(Args, prog="python -m launch.sweep", description=__doc__)))
