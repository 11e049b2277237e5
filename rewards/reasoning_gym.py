"""Scorer for the tasks of reasoning-gym (rows of data/reasoning_gym.py): the task's own score_answer(answer, entry).

The ground truth is a JSON text {"task", "task_kwargs", "entry"}: what the task scores by. JSON has no tuples and no
keys but strings, and some scorers compare with ==, so dump_entry() marks both and load_entry() restores them.
The answer is what stands in the last <answer>...</answer>; without one, the last line that is not empty.
Some tasks give partial credit between 0 and 1. The scorers of EVALUATED call eval(), or sympy's parse_expr, which is
eval(), on what the model wrote: an answer that looks like code or has more than 10000 characters scores 0 and is not
passed on. That is a fence, not a wall, and 9**9**9**9 is no code: score these tasks in a process of their own, under a
time limit.
"""

import builtins
import json
import re
import unicodedata
from functools import lru_cache

import numpy as np
import reasoning_gym

from rewards.answers import last_tagged

EVALUATED = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}  # eval(answer)
EVALUATED |= {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
LONGEST = 10_000  # characters


def dump_entry(value):
    """`value` in JSON types: a tuple as {"__tuple__": [...]}, a dict with keys other than str as {"__dict__": pairs}.

    Raises TypeError on a value of any other type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple):
        return {"__tuple__": [dump_entry(item) for item in value]}
    if isinstance(value, list):
        return [dump_entry(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {key: dump_entry(item) for key, item in value.items()}
        return {"__dict__": [[dump_entry(key), dump_entry(item)] for key, item in value.items()]}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a {type(value).__name__} has no JSON form here")


def load_entry(value):
    """The inverse of dump_entry."""
    if isinstance(value, list):
        return [load_entry(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(load_entry(item) for item in value["__tuple__"])
        if value.keys() == {"__dict__"}:
            return {load_entry(key): load_entry(item) for key, item in value["__dict__"]}
        return {key: load_entry(item) for key, item in value.items()}
    return value


@lru_cache(maxsize=128)
def _task(name: str, kwargs_json: str):
    return reasoning_gym.create_dataset(name, **json.loads(kwargs_json))


def extract_answer(response: str) -> str:
    tagged = last_tagged(response)
    if tagged is not None:
        return tagged
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else ""


def looks_like_code(answer: str) -> bool:
    """Whether eval(answer) could do more than arithmetic: attributes, escapes, dunders, builtins."""
    text = unicodedata.normalize("NFKC", answer)  # as Python reads identifiers
    if "__" in text or "\\" in text or re.search(r"\.\s*[^\W\d]", text):
        return True
    names = set(re.findall(r"[^\W\d]\w*", text)) - {"abs"}
    return not names.isdisjoint(vars(builtins))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": the task's score in [0, 1], "pred": the answer or None, "scorer_error": 1.0 or 0.0}.

    Some tasks' scorers raise on an answer of the wrong form (prime_factorization on a word): score 0, scorer_error 1.
    """
    truth = json.loads(ground_truth)
    task = _task(truth["task"], json.dumps(truth["task_kwargs"], sort_keys=True))
    pred = extract_answer(solution_str)
    entry = load_entry(truth["entry"])
    if truth["task"] in EVALUATED and (len(pred) > LONGEST or looks_like_code(pred)):
        return {"score": 0.0, "pred": pred or None, "scorer_error": 0.0}
    try:
        return {"score": float(task.score_answer(pred, entry)), "pred": pred or None, "scorer_error": 0.0}
    except Exception:  # noqa: BLE001 whatever a hundred scorers raise; the answer is at fault, and it is counted
        return {"score": 0.0, "pred": pred or None, "scorer_error": 1.0}
