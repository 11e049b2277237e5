"""benchmarks/leaderboard: entries are in order; tampered records and diffs of other files are not."""

import json

import pytest

from benchmarks.leaderboard import __main__ as board
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


def fork_it(arguments, log):
    ran(fork_module(*arguments))
    return 7.0


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder of entries with one that has run, until any accuracy."""
    folder = tmp_path_factory.mktemp("leaderboard")
    (folder / "idea.diff").write_text(IDEA.replace("\n\n def", "\n \n def"))
    with pytest.MonkeyPatch.context() as patch:
        set_up(patch, folder)
        board.run("idea")
    return folder


def set_up(patch, folder):
    small = " ".join(word for word in SMALL if word not in ("--no-export-model", "--no-val-before-train"))
    flags = f"{board.COMMON} {small} --total-steps 2 --val-every 1 --seed 1".replace("--val-every 0", "")
    for name, value in {"FOLDER": folder, "TASKS": {"sums": flags}, "SEEDS": (1,), "spawn": fork_it}.items():
        patch.setattr(board, name, value)


@pytest.fixture
def entry(measured, tmp_path, monkeypatch):
    """The measured entry in a folder of its own, with a goal that lies between its two last validations."""
    for file in measured.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    set_up(monkeypatch, tmp_path)
    record = json.loads((tmp_path / "idea.json").read_text())
    curve = record["runs"]["sums"][0]["accuracy"]
    assert [step for step, _ in curve] == [0, 1, 2]
    curve[:2], curve[2][1] = [[0, 0.25], [1, 0.25]], 0.375  # two steps may not have learned anything
    write(tmp_path, record)
    monkeypatch.setattr(board, "GOAL", 0.375)
    return tmp_path, record


def write(folder, record, sign=True):
    signed = {"digest": board.digest(record)} if sign else {}
    (folder / "idea.json").write_text(json.dumps(record | signed))


def test_entries_are_in_order_and_the_page_has_their_table(tmp_path):
    board.check()
    assert {"grpo", "four_updates"} <= {*board.names()}
    for name in board.names():
        compile(board.patched(name, tmp_path).read_text(), name, "exec")
    assert board.table() in (ROOT / "docs/results.md").read_text()


def test_a_measured_entry_is_in_order_and_its_diff_took_effect(entry, measured):
    board.check_entry("idea")
    script = board.patched("idea", entry[0])
    assert "args.optimizer.lr *= 2" in script.read_text()
    assert "| [idea]" in board.table() and " 7.0 (7.0 to 7.0), 2 |" in board.table()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record["runs"]["sums"].clear(), "needs seeds"),
        (lambda record: record["runs"]["sums"][0]["accuracy"].pop(), "must have 0.375"),
        (lambda record: record["runs"]["sums"][0]["accuracy"][1].__setitem__(1, 0.5), "and no other"),
        (lambda record: record["runs"]["sums"][0]["accuracy"][1].__setitem__(1, 0.3), "256 rows"),
        (lambda record: record["runs"]["sums"][0]["accuracy"].pop(0), "begin before step 1"),
        (lambda record: record["runs"]["sums"][0].__setitem__("cpu_seconds", 0), "no CPU seconds"),
        (lambda record: record.__setitem__("diff", "0"), "is not the diff that was measured"),
    ],
)
def test_a_record_that_no_run_wrote_is_rejected(entry, change, message):
    folder, record = entry
    change(record)
    write(folder, record)
    with pytest.raises(InputError, match=message):
        board.check_entry("idea")


def test_an_edited_number_is_rejected(entry):
    folder, record = entry
    record["runs"]["sums"][0]["cpu_seconds"] = 3.0
    write(folder, record, sign=False)
    with pytest.raises(InputError, match="was edited after its runs"):
        board.check_entry("idea")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("args.optimizer.lr *= 2", "args.optimizer.lr *= 3", "is not the diff that was measured"),
        ("--- grpo.py", "--- lib/setup.py", "an entry changes grpo.py only"),
        ("needs, inputs = setup.start(args)", "needs, inputs = setup.started(args)", "does not apply to grpo.py"),
        ("Twice the learning rate.", "", "describe the idea"),
        ("+    args.optimizer.lr *= 2\n", "+    args.optimizer.lr *= 2\n" * 61, "at most 60"),
    ],
)
def test_another_diff_is_rejected(entry, old, new, message):
    file = entry[0] / "idea.diff"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(InputError, match=message):
        board.check_entry("idea")


@pytest.mark.slow
def test_a_second_run_and_its_model_must_have_what_the_record_says(measured, monkeypatch, tmp_path, capsys):
    """The recorded run again: the model that it leaves has the accuracy of its last validation, for grpo.py too."""
    set_up(monkeypatch, measured)
    record = json.loads((measured / "idea.json").read_text())
    curve = record["runs"]["sums"][0]["accuracy"]
    monkeypatch.setattr(board, "check_entry", lambda name: None)
    monkeypatch.setattr(board, "GOAL", curve[-1][1])
    board.verify("idea")
    assert "idea, sums, seed 1: step 2, 7.0 s; now step " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("again", "evaluated", "message"),
    [
        ({"accuracy": [[0, 0.3], [60, 0.95]], "cpu_seconds": 30.0}, 0.95, "after step 60; the record has"),
        ({"accuracy": [[0, 0.3], [40, 0.5]], "cpu_seconds": 30.0}, 0.95, "0.500 after step 40"),
        ({"accuracy": [[0, 0.3], [40, 0.95]], "cpu_seconds": 70.0}, 0.95, "more than 2 times the recorded seconds"),
        ({"accuracy": [[0, 0.3], [40, 0.95]], "cpu_seconds": 30.0}, 0.31, "finds an accuracy of 0.310"),
    ],
)
def test_claims_that_a_second_run_refutes(again, evaluated, message):
    recorded = {"accuracy": [[0, 0.3], [5, 0.4], [40, 0.91]], "cpu_seconds": 30.0}
    with pytest.raises(InputError, match=message):
        board.compare("x", recorded, again, evaluated)
    honest = {"accuracy": [[0, 0.3], [45, 0.92]], "cpu_seconds": 40.0}
    board.compare("x", recorded, honest, 0.92)
