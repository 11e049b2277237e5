"""Whether credit for single turns helps on the embedded task with tools: grpo, gigpo and mt_grpo with the same rewards.

    python -m benchmarks.turn_credit                    every arm and seed, one run at a time (20 minutes of one core);
                                                        what benchmarks/results/turn_credit.json has is not run again
    python -m benchmarks.turn_credit --table            prints the table of the record

The calculator of the runs is the one below: a call that it can compute has a reward of 0.2, beside the 1 of a right
answer. mt_grpo normalises it on its own, so that it weighs as much as the answer. Therefore grpo has a larger one in a
fourth arm. Accuracy is that of the answers alone (pass@1: a score above 0.5), of a sample of each held-out product at
temperature 1, because the greedy answer jumps from 0 to 1 where a call becomes more likely than none.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

CALL_REWARD = 0.2  # of a tool that ran, as in the experiments of arXiv 2505.11821
RECORD = Path(__file__).parent / "results/turn_credit.json"
FLAGS = (
    "--config data/toy/preset.yaml --model data/toy_tools/model "
    "--train-files data/toy_tools/train.jsonl --val-files data/toy_tools/val.jsonl "
    "--max-prompt-length 32 --max-response-length 48 --lr 3e-4 --total-steps 20 --multi-turn.max-turns 3 "
    "--val-every 2 --val-temperature 1"
)
REWARDED = "--multi-turn.tools benchmarks/turn_credit.py:calculator"
ARMS = {  # flags of grpo.py
    "grpo": f"{REWARDED} --adv-estimator grpo",
    "gigpo": f"{REWARDED} --adv-estimator gigpo",
    "mt_grpo": f"{REWARDED} --adv-estimator mt_grpo",
    "grpo, 0.48 for a call": f"{REWARDED} --adv-estimator grpo --multi-turn.reward-coef 2.4",  # still no right answer
}
SEEDS = (1, 2, 3, 4, 5)
CURVES = {"accuracy": "val/toy/arithmetic/pass@1", "calls": "agent/tool_calls_mean", "reward": "reward/mean"}
SHOWN = (4, 8, 12, 16, 20)  # steps of the table


def calculator(expression: str) -> tuple[str, float]:
    """Compute a product.

    Args:
        expression: For example "630*52".
    """
    if not re.fullmatch(r"\d{1,6}\*\d{1,6}", expression):
        raise ValueError(f"not a product of two numbers: {expression}")
    left, right = expression.split("*")
    return str(int(left) * int(right)), CALL_REWARD


def run_seed(flags: str, seed: int) -> dict:
    """One run in a process of its own: its curves, and its CPU seconds, start-up and validation included."""
    from benchmarks.curves import job_env, spawn

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "grpo.py", *flags.split(), "--seed", str(seed)]
        command += ["--output-dir", folder, "--run-name", "run"]
        start = time.perf_counter()
        cpu_seconds = spawn(command, Path(folder, "log"), job_env(1))
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "cpu_seconds": cpu_seconds,
        "wall_seconds": round(time.perf_counter() - start, 1),
        "curves": {name: [(row["step"], row[key]) for row in rows if key in row] for name, key in CURVES.items()},
    }


def main() -> None:
    from benchmarks.curves import provenance

    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for seed, arm in ((seed, arm) for seed in SEEDS for arm in ARMS):
        command = f"python grpo.py {FLAGS} {ARMS[arm]}"
        record = records.setdefault(arm, {"command": command, **provenance(jobs=1), "runs": []})
        if seed not in [run["seed"] for run in record["runs"]]:
            record["runs"].append(run_seed(f"{FLAGS} {ARMS[arm]}", seed))
            RECORD.write_text(json.dumps(records) + "\n")
            print(arm, seed, record["runs"][-1]["curves"]["accuracy"], flush=True)


def table() -> str:
    """Mean and range of the seeds."""
    head = ["", *(f"step {step}" for step in SHOWN), "mean of steps 2-20", "calls, step 20", "CPU of a run, s", "seeds"]
    lines = [head, ["---"] * len(head)]
    for arm, record in json.loads(RECORD.read_text()).items():
        runs = record["runs"]
        cells = [[dict(run["curves"]["accuracy"])[step] for run in runs] for step in SHOWN]
        cells += [[mean([x for step, x in run["curves"]["accuracy"] if step]) for run in runs]]
        means = [mean([run["curves"]["calls"][-1][1] for run in runs]), mean([run["cpu_seconds"] for run in runs])]
        line = [arm, *(f"{mean(x):.3f} ({min(x):.3f}-{max(x):.3f})" for x in cells)]
        lines.append([*line, f"{means[0]:.2f}", f"{means[1]:.0f}", str(len(runs))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table()) if "--table" in sys.argv else main()
