"""Agents that do at random what agents do to a conversation, and the sequences that a row holds of them."""

import asyncio
import json
import random
from contextlib import suppress

import aiohttp
from hypothesis import strategies as st

HANG = {"role": "user", "content": "hang"}


class Full(Exception):
    """The row is."""


def to_blocks(message) -> dict:
    """A message of chat completions, in Anthropic's form."""
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    text = message["content"]
    blocks = [{"type": "text", "text": text}] if text or message["role"] == "user" else []
    for call in message.get("tool_calls", ()):
        own = {"name": call["function"]["name"], "input": json.loads(call["function"]["arguments"])}
        blocks.append({"type": "tool_use", "id": call["id"], **own})
    return {"role": message["role"], "content": blocks}


def from_blocks(answer) -> list[dict]:
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    return [{"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})]


def as_messages(body) -> dict:
    """A request to /messages like this one to /chat/completions."""
    said, choice = [message for message in body["messages"] if message["role"] != "system"], body.get("tool_choice")
    named = choice["function"] | {"type": "tool"} if isinstance(choice, dict) else None
    system = [message["content"] for message in body["messages"] if message["role"] == "system"]
    tools = [tool["function"] for tool in body.get("tools", ())]
    tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in tools]
    return {
        "max_tokens": body.get("max_tokens", 60),
        "system": "".join(system),
        "messages": [to_blocks(message) for message in said],
        "tools": tools,
        "tool_choice": named or {"type": "any" if choice == "required" else choice or "auto"},
        "stop_sequences": body.get("stop"),
    }


def to_items(message) -> list[dict]:
    """The items of /responses that are a message of chat completions."""
    if message["role"] == "tool":
        own = {"call_id": message["tool_call_id"], "output": message["content"]}
        return [{"type": "function_call_output", **own}]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls", ())
    ]
    said = [{"role": message["role"], "content": message["content"]}] if message["content"] or not calls else []
    return said + calls


def from_items(answer) -> list[dict]:
    calls = [
        {"id": item["call_id"], "type": "function", "function": {name: item[name] for name in ("name", "arguments")}}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    text = "".join(item["content"][0]["text"] for item in answer["output"] if item["type"] == "message")
    return [{"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})]


def as_response(body) -> dict:
    """A request to /responses like this one to /chat/completions."""
    choice = body.get("tool_choice")
    return {
        "input": [item for message in body["messages"] for item in to_items(message)],
        "tools": [{"type": "function", **tool["function"]} for tool in body.get("tools", ())],
        "tool_choice": choice["function"] | {"type": "function"} if isinstance(choice, dict) else choice,
        "max_output_tokens": body.get("max_tokens", 60),
    }


APIS = {"/messages": (as_messages, from_blocks), "/responses": (as_response, from_items)}


def check(status, found) -> None:
    """Raises Full."""
    if status == 400 and "more tokens of context" in found["error"]["message"]:
        raise Full
    assert status == 200, found


class Client:
    """An agent's: plain HTTP."""

    def __init__(self, url: str, key: str, api: str = "/chat/completions"):
        self.session, self.url = aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}), url
        self.api = api

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.session.close()

    async def post(self, body, path="/chat/completions", **kwargs):
        """(status, JSON)"""
        async with self.session.post(self.url + path, json=body, **kwargs) as answer:
            return answer.status, await answer.json()

    async def chat(self, messages, timeout=None, **body) -> list[dict]:
        """The messages of the answer's choices, whatever the API."""
        own = {"messages": messages, **body}
        to, back = APIS.get(self.api, (dict, lambda found: [choice["message"] for choice in found["choices"]]))
        status, found = await self.post(to(own), self.api, timeout=timeout)
        check(status, found)
        return back(found)

    async def interrupt(self, body) -> None:
        """Asks for a stream, and leaves when it begins."""
        to, _ = APIS.get(self.api, (dict, None))
        async with self.session.post(self.url + self.api, json=to(body) | {"stream": True}) as answer:
            check(answer.status, await answer.json() if answer.status != 200 else None)


def segments_of(out, row=0) -> list[tuple[list[int], list[int]]]:
    """(ids, which of them are trained) of each segment, the first with the prompt."""
    n = int(out.batch["attention_mask"][row, -out.batch["responses"].shape[1] :].sum())
    ids, mask = out.batch["responses"][row, :n].tolist(), out.batch["response_mask"][row, :n].tolist()
    prompt, P = out.non_tensor_batch["raw_prompt_ids"][row], out.batch["prompts"].shape[1]
    positions = out.batch["position_ids"][row, P : P + n].tolist()
    found = []
    for start, end in out.non_tensor_batch["segments"][row]:
        before = prompt if start == 0 and positions[:1] != [0] else []
        assert positions[start:end] == list(range(len(before), len(before) + end - start))
        found.append(([*before, *ids[start:end]], [0] * len(before) + mask[start:end]))
    assert sum(end - start for start, end in out.non_tensor_batch["segments"][row]) == n
    return found


def trained_of(out, row=0) -> list[tuple[list[int], list[int]]]:
    """(context, ids) of each run of trained tokens."""
    found = []
    for ids, mask in segments_of(out, row):
        edges = [i for i in range(len(mask) + 1) if ([0, *mask][i], [*mask, 0][i]) in ((0, 1), (1, 0))]
        found += [(ids[:start], ids[start:end]) for start, end in zip(edges[::2], edges[1::2])]
    return found


NAMES = ["go on", "go on", "tool", "retry", "edit", "drop", "summarise"]
NAMES += ["fork", "n", "own prompt", "leave", "interrupt", "stop", "force"]
ACTIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), min_size=1, max_size=7)


def random_agent(actions, tools, answered=None, api="/chat/completions"):
    """answered: a list that gets the body of each request that was answered."""

    async def agent(url, key, row):
        async with Client(url, key, api) as client:
            histories, sent = [row["prompt"]], []

            async def ask(messages, **body):
                sent.append((messages, body))
                for message in await client.chat(messages, **{"tools": tools, **body}):
                    if random.Random(len(sent)).random() < 0.3 and not message.get("tool_calls"):
                        message = {"role": "assistant", "content": message["content"] + " \n"}  # agents reformat
                    histories.append([*messages, message])
                if answered is not None:
                    answered.append({"messages": messages, "tools": tools, **body})

            await ask(row["prompt"])
            for action, number in actions:
                history = histories[number % len(histories)]
                user = {"role": "user", "content": f"and {number}? <|im_end|> \U0001f600"}
                calls = history[-1].get("tool_calls") or []
                answers = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
                if action == "go on":
                    await ask([*history, *answers, user])
                elif action == "tool":
                    await ask([*history, *(answers or [user])], tool_choice="none" if number % 2 else "auto")
                elif action == "retry":
                    await ask(sent[number % len(sent)][0], **sent[number % len(sent)][1])
                elif action == "edit":
                    await ask([*(m | {"content": f"edited {number}"} for m in history), user])
                elif action == "drop":
                    await ask([*history[number % len(history) :], user])
                elif action == "summarise":
                    await ask([{"role": "system", "content": f"so far: {history}"[:60]}, user])
                elif action == "fork":
                    await asyncio.gather(*(ask([*history, *answers, user], seed=i, max_tokens=9) for i in range(2)))
                elif action == "n":
                    await ask([*history, *answers, user], n=1 + number % 3)
                elif action == "own prompt":
                    await ask([{"role": "system", "content": "other"}, user], tools=[])
                elif action == "stop":
                    await ask([*history, *answers, user], stop=["stop", "e"])
                elif action == "force":
                    named = {"type": "function", "function": {"name": "add"}}
                    await ask([*history, *answers, user], tool_choice=named if number % 2 else "required")
                elif action == "interrupt":
                    body = {"messages": [*history, *answers, user], "tools": tools}
                    await client.interrupt(body)
                    if answered is not None:
                        answered.append(body)
                elif action == "leave":
                    with suppress(TimeoutError):
                        await client.chat([HANG], timeout=aiohttp.ClientTimeout(0.02))

    return agent


def random_raw_agent(actions, encode, in_ids, sent):
    """As random_agent, with raw prompts: texts or ids. sent: a list that gets the prompt of each answer."""

    async def agent(url, key, row):
        async with Client(url, key, "/completions") as client:
            histories, bodies = [], []  # a history: all up to the end of an answer, without its end token

            async def ask(*prompts, **body):
                bodies.append((prompts, body))
                own = {"prompt": [*prompts], "max_tokens": 60, "return_token_ids": in_ids, **body}
                status, found = await client.post(own, "/completions")
                check(status, found)
                asked = [prompt for prompt in prompts for _ in range(body.get("n", 1))]
                for prompt, choice in zip(asked, found["choices"], strict=True):
                    sent.append(prompt)
                    ended = in_ids and choice["token_ids"][-1:] == encode("<|im_end|>")
                    answer = choice["token_ids"][: -1 if ended else None] if in_ids else choice["text"]
                    histories.append(prompt + answer)

            def text(written):
                return encode(written) if in_ids else written

            await ask(text("Q: "))
            for action, number in actions:
                history = histories[number % len(histories)]
                user = text(f"<|im_end|>\n<|im_start|>user\nand {number}?<|im_end|>\n<|im_start|>assistant\n")
                if action in ("go on", "force"):
                    await ask(history + user)
                elif action == "tool":  # as agents of base models
                    await ask(history + text(f"\nand {number}: "))
                elif action == "retry":
                    prompts, body = bodies[number % len(bodies)]
                    await ask(*prompts, **body)
                elif action == "edit":
                    await ask(history[:-1] + text(f"edited {number}") + user)
                elif action == "drop":
                    await ask(history[number % len(history) :] + user)
                elif action == "summarise":
                    await ask(text(f"so far {number}: "))
                elif action == "fork":
                    await asyncio.gather(*(ask(history + user, seed=i, max_tokens=9) for i in range(2)))
                elif action == "n":
                    await ask(history + user, n=1 + number % 3)
                elif action == "own prompt":
                    await ask(history + user, text("other "))
                elif action == "stop":
                    await ask(history + user, stop=["stop", "e"])
                elif action == "interrupt":
                    await client.interrupt({"prompt": history + user, "max_tokens": 60})
                    sent.append(history + user)
                elif action == "leave":
                    with suppress(TimeoutError):
                        hang = {"prompt": "hang", "max_tokens": 9}
                        await client.post(hang, "/completions", timeout=aiohttp.ClientTimeout(0.02))

    return agent
