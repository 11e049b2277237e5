"""servers/async_rollouts.py, with a server whose responses end in any order."""

import copy
import random
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.data_proto import DataProto
from lib.rollout import Generated, Sampling
from lib.rollout.engine import Response
from lib.rollout.stream import add_origin, staleness_metrics
from servers.async_rollouts import AsyncRollouts
from tests.common import rollout_batch

GROUP = 2


class Server:
    """Samples a token of the present version for each response that is on its way at a sync. Between syncs responses
    end in an order that `seed` shuffles."""

    def __init__(self, seed: int, version: int):
        self.random, self.version, self.running = random.Random(seed), version, []

    def check_weights(self): ...

    def start(self, prompts, sampling, seeds, partial):
        rows = partial or [Generated([], [], "abort") for _ in seeds]
        started = [Response(seed, row, Future()) for seed, row in zip(seeds, rows)]
        for response in started:
            if response.row.finish_reason != "abort":
                response.future.set_result(response.row)
        self.running += [response for response in started if not response.future.done()]
        return started

    def sample(self, response):
        response.row.token_ids.append(response.seed)
        response.row.weight_versions.append(self.version)

    def sync(self):
        for response in self.running:
            self.sample(response)
        self.version += 1

    def wait_until(self, done):
        ends = 0
        while not done() or ends < 3:  # some end that are not needed yet
            if not self.running:
                assert done(), "waits for ever"
                return
            response = self.running.pop(self.random.randrange(len(self.running)))
            self.sample(response)
            response.row.finish_reason = "stop"
            response.future.set_result(response.row)
            ends += 1

    def so_far(self, responses):
        return [copy.deepcopy(response.row) for response in responses]


def batch_of(groups: int, number: int):
    names = [f"{number}-{i // GROUP}" for i in range(groups * GROUP)]
    rows = DataProto.from_dict({"input_ids": torch.full((len(names), 1), number)}, {"uid": np.array(names, object)})
    return rows, [1000 * number + i for i in range(len(names))]


def on(server, level, order, groups, last_started, last=None):
    how = {"level": level, "order": order, "groups": groups, "group_size": GROUP}
    how |= {"last_started": last_started, "last": last}
    return AsyncRollouts(server, server, lambda number: batch_of(groups, number), Sampling(9), **how)


@pytest.mark.usefixtures("world")
@given(
    seed=st.integers(0, 999),
    level=st.integers(1, 3),
    order=st.sampled_from(["prompts", "finished"]),
    groups=st.integers(1, 3),
    takes=st.lists(st.integers(1, 3), min_size=4, max_size=8),
    kills=st.sets(st.integers(1, 6)),
    ends=st.booleans(),
)
def test_no_prompt_is_lost_or_doubled_or_too_old(seed, level, order, groups, takes, kills, ends):
    """Also by a kill after any step and a resume from the step before. takes: batches of each step, as in dapo.py.
    ends: no batch begins behind the last one."""
    if order == "finished":
        takes, level = [1] * len(takes), level + 1
    server, trained, checkpoints, last = Server(seed, 0), [], {}, sum(takes) if ends else None
    queue = on(server, level, order, groups, 0, last)
    for step, batches in enumerate(takes, 1):
        for again in range(1 + (step in kills)):
            if again:  # killed after the step, and resumed with what the step before it had saved
                server = Server(seed + step, step - 1)
                queue = on(server, level, order, groups, step - 1, last)
                state, trained = copy.deepcopy(checkpoints.get(step - 1, ({"last_started": 0}, [])))
                queue.load_state_dict(state)
            assert server.version == step - 1
            for _ in range(batches):
                rows, responses = queue.take()
                uids = rows.non_tensor_batch["uid"].tolist()
                assert len(rows) == len(responses) == groups * GROUP
                for uid, response in zip(uids, responses):
                    number, row = int(uid.split("-")[0]), response.future.result()
                    assert response.seed // 1000 == number
                    assert set(row.token_ids) == {response.seed} and len(row.token_ids) == len(row.weight_versions)
                    assert row.weight_versions == sorted(row.weight_versions)
                    assert step - 1 - level <= row.weight_versions[0] and row.weight_versions[-1] <= step - 1
                trained += uids[::GROUP]
            server.sync()
        checkpoints[step] = copy.deepcopy((queue.state_dict(), trained))
    started = [f"{number}-{i}" for number in range(1, queue.last_started + 1) for i in range(groups)]
    waiting = [group.rows.non_tensor_batch["uid"][0] for group in queue.in_flight]
    assert sorted(trained + waiting) == sorted(started)
    assert len(waiting) == (0 if ends else (level - (order == "finished")) * groups)
    if order == "prompts":
        assert trained + waiting == started


@pytest.mark.usefixtures("world")
def test_a_lower_level_begins_anew_what_would_be_too_old():
    server = Server(0, 0)
    queue = on(server, 3, "prompts", 1, 0)
    queue.take()
    server.sync()
    later = Server(0, 1)
    resumed = on(later, 1, "prompts", 1, 1)
    resumed.load_state_dict(queue.state_dict())
    later.version = 3
    _, responses = resumed.take()
    assert [response.future.result().weight_versions for response in responses] == [[3], [3]]


def test_staleness_is_counted_over_sampled_tokens_and_bounded():
    versions = torch.tensor([[3, 4, -1], [-1, -1, -1], [2, 2, 4]])
    found = staleness_metrics(versions, 4)
    assert found["async/staleness_mean"] == (5, 5) and found["async/staleness_max"] == (2,)
    assert staleness_metrics(versions[1:2], 4)["async/staleness_max"] == (0,)
    batch = rollout_batch([1, 1, 1], [2, 1, 3])
    assert add_origin(batch, 4, 0).batch["policy_version"].tolist() == [4, 4, 4]
    batch.batch["weight_versions"] = versions
    assert add_origin(batch, 4, 2).batch["policy_version"].tolist() == [3, 4, 2]
    with pytest.raises(AssertionError, match="more than 1 steps ago"):
        add_origin(batch, 4, 1)
