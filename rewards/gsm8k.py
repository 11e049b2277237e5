"""Scorer for GSM8K and other tasks whose answer is one number.

With method="strict" the answer is the number after the last "####", as the prompt of data/gsm8k.py asks: 18, -3,
1,234.50, 1.8e1, with a currency, unit or remark around it. With method="flexible" it is the last number of the
response, whatever stands around it. Numbers are compared exactly, so 1,234 and $1234.00 are equal. A response without a
number scores 0 with pred None. The ground truth is one number, also with its unit, or the whole solution, as in
openai/gsm8k: what follows its last "####" counts.

verl's verdict differs: it takes the first number after "####" where there are more or a calculation (18/2, 18 or 19,
18 thousand: no answer here, and 9*2 = 18 is 18). It reads 5e3 as 5, and "18." as another text than 18. It needs the
number directly after "#### " (here also ####18, = 18, $18, **18**, \\boxed{18}, Answer: 18). It looks into thoughts,
and in some versions only at the first "####" or the last 300 characters.
"""

import re

from lib import InputError
from rewards.answers import answer_text, bad_truth, last_boxed, one_truth

LONGEST = 1000  # characters of a statement
GROUPED = r"\d{1,3}(?:(?:,|\{,\}|,?\\[,!]|['_])\d{3})+(?!\d)"  # 1,234  1{,}234  1\,234  1'234
NUMBER = rf"(?:(?<![\w.])-)?(?:\\?[$€£¥₹] ?-?)?(?:(?:{GROUPED}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\w))?"
FLEXIBLE = re.compile(NUMBER)
SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\b|\\[()\[\]]|[{}\"]")
LEAD = re.compile(
    r"(?:[\s:=>→(\[<*_#]|->)*(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|:|=)?)?[\s:=(\[]*\+?", re.IGNORECASE
)
POWER_OF_TEN = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|[×·x*])\s*10\s*\^\s*([-+]?\d{1,3})(?!\w)")
NOT_ONE_NUMBER = re.compile(
    r"""[.,:]?\d | \s*(?:[,;&|→]|->|=>)\s*[-$]?\d | \s+-?[$\d] | \s*[²³¹⁰⁴-⁹¼-¾⅐-⅞]  # 1.2.3   18:30   18, 19   18 1/2
      | \s*(?:\*\*?|[-/^+×÷·⋅±√=]|\\(?:times|cdot|div|pm)\b|[xX](?=\s*\d))\s*[-$]?[\d(.=]  # 18/2   18 - 20   18 = 9 * 2
      | \s*\\(?:frac|sqrt)\b | [xyzni]\b                          # 18\sqrt{2}   18x
      | \s*(?:[kKMB]|bn|hundred|thousand|million|billion|dozen)\b | \s*(?:\\?%|percent)\s*of\b
      # 18 or 19, 18 eggs - 2 eggs, 18 and a half
      | (?:\s+[^\W\d]{1,20}|\\?%){0,2}\s+\(?(?:(?:or|and|to|plus|minus|times)\s|[-+*/×÷])\s*(?:[-$]?\d|a\ half)
    """,
    re.VERBOSE,
)


def canonical(number: str) -> str:
    """ "$1,234.50" -> "1234.5", "-0.0" -> "0", "1.8e1" -> "18". It is text, so that no digit is lost."""
    digits, _, exponent = re.sub(r"[^\d.eE+-]", "", number).lower().partition("e")
    sign, digits = "-" if "-" in digits else "", digits.strip("+-")
    whole, _, fraction = digits.rstrip(".").partition(".")
    shift = int(exponent or 0)
    if shift > 0:
        whole, fraction = whole + fraction[:shift].ljust(shift, "0"), fraction[shift:]
    elif shift < 0:
        whole = whole.rjust(-shift + 1, "0")
        whole, fraction = whole[:shift], whole[shift:] + fraction
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value


def read_number(statement: str) -> str | None:
    """The one number that the statement begins with, or that follows its last "="; "" if it begins with a number and
    has more than one; None if it does not begin with a number."""
    statement = statement[:LONGEST].replace("{,}", ",")
    statement = WRAPPING.sub(" ", last_boxed(statement) or statement)
    statement = POWER_OF_TEN.sub(r"e\1", " ".join(statement.split()))
    statement = SPACED.sub(lambda number: number[0].replace(" ", ""), statement)
    statement = re.sub(r"(?<!\w)- (?=[\d.$])", "-", statement)
    found = None
    for part in (statement, statement.rpartition("=")[2]):
        if number := FLEXIBLE.match(part, LEAD.match(part).end()):
            if not NOT_ONE_NUMBER.match(part, number.end()):
                return canonical(number[0])
            found = ""
    return found


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, method="strict", **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the number in canonical form, or None}. Raises InputError if the truth is
    not one number."""
    if method not in ("strict", "flexible"):
        raise InputError(f"rewards/gsm8k.py: method={method!r}; use strict or flexible")
    truth = read_number(one_truth("gsm8k", data_source, ground_truth).rpartition("####")[2])
    if not truth:
        raise bad_truth("gsm8k", data_source, ground_truth, "one number")
    text = answer_text(solution_str)
    if method == "strict":
        parts = reversed(text.split("####")[1:])
        statements = (part[LEAD.match(part).end() :].partition("\n")[0] for part in parts)
        pred = next((number for number in map(read_number, statements) if number is not None), None)
    else:
        pred = next((canonical(number) for number in reversed(FLEXIBLE.findall(text))), None)
    return {"score": float(pred == truth), "pred": pred or None}
