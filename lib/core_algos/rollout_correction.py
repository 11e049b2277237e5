"""Correction for tokens sampled by another policy than the one that trains: engine mismatch, stale weights.

All bounds are on r = π_train / π_rollout: (low, high), inclusive, with low <= 1 <= high. (verl's k1 rejection bounds
1/r, which symmetric bounds hide.) x = log r of a token; a row's r is exp(Σx) as a sequence, exp(mean x) as a geometric
mean, over valid tokens; log r is clamped to ±20. Weights multiply the loss; rejection edits the mask. The caller
chooses what the denominators count. `agg_loss(losses * new_mask, response_mask, ...)` counts tokens before rejection,
so that rejection does not enlarge the gradient of the rest; `agg_loss(losses, new_mask, ...)`, with the global counts
of new_mask, counts them after it. A row left without a token is dead and counts in no group statistics, so correct
before computing advantages.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lib import InputError
from lib.core_algos.reductions import _keep, masked_mean, masked_sum

REDUCE = {"sequence": masked_sum, "geometric": masked_mean, "seq_sum": masked_sum, "seq_mean": masked_mean}


def _ratio(x: Tensor, mask: Tensor, level: str) -> Tensor:
    """r (B, T) at token level, else (B, 1)."""
    x = REDUCE[level](x, mask, dim=-1)[:, None] if level in REDUCE else x
    return x.clamp(-20, 20).exp()


def _passes(x: Tensor, mask: Tensor, criterion: str, limit: Any) -> Tensor:
    """(B, T) bool for a token criterion, else (B, 1)."""
    scope, _, estimator = criterion.rpartition("_")
    if estimator == "k1":
        values, (low, high) = _ratio(x, mask, scope), _bounds(criterion, limit)
    else:
        x = x.clamp(-20, 20)
        values = x.square() / 2 if estimator == "k2" else torch.expm1(x) - x
        values = REDUCE[scope](values, mask, dim=-1)[:, None] if scope in REDUCE else values
        low, high = 0, limit
    passes = (low <= values) & (values <= high)
    return (passes | ~mask).all(-1, keepdim=True) if scope == "seq_max" else passes


def _bounds(name: str, bounds) -> tuple[float, float]:
    pair = isinstance(bounds, tuple | list) and len(bounds) == 2
    if not pair or not 0 <= bounds[0] <= 1 <= bounds[1] or bounds[0] == bounds[1]:
        raise InputError(f"{name} needs bounds on r, (low, high), around the 1 of on-policy tokens, not {bounds!r}")
    return bounds[0], bounds[1]


@torch.no_grad()
def compute_rollout_correction(
    old_log_prob: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: str | None = "token",
    action: str = "truncate",
    bounds: tuple[float, float] = (0.0, 2.0),
    batch_normalize: bool = False,
    reject: Mapping[str, tuple[float, float] | float] | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, Any]]:
    """-> weights (B, T), 0 outside the new mask (None without level), new response_mask (B, T), metrics of the batch.

    All tensors (B, T), of the whole step, gathered over the ranks.

    level says whose r is the weight: token, sequence, geometric. If r is outside bounds, action "truncate" takes the
    bound (TIS), "mask" takes 0 (IcePop, at token level). batch_normalize divides by the mean weight of the tokens
    (token level) or rows that the new mask keeps; after that, weights may be outside bounds.

    reject = {criterion: limit} drops each token or row that fails a criterion, all computed on the given mask:
      token_k1, seq_sum_k1, seq_mean_k1   (low, high) on r of the token, of the row as sequence, as geometric mean
      seq_max_k1                          on r of every token of the row: the outlier veto, such as (1e-4, 100)
      the same four with k2, k3           upper limit of x²/2, of e^x − 1 − x: token, sum, mean, maximum over the row
    Raises InputError for an unknown name or bad bounds."""
    mask = response_mask.bool()
    x = (_keep(old_log_prob, mask) - _keep(rollout_log_probs, mask)).double()
    new_mask, values = mask, _mismatch(old_log_prob, rollout_log_probs, x, mask)
    for criterion, limit in (reject or {}).items():
        passes = _passes(x, mask, criterion, limit)
        among = mask if criterion.startswith("token") else mask.any(-1, keepdim=True)
        values[f"rejected_{criterion}"] = ~passes[among]
        new_mask = new_mask & passes
    values["rejected_tokens"] = ~new_mask[mask]
    values["rejected_rows"] = ~new_mask.any(-1)[mask.any(-1)]
    weights = None
    if level is not None:
        if level not in ("token", "sequence", "geometric") or action not in ("truncate", "mask"):
            raise InputError(f"not level {level!r}, action {action!r}: token, sequence or geometric; truncate or mask")
        low, high = _bounds("the importance weight", bounds)
        ratio = _ratio(x, mask, level)  # (B, T) or (B, 1)
        outside = (ratio < low) | (ratio > high)
        weights = ratio.clamp(low, high) if action == "truncate" else ratio.masked_fill(outside, 0)
        among = new_mask if level == "token" else new_mask.any(-1, keepdim=True)
        if batch_normalize:
            weights = weights / masked_mean(weights, among).clamp(min=1e-300)
        values["is_clipped"], values["is_weight"] = outside[among], weights[among]
        weights = _keep(weights.expand(mask.shape), new_mask).to(torch.promote_types(old_log_prob.dtype, torch.float32))
    metrics = {f"rollout/{name}": value.double().mean().item() for name, value in values.items() if len(value)}
    return weights, new_mask.to(response_mask.dtype), metrics


def _mismatch(old_log_prob: Tensor, rollout_log_probs: Tensor, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Metrics that mismatch_metrics in lib/log/metrics.py does not have, each as the values whose mean is the metric.

    ess: the effective sample size under weights r, as a fraction of the tokens, (Σr)²/(N·Σr²). prob_pearson: the
    correlation of π_train and π_rollout over tokens; left out if one of them is constant."""
    if not mask.any():
        return {}
    alive = mask.any(-1)
    train, rollout = (-masked_mean(y.double(), mask, dim=-1)[alive] for y in (old_log_prob, rollout_log_probs))
    r = _ratio(x[mask], mask, "token")
    values = {
        "ppl_train": train.exp(),
        "ppl_rollout": rollout.exp(),
        "log_ppl_diff": train - rollout,
        "log_ppl_abs_diff": (train - rollout).abs(),
        "chi2_seq": _ratio(x, mask, "sequence")[alive, 0].square() - 1,
        "ess": r.mean().square()[None] / r.square().mean(),
    }
    p, q = (y[mask].double().exp() for y in (old_log_prob, rollout_log_probs))
    p, q = p - p[0], q - q[0]  # exactly 0 if constant, where a rounded mean may leave noise
    p, q = p - p.mean(), q - q.mean()
    if p.any() and q.any():
        values["prob_pearson"] = (p @ q)[None] / (p.norm() * q.norm())
    return values
