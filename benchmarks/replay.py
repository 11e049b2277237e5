"""Two losses on the same rollouts: a run of grpo.py is recorded, and replayed with other flags (docs/diagnostics.md).

    python -m benchmarks.replay            runs (eleven minutes of CPU), then draws docs/replay_curve.png
    python -m benchmarks.replay --draw-only     draws from benchmarks/results/replay.json

Each change of flags also runs live, sampling for itself: what a replay says is to be held against that.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

import tyro
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.curves import ACCURACY, RESULTS, ROOT, curve, plot, provenance

FLAGS = "--total-steps 30 --num-mini-batches 4 --val-every 2 --save-every 0 --no-export-model"
CHANGES = {
    "vanilla (as recorded)": "",
    "gspo": "--loss gspo --loss-agg-mode seq-mean-token-mean",
    "cispo": "--loss cispo",
    "vanilla, lr x 3": "--lr 3e-4",
}
COLORS = dict(zip(CHANGES, ("black", "tab:orange", "tab:blue", "tab:green")))
PANELS = {
    ACCURACY: "greedy accuracy on held-out sums",
    "rollout/k3": "KL(sampler || policy), nats a token",
    "actor/grad_norm": "norm of the gradient",
}
FILE = RESULTS / "replay.json"


def run(folder: str, name: str, *flags: str) -> tuple[list[dict], float]:
    """(the run's metrics without what a clock says, its CPU seconds)."""
    command = [sys.executable, "grpo.py", "--output-dir", folder, "--run-name", name, *flags]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in Path(folder, name, "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(("timing_", "perf/"))} for row in rows]
    return rows, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def of_seed(seed: int) -> dict[str, dict]:
    """By change of flags, the curves of the replay and of the live run. Checks that the unchanged replay is the run."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        kept = f"{folder}/kept"
        for name, change in CHANGES.items():
            flags = [*FLAGS.split(), "--seed", str(seed), *change.split()]
            live, live_seconds = run(folder, f"live {name}", *flags, *(["--record", kept] * (not change)))
            replay, seconds = run(folder, f"replay {name}", *flags, "--replay", kept)
            if not change and replay != live:
                raise RuntimeError("an unchanged replay has other metrics than the run")
            curves = [
                {key: [(row["step"], row[key]) for row in rows if key in row] for key in PANELS}
                for rows in (live, replay)
            ]
            found[name] = {"live": curves[0], "replay": curves[1], "numbers": sum(map(len, replay))}
            found[name] |= {"cpu_seconds": {"live": round(live_seconds, 1), "replay": round(seconds, 1)}}
            print(seed, name, found[name]["cpu_seconds"], [c[ACCURACY][-1] for c in curves], flush=True)
        found["bytes"] = sum(path.stat().st_size for path in Path(kept).rglob("*.safetensors"))
    return found


def draw(record: dict) -> None:
    figure = Figure(figsize=(12, 3.6), dpi=80, layout="constrained")
    figure.suptitle(f"grpo.py on the rollouts of a recorded run; mean and range of {len(record['seeds'])} seeds")
    for axes, (key, label) in zip(figure.subplots(1, 3), PANELS.items()):
        for name in CHANGES:
            for kind, style in (("replay", "-"), ("live", ":")):
                if kind == "live" and (key != ACCURACY or name == next(iter(CHANGES))):
                    continue
                steps, values = curve([{"curves": of[name][kind]} for of in record["seeds"].values()], key)
                if kind == "live":
                    axes.plot(steps, values.mean(0), style, color=COLORS[name], linewidth=1.5)
                else:
                    plot(axes, steps, values, COLORS[name], name)
        axes.set(xlabel="step", ylabel=label)
        if key != ACCURACY:
            axes.set_yscale("log")
    axes = figure.axes[1]  # which has room
    axes.plot([], [], ":", color="grey", label="the same flags, live")
    axes.legend(frameon=False, loc="center right")
    drawn = BytesIO()
    figure.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(48).save(ROOT / "docs/replay_curve.png", optimize=True)


def main(seeds: tuple[int, ...] = (1, 2, 3), draw_only: tyro.conf.FlagCreatePairsOff[bool] = False) -> None:
    if not draw_only:
        record = {"command": f"python grpo.py {FLAGS}", **provenance(1), "seeds": {n: of_seed(n) for n in seeds}}
        FILE.write_text(json.dumps(record) + "\n")
    draw(json.loads(FILE.read_text()))


if __name__ == "__main__":
    tyro.cli(main)
