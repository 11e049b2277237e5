"""KL to the reference (in the loss or in the reward), entropy, and coefficients that adapt."""

import math

import torch
from torch import Tensor

from lib import InputError
from lib.core_algos.reductions import _keep, _rewards_dtype

KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def kl_penalty(
    logprob: Tensor,
    ref_logprob: Tensor,
    kl_penalty: str,
    response_mask: Tensor | None = None,
    old_log_probs: Tensor | None = None,
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
               not the KL.) Without old_log_probs, π_old = π: ρ is 1, with a gradient.

    The clamp at 10 is a bias in all forms of k3. All (B, T). With a mask the result and its gradient are 0 at masked
    positions; the mask of `agg_loss` comes too late for a log-prob of −inf in the padding. Raises InputError for an
    unknown name."""
    name = kl_penalty.removesuffix("+").removesuffix("_unbiased")
    if name not in KL_PENALTIES or kl_penalty not in (name, f"{name}+", f"{name}_unbiased"):
        forms = ", ".join(KL_PENALTIES)
        raise InputError(f"unknown kl_penalty {kl_penalty!r}: choose one of {forms}, bare or with + or _unbiased")
    old_log_probs = (logprob if old_log_probs is None else old_log_probs).detach()
    if response_mask is not None:
        logprob, ref_logprob, old_log_probs = (_keep(x, response_mask) for x in (logprob, ref_logprob, old_log_probs))
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
    return (logprob - old_log_probs).clamp(-20, 20).exp() * value if kl_penalty.endswith("_unbiased") else value


@torch.no_grad()
def apply_kl_penalty(token_level_scores, kl, response_mask, beta: float) -> tuple[Tensor, float]:
    """token_level_rewards = scores − β·kl (B, T), 0 at masked positions, and the mean KL for the controller.

    kl (B, T) is `kl_penalty(old_log_probs, ref_log_prob, ...)`. Its mean is taken over the valid tokens of each row,
    then over the live rows; it is 0 without live rows."""
    kl = _keep(kl, response_mask)
    (rewards,) = _rewards_dtype(token_level_scores, _keep(token_level_scores, response_mask) - beta * kl)
    lengths = response_mask.bool().sum(-1)
    row_means = (kl.double().sum(-1) / lengths)[lengths > 0]
    return rewards, float(row_means.sort().values.sum() / max(len(row_means), 1))


class AdaptiveKLController:
    """arXiv 1909.08593, section 2.2: β <- β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) after n responses.

    β is `value`, constant without a target. A checkpoint holds it; loading ignores it if the run now has another
    initial β. A KL of NaN raises ValueError, since β would stay NaN."""

    def __init__(self, init_kl_coef: float, target_kl: float | None = None, horizon: float = 10000) -> None:
        if target_kl is not None and not (target_kl > 0 and horizon > 0):
            raise InputError(f"the adaptive KL needs target_kl > 0 and horizon > 0, not {target_kl} and {horizon}")
        self.value = self.start = float(init_kl_coef)
        self.target, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        if math.isnan(current_kl):
            raise ValueError("the KL to the reference is NaN")
        if self.target is None:
            return
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "start": self.start}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if state.get("start", self.start) == self.start:
            self.value = float(state["value"])


class AdaptiveEntropyController:
    """Skywork-OR1, arXiv 2505.22312: coef <- coef ± delta toward the target entropy (nats a token), in [0, max_coef].

    `value`, the coefficient of the next update, is coef, but 0 while the last entropy is above the target. Without a
    target it is constant. A checkpoint holds both; loading ignores them if the run now has another initial coefficient.
    An entropy of NaN raises ValueError."""

    def __init__(self, coef: float, target: float | None, delta: float = 0.005, max_coef: float = 1.0) -> None:
        if target is not None and not (delta > 0 and 0 <= coef <= max_coef):
            raise InputError(f"the adaptive entropy needs delta > 0 and coef in 0..{max_coef}, not {delta} and {coef}")
        self.value = self.coef = self.start = float(coef)
        self.target, self.delta, self.max_coef = target, delta, max_coef

    def update(self, entropy: float) -> None:
        if math.isnan(entropy):
            raise ValueError("the entropy is NaN")
        if self.target is None:
            return
        step = self.delta if entropy < self.target else -self.delta
        self.coef = min(max(self.coef + step, 0.0), self.max_coef)
        self.value = 0.0 if entropy > self.target else self.coef

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "coef": self.coef, "start": self.start}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if state.get("start", self.start) == self.start:
            self.value, self.coef = float(state["value"]), float(state["coef"])
