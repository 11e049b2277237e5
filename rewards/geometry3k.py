r"""Scorer for Geometry3K (arXiv:2105.04165) in verl's form: <think>...</think>, then the answer in \boxed{}.

A right answer gives 1 - format_score, whatever is around it; the right form gives format_score. Answers are
compared as in rewards/math.py, but only a boxed answer counts.
"""

from rewards.answers import answer_text, last_boxed, one_truth
from rewards.math import grade


def has_form(response: str) -> bool:
    r"""Whether the response starts with <think> (or within the thought, as behind a prompt that ends with <think>), and
    later has </think> and then \boxed{...}."""
    thought, closed, rest = response.partition("</think>")
    return bool(closed) and thought.find("<think>") <= 0 and "}" in rest.partition("\\boxed{")[2]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, format_score=0.1, **kwargs) -> dict:
    """Returns {"score": in [0, 1], "acc": 1.0 or 0.0, "format": 1.0 or 0.0, "pred": as in rewards/math.py}."""
    right, pred = grade(last_boxed(answer_text(solution_str)) or "", one_truth("geometry3k", data_source, ground_truth))
    acc, form = float(right), float(has_form(solution_str))
    return {"score": (1 - format_score) * acc + format_score * form, "acc": acc, "format": form, "pred": pred}
