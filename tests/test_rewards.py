"""The scorers in rewards/, and the scripts in data/ run as a user runs them."""

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from lib import InputError
from rewards import gsm8k, scorer_module
from rewards import math as math_reward
from rewards import reasoning_gym as gym_reward

ROOT = Path(__file__).parent.parent

# ---- gsm8k ----


@pytest.mark.parametrize(
    ("response", "truth", "strict", "flexible"),
    [
        ("6 * 7 = 42\n#### 42", "42", "42", "42"),
        ("#### 42.", "42", "42", "42"),
        ("####42 apples", "42", "42", "42"),
        ("#### 1,234,567", "1234567", "1234567", "1234567"),
        ("#### $1,234.50.", "1234.5", "1234.5", "1234.5"),
        (r"#### \$18.00", "18", "18", "18"),
        ("#### -7", "-7", "-7", "-7"),
        ("#### -$7", "-7", "-7", "-7"),
        ("#### $-7", "-7", "-7", "-7"),
        ("#### 007", "7", "7", "7"),
        ("#### -0.0", "0", "0", "0"),
        ("#### .5", "0.50", "0.5", "0.5"),
        ("#### 1\nno, wait\n#### 2", "2", "2", "2"),
        ("#### 42\nI used 3 steps.", "42", "42", "3"),
        ("The answer is 42.", "42", None, "42"),
        ("It takes 5-10 days", "10", None, "10"),
        ("one of 3,4", "4", None, "4"),
        ("version v2-1", "1", None, "1"),
        ("#### forty", "40", None, None),
        ("", "0", None, None),
        (
            "#### 12345678901234567890123456789012345678901",
            "12345678901234567890123456789012345678902",
            *["12345678901234567890123456789012345678901"] * 2,
        ),
    ],
)
def test_gsm8k(response, truth, strict, flexible):
    for method, pred in (("strict", strict), ("flexible", flexible)):
        result = gsm8k.compute_score("openai/gsm8k", response, truth, method=method)
        assert result == {"score": float(pred == gsm8k.canonical(truth)), "pred": pred}, method


def test_gsm8k_options():
    assert gsm8k.compute_score("openai/gsm8k", "42", "42")["score"] == 0.0  # strict unless told otherwise
    assert gsm8k.compute_score("openai/gsm8k", "#### 42", 42)["score"] == 1.0
    with pytest.raises(InputError, match="use strict or flexible"):
        gsm8k.compute_score("openai/gsm8k", "#### 42", "42", method="loose")


# ---- math ----

MATH = [  # response, truth, score, pred
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1.0, r"\frac{1}{2}"),
    (r"so $\boxed{0.5}$", r"\frac12", 1.0, "0.5"),
    (r"\boxed{1} or rather \boxed{2}", "2", 1.0, "2"),
    (r"\boxed{1} or rather \boxed{2}", "1", 0.0, "2"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0, r"\sqrt{8}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0, "(x+1)^2"),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0, r"\{2, 1\}"),
    (r"\boxed{[0,1)}", "[0,1]", 0.0, "[0,1)"),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0, r"\text{Evelyn}"),
    (r"\boxed{\text{Angela}}", r"\text{Evelyn}", 0.0, r"\text{Angela}"),
    (r"\boxed{1{,}000}", "1000", 1.0, "1{,}000"),
    ("the answer is $7$.", "7", 1.0, "7"),
    (r"\boxed{3} and \boxed{unfinished", "3", 1.0, "3"),
    (r"\boxed{}", "3", 0.0, None),
    ("no idea", "3", 0.0, None),
    ("", "3", 0.0, None),
]


@pytest.mark.parametrize(("response", "truth", "score", "pred"), MATH)
def test_math(response, truth, score, pred):
    assert math_reward.compute_score("HuggingFaceH4/MATH-500", response, truth) == {"score": score, "pred": pred}


def test_math_off_the_main_thread():
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda case: math_reward.compute_score("math", case[0], case[1]), MATH * 3))
    assert results == [{"score": score, "pred": pred} for _, _, score, pred in MATH * 3]


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{ a_{b_{c}} } }", "a_{b_{c}}"),
        (r"\boxed{\{a\}}", r"\{a\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{a", None),
        ("\\boxed{a\\", None),
        ("a", None),
    ],
)
def test_last_boxed(text, boxed):
    assert math_reward.last_boxed(text) == boxed


# ---- reasoning_gym ----

NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # entry["answer"] is None
ACCEPTS_ANYTHING = {"game_of_life_halting"}  # its scorer compares bool(answer), of a text


@pytest.mark.parametrize("task", sorted(DATASETS.keys() - {"composite"}))  # composite is made of other data sets
def test_every_task_survives_json_and_is_scored_as_in_memory(task):
    source = reasoning_gym.create_dataset(task, seed=1, size=3)
    for entry in source:
        text = json.dumps({"task": task, "task_kwargs": {}, "entry": gym_reward.dump_entry(entry)})
        assert gym_reward.load_entry(json.loads(text)["entry"]) == entry
        answers = []
        if task == "graph_color":
            answers.append(json.dumps(entry["metadata"]["possible_answer"]))
        elif task not in NO_ORACLE:
            answers.append(entry["answer"])
            assert gym_reward.compute_score("", f"<answer>{entry['answer']}</answer>", text)["score"] == 1.0
        for answer in answers:
            scored = gym_reward.compute_score("", f"So <answer>\n{answer}\n</answer>", text)
            assert scored["score"] == source.score_answer(answer.strip(), entry)
            assert scored["pred"] == answer.strip() and scored["scorer_error"] == 0.0
        for wrong in ("certainly wrong", "", "[1, [", "-1", "{}", "?" * 50):
            scored = gym_reward.compute_score("", f"<answer>{wrong}</answer>", text)
            assert 0.0 <= scored["score"] < 1.0 or task in ACCEPTS_ANYTHING
    assert (entry["answer"] is None) == (task in NO_ORACLE)


def test_dump_entry_types():
    value = {"t": (1, (2, [3.5, None])), 1: {"a": True}, (1, 2): "x"}
    assert gym_reward.load_entry(json.loads(json.dumps(gym_reward.dump_entry(value)))) == value
    with pytest.raises(TypeError, match="a set has no JSON form"):
        gym_reward.dump_entry({"s": {1}})


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>4</answer> no: <answer> 5\n6 </answer> done 7", "5\n6"),
        ("put it in <answer> tags: <answer>5</answer>", "5"),
        ("working\n\n 5 \n\n", "5"),
        ("<answer>5", "<answer>5"),
        ("", ""),
    ],
)
def test_extract_answer(response, answer):
    assert gym_reward.extract_answer(response) == answer


def truth_of(task, **kwargs):
    entry = reasoning_gym.create_dataset(task, seed=1, size=1, **kwargs)[0]
    truth = json.dumps({"task": task, "task_kwargs": kwargs, "entry": gym_reward.dump_entry(entry)})
    return entry, truth


def test_a_scorer_that_raises_is_counted():
    _, truth = truth_of("prime_factorization")
    scored = gym_reward.compute_score("", "<answer>two</answer>", truth)
    assert scored == {"score": 0.0, "pred": "two", "scorer_error": 1.0}
    assert gym_reward.compute_score("", " \n", truth)["pred"] is None  # no answer


def test_task_kwargs_reach_the_scorer():
    _, truth = truth_of("puzzle24")
    narrow = json.dumps({**json.loads(truth), "task_kwargs": {"min_value": 1, "max_value": 2}})
    own = json.loads(truth)["entry"]["answer"]
    assert gym_reward.compute_score("", own, truth)["score"] == 1.0
    assert gym_reward.compute_score("", own, narrow)["score"] < 1.0


@pytest.mark.parametrize("task", sorted(gym_reward.EVALUATED))
def test_code_in_an_answer_is_not_run(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, truth = truth_of(task)
    for code in (
        "open('ran', 'w')",
        "ｏｐｅｎ('ran', 'w')",
        "__import__('os').mkdir('ran')",
        r"eval('\x6fpen(\'ran\')')",
    ):
        assert gym_reward.compute_score("", f"<answer>{code}</answer>", truth)["score"] == 0.0
    assert list(tmp_path.iterdir()) == []


# ---- the scripts in data/ ----


def run_script(name, *args, cwd):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cwd / "cache")}
    script = ROOT / "data" / name
    return subprocess.run([sys.executable, script, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True)


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


def test_gsm8k_script(tmp_path):
    row = {"question": "How much are 1,000 and 234?", "answer": "1000+234=<<1000+234=1234>>1234\n#### 1,234"}
    datasets.Dataset.from_list([row] * 3).to_parquet(tmp_path / "copy/main/train-00000-of-00001.parquet")
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "copy/main/test-00000-of-00001.parquet")
    write_jsonl(tmp_path / "copy/socratic/train.jsonl", [{"question": "not this", "answer": "#### 0"}])
    done = run_script("gsm8k.py", "--out", "made", "--local_dir", "copy", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "made/train.parquet: 3 rows" in done.stdout
    check_rows(read(tmp_path / "made/train.parquet"), 3)
    [made] = read(tmp_path / "made/test.parquet")
    assert made["reward_model"]["ground_truth"] == "1234" and made["extra_info"]["split"] == "test"
    assert made["prompt"][0]["content"].startswith(row["question"]) and "####" in made["prompt"][0]["content"]
    assert gsm8k.compute_score(made["data_source"], row["answer"], made["reward_model"]["ground_truth"])["score"] == 1.0


def test_math_script(tmp_path):
    solved = {"problem": "Half?", "level": "Level 2", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."}
    write_jsonl(tmp_path / "copy/train.jsonl", [solved, {**solved, "solution": "open"}])
    answered = {"problem": "Two?", "solution": "", "answer": "2", "subject": "Algebra", "level": 2, "unique_id": "a"}
    write_jsonl(tmp_path / "copy/test.jsonl", [answered])
    done = run_script("math.py", "--out", "made", "--local_dir", "copy", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train.parquet: 1 rows, 1 left out" in done.stdout
    train, test = read(tmp_path / "made/train.parquet"), read(tmp_path / "made/test.parquet")
    check_rows(train, 1), check_rows(test, 1)
    assert train[0]["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert test[0]["reward_model"]["ground_truth"] == "2"
    assert train[0]["extra_info"]["subject"] == test[0]["extra_info"]["subject"] == "Algebra"


def test_reasoning_gym_script(tmp_path):
    kwargs = '{"min_terms": 2, "max_terms": 3}'
    args = ["--task", "chain_sum", "--size", 6, "--test_size", 2, "--seed", 5, "--task_kwargs", kwargs]
    done = run_script("reasoning_gym.py", *args, "--out", "made", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "made/train.parquet")
    check_rows(rows, 6), check_rows(read(tmp_path / "made/test.parquet"), 2)
    source = reasoning_gym.create_dataset("chain_sum", size=8, seed=5, min_terms=2, max_terms=3)
    for row, entry in zip(rows, source):
        assert row["data_source"] == "reasoning_gym/chain_sum"
        assert row["prompt"][0]["content"].startswith(entry["question"])
        truth = row["reward_model"]["ground_truth"]
        assert (
            gym_reward.compute_score(row["data_source"], f"<answer>{entry['answer']}</answer>", truth)["score"] == 1.0
        )
        assert gym_reward.compute_score(row["data_source"], "<answer>x</answer>", truth)["score"] == 0.0


def test_a_failing_script_prints_one_line_and_exits_2(tmp_path):
    done = run_script("gsm8k.py", "--out", "made", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "openai/gsm8k: not a file here, and split 'train' cannot be had from the hub" in done.stderr
    assert done.stderr.count("\n") == 1


def test_reasoning_gym_script_keeps_train_questions_out_of_test(tmp_path, capsys):
    main = importlib.import_module("data.reasoning_gym").main
    main("gcd", tmp_path, size=150, test_size=50, task_kwargs='{"min_value": 1, "max_value": 20}')
    train, test = ({row["prompt"][0]["content"] for row in read(tmp_path / f"{s}.parquet")} for s in ("train", "test"))
    assert train and test and train.isdisjoint(test)
    assert "of 50 test entries left out: their questions are in train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("gsm8k", {"local_dir": "none"}, r"none: no train\*.parquet"),
        ("gsm8k", {"local_dir": "copy"}, "copy train row 0: its answer has no '####'"),
        ("math", {"local_dir": "copy"}, "copy train row 0: no column 'problem'; it has question"),
        ("reasoning_gym", {"task": "nope"}, "--task nope: no such task; there are ab, "),
        ("reasoning_gym", {"task": "composite"}, "--task composite: no such task"),
        ("reasoning_gym", {"task": "gcd", "size": 0}, "--size 0 --test_size 200: at least 1"),
        ("reasoning_gym", {"task": "gcd", "task_kwargs": "{"}, "--task_kwargs {: not valid JSON"),
        ("reasoning_gym", {"task": "gcd", "task_kwargs": '{"size": 1}'}, "without seed and size"),
        ("reasoning_gym", {"task": "gcd", "task_kwargs": '{"colour": 1}'}, "the task refuses them"),
    ],
)
def test_script_errors(tmp_path, script, flags, message):
    write_jsonl(tmp_path / "copy/train.jsonl", [{"question": "q", "answer": "a"}])
    if "local_dir" in flags:
        flags = {"local_dir": tmp_path / flags["local_dir"]}
    with pytest.raises(InputError, match=message) as caught:
        importlib.import_module(f"data.{script}").main(out=tmp_path / "made", **flags)
    assert "\n" not in str(caught.value)
