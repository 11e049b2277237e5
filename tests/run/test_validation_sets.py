"""Validation of several files, each with its own sampling."""

import json
from pathlib import Path
from types import SimpleNamespace

from lib.args import RolloutArgs, ValidationArgs
from lib.run.validation import check_sources
from tests.common import ROOT, SMALL, fork, one_line, ran

PER_FILE = ["--val-samples", "2", "1", "--val-temperature", "1.5", "0", "--val-kwargs", "max_response_length=3,40"]
PER_FILE += ["--max-val-samples", "5"]


def files(folder: Path) -> list[str]:
    """Two files of 5 and 6 prompts, each with a data source of its own."""
    lines = (ROOT / "data/toy/val.jsonl").open().readlines()[:6]
    rows = [json.loads(line) for line in lines]
    for name, number in (("a", 5), ("b", 6)):
        own = [row | {"data_source": f"toy/{name}"} for row in rows[:number]]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    scorer = "def score(solution_str, **_):\n    return {'score': 0.5, 'chars': len(solution_str)}\n"
    (folder / "scorer.py").write_text(scorer)
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


def validate(folder: Path, name: str, *flags: str, ranks: int = 1) -> tuple[dict, list[dict]]:
    """(metrics, samples by data source and prompt) of --val-only."""
    args = [*SMALL, "--val-only", "--reward", f"{folder / 'scorer.py'}:score", "--run-name", name]
    ran(fork("grpo", folder, *args, *flags, ranks=ranks))
    logs = folder / name / "val_only/1"
    metrics = json.loads((logs / "metrics.jsonl").read_text().splitlines()[0])
    samples = [json.loads(line) for line in (logs / "samples.jsonl").read_text().splitlines()]
    return metrics, sorted(samples, key=lambda row: (row["data_source"], row["prompt"], row["response"]))


def test_each_file_has_its_own_sampling(tmp_path):
    """3 and 40 tokens where training has 16. The greedy set gives what it gives alone, and two ranks what one does."""
    a, b = files(tmp_path)
    metrics, samples = validate(tmp_path, "both", "--val-files", a, b, *PER_FILE)
    assert {"val/toy/a/mean@2", "val/toy/b/mean@1"} <= metrics.keys()
    assert not {"val/toy/a/mean@1", "val/toy/b/mean@2"} & metrics.keys()
    of = {name: [row for row in samples if row["data_source"] == f"toy/{name}"] for name in "ab"}
    assert (len(of["a"]), len(of["b"])) == (10, 5)  # 5 of 6 prompts
    assert metrics["val/toy/a/clip_ratio"] > 0 and metrics["val/toy/b/clip_ratio"] == 0
    assert max(len(row["response"]) for row in of["a"]) < max(len(row["response"]) for row in of["b"])
    assert len({row["response"] for row in of["a"]}) > 5  # not greedy

    flags = ["--val-files", b, "--val-kwargs", "max_response_length=40", "--max-val-samples", "5"]
    alone, own = validate(tmp_path, "alone", *flags)
    assert {name: value for name, value in alone.items() if "/b/" in name}.items() <= metrics.items()
    assert [row["response"] for row in own] == [row["response"] for row in of["b"]]
    again, twice = validate(tmp_path, "ranks", "--val-files", a, b, *PER_FILE, ranks=2)
    assert twice == samples
    assert all(again[name] == value for name, value in metrics.items() if name.startswith("val/"))


def test_one_value_is_for_all_files():
    words = ("top_k=5", "repetition_penalty=1.2")
    args = ValidationArgs(val_files=("a", "b", "c"), val_temperature=(0.5,), val_kwargs=words)
    [together] = args.sets()
    assert together.files == ("a", "b", "c")
    training = RolloutArgs(max_response_length=7, min_p=0.5, stop=("x",)).sampling()
    sampling = together.sampling(training)
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0.5, 5, 0.0, 1.2)
    assert (sampling.max_response_length, sampling.stop) == (7, ("x",))
    apart = ValidationArgs(val_files=("a", "b"), val_samples=(4, 1), val_temperature=(1.0,)).sets()
    assert [(s.files, s.samples, s.temperature) for s in apart] == [(("a",), 4, 1.0), (("b",), 1, 1.0)]


def test_errors_name_the_flag():
    with one_line("--val-samples has 2 values for 3 --val-files: give one for all"):
        ValidationArgs(val_files=("a", "b", "c"), val_samples=(1, 2)).check()
    with one_line("--val-samples 4 are all the same at --val-temperature 0"):
        ValidationArgs(val_files=("a", "b"), val_samples=(1, 4), val_temperature=(1.0, 0.0)).check()
    data = SimpleNamespace(data_sources=frozenset({"x"}))
    sets = ValidationArgs(val_files=("a", "b"), val_samples=(1, 4), val_temperature=(1.0,)).sets()
    with one_line("--val-files: a and b both have data_source 'x'"):
        check_sources([(own, data) for own in sets])
