"""Policy losses, one function per paper. L is minimised.

    policy_loss(old_log_prob, log_prob, advantages, response_mask, *, ...) -> losses (B, T), {metric: (B, T)}

Tensors are (B, T). Losses and gradients are 0 at masked positions, whatever is there. Only log_prob is differentiated.
`agg_loss` divides by global counts. A loss may look along its own row, which is never split, but not across rows: so no
micro-batch split changes it. What compares rows, such as a quantile, is a mask of token_masks.py.

ρ = exp(log_prob − old_log_prob), log ratio clamped to ±20; A = advantage; sg = stop-gradient; N = number of tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lib import InputError
from lib.core_algos.reductions import _keep
from lib.declared import POLICY_LOSSES, AboveOne, Clip, named

Loss = tuple[Tensor, dict[str, Tensor]]


def _prepare(old_log_prob, log_prob, advantages, mask) -> tuple[Tensor, Tensor, Tensor]:
    """-> log_prob, log ratio (not clamped), advantages, each 0 at masked positions."""
    log_prob = _keep(log_prob, mask)
    return log_prob, log_prob - _keep(old_log_prob, mask).detach(), _keep(advantages, mask).detach()


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20, 20).exp()


def _metrics(log_ratio: Tensor, clipped: Tensor | None = None, **more: Tensor) -> dict[str, Tensor]:
    more = {"ppo_kl": -log_ratio.clamp(-20, 20), **more}
    if clipped is not None:
        more["pg_clipfrac"] = clipped
    return {f"actor/{name}": values.detach().to(log_ratio.dtype) for name, values in more.items()}


def _ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(−A·r, −A·clip(r, 1 − low, 1 + high)), and where it is clipped."""
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def compute_policy_loss(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    *,
    cliprange_low: Clip = 0.2,
    cliprange_high: Clip = 0.2,
    clip_ratio_c: AboveOne = 3.0,
) -> Loss:
    """PPO, arXiv 1707.06347 eq. 7: L = max(−A·ρ, −A·clip(ρ, 1 − low, 1 + high)), ρ = exp(log_prob − old_log_prob).

    low != high is DAPO's clip-higher, arXiv 2503.14476. Dual clip, arXiv 1912.09729: where A < 0, L <= −A·c (c > 1;
    math.inf turns it off).

    Metrics, to be averaged over valid tokens: pg_clipfrac (clipped by PPO), pg_clipfrac_lower (by the dual clip),
    ppo_kl (KL(old ‖ new)). verl returns the aggregated scalar; here the script calls `agg_loss`, with global counts."""
    if not clip_ratio_c > 1:
        raise InputError(f"clip_ratio_c bounds the ratio from above where A < 0 and must be > 1, not {clip_ratio_c}")
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped = _ppo_clip(_exp(log_ratio), advantages, cliprange_low, cliprange_high)
    bound = torch.where(advantages < 0, -advantages * clip_ratio_c, torch.inf)
    return torch.minimum(losses, bound), _metrics(log_ratio, clipped, pg_clipfrac_lower=losses > bound)


def get_policy_loss_fn(name: str, settings: Mapping[str, Any]) -> Callable[..., Loss]:
    """The loss of that name with these hyper-parameters: policy_loss(old_log_prob, log_prob, advantages, response_mask,
    **the columns that it declares). Raises InputError for an unknown loss; it lists the names."""
    return partial(named(POLICY_LOSSES, name).load(), **settings)


def named_policy_loss(name: str, settings: Mapping, old_log_prob, log_prob, tensors: Mapping[str, Tensor]) -> tuple:
    """The policy loss of that name on a micro-batch's tensors (b, T)."""
    columns = {column: tensors[column] for column in POLICY_LOSSES[name].columns}
    loss = get_policy_loss_fn(name, settings)
    return loss(old_log_prob, log_prob, tensors["advantages"], tensors["response_mask"], **columns)
