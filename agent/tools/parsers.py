"""Reads the tool calls in a turn's text, in the formats of the model families."""

import ast
import functools
import json
import re
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress

import jsonschema

from agent.tools.base import BaseTool, ToolCall, allow_null, say
from lib import InputError


def get_tool_parser(name: str, tokenizer, tools: dict[str, BaseTool] | None = None) -> Callable[[str], list[ToolCall]]:
    """A function from the text of a sampled turn (special tokens kept) to its calls; [] for a text without a call.

    name: hermes | llama3_json | qwen3_coder | vllm:NAME (one of vLLM's) | auto (from the tokenizer's chat template, or
    else its response_template). A call that cannot be read has .error; vLLM's parsers take it for plain text. A call in
    the model's thoughts, before </think>, does not count. Raises InputError: there is no such parser, vLLM is not
    installed, or the template shows no known format."""
    schemas = [tool.get_openai_tool_schema() for tool in (tools or {}).values()]
    own = {"hermes": parse_hermes, "llama3_json": parse_llama3_json}
    own["qwen3_coder"] = functools.partial(parse_qwen3_coder, tools or {})
    if name == "auto":
        name = _format_of(tokenizer)
        if not name and getattr(tokenizer, "response_template", None):
            return functools.partial(_guarded, _response_template_parser(tokenizer, schemas))
    if name in own:
        return functools.partial(_spoken, own[name])
    if name.startswith("vllm:"):
        parse = functools.partial(_guarded, _vllm_parser(name.removeprefix("vllm:"), tokenizer, schemas))
        return functools.partial(_spoken, parse)
    problem = f"there is no parser {name!r}" if name else "the chat template shows no format that is known here"
    raise InputError(f"--multi-turn.parser: {problem}; use {', '.join(own)} or vllm:NAME, one of vLLM's")


def _format_of(tokenizer) -> str:
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and "<arg_key>" not in template:  # GLM's has <arg_key>
        return "hermes"
    return "llama3_json" if '"parameters":' in template and "ipython" in template else ""


# how a call begins, up to the name, and from behind it to the arguments; tokens end there in usual calls, too
BEGINNINGS = {
    "hermes": ('<tool_call>\n{"name": "', '", "arguments":'),
    "llama3_json": ('{"name": "', '", "parameters":'),
    "qwen3_coder": ("<tool_call>\n<function", ">\n"),
}


def call_beginning(name: str, tokenizer, tools: tuple[str, ...]) -> str:
    """What a turn begins with that calls one of the tools. name: of get_tool_parser. Raises InputError."""
    name = _format_of(tokenizer) if name == "auto" else name
    if name not in BEGINNINGS:
        known = ", ".join(BEGINNINGS)
        raise InputError(f"a call can be forced in the formats {known}; the run's --multi-turn.parser is another")
    before, behind = BEGINNINGS[name]
    if len(tools) > 1:
        return before
    return f"{before}={tools[0]}{behind}" if name == "qwen3_coder" else before + json.dumps(tools[0])[1:-1] + behind


QUOTED = "</think\ue000>"  # a </think> of the text, to tell it from one that JSON spells otherwise


def _spoken(parse: Callable[[str], list[ToolCall]], text: str) -> list[ToolCall]:
    """The calls of the text but those in its thoughts, whose <think> may be the template's. A </think> in an argument
    ends no thoughts."""
    _, closed, answer = text.partition("</think>")
    if closed and not text.lstrip().startswith("<think>"):
        calls = parse(text.replace("</think>", QUOTED))
        quoted = sum((call.name + json.dumps(call.arguments, ensure_ascii=False)).count(QUOTED) for call in calls)
        if quoted == text.count("</think>"):
            return parse(text)
    return parse(answer if closed or text.lstrip().startswith("<think>") else text)


def _to_call(value) -> ToolCall:
    """The call in a JSON value {"name", "arguments" or "parameters"}. Missing arguments count as {}."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", error='it must be a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], error="the arguments must be a JSON object")
    return ToolCall(value["name"], arguments)


def _plain(value):
    """The value itself. Raises ValueError (NaN, a lone surrogate) or TypeError if it cannot be JSON in UTF-8."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _without_twins(pairs: list[tuple[str, object]]) -> dict:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _read_call(text: str, start: int = 0) -> tuple[ToolCall, int]:
    """(the call in the JSON at `start`, where the JSON ends). With malformed JSON that is `start`."""
    try:
        value, end = json.JSONDecoder(object_pairs_hook=_without_twins).raw_decode(text, start)
        return _to_call(_plain(value)), end
    except json.JSONDecodeError as error:
        return ToolCall("", error=f"invalid JSON: {error.msg} at character {error.pos - start}"), start
    except (ValueError, RecursionError) as error:  # also for an integer with too many digits
        return ToolCall("", error=f"invalid JSON: {error}"), start


def _read_whole(text: str) -> ToolCall:
    call, end = _read_call(text)
    return call if end in (0, len(text)) else ToolCall(call.name, error="invalid JSON: text after the arguments")


MAX_CALLS = 100  # per text: each JSON error counts the lines from the start, which would be quadratic
LONGEST_LITERAL = 10_000  # characters
OPEN_CALL, CLOSE_CALL = re.compile(r"<tool_call>\s*"), re.compile(r"\s*</tool_call>")
SPECIAL = re.compile(r"\s*(?:<\|\w+\|>\s*)*")  # <|im_end|>, <|eot_id|>
FIRST_CALL = re.compile(r'\{\s*"(?:name|type)"\s*:')  # Llama's
NEXT_CALL = re.compile(rf"\s*;\s*(?=\{{)|(?:[\s,]|<\|python_tag\|>)*(?={FIRST_CALL.pattern})")
MARKS = re.compile(r"<(/?)tool_call>"), re.compile(r"<(/?)function[=>]")


def _after(text: str, start: int, marks: re.Pattern) -> int:
    """Where a call that began before `start` ends. One that cannot be read may hold others: these are text of it."""
    depth = 1
    for mark in marks.finditer(text, start):
        depth += -1 if mark[1] else 1
        if not depth:
            return mark.end()
    return len(text)


def parse_hermes(text: str) -> list[ToolCall]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, up to 100 of them. The last may lack its end."""
    calls: list[ToolCall] = []
    end = 0
    while len(calls) < MAX_CALLS and (opened := OPEN_CALL.search(text, end)):
        call, end = _read_call(text, opened.end())
        if end > opened.end() and not CLOSE_CALL.match(text, end) and not SPECIAL.fullmatch(text, end):
            call = ToolCall(call.name, error="no </tool_call> after the JSON object")
        if call.error:
            end = _after(text, end, MARKS[0])
        calls.append(call)
    return calls


def parse_llama3_json(text: str) -> list[ToolCall]:
    """{"name": ..., "parameters": {...}}; {...}, as Llama 3.1 writes them, after <|python_tag|> or from the start; also
    on lines. After one that cannot be read there is no other."""
    start = SPECIAL.match(text).end()
    tagged = "<|python_tag|>" in text[:start]
    if not tagged and not FIRST_CALL.match(text, start):
        return []
    call, end = _read_call(text, start)
    calls = [call]
    while end > start and (following := NEXT_CALL.match(text, end)):
        start = following.end()
        call, end = _read_call(text, start)
        calls.append(call)
    return calls


FUNCTION, PARAMETER = re.compile(r"<function=([^<>\n]+)>\s*"), re.compile(r"<parameter=([^<>\n]+)>\n?")
PARAMETER_END = re.compile(r"(\n?)</parameter>\s*(?=<parameter=|</function>)")


def parse_qwen3_coder(tools: dict[str, BaseTool], text: str) -> list[ToolCall]:
    """<function=NAME><parameter=KEY>value</parameter> ...</function>. The schema says how to read each value."""
    ends = list(PARAMETER_END.finditer(text))
    tags = [found.end(1) for found in ends]  # one search: a search from each parameter would be quadratic
    calls, end = [], 0
    while opened := FUNCTION.search(text, end):
        name, arguments, end, error = opened[1].strip(), {}, opened.end(), None
        schema = tools[name].get_openai_tool_schema()["function"] if name in tools else {}
        properties = (schema.get("parameters") or {}).get("properties", {})
        while (parameter := PARAMETER.match(text, end)) and (i := bisect_left(tags, parameter.end())) < len(tags):
            key, start, end = parameter[1].strip(), parameter.end(), ends[i].end()
            value = text[start : ends[i].start()]
            if key in arguments:
                error = "a parameter stands twice in one call"
            arguments[key] = _from_text(value, properties.get(key, {}))
            if value.count("<function=") > value.count("</function>"):  # then the next one is not this call's
                error = "a call stands in an argument"
                end = _after(text, end + len("</function>"), MARKS[1]) - len("</function>")
        if not text.startswith("</function>", end):
            error = "a <parameter=...> without </parameter>, or a <function=...> without </function>"
            end = _after(text, end, MARKS[1])
        calls.append(ToolCall(name, None if error else arguments, error))
    return calls


def _from_text(text: str, schema: dict):
    """The text itself if the schema allows text, else the JSON or Python value in it. null and None if allowed."""
    is_valid = jsonschema.Draft202012Validator(allow_null(schema)).is_valid
    if schema and text.strip() in ("null", "None") and is_valid(None):
        return None
    for read in (str, json.loads, ast.literal_eval)[: 2 if len(text) > LONGEST_LITERAL else 3]:
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            if is_valid(value := _plain(read(text))):
                return value
    return text


def _guarded(parse: Callable[[str], list[ToolCall]], text: str) -> list[ToolCall]:
    try:
        return parse(text)
    except Exception as error:  # noqa: BLE001 a foreign parser may raise anything on a malformed call
        return [ToolCall("", error=say(error))]


def _response_template_parser(tokenizer, schemas: list[dict]) -> Callable[[str], list[ToolCall]]:
    tokenizer.get_response_parser(prefix="")  # raises if the template is not valid

    def parse(text: str) -> list[ToolCall]:
        calls = tokenizer.parse_response(text, prefix="", tools=schemas).get("tool_calls") or []
        return [_to_call(_plain(call.get("function", call))) for call in calls]

    return parse


def _vllm_parser(name: str, tokenizer, schemas: list[dict]) -> Callable[[str], list[ToolCall]]:
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        cls = ToolParserManager.get_tool_parser(name)
        request = ChatCompletionRequest(model="", messages=[], tools=schemas or None)
        cls(tokenizer, request.tools)  # raises if the tokenizer lacks its special tokens
    except ImportError as error:
        raise InputError(f"--multi-turn.parser vllm:{name}: vLLM is not installed ({error})") from error
    except KeyError as error:
        known = ", ".join(sorted(ToolParserManager.lazy_parsers))
        raise InputError(f"--multi-turn.parser vllm:{name}: vLLM has no such parser; it has {known}") from error
    except (ValueError, RuntimeError) as error:
        raise InputError(f"--multi-turn.parser vllm:{name}: it does not fit the tokenizer ({say(error)})") from error

    def parse(text: str) -> list[ToolCall]:
        parser = cls(tokenizer, request.tools)  # a new one, since it keeps a state
        calls = [call.function for call in parser.extract_tool_calls(text, request).tool_calls]
        return [_read_whole(f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}') for call in calls]

    return parse
