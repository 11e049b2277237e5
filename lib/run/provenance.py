"""Records what ran, at each start of a run: code, git commit and diff, packages, command, flags, machine."""

import json
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from lib import launched_ranks
from lib.cli.secrets import private, redact, redact_values
from lib.distributed import device_names

GIT_S = 30.0
LONGEST_DIFF = 10 * 2**20  # bytes
MOST_UNTRACKED = 50  # names of files


def write_start(
    folder: Path, code: Mapping[str, Path], command: str, flags: Mapping[str, list], changes: str = ""
) -> None:
    """Makes the folder with the code (`code_files`), start.json, diff.patch (the checkout against its commit) and
    changes.patch (`code_changes`). flags: `changed_flags`."""
    folder.mkdir(parents=True)
    for name, path in code.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / name)
    if changes:
        private(folder / "changes.patch").write_text(changes)
    checkout = next(iter(code.values())).parent  # of the script
    commit = _commit(checkout)
    untracked = _git(checkout, "ls-files", "-z", "--others", "--exclude-standard", ":/") if commit else ""
    names = (untracked or "").split("\0")[:-1]
    start = {
        "command": redact(command),
        "flags": redact_values(flags),
        "machine": _machine(),
        "commit": commit,
        "lib_commit": _lib_commit(),  # a copy of a script may be in another repository
        "untracked": names[:MOST_UNTRACKED],
        "untracked_files": None if untracked is None else len(names),
        "python": platform.python_version(),
        # the first on the path is what is imported
        "packages": {package.name: package.version for package in reversed([*distributions()])},
    }
    (folder / "start.json").write_text(json.dumps(start, indent=1, sort_keys=True) + "\n")
    diff = _git(checkout, "diff", "--no-ext-diff", "--binary", "HEAD") if commit else ""
    if diff is None:
        diff = f"git diff failed, or took longer than {GIT_S:.0f} s\n"
    elif len(diff) > LONGEST_DIFF:
        diff = f"more than {LONGEST_DIFF} bytes: too long to be kept\n"
    if diff:
        private(folder / "diff.patch").write_text(redact(diff), errors="surrogateescape")


def _machine() -> str:
    gpus = Counter(device_names())
    parts = [f"{os.cpu_count()} CPU cores", *(f"{number} x {name}" for name, number in gpus.items())]
    if (ranks := launched_ranks()) > 1:
        parts.append(f"{ranks} ranks")
    return f"{platform.node()}: {', '.join(parts)}"


def _commit(folder: Path) -> str | None:
    """None: no git, or not a checkout."""
    found = _git(folder, "rev-parse", "HEAD")
    return found.strip() if found else None


def _lib_commit() -> str | None:
    """The commit of lib/. A wheel has it in a file: its folder may be in another project's checkout."""
    file = Path(__file__).parents[2] / "COMMIT"
    return file.read_text() or None if file.exists() else _commit(file.parent)


def _git(folder: Path, *words: str) -> str | None:
    """What git prints; None if there is no git, it fails, or it takes too long."""
    command = ["git", "-C", str(folder), "-c", "core.quotePath=false", *words]
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape")
