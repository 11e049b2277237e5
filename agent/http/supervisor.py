"""Runs a command of --agent, and ends all its processes with it. Started by program.py as a script:
python -I -S supervisor.py FD MIB WORDS...

FD is a pipe, whose other end the run holds as long as the episode lasts: it breaks in whatever way the run ends. MIB is
the address space of each process, or unlimited. A process that leaves the command's group and outlives its parent, as
daemons do, becomes a child of this process, and is found there."""

import ctypes
import os
import resource
import select
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CANNOT_START = 127  # the exit code of a shell whose command is not found
libc = ctypes.CDLL(None)


def execute(memory_mb: str, words: list[str]) -> None:
    """Becomes the command."""
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and the command would, too
    try:
        if memory_mb != "unlimited":
            resource.setrlimit(resource.RLIMIT_AS, (int(memory_mb) << 20,) * 2)
        os.execvp(words[0], words)
    except (OSError, ValueError) as error:
        os.write(2, f"{words[0]}: {error}\n".encode())
    os._exit(CANNOT_START)


def reap_orphans(command: int) -> None:
    """Or the ids of processes would run out."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != command:
            os.waitpid(ended.si_pid, 0)


def end_all(command: int) -> None:
    """Ends the command's group, then what has left it."""
    with suppress(ProcessLookupError):
        os.killpg(command, signal.SIGKILL)
    # until there is no child; a kernel may not list them, and a process of another user cannot be killed
    with suppress(ChildProcessError, FileNotFoundError, PermissionError):
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for pid in children.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.wait()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main(fd: int, memory_mb: str, *words: str) -> None:
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(fd, False)
    if (command := os.fork()) == 0:
        execute(memory_mb, [*words])
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the command's, which end with it
        os.dup2(null, stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run decides when this process ends
    end = select.poll()
    end.register(fd, 0)
    end.register(os.pidfd_open(command), select.POLLIN)
    signal.signal(signal.SIGCHLD, lambda *_: reap_orphans(command))
    end.poll()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ended = os.waitid(os.P_PID, command, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    end_all(command)
    if ended is None:  # the run is over, or the episode's time
        return
    if ended.si_code == os.CLD_EXITED:
        sys.exit(ended.si_status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # of SIGKILL, which has no handler
        signal.signal(ended.si_status, signal.SIG_DFL)
    os.kill(os.getpid(), ended.si_status)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
