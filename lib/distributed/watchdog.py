"""Reports which rank waits for which and ends a job that hangs: on each rank a thread watches the stage."""

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from os import _exit as end_process  # run() replaces os._exit
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lib.distributed import reduced

# On each rank a thread writes its rank's stage to the job's store. When a stage has taken a 30th of its time limit, and
# each time that has doubled, the thread prints where all ranks are. At the limit it ends the process. The launcher then
# ends the other ranks or, with --max-restarts, restarts all of them.

_watcher: threading.Thread | None = None
_notebook: Path | None = None
_finished = threading.Event()


class StageTimeout(RuntimeError):
    """A stage took longer than it may."""


class StoreLost(RuntimeError):
    """The job's store does not answer. It was in the launcher on the first node, or in rank 0."""


class LauncherLost(RuntimeError):
    """torchrun or accelerate, which would end or restart the other ranks, is gone."""


def start_watching(store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
    """Starts the watcher. `store` is an exclusive client of the job's store."""
    global _watcher
    _watcher = threading.Thread(target=_watch, args=(store, rank, size, timeout_s), name="watcher", daemon=True)
    _watcher.start()


def note_waits_in(file: Path) -> None:
    """Also appends lines about waiting ranks to this file."""
    global _notebook
    _notebook = file


def stop_watching(wait_s: float | None = None) -> None:
    """Ends the watcher and waits for its end, which takes long if the job's store does not answer."""
    if _watcher is not None:
        _finished.set()
        _watcher.join(wait_s)


def _watch(*args) -> None:
    try:
        _watch_stages(*args)
    except (StageTimeout, StoreLost, LauncherLost) as error:
        faulthandler.dump_traceback()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        get_error_handler().record_exception(error)  # for the launcher's report
        end_process(124)  # the exit code of timeout(1); the main thread may be anywhere


def _watch_stages(store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
    beat_s, first_line_s, silent_s = timeout_s / 360, timeout_s / 30, max(1, timeout_s / 90)
    store.set_timeout(timedelta(seconds=max(first_line_s, 10)))  # a busy node's may be late by seconds
    started_at, watched = time.time(), None
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    while not _finished.wait(beat_s):
        line = _line_of_main_thread()
        if line == "debugger":  # a prompt may stay as long as it likes
            reduced.enter_stage(reduced._stage[0], reduced._stage[2])
        if watched is not reduced._stage:
            watched, next_line_s = reduced._stage, first_line_s
        (name, since, limited), now = watched, time.monotonic()
        seconds, limit_s = now - since, timeout_s if limited else math.inf
        if launcher not in (None, os.getppid()):
            raise LauncherLost(f"rank {rank} in {name} ({line}): its launcher, process {launcher}, is gone")
        try:
            store.set(f"rank {rank}", json.dumps([f"{name} ({line})", seconds, time.time()]))
            store.get(f"rank {rank}")  # unlike set, this fails when nobody is there
            if seconds < min(next_line_s, limit_s):
                continue
            states = {}  # for each rank: where it is, for how long, and for how long it has said nothing
            for r in range(size):
                told = store.get(f"rank {r}") if store.check([f"rank {r}"]) else None
                where, stayed, told_at = json.loads(told) if told else ("not started", 0, started_at)
                silence = time.time() - told_at
                states[r] = (where, stayed + silence, silence if silence > silent_s else 0)
        except dist.DistError as error:
            lost = "the job's store, which is in rank 0 or in the first node's launcher, is gone"
            why = f"see why that one ended ({str(error).splitlines()[0]})"
            raise StoreLost(f"rank {rank} in {name} ({line}): {lost}; {why}") from error
        if seconds >= limit_s:
            raise StageTimeout(f"rank {rank} ends after {timeout_s:g} s in {name}; {_describe(states)}")
        if not any(stayed >= first_line_s and not silence for _, stayed, silence in list(states.values())[:rank]):
            line = f"waiting: {_describe(states)}"  # one for all ranks
            print(line, file=sys.stderr, flush=True)
            if _notebook is not None:
                with suppress(OSError), _notebook.open("a") as file:  # a full disk must not end the run here
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        next_line_s *= 2


def _line_of_main_thread() -> str:
    """file:line of the main thread, in the innermost function outside packages; or "debugger"."""
    frame, line = sys._current_frames()[threading.main_thread().ident], ""
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_globals.get("__name__") in ("bdb", "pdb"):
            return "debugger"
        if not (line or "/lib/python3" in file or file.startswith("<")):
            line = f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return line


def _describe(states: dict[int, tuple[str, float, float]]) -> str:
    """Where the ranks are. Those that have been there longest come first: the others may be waiting for them."""
    groups = defaultdict(list)
    for rank, (where, seconds, silence) in states.items():
        groups[where, silence > 0].append((seconds, silence, rank))
    texts = []
    for (where, _), members in sorted(groups.items(), key=lambda group: -max(group[1])[0]):
        seconds, silence, _ = max(members)
        text = f"rank {', '.join(str(rank) for *_, rank in members)}: {where} for {seconds:.0f} s"
        texts.append(text + (f", silent for {silence:.0f} s" if silence else ""))
    return "; ".join(texts)
