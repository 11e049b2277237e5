"""The device on which a run computes. The rest of lib compares device types with "cpu" only."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, supported_activities

COLLECTIVES = {"cuda": "nccl", "gpu": "fake"}  # the backend of each accelerator; gpu: fake_gpu.py's
COMPILED = ("cuda",)  # devices for which torch.compile makes kernels that are worth the wait
ESTIMATED = torch.device("cuda")  # what an estimate is for, on any machine
VISIBLE = "CUDA_VISIBLE_DEVICES"


def accelerator() -> torch.device | None:
    """The accelerator of this process, without a number. None if there is none, or the launcher asks for CPUs."""
    found = torch.accelerator.current_accelerator(check_available=True)
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    return None if found is None or found.type not in COLLECTIVES or wants_cpu else found


def collective_backend(device: torch.device) -> str:
    """For collectives of CPU tensors and of the device's."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{COLLECTIVES[device.type]}"


def single_rank_backend() -> str:
    """For a group of one rank: a collective returns its own values, and no port is opened."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  torch knows the name; this registers the backend

    return "fake"


def device_setter() -> Callable[[], None]:
    """Call it in a new thread, to use this thread's GPU: otherwise the thread takes half a GB of GPU 0."""
    if (device := accelerator()) is None:
        return lambda: None
    module = torch.get_device_module(device)
    return partial(module.set_device, module.current_device())


def to_device(tree: Any, device: torch.device) -> Any:
    """The same nest of mappings, sequences and dataclasses, with its tensors moved from the CPU to the device."""
    move = partial(to_device, device=device)
    if isinstance(tree, torch.Tensor):
        return tree.to(device, non_blocking=True)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{field.name: move(getattr(tree, field.name)) for field in fields(tree)})
    if isinstance(tree, Mapping):
        return {name: move(x) for name, x in tree.items()}
    if isinstance(tree, list | tuple):
        moved = map(move, tree)
        return type(tree)(*moved) if hasattr(tree, "_fields") else type(tree)(moved)  # a NamedTuple takes its fields
    return tree


def synchronize() -> None:
    """Waits for what is queued on this process's accelerator, if it has been used."""
    device = accelerator()
    if device is not None and (module := torch.get_device_module(device)).is_initialized():
        module.synchronize()


def device_name(device: torch.device) -> str:
    return torch.get_device_module(device).get_device_name(device)


def device_names() -> list[str]:
    """Of all accelerators that this process sees."""
    if (device := accelerator()) is None:
        return []
    module = torch.get_device_module(device)
    return [module.get_device_name(i) for i in range(module.device_count())]


def total_memory(device: torch.device) -> int:
    """Bytes of an accelerator."""
    return torch.get_device_module(device).get_device_properties(device).total_memory


def memory_in_use() -> dict[str, int]:
    """Bytes of this process: those that torch has allocated and reserved on its accelerator, and the peak of the
    allocated ones since `reset_peak_memory`; without an accelerator the resident ones."""
    if (device := accelerator()) is None:
        return {"resident": psutil.Process().memory_info().rss}
    module = torch.get_device_module(device)
    now = {"allocated": module.memory_allocated(), "reserved": module.memory_reserved()}
    return now | {"peak": module.max_memory_allocated()}


def reset_peak_memory() -> None:
    if (device := accelerator()) is not None:
        torch.get_device_module(device).reset_peak_memory_stats()


def has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's varlen attention has kernels here: from sm80 on, in 16 bits."""
    if device.type == "cpu" or dtype == torch.float32:
        return False
    return torch.get_device_module(device).get_device_capability(device) >= (8, 0)


def device_rng_state() -> torch.Tensor | None:
    """Of this process's accelerator; None if it has not been used."""
    device = accelerator()
    if device is None or not (module := torch.get_device_module(device)).is_initialized():
        return None
    return module.get_rng_state()


def set_device_rng_state(state: torch.Tensor | None) -> None:
    """Does nothing without a state or without an accelerator."""
    if state is not None and (device := accelerator()) is not None:
        torch.get_device_module(device).set_rng_state(state)


def own_devices(environment: dict[str, str], first: int, count: int) -> dict[str, str]:
    """The environment of a process that sees `count` of this one's accelerators, from number `first` on."""
    visible = environment.get(VISIBLE) or ",".join(map(str, range(torch.accelerator.device_count())))
    return environment | {VISIBLE: ",".join(visible.split(",")[first : first + count])}


# ---- profiles ------------------------------------------------------------------------------------


def profiler_activities(device: torch.device) -> Collection[ProfilerActivity]:
    """What torch.profiler records: operations, and the kernels of an accelerator."""
    return [ProfilerActivity.CPU] if device.type == "cpu" else supported_activities()


def record_memory(device: torch.device) -> None:
    """From now on the accelerator's allocations are recorded, with their stacks in Python."""
    memory(device)._record_memory_history(stacks="python")


def dump_memory(device: torch.device, file: Path) -> None:
    """Writes the allocations since `record_memory`, and records no more."""
    memory(device)._dump_snapshot(str(file))
    memory(device)._record_memory_history(enabled=None)


def memory(device: torch.device) -> Any:
    return torch.get_device_module(device).memory
