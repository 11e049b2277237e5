"""Records what ran: at each start of a run the script, the git commit and its diff, the packages, the command, the
flags that differ from the defaults, and the machine."""

import json
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from threading import Timer

from lib import launched_ranks
from lib.cli.secrets import private, redact, redact_values
from lib.distributed import device_names

GIT_S = 30.0
LONGEST_DIFF = 10 * 2**20  # bytes
MOST_UNTRACKED = 50  # names of files


def write_start(
    folder: Path, code: Mapping[str, Path], command: str, flags: Mapping[str, list], changes: str = ""
) -> None:
    """Makes the folder with the code (`code_files`), start.json, diff.patch (the git checkout against its commit) and
    changes.patch (`code_changes`). flags: those that differ from their defaults (`changed_flags`)."""
    folder.mkdir(parents=True)
    for name, path in code.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / name)
    if changes:
        private(folder / "changes.patch").write_text(changes)
    script = next(iter(code.values()))
    commit = _commit(script.parent)
    untracked, number = _untracked(script.parent) if commit else ([], 0)
    start = {
        "command": redact(command),
        "flags": redact_values(flags),
        "machine": _machine(),
        "commit": commit,
        "lib_commit": _lib_commit(),  # a copy of a script may be in another repository
        "untracked": untracked,
        "untracked_files": number,
        "python": platform.python_version(),
        "packages": _packages(),
    }
    (folder / "start.json").write_text(json.dumps(start, indent=1, sort_keys=True) + "\n")
    if commit and (diff := _diff(script.parent)):
        private(folder / "diff.patch").write_text(redact(diff), errors="surrogateescape")


def _packages() -> dict[str, str]:
    """{name: version} of what is installed. importlib.metadata would parse each file, with its description, twice."""
    found: dict[str, str] = {}
    for package in distributions():
        head, _, _ = (package.read_text("METADATA") or package.read_text("PKG-INFO") or "").partition("\n\n")
        fields = dict(re.findall(r"^(Name|Version): *(.*)$", head, re.MULTILINE))
        if "Name" in fields:
            found.setdefault(fields["Name"], fields.get("Version", ""))  # the first on the path is what is imported
    return found


def _machine() -> str:
    gpus = Counter(device_names())
    parts = [f"{os.cpu_count()} CPU cores", *(f"{number} x {name}" for name, number in gpus.items())]
    if (ranks := launched_ranks()) > 1:
        parts.append(f"{ranks} ranks")
    return f"{platform.node()}: {', '.join(parts)}"


def _commit(folder: Path) -> str | None:
    """None: no git, or not a checkout."""
    with suppress(OSError):
        return b"".join(_git(folder, "rev-parse", "HEAD")).decode().strip()
    return None


def _lib_commit() -> str | None:
    """That of lib/, which an installed wheel brings in a file: its folder may be in another project's checkout."""
    file = Path(__file__).parents[2] / "COMMIT"
    return file.read_text() or None if file.exists() else _commit(file.parent)


def _untracked(folder: Path) -> tuple[list[str], int | None]:
    """The first files that git neither tracks nor ignores, and how many there are; None: not known."""
    first, number = b"", 0
    try:
        for piece in _git(folder, "ls-files", "-z", "--others", "--exclude-standard", ":/"):
            first += piece if number < MOST_UNTRACKED else b""
            number += piece.count(b"\0")
    except OSError:
        return [], None
    return first.decode(errors="surrogateescape").split("\0")[: min(number, MOST_UNTRACKED)], number


def _diff(folder: Path) -> str:
    """The diff to the commit; or one line that says why it is not kept."""
    diff = b""
    try:
        for piece in _git(folder, "diff", "--no-ext-diff", "--binary", "HEAD"):
            diff += piece
            if len(diff) > LONGEST_DIFF:
                return f"more than {LONGEST_DIFF} bytes: too long to be kept\n"
    except OSError as error:
        return f"{error}\n"
    return diff.decode(errors="surrogateescape")


def _git(folder: Path, *words: str) -> Iterator[bytes]:
    """What git prints, piece by piece: it may be of any length. Raises OSError if git fails or takes too long."""
    command = ["git", "-C", str(folder), "-c", "core.quotePath=false", *words]
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as git:
        timer = Timer(GIT_S, git.kill)
        timer.start()
        assert git.stdout is not None
        try:
            yield from iter(partial(git.stdout.read, 2**16), b"")
            if git.wait():
                raise OSError(f"git {words[0]} failed, or took longer than {GIT_S:.0f} s")
        finally:
            timer.cancel()
            git.kill()
