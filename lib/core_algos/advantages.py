"""Advantage estimators and the critic's loss.

The tensors are the *global* batch, which the script gathers over ranks. Groups are whole.

- Values at masked positions do not count, even if they are NaN. Results are 0 there.
- A dead row (no valid token) is in no group, count or statistic; the other rows' results are bit-equal without it.
- R_i = Σ_t r·m. A group with one live row has no baseline: with `singleton` "raw" A = R unless said otherwise, as in
  verl; with "zero" A = 0 (before whitening, where there is one).
- A batch with only one valid token is not whitened.

Estimators return advantages (B, T) and returns (B, T), an outcome estimator one tensor twice. Statistics are in
float64; results have the dtype of the rewards, float32 at least.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from lib import InputError
from lib.core_algos.reductions import (
    Index,
    _keep,
    _rewards_dtype,
    at_last_token,
    group_mean,
    group_std,
    masked_sum,
    masked_whiten,
)
from lib.declared import ADV_ESTIMATORS, named

Advantages = tuple[Tensor, Tensor]  # advantages (B, T), returns (B, T)


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
    valid token, 0 elsewhere (B, T). len is that token's position, so tool output before it counts."""
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
) -> Advantages:
    """GRPO, arXiv 2402.03300: A_i = (R_i − mean_g) / (std_g + epsilon) on every valid token of row i; std with N − 1.

    `norm_adv_by_std_in_grpo=False` is Dr. GRPO, arXiv 2503.20783: A_i = R_i − mean_g.
    token_level_rewards, response_mask (B, T); index (B,): rows of equal id are one group. Equal rewards give 0."""
    scores = masked_sum(token_level_rewards.double(), response_mask, dim=-1)  # (B,)
    advantages = scores - group_mean(scores, response_mask, index, singleton)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (group_std(scores, response_mask, index, singleton) + epsilon)
    advantages = _keep(advantages[:, None].expand(response_mask.shape), response_mask)
    return _rewards_dtype(token_level_rewards, advantages, advantages)


@torch.no_grad()
def _gae(rewards: Tensor, values: Tensor | None, mask: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """A_t = δ_t + γλ·A', δ_t = r_t + γ·V' − V_t (B, T) in float64, 0 at masked positions; `lam` a number or (B,).

    A' and V' belong to the next *valid* token. With values None (0) and λ = 1 this is the discounted reward to go. It
    runs on the CPU, where a column of tokens costs no kernel launches."""
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
) -> Advantages:
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

    All (B, T). math.inf turns the clip off. Only vpreds is differentiated. Returns losses for `agg_loss`, 0 at masked
    positions, and a detached metric: critic/vf_clipfrac, where the clip decides."""
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


@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> Advantages:
    """ReMax, arXiv 2310.10505: A_t = Σ_{k≥t} r_k − b_i, b (B,) the reward of one greedy response to the same prompt."""
    if reward_baselines.shape != response_mask.shape[:1]:
        raise ValueError(f"reward_baselines must be one number a row, not {tuple(reward_baselines.shape)}")
    returns = _gae(token_level_rewards, None, response_mask, 1.0, 1.0)
    return _rewards_dtype(token_level_rewards, _keep(returns - reward_baselines[:, None], response_mask), returns)


def get_adv_estimator_fn(name: str, settings: Mapping | None = None) -> Callable[..., Advantages]:
    """The estimator of that name with these hyper-parameters: estimator(token_level_rewards, response_mask, index,
    **the columns that it declares). Raises InputError for an unknown estimator; it lists the names."""
    return partial(named(ADV_ESTIMATORS, name).load(), **settings or {})


def estimate_advantages(
    name: str, settings: Mapping, rewards: Tensor, response_mask: Tensor, tensors: Mapping[str, Tensor]
) -> Advantages:
    """(advantages, returns) (B, T) by the estimator of that name. tensors: `group` (B,), and the columns that it
    declares; rollout_is_weights only if a correction has weights."""
    columns = {column: tensors[column] for column in ADV_ESTIMATORS[name].columns if column in tensors}
    return get_adv_estimator_fn(name, settings)(rewards, response_mask, tensors["group"], **columns)
