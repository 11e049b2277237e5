"""Every loss, mask and correction against a slow loop in Python floats, under every aggregation and every layout.

The loops are those of tests/reference_formulas.py, which say where a stop-gradient stands.
"""

import math
from collections import defaultdict
from itertools import cycle, product
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from lib import InputError
from lib.args.groups import RolloutCorrectionArgs
from lib.core_algos import LOSS_AGG_MODES, agg_loss, compute_rollout_correction, token_masks
from lib.core_algos import policy_losses as pl
from lib.core_algos.papers import losses as losses_of_papers
from lib.declared import CRITERIA, POLICY_LOSSES, TOKEN_MASKS
from tests.common import with_slow
from tests.core_algos.test_core_algos import (
    SCALE,
    bits_equal,
    close,
    counts,
    for_all,
    poison,
    random_batch,
    seeds,
    slow_weights,
)
from tests.reference_formulas import correction, row_losses
from tests.reference_formulas import token_masks as reference_masks

LOW, HIGH = 0.2, 0.28
CLIP = {"cliprange_low": LOW, "cliprange_high": HIGH}


# the keywords of each loss
CASES = {
    "vanilla": CLIP | {"clip_ratio_c": 3.0},
    "gpg": {},
    "reinforce": {"ratio_high": 1.5},
    "cispo": CLIP,
    "gspo": CLIP,
    "geo_mean": {"cliprange_high": 0.5},
    "sapo": {"tau_pos": 0.7, "tau_neg": 1.3},
    "dppo_tv": {"delta_low": 0.15, "delta_high": 0.1, "ratio_high": 2.0},
    "dppo_kl": {"delta_low": 0.05, "delta_high": 0.1, "ratio_high": 2.0},
    "dro": {"dro_beta": 0.3},
    "two_sided": CLIP | {"delta": 3.0},
    "decoupled": CLIP | {"cap": 1.5},
    "clip_cov": CLIP,
    "kl_cov": {"kl_coef": 0.3},
}


def fast_of(name):
    """The loss with its keywords, and the names of the columns that it reads beside."""
    return pl.get_policy_loss_fn(name, CASES[name]), POLICY_LOSSES[name].columns


def make_extras(names, old, advantages, mask, seed):
    g = torch.Generator().manual_seed(seed)
    masks = {"cov_keep": {"cov_ratio": 0.3, "cov_bounds": (-0.5, 1.0)}, "cov_pick": {"cov_ratio": 0.3}}
    batch = {"old_log_probs": old, "advantages": advantages, "response_mask": mask, "group": torch.arange(len(mask))}
    extras = token_masks.compute_token_masks(masks, batch, seed)
    extras["rollout_log_probs"] = old + 0.5 * torch.randn(old.shape, generator=g, dtype=torch.float64)
    return {name: extras[name].double() for name in names}


def slow_loss(name, settings, old, new, advantages, extras, mask, mode="token-mean"):
    """-> loss, its gradient (B, T), the losses and metrics of tokens (B, T)"""
    bounds = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": 3.0}
    args = SimpleNamespace(loss=name, loss_settings=settings, **bounds)
    tokens, leaf = [tuple(at) for at in mask.nonzero().tolist()], new.clone().requires_grad_()
    picked = [{at for at in tokens if key in extras and extras[key][at]} for key in ("cov_keep", "cov_pick")]
    rollout, a = ({at: x[at].item() for at in tokens} for x in (extras.get("rollout_log_probs", old), advantages))
    losses, metrics = torch.zeros_like(new), defaultdict(lambda: torch.zeros_like(new))
    for i in range(len(mask)):
        row = [at for at in tokens if at[0] == i]
        of_tokens, of_row = row_losses(args, row, leaf, old, rollout, a, *picked)
        for at, x in of_tokens.items():
            losses[at] = x
        for metric, numbers in of_row.items():
            for at, x in numbers.items():
                metrics[f"actor/{metric}"][at] = x
    loss = (losses * slow_weights(mask, mode)).sum() + 0 * leaf.sum()
    [gradient] = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, losses.detach(), metrics


PAIRS = [*product(CASES, LOSS_AGG_MODES)]
EACH_ONCE = {*zip(CASES, cycle(LOSS_AGG_MODES)), *product(["gspo"], LOSS_AGG_MODES)}


@pytest.mark.parametrize(("name", "mode"), with_slow(PAIRS, *{*PAIRS} - EACH_ONCE))
@for_all(6, seed=seeds)
def test_loss_and_gradient_equal_the_loop(name, mode, seed):
    """With right padding and garbage in the masked positions. Micro-batches: tests/scripts/test_invariance.py."""
    fast, extra_names = fast_of(name)
    old, new, advantages, mask = random_batch(seed, rows=6)
    extras = make_extras(extra_names, old, advantages, mask, seed)
    loss, gradient, token_losses, numbers = slow_loss(name, CASES[name], old, new, advantages, extras, mask, mode)
    losses, metrics = fast(old, new, advantages, mask, **extras)
    torch.testing.assert_close(losses, token_losses, rtol=1e-10, atol=1e-12)
    assert all(m.shape == mask.shape and not m.requires_grad and (m[mask == 0] == 0).all() for m in metrics.values())
    assert metrics.keys() == numbers.keys() or not mask.any()
    for metric, expected in numbers.items():
        close(metrics[metric], expected)
    for total in ({}, {key: torch.tensor(n) for key, n in counts(mask).items()}):
        close(agg_loss(losses, mask, mode, loss_scale_factor=SCALE, **total), loss)

    leaf, padded = new.clone().requires_grad_(), pad(mask, (0, 2))
    parts = [poison(pad(x, (0, 2)), padded, seed + k) for k, x in enumerate((old, leaf, advantages, *extras.values()))]
    losses, _ = fast(*parts[:3], padded, **dict(zip(extra_names, parts[3:])))
    total = agg_loss(losses, padded, mode, loss_scale_factor=SCALE, **counts(mask))
    total.backward()
    torch.testing.assert_close(total.detach(), loss, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-8, atol=1e-11)
    assert (leaf.grad[mask == 0] == 0).all()


@pytest.mark.parametrize("name", CASES)
@for_all(10, seed=seeds)
def test_on_policy_every_gradient_is_the_advantage(name, seed):
    """ρ = 1, one advantage a row: d Σ L / d log_prob = −A, even with old_log_prob the very same tensor."""
    fast, extra_names = fast_of(name)
    old, _, advantages, mask = random_batch(seed)
    advantages = advantages[:, :1].expand_as(old).contiguous()
    extras = {"rollout_log_probs": old, "cov_keep": torch.ones_like(old), "cov_pick": torch.ones_like(old)}
    leaf = old.clone().requires_grad_()
    fast(leaf, leaf, advantages, mask, **{key: extras[key] for key in extra_names})[0].sum().backward()
    close(leaf.grad, -advantages * mask)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"vanilla", "dro"}))
@for_all(6, seed=seeds)
def test_default_bounds_are_the_papers(name, seed):
    columns, (old, new, advantages, mask) = POLICY_LOSSES[name].columns, random_batch(seed)
    extras = make_extras(columns, old, advantages, mask, seed)
    losses, metrics = pl.get_policy_loss_fn(name, {})(old, new, advantages, mask, **extras)
    *_, expected, numbers = slow_loss(name, {}, old, new, advantages, extras, mask)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    for metric, tokens in numbers.items():
        close(metrics[metric], tokens)


def test_a_token_that_is_sure_is_not_infinitely_far():
    sure = [torch.tensor([[x]]) for x in (-1e-3, 0.0, 1.0, 1.0)]  # π rounds to 1 in float32
    assert losses_of_papers.dppo_kl(*sure)[1]["actor/pg_clipfrac"].item() == 0


def test_bad_input():
    x = torch.zeros(1, 2)
    for name in CASES:
        with pytest.raises(TypeError, match="temperature"):
            fast_of(name)[0](x, x, x, x, temperature=1.0)
    with pytest.raises(TypeError, match="dro_beta"):
        losses_of_papers.dro(x, x, x, x)
    with pytest.raises(InputError, match="delta"):
        losses_of_papers.two_sided(x, x, x, x, delta=1.2)
    with pytest.raises(ValueError, match="row_ids"):
        token_masks.cov_keep(*[torch.zeros(2, 2)] * 3, row_ids=torch.tensor([3, 3]), seed=0)
    assert set(POLICY_LOSSES) == set(CASES)


# ----------------------------------------------------------------------- masks over the mini-batch
MASKS = {
    "cov_keep": {"cov_ratio": 0.2, "cov_bounds": (0, 0.8)},
    "cov_pick": {"cov_ratio": 0.2},
    "top_entropy": {"fraction": 0.3},
    "m2po": {"threshold": 0.3},
    "off_policy_sequence": {"delta": 0.1},
}
TOGETHER = [[], ["top_entropy", "off_policy_sequence"], ["top_entropy", "m2po", "off_policy_sequence"]]


@for_all(60, seed=seeds)
def test_masks_equal_the_loop(seed):
    """With garbage in the masked positions and in more padding."""
    rollout, old, advantages, mask = random_batch(seed)
    entropys = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)).mul(8).round()  # many ties
    tensors = {"old_log_probs": old, "rollout_log_probs": rollout, "entropys": entropys, "advantages": advantages}
    tokens = [tuple(at) for at in mask.nonzero().tolist()]
    numbers = [{at: x[at].item() for at in tokens} for x in tensors.values()]
    padded = pad(mask, (0, 2))
    dirty = {key: poison(pad(x.double(), (0, 2)), padded, seed) for key, x in tensors.items()}
    assert set(MASKS) == set(TOKEN_MASKS)
    for names in [[name] for name in MASKS] + TOGETHER:
        chosen = {name: MASKS[name] for name in names}
        loss = {"cov_keep": "clip_cov", "cov_pick": "kl_cov"}.get("".join(names))
        args = SimpleNamespace(mask_settings=chosen, loss=loss, run=SimpleNamespace(seed=0))
        kept = reference_masks(args, tokens, range(99), *numbers, seed)
        expected = dict(zip(["token_mask", "cov_keep", "cov_pick"], kept))
        for batch, own in ((tensors, mask), (dirty, padded)):
            batch = batch | {"response_mask": own, "group": torch.arange(len(mask)) // 2}
            found = token_masks.compute_token_masks(chosen, batch, seed)
            assert list(found) == [names[0] if loss else "token_mask"][: len(names)]
            for name, kept in found.items():
                assert kept.dtype == torch.bool and {tuple(at) for at in kept.nonzero().tolist()} == expected[name]


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
        for pair in ((old, rollout), (poison(old, mask, seed), poison(rollout, mask, seed + 1))):
            weights, new_mask, metrics = compute_rollout_correction(*pair, mask, **keywords, reject=reject)
            torch.testing.assert_close(weights, grid(mask, expected), rtol=1e-9, atol=1e-12)
            assert [tuple(at) for at in new_mask.nonzero().tolist()] == kept and new_mask.dtype == mask.dtype
            assert metrics == pytest.approx(numbers, rel=1e-9, abs=1e-12)
        assert not (normalize and kept) or metrics["rollout/is_weight"] in (0, pytest.approx(1))


LIMITS = {"k1": ((0.5, 3.0), (0.9, 10.0), (0.99, 1.05)), "k2": (0.02, 0.3), "k3": (0.02, 0.3)}
REJECTS = {name: [{name: limit} for limit in LIMITS[name[-2:]]] for name in CRITERIA}
SEVERAL = {"token_k1": (0.5, 2.0), "seq_mean_k1": (0.6, 1.4), "seq_max_k3": 1.0, "seq_sum_k2": 2.0}
REJECTS["several, each on the mask given"] = [SEVERAL, dict(reversed(SEVERAL.items()))]


@pytest.mark.parametrize("criteria", REJECTS)
@for_all(25, seed=seeds)
def test_rejection_equals_the_loop(criteria, seed):
    old, rollout, mask = mismatch_batch(seed, scale=0.4)
    for reject in REJECTS[criteria]:
        _, kept, numbers = correction_by_loops(old, rollout, mask, reject=reject)
        for pair in ((old, rollout), (poison(old, mask, seed), poison(rollout, mask, seed + 1))):
            weights, new_mask, metrics = compute_rollout_correction(*pair, mask, level=None, reject=reject)
            assert weights is None and torch.equal(new_mask.double(), grid(mask, dict.fromkeys(kept, 1)))
            assert metrics == pytest.approx(numbers, rel=1e-9, abs=1e-12)


def test_correlation_of_a_constant_is_left_out_and_equal_policies_are_all_there():
    x, mask = torch.full((3, 7), math.log(0.1), dtype=torch.float64), torch.ones(3, 7)  # 0.1's mean is not 0.1
    varied = torch.linspace(-2, -1, 21, dtype=torch.float64).view(3, 7)
    for old, rollout in ((x, varied), (varied, x), (x[:1, :1], x[:1, :1])):
        metrics = compute_rollout_correction(old, rollout, torch.ones_like(old))[2]
        assert "rollout/prob_pearson" not in metrics and "rollout/ess" in metrics
    same = compute_rollout_correction(varied, varied, mask)[2]
    assert same["rollout/ess"] == 1 and same["rollout/prob_pearson"] == pytest.approx(1, rel=1e-12)


def test_correction_settings_are_checked_before_there_is_a_batch():
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
        *(({"reject": {"token_k1": limit}}, "token_k1") for limit in (2.0, (2, 0.5), (-1, 2))),
        *(({"reject": {"seq_max_k1": limit}}, "seq_max_k1") for limit in ((1, 2, 3), (0.5, math.nan))),
        ({"action": "clip"}, ""),
        ({"bounds": 2.0}, ""),
    ):
        with pytest.raises(InputError, match=message or None):
            compute_rollout_correction(*[torch.ones(2, 1)] * 3, **bad)


def test_corrections_of_nothing_and_of_other_dtypes():
    x = torch.zeros(2, 3)
    settings = {"level": "sequence", "batch_normalize": True, "reject": {"seq_sum_k1": (0.5, 2)}}
    weights, new_mask, metrics = compute_rollout_correction(torch.full((2, 3), math.nan), x, x, **settings)
    assert (weights == 0).all() and (new_mask == 0).all() and "rollout/is_weight" not in metrics
    weights, new_mask, _ = compute_rollout_correction(x.bfloat16(), x.bfloat16(), torch.ones(2, 3, dtype=torch.long))
    assert weights.dtype == torch.float32 and new_mask.dtype == torch.long and (weights == 1).all()
    settings = {"action": "mask", "bounds": (0, 2), "batch_normalize": True}
    assert (compute_rollout_correction(x + 1, x, torch.ones(2, 3), **settings)[0] == 0).all()


def test_lookup_by_name():
    loss = pl.get_policy_loss_fn("cispo", {"cliprange_high": 2.0})
    x = torch.ones(1, 2)
    assert torch.equal(loss(x, x, x, x)[0], losses_of_papers.cispo(x, x, x, x, cliprange_high=2.0)[0])
    pl.get_policy_loss_fn("vanilla", {"clip_ratio_c": math.inf})(x, x, x, x)  # no dual clip
    with pytest.raises(InputError, match="'ppo': choose one of vanilla, gpg"):
        pl.get_policy_loss_fn("ppo", {})
    with pytest.raises(InputError, match="'entropy': choose one of cov_keep, cov_pick, top_entropy, m2po"):
        token_masks.compute_token_masks({"entropy": {}}, {}, seed=0)
