"""The embedded tasks: files as the generators write them, and starts that leave room to climb.

Runs on images: test_toy_vision.py.
"""

import base64
import io
import json
import random
from collections import Counter
from functools import cache
from statistics import mean

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from agent import MultiTurn, get_tool_parser, load_tools
from data import toy, toy_long, toy_rare, toy_tools, toy_vision
from rewards.arithmetic import compute_score

TASKS = [toy, toy_tools, toy_vision]
GREEDY = {"do_sample": False, "temperature": None}
QUESTION = {"role": "user", "content": "630*52"}
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


def make(task):
    return task.make_processor() if task is toy_vision else task.make_tokenizer()


@cache
def start(task):
    """(processor or tokenizer, model)"""
    load = AutoProcessor if task is toy_vision else AutoTokenizer
    kind = AutoModelForImageTextToText if task is toy_vision else AutoModelForCausalLM
    path = task.FOLDER / "model"
    return load.from_pretrained(path), kind.from_pretrained(path, dtype=torch.float32).eval()


def tokenizer_of(task):
    processor = start(task)[0]
    return getattr(processor, "tokenizer", processor)


def read(task, name: str) -> list[dict]:
    return [json.loads(line) for line in (task.FOLDER / f"{name}.jsonl").read_text().splitlines()]


def answers(task, rows: list[dict], then: str = "", **how) -> list[str]:
    """To the rows' questions, all of as many tokens. then: what follows the prompt."""
    shown = {"tools": toy_tools.TOOLS} if task is toy_tools else {}
    processor, model = start(task)
    render = lambda row: processor.apply_chat_template(  # noqa: E731
        row["prompt"], tokenize=False, add_generation_prompt=True, **shown
    )
    images = {"images": [[decoded(row)] for row in rows]} if task is toy_vision else {}
    inputs = processor(text=[render(row) + then for row in rows], return_tensors="pt", **images)
    torch.manual_seed(0)
    out = model.generate(**inputs, max_new_tokens=24 if task is toy_tools else 16, **how)
    return tokenizer_of(task).batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def accuracy(task, rows: list[dict], *more, **how) -> float:
    texts, truths = answers(task, rows, *more, **how), [row["reward_model"]["ground_truth"] for row in rows]
    return mean(compute_score(row["data_source"], *x)["score"] for row, *x in zip(rows, texts, truths))


def decoded(row: dict) -> Image.Image:
    [image] = row["images"]
    return Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2])))


# ---- files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", TASKS)
def test_tokenizers_are_the_generators_and_fit_the_models(task, tmp_path):
    """AutoTokenizer has not put in another class."""
    fresh = make(task)
    fresh.save_pretrained(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (task.FOLDER / "model" / path.name).read_text()
    tokenizer, model = tokenizer_of(task), start(task)[1]
    call = toy_tools.tool_call("630*52") if task is toy_tools else ""
    text = PRINTABLE + "user: 1+1, assistant:  2 .\n<|im_start|>" + call + "<|im_end|><pad>"
    ids = getattr(fresh, "tokenizer", fresh).encode(text)
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    assert tokenizer.decode(tokenizer.encode("=422<|im_end|>"), skip_special_tokens=True) == "=422"
    config, generation = model.config.get_text_config(), model.generation_config
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<pad>")
    assert tokenizer.eos_token_id == config.eos_token_id == generation.eos_token_id
    assert tokenizer.pad_token_id == config.pad_token_id == generation.pad_token_id
    assert len(tokenizer) == config.vocab_size
    assert sum(path.stat().st_size for path in (task.FOLDER / "model").iterdir()) <= 3 * 2**20


def test_rows_are_the_generators_with_the_right_truths_and_none_twice():
    for task in toy, toy_tools, toy_long:
        train, val = task.make_rows()
        assert (read(task, "train"), read(task, "val")) == (train, val)
        rows = [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in train + val]
        assert len({question for question, _ in rows}) == len(rows)
        if task is not toy_long:
            numbers = [[int(x) for x in question.replace("*", "+").split("+")] for question, _ in rows]
            assert len({frozenset(pair) for pair in numbers}) == len(rows) or task is toy_tools  # in no order
            truths = [a + b if task is toy else a * b for a, b in numbers]
            assert [int(truth) for _, truth in rows] == truths
            assert task is toy or all(10_000 <= truth <= 99_999 for truth in truths)
    assert len({question[1:] for question, _ in rows}) == len(rows)  # train and val share no list
    for (question, truth), row in zip(rows, train + val):
        digits = [int(digit) for digit in question[2::2]]
        total = {"toy/add": sum(digits), "toy/subtract": -sum(digits)}
        total["toy/double"] = sum(digit * 2**place for place, digit in enumerate(reversed(digits)))
        assert truth == f"{total[row['data_source']] % 100:02}"
    for part in (train, val):
        counts = Counter(row["data_source"] for row in part)
        assert counts.keys() == total.keys() and len({*counts.values()}) == 1
    assert (toy_long.FOLDER / "model/tokenizer.json").read_text() == (toy.FOLDER / "model/tokenizer.json").read_text()
    few = (toy_rare.FOLDER / "few.jsonl").read_text()
    assert few == "".join((toy.FOLDER / "train.jsonl").read_text().splitlines(keepends=True)[:256])


# ---- templates -----------------------------------------------------------------------------------


def render(*messages: dict, tools=toy_tools.TOOLS, **kwargs) -> str:
    return tokenizer_of(toy_tools).apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)


def test_the_agent_loop_takes_the_template_of_tools_and_reads_the_calls():
    tokenizer, calculator = tokenizer_of(toy_tools), load_tools(("calculator",))
    prompt = "<|im_start|>user\n630*52<|im_end|>\n<|im_start|>assistant\n"
    assert render(QUESTION, tools=None, add_generation_prompt=True) == prompt
    assert tokenizer_of(toy).apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True) == prompt
    prompt = "<|im_start|>system\ntools: calculator<|im_end|>\n" + prompt
    for tools in toy_tools.TOOLS, [tool.get_openai_tool_schema() for tool in calculator.values()]:
        assert render(QUESTION, tools=tools, add_generation_prompt=True) == prompt
    assert len(tokenizer.encode(prompt)) == 24
    function = {"name": "calculator", "arguments": {"expression": "630*52"}}
    calls = {"role": "assistant", "content": "Hm.", "tool_calls": [{"type": "function", "function": function}] * 2}
    call = toy_tools.tool_call("630*52")
    assert render(QUESTION, calls) == f"{prompt}Hm.\n{call}\n{call}<|im_end|>\n"
    parse = get_tool_parser("auto", tokenizer, calculator)
    MultiTurn(tokenizer, calculator, parse)  # checks the template
    [read] = parse(call)
    assert (read.name, read.arguments, read.error) == ("calculator", {"expression": "630*52"}, None)


# ---- images --------------------------------------------------------------------------------------
def test_a_row_asks_for_what_its_image_shows_and_its_text_does_not_say():
    """No answer to a question is right in more than 1 of 4 rows: 3 standard deviations above 1 of 5 for the 85
    held-out rows of a colour. Blank rows differ in the image only."""
    splits = toy_vision.make_rows()
    train, val = splits
    assert (len(train), len(val)) == (4096, 256)
    questions = {(row["prompt"][0]["content"], row["extra_info"]["board"]) for row in train + val}
    assert len(questions) == len(train) + len(val)
    prompt = start(toy_vision)[0].apply_chat_template(val[0]["prompt"], tokenize=False, add_generation_prompt=True)
    encoded = start(toy_vision)[0](text=[prompt], images=[decoded(val[0])], return_tensors="pt")
    assert encoded["input_ids"].shape == (1, 21)  # within --max-prompt-length's default
    assert encoded["pixel_values"].shape == (1, 1, 3, 24, 24)
    for row in val:
        board, colour = row["extra_info"]["board"], row["prompt"][0]["content"].removeprefix("<image>")
        truth = str(board.lower().count(colour[0]))
        assert row["reward_model"]["ground_truth"] == truth and 1 <= int(truth) <= 5
        image = decoded(row)
        assert (image.mode, image.size) == ("RGB", (72, 72))
        shown = Counter(image.getpixel((24 * (k % 3) + 12, 24 * (k // 3) + 12)) for k in range(9))
        assert shown[toy_vision.COLOURS[colour]] == int(truth)
        assert compute_score("toy/vision", toy_vision.worked_response(colour, board), truth)["score"] == 1.0
    for split, blank in zip(splits, toy_vision.make_rows(blank=True)):
        for colour in toy_vision.COLOURS:
            own = [row for row in split if row["prompt"][0]["content"] == f"<image>{colour}"]
            most = max(Counter(row["reward_model"]["ground_truth"] for row in own).values())
            assert most / len(own) < (0.25 if len(own) > 1000 else 0.34)
        assert {decoded(row).tobytes() for row in blank} == {bytes([255]) * 72 * 72 * 3}
        assert [row | {"images": []} for row in blank] == [row | {"images": []} for row in split]


# ---- starts --------------------------------------------------------------------------------------
def test_the_later_pupils_of_toy_rare_hardly_ever_work_a_sum_out():
    demonstrate, rng = toy_rare.pupils(), random.Random(0)
    for count, share in ((toy_rare.FIRST * toy_rare.BATCH, toy.SHARE_WORKED), (10_000, toy_rare.SHARE_RARE)):
        worked = mean("," in demonstrate(137, 285, rng) for _ in range(count))
        assert worked == pytest.approx(share, abs=0.01)  # 4 standard errors


def test_starts_leave_room_to_climb():
    """toy_rare: few right samples where there is a carry, none in the greedy answers. Images: greedy and sampled it is
    right in less than 40 %; made to work, in most; without the image in none of these."""
    sums, (_, images), (_, blank) = read(toy, "val"), toy_vision.make_rows(0), toy_vision.make_rows(0, blank=True)
    for task in toy, toy_rare:
        assert 0.2 <= accuracy(task, sums, **GREEDY) <= 0.4
    worked = ["," in text for text in answers(toy_rare, sums, do_sample=True, top_k=0)]
    assert 1 <= sum(worked) <= 20  # 8 of 256 expected
    assert 0.05 <= accuracy(toy_vision, images, **GREEDY) <= 0.4
    assert 0.2 <= accuracy(toy_vision, images, do_sample=True) <= 0.4
    working = GREEDY | {"begin_suppress_tokens": tokenizer_of(toy_vision).encode("=")}
    assert accuracy(toy_vision, images, **working) >= 0.8
    assert accuracy(toy_vision, blank, **working) <= 0.25


def test_the_start_with_tools_can_call_and_mostly_does_not():
    """Greedy, it answers in the head, and wrongly. Sampled, the share that calls is the demonstrations', within 0.08:
    3 standard deviations of 256 samples. Made to call, it copies factors and result, which RL would teach it slowly."""
    rows = read(toy_tools, "val")
    assert mean("<tool_call>" in text for text in answers(toy_tools, rows, **GREEDY)) < 0.3
    assert accuracy(toy_tools, rows, **GREEDY) < 0.1
    calls = mean("<tool_call>" in text for text in answers(toy_tools, rows, do_sample=True))
    assert calls == pytest.approx(toy_tools.SHARE_CALLS, abs=0.08)

    rows = rows[:64]
    expected = [toy_tools.tool_call(row["prompt"][0]["content"]) for row in rows]
    called = answers(toy_tools, rows, "<tool_call>", **GREEDY)
    assert mean("<tool_call>" + text == call for text, call in zip(called, expected)) >= 0.9
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    turns = [
        [{"role": "assistant", "content": call}, {"role": "tool", "content": truth}]
        for call, truth in zip(expected, truths)
    ]
    copied = answers(toy_tools, [row | {"prompt": row["prompt"] + more} for row, more in zip(rows, turns)], **GREEDY)
    assert mean(text == f"={truth}" for text, truth in zip(copied, truths)) >= 0.9


def test_a_start_that_does_each_step_but_forgets_most_carries():
    """The mean probability of the right tens, with and without a carry: within 0.06 of the demonstrations' share, which
    is 3 standard errors of the 900 carries as samples, and above 0.95, since it was trained until it copies."""
    tokenizer, model = start(toy_long)
    chosen: dict[bool, list[float]] = {True: [], False: []}
    rows = read(toy_long, "val")
    asked = [row["prompt"][0]["content"] for row in rows]
    texts = [toy_long.response(question[0], [int(digit) for digit in question[2::2]]) for question in asked]
    prompts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    batch = tokenizer([*map(str.__add__, prompts, texts)], padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        probs = model(**batch).logits[:, :-1].softmax(-1)  # (B, L - 1, V)
    probs = probs.gather(2, batch["input_ids"][:, 1:, None])[..., 0]  # (B, L - 1)
    for question, text, prompt, of_row in zip(asked, texts, prompts, probs.tolist()):
        kind, digits, begin = question[0], [int(digit) for digit in question[2::2]], len(tokenizer.encode(prompt)) - 1
        units = [0, *(int(text[4 * i + 3]) for i in range(len(digits)))]
        for i, digit in enumerate(digits):
            added = {"+": units[i] + digit, "-": units[i] - digit, "*": 2 * units[i] + digit}[kind]
            chosen[not 0 <= added <= 9].append(of_row[begin + 4 * i + 2])
    assert abs(mean(chosen[True]) - (1 - toy_long.SHARE_FORGOTTEN)) < 0.06
    assert mean(chosen[False]) > 0.95


@pytest.mark.parametrize(
    ("task", "held_out", "text"),
    [(toy, {"100+100"}, "137+285"), (toy_tools, {"200*50"}, "630*52"), (toy_vision, set(), "<image>red")],
)
def test_warm_up_learns_repeats_itself_and_writes_a_model_that_loads(tmp_path, task, held_out, text):
    sizes = {"steps": 20 if task is toy_vision else 40, "batch_size": 8, "hidden_size": 64}
    model, losses = task.warm_up(make(task), held_out, **sizes)
    assert len(losses) == sizes["steps"] and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    toy.save_model(model, make(task), tmp_path)
    images = {"images": [toy_vision.draw_board("rR.bGbg..")]} if task is toy_vision else {}
    inputs = type(make(task)).from_pretrained(tmp_path)(text=[text], return_tensors="pt", **images)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    again, _ = task.warm_up(make(task), held_out, **sizes)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))
