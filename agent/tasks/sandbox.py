"""Tasks (task_folders.py) in sandboxes: commands of the policy, then the check. Each episode has a sandbox of its own.
tests/ is copied into it for the check only, when none of the policy's commands runs any more."""

import base64
import io
import json
import math
import secrets
import shlex
import tarfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from agent.tasks.folders import (
    ELSEWHERE,
    LARGEST_MEMORY_MB,
    LARGEST_STORAGE_MB,
    Task,
    contents,
    read_task,
    read_tasks,
    task_names,
)
from agent.tasks.shell import Shell
from agent.tools.base import BaseTool, _call, in_thread
from lib import InputError
from lib.cli.user_code import load_object
from lib.reward.scorer import LARGEST_SCORE

SETUP_S = 30.0  # seconds that a command of the set-up may take
PIECE = 90_000  # characters of an upload in one command, of which the kernel takes 128 KiB
# Puts empty folders in the place of what the policy may have left for the check.
PREPARE = """
for folder in /tests /logs; do
    path=$(realpath -m "$folder") && { [ ! -e "$path" ] || mv -T "$path" "$path.{token}"; } && mkdir "$path" || exit 1
done
mkdir /logs/verifier"""


class Sandbox(Protocol):
    """What a provider makes of a task: it runs the commands of one episode."""

    async def exec(self, command: str, timeout_s: float) -> tuple[int, str]:
        """(exit code, output) of a bash command, which finds the files that those before it left. The exit code is 124
        after its time. What it leaves running must end with it: otherwise the policy acts during the check."""
        ...

    async def close(self) -> None:
        """Ends and removes all of it."""
        ...


class LocalSandbox:
    """A sandbox on this machine, by namespaces of its kernel: without network, and without Docker."""

    def __init__(self, task: Task):
        sizes = min(task.memory_mb, LARGEST_MEMORY_MB), min(task.storage_mb, LARGEST_STORAGE_MB)
        self.shell = Shell(task.folders, *sizes)

    async def exec(self, command: str, timeout_s: float) -> tuple[int, str]:
        return await in_thread(self.shell.exec, command, timeout_s)

    async def close(self) -> None:
        await in_thread(self.shell.close)


class SetupFailed(RuntimeError):
    """The sandbox does not take the task's files."""


class OpenTask:
    """A task in a sandbox."""

    def __init__(self, task: Task, sandbox: Sandbox):
        self.task, self.sandbox = task, sandbox

    @classmethod
    async def start(cls, task: Task, provider: Callable[[Task], Any]) -> "OpenTask":
        """The task in a new sandbox, which the caller closes. Raises what the provider raises, and SetupFailed."""
        opened = cls(task, await _call(provider, task))
        try:
            if task.workdir:
                await opened._set_up(f"mkdir -p {shlex.quote(task.workdir)}")
            await opened._upload(task.files)
        except BaseException:
            await opened.close()
            raise
        return opened

    async def exec(self, command: str, timeout_s: float) -> tuple[int, str]:
        """(exit code, output) of a bash command in the task's working folder."""
        change = f"cd {shlex.quote(self.task.workdir)} || exit\n" if self.task.workdir else ""
        return await self.sandbox.exec(change + command, timeout_s)

    async def check(self, timeout_s: float) -> float:
        """The reward. 0 if the policy has left the sandbox in a state in which no check can run. Raises ValueError if
        the reward is no number, and what the sandbox raises."""
        try:
            await self._set_up(PREPARE.replace("{token}", secrets.token_hex(8)))
            await self._upload(contents(self.task.folder / "tests", "/tests"))
        except SetupFailed:
            return 0.0
        timeout_s = min(timeout_s, self.task.check_s or timeout_s)
        code, _ = await self.exec("HOME=/logs bash /tests/test.sh", timeout_s)
        for name in ("reward.txt", "reward.json"):
            missing, text = await self.sandbox.exec(f"head -c 1000 /logs/verifier/{name} 2> /dev/null", SETUP_S)
            if not missing:
                return _reward(name, text)
        return float(code == 0)

    async def solve(self, timeout_s: float) -> tuple[int, str]:
        """(exit code, output) of the task's own solution."""
        await self._upload(contents(self.task.folder / "solution", "/solution"))
        return await self.exec("bash /solution/solve.sh", timeout_s)

    async def close(self) -> None:
        await self.sandbox.close()

    async def _upload(self, files: Iterable[tuple[Path, str]]) -> None:
        """Copies each source to its target. Raises SetupFailed."""
        archive, folders = io.BytesIO(), set()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            for source, target in files:
                tar.add(source, target.lstrip("/"))
                folders.add(str(PurePosixPath(target).parent))
        text, part = base64.b64encode(archive.getvalue()).decode(), f"/tmp/{secrets.token_hex(8)}"
        for start in range(0, len(text), PIECE):
            await self._set_up(f"printf %s {text[start : start + PIECE]} | base64 -d >> {part}")
        make = f"mkdir -p {shlex.join(sorted(folders))} && " if folders else ""
        await self._set_up(f"{make}tar -xzof {part} -C / && rm {part}")

    async def _set_up(self, command: str) -> None:
        code, output = await self.sandbox.exec(command, SETUP_S)
        if code != 0:
            what = f"its sandbox ended a command of the set-up with exit code {code}"
            raise SetupFailed(f"task {self.task.folder.name}: {what}: {output[-300:]}")


def _reward(name: str, text: str) -> float:
    try:
        value = json.loads(text) if name.endswith("json") else text
        reward = float(value["reward"] if isinstance(value, dict) else value)
    except (ValueError, TypeError, KeyError, RecursionError):
        reward = math.nan
    if not abs(reward) <= LARGEST_SCORE:
        raise ValueError(f"/logs/verifier/{name} has {text[:100]!r}, which is no number up to {LARGEST_SCORE:g}")
    return reward


@asynccontextmanager
async def open_task(
    folder: str | Path, name: str, provider: Callable[[Task], Any] | None = None
) -> AsyncIterator[OpenTask]:
    """The task `name` of the folder, for a program of --agent. Raises InputError, and what OpenTask.start raises."""
    if name not in task_names(Path(folder)):  # a row is data: it names no other folder
        raise InputError(f"{folder}: {name!r} is not the name of a task in it")
    opened = await OpenTask.start(read_task(Path(folder) / name, provider is None), provider or LocalSandbox)
    try:
        yield opened
    finally:
        await opened.close()


class Bash(BaseTool):
    """Runs commands in the sandbox of the task that the row names: tools_kwargs["bash"]["create_kwargs"] is
    {"task": name}. The task's check is the reward of the episode."""

    in_order = True

    def __init__(self, tasks: dict[str, Task], provider: Callable[[Task], Any], timeout_s: float):
        self.tasks, self.provider, self.timeout_s = tasks, provider, timeout_s
        self.opened: dict[str, OpenTask] = {}
        command = {"type": "string", "description": "Bash, one or more lines. Files are kept, processes are not."}
        parameters = {"type": "object", "properties": {"command": command}, "required": ["command"]}
        function = {"name": "bash", "description": "Run a command and see its output.", "parameters": parameters}
        self.schema = {"type": "function", "function": function}

    async def create(self, instance_id: str, *, task: str, **kwargs) -> None:  # type: ignore[override]
        if task not in self.tasks:
            raise InputError(f"--multi-turn.tools bash: the row's task {task!r} is not in the folder")
        self.opened[instance_id] = await OpenTask.start(self.tasks[task], self.provider)

    async def execute(self, instance_id: str, parameters: dict, **kwargs):
        code, output = await self.opened[instance_id].exec(parameters["command"], self.timeout_s)
        if code == 124:
            output += f"\n(exit code 124: a command is stopped after {self.timeout_s:g} s)"
        elif code:
            output += f"\n(exit code {code})"
        return output or "(no output)"

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return await self.opened[instance_id].check(self.timeout_s)

    async def release(self, instance_id: str, **kwargs) -> None:
        await self.opened.pop(instance_id).close()


def load_bash(spec: str, tool_timeout: float) -> Bash:
    """bash:FOLDER, or "bash:FOLDER path/to/file.py:provider". Raises InputError."""
    folder, _, file = spec.removeprefix("bash:").partition(" ")
    flag = f"--multi-turn.tools {spec}"
    provider = load_object("--multi-turn.tools", file) if file else LocalSandbox
    if not callable(provider):
        raise InputError(f"{flag}: {file} is not a class or function that returns a sandbox")
    try:
        tasks = read_tasks(Path(folder), local=not file)
        if not file:
            Shell((), 1024, 64).close()
    except InputError as error:
        raise InputError(f"{flag}: {error}") from error
    except RuntimeError as error:
        raise InputError(f"{flag}: {error}: {ELSEWHERE}") from error
    timeout_s = 0.9 * tool_timeout  # the rest is for the set-up
    for name, task in tasks.items():
        if task.check_s and task.check_s > timeout_s:
            what = f"the check of {name} may take {task.check_s:g} s (timeout_sec of [verifier] in its task.toml)"
            raise InputError(f"{flag}: {what}: set --multi-turn.tool-timeout {math.ceil(task.check_s / 0.9)} or more")
    return Bash(tasks, provider, timeout_s)
