"""Every kernel against a slow loop in Python floats, and the properties that the loss of a mini-batch must have.

The references are written another way than the kernels (case by case, gradients by hand): no slip is made twice.
"""

import math
import random
import statistics
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import InputError
from lib.core_algos import (
    LOSS_AGG_MODES,
    LossMasks,
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
from tests.reference_formulas import kl_estimate

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


@for_all(seed=seeds)
@pytest.mark.parametrize("kernel", [masked_sum, masked_mean, masked_var, lambda v, m: masked_whiten(v, m)[0, 0] ** 2])
def test_masked_positions_have_no_gradient(kernel, seed):
    values, _, _, mask = random_batch(seed)
    mask[0, 0] = mask[1, 0] = 1
    clean, dirty = values.clone().requires_grad_(), poison(values, mask, seed).requires_grad_()
    kernel(clean, mask).backward()
    kernel(dirty, mask).backward()
    assert bits_equal(clean.grad, dirty.grad)
    assert (dirty.grad[mask == 0] == 0).all()


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


def random_outcomes(seed, dtype=torch.float32):
    """Rewards on the last valid token or spread out, 1 to 4 rows a group, some rows dead, ids strings or ints."""
    g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    ids = [str(uuid.UUID(int=rng.getrandbits(128))) if seed % 2 else rng.getrandbits(30) for _ in sizes]
    index = [uid for uid, size in zip(ids, sizes) for _ in range(size)]
    rng.shuffle(index)
    mask = random_mask(g, len(index), rng.randint(1, 6))
    rewards = torch.randn(mask.shape, generator=g, dtype=dtype)
    if rng.random() < 0.5:
        rewards = (rewards > 0).to(dtype)
    return rewards, mask, np.array(index, dtype=object) if rng.random() < 0.5 else index


def test_grpo_worked_example():
    """Two groups, one of a single row, by hand."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    index = ["a", "a", "a", "b"]
    std = math.sqrt(1 / 3)  # of 1, 0, 1, with N − 1
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    expected = [[1 / 3 / std] * 2, [-2 / 3 / std] * 2, [1 / 3 / std] * 2, [3.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-5, atol=0)
    dr_grpo, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False, singleton="zero")
    torch.testing.assert_close(dr_grpo, torch.tensor([[1 / 3] * 2, [-2 / 3] * 2, [1 / 3] * 2, [0.0, 0.0]]))
    mask[1] = 0  # the survivors' rewards are equal
    assert (compute_grpo_outcome_advantage(rewards, mask, index)[0][:3] == 0).all()


def test_grpo_inputs():
    rewards, mask = torch.tensor([[1], [0]]), torch.ones(2, 1)  # integer rewards must not truncate the advantages
    for index in (torch.tensor([5, 5]), np.array([5, 5]), ["u", "u"]):
        advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
        assert advantages.tolist() == [[0.5], [-0.5]]
    large = torch.tensor([[2.0**24] + [0.5] * 100, [2.0**24] + [0.0] * 100])  # 2^24 + 0.5 is no float32
    advantages, _ = compute_grpo_outcome_advantage(large, torch.ones(2, 101), index, norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [25, -25]
    assert compute_grpo_outcome_advantage(rewards, torch.zeros(2, 1), index)[0].tolist() == [[0], [0]]
    assert compute_grpo_outcome_advantage(torch.zeros(0, 3), torch.zeros(0, 3), [])[0].shape == (0, 3)
    with pytest.raises(ValueError, match="one group id for each of the 2 rows"):
        compute_grpo_outcome_advantage(rewards, mask, ["u"])
    with pytest.raises(InputError, match="raw, zero"):
        compute_grpo_outcome_advantage(rewards, mask, index, singleton="drop")


@for_all(seed=seeds)
def test_zero_variance_rows_equal_the_loop(seed):
    rewards, mask, index = random_outcomes(seed, torch.float64)
    rewards = (rewards > 0.5).double() * 0.3  # many equal groups
    scores = {i: math.fsum(r for r, m in zip(rewards[i].tolist(), mask[i].tolist()) if m) for i in range(len(mask))}
    live = [i for i in scores if mask[i].any()]
    expected = []
    for i in scores:
        mates = [scores[j] for j in live if index[j] == index[i]]
        expected.append(i in live and len(mates) > 1 and max(mates) - min(mates) < 0.1)  # scores are multiples of 0.3
    rows = zero_variance_rows(poison(rewards, mask, seed), mask, index)
    assert rows.dtype == torch.bool and rows.tolist() == expected
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    assert (advantages[rows] == 0).all()


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
        for name in ("grpo", "dr_grpo", "rloo", "grpo_passk", "grpo_leave_one_out", "grpo_batch_std", "maxrl", "gpg"):
            advantages, _ = get_adv_estimator_fn(name)(rewards, mask, index)
            assert (advantages[:2] == 0).all(), name


def test_zero_variance_of_no_rows():
    assert zero_variance_rows(torch.zeros(0, 1), torch.zeros(0, 1), []).shape == (0,)


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


@for_all(seed=seeds, buffer=st.integers(1, 6), factor=st.floats(0, 3))
def test_overlong_penalty_equals_the_loop(seed, buffer, factor):
    *_, mask = random_batch(seed, width=6)
    penalty = compute_overlong_penalty(mask, 6, buffer, factor)
    for row, valid in zip(penalty.tolist(), mask.tolist()):
        length = max((t + 1 for t, m in enumerate(valid) if m), default=0)
        expected = [0.0] * 6
        if length > 6 - buffer:
            expected[length - 1] = -(length - (6 - buffer)) / buffer * factor
        assert row == pytest.approx(expected, rel=1e-6)


def test_overlong_penalty_by_hand():
    """At most 10 tokens, the last 4 of them in the buffer; tool output in the middle of the third row."""
    lengths = [6, 7, 10]
    mask = torch.tensor([[int(t < n) for t in range(10)] for n in lengths] + [[0] * 10])
    mask[2, 3:6] = 0
    penalty = compute_overlong_penalty(mask, 10, 4, 2.0)
    assert penalty.sum(1).tolist() == [0, -0.5, -2, 0] and penalty[1, 6] == -0.5 and penalty[2, 9] == -2
    for buffer in (0, -1, 11):
        with pytest.raises(InputError, match=r"1\.\.max_response_length = 10"):
            compute_overlong_penalty(mask, 10, buffer, 1.0)


# ------------------------------------------------------------------------- policy loss and aggregation


def slow_weights(mask, mode):
    """The weight of every token's loss in the loss of the mini-batch."""
    mask = mask.double()
    tokens, rows = mask.sum().item(), (mask.sum(1) > 0).sum().item()
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[i, t]:
                weights[i, t] = {
                    "token-mean": 1 / tokens,
                    "token-sum": 1,
                    "seq-mean-token-sum": 1 / rows,
                    "seq-mean-token-mean": 1 / rows / mask[i].sum().item(),
                    "seq-mean-token-sum-norm": 1 / rows / SCALE,
                }[mode]
    return weights


def counts(mask):
    return {"global_tokens": int(mask.sum()), "global_rows": int(mask.any(-1).sum())}


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("total", [{"global_tokens": 50, "global_rows": 4}, {"global_tokens": 0, "global_rows": 0}, {}])
def test_nothing_valid_is_an_exact_zero_with_gradient(mode, total):
    leaf = torch.full((2, 3), math.nan, requires_grad=True)
    losses, _ = compute_policy_loss(leaf.detach(), leaf, leaf.detach(), torch.zeros(2, 3))
    loss = agg_loss(losses, torch.zeros(2, 3), mode, loss_scale_factor=SCALE, **total)
    loss.backward()
    assert loss.item() == 0
    assert (leaf.grad == 0).all()


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


def test_policy_loss_by_hand():
    """ρ = 2 with A > 0 is clipped at 1.28, with A < 0 not; ρ = 4 with A < 0 stops at c = 3, and goes on without c."""
    ratio = torch.tensor([[2.0, 2.0, 4.0, 0.5]])
    advantages = torch.tensor([[1.0, -1.0, -1.0, -1.0]])
    args = (torch.zeros(1, 4), ratio.log(), advantages, torch.ones(1, 4))
    losses, metrics = compute_policy_loss(*args, cliprange_low=0.2, cliprange_high=0.28)
    torch.testing.assert_close(losses, torch.tensor([[-1.28, 2.0, 3.0, 0.8]]))
    assert metrics["actor/pg_clipfrac"].tolist() == [[1, 0, 0, 1]]
    assert metrics["actor/pg_clipfrac_lower"].tolist() == [[0, 0, 1, 0]]
    losses, metrics = compute_policy_loss(*args, clip_ratio_c=math.inf)
    torch.testing.assert_close(losses, torch.tensor([[-1.2, 2.0, 4.0, 0.8]]))
    assert metrics["actor/pg_clipfrac_lower"].tolist() == [[0, 0, 0, 0]]
    with pytest.raises(InputError, match="clip_ratio_c"):
        compute_policy_loss(*args, clip_ratio_c=1.0)


# -------------------------------------------------------------------------------------- KL and entropy


ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@for_all(seed=seeds)
@pytest.mark.parametrize("suffix", ["", "+", "_unbiased"])
@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", *ALIASES])
def test_kl_penalty_and_its_gradient_equal_the_formula(name, suffix, seed):
    """With garbage in the masked positions; and without a mask."""
    old, logprob, _, mask = random_batch(seed)
    leaf, ref = logprob.clone().requires_grad_(), old - 0.3
    expected = kl_estimate(ALIASES.get(name, name) + suffix, leaf, ref, old)
    dirty = [poison(x, mask, seed + k) for k, x in enumerate((leaf, ref, old))]
    for found, m in (
        (kl_penalty(*dirty[:2], name + suffix, mask, dirty[2]), mask),
        (kl_penalty(leaf, ref, name + suffix, None, old), torch.ones_like(mask)),
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


@for_all(seed=seeds, vocabulary=st.integers(2, 12))
def test_kl_estimators_by_exact_enumeration(seed, vocabulary):
    """The expectation over π of each estimator, and of its gradient, by summing over the whole vocabulary."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.rand(vocabulary, generator=g, dtype=torch.float64).requires_grad_()  # d < 2: nothing is clamped
    ref = torch.log_softmax(torch.rand(vocabulary, generator=g, dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    p = logp.detach().exp()  # the tokens are samples: their probabilities are not differentiated
    reverse = (logp.exp() * (logp - ref)).sum()
    forward = (ref.exp() * (ref - logp)).sum()

    def expected_gradient(name):
        return torch.autograd.grad((p * kl_penalty(logp[None], ref[None], name)[0]).sum(), logits, retain_graph=True)[0]

    for name in ("k1", "k3", "k1+", "k3+"):
        close((p * kl_penalty(logp[None], ref[None], name)[0]).sum().detach(), reverse.detach())
    (gradient,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (forward_gradient,) = torch.autograd.grad(forward, logits, retain_graph=True)
    for name in ("k2", "k1+", "k3+"):
        close(expected_gradient(name), gradient)
    # tokens of another policy: value and gradient by importance weighting, no others
    sampler = torch.log_softmax(torch.rand(vocabulary, generator=g, dtype=torch.float64), -1)
    for old, q in ((sampler, sampler.exp()), (None, p)):
        for name in ("k1_unbiased", "k3_unbiased"):
            estimate = (q * kl_penalty(logp[None], ref[None], name, None, None if old is None else old[None])[0]).sum()
            close(estimate.detach(), reverse.detach())
            close(torch.autograd.grad(estimate, logits, retain_graph=True)[0], gradient)
    # the documented trap
    close(expected_gradient("k1"), torch.zeros_like(gradient))
    close(expected_gradient("k3"), forward_gradient)
    assert not torch.allclose(expected_gradient("k3"), gradient, rtol=1e-6, atol=0)


# ---- masks ---------------------------------------------------------------------------------------


@for_all(60, seed=seeds, rows=st.integers(0, 6), width=st.integers(0, 5), drops=st.integers(0, 4))
def test_loss_masks_are_those_of_sets_of_tokens(seed, rows, width, drops):
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    response_mask = random_mask(generator, rows, width)
    loss = counted = valid = {(i, t) for i, t in response_mask.nonzero().tolist()}
    masks, dropped = LossMasks(response_mask), {"dead": rows - len({i for i, _ in loss})}
    for number in range(drops):
        what = torch.rand(rows, *[width] * rng.randint(0, 1), generator=generator) < 0.4  # tokens, or rows
        uncount, out_of_group = rng.random() < 0.5, rng.random() < 0.5
        masks.drop(what, str(number), uncount=uncount, out_of_group=out_of_group)
        gone = {(i, t) for i in range(rows) for t in range(width) if (what[i, t] if what.ndim == 2 else what[i])}
        before, loss = {i for i, _ in loss}, loss - gone
        rows_left = {i for i, _ in loss}
        dropped[str(number)] = len(before - rows_left)
        counted = counted - gone if uncount else counted
        valid = {token for token in valid if token[0] in rows_left} if out_of_group else valid
    assert masks.dropped == {f"training/rows_dropped/{reason}": n for reason, n in dropped.items()}
    for name, expected in {"loss_mask": loss, "denominator_mask": counted, "valid_mask": valid}.items():
        mask = masks.columns()[name]
        assert mask.dtype == torch.bool and {(i, t) for i, t in mask.nonzero().tolist()} == expected, name
