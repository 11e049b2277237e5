"""An accelerator without hardware that keeps a GPU's rules: its tensors have values, which are computed on the CPU.

Tensors of the CPU among those of the accelerator raise RuntimeError, and each copy between the two and each wait of the
host is noted in `events` with the place in our code. `on_gpu` runs a test in a process of its own, because torch cannot
unregister an accelerator. What waits is what torch.cuda.set_sync_debug_mode warns of on a GPU."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial, wraps
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lib.distributed import init_distributed
from lib.distributed.fake_gpu import register_fake_gpu

ROOT = Path(__file__).parent.parent.parent
GPU = torch.device("cpu")  # in the process of `on_gpu`: gpu:0
# what the host waits for, besides copies: the size of a result, or a value
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "repeat_interleave"}
WAITS |= {"_unique2", "unique_dim", "unique_consecutive", "_assert_async"}


class Event(NamedTuple):
    kind: str  # "wait": the host waits for the accelerator; "in", "out": a copy to or from it, without a wait
    what: str
    place: str  # the file and function that asked for it
    source: torch.Tensor | None = None  # what was copied


class Events(list[Event]):
    def note(self, kind: str, what: str, source: torch.Tensor | None = None) -> None:
        frame, place = sys._getframe(1), "outside"
        while frame is not None and place == "outside":
            file = Path(frame.f_code.co_filename)
            if (file.parent == ROOT or (ROOT / "lib") in file.parents) and file.name != "data_proto.py":
                name = frame.f_code.co_qualname.partition(".<locals>")[0].rpartition(".")[2]
                place = f"{file.relative_to(ROOT)} {name}"
            frame = frame.f_back
        self.append(Event(kind, what, place, source))

    def copies(self, *kinds: str) -> list[Event]:
        return [event for event in self if event.kind in kinds and event.source is not None]

    def places(self, *kinds: str) -> dict[str, int]:
        return dict(Counter(event.place for event in self if event.kind in kinds))


events = Events()


class Strict(torch.Tensor):
    """A tensor of the accelerator. held: its values, a tensor of the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        strict = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=GPU, **layout)
        strict.held = held
        return strict

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(Strict, known) for known in types):  # a DTensor comes first
            return NotImplemented
        return _run(func, args, kwargs or {})

    def tolist(self):
        events.note("wait", "tolist")
        return self.held.tolist()

    def untyped_storage(self):  # FSDP2 frees and allocates it, checkpoints copy it
        return self.held.untyped_storage()

    def data_ptr(self):
        return self.held.data_ptr()

    def __repr__(self):
        return f"Strict({self.held})"


class Factories(TorchDispatchMode):
    """Operations that get no tensor of the accelerator, but may make one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not all(issubclass(Strict, known) for known in types):
            return func(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})


PINNED: dict[int, torch.Tensor] = {}  # by address; it keeps them, so that no other memory gets the address


def _pinned(x: torch.Tensor) -> torch.Tensor:
    return PINNED.setdefault(x.untyped_storage().data_ptr(), x)


def _run(func, args, kwargs):
    name, schema = func._schema.name.removeprefix("aten::"), func._schema
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    strict = [x for x in tensors if isinstance(x, Strict)]
    device = kwargs.get("device") and torch.device(kwargs["device"])
    to_gpu = device.type == "gpu" if device else bool(strict)
    if name in ("is_pinned", "_pin_memory") and not strict:  # the CPU wheel of torch has no pinned memory
        return args[0].untyped_storage().data_ptr() in PINNED if name == "is_pinned" else _pinned(args[0].clone())
    if not (strict or to_gpu):
        return _pinned(func(*args, **kwargs)) if kwargs.pop("pin_memory", False) else func(*args, **kwargs)
    non_blocking = kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
    if name in ("_to_copy", "copy_", "_copy_from"):
        to, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        to_gpu = isinstance(to, Strict) if to is not None else to_gpu
        if to_gpu != isinstance(source, Strict):
            where = "in" if to_gpu else "out"
            events.note(where if non_blocking else "wait", f"copy {where}", source)
    elif name in ("index", "index_put_", "_index_put_impl_", "_unsafe_index"):
        of_host = [x for x in args[1] if x is not None and not isinstance(x, Strict)]
        for _ in of_host:
            events.note("wait", "copy in, an index")
        filled = len(args) > 2 and args[2].numel() == 1  # then it is masked_fill
        if any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]) and not filled:
            events.note("wait", "index by a mask")
        tensors = [x for x in tensors if not any(x is index for index in of_host)]
    elif name in WAITS and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        events.note("wait", name)
    if strict and name not in ("_to_copy", "copy_", "_copy_from"):
        of_cpu = [tuple(x.shape) for x in tensors if not isinstance(x, Strict) and x.dim() > 0]
        if of_cpu:
            raise RuntimeError(f"{schema.name}: tensors of the CPU, {of_cpu}, among those of the accelerator")
    known = {id(x.held): x for x in strict}
    args, kwargs = tree_map_only(Strict, lambda x: x.held, (args, kwargs))
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    out = func(*args, **kwargs)
    known |= {id(x): x for x in tensors if not isinstance(x, Strict)}  # a tensor of the CPU that was written to
    return tree_map_only(torch.Tensor, lambda x: known[id(x)] if id(x) in known else Strict(x) if to_gpu else x, out)


def to_gpu(module: torch.nn.Module) -> torch.nn.Module:
    """Puts parameters and buffers on the accelerator, in place; ties stay, and what is on the meta device. FSDP2 would
    set their `data`, which a subclass of Tensor does not allow."""
    moved: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and not p.is_meta:
                strict = torch.nn.Parameter(Strict(p.detach().clone()), p.requires_grad)
                part._parameters[name] = moved.setdefault(id(p), strict)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else Strict(buffer.clone())
    return module


# ---- a process of its own ------------------------------------------------------------------------


def start() -> None:
    """Gives this process the accelerator, and a process group of one."""
    global GPU
    GPU = register_fake_gpu()
    library = torch.library.Library("aten", "IMPL")  # for calls from C++, which pass the classes above by
    empty = {"empty_strided": torch.empty_strided, "empty.memory_format": torch.empty}
    for name, make in empty.items():
        implementation = partial(_empty, make)
        library.impl(name, implementation, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    start.library = library  # lives as long as this process
    CausalBias.__new__ = _bias
    torch.accelerator.synchronize = lambda *_: events.note("wait", "synchronize")
    init_distributed()


def _bias(cls, *_):
    """Its empty tensor would be seen, and so be made, by `Factories`."""
    with _disable_current_modes():
        return torch.Tensor.__new__(cls)


def _empty(make: Callable, *sizes, dtype=None, **_) -> Strict:
    return Strict(make(*sizes, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    events.note("in" if non_blocking else "wait", "copy in, of a list")
    target.held.copy_(source)
    return target


@cache
def process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), start)


def run(module: str, name: str, args: tuple, kwargs: dict) -> None:
    """Runs the test, in the other process."""
    events.clear(), PINNED.clear()
    with Factories():
        importlib.import_module(module).__dict__[name].__wrapped__(*args, **kwargs)


def on_gpu(test: Callable) -> Callable:
    """Runs the test in the process with the accelerator."""

    @wraps(test)
    def submit(*args, **kwargs):
        process().submit(run, test.__module__, test.__name__, args, kwargs).result()

    return submit
