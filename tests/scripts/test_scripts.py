"""What all scripts promise, one rank or two and after a kill -9, and what ppo.py, remax.py, dapo.py change in grpo.py:
run as a user runs them. What they share with grpo.py, its tests show."""

import contextlib
import json
import shutil
from collections import Counter
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from lib.run.checkpoint import load_batches
from tests.common import (
    ROOT,
    SEVERAL_UPDATES,
    SMALL,
    TOY_MODEL,
    checkpoint_state,
    command,
    fork,
    metrics,
    ran,
    rollouts,
    started,
    unexplained_metrics,
    wait_until,
    with_slow,
)

SIBLINGS = ["ppo", "remax", "dapo"]
WINGS = ("agent.", "servers.", "planner.", "torch.distributed._tools")
TOOLS = ["--model", str(ROOT / "data/toy_tools/model"), "--train-files", str(ROOT / "data/toy_tools/val.jsonl")]
TOOLS += ["--max-prompt-length", "32", "--max-response-length", "48", "--micro-batch-tokens", "400"]
TOOLS += ["--multi-turn.tools", "calculator", "--multi-turn.max-turns", "3"]


def small(script: str, folder: Path, *args: str) -> list[dict]:
    """The metrics of a small run, which writes to folder/run."""
    ran(fork(script, folder, *SMALL, "--run-name", "run", *args))
    return metrics(folder / "run")


# ---- each learns ---------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("script", SIBLINGS)
def test_accuracy_rises_on_held_out_prompts(tmp_path, script):
    """5 default steps take greedy accuracy from 0.31 to 0.98 (ppo), 0.85 (remax), 0.98 (dapo) where it was measured;
    0.7: other roundings."""
    ran(fork(script, tmp_path, "--run-name", "run", "--total-steps", "5"))
    rows = metrics(tmp_path / "run")
    accuracy = [row["val/toy/arithmetic/mean@1"] for row in rows if "val/toy/arithmetic/mean@1" in row]
    assert len(accuracy) == 2 and 0.2 <= accuracy[0] <= 0.4 and accuracy[-1] >= 0.7


@pytest.mark.parametrize("script", ["grpo", *SIBLINGS])
def test_validation_alone_closes_what_it_opened(tmp_path, script):
    """A server else keeps its group with a trainer that is gone."""
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "import lib.rollout\n"
        "from lib.data import RLHFDataset as Rows\n"
        "lib.rollout.HFEngine.close = lambda self: Path(__file__).with_suffix('.closed').touch()\n"
    )
    lines = (ROOT / "data/toy/val.jsonl").read_text().splitlines()[:4]
    (tmp_path / "val.jsonl").write_text("\n".join(lines))
    args = ["--dataset-class", f"{tmp_path / 'mine.py'}:Rows", "--val-files", str(tmp_path / "val.jsonl")]
    ran(fork(script, tmp_path, *args, "--val-only", "--run-name", "run"))
    assert (tmp_path / "mine.closed").exists()


# ---- cost by tokens, not by limits ----
def test_no_number_depends_on_limits_that_no_row_reaches(tmp_path):
    """To the bit: tensors are as wide as the step's longest row, dapo.py's leftovers of earlier steps included. And it
    trains on groups with a signal only."""
    args = [*SMALL, "--total-steps", "2", "--val-every", "2", "--val-files", str(tmp_path / "val.jsonl")]
    args += ["--micro-batch-tokens", "9000", "--overlong-buffer", "0"]
    lines = (ROOT / "data/toy/val.jsonl").read_text().splitlines()[:20]
    (tmp_path / "val.jsonl").write_text("\n".join(lines))
    for name, prompt, response in (("small", "32", "30"), ("large", "3000", "4000")):
        limits = ["--max-prompt-length", prompt, "--max-response-length", response]
        ran(fork("dapo", tmp_path, *args, *limits, "--run-name", name))
    small, large = (metrics(tmp_path / name) for name in ("small", "large"))
    assert small == large and max(row.get("response_length/max", 0) for row in small) < 30
    rows = [row for row in small if "reward/mean" in row]
    for row in rows:
        assert row["training/rows_trained"] == 32 and row["training/rows_dropped/zero_variance"] == 0
        sampled = 32 * row["training/gen_batches"]
        assert row["training/rows_dropped/refilled"] == pytest.approx(row["reward/zero_variance"] * sampled)
    for name in ("training/rows_left_over", "training/rows_dropped/refilled"):
        assert max(row[name] for row in rows) > 0
    assert max(row["training/gen_batches"] for row in rows) > 1 and small[0]["training/rows_left_over"] > 0


# ---- 1 rank and 2 --------------------------------------------------------------------------------
IN_THE_REWARD = ["--kl-placement", "reward", "--kl-estimator", "k1", "--kl-target", "0.01", "--kl-horizon", "100"]
ONCE = ["--update-epochs", "1"]
ON_TWO_RANKS = {
    "grpo, LoRA": ("grpo", ["--lora-rank", "4", "--cpu-offload", "actor", "activations", *ONCE]),
    "ppo": ("ppo", IN_THE_REWARD),
    "remax": ("remax", [*IN_THE_REWARD, "--reduce-each-micro-batch", *ONCE]),
    "dapo": ("dapo", ["--overlong-filtering", "--max-response-length", "10", *ONCE]),
    "ppo, several turns": ("ppo", [*TOOLS, *IN_THE_REWARD, *ONCE]),
}


FAILS = """
import zlib
def score(data_source, solution_str, ground_truth, extra_info=None):
    fate = zlib.crc32((ground_truth + solution_str).encode())
    if fate % 4 == 0:
        raise ValueError("no score")
    return fate % 2
"""


@pytest.mark.parametrize("script", ["grpo", *SIBLINGS])
def test_a_run_leaves_what_it_promises_and_counts_responses_without_a_score(tmp_path, script):
    """It imports no wing, nor what only it needs, such as private modules of torch, which another release may lack."""
    (tmp_path / "fails.py").write_text(FAILS)
    args = [*few_prompts(tmp_path, "--val-files"), "--val-every", "2", "--save-every", "2", "--export-model"]
    args += ["--reward", f"{tmp_path / 'fails.py'}:score", "--total-steps", "2", "--run-name", "run"]
    modules, run = ran(fork(script, tmp_path, *SMALL, *args)).modules, tmp_path / "run"
    assert "lib.setup.ranks" in modules and not [name for name in modules if name.startswith(WINGS)]
    files = {path.name for path in run.iterdir()}
    kept = {".lock", "checkpoints", "config.json", "curve.png", "metrics.jsonl", "model", "rollouts", "samples.jsonl"}
    assert files == kept | {"starts"}
    assert [*Counter(step for step, *_ in rollouts(run)).values()] == [4, 4]  # a group each
    assert AutoModelForCausalLM.from_pretrained(run / "model").num_parameters() > 0
    assert unexplained_metrics(run, "metrics.md") == []

    left_over, rows = 0, [row for row in metrics(run) if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        dead, errors = row["training/rows_dropped/dead"], row["reward/error_count"]
        assert errors > 0 and row["reward/min"] == 0  # not -inf, not NaN
        if script in ("grpo", "ppo"):
            assert dead == errors == row["rollout/dead_rows"]
        if script == "remax":  # whose greedy responses fail too, and count as errors but are no rows
            assert dead >= row["rollout/dead_rows"] > 0
        assert dead > 0
        dropped = sum(v for k, v in row.items() if k.startswith("training/rows_dropped/"))
        assert row["training/rows_in"] == 32 * row.get("training/gen_batches", 1) + left_over
        left_over = row.get("training/rows_left_over", 0)
        assert row["training/rows_in"] == row["training/rows_trained"] + dropped + left_over


def of_floats(value) -> bool:
    return isinstance(value, list) and any(isinstance(number, float) for number in value)


PROBS_DIFF = "training/rollout_probs_diff"  # of float32 sums in another order: itself 1e-7 to 1e-5
OF_MEANS = ("actor/", "critic/", "advantages/", "returns/", "values/", "token_level_rewards/", PROBS_DIFF)


def assert_trained_alike(run: Path, other: Path) -> None:
    """1e-3: updates of fp32 sums in another order; a token that stands on the border of a clip may fall to its other
    side."""
    ours, theirs = metrics(run), metrics(other)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for two, one in zip(ours, theirs):
        assert two.keys() == one.keys()
        for key in one:
            if key.startswith(OF_MEANS) and "clipfrac" not in key:
                rounding = 1e-5 if key.startswith(PROBS_DIFF) else 1e-6
                assert two[key] == pytest.approx(one[key], rel=1e-3, abs=rounding), key
            elif key.startswith(("reward/", "response_length/", "prompt_length/", "training/", "agent/turns")):
                assert two[key] == one[key], key
    ours, theirs = rollouts(run), rollouts(other)
    assert ours.keys() == theirs.keys() and len(ours) >= 32
    for key, one in theirs.items():
        for name, value in one.items():
            assert ours[key][name] == (pytest.approx(value, rel=1e-3, abs=1e-4) if of_floats(value) else value), name


@pytest.mark.parametrize("case", with_slow(ON_TWO_RANKS, *ON_TWO_RANKS.keys() - {"dapo", "ppo, several turns"}))
def test_two_ranks_train_as_one(tmp_path, case):
    """The same prompts, seeds and global mini-batches. Launchers: test_launch_files.py."""
    script, args = ON_TWO_RANKS[case]
    args = [*SMALL, *SEVERAL_UPDATES, "--save-rollouts", "all", *args]
    ran(fork(script, tmp_path, *args, "--run-name", "one"))
    ran(fork(script, tmp_path, *args, "--run-name", "two", ranks=2))
    assert_trained_alike(tmp_path / "two", tmp_path / "one")


# ---- exact resume --------------------------------------------------------------------------------

# two controllers and, in step 1, a critic that learns alone
ADAPTIVE = [*IN_THE_REWARD, "--kl-coef", "0.1", "--entropy-coef", "0.01", "--entropy-target", "0.2"]
DRAWING = """
import random
import numpy as np
from lib.data import RLHFDataset

class Rows(RLHFDataset):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        np.random.shuffle(self.kept)

    def __getitem__(self, i):
        return super().__getitem__(i if random.random() < 0.5 else 0)

def score(data_source, solution_str, ground_truth, extra_info=None):
    return random.random() + np.random.rand()
"""
DRAWS = ["--dataset-class", "FOLDER/drawing.py:Rows", "--reward", "FOLDER/drawing.py:score"]
KILLED = {  # script, ranks, flags
    "grpo": ("grpo", 1, ["--prompt-sampling", "variance"]),
    "ppo": ("ppo", 1, [*ADAPTIVE, "--critic-warmup-steps", "1"]),
    "remax": ("remax", 1, ["--reward-workers", "0", *DRAWS]),
    # leaves groups over in every step
    "dapo on 2 ranks": ("dapo", 2, ["--group-size", "8", "--prompt-sampling", "skip", "--lora-rank", "4"]),
    "dapo, several turns": ("dapo", 1, ["--group-size", "8", *TOOLS, "--adv-estimator", "gigpo"]),
}


def few_prompts(folder: Path, flag: str = "--train-files") -> list[str]:
    """12 of them, so that with 8 a step an epoch ends within a step (12 / 8) and at a step's end (24 / 8)."""
    lines = (ROOT / "data/toy/train.jsonl").read_text().splitlines()[:15]
    (folder / "few.jsonl").write_text("\n".join(lines) + "\n")
    return [flag, str(folder / "few.jsonl"), flag.replace("files", "samples").replace("--", "--max-"), "12"]


def saved(checkpoint: Path) -> dict[str, bytes]:
    """What must be equal in two checkpoints. Left aside: a pickle that names tensors in the order of a hash, its size,
    and random states, of which Python's and numpy's are those of the process (no script draws from them)."""
    files = [path for pattern in ("*.distcp", "trainer.json", "*.safetensors") for path in checkpoint.glob(pattern)]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize("case", with_slow(KILLED, "grpo", "remax", "dapo, several turns"))
def test_killed_and_resumed_equals_never_interrupted_bit_for_bit(tmp_path, case):
    """Metrics, samples, and in the last checkpoint the weights, optimizers, schedules, controllers and leftovers."""
    script, ranks, args = KILLED[case]
    args = [*SMALL, *few_prompts(tmp_path), "--save-every", "1", "--keep-checkpoints", "0", *args]
    args += ["--num-mini-batches", "2", "--warmup-steps", "3", "--total-steps"]
    (tmp_path / "drawing.py").write_text(DRAWING)
    args = [arg.replace("FOLDER", str(tmp_path)) for arg in args]
    ran(fork(script, tmp_path, *args, "4", "--run-name", "whole", ranks=ranks))
    config = json.loads((tmp_path / "whole/config.json").read_text())
    assert config["effective"]["compute_dtype"] == "float32"  # left to the run by --compute-dtype auto
    assert config["effective"]["sharding"] == "zero1"

    target = tmp_path / "killed/checkpoints/step_000002"
    # before the kill FSDP2, after it ZeRO-1, as the run that is not interrupted
    endless = command(script, tmp_path, *args, "1000", "--run-name", "killed", "--sharding", "fsdp2", launcher=[])
    with started(endless, ranks) as processes:
        wait_until(target.exists, 300)
        family = [p for process in processes for p in psutil.Process(process.pid).children(recursive=True)]
        for member in [*processes, *family]:  # in the middle of a later step
            with contextlib.suppress(psutil.NoSuchProcess):  # reward workers end by themselves without their rank
                member.kill()
    if script == "dapo":
        assert len(load_batches(target)["pool"]) > 0
    for later in sorted((tmp_path / "killed/checkpoints").glob("step_*"))[1:]:
        if later.name > target.name:
            shutil.rmtree(later)
    # what is left is torn: the newest folder lacks its manifest and must not be taken
    torn = tmp_path / "killed/checkpoints/step_000099"
    torn.mkdir()
    (torn / "trainer.json").write_text("{}")

    done = ran(fork(script, tmp_path, *args, "4", "--run-name", "killed", "--resume", "auto", ranks=ranks))
    assert "step 2/4" not in done.stdout and "step 3/4" in done.stdout and "torn" in done.stdout
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert rollouts(tmp_path / "killed") == rollouts(tmp_path / "whole")
    ours, theirs = (saved(tmp_path / name / "checkpoints/step_000004") for name in ("killed", "whole"))
    assert ours.keys() == theirs.keys() and [name for name in ours if ours[name] != theirs[name]] == []


# ---- PPO -----------------------------------------------------------------------------------------
def test_the_values_of_a_critic_of_another_shape_start_at_0(tmp_path):
    config = AutoConfig.from_pretrained(TOY_MODEL, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "critic")
    args = ["--critic-model", str(tmp_path / "critic"), "--num-mini-batches", "1", "--total-steps", "2"]
    first, second = small("ppo", tmp_path, *args, "--save-every", "2")
    assert first["critic/value"] == first["critic/explained_variance"] == 0 != second["critic/value"]
    critic = checkpoint_state(tmp_path / "run/checkpoints/step_000002")["critic"]["model"]
    assert critic["model.embed_tokens.weight"].shape[1] == 64 and critic["score.weight"].shape == (1, 64)


def test_a_policy_waits_for_its_critic_also_after_a_resume(tmp_path):
    """Two of four steps are the critic's alone. The policy's optimizer has no state there, and each schedule counts its
    own updates."""
    args = ["--critic-warmup-steps", "2", "--num-mini-batches", "1", "--warmup-steps", "4", "--critic-lr", "3e-3"]
    args += ["--total-steps", "4", "--save-every", "1", "--keep-checkpoints", "0"]
    rows, checkpoints = small("ppo", tmp_path, *args), tmp_path / "run/checkpoints"
    start = load_file(Path(TOY_MODEL, "model.safetensors"))
    states = [checkpoint_state(checkpoints / f"step_{step:06d}")["actor"]["model"] for step in (2, 3)]
    assert [all(state[name].equal(start[name]) for name in start) for state in states] == [True, False]
    assert [row["critic/lr"] / 3e-3 for row in rows] == pytest.approx([0.25, 0.5, 0.75, 1])
    assert [row["actor/lr"] / 3e-4 for row in rows[2:]] == pytest.approx([0.25, 0.5])
    assert small("ppo", tmp_path / "resumed", *args, "--resume", str(checkpoints / "step_000002")) == rows[2:]


# ---- ReMax ---------------------------------------------------------------------------------------
def test_remax_baseline_is_the_greedy_reward_of_the_same_prompt(tmp_path):
    """A step over all prompts: its mean baseline is the greedy accuracy on them. Sampled among the one most likely
    token, responses are greedy too, and then every advantage is 0 if and only if each row has its own prompt's."""
    prompts = (ROOT / "data/toy/val.jsonl").read_text().splitlines(keepends=True)[:16]
    (tmp_path / "few.jsonl").write_text("".join(prompts))
    files = [flag for name in ("--train-files", "--val-files") for flag in (name, str(tmp_path / "few.jsonl"))]
    args = ["--prompts-per-step", "16", "--group-size", "2", "--total-steps", "1", "--val-before-train", *files]
    for name, more, bounds in ("sampled", [], (-1, 1)), ("greedy", ["--top-k", "1"], (0, 0)):
        start, row = small("remax", tmp_path / name, *args, *more)
        assert row["reward/baseline"] == start["val/toy/arithmetic/mean@1"] and 0 < row["reward/baseline"] < 1
        assert (row["advantages/min"], row["advantages/max"]) == bounds
        tokens = 32 * (row["prompt_length/mean"] + row["response_length/mean"])
        greedy_tokens = 16 * (row["prompt_length/mean"] + row["response_length/baseline"])
        assert row["training/tokens"] == pytest.approx(tokens + greedy_tokens)
    assert row["reward/mean"] == row["reward/baseline"]
    assert row["response_length/mean"] == row["response_length/baseline"]


# ---- several turns -------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_calculator_is_learnt(tmp_path):
    args = ["--micro-batch-tokens", "16384", "--train-files", str(ROOT / "data/toy_tools/train.jsonl")]
    args += ["--val-files", str(ROOT / "data/toy_tools/val.jsonl"), "--lr", "3e-4", "--total-steps", "14"]
    args += ["--val-every", "14", "--no-export-model", "--save-every", "0", "--run-name", "run"]
    ran(fork("grpo", tmp_path, *TOOLS, *args))
    rows = metrics(tmp_path / "run")
    before, *_, after = [row["val/toy/arithmetic/mean@1"] for row in rows if "val/toy/arithmetic/mean@1" in row]
    calls = [row["agent/tool_calls_mean"] for row in rows if "agent/tool_calls_mean" in row]
    assert before < 0.05 and after >= 0.9
    assert calls[0] < 0.3 and calls[-1] > 0.8  # of samples at temperature 1, still rising
    assert unexplained_metrics(tmp_path / "run", "metrics.md", "multi_turn.md") == []
    sample = json.loads((tmp_path / "run/samples.jsonl").read_text().splitlines()[-1])
    assert [turn["by"] for turn in sample["turns"]] == ["policy", "environment", "policy"]
    assert "".join(turn["text"] for turn in sample["turns"]) == sample["response"]


def test_remax_takes_several_turns(tmp_path):
    """The others: on two ranks, killed and resumed, with vLLM."""
    [row] = small("remax", tmp_path, *TOOLS, "--total-steps", "1")
    assert 1 < row["agent/turns_mean"] < 2 and row["agent/segments_mean"] == 1
    assert row["rollout/logp_diff_mean"] < 1e-4  # fp32: what is trained is what was sampled


def test_several_turns_with_vllm(tmp_path):
    """One engine, split over two ranks. An engine of one rank: tests/agent/test_agent_loop.py."""
    left = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")  # by a killed run: vLLM's own name, in every job
    left.write_bytes(b"0")
    engine = ["--rollout-engine", "vllm", "--rollout-tensor-parallel-size", "2"]
    ran(fork("grpo", tmp_path, *SMALL, *TOOLS, "--total-steps", "2", *engine, "--run-name", "run", ranks=2))
    left.unlink()
    for row in metrics(tmp_path / "run"):
        assert 1 < row["agent/turns_mean"] < 2 and row["rollout/logp_diff_mean"] < 1e-4
