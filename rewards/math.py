r"""Scorer for mathematics: takes the response's last \boxed{...} or, without one, what math-verify finds in it.

math-verify (LaTeX -> sympy, then equality of expressions, sets, intervals, equations, matrices) decides. Units do not
count, and 10 % is both 10 and 0.1. A process in the sandbox that does not know the truth reads the model's text
(rewards/_math.py). Its result, which is data, is compared here. A plain number is read here, which is safe.

math-verify's time may be quadratic in a text's length. So a boxed answer of more than 1000 characters is only compared
as text (the longest in MATH-500 has 159), and of a response without a box only the last 10000 characters are searched.
The comparison's time limit uses SIGALRM, which works only in the main thread, and replaces an alarm that is already set
there. In any other thread it is off, and the caller must keep the limit. This file is named like a standard module, so
import it as rewards.math: never put rewards/ itself on sys.path.
"""

import re
import threading
from functools import lru_cache

from math_verify import parse, verify

from lib.sandbox import evaluate
from rewards import _math
from rewards.answers import answer_text, last_boxed, one_truth

LONGEST, TAIL = 1000, 10_000  # characters
NUMBER = re.compile(r"\\boxed\{-?[0-9][0-9.,/]{0,40}\}")
PACKAGES = ("math_verify", "latex2sympy2_extended", "antlr4", "sympy", "mpmath")


def _seconds() -> int | None:
    return _math.SECONDS if threading.current_thread() is threading.main_thread() else None


@lru_cache(maxsize=1024)
def _parse_here(text: str) -> list:
    return parse(text, parsing_timeout=_seconds())


def _parse(text: str) -> list:
    """What math-verify finds in a text that the model wrote."""
    if NUMBER.fullmatch(text):
        return _parse_here(text)
    found = evaluate("rewards._math:read", text, 2 * _math.SECONDS, PACKAGES) or []
    try:
        return [_math.load(data) for data in found]
    except Exception:  # noqa: BLE001 sympy may raise anything on arguments that the sandbox made up
        return []


def _verify(truth: str, answer: list) -> bool:
    gold = _parse_here(f"\\boxed{{{truth}}}")
    return bool(gold and answer) and verify(gold, answer, timeout_seconds=_seconds())


def equal(answer: str, truth: str) -> bool:
    """Whether the LaTeX `answer` equals `truth` by math-verify. "" is never right."""
    if answer == truth or max(len(answer), len(truth)) > LONGEST:
        return answer == truth != ""
    return _verify(truth, _parse(f"\\boxed{{{answer}}}"))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the answer as the response writes it, or None}."""
    solution_str, truth = answer_text(solution_str), one_truth("math", data_source, ground_truth)
    pred = last_boxed(solution_str)
    if pred is not None:
        return {"score": float(equal(pred, truth)), "pred": pred or None}
    found = _parse(solution_str[-TAIL:])
    pred = str(found[-1]).strip() if found else ""
    right = pred != "" and (pred == truth or _verify(truth, found))
    return {"score": float(right), "pred": pred or None}
