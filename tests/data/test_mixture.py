"""--train-weights: each source has its share of every step, epochs of its own, and its own difficulty."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from lib import InputError
from lib.data import RLHFDataset, make_loader
from lib.data_proto import DataProto
from lib.distributed import reduce_metrics
from lib.log import data_metrics
from tests.common import SMALL, fork, metrics, parse_flags, ran
from tests.data.test_dataset import make_row, make_tokenizer, write_jsonl

WEIGHTS = st.lists(st.floats(0.01, 1), min_size=1, max_size=5)


class Rows:
    def __init__(self, *sizes):
        self.source_sizes = [*sizes]

    def __len__(self):
        return sum(self.source_sizes)

    def __getitem__(self, i):
        return {"row": i}


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
    rows = Rows(*sizes)
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
    rows = Rows(5, 11)
    assert handed_out(loader_of(rows, ()), 6) == handed_out(loader_of(Rows(16), ()), 6)
    assert handed_out(loader_of(Rows(16), (2.0,)), 6) == handed_out(loader_of(Rows(16), ()), 6)
    first = [i for step in handed_out(loader_of(rows, ()), 2) for i in step]
    assert first == np.random.default_rng([3, 0]).permutation(16).tolist()


@pytest.mark.parametrize("sampling", ["uniform", "skip", "variance"])
def test_a_resume_sees_the_same_stream(sampling, world):
    """Also of prompts by difficulty, within a source: the source's share stays. On two ranks: test_difficulty.py."""
    rows = Rows(30, 6)

    def loader():
        return loader_of(rows, (0.75, 0.25), sampling=sampling, skip_after=1)

    def scored(loader, steps):
        """What is handed out; the rows of one half of each source always score alike."""
        taken = []
        for _, batch in zip(range(steps), loader):
            taken.append(batch["row"].tolist())
            twice = [i for i in taken[-1] for _ in range(2)]
            loader.record_scores(twice, [[float(n % 2 and i % 2)] for n, i in enumerate(twice)])
        return taken

    whole, begun, resumed = scored(loader(), 12), loader(), loader()
    first = scored(begun, 5)
    resumed.load_state_dict(begun.state_dict())
    assert first + scored(resumed, 7) == whole
    counts = Counter(source_of(rows, i) for step in whole for i in step)
    assert abs(counts[1] - 24) < 4


def test_a_resume_with_other_weights_is_refused():
    loader = loader_of(Rows(4, 4), (1, 1))
    with pytest.raises(InputError, match="weights"):
        loader.load_state_dict(loader_of(Rows(4, 4), (1, 2)).state_dict())


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


def test_metrics_are_also_by_data_source():
    uids = np.array(["a", "a", "b", "b", "c", "c"], dtype=object)
    sources = np.array(["x", "x", "y", "y", "y", "y"], dtype=object)
    mask = torch.ones(6, 2, dtype=torch.long)
    scores = torch.tensor([[0, 1.0], [0, 0], [0, 1], [0, 1], [0, 0], [0, 1]])
    tensors = {"token_level_scores": scores, "response_mask": mask, "prompts": torch.ones(6, 3, dtype=torch.long)}
    tensors["attention_mask"] = torch.ones(6, 5, dtype=torch.long)
    batch = DataProto.from_dict(tensors, {"uid": uids, "data_source": sources})
    found = {name: value for name, value in reduce_metrics(data_metrics(batch)).items() if name.startswith("source/")}
    assert found == {
        f"source/{source}/{name}": value
        for source, values in {"x": (2, 0.5, 2, 0), "y": (4, 0.75, 2, 0.5)}.items()
        for name, value in zip(("rows", "reward", "response_length", "zero_variance"), values)
    }


def test_a_run_on_a_mixture_has_a_curve_of_each_source(tmp_path):
    val, other = "data/toy/val.jsonl", tmp_path / "other.jsonl"
    other.write_text(open(val).read().replace('"toy/arithmetic"', '"other"'))  # noqa: SIM115
    files = [*SMALL[:-2], "--train-files", val, str(other), "--train-weights", "3", "1", "--val-files", "none"]
    scorer = ["--reward", "rewards/arithmetic.py:compute_score", "--total-steps", "4", "--run-name", "run"]
    ran(fork("grpo", tmp_path, *files, *scorer))
    rows = metrics(tmp_path / "run")
    others = sum(row["source/other/rows"] for row in rows) / 4  # prompts, in groups of 4
    assert abs(others - 8) <= 1  # a quarter of 4 x 8
    assert all(row["source/toy/arithmetic/rows"] + row["source/other/rows"] == 32 for row in rows)
    assert [rows[-1][f"prompts/epochs/{s}"] for s in range(2)] == [(32 - others) / 256, others / 256]
