"""Scorer for answers that may be partly right, such as a reversed text: how similar answer and truth are, from 0 to 1.

The answer is the content of the last <answer>...</answer> or, without one, the last line that is not empty.
"""

from difflib import SequenceMatcher

from rewards.answers import answer_text, last_answer, one_truth


def similarity(answer: str, truth: str) -> float:
    """Twice the number of matching characters, in blocks (difflib's ratio), over the characters of both. The answer may
    be any text: what follows twice the truth's length counts as characters without a match, which bounds the time."""
    matcher = SequenceMatcher(None, answer[: 2 * len(truth)], truth, autojunk=False)
    matching = sum(block.size for block in matcher.get_matching_blocks())
    return 2 * matching / (len(answer) + len(truth))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": similarity, "exact": 1.0 or 0.0, "pred": the answer or None}. Raises InputError if the truth is
    not one text."""
    truth = one_truth("similarity", data_source, ground_truth, "one text")
    pred = last_answer(answer_text(solution_str))
    return {"score": similarity(pred, truth), "exact": float(pred == truth), "pred": pred or None}
