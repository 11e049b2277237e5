r"""Scorer for mathematics: takes the response's last \boxed{...} or, without one, what math-verify finds in it.

latex2sympy, math-verify's parser, reads both as sympy objects, and same() compares them: numbers, expressions, lists,
sets, intervals, points, matrices, equations, inequalities. Units do not count, and 10 % is both 10 and 0.1. The verdict
is that of math-verify's verify(), verl's "math_verify", but for these departures:

- case counts: R is not r, \Delta is not \delta, F(x) is not f(x); the case of words does not (\text{Even} is even)
- an equation answers with its value only if it has one: 5 of `x = 5`, `5 = x`, `f(2) = 5`, `a = b = 5`, `2 + 3 = 5`;
  not of `2x + 3y = 5` and `6 = 5`. It equals an equation that is rearranged or multiplied
- exact numbers are compared exactly, and a decimal relatively, to six digits (see _close), not to six decimals
- \{1,2\} is not (1,2); both equal the list 1, 2
- an inequality in one variable is the set of its solutions, also where the truth is that set
- 12\,345, 1 000, 5., 0.\overline{3}, 2 1/2, ½, 1.6e-19, \frac{1 \pm \sqrt5}{4}, −3, \varnothing, \bigl( are read
- 2 3 is no number; 2t as the truth is not 2 (in an answer t may be a unit), nor is 2 hours 30 minutes; 2 + 3t is not
  5; without a box, 2x, 2π and 2√3 are not 2
- 4210_7 is not 4210_5, but 4210 without a base is; i is the imaginary unit, so i is \sqrt{-1}
- a box without a value (AB \perp CD) is compared as text; no number is taken from it

A process in the sandbox that does not know the truth reads the model's text (rewards/_math.py). Its result, which is
data, is compared here. A plain number is read here, which is safe.

The parser's time may be quadratic in a text's length. So a boxed answer of more than 1000 characters is only compared
as text (the longest in MATH-500 has 159), and of a response without a box only the last 10000 characters are searched.
The comparison's time limit uses SIGALRM, which works only in the main thread, and replaces an alarm that is already set
there. In any other thread it is off, and the caller must keep the limit. This file is named like a standard module, so
import it as rewards.math: never put rewards/ itself on sys.path.
"""

import re
import threading
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache

import sympy
from latex2sympy2_extended.logic import And
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy import Eq, FiniteSet, Interval, MatrixBase, MatrixExpr, Rational, Set, Tuple, UnevaluatedExpr
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import TrigonometricFunction

from lib.sandbox import evaluate
from rewards import _math
from rewards.answers import answer_text, last_boxed, one_truth

LONGEST, TAIL = 1000, 10_000  # characters
NUMBER = re.compile(r"-?[0-9][0-9.,/]{0,40}")
TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox)\s*\{([^{}]*)\}")
WORD = re.compile(r"[A-Za-z]?[a-z]{2,}(?: [a-z]+)*|[A-Z]{4,}")  # in a formula: Even, no solution; not Rr, ABC
BASE = re.compile(r"\d_\{?(\d+)\}?\W*$")
PACKAGES = ("math_verify", "latex2sympy2_extended", "antlr4", "sympy", "mpmath")
DIGITS = 1000  # in which irrational numbers and powers are compared: 2^{2004} - 1 is not 2^{2004}
FLIPPED = {sympy.Gt: sympy.Lt, sympy.Lt: sympy.Gt, sympy.Ge: sympy.Le, sympy.Le: sympy.Ge}


# ---- equality of two values that rewards/_math.py has read ----


def same(truth, answer) -> bool:
    """Whether two values are equal: sympy objects, lists of them, or texts without a value."""
    if isinstance(truth, str) or isinstance(answer, str):
        return isinstance(truth, str) and truth == answer
    values = value_of(truth), value_of(answer)
    if any(isinstance(side, Set) or not _is_relation(before) for side, before in zip(values, (truth, answer))):
        truth, answer = values
    if _is_relation(truth) and _is_relation(answer):
        return _same_relation(truth, answer)
    truth, answer = _solutions(truth), _solutions(answer)
    if any(isinstance(side, list | Set | Tuple) for side in (truth, answer)):
        return _same_set(truth, answer)
    if isinstance(truth, MatrixBase | MatrixExpr) or isinstance(answer, MatrixBase | MatrixExpr):
        truth, answer = truth.doit(), answer.doit()
        shapes = [side.shape if isinstance(side, MatrixBase) else None for side in (truth, answer)]
        return None not in shapes and shapes[0] == shapes[1] and all(map(same, truth, answer))
    if not (isinstance(truth, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return truth == answer
    percent, percents = _percent(truth), _percent(answer)
    if percent is not None and percents is not None:
        return same(percent, percents)
    if percent is not None or percents is not None:
        number, other = (percent, answer) if percent is not None else (percents, truth)
        return same(number, other) or same(number / 100, other)
    if not (truth.free_symbols or answer.free_symbols):
        return _close(truth, answer)
    return truth == answer or sympy.simplify(_exact(truth) - _exact(answer)).is_zero is True


def _percent(expr):
    """x of x %, else None."""
    is_percent = isinstance(expr, sympy.Mul) and UnevaluatedExpr(Rational(1, 100)) in expr.args
    return sympy.Mul(*(part for part in expr.args if not isinstance(part, UnevaluatedExpr))) if is_percent else None


def _exact(expr):
    exact = {number: Rational(str(number)) for number in expr.atoms(sympy.Float)}
    exact |= {symbol: sympy.I for symbol in expr.free_symbols if symbol.name == "i"}
    return expr.xreplace(exact | {part: part.args[0] for part in expr.atoms(UnevaluatedExpr)})


def _close(truth, answer) -> bool:
    """Whether two numbers are equal. Irrational ones are compared in DIGITS digits, fractions exactly.

    With a decimal, six digits count: their distance is at most 1e-6 of the truth, so 0.333333 is 1/3 as in math-verify.
    It is also at most 1e-6, or half a unit of the decimal's last place: 333333.333 is 10^6/3, 1234567.1 not 1234567.2.
    """
    decimals = [Decimal(str(number)) for side in (truth, answer) for number in side.atoms(sympy.Float) if number]
    truth, answer = _exact(truth), _exact(answer)
    if not (truth.is_Rational and answer.is_Rational):
        truth, answer = truth.evalf(DIGITS), answer.evalf(DIGITS)
    if not (truth.is_finite and answer.is_finite):
        return truth == answer
    apart, size = abs(truth - answer), abs(truth)
    if not decimals:
        return apart == 0 or bool(not apart.is_Rational and apart <= (size or 1) / 10 ** (DIGITS - 10))
    coarsest = min(int("".join(map(str, number.normalize().as_tuple().digits))) for number in decimals)  # 12 of 0.0012
    small = Rational(1, 10**6)
    return bool(apart <= size * small and (apart <= small or 2 * coarsest * apart <= size))


def _is_relation(expr) -> bool:
    return isinstance(expr, Relational | And)


def _sides(expr) -> list | None:
    """[a, b, c] of a = b = c; None if it is not an equation."""
    parts = getattr(expr, "_unsorted_args", expr.args) if isinstance(expr, And) else [expr]
    return [parts[0].lhs, *(part.rhs for part in parts)] if all(isinstance(part, Eq) for part in parts) else None


def _is_name(expr) -> bool:
    """x, f(x), f^{-1}(2), sin x, (x, y), the segments AB and |AB|, the angle ABC; not x + y, 2x, xy, |x|."""
    if isinstance(expr, sympy.Mul):
        names = [isinstance(part, sympy.Symbol) and part.name for part in expr.args]
        return all(name and (len(name) > 1 or name.isupper() or name == "m") for name in names)
    if isinstance(expr, Tuple | Interval | TrigonometricFunction):
        return all(map(_is_name, expr.args[:2]))
    if isinstance(expr, sympy.Pow):
        return expr.exp == -1 and isinstance(expr.base, AppliedUndef)
    if isinstance(expr, sympy.Abs):
        return isinstance(expr.args[0], sympy.Mul) and _is_name(expr.args[0])
    return isinstance(expr, sympy.Symbol | AppliedUndef | sympy.Derivative)


def value_of(expr):
    """5 of x = 5, 5 = x, x = 2 + 3 = 5 and 2 + 3 = 5; what is no equation, or has no value, as it is."""
    if (sides := _sides(expr)) is None:
        return expr
    if _is_name(sides[0]):
        return ([side for side in sides[1:] if not _is_name(side)] or sides)[-1]
    if _is_name(sides[-1]):
        return sides[0]
    return sides[-1] if all(same(sides[-1], side) for side in sides[:-1]) else expr


def _same_relation(truth, answer) -> bool:
    sides, others = _sides(truth), _sides(answer)
    if (sides is None) != (others is None):
        return False
    if sides and others:
        sides, others = ([ends[0], ends[-1]] if _is_name(ends[0]) else ends for ends in (sides, others))
        if len(sides) == len(others) and all(map(same, sides, others)):
            return True
        return len(sides) == len(others) == 2 and _proportional(sides, others) is not None
    if (solved := _solutions(truth)) is not truth and (found := _solutions(answer)) is not answer:
        return truth.free_symbols == answer.free_symbols and _same_set(solved, found)
    if isinstance(truth, And) or isinstance(answer, And):
        parts, found = ([*getattr(side, "_unsorted_args", [side])] for side in (truth, answer))
        return len(parts) == len(found) and all(map(_same_relation, parts, found))
    factor = _proportional([truth.lhs, truth.rhs], [answer.lhs, answer.rhs])
    kind = type(answer) if factor is None or factor > 0 else FLIPPED.get(type(answer), type(answer))
    return factor is not None and type(truth) is kind


def _proportional(sides: list, others: list):
    """The number c with a - b = c (d - e), up to denominators, which are taken as positive; None if there is none."""
    with suppress(TypeError, AttributeError):  # sides are sets, points, ...
        left, right = (sympy.together(_exact(a) - _exact(b)).as_numer_denom()[0] for a, b in (sides, others))
        factor = sympy.simplify(left / right)
        if factor.is_number and factor.is_finite and factor.is_nonzero:
            return factor
    return None


def _solutions(expr):
    """The set that an inequality in one variable, or a list of them (x < 1 or x > 2), describes; all else as it is."""
    if isinstance(expr, list) and expr and all(_is_relation(part) and _sides(part) is None for part in expr):
        sets = [_solutions(part) for part in expr]
        return sympy.Union(*sets) if all(isinstance(part, Set) for part in sets) else expr
    if _is_relation(expr) and _sides(expr) is None and len(expr.free_symbols) == 1:
        with suppress(NotImplementedError, TypeError, ValueError):
            return expr.as_set()
    return expr


def _same_set(truth, answer) -> bool:
    """Lists, sets, intervals, points. A list is in any order, but as a point where the truth is one."""
    if isinstance(truth, list | FiniteSet) and isinstance(answer, list | FiniteSet):
        return _same_elements(list(truth), list(answer))
    for lone, other in ((truth, answer), (answer, truth)):
        if isinstance(lone, list | FiniteSet) and len(lone) == 1 and other != sympy.EmptySet:
            return same(next(iter(lone)), other)
    points = [_point(side) for side in (truth, answer)]
    if points[0] is not None and isinstance(answer, list):
        return len(points[0]) == len(answer) and all(map(same, points[0], answer))
    if points[1] is not None and isinstance(truth, list):
        return _same_elements(truth, points[1])
    if isinstance(truth, Interval) and isinstance(answer, Interval):
        is_open = truth.left_open == answer.left_open and truth.right_open == answer.right_open
        return bool(is_open) and same(truth.start, answer.start) and same(truth.end, answer.end)
    if points[0] is not None and points[1] is not None:
        return len(points[0]) == len(points[1]) and all(map(same, *points))
    if isinstance(truth, Set) and isinstance(answer, Set):
        truth, answer = _exact(truth), _exact(answer)
        return truth == answer or bool(truth.symmetric_difference(answer).is_empty)
    return False


def _point(value) -> list | None:
    """The coordinates of (1, 2), which latex2sympy reads as an interval, or (1, 2, 3)."""
    if isinstance(value, Interval) and value.left_open and value.right_open:
        return [value.start, value.end]
    return list(value) if isinstance(value, Tuple) else None


def _same_elements(truths: list, answers: list) -> bool:
    """Whether each of one side has an equal on the other."""
    found = [[same(truth, answer) for answer in answers] for truth in truths]
    return bool(found and answers) and all(map(any, found)) and all(map(any, zip(*found)))


# ---- the scorer ----


def _seconds() -> int | None:
    return _math.SECONDS if threading.current_thread() is threading.main_thread() else None


def _in_time(function, *arguments, default):
    try:
        return timeout(_seconds())(function)(*arguments)
    except (Exception, TimeoutException):  # noqa: BLE001 sympy may raise anything on arguments that the sandbox made up
        return default


@lru_cache(maxsize=1024)
def _read_here(text: str):
    r"""The value of the truth. Its t in 2t is no unit, but in 2 t and 2\text{ t}."""
    return _in_time(_math.latex, text, not re.search(r"[\d}][a-z]$", text), default=text)


def _read(text: str, is_answer: bool) -> list:
    """What a text of the model may mean."""
    if is_answer and NUMBER.fullmatch(text):
        return [_read_here(text)]
    found = evaluate("rewards._math:read", [text, is_answer], 2 * _math.SECONDS, PACKAGES) or []
    return _in_time(lambda: [_math.load(data) for data in found], default=[])


def _bare(text: str) -> str:
    r"""Even of \text{ Even.}, C of \textbf{(C)}."""
    text = re.sub(r"[\s~]+", " ", TEXT.sub(r"\1", text).replace("\\ ", " ")).strip(" .$")
    return re.sub(r"^\((.*)\)$", r"\1", text)


def _same_words(truth: str, answer: str) -> bool:
    r"""Whether two text answers are equal but for case: \text{Even} and even, \text{(C)} and c; not \text{R} and r."""
    bare = [_bare(truth), _bare(answer)]
    are_text = TEXT.search(truth) or TEXT.search(answer) or all(map(WORD.fullmatch, bare))
    letters = bare[0].replace(" ", "").isalpha() and (len(bare[0]) > 1 or bare[0].lower() in "abcdefghij")  # a choice
    return bool(are_text) and (bare[0] == bare[1] or (letters and bare[0].lower() == bare[1].lower()))


def _text(value) -> str:
    """A readable text, the same for equal numbers, lists, points, and intervals or inequalities of them."""
    value = _solutions(value_of(value))
    if isinstance(value, list | FiniteSet):
        return ", ".join(sorted(set(map(_text, value))))
    if isinstance(value, Tuple | Interval):
        parts = value if isinstance(value, Tuple) else (value.start, value.end)
        left, right = (True, True) if isinstance(value, Tuple) else (value.left_open, value.right_open)
        return f"{'(' if left else '['}{', '.join(map(_text, parts))}{')' if right else ']'}"
    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return str(value)
    if (percent := _percent(value)) is not None:
        return f"{_text(percent)}%"
    number = _exact(value)
    if number.is_Rational or not (number := number.evalf(15)).is_Float or abs(number) > 1e300:
        return str(number)
    return f"{float(number):.12g}"


def grade(text: str, truth: str, is_answer: bool = True) -> tuple[bool, str | None]:
    """Whether an answer, or what a response without a box says, equals the truth; and the answer as maj@k counts it.

    Equal answers have one text: a right answer the truth, a wrong number its value. "" is never right.
    """
    if is_answer and (text == truth or max(len(text), len(truth)) > LONGEST):
        return text == truth != "", text or None
    if not (values := _read(text, is_answer) if text else []):
        return False, (text if is_answer else "") or None
    bases = [BASE.findall(side) for side in (truth, text)]  # the value of 12_7 is 12
    right = not all(bases) or bases[0] == bases[1]
    right = right and any(_in_time(same, _read_here(truth), value, default=False) for value in values)
    if right or (is_answer and _same_words(truth, text)):
        return True, truth
    if len(words := _bare(text)) > 2 and WORD.fullmatch(words):  # xy is yx
        return False, words.lower()
    return False, _in_time(_text, values[0], default=text if is_answer else str(values[0]))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the truth if the answer equals it, else the answer's value, or None}."""
    truth, text = one_truth("math", data_source, ground_truth), answer_text(solution_str)
    boxed = last_boxed(text)
    right, pred = grade(text[-TAIL:] if boxed is None else boxed, truth, boxed is not None)
    return {"score": float(right), "pred": pred}
