"""The far side of client.py, run as a script. It runs programs behind the walls of walls.py.

    scorer -- zygote -- supervisor -- init [-- program]     one supervisor per sample; `|` below is the wall
                            |          |         |
         waits for the end, kills   runs the tests, holds what is expected | holds no test, no expected value

Each scorer's process has one zygote, a warmed-up process that forks a supervisor for every socket it is sent.
In new namespaces init is process 1, so that everything dies with it."""

import contextlib
import gc
import importlib
import os
import random
import select
import shutil
import signal
import site
import socket
import sys
import tempfile
from pathlib import Path

import walls
from values import PRELUDE, load, receive, run_tests, send, serve

LONGEST_OUTPUT = 1 << 16  # bytes that are kept of a shell command's output: its two ends


def run_program(spec: dict, folder: str, files: list[int], body) -> int:
    """Forks the program's process, which runs body() and exits. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        walls.become_program(spec, folder, files)
        random.seed(0)  # a fork seeds it from the kernel; a verdict must not depend on that
        # by lines: what a program has printed before os._exit or a crash counts, as on a terminal
        streams = (os.fdopen(fd, mode, 1, errors="replace") for fd, mode in enumerate("rww"))
        sys.stdin, sys.stdout, sys.stderr = streams
        body()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    finally:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for threads that the program has not joined
        sys.stdout.flush()
        os._exit(code & 255)


def end_program(pid: int) -> int:
    """Kills what the program left behind and returns its exit code, negative for a signal."""
    _, status = os.waitpid(pid, 0)
    if os.getpid() == 1:  # in a pid namespace; elsewhere a program has no children
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(-1, signal.SIGKILL)
            while True:
                os.wait()
    return os.waitstatus_to_exitcode(status)


def run_scripts(conn, spec: dict, folder: str, null: int) -> None:
    """Runs the program for every message, which is its standard input. Answers with exit code and output."""
    while True:
        files = [os.memfd_create("stdin"), os.memfd_create("stdout"), null]
        with open(files[0], "wb", closefd=False) as f:
            f.write(receive(conn).encode(errors="replace"))
        os.lseek(files[0], 0, os.SEEK_SET)
        pid = run_program(spec, folder, files, lambda: load(spec["program"], "__main__"))
        code = end_program(pid)
        with open(files[1], "rb") as f:
            f.seek(0)
            output = f.read(spec["output_mb"] << 20).decode(errors="replace")
            send(conn, {"exit": code, "stdout": output})
        os.close(files[0])


def run_calls(conn, spec: dict, folder: str, null: int) -> None:
    """Runs tests that call functions. Forks the program's process before it reads the tests from `conn`."""
    channel, theirs = socket.socketpair()
    body = lambda: serve(socket.socket(fileno=3), spec["program"], spec["prelude"])  # noqa: E731
    pid = run_program(spec, folder, [null, null, null, theirs.fileno()], body)
    theirs.close()
    try:
        names = [[str(name), module and str(module)] for name, module in receive(channel)]
    except (EOFError, OSError, ValueError, TypeError):
        send(conn, {"verdict": "error" if end_program(pid) > 0 else "crash"})
    else:
        walls.put_up(spec, folder)  # the tests are behind walls, too
        run_tests(conn, channel, names, spec["importable"])


def run_functions(conn, spec: dict, folder: str, null: int) -> None:
    """Answers every message with [function(message)], or [] if that fails. Each runs in a process of its own."""
    function = getattr(sys.modules[spec["module"]], spec["name"])
    while True:
        argument = receive(conn)
        channel, theirs = socket.socketpair()
        files = [null, null, null, theirs.fileno()]
        body = lambda: send(socket.socket(fileno=3), function(argument))  # noqa: B023, E731
        pid = run_program(spec, folder, files, body)
        theirs.close()
        with channel:
            try:
                answer = [receive(channel)]
            except (EOFError, OSError, ValueError):
                answer = []
        end_program(pid)
        send(conn, answer)


def run_shell(conn, spec: dict, folder: str, null: int) -> None:
    """Runs [command, seconds] in bash. Answers with [exit code, as bash says it, or 124 after its time; output]. What
    a command leaves running ends with it; its files stay."""

    def bash() -> None:
        try:
            os.execve("/bin/bash", ["bash", "-c", command], os.environ | spec["environment"])
        except (OSError, ValueError) as error:  # it is longer than the kernel takes, or has a NUL
            print(f"bash: {error}")
            raise SystemExit(126) from None

    for name in spec["links"]:
        Path(f"/tmp/{name}").mkdir()
    while True:
        command, seconds = receive(conn)
        output = os.memfd_create("output")
        pid = run_program(spec, folder, [null, output, output], bash)
        ended = os.pidfd_open(pid)
        in_time = select.select([ended], [], [], seconds)[0]
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        code = end_program(pid)
        size, half = os.fstat(output).st_size, LONGEST_OUTPUT // 2
        text = os.pread(output, size if size <= 2 * half else half, 0)
        if size > 2 * half:
            text += b"\n[... %d bytes left out ...]\n" % (size - 2 * half)
            text += os.pread(output, half, size - half)
        if not in_time:
            code = 124
        elif code < 0:
            code = 128 - code
        send(conn, [code, text.decode(errors="replace")])
        os.close(ended)
        os.close(output)


def init(conn, spec: dict, folder: str) -> None:
    os.setpgid(0, 0)
    if spec["form"] == "shell" and spec["alone"]:
        raise OSError("commands need namespaces in which the number of processes can be limited")
    walls.drop_privileges(spec["level"])
    walls.limit(AS=spec["memory_mb"] << 20)
    random.seed(0)  # for the tests, see run_program
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    send(conn, "ready")
    with contextlib.suppress(Exception):  # the scorer hung up, or the program crashed this process
        if spec["form"] == "remote":  # a server runs the program; the scorer passes calls on
            walls.put_up(spec, folder)
            run_tests(conn, conn, spec["names"], spec["importable"])
        else:
            forms = {"stdin": run_scripts, "calls": run_calls}
            forms |= {"function": run_functions, "shell": run_shell}
            forms[spec["form"]](conn, spec, folder, null)


def supervise(conn) -> None:
    """Runs one sample until init ends or the scorer hangs up. Then nothing of the sample is left."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    spec = receive(conn)
    alone = spec["level"] != "namespaces"
    folder = tempfile.mkdtemp(prefix="plainrl-") if alone else "/tmp"
    try:
        spec["alone"] = alone or not walls.enter_namespaces(spec)
        # an orphaned program becomes a child of this process
        walls.check(walls.libc.prctl(36, 1, 0, 0, 0), "subreaper")
        pid = os.fork()
        if pid == 0:
            try:
                init(conn, spec, folder)
            except OSError as error:
                send(conn, str(error))
            os._exit(0)
        end = select.poll()
        end.register(conn, select.POLLRDHUP)
        end.register(os.pidfd_open(pid), select.POLLIN)
        end.poll()
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        while True:
            os.wait()
    except ChildProcessError:
        pass
    except Exception as error:  # noqa: BLE001 it is sent to the scorer, which raises it
        send(conn, f"{type(error).__name__}: {error}")
    if alone:
        shutil.rmtree(folder, ignore_errors=True)


def zygote(module: str = "", *folders: str) -> None:
    """Imports the module and calls its warm(). Then forks a supervisor for each socket from standard input."""
    del sys.path[0]  # the folder of this file, which Python puts there
    control = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)  # a supervisor that outlives this process must not keep the socket open
    os.close(null)
    sys.set_int_max_str_digits(0)
    exec(PRELUDE, {})  # warms up the imports
    site.setquit()  # exit() and quit(), which -S leaves out
    walls.processes_can_be_limited()
    for level in ("namespaces", "alone"):
        with contextlib.suppress(OSError):  # the sandbox reports the error later
            walls.seccomp_filter(level)
    if module:
        sys.path += folders
        importlib.import_module(module).warm()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        if os.fork() == 0:
            control.close()
            supervise(socket.socket(fileno=fds[0]))
            os._exit(0)
        os.close(fds[0])


if __name__ == "__main__":
    zygote(*sys.argv[1:])
