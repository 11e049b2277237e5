"""The masks of a step, masked reductions, sums over the groups of outcomes, and the aggregation of a loss."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lib import InputError

Index = Sequence | np.ndarray | Tensor  # (B,): rows of equal id are one group
ROUNDING = 2.0**-20
"""Of the sum of a row's |r|: so much may a score be off, a sum of a few float32, each rounded by 2^-24 or less: 0.1 +
0.2 is 0.3."""


def _keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with exact zeros, and zero gradient, where the mask is 0."""
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} must have the same shape")
    return values.masked_fill(~mask.bool(), 0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Σ x·m over all positions, or along `dim`."""
    return _keep(values, mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Σ x·m / Σ m; 0 where the mask is empty. (verl adds 1e-8 to the denominator; this is exact.)"""
    return masked_sum(values, mask, dim) / mask.bool().sum(dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Σ (x − mean)²·m / (N − 1), N = Σ m. Raises ValueError for N <= 1, where it is not defined."""
    count = int(mask.bool().sum())
    if count <= 1:
        raise ValueError(f"a variance needs at least 2 valid positions, the mask has {count}")
    values = _keep(values, mask)
    return masked_sum((values - masked_mean(values, mask)).square(), mask) / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x − mean) / sqrt(var + 1e-8), 0 at masked positions.

    The statistics are those of this tensor, so gather a batch that is spread over ranks first. Raises ValueError for
    fewer than 2 valid positions."""
    values = _keep(values, mask)
    return _keep((values - masked_mean(values, mask)) * torch.rsqrt(masked_var(values, mask) + 1e-8), mask)


def _outcome_scores(token_level_rewards: Tensor, response_mask: Tensor, index) -> tuple[Tensor, Tensor, Tensor]:
    """The live rows' scores R_i = Σ_t r·m (N,) and group numbers (N,), and which rows are live (B,), on the CPU.

    Dead rows are dropped here, so they cannot affect the others. Scores are float64, so sums of float32 are exact. The
    rewards are rounded: a score within `ROUNDING` of 0 is 0, and scores of a group that differ by less are equal."""
    ids = index.cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    if ids.shape != (len(response_mask),):
        raise ValueError(f"index needs one group id for each of the {len(response_mask)} rows, not shape {ids.shape}")
    alive = response_mask.bool().any(-1)
    rewards = _keep(token_level_rewards, response_mask)[alive].double()
    scores, rounding = rewards.sum(-1).cpu(), ROUNDING * rewards.abs().sum(-1).cpu()
    alive = alive.cpu()
    group = torch.from_numpy(np.unique(ids[alive.numpy()], return_inverse=True)[1])
    scores = scores.where(scores.abs() > rounding, 0)
    low, high = (_group_extreme(scores, group, which) for which in ("amin", "amax"))
    equal = high - low <= _group_extreme(rounding, group, "amax")
    return low.where(equal, scores), group, alive


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """For each row, the sum over its group (N,). In ascending order, on the CPU: row order does not change the bits."""
    order = values.argsort()
    return values.new_zeros(len(torch.bincount(group))).index_add(0, group[order], values[order])[group]


def _group_extreme(values: Tensor, group: Tensor, which: str) -> Tensor:
    """For each row, the smallest ("amin") or the largest ("amax") value of its group (N,)."""
    return torch.zeros_like(values).scatter_reduce(0, group, values, which, include_self=False)[group]


def _rewards_dtype(token_level_rewards: Tensor, *results: Tensor) -> tuple:
    return tuple(x.to(torch.promote_types(token_level_rewards.dtype, torch.float32)) for x in results)


def at_last_token(row_values: Tensor, response_mask: Tensor) -> Tensor:
    """(B,) -> (B, T): each row's value on its last valid token, where an outcome's reward stands; 0 elsewhere."""
    mask = response_mask.bool()
    place = torch.arange(mask.shape[1], device=mask.device) * mask  # (B, T)
    last = mask & (place == place.amax(-1, keepdim=True))
    return _keep(row_values[:, None].expand(mask.shape), last)


def zero_variance_rows(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, reward_components: Tensor | None = None
) -> Tensor:
    """(B,) bool: the live rows of groups of two or more live rows whose scores R_i are all equal, but for rounding.

    Estimators of outcomes give them advantage 0, and DAPO's dynamic sampling, arXiv 2503.14476, drops them. Groups of
    one do not count, since their variance is undefined, not zero. The arguments are those of the estimators. With
    reward_components (B, K), which GDPO compares one by one, each of the K must be equal, whatever their sum is, among
    the rows that have it."""
    if reward_components is not None:
        alive = response_mask.bool().any(1, keepdim=True)  # (B, 1)
        signal = torch.zeros_like(alive[:, 0])
        for rewards in reward_components.split(1, dim=1):
            known = alive & ~rewards.isnan()
            signal |= known[:, 0] & ~zero_variance_rows(rewards, known, index)
        return alive[:, 0] & (group_mean(signal.double(), alive, index, "zero") == 0)
    scores, group, alive = _outcome_scores(token_level_rewards, response_mask, index)
    low, high = (_group_extreme(scores, group, which) for which in ("amin", "amax"))
    rows = torch.zeros_like(alive)
    rows[alive] = (low == high) & (torch.bincount(group)[group] > 1)
    return rows.to(response_mask.device)


def group_mean(scores: Tensor, response_mask: Tensor, index: Index, singleton: str = "raw") -> Tensor:
    """(B,) float64: for each row, the mean score of its group, over the rows that have a valid token.

    scores (B,); response_mask (B, T); index (B,): rows of equal id are one group. The mean of scores that are equal,
    but for rounding, is each row's own. A group with one such row: 0 if singleton is "raw", as in verl, or its own
    score if "zero"."""
    return _group_statistics(scores, response_mask, index, singleton)[0]


def group_std(scores: Tensor, response_mask: Tensor, index: Index, singleton: str = "raw") -> Tensor:
    """(B,) float64: for each row, the standard deviation, with N - 1, of the scores of its group, as `group_mean`.

    A group with one row that has a valid token: 1 if singleton is "raw", as in verl, or 0 if "zero"."""
    return _group_statistics(scores, response_mask, index, singleton)[1]


def _group_statistics(scores: Tensor, response_mask: Tensor, index, singleton: str) -> tuple[Tensor, Tensor]:
    if singleton not in ("raw", "zero"):
        raise InputError(f"unknown singleton {singleton!r}: choose one of raw, zero")
    valid, given = response_mask.bool().any(-1, keepdim=True), scores  # (B, 1), (B,)
    scores, group, rows = _outcome_scores(scores[:, None], valid, index)
    count = torch.bincount(group)[group]  # (N,), like all that follows
    low, high = (_group_extreme(scores, group, which) for which in ("amin", "amax"))
    shifted = scores - low  # exactly 0 in a group of equal scores, where a rounded mean may leave noise
    mean = _group_sum(shifted, group) / count
    std = (_group_sum((shifted - mean).square(), group) / (count - 1).clamp(min=1)).sqrt()
    mean = given.double().cpu()[rows].where(low == high, low + mean)
    if singleton == "raw":
        mean, std = mean.masked_fill(count == 1, 0), std.masked_fill(count == 1, 1)
    results = torch.zeros(2, len(rows), dtype=torch.float64)
    results[:, rows] = torch.stack([mean, std])
    return tuple(results.to(valid.device))


LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    global_tokens: float | Tensor | None = None,
    global_rows: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """This micro-batch's share of the mini-batch's loss: the *sum* over micro-batches and ranks is the loss.

    token-mean               Σ L·m / tokens                  DAPO, arXiv 2503.14476
    token-sum                Σ L·m
    seq-mean-token-sum       Σ_i Σ_t L·m / rows
    seq-mean-token-mean      Σ_i (Σ_t L·m / Σ_t m) / rows    GRPO, arXiv 2402.03300
    seq-mean-token-sum-norm  Σ_i Σ_t L·m / rows / C          Dr. GRPO, arXiv 2503.20783; C = loss_scale_factor

    All (B, T). `global_tokens` and `global_rows` count the valid tokens, and the rows with at least one, of the whole
    mini-batch: all its micro-batches on all ranks. Give both, or neither to count them in `loss_mask`. A count of 0
    gives 0, not NaN. FSDP averages gradients over ranks, but a sum is wanted: lib/model/trained.py multiplies by
    world_size. C is a constant, such as the maximal response length. Without one verl takes the padded width, so that
    the loss depends on the longest response; here a missing C is an InputError, like an unknown mode."""
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise InputError(f"unknown loss_agg_mode {loss_agg_mode!r}: choose one of {', '.join(LOSS_AGG_MODES)}")
    if (global_tokens is None) != (global_rows is None):
        raise ValueError("give both global_tokens and global_rows, or neither")
    if global_tokens is None or global_rows is None:
        global_tokens, global_rows = loss_mask.bool().sum(), loss_mask.bool().any(-1).sum()
    token_loss = masked_sum(loss_mat, loss_mask)
    if loss_agg_mode == "token-mean":
        return token_loss / max(global_tokens, 1)
    if loss_agg_mode == "token-sum":
        return token_loss
    if loss_agg_mode == "seq-mean-token-sum":
        return token_loss / max(global_rows, 1)
    if loss_agg_mode == "seq-mean-token-mean":
        return masked_mean(loss_mat, loss_mask, dim=-1).sum() / max(global_rows, 1)
    if loss_scale_factor is None or not loss_scale_factor > 0:
        raise InputError(f"seq-mean-token-sum-norm needs a constant loss_scale_factor > 0, not {loss_scale_factor}")
    return token_loss / max(global_rows, 1) / loss_scale_factor


class LossMasks:
    """The masks (B, T) of all ranks' rows, narrowed by one rule after the other.

    loss_mask: tokens that are trained on. denominator_mask: tokens that are counted in the means of the loss.
    valid_mask: tokens of the rows that are in a group, and in the statistics of advantages. dropped: for each reason,
    the rows whose last token it took from the loss; `dead` is without a token or a score from the start."""

    def __init__(self, response_mask: Tensor):
        self.loss_mask = self.denominator_mask = self.valid_mask = mask = response_mask.bool()
        self.dropped = {"training/rows_dropped/dead": float((~mask.any(1)).sum())}

    def drop(self, what: Tensor, reason: str, *, uncount: bool = False, out_of_group: bool = False) -> None:
        """Takes tokens (B, T) or rows (B,) from the loss; with `uncount` also from its means. out_of_group: rows that
        are left without a token are in no group."""
        what, before = what if what.ndim == 2 else what[:, None], self.loss_mask.any(1)
        self.loss_mask = self.loss_mask & ~what
        after = self.loss_mask.any(1)
        if uncount:
            self.denominator_mask = self.denominator_mask & ~what
        if out_of_group:
            self.valid_mask = self.valid_mask & after[:, None]
        self.dropped[f"training/rows_dropped/{reason}"] = float((before & ~after).sum())

    def columns(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("loss_mask", "denominator_mask", "valid_mask")}
