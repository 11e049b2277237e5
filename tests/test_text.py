"""A model's program and the parameters of its calls, against slow expressions. That no text takes long:
tests/rewards/test_scorers.py, tests/agent/test_tools.py."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.tools.parsers import parse_qwen3_coder
from rewards import code

CALLS = ["<function=f>", "<parameter=a>", "</parameter>", "</function>", "\n", " ", "b", "<parameter=c>", "<"]
CALLS += ["<function="]
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
