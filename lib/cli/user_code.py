"""Loads the user's own code, for all flags that take path/to/file.py:name.

It imports no torch: the command line is read, and reward workers start, without it.
"""

import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lib import InputError


def load_object(flag: str, spec: str) -> Any:
    """The object that "path/to/file.py:name" names. A process runs a file once, and again if it has changed.

    Raises InputError, which begins with the flag, if there is no such file or name, or if running the file raises or
    exits."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not (name.isidentifier() and path.is_file() and path.suffix == ".py"):
        raise InputError(f"{flag} {spec}: give an existing file and a name in it, as path/to/file.py:name")
    return _named_in(partial(_run_file, path, path.stat().st_mtime_ns), name, str(path), f"{flag} {spec}")


def load_class(flag: str, spec: str) -> Any:
    """As load_object; `spec` may also be the name of a class as Python imports it, module.Class."""
    module, _, name = spec.rpartition(".")
    if ":" in spec:
        return load_object(flag, spec)
    if not (module and all(part.isidentifier() for part in spec.split("."))):
        raise InputError(f"{flag} {spec[:100]!r}: give module.Class or path/to/file.py:Class")
    return _named_in(partial(importlib.import_module, module), name, module, f"{flag} {spec}")


def _named_in(load: Callable[[], ModuleType], name: str, origin: str, where: str) -> Any:
    """origin: the file or the module that `load` runs."""
    try:
        module = load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also sys.exit(), which would end the run without a word
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == origin]
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        line = f" in line {lines[-1]}" if lines else ""
        raise InputError(f"{where}: the file cannot be imported: {what}{line}") from error
    if hasattr(module, name):
        return getattr(module, name)
    raise InputError(f"{where}: {origin} has no {name!r}")


@functools.cache
def _run_file(path: Path, changed_at_ns: int) -> ModuleType:
    module_name = f"user_{path.stem}"  # math.py must not become the math that others import
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the file's name ends in .py
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module
