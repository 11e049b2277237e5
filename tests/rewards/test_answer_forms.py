r"""Answers in many forms, with what a careful person decides: truth, response, right.

Thoughts, turns of an episode, signs and dashes, spaces, Markdown, forms of a number, of a letter, of a line. Answers in
the form that a prompt asks for have verl's verdict where the scorer has verl's name, but as its docstring says."""

import json
from importlib import import_module
from itertools import product

import numpy as np
import pytest

from lib import InputError


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
    ("{W} No.</think>\n\n{R}", "R"),
    ("<think>{R}", ""),  # never closed
    ("{R}\n<think>{W}", "R"),
    ("<think>\n{W}\n</think>\n{R}\n<think>\n{W}\n</think>\n", "R"),
    ("<think>{W} <think>{W}</think> {W}</think>\n{R}", "R"),  # nested
    ("<thinking>{R}</thinking>\n{W}", "W"),
    ("<reasoning>{R}</reasoning>\n{W}", "W"),
    ("<THINK>{R}</THINK>\n{W}", "W"),
    ("<seed:think>{R}</seed:think>\n{W}", "W"),
    ("<think:a1>{R}</think:a1>\n{W}", "W"),
    ("<think>{R}</reasoning>{R}</think>\n{W}", "W"),  # only its own end closes a thought
    ("[THINK]{R}[/THINK]{W}", "W"),
    ("\u25c1think\u25b7{R}\u25c1/think\u25b7{W}", "W"),
    ("<|START_THINKING|>{R}<|END_THINKING|><|START_RESPONSE|>{W}<|END_RESPONSE|>", "W"),
    ("<|begin_of_thought|>{R}<|end_of_thought|>\n<|begin_of_solution|>{W}<|end_of_solution|>", "W"),
    ("<|channel|>analysis<|message|>{R}<|end|><|start|>assistant<|channel|>final<|message|>{W}", "W"),
    ("<|channel|>analysis<|message|>{R}", ""),
    ("<|channel>thought\n{R}<channel|>{W}", "W"),
    ("{R}<|im_end|>", "R"),
    ("{R}</s>", "R"),
    ("{R}<|eot_id|>\n", "R"),
]


@pytest.mark.parametrize("scorer", FORMS)
def test_a_thought_is_no_answer(scorer):
    form, truth, right, wrong = FORMS[scorer]
    for response, counts in THOUGHTS:
        text = response.replace("{R}", form.format(right)).replace("{W}", form.format(wrong))
        assert accuracy(scorer, truth, text) == float(counts == "R"), text


# ---- answers, by scorer ----

ANSWERS: dict[str, list] = {
    "gsm8k": [
        ("5", "<think>Maybe \\boxed{5}. #### 5 No, wrong.</think> The answer is 6.", 0),
        ("4", "#### 4\n25 is not needed.", 1),
        ("425", "#### 4\n25 is not needed.", 0),
        ("18", "#### **18**", 1),
        ("18", "####**18**", 1),
        ("18", "#### __18__", 1),
        ("18", "#### *18*", 1),
        ("18", "#### ***18***", 1),
        ("18", "#### `18`", 1),
        ("18", "#### ** 18 **", 1),
        ("18", "**#### 18**", 1),
        ("18", "#### $18", 1),
        ("18", "#### \\$18.00", 1),
        ("18", "#### $18$", 1),
        ("18", "#### **$18**", 1),
        ("18", "#### 18$", 1),
        ("18", "#### €18", 1),
        ("18", "#### £18.00", 1),
        ("18", "#### 18%", 1),
        ("18", "#### 18\\%", 1),
        ("18", "#### 18^\\circ", 1),
        ("18", "#### \\boxed{18}", 1),
        ("18", "#### $\\boxed{18}$", 1),
        ("18", "#### \\(18\\)", 1),
        ("18", "#### 18\\text{ apples}", 1),
        ("18", "#### 18.", 1),
        ("18", "#### 18.00", 1),
        ("18", "#### 18!", 1),
        ("18", "####18", 1),
        ("18", "####18 apples", 1),
        ("18", "#### 18 apples", 1),
        ("18", "#### 18cm", 1),
        ("18", "#### 18 km/h", 1),
        ("18", "#### $18/hour", 1),
        ("18", "#### 18 (rounded from 18.4)", 1),
        ("18", "#### 18 apples (3 a day for 6 days)", 1),
        ("18", "#### (18)", 1),
        ("18", "#### [18]", 1),
        ("18", '#### "18"', 1),
        ("18", "#### +18", 1),
        ("18", "#### = 18", 1),
        ("18", "#### x = 18", 1),
        ("18", "#### 9*2 = 18", 1),
        ("18", "#### $2 + $16 = $18", 1),
        ("18", "#### Answer: 18", 1),
        ("18", "#### **Answer:** 18", 1),
        ("18", "#### The final answer is 18.", 1),
        ("18", "#### \n\n18", 1),
        ("18", "#### 17\nNo.\n#### 18", 1),
        ("18", "#### 18\n\n#### Explanation\nSee 20.", 1),
        ("18", "#### 1.8e1", 1),
        ("18", "#### 180e-1", 1),
        ("5000", "#### 5e3", 1),
        ("5", "#### 5e3", 0),
        ("18", "#### 9 eggs * $2 = $18", 1),
        ("18", "#### 18 eggs * $2 = $36", 0),
        ("18", "#### 18 dollars - 3 dollars", 0),
        ("18", "#### 18 plus 2", 0),
        ("18", "#### 18 and a half", 0),
        ("18", "#### 18 - the total", 1),
        ("18", "##### 18", 1),
        ("18", "#### -> 18", 1),
        ("18", "#### \uff11\uff18", 1),
        ("18", "#### \uff0818\uff09", 1),
        ("18", "#### \U0001d7cf\U0001d7d6", 1),
        ("18", "####\u00a018", 1),
        ("18", "#### 18\u200b", 1),
        ("-3", "#### \u22123", 1),
        ("-3", "#### \u20133", 1),
        ("-3", "#### \uff0d3", 1),
        ("-3", "#### \u20143", 1),
        ("-3", "#### -3", 1),
        ("-3", "#### \u2212 3", 1),
        ("-3", "#### 2 - 5 = - 3", 1),
        ("-3", "#### -$3", 1),
        ("-3", "#### $-3", 1),
        ("3", "#### \u22123", 0),
        ("0.5", "#### .5", 1),
        ("-0.5", "#### -.5", 1),
        ("0.5", "#### -.5", 0),
        ("12345", "#### 12,345", 1),
        ("12345", "#### 12 345", 1),
        ("12345", "#### 12\u202f345", 1),
        ("12345", "#### 12\u2009345", 1),
        ("12345", "#### 12{,}345", 1),
        ("12345", "#### 12\\,345", 1),
        ("12345", "#### 12'345", 1),
        ("1234567", "#### 1,234,567.00", 1),
        ("18", "#### 18/2", 0),
        ("18", "#### 18 / 2", 0),
        ("18", "#### 9*2", 0),
        ("18", "#### 18*2", 0),
        ("18", "#### 18 * 2", 0),
        ("18", "#### 18 \u00d7 2", 0),
        ("18", "#### 18 \\times 2", 0),
        ("18", "#### 18+2", 0),
        ("18", "#### 18 - 2", 0),
        ("18", "#### 18-20", 0),
        ("18", "#### 18\u201320", 0),
        ("18", "#### 18^2", 0),
        ("18", "#### 18\u00b2", 0),
        ("18", "#### 18\\sqrt{2}", 0),
        ("18", "#### 18x", 0),
        ("18", "#### 18 1/2", 0),
        ("18", "#### 18:30", 0),
        ("18", "#### 18,5", 0),
        ("18", "#### 18 or 19", 0),
        ("19", "#### 18 or 19", 0),
        ("18", "#### 18, 19", 0),
        ("18", "#### 18 and 19", 0),
        ("18", "#### 18 apples or 19 apples", 0),
        ("18", "#### between 18 and 19", 0),
        ("18", "#### 18 dollars and 50 cents", 0),
        ("18", "#### 18 thousand", 0),
        ("18", "#### 18k", 0),
        ("18", "#### 18 million", 0),
        ("18", "#### 18 dozen", 0),
        ("18", "#### 18% of 50", 0),
        ("18", "#### 18.5", 0),
        ("18", "#### 180", 0),
        ("18", "#### eighteen", 0),
        ("18", "#### ", 0),
        ("18", "The answer is 18.", 0),
    ],
    "gsm8k flexible": [
        ("5", "the change is \u22125", 0),
        ("-5", "the change is \u22125", 1),
        ("-5", "the change is \u20135", 1),
        ("-5", "the change is \uff0d5", 1),
        ("-5", "the change is -$5", 1),
        ("5", "the change is -5", 0),
        ("-0.5", "it is -.5", 1),
        ("10", "It takes 5-10 days", 1),
        ("10", "It takes 5\u201310 days", 1),
        ("10", "the rest\u201410", 1),
        ("18", "It is **18**.", 1),
        ("18", "It is \uff11\uff18\u3002", 1),
        ("5000", "It is 5e3", 1),
        ("12345", "It is 12\u202f345.", 1),
        ("12345", "It is 12{,}345.", 1),
        ("5", "<think>So 5.</think> It is six.", 0),
        ("5", "<think>So 6.</think> It is 5.", 1),
        ("25", "It is 4\n25", 1),
    ],
    "math": [
        ("5", "<think>Maybe \\boxed{5}. #### 5 No, wrong.</think> The answer is 6.", 0),
        ("6", "<think>Maybe \\boxed{5}. No.</think> The answer is 6.", 1),
        ("6", "<think>Maybe \\boxed{5}. No.</think> \\boxed{6}", 1),
        ("5", "The answer is \\boxed{4}.\n5 is not it.", 0),
        ("-3", "The answer is \u22123", 1),
        ("-3", "\\boxed{\u22123}", 1),
        ("-3", "\\boxed{\u20133}", 1),
        ("3", "\\boxed{\u22123}", 0),
        ("18", "\\boxed{**18**}", 1),
        ("18", "The answer is **18**.", 1),
        ("18", "The answer is **$18$**.", 1),
        ("18", "\\boxed{\uff11\uff18}", 1),
        ("12345", "\\boxed{12\u202f345}", 1),
        ("12", "\\boxed{\uff084\uff09\uff0b8}", 1),
    ],
    "math_dapo": [
        ("34", "Answer: 34", 1),
        ("34", "Answer: $34$", 1),
        ("34", "Answer: \\boxed{34}", 1),
        ("34", "Answer: $$34$$", 1),
        ("34", "Answer: 34°", 1),
        ("34", "**Answer:** 34", 1),
        ("34", "**Answer: 34**", 1),
        ("34", "**Answer**: 34", 1),
        ("34", "Answer: **34**", 1),
        ("34", "Answer: __34__", 1),
        ("34", "Answer: `34`", 1),
        ("34", "### Answer: 34", 1),
        ("34", "> Answer: 34", 1),
        ("34", "- Answer: 34", 1),
        ("34", "Final Answer: 34", 1),
        ("34", "The final answer: 34", 1),
        ("34", "ANSWER: 34", 1),
        ("34", "Answer\uff1a34", 1),
        ("34", "Answer: \uff13\uff14", 1),
        ("34", "Answer:\u00a034", 1),
        ("34", "Answer: 34\u200b", 1),
        ("34", "Answer: 34\r\n", 1),
        ("34", "Answer: 34.", 1),
        ("34", "Answer: 34\u3002", 1),
        ("34", "Answer: 034", 1),
        ("34", "Answer: 34.0", 1),
        ("34", "Answer: +34", 1),
        ("34", "Answer: 3.4e1", 1),
        ("34", "Answer: x = 34", 1),
        ("34", "Answer: 34\nLet me double check the answer: it is fine.", 1),
        ("34", "Answer: 34\nThe answer: it is fine.", 1),
        ("34", "Answer: 34\nAnswer: see above", 1),
        ("34", "Answer: 34\n\nExplanation of the answer: 30 + 4", 1),
        ("34", "Answer: 34\nIs it the right answer? Answer: yes, it is.", 1),
        ("35", "Answer: 34\nNo.\nAnswer: 35", 1),
        ("34", "Answer: 34\nNo.\nAnswer: 35", 0),
        ("34", "So the answer: 34", 1),
        ("34", "Answer: 3 4", 0),
        ("34", "Answer: 3\\,4", 0),
        ("34", "Answer: 3~4", 0),
        ("34", "Answer: 3\\ 4", 0),
        ("34", "Answer: 3\u20094", 0),
        ("21/2", "Answer: 2 1/2", 0),
        ("12", "Answer: 1 2", 0),
        ("12345", "Answer: 12 345", 1),
        ("12345", "Answer: 12\u202f345", 1),
        ("12345", "Answer: 12\\,345", 1),
        ("12345", "Answer: 12{,}345", 1),
        ("-34", "Answer: \u221234", 1),
        ("-34", "Answer: \u201334", 1),
        ("-34", "Answer: $-34$", 1),
        ("34", "Answer: \u221234", 0),
        ("34", "Answer: 4\n34", 0),
        ("4", "Answer: 4\n34 is not needed.", 1),
        ("34", "<think>Answer: 34</think>", 0),
        ("34", "The answer is 34.", 0),
        ("34", "Answer: 34 or 35", 0),
        ("34", "Answer: 34/2", 0),
        ("\\frac{1}{2}", "Answer: $\\frac12$", 1),
        ("\\frac{1}{2}", "Answer: **$\\frac{1}{2}$**", 1),
        ("Evelyn Smith", "Answer: Evelyn Smith", 1),
    ],
    "multiple_choice": [
        ("B", "The answer is B\nYes", 1),
        ("D", "energy \\boxed{E = mc^2} **Answer: D**", 1),
        ("E", "energy \\boxed{E = mc^2} **Answer: D**", 0),
        ("D", "**Answer: D** by \\boxed{E = mc^2}", 1),
        ("D", "\\boxed{D}, since \\boxed{E = mc^2}", 1),
        ("D", "\\boxed{x = 5}, so the answer is \\boxed{D}", 1),
        ("C", "Answer: I think it is C", 1),
        ("C", "Answer: I think C", 1),
        ("C", "Answer: Based on the above, the answer is C.", 1),
        ("C", "Answer: After all, the correct option is (C)", 1),
        ("B", "The answer is B because the other answer is false", 1),
        ("C", "Answer: probably C", 1),
        ("C", "Answer: It's C.", 1),
        ("C", "Answer: the correct option is C", 1),
        ("C", "Answer: I would go with C", 1),
        ("B", "Answer: B\nAs for the answer: see above", 1),
        ("B", "Answer: B\n\nExplanation: the answer: it has the most electrons.", 1),
        ("B", "Answer: B\nThe answer is a good one.", 1),
        ("B", "Answer: B\nMy answer is final.", 1),
        ("C", "Answer: B\nNo.\nAnswer: C", 1),
        ("B", "Answer: B\nNo.\nAnswer: C", 0),
        ("B", "Answer: **B**", 1),
        ("B", "**Answer:** B", 1),
        ("B", "**Answer: B**", 1),
        ("B", "**Answer**: B", 1),
        ("B", "Answer: *B*", 1),
        ("B", "Answer: __B__", 1),
        ("B", "Answer: `B`", 1),
        ("B", "Answer: (B)", 1),
        ("B", "Answer: [B]", 1),
        ("B", 'Answer: "B"', 1),
        ("B", "Answer: B)", 1),
        ("B", "Answer: B!", 1),
        ("B", "Answer: B) Paris", 1),
        ("B", "Answer: B. Paris", 1),
        ("B", "Answer: B: Paris", 1),
        ("B", "Answer: B - Paris", 1),
        ("B", "Answer: B \u2013 Paris", 1),
        ("B", "Answer: B \u2014 Paris", 1),
        ("B", "Answer: B (Paris)", 1),
        ("B", "Answer - B", 1),
        ("B", "Answer = B", 1),
        ("B", "### Answer\n\nB", 1),
        ("B", "**Final Answer**\n\n**B**", 1),
        ("B", "Final Answer: B", 1),
        ("B", "Answer: Option B", 1),
        ("B", "Answer: option (b)", 1),
        ("B", "The correct answer is option B.", 1),
        ("B", "The correct option is B.", 1),
        ("B", "The best choice is (B).", 1),
        ("B", "Answer: \uff22", 1),
        ("B", "Answer\uff1a\uff08B\uff09", 1),
        ("B", "Answer: \u3010B\u3011", 1),
        ("B", "Answer: \U0001d401", 1),
        ("B", "Answer:\u00a0B", 1),
        ("B", "Answer: \\(B\\)", 1),
        ("B", "Answer: $\\mathbf{B}$", 1),
        ("B", "\\boxed{\\text{(B) Paris}}", 1),
        ("B", "\\boxed{**B**}", 1),
        ("B", "<think>C? Answer: C</think>B", 1),
        ("C", "<think>Answer: C</think>B", 0),
        ("B", "B.", 1),
        ("B", '{"answer": "B", "why": "A is small"}', 1),
        ("B", "The answer could be B.", 1),
        ("B", "Answer: B or C", 0),
        ("B", "Answer: B and option C", 0),
        ("B", "Answer: both B and C", 0),
        ("B", "Answer: [B] or [C]", 0),
        ("B", "Answer: not B", 0),
        ("A", "Answer: A cat", 0),
        ("A", "\\boxed{A, B}", 0),
        ("I", "I think so", 0),
        ("E", "The answer is E = mc^2", 0),
    ],
    "search_qa": [
        ("1999\u20132003", "<answer>1999-2003</answer>", 1),
        ("1999-2003", "<answer>1999\u20132003</answer>", 1),
        ("1999-2003", "<answer>1999\u20142003</answer>", 1),
        ("1999-2003", "<answer>1999\u22122003</answer>", 1),
        ("1999-2003", "<answer>1999 2003</answer>", 0),
        ("Ocean's Eleven", "<answer>Ocean\u2019s Eleven</answer>", 1),
        ("Ocean\u2019s Eleven", "<answer>Ocean's Eleven</answer>", 1),
        ('"Heroes"', "<answer>\u201cHeroes\u201d</answer>", 1),
        ("Paris", "<answer>**Paris**</answer>", 1),
        ("Paris", "<answer>\u200bParis</answer>", 1),
        ("New York", "<answer>New\u00a0York</answer>", 1),
        ("42", "<answer>\uff14\uff12</answer>", 1),
        ("Paris", "<answer>Pa</answer>\n<answer>ris</answer>", 0),
        ("Paris", "<think><answer>Paris</answer></think>", 0),
        ("Paris", "<think>hm</think><answer>Paris.</answer>", 1),
        ("Paris", "hm</think><search>x</search>\n<answer>Paris</answer>", 1),
        ("Paris", "Paris", 0),
    ],
    "countdown": [
        ({"target": 24, "numbers": [4, 6]}, "<answer>4*6</answer>", 1),
        ({"target": 24, "numbers": [4, 6]}, "<think><answer>4*6</answer></think>", 0),
        ({"target": 24, "numbers": [4, 6]}, "<think>(4*6)</think><answer>4+6</answer>", 0),
        ({"target": 24, "numbers": [4, 6]}, "<answer>4\u00d76</answer>", 1),
        ({"target": 24, "numbers": [4, 6]}, "<answer>\uff14\uff0a\uff16</answer>", 1),
        ({"target": 3, "numbers": [6, 2]}, "<answer>6\u00f72</answer>", 1),
        ({"target": 2, "numbers": [6, 4]}, "<answer>6\u22124</answer>", 1),
        ({"target": 2, "numbers": [6, 4]}, "<answer>6\u20134</answer>", 1),
        ({"target": 2, "numbers": [6, 4]}, "<answer>6\u00a0- 4</answer>", 1),
        ({"target": 24, "numbers": [4, 6, 1]}, "<answer>4 *6* 1</answer>", 1),
        ({"target": 24, "numbers": [4, 6]}, "<answer>4*\n6</answer>", 1),
        ({"target": 24, "numbers": [4, 6]}, "<answer>**4*6**</answer>", 1),
        ({"target": 24, "numbers": [4, 6]}, "**<answer>4*6</answer>**", 1),
        ({"target": 24, "numbers": [4, 6]}, "<answer>4**6</answer>", 0),
    ],
    "arithmetic": [
        ("422", "12,12,4=422", 1),
        ("-4", "1,5=\u22124", 1),
        ("4", "1,5=\u22124", 0),
        ("422", "=\uff14\uff12\uff12", 1),
        ("4", "=4\n25", 0),
        ("422", "=0422", 0),
    ],
    "format": [
        ("", "a</think><answer>b</answer>", 1),
        ("", "\na\n</think>\n<answer>b</answer>", 1),
        ("", "<think>a</think><answer>b</answer>", 1),
        ("", "</think><answer>b</answer>", 0),
        ("", "a</think>b", 0),
        ("", "a<answer>b</answer>", 0),
        ("", "a</think>b</think><answer>b</answer>", 0),
        ("", "x<think>a</think><answer>b</answer>", 0),
        ("", "<answer>b</answer>a</think>", 0),
    ],
    "geometry3k": [
        ("51", "<think>it is \\boxed{51}</think> \\boxed{50}", 0),
        ("51", "it is \\boxed{50}</think> \\boxed{51}", 1),
        ("-51", "<think>a</think> \\boxed{\u221251}", 1),
        ("51", "<think>a</think> \\boxed{**51**}", 1),
    ],
}


@pytest.mark.parametrize("scorer", ANSWERS)
def test_an_answer_is_right_or_wrong(scorer):
    name, _, method = scorer.partition(" ")
    for truth, response, right in ANSWERS[scorer]:
        assert accuracy(name, truth, response, **({"method": method} if method else {})) == right, (truth, response)


GCD = {"task": "gcd", "task_kwargs": {"size": 1}, "entry": {"question": "?", "answer": "-3", "metadata": {}}}


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<answer>-3</answer>", 1),
        ("<answer>\u22123</answer>", 1),
        ("<answer>**-3**</answer>", 1),
        ("So it is\n**\u20133**", 1),
        ("<think>5</think>-3", 1),
        ("<think>-3</think>5", 0),
        ("<answer>-3</answer></think>5", 0),
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
    ("scorer", "truth", "response", "right"),
    [
        ("gsm8k", "18 dollars", "#### 18", 1),
        ("gsm8k", "$18", "#### 18", 1),
        ("gsm8k", "18%", "#### 18", 1),
        ("gsm8k", "18.", "#### 18", 1),
        ("gsm8k", "1.8e1", "#### 18", 1),
        ("gsm8k", "1e3", "#### 1000", 1),
        ("gsm8k", "12 345", "#### 12345", 1),
        ("gsm8k", "\u22123", "#### -3", 1),
        ("gsm8k", "2 + 16 = 18\n#### 18", "#### 18", 1),
        ("math_dapo", "\u22123", "Answer: -3", 1),
        ("math_dapo", 0.5, "Answer: 0.5", 1),
        ("multiple_choice", ["B"], "Answer: B", 1),
        ("multiple_choice", "B) Paris", "Answer: B", 1),
        ("multiple_choice", "\uff22", "Answer: B", 1),
        ("math", ["-3"], "The answer is \u22123", 1),
        ("math", "\u22123", "\\boxed{-3}", 1),
        ("math", 3.0, "\\boxed{3}", 1),
        ("geometry3k", 51, "\\boxed{51}", 1),
        ("search_qa", 1999, "<answer>1999</answer>", 1),
        ("search_qa", [1999.0, "99"], "<answer>1999</answer>", 1),
        ("search_qa", {"target": 1999}, "<answer>1999</answer>", 1),
        ("search_qa", ("NYC", "New York"), "<answer>NYC</answer>", 1),
        ("countdown", {"target": "24", "numbers": ["4", "6"]}, "<answer>4*6</answer>", 1),
        ("countdown", {"target": 24.0, "numbers": np.array([4.0, 6.0])}, "<answer>4*6</answer>", 1),
    ],
)
def test_other_truths(scorer, truth, response, right):
    assert accuracy(scorer, truth, response) == right


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
    "reasoning_gym": [*NONE, "18", "{}", '{"task": "gcd"}'],
}


@pytest.mark.parametrize("scorer", BAD)
def test_a_bad_truth_is_an_error_of_one_line(scorer):
    for truth, response in product(BAD[scorer], ("#### 0", "Answer: 0", "=", "<answer></answer>", None)):
        with pytest.raises(InputError) as caught:
            pytest.fail(f"{truth!r} has {accuracy(scorer, truth, str(truth) if response is None else response)}")
        assert str(caught.value).startswith(f"rewards/{scorer}.py: ") and "\n" not in str(caught.value)
        assert "mine" in str(caught.value)
