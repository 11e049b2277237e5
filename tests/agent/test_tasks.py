"""lib/agent/task_folders.py, lib/agent/task_sandbox.py, data/task_folders.py: tasks of a folder, in a sandbox each."""

import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from data import task_folders as rows_of
from lib import InputError
from lib.agent import MultiTurn, get_tool_parser, open_task
from lib.agent.builtin_tools import load_tools
from lib.agent.task_folders import Task, read_task, read_tasks
from lib.agent.task_sandbox import LocalSandbox, OpenTask
from lib.args import MultiTurnArgs
from lib.run.run_config import _digest
from lib.sandbox import Shell, client
from tests.agent.test_agent_loop import END, play, response_text, rewards, tokenizer
from tests.common import ROOT, fork, metrics, ran

TASKS = ROOT / "data/toy_tasks"
PATIENT_S = 100.0  # of what should take no time


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if client.sandbox_level() != "namespaces":
        pytest.skip("this kernel allows no namespaces")


def in_task(name: str, body, folder: Path = TASKS):
    """body(opened) in a new sandbox of the task."""

    async def run():
        async with open_task(folder, name) as opened:
            return await body(opened)

    return asyncio.run(run())


def write(folder: Path, **files: str) -> Path:
    """A task with the files of `rename`, and these."""
    shutil.copytree(TASKS / "rename", folder)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


# ---- the embedded tasks --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "before"), [("count", 0.0), ("fix_test", 0.25), ("rename", 0.0)])
def test_a_task_is_solved_by_its_solution_only(name, before):
    async def body(opened):
        untouched = await opened.check(PATIENT_S)
        await opened.exec("rm -rf /tests /logs", PATIENT_S)
        code, _ = await opened.solve(PATIENT_S)
        return untouched, code, await opened.check(PATIENT_S)

    assert in_task(name, body) == (before, 0, 1.0)


def test_a_dockerfile_of_copies_says_where_the_files_are():
    count = read_task(TASKS / "count")
    assert [target for _, target in count.files] == ["/srv/logs/server.log"] and count.workdir == "/srv/logs"
    assert in_task("count", lambda opened: opened.exec("pwd; ls", PATIENT_S)) == (0, "/srv/logs\nserver.log\n")


def test_an_episode_begins_with_a_fresh_copy():
    async def body(opened):
        found = await opened.exec("ls; cat a.jpeg; echo mine > a.jpeg; touch new", PATIENT_S)
        return found, await opened.exec("ls", PATIENT_S)

    first, again = in_task("rename", body), in_task("rename", body)
    assert first == again
    assert first[0] == (0, "a.jpeg\nb.jpeg\nc.jpeg\nnotes.txt\npicture a\n")
    assert (TASKS / "rename/environment/a.jpeg").read_text() == "picture a\n"


# ---- the reward ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "reward"),
    [
        ("exit 0", 1.0),
        ("exit 1", 0.0),
        ("no_such_program", 0.0),
        ("sleep 1000", 0.0),
        ("echo 0.5 > /logs/verifier/reward.txt; exit 1", 0.5),
        ("echo '{\"reward\": -1}' > /logs/verifier/reward.json", -1.0),
        ("echo nan > /logs/verifier/reward.txt", ValueError),
        ("echo 1e300 > /logs/verifier/reward.txt", ValueError),
        ("yes > /logs/verifier/reward.txt", ValueError),
        ("echo '{}' > /logs/verifier/reward.json", ValueError),
        ("printf '[%.0s' {1..900} > /logs/verifier/reward.json", ValueError),
    ],
)
def test_what_a_check_gives(tmp_path, check, reward):
    write(tmp_path / "own", **{"tests/test.sh": check})
    if reward is ValueError:
        with pytest.raises(ValueError, match="/logs/verifier/reward"):
            in_task("own", lambda opened: opened.check(PATIENT_S), tmp_path)
    else:
        seconds = 0.5 if "sleep" in check else PATIENT_S
        assert in_task("own", lambda opened: opened.check(seconds), tmp_path) == reward
