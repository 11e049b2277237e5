"""What has one right answer and is shared by the four scripts. What a paper might change is in the scripts."""

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from lib.cli.secrets import redact

for _name in ("annotated_types", "torch", "transformers", "tyro", "yaml"):
    if find_spec(_name) is None:
        _bin = Path(__file__).parent.parent / ".venv/bin"
        _todo = "`make setup`, or `pip install` the wheel with its requirements"
        if _bin.exists() and Path(sys.prefix) != _bin.parent:
            _todo = f"`source {_bin}/activate`, or {_bin}/python in place of python"
        sys.exit(f"error: {sys.executable} has no module {_name!r}, so it is not plainrl's environment: {_todo}")


class InputError(ValueError):
    """The user's input is wrong. The message is one line: what, where (file, row, flag), and what to do about it."""


def how_it_ended(code: int) -> str:
    """A child process, by its returncode."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def is_first_on_node() -> bool:
    """True on one rank of each node, also before the process group exists."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def launched_ranks() -> int:
    """Ranks of the job, also before the process group exists."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


def node_begins() -> int:
    """The first rank on this node, also before the process group exists."""
    return int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))


def report_mistake(message: str) -> None:
    """Prints the message on stderr, once a node. Where torchrun or accelerate launched this process, their report of
    some forty lines, which comes below it, ends with the message too."""
    message = redact(message)
    if is_first_on_node():
        print(message, file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # as torch's ErrorHandler writes it
        shown = {"py_callstack": f"\n{message}", "timestamp": str(int(time.time()))}
        Path(report).write_text(json.dumps({"message": {"message": message, "extraInfo": shown}}))
