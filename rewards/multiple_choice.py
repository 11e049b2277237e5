r"""Scorer for multiple choice (MMLU, MMLU-Pro, GPQA, ARC): the letter, A to J, that the response commits itself to.

The statement of the answer is the last \boxed{...}; else the last <answer>...</answer>; else what follows the last
"answer is" or "answer:" in its line; else the whole response if it is one line. The statement must begin with the
letter: B, (b), B., B) Paris, \text{B}, "option B because ...". Two letters, as in "A or B", are not an answer, and the
words A and I are not letters.
"""

import re

from lib import InputError
from rewards.answers import last_boxed, last_tagged

LINE = re.compile(r"answer(?: choice| option)?\**\s*(?::|\bis\b)[\s:]*([^\n]*)", re.IGNORECASE)
WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\b|[\\{}$*]")
LETTER = re.compile(
    r"""\s*(?:(?:option|choice|letter)\s+)?
    (?: \(([A-J])\)                              # (B)
      | ([A-J])(?=\s*(?:[.):,;/&]|$))            # B.   B) Paris
      | ((?-i:[B-HJ]))(?=\s+\w\w)                # B which
      | ((?-i:[AI]))(?=\s+(?:because|since|as|and|or)\b)
    )
    (?! [\s.):]* (?:[,;/&]|\bor\b|\band\b) \s* (?:or\b|and\b)? \s* (?:\([A-J]\)|(?-i:[A-J])(?!\w)) )  # A or B
    """,
    re.IGNORECASE | re.VERBOSE,
)


def extract_letter(response: str) -> str:
    """The letter in upper case; "" if there is none or more than one."""
    statement = last_boxed(response)
    if statement is None:
        statement = last_tagged(response)
    if statement is None:
        lines = LINE.findall(response)
        text = response.strip()
        statement = lines[-1] if lines else text if "\n" not in text else ""
    found = LETTER.match(WRAPPING.sub(" ", statement).strip())
    return next(filter(None, found.groups())).upper() if found else ""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the letter or None}. Raises InputError if the truth is not a letter."""
    truth = str(ground_truth).strip(" ().").upper()
    if not re.fullmatch("[A-J]", truth):
        raise InputError(
            f"rewards/multiple_choice.py: {data_source} has {ground_truth!r} as truth; give a letter A to J"
        )
    pred = extract_letter(solution_str)
    return {"score": float(pred == truth), "pred": pred or None}
