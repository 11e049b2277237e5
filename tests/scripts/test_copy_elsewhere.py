"""A copy of a script in another repository, started there as docs/your_own.md says."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.common import PYTHON, ROOT, SMALL, environment, metrics, ran

DEFAULT_DATA = SMALL[: SMALL.index("--train-files")]


def start(script: Path, *words: str, options: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in environment().items() if not name.startswith("PYTHON")}
    command = [*PYTHON, *options, script.name, *words]
    return subprocess.run(command, cwd=script.parent, env=inherited | env, capture_output=True, text=True, timeout=300)


def test_a_copy_trains_with_the_models_data_and_scorers_of_plainrl(tmp_path):
    script = Path(shutil.copy(ROOT / "grpo.py", tmp_path / "mine.py"))
    words = [*DEFAULT_DATA, "--total-steps", "1", "--run-name", "run"]
    done = ran(start(script, *words, PYTHONPATH=str(ROOT)))
    assert "leaked" not in done.stderr  # what an extension reports at the end of objects that were never freed
    [row] = metrics(tmp_path / "runs/run")
    assert row["training/rows_in"] == 32 and row["reward/max"] > 0  # rewards/arithmetic.py, in workers
    first = json.loads((tmp_path / "runs/run/starts/1/start.json").read_text())
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert first["commit"] is None and first["lib_commit"] == (head.stdout.strip() or None)


@pytest.mark.parametrize("name", ["grpo", "ppo", "remax", "dapo"])
def test_a_copy_that_finds_no_lib_says_what_to_do(name, tmp_path):
    done = start(Path(shutil.copy(ROOT / f"{name}.py", tmp_path)))
    assert done.returncode == 1 and done.stderr.endswith("ModuleNotFoundError: No module named 'lib'\n")
    [line] = [line for line in done.stderr.splitlines() if "PYTHONPATH" in line]
    assert line.endswith("export PYTHONPATH=/path/to/plainrl")


def test_a_copy_beside_another_lib_is_started_with_a_flag_of_python(tmp_path):
    script = Path(shutil.copy(ROOT / "grpo.py", tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/__init__.py").touch()
    assert "cannot import name 'args' from 'lib'" in start(script, "--help", PYTHONPATH=str(ROOT)).stderr
    assert "--clip-ratio" in ran(start(script, "--help", options=("-P",), PYTHONPATH=str(ROOT))).stdout
