"""From the messages of a request to the tokens of its context, with the answers that the episode had so far.

An answer that an agent sends back stays the tokens that were sampled: only what the chat template writes behind them is
encoded. Where the messages before it are not those of its context any more (dropped, edited, summarised), or where the
template rewrites history, the whole context is encoded anew."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from lib.agent.multi_turn import MultiTurn, assistant_message, glue
from lib.agent.token_tree import Answer
from lib.agent.tools import ToolCall
from lib.rollout import Generated


class Context(NamedTuple):
    """What an answer is sampled from."""

    before: Answer | None  # the answer that it continues
    new: list[int]  # the tokens behind it; without one, all
    text: str  # as the template renders it
    messages: list[dict]
    key: bytes  # of the messages and tools that the agent sent
    tools_key: str


@dataclass(eq=False)
class Said:
    """An answer in a conversation."""

    answer: Answer
    context: Context
    text: str  # without its end token
    has_end_token: bool
    message: dict  # as templates want it
    shown: dict  # what the agent gets of it: nothing from a stop string on


class Conversations:
    """Those of an episode."""

    def __init__(self, settings: MultiTurn):
        self.settings = settings
        self.said: dict[bytes, list[Said]] = defaultdict(list)  # by the key of the messages up to it
        self.metrics: Counter[str] = Counter()
        self.calls = 0  # tool calls so far, which number the next

    def context(self, messages: list[dict], tools: list[dict]) -> Context:
        """messages, tools: of lib/agent/openai_api.py. Raises what a template raises for messages that it refuses."""
        key = sha256(json.dumps(tools, sort_keys=True).encode()).digest()
        keys = [key]
        for message in messages:
            keys.append(_next_key(keys[-1], message))
        known = next((i for i in range(len(messages), 0, -1) if keys[i] in self.said), 0)
        escape, encode = self.settings.escape_special_tokens, self.settings.encode
        new, schemas = [escape(message) for message in messages[known:]], escape(tools)
        before, ids, forms = None, [], [new]
        if known:
            candidates = self.said[keys[known]]
            said = next((said for said in candidates if said.answer.is_leaf), candidates[0])
            plain = {"role": "assistant", "content": said.text}
            # a template writes JSON its own way: then the turn is shown as it was sampled
            forms = [[*said.context.messages, message, *new] for message in (said.message, plain)]
            for own in forms:
                text = self._render(own, schemas)
                rest = glue(self.settings, said.context.text, said.text, text)
                if rest is not None:
                    before, ids = said.answer, encode(rest)[said.has_end_token :]
                    self.metrics["tokens_reused"] += before.num_sampled
                    break
        if before is None:
            own = forms[0]
            text = self._render(own, schemas)
            ids = encode(text)
        rewritten = any(message["role"] == "assistant" for message in (own if before is None else new))
        if self.said and rewritten:
            self.metrics["lost_prefixes"] += 1
            self.metrics["tokens_reencoded"] += len(ids)
        return Context(before, ids, text, own, keys[-1], key.hex())

    def _render(self, messages: list[dict], tools: list[dict]) -> str:
        """Without lone surrogates, which JSON may hold and no tokenizer takes."""
        return self.settings.render(messages, tools).encode("utf-8", "replace").decode()

    def add(self, context: Context, answer: Answer, sampled: Generated, stop: tuple[str, ...], parse) -> Said:
        """The answer, as the agent gets it and may send it back. parse: finds its tool calls."""
        text, has_end_token = self.settings.turn_of(sampled, stop)
        calls: list[ToolCall] = parse(text)
        message = assistant_message(text, calls, parse, self.calls)
        self.calls += len(message.get("tool_calls", ()))
        content = message["content"]
        end = min((i for i in map(content.find, stop) if i >= 0), default=len(content))
        said = Said(answer, context, text, has_end_token, message, message | {"content": content[:end]})
        self.said[_next_key(context.key, said.shown)].append(said)
        return said


def _next_key(key: bytes, message: dict) -> bytes:
    """The key of a conversation with one more message. Agents may strip an answer, and write a call's JSON anew."""
    parts = message | {"content": message["content"].strip()} if message["role"] == "assistant" else message
    return sha256(key + json.dumps(parts, sort_keys=True).encode()).digest()
