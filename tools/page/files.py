"""Reads the files of a run's folder, which anybody may have written. Whatever they hold, the answer is their content,
or an OSError or ValueError that says in a few words what is wrong."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 2**53  # whole numbers beyond it are not exact in the browser
DEEPEST = 50  # lists and objects inside each other


def open_inside(folder: Path, name: str) -> BinaryIO:
    """A regular file of the folder: a link may lead elsewhere, and a FIFO blocks."""
    file = folder / name
    if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)):
        raise OSError("it is a link out of the run's folder")
    number = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError("it is not a regular file")
    return os.fdopen(number, "rb")


def parse(text: str | bytes, shape: Any) -> Any:
    """The value of a JSON text, which must have this shape (see `check`)."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {DEEPEST} lists and objects") from error
    check(value, shape)
    return value


def check(value: Any, shape: Any, where: str = "", depth: int = 0) -> None:
    """Raises ValueError, which says where, if a JSON value does not have the shape.

    A shape is int (from 0), float, str, object (anything), [shape of the items], or {name: shape, ...: shape of other
    names}. A name may be missing or null.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} lists and objects")
    if value is None:
        return
    items: Any = ()
    if shape is object:
        items = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
        items = [(where, item, object) for item in items]
    elif isinstance(shape, dict) and isinstance(value, dict):
        items = [(name, item, shape.get(name, shape.get(..., object))) for name, item in value.items()]
    elif isinstance(shape, list) and isinstance(value, list):
        if None in value and shape != [object]:
            raise ValueError(f"{_shown(where)} has null in it")
        items = [(where, item, shape[0]) for item in value]
    elif shape is int:
        if not isinstance(value, int) or not 0 <= value < LARGEST:
            raise ValueError(f"{_shown(where)} is no whole number from 0 to 2^53")
    elif shape is float:
        if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > 1e300):
            raise ValueError(f"{_shown(where)} is no number")
    elif shape is not type(value):
        raise ValueError(f"{_shown(where)} is of type {type(value).__name__}")
    for name, item, inner in items:
        check(item, inner, name, depth + 1)


def reason(error: Exception) -> str:
    """In one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__


def _shown(where: str) -> str:
    return (where or "it")[:60]
