"""A process group for tests that follows NCCL's rules on CPU tensors, through nothing but its store.

What code that was tested with gloo only gets wrong: gloo connects when it is made, raises when a peer dies or a limit
passes, and leaves alone. NCCL does none of this, and its watchdog ends the process."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import ClassVar

import torch
import torch.distributed as dist

POLL_S = 0.002


@dataclass
class Options:
    """Of ProcessGroupNCCL."""

    _timeout: timedelta = timedelta(minutes=10)


class NcclWork(dist.Work):
    def __init__(self, run: Callable[[], None]):
        super().__init__()
        self.run, self.since, self.ended = run, time.monotonic(), threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """On a GPU the host goes on, and waits where it reads the tensor."""
        self.ended.wait()
        if self.error is not None:
            raise self.error
        return True


class NcclLike(dist.ProcessGroup):
    """- The first collective connects: it blocks until all ranks are in theirs, and nothing interrupts it.
    - A collective returns at once. They run one after the other, on one stream.
    - One that a peer does not take part in never ends, also if the peer has died, and holds up those behind it.
    - After the time limit the watchdog ends the process.
    - shutdown waits for all collectives, and then until all ranks have called it.
    - abort needs no peer: what has not ended fails, here only."""

    Options = Options
    die: Callable[[], None] = staticmethod(lambda: os.kill(os.getpid(), signal.SIGABRT))
    made: ClassVar[list["NcclLike"]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options | timedelta | None = None):
        super().__init__(rank, size)
        limit = options if isinstance(options, timedelta) else (options or Options())._timeout
        self._place, self._all, self._limit_s = rank, range(size), limit.total_seconds()
        self._store, self._connected, self._closed = dist.PrefixStore("nccl", store), False, threading.Event()
        self._test_is_over = threading.Event()
        self.made.append(self)
        self._stream: SimpleQueue[NcclWork] = SimpleQueue()
        self._works: list[NcclWork] = []
        for loop in (self._run_stream, self._watch):
            threading.Thread(target=loop, daemon=True).start()

    def getBackendName(self) -> str:
        return "nccl_like"

    def broadcast(self, tensors, root) -> NcclWork:
        """As that of a backend (a tensor, its root), and as dist.broadcast calls it (a list, options)."""
        [tensor] = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._launch(tensor, root if isinstance(root, int) else root.rootRank)

    def barrier(self, opts=None) -> NcclWork:
        return self._launch(torch.zeros(1), 0)

    def _launch(self, tensor: torch.Tensor, root: int) -> NcclWork:
        if not self._connected:
            self._meet("connect")
            self._connected = True
        name = f"work {len(self._works)}"

        def run() -> None:
            sent = tensor.contiguous().view(torch.uint8).numpy().tobytes() if self._place == root else b"-"
            received = self._meet(name, sent, self._closed)[root]
            if self._place != root:
                tensor.copy_(torch.frombuffer(bytearray(received), dtype=tensor.dtype).view(tensor.shape))

        self._works.append(work := NcclWork(run))
        self._stream.put(work)
        return work

    def _meet(self, name: str, value: bytes = b"-", until: threading.Event | None = None) -> list[bytes]:
        """What all ranks say at this place, once they all have. Raises DistBackendError if `until` is set before."""
        self._store.set(f"{name}/{self._place}", value)
        keys = [f"{name}/{r}" for r in self._all]
        while not self._store.check(keys):
            if self._test_is_over.is_set() or (until is not None and until.is_set()):
                raise dist.DistBackendError("NCCL communicator was aborted")
            time.sleep(POLL_S)
        return [self._store.get(key) for key in keys]

    def _run_stream(self) -> None:
        while True:
            work = self._stream.get()
            try:
                work.run()
            except Exception as error:  # noqa: BLE001  whoever waits gets it
                work.error = error
            work.ended.set()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            late = [work for work in self._works if not work.is_completed()]
            if late and time.monotonic() > late[0].since + self._limit_s:
                print(f"Watchdog caught collective operation timeout after {self._limit_s:g} s", file=sys.stderr)
                self.die()
                return

    def shutdown(self) -> None:
        for work in self._works:
            work.ended.wait()
        if self._connected and not self._closed.is_set():
            self._meet("shutdown")
        self._closed.set()

    def abort(self) -> None:
        self._closed.set()


def end_all() -> None:
    """After a test: no thread may be left in C++, where the end of the interpreter would abort the process."""
    for group in NcclLike.made:
        group._test_is_over.set()
        group.abort()
    NcclLike.made.clear()
