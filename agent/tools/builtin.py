"""Loads the tools of an episode: the user's own, and the built-in ones (calculator, python, search, MCP)."""

import ast
import asyncio
import functools
import inspect
import json
import math
import operator
import re
import shlex
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import jsonschema
from PIL.Image import Image, Resampling

from agent.tasks.sandbox import load_bash
from agent.tools.base import BaseTool, FunctionTool, ToolResponse, say, validator_of
from agent.tools.verl import load_yaml, make_tool
from lib import InputError
from lib.cli.secrets import from_environment
from lib.cli.user_code import load_object
from lib.sandbox import connect, hang_up, make_spec, receive, sandbox_level, send

TOP_K = 3  # passages that a search returns
REMOTE_S = 30.0  # how long an MCP server may take to start, and a retriever to answer
LONGEST_ANSWER = 2**24  # bytes, of a retriever
LONGEST_SCHEMAS = 2**18  # characters: the schemas are part of every prompt
# A relay to the server's standard input, which ends when this process does, in whatever way. GRACE_S later the relay
# ends the server's process group, with all that the server started.
GUARD = """exec 3<&0; exec "$@" < <(cat <&3; exec >&-; sleep $0; kill -KILL -$$) 3<&-"""
GRACE_S = 2
SCHEMA_ERRORS = (TypeError, ValueError, KeyError, NotImplementedError, RecursionError, jsonschema.SchemaError)


def load_tools(specs: tuple[str, ...], tool_timeout: float = 30.0) -> dict[str, BaseTool]:
    """The tools of --multi-turn.tools, by name. A spec is one of

        calculator | python | zoom | path/to/file.py:function_or_class | path/to/tools.yaml, in verl's form
        bash:folder | "bash:folder path/to/file.py:provider"   commands in the sandbox of the row's task
        search:corpus.jsonl           BM25; a line is {"contents"} or {"title", "text"}, in other files a passage
        search:http://host/retrieve   a retriever with Search-R1's interface (arXiv:2503.09516)
        mcp:command args | mcp:http://host/mcp   all tools of an MCP server. A command gets only PATH, HOME and the
                                      like of this environment, and what "mcp:NAME=$NAME command args" names. A URL
                                      gets a header by "mcp:Authorization=$NAME http://host/mcp"

    Raises InputError: a spec cannot be loaded, a schema is not valid, or two tools have one name."""
    tools: dict[str, BaseTool] = {}
    size = 0
    for spec in specs:
        for tool in _tools_of(spec, tool_timeout):
            flag = f"--multi-turn.tools {spec}"
            try:
                schema = tool.get_openai_tool_schema()
                name, size = schema["function"]["name"], size + len(json.dumps(schema, default=str))
                validator = validator_of(tool)
                if size <= LONGEST_SCHEMAS:
                    validator.check_schema(validator.schema)
            except SCHEMA_ERRORS as error:
                form = "{'type': 'function', 'function': {'name', 'description', 'parameters': a JSON schema}}"
                raise InputError(f"{flag}: get_openai_tool_schema() must return {form} ({_line(error)})") from error
            if size > LONGEST_SCHEMAS:
                limit = f"they are part of every prompt, so the limit is {LONGEST_SCHEMAS}"
                raise InputError(f"{flag}: the schemas up to this one have {size} characters; {limit}")
            if name in tools:
                raise InputError(f"{flag}: there is a tool {name!r} already; rename one of the two")
            tools[name] = tool
    return tools


def _tools_of(spec: str, tool_timeout: float) -> list[BaseTool]:
    kind, _, rest = spec.partition(":")
    if spec == "python":
        sandbox_level()  # raises InputError if no sandbox works here
    if spec in ("zoom", "calculator", "python"):
        return [Zoom() if spec == "zoom" else FunctionTool({"calculator": calculator, "python": python}[spec])]
    if kind == "bash":
        return [load_bash(spec, tool_timeout)]
    if kind == "search":
        is_url = rest.startswith(("http://", "https://"))
        return [_search_tool(functools.partial(_retrieve, rest) if is_url else _bm25(Path(rest)))]
    if kind == "mcp":
        return _mcp_tools(rest)
    if spec.endswith((".yaml", ".yml")):
        return [*load_yaml(spec)]
    if not rest:
        known = "calculator, python, zoom, bash:..., search:..., mcp:..., path/to/file.py:name or path/to/tools.yaml"
        raise InputError(f"--multi-turn.tools {spec}: use {known}")
    found = load_object("--multi-turn.tools", spec)
    if callable(found) and not inspect.isclass(found):
        return [FunctionTool(found)]
    return [make_tool(f"--multi-turn.tools {spec}", found)]


def as_schema(name: str, description: str, parameters: dict) -> dict:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _line(error: BaseException) -> str:
    return say(error).splitlines()[0][:300]


OPERATORS: dict[type[ast.AST], Callable] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
OPERATORS |= {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
OPERATORS |= {ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
FUNCTIONS: dict[str, Callable] = {"abs": abs, "round": round, "min": min, "max": max, "sqrt": math.sqrt}
MAX_EXPRESSION, MAX_BITS = 1000, 4096  # characters of an expression; bits of an integer


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
            is_power = isinstance(op, ast.Pow) and isinstance(b, int)
            if is_power and isinstance(a, int) and (a.bit_length() - 1) * b > MAX_BITS:
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
    program = PYTHON_SHELL.format(program=code)
    conn = connect(make_spec(level=sandbox_level(), form="stdin", program=program, total_timeout=PYTHON_S))
    try:
        send(conn, "")
        reply = receive(conn, time.monotonic() + PYTHON_S)
    except TimeoutError:
        raise TimeoutError(f"the program was stopped after {PYTHON_S:g} s") from None
    except (EOFError, ConnectionError):
        raise RuntimeError("the program's process is gone") from None
    finally:
        hang_up(conn)
    ended = f"(the program was ended by signal {-reply['exit']})" if reply["exit"] < 0 else ""
    return reply["stdout"] + ended or "(the program printed nothing)"


class Zoom(BaseTool):
    """Shows a part of the prompt's first image, enlarged (DeepEyes, arXiv:2505.14362)."""

    returns_images = True

    def __init__(self):
        self.images: dict[str, Image] = {}  # of each episode

    def get_openai_tool_schema(self) -> dict:
        x, y = "from the left, in pixels of the image", "from the top, in pixels of the image"
        sides = {"x0": f"left side, {x}", "y0": f"upper side, {y}", "x1": f"right side, {x}", "y1": f"lower side, {y}"}
        properties = {name: {"type": "number", "description": side} for name, side in sides.items()}
        parameters = {"type": "object", "properties": properties, "required": list(sides)}
        return as_schema("zoom", "Look closer at a rectangle of the first image.", parameters)

    async def create(self, instance_id: str, images: list[Image], **kwargs) -> None:  # type: ignore[override]
        if not images:
            raise ValueError("the prompt has no image")
        self.images[instance_id] = images[0]

    async def execute(self, instance_id: str, parameters: dict, **kwargs) -> ToolResponse:  # type: ignore[override]
        image = self.images[instance_id]
        x0, x1 = (min(max(round(parameters[name]), 0), image.width) for name in ("x0", "x1"))
        y0, y1 = (min(max(round(parameters[name]), 0), image.height) for name in ("y0", "y1"))
        if x0 >= x1 or y0 >= y1:
            what = f"nothing of the image, which is {image.width} x {image.height} pixels, is within {(x0, y0, x1, y1)}"
            raise ValueError(what)
        scale = min(image.width / (x1 - x0), image.height / (y1 - y0))
        size = (max(1, round((x1 - x0) * scale)), max(1, round((y1 - y0) * scale)))
        return ToolResponse("", [image.crop((x0, y0, x1, y1)).resize(size, Resampling.BICUBIC)])

    async def release(self, instance_id: str, **kwargs) -> None:
        self.images.pop(instance_id, None)


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
        if len(answer := response.read(LONGEST_ANSWER + 1)) > LONGEST_ANSWER:
            raise ValueError(f"{url}: the answer has more than {LONGEST_ANSWER} bytes")
    return [hit["document"]["contents"] for hit in json.loads(answer)["result"][0]]


def _bm25(path: Path) -> Callable[[str], list[str]]:
    """BM25 (Robertson and Zaragoza 2009) by bm25s, over English words without stop words."""
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
        raise InputError(f"--multi-turn.tools search:{path}: no such file")
    passages = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if path.suffix == ".jsonl" else {"contents": line.strip()}
            passages.append(row["contents"] if "contents" in row else f"{row.get('title', '')}\n{row['text']}".strip())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            wrong = f'line {number} is not a JSON object with "contents" or "text" ({say(error)})'
            raise InputError(f"--multi-turn.tools search:{path}: {wrong}") from error
    if not passages:
        raise InputError(f"--multi-turn.tools search:{path}: it has no passages")
    return passages


class MCPServer:
    """A connection to an MCP server, in a thread with its own event loop: it outlives the loops of rollouts."""

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
        except Exception as error:  # noqa: BLE001 __init__ raises it; after that, calls say that the server is gone
            if not ready.done():
                ready.set_exception(error)


class MCPTool(BaseTool):
    own_schema = False

    def __init__(self, server: MCPServer, tool):
        self.server, self.name = server, tool.name
        self.schema = as_schema(tool.name, tool.description or "", tool.input_schema)
        self.in_order = not (tool.annotations and tool.annotations.read_only_hint)

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
    """What mcp.Client takes. Raises ImportError; ValueError, IndexError (no command); InputError (no such variable)."""
    from mcp import StdioServerParameters
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    words, given = shlex.split(target), {}  # given: environment of the command, or headers
    while words and (assignment := re.fullmatch(r"([\w-]+)=(.*)", words[0])):
        name, text = assignment.groups()
        if (value := from_environment(text)) is None:
            raise InputError(f"--multi-turn.tools mcp:{target}: the environment has no variable {text[1:]}")
        given[name] = value
        del words[0]
    if words[0].startswith(("http://", "https://")):
        return streamable_http_client(words[0], http_client=create_mcp_http_client(given))
    if not shutil.which(words[0]):
        raise FileNotFoundError(f"there is no program {words[0]}")
    return StdioServerParameters(command="bash", args=["-c", GUARD, str(GRACE_S), *words], env=given)


def _mcp_tools(target: str) -> list[BaseTool]:
    try:
        server = MCPServer(_mcp_target(target))
    except InputError:
        raise
    except Exception as error:
        missing = isinstance(error, ImportError)
        why = f"pip install 'mcp>=2.3' ({error})" if missing else f"no MCP server answers there ({_line(error)})"
        raise InputError(f"--multi-turn.tools mcp:{target}: {why}") from error
    return [MCPTool(server, tool) for tool in server.tools]
