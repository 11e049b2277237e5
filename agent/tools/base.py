"""Tools of multi-turn episodes: what a tool is, and how it is called.

A tool is a typed Python function, a subclass of BaseTool, or a tool of an MCP server. Its failure does not end a run:
run_tool_call answers with a text for the model and a kind to count it by. A function that is not async runs in a
thread, and is left there when its time is over. Not caught: an async function that blocks or ignores its cancellation
for ever, C code that keeps the interpreter's lock, a crash of the interpreter."""

import asyncio
import inspect
import math
import numbers
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from PIL import Image
from referencing.jsonschema import EMPTY_REGISTRY
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lib import InputError
from lib.args import MultiTurnArgs
from lib.cli.secrets import redact
from lib.reward.scorer import LARGEST_SCORE

LARGEST_METRIC = 1e30
MOST_SHOWN = 4000  # characters of an error
SHOWN: set[tuple] = set()  # kinds of errors that were shown: their types and places


@dataclass
class ToolCall:
    name: str  # "" if the text has none
    arguments: dict | None = None
    error: str | None = None  # what is wrong with the text; then arguments is None


@dataclass
class ToolResponse:
    """What a tool with returns_images may return in place of the text: the model sees the images, then the text."""

    text: str = ""
    images: list[Image.Image] = field(default_factory=list)
    image: list[Image.Image] | None = None  # verl's name of images


class ToolSchema(dict):
    """A tool's schema with verl's access to it: schema.function.name, schema.model_dump()."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return ToolSchema(self[name]) if isinstance(self[name], dict) else self[name]

    def model_dump(self, **_) -> dict:
        return {**self}


@dataclass
class ToolResult:
    text: str  # for the model: the output, truncated, or "Error: ..."
    reward: float = 0.0
    metrics: dict = field(default_factory=dict)
    error_kind: str | None = None  # one of ERROR_KINDS
    images: list[Image.Image] = field(default_factory=list)


class BaseTool:
    """A tool. All methods except get_openai_tool_schema are async. An instance_id names an episode's state of the tool.
    kwargs come from the row: tools_kwargs[name] = {"create_kwargs", "execute_kwargs", "calc_reward_kwargs",
    "release_kwargs"}. execute may also return only the text, a number, or (text, reward). With returns_images a text
    may be a ToolResponse, and create also gets images=[PIL], those of the prompt.

    The calls of a turn run at the same time, also two of one tool in one episode, if execute is async. Calls of a tool
    with in_order run one after the other, in the order of the turn: set it if a call may change what a later one sees.
    It is set where execute is not async, and would run in several threads."""

    returns_images = False
    in_order = False
    own_schema = True  # False: somebody else wrote the schema, and to check arguments by it may take any time
    schema: dict | None = None

    def __init_subclass__(cls):
        if not inspect.iscoroutinefunction(cls.execute) and "in_order" not in vars(cls):
            cls.in_order = True

    def __init__(self, config: dict | None = None, tool_schema: dict | None = None):
        """As verl's, which gives a class both, and makes the schema of a class without one its own."""
        if config is not None:
            self.config, self.schema = config, tool_schema or self.get_openai_tool_schema()
            self.tool_schema = ToolSchema(self.schema) if isinstance(self.schema, dict) else self.schema
            self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> dict:
        if self.schema is None:
            raise NotImplementedError
        return self.schema

    async def create(self, instance_id: str, **kwargs) -> None: ...

    async def execute(self, instance_id: str, parameters: dict, **kwargs) -> tuple[str, float, dict]:
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs) -> None: ...


class FunctionTool(BaseTool):
    """A typed function with a Google docstring. The row's execute_kwargs override the model's arguments."""

    def __init__(self, function: Callable):
        self.function = function
        name = getattr(function, "__name__", str(function))
        if any(parameter.kind.name.startswith("VAR_") for parameter in inspect.signature(function).parameters.values()):
            raise InputError(f"tool {name}: a tool cannot have *args or **kwargs; write its parameters out")
        try:
            self.schema = get_json_schema(function)
        except (DocstringParsingException, TypeHintParsingException, NameError, ValueError) as error:
            advice = "give every parameter a type and a line under Args: in its docstring"
            raise InputError(f"tool {name}: {advice} ({error})") from error
        self.schema["function"].pop("return", None)  # the model must not see that there is a reward

    async def execute(self, instance_id: str, parameters: dict, **kwargs):
        return await _call(self.function, **{**parameters, **kwargs})


def say(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "".join(traceback.format_exception_only(error)).strip()


def story(error: BaseException) -> str:
    """One line for an InputError; other exceptions come from the user's code and get their traceback."""
    text = f": {error}" if isinstance(error, InputError) else f"\n{''.join(traceback.format_exception(error))}"
    text = readable(redact(text), MOST_SHOWN, "middle")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def show_once(what: str, error: BaseException) -> None:
    """Prints the first error of each kind: one exception type from one line of code."""
    kind = (type(error), *((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)[-1:]))
    if kind not in SHOWN:
        SHOWN.add(kind)
        print(f"rollout: {what} failed; more like it are only counted{story(error)}", flush=True)


async def in_thread(function: Callable, *args, **kwargs):
    """Like asyncio.to_thread, but no full pool delays the call, and the process does not wait for it at its end."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(value, error):
        if not future.done():  # it is done if nobody waits any more
            future.set_exception(error) if error else future.set_result(value)

    def run():
        value = error = None
        try:
            value = function(*args, **kwargs)
        except BaseException as caught:  # noqa: BLE001 a SystemExit or KeyboardInterrupt here is the function's own
            plain = isinstance(caught, Exception) and not isinstance(caught, StopIteration)
            error = caught if plain else RuntimeError(say(caught))
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await future


async def _call(function: Callable, /, *args, **kwargs):
    """The function's result, whether or not it is async."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await in_thread(function, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value


async def _outcome(function: Callable, args: tuple, kwargs: dict) -> tuple[Any, str | None, str]:
    try:
        return await _call(function, *args, **kwargs), None, ""
    except BaseException as error:  # SystemExit would end the loop; `attempt` itself may be cancelled
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C; in another thread it is the function's own
        if isinstance(error, TimeoutError):
            return None, "timeout", say(error)
        if not isinstance(error, asyncio.CancelledError):
            show_once("a call of a tool or interaction", error)
        return None, "exception", say(error)


async def attempt(function: Callable, /, *args, timeout_s: float, **kwargs) -> tuple[Any, str | None, str]:
    """(value, None, "") of `await function(*args, **kwargs)`, or (None, "exception" | "timeout", what happened).
    Whatever the function does, this does not raise."""
    task = asyncio.ensure_future(_outcome(function, args, kwargs))
    try:
        await asyncio.wait({task}, timeout=timeout_s)  # wait_for would wait for a task that ignores its cancellation
    finally:
        task.cancel()
    if not task.done():
        return None, "timeout", f"no answer within {timeout_s:g} s"
    return task.result()


def _checked(value, returns_images: bool) -> ToolResult:
    """What a tool returned. Raises TypeError, ValueError."""
    parts: tuple = value if isinstance(value, tuple) and len(value) in (2, 3) else (value,)
    defaults: tuple = (0.0, {})
    text, reward, metrics = parts + defaults[len(parts) - 1 :]
    images = []
    if hasattr(text, "image"):  # a ToolResponse, ours or verl's
        images = [*(getattr(text, "images", None) or text.image or [])]
        if getattr(text, "video", None):
            raise TypeError("the tool returned a video; only images can be shown")
        text = text.text if isinstance(text, ToolResponse) else text.text or ""
        if images and not returns_images:
            raise TypeError("the tool returned images; its class must say returns_images = True")
        if not all(isinstance(image, Image.Image) for image in images):
            raise TypeError("the tool returned images that are not PIL images")
    if not isinstance(text, str | numbers.Number):
        kind = type(text).__name__
        raise TypeError(f"the tool returned a {kind}; return a text, a number or (text, reward, metrics)")
    if not isinstance(reward, numbers.Real) or not abs(reward) <= LARGEST_SCORE:  # type: ignore[operator]
        raise ValueError(f"the tool returned the reward {reward!r}; use numbers up to {LARGEST_SCORE:g}")
    check_metrics(metrics, "the tool")
    return ToolResult(str(text), float(reward), metrics, images=list(images))


def check_metrics(metrics: Any, whose: str) -> None:
    """Raises TypeError unless they can be added up and logged."""
    values = metrics.values() if isinstance(metrics, dict) else [None]
    if not all(isinstance(value, numbers.Real) and abs(value) <= LARGEST_METRIC for value in values):  # type: ignore[operator]
        raise TypeError(f"{whose}'s metrics are not a dict of finite numbers")


def readable(text: str, max_chars: int, truncate: str) -> str:
    """At most max_chars of the text, with a mark where it was cut (left, middle, right), and *** for keys and passwords
    of the environment. Lone surrogates become U+FFFD."""
    text = redact(text)
    if (excess := len(text) - max_chars) > 0:
        head = {"left": 0, "middle": max_chars - max_chars // 2, "right": max_chars}[truncate]
        text = f"{text[:head]}[... {excess} characters left out ...]{text[head + excess :]}"
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def allow_null(schema):
    """Turns `nullable`, which get_json_schema writes for Optional, into JSON Schema's own form."""
    if isinstance(schema, list):
        return [allow_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: allow_null(item) for key, item in schema.items() if key != "nullable"}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner


def validator_of(tool: BaseTool, limit_s: float = math.inf):
    """limit_s: after which a schema of others ends with TimeoutError."""
    parameters = allow_null(tool.get_openai_tool_schema()["function"].get("parameters") or {})
    if isinstance(tool, FunctionTool):
        parameters["additionalProperties"] = False
    cls = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
    cls = cls if tool.own_schema else _without_regexes(cls, time.monotonic() + limit_s)
    return cls(parameters, registry=EMPTY_REGISTRY)  # without one, a $ref is fetched by HTTP


def _without_regexes(cls, deadline: float):
    """A match may take for ever, and no other thread runs meanwhile. So may a chain of references, which fills the
    memory: it ends at the deadline."""
    additional = cls.VALIDATORS["additionalProperties"]

    def in_time(check: Callable) -> Callable:
        def checked(*args):
            if time.monotonic() > deadline:
                raise TimeoutError("its schema takes too long")
            return check(*args)

        return checked

    def additional_without(validator, allowed, instance, schema):
        return () if "patternProperties" in schema else additional(validator, allowed, instance, schema)

    skipped = dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), lambda *_: ())
    changed = cls.VALIDATORS | skipped | {"additionalProperties": additional_without}
    return jsonschema.validators.extend(cls, {name: in_time(check) for name, check in changed.items()})


def _argument_error(tool: BaseTool, arguments: dict, limit_s: float = math.inf) -> str | None:
    try:
        error = jsonschema.exceptions.best_match(validator_of(tool, limit_s).iter_errors(arguments))
        return error and f"{error.json_path.removeprefix('$').removeprefix('.')}: {error.message}".removeprefix(": ")
    except Exception as error:  # noqa: BLE001 a strange schema or a value nested too deeply may raise anything
        return f"they cannot be checked ({say(error)})"


async def _checked_arguments(tool: BaseTool, arguments: dict, timeout_s: float) -> str | None:
    """What is wrong with them."""
    if tool.own_schema:
        return _argument_error(tool, arguments)
    # the thread ends soon after this has given it up
    problem, kind, what = await attempt(_argument_error, tool, arguments, 2 * timeout_s, timeout_s=timeout_s)
    return f"they cannot be checked ({what})" if kind else problem


async def run_tool_call(
    tools: dict[str, BaseTool], call: ToolCall, instance_id: str, limits: MultiTurnArgs, tools_kwargs=None
) -> ToolResult:
    """Runs a call and returns the answer for the model. Whatever the model or the tool does, it does not raise."""

    async def execute():
        kwargs = ((tools_kwargs or {}).get(call.name) or {}).get("execute_kwargs") or {}
        tool = tools[call.name]
        value = await _call(tool.execute, instance_id, dict(call.arguments), **kwargs)
        return _checked(value, tool.returns_images)

    value = None
    if call.error is not None:
        kind, message = "malformed", f"the tool call is malformed: {call.error}"
    elif call.name not in tools:
        has = f"the tools are: {', '.join(tools)}" if tools else "this prompt has none"
        kind, message = "unknown_tool", f"there is no tool {call.name!r}; {has}"
    elif problem := await _checked_arguments(tools[call.name], call.arguments, limits.tool_timeout):
        kind, message = "wrong_arguments", f"wrong arguments for {call.name}: {problem}"
    else:
        value, kind, message = await attempt(execute, timeout_s=limits.tool_timeout)
    result = ToolResult(f"Error: {message}", error_kind=kind) if kind else value
    result.text = readable(result.text, limits.max_tool_output, limits.truncate)
    return result
