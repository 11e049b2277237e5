"""Methods of papers/: tested diffs of a script.

    python -m tools.paper new NAME --base grpo    copies grpo.py to NAME.py, which you edit; of a wheel: `plainrl new`
    python -m tools.paper save NAME --base grpo   writes papers/NAME.diff, and a template of papers/NAME.md
    python -m tools.paper apply NAME              writes NAME.py; `make paper P=NAME`
    python -m tools.paper check NAME              the diff's size; NAME.py runs, replays, resumes, and runs on two ranks
    python -m tools.paper record NAME             runs NAME.py and its base for three seeds with the same CPU seconds
    python -m tools.paper table                   writes the tables of docs/papers.md and of the methods' pages
    python -m tools.paper refresh                 merges what has changed in the base scripts into all diffs

NAME.py is in the current folder. The first bash block of papers/NAME.md is what a reader copies and what this program
reads: lines that prepare files, `python NAME.py ...`, then the base's command to compare with. The flags of
`# check: FLAGS` replace those of the method in `check`, which then prepares nothing.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from tyro.conf import Positional

from lib import InputError
from lib.cli.process import command_line

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "papers"
SCRIPTS = ("grpo", "ppo", "remax", "dapo")
MOST_LINES = 80  # changed by a diff, see `changed_lines`
METRIC = "val/toy/arithmetic/mean@1"
SMALL = (
    *("--config", "data/toy/preset.yaml", "--train-files", "data/toy/val.jsonl", "--max-train-samples", "64"),
    *("--lr", "1e-5"),  # Adam's first step is lr x sign: a larger one makes of two ranks' rounding other samples
    *("--prompts-per-step", "8", "--group-size", "4", "--save-every", "1", "--keep-checkpoints", "0"),
    *("--no-val-before-train", "--no-export-model"),
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


def diff_of(name: str) -> str:
    """Raises InputError if there is none."""
    if name not in names():
        raise InputError(f"{name}: papers/ has {', '.join(names())}")
    return (FOLDER / f"{name}.diff").read_text()


def base_of(name: str) -> str:
    return diff_of(name).partition(".py\n")[0].removeprefix("--- ")


def changed_lines(diff: str) -> int:
    """The lines added or the lines removed, whichever are more, docstrings included."""
    lines = diff.splitlines()[2:]
    return max(sum(line.startswith(sign) for line in lines) for sign in "+-")


def write_diff(name: str, base: str, script: Path) -> None:
    command = ["diff", "-U2", f"--label={base}.py", f"--label={name}.py", str(ROOT / f"{base}.py"), str(script)]
    diff = subprocess.run(command, capture_output=True, text=True).stdout
    (FOLDER / f"{name}.diff").write_text(diff)
    print(f"papers/{name}.diff: {changed_lines(diff)} changed lines, at most {MOST_LINES}")


def patched(name: str, folder: Path, base: Path | None = None) -> Path:
    """NAME.py in the folder, made of the base script without fuzz. Raises InputError with what patch says."""
    script, base = folder / f"{name}.py", base or ROOT / f"{base_of(name)}.py"
    command = ["patch", "--silent", "--fuzz=0", "--reject-file=-", f"--output={script}", str(base)]
    done = subprocess.run(command, input=diff_of(name), capture_output=True, text=True)
    if done.returncode:
        way_out = "`python -m tools.paper refresh` merges what has changed there"
        raise InputError(f"papers/{name}.diff does not apply to {base.name}; {way_out}\n{done.stdout}{done.stderr}")
    return script


def write_script(name: str, source: Path) -> None:
    script = Path(f"{name}.py")
    if script.exists() and script.read_text() != source.read_text():
        raise InputError(
            f"{script} exists and has other lines: save it with `python -m tools.paper save`, or remove it"
        )
    shutil.copyfile(source, script)
    print(f"wrote {script}")


def new(name: Positional[str], base: str = "grpo") -> None:
    """Copies a script, to be edited."""
    if base not in SCRIPTS:
        raise InputError(f"--base {base}: choose one of {', '.join(SCRIPTS)}")
    if not name.isidentifier() or iskeyword(name):
        raise InputError(f"{name}: not a name of a module: use letters, digits and _, and leave out .py")
    if Path(f"{name}.py").exists():
        raise InputError(f"{name}.py exists: remove it, or choose another name")
    if name not in SCRIPTS and (name in sys.modules or find_spec(name)):
        raise InputError(f"{name}: a module of this name is installed, which {name}.py would hide: choose another name")
    write_script(name, ROOT / f"{base}.py")


def apply(name: Positional[str]) -> None:
    """Writes a method's script."""
    with tempfile.TemporaryDirectory() as folder:
        write_script(name, patched(name, Path(folder)))


def save(name: Positional[str], base: str = "") -> None:
    """Writes the diff of NAME.py, and a template of its page if there is none. base: empty: the saved diff's."""
    base = base or base_of(name)
    write_diff(name, base, Path(f"{name}.py"))
    if not (page := FOLDER / f"{name}.md").exists():
        page.write_text(TEMPLATE.format(name=name, base=base))


def refresh(only: Positional[tuple[str, ...]] = ()) -> None:
    """Writes the diffs against the present base scripts. Conflicts are left in NAME.py."""
    for name in only or names():
        base = base_of(name)
        with tempfile.TemporaryDirectory() as folder:
            commit = git("log", "-1", "--format=%H", "--", f"papers/{name}.diff").strip()
            before = Path(folder, f"{base}.py")
            before.write_text(git("show", f"{commit}:{base}.py"))
            script = patched(name, Path(folder), before)
            merge = ["git", "merge-file", str(script), str(before), str(ROOT / f"{base}.py")]
            if subprocess.run(merge).returncode:
                write_script(name, script)
                print(f"{name}: conflicts; edit {name}.py, then `python -m tools.paper save {name}`")
            else:
                write_diff(name, base, script)


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


# ---- the page, and runs of its commands ----------------------------------------------------------
class Commands(NamedTuple):
    """Of a page. method, base and check are flags."""

    prepare: str
    method: list[str]
    base: list[str]
    check: list[str] | None


def commands_of(name: str) -> Commands:
    """Raises InputError if the page lacks one."""
    block = (FOLDER / f"{name}.md").read_text().partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    form = rf"(.*?)^python {name}\.py(.*?)$.*?^python {base_of(name)}\.py(.*?)$(?:.*^# check: (.*?)$)?"
    if not (found := re.match(form, block, re.S | re.M)):
        wanted = f"`python {name}.py ...`, then `python {base_of(name)}.py ...`"
        raise InputError(f"papers/{name}.md: its first bash block needs {wanted}")
    prepare = re.sub("^make paper .*\n", "", found[1], flags=re.M)
    method, base = (shlex.split(flags, comments=True) for flags in found.group(2, 3))
    return Commands(prepare, method, base, None if found[4] is None else shlex.split(found[4]))


def workplace(name: str, folder: Path) -> Path:
    """The method's script in the folder, with links to what commands of a page name."""
    for entry in ("data", *(f"{script}.py" for script in SCRIPTS)):
        (folder / entry).symlink_to(ROOT / entry)
    return patched(name, folder)


def spawn(command: list[str], folder: Path) -> float:
    """Runs it to its end; the CPU seconds of its process and children. Raises InputError with the log if it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    with (folder / "log").open("w") as log:
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
    with tempfile.TemporaryDirectory() as folder:
        script = workplace(name, Path(folder))
        check_text(name, script)

        def run(flags: list[str], ranks: int = 1) -> None:
            launcher = [sys.executable] if ranks == 1 else ["torchrun", "--standalone", f"--nproc-per-node={ranks}"]
            spawn([*launcher, str(script), *flags], Path(folder))

        check_runs(name, Path(folder), run)
    print(f"{name}: {changed_lines(diff_of(name))} changed lines; runs, replays, resumes, and runs on two ranks")


def check_text(name: str, script: Path) -> None:
    if (lines := changed_lines(diff_of(name))) > MOST_LINES:
        raise InputError(f"papers/{name}.diff: {lines} changed lines; at most {MOST_LINES}")
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(ROOT / "grpo.py"), "-"]
        done = subprocess.run(ruff, input=script.read_text(), capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"{script.name}, ruff {' '.join(command)}: {done.stdout}{done.stderr}")


def check_runs(name: str, folder: Path, run: Callable[..., Any], resume_samples: bool = True) -> None:
    """Two steps; the second again, by a resume with a replay and, with resume_samples, by one that samples; both on two
    ranks. run(flags, ranks=1) runs the method's script."""
    commands = commands_of(name)
    if commands.check is None:
        spawn(["bash", "-ec", commands.prepare], folder)
    flags = [*SMALL, *(commands.method if commands.check is None else commands.check)]
    flags += ["--total-steps", "2", "--val-every", "0"]
    flags = [str(folder / word) if (folder / word).exists() else word for word in flags]
    flags += ["--output-dir", str(folder)]
    run([*flags, "--run-name", "whole", "--record", str(folder / "kept")])
    run([*flags, "--run-name", "ranks", "--save-every", "0"], ranks=2)
    whole = metrics(folder / "whole")
    compare(f"{name}: two ranks", whole, metrics(folder / "ranks"), 1e-3)  # sums in another order
    flags += ["--resume", str(folder / "whole/checkpoints/step_000001")]
    replay = ["--replay", str(folder / "kept"), "--resume-override", "replay"]
    for what, more in {"replay": replay, "resume": []}.items():
        if more or resume_samples:
            run([*flags, "--run-name", what, *more])
            compare(f"{name}: a {what} after step 1", whole[1:], metrics(folder / what), 0)
            if saved_state(folder / "whole") != saved_state(folder / what):
                raise InputError(f"{name}: a {what} after step 1 ends with another checkpoint")


def compare(what: str, rows: list[dict], others: list[dict], tolerance: float) -> None:
    """Raises InputError with the first metric that differs by more than the tolerance, relative to the larger or 1."""
    if len(rows) != len(others):
        raise InputError(f"{what} has {len(others)} steps, not {len(rows)}")
    for row, other in zip(rows, others):
        for key in sorted(key for key in {*row, *other} if not key.startswith(OF_RANKS)):
            a, b = row.get(key, math.nan), other.get(key, math.nan)
            if not abs(a - b) <= tolerance * max(1, abs(a), abs(b)):
                raise InputError(f"{what}: {key} of step {row['step']} is {b}, not {a}")


def saved_state(run: Path) -> dict[str, dict]:
    """{file of weights and optimizer states after step 2: its size and hash}"""
    files = json.loads((run / "checkpoints/step_000002/manifest.json").read_text())["files"]
    return {file: files[file] for file in files if file.endswith(".distcp")}


# ---- record --------------------------------------------------------------------------------------
def measure(folder: Path, metric: str, script: str, flags: list[str], seed: int) -> dict[str, Any]:
    """A run of the script in a workplace: the metric by step, and its CPU seconds."""
    run = folder / "runs" / f"{script}-{seed}-{len([*folder.glob('runs/*')])}"
    command = [sys.executable, f"{script}.py", *flags, "--seed", str(seed), "--run-name", run.name]
    seconds = spawn([*command, "--save-every", "0", "--save-rollouts", "0", "--no-export-model"], folder)
    rows = metrics(run)
    values = [[row["step"], row[metric]] for row in rows if metric in row]
    print(f"{script}, seed {seed}, step {rows[-1]['step']}: {values[-1][1]:.3f}, {seconds} CPU s", flush=True)
    return {"seed": seed, "values": values, "steps": rows[-1]["step"], "cpu_seconds": seconds}


def record(name: Positional[str], seeds: int = 3, metric: str = METRIC) -> None:
    """Runs the method and its base by the page's commands, the base for as many steps as take the same CPU seconds."""
    from benchmarks.curves import provenance

    commands, base = commands_of(name), base_of(name)
    with tempfile.TemporaryDirectory() as folder:
        workplace(name, Path(folder))
        spawn(["bash", "-ec", commands.prepare], Path(folder))
        run = partial(measure, Path(folder), metric)
        ours = [run(name, commands.method, seed) for seed in range(1, seeds + 1)]
        one, many = (run(base, [*commands.base, "--total-steps", n], 1) for n in ("1", "21"))
        rate = (many["cpu_seconds"] - one["cpu_seconds"]) / (many["steps"] - 1)  # CPU seconds a step
        steps = round(1 + (mean(ours, "cpu_seconds") - one["cpu_seconds"]) / rate)
        flags = [*commands.base, "--total-steps", str(max(1, steps))]
        theirs = [run(base, flags, seed) for seed in range(1, seeds + 1)]
    result = {"command": f"python -m tools.paper record {name}", **provenance(jobs=1), "metric": metric}
    result |= {"flags": {name: shlex.join(commands.method), base: shlex.join(commands.base)}}
    result |= {"runs": {name: ours, base: theirs}}
    (FOLDER / "records").mkdir(exist_ok=True)
    (FOLDER / f"records/{name}.json").write_text(json.dumps(result) + "\n")
    table()


def record_of(name: str) -> dict[str, Any] | None:
    file = FOLDER / f"records/{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


# ---- tables --------------------------------------------------------------------------------------
def mean(runs: list[dict], key: str) -> float:
    return sum(run[key] for run in runs) / len(runs)


def row_of(name: str) -> str:
    """Of the table in docs/papers.md."""
    text, base, found = (FOLDER / f"{name}.md").read_text(), base_of(name), record_of(name)
    title = text.partition("\n")[0].removeprefix("# ")
    papers = re.findall(r"\[[\d.]+\]\(https://arxiv.org/abs/[\d.]+\)", text.split("\n\n")[1])
    cells = [f"[{title}](../papers/{name}.md)", ", ".join(papers), f"{base}.py", str(changed_lines(diff_of(name)))]
    if found:
        runs = found["runs"][name], found["runs"][base]
        ends = [sum(run["values"][-1][1] for run in one) / len(one) for one in runs]
        cells += [f"{ends[0]:.3f}; {ends[1]:.3f}", "; ".join(f"{mean(one, 'cpu_seconds'):.0f}" for one in runs)]
        cells += [str(len(runs[0])), found["commit"]]
    else:
        cells += ["see its page", "", "", ""]
    return f"| {' | '.join(cells)} |\n"


def result_of(found: dict) -> str:
    """Of a method's page: the metric of each run at its validations."""
    text = f"`{found['metric']}`; `{found['command']}`, {found['machine']}, commit {found['commit']}.\n"
    for script, runs in found["runs"].items():
        steps = [str(step) for step, _ in runs[0]["values"]]
        text += f"\n| {script}.py after step | {' | '.join(steps)} | CPU s |\n{'|---' * (len(steps) + 2)}|\n"
        for run in runs:
            values = " | ".join(f"{value:.3f}" for _, value in run["values"])
            text += f"| seed {run['seed']} | {values} | {run['cpu_seconds']} |\n"
    return text


def tables() -> dict[Path, str]:
    """{page: its text with the present table}"""
    header = "| method | papers | base | changed lines | end of the run; base | CPU s; base | seeds | commit |\n"
    present = {ROOT / "docs/papers.md": header + "|---" * 8 + "|\n" + "".join(map(row_of, names()))}
    present |= {FOLDER / f"{name}.md": result_of(found) for name in names() if (found := record_of(name))}
    texts = {}
    for page, rows in present.items():
        before, begin, rest = page.read_text().partition("<!-- begin -->\n")
        texts[page] = before + begin + rows + rest[rest.index("<!-- end -->") :]
    return texts


def table() -> None:
    """Writes the tables of docs/papers.md and of the methods' pages."""
    for page, text in tables().items():
        page.write_text(text)


def command(program: str, description: str | None, *functions: Callable) -> None:
    with command_line():
        named = {function.__name__: function for function in functions}
        tyro.extras.subcommand_cli_from_dict(named, prog=program, description=description)


def plainrl() -> None:
    """Scripts of plainrl, to be edited and run."""
    command("plainrl", plainrl.__doc__, new, apply)


if __name__ == "__main__":
    command("python -m tools.paper", __doc__, new, save, apply, check, record, table, refresh)
