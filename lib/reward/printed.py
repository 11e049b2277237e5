"""What scorers print goes to a file of the run, the first line of each kind also to the console.

The text is redacted, and control characters are replaced, so that no terminal obeys them."""

import re
from pathlib import Path

from lib.cli.secrets import private, redact

MOST_OF_CALL = 2**16  # bytes that are kept of what a scorer prints in one call
LARGEST_FILE = 2**26  # bytes; what is printed later is dropped
MOST_KINDS, LONGEST_SHOWN = 20, 200  # lines of a scorer on the console, and characters of each


class PrintLog:
    def __init__(self, path: Path):
        self.path = path
        self.kinds: dict[str, set[str]] = {}  # by scorer
        self.full = False

    def write(self, step: int, scorer: str, printed: bytes, left_out: int) -> list[str]:
        """Writes what the scorer has printed. left_out: further bytes, which are counted only. Returns the lines for
        the console."""
        if self.full:
            return []
        lines = [readable(line) for line in redact(printed.decode(errors="replace")).splitlines()]
        if left_out:
            lines.append(f"[{left_out} more bytes in this call are left out]")
        shown = []
        if not self.kinds:
            limit = f"the first line of each kind is shown, at most {MOST_KINDS} of a scorer"
            shown.append(f"reward: what scorers print is in {self.path}; {limit}")
        kinds = self.kinds.setdefault(scorer, set())
        for line in filter(str.strip, lines):
            kind = re.sub(r"\d+", "0", line)[:LONGEST_SHOWN]
            if kind not in kinds and len(kinds) < MOST_KINDS:
                kinds.add(kind)
                shown.append(f"scorer {scorer}: {line[:LONGEST_SHOWN]}")
        return shown + self._append("".join(f"step {step} {scorer}: {line}\n" for line in lines))

    def _append(self, text: str) -> list[str]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with private(self.path).open("ab") as file:
                if file.tell() < LARGEST_FILE:
                    file.write(text.encode())
                why = "" if file.tell() < LARGEST_FILE else f"is full ({LARGEST_FILE >> 20} MiB)"
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
        self.full = bool(why)
        return [f"reward: {self.path} {why}: what scorers print from now on is dropped"] if why else []


def readable(line: str) -> str:
    line = line.expandtabs(4)
    return line if line.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in line)
