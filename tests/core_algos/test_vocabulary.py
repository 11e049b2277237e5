"""Distributions of K tokens and the rest, and their KLs, against loops over the vocabulary in Python floats."""

import math
import random

import pytest
import torch

from lib.core_algos import at_ids, forward_kl, reverse_kl, top_k
from tests.core_algos.test_core_algos import for_all, seeds


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(math.fsum(map(math.exp, logits)))
    return [z - total for z in logits]


def with_rest(log_p: list[float], ids: list[int]) -> list[float]:
    rest = math.fsum(math.exp(x) for i, x in enumerate(log_p) if i not in ids)
    return [*(log_p[i] for i in ids), math.log(rest)]


def kl(log_a: list[float], log_b: list[float]) -> float:
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(log_a, log_b, strict=True))


@for_all(seed=seeds)
def test_kls_of_all_tokens_and_of_k_and_the_rest_equal_the_loops(seed):
    rng = random.Random(seed)
    V, k, n = rng.randint(4, 30), rng.randint(1, 3), rng.randint(1, 4)
    log_p, log_q = ([log_softmax([rng.gauss(0, 3) for _ in range(V)]) for _ in range(n)] for _ in "pq")
    p, q = (torch.tensor(rows, dtype=torch.float64) for rows in (log_p, log_q))
    ids, q_k = top_k(q, k, V - 1)
    p_k = at_ids(p, ids)
    for i in range(n):
        likeliest = sorted(range(V - 1), key=lambda v, row=log_q[i]: -row[v])[:k]
        assert ids[i].tolist() == likeliest
        few_p, few_q = with_rest(log_p[i], likeliest), with_rest(log_q[i], likeliest)
        assert p_k[i].tolist() == pytest.approx(few_p, rel=1e-9) and q_k[i].tolist() == pytest.approx(few_q, rel=1e-9)
        for a, b, x, y in ((p, q, log_p[i], log_q[i]), (p_k, q_k, few_p, few_q)):
            assert forward_kl(a, b)[i].item() == pytest.approx(kl(y, x), rel=1e-9)
            assert reverse_kl(a, b)[i].item() == pytest.approx(kl(x, y), rel=1e-9)
    for whole, few in ((forward_kl(p, q), forward_kl(p_k, q_k)), (reverse_kl(p, q), reverse_kl(p_k, q_k))):
        assert (few <= whole + 1e-12).all() and (few >= -1e-12).all()


def test_a_small_rest_is_exact_and_the_whole_vocabulary_leaves_none():
    z = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)  # 1 - p would be 0 in float32
    log_p = at_ids(z.log_softmax(-1), torch.tensor([[0]]))
    assert log_p[0, 1].item() == pytest.approx(math.log(2) - 30, rel=1e-6)
    [gradient] = torch.autograd.grad(log_p[0, 1], z)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 0.5, 0.5]]))
    p, q = (at_ids(torch.randn(2, 3).log_softmax(-1), torch.arange(3).expand(2, 3)) for _ in "pq")
    for divergence in (forward_kl, reverse_kl):
        assert divergence(p, q).equal(divergence(p[:, :3], q[:, :3]))
