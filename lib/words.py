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
    texts = read_words(flag, given)
    if unknown := [name for name in texts if name not in types]:
        raise InputError(f"{flag} takes no {unknown[0]}, only {', '.join(types)}")
    return {name: value_of(f"{flag} {name}={text}", text, types[name]) for name, text in texts.items()}


def read_words(flag: str, given: Iterable[str]) -> dict[str, str]:
    """{name: text} of words NAME=VALUE. Raises InputError for a word of another form, and for a name given twice."""
    found: dict[str, str] = {}
    for word in given:
        name, _, text = word.partition("=")
        if not (name and text):
            raise InputError(f"{flag}: {word[:100]}: give NAME=VALUE")
        if name in found:
            raise InputError(f"{flag}: {name} is there twice")
        found[name] = text
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
