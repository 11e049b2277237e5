"""Every loss, mask and correction against a slow loop in Python floats, under every aggregation and every layout.

The references are written token by token or row by row, with gradients by hand: where a stop-gradient stands, finite
differences would not see it.
"""

import math
import random
from itertools import cycle, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import InputError
from lib.args.settings import RolloutCorrectionArgs
from lib.core_algos import (
    LOSS_AGG_MODES,
    agg_loss,
    compute_rollout_correction,
    token_masks,
)
from lib.core_algos import policy_losses as pl
from lib.core_algos.papers import losses as losses_of_papers
from lib.core_algos.policy_losses import compute_policy_loss
from lib.declared import CRITERIA, POLICY_LOSSES, TOKEN_MASKS
from tests.common import with_slow
from tests.core_algos.test_core_algos import (
    SCALE,
    bits_equal,
    close,
    counts,
    garbage,
    poison,
    random_batch,
    slow_weights,
)
from tests.reference_formulas import correction, splitmix64

LOW, HIGH = 0.2, 0.28
CLIP = {"cliprange_low": LOW, "cliprange_high": HIGH}
seeds = st.integers(0, 2**32 - 1)


def for_all(examples, **strategies):
    return lambda test: settings(max_examples=examples, derandomize=True)(given(**strategies)(test))


# ------------------------------------------------------- references: one token -> loss, d loss / d new


def ratio_of(old, new):
    return math.exp(min(max(new - old, -20.0), 20.0))


def slope_of(old, new):
    return ratio_of(old, new) if abs(new - old) < 20 else 0.0


def frozen(weight, new, advantage):
    return -weight * advantage * new, -weight * advantage


def slow_ppo(ratio, slope, advantage, low=LOW, high=HIGH, dual=math.inf):
    if advantage > 0 and ratio > 1 + high:
        return -advantage * (1 + high), 0.0
    if advantage < 0 and ratio < 1 - low:
        return -advantage * (1 - low), 0.0
    if advantage < 0 and ratio > dual:
        return -advantage * dual, 0.0
    return -advantage * ratio, -advantage * slope


def slow_sapo(old, new, advantage):
    tau = 0.7 if advantage > 0 else 1.3
    gate = 1 / (1 + math.exp(-tau * (ratio_of(old, new) - 1)))
    return -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * slope_of(old, new)


def slow_dppo_tv(old, new, advantage):
    gap = math.exp(new) - math.exp(old)
    if (advantage > 0 and gap > 0.1) or (advantage < 0 and gap < -0.15):
        return 0.0, 0.0
    return frozen(min(ratio_of(old, new), 2.0), new, advantage)


def slow_dppo_kl(old, new, advantage):
    p, q = math.exp(old), math.exp(new)
    if q < 1:
        kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    else:  # random_batch makes log-probs above 0 too; for them 1 − q is the smallest positive number there is at 1
        kl = p * (old - new) + (1 - p) * math.log((1 - p) / 2**-52)
    if (advantage > 0 and new > old and kl > 0.1) or (advantage < 0 and new < old and kl > 0.05):
        return 0.0, 0.0
    return frozen(min(ratio_of(old, new), 2.0), new, advantage)


def slow_two_sided(old, new, advantage):
    ratio, delta = ratio_of(old, new), 3.0
    value = -min(min(ratio, delta) * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
    moves = ratio < 1 + HIGH if advantage > 0 else 1 - LOW < ratio < delta
    return value, -advantage * slope_of(old, new) * moves


def slow_decoupled(old, new, advantage, rollout):
    value, slope = slow_ppo(ratio_of(old, new), slope_of(old, new), advantage)
    behave = min(ratio_of(rollout, old), 1.5)
    return behave * value, behave * slope


def slow_kl_cov(old, new, advantage, pick):
    sign = (new > old) - (new < old)
    return (
        -advantage * ratio_of(old, new) + 0.3 * abs(new - old) * pick,
        -advantage * slope_of(old, new) + 0.3 * sign * pick,
    )


def slow_gspo(old, new, advantages):
    mean = math.fsum(n - o for o, n in zip(old, new)) / len(old)
    s = math.exp(min(max(mean, -20), 20))
    return diagonal([slow_ppo(s, s * (abs(mean) < 20), a) for a in advantages])


def slow_geo_mean(old, new, advantages):
    bounded, moves = [], []
    for o, n, a in zip(old, new, advantages):
        d = min(max(n - o, -20.0), 20.0)
        bounded.append(min(d, 0.5) if a > 0 else max(d, -0.4) if a < 0 else 0.0)
        moves.append(bounded[-1] == d and a != 0 and abs(d) < 20)
    geo = math.exp(math.fsum(bounded) / len(bounded))
    jacobian = [[-a * geo * move / len(old) for move in moves] for a in advantages]
    return [-a * geo for a in advantages], jacobian


def diagonal(pairs):
    return [v for v, _ in pairs], [[s if t == j else 0.0 for j in range(len(pairs))] for t, (_, s) in enumerate(pairs)]


def tokenwise(slow):
    """A token's reference as a row's: -> losses, Jacobian d loss_t / d new_j."""
    return lambda *rows: diagonal([slow(*token) for token in zip(*rows)])


# name: (loss with keywords, names of the extra tensors, reference of a row of valid tokens)
CASES = {
    "gpg": (losses_of_papers.gpg, {}, (), tokenwise(lambda o, n, a: frozen(1, n, a))),
    "reinforce": (
        losses_of_papers.reinforce,
        {"ratio_high": 1.5},
        (),
        tokenwise(lambda o, n, a: frozen(min(ratio_of(o, n), 1.5), n, a)),
    ),
    "cispo": (
        losses_of_papers.cispo,
        CLIP,
        (),
        tokenwise(lambda o, n, a: frozen(min(max(ratio_of(o, n), 0.8), 1.28), n, a)),
    ),
    "gspo": (losses_of_papers.gspo, CLIP, (), slow_gspo),
    "geo_mean": (losses_of_papers.geo_mean, {"cliprange_high": 0.5}, (), slow_geo_mean),
    "sapo": (losses_of_papers.sapo, {"tau_pos": 0.7, "tau_neg": 1.3}, (), tokenwise(slow_sapo)),
    "dppo_tv": (
        losses_of_papers.dppo_tv,
        {"delta_low": 0.15, "delta_high": 0.1, "ratio_high": 2.0},
        (),
        tokenwise(slow_dppo_tv),
    ),
    "dppo_kl": (
        losses_of_papers.dppo_kl,
        {"delta_low": 0.05, "delta_high": 0.1, "ratio_high": 2.0},
        (),
        tokenwise(slow_dppo_kl),
    ),
    "dro": (
        losses_of_papers.dro,
        {"dro_beta": 0.3},
        (),
        tokenwise(lambda o, n, a: (-a * n + 0.15 * (n - o) ** 2, -a + 0.3 * (n - o))),
    ),
    "two_sided": (losses_of_papers.two_sided, CLIP | {"delta": 3.0}, (), tokenwise(slow_two_sided)),
    "decoupled": (losses_of_papers.decoupled, CLIP | {"cap": 1.5}, ("rollout_log_probs",), tokenwise(slow_decoupled)),
    "clip_cov": (
        losses_of_papers.clip_cov,
        CLIP,
        ("cov_keep",),
        tokenwise(lambda o, n, a, k: slow_ppo(ratio_of(o, n), slope_of(o, n), a) if k else (0.0, 0.0)),
    ),
    "kl_cov": (losses_of_papers.kl_cov, {"kl_coef": 0.3}, ("cov_pick",), tokenwise(slow_kl_cov)),
}
SMOOTH = ("gpg", "geo_mean", "sapo", "dro", "two_sided", "decoupled", "clip_cov", "kl_cov")  # without a stop-gradient


def make_extras(names, old, advantages, mask, seed):
    """The extra tensors of the whole mini-batch."""
    g = torch.Generator().manual_seed(seed)
    masks = {"cov_keep": {"cov_ratio": 0.3, "cov_bounds": (-0.5, 1.0)}, "cov_pick": {"cov_ratio": 0.3}}
    batch = {"old_log_probs": old, "advantages": advantages, "response_mask": mask, "group": torch.arange(len(mask))}
    extras = token_masks.compute_token_masks(masks, batch, seed)
    extras["rollout_log_probs"] = old + 0.5 * torch.randn(old.shape, generator=g, dtype=torch.float64)
    return {name: extras[name].double() for name in names}


def slow_loss(row_reference, old, new, advantages, extras, mask, mode):
    """-> loss, its gradient (B, T), the token losses (B, T)"""
    weights = slow_weights(mask, mode)
    losses, gradient = torch.zeros_like(new), torch.zeros_like(new)
    for i in range(len(mask)):
        at = [t for t in range(mask.shape[1]) if mask[i, t]]
        if not at:
            continue
        values, jacobian = row_reference(
            *([x[i, t].item() for t in at] for x in (old, new, advantages, *extras.values()))
        )
        for k, t in enumerate(at):
            losses[i, t] = values[k]
            for j, u in enumerate(at):
                gradient[i, u] += weights[i, t] * jacobian[k][j]
    return (losses * weights).sum(), gradient, losses


PAIRS = [*product(CASES, LOSS_AGG_MODES)]
EACH_ONCE = {*zip(CASES, cycle(LOSS_AGG_MODES)), *product(["gspo"], LOSS_AGG_MODES)}


@pytest.mark.parametrize(("name", "mode"), with_slow(PAIRS, *{*PAIRS} - EACH_ONCE))
@for_all(6, seed=seeds)
def test_loss_and_gradient_equal_the_loop_in_every_layout(name, mode, seed):
    """Micro-batches, ranks, row order, right padding (another width each time), masked garbage: all at once."""
    fast, keywords, extra_names, reference = CASES[name]
    old, new, advantages, mask = random_batch(seed, rows=6)
    extras = make_extras(extra_names, old, advantages, mask, seed)
    loss, gradient, token_losses = slow_loss(reference, old, new, advantages, extras, mask, mode)
    losses, metrics = fast(old, new, advantages, mask, **keywords, **extras)
    torch.testing.assert_close(losses, token_losses, rtol=1e-10, atol=1e-12)
    assert all(m.shape == mask.shape and not m.requires_grad and (m[mask == 0] == 0).all() for m in metrics.values())

    rng = random.Random(seed)
    order = rng.sample(range(6), 6)
    layouts = {
        "whole": [list(range(6))],
        "permuted": [order],
        "two": [order[:3], order[3:]],
        "uneven": [order[:1], order[1:3], order[3:]],
    }
    for layout, micro_batches in layouts.items():
        leaf, total = new.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
        for rows in micro_batches:
            pad = rng.randint(0, 3)
            part_mask = torch.nn.functional.pad(mask[rows], (0, pad))
            parts = [torch.nn.functional.pad(x[rows], (0, pad)) for x in (old, leaf, advantages, *extras.values())]
            parts = [poison(x, part_mask, seed + k) for k, x in enumerate(parts)]
            losses, _ = fast(*parts[:3], part_mask, **keywords, **dict(zip(extra_names, parts[3:])))
            total = total + agg_loss(losses, part_mask, mode, loss_scale_factor=SCALE, **counts(mask))
        total.backward()
        torch.testing.assert_close(total.detach(), loss, rtol=1e-8, atol=1e-11, msg=lambda m, at=layout: f"{at}: {m}")
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-8, atol=1e-11, msg=lambda m, at=layout: f"{at}: {m}")
        assert (leaf.grad[mask == 0] == 0).all()


@pytest.mark.parametrize("name", CASES)
@for_all(10, seed=seeds)
def test_garbage_in_masked_positions_and_dead_rows_change_no_bit(name, seed):
    fast, keywords, extra_names, _ = CASES[name]
    old, new, advantages, mask = random_batch(seed)
    extras = make_extras(extra_names, old, advantages, mask, seed)
    inputs = [old, new, advantages, *extras.values()]
    dead = [x.new_zeros(2, x.shape[1]) for x in inputs]
    clean = [torch.cat(parts) for parts in zip(inputs, dead)]
    dirty = [torch.cat([poison(x, mask, seed + k), garbage((2, x.shape[1]), k)]) for k, x in enumerate(inputs)]
    longer = torch.cat([mask, torch.zeros_like(mask[:1]).expand(2, -1)])
    results = []
    for tensors, m in ((clean, longer), (dirty, longer), (inputs, mask)):
        leaf = tensors[1].clone().requires_grad_()
        losses, _ = fast(tensors[0], leaf, tensors[2], m, **keywords, **dict(zip(extra_names, tensors[3:])))
        losses.sum().backward()
        results.append((losses.detach()[: len(mask)], leaf.grad[: len(mask)], leaf.grad[len(mask) :]))
    assert bits_equal(results[0][0], results[1][0]) and bits_equal(results[0][1], results[1][1])
    for longer_one, shorter in zip(results[0][:2], results[2][:2]):  # torch's sigmoid rounds the last of a tensor
        torch.testing.assert_close(longer_one, shorter, rtol=1e-14, atol=1e-15)  # otherwise than those before
    assert (results[1][2] == 0).all()


@pytest.mark.parametrize("name", SMOOTH)
@for_all(10, seed=seeds)
def test_gradient_is_that_of_the_value(name, seed):
    """Where nothing is stopped. Log ratios keep away from the kinks at the clips, at the gates and at 0."""
    fast, keywords, extra_names, _ = CASES[name]
    old, _, advantages, mask = random_batch(seed, rows=3, width=4)
    rng = random.Random(seed)
    drawn = torch.tensor([[rng.choice([-0.7, -0.1, 0.1, 0.35, 0.7, 1.3]) for _ in range(4)] for _ in range(3)]).double()
    extras = make_extras(extra_names, old, advantages, mask, seed)
    new = old + drawn

    def loss(x):
        return agg_loss(fast(old, x, advantages, mask, **keywords, **extras)[0], mask, "seq-mean-token-mean")

    assert torch.autograd.gradcheck(loss, new.requires_grad_())


@for_all(30, seed=seeds)
def test_gspo_has_the_gradient_of_the_papers_sequence_loss(seed):
    """−min(s_i·A_i, clip(s_i)·A_i), mean over rows: finite differences in floats, one advantage a row."""
    old, new, advantages, mask = random_batch(seed, rows=3, width=4)
    new = old + (new - old).clamp(-1, 1)
    advantages = advantages[:, :1].expand(-1, 4).contiguous()

    def paper(x):
        total = 0.0
        for i in range(3):
            steps = [x[i][t] - old[i, t].item() for t in range(4) if mask[i, t]]
            if steps:
                s, a = math.exp(sum(steps) / len(steps)), advantages[i, 0].item()
                total -= min(s * a, min(max(s, 1 - LOW), 1 + HIGH) * a)
        return total / max(counts(mask)["global_rows"], 1)

    leaf = new.clone().requires_grad_()
    loss = agg_loss(losses_of_papers.gspo(old, leaf, advantages, mask, **CLIP)[0], mask, "seq-mean-token-mean")
    loss.backward()
    assert loss.item() == pytest.approx(paper(new.tolist()), rel=1e-9, abs=1e-12)
    for i, t in product(range(3), range(4)):
        up, down = new.tolist(), new.tolist()
        up[i][t] += 1e-6
        down[i][t] -= 1e-6
        assert leaf.grad[i, t].item() == pytest.approx((paper(up) - paper(down)) / 2e-6, rel=1e-5, abs=1e-8)


@for_all(30, seed=seeds)
def test_geo_mean_is_the_papers_loss(seed):
    """exp((1/n)·log of a product of ratios), each bounded to the power sgn(A); one advantage a row."""
    old, new, advantages, mask = random_batch(seed, rows=4)
    new = old + (new - old).clamp(-3, 3)
    advantages = advantages[:, :1].expand_as(new)
    total = 0.0
    for i in range(4):
        a, ratios = advantages[i, 0].item(), [ratio_of(o, n) for o, n, m in zip(old[i], new[i], mask[i]) if m]
        if ratios and a:
            sign = math.copysign(1, a)
            bounded = [min(r**sign, min(max(r, math.exp(-0.4)), math.exp(0.4)) ** sign) ** sign for r in ratios]
            total -= a * math.prod(bounded) ** (1 / len(ratios))
    loss = agg_loss(losses_of_papers.geo_mean(old, new, advantages, mask)[0], mask, "seq-mean-token-mean")
    assert loss.item() == pytest.approx(total / max(counts(mask)["global_rows"], 1), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
@for_all(10, seed=seeds)
def test_on_policy_every_gradient_is_that_of_vanilla(name, seed):
    """ρ = 1, one advantage a row: d Σ L / d log_prob = −A, even with old_log_prob the very same tensor."""
    fast, keywords, extra_names, _ = CASES[name]
    old, _, advantages, mask = random_batch(seed)
    advantages = advantages[:, :1].expand_as(old).contiguous()
    extras = {"rollout_log_probs": old, "cov_keep": torch.ones_like(old), "cov_pick": torch.ones_like(old)}
    gradients = []
    for loss, more in (
        (fast, keywords | {k: extras[k] for k in extra_names}),
        (compute_policy_loss, {}),
    ):
        leaf = old.clone().requires_grad_()
        loss(leaf, leaf, advantages, mask, **more)[0].sum().backward()
        gradients.append(leaf.grad)
    close(gradients[0], gradients[1])
    close(gradients[0], -advantages * mask)


@for_all(20, seed=seeds)
def test_losses_that_coincide(seed):
    old, new, advantages, mask = batch = random_batch(seed)
    close(losses_of_papers.two_sided(*batch, delta=3.0)[0], compute_policy_loss(*batch, clip_ratio_c=3.0)[0])
    close(losses_of_papers.reinforce(*batch, ratio_high=5.0)[0], losses_of_papers.cispo(*batch)[0])
    close(losses_of_papers.gpg(*batch)[0], losses_of_papers.reinforce(new, new, advantages, mask)[0])
    close(
        losses_of_papers.dppo_tv(*batch, delta_low=2, delta_high=1e12, ratio_high=5.0)[0],
        losses_of_papers.cispo(*batch)[0],
    )
    plain = compute_policy_loss(*batch, clip_ratio_c=math.inf)[0]
    close(losses_of_papers.decoupled(*batch, rollout_log_probs=old)[0], plain)
    close(losses_of_papers.clip_cov(*batch, cov_keep=torch.ones_like(mask))[0], plain)
    one = [x[:, :1] for x in batch]  # rows of one token: sequence and token are the same
    close(losses_of_papers.gspo(*one, **CLIP)[0], compute_policy_loss(*one, clip_ratio_c=math.inf, **CLIP)[0])


def test_default_bounds_by_hand():
    ratio, ones = torch.tensor([[0.5, 8.0, 2.0]]), torch.ones(1, 3)
    old = torch.full((1, 3), -3.0)
    batch = (old, old + ratio.log(), ones, ones)
    for loss, weights in ((losses_of_papers.cispo, [0.5, 5, 2]), (losses_of_papers.reinforce, [0.5, 2, 2])):
        torch.testing.assert_close(loss(*batch)[0], -torch.tensor([weights]) * batch[1])
        assert loss(*batch)[1]["actor/pg_clipfrac"].tolist() == [[0, 1, 0]]
    assert losses_of_papers.two_sided(*batch[:2], -ones, ones)[0][0].tolist() == pytest.approx([0.8, 4, 2])
    losses, metrics = losses_of_papers.gspo(*batch)  # s = 2
    assert losses.tolist() == [pytest.approx([-1.0004] * 3)] and metrics["actor/pg_clipfrac"].tolist() == [[1, 1, 1]]
    assert losses_of_papers.geo_mean(*batch)[1]["actor/pg_clipfrac"].tolist() == [[0, 1, 1]]
    tv, kl = losses_of_papers.dppo_tv(*batch), losses_of_papers.dppo_kl(*batch)  # π_old = 0.05: only 0.4 is far
    assert tv[1]["actor/pg_clipfrac"].tolist() == kl[1]["actor/pg_clipfrac"].tolist() == [[0, 1, 0]]
    sure = [torch.tensor([[x]]) for x in (-1e-3, 0.0, 1.0, 1.0)]  # π rounds to 1 in float32: not infinitely far
    assert losses_of_papers.dppo_kl(*sure)[1]["actor/pg_clipfrac"].item() == 0


def test_bad_input():
    x = torch.zeros(1, 2)
    for loss, keywords, *_ in CASES.values():
        with pytest.raises(TypeError, match="temperature"):
            loss(x, x, x, x, temperature=1.0, **keywords)
    with pytest.raises(TypeError, match="dro_beta"):
        losses_of_papers.dro(x, x, x, x)
    with pytest.raises(InputError, match="delta"):
        losses_of_papers.two_sided(x, x, x, x, delta=1.2)
    with pytest.raises(ValueError, match="row_ids"):
        token_masks.cov_keep(*[torch.zeros(2, 2)] * 3, row_ids=torch.tensor([3, 3]), seed=0)
    assert set(POLICY_LOSSES) - {"vanilla"} == set(CASES)  # that one: tests/core_algos/test_core_algos.py


# ----------------------------------------------------------------------- masks over the mini-batch


def slow_covariance(advantages, new, mask):
    at = mask.nonzero().tolist()
    means = [math.fsum(x[i, t].item() for i, t in at) / max(len(at), 1) for x in (advantages, new)]
    return {(i, t): (advantages[i, t].item() - means[0]) * (new[i, t].item() - means[1]) for i, t in at}


def slow_noise(seed, row, position):
    return splitmix64((row * 2**32 + position + seed * 0x9E3779B97F4A7C15) % 2**64)


def slow_clip_cov(old, advantages, mask, row_ids, seed):
    covariance = slow_covariance(advantages, old, mask)
    candidates = [(slow_noise(seed, int(row_ids[i]), t), i, t) for (i, t), c in covariance.items() if 0 < c < 0.8]
    cut = {(i, t) for _, i, t in sorted(candidates)[: max(math.floor(0.2 * len(covariance)), 1)]}
    return set(covariance) - cut


def slow_kl_cov_pick(new, advantages, mask):
    covariance = slow_covariance(advantages, new, mask)
    places = max(math.floor(0.2 * len(covariance)), 1)
    return {at for at, c in covariance.items() if sum(other >= c for other in covariance.values()) <= places}


def slow_top_entropy(entropys, mask):
    values = {(i, t): entropys[i, t].item() for i, t in mask.nonzero().tolist()}
    places = max(round(0.3 * len(values)), 1)
    return {at for at, h in values.items() if sum(other > h for other in values.values()) < places}


def slow_m2po(old, new, mask):
    moments = {(i, t): (new[i, t].item() - old[i, t].item()) ** 2 for i, t in mask.nonzero().tolist()}
    while moments and math.fsum(moments.values()) / len(moments) >= 0.3:
        top = max(moments.values())
        moments = {at: m for at, m in moments.items() if m < top}
    return set(moments)


def slow_opsm(old, new, advantages, mask):
    kept = set()
    for i in range(len(mask)):
        at = [t for t in range(mask.shape[1]) if mask[i, t]]
        drift = math.fsum((old - new)[i, t].item() for t in at) / max(len(at), 1)
        kept |= {(i, t) for t in at if not (advantages[i, t] < 0 and drift > 0.1)}
    return kept


@for_all(60, seed=seeds)
def test_masks_equal_the_loop_in_every_layout(seed):
    """Another row order, right padding and masked garbage give the same tokens."""
    old, new, advantages, mask = random_batch(seed)
    entropys = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)).mul(8).round()  # many ties
    row_ids = torch.tensor(random.Random(seed).sample(range(2**40), len(mask)))
    masks = {
        "cov_keep": (
            lambda o, n, a, e, m, ids: token_masks.cov_keep(
                n, a, m, row_ids=ids, seed=seed, cov_ratio=0.2, cov_bounds=(0, 0.8)
            ),
            slow_clip_cov(new, advantages, mask, row_ids, seed),
        ),
        "cov_pick": (
            lambda o, n, a, e, m, ids: token_masks.cov_pick(n, a, m, cov_ratio=0.2),
            slow_kl_cov_pick(new, advantages, mask),
        ),
        "top_entropy": (
            lambda o, n, a, e, m, ids: token_masks.top_entropy(e, m, fraction=0.3),
            slow_top_entropy(entropys, mask),
        ),
        "m2po": (lambda o, n, a, e, m, ids: token_masks.m2po(o, n, m, threshold=0.3), slow_m2po(old, new, mask)),
        "off_policy_sequence": (
            lambda o, n, a, e, m, ids: token_masks.off_policy_sequence(o, n, a, m, delta=0.1),
            slow_opsm(old, new, advantages, mask),
        ),
    }
    assert set(masks) == set(TOKEN_MASKS)
    order = random.Random(seed).sample(range(len(mask)), len(mask))
    pad = torch.nn.functional.pad
    moved_mask = pad(mask[order], (0, 2))
    moved = [
        poison(pad(x[order], (0, 2)).double(), moved_mask, k) for k, x in enumerate((old, new, advantages, entropys))
    ]
    for name, (compute, expected) in masks.items():
        kept = compute(old, new, advantages, entropys, mask, row_ids)
        assert kept.dtype == torch.bool and {tuple(at) for at in kept.nonzero().tolist()} == expected, name
        assert bits_equal(compute(*moved, moved_mask, row_ids[order]), pad(kept[order], (0, 2))), name

    chosen = {"top_entropy": {"fraction": 0.3}, "m2po": {"threshold": 0.3}, "off_policy_sequence": {"delta": 0.1}}
    tensors = {"rollout_log_probs": old, "old_log_probs": new, "advantages": advantages, "entropys": entropys}
    tensors |= {"response_mask": mask, "group": torch.arange(len(mask)) // 2}
    for names in ([], ["m2po"], ["top_entropy", "off_policy_sequence"], list(chosen)):
        found = token_masks.compute_token_masks({name: chosen[name] for name in names}, tensors, seed)
        assert list(found) == ["token_mask"][: len(names)]
        if names:
            together = set.intersection(*(masks[name][1] for name in names))
            assert {tuple(at) for at in found["token_mask"].nonzero().tolist()} == together
    cov = {"cov_pick": {"cov_ratio": 0.2}, "cov_keep": {"cov_ratio": 0.2, "cov_bounds": (0, 0.8)}}
    found = token_masks.compute_token_masks(cov, tensors, seed)
    assert {tuple(at) for at in found.pop("cov_pick").nonzero().tolist()} == masks["cov_pick"][1]
    expected = slow_clip_cov(new, advantages, mask, range(len(mask)), seed)
    assert {tuple(at) for at in found["cov_keep"].nonzero().tolist()} == expected and len(found) == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_token_mask_depends_on_which_rank_has_a_group(seed):
    """The rows of all ranks come rank by rank, and a rank has every second group, or others after balancing."""
    old, new, advantages, mask = random_batch(seed, rows=12, width=9)
    tensors = {"old_log_probs": new, "rollout_log_probs": old, "advantages": advantages, "entropys": old.abs()}
    tensors |= {"response_mask": mask, "group": torch.arange(12) // 2}
    settings = {"cov_keep": {"cov_ratio": 0.2, "cov_bounds": (-9, 9)}, "cov_pick": {"cov_ratio": 0.2}}
    settings["m2po"] = {"threshold": 0.3}
    whole = token_masks.compute_token_masks(settings, tensors, seed)
    groups = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    order = (2 * groups[:, None] + torch.arange(2)).flatten()
    moved = token_masks.compute_token_masks(settings, {name: x[order] for name, x in tensors.items()}, seed)
    assert all(bits_equal(moved[name], whole[name][order]) for name in whole)


def test_covariance_has_the_same_bits_in_any_row_order():
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        advantages, new = torch.randn(2, 50, 7, generator=g, dtype=torch.float64)
        order, ones = torch.randperm(50, generator=g), torch.ones(50, 7)
        covariance = token_masks._covariance(advantages, new, ones)
        assert bits_equal(token_masks._covariance(advantages[order], new[order], ones), covariance[order])


def test_clip_cov_draws_another_token_for_another_seed():
    """Evenly: of 50 candidates one each time, in 2000 seeds; 40 on average, standard deviation 6."""
    g = torch.Generator().manual_seed(0)
    advantages, ones = torch.randn(10, 20, generator=g).double(), torch.ones(10, 20)
    new = advantages.clone() - 5  # covariance = (A − mean)² >= 0
    drawn = torch.zeros(10, 20)
    for seed in range(2000):
        drawn += ~token_masks.cov_keep(
            new, advantages, ones, row_ids=torch.arange(10), seed=seed, cov_ratio=1e-9, cov_bounds=(1, 99)
        )
    candidates = (advantages - advantages.mean()).square() > 1
    expected = 2000 / candidates.sum()
    assert drawn.sum() == 2000 and (drawn[~candidates] == 0).all()
    assert (drawn[candidates] - expected).abs().max() < 5 * expected.sqrt()


def test_masks_of_nothing_and_ties():
    none, zeros, ones = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3)
    assert not token_masks.cov_keep(zeros, zeros, none, row_ids=torch.arange(2), seed=1).any()
    assert not token_masks.cov_pick(zeros, zeros, none).any()
    assert not token_masks.top_entropy(zeros, none).any()
    assert not token_masks.m2po(zeros, zeros, none).any()
    assert not token_masks.cov_pick(-ones, zeros, ones).any()  # all covariances are 0
    assert token_masks.top_entropy(ones, ones).all()
    assert not token_masks.m2po(zeros, ones, ones).any() and token_masks.m2po(zeros, zeros, ones).all()


# --------------------------------------------------------------------------------- rollout correction


def mismatch_batch(seed, scale=0.7):
    """old_log_prob, rollout_log_probs, mask; now and then a huge ratio."""
    rollout, _, noise, mask = random_batch(seed)
    old = rollout + noise * scale
    old = torch.where(torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.04, rollout + 23, old)
    return old, rollout, mask


def words(criteria):
    """As one types them."""
    return tuple(f"{name}={limit}".replace("(", "").replace(")", "") for name, limit in criteria.items())


def correction_by_loops(old, rollout, mask, level=None, action=None, bounds=None, batch_normalize=None, reject=None):
    """-> weights of the kept tokens (None without level), kept tokens, metrics."""
    flags = RolloutCorrectionArgs(level or "measure", action, bounds, batch_normalize, words(reject or {}))
    at = [tuple(token) for token in mask.nonzero().tolist()]
    return correction(flags, *({token: x[token].item() for token in at} for x in (old, rollout)), at)


def grid(mask, weights):
    full = torch.zeros(mask.shape, dtype=torch.float64)
    for (i, t), w in weights.items():
        full[i, t] = w
    return full


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("action", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@for_all(15, seed=seeds)
def test_correction_weights_equal_the_loop(level, action, normalize, seed):
    old, rollout, mask = mismatch_batch(seed)
    for *bounds, reject in ((0.5, 3.0, None), (0.0, 1.5, {"token_k1": (0.25, 9.0)}), (0.9, math.inf, None)):
        keywords = {"level": level, "action": action, "bounds": tuple(bounds), "batch_normalize": normalize}
        expected, kept, numbers = correction_by_loops(old, rollout, mask, **keywords, reject=reject)
        for clean in (True, False):
            pair = (old, rollout) if clean else (poison(old, mask, seed), poison(rollout, mask, seed + 1))
            weights, new_mask, metrics = compute_rollout_correction(*pair, mask, **keywords, reject=reject)
            torch.testing.assert_close(weights, grid(mask, expected), rtol=1e-9, atol=1e-12)
            assert [tuple(at) for at in new_mask.nonzero().tolist()] == kept and new_mask.dtype == mask.dtype
            assert metrics == pytest.approx(numbers, rel=1e-9, abs=1e-12)
        assert not (normalize and kept) or metrics["rollout/is_weight"] in (0, pytest.approx(1))


@pytest.mark.parametrize("criterion", CRITERIA)
@for_all(25, seed=seeds)
def test_rejection_equals_the_loop(criterion, seed):
    old, rollout, mask = mismatch_batch(seed, scale=0.4)
    for limit in ((0.5, 3.0), (0.9, 10.0), (0.99, 1.05)) if criterion.endswith("k1") else (0.02, 0.3):
        _, kept, numbers = correction_by_loops(old, rollout, mask, reject={criterion: limit})
        for clean in (True, False):
            pair = (old, rollout) if clean else (poison(old, mask, seed), poison(rollout, mask, seed + 1))
            weights, new_mask, metrics = compute_rollout_correction(*pair, mask, level=None, reject={criterion: limit})
            assert weights is None and torch.equal(new_mask.double(), grid(mask, dict.fromkeys(kept, 1)))
            assert metrics == pytest.approx(numbers, rel=1e-9, abs=1e-12)


def test_bounds_are_on_train_over_rollout():
    """r = 4 and r = 1/4 at every level; bounds (0.5, 5) keep the first, (0.2, 2) the second, whatever the criterion."""
    rollout, mask = torch.full((2, 1), -3.0, dtype=torch.float64), torch.ones(2, 1)
    old = rollout + torch.tensor([[math.log(4)], [-math.log(4)]])
    for scope in ("token", "seq_sum", "seq_mean", "seq_max"):
        for bounds, kept in (((0.5, 5.0), [[1], [0]]), ((0.2, 2.0), [[0], [1]])):
            _, new_mask, _ = compute_rollout_correction(old, rollout, mask, reject={f"{scope}_k1": bounds})
            assert new_mask.tolist() == kept
    for level in ("token", "sequence", "geometric"):
        for bounds, clipped, masked in (((0.5, 5), [4, 0.5], [4, 0]), ((0.2, 2), [2, 0.25], [0, 0.25])):
            weights = compute_rollout_correction(old, rollout, mask, level=level, bounds=bounds)[0]
            assert weights.flatten().tolist() == pytest.approx(clipped)
            weights = compute_rollout_correction(old, rollout, mask, level=level, bounds=bounds, action="mask")[0]
            assert weights.flatten().tolist() == pytest.approx(masked)


@for_all(25, seed=seeds)
def test_criteria_are_judged_on_the_mask_given_and_add_up(seed):
    old, rollout, mask = mismatch_batch(seed)
    criteria = {"token_k1": (0.5, 2.0), "seq_mean_k1": (0.6, 1.4), "seq_max_k3": 1.0, "seq_sum_k2": 2.0}
    together = [
        compute_rollout_correction(old, rollout, mask, level=None, reject=dict(items))[1]
        for items in (criteria.items(), reversed(criteria.items()))
    ]
    single = [compute_rollout_correction(old, rollout, mask, level=None, reject={k: v})[1] for k, v in criteria.items()]
    expected = torch.stack(single).prod(0)
    assert torch.equal(together[0], expected) and torch.equal(together[1], expected)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@for_all(10, seed=seeds)
def test_denominators_before_and_after_rejection(mode, seed):
    """Both ways that the module's docstring names, by micro-batches of one row, against the loop."""
    old, rollout, mask = mismatch_batch(seed)
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights, new_mask, _ = compute_rollout_correction(
        old, rollout, mask, reject={"token_k1": (0.5, 4), "seq_mean_k1": (0.5, 2)}
    )
    losses = losses_of_papers.gpg(old, old, advantages, mask)[0] * weights
    before, after = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i in range(len(mask)):
        row = slice(i, i + 1)
        share = {"loss_agg_mode": mode, "loss_scale_factor": SCALE}
        before += agg_loss(losses[row] * new_mask[row], mask[row], **share, **counts(mask))
        after += agg_loss(losses[row], new_mask[row], **share, **counts(new_mask))
    full = -advantages * old * weights * new_mask
    close(before, (full * slow_weights(mask, mode)).sum())
    close(after, (full * slow_weights(new_mask, mode)).sum())


def test_correlation_of_a_constant_is_left_out_and_equal_policies_are_all_there():
    x, mask = torch.full((3, 7), math.log(0.1), dtype=torch.float64), torch.ones(3, 7)  # 0.1's mean is not 0.1
    varied = torch.linspace(-2, -1, 21, dtype=torch.float64).view(3, 7)
    for old, rollout in ((x, varied), (varied, x), (x[:1, :1], x[:1, :1])):
        metrics = compute_rollout_correction(old, rollout, torch.ones_like(old))[2]
        assert "rollout/prob_pearson" not in metrics and "rollout/ess" in metrics
    same = compute_rollout_correction(varied, varied, mask)[2]
    assert same["rollout/ess"] == 1 and same["rollout/prob_pearson"] == pytest.approx(1, rel=1e-12)


def test_correction_settings_are_checked_before_there_is_a_batch():
    old, rollout, mask = mismatch_batch(5)
    settings = {"level": "sequence", "bounds": [0.5, 3.0], "reject": {"token_k1": (0.25, 9.0), "seq_max_k3": 2.0}}
    weights, new_mask, metrics = compute_rollout_correction(old, rollout, mask, **settings)
    as_tuples = {"level": "sequence", "bounds": (0.5, 3.0), "reject": {"token_k1": (0.25, 9.0), "seq_max_k3": 2.0}}
    expected = compute_rollout_correction(old, rollout, mask, **as_tuples)
    assert bits_equal(weights, expected[0]) and bits_equal(new_mask, expected[1]) and metrics == expected[2]
    for bad, message in (
        ({"level": "row"}, "level 'row'"),
        ({"bounds": [2, 1]}, "importance weight"),
        ({"bounds": [0, 0]}, r"importance weight needs .*not \[0, 0\]"),  # all of these train nothing
        ({"bounds": [1, 1]}, "importance weight"),
        ({"bounds": [math.nan, 2]}, "importance weight"),
        ({"bounds": [math.inf, math.inf]}, "importance weight"),
        ({"action": "mask", "bounds": [1e9, 1e10]}, "importance weight"),  # log r ends at 20
        ({"action": "mask", "bounds": [0, 0.9]}, "importance weight"),  # r = 1 on policy
        ({"reject": {"seq_mean_k1": (1.1, 2)}}, "seq_mean_k1"),
    ):
        with pytest.raises(InputError, match=message):
            compute_rollout_correction(*[torch.ones(2, 1)] * 3, **bad)


def test_correction_bad_input_and_edges():
    x = torch.zeros(2, 3)
    bad = {"token_k1": [2.0, (2, 0.5), (-1, 2)], "seq_max_k1": [(1, 2, 3), (0.5, math.nan)]}
    for reject in [{name: limit} for name, limits in bad.items() for limit in limits]:
        with pytest.raises(InputError, match=next(iter(reject))):
            compute_rollout_correction(x, x, x, reject=reject)
    for keywords in ({"level": "row"}, {"action": "clip"}, {"bounds": (2, 1)}, {"bounds": 2.0}):
        with pytest.raises(InputError):
            compute_rollout_correction(x, x, torch.ones(2, 3), **keywords)
    weights, new_mask, metrics = compute_rollout_correction(
        torch.full((2, 3), math.nan), x, x, level="sequence", batch_normalize=True, reject={"seq_sum_k1": (0.5, 2)}
    )
    assert (weights == 0).all() and (new_mask == 0).all() and "rollout/is_weight" not in metrics
    weights, new_mask, _ = compute_rollout_correction(x.bfloat16(), x.bfloat16(), torch.ones(2, 3, dtype=torch.long))
    assert weights.dtype == torch.float32 and new_mask.dtype == torch.long and (weights == 1).all()
    weights, *_ = compute_rollout_correction(
        x + 1, x, torch.ones(2, 3), action="mask", bounds=(0, 2), batch_normalize=True
    )
    assert (weights == 0).all()


def test_lookup_by_name():
    loss = pl.get_policy_loss_fn("cispo", {"cliprange_high": 2.0})
    x = torch.ones(1, 2)
    assert torch.equal(loss(x, x, x, x)[0], losses_of_papers.cispo(x, x, x, x, cliprange_high=2.0)[0])
    pl.get_policy_loss_fn("vanilla", {"clip_ratio_c": math.inf})(x, x, x, x)  # no dual clip
    with pytest.raises(InputError, match="'ppo': choose one of vanilla, gpg"):
        pl.get_policy_loss_fn("ppo", {})
    with pytest.raises(InputError, match="'entropy': choose one of cov_keep, cov_pick, top_entropy, m2po"):
        token_masks.compute_token_masks({"entropy": {}}, {}, seed=0)
