"""benchmarks/ at toy size: they run, on the same work on both sides; nothing is said about times."""

import json

import pytest

from benchmarks import all_runs, comparison, pretrained, vs_trl_learn
from benchmarks.curves import ACCURACY
from benchmarks.vs_trl import skewed_lengths
from tests.common import ROOT, fork_module, ran

SMALL = {  # ranks, flags
    "data_proto": (1, ["--rows", "16", "--tokens", "16", "--repeats", "1"]),
    "update": (1, ["--rows", "16", "--repeats", "1", "--settings", "short"]),
    "stages": (1, ["--parts", "kernels", "hf", "--repeats", "1"]),
    "balance": (2, ["--prompts", "2", "--repeats", "1"]),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.slow
def test_the_benchmarks_of_parts_run(name):
    """Each compares the results of its sides before it times them."""
    ranks, flags = SMALL[name]
    ran(fork_module(f"benchmarks.{name}", *flags, ranks=ranks))


@pytest.mark.slow
def test_checkpoints_are_evaluated_as_grpo_evaluates_itself(tmp_path, monkeypatch):
    task = vs_trl_learn.TASKS["toy"]
    monkeypatch.setattr(vs_trl_learn, "child", lambda command, log: ran(fork_module("grpo", *command[2:])))
    vs_trl_learn.write_rows(task, tmp_path / "train.jsonl", seed=1, steps=2)
    vs_trl_learn.run_plainrl("toy", tmp_path, "hf", 1, 2, "--val-before-train", "--val-every", "1", save_every=1)
    rows = [json.loads(line) for line in (tmp_path / "plainrl/metrics.jsonl").read_text().splitlines()]
    own = [row[ACCURACY] for row in rows if ACCURACY in row]
    kept = [None, *(vs_trl_learn.checkpoint(tmp_path, "plainrl", step) for step in (1, 2))]
    accuracy = [vs_trl_learn.greedy_accuracy(task, weights) for weights in kept]
    assert accuracy == pytest.approx(own, abs=1 / 256)  # one row, where rounding decides between two tokens
    assert len({*accuracy}) == 3  # each checkpoint has weights of its own


@pytest.mark.parametrize("name, page", [("toy", "performance"), ("pretrained", "results")])
def test_figure_and_table_of_the_learning_benchmark_are_those_of_the_record(name, page, tmp_path):
    record = json.loads(vs_trl_learn.TASKS[name].record.read_text())
    vs_trl_learn.draw(name, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    document = (ROOT / f"docs/{page}.md").read_text()
    table = vs_trl_learn.table if name == "toy" else vs_trl_learn.table_of_seeds
    assert all(line in document for line in table(record))
    for engine in record.keys() & {*vs_trl_learn.ENGINES}:
        ours, theirs = record[engine]["runs"].values()
        assert [run["seed"] for run in ours] == [run["seed"] for run in theirs]
        assert len({run["accuracy"][0] for run in ours + theirs}) == 1  # the same start, the same evaluation


def test_other_tables_are_those_of_their_records_and_lengths_those_of_the_docstring():
    tables = [pretrained.table(pretrained.records(name), task.metric) for name, task in pretrained.TASKS.items()]
    page = (ROOT / "docs/results.md").read_text()
    assert all(table in page for table in (comparison.rate_table(), *tables))
    lengths = skewed_lengths(16)
    assert max(lengths) == 128 and sum(n < 20 for n in lengths) == 8


def test_reference_runs_go_on_where_they_were_stopped(tmp_path, monkeypatch):
    """On the embedded task: a run that has a record is not made again, and its page is made of the record."""
    made = []

    def spawn(command, log, env):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(command)
        ran(fork_module(command[1].removesuffix(".py"), *command[2:]))
        return 7.0

    metric = "val/toy/arithmetic/mean@1"
    toy = pretrained.Task("sums", "data/toy.py", metric, "--config data/toy/preset.yaml --total-steps 1 --val-every 1")
    for name, value in {
        "RECORDS": tmp_path,
        "TASKS": {"sums": toy},
        "SCRIPTS": {"grpo": "grpo.py --prompts-per-step 2", "remax": "remax.py --prompts-per-step 4"},
        "FLAGS": "--save-every 0 --no-export-model --max-val-samples 16",
        "make_inputs": lambda task, folder: [],
        "spawn": spawn,
    }.items():
        monkeypatch.setattr(pretrained, name, value)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pretrained.run("sums", ("grpo", "remax"), seeds=(1, 2))
    assert sorted(path.name for path in (tmp_path / "sums").iterdir()) == ["grpo_1.jsonl", "remax_1.jsonl"]
    for name, how, rows in pretrained.records("sums"):
        assert how["command"].startswith(f"python {name}.py") and how["cpu_seconds"] == 7.0
        assert [row["step"] for row in rows if metric in row] == [0, 1]
        assert [sample["step"] for sample in how["samples"]] == [0] * 8 + [1] * 8
        assert str(tmp_path) not in json.dumps(how)
    assert "| remax | 1 | " in pretrained.table(pretrained.records("sums"), metric)
    pretrained.page("sums", tmp_path / "page.html")
    assert "remax_1" in (tmp_path / "page.html").read_text()


def has_seeds(record) -> bool:
    """Whether a record is of runs: a list of them names its seeds."""
    if isinstance(record, dict):
        return "seed" in record or "seeds" in record or any(map(has_seeds, record.values()))
    return isinstance(record, list) and any(map(has_seeds, record))


def test_the_page_of_records_has_all_of_them():
    folder = ROOT / "benchmarks/results"
    page = (folder / "README.md").read_text()
    assert page == all_runs.page() + "\n", "python -m benchmarks.all_runs > benchmarks/results/README.md"
    of_runs = [file for file in folder.glob("*.json") if has_seeds(json.loads(file.read_text()))]
    of_runs += [*folder.glob("pretrained/**/*.jsonl"), comparison.LONG_RECORD]
    assert len(of_runs) > 15
    for file in of_runs:
        assert f"]({file.relative_to(folder)})" in page, "a record is not on the page"
    [pretrained_ppo] = [row for row in all_runs.rows() if row.record == "pretrained/ppo_2.jsonl"]
    assert all_runs.line(pretrained_ppo).startswith("| ppo.py | vllm | 2 | 0.12 | 0.25 | 40 |  | 5fc8910 |")  # by hand
