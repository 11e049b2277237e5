"""Scorer for GSM8K and other tasks whose answer is one number.

With method="strict" the answer is the number after the last "####", as the prompt of data/gsm8k.py asks. With
method="flexible" it is the last number of the response, whatever stands around it. Numbers are compared as exact
decimals, so 1,234 and $1234.00 are equal. A response without a number scores 0 with pred None. The ground truth may be
the whole solution, as in openai/gsm8k: what follows its last "####" counts.
"""

import re

from lib import InputError

NUMBER = r"(?:(?<![\w.])-)?(?:\\?\$)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
FLEXIBLE = re.compile(NUMBER)
STRICT = re.compile(rf"####\s*((?:\\?\$)?(?:{NUMBER}))")


def canonical(number: str) -> str:
    """ "$1,234.50" -> "1234.5", "-0.0" -> "0". It is text, not a float, so that no digit of a long number is lost."""
    digits = re.sub(r"[\\$,\s]", "", number).rstrip(".")
    sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits.removeprefix("+"))
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, method="strict", **kwargs) -> dict:
    """Returns {"score": 1.0 or 0.0, "pred": the number in canonical form, or None}."""
    if method not in ("strict", "flexible"):
        raise InputError(f"rewards/gsm8k.py: method={method!r}; use strict or flexible")
    found = (STRICT if method == "strict" else FLEXIBLE).findall(solution_str)
    pred = canonical(found[-1]) if found else None
    truth = str(ground_truth).rpartition("####")[2].strip()
    return {"score": float(pred == canonical(truth)), "pred": pred}
