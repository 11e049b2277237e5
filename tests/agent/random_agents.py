"""Agents that do at random what agents do to a conversation, and the sequences that a row holds of them."""

import asyncio
import random
from contextlib import suppress

import aiohttp
from hypothesis import strategies as st

HANG = {"role": "user", "content": "hang"}


class Full(Exception):
    """The row is."""


class Client:
    """An agent's: plain HTTP."""

    def __init__(self, url: str, key: str):
        self.session, self.url = aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}), url

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.session.close()

    async def post(self, body, path="/chat/completions", **kwargs):
        """(status, JSON)"""
        async with self.session.post(self.url + path, json=body, **kwargs) as answer:
            return answer.status, await answer.json()

    async def chat(self, messages, timeout=None, **body) -> list[dict]:
        """The messages of the answer's choices."""
        status, found = await self.post({"messages": messages, **body}, timeout=timeout)
        if status == 400 and found["error"]["code"] == "context_length_exceeded":
            raise Full
        assert status == 200, found
        return [choice["message"] for choice in found["choices"]]


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


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["go on", "go on", "tool", "retry", "edit", "drop", "summarise", "fork", "n", "own prompt", "leave", "stop"]
        ),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=7,
)


def random_agent(actions, tools, answered=None):
    """answered: a list that gets the body of each request that was answered."""

    async def agent(url, key, row):
        async with Client(url, key) as client:
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
                elif action == "leave":
                    with suppress(TimeoutError):
                        await client.chat([HANG], timeout=aiohttp.ClientTimeout(0.02))

    return agent
