r"""Scorer for mathematics: the response's last \boxed{...}, or without one what math-verify finds in it.

math-verify (LaTeX -> sympy, then equality of expressions, sets, intervals, equations, matrices) decides. Units do not
count, and 10 % is both 10 and 0.1. Its time may be quadratic in a text's length: a boxed answer of more than 1000
characters is only compared as text (the longest in MATH-500 has 159), and a response without one is searched in its
last 10000. math-verify's time limits are SIGALRM, which works only in the main thread; in any other thread they are
off, and the caller must hold the limit. In the main thread they replace an alarm already set. The name is safe while it
is imported as rewards.math: never put rewards/ itself on sys.path.
"""

import threading

from math_verify import parse, verify

from rewards.answers import last_boxed

LONGEST, TAIL = 1000, 10_000  # characters


def _seconds() -> int | None:
    return 5 if threading.current_thread() is threading.main_thread() else None


def _parse(text: str) -> list:
    return parse(text, parsing_timeout=_seconds())


def _verify(gold: list, answer: list) -> bool:
    return bool(gold and answer) and verify(gold, answer, timeout_seconds=_seconds())


def equal(answer: str, truth: str) -> bool:
    """Whether math-verify takes the LaTeX `answer` for `truth`; "" is never right."""
    if answer == truth or max(len(answer), len(truth)) > LONGEST:
        return answer == truth != ""
    return _verify(_parse(f"\\boxed{{{truth}}}"), _parse(f"\\boxed{{{answer}}}"))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the answer as the response writes it, None if it has none}."""
    truth, pred = str(ground_truth).strip(), last_boxed(solution_str)
    if pred is not None:
        return {"score": float(equal(pred, truth)), "pred": pred or None}
    found = _parse(solution_str[-TAIL:])
    pred = str(found[-1]).strip() if found else ""
    right = pred != "" and (pred == truth or _verify(_parse(f"\\boxed{{{truth}}}"), found))
    return {"score": float(right), "pred": pred or None}
