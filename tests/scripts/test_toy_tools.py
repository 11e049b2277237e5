"""The embedded multi-turn task: files as the generator writes them, text that only grows, a start that rarely calls."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent import MultiTurn, get_tool_parser, load_tools
from data import toy, toy_tools
from rewards.arithmetic import compute_score

MODEL = toy_tools.FOLDER / "model"
QUESTION = {"role": "user", "content": "630*52"}


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (toy_tools.FOLDER / f"{name}.jsonl").read_text().splitlines()]


def factors(row: dict) -> tuple[int, int]:
    a, b = row["prompt"][0]["content"].split("*")
    return int(a), int(b)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def calculator():
    return load_tools(("calculator",))


def render(tokenizer, messages: list[dict], tools=toy_tools.TOOLS, **kwargs) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)


def test_rows_are_the_generators():
    train, val = toy_tools.make_rows()
    assert read("train") == train
    assert read("val") == val


def test_no_product_twice_all_of_five_digits_and_the_ground_truth():
    rows = read("train") + read("val")
    assert len({factors(row) for row in rows}) == len(rows) == 4096 + 256
    for row in rows:
        a, b = factors(row)
        assert row["reward_model"]["ground_truth"] == str(a * b)
        assert 10_000 <= a * b <= 99_999


def test_tokenizer_files_are_the_generators(tmp_path):
    toy_tools.make_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (MODEL / name).read_text()


def test_tokenizer_round_trip(tokenizer):
    text = "".join(map(chr, range(32, 127))) + "\n" + toy_tools.tool_call("630*52") + "<|im_end|><pad>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == toy_tools.make_tokenizer().encode(text)  # AutoTokenizer has not put in another class
    assert tokenizer.unk_token_id not in ids
    call = toy_tools.tool_call("630*52")
    assert len(tokenizer.encode(call)) == 12
    assert tokenizer.decode(tokenizer.encode(call + "<|im_end|>"), skip_special_tokens=True) == call


def test_chat_template(tokenizer, calculator):
    prompt = "<|im_start|>user\n630*52<|im_end|>\n<|im_start|>assistant\n"
    assert render(tokenizer, [QUESTION], tools=None, add_generation_prompt=True) == prompt
    prompt = "<|im_start|>system\ntools: calculator<|im_end|>\n" + prompt
    schemas = [tool.get_openai_tool_schema() for tool in calculator.values()]
    for tools in (toy_tools.TOOLS, schemas):
        assert render(tokenizer, [QUESTION], tools=tools, add_generation_prompt=True) == prompt
    assert len(tokenizer.encode(prompt)) == 24
    function = {"name": "calculator", "arguments": {"expression": "630*52"}}
    calls = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}] * 2}
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "630*52"}}\n</tool_call>'
    assert render(tokenizer, [QUESTION, calls]) == f"{prompt}{call}\n{call}<|im_end|>\n"
    calls["content"] = "Hm."
    assert render(tokenizer, [QUESTION, calls]) == f"{prompt}Hm.\n{call}\n{call}<|im_end|>\n"
    assert toy_tools.tool_call("630*52") == call


def test_a_conversation_only_grows_as_text_and_as_tokens(tokenizer):
    """What add_generation_prompt renders is a prefix of what follows, and each piece encodes by itself."""
    rng = random.Random(0)
    for _ in range(200):
        turns = toy_tools.demonstration(630, 52, True, rng) + toy_tools.demonstration(630, 52, True, rng)
        text, ids = "", []
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            for after in (
                render(tokenizer, [QUESTION, *turns[:i]], add_generation_prompt=True),
                render(tokenizer, [QUESTION, *turns[: i + 1]]),
            ):
                assert after.startswith(text)
                ids += tokenizer.encode(after[len(text) :])
                text = after
        assert ids == tokenizer.encode(text)


def test_the_agent_loop_takes_the_template_and_reads_the_calls(tokenizer, calculator):
    parse = get_tool_parser("auto", tokenizer, calculator)
    MultiTurn(tokenizer, calculator, parse)  # checks the template
    (call,) = parse(toy_tools.tool_call("630*52"))
    assert (call.name, call.arguments, call.error) == ("calculator", {"expression": "630*52"}, None)


def test_demonstrations(tokenizer, calculator):
    """Each share within 0.03 of its constant: at least 3 standard deviations of 8000 and, of calls, 2000 draws.

    A wrong digit is by chance the right one in 1 of 10 cases.
    """
    parse, rng = get_tool_parser("auto", tokenizer, calculator), random.Random(0)
    seen = [toy_tools.demonstration(a, 52, True, rng) for a in range(200, 1000) for _ in range(10)]
    calls, malformed, wrong, ignored = 0, 0, 0, 0
    for i, messages in enumerate(seen):
        a, found = 200 + i // 10, parse(messages[0]["content"])
        if not found:
            assert messages == [{"role": "assistant", "content": f"={a * 52}"}]
            continue
        calls += 1
        if found[0].error:
            assert len(messages) == 1
            malformed += 1
            continue
        left, right = found[0].arguments["expression"].split("*")
        assert messages[1] == {"role": "tool", "content": str(int(left) * int(right))}
        assert len(messages[1]["content"]) == 5
        wrong += found[0].arguments["expression"] != f"{a}*52"
        ignored += messages[2]["content"] != "=" + messages[1]["content"]
    answered = calls - malformed
    assert calls / len(seen) == pytest.approx(toy_tools.SHARE_CALLS, abs=0.03)
    assert malformed / calls == pytest.approx(toy_tools.SHARE_MALFORMED, abs=0.03)
    assert wrong / answered == pytest.approx(0.9 * toy_tools.SHARE_WRONG_DIGIT, abs=0.03)
    assert ignored / answered == pytest.approx(toy_tools.SHARE_IGNORED, abs=0.03)
    assert all(len(toy_tools.demonstration(630, 52, False, rng)) == 1 for _ in range(100))
    assert toy_tools.demonstration(630, 52, False, rng)[0]["content"] == "=32760"


def test_an_answer_after_a_call_is_scored():
    """The scorer sees the texts of all sampled turns, joined."""
    assert compute_score("toy/arithmetic", toy_tools.tool_call("630*52") + "=32760", "32760")["score"] == 1.0
    assert compute_score("toy/arithmetic", toy_tools.tool_call("630*52"), "32760")["score"] == 0.0


def test_special_ids_and_size(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert sum(path.stat().st_size for path in toy_tools.FOLDER.rglob("*") if path.is_file()) <= 4 * 2**20


def turns(model, tokenizer, prompts: list[str], **how) -> list[str]:
    """One assistant turn after each prompt; all prompts have as many tokens."""
    ids = torch.tensor([tokenizer.encode(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, **how)
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def test_start_can_call_and_mostly_does_not(tokenizer):
    """Greedy, it answers in the head, and wrongly. Sampled, the share that calls is the demonstrations', within 0.08:
    3 standard deviations of 256 samples. Made to call, it copies factors and result, which RL would teach it slowly."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    rows = read("val")
    prompts = [render(tokenizer, row["prompt"], add_generation_prompt=True) for row in rows]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    greedy = {"do_sample": False, "temperature": None}
    in_the_head = turns(model, tokenizer, prompts, **greedy)
    assert sum("<tool_call>" in text for text in in_the_head) < 0.3 * len(rows)
    right = [compute_score("toy/arithmetic", text, truth)["score"] for text, truth in zip(in_the_head, truths)]
    assert sum(right) < 0.1 * len(rows)
    torch.manual_seed(0)
    sampled = turns(model, tokenizer, prompts, do_sample=True)
    assert sum("<tool_call>" in text for text in sampled) / len(rows) == pytest.approx(toy_tools.SHARE_CALLS, abs=0.08)

    expected = [toy_tools.tool_call(row["prompt"][0]["content"]) for row in rows]
    rows, prompts = rows[:64], prompts[:64]
    called = turns(model, tokenizer, [prompt + "<tool_call>" for prompt in prompts], **greedy)
    assert sum("<tool_call>" + text == call for text, call in zip(called, expected)) >= 0.9 * len(rows)
    answered = [
        render(
            tokenizer,
            [*row["prompt"], {"role": "assistant", "content": call}, {"role": "tool", "content": truth}],
            add_generation_prompt=True,
        )
        for row, call, truth in zip(rows, expected, truths)
    ]
    copied = turns(model, tokenizer, answered, **greedy)
    assert sum(text == f"={truth}" for text, truth in zip(copied, truths)) >= 0.9 * len(rows)


def test_warm_up_learns_and_repeats_itself(tmp_path: Path):
    tokenizer = toy_tools.make_tokenizer()
    sizes = {"steps": 40, "batch_size": 8, "hidden_size": 64}
    model, losses = toy_tools.warm_up(tokenizer, {"200*50"}, **sizes)
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    toy.save_model(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path).encode("630*52")])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    again, _ = toy_tools.warm_up(tokenizer, {"200*50"}, **sizes)
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(p, q)
