"""Metrics of a step's batch.

A rank reports totals and counts (`Mean`, `Sum`, `Max`, `Min`), and `reduce_metrics` finishes them: a mean of per-rank
means is wrong if ranks hold different counts. Rows without a trained token (padding, failed rollouts) are counted and
stay out of every other number. A metric without any data in this step is left out, not reported as 0.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

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
    """This rank's metrics of a training batch, for `reduce_metrics`; groups are those of all ranks. A collective.

    Reads token_level_scores, response_mask (B, T), attention_mask (B, L), prompts (B, P), uid, and, if the batch has
    it, finish_reason ("length" = clipped).

    - reward/{mean,max,min}: the sum of a row's token_level_scores
    - reward/zero_variance, all_right, all_wrong: the fraction of groups (one uid, at least two rows) with equal scores
      (with reward_components (B, K): of each), with all scores above `correct_above`, with no score above it
    - response_length/{mean,max,min}: tokens after the prompt, tool outputs included; response_length/clip_ratio
    - source/<data_source>/{rows,reward,response_length,zero_variance}: of the rows of each data_source
    - prompt_length/{mean,max,min}; prompt_length/clip_ratio: prompts of P tokens, which is --max-prompt-length
    - rollout/dead_rows
    """
    tensors = batch.batch
    trained = tensors["response_mask"].bool()  # (B, T)
    alive = trained.any(-1)  # (B,)
    prompt_width = tensors["prompts"].shape[1]
    scores = tensors["token_level_scores"].sum(-1)[alive]
    prompts, lengths = tensors["attention_mask"].tensor_split([prompt_width], -1)
    prompts, lengths = prompts.sum(-1)[alive], lengths.sum(-1)
    metrics = {
        **_spread("reward", scores),
        **_spread("response_length", lengths[alive]),
        **_spread("prompt_length", prompts),
        "prompt_length/clip_ratio": Mean((prompts == prompt_width).sum().item(), len(prompts)),
        "rollout/dead_rows": Sum(int((~alive).sum())),
    }
    if "finish_reason" in batch.non_tensor_batch:
        metrics["response_length/clip_ratio"] = Mean(int(truncated_rows(batch)[alive].sum()), int(alive.sum()))

    own, uids = alive.cpu().numpy(), batch.non_tensor_batch["uid"]
    sources = list(batch.non_tensor_batch.get("data_source", uids)[own])
    parts = tensors["reward_components"][alive].tolist() if "reward_components" in tensors else [None] * len(scores)
    rows = all_gather_lists(list(zip(uids[own], scores.tolist(), parts, sources)))
    groups: dict[str, list[int]] = defaultdict(list)
    for number, (uid, *_) in enumerate(rows):
        groups[uid].append(number)
    several = [group for group in groups.values() if len(group) > 1]
    equal = _without_signal(rows)
    if "data_source" in batch.non_tensor_batch:
        metrics |= _by_source(sources, scores, lengths[alive], [(rows[g[0]][3], equal[g[0]]) for g in several])
    of_all = [[rows[number][1] for number in group] for group in several]
    metrics["reward/zero_variance"] = Mean(sum(equal[group[0]] for group in several), len(several))
    metrics["reward/all_right"] = Mean(sum(min(g) > correct_above for g in of_all), len(several))
    metrics["reward/all_wrong"] = Mean(sum(max(g) <= correct_above for g in of_all), len(several))
    return metrics


def _without_signal(rows: list[tuple[str, float, list[float] | None, str]]) -> list[bool]:
    """Whether the group of each row (uid, score, its components, source) has equal scores."""
    if not rows:
        return []
    uids, scores, parts, _ = zip(*rows)
    column = torch.tensor(scores)[:, None]  # (B, 1)
    components = torch.tensor(parts) if parts[0] is not None else None
    return zero_variance_rows(column, torch.ones_like(column), np.array(uids, dtype=object), components).tolist()


def _by_source(
    sources: list, scores: torch.Tensor, lengths: torch.Tensor, groups: list[tuple[str, bool]]
) -> dict[str, Metric]:
    """sources, scores, lengths: of each alive row. groups: the source of each on all ranks, and whether its scores are
    equal."""
    metrics: dict[str, Metric] = {}
    for source in sorted({*sources}):
        own = [row for row, name in enumerate(sources) if name == source]
        metrics |= {
            f"source/{source}/rows": Sum(len(own)),
            f"source/{source}/reward": Mean(scores[own].double().sum().item(), len(own)),
            f"source/{source}/response_length": Mean(lengths[own].sum().item(), len(own)),
        }
    for source in sorted({name for name, _ in groups}):
        alike = [same for name, same in groups if name == source]
        metrics[f"source/{source}/zero_variance"] = Mean(sum(alike), len(alike))
    return metrics


def row_metrics(batch: DataProto, *others: DataProto) -> dict[str, Metric]:
    """This rank's numbers of rows and tokens that came in, and of those that were trained on: loss_mask (B, T); and
    what `batch_faults` finds. others: further responses that the step sampled; their tokens are in training/tokens.

    advantages, returns and, with a critic, values: {mean,max,min} over the tokens of valid_mask (B, T).
    token_level_rewards/{mean,max,min}: of a row's sum, after KL and penalties, over the rows of valid_mask."""
    tensors = batch.batch
    trained, sampled, valid = tensors["loss_mask"], tensors["response_mask"], tensors["valid_mask"].bool()
    prompts, responses = tensors["attention_mask"].tensor_split([-sampled.shape[1]], 1)
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
        "training/tokens": Sum(sum(rows.batch["attention_mask"].sum().item() for rows in (batch, *others))),
    }


def merge_metrics(metrics: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """One dict of several. Raises InputError for a name that two of them have, since one value would be lost."""
    merged: dict[str, Value] = {}
    for found in metrics:
        if twice := sorted(merged.keys() & found.keys()):
            advice = "rename one of them (a data source, a number of a scorer, a metric of the script)"
            raise InputError(f"two metrics of one step are called {twice[0]!r}: {advice}")
        merged |= found
    return merged


def extra_metrics(extras: Mapping[str, list]) -> dict[str, Metric]:
    """reward/<key>/mean of each number that a scorer gave besides its score, shadow/<name>/mean of each score that is
    not trained on. Text, None and "pred" have no mean."""
    metrics: dict[str, Metric] = {}
    for name, values in extras.items():
        numbers = [float(value) for value in values if is_number(value)]
        if numbers and name != "pred":
            metrics[f"{name}/mean" if name.startswith(SHADOW) else f"reward/{name}/mean"] = Mean(
                sum(numbers), len(numbers)
            )
    return metrics


@torch.no_grad()
def mismatch_metrics(
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    outside_top_p: torch.Tensor | None = None,
) -> dict[str, Metric]:
    """How far the trainer's log-probs are from the engine's, with the same weights. All (B, T).

    r = π_train / π_rollout, the log ratio clamped to ±20. logp_diff: mean and max |difference|; rollout_probs_diff:
    mean, max and standard deviation of the difference of the probabilities (verl's names);
    k1, k3: estimates of KL(π_rollout ‖ π_train) on tokens sampled from π_rollout; ratio_mean, ratio_max, ratio_min of
    r; chi2 = mean r² − 1, the χ² divergence: with importance weights r the effective sample size is about 1 / (1 +
    chi2) of the sample. outside_top_p: share of tokens that the trainer's top-p or top-k would not have kept
    (`response_log_probs`).
    """
    if mask.numel() == 0:
        return {}
    mask = mask.bool()
    train, rollout = (x.double().where(mask, 0) for x in (log_probs, rollout_log_probs))  # (B, T); no sync of a GPU
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
    largest = {"rollout/logp_diff_max": logp_diff, "rollout/ratio_max": ratio}
    largest["training/rollout_probs_diff_max"] = prob_diff
    return {
        **token_means(means, mask),
        "training/rollout_probs_diff_std": Std(prob_diff.sum(), prob_diff.square().sum(), mask.sum()),
        **{name: Max(value.where(mask, -math.inf).amax()) for name, value in largest.items()},
        "rollout/ratio_min": Min(ratio.where(mask, math.inf).amin()),
    }
