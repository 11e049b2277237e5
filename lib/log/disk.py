"""Files that a run cannot write."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lib import InputError


def free_space(path: Path) -> str:
    """Of the disk that has the path, or will have it."""
    path = path.absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return f"{shutil.disk_usage(there).free / 2**30:.1f} GiB were free"


@contextmanager
def writes_to(path: Path, message: str) -> Iterator[None]:
    """Raises InputError (path, message, reason, advice) if the block cannot write, as on a full disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = f"{error} ({free_space(path)})"
        advice = "once it can be written, continue with --resume auto"
        raise InputError(f"{path}: {message}: {why}; {advice}") from error
