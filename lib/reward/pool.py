"""Processes that run scorers away from the training process. They import numpy, to seed it, but no torch.

    trainer --socket--> supervisor --fork, a socket each--> workers

The supervisor is a new interpreter, never a fork of the trainer with its threads and its GPU. It imports the scorers
and forks the workers, so that it replaces a lost worker in milliseconds. At a task's time limit its worker is killed
with its process group and every orphan that it left; the latter, and the memory limit, need Linux. Scorers must start
threads or touch a GPU when called, not when imported: a fork keeps neither.

When the trainer ends, also by kill -9, the supervisor sees it within a second and ends the workers. Tasks go out as
pickles, answers come back as JSON, both in frames (frames.py). Of the pool's descriptors a scorer reaches only its own
worker's socket. If a scorer changes its process (folder, environment, globals), later samples of that worker see it.

A worker's stdout and stderr are a pipe, which the supervisor empties into a PrintLog. What a thread or child prints
after its scorer has returned counts as printed by the worker's last scorer."""

import ctypes
import faulthandler
import functools
import json
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lib import how_it_ended
from lib.cli.secrets import secret_in
from lib.reward.frames import Frames
from lib.reward.printed import MOST_OF_CALL, PrintLog
from lib.reward.scorer import LARGEST_SCORE, LONGEST_RESULT, call, checked, load_scorer
from lib.sandbox import client
from lib.seeds import seeded, set_seed

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 0.1  # after the time limit, for faulthandler to say where the scorer hangs
LONGEST_TRACEBACK = 4000  # characters; its end is kept
LONGEST_MESSAGE = 2**40  # bytes, between trainer and supervisor
ALIVE_S, SILENCE_S = 5.0, 120.0  # how often a supervisor sends a sign of life; silence after which it is given up
ID = struct.Struct("!Q")  # a task's id; every task and every answer begins with it
SECONDS = struct.Struct("!d")  # how long a task took; an answer's, after its id
PRINTED = ID.pack(2**64 - 1)  # in place of an answer's id: lines for the console


# ---- in a worker -----------------------------------------------------------------------------------
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
        return [_failure(error)] * len(samples), isinstance(error, Exception) and not isinstance(error, MemoryError)
    answers: list[list] = []
    for result, sample in zip(results, samples):
        try:
            answers.append(["ok", checked(result, sample)])
        except Exception as error:  # noqa: BLE001 a result's own methods may raise anything
            answers.append(_failure(error))
    return answers, True


def _work(frames: Frames, notes: int, out: int | None, scorers: list[tuple[Callable, str]], memory_mb: int) -> None:
    """Answers tasks until the supervisor closes the socket."""
    if out is not None:
        os.dup2(out, 1)
        os.close(out)
    os.dup2(1, 2)  # without a pipe, the supervisor's stdout is /dev/null
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        data_pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = data_pages * resource.getpagesize() + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(notes)
    os.register_at_fork(after_in_child=frames.close)  # a scorer's child process must not answer
    while True:
        for task in frames.receive():
            scorer, _, samples, key = pickle.loads(task[ID.size :])  # noqa: S301 the trainer's
            function, form = scorers[scorer]
            answers, going_on = _attempt(function, form, samples, key)
            frames.send(task[: ID.size] + (b"+" if going_on else b"-") + json.dumps(answers).encode())


# ---- in the supervisor -----------------------------------------------------------------------------
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
    out: int | None  # that of its stdout and stderr; None: closed, or there is no PrintLog
    task: _Task | None = None
    last: _Task | None = None
    printed: bytearray = field(default_factory=bytearray)  # by the last task, at most MOST_OF_CALL
    left_out: int = 0  # further bytes
    deadline: float = math.inf
    overdue: bool = False


class _Supervisor:
    def __init__(self, trainer: Frames, scorers: list[tuple[Callable, str]], setup: dict):
        self.trainer, self.scorers, self.memory_mb = trainer, scorers, setup["memory_mb"]
        self.max_workers, self.names = setup["workers"], [scorer.get("name", "") for scorer in setup["scorers"]]
        self.log = PrintLog(setup["log"]) if setup["log"] else None
        self.workers: list[_Worker] = []
        self.queue: deque[_Task] = deque()
        self.answers: dict[int, bytes] = {}  # answers that the trainer has not asked for yet
        self.wanted: set[int] = set()
        self.spoke = time.monotonic()  # when it last sent something to the trainer
        self.own_children = _children()  # processes that the scorers' imports started

    def serve(self, trainer_pid: int) -> None:
        self.trainer.send(b"")  # the imports are done
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
                if self.wanted and now - self.spoke > ALIVE_S:
                    self._say(b"")
        finally:
            self.own_children = set()
            for worker in list(self.workers):
                self._kill(worker)
            self._kill_orphans()

    def _exchange(self) -> None:
        """Waits up to a second, or to the next deadline, until a socket can be read or written. Then does that."""
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
            self._say(ID.pack(task_id) + answer)
        else:
            self.answers[task_id] = answer

    def _done(self, worker: _Worker, answer: bytes) -> None:
        assert worker.task is not None
        self._log(worker)
        self._answer(worker.task.id, SECONDS.pack(time.monotonic() - worker.task.began) + answer)

    def _hear(self, worker: _Worker) -> None:
        """Reads what the worker has printed."""
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
        if self.log and worker.last and (worker.printed or worker.left_out):
            name = self.names[worker.last.scorer]
            shown = self.log.write(worker.last.step, name, bytes(worker.printed), worker.left_out)
            worker.printed, worker.left_out = bytearray(), 0
            with suppress(OSError):  # the trainer is gone
                if shown:
                    self.trainer.send(PRINTED + "\n".join(shown).encode())

    def _say(self, message: bytes) -> None:
        self.trainer.send(message)
        self.spoke = time.monotonic()

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
        os.set_blocking(notes, False)
        os.set_blocking(their_notes, False)
        out, their_out = os.pipe() if self.log else (None, None)
        pid = os.fork()
        if pid == 0:
            try:
                self.trainer.close()
                ours.close()
                for fd in (notes, out, *(fd for other in self.workers for fd in (other.notes, other.out))):
                    if fd is not None:
                        os.close(fd)
                for other in self.workers:
                    other.frames.close()
                _work(Frames(theirs, LONGEST_MESSAGE), their_notes, their_out, self.scorers, self.memory_mb)
            finally:
                os._exit(1)
        os.setpgid(pid, pid)  # before it gets a task
        theirs.close()
        os.close(their_notes)
        if out is not None and their_out is not None:
            os.close(their_out)
            os.set_blocking(out, False)
        ours.setblocking(False)
        self.workers.append(_Worker(pid, Frames(ours, 0), notes, out))
        return self.workers[-1]

    def _collect(self, worker: _Worker) -> None:
        """Takes the answer to the worker's task, if it is whole. Any other message ends the worker."""
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
        """Kills the worker. Answers its task, if it has one, with the failure and the place where Python was."""
        code, where = self._kill(worker)
        if worker.task is None:
            return
        how = why or (signal.Signals(-code).name if code < 0 else f"exit code {code}")
        failure = ["crash", f"the process died: {how}\n{where}"]
        if worker.overdue:
            failure = ["timeout", f"stopped after {worker.task.limit_s:g} s\n{where}"]
        self._done(worker, json.dumps([failure] * worker.task.samples).encode())

    def _kill(self, worker: _Worker) -> tuple[int, str]:
        """Ends a worker, its process group and all orphans. Returns its exit code and what faulthandler wrote."""
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        os.kill(worker.pid, signal.SIGKILL)  # it may have left the group
        _, status = os.waitpid(worker.pid, 0)
        self.workers.remove(worker)
        worker.frames.close()
        self._hear(worker)
        self._log(worker)
        if worker.out is not None:
            os.close(worker.out)
            worker.out = None
        where = b""
        with suppress(BlockingIOError), open(worker.notes, "rb", buffering=0) as notes:
            where = (notes.read(2**16) or b"").partition(b"\n\nExtension modules: ")[0]
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
            secret_in(scorer["kwargs"], "--reward-kwargs")  # the log redacts the variables that it names
            try:
                function = load_scorer(scorer["spec"], scorer["modules"], scorer["kwargs"], scorer.get("time_limit_s"))
            except BaseException as error:  # noqa: BLE001 the user's file may raise anything; each sample then shows it
                function = functools.partial(_raise, error)
            scorers.append((function, scorer["form"]))
        if LINUX:
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


# ---- in the trainer --------------------------------------------------------------------------------
class Pool:
    """Runs scorers in `workers` processes. scorers: dicts of load_scorer's arguments, form and name. memory_mb: MiB
    that a worker may take beyond what the imports took. seed: for what the imports draw. log: the file for what scorers
    print; None: it is dropped. shows: whether to print the first lines of each kind.
    A task is (scorer's index, time limit in s, samples, key). A sample is a dict of compute_score's arguments; a
    scorer of form "response" gets one. key: what the scorer draws depends on it alone, see lib/seeds.py."""

    def __init__(self, scorers: list[dict], workers: int, memory_mb: int, seed=0, log: Path | None = None, shows=True):
        ours, theirs = socket.socketpair()
        start = f"import sys; sys.path[:] = {sys.path!r}; from lib.reward.pool import supervise"
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
                messages = self._frames.receive()
                self._received += filter(None, messages)
                if messages:  # the supervisor has imported the scorers, which may take any time
                    self._frames.socket.settimeout(SILENCE_S)
        return self._received.popleft()

    @contextmanager
    def _talking(self):
        try:
            yield
        except TimeoutError:
            silent = f"the reward pool's process {self._process.pid} has been silent for {SILENCE_S:g} s"
            raise RuntimeError(f"{silent}: stopped?") from None
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the reward pool is gone: its process {how_it_ended(self._process.wait())}") from error

    def close(self) -> None:
        """Ends all its processes."""
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # a scorer may have stopped the supervisor
        self._process.wait()
        self._frames.close()


def read_answers(text: bytes, samples: int) -> list:
    """The [kind, value] of each sample. Checks their form, since a model's text may have changed the worker."""

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
