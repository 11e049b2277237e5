"""tyro builds the parser of a script's flags anew for every command line, which is 95 % of the time that it takes.
`keep_parsers` has it built once for each class of flags."""

import dataclasses
from collections.abc import Callable, Hashable

from tyro._parsers import ParserSpecification


def keep_parsers(key: Callable[[type], Hashable] = lambda args_class: args_class) -> None:
    """From here on, in this process. key: what two classes of equal flags share."""
    build, built = ParserSpecification.from_callable_or_type, {}

    def kept(f, **more):
        if more["parent_classes"] or not isinstance(f, type):  # of a group of flags, or of a function
            return build(f, **more)
        name = (key(f), more["description"], more["default_instance"])
        if name not in built:
            built[name] = build(f, **more)
        return dataclasses.replace(built[name], f=f)  # of which class an instance is made

    ParserSpecification.from_callable_or_type = staticmethod(kept)


def by_fields(args_class: type) -> Hashable:
    """Equal for a script's class and the class of another run of the same script."""
    return args_class.__qualname__, *map(repr, dataclasses.fields(args_class))
