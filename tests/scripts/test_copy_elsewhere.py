"""A copy of a script in another folder, started there as docs/your_own.md says, and the wheel."""

import json
import shutil
import subprocess
import sysconfig
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from launch.build_backend import FILES, FOLDERS, build_editable, build_wheel
from lib.run.provenance import _lib_commit
from tests.common import PYTHON, ROOT, SMALL, environment, metrics, ran

DEFAULT_DATA = SMALL[: SMALL.index("--train-files")]


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in environment().items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=folder, env=inherited | env, capture_output=True, text=True, timeout=300)


def start(script: Path, *words: str, options: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess:
    return run([*PYTHON, *options, script.name, *words], script.parent, **env)


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


@pytest.mark.slow
def test_a_copy_trains_with_the_wheel_alone(tmp_path):
    """With the models, data and scorers in it: without PYTHONPATH, and in a folder without the checkout."""
    venv.create(tmp_path / ".venv")
    [site] = tmp_path.glob(".venv/lib/*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    with ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        wheel.extractall(site)
        names = wheel.namelist()
        assert [line.split(",")[0] for line in wheel.read(names[-1]).decode().splitlines()] == names
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", *FOLDERS, *FILES], capture_output=True, text=True)
    assert {f"plainrl/{path}" for path in tracked.stdout.split()} <= set(names)

    shutil.copy(site / "plainrl/grpo.py", tmp_path / "mine.py")
    python = [str(tmp_path / ".venv/bin/python"), "-m", "mine"]
    done = ran(run([*python, *DEFAULT_DATA, "--total-steps", "1", "--run-name", "run"], tmp_path))
    assert "leaked" not in done.stderr  # what an extension reports at the end of objects that were never freed
    [row] = metrics(tmp_path / "runs/run")
    assert row["training/rows_in"] == 32 and row["reward/max"] > 0  # rewards/arithmetic.py, in workers
    first = json.loads((tmp_path / "runs/run/starts/1/start.json").read_text())
    assert first["command"].startswith(" ".join(python) + " --") and first["packages"]["plainrl"]
    commit = (site / "plainrl/COMMIT").read_text()
    assert first["commit"] is None and (first["lib_commit"] or "") == commit
    assert commit.removesuffix("-dirty") == (_lib_commit() or "")  # that of the checkout


def test_an_editable_wheel_has_the_path_of_the_checkout_and_the_pinned_packages_as_extras(tmp_path):
    with ZipFile(tmp_path / build_editable(str(tmp_path))) as wheel:
        assert wheel.read("plainrl.pth").decode() == f"{ROOT}\n"
        assert all(name == "plainrl.pth" or ".dist-info/" in name for name in wheel.namelist())
        [metadata] = [wheel.read(name) for name in wheel.namelist() if name.endswith("METADATA")]
    required = [Requirement(line) for line in message_from_bytes(metadata).get_all("Requires-Dist")]
    assert not any(r.marker.evaluate({"extra": ""}) for r in required)
    for extra, more in (("gpu", {}), ("cpu", {"torch": "==2.13.0"})):
        lines = (ROOT / f"requirements-{extra}.txt").read_text().splitlines()
        pins = more | {r.name: str(r.specifier) for r in map(Requirement, (x for x in lines if x[:1] not in ("", "#")))}
        assert pins == {r.name: str(r.specifier) for r in required if r.marker.evaluate({"extra": extra})}
