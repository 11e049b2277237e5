"""Flags whose values are words NAME=VALUE, such as --val-kwargs top_p=0.9 top_k=20."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lib import InputError

T = TypeVar("T")


def from_words(flag: str, given: Iterable[str], kind: type[T]) -> T:
    """A dataclass from words NAME=VALUE of its fields. Raises InputError, which begins with the flag."""
    return kind(**words(flag, given, get_type_hints(kind, include_extras=True)))


def words(flag: str, given: Iterable[str], types: Mapping[str, Any]) -> dict[str, Any]:
    """{name: value} of words NAME=VALUE. types: {name: type, with its range, such as Annotated[int, Ge(1)]}; a tuple's
    items are separated by commas. Raises InputError, which begins with the flag."""
    found: dict[str, Any] = {}
    for word in given:
        name, equals, text = word.partition("=")
        if name not in types or not equals:
            raise InputError(f"{flag} {word[:100]}: give NAME=VALUE, where NAME is one of {', '.join(types)}")
        if name in found:
            raise InputError(f"{flag} {word[:100]}: {name} is there twice: drop one")
        found[name] = value_of(f"{flag} {word[:100]}", text, types[name])
    return found


def value_of(where: str, text: str, kind: Any) -> Any:
    """The text as a value of this type. Raises InputError, which begins with `where`."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # a tenth of a second, which --help need not wait for

    is_tuple = any(get_origin(part) is tuple for part in (kind, *get_args(kind)))
    try:
        adapter: TypeAdapter = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
        return adapter.validate_python(tuple(text.split(",")) if is_tuple else text)
    except ValidationError as error:
        raise InputError(f"{where}: {error.errors()[0]['msg']}") from None
