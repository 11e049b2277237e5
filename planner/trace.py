"""Runs a step without values on the fake accelerator (planner/fake_gpu.py), and records what it allocates.

Tensors of the CPU are real, as is their arithmetic: the batch's layout is planned as in any run. Tensors of the
accelerator have a shape only (torch's FakeTensor), and a value where they are computed from the CPU's alone, as the
batch's masks are. Where code reads a value that nobody knows, such as a gradient's norm, it is 1, or True.

What autograd, FSDP2 and the optimizer do is their own code, so a trace shows what they allocate. It does not show what
kernels allocate for themselves, NCCL's buffers, the driver's context and fragmentation."""

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # what collectives do to tensors without values
import torch.nn.functional as F
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from lib.model import attention
from planner.meta import replaced
from planner.roofline import Kernel, kernel

SMALL = 2**22  # elements: values of larger tensors are not followed
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
FSDP = ("_fsdp_collectives.py", "_fsdp_param.py", "_fsdp_param_group.py")  # torch's files that allocate
aten = torch.ops.aten


def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """In place of SDPA, which chooses a kernel by the device: what it takes on a GPU."""
    if attn_mask is None or isinstance(attn_mask, CausalBias):
        causal = is_causal or attn_mask is not None
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, causal, scale=scale)[0]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = attn_mask.expand(*q.shape[:3], k.shape[2])
    if bias.dtype == torch.bool:  # as SDPA does
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf).expand(bias.shape)
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)[0]


class Trace(TorchDispatchMode):
    """Follows what is computed in its block, and keeps `events`: (number of a storage, bytes more or less, moment).

    moment: what `now()` says. `kind`: what storages are for, which may be known only later; {number: name}."""

    def __init__(self, now: Callable[[], str]):
        super().__init__()
        self.now = now
        self.events: list[tuple[int, int, str]] = []
        self.kernels: list[Kernel] = []
        self.forward, self.in_layer, self.compiled = True, False, False  # where the model is
        self.kind: dict[int, str] = {}
        self.live: dict[int, int] = {}  # number of a storage -> bytes
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._numbers: dict[int, int] = {}  # a storage's address -> its number
        self._count = 0
        self._values = WeakIdKeyDictionary()  # tensor of the accelerator -> its value, on the CPU

    def __enter__(self):
        resize, bias = torch.UntypedStorage.resize_, attention.causal_lower_right

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if (number := self._numbers.get(storage._cdata)) is not None:
                self._add(number, size - self.live.get(number, 0))
            return resize(storage, size)

        def bias_without_modes(*sizes: int) -> torch.Tensor:
            with _disable_current_modes():
                return bias(*sizes)

        self._exit = ExitStack()
        self._exit.enter_context(
            replaced(
                (torch.UntypedStorage, "resize_", resized),
                (attention, "causal_lower_right", bias_without_modes),
                (F, "scaled_dot_product_attention", attend),
                (torch.accelerator, "current_stream", torch.get_device_module("gpu").current_stream),
            )
        )
        # torch.tensor(..., device="gpu") then comes here, too
        self._exit.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *of_error):
        super().__exit__(*of_error)
        self._exit.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs.values())))
        device = kwargs.get("device")
        on_gpu = any(self._is_own(x) for x in tensors) or (device is not None and device.type == "gpu")
        if any(is_traceable_wrapper_subclass(x) for x in tensors):
            return NotImplemented  # a DTensor's own operations come here next
        if not on_gpu:
            return func(*args, **kwargs)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor computes the shape of a result
        known = all(self._knows(x) for x in tensors) and all(x.numel() <= SMALL for x in tensors)
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._collective(func, args, kwargs, tensors)
        if (
            func is aten._to_copy.default
            and device is not None
            and device.type == "cpu"
            and tensors[0].numel() <= SMALL
        ):
            return self._real(func, args, kwargs)
        try:
            fake_args, fake_kwargs = args, kwargs
            if not all(isinstance(x, FakeTensor) for x in tensors):
                fake_args, fake_kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
            with self._fake:
                out = func(*fake_args, **fake_kwargs)
        except UNKNOWN:
            return self._by_values(func, args, kwargs)
        if known:
            real = self._real(func, args, kwargs)
            for fake, value in zip(tensors_in([out]), tensors_in([real]), strict=True):
                if fake.numel() <= SMALL:
                    self._values[fake] = value
        else:
            self._forget_written(func, args, kwargs)
        self.record(out)
        self._note(func, args, kwargs, tensors, out)
        return out

    def _is_own(self, x: Any) -> bool:
        return isinstance(x, FakeTensor) and x.fake_mode is self._fake

    # ---- values ----------------------------------------------------------------------------------
    def _as_fake(self, x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(x, FakeTensor) else self._fake.from_tensor(x, static_shapes=True)

    def _knows(self, x: torch.Tensor) -> bool:
        return not isinstance(x, FakeTensor) or x in self._values

    def _value(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, FakeTensor):
            return x
        return self._values[x] if x in self._values else torch.ones(x.shape, dtype=x.dtype)

    def _real(self, func, args, kwargs) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        return func(*args, **kwargs)

    def _by_values(self, func, args, kwargs) -> Any:
        """The result of an operation whose shape, or whose result, depends on values."""
        known = all(self._knows(x) for x in tensors_in((args, kwargs.values())))

        def on_device(x: torch.Tensor) -> torch.Tensor:
            with self._fake:
                out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="gpu")
            if known:
                self._values[out] = x
            self.record(out)
            return out

        return tree_map_only(torch.Tensor, on_device, self._real(func, args, kwargs))

    def _forget_written(self, func, args, kwargs) -> None:
        """Tensors into which an unknown value was written."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for x in tensors_in([args[i] if i < len(args) else kwargs.get(argument.name)]):
                self.forget(x)

    def forget(self, x: torch.Tensor) -> None:
        """The values of the tensor and of its views."""
        if x in self._values:
            storage = self._values[x].untyped_storage()._cdata
            for key in [k for k, v in self._values.items() if v.untyped_storage()._cdata == storage]:
                del self._values[key]

    def _collective(self, func, args, kwargs, tensors) -> Any:
        """All ranks have what this one has."""
        with self._fake:
            out = func(*args, **kwargs)
        if func._schema.name.startswith("c10d::") and "allgather" in func._schema.name:
            outputs, inputs = (list(tensors_in([x])) for x in args[:2])
            if all(self._knows(x) for x in [*outputs, *inputs]):
                for x in outputs:
                    value = self._value(inputs[0])
                    self._values[x].view(-1, *value.shape).copy_(value.clone())  # it may be a part of x
            else:
                self._forget_written(func, args, kwargs)
        self.record(out)
        self._note(func, args, kwargs, tensors, out)
        return out

    # ---- kernels ---------------------------------------------------------------------------------
    def launched(self, args: Iterable[Any]) -> None:
        """In place of the launch of a Triton function: each of its tensors is read or written once."""
        tensors = list(tensors_in(args))
        for x in tensors:
            self.forget(x)
        self._keep(("triton", "memory", sum(x.numel() * x.itemsize for x in tensors), 0.0), tensors, tensors)

    def _note(self, func, args, kwargs, inputs: list[torch.Tensor], out: Any) -> None:
        found = kernel(func, args, kwargs, inputs, out, self._value)
        self._keep(found, inputs, list(tensors_in([out])))

    def _keep(self, found: tuple | None, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if found is not None:
            moved = (
                tuple((self.number(x), x.numel() * x.itemsize) for x in tensors if self._is_own(x))
                for tensors in (inputs, outputs)
            )
            where = self.now(), self.forward, self.in_layer and not of_fsdp(), self.compiled
            self.kernels.append(Kernel(*where, *found, *moved))

    # ---- memory ----------------------------------------------------------------------------------
    def record(self, tree: Any) -> None:
        for x in tensors_in([tree]):
            if self._is_own(x) and x.device.type == "gpu":
                self.number(x)

    def number(self, x: torch.Tensor) -> int:
        """The number of the tensor's storage, which is recorded if it is new."""
        storage = x.untyped_storage()
        if (number := self._numbers.get(storage._cdata)) is None:
            self._count += 1
            number = self._numbers[storage._cdata] = self._count
            if of_fsdp():
                self.kind[number] = "gathered weights"
            self._add(number, storage.nbytes())
            weakref.finalize(storage, self._freed, storage._cdata, number)
        return number

    def _add(self, number: int, size: int) -> None:
        if size:
            self.live[number] = self.live.get(number, 0) + size
            self.events.append((number, size, self.now()))

    def as_compiled(self, fn: Callable, *args: Any) -> Any:
        """fn(*args) where it is compiled: it allocates its first product and its results, and its kernels are fused."""
        self.compiled = True
        begun, product = len(self.events), self._count + 1
        out = fn(*args)
        self.compiled, kept = False, {self.number(x) for x in tensors_in([out])}
        events = [event for event in self.events[begun:] if event[0] < product or event[0] in kept]
        if product not in kept:
            _, size, moment = next(event for event in self.events[begun:] if event[0] == product)
            events = [(product, size, moment), *events, (product, -size, moment)]
        self.events[begun:] = events
        return out

    def _freed(self, address: int, number: int) -> None:
        self._numbers.pop(address, None)
        self._add(number, -self.live.get(number, 0))
        self.live.pop(number, None)

    def name(self, kind: str, tensors: Iterator[torch.Tensor]) -> None:
        """Says what these tensors are for. Of a DTensor it is the local one."""
        for x in tensors:
            self.kind[self.number(x.to_local() if hasattr(x, "to_local") else x)] = kind

    def name_live(self, kind: str, *old: str | None, since: int = 0) -> None:
        """Says so of what lives now, is of these kinds (None: unknown), and is newer than the storage `since`."""
        for number, size in self.live.items():
            if size and number > since and self.kind.get(number) in old:
                self.kind[number] = kind

    @property
    def last(self) -> int:
        """The number of the newest storage."""
        return self._count

    def peaks(self) -> dict[str, dict[str, int]]:
        """{moment: {kind: bytes}} at the highest point of each moment."""
        now: dict[str, int] = defaultdict(int)
        total, highest, peaks = 0, defaultdict[str, int](int), {}
        for number, size, moment in self.events:
            now[self.kind.get(number, "work")] += size
            total += size
            if total > highest[moment]:
                highest[moment], peaks[moment] = total, {k: n for k, n in now.items() if n}
        return peaks


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from tensors_in(x)


def of_fsdp() -> bool:
    """Whether FSDP2 allocates it: a buffer of a collective, or a parameter or a gradient that is whole."""
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith(FSDP):
        frame = frame.f_back
    return frame is not None
