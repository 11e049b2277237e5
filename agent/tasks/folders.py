"""Reads tasks in the form of Harbor's: a folder with files, an instruction and a check (docs/environments.md).

    instruction.md       what the policy is asked
    environment/         the files of the working folder; or a Dockerfile
    tests/test.sh        the check: writes a number to /logs/verifier/reward.txt, or passes with exit code 0
    solution/solve.sh    commands that pass the check
    task.toml            limits

The last two are optional."""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema

from agent.tasks.shell import Shell
from lib import InputError

WORKDIR = "/app"
PLAIN_IMAGES = ("debian", "python", "ubuntu")  # without Docker, this machine's bash and Python are in their place
SPECIAL = set("*?[$\\\"'")  # what a Dockerfile expands or quotes
LARGEST_MEMORY_MB, LARGEST_STORAGE_MB = 4096, 256  # of a local sandbox: a process's address space, all files
ELSEWHERE = "give a provider that has Docker (docs/environments.md)"
SIZE, NONE = {"type": "integer", "minimum": 1, "maximum": 2**30}, {"maxProperties": 0}
VERIFIER = {
    "timeout_sec": {"type": "number", "exclusiveMinimum": 0, "maximum": 86400},
    "env": NONE,
    "environment_mode": {"const": "shared"},
}
ENVIRONMENT = {
    "docker_image": {"type": "string"},
    "memory_mb": SIZE | {"minimum": 128},
    "storage_mb": SIZE,
    "env": NONE,
}
SETTINGS = {  # of task.toml, what is read or not supported
    "properties": {
        "verifier": {"type": "object", "properties": VERIFIER},
        "environment": {"type": "object", "properties": ENVIRONMENT},
        "steps": {"maxItems": 0, "maxProperties": 0},
    }
}


@dataclass(frozen=True)
class Task:
    folder: Path
    instruction: str
    check_s: float | None  # seconds that tests/test.sh may take
    memory_mb: int
    storage_mb: int
    files: tuple[tuple[Path, str], ...] = ()  # what is copied where before the episode
    workdir: str = ""  # where commands run; "": where the image of a provider says

    @property
    def folders(self) -> tuple[str, ...]:
        """Names of the folders in / that it writes to; "" for / itself."""
        targets = [str(PurePosixPath(target).parent) for _, target in self.files]
        paths = ["/tests", "/logs", "/solution", self.workdir, *targets]
        return tuple(dict.fromkeys("".join(PurePosixPath(path).parts[1:2]) for path in paths))


def task_names(folder: Path) -> list[str]:
    """The names of the folder's folders. Raises InputError."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    names = [name for name in names if name[0] not in "._"]
    if not names:
        raise InputError(f"{folder}: no folder that holds folders of tasks")
    if odd := [name for name in names if not name.isprintable()]:
        raise InputError(f"{folder}: rename the folder {odd[0]!r}: a task's name is a printable line")
    return names


def read_tasks(folder: Path, local: bool = True) -> dict[str, Task]:
    """The tasks in the folder's folders, by name. Raises InputError."""
    return {name: read_task(folder / name, local) for name in task_names(folder)}


def check_files(folder: Path) -> int:
    """The size of all files in the folder, in bytes. Raises InputError for a link that leads out of it, and for what is
    neither file nor folder: a task comes from elsewhere, and must not read what is yours."""
    root, size = Path(os.path.realpath(folder.parent), folder.name), 0
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            if not Path(os.path.realpath(path)).is_relative_to(root):
                target = str(path.readlink())
                raise InputError(f"{folder}: {path.name!r} links to {target!r}, outside the task: copy what it needs")
        elif not (path.is_file() or path.is_dir()):
            raise InputError(f"{folder}: {path.name!r} is neither a file nor a folder: remove it")
        size += path.lstat().st_size
    return size


def read_task(folder: Path, local: bool = True) -> Task:
    """local: whether it must run without Docker. Raises InputError, with the file and what to do."""
    size = check_files(folder)
    if not (folder / "instruction.md").exists() and (folder / "task.yaml").exists():
        what = "a task in terminal-bench's old form: convert it with harbor tasks migrate -i TASKS -o NEW_TASKS"
        raise InputError(f"{folder}/task.yaml: {what}")
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise InputError(f"{folder}/{name}: no such file, and a task needs it (docs/environments.md)")
    settings, environment = _settings(folder / "task.toml"), folder / "environment"
    if local and size > (limit := min(settings["storage_mb"], LARGEST_STORAGE_MB)) * 2**20:
        what = f"its files take {size / 2**20:.1f} MiB, and its sandbox has {limit} (storage_mb in task.toml)"
        raise InputError(f"{folder}: {what}: raise it up to {LARGEST_STORAGE_MB}, or {ELSEWHERE}")
    image, compose, dockerfile = settings.pop("image"), environment / "docker-compose.yaml", environment / "Dockerfile"
    files: list[tuple[Path, str]] = []
    workdir = WORKDIR
    if not local and (image or compose.exists() or dockerfile.exists()):
        workdir = ""
    elif image or compose.exists():
        place = f"{folder}/task.toml: docker_image {image}" if image else str(compose)
        raise InputError(f"{place}: not without Docker: {ELSEWHERE}")
    elif dockerfile.exists():
        files, workdir = _read_dockerfile(dockerfile)
    elif environment.is_dir():
        files = contents(environment, WORKDIR)
    task = Task(
        folder.resolve(), _read(folder / "instruction.md").strip(), files=tuple(files), workdir=workdir, **settings
    )
    if local and (taken := [name for name in task.folders if name in Shell.taken()]):
        raise InputError(f"{folder}: it writes to /{taken[0]}, which is read only without Docker: {ELSEWHERE}")
    return task


def contents(source: Path, target: str) -> list[tuple[Path, str]]:
    """What is in the folder, and where each goes in the folder `target`."""
    return [(path, str(PurePosixPath(target, path.name))) for path in sorted(source.iterdir())]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: {error}") from error


def _settings(file: Path) -> dict[str, Any]:
    try:
        toml = tomllib.loads(_read(file)) if file.exists() else {}
        jsonschema.Draft202012Validator(SETTINGS).validate(toml)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise InputError(f"{file}: {error}") from error
    except jsonschema.ValidationError as error:
        what = f"not supported: {error.message[:200]}"
        raise InputError(f"{file}: {error.json_path.removeprefix('$.')}: {what}") from error
    environment = toml.get("environment", {})
    sizes = {"memory_mb": environment.get("memory_mb", 1024), "storage_mb": environment.get("storage_mb", 64)}
    return sizes | {"check_s": toml.get("verifier", {}).get("timeout_sec"), "image": environment.get("docker_image")}


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
                workdir = os.path.normpath(PurePosixPath(workdir, path))
            case ["COPY", *sources, target] if sources and sources[0][0] != "-" and not SPECIAL & set(line):
                into_folder = len(sources) > 1 or target.endswith(("/", "."))
                for source in sources:
                    files += _copied(file.parent, source, os.path.normpath(PurePosixPath(workdir, target)), into_folder)
            case _:
                raise InputError(f"{file} line {number}: {line.strip()[:100]}: not without Docker: {ELSEWHERE}")
    return files, workdir


def _copied(context: Path, source: str, target: str, into_folder: bool) -> list[tuple[Path, str]]:
    path = (context / source.lstrip("/")).resolve()
    if not path.exists() or not path.is_relative_to(context.resolve()):
        raise InputError(f"{context}/Dockerfile: COPY {source}: there is no such file in {context}")
    if path.is_dir():
        return contents(path, target)
    return [(path, str(PurePosixPath(target, path.name)) if into_folder else target)]
