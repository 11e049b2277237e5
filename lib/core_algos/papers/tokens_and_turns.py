"""Credit for single tokens, and for the turns of an episode. Conventions: advantages.py."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.core_algos.advantages import Advantages, _gae, compute_grpo_outcome_advantage
from lib.core_algos.papers.outcomes import _outcomes
from lib.core_algos.reductions import (
    Index,
    _group_sum,
    _keep,
    _outcome_scores,
    _rewards_dtype,
)
from lib.declared import Discount, NonNegative, Positive, Singleton


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


class Turns(NamedTuple):
    """The turns of the live rows, in float64 on the CPU."""

    rewards: Tensor  # (N, K): r_ik, the sum of the rewards of the tokens of turn k
    exists: Tensor  # (N, K) bool: whether the row has that turn
    starts: Tensor  # (N, T) bool: the first token of each turn
    group: Tensor  # (N,)
    scores: Tensor  # (N,): R_i
    alive: Tensor  # (B,) bool
    spread: Callable[[Tensor], Advantages]
    """A of each turn, in the order of `exists`, -> advantages (B, T), returns (B, T)"""


def _turns(rewards: Tensor, mask: Tensor, index: Index, turn_numbers: Tensor | None) -> Turns:
    """turn_numbers (B, T): of the turn of each valid token, rising from 1. None: a turn is a run of valid tokens."""
    scores, group, alive = _outcome_scores(rewards.detach(), mask, index)
    valid = mask.bool().cpu()[alive]  # (N, T)
    runs = (valid & ~F.pad(valid, (1, -1))).cumsum(1)
    numbers = (runs if turn_numbers is None else turn_numbers.cpu()[alive]).where(valid, 0)
    starts = numbers > F.pad(numbers.cummax(1).values, (1, -1))
    turn = (starts.cumsum(1) - 1).clamp(min=0)  # (N, T): the number of a valid token's turn
    K = int(turn.amax()) + 1 if len(turn) else 0
    tokens = _keep(rewards.detach().cpu()[alive], valid).double()

    of_turns = tokens.new_zeros(len(turn), K).scatter_add(1, turn, tokens)
    exists = torch.arange(K) <= turn.amax(1, keepdim=True)

    def spread(values: Tensor) -> Advantages:
        rows = values.new_zeros(mask.shape)
        rows[alive] = torch.zeros_like(of_turns).masked_scatter(exists, values).gather(1, turn)
        advantages = _keep(rows.to(mask.device), mask)
        return _rewards_dtype(rewards, advantages, advantages)

    return Turns(of_turns, exists, starts, group, scores, alive, spread)


def _among(index: Tensor, scores: Tensor, epsilon: float, by_std: bool, singleton: str = "zero") -> Tensor:
    """GRPO's advantages of the scores (M,), among those with an equal index (M,)."""
    ones = torch.ones(len(scores), 1)
    return compute_grpo_outcome_advantage(scores[:, None], ones, index, epsilon, by_std, singleton)[0][:, 0]


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """The number of each pair (a_i, b_i): equal pairs have an equal one."""
    return torch.stack([a, b], 1).unique(dim=0, return_inverse=True)[1]


def gigpo(
    token_level_rewards,
    response_mask,
    index,
    *,
    anchor_states,
    turn_numbers=None,
    gamma: Discount = 0.95,
    turn_coef: NonNegative = 1.0,
    epsilon: Positive = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    singleton: Singleton = "raw",
) -> Advantages:
    """GiGPO, arXiv 2505.10978: A_ik = A^E_i + turn_coef·A^S_ik on the tokens of turn k.

    A^E_i is GRPO's advantage of the episode, by its R_i. A^S_ik is GRPO's advantage of the turn, by its return
    Σ_{l≥k} gamma^(l−k)·r_il, among all turns of the group that began in the same state, whatever their number; 0 for a
    turn that is alone in its state. anchor_states (B, T): on the tokens of a turn, the id of that state; turn_numbers
    (B, T): the turn of each token, by default a run of valid ones."""
    turns = _turns(token_level_rewards, response_mask, index, turn_numbers)
    returns = turns.rewards.clone()
    for k in reversed(range(returns.shape[1] - 1)):
        returns[:, k] += gamma * returns[:, k + 1]
    row, _ = turns.exists.nonzero(as_tuple=True)  # of each turn
    state = _pairs(turns.group[row], anchor_states.cpu()[turns.alive][turns.starts].long())
    step = _among(state, returns[turns.exists], epsilon, norm_adv_by_std_in_grpo)
    episode = _among(turns.group, turns.scores, epsilon, norm_adv_by_std_in_grpo, singleton)
    return turns.spread(episode[row] + turn_coef * step)


def mt_grpo(
    token_level_rewards,
    response_mask,
    index,
    *,
    turn_numbers=None,
    turn_coef: NonNegative = 1.0,
    epsilon: Positive = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    singleton: Singleton = "raw",
) -> Advantages:
    """Turn-level GRPO (MT-GRPO), arXiv 2505.11821: A_ik = A^O_i + turn_coef·A^T_ik; in the last turn A^O_i alone.

    The reward of the last turn is the outcome; A^O_i is GRPO's advantage by it. A^T_ik is GRPO's advantage of r_ik
    among the kth turns of the group; 0 if there is no other. The paper's episodes all have the same number of turns.
    Here one that ends with its kth turn takes part there with a turn reward of 0, as an episode without a call does in
    the paper. turn_numbers (B, T): the turn of each token, by default a run of valid ones."""
    turns = _turns(token_level_rewards, response_mask, index, turn_numbers)
    row, number = turns.exists.nonzero(as_tuple=True)  # of each turn
    rewards = turns.rewards[turns.exists]
    last = number == turns.exists.sum(1)[row] - 1
    turn = _among(_pairs(turns.group[row], number), rewards.masked_fill(last, 0), epsilon, norm_adv_by_std_in_grpo)
    outcome = _among(turns.group, rewards[last], epsilon, norm_adv_by_std_in_grpo, singleton)
    return turns.spread(outcome[row] + turn_coef * turn.masked_fill(last, 0))
