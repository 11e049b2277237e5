"""Two processes that both sample and train, and two of which one samples and one trains, 0, 1 or 2 steps ahead.

    python -m benchmarks.async_rollouts speed        seconds of a step, share of it that ranks wait   (15 minutes)
    python -m benchmarks.async_rollouts learn        learning curves of the embedded task, 5 seeds    (30 minutes)
    python -m benchmarks.async_rollouts draw         docs/async_curve.png

Each run is `GPUS=2 tools/launch/one_node.sh grpo.py` with its flags of WAYS, one run at a time, in turns. The work of
`speed` is that of benchmarks/vs_trl.py: the model counts down, so every way samples and trains the same tokens. Figures
are medians over the steps but the first WARM_UP; lengths: the mean response length of each step, with the first ones.
Records: benchmarks/results/async_rollouts.json.
"""

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from matplotlib.figure import Figure

from benchmarks.curves import ACCURACY, PANELS, ROOT, job_env, plot, provenance
from benchmarks.vs_trl import GROUP, SETTINGS, Setting, make_task

RECORD = ROOT / "benchmarks/results/async_rollouts.json"
WAYS = {
    "together": "--rollout-engine vllm",
    "apart, level 0": "--rollout-gpus 1",
    "apart, level 1": "--rollout-gpus 1 --async-level 1",
    "apart, level 2": "--rollout-gpus 1 --async-level 2",
    "apart, level 2, first finished": "--rollout-gpus 1 --async-level 2 --async-order finished",
}
WORK = {"short": SETTINGS["short"], "skewed": SETTINGS["skewed"]}
WARM_UP = 4
QUIET = "--no-val-before-train --val-every 0 --save-every 0 --no-export-model --save-rollouts 0"


def run(folder: Path, flags: list[str]) -> list[dict]:
    """The lines of the run's metrics.jsonl."""
    command = ["tools/launch/one_node.sh", "grpo.py", *flags, "--output-dir", str(folder), "--run-name", "run"]
    env = job_env(2) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def step_figures(setting: Setting, way: str, steps: int) -> list[dict[str, float]]:
    """Of each step, also those of the warm-up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder, setting, steps)
        flags = ["--model", str(folder / "model"), "--train-files", str(folder / "train.jsonl"), "--no-shuffle"]
        flags += ["--max-prompt-length", str(max(setting.prompt_length, 32))]
        flags += ["--max-response-length", str(max(setting.response_lengths)), "--group-size", str(GROUP)]
        flags += ["--prompts-per-step", str(len(setting.response_lengths)), "--lr", "1e-6"]
        flags += ["--reward", "benchmarks/vs_trl.py:compute_score_batch", "--reward-workers", "0"]
        flags += ["--micro-batch-tokens", str(setting.tokens), "--rollout-correction.level", "measure"]
        rows = run(folder, [*flags, *WAYS[way].split(), *QUIET.split(), "--total-steps", str(steps)])
    names = ("step", "weight_sync", "rollout", "update")
    return [
        {stage: row[f"timing_s/{stage}"] for stage in names}
        | {"idle": row["perf/idle"], "length": row["response_length/mean"]}
        for row in rows
    ]


def speed(
    work: tuple[Literal[tuple(WORK)], ...] = tuple(WORK),
    ways: tuple[Literal[tuple(WAYS)], ...] = tuple(WAYS),
    rounds: int = 2,
    steps: int = 24,
) -> None:
    """work: short: 64 prompts of 16 tokens, responses of 16; skewed: 16 of 16, up to 128 tokens, half of them below 20.
    Groups of 8."""
    for name in work:
        taken: dict[str, list[list[dict]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                taken[way].append(step_figures(WORK[name], way, WARM_UP + steps))
        results = {}
        for way, runs in taken.items():
            own = [step for run in runs for step in run[WARM_UP:]]
            results[way] = {key: round(statistics.median(step[key] for step in own), 4) for key in own[0]}
            results[way]["mean_step"] = round(statistics.mean(step["step"] for step in own), 4)
            results[way]["lengths"] = [round(step["length"], 2) for step in runs[0]]
            print(f"{name:8} {way:32} {results[way]}", flush=True)
        write({name: results | {"rounds": rounds, "steps": steps}})


def learn(seeds: tuple[int, ...] = (1, 2, 3, 4, 5), steps: int = 24) -> None:
    """The defaults of grpo.py with each way."""
    runs: dict[str, list[dict]] = {way: [] for way in WAYS}
    for seed in seeds:
        for way, flags in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                more = f"--val-every 2 --save-every 0 --no-export-model --save-rollouts 0 --seed {seed}"
                rows = run(Path(folder), [*flags.split(), *more.split(), "--total-steps", str(steps)])
            seconds = np.cumsum([row["timing_s/step"] for row in rows if "timing_s/step" in row])
            curve = [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row]
            runs[way].append({"seed": seed, "accuracy": curve, "seconds": [0.0, *seconds.round(3).tolist()]})
            print(f"{way:32} seed {seed}: {curve[-1][1]:.3f} after {seconds[-1]:.1f} s", flush=True)
    write({"learn": {"steps": steps, "runs": runs}})


def write(results: dict) -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    how = provenance(jobs=1) | {"load_average": [round(load, 1) for load in os.getloadavg()]}
    RECORD.write_text(json.dumps(record | {name: how | result for name, result in results.items()}, indent=1) + "\n")


def draw() -> None:
    runs = json.loads(RECORD.read_text())["learn"]["runs"]
    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    figure.suptitle("grpo.py, three-digit addition, two processes on two cores: mean and range of the seeds")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for number, (way, own) in enumerate(runs.items()):
        values = np.array([[value for _, value in run["accuracy"]] for run in own])  # (seeds, N)
        at = [step for step, _ in own[0]["accuracy"]]
        color = f"C{number}"
        plot(by_step, np.array(at), values, color, way)
        seconds = np.mean([[run["seconds"][step] for step in at] for run in own], 0)
        plot(by_time, seconds, values, color)
    by_step.set(xlabel="step", ylabel=PANELS[ACCURACY])
    by_time.set(xlabel="seconds of training, without start and validation")
    by_step.legend(frameon=False, loc="lower right")
    figure.savefig(ROOT / "docs/async_curve.png")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"speed": speed, "learn": learn, "draw": draw})
