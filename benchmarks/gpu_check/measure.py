"""Clocks and memory. No import of lib: part `hardware` needs torch and numpy only."""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

DENSE_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # of the vendor's data sheets


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(fn: Callable[[], object]) -> float:
    """Seconds of one call."""
    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    return time.perf_counter() - start


def seconds_of(fn: Callable[[], object], repeats: int) -> float:
    """Of one call, after one that is not counted."""
    fn()
    return timed(lambda: [fn() for _ in range(repeats)]) / repeats


def peak_bytes(fn: Callable[[], object], device: torch.device) -> int:
    """What the allocator held at most while `fn` ran; on a CPU, beyond what there was."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        fn()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        fn()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max())


def kernels_of(fn: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """(how often it runs, milliseconds) of each of the GPU's kernels, without the driver's copies and fills."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        fn()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for e in recorded.events():
        if e.device_type == DeviceType.CUDA and not e.name.startswith(("Memcpy", "Memset")):
            count, ms = found.get(e.name, (0, 0.0))
            found[e.name] = count + 1, ms + e.time_range.elapsed_us() / 1000
    return found


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s by the data sheet; None for a GPU that is not in the list."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    return next((flops for key, flops in DENSE_BF16_FLOPS.items() if key in name), None)
