"""Collectives, and process groups besides the default one."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lib import InputError
from lib.distributed.device import device_setter, single_rank_backend

BUCKET_BYTES = 256 << 20  # that move at a time: weights to servers, Adam's moments; a larger tensor goes alone
_timeout = timedelta(days=7)


def limit_collectives(seconds: float) -> None:
    global _timeout
    _timeout = timedelta(seconds=seconds)


def collective_timeout() -> timedelta:
    """For a collective in any group, and for the job's store."""
    return _timeout


def in_thread(call: Callable[[], Any]) -> Future:
    """The call's result or exception. The thread does not outlive the process: NCCL may wait for ever."""
    use_device, done = device_setter(), Future[Any]()

    def run() -> None:
        try:
            use_device()
            done.set_result(call())
        except Exception as error:  # noqa: BLE001  whoever asks for the result gets it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def new_cpu_group() -> dist.ProcessGroup:
    """A second group of all ranks: its collectives of CPU tensors and objects cannot mix with the default group's."""
    backend = "gloo" if dist.get_world_size() > 1 else single_rank_backend()
    return dist.new_group(backend=backend, timeout=collective_timeout())


def new_cpu_subgroup(ranks: int) -> dist.ProcessGroup:
    """The gloo group of this rank and its neighbours, `ranks` in all."""
    return dist.new_subgroups(ranks, timeout=collective_timeout(), backend="gloo")[0]


def global_counts(mask: torch.Tensor) -> tuple[float, float]:
    """(tokens, rows with a token) of a mask (B, T) over all ranks. A collective."""
    counts = torch.stack([mask.sum(), mask.any(1).sum()]).double()
    dist.all_reduce(counts)
    tokens, rows = counts.tolist()
    return tokens, rows


def all_reduce_max(value: int, device: torch.device) -> int:
    """The largest of the ranks' values; without a process group, this value."""
    tensor = torch.full((), value, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def all_gather_lists(values: list, group: dist.ProcessGroup | None = None) -> list:
    """The concatenation of every rank's list, in the order of ranks; without a process group, this list."""
    if not dist.is_initialized():
        return values
    gathered: list[list] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, values, group)
    return [value for part in gathered for value in part]


def all_to_all_objects(values: list) -> list:
    """values[r] goes to rank r; returns what every rank sent here, in the order of ranks."""
    sent = [torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) for value in values]
    sizes = torch.tensor([len(part) for part in sent])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes)
    received = torch.empty(int(coming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(sent), coming.tolist(), sizes.tolist())
    return [pickle.loads(part.numpy()) for part in received.split(coming.tolist())]  # noqa: S301 (from our own ranks)


def all_to_all(
    x: torch.Tensor, group: dist.ProcessGroup, send: list[int] | None = None, receive: list[int] | None = None
) -> torch.Tensor:
    """Sends the i-th part of x to rank i of the group, and returns the parts sent here, in rank order. Parts are cut
    along the first dimension, equally or by the lengths `send` and `receive`. Differentiable."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd  # private: not for default runs

    return all_to_all_single_autograd(x.contiguous(), receive, send, group)


def take_own(x: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x[own], where all ranks of the group computed the same x, and each one's loss is about its own part. The gradient
    of x is the mean of the ranks' gradients, as FSDP's is over the other dimension of the mesh."""

    def mean(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient / group.size()

    if x.requires_grad:
        x.register_hook(mean)
    return x[own]


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_first_rank(act: Callable[[], Any]) -> Any:
    """Calls `act()` on rank 0 alone. Every rank returns its result, or raises the InputError that it raised."""
    outcome = None
    if dist.get_rank() == 0:
        try:
            outcome = act()
        except InputError as error:
            outcome = error
    outcome = broadcast(outcome)
    if isinstance(outcome, InputError):
        raise outcome
    return outcome
