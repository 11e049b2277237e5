"""What the check prints at its end and writes as JSON: a summary of ten lines, the table, the claims."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.claims import verdicts
from benchmarks.gpu_check.rows import ROOT, Options

FROM_ROWS = {  # lines of the summary that rows write: what separates their parts
    "hardware": ", ",
    "software": ", ",
    "update": "; ",
    "memory": ", ",
    "rollout": "; ",
    "stages": ", ",
}
LONGEST = 400  # of a line of the summary


class Report:
    """The rows of all parts so far. `output` and `log`: where they go, if that can be written."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.results: dict[str, list[dict]] = {}
        self.seconds: dict[str, float] = {}
        self.interrupted = ""  # by this signal
        self.unwritten = ""  # why there is no file
        folders = [options.output.parent, Path("/tmp"), Path("/dev/shm")]
        self.output = next(filter(writable, folders), folders[0]) / options.output.name
        self.log = self.output.with_suffix(".log")
        try:
            self.log.write_text("")
        except OSError:
            self.log = Path(os.devnull)

    def begin(self, part: str) -> list[dict]:
        self.results[part] = []
        return self.results[part]

    def end(self, part: str, seconds: float) -> None:
        self.seconds[part] = round(seconds, 1)
        print(f"{part}: {self.of_part(part)}", file=sys.stderr, flush=True)
        self.write()

    @property
    def failed(self) -> list[str]:
        return [r["check"] for rows in self.results.values() for r in rows if r["ok"] is False]

    def of_part(self, part: str) -> str:
        rows = self.results[part]
        failed = sum(r["ok"] is False for r in rows)
        time_of = f"{self.seconds[part]:.0f} s" if part in self.seconds else "interrupted"
        return f"{len(rows)} rows, {time_of}{f', {failed} FAILED' * bool(failed)}"

    def summary(self) -> list[str]:
        """Ten lines, for whoever reads no more."""
        rows = [r for of_part in self.results.values() for r in of_part]
        right, failed = sum(r["ok"] is True for r in rows), self.failed
        without = sum("skipped" in r for r in rows)
        head = f"{len(failed)} checks FAILED, {right} ok, {without} not run"
        head += f"; {sum(self.seconds.values()):.0f} s on {self.options.device}{' (tiny)' * self.options.tiny}"
        head += f"; INTERRUPTED by {self.interrupted}" * bool(self.interrupted)
        said: dict[str, list[str]] = {name: [] for name in FROM_ROWS}
        for r in rows:
            for name, text in r.get("summary", {}).items():
                said[name].append(text)
        lines = {name: FROM_ROWS[name].join(said[name]) or "no rows" for name in FROM_ROWS}
        lines["parts"] = "; ".join(f"{part}: {self.of_part(part)}" for part in self.results)
        lines["failed"] = "; ".join(failed) or "none"
        lines["claims"] = self.claims_in_a_line()
        return [f"gpu_check at commit {commit()}: {head}", *(f"{name:<9} {cut(text)}" for name, text in lines.items())]

    def claims_in_a_line(self) -> str:
        found: dict[str, list[str]] = {}
        for name, texts in verdicts(self.results, self.options.device == "cuda").items():
            for verdict in {text.partition(":")[0] for text in texts}:
                found.setdefault(verdict, []).append(name)
        return "; ".join(f"{len(names)} {verdict} ({' '.join(names)})" for verdict, names in found.items())

    def write(self) -> None:
        """Raises nothing: a full disk is no reason to lose what the other parts give."""
        record = {
            "summary": self.summary(),
            "device": self.options.device,
            "tiny": self.options.tiny,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": self.seconds,
            "claims": verdicts(self.results, self.options.device == "cuda"),
            "results": self.results,
        }
        new = self.output.with_suffix(".new")
        try:
            new.write_text(json.dumps(finite(record), indent=1, allow_nan=False, default=str) + "\n")
            new.replace(self.output)
            self.unwritten = ""
        except OSError as error:
            self.unwritten = f"not written: {error}"
            with suppress(OSError):
                new.unlink()

    def finish(self) -> None:
        self.write()
        with suppress(BrokenPipeError):  # gpu_check.sh | head
            print("\n".join(self.lines()), flush=True)

    def lines(self) -> Iterator[str]:
        yield from self.summary()
        for part, rows in self.results.items():
            yield part
            for r in rows:
                yield from lines_of(r)
        yield "claims"
        for name, texts in verdicts(self.results, self.options.device == "cuda").items():
            yield from (f"  {name:<5}{text}" for text in texts)
        yield self.unwritten or f"{self.output}, and what the parts printed: {self.log}"


def writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 2**16)
    except OSError:
        return False
    return True


def cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."


@cache
def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def finite(x: Any) -> Any:
    """JSON has no NaN: "nan"."""
    if isinstance(x, dict):
        return {str(key): finite(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def lines_of(r: dict) -> Iterator[str]:
    value = "-" if r["value"] is None else f"{float(r['value']):.4g}"
    verdict = {None: "", True: "ok", False: "FAILED"}[r["ok"]]
    yield f"  {r['check']:<80}{value:>11} {r['unit']:<10}{verdict}".rstrip()
    for text in (r.get("why"), r.get("error", "").strip().rpartition("\n")[2], *r["claims"]):
        if text:
            yield f"      {text}"
