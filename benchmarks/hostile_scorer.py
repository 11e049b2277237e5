"""grpo.py with a scorer that hangs on 5 % of the responses and dies on 5 %, beside the same runs with a sound one.

    python -m benchmarks.hostile_scorer        alternates the two for three seeds, six minutes

It is a scorer too (`hostile`). The record goes to benchmarks/results/hostile_scorer.json.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SEEDS = (1, 2, 3)
# 512 responses a step, of which 26 hang and 26 die; two updates, so that there is a pass for old log-probs to overlap
FLAGS = "--prompts-per-step 64 --num-mini-batches 2 --update-epochs 2 --total-steps 40"
FLAGS += " --save-every 0 --no-export-model"
POOL = "--reward-workers 32 --reward-timeout 0.1 --val-reward data_source"


def hostile(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """The embedded task's score, where it gives one."""
    fate = random.SystemRandom().random()
    if fate < 0.05:
        time.sleep(3600)
    if fate < 0.1:
        os._exit(1)
    return float("=" in solution_str and solution_str.rpartition("=")[2] == ground_truth)


def run(name: str, flags: str, seed: int, folder: str) -> dict:
    command = [sys.executable, "grpo.py", *FLAGS.split(), *flags.split(), "--seed", str(seed)]
    command += ["--output-dir", folder, "--run-name", f"{name}{seed}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = (Path(folder) / f"{name}{seed}/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "timing_s/step" in row]
    return {
        "accuracy": next(
            row["val/toy/arithmetic/mean@1"] for row in reversed(rows) if "val/toy/arithmetic/mean@1" in row
        ),
        "seconds": round(sum(row["timing_s/step"] for row in steps[1:]), 2),  # the first step starts the pool
        "timeouts": sum(row["reward/timeout_count"] for row in steps),
        "crashes": sum(row["reward/crash_count"] for row in steps),
    }


def main() -> None:
    from benchmarks.curves import provenance

    runs: dict[str, list[dict]] = {"sound": [], "hostile": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            for name in runs:
                scorer = (
                    f"{POOL} --reward {Path(__file__).resolve()}:hostile" if name == "hostile" else ""
                )  # in training
                runs[name].append(run(name, scorer, seed, folder))
                print(name, seed, runs[name][-1], flush=True)
    sound, hostile_ = (statistics.median(r["seconds"] for r in runs[name]) for name in runs)
    record = {"command": f"python grpo.py {FLAGS}; hostile: {POOL}", **provenance(1), "runs": runs}
    record["seconds_ratio"] = round(hostile_ / sound, 3)
    print(f"training time, hostile / sound: {record['seconds_ratio']}")
    (ROOT / "benchmarks/results/hostile_scorer.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
