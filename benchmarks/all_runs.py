"""The tables of all embedded and pretrained runs, from their records: `python -m benchmarks.all_runs >
benchmarks/results/README.md`"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks import comparison, pretrained
from benchmarks.curves import ACCURACY, RESULTS

CURVES = ("scripts_curve", "estimators_curve", "comparison", "multi_turn_curve", "turn_credit", "agent_learn")
CURVES += ("compaction_curve", "vision_curve", "moe_curve")
TASKS = {  # of the model that a command names
    "data/toy/model": "Three-digit addition, where right samples are frequent",
    "data/toy_rare/model": "Three-digit addition, where right samples are rare",
    "data/toy_long/model": "Running totals of a list, three data sources (mean)",
    "data/toy_tools/model": "Products of five digits",
    "data/toy_list/model": "A list that is longer than the context",
    "data/toy_vision/model": "Counting shapes in an image",
    "data/toy_moe/model": "Three-digit addition, by a mixture of experts",
}
SUMS = TASKS["data/toy/model"]
PRETRAINED = "SmolLM2-135M-Instruct on sums and differences"
OF_PRETRAINED = {"": PRETRAINED} | {
    name: f"SmolLM2-135M-Instruct, {task.title}" for name, task in pretrained.TASKS.items()
}
HEAD = """# Records

Every training run whose record is in this folder, one row for each setting; [docs/results.md](../../docs/results.md)
says what follows from them. `python -m benchmarks.all_runs > benchmarks/results/README.md` writes this page.

- **setting**: the name in the record, which has the command and the machine. All runs were on shared CPUs, one thread a
  process.
- **before, after**: accuracy on held-out rows, mean over the seeds, and the range of the last validation. It is greedy
  except for the list and the last six rows of the products, which validate with a sample (temperature 1).
- **CPU s**: of the whole process of a run, start-up and validation included, mean over the seeds.
- **commit**: of the code; "-dirty" is a checkout with changes. An empty cell is a value that the record does not have.

Exact bias and variance of estimators, losses and corrections: [estimators.md](estimators.md)."""

RARE = """\
## Comparison where right samples are rare

Verdicts of [tools/compare.py](../../tools/compare.py) by seed, against grpo; in the groups of several updates, of 256
prompts and of asynchronous rollouts against the first row of the group; ppo and dapo against four updates."""
LONG = """\
## Comparison with ratios away from 1

Running totals, 30 steps of 128 responses. The accuracy is the mean of three data sources of 64 held-out lists each;
clipped tokens (`actor/pg_clipfrac`) and KL (`actor/ppo_kl`) are means over all updates."""


class Row(NamedTuple):
    task: str
    script: str
    setting: str
    seeds: list[int]
    curves: list[list[list[float]]]  # of each seed: (step, accuracy)
    cpu_seconds: list[float]  # of each seed; [] if the record has none
    commit: str
    record: str


def rows() -> Iterator[Row]:
    for name in CURVES:
        for setting, record in load(name).items():
            runs = record["runs"]
            curves = [run["curves"].get(ACCURACY) or run["curves"]["accuracy"] for run in runs]
            seconds = [run["cpu_seconds"] for run in runs if "cpu_seconds" in run]
            seeds = [run["seed"] for run in runs]
            script, task = script_of(record["command"]), task_of(record["command"])
            yield Row(task, script, setting, seeds, curves, seconds, record["commit"], f"{name}.json")
    yield from long_responses()
    yield from replayed(load("replay"))
    yield from asynchronous(load("async_rollouts")["learn"])
    yield from against_trl(SUMS, "vs_trl_learn")
    yield from of_pretrained()
    yield from against_trl(PRETRAINED, "vs_trl_pretrained")


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def script_of(command: str) -> str:
    return re.search(r"\w+\.py", command)[0]


def task_of(command: str) -> str:
    model = re.search(r"--model (\S+)", command)
    return TASKS[model[1] if model else "data/toy/model"]


def long_responses() -> Iterator[Row]:
    for setting, by_seed in comparison.long_runs().items():
        if runs := [by_seed[seed] for seed in sorted(by_seed)]:
            curves, seconds = [run["curves"][ACCURACY] for run in runs], [run["cpu_seconds"] for run in runs]
            command, commits = runs[0]["command"], ", ".join(dict.fromkeys(run["commit"] for run in runs))
            record = comparison.LONG_RECORD.name
            yield Row(task_of(command), script_of(command), setting, sorted(by_seed), curves, seconds, commits, record)


def replayed(record: dict[str, Any]) -> Iterator[Row]:
    seeds = [*record["seeds"]]
    names = [name for name in record["seeds"][seeds[0]] if name != "bytes"]
    for name in names:
        runs = [record["seeds"][seed][name] for seed in seeds]
        for kind in ("live", "replay"):
            curves = [run[kind][ACCURACY] for run in runs]
            seconds = [run["cpu_seconds"][kind] for run in runs]
            setting = f"4 updates, {name}, {kind}"
            yield Row(SUMS, "grpo.py", setting, [*map(int, seeds)], curves, seconds, record["commit"], "replay.json")


def asynchronous(record: dict[str, Any]) -> Iterator[Row]:
    for name, runs in record["runs"].items():
        seeds, curves = [run["seed"] for run in runs], [run["accuracy"] for run in runs]
        yield Row(SUMS, "grpo.py", f"rollouts {name}", seeds, curves, [], record["commit"], "async_rollouts.json")


def against_trl(task: str, name: str) -> Iterator[Row]:
    """Its CPU seconds are of the training alone, so that they are left out."""
    for engine, record in load(name).items():
        if "runs" not in record:
            continue
        runs = record["runs"]["plainrl"]
        steps = range(0, len(runs[0]["cpu"]), (len(runs[0]["cpu"]) - 1) // (len(runs[0]["accuracy"]) - 1))
        seeds, curves = [run["seed"] for run in runs], [list(zip(steps, run["accuracy"])) for run in runs]
        setting = f"the settings of the comparison with TRL, {engine}"
        yield Row(task, "grpo.py", setting, seeds, curves, [], record["commit"], f"{name}.json")


def of_pretrained() -> Iterator[Row]:
    for folder, title in OF_PRETRAINED.items():
        metric = pretrained.TASKS[folder or "sums"].metric
        for name, how, lines in pretrained.records(folder):
            curve = [[line["step"], line[metric]] for line in lines if metric in line]
            engine = "vllm" if "--rollout-engine vllm" in how["command"] else "hf"
            seconds = [how["cpu_seconds"]] if "cpu_seconds" in how else []
            record = f"{Path('pretrained', folder, name)}_{how['seed']}.jsonl"
            yield Row(title, script_of(how["command"]), engine, [how["seed"]], [curve], seconds, how["commit"], record)


def line(row: Row) -> str:
    before, after = ([curve[place][1] for curve in row.curves] for place in (0, -1))
    spread = f" ({min(after):.2f} to {max(after):.2f})" if len(after) > 1 else ""
    [steps] = {curve[-1][0] for curve in row.curves}
    seconds = f"{mean(row.cpu_seconds):.0f}" if row.cpu_seconds else ""
    record = f"[{row.record}]({row.record})"
    seeds = str(row.seeds[0]) if len(row.seeds) == 1 else f"{row.seeds[0]} to {row.seeds[-1]}"
    cells = [row.script, row.setting, seeds, f"{mean(before):.2f}", f"{mean(after):.2f}{spread}", str(steps), seconds]
    return f"| {' | '.join([*cells, row.commit, record])} |"


def page() -> str:
    lines = [HEAD]
    all_rows = [*rows()]
    for task in [*TASKS.values(), *OF_PRETRAINED.values()]:
        if not (own := [row for row in all_rows if row.task == task]):
            continue
        lines += [
            "",
            f"## {task}",
            "",
            "| script | setting | seeds | before | after | steps | CPU s | commit | record |",
        ]
        lines += ["|---" * 9 + "|", *map(line, own)]
    lines += ["", RARE, "", comparison.table(comparison.results())]
    lines += ["", LONG, "", comparison.long_table()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
