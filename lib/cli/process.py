"""What a run's process does about the terminal that it was started in: the terminal may close, its reader may end, and
Ctrl-C may come while packages are imported. It imports no torch."""

import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lib import InputError, is_first_on_node, report_mistake

SANDBOX_LEVEL = "PLAINRL_SANDBOX_LEVEL"  # an environment variable, so that workers have it, too


def accept_sandbox(weakest: str) -> None:
    """Accepts sandboxes of this level or stronger, for this process and those that it starts (--sandbox-level)."""
    os.environ[SANDBOX_LEVEL] = weakest


class _LastingOutput(io.FileIO):
    """A stdout or stderr that drops what cannot be written (closed terminal, `| head`, full disk). The run goes on: its
    record is in files."""

    _said = False

    def write(self, data) -> int:
        try:
            while (written := super().write(data)) is None:  # another process has made the file non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            if not self._said and self.fileno() == 1:
                self._said = True
                with suppress(OSError):  # not through sys.stderr, which a progress bar redirects to this stdout
                    os.write(2, f"stdout cannot be written ({error.strerror}): it is dropped\n".encode())
            return len(data)


def guard_output() -> None:
    """From now on a failure of stdout or stderr ends nothing. Streams that were replaced (notebooks) are left alone."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        with suppress(OSError):
            stream.flush()
        buffer = io.BufferedWriter(_LastingOutput(descriptor, "w", closefd=False))
        by_line = stream.line_buffering or stream.write_through
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=by_line))


def end_at_ctrl_c() -> None:
    """From now on Ctrl-C ends the process in one line, until `lib.distributed.run` does more. For the imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if a shell started us with it ignored
        signal.signal(signal.SIGINT, end_interrupted)


def end_interrupted(*_) -> None:
    if is_first_on_node():
        with suppress(OSError):  # not through sys.stderr, which is held back while flags are read
            os.write(2, b"interrupted\n")
    os._exit(130)


@contextmanager
def command_line() -> Iterator[None]:
    """The block of a command in tools/: an InputError ends the process with its line, and Ctrl-C as it ends a run."""
    guard_output()
    try:
        yield
    except InputError as error:
        report_mistake(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        end_interrupted()
