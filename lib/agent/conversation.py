"""From the messages of a request to the tokens of its context, with the answers that the episode had so far.

An answer that an agent sends back stays the tokens that were sampled: only what the chat template writes behind them is
encoded. Where the messages before it are not those of its context any more (dropped, edited, summarised), or where the
template rewrites history, the whole context is encoded anew."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from lib.agent.multi_turn import MultiTurn, assistant_message, glue, without_calls
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

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.before.ids if self.before else []) + len(self.new)


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
        self.summaries: dict[bytes, list[dict]] = {}  # by the key of the messages that they replace
        self.metrics: Counter[str] = Counter()
        self.calls = 0  # tool calls so far, which number the next

    def context(self, messages: list[dict], tools: list[dict]) -> Context:
        """messages, tools: of lib/agent/openai_api.py. Raises what a template raises for messages that it refuses."""
        keys, summary = _keys(messages, tools), []
        known = next((i for i in range(len(messages), 0, -1) if keys[i] in self.said), 0)
        replaced = next((i for i in range(len(messages), known - 1, -1) if keys[i] in self.summaries), 0)
        if replaced:
            summary, known = self.summaries[keys[replaced]], 0
            messages = summary + without_calls(messages[replaced:])
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
        unknown = own[len(summary) :] if before is None else new
        rewritten = any(message["role"] == "assistant" for message in unknown)
        if self.said and rewritten:
            self.metrics["lost_prefixes"] += 1
            self.metrics["tokens_reencoded"] += len(ids)
        return Context(before, ids, text, own, keys[-1], keys[0].hex())

    def request_for_summary(self, messages: list[dict], tools: list[dict]) -> list[dict]:
        """The messages up to the last answer, and one that asks for their summary. Empty without an answer, or if there
        is a summary of them."""
        n = _end_of_answers(messages)
        if not n or _keys(messages[:n], tools)[-1] in self.summaries:
            return []
        return [*messages[:n], {"role": "user", "content": self.settings.limits.compact_prompt}]

    def summarize(self, messages: list[dict], tools: list[dict], summary: str) -> None:
        """Contexts of these messages, and of all that extend them, are the messages before the first answer that was
        sampled, the summary, and the messages behind the last answer."""
        n = _end_of_answers(messages)
        keys = _keys(messages[:n], tools)
        answers = [i for i in range(n) if messages[i]["role"] == "assistant"]  # a prompt may hold examples
        first = next((i for i in answers if keys[i + 1] in self.said), answers[0])
        self.summaries[keys[n]] = [*messages[:first], {"role": "assistant", "content": summary}]

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


def _end_of_answers(messages: list[dict]) -> int:
    """The number of messages up to the last answer; 0: there is none."""
    return next((i for i in range(len(messages), 0, -1) if messages[i - 1]["role"] == "assistant"), 0)


def _keys(messages: list[dict], tools: list[dict]) -> list[bytes]:
    """The key of the tools, and those of the conversation up to each message."""
    keys = [sha256(json.dumps(tools, sort_keys=True).encode()).digest()]
    for message in messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _next_key(key: bytes, message: dict) -> bytes:
    """The key of a conversation with one more message. Agents may strip an answer, and write a call's JSON anew."""
    parts = message | {"content": message["content"].strip()} if message["role"] == "assistant" else message
    return sha256(key + json.dumps(parts, sort_keys=True).encode()).digest()
