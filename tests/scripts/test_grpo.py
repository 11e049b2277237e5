"""grpo.py as a user runs it: processes, both engines, its flags, and every kind of bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import dapo
import grpo
from lib import core_algos
from tests.common import ROOT, SMALL, TOY_MODEL, fork, metrics, ran, skip_without_vllm


# ---- it learns -----------------------------------------------------------------------------------
def test_the_default_learns_on_policy_and_leaves_what_it_promises(tmp_path):
    """6 of its 60 steps take greedy accuracy from 0.31 to 0.95 where it was measured; 0.8: other roundings. 1e-4 nats:
    the fp32 sampler and the fp32 trainer differ by some 1e-6 (docs/grpo.md)."""
    printed = ran(fork("grpo", tmp_path, "--run-name", "run", "--total-steps", "6", "--save-every", "3")).stdout
    run = tmp_path / "run"
    rows, name = metrics(run), "val/toy/arithmetic/mean@1"
    accuracy, steps = [row[name] for row in rows if name in row], [row for row in rows if "reward/mean" in row]
    assert len(accuracy) == 3 and 0.2 <= accuracy[0] <= 0.4 and accuracy[-1] >= 0.8
    assert [row["step"] for row in steps] == list(range(1, 7))
    assert all(row["rollout/logp_diff_max"] < 1e-4 and row["actor/pg_clipfrac"] == 0 for row in steps)
    assert "before" in printed and "after" in printed and str(run / "curve.png") in printed
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000003", "step_000006"]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * 256 and samples[0].keys() >= {"step", "prompt", "response", "score", "ground_truth"}
    assert AutoTokenizer.from_pretrained(run / "model").chat_template


# ---- vLLM ----------------------------------------------------------------------------------------
def test_a_run_with_vllm_trains_on_what_was_sampled(tmp_path):
    """An engine on each of two ranks: tests/servers/test_managed_servers.py. One that is split over them:
    test_scripts.py. A second validation set has a limit of its own, above that of training."""
    skip_without_vllm()
    lines = "\n".join((ROOT / "data/toy/val.jsonl").read_text().splitlines()[:32])
    (tmp_path / "val.jsonl").write_text(lines)
    (tmp_path / "long.jsonl").write_text(lines.replace('"toy/arithmetic"', '"toy/long"'))
    args = [*SMALL, "--run-name", "run", "--rollout-engine", "vllm", "--total-steps", "2", "--val-every", "2"]
    args += ["--val-files", *(str(tmp_path / f"{name}.jsonl") for name in ("val", "long"))]
    args += ["--val-reward", f"{ROOT / 'rewards/arithmetic.py'}:compute_score", "--val-samples", "1", "2"]
    args += ["--val-kwargs", "max_response_length=16,40", "--val-temperature", "0", "2"]
    ran(fork("grpo", tmp_path, *args))
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    longest = {row["data_source"]: 0 for row in samples}
    for row in samples:
        tokens = len(tokenizer.encode(row["response"], add_special_tokens=False))
        longest[row["data_source"]] = max(longest[row["data_source"]], tokens)
    assert longest["toy/arithmetic"] <= 16 < longest["toy/long"] <= 40
    rows = metrics(tmp_path / "run")
    assert all(row["rollout/canary_logp_diff"] < 1e-4 for row in rows if "rollout/canary_logp_diff" in row)
    assert all(row["rollout/logp_diff_max"] < 1e-3 for row in rows if "reward/mean" in row)


# ---- flags ---------------------------------------------------------------------------------------


SHADOW = """
import random
def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.count("1")) + random.random()

def shadow(data_source, solution_strs, ground_truth, extra_info=None):
    if random.random() < 0.5:
        raise ValueError("half of the groups")
    return [random.random() for _ in solution_strs]
"""


def test_a_shadow_reward_changes_no_bit_of_the_training(tmp_path):
    file, rows = tmp_path / "mine.py", {}
    file.write_text(SHADOW)
    args = [*SMALL, "--total-steps", "2", "--num-mini-batches", "2", "--reward", f"{file}:score"]
    for name, more in {"plain": [], "shadowed": ["--shadow-reward", f"{file}:shadow"]}.items():
        ran(fork("grpo", tmp_path, *args, *more, "--reward-workers", "2", "--run-name", name))
        rows[name] = metrics(tmp_path / name)
    for plain, shadowed in zip(rows["plain"], rows["shadowed"], strict=True):
        logged = {key: value for key, value in shadowed.items() if key.startswith("shadow/")}
        assert 0 < logged["shadow/mine.shadow/mean"] < 1 and abs(logged["shadow/mine.shadow/correlation"]) < 1
        assert logged["shadow/error_count"] > 0 and shadowed["reward/error_count"] == 0
        assert plain["actor/grad_norm"] > 0 and shadowed == plain | logged


def test_a_baseline_of_remax_is_one_number_a_row():
    with pytest.raises(ValueError, match="one number a row"):
        core_algos.compute_remax_outcome_advantage(torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 3).bool())


@pytest.mark.parametrize("script", [grpo, dapo])
def test_advantages_of_a_script_are_the_librarys(script):
    """To the last bit: also float32 rewards are summed in float64."""
    g = torch.Generator().manual_seed(0)
    mask, rewards = torch.rand(18, 6, generator=g) < 0.7, torch.rand(18, 6, generator=g)
    group = torch.arange(18) // 4
    ours, _ = script.grpo_advantages(script.Args(), torch.where(mask, rewards, torch.nan), mask, {"group": group})
    assert torch.equal(ours, core_algos.compute_grpo_outcome_advantage(rewards, mask, group)[0])


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROW = {
    "prompt": [{"role": "user", "content": "123+456"}],
    "data_source": "toy/arithmetic",
    "reward_model": {"ground_truth": "579"},
}
BAD_INPUT = [  # besides flags (tests/cli/test_args.py); FOLDER has rows.jsonl, and a model without a template
    ("--train-files FOLDER/rows.jsonl --max-prompt-length 3", "too long for max_prompt_length=3"),
    ("--val-files FOLDER/rows.jsonl --val-every 1", "rows.jsonl row 1: 'reward_model' has no 'ground_truth'"),
    ("--model FOLDER/model --multi-turn.tools calculator", "turns need a chat template"),
    ("--model FOLDER/model --agent true", "turns need a chat template"),
    (f"--model {ROOT}/data/toy_vision/model --agent true", "--agent takes text only, and --model"),
    ("--agent absent.py:solve", "--agent absent.py:solve: there is no such file"),
    ("--entropy-target 0.2 --entropy-coef -0.5", "coef in 0..1"),
    ("--rollout-correction.bounds 2 3", "needs bounds on r"),
    ('--chat-template-kwargs {"enable_thinkin":1}', "the model's template does not read enable_thinkin"),
    ("--dataset-class absent.py:Mine", "--dataset-class absent.py:Mine: give"),
    (f"--reward-model {TOY_MODEL}", "--reward-model"),  # which is found out when it loads
]


@pytest.mark.parametrize(("flags", "message"), BAD_INPUT)
def test_bad_input_is_one_clear_line_and_nothing_is_written(tmp_path, flags, message):
    write(tmp_path / "rows.jsonl", ROW, ROW | {"reward_model": {"style": "rule"}})
    shutil.copytree(TOY_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("chat_template.jinja"))
    words = ["--val-files", "none", *flags.replace("FOLDER", str(tmp_path)).split()]
    done = fork("grpo", tmp_path / "runs", *SMALL, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--reward-model" in flags or not (tmp_path / "runs").exists()
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line


def test_the_header_names_model_data_and_what_trains_nothing(tmp_path):
    prompt = [{"role": "user", "content": "1+2<|im_end|>\n<|im_start|>assistant\n="}]
    rows = write(tmp_path / "a.jsonl", ROW, ROW | {"prompt": prompt})
    args = [*SMALL, "--total-steps", "1", "--lr", "0", "--group-size", "1", "--val-files", "none"]
    args += ["--train-files", rows, "--max-prompt-length", "64", "--prompts-per-step", "2"]
    said = ran(fork("grpo", tmp_path, *args)).stdout
    counts = "2 (prompt_too_long 0, special_tokens_as_text 1)"
    assert f"\nmodel: data/toy/model\ntraining prompts: {counts} from " in said
    assert "\nvalidation prompts: none\n" in said
    assert "\nnote: --lr 0 leaves the policy as it is\n" in said
    assert "\nnote: --group-size 1: a response's advantage is its reward (--adv-kwargs singleton)\n" in said
    done = fork("grpo", tmp_path, *args, "--reward-kwargs", '{"metod": "strict"}')
    assert done.returncode == 2 and "no scorer declares metod" in done.stderr


def test_your_own_rewards_dataset_and_validation_by_sampling(tmp_path):
    """--reward, of which the score says nothing, --dataset-class, several validation samples, tensorboard and wandb."""
    (tmp_path / "mine.py").write_text(
        "from lib.data import RLHFDataset\n"
        "class Mine(RLHFDataset):\n"
        "    pass\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None, *, longest):\n"
        "    right, chars = float(solution_str.endswith(ground_truth)), len(solution_str)\n"
        "    return {'score': 1.0, 'pred': solution_str, 'right': right, 'chars': chars / longest}\n"
    )
    val = write(tmp_path / "val.jsonl", *[json.loads(x) for x in (ROOT / "data/toy/val.jsonl").open().readlines()[:10]])
    args = ["--run-name", "run", "--reward", f"{tmp_path / 'mine.py'}:score", "--val-files", val]
    args += ["--dataset-class", f"{tmp_path / 'mine.py'}:Mine", "--val-samples", "4", "--val-temperature", "1"]
    args += ["--total-steps", "1", "--track", "tensorboard", "wandb", "--reward-kwargs", '{"longest": 16}']
    args += ["--adv-estimator", "gdpo", "--adv-kwargs", "reward_keys=right,chars", "--zero-variance", "mask"]
    ran(fork("grpo", tmp_path, *SMALL, *args, "--val-every", "1"))
    train, val_row = metrics(tmp_path / "run")
    assert 0 < train["reward/right/mean"] < 1 and 0 < train["reward/chars/mean"] <= 1
    assert train["actor/grad_norm"] > 0 and abs(train["advantages/mean"]) < 1e-6  # whitened over all tokens, in fp32
    assert {
        f"val/toy/arithmetic/{m}"
        for m in ("mean@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "best@4", "chars/mean@4", "clip_ratio")
    } <= val_row.keys()
    assert list((tmp_path / "run/tensorboard").iterdir()) and list((tmp_path / "run").glob("wandb*"))
