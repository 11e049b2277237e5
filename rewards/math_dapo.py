r"""Scorer of DAPO-Math-17k and AIME as in DAPO (arXiv:2503.14476) and verl: 1 for a right answer, -1 for a wrong one.

The answer is the last line "Answer: ..." in the response's last 300 characters, as DAPO's prompt asks. With
strict_box_verify=True it is the last \boxed{...} there. It is compared as text after Minerva's normalisation
(arXiv:2206.14858): what follows the last =, without units, articles, \text{} or spaces, \frac12 as \frac{1}{2}. Numbers
are compared as exact decimals. verl 0.9.1 is stricter about numbers and marks: here 025 and 25.0 are 25, "34." is 34,
and **Answer:** is Answer:. verl is more lenient about the place: without such a line it takes a \boxed{...} in the last
100 characters, which is wrong here.

The paper and verl have -1 for a wrong answer, and dapo.py's overlong penalty is on that scale. With wrong_score=0.0 the
scores are 0 and 1.
"""

import re

from rewards.answers import last_boxed
from rewards.gsm8k import FLEXIBLE, canonical

TAIL = 300  # characters
LINE = re.compile(r"answer\**\s*:\**\s*([^\n]+)", re.IGNORECASE)
SUFFIX = re.compile(r"\\(?:text|mathrm)\s*\{\s*(?:m|s|th|\.)\s*\}(?:\^\{?[23]\}?)?")  # too short to be bare units
WRAPPED = re.compile(r"\\(?:text|textbf|mbox|mathrm|overline)\s*\{([^{}]*)\}")
UNITS = re.compile(
    r"\b(?:square|cm|km|gm|mph|inches|feet|meters|hours|minutes|degrees|dollars|cents|pounds|units|points|digits|ways"
    r"|integers|multiples|edges|students|meals)\b(?:\^\{?[23]\}?)?|\ban?\s",
)
MARKS = re.compile(r"\^(?:\\circ|\{\\circ\})|\\l?dots|\{,\}|,\\!|\\[!;, ()\[\]]|[$\"*\s]")


def normalise(answer: str) -> str:
    r""" "x = $\frac12$ cm." -> r"\frac{1}{2}", "1{,}000 dollars" -> "1000"."""
    boxed = last_boxed(answer)
    answer = (answer if boxed is None else boxed).rpartition("=")[2].replace("\\$", "")
    inline = re.search(r"\$([^$]*)\$", answer)
    answer = WRAPPED.sub(r" \1", SUFFIX.sub("", inline[1] if inline else answer))
    answer = MARKS.sub("", UNITS.sub("", answer)).rstrip(".")
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", re.sub(r"sqrt([^{])", r"sqrt{\1}", answer))
    return canonical(answer) if FLEXIBLE.fullmatch(answer) else answer


def compute_score(
    data_source,
    solution_str,
    ground_truth,
    extra_info=None,
    *,
    wrong_score=-1.0,
    strict_box_verify=False,
    **kwargs,
) -> dict:
    """Returns {"score": 1.0 or wrong_score, "acc": 1.0 or 0.0, "pred": the normalised answer or None}."""
    tail = solution_str[-TAIL:]
    if strict_box_verify:
        answer = last_boxed(tail)
    else:
        lines = LINE.findall(tail)
        answer = lines[-1] if lines else None
    pred = "" if answer is None else normalise(answer)
    right = pred != "" and pred == normalise(str(ground_truth))
    return {"score": 1.0 if right else wrong_score, "acc": float(right), "pred": pred or None}
