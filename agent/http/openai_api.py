"""OpenAI's chat completions: what a request may ask, and how an answer is written."""

import json
import time
from collections.abc import Iterator
from typing import Any

from agent.http.requests import (
    LARGEST_N,
    MODEL,
    BadRequest,
    Choice,
    History,
    Options,
    Parameters,
    Rules,
    call_of,
    list_of,
    messages_of,
    read_tool_choice,
    text_of,
)

ID = "chatcmpl-"  # begins the id of an answer
READ = {"messages", "tools", "tool_choice", "n", "stop", "seed", "max_tokens", "max_completion_tokens", "logprobs"}
READ |= {"stream", "temperature", "top_p"}
# parameters without an effect on what is sampled
IGNORED = {"model", "stream_options", "user", "metadata", "store", "service_tier", "prompt_cache_key"}
IGNORED |= {"safety_identifier", "prompt_cache_retention"}
# parameters of which only some values are supported: these, and null
FIXED: dict[str, tuple] = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
FIXED |= {"top_logprobs": (0,), "parallel_tool_calls": (True,), "response_format": ({"type": "text"},)}
FIXED |= {"modalities": (["text"],)}
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_request(body: Any, rules: Rules) -> tuple[list[dict], list[dict], Options]:
    """(messages and tools as templates want them, options). Raises BadRequest."""
    given = Parameters(body, READ, IGNORED, FIXED, rules)
    tools = read_tools(given.get("tools", []))
    calls_tools, forced = read_tool_choice(given.get("tool_choice", "auto"), tools)
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    options = Options(
        max_tokens=given.max_tokens(name),
        logprobs=given.switch("logprobs"),
        calls_tools=calls_tools,
        forced=forced,
        **sampling_options(given),
    )
    return read_messages(given.get("messages")), tools, options


def sampling_options(given: Parameters) -> dict[str, Any]:
    """What completions have, too. Raises BadRequest."""
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if not isinstance(of_stream := given.get("stream_options", {}), dict):
        raise BadRequest("stream_options: give an object", "stream_options")
    return {
        "n": given.whole("n", 1, LARGEST_N, default=1),
        "stop": given.stop_strings("stop"),
        "seed": given.whole("seed", -(1 << 63), 1 << 63),
        "stream": given.switch("stream"),
        "stream_usage": of_stream.get("include_usage") is True,
    }


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
    history = History()
    for where, message in messages_of(messages):
        role = message.get("role")
        if role not in ROLES:
            raise BadRequest(f"{where}.role: give system, developer, user, assistant or tool", where)
        text = text_of(message.get("content"), where)
        if role == "tool":
            history.add_answer(text, message.get("tool_call_id", ""))
        else:
            history.append({"role": "system" if role == "developer" else role, "content": text})
        place = f"{where}.tool_calls"
        history.add_calls([call_of(call, place) for call in list_of(message.get("tool_calls") or [], place)])
    return history


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
