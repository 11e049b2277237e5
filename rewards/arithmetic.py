"""Scorer of the embedded tasks (data/toy.py and its like).

A response is right if the text after its last "=" is exactly the number: "12,12,4=422" and "=422" are right; "=0422",
"=422.", "=422 or 423" and "422" are not. The working before the "=" does not count.
"""

from rewards.answers import answer_text, one_truth


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the answer or None}."""
    _, sign, answer = answer_text(solution_str).rpartition("=")
    pred = answer.strip() if sign else ""
    return {"score": float(pred == one_truth("arithmetic", data_source, ground_truth)), "pred": pred or None}
