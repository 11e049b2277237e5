"""The endless loader that hands each rank its share of a step's prompts."""

import pickle
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from lib import InputError
from lib.args import PromptSampling
from lib.columns import COLUMNS
from lib.data.dataset import PromptDataset
from lib.data.difficulty import Difficulty
from lib.seeds import seeded

warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 beside torch 2.13

ROW = "data_row"  # column of the row's number in the data set


def collate_fn(items: list[dict]) -> dict[str, torch.Tensor | np.ndarray]:
    """Tensors are stacked to (B, ...); everything else becomes a 1-D object array (B,). input_ids, attention_mask and
    position_ids (B, P), with mrope (B, 4, P), lose the columns that are padding in all rows."""
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
    """Torch sends a tensor, also one in an object, as a file descriptor that stays open while the tensor lives: a few
    hundred prompts with images would reach the limit of a process, and the loader then hangs. So pixels go as bytes."""
    batch: dict = collate_fn(items)
    if "multi_modal_inputs" in batch:
        batch["multi_modal_inputs"] = pickle.dumps(batch["multi_modal_inputs"])
    return batch


@dataclass(eq=False)
class _StepSampler:
    """Yields, step after step and without end, the rows of the stream that belong to this rank."""

    num_rows: int
    prompts_per_step: int
    rank: int
    world_size: int
    seed: int
    shuffle: bool
    sampling: PromptSampling
    difficulty: Difficulty
    start: int = 0
    skipped: int = 0  # rows of the stream that --prompt-sampling skip has left out
    given: Sequence[int] = ()  # what was yielded last
    _epoch: int = -1

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Of each row its place in what is handed out, over all ranks, and its number."""
        position, own = self.start, slice(self.rank, None, self.world_size)
        while True:
            self.given = self._step(position)[own]
            yield list(zip(range(position, position + self.prompts_per_step)[own], self.given))
            position += self.prompts_per_step

    def _step(self, position: int) -> list[int]:
        """The rows of the step that begins after `position` rows, over all ranks."""
        n, rng = self.prompts_per_step, np.random.default_rng([self.seed, position])
        if self.sampling == "variance":
            return self.difficulty.draw(n, rng)
        if self.sampling == "uniform":
            return [self._row(k) for k in range(position, position + n)]
        rows: list[int] = []
        last = self.skipped + self.num_rows  # after a whole epoch of skips, prompts come as they are
        while len(rows) < n:
            row = self._row(position + self.skipped + len(rows))
            if self.skipped < last and self.difficulty.skips(row, rng):
                self.skipped += 1
            else:
                rows.append(row)
        return rows

    def _row(self, k: int) -> int:
        """Row k of the stream."""
        epoch, i = divmod(k, self.num_rows)
        if not self.shuffle:
            return i
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return int(self._order[i])


class _SeededRows:
    """What the data set draws for a row depends on the seed and the row's place in the stream."""

    def __init__(self, dataset: PromptDataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place_and_row: tuple[int, int]) -> dict:
        place, row = place_and_row
        with seeded(f"{self.seed} row {place}"):
            return self.dataset[row]


class PromptLoader(StatefulDataLoader):
    """See make_loader. `position` is the number of rows of the stream that were handed out, over all ranks, not those
    that workers have only prepared. The state fits any world size and num_workers; torchdata's only as many workers."""

    def __init__(self, dataset: PromptDataset, sampler: _StepSampler, num_workers: int):
        # Its own generator: otherwise worker seeds come from the global one, at another point of it after a resume.
        generator = torch.Generator().manual_seed(sampler.seed)
        collate = _collate_in_worker if num_workers else collate_fn
        rows = _SeededRows(dataset, sampler.seed)
        super().__init__(rows, batch_sampler=sampler, num_workers=num_workers, collate_fn=collate, generator=generator)
        self.position = 0

    def __iter__(self) -> Iterator[dict]:
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
        """How responses scored to the prompts of these rows (`data_row` of a batch), of this rank. A collective."""
        self.batch_sampler.difficulty.record_scores(rows, scores)

    def metrics(self) -> dict[str, float]:
        return self.batch_sampler.difficulty.metrics() if self.needs_scores else {}

    def state_dict(self) -> dict[str, Any]:
        state = {"position": self.position, **self._stream()}
        if self.needs_scores:
            state |= {"skipped": self.batch_sampler.skipped, "difficulty": self.batch_sampler.difficulty.state_dict()}
        return state

    def _stream(self) -> dict[str, int | bool]:
        sampler = self.batch_sampler
        return {"num_rows": sampler.num_rows, "seed": sampler.seed, "shuffle": sampler.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect at the next iter(loader). Raises InputError if the saved stream had another order."""
        for key, here in self._stream().items():
            if state.get(key, here) != here:  # a state may have only the position
                found = f"resume: the saved data stream has {key}={state[key]}, this run {key}={here}"
                advice = "use the same data files, max_prompt_length, seed and shuffle, or start a new run"
                raise InputError(f"{found}, so rows would be lost or doubled; {advice}")
        self.position = int(state["position"])
        if self.needs_scores and "difficulty" in state:
            self.batch_sampler.skipped = int(state["skipped"])
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
    sampling: PromptSampling = "uniform",
    skip_after: int = 3,
    share: float = 0.1,
) -> PromptLoader:
    """An endless loader of one rank's share, prompts_per_step / world_size rows, of each step's prompts.

    The stream has the data set's rows, shuffled anew each epoch. A step takes the next prompts_per_step rows, also
    across an epoch's end, and rank r takes every world_size-th of them from the r-th on. So each epoch has each row
    once, and the union over the ranks does not depend on their number. Raises InputError for impossible sizes.

    sampling: "skip" leaves rows of the stream out, "variance" draws the rows of a step, by the scores of earlier steps
    (lib/data/difficulty.py has skip_after and share); they need num_workers 0, as workers take rows in advance."""
    if prompts_per_step < 1 or prompts_per_step % world_size:
        above = (max(prompts_per_step, 1) // world_size + 1) * world_size
        rest = f"(prompts_per_step % world_size = {prompts_per_step % world_size})"
        must = f"must be a positive multiple of world_size={world_size} {rest}; use {above}, say"
        raise InputError(f"prompts_per_step={prompts_per_step} {must}")
    if not 0 <= rank < world_size:
        raise InputError(f"rank={rank}: must be in 0..{world_size - 1} for world_size={world_size}")
    if seed < 0:
        raise InputError(f"seed={seed}: must not be negative")
    if len(dataset) == 0:
        raise InputError("the data set has no rows")
    difficulty = Difficulty(len(dataset), skip_after, share)
    sampler = _StepSampler(len(dataset), prompts_per_step, rank, world_size, seed, shuffle, sampling, difficulty)
    return PromptLoader(dataset, sampler, num_workers)
