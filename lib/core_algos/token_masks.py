"""Masks over the tokens of a whole step, computed without gradient before the update. Conventions:
policy_losses.py."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lib import InputError
from lib.core_algos.noise import GOLDEN, mix64
from lib.core_algos.reductions import _keep, masked_mean
from lib.core_algos.settings import _bind, _lookup


def _covariance(advantages, log_prob, mask) -> Tensor:
    """(A − mean A)·(log_prob − mean log_prob) of valid tokens. Sorted before the sum, so row order does not matter."""
    centered = [x.double() - x[mask.bool()].double().sort().values.mean() for x in (advantages, log_prob)]
    return _keep(centered[0] * centered[1], mask)


def _token_noise(row_ids: Tensor, width: int, seed: int) -> Tensor:
    """(B,) -> (B, T) int64: splitmix64 of (seed, row id, position), a bijection, so that no two tokens tie."""
    if len(row_ids.unique()) != len(row_ids):
        raise ValueError("row_ids must number the rows: no two equal")
    x = row_ids.long()[:, None] * 2**32 + torch.arange(width, device=row_ids.device)
    return mix64(x + ((seed * GOLDEN + 2**63) % 2**64 - 2**63))  # wraps the seed's part into a signed integer


@torch.no_grad()
def clip_cov_mask(old_log_probs, advantages, response_mask, *, row_ids, seed, ratio=2e-4, cov=(1.0, 5.0)) -> Tensor:
    """-> keep (B, T) bool: all valid tokens except max(⌊ratio·N⌋, 1), drawn at random from those with
    cov[0] < covariance < cov[1].

    row_ids (B,): integers, no two equal. The draw hashes (seed, row id, position), so row order, padding and split do
    not change it. The paper computes the covariance with the current weights and leaves out tokens that PPO clips.
    Before the first update the current weights are the old ones, and nothing is clipped."""
    if not cov[0] < cov[1]:
        raise InputError(f"clip_cov draws tokens whose covariance is between two bounds, low < high, not {cov}")
    valid = response_mask.bool()
    covariance = _covariance(advantages, old_log_probs, response_mask)
    candidates = valid & (cov[0] < covariance) & (covariance < cov[1])
    noise = _token_noise(row_ids, valid.shape[1], seed)
    drawn = noise[candidates].sort().values[: max(int(ratio * int(valid.sum())), 1)]
    return valid & ~(candidates & (noise <= drawn[-1])) if len(drawn) else valid


@torch.no_grad()
def kl_cov_mask(old_log_probs, advantages, response_mask, *, ratio=2e-4) -> Tensor:
    """-> pick (B, T) bool: the max(⌊ratio·N⌋, 1) valid tokens of largest covariance.

    If tokens tie at the last place, none of them is picked. So row order does not matter, and advantages that are all 0
    pick nothing."""
    valid = response_mask.bool()
    covariance = _covariance(advantages, old_log_probs, response_mask)
    ranked = covariance[valid].sort(descending=True).values
    places = max(int(ratio * len(ranked)), 1)
    return valid & (covariance > ranked[places]) if places < len(ranked) else valid


@torch.no_grad()
def top_entropy_mask(entropys, response_mask, *, fraction=0.2) -> Tensor:
    """arXiv 2506.01939 -> keep (B, T) bool: the max(round(fraction·N), 1) valid tokens of highest entropy, and those
    that tie with the last of them."""
    if not 0 < fraction <= 1:
        raise InputError(f"fraction, the share of tokens to keep, must be in (0, 1], not {fraction}")
    valid = response_mask.bool()
    ranked = entropys[valid].sort(descending=True).values
    return valid & (entropys >= ranked[max(round(fraction * len(ranked)), 1) - 1]) if len(ranked) else valid


@torch.no_grad()
def m2po_mask(rollout_log_probs, old_log_probs, response_mask, *, threshold=0.04) -> Tensor:
    """M2PO, arXiv 2510.01161 -> keep (B, T) bool: all valid tokens except those of largest squared log(π_old /
    π_rollout), as many as must go for the mean of the rest to be < threshold. Tokens that tie at the cut all go."""
    valid = response_mask.bool()
    moment = (_keep(old_log_probs, valid) - _keep(rollout_log_probs, valid)).double().square()
    ranked = moment[valid].sort().values
    means = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1, device=ranked.device)
    kept = int((means < threshold).sum())
    return valid & (moment < ranked[kept]) if kept < len(ranked) else valid


@torch.no_grad()
def off_policy_sequence_mask(rollout_log_probs, old_log_probs, advantages, response_mask, *, delta) -> Tensor:
    """OPSM, DeepSeek-V3.2, arXiv 2512.02556 -> keep (B, T) bool: all valid tokens except those with A < 0 in a row
    whose mean of rollout_log_probs − old_log_probs is > delta."""
    drift = _keep(rollout_log_probs, response_mask) - _keep(old_log_probs, response_mask)
    far = masked_mean(drift, response_mask, dim=-1)[:, None] > delta
    return response_mask.bool() & ~(far & (advantages < 0))


_DRIFT = ("rollout_log_probs", "old_log_probs")
# {name: (function, the batch keys that it takes, the key of its result)}
TOKEN_MASKS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], str]] = {
    "top_entropy": (top_entropy_mask, ("entropys", "response_mask"), "token_mask"),
    "m2po": (m2po_mask, (*_DRIFT, "response_mask"), "token_mask"),
    "off_policy_sequence": (off_policy_sequence_mask, (*_DRIFT, "advantages", "response_mask"), "token_mask"),
    "clip_cov": (clip_cov_mask, ("old_log_probs", "advantages", "response_mask"), "cov_keep"),
    "kl_cov": (kl_cov_mask, ("old_log_probs", "advantages", "response_mask"), "cov_pick"),
}


def compute_token_masks(masks: Mapping[str, Mapping], tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The token masks (B, T) bool of a step, from its whole batch, gathered over the ranks.

    masks: {name: settings}. tensors: the batch keys that TOKEN_MASKS names, and group (B,). Returns, as far as asked
    for, token_mask, the product of top_entropy, m2po and off_policy_sequence; cov_keep of clip_cov, drawn by (seed, row
    id, position); and cov_pick of kl_cov. Raises InputError as check_token_masks does."""
    results: dict[str, Tensor] = {}
    for name, settings in masks.items():
        _lookup("token mask", TOKEN_MASKS, name)
        function, keys, key = TOKEN_MASKS[name]
        drawn = {}
        if name == "clip_cov":  # a row's id is its place in the order of groups: that of the gathered rows is by ranks
            drawn = {"row_ids": tensors["group"].argsort(stable=True).argsort(), "seed": seed}
        compute = _bind(f"token mask {name!r}", function, settings, len(keys), tuple(drawn))
        mask = compute(*(tensors[k] for k in keys), **drawn)
        results[key] = results[key] & mask if key in results else mask
    return results


def check_token_masks(masks: Mapping[str, Mapping]) -> None:
    """Tries the masks on two tokens. Raises InputError for an unknown mask (it lists the names) or a bad setting."""
    keys = {key for _, keys, _ in TOKEN_MASKS.values() for key in keys}
    compute_token_masks(masks, dict.fromkeys(keys, torch.ones(2, 1)) | {"group": torch.arange(2)}, seed=0)
