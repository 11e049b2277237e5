"""--agent: what is trained is what was sampled, whatever an agent does; its endpoint, its processes, its rewards."""

import asyncio
import gzip
import json
import os
import random
import re
import resource
import shlex
import socket
import sys
import threading
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import aiohttp
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import make_episodes
from agent.http import endpoint
from agent.http.openai_api import read_messages, read_tools
from agent.http.program import Agent, call_function, load_agent
from agent.metrics import agent_metrics
from lib import InputError
from lib.args import RolloutArgs
from lib.data_proto import DataProto
from lib.distributed import reduce_metrics
from lib.model import load_tokenizer
from lib.rollout import Generated, Sampling
from tests.agent.random_agents import ACTIONS, APIS, HANG, Client, random_agent, segments_of, trained_of
from tests.agent.test_agent_loop import CALL, END, FORGETS, TEMPLATE, Add, NoModel, prompts_of, response_text, tokenizer
from tests.agent.test_agent_loop import settings as multi_turn
from tests.common import ROOT, fork, killed_with_its_children, metrics, ran, unexplained_metrics, wait_until

TOOLS = [Add().get_openai_tool_schema()]
T = 600


class Fake(NoModel):
    """An engine whose answers depend on the context and the seed alone. It remembers what it sampled, and never
    answers who says "hang" and no more."""

    def __init__(self, texts=("yes", "no", CALL % (1, 2), "<think>1</think>2", "a stop b"), steps=0, calls=False):
        """steps: how many an answer takes. calls: whether a call that is begun is often ended."""
        super().__init__()
        self.texts, self.sampled, self.steps, self.calls = texts, [], steps, calls

    def submit(self, request_id, prompt_ids, sampling, seed):
        super().submit(request_id, prompt_ids, sampling, seed)
        self.waiting[request_id].append(iter(range(self.steps)))

    def answer(self, context, sampling, seed, steps):
        if next(steps, None) is not None or re.search("(^|\n)hang(<|$)", tokenizer().decode(context)):
            return None
        return self.sample(context, sampling, seed)

    def sample(self, context, sampling, seed):
        draw = random.Random(f"{context} {seed}")
        ends = self.calls and tokenizer().decode(context).endswith('"arguments":') and draw.random() < 0.7
        text = ' {"a": 1, "b": 2}}\n</tool_call>' if ends else draw.choice(self.texts)
        stops = [i + len(string) for string in sampling.stop if (i := text.find(string)) >= 0]
        text = text[: min(stops)] if stops else text
        # not the tokens that an encoder would make of the text: each may be sampled letter by letter
        ids = [token for piece in (text if draw.random() < 0.5 else [text]) for token in encode(piece)]
        ids += [] if stops else encode(END)
        ids, cut = ids[: sampling.max_response_length], len(ids) > sampling.max_response_length
        self.sampled.append((context, ids))
        return Generated(ids, [-0.5 - token for token in ids], "length" if cut else "stop")


def encode(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def settings_of(play, template=TEMPLATE, timeout_s=20.0, ignore=frozenset(), **limits):
    agent = Agent(partial(call_function, play), timeout_s, "auto", Sampling(T), ignore)
    return replace(multi_turn(template=template, **limits), tools={}, agent=agent)


def play(agent, rows=1, engine=None, room=T, sampling=None, **kwargs):
    """(the batch, the engine) after each row's episode."""
    engine, how = engine or Fake(), settings_of(agent, **kwargs)
    sampling = sampling or Sampling(room)
    out = make_episodes(engine, how).generate(prompts_of(how, rows), sampling, list(range(rows)))
    return out, engine


def chat(agent, **kwargs):
    """play, of agent(client, row)."""

    async def with_client(url, key, row):
        async with Client(url, key) as client:
            return await agent(client, row)

    return play(with_client, **kwargs)


def as_text(body, template) -> str:
    how = settings_of(None, template)
    messages, tools = read_messages(body["messages"]), read_tools(body["tools"])
    text = how.render(how.escape_special_tokens(messages), how.escape_special_tokens(tools))
    if body.get("tool_choice", "auto") not in ("auto", "none"):
        text += CALL.partition(' {"a"')[0]
    return tokenizer().decode(encode(text))  # which knows no emoji


RANDOM = {"actions": ACTIONS, "forgets": st.booleans(), "room": st.sampled_from([T, 4000])}


@settings(max_examples=25)
@given(**RANDOM)
def test_every_trained_token_was_sampled_in_its_context(actions, forgets, room):
    check_episode("/chat/completions", actions, forgets, room)


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=10)
@given(**RANDOM)
def test_and_in_every_other_api(api, actions, forgets, room):
    actions = [(name, number) for name, number in actions if name != "n"]  # which they do not have
    check_episode(api, actions, forgets, room)


def check_episode(api, actions, forgets, room):
    """Each answer is trained exactly once, whatever the agent does with its history. The context is what the agent has
    sent, as the template shows it."""
    engine, answered, template = Fake(steps=3, calls=True), [], FORGETS if forgets else TEMPLATE
    out, _ = play(random_agent(actions, TOOLS, answered, api), engine=engine, room=room, template=template)
    assert sorted(trained_of(out)) == sorted(engine.sampled) != []
    if "stop" not in dict(actions):  # of which the agent does not see the end
        shown = [tokenizer().decode(context) for context, _ in engine.sampled]
        sent = [text for body in answered for text in [as_text(body, template)] * body.get("n", 1)]
        assert sorted("".join(text.split()) for text in shown) == sorted("".join(text.split()) for text in sent)
    mask = out.batch["response_mask"].bool()
    assert torch.equal(out.batch["rollout_log_probs"], torch.where(mask, -0.5 - out.batch["responses"], 0.0))
    assert int(out.batch["attention_mask"][0, -mask.shape[1] :].sum()) <= room


# ---- how contexts are found ------------------------------------------------------------------------
def converse(*steps, texts=("a" + "b" * 9,), **kwargs):
    """Each step makes the messages of a request from the prompt and the answers so far. Returns batch, metrics and
    engine."""

    async def agent(client, row):
        answers = []
        for step in steps:
            answers += await client.chat(step(row["prompt"], answers))

    out, engine = chat(agent, engine=Fake(texts), **kwargs)
    assert sorted(trained_of(out)) == sorted(engine.sampled)
    return out, out.non_tensor_batch["agent_metrics"][0], engine


def user(text):
    return {"role": "user", "content": text}


def first_request(prompt, said):
    return prompt


def test_an_answer_that_comes_back_keeps_its_tokens():
    """Though its text has other tokens, whatever an SDK adds to the message, and if it is stripped."""
    added = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    for change in ({}, added, {"content": "yes, yes"}, {"content": [{"type": "text", "text": "yes, yes"}]}):
        out, metrics, engine = converse(
            first_request,
            lambda prompt, said, change=change: [*prompt, {**said[0], **change}, user("go on")],
            texts=["yes, yes "],
        )
        [(context, first), (longer, _)] = engine.sampled
        assert longer[: len(context) + len(first)] == context + first
        assert len(segments_of(out)) == 1 and metrics["tokens_reused"] == len(first)
        assert metrics["lost_prefixes"] == metrics["forks"] == metrics["tokens_reencoded"] == 0


def test_an_answer_that_comes_back_in_another_api_keeps_its_tokens():
    """Also if its call is written anew."""

    async def agent(client, row):
        history = [*row["prompt"]]
        for client.api in ("/chat/completions", *APIS, "/chat/completions"):
            [said] = await client.chat(history, tools=TOOLS, max_tokens=99)
            [call] = said["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=2)
            history += [said, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]

    out, engine = chat(agent, engine=Fake([CALL % (1, 2)]), room=1500)
    assert len(segments_of(out)) == 1 and trained_of(out) == engine.sampled and len(engine.sampled) == 4
    assert response_text(out).count("<|im_end|>\n<|im_start|>tool\n3<|im_end|>") == 3


@pytest.mark.parametrize(
    "second, lost",
    [
        (lambda prompt, said: [*prompt, said[0] | {"content": "edited"}, user("go on")], 1),
        (lambda prompt, said: [prompt[0] | {"content": "other"}, said[0], user("go on")], 1),
        (lambda prompt, said: [said[0], user("go on")], 1),
        (lambda prompt, said: [user("summary"), user("go on")], 0),
        (first_request, 0),
    ],
    ids=["edited", "another prompt", "dropped", "summarised", "repeated"],
)
def test_another_history_begins_a_segment(second, lost):
    out, metrics, engine = converse(first_request, second)
    assert len(segments_of(out)) == 2 and metrics["lost_prefixes"] == lost and metrics["tokens_reused"] == 0
    assert metrics["tokens_reencoded"] == (len(engine.sampled[1][0]) if lost else 0)


def test_a_seed_repeats_an_answer_of_its_episode_and_no_other():
    """If it did, a group would have equal answers."""
    said = {}

    async def agent(client, row):
        asked = [[message["content"] for message in await client.chat(HELLO["messages"], seed=1)] for _ in range(3)]
        own = [message["content"] for _ in range(3) for message in await client.chat(HELLO["messages"])]
        said[row["prompt"][0]["content"]] = (asked, own)

    chat(agent, rows=2, engine=Fake([str(i) for i in range(99)]))
    for asked, own in said.values():
        assert asked[0] == asked[1] == asked[2] and len(set(own)) > 1
    assert said["0?"] != said["1?"]


def test_a_full_row_ends_its_episode():
    """Also if the agent does not expect it: a run without its long episodes would learn from the short ones only."""

    async def agent(client, row):
        for i in range(99):
            await client.chat([*row["prompt"], user("x" * i)])

    out, engine = chat(agent, room=200)
    assert out.non_tensor_batch["finish_reason"].tolist() == ["length"] and out.non_tensor_batch["answer"][0]
    assert sorted(trained_of(out)) == sorted(engine.sampled) and out.batch["response_mask"].any()
    assert out.batch["responses"].shape[1] <= 200


def test_a_client_that_leaves_leaves_nothing():
    """Not at the engine, not in the row, and not of the room that its request held."""
    engine = Fake()

    async def agent(client, row):
        left = asyncio.create_task(client.chat([HANG]))
        while not engine.waiting:
            await asyncio.sleep(0.001)
        left.cancel()
        await client.chat(row["prompt"])  # which waits for the room
        assert not engine.waiting

    out, _ = chat(agent, engine=engine)
    assert out.non_tensor_batch["agent_metrics"][0]["cancelled"] == 1 == len(trained_of(out))


def test_requests_wait_for_the_room_that_others_hold():
    async def agent(client, row):
        await asyncio.gather(*(client.chat([user(f"{i}")]) for i in range(5)))

    out, engine = chat(agent, room=5 * 45)
    assert out.non_tensor_batch["finish_reason"].tolist() == ["stop"] and len(engine.sampled) == 5


# ---- the endpoint --------------------------------------------------------------------------------
def ask(*requests):
    """(status, JSON) of each (path, body); body: JSON, or bytes."""
    answers = []

    async def agent(client, row):
        for path, body in requests:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with client.session.post(client.url + path, data=data) as answer:
                answers.append((answer.status, await answer.json()))
        await client.chat(row["prompt"])

    chat(agent)
    return answers


HELLO = {"messages": [user("hello")]}
ASK = {"max_tokens": 9} | HELLO
SAY, RAW = {"input": "hello"}, {"prompt": "hello"}
CALLED = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
DEEP, LONG = json.loads('{"a":' * 850 + "1" + "}" * 850), "1" * 20_000  # which a thread encodes
ANY_API = {
    "the body is not JSON": b"{",
    "the body must be a JSON object": [],
    "the body is not JSON ": b"[" * 100_000,
    "the body is not JSON  ": b"\xff\xfe",
}


def assistant(**message):
    return {"role": "assistant", **message}


def with_arguments(text):
    return {"messages": [assistant(tool_calls=[{"function": {"name": "f", "arguments": text}}])]}


def function(**function):
    return {"tools": [{"type": "function", "function": function}]}


# what is refused, by the message; blanks at its end make it another key
WRONG = {
    "/chat/completions": {
        "messages: give a list": {},
        "messages[0].role": {"messages": [{}]},
        "messages[0].content: only text": {"messages": [user([{"type": "image_url"}])]},
        "its arguments must be an object or the JSON text of one, not '{'": with_arguments("{"),
        "its arguments must be an object or the JSON text of one, not '[1]'": with_arguments("[1]"),
        "tools: give a list": HELLO | {"tools": {}},
        "tools[0]: give an object": HELLO | {"tools": [{"type": "web_search"}]},
        "tools[0].function.parameters": HELLO | function(name="f", parameters=5),
        "temperature 0: the policy is trained at --temperature 1": HELLO | {"temperature": 0},
        "tool_choice: there is no such function": HELLO | {"tool_choice": "required"},
        "tool_choice: only": HELLO | {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
        "top_logprobs: only 0": HELLO | {"top_logprobs": 5},
        "n: give a whole number from 1 to 128": HELLO | {"n": 10**9},
        "seed: give": HELLO | {"seed": "x"},
        "max_tokens: give": HELLO | {"max_tokens": 0},
        "stop: give Unicode texts of at most 1000": HELLO | {"stop": "x" * 1001},
        "stream: give true or false": HELLO | {"stream": "yes"},
        "stream_options: give": HELLO | {"stream_options": 1},
        "grammar is not supported": HELLO | {"grammar": "x"},
        "response_format: only": HELLO | {"response_format": {"type": "json_object"}},
    },
    "/messages": {
        "max_tokens: give a whole number": HELLO,
        "messages[0].role: give user or assistant": ASK | {"messages": [user("") | {"role": "system"}]},
        "messages[0].content: give a list": ASK | {"messages": [{"role": "user"}]},
        "messages[0].content.content: only text": ASK | {"messages": [user([{"type": "image", "source": {}}])]},
        "messages[0].content.content: only text ": ASK | {"messages": [assistant(content=[{"type": "thinking"}])]},
        "messages[0].content: give each tool_use": ASK | {"messages": [assistant(content=[CALLED | {"input": "{}"}])]},
        "to continue a message of the assistant": ASK | {"messages": [assistant(content="The")]},
        "tools[0]: only tools of the agent": ASK | {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        "tools[0]: give a name, and a JSON schema": ASK | {"tools": [{"name": "f"}]},
        "tool_choice: there is no such function": ASK | {"tool_choice": {"type": "tool", "name": ["f"]}},
        "tool_choice: only": ASK | {"tool_choice": {"type": []}},
        "stop_sequences: give": ASK | {"stop_sequences": "x"},
        "the chat template refuses them": ASK
        | {"messages": [assistant(content=[CALLED | {"input": DEEP}]), user("x")]},
        "prompt is too long: ": ASK | {"messages": [user(LONG)]},
        "top_k 5: the policy is trained at --top-k -1": ASK | {"top_k": 5},
        "thinking: only": ASK | {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "mcp_servers is not supported": ASK | {"mcp_servers": []},
    },
    "/responses": {
        "input: give a text": {},
        "input[0].role: give system": {"input": [{"role": "tool", "content": "x"}]},
        "input[0].type: only": {"input": [{"type": "reasoning", "summary": []}]},
        "input[0]: give an id": {"input": [{"type": "function_call", "arguments": "{}"}]},
        "tools[0]: give an object": SAY | {"tools": [{"type": "web_search"}]},
        "tool_choice: only": SAY | {"tool_choice": {"type": "web_search"}},
        "more tokens of context": {"input": LONG},
        "text: only": SAY | {"text": {"format": {"type": "json_object"}}},
        "previous_response_id is not supported": SAY | {"previous_response_id": "resp_1"},
    },
    "/completions": {
        "prompt: give a text": {},
        "prompt: give a text  ": {"prompt": []},
        "prompt: give a text      ": {"prompt": [1, True]},
        "prompt: give token ids from 0 to": {"prompt": [1, 10**9]},
        "prompt: give token ids from 0 to ": {"prompt": [[1], [-1]]},
        "more tokens of context": {"prompt": LONG},
        "n: at most 128 answers": {"prompt": ["a"] * 65, "n": 2},
        "n: give a whole number": RAW | {"n": 0},
        "echo: only false is supported": RAW | {"echo": True},
        "return_token_ids: give true or false": RAW | {"return_token_ids": 1},
        "messages is not supported": RAW | HELLO,
    },
}


@pytest.mark.parametrize("path", WRONG)
def test_wrong_requests_are_refused_in_the_form_of_their_api(path):
    wrong = ANY_API | WRONG[path]
    found = ask(*((path, body) for body in wrong.values()))
    for (status, answer), (why, body) in zip(found, wrong.items(), strict=True):
        error = answer["error"]
        assert status == 400 and why.strip() in error["message"], (body, answer)
        if path == "/messages":
            assert answer == {"type": "error", "error": error} and error.keys() == {"type", "message"}
        else:
            assert error.keys() == {"message", "type", "param", "code"}
        assert path == "/completions" or error["type"] == "invalid_request_error"


def test_odd_requests_in_every_api():
    odd, schema = "\ud800 \0 \u202e \U0001f600 <|im_start|>system", {"\ud800 <|im_end|>": 1}
    call = {"type": "tool_use", "id": "\ud800", "name": "\udfff", "input": {"\ud800": "\udfff"}}
    answer = {"type": "tool_result", "tool_use_id": "\ud800", "content": odd, "is_error": True}
    said = [user(odd), assistant(content=[call]), user([answer, {"type": "text", "text": odd}])]
    marked = {"messages": said, "system": [{"type": "text", "text": odd, "cache_control": {"type": "ephemeral"}}]}
    marked |= {"tools": [{"name": odd, "description": None, "input_schema": schema, "type": "custom"}]}
    marked |= {"thinking": {"type": "disabled"}, "metadata": {"user_id": "me"}, "temperature": 1.0, "top_k": None}
    items = [{"type": "function_call", "call_id": odd, "name": odd, "arguments": '{"\\ud800": 1}'}]
    items += [{"type": "function_call_output", "call_id": odd, "output": [{"type": "input_text", "text": odd}]}]
    own = {"input": items, "instructions": odd, "text": {"format": {"type": "text"}}, "store": False, "user": odd}
    own |= {"tools": [{"type": "function", "name": odd, "strict": True, "parameters": schema}]}
    found = ask(("/messages", ASK | marked), ("/responses", own))
    assert [status for status, _ in found] == [200, 200], found


def test_apis_that_are_not_supported_say_so():
    found = ask(("/embeddings", HELLO), ("/messages/count_tokens", HELLO), ("/nothing", HELLO))
    assert [status for status, _ in found] == [501, 404, 404]
    known = "use /v1/chat/completions, /v1/responses, /v1/messages, /v1/completions"
    assert known in found[0][1]["error"]["message"]
    assert found[1][1]["type"] == "error" and found[1][1]["error"]["type"] == "not_found_error"  # Anthropic's form


def test_a_call_s_arguments_are_the_same_in_all_forms():
    """As JSON text, which OpenAI's API has, as an object, which rows have, and left out."""

    def history(**function):
        call = {"id": "1", "type": "function", "function": {"name": "f"} | function}
        answer = {"role": "tool", "tool_call_id": "1", "content": "3"}
        return {"messages": [user("a"), assistant(content=None, tool_calls=[call]), answer]}

    forms = [{"arguments": '{"a": 1}'}, {"arguments": {"a": 1}}]
    forms += [{}, {"arguments": ""}, {"arguments": None}, {"arguments": "null"}, {"arguments": "{}"}]
    found = ask(*(("/chat/completions", history(**form)) for form in forms))
    assert [status for status, _ in found] == [200] * len(forms)
    lengths = [answer["usage"]["prompt_tokens"] for _, answer in found]
    assert lengths[0] == lengths[1] > lengths[2] and len({*lengths[2:]}) == 1


def test_streams_and_log_probs():
    got = {}

    async def agent(client, row):
        body = {"messages": row["prompt"], "tools": TOOLS, "logprobs": True, "seed": 5, "n": 2}
        got["whole"] = (await client.post(body))[1]
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with client.session.post(f"{client.url}/chat/completions", json=body) as answer:
            assert answer.content_type == "text/event-stream"
            got["events"] = (await answer.text()).split("\n\n")

    chat(agent, engine=Fake([CALL % (1, 2)]), room=1500)
    *events, done, end = got["events"]
    assert done == "data: [DONE]" and end == ""
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert events[-1]["usage"] == got["whole"]["usage"] and not events[-1]["choices"]
    for i, choice in enumerate(got["whole"]["choices"]):
        said, last = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == i]
        [streamed], [call] = said["delta"].pop("tool_calls"), choice["message"].pop("tool_calls")
        assert streamed == call | {"index": 0, "id": streamed["id"]} and said["delta"] == choice["message"]
        assert last["finish_reason"] == choice["finish_reason"] == "tool_calls"
        tokens = choice["logprobs"]["content"]
        assert "".join(token["token"] for token in tokens) == CALL % (1, 2) + END
        assert all(token["logprob"] < 0 for token in tokens) and said["logprobs"]["content"] == tokens


def test_the_openai_sdk_in_the_way_of_its_documentation():
    """Its own types read every answer, and its messages come back as the same tokens."""
    import openai  # a second, that others need not wait for

    async def agent(url, key, row):
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            create = client.chat.completions.create
            assert [model.id async for model in client.models.list()] == ["policy"]
            messages = [*row["prompt"]]
            said = (await create(model="x", messages=messages, tools=TOOLS)).choices[0]
            [call] = said.message.tool_calls
            assert said.finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
            messages += [said.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            async with client.chat.completions.stream(model="x", messages=messages, tools=TOOLS) as stream:
                streamed = (await stream.get_final_completion()).choices[0]
            messages += [streamed.message.model_dump(), {"role": "user", "content": "go on"}]
            await create(model="x", messages=messages, tools=TOOLS)

    assert_answered(*play(agent, engine=Fake([CALL % (1, 2)])), answers=3, segments=1)


def assert_answered(out, engine, answers, segments):
    assert out.non_tensor_batch["finish_reason"].tolist() == ["stop"] and len(engine.sampled) == answers
    assert len(segments_of(out)) == segments and sorted(trained_of(out)) == sorted(engine.sampled)


def test_the_anthropic_sdk_in_the_way_of_its_documentation():
    import anthropic

    [function] = [tool["function"] for tool in TOOLS]
    tools = [{"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}]
    turns = []

    async def agent(url, key, row):
        ask = {"model": "x", "max_tokens": 99, "system": "You add.", "tools": tools}
        async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as client:
            create, messages = client.messages.create, [*row["prompt"]]
            said = await create(messages=messages, **ask)
            text, call = said.content
            assert (text.text, call.input, said.stop_reason) == ("yes", {"a": 1, "b": 2}, "tool_use")
            result = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]
            messages += [assistant(content=said.content), user(result)]
            async with client.messages.stream(messages=messages, **ask) as stream:
                parts = [part async for part in stream.text_stream]
                streamed = await stream.get_final_message()
            text, call = streamed.content
            assert parts == ["yes"] and (text.text, call.input) == ("yes", {"a": 1, "b": 2})
            assert streamed.stop_reason == "tool_use" and streamed.usage != said.usage
            turns.extend([said.usage.output_tokens, streamed.usage.output_tokens])
            messages += [assistant(content=streamed.content), user("go on")]
            stopped = await create(messages=messages, stop_sequences=["no", "es"], **ask)
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "es")
            assert [block.text for block in stopped.content] == ["y"]
            messages += [assistant(content=stopped.content), user("go on")]
            cut = await create(messages=messages, **ask | {"max_tokens": 1})
            assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 1
            turns.append(cut.usage.input_tokens)

    out, engine = play(agent, engine=Fake(["yes\n" + CALL % (1, 2)]), room=1500)
    assert_answered(out, engine, answers=4, segments=1)
    assert turns == [*(len(ids) for _, ids in engine.sampled[:2]), len(engine.sampled[3][0])]


def test_the_openai_sdk_with_responses():
    import openai

    function = TOOLS[0]["function"]
    tools = [{"type": "function", "name": function["name"], "parameters": function["parameters"], "strict": False}]

    async def agent(url, key, row):
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            create, ask = client.responses.create, {"model": "x", "tools": tools, "instructions": "You add."}
            items = [*row["prompt"]]
            said = await create(input=items, **ask)
            call = said.output[1]
            assert said.output_text == "yes" and json.loads(call.arguments) == {"a": 1, "b": 2}
            assert said.status == "completed" and said.usage.total_tokens > said.usage.output_tokens > 0
            items += [*said.output, {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
            async with client.responses.stream(input=items, **ask) as stream:
                kinds = [event.type async for event in stream]
                streamed = await stream.get_final_response()
            assert streamed.output_text == "yes" and streamed.output[1].arguments == call.arguments
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            assert {"response.output_text.delta", "response.function_call_arguments.done"} <= {*kinds}
            items += [*(item.model_dump() for item in streamed.output), user("go on")]
            cut = await create(input=items, max_output_tokens=1, **ask)
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            events = [event async for event in await create(input=items, max_output_tokens=1, stream=True, **ask)]
            assert events[-1].type == "response.incomplete"
            assert [event.sequence_number for event in events] == [*range(len(events))]

    out, engine = play(agent, engine=Fake(["yes\n" + CALL % (1, 2)]), room=1500)
    assert_answered(out, engine, answers=4, segments=2)  # two answers to the last request


def test_nobody_gets_in_without_the_key_of_an_episode_that_runs():
    keys, urls, statuses = [], [], []

    async def agent(url, key, row):
        async with Client(url, key) as client:
            await client.chat(row["prompt"])
        for wrong in ("", "x", key[:-1], key + "0", key.swapcase(), "é" * 70, *keys):
            for name, text in (("Authorization", f"Bearer {wrong}"), ("x-api-key", wrong), ("Authorization", key)):
                async with aiohttp.ClientSession(headers={name: text}) as session:
                    for path in ("/chat/completions", "/completions", "/responses", "/messages", "/nothing"):
                        async with session.post(url + path, json=HELLO) as answer:
                            statuses.append(answer.status)
                            code = "authentication_error" if path == "/messages" else "invalid_api_key"
                            assert code in await answer.text()
        keys.append(key)
        urls.append(url)

    for _ in range(2):
        _, engine = play(agent)
        assert len(engine.sampled) == 1
    assert set(statuses) == {401} and all(url.startswith("http://127.0.0.1:") for url in urls)
    assert keys[0][-64:] != keys[1][-64:]


def test_requests_too_large_and_clients_that_hang(monkeypatch):
    monkeypatch.setattr(endpoint, "LARGEST_BODY", 1000)
    monkeypatch.setattr(endpoint, "BODY_S", 0.05)
    monkeypatch.setattr(endpoint, "_of_loop", WeakKeyDictionary())  # a new one, with these limits
    statuses = []

    async def agent(url, key, row):
        port = int(url.rpartition(":")[2].removesuffix("/v1"))
        silent = await asyncio.open_connection("127.0.0.1", port)  # sends nothing
        slow = await asyncio.open_connection("127.0.0.1", port)
        slow[1].write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode())
        slow[1].write(b"Content-Length: 100\r\n\r\n{")
        own = {"Content-Type": "image/png", "Connection": "close"}  # as the endpoint does with some of them
        own = [own | {"Content-Encoding": encoding} for encoding in ("gzip", "gzip", "unknown")]
        bodies = [b"x" * 2000, b"", gzip.compress(b"x" * 2000), b"x" * 99, b"{}"]
        async with Client(url, key) as client:
            for data, headers in zip(bodies, [{}, {"x": "y" * 20000}, *own], strict=True):
                async with client.session.post(f"{url}/chat/completions", data=data, headers=headers) as answer:
                    statuses.append(answer.status)
            await client.chat(row["prompt"])
        statuses.append(int((await slow[0].readline()).split()[1]))
        silent[1].close()
        slow[1].close()

    out, _ = play(agent)
    assert statuses == [413, 400, 413, 400, 400, 408] and out.non_tensor_batch["finish_reason"].tolist() == ["stop"]


def test_agents_of_a_batch_run_at_once(monkeypatch):
    """Each in a thread and with a connection of its own, where the process may open few files at first."""
    monkeypatch.setattr(endpoint, "_of_loop", WeakKeyDictionary())  # a new one
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    all_here = threading.Barrier(300)

    def agent(url, key, row):
        with socket.create_connection(("127.0.0.1", int(url.split(":")[2].removesuffix("/v1")))):
            all_here.wait(60)
        good(url, key, row)

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        out, _ = play(agent, rows=300)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert out.non_tensor_batch["finish_reason"].tolist() == ["stop"] * 300


# ---- agents that fail ----------------------------------------------------------------------------
def good(url, key, row):
    body, headers = json.dumps({"messages": row["prompt"]}).encode(), {"Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as answer:
        json.load(answer)


def one_each(*agents):
    """One that plays row i with agents[i]."""
    return lambda url, key, row: agents[int(row["prompt"][0]["content"][:-1])](url, key, row)


def failures(out) -> dict[str, float]:
    found = reduce_metrics(agent_metrics(out))
    return {key.rpartition("/")[2]: value for key, value in found.items() if "agent/failures" in key and value}


def test_what_a_function_returns_is_its_reward_and_a_failure_ends_its_episode_only(capsys):
    def returns(value, url, key, row):
        good(url, key, row)
        return value

    def raises(error, url, key, row):
        good(url, key, row)
        raise error

    async def exits_async(url, key, row):
        sys.exit(0)

    async def cancels_itself(url, key, row):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    rewards = [None, 2, {"reward": 0.5, "x": 3}, {"x": 1}, True]
    bad = [float("nan"), {"reward": 1.0, "x": "y"}, {"reward": 1.0, "\x1b[31m": 1}, {f"{i}": i for i in range(101)}]
    agents = [*(partial(returns, value) for value in [*rewards, *bad]), exits_async, cancels_itself]
    agents += [partial(raises, error) for error in (RuntimeError("the agent broke"), SystemExit(0))]
    out, _ = play(one_each(*agents), rows=13, engine=Fake(["yes"]))
    assert out.non_tensor_batch["finish_reason"].tolist() == [*["stop"] * 5, *["error"] * 8]
    assert out.batch["response_mask"].any(1).tolist() == [True] * 5 + [False] * 8
    assert out.batch["turn_rewards"].sum(1).tolist() == [0, 2, 0.5, 0, 1] + [0] * 8
    assert out.non_tensor_batch["answer"].tolist()[:5] == ["yes", None, None, "yes", None]
    assert failures(out) == {"exception": 4, "bad_reward": 4}
    assert reduce_metrics(agent_metrics(out))["agent/program/x"] == 2
    assert capsys.readouterr().out.count("RuntimeError: the agent broke") == 1
    with pytest.raises(InputError, match=r"all 1 episodes failed(.|\n)*without an answer"):
        play(lambda url, key, row: None)


def test_functions_out_of_time():
    over = threading.Event()

    async def waits(url, key, row):
        await asyncio.sleep(1000)

    def blocks(url, key, row):
        over.wait()

    async def hangs_at_the_engine(url, key, row):
        async with Client(url, key) as client:
            await client.chat([HANG])

    out, engine = play(one_each(waits, blocks, hangs_at_the_engine), rows=3, timeout_s=0.3)
    over.set()
    assert out.non_tensor_batch["finish_reason"].tolist() == ["abort"] * 3
    assert failures(out) == {"timeout": 3} and not out.batch["response_mask"].any() and not engine.waiting


LEFT = f"sleep {100_000 + os.getpid()}"  # processes that should end: no other test has such
DAEMON = "import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); [os.close(i) for i in range(3)]"
DAEMON += f"; os.execvpe('sleep', {LEFT.split()}, {{'PATH': os.environ['PATH']}})"
COMMANDS = {
    "true": "no_request",
    "exit 3": "exit_code",
    "kill -9 $$": "signal",
    # what it leaves behind ends with it: in its process group, in another session, as a daemon without its environment
    f"cat > /dev/null; {LEFT} & echo '{{\"reward\": 1}}'": "no_request",
    f"setsid {LEFT} & (setsid sh -c '{LEFT} & {LEFT}' &); kill -HUP $PPID": "no_request",
    f"{shlex.join([sys.executable, '-S', '-E', '-c', DAEMON])}; exit 4": "exit_code",
    # orphans that have ended take no process id
    "for i in $(seq 50); do (true &); done; "
    "until [ $(wc -w < /proc/$PPID/task/$PPID/children) = 1 ]; do sleep 0.01; done; exit 5": "exit_code",
    "head -c 3000000 /dev/zero": "no_request",
    'python3 -S -E -c "x = bytes(2**29)"': "exit_code",  # more than --agent-kwargs memory
    "yes | head -1": "no_request",
    'echo \'{"reward": "high"}\'': "bad_reward",
}
OUT_OF_TIME = [f"{LEFT} & {LEFT}", "yes", f"{LEFT} < /dev/null > /dev/null 2>&1", f"setsid {LEFT} & kill -STOP $$"]


def left_behind() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == LEFT.split()]


@pytest.mark.parametrize(
    "kinds, timeout_s", [(COMMANDS, 60.0), (dict.fromkeys(OUT_OF_TIME, "timeout"), 0.5)], ids=["end", "do not end"]
)
def test_commands_that_fail_end_with_all_their_processes(kinds, timeout_s):
    args = [RolloutArgs(agent=shlex.join(["sh", "-c", command]), agent_kwargs=("memory=200",)) for command in kinds]
    agents = [partial(asyncio.to_thread, good), *(load_agent(own, "auto").play for own in args)]
    how = settings_of(None, timeout_s=timeout_s)
    how = replace(how, agent=replace(how.agent, play=one_each(*agents)))
    prompts, seeds = prompts_of(how, len(agents)), [*range(len(agents))]
    out = make_episodes(Fake(), how).generate(prompts, Sampling(T), seeds)
    assert not psutil.wait_procs(left_behind(), timeout=60)[1]
    found = [{key[7:]: n for key, n in row.items() if "failed" in key} for row in out.non_tensor_batch["agent_metrics"]]
    assert found[1:] == [{kind: 1} for kind in kinds.values()]


def play_and_wait(pids):
    agent = load_agent(RolloutArgs(agent=f"sh -c '(setsid {LEFT} &); {LEFT} & {LEFT}'"), "auto")
    how = replace(settings_of(None), agent=replace(agent, timeout_s=1000))

    def tell():
        wait_until(lambda: len(left_behind()) == 3, 300)
        pids.send([process.pid for process in left_behind()])

    threading.Thread(target=tell).start()
    make_episodes(Fake(), how).generate(prompts_of(how, 1), Sampling(T), [0])


def test_no_agent_outlives_a_run_that_is_killed():
    assert len(killed_with_its_children(play_and_wait)) == 3


def test_agents_that_cannot_be():
    file = Path(__file__)
    for spec, why, *kwargs in (
        (f"{file}:nothing", "has no 'nothing'"),
        (f"{file}:T", "not a function"),
        ("'", "No closing quotation"),
        ("no_such_program x", "no such file and no such program"),
        (f"{file}:good", "--agent-kwargs memory=100: it limits the processes of a command", "memory=100"),
    ):
        with pytest.raises(InputError, match=why):
            load_agent(RolloutArgs(agent=spec, agent_kwargs=tuple(kwargs)), "auto")


# ---- a run -----------------------------------------------------------------------------------------
PROGRAM = """
import json, os, sys, urllib.request

TOOL = {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}
ASK = {"model": "any", "tools": [{"type": "function", "function": TOOL}], "max_tokens": 24}
URL, HEADERS = os.environ["OPENAI_BASE_URL"], {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
row = json.load(sys.stdin)
messages = row["prompt"]
for _ in range(3):
    body = json.dumps(ASK | {"messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/chat/completions", body, HEADERS)) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    if not (calls := messages[-1].get("tool_calls", [])):
        break
    for call in calls:
        try:
            a, b = json.loads(call["function"]["arguments"])["expression"].split("*")
            value = str(int(a) * int(b))
        except (ValueError, KeyError, AttributeError) as error:
            value = f"Error: {error}"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": value})
print("this is not the reward")
if len(messages) > 2:  # otherwise the scorer judges the answer
    print(json.dumps({"reward": row["reward_model"]["ground_truth"] in messages[-1]["content"], "calls": 1}))
"""
RUN = ["--model", str(ROOT / "data/toy_tools/model"), "--train-files", str(ROOT / "data/toy_tools/val.jsonl")]
RUN += ["--max-prompt-length", "32", "--max-response-length", "112", "--micro-batch-tokens", "600", "--seed", "3"]
RUN += ["--val-files", "none", "--prompts-per-step", "4", "--group-size", "4", "--total-steps", "2", "--lr", "3e-4"]


def test_a_run_trains_a_program(tmp_path):
    """Which knows nothing of it but two variables. A group has rewards of the program, and of the scorer where it gives
    none."""
    (tmp_path / "solve.py").write_text(PROGRAM)
    args = [*RUN, "--agent", f"{sys.executable} -S -E {tmp_path / 'solve.py'}"]
    ran(fork("grpo", tmp_path, *args, "--run-name", "r", "--record", str(tmp_path / "record")))
    ran(fork("grpo", tmp_path, *args, "--run-name", "again", "--replay", str(tmp_path / "record")))
    assert metrics(tmp_path / "r") == metrics(tmp_path / "again")
    for row in metrics(tmp_path / "r"):
        assert row["agent/failed"] == row["agent/aborted"] == row["agent/forks_mean"] == 0
        assert row["agent/turns_mean"] == row["agent/requests_mean"] > 1 and row["agent/lost_prefixes_mean"] == 0
        assert row["rollout/logp_diff_max"] < 1e-4 and row["training/rows_trained"] == 16
    assert unexplained_metrics(tmp_path / "r", "metrics.md", "multi_turn.md", "agents.md") == []
    own = load_tokenizer(str(ROOT / "data/toy_tools/model"))
    given, texts = set(), []
    for step in (1, 2):
        batch = DataProto.load_from_disk(tmp_path / f"record/step_00000{step}/rank_0_of_1/batch.safetensors")
        for i in range(len(batch)):
            [(ids, mask)] = segments_of(batch, i)
            texts.append(own.decode(ids))
            # the template's text around each sampled token
            shown = "".join(own.decode(token) if mine else "." for token, mine in zip(ids, mask))
            assert re.fullmatch(r"\.+(<tool_call>\n.*\n</tool_call><\|im_end\|>\.+)*[^.]+", shown), shown
            truth, answer = batch.non_tensor_batch["reward_model"][i]["ground_truth"], texts[-1].rsplit("=")[-1]
            score = batch.batch["token_level_scores"][i].sum().item()
            assert score == (answer == f"{truth}<|im_end|>")
            given.add((batch.non_tensor_batch["answer"][i] is None, score))
    assert {(True, 1.0), (False, 0.0)} <= given
    assert any("<|im_start|>tool\n" in text for text in texts)
