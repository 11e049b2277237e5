"""Policy losses, one function per paper. L is minimised.

    policy_loss(old_log_prob, log_prob, advantages, response_mask, *, ...) -> losses (B, T), {metric: (B, T)}

Tensors are (B, T). Losses and their gradients are 0 at masked positions, whatever is there. Only log_prob is
differentiated; metrics are detached; `agg_loss` divides by global counts. A loss may look along its own row (a response
is never split) but never across rows, so no micro-batch split changes it. A choice that compares tokens of different
rows, such as a quantile, is a mask. `compute_token_masks` makes it, without gradient, from the step's batch, gathered
over the ranks; then it is cut into micro-batches like every other key. A mask multiplies losses; denominators do not
change.

ρ = exp(log_prob − old_log_prob), log ratio clamped to ±20; A = advantage; sg = stop-gradient; N = number of tokens.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lib import InputError
from lib.core_algos.noise import GOLDEN, mix64
from lib.core_algos.reductions import _keep, masked_mean
from lib.core_algos.settings import _bind, _lookup, _tensors

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
    old_log_prob, log_prob, advantages, response_mask, *, cliprange_low=0.2, cliprange_high=0.2, clip_ratio_c=3.0
) -> Loss:
    """PPO, arXiv 1707.06347 eq. 7: L = max(−A·ρ, −A·clip(ρ, 1 − low, 1 + high)), ρ = exp(log_prob − old_log_prob).

    low != high is DAPO's clip-higher, arXiv 2503.14476. Dual clip, arXiv 1912.09729: where A < 0, L <= −A·c (c > 1;
    math.inf turns it off).

    Metrics, to be averaged over the valid tokens of the global mini-batch: pg_clipfrac (clipped by PPO),
    pg_clipfrac_lower (by the dual clip), ppo_kl (KL(old ‖ new)). verl returns the aggregated scalar. But scalars of
    uneven micro-batches or ranks do not add up to the loss of the mini-batch, so here the script calls `agg_loss`."""
    if not clip_ratio_c > 1:
        raise InputError(f"clip_ratio_c bounds the ratio from above where A < 0 and must be > 1, not {clip_ratio_c}")
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped = _ppo_clip(_exp(log_ratio), advantages, cliprange_low, cliprange_high)
    bound = torch.where(advantages < 0, -advantages * clip_ratio_c, torch.inf)
    return torch.minimum(losses, bound), _metrics(log_ratio, clipped, pg_clipfrac_lower=losses > bound)


def gpg(old_log_prob, log_prob, advantages, response_mask) -> Loss:
    """GPG, arXiv 2504.02546: L = −A·log_prob. Only the metric uses old_log_prob."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    return -advantages * log_prob, _metrics(log_ratio)


def reinforce(old_log_prob, log_prob, advantages, response_mask, *, ratio_high=2.0) -> Loss:
    """REINFORCE with truncated importance weights: L = −sg(min(ρ, ratio_high))·A·log_prob.

    With rollout_log_probs as old_log_prob, ρ corrects staleness and engine mismatch at once (verl's bypass mode)."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    ratio = _exp(log_ratio.detach())
    return -ratio.clamp(max=ratio_high) * advantages * log_prob, _metrics(log_ratio, ratio > ratio_high)


def cispo(old_log_prob, log_prob, advantages, response_mask, *, cliprange_low=1.0, cliprange_high=4.0) -> Loss:
    """CISPO, arXiv 2506.13585: L = −sg(clip(ρ, 1 − low, 1 + high))·A·log_prob: no token loses its gradient.

    As in the paper, the defaults bound ρ only from above; the bound 5 is ScaleRL's, arXiv 2510.13786. (verl has 0.2
    and 0.2.)"""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    ratio = _exp(log_ratio.detach())
    clipped = ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    return -clipped * advantages * log_prob, _metrics(log_ratio, clipped != ratio)


def gspo(old_log_prob, log_prob, advantages, response_mask, *, cliprange_low=3e-4, cliprange_high=4e-4) -> Loss:
    """GSPO, arXiv 2507.18071: PPO's clip of s_i = exp(mean_t log ρ_t), the geometric mean over the row's tokens.

    This is the paper's token form, s_it = sg(s_i)·π_t / sg(π_t). Its value is s_i, and if a row has one advantage its
    gradient is that of s_i. Aggregate by seq-mean-token-mean (by seq-mean-token-sum it is LUSPO, arXiv 2602.05261)."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    log_s = masked_mean(log_ratio.detach(), response_mask, dim=-1)[:, None]  # (B, 1)
    ratio = _exp(log_s + log_prob - log_prob.detach())
    losses, clipped = _ppo_clip(ratio, advantages, cliprange_low, cliprange_high)
    return losses, _metrics(log_ratio, clipped)


def geo_mean(old_log_prob, log_prob, advantages, response_mask, *, cliprange_low=0.4, cliprange_high=0.4) -> Loss:
    """GMPO, arXiv 2507.20673: L_i = −A_i·exp(mean_t d_t), d = min(log ρ, high) if A > 0, max(log ρ, −low) if A < 0.

    The bounds are on the *log* ratio. The loss of each token is −A_t·exp(mean d), with a gradient through the whole
    row, so that seq-mean-token-mean gives the paper's mean of L_i (with the row's mean advantage, where it varies).
    Weights of the rollout correction multiply tokens, as in all losses, so their arithmetic mean multiplies the row."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    d, sign = log_ratio.clamp(-20, 20), advantages.sign()
    clipped = torch.minimum(sign * d, sign * d.clamp(-cliprange_low, cliprange_high))
    row_ratio = masked_mean(sign * clipped, response_mask, dim=-1).exp()[:, None]  # (B, 1)
    return -advantages * row_ratio, _metrics(log_ratio, clipped != sign * d)


def sapo(old_log_prob, log_prob, advantages, response_mask, *, tau_pos=1.0, tau_neg=1.05) -> Loss:
    """SAPO, arXiv 2511.20347: L = −A·(4/τ)·sigmoid(τ(ρ − 1)), a soft gate; τ = tau_pos where A > 0, else tau_neg.

    The paper aggregates by seq-mean-token-mean."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    tau = torch.where(advantages > 0, tau_pos, torch.full_like(advantages, tau_neg))
    return -advantages * 4 / tau * torch.sigmoid(tau * (_exp(log_ratio) - 1)), _metrics(log_ratio)


def dppo_tv(
    old_log_prob, log_prob, advantages, response_mask, *, delta_low=0.2, delta_high=0.2, ratio_high=20.0
) -> Loss:
    """DPPO, binary total variation, arXiv 2602.04879: L = −sg(min(ρ, ratio_high))·A·log_prob, but 0 for a token that
    has moved too far: A > 0 and π − π_old > delta_high, or A < 0 and π − π_old < −delta_low."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    moved = (log_prob.exp() - (log_prob - log_ratio).exp()).detach()
    far = ((advantages > 0) & (moved > delta_high)) | ((advantages < 0) & (moved < -delta_low))
    weights = _exp(log_ratio.detach()).clamp(max=ratio_high).masked_fill(far, 0)
    return -weights * advantages * log_prob, _metrics(log_ratio, far)


def dppo_kl(
    old_log_prob, log_prob, advantages, response_mask, *, delta_low=0.05, delta_high=0.05, ratio_high=20.0
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


def dro(old_log_prob, log_prob, advantages, response_mask, *, dro_beta) -> Loss:
    """DRO, after arXiv 2405.19107, as in verl: L = −A·log_prob + dro_beta/2·(log_prob − old_log_prob)²."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    return -advantages * log_prob + dro_beta / 2 * log_ratio.square(), _metrics(log_ratio)


def two_sided(
    old_log_prob, log_prob, advantages, response_mask, *, cliprange_low=0.2, cliprange_high=0.2, delta=4.0
) -> Loss:
    """arXiv 2505.07291: L = −min(min(ρ, delta)·A, clip(ρ, 1 − low, 1 + high)·A).

    Case by case, this is PPO with dual clip at c = delta. Raises InputError unless delta > 1 + high."""
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
    cliprange_low=0.2,
    cliprange_high=0.2,
    cap=5.0,
) -> Loss:
    """AReaL's decoupled PPO, arXiv 2505.24298: L = min(π_old/π_rollout, cap)·PPO's clip of ρ.

    π_old is the paper's proximal policy: the trainer's weights before the update. rollout_log_probs (B, T) are those of
    the policy that sampled."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    behave = _keep(_exp(old_log_prob - rollout_log_probs), response_mask).detach()
    losses, clipped = _ppo_clip(_exp(log_ratio), advantages, cliprange_low, cliprange_high)
    metrics = _metrics(log_ratio, clipped, behave_ratio=behave, behave_clipfrac=behave > cap)
    return behave.clamp(max=cap) * losses, metrics


def clip_cov(
    old_log_prob, log_prob, advantages, response_mask, *, cov_keep, cliprange_low=0.2, cliprange_high=0.2
) -> Loss:
    """Clip-Cov, arXiv 2505.22617: PPO's clipped loss, 0 where cov_keep (B, T), from clip_cov_mask, is False."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped = _ppo_clip(_exp(log_ratio), advantages, cliprange_low, cliprange_high)
    return _keep(losses, cov_keep), _metrics(log_ratio, clipped, cov_clipfrac=response_mask.bool() & ~cov_keep.bool())


def kl_cov(old_log_prob, log_prob, advantages, response_mask, *, cov_pick, kl_coef=1.0) -> Loss:
    """KL-Cov, arXiv 2505.22617: L = −A·ρ, plus kl_coef·|log_prob − old_log_prob| where cov_pick (B, T), from
    kl_cov_mask, is True."""
    _, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    losses = -advantages * _exp(log_ratio) + kl_coef * _keep(log_ratio.abs(), cov_pick)
    return losses, _metrics(log_ratio, cov_klfrac=response_mask.bool() & cov_pick.bool())


_LOSSES = (gpg, reinforce, cispo, gspo, geo_mean, sapo, dppo_tv, dppo_kl, dro, two_sided, decoupled, clip_cov, kl_cov)
POLICY_LOSSES = {"vanilla": compute_policy_loss} | {loss.__name__: loss for loss in _LOSSES}

LOSS_TENSORS = {name: _tensors(loss, 4) for name, loss in POLICY_LOSSES.items()}  # columns that it takes by keyword


def get_policy_loss_fn(name: str, settings: Mapping[str, float]) -> Callable[..., Loss]:
    """The loss of that name with these hyper-parameters bound: policy_loss(old_log_prob, log_prob, advantages,
    response_mask, **tensors of LOSS_TENSORS).

    Raises InputError for an unknown loss (it lists the names), an unknown hyper-parameter, or a missing one that has no
    default."""
    loss = _lookup("policy loss", POLICY_LOSSES, name)
    return _bind(f"policy loss {name!r}", loss, settings, 4, LOSS_TENSORS[name])


def named_policy_loss(name: str, settings: Mapping, old_log_prob, log_prob, tensors: Mapping[str, Tensor]) -> Loss:
    """The policy loss of that name on a micro-batch's tensors (b, T). Raises InputError as get_policy_loss_fn does."""
    others = {key: tensors[key] for key in LOSS_TENSORS[name]}
    loss = get_policy_loss_fn(name, settings)
    return loss(old_log_prob, log_prob, tensors["advantages"], tensors["response_mask"], **others)


# ------------------------------------------------------- masks over the whole step: Clip-Cov and KL-Cov
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
def clip_cov_mask(old_log_probs, advantages, response_mask, *, row_ids, seed, ratio=2e-4, cov=(1.0, 5.0)) -> Tensor:
    """-> keep (B, T) bool: all valid tokens except max(⌊ratio·N⌋, 1), drawn at random from those with
    cov[0] < covariance < cov[1].

    row_ids (B,): integers, no two equal. The draw hashes (seed, row id, position), so row order, padding and split do
    not change it. The paper computes the covariance with the current weights and leaves out tokens that PPO clips.
    Before the first update the current weights are the old ones, and nothing is clipped."""
    if not cov[0] < cov[1]:
        raise InputError(f"clip_cov draws tokens whose covariance is between two bounds, low < high, not {cov}")
    valid = response_mask.bool()
    covariance = _covariance(advantages, old_log_probs, response_mask)
    candidates = valid & (cov[0] < covariance) & (covariance < cov[1])
    noise = _token_noise(row_ids, valid.shape[1], seed)
    drawn = noise[candidates].sort().values[: max(int(ratio * int(valid.sum())), 1)]
    return valid & ~(candidates & (noise <= drawn[-1])) if len(drawn) else valid


@torch.no_grad()
def kl_cov_mask(old_log_probs, advantages, response_mask, *, ratio=2e-4) -> Tensor:
    """-> pick (B, T) bool: the max(⌊ratio·N⌋, 1) valid tokens of largest covariance.

    If tokens tie at the last place, none of them is picked. So row order does not matter, and advantages that are all 0
    pick nothing."""
    valid = response_mask.bool()
    covariance = _covariance(advantages, old_log_probs, response_mask)
    ranked = covariance[valid].sort(descending=True).values
    places = max(int(ratio * len(ranked)), 1)
    return valid & (covariance > ranked[places]) if places < len(ranked) else valid


# ----------------------------------------------------------------------- masks that multiply any loss
@torch.no_grad()
def top_entropy_mask(entropys, response_mask, *, fraction=0.2) -> Tensor:
    """arXiv 2506.01939 -> keep (B, T) bool: the max(round(fraction·N), 1) valid tokens of highest entropy, and those
    that tie with the last of them."""
    if not 0 < fraction <= 1:
        raise InputError(f"fraction, the share of tokens to keep, must be in (0, 1], not {fraction}")
    valid = response_mask.bool()
    ranked = entropys[valid].sort(descending=True).values
    return valid & (entropys >= ranked[max(round(fraction * len(ranked)), 1) - 1]) if len(ranked) else valid


@torch.no_grad()
def m2po_mask(rollout_log_probs, old_log_probs, response_mask, *, threshold=0.04) -> Tensor:
    """M2PO, arXiv 2510.01161 -> keep (B, T) bool: all valid tokens except those of largest squared log(π_old /
    π_rollout), as many as must go for the mean of the rest to be < threshold. Tokens that tie at the cut all go."""
    valid = response_mask.bool()
    moment = (_keep(old_log_probs, valid) - _keep(rollout_log_probs, valid)).double().square()
    ranked = moment[valid].sort().values
    means = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1, device=ranked.device)
    kept = int((means < threshold).sum())
    return valid & (moment < ranked[kept]) if kept < len(ranked) else valid


@torch.no_grad()
def off_policy_sequence_mask(rollout_log_probs, old_log_probs, advantages, response_mask, *, delta) -> Tensor:
    """OPSM, DeepSeek-V3.2, arXiv 2512.02556 -> keep (B, T) bool: all valid tokens except those with A < 0 in a row
    whose mean of rollout_log_probs − old_log_probs is > delta."""
    drift = _keep(rollout_log_probs, response_mask) - _keep(old_log_probs, response_mask)
    far = masked_mean(drift, response_mask, dim=-1)[:, None] > delta
    return response_mask.bool() & ~(far & (advantages < 0))


_DRIFT = ("rollout_log_probs", "old_log_probs")
# {name: (function, the batch keys that it takes, the key of its result)}
TOKEN_MASKS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], str]] = {
    "top_entropy": (top_entropy_mask, ("entropys", "response_mask"), "token_mask"),
    "m2po": (m2po_mask, (*_DRIFT, "response_mask"), "token_mask"),
    "off_policy_sequence": (off_policy_sequence_mask, (*_DRIFT, "advantages", "response_mask"), "token_mask"),
    "clip_cov": (clip_cov_mask, ("old_log_probs", "advantages", "response_mask"), "cov_keep"),
    "kl_cov": (kl_cov_mask, ("old_log_probs", "advantages", "response_mask"), "cov_pick"),
}


def compute_token_masks(masks: Mapping[str, Mapping], tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The token masks (B, T) bool of a step, from its whole batch, gathered over the ranks.

    masks: {name: settings}. tensors: the batch keys that TOKEN_MASKS names, and group (B,). Returns, as far as asked
    for, token_mask, the product of top_entropy, m2po and off_policy_sequence; cov_keep of clip_cov, drawn by (seed, row
    id, position); and cov_pick of kl_cov. Raises InputError as check_token_masks does."""
    results: dict[str, Tensor] = {}
    for name, settings in masks.items():
        _lookup("token mask", TOKEN_MASKS, name)
        function, keys, key = TOKEN_MASKS[name]
        drawn = {}
        if name == "clip_cov":  # a row's id is its place in the order of groups: that of the gathered rows is by ranks
            drawn = {"row_ids": tensors["group"].argsort(stable=True).argsort(), "seed": seed}
        compute = _bind(f"token mask {name!r}", function, settings, len(keys), tuple(drawn))
        mask = compute(*(tensors[k] for k in keys), **drawn)
        results[key] = results[key] & mask if key in results else mask
    return results


def check_token_masks(masks: Mapping[str, Mapping]) -> None:
    """Tries the masks on two tokens. Raises InputError for an unknown mask (it lists the names) or a bad setting."""
    keys = {key for _, keys, _ in TOKEN_MASKS.values() for key in keys}
    compute_token_masks(masks, dict.fromkeys(keys, torch.ones(2, 1)) | {"group": torch.arange(2)}, seed=0)
