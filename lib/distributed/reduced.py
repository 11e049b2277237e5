"""Metrics of a step: seconds of its stages, and numbers over micro-batches and ranks. Each rank reports
totals and counts, which `reduce_metrics` combines: a mean of the ranks' means would be wrong where
their counts differ. A metric without data is left out. A number may be a tensor without dimensions:
`reduce_metrics` reads all of them at once, so that the host does not wait within an update."""

import math
import operator
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from lib import InputError
from lib.distributed.device import memory_in_use, reset_peak_memory, synchronize

Number = float | torch.Tensor


class Mean(NamedTuple):
    """total / count over all ranks; left out where the count is 0."""

    total: Number
    count: Number  # type: ignore[assignment]  # tuple has a method of this name


class Std(NamedTuple):
    """The sample standard deviation of `count` numbers on all ranks; left out where they are fewer than two."""

    total: Number
    squares: Number
    count: Number  # type: ignore[assignment]


class Sum(NamedTuple):
    value: Number


class Max(NamedTuple):
    """The largest over all ranks; left out where it is -inf."""

    value: Number


class Min(NamedTuple):
    """The smallest over all ranks; left out where it is inf."""

    value: Number


Metric = Mean | Std | Sum | Max | Min | float


def reduce_metrics(local: Mapping[str, Metric]) -> dict[str, float]:
    """The metrics of all ranks as plain floats. A collective; without a process group, of this process only. A rank may
    lack keys. Of a plain number, such as a learning rate, the lowest rank's is used."""
    mine = _read(local)
    ranks = [mine]
    if dist.is_initialized():
        ranks = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
    total: dict[str, Any] = {}
    for metrics in ranks:
        add_metrics(total, metrics)
    reduced = {}
    for key, metric in total.items():
        match metric:
            case Mean(value, count):
                if count > 0:
                    reduced[key] = float(value / count)
            case Std(value, squares, count):
                if count > 1:  # rounding can make the variance of equal numbers negative
                    reduced[key] = float(max(0.0, (squares - value**2 / count) / (count - 1)) ** 0.5)
            case Max(value) | Min(value):
                if value != (-math.inf if isinstance(metric, Max) else math.inf):
                    reduced[key] = float(value)
            case Sum(value) | value:
                reduced[key] = float(value)
    return reduced


def _read(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """The metrics with numbers in place of tensors, in one transfer."""
    flat: list[Any] = []
    for key, metric in metrics.items():
        for number in metric if isinstance(metric, tuple) else (metric,):
            check_number(key, number)
            flat.append(number)
    tensors = [number.double() for number in flat if isinstance(number, torch.Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    numbers = iter(next(read) if isinstance(number, torch.Tensor) else number for number in flat)
    return {
        key: type(metric)(*(next(numbers) for _ in metric)) if isinstance(metric, tuple) else next(numbers)
        for key, metric in metrics.items()
    }


def check_number(key: str, value: Any) -> None:
    """Raises InputError if the value of a metric is not one number."""
    shape = tuple(getattr(value, "shape", ()))
    if shape or not (isinstance(value, int | float) or hasattr(value, "item")):
        what = f"a {type(value).__name__}" + (f" of shape {shape}" if shape else "")
        raise InputError(f"metric {key!r} is {what}: log a number, such as its mean()")


def add_metrics(total: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Adds the metrics of one more micro-batch or rank to `total`, in place. A plain number stays the first one."""
    new: Any  # the same kind of metric as in `total`
    for key, new in more.items():
        match total.get(key):
            case None:
                total[key] = new
            case Mean() | Std() | Sum() as old:
                total[key] = type(old)(*map(operator.add, old, new))
            case Max(value):
                total[key] = Max(_extreme(torch.maximum, max, value, new.value))
            case Min(value):
                total[key] = Min(_extreme(torch.minimum, min, value, new.value))


def _extreme(of_tensors, of_numbers, a: Number, b: Number) -> Number:
    return of_tensors(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else of_numbers(a, b)


def token_means(values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Metric]:
    """The mean of each (B, T) tensor over the tokens of the mask, over all micro-batches and ranks."""
    mask = mask.bool()
    return {name: Mean(value.double().where(mask, 0).sum(), mask.sum()) for name, value in values.items()}


def faults(found: Mapping[str, torch.Tensor]) -> dict[str, Metric]:
    """Metrics faults/<name> of what is not 0 (nor NaN): the largest of all updates and ranks."""
    values = {name: value.double() for name, value in found.items()}
    return {f"faults/{name}": Max(value.where(value.abs() > 0, -math.inf)) for name, value in values.items()}


# ---- the stages of a step ------------------------------------------------------------------------
_stage = ("start", time.monotonic(), True)  # this rank's, since when, and whether its time is limited
_step = 0
_seconds: dict[str, float] = defaultdict(float)
_memory: dict[str, float] = {}  # perf/memory_<kind>_gib/<stage>
_started = 0.0
_open = False  # whether a stage is being timed


def enter_stage(name: str, limited: bool = True) -> None:
    """Sets the stage of this rank, such as "step 12 rollout", and restarts its time, which may be unlimited."""
    global _stage
    _stage = (name, time.monotonic(), limited)


def current_stage() -> str:
    return _stage[0]


def start_step(step: int) -> None:
    """From now on `timed` counts for this step."""
    global _step, _started
    _step, _started = step, time.perf_counter()
    _seconds.clear()
    _memory.clear()


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """A context manager or decorator: adds the seconds of the block to the step's timing_s/<stage>. The block is also a
    stage for the watchdog (`enter_stage`) and in a profile. A stage within a stage is part of the outer one."""
    global _open
    if _open:
        yield
        return
    enter_stage(f"step {_step} {stage}")
    reset_peak_memory()
    _open, start = True, time.perf_counter()
    try:
        with record_function(stage):
            yield
    finally:
        synchronize()  # kernels that are still queued belong to this stage
        _seconds[stage] += time.perf_counter() - start
        for kind, n in memory_in_use().items():
            name = f"perf/memory_{kind}_gib/{stage}"
            before = _memory.get(name, 0.0) if kind == "peak" else 0.0  # the stage has run before in this step
            _memory[name] = max(n / 2**30, before)
        _open = False
    enter_stage(f"step {_step} after {stage}")  # not after an exception: its stage is where it came from


def step_timing() -> dict[str, Metric]:
    """timing_s/<stage> and timing_s/step so far, and the memory of the stages."""
    stages: dict[str, Metric] = {f"timing_s/{stage}": seconds for stage, seconds in _seconds.items()}
    stages |= {name: Max(used) for name, used in _memory.items()}
    return stages | {"timing_s/step": time.perf_counter() - _started}
