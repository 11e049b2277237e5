"""OpenAI's chat completions: what a request may ask, and how an answer is written."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lib.data.row_form import arguments_of
from lib.rollout import Generated, Sampling

MODEL = "policy"
ID = "chatcmpl-"  # begins the id of an answer
LARGEST_N = 128
LONGEST_STOP = 1000  # characters of a stop string
# parameters without an effect on what is sampled
IGNORED = {"model", "stream_options", "user", "metadata", "store", "service_tier", "prompt_cache_key"}
IGNORED |= {"safety_identifier", "prompt_cache_retention"}
# parameters of which only some values are supported: these, and null
FIXED: dict[str, tuple] = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
FIXED |= {"top_logprobs": (0,), "parallel_tool_calls": (True,), "response_format": ({"type": "text"},)}
FIXED |= {"modalities": (["text"],)}
READ = {"messages", "tools", "tool_choice", "n", "stop", "seed", "max_tokens", "max_completion_tokens", "logprobs"}
READ |= {"stream", "temperature", "top_p"}
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

    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    seed: int | None
    logprobs: bool
    calls_tools: bool  # whether tool calls in the answer are read
    stream: bool
    stream_usage: bool
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


def read_request(body: Any, rules: Rules) -> tuple[list[dict], list[dict], Options]:
    """(messages and tools as templates want them, options). Raises BadRequest."""
    given = supported(body, READ | IGNORED, FIXED, rules)
    tools = read_tools(given.get("tools", []))
    calls_tools, forced = read_tool_choice(given.get("tool_choice", "auto"), tools)
    stop = given.get("stop", [])
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    options = Options(
        max_tokens=whole(given, name, None, 1, 1 << 31),
        n=whole(given, "n", 1, 1, LARGEST_N) or 1,
        stop=stop_strings([stop] if isinstance(stop, str) else stop, "stop"),
        seed=whole(given, "seed", None, -(1 << 63), 1 << 63),
        logprobs=switch(given, "logprobs"),
        calls_tools=calls_tools,
        stream=switch(given, "stream"),
        stream_usage=wants_usage(given),
        forced=forced,
    )
    return read_messages(given.get("messages")), tools, options


def supported(body: Any, known: set[str], fixed: dict[str, tuple], rules: Rules) -> dict:
    """The parameters that are neither null nor ignored. Raises BadRequest for others than `known` and `fixed`, for
    values that are not in `fixed`, and for another way to sample than training's."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in [*given.items()]:
        code = "unsupported_value"
        if name not in known | fixed.keys():
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
        del given[name]
    return given


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


def wants_usage(given: dict) -> bool:
    """Of a stream. Raises BadRequest."""
    if not isinstance(options := given.get("stream_options", {}), dict):
        raise BadRequest("stream_options: give an object", "stream_options")
    return options.get("include_usage") is True


def stop_strings(given: Any, name: str) -> tuple[str, ...]:
    """Raises BadRequest."""
    if not (isinstance(given, list) and all(isinstance(text, str) and text for text in given) and len(given) <= 16):
        raise BadRequest(f"{name}: give a text or a list of at most 16 texts", name)
    if any(len(text) > LONGEST_STOP or not _is_unicode(text) for text in given):  # engines take no others
        raise BadRequest(f"{name}: give Unicode texts of at most {LONGEST_STOP} characters", name)
    return tuple(given)


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogates, which JSON may hold."""
    return text == text.encode("utf-8", "replace").decode()


def whole(given: dict, name: str, default: int | None, lowest: int, highest: int) -> int | None:
    value = given.get(name, default)
    if value is not None and not (type(value) is int and lowest <= value <= highest):
        raise BadRequest(f"{name}: give a whole number from {lowest} to {highest}", name)
    return value


def switch(given: dict, name: str) -> bool:
    if not isinstance(value := given.get(name, False), bool):
        raise BadRequest(f"{name}: give true or false", name)
    return value


def read_tools(tools: Any) -> list[dict]:
    """Raises BadRequest."""
    found = []
    for i, tool in enumerate(list_of(tools, "tools")):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{i}]: give an object of type function, with a name", f"tools[{i}]")
        if not isinstance(function.get("parameters") or {}, dict):
            raise BadRequest(f"tools[{i}].function.parameters: give a JSON schema", f"tools[{i}]")
        function = {name: value for name, value in function.items() if name != "strict" and value is not None}
        found.append({"type": "function", "function": {"description": "", "parameters": {}, **function}})
    return found


def read_messages(messages: Any) -> list[dict]:
    """Raises BadRequest."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: give a list of messages", "messages")
    found: list[dict] = []
    names: dict[str, str] = {}  # of the called tools
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise BadRequest(f"{where}.role: give system, developer, user, assistant or tool", where)
        own: dict[str, Any] = {
            "role": "system" if role == "developer" else role,
            "content": text_of(message.get("content"), where),
        }
        if calls := message.get("tool_calls"):
            own["tool_calls"] = [call_of(call, f"{where}.tool_calls") for call in list_of(calls, f"{where}.tool_calls")]
            names |= {call["id"]: call["function"]["name"] for call in own["tool_calls"]}
        if role == "tool":
            own["tool_call_id"] = str(message.get("tool_call_id", ""))
            own["name"] = names.get(own["tool_call_id"], "")
        found.append(own)
    return found


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


def _message(choice: Choice) -> dict:
    """The message as clients want it."""
    text = choice.message["content"]
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in choice.message.get("tool_calls", ())
    ]
    return {"role": "assistant", "content": text or None if calls else text} | ({"tool_calls": calls} if calls else {})


def _log_probs(choice: Choice) -> dict:
    tokens = zip(choice.tokens, choice.sampled.log_probs, strict=True)
    content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in tokens]
    return {"content": content, "refusal": None}


def usage(choices: list[Choice], n: int) -> dict:
    """n: answers to each prompt."""
    given = sum(len(choice.context) for choice in choices[::n])
    sampled = sum(len(choice.sampled.token_ids) for choice in choices)
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


def completion(name: str, choices: list[Choice], options: Options) -> dict:
    """The answer to a request that does not stream."""
    answers = [
        {
            "index": i,
            "message": _message(choice),
            "logprobs": _log_probs(choice) if options.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for i, choice in enumerate(choices)
    ]
    head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": MODEL}
    return head | {"choices": answers, "usage": usage(choices, options.n)}


def chunks(name: str, choices: list[Choice], options: Options) -> Iterator[dict]:
    """The same as events of a stream: the whole message in one."""
    head = {"id": name, "object": "chat.completion.chunk", "created": int(time.time()), "model": MODEL}
    for i, choice in enumerate(choices):
        delta = _message(choice)
        delta["tool_calls"] = [{"index": k} | call for k, call in enumerate(delta.get("tool_calls", ()))]
        if not delta["tool_calls"]:
            del delta["tool_calls"]
        log_probs = _log_probs(choice) if options.logprobs else None
        yield head | {"choices": [{"index": i, "delta": delta, "logprobs": log_probs, "finish_reason": None}]}
        yield head | {"choices": [{"index": i, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason}]}
    if options.stream_usage:
        yield head | {"choices": [], "usage": usage(choices, options.n)}


def refusal(error: BadRequest) -> dict:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def models() -> dict:
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "plainrl"}]}
