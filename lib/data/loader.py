"""The endless loader that hands each rank its share of a step's prompts."""

import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lib import InputError
from lib.columns import COLUMNS
from lib.core_algos import ROUNDING
from lib.data.dataset import PromptDataset
from lib.distributed import all_gather_lists
from lib.sampling import seeded

ROW = "data_row"  # column of the row's number in the data set
GOLDEN = (5**0.5 - 1) / 2


def collate_fn(items: list[dict]) -> dict[str, torch.Tensor | np.ndarray]:
    """Tensors are stacked to (B, ...), the rest becomes 1-D object arrays (B,). input_ids, attention_mask and
    position_ids lose the columns that are padding in all rows."""
    batch: dict[str, torch.Tensor | np.ndarray] = {}
    for key in items[0]:
        values = [item[key] for item in items]
        if isinstance(values[0], torch.Tensor):
            batch[key] = torch.stack(values)
        else:
            batch[key] = np.fromiter(values, dtype=object, count=len(values))  # 1-D also for lists of equal length
    if "attention_mask" in batch:
        longest = int(batch["attention_mask"].sum(1).max())
        batch |= {key: x[..., -longest:] for key, x in batch.items() if key in COLUMNS and COLUMNS[key].width == "L"}
    return batch


def _collate_in_worker(items: list[dict]) -> dict:
    """Pixels go as bytes: torch sends a tensor as a file descriptor that stays open while the tensor lives. A few
    hundred prompts with images would reach a process's limit, and the loader would hang."""
    batch: dict = collate_fn(items)
    if "multi_modal_inputs" in batch:
        batch["multi_modal_inputs"] = pickle.dumps(batch["multi_modal_inputs"])
    return batch


class Difficulty:
    """The history of each row of a data set, the same on all ranks. A group of equal scores has no advantage, whether
    the prompt is solved or hopeless: a prompt is as useful as its last scores vary.

    skip_after: a row is skipped after so many
    consecutive groups of equal scores. share: the probability that a skipped row is sampled anyway; in `draw`, the
    share of the probability that is uniform over all rows."""

    def __init__(self, num_rows: int, skip_after: int, share: float):
        self.skip_after, self.share = skip_after, share
        self.variance = np.full(num_rows, np.nan)  # of the last group's scores; nan: not seen
        self.alike = np.zeros(num_rows, dtype=int)  # groups in a row whose scores were equal

    def record_scores(self, rows: Iterable[int], scores: Iterable[list[float]]) -> None:
        """rows, scores: of each response of this rank; several scores (of gdpo) are compared one by one.
        A row with one response tells nothing. A collective."""
        of_row: dict[int, list[list[float]]] = defaultdict(list)
        for row, score in all_gather_lists(list(zip(rows, scores, strict=True))):
            of_row[row].append(score)
        for row, own in of_row.items():
            if len(own) > 1:
                # sorted: the same sum on any number of ranks; NaN: a reward that the scorer did not give
                columns = [ordered for column in zip(*own) if (ordered := sorted(x for x in column if x == x))]
                self.variance[row] = sum(float(np.var(ordered)) for ordered in columns)
                alike = all(x[-1] - x[0] <= ROUNDING * max(abs(x[0]), abs(x[-1])) for x in columns)
                self.alike[row] = self.alike[row] + 1 if alike else 0

    def skips(self, row: int, rng: np.random.Generator) -> bool:
        return self.alike[row] >= self.skip_after and rng.random() >= self.share

    def draw(self, n: int, rng: np.random.Generator, rows: range) -> list[int]:
        """n of the rows, in proportion to the variance of their last scores; of an unseen row the largest one seen."""
        variance, N = self.variance[rows.start : rows.stop], len(rows)
        seen = ~np.isnan(variance)
        weights = np.where(seen, variance, variance[seen].max(initial=0.0))
        if not weights.any():
            weights = np.ones(N)
        p = (1 - self.share) * weights / weights.sum() + self.share / N
        return (rows.start + rng.choice(N, n, replace=n > N, p=p / p.sum())).tolist()

    def metrics(self) -> dict[str, float]:
        shares = {"prompts/seen": ~np.isnan(self.variance), "prompts/skipped": self.alike >= self.skip_after}
        return {name: float(rows.mean()) for name, rows in shares.items()}

    def state_dict(self) -> dict[str, list]:
        rows = np.flatnonzero(~np.isnan(self.variance))
        own = {"rows": rows, "variance": self.variance[rows], "alike": self.alike[rows]}
        return {name: values.tolist() for name, values in own.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.variance[state["rows"]], self.alike[state["rows"]] = state["variance"], state["alike"]


@dataclass(eq=False)
class _StepSampler:
    """Yields this rank's rows of the stream, step after step, without end.

    Each source has a part of [0, 1) as long as its weight. Place k of the stream belongs to the source in whose part
    k x 0.618... modulo 1 lies: these numbers are spread evenly, so any stretch has each source's share to a few rows.
    """

    sources: Sequence[range]  # the rows of each source, or of all as one
    weights: Sequence[float]  # of each source; their sum is 1
    prompts_per_step: int
    rank: int
    world_size: int
    seed: int
    shuffle: bool
    sampling: str
    difficulty: Difficulty
    start: int = 0
    given: Sequence[int] = ()  # what was yielded last

    def __post_init__(self):
        self.skipped = np.zeros(len(self.sources), dtype=int)  # rows that --prompt-sampling skip has left out
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # of a source: its epoch, and the order of its rows
        self._place, self._taken = 0, np.zeros(len(self.sources), dtype=int)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """(the row's place in the stream of all ranks, its number) of each row of a step."""
        position, own = self.start, slice(self.rank, None, self.world_size)
        while True:
            self.given = self._step(position)[own]
            places = range(position, position + self.prompts_per_step)[own]
            yield list(zip(places, self.given))
            position += self.prompts_per_step

    def _step(self, position: int) -> list[int]:
        """The rows of the step that begins after `position` rows, over all ranks."""
        rng = np.random.default_rng([self.seed, position])
        rows = np.empty(self.prompts_per_step, dtype=int)
        source = self._source_of(np.arange(position, position + len(rows)))
        taken = self.taken(position)
        for s in range(len(self.sources)):
            own = np.flatnonzero(source == s)
            rows[own] = self._next(s, int(taken[s]), len(own), rng)
        return rows.tolist()

    def _source_of(self, places: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.cumsum(self.weights)[:-1], places * GOLDEN % 1, side="right")

    def taken(self, position: int) -> np.ndarray:
        """(sources,): how many of the first `position` places are of each source."""
        if position < self._place:
            self._place, self._taken = 0, np.zeros_like(self._taken)
        source = self._source_of(np.arange(self._place, position))
        self._taken = self._taken + np.bincount(source, minlength=len(self.sources))
        self._place = position
        return self._taken

    def _next(self, s: int, taken: int, n: int, rng: np.random.Generator) -> list[int]:
        """The next n rows of source s, after the `taken` first ones."""
        if self.sampling == "variance":
            return self.difficulty.draw(n, rng, self.sources[s])
        if self.sampling == "uniform":
            return [self._row(s, k) for k in range(taken, taken + n)]
        return self._next_informative(s, taken, n, rng)

    def _next_informative(self, s: int, taken: int, n: int, rng: np.random.Generator) -> list[int]:
        """The next n rows without those that `difficulty` skips, at most an epoch of them."""
        rows: list[int] = []
        last = self.skipped[s] + len(self.sources[s])
        while len(rows) < n:
            row = self._row(s, taken + int(self.skipped[s]) + len(rows))
            if self.skipped[s] < last and self.difficulty.skips(row, rng):
                self.skipped[s] += 1
            else:
                rows.append(row)
        return rows

    def _row(self, s: int, k: int) -> int:
        """Row k of the stream of source s."""
        rows = self.sources[s]
        epoch, i = divmod(k, len(rows))
        if not self.shuffle:
            return rows[i]
        if self._orders.get(s, (-1,))[0] != epoch:
            self._orders[s] = epoch, np.random.default_rng([self.seed, epoch, s]).permutation(len(rows))
        return rows[self._orders[s][1][i]]


class _SeededRows(Dataset):
    """What the data set draws for a row depends on the seed and on the row's place in the stream."""

    def __init__(self, dataset: PromptDataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place_and_row: tuple[int, int]) -> dict:
        place, row = place_and_row
        with seeded(f"{self.seed} row {place}"):
            return self.dataset[row]


class PromptLoader(DataLoader):
    """See make_loader. `position`: rows of the stream that were handed out, over all ranks, without those that workers
    only prepared. The state fits any number of ranks and workers."""

    batch_sampler: _StepSampler

    def __init__(self, dataset: PromptDataset, sampler: _StepSampler, num_workers: int):
        # Its own generator: the global one, which gives worker seeds otherwise, differs after a resume.
        generator = torch.Generator().manual_seed(sampler.seed)
        collate = _collate_in_worker if num_workers else collate_fn
        rows = _SeededRows(dataset, sampler.seed)
        super().__init__(rows, batch_sampler=sampler, num_workers=num_workers, collate_fn=collate, generator=generator)
        self.position = 0

    def __iter__(self) -> Iterator[dict]:  # type: ignore[override]  # on from `position`
        sampler = self.batch_sampler
        sampler.start = self.position
        for batch in super().__iter__():
            self.position += sampler.prompts_per_step
            if self.num_workers and "multi_modal_inputs" in batch:
                batch["multi_modal_inputs"] = pickle.loads(batch["multi_modal_inputs"])  # noqa: S301 (of our process)
            if self.needs_scores:
                batch[ROW] = np.fromiter(sampler.given, dtype=object, count=len(sampler.given))
            yield batch

    @property
    def needs_scores(self) -> bool:
        """Whether the scores of prompts decide which ones come: batches then have the column `data_row`."""
        return self.batch_sampler.sampling != "uniform"

    def record_scores(self, rows: Iterable[int], scores: Iterable[list[float]]) -> None:
        """The scores of this rank's responses to the prompts of these rows (`data_row`). A collective."""
        self.batch_sampler.difficulty.record_scores(rows, scores)

    def metrics(self) -> dict[str, float]:
        """With several weighted sources also the epochs of each, prompts/epochs/<its number>."""
        sampler = self.batch_sampler
        metrics = sampler.difficulty.metrics() if self.needs_scores else {}
        if len(sampler.sources) > 1 and sampler.sampling != "variance":
            visits = sampler.taken(self.position) + sampler.skipped
            epochs = (n / len(rows) for n, rows in zip(visits, sampler.sources))
            metrics |= {f"prompts/epochs/{s}": float(n) for s, n in enumerate(epochs)}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        state = {"position": self.position, **self._stream()}
        if self.needs_scores:
            sampler = self.batch_sampler
            state |= {"skipped": sampler.skipped.tolist(), "difficulty": sampler.difficulty.state_dict()}
        return state

    def _stream(self) -> dict[str, Any]:
        sampler = self.batch_sampler
        stream = {"num_rows": sampler.sources[-1].stop, "seed": sampler.seed, "shuffle": sampler.shuffle}
        return stream | ({"weights": [*sampler.weights]} if len(sampler.weights) > 1 else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect at the next iter(loader). Raises InputError if the saved stream had another order."""
        for key, here in self._stream().items():
            if state.get(key, here) != here:  # a state may have only the position
                found = f"resume: the saved data stream has {key}={state[key]}, this run {key}={here}"
                advice = "use the same data files, max_prompt_length, seed and shuffle, or start a new run"
                raise InputError(f"{found}, so rows would be lost or doubled; {advice}")
        self.position = int(state["position"])
        if self.needs_scores and "difficulty" in state:
            self.batch_sampler.skipped = np.atleast_1d(state["skipped"]).astype(int)
            self.batch_sampler.difficulty.load_state_dict(state["difficulty"])


def make_loader(
    dataset: PromptDataset,
    prompts_per_step: int,
    *,
    rank: int,
    world_size: int,
    seed: int,
    shuffle: bool = True,
    num_workers: int = 0,
    sampling: str = "uniform",
    skip_after: int = 3,
    share: float = 0.1,
    weights: Sequence[float] = (),
) -> PromptLoader:
    """An endless loader of this rank's prompts_per_step / world_size rows of each step.

    The stream has the data set's rows, shuffled anew each epoch. A step takes the next prompts_per_step rows, also
    across an epoch's end, and rank r every world_size-th of them from the r-th on: the union over ranks does not depend
    on their number. Raises InputError for impossible sizes.

    sampling: by the scores of earlier steps, "skip" leaves rows of the stream out, "variance" draws the rows of a step
    (skip_after, share: Difficulty). These need num_workers 0, as workers take rows in advance.
    weights: the share in each step of each of the data set's sources (`source_sizes`); an epoch is then a source's."""
    if len(dataset) == 0:
        raise InputError("the data set has no rows")
    sizes = [len(dataset)]
    if weights:
        sizes = getattr(dataset, "source_sizes", sizes)
        if len(sizes) != len(weights):
            raise InputError(f"--train-weights: {len(weights)} numbers for a data set with {len(sizes)} source(s)")
        if 0 in sizes:
            raise InputError(f"--train-weights: no row of --train-files {sizes.index(0)} (counted from 0) is left")
    ends = [*accumulate(sizes)]
    sources = [range(end - size, end) for size, end in zip(sizes, ends)]
    shares = [weight / sum(weights) for weight in weights] or [1.0]
    difficulty = Difficulty(len(dataset), skip_after, share)
    sampler = _StepSampler(sources, shares, prompts_per_step, rank, world_size, seed, shuffle, sampling, difficulty)
    return PromptLoader(dataset, sampler, num_workers)
