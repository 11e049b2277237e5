"""Runs a script for each setting of a grid or a list, with each seed, on the cores or the GPUs of this machine.

    python -m tools.launch.sweep sweep.yaml                         runs what has not ended yet, in runs/sweep
    python -m tools.launch.sweep sweep.yaml --gpus 0 1 2 3          a run on each of four GPUs
    python -m tools.launch.sweep sweep.yaml --gpus 0 1 2 3 --gpus-per-run 2
    python -m tools.launch.sweep sweep.yaml --dry-run               prints the commands

The file:

    script: grpo.py
    flags: {model: Qwen/Qwen2.5-0.5B-Instruct, train-files: data/gsm8k/train.parquet, total-steps: 200}
    grid: {lr: [1e-6, 3e-6], loss: [vanilla, gspo]}           # or `settings`, a list of {flag: value}
    seeds: [1, 2, 3]

A run is named by its setting and seed, lr=1e-6,loss=gspo,seed=2. A sweep that was stopped goes on when it is started
again: with the checkpoints of its runs (--resume auto), and without those that have ended. Runs that fail do not stop
the others. `python -m tools.page runs/sweep` shows them all."""

import hashlib
import itertools
import json
import math
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from lib import InputError, how_it_ended
from lib.cli.process import command_line
from lib.cli.secrets import secret_in
from lib.cli.yaml_files import read_yaml, words_of
from lib.run.lock import take_lock

ROOT = Path(__file__).parents[2]
KEYS = {"script", "flags", "grid", "settings", "seeds"}
OWN = {"seed", "run-name", "output-dir", "resume"}  # flags that a sweep sets itself
MOST_RUNS = 10_000
LONGEST_RUN_NAME = 128  # bytes: wandb takes 128 characters, a file system 255 bytes
INTEGER = re.compile("0|-?[1-9][0-9]*", re.ASCII)


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
    sweep = read_yaml(file, str(file))
    if not isinstance(sweep, dict) or not sweep.keys() <= KEYS or not isinstance(sweep.get("script"), str):
        raise InputError(f"{file}: must have `script`, and may have {', '.join(sorted(KEYS - {'script'}))}")
    if "grid" in sweep and "settings" in sweep:
        raise InputError(f"{file}: has `grid` and `settings`: give one of them")
    fixed = words_of_flags(sweep.get("flags"), f"{file}: flags")
    grid: dict[str, list[list[str]]] = {}
    for flag, values in flags_of(sweep.get("grid"), f"{file}: grid").items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{file}: grid: {flag}: give a list of values")
        grid[flag] = [words(flag, value, f"{file}: grid") for value in values]
    seeds = sweep.get("seeds", ["1"])
    if not isinstance(seeds, list) or not all(isinstance(seed, str) and INTEGER.fullmatch(seed) for seed in seeds):
        raise InputError(f"{file}: seeds: give a list of integers")
    if (number := math.prod(map(len, grid.values())) * len(seeds)) > MOST_RUNS:
        raise InputError(f"{file}: {number:,} runs, more than {MOST_RUNS:,}: shorten the grid")
    settings = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    if "settings" in sweep:
        if not isinstance(sweep["settings"], list):
            raise InputError(f"{file}: settings: give a list of {{flag: value}}")
        settings = [words_of_flags(setting, f"{file}: settings") for setting in sweep["settings"]]
    runs = [make_run(sweep["script"], fixed, setting, seed, folder) for setting in settings for seed in seeds]
    [(name, times)] = Counter(run.name for run in runs).most_common(1) or [("", 0)]
    if times > 1:
        raise InputError(f"{file}: {times} runs would be named {name}: make their settings differ")
    return runs


def flags_of(values: Any, where: str) -> dict[str, Any]:
    """{flag without its dashes: value}. Raises InputError."""
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{where}: give {{flag: value}}")
    flags = {str(key).lstrip("-").replace("_", "-"): value for key, value in values.items()}
    for flag in flags:
        if flag in OWN:
            raise InputError(f"{where}: {flag}: a sweep sets it itself (seeds, --output-dir)")
        if not re.fullmatch(r"[\w.-]+", flag):
            raise InputError(f"{where}: {flag[:100]!r} is no flag")
    if len(flags) < len(values):
        raise InputError(f"{where}: a flag is there twice: {', '.join(map(str, values))[:200]}")
    return flags


def words_of_flags(values: Any, where: str) -> dict[str, list[str]]:
    return {flag: words(flag, value, where) for flag, value in flags_of(values, where).items()}


def words(flag: str, value: Any, where: str) -> list[str]:
    """Of the command line. Raises InputError."""
    if secret := secret_in(value, f"--{flag}"):
        raise InputError(f"{where}: {secret}")
    return words_of(f"--{flag}", value, f"{where}: {flag}", is_switch=isinstance(value, bool))


def make_run(script: str, fixed: dict[str, list[str]], setting: dict[str, list[str]], seed: str, folder: Path) -> Run:
    """fixed, setting: the words of the command line, by flag."""
    shown = [f"{flag}={' '.join(of_flag[1:]) or str(of_flag[0] == f'--{flag}')}" for flag, of_flag in setting.items()]
    name = re.sub(r"[^\w.=,+-]+", "_", ",".join([*shown, f"seed={seed}"]))
    if len(name.encode()) > LONGEST_RUN_NAME:  # others may end in the same way
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{digest},{name.encode()[-LONGEST_RUN_NAME + 9 :].decode(errors='ignore')}"
    name = name.lstrip(".,-")
    own = {"seed": seed, "run-name": name, "output-dir": str(folder), "resume": "auto"}
    words_of = fixed | setting | {flag: [f"--{flag}", value] for flag, value in own.items()}
    return Run(name, [script, *itertools.chain(*words_of.values())])


def launched(run: Run, gpus: list[str]) -> tuple[list[str], dict[str, str]]:
    """(the command, its environment)."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    if len(gpus) > 1:
        return [str(ROOT / "tools/launch/one_node.sh"), *run.command], env | {"GPUS": str(len(gpus))}
    return [sys.executable, *run.command], env


def ended_before(folder: Path, runs: list[Run]) -> set[str]:
    """The names of the runs that have ended well. Raises InputError if one of them had other flags."""
    ended: dict[str, tuple[str, int]] = {}  # by a run's name its command and exit code
    if (record := folder / "sweep.jsonl").exists():
        lines = record.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                continue  # the sweep was killed
            try:
                row = json.loads(line)
                ended[row["name"]] = (shlex.join(row["command"]), int(row["exit_code"]))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise InputError(f"{record} line {number}: no row of a sweep: fix or delete it") from error
    for run in runs:
        command = shlex.join(run.command)
        if (was := ended.get(run.name, (command, 0))[0]) != command:
            raise InputError(f"{folder}: {run.name} was run as {was}: give the sweep another file's name")
    return {name for name, (_, code) in ended.items() if code == 0}


def run_all(runs: list[Run], folder: Path, slots: list[list[str]]) -> list[str]:
    """Runs them, as many at a time as there are slots (the GPUs of one). Returns the names of those that failed."""
    free: queue.Queue[list[str]] = queue.Queue()
    for slot in slots:
        free.put(slot)

    def play(run: Run) -> int:
        gpus = free.get()
        command, env = launched(run, gpus)
        try:
            with open(folder / f"{run.name}.log", "a") as log:
                code = subprocess.run(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL).returncode
            if code in (-signal.SIGINT, 130):
                time.sleep(1)  # after Ctrl-C the main thread cancels the runs that have not begun; it may come second
            with open(folder / "sweep.jsonl", "a") as record:
                record.write(json.dumps({"name": run.name, "command": run.command, "exit_code": code}) + "\n")
        except OSError as error:  # too many words for a command, a full disk
            print(f"{run.name}: not run, or not noted in sweep.jsonl: {error}", flush=True)
            return 1
        finally:
            free.put(gpus)
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
        done = ended_before(folder, runs)
        left = [run for run in runs if run.name not in done]
        print(f"{len(left)} of {len(runs)} runs, {len(slots)} at a time, in {folder}", flush=True)
        failed = run_all(left, folder, slots)
    print(f"{len(failed)} of {len(left)} failed. The page of all runs: python -m tools.page {shlex.quote(str(folder))}")
    return bool(failed)


if __name__ == "__main__":
    with command_line():
        sys.exit(main(tyro.cli(Args, prog="python -m tools.launch.sweep", description=__doc__)))
