"""A process group of the trainer's first rank and the servers' workers."""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def address_towards(host: str, port: int) -> str:
    """This machine's address on the network through which it reaches `host`. Raises OSError."""
    with socket.create_connection((host, port)) as s:
        return s.getsockname()[0]


def join_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, address: str) -> Any:
    """A process group with processes other than the trainer's ranks: gloo on a CPU, listening on `address`, else NCCL.
    Blocks until all have joined. With gloo, this and its operations raise RuntimeError after `timeout_s`."""
    timeout = timedelta(seconds=timeout_s)
    options: Any  # much of these classes is missing in torch's stubs
    group: Any
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(hostname=address)], timeout
        group = dist.ProcessGroupGloo(store, rank, size, options)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 4 * timeout  # at which NCCL's watchdog ends the process: the caller gives up before
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    hello = torch.zeros(1, device=device)
    group.broadcast(hello, 0).wait()
    hello.item()  # NCCL connects in its first collective, which ends here
    return group
