"""Times the stages of a step, notes their memory, and names them for the watchdog."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

from lib.distributed.device import memory_in_use, reset_peak_memory, synchronize
from lib.distributed.reduced import Max, Metric
from lib.distributed.watchdog import enter_stage

_step = 0
_seconds: dict[str, float] = defaultdict(float)
_memory: dict[str, float] = {}  # perf/memory_<kind>_gib/<stage>
_started = 0.0
_open = False  # whether a stage is being timed


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
