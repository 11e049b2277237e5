"""Scorer for questions answered with a few words (Natural Questions, TriviaQA, HotpotQA; Search-R1's rows).

The ground truth is one answer or a list of them, plain or as {"target": ...}. The prediction is the content of the last
<answer>...</answer>. Both are normalised as in SQuAD (arXiv:1606.05250): lower case, without ASCII punctuation and
without the words a, an and the. metric="em": 1 if the prediction equals an answer. metric="f1": the best F1 between its
words and those of an answer.

verl's verdict differs: it looks into thoughts, takes other dashes and quotes (1999–2003, Ocean’s) for other letters
than ASCII's, scores a response with more than ten <answer> a quarter, and two texts that vanish ("a", "?") as equal.
"""

import re
import string
from collections import Counter

from lib import InputError
from rewards.answers import answer_text, last_tagged, one_truth

PUNCTUATION = str.maketrans("", "", string.punctuation + "\u2014\u2015")  # other dashes are "-" by now


def normalise(text: str) -> str:
    """ "The Beatles!" -> "beatles"; a text that would vanish ("A", "?!") stays as it is."""
    words = re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()
    return " ".join(words) or text.strip().lower()


def f1(prediction: str, answer: str) -> float:
    """The F1 of two normalised texts as bags of words."""
    ours, theirs = Counter(prediction.split()), Counter(answer.split())
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, metric="em", **kwargs) -> dict:
    """Returns {"score": the metric in [0, 1], "pred": the normalised prediction, or None}.

    Raises InputError: the metric is unknown, or the row has no answer, or one that is no text or number.
    """
    if metric not in ("em", "f1"):
        raise InputError(f"rewards/search_qa.py: metric={metric!r}; use em or f1")
    truths = ground_truth.get("target", []) if isinstance(ground_truth, dict) else ground_truth
    truths = truths.tolist() if hasattr(truths, "tolist") else truths  # numpy, from parquet
    truths = truths if isinstance(truths, list | tuple) else [truths]
    answers = [normalise(one_truth("search_qa", data_source, truth)) for truth in truths if truth != ""]
    if not answers:
        raise InputError(f"rewards/search_qa.py: a row of {data_source} has no answer: {ground_truth!r}")
    pred = normalise(last_tagged(answer_text(solution_str)) or "")
    score = max(float(pred == answer) if metric == "em" else f1(pred, answer) for answer in answers)
    return {"score": score, "pred": pred or None}
