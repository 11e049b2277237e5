"""Masks over the tokens of a whole step, computed without gradient before the update. Conventions: policy_losses.py.

A mask that only one loss reads has the name of its column (cov_keep); the others are chosen by --token-masks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lib.columns import COLUMNS
from lib.core_algos.reductions import _keep, masked_mean
from lib.declared import TOKEN_MASKS, Bounds, NonNegative, OfRatio, Positive, Share, named
from lib.sampling import GOLDEN, mix64

Mask = Tensor  # (B, T) bool


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
def cov_keep(
    old_log_probs,
    advantages,
    response_mask,
    *,
    row_ids,
    seed,
    cov_ratio: Share = 2e-4,
    cov_bounds: Bounds = (1.0, 5.0),
) -> Mask:
    """Clip-Cov, arXiv 2505.22617 -> keep (B, T) bool: all valid tokens except max(⌊cov_ratio·N⌋, 1), drawn at random
    from those with cov_bounds[0] < covariance < cov_bounds[1].

    row_ids (B,): integers, no two equal. The draw hashes (seed, row id, position), so row order, padding and split do
    not change it. The paper's covariance is by the current weights, which are the old ones before the first update."""
    low, high = cov_bounds
    valid = response_mask.bool()
    covariance = _covariance(advantages, old_log_probs, response_mask)
    candidates = valid & (low < covariance) & (covariance < high)
    noise = _token_noise(row_ids, valid.shape[1], seed)
    drawn = noise[candidates].sort().values[: max(int(cov_ratio * int(valid.sum())), 1)]
    return valid & ~(candidates & (noise <= drawn[-1])) if len(drawn) else valid


@torch.no_grad()
def cov_pick(old_log_probs, advantages, response_mask, *, cov_ratio: OfRatio[Share] = 2e-4) -> Mask:
    """KL-Cov, arXiv 2505.22617 -> pick (B, T) bool: the max(⌊cov_ratio·N⌋, 1) valid tokens of largest covariance.

    Of tokens that tie at the last place none is picked, so row order does not matter."""
    valid = response_mask.bool()
    covariance = _covariance(advantages, old_log_probs, response_mask)
    ranked = covariance[valid].sort(descending=True).values
    places = max(int(cov_ratio * len(ranked)), 1)
    return valid & (covariance > ranked[places]) if places < len(ranked) else valid


@torch.no_grad()
def top_entropy(entropys, response_mask, *, fraction: Share = 0.2) -> Mask:
    """arXiv 2506.01939 -> keep (B, T) bool: the max(round(fraction·N), 1) valid tokens of highest entropy, and those
    that tie with the last of them."""
    valid = response_mask.bool()
    ranked = entropys[valid].sort(descending=True).values
    return valid & (entropys >= ranked[max(round(fraction * len(ranked)), 1) - 1]) if len(ranked) else valid


@torch.no_grad()
def m2po(rollout_log_probs, old_log_probs, response_mask, *, threshold: Positive = 0.04) -> Mask:
    """M2PO, arXiv 2510.01161 -> keep (B, T) bool: all valid tokens except those of largest squared log(π_old /
    π_rollout), as many as must go for the mean of the rest to be < threshold. Tokens that tie at the cut all go."""
    valid = response_mask.bool()
    moment = (_keep(old_log_probs, valid) - _keep(rollout_log_probs, valid)).double().square()
    ranked = moment[valid].sort().values
    means = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1, device=ranked.device)
    kept = int((means < threshold).sum())
    return valid & (moment < ranked[kept]) if kept < len(ranked) else valid


@torch.no_grad()
def off_policy_sequence(rollout_log_probs, old_log_probs, advantages, response_mask, *, delta: NonNegative) -> Mask:
    """OPSM, DeepSeek-V3.2, arXiv 2512.02556 -> keep (B, T) bool: all valid tokens except those with A < 0 in a row
    whose mean of rollout_log_probs − old_log_probs is > delta."""
    drift = _keep(rollout_log_probs, response_mask) - _keep(old_log_probs, response_mask)
    far = masked_mean(drift, response_mask, dim=-1)[:, None] > delta
    return response_mask.bool() & ~(far & (advantages < 0))


def compute_token_masks(masks: Mapping[str, Mapping], tensors: Mapping[str, Tensor], seed: int) -> dict[str, Mask]:
    """The token masks of a step, from its whole batch, gathered over the ranks.

    masks: {name: its hyper-parameters}. tensors: the columns that they declare, and group (B,). Returns the masks of
    losses under their names, and the product of the others as token_mask. Raises InputError for an unknown mask."""
    results: dict[str, Mask] = {}
    for name, settings in masks.items():
        declared = named(TOKEN_MASKS, name)
        inputs: dict[str, Any] = {column: tensors[column] for column in declared.columns}
        if name == "cov_keep":  # a row's id is its place in the order of groups: the gathered rows are ordered by rank
            inputs |= {"row_ids": tensors["group"].argsort(stable=True).argsort(), "seed": seed}
        mask = declared.load()(**inputs, **settings)
        key = name if name in COLUMNS else "token_mask"
        results[key] = results[key] & mask if key in results else mask
    return results
