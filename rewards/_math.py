"""Reads mathematics that a model wrote: math-verify's parser runs in the sandbox, and its result comes out as data.

The process that reads the text knows nothing but that text. It answers in JSON, from which load() builds sympy's
objects again: numbers, symbols and sympy's classes by name, and no text that anything would evaluate.
"""

from typing import Any

import sympy
from latex2sympy2_extended import logic, sets
from math_verify import parse
from sympy.core.function import AppliedUndef

SECONDS = 5  # for one text; math-verify's default, too
WARM = [
    r"\boxed{\frac{1}{2}}",
    r"\boxed{\sqrt{2}x^2+3}",
    r"\boxed{\{1, -2\}}",
    r"\boxed{[0, \infty)}",
    r"$x = 2$",
    "$1,000$",
]
WARM += [
    "0.5 %",
    "2*3^4",
    r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}",
    r"\boxed{\text{a}}",
    r"$1 < x \le \pi$",
    "(1,2)",
]
OWN = {"FiniteSet": sets.FiniteSet, "And": logic.And}  # math-verify's own classes; they keep the order
EAGER: tuple[Any, ...] = (
    sympy.Add,
    sympy.Mul,
    sympy.Pow,
    sympy.Function,
    sympy.core.relational.Relational,
    sympy.And,
    sympy.Or,
    sympy.Not,
)
EAGER += (
    sympy.Max,
    sympy.Min,
    sympy.Union,
    sympy.Intersection,
    sympy.Complement,
    sympy.MatAdd,
    sympy.MatMul,
    sympy.MatPow,
)


def read(text: str) -> list:
    """What math-verify finds in the text, as dump() writes it. Runs in the sandbox."""
    return [dump(found) for found in parse(text, parsing_timeout=SECONDS)]


def warm() -> None:
    """Reads some texts first, so that every process of the sandbox starts with all imports and caches."""
    for text in WARM:
        read(text)


def dump(value):
    """A text or a sympy object as JSON: the text, [class, arguments], or [kind, its parts]."""
    if isinstance(value, str):
        return value
    if isinstance(value, sympy.MatrixBase):
        return ["matrix", [[dump(item) for item in row] for row in value.tolist()], list(value.shape)]
    name = type(value).__name__
    if isinstance(value, sympy.Rational):
        return ["rational", f"{value.p}/{value.q}"]
    if isinstance(value, sympy.Float):
        return ["float", [int(part) for part in value._mpf_], value._prec]
    if isinstance(value, sympy.Symbol):
        return ["symbol", value.name, {key: bool(is_) for key, is_ in value.assumptions0.items()}]
    if isinstance(value, AppliedUndef):
        return ["function", name, [dump(part) for part in value.args]]
    if type(value) is OWN.get(name):
        return ["own", name, [dump(part) for part in value._unsorted_args]]
    if not isinstance(value, sympy.Basic):
        raise TypeError(f"math-verify found a {name}")
    return [name, [dump(part) for part in value.args]]


def load(data):
    """The inverse of dump: the same classes, with their arguments in the same order. Nothing is simplified.

    Raises ValueError, TypeError, and what sympy's classes raise on arguments that do not fit.
    """
    if isinstance(data, str):
        return data
    kind, *rest = data
    match kind:
        case "rational":
            return sympy.Rational(*map(int, str(rest[0]).split("/")))
        case "float":
            return sympy.Float._new(tuple(map(int, rest[0])), int(rest[1]), zero=False)
        case "symbol":
            return sympy.Symbol(str(rest[0]), **{str(key): bool(is_) for key, is_ in rest[1].items()})
        case "matrix":
            return sympy.Matrix(*rest[1], [_expression(item) for row in rest[0] for item in row])
        case "function":
            return sympy.Function(str(rest[0]))(*map(_expression, rest[1]))
        case "own":
            return OWN[rest[0]](*map(_expression, rest[1]), evaluate=False)
    arguments = [_expression(part) for part in rest[0]]
    if not arguments and isinstance(constant := getattr(sympy.S, kind, None), sympy.Basic):
        return constant  # Pi, Exp1, Infinity, EmptySet, Reals, BooleanTrue
    cls = getattr(sympy, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, sympy.Basic)):
        raise ValueError(f"sympy has no class {kind!r}")
    return cls(*arguments, evaluate=False) if issubclass(cls, EAGER) else cls(*arguments)


def _expression(data):
    value = load(data)
    if isinstance(value, str):  # sympy would evaluate it
        raise ValueError("a text within an expression")
    return value
