"""The leaderboard of diffs: CPU seconds to 90 % greedy accuracy on three embedded tasks.

    python -m benchmarks.leaderboard run NAME        measures benchmarks/leaderboard/NAME.diff, to NAME.json
    python -m benchmarks.leaderboard check           checks every diff and record, without a run
    python -m benchmarks.leaderboard verify NAME     runs a task again, and evaluates the model with grpo.py
    python -m benchmarks.leaderboard table           the table of docs/results.md

An entry is a diff of grpo.py, with a description before its first line, and its record. A run is one process with one
thread, from its start to the first validation with 90 %: start-up, validations and export count.
"""

import hashlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional

from benchmarks.curves import ACCURACY, ROOT, provenance
from lib import InputError
from lib.cli.process import command_line

FOLDER = Path(__file__).parent
GOAL = 0.9
SEEDS = (1, 2, 3)
COMMON = "--config data/toy/preset.yaml --total-steps 400 --save-every 0 --save-rollouts 0"
TOOLS = "--model data/toy_tools/model --train-files data/toy_tools/train.jsonl --val-files data/toy_tools/val.jsonl"
TASKS = {
    "sums": f"{COMMON} --val-every 2",
    "rare sums": f"{COMMON} --val-every 5 --model data/toy_rare/model",
    "products": f"{COMMON} --val-every 2 {TOOLS} --max-response-length 48 --lr 3e-4 "
    "--multi-turn.tools calculator --multi-turn.max-turns 3",
}
MOST_LINES = 60  # of a diff, that come and go: an entry is read by people
LATER = 1.25  # verified steps to recorded steps: another CPU rounds otherwise, and then samples otherwise
SLOWER = 2.0  # verified seconds to recorded seconds: other CPUs, shared cores


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.diff"))


def measured() -> list[str]:
    return [name for name in names() if (FOLDER / f"{name}.json").exists()]


def record_of(name: str) -> dict[str, Any]:
    file = FOLDER / f"{name}.json"
    if not file.exists():
        raise InputError(f"{name}: no record; make it with `python -m benchmarks.leaderboard run {name}`")
    return json.loads(file.read_text())


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest(record: dict[str, Any]) -> str:
    return sha256(json.dumps({key: value for key, value in record.items() if key != "digest"}, sort_keys=True))


# ---- the script ----------------------------------------------------------------------------------
def patched(name: str, folder: Path) -> Path:
    """grpo.py with the diff, in the folder. Raises InputError where the diff is none, is long or does not apply."""
    text = (FOLDER / f"{name}.diff").read_text()
    script = Path(shutil.copy(ROOT / "grpo.py", folder))
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith("--- ")), len(lines))
    if not any(lines[:begin]):
        raise InputError(f"{name}.diff: describe the idea before the first line of the diff")
    if begin == len(lines):
        return script  # grpo.py itself
    files = [line.split()[1] for line in lines if line.startswith("--- ")]
    if files != ["grpo.py"]:
        raise InputError(f"{name}.diff: it changes {', '.join(files)}; an entry changes grpo.py only")
    changed = sum(line.startswith(("+", "-")) for line in lines[begin + 2 :])
    if changed > MOST_LINES:
        raise InputError(f"{name}.diff: {changed} lines come and go; at most {MOST_LINES}")
    command = ["patch", "--silent", "--fuzz=0", str(script)]
    done = subprocess.run(command, input=text, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"{name}.diff does not apply to grpo.py: {done.stdout.strip()}")
    return script


# ---- runs ----------------------------------------------------------------------------------------
def spawn(arguments: list[str], log: Path) -> float:
    """Runs a script of one thread to its end; the CPU seconds of its process and children."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)  # wait() does not say what this child alone used
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise InputError(f"{shlex.join(arguments)} failed:\n{log.read_text()[-3000:]}")
    return round(usage.ru_utime + usage.ru_stime, 1)


def measure(script: Path, flags: str, seed: int, folder: Path) -> dict[str, Any]:
    """A run until GOAL: its greedy accuracy by step, and its CPU seconds."""
    arguments = [str(script), *shlex.split(flags), "--seed", str(seed), "--stop-when", f"{ACCURACY} >= {GOAL}"]
    seconds = spawn([*arguments, "--output-dir", str(folder), "--run-name", "run"], folder / "log")
    rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    accuracy = [[row["step"], row[ACCURACY]] for row in rows if ACCURACY in row]
    return {"seed": seed, "accuracy": accuracy, "cpu_seconds": seconds}


def evaluate(flags: str, folder: Path) -> float:
    """The greedy accuracy of the folder's run/model, by the unchanged grpo.py."""
    arguments = [str(ROOT / "grpo.py"), *shlex.split(flags), "--val-only", "--model", str(folder / "run/model")]
    spawn([*arguments, "--output-dir", str(folder), "--run-name", "evaluation"], folder / "evaluation.log")
    [file] = Path(folder, "evaluation/val_only").glob("*/metrics.jsonl")
    return json.loads(file.read_text().splitlines()[-1])[ACCURACY]


def run(name: Positional[str], tasks: tuple[str, ...] = (), seeds: tuple[int, ...] = ()) -> None:
    """Measures an entry, one run after the other, and writes its record. tasks: others stay as recorded."""
    file, diff = FOLDER / f"{name}.json", sha256((FOLDER / f"{name}.diff").read_text())
    record = json.loads(file.read_text()) if file.exists() else {}
    if record.get("diff") != diff:
        record = {"runs": {}}
    record |= {"command": f"python -m benchmarks.leaderboard run {name}", **provenance(jobs=1)}
    record |= {"diff": diff, "grpo.py": sha256((ROOT / "grpo.py").read_text())}
    with tempfile.TemporaryDirectory() as temporary:
        script = patched(name, Path(temporary))
        for task in tasks or tuple(TASKS):
            for seed in seeds or SEEDS:
                folder = Path(temporary, f"{task}-{seed}".replace(" ", "_"))
                folder.mkdir()
                result = measure(script, TASKS[task], seed, folder)
                kept = [run for run in record["runs"].get(task, []) if run["seed"] != seed]
                record["runs"][task] = sorted([*kept, result], key=lambda run: run["seed"])
                record["digest"] = digest(record)
                file.write_text(json.dumps(record) + "\n")
                print(f"{name}, {task}, seed {seed}: {result['accuracy'][-1]} {result['cpu_seconds']} s", flush=True)


# ---- checks --------------------------------------------------------------------------------------
def check_entry(name: str) -> None:
    """Raises InputError for a record that is not of its diff, is incomplete, or says what no run can say."""
    with tempfile.TemporaryDirectory() as temporary:
        compile(patched(name, Path(temporary)).read_text(), f"{name}.diff", "exec")
    record = record_of(name)
    if record.get("diff") != sha256((FOLDER / f"{name}.diff").read_text()):
        raise InputError(f"{name}.diff is not the diff that was measured: run it again")
    if record.get("digest") != digest(record):
        raise InputError(f"{name}.json was edited after its runs: run it again")
    for task in TASKS:
        runs = record["runs"].get(task, [])
        if tuple(run["seed"] for run in runs) != SEEDS:
            raise InputError(f"{name}, {task}: the record needs seeds {SEEDS}")
        for one in runs:
            check_run(f"{name}, {task}, seed {one['seed']}", one)


def check_run(where: str, one: dict[str, Any]) -> None:
    steps, values = zip(*one["accuracy"])
    if list(steps) != sorted({*steps}) or steps[0] != 0:
        raise InputError(f"{where}: validations must begin before step 1, and their steps must rise")
    if any(value * 256 != round(value * 256) for value in values):  # rows of each validation set
        raise InputError(f"{where}: an accuracy is not a number of 256 rows")
    if values[-1] < GOAL or max(values[:-1]) >= GOAL:
        raise InputError(f"{where}: the last validation, and no other, must have {GOAL}")
    if not one["cpu_seconds"] > 0:
        raise InputError(f"{where}: no CPU seconds")


def check(entries: Positional[tuple[str, ...]] = ()) -> None:
    """Checks entries, or all that have a record, without a run."""
    for name in entries or measured():
        check_entry(name)
        print(f"{name}: in order")


def verify(name: Positional[str], task: str = "sums", seed: int = 1) -> None:
    """Runs one task of an entry again. Raises InputError if it needs more steps or seconds than the record says, or
    if the unchanged grpo.py finds less accuracy in the model."""
    check_entry(name)
    [recorded] = [run for run in record_of(name)["runs"][task] if run["seed"] == seed]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        again = measure(patched(name, folder), TASKS[task], seed, folder)
        evaluated = evaluate(TASKS[task], folder)
    compare(f"{name}, {task}, seed {seed}", recorded, again, evaluated)


def compare(where: str, recorded: dict[str, Any], again: dict[str, Any], evaluated: float) -> None:
    ours, theirs = again["accuracy"][-1], recorded["accuracy"][-1]
    print(f"{where}: step {theirs[0]}, {recorded['cpu_seconds']} s; now step {ours[0]}, {again['cpu_seconds']} s")
    if again["accuracy"] != recorded["accuracy"]:
        print("the curve is another one: so it is on another CPU or with other versions")
    every = recorded["accuracy"][1][0]
    if ours[1] < GOAL or ours[0] > max(theirs[0] * LATER, theirs[0] + every):
        raise InputError(f"{where}: {ours[1]:.3f} after step {ours[0]}; the record has {GOAL} after step {theirs[0]}")
    if again["cpu_seconds"] > SLOWER * recorded["cpu_seconds"]:
        raise InputError(f"{where}: more than {SLOWER:g} times the recorded seconds; is the machine busy?")
    if evaluated < GOAL:
        raise InputError(f"{where}: grpo.py finds an accuracy of {evaluated:.3f} in the model, less than {GOAL}")


# ---- table ---------------------------------------------------------------------------------------
def table() -> str:
    """One line an entry, those with the fewest seconds in all first, and those without a record at the end."""
    lines = ["| entry | " + " | ".join(f"{task}: CPU s, steps" for task in TASKS) + " | sum of CPU s | commit |"]
    lines += ["|---" * (len(TASKS) + 3) + "|"]
    rows = []
    for name in measured():
        record = record_of(name)
        seconds = {task: [run["cpu_seconds"] for run in record["runs"][task]] for task in TASKS}
        cells = []
        for task, own in seconds.items():
            steps = sorted({run["accuracy"][-1][0] for run in record["runs"][task]})
            span = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
            cells.append(f"{statistics.mean(own):.1f} ({min(own):.1f} to {max(own):.1f}), {span}")
        total = sum(map(statistics.mean, seconds.values()))
        rows.append((total, f"| {link(name)} | {' | '.join(cells)} | {total:.1f} | {record['commit']} |"))
    lines += [line for _, line in sorted(rows)]
    empty = " |" * (len(TASKS) + 1)
    return "\n".join(
        [*lines, *(f"| {link(name)} | not measured yet{empty} |" for name in names() if name not in measured())]
    )


def link(name: str) -> str:
    return f"[{name}](../benchmarks/leaderboard/{name}.diff)"


def show() -> None:
    """Prints the table of docs/results.md."""
    print(table())


if __name__ == "__main__":
    with command_line():
        tyro.extras.subcommand_cli_from_dict({"run": run, "check": check, "verify": verify, "table": show})
