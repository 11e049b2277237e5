"""The sizes that a reader pays for: each number is the one reached. Raising one is a commit of its own, which says what
the reader gets for it."""

import itertools
import json
import subprocess
import sys

import pytest

import grpo
from lib.cli.flags import walk
from tests.common import ROOT, environment, ran

ROOMS = ("lib", "agent", "servers", "planner")
BUDGET = {
    "lines of lib": 20323,
    "lines of lib and the scripts above 100 columns": 2516,
    "lines of the longest file": 445,
    "lines of the scripts": 1270,
    "flags of grpo.py": 142,
    "lines of --help": 107,
    "words of docs": 54988,
    "lines of tests": 37732,
    "entries at the top": 22,
    "files that two default steps enter": 45,
    "lines of functions that two default steps enter": 3385,
}
# Prints [file, first line, last line] of each function of lib and the wings that the main thread calls in the loop over
# steps. A lambda or a generator is a part of another function.
ENTERED = """
import json, os, runpy, sys
from lib.run import Run
entered, steps = set(), Run.steps
def profile(frame, event, _):
    if event == "call":
        entered.add(frame.f_code)
def profiled(run):
    sys.setprofile(profile)
    yield from steps(run)
    sys.setprofile(None)
Run.steps = profiled
runpy.run_path("grpo.py", run_name="__main__")
entered = [(os.path.relpath(code.co_filename), code) for code in entered if not code.co_name.startswith("<")]
entered = [(file, code) for file, code in entered if file.startswith(("lib/", "agent/", "servers/", "planner/"))]
print(json.dumps([(file, code.co_firstlineno, max(n for *_, n in code.co_lines() if n)) for file, code in entered]))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return sizes_of_files() | sizes_of_steps(tmp_path_factory.mktemp("budget"))


def output_of(*command: str) -> list[str]:
    how = {"cwd": ROOT, "env": environment() | {"COLUMNS": "80"}, "capture_output": True, "text": True, "timeout": 300}
    return ran(subprocess.run(command, **how)).stdout.splitlines()


def sizes_of_files() -> dict[str, int]:
    lib, *wings = ([path.read_text().splitlines() for path in (ROOT / room).rglob("*.py")] for room in ROOMS)
    scripts = [path.read_text().splitlines() for path in ROOT.glob("*.py")]
    top = {path.partition("/")[0] for path in output_of("git", "ls-files")}
    return {
        "lines of lib": sum(map(len, lib)),
        "lines of lib and the scripts above 100 columns": sum(
            len(line) > 100 for file in lib + scripts for line in file
        ),
        "lines of the longest file": max(map(len, itertools.chain(lib, *wings))),
        "lines of the scripts": sum(map(len, scripts)),
        "flags of grpo.py": len([*walk(grpo.Args())]),
        "lines of --help": len(output_of(sys.executable, "grpo.py", "--help")),
        "words of docs": sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md")),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")),
        "entries at the top": sum(not name.startswith(".") for name in top),
    }


def sizes_of_steps(folder) -> dict[str, int]:
    flags = ["--total-steps", "2", "--val-every", "0", "--no-val-before-train", "--output-dir", str(folder)]
    entered = json.loads(output_of(sys.executable, "-c", ENTERED, *flags)[-1])
    return {
        "files that two default steps enter": len({file for file, _, _ in entered}),
        "lines of functions that two default steps enter": sum(last - first + 1 for _, first, last in entered),
    }


@pytest.mark.parametrize("name", BUDGET)
def test_a_size_is_within_its_budget(measured, name):
    assert measured[name] <= BUDGET[name], "make it smaller, or raise the number in a commit that says why"
