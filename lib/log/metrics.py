"""Metrics of a step's batch.

A rank reports totals and counts (`Mean`, `Sum`, `Max`, `Min`), which `reduce_metrics` finishes: a mean of the ranks'
means is wrong if they hold different counts. Rows without a trained token (padding, failed rollouts) are counted and
are in no other number. A metric without any data in this step is left out."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from lib import InputError
from lib.core_algos import zero_variance_rows
from lib.data_proto import DataProto
from lib.distributed import Max, Mean, Metric, Min, Std, Sum, all_gather_lists, token_means
from lib.log.batch_checks import batch_faults
from lib.reward.manager import SHADOW
from lib.reward.scores import is_number
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
