"""A copy of a script in another folder, started there as docs/your_own.md says, and the wheel."""

import json
import re
import shutil
import subprocess
import sysconfig
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from lib.run.opening import _lib_commit
from tests.common import PYTHON, ROOT, SMALL, environment, metrics, ran
from tools.launch.build_backend import FILES, FOLDERS, build_editable, build_wheel

PLAINRL = """
from importlib.metadata import entry_points
[command] = entry_points(group="console_scripts", name="plainrl")
command.load()()
"""
BUILDING = ("pyproject.toml", "requirements.txt", "tools/launch/build_backend.py")
DEFAULT_DATA = SMALL[: SMALL.index("--train-files")]


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in environment().items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=folder, env=inherited | env, capture_output=True, text=True, timeout=300)


def test_a_copy_that_finds_no_lib_says_what_to_do(tmp_path):
    for name in "grpo", "ppo", "remax", "dapo":
        done = run([*PYTHON, shutil.copy(ROOT / f"{name}.py", tmp_path)], tmp_path)
        assert done.returncode == 1 and done.stderr.endswith("ModuleNotFoundError: No module named 'lib'\n")
        [line] = [line for line in done.stderr.splitlines() if "PYTHONPATH" in line]
        assert line.endswith("export PYTHONPATH=/path/to/plainrl")


def test_a_copy_beside_another_lib_is_started_with_a_flag_of_python(tmp_path):
    words = [shutil.copy(ROOT / "grpo.py", tmp_path), "--help"]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/__init__.py").touch()
    assert "cannot import name 'args' from 'lib'" in run([*PYTHON, *words], tmp_path, PYTHONPATH=str(ROOT)).stderr
    assert "--group-size" in ran(run([*PYTHON, "-P", *words], tmp_path, PYTHONPATH=str(ROOT))).stdout


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

    interpreter = str(tmp_path / ".venv/bin/python")
    ran(run([interpreter, "-c", PLAINRL, "new", "mine", "--base", "grpo"], tmp_path))
    assert (tmp_path / "mine.py").read_text() == (ROOT / "grpo.py").read_text()
    python = [interpreter, "-m", "mine"]
    done = ran(run([*python, *DEFAULT_DATA, "--total-steps", "1", "--run-name", "run"], tmp_path))
    assert "leaked" not in done.stderr  # what an extension reports at the end of objects that were never freed
    [row] = metrics(tmp_path / "runs/run")
    assert row["training/rows_in"] == 32 and row["reward/max"] > 0  # rewards/arithmetic.py, in workers
    first = json.loads((tmp_path / "runs/run/starts/1/start.json").read_text())
    assert first["command"].startswith(" ".join(python) + " --") and first["packages"]["plainrl"]
    commit = (site / "plainrl/COMMIT").read_text()
    assert first["commit"] is None and (first["lib_commit"] or "") == commit
    assert commit.removesuffix("-dirty") == (_lib_commit() or "")  # that of the checkout


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A repository with the files of a wheel, and no others."""
    root = tmp_path / "checkout"
    for name in (*FILES, *BUILDING, "data/toy/rows é.jsonl", ".gitignore"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name) if (ROOT / name).exists() else (root / name).touch()
    me = ["-c", "user.name=x", "-c", "user.email=x"]
    for words in ["init", "-q"], ["add", "."], [*me, "commit", "-qm", "x"]:
        subprocess.run(["git", "-C", str(root), *words], check=True)
    return root


def build(root: Path) -> subprocess.CompletedProcess:
    backend = str(root / "tools/launch")
    code = f"import sys; sys.path.insert(0, {backend!r}); import build_backend as b; b.build_wheel('.')"
    return run([*PYTHON, "-c", code], root.parent)


def test_a_wheel_has_what_git_tracks_and_nothing_else(checkout):
    """Whoever builds it may have data of their own below data/."""
    tracked = {*FILES, "tools/launch/build_backend.py", "data/toy/rows é.jsonl"}
    (checkout / "data/customers").mkdir()
    (checkout / "data/customers/rows.csv").write_text("secret")
    (checkout / "data/customers/link").symlink_to("/etc/passwd")
    (checkout / "tools/launch/runs").symlink_to("/etc")
    (checkout / "data/toy_vision").mkdir()
    (checkout / "data/toy_vision/val.jsonl").touch()  # which git ignores
    for suffix in ("", "-dirty"):
        ran(build(checkout))
        with ZipFile(checkout.parent / "plainrl-0.1.0-py3-none-any.whl") as wheel:
            names = [name.removeprefix("plainrl/") for name in wheel.namelist() if name.startswith("plainrl/")]
            assert sorted(names) == sorted({*tracked, "COMMIT"})
            assert re.fullmatch(f"[0-9a-f]{{40}}{suffix}", wheel.read("plainrl/COMMIT").decode())
        (checkout / "grpo.py").write_text("changed")


SPOIL = {  # by shell commands in the checkout: what the refusal says
    "mv data/toy ../toy; ln -s $PWD/../toy data/toy": "deleted, or a link",
    "rm ppo.py": "deleted, or a link",
    "git rm -q --cached ppo.py": "git does not track ppo.py",
    # of another project, which contains this folder
    "rm -r .git; git -C .. init -q": "a wheel has git's files (fatal: not a",
}


@pytest.mark.parametrize("commands", SPOIL)
def test_a_wheel_that_would_hold_something_else_is_refused_in_a_line(checkout, commands):
    subprocess.run(commands, shell=True, check=True, cwd=checkout)
    done = build(checkout)
    assert done.returncode and SPOIL[commands] in done.stderr and done.stderr.count("\n") == 1
    assert not [*checkout.parent.glob("*.whl")]


def test_an_editable_wheel_has_the_path_of_the_checkout_and_requires_the_pinned_packages(tmp_path):
    with ZipFile(tmp_path / build_editable(str(tmp_path))) as wheel:
        assert wheel.read("plainrl.pth").decode() == f"{ROOT}\n"
        assert all(name == "plainrl.pth" or ".dist-info/" in name for name in wheel.namelist())
        [metadata] = [wheel.read(name) for name in wheel.namelist() if name.endswith("METADATA")]
    required = [Requirement(line) for line in message_from_bytes(metadata).get_all("Requires-Dist")]
    needed = [r.name for r in required if r.marker is None]
    assert {"torch", "transformers", "tyro", "tensordict"} <= {*needed} and not {"vllm", "pytest"} & {*needed}
    for extra, more in (("gpu", {}), ("cpu", {"torch": "==2.13.0"})):
        lines = (ROOT / f"tools/launch/requirements-{extra}.txt").read_text().splitlines()
        pins = more | {r.name: str(r.specifier) for r in map(Requirement, (x for x in lines if x[:1] not in ("", "#")))}
        assert pins == {r.name: str(r.specifier) for r in required if r.marker and r.marker.evaluate({"extra": extra})}
