"""Runs an agent: a Python function in this process, or a command in a process group of its own."""

import asyncio
import inspect
import json
import math
import numbers
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agent.http.requests import IGNORABLE
from agent.tools.base import check_metrics, in_thread, say
from lib import InputError
from lib.args import RolloutArgs
from lib.cli.user_code import load_object
from lib.reward.scorer import LARGEST_SCORE
from lib.rollout import Sampling

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
GRACE_S = 10.0  # how long the end of all processes of a command may take
LONGEST_LINE = 1 << 16  # bytes kept of a command's output, at its end
MOST_METRICS = 100  # of an agent, each a metric of the run; and the characters of a name


class AgentFailed(Exception):
    """The agent of one episode failed; kind: one of FAILURES in agent/metrics.py."""

    def __init__(self, kind: str, what: str):
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True)
class Agent:
    """What --agent names, and under what limits it runs."""

    play: Callable  # async (base_url, api_key, row) -> what the agent returns
    timeout_s: float
    parser: str  # --multi-turn.parser
    sampling: Sampling  # of training: what a request may name
    ignore: frozenset[str] = frozenset()  # parameters of requests that have no effect


def load_agent(args: RolloutArgs, parser: str) -> Agent:
    """Raises InputError if there is no such function, no such program, or no such parameter to ignore."""
    spec, given = args.agent, args.agent_limits
    limits: dict[str, Any] = {"timeout_s": given.timeout, "parser": parser}
    limits |= {"sampling": args.sampling(), "ignore": frozenset(given.ignore)}
    if unknown := limits["ignore"] - IGNORABLE:
        names = ", ".join(sorted(IGNORABLE))
        raise InputError(f"--agent-kwargs ignore={min(unknown)}: it can ignore {names}")
    file, _, name = spec.rpartition(":")
    if name.isidentifier() and file.endswith(".py") and Path(file).expanduser().is_file():
        function = load_object("--agent", spec)
        if not callable(function):
            raise InputError(f"--agent {spec}: it is not a function")
        if given.memory is not None:
            why = "it limits the processes of a command, and --agent is a function: drop it"
            raise InputError(f"--agent-kwargs memory={given.memory}: {why}")
        return Agent(partial(call_function, function), **limits)
    try:
        words = shlex.split(spec)
    except ValueError as error:
        raise InputError(f"--agent {spec}: {error}") from error
    if not words or not shutil.which(words[0]):
        advice = "give path/to/file.py:function, or a command"
        raise InputError(f"--agent {spec}: there is no such file and no such program: {advice}")
    return Agent(partial(_run_command, words, given.memory), **limits)


def reward_of(result: Any, answers: Collection[str]) -> tuple[float | None, dict[str, float], dict[str, float]]:
    """(reward, or None if a scorer should judge the answer; rewards of single answers; metrics) of what an agent
    returns. answers: their ids. Raises AgentFailed."""
    metrics = dict(result) if isinstance(result, dict) else {}
    reward = metrics.pop("reward", None) if isinstance(result, dict) else result
    rewards = {} if (given := metrics.pop("rewards", None)) is None else given
    if not isinstance(rewards, dict):
        what = "a dict with a number for each answer's id"
        raise AgentFailed("bad_reward", f"the agent returned the rewards {str(rewards)[:100]!r}; use {what}")
    if unknown := [str(name)[:100] for name in rewards if name not in answers]:
        raise AgentFailed("bad_reward", f"the agent returned a reward of {unknown[0]!r}: no answer has this id")
    for value in (*rewards.values(), *([] if reward is None else [reward])):
        number: Any = value if isinstance(value, numbers.Real) else math.nan
        if not abs(number) <= LARGEST_SCORE:
            what = f"the agent returned the reward {str(value)[:100]!r}; use numbers up to {LARGEST_SCORE:g}"
            raise AgentFailed("bad_reward", what)
    names = [str(name) for name in metrics]
    if len(names) > MOST_METRICS or not all(name.isprintable() and len(name) <= MOST_METRICS for name in names):
        what = f"the agent's metrics are not at most {MOST_METRICS}, with names of at most {MOST_METRICS} characters"
        raise AgentFailed("bad_reward", what)
    try:
        check_metrics(metrics, "the agent")
    except TypeError as error:
        raise AgentFailed("bad_reward", str(error)) from error
    return None if reward is None else float(reward), {name: float(own) for name, own in rewards.items()}, metrics


async def call_function(function: Callable, base_url: str, api_key: str, row: dict) -> Any:
    """A function that is not async runs in a thread, which is left there when its time is over. Raises AgentFailed."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(base_url, api_key, row)
        value = await in_thread(function, base_url, api_key, row)
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:  # it would end the event loop
        raise AgentFailed("exception", say(error)) from None
    except Exception as error:
        raise AgentFailed("exception", say(error)) from error


async def _run_command(words: list[str], memory_mb: int | None, base_url: str, api_key: str, row: dict) -> Any:
    """The JSON object in the last line of the command's output, or None. Raises AgentFailed."""
    address = {"OPENAI_BASE_URL": base_url, "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1")}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), api_key)
    direct = {name: f"{os.environ.get(name, '')},127.0.0.1".strip(",") for name in ("NO_PROXY", "no_proxy")}
    read, write = os.pipe()
    with open(read, "rb"), open(write, "wb") as episode:
        start = [sys.executable, "-I", "-S", SUPERVISOR, str(read), str(memory_mb or "unlimited"), *words]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        environment = os.environ | address | keys | direct
        process = await asyncio.create_subprocess_exec(
            *start, **pipes, env=environment, pass_fds=(read,), start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        told = asyncio.ensure_future(_tell(process.stdin, json.dumps(row, default=str).encode()))
        ends = [asyncio.ensure_future(_end_of(stream)) for stream in (process.stdout, process.stderr)]
        exited = asyncio.ensure_future(_exit_of(process.pid))
        try:
            await asyncio.shield(exited)
        finally:
            episode.close()  # the supervisor ends what still runs
            await asyncio.wait([exited, *ends], timeout=GRACE_S)  # a process outside may hold the output open
            if not exited.done():
                process.kill()
            for task in (told, exited, *ends):
                task.cancel()
    output, errors = (end.result() if end.done() and not end.cancelled() else "" for end in ends)
    while process.returncode is None:  # it has ended, and asyncio's thread is about to know
        await asyncio.sleep(0.001)
    if code := process.returncode:
        ended = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        raise AgentFailed("signal" if code < 0 else "exit_code", f"{words[0]} ended {ended}\n{errors[-2000:]}")
    last = output.rstrip().rpartition("\n")[2]
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(last), dict):
            return value
    return None


async def _exit_of(pid: int) -> None:
    """Waits for the end of a child, which asyncio's own wait() delays as long as another process holds its output."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with suppress(ProcessLookupError):  # it has ended, and asyncio knows
        fd = os.pidfd_open(pid)
        try:
            loop.add_reader(fd, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)


async def _tell(stdin: asyncio.StreamWriter, text: bytes) -> None:
    with suppress(ConnectionError):  # it may not read its input
        stdin.write(text)
        await stdin.drain()
    stdin.close()


async def _end_of(stream: asyncio.StreamReader) -> str:
    end = b""
    while piece := await stream.read(1 << 16):
        end = (end + piece)[-LONGEST_LINE:]
    return end.decode(errors="replace")
