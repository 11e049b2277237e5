"""Optimal token baselines. Conventions: advantages.py."""

import torch

from lib.core_algos.advantages import Advantages, _gae
from lib.core_algos.papers.outcomes import _outcomes
from lib.core_algos.reductions import (
    _group_sum,
    _keep,
    _rewards_dtype,
)
from lib.declared import Singleton


@torch.no_grad()
def optimal_token_baseline(
    token_level_rewards, response_mask, index, *, squared_score, rollout_is_weights=None, singleton: Singleton = "raw"
) -> Advantages:
    """Optimal token baseline, arXiv 2602.07078: A_it = G_it − B_t, B_t = Σ_i G_it·W_it / (Σ_i W_it + 1e-8), the sums
    over the group's rows valid at t; G = Σ_{k≥t} r_k; W_t = Σ_{j≤t} squared_score_j·w_j², w the IS weights or 1.

    All (B, T); squared_score is 1 − 2π_y + Σ_v π_v², the squared norm of the gradient of log π_y by the logits, of the
    policy that the gradient is of, whoever sampled y. Returns A, G. Where only the longest response reaches,
    it would be its own baseline, so B = 0 there. In a group of one that is everywhere: "raw" is A = G."""
    _, _, group, size, _ = _outcomes(token_level_rewards, response_mask, index, singleton)
    alive = response_mask.bool().any(-1).cpu()
    returns = _gae(token_level_rewards, None, response_mask, 1.0, 1.0)
    energy = squared_score.double()
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.double().square()
    energy = _keep(energy, response_mask)
    togo, energy, valid = (x.cpu()[alive] for x in (returns, energy, response_mask.bool()))  # (N, T)
    energy = _keep(energy.cumsum(1), valid)

    width = valid.shape[1]
    cell = (group[:, None] * width + torch.arange(width)).flatten()  # a position of a group: summed over its rows
    sums = lambda values: _group_sum(values.double().flatten(), cell).view(values.shape)  # noqa: E731
    reached = valid.flip(1).cumsum(1).flip(1) > 0
    baseline = (sums(togo * energy) / (sums(energy) + 1e-8)).masked_fill(sums(reached) == 1, 0)
    if singleton == "zero":
        baseline = torch.where(size[:, None] == 1, togo, baseline)
    advantages = torch.zeros(response_mask.shape, dtype=torch.float64)
    advantages[alive] = _keep(togo - baseline, valid)
    return _rewards_dtype(token_level_rewards, advantages.to(response_mask.device), returns)


def tir_optimal_token_baseline(
    token_level_rewards, response_mask, index, *, squared_score, rollout_is_weights=None, singleton: Singleton = "raw"
) -> Advantages:
    """The optimal token baseline for several turns, as in verl: a row's nth valid token is compared with the others'
    nth valid token, however much tool output comes before them."""
    order = response_mask.bool().int().argsort(dim=1, descending=True, stable=True)  # valid tokens first
    rewards, mask, squared = (x.gather(1, order) for x in (token_level_rewards, response_mask, squared_score))
    weights = None if rollout_is_weights is None else rollout_is_weights.gather(1, order)
    by_order = optimal_token_baseline(
        rewards, mask, index, squared_score=squared, rollout_is_weights=weights, singleton=singleton
    )
    advantages, returns = (torch.zeros_like(x).scatter(1, order, x) for x in by_order)
    return advantages, returns
