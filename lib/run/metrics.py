"""Numbers about a step: what a batch looks like, validation scores, times. Pure functions, but for one gather.

Traps it avoids: a mean of per-rank means is wrong when ranks hold different counts, so a rank reports totals and counts
(`Mean`, `Sum`, `Max`, `Min`) and `reduce_metrics` finishes them; pass@k as 1 - (1 - c/n)^k is biased; rows without a
trained token (padding, failed rollouts) are counted and stay out of every other number. A metric without any data in
this step is left out, not reported as 0.
"""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from lib import InputError
from lib.data_proto import DataProto
from lib.distributed import enter_stage

# ---- reduction over ranks ------------------------------------------------------------------------


class Mean(NamedTuple):
    """total / count over all ranks; left out where the count is 0."""

    total: float
    count: float


class Sum(NamedTuple):
    value: float


class Max(NamedTuple):
    value: float


class Min(NamedTuple):
    value: float


Metric = Mean | Sum | Max | Min | float


def reduce_metrics(local: Mapping[str, Metric], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """The metrics of all ranks as plain floats, equal on every rank. A collective; without a process group: local only.

    Ranks may lack keys. A plain number is the same on all ranks already (a learning rate): the lowest rank's is taken.
    """
    ranks = [dict(local)]
    if dist.is_initialized():
        ranks = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(ranks, dict(local), group=group)
    reduced = {}
    for key in dict.fromkeys(key for metrics in ranks for key in metrics):
        parts = [metrics[key] for metrics in ranks if key in metrics]
        match parts[0]:
            case Mean():
                count = sum(part.count for part in parts)
                if count > 0:
                    reduced[key] = float(sum(part.total for part in parts) / count)
            case Sum():
                reduced[key] = float(sum(part.value for part in parts))
            case Max():
                reduced[key] = float(max(part.value for part in parts))
            case Min():
                reduced[key] = float(min(part.value for part in parts))
            case plain:
                reduced[key] = float(plain)
    return reduced


def add_metrics(total: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Adds the metrics of one more micro-batch to those of this rank, in place."""
    for key, new in more.items():
        match total.get(key):
            case None:
                total[key] = new
            case Mean(value, count):
                total[key] = Mean(value + new.total, count + new.count)
            case Sum(value):
                total[key] = Sum(value + new.value)
            case Max(value):
                total[key] = Max(max(value, new.value))
            case Min(value):
                total[key] = Min(min(value, new.value))


def token_means(values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Metric]:
    """The mean of each (B, T) tensor over the tokens of the mask, over all micro-batches and ranks."""
    mask = mask.bool()
    return {name: Mean(value[mask].double().sum().item(), int(mask.sum())) for name, value in values.items()}


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


# ---- the batch of a step -------------------------------------------------------------------------


def data_metrics(batch: DataProto, correct_above: float = 0.5) -> dict[str, Metric]:
    """Local metrics of a training batch, for `reduce_metrics`. All rows of one uid must be on one rank.

    Reads token_level_scores, response_mask (B, T), attention_mask (B, L), prompts (B, P), uid, and if they are there
    advantages and live_mask (B, T), and finish_reason ("length" = clipped).

    - reward/{mean,max,min}: the sum of a row's token_level_scores
    - reward/zero_variance, all_right, all_wrong: the fraction of groups (one uid, at least two rows) with equal scores,
      with all scores above `correct_above`, with none above
    - response_length/{mean,max,min}: tokens after the prompt, tool outputs included; response_length/clip_ratio
    - prompt_length/{mean,max,min}, advantages/{mean,max,min} (over the tokens of live_mask), rollout/dead_rows
    """
    tensors = batch.batch
    trained = tensors["response_mask"].bool()  # (B, T)
    alive = trained.any(-1)  # (B,)
    prompt_width = tensors["prompts"].shape[1]
    scores = tensors["token_level_scores"].sum(-1)[alive]
    lengths = tensors["attention_mask"][:, prompt_width:].sum(-1)
    metrics = {
        **_spread("reward", scores),
        **_spread("response_length", lengths[alive]),
        **_spread("prompt_length", tensors["attention_mask"][:, :prompt_width].sum(-1)[alive]),
        "rollout/dead_rows": Sum(int((~alive).sum())),
    }
    if "finish_reason" in batch.non_tensor_batch:
        metrics["response_length/clip_ratio"] = Mean(int(_truncated(batch)[alive.cpu()].sum()), int(alive.sum()))
    if (advantages := tensors.get("advantages", None)) is not None:
        metrics |= _spread("advantages", advantages[tensors["live_mask"].bool()])

    groups = defaultdict(list)
    for uid, score in zip(batch.non_tensor_batch["uid"][alive.cpu().numpy()], scores.tolist()):
        groups[uid].append(score)
    several = [group for group in groups.values() if len(group) > 1]
    metrics["reward/zero_variance"] = Mean(sum(max(g) == min(g) for g in several), len(several))
    metrics["reward/all_right"] = Mean(sum(min(g) > correct_above for g in several), len(several))
    metrics["reward/all_wrong"] = Mean(sum(max(g) <= correct_above for g in several), len(several))
    return metrics


def _truncated(batch: DataProto) -> torch.Tensor:
    """(B,) bool, on the CPU: responses that the limit cut off."""
    return torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])


def rows_dropped(stages: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """training/rows_dropped/<stage>: rows that lost their last token there. stages: masks (B, T), each in the former.

    The masks are those of the batch of all ranks, so these are plain numbers.
    """
    metrics, alive = {}, None
    for name, mask in stages.items():
        before, alive = alive, mask.bool().any(1)
        metrics[f"training/rows_dropped/{name}"] = float((~alive if before is None else before & ~alive).sum())
    return metrics


def extra_metrics(extras: Mapping[str, list]) -> dict[str, Metric]:
    """reward/<key>/mean: of the numbers that a scorer gave beside its score; not of text and None, nor of "pred".

    A level of their own, and so in validation: whatever a scorer calls its numbers, they are not taken for others.
    """
    metrics: dict[str, Metric] = {}
    for name, values in extras.items():
        numbers = [float(value) for value in values if _is_number(value)]
        if numbers and name != "pred":
            metrics[f"reward/{name}/mean"] = Mean(sum(numbers), len(numbers))
    return metrics


def _is_number(value) -> bool:
    """Not NaN or infinite, nor an integer that no float holds."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask, all (B, T): 1 is a perfect critic, 0 one that knows only
    the mean; 0 where the returns are all equal. Of the batch of all ranks."""
    values, returns = values[mask.bool()].double(), returns[mask.bool()].double()
    variance = float(returns.var(correction=0)) if len(returns) else 0.0
    return 1 - float((returns - values).var(correction=0)) / variance if variance else 0.0


def reward_components(extras: Mapping[str, list], keys: Sequence[str], scores: torch.Tensor) -> torch.Tensor:
    """(B, K): the K rewards of each row that a scorer gave beside its score; 0 where it gave none (aborted, failed).

    scores (B, T): for B and the device. A collective. Raises InputError, on all ranks, for a key of which none has
    numbers.
    """
    columns = {key: extras.get(key, [None] * len(scores)) for key in keys}
    # where all are None, extras has the key because there were numbers in an earlier step
    known = {k: k in extras and any(v is None or _is_number(v) for v in column) for k, column in columns.items()}
    for key, anywhere in reduce_metrics({key: Max(float(here)) for key, here in known.items()}).items():
        if not anywhere:
            raise InputError(f"--reward-keys {key}: the scorers give no number of that name, but {', '.join(extras)}")
    values = [[float(value) if _is_number(value) else 0.0 for value in columns[key]] for key in keys]
    return torch.tensor(values, device=scores.device).T


@torch.no_grad()
def mismatch_metrics(
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    outside: torch.Tensor | None = None,
) -> dict[str, Metric]:
    """How far the trainer's policy is from the one that sampled, with the same weights. All (B, T).

    r = π_train / π_rollout, the log ratio clamped to ±20. rollout/logp_diff and prob_diff: mean and max |difference|;
    k1, k3: estimates of KL(π_rollout ‖ π_train), the tokens being π_rollout's; ratio_mean, ratio_max, ratio_min of r;
    chi2 = mean r² − 1, the χ² divergence: importance weights r leave about 1 / (1 + chi2) of the sample. outside: share
    of tokens that the trainer's top-p or top-k would not have kept (`response_log_probs`).
    """
    mask = mask.bool()
    train, rollout = log_probs[mask].double(), rollout_log_probs[mask].double()  # (N,)
    if len(train) == 0:
        return {}
    log_ratio = (train - rollout).clamp(-20, 20)
    ratio = log_ratio.exp()
    logp_diff, prob_diff = (train - rollout).abs(), (train.exp() - rollout.exp()).abs()
    means = {
        "logp_diff_mean": logp_diff,
        "prob_diff_mean": prob_diff,
        "k1": -log_ratio,
        "k3": torch.expm1(log_ratio) - log_ratio,
        "ratio_mean": ratio,
        "chi2": ratio.square() - 1,
    }
    if outside is not None:
        means["outside"] = outside[mask]
    return {
        **{f"rollout/{name}": Mean(value.sum().item(), len(value)) for name, value in means.items()},
        "rollout/logp_diff_max": Max(logp_diff.max().item()),
        "rollout/prob_diff_max": Max(prob_diff.max().item()),
        "rollout/ratio_max": Max(ratio.max().item()),
        "rollout/ratio_min": Min(ratio.min().item()),
    }


# ---- validation ----------------------------------------------------------------------------------


def pass_at_k(n: np.ndarray | int, c: np.ndarray | int, k: int) -> np.ndarray:
    """Chance that k of n samples, drawn without replacement, hold one of the c right ones: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of arXiv:2107.03374, eq. 1, as a product without large numbers; n and c broadcast.
    """
    n, c = np.broadcast_arrays(np.asarray(n, dtype=np.int64), np.asarray(c, dtype=np.int64))
    if k < 1 or np.any(n < k) or np.any(c < 0) or np.any(c > n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got k={k}, n={n}, c={c}")
    none_right = np.ones(n.shape)
    for drawn in range(k):
        none_right *= (n - c - drawn) / (n - drawn)
    return 1.0 - none_right


def maj_at_k(preds: Sequence, scores: Sequence[float], k: int, max_subsets: int = 2000) -> float:
    """Expected score of the most frequent answer among k of one prompt's n samples, drawn without replacement.

    Exact over all C(n, k) subsets when these are at most `max_subsets`, else the mean of that many seeded draws. An
    answer's score is the mean of its samples in the subset; a tie gives the mean score of the tied answers. A sample
    without an answer (None, or "" as verl's scorers write it) has no vote; a subset without any vote gives the mean of
    its scores.
    """
    n = len(preds)
    if not 1 <= k <= n or len(scores) != n:
        raise ValueError(f"maj@k needs 1 <= k <= n and n scores, got k={k}, {n} preds, {len(scores)} scores")
    drawn = _subsets(n, k, max_subsets)  # (S, n), 1 = in the subset
    scores = np.asarray(scores, dtype=float)
    majority = drawn @ scores / k  # (S,)
    answers = []  # compared by ==: an answer may be a list
    for pred in preds:
        if pred not in (None, "", *answers):
            answers.append(pred)
    if answers:
        votes = np.array([[pred == answer for answer in answers] for pred in preds], dtype=float)  # (n, A)
        counts = drawn @ votes  # (S, A)
        answer_scores = drawn @ (votes * scores[:, None]) / np.maximum(counts, 1)
        leads = (counts == counts.max(1, keepdims=True)) & (counts > 0)
        voted = leads.any(1)
        majority[voted] = ((answer_scores * leads).sum(1)[voted]) / leads.sum(1)[voted]
    return float(majority.mean())


@lru_cache
def _subsets(n: int, k: int, max_subsets: int) -> np.ndarray:
    if comb(n, k) <= max_subsets:
        chosen = np.array(list(combinations(range(n), k)))
    else:
        chosen = np.random.default_rng(0).random((max_subsets, n)).argsort(1)[:, :k]
    drawn = np.zeros((len(chosen), n))
    np.put_along_axis(drawn, chosen, 1.0, axis=1)
    return drawn


def best_at_k(values: Sequence[float], k: int) -> float:
    """Expected maximum of k of n values, drawn without replacement: Σ_j x_j·C(j − 1, k − 1) / C(n, k) of sorted x."""
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"best@k needs 1 <= k <= n, got k={k}, n={n}")
    return float(np.dot(np.sort(values), [comb(below, k - 1) / comb(n, k) for below in range(n)]))


class Validated(NamedTuple):
    """One response to a validation prompt."""

    prompt: int  # its number in the data set
    data_source: str
    numbers: dict[str, float]  # "score" and those that the scorer gave beside it; none if it was aborted or not scored
    answer: Any  # the scorer's "pred"; None or "": no answer
    truncated: bool


def validated_rows(batch: DataProto, extras: Mapping[str, list], prompts: Sequence[int]) -> list[Validated]:
    """The rows of a scored batch, for `validation_metrics`. extras: B values by key; prompts: B numbers."""
    scored = batch.batch["response_mask"].any(1).tolist()
    scores = batch.batch["token_level_scores"].sum(1).tolist()
    truncated, rows = _truncated(batch).tolist(), []
    for i, data_source in enumerate(batch.non_tensor_batch["data_source"]):
        given = {key: column[i] for key, column in extras.items()}
        answer = given.pop("pred", None)
        given = {"score": scores[i]} | given if scored[i] else {}
        numbers = {key: float(value) for key, value in given.items() if _is_number(value)}
        rows.append(Validated(prompts[i], data_source, numbers, answer, truncated[i]))
    return rows


def validation_metrics(rows: Sequence[Validated], correct_above: float = 0.5) -> dict[str, float]:
    """val/<data_source>/... from the responses of all ranks, n to every prompt; k = 1, 2, 4, ... n.

    - mean@n, best@k, maj@k of the score, and under <key>/ of each number that the scorer gave: the mean of the samples,
      the expected maximum of k, the value of the most frequent answer among k
    - pass@k: the chance that one of k is right, which is above `correct_above`: the scorer's "acc" where it gives one
      (of several scorers the first that does), else the score
    - mean@n/ci_low, ci_high of what is read as right: its 95 % bootstrap interval over prompts (1000 seeded draws)
    - clip_ratio: the share of truncated responses
    - unscored, and val/unscored of all sources: responses that are in no other number. Their prompts have fewer than n
      samples, and are not in the numbers at k where they have fewer than k

    Raises:
        ValueError: prompts of one data source have different numbers of responses.
    """
    of_source: dict[str, dict[int, list[Validated]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        of_source[row.data_source][row.prompt].append(row)
    metrics = {"val/unscored": sum(not row.numbers for row in rows)}
    for source, prompts in of_source.items():
        sizes = {len(samples) for samples in prompts.values()}
        if len(sizes) > 1:
            raise ValueError(f"{source}: prompts with {sorted(sizes)} samples; every prompt needs the same number")
        of_this = _source_metrics(list(prompts.values()), correct_above)
        metrics |= {f"val/{source}/{name}": value for name, value in of_this.items()}
    return metrics


def _source_metrics(prompts: list[list[Validated]], correct_above: float) -> dict[str, float]:
    n = len(prompts[0])
    scored = [[row for row in samples if row.numbers] for samples in prompts]
    every = [row for samples in scored for row in samples]
    metrics = {"unscored": n * len(prompts) - len(every)}
    if every:
        metrics["clip_ratio"] = float(np.mean([row.truncated for row in every]))
    keys = dict.fromkeys(key for row in every for key in row.numbers)
    accuracy = next((key for key in keys if f"/{key}".endswith("/acc")), "score")
    for key in keys:
        having = [[row for row in samples if key in row.numbers] for samples in scored]
        values = [[row.numbers[key] for row in samples] for samples in having if samples]
        answers = [[row.answer for row in samples] for samples in having if samples]
        voted = any(answer not in (None, "") for samples in answers for answer in samples)
        means = np.array([np.mean(samples) for samples in values])
        name = "" if key == "score" else f"{key}/"
        metrics[f"{name}mean@{n}"] = float(means.mean())
        if key == accuracy:
            rng = np.random.default_rng(0)
            draws = [means[rng.integers(len(means), size=len(means))].mean() for _ in range(1000)]
            for bound, percent in (("low", 2.5), ("high", 97.5)):
                metrics[f"{name}mean@{n}/ci_{bound}"] = float(np.percentile(draws, percent))
        for k in sorted({2**power for power in range(n.bit_length())} | {n}):
            enough = [pair for pair in zip(values, answers) if len(pair[0]) >= k]
            if not enough:
                break
            if k > 1:
                metrics[f"{name}best@{k}"] = float(np.mean([best_at_k(samples, k) for samples, _ in enough]))
            if voted:
                metrics[f"{name}maj@{k}"] = float(np.mean([maj_at_k(votes, samples, k) for samples, votes in enough]))
            if key == accuracy:
                right = [pass_at_k(len(x), sum(value > correct_above for value in x), k) for x, _ in enough]
                metrics[f"pass@{k}"] = float(np.mean(right))
    return metrics


# ---- trouble -------------------------------------------------------------------------------------

STATES = {  # what is said where a metric has this value
    "gradient 0": ("actor/grad_norm", 0),
    "the critic's gradient 0": ("critic/grad_norm", 0),
    "equal scores in every group": ("reward/zero_variance", 1),
    "every response cut off": ("response_length/clip_ratio", 1),
    "no row trained": ("training/rows_trained", 0),
}
COUNTS = {  # what is said, with the number, where a metric is above 0
    "skipped updates (gradient not finite)": "training/skipped_updates",
    "scorer errors": "reward/error_count",
    "scorer timeouts": "reward/timeout_count",
    "scorer crashes": "reward/crash_count",
    "keys of scorers left out": "reward/dropped_key_count",
    "tool exceptions": "agent/tool_errors/exception",
    "tool timeouts": "agent/tool_errors/timeout",
    "rows without a score or a token": "training/rows_dropped/dead",
    "unscored in validation": "val/unscored",
}
DROPPED = "training/rows_dropped/"


def troubles(metrics: Mapping[str, float]) -> list[str]:
    """What a reader of the console should hear of a step, in a few words each; mostly nothing."""
    states = [text for text, (key, bad) in STATES.items() if metrics.get(key) == bad]
    return states + [f"{text}: {metrics[key]:,.0f}" for text, key in COUNTS.items() if metrics.get(key)]


def trouble_of_run(rows: Sequence[Mapping]) -> list[str]:
    """The same of all rows of metrics.jsonl, and by what stage rows were dropped, and what was not finite."""

    def column(key: str) -> list[float]:
        return [row[key] for row in rows if row.get(key) is not None]

    lines = []
    for text, (key, bad) in STATES.items():
        if steps := column(key).count(bad):
            lines.append(f"{text} in {steps} of {len(column(key))} steps")
    for text, key in COUNTS.items():
        values = column(key)
        if any(values):
            lines.append(f"{text}: {sum(values):,.0f}, in {sum(map(bool, values))} of {len(values)} steps")
    for key in dict.fromkeys(key for row in rows for key in row if key.startswith(DROPPED)):
        if key not in COUNTS.values() and any(column(key)):
            stage, rows_in = key.removeprefix(DROPPED), sum(column("training/rows_in"))
            lines.append(f"rows dropped by {stage}: {sum(column(key)):,.0f} of {rows_in:,.0f}")
    for key, steps in Counter(key for row in rows for key in row.get("nonfinite", ())).items():
        lines.append(f"{key} not finite in {steps} of {len(rows)} rows of metrics.jsonl")
    return lines


# ---- time ----------------------------------------------------------------------------------------


class Timer:
    """`with timer("rollout"): ...` adds the block's seconds to timing_s/rollout; make a new one every step.

    The block is also a stage of the step for `enter_stage` in lib/distributed.py, and so is what comes after it.
    """

    def __init__(self, step: int = 0) -> None:
        self._step = step
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        enter_stage(f"step {self._step} {stage}")
        start = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # kernels that are still queued belong to this stage
            self._seconds[stage] += time.perf_counter() - start
            enter_stage(f"step {self._step} after {stage}")

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{stage}": seconds for stage, seconds in self._seconds.items()}


def throughput_metrics(timing: Mapping[str, float], tokens: int, n_devices: int) -> dict[str, float]:
    """From a timer's metrics with a stage "step" around all others, and the step's tokens over all ranks."""
    seconds = timing["timing_s/step"]
    return {
        "perf/time_per_step": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/tokens_per_s_per_device": tokens / seconds / n_devices,
    }
