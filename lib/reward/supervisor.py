"""The processes that run scorers, away from the training process. They import no torch.

    trainer --socket--> supervisor --fork, a socket each--> workers

The supervisor is a new interpreter, never a fork of the trainer with its threads and its GPU. It imports the scorers
and forks the workers, so that it replaces a lost worker in milliseconds. A fork keeps no threads and no GPU: scorers
start them when called, not when imported. At a task's time limit the supervisor kills the worker, its process group and
all orphans. When the trainer ends, the supervisor sees it and ends the workers.

Tasks go out as pickles, answers come back as JSON, both in frames (frames.py). Of the descriptors
here a scorer reaches only its own worker's socket. What it prints goes through a pipe to a
PrintLog, under the name of the worker's last scorer."""

import ctypes
import faulthandler
import functools
import json
import math
import os
import pickle
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lib.cli.secrets import private, redact, secret_in
from lib.reward.frames import Frames
from lib.reward.scorer import LONGEST_RESULT, call, checked, load_scorer
from lib.sampling import seeded, set_seed
from lib.sandbox import client

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 0.1  # after the time limit, for faulthandler to say where the scorer hangs
LONGEST_TRACEBACK = 4000  # characters; its end is kept
LONGEST_MESSAGE = 2**40  # bytes, between trainer and supervisor
ID = struct.Struct("!Q")  # a task's id; every task and every answer begins with it
SECONDS = struct.Struct("!d")  # how long a task took; an answer's, after its id
PRINTED = ID.pack(2**64 - 1)  # in place of an answer's id: lines for the console
MOST_OF_CALL = 2**16  # bytes that are kept of what a scorer prints in one call
LARGEST_FILE = 2**26  # bytes; what is printed later is dropped
MOST_KINDS, LONGEST_SHOWN = 20, 200  # lines of a scorer on the console, and characters of each


# ---- in a worker ----
def _failure(error: BaseException) -> list[str]:
    traceback.clear_frames(error.__traceback__)  # frees the memory that the scorer held
    text = "".join(traceback.format_exception(error))
    return ["error" if isinstance(error, Exception) else "crash", text[-LONGEST_TRACEBACK:]]


def _attempt(function: Callable, form: str, samples: list[dict], key: str) -> tuple[list[list], bool]:
    """([kind, result or traceback] of each sample, whether this worker should go on)."""
    try:
        with seeded(key):
            results = call(function, form, samples)
    except BaseException as error:  # noqa: BLE001 also sys.exit(): the worker must answer
        goes_on = isinstance(error, Exception) and not isinstance(error, MemoryError)
        return [_failure(error)] * len(samples), goes_on
    answers: list[list] = []
    for result, sample in zip(results, samples):
        try:
            answers.append(["ok", checked(result, sample)])
        except Exception as error:  # noqa: BLE001 a result's own methods may raise anything
            answers.append(_failure(error))
    return answers, True


def _work(frames: Frames, notes: int, out: int, scorers: list[tuple[Callable, str]], memory_mb: int) -> None:
    """Answers tasks until the supervisor closes the socket. notes: for faulthandler; out: for what scorers print."""
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = data_pages * resource.getpagesize() + memory_mb * 2**20
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(notes)
    os.register_at_fork(after_in_child=frames.close)  # a scorer's child process must not answer
    while True:
        for task in frames.receive():
            scorer, _, samples, key = pickle.loads(task[ID.size :])  # noqa: S301 the trainer's
            function, form = scorers[scorer]
            answers, goes_on = _attempt(function, form, samples, key)
            mark = b"+" if goes_on else b"-"
            frames.send(task[: ID.size] + mark + json.dumps(answers).encode())


# ---- in the supervisor ----
class PrintLog:
    """What scorers print, in a file; the first line of each kind also goes to the console. It is redacted, and control
    characters are replaced, so that no terminal obeys them."""

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


@dataclass(eq=False)
class _Task:
    id: int
    samples: int
    limit_s: float
    pickled: bytes
    step: int
    scorer: int
    began: float = 0.0  # when a worker got it


@dataclass(eq=False)
class _Worker:
    pid: int
    frames: Frames
    notes: int  # the end of a pipe into which faulthandler writes
    out: int | None  # that of its stdout and stderr; None: it has closed both
    task: _Task | None = None
    last: _Task | None = None
    printed: bytearray = field(default_factory=bytearray)  # by the last task, at most MOST_OF_CALL
    left_out: int = 0  # further bytes
    deadline: float = math.inf
    overdue: bool = False

    def close(self) -> None:
        """This process's ends of its socket and pipes."""
        self.frames.close()
        os.close(self.notes)
        if self.out is not None:
            os.close(self.out)
            self.out = None


class _Supervisor:
    def __init__(self, trainer: Frames, scorers: list[tuple[Callable, str]], setup: dict):
        self.trainer, self.scorers, self.memory_mb = trainer, scorers, setup["memory_mb"]
        self.max_workers = setup["workers"]
        self.names = [scorer.get("name", "") for scorer in setup["scorers"]]
        self.log = PrintLog(setup["log"]) if setup["log"] else None
        self.workers: list[_Worker] = []
        self.queue: deque[_Task] = deque()
        self.answers: dict[int, bytes] = {}  # answers that the trainer has not asked for yet
        self.wanted: set[int] = set()
        self.own_children = _children()  # processes that the scorers' imports started

    def serve(self, trainer_pid: int) -> None:
        try:
            while os.getppid() == trainer_pid:  # a child of the trainer may keep the socket open
                self._hand_out()
                self._exchange()
                now = time.monotonic()
                for worker in [worker for worker in self.workers if worker.deadline <= now]:
                    if worker.overdue:
                        self._lose(worker)
                    else:
                        os.kill(worker.pid, signal.SIGABRT)
                        worker.overdue, worker.deadline = True, now + GRACE_S
        finally:
            self.own_children = set()
            for worker in list(self.workers):
                self._kill(worker)
            self._kill_orphans()

    def _exchange(self) -> None:
        """Waits up to a second, or to the next deadline, for sockets, and reads and writes them."""
        workers = {worker.frames.fileno(): worker for worker in self.workers}
        poll = select.poll()
        for frames in (self.trainer, *(worker.frames for worker in self.workers)):
            poll.register(frames, select.POLLIN | select.POLLOUT if frames.unsent else select.POLLIN)
        # after the sockets, so that what a worker has printed before its answer is seen with it
        for worker in self.workers:
            if worker.out is not None:
                poll.register(worker.out, select.POLLIN)
        next_deadline = min((worker.deadline for worker in self.workers), default=math.inf)
        ready = dict(poll.poll(1000 * max(0.0, min(1.0, next_deadline - time.monotonic()))))
        for worker in self.workers:
            if worker.out in ready:
                self._hear(worker)
        for fd in ready:
            if found := workers.get(fd):
                self._collect(found)
            elif fd == self.trainer.fileno():
                self.trainer.flush()
                for message in self.trainer.receive():
                    self.obey(message)

    def obey(self, message: bytes) -> None:
        verb, content = pickle.loads(message)  # noqa: S301 the trainer's
        if verb == "score":
            self.queue.extend(_Task(*task) for task in content)
        else:  # "collect": until it has the last of these answers, the trainer only reads
            self.wanted = set(content)
            for task_id in self.wanted & self.answers.keys():
                self._answer(task_id, self.answers.pop(task_id))

    def _answer(self, task_id: int, answer: bytes) -> None:
        if task_id in self.wanted:
            self.wanted.remove(task_id)
            self.trainer.send(ID.pack(task_id) + answer)
        else:
            self.answers[task_id] = answer

    def _done(self, worker: _Worker, answer: bytes) -> None:
        assert worker.task is not None
        self._log(worker)
        self._answer(worker.task.id, SECONDS.pack(time.monotonic() - worker.task.began) + answer)

    def _hear(self, worker: _Worker) -> None:
        if worker.out is None:
            return
        with suppress(BlockingIOError):
            if not (printed := os.read(worker.out, MOST_OF_CALL)):  # it has closed its stdout
                os.close(worker.out)
                worker.out = None
            kept = printed[: MOST_OF_CALL - len(worker.printed)]
            worker.printed += kept
            worker.left_out += len(printed) - len(kept)

    def _log(self, worker: _Worker) -> None:
        printed, left_out = bytes(worker.printed), worker.left_out
        worker.printed, worker.left_out = bytearray(), 0
        if self.log and worker.last and (printed or left_out):
            shown = self.log.write(worker.last.step, self.names[worker.last.scorer], printed, left_out)
            with suppress(OSError):  # the trainer is gone
                if shown:
                    self.trainer.send(PRINTED + "\n".join(shown).encode())

    def _hand_out(self) -> None:
        while self.queue:
            worker = next((worker for worker in self.workers if worker.task is None), None)
            if worker is None and len(self.workers) == self.max_workers:
                return
            worker = worker or self._fork()
            self._log(worker)  # since its last answer
            worker.task = worker.last = self.queue.popleft()
            worker.task.began = time.monotonic()
            worker.deadline = worker.task.began + worker.task.limit_s
            worker.frames.longest = worker.task.samples * (LONGEST_RESULT + 16 * LONGEST_TRACEBACK)
            try:
                worker.frames.send(ID.pack(worker.task.id) + worker.task.pickled)
            except OSError:  # the worker died after its last answer
                self._lose(worker)

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        notes, their_notes = os.pipe()
        out, their_out = os.pipe()
        for fd in (notes, their_notes, out):
            os.set_blocking(fd, False)
        pid = os.fork()
        if pid == 0:
            try:
                self.trainer.close()
                ours.close()
                os.close(notes)
                os.close(out)
                for other in self.workers:
                    other.close()
                _work(Frames(theirs, LONGEST_MESSAGE), their_notes, their_out, self.scorers, self.memory_mb)
            finally:
                os._exit(1)
        os.setpgid(pid, pid)  # before it gets a task
        theirs.close()
        os.close(their_notes)
        os.close(their_out)
        ours.setblocking(False)
        self.workers.append(_Worker(pid, Frames(ours, 0), notes, out))
        return self.workers[-1]

    def _collect(self, worker: _Worker) -> None:
        """Takes the answer to the worker's task, if it is whole. Other messages end the worker."""
        try:
            worker.frames.flush()
            answers = worker.frames.receive()
        except (EOFError, OSError, ValueError) as error:
            self._lose(worker, f"it sent {error}" if isinstance(error, ValueError) else "")
            return
        if worker.task is None:
            if answers or worker.frames.received:
                self._kill(worker)
        elif answers:
            answer = answers[0]
            if worker.overdue or not answer.startswith(ID.pack(worker.task.id)):
                self._lose(worker, "it sent an answer to another task")
                return
            self._done(worker, answer[ID.size + 1 :])
            worker.task, worker.deadline = None, math.inf
            if answer[ID.size :][:1] != b"+" or len(answers) > 1 or worker.frames.received:
                self._kill(worker)

    def _lose(self, worker: _Worker, why: str = "") -> None:
        """Kills the worker. Answers its task, if it has one: the failure, and where Python was."""
        code, where = self._kill(worker)
        if worker.task is None:
            return
        how = why or (signal.Signals(-code).name if code < 0 else f"exit code {code}")
        failure = ["crash", f"the process died: {how}\n{where}"]
        if worker.overdue:
            failure = ["timeout", f"stopped after {worker.task.limit_s:g} s\n{where}"]
        self._done(worker, json.dumps([failure] * worker.task.samples).encode())

    def _kill(self, worker: _Worker) -> tuple[int, str]:
        """Ends a worker, its group and all orphans. Returns (exit code, faulthandler's text)."""
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        os.kill(worker.pid, signal.SIGKILL)  # it may have left the group
        _, status = os.waitpid(worker.pid, 0)
        self.workers.remove(worker)
        self._hear(worker)
        self._log(worker)
        where = b""
        with suppress(BlockingIOError):
            where = os.read(worker.notes, 2**16).partition(b"\n\nExtension modules: ")[0]
        worker.close()
        self._kill_orphans()
        return os.waitstatus_to_exitcode(status), where.decode(errors="replace")[-LONGEST_TRACEBACK:]

    def _kill_orphans(self) -> None:
        known = self.own_children | {worker.pid for worker in self.workers}
        while orphans := _children() - known:  # as they die, their own children come here
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> set[int]:
    """The ids of this process's children; none where Linux does not list them."""
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except FileNotFoundError:
        return set()


def supervise(fd: int, trainer_pid: int) -> None:
    trainer = Frames(socket.socket(fileno=fd), LONGEST_MESSAGE)
    with suppress(EOFError, ConnectionError):  # the trainer is gone
        while not (messages := trainer.receive()):
            pass
        setup = pickle.loads(messages[0])  # noqa: S301 the trainer's
        set_seed(setup["seed"])  # the imports may draw
        client.announces = False  # the trainer has said which sandbox works here
        scorers = []
        for scorer in setup["scorers"]:
            kwargs = scorer["kwargs"]
            secret_in(kwargs, "--reward-kwargs")  # the log redacts the variables that it names
            try:
                function = load_scorer(scorer["spec"], scorer["modules"], kwargs, scorer.get("time_limit_s"))
            except BaseException as error:  # noqa: BLE001 the user's file may raise anything, shown for each sample
                function = functools.partial(_raise, error)
            scorers.append((function, scorer["form"]))
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # a stopped one would not see the trainer's end
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        trainer.socket.setblocking(False)
        supervisor = _Supervisor(trainer, scorers, setup)
        for message in messages[1:]:
            supervisor.obey(message)
        supervisor.serve(trainer_pid)


def _raise(error: BaseException, **_):
    raise error
