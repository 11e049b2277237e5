"""Anthropic's messages: what a request may ask, and how an answer is written."""

import json
from collections.abc import Iterator
from typing import Any

from agent.http.openai_api import (
    MODEL,
    BadRequest,
    Choice,
    Options,
    Rules,
    list_of,
    read_tool_choice,
    stop_strings,
    supported,
    switch,
    text_of,
    whole,
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
    given = supported(body, READ | IGNORED, FIXED, rules)
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
        max_tokens=whole(given, "max_tokens", None, 1, 1 << 31),
        n=1,
        stop=stop_strings(given.get("stop_sequences", []), "stop_sequences"),
        seed=None,
        logprobs=False,
        calls_tools=calls_tools,
        stream=switch(given, "stream"),
        stream_usage=True,
        forced=forced,
    )
    system = text_of(given.get("system"), "system")
    messages = [{"role": "system", "content": system}] if system else []
    return messages + read_messages(given.get("messages")), tools, options


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
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: give a list of messages", "messages")
    found: list[dict] = []
    names: dict[str, str] = {}  # of the called tools
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise BadRequest(f"messages[{i}].role: give user or assistant", "messages")
        content, where = message.get("content"), f"messages[{i}].content"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, where)
        found += _of_assistant(blocks, where, names) if role == "assistant" else _of_user(blocks, where, names)
    if found[-1]["role"] == "assistant":
        raise BadRequest("messages: to continue a message of the assistant is not supported", "messages")
    return found


def _type(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _of_assistant(blocks: list, where: str, names: dict[str, str]) -> list[dict]:
    calls = []
    for block in blocks:
        if _type(block) == "tool_use":
            name, arguments, own = block.get("name"), block.get("input"), str(block.get("id", ""))
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise BadRequest(f"{where}: give each tool_use an id, a name and an object as input", where)
            calls.append({"id": own, "type": "function", "function": {"name": name, "arguments": arguments}})
            names[own] = name
    text = text_of([block for block in blocks if _type(block) != "tool_use"], where)
    return [{"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})]


def _of_user(blocks: list, where: str, names: dict[str, str]) -> list[dict]:
    """Its results of tools and its texts, in their order."""
    found: list[dict] = []
    for block in blocks:
        if _type(block) == "tool_result":
            text, own = text_of(block.get("content"), where), str(block.get("tool_use_id", ""))
            found.append({"role": "tool", "content": text, "tool_call_id": own, "name": names.get(own, "")})
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += text_of([block], where)
        else:
            found.append({"role": "user", "content": text_of([block], where)})
    return found or [{"role": "user", "content": ""}]


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
