"""What reads a model's text takes time in proportion to its length, whatever stands in it.

Time against length: ten times the text may take 40 times as long, where linear is 10 and quadratic 100. CPU seconds of
this process, the least of up to three runs; what takes less than a millisecond is no evidence.
"""

import re
import time
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.tools.parsers import parse_hermes, parse_llama3_json, parse_qwen3_coder
from rewards import (
    answers,
    code,
    gsm8k,
    judge,
    math_dapo,
    multiple_choice,
    reasoning_gym,
    search_qa,
    similarity,
)
from rewards import format as form

UNITS = [
    *("a", " ", "\n", "\\", "$", "-", "`", "#", "{", "}", "(", ")", "[", "1", "1,", "1,111,", "1.", ".", '"', ";", "*"),
    *("<", "\\boxed{", "\\boxed{}", "\\text{", "<answer>", "</answer>", "<think>", "</think>", "####", "#### ", "x="),
    *("a an the ", "answer", "answer ", "answer is ", "answer:", "answer**", "A or ", "B, ", "```", "```a", "```\n"),
    *("```python\na\n", "``` ", "<function=", "<function=f>", "<function=f>\n", "<parameter=a>", "</parameter>"),
    *("<function=f><parameter=a>", "</parameter>\n", "<parameter=a>\n</parameter>", "</function>", "</tool_call>"),
    *("<function=f><parameter=a>1</parameter></function>", "<tool_call>", "<tool_call>{", '<tool_call>"'),
    *('<tool_call>{"name": "f"}', "<|a|>", '{"name":', '{"name": "f"}', '{"name": "f"}; ', '{"name": {}}; ', "; "),
    *("**", "**a", "_a_", "`a", "</s>", "<|a", "[THINK]", "<|channel|>final", "1\u202f111", "\u2014", "#### 1 "),
    *("score", "score: ", "Score: 1\n", "score: 1!", "!", "verdict: ", "Verdict: A\n", "\u0663", "\\frac{1}{"),
]  # fmt: skip
AROUND = [("", ""), ("", "x"), ("```", ""), ("<function=f><parameter=a>", ""), ("answer", "x"), ("1", "a")]


def judged(text):
    for pattern in (judge.SCORE, judge.VERDICT):
        with suppress(ValueError):
            judge.verdict(pattern, text)


READERS = {
    "answer_text": answers.answer_text,
    "last_boxed": answers.last_boxed,
    "last_tagged": answers.last_tagged,
    "extract_program": lambda text: code._dedent(code.extract_program(text).split("\n"), len(text)),
    "gsm8k strict": lambda text: gsm8k.compute_score("", text, "7"),
    "gsm8k flexible": lambda text: gsm8k.compute_score("", text, "7", method="flexible"),
    "math_dapo": lambda text: math_dapo.compute_score("", text, "7"),
    "multiple_choice": multiple_choice.extract_letter,
    "search_qa": lambda text: search_qa.compute_score("", f"<answer>{text}</answer>", ["seven"]),
    "format": lambda text: form.compute_score("", text, None),
    "reasoning_gym": reasoning_gym.extract_answer,
    "similarity": lambda text: similarity.compute_score("", text, "seven"),
    "judge": judged,
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
    "qwen3_coder": lambda text: parse_qwen3_coder({}, text),
}


def cpu_seconds(read, text: str) -> float:
    start = time.process_time()
    read(text)
    return time.process_time() - start


@pytest.mark.parametrize("reader", READERS)
def test_time_grows_with_the_length_of_the_text(reader):
    read, n = READERS[reader], 4_000
    for unit, (start, end) in product(UNITS, AROUND):
        short, long = (start + unit * (size // len(unit)) + end for size in (n, 10 * n))
        ratios = []
        while len(ratios) < 3 and (not ratios or min(ratios) > 40):
            ratios.append(cpu_seconds(read, long) / max(cpu_seconds(read, short), 1e-3))
        assert min(ratios) <= 40, f"{start!r} + {unit!r} * n + {end!r}"


CALLS = [
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "\n",
    " ",
    "b",
    "<parameter=c>",
    "<",
    "<function=",
]
PARAMETER = re.compile(  # quadratic
    r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL
)
FENCES = {"```": "~~~", "````": "```", "~~~~": "```"}  # each with one that does not end its block
BLOCK = st.tuples(
    st.sampled_from(["", "python", "Py", "text"]),
    st.sampled_from(sorted(FENCES)),
    st.sampled_from(["", "  ", "\t", "1. "]),
    st.lists(st.sampled_from(["", "    b", "``", "s = '```'", "FENCE"]), max_size=4),
)


@settings(max_examples=500)
@given(st.lists(BLOCK, max_size=4), st.booleans())
def test_the_program_is_the_last_block(blocks, crlf):
    text, programs = "So:\n", {True: [], False: []}  # by whether it has a label
    for label, fence, before, lines in blocks:
        margin = before.replace("1.", "  ")
        lines = ["a", *(FENCES[fence] if line == "FENCE" else line for line in lines)]
        text += "\n".join([f"{before}{fence}{label}", *(margin + line for line in lines), f"{margin}{fence}\nthen\n"])
        if label != "text":
            programs[bool(label)].append("\n".join([*lines, ""]))
    expected = (programs[True] or programs[False] or [text])[-1]
    assert code.extract_program(text.replace("\n", "\r\n") if crlf and blocks else text).replace("\r", "") == expected


def behind(text: str, start: int) -> int:
    """Where a call that began before `start` ends; what stands within it is text of it."""
    ends = (found.end() for found in re.finditer("</function>", text) if found.start() >= start)
    level = {at: text.count("</function>", start, at) - text.count("<function=", start, at) for at in ends}
    return next((at for at in level if level[at] == 1), len(text))


@settings(max_examples=500)
@given(st.lists(st.sampled_from(CALLS), max_size=16).map("".join))
def test_the_parameters_are_those_of_the_expression(text):
    expected, end = [], 0
    while opened := re.compile(r"<function=([^<>\n]+)>\s*").search(text, end):
        names, arguments, end = [], {}, opened.end()
        while parameter := PARAMETER.match(text, end):
            arguments[parameter[1]], end = parameter[2], parameter.end()
            names.append(parameter[1])
            if parameter[2].count("<function=") > parameter[2].count("</function>"):
                names.append(None)
                end = behind(text, end + len("</function>")) - len("</function>")
        whole = text.startswith("</function>", end)
        expected.append(arguments if whole and len(names) == len(arguments) else None)
        end = end if whole else behind(text, end)
    assert [call.arguments for call in parse_qwen3_coder({}, text)] == expected
