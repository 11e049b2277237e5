"""How accurate is SmolLM2-135M-Instruct on sums after a fixed time? Entries are diffs of grpo.py (docs/results.md).

    python -m benchmarks.speedrun --seconds 300 --script mine.py --note "why"    one try; appends to runs/speedrun.jsonl
    python -m benchmarks.speedrun run NAME --budgets cpu_120     measures benchmarks/speedrun/NAME.diff, to NAME.json
    python -m benchmarks.speedrun check                          checks every diff and record, without a run
    python -m benchmarks.speedrun verify NAME                    makes a recorded run again
    python -m benchmarks.speedrun table                          the table of docs/results.md

A run is one process from the start of Python to the export of its model; grpo.py without a change then evaluates the
model on the held-out rows of the task `sums` of benchmarks/pretrained.py. On CPUs a run has one thread, and its CPU
seconds must fit the budget too. program.md is for a person or a program that looks for improvements.
"""

import hashlib
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from tyro.conf import Positional

from benchmarks.curves import ROOT, job_env, provenance, spawn
from benchmarks.pretrained import TASKS, make_inputs, read_lines
from lib import InputError
from lib.cli.process import command_line

FOLDER = Path(__file__).parent
TASK = TASKS["sums"]
QUESTIONS = 296  # held-out rows
SEEDS = (1, 2, 3)


class Budget(NamedTuple):
    device: str
    seconds: float


BUDGETS = {
    "cpu_120": Budget("cpu", 120),
    "cpu_600": Budget("cpu", 600),
    "gpu_300": Budget("gpu", 300),
    "gpu_900": Budget("gpu", 900),
}
FLAGS = f"{TASK.flags} --lr 2e-5 --compute-dtype bfloat16 --total-steps 100000 --val-every 0 --no-val-before-train "
FLAGS += "--save-every 0 --save-rollouts 0"
OF_DEVICE = {
    "cpu": "--prompts-per-step 16 --group-size 8 --reward-workers 0",
    "gpu": "--prompts-per-step 64 --group-size 16 --max-response-length 64 --rollout-engine vllm",
}
MOST_LINES = 60  # of a diff, that come and go: an entry is read by people
LATE = 1.05  # seconds of a run to those of its budget: a step may take longer than all before it


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.diff"))


def measured() -> list[str]:
    return [name for name in names() if (FOLDER / f"{name}.json").exists()]


def record_of(name: str) -> dict[str, Any]:
    file = FOLDER / f"{name}.json"
    if not file.exists():
        raise InputError(f"{name}: no record; make it with `python -m benchmarks.speedrun run {name}`")
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
def measure(script: Path, inputs: list[str], budget: Budget, seed: int, temporary: Path) -> dict[str, Any]:
    """A run within the budget, and the accuracy of the model that it leaves."""
    flags = shlex.split(f"{FLAGS} {OF_DEVICE[budget.device]} --seed {seed} --max-seconds {budget.seconds:g}")
    env = job_env(1) | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory(dir=temporary) as folder:
        log, given = Path(folder, "log"), [*inputs, *flags, "--output-dir", folder]
        start = time.perf_counter()
        cpu_seconds = spawn([sys.executable, str(script), *given, "--run-name", "run"], log, env)
        seconds = round(time.perf_counter() - start, 1)
        steps = read_lines(Path(folder, "run/metrics.jsonl"))[-1]["step"]
        evaluation = ["--run-name", "evaluation", "--val-only", "--model", f"{folder}/run/model"]
        spawn([sys.executable, str(ROOT / "grpo.py"), *given, *evaluation], log, env)
        *_, after = read_lines(Path(folder, "evaluation/val_only/1/metrics.jsonl"))
    found = {"accuracy": after[TASK.metric]} | {end: after[f"{TASK.metric}/{end}"] for end in ("ci_low", "ci_high")}
    return {"seed": seed, **found, "steps": steps, "seconds": seconds, "cpu_seconds": cpu_seconds}


def attempt(
    seconds: float = 300,
    script: Path = ROOT / "grpo.py",
    seed: int = 1,
    note: str = "",
    log: Path = Path("runs/speedrun.jsonl"),
) -> None:
    """One run of a script, and a line of the log.

    Args:
        seconds: of the run.
        script: grpo.py or a copy of it.
        seed: of the run.
        note: what the copy changes, and why.
        log: file to which the result is appended.
    """
    budget = Budget("gpu" if torch.cuda.is_available() else "cpu", seconds)
    with tempfile.TemporaryDirectory() as temporary:
        inputs = make_inputs("sums", Path(temporary))
        result = measure(script.absolute(), inputs, budget, seed, Path(temporary))
    how = {"note": note, "script": str(script), "sha256": sha256(script.read_text()), **budget._asdict()}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(json.dumps(how | {"run": result, **provenance(jobs=1)}) + "\n")
    print(f"{script.name}, {seconds:g} s, {budget.device}: {shown(result)}; logged in {log}")


def shown(result: dict[str, Any]) -> str:
    interval = f"{result['ci_low']:.3f} to {result['ci_high']:.3f}"
    steps = f"{result['steps']} steps, {result['seconds']} s, {result['cpu_seconds']} CPU s"
    return f"accuracy {result['accuracy']:.3f} ({interval}), {steps}"


def run(
    name: Positional[str], budgets: tuple[Literal[tuple(BUDGETS)], ...] = ("cpu_120",), seeds: tuple[int, ...] = ()
) -> None:
    """Measures an entry, one run after the other, and writes its record. What it has of others stays."""
    file, diff = FOLDER / f"{name}.json", sha256((FOLDER / f"{name}.diff").read_text())
    record = json.loads(file.read_text()) if file.exists() else {}
    if record.get("diff") != diff:
        record = {"diff": diff, "budgets": {}}
    with tempfile.TemporaryDirectory() as temporary:
        inputs, script = make_inputs("sums", Path(temporary)), patched(name, Path(temporary))
        for budget in budgets:
            for seed in seeds or SEEDS:
                result = measure(script, inputs, BUDGETS[budget], seed, Path(temporary))
                kept = record["budgets"].get(budget, {"runs": []})["runs"]
                runs = sorted([*(run for run in kept if run["seed"] != seed), result], key=lambda run: run["seed"])
                record["budgets"][budget] = {"runs": runs, "grpo.py": sha256((ROOT / "grpo.py").read_text())}
                record["budgets"][budget] |= provenance(jobs=1)
                record["digest"] = digest(record)
                file.write_text(json.dumps(record) + "\n")
                print(f"{name}, {budget}, seed {seed}: {shown(result)}", flush=True)


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
    for budget, measured in record["budgets"].items():
        if tuple(run["seed"] for run in measured["runs"]) != SEEDS:
            raise InputError(f"{name}, {budget}: the record needs seeds {SEEDS}")
        for one in measured["runs"]:
            check_run(f"{name}, {budget}, seed {one['seed']}", BUDGETS[budget], one)


def check_run(where: str, budget: Budget, one: dict[str, Any]) -> None:
    if not round(one["accuracy"] * QUESTIONS, 6).is_integer() or not 0 <= one["accuracy"] <= 1:
        raise InputError(f"{where}: the accuracy is not a number of {QUESTIONS} questions")
    used = one["seconds"] if budget.device == "gpu" else max(one["seconds"], one["cpu_seconds"])
    if not 0 < used <= LATE * budget.seconds:
        raise InputError(f"{where}: {used} s, more than the budget of {budget.seconds:g} s")


def check(entries: Positional[tuple[str, ...]] = ()) -> None:
    """Checks entries, or all that have a record, without a run."""
    for name in entries or measured():
        check_entry(name)
        print(f"{name}: in order")


def verify(name: Positional[str], budget: Literal[tuple(BUDGETS)] = "cpu_120", seed: int = 1) -> None:
    """Makes one recorded run again. Raises InputError if its accuracy is below the interval of the recorded one."""
    check_entry(name)
    [recorded] = [run for run in record_of(name)["budgets"][budget]["runs"] if run["seed"] == seed]
    with tempfile.TemporaryDirectory() as temporary:
        inputs, script = make_inputs("sums", Path(temporary)), patched(name, Path(temporary))
        again = measure(script, inputs, BUDGETS[budget], seed, Path(temporary))
    compare(f"{name}, {budget}, seed {seed}", BUDGETS[budget], recorded, again)


def compare(where: str, budget: Budget, recorded: dict[str, Any], again: dict[str, Any]) -> None:
    print(f"{where}: {shown(recorded)}\nnow: {shown(again)}")
    check_run(where, budget, again)
    if again["accuracy"] < recorded["ci_low"]:
        few = f"; {again['steps']} steps instead of {recorded['steps']}: is the machine busy?"
        why = few * (again["steps"] < 0.9 * recorded["steps"])
        raise InputError(f"{where}: {again['accuracy']:.3f}, below the recorded interval{why}")


# ---- table ---------------------------------------------------------------------------------------
def table() -> str:
    """One line an entry and budget, the most accurate of each budget first, and entries without a record at the end."""
    lines = ["| budget | entry | accuracy | steps | CPU seconds | machine | commit |", "|---" * 7 + "|"]
    for budget in BUDGETS:
        rows = []
        for name in measured():
            if record := record_of(name)["budgets"].get(budget):
                accuracy, steps, seconds = (
                    [run[key] for run in record["runs"]] for key in ("accuracy", "steps", "cpu_seconds")
                )
                mean = statistics.mean(accuracy)
                cells = [f"{mean:.3f} ({min(accuracy):.3f} to {max(accuracy):.3f})", spread(steps), spread(seconds)]
                cells += [record["machine"].partition(",")[0], record["commit"]]
                rows.append((-mean, f"| {budget} | {link(name)} | {' | '.join(cells)} |"))
        lines += [line for _, line in sorted(rows)]
    without = [name for name in names() if name not in measured() or not record_of(name)["budgets"]]
    return "\n".join([*lines, *(f"| not measured yet | {link(name)} | | | | | |" for name in without)])


def spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def link(name: str) -> str:
    return f"[{name}](../benchmarks/speedrun/{name}.diff)"


def show() -> None:
    """Prints the table of docs/results.md."""
    print(table())


COMMANDS = {"attempt": attempt, "run": run, "check": check, "verify": verify, "table": show}

if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] and words[0] in (*COMMANDS, "-h", "--help"):
        given = words
    else:
        given = ["attempt", *words]
    with command_line():
        tyro.extras.subcommand_cli_from_dict(COMMANDS, args=given)
