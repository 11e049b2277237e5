"""Writes the page of one run or of several over each other: one HTML file that opens from disk, without a network.

With --serve the page stays fresh while the runs go on. It is served to this machine alone: from another one look at it
through `ssh -L 8000:localhost:8000 HOST`.
"""

import hashlib
import json
import threading
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import tyro

from lib import InputError
from lib.cli.process import command_line
from lib.cli.secrets import write_private
from tools.compare import compare, read_settings, table
from tools.page.read import read_run, runs_in, state
from tools.page.samples import JPEG, pack_samples
from tools.page.write import as_script, render

CONFIDENCE = 0.95  # of the interval of a difference between two settings
MOST_COMPARED = 20  # settings with the first one: each reads the samples of its runs


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """folders of runs, such as runs/NAME, or a folder that holds runs, such as a sweep's; those that differ in the seed
    alone become one curve with a range"""
    output: Path | None = None
    """the file to write; by default page.html in the first run's folder"""
    serve: int | None = None
    """serve the page on this port of 127.0.0.1 and keep it fresh, instead of writing a file"""
    max_mb: float = 14.5
    """most MB of samples in the page, compressed; beyond it steps are left out evenly, and the page says so"""


def main(args: Args) -> None:
    if not args.runs:
        raise InputError("give the folder of a run, such as runs/NAME")
    if not args.max_mb >= 0:
        raise InputError(f"--max-mb {args.max_mb:g}: give 0 or more")
    if args.serve is not None and not 0 <= args.serve < 2**16:
        raise InputError(f"--serve {args.serve}: give a port from 1 to 65535, or 0 for any free one")
    pages = Pages(args.runs, args.max_mb * 1e6)
    if args.serve is not None:
        serve(pages, args.serve)
        return
    data, chunks = pages.read()
    file = args.output or args.runs[0] / "page.html"
    try:
        write_private(file, render(pages.title, data, chunks).encode())  # it holds samples, see tracking.py
    except OSError as error:
        raise InputError(f"{_shown(file)}: cannot be written ({error.strerror}); give another --output") from error
    print(f"{_shown(file)}: {file.stat().st_size / 1e6:.1f} MB", flush=True)


def _shown(path: Path | str) -> str:
    """The path as text that can be printed: a name may be no UTF-8."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _named(folders: tuple[Path, ...]) -> list[tuple[Path, str]]:
    names = [folder.resolve().name for folder in folders]
    return [(folder, _shown(name if names.count(name) == 1 else folder)) for folder, name in zip(folders, names)]


class Pages:
    """The data of the page, read anew when the runs' files have changed."""

    def __init__(self, folders: tuple[Path, ...], most_bytes: float) -> None:
        self.given, self.most_bytes = tuple(dict.fromkeys(folders)), most_bytes
        self.title = ", ".join(name for _, name in _named(self.given))
        self.lock = threading.Lock()
        self.stamp, self.data, self.chunks = "", "", dict[str, bytes]()

    def read(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        runs, chunks, folders = [], dict[str, bytes](), self._folders()
        for folder, name in _named(folders):
            run = read_run(folder)
            index, packed, notes = pack_samples(folder, self.most_bytes / len(folders))
            runs.append(run | {"name": name, "samples": index, "notes": run["notes"] + notes})
            chunks |= packed
        families: dict[str, list[Path]] = {}
        for run, folder in zip(runs, folders):
            families.setdefault(run["family"], []).append(folder)
        first, *others = families.values()
        compared = [_compared(first + other) for other in others[:MOST_COMPARED]]
        if left := len(others) - len(compared):
            compared.append({"why": f"{left} more settings are not compared here: python -m tools.compare RUNS"})
        return {"runs": runs, "comparisons": compared}, chunks

    def fresh(self) -> tuple[str, str, dict[str, bytes]]:
        """(stamp of the runs' files, the data as JSON, the chunks)."""
        with self.lock:
            if (stamp := self._stamp()) != self.stamp:
                data, self.chunks = self.read()
                self.stamp, self.data = stamp, as_script(data)
            return self.stamp, self.data, self.chunks

    def _folders(self) -> tuple[Path, ...]:
        """Of the runs: those that were given, and what is in a folder of several, which may still grow."""
        return tuple(dict.fromkeys(run for folder in self.given for run in runs_in(folder)))

    def _stamp(self) -> str:
        folders, names = self._folders(), ("metrics.jsonl", "samples.jsonl", "config.json", "lens.json")
        files = [folder / name for folder in folders for name in names]
        files += [file for folder in folders for file in sorted((folder / "rollouts").glob("step_*.parquet"))]
        sizes = []
        for file in files:
            with suppress(OSError):  # there is none, or none that can be read
                status = file.stat()
                sizes.append((str(file), status.st_size, status.st_mtime_ns))
        states = [state(folder) for folder in folders]
        return hashlib.sha256(json.dumps([sizes, states]).encode()).hexdigest()[:16]


def _compared(folders: list[Path]) -> dict[str, Any]:
    """The table of tools.compare for runs of two settings, or why there is none."""
    try:
        one, other = read_settings(folders)
        rows = compare(one, other, "last", CONFIDENCE)
    except InputError as error:
        return {"why": str(error)}
    return {"table": table(one, other, rows, CONFIDENCE)}


def serve(pages: Pages, port: int) -> None:
    """Until Ctrl-C."""
    pages.fresh()  # a folder without a run is an error now, not at the first look
    try:
        server = make_server(pages, port)
    except OSError as error:
        raise InputError(f"--serve {port}: {error.strerror}; give another port") from error
    print(f"http://127.0.0.1:{server.server_port}/ shows {pages.title}, until Ctrl-C", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


IDLE_S = 30.0  # after which a connection without a request is closed


def make_server(pages: Pages, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_GET(self) -> None:
            # a name that an attacker's DNS gives to 127.0.0.1 must not read samples; a tunnel may have another port
            if self.headers.get("Host", "").rsplit(":", 1)[0] not in ("127.0.0.1", "localhost"):
                return self.answer(403, b"", "text/plain")
            if self.path == "/":
                return self.answer(200, render(pages.title, None, {}).encode(), "text/html; charset=utf-8")
            try:
                stamp, data, chunks = pages.fresh()
            except InputError as error:
                return self.answer(503, str(error).encode(), "text/plain")
            if self.path == "/data.json" and self.headers.get("If-None-Match") == stamp:
                return self.answer(304, b"", "application/json")
            if self.path == "/data.json":
                return self.answer(200, data.encode(), "application/json", stamp)
            if (key := self.path.removeprefix("/chunk/")) in chunks:
                image = chunks[key].startswith(JPEG)
                return self.answer(200, chunks[key], "image/jpeg" if image else "application/octet-stream")
            return self.answer(404, b"", "text/plain")

        def answer(self, status: int, body: bytes, kind: str, stamp: str = "") -> None:
            self.send_response(status)
            headers = {"Content-Type": kind, "Content-Length": str(len(body)), "ETag": stamp}
            headers |= {
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
            }
            for name, value in headers.items():
                if value:
                    self.send_header(name, value)
            with suppress(ConnectionError):  # the browser has left
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    with command_line():
        main(tyro.cli(Args, prog="python -m tools.page", description=__doc__))
