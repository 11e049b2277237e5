"""Anthropic's messages: what a request may ask, and how an answer is written."""

import json
from collections.abc import Iterator
from typing import Any

from agent.http.requests import (
    MODEL,
    BadRequest,
    Choice,
    History,
    Options,
    Parameters,
    Rules,
    list_of,
    messages_of,
    read_tool_choice,
    text_of,
)

ID = "msg_"
READ = {"system", "messages", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"}
READ |= {"temperature", "top_p", "top_k"}
IGNORED = {"model", "metadata", "service_tier", "cache_control"}  # without an effect on what is sampled
FIXED: dict[str, tuple] = {"thinking": ({"type": "disabled"},)}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}  # and "tool"
OF_TOOLS = {"name", "description", "input_schema", "type", "cache_control"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def read_request(body: Any, rules: Rules) -> tuple[list[dict], list[dict], Options]:
    """As agent/http/openai_api.py's. Raises BadRequest."""
    given = Parameters(body, READ, IGNORED, FIXED, rules)
    tools = read_tools(given.get("tools", []))
    choice = given.get("tool_choice", {"type": "auto"})
    kind = str(choice.get("type")) if isinstance(choice, dict) else ""
    if kind not in CHOICES | {"tool": ""} or choice.get("disable_parallel_tool_use"):
        shown = f"the types {', '.join(CHOICES)} and tool are supported, with parallel calls"
        raise BadRequest(f"tool_choice: only {shown}", "tool_choice", "unsupported_value")
    named = choice | {"type": "function"}
    calls_tools, forced = read_tool_choice(named if kind == "tool" else CHOICES[kind], tools)
    if "max_tokens" not in given:
        raise BadRequest("max_tokens: give a whole number", "max_tokens")
    options = Options(
        given.max_tokens(),
        stop=given.stop_strings("stop_sequences"),
        calls_tools=calls_tools,
        stream=given.switch("stream"),
        forced=forced,
    )
    return given.system("system") + read_messages(given.get("messages")), tools, options


def read_tools(tools: Any) -> list[dict]:
    """Raises BadRequest."""
    found = []
    for i, tool in enumerate(list_of(tools, "tools")):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom") or tool.keys() - OF_TOOLS:
            known = ", ".join(sorted(OF_TOOLS))
            raise BadRequest(f"{where}: only tools of the agent are supported, with {known}", where)
        name, schema, text = tool.get("name"), tool.get("input_schema"), tool.get("description")
        if not isinstance(name, str) or not isinstance(schema, dict) or not isinstance(text, str | None):
            raise BadRequest(f"{where}: give a name, and a JSON schema as input_schema", where)
        function = {"description": text or "", "parameters": schema, "name": name}
        found.append({"type": "function", "function": function})
    return found


def read_messages(messages: Any) -> list[dict]:
    """Raises BadRequest."""
    history = History()
    for where, message in messages_of(messages):
        role, content, where = message.get("role"), message.get("content"), f"{where}.content"
        if role not in ("user", "assistant"):
            raise BadRequest(f"{where.removesuffix('content')}role: give user or assistant", "messages")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, where)
        add = _add_assistant if role == "assistant" else _add_user
        add(history, [(block, block.get("type") if isinstance(block, dict) else None) for block in blocks], where)
    if history[-1]["role"] == "assistant":
        raise BadRequest("messages: to continue a message of the assistant is not supported", "messages")
    return history


def _add_assistant(history: History, blocks: list[tuple[Any, Any]], where: str) -> None:
    calls = []
    for block, kind in blocks:
        if kind == "tool_use":
            name, arguments = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise BadRequest(f"{where}: give each tool_use an id, a name and an object as input", where)
            function = {"name": name, "arguments": arguments}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
    text = text_of([block for block, kind in blocks if kind != "tool_use"], where)
    history.append({"role": "assistant", "content": text})
    history.add_calls(calls)


def _add_user(history: History, blocks: list[tuple[Any, Any]], where: str) -> None:
    """Its results of tools and its texts, in their order."""
    begin = len(history)
    for block, kind in blocks:
        if kind == "tool_result":
            history.add_answer(text_of(block.get("content"), where), block.get("tool_use_id", ""))
        elif len(history) > begin and history[-1]["role"] == "user":
            history[-1]["content"] += text_of([block], where)
        else:
            history.append({"role": "user", "content": text_of([block], where)})
    if len(history) == begin:
        history.append({"role": "user", "content": ""})


def completion(name: str, choices: list[Choice], options: Options) -> dict:
    """The answer to a request that does not stream."""
    [choice] = choices
    blocks: list[dict] = [{"type": "text", "text": text}] if (text := choice.message["content"]) else []
    for call in choice.message.get("tool_calls", ()):
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    by_string = choice.stop is not None and choice.finish_reason == "stop"
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": blocks,
        "stop_reason": "stop_sequence" if by_string else REASONS[choice.finish_reason],
        "stop_sequence": choice.stop if by_string else None,
        "usage": {"input_tokens": len(choice.context), "output_tokens": len(choice.sampled.token_ids)},
    }


def chunks(name: str, choices: list[Choice], options: Options) -> Iterator[dict]:
    """The same as events of a stream: each block in one."""
    answer = completion(name, choices, options)
    blocks, usage = answer["content"], answer["usage"]
    ended = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": answer | begun}
    for i, block in enumerate(blocks):
        is_text = block["type"] == "text"
        empty: dict = {"text": ""} if is_text else {"input": {}}
        call = {"type": "input_json_delta", "partial_json": json.dumps(block.get("input"))}
        delta = {"type": "text_delta", "text": block["text"]} if is_text else call
        yield {"type": "content_block_start", "index": i, "content_block": block | empty}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def refusal(error: BadRequest) -> dict:
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    full = "prompt is too long: " if error.code == "context_length_exceeded" else ""  # as clients know it
    return {"type": "error", "error": {"type": kind, "message": f"{full}{error}"}}
