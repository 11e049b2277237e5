r"""Answers in many forms, with what a careful person decides: truth, response, right.

Thoughts, turns of an episode, signs and dashes, spaces, Markdown, forms of a number, of a letter, of a line. Answers in
the form that a prompt asks for have verl's verdict where the scorer has verl's name, but as its docstring says."""

import json
from importlib import import_module
from itertools import product

import numpy as np
import pytest

from lib import InputError
from tests.rewards.test_math import no_sandbox  # noqa: F401  for all tests of this file


def accuracy(scorer: str, truth, response: str, **kwargs) -> float:
    result = import_module(f"rewards.{scorer}").compute_score("mine", response, truth, **kwargs)
    return result.get("acc", result["score"])


# ---- thoughts: in all scorers ----
FORMS = {  # the form of an answer, the truth, a right answer, a wrong one
    "gsm8k": ("#### {}", "6", "6", "5"),
    "math": ("The answer is \\boxed{{{}}}.", "6", "6", "5"),
    "math_dapo": ("Answer: {}", "6", "6", "5"),
    "geometry3k": ("\\boxed{{{}}}", "6", "6", "5"),
    "multiple_choice": ("Answer: {}", "B", "B", "C"),
    "search_qa": ("<answer>{}</answer>", ["Paris"], "Paris", "Rome"),
    "countdown": ("<answer>{}</answer>", {"target": 24, "numbers": [4, 6]}, "4 * 6", "4 + 6"),
    "arithmetic": ("={}", "6", "6", "5"),
}
THOUGHTS = [  # with {R} right and {W} wrong; which one counts
    ("<think>{R} No.</think>\n{W}", "W"),
    ("<think>{W} No.</think>\n{R}", "R"),
    ("{R} No.</think>\n{W}", "W"),  # the prompt has opened it
    ("<think>{R}", ""),  # never closed
    ("{R}\n<think>{W}", "R"),
    ("<think>{W} <think>{W}</think> {W}</think>\n{R}", "R"),  # nested
    ("<reasoning>{R}</reasoning>\n{W}", "W"),
    ("<THINK>{R}</THINK>\n{W}", "W"),
    ("<seed:think>{R}</seed:think>\n{W}", "W"),
    ("<think>{R}</reasoning>{R}</think>\n{W}", "W"),  # only its own end closes a thought
    ("[THINK]{R}[/THINK]{W}", "W"),
    ("\u25c1think\u25b7{R}\u25c1/think\u25b7{W}", "W"),
    ("<|START_THINKING|>{R}<|END_THINKING|><|START_RESPONSE|>{W}<|END_RESPONSE|>", "W"),
    ("<|begin_of_thought|>{R}<|end_of_thought|>\n<|begin_of_solution|>{W}<|end_of_solution|>", "W"),
    ("<|channel|>analysis<|message|>{R}<|end|><|start|>assistant<|channel|>final<|message|>{W}", "W"),
    ("<|channel|>analysis<|message|>{R}", ""),
    ("<|channel>thought\n{R}<channel|>{W}", "W"),
    ("{R}<|im_end|>", "R"),
]


@pytest.mark.parametrize("scorer", FORMS)
def test_a_thought_is_no_answer(scorer):
    form, truth, right, wrong = FORMS[scorer]
    for response, counts in THOUGHTS:
        text = response.replace("{R}", form.format(right)).replace("{W}", form.format(wrong))
        assert accuracy(scorer, truth, text) == float(counts == "R"), text


# ---- answers, by scorer ----
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1*422"}}\n</tool_call>'
# fmt: off
ANSWERS: dict[str, list[tuple]] = {  # scorer: (truth, right answers, wrong ones); a row a branch of the scorer
    "gsm8k": [
        ("5", [], ["<think>Maybe \\boxed{5}. #### 5 No, wrong.</think> The answer is 6.",
         "#### 5e3"]),
        ("4", ["#### 4\n25 is not needed."], []),
        ("18", ["#### **18**", "#### `18`", "#### ** 18 **", "**#### 18**", "#### \\$18.00",
         "#### \u20ac18", "#### $\\boxed{18}$", "#### \\(18\\)", "#### 18\\text{ apples}",
         '#### "18"', "#### +18", "#### 9*2 = 18", "#### **Answer:** 18",
         "#### The final answer is 18.", "#### \n\n18", "#### 17\nNo.\n#### 18",
         "#### 18\n\n#### Explanation\nSee 20.", "#### 180e-1", "#### 9 eggs * $2 = $18",
         "#### 18 - the total", "##### 18", "#### -> 18", "#### \U0001d7cf\U0001d7d6",
         "#### 18 apples (3 a day for 6 days)"],
         ["#### 18 dollars - 3 dollars", "#### 18 plus 2", "#### 18 and a half", "#### 18/2",
         "#### 18 \\times 2", "#### 18+2", "#### 18\u201320", "#### 18^2", "#### 18\xb2",
         "#### 18\\sqrt{2}", "#### 18x", "#### 18 1/2", "#### 18:30", "#### 18 or 19",
         "#### 18, 19", "#### 18 apples or 19 apples", "#### 18 thousand", "#### 18k",
         "#### 18 dozen", "#### 18% of 50", "#### 18 eggs * $2 = $36", "#### eighteen",
         "#### ", "The answer is 18."]),
        ("-3", ["#### \u22123", "#### \uff0d3", "#### \u20143", "#### 2 - 5 = - 3", "#### -$3",
         "#### $-3"], []),
        ("0.5", ["#### .5"], ["#### -.5"]),
        ("12345", ["#### 12 345", "#### 12\u202f345", "#### 12\\,345", "#### 12'345"], []),
        ("1234567", ["#### 1,234,567.00"], []),
        ("19", [], ["#### 18 or 19"]),
    ],
    "gsm8k flexible": [
        ("5", ["<think>So 6.</think> It is 5."], ["the change is \u22125"]),
        ("-5", ["the change is \u22125", "the change is -$5"], []),
        ("10", ["It takes 5-10 days", "It takes 5\u201310 days", "the rest\u201410"], []),
        ("18", ["It is \uff11\uff18\u3002"], []),
        ("12345", ["It is 12\u202f345.", "It is 12{,}345."], []),
    ],
    "math": [
        ("5", [], ["<think>Maybe \\boxed{5}. #### 5 No, wrong.</think> The answer is 6.",
         "The answer is \\boxed{4}.\n5 is not it."]),
        ("6", ["<think>Maybe \\boxed{5}. No.</think> The answer is 6."], []),
        ("-3", ["The answer is \u22123", "\\boxed{\u22123}"], []),
        ("3", [], ["\\boxed{\u22123}"]),
        ("18", ["\\boxed{**18**}", "The answer is **$18$**.", "\\boxed{\uff11\uff18}"], []),
        ("12345", ["\\boxed{12\u202f345}"], []),
        ("12", ["\\boxed{\uff084\uff09\uff0b8}"], []),
    ],
    "math_dapo": [
        ("34", ["Answer: $34$", "Answer: \\boxed{34}", "Answer: 34\xb0", "**Answer:** 34",
         "### Answer: 34", "The final answer: 34", "ANSWER: 34", "Answer\uff1a34",
         "Answer: \uff13\uff14", "Answer: 34\u200b", "Answer: 34\r\n", "Answer: 34.",
         "Answer: 34\u3002", "Answer: 034", "Answer: +34", "Answer: 3.4e1", "Answer: x = 34",
         "Answer: 34\nThe answer: it is fine.", "Answer: 34 degrees", "Answer: 34\\text{ cm}",
         "Answer: 34\nIs it the right answer? Answer: yes, it is."],
         ["Answer: 34\nNo.\nAnswer: 35", "Answer: 3 4", "Answer: 3\\,4", "Answer: \u221234",
         "Answer: 4\n34", "<think>Answer: 34</think>", "The answer is 34.", "Answer: 34 or 35"]),
        ("12345", ["Answer: 12 345", "Answer: 12\u202f345", "Answer: 12{,}345"], []),
        ("-34", ["Answer: \u221234"], []), ("\\frac{1}{2}", ["Answer: **$\\frac12$**"], []),
        ("5", ["Answer: about $5$ cm", "Answer: 5 \\text{ cm}^2", "Answer: 5 square units"], []),
        ("33", ["Answer: 33\\mathrm{th}"], []), ("17", ["Answer: 17 students"], []),
        ("2\\sqrt{3}", ["Answer: 2\\sqrt3"], []), ("(1,2)", ["Answer: (1, 2)"], []),
        ("apple", ["Answer: an apple"], []), ("025", ["Answer: 25"], []),
    ],
    "multiple_choice": [
        ("B", ["The answer is B\nYes", "Answer: B\nAs for the answer: see above",
         "Answer: B\nThe answer is a good one.", "**Answer:** B", "Answer: B!", "Answer: B: Paris",
         "Answer: B \u2014 Paris", "Answer: B (Paris)", "Answer - B", "### Answer\n\nB",
         "Answer: option (b)", "The best choice is (B).", "Answer: \uff22",
         "Answer\uff1a\uff08B\uff09", "Answer: \u3010B\u3011", "Answer: \U0001d401",
         "Answer: \\(B\\)", "Answer: $\\mathbf{B}$", "\\boxed{\\text{(B) Paris}}",
         "<think>C? Answer: C</think>B", '{"answer": "B", "why": "A is small"}',
         "The answer could be B.", "\\boxed{\\textbf{(B)}}", "Answer: C, no: \\boxed{B}",
         "Answer:\n\n(B) 12 metres", "The answer is B, not A", "Answer: B. A is wrong",
         "B) Paris", "<answer> (b) because the rest is wrong </answer>"],
         ["Answer: B\nNo.\nAnswer: C", "Answer: B or C", "Answer: B and option C",
         "Answer: [B] or [C]", "Answer: not B"]),
        ("D", ["energy \\boxed{E = mc^2} **Answer: D**", "**Answer: D** by \\boxed{E = mc^2}",
         "\\boxed{D}, since \\boxed{E = mc^2}"], []),
        ("E", [], ["The answer is E = mc^2"]),
        ("C", ["Answer: I think it is C", "Answer: Based on the above, the answer is C.",
         "Answer: After all, the correct option is (C)", "Answer: probably C", "Answer: It's C.",
         "Answer: I would go with C"], []),
        ("A", ["The answer is A because B is false"], ["Answer: A cat", "\\boxed{A, B}"]),
        ("I", ["the answer is (I)"], ["I think so"]),
    ],
    "search_qa": [
        ("1999\u20132003", ["<answer>1999-2003</answer>"], []),
        ("1999-2003", ["<answer>1999\u20142003</answer>"], ["<answer>1999 2003</answer>"]),
        ("Ocean\u2019s Eleven", ["<answer>Ocean's Eleven</answer>"], []),
        ('"Heroes"', ["<answer>\u201cHeroes\u201d</answer>"], []),
        ("Paris", ["<answer>**Paris**</answer>", "<answer>\u200bParis</answer>",
         "hm</think><search>x</search>\n<answer>Paris</answer>"],
         ["<answer>Pa</answer>\n<answer>ris</answer>", "<think><answer>Paris</answer></think>"]),
        ([42], ["<answer>\uff14\uff12</answer>"], []),
        (["NYC", "New York"], ["<think>so</think><answer>wrong</answer> <answer>  new\n york </answer>"],
         ["<answer>New York City</answer>"]),
        ({"target": ["USA"]}, ["<answer>U.S.A.</answer>"], []),
        ({"target": "a apple"}, ["<answer>the an apple</answer>"], []),
        ({"target": np.array(["December 14, 1972"], dtype=object)}, ["<answer>december 14 1972</answer>"],
         ["<answer>14 December 1972</answer>"]),
        (["the"], [], ["<answer>an</answer>", "<answer></answer>"]),
    ],
    "countdown": [
        ({"target": 24, "numbers": [4, 6]}, ["<answer>4\xd76</answer>",
         "<answer>\uff14\uff0a\uff16</answer>", "<answer>4*\n6</answer>",
         "<answer>**4*6**</answer>"],
         ["<think><answer>4*6</answer></think>", "<think>(4*6)</think><answer>4+6</answer>",
         "<answer>4**6</answer>"]),
        ({"target": 3, "numbers": [6, 2]}, ["<answer>6\xf72</answer>"], []),
        ({"target": 2, "numbers": [6, 4]}, ["<answer>6\u22124</answer>",
         "<answer>6\xa0- 4</answer>"], []),
        ({"target": 24, "numbers": [4, 6, 1]}, ["<answer>4 *6* 1</answer>"], []),
    ],
    "arithmetic": [
        ("422", ["12,12,4=422", "3=1=422\n", f"{CALL}=422", "=\uff14\uff12\uff12"],
         ["=0422", "=+422", "=422.0", "=422 or 423", "=422=", "422", CALL]),
        ("-4", ["1,5=\u22124"], []),
        ("4", [], ["=4\n25"]),
    ],
    "format": [
        ("", ["a</think><answer>b</answer>",
         "\n<think>\na\nb\n</think>\n\n<answer>b</answer>\n",
         "<think>1 < 2 <b>\\boxed{</think><answer>b</answer>"],
         ["</think><answer>b</answer>", "a</think>b", "a<answer>b</answer>", "",
         "a</think>b</think><answer>b</answer>", "x<think>a</think><answer>b</answer>",
         "<answer>b</answer>a</think>", "<think>a</think><answer>b</answer> Right?",
         "<think>a</think><answer> \n</answer>",
         "<think>a</think><answer>b</answer><answer>c</answer>"]),
    ],
    "geometry3k": [
        ("51", ["it is \\boxed{50}</think> \\boxed{51}", "<think>a</think> \\boxed{**51**}"],
         ["<think>it is \\boxed{51}</think> \\boxed{50}"]),
        ("48", ["<think>a</think> The area is \\boxed{48 \\text{ cm}^2}."], []),
    ],
}
# fmt: on


@pytest.mark.parametrize("scorer", ANSWERS)
def test_an_answer_is_right_or_wrong(scorer):
    name, _, method = scorer.partition(" ")
    kwargs = {"method": method} if method else {}
    for truth, rights, wrongs in ANSWERS[scorer]:
        for response in (*rights, *wrongs):
            assert accuracy(name, truth, response, **kwargs) == (response in rights), (truth, response)


GCD = {"task": "gcd", "task_kwargs": {"size": 1}, "entry": {"question": "?", "answer": "-3", "metadata": {}}}


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<answer>\u22123</answer>", 1),
        ("<answer>**-3**</answer>", 1),
        ("So it is\n**\u20133**", 1),
        ("<think>-3</think>5", 0),
        ("<think><answer>-3</answer>", 0),
    ],
)
def test_an_answer_to_a_task_of_reasoning_gym(response, right):
    assert accuracy("reasoning_gym", json.dumps(GCD), response) == right
    dashes = GCD | {"entry": GCD["entry"] | {"answer": "\u22123"}}  # then the task's own signs count
    assert accuracy("reasoning_gym", json.dumps(dashes), "<answer>\u22123</answer>") == 1


# ---- truths ----
ONE = {"gsm8k": "#### 18", "math_dapo": "Answer: 18", "arithmetic": "=18", "search_qa": "<answer>18</answer>"}


@pytest.mark.parametrize("scorer", ONE)
def test_a_truth_is_one_text_or_number(scorer):
    for truth in ("18", " 18\n", 18, 18.0, np.int64(18), ["18"], [18.0], np.array(["18"]), '["18"]', "\uff11\uff18"):
        assert accuracy(scorer, truth, ONE[scorer]) == 1.0, truth


@pytest.mark.parametrize(
    ("scorer", "truth", "response"),
    [
        ("gsm8k", "18 dollars", "#### 18"),
        ("gsm8k", "\u22123", "#### -3"),
        ("gsm8k", "2 + 16 = 17\n#### 18", "#### 18"),
        ("math_dapo", "\u22123", "Answer: -3"),
        ("multiple_choice", ["B"], "Answer: B"),
        ("multiple_choice", "B) Paris", "Answer: B"),
        ("math", ["-3"], "The answer is \u22123"),
        ("geometry3k", 51.0, "\\boxed{51}"),
        ("search_qa", {"target": 1999}, "<answer>1999</answer>"),
        ("search_qa", ("NYC", "New York"), "<answer>NYC</answer>"),
        ("countdown", {"target": "24", "numbers": ["4", "6"]}, "<answer>4*6</answer>"),
        ("countdown", {"target": 24.0, "numbers": np.array([4.0, 6.0])}, "<answer>4*6</answer>"),
    ],
)
def test_other_truths(scorer, truth, response):
    assert accuracy(scorer, truth, response) == 1


NONE = [None, "", " \n", [], ["5", "6"], {}, {"a": 1}, True, float("nan"), float("inf"), np.array([]), [None]]
NONE += ['["5", "6"]']
GAME = {"target": 24, "numbers": [4, 6]}
BAD = {
    "gsm8k": [*NONE, "-", ".", "x", "eighteen", "18 or 19", "18/2", "#### ", "18\n####", "$"],
    "math_dapo": [*NONE, "$", '"', "cm", "."],
    **dict.fromkeys(("arithmetic", "math", "geometry3k"), NONE),
    "multiple_choice": [*NONE, "Paris", "AB", "A or B", 1, "1", "K", "a cat"],
    "search_qa": [None, "", " ", [], [""], {}, {"a": 1}, {"target": []}, {"target": None}, [None], ["a", None], True],
    "countdown": [*NONE, "24", 24, "{", *({**GAME, "target": target} for target in (None, "x", [24], "1/0"))]
    + [{**GAME, "numbers": numbers} for numbers in (None, [], 4, ["x"], [4.5])],
    "similarity": [None, "", ["nus", "sun"], {"answer": "nus"}],
    "reasoning_gym": [*NONE, "18", "{}", '{"task": "gcd"}'],
}


@pytest.mark.parametrize("scorer", BAD)
def test_a_bad_truth_is_an_error_of_one_line(scorer):
    for truth, response in product(BAD[scorer], ("#### 0", "Answer: 0", "=", "<answer></answer>", None)):
        with pytest.raises(InputError) as caught:
            pytest.fail(f"{truth!r} has {accuracy(scorer, truth, str(truth) if response is None else response)}")
        assert str(caught.value).startswith(f"rewards/{scorer}.py: ") and "\n" not in str(caught.value)
        assert "mine" in str(caught.value)
