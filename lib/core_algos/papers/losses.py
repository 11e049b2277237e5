"""Policy losses, one function per paper. Conventions: policy_losses.py."""

import torch

from lib import InputError
from lib.core_algos.policy_losses import Loss, _exp, _metrics, _ppo_clip, _prepare, compute_policy_loss
from lib.core_algos.reductions import _keep, masked_mean
from lib.declared import Clip, Limit, NonNegative, OfRatio, Positive


def gpg(old_log_prob, log_prob, advantages, response_mask) -> Loss:
    """GPG, arXiv 2504.02546: L = −A·log_prob. Only the metric uses old_log_prob."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    return -advantages * log_prob, _metrics(log_ratio)


def reinforce(old_log_prob, log_prob, advantages, response_mask, *, ratio_high: Limit = 2.0) -> Loss:
    """REINFORCE with truncated importance weights: L = −sg(min(ρ, ratio_high))·A·log_prob."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    ratio = _exp(log_ratio.detach())
    return -ratio.clamp(max=ratio_high) * advantages * log_prob, _metrics(log_ratio, ratio > ratio_high)


def cispo(
    old_log_prob, log_prob, advantages, response_mask, *, cliprange_low: Clip = 1.0, cliprange_high: Clip = 4.0
) -> Loss:
    """CISPO, arXiv 2506.13585: L = −sg(clip(ρ, 1 − low, 1 + high))·A·log_prob. No token loses its gradient.

    The defaults bound ρ only from above, as in the paper, by ScaleRL's 5, arXiv 2510.13786 (verl: 0.2, 0.2)."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    ratio = _exp(log_ratio.detach())
    clipped = ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    return -clipped * advantages * log_prob, _metrics(log_ratio, clipped != ratio)


def gspo(
    old_log_prob, log_prob, advantages, response_mask, *, cliprange_low: Clip = 3e-4, cliprange_high: Clip = 4e-4
) -> Loss:
    """GSPO, arXiv 2507.18071: PPO's clip of s_i = exp(mean_t log ρ_t), the row's geometric mean.

    This is the paper's token form, s_it = sg(s_i)·π_t / sg(π_t): its value is s_i. Aggregate by seq-mean-token-mean;
    by seq-mean-token-sum it is LUSPO, arXiv 2602.05261."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    log_s = masked_mean(log_ratio.detach(), response_mask, dim=-1)[:, None]  # (B, 1)
    ratio = _exp(log_s + log_prob - log_prob.detach())
    losses, clipped = _ppo_clip(ratio, advantages, cliprange_low, cliprange_high)
    return losses, _metrics(log_ratio, clipped)


def geo_mean(
    old_log_prob, log_prob, advantages, response_mask, *, cliprange_low: Clip = 0.4, cliprange_high: Clip = 0.4
) -> Loss:
    """GMPO, arXiv 2507.20673: L_i = −A_i·exp(mean_t d_t), d = min(log ρ, high) if A > 0, max(log ρ, −low) if A < 0.

    The bounds are on the *log* ratio. A token's loss is −A_t·exp(mean d), with a gradient through the whole row, so
    that seq-mean-token-mean gives the paper's mean of L_i. Weights of a rollout correction multiply tokens."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    d, sign = log_ratio.clamp(-20, 20), advantages.sign()
    clipped = torch.minimum(sign * d, sign * d.clamp(-cliprange_low, cliprange_high))
    row_ratio = masked_mean(sign * clipped, response_mask, dim=-1).exp()[:, None]  # (B, 1)
    return -advantages * row_ratio, _metrics(log_ratio, clipped != sign * d)


def sapo(
    old_log_prob, log_prob, advantages, response_mask, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05
) -> Loss:
    """SAPO, arXiv 2511.20347: L = −A·(4/τ)·sigmoid(τ(ρ − 1)); τ = tau_pos where A > 0, else tau_neg."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    tau = torch.where(advantages > 0, tau_pos, torch.full_like(advantages, tau_neg))
    return -advantages * 4 / tau * torch.sigmoid(tau * (_exp(log_ratio) - 1)), _metrics(log_ratio)


def dppo_tv(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    *,
    delta_low: Limit = 0.2,
    delta_high: Limit = 0.2,
    ratio_high: Limit = 20.0,
) -> Loss:
    """DPPO, binary total variation, arXiv 2602.04879: L = −sg(min(ρ, ratio_high))·A·log_prob, but 0 for a token that
    has moved too far: A > 0 and π − π_old > delta_high, or A < 0 and π − π_old < −delta_low."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    moved = (log_prob.exp() - (log_prob - log_ratio).exp()).detach()
    far = ((advantages > 0) & (moved > delta_high)) | ((advantages < 0) & (moved < -delta_low))
    weights = _exp(log_ratio.detach()).clamp(max=ratio_high).masked_fill(far, 0)
    return -weights * advantages * log_prob, _metrics(log_ratio, far)


def dppo_kl(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    *,
    delta_low: Limit = 0.05,
    delta_high: Limit = 0.05,
    ratio_high: Limit = 20.0,
) -> Loss:
    """DPPO, binary KL: as dppo_tv, but with KL = p·log(p/q) + (1 − p)·log((1 − p)/(1 − q)), p = π_old, q = π, a token
    has moved too far if A > 0, q > p and KL > delta_high, or A < 0, q < p and KL > delta_low."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    new, change = log_prob.detach(), log_ratio.detach()
    # p or q may be 1
    not_p, not_q = (-torch.expm1(x).clamp(max=-torch.finfo(x.dtype).eps) for x in (new - change, new))
    kl = -(new - change).exp() * change + not_p * (not_p / not_q).log()
    far = (advantages * change > 0) & (kl > torch.where(advantages > 0, delta_high, delta_low))
    weights = _exp(change).clamp(max=ratio_high).masked_fill(far, 0)
    return -weights * advantages * log_prob, _metrics(log_ratio, far)


def dro(old_log_prob, log_prob, advantages, response_mask, *, dro_beta: OfRatio[NonNegative]) -> Loss:
    """DRO, after arXiv 2405.19107, as in verl: L = −A·log_prob + dro_beta/2·(log_prob − old_log_prob)²."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    return -advantages * log_prob + dro_beta / 2 * log_ratio.square(), _metrics(log_ratio)


def two_sided(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    *,
    cliprange_low: Clip = 0.2,
    cliprange_high: Clip = 0.2,
    delta: Limit = 4.0,
) -> Loss:
    """arXiv 2505.07291: L = −min(min(ρ, delta)·A, clip(ρ, 1 − low, 1 + high)·A), PPO with dual clip at c = delta."""
    if not delta > 1 + cliprange_high:
        raise InputError(f"delta must be > 1 + cliprange_high = {1 + cliprange_high}, not {delta}")
    clip = {"cliprange_low": cliprange_low, "cliprange_high": cliprange_high, "clip_ratio_c": delta}
    return compute_policy_loss(old_log_prob, log_prob, advantages, response_mask, **clip)


def decoupled(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    *,
    rollout_log_probs,
    cliprange_low: Clip = 0.2,
    cliprange_high: Clip = 0.2,
    cap: Positive = 5.0,
) -> Loss:
    """AReaL's decoupled PPO, arXiv 2505.24298: L = min(π_old/π_rollout, cap)·PPO's clip of ρ.

    π_old, the paper's proximal policy, has the trainer's weights before the update."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    behave = _keep(_exp(old_log_prob - rollout_log_probs), response_mask).detach()
    losses, clipped = _ppo_clip(_exp(log_ratio), advantages, cliprange_low, cliprange_high)
    metrics = _metrics(log_ratio, clipped, behave_ratio=behave, behave_clipfrac=behave > cap)
    return behave.clamp(max=cap) * losses, metrics


def clip_cov(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    *,
    cov_keep,
    cliprange_low: Clip = 0.2,
    cliprange_high: Clip = 0.2,
) -> Loss:
    """Clip-Cov, arXiv 2505.22617: PPO's clipped loss, 0 where the token mask cov_keep (B, T) is False."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped = _ppo_clip(_exp(log_ratio), advantages, cliprange_low, cliprange_high)
    return _keep(losses, cov_keep), _metrics(log_ratio, clipped, cov_clipfrac=response_mask.bool() & ~cov_keep.bool())


def kl_cov(old_log_prob, log_prob, advantages, response_mask, *, cov_pick, kl_coef: OfRatio[NonNegative] = 1.0) -> Loss:
    """KL-Cov, arXiv 2505.22617: L = −A·ρ, plus kl_coef·|log_prob − old_log_prob| where the token mask cov_pick
    (B, T) is True."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    losses = -advantages * _exp(log_ratio) + kl_coef * _keep(log_ratio.abs(), cov_pick)
    return losses, _metrics(log_ratio, cov_klfrac=response_mask.bool() & cov_pick.bool())
