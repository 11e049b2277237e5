"""Scorer of the embedded tasks (data/toy.py and its like).

A response is right if the text after its last "=" is exactly the number: "12,12,4=422" and "=422" are right; "=0422",
"=422.", "=422 or 423" and "422" are not. The working before the "=" does not count.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the answer or None}."""
    pred = solution_str.rpartition("=")[2].strip() or None if "=" in solution_str else None
    return {"score": float(pred == str(ground_truth)), "pred": pred}
