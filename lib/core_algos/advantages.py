"""Advantage estimators and the critic's loss.

The tensors are the *global* batch: the script gathers them over ranks first. Groups must be whole. Batch statistics
(whitening, batch std, gpg's α) are taken over the rows that are passed.

- Values at masked positions do not count, even if they are NaN; this holds for rewards too. Results are 0 there.
- A dead row (no valid token) is in no group, count or statistic; the other rows' results are bit-equal without it.
- R_i = Σ_t r·m. A group with one live row has no baseline: `singleton` "raw" is verl's value, baseline 0, so A = R
  unless said otherwise; "zero" is A = 0 (before whitening, where there is one).
- A batch with only one valid token cannot be whitened. It is left as it is, so that the run goes on.

Estimators return advantages (B, T) and returns (B, T); an outcome estimator returns one tensor twice. Only the value
loss is differentiated. Statistics are in float64; results have the dtype of the rewards, float32 at least.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lib import InputError
from lib.core_algos.reductions import (
    ROUNDING,
    Index,
    _group_sum,
    _keep,
    _outcome_scores,
    _rewards_dtype,
    at_last_token,
    group_mean,
    group_std,
    masked_sum,
    masked_whiten,
)
from lib.core_algos.settings import _bind, _lookup, _tensors

Pair = tuple[Tensor, Tensor]  # advantages (B, T), returns (B, T)


def _outcomes(rewards: Tensor, mask: Tensor, index: Index, singleton: str) -> tuple:
    """For the live rows, in float64 on the CPU: R (N,), R − mean_g (N,), the group number (N,), the group's size (N,);
    and a function that spreads A over their tokens: (N,) -> advantages (B, T), returns (B, T).

    R − mean_g is exactly 0 in a group of equal R; in a group of one it is R if "raw", 0 if "zero"."""
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


def _whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`masked_whiten` on sorted tokens, so the bits do not depend on row order; exactly 0 if all tokens are equal."""
    valid = mask.bool()
    tokens, order = values[valid].double().sort()
    if len(tokens) > 1:
        tokens = masked_whiten(tokens - tokens[0], torch.ones_like(tokens))
    whitened = torch.empty_like(tokens)
    whitened[order] = tokens
    return _keep(values, mask).masked_scatter(valid, whitened.to(values.dtype))


def compute_overlong_penalty(
    response_mask, max_response_length: int, overlong_buffer: int, penalty_factor: float
) -> Tensor:
    """DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13, to be added to the rewards.

    min(0, −(len − (max_response_length − overlong_buffer)) / overlong_buffer · penalty_factor) on a live row's last
    valid token, 0 elsewhere (B, T) float32. len is that token's position, so tool output before it counts. Lengths are
    in tokens. Raises InputError unless 0 < overlong_buffer <= max_response_length."""
    if not 0 < overlong_buffer <= max_response_length:
        raise InputError(
            f"overlong_buffer must be in 1..max_response_length = {max_response_length}, not {overlong_buffer}"
        )
    length = (torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device) * response_mask.bool()).amax(-1)
    excess = (length - (max_response_length - overlong_buffer)).clamp(min=0)  # (B,)
    return at_last_token(-excess / overlong_buffer * penalty_factor, response_mask)


@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    singleton: str = "raw",
) -> Pair:
    """GRPO, arXiv 2402.03300: A_i = (R_i − mean_g) / (std_g + epsilon) on every valid token of row i; std with N − 1.

    `norm_adv_by_std_in_grpo=False` is Dr. GRPO, arXiv 2503.20783: A_i = R_i − mean_g.
    token_level_rewards, response_mask (B, T); index (B,): rows of equal id are one group. Equal rewards give exactly 0.
    Beware of singleton "raw" if rows can be dead: a group's only live row has its bare reward as advantage."""
    scores = masked_sum(token_level_rewards.double(), response_mask, dim=-1)  # (B,)
    advantages = scores - group_mean(scores, response_mask, index, singleton)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (group_std(scores, response_mask, index, singleton) + epsilon)
    advantages = _keep(advantages[:, None].expand(response_mask.shape), response_mask)
    return _rewards_dtype(token_level_rewards, advantages, advantages)


# ---------------------------------------------------------------------------------------- with a critic


@torch.no_grad()
def _gae(rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """A_t = δ_t + γλ·A', δ_t = r_t + γ·V' − V_t (B, T) in float64, 0 at masked positions; `lam` a number or (B,).

    A' and V' are those of the next *valid* token, as if the tool output between them were not there.
    With values None (0) and λ = 1 this is the discounted reward to go. It runs on the CPU, where a column of tokens
    costs no eight kernel launches."""
    device, valid = rewards.device, mask.bool().cpu()
    values = torch.zeros_like(rewards) if values is None else values
    rewards, values = (_keep(x, mask).double().cpu() for x in (rewards, values))
    lam = lam.cpu() if isinstance(lam, Tensor) else lam
    advantages = torch.zeros_like(rewards)
    last = next_value = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        last = torch.where(valid[:, t], delta + gamma * lam * last, last)
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        advantages[:, t] = last
    return _keep(advantages, valid).to(device)


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    lam_policy: float | Tensor | None = None,
) -> Pair:
    """GAE, arXiv 1506.02438: A_t = Σ_k (γλ)^k·δ_{t+k}, δ_t = r_t + γV_{t+1} − V_t; returns = A + V. A is then whitened.

    All (B, T). t counts valid tokens, so tool output changes nothing. `lam_policy` gives VAPO's decoupled GAE, arXiv
    2504.05118: returns use `lam` (1 in the paper), advantages use λ = lam_policy, a number or one per row (B,)."""
    returns = advantages = _gae(token_level_rewards, values, response_mask, gamma, lam)
    if lam_policy is not None:
        advantages = _gae(token_level_rewards, values, response_mask, gamma, lam_policy)
    returns = returns + _keep(values, response_mask)
    return _rewards_dtype(token_level_rewards, _whiten(advantages, response_mask), returns)


def length_adaptive_lam(response_mask: Tensor, alpha: float) -> Tensor:
    """VAPO, arXiv 2504.05118: λ_i = 1 − 1/(α·len_i), at least 0 (B,), for `lam_policy`. 0.05 is the paper's α."""
    if not alpha > 0:
        raise InputError(f"the alpha of the length-adaptive lambda must be > 0, not {alpha}")
    return (1 - 1 / (alpha * response_mask.bool().sum(-1).clamp(min=1).double())).clamp(min=0)


def compute_value_loss(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's critic: L = ½·max((v − R)², (clip(v, V ± cliprange_value) − R)²), v = vpreds, V = values before the update.

    All (B, T). A cliprange_value of math.inf turns the clip off. Only vpreds is differentiated. Returns losses (B, T)
    for `agg_loss`, 0 at masked positions, and a detached (B, T) metric: critic/vf_clipfrac, where the clip decides."""
    if not cliprange_value > 0:
        raise InputError(f"cliprange_value must be > 0, not {cliprange_value}")
    vpreds = _keep(vpreds, response_mask)
    returns, values = (_keep(x, response_mask).detach() for x in (returns, values))
    unclipped = (vpreds - returns).square()
    clipped = (vpreds.clamp(values - cliprange_value, values + cliprange_value) - returns).square()
    return 0.5 * torch.maximum(unclipped, clipped), {"critic/vf_clipfrac": (clipped > unclipped).to(vpreds.dtype)}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask, all (B, T), of the batch of all ranks. It is 1 for a
    perfect critic, 0 for one that knows only the mean, and 0 if the returns are all equal, but for rounding."""
    values, returns = values[mask.bool()].double(), returns[mask.bool()].double()
    variance = float(returns.var(correction=0)) if len(returns) else 0.0
    if not variance or variance <= 1e-14 * float(returns.square().mean()):
        return 0.0
    return 1 - float((returns - values).var(correction=0)) / variance


# ------------------------------------------------------------------------ outcomes against their group


def compute_grpo_passk_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True, singleton="raw"
) -> Pair:
    """Pass@k, arXiv 2503.19595: A = (R_max − R_second) / (std_g + epsilon) for a group's best, 0 for the others.

    A tie gives 0, and so does a group of one, "raw" or "zero": it has no second (verl: ValueError, so that a run ends
    at a group of which a failed scorer or a rejection leaves one row)."""
    scores, _, group, _, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    advantages = torch.zeros_like(scores)
    for rows in _groups(scores, group):
        ordered = scores[rows]
        divisor = (ordered - ordered[0]).std() + epsilon if norm_adv_by_std_in_grpo else 1
        advantages[rows[-1]] = (ordered[-1] - ordered[-2]) / divisor
    return spread(advantages)


def compute_rloo_outcome_advantage(token_level_rewards, response_mask, index, singleton="raw") -> Pair:
    """RLOO, arXiv 2402.14740: A_i = R_i − mean_{j≠i} R_j = (R_i − mean_g)·G/(G − 1).

    A group of one: "raw" is verl's rloo, "zero" its rloo_vectorized."""
    _, centred, _, size, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    return spread(centred * size / (size - 1).clamp(min=1))


def compute_grpo_leave_one_out_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, singleton="raw"
) -> Pair:
    """GRPO with the others' statistics (NeMo-RL, AReaL): A_i = (R_i − mean_{j≠i} R_j) / (std_{j≠i} + epsilon).

    If all the others' rewards are equal, but for rounding, A is not divided: their std may be above 0 by rounding, so
    that A would explode. Not in verl; NeMo-RL has A = 0 in a group of one."""
    scores, advantages, group, _, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    for rows in _groups(scores, group):
        size, ordered = len(rows), scores[rows] - scores[rows[0]]
        others = ordered.expand(size, size)[~torch.eye(size, dtype=torch.bool)].view(size, size - 1)
        rounding = ROUNDING * scores[rows].abs().max()
        loo, differ = ordered - others.mean(1), others[:, -1] - others[:, 0] > rounding
        std = ((others - others.mean(1, keepdim=True)).square().sum(1) / max(size - 2, 1)).sqrt()
        advantages[rows] = torch.where(differ, loo / (std + epsilon), loo)
    return spread(advantages)


def compute_grpo_batch_std_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-4, singleton="raw"
) -> Pair:
    """Lite PPO, arXiv 2508.08221: A_i = (R_i − mean_g) / (std of all R of the batch + epsilon), std with N − 1.

    If all R are equal, A is not divided. Not in verl; TRL (scale_rewards="batch") has A = 0 in a group of one."""
    scores, centred, _, _, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    ordered = scores.sort().values
    differ = len(scores) and ordered[0] != ordered[-1]
    return spread(centred / (ordered.std() + epsilon) if differ else centred)


def compute_opo_outcome_advantage(token_level_rewards, response_mask, index, singleton="raw") -> Pair:
    """OPO, arXiv 2505.23585: A_i = R_i − Σ_j len_j·R_j / Σ_j len_j over the group; len counts valid tokens."""
    _, centred, group, size, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    lengths = response_mask.bool().sum(-1).cpu().double()
    lengths = lengths[lengths > 0]  # (N,)
    baseline = _group_sum(lengths * centred, group) / _group_sum(lengths, group)  # a shift of R cancels
    return spread(torch.where(size > 1, centred - baseline, centred))


def compute_gpg_outcome_advantage(token_level_rewards, response_mask, index, f_norm=1.0, singleton="raw") -> Pair:
    """GPG, arXiv 2504.02546: A_i = α·(R_i − mean_g) / f_norm, α = rows / max(rows with R ≠ 0, 1) of the batch.

    A group of one: "raw" is A = α·R / f_norm."""
    scores, centred, _, _, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    return spread(len(scores) / max(int(scores.count_nonzero()), 1) * centred / f_norm)


def compute_maxrl_outcome_advantage(token_level_rewards, response_mask, index, singleton="raw") -> Pair:
    """MaxRL, arXiv 2602.02710: A_i = (R_i − mean_g) / mean_g, 0 where mean_g = 0. Raises InputError for an R_i below 0:
    with it the mean is no measure of how often a prompt is solved.

    A group of one gives 0 by the formula, "raw" or "zero" (the paper's code takes mean 0 there: A = R / epsilon)."""
    scores, centred, group, size, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    if (scores < 0).any():
        why = f"a response has the reward {float(scores.min()):g}: give scores of 0 and 1, or take another estimator"
        raise InputError(
            f"--adv-estimator maxrl divides by the mean of a group, which needs rewards of 0 or more; {why}"
        )
    mean = _group_sum(scores, group) / size
    return spread(torch.where((mean > 0) & (size > 1), centred / mean, 0))


def compute_gdpo_outcome_advantage(
    token_level_rewards, response_mask, index, *, reward_components, reward_weights=None, singleton="raw"
) -> Pair:
    """GDPO, arXiv 2601.05242: A_i = whiten(Σ_k w_k·(R_ik − mean_g) / (std_g + 1e-6)) over the batch's tokens.

    reward_components (B, K): K rewards of each row, or NaN: a row without reward k is in no mean or deviation of it and
    has no such term; one without any is not whitened, A = 0. reward_weights: K numbers, 1 by default. Of
    token_level_rewards only the dtype is used. In a group of one the quotient is R_ik / (1 + 1e-6) ("raw", as in verl)
    or 0 ("zero")."""
    weights = [1.0] * reward_components.shape[1] if reward_weights is None else reward_weights
    if len(weights) != reward_components.shape[1]:
        raise InputError(f"gdpo: {len(weights)} weights for {reward_components.shape[1]} rewards: give one for each")
    known = response_mask.bool().any(-1, keepdim=True) & ~reward_components.isnan()  # (B, K)
    components = zip(weights, reward_components.double().split(1, dim=1), known.split(1, dim=1))
    rows = sum(w * compute_grpo_outcome_advantage(r, m, index, singleton=singleton)[0] for w, r, m in components)
    mask = response_mask.bool() & known.any(1, keepdim=True)
    advantages = _whiten(rows.expand(mask.shape), mask)
    return _rewards_dtype(token_level_rewards, advantages, advantages)


# --------------------------------------------------------------------------- REINFORCE and its baselines


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards, response_mask, index=None, gamma=1.0, singleton="raw"
) -> Pair:
    """REINFORCE++, arXiv 2501.03262: G_t = r_t + γ·G', G' of the next valid token; A = whiten(G); returns = G.

    It has no groups: it takes `index` and `singleton` only because the other estimators do."""
    returns = _gae(token_level_rewards, None, response_mask, gamma, 1.0)
    return _rewards_dtype(token_level_rewards, _whiten(returns, response_mask), returns)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards, response_mask, index, singleton="raw"
) -> Pair:
    """REINFORCE++-baseline, arXiv 2501.03262: A = whiten(R_i − mean_g) over the batch's tokens.

    A group of one enters the whitening as R ("raw", as verl) or 0 ("zero")."""
    _, centred, _, _, spread = _outcomes(token_level_rewards, response_mask, index, singleton)
    advantages = _whiten(spread(centred)[0], response_mask)
    return advantages, advantages


@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> Pair:
    """ReMax, arXiv 2310.10505: A_t = Σ_{k≥t} r_k − b_i, b (B,) the reward of one greedy response to the same prompt."""
    if reward_baselines.shape != response_mask.shape[:1]:
        raise ValueError(f"reward_baselines must be one number a row, not {tuple(reward_baselines.shape)}")
    returns = _gae(token_level_rewards, None, response_mask, 1.0, 1.0)
    return _rewards_dtype(token_level_rewards, _keep(returns - reward_baselines[:, None], response_mask), returns)


@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards, response_mask, index, squared_score, rollout_is_weights=None, singleton="raw"
) -> Pair:
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


def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards, response_mask, index, squared_score, rollout_is_weights=None, singleton="raw"
) -> Pair:
    """The optimal token baseline for several turns, as in verl: a row's nth valid token is compared with the others'
    nth valid token, however much tool output comes before them."""
    order = response_mask.bool().int().argsort(dim=1, descending=True, stable=True)  # valid tokens first
    rewards, mask, squared = (x.gather(1, order) for x in (token_level_rewards, response_mask, squared_score))
    weights = None if rollout_is_weights is None else rollout_is_weights.gather(1, order)
    pair = compute_optimal_token_baseline_advantage(rewards, mask, index, squared, weights, singleton)
    advantages, returns = (torch.zeros_like(x).scatter(1, order, x) for x in pair)
    return advantages, returns


# ------------------------------------------------------------------------ credit for the turns of an episode


class Turns(NamedTuple):
    """The turns of the live rows, in float64 on the CPU."""

    rewards: Tensor  # (N, K): r_ik, the sum of the rewards of the tokens of turn k
    exists: Tensor  # (N, K) bool: whether the row has that turn
    starts: Tensor  # (N, T) bool: the first token of each turn
    group: Tensor  # (N,)
    scores: Tensor  # (N,): R_i
    alive: Tensor  # (B,) bool
    spread: Callable[[Tensor], Pair]  # A of each turn, in the order of `exists`, -> advantages (B, T), returns (B, T)


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

    def spread(values: Tensor) -> Pair:
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


def compute_gigpo_advantage(
    token_level_rewards,
    response_mask,
    index,
    *,
    anchor_states,
    turn_numbers=None,
    gamma=0.95,
    turn_coef=1.0,
    epsilon=1e-6,
    norm_adv_by_std_in_grpo=True,
    singleton="raw",
) -> Pair:
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


def compute_mt_grpo_advantage(
    token_level_rewards,
    response_mask,
    index,
    turn_numbers=None,
    turn_coef=1.0,
    epsilon=1e-6,
    norm_adv_by_std_in_grpo=True,
    singleton="raw",
) -> Pair:
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


# estimator(token_level_rewards, response_mask, index, **tensors, **settings); singleton is a setting of all of them
ADV_ESTIMATORS: dict[str, Callable[..., Pair]] = {
    "grpo": partial(compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=True),
    "dr_grpo": partial(compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
    "grpo_passk": compute_grpo_passk_outcome_advantage,
    "grpo_leave_one_out": compute_grpo_leave_one_out_outcome_advantage,
    "grpo_batch_std": compute_grpo_batch_std_outcome_advantage,
    "rloo": compute_rloo_outcome_advantage,
    "opo": compute_opo_outcome_advantage,
    "gpg": compute_gpg_outcome_advantage,
    "maxrl": compute_maxrl_outcome_advantage,
    "gdpo": compute_gdpo_outcome_advantage,
    "optimal_token_baseline": compute_optimal_token_baseline_advantage,
    "tir_optimal_token_baseline": compute_multi_turn_optimal_token_baseline_advantage,
    "gigpo": compute_gigpo_advantage,
    "mt_grpo": compute_mt_grpo_advantage,
    "reinforce_plus_plus": compute_reinforce_plus_plus_outcome_advantage,
    "reinforce_plus_plus_baseline": compute_reinforce_plus_plus_baseline_outcome_advantage,
}

# {name: columns that it takes by keyword}; rollout_is_weights only if a correction has weights
ADV_TENSORS = {name: _tensors(estimator, 3) for name, estimator in ADV_ESTIMATORS.items()}


def get_adv_estimator_fn(name: str, settings: Mapping | None = None) -> Callable[..., Pair]:
    """The estimator of that name with these settings bound: estimator(token_level_rewards, response_mask, index,
    **tensors of ADV_TENSORS).

    Raises InputError for an unknown estimator (it lists the names) or a bad setting."""
    estimator = _lookup("advantage estimator", ADV_ESTIMATORS, name)
    return _bind(f"advantage estimator {name!r}", estimator, settings or {}, 3, ADV_TENSORS[name])


def estimate_advantages(name: str, settings: Mapping, rewards, response_mask, tensors: Mapping[str, Tensor]) -> Pair:
    """(advantages, returns) (B, T) by the estimator of that name. tensors: `group` (B,), and those that it needs."""
    others = {key: tensors[key] for key in ADV_TENSORS[name] if key in tensors}
    return get_adv_estimator_fn(name, settings)(rewards, response_mask, tensors["group"], **others)
