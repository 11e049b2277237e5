"""The learning curve of the documents: the default run with several seeds, mean and spread.

    python benchmarks/curves.py      runs grpo.py with seeds 1 to 5 (a minute each), then draws docs/grpo_curve.png

The figures behind the picture, with commit, machine and command, go to benchmarks/results/grpo_curve.json.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
ACCURACY = "val/toy/arithmetic/mean@1"
PANELS = {
    ACCURACY: "greedy accuracy on held-out sums",
    "reward/mean": "reward of the samples (temperature 1)",
    "response_length/mean": "response length (tokens)",
}


def run_seed(script: str, seed: int, folder: str) -> dict:
    """One run in a process of its own: its curves, wall and CPU seconds (start-up and validation included)."""
    command = [sys.executable, f"{script}.py", "--seed", str(seed), "--output-dir", folder, "--run-name", f"seed{seed}"]
    command += ["--val-every", "2", "--show-samples", "0"]
    start, cpu_before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (Path(folder) / f"seed{seed}/metrics.jsonl").read_text().splitlines()]
    curves = {key: [(row["step"], row[key]) for row in rows if key in row] for key in PANELS}
    accuracy = [value for _, value in curves[ACCURACY]]
    return {
        "seed": seed,
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "first_step_at_90_percent": next((step for step, value in curves[ACCURACY] if value >= 0.9), None),
        "wall_seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(cpu.ru_utime + cpu.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime, 1),
        "training_seconds": round(sum(row.get("timing_s/step", 0) for row in rows), 1),
        "curves": curves,
    }


def draw(runs: list[dict], path: Path, title: str) -> None:
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    figure.suptitle(title)
    for axes, (key, label) in zip(figure.subplots(1, 3), PANELS.items()):
        steps = [step for step, _ in runs[0]["curves"][key]]
        values = np.array([[value for _, value in run["curves"][key]] for run in runs])  # (seeds, steps)
        for line in values:
            axes.plot(steps, line, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(steps, values.mean(0), color="tab:blue", linewidth=2, label=f"mean of {len(runs)} seeds")
        axes.fill_between(steps, values.min(0), values.max(0), color="tab:blue", alpha=0.12, linewidth=0)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def cpu_name() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return names[0] if names else platform.processor()


def main(script: str = "grpo", seeds: tuple[int, ...] = (1, 2, 3, 4, 5)) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_seed(script, seed, folder) for seed in seeds]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    record = {
        "command": f"python benchmarks/curves.py  ({script}.py, defaults, --val-every 2)",
        "commit": commit,
        "date": date.today().isoformat(),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, one thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "runs": runs,
    }
    (ROOT / f"benchmarks/results/{script}_curve.json").write_text(json.dumps(record) + "\n")
    draw(
        runs,
        ROOT / f"docs/{script}_curve.png",
        f"python {script}.py: three-digit addition, 0.54 M parameters, 2 CPU cores",
    )
    for run in runs:
        print({key: value for key, value in run.items() if key != "curves"})


if __name__ == "__main__":
    main()
