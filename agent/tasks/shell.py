"""A sandbox for shell commands, of namespaces (lib/sandbox)."""

import socket
import sys
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from lib import InputError
from lib.sandbox import GRACE, connect, hang_up, make_spec, outermost, receive, sandbox_level, send

READS = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives")


class Shell:
    """A sandbox for shell commands. It sees the programs in /usr and this Python, read only, and the writable
    `folders` (names in /, on one file system of folder_mb), which are empty at first and end with it."""

    def __init__(self, folders: tuple[str, ...], memory_mb: int, folder_mb: int):
        """Raises InputError without namespaces, RuntimeError if the sandbox does not start."""
        if (level := sandbox_level()) != "namespaces":
            why = f"the strongest here is {level}"
            raise InputError(f"shell commands need a sandbox of level namespaces, and {why}")
        if taken := self.taken().intersection(folders):
            raise InputError(f"/{taken.pop()} of a sandbox is not writable")
        spec: dict = {"readable": self.readable(), "hidden": [], "packages": [], "links": folders}
        spec["environment"] = {"PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"}
        spec |= {"memory_mb": memory_mb, "folder_mb": folder_mb, "output_mb": folder_mb}
        spec |= {"processes": 32, "open_files": 256, "total_timeout": 3600}
        self.conn = connect(make_spec(form="shell", level=level, **spec))
        self.lock = threading.Lock()  # an unread answer comes before the next command

    @staticmethod
    @lru_cache
    def readable() -> list[str]:
        return outermost([*READS, f"{sys.base_prefix}/bin", f"{sys.base_prefix}/lib"])

    @classmethod
    def taken(cls) -> set[str]:
        """Names in / that are not for `folders`."""
        own = {Path(path).parts[1] for path in cls.readable()}
        return own | {"", "dev", "lib", "lib64", "bin", "proc", "sys", "tmp"}

    def exec(self, command: str, timeout_s: float) -> tuple[int, str]:
        """(exit code, output), see zygote.run_shell. Raises RuntimeError if the sandbox is gone."""
        with self.lock:
            try:
                send(self.conn, [command, timeout_s])
                code, output = receive(self.conn, time.monotonic() + timeout_s + GRACE)
            except (OSError, EOFError, ValueError, TypeError) as error:
                self.conn.close()
                raise RuntimeError(f"the sandbox is gone: {error!r}") from None
        return int(code), str(output)

    def close(self) -> None:
        """Ends all that runs in it, and waits for that."""
        with suppress(OSError):  # it is closed
            self.conn.shutdown(socket.SHUT_WR)  # a command ends, and frees the lock
        with self.lock, suppress(OSError):
            hang_up(self.conn)
