"""What requests in all APIs have in common: parameters, tools, messages, and what is wrong with them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lib.data.rows import arguments_of
from lib.rollout import Generated, Sampling

MODEL = "policy"
LARGEST_N = 128
MOST_TOKENS = 1 << 31
LONGEST_STOP = 1000  # characters of a stop string
# what --agent-kwargs ignore=... may name, in any of the APIs: without it a request has an answer of the same form
IGNORABLE = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
IGNORABLE |= {"logit_bias", "response_format", "text", "reasoning", "reasoning_effort", "verbosity", "thinking"}
IGNORABLE |= {"top_logprobs", "parallel_tool_calls", "include", "truncation"}


class BadRequest(Exception):
    """What is wrong with a request. param: the parameter; code: for programs."""

    def __init__(self, what: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(what)
        self.param, self.code, self.status = param, code, status


@dataclass
class Rules:
    """What the requests of an episode may name."""

    sampling: Sampling  # of training: another way to sample is refused
    ignore: frozenset[str] = frozenset()  # parameters that are accepted without an effect
    ignored: int = 0  # how many there were


@dataclass(frozen=True)
class Options:
    """How a request wants to be answered."""

    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    calls_tools: bool = False  # whether tool calls in the answer are read
    stream: bool = False
    stream_usage: bool = True
    forced: tuple[str, ...] = ()  # names of tools, of which one must be called
    prompts: tuple[str | list[int], ...] = ()  # in place of messages
    token_ids: bool = False  # whether the answer shows its tokens


@dataclass
class Choice:
    """One answer to a request."""

    message: dict  # as templates want it, without a stop string
    context: list[int]  # what it was sampled from
    sampled: Generated
    tokens: list[str]  # the text of each sampled token
    finish_reason: str
    stop: str | None = None  # the request's stop string that ended it


class Parameters(dict):
    """The parameters of a request that are neither null nor ignored. Its methods raise BadRequest."""

    def __init__(self, body: Any, read: set[str], ignored: set[str], fixed: dict[str, tuple], rules: Rules):
        """Others than these are refused, and so are values that are not in `fixed`, and another way to sample than
        training's. ignored: those without an effect on what is sampled."""
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        super().__init__({name: value for name, value in body.items() if value is not None})
        for name, value in [*self.items()]:
            code = "unsupported_value"
            if name not in read | ignored | fixed.keys():
                what, code = f"{name[:100]} is not supported", "unsupported_parameter"
            elif name in fixed and value not in fixed[name]:
                what = f"{name}: only {' or '.join(map(json.dumps, fixed[name]))} is supported"
            elif name in ("temperature", "top_p", "top_k") and value != (own := getattr(rules.sampling, name)):
                trained = f"the policy is trained at --{name.replace('_', '-')} {own:g}"
                what = f"{name} {str(value)[:20]}: {trained}; send that, or leave it out"
            else:
                continue
            if name not in rules.ignore:
                advice = f". The run's --agent-kwargs ignore={name} accepts and ignores it" if name in IGNORABLE else ""
                raise BadRequest(what + advice, name[:100], code)
            rules.ignored += 1
            del self[name]

    def whole(self, name: str, lowest: int, highest: int, default: int | None = None) -> int | None:
        value = self.get(name, default)
        if value is not None and not (type(value) is int and lowest <= value <= highest):
            raise BadRequest(f"{name}: give a whole number from {lowest} to {highest}", name)
        return value

    def max_tokens(self, name: str = "max_tokens") -> int | None:
        return self.whole(name, 1, MOST_TOKENS)

    def switch(self, name: str) -> bool:
        if not isinstance(value := self.get(name, False), bool):
            raise BadRequest(f"{name}: give true or false", name)
        return value

    def stop_strings(self, name: str) -> tuple[str, ...]:
        texts = self.get(name, [])
        if not isinstance(texts, list) or len(texts) > 16 or not all(isinstance(text, str) and text for text in texts):
            raise BadRequest(f"{name}: give a text or a list of at most 16 texts", name)
        if any(len(text) > LONGEST_STOP or not _is_unicode(text) for text in texts):  # engines take no others
            raise BadRequest(f"{name}: give Unicode texts of at most {LONGEST_STOP} characters", name)
        return tuple(texts)

    def system(self, name: str, kinds: tuple[str, ...] = ("text",)) -> list[dict]:
        """A message, if there is a text."""
        text = text_of(self.get(name), name, kinds)
        return [{"role": "system", "content": text}] if text else []


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogates, which JSON may hold."""
    return text == text.encode("utf-8", "replace").decode()


def messages_of(value: Any) -> Iterator[tuple[str, dict]]:
    """(where it stands, message). Raises BadRequest."""
    if not isinstance(value, list) or not value:
        raise BadRequest("messages: give a list of messages", "messages")
    for i, message in enumerate(value):
        yield f"messages[{i}]", message if isinstance(message, dict) else {}


def read_tool_choice(choice: Any, tools: list[dict]) -> tuple[bool, tuple[str, ...]]:
    """(whether tool calls are read, names of tools of which one must be called). Raises BadRequest."""
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice in ("auto", "none"):
        return choice == "auto", ()
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)  # the API of responses has the name beside the type
        names = tuple(name for name in names if isinstance(function, dict) and name == function.get("name"))[:1]
    elif choice != "required":
        shown = "auto, none, required and a function are supported"
        raise BadRequest(f"tool_choice: only {shown}", "tool_choice", "unsupported_value")
    if not names:
        raise BadRequest("tool_choice: there is no such function among the tools", "tool_choice")
    return True, names


def list_of(value: Any, where: str) -> list:
    if not isinstance(value, list):
        raise BadRequest(f"{where}: give a list", where)
    return value


def text_of(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Of a text, or of a list of parts. Raises BadRequest."""
    parts = [] if content is None else [content] if isinstance(content, str) else list_of(content, f"{where}.content")
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else part
        if not isinstance(text, str):
            raise BadRequest(f"{where}.content: only text is supported", f"{where}.content", "unsupported_value")
        texts.append(text)
    return "".join(texts)


def call_of(call: Any, where: str) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: give an id and a function with a name, and its arguments as a JSON text", where)
    try:
        function = {"name": function["name"], "arguments": arguments_of(function.get("arguments"))}
    except ValueError as error:
        raise BadRequest(f"{where}: {error}", where) from None
    return {"id": str(call.get("id", "")), "type": "function", "function": function}


class History(list):
    """The messages of a request, as templates want them: an answer of a tool has the tool's name."""

    def __init__(self, messages: list[dict] | None = None):
        super().__init__(messages or [])
        self.names: dict[str, str] = {}  # of the called tools

    def add_calls(self, calls: list[dict]) -> None:
        """Of the last message. calls: as `call_of` returns them."""
        if calls:
            self[-1].setdefault("tool_calls", []).extend(calls)
            self.names |= {call["id"]: call["function"]["name"] for call in calls}

    def add_answer(self, text: str, call_id: Any) -> None:
        """Of a tool."""
        own = str(call_id)
        self.append({"role": "tool", "content": text, "tool_call_id": own, "name": self.names.get(own, "")})
