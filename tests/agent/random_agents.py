"""Agents that do at random what agents do to a conversation, and the sequences that a row holds of them."""

import asyncio
import json
import random
from contextlib import suppress

import aiohttp
from hypothesis import strategies as st

HANG = {"role": "user", "content": "hang"}
LEAVES = aiohttp.ClientTimeout(0.02)


class Full(Exception):
    """The row is."""


def call_of(name: str, function: dict) -> dict:
    return {"id": name, "type": "function", "function": function}


def said(text: str, calls: list[dict]) -> list[dict]:
    return [{"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})]


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
        call_of(block["id"], {"name": block["name"], "arguments": json.dumps(block["input"])})
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    return said("".join(block["text"] for block in answer["content"] if block["type"] == "text"), calls)


def as_messages(body) -> dict:
    """A request to /messages like this one to /chat/completions."""
    choice = body.get("tool_choice")
    named = choice["function"] | {"type": "tool"} if isinstance(choice, dict) else None
    tools = [tool["function"] for tool in body.get("tools", ())]
    return {
        "max_tokens": body.get("max_tokens", 60),
        "system": "".join(message["content"] for message in body["messages"] if message["role"] == "system"),
        "messages": [to_blocks(message) for message in body["messages"] if message["role"] != "system"],
        "tools": [{"input_schema": f["parameters"]} | {k: f[k] for k in ("name", "description")} for f in tools],
        "tool_choice": named or {"type": "any" if choice == "required" else choice or "auto"},
        "stop_sequences": body.get("stop"),
    }


def to_items(message) -> list[dict]:
    """The items of /responses that are a message of chat completions."""
    if message["role"] == "tool":
        own = {"call_id": message["tool_call_id"], "output": message["content"]}
        return [{"type": "function_call_output", **own}]
    calls = message.get("tool_calls", ())
    items = [{"role": message["role"], "content": message["content"]}] if message["content"] or not calls else []
    return items + [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]


def from_items(answer) -> list[dict]:
    calls = [
        call_of(item["call_id"], {name: item[name] for name in ("name", "arguments")})
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return said("".join(item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"), calls)


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
    answered = [] if answered is None else answered

    async def agent(url, key, row):
        async with Client(url, key, api) as client:
            histories, sent = [row["prompt"]], []

            async def ask(messages, **body):
                sent.append((messages, body))
                for message in await client.chat(messages, **{"tools": tools, **body}):
                    if random.Random(len(sent)).random() < 0.3 and not message.get("tool_calls"):
                        message = {"role": "assistant", "content": message["content"] + " \n"}  # agents reformat
                    histories.append([*messages, message])
                answered.append({"messages": messages, "tools": tools, **body})

            async def act(action, number):
                history = histories[number % len(histories)]
                user = {"role": "user", "content": f"and {number}? <|im_end|> \U0001f600"}
                calls = history[-1].get("tool_calls") or []
                answers = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
                longer = [*history, *answers, user]
                named = {"type": "function", "function": {"name": "add"}}
                before, more = sent[number % len(sent)]
                acts = {
                    "go on": lambda: ask(longer),
                    "tool": lambda: ask([*history, *(answers or [user])], tool_choice=("auto", "none")[number % 2]),
                    "retry": lambda: ask(before, **more),
                    "edit": lambda: ask([*(m | {"content": f"edited {number}"} for m in history), user]),
                    "drop": lambda: ask([*history[number % len(history) :], user]),
                    "summarise": lambda: ask([{"role": "system", "content": f"so far: {history}"[:60]}, user]),
                    "fork": lambda: asyncio.gather(*(ask(longer, seed=i, max_tokens=9) for i in range(2))),
                    "n": lambda: ask(longer, n=1 + number % 3),
                    "own prompt": lambda: ask([{"role": "system", "content": "other"}, user], tools=[]),
                    "stop": lambda: ask(longer, stop=["stop", "e"]),
                    "force": lambda: ask(longer, tool_choice=named if number % 2 else "required"),
                    "interrupt": lambda: client.interrupt({"messages": longer, "tools": tools}),
                    "leave": lambda: client.chat([HANG], timeout=LEAVES),
                }
                with suppress(TimeoutError):
                    await acts[action]()
                if action == "interrupt":
                    answered.append({"messages": longer, "tools": tools})

            await ask(row["prompt"])
            for action, number in actions:
                await act(action, number)

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

            async def act(action, number):
                history = histories[number % len(histories)]
                user = text(f"<|im_end|>\n<|im_start|>user\nand {number}?<|im_end|>\n<|im_start|>assistant\n")
                prompts, more = bodies[number % len(bodies)]
                acts = {
                    "go on": lambda: ask(history + user),
                    "force": lambda: ask(history + user),
                    "tool": lambda: ask(history + text(f"\nand {number}: ")),  # as agents of base models
                    "retry": lambda: ask(*prompts, **more),
                    "edit": lambda: ask(history[:-1] + text(f"edited {number}") + user),
                    "drop": lambda: ask(history[number % len(history) :] + user),
                    "summarise": lambda: ask(text(f"so far {number}: ")),
                    "fork": lambda: asyncio.gather(*(ask(history + user, seed=i, max_tokens=9) for i in range(2))),
                    "n": lambda: ask(history + user, n=1 + number % 3),
                    "own prompt": lambda: ask(history + user, text("other ")),
                    "stop": lambda: ask(history + user, stop=["stop", "e"]),
                    "interrupt": lambda: client.interrupt({"prompt": history + user, "max_tokens": 60}),
                    "leave": lambda: client.post({"prompt": "hang", "max_tokens": 9}, client.api, timeout=LEAVES),
                }
                with suppress(TimeoutError):
                    await acts[action]()
                if action == "interrupt":
                    sent.append(history + user)

            await ask(text("Q: "))
            for action, number in actions:
                await act(action, number)

    return agent
