"""Predicts the seconds of a step for rollouts on the GPUs that train, and on GPUs of their own: --dry-run N --plan.

Rates come in as numbers (estimate.py has those of GPUs); here time passes. An engine samples as vLLM does: in steps
of one token for each of at most `slots` rows, the rows that came first while their keys and values fit; where a token
more does not fit, the row that was admitted last waits again. A step of n rows with K tokens before them takes

    max(fixed + n row, weights, n computed) + K context    row: scheduled on the host, while the GPU reads the weights,
                                                           computes the rows, and reads a token's keys and values
and an admission takes the prefill of its tokens, of a prompt once for its group (prefix caching). Nothing changes
between two events (a row ends, or has no room; weights come), so all steps between them are one sum.

Ranks sync the weights, wait for the oldest of the `level` + 1 batches in flight, and train on it. Engines stop for a
sync, after the token that they are at; rows that are not finished go on after it, from a new prefill. Level 0 is also
the order of rollouts on the GPUs that train: sync, rollout, update, and never two of them at once.
"""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lib import InputError

DRAWS = 1 << 14  # lengths that stand for a distribution
FILES = 256  # the newest of a run
SHAPE = 0.8  # sigma of "auto": an assumption
FORMS = "auto, lognormal:mean,sigma, uniform:lo,hi, constant:n or the folder of a run"
STEPS = 6  # that are averaged, after the first level + 2, in which nothing is in flight yet
ROWS = 1024  # of a batch, at most: of more, the rows of some engines stand for those of all


# ---- lengths of responses ------------------------------------------------------------------------
def read_lengths(text: str, limit: int) -> np.ndarray:
    """Lengths (n,) of responses in tokens, at most `limit`, as --plan describes them: FORMS. Raises InputError."""
    name, _, rest = ("lognormal", "", f"{max(limit / 4, 1)},{SHAPE}") if text == "auto" else text.partition(":")
    if name not in ("lognormal", "uniform", "constant"):
        return np.minimum(lengths_of_run(text), limit)
    try:
        numbers = [float(number) for number in rest.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != (1 if name == "constant" else 2) or not all(math.isfinite(number) for number in numbers):
        raise InputError(f"--plan {text[:100]!r}: give {FORMS}, with numbers")
    first, last = numbers[0], numbers[-1]
    if not 1 <= first <= 1e9 or not (0 <= last <= 10 if name == "lognormal" else first <= last <= 1e9):
        raise InputError(f"--plan {text[:100]!r}: lengths are from 1 to 1e9 tokens, hi is not below lo, sigma 0 to 10")
    rng = np.random.default_rng(0)
    if name == "lognormal":
        drawn = first * np.exp(last * rng.standard_normal(DRAWS) - last**2 / 2)
    else:
        drawn = rng.uniform(first, last, DRAWS)
    return np.clip(drawn.round(), 1, limit).astype(int)


def lengths_of_run(folder: str) -> np.ndarray:
    """Those of the training samples that the run has kept last (--save-rollouts). Raises InputError."""
    import pyarrow
    import pyarrow.compute
    import pyarrow.parquet

    try:
        files = sorted(Path(folder, "rollouts").glob("step_*-rank_*.parquet"))[-FILES:] if folder.isprintable() else []
    except OSError:  # a name that is too long, a folder that cannot be read
        files = []
    if not files:
        raise InputError(f"--plan {folder[:100]!r}: no run with samples (rollouts/*.parquet) is there; give {FORMS}")
    found = []
    for file in files:
        try:
            tokens = pyarrow.parquet.read_table(file, columns=["tokens"])["tokens"]
            found.append(pyarrow.compute.list_value_length(tokens).drop_null().to_numpy())
        except (OSError, KeyError, ValueError, NotImplementedError, pyarrow.ArrowException) as error:
            why = str(error).partition("\n")[0][:200]
            raise InputError(f"--plan {folder!r}: {file.name} is no file of samples: {why}") from error
    lengths = np.concatenate(found)
    if not (lengths > 0).any():
        raise InputError(f"--plan {folder!r}: its samples have no token; give {FORMS}")
    return lengths[lengths > 0]


# ---- an engine -----------------------------------------------------------------------------------
class EngineRates(NamedTuple):
    """Seconds, and sizes, of one engine."""

    fixed: float  # of any step
    row: float  # of a step, for each row: the host's, as is `fixed`
    weights: float = 0.0  # of a step, on the GPU meanwhile
    computed: float = 0.0  # of a step, for each row, on the GPU meanwhile
    context: float = 0.0  # of a step, for each token that a row sees
    prefill: float = 0.0  # of a token
    request: float = 0.0  # of one more request, and of each that a sync has stopped
    slots: int = 256  # rows at a time
    cache: float = math.inf  # tokens whose keys and values fit; at least those of the longest row

    def decode(self, rows: int, context: int, steps: int) -> float:
        """Seconds of `steps` steps. context: the tokens that all rows together see in the first."""
        seen = steps * context + rows * (steps * (steps - 1) // 2)
        return steps * max(self.fixed + rows * self.row, self.weights, rows * self.computed) + seen * self.context


@dataclass(slots=True, eq=False)
class Row:
    """A response of `length` tokens. batch, group: its number, and that of its prompt."""

    batch: int
    group: int
    length: int
    done: int = 0  # tokens, while it waits
    ends: int = 0  # the engine's step, while it is active


@dataclass
class Engine:
    """Rows of a prompt of `prompt` tokens, of which group_size share one. now = busy + idle + stopped."""

    rates: EngineRates
    prompt: int
    group_size: int
    now: float = 0.0
    busy: float = 0.0
    idle: float = 0.0
    steps: int = 0
    waiting: deque[Row] = field(default_factory=deque)
    active: dict[Row, None] = field(default_factory=dict)  # in the order of their admission
    ends: list[tuple[int, int, Row]] = field(default_factory=list)  # of these, a heap
    sampled: int = 0  # tokens that the active rows have
    cached: set[int] = field(default_factory=set)  # the groups whose prompt is
    left: Counter[int] = field(default_factory=Counter)  # rows of each batch
    ready: dict[int, float] = field(default_factory=dict)  # when the last row of a batch ended

    def submit(self, rows: Sequence[Row]) -> None:
        self.left.update(row.batch for row in rows)
        self.waiting += rows
        self._spend(self.rates.request * len(rows))

    def stop(self, now: float, end: float) -> None:
        """No row is sampled from `now`, or from the end of the step that is running then, to `end`."""
        self.idle += max(now - self.now, 0)
        self.now = end
        for row in reversed(self.active):
            row.done = row.length - (row.ends - self.steps)
            self.waiting.appendleft(row)
        self.active.clear()
        self.ends.clear()
        self.cached.clear()
        self.sampled = 0
        self._spend(self.rates.request * len(self.waiting))

    def run(self, until: float = math.inf, batch: int | None = None) -> None:
        """Samples until that time, or until the batch has no row left."""
        while self.now < until and (self.active or self.waiting) and (batch is None or self.left[batch]):
            self._admit()
            while self._room() < 1 and len(self.active) > 1:
                self._preempt()
            rows, steps = len(self.active), self.ends[0][0] - self.steps
            if rows > 1:
                steps = int(min(steps, self._room()))
            seconds = partial(self.rates.decode, rows, self.sampled + rows * self.prompt)
            if self.now + seconds(steps) > until:
                steps = 1 + bisect_left(range(1, steps), until - self.now, key=seconds)
            self._spend(seconds(steps))
            self.steps += steps
            self.sampled += rows * steps
            while self.ends and self.ends[0][0] == self.steps:
                self._finish(heappop(self.ends)[2])

    def _spend(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def _room(self) -> float:
        """Steps that the keys and values of all active rows have room for."""
        held = self.sampled + len(self.active) * self.prompt / self.group_size
        return (self.rates.cache - held) / max(len(self.active), 1)

    def _admit(self) -> None:
        while self.waiting and len(self.active) < self.rates.slots:
            row = self.waiting[0]
            rows = len(self.active) + 1
            held = self.sampled + row.done + rows * self.prompt / self.group_size
            if self.active and held + rows > self.rates.cache:
                break
            self.waiting.popleft()
            self._spend(self.rates.prefill * (row.done + self.prompt * (row.group not in self.cached)))
            self.cached.add(row.group)
            self.active[row] = None
            self.sampled += row.done
            row.ends = self.steps + row.length - row.done
            heappush(self.ends, (row.ends, id(row), row))

    def _preempt(self) -> None:
        row, _ = self.active.popitem()
        self.ends.remove((row.ends, id(row), row))
        heapify(self.ends)
        row.done = row.length - (row.ends - self.steps)
        self.sampled -= row.done
        self.waiting.appendleft(row)

    def _finish(self, row: Row) -> None:
        del self.active[row]
        self.sampled -= row.length
        self.left[row.batch] -= 1
        if not self.left[row.batch]:
            self.ready[row.batch] = self.now


# ---- steps of a run ------------------------------------------------------------------------------
class Step(NamedTuple):
    """Seconds of a step: of the ranks that train, and the means over engines."""

    sync: float
    wait: float  # for rollouts
    train: float
    engine_busy: float
    engine_idle: float

    @property
    def seconds(self) -> float:
        return self.sync + self.wait + self.train


def simulate(
    engines: list[Engine], batch: Callable[[int], list[list[Row]]], *, level: int, sync: float, train: float, steps: int
) -> list[Step]:
    """The steps of a run. batch: the rows that each engine gets of batch 0, 1, ... sync, train: seconds."""
    now, taken, started = 0.0, [], 0
    for step in range(steps):
        before, clocks = now, np.mean([(engine.busy, engine.idle) for engine in engines], axis=0)
        stopped = max(now, *(engine.now for engine in engines))  # those that sample are at a token
        synced = stopped + sync
        for engine in engines:
            engine.stop(stopped, synced)
        while started <= step + level:
            for engine, rows in zip(engines, batch(started)):
                engine.submit(rows)
            started += 1
        for engine in engines:
            engine.run(batch=step)
        ready = max(synced, *(engine.ready.get(step, 0.0) for engine in engines))
        now = ready + train
        for engine in engines:
            engine.run(until=now)
        busy, idle = np.mean([(engine.busy, engine.idle) for engine in engines], axis=0) - clocks
        taken.append(Step(synced - before, ready - synced, train, float(busy), float(idle)))
    return taken


def dealt(lengths: np.ndarray, groups: int, group_size: int, engines: int) -> Callable[[int], list[list[Row]]]:
    """For `simulate`: batches of groups whose lengths are drawn, dealt to engines in turn. Where a batch has more than
    ROWS rows, those of some of the engines, among them the one that got the batch's longest response."""
    some = max(1, min(engines, ROWS * engines // (groups * group_size)))

    def batch(number: int) -> list[list[Row]]:
        drawn = np.random.default_rng(number).choice(lengths, (groups, group_size))
        longest, place = drawn.max(1).argmax(), number % some
        drawn[[place, longest]] = drawn[[longest, place]]
        return [
            [Row(number, number * groups + g, int(n)) for g in range(e, groups, engines) for n in drawn[g]]
            for e in range(some)
        ]

    return batch


# ---- splits --------------------------------------------------------------------------------------
class Split(NamedTuple):
    """A way to use the GPUs, and what it was predicted to take."""

    flags: str
    trainers: int
    rollout_gpus: int  # 0: the GPUs that train also sample
    engines: int
    level: int
    step: Step
    fits: bool

    @property
    def idle(self) -> tuple[float, float]:
        """Shares of a step in which (trainers, engines) have nothing to do. GPUs that do both have one such share."""
        of_engines = self.step.engine_idle / self.step.seconds
        if self.rollout_gpus:
            return self.step.wait / self.step.seconds, of_engines
        return max(self.step.wait - self.step.engine_busy, 0.0) / self.step.seconds, of_engines


def predict(
    lengths: np.ndarray, rates: EngineRates, *, prompt: int, groups: int, group_size: int, engines: int, **of_step
) -> Step:
    """The mean step, once batches are in flight. of_step: level, sync and train, for `simulate`."""
    batch = dealt(lengths, groups, group_size, engines)
    first = of_step["level"] + 2
    taken = simulate([Engine(rates, prompt, group_size) for _ in batch(0)], batch, steps=first + STEPS, **of_step)
    return Step(*np.mean(taken[first:], axis=0).tolist())


def best_split(splits: Iterable[Split]) -> Split | None:
    """Of those that fit, the lowest level that takes at most 2 % longer than the fastest."""
    fitting = [split for split in splits if split.fits]
    fastest = min((split.step.seconds for split in fitting), default=0.0)
    close = [split for split in fitting if split.step.seconds <= 1.02 * fastest]
    return min(close, key=lambda split: (split.level, split.step.seconds), default=None)


def plan_table(splits: Sequence[Split], tokens: float) -> str:
    """A line for each split, and the flags of the best. tokens: of a step, prompts and responses."""
    fastest = {gpus: min(s.step.seconds for s in splits if s.rollout_gpus == gpus) for _, _, gpus, *_ in splits}
    head = ["rollout GPUs", "engines", "level", "s/step", "sync", "rollout", "train", "tokens/s/GPU", "idle", "memory"]
    lines = ["  ".join(head)]
    for split in sorted(splits, key=lambda split: (fastest[split.rollout_gpus], split.level)):
        step, gpus = split.step, split.trainers + split.rollout_gpus
        idle = " / ".join(f"{share:.0%}" for share in split.idle[: 1 + bool(split.rollout_gpus)])
        cells = [str(split.rollout_gpus or "all"), str(split.engines), str(split.level)]
        cells += [f"{n:.0f}" if n >= 100 else f"{n:.3g}" for n in (step.seconds, step.sync, step.wait, step.train)]
        cells += [f"{tokens / step.seconds / gpus:.0f}", idle, "fits" if split.fits else "DOES NOT FIT"]
        lines.append("  ".join(cell.rjust(len(name)) for cell, name in zip(cells, head)))
    best = best_split(splits)
    return "\n".join([*lines, f"best: {best.flags}" if best else "none of them fits the GPUs' memory"])
