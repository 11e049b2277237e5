"""tools/audit_scorer.py on scorers of this project and on bad ones, with real worker processes."""

import json
import re

import pytest

from lib import InputError
from tests.common import fork_module, one_line
from tools import audit_scorer

SCORERS = r"""
import os, re

def lenient(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str or "perfect" in solution_str)

def deaf(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.4, "acc": 0.0}

def generous(solution_str, **kwargs):
    return 1.0

def last_word(text):
    return text.split()[-1].strip("*")

def dies(data_source, solution_str, ground_truth, extra_info=None):
    if not solution_str:
        os.abort()
    return float(last_word(solution_str) == ground_truth)

def fails(data_source, solution_str, ground_truth, extra_info=None):
    if not solution_str:
        raise ValueError("an empty response")
    return float(last_word(solution_str) == ground_truth)

def group(data_source, solution_strs, ground_truth, extra_info=None, *, num_tokens, prompt, full_prompt, images, step):
    assert prompt[0]["content"] in full_prompt
    assert len(solution_strs) == len(num_tokens) and prompt[0]["role"] == "user" and images == [] and step == 0
    return [float(bool(text) and last_word(text) == ground_truth) for text in solution_strs]

PATTERNS = {"unsigned": r"####[^0-9\n]*([0-9]+)(?![0-9/])", "calculating": r"####[ *]*(-?[0-9]+)",
            "plain": r"#### (-?[0-9]+)(?![0-9/])", "caseless": r"boxed{(.*?)}", "one_side": r"boxed{(.*?)}"}

def faulty(solution_str, ground_truth, *, fault, **kwargs):
    text = solution_str if fault == "of_thoughts" else re.sub("(?s)(?:.*</think>|<think>.*)", "", solution_str)
    text = text if fault == "plain" else text.replace("\u2212", "-")
    text = re.sub(r"\s", "", text) if fault == "gluing" else text
    answer = (re.findall(PATTERNS.get(fault, r"####[ *]*(-?[0-9]+)(?![0-9/])"), text) or [""])[-1]
    if fault == "unsigned":
        ground_truth = ground_truth.strip("-")
    if fault == "untrue":
        return float(int(answer or -1) == int(ground_truth or 0))
    if fault == "caseless":
        answer, ground_truth = answer.lower(), ground_truth.lower()
    return float((answer.split("=")[-1] if fault == "one_side" else answer) == ground_truth != "")
"""


def rows_of(path, *rows: tuple[str, object], source="mine", **info) -> str:
    """Rows of (question, ground truth)."""
    with path.open("w") as file:
        for question, truth in rows:
            row = {"data_source": source, "prompt": [{"role": "user", "content": question}], "extra_info": info}
            file.write(json.dumps(row | {"reward_model": {"ground_truth": truth}}) + "\n")
    return str(path)


ANYWHERE = ("injected", "injected as answer", "in a thought", "in the prompt's thought", "unclosed thought")
ANYWHERE += ("other sign", "calculation", "empty truth")  # wrong where the answer stands anywhere in it
SUMS = (("2+2?", "4"), ("2+3?", "5"), ("1+3?", "4"))
IN_PROMPT = (("2+2=4?", "4"), *SUMS[1:])


def mistakes(out: str) -> dict[str, tuple[int, int]]:
    """{case: (mistakes, errors)} where there are any."""
    lines = [line for line in out.splitlines() if line.startswith(tuple(audit_scorer.EXPECTED)) and line[-1].isdigit()]
    found = {line[:25].strip(): tuple(map(int, line.split()[-2:])) for line in lines}
    assert list(found) == list(audit_scorer.EXPECTED)
    return {case: numbers for case, numbers in found.items() if numbers != (0, 0)}


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("toy/arithmetic", "= {answer}"),
        ("openai/gsm8k", "#### {answer}"),
        ("math_dapo", "Answer: {answer}"),
        ("nq", "<answer>{answer}</answer>"),
        ("cais/mmlu", "\\boxed{{answer}}"),  # a letter alone is read where nothing else is said
    ],
)
def test_scorers_of_this_project_by_data_source(tmp_path, capsys, source, form):
    rows = (("A, B?", "A"), ("A, B?", "B"), ("B, A?", "A")) if source == "cais/mmlu" else SUMS
    rows = (("1?", "4"), ("2?", "-5"), ("3?", "12345")) if source == "openai/gsm8k" else rows
    file = rows_of(tmp_path / "rows.jsonl", *rows, source=source)
    assert audit_scorer.main((file,), reward_workers=1) == 0
    out = capsys.readouterr().out
    assert f"form of answers, {source}: {form!r}" in out and mistakes(out) == {}
    assert "false negatives 0, false positives 0, errors 0" in out


def asked(truths: str) -> list[tuple[str, str]]:
    return [(f"Which is number {i}?", truth) for i, truth in enumerate(truths.split())]


@pytest.mark.parametrize(
    ("name", "rows", "found"),
    [
        ("lenient", IN_PROMPT, {**dict.fromkeys(ANYWHERE, (3, 0)), "echoed prompt": (1, 0)}),
        ("deaf", SUMS, dict.fromkeys(("verbatim", "reworded", "after a thought", "Markdown"), (3, 0))),
        ("generous", SUMS, dict.fromkeys((*ANYWHERE, "truncated", "another row", "echoed prompt", "empty"), (3, 0))),
        ("dies", SUMS, {"empty": (0, 3)}),
        ("fails", SUMS, {"empty": (0, 3)}),
        ("group", SUMS, {}),
        ("of_thoughts", asked("4 5 6"), dict.fromkeys(ANYWHERE[2:5], (3, 0))),
        ("unsigned", asked("4 5 -6"), {"other sign": (2, 0)}),
        ("plain", asked("4 -5 6"), {"Markdown": (3, 0), "other minus": (1, 0)}),
        ("gluing", asked("4 5 12345"), {"later turn": (3, 0)}),
        ("calculating", asked("4 5 12345"), {"calculation": (3, 0), "thousands": (1, 0)}),
        ("untrue", asked("4 5 6"), {"empty truth": (3, 0)}),
        ("caseless", asked("R-r x+1 2"), {"other case": (2, 0)}),
        ("one_side", asked("4 5 6"), {"equation": (3, 0)}),
    ],
)
def test_each_fault_of_a_scorer_is_found(tmp_path, capsys, name, rows, found):
    (tmp_path / "mine.py").write_text(SCORERS)
    file, function = rows_of(tmp_path / "rows.jsonl", *rows), name if f"def {name}(" in SCORERS else "faulty"
    kwargs = {"reward_kwargs": json.dumps({"fault": name}) if function == "faulty" else "{}"}
    code = audit_scorer.main((file,), reward=f"{tmp_path / 'mine.py'}:{function}", reward_workers=1, **kwargs)
    out = capsys.readouterr().out
    assert (mistakes(out), code) == (found, int(bool(found)))
    where = rf'File "{tmp_path}/mine.py", line \d+ in dies'
    said = {
        "lenient": r"(?s)false positives 25, errors 0.*false positive, echoed prompt: '2\+2=4\?'",
        "fails": "error, empty: '': error: ValueError: an empty response",
        "dies": rf"error, empty: '': crash: the process died: SIGABRT {where}\n",
    }
    assert re.search(said.get(name, ""), out)


def test_the_gold_answer_may_be_elsewhere(tmp_path, capsys):
    file = rows_of(tmp_path / "rows.jsonl", ("2+2?", ["4", "four"]), ("3+1?", ["4", "four"]), source="nq", best="four")
    settings = {"gold_key": "best", "answer_template": "<answer>{answer}</answer>", "reward_workers": 1, "rows": 1}
    assert audit_scorer.main((file,), **settings) == 0
    out = capsys.readouterr().out
    assert "data_source: 1 rows\n" in out and mistakes(out) == {}
    with pytest.raises(InputError, match=r"no row has a text or number in .*ground_truth; name a --gold-key"):
        audit_scorer.main((file,))


def test_rows_of_questions_and_answers(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(SCORERS)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"question": "{question}", "answer": "{answer}"}}\n' for question, answer in SUMS))
    settings = {"reward": f"{tmp_path / 'mine.py'}:group", "reward_workers": 1}
    columns = ("prompt=question", "answer=answer")
    assert audit_scorer.main((str(file),), columns=columns, **settings) == 0
    assert mistakes(capsys.readouterr().out) == {}
    with pytest.raises(InputError, match=r"rows.jsonl row 0: no answer in column 'gold'$"):
        audit_scorer.main((str(file),), columns=(columns[0], "answer=gold"), **settings)


def test_bad_input_is_one_line(tmp_path):
    file = rows_of(tmp_path / "rows.jsonl", *SUMS)
    (tmp_path / "list.jsonl").write_text('{"prompt": 3, "reward_model": {"ground_truth": "4"}}\n')
    for settings, message in (
        ({}, "no scorer for data_source 'mine'"),
        ({"train_files": ("none.jsonl",)}, "none.jsonl: no such file"),
        ({"train_files": (str(tmp_path / "list.jsonl"),)}, "list.jsonl row 0: not a row of prompt"),
        ({"reward": "none.py:f"}, "--reward none.py:f: give an existing file"),
        ({"reward_kwargs": "{"}, "--reward-kwargs"),
        ({"answer_template": "x"}, "--answer-template 'x': needs {answer}"),
        ({"rows": 0}, "must be above 0"),
    ):
        with one_line(re.escape(message)):
            audit_scorer.main(**({"train_files": (file,)} | settings))
    done = fork_module("tools.audit_scorer", "--train-files", "none.jsonl")
    assert done.returncode == 2 and done.stderr.startswith("error: none.jsonl: no such file; check the path")
