"""The scorers in rewards/, and the scripts in data/ run as a user runs them."""

import ast
import asyncio
import importlib
import inspect
import io
import json
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pytest
import reasoning_gym
import sympy
import tyro
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from reasoning_gym.factory import DATASETS

import rewards
from lib import InputError
from rewards import code as code_reward
from rewards import gsm8k, scorer_module
from rewards import math as math_reward
from rewards import reasoning_gym as gym_reward
from rewards.algebra import algebra
from rewards.similarity import similarity
from tests.common import one_line

ROOT = Path(__file__).parents[2]

LONG = "1234567890" * 4


@pytest.mark.parametrize(
    ("response", "truth", "strict", "flexible"),
    [
        ("6 * 7 = 42\n#### 42", "42", "42", "42"),
        ("#### 42\nI used 3 steps.", "42", "42", "3"),
        ("The answer is 42.", "42", None, "42"),
        ("version v2-1", "1", None, "1"),
        ("", "0", None, None),
        (f"#### {LONG}1", f"{LONG}2", f"{LONG}1", f"{LONG}1"),
    ],
)
def test_gsm8k(response, truth, strict, flexible):
    for method, pred in (("strict", strict), ("flexible", flexible)):
        result = gsm8k.compute_score("openai/gsm8k", response, truth, method=method)
        assert result == {"score": float(pred == gsm8k.canonical(truth)), "pred": pred}, method
    with pytest.raises(InputError, match="use strict or flexible"):
        gsm8k.compute_score("openai/gsm8k", response, truth, method="loose")


MATH = [  # response, truth, score, pred
    (r"so $\boxed{0.5}$", r"\frac12", 1.0, r"\frac12"),
    (r"\boxed{1} or rather \boxed{2}", "1", 0.0, "2"),
    (r"\boxed{[0,1)}", "[0,1]", 0.0, "[0, 1)"),
    ("the answer is $7$.", "7", 1.0, "7"),
    (r"\boxed{3} and \boxed{unfinished", "3", 1.0, "3"),
    (r"\boxed{}", "3", 0.0, None),
]


def test_math_off_the_main_thread():
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda case: math_reward.compute_score("math", case[0], case[1]), MATH * 3))
    assert results == [{"score": score, "pred": pred} for _, _, score, pred in MATH * 3]


# ---- reasoning_gym ----
NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # entry["answer"] is None
DEGENERATE = ["nan", "inf", "1e999", "nan + nani", "inf - infi", "", "[]", "[nan]", "{}", "''", "%"]


def gym_truth(task, entry):
    return json.dumps({"task": task, "task_kwargs": {}, "entry": gym_reward.dump_entry(entry)})


def gym_score(answer, truth):
    return gym_reward.compute_score("", f"<answer>{answer}</answer>", truth)


@pytest.mark.parametrize("task", sorted(DATASETS.keys() - {"composite"}))  # composite is made of other data sets
def test_every_task_survives_json_and_is_scored_as_in_memory(task):
    """And no answer is right for every question: nan for complex_arithmetic, 0 for coin_flip and anything for
    game_of_life_halting are, to upstream's scorers."""
    source = reasoning_gym.create_dataset(task, seed=3, size=4)
    truths = [gym_truth(task, entry) for entry in source]
    for entry, truth in zip(source, truths[:2]):
        assert gym_reward.load_entry(json.loads(truth)["entry"]) == entry
        answer = json.dumps(entry["metadata"]["possible_answer"]) if task == "graph_color" else entry["answer"]
        if answer is not None:
            scored = gym_reward.compute_score("", f"So <answer>\n{answer}\n</answer>", truth)
            assert scored["score"] == source.score_answer(answer.strip(), entry)
            assert scored["pred"] == answer.strip() and scored["scorer_error"] == 0.0
            assert scored["score"] == 1.0 or task == "graph_color"
        for wrong in ("certainly wrong", "[1, [", "?" * 50):
            assert 0.0 <= gym_score(wrong, truth)["score"] < 1.0
    assert (entry["answer"] is None) == (task in NO_ORACLE)
    for answer in [*DEGENERATE, "0", "-1", "x", "[[]]"]:
        others = (truth for entry, truth in zip(source, truths) if answer != entry["answer"])
        scores = [gym_score(answer, truth)["score"] for truth in others]
        assert sum(score >= 0.5 for score in scores) <= len(scores) / 2, (answer, scores)
        assert answer not in DEGENERATE or max(scores, default=0.0) < 0.5, (answer, scores)


def test_an_entry_with_a_fraction_survives_json():
    entry = reasoning_gym.create_dataset("gsm_symbolic", seed=3, size=25)[24]
    truth = gym_truth("gsm_symbolic", entry)
    assert "__fraction__" in truth and gym_reward.load_entry(json.loads(truth)["entry"]) == entry


def truth_of(task):
    entry = reasoning_gym.create_dataset(task, seed=1, size=1)[0]
    return entry, gym_truth(task, entry)


def test_a_scorer_that_raises_is_counted():
    _, truth = truth_of("prime_factorization")
    assert gym_score("two", truth) == {"score": 0.0, "pred": "two", "scorer_error": 1.0}
    assert gym_reward.compute_score("", " \n", truth)["pred"] is None  # no answer


def test_task_kwargs_reach_the_scorer():
    entry, truth = truth_of("decimal_arithmetic")
    off = str(Decimal(entry["answer"]) + Decimal("0.05"))  # the tolerance is a unit of the last decimal
    for kwargs, score in ({}, 0.0), ({"min_num_decimal_places": 1, "max_num_decimal_places": 1}, 1.0):
        truth = json.dumps(json.loads(truth) | {"task_kwargs": kwargs})
        assert gym_reward.compute_score("", off, truth)["score"] == score


# Scorers of reasoning-gym 0.1.25 that call eval(), or sympy's parse_expr, which is eval(), on the answer.
EVALUATED = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
EVALUATED |= {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
PAYLOADS = [
    "open('ran', 'w')",
    "ｏｐｅｎ('ran', 'w')",
    "(lambda: [c for c in ().__class__.__base__.__subclasses__()])()",
    "[*valid_solutions[0]]",
    "parse_expr(metadata['integrand'])",
    "f'{oracle_answer}'",
]


def test_upstream_evaluates_in_no_task_but_these():
    """Of a newer version, each new name here needs an own way to read the answer."""
    calls = re.compile(r"\b(?:eval|exec|compile|parse_expr|sympify|parse_latex|import_module)\(")
    found = {name for name, (cls, _) in DATASETS.items() if calls.search(inspect.getsource(cls.score_answer))}
    assert found == EVALUATED | {"number_sorting"}  # that one evaluates the truth


@pytest.mark.parametrize("task", sorted(EVALUATED))
def test_code_in_an_answer_is_not_run(task, tmp_path, monkeypatch):
    """Upstream's eval() sees nothing but the truth and literals that this project wrote; sympy's sees nothing."""
    monkeypatch.chdir(tmp_path)
    entry, truth = truth_of(task)
    seen = []
    monkeypatch.setattr("builtins.eval", lambda code, *_: seen.append(code) or ast.literal_eval(code))
    for code in PAYLOADS:
        for answer in (code, f"{entry['answer']} # {code}", f"[{code}]", f"{code}\n{entry['answer']}"):
            scored = gym_score(answer, truth)
            assert scored["score"] == 0.0 and scored["scorer_error"] == 0.0, answer
    assert list(tmp_path.iterdir()) == []
    assert all(code == repr(ast.literal_eval(code)) for code in seen)


@pytest.mark.parametrize("task", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"])
def test_a_python_list_for_an_answer_has_upstreams_score(task):
    entry, truth = truth_of(task)
    right = entry["metadata"]["valid_answers"][0] if task == "n_queens" else entry["answer"]
    rows = [row.split(" ") for row in right.split("\n")]
    written = str({"spiral_matrix": rows[0], "string_insertion": list(right)}.get(task, rows))
    assert reasoning_gym.create_dataset(task, seed=1, size=1).score_answer(written, entry) in (0.1, 0.5)
    assert gym_score(written, truth)["score"] == (0.5 if task == "n_queens" else 0.1)


@pytest.mark.parametrize(
    ("answer", "numbers", "right"),
    [
        ("(8 - 4) * 6 * 1", [1, 4, 6, 8], True),
        ("8 / (3 - 8 / 3)", [3, 3, 8, 8], True),
        ("6 * 4 + 1 - 1", [1, 4, 6, 8], False),  # the same for every puzzle
        ("(8 - 4) * 6 / 1 / 1", [1, 4, 6, 8], False),
        ("24 + x1 - x1", [1, 4, 6, 8], False),
        ("(8 - 4) * 6 + 1", [1, 4, 6, 8], False),
    ],
)
def test_puzzles_of_numbers_use_each_of_them_once(answer, numbers, right):
    for task in ("puzzle24", "countdown"):
        truth = gym_truth(task, {"answer": "", "metadata": {"numbers": numbers, "target": 24}})
        score = gym_score(answer, truth)["score"]
        assert (score == 1.0) == right and (right or score <= 0.05), task
    near = {"answer": "", "metadata": {"numbers": [100, 1000, 1, 3], "target": 100_000}}  # to upstream's relative 1e-5
    assert gym_score("100 * 1000 + 1 / 3", gym_truth("countdown", near))["score"] == 0.05


INTEGRALS = [  # answer, of 6*x**2 + cos(x), right
    ("2*x**3 + sin(x)", True),
    ("2*x**3 + sin(x) - 5 + K", True),
    ("x*x*x*2 + sin(x)*1.0", True),
    ("2*X**3 + sin(X)", False),
    ("Integral(6*x**2 + cos(x), x)", False),  # the question itself
    ("2*x**3 + sin(x), 1", False),
    ("2*x**3 + sin(x) + 9**9**9**9", False),
    ("", False),
]


@pytest.mark.parametrize(("answer", "right"), INTEGRALS)
def test_integrals(answer, right):
    for task in ("simple_integration", "intermediate_integration"):
        entry = {"answer": "", "metadata": {"variable": "x", "integrand": "6*x**2 + cos(x)"}}
        scored = gym_score(answer, gym_truth(task, entry))
        assert scored["score"] == float(right) and scored["scorer_error"] == 0.0


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("x**2 + 3*x + 2", True),
        ("2 + 3*x + x*x", True),
        ("(x + 1)*(x + 2)", False),  # the question itself
        ("S('x**2+3*x+2')", False),
    ],
)
def test_products_of_polynomials(answer, right):
    truth = gym_truth("polynomial_multiplication", {"answer": "x**2 + 3*x + 2", "metadata": {}})
    assert gym_score(answer, truth)["score"] == float(right)


@given(st.text(alphabet="xyzCE123456789.+-*/() ,[]'\"\\_#=:ainpstqrexglo\n", max_size=40))
def test_algebra_is_parsed_or_refused(text):
    try:
        parsed = algebra(text)
    except ValueError:
        return
    assert isinstance(parsed, sympy.Expr)
    assert all(isinstance(part, PARTS) for part in sympy.preorder_traversal(parsed)), parsed


PARTS = (sympy.Add, sympy.Mul, sympy.Pow, sympy.Number, sympy.Symbol, sympy.NumberSymbol, sympy.Function)
PARTS += (type(sympy.zoo), type(sympy.I), sympy.AccumBounds, sympy.Order)  # what sympy makes of 1/0 and sqrt(-1)


@pytest.mark.parametrize(
    ("response", "score", "pred"),
    [
        ("The text backward is:\n\n**nus**", 1.0, "nus"),
        ("<think>sun</think><answer> nus </answer> is my answer.", 1.0, "nus"),
        ("nu", 0.8, "nu"),
        ("<answer></answer>", 0.0, None),
        ("nus" * 100_000, 6 / 300_003, "nus" * 100_000),
    ],
)
def test_similarity(response, score, pred):
    result = rewards.compute_score("reverse_text", response, "nus")
    assert result == {"score": pytest.approx(score), "exact": float(score == 1), "pred": pred}


@given(st.text(), st.text(min_size=1))
def test_similarity_is_1_for_the_truth_only(answer, truth):
    assert similarity(truth, truth) == 1.0
    assert 0 <= similarity(answer, truth) <= 1 and (similarity(answer, truth) == 1) == (answer == truth)


# ---- the scripts in data/ ----
def read(path):
    return list(datasets.Dataset.from_parquet(str(path), cache_dir=path.parent / "cache"))


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check_rows(rows, count):
    assert len(rows) == count
    for i, row in enumerate(rows):
        assert {"data_source", "prompt", "reward_model", "extra_info"} == row.keys()
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert row["reward_model"]["style"] == "rule" and row["extra_info"]["index"] == i
        assert scorer_module(row["data_source"])


def test_gsm8k_script(tmp_path, capsys):
    row = {"question": "How much are 1,000 and 234?", "answer": "1000+234=<<1000+234=1234>>1234\n#### 1,234"}
    datasets.Dataset.from_list([row] * 3).to_parquet(tmp_path / "copy/main/train-00000-of-00001.parquet")
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "copy/main/test-00000-of-00001.parquet")
    write_jsonl(tmp_path / "copy/socratic/train.jsonl", [{"question": "not this", "answer": "#### 0"}])
    rows = make("gsm8k", tmp_path)
    assert "made/train.parquet: 3 rows" in capsys.readouterr().out
    check_rows(rows["train"], 3)
    [made] = rows["test"]
    assert made["reward_model"]["ground_truth"] == "1234" and made["extra_info"]["split"] == "test"
    assert made["prompt"][0]["content"].startswith(row["question"]) and "####" in made["prompt"][0]["content"]
    assert score(made, row["answer"]) == 1.0


def test_math_script(tmp_path, capsys):
    solved = {"problem": "Half?", "level": "Level 2", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."}
    write_jsonl(tmp_path / "copy/train.jsonl", [solved, {**solved, "solution": "open"}])
    answered = {"problem": "Two?", "solution": "", "answer": "2", "subject": "Algebra", "level": 2, "unique_id": "a"}
    write_jsonl(tmp_path / "copy/test.jsonl", [answered])
    rows = make("math", tmp_path)
    assert "train.parquet: 1 rows, 1 left out" in capsys.readouterr().out
    train, test = rows["train"], rows["test"]
    check_rows(train, 1), check_rows(test, 1)
    assert train[0]["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert test[0]["reward_model"]["ground_truth"] == "2"
    assert train[0]["extra_info"]["subject"] == test[0]["extra_info"]["subject"] == "Algebra"


def test_reasoning_gym_script(tmp_path, monkeypatch):
    args = ["--task", "chain_sum", "--size", "6", "--test-size", "2", "--seed", "5", "--out", str(tmp_path / "made")]
    args += ["--task-kwargs", '{"min_terms": 2, "max_terms": 3}']
    monkeypatch.setattr(sys, "argv", ["reasoning_gym.py", *args])
    monkeypatch.setattr(sys, "path", [str(ROOT / "data"), *sys.path])  # the script's folder, which has its name
    runpy.run_path(str(ROOT / "data/reasoning_gym.py"), run_name="__main__")
    rows = read(tmp_path / "made/train.parquet")
    check_rows(rows, 6), check_rows(read(tmp_path / "made/test.parquet"), 2)
    source = reasoning_gym.create_dataset("chain_sum", size=8, seed=5, min_terms=2, max_terms=3)
    for row, entry in zip(rows, source):
        assert row["data_source"] == "reasoning_gym/chain_sum"
        assert row["prompt"][0]["content"].startswith(entry["question"])
        assert [score(row, f"<answer>{answer}</answer>") for answer in (entry["answer"], "x")] == [1.0, 0.0]


def test_reverse_text_script(tmp_path):
    run = importlib.import_module("data.reverse_text").main
    run(out=tmp_path, length=(3, 5), size=20, test_size=10)
    train, test = (read(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    check_rows(train, 20), check_rows(test, 10)
    texts = [row["prompt"][0]["content"].rpartition("\n")[2] for row in train + test]
    assert len({*texts}) == 30 and all(3 <= len(text) <= 5 for text in texts)
    for text, row in zip(texts, train + test):
        assert row["reward_model"]["ground_truth"] == row["extra_info"]["answer"] == text[::-1]
        assert score(row, f"Backward it is:\n{text[::-1]}") == 1.0
    run(out=tmp_path, length=(2, 4), spelled=True, size=20, test_size=10)
    for row in read(tmp_path / "train.parquet"):
        spelled = row["prompt"][0]["content"].rpartition("\n")[2]
        assert re.fullmatch("[a-z]( [a-z]){1,3}", spelled) and row["reward_model"]["ground_truth"] == spelled[::-1]


def test_alphabet_sort_script(tmp_path):
    run = importlib.import_module("data.alphabet_sort").main
    run(out=tmp_path, turns=2, names=(1, 3), size=20, test_size=10)
    train, test = (read(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    assert len({row["prompt"][0]["content"] for row in train + test}) == 30
    for row in train + test:
        kwargs, prompt = row["extra_info"]["interaction_kwargs"], row["prompt"][0]["content"]
        (first, second), [more] = json.loads(kwargs["lists"]), json.loads(kwargs["more"])
        key, names = re.match("Sort these names alphabetically by (first|last) name: (.+)\n", prompt).groups()
        by_key = {"key": lambda name, key=key: name.split()[key == "last"]}
        assert first == sorted(names.split(", "), **by_key)
        new = re.match("Add these names: (.+)\n", more)[1].split(", ")
        marked = [name.removesuffix(" // new name!") for name in second if name.endswith(" // new name!")]
        assert marked == sorted(new, **by_key)
        assert [name.removesuffix(" // new name!") for name in second] == sorted(first + new, **by_key)


LISTS = [["Ada Xu", "Bo Ito"], ["Ada Xu", "Al Kim // new name!", "Bo Ito"]]
SECOND = "\n".join(LISTS[1])


@pytest.mark.parametrize(
    ("written", "rewards_of_turns"),
    [
        (["<answer>\nAda Xu\n Bo Ito \n</answer>", f"So: <answer>{SECOND}</answer>"], [0.5, 0.5]),
        (["<answer>Bo Ito\nAda Xu</answer>", ""], [0.5 * (12 / 26) ** 4, 0.0]),
        ([None, SECOND], [0.0, 0.0]),  # not within <answer>
        (["<answer>" * 10_000, "<answer></answer>" * 10_000], [0.0, 0.0]),
        (["<answer>" + "Ada Xu\nBo Ito\n" * 10_000 + "</answer>"], [0.0]),
    ],
)
def test_alphabet_sort_rewards_each_turn(written, rewards_of_turns):
    interaction = importlib.import_module("data.alphabet_sort").AlphabetSort()
    found = []

    async def play():
        await interaction.start("1", lists=json.dumps(LISTS), more=json.dumps(["Add Al Kim"]))
        for text in written:
            found.append(await interaction.respond([{"role": "assistant", "content": text}]))

    asyncio.run(play())
    ends = [(False, "Add Al Kim"), (True, "")][: len(written)]
    assert [(over, text) for over, text, *_ in found] == ends
    assert [reward for _, _, reward, _ in found] == pytest.approx(rewards_of_turns)


def make(script, tmp_path, **flags):
    """Runs a script's main on the copy in tmp_path/copy; the rows of each file that it writes."""
    importlib.import_module(f"data.{script}").main(out=tmp_path / "made", local_dir=tmp_path / "copy", **flags)
    return {path.stem: read(path) for path in (tmp_path / "made").glob("*.parquet")}


def score(row, response):
    truth = row["reward_model"]["ground_truth"]
    return rewards.compute_score(row["data_source"], response, truth, row["extra_info"])["score"]


def test_every_script_can_import_what_the_modules_beside_it_hide():
    parent = "os.path.dirname(os.path.dirname(os.path.abspath(__file__)))"
    start = ["import os", "import sys", f"if __name__ == '__main__':\n    sys.path[0] = {parent}\n    import lib"]
    scripts = [path for path in (ROOT / "data").glob("*.py") if path.name != "rows.py"]
    assert len(scripts) > 4
    for script in scripts:
        _docstring, *nodes = ast.parse(script.read_text()).body
        assert [ast.unparse(node) for node in nodes[:3]] == start, script


def test_geometry3k_script(tmp_path):
    """The hub's form: images is a list of datasets.Image, and the problem begins with <image>."""
    figures = [Image.fromarray(np.full((9, 12, 3), 40 * i, np.uint8)) for i in range(3)]
    files = [io.BytesIO() for _ in figures]
    for figure, file, kind in zip(figures, files, ("PNG", "PNG", "JPEG")):
        figure.save(file, kind)
    problems = [
        {"images": [{"bytes": file.getvalue(), "path": None}], "problem": f"<image>Find $x_{i}$.", "answer": f"{i}"}
        for i, file in enumerate(files)
    ]
    copy = datasets.Dataset.from_list(problems).cast_column("images", datasets.Sequence(datasets.Image()))
    copy.select([0, 2]).to_parquet(tmp_path / "copy/data/train-00000-of-00001.parquet")
    copy.select([1]).to_parquet(tmp_path / "copy/data/test-00000-of-00001.parquet")
    files = make("geometry3k", tmp_path)
    for split, numbers in {"train": [0, 2], "test": [1]}.items():
        for row, i in zip(files[split], numbers, strict=True):
            [figure] = row.pop("images")
            assert np.array_equal(figure, copy[i]["images"][0]) and figure.format == "PNG"
            assert row["prompt"][0]["content"].startswith(f"<image>Find $x_{i}$.\n\nFirst think")
            assert score(row, f"<think>hm</think>\\boxed{{{i}}}") == 1.0 and score(row, f"\\boxed{{{i}}}") == 0.9
        check_rows(files[split], len(numbers))


def test_countdown_script(tmp_path):
    puzzles = [{"target": 98, "nums": [44, 19, 35]}, {"target": 64, "nums": [63, 95, 96]}]
    puzzles += [{"target": 98, "nums": [19, 44, 35]}, {"target": 28, "nums": [95, 11, 56]}]  # the third is the first
    datasets.Dataset.from_list(puzzles).to_parquet(tmp_path / "copy/data/train-00000-of-00001.parquet")
    files = make("countdown", tmp_path, test_size=1)
    check_rows(files["train"], 2), check_rows(files["test"], 1)
    rows = files["test"] + files["train"]
    equations = ["44 + 19 + 35", "96 - (95 - 63)", "95 - 11 - 56"]
    for i, row in enumerate(rows):
        scores = [score(row, f"<think>hm</think><answer>{equation}</answer>") for equation in equations]
        assert [s == 1.0 for s in scores] == [i == j for j in range(3)]
    assert "44, 19, 35" in rows[0]["prompt"][0]["content"] and "to make 98." in rows[0]["prompt"][0]["content"]
    assert make("countdown", tmp_path, size=1, test_size=1)["test"] == files["test"]  # whatever the size of train
    with pytest.raises(InputError, match="copy: 3 puzzles, none left for train; lower --test-size"):
        make("countdown", tmp_path)


def dapo_row(problem, answer, name):
    """A row of DAPO-Math-17k, which has verl's form."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": problem, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": name},
    }


def test_dapo_math_script(tmp_path, capsys):
    rows = [dapo_row("One?", "1", "a"), dapo_row("Two or three?", "2", "b"), dapo_row("Ten?", "10", "c")] * 3
    rows.append(dapo_row("Two or three?", "3", "d"))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "copy/data/dapo-math-17k.parquet")
    train = make("dapo_math", tmp_path)["train"]
    check_rows(train, 2)
    assert "2 rows, from 10; 1 problems left out (different answers)" in capsys.readouterr().out
    assert [row["prompt"][0]["content"] for row in train] == ["One?", "Ten?"]
    assert [row["extra_info"]["id"] for row in train] == ["a", "c"]
    assert [score(train[1], f"So it is.\nAnswer: {n}") for n in (10, 1)] == [1.0, -1.0]


def test_math_val_script(tmp_path):
    math500 = {"problem": r"Let $S=\{a\}$. Half?", "solution": "", "answer": r"\frac{1}{2}", "subject": "Algebra"}
    write_jsonl(tmp_path / "copy/math500/test.jsonl", [{**math500, "level": 2, "unique_id": "test/algebra/1.json"}])
    aime24 = {"id": 60, "problem": "How many?", "solution": "", "answer": "033", "url": "", "year": "2024"}
    datasets.Dataset.from_list([aime24]).to_parquet(tmp_path / "copy/aime24/data/train-00000-of-00001.parquet")
    write_jsonl(tmp_path / "copy/aime25/test.jsonl", [{"problem": "Which?", "answer": 70, "id": "0"}])
    boxed = make("math_val", tmp_path)
    assert boxed.keys() == {"math500", "aime24", "aime25"}
    for rows, right in ((boxed["math500"], "0.5"), (boxed["aime24"], "33"), (boxed["aime25"], "70")):
        check_rows(rows, 1)
        assert [score(rows[0], rf"\boxed{{{answer}}}") for answer in (right, "71")] == [1.0, 0.0]
    prompt = boxed["math500"][0]["prompt"][0]["content"]
    assert prompt.startswith(math500["problem"]) and prompt.endswith(r"within \boxed{}.")

    main = importlib.import_module("data.math_val").main
    flags = ["--form", "answer", "--sets", "aime24", "aime25", "--local-dir", f"{tmp_path}/copy"]
    tyro.cli(main, args=[*flags, "--out", f"{tmp_path}/answer"])
    assert {path.name for path in (tmp_path / "answer").iterdir()} == {"aime24.parquet", "aime25.parquet"}
    for name, right in (("aime24", "33"), ("aime25", "70")):
        [row] = read(tmp_path / f"answer/{name}.parquet")
        assert [score(row, f"Answer: {answer}") for answer in (right, "71")] == [1.0, -1.0]
        assert row["prompt"][0]["content"].count("Answer:") == 2


def test_search_qa_script(tmp_path, capsys):
    nq = [{"id": f"test_{i}", "question": "who wrote it", "golden_answers": ["The Bard", "W. S."]} for i in range(3)]
    paragraphs = {"title": ["Seine", "Paris"], "sentences": [["The Seine is a river.", " It is long."], ["A city."]]}
    metadata = {"type": "bridge", "context": paragraphs}
    hotpot = {"question": "Which river?", "golden_answers": ["Seine"], "metadata": metadata}
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"copy/nq/{split}.jsonl", nq)
    write_jsonl(tmp_path / "copy/hotpotqa/train.jsonl", [hotpot, {**hotpot, "golden_answers": [" "]}])
    write_jsonl(tmp_path / "copy/hotpotqa/dev.jsonl", [hotpot])
    files = make("search_qa", tmp_path, test_size=2)
    check_rows(files["train"], 4), check_rows(files["test"], 3)
    assert "train.parquet: 4 rows, 1 left out (no answer)" in capsys.readouterr().out
    first, last = files["test"][0], files["test"][-1]
    assert (first["data_source"], last["data_source"]) == ("nq", "hotpotqa")
    assert first["prompt"][0]["content"].startswith("who wrote it?\n")
    assert last["prompt"][0]["content"].startswith("Which river?\n")
    for row, scores in ((first, [1.0, 1.0, 0.0]), (last, [0.0, 0.0, 1.0])):
        assert [score(row, f"<answer>{text}</answer>") for text in ("bard", "w. s.!", "the Seine")] == scores
    corpus = [json.loads(line) for line in (tmp_path / "made/corpus.jsonl").read_text().splitlines()]
    seine = {"title": "Seine", "text": "The Seine is a river. It is long."}  # once, though three rows have it
    assert corpus == [seine, {"title": "Paris", "text": "A city."}]
    check_rows(make("search_qa", tmp_path, sets=("hotpotqa",))["train"], 1)


@pytest.fixture
def programs_run(monkeypatch):
    """At the weakest level, which is enough for the programs here; tests/sandbox/test_code.py has the others."""
    monkeypatch.setattr(code_reward, "sandbox_level", lambda: "rlimits")


def test_mbpp_script(tmp_path, programs_run):
    row = {"task_id": 601, "text": "Write a function to add two numbers.", "code": "", "challenge_test_list": []}
    row |= {"test_list": ["assert add(1, 2) == 3", "assert add(2, two) == 4"], "test_setup_code": "two = 2"}
    for split in ("train", "test"):
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / f"copy/full/{split}-00000-of-00001.parquet")
    write_jsonl(tmp_path / "copy/sanitized/train.jsonl", [{"prompt": "not this"}])
    files = make("mbpp", tmp_path)
    check_rows(files["train"], 1), check_rows(files["test"], 1)
    [made] = files["train"]
    prompt = made["prompt"][0]["content"]
    assert row["text"] in prompt and row["test_list"][0] in prompt and row["test_list"][1] not in prompt
    assert score(made, "```python\ndef add(a, b):\n    return a + b\n```") == 1.0
    assert score(made, "```python\ndef add(a, b):\n    return 3\n```") == 0.0  # right for the assert that is shown


def test_taco_script(tmp_path, capsys, programs_run):
    inputs, outputs = [f"{n} {n}\n" for n in range(100)], [f"{2 * n}\n" for n in range(100)]
    stdin = {"question": "Add.", "starter_code": "", "input_output": json.dumps({"inputs": inputs, "outputs": outputs})}
    calls = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]})
    call = {"question": "Write add.", "starter_code": "def add(a, b):\n\t", "input_output": calls}
    bare = {"question": "Write add, too.", "input_output": calls}
    rows = [stdin, call, bare, stdin, {**stdin, "input_output": ""}, {**stdin, "input_output": '{"inputs": ["1"]}'}]
    write_jsonl(tmp_path / "copy/train.jsonl", rows)
    files = make("taco", tmp_path, test_size=1, max_tests=12)
    check_rows(files["train"], 2), check_rows(files["test"], 1)
    assert "3 of 6 problems left out" in capsys.readouterr().out
    assert make("taco", tmp_path, test_size=1, max_tests=12) == files  # the same split each time
    made = {row["prompt"][0]["content"].partition("\n")[0]: row for row in files["train"] + files["test"]}
    truth = json.loads(made["Add."]["reward_model"]["ground_truth"])
    assert truth == {"inputs": inputs[10:22], "outputs": outputs[10:22]}  # twelve of the longest
    assert "standard input" in made["Add."]["prompt"][0]["content"]
    assert "begins like this:\ndef add(a, b):\n" in made["Write add."]["prompt"][0]["content"]
    assert "begins like this:\ndef add(\n" in made["Write add, too."]["prompt"][0]["content"]
    program = "def add(a, b):\n    return a + b\n"
    reads = "print(sum(map(int, input().split())))"
    for question, scores in {"Add.": [0.0, 1.0], "Write add.": [1.0, 0.0], "Write add, too.": [1.0, 0.0]}.items():
        assert [score(made[question], f"```python\n{text}\n```") for text in (program, reads)] == scores, question
    with pytest.raises(InputError, match="copy: 3 problems of 6 rows, none left for train"):
        make("taco", tmp_path)


@pytest.mark.slow
def test_a_failing_script_prints_one_line_and_exits_2(tmp_path):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, ROOT / "data/gsm8k.py", "--out", "made"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "openai/gsm8k: not a file here, and split 'train' cannot be had from the hub" in done.stderr
    assert done.stderr.count("\n") == 1


def test_reasoning_gym_script_keeps_train_questions_out_of_test(tmp_path, capsys):
    main = importlib.import_module("data.reasoning_gym").main
    main("gcd", tmp_path, size=150, test_size=50, task_kwargs='{"min_value": 1, "max_value": 20}')
    train, test = ({row["prompt"][0]["content"] for row in read(tmp_path / f"{s}.parquet")} for s in ("train", "test"))
    assert train and test and train.isdisjoint(test)
    assert "of 50 test entries left out: their questions are in train" in capsys.readouterr().out


def test_reasoning_gym_script_for_another_scorer(tmp_path):
    main = importlib.import_module("data.reasoning_gym").main
    main("chain_sum", tmp_path, size=3, test_size=0, instruction="Only the number.", ground_truth="answer")
    for row, entry in zip(read(tmp_path / "train.parquet"), reasoning_gym.create_dataset("chain_sum", size=3, seed=1)):
        assert row["prompt"][0]["content"] == f"{entry['question']}\n\nOnly the number."
        assert row["reward_model"]["ground_truth"] == entry["answer"]
        again = row["extra_info"]["interaction_kwargs"]["ground_truth"]  # what --multi-turn.interaction scores with
        assert gym_reward.compute_score("", entry["answer"], again)["score"] == 1.0


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("reasoning_gym", {"task": "nope"}, "--task nope: no such task; there are ab, "),
        ("reasoning_gym", {"task": "gcd", "size": 0}, "--size 0 --test-size 200: at least 1"),
        ("reasoning_gym", {"task": "gcd", "task_kwargs": "{"}, "--task-kwargs {: not valid JSON"),
        ("reasoning_gym", {"task": "gcd", "task_kwargs": '{"size": 1}'}, "without seed and size"),
        ("reasoning_gym", {"task": "gcd", "task_kwargs": '{"colour": 1}'}, "the task refuses them"),
        ("countdown", {"size": 0}, "--size 0 --test-size 1024: each at least 1"),
        ("alphabet_sort", {"turns": 7}, "at most 26 names"),
        ("reverse_text", {"length": (3, 3)}, "none left for train"),
    ],
)
def test_wrong_flags_of_scripts(tmp_path, script, flags, message):
    with one_line(message):
        importlib.import_module(f"data.{script}").main(out=tmp_path / "made", **flags)


@pytest.mark.parametrize(
    ("script", "row", "message"),
    [  # None: another file is there
        ("gsm8k", None, r"copy: no train\*.parquet"),
        ("dapo_math", None, r"copy: no dapo-math-17k\*.parquet"),
        ("math_val", None, r"copy/math500: no test\*.parquet"),
        ("search_qa", None, r"copy/nq: no train\*.parquet"),
        ("gsm8k", {"question": "q", "answer": "a"}, "copy train row 0: its answer has no '####'"),
        ("gsm8k", {"question": "q", "answer": None}, "copy train row 0: no column 'answer'; it has question$"),
        ("gsm8k", {"question": 5, "answer": "#### 1"}, "copy train row 0: its 'question' is '5', which is no str$"),
        ("mbpp", {"text": "Add.", "test_list": []}, "copy train row 0: its test_list is empty"),
        *(
            ("dapo_math", dapo_row("One?", "1", "a") | broken, "row 0: not one message and a ground truth")
            for broken in ({"prompt": []}, {"prompt": ["One?"]}, {"reward_model": {"style": "rule"}})
        ),
    ],
)
def test_a_copy_without_the_rows_of_a_script_is_one_line(tmp_path, script, row, message):
    file = {None: "other", "dapo_math": "dapo-math-17k", "mbpp": "full/train"}.get(row and script, "train")
    write_jsonl(tmp_path / f"copy/{file}.jsonl", [row or {}])
    with one_line(message):
        make(script, tmp_path)
