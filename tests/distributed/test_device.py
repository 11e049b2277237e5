"""What lib/distributed/device.py answers on a machine without an accelerator, and which of torch's functions it calls
on one. tests/gpu runs it with an accelerator that holds values."""

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from lib.distributed import device as devices
from lib.setup import get_compute_dtype
from planner.estimate import H100, gpu_here

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with four GPUs, the last of which is this process's: what was asked of it, in order."""
    asked = []
    answers = {"is_initialized": True, "device_count": 4, "current_device": 3, "get_rng_state": torch.ones(1)}
    answers |= {"get_device_properties": SimpleNamespace(total_memory=80), "get_device_name": "A100", "synchronize": 0}
    for name, answer in (answers | {"set_device": None, "set_rng_state": None}).items():

        def function(*args, name=name, answer=answer):
            asked.append((name, *args))
            return answer

        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    return asked


def test_without_an_accelerator():
    assert devices.accelerator() is None and devices.device_names() == [] and devices.device_rng_state() is None
    devices.synchronize(), devices.device_setter()(), devices.set_device_rng_state(torch.ones(1))
    assert gpu_here() == H100
    assert devices.collective_backend(CPU) == "gloo"
    assert list(devices.profiler_activities(CPU)) == [ProfilerActivity.CPU]
    assert not devices.has_flash_attention(CPU, torch.bfloat16)
    assert get_compute_dtype("auto", CPU) == torch.float32


def test_with_gpus(gpu):
    assert devices.accelerator() == torch.device("cuda")
    assert devices.collective_backend(CUDA) == "cpu:gloo,cuda:nccl"
    assert get_compute_dtype("auto", CUDA) == torch.bfloat16
    assert (devices.device_name(CUDA), devices.total_memory(CUDA), devices.device_names()) == ("A100", 80, ["A100"] * 4)
    assert gpu_here() == ("A100", 80, 312)
    gpu.clear()
    use_device = devices.device_setter()
    use_device()
    devices.synchronize()
    for state in (devices.device_rng_state(), None):
        devices.set_device_rng_state(state)
    calls = [("current_device",), ("set_device", 3), ("is_initialized",), ("synchronize",), ("is_initialized",)]
    assert gpu == [*calls, ("get_rng_state",), ("set_rng_state", torch.ones(1))]


def test_an_unused_gpu_is_left_alone(gpu, monkeypatch):
    """The first use of one takes half a GB of it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    devices.synchronize()
    assert devices.device_rng_state() is None and not gpu


def test_the_launcher_may_ask_for_cpus(gpu, monkeypatch):
    """And a Mac computes on its CPU: nobody has tried its accelerator."""
    for wanted in ("true", "1"):
        monkeypatch.setenv("ACCELERATE_USE_CPU", wanted)
        assert devices.accelerator() is None
    devices.device_setter()()
    assert not gpu
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert devices.accelerator() is None


def test_the_memory_of_a_profiled_step(tmp_path, monkeypatch):
    asked = []
    record = {"_record_memory_history": lambda **options: asked.append(options), "_dump_snapshot": asked.append}
    monkeypatch.setattr(torch.cuda, "memory", SimpleNamespace(**record))
    devices.record_memory(CUDA)
    devices.dump_memory(CUDA, tmp_path / "file")
    assert asked == [{"stacks": "python"}, str(tmp_path / "file"), {"enabled": None}]
