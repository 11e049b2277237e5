"""A folder of task folders -> train.parquet and test.parquet, for --multi-turn.tools bash:FOLDER and --agent.

    python data/task_folders.py --tasks data/toy_tasks --out data/tasks --test-size 1
    python data/task_folders.py --tasks terminal_bench --provider my_docker.py:docker --out data/terminal_bench

Each task is tried in a sandbox: its check must give less than 1 for the files as they are, and 1 after
solution/solve.sh, if it has one. This finds tasks that need what the sandbox lacks: the network, a program.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from agent.tasks.folders import Task, read_tasks
from agent.tasks.sandbox import LocalSandbox, OpenTask
from data.rows import make_row, run_script, write_rows
from lib import InputError
from lib.cli.user_code import load_object


async def try_out(task: Task, provider: Callable, timeout_s: float) -> str:
    """What is wrong with the task; "" if nothing is."""
    rewards = {}
    for solved in (False, True)[: 1 + (task.folder / "solution/solve.sh").is_file()]:
        episode = await OpenTask.start(task, provider)
        try:
            code, output = await episode.solve(timeout_s) if solved else (0, "")
            rewards[solved] = await episode.check(timeout_s)
        finally:
            await episode.close()
    if rewards[False] >= 1:
        return f"the check gives {rewards[False]:g} before anything is done"
    if rewards.get(True, 1.0) < 1:
        ended = f"solution/solve.sh ended with exit code {code}: {output[-300:].strip()!r}"
        return f"the check gives {rewards[True]:g} after its own solution ({ended})"
    return ""


def main(
    tasks: Path,
    out: Path,
    test_size: int = 0,
    seed: int = 0,
    provider: str = "",
    system: str = "",
    timeout: float = 120.0,
) -> None:
    """Write train.parquet and test.parquet.

    Args:
        tasks: folder with one folder for each task.
        out: folder to write to.
        test_size: number of tasks, drawn at random, that go to test.parquet; 0: all tasks go to both.
        seed: of the draw.
        provider: path/to/file.py:name of what makes the sandbox of a task; empty: a local sandbox.
        system: a system message before each instruction.
        timeout: seconds that a solution, and a check, may take.
    """
    loaded = read_tasks(tasks, not provider)
    if not 0 <= test_size < len(loaded):
        raise InputError(f"--test-size {test_size}: {tasks} has {len(loaded)} tasks, and one at least is trained on")
    make = load_object("--provider", provider) if provider else LocalSandbox
    for name, task in loaded.items():
        try:
            wrong = asyncio.run(try_out(task, make, timeout))
        except (RuntimeError, ValueError, OSError) as error:
            wrong = str(error)
        if wrong:
            raise InputError(f"{tasks / name}: {wrong}: correct the task, or leave it out")
    names = list(loaded)
    random.Random(seed).shuffle(names)
    splits = {"train": names[test_size:], "test": names[:test_size] or names}
    out.mkdir(parents=True, exist_ok=True)
    for split, members in splits.items():
        rows = []
        for index, name in enumerate(sorted(members)):
            kwargs = {"bash": {"create_kwargs": {"task": name}}}
            extra_info = {"split": split, "index": index, "task": name, "tools_kwargs": kwargs}
            row = make_row(tasks.resolve().name, loaded[name].instruction, "", extra_info)
            row["prompt"] = [{"role": "system", "content": system}] * bool(system) + row["prompt"]
            rows.append(row)
        write_rows(rows, out / f"{split}.parquet")


if __name__ == "__main__":
    run_script(main)
