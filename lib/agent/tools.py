"""Tools and simulated users of multi-turn episodes: how they are loaded, called and parsed out of a model's text.

A tool is a plain typed Python function, a subclass of BaseTool, or one of an MCP server's. Nothing that it does ends a
run: run_tool_call answers every failure with a text for the model and a kind to count it by. A function that is not
async runs in a thread of its own, and is left there when its time is over. Beyond reach are an async function that
blocks or ignores its cancellation for ever, C code that keeps the interpreter's lock, a crash of the interpreter.
"""

import ast
import asyncio
import functools
import inspect
import json
import math
import numbers
import operator
import re
import shlex
import threading
import time
import traceback
import urllib.request
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lib import InputError
from lib.reward.reward_pool import LARGEST_SCORE
from lib.secrets import from_environment, struck
from lib.user_code import load_object

ERROR_KINDS = ("malformed", "unknown_tool", "wrong_arguments", "exception", "timeout")
TOP_K = 3  # passages of a search
REMOTE_S = 30.0  # for an MCP server to start, and a retriever to answer

# ---- what a tool is ------------------------------------------------------------------------------


@dataclass
class ToolCall:
    name: str  # "" where the text does not say
    arguments: dict | None = None
    error: str | None = None  # what is wrong with the text; then arguments is None


@dataclass
class ToolResult:
    text: str  # for the model: the output, truncated, or "Error: ..."
    reward: float = 0.0
    metrics: dict = field(default_factory=dict)
    error_kind: str | None = None  # of ERROR_KINDS


class BaseTool:
    """A tool. All methods are async but get_openai_tool_schema; an instance_id is an episode's own state of the tool.

    kwargs come from the row: tools_kwargs[name] = {"create_kwargs", "execute_kwargs", "calc_reward_kwargs",
    "release_kwargs"}. execute may also return the text alone, a number, or (text, reward).
    """

    def get_openai_tool_schema(self) -> dict:
        raise NotImplementedError

    async def create(self, instance_id: str, **kwargs) -> None:
        pass

    async def execute(self, instance_id: str, parameters: dict, **kwargs) -> tuple[str, float, dict]:
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        pass


class BaseInteraction:
    """A simulated user or environment; one object an episode. All methods are async."""

    async def start(self, instance_id: str, **kwargs) -> None:
        """kwargs: the row's interaction_kwargs."""

    async def respond(self, messages: list[dict]) -> tuple[bool, str, float, dict]:
        """(whether the episode is over, the user's next message, this turn's reward, metrics)."""
        raise NotImplementedError

    async def score(self) -> float:
        return 0.0

    async def stop(self) -> None:
        pass


class FunctionTool(BaseTool):
    """A typed function with a Google docstring. The row's execute_kwargs go before what the model gives."""

    def __init__(self, function: Callable):
        self.function = function
        name = getattr(function, "__name__", str(function))
        if any(parameter.kind.name.startswith("VAR_") for parameter in inspect.signature(function).parameters.values()):
            raise InputError(f"tool {name}: a tool cannot have *args or **kwargs; write its parameters out")
        try:
            self.schema = get_json_schema(function)
        except (DocstringParsingException, TypeHintParsingException, NameError, ValueError) as error:
            raise InputError(
                f"tool {name}: give every parameter a type and a line under Args: in its docstring ({error})"
            ) from error
        self.schema["function"].pop("return", None)  # it may say that there is a reward

    def get_openai_tool_schema(self) -> dict:
        return self.schema

    async def execute(self, instance_id: str, parameters: dict, **kwargs):
        return await _call(self.function, **{**parameters, **kwargs})


# ---- calling, with walls -------------------------------------------------------------------------


def _say(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "".join(traceback.format_exception_only(error)).strip()


async def _in_thread(function: Callable, *args, **kwargs):
    """As asyncio.to_thread, but never waited for: neither by a full pool nor at the end of the process."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(value, error):
        if not future.done():  # nobody waits any more
            future.set_exception(error) if error else future.set_result(value)

    def run():
        value = error = None
        try:
            value = function(*args, **kwargs)
        except BaseException as caught:  # noqa: BLE001 a SystemExit or KeyboardInterrupt here is the function's own
            plain = isinstance(caught, Exception) and not isinstance(caught, StopIteration)
            error = caught if plain else RuntimeError(_say(caught))
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await future


async def _call(function: Callable, /, *args, **kwargs):
    """The function's result, whether or not it is async."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await _in_thread(function, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value


async def _outcome(function: Callable, args: tuple, kwargs: dict) -> tuple[Any, str | None, str]:
    try:
        return await _call(function, *args, **kwargs), None, ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 also SystemExit, which would end the loop; `attempt` itself is cancelled
        return None, "timeout" if isinstance(error, TimeoutError) else "exception", _say(error)


async def attempt(function: Callable, /, *args, timeout_s: float, **kwargs) -> tuple[Any, str | None, str]:
    """(value, None, "") of `await function(*args, **kwargs)`, or (None, "exception" | "timeout", what happened).

    Never raises for what the function does: for tool.create / calc_reward / release and the methods of an interaction.
    """
    task = asyncio.ensure_future(_outcome(function, args, kwargs))
    try:
        await asyncio.wait({task}, timeout=timeout_s)  # unlike wait_for, also for a task that ignores its cancellation
    finally:
        task.cancel()
    if not task.done():
        return None, "timeout", f"no answer within {timeout_s:g} s"
    return task.result()


def _checked(value) -> tuple[str, float, dict]:
    """(text, reward, metrics) of what a tool returned. Raises TypeError, ValueError."""
    parts = value if isinstance(value, tuple) and len(value) in (2, 3) else (value,)
    text, reward, metrics = (*parts, *(0.0, {})[len(parts) - 1 :])
    if not isinstance(text, str | numbers.Number):
        raise TypeError(
            f"the tool returned a {type(text).__name__}; a text, a number or (text, reward, metrics) is taken"
        )
    if not isinstance(reward, numbers.Real) or not abs(reward) <= LARGEST_SCORE:
        raise ValueError(f"the tool gave {reward!r} as reward; numbers up to {LARGEST_SCORE:g} are taken")
    if not isinstance(metrics, dict) or not all(isinstance(number, numbers.Real) for number in metrics.values()):
        raise TypeError("the tool's metrics are no dict of numbers")
    return str(text), float(reward), metrics


def _readable(text: str, max_chars: int, truncate: str) -> str:
    """At most max_chars of the text, with a mark where the rest was; lone surrogates become U+FFFD.

    truncate is the end that is cut, as in lib/dataset.py.
    """
    if (excess := len(text) - max_chars) > 0:
        head = {"left": 0, "middle": max_chars - max_chars // 2, "right": max_chars}[truncate]
        text = f"{text[:head]}[... {excess} characters left out ...]{text[head + excess :]}"
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _allow_null(schema):
    """JSON Schema's form of `nullable`, which get_json_schema writes for Optional."""
    if isinstance(schema, list):
        return [_allow_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _allow_null(item) for key, item in schema.items() if key != "nullable"}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner


def _validator(tool: BaseTool):
    parameters = _allow_null(tool.get_openai_tool_schema()["function"].get("parameters") or {})
    if isinstance(tool, FunctionTool):
        parameters["additionalProperties"] = False
    cls = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
    return cls(parameters)


def _argument_error(tool: BaseTool, arguments: dict) -> str | None:
    try:
        error = jsonschema.exceptions.best_match(_validator(tool).iter_errors(arguments))
        return error and f"{error.json_path.removeprefix('$').removeprefix('.')}: {error.message}".removeprefix(": ")
    except Exception as error:  # noqa: BLE001 what a strange schema, or a value nested too deeply, makes of it
        return f"they cannot be checked ({_say(error)})"


async def run_tool_call(
    tools: dict[str, BaseTool],
    call: ToolCall,
    instance_ids: dict[str, str],
    timeout_s: float,
    max_output_chars: int,
    truncate: str = "middle",
    tools_kwargs: dict | None = None,
) -> ToolResult:
    """What the model is answered; never raises for what the model or the tool does.

    instance_ids: by the tool's name; tools_kwargs: the row's. truncate: which end of an output of more than
    max_output_chars is cut: left, middle or right; the mark in its place comes on top.
    """

    async def execute():
        kwargs = ((tools_kwargs or {}).get(call.name) or {}).get("execute_kwargs") or {}
        return _checked(await _call(tools[call.name].execute, instance_ids[call.name], dict(call.arguments), **kwargs))

    value = None
    if call.error is not None:
        kind, message = "malformed", f"the tool call is malformed: {call.error}"
    elif call.name not in tools:
        kind, message = "unknown_tool", f"there is no tool {call.name!r}; the tools are: {', '.join(tools)}"
    elif problem := _argument_error(tools[call.name], call.arguments):
        kind, message = "wrong_arguments", f"wrong arguments for {call.name}: {problem}"
    else:
        value, kind, message = await attempt(execute, timeout_s=timeout_s)
    result = ToolResult(f"Error: {message}", error_kind=kind) if kind else ToolResult(*value)
    result.text = _readable(struck(result.text), max_output_chars, truncate)
    return result


# ---- loading -------------------------------------------------------------------------------------


def load_tools(specs: tuple[str, ...]) -> dict[str, BaseTool]:
    """The tools of `--multi-turn {"tools": [...]}`, by name. A spec is one of

        calculator | python | path/to/file.py:function_or_class
        search:corpus.jsonl           BM25 over {"contents"} or {"title", "text"} a line; another file: a passage a line
        search:http://host/retrieve   a retriever with Search-R1's interface (arXiv:2503.09516)
        mcp:command args | mcp:http://host/mcp   all tools of an MCP server. A command is started here, without this
                                      process's environment but PATH, HOME and the like. It gets more by
                                      "mcp:NAME=$NAME command args", a server elsewhere a header by
                                      "mcp:Authorization=$NAME http://host/mcp": from this process's environment

    Raises InputError: a spec that cannot be loaded, a schema that is none, two tools of one name.
    """
    tools: dict[str, BaseTool] = {}
    for spec in specs:
        for tool in _tools_of(spec):
            try:
                name = tool.get_openai_tool_schema()["function"]["name"]
                validator = _validator(tool)
                validator.check_schema(validator.schema)
            except (TypeError, KeyError, NotImplementedError, jsonschema.SchemaError) as error:
                raise InputError(
                    f"--multi-turn tools {spec}: get_openai_tool_schema() must give {{'type': 'function', 'function': "
                    f"{{'name', 'description', 'parameters': a JSON schema}}}} ({_say(error).splitlines()[0]})"
                ) from error
            if name in tools:
                raise InputError(f"--multi-turn tools {spec}: there is a tool {name!r} already; rename one of the two")
            tools[name] = tool
    return tools


def _tools_of(spec: str) -> list[BaseTool]:
    kind, _, rest = spec.partition(":")
    if spec == "calculator":
        return [FunctionTool(calculator)]
    if spec == "python":
        from lib.reward.sandbox import sandbox_level

        sandbox_level()  # raises InputError where none works
        return [FunctionTool(python)]
    if kind == "search":
        is_url = rest.startswith(("http://", "https://"))
        return [_search_tool(functools.partial(_retrieve, rest) if is_url else _bm25(Path(rest)))]
    if kind == "mcp":
        return _mcp_tools(rest)
    if not rest:
        raise InputError(
            f"--multi-turn tools {spec}: use calculator, python, search:..., mcp:... or path/to/file.py:name"
        )
    found = load_object("--multi-turn tools", spec)
    if callable(found) and not inspect.isclass(found):
        return [FunctionTool(found)]
    if not (inspect.isclass(found) and issubclass(found, BaseTool)):
        raise InputError(f"--multi-turn tools {spec}: neither a function nor a subclass of lib.agent.BaseTool")
    return [found()]


def load_interaction(spec: str) -> type[BaseInteraction]:
    """ "reasoning_gym" or path/to/file.py:Class. Raises InputError."""
    if spec == "reasoning_gym":
        return ReasoningGym
    found = load_object("--multi-turn interaction", spec)
    if not (inspect.isclass(found) and issubclass(found, BaseInteraction)):
        raise InputError(f"--multi-turn interaction {spec}: it is no subclass of lib.agent.BaseInteraction")
    return found


# ---- built in: calculator, python, search, MCP ---------------------------------------------------

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
OPERATORS |= {ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
OPERATORS |= {ast.USub: operator.neg, ast.UAdd: operator.pos}
FUNCTIONS = {"abs": abs, "round": round, "min": min, "max": max, "sqrt": math.sqrt}
MAX_EXPRESSION, MAX_BITS = 1000, 4096  # characters; of an integer


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: For example "(12 + 3.5) * 2 ** 3". Has + - * / // % **, parentheses, abs, round, min, max, sqrt.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has more than {MAX_EXPRESSION} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _evaluate(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _evaluate(left), _evaluate(right)
            if (
                isinstance(op, ast.Pow)
                and isinstance(a, int)
                and isinstance(b, int)
                and (a.bit_length() - 1) * b > MAX_BITS
            ):
                raise ValueError("the result is too large")
            value = OPERATORS[type(op)](a, b)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            values = [_evaluate(arg) for arg in args]
            if name == "round" and len(values) == 2 and abs(values[1]) > MAX_BITS:
                raise ValueError("round() to so many digits")
            value = FUNCTIONS[name](*values)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not arithmetic: use + - * / // % ** and {', '.join(FUNCTIONS)}")
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the result is too large")
    return value


PYTHON_S = 10.0
PYTHON_SHELL = """import sys, traceback
sys.stderr = sys.stdout
try:
    exec(compile({program!r}, "<program>", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
"""


def python(code: str) -> str:
    """Run a Python program and see what it prints. Nothing is kept from one program to the next.

    Args:
        code: The program. Only what it prints is shown.
    """
    from lib.reward import _sandbox
    from lib.reward.sandbox import connect, hang_up, make_spec, sandbox_level

    program = PYTHON_SHELL.format(program=code)
    conn = connect(make_spec(level=sandbox_level(), form="stdin", program=program, total_timeout=PYTHON_S))
    try:
        _sandbox.send(conn, "")
        reply = _sandbox.receive(conn, time.monotonic() + PYTHON_S)
    except TimeoutError:
        raise TimeoutError(f"the program was stopped after {PYTHON_S:g} s") from None
    except (EOFError, ConnectionError):
        raise RuntimeError("the program's process is gone") from None
    finally:
        hang_up(conn)
    ended = f"(the program was ended by signal {-reply['exit']})" if reply["exit"] < 0 else ""
    return reply["stdout"] + ended or "(the program printed nothing)"


def _search_tool(find: Callable[[str], list[str]]) -> FunctionTool:
    def search(query: str) -> str:
        """Search for passages of text.

        Args:
            query: A question or a few words.
        """
        passages = find(query)
        return "\n\n".join(f"Doc {i}: {text}" for i, text in enumerate(passages, 1)) or "No passage was found."

    return FunctionTool(search)


def _retrieve(url: str, query: str) -> list[str]:
    body = json.dumps({"queries": [query], "topk": TOP_K, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REMOTE_S) as response:
        return [hit["document"]["contents"] for hit in json.load(response)["result"][0]]


def _bm25(path: Path) -> Callable[[str], list[str]]:
    """BM25 (Robertson and Zaragoza 2009) by bm25s, over English words: stop words are left out."""
    passages = _read_corpus(path)
    import bm25s

    tokenize = functools.partial(bm25s.tokenize, show_progress=False)
    index = bm25s.BM25()
    index.index(tokenize(passages), show_progress=False)

    def find(query: str) -> list[str]:
        rows, scores = index.retrieve(tokenize([query]), k=min(TOP_K, len(passages)), show_progress=False)
        return [passages[row] for row, score in zip(rows[0], scores[0]) if score > 0]

    return find


def _read_corpus(path: Path) -> list[str]:
    if not path.is_file():
        raise InputError(f"--multi-turn tools search:{path}: no such file")
    passages = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if path.suffix == ".jsonl" else {"contents": line.strip()}
            passages.append(row["contents"] if "contents" in row else f"{row.get('title', '')}\n{row['text']}".strip())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f'--multi-turn tools search:{path}: line {number} is no JSON object with "contents" or "text" '
                f"({_say(error)})"
            ) from error
    if not passages:
        raise InputError(f"--multi-turn tools search:{path}: no passage in it")
    return passages


class MCPServer:
    """A connection to an MCP server, on an event loop and thread of its own: it outlives the loops of rollouts."""

    def __init__(self, server):
        self.loop = asyncio.new_event_loop()
        ready: Future = Future()
        threading.Thread(target=self.loop.run_until_complete, args=(self._serve(server, ready),), daemon=True).start()
        self.client, self.tools = ready.result(REMOTE_S)

    async def _serve(self, server, ready: Future) -> None:
        from mcp import Client

        try:
            async with Client(server) as client:
                page = await client.list_tools()
                tools = page.tools
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools = tools + page.tools
                ready.set_result((client, tools))
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 raised in __init__; later, calls say that the server is gone
            if not ready.done():
                ready.set_exception(error)


class MCPTool(BaseTool):
    def __init__(self, server: MCPServer, tool):
        self.server, self.name = server, tool.name
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        self.schema = {"type": "function", "function": function}

    def get_openai_tool_schema(self) -> dict:
        return self.schema

    async def execute(self, instance_id: str, parameters: dict, **kwargs):
        if not self.server.loop.is_running():
            raise RuntimeError("the MCP server is gone")
        call = self.server.client.call_tool(self.name, {**parameters, **kwargs})
        result = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self.server.loop))
        text = "\n".join(block.text if block.type == "text" else f"({block.type})" for block in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text


def _mcp_target(target: str):
    """What mcp.Client takes. Raises ImportError; ValueError, IndexError: no command; InputError: no such variable."""
    from mcp import StdioServerParameters
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    words, given = shlex.split(target), {}  # environment of the command, or headers
    while words and (assignment := re.fullmatch(r"([\w-]+)=(.*)", words[0])):
        name, text = assignment.groups()
        if (value := from_environment(text)) is None:
            raise InputError(f"--multi-turn tools mcp:{target}: there is no {text[1:]} in the environment")
        given[name] = value
        del words[0]
    if words[0].startswith(("http://", "https://")):
        return streamable_http_client(words[0], http_client=create_mcp_http_client(given))
    return StdioServerParameters(command=words[0], args=words[1:], env=given)


def _mcp_tools(target: str) -> list[BaseTool]:
    try:
        server = MCPServer(_mcp_target(target))
    except ImportError as error:
        raise InputError(f"--multi-turn tools mcp:{target}: pip install 'mcp>=2.3' ({error})") from error
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--multi-turn tools mcp:{target}: no MCP server answers there ({_say(error)})") from error
    return [MCPTool(server, tool) for tool in server.tools]


# ---- a simulated user ----------------------------------------------------------------------------


class ReasoningGym(BaseInteraction):
    """Tells the model that its answer to a reasoning-gym question is wrong, until it is right or the tries are over.

    interaction_kwargs: ground_truth, as in rows of data/reasoning_gym.py; max_tries. A turn's reward is 0; the score is
    the last answer's, by the task.
    """

    async def start(self, instance_id: str, *, ground_truth: str, max_tries: int = 3, **kwargs) -> None:
        from rewards.reasoning_gym import UNBOUNDED

        if (task := json.loads(ground_truth)["task"]) in UNBOUNDED:
            raise InputError(
                f"--multi-turn interaction reasoning_gym: to score {task} may take any time, which needs a process"
            )
        self.ground_truth, self.max_tries, self.tries, self.last = ground_truth, max_tries, 0, 0.0

    async def respond(self, messages: list[dict]) -> tuple[bool, str, float, dict]:
        from rewards.reasoning_gym import compute_score

        answer = next(message["content"] for message in reversed(messages) if message["role"] == "assistant")
        result = await _in_thread(compute_score, "reasoning_gym", answer or "", self.ground_truth)
        self.tries, self.last = self.tries + 1, result["score"]
        done = self.last >= 1 or self.tries >= self.max_tries
        feedback = f"{result['pred']!r} is not right. Try again, and give your answer within <answer> and </answer>."
        return done, "" if done else feedback, 0.0, {"tries": self.tries}

    async def score(self) -> float:
        return self.last


# ---- from a turn's text to calls -----------------------------------------------------------------


def get_tool_parser(name: str, tokenizer, tools: dict[str, BaseTool] | None = None) -> Callable[[str], list[ToolCall]]:
    """The parser of a sampled turn (special tokens kept) into its calls; a text without a call gives [].

    name: hermes | llama3_json | qwen3_coder | vllm:NAME, one of vLLM's | auto, by the tokenizer's chat template or else
    its response_template. A call that cannot be read has .error; vLLM's parsers take it for plain text. What a model
    only thinks, before </think>, is no call.

    Raises InputError: no such parser, vLLM not installed, a template that names no format.
    """
    schemas = [tool.get_openai_tool_schema() for tool in (tools or {}).values()]
    own = {"hermes": parse_hermes, "llama3_json": parse_llama3_json}
    own["qwen3_coder"] = functools.partial(parse_qwen3_coder, tools or {})
    if name == "auto":
        name = _format_of(str(getattr(tokenizer, "chat_template", None) or ""))
        if not name and getattr(tokenizer, "response_template", None):
            return functools.partial(_guarded, _response_template_parser(tokenizer, schemas))
    if name in own:
        return lambda text: own[name](_spoken(text))
    if name.startswith("vllm:"):
        return functools.partial(_guarded, _vllm_parser(name.removeprefix("vllm:"), tokenizer, schemas))
    problem = f"there is no parser {name!r}" if name else "the chat template shows no format that is known here"
    raise InputError(f"--multi-turn parser: {problem}; use {', '.join(own)} or vllm:NAME, one of vLLM's")


def _format_of(template: str) -> str:
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and "<arg_key>" not in template:  # GLM's has that
        return "hermes"
    return "llama3_json" if '"parameters":' in template and "ipython" in template else ""


def _spoken(text: str) -> str:
    _, closed, answer = text.partition("</think>")
    return answer if closed else "" if text.lstrip().startswith("<think>") else text


def _to_call(value) -> ToolCall:
    """The call in a JSON value {"name", "arguments" or "parameters"}; no arguments are none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", error='it must be a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], error="the arguments must be a JSON object")
    return ToolCall(value["name"], arguments)


def _plain(value):
    """The value, if it can be written as JSON in UTF-8. Raises ValueError (NaN, a lone surrogate), TypeError."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _read_call(text: str, start: int = 0) -> tuple[ToolCall, int]:
    """The call in the JSON at `start`, and where that ends; with malformed JSON, `start`."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        return _to_call(_plain(value)), end
    except json.JSONDecodeError as error:
        return ToolCall("", error=f"invalid JSON: {error.msg} at character {error.pos - start}"), start
    except (ValueError, RecursionError) as error:  # also an integer of too many digits
        return ToolCall("", error=f"invalid JSON: {error}"), start


MAX_CALLS = 100  # of one text: JSON's error messages count the lines before them, each from the start
LONGEST_LITERAL = 10_000  # characters
OPEN_CALL, CLOSE_CALL = re.compile(r"<tool_call>\s*"), re.compile(r"\s*</tool_call>")
SPECIAL = re.compile(r"\s*(?:<\|\w+\|>\s*)*")  # <|im_end|>, <|eot_id|>
FIRST_CALL, NEXT_CALL = re.compile(r'\{\s*"(?:name|type)"\s*:'), re.compile(r"\s*;\s*(?=\{)")  # Llama's


def parse_hermes(text: str) -> list[ToolCall]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, up to 100 of them. The last may lack its end."""
    calls, end = [], 0
    while len(calls) < MAX_CALLS and (opened := OPEN_CALL.search(text, end)):
        call, end = _read_call(text, opened.end())
        if end > opened.end() and not CLOSE_CALL.match(text, end) and not SPECIAL.fullmatch(text, end):
            call = ToolCall(call.name, error="no </tool_call> after the JSON object")
        calls.append(call)
    return calls


def parse_llama3_json(text: str) -> list[ToolCall]:
    """{"name": ..., "parameters": {...}}; {...}, as Llama 3.1 writes them, after <|python_tag|> or from the start."""
    start = SPECIAL.match(text).end()
    tagged = "<|python_tag|>" in text[:start]
    if not tagged and not FIRST_CALL.match(text, start):
        return []
    call, end = _read_call(text, start)
    calls = [call]
    while following := NEXT_CALL.match(text, end):
        call, end = _read_call(text, following.end())
        calls.append(call)
    return calls


FUNCTION, PARAMETER = re.compile(r"<function=([^<>\n]+)>\s*"), re.compile(r"<parameter=([^<>\n]+)>\n?")
PARAMETER_END = re.compile(r"(\n?)</parameter>\s*(?=<parameter=|</function>)")


def parse_qwen3_coder(tools: dict[str, BaseTool], text: str) -> list[ToolCall]:
    """<function=NAME><parameter=KEY>value</parameter> ...</function>; a value that is no text is read by its schema."""
    ends = list(PARAMETER_END.finditer(text))
    tags = [found.end(1) for found in ends]  # found once: a search from each parameter would be quadratic
    calls, end = [], 0
    while opened := FUNCTION.search(text, end):
        name, arguments, end = opened[1].strip(), {}, opened.end()
        schema = tools[name].get_openai_tool_schema()["function"] if name in tools else {}
        properties = (schema.get("parameters") or {}).get("properties", {})
        while (parameter := PARAMETER.match(text, end)) and (i := bisect_left(tags, parameter.end())) < len(tags):
            key, start, end = parameter[1].strip(), parameter.end(), ends[i].end()
            arguments[key] = _from_text(text[start : ends[i].start()], properties.get(key, {}))
        closed = text.startswith("</function>", end)
        error = None if closed else "a <parameter=...> without </parameter>, or a <function=...> without </function>"
        calls.append(ToolCall(name, None if error else arguments, error))
    return calls


def _from_text(text: str, schema: dict):
    """The text where the schema allows it, else the JSON or Python value in it; null and None where allowed."""
    is_valid = jsonschema.Draft202012Validator(_allow_null(schema)).is_valid
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
    except Exception as error:  # noqa: BLE001 whatever a parser from elsewhere raises on a malformed call
        return [ToolCall("", error=_say(error))]


def _response_template_parser(tokenizer, schemas: list[dict]) -> Callable[[str], list[ToolCall]]:
    tokenizer.get_response_parser(prefix="")  # raises on a template that is none

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
        cls(tokenizer, request.tools)  # raises where the tokenizer lacks its special tokens
    except ImportError as error:
        raise InputError(f"--multi-turn parser vllm:{name}: vLLM is not installed ({error})") from error
    except KeyError as error:
        known = ", ".join(sorted(ToolParserManager.lazy_parsers))
        raise InputError(f"--multi-turn parser vllm:{name}: vLLM has no such parser; it has {known}") from error
    except (ValueError, RuntimeError) as error:
        raise InputError(f"--multi-turn parser vllm:{name}: it does not fit the tokenizer ({_say(error)})") from error

    def parse(text: str) -> list[ToolCall]:
        parser = cls(tokenizer, request.tools)  # it has a state
        calls = [call.function for call in parser.extract_tool_calls(text, request).tool_calls]
        return [_read_call(f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}')[0] for call in calls]

    return parse
