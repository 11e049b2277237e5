"""Scorer for the tasks of reasoning-gym (rows of data/reasoning_gym.py): the task's own score_answer(answer, entry).

The ground truth is a JSON text {"task", "task_kwargs", "entry"}, by which the task scores. Some scorers compare with
==, but JSON has no tuples, and its keys are all strings. So dump_entry() marks tuples and other keys, and load_entry()
restores them. The answer is the content of the last <answer>...</answer> or, without one, the last line that is not
empty, after the thoughts; with ASCII's signs and no emphasis, unless the task's own answer has others. Some tasks give
partial credit between 0 and 1.

Nothing that the model wrote is run. Nine scorers of reasoning-gym 0.1.25 call eval() on the answer, or sympy's
parse_expr, which uses eval(). For the tasks in LISTS, they get a literal that was parsed and written again here. The
other tasks are scored here (OWN). OWN also has three tasks whose scorers give 1 to the same answer whatever the
question is: nan, 0, anything.
"""

import ast
import json
import math
from collections import Counter
from fractions import Fraction
from functools import lru_cache

import numpy as np
import reasoning_gym
import sympy
from reasoning_gym.algebra.complex_arithmetic import ComplexArithmeticDataset

from rewards.algebra import algebra
from rewards.answers import answer_text, bad_truth, last_answer, without_thoughts
from rewards.countdown import evaluate

LISTS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}  # a Python list gets partial credit
LONGEST = 10_000  # characters of such a list
UNBOUNDED = {"simple_integration", "intermediate_integration"}  # sympy.simplify may not end: needs a time limit


def dump_entry(value):
    """`value` in JSON types: a tuple as {"__tuple__": [...]}, a Fraction as {"__fraction__": [1, 2]}, a dict with keys
    other than str as {"__dict__": pairs}.

    Raises TypeError on a value of any other type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple):
        return {"__tuple__": [dump_entry(item) for item in value]}
    if isinstance(value, Fraction):
        return {"__fraction__": value.as_integer_ratio()}
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
        if value.keys() == {"__fraction__"}:
            return Fraction(*value["__fraction__"])
        if value.keys() == {"__dict__"}:
            return {load_entry(key): load_entry(item) for key, item in value["__dict__"]}
        return {key: load_entry(item) for key, item in value.items()}
    return value


@lru_cache(maxsize=128)
def _task(name: str, kwargs_json: str):
    return reasoning_gym.create_dataset(name, **json.loads(kwargs_json))


def extract_answer(response: str) -> str:
    return last_answer(without_thoughts(response))


def _as_literal(answer: str, entry: dict) -> str:
    """The answer itself if it is right as it stands, else its literal. Raises ValueError if it is no literal."""
    if answer in (entry["answer"].strip(), *entry["metadata"].get("valid_answers", ())):
        return answer
    if len(answer) > LONGEST or "#" in answer:
        raise ValueError(f"a comment, or more than {LONGEST} characters")
    try:
        return repr(ast.literal_eval(answer))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


# ---- these replace upstream's scorers: (answer, entry) -> score. An exception counts as 0 ----


def _use_all(answer: str, entry: dict, target: int, wrong: float) -> float:
    value, numbers = evaluate(answer)
    right = value == target and Counter(numbers) == Counter(entry["metadata"]["numbers"])
    return 1.0 if right else wrong


def _integral(answer: str, entry: dict) -> float:
    variable = sympy.Symbol(entry["metadata"]["variable"])
    difference = sympy.diff(algebra(answer), variable) - algebra(entry["metadata"]["integrand"])
    return float(sympy.simplify(difference) == 0)


def _complex(answer: str, entry: dict) -> float:
    value = ComplexArithmeticDataset.parse_string_to_complex(answer)
    return math.exp(-abs(value - complex(*entry["metadata"]["result"])))


def _coin_flip(answer: str, entry: dict) -> float:
    """The answer must be right to 0.1 %. Upstream gives partial credit for equal first digits, and so 1 for "0"."""
    if len(answer) > 30 or "e" in answer.lower().replace("e-", ""):  # 1e999999999 would have that many digits
        raise ValueError("not a probability")
    return float(math.isclose(Fraction(answer.replace(",", "")), float(entry["answer"]), rel_tol=1e-3))


OWN = {
    "puzzle24": lambda answer, entry: _use_all(answer, entry, 24, wrong=0.01),
    "countdown": lambda answer, entry: _use_all(answer, entry, entry["metadata"]["target"], wrong=0.05),
    "simple_integration": _integral,
    "intermediate_integration": _integral,
    "polynomial_multiplication": lambda answer, entry: float(algebra(answer) == algebra(entry["answer"])),
    "complex_arithmetic": _complex,
    "coin_flip": _coin_flip,
    "game_of_life_halting": lambda answer, entry: float(answer == entry["answer"]),
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": the task's score in [0, 1], "pred": the answer or None, "scorer_error": 1.0 or 0.0}.

    Some tasks' scorers raise on an answer of the wrong form (prime_factorization on a word). This gives score 0 and
    scorer_error 1. Raises InputError for a truth of another form.
    """
    try:
        truth = json.loads(ground_truth)
        name, kwargs, entry = truth["task"], truth["task_kwargs"], load_entry(truth["entry"])
    except (ValueError, TypeError, LookupError):
        raise bad_truth("reasoning_gym", data_source, ground_truth, "rows of data/reasoning_gym.py") from None
    pred = extract_answer(solution_str)
    if answer_text(str(entry["answer"])) == str(entry["answer"]):
        pred = answer_text(pred).strip()
    result = {"score": 0.0, "pred": pred or None, "scorer_error": 0.0}
    if name in LISTS:
        try:
            pred = _as_literal(pred, entry)
        except ValueError:
            return result
    score_answer = OWN.get(name) or _task(name, json.dumps(kwargs, sort_keys=True)).score_answer
    try:
        score = float(score_answer(pred, entry))
    except Exception:  # noqa: BLE001 a hundred scorers may raise anything; the answer is at fault, and is counted
        return result | {"scorer_error": float(name not in OWN)}
    return result | {"score": score if math.isfinite(score) else 0.0}
