"""NCCL's rules, as nccl_like.py has them, and what joins and leaves such groups: join_group, the end of a run."""

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lib.distributed import in_thread, init_distributed
from servers.group import join_group
from tests.distributed.nccl_like import NcclLike, end_all
from tests.distributed.test_waits import WAIT_S, exit_code, start_ranks, store  # noqa: F401  two fixtures

SOON_S = 0.1  # in which what hangs would have ended


def test_only_abort_ends_work_without_its_peer():
    """And collectives run one after the other; shutdown waits for them."""
    box = dist.HashStore()
    first, second = (NcclLike(box, rank, 2) for rank in range(2))
    sent, received = torch.arange(6.0), torch.zeros(6)
    receiving = in_thread(lambda: second.broadcast(received, 0).wait())
    first.broadcast(sent, 0).wait()
    receiving.result(WAIT_S)
    assert sent.equal(received)
    work, behind = first.broadcast(torch.zeros(1), 0), first.barrier()
    leaving = in_thread(first.shutdown)
    time.sleep(SOON_S)
    assert not work.is_completed() and not leaving.done()
    first.abort()
    for each in (work, behind):
        with pytest.raises(dist.DistBackendError, match="aborted"):
            each.wait()
    end_all()


def nccl_on_a_cpu(monkeypatch) -> None:
    """join_group takes its branch for GPUs, with tensors of the CPU."""
    zeros = torch.zeros
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclLike, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))


def test_all_are_connected_when_they_have_joined(monkeypatch):
    """The first collective, not the constructor, waits for the others."""
    nccl_on_a_cpu(monkeypatch)
    box, device = dist.HashStore(), torch.device("cuda", 0)
    first = in_thread(lambda: join_group(box, 0, 2, device, 60.0, ""))
    time.sleep(SOON_S)
    assert not first.done()
    groups = [join_group(box, 1, 2, device, 60.0, ""), first.result(WAIT_S)]
    assert all(group._connected and group._limit_s > 60 for group in groups)  # who waits gives up before the watchdog
    end_all()


def test_a_thread_gives_its_exception_and_does_not_hold_up_the_process():
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 / 0).result(WAIT_S)
    in_thread(threading.Event().wait)
    assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def nccl_like_job(timeout: float):
    """The world of a job, whose default group is NcclLike."""
    make = dist.init_process_group
    create = lambda box, rank, size, _: NcclLike(box, rank, size)  # noqa: E731
    dist.Backend.register_backend("nccl_like", create, devices="cpu")
    dist.init_process_group = lambda backend, **options: make("nccl_like", **options)
    world = init_distributed(timeout)
    dist.barrier()
    return world


def test_the_end_of_a_run_waits_no_longer_than_a_stage_for_a_rank_that_is_gone(tmp_path, start_ranks):  # noqa: F811
    """NCCL's destroy_process_group needs all ranks, and one dies in it. Nobody but the watcher ends the others where no
    launcher does."""

    def main(_):
        if nccl_like_job(2).rank == 1:
            NcclLike.shutdown = lambda self: os.kill(os.getpid(), signal.SIGKILL)

    assert [exit_code(rank) for rank in start_ranks(2, lambda _: nccl_like_job(WAIT_S))] == [0, 0]
    assert [exit_code(rank) for rank in start_ranks(2, main)] == [124, -signal.SIGKILL]
    assert re.search(r"StageTimeout: rank 0 ends after 2 s in end; ", (tmp_path / "0").read_text())
