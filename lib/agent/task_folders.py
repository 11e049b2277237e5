"""Sandboxed tasks: a folder with files, an instruction and a check, in the form of Harbor's tasks (docs/tasks.md).

    instruction.md       what the policy is asked
    environment/         files of the working folder; or a Dockerfile
    tests/test.sh        the check: writes a number to /logs/verifier/reward.txt, or passes with exit code 0
    solution/solve.sh    optional: commands that pass the check
    task.toml            optional: limits

Each episode has a sandbox of its own. tests/ is copied into it for the check only, when no command runs any more."""

import asyncio
import base64
import io
import json
import math
import secrets
import shlex
import tarfile
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from lib import InputError
from lib.agent.tools import BaseTool, _call, in_thread
from lib.cli.user_code import load_object
from lib.sandbox import LARGEST_SCORE, Shell

SETUP_S = 30.0  # seconds that a piece of an upload may take
PIECE = 90_000  # characters of it: the kernel takes 128 KiB as one argument of a command
MEMORY_MB, STORAGE_MB = 1024, 64  # of a local sandbox: address space of a process, all files
LARGEST_MEMORY_MB, LARGEST_STORAGE_MB = 4096, 256
PLAIN_IMAGES = ("debian", "python", "ubuntu")  # a local sandbox has this machine's bash and Python in their place
WORKDIR = "/app"
SPECIAL = set("*?[$\\\"'")  # what a Dockerfile expands or quotes
NOT_SUPPORTED = (("environment", "env"), ("verifier", "env"), ("verifier", "environment_mode"), ("steps",))
ELSEWHERE = "give a provider that has Docker (docs/tasks.md)"
# Ends the policy's processes, and puts empty folders in the place of what it may have left for the check.
PREPARE = """
kill -KILL -1 2> /dev/null
for folder in /tests /logs; do
    path=$(realpath -m "$folder") && { [ ! -e "$path" ] || mv -T "$path" "$path.{token}"; } && mkdir "$path" || exit 1
done
mkdir /logs/verifier"""
REWARD_FILES = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")


class Sandbox(Protocol):
    """What runs the commands of an episode: what a provider makes of a task."""

    async def exec(self, command: str, timeout_s: float) -> tuple[int, str]:
        """(exit code, output) of a bash command, in the same file system each time. 124 after its time."""
        ...

    async def close(self) -> None:
        """Ends and removes all of it."""
        ...


@dataclass(frozen=True)
class Task:
    folder: Path
    instruction: str
    files: tuple[tuple[Path, str], ...] = ()  # what is copied where before the episode
    workdir: str = ""  # where commands run; "": where the provider's image says
    check_s: float | None = None  # seconds that tests/test.sh may take
    memory_mb: int = MEMORY_MB
    storage_mb: int = STORAGE_MB

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders in / that the task writes to."""
        targets = [PurePosixPath(target).parent for _, target in self.files]
        paths = ["/tests", "/logs", "/solution", self.workdir, *targets]
        return tuple(dict.fromkeys("".join(PurePosixPath(path).parts[1:2]) for path in paths))


class LocalSandbox:
    """A sandbox on this machine, by namespaces of the kernel: without network, and without Docker."""

    def __init__(self, task: Task):
        self.shell = Shell(task.folders, task.memory_mb, task.storage_mb)

    async def exec(self, command: str, timeout_s: float) -> tuple[int, str]:
        return await in_thread(self.shell.exec, command, timeout_s)

    async def close(self) -> None:
        await in_thread(self.shell.close)


# ---- reading a folder ----
def read_tasks(folder: Path, local: bool = True) -> dict[str, Task]:
    """The tasks in the folder's folders, by name. Raises InputError."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    names = [name for name in names if name[0] not in "._"]
    if not names:
        raise InputError(f"{folder}: no folder with folders of tasks")
    return {name: read_task(folder / name, local) for name in names}


def read_task(folder: Path, local: bool = True) -> Task:
    """local: whether it must run without Docker. Raises InputError, with the file and what to do."""
    if not (folder / "instruction.md").is_file() and (folder / "task.yaml").is_file():
        what = "convert it: harbor tasks migrate -i TASKS -o NEW_TASKS"
        raise InputError(f"{folder}/task.yaml: terminal-bench's old form of a task; {what}")
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise InputError(f"{folder}/{name}: no such file; a task needs one (docs/tasks.md)")
    environment, settings = folder / "environment", _settings(folder / "task.toml")
    task: dict[str, Any] = {"folder": folder.resolve(), "check_s": settings["check_s"]}
    task["instruction"] = _read(folder / "instruction.md").strip()
    needs_docker = [
        environment / name for name in ("docker-compose.yaml", "Dockerfile") if (environment / name).exists()
    ]
    if settings["image"]:
        needs_docker.insert(0, folder / f"task.toml: docker_image {settings['image']}")
    if needs_docker and not local:
        return Task(**task)
    if needs_docker and needs_docker[0].name != "Dockerfile":
        raise InputError(f"{needs_docker[0]}: not without Docker: {ELSEWHERE}")
    files, workdir = [], WORKDIR
    if needs_docker:
        files, workdir = _read_dockerfile(needs_docker[0])
    elif environment.is_dir():
        files = list(_contents(environment, WORKDIR))
    sizes = {name: settings[name] for name in ("memory_mb", "storage_mb")} if local else {}
    made = Task(files=tuple(files), workdir=workdir, **task, **sizes)
    if local and (taken := [name for name in made.folders if name in Shell.taken()]):
        raise InputError(f"{folder}: it writes to /{taken[0]}, which is not writable without Docker: {ELSEWHERE}")
    return made


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: {error}") from error


def _settings(file: Path) -> dict[str, Any]:
    """What task.toml says. Raises InputError."""
    try:
        toml = tomllib.loads(_read(file)) if file.exists() else {}
        for keys in NOT_SUPPORTED:
            value: Any = toml
            for key in keys:
                value = value.get(key) or {}
            if value not in ({}, "shared"):
                raise InputError(f"{file}: {'.'.join(keys)} is not supported: leave it out")
        verifier, environment = toml.get("verifier", {}), toml.get("environment", {})
        limits = {}
        for name, usual, largest in (
            ("memory_mb", MEMORY_MB, LARGEST_MEMORY_MB),
            ("storage_mb", STORAGE_MB, LARGEST_STORAGE_MB),
        ):
            limits[name] = min(int(environment.get(name, usual)), largest)
        check_s = verifier.get("timeout_sec")
        if min(*limits.values(), 1.0 if check_s is None else float(check_s)) <= 0:
            raise ValueError("a limit must be above 0")
    except InputError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError) as error:  # TOMLDecodeError is a ValueError
        raise InputError(f"{file}: {error}") from error
    image = environment.get("docker_image")
    return limits | {"check_s": check_s and float(check_s), "image": image}


def _contents(source: Path, target: str) -> Iterator[tuple[Path, str]]:
    """What is in the folder, and where each goes."""
    yield from ((path, f"{target.rstrip('/')}/{path.name}") for path in sorted(source.iterdir()))


def _read_dockerfile(file: Path) -> tuple[list[tuple[Path, str]], str]:
    """(files, working folder) of FROM a plain image, WORKDIR and COPY. Raises InputError for all else."""
    files: list[tuple[Path, str]] = []
    workdir = "/"
    for number, line in enumerate(_read(file).splitlines(), 1):
        match line.split():
            case []:
                pass
            case [first, *_] if first.startswith("#"):
                pass
            case ["FROM", image] if image.partition(":")[0] in PLAIN_IMAGES:
                pass
            case ["WORKDIR", path] if not SPECIAL & set(path):
                workdir = str(PurePosixPath(workdir, path))
            case ["COPY", *sources, target] if sources and sources[0][0] != "-" and not SPECIAL & set(line):
                for source in sources:
                    into_folder = len(sources) > 1 or target.endswith(("/", "."))
                    files += _copied(file.parent, source, str(PurePosixPath(workdir, target)), into_folder)
            case _:
                raise InputError(f"{file} line {number}: {line.strip()[:100]}: not without Docker: {ELSEWHERE}")
    return files, workdir


def _copied(context: Path, source: str, target: str, into_folder: bool) -> Iterator[tuple[Path, str]]:
    path = (context / source.lstrip("/")).resolve()
    if not path.exists() or not path.is_relative_to(context.resolve()):
        raise InputError(f"{context}/Dockerfile: COPY {source}: there is no such file in {context}")
    if path.is_dir():
        return _contents(path, target)
    return iter([(path, f"{target.rstrip('/')}/{path.name}" if into_folder else target)])


# ---- an episode ----
class OpenTask:
    """A task in a sandbox, with its files."""

    def __init__(self, task: Task, sandbox: Sandbox):
        self.task, self.sandbox = task, sandbox

    async def exec(self, command: str, timeout_s: float) -> tuple[int, str]:
        """(exit code, output) of a bash command in the working folder."""
        if self.task.workdir:
            command = f"cd {shlex.quote(self.task.workdir)} || exit\n{command}"
        code, output = await self.sandbox.exec(command, timeout_s)
        return code, output

    async def check(self, timeout_s: float = math.inf) -> float:
        """The reward. 0 if the policy has left the sandbox in a state in which the check cannot run. Raises ValueError
        if the reward is no number, and what the sandbox raises."""
        prepare = PREPARE.replace("{token}", secrets.token_hex(8))
        try:
            await self.run(prepare)
            await self.upload(_contents(self.task.folder / "tests", "/tests"))
        except SetupFailed:
            return 0.0
        timeout_s = min(timeout_s, self.task.check_s or math.inf, 3600.0)
        passed = (await self.exec("HOME=/logs bash /tests/test.sh", timeout_s))[0] == 0
        for path in REWARD_FILES:
            code, text = await self.sandbox.exec(f"[ -e {path} ] || exit 3; head -c 1000 {path}", SETUP_S)
            if code != 3:
                return _reward(path, text)
        return float(passed)

    async def upload(self, files) -> None:
        """Writes (source, target) into the sandbox. Raises SetupFailed: it has no room, for example."""
        archive, parents = io.BytesIO(), set()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            for source, target in files:
                tar.add(source, target.lstrip("/"))
                parents.add(str(PurePosixPath(target).parent))
        if parents:
            await self.run(f"mkdir -p {shlex.join(sorted(parents))}")
        text, piece = base64.b64encode(archive.getvalue()).decode(), f"/tmp/{secrets.token_hex(8)}"
        for start in range(0, len(text), PIECE):
            await self.run(f"printf %s {text[start : start + PIECE]} | base64 -d >> {piece}")
        await self.run(f"tar -xzf {piece} -C / --no-same-owner; code=$?; rm {piece}; exit $code")

    async def solve(self, timeout_s: float) -> tuple[int, str]:
        """Runs the task's own solution."""
        await self.upload(_contents(self.task.folder / "solution", "/solution"))
        return await self.exec("bash /solution/solve.sh", timeout_s)

    async def run(self, command: str) -> None:
        code, output = await self.sandbox.exec(command, SETUP_S)
        if code != 0:
            what = f"a command of its set-up ended with exit code {code}"
            raise SetupFailed(f"task {self.task.folder.name}: {what}: {output[-300:]}")

    async def close(self) -> None:
        await self.sandbox.close()


class SetupFailed(RuntimeError):
    """Files cannot be copied into the sandbox."""


def _reward(path: str, text: str) -> float:
    try:
        value = json.loads(text) if path.endswith(".json") else text
        value = float(value["reward"] if isinstance(value, dict) else value)
    except (ValueError, TypeError, KeyError, RecursionError):
        value = math.nan
    if not abs(value) <= LARGEST_SCORE:
        raise ValueError(f"{path} has {text[:100]!r}, which is no number up to {LARGEST_SCORE:g}")
    return value


async def start_task(task: Task, provider: Callable[[Task], Any] = LocalSandbox) -> OpenTask:
    """The task in a new sandbox, which the caller closes. Raises what the provider raises, and SetupFailed."""
    episode = OpenTask(task, await _call(provider, task))
    try:
        await episode.upload(task.files)
        if task.workdir:
            await episode.run(f"mkdir -p {shlex.quote(task.workdir)}")
    except BaseException:
        await episode.close()
        raise
    return episode


@asynccontextmanager
async def open_task(
    folder: str | Path, name: str, provider: Callable[[Task], Any] | None = None
) -> AsyncIterator[OpenTask]:
    """The task `name` of the folder, for a program of --agent. Raises InputError, and what start_task raises."""
    if name in ("", ".", "..") or "/" in name:  # a row is data: it may not name other folders
        raise InputError(f"{folder}: {name!r} is not the name of a task in it")
    episode = await start_task(read_task(Path(folder) / name, provider is None), provider or LocalSandbox)
    try:
        yield episode
    finally:
        await asyncio.shield(episode.close())


# ---- the tool ----
class Bash(BaseTool):
    """Runs commands in the sandbox of the episode's task, which the row names: tools_kwargs["bash"]["create_kwargs"] is
    {"task": name}. The reward of the episode is that of the task's check."""

    def __init__(self, tasks: dict[str, Task], provider: Callable[[Task], Any], timeout_s: float):
        self.tasks, self.provider, self.timeout_s = tasks, provider, timeout_s
        self.episodes: dict[str, OpenTask] = {}
        command = {"type": "string", "description": "One or more lines of bash. Files stay, processes do not."}
        parameters = {"type": "object", "properties": {"command": command}, "required": ["command"]}
        function = {"name": "bash", "description": "Run a command and see its output.", "parameters": parameters}
        self.schema = {"type": "function", "function": function}

    async def create(self, instance_id: str, *, task: str, **kwargs) -> None:  # type: ignore[override]
        if task not in self.tasks:
            raise InputError(f"--multi-turn.tools bash: the row's task {task!r} is not in the folder")
        self.episodes[instance_id] = await start_task(self.tasks[task], self.provider)

    async def execute(self, instance_id: str, parameters: dict, **kwargs):
        code, output = await self.episodes[instance_id].exec(parameters["command"], self.timeout_s)
        if code == 124:
            output += f"\n(stopped: a command has {self.timeout_s:g} s)"
        elif code:
            output += f"\n(exit code {code})"
        return output or "(no output)"

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return await self.episodes[instance_id].check(self.timeout_s)

    async def release(self, instance_id: str, **kwargs) -> None:
        if episode := self.episodes.pop(instance_id, None):
            await episode.close()


def load_bash(spec: str, tool_timeout: float) -> Bash:
    """bash:FOLDER, or "bash:FOLDER path/to/file.py:provider". Raises InputError."""
    folder, _, provider_spec = spec.removeprefix("bash:").partition(" ")
    flag = f"--multi-turn.tools {spec}"
    provider = load_object("--multi-turn.tools", provider_spec) if provider_spec else LocalSandbox
    if not callable(provider):
        raise InputError(f"{flag}: {provider_spec} is not a class or function that returns a sandbox")
    try:
        tasks = read_tasks(Path(folder), not provider_spec)
    except InputError as error:
        raise InputError(f"{flag}: {error}") from error
    timeout_s = 0.9 * tool_timeout  # the rest is for files, and for ending it
    for name, task in tasks.items():
        if task.check_s and task.check_s > timeout_s:
            what = f"the check of {name} may take {task.check_s:g} s (timeout_sec of [verifier])"
            raise InputError(f"{flag}: {what}: set --multi-turn.tool-timeout {math.ceil(task.check_s / 0.9)} or more")
    if not provider_spec:
        try:
            Shell((), MEMORY_MB, STORAGE_MB).close()
        except (InputError, RuntimeError) as error:
            raise InputError(f"{flag}: {error}; or {ELSEWHERE}") from error
    return Bash(tasks, provider, timeout_s)
