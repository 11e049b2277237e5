"""The embedded task: its files are the generator's, its start leaves room to climb, its scorer cannot be bluffed."""

import json
import random
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from data import toy, toy_long, toy_rare
from rewards.arithmetic import compute_score

MODEL = toy.FOLDER / "model"


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (toy.FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def test_rows_are_the_generators():
    train, val = toy.make_rows()
    assert read("train") == train
    assert read("val") == val


def test_train_and_val_share_no_sum_in_either_order():
    def key(row):
        return frozenset(row["prompt"][0]["content"].split("+"))

    train, val = read("train"), read("val")
    assert len({key(row) for row in train + val}) == len(train) + len(val)


def test_ground_truths_are_the_sums():
    for row in read("train") + read("val"):
        a, b = row["prompt"][0]["content"].split("+")
        assert row["reward_model"]["ground_truth"] == str(int(a) + int(b))


def test_responses_as_documented():
    assert toy.worked_response(137, 285) == "12,12,4=422"
    assert toy.careless_response(137, 285) == "=312"
    assert toy.worked_response(999, 999) == "18,19,19=1998"
    assert toy.careless_response(123, 456) == "=579"
    for row in read("val"):
        a, b = map(int, row["prompt"][0]["content"].split("+"))
        score = compute_score("toy/arithmetic", toy.worked_response(a, b), row["reward_model"]["ground_truth"])
        assert score["score"] == 1.0


def test_tokenizer_file_is_the_generators(tmp_path):
    toy.make_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (MODEL / name).read_text()


def test_tokenizer_round_trip(tokenizer):
    text = "".join(map(chr, range(32, 127))) + "\nuser: 1+1, assistant:  2 .\n<|im_end|><pad>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == toy.make_tokenizer().encode(text)  # AutoTokenizer has not put in another class
    assert tokenizer.unk_token_id not in tokenizer.encode(text)
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    assert tokenizer.decode(tokenizer.encode("=422<|im_end|>"), skip_special_tokens=True) == "=422"


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "137+285"}]
    text = "<|im_start|>user\n137+285<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer.encode(text) and len(ids) == 15
    messages += [{"role": "assistant", "content": "=422"}, {"role": "tool", "content": "no"}]
    text = text + "=422<|im_end|>\n<|im_start|>tool\nno<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text


def test_special_ids_agree(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    generation = GenerationConfig.from_pretrained(MODEL)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<pad>"
    assert tokenizer.eos_token_id == model.config.eos_token_id == generation.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id == generation.pad_token_id
    assert len(tokenizer) == model.config.vocab_size


def test_shipped_files_are_small():
    assert sum(path.stat().st_size for path in toy.FOLDER.rglob("*") if path.is_file()) <= 4 * 2**20


def accuracy(model, tokenizer, rows: list[dict]) -> float:
    prompts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows]
    ids = torch.tensor(prompts)  # every prompt has 15 tokens
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None, max_new_tokens=16)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    return sum(compute_score("toy/arithmetic", text, truth)["score"] for text, truth in zip(texts, truths)) / len(rows)


def test_start_leaves_room_to_climb(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    assert 0.2 <= accuracy(model, tokenizer, read("val")) <= 0.4


def test_a_start_that_hardly_ever_works_a_sum_out(tokenizer):
    """The task of benchmarks/comparison.py: few right samples where there is a carry, none in the greedy answers."""
    model = AutoModelForCausalLM.from_pretrained(toy_rare.FOLDER / "model", dtype=torch.float32).eval()
    rows = read("val")
    assert 0.2 <= accuracy(model, tokenizer, rows) <= 0.4
    prompts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows]
    ids = torch.tensor(prompts)
    torch.manual_seed(0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=16)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    assert 1 <= sum("," in text for text in texts) <= 20  # 8 of 256 expected


def test_the_later_pupils_hardly_ever_work_a_sum_out():
    demonstrate, rng = toy_rare.pupils(), random.Random(0)
    first = [demonstrate(137, 285, rng) for _ in range(toy_rare.FIRST * toy_rare.BATCH)]
    then = [demonstrate(137, 285, rng) for _ in range(10_000)]
    shares = [sum("," in text for text in texts) / len(texts) for texts in (first, then)]
    assert shares == pytest.approx([toy.SHARE_WORKED, toy_rare.SHARE_RARE], abs=0.01)  # 4 standard errors
    right = sum(text == toy.worked_response(137, 285) for text in first) / sum("," in text for text in first)
    assert right == pytest.approx((1 - toy_rare.SHARE_SLIPS) ** 3, abs=0.025)


# ---- long responses ------------------------------------------------------------------------------


def test_rows_of_lists_are_the_generators_and_have_the_last_total():
    files = [(toy_long.FOLDER / f"{name}.jsonl").read_text().splitlines() for name in ("train", "val")]
    train, val = ([json.loads(line) for line in lines] for lines in files)
    assert (train, val) == toy_long.make_rows()
    questions = [row["prompt"][0]["content"] for row in train + val]
    assert len({question[1:] for question in questions}) == len(questions)  # train and val share no list
    for row, question in zip(train + val, questions):
        digits = [int(digit) for digit in question[2::2]]
        total = {"toy/add": sum(digits), "toy/subtract": -sum(digits)}
        total["toy/double"] = sum(digit * 2**place for place, digit in enumerate(reversed(digits)))
        assert row["reward_model"]["ground_truth"] == f"{total[row['data_source']] % 100:02}"
    for rows in (train, val):
        counts = Counter(row["data_source"] for row in rows)
        assert counts.keys() == total.keys() and len({*counts.values()}) == 1


@pytest.mark.parametrize(
    ("kind", "right", "forgotten"),
    [
        ("+", "a404b812c921=21", "a404b802c901=01"),
        ("-", "a496b888c979=79", "a406b808c909=09"),
        ("*", "a404b816c941=41", "a404b806c901=01"),
    ],
)
def test_responses_of_lists_as_documented(kind, right, forgotten):
    assert toy_long.question(kind, [4, 8, 9]) == f"{kind}a4b8c9"
    assert toy_long.response(kind, [4, 8, 9]) == right
    assert toy_long.response(kind, [4, 8, 9], lambda: True) == forgotten


def test_a_start_that_does_each_step_but_forgets_most_carries(tokenizer):
    """The mean probability of the right tens, with and without a carry: within 0.06 of the demonstrations' share, which
    is 3 standard errors of the 900 carries as samples, and above 0.95, since it was trained until it copies."""
    path = toy_long.FOLDER / "model"
    assert (path / "tokenizer.json").read_text() == (MODEL / "tokenizer.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chosen: dict[bool, list[float]] = {True: [], False: []}
    rows = toy_long.make_rows()[1]
    asked = [row["prompt"][0]["content"] for row in rows]
    texts = [toy_long.response(question[0], [int(digit) for digit in question[2::2]]) for question in asked]
    prompts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    batch = tokenizer([*map(str.__add__, prompts, texts)], padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        probs = model(**batch).logits[:, :-1].softmax(-1)  # (B, L - 1, V)
    probs = probs.gather(2, batch["input_ids"][:, 1:, None])[..., 0]  # (B, L - 1)
    for question, text, prompt, of_row in zip(asked, texts, prompts, probs.tolist()):
        kind, digits, start = question[0], [int(digit) for digit in question[2::2]], len(tokenizer.encode(prompt)) - 1
        units = [0, *(int(text[4 * i + 3]) for i in range(len(digits)))]
        for i, digit in enumerate(digits):
            added = {"+": units[i] + digit, "-": units[i] - digit, "*": 2 * units[i] + digit}[kind]
            chosen[not 0 <= added <= 9].append(of_row[start + 4 * i + 2])
    assert abs(mean(chosen[True]) - (1 - toy_long.SHARE_FORGOTTEN)) < 0.06
    assert mean(chosen[False]) > 0.95


def test_few_rows_are_the_first_of_train():
    few = (toy_rare.FOLDER / "few.jsonl").read_text()
    assert few == "".join((toy.FOLDER / "train.jsonl").read_text().splitlines(keepends=True)[:256])


def test_warm_up_learns_and_writes_a_model_that_loads(tmp_path: Path):
    tokenizer = toy.make_tokenizer()
    sizes = {"steps": 40, "batch_size": 8, "hidden_size": 64}
    model, losses = toy.warm_up(tokenizer, {"100+100"}, **sizes)
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    toy.save_model(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path).encode("137+285")])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    again, _ = toy.warm_up(tokenizer, {"100+100"}, **sizes)
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("response", "score", "pred"),
    [
        ("=422", 1.0, "422"),
        ("12,12,4=422", 1.0, "422"),
        ("3=1=422", 1.0, "422"),
        ("=422\n", 1.0, "422"),
        ("=423", 0.0, "423"),
        ("=0422", 0.0, "0422"),
        ("=+422", 0.0, "+422"),
        ("=422.0", 0.0, "422.0"),
        ("=422 or 423", 0.0, "422 or 423"),
        ("=421,422", 0.0, "421,422"),
        ("=422=", 0.0, None),
        ("422", 0.0, None),
        ("", 0.0, None),
    ],
)
def test_scorer(response, score, pred):
    assert compute_score("toy/arithmetic", response, "422") == {"score": score, "pred": pred}
