"""python -m tests.mutants.record: plants every bug, and runs what is healthy, for benchmarks/results/silent_bugs.json.

Then `python -m tests.mutants.page > docs/silent_bugs.md` writes the page. Takes some minutes of one core."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.args import settings
from tests.common import ROOT
from tests.mutants.mutants import COPY, MUTANTS, tools
from tests.mutants.planting import run

FILE = ROOT / "benchmarks/results/silent_bugs.json"
DEFAULT = ["--prompts-per-step", "32", "--group-size", "8", "--total-steps", "20"]
VISION = [
    *("--model", str(ROOT / "data/toy_vision/model"), "--train-files", str(ROOT / "data/toy_vision/train.jsonl")),
    *("--max-prompt-length", "96", "--max-response-length", "16"),
]
CORRECTION = ["--rollout-correction.level", "token", "--rollout-correction.bounds", "0", "2"]
HEALTHY: dict[str, tuple[str, list[str]]] = {
    **{f"grpo, the default, seed {seed}": ("grpo", [*DEFAULT, "--seed", str(seed)]) for seed in (1, 2, 3)},
    **{f"{name}, seed {seed}": (name, ["--total-steps", "20", "--seed", str(seed)]) for name in ("ppo", "remax", "dapo") for seed in (1, 2)},
    "LoRA, KL in the loss": ("grpo", ["--lora-rank", "4", "--kl-coef", "0.01", "--lr", "3e-3"]),
    "LoRA, an engine with weights of its own": ("grpo", [*COPY, "--lora-rank", "4", "--lr", "3e-3"]),
    "tools, a template that rewrites history": ("grpo", ["tools"]),
    "images": ("grpo", VISION),
    "several updates": ("grpo", ["--num-mini-batches", "2", "--update-epochs", "2", "--micro-batch-tokens", "150"]),
    "temperature 0.7, top-p 0.8": ("grpo", ["--temperature", "0.7", "--top-p", "0.8"]),
    "bfloat16": ("grpo", ["--compute-dtype", "bfloat16", "--kl-coef", "0.01"]),
    "bfloat16, ppo": ("ppo", ["--compute-dtype", "bfloat16"]),
    "a correction": ("grpo", [*CORRECTION, "--old-log-probs", "recompute"]),
    "zero_variance mask": ("grpo", ["--zero-variance", "mask", "--kl-coef", "0.01"]),
    "zero_variance drop": ("grpo", ["--zero-variance", "drop_from_denominator", "--entropy-coef", "0.01"]),
    "group size 1": ("ppo", ["--group-size", "1", "--gae-lambda", "0.9", "--length-adaptive-alpha", "0.5"]),
}
for estimator in settings.AdvEstimator.__args__:
    if estimator not in ("gdpo",):
        HEALTHY[f"--adv-estimator {estimator}"] = ("grpo", ["--adv-estimator", estimator])
for loss in settings.PolicyLoss.__args__:
    extra = ["--loss-kwargs.dro-beta", "0.1"] if loss == "dro" else []
    HEALTHY[f"--loss {loss}"] = ("grpo", ["--loss", loss, *extra, "--num-mini-batches", "2", "--update-epochs", "2"])
for mode in settings.AggMode.__args__:
    HEALTHY[f"--loss-agg-mode {mode}"] = ("grpo", ["--loss-agg-mode", mode, "--micro-batch-tokens", "150"])
for kl in settings.KLEstimator.__args__:
    flags = ["--kl-coef", "0.01", "--kl-estimator", kl, "--num-mini-batches", "2"]
    HEALTHY[f"--kl-estimator {kl} in the loss"] = ("grpo", flags)
    HEALTHY[f"--kl-estimator {kl} in the reward"] = ("grpo", [*flags, "--kl-placement", "reward"])


def healthy(name: str) -> dict:
    script, flags = HEALTHY[name]
    with tempfile.TemporaryDirectory() as folder:
        flags = tools(Path(folder)) if flags == ["tools"] else flags
        done = run(script, Path(folder), "--total-steps", "10", *flags, stop=False)
    return {"run": name, "script": script, "steps": len(done.rows), "alerts": done.alerts}


def main() -> None:
    chosen = sys.argv[1:]
    rows = []
    for name in [name for name in HEALTHY if not chosen or any(part in name for part in chosen)]:
        rows.append(healthy(name))
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
