"""From the messages of a request to the tokens of its context, with the answers that the episode had so far.

An answer that an agent sends back stays the tokens that were sampled: only what the chat template writes behind them is
encoded. Where the messages before it are not those of its context any more (dropped, edited, summarised), or where the
template rewrites history, the whole context is encoded anew."""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from agent.http.token_tree import Answer, TokenTree
from agent.multi_turn import MultiTurn, assistant_message, glue
from agent.request import without_calls
from agent.tools.base import ToolCall
from lib.data.chat_template import start_of_text
from lib.rollout import Generated


class Context(NamedTuple):
    """What an answer is sampled from."""

    before: Answer | None  # the answer that it continues
    new: list[int]  # the tokens behind it; without one, all
    text: str  # as the template renders it, or the raw prompt
    messages: list[dict]
    key: bytes = b""  # of the messages and tools that the agent sent; empty for a raw prompt
    tools_key: str = ""
    prefill: str = ""  # the beginning of a forced call: given, at the end of `new`, and a part of the answer's text

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
    sampled: Generated
    has_end_token: bool
    message: dict  # as templates want it
    shown: dict  # what the agent gets of it: nothing from a stop string on


class Conversations:
    """Those of an episode."""

    def __init__(self, settings: MultiTurn, tree: TokenTree):
        self.settings, self.tree = settings, tree
        self.said: dict[bytes, list[Said]] = defaultdict(list)  # by the key of the messages up to it
        self.answers: list[Said] = []
        self.summaries: dict[bytes, list[dict]] = {}  # by the key of the messages that they replace
        self.metrics: Counter[str] = Counter()
        self.calls = 0  # tool calls so far, which number the next

    def context(self, messages: list[dict], tools: list[dict], prefill: str = "") -> Context:
        """messages, tools: of agent/http/openai_api.py. prefill: how the answer begins. Raises what a template raises
        for messages that it refuses."""
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
        return Context(before, ids + encode(prefill), text, own, keys[-1], keys[0].hex(), prefill)

    def raw_context(self, prompt: str | list[int]) -> Context:
        """Of a prompt that is no list of messages. In a text, special tokens are special tokens. If it begins with an
        earlier context and its answer, their tokens stay, and what follows is encoded."""
        if isinstance(prompt, list):
            before = self.tree.longest(prompt)
            ids, text = prompt[len(before.ids) if before else 0 :], self._decode(prompt)
            self.metrics["tokens_reused"] += before.num_sampled if before else 0
        else:
            text = prompt.encode("utf-8", "replace").decode()
            before, ids = self._continued(text)
        return Context(before, ids, text, [{"role": "user", "content": text}])

    def _continued(self, text: str) -> tuple[Answer | None, list[int]]:
        """(the answer that a raw prompt continues, the tokens behind it), or None and all tokens of the prompt."""
        encode, found = self.settings.encode, []
        for said in self.answers:
            end, kept = self._shown(said, text)
            left = len(said.sampled.token_ids) - kept
            if end:
                found.append((end, -left, said.answer.is_leaf, said))
        if found:  # the longest; of several one whose tokens all stay, and behind which there is nothing yet
            end, left, _, said = max(found, key=lambda own: own[:3])
            rest, answer = encode(text[end:]), said.answer
            self.metrics["tokens_reused"] += answer.num_sampled + left
            return (answer, rest) if left == 0 else (None, answer.ids[:left] + rest)
        ids = encode(text)
        if any(text.startswith(said.context.text) and text != said.context.text for said in self.answers):
            self.metrics["lost_prefixes"] += 1
            self.metrics["tokens_reencoded"] += len(ids)
        start = start_of_text(self.settings.tokenizer)
        return None, ids if ids[: len(start)] == start else start + ids

    def _shown(self, said: Said, text: str) -> tuple[int, int]:
        """If the text begins with an answer and its context: the number of characters up to there, and how many of the
        answer's tokens they show. Else (0, 0). Agents leave out the end token, white space, and what they did not get,
        from a stop string on."""
        start, ids = len(said.context.text), said.sampled.token_ids
        if not text.startswith(said.context.text):
            return 0, 0
        before_end = len(ids) - said.has_end_token
        for n in (len(ids), before_end):
            whole = said.text + self._decode(ids[before_end:n])
            if text.startswith(whole, start):
                return start + len(whole), n
        own = said.shown["content"].rstrip()
        if said.context.key or not text.startswith(own, start):
            return 0, 0
        n = bisect_right(range(len(ids)), len(own), key=lambda k: len(self._decode(ids[: k + 1])))
        kept = self._decode(ids[:n])
        return (start + len(kept), n) if text.startswith(kept, start) else (0, 0)

    def _decode(self, ids: list[int]) -> str:
        return self.settings.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

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
        text = context.prefill + text
        calls: list[ToolCall] = parse(text)
        message = assistant_message(text, calls, parse, self.calls)
        self.calls += len(message.get("tool_calls", ()))
        content = message["content"]
        begin = len(context.prefill)  # which no stop string ends
        end = min((i for own in stop if (i := content.find(own, begin)) >= 0), default=len(content))
        said = Said(answer, context, text, sampled, has_end_token, message, message | {"content": content[:end]})
        self.answers.append(said)
        if context.key:
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
