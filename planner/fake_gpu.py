"""An accelerator that does not exist, in torch's place for devices from other packages (PrivateUse1).

Its name is "gpu". Code meets it as it meets "cuda": `device.type`, `torch.accelerator`, `torch.get_device_module`. Its
tensors have no values under FakeTensorMode, so a step of any size can be traced on a laptop. Streams and events do
nothing: all work is done when a call returns."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICES = 8
OWN_KERNELS = ("silu_backward", "mish_backward")  # for a device without its own, torch composes these of others
_kernels = torch.library.Library("aten", "IMPL")


class _Nothing:
    """A stream or an event: every method does nothing and returns it."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __getattr__(self, name: str):
        return lambda *_, **__: self

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Backend:
    """The module `torch.gpu`: what FSDP2, autograd and transformers ask of one."""

    Stream = Event = _Nothing
    is_available = is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: DEVICES)
    current_stream = stream = staticmethod(lambda *_: _Nothing())
    set_device = synchronize = manual_seed_all = empty_cache = staticmethod(lambda *_, **__: None)
    reset_peak_memory_stats = staticmethod(lambda: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_device_capability = staticmethod(lambda *_: (9, 0))  # of an H100, as all that follows
    get_device_name = staticmethod(lambda *_: "H100")
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(total_memory=80 * 2**30))
    get_rng_state = staticmethod(lambda *_: torch.zeros(1, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda *_: None)
    memory_allocated = memory_reserved = max_memory_allocated = staticmethod(lambda *_: 0)
    _is_in_bad_fork = staticmethod(lambda: False)


def _no_kernel(*_: Any, **__: Any) -> None:
    raise RuntimeError("the fake accelerator computes nothing")


def register_fake_gpu() -> torch.device:
    """The fake accelerator's first device. A process without a GPU only: torch has one accelerator at a time."""
    if not hasattr(torch, "gpu"):
        _setup_privateuseone_for_python_backend("gpu", backend_module=_Backend)
        for name in OWN_KERNELS:
            _kernels.impl(name, _no_kernel, "PrivateUse1")
    return torch.device("gpu", 0)
