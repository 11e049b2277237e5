"""grpo.py as a user runs it: processes, both engines, its flags, and every kind of bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import dapo
import grpo
import remax
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
def test_groups_without_signal_move_nothing(tmp_path):
    """All get the same reward: neither the entropy bonus nor the KL may act on them."""
    (tmp_path / "same.py").write_text("def score(**kwargs):\n    return 1.0\n")
    args = ["--reward", f"{tmp_path / 'same.py'}:score", "--zero-variance", "mask", "--total-steps", "2"]
    args += ["--entropy-coef", "0.1", "--kl-coef", "0.1", "--export-model", "--run-name", "run"]
    done = ran(fork("grpo", tmp_path, *SMALL, *args))
    assert done.stdout.count("| gradient 0 | equal scores in every group") == 2
    assert "note: gradient 0 in 2 of 2 steps\n" in done.stdout
    assert "note: rows dropped by zero_variance: 64 of 64\n" in done.stdout
    for row in metrics(tmp_path / "run"):
        assert row["training/rows_dropped/zero_variance"] == 32 and row["training/rows_trained"] == 0
        assert row["actor/grad_norm"] == 0 and row["actor/loss"] == 0
    after, start = (load_file(Path(path, "model.safetensors")) for path in (tmp_path / "run/model", TOY_MODEL))
    assert all(after[key].equal(start[key]) for key in start)


GRADIENTS = """
import hashlib, os, random, sys

if "torch" in sys.modules:  # the trainer, which imports this file to check it
    from torch.optim import optimizer

    def write(adam, *_):
        grads = [p.grad for group in adam.param_groups for p in group["params"] if p.grad is not None]
        digest = hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in grads)).hexdigest()
        with open(os.environ["GRADIENTS"], "a") as file:
            file.write(f"{len(grads)} {digest}\\n")

    optimizer.register_optimizer_step_pre_hook(write)

def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.count("1")) + random.random()

def shadow(data_source, solution_strs, ground_truth, extra_info=None):
    if random.random() < 0.5:
        raise ValueError("half of the groups")
    return [random.random() for _ in solution_strs]
"""


def test_gradients_are_bit_identical_with_and_without_a_shadow_reward(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(GRADIENTS)
    args = [*SMALL, "--total-steps", "2", "--num-mini-batches", "2", "--reward", f"{file}:score"]
    rows, gradients = {}, {}
    for name, more in {"plain": [], "shadowed": ["--shadow-reward", f"{file}:shadow"]}.items():
        monkeypatch.setenv("GRADIENTS", str(tmp_path / name))
        ran(fork("grpo", tmp_path, *args, *more, "--reward-workers", "2", "--run-name", f"run-{name}"))
        rows[name], gradients[name] = metrics(tmp_path / f"run-{name}"), (tmp_path / name).read_text().splitlines()
    assert gradients["plain"] == gradients["shadowed"] and len(set(gradients["plain"])) == 4
    for plain, shadowed in zip(rows["plain"], rows["shadowed"], strict=True):
        logged = {key: value for key, value in shadowed.items() if key.startswith("shadow/")}
        assert 0 < logged["shadow/mine.shadow/mean"] < 1 and abs(logged["shadow/mine.shadow/correlation"]) < 1
        assert logged["shadow/error_count"] > 0 and shadowed["reward/error_count"] == 0
        assert {key: value for key, value in shadowed.items() if key not in logged} == plain


def test_advantages_of_remax_are_the_librarys():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]).bool()
    rewards, baselines = torch.where(mask, torch.tensor([[0.5, 0, 1], [0, 0, 0]]), torch.nan), torch.tensor([0.25, 1])
    ours = remax.remax_advantages(rewards, baselines, mask)
    theirs = core_algos.compute_remax_outcome_advantage(rewards, baselines, mask)
    assert ours[0].tolist() == [[1.25, 0, 0.75], [0, 0, 0]] and all(torch.equal(a, b) for a, b in zip(ours, theirs))
    with pytest.raises(ValueError, match="one number a row"):
        core_algos.compute_remax_outcome_advantage(rewards, baselines[:, None], mask)


@pytest.mark.parametrize("script", [grpo, dapo])
@pytest.mark.parametrize("singleton", ["raw", "zero"])
def test_loss_and_advantages_of_a_script_are_the_librarys(script, singleton):
    """To the last bit, with gradients: a script writes out what lib/core_algos has as `vanilla` and `grpo`."""
    g = torch.Generator().manual_seed(0)
    mask, group = torch.rand(18, 6, generator=g) < 0.7, torch.arange(18) // 4
    mask[[1, 5, 17]] = False  # 16 has no other row in its group
    rewards = torch.randint(0, 3, (18, 6), generator=g).float()
    rewards[8:12] = mask[8:12] / mask[8:12].sum(1, keepdim=True).clamp(min=1)  # thirds, which sum up to 1
    args = script.Args(
        adv_kwargs=(f"singleton={singleton}",), clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=1.5
    )
    ours, _ = script.grpo_advantages(args, torch.where(mask, rewards, torch.nan), mask, {"group": group})
    theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, group, singleton=singleton)
    assert torch.equal(ours, theirs)

    old = -torch.rand(18, 6, generator=g) * 3
    new = (old + torch.randn(18, 6, generator=g)).requires_grad_()
    t = {"advantages": ours, "response_mask": mask.long()}
    names = {"cliprange_low": 0.1, "cliprange_high": 0.3, "clip_ratio_c": 1.5}
    found = [script.policy_loss(args, new, old, t), core_algos.named_policy_loss("vanilla", names, old, new, t)]
    (loss, numbers), (expected, of_library) = found
    assert torch.equal(loss * mask, expected * mask) and loss.unique().numel() > 20
    assert all(torch.equal(numbers[name] * mask, values * mask) for name, values in of_library.items())
    assert torch.equal(*(torch.autograd.grad((losses * mask).sum(), new)[0] for losses, _ in found))


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROW = {
    "prompt": [{"role": "user", "content": "123+456"}],
    "data_source": "toy/arithmetic",
    "reward_model": {"ground_truth": "579"},
}
BAD_INPUT = [  # beside the flags of tests/cli/test_args.py; FOLDER has rows.jsonl, and a model without a template
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
