"""lib/cli/user_code.py: whatever is wrong in a file of the user's is one line, with the flag and the line."""

import re

import pytest

from agent import load_multi_turn
from lib.args import MultiTurnArgs
from lib.cli.user_code import load_object
from lib.data import load_dataset_class
from lib.model import load_tokenizer
from lib.reward.scorer import load_scorers
from tests.common import TOY_MODEL, one_line

BROKEN = {
    "import absent_package\ndef f(): pass": "ModuleNotFoundError: No module named 'absent_package' in line 1",
    "x = 1\nx / 0\n": "ZeroDivisionError: division by zero in line 2",
    "import sys\nsys.exit(0)": "SystemExit: 0 in line 2",
    "def f(:": "SyntaxError: ",
    "raise ValueError('two\\nlines')": "ValueError: two in line 1",
    "g = 1": "has no 'f'",
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_file_that_fails_is_one_line(tmp_path, code):
    spec = f"{tmp_path / 'mine.py'}:f"
    (tmp_path / "mine.py").write_text(code)
    with one_line(f"^--reward {re.escape(spec)}: .*{re.escape(BROKEN[code])}"):
        load_object("--reward", spec)


def test_a_file_is_run_once_and_what_is_no_name_in_one_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("calls = []\ndef f(): calls.append(1)\ndef g(): return calls\n")
    load_object("--reward", f"{tmp_path / 'mine.py'}:f")()
    assert load_object("--multi-turn.tools", f"{tmp_path}/../{tmp_path.name}/mine.py:g")() == [1]
    (tmp_path / "text.txt").write_text("f = 1")
    monkeypatch.chdir(tmp_path)
    for spec in ("mine.py", "mine.py:", ":f", "absent.py:f", "mine.py:a.b", "text.txt:f", ""):
        with one_line(f"^--reward {spec}: give an existing file and a name in it"):
            load_object("--reward", spec)


def test_every_flag_that_takes_a_file_loads_it_so(tmp_path):
    spec = f"{tmp_path / 'mine.py'}:f"
    (tmp_path / "mine.py").write_text("1 / 0")
    tokenizer = load_tokenizer(TOY_MODEL)
    for flag, load in {
        "--reward": lambda: load_scorers([spec], []),
        "--dataset-class": lambda: load_dataset_class(spec),
        "--multi-turn.tools": lambda: load_multi_turn(MultiTurnArgs(tools=(spec,)), tokenizer, {}, 32),
        "--multi-turn.interaction": lambda: load_multi_turn(MultiTurnArgs(interaction=spec), tokenizer, {}, 32),
    }.items():
        with one_line(f"{flag} .*: ZeroDivisionError: division by zero in line 1"):
            load()
