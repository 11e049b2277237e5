"""Weights for servers through a group with NCCL's rules: a server that dies, a trainer that is gone, new starts.

Trainer and servers are threads here; a server is its worker, whose thread takes one order after the other, and what
answers for it. tests/servers/test_server_engine.py has vLLM's own servers, with gloo."""

import time
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from lib.distributed import in_thread
from servers import weights as server_weights
from servers.client import ServerLost
from servers.engine import ServerEngine
from servers.weights import ServerWeights
from tests.common import skip_without_vllm
from tests.distributed.nccl_like import NcclLike, end_all
from tests.distributed.test_nccl_like import WAIT_S, nccl_on_a_cpu

skip_without_vllm()

TENSORS = {"embedding": torch.randn(6, 4), "norm": torch.randn(4), "head": torch.randn(5, 4)}
LIMIT_S = 60.0  # of a sync; what must not wait for it takes less than half


class Server:
    """What its process does with orders: one after the other, in the worker's thread, where one that hangs holds up
    those behind it. killed: it takes no more orders, and leaves those that it has unanswered."""

    def __init__(self):
        from servers.worker import BroadcastEngine  # vLLM's import takes seconds

        self.orders, self.killed, self.weights = SimpleQueue(), Event(), {}
        self.worker = BroadcastEngine.__new__(BroadcastEngine)  # without a model of vLLM's
        self.worker.device, self.worker.model = torch.device("cpu"), SimpleNamespace(load_weights=self.weights.update)
        self.worker.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        self.at = lambda path: None  # what happens where it begins an order
        in_thread(self.work)

    def work(self) -> None:
        own = self.worker
        acts = {
            "/init_weight_transfer_engine": lambda info: own.init_transfer_engine(
                own.init_info_cls(**info["init_info"])
            ),
            "/update_weights": lambda info: own.receive_weights(own.update_info_cls(**info["update_info"])),
            "/shutdown_weight_transfer_engine": lambda _: own.shutdown(),
        } | dict.fromkeys(("/start_weight_update", "/finish_weight_update", "/resume", "/pause"), lambda _: None)
        while True:
            path, json, answer = self.orders.get()
            self.at(path)
            if self.killed.is_set():
                return
            try:
                answer.set_result(acts[path](json))
            except Exception as error:  # noqa: BLE001  the answer is a status of 500
                answer.set_exception(ServerLost(str(error)))


class Servers:
    """Stands for servers.client.Servers."""

    def __init__(self, *urls: str):
        self.urls, self.all = [*urls], {url: Server() for url in urls}

    def post(self, url: str, path: str, json=None, **_) -> Future:
        answer: Future = Future()
        if self.all[url].killed.is_set():
            answer.set_exception(ServerLost(f"{url}: no vLLM server answers there"))
        else:
            self.all[url].orders.put((path, json, answer))
        return answer

    def order(self, path: str, **kwargs) -> list[Future]:
        return [self.post(url, path, **kwargs) for url in self.urls]

    def order_all(self, path: str, **kwargs) -> None:
        for reply in self.order(path, **kwargs):
            reply.result(WAIT_S)

    def ask(self, url: str, method: str, path: str, **_) -> dict:
        if self.all[url].killed.is_set():
            raise ServerLost(f"{url}: no vLLM server answers there")
        return {"world_size": 1, "success": True}

    def start_anew(self, before: str, after: str) -> None:
        self.all[before].killed.set()
        self.all[after] = Server()
        self.urls[self.urls.index(before)] = after

    def held(self) -> list[dict]:
        return [self.all[url].weights for url in self.urls]


@pytest.fixture
def weights(world, monkeypatch, tmp_path):
    """ServerWeights of two servers, in a group with NCCL's rules; a bucket has one tensor."""
    from servers import worker

    nccl_on_a_cpu(monkeypatch)
    join = server_weights.join_group

    def join_on_gpus(store, rank, size, device, *rest):  # the tensors' own device is the CPU
        return join(store, rank, size, torch.device("cuda", 0), *rest)

    for module in (server_weights, worker):
        monkeypatch.setattr(module, "join_group", join_on_gpus)
    limits = {"BUCKET_BYTES": 1, "SYNC_TIMEOUT_S": LIMIT_S, "HEALTH_S": 0.05, "LEAVE_S": 0.5}
    functions = {"compute_device": lambda _: torch.device("cpu"), "_address_towards": lambda _: "127.0.0.1"}
    for name, value in (limits | functions).items():
        monkeypatch.setattr(server_weights, name, value)
    ends = []
    monkeypatch.setattr(NcclLike, "die", lambda self: ends.append(self))
    ours = ServerWeights.__new__(ServerWeights)
    own = {"dtype": torch.float32, "way": "broadcast", "_group": None, "here": True}
    vars(ours).update(servers=Servers("a", "b"), **own)
    yield ours
    ours.leave()
    end_all()
    assert not ends  # the watchdog never came to end the process


class Stream:
    model = None

    def __iter__(self):
        return iter(TENSORS.items())


@contextmanager
def in_time():
    """Without waiting for the time limit of a sync."""
    begun = time.monotonic()
    yield
    assert time.monotonic() < begun + LIMIT_S / 2


def given(weights: ServerWeights) -> bool:
    """Whether all servers have all weights, after a sync that succeeded."""
    assert weights.give(Stream(), 1) is None
    return all(
        own.keys() == TENSORS.keys() and all(map(torch.equal, own.values(), TENSORS.values()))
        for own in weights.servers.held()
    )


def test_weights_reach_all_servers_and_all_leave(weights):
    assert given(weights) and given(weights)
    group = weights._group
    workers = [server.worker for server in weights.servers.all.values()]
    weights.leave()
    assert weights._group is None and group._closed.is_set() and [worker.group for worker in workers] == [None, None]
    assert given(weights)  # in a new group


def test_a_server_that_dies_in_a_broadcast_costs_no_time_limit(weights):
    """It has said that it will receive; the other one hangs in what it receives next, and can only be started anew."""
    assert given(weights)
    dies = weights.servers.all["b"]
    dies.at = lambda path: path == "/update_weights" and dies.killed.set()
    with in_time():
        assert "b: no vLLM server answers" in weights.give(Stream(), 2)
    for before, after in {"a": "a2", "b": "b2"}.items():
        weights.servers.start_anew(before, after)
    assert given(weights)


def test_a_server_that_dies_while_it_joins(weights):
    """NCCL connects in the first collective: the trainer waits there for a server that never comes."""
    dies = weights.servers.all["b"]
    dies.at = lambda path: dies.killed.set()
    with in_time():
        assert "b: no vLLM server answers" in weights.give(Stream(), 1)


def test_a_server_that_was_started_again_between_two_syncs(weights):
    """Its peers, trainer and server, leave a group that it has never left. NCCL's shutdown would wait for it."""
    assert given(weights)
    engine, servers = ServerEngine.__new__(ServerEngine), weights.servers
    engine.weights, engine.servers, engine._posted, engine._starts = weights, servers, set(), [1, 1]
    servers.start_anew("b", "b2")
    servers.urls[1] = "b"  # what the engine still knows
    engine.own = SimpleNamespace(states=lambda: [("a", 1), ("b2", 2)])
    servers.begin = lambda coroutine: (coroutine.close(), SimpleNamespace(result=lambda: None))[1]
    with in_time():
        assert engine._pause() is None and servers.urls == ["a", "b2"] and given(weights)


def test_a_server_takes_orders_after_a_trainer_that_never_joined(weights, tmp_path):
    info = {"host": "", "port": 0, "file": str(tmp_path / "store"), "device": "cpu", "first_rank": 1, "size": 2}
    joining = weights.servers.order("/init_weight_transfer_engine", json={"init_info": info | {"timeout_s": 0.2}})
    for reply in joining:
        with pytest.raises(ServerLost):
            reply.result(WAIT_S)
    assert given(weights)


def test_a_server_leaves_the_group_of_a_run_that_was_killed(weights):
    """The trainer said nothing. The next run's first order finds the servers in a group without it."""
    assert given(weights)
    weights._group = None
    with in_time():
        assert given(weights)
