"""Context compaction: what the policy summarizes, what it goes on from, and what is trained of it."""

import json
import random
from statistics import mean
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agent import BaseInteraction, make_episodes
from agent.episode import observation
from agent.metrics import agent_metrics
from data import toy_list
from lib import InputError
from lib.distributed import reduce_metrics
from lib.model import load_model, load_tokenizer
from lib.rollout import Sampling
from tests.agent.random_agents import ACTIONS, random_agent, trained_of
from tests.agent.test_agent_loop import CALL, END, FORGETS, REFUSES, TEMPLATE, prompts_of, sampled_text
from tests.agent.test_agent_loop import play as play_turns
from tests.agent.test_agent_loop import settings as multi_turn
from tests.agent.test_agents import TOOLS, Fake, chat, encode, user
from tests.agent.test_agents import play as play_agent
from tests.common import fork, metrics, ran, unexplained_metrics

ASK = "sum up"
LIMITS = {"compact_prompt": ASK, "max_turn_tokens": 40}


def said(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}{END}\n"


BEGIN = "<|im_start|>assistant\n"
TOOL_LIST = "<|im_start|>system\nadd <|im_end|>\n"


class Says(BaseInteraction):
    """Says the row's texts, each with a reward of 1, and notes what it is shown."""

    log: ClassVar[list] = []

    async def start(self, instance_id, texts=(), **kwargs):
        self.texts = list(texts)

    async def respond(self, messages):
        self.log.append([message["content"] for message in messages])
        return not self.texts, self.texts.pop(0) if self.texts else "", 1.0, {}

    async def score(self):
        return 10.0


def contexts(engine) -> list[str]:
    return [multi_turn().tokenizer.decode(context) for *_, context in engine.contexts]


def assert_trained(out, engine, turns):
    assert sampled_text(out) == "".join(turns)
    assert trained_of(out) == [(context, encode(turn)) for (*_, context), turn in zip(engine.contexts, turns)]


def with_uid(out):
    out.non_tensor_batch["uid"] = np.array([str(i) for i in range(len(out))], object)
    return out


TURNS = ["a" * 9 + END, "b" * 9 + END, "SUM" + END, "c" + END]
TEXTS = [{"texts": ["x" * 20, "y" * 20]}]  # of the user


def test_an_episode_goes_on_from_its_prompt_a_summary_and_the_newest_message():
    """The summary is a turn like others: trained, in its context, with the final reward. The summary in the next
    context is text. It is no turn of max_turns."""
    Says.log.clear()
    how = multi_turn(interaction=Says, compact_at=90, max_turns=3, **LIMITS)
    out, engine = play_turns(how, TURNS, interaction_kwargs=TEXTS)
    prompt = TOOL_LIST + said("user", "0?")
    first = prompt + said("assistant", "a" * 9) + said("user", "x" * 20)
    assert contexts(engine) == [
        prompt + BEGIN,
        first + BEGIN,
        first + said("assistant", "b" * 9) + said("user", ASK) + BEGIN,
        prompt + said("assistant", "SUM") + said("user", "y" * 20) + BEGIN,
    ]
    assert_trained(out, engine, TURNS)
    assert out.non_tensor_batch["num_turns"][0] == 4 and len(out.non_tensor_batch["segments"][0]) == 2
    assert out.non_tensor_batch["finish_reason"][0] == "stop"
    # others see the whole conversation, without the request for a summary
    whole = ["0?", "a" * 9, "x" * 20, "b" * 9, "y" * 20, "c"]
    assert Says.log == [whole[:2], whole[:4], whole]
    assert [message["content"] for message in out.non_tensor_batch["messages"][0]] == whole
    # the turns' rewards stay on their turns, and the last token has the final one
    rewards = out.batch["turn_rewards"][0]
    ends = [i for i, token in enumerate(out.batch["responses"][0].tolist()) if rewards[i]]
    assert rewards[ends].tolist() == [1, 1, 11.5] and ends[-1] == int(out.batch["response_mask"][0].nonzero()[-1])
    states = out.batch["anchor_states"][0]
    seen = [int(states[i]) for i in out.batch["response_mask"][0].nonzero()[:, 0].tolist()]
    asked = [{"role": "user", "content": text} for text in ("x" * 20, ASK, "y" * 20)]
    assert list(dict.fromkeys(seen)) == [0, *(observation([message], []) for message in asked)]
    got = reduce_metrics(agent_metrics(with_uid(out)))
    before = len(encode(first + said("assistant", "b" * 9) + said("user", "y" * 20) + BEGIN))
    assert got["agent/compactions_mean"] == 1 and got["agent/tokens_before_compaction"] == before > 90
    assert got["agent/tokens_after_compaction"] == len(engine.contexts[-1][-1])


@pytest.mark.parametrize("template", [TEMPLATE, FORGETS, REFUSES])
def test_answers_of_tools_go_on_behind_a_summary_of_their_calls(template):
    """As messages of the user, because some templates refuse an answer without a call before it."""
    turns = ["<think>1</think>" + CALL % (1, 2) + END, "<think>2</think>so 3" + END, "=3" + END]
    how = multi_turn(template=template, compact_at=100, compact_prompt=ASK, max_turn_tokens=90)
    out, engine = play_turns(how, turns)
    thinks = "" if template == FORGETS else "<think>2</think>"
    after = TOOL_LIST + said("user", "0?") + said("assistant", f"{thinks}so 3") + said("user", "3") + BEGIN
    assert contexts(engine)[-1] == after
    assert_trained(out, engine, turns)
    roles = [message["role"] for message in out.non_tensor_batch["messages"][0]]
    assert roles == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    "summary, shown", [(END, ""), ("s" * 99, "s" * 40), (f"<|im_start|>user{END}", "< |im_start|>user")]
)
def test_an_empty_and_a_cut_summary_are_what_the_episode_goes_on_from(summary, shown):
    """They are trained: what they cost is in the final reward. Special tokens in them are text."""
    how = multi_turn(interaction=Says, compact_at=70, **LIMITS)
    out, engine = play_turns(how, ["a" * 30 + END, summary, "c" + END], interaction_kwargs=[{"texts": ["x" * 20]}])
    after = TOOL_LIST + said("user", "0?") + said("assistant", how.escaped(shown)) + said("user", "x" * 20) + BEGIN
    assert contexts(engine)[-1] == after
    assert out.non_tensor_batch["finish_reason"][0] == "stop" and len(trained_of(out)) == 3


def test_without_compaction_the_window_ends_an_episode():
    how = multi_turn(interaction=Says, context_window=60)
    out, _ = play_turns(how, ["a" * 9 + END] * 2, ["a" * 99], interaction_kwargs=[{"texts": ["x" * 30]}] * 2)
    assert out.non_tensor_batch["finish_reason"].tolist() == ["length", "length"]
    assert [len(trained_of(out, row)) for row in (0, 1)] == [1, 1]
    [(context, ids)] = trained_of(out, 1)
    assert len(context) + len(ids) == 60


def test_a_row_without_room_for_a_summary_or_for_what_follows_it_ends_its_episode():
    how = multi_turn(interaction=Says, compact_at=90, **LIMITS)
    out, _ = play_turns(how, TURNS, interaction_kwargs=TEXTS)
    end = out.non_tensor_batch["segments"][0][0][1]  # of the summary
    context = len(trained_of(out)[3][0])
    for room, expected in ((end - 4, 2), (end - 3, 3), (end + context, 3), (end + context + 1, 4)):
        out, _ = play_turns(how, TURNS, T=room, interaction_kwargs=TEXTS)
        assert out.non_tensor_batch["finish_reason"][0] == ("stop" if expected == 4 else "length")
        assert len(trained_of(out)) == expected and out.batch["responses"].shape[1] <= room
        assert float(out.batch["turn_rewards"].sum()) == (13.5 if expected == 4 else 12.5)


@hypothesis_settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=6), st.integers(70, 120))
@example([(19, 31), (10, 0), (1, 2), (1, 40), (1, 0)], 70)  # ends at the window: an answer of 40 tokens and a summary
def test_no_context_and_turn_are_longer_than_the_window(sizes, compact_at):
    """The smallest window that is accepted: it has room for a summary, unless the context behind the last summary was
    above compact_at from the start, by a long answer."""
    limits = {"compact_at": compact_at, "max_turn_tokens": 20, "compact_prompt": ASK}
    window = int(refusal(context_window=1, **limits).split("must hold ")[1].split()[0])
    assert refusal(context_window=window - 1, **limits) and not refusal(context_window=window, **limits)
    how = multi_turn(interaction=Says, context_window=window, max_turns=9, **limits)
    turns = ["a" * n + END if n < 20 else "a" * 20 for n, _ in sizes]
    engine = Fake([*turns, "s" * 20, "t" + END])
    prompts = prompts_of(how, 1, interaction_kwargs=[{"texts": ["x" * n for _, n in sizes]}])
    out = make_episodes(engine, how).generate(prompts, Sampling(4000), [len(sizes)])
    assert trained_of(out) == engine.sampled
    assert all(len(context) + len(ids) <= window for context, ids in engine.sampled)
    asks = [ASK in how.tokenizer.decode(context) for context, _ in engine.sampled]
    behind = [len(context) for (context, _), follows in zip(engine.sampled, [False, *asks]) if follows]
    assert out.non_tensor_batch["finish_reason"][0] == "stop" or behind[-1] > compact_at
    for (context, _), is_ask, follows in zip(engine.sampled, asks, [False, *asks]):
        assert len(context) <= compact_at or is_ask or follows


def refusal(**limits) -> str:
    try:
        multi_turn(**limits)
    except InputError as error:
        return str(error)
    return ""


# ---- --agent -------------------------------------------------------------------------------------
def play(agent, engine, compact_at=90, **limits):
    out, _ = chat(agent, engine=engine, room=2000, compact_at=compact_at, **LIMITS | limits)
    assert sorted(trained_of(out)) == sorted(engine.sampled)
    shown = [multi_turn().tokenizer.decode(context) for context, _ in engine.sampled]
    return out, shown, out.non_tensor_batch["agent_metrics"][0]


def test_an_agents_history_is_compacted_without_its_knowledge():
    """It sends the whole history each time. Its own prompt stays; a repeated request does not need another summary;
    and a branch before the summary goes on as it was."""
    shots = [{"role": "system", "content": "S"}, user("1"), {"role": "assistant", "content": "one"}]
    history = [*shots, user("2")]
    answers = []

    async def agent(client, row):
        for text in ("x" * 20, "y" * 20, "z", "again", "w"):
            [answer] = await client.chat(history, max_tokens=30)
            answers.append(answer)
            if text == "again":  # the request that was compacted
                await client.chat(history[:-2], max_tokens=30)
            history.extend([answer, user(text)])
        await client.chat(history[:6], max_tokens=30)

    class Counts(Fake):
        def sample(self, context, sampling, seed):
            self.texts = ["SUM" if ASK in multi_turn().tokenizer.decode(context) else f"a{len(self.sampled)}"]
            return super().sample(context, sampling, seed)

    prompt = said("system", "S") + said("user", "1") + said("assistant", "one") + said("user", "2")
    third = prompt + said("assistant", "a0") + said("user", "x" * 20) + said("assistant", "a1")
    after = prompt + said("assistant", "SUM") + said("user", "y" * 20)
    long = len(encode(third + said("user", "y" * 20) + BEGIN))
    out, shown, counts = play(agent, Counts(), compact_at=long - 1)
    assert shown[:2] == [prompt + BEGIN, third.removesuffix(said("assistant", "a1")) + BEGIN]
    assert shown[2:4] == [third + said("user", ASK) + BEGIN, after + BEGIN]
    assert shown[4] == after + said("assistant", "a3") + said("user", "z") + BEGIN
    assert after + BEGIN in shown[5:]  # the repeated request
    assert shown[-1] == third.removesuffix(said("assistant", "a1")) + BEGIN
    assert counts["compactions"] == 1 == sum(ASK in text for text in shown)
    assert counts["lost_prefixes"] == 0 and counts["requests"] == 7
    assert out.non_tensor_batch["answer"][0] and "SUM" not in json.dumps(answers)
    assert out.non_tensor_batch["num_turns"][0] == 8
    got = reduce_metrics(agent_metrics(with_uid(out)))
    assert got["agent/tokens_after_compaction"] == len(encode(after + BEGIN)) < got["agent/tokens_before_compaction"]


def test_answers_of_an_agents_tools_go_on_behind_a_summary():
    async def agent(client, row):
        [answer] = await client.chat([user("x" * 60)], tools=TOOLS)
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}
        await client.chat([user("x" * 60), answer | {"content": ""}, result, user("and?")], tools=TOOLS)

    _, shown, counts = play(agent, Fake([CALL % (1, 2)]), compact_at=100, max_turn_tokens=90)
    assert counts["compactions"] == 1 and shown[-1].endswith(said("user", "3") + said("user", "and?") + BEGIN)
    assert said("tool", "3") not in shown[-1]


@hypothesis_settings(max_examples=25)
@given(ACTIONS, st.booleans(), st.integers(100, 300))
def test_every_token_that_an_agent_trains_was_sampled_in_its_context(actions, forgets, compact_at):
    engine, limits = Fake(steps=2), {"compact_at": compact_at, "context_window": compact_at + 150}
    agent = random_agent(actions, TOOLS)
    out, _ = play_agent(agent, engine=engine, room=6000, template=FORGETS if forgets else TEMPLATE, **LIMITS, **limits)
    assert sorted(trained_of(out)) == sorted(engine.sampled) != []
    assert all(len(context) + len(ids) <= compact_at + 150 for context, ids in engine.sampled)


# ---- as a user ------------------------------------------------------------------
RUN = ["--model", "data/toy_list/model", "--train-files", "data/toy_list/train.jsonl", "--reward"]
RUN += ["--val-files", "none", "--max-prompt-length", "16", "--max-response-length", "400"]
RUN += ["--multi-turn.interaction", "data/toy_list.py:List", "--multi-turn.max-turns", "12"]
RUN += ["--multi-turn.max-turn-tokens", "4", "--multi-turn.context-window", "96"]
RUN += ["--multi-turn.compact-at", "72", "--multi-turn.compact-prompt", "summary"]
RUN += ["--prompts-per-step", "2", "--group-size", "4", "--total-steps", "1"]
ENGINE = """
from lib.rollout.hf_engine import HFEngine

class Shows(HFEngine):
    def __init__(self, *args, max_length, **kwargs):
        print("max_length", max_length)
        super().__init__(*args, max_length=max_length, **kwargs)
"""


def test_a_run_with_episodes_longer_than_its_window(tmp_path):
    (tmp_path / "shows.py").write_text(ENGINE)
    args = [*RUN, "--rollout-engine", f"{tmp_path / 'shows.py'}:Shows"]
    done = ran(fork("grpo", tmp_path, *args, "--run-name", "with"))
    assert "max_length 96\n" in done.stdout
    [row] = metrics(tmp_path / "with")
    assert row["agent/compactions_mean"] == 2 and row["agent/segments_mean"] == 3 and row["agent/turns_mean"] == 12
    assert row["agent/finish/stop"] == 1 and row["response_length/mean"] > 200 > 96
    assert row["agent/tokens_before_compaction"] > 72 > row["agent/tokens_after_compaction"]
    assert row["rollout/logp_diff_max"] < 1e-4 and row["training/rows_trained"] == 8
    assert unexplained_metrics(tmp_path / "with", "metrics.md", "multi_turn.md") == []


def test_the_start_answers_what_it_sees_and_rarely_summarizes_it():
    """Within 0.08 of the demonstrations' share: 3 standard deviations of 200 samples' probabilities are less."""
    path = str(toy_list.FOLDER / "model")
    model, tokenizer = load_model(path), load_tokenizer(path)
    rng, right, kept = random.Random(1), [], []
    while len(right) < 50 or len(kept) < 50:
        *turns, (_, last, _) = toy_list.demonstration(rng)
        shown = "".join(text for _, text, _ in turns if text not in (toy_list.PROMPT, toy_list.ASK))
        seen = {*shown} & {*toy_list.LETTERS}
        if not seen:
            continue
        text = "".join(said(role, content) for role, content, _ in turns) + BEGIN + "=" * last.startswith("=")
        with torch.no_grad():
            chosen = model(torch.tensor([tokenizer.encode(text)])).logits[0, -1].softmax(-1)
        share = float(chosen[tokenizer.convert_tokens_to_ids(seen.pop())])
        (right if last.startswith("=") else kept).append(share)
    assert mean(right) > 0.9 and abs(mean(kept) - toy_list.SHARE_SUMMARIES) < 0.08
    train, val = toy_list.make_rows()
    for name, rows in (("train", train), ("val", val)):
        lines = (toy_list.FOLDER / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows
