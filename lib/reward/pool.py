"""The trainer's side of the processes that run scorers (supervisor.py)."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lib import how_it_ended
from lib.reward.frames import Frames
from lib.reward.scorer import LARGEST_SCORE
from lib.reward.supervisor import ID, LONGEST_MESSAGE, PRINTED, SECONDS


class Pool:
    """Runs scorers in `workers` processes. scorers: dicts of load_scorer's arguments, form and name.
    memory_mb: MiB that a worker may take beyond the imports. seed: of what the imports draw. log: the
    file for what scorers print, or None. shows: whether to print the first lines of each kind.
    A task is (scorer's index, time limit in s, samples, key). A sample is a dict of compute_score's
    arguments. What the scorer draws depends on the key alone (lib/sampling.py)."""

    def __init__(self, scorers: list[dict], workers: int, memory_mb: int, seed=0, log: Path | None = None, shows=True):
        ours, theirs = socket.socketpair()
        start = f"import sys; sys.path[:] = {sys.path!r}; from lib.reward.supervisor import supervise"
        command = [sys.executable, "-u", "-P", "-c", f"{start}; supervise({theirs.fileno()}, {os.getpid()})"]
        fds, null = [theirs.fileno()], subprocess.DEVNULL
        # in a session of its own: only the trainer gets Ctrl-C
        self._process = subprocess.Popen(command, pass_fds=fds, stdin=null, stdout=null, start_new_session=True)
        theirs.close()
        self._frames = Frames(ours, LONGEST_MESSAGE)
        self._received: deque[bytes] = deque()
        self._next_id = 0
        self._samples: dict[int, int] = {}  # number of samples, by id of each unanswered task
        self._shows = shows
        log = log and log.absolute()  # an import may change the folder
        self._send({"scorers": scorers, "workers": workers, "memory_mb": memory_mb, "seed": seed, "log": log})

    def submit(self, tasks: list[tuple[int, float, list[dict], str]], step: int = 0) -> range:
        """Queues tasks and returns their ids for collect() at once. step: for the log."""
        ids = range(self._next_id, self._next_id + len(tasks))
        self._next_id += len(tasks)
        self._samples |= {i: len(task[2]) for i, task in zip(ids, tasks)}
        queued = [(i, len(task[2]), task[1], pickle.dumps(task), step, task[0]) for i, task in zip(ids, tasks)]
        self._send(("score", queued))
        return ids

    def collect(self, ids: range) -> Iterator[tuple[int, list, float]]:
        """Yields (the task's index, [kind, value] of each sample, the call's seconds). A kind and its value are ok, a
        dict; or error, crash or timeout, a text."""
        self._send(("collect", ids))
        for _ in ids:
            message = self._receive()
            while message.startswith(PRINTED):
                self._show(message[ID.size :].decode())
                message = self._receive()
            [task_id], [seconds] = ID.unpack_from(message), SECONDS.unpack_from(message, ID.size)
            answers = read_answers(message[ID.size + SECONDS.size :], self._samples.pop(task_id))
            yield task_id - ids.start, answers, seconds

    def _show(self, lines: str) -> None:
        if self._shows:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(lines.encode(encoding, "replace").decode(encoding), flush=True)

    def _send(self, message) -> None:
        with self._talking():
            self._frames.send(pickle.dumps(message))

    def _receive(self) -> bytes:
        with self._talking():
            while not self._received:
                self._received += self._frames.receive()
        return self._received.popleft()

    @contextmanager
    def _talking(self):
        try:
            yield
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the reward pool is gone: its process {how_it_ended(self._process.wait())}") from error

    def close(self) -> None:
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # a scorer may have stopped the supervisor
        self._process.wait()
        self._frames.close()


def read_answers(text: bytes, samples: int) -> list:
    """The [kind, value] of each sample, checked: a model's text may have changed the worker."""

    def is_answer(answer) -> bool:
        kind, value = answer
        if kind == "ok":
            return isinstance(value["score"], float) and abs(value["score"]) <= LARGEST_SCORE
        return kind in ("error", "crash", "timeout") and isinstance(value, str)

    with suppress(ValueError, TypeError, LookupError, RecursionError):
        answers = json.loads(text)
        if len(answers) == samples and all(map(is_answer, answers)):
            return answers
    return [["crash", "the worker's answer is no answer"]] * samples
