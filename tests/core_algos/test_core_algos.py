"""Every kernel against a slow loop in Python floats, and the properties that the loss of a mini-batch must have.

The references are written another way than the kernels (case by case, gradients by hand): no slip is made twice.
"""

import math
import random
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import InputError
from lib.core_algos import (
    LOSS_AGG_MODES,
    agg_loss,
    compute_grpo_outcome_advantage,
    compute_overlong_penalty,
    get_adv_estimator_fn,
    kl_penalty,
    masked_mean,
    masked_sum,
    masked_whiten,
    zero_variance_rows,
)
from lib.core_algos.policy_losses import compute_policy_loss
from lib.core_algos.reductions import masked_var
from tests.reference_formulas import kl_estimate, token_weight

GARBAGE = [math.nan, 1e9, -1e9, math.inf, -math.inf]
SCALE = 17.0  # loss_scale_factor
seeds = st.integers(0, 2**32 - 1)


def for_all(examples: int = 20, **strategies):
    """hypothesis' given, quick and the same on every run; seeds make the tensors."""
    return lambda test: settings(max_examples=examples, derandomize=True)(given(**strategies)(test))


def garbage(shape, seed):
    rng = random.Random(seed)
    return torch.tensor([rng.choice(GARBAGE) for _ in range(math.prod(shape))], dtype=torch.float64).reshape(shape)


def poison(values, mask, seed):
    return torch.where(mask.bool(), values, garbage(values.shape, seed).to(values.dtype))


def bits_equal(a, b):
    """Equal to the last bit (NaN would not be; −0 is 0)."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())


def random_mask(generator, rows, width):
    """Holes as of tool output, some rows dead."""
    mask = (torch.rand(rows, width, generator=generator) < 0.7).long()
    mask[torch.rand(rows, generator=generator) < 0.2] = 0
    return mask


def random_batch(seed, rows=None, width=None):
    """float64 inputs of the policy loss; the log ratios reach every case of both clips, and the clamp at ±20."""
    g = torch.Generator().manual_seed(seed)
    rows = rows or int(torch.randint(2, 8, (), generator=g))
    width = width or int(torch.randint(1, 7, (), generator=g))
    randn = lambda: torch.randn(rows, width, generator=g, dtype=torch.float64)  # noqa: E731
    old = -randn().abs()
    log_prob = old + randn() * 0.8
    log_prob = torch.where(torch.rand(rows, width, generator=g) < 0.05, old + 25 * randn().sign(), log_prob)
    advantages = torch.where(torch.rand(rows, width, generator=g) < 0.1, 0.0, randn())
    return old, log_prob, advantages, random_mask(g, rows, width)


# ----------------------------------------------------------------------------------- masked reductions
def valid_values(values, mask):
    return [v for v, m in zip(values.flatten().tolist(), mask.flatten().tolist()) if m]


@for_all(seed=seeds)
def test_masked_reductions_equal_the_loop(seed):
    values, _, _, mask = random_batch(seed)
    mask[0, 0] = mask[1, 0] = 1
    kept, dirty = valid_values(values, mask), poison(values, mask, seed)
    for m in (mask, mask.bool(), mask.double()):
        assert masked_sum(dirty, m).item() == pytest.approx(math.fsum(kept), rel=1e-12)
        assert masked_mean(dirty, m).item() == pytest.approx(statistics.mean(kept), rel=1e-12)
        assert masked_var(dirty, m).item() == pytest.approx(statistics.variance(kept), rel=1e-9)
    for i in range(len(values)):
        row = valid_values(values[i], mask[i])
        assert masked_mean(dirty, mask, dim=1)[i].item() == pytest.approx(statistics.mean(row) if row else 0, rel=1e-12)
        assert masked_sum(dirty, mask, dim=1)[i].item() == pytest.approx(math.fsum(row), rel=1e-12)

    mean, std = statistics.mean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    for v, m, w in zip(*(x.flatten().tolist() for x in (values, mask, masked_whiten(dirty, mask)))):
        assert w == pytest.approx((v - mean) / std if m else 0, rel=1e-9, abs=1e-12)


def test_masked_edges():
    values = torch.tensor([[1.0, math.nan]])
    assert masked_mean(values, torch.tensor([[0, 0]])).item() == 0
    for mask in ([[0, 0]], [[1, 0]]):
        for kernel in (masked_var, masked_whiten):
            with pytest.raises(ValueError, match="at least 2 valid positions"):
                kernel(values, torch.tensor(mask))
    with pytest.raises(ValueError, match="same shape"):
        masked_mean(torch.ones(2, 3), torch.ones(2, 1))


# ------------------------------------------------------------------------------------------ advantages
def test_grpo_inputs():
    rewards, mask = torch.tensor([[1], [0]]), torch.ones(2, 1)  # integer rewards must not truncate the advantages
    for index in (torch.tensor([5, 5]), np.array([5, 5]), ["u", "u"]):
        advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
        assert advantages.tolist() == [[0.5], [-0.5]]
    large = torch.tensor([[2.0**24] + [0.5] * 100, [2.0**24] + [0.0] * 100])  # 2^24 + 0.5 is no float32
    advantages, _ = compute_grpo_outcome_advantage(large, torch.ones(2, 101), index, norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [25, -25]
    assert zero_variance_rows(torch.zeros(0, 1), torch.zeros(0, 1), []).shape == (0,)
    with pytest.raises(ValueError, match="one group id for each of the 2 rows"):
        compute_grpo_outcome_advantage(rewards, mask, ["u"])
    with pytest.raises(InputError, match="raw, zero"):
        compute_grpo_outcome_advantage(rewards, mask, index, singleton="drop")


OF_SCORES = ["grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "grpo_leave_one_out", "grpo_batch_std", "maxrl", "gpg"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([[0.1, 0.2, 0.0], [0.3, 0.0, 0.0]], True),
        ([[0.7, 0.1, 0.1], [0.9, 0.0, 0.0]], True),
        ([[0.1, 0.1, 0.1], [0.1, 0.2, 0.0]], True),
        ([[10.1, -10.0, 0.0], [0.1, 0.0, 0.0]], True),  # by the rounding of 10.1
        ([[1.0, 0.0, 0.0], [1.00001, 0.0, 0.0]], False),
        ([[0.0, 0.0, 0.0], [1e-9, 0.0, 0.0]], False),
    ],
)
def test_scores_are_equal_but_for_rounding(rewards, equal, scale, dtype):
    """A difference that is the rounding of the terms is no signal: the estimators give such rows exactly 0."""
    rewards = torch.tensor([*rewards, [2.0, 0.0, 0.0]], dtype=dtype) * scale
    mask, index = torch.ones(3, 3), [0, 0, 1]
    assert zero_variance_rows(rewards, mask, index).tolist() == [equal, equal, False]
    if equal and (rewards >= 0).all():  # of scores that cancel, group_mean does not know the terms
        for name in OF_SCORES:
            advantages, _ = get_adv_estimator_fn(name)(rewards, mask, index)
            assert (advantages[:2] == 0).all(), name


def test_zero_variance_of_reward_components_is_not_that_of_their_sum():
    """Group 0 differs in both rewards and not in their sum, group 1 only in the sum of what else there is."""
    sums, mask = torch.tensor([[1.0], [1.0], [2.0], [3.0], [9.0]]), torch.tensor([[1], [1], [1], [1], [0]])
    components = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [2.0, 2.0], [5.0, 5.0]])  # the last row is dead
    index = [0, 0, 1, 1, 1]
    assert zero_variance_rows(sums, mask, index, components).tolist() == [False, False, True, True, False]
    assert zero_variance_rows(sums, mask, index).tolist() == [True, True, False, False, False]
    nan = math.nan  # a reward that the scorer did not give: group 1 differs in none, 2 in one, 3 has none, 4 one alone
    components = [[nan, 1], [nan, 1], [1, nan], [0, 2], [nan, nan], [nan, nan], [3, nan], [nan, nan]]
    index = [1, 1, 2, 2, 3, 3, 4, 4]
    rows = zero_variance_rows(torch.zeros(8, 1), torch.ones(8, 1), index, torch.tensor(components))
    assert rows.tolist() == [True, True, False, False, True, True, False, False]


def test_an_overlong_buffer_is_a_part_of_the_response():
    for wrong in (0, 7):
        with pytest.raises(InputError, match=r"1\.\.max_response_length = 6"):
            compute_overlong_penalty(torch.ones(1, 6), 6, wrong, 1.0)


# ------------------------------------------------------------------------- policy loss and aggregation
def counts(mask):
    return {"global_tokens": int(mask.sum()), "global_rows": int(mask.any(-1).sum())}


def slow_weights(mask, mode):
    """The weight of every token's loss in the loss of the mini-batch."""
    args = SimpleNamespace(loss_agg_mode=mode, loss_scale_factor=SCALE)
    of_rows = [token_weight(args, max(n, 1), *counts(mask).values()) for n in mask.sum(1).tolist()]
    return torch.tensor(of_rows, dtype=torch.float64)[:, None] * mask


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@for_all(seed=seeds)
def test_a_loss_is_the_weighted_sum_of_its_tokens(mode, seed):
    losses, _, _, mask = random_batch(seed)
    expected = (losses * slow_weights(mask, mode)).sum()
    for total in ({}, {key: torch.tensor(n) for key, n in counts(mask).items()}):
        close(agg_loss(poison(losses, mask, seed), mask, mode, loss_scale_factor=SCALE, **total), expected)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_nothing_valid_is_an_exact_zero_with_gradient(mode):
    for total in ({"global_tokens": 50, "global_rows": 4}, {"global_tokens": 0, "global_rows": 0}, {}):
        leaf = torch.full((2, 3), math.nan, requires_grad=True)
        losses, _ = compute_policy_loss(leaf.detach(), leaf, leaf.detach(), torch.zeros(2, 3))
        loss = agg_loss(losses, torch.zeros(2, 3), mode, loss_scale_factor=SCALE, **total)
        loss.backward()
        assert loss.item() == 0 and (leaf.grad == 0).all()


def test_agg_loss_bad_input():
    ones = torch.ones(2, 3)
    with pytest.raises(InputError, match="choose one of token-mean, token-sum, seq-mean-token-sum"):
        agg_loss(ones, ones, "mean")
    for factor in (None, 0, -1.0, math.nan):
        with pytest.raises(InputError, match="loss_scale_factor"):
            agg_loss(ones, ones, "seq-mean-token-sum-norm", loss_scale_factor=factor)
    with pytest.raises(ValueError, match="both"):
        agg_loss(ones, ones, "token-mean", global_tokens=6)
    with pytest.raises(ValueError, match="same shape"):
        agg_loss(ones, torch.ones(2, 1), "token-mean")


ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@for_all(seed=seeds)
@pytest.mark.parametrize("suffix", ["", "+", "_unbiased"])
@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", *ALIASES])
def test_kl_penalty_and_its_gradient_equal_the_formula(name, suffix, seed):
    """With garbage in the masked positions; without a mask; and without old log-probs, on policy."""
    old, logprob, _, mask = random_batch(seed)
    leaf, ref = logprob.clone().requires_grad_(), old - 0.3
    off_policy, on_policy = (kl_estimate(ALIASES.get(name, name) + suffix, leaf, ref, x) for x in (old, leaf))
    dirty = [poison(x, mask, seed + k) for k, x in enumerate((leaf, ref, old))]
    for found, expected, m in (
        (kl_penalty(*dirty[:2], name + suffix, mask, dirty[2]), off_policy, mask),
        (kl_penalty(leaf, ref, name + suffix, None, old), off_policy, torch.ones_like(mask)),
        (kl_penalty(leaf, ref, name + suffix), on_policy, torch.ones_like(mask)),
    ):
        close(found, expected * m)
        close(*(torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (found, expected * m)))


def test_kl_penalty_edges():
    for name in ("full", "k3++", "k3+_unbiased", "k3_unbiased+", "_unbiased"):
        with pytest.raises(InputError, match=r"low_var_kl.*with \+ or _unbiased"):
            kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name)
    assert kl_penalty(torch.tensor([[-90.0]]), torch.tensor([[0.0]]), "k3").item() == 10
    # float32 near d = 0, where e^x − 1 − x is noise: d²/2 to a few digits
    d = torch.tensor([[1e-4, -1e-4, 1e-5]])
    torch.testing.assert_close(kl_penalty(d, torch.zeros(1, 3), "k3"), d.square() / 2, rtol=0.02, atol=0)
