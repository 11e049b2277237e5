"""Every loss, mask and correction against a slow loop in Python floats.

The loops are those of tests/reference_formulas.py, which say where a stop-gradient stands. Aggregation, layouts and
what stands at masked positions: tests/scripts/test_invariance.py.
"""

import math
from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from lib import InputError
from lib.args.groups import RolloutCorrectionArgs
from lib.core_algos import compute_rollout_correction, token_masks
from lib.core_algos import policy_losses as pl
from lib.core_algos.papers import losses as losses_of_papers
from lib.declared import CRITERIA, POLICY_LOSSES, TOKEN_MASKS
from tests.core_algos.test_core_algos import close, for_all, poison, random_batch, seeds
from tests.reference_formulas import correction, row_losses
from tests.reference_formulas import token_masks as reference_masks

CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.28}


# the keywords of each loss
CASES = {
    "vanilla": CLIP | {"clip_ratio_c": 2.0},
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
DEFAULTS = {name: [{}] for name in CASES} | {"dro": [], "vanilla": [{}, {"clip_ratio_c": math.inf}]}


def make_extras(old, advantages, mask, seed):
    """The columns that losses read beside."""
    g = torch.Generator().manual_seed(seed)
    masks = {"cov_keep": {"cov_ratio": 0.3, "cov_bounds": (-0.5, 1.0)}, "cov_pick": {"cov_ratio": 0.3}}
    batch = {"old_log_probs": old, "advantages": advantages, "response_mask": mask, "group": torch.arange(len(mask))}
    extras = token_masks.compute_token_masks(masks, batch, seed)
    rollout = old + 0.5 * torch.randn(old.shape, generator=g, dtype=torch.float64)
    return {name: x.double() for name, x in extras.items()} | {"rollout_log_probs": rollout}


def slow_loss(name, settings, old, leaf, advantages, extras, mask):
    """-> the losses and metrics of tokens (B, T)"""
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    bounds |= {key.replace("cliprange", "clip_ratio"): value for key, value in settings.items()}
    args = SimpleNamespace(**bounds, loss=name, loss_settings=settings)
    tokens = [tuple(at) for at in mask.nonzero().tolist()]
    picked = [{at for at in tokens if extras[key][at]} for key in ("cov_keep", "cov_pick")]
    rollout, a = ({at: x[at].item() for at in tokens} for x in (extras["rollout_log_probs"], advantages))
    losses, metrics = 0 * leaf, defaultdict(lambda: torch.zeros_like(old))
    for i in range(len(mask)):
        row = [at for at in tokens if at[0] == i]
        of_tokens, of_row = row_losses(args, row, leaf, old, rollout, a, *picked)
        for at, x in of_tokens.items():
            losses[at] = x
        for metric, numbers in of_row.items():
            for at, x in numbers.items():
                metrics[f"actor/{metric}"][at] = x
    return losses, metrics


@pytest.mark.parametrize("name", CASES)
@for_all(12, seed=seeds)
def test_loss_and_gradient_equal_the_loop(name, seed):
    """The gradient of any combination of token losses; with the defaults of the papers, too."""
    old, new, advantages, mask = random_batch(seed, rows=6)
    extras, leaf = make_extras(old, advantages, mask, seed), new.requires_grad_()
    weights = torch.randn(old.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    columns = {key: extras[key] for key in POLICY_LOSSES[name].columns}
    for settings in (CASES[name], *DEFAULTS[name]):
        losses, metrics = pl.get_policy_loss_fn(name, settings)(old, leaf, advantages, mask, **columns)
        expected, numbers = slow_loss(name, settings, old, leaf, advantages, extras, mask)
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
        close(*(torch.autograd.grad((weights * x).sum(), leaf)[0] for x in (losses, expected)))
        assert metrics.keys() == numbers.keys() or not mask.any()
        for metric, values in metrics.items():
            assert not values.requires_grad
            close(values, numbers[metric])


def test_a_token_that_is_sure_is_not_infinitely_far():
    sure = [torch.tensor([[x]]) for x in (-1e-3, 0.0, 1.0, 1.0)]  # π rounds to 1 in float32
    assert losses_of_papers.dppo_kl(*sure)[1]["actor/pg_clipfrac"].item() == 0


def test_bad_input():
    x = torch.zeros(1, 2)
    for name, keywords, message in (
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c"),
        ("two_sided", {"delta": 1.2}, "delta"),
        ("ppo", {}, "'ppo': choose one of vanilla, gpg"),
    ):
        with pytest.raises(InputError, match=message):
            pl.get_policy_loss_fn(name, keywords)(x, x, x, x)
    with pytest.raises(ValueError, match="row_ids"):
        token_masks.cov_keep(*[torch.zeros(2, 2)] * 3, row_ids=torch.tensor([3, 3]), seed=0)
    assert set(POLICY_LOSSES) == set(CASES) and set(TOKEN_MASKS) == set(MASKS)


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
LIMITS = {"k1": ((0.5, 3.0), (0.9, 10.0), (0.99, 1.05)), "k2": (0.02, 0.3), "k3": (0.02, 0.3)}
SEVERAL = {"token_k1": (0.5, 2.0), "seq_mean_k1": (0.6, 1.4), "seq_max_k3": 1.0, "seq_sum_k2": 2.0}
BOUNDS = ({"bounds": (0.5, 3.0)}, {"bounds": (0.9, math.inf)})
BOUNDS += ({"bounds": (0.0, 1.5), "reject": {"token_k1": (0.25, 9.0)}},)
CORRECTIONS = {name: [{"reject": {name: limit}} for limit in LIMITS[name[-2:]]] for name in CRITERIA}
CORRECTIONS["several, each on the mask given"] = [{"reject": SEVERAL}, {"reject": dict(reversed(SEVERAL.items()))}]
for level, action, normalize in product(["token", "sequence", "geometric"], ["truncate", "mask"], [False, True]):
    weighted = {"level": level, "action": action, "batch_normalize": normalize}
    CORRECTIONS[f"{level} {action} {normalize}"] = [weighted | bounds for bounds in BOUNDS]


def correction_by_loops(old, rollout, mask, level=None, action=None, bounds=None, batch_normalize=None, reject=None):
    """-> weights (B, T) of the kept tokens (None without level), the new mask, metrics."""
    words = [f"{name}={limit}".replace("(", "").replace(")", "") for name, limit in (reject or {}).items()]
    flags = RolloutCorrectionArgs(level or "measure", action, bounds, batch_normalize, tuple(words))
    at = [tuple(token) for token in mask.nonzero().tolist()]
    numbers = ({token: x[token].item() for token in at} for x in (old, rollout))
    weights, kept, metrics = correction(flags, *numbers, at)
    grids = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for token in kept:
        grids[:, *token] = torch.tensor([weights[token] if weights else 1.0, 1.0], dtype=torch.float64)
    return None if weights is None else grids[0], grids[1], metrics


@pytest.mark.parametrize("case", CORRECTIONS)
@for_all(20, seed=seeds)
def test_correction_equals_the_loop(case, seed):
    """With garbage in the masked positions; now and then a huge ratio."""
    rollout, _, noise, mask = random_batch(seed)
    old = rollout + 0.5 * noise
    old = torch.where(torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.04, rollout + 23, old)
    for settings in CORRECTIONS[case]:
        expected, kept, numbers = correction_by_loops(old, rollout, mask, **settings)
        for pair in ((old, rollout), (poison(old, mask, seed), poison(rollout, mask, seed + 1))):
            weights, new_mask, metrics = compute_rollout_correction(*pair, mask, **{"level": None} | settings)
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
            assert torch.equal(new_mask.double(), kept) and new_mask.dtype == mask.dtype
            assert metrics == pytest.approx(numbers, rel=1e-9, abs=1e-12)


def test_correlation_of_a_constant_is_left_out_and_equal_policies_are_all_there():
    x, mask = torch.full((3, 7), math.log(0.1), dtype=torch.float64), torch.ones(3, 7)  # 0.1's mean is not 0.1
    varied = torch.linspace(-2, -1, 21, dtype=torch.float64).view(3, 7)
    for old, rollout in ((x, varied), (varied, x), (x[:1, :1], x[:1, :1])):
        metrics = compute_rollout_correction(old, rollout, torch.ones_like(old))[2]
        assert "rollout/prob_pearson" not in metrics and "rollout/ess" in metrics
    same = compute_rollout_correction(varied, varied, mask)[2]
    assert same["rollout/ess"] == 1 and same["rollout/prob_pearson"] == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "row"}, "level 'row'"),
        ({"action": "clip"}, "action 'clip'"),
        *(({"bounds": bounds}, "the importance weight needs") for bounds in (2.0, [1, 1], [2, 3], [0, 0.9])),
        *(({"bounds": bounds}, "the importance weight needs") for bounds in ([-1, 2], [math.nan, 2])),
        *(({"reject": {"seq_max_k1": limit}}, "seq_max_k1") for limit in (2.0, (1, 2, 3), (0.5, math.nan))),
    ],
)
def test_correction_settings_are_checked_before_there_is_a_batch(settings, message):
    with pytest.raises(InputError, match=message):
        compute_rollout_correction(*[torch.ones(2, 1)] * 3, **settings)


def test_corrections_of_nothing_and_of_other_dtypes():
    x = torch.zeros(2, 3)
    settings = {"level": "sequence", "batch_normalize": True, "reject": {"seq_sum_k1": (0.5, 2)}}
    weights, new_mask, metrics = compute_rollout_correction(torch.full((2, 3), math.nan), x, x, **settings)
    assert (weights == 0).all() and (new_mask == 0).all() and "rollout/is_weight" not in metrics
    weights, new_mask, _ = compute_rollout_correction(x.bfloat16(), x.bfloat16(), torch.ones(2, 3, dtype=torch.long))
    assert weights.dtype == torch.float32 and new_mask.dtype == torch.long and (weights == 1).all()
    settings = {"action": "mask", "bounds": (0, 2), "batch_normalize": True}
    assert (compute_rollout_correction(x + 1, x, torch.ones(2, 3), **settings)[0] == 0).all()
