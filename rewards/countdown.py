"""Scorer for Countdown (Jiayi-Pan/Countdown-Tasks-3to4): reach a target with + - * / and each number exactly once.

The ground truth is {"target": 24, "numbers": [4, 6, 1]} or its JSON text. The equation is the content of the last
<answer>...</answer>, without "= 24". It is parsed, not run, and computed in fractions. As in TinyZero, any answer gets
at least format_score. Unlike there, × and ÷ are operators, ** and // are not, 1.5 does not use up 1 and 5, and a
thought holds no answer.
"""

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rewards.answers import answer_text, bad_truth, last_tagged

LONGEST = 300  # characters; bounds the depth of the parsed tree
OTHER_SIGNS = str.maketrans("×⋅·÷", "***/")
EQUATION = re.compile(r"[0-9+\-*/() \t\n]+")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS: dict[type[ast.AST], Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(equation: str) -> tuple[Fraction, list[int]]:
    """(the equation's value, its numbers in order). Raises ZeroDivisionError, or ValueError if it is no equation."""
    equation = equation.translate(OTHER_SIGNS)
    if len(equation) > LONGEST or not EQUATION.fullmatch(equation):
        raise ValueError("not an equation of numbers, + - * / and parentheses")
    numbers = []

    def value(node) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
            return SIGNS[type(node.op)](value(node.operand))
        if isinstance(node, ast.Constant):
            number: Any = node.value  # an int, see EQUATION
            numbers.append(number)
            return Fraction(number)
        raise ValueError("an operator other than + - * /")

    try:
        tree = ast.parse(" ".join(equation.split()), mode="eval")
    except (SyntaxError, MemoryError) as error:  # MemoryError: nested too deeply for the parser
        raise ValueError(str(error)) from error
    return value(tree.body), numbers


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, format_score=0.1, **kwargs) -> dict:
    """Returns {"score": 1.0, format_score for a wrong answer or 0.0 for none, "acc": 1.0 or 0.0, "pred": equation}.
    Raises InputError for a truth of another form."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        target = Fraction(str(truth["target"]))
        given = Counter(int(str(number).removesuffix(".0")) for number in truth["numbers"])
    except (ValueError, TypeError, LookupError, ZeroDivisionError):
        target, given = Fraction(0), Counter()
    if not given:
        raise bad_truth("countdown", data_source, ground_truth, 'numbers as {"target": 24, "numbers": [4, 6]}')
    equation = last_tagged(answer_text(solution_str))
    if equation is None:
        return {"score": 0.0, "acc": 0.0, "pred": None}
    try:
        value, numbers = evaluate(equation)
        right = value == target and Counter(numbers) == given
    except (ValueError, ZeroDivisionError):
        right = False
    return {"score": 1.0 if right else format_score, "acc": float(right), "pred": equation or None}
