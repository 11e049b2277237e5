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

GARBAGE = [math.nan, 1e9, -1e9, math.inf, -math.inf]
LOW, HIGH, DUAL = 0.2, 0.28, 3.0
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


def slow_grpo(rewards, mask, index, norm=True, singleton="raw", epsilon=1e-6):
    rows = len(rewards)
    scores = {
        i: math.fsum(r for r, m in zip(rewards[i].tolist(), mask[i].tolist()) if m)
        for i in range(rows)
        if mask[i].any()
    }
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    for i, score in scores.items():
        group = [s for j, s in scores.items() if index[j] == index[i]]
        if len(group) == 1:
            value = 0.0 if singleton == "zero" else score / (1 + epsilon) if norm else score
        else:
            value = score - statistics.mean(group)
            if norm:
                value /= statistics.stdev(group) + epsilon
        advantages[i] = value * mask[i].double()
    return advantages


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


@for_all(seed=seeds)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("singleton", ["raw", "zero"])
def test_grpo_equals_the_loop(seed, norm, singleton):
    rewards, mask, index = random_outcomes(seed, torch.float64)
    expected = slow_grpo(rewards, mask, index, norm, singleton)
    advantages, returns = compute_grpo_outcome_advantage(
        poison(rewards, mask, seed), mask, index, norm_adv_by_std_in_grpo=norm, singleton=singleton
    )
    torch.testing.assert_close(advantages, expected, rtol=1e-8, atol=1e-12)
    assert bits_equal(advantages, returns)
    assert not advantages.isnan().any() and (advantages[mask == 0] == 0).all()


@for_all(seed=seeds)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grpo_dead_rows_and_row_order_change_no_bit(seed, dtype):
    rewards, mask, index = random_outcomes(seed, dtype)
    rng = random.Random(seed)
    expected, _ = compute_grpo_outcome_advantage(rewards, mask, index)

    dead = rng.randint(1, 5)
    order = torch.tensor(rng.sample(range(len(index) + dead), len(index) + dead))
    more_rewards = torch.cat([rewards, garbage((dead, rewards.shape[1]), seed).to(dtype)])[order]
    more_mask = torch.cat([mask, torch.zeros(dead, mask.shape[1], dtype=mask.dtype)])[order]
    more_index = [(list(index) + rng.choices(list(index), k=dead))[i] for i in order]
    advantages, _ = compute_grpo_outcome_advantage(more_rewards, more_mask, more_index)
    back = order.argsort()
    assert bits_equal(advantages[back][: len(index)], expected)
    assert (advantages[back][len(index) :] == 0).all()


@for_all(seed=seeds, group_size=st.integers(2, 9), reward=st.floats(-100, 100))
def test_grpo_equal_rewards_give_exactly_zero(seed, group_size, reward):
    g = torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.float64):
        rewards = torch.zeros(group_size + 1, 3, dtype=dtype)
        rewards[:, 1] = reward
        rewards[-1, 1] = torch.randn((), generator=g, dtype=dtype)  # another group
        advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(rewards.shape), [0] * group_size + [1])
        assert (advantages[:-1] == 0).all()


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


def slow_policy_loss(old, new, advantage, low=LOW, high=HIGH, dual=DUAL):
    """One token, case by case -> loss, d loss / d new, clipped by PPO, clipped by the dual clip."""
    log_ratio = min(max(new - old, -20.0), 20.0)
    ratio = math.exp(log_ratio)
    slope = -advantage * ratio if abs(new - old) < 20 else 0.0
    if advantage >= 0:
        if ratio > 1 + high:
            return -advantage * (1 + high), 0.0, advantage > 0, False
        return -advantage * ratio, slope, False, False
    if ratio < 1 - low:
        return -advantage * (1 - low), 0.0, True, False
    if ratio > dual:
        return -advantage * dual, 0.0, False, True
    return -advantage * ratio, slope, False, False


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


def slow_loss(old, new, advantages, mask, mode):
    """-> loss, its gradient (B, T), the per-token losses (B, T)"""
    losses, slopes = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[i, t]:
                losses[i, t], slopes[i, t], *_ = slow_policy_loss(*(x[i, t].item() for x in (old, new, advantages)))
    weights = slow_weights(mask, mode)
    return (losses * weights).sum(), slopes * weights, losses


def counts(mask):
    return {"global_tokens": int(mask.sum()), "global_rows": int(mask.any(-1).sum())}


def fast_loss(old, new, advantages, mask, mode, **global_counts):
    losses, _ = compute_policy_loss(
        old, new, advantages, mask, cliprange_low=LOW, cliprange_high=HIGH, clip_ratio_c=DUAL
    )
    return agg_loss(losses, mask, mode, loss_scale_factor=SCALE, **global_counts)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


@for_all(seed=seeds)
def test_policy_loss_per_token_equals_the_loop(seed):
    old, new, advantages, mask = random_batch(seed)
    losses, metrics = compute_policy_loss(old, new, advantages, mask, cliprange_low=LOW, cliprange_high=HIGH)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            loss, _, clipped, dual_clipped = slow_policy_loss(*(x[i, t].item() for x in (old, new, advantages)))
            kl = min(max((old - new)[i, t].item(), -20), 20)
            expected = [loss, float(clipped), float(dual_clipped), kl] if mask[i, t] else [0] * 4
            names = ["actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"]
            assert [losses[i, t].item(), *(metrics[n][i, t].item() for n in names)] == pytest.approx(
                expected, rel=1e-12
            )


@for_all(seed=seeds)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_loss_and_gradient_equal_the_loop(mode, seed):
    old, new, advantages, mask = random_batch(seed)
    loss, gradient, _ = slow_loss(old, new, advantages, mask, mode)
    for global_counts in ({}, counts(mask), {k: torch.tensor(v) for k, v in counts(mask).items()}):
        leaf = new.clone().requires_grad_()
        value = fast_loss(old, leaf, advantages, mask, mode, **global_counts)
        value.backward()
        close(value.detach(), loss)
        close(leaf.grad, gradient)


@for_all(6, seed=seeds)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_loss_does_not_depend_on_layout(mode, seed):
    """Ranks, micro-batches, row order, right padding (another width each time), masked garbage: all at once."""
    old, new, advantages, mask = random_batch(seed, rows=7)
    loss, gradient, _ = slow_loss(old, new, advantages, mask, mode)
    rng = random.Random(seed)
    order = rng.sample(range(7), 7)
    layouts = {
        "whole": [[list(range(7))]],
        "permuted": [[order]],
        "single rows": [[[i] for i in range(7)]],
        "uneven": [[order[:1], order[1:3], order[3:]]],
        "two ranks": [[order[0::2]], [order[1::2]]],
        "two ranks, uneven": [[order[:2], order[2:6]], [order[6:]]],
    }
    for name, ranks in layouts.items():
        leaf = new.clone().requires_grad_()
        rank_losses = []
        for micro_batches in ranks:
            rank_loss = torch.zeros((), dtype=torch.float64)
            for rows in micro_batches:
                pad = rng.randint(0, 3)
                part_mask = torch.nn.functional.pad(mask[rows], (0, pad))
                part = [torch.nn.functional.pad(x[rows], (0, pad)) for x in (old, leaf, advantages)]
                part = [poison(x, part_mask, seed + k) for k, x in enumerate(part)]
                rank_loss = rank_loss + fast_loss(*part, part_mask, mode, **counts(mask))
            rank_losses.append(rank_loss)
        # FSDP averages gradients over ranks, the script multiplies by world_size
        value = torch.stack([len(ranks) * x for x in rank_losses]).mean()
        value.backward()
        torch.testing.assert_close(value.detach(), loss, rtol=1e-8, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-8, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@for_all(8, seed=seeds)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_garbage_in_masked_positions_changes_no_bit(mode, seed):
    """In the leaves themselves, policy loss and KL together: the backward pass must not meet the garbage either."""
    old, new, advantages, mask = random_batch(seed)
    results = []
    for inputs in ((old, new, advantages), [poison(x, mask, seed + k) for k, x in enumerate((old, new, advantages))]):
        leaf = inputs[1].clone().requires_grad_()
        ref = inputs[0] - 0.1
        loss = fast_loss(inputs[0], leaf, inputs[2], mask, mode)
        for name in ("k1", "abs", "k2", "k3", "k1+", "k3+", "k1_unbiased", "k3_unbiased"):
            loss = loss + 0.1 * agg_loss(
                kl_penalty(leaf, ref, name, mask, inputs[0]), mask, mode, loss_scale_factor=SCALE
            )
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    assert bits_equal(results[0][0], results[1][0])
    assert bits_equal(results[0][1], results[1][1])
    assert (results[1][1][mask == 0] == 0).all()


@for_all(seed=seeds)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_dead_rows_do_not_change_the_loss(mode, seed):
    old, new, advantages, mask = random_batch(seed)
    dead = torch.zeros(3, mask.shape[1], dtype=mask.dtype)
    more = [torch.cat([x, garbage(dead.shape, seed)]) for x in (old, new, advantages)]
    close(fast_loss(*more, torch.cat([mask, dead]), mode), fast_loss(old, new, advantages, mask, mode))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("total", [{"global_tokens": 50, "global_rows": 4}, {"global_tokens": 0, "global_rows": 0}, {}])
def test_nothing_valid_is_an_exact_zero_with_gradient(mode, total):
    leaf = torch.full((2, 3), math.nan, requires_grad=True)
    loss = fast_loss(leaf.detach(), leaf, leaf.detach(), torch.zeros(2, 3), mode, **total)
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


def test_policy_loss_on_policy_gradient_is_the_advantage():
    """At ρ = 1, even with old_log_prob the very same tensor: d loss / d log_prob = −A. The rest is constant."""
    log_prob, advantages = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    losses, metrics = compute_policy_loss(log_prob, log_prob, advantages, torch.ones(2, 3))
    losses.sum().backward()
    torch.testing.assert_close(log_prob.grad, -advantages.detach())
    assert advantages.grad is None
    assert not any(m.requires_grad for m in metrics.values())


@for_all(5, seed=seeds)
def test_policy_loss_finite_differences(seed):
    old, new, advantages, mask = random_batch(seed, rows=2, width=4)
    ratio = (new - old).exp()
    for kink in (1 - LOW, 1 + HIGH, DUAL, math.exp(20), math.exp(-20)):
        new = torch.where((ratio / kink - 1).abs() < 1e-3, new + 0.01, new)
    new = torch.where((new - old).abs() > 3, old, new)  # e^20 drowns the differences of the others
    for mode in LOSS_AGG_MODES:
        assert torch.autograd.gradcheck(
            lambda x, mode=mode: fast_loss(old, x, advantages, mask, mode), new.requires_grad_()
        )


# -------------------------------------------------------------------------------------- KL and entropy


def slow_kl(logprob, ref, name):
    d = logprob - ref
    x = min(max(-d, -20.0), 20.0)
    k3 = min(math.exp(x) - 1 - x, 10.0)
    return {"kl": d, "k1": d, "abs": abs(d), "mse": d * d / 2, "k2": d * d / 2, "low_var_kl": k3, "k3": k3}[name]


@for_all(seed=seeds)
@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_kl_penalty_equals_the_loop(name, plus, seed):
    ref, logprob, _, mask = random_batch(seed)
    for values, m in (
        (kl_penalty(logprob, ref, name + plus), None),
        (kl_penalty(logprob, ref, name + plus, mask), mask),
    ):
        for i in range(mask.shape[0]):
            for t in range(mask.shape[1]):
                expected = slow_kl(logprob[i, t].item(), ref[i, t].item(), name) if m is None or m[i, t] else 0
                assert values[i, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@for_all(seed=seeds)
@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_unbiased_kl_equals_the_loop_with_its_gradient(name, seed):
    """ρ·k; its gradient by the product rule, with k's slope as finite differences off the kinks."""
    old, logprob, _, mask = random_batch(seed)
    ref = old - 0.3
    leaf = logprob.clone().requires_grad_()
    dirty = [poison(x, mask, seed + k) for k, x in enumerate((leaf, ref, old))]
    values = kl_penalty(dirty[0], dirty[1], f"{name}_unbiased", mask, dirty[2])
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    on_policy = kl_penalty(logprob, ref, f"{name}_unbiased", mask)
    close(on_policy, kl_penalty(logprob, ref, name, mask))  # ρ is 1
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            new, o, r = (x[i, t].item() for x in (logprob, old, ref))
            if not mask[i, t]:
                assert values[i, t] == 0 and gradient[i, t] == 0
                continue
            rho = math.exp(min(max(new - o, -20.0), 20.0))
            assert values[i, t].item() == pytest.approx(rho * slow_kl(new, r, name), rel=1e-9, abs=1e-12)
            kinks = (0.0, 20.0, -20.0, -2.611)  # k3 reaches 10 at d = -2.611; abs has one at 0
            if min(abs(new - r - kink) for kink in kinks) < 1e-3 or abs(abs(new - o) - 20) < 1e-3:
                continue
            slope = (slow_kl(new + 1e-6, r, name) - slow_kl(new - 1e-6, r, name)) / 2e-6
            expected = rho * (slope + slow_kl(new, r, name) * (abs(new - o) < 20))
            assert gradient[i, t].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_kl_penalty_edges():
    for name in ("full", "k3++", "k3+_unbiased", "k3_unbiased+", "_unbiased"):
        with pytest.raises(InputError, match=r"low_var_kl.*with \+ or _unbiased"):
            kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name)
    assert kl_penalty(torch.tensor([[-90.0]]), torch.tensor([[0.0]]), "k3").item() == 10
    # float32 near d = 0, where e^x − 1 − x is noise: d²/2 to a few digits
    d = torch.tensor([[1e-4, -1e-4, 1e-5]])
    torch.testing.assert_close(kl_penalty(d, torch.zeros(1, 3), "k3"), d.square() / 2, rtol=0.02, atol=0)


@for_all(seed=seeds)
@pytest.mark.parametrize("name", ["k1+", "k3+", "low_var_kl+"])
def test_straight_through_has_the_gradient_of_k2(name, seed):
    """Its finite differences are those of k2, also where the value is clamped."""
    ref, logprob, _, mask = random_batch(seed, rows=3, width=4)
    leaf = logprob.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(kl_penalty(leaf, ref, name, mask).sum(), leaf)
    step = 1e-6
    for i in range(3):
        for t in range(4):
            up, down = (slow_kl(logprob[i, t].item() + s, ref[i, t].item(), "k2") for s in (step, -step))
            expected = (up - down) / (2 * step) if mask[i, t] else 0
            assert gradient[i, t].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


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
