"""Functions that test_code.py has run in a sandbox by lib.sandbox.evaluate."""

import gc
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

calls = 0


def warm() -> None: ...


def look_around(words: list[str]) -> dict:
    """Which of the words' halves, put together, stand anywhere in this process, and what else can be reached."""
    global calls
    calls += 1
    wanted = ["".join(word) for word in words]
    texts = [value for value in gc.get_objects() if isinstance(value, dict | list | tuple)]
    texts = [item for value in texts for item in (value.values() if isinstance(value, dict) else value)]
    texts = [text for text in texts if isinstance(text, str)] + list(os.environ.values())
    reached = []
    for path in (__file__, "/etc/passwd", "/proc/self/environ"):
        with suppress(OSError):
            Path(path).read_text()
            reached.append(path)
    with suppress(OSError):
        socket.socket()
        reached.append("network")
    found = [word for word in wanted if any(word in text for text in texts if text not in wanted)]
    return {"found": found, "reached": reached, "calls": calls}


def write_to_all_files() -> None:
    for fd in range(64):
        with suppress(OSError):
            os.write(fd, b"x")


def misbehave(how: str):
    Path("left").write_text("behind")
    acts = {"hang": lambda: time.sleep(100), "exit": lambda: os._exit(0), "raise": lambda: 1 / 0}
    return (acts | {"no JSON": object, "write": write_to_all_files}).get(how, str)() or how
