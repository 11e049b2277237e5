"""Sandboxes for what a model wrote: processes that reach no network, no files, no other processes.
zygote.py, started once by each process here, forks them. The kernel provides their walls:
sandbox_level() says which, docs/security.md what each level lets through. The memory limit is per
process, so a sandbox takes at most memory_mb * processes."""

import importlib
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from lib import InputError, is_first_on_node
from lib.cli.process import SANDBOX_LEVEL as ACCEPTED
from lib.cli.process import accept_sandbox as accept  # noqa: F401
from lib.sandbox.values import receive, send

GRACE = 10  # seconds that a sandbox may take to start, and to end
ROOT = Path(__file__).parents[2]  # the folder of lib/ and rewards/
ZYGOTE = Path(__file__).with_name("zygote.py")  # runs with Python's standard library alone
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
ENVIRONMENT |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
HOLDS = {  # the strongest level first
    "namespaces": "no network, no processes but its own, no files but Python's libraries",
    "landlock": "no network, no signals to others, no files but Python's libraries, but names and sizes of all",
    "rlimits": "no network, no signals to others; but it reads and writes what you can, others' memory with it",
    "none": "programs are not run; mathematics is read in the scorer's own process",
}
_zygotes: dict[str, socket.socket] = {}  # by imported module; shared with forks of this process
_idle: dict[str, list[socket.socket]] = defaultdict(list)  # sandboxes for evaluate(), by function
_lock = threading.Lock()
announces = True  # whether sandbox_level() prints what it found


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held the old one
    _idle.clear()  # these sandboxes are the parent's


os.register_at_fork(after_in_child=_after_fork)


def _real(paths) -> list[str]:
    """Those that exist, without links."""
    return sorted({os.path.realpath(path) for path in paths if Path(path).exists()})


def outermost(paths) -> list[str]:
    real = _real(paths)
    return [path for path in real if not any(path.startswith(other + "/") for other in real)]


@lru_cache
def _folders() -> dict[str, list[str]]:
    """The libraries that a program can read, and hidden folders in them, which may hold the tests."""
    stdlib = sysconfig.get_path("stdlib")
    shared = [f"{sys.base_prefix}/lib", stdlib, "/usr/lib", "/lib", "/lib64", "/usr/lib64"]
    hidden = [f"{stdlib}/site-packages", f"{stdlib}/dist-packages", "/usr/lib/python3/dist-packages"]
    return {"readable": outermost(shared), "hidden": _real(hidden)}


def make_spec(packages: tuple = ("numpy",), **options) -> dict:
    """The first message to a sandbox. options: level, form, program, and other values."""
    site = sysconfig.get_path("purelib")
    folders = [f"{site}/{name}{libs}" for name in packages for libs in ("", ".libs")]
    spec: dict = {"packages": [path for path in folders if Path(path).is_dir()], "sys_path": [site], **_folders()}
    spec |= {"timeout": 10.0, "total_timeout": 60.0, "memory_mb": 1024, "processes": 16}
    spec |= {"folder_mb": 64, "output_mb": 8, "open_files": 64, "links": ()}
    return {**spec, "importable": list(packages), "prelude": "", **options}


def _start_zygote(module: str) -> socket.socket:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-S", "-s", "-B", str(ZYGOTE)]
    if module:
        command += [module, str(ROOT), sysconfig.get_path("purelib")]
    with theirs:
        options: Any = {"stdin": theirs.fileno(), "stdout": subprocess.DEVNULL, "env": ENVIRONMENT}
        subprocess.Popen(command, cwd="/", process_group=0, **options)
    return ours


def _ask_zygote(spec: dict, module: str) -> socket.socket:
    ours, theirs = socket.socketpair()
    try:
        with theirs, _lock:
            running = _zygotes.get(module) or _zygotes.setdefault(module, _start_zygote(module))
            socket.send_fds(running, [b"+"], [theirs.fileno()])
        send(ours, spec)
        answer = receive(ours, time.monotonic() + GRACE)
        if answer != "ready":
            raise RuntimeError(f"the sandbox does not start: {answer}")
    except BaseException:
        ours.close()
        raise
    return ours


def connect(spec: dict, module: str = "") -> socket.socket:
    """A sandbox that is ready for its first message. Starts the zygote if none is running. Raises
    RuntimeError if the sandbox does not start, InputError if the level is "none"."""
    if spec["level"] == "none":
        raise InputError("--sandbox-level none: what a model wrote is not run without a sandbox")
    try:
        with suppress(EOFError, ConnectionError):  # the zygote is gone
            return _ask_zygote(spec, module)
        _zygotes.pop(module, None)
        return _ask_zygote(spec, module)
    except (EOFError, OSError) as error:
        raise RuntimeError(f"the sandbox does not start: {type(error).__name__}") from None


def hang_up(conn: socket.socket) -> None:
    """Ends the sandbox, and waits for its last process, which closes the other end of `conn`."""
    with conn:
        conn.shutdown(socket.SHUT_WR)
        conn.settimeout(GRACE)
        try:
            with suppress(ConnectionError):
                while conn.recv(1 << 20):
                    pass
        except TimeoutError:
            raise RuntimeError(f"a sandbox has not ended in {GRACE} s") from None


@lru_cache
def sandbox_level() -> str:
    """The strongest level of HOLDS that works here; prints it once. Raises InputError if it is weaker than accepted."""
    errors = {}
    for level in HOLDS:
        if level == "none":
            break
        try:
            conn = connect(make_spec(level=level, form="stdin", program="print(input())"))
            try:
                send(conn, "works")
                if receive(conn, time.monotonic() + GRACE) == {"exit": 0, "stdout": "works\n"}:
                    break
            finally:
                hang_up(conn)
            errors[level] = "a program that prints fails"
        except (RuntimeError, EOFError, OSError) as error:
            errors[level] = str(error)
    failed = "; ".join(f"{name}: {error}" for name, error in errors.items())
    levels = list(HOLDS)
    if levels.index(level) > levels.index(os.environ.get(ACCEPTED, "namespaces")):
        what = f"what the model writes would be run in a sandbox of level {level} ({HOLDS[level]})"
        options = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        how = f"--sandbox-level {level} accepts that. In Docker, {options} allows namespaces"
        raise InputError(f"{what}, as others fail here ({failed}): {how}")
    if announces and is_first_on_node():
        print(f"sandbox: {level}: {HOLDS[level]}{failed and f' ({failed})'}", flush=True)
    return level


def evaluate(function: str, argument, seconds: float, packages: tuple = ()):
    """function(argument), computed in a sandbox; both are JSON. None if it raises, dies or takes longer
    than `seconds`. function: "module:name" of this project, whose warm() the zygote calls once. Each
    call runs in a new fork, which knows nothing else of this process."""
    module, _, name = function.partition(":")
    if sandbox_level() == "none":
        return getattr(importlib.import_module(module), name)(argument)
    idle = _idle[function]
    try:
        conn = idle.pop()
    except IndexError:
        own = {"form": "function", "module": module, "name": name, "total_timeout": seconds}
        conn = connect(make_spec(packages, level=sandbox_level(), **own), module)
    try:
        send(conn, argument)
        [value] = receive(conn, time.monotonic() + seconds) or [None]
    except TimeoutError:
        hang_up(conn)
        return None
    except (EOFError, OSError, ValueError) as error:
        hang_up(conn)
        raise RuntimeError(f"the sandbox of {function} is gone: {error!r}") from None
    idle.append(conn)
    return value
