"""Estimators that compare the outcomes of a group, or whiten those of a batch. Conventions: advantages.py."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lib import InputError
from lib.core_algos.advantages import Advantages, _gae, _whiten, compute_grpo_outcome_advantage
from lib.core_algos.reductions import ROUNDING, Index, _group_sum, _keep, _outcome_scores, _rewards_dtype, group_mean
from lib.declared import Discount, Names, Positive, Singleton, Weights


def _outcomes(rewards: Tensor, mask: Tensor, index: Index, singleton: str) -> tuple:
    """For the live rows, in float64 on the CPU: R (N,), R − mean_g (N,), the group number (N,), the group's size (N,);
    and a function that spreads A over their tokens: (N,) -> advantages (B, T), returns (B, T)."""
    scores, group, alive = _outcome_scores(rewards.detach(), mask, index)
    centred = scores - group_mean(scores, torch.ones(len(scores), 1), group, singleton)

    def spread(values: Tensor) -> tuple:
        rows = values.new_zeros(len(alive))
        rows[alive] = values
        advantages = _keep(rows.to(mask.device)[:, None].expand(mask.shape), mask)
        return _rewards_dtype(rewards, advantages, advantages)

    return scores, centred, group, torch.bincount(group)[group], spread


def _groups(scores: Tensor, group: Tensor) -> Iterator[Tensor]:
    """The row numbers of each group of two or more, by ascending score."""
    for g in (torch.bincount(group) > 1).nonzero()[:, 0]:
        rows = (group == g).nonzero()[:, 0]
        yield rows[scores[rows].argsort()]


def grpo(
    token_level_rewards, response_mask, index, *, epsilon: Positive = 1e-6, singleton: Singleton = "raw"
) -> Advantages:
    """GRPO, arXiv 2402.03300: A_i = (R_i − mean_g) / (std_g + epsilon)."""
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, index, epsilon, True, singleton)


def dr_grpo(token_level_rewards, response_mask, index, *, singleton: Singleton = "raw") -> Advantages:
    """Dr. GRPO, arXiv 2503.20783: A_i = R_i − mean_g."""
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=False, singleton=singleton
    )


def grpo_passk(
    token_level_rewards, response_mask, index, *, epsilon: Positive = 1e-6, norm_adv_by_std_in_grpo: bool = True
) -> Advantages:
    """Pass@k, arXiv 2503.19595: A = (R_max − R_second) / (std_g + epsilon) for a group's best, 0 for the others.

    A tie gives 0, and so does a group of one, which has no second (verl: ValueError)."""
    scores, _, group, _, spread = _outcomes(token_level_rewards, response_mask, index, "zero")
    advantages = torch.zeros_like(scores)
    for rows in _groups(scores, group):
        ordered = scores[rows]
        divisor = (ordered - ordered[0]).std() + epsilon if norm_adv_by_std_in_grpo else 1
        advantages[rows[-1]] = (ordered[-1] - ordered[-2]) / divisor
    return spread(advantages)


def rloo(token_level_rewards, response_mask, index, *, singleton: Singleton = "raw") -> Advantages:
    """RLOO, arXiv 2402.14740: A_i = R_i − mean_{j≠i} R_j = (R_i − mean_g)·G/(G − 1).

    A group of one: "raw" is verl's rloo, "zero" its rloo_vectorized."""
    _, centred, _, size, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    return spread(centred * size / (size - 1).clamp(min=1))


def grpo_leave_one_out(
    token_level_rewards, response_mask, index, *, epsilon: Positive = 1e-6, singleton: Singleton = "raw"
) -> Advantages:
    """GRPO with the others' statistics (NeMo-RL, AReaL): A_i = (R_i − mean_{j≠i} R_j) / (std_{j≠i} + epsilon).

    If the others' rewards are equal, but for rounding, A is not divided: a std of rounding noise would blow it up."""
    scores, advantages, group, _, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    for rows in _groups(scores, group):
        size, ordered = len(rows), scores[rows] - scores[rows[0]]
        others = ordered.expand(size, size)[~torch.eye(size, dtype=torch.bool)].view(size, size - 1)
        rounding = ROUNDING * scores[rows].abs().max()
        loo, differ = ordered - others.mean(1), others[:, -1] - others[:, 0] > rounding
        std = ((others - others.mean(1, keepdim=True)).square().sum(1) / max(size - 2, 1)).sqrt()
        advantages[rows] = torch.where(differ, loo / (std + epsilon), loo)
    return spread(advantages)


def grpo_batch_std(
    token_level_rewards, response_mask, index, *, epsilon: Positive = 1e-4, singleton: Singleton = "raw"
) -> Advantages:
    """Lite PPO, arXiv 2508.08221: A_i = (R_i − mean_g) / (std of all R of the batch + epsilon), std with N − 1.

    If all R are equal, A is not divided. Not in verl; TRL (scale_rewards="batch") has A = 0 in a group of one."""
    scores, centred, _, _, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    ordered = scores.sort().values
    differ = len(scores) and ordered[0] != ordered[-1]
    return spread(centred / (ordered.std() + epsilon) if differ else centred)


def opo(token_level_rewards, response_mask, index, *, singleton: Singleton = "raw") -> Advantages:
    """OPO, arXiv 2505.23585: A_i = R_i − Σ_j len_j·R_j / Σ_j len_j over the group; len counts valid tokens."""
    _, centred, group, size, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    lengths = response_mask.bool().sum(-1).cpu().double()
    lengths = lengths[lengths > 0]  # (N,)
    baseline = _group_sum(lengths * centred, group) / _group_sum(lengths, group)  # a shift of R cancels
    return spread(torch.where(size > 1, centred - baseline, centred))


def gpg(
    token_level_rewards, response_mask, index, *, f_norm: Positive = 1.0, singleton: Singleton = "raw"
) -> Advantages:
    """GPG, arXiv 2504.02546: A_i = α·(R_i − mean_g) / f_norm, α = rows / max(rows with R ≠ 0, 1) of the batch.

    A group of one: "raw" is A = α·R / f_norm."""
    scores, centred, _, _, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    return spread(len(scores) / max(int(scores.count_nonzero()), 1) * centred / f_norm)


def maxrl(token_level_rewards, response_mask, index) -> Advantages:
    """MaxRL, arXiv 2602.02710: A_i = (R_i − mean_g) / mean_g, 0 where mean_g = 0 and in a group of one.

    Raises InputError for an R_i below 0: the mean would not say how often a prompt is solved."""
    scores, centred, group, size, spread = _outcomes(token_level_rewards, response_mask, index, "zero")
    if (scores < 0).any():
        why = f"a response has the reward {float(scores.min()):g}: give scores of 0 and 1, or take another estimator"
        raise InputError(
            f"--adv-estimator maxrl divides by the mean of a group, which needs rewards of 0 or more; {why}"
        )
    mean = _group_sum(scores, group) / size
    return spread(torch.where((mean > 0) & (size > 1), centred / mean, 0))


def gdpo(
    token_level_rewards,
    response_mask,
    index,
    *,
    reward_components,
    reward_keys: Names = (),
    reward_weights: Weights = (),
    singleton: Singleton = "raw",
) -> Advantages:
    """GDPO, arXiv 2601.05242: A_i = whiten(Σ_k w_k·(R_ik − mean_g) / (std_g + 1e-6)) over the batch's tokens.

    reward_components (B, K): K rewards of each row; a row with NaN for k is in no mean or deviation of it and has no
    such term; one without any is not whitened, A = 0. reward_keys: their names in the scorer's result. reward_weights:
    K numbers, 1 by default. In a group of one the quotient is R_ik / (1 + 1e-6) ("raw", as in verl) or 0 ("zero")."""
    weights = reward_weights or [1.0] * reward_components.shape[1]
    if len(weights) != reward_components.shape[1]:
        rewards = " ".join([f"{reward_components.shape[1]} rewards", *reward_keys])
        raise InputError(f"gdpo: {len(weights)} weights for {rewards}: give one for each")
    known = response_mask.bool().any(-1, keepdim=True) & ~reward_components.isnan()  # (B, K)
    components = zip(weights, reward_components.double().split(1, dim=1), known.split(1, dim=1))
    terms = [w * compute_grpo_outcome_advantage(r, m, index, singleton=singleton)[0] for w, r, m in components]
    rows = sum(terms, torch.zeros(()))
    mask = response_mask.bool() & known.any(1, keepdim=True)
    advantages = _whiten(rows.expand(mask.shape), mask)
    return _rewards_dtype(token_level_rewards, advantages, advantages)


def reinforce_plus_plus(token_level_rewards, response_mask, index=None, *, gamma: Discount = 1.0) -> Advantages:
    """REINFORCE++, arXiv 2501.03262: G_t = r_t + γ·G', G' of the next valid token; A = whiten(G); returns = G.

    It has no groups: it takes `index` only because the other estimators do."""
    returns = _gae(token_level_rewards, None, response_mask, gamma, 1.0)
    return _rewards_dtype(token_level_rewards, _whiten(returns, response_mask), returns)


def reinforce_plus_plus_baseline(
    token_level_rewards, response_mask, index, *, singleton: Singleton = "raw"
) -> Advantages:
    """REINFORCE++-baseline, arXiv 2501.03262: A = whiten(R_i − mean_g) over the batch's tokens.

    A group of one enters the whitening as R ("raw", as verl) or 0 ("zero")."""
    _, centred, _, _, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    advantages = _whiten(spread(centred)[0], response_mask)
    return advantages, advantages
