"""The learning curves of the documents: runs on the embedded task with several seeds, drawn as mean and spread.

    python benchmarks/curves.py                               runs everything (an hour on two cores), then draws
    python benchmarks/curves.py --scripts dapo --variants --tasks --images     runs dapo.py only; the other records stay
    python benchmarks/curves.py --draw                        draws from the records in benchmarks/results/

docs/scripts_curve.png and <script>_curve.png: the four scripts; docs/estimators_curve.png: flags of grpo.py;
docs/multi_turn_curve.png: the embedded task with tools; docs/vision_curve.png: that with images.
"""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
COLORS = {"grpo": "tab:blue", "ppo": "tab:orange", "remax": "tab:green", "dapo": "tab:red"}
VARIANTS = {  # flags of grpo.py
    "rloo": "--adv-estimator rloo",
    "opo": "--adv-estimator opo",
    "maxrl": "--adv-estimator maxrl",
    "grpo_leave_one_out": "--adv-estimator grpo_leave_one_out",
    "reinforce_plus_plus_baseline": "--adv-estimator reinforce_plus_plus_baseline",
    "dr_grpo": "--adv-estimator dr_grpo --loss-agg-mode seq-mean-token-sum-norm",
    # losses: several updates a step, or every ratio is 1 and they are all the policy gradient
    "gspo": "--loss gspo --loss-agg-mode seq-mean-token-mean --num-mini-batches 4",
    "sapo": "--loss sapo --loss-agg-mode seq-mean-token-mean --num-mini-batches 4",
    "cispo": "--loss cispo --num-mini-batches 4",
    "dppo_tv": "--loss dppo_tv --num-mini-batches 4",
}
TOOLS = "--config data/toy/preset.yaml --model data/toy_tools/model"
TOOLS += " --train-files data/toy_tools/train.jsonl --val-files data/toy_tools/val.jsonl"
TOOLS += " --max-prompt-length 32 --lr 3e-4 --total-steps 40"
TASKS = {  # of grpo.py
    "with the calculator": TOOLS
    + """ --max-response-length 48 --multi-turn.tools calculator --multi-turn.max-turns 3""",
    "without": TOOLS + " --max-response-length 16",
}
IMAGES = {  # of grpo.py
    name: "--config data/toy/preset.yaml --model data/toy_vision/model "
    f"--train-files {rows}/train.jsonl --val-files {rows}/val.jsonl --total-steps 40{more}"
    for name, rows, more in [
        ("hf", "data/toy_vision", ""),
        ("vllm", "data/toy_vision", " --rollout-engine vllm"),
        ("white images", "data/toy_vision/blank", ""),
    ]
}
FLAGS = "--val-every 2"
ACCURACY = "val/toy/arithmetic/mean@1"
PANELS = {
    ACCURACY: "greedy accuracy on held-out sums",
    "reward/mean": "reward of the samples (temperature 1)",
    "response_length/mean": "response length (tokens)",
}
TOOL_CALLS = "agent/tool_calls_mean"
COSTS = {"training/tokens": "prompt and response tokens, summed", "timing_s/step": "seconds of training"}


def job_env(ranks: int) -> dict[str, str]:
    """For tools/launch/one_node.sh, which looks for torchrun on the PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"OMP_NUM_THREADS": "1", "GPUS": str(ranks), "PATH": path}


def spawn(command: list[str], log: Path, env: dict[str, str]) -> float:
    """Runs it to its end; the CPU seconds of its process and children. Raises RuntimeError with the log if it fails."""
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)  # wait() does not say what this child alone used
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {shlex.join(command)}\n{log.read_text()[-3000:]}")
    return round(usage.ru_utime + usage.ru_stime, 1)


def run_seed(script: str, flags: str, seed: int, ranks: int = 1, keys: tuple[str, ...] = ()) -> dict:
    """One run in processes of its own: its curves, wall and CPU seconds (start-up and validation included).

    keys: more metrics of which the curves are wanted."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = sys.executable if ranks == 1 else "tools/launch/one_node.sh"
        command = [launcher, f"{script}.py", *FLAGS.split(), *shlex.split(flags), "--seed", str(seed)]
        command += ["--output-dir", folder, "--run-name", "run"]
        start = time.perf_counter()
        cpu_seconds = spawn(command, Path(folder, "log"), job_env(ranks))
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    for row in rows:  # whatever the data sources are called; equal weights, if there are several
        if of_sources := [row[key] for key in row if key.endswith("/mean@1")]:
            row[ACCURACY] = statistics.mean(of_sources)
    wanted = [*PANELS, *COSTS, TOOL_CALLS, *keys]
    curves = {key: [(row["step"], row[key]) for row in rows if key in row] for key in wanted}
    result = {
        "seed": seed,
        "accuracy_before": curves[ACCURACY][0][1],
        "accuracy_after": curves[ACCURACY][-1][1],
        "first_step_at_90_percent": next((step for step, value in curves[ACCURACY] if value >= 0.9), None),
        "wall_seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": cpu_seconds,
        "training_seconds": round(sum(value for _, value in curves["timing_s/step"]), 1),
    }
    print(f"{script}.py {flags} {result}", flush=True)
    return result | {"curves": curves}


def provenance(jobs: int) -> dict:
    describe = ["git", "describe", "--always", "--exclude", "*"]
    written = ("benchmarks/results", "benchmarks/speedrun/*.json", "docs", "papers/*.md", "papers/records")
    changed = ["git", "diff", "--quiet", "HEAD", "--", ".", *(f":!{path}" for path in written)]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    dirty = "-dirty" if subprocess.run(changed, cwd=ROOT).returncode else ""
    cpus = [line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "commit": f"{commit}{dirty}",
        "date": date.today().isoformat(),
        "machine": f"{[*cpus, platform.processor()][0]}, {os.cpu_count()} cores, {jobs} one-thread runs at a time",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")},
    }


def load_records(figure: str) -> dict[str, dict]:
    """By name: how it was run, and a result per seed."""
    file = RESULTS / f"{figure}_curve.json"
    return json.loads(file.read_text()) if file.exists() else {}


def curve(runs: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps (N,) and values (seeds, N)."""
    values = np.array([run["curves"][key] for run in runs])  # (seeds, N, 2)
    return values[0, :, 0], values[:, :, 1]


def plot(axes: Axes, x: np.ndarray, values: np.ndarray, color: str, label: str | None = None) -> None:
    axes.plot(x, values.mean(0), color=color, linewidth=2, label=label)
    axes.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_script(script: str, runs: list[dict]) -> None:
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    figure.suptitle(f"python {script}.py: three-digit addition, 0.54 M parameters, one CPU core")
    for axes, (key, label) in zip(figure.subplots(1, 3), PANELS.items()):
        steps, values = curve(runs, key)
        plot(axes, steps, values, COLORS[script], f"mean of {len(runs)} seeds")
        axes.plot(steps, values.T, color=COLORS[script], alpha=0.25, linewidth=1)
        axes.set(xlabel="step", ylabel=label)
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(ROOT / f"docs/{script}_curve.png")


def draw_scripts(runs_of: dict[str, list[dict]]) -> None:
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    figure.suptitle("three-digit addition, each script's defaults: mean and range of the seeds")
    panels = figure.subplots(1, 3, sharey=True)
    for script, runs in runs_of.items():
        steps, values = curve(runs, ACCURACY)
        plot(panels[0], steps, values, COLORS[script], f"{script}.py, {len(runs)} seeds")
        for axes, key in zip(panels[1:], COSTS):
            at, costs = curve(runs, key)  # of steps 1, 2, ...; steps has 0 and those that were validated
            plot(axes, np.interp(steps, at, costs.cumsum(1).mean(0), left=0), values, COLORS[script])
    for axes, label in zip(panels, ["step", *COSTS.values()]):
        axes.set(xlabel=label)
        axes.locator_params(axis="x", nbins=6)
    panels[0].set(ylabel=PANELS[ACCURACY])
    panels[0].legend(frameon=False, loc="lower right")
    figure.savefig(ROOT / "docs/scripts_curve.png")


def draw_variants(runs_of: dict[str, list[dict]], grpo: list[dict]) -> None:
    figure = Figure(figsize=(12, 5.4), dpi=120, layout="constrained")
    figure.suptitle(f"grpo.py with other estimators and losses: {PANELS[ACCURACY]}, by step")
    panels = figure.subplots(2, 5, sharex=True, sharey=True).flatten()
    steps, defaults = curve(grpo, ACCURACY)
    for axes, (name, runs) in zip(panels, runs_of.items()):
        axes.plot(steps, defaults.mean(0), color="grey", linestyle="--", linewidth=1, label="grpo.py's defaults")
        plot(axes, *curve(runs, ACCURACY), "tab:blue", f"mean of {len(runs)} seeds")
        axes.set_title(name, fontsize=9)
    panels[0].legend(frameon=False, loc="lower right", fontsize=8)
    figure.savefig(ROOT / "docs/estimators_curve.png")


def draw_tasks(runs_of: dict[str, list[dict]]) -> None:
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    figure.suptitle("products of five digits, grpo.py: mean and range of the seeds")
    labels = {ACCURACY: PANELS[ACCURACY].replace("sums", "products"), TOOL_CALLS: "calls of the calculator a response"}
    for axes, (key, label) in zip(figure.subplots(1, 3), (labels | {"reward/mean": PANELS["reward/mean"]}).items()):
        for (name, runs), color in zip(runs_of.items(), ("tab:blue", "grey")):
            if runs[0]["curves"][key]:
                plot(axes, *curve(runs, key), color, f"{name}, {len(runs)} seeds")
        axes.set(xlabel="step", ylabel=label, ylim=(-0.03, None))
        axes.legend(frameon=False, loc="center right")
    figure.savefig(ROOT / "docs/multi_turn_curve.png")


def draw_images(runs_of: dict[str, list[dict]]) -> None:
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    figure.suptitle("counting coloured shapes in an image, grpo.py, 0.65 M parameters: mean and range of the seeds")
    for axes, (key, label) in zip(figure.subplots(1, 3), PANELS.items()):
        for (name, runs), color in zip(runs_of.items(), ("tab:blue", "tab:orange", "grey")):
            plot(axes, *curve(runs, key), color, f"{name}, {len(runs)} seeds")
        axes.set(xlabel="step", ylabel=label.replace("sums", "boards"))
    axes.legend(frameon=False)
    figure.savefig(ROOT / "docs/vision_curve.png")


def main(
    scripts: tuple[Literal[tuple(COLORS)], ...] = tuple(COLORS),
    variants: tuple[Literal[tuple(VARIANTS)], ...] = tuple(VARIANTS),
    tasks: tuple[Literal[tuple(TASKS)], ...] = tuple(TASKS),
    images: tuple[Literal[tuple(IMAGES)], ...] = tuple(IMAGES),
    seeds: tuple[int, ...] = (),
    jobs: int = 2,
    draw: bool = False,
) -> None:
    """Run, record and draw. Without seeds: 1 to 5, for variants 1 to 3. jobs: processes at a time."""
    if not draw:
        how = provenance(jobs)
        todo = [("scripts", name, name, "", seeds or (1, 2, 3, 4, 5)) for name in scripts]
        todo += [("estimators", name, "grpo", VARIANTS[name], seeds or (1, 2, 3)) for name in variants]
        todo += [("multi_turn", name, "grpo", TASKS[name], seeds or (1, 2, 3, 4, 5)) for name in tasks]
        todo += [("vision", name, "grpo", IMAGES[name], seeds or (1, 2, 3, 4, 5)) for name in images]
        each = [(script, flags, seed) for *_, script, flags, of in todo for seed in of]
        with ThreadPoolExecutor(jobs) as pool:
            results = pool.map(run_seed, *zip(*each))  # in order; where one fails, the others are not begun
            for figure, name, script, flags, of in todo:
                runs = [next(results) for _ in of]
                record = {"command": f"python {script}.py {FLAGS} {flags}".strip(), **how, "runs": runs}
                (RESULTS / f"{figure}_curve.json").write_text(json.dumps(load_records(figure) | {name: record}) + "\n")
    scripts_runs, variants_runs, tasks_runs, images_runs = (
        {name: record["runs"] for name, record in load_records(figure).items()}
        for figure in ("scripts", "estimators", "multi_turn", "vision")
    )
    for script, runs in scripts_runs.items():
        draw_script(script, runs)
    draw_scripts(scripts_runs)
    if variants_runs and "grpo" in scripts_runs:
        draw_variants(variants_runs, scripts_runs["grpo"])
    if tasks_runs:
        draw_tasks(tasks_runs)
    if images_runs:
        draw_images(images_runs)


if __name__ == "__main__":
    tyro.cli(main)
