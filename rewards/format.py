"""Scores only a response's form. Mix it with other scorers: --reward data_source rewards/format.py:compute_score.

Without a pattern, a response must be <think>...</think> and then <answer>...</answer>, or other `tags` in their order.
Each tag must occur once and not be empty, with only white space around the tags. A first <think> may be missing: then
it is part of the prompt, as in many chat templates. With a pattern, the whole response
must match it (re, dot matches newline). Only the reward pool's time limit stops a pattern that backtracks without end.
"""

import re
from functools import lru_cache

from lib import InputError
from rewards.answers import MARK


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise InputError(f"rewards/format.py: pattern={pattern!r} is no regular expression: {error}") from error


def has_tags(text: str, tags) -> bool:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if marks[0] not in text and MARK.fullmatch(marks[0]):
        text = marks[0] + text
    if any(text.count(mark) != 1 for mark in marks):
        return False
    parts = _compiled("(.*)".join(map(re.escape, marks))).fullmatch(text.strip())
    if parts is None:
        return False
    inside, between = parts.groups()[::2], parts.groups()[1::2]
    return all(map(str.strip, inside)) and not any(map(str.strip, between))


def compute_score(
    data_source, solution_str, ground_truth=None, extra_info=None, *, tags=("think", "answer"), pattern=None, **kwargs
) -> dict:
    """Returns {"score": 1.0 or 0.0}. Raises InputError if the pattern is not a regular expression."""
    if pattern is not None:
        return {"score": float(_compiled(pattern).fullmatch(solution_str) is not None)}
    return {"score": float(has_tags(solution_str, tags))}
