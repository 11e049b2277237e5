"""Looks up an estimator, loss or mask by name, and checks its settings."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from lib import InputError
from lib.columns import COLUMNS


class ByName(Mapping[str, Any]):
    """Functions by name. places: {name: the function, or the module of papers/ and the function's name there}; that
    module is imported when the name is asked for. view: what to give of a function."""

    def __init__(self, places: Mapping[str, Any], view: Callable[[Any], Any] = lambda function: function):
        self.places, self.view = places, view

    def __getitem__(self, name: str) -> Any:
        place = self.places[name]
        if isinstance(place, str):
            module, _, function = place.partition(".")
            place = getattr(import_module(f"lib.core_algos.papers.{module}"), function)
        return self.view(place)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _lookup(kind: str, table: Mapping[str, Any], name: str) -> Any:
    if name not in table:
        raise InputError(f"unknown {kind} {name!r}: choose one of {', '.join(table)}")
    return table[name]


def _bind(what: str, function: Callable, settings: Mapping, positional: int, tensors: Sequence[str] = ()) -> Callable:
    """The function with its settings bound; the caller passes the `positional` arguments and the tensors later.

    Raises InputError for an unknown setting, for a missing one without default, and for a wrong type: where the default
    is a number it must be a number of at least 0, where the default is a bool it must be a bool."""
    signature = inspect.signature(function)
    if fixed := settings.keys() & getattr(function, "keywords", {}).keys():  # a partial, which is a variant of its own
        raise InputError(f"{what} has no setting {', '.join(sorted(fixed))}: its name says it")
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


def _tensors(function: Callable, positional: int) -> tuple[str, ...]:
    """The columns of a batch that the function takes besides its positional arguments: its parameters of that name."""
    return tuple(name for name in [*inspect.signature(function).parameters][positional:] if name in COLUMNS)


def _is_number(value) -> bool:
    """Whether a setting is a number: a bool and NaN are not, infinity is."""
    return type(value) in (int, float) and value == value
