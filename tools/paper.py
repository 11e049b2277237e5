"""Methods of papers/: tested diffs of a script.

    python -m tools.paper new NAME --base grpo    copies grpo.py to NAME.py, which you edit
    python -m tools.paper save NAME --base grpo   writes papers/NAME.diff, and a template of papers/NAME.md
    python -m tools.paper apply NAME              writes NAME.py; `make paper P=NAME`
    python -m tools.paper check NAME              the diff's size; NAME.py runs, replays, resumes, and runs on two ranks
    python -m tools.paper record NAME             runs NAME.py and its base for three seeds with the same CPU seconds
    python -m tools.paper table                   writes the tables of docs/papers.md and of the methods' pages
    python -m tools.paper refresh                 merges what has changed in the base scripts into all diffs

NAME.py is in the current folder. The first bash block of papers/NAME.md is what a reader copies and what this program
reads: lines that prepare files, `python NAME.py ...`, the base's command to compare with, and, if `check` needs others,
`# check: FLAGS`. With that line `check` prepares nothing.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional

from lib import InputError
from lib.cli.process import command_line

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "papers"
BASES = ("grpo", "ppo", "remax", "dapo")
MOST_LINES = 80  # changed by a diff, see `changed_lines`
METRIC = "val/toy/arithmetic/mean@1"
SMALL = (
    *("--config", "data/toy/preset.yaml", "--train-files", "data/toy/val.jsonl", "--lr", "3e-4"),
    *("--prompts-per-step", "8", "--group-size", "4", "--save-every", "1", "--keep-checkpoints", "0"),
    *("--val-every", "0", "--no-val-before-train", "--no-export-model"),
)
OF_RANKS = ("perf/", "timing_", "rollout/imbalance", "training/micro_batches")  # metrics that depend on the ranks

TEMPLATE = """# Title of the method

NAME ([2601.00000](https://arxiv.org/abs/2601.00000)) does this and that.

$$A_i = R_i$$

```bash
make paper P={name}
python {name}.py --total-steps 20
python {base}.py --total-steps 20
# check: --lr 3e-4
```

## What changes, and why

## Deviations from the paper

## Result

<!-- begin -->
<!-- end -->
"""


# ---- diffs ---------------------------------------------------------------------------------------
def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.diff"))


def text_of(name: str) -> str:
    """The diff. Raises InputError if there is none."""
    if name not in names():
        raise InputError(f"{name}: papers/ has {', '.join(names())}")
    return (FOLDER / f"{name}.diff").read_text()


def base_of(name: str) -> str:
    return text_of(name).partition(".py\n")[0].removeprefix("--- ")


def changed_lines(text: str) -> int:
    """Of a diff: the lines added or the lines removed, whichever are more, docstrings included."""
    lines = text.splitlines()[2:]
    return max(sum(line.startswith(sign) for line in lines) for sign in "+-")


def difference(base: Path, script: Path) -> str:
    labels = [f"--label={base.name}", f"--label={script.name}"]
    command = ["diff", "-U2", *labels, str(base), str(script)]
    return subprocess.run(command, capture_output=True, text=True).stdout


def patched(name: str, folder: Path, base: Path | None = None) -> Path:
    """NAME.py in the folder, made of the base script without fuzz. Raises InputError with what patch says."""
    script, base = folder / f"{name}.py", base or ROOT / f"{base_of(name)}.py"
    command = ["patch", "--silent", "--fuzz=0", "--reject-file=-", f"--output={script}", str(base)]
    done = subprocess.run(command, input=text_of(name), capture_output=True, text=True)
    if done.returncode:
        script.unlink(missing_ok=True)
        help = "`python -m tools.paper refresh` merges what has changed there"
        raise InputError(f"papers/{name}.diff does not apply to {base.name}; {help}\n{done.stdout}{done.stderr}")
    return script


def new(name: Positional[str], base: str = "grpo") -> None:
    """Copies a script, to be edited."""
    write(Path(f"{name}.py"), (ROOT / f"{base}.py").read_text())


def apply(name: Positional[str]) -> None:
    """Writes a method's script."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(f"{name}.py"), patched(name, Path(folder)).read_text())


def write(script: Path, text: str) -> None:
    if script.exists() and script.read_text() != text:
        raise InputError(
            f"{script} exists and has other lines: save it with `python -m tools.paper save`, or remove it"
        )
    script.write_text(text)
    print(f"wrote {script}")


def save(name: Positional[str], base: str = "") -> None:
    """Writes the diff of NAME.py, and a template of its page if there is none. base: without it the diff's."""
    base = base or base_of(name)
    text = difference(ROOT / f"{base}.py", Path(f"{name}.py"))
    (FOLDER / f"{name}.diff").write_text(text)
    page = FOLDER / f"{name}.md"
    if not page.exists():
        page.write_text(TEMPLATE.format(name=name, base=base))
    print(f"papers/{name}.diff: {changed_lines(text)} changed lines, at most {MOST_LINES}")


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def refresh(only: Positional[tuple[str, ...]] = ()) -> None:
    """Writes the diffs against the present base scripts. What both changed is left in NAME.py as a conflict."""
    for name in only or names():
        with tempfile.TemporaryDirectory() as temporary:
            folder, base = Path(temporary), f"{base_of(name)}.py"
            git = ["git", "-C", str(ROOT)]
            of_diff = subprocess.check_output(
                [*git, "log", "-1", "--format=%H", "--", f"papers/{name}.diff"], text=True
            )
            old = folder / base
            old.write_bytes(subprocess.check_output([*git, "show", f"{of_diff.strip()}:{base}"]))
            script = patched(name, folder, old)
            merge = ["git", "merge-file", "-L", name, "-L", "before", "-L", base]
            conflicts = subprocess.run([*merge, str(script), str(old), str(ROOT / base)]).returncode
            if conflicts:
                write(Path(script.name), script.read_text())
                print(f"{name}: {conflicts} conflicts; edit {name}.py, then `python -m tools.paper save {name}`")
            else:
                (FOLDER / f"{name}.diff").write_text(difference(ROOT / base, script))


# ---- the page ------------------------------------------------------------------------------------
def page_of(name: str) -> dict[str, Any]:
    """prepare: shell lines; method, base: flags; check: flags or None. Raises InputError if one is missing."""
    text, base = (FOLDER / f"{name}.md").read_text(), base_of(name)
    lines = text.partition("```bash\n")[2].partition("\n```")[0].replace("\\\n", " ").splitlines()
    starts = [line.split("#")[0].split(".py")[0] for line in lines]
    if f"python {name}" not in starts or f"python {base}" not in starts[starts.index(f"python {name}") :]:
        raise InputError(f"papers/{name}.md: its bash block needs `python {name}.py ...`, then `python {base}.py ...`")
    at = starts.index(f"python {name}")
    commands = [shlex.split(line, comments=True)[2:] for line in (lines[at], lines[starts.index(f"python {base}", at)])]
    check = next((shlex.split(line.removeprefix("# check:")) for line in lines if line.startswith("# check:")), None)
    prepare = [line for line in lines[:at] if not line.startswith("make paper")]
    return {"prepare": "\n".join(prepare), "method": commands[0], "base": commands[1], "check": check}


def workplace(name: str, folder: Path) -> Path:
    """The method's script in the folder, with links to what commands of a page name."""
    for entry in ("data", *(f"{base}.py" for base in BASES)):
        (folder / entry).symlink_to(ROOT / entry)
    return patched(name, folder)


def spawn(command: list[str], folder: Path) -> float:
    """Runs it to its end; the CPU seconds of its process and children."""
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (folder / "log").open("w") as log:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | paths
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)  # wait() does not say what this child alone used
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise InputError(f"{shlex.join(command)} failed:\n{(folder / 'log').read_text()[-3000:]}")
    return round(usage.ru_utime + usage.ru_stime, 1)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- check ---------------------------------------------------------------------------------------
def check(name: Positional[str]) -> None:
    """Raises InputError for the first thing that is wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        script = workplace(name, folder)
        check_text(name, script)

        def run(flags: list[str], ranks: int = 1) -> None:
            launcher = ["torchrun", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]
            spawn([*launcher, str(script), *flags], folder)

        check_runs(name, folder, run)
    print(f"{name}: {changed_lines(text_of(name))} changed lines; runs, replays, resumes, and runs on two ranks")


def check_text(name: str, script: Path) -> None:
    if (lines := changed_lines(text_of(name))) > MOST_LINES:
        raise InputError(f"papers/{name}.diff: {lines} changed lines; at most {MOST_LINES}")
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(ROOT / "grpo.py"), "-"]
        done = subprocess.run(ruff, input=script.read_text(), capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"{script.name}, ruff {' '.join(command)}: {done.stdout}{done.stderr}")


def check_runs(name: str, folder: Path, run: Callable[..., Any]) -> None:
    """Two steps, replayed, resumed after the first, and on two ranks. run(flags, ranks=1) runs the method's script."""
    page = page_of(name)
    if page["check"] is None:
        spawn(["bash", "-ec", page["prepare"]], folder)
    flags = [*SMALL, *(page["method"] if page["check"] is None else page["check"]), "--total-steps", "2"]
    flags = [str(folder / word) if (folder / word).exists() else word for word in flags]
    flags += ["--output-dir", str(folder)]
    kept, first = str(folder / "kept"), str(folder / "whole/checkpoints/step_000001")
    run([*flags, "--run-name", "whole", "--record", kept])
    run([*flags, "--run-name", "replay", "--replay", kept])
    run([*flags, "--run-name", "resume", "--resume", first])
    run([*flags, "--run-name", "ranks"], ranks=2)
    whole, ranks = metrics(folder / "whole"), metrics(folder / "ranks")
    compare(f"{name}: a replay", whole, metrics(folder / "replay"), 0)
    compare(f"{name}: a resume", whole[1:], metrics(folder / "resume"), 0)
    compare(f"{name}: two ranks", whole, ranks, 1e-3)  # sums in another order
    ends = [
        json.loads((folder / run / "checkpoints/step_000002/manifest.json").read_text()) for run in ("whole", "resume")
    ]
    weights = [{name: end["files"][name] for name in end["files"] if name.endswith(".distcp")} for end in ends]
    if weights[0] != weights[1]:
        raise InputError(f"{name}: a resume after step 1 ends with another checkpoint")


def saved_states(run: Path) -> dict[str, dict]:
    """{file of weights and optimizer states after step 2: size and hash}"""
    files = json.loads((run / "checkpoints/step_000002/manifest.json").read_text())["files"]
    return {file: files[file] for file in files if file.endswith(".distcp")}


def compare(what: str, rows: list[dict], others: list[dict], tolerance: float) -> None:
    """Raises InputError with the first metric that differs by more than the tolerance, relative to the larger or 1."""
    if len(rows) != len(others):
        raise InputError(f"{what} has {len(others)} steps, not {len(rows)}")
    for row, other in zip(rows, others):
        for key in sorted({*row, *other}):
            a, b = row.get(key, math.nan), other.get(key, math.nan)
            if not key.startswith(OF_RANKS) and not abs(a - b) <= tolerance * max(1, abs(a), abs(b)):
                raise InputError(f"{what}: {key} of step {row['step']} is {b}, not {a}")


# ---- record --------------------------------------------------------------------------------------
def measure(folder: Path, metric: str, script: str, flags: list[str], seed: int, steps: int = 0) -> dict[str, Any]:
    """A run of the script in a workplace: the metric by step, and its CPU seconds. steps: if the flags do not say."""
    command = [sys.executable, f"{script}.py", *flags, "--seed", str(seed), "--save-every", "0"]
    command += ["--no-export-model", "--save-rollouts", "0", "--run-name", f"{script}-{seed}-{steps}"]
    seconds = spawn([*command, *(["--total-steps", str(steps)] if steps else [])], folder)
    rows = metrics(folder / f"runs/{script}-{seed}-{steps}")
    values = [[row["step"], row[metric]] for row in rows if metric in row]
    print(f"{script}, seed {seed}: {values[-1]}, {seconds} CPU s", flush=True)
    return {"seed": seed, "values": values, "steps": rows[-1]["step"], "cpu_seconds": seconds}


def record(name: Positional[str], seeds: int = 3, metric: str = METRIC) -> None:
    """Runs the method and its base by the page's commands, the base for as many steps as take the same CPU seconds."""
    from benchmarks.curves import provenance

    page, base, runs = page_of(name), base_of(name), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        workplace(name, folder)
        spawn(["bash", "-ec", page["prepare"]], folder)
        run = partial(measure, folder, metric)
        runs[name] = [run(name, page["method"], seed) for seed in range(1, seeds + 1)]
        start, whole = run(base, page["base"], 1, 1), run(base, page["base"], 1)
        goal = sum(one["cpu_seconds"] for one in runs[name]) / seeds
        rate = (whole["cpu_seconds"] - start["cpu_seconds"]) / (whole["steps"] - 1)  # CPU seconds a step
        steps = max(1, round(1 + (goal - start["cpu_seconds"]) / rate))
        runs[base] = [run(base, page["base"], seed, steps) for seed in range(1, seeds + 1)]
    result = {"command": f"python -m tools.paper record {name} --seeds {seeds}", **provenance(jobs=1)}
    result |= {"flags": {name: shlex.join(page["method"]), base: shlex.join(page["base"])}, "metric": metric}
    (FOLDER / f"records/{name}.json").write_text(json.dumps(result | {"runs": runs}) + "\n")
    table()


# ---- tables --------------------------------------------------------------------------------------
def record_of(name: str) -> dict[str, Any] | None:
    file = FOLDER / f"records/{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def methods_table() -> str:
    lines = ["| method | papers | base | changed lines | end of the run, base's | CPU s | commit |", "|---" * 7 + "|"]
    for name in names():
        text, found = (FOLDER / f"{name}.md").read_text(), record_of(name)
        title = text.partition("\n")[0].removeprefix("# ")
        papers = re.findall(r"\[[\d.]+\]\(https://arxiv.org/abs/[\d.]+\)", text.split("\n\n")[1])
        cells = [f"[{title}](../papers/{name}.md)", ", ".join(papers), base_of(name), str(changed_lines(text_of(name)))]
        lines.append(f"| {' | '.join(cells + (summary(name, found) if found else ['not measured yet', '', '']))} |")
    return "\n".join(lines) + "\n"


def summary(name: str, found: dict) -> list[str]:
    ends, seconds = {}, {}
    for script, runs in found["runs"].items():
        ends[script] = mean([run["values"][-1][1] for run in runs])
        seconds[script] = mean([run["cpu_seconds"] for run in runs])
    base = base_of(name)
    return [f"{ends[name]:.3f}, {ends[base]:.3f}", f"{seconds[name]:.0f}, {seconds[base]:.0f}", found["commit"]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def result_table(found: dict) -> str:
    """Of a method's page: values of each seed at the validations."""
    lines = []
    for script, runs in found["runs"].items():
        steps = [step for step, _ in runs[0]["values"]]
        lines += ["", f"| {script}.py after step | {' | '.join(map(str, steps))} | CPU s |"]
        lines += ["|---" * (len(steps) + 2) + "|"]
        for run in runs:
            values = " | ".join(f"{value:.3f}" for _, value in run["values"])
            lines.append(f"| seed {run['seed']} | {values} | {run['cpu_seconds']} |")
    where = f"`{found['command']}`, {found['machine']}, commit {found['commit']}."
    return "\n".join([f"`{found['metric']}`; {where}", *lines]) + "\n"


def tables() -> dict[Path, str]:
    """{page: its text with the present table}"""
    present = {ROOT / "docs/papers.md": methods_table()}
    present |= {FOLDER / f"{name}.md": result_table(found) for name in names() if (found := record_of(name))}
    texts = {}
    for page, rows in present.items():
        before, begin, rest = page.read_text().partition("<!-- begin -->\n")
        _, end, after = rest.partition("<!-- end -->")
        texts[page] = f"{before}{begin}{rows}{end}{after}"
    return texts


def table() -> None:
    """Writes the tables of docs/papers.md and of the methods' pages."""
    for page, text in tables().items():
        page.write_text(text)


if __name__ == "__main__":
    with command_line():
        commands = {f.__name__: f for f in (new, save, apply, check, record, table, refresh)}
        tyro.extras.subcommand_cli_from_dict(commands, prog="python -m tools.paper", description=__doc__)
