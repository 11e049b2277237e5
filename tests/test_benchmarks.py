"""benchmarks/vs_trl.py at toy size: both programs run, on the same work; nothing is said about times."""

import json

import pytest

from benchmarks.vs_trl import METRICS, SETTINGS, WARM_UP, compare, make_task, run_plainrl, skewed_lengths, steps_of_run


def test_responses_are_as_long_as_their_prompts_say(tmp_path):
    make_task(tmp_path, SETTINGS["toy"], WARM_UP + 2)
    records, peak = run_plainrl(tmp_path, SETTINGS["toy"], WARM_UP + 2, flags="")
    [step] = steps_of_run(records, SETTINGS["toy"])  # raises where a step's lengths are others
    assert 0 < step["rollout"] + step["update"] < step["step"]
    assert peak > 100  # MiB: a process that has imported torch
    with pytest.raises(AssertionError, match="not the same work"):
        steps_of_run([*records, records[-1] | {"mean_length": 4.5}], SETTINGS["toy"])


def test_the_skewed_lengths_are_those_of_the_docstring():
    lengths = skewed_lengths(16)
    assert max(lengths) == 128 and sum(n < 20 for n in lengths) == 8


def test_grpo_and_trl_are_compared(tmp_path):
    pytest.importorskip("trl", reason="TRL has a virtual environment of its own")
    compare(("toy",), ("hf",), rounds=1, steps=1, output=tmp_path / "vs_trl.json")
    record = json.loads((tmp_path / "vs_trl.json").read_text())["toy/hf"]
    assert record["trl_version"] and record["rows"] == 16
    assert all(record["ratio"][key] == record["trl"][key] / record["plainrl"][key] > 0 for key in METRICS)
