"""--train-weights: each source has its share of every step, epochs of its own, and its own difficulty."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from lib import InputError
from lib.data import RLHFDataset, make_loader
from tests.common import SMALL, fork, metrics, parse_flags, ran
from tests.data.test_dataset import Rows, make_row, make_tokenizer, write_jsonl

WEIGHTS = st.lists(st.floats(0.01, 1), min_size=1, max_size=5)


def rows_of(*sizes):
    rows = Rows(sum(sizes))
    rows.source_sizes = [*sizes]
    return rows


def handed_out(loader, steps):
    return [batch["row"].tolist() for batch, _ in zip(loader, range(steps))]


def loader_of(rows, weights, prompts=8, rank=0, world_size=1, **more):
    return make_loader(rows, prompts, rank=rank, world_size=world_size, seed=3, weights=weights, **more)


def source_of(rows, i):
    return int(np.searchsorted(np.cumsum(rows.source_sizes), i, side="right"))


@settings(max_examples=40)
@given(WEIGHTS, st.integers(0, 3), st.data())
def test_every_stretch_has_the_shares_and_a_source_its_epochs(weights, begin, data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(weights), max_size=len(weights)))
    rows = rows_of(*sizes)
    steps = handed_out(loader_of(rows, weights), 25)
    stretch = [i for step in steps[begin * 5 :] for i in step]
    counts = Counter(source_of(rows, i) for i in stretch)
    for s, weight in enumerate(weights):
        # the fractional parts of k x 0.618... leave an interval's share by less than 4 for 200 values
        assert abs(counts[s] - weight / sum(weights) * len(stretch)) < 4
    for s, size in enumerate(sizes):
        own = [i for step in steps for i in step if source_of(rows, i) == s]
        for epoch in range(len(own) // size):
            assert len({*own[epoch * size : (epoch + 1) * size]}) == size  # each row once


def test_without_weights_the_stream_is_that_of_one_data_set():
    rows = rows_of(5, 11)
    assert handed_out(loader_of(rows, ()), 6) == handed_out(loader_of(Rows(16), ()), 6)
    assert handed_out(loader_of(Rows(16), (2.0,)), 6) == handed_out(loader_of(Rows(16), ()), 6)
    first = [i for step in handed_out(loader_of(rows, ()), 2) for i in step]
    assert first == np.random.default_rng([3, 0]).permutation(16).tolist()


def test_a_resume_with_other_weights_is_refused():
    loader = loader_of(rows_of(4, 4), (1, 1))
    with pytest.raises(InputError, match="weights"):
        loader.load_state_dict(loader_of(rows_of(4, 4), (1, 2)).state_dict())


def test_sources_of_a_data_set_are_those_of_its_kept_rows(tmp_path):
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [make_row(name), make_row(name * 20)] * 3) for name in "ab"]
    files.append(write_jsonl(tmp_path / "c.jsonl", [make_row("c" * 20)]))
    dataset = RLHFDataset(files, make_tokenizer(), max_prompt_length=30)
    assert dataset.source_sizes == [3, 3, 0]
    with pytest.raises(InputError, match="no row of --train-files 2"):
        loader_of(dataset, (1, 1, 1))
    with pytest.raises(InputError, match="2 numbers for a data set with 1 source"):
        loader_of([*range(8)], (1, 1))


@pytest.mark.parametrize("flags", [["0.5"], ["0.5", "0"], ["nan", "1"], ["0.5", "0.2", "0.3"], ["-1", "1"]])
def test_weights_are_one_positive_number_a_file(flags):
    files = ["--train-files", "data/toy/train.jsonl", "data/toy/val.jsonl"]
    with pytest.raises(InputError, match="--train-weights"):
        parse_flags(grpo.Args, [*files, "--train-weights", *flags])


def test_a_run_on_a_mixture_has_a_curve_of_each_source(tmp_path):
    val, other = "data/toy/val.jsonl", tmp_path / "other.jsonl"
    other.write_text(open(val).read().replace('"toy/arithmetic"', '"other"'))  # noqa: SIM115
    files = [*SMALL[:-2], "--train-files", val, str(other), "--train-weights", "3", "1", "--val-files", "none"]
    scorer = ["--reward", "rewards/arithmetic.py:compute_score", "--total-steps", "4", "--run-name", "run"]
    ran(fork("grpo", tmp_path, *files, *scorer))
    rows = metrics(tmp_path / "run")
    others = sum(row["source/other/rows"] for row in rows) / 4  # prompts, in groups of 4
    assert abs(others - 8) <= 1  # a quarter of 4 x 8
    names = ("toy/arithmetic", "other")
    for row in rows:
        n, m = (row[f"source/{name}/rows"] for name in names)
        assert n + m == 32
        for metric in ("reward/mean", "response_length/mean", "reward/zero_variance"):  # of equal groups
            own = metric.removesuffix("/mean").removeprefix("reward/")
            a, b = (row[f"source/{name}/{own}"] for name in names)
            assert n * a + m * b == pytest.approx(32 * row[metric], rel=1e-5), metric
    assert [rows[-1][f"prompts/epochs/{s}"] for s in range(2)] == [(32 - others) / 256, others / 256]
