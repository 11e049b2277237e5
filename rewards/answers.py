r"""Finds the answer in a response. Every scorer reads the response through answer_text(), so that all treat thoughts,
turns, signs, spaces and Markdown alike, and its truth through one_truth(). Takes time linear in the length.
"""

import json
import math
import re
import unicodedata
from contextlib import suppress

from lib import InputError

BRACES = re.compile(r"(\\boxed\{)|\\(?!\\boxed\{).|([{}])", re.DOTALL)  # \{ and \} are not groups

# ---- thoughts ----

TAG = r"(?:\w{1,20}[:_|])?(?:think(?:ing|_fast|_faster)?|thoughts?|reasoning|reflection|scratchpad)(?::[^<>\s]{1,40})?"
PAIRS = (
    ("[THINK]", "[/THINK]"),  # Mistral
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # Sky-T1, OpenThinker
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|channel|>analysis", "<|channel|>final"),  # gpt-oss
    ("<|channel|>commentary", "<|channel|>final"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<unused94>", "<unused95>"),  # MedGemma
)
CLOSED_BY = {opens.lower(): closes.lower() for opens, closes in PAIRS}
CLOSES = {*CLOSED_BY.values()}
MARK = re.compile(f"</?{TAG}>|" + "|".join(map(re.escape, {mark for pair in PAIRS for mark in pair})), re.IGNORECASE)


def without_thoughts(response: str) -> str:
    """The response without thoughts: between <think> and </think> or another model's marks; before a </think> whose
    <think> is part of the prompt; after a <think> that is never closed. In a thought only its own end counts."""
    kept: list[str] = []
    start, closed_by = 0, ""
    for mark in MARK.finditer(response):
        name = mark[0].lower()
        if name == closed_by:
            start, closed_by = mark.end(), ""
        elif not closed_by and (name in CLOSES or name.startswith("</")):
            kept, start = [], mark.end()
        elif not closed_by:
            kept.append(response[start : mark.start()])
            closed_by = CLOSED_BY.get(name) or f"</{name[1:]}"
    return "\n".join(kept if closed_by else [*kept, response[start:]])


# ---- characters ----

_FORMS = [*range(0xFF01, 0xFF5F), *range(0x1D400, 0x1D800)]  # fullwidth characters; bold and other letters and digits
CHARACTERS = {code: unicodedata.normalize("NFKC", chr(code)) for code in _FORMS}
CHARACTERS |= dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe58\ufe63\uff0d\u2796"), "-")
CHARACTERS |= dict.fromkeys([0x09, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " ")
CHARACTERS |= dict.fromkeys(map(ord, "\r\v\f\x85\u2028\u2029"), "\n")
CHARACTERS |= dict.fromkeys([0xAD, 0x2060, 0xFEFF, *range(0x200B, 0x2010), *range(0x202A, 0x202F)], "")  # not visible
CHARACTERS |= dict.fromkeys(map(ord, "‘’‚‛"), "'") | dict.fromkeys(map(ord, "“”„‟"), '"')
CHARACTERS |= dict(zip(map(ord, "⁄∕∗∶。、【】〔〕「」『』"), "//*:.,[][][][]"))
THOUSANDS = re.compile("(?<![\\d.,])\\d{1,3}(?:[\u00a0\u2007\u2008\u2009\u202f]\\d{3})+(?!\\d)")
LONG_DASH_AS_SIGN = re.compile(r"(?<!\w)[\u2014\u2015](?=[\d.$\\])")


def plain(text: str) -> str:
    """With ASCII for other forms of signs, dashes, quotes, digits, letters, brackets and spaces; 12 345 with thin
    spaces is 12345. A long dash is a minus only directly before a number, with no word before it."""
    if not text.isascii():
        text = THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
        text = LONG_DASH_AS_SIGN.sub("-", text)
    return text.translate(CHARACTERS)


TURN = re.compile(r"<\|[^<>|\n]{1,40}\|>|</?s>|<eos>|<(?:start|end)_of_turn>|<turn\|>|\[/?INST\]")  # where a turn ends
BEFORE = r"""(?<![^\s>"'(\[{:=#$*_])(?<![\d)\]}] )"""  # so that 2**3 and 2 *3* 4 stay
EMPHASIS = [
    re.compile(rf"{BEFORE}({mark})(?![\s{sign}',;:)])({inside}*(?<![\s{sign}]))\1(?![^\W_]|{re.escape(sign)})")
    for mark, sign, inside in (
        (r"\*{2,3}", "*", r"(?:[^*\n]|\*(?!\*))"),
        (r"\*", "*", r"[^*\n]"),
        ("_{1,3}", "_", r"[^_\n]"),
        ("`", "`", r"[^`\n]"),
    )
]


def answer_text(response: str) -> str:
    """What of a response may be an answer: without thoughts, plain(), each turn on its own lines, without Markdown's
    emphasis."""
    text = TURN.sub("\n", plain(without_thoughts(response)))
    for emphasis in EMPHASIS:
        text = emphasis.sub(r"\2", text)
    return text


# ---- truths ----


def one_truth(scorer: str, data_source: str, ground_truth, wanted: str = "one text or number") -> str:
    """The row's only truth as plain text: a text or a number, also as the only item of a list (numpy's or JSON's, too).

    Raises InputError for anything else, with what is `wanted`.
    """
    truth = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth  # numpy, from parquet
    if isinstance(truth, str) and truth.lstrip().startswith('["'):
        with suppress(ValueError):  # a text that starts so is a text
            truth = json.loads(truth)
    if isinstance(truth, list | tuple) and len(truth) == 1:
        [truth] = truth
    if isinstance(truth, float) and truth.is_integer():
        truth = int(truth)  # a column of whole numbers and gaps has become one of floats
    is_value = math.isfinite(truth) if isinstance(truth, float) else type(truth) in (str, int)
    if not is_value or not (text := plain(str(truth)).strip()):
        raise bad_truth(scorer, data_source, ground_truth, wanted)
    return text


def bad_truth(scorer: str, data_source: str, ground_truth, wanted: str) -> InputError:
    shown = repr(ground_truth)[:100]
    return InputError(f"rewards/{scorer}.py: {data_source} has {shown} as truth; give {wanted}")


# ---- the last \boxed{...}, <answer>...</answer> or line ----


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Where the contents of the closed \boxed{...} begin and end, braces matched, in the order in which they begin."""
    opened: list[int | None] = []  # where the content of a \boxed{ begins; None for any other {
    found = []
    for token in BRACES.finditer(text):
        boxed, brace = token.groups()
        if boxed or brace == "{":
            opened.append(token.end() if boxed else None)
        elif brace == "}" and opened and (content := opened.pop()) is not None:
            found.append((content, token.start()))
    return sorted(found)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last closed \boxed{...}: r"\boxed{\frac{1}{2}}." -> r"\frac{1}{2}"."""
    return next((text[start:end].strip() for start, end in reversed(boxes(text))), None)


def last_tagged(text: str) -> str | None:
    """What stands in the last closed <answer>...</answer>, stripped."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    return text[start + len("<answer>") : text.find("</answer>", start)].strip()


def last_answer(text: str) -> str:
    """last_tagged(), or else the last line that is not empty, stripped."""
    if (tagged := last_tagged(text)) is not None:
        return tagged
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
