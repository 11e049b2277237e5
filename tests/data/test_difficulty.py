"""--prompt-sampling: which prompts come, by what their responses scored before."""

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.data import ROW, make_loader
from tests.common import run_ranks
from tests.data.test_dataset import Rows

alone = pytest.mark.usefixtures("world")
# one process group serves all examples
EXAMPLES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def loader(n: int, per_step: int, sampling: str, share: float = 0.1, **more):
    rows = Rows(n)
    rows.source_sizes = [n - 3, 3]
    return make_loader(rows, per_step, **{"rank": 0, "world_size": 1, "seed": 5} | more, sampling=sampling, share=share)


def record(prompts, scores: dict[int, list[float]]) -> None:
    each = [(row, [score]) for row, own in scores.items() for score in own]
    prompts.record_scores([row for row, _ in each], [score for _, score in each])


def scores_of(row: int) -> list[float]:
    return [0.0, row / 7, float(row % 3 == 0)] if row % 4 else [1.0, 1.0, 1.0]


def steps_of(prompts, steps: int) -> list[list[int]]:
    """The rows of each step, each observed before the next."""
    batches, given = iter(prompts), []
    for _ in range(steps):
        given.append(next(batches)[ROW].tolist())
        record(prompts, {row: scores_of(row) for row in given[-1]})
    return given


def steps_of_rank(world) -> list[tuple[list[list[int]], dict]]:
    """Of each way to sample, without and with --train-weights, the steps and the state after them. Several ranks go on
    after five of the steps from what the state says."""
    found = []
    for sampling, weights in product(["skip", "variance"], [(), (2, 1)]):
        how = {"skip_after": 1, "rank": world.rank, "world_size": world.size, "weights": weights}
        begun = prompts = loader(11, 4, sampling, **how)
        steps = steps_of(begun, 5)
        if world.size > 1:
            prompts = loader(11, 4, sampling, **how)
            prompts.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        found.append((steps + steps_of(prompts, 3), prompts.state_dict()))
    return found


def test_two_ranks_take_what_one_takes_also_after_a_resume():
    """It is the first here, as its ranks must not inherit the process group of the others. A source keeps its share."""
    [alone], ranks = run_ranks(1, steps_of_rank), run_ranks(2, steps_of_rank)
    for i, ((whole, state), (first, own), (second, other)) in enumerate(zip(alone, *ranks, strict=True)):
        assert [[a, c, b, d] for (a, b), (c, d) in zip(first, second)] == whole
        assert own == other == state
        assert i % 2 == 0 or abs(sum(row >= 8 for step in whole for row in step) - 32 / 3) < 4


@alone
@EXAMPLES
@given(st.integers(2, 20), st.integers(1, 8), st.integers(1, 10), st.sets(st.integers(0, 19)), st.integers(1, 3))
def test_skip_leaves_uninformative_rows_out_of_the_stream_and_no_others(n, per_step, steps, uninformative, skip_after):
    """Against a walk over the whole stream. After an epoch of skips a step takes rows as they come, and so ends."""
    prompts = loader(n, per_step, "skip", share=1e-12, skip_after=skip_after)
    batches, stream, alike = iter(prompts), iter(loader(n, 1, "uniform")), np.zeros(n, dtype=int)
    for _ in range(steps):
        expected, skips = [], 0
        while len(expected) < per_step:
            row = next(stream)["row"].item()
            if alike[row] >= skip_after and skips < n:
                skips += 1
            else:
                expected.append(row)
        assert next(batches)[ROW].tolist() == expected
        record(prompts, {row: [1.0, 1.0] if row in uninformative else [0.0, 1.0] for row in expected})
        for row in set(expected):
            alike[row] = alike[row] + 1 if row in uninformative else 0


@alone
def test_a_share_of_skipped_rows_comes_and_returns_once_its_scores_differ():
    prompts = loader(100, 10, "skip", share=0.25, skip_after=1)
    record(prompts, {row: [0.0, 0.0] for row in range(90)})
    batches = iter(prompts)
    given = [row for _ in range(100) for row in next(batches)[ROW].tolist()]
    uninformative = sum(row < 90 for row in given)
    # 22.5 of 90 uninformative rows for each 10 others: 69 percent of all; three standard errors of 1000 draws: 0.044
    assert uninformative / len(given) == pytest.approx(22.5 / 32.5, abs=0.045)
    record(prompts, {row: [0.0, 1.0] for row in range(90)})
    assert prompts.metrics() == {"prompts/seen": 0.9, "prompts/skipped": 0.0}


@alone
def test_variance_draws_in_proportion_to_it_and_an_unseen_row_as_the_best():
    scores = {0: [0.0, 0.0], 1: [0.0, 1.0], 2: [0.0, 0.0, 0.0, 1.0]}  # variances 0, 1/4, 3/16; row 3 is not seen
    prompts = loader(4, 1, "variance", share=0.2)
    record(prompts, scores)
    batches = iter(prompts)
    given = np.array([next(batches)[ROW][0] for _ in range(4000)])
    expected = 0.2 / 4 + 0.8 * np.array([0, 4, 3, 4]) / 11
    got = np.bincount(given, minlength=4) / len(given)
    assert np.abs(got - expected).max() < 0.025, got  # three standard errors of 4000 draws: 0.024


@alone
def test_variance_draws_no_row_twice_in_a_step_unless_there_are_too_few():
    for n, times in ((12, 1), (5, 3)):
        prompts = loader(n, 12, "variance")
        record(prompts, {row: [0.0, float(row)] for row in range(n)})
        given = next(iter(prompts))[ROW].tolist()
        assert len(given) == 12 and (len(set(given)) == 12) == (times == 1)


@alone
def test_what_the_scores_of_a_row_tell():
    """Several rewards (gdpo's reward_keys) are compared one by one, whatever their sum is."""
    nan, difficulty = float("nan"), loader(10, 2, "skip").batch_sampler.difficulty
    for row, scores, alike, variance in (
        (0, [[0.0, 1.0], [1.0, 0.0]], 0, 0.5),
        (1, [[2.0, 1.0], [2.0, 1.0]], 1, 0),
        (2, [[0.1 + 0.2], [0.3]], 1, 0),  # but for rounding
        (3, [[0.3], [0.31]], 0, 2.5e-5),
        (4, [[1, nan], [1, 2]], 1, 0),  # a reward that the scorer did not give
        (5, [[1, 0], [nan, 1]], 0, 0.25),
        (6, [[1.0]], 0, nan),  # one score
        (7, [], 0, nan),  # dead
    ):
        difficulty.record_scores([row] * len(scores), scores)
        assert difficulty.alike[row] == alike, row
        assert difficulty.variance[row] == pytest.approx(variance, abs=1e-12, nan_ok=True), row
