"""Checks of each update, by the gradient of its loss with respect to log-probs, values and the reference's log-probs.

A wrong loss is a finite number, too. But whatever its formula, the gradient of a token's log-prob is -advantage x
weight, 0 outside the loss mask and beyond the clip range, and the weights add up as --loss-agg-mode says. What is
violated is a metric faults/<name> of the step (lib/log/alerts.py has the messages); a healthy step has none.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lib.core_algos import agg_loss
from lib.data_proto import DataProto
from lib.distributed import Metric, faults, full_tensor

ROUNDING = 1e-5  # nats by which the log-probs of equal models may differ, on average
NOISE = 1e-5  # of a gradient: less is what rounding leaves of a difference
EDGE = 1e-3  # around a bound of the ratio, where rounding decides
SHARES = 2 / 3, 1.5  # a loss of one's own may weigh its tokens; a wrong denominator is off by a factor of 2 or more
ON_POLICY = 0.01  # of the log ratio: the ratio is 1, and the gradient the policy gradient
SURE, NATS = 9.0, 0.01
"""The sum of d = log p + entropy over sampled tokens is 0 but for chance. Its variance is one to four times the sum of
entropies, so SURE x the root of that is 4.5 standard deviations or more; NATS a token is beyond rounding."""
APART = {torch.float32: 1e-3, torch.float16: 0.02}
"""Nats by which the engine's log-probs may differ on average; they do by 1e-6 and 0.005. In bfloat16, by 0.03, what
lib/log/alerts.py allows is all that can be said."""


class LossFlags(NamedTuple):
    """What the flags say of the policy's loss."""

    agg_mode: str
    scale_factor: float
    clip: tuple[float, float, float] | None
    """bounds of the ratio: below where A < 0, above where A > 0, above where A < 0 (dual clip); None: not PPO's loss"""
    apart: float
    """nats by which the engine's log-probs may differ from the trainer's, on average"""


COUNTS = ("gradients_left", "updates_ahead", "gradient_outside_mask", "tokens_not_trained", "tokens_not_clipped")
SUMS: tuple[str, ...] = ("rows", "rows_seen", "weight", "wanted", "tokens_counted", "rows_counted", "value_push")
SUMS += ("far", "kl_push", "away", "away_size", "n", "sampled", "surprise", "entropy", "mismatch")


@dataclass
class UpdateChecks:
    """Watches the updates of a model. loss: None for a critic."""

    loss: LossFlags | None = None
    on_policy: bool = False  # whether the weights are those that sampled the batch
    version: int = -1  # of these weights, as in weight_versions
    _sums: dict[str, Tensor] = field(default_factory=dict)  # of this update
    _has_gradient: bool = False
    _watched: list[tuple] = field(default_factory=list)
    _of_run: Tensor | float = 0.0  # (4,): sampled, surprise, entropy and mismatch of all steps

    def begin(self, rows: int, gradients: list[Tensor], updates_ahead: Tensor | float, device: torch.device) -> None:
        """Before an update on so many rows. updates_ahead: of the optimizer before the schedule."""
        if self._has_gradient:  # rows of another loss of the same update
            return
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in (*COUNTS, *SUMS)}
        left = any(bool(full_tensor(gradient).any()) for gradient in gradients)
        ahead = updates_ahead * (updates_ahead > 0)  # a tensor or a number
        self._add(rows=rows, updates_ahead=ahead, gradients_left=left)

    def watch(self, micro: DataProto, output: Tensor, entropy: Tensor | None = None) -> None:
        """output: log-probs or values (b, T), with gradient."""
        t = micro.batch
        known = self.loss is not None or entropy is None
        if self._sums and known and output.requires_grad and "advantages" in t:
            self._add(rows_seen=len(micro))
            output.retain_grad()
            if entropy is not None and "ref_log_prob" in t:
                t["ref_log_prob"].requires_grad_()
            self._watched.append((t, output, entropy))

    @torch.no_grad()
    def after_backward(self, factor: float) -> None:
        """factor: what the loss was multiplied by."""
        self._has_gradient = True
        for t, output, entropy in self._watched:
            if output.grad is not None and entropy is None:
                push = output.grad * (output - t["returns"])
                self._add(value_push=push.where(t["valid_mask"], 0).sum())
            elif output.grad is not None:
                self._look(t, output, entropy, factor)
        self._watched.clear()

    def _look(self, t, log_probs: Tensor, entropy: Tensor, factor: float) -> None:
        """All (b, T)."""
        assert self.loss is not None and log_probs.grad is not None
        mask, loss_mask, advantages = t["response_mask"].bool(), t["loss_mask"], t["advantages"]
        gradient = by_policy = log_probs.grad / factor
        # a loss of whole rows has a gradient at all tokens of a row
        outside = ~(mask & loss_mask.any(1, keepdim=True))
        self._add(gradient_outside_mask=((gradient != 0) & outside).sum())
        old = t.get("old_log_probs", log_probs)
        if (ref := t.get("ref_log_prob")) is not None:
            far = (old - ref).where(mask, 0)
            self._add(far=far.abs().sum(), n=mask.sum())
            if ref.grad is not None:  # the KL is a function of log_probs - ref, so the sum is without it
                to_ref = ref.grad / factor
                by_policy = gradient + to_ref
                away = to_ref * far  # below 0: towards the reference
                self._add(kl_push=to_ref.sum(), away=away.sum(), away_size=away.abs().sum())
        correction = t.get("rollout_is_weights", torch.ones_like(log_probs))
        counts = loss_mask & (advantages != 0) & (correction != 0)
        weight = (-by_policy / advantages).where(counts, 0)  # each token's
        log_ratio = log_probs - old
        if self.loss.clip is not None:
            low, high, dual = self.loss.clip
            ratio = log_ratio.exp()
            cut = torch.where(advantages > 0, ratio > 1 + high, (ratio < 1 - low) | (ratio > dual))
            near = torch.stack([(ratio - bound).abs() < EDGE * bound for bound in (1 - low, 1 + high, dual)]).any(0)
            near |= log_ratio.abs() > 19  # the loss clamps it at 20
            unclipped = (weight / ratio).abs().where(counts & ~near, 0)
            none = unclipped <= NOISE * unclipped.sum() / counts.sum()
            self._add(tokens_not_trained=(counts & none & ~cut & ~near).sum())
            self._add(tokens_not_clipped=(counts & ~none & cut & ~near).sum())
        if self.on_policy:
            scale, whole = self.loss.scale_factor, {"global_tokens": 1, "global_rows": 1}
            counts, counted = counts & (log_ratio.abs() < ON_POLICY), t["denominator_mask"].bool()
            wanted = agg_loss(counts * correction, mask, self.loss.agg_mode, **whole, loss_scale_factor=scale)
            self._add(weight=weight.where(counts, 0).sum(), wanted=wanted)
            self._add(tokens_counted=counted.sum(), rows_counted=counted.any(1).sum())
            mask = mask & t["is_fresh"][:, None]
            sampled = {"mismatch": (log_probs - t["rollout_log_probs"]).abs()}
            if "weight_versions" in t:  # of servers, where older weights may have sampled it
                mask = mask & (t["weight_versions"] == self.version)
            else:
                sampled |= {"surprise": log_probs + entropy, "entropy": entropy}
            sums = {name: x.where(mask, 0).sum() for name, x in sampled.items()}  # an index would wait for a GPU
            self._add(sampled=mask.sum(), **sums)

    @torch.no_grad()
    def end(self) -> dict[str, Metric]:
        """The update's faults. A collective."""
        if not self._sums:  # a script with its own loop over micro-batches
            self._has_gradient = False
            return {}
        sums = torch.stack([*self._sums.values()])
        dist.all_reduce(sums)
        s = dict(zip(self._sums, sums))
        found = {name: s[name] for name in COUNTS} | {"rows_not_seen": s["rows_seen"].remainder(s["rows"])}
        found["value_push"] = s["value_push"] < 0
        # k1 has the same gradient at all tokens, so that some are pushed away; the others' pushes none
        away = (s["away"] > 0.99 * s["away_size"]) | ((s["away"] > 0) & (s["kl_push"] > 0))
        found["kl_push"] = away & (s["far"] > ROUNDING * s["n"])
        if self.loss is not None and self.on_policy:
            tokens_or_rows = {"token-mean": s["tokens_counted"], "token-sum": 1.0}
            share = s["weight"] / s["wanted"] * tokens_or_rows.get(self.loss.agg_mode, s["rows_counted"])
            found["loss_share"] = torch.where((share < SHARES[0]) | (share > SHARES[1]), share, 0)
            found["engine_apart"] = torch.where(s["mismatch"] > self.loss.apart * s["sampled"], s["mismatch"], 0)
            found["engine_apart"] = found["engine_apart"] / s["sampled"]
            self._of_run = self._of_run + torch.stack([s[x] for x in ("sampled", "surprise", "entropy", "mismatch")])
            n, surprise, entropy, mismatch = self._of_run
            sure = (surprise > SURE * entropy.sqrt()) & (surprise > NATS * n + 3 * mismatch)
            found["sampled_otherwise"] = torch.where(sure, surprise / n, 0)
        self.on_policy, self._sums, self._has_gradient = False, {}, False
        return faults(found)

    def _add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self._sums[name] += value
