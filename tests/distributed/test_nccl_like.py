"""NCCL's rules, as nccl_like.py has them, and what joins and leaves such groups: join_group, the end of a run."""

import faulthandler
import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lib.distributed import enter_stage, in_thread, init_distributed
from servers.group import join_group
from tests.distributed.nccl_like import NcclLike, Options, end_all
from tests.distributed.test_waits import WAIT_S, exit_code, start_ranks, store  # noqa: F401  two fixtures

SOON_S = 0.1  # in which what hangs would have ended


@pytest.fixture
def pair():
    """Two connected ranks in one process."""
    box = dist.HashStore()
    groups = [NcclLike(box, rank, 2) for rank in range(2)]
    for done in [in_thread(lambda group=group: group.broadcast(torch.zeros(1), 0).wait()) for group in groups]:
        done.result(WAIT_S)
    yield groups
    end_all()


def test_collectives_run_in_the_order_of_one_stream(pair):
    sent = [torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.bfloat16)]
    received = [torch.zeros_like(x) for x in sent]
    works = [[group.broadcast(x, 0) for x in tensors] for group, tensors in zip(pair, (sent, received))]
    works[1][1].wait()
    assert works[1][0].is_completed() and all(map(torch.equal, sent, received))


def test_only_abort_ends_work_without_its_peer(pair):
    first, _ = pair
    work, behind = first.broadcast(torch.zeros(1), 0), first.barrier()
    leaving = in_thread(first.shutdown)  # it waits for the work
    time.sleep(SOON_S)
    assert not work.is_completed() and not leaving.done()
    first.abort()
    for each in (work, behind):
        with pytest.raises(dist.DistBackendError, match="aborted"):
            each.wait()


def test_shutdown_needs_all_ranks(pair):
    leaving = in_thread(pair[0].shutdown)
    time.sleep(SOON_S)
    assert not leaving.done()
    pair[1].shutdown()
    leaving.result(WAIT_S)


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


# ---- processes -----------------------------------------------------------------------------------


def nccl_like_job(timeout: float, limit: timedelta = timedelta(hours=1)):
    """The world of a job, whose default group is NcclLike."""
    make = dist.init_process_group

    def create(store, rank, size, _):  # noqa: F811
        return NcclLike(store, rank, size, Options(limit))

    dist.Backend.register_backend("nccl_like", create, devices="cpu")
    dist.init_process_group = lambda backend, **options: make("nccl_like", **options)
    world = init_distributed(timeout)
    dist.barrier()
    return world


def test_a_run_on_all_ranks_ends(start_ranks):  # noqa: F811
    assert [exit_code(rank) for rank in start_ranks(2, lambda _: nccl_like_job(WAIT_S))] == [0, 0]


def test_the_end_of_a_run_waits_no_longer_than_a_stage_for_a_rank_that_is_gone(tmp_path, start_ranks):  # noqa: F811
    """NCCL's destroy_process_group needs all ranks, and one dies in it. Nobody but the watcher ends the others where no
    launcher does."""

    def main(_):
        if nccl_like_job(2).rank == 1:
            NcclLike.shutdown = lambda self: os.kill(os.getpid(), signal.SIGKILL)

    assert [exit_code(rank) for rank in start_ranks(2, main)] == [124, -signal.SIGKILL]
    assert re.search(r"StageTimeout: rank 0 ends after 2 s in end; ", (tmp_path / "0").read_text())


def test_the_watchdog_ends_the_process(tmp_path, start_ranks):  # noqa: F811
    """And lets no handler of ours say why: limits of ours come first."""

    def main(_):
        faulthandler.disable()  # pytest's, which prints all stacks
        world = nccl_like_job(WAIT_S, timedelta(seconds=0.5))
        enter_stage("step 1 update")
        if world.rank == 0:
            dist.barrier()
        time.sleep(WAIT_S)

    waiting, _ = start_ranks(2, main)
    assert exit_code(waiting) == -signal.SIGABRT
    assert "Watchdog caught collective operation timeout" in (tmp_path / "0").read_text()
