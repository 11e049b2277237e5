"""Signals over the vocabulary: log-probs at given ids, top-k and whole KLs, by chunks, against autograd on whole logits
of single rows; on one rank and two, with all ways to split a model or its rows."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from lib import InputError
from lib.core_algos import at_ids, forward_kl, reverse_kl, top_k
from lib.distributed import full_tensor, make_mesh, make_row_group, shard_model, trainable_parameters
from lib.model import (
    ForwardConfig,
    Policy,
    Reference,
    add_lora,
    load_model,
    log_probs,
    micro_batches,
    response_log_probs,
)
from lib.sampling import Sampling
from tests.common import VOCAB, float64_norms, randomize_lora_b, rollout_batch, run_ranks, save_tiny
from tests.model.test_model import CAPPED, PROMPTS, RESPONSES
from tests.model.test_models import logits_of_rows
from tests.scripts.test_invariance import groups_batch

K = 4


def test_values_and_gradients_are_those_of_whole_logits(monkeypatch):
    """Of all signals at once, by chunks of 3 of 7 tokens; the ids have no gradient."""
    monkeypatch.setattr(log_probs, "SIGNAL_CHUNK", 3)
    g = torch.Generator().manual_seed(0)
    h, w, q = (torch.randn(n, m, generator=g, dtype=torch.float64) for n, m in ((7, 5), (23, 5), (7, 23)))
    h, w, log_q = h.requires_grad_(), w.requires_grad_(), q.log_softmax(-1)
    ids = q.topk(K).indices

    def signal(log_p, s):
        own, log_p_k = top_k(log_p, 2)
        return own, log_p_k, at_ids(log_p, ids[s]), forward_kl(log_p, log_q[s]), reverse_kl(log_p, log_q[s])

    own, *ours = log_probs.over_vocabulary(signal, h, w, 1 / 0.7)
    log_p = torch.log_softmax(h @ w.T / 0.7, -1)
    theirs = signal(log_p, slice(None))
    assert own.equal(theirs[0]) and not own.requires_grad
    for a, b in zip(ours, theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    rest = (1 - log_p.exp().gather(1, ids).sum(1)).log()
    torch.testing.assert_close(ours[1][:, -1], rest, rtol=1e-9, atol=1e-12)
    for used in (slice(4), slice(1, 2), slice(3, 4)):  # a loss of some results
        weights = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in ours[used]]
        losses = [sum((c * x).sum() for c, x in zip(weights, xs[used])) for xs in (ours, theirs[1:])]
        for a, b in zip(*(torch.autograd.grad(loss, (h, w), retain_graph=True) for loss in losses)):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_whole_logits_never_exist(monkeypatch):
    monkeypatch.setattr(log_probs, "SIGNAL_CHUNK", 16)
    n, v, d = 512, 4096, 8
    h, w = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    ids = torch.arange(K).expand(n, K)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        log_probs.over_vocabulary(lambda log_p, s: (at_ids(log_p, ids[s]),), h, w, 1.0)[0].sum().backward()
    assert max(event.cpu_memory_usage for event in profile.events()) < n * v * 4 / 10


def whole_rows(model, batch):
    """{(row, t): log-probs (V,)} of each trained token, by rows alone."""
    return {at: (logits / 0.8).log_softmax(-1) for at, _, logits in logits_of_rows(model, batch)}


def step(world, paths, tokens, size=1, tensor=1, zero1=False, lora=False):
    """A policy's update by a teacher's top-k and by its whole distribution. (losses, the teacher's top-k, gradient)"""
    path, of_teacher = paths
    mesh = make_mesh(world, 1, tensor)
    forward = ForwardConfig(tokens, Sampling(9, temperature=0.8), make_row_group(world, mesh, size), torch.float64)

    def load(path):
        return float64_norms(load_model(path, dtype=torch.float64))

    module = load(path)
    if lora:
        add_lora(module, rank=4, alpha=8, seed=0)
        randomize_lora_b(module)
        module.to(torch.float64)
    module = shard_model(module, mesh, torch.float64, zero1=zero1)
    optimizer = torch.optim.SGD(trainable_parameters(module), lr=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    actor = Policy("actor", module, optimizer, scheduler, world, forward, 1.0, reduce_each_micro_batch=False)
    frozen = module if lora else shard_model(load(of_teacher).requires_grad_(False), mesh, torch.float64, zero1=zero1)
    teacher = Reference(frozen, forward)
    batch = groups_batch([(5, [4, 1, 9, 6]), (7, [3, 3, 8, 2])])
    batch = batch[list(range(world.rank, len(batch), world.size))]

    _, _, ids, log_q = teacher.batched_signal(batch, partial(top_k, k=K))
    batch.batch["teacher_ids"], batch.batch["teacher_top_k"] = ids, log_q
    whole, losses = teacher.compared(reverse_kl), torch.zeros((), dtype=torch.float64)

    def signal(log_p, ids, hidden):
        return at_ids(log_p, ids), whole(log_p, hidden)

    for micro in micro_batches(batch, actor):
        micro.batch["hidden"] = teacher.hidden_states(micro)
        *_, log_p, of_all = actor.log_probs(micro, signal, "teacher_ids", "hidden")
        kl = forward_kl(log_p, micro.batch["teacher_top_k"]) + 2 * of_all
        loss = (kl * torch.arange(1, kl.shape[1] + 1)).sum()
        actor.backward(loss)
        losses += loss.detach()
    gradient = torch.cat([full_tensor(p.grad).flatten() for p in actor.parameters])
    return losses, (ids, log_q), gradient


LAYOUTS = [{}, {"zero1": True, "tokens": 60}, {"size": 2}, {"tensor": 2}]  # of two ranks


@pytest.mark.parametrize("lora", [False, True])
def test_every_layout_has_the_loss_and_gradient_of_one_rank(tmp_path, lora):
    """Also against autograd on whole rows: the loss."""
    paths = [save_tiny(tmp_path / str(seed), seed=seed, num_key_value_heads=2) for seed in (0, 1)]
    [(loss, (ids, log_q), gradient)] = run_ranks(1, step, paths, 20, 1, 1, False, lora)
    assert gradient.norm() > 0.01 and ids.dtype == torch.int64
    for how in LAYOUTS[: 2 if lora else None]:  # tensor parallel does not work with adapters
        how = {"tokens": 20, "size": 1, "tensor": 1, "zero1": False} | how
        results = run_ranks(2, step, paths, *how.values(), lora)
        torch.testing.assert_close(sum(result[0] for result in results), loss, rtol=1e-9, atol=0)
        for rank, (_, (its_ids, its_log_q), its_gradient) in enumerate(results):
            assert its_ids.equal(ids[rank::2]) and its_ids.dtype == ids.dtype
            torch.testing.assert_close(its_log_q, log_q[rank::2], rtol=1e-9, atol=1e-12)
            assert (its_gradient - gradient).norm() < 1e-9 * gradient.norm()
    if not lora:
        batch = groups_batch([(5, [4, 1, 9, 6]), (7, [3, 3, 8, 2])])
        policy, teacher = (
            whole_rows(float64_norms(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)), batch)
            for path in paths
        )
        expected = 0.0
        for (i, t), log_p in policy.items():
            few, log_q = top_k(teacher[i, t][None], K)
            expected += (t + 1) * forward_kl(at_ids(log_p[None], few), log_q)[0]
            expected += (t + 1) * 2 * reverse_kl(log_p, teacher[i, t])
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)


def test_in_bfloat16_fsdp_does_not_round_columns(tmp_path, one_rank):
    """It casts the floats that a forward gets. 0.3: two layers whose logits have a standard deviation of 5 or so."""
    path, batch = save_tiny(tmp_path), rollout_batch(PROMPTS, RESPONSES)
    mask = batch.batch["response_mask"]
    batch.batch["teacher_ids"] = torch.rand(*mask.shape, VOCAB).topk(K).indices
    batch.batch["teacher_top_k"] = torch.rand(*mask.shape, K + 1)
    of_ids = lambda log_p, ids, exact: (at_ids(log_p, ids), exact)  # noqa: E731
    how = {"signal": of_ids, "columns": ["teacher_ids", "teacher_top_k"]}
    *_, expected, _ = response_log_probs(load_model(path), batch, 1.0, **how)
    model = shard_model(load_model(path), make_mesh(one_rank), torch.bfloat16)
    *_, ours, exact = response_log_probs(model, batch, 1.0, **how)
    ours.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert exact.equal(batch.batch["teacher_top_k"] * mask[..., None])
    assert 0 < (ours - expected).abs().max() < 0.3


def test_what_the_whole_kl_cannot_compare_is_said(tmp_path):
    forward = ForwardConfig(100, Sampling(9), None, torch.float32)
    capped, tiny = save_tiny(tmp_path / "capped", **CAPPED), load_model(save_tiny(tmp_path / "tiny"))
    with pytest.raises(InputError, match="changes its logits: take its top-k"):
        Reference(load_model(capped, attn_implementation="eager"), forward).compared(reverse_kl)
    signal = Reference(tiny, forward).compared(reverse_kl)
    with pytest.raises(InputError, match=f"head has {VOCAB} tokens, the policy's 90"):
        signal(torch.zeros(2, 90), torch.zeros(2, 64))
