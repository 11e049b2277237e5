"""An accelerator without hardware that keeps a GPU's rules: its tensors have values, which are computed on the CPU.

Tensors of the CPU among those of the accelerator raise RuntimeError, and each copy between the two and each wait of the
host is noted in `events` with the place in our code. `on_gpu` runs a test in a process of its own, because torch cannot
unregister an accelerator. What waits is what torch.cuda.set_sync_debug_mode warns of on a GPU."""

import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lib.distributed import World
from planner.fake_gpu import register_fake_gpu
from tests.common import FORKSERVER, ROOT, run_ranks

OURS = {ROOT / room for room in ("lib", "agent", "servers", "planner")}
GPU = torch.device("cpu")  # in the process of `on_gpu`: gpu:0
# what the host waits for, besides copies: the size of a result, or a value
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "repeat_interleave"}
WAITS |= {"_unique2", "unique_dim", "unique_consecutive", "_assert_async"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
CALLED = {"data_proto.py", "trace.py"}  # these do what others ask for


class Event(NamedTuple):
    kind: str  # "wait": the host waits for the accelerator; "in", "out": a copy to or from it, without a wait
    what: str
    place: str  # the file and function that asked for it
    source: torch.Tensor | None  # what was copied


events: list[Event] = []


def note(kind: str, what: str, source: torch.Tensor | None = None) -> None:
    frame, place = sys._getframe(1), "outside"
    while frame is not None and place == "outside":
        file = Path(frame.f_code.co_filename)
        if (file.parent == ROOT or OURS & {*file.parents}) and file.name not in CALLED:
            name = frame.f_code.co_qualname.partition(".<locals>")[0].rpartition(".")[2]
            place = f"{file.relative_to(ROOT)} {name}"
        frame = frame.f_back
    events.append(Event(kind, what, place, source))


def waits() -> dict[str, int]:
    """How often the host has waited, by place."""
    return dict(Counter(event.place for event in events if event.kind == "wait"))


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
        note("wait", "tolist")
        return self.held.tolist()

    def untyped_storage(self):  # FSDP2 frees and allocates it, checkpoints copy it
        return self.held.untyped_storage()

    def data_ptr(self):
        return self.held.data_ptr()


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
    name = func._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    strict = [x for x in tensors if isinstance(x, Strict)]
    device = kwargs.get("device") and torch.device(kwargs["device"])
    to_gpu = device.type == "gpu" if device else bool(strict)
    if name in ("is_pinned", "_pin_memory") and not strict:  # the CPU wheel of torch has no pinned memory
        return args[0].untyped_storage().data_ptr() in PINNED if name == "is_pinned" else _pinned(args[0].clone())
    if not (strict or to_gpu):
        return _pinned(func(*args, **kwargs)) if kwargs.pop("pin_memory", False) else func(*args, **kwargs)
    host = [x for x in tensors if not isinstance(x, Strict)]
    if name in ("_to_copy", "copy_"):
        source = args[name == "copy_"]
        to_gpu = to_gpu if name == "_to_copy" else isinstance(args[0], Strict)
        if to_gpu != isinstance(source, Strict):
            where, non_blocking = "in" if to_gpu else "out", kwargs.get("non_blocking", args[2:] == (True,))
            note(where if non_blocking else "wait", f"copy {where}", source)
    elif strict:
        if name in INDEXING:  # an index may be on the CPU
            indices = [x for x in args[1] if x is not None]
            for _ in [x for x in indices if not isinstance(x, Strict)]:
                note("wait", "copy in, an index")
            filled = len(args) > 2 and args[2].numel() == 1  # then it is masked_fill
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not filled:
                note("wait", "index by a mask")
            host = [x for x in host if not any(x is index for index in indices)]
        elif name in WAITS and kwargs.get("output_size") is None:
            note("wait", name)
        if wrong := [tuple(x.shape) for x in host if x.dim()]:
            raise RuntimeError(f"{name}: tensors of the CPU, {wrong}, among those of the accelerator")
    known = {id(x.held): x for x in strict} | {id(x): x for x in host}  # what was written to is returned
    args, kwargs = tree_map_only(Strict, lambda x: x.held, (args, kwargs))
    kwargs |= {"device": torch.device("cpu")} if device else {}
    kwargs.pop("pin_memory", None)
    out = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda x: known[id(x)] if id(x) in known else Strict(x) if to_gpu else x, out)


def start() -> None:
    """Gives this process the accelerator. It computes no gradient: its forks could not, then."""
    global GPU
    GPU = register_fake_gpu()
    start.library = library = torch.library.Library("aten", "IMPL")  # for C++, which passes the classes above by
    for name, make in {"empty_strided": torch.empty_strided, "empty.memory_format": torch.empty}.items():
        empty = partial(lambda make, *sizes, dtype=None, **_: Strict(make(*sizes, dtype=dtype)), make)
        library.impl(name, empty, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    CausalBias.__new__ = _bias
    torch.accelerator.synchronize = lambda *_: note("wait", "synchronize")
    importlib.import_module("torch._dynamo")  # else each fork imports it


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    note("in" if non_blocking else "wait", "copy in, of a list")
    target.held.copy_(source)
    return target


def _bias(cls, *_):
    """Its empty tensor would be seen, and so be made, by `Factories`."""
    with _disable_current_modes():
        return torch.Tensor.__new__(cls)


process = cache(lambda: ProcessPoolExecutor(1, FORKSERVER, start))


def run(ranks: int, module: str, *test) -> None:
    """Runs the test in forked ranks of one gloo group, which sends what the tensors of the accelerator hold."""
    run_ranks(ranks, _on_rank, importlib.import_module(module), *test)


def _on_rank(world: World, module: ModuleType, name: str, args: tuple, kwargs: dict) -> None:
    size, rank = str(world.size), str(world.rank)  # as a launcher says it
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with Factories():
        vars(module)[name].__wrapped__(World(world.rank, world.size, GPU), *args, **kwargs)


def on_gpu(test: Callable | None = None, *, ranks: int = 1) -> Callable:
    """Runs the test in a process with the accelerator, in so many ranks. It gets its World."""
    if test is None:
        return partial(on_gpu, ranks=ranks)

    @wraps(test)
    def submit(*args, **kwargs):
        process().submit(run, ranks, test.__module__, test.__name__, args, kwargs).result()

    whole = inspect.signature(test)
    submit.__signature__ = whole.replace(parameters=[*whole.parameters.values()][1:])  # pytest gives the others
    return submit
