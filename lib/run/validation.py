"""Validation: scores from n samples per prompt, by unbiased estimators (1 - (1 - c/n)^k is biased)."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

import numpy as np

from lib import InputError
from lib.args import Sizes, ValidationArgs, ValidationSet
from lib.data import PromptDataset, collate_fn
from lib.data_proto import DataProto
from lib.distributed import all_gather_lists, broadcast, enter_stage, timed
from lib.log.metrics import merge_metrics
from lib.log.rollouts import sample_rows
from lib.log.tracking import Tracker
from lib.model import Policy
from lib.reward.scores import Rewards, is_number
from lib.rollout import Rollouts, request_seeds, truncated_rows
from lib.sampling import seeded

SHOWN = 3  # samples that a run prints at its end; samples.jsonl has all


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, contain one of the c right ones: arXiv:2107.03374,
    eq. 1."""
    return 1.0 - comb(n - c, k) / comb(n, k)


def maj_at_k(preds: Sequence, scores: Sequence[float], k: int, max_subsets: int = 2000) -> float:
    """Expected score of the most frequent answer among k of one prompt's n samples.

    Exact over all C(n, k) subsets up to `max_subsets`, else the mean of that many seeded draws. An answer's score
    is the mean of its samples in the subset; a tie gives the mean of the tied answers. A sample without an answer
    (None or "") has no vote. A subset without any vote gives the mean of its scores."""
    drawn = _subsets(len(preds), k, max_subsets)  # (S, n), 1 = in the subset
    values = np.asarray(scores, dtype=float)
    majority = drawn @ values / k  # (S,)
    answers: list = []  # compared by ==: an answer may be a list
    for pred in preds:
        if pred not in (None, "", *answers):
            answers.append(pred)
    if answers:
        votes = np.array([[pred == answer for answer in answers] for pred in preds], float)  # (n, A)
        counts = drawn @ votes  # (S, A)
        answer_scores = drawn @ (votes * values[:, None]) / np.maximum(counts, 1)
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
    """Expected maximum of k of n values: Σ_j x_j·C(j − 1, k − 1) / C(n, k) of sorted x."""
    n = len(values)
    return float(np.dot(np.sort(values), [comb(below, k - 1) / comb(n, k) for below in range(n)]))


def confidence_interval(prompts: Sequence[Sequence[float]], z: float = 1.96) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean over prompts, each with the values of its samples.

    Values of 0 and 1, or of -1 and 1: Wilson's (JASA 22, 1927). Each prompt is one observation, since its samples
    depend on one another. Others: mean -+ z x standard error over prompts; None for a single prompt."""
    means, n = np.array([np.mean(samples) for samples in prompts], dtype=float), len(prompts)
    mean, values = float(means.mean()), {value for samples in prompts for value in samples}
    for worst in 0, -1:
        if values <= {worst, 1}:
            share = (mean - worst) / (1 - worst)
            half = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
            ends = ((share + z * z / (2 * n) + side * half) / (1 + z * z / n) for side in (-1, 1))
            low, high = (worst + (1 - worst) * min(max(end, 0.0), 1.0) for end in ends)
            return low, high
    if n == 1:
        return None
    half = z * float(means.std(ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


class Validated(NamedTuple):
    """One response to a validation prompt."""

    prompt: int  # the prompt's number in the data set
    data_source: str
    numbers: dict[str, float]  # "score" and the scorer's other numbers; empty if it was not scored
    answer: Any  # the scorer's "pred"; None or "": no answer
    truncated: bool


def validated_rows(batch: DataProto, extras: Mapping[str, list], prompts: Sequence[int]) -> list[Validated]:
    """The rows of a scored batch. extras: values by key; prompts: numbers; both may have more than B."""
    scored = batch.batch["response_mask"].any(1).tolist()
    columns = {"score": batch.batch["token_level_scores"].sum(1).tolist()} | dict(extras)
    answers = columns.pop("pred", [None] * len(batch))
    sources, truncated = batch.non_tensor_batch["data_source"], truncated_rows(batch).tolist()
    rows = []
    for i in range(len(batch)):
        values = {key: column[i] for key, column in columns.items() if scored[i]}
        numbers = {key: float(value) for key, value in values.items() if is_number(value)}
        rows.append(Validated(prompts[i], sources[i], numbers, answers[i], truncated[i]))
    return rows


def validation_metrics(rows: Sequence[Validated], correct_above: float = 0.5) -> dict[str, float]:
    """val/<data_source>/... from the responses of all ranks, n for every prompt; k = 1, 2, 4, ... n.

    - mean@n, best@k, maj@k of the score, and under <key>/ of each number that the scorer gave: the mean of the
      samples, the expected maximum of k, the value of the most frequent answer among k
    - pass@k: the chance that one of k is right: its "acc" (of the first scorer that gives one), or else its score, is
      above `correct_above`
    - mean@n/ci_low, ci_high of that "acc" or score: its `confidence_interval`; without one, its mean
    - mean@n/lower_bound, for --keep-best: the lower end of each mean@n's interval
    - clip_ratio: the share of truncated responses
    - unscored, and val/unscored over all sources: responses that are in no other number. A prompt with fewer than k
      scored samples is not in the numbers at k

    Raises InputError if two numbers have one name ("b" of data source "a", the score of data source "a/b"), and
    ValueError if prompts of one data source have different numbers of responses."""
    of_source: dict[str, dict[int, list[Validated]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        of_source[row.data_source][row.prompt].append(row)
    metrics: list[dict[str, float]] = [{"val/unscored": sum(not row.numbers for row in rows)}]
    for source, prompts in of_source.items():
        sizes = {len(samples) for samples in prompts.values()}
        if len(sizes) > 1:
            every = "every prompt needs the same number"
            raise ValueError(f"{source}: prompts with {sorted(sizes)} samples; {every}")
        of_this = _source_metrics(list(prompts.values()), correct_above)
        metrics.append({f"val/{source}/{name}": value for name, value in of_this.items()})
    return merge_metrics(metrics)


def _source_metrics(prompts: list[list[Validated]], correct_above: float) -> dict[str, float]:
    n = len(prompts[0])
    scored = [[row for row in samples if row.numbers] for samples in prompts]
    every = [row for samples in scored for row in samples]
    metrics: dict[str, float] = {"unscored": n * len(prompts) - len(every)}
    if every:
        metrics["clip_ratio"] = float(np.mean([row.truncated for row in every]))
    keys = dict.fromkeys(key for row in every for key in row.numbers)
    accuracy = next((key for key in keys if f"/{key}".endswith("/acc")), "score")
    for key in keys:
        having = [[row for row in samples if key in row.numbers] for samples in scored]
        values = [[row.numbers[key] for row in samples] for samples in having if samples]
        answers = [[row.answer for row in samples] for samples in having if samples]
        voted = any(answer not in (None, "") for samples in answers for answer in samples)
        name = "" if key == "score" else f"{key}/"
        metrics[f"{name}mean@{n}"] = float(np.mean([np.mean(samples) for samples in values]))
        interval = confidence_interval(values)
        if interval is not None:
            metrics[f"{name}mean@{n}/lower_bound"] = interval[0]
        if key == accuracy:
            mean = metrics[f"{name}mean@{n}"]
            low, high = interval or (mean, mean)
            metrics |= {f"{name}mean@{n}/ci_low": low, f"{name}mean@{n}/ci_high": high}
        for k in sorted({2**power for power in range(n.bit_length())} | {n}):
            enough = [(x, votes) for x, votes in zip(values, answers) if len(x) >= k]
            if not enough:
                break
            if k > 1:
                metrics[f"{name}best@{k}"] = float(np.mean([best_at_k(x, k) for x, _ in enough]))
            if voted:
                metrics[f"{name}maj@{k}"] = float(np.mean([maj_at_k(votes, x, k) for x, votes in enough]))
            if key == accuracy:
                right = [pass_at_k(len(x), sum(score > correct_above for score in x), k) for x, _ in enough]
                metrics[f"pass@{k}"] = float(np.mean(right))
    return metrics


@dataclass
class Validation:
    args: ValidationArgs
    sets: list[tuple[ValidationSet, PromptDataset]]
    rollouts: Rollouts
    rewards: Rewards
    sizes: Sizes
    tracker: Tracker

    def __post_init__(self):
        if len(self.sets) > 1:
            check_sources(self.sets)

    @timed("validation")
    def __call__(self, actor: Policy, step: int) -> dict[str, float]:
        """validation_metrics of the policy after `step` steps. Writes samples.jsonl. A collective."""
        metrics = self.rollouts.sync(actor, step)
        results: list[Validated] = []
        shown: list[dict] = []
        folder = broadcast(self.tracker.run_dir)
        for batch, extras, prompts in self._scored_batches(step):
            results += validated_rows(batch, extras, prompts)
            shown += sample_rows(batch, self.rewards.manager.tokenizer, folder)
        results = sorted(all_gather_lists(results), key=lambda row: row.prompt)  # on any number of ranks
        self.tracker.samples(all_gather_lists(shown), step, show=SHOWN)
        return metrics | validation_metrics(results)

    def _scored_batches(self, step: int) -> Iterator[tuple[DataProto, dict[str, list], list[int]]]:
        """This rank's responses: (batch, extras of the scorer, number of each row's prompt). A collective."""
        world = self.rollouts.world
        first_prompt = first_response = 0  # of the set, among those of all sets
        for val_set, dataset in self.sets:
            n, sampling = val_set.samples, val_set.sampling(self.rollouts.sampling)
            per_rank = math.ceil(len(dataset) / world.size)
            per_call = max(1, self.sizes.local_rows // n)
            for start in range(0, per_rank, per_call):
                enter_stage(f"validation at step {step}")
                # the same number of rows on every rank: rows beyond the data set's end are cut off again
                part = range(start, min(start + per_call, per_rank))
                rows = [world.rank + world.size * i for i in part]
                items = collate_fn([self._item(dataset, row, first_prompt) for row in rows])
                prompts = DataProto.from_single_dict(items).to(world.device)
                prompts.non_tensor_batch["uid"] = np.array([f"val-{first_prompt + row}" for row in rows], dtype=object)
                of_prompt = [first_prompt + row for row in rows for _ in range(n)]
                numbers = [first_response + row * n + sample for row in rows for sample in range(n)]
                seeds = request_seeds(self.rollouts.seed, -1, numbers)
                batch = self.rollouts.generate(prompts, n, sampling=sampling, seeds=seeds)
                extras, _ = self.rewards.submit(batch, step).add_to(batch)
                yield batch[: sum(row < len(dataset) for row in rows) * n], extras, of_prompt
            first_prompt += len(dataset)
            first_response += len(dataset) * n

    def _item(self, dataset: PromptDataset, row: int, first_prompt: int) -> dict:
        with seeded(f"{self.rollouts.seed} validation {first_prompt + row}"):
            return dataset[min(row, len(dataset) - 1)]

    def close(self) -> None:
        self.rewards.close()


def check_sources(sets: Sequence[tuple[ValidationSet, Any]]) -> None:
    """Raises InputError if a data source is in two sets: its metrics would mix two samplings."""
    files: dict[str, str] = {}
    for val_set, dataset in sets:
        for source in sorted(dataset.data_sources):
            if source in files:
                both = f"{files[source]} and {val_set.files[0]} both have data_source {source!r}"
                advice = "with a sampling of its own each file needs its own name"
                raise InputError(f"--val-files: {both}: {advice}")
            files[source] = val_set.files[0]
