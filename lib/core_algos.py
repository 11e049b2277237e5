"""The mathematics of a step: advantages, policy losses, loss aggregation, KL, entropy.

Pure functions on tensors and numbers, never `args`. One section a paper. Two calling conventions:

    estimator(token_level_rewards, response_mask, index, *, ...)         -> advantages (B, T), returns (B, T)
    policy_loss(old_log_prob, log_prob, advantages, response_mask, *, ...) -> losses (B, T), {metric: (B, T)}

What is per token stays per token until `agg_loss` (or a masked mean) divides by *global* counts: only so does a loss
not depend on the micro-batch split or the number of ranks. What stands in a masked position (NaN, inf, 1e9) is
replaced in the inputs, not in the results: 0 · NaN is NaN in the backward pass too. A row without a valid token is
dead: in no group, in no denominator. A mask is 0/1 of any dtype, of exactly the shape of what it masks.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lib import InputError


def _keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with exact zeros, and zero gradient, where the mask is 0."""
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} must have the same shape")
    return values.masked_fill(~mask.bool(), 0)


def _lookup(kind: str, table: dict[str, Callable], name: str) -> Callable:
    if name not in table:
        raise InputError(f"unknown {kind} {name!r}: choose one of {', '.join(table)}")
    return table[name]


def _bind(what: str, function: Callable, settings: Mapping, positional: int, tensors: Sequence[str] = ()) -> Callable:
    """The function with its settings; what it is called with, `positional` arguments and the tensors, comes later.

    Raises InputError for a setting that the function does not have, for one that is no number of at least 0 (no bool)
    where the default is one, and if one without default is missing.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(tensors), **settings)
    except TypeError as error:
        raise InputError(f"{what} with {dict(settings)}: {error}") from error
    for name, value in settings.items():
        kind = {bool: "true or false", int: "a number", float: "a number"}.get(type(signature.parameters[name].default))
        if kind and not (is_number(value) if kind == "a number" else isinstance(value, bool)):
            raise InputError(f"{what}: {name} must be {kind}, not {value!r}")
        if kind == "a number" and value < 0:
            raise InputError(f"{what}: {name} must be at least 0, not {value!r}")
    return partial(function, **settings)


def is_number(value) -> bool:
    """Whether a setting from JSON is a number: not true, not NaN (Python's JSON has it); infinity is one."""
    return type(value) in (int, float) and value == value


# ----------------------------------------------------------------------------------- masked reductions


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


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x − mean) / sqrt(var + 1e-8), 0 at masked positions; `shift_mean=False` adds the mean back.

    The statistics are those of the tensor given: whoever whitens a batch that is spread over ranks gathers it first.
    Raises ValueError for less than 2 valid positions.
    """
    values = _keep(values, mask)
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return _keep(whitened if shift_mean else whitened + mean, mask)


# --------------------------------------------------------------------------- outcomes and their groups


def _outcome_scores(token_level_rewards: Tensor, response_mask: Tensor, index) -> tuple[Tensor, Tensor, Tensor]:
    """The live rows' scores R_i = Σ_t r·m (N,) and group numbers (N,), and which rows live (B,). float64, on the CPU.

    Dead rows are gone from here on, so they cannot touch the others. float64 makes sums of float32 rewards exact.
    """
    ids = np.asarray(index)
    if ids.shape != (len(response_mask),):
        raise ValueError(f"index needs one group id for each of the {len(response_mask)} rows, not shape {ids.shape}")
    alive = response_mask.bool().any(-1)
    scores = _keep(token_level_rewards, response_mask)[alive].double().sum(-1).cpu()
    alive = alive.cpu()
    group = torch.from_numpy(np.unique(ids[alive.numpy()], return_inverse=True)[1])
    return scores, group, alive


def _group_sum(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """(N,) -> (num_groups,), to the last bit the same in any order of rows: added in ascending order, on the CPU."""
    order = values.argsort()
    return values.new_zeros(num_groups).index_add(0, group[order], values[order])


def _spread(row_values: Tensor, alive: Tensor, token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Values of the live rows (N,) -> their valid tokens (B, T); 0 elsewhere."""
    rows = row_values.new_zeros(len(alive))
    rows[alive] = row_values
    dtype = torch.promote_types(token_level_rewards.dtype, torch.float32)  # integer rewards must not truncate
    return _keep(rows.to(response_mask.device, dtype)[:, None].expand(response_mask.shape), response_mask)


def at_last_token(row_values: Tensor, response_mask: Tensor) -> Tensor:
    """(B,) -> (B, T): each row's value on its last valid token, where an outcome's reward stands; 0 elsewhere."""
    mask = response_mask.bool()
    place = torch.arange(mask.shape[1], device=mask.device) * mask  # (B, T)
    last = mask & (place == place.amax(-1, keepdim=True))
    return _keep(row_values[:, None].expand(mask.shape), last)


def zero_variance_rows(token_level_rewards: Tensor, response_mask: Tensor, index: Sequence | np.ndarray) -> Tensor:
    """(B,) bool: the live rows of groups with at least two of them whose scores R_i are all exactly equal.

    Their advantage is 0 by every group estimator: DAPO's dynamic sampling, arXiv 2503.14476, drops them. A group of one
    is not among them: it has no spread rather than none. Arguments as those of the estimators.
    """
    scores, group, alive = _outcome_scores(token_level_rewards, response_mask, index)
    size = torch.bincount(group)
    low, high = (
        scores.new_zeros(len(size)).scatter_reduce(0, group, scores, end, include_self=False)
        for end in ("amin", "amax")
    )
    rows = torch.zeros_like(alive)
    rows[alive] = ((low == high) & (size > 1))[group]
    return rows.to(response_mask.device)


# ------------------------------------------------------------------------------------------ advantages


def compute_overlong_penalty(
    response_mask: Tensor, max_response_length: int, overlong_buffer: int, penalty_factor: float
) -> Tensor:
    """DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13, to be added to the rewards.

    min(0, −(len − (max_response_length − overlong_buffer)) / overlong_buffer · penalty_factor) on a live row's last
    valid token, 0 elsewhere (B, T) float32. len is that token's place: tool output before it counts. Lengths in tokens.
    Raises InputError unless 0 < overlong_buffer <= max_response_length.
    """
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
    index: Sequence | np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    singleton: str = "raw",
) -> tuple[Tensor, Tensor]:
    """GRPO, arXiv 2402.03300: A_i = (R_i − mean_g) / (std_g + epsilon) on every valid token of row i; std with N − 1.

    `norm_adv_by_std_in_grpo=False` is Dr. GRPO, arXiv 2503.20783: A_i = R_i − mean_g.
    token_level_rewards, response_mask (B, T); index (B,): rows of equal id are one group, and a group must be whole.
    Returns one (B, T) tensor twice, as advantages and as returns. Equal rewards give exactly 0. Rewards at masked
    positions do not count.

    `singleton` is for a group with one live row, which has no baseline: "raw" takes mean 0 and std 1 (A = R, as verl),
    "zero" takes A = 0. Where rows can die beware of "raw": the last survivor's advantage is its bare reward.
    """
    if singleton not in ("raw", "zero"):
        raise InputError(f"unknown singleton {singleton!r}: choose one of raw, zero")
    scores, group, alive = _outcome_scores(token_level_rewards, response_mask, index)
    count = torch.bincount(group)  # (num_groups,)
    low = scores.new_zeros(len(count)).scatter_reduce(0, group, scores, "amin", include_self=False)
    shifted = scores - low[group]  # exactly 0 in a group of equal scores, where a rounded mean may leave noise
    advantages = shifted - (_group_sum(shifted, group, len(count)) / count)[group]
    std = (_group_sum(advantages.square(), group, len(count)) / (count - 1).clamp(min=1)).sqrt()[group]
    if singleton == "raw":
        single = count[group] == 1
        advantages = torch.where(single, scores, advantages)
        std = std.masked_fill(single, 1)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (std + epsilon)
    advantages = _spread(advantages, alive, token_level_rewards, response_mask)
    return advantages, advantages


# --------------------------------------------------------------------------------------- policy losses


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cliprange_low: float = 0.2,
    cliprange_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO, arXiv 1707.06347 eq. 7: L = max(−A·ρ, −A·clip(ρ, 1 − low, 1 + high)), ρ = exp(log_prob − old_log_prob).

    low != high is DAPO's clip-higher, arXiv 2503.14476. Dual clip, arXiv 1912.09729: where A < 0, L <= −A·c (c > 1;
    math.inf turns it off). The log ratio is clamped to ±20. Only log_prob is differentiated. All tensors (B, T).

    Returns losses (B, T), 0 at masked positions, and detached (B, T) metrics to be averaged over the valid tokens of
    the global mini-batch: pg_clipfrac (clipped by PPO), pg_clipfrac_lower (by the dual clip), ppo_kl (KL(old ‖ new)).
    verl returns the aggregated scalar here. But a scalar has lost its denominator: summed over uneven micro-batches
    or ranks it is not the loss of the mini-batch. So the script calls `agg_loss`, with the global counts.
    """
    if not clip_ratio_c > 1:
        raise InputError(f"clip_ratio_c bounds the ratio from above where A < 0 and must be > 1, not {clip_ratio_c}")
    log_prob = _keep(log_prob, response_mask)
    old_log_prob = _keep(old_log_prob, response_mask).detach()
    advantages = _keep(advantages, response_mask).detach()

    log_ratio = (log_prob - old_log_prob).clamp(-20, 20)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    ppo = torch.maximum(unclipped, clipped)
    bound = torch.where(advantages < 0, -advantages * clip_ratio_c, torch.inf)
    metrics = {
        "actor/pg_clipfrac": (clipped > unclipped).to(ratio.dtype),
        "actor/pg_clipfrac_lower": (ppo > bound).to(ratio.dtype),
        "actor/ppo_kl": -log_ratio.detach(),
    }
    return torch.minimum(ppo, bound), metrics


# ------------------------------------------------------------------------------------ loss aggregation

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    global_tokens: int | Tensor | None = None,
    global_rows: int | Tensor | None = None,
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
    gives 0, not NaN. FSDP averages gradients over ranks where a sum is wanted: the factor world_size is the script's.
    C is a constant, such as the maximal response length. verl falls back to the padded width, which makes the loss
    depend on the longest response around; here a missing C is an InputError, like an unknown mode.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise InputError(f"unknown loss_agg_mode {loss_agg_mode!r}: choose one of {', '.join(LOSS_AGG_MODES)}")
    if (global_tokens is None) != (global_rows is None):
        raise ValueError("give both global_tokens and global_rows, or neither")
    if global_tokens is None:
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


# -------------------------------------------------------------------------------------- KL and entropy

KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def kl_penalty(
    logprob: Tensor,
    ref_logprob: Tensor,
    kl_penalty: str,
    response_mask: Tensor | None = None,
    old_logprob: Tensor | None = None,
) -> Tensor:
    """Estimates of KL(π ‖ ref) at tokens sampled from π, joschu.net/blog/kl-approx.html; d = logprob − ref_logprob.

    kl, k1: d     abs: |d|     mse, k2: d²/2     low_var_kl, k3: e^(−d) + d − 1, −d clamped to ±20, the result to ±10

    Gradient trap: an estimator's gradient is not the gradient of what it estimates. In expectation over tokens of π,
    that of k1 is 0, that of k3 is ∇KL(ref ‖ π), and only that of k2 is ∇KL(π ‖ ref). So k1 and k3 belong in the
    reward; in the loss (where GRPO puts k3 all the same) k2 does, or a name with a suffix:

    +          (k1+, k3+) the value of that estimator with the gradient of k2.
    _unbiased  (k1_unbiased, k3_unbiased) ρ·k, DeepSeek-V3.2, arXiv 2512.02556; ρ = π/π_old, log ratio clamped to ±20,
               is differentiated too. Over tokens of π_old, the sampler, E[ρ·k] = Σ π·k = KL(π ‖ ref) for every π: an
               identity in π, so the gradients agree as well, off policy too. (k2_unbiased: those of E[k2], which is
               not the KL.) Without old_logprob, π_old = π: ρ is 1, with a gradient.

    The clamp at 10 is a bias in all forms of k3. All (B, T). With a mask the result is 0 at masked positions, and so is
    its gradient: `agg_loss` alone comes too late for a log-prob of −inf in the padding. Raises InputError for an
    unknown name.
    """
    name = kl_penalty.removesuffix("+").removesuffix("_unbiased")
    if name not in KL_PENALTIES or kl_penalty not in (name, f"{name}+", f"{name}_unbiased"):
        forms = ", ".join(KL_PENALTIES)
        raise InputError(f"unknown kl_penalty {kl_penalty!r}: choose one of {forms}, bare or with + or _unbiased")
    old_logprob = (logprob if old_logprob is None else old_logprob).detach()
    if response_mask is not None:
        logprob, ref_logprob, old_logprob = (_keep(x, response_mask) for x in (logprob, ref_logprob, old_logprob))
    d = logprob - ref_logprob
    k2 = 0.5 * d.square()
    if name in ("kl", "k1"):
        value = d
    elif name == "abs":
        value = d.abs()
    elif name in ("mse", "k2"):
        value = k2
    else:
        x = (-d).clamp(-20, 20)
        value = (torch.expm1(x) - x).clamp(max=10)  # e^x − 1 − x in float32 is noise at the small x of most tokens
    if kl_penalty.endswith("+"):
        return value.detach() + (k2 - k2.detach())
    return (logprob - old_logprob).clamp(-20, 20).exp() * value if kl_penalty.endswith("_unbiased") else value


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = −Σ_v p·log p in nats, (..., V) -> (...), in float32 or wider. A logit of −inf is a token of probability 0."""
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
