"""On-policy distillation: the gradient, a teacher of other tokens, and which teacher scores which rows."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import toy
from lib import InputError
from lib.core_algos import top_k
from lib.model import ForwardConfig, Reference, load_model
from lib.sampling import Sampling
from tests.common import fork, rollout_batch, save_tiny


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


@pytest.mark.parametrize("k", [0, 3])
def test_a_row_has_the_columns_of_its_data_sources_teacher(module_of, tmp_path, k):
    forward = ForwardConfig(100, Sampling(9), None, torch.float32)
    teachers = [Reference(load_model(save_tiny(tmp_path / str(seed), seed=seed)), forward) for seed in (0, 1)]
    batch = rollout_batch([3, 7, 5, 4], [4, 1, 9, 6])
    sources = batch.non_tensor_batch["data_source"] = np.array(["sums", "codes", "sums", "sums"], dtype=object)
    mask = batch.batch["response_mask"].clone()
    args = SimpleNamespace(teacher_sources=("sums", "codes"), teacher_top_k=k)
    found = module_of("distill").teach(args, teachers, batch, 90)
    assert batch.batch["response_mask"].equal(mask)
    signal = (lambda log_p: top_k(log_p, k, 90)) if k else None
    for teacher, source in zip(teachers, args.teacher_sources):
        rows = sources == source
        log_prob, _, *of_top_k = teacher.batched_signal(batch, signal)
        expected = of_top_k or [log_prob]
        for ours, theirs in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(ours[rows], theirs[rows], rtol=1e-4, atol=1e-4)  # fp32, other micro-batches
    args.teacher_sources = ("sums", "proofs")
    with pytest.raises(InputError, match="rows of codes have no teacher"):
        module_of("distill").teach(args, teachers, batch, 90)
