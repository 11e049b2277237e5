"""How vLLM servers get weights: the first rank broadcasts to all workers, or writes a file."""

import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from lib import InputError
from lib.distributed import (
    BUCKET_BYTES,
    broadcast,
    compute_device,
    in_thread,
    listening_store,
)
from lib.rollout.weight_sync import CheckedStream, WeightSyncError
from servers.client import Servers
from servers.group import address_towards, join_group

SYNC_TIMEOUT_S = 300.0  # how long all servers may take to join the group, or to take a bucket
HEALTH_S = 2.0  # time between two checks that the servers are alive
LEAVE_S = 10.0  # for the servers to leave the group


class ServerWeights:
    """way: "broadcast" if all servers were started with worker.py's backend. Otherwise they
    read a file in `folder` (on a shared disk), by "reload_from" if they have its worker extension,
    else by vLLM's "reload_weights". here: the servers run on this machine, as this user, and meet in
    a file, as anyone may join a store on loopback. A collective, as is `give`."""

    def __init__(self, servers: Servers, folder: Path, dtype: torch.dtype, here: bool):
        self.servers, self.folder, self.dtype = servers, folder, dtype
        self.way = broadcast(self._find_way() if dist.get_rank() == 0 else None)
        self._group: Any = None  # what join_group returns
        self.here = here

    def _find_way(self) -> str:
        backends = set()
        for url in self.servers.urls:
            try:
                found = self.servers.on_workers(url, "weight_transfer_backend").result()
            except InputError:  # the server has no such method
                return "reload_weights"
            backends |= set(found["results"])
        return "broadcast" if backends == {"broadcast"} else "reload_from"

    def give(self, stream: CheckedStream, version: int) -> str | None:
        """Gives all servers the weights. Returns, on all ranks, why that failed; a server may then have
        old and new ones. Every rank reads the stream to its end: tensors come from all ranks."""
        failure, weights = None, iter(stream)
        try:
            if dist.get_rank() == 0:
                if self.way == "broadcast":
                    self._broadcast(weights, compute_device(stream.model))
                else:
                    self._write_and_reload(weights, self.folder / f"version_{version}")
                self._reset_prefix_caches()  # they hold keys and values of the old weights
                self.servers.order_all("/resume")
        except InputError as error:
            failure = str(error)
        for _ in weights:
            pass
        failure = broadcast(failure)
        if failure is not None:
            self.leave()
        return failure

    def _broadcast(self, weights: Iterator[tuple[str, torch.Tensor]], device: torch.device) -> None:
        """Gathers the next bucket while one is sent: three are in memory."""
        if self._group is None:
            self._group = self._connect(device)
        self._finish(self.servers.order("/start_weight_update"))
        sending: tuple[list[Future], dist.Work | None] = ([], None)
        dtype = str(self.dtype).removeprefix("torch.")
        for names, tensors in _buckets(weights):
            shapes = [list(tensor.shape) for tensor in tensors]
            bucket = torch.cat([tensor.flatten() for tensor in tensors])
            self._finish(*sending)
            update = {"names": names, "shapes": shapes, "dtype": dtype}
            replies = self.servers.order("/update_weights", json={"update_info": update})
            sending = replies, self._group.broadcast(bucket, 0)
        self._finish(*sending)
        self._finish(self.servers.order("/finish_weight_update"))

    def _connect(self, device: torch.device) -> Any:
        """The process group of the trainer's first rank and all workers, server after server."""
        urls = self.servers.urls
        sizes = [self.servers.ask(url, "GET", "/get_world_size")["world_size"] for url in urls]
        host, size = _address_towards(urls), 1 + sum(sizes)
        limit = timedelta(seconds=SYNC_TIMEOUT_S)
        info = {"host": host, "port": 0, "file": "", "device": device.type, "size": size}
        info["timeout_s"] = SYNC_TIMEOUT_S
        store: Any
        if self.here:
            self._meeting = TemporaryDirectory(prefix="plainrl_")
            info["file"] = str(Path(self._meeting.name, "store"))
            store = dist.FileStore(info["file"], size)
            store.set_timeout(limit)
        else:
            store = listening_store(host, 0, limit)
            info["port"] = store.port
        replies = []
        for url, first_rank in zip(urls, accumulate([1, *sizes])):
            order = {"init_info": info | {"first_rank": first_rank}}
            replies.append(self.servers.post(url, "/init_weight_transfer_engine", json=order))
        joined = in_thread(lambda: join_group(store, 0, size, device, SYNC_TIMEOUT_S, host))
        self._finish([*replies, joined])
        return joined.result()

    def _finish(self, replies: list[Future], work: dist.Work | None = None) -> None:
        """Waits for the replies and the work. One may hang if the other failed, or a worker is lost."""
        start = asked = time.monotonic()
        while True:
            try:
                for reply in replies:
                    if reply.done():
                        reply.result()
                if work is not None and work.is_completed():
                    work.wait()
                    work = None
            except RuntimeError as error:
                raise self._broken_off(error) from error
            if work is None and all(reply.done() for reply in replies):
                return
            if time.monotonic() > start + SYNC_TIMEOUT_S:
                raise self._broken_off(f"no answer for {SYNC_TIMEOUT_S:g} s")
            if time.monotonic() > asked + HEALTH_S:
                for url in self.servers.urls:
                    self.servers.ask(url, "GET", "/health", limit_s=SYNC_TIMEOUT_S)
                asked = time.monotonic()
            time.sleep(0.001)

    def _broken_off(self, why) -> InputError:
        urls, reason = ",".join(self.servers.urls), str(why).partition("\n")[0]
        return InputError(f"--rollout-engine {urls}: the broadcast of weights broke off ({reason})")

    def _write_and_reload(self, weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
        """folder: a new one at each sync, since a network disk may show an old file."""
        folder.mkdir(parents=True, exist_ok=True)
        whole = {name: tensor.cpu().contiguous() for name, tensor in weights}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        urls, path = self.servers.urls, str(folder)
        for reply in [self.servers.on_workers(url, self.way, weights_path=path) for url in urls]:
            reply.result()
        shutil.rmtree(folder)

    def _reset_prefix_caches(self) -> None:
        which = {"reset_running_requests": "true"}  # those that are still being aborted, too
        for url in self.servers.urls:
            if not self.servers.ask(url, "POST", "/reset_prefix_cache", params=which)["success"]:
                raise WeightSyncError(f"the vLLM server {url} kept its prefix cache")

    def leave(self) -> None:
        """Ends the group; the next `give` makes a new one. All sides abort, since NCCL's shutdown waits
        for every rank and a server may be gone; `give` has waited for all that it sent. A server
        that hangs in a broadcast does not answer; the caller starts it anew."""
        if self._group is not None:
            group, self._group = self._group, None
            ending = self.servers.order("/shutdown_weight_transfer_engine")
            wait([*ending, in_thread(group.abort)], LEAVE_S)  # without results: a server that ended needs none
            if self.here:
                self._meeting.cleanup()


def _buckets(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
    """Successive tensors of one dtype, at most BUCKET_BYTES together; a larger tensor goes alone."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, tensor in stream:
        size = sum(own.nbytes for own in tensors) + tensor.nbytes
        if tensors and (size > BUCKET_BYTES or tensors[0].dtype != tensor.dtype):
            yield names, tensors
            names, tensors = [], []
        names.append(name)
        tensors.append(tensor)
    yield names, tensors


def _address_towards(urls: list[str]) -> str:
    """This machine's address on the network of the servers; loopback if all are on this machine."""
    ports = {"http": 80, "https": 443}
    parts = [urlsplit(url) for url in urls]
    addresses = [address_towards(url.hostname, url.port or ports[url.scheme]) for url in parts]
    return next((own for own in addresses if not ip_address(own).is_loopback), addresses[0])
