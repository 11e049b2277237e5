"""benchmarks/speedrun: entries are in order; tampered records and diffs of other files are not."""

import json
import shlex

import pytest

from benchmarks.pretrained import Task
from benchmarks.speedrun import __main__ as speedrun
from lib import InputError
from tests.common import ROOT, SMALL, fork_module, ran

IDEA = """Twice the learning rate.

--- grpo.py
+++ grpo.py
@@ -230,4 +230,5 @@

 def main(args: Args) -> None:
+    args.optimizer.lr *= 2
     # ---- set-up: errors in flags and data are found before a model loads or a file is written
     world, needs, inputs = setup.start(args)  # checks flags and data; returns on ranks that train
"""


def fork_it(command, log, env):
    ran(fork_module(*command[1:]))
    return 7.0


def set_up(patch, folder):
    small = shlex.join(word for word in SMALL if word not in ("--no-export-model", "--no-val-before-train"))
    values = {
        "FOLDER": folder,
        "TASK": Task("", "", "val/toy/arithmetic/mean@1", ""),
        "QUESTIONS": 256,
        "FLAGS": f"--config data/toy/preset.yaml {small} --total-steps 2",
        "OF_DEVICE": {"cpu": ""},
        "BUDGETS": {"cpu_120": speedrun.Budget("cpu", 1e6)},  # seconds that no test takes
        "SEEDS": (1,),
        "make_inputs": lambda task, folder: [],
        "spawn": fork_it,
    }
    for name, value in values.items():
        patch.setattr(speedrun, name, value)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with an entry that has run for two steps of the embedded task."""
    folder = tmp_path_factory.mktemp("speedrun")
    (folder / "idea.diff").write_text(IDEA.replace("\n\n def", "\n \n def"))
    with pytest.MonkeyPatch.context() as patch:
        set_up(patch, folder)
        speedrun.run("idea")
    return folder


@pytest.fixture
def entry(measured, tmp_path, monkeypatch):
    """A copy of it."""
    for file in measured.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    set_up(monkeypatch, tmp_path)
    return tmp_path


def test_entries_are_in_order_and_the_page_has_their_table(tmp_path):
    speedrun.check()
    assert {"grpo", "four_updates"} <= {*speedrun.names()}
    for name in speedrun.names():
        compile(speedrun.patched(name, tmp_path).read_text(), name, "exec")
    assert speedrun.table() in (ROOT / "docs/results.md").read_text()

    assert len((speedrun.FOLDER / "program.md").read_text().split()) <= 400


def test_a_measured_entry_is_in_order_and_a_second_run_has_its_accuracy(entry, capsys):
    speedrun.check_entry("idea")
    assert "args.optimizer.lr *= 2" in speedrun.patched("idea", entry).read_text()
    assert "| cpu_120 | [idea]" in speedrun.table() and " | 2 | 7 | " in speedrun.table()
    speedrun.verify("idea")
    lines = capsys.readouterr().out.splitlines()
    recorded, now = (line.partition("accuracy ")[2].partition(", ")[0] for line in lines[-2:])
    assert recorded == now != ""


NO_RUN_WROTE = [  # of a run, and what is said
    ({"accuracy": 0.3}, "256 questions"),
    ({"accuracy": 1.5}, "256 questions"),
    ({"cpu_seconds": 1.1e6}, "more than the budget"),
    ({"seconds": 1.1e6}, "more than the budget"),
]
OTHER_DIFFS = [
    ("args.optimizer.lr *= 2", "args.optimizer.lr *= 3", "is not the diff that was measured"),
    ("--- grpo.py", "--- lib/setup.py", "an entry changes grpo.py only"),
    ("needs, inputs = setup.start(args)", "needs, inputs = setup.started(args)", "does not apply to grpo.py"),
    ("Twice the learning rate.", "", "describe the idea"),
    ("+    args.optimizer.lr *= 2\n", "+    args.optimizer.lr *= 2\n" * 61, "at most 60"),
]


def test_a_record_that_no_run_wrote_and_another_diff_are_rejected(entry):
    original, text = (entry / "idea.json").read_text(), (entry / "idea.diff").read_text()

    def rejected(message: str, change=lambda record, runs: None, sign=True) -> None:
        record = json.loads(original)
        change(record, record["budgets"]["cpu_120"]["runs"])
        signed = {"digest": speedrun.digest(record)} if sign else {}
        (entry / "idea.json").write_text(json.dumps(record | signed))
        with pytest.raises(InputError, match=message):
            speedrun.check_entry("idea")

    for number, message in NO_RUN_WROTE:
        rejected(message, lambda _, runs, number=number: runs[0].update(number))
    rejected("was edited after its runs", lambda _, runs: runs[0].update(accuracy=1.0), sign=False)
    rejected("needs seeds", lambda _, runs: runs.clear())
    rejected("is not the diff that was measured", lambda record, _: record.update(diff="0"))
    for old, new, message in OTHER_DIFFS:
        (entry / "idea.diff").write_text(text.replace(old, new))
        rejected(message)


def test_claims_that_a_second_run_refutes(monkeypatch):
    monkeypatch.setattr(speedrun, "QUESTIONS", 256)
    recorded = {"accuracy": 0.5, "ci_low": 0.44, "ci_high": 0.56, "steps": 40, "seconds": 110, "cpu_seconds": 110}
    for again, message in (
        ({"accuracy": 0.25, "steps": 40}, "0.250, below the recorded interval$"),
        ({"accuracy": 0.25, "steps": 20}, "is the machine busy"),
        ({"accuracy": 0.75, "steps": 40, "seconds": 140}, "more than the budget"),
    ):
        with pytest.raises(InputError, match=message):
            speedrun.compare("x", speedrun.BUDGETS["cpu_120"], recorded, recorded | again)
    speedrun.compare("x", speedrun.BUDGETS["cpu_120"], recorded, recorded | {"accuracy": 0.453125})


def test_a_try_is_logged(monkeypatch, tmp_path, capsys):
    set_up(monkeypatch, tmp_path)
    speedrun.attempt(seconds=60, note="the baseline", log=tmp_path / "log.jsonl")
    [line] = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert line["note"] == "the baseline" and line["seconds"] == 60 and line["run"]["steps"] == 2
    assert f"accuracy {line['run']['accuracy']:.3f}" in capsys.readouterr().out
