r"""Scorer of DAPO-Math-17k and AIME as in DAPO (arXiv:2503.14476) and verl: 1 for a right answer, -1 for a wrong one.

The answer is the last line "Answer: ..." in the response's last 300 characters, as DAPO's prompt asks. With
strict_box_verify=True it is the last \boxed{...} there. It is compared as text after Minerva's normalisation
(arXiv:2206.14858): what follows the last =, without units, articles, \text{} or spaces, \frac12 as \frac{1}{2}. Numbers
are compared exactly. The truth is a text or a number.

verl 0.9.1's verdict differs. It is stricter about numbers and marks: here 025, 25.0, +25 and 2.5e1 are 25, "34." is 34,
and **Answer:** is Answer:. It reads "3 4" as 34, which is wrong here (12 345 is 12345). It takes the last "answer:"
anywhere; here one within a sentence, or with words alone, gives way to an earlier line "Answer: 34". It looks into
thoughts. And without such a line some versions take a \boxed{...} in the last 100 characters, which is wrong here.

The paper and verl have -1 for a wrong answer, and dapo.py's overlong penalty is on that scale. With wrong_score=0.0 the
scores are 0 and 1.
"""

import re

from rewards.answers import answer_text, bad_truth, last_boxed, one_truth
from rewards.gsm8k import FLEXIBLE, SPACED, canonical

TAIL = 300  # characters
LINE = re.compile(
    r"(?:^([^\w\n]*(?:(?:so|thus|the|my|final|correct)\b,? ?)*))?answer\**\s*:\**\s*(\S[^\n]*)", re.I | re.M
)
SUFFIX = re.compile(r"\\(?:text|mathrm)\s*\{\s*(?:m|s|th|\.)\s*\}(?:\^\{?[23]\}?)?")  # too short to be bare units
WRAPPED = re.compile(r"\\(?:text|textbf|mbox|mathrm|overline)\s*\{([^{}]*)\}")
UNITS = re.compile(
    r"\b(?:square|cm|km|gm|mph|inches|feet|meters|hours|minutes|degrees|dollars|cents|pounds|units|points|digits|ways"
    r"|integers|multiples|edges|students|meals)\b(?:\^\{?[23]\}?)?|\ban?\s",
)
SPACES = re.compile(r"(?:\\[;,: ]|\\q?quad\b|[\s~])+")
MARKS = re.compile(r"\^(?:\\circ|\{\\circ\})|\\l?dots|\{,\}|,\\!|\\[!()\[\]]|[$\"*°]")


def normalise(answer: str) -> str:
    r""" "x = $\frac12$ cm." -> r"\frac{1}{2}", "1{,}000 dollars" -> "1000"."""
    boxed = last_boxed(answer)
    answer = (answer if boxed is None else boxed).rpartition("=")[2].replace("\\$", "")
    inline = re.search(r"\$([^$]+)\$", answer)
    answer = WRAPPED.sub(r" \1", SUFFIX.sub("", inline[1] if inline else answer))
    answer = SPACES.sub(" ", MARKS.sub("", UNITS.sub("", answer)))
    answer = SPACED.sub(lambda number: number[0].replace(" ", ""), answer)
    answer = re.sub(r"(?<!\d) | (?!\d)", "", answer).rstrip(".")  # a space between two digits stays
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", re.sub(r"sqrt([^{])", r"sqrt{\1}", answer))
    number = answer.removeprefix("+")
    return canonical(number) if FLEXIBLE.fullmatch(number) else answer


def stated(text: str) -> str | None:
    """What follows the last "answer:" that begins a line, or without one the last anywhere. Words alone give way to an
    earlier one with a formula or a number."""
    found = [*LINE.finditer(text)]
    found = [line for line in found if line[1] is not None] or found
    lines = [line[2] for line in found]
    formulas = [line for line in lines if re.search(r"[\d\\$]", line) or len(re.findall(r"[^\W\d]{2,}", line)) < 2]
    return (formulas or lines or [None])[-1]


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
    """Returns {"score": 1.0 or wrong_score, "acc": 1.0 or 0.0, "pred": the normalised answer or None}. Raises
    InputError if the truth is not one text or number."""
    truth = normalise(one_truth("math_dapo", data_source, ground_truth))
    if not truth:
        raise bad_truth("math_dapo", data_source, ground_truth, "a text or number that is more than a unit")
    tail = answer_text(solution_str)[-TAIL:]
    answer = last_boxed(tail) if strict_box_verify else stated(tail)
    pred = "" if answer is None else normalise(answer)
    right = pred == truth
    return {"score": 1.0 if right else wrong_score, "acc": float(right), "pred": pred or None}
