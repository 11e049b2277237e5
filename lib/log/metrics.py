"""Metrics of a step's batch, checks of it, and the speed of the step.

A rank reports totals and counts (`Mean`, `Sum`, `Max`, `Min`), which `reduce_metrics` finishes: a mean of the ranks'
means is wrong if they hold different counts. Rows without a trained token (padding, failed rollouts) are counted and
are in no other number. A metric without any data in this step is left out."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from lib import InputError
from lib.core_algos import masked_mean, masked_sum, zero_variance_rows
from lib.data_proto import DataProto
from lib.distributed import Max, Mean, Metric, Min, Std, Sum, all_gather_lists, device_name, faults, token_means
from lib.reward.scores import SHADOW, is_number
from lib.rollout import truncated_rows

Value = TypeVar("Value")


def _spread(name: str, values: torch.Tensor) -> dict[str, Metric]:
    """name/mean, /max and /min of a 1-D tensor; nothing for an empty one."""
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{name}/mean": Mean(values.sum().item(), values.numel()),
        f"{name}/max": Max(values.max().item()),
        f"{name}/min": Min(values.min().item()),
    }


def data_metrics(batch: DataProto, correct_above: float = 0.5) -> dict[str, Metric]:
    """This rank's metrics of a training batch, with groups over all ranks. A collective.

    - reward/{mean,max,min}: the sum of a row's token_level_scores
    - response_length/{mean,max,min}: tokens after the prompt, tool outputs included
    - response_length/clip_ratio: rows that were cut off, if the batch has finish_reason
    - prompt_length/{mean,max,min}; prompt_length/clip_ratio: prompts of P tokens, which is --max-prompt-length
    - rollout/dead_rows
    - reward/zero_variance, all_right, all_wrong: the share of groups (one uid, at least two rows) with equal scores
      (or reward_components (B, K), each), with all scores above `correct_above`, with none above
    - source/<data_source>/{rows,reward,response_length,zero_variance}
    """
    tensors = batch.batch
    alive = tensors["response_mask"].bool().any(-1)  # (B,)
    P = tensors["prompts"].shape[1]
    scores = tensors["token_level_scores"].sum(-1)[alive]
    prompts, lengths = (part.sum(-1)[alive] for part in tensors["attention_mask"].tensor_split([P], -1))
    metrics = {
        **_spread("reward", scores),
        **_spread("response_length", lengths),
        **_spread("prompt_length", prompts),
        "prompt_length/clip_ratio": Mean((prompts == P).sum().item(), len(prompts)),
        "rollout/dead_rows": Sum(int((~alive).sum())),
    }
    if "finish_reason" in batch.non_tensor_batch:
        cut_off = truncated_rows(batch)[alive]
        metrics["response_length/clip_ratio"] = Mean(int(cut_off.sum()), len(cut_off))
    rows = batch.non_tensor_batch
    sources = rows.get("data_source", rows["uid"])[alive.cpu().numpy()]
    groups = _groups(batch, alive, scores, sources)
    if "data_source" in rows:
        metrics |= _by_source(sources, scores, lengths, groups)
    of_groups = {
        "zero_variance": [group.equal for group in groups],
        "all_right": [min(group.scores) > correct_above for group in groups],
        "all_wrong": [max(group.scores) <= correct_above for group in groups],
    }
    return metrics | {f"reward/{name}": Mean(sum(found), len(found)) for name, found in of_groups.items()}


class _Group(NamedTuple):
    source: str
    equal: bool  # whether its scores are equal, so that it gives no gradient
    scores: list[float]


def _groups(batch: DataProto, alive: torch.Tensor, scores: torch.Tensor, sources: np.ndarray) -> list[_Group]:
    """The groups of two or more alive rows on all ranks. A collective."""
    parts = batch.batch.get("reward_components", None)
    of_rows = [None] * len(scores) if parts is None else parts[alive].tolist()
    own = zip(batch.non_tensor_batch["uid"][alive.cpu().numpy()], sources, scores.tolist(), of_rows)
    rows = all_gather_lists(list(own))
    if not rows:
        return []
    column = torch.tensor([score for _, _, score, _ in rows])[:, None]  # (B, 1), B of all ranks
    components = None if parts is None else torch.tensor([own_parts for *_, own_parts in rows])
    index = np.array([uid for uid, *_ in rows], dtype=object)
    equal = zero_variance_rows(column, torch.ones_like(column), index, components).tolist()
    groups: dict[str, _Group] = {}
    for (uid, source, score, _), same in zip(rows, equal):
        groups.setdefault(uid, _Group(source, same, [])).scores.append(score)
    return [group for group in groups.values() if len(group.scores) > 1]


def _by_source(
    sources: np.ndarray, scores: torch.Tensor, lengths: torch.Tensor, groups: list[_Group]
) -> dict[str, Metric]:
    """sources, scores, lengths: of each alive row of this rank."""
    metrics: dict[str, Metric] = {}
    for source in sorted({*sources}):
        own = (sources == source).nonzero()[0]
        metrics |= {
            f"source/{source}/rows": Sum(len(own)),
            f"source/{source}/reward": Mean(scores[own].double().sum().item(), len(own)),
            f"source/{source}/response_length": Mean(lengths[own].sum().item(), len(own)),
        }
    for source in sorted({group.source for group in groups}):
        equal = [group.equal for group in groups if group.source == source]
        metrics[f"source/{source}/zero_variance"] = Mean(sum(equal), len(equal))
    return metrics


def row_metrics(batch: DataProto, *others: DataProto) -> dict[str, Metric]:
    """This rank's numbers of rows and tokens, sampled and trained on (loss_mask), and what `batch_faults` finds.

    - advantages, returns and, with a critic, values: {mean,max,min} over the tokens of valid_mask (B, T)
    - token_level_rewards/{mean,max,min}: of a row's sum, after KL and penalties, over the rows of valid_mask

    others: further responses that the step sampled; their tokens are in training/tokens."""
    tensors = batch.batch
    trained, sampled = tensors["loss_mask"], tensors["response_mask"]
    valid = tensors["valid_mask"].bool()
    prompts, responses = tensors["attention_mask"].tensor_split([-sampled.shape[1]], 1)
    tokens = sum(part.batch["attention_mask"].sum().item() for part in (batch, *others))
    metrics = batch_faults(batch)
    metrics |= _spread("token_level_rewards", tensors["token_level_rewards"].sum(1)[valid.any(1)])
    for name in ("advantages", "returns", "values"):
        if name in tensors:
            metrics |= _spread(name, tensors[name][valid])
    return metrics | {
        "training/rows_in": Sum(len(batch)),
        "training/rows_trained": Sum(trained.any(1).sum().item()),
        "training/trained_share": Mean(trained.sum().item(), sampled.sum().item()),
        "training/prompt_tokens": Sum(prompts.sum().item()),
        "training/response_tokens": Sum(responses.sum().item()),
        "training/tokens": Sum(tokens),
    }


def merge_metrics(metrics: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """One dict of several. Raises InputError for a name in two of them: one value would be lost."""
    merged: dict[str, Value] = {}
    for found in metrics:
        if twice := sorted(merged.keys() & found.keys()):
            advice = "rename one (a data source, a number of a scorer, a metric of the script)"
            raise InputError(f"two metrics of one step are called {twice[0]!r}: {advice}")
        merged |= found
    return merged


def extra_metrics(extras: Mapping[str, list]) -> dict[str, Metric]:
    """reward/<key>/mean of each number that a scorer gave besides its score, shadow/<name>/mean of each score that is
    not trained on. Text, None and "pred" have no mean."""
    metrics: dict[str, Metric] = {}
    for name, values in extras.items():
        numbers = [float(value) for value in values if is_number(value)]
        prefix = "" if name.startswith(SHADOW) else "reward/"
        if numbers and name != "pred":
            metrics[f"{prefix}{name}/mean"] = Mean(sum(numbers), len(numbers))
    return metrics


@torch.no_grad()
def mismatch_metrics(
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    outside_top_p: torch.Tensor | None = None,
) -> dict[str, Metric]:
    """How far the trainer's log-probs are from the engine's, with the same weights. All (B, T).

    r = π_train / π_rollout, the log ratio clamped to ±20.

    - logp_diff_{mean,max}: |difference| of the log-probs
    - rollout_probs_diff_{mean,max,std}: |difference| of the probabilities (verl's names)
    - k1, k3: estimates of KL(π_rollout ‖ π_train) on tokens sampled from π_rollout
    - ratio_{mean,max,min}: r
    - chi2 = mean r² − 1, the χ² divergence: weights r leave 1 / (1 + chi2) of the sample as effective size
    - outside_top_p: the share of tokens that the trainer's top-p or top-k would not have kept
    """
    if mask.numel() == 0:
        return {}
    mask = mask.bool()
    train, rollout = log_probs.double().where(mask, 0), rollout_log_probs.double().where(mask, 0)
    log_ratio = (train - rollout).clamp(-20, 20)
    ratio = log_ratio.exp()
    logp_diff, prob_diff = (train - rollout).abs(), (train.exp() - rollout.exp()).abs()
    means = {
        "rollout/logp_diff_mean": logp_diff,
        "training/rollout_probs_diff_mean": prob_diff,
        "rollout/k1": -log_ratio,
        "rollout/k3": torch.expm1(log_ratio) - log_ratio,
        "rollout/ratio_mean": ratio,
        "rollout/chi2": ratio.square() - 1,
    }
    if outside_top_p is not None:
        means["rollout/outside_top_p"] = outside_top_p
    return {
        **token_means(means, mask),
        "training/rollout_probs_diff_std": Std(prob_diff.sum(), prob_diff.square().sum(), mask.sum()),
        "rollout/logp_diff_max": Max(logp_diff.where(mask, -math.inf).amax()),
        "rollout/ratio_max": Max(ratio.where(mask, -math.inf).amax()),
        "training/rollout_probs_diff_max": Max(prob_diff.where(mask, -math.inf).amax()),
        "rollout/ratio_min": Min(ratio.where(mask, math.inf).amin()),
    }


# ---- checks of a batch after the update ---------------------------------------------------------

CLOSE = 1e-3  # relative: float32 sums of a row differ by some 1e-6


def batch_faults(batch: DataProto) -> dict[str, Metric]:
    """Metrics faults/<name>, as in lib/model/update_checks.py: what holds for the rows of every healthy step.

    This rank must have all rows of each uid. Reads most columns of lib/columns.py."""
    t = batch.batch
    sampled, loss_mask, valid = (t[name].bool() for name in ("response_mask", "loss_mask", "valid_mask"))
    T = sampled.shape[1]
    attended = t["attention_mask"].bool()
    given = attended[:, -T:]
    reasons = batch.non_tensor_batch["finish_reason"]
    stopped = torch.tensor([reason == "stop" for reason in reasons], device=given.device) & sampled.any(1)
    found = {
        "mask_outside_response": (sampled & ~given).sum() + (loss_mask & ~sampled).sum(),
        "end_not_trained": (stopped & ~sampled.gather(1, given.sum(1, keepdim=True).clamp(min=1) - 1)[:, 0]).sum(),
    }
    if (places := t["position_ids"]).ndim == 2:  # not mrope
        jumps = (places.diff(dim=1) != 1) & (places[:, 1:] != 0)  # a segment of several turns begins at 0
        found["positions"] = (jumps & attended[:, 1:] & attended[:, :-1]).sum()

    _, first, number = np.unique(batch.non_tensor_batch["uid"].astype(str), return_index=True, return_inverse=True)
    lead = torch.from_numpy(first[number]).to(given.device)  # (B,) the first row of the row's group
    group = torch.from_numpy(number).to(given.device)
    found["group_of_two_prompts"] = (t["prompts"] != t["prompts"][lead]).any(1).sum()
    ids = t["group"]
    found["group_ids"] = (ids != ids[lead]).sum() + (len(ids.unique()) != len(first))

    advantage, alive = masked_mean(t["advantages"], valid, dim=1), valid.any(1)  # (B,)
    totals = torch.zeros(len(first), dtype=torch.float64, device=given.device)
    of_rows = advantage, advantage.abs(), torch.ones_like(alive), alive
    total, sizes, rows, live = (totals.index_add(0, group, x.double()) for x in of_rows)
    # Estimators whose advantages add up to 0 in whole groups can tell. Two groups, for one may do so by chance; and the
    # same for all tokens of a row, for credit for turns may be 0 in groups of single turns.
    large, whole = total.abs() > CLOSE * advantage.abs().max(), (live == rows) & (sizes > 0)
    tells = (whole.sum() > 1) & ~(large & whole).any()
    tells &= ((t["advantages"] - advantage[:, None]).abs().where(valid, 0) <= CLOSE * advantage.abs().max()).all()
    found["dead_rows_count"] = (tells & large & (live > 1)).sum() + (~alive & (t["advantages"] != 0).any(1)).sum()

    if "values" in t:  # whatever gamma and lambda are, the return of the last token is its reward
        last = (valid * torch.arange(T, device=valid.device)).argmax(1, keepdim=True)
        off = (t["returns"] - t["token_level_rewards"]).abs().where(valid, 0).gather(1, last)[:, 0]
        found["returns_without_reward"] = (stopped & alive & (off > CLOSE * (1 + t["values"].abs().amax(1)))).sum()
    if "ref_log_prob" in t and "old_log_probs" in t:
        penalty, far = t["token_level_scores"] - t["token_level_rewards"], t["old_log_probs"] - t["ref_log_prob"]
        paid = -penalty * far  # k1: never above 0; of k2 and k3, whose far may be below 0, the penalty never is
        found["kl_is_paid"] = (masked_sum(paid, valid) > 0) & (masked_sum(penalty, valid) < 0)
        found["kl_is_paid"] &= masked_mean(far.abs(), valid) > CLOSE**2
    return faults(found)


# ---- how fast a step was ------------------------------------------------------------------------

PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "H200 NVL": 835,
    "H200": 989,
    "H20": 148,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090$": 165,
}
"""TFLOP/s of dense bf16 matrix products with sums in fp32, by NVIDIA's data sheets (half of what they give "with
sparsity"), for words in the device's name; the first that is found counts."""


def peak_tflops(device: torch.device) -> float | None:
    """Of a GPU; None for a CPU, and for a GPU that is not in the table."""
    if device.type == "cpu":
        return None
    name = device_name(device)
    return next((peak for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}(?!\w)", name)), None)


def throughput_metrics(metrics: Mapping[str, float], n_devices: int, peak: float | None = None) -> dict[str, float]:
    """Throughput, from a step's times, tokens and FLOPs over all ranks.

    - perf/idle: the share of the step in which ranks wait: for scores, for asynchronous rollouts, and in the update for
      the rank with most to compute (perf/imbalance)
    - perf/mfu: the update's model FLOPs (lib/model/flops.py) over its time, as a share of `peak` (TFLOP/s of a device)
    - timing_per_token_ms/<stage>: per token of the trained rows; for the rollout, per token of the responses
    """
    seconds, tokens = metrics["timing_s/step"], metrics["training/tokens"]
    update = metrics.get("timing_s/update", 0.0)
    waits = metrics.get("timing_s/reward", 0.0)
    if "perf/requests_resampled" in metrics:  # servers sample
        waits += metrics.get("timing_s/rollout", 0.0)
    waits += update * (1 - 1 / metrics.get("perf/imbalance", 1.0))
    speed = {
        "perf/idle": waits / seconds,
        "perf/time_per_step": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/tokens_per_s_per_device": tokens / seconds / n_devices,
    }
    responses, prompts = (metrics.get(f"training/{part}_tokens", 0.0) for part in ("response", "prompt"))
    for stage in ("rollout", "log_probs", "advantages", "update"):
        if responses and (spent := metrics.get(f"timing_s/{stage}")) is not None:
            own = responses + (stage != "rollout") * prompts
            speed[f"timing_per_token_ms/{stage}"] = 1000 * spent / own
    if peak and update and "perf/update_tflops" in metrics:
        speed["perf/mfu"] = metrics["perf/update_tflops"] / update / n_devices / peak
    return speed
