"""On-policy distillation: the gradient, a teacher of other tokens, and learning without a reward."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data import toy
from tests.common import fork, metrics, ran


def test_the_expected_gradient_is_that_of_the_reverse_kl(module_of):
    """Every token of the vocabulary once, weighed by its probability, beside autograd's gradient of the KL."""
    distill, generator = module_of("distill"), torch.Generator().manual_seed(0)
    logits, of_teacher = torch.randn(2, 1, 50, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_probs, teacher = logits.log_softmax(-1), of_teacher.log_softmax(-1)
    advantages = (teacher - log_probs).detach()
    args = distill.Args(teacher="", clip_ratio_c=1e9)
    losses, _ = distill.policy_loss(args, log_probs, log_probs.detach(), {"advantages": advantages})
    ours = torch.autograd.grad((log_probs.detach().exp() * losses).sum(), logits, retain_graph=True)[0]
    exact = torch.autograd.grad((log_probs.exp() * (log_probs - teacher)).sum(), logits)[0]
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-14)


def test_a_teacher_follows_the_policy(module_of):
    teacher, actor = (SimpleNamespace(module=torch.nn.Linear(2, 2)) for _ in range(2))
    for model in (teacher, actor):
        model.parameters = [*model.module.parameters()]
    wanted = [0.9 * a + 0.1 * b for a, b in zip(teacher.parameters, actor.parameters)]
    module_of("distill").follow(teacher, actor, 0.9)
    torch.testing.assert_close(teacher.parameters, wanted)


def test_a_teacher_of_other_tokens_is_refused(script_of, tmp_path):
    model = Path(shutil.copytree(toy.FOLDER / "model", tmp_path / "model"))
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text.replace('"<pad>"', '"<padding>"'))
    done = fork(str(script_of("distill").with_suffix("")), tmp_path, "--teacher", str(model))
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: --teacher {model}: its tokens are not those of")


@pytest.mark.slow
def test_it_learns_without_a_reward(script_of, tmp_path):
    """10 steps take greedy accuracy from 0.31 to 0.99, and the KL from 0.17 to 0.01 nats, where they were measured; the
    bounds leave room for other roundings. No training row has an answer."""
    ten_steps = ["--total-steps", "10", "--val-every", "10", "--save-every", "0"]
    ran(fork("grpo", tmp_path, *ten_steps, "--no-val-before-train", "--run-name", "teacher"))  # 0.99
    rows = [json.loads(line) for line in (toy.FOLDER / "train.jsonl").read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"reward_model": {}}) + "\n" for row in rows))
    (tmp_path / "none.py").write_text("def score(data_source, solution_str, extra_info, ground_truth=None): return 0\n")
    args = ["--teacher", str(tmp_path / "teacher/model"), "--train-files", str(tmp_path / "rows.jsonl")]
    args += ["--no-export-model", "--val-files", str(toy.FOLDER / "val.jsonl")]
    args += ["--reward", f"{tmp_path / 'none.py'}:score", "--val-reward", "data_source", "--run-name", "run"]
    ran(fork(str(script_of("distill").with_suffix("")), tmp_path, *ten_steps, *args))
    logged = metrics(tmp_path / "run")
    accuracy = [row["val/toy/arithmetic/mean@1"] for row in logged if "val/toy/arithmetic/mean@1" in row]
    assert accuracy[0] < 0.4 and accuracy[-1] > 0.7
    kl = [row["actor/teacher_kl"] for row in logged if "actor/teacher_kl" in row]
    assert max(kl[-3:]) < min(kl[:2]) / 2
    assert {row["reward/max"] for row in logged if "reward/max" in row} == {0}
