r"""Scorer for programs: runs the response's Python against tests, in a sandbox (lib/sandbox/).

The ground truth is a dict, a list or its JSON text, in one of these forms:
    {"prompt", "test", "entry_point"}                        HumanEval: test defines check(candidate)
    ["assert f(1) == 2", ...], or {"test_list": [...]}       MBPP; test_setup_code, test_imports; verl's assert_case
    {"fn_name", "inputs": [[1, 2]], "outputs": [3]}          calls of a function, or of class Solution's method; inputs
                                                             may be text with one JSON value per line, as in verl's
                                                             prime_code
    {"inputs": ["1 2\n"], "outputs": ["3\n"]}                standard input and output (APPS, TACO)

The program never meets the tests. Calls go to its process as plain values, and results come back as plain values. The
tests, the expected values and the comparison are in another process. So whatever a program prints, patches or exits
with cannot make a test pass, and it sees nothing of a test except the arguments. numpy's numbers come back as plain
numbers, its arrays as arrays.

This has a price. A test cannot see an argument that was changed in place, and cannot give the program a function. An
object that is no plain value stays in the program's process. A test can use its attributes and methods, but comparing
it with a value is a wrong answer, also by !=. A NaN is a wrong answer, too, unless the tests mention NaN.

Two tricks remain possible: a program may look the arguments up in a table of known inputs, and in MBPP's form a test
may call the program's own helpers.

lib/sandbox/walls.py says what the sandbox is made of, and docs/security.md what each level lets through.
"""

import ast
import builtins
import json
import math
import re
import socket
import time
import urllib.request
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from lib import InputError
from lib.sandbox import GRACE, connect, hang_up, make_spec, receive, sandbox_level, send, values
from rewards.answers import without_thoughts

FENCE = re.compile(r"(.*?)(?<![`~])(`{3,}|~{3,})(?![`~])([^`~]*)")  # of a Markdown block: what is before, marks, label
ITEM = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?")  # before a fence: indentation, the mark of a list's item
CASES_SHARE = 0.8  # share of the time limit for the cases; sandboxes start and end in the rest


class Tests(NamedTuple):
    form: str  # "stdin": cases are (input, output); "calls": cases are statements that raise if the program fails
    cases: list
    head: str = ""  # text put before the program
    prelude: str = ""  # imports that run first in the program's module
    setup: str = ""  # the tests' own definitions
    entries: tuple = ()  # names that mean the program's function, even if a builtin has the same name


def extract_program(response: str) -> str:
    """The last ```python block, closed or not; else the last block without a label; else the whole text."""
    blocks = _blocks(response)
    named = [program for label, program in blocks if label in ("python", "python3", "py", "py3")]
    return (named or [program for label, program in blocks if not label] or [response])[-1]


def _blocks(response: str) -> list[tuple[str, str]]:
    """(label, content) of the blocks between lines of at least three ` or ~, as in Markdown.

    A fence in a list is indented, and with it its block. A fence that is indented by 4 more columns than the block's
    first is content, such as an example in a docstring.
    """
    blocks: list[tuple[str, int, list[str]]] = []  # label, indentation, lines
    fence = ""  # of the open block
    for line in response.replace("\r\n", "\n").split("\n"):
        before, mark, info = found.groups() if (found := FENCE.fullmatch(line)) else (line, "", "")
        is_alone, info = not before.strip(), info.strip().lower()
        if fence and mark.startswith(fence) and (_width(before) < blocks[-1][1] + 4 if is_alone else not info):
            blocks[-1][2].append(before if not is_alone else "")
            fence = ""
            if not info:
                continue
        if fence:
            blocks[-1][2].append(line)
        elif mark and (mark[0] == "`" or ITEM.fullmatch(before)):
            fence = mark
            blocks.append((re.match(r"[{.]*(\w*)", info)[1], _width(ITEM.match(before)[0]), []))
    return [(label, _dedent(lines, indent)) for label, indent, lines in blocks]


def _width(margin: str) -> int:
    return len(margin.expandtabs(4))


def _dedent(lines: list[str], columns: int) -> str:
    """The lines without the indentation that the fence and the first line have, or without what they have of it."""
    margins = [re.match(r"[ \t]*", line)[0] for line in lines]
    columns = min([columns, *[_width(margin) for margin, line in zip(margins, lines) if line.strip()][:1]])
    return "\n".join(line[_taken(margin, columns) :] for line, margin in zip(lines, margins))


def _taken(margin: str, columns: int) -> int:
    """The number of characters that make up the margin's first columns."""
    widths = accumulate(margin, lambda width, char: width + (4 - width % 4 if char == "\t" else 1), initial=0)
    return next((i for i, width in enumerate(widths) if width >= columns), len(margin))


def parse_tests(ground_truth) -> Tests:
    """Raises InputError on a form that the docstring of this file does not list."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        truth = {"test_list": truth} if isinstance(truth, list) else truth
        if "entry_point" in truth:
            prompt, entry = truth.get("prompt", ""), truth["entry_point"]
            tests = Tests("calls", [f"check({entry})"], prompt + "\n", "", f"{prompt}\n{truth['test']}\n", (entry,))
        elif "test_list" in truth or "assert_case" in truth:
            cases = truth.get("test_list") or truth["assert_case"]
            setup = "\n".join([*truth.get("test_imports", ()), truth.get("test_setup_code", "")])
            nodes = [node for case in cases for node in ast.walk(ast.parse(case))]
            called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
            entries = called if called <= vars(builtins).keys() else ()  # MBPP asks for functions such as sum
            tests = Tests("calls", cases, setup=setup, entries=tuple(entries))
        elif truth.get("fn_name"):
            name = truth["fn_name"]
            cases = [_call(name, *case) for case in zip(truth["inputs"], truth["outputs"], strict=True)]
            tests = Tests("calls", cases, prelude=values.PRELUDE, entries=(name,))
        else:
            cases = [tuple(map(_text, case)) for case in zip(truth["inputs"], truth["outputs"], strict=True)]
            tests = Tests("stdin", cases)
        ast.parse(tests.setup)
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        raise InputError(
            f"rewards/code.py: ground truth not understood ({type(error).__name__}: {error}); the forms are in the "
            f"head of that file: {str(ground_truth)[:200]!r}"
        ) from None
    if not tests.cases:
        raise InputError(f"rewards/code.py: a ground truth without a test: {str(ground_truth)[:200]!r}")
    return tests


def _text(value) -> str:
    return "\n".join(value) if isinstance(value, list) else str(value)


def _call(name: str, inputs, expected) -> str:
    if isinstance(inputs, str):
        inputs, expected = [json.loads(line) for line in inputs.splitlines()], json.loads(expected)
    return f"assert _right({name}(*_loads({json.dumps(inputs)!r})), _loads({json.dumps(expected)!r}))"


def same_output(got: str, expected: str) -> bool:
    """Compares line by line, and in a line word by word. Words written as floats are equal to 1e-6."""

    def same_word(word, truth):
        try:
            close = "." in truth and math.isclose(float(word), float(truth), rel_tol=1e-6, abs_tol=1e-6)
        except ValueError:
            close = False
        return close or word == truth

    def same_line(line, truth):
        words, truths = line.split(), truth.split()
        return words == truths or (len(words) == len(truths) and all(map(same_word, words, truths)))

    lines, truths = ([line.strip() for line in text.strip().splitlines()] for text in (got, expected))
    return len(lines) == len(truths) and all(map(same_line, lines, truths))


# ---- a program and its tests in the sandbox ----


def _attempt(spec: dict, tests: Tests, final: set, end: float, pass_call=None) -> list[str]:
    """The verdicts that one sandbox gives: for all cases, or up to the first verdict in `final`."""
    verdicts: list[str] = []
    conn = connect(spec)
    try:
        if tests.form == "calls":
            send(conn, {"setup": tests.setup, "entries": tests.entries, "cases": tests.cases})
            setup = _verdict(conn, min(time.monotonic() + spec["timeout"], end), pass_call)
            if setup != "passed":
                return [setup] * len(tests.cases)
        for case in tests.cases:
            deadline = min(time.monotonic() + spec["timeout"], end)
            if tests.form == "stdin":
                send(conn, case[0])
                reply = receive(conn, deadline)
                right = "passed" if same_output(reply["stdout"], case[1]) else "wrong"
                verdicts.append(right if reply["exit"] == 0 else "error" if reply["exit"] > 0 else "crash")
            else:
                verdicts.append(_verdict(conn, deadline, pass_call))
            if verdicts[-1] in final:
                break
    except TimeoutError:
        verdicts.append("timeout")
    except (EOFError, ConnectionError):
        verdicts.append("crash")
    finally:
        hang_up(conn)
    return verdicts


def _verdict(conn: socket.socket, deadline: float, pass_call) -> str:
    while isinstance(message := receive(conn, deadline), list):  # a call for the program, which runs on the server
        send(conn, pass_call(message))
    return message["verdict"]


# ---- SandboxFusion ----


def _post(url: str, code: str, stdin: str, timeout: float, end: float) -> tuple[str, str]:
    """Runs a script on a SandboxFusion server (github.com/bytedance/SandboxFusion). Returns (verdict, output).

    Raises RuntimeError if the server does not answer, or reports a fault of its own: then the program is not to blame.
    """
    timeout = min(timeout, end - time.monotonic())
    if timeout <= 0:
        return "timeout", ""
    body = {"code": code, "language": "python", "stdin": stdin, "compile_timeout": timeout, "run_timeout": timeout}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for attempt in range(3):
        try:
            with urllib.request.urlopen(request, timeout=2 * timeout + GRACE) as response:
                answer = json.load(response)
            if answer["status"] != "SandboxError":
                run = answer["run_result"]
                break
            fault = answer["message"]
        except (OSError, KeyError, ValueError) as error:
            fault = error
        time.sleep(attempt)
    else:
        raise RuntimeError(f"rewards/code.py: {url} failed three times: {fault}")
    if run["status"] == "TimeLimitExceeded":
        return "timeout", ""
    return "passed" if run["return_code"] == 0 else "error", run["stdout"] or ""


def _attempt_remote(url: str, spec: dict, tests: Tests, final: set, end: float) -> list[str]:
    """Like _attempt. Tests that call functions run in a sandbox here, and each of their calls is one request."""
    program, timeout = spec["program"], spec["timeout"]
    if tests.form == "stdin":
        text, expected = tests.cases[0]
        verdict, out = _post(url, program, text, timeout, end)
        return ["wrong" if verdict == "passed" and not same_output(out, expected) else verdict]

    def pass_call(request: list) -> dict:
        code = Path(values.__file__).read_text() + f"\nanswer_once({program!r}, {spec['prelude']!r})\n"
        verdict, out = _post(url, code, json.dumps(request) + "\n", timeout, end)
        try:
            return json.loads(out.splitlines()[-1]) if verdict == "passed" else {"error": [verdict, ""]}
        except (ValueError, IndexError):
            return {"error": ["RuntimeError", "no answer"]}

    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ["error"] * len(tests.cases)
    names = [[node.name, None] for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    imports = [module for node in tree.body if isinstance(node, ast.Import) for module in node.names]
    names += [[module.asname or module.name, module.name] for module in imports]
    patient = {**spec, "form": "remote", "names": names, "timeout": 10 * timeout}  # a case makes several requests
    return _attempt(patient, tests, final, end, pass_call)


# ---- the scorer ----


def compute_score(
    data_source,
    solution_str,
    ground_truth,
    extra_info=None,
    *,
    partial: bool = False,
    timeout: float = 6.0,
    memory_mb: int = 1024,
    packages: tuple = ("numpy",),
    sandbox_url: str = "",
    time_limit_s: float = 60.0,
    **kwargs,
) -> dict:
    """Runs the program of `solution_str` against `ground_truth`.

    Args:
        partial: The score is the share of passed cases. Without it, the score is 1.0 if all passed and else 0.0, and
            cases after the first failure are not run.
        timeout: Seconds for one case (HumanEval: for the problem's one check).
        packages: Installed packages, besides the standard library, that a program can import.
        sandbox_url: The /run_code of a SandboxFusion server, which then runs the program instead of this machine.
        time_limit_s: Seconds after which the caller ends this call. The reward pool sets it (--reward-timeout). All
            cases together have 0.8 of it, and so has each process as processor time; cases that are left count as
            "timeout".

    Returns:
        {"score", "pred": the program or None, "passed", "total", and the number of cases that ended as "wrong" (output,
        or a failed assert), "error" (an exception or exit code), "crash" (a signal, or the process is gone), "timeout"}

    Raises:
        InputError: the ground truth cannot be read, or no sandbox works here.
        RuntimeError: the sandbox failed.
    """
    total_timeout = CASES_SHARE * time_limit_s
    end = time.monotonic() + total_timeout
    tests = parse_tests(ground_truth)
    program = extract_program(without_thoughts(solution_str))
    if not tests.head:  # which an indented program would go on
        program = _dedent(program.split("\n"), len(program))
    spec = make_spec(
        level="" if sandbox_url and tests.form == "stdin" else sandbox_level(),
        form=tests.form,
        program=tests.head + program,
        prelude=tests.prelude,
        timeout=timeout,
        total_timeout=total_timeout,
        memory_mb=memory_mb,
        packages=packages,
    )
    final = {"crash", "timeout"} | (set() if partial else {"wrong", "error"})
    verdicts: list[str] = []
    while len(verdicts) < len(tests.cases) and (partial or not final & set(verdicts)):
        rest = tests._replace(cases=tests.cases[len(verdicts) :])
        if time.monotonic() > end:
            verdicts += ["timeout"] * len(rest.cases)
        elif sandbox_url:
            verdicts += _attempt_remote(sandbox_url, spec, rest, final, end)
        else:
            verdicts += _attempt(spec, rest, final, end)
    counts = Counter(verdicts)
    share = counts["passed"] / len(tests.cases)
    return {
        "score": share if partial else float(share == 1.0),
        "pred": program or None,
        "passed": counts["passed"],
        "total": len(tests.cases),
        **{reason: counts[reason] for reason in ("wrong", "error", "crash", "timeout")},
    }
