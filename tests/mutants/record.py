"""python -m tests.mutants.record: plants every bug, and runs what is healthy, for benchmarks/results/silent_bugs.json.

Then `python -m tests.mutants.page > benchmarks/results/silent_bugs.md` writes the table. It takes ten minutes of one
core."""

import json
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import get_args

from lib.args import groups
from tests.common import ROOT
from tests.mutants.mutants import COPY, MUTANTS, tools
from tests.mutants.planting import run, run_mutant

FILE = ROOT / "benchmarks/results/silent_bugs.json"
VISION = f"--model {ROOT}/data/toy_vision/model --train-files {ROOT}/data/toy_vision/train.jsonl"
UPDATES = "--num-mini-batches 2 --update-epochs 2"
CORRECTION = "--rollout-correction.level token --rollout-correction.bounds 0 2"
DEFAULT = "--prompts-per-step 32 --group-size 8 --total-steps 20"
HEALTHY = {f"grpo at its default size, seed {seed}": f"grpo {DEFAULT} --seed {seed}" for seed in (1, 2, 3)}
for name in ("ppo", "remax", "dapo"):
    HEALTHY |= {f"{name}, seed {seed}": f"{name} --total-steps 20 --seed {seed}" for seed in (1, 2)}
HEALTHY |= {
    "LoRA, KL in the loss": "grpo --lora-rank 4 --kl-coef 0.01 --lr 3e-3",
    "LoRA, an engine with weights of its own": f"grpo {shlex.join(COPY)} --lora-rank 4 --lr 3e-3",
    "tools, with a template that rewrites earlier turns": "grpo tools",
    "images": f"grpo {VISION} --max-prompt-length 96 --max-response-length 16",
    "several updates and micro-batches": f"grpo {UPDATES} --micro-batch-tokens 150",
    "--temperature 0.7 --top-p 0.8": "grpo --temperature 0.7 --top-p 0.8",
    "bfloat16, KL in the loss": "grpo --compute-dtype bfloat16 --kl-coef 0.01",
    "bfloat16, ppo": "ppo --compute-dtype bfloat16",
    "a rollout correction": f"grpo {CORRECTION} --old-log-probs recompute",
    "--zero-variance mask": "grpo --zero-variance mask --kl-coef 0.01",
    "--zero-variance drop_from_denominator": "grpo --zero-variance drop_from_denominator",
    "length-adaptive lambda": "ppo --length-adaptive-alpha 0.5",
}
for name in get_args(groups.AdvEstimator):
    if name != "gdpo":  # the toy has one reward
        HEALTHY[f"--adv-estimator {name}"] = f"grpo --adv-estimator {name}"
for name in get_args(groups.PolicyLoss):
    beta = " --loss-kwargs dro_beta=0.1" if name == "dro" else ""
    HEALTHY[f"--loss {name}"] = f"grpo --loss {name}{beta} {UPDATES}"
for name in get_args(groups.AggMode):
    HEALTHY[f"--loss-agg-mode {name}"] = f"grpo --loss-agg-mode {name} --micro-batch-tokens 150"
for name in get_args(groups.KLEstimator):
    estimator = f"grpo --kl-coef 0.01 --kl-estimator {name} --num-mini-batches 2"
    HEALTHY[f"--kl-estimator {name} in the loss"] = estimator
    HEALTHY[f"--kl-estimator {name} in the reward"] = f"{estimator} --kl-placement reward --adv-estimator rloo"


def planted_bug(name: str, folder: Path) -> dict:
    done = run_mutant(MUTANTS[name], folder)
    alerts = [text.replace(str(folder), "...") for text in done.alerts]
    return {"mutant": name, "step": done.step, "alerts": alerts}


def healthy(name: str, folder: Path) -> dict:
    script, *flags = shlex.split(HEALTHY[name])
    flags = tools(folder) if flags == ["tools"] else flags
    done = run(script, folder, "--total-steps", "10", *flags, stop=False)
    return {"run": name, "script": script, "steps": len(done.rows), "alerts": done.alerts}


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    record: dict = json.loads(FILE.read_text())  # "before" was measured once, at the commit that it names
    record |= {"commit": commit.stdout.strip(), "mutants": [], "healthy": []}
    for kind, names, make in (("mutants", MUTANTS, planted_bug), ("healthy", HEALTHY, healthy)):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                record[kind].append(make(name, Path(folder)))
            print(json.dumps(record[kind][-1]), flush=True)
    FILE.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
