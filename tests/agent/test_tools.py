"""agent: tools that misbehave on purpose, the built-in ones, real MCP servers, and the parsers' round trips."""

import asyncio
import functools
import json
import math
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent import BaseInteraction, BaseTool, FunctionTool, MultiTurn, ToolCall, get_tool_parser, load_tools
from agent.interactions import load_interaction
from agent.metrics import ERROR_KINDS
from agent.tools.base import attempt, run_tool_call
from agent.tools.builtin import as_schema, calculator
from lib import InputError
from lib.args import MultiTurnArgs
from lib.model import load_tokenizer
from tests.common import ROOT, TOY_MODEL, Handler, http_server, killed_with_its_children, one_line, wait_until

LIMIT_S = 0.3  # of tools that hang; the others take milliseconds
PATIENT_S = 60.0
LIMITS = MultiTurnArgs(tool_timeout=PATIENT_S, max_tool_output=100)


def answer(tool, arguments=None, *, timeout_s=PATIENT_S, max_output_chars=1000, truncate="middle", tools_kwargs=None):
    """What run_tool_call makes of one call of a tool or function, on a loop of its own."""
    tool = tool if isinstance(tool, BaseTool) else FunctionTool(tool)
    name = tool.get_openai_tool_schema()["function"]["name"]
    call = ToolCall(name, {} if arguments is None else arguments)
    limits = MultiTurnArgs(tool_timeout=timeout_s, max_tool_output=max_output_chars, truncate=truncate)
    return asyncio.run(run_tool_call({name: tool}, call, "1", limits, tools_kwargs))


def echo(text: str, times: int = 1, tail: str | None = None) -> str:
    """Say it again.

    Args:
        text: What to say.
        times: How often.
        tail: What comes last.
    """
    return text * times + (tail or "")


# ---- functions as tools --------------------------------------------------------------------------
def test_a_function_is_a_tool():
    schema = FunctionTool(echo).get_openai_tool_schema()
    assert schema["function"]["name"] == "echo"
    assert schema["function"]["parameters"]["required"] == ["text"]
    assert "return" not in schema["function"]
    assert answer(echo, {"text": "a", "times": 3, "tail": None}).text == "aaa"
    assert answer(echo, {"text": "a"}, tools_kwargs={"echo": {"execute_kwargs": {"times": 2}}}).text == "aa"
    filled_up = {"echo": None, "other": {}}  # with None, by parquet
    assert answer(echo, {"text": "a"}, tools_kwargs=filled_up).text == "a"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("value", "text", "reward", "metrics"),
    [("x", "x", 0, {}), (("x", 1), "x", 1, {}), ((2, 0.5, {"n": 3}), "2", 0.5, {"n": 3})],
)
def test_what_a_function_may_return(value, text, reward, metrics, is_async):
    result = answer(as_tool(lambda: value, is_async))
    assert (result.text, result.reward, result.metrics, result.error_kind) == (text, reward, metrics, None)


WRONG = [None, ("x",), (1, 2, {}, 4), ("x", "y"), ("x", math.nan)]
WRONG += [("x", 1, metrics) for metrics in ([1], {"a": "b"}, {"a": math.inf}, {"a": 10**400})]


@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_return_value_is_an_exception(value):
    result = answer(as_tool(lambda: value, False))
    assert result.error_kind == "exception" and result.text.startswith("Error: ")
    assert (result.reward, result.metrics) == (0.0, {})


def test_a_function_without_a_schema_is_refused():
    def bare(a: int): ...
    def star(*a: int):
        """F.\n\nArgs:\n    a: A."""

    for function, why in ((bare, "docstring"), (star, "parameters")):
        with one_line(f"tool {function.__name__}: .*{why}"):
            FunctionTool(function)


# ---- a call that is refused ----------------------------------------------------------------------
def nested(depth: int) -> list:
    return functools.reduce(lambda value, _: [value], range(depth), [])


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (ToolCall("", error="invalid JSON"), "malformed", "invalid JSON"),
        (ToolCall("eco", {}), "unknown_tool", "'eco'; the tools are: echo"),
        (ToolCall("echo", {}), "wrong_arguments", "'text' is a required property"),
        (ToolCall("echo", {"text": 1}), "wrong_arguments", "text: 1 is not of type 'string'"),
        (ToolCall("echo", {"text": "a", "loud": True}), "wrong_arguments", "'loud' was unexpected"),
        (ToolCall("\ud800", {}), "unknown_tool", "there is no tool"),
        *((ToolCall("echo", {"text": nested(n)}), "wrong_arguments", "echo") for n in (100, 900, 20000)),
    ],
)
def test_a_call_that_is_refused(call, kind, words):
    result = asyncio.run(run_tool_call({"echo": FunctionTool(echo)}, call, "1", LIMITS))
    assert result.error_kind == kind and kind in ERROR_KINDS
    assert result.text.startswith("Error: ") and words in result.text
    result.text.encode()


# ---- hostile tools -------------------------------------------------------------------------------
class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit("no")


HOSTILE = {
    "raises": (lambda: 1 / 0, "exception", "ZeroDivisionError"),
    "exits": (lambda: sys.exit(3), "exception", "SystemExit: 3"),
    "interrupts": (lambda: raise_(KeyboardInterrupt()), "exception", "KeyboardInterrupt"),
    "cancels": (lambda: raise_(asyncio.CancelledError()), "exception", "CancelledError"),
    "unspeakable": (lambda: raise_(Unspeakable()), "exception", "Unspeakable"),
    "recurses": (lambda: recurse(0), "exception", "RecursionError"),
    "long error": (lambda: raise_(ValueError("x" * 10**7)), "exception", "characters left out"),
    "times out": (lambda: raise_(TimeoutError("slow server")), "timeout", "slow server"),
    "hangs": (lambda: time.sleep(20), "timeout", "no answer within 0.3 s"),
    "spins": (lambda: spin(time.monotonic() + 2), "timeout", "no answer within 0.3 s"),
    "nested loop": (lambda: asyncio.run(asyncio.sleep(0, "done")), None, "done"),
    "long": (lambda: "é" * 10**7, None, "characters left out"),
    "surrogates": (lambda: "a\ud800b\udfffc", None, "a\ufffdb\ufffdc"),
}


def raise_(error):
    raise error


def recurse(n):
    return recurse(n + 1)


def spin(end):
    while time.monotonic() < end:
        pass


def as_tool(body, is_async):
    def thread():
        """Run it."""
        return body()

    async def task():
        """Run it."""
        return body()

    return FunctionTool(task if is_async else thread)


# An async function that blocks is the documented limit; in the main thread a tool's KeyboardInterrupt is Ctrl-C.
CASES = [(name, False) for name in HOSTILE] + [
    (name, True) for name in HOSTILE.keys() - {"hangs", "spins", "interrupts"}
]


@pytest.mark.filterwarnings("ignore:coroutine 'sleep' was never awaited")
@pytest.mark.parametrize(("name", "is_async"), sorted(CASES))
def test_hostile_tools_are_answered(name, is_async):
    body, kind, words = HOSTILE[name]
    if is_async and name == "nested loop":
        kind, words = "exception", "asyncio.run() cannot be called"
    result = answer(as_tool(body, is_async), timeout_s=LIMIT_S if kind == "timeout" else PATIENT_S)
    assert result.error_kind == kind and words in result.text
    assert result.text.startswith("Error: ") == (kind is not None)
    assert len(result.text) <= 1000 + len("[... 10000000 characters left out ...]")
    result.text.encode()  # no surrogate is left


def test_the_first_exception_of_each_kind_is_printed_with_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr("agent.tools.base.SHOWN", set())
    monkeypatch.setenv("MY_API_KEY", "secret-of-the-tool")

    def broken(word: str):
        """Broken.\n\nArgs:\n    word: a word"""
        if word == "slow":
            raise TimeoutError
        return {}[word] if word != "secret" else raise_(ValueError("\x1b[2Jsecret-of-the-tool" + "x" * 10**6))

    for word in ("a", "b", "slow", "secret", "secret"):
        answer(broken, {"word": word})
    said = capsys.readouterr().out
    assert said.count("more like it are only counted\nTraceback (most recent") == 2 and len(said) < 10_000
    assert said.count("KeyError: 'a'") == 1 and "KeyError: 'b'" not in said and "in broken" in said
    assert "secret-of-the-tool" not in said and "\x1b" not in said and "ValueError: \ufffd[2J***xxx" in said


def test_a_task_that_ignores_its_cancellation_is_left_behind():
    cancelled = []

    async def stubborn():
        for _ in range(2):  # attempt cancels it, and asyncio.run at its end
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                cancelled.append(1)

    async def main():
        outcome = await attempt(stubborn, timeout_s=LIMIT_S)
        await asyncio.sleep(0)
        return outcome, len(cancelled)

    assert asyncio.run(main()) == ((None, "timeout", "no answer within 0.3 s"), 1)


def test_the_end_of_the_run_passes():
    """A cancelled run is cancelled, also while a tool swallows it; Ctrl-C in an async tool gets through."""

    async def cancelled(function):
        task = asyncio.ensure_future(attempt(function, timeout_s=PATIENT_S))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for sleep in (asyncio.sleep, time.sleep):
        asyncio.run(cancelled(functools.partial(sleep, 20)))

    async def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(attempt(interrupted, timeout_s=PATIENT_S))


def test_a_process_ends_though_a_tool_hangs():
    program = "import asyncio, threading\nfrom agent.tools.base import attempt\n"
    program += "print(asyncio.run(attempt(threading.Event().wait, timeout_s=0.1))[1])"
    command, limit = [sys.executable, "-c", program], PATIENT_S
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "timeout\n", "")


@given(st.text(st.characters()), st.integers(0, 30), st.sampled_from(["left", "middle", "right"]))
@example("\ud83d" * 20 + "\ude00" * 20, 20, "middle")
def test_output_is_cut_where_asked(text, max_chars, truncate):
    kept = answer(as_tool(lambda: text, True), max_output_chars=max_chars, truncate=truncate).text
    kept.encode()
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if len(text) <= max_chars:
        assert kept == clean
        return
    mark = f"[... {len(text) - max_chars} characters left out ...]"
    head, _, tail = kept.partition(mark)
    assert mark in kept and len(head) + len(tail) <= max_chars
    if not any("\ud800" <= c <= "\udfff" for c in text):  # cutting a pair of surrogates in two changes it
        assert text.startswith(head) and text.endswith(tail) and len(head) + len(tail) == max_chars
        assert {"left": head == "", "right": tail == "", "middle": 0 <= len(tail) * 2 - max_chars + 1 <= 1}[truncate]


# ---- calculator ----------------------------------------------------------------------------------
NUMBERS = st.integers(0, 10**6).map(str) | st.floats(0, 1e6).map(lambda x: f"{x:.6f}")
SIGNS = ["+", "-", "*", "/", "//", "%", "**"]
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(SIGNS), inner).map("({0[0]}{0[1]}{0[2]})".format),
        st.tuples(st.sampled_from(["-", "+", "abs", "round", "sqrt"]), inner).map("{0[0]}({0[1]})".format),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map("{0[0]}({0[1]}, {0[2]})".format),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=200)
@given(EXPRESSIONS)
@example("2**0.5**2 - -3")
@example("9**9**9")
@example("(-8)**0.5")
@example("round(2.675, 2) + round(5, -1)")
def test_calculator_is_pythons_arithmetic(expression):
    """Python is asked only what the calculator answers: it has no bound of its own on 9**9**9."""
    try:
        text = calculator(expression)
    except (ValueError, ArithmeticError):
        return
    expected = eval(expression, {"sqrt": math.sqrt})
    if isinstance(expected, int):
        assert text == str(expected)
    else:
        assert math.isclose(float(text), expected, rel_tol=1e-14)  # 15 digits


def test_calculator_writes_its_results():
    texts = {" 2 * (3 + 4)\n": "14", "10/4": "2.5", "4/2": "2", "0.1+0.2": "0.3", "2**4000 // 2**3990": "1024"}
    assert {expression: calculator(expression) for expression in texts} == texts


@pytest.mark.parametrize(
    "expression",
    ["", "1+", "a", "1 if 1 else 2", "[1]", "'a'*3", "True", "1<2", "1j", "().__class__", "__import__('os')",
     "abs(-1, x=1)", "(lambda: 1)()", "sqrt(*[1])", "9**9**9", "2**4000*2**4000", "1e999", "1/0", "(-1)**0.5",
     "round(5, -10**9)", "round(1, 2.5)", "2.0**99999", "(" * 999, "-" * 999 + "1", "1+" * 500, "1" * 1001,
     "\ud800", "\0", "1;2", "min(1)"],
)  # fmt: skip
def test_calculator_refuses(expression):
    result = answer(calculator, {"expression": expression})
    assert result.error_kind == "exception" and result.text.startswith("Error: ")


# ---- python, search ------------------------------------------------------------------------------
def test_python(monkeypatch):
    (tool,) = load_tools(("python",)).values()
    assert answer(tool, {"code": "import math\nprint(math.factorial(5), '\\u00e9')"}).text == "120 é\n"
    assert answer(tool, {"code": "x = 1"}).text == "(the program printed nothing)"
    draw = {"code": "import random\nprint(random.random())"}
    assert answer(tool, draw).text == answer(tool, draw).text
    failed = answer(tool, {"code": "print(1)\ndef f():\n    return [][0]\nf()"})
    assert failed.error_kind is None  # the tool did its work
    assert failed.text.startswith("1\nTraceback") and 'File "<program>", line 3, in f' in failed.text
    assert failed.text.endswith("IndexError: list index out of range\n") and "<__main__>" not in failed.text
    assert "SyntaxError" in answer(tool, {"code": "print("}).text
    assert "UnicodeEncodeError" in answer(tool, {"code": "'\ud800'"}).text
    assert "signal 11" in answer(tool, {"code": "import ctypes\nctypes.string_at(0)"}).text
    assert answer(tool, {"code": "exit('no solution')\nprint(2)"}).text == "no solution\n"
    refused = answer(tool, {"code": "import socket\nsocket.create_connection(('127.0.0.1', 9))"}).text
    assert "PermissionError" in refused or "Errno" in refused
    monkeypatch.setattr("agent.tools.builtin.PYTHON_S", 0.5)
    result = answer(tool, {"code": "while True: pass"})
    assert result.error_kind == "timeout" and "stopped after 0.5 s" in result.text


def test_search_in_a_corpus(tmp_path):
    passages = ["Paris is the capital of France.", "Berlin is the capital of Germany.", "Cats sleep.", "Dogs bark."]
    rows = [{"contents": passages[0]}, {"title": "Berlin", "text": passages[1]}, *({"text": t} for t in passages[2:])]
    (tmp_path / "c.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (tmp_path / "c.txt").write_text("\n".join(passages) + "\n")
    for file, second in (("c.jsonl", f"Berlin\n{passages[1]}"), ("c.txt", passages[1])):
        (tool,) = load_tools((f"search:{tmp_path / file}",)).values()
        text = answer(tool, {"query": "What is Germany's capital?"}).text
        assert text == f"Doc 1: {second}\n\nDoc 2: {passages[0]}"
        for query in ("", "zebra", "\ud800"):
            assert answer(tool, {"query": query}).text == "No passage was found."
    (tmp_path / "one.txt").write_text("Only this.")
    tool = load_tools((f"search:{tmp_path / 'one.txt'}",))["search"]
    assert answer(tool, {"query": "only"}).text == "Doc 1: Only this."


class Retriever(Handler):
    def do_POST(self):
        asked = self.body()
        hits = [{"document": {"id": 1, "contents": f'"{query}"\ntext'}, "score": 1.5} for query in asked["queries"]]
        self.reply({"result": [hits * asked["topk"]]}, 500 if asked["queries"] == ["fail"] else 200)


def test_search_by_http():
    with http_server(Retriever) as url:
        (tool,) = load_tools((f"search:{url}/retrieve",)).values()
        assert answer(tool, {"query": "cats"}).text == "\n\n".join(f'Doc {i}: "cats"\ntext' for i in (1, 2, 3))
        assert answer(tool, {"query": "fail"}).error_kind == "exception"


# ---- MCP -----------------------------------------------------------------------------------------
SERVER = '''
import os, subprocess, time
from mcp.server.mcpserver import MCPServer
server = MCPServer("demo", log_level="CRITICAL")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add."""
    if b == 13:
        os._exit(1)
    return a + b

@server.tool()
def key() -> str:
    """The key that it was given, twice."""
    return f'{len(os.environ.get("DEMO_KEY", ""))} {os.environ.get("DEMO_KEY")}'

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no")

subprocess.Popen(["sleep", "1000"])
server.run("stdio")
time.sleep(1000)
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One that does not end with its input."""
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return f"mcp:{sys.executable} {path}"


def test_mcp_by_command(server):
    tools = load_tools((server,))
    assert list(tools) == ["add", "key", "fail"] and not tools["add"].own_schema
    assert tools["add"].get_openai_tool_schema()["function"]["description"] == "Add."
    assert answer(tools["add"], {"a": 2}).text == "3"  # on a loop other than the one of load_tools, twice
    assert answer(tools["add"], {"a": 2, "b": 40}).text == "42"
    assert answer(tools["add"], {"a": "x"}).error_kind == "wrong_arguments"
    failed = answer(tools["fail"])
    assert failed.error_kind == "exception" and "fail" in failed.text
    assert answer(tools["add"], {"a": 1, "b": 13}, timeout_s=5.0).error_kind in ("exception", "timeout")  # it is dead
    assert answer(tools["add"], {"a": 1}, timeout_s=5.0).error_kind in ("exception", "timeout")


def test_an_mcp_server_gets_keys_from_the_environment_and_repeats_none(server, monkeypatch):
    monkeypatch.setenv("OF_DEMO", "a secret")
    assert answer(load_tools((server,))["key"]).text == "0 None"
    assert answer(load_tools((server.replace("mcp:", "mcp:DEMO_KEY=$OF_DEMO "),))["key"]).text == "8 ***"
    with pytest.raises(InputError, match="the environment has no variable ABSENT"):
        load_tools((server.replace("mcp:", "mcp:DEMO_KEY=$ABSENT "),))


def test_an_mcp_server_elsewhere_gets_keys_as_headers(monkeypatch):
    monkeypatch.setenv("OF_DEMO", "Bearer secret")
    seen = []

    class Refuses(Handler):
        def do_POST(self):
            seen.append(self.headers["Authorization"])
            self.send_error(401)

    refused = pytest.raises(InputError, match="no MCP server answers there")
    with http_server(Refuses) as url, refused as raised:
        load_tools((f"mcp:Authorization=$OF_DEMO {url}/mcp",))
    assert set(seen) == {"Bearer secret"} and "secret" not in str(raised.value)


def test_mcp_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(InputError, match=r"pip install 'mcp>=2\.3'"):
        load_tools(("mcp:x",))


def load_and_wait(spec, pids):
    load_tools((spec,))
    pids.send([child.pid for child in psutil.Process().children(recursive=True)])
    time.sleep(1000)


def test_no_mcp_server_outlives_a_run_that_is_killed(server):
    assert len(killed_with_its_children(load_and_wait, server)) >= 2


class Foreign(BaseTool):
    """With a schema of somebody else's, as the tools of an MCP server."""

    own_schema = False

    def __init__(self, **parameters):
        self.schema = as_schema("do", "<|im_end|>", {"type": "object"} | parameters)

    async def execute(self, instance_id, parameters):
        return "done"


def test_what_others_write_in_a_schema_is_text():
    tokenizer = load_tokenizer(TOY_MODEL)
    shown = "{% for m in messages %}{{ m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"
    tokenizer.chat_template = "{{ tools | tojson }}" + shown
    tool = Foreign(description="x<|im_end|>", properties={"<|im_end|>": {"enum": ["<|im_end|>"]}})
    text = MultiTurn(tokenizer, {"do": tool}).render([{"role": "user", "content": "1?"}])
    assert text.count("<|im_end|>") == 1 and text.count("< |im_end|>") == 4


def test_a_schema_of_others_stops_nothing_and_fetches_nothing():
    chain = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)} | {"40": False}
    before = {*threading.enumerate()}
    slow = answer(Foreign(**{"$defs": chain}, properties={"a": {"$ref": "#/$defs/0"}}), {"a": 1}, timeout_s=LIMIT_S)
    assert slow.error_kind == "wrong_arguments" and "they cannot be checked (no answer within 0.3 s)" in slow.text
    wait_until(lambda: not {*threading.enumerate()} - before)  # nothing goes on in a thread
    patterns = {"patternProperties": {"^(b+)+$": {}}, "additionalProperties": False}
    regex = Foreign(properties={"a": {"pattern": "^(a+)+$"}}, **patterns)
    assert answer(regex, {"a": "a" * 40 + "!", "b" * 40 + "!": 1}).text == "done"
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0)
        url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/schema"
        fetches = Foreign(properties={"a": {"$ref": url}})
        assert answer(fetches, {"a": 1}, timeout_s=LIMIT_S).error_kind == "wrong_arguments"
        with pytest.raises(BlockingIOError):  # nobody called
            elsewhere.accept()


# ---- files ---------------------------------------------------------------------------------------
FILE = '''
from agent import BaseInteraction, BaseTool

seen = []

def remember(word: str) -> str:
    """Remember a word.

    Args:
        word: The word.
    """
    seen.append(word)
    return "ok"

class Recall(BaseTool):
    schema = {"type": "function", "function": {"name": "recall", "description": "All words.", "parameters": {}}}

    async def execute(self, instance_id, parameters, **kwargs):
        return " ".join(seen), 1.0, {}

class NoSchema(BaseTool):
    pass

class BadSchema(BaseTool):
    schema = {"function": {"name": "bad", "parameters": {"type": "x" * 10**5}}}

class Long(BaseTool):
    schema = {"function": {"name": "long", "parameters": {"description": "x" * 10**6}}}

class User(BaseInteraction):
    pass

class Other:
    pass

number = 3
'''


CORPORA = {"a.jsonl": '{"contents": "x"}\n{"id": 1}', "b.jsonl": "{", "empty.txt": "\n"}


@pytest.fixture
def tool_file(tmp_path):
    for name, text in ({"own.py": FILE} | CORPORA).items():
        (tmp_path / name).write_text(text)
    return tmp_path / "own.py"


VERL = '''
from types import SimpleNamespace

from agent import BaseTool, ToolResponse

class Verl(BaseTool):
    """As one writes it for verl 0.5 and later, but for the import."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.state = {}
        assert self.name == tool_schema.function.name == self.tool_schema.model_dump()["function"]["name"]

    async def create(self, instance_id=None, **kwargs):
        self.state["own " + instance_id] = kwargs["create_kwargs"]["truth"]
        return "own " + instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        right = parameters["answer"] == self.state[instance_id]
        return ToolResponse(text=f"{right} {self.config['level']}"), 0.5, {"status": "ok", "tries": 1, "error": None}

    async def calc_reward(self, instance_id, **kwargs):
        return 2.0 if self.state[instance_id] else 0.0

    async def release(self, instance_id, **kwargs):
        del self.state[instance_id]

class Older(Verl):
    """verl 0.4: the create_kwargs one by one, a text, no reward."""

    async def create(self, instance_id, truth):
        self.state[instance_id] = truth
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        response, _, metrics = await super().execute(instance_id, parameters)
        return response.text, None, metrics

class Plain:
    """Without a base class and async; its schema and response are objects, as verl's are."""

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema, self.state = config, tool_schema, {}

    def get_openai_tool_schema(self):
        return SimpleNamespace(model_dump=lambda **kwargs: dict(self.tool_schema))

    def create(self, instance_id, create_kwargs):
        self.state[instance_id] = create_kwargs["truth"]

    def execute(self, instance_id, parameters):
        text = f"{parameters['answer'] == self.state[instance_id]} {self.config['level']}"
        return SimpleNamespace(text=text, image=None, video=None), 0.5, {"tries": 1, "error": "none"}

    def calc_reward(self, instance_id):
        return 2.0

    def release(self, instance_id):
        del self.state[instance_id]
'''
LISTED = """\
tools:
  - class_name: {name}
    config: {{type: native, level: 010, limit: null}}
    tool_schema:
      type: function
      function:
        name: check
        description: Checks an answer.
        parameters:
          type: object
          properties:
            answer: {{type: string, description: "What, if not a number.", enum: ["1", "no"]}}
            more: {{type: array, items: {{type: array, items: {{type: [integer, number]}}}}}}
          required: [answer]
"""


@pytest.fixture
def verl_file(tmp_path, monkeypatch):
    (tmp_path / "verl_like.py").write_text(VERL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "tools.yaml"
    sys.modules.pop("verl_like", None)


@pytest.mark.parametrize("name", ["verl_like.Verl", "verl_like.py:Verl", "verl_like.Older", "verl_like.Plain"])
def test_tools_of_verl(verl_file, name):
    verl_file.write_text(LISTED.format(name=name))
    tools = load_tools((str(verl_file), "calculator"))
    tool, schema = tools["check"], tools["check"].get_openai_tool_schema()
    assert list(tools) == ["check", "calculator"] and tool.in_order == ("Plain" in name)
    properties = schema["function"]["parameters"]["properties"]
    assert properties["answer"]["enum"] == ["1", "no"] and properties["more"]["items"]["items"]["type"][0] == "integer"

    async def episode():
        await tool.create("e", truth="no")
        calls = [ToolCall("check", {"answer": answer}) for answer in ("no", "1", "2")]
        results = [await run_tool_call(tools, call, "e", LIMITS) for call in calls]
        reward = await tool.calc_reward("e")
        await tool.release("e")
        return results, reward

    (right, wrong, refused), final = asyncio.run(episode())
    assert (right.text, wrong.text, refused.error_kind) == ("True 8", "False 8", "wrong_arguments")
    assert right.metrics == {"tries": 1} and right.reward == (0 if "Older" in name else 0.5) and final == 2
    assert tool.tool.state == {}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tools:", "tool:", "write `tools:` and a list"),
        ("    config:", "    confg:", r"tools\.0\.confg: Extra inputs are not permitted: write `tools:` and a list"),
        ("verl_like.Verl", "Verl", "class_name 'Verl': give module.Class"),
        ("verl_like.Verl", "verl_like.Nobody", "class_name verl_like.Nobody: verl_like has no 'Nobody'"),
        ("verl_like.Verl", "verl.tools.gsm8k_tool.Gsm8kTool", "ModuleNotFoundError: No module named 'verl'"),
        ("type: native", "type: mcp", "config.type mcp: only native; an MCP server is"),
        ("level: 010", 'key: "${oc.env:KEY}"', "OmegaConf"),
        ("level: 010", "level: !!python/object:os.system {}", "line 3: could not determine a constructor"),
        ("        name: check\n", "", "its constructor raises AttributeError: name"),
        ("items: {type: array", "items: " + "{items: " * 2000 + "{type: array", "cannot be read: maximum recursion"),
    ],
)
def test_a_file_of_tools_that_cannot_be_read_is_one_line(verl_file, old, new, words):
    text = LISTED.format(name="verl_like.Verl")
    assert old in text
    verl_file.write_text(text.replace(old, new))
    with one_line(f"^--multi-turn.tools {verl_file}.*({words})"):
        load_tools((str(verl_file),))


def test_tools_of_a_file_share_it(tool_file):
    tools = load_tools((f"{tool_file}:remember", f"{tool_file}:Recall", "calculator"))
    assert list(tools) == ["remember", "recall", "calculator"]
    answer(tools["remember"], {"word": "a"}), answer(tools["remember"], {"word": "b"})
    assert answer(tools["recall"]).text == "a b"
    assert issubclass(load_interaction(f"{tool_file}:User"), BaseInteraction)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (("calculator", "calculator"), "there is a tool 'calculator' already"),
        (("calculater",), "use calculator, python"),
        (("nowhere.py:f",), "give an existing file"),
        (("{file}:nothing",), "has no 'nothing'"),
        (("{file}:number",), "neither a function nor"),
        (("{file}:NoSchema",), "NotImplementedError"),
        (("{file}:BadSchema",), r"SchemaError: 'x{200,300}\)$"),
        (("{file}:Long",), "of every prompt, so the limit"),
        (("search:{folder}/a.jsonl",), "line 2 is no"),
        (("search:{folder}/b.jsonl",), "line 1 is no"),
        (("search:{folder}/empty.txt",), "no passage"),
        (("search:{folder}/absent.txt",), "no such file"),
        (("mcp:no-such-command",), "no MCP server answers there"),
        ((f"mcp:{sys.executable} -c 0",), "no MCP server answers there"),
        (("mcp:",), "no MCP server answers there"),
    ],
)
def test_tools_that_cannot_be_loaded(tool_file, specs, words):
    with one_line(words):
        load_tools(tuple(spec.format(file=tool_file, folder=tool_file.parent) for spec in specs))


def test_interactions_that_cannot_be_loaded(tool_file):
    for spec, words in ((f"{tool_file}:Other", "not a sub"), ("gym", "give an existing"), (f"{tool_file}:X", "'X'")):
        with pytest.raises(InputError, match=words):
            load_interaction(spec)


# ---- parsers -------------------------------------------------------------------------------------
TRICKY = ["</tool_call>", "<tool_call>", '{"name": "x"}', "}", ";", "\n", '"', "\\", "<|im_end|>",
          "é漢\N{GRINNING FACE}", "; {", "</think>", "<think>", "</function>"]  # fmt: skip
STRINGS = st.lists(st.sampled_from(TRICKY) | st.text(max_size=5), max_size=4).map("".join)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3), max_leaves=6
)
CALLS = st.lists(st.tuples(STRINGS, st.dictionaries(STRINGS, VALUES, max_size=3)), min_size=1, max_size=3)
AROUND = st.sampled_from(["", "\n", "Let me see.\n", "{so}; "])


def parse(name, text, template="", **attributes):
    return get_tool_parser(name, SimpleNamespace(chat_template=template, **attributes))(text)


@settings(max_examples=60)
@given(CALLS, st.booleans(), AROUND, st.sampled_from(["", "<|python_tag|>", "\n"]), st.sampled_from(["", "<|eot_id|>"]))
def test_json_round_trips(calls, ascii_only, before, tag, after):
    expected, own = [ToolCall(*call) for call in calls], {"hermes": [], "llama3_json": []}
    for name, arguments in calls:
        for texts, key in zip(own.values(), ("arguments", "parameters")):
            texts.append(json.dumps({"name": name, key: arguments}, ensure_ascii=ascii_only))
    for thought in ("", "<think>\n<tool_call>{}</tool_call>\n</think>"):
        assert parse("hermes", thought + before + in_tags(*own["hermes"]) + f"\n{after}\n") == expected
    assert parse("llama3_json", tag + "; ".join(own["llama3_json"]) + after) == expected


TYPED = st.fixed_dictionaries(
    {"s": STRINGS},
    optional={
        "i": st.integers(), "x": st.floats(allow_nan=False, allow_infinity=False), "b": st.booleans(),
        "o": st.none() | st.just("y"), "a": st.lists(st.integers() | STRINGS, max_size=3),
        "d": st.dictionaries(STRINGS, VALUES, max_size=2),
    },
)  # fmt: skip


def typed(s: str, i: int, x: float, b: bool, o: str | None, a: list, d: dict) -> str:
    return ""


typed.__doc__ = "All types.\n\nArgs:\n" + "\n".join(f"    {name}: {name}" for name in "sixboad")


def qwen_text(name, arguments, dump):
    """As Qwen3-Coder's template renders a call: dicts (and by some versions lists) as JSON, all else by str()."""
    values = {key: value if isinstance(value, str) else dump(value) for key, value in arguments.items()}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@settings(max_examples=60)
@given(st.lists(TYPED, min_size=1, max_size=2), st.sampled_from([json.dumps, str]), AROUND)
def test_qwen3_coder_round_trip(calls, dump, before):
    parser = get_tool_parser("qwen3_coder", None, {"typed": FunctionTool(typed)})
    text = before + "\n".join(qwen_text("typed", call, dump) for call in calls) + "<|im_end|>"
    assert parser(text) == [ToolCall("typed", call) for call in calls]


def test_qwen3_coder_values():
    parser = get_tool_parser("qwen3_coder", None, {"typed": FunctionTool(typed)})
    value = "a </function>\n<parameter=x> </parameter> b\n\n  c"
    for name, own in (("typed", {"s": value}), ("typed", {"s": '"1"', "i": "seven"}), ("other", {"n": "1"})):
        assert parser(qwen_text(name, own, str)) == [ToolCall(name, own)]
    assert parser("<function=typed></function>") == [ToolCall("typed", {})]


@given(st.text(), st.sampled_from(["hermes", "llama3_json", "qwen3_coder"]))
@example("[" * 100000, "hermes")
def test_parsers_take_any_text(text, name):
    assert parse(name, text) == []  # random text has no call in it
    marks = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "qwen3_coder": "<function=f>"}
    for call in parse(name, marks[name] + text):
        assert (call.arguments is None) == (call.error is not None)


MALFORMED = ['{"name": "f", "arguments": {', "", "f(x)", '{"name": "f", "arguments": [1]}', '{"name": 3}', "[]",
             "[" * 100000, '{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {"a": "\\ud800"}}',
             '{"name": "f", "arguments": {"a": %s}}' % ("9" * 5000)]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:40])
def test_malformed_calls_have_an_error(text):
    good = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    first, second = parse("hermes", f"<tool_call>\n{text}\n</tool_call>\n{good}")
    assert first.error and first.arguments is None and second == ToolCall("g", {})
    (call,) = parse("llama3_json", f"<|python_tag|>{text}")
    assert call.error and call.arguments is None and len(call.error) < 300


def tool_call(name: str, **arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def in_tags(*calls: str) -> str:
    return "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def in_xml(name: str, value: str) -> str:
    return f"<tool_call>\n<function={name}>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>"


TAG, SPELT = "the </think> tag", r'{"name": "g", "arguments": {"s": "<\/think>"}}'
F = in_tags(tool_call("f", s=""))


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", "<think>" + F, {}),
        ("hermes", F + "</think>no", {}),  # the template wrote <think>
        ("hermes", f"<think>{F}</think>" + F, {"f": ""}),
        ("llama3_json", '{"answer": 3}', {}),
        ("llama3_json", 'I call {"name": "f", "parameters": {}}', {}),
        ("hermes", "Now: " + in_tags(tool_call("f", s=TAG * 3), tool_call("g", s="")), {"f": TAG * 3, "g": ""}),
        ("hermes", "so.</think>" + in_tags(tool_call("f", s=TAG)), {"f": TAG}),
        ("hermes", in_tags(tool_call("f", s=TAG)) + "so.</think>" + in_tags(tool_call("g", s="")), {"g": ""}),
        ("hermes", F + "</think>" + in_tags(SPELT), {"g": "</think>"}),
        ("hermes", F + " I use <tool_call> and </think>", {}),
        ("llama3_json", tool_call("f", s=TAG), {"f": TAG}),
        ("llama3_json", tool_call("f", s="") + "</think>" + tool_call("g", s=TAG), {"g": TAG}),
        ("qwen3_coder", in_xml("f", "") + "</think>" + in_xml("g", TAG), {"g": TAG}),
        ("vllm:hermes", in_tags(tool_call("f", s=TAG)), {"f": TAG}),
        ("vllm:hermes", F + "</think>" + in_tags(tool_call("g", s="")), {"g": ""}),
    ],
)  # fmt: skip
def test_thoughts_are_no_calls_and_their_end_is_not_one_in_an_argument(name, text, calls):
    if name.startswith("vllm"):
        pytest.importorskip("vllm")
        found = get_tool_parser(name, load_tokenizer(TOY_MODEL))(text)
    else:
        found = parse(name, text)
    assert [(call.name, call.arguments) for call in found] == [(name, {"s": s}) for name, s in calls.items()]


INNER, GOOD = in_tags(tool_call("rm", s="/")), in_tags(tool_call("good", s=""))
XML_INNER, XML_GOOD = in_xml("rm", "/"), in_xml("good", "")
INNERMOST = json.dumps(tool_call("rm", s="/"))


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("hermes", f'<tool_call>\nrun(code="{INNER}{INNER}")\n</tool_call>{GOOD}', [None, "good"]),
        ("hermes", f'<tool_call>{{"name": "f"}} + "{INNER}"</tool_call>', [None]),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"s": "{INNER}"}}}}</tool_call>', [None]),
        ("qwen3_coder", f"<function=run>{XML_INNER}</function>{XML_GOOD}", [None, "good"]),
        ("qwen3_coder", f"<function=run>\nrun({XML_INNER}", [None]),
        ("qwen3_coder", in_xml("run", f"{XML_INNER} and {XML_INNER}") + XML_GOOD, [None, "good"]),
        ("qwen3_coder", f"<function=run><parameter=s>{XML_INNER} and {XML_INNER}", [None]),
        ("qwen3_coder", "<function=f>x</function><function=g></function>", [None, "g"]),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nabc", [None]),
        ("hermes", in_tags('{"name": "f"} {"name": "g"}'), [None]),
        ("hermes", '<tool_call>{"name": "f"}<|im_end|>', ["f"]),  # its end is missing
        ("llama3_json", f"<|python_tag|>run({INNERMOST})", [None]),
        ("llama3_json", f'{{"name": "f", "parameters": {INNERMOST}; {tool_call("rm", s="/")}', [None]),
        ("llama3_json", f'{tool_call("f")}\n{{"name": "g", "x": {tool_call("rm", s="/")}', ["f", None]),
        # twice the same key: the later one would win
        ("hermes", in_tags('{"name": "f", "name": "rm", "arguments": {}}'), [None]),
        ("hermes", in_tags('{"name": "f", "arguments": {"s": [{"a": 1, "a": 1}]}}'), [None]),
        ("llama3_json", '{"name": "f", "parameters": {"s": 1, "s": 2}}', [None]),
        ("qwen3_coder", "<function=f><parameter=s>1</parameter><parameter=s>2</parameter></function>", [None]),
    ],
)
def test_a_call_within_a_broken_one_is_not_made(name, text, names):
    assert [None if call.error else call.name for call in parse(name, text)] == names


def test_llama_s_calls_may_stand_on_lines():
    calls = [tool_call("f", s="}\n{"), '{"type": "function", "name": "g", "parameters": {}}', tool_call("h")]
    for between in ("\n", "\n\n", " ", "", ";", " ;\n", ", ", "<|python_tag|>"):
        for after in ("", "<|eot_id|>", "\nDone.", '\n{"answer": 3}', "; so"):
            text = between.join(calls) + after
            assert [call.name for call in parse("llama3_json", text)] == ["f", "g", "h"], text


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "qwen3_coder"])
@pytest.mark.parametrize(
    "piece", ["</think>", "<think>", "<tool_call>", "<tool_call>x</tool_call>", INNER, tool_call("f") + "\n",
              '{"name": ', "<function=f>", "<function=f><parameter=s>", XML_INNER]
)  # fmt: skip
def test_parsers_read_a_text_a_few_times_at_most(name, piece, monkeypatch):
    """What is searched and decoded is counted in characters: a search from each call to the end would be quadratic."""
    read = 0

    def decode(decoder, text, start=0):
        nonlocal read
        value, end = plain(decoder, text, start)
        read += end - start
        return value, end

    plain = json.JSONDecoder.raw_decode
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", decode)
    text = piece * 20_000
    assert len(parse(name, text)) <= 20_000 and read <= 4 * len(text)


def test_auto_goes_by_the_template():
    hermes = 'within <tool_call></tool_call> XML tags: {"name": <function-name>}'
    assert parse("auto", '<tool_call>{"name": "f"}</tool_call>', hermes) == [ToolCall("f", {})]
    llama = 'Environment: ipython {"name": function name, "parameters": dictionary}'
    assert parse("auto", '{"name": "f", "parameters": {"a": 1}}', llama) == [ToolCall("f", {"a": 1})]
    coder = "<tool_call>\n<function=example><parameter=a>"
    assert parse("auto", "<function=f>\n</function>", coder) == [ToolCall("f", {})]
    for template in ("", "<tool_call>{name}<arg_key>{key}</arg_key>", None):
        with pytest.raises(InputError, match="the chat template shows no format"):
            parse("auto", "", template)
    with pytest.raises(InputError, match="there is no parser 'hermess'; use hermes, llama3_json"):
        parse("hermess", "")


def test_auto_goes_by_the_response_template():
    """transformers' own parser, where the tokenizer brings its format: here one that no parser of ours knows."""
    tokenizer = load_tokenizer(TOY_MODEL)
    made = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    calls = {"open_pattern": r"\[call (?P<name>\w+)\]", "close": "[/call]", "repeats": True}
    calls |= {"content": "json", "transform": made}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"content": {"close": "<|im_end|>"}, "tool_calls": calls},
    }
    parser = get_tool_parser("auto", tokenizer, {"echo": FunctionTool(echo)})
    text = 'Hm [call echo]{"text": "a", "times": "2"}[/call]<|im_end|>'
    assert parser(text) == [ToolCall("echo", {"text": "a", "times": 2})]
    assert parser("Hm<|im_end|>") == []
    (call,) = parser('[call echo]{"text": [/call]')
    assert call.error


def test_vllm_parsers():
    pytest.importorskip("vllm")
    tokenizer = load_tokenizer(TOY_MODEL)
    parser = get_tool_parser("vllm:hermes", tokenizer, {"echo": FunctionTool(echo)})
    text = '<tool_call>{"name": "echo", "arguments": {"text": "é"}}</tool_call>'
    assert parser(f"{text}\n{text}") == [ToolCall("echo", {"text": "é"})] * 2
    assert parser("Hm") == []
    with pytest.raises(InputError, match="does not fit the tokenizer"):  # it has no <|python_tag|>
        get_tool_parser("vllm:llama3_json", tokenizer)
    with pytest.raises(InputError, match=r"vLLM has no such parser; it has .*hermes"):
        get_tool_parser("vllm:nothing", tokenizer)


def test_literal_values_do_not_end_the_interpreter():
    """Values of qwen3_coder's go through ast.literal_eval, which had crashes on deep nesting."""
    parser = get_tool_parser("qwen3_coder", None, {"typed": FunctionTool(typed)})
    for value in ("-" * 100000 + "1", "(" * 100000, "1+" * 100000 + "1", "not " * 100000, "{1:" * 100000):
        (call,) = parser(qwen_text("typed", {"i": value}, str))
        assert call.arguments == {"i": value}
