r"""Scorer for multiple choice (MMLU, MMLU-Pro, GPQA, ARC): the letter, A to J, that the response commits itself to.

The statement of the answer is the last \boxed{...}; else the last <answer>...</answer>; else what follows the last
"answer is", "answer:" or "correct option is" in its line; else the whole response if it is one line. A statement begins
with the letter: B, (b), B., B) Paris, \text{B}, "option B because ...", "I think it is B". One without a letter, as
\boxed{E = mc^2} or "the answer: see above", gives way to an earlier one. Two letters, as in "A or B", are not an
answer, and the words A and I are not letters. The truth is a letter: B, (b), "B) Paris".
"""

import re

from rewards.answers import answer_text, bad_truth, boxes, last_tagged, one_truth

LINE = re.compile(
    r"(?:answer(?: choice| option)?|(?:correct|right|best) (?:choice|option))[\"'*]*\s*(?::|=|-|\bis\b|\n)[\s:]*"
    r"(?=([^\n]{0,200}))",  # ahead, as another may follow in the line: "Answer: by the above, the answer is B"
    re.IGNORECASE,
)
LONGEST = 200  # characters of a statement
WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\b|[\\{}$*\"'`\[\]<>]")
FILLER = re.compile(
    r"""(?: \b(?:i|we)\s+(?:(?:would|d|will|ll)\s+)?(?:think|believe|guess|say|choose|chose|pick|select|go\s+with)\b
      | \b(?:i|we)\s+(?:am|m|are|re)\s+(?:\w{1,20}\s+)?(?:sure|certain|confident)\b
      | \b(?:it|this|that|the|my|correct|right|best|final|answer|option|choice|letter|is|was|s|must|should|would
            |could|may|might|be|probably|likely|most|clearly|definitely|certainly|therefore|thus|so|hence)\b
      | [\s:,=→✅-] )*""",
    re.IGNORECASE | re.VERBOSE,
)
LETTER = re.compile(
    r"""(?: \(\s*([A-J])\s*\)                              # (B)
      | ([A-J])(?=\s*(?:[.):,;!|]|[/&]\s*\(?[A-J]\b|-\s|\u2014|$)|\s+\(\w\w)  # B.   B) Paris   B - Paris   B (Paris)
      | ((?-i:[B-HJ]))(?=\s+\w\w)                # B which
      | ((?-i:[AI]))(?=\s+(?:because|since|as|and|or|is)\b)
    )(?!\s+is\s+(?:not|wrong|incorrect|false)\b)""",
    re.IGNORECASE | re.VERBOSE,
)
ANOTHER = re.compile(  # A or B
    r"""[\s.):]* (?:\(\s*)? (?: [,;/&+|] | \b(?:or|and|vs|then)\b ) [\s.]* (?:(?:or|and|maybe|possibly|perhaps)\b)? \s*
    (?:(?:option|choice)\s+)? (?: \([A-J]\) | (?-i:[A-J])(?!\w) )""",
    re.IGNORECASE | re.VERBOSE,
)


def letter_in(statement: str) -> str | None:
    """The letter in upper case; "" for more than one; None if the statement does not begin with a letter."""
    statement = WRAPPING.sub(" ", statement[:LONGEST])
    found = LETTER.match(statement, FILLER.match(statement).end())
    if not found:
        return None
    return "" if ANOTHER.match(statement, found.end()) else next(filter(None, found.groups())).upper()


def extract_letter(response: str) -> str:
    """The letter in upper case; "" if there is none or more than one."""
    text = answer_text(response).strip()
    statements = [text[start : min(end, start + LONGEST)] for start, end in reversed(boxes(text))]
    statements += [last_tagged(text) or "", *reversed(LINE.findall(text)), text if "\n" not in text else ""]
    return next((letter for letter in map(letter_in, statements) if letter is not None), "")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the letter or None}. Raises InputError if the truth is not a letter."""
    truth = letter_in(one_truth("multiple_choice", data_source, ground_truth, "a letter A to J"))
    if not truth:
        raise bad_truth("multiple_choice", data_source, ground_truth, "a letter A to J")
    pred = extract_letter(solution_str)
    return {"score": float(pred == truth), "pred": pred or None}
