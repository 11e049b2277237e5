"""What a program and its tests exchange, and both sides. Standard library only: SandboxFusion gets
this file's text in front of a program (rewards/code.py).

A test sees a Remote, which exchanges plain values (JSON) with the program's process. So the program's
__eq__, patched builtins, frames and exit codes cannot change a verdict."""

import ast
import builtins
import contextlib
import importlib
import json
import math
import operator
import os
import re
import struct
import sys
import time
import types
from typing import Any

MAX_FRAME = 1 << 26  # bytes of one message
NUMERIC = re.compile(r"[<>|=][biufc]\d{1,2}")  # numpy's dtypes of arrays that are sent as arrays
# what LeetCode imports for every program
PRELUDE = "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys\n"
for _name in ("bisect", "collections", "functools", "heapq", "itertools", "math", "typing"):
    PRELUDE += f"from {_name} import *\n"


# ---- messages: the length in four bytes, then JSON ----
def send(sock, message) -> None:
    data = json.dumps(message).encode()
    sock.sendall(struct.pack("!I", len(data)) + data)


def receive(sock, deadline: float | None = None):
    """The next message. Raises TimeoutError after `deadline` (monotonic), EOFError at the end."""

    def exactly(size):
        data = bytearray()
        while len(data) < size:
            sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
            part = sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    (size,) = struct.unpack("!I", exactly(4))
    if size > MAX_FRAME:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(exactly(size))


def pack(value, ref):
    """JSON for a value of the builtin types, nested to any depth. `ref(value)` numbers an object of any other type."""
    if value is None or isinstance(value, bool):
        return value
    for plain, exact in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(value, plain):
            return exact(value)  # type: ignore[arg-type]  # value is of this kind
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, list):
        return [pack(item, ref) for item in value]
    if isinstance(value, dict):
        return {"dict": [[pack(key, ref), pack(item, ref)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [pack(item, ref) for item in value]}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # a numpy value
        if getattr(value, "ndim", 0) and NUMERIC.fullmatch(value.dtype.str):
            items = [pack(item, ref) for item in value.ravel().tolist()]
            return {"array": [value.dtype.str, list(value.shape), items]}
        return pack(value.tolist(), ref)
    if hasattr(value, "__index__"):
        return operator.index(value)
    return {"object": ref(value)}


def has_nan(packed) -> bool:
    if isinstance(packed, list):
        return any(map(has_nan, packed))
    if isinstance(packed, dict):
        return any(map(has_nan, packed.values()))
    return isinstance(packed, float) and packed != packed


def unpack(value, deref):
    if isinstance(value, list):
        return [unpack(item, deref) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, item),) = value.items()
    if kind == "object":
        return deref(item)
    if kind == "complex":
        return complex(*item)
    if kind == "bytes":
        return item.encode("latin-1")
    if kind == "array":
        dtype, shape, items = item
        if not NUMERIC.fullmatch(dtype):
            raise ValueError(f"an array of {dtype[:20]!r}")
        numpy = importlib.import_module("numpy")
        return numpy.array([unpack(part, deref) for part in items], dtype).reshape(shape)
    if kind == "dict":
        return {unpack(key, deref): unpack(entry, deref) for key, entry in item}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpack(entry, deref) for entry in item)


# ---- the program's side ----
def load(program: str, name: str, prelude: str = "") -> None:
    module = sys.modules[name] = types.ModuleType(name)
    exec(prelude, module.__dict__)
    exec(compile(program, f"<{name}>", "exec"), module.__dict__)


class Program:
    """Answers what a Remote asks. Of an object that is no plain value it sends a number."""

    def __init__(self, program: str, prelude: str):
        self.objects: list = []
        self.numbers: dict[int, int] = {}  # by id()
        with contextlib.suppress(SystemExit):  # a script's end; what it has defined can be called
            load(program, "solution", prelude)
        self.namespace = vars(sys.modules["solution"])

    def names(self) -> list[list]:
        """[name, its own name if it is a module], of all that the program defines or imports."""
        found: list[list] = []
        for name, value in self.namespace.items():
            if not name.startswith("__"):
                found.append([name, value.__name__ if isinstance(value, types.ModuleType) else None])
        return found

    def ref(self, value) -> int:
        """The object's number; the same object always gets the same number."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def find(self, ref):
        if isinstance(ref, int):
            return self.objects[ref]
        if ref not in self.namespace and "Solution" in self.namespace:  # LeetCode's form
            return getattr(self.namespace["Solution"](), ref)
        return self.namespace[ref]

    def answer(self, request: list) -> dict:
        operation, ref, args = request
        try:
            target = self.find(ref)
            if operation == "call":
                args, kwargs = (unpack(part, self.find) for part in args)
                value = target(*args, **kwargs)
            elif operation == "list":
                value = list(target)
            elif operation == "get":
                value = getattr(target, args)
            else:
                value = None
                setattr(target, args[0], unpack(args[1], self.find))
            return {"value": pack(value, self.ref)}
        except BaseException as error:  # noqa: BLE001 the program may raise anything
            return {"error": [type(error).__name__, str(error)[:500]]}


def serve(channel, program: str, prelude: str) -> None:
    solution = Program(program, prelude)
    send(channel, solution.names())
    while True:
        send(channel, solution.answer(receive(channel)))


def answer_once(program: str, prelude: str) -> None:
    """Answers one request of SandboxFusion: from stdin, in the last line of stdout."""
    out = os.fdopen(os.dup(1), "w")
    request = json.loads(sys.stdin.readline())
    out.write("\n" + json.dumps(Program(program, prelude).answer(request)) + "\n")
    out.close()
    os._exit(0)


# ---- the tests' side ----
class Died(BaseException):
    """The program's process is gone or sends nonsense. A BaseException: a test's own `except` must not swallow it."""


class Wrong(BaseException):
    """The program's answer can pass no test, whatever this test would make of it."""


class Remote:
    """A name or an object of the program. Equals itself, not None; other comparisons raise Wrong."""

    def __init__(self, ask, ref):
        vars(self).update(_ask=ask, _ref=ref)

    def __call__(self, *args, **kwargs):
        return self._ask("call", self._ref, [pack(list(args), _remote_ref), pack(kwargs, _remote_ref)])

    def __getattr__(self, name):
        return self._ask("get", self._ref, name)

    def __setattr__(self, name, value):
        self._ask("set", self._ref, [name, pack(value, _remote_ref)])

    def __iter__(self):
        return iter(self._ask("list", self._ref, None))

    def __eq__(self, other):
        if other is None or (isinstance(other, Remote) and other._ref == self._ref):
            return other is not None
        raise Wrong

    def __hash__(self):
        return hash(self._ref)


def _remote_ref(value):
    if isinstance(value, Remote):
        return vars(value)["_ref"]
    what = f"a test gives the program a {type(value).__name__}"
    raise TypeError(f"{what}: only plain values reach another process")


def asker(channel, nan_is_wrong: bool):
    def ask(operation, ref, args):
        try:
            send(channel, [operation, ref, args])
            reply = receive(channel)
            if "error" not in reply:
                if nan_is_wrong and has_nan(reply["value"]):
                    raise Wrong
                return unpack(reply["value"], lambda number: Remote(ask, int(number)))
            name, text = map(str, reply["error"])
        except Exception as error:  # noqa: BLE001 the program may send anything
            raise Died(str(error)) from None
        cls: Any = getattr(builtins, name, None)  # for tests with `except ValueError`
        is_error = isinstance(cls, type) and issubclass(cls, Exception)
        # these would end a test's all(map(...)) as if all had passed
        if not is_error or issubclass(cls, StopIteration | StopAsyncIteration):
            cls = RuntimeError
        raise cls(text)

    return ask


def same(got, expected) -> bool:
    """Equality as JSON: tuples and arrays are lists, keys text, floats equal to 1e-6, True not 1."""
    got = got.tolist() if hasattr(got, "tolist") else got
    if isinstance(got, list | tuple) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        got = {str(key): value for key, value in got.items()}
        equal_keys = got.keys() == expected.keys()
        return equal_keys and all(same(got[key], expected[key]) for key in expected)
    if {type(got), type(expected)} == {int, float} or type(got) is type(expected) is float:
        return got == expected or math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-6)
    return type(got) is type(expected) and got == expected


def right(got, expected) -> bool:
    """Whether a call returned what the row expects. APPS writes some answers as [answer]."""
    wrapped = isinstance(expected, list) and len(expected) == 1
    return same(got, expected) or (wrapped and same(got, expected[0]))


def tools(names: list[list], texts: list[str], packages: list[str]) -> dict:
    """Modules that tests use but only the program imports: this process's own."""
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    known = {*sys.stdlib_module_names, *packages}
    found = {}
    for name, module in names:
        trusted = module == name if name in sys.stdlib_module_names else module
        if name in used and trusted and module.partition(".")[0] in known:
            with contextlib.suppress(Exception):
                found[name] = importlib.import_module(module)
    return found


def run_tests(conn, channel, names: list[list], packages: list[str]) -> None:
    """Runs the next message's tests on the program behind `channel`. Sends the verdict of the setup, then of
    each case."""
    tests = receive(conn)
    texts = [tests["setup"], *tests["cases"]]
    # a NaN passes `not (error > 1e-6)` and `!=`
    ask = asker(channel, nan_is_wrong="nan" not in "".join(texts).lower())
    trusted = vars(builtins).keys() | sys.stdlib_module_names  # a program may not redefine them for the tests
    namespace: dict = {name: Remote(ask, name) for name, _ in names if name not in trusted}
    namespace["__name__"] = "tests"
    namespace |= tools(names, texts, packages)
    entries = {name: Remote(ask, name) for name in tests["entries"]}
    for case in texts:
        try:
            exec(compile(case, "<test>", "exec"), namespace)
            namespace |= entries | {"_right": right, "_loads": json.loads}
            verdict = "passed"
        except (AssertionError, Wrong):
            verdict = "wrong"
        except Died:
            verdict = "crash"
        except Exception:  # noqa: BLE001 from the program, or from a test of what it returned
            verdict = "error"
        send(conn, {"verdict": verdict})
        if verdict == "crash":
            return
