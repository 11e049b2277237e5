"""make new-loss, make new-scorer: what they write in a copy of the code fails until a formula is in it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import ROOT, environment, one_line, ran
from tools import scaffold

WRITTEN = ("lib", "rewards", "tests", "docs")
FORMULAS = {  # file: what stands there first, the formula
    "tests/reference_formulas.py": ('raise NotImplementedError("the loss of a token")', "loss = -a * ratio"),
    "rewards/mine.py": ("text[:0]", 'text.rpartition("=")[2].strip()'),
}


def in_copy(folder: Path, *words: str) -> subprocess.CompletedProcess:
    how = {"cwd": folder, "env": environment(), "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([sys.executable, "-m", *words], **how)


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """Of the code, with a new loss and a new scorer."""
    for entry in ROOT.iterdir():
        if entry.name in (*WRITTEN, "tools"):
            shutil.copytree(entry, tmp_path / entry.name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        elif not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.setattr(scaffold, "ROOT", tmp_path)
    scaffold.main("loss", "mine")
    scaffold.main("scorer", "mine")
    return tmp_path


def test_what_is_written_is_python_in_the_form_of_the_code(copy):
    folders = ("lib/core_algos", "rewards", "tests/core_algos", "tests/rewards", "tests/scripts")
    ran(in_copy(copy, "ruff", "check", *folders))
    ran(in_copy(copy, "ruff", "format", "--check", *folders, "tests/reference_formulas.py"))


@pytest.mark.slow
def test_the_tests_of_a_new_loss_and_scorer_fail_until_they_are_written(copy):
    files = ["core_algos/test_policy_losses.py", "rewards/test_answer_forms.py", "test_papers.py"]
    tests = ["pytest", "-q", "-n", "0", *(f"tests/{file}" for file in files), "-k", "mine or papers"]
    done = in_copy(copy, *tests)
    assert "NotImplementedError: the loss of a token" in done.stdout
    assert "FAILED tests/rewards/test_answer_forms.py::test_a_thought_is_no_answer[mine]" in done.stdout
    assert "FAILED tests/test_papers.py" not in done.stdout

    for file, (before, after) in FORMULAS.items():
        text = (copy / file).read_text()
        assert text.count(before) == 1
        (copy / file).write_text(text.replace(before, after))
    ran(in_copy(copy, *tests))


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("loss", "my-loss", "my-loss: not a name of a function"),
        ("loss", "gspo", "has gspo already: choose another name"),
        ("loss", "vanilla", "has vanilla already"),
        ("scorer", "format", "rewards/format.py has format already"),
        ("scorer", "gsm8k", "rewards/gsm8k.py has gsm8k already"),
    ],
)
def test_a_name_that_cannot_be_taken_is_one_line_and_writes_nothing(tmp_path, monkeypatch, kind, name, said):
    for folder in WRITTEN:
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.setattr(scaffold, "ROOT", tmp_path)
    monkeypatch.setattr(Path, "write_text", lambda path, text: pytest.fail(f"{path} is written"))
    with one_line(said):
        scaffold.main(kind, name)
