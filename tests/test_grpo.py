"""grpo.py as a user runs it: processes, launchers, both engines, exact resume, and every kind of bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.common import ROOT, TOY_MODEL

BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
SMALL = [
    "--prompts-per-step",
    "8",
    "--group-size",
    "4",
    "--val-every",
    "0",
    "--no-val-before-train",
    "--save-every",
    "0",
]
SMALL += ["--no-export-model", "--lr", "3e-4"]


def command(*args: str, launcher=(sys.executable,)) -> list[str]:
    return [*launcher, str(ROOT / "grpo.py"), *args]


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return env | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "COLUMNS": "120"}


def grpo(folder: Path, *args: str, launcher=(sys.executable,)) -> subprocess.CompletedProcess:
    return subprocess.run(
        command("--output-dir", str(folder), *args, launcher=launcher),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )


def ran(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done


def metrics(run: Path, timings: bool = False) -> list[dict]:
    """The lines of metrics.jsonl, less what a clock says."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if timings or not k.startswith(("timing_s/", "perf/"))} for row in rows]


# ---- it learns -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The default, cut to 30 of its 60 steps."""
    folder = tmp_path_factory.mktemp("runs")
    done = ran(grpo(folder, "--run-name", "default", "--total-steps", "30", "--save-every", "15"))
    return folder / "default", done.stdout


def test_accuracy_rises_on_held_out_prompts(default_run):
    """30 steps take greedy accuracy from 0.31 to 0.98 where it was measured; 0.8 leaves room for other roundings."""
    accuracy = [
        row["val/toy/arithmetic/mean@1"] for row in metrics(default_run[0]) if "val/toy/arithmetic/mean@1" in row
    ]
    assert len(accuracy) == 7 and 0.2 <= accuracy[0] <= 0.4 and accuracy[-1] >= 0.8


def test_a_run_leaves_what_it_promises(default_run):
    run, printed = default_run
    assert "before" in printed and "after" in printed and str(run / "curve.png") in printed
    assert json.loads((run / "config.json").read_text())["total_steps"] == 30
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000015", "step_000030"]
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 7 * 256 and samples[0].keys() >= {"step", "prompt", "response", "score", "ground_truth"}
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").chat_template
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(TOY_MODEL).parameters()
    )


def test_vllm_loads_the_exported_model(default_run):
    vllm = pytest.importorskip("vllm")
    rows = [json.loads(line) for line in (ROOT / "data/toy/val.jsonl").read_text().splitlines()[:50]]
    llm = vllm.LLM(
        str(default_run[0] / "model"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 28,
    )
    greedy = vllm.SamplingParams(temperature=0, max_tokens=16)
    answers = [o.outputs[0].text for o in llm.chat([row["prompt"] for row in rows], greedy, use_tqdm=False)]
    right = [text.endswith("=" + row["reward_model"]["ground_truth"]) for text, row in zip(answers, rows)]
    llm.llm_engine.engine_core.shutdown()
    assert sum(right) >= 40


def test_every_metric_is_explained(default_run):
    rows = [line.split("|")[1] for line in (ROOT / "docs/grpo.md").read_text().splitlines() if line.startswith("| `")]
    patterns = [
        re.sub(r"@[nk]", r"@\\d+", re.sub(r"<\w+>", "[a-z/_]+", name))
        for row in rows
        for name in re.findall(r"`(.+?)`", row)
    ]
    logged = {key for row in metrics(default_run[0], timings=True) for key in row} - {"step"}
    assert [key for key in sorted(logged) if not any(re.fullmatch(pattern, key) for pattern in patterns)] == []


def test_every_row_is_accounted_for_and_the_first_update_is_on_policy(default_run):
    """1e-4 nats: the fp32 sampler and the fp32 trainer differ by some 1e-6 (docs/grpo.md)."""
    steps = [row for row in metrics(default_run[0]) if "reward/mean" in row]
    assert [row["step"] for row in steps] == list(range(1, 31))
    for row in steps:
        dropped = sum(v for k, v in row.items() if k.startswith("training/rows_dropped/"))
        assert row["training/rows_in"] == 256 == row["training/rows_trained"] + dropped
        assert row["rollout/logp_diff_max"] < 1e-4 and row["actor/pg_clipfrac"] == 0


def test_a_run_repeats_itself(tmp_path):
    for name in ("a", "b"):
        ran(grpo(tmp_path, *SMALL, "--run-name", name, "--total-steps", "3"))
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    ran(grpo(tmp_path, *SMALL, "--run-name", "c", "--total-steps", "3", "--seed", "2"))
    assert metrics(tmp_path / "c") != metrics(tmp_path / "a")


# ---- ranks and engines ---------------------------------------------------------------------------

MORE = ["--num-mini-batches", "2", "--update-epochs", "2", "--kl-coef", "0.01", "--entropy-coef", "0.001"]
MORE += ["--micro-batch-tokens", "200", "--total-steps", "2", "--adv-estimator", "grpo_batch_std"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Two steps of four updates each, with reference model, several micro-batches, recomputed old log-probs, and
    advantages that divide by the standard deviation over all ranks."""
    folder = tmp_path_factory.mktemp("one")
    ran(grpo(folder, *SMALL, *MORE, "--run-name", "run"))
    return metrics(folder / "run")


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_two_ranks_train_as_one(tmp_path, one_process, launcher):
    """The same prompts, seeds and global mini-batches. 1e-3: eight updates of fp32 sums in another order."""
    ran(grpo(tmp_path, *SMALL, *MORE, "--run-name", "run", launcher=launcher))
    for ours, theirs in zip(metrics(tmp_path / "run"), one_process):
        assert ours.keys() == theirs.keys()
        for key in ("reward/mean", "response_length/mean", "prompt_length/mean", "training/epoch"):
            assert ours[key] == theirs[key]
        for key in ("actor/loss", "actor/entropy", "actor/ref_kl", "actor/grad_norm", "advantages/mean"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key


def test_vllm_trains_as_hf_does(tmp_path):
    pytest.importorskip("vllm")
    done = ran(
        grpo(tmp_path, "--run-name", "run", "--rollout-engine", "vllm", "--total-steps", "10", "--no-export-model")
    )
    rows = metrics(tmp_path / "run")
    accuracy = [row["val/toy/arithmetic/mean@1"] for row in rows if "val/toy/arithmetic/mean@1" in row]
    assert accuracy[0] <= 0.4 and accuracy[-1] >= 0.6, done.stdout
    assert all(row["rollout/canary_logp_diff"] < 1e-4 for row in rows if "rollout/canary_logp_diff" in row)
    assert all(row["rollout/logp_diff_max"] < 1e-3 for row in rows if "reward/mean" in row)


def test_vllm_on_two_ranks(tmp_path):
    pytest.importorskip("vllm")
    ran(grpo(tmp_path, *SMALL, *MORE, "--run-name", "run", "--rollout-engine", "vllm", launcher=TORCHRUN))
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


def test_a_sync_that_is_skipped_stops_the_run_at_that_step(tmp_path):
    pytest.importorskip("vllm")
    (tmp_path / "skip.py").write_text(
        "import runpy, sys\n"
        "import lib.rollout\n"
        "load = lib.rollout.VLLMEngine.load_weights\n"
        "def load_all_but_the_third(engine, model, version):\n"
        "    if version == 2: engine.version = version\n"
        "    else: load(engine, model, version)\n"
        "lib.rollout.VLLMEngine.load_weights = load_all_but_the_third\n"
        f"runpy.run_path({str(ROOT / 'grpo.py')!r}, run_name='__main__')\n"
    )
    args = [
        "--output-dir",
        str(tmp_path),
        "--run-name",
        "run",
        "--rollout-engine",
        "vllm",
        "--total-steps",
        "4",
        *SMALL,
    ]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "skip.py"), *args],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0 and "weight sync to version 2 failed" in done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


# ---- exact resume --------------------------------------------------------------------------------

# 12 prompts a pass: an epoch ends within a step (12 / 8) and at a step's end (24 / 8)
RESUME = [*SMALL, "--save-every", "1", "--num-mini-batches", "2", "--warmup-steps", "3", "--export-model"]


def few_prompts(folder: Path) -> list[str]:
    lines = (ROOT / "data/toy/train.jsonl").read_text().splitlines()[:12]
    (folder / "few.jsonl").write_text("\n".join(lines) + "\n")
    return ["--train-files", str(folder / "few.jsonl")]


@pytest.mark.parametrize("launcher", [(sys.executable,), TORCHRUN], ids=["1 rank", "2 ranks"])
def test_killed_and_resumed_equals_never_interrupted_bit_for_bit(tmp_path, launcher):
    args = [*RESUME, *few_prompts(tmp_path), "--total-steps", "6"]
    ran(grpo(tmp_path, *args, "--run-name", "whole", launcher=launcher))

    process = subprocess.Popen(
        command("--output-dir", str(tmp_path), *args, "--run-name", "killed", launcher=launcher),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    target = tmp_path / "killed/checkpoints/step_000003"
    deadline = time.monotonic() + 200
    while not target.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:  # launcher and ranks, in the middle of a later step
        member.send_signal(signal.SIGKILL)
    for member in family:
        member.wait()
    assert target.exists()
    for later in sorted((tmp_path / "killed/checkpoints").glob("step_*"))[1:]:
        if later.name > target.name:
            shutil.rmtree(later)
    # what is left is torn: the newest folder lacks its manifest and must not be taken
    torn = tmp_path / "killed/checkpoints/step_000099"
    torn.mkdir()
    (torn / "trainer.json").write_text("{}")

    done = ran(grpo(tmp_path, *args, "--run-name", "killed", "--resume", "auto", launcher=launcher))
    assert "step 3/6" not in done.stdout and "step 4/6" in done.stdout and "torn" in done.stdout
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / name / "model/model.safetensors") for name in ("killed", "whole"))
    assert ours.keys() == theirs.keys() and all(ours[k].equal(theirs[k]) for k in ours)


# ---- bad input: one line, exit code 2, nothing written -------------------------------------------


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROW = {
    "prompt": [{"role": "user", "content": "123+456"}],
    "data_source": "toy/arithmetic",
    "reward_model": {"ground_truth": "579"},
}


def model_folder(path: Path, *, weights: bool = True, template: bool = True) -> str:
    shutil.copytree(TOY_MODEL, path)
    if not weights:
        (path / "model.safetensors").unlink()
    if not template:
        (path / "chat_template.jinja").unlink()
    return str(path)


BAD_INPUT = {
    "batch arithmetic": (lambda t: ["--prompts-per-step", "10", "--num-mini-batches", "4"], "10 / (1 x 4) = 2.5"),
    "token budget": (lambda t: ["--micro-batch-tokens", "30"], "30 < 32 + 16"),
    "missing file": (lambda t: ["--train-files", str(t / "absent.jsonl")], "absent.jsonl"),
    "missing column": (
        lambda t: ["--train-files", write(t / "a.jsonl", {"prompt": ROW["prompt"], "data_source": "x"})],
        "reward_model",
    ),
    "no row left": (
        lambda t: ["--train-files", write(t / "a.jsonl", ROW), "--max-prompt-length", "3"],
        "too long for max_prompt_length=3",
    ),
    "prompt too long": (
        lambda t: ["--no-filter-overlong-prompts", "--max-prompt-length", "3"],
        "max_prompt_length=3",
    ),
    "val samples": (lambda t: ["--val-samples", "4"], "--val_temperature 0"),
    "no scorer": (
        lambda t: ["--train-files", write(t / "a.jsonl", ROW | {"data_source": "mine"})],
        "no scorer for data_source 'mine'",
    ),
    "no such reward": (lambda t: ["--reward", "absent.py:score"], "--reward absent.py:score"),
    "no chat template": (lambda t: ["--model", model_folder(t / "m", template=False)], "no chat template"),
    "no weights": (lambda t: ["--model", model_folder(t / "m", weights=False)], "no weights"),
    "no model": (lambda t: ["--model", str(t / "absent")], "no such folder"),
    "unknown estimator": (lambda t: ["--adv-estimator", "magic"], "choose one of grpo"),
    "loss without its parameter": (lambda t: ["--loss", "dro"], "dro_beta"),
    "unknown loss mode": (lambda t: ["--loss-agg-mode", "mean"], "invalid choice 'mean'"),
    "unknown flag": (lambda t: ["--learning-rate", "1"], "--learning-rate"),
    "unknown engine": (lambda t: ["--rollout-engine", "sglang"], "sglang"),
    "resume what": (lambda t: ["--resume", "auto"], "--run_name"),
    "resume from nowhere": (lambda t: ["--resume", str(t / "step_000001")], "step_000001"),
    "bad template keywords": (lambda t: ["--chat-template-kwargs", "{x"], "--chat_template_kwargs"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line_and_nothing_is_written(tmp_path, case):
    make, message = BAD_INPUT[case]
    done = grpo(tmp_path / "runs", *make(tmp_path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()
    lines = [line for line in done.stderr.splitlines() if "rror" in line or message in line]
    assert any(message in line for line in lines), done.stderr
    if case not in ("unknown flag", "unknown engine", "unknown loss mode"):  # tyro draws a box around its own
        assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_a_run_is_neither_overwritten_nor_continued_as_another(tmp_path):
    args = [*SMALL, "--save-every", "1", "--total-steps", "1", "--run-name", "run"]
    ran(grpo(tmp_path, *args))
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    again = grpo(tmp_path, *args)
    assert again.returncode == 2 and "holds a run already" in again.stderr
    other = grpo(tmp_path, *args, "--resume", "auto", "--clip-ratio-low", "0.3")
    assert other.returncode == 2 and "--clip_ratio_low was 0.2, is 0.3" in other.stderr
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_your_own_reward_dataset_and_validation_by_sampling(tmp_path):
    """--reward, --dataset-class, several validation samples, tensorboard and wandb, --val-only."""
    (tmp_path / "mine.py").write_text(
        "from lib.dataset import RLHFDataset\n"
        "class Mine(RLHFDataset):\n"
        "    pass\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    score = float(solution_str.endswith(ground_truth))\n"
        "    return {'score': score, 'pred': solution_str, 'chars': len(solution_str)}\n"
    )
    val = write(tmp_path / "val.jsonl", *[json.loads(x) for x in (ROOT / "data/toy/val.jsonl").open().readlines()[:10]])
    args = ["--run-name", "run", "--reward", f"{tmp_path / 'mine.py'}:score", "--val-files", val]
    args += ["--dataset-class", f"{tmp_path / 'mine.py'}:Mine", "--val-samples", "4", "--val-temperature", "1"]
    ran(grpo(tmp_path, *args, *SMALL, "--total-steps", "1", "--track", "tensorboard", "wandb", "--val-every", "1"))
    train, val_row = metrics(tmp_path / "run")
    assert train["reward/chars"] > 0
    assert {
        f"val/toy/arithmetic/{m}" for m in ("mean@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4")
    } <= val_row.keys()
    assert list((tmp_path / "run/tensorboard").iterdir()) and list((tmp_path / "run").glob("wandb*"))
    ran(grpo(tmp_path, "--run-name", "only", "--val-only", "--val-files", val))
    assert [row["step"] for row in metrics(tmp_path / "only/val_only")] == [0]
