"""Records what ran: at each start of a run the script, the git commit and its diff, the packages, the command, the
flags that differ from the defaults, and the machine."""

import json
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

import torch

from lib import launched_ranks
from lib.cli.secrets import private, struck, struck_values

GIT_S = 30.0
LONGEST_DIFF = 10 * 2**20  # bytes


def write_start(folder: Path, script: Path, command: str, flags: Mapping[str, list]) -> None:
    """Makes the folder with the script, start.json and, if the git checkout differs from its commit, diff.patch.

    flags: those that differ from their defaults (`not_default`).
    """
    folder.mkdir(parents=True)
    shutil.copy(script, folder)
    commit = _git(script.parent, "rev-parse", "HEAD").strip()
    diff = _git(script.parent, "diff", "--no-ext-diff", "--binary", "HEAD") if commit else ""
    untracked = _git(script.parent, "ls-files", "--others", "--exclude-standard", ":/").splitlines() if commit else []
    start = {
        "command": struck(command),
        "flags": struck_values(flags),
        "machine": _machine(),
        "commit": commit or None,  # None: no git, or not a checkout
        "untracked": untracked,
        "python": platform.python_version(),
        "packages": {
            name: package.version for package in sorted(distributions(), key=str) if (name := package.metadata["Name"])
        },
    }
    (folder / "start.json").write_text(json.dumps(start, indent=1, sort_keys=True) + "\n")
    if diff:
        whole = len(diff) <= LONGEST_DIFF
        text = struck(diff) if whole else f"{len(diff)} bytes: too long to be kept\n"
        private(folder / "diff.patch").write_text(text, errors="surrogateescape")


def _machine() -> str:
    """Of rank 0's host, and how many ranks the job has."""
    gpus = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    parts = [f"{os.cpu_count()} CPU cores", *(f"{number} x {name}" for name, number in gpus.items())]
    if (ranks := launched_ranks()) > 1:
        parts.append(f"{ranks} ranks")
    return f"{platform.node()}: {', '.join(parts)}"


def _git(folder: Path, *words: str) -> str:
    """What git prints; "" if it fails."""
    command = ["git", "-C", str(folder), "-c", "core.quotePath=false", *words]
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="surrogateescape")
