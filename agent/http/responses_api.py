"""OpenAI's responses: what a request may ask, and how an answer is written."""

import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from agent.http.openai_api import IGNORED, read_tools, refusal
from agent.http.requests import (
    MODEL,
    BadRequest,
    Choice,
    History,
    Options,
    Parameters,
    Rules,
    call_of,
    list_of,
    read_tool_choice,
    text_of,
)

__all__ = ["ID", "chunks", "completion", "read_request", "refusal"]
ID = "resp_"
READ = {"input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "temperature", "top_p"}
FIXED: dict[str, tuple] = {"parallel_tool_calls": (True,), "top_logprobs": (0,)}
FIXED |= {"text": ({"format": {"type": "text"}}, {}), "truncation": ("disabled",), "background": (False,)}
FIXED |= {"include": ([],), "reasoning": ({},)}
TEXTS = ("input_text", "output_text", "text")


def read_request(body: Any, rules: Rules) -> tuple[list[dict], list[dict], Options]:
    """As agent/http/openai_api.py's. Raises BadRequest."""
    given = Parameters(body, READ, IGNORED, FIXED, rules)
    tools = read_tools([_nested(tool) for tool in list_of(given.get("tools", []), "tools")])
    calls_tools, forced = read_tool_choice(given.get("tool_choice", "auto"), tools)
    options = Options(
        given.max_tokens("max_output_tokens"), calls_tools=calls_tools, stream=given.switch("stream"), forced=forced
    )
    messages = given.system("instructions", TEXTS)
    return messages + read_input(given.get("input")), tools, options


def _nested(tool: Any) -> Any:
    """A tool as chat completions have it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def read_input(items: Any) -> list[dict]:
    """The messages. A message of the assistant and the calls behind it are one. Raises BadRequest."""
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not items:
        raise BadRequest("input: give a text or a list of items", "input")
    history = History()
    for i, item in enumerate(items):
        where = f"input[{i}]"
        item = item if isinstance(item, dict) else {}
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if role not in ("system", "developer", "user", "assistant"):
                raise BadRequest(f"{where}.role: give system, developer, user or assistant", where)
            text = text_of(item.get("content"), where, TEXTS)
            history.append({"role": "system" if role == "developer" else role, "content": text})
        elif kind == "function_call":
            if not history or history[-1]["role"] != "assistant":
                history.append({"role": "assistant", "content": ""})
            history.add_calls([call_of({"id": item.get("call_id", ""), "function": item}, where)])
        elif kind == "function_call_output":
            history.add_answer(text_of(item.get("output"), where, TEXTS), item.get("call_id", ""))
        else:
            known = "message, function_call and function_call_output"
            raise BadRequest(f"{where}.type: only {known} are supported", where, "unsupported_value")
    return history


def completion(name: str, choices: list[Choice], options: Options) -> dict:
    """The answer to a request that does not stream."""
    [choice] = choices
    output: list[dict] = []
    calls, text = choice.message.get("tool_calls", []), choice.message["content"]
    given, sampled = len(choice.context), len(choice.sampled.token_ids)
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        output.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": content})
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}
        output.append({"type": "function_call", "id": f"fc_{name}-{call['id']}", "call_id": call["id"]} | function)
    is_cut = choice.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": [item | {"status": status} for item in output],
        "usage": {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + sampled,
        },
        "parallel_tool_calls": True,
        "tool_choice": "required" if options.forced else "auto" if options.calls_tools else "none",
        "tools": [],
    }


def chunks(name: str, choices: list[Choice], options: Options) -> Iterator[dict]:
    """The same as events of a stream: each text and each call's arguments in one."""
    answer, numbers = completion(name, choices, options), count()

    def event(kind: str, **values: Any) -> dict:
        return {"type": f"response.{kind}", "sequence_number": next(numbers)} | values

    begun = answer | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for i, item in enumerate(answer["output"]):
        place = {"item_id": item["id"], "output_index": i}
        is_text = item["type"] == "message"
        empty: dict = {"content": []} if is_text else {"arguments": ""}
        yield event("output_item.added", output_index=i, item=item | {"status": "in_progress"} | empty)
        if is_text:
            [part] = item["content"]
            at = place | {"content_index": 0}
            yield event("content_part.added", **at, part=part | {"text": ""})
            yield event("output_text.delta", **at, delta=part["text"], logprobs=[])
            yield event("output_text.done", **at, text=part["text"], logprobs=[])
            yield event("content_part.done", **at, part=part)
        else:
            arguments = item["arguments"]
            yield event("function_call_arguments.delta", **place, delta=arguments)
            yield event("function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        yield event("output_item.done", output_index=i, item=item)
    yield event(answer["status"], response=answer)
