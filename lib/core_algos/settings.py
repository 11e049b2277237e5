"""An estimator, loss or mask chosen by name, and its settings checked."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lib import InputError


def _lookup(kind: str, table: Mapping[str, Any], name: str) -> Any:
    if name not in table:
        raise InputError(f"unknown {kind} {name!r}: choose one of {', '.join(table)}")
    return table[name]


def _bind(what: str, function: Callable, settings: Mapping, positional: int, tensors: Sequence[str] = ()) -> Callable:
    """The function with its settings; what it is called with, `positional` arguments and the tensors, comes later.

    Raises InputError for a setting that the function does not have, for one that is no number of at least 0 (no bool)
    where the default is one, and if one without default is missing.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(tensors), **settings)
    except TypeError as error:
        raise InputError(f"{what} with {dict(settings)}: {error}") from error
    for name, value in settings.items():
        kind = {bool: "true or false", int: "a number", float: "a number"}.get(type(signature.parameters[name].default))
        if kind and not (_is_number(value) if kind == "a number" else isinstance(value, bool)):
            raise InputError(f"{what}: {name} must be {kind}, not {value!r}")
        if kind == "a number" and value < 0:
            raise InputError(f"{what}: {name} must be at least 0, not {value!r}")
    return partial(function, **settings)


def _is_number(value) -> bool:
    """Whether a setting from JSON is a number: not true, not NaN (Python's JSON has it); infinity is one."""
    return type(value) in (int, float) and value == value
