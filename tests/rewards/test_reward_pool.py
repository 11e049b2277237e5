"""pool.py, supervisor.py and the RewardManager that uses them, with scorers that misbehave on purpose."""

import math
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from lib import InputError
from lib.data_proto import DataProto
from lib.distributed import Sum, reduce_metrics
from lib.log import extra_metrics
from lib.model import load_tokenizer
from lib.reward import pool, supervisor
from lib.reward.scorer import check_keywords, load_scorers
from lib.reward.scores import RewardManager, Rewards, correlation, reward_components
from tests.common import TOY_MODEL, is_alive, one_line, run_ranks, wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 1.0  # of scorers that hang
PATIENT_S = 60.0  # of the others, which take well under a millisecond where nothing else runs
TOKENIZER = load_tokenizer(TOY_MODEL)


def batch_of(texts: list[str | None], data_sources: list[str] | None = None, **extra_info) -> DataProto:
    """None is an aborted response: tokens, but none that is trained."""
    ids = [[*TOKENIZER.encode("9" if text is None else text), TOKENIZER.eos_token_id] for text in texts]
    T = max(map(len, ids)) + 1
    mask = torch.tensor([[1] * len(row) + [0] * (T - len(row)) for row in ids])
    tensors = {
        "responses": torch.tensor([row + [0] * (T - len(row)) for row in ids]),
        "attention_mask": torch.cat([torch.ones(len(ids), 3).long(), mask], 1),
        "response_mask": mask * torch.tensor([text is not None for text in texts])[:, None],
    }
    rows = {
        "data_source": data_sources or ["calm"] * len(ids),
        "reward_model": [{"ground_truth": "7"}] * len(ids),
        "extra_info": [{"row": i, **extra_info} for i in range(len(ids))],
    }
    return DataProto.from_dict(tensors, rows)


def counts(timeout=0, crash=0, error=0, dropped_key=0) -> dict[str, Sum]:
    return {f"reward/{kind}_count": Sum(count) for kind, count in locals().items()}


def wait_until_gone(pids) -> None:
    wait_until(lambda: not any(map(is_alive, pids)))


def close(manager: RewardManager) -> None:
    """And no process of it is left."""
    pids = []
    if manager._pool is not None and psutil.pid_exists(manager._pool._process.pid):
        supervisor = psutil.Process(manager._pool._process.pid)
        pids = [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]
    manager.close()
    wait_until_gone(pids)


@pytest.fixture
def manager_of(tmp_path):
    """manager_of(source, *functions, ...) of a scorer file with this source; closed after the test."""
    managers = []

    def make(
        source: str, *functions: str, scorer_kwargs=None, weights=(), workers=2, failure_score=0.0, **settings
    ) -> RewardManager:
        file = tmp_path / "mine.py"
        file.write_text(source)
        scorers = load_scorers([f"{file}:{name}" for name in functions or ["score"]], [], scorer_kwargs, weights)
        settings |= {"workers": workers, "failure_score": failure_score}
        managers.append(RewardManager(scorers, TOKENIZER, **settings))
        return managers[-1]

    yield make
    for manager in managers:
        close(manager)


# ---- hostile scorers -------------------------------------------------------------------------------
HOSTILE = """
import ctypes, os, re, signal, subprocess, sys, threading, time, zlib
from contextlib import suppress

here = os.path.dirname(__file__)

def leave_pid(pid):
    with open(os.path.join(here, "child.pid"), "w") as file:
        file.write(str(pid))

def hang_ignoring_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass

def print_endlessly():
    while True:
        print("x" * 10000)
        os.write(2, b"y" * 10000)

OF_ANOTHER = bytes(7) + b'x+[["ok", {"score": 9.0}]]'

def send(size, data, checksum=b"abcd"):
    for fd in range(256):
        with suppress(OSError):
            os.write(fd, size.to_bytes(8, "big") + checksum + data)
    time.sleep(100)

def read_everything():
    for fd in range(3, 256):
        with suppress(OSError):
            os.set_blocking(fd, False)
            os.read(fd, 10**6)
    return 0.5

def leave_daemon_and_crash():
    leave_pid(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    os._exit(1)

def fork_and_hang_twice():
    pid = os.fork()
    if pid:
        leave_pid(pid)
    time.sleep(100)

def change_process():
    os.chdir("/")
    os.environ.clear()
    os.umask(0o777)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGSEGV, signal.SIG_IGN)
    sys.path.clear()
    return 0.5

def score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "calm":
        return eval(data_source)
    return {"score": extra_info["row"] + 1, "pred": solution_str}
"""

KINDS = {  # what the scorer does -> how it is counted, and what is shown of it
    "time.sleep(100)": ("timeout", "in score"),
    "re.match('(a+)+$', 'a' * 50 + 'b')": ("timeout", "in match"),  # holds the GIL
    "hang_ignoring_signals()": ("timeout", f"stopped after {LIMIT_S:g} s"),
    "print_endlessly()": ("timeout", "in print_endlessly"),
    "send(1000, b'[')": ("timeout", "in send"),
    "send(2**62, b'')": ("crash", "it sent a message of 4611686018427387904 bytes"),
    "send(4, b'abcd')": ("crash", "it sent a message with another checksum"),
    "send(len(OF_ANOTHER), OF_ANOTHER, zlib.crc32(OF_ANOTHER).to_bytes(4, 'big'))": (
        "crash",
        "it sent an answer to another task",
    ),
    "fork_and_hang_twice()": ("timeout", "in fork_and_hang_twice"),
    "time.sleep(100) if os.fork() else 0.5": ("timeout", "in score"),
    "os._exit(3)": ("crash", "exit code 3"),
    "ctypes.string_at(0)": ("crash", "SIGSEGV"),
    "os.killpg(0, signal.SIGKILL)": ("crash", "SIGKILL"),
    "os.closerange(0, 1000)": ("crash", "the process died"),
    "leave_daemon_and_crash()": ("crash", "exit code 1"),
    "sys.exit(0)": ("crash", "SystemExit: 0"),
    "{}['x' * 10**6]": ("error", "xxx"),
    "[bytearray(2**20) for _ in iter(int, 1)]": ("error", "MemoryError"),
    "float('nan')": ("error", "the scorer returned nan"),
    "1e38": ("error", "the scorer returned 1e+38; use numbers up to 1e+12"),
    "None": ("error", "returned a NoneType as score"),
    "{'acc': 1.0}": ("error", "a dict without \"score\": ['acc']"),
    "{'score': 1.0, 'lock': threading.Lock()}": ("error", "returned a lock besides its score"),
    "{'score': 1.0, 'pred': 'x' * 2**22}": ("error", "the limit is 1048576"),
    "{'score': 1.0, 'pred': type('Odd', (), {'tolist': lambda self: 1 / 0})()}": ("error", "ZeroDivisionError"),
    "0.5 if os.fork() else time.sleep(100)": None,  # costs nothing, and stays in the worker
    "change_process()": None,
    "read_everything()": None,
    "os.setpgid(0, os.getpgid(os.getppid())) or 0.5": None,
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile.py").write_text(HOSTILE)
    scorers = load_scorers([f"{folder / 'hostile.py'}:score"], [])
    settings = {"timeout_s": LIMIT_S, "memory_mb": 16, "failure_score": -2.0, "log": folder / "scorers-0.log"}
    manager = RewardManager(scorers, TOKENIZER, workers=2, **settings)
    answers, hanging = manager._answers, {kind for kind, found in KINDS.items() if found and found[0] == "timeout"}

    def patient(tasks, step):
        limits = [LIMIT_S if given[0]["data_source"] in hanging else PATIENT_S for _, _, given, _ in tasks]
        return answers([(k, limit, given, key) for (k, _, given, key), limit in zip(tasks, limits)], step)

    manager._answers = patient
    assert manager.submit(batch_of(["1"])).get()[2] == counts()
    manager.folder = folder
    yield manager
    close(manager)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_scorer_costs_at_most_its_sample(kind, hostile, capfd):
    counted, shown = KINDS[kind] or ("", "")
    hostile._failures.clear()
    here, environment = Path.cwd(), dict(os.environ)
    batch = batch_of(["1", "2", "3", "4=4", "5", "6", "7"], ["calm", "calm", "calm", kind, "calm", "calm", "calm"])
    scores, extras, metrics = hostile.submit(batch).get()
    assert scores.sum(1).tolist() == [1, 2, 3, -2 if counted else 0.5, 5, 6, 7]
    assert scores[3].nonzero().tolist() == [[3]]  # "4", "=", "4", end
    assert extras == {"pred": ["1", "2", "3", None, "5", "6", "7"]}
    assert metrics == (counts(**{counted: 1}) if counted else counts())
    out, err = capfd.readouterr()
    said = f"reward: {counted} in scorer hostile.score, data_source {kind!r}, response '4=4'"
    assert (said in out and shown in out) if counted else not out
    assert len(out) < 6000 and not err
    assert (kind == "print_endlessly()") == ("scorer hostile.score: xxxx" in out)
    child = hostile.folder / "child.pid"
    if child.exists():  # with its worker, whatever session it is in
        wait_until_gone([int(child.read_text())])
        child.unlink()
    assert (Path.cwd(), dict(os.environ)) == (here, environment)
    calm = hostile.submit(batch_of(["1"] * 20)).get()
    assert calm[0].sum(1).tolist() == list(range(1, 21)) and calm[2] == counts()


def test_an_answer_that_is_none_is_a_crash():
    texts = [b"", b"\xff", b"[" * 10**5, b'[["ok"]]', b'[["ok", 1.0]]', b'[["ok", {}]]', b'[["error", 1]]']
    for text in [*texts, b'[["ok", {"score": NaN}]]', b'[["ok", {"score": 1.0}], ["ok", {"score": 1.0}]]']:
        assert pool.read_answers(text, 1) == [["crash", "the worker's answer is no answer"]]


@pytest.mark.parametrize("workers", [0, 1])
def test_keys_that_cannot_be_taken_are_dropped_and_counted(manager_of, workers, capsys):
    source = """
import numpy as np
def score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["row"] == 1:
        return {"score": np.array(2.0), "pred": "two", "n": np.int64(7), "mean": 3, "zero_variance": 0.5,
                "list": np.arange(2), "key": 1}
    if extra_info["row"] == 2:
        return np.bool_(True)
    return {"score": True, "pred": ["1"], "n": 10**400, "nan": float("nan"), "inf": -float("inf"), "1e13": 1e13,
            "reward_model": 5.0, "": 1, "two\\nlines": 1, "x" * 101: 1, "mean": "m", "acc": 1.0}
"""
    manager = manager_of(source, workers=workers)
    scores, extras, metrics = manager.submit(batch_of(["1", "2", "3"])).get()
    assert scores.sum(1).tolist() == [1, 2, 1] and metrics == counts(dropped_key=9)
    of_row_1 = {"pred": "two", "n": 7, "zero_variance": 0.5, "list": [0, 1], "key": 1}
    expected = {key: [None, value, None] for key, value in of_row_1.items()}
    assert extras == expected | {"mean": ["m", 3, None], "acc": [1.0, None, None]}
    assert extra_metrics(extras)["reward/mean/mean"] == (3, 1)
    out = capsys.readouterr().out
    assert out.count("reward: scorer mine.score: ") == 9 and "'pred': ['1'] is a list; an answer is a text" in out
    scores, extras, metrics = manager.submit(batch_of(["1"])).get()  # numbers keep their columns
    assert extras["key"] == extras["n"] == [None] and "list" not in extras and capsys.readouterr().out == ""


def _components(world, extras, keys):
    extras = {key: column for key, column in extras.items() if world.rank == 0 or key == "everywhere"}
    try:
        values = reward_components(extras, keys, torch.zeros(2, 3)).tolist()
        return [[None if value != value else value for value in row] for row in values]  # NaN: not given
    except InputError as error:
        return str(error)


def test_a_key_of_one_rank_only_is_a_reward_and_one_of_no_rank_stops_all():
    extras = {"everywhere": [1, None], "here": [2.0, 3], "mixed": [4, "a"], "text": ["a", "b"], "pred": ["a", None]}
    assert run_ranks(2, _components, extras, ["everywhere", "here", "mixed"]) == [
        [[1, 2, 4], [None, 3, None]],
        [[1, None, None], [None, None, None]],
    ]
    for error in run_ranks(2, _components, extras, ["here", "text"]):
        assert "--adv-kwargs reward_keys=text: the scorers return no such number" in error


# ---- what scorers print ----------------------------------------------------------------------------
NOISY = """
import os, subprocess, sys, zlib
from rewards.code import compute_score as run_program

def write_an_answer():
    answer = bytes(8) + b'+[["ok", {"score": 9.0}]]'
    os.write(1, len(answer).to_bytes(8, "big") + zlib.crc32(answer).to_bytes(4, "big") + answer)
    os.write(2, bytes(8))

def run_programs():
    assert run_program("code", MODELS, ["assert f(3) == 1"])["score"] == 1
    assert run_program("code", MODELS + "f(3)", {"inputs": [""], "outputs": ["MODELS\\nMODELS"]})["score"] == 1
    run_program("code", MODELS, ["assert f(64) == 1"])

MODELS = '''
import os, sys
print("MODELS")
print("MODELS", file=sys.stderr)
def f(fds):
    for fd in range(fds):
        try:
            os.write(fd, b"MODELS")
        except OSError:
            pass
    return 1
'''

def score(data_source, solution_str, ground_truth, extra_info=None, api_key_env=""):
    if data_source != "calm":
        exec(data_source)
    return float(solution_str)
"""
LINES = "print('to stdout'); print('to stderr', file=sys.stderr); print('kind 1'); print('kind 23')"
KEYS = "print('the key is', os.environ['OPENAI_API_KEY'], 'and', os.environ['ODD'])"
GIGABYTE = "for _ in range(1000): os.write(1, b'z' * 2**20)"
BINARY = r"os.write(1, bytes(range(256)) + b'\n\x1b[31mred\x1b]0;title\x07\xe2\x80\xae')"
CLOSE = "os.close(1); os.close(2)"


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noisy")
    (folder / "noisy.py").write_text(NOISY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "a-key-of-forty-two")
        patch.setenv("ODD", "a-key-of-odd-name")
        scorers = load_scorers([f"{folder / 'noisy.py'}:score"], [], {"api_key_env": "ODD"})
        log = folder / "run" / "scorers-0.log"
        manager = RewardManager(scorers, TOKENIZER, workers=1, failure_score=-1.0, log=log)
        manager.folder = folder
        assert manager.submit(batch_of(["1"])).get()[2] == counts() and not log.exists()
        yield manager
        manager.close()


def printed_by(noisy, kind: str, step: int, capfd) -> tuple[list[str], str, list[float]]:
    """(what the log has more after a response of this kind, the console, scores of it and the next)."""
    before = len(noisy.log.read_text()) if noisy.log.exists() else 0
    noisy._failures.clear()
    scores, _, _ = noisy.submit(batch_of(["1", "2"], [kind, "calm"]), step).get()
    out, err = capfd.readouterr()
    assert not err and all(line.isprintable() for line in out.splitlines())
    text = noisy.log.read_text()[before:] if noisy.log.exists() else ""
    assert all(line.isprintable() for line in text.split("\n"))
    return text.splitlines(), out, scores.sum(1).tolist()


@pytest.mark.parametrize(
    ("kind", "logged", "score"),
    [
        (LINES, ["to stdout", "to stderr", "kind 1", "kind 23"], 1),
        ("print('no end of line', end=''); os._exit(3)", ["no end of line"], -1),
        ("subprocess.run('echo from a child; echo its error >&2', shell=True)", ["from a child", "its error"], 1),
        (KEYS, ["the key is *** and ***"], 1),
        ("run_programs()", [], 1),  # what a model's program prints is in no log
    ],
)
def test_what_a_scorer_prints_is_in_the_log_and_its_first_lines_on_the_console(noisy, capfd, kind, logged, score):
    lines, out, scores = printed_by(noisy, kind, 7, capfd)
    assert lines == [f"step 7 noisy.score: {line}" for line in logged] and scores == [score, 2]
    assert [f"scorer noisy.score: {line}" in out for line in logged] == [line != "kind 23" for line in logged]
    if kind == LINES:
        assert f"what scorers print is in {noisy.log}" in out and noisy.log.stat().st_mode & 0o777 == 0o600
        lines, out, _ = printed_by(noisy, kind, 8, capfd)
        assert len(lines) == 4 and not out


@pytest.mark.parametrize("kind", [GIGABYTE, BINARY, "write_an_answer()", CLOSE])
def test_no_print_reaches_another_score_or_the_terminal_as_it_is(noisy, capfd, kind):
    lines, out, scores = printed_by(noisy, kind, 9, capfd)
    assert scores == [1, 2] and len(out) < 4000
    assert sum(map(len, lines)) < 70_000 and bool(lines) == (kind != CLOSE)
    if kind == GIGABYTE:
        assert lines[-1] == f"step 9 noisy.score: [{1000 * 2**20 - 2**16} more bytes in this call are left out]"
    if kind == BINARY:
        assert "\ufffd[31mred\ufffd]0;title\ufffd\ufffd" in out and "\ufffd[31mred" in lines[-1]
    if kind == CLOSE:  # for this worker, which goes on
        noisy.close()
        noisy._start()


def test_a_log_that_is_full_or_cannot_be_written_says_so_once(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LARGEST_FILE", 100)
    path = tmp_path / "scorers-0.log"
    log = supervisor.PrintLog(path)
    said = [log.write(1, "a.b", b"%d bytes or so in a line" % i, 0)[-1:] for i in range(5)]
    assert said[1:] == [[], [f"reward: {path} is full (0 MiB): what scorers print from now on is dropped"], [], []]
    again = supervisor.PrintLog(path).write(1, "a.b", b"resumed", 0)  # of a run that goes on
    assert "is full" in again[-1] and path.read_text().count("\n") == 3
    unwritable = supervisor.PrintLog(path / "scorers-0.log").write(1, "a.b", b"x", 0)
    assert unwritable[-1].startswith(f"reward: {path}/scorers-0.log cannot be written (")


def test_the_console_shows_a_bounded_number_of_lines_of_each_scorer(tmp_path):
    log = supervisor.PrintLog(tmp_path / "scorers-0.log")
    text = "\n".join(chr(65 + i) * 1000 for i in range(30)).encode()
    [_, *shown], others = log.write(1, "a.b", text, 0), log.write(1, "c.d", text[:1000], 5)
    assert [len(line) for line in shown] == [len("scorer a.b: ") + 200] * 20 and not log.write(2, "a.b", text, 0)
    assert len(others) == 2 and others[1] == "scorer c.d: [5 more bytes in this call are left out]"


# ---- the pool and the trainer ----------------------------------------------------------------------
TRAINER = """
import os, signal, sys, time
from lib.reward.pool import Pool
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in a shell's background
pool = Pool([dict(spec=sys.argv[1], modules=[], kwargs={}, form="response")], 2, 256)
ids = pool.submit([(0, 100.0, [dict(data_source=kind, solution_str="", ground_truth="", extra_info={})], "")
                   for kind in sys.argv[2:]])
if "large" in sys.argv:
    next(pool.collect(ids))
if os.fork() == 0:  # as a loader's process would: it keeps the pool's socket open
    time.sleep(1000)
print(pool._process.pid, flush=True)
time.sleep(1000)
"""


HANGING = "fork_and_hang_twice()", "hang_ignoring_signals()"  # two workers, one of them with a child


@pytest.fixture
def trainer_of(tmp_path):
    """trainer_of(source, kinds, descendants): (a trainer, its pool's supervisor, so many descendants of that)."""
    started = []

    def start(source: str, kinds, descendants: int) -> tuple[psutil.Popen, psutil.Process, list[psutil.Process]]:
        (tmp_path / "scorer.py").write_text(source)
        command = [sys.executable, "-c", TRAINER, f"{tmp_path / 'scorer.py'}:score", *kinds]
        trainer = psutil.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        supervisor = psutil.Process(int(trainer.stdout.readline()))
        wait_until(lambda: len(supervisor.children(recursive=True)) == descendants)
        started.extend([trainer, *trainer.children(recursive=True)])
        return trainer, supervisor, supervisor.children(recursive=True)

    yield start
    started[0].stdout.close()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    started[0].wait()


LARGE = 'def score(**kwargs):\n    return {"score": 1.0, "text": "x" * 500_000}'


@pytest.mark.parametrize("while_", ["hanging", "stopped", "unread", "interrupted"])
def test_no_process_outlives_the_trainer(trainer_of, while_):
    """stopped: the supervisor. unread: fifty megabytes of answers wait in it, and a child of the trainer holds the
    socket."""
    given = (LARGE, ["large"] * 100, 2) if while_ == "unread" else (HOSTILE, HANGING, 3)
    trainer, supervisor, workers = trainer_of(*given)
    if while_ == "stopped":
        supervisor.suspend()
    trainer.send_signal(signal.SIGINT if while_ == "interrupted" else signal.SIGKILL)
    trainer.wait(60)
    wait_until_gone([supervisor.pid, *(worker.pid for worker in workers)])


def test_no_worker_outlives_the_supervisor(trainer_of):
    _, supervisor, _ = trainer_of(HOSTILE, HANGING, 3)
    direct = [worker.pid for worker in supervisor.children()]
    supervisor.kill()
    assert len(direct) == 2
    wait_until_gone(direct)


CALM = """
import os, sys
def score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": extra_info["row"] + 1, "heavy": sorted({"torch", "transformers"} & set(sys.modules)),
            "pid": os.getpid(), "argument": sorted(extra_info.keys() - {"row"}), "source": data_source,
            "text": solution_str, "truth": ground_truth}
"""


def test_a_run_whose_pool_is_gone_ends_with_a_line(manager_of):
    manager = manager_of(CALM)
    pending = manager.submit(batch_of(["1"]))
    os.kill(manager._pool._process.pid, signal.SIGKILL)
    manager._pool._process.wait()
    with pytest.raises(RuntimeError, match="the reward pool is gone: its process was killed by signal 9"):
        pending.get()


def test_workers_are_other_light_processes_and_get_the_arguments(manager_of):
    scores, extras, _ = manager_of(CALM).submit(batch_of(["1", "2=2", None, ""], mine=object)).get()
    assert scores.sum(1).tolist() == [1, 2, 0, 4]
    assert extras["heavy"] == [[], [], None, []] and extras["argument"] == [["mine"], ["mine"], None, ["mine"]]
    assert extras["text"] == ["1", "2=2", None, ""]  # an empty response is scored, an aborted one is not
    assert extras["truth"] == ["7", "7", None, "7"] and extras["source"] == ["calm", "calm", None, "calm"]
    assert os.getpid() not in extras["pid"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_score_stands_on_the_last_trained_token(manager_of, workers):
    batch = batch_of(["12=12", "3", None])
    batch.batch["response_mask"][0, 2:4] = 0  # a tool's output between
    batch.batch["response_mask"][1, 1] = 0  # and at the end
    scores, _, _ = manager_of(CALM, workers=workers).submit(batch).get()
    expected = torch.zeros(3, 7)
    expected[0, 5], expected[1, 0] = 1, 2
    assert torch.equal(scores, expected)
    nothing = manager_of(CALM, workers=workers).submit(batch_of([None, None])).get()
    assert torch.equal(nothing[0], torch.zeros(2, 3)) and nothing[1:] == ({}, counts())


def test_submit_does_not_wait_and_batches_do_not_mix(manager_of, tmp_path):
    source = """
import os, time
def score(data_source, solution_str, ground_truth, extra_info=None):
    while not os.path.exists(extra_info["gate"]):
        time.sleep(0.01)
    return {"score": extra_info["row"] + float(data_source), "pred": "x" * 500_000}
"""
    manager = manager_of(source)
    load = "y" * 500_000  # more than the sockets hold, in both directions
    gate = tmp_path / "gate"
    pending = [manager.submit(batch_of(["1"] * 9, [str(100 * n)] * 9, gate=str(gate), load=load)) for n in range(3)]
    gate.touch()
    for n in (1, 0, 2):
        scores, extras, metrics = pending[n].get()
        assert scores.sum(1).tolist() == [100 * n + row for row in range(9)] and metrics == counts()
        assert all(len(pred) == 500_000 for pred in extras["pred"])


def test_importing_a_scorer_has_no_time_limit_and_happens_once(manager_of, tmp_path):
    source = f"""
import os, time
time.sleep(2)
with open({str(tmp_path / "imports")!r}, "a") as file:
    file.write("x")
def score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["row"] % 3 == 1:
        os._exit(1)
    return 1
"""
    scores, _, metrics = manager_of(source, timeout_s=1.5).submit(batch_of(["1"] * 9)).get()
    assert scores.sum(1).tolist() == [1, 0, 1] * 3 and metrics == counts(crash=3)
    assert (tmp_path / "imports").read_text() == "xx"  # load_scorers, the supervisor


FAILS = """
import os
def score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if data_source == "calm" else eval(data_source)
"""
RAISES = "{}['the key is missing']"


@pytest.mark.parametrize(("kind", "shown"), [(RAISES, "key is missing"), ("os._exit(1)", "code 1")])
def test_a_scorer_that_always_fails_stops_the_run(manager_of, kind, shown):
    manager = manager_of(FAILS)
    assert manager.submit(batch_of(["1"] * 15, [kind] * 15)).get()[0].sum() == 0  # too few to tell
    with pytest.raises(InputError, match=rf"(?s)scorer mine\.score failed on all of its first 31 responses.*{shown}"):
        manager.submit(batch_of(["1"] * 16, [kind] * 16)).get()


def verdict_on(world, scorer, answers):
    """What a rank says of its share of the responses. Without a pool, which the rank's fork would share."""
    manager, own = RewardManager(load_scorers([scorer], []), TOKENIZER, workers=0), answers[world.rank :: world.size]
    manager._answers = lambda *_: ((i, [answer], 0.0) for i, answer in enumerate(own))
    try:
        manager.submit(batch_of(["1"] * len(own))).get()
    except InputError as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize(
    ("last", "verdict"), [(["error", "no"], "failed on all of its first 36"), (["ok", {"score": 1.0}], None)]
)
def test_the_verdict_on_a_scorer_is_the_same_on_any_number_of_ranks(tmp_path, last, verdict):
    """Also where the first 16 responses of each rank fail, and the last response of one gets a score."""
    (tmp_path / "mine.py").write_text(FAILS)
    for ranks in (1, 2):
        said = run_ranks(ranks, verdict_on, f"{tmp_path / 'mine.py'}:score", [["error", "no"]] * 35 + [last])
        assert len(set(said)) == 1 and (verdict in said[0] if verdict else said[0] is None)


def test_a_scorer_that_succeeded_once_does_not_stop_the_run(manager_of, capsys):
    manager = manager_of(FAILS)
    manager.submit(batch_of(["1"])).get()
    scores, _, metrics = manager.submit(batch_of(["1"] * 40, [RAISES] * 39 + ["os._exit(1)"])).get()
    assert scores.sum() == 0 and metrics == counts(error=39, crash=1)
    out = capsys.readouterr().out  # the first failure of each kind
    assert out.count("reward: error in") == out.count("reward: crash in") == 1 and out.count("reward: ") == 2


# ---- forms of scorers ------------------------------------------------------------------------------
FORMS = """
import asyncio
number = 1
async def slowly(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": float(solution_str), "pred": None if data_source == "silent" else solution_str}

def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    if "raise" in data_sources:
        raise ValueError("a bad batch")
    results = [{"score": float(text), "rows": len(solution_strs), "row": extra_info["row"]}
               for text, extra_info in zip(solution_strs, extra_infos)]
    if "short" in data_sources:
        return results[:-1]
    return ["bad" if source == "bad" else result for source, result in zip(data_sources, results)]

def scaled(data_source, solution_str, ground_truth, extra_info=None, *, factor=1):
    if data_source == "bad":
        raise ValueError("bad")
    return {"score": factor * float(solution_str), "pred": "second", "digits": len(solution_str)}
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_async_and_batched_scorers(manager_of, workers):
    manager = manager_of(FORMS, "slowly", workers=workers)
    for _ in range(2):
        scores, extras, _ = manager.submit(batch_of(["1", None, "3"])).get()
        assert scores.sum(1).tolist() == [1, 0, 3] and extras == {"pred": ["1", None, "3"]}
    manager = manager_of(FORMS, "compute_score_batch", workers=workers)
    scores, extras, _ = manager.submit(batch_of(["1", None, "3"])).get()
    assert scores.sum(1).tolist() == [1, 0, 3] and extras == {"rows": [2, None, 2], "row": [0, None, 2]}
    assert manager.submit(batch_of([None])).get()[1:] == ({"rows": [None], "row": [None]}, counts())


def test_a_batched_scorer_fails_by_row_or_by_call(manager_of):
    manager = manager_of(FORMS, "compute_score_batch", failure_score=-1.0)
    for source, expected, failed in (("bad", [1, -1, 3], 1), ("raise", [-1, -1, -1], 3), ("short", [-1, -1, -1], 3)):
        scores, _, metrics = manager.submit(batch_of(["1", "2", "3"], ["calm", source, "calm"])).get()
        assert scores.sum(1).tolist() == expected and metrics == counts(error=failed), source
    without_score = manager_of(FORMS, "compute_score_batch", failure_score=None)
    scores, _, metrics = without_score.submit(batch_of(["1", "2"], ["calm", "bad"])).get()
    assert scores[0].sum() == 1 and scores[1].isnan().any() and metrics == counts(error=1)


def test_several_scorers_are_weighted_and_logged_by_name_also_where_one_fails(manager_of):
    settings = {"weights": (1.0, 0.5), "scorer_kwargs": {"mine.scaled": {"factor": 10}}, "failure_score": -4.0}
    manager = manager_of(FORMS, "slowly", "scaled", **settings)
    batch = batch_of(["1", None, "2", "12"], ["calm", "calm", "bad", "silent"])
    scores, extras, metrics = manager.submit(batch).get()
    assert scores.sum(1).tolist() == [1 + 5, 0, 2 - 2, 12 + 60] and metrics == counts(error=1)
    assert extras == {
        "mine.slowly": [1, None, 2, 12],
        "mine.scaled": [10, None, -4, 120],
        "pred": ["1", None, "2", None],  # the first scorer's, also where it has none
        "mine.scaled/digits": [1, None, None, 2],
    }


def test_without_workers_an_exit_and_an_exception_stop_the_run_and_name_the_response(manager_of):
    source = "import sys\ndef score(**kwargs):\n    sys.exit(0)"
    with pytest.raises(RuntimeError, match=r"sys.exit\(0\) in scorer mine.score, data_source 'calm', response '1'"):
        manager_of(source, workers=0).submit(batch_of(["1"]))
    with pytest.raises(KeyError, match="the key is missing") as caught:
        manager_of(FAILS, workers=0).submit(batch_of(["1", "4=4"], ["calm", RAISES]))
    assert caught.value.__notes__ == [f"in scorer mine.score, data_source {RAISES!r}, response '4=4'"]
    extras = manager_of(CALM, workers=0).submit(batch_of(["1"])).get()[1]
    assert extras["pid"] == [os.getpid()]


DRAWS = """
import random

once = random.random()

def score(data_source, solution_str, ground_truth, extra_info=None):
    import numpy as np
    return {"score": random.random(), "drawn": np.random.rand(), "once": once}

def two(data_source, solution_str, ground_truth, extra_info=None):
    return random.random()
"""


def test_what_a_scorer_draws_depends_on_seed_and_response_alone(manager_of):
    """Not on the number of workers, on who scores what when, on the rank, or on the process."""

    def drawn(uids: list[str], workers: int, seed: int = 1) -> dict[str, list]:
        batch = batch_of(["1"] * len(uids))
        batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        manager = manager_of(DRAWS, "score", "two", workers=workers, seed=seed)
        before = random.getstate(), np.random.get_state()[1].tolist()
        extras = manager.submit(batch).get()[1]
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        return extras

    groups = ["1-0", "1-0", "1-1", "1-1"]
    extras = drawn(groups, 1)
    names = ("mine.score", "mine.score/drawn", "mine.two")
    assert len({number for name in names for number in extras[name]}) == 12
    for name in names:
        whole = extras[name]
        assert [drawn(groups, workers)[name] for workers in (0, 3)] == [whole, whole]
        assert drawn(groups[2:] + groups[:2], 2)[name] == whole[2:] + whole[:2]
        assert not {*drawn(groups, 1, seed=2)[name]} & {*whole}
    assert drawn(groups, 1)["mine.score/once"] == extras["mine.score/once"]


class Rows:
    def __init__(self, *data_sources):
        self.data_sources = set(data_sources)


TRUTHS = """
def takes(data_source, solution_str, ground_truth, extra_info=None): ...
def may_take(data_source, solution_str, ground_truth=None, extra_info=None): ...
def takes_none(solution_str, **kwargs): ...
def takes_batch(data_sources, solution_strs, ground_truths, extra_infos): ...
def takes_no_batch(data_sources, solution_strs, extra_infos, ground_truths=None): ...
"""


def test_a_row_without_a_ground_truth_is_named_if_a_scorer_takes_one(tmp_path):
    (tmp_path / "mine.py").write_text(TRUTHS)
    rows, whole = Rows("toy/arithmetic"), Rows("toy/arithmetic")
    rows.without_ground_truth = "a.jsonl row 3"
    mine = [f"{tmp_path / 'mine.py'}:{name}" for name in ("may_take", "takes_none", "takes_no_batch")]
    own = [f"{ROOT}/rewards/{name}.py:compute_score" for name in ("format", "judge")]
    load_scorers([*mine, own[0]], [whole, rows])
    load_scorers([own[1]], [rows], {"base_url": "http://127.0.0.1:9", "model": "m"})
    for spec in ("data_source", f"{tmp_path / 'mine.py'}:takes", f"{tmp_path / 'mine.py'}:takes_batch"):
        load_scorers([spec], [whole])
        with pytest.raises(InputError, match=r"a.jsonl row 3: .* no 'ground_truth', which scorer .*need"):
            load_scorers([*mine, spec], [whole, rows])


@pytest.mark.parametrize(
    ("specs", "settings", "message"),
    [
        (["{file}:number"], {}, "it is not a function of Python"),
        (["{file}:slowly"], {"kwargs": {"factor": 2}}, "cannot be called as slowly(data_source=, solution_str=, "),
        (["{file}:slowly"] * 2, {}, "--reward: 2 scorers are called mine.slowly; rename"),
        (["data_source"], {}, "no scorer for data_source 'unheard/of': give --reward path/to/file.py:function, or add"),
        (["{file}:of_trl"], {}, "of_trl(completions, ...) has TRL's form: three lines turn it into a scorer (docs/com"),
        (["{file}:mixed"], {}, "cannot be called as mixed(data_source=, solution_strs=, ground_truth="),
    ],
)
def test_mistakes_are_found_before_anything_starts(tmp_path, specs, settings, message):
    more = "def of_trl(prompts, completions, **kwargs): return [0.0]\n"
    more += "def mixed(data_source, solution_strs, ground_truths, extra_info): ...\n"
    (tmp_path / "mine.py").write_text(FORMS + more)
    specs = [spec.format(file=tmp_path / "mine.py") for spec in specs]
    with one_line(re.escape(message)):
        load_scorers(specs, [Rows("toy/arithmetic", "unheard/of")], **settings)


@pytest.mark.parametrize(("name", "near"), [("GSM8K", "gsm8k"), ("HENDRYCKS", "hendrycks_math"), ("zzz", None)])
def test_a_data_source_without_a_scorer_is_answered_with_those_of_like_names(name, near):
    with pytest.raises(InputError) as caught:
        load_scorers(["data_source"], [Rows(name)])
    said = str(caught.value)
    assert said.count(",") <= 4 and "SCORERS in rewards/__init__.py" in said
    assert f"(near: {near}" in said if near else "near" not in said


KEYWORDS = """
def one(solution_str, a=0, **kwargs): return 10 * a
def two(solution_str, a=0, b=0, **kwargs): return 10 * a + b
def few(data_source, solution_str, ground_truth, extra_info=None, b=0): return b
def free(solution_str, time_limit_s=1.0, **kwargs): ...
"""


def test_keywords_are_declared_by_a_scorer_and_may_be_of_one_alone(tmp_path, manager_of):
    kwargs = {"a": 1, "mine.two": {"a": 2, "b": 3}}
    _, extras, _ = manager_of(KEYWORDS, "one", "two", scorer_kwargs=kwargs, workers=0).submit(batch_of(["7"])).get()
    assert (extras["mine.one"], extras["mine.two"]) == ([10], [23])

    def checked(names: str, kwargs: dict) -> list[dict]:
        specs = [name if name == "data_source" else f"{tmp_path / 'mine.py'}:{name}" for name in names.split()]
        scorers = load_scorers(specs, [Rows("openai/gsm8k", "lighteval/MATH")], kwargs)
        without_rows = load_scorers(["data_source"], [])  # --val-reward where nothing is validated
        check_keywords(scorers + without_rows * ("data_source" in specs), kwargs)
        return [scorer.kwargs for scorer in scorers]

    assert checked("one two", kwargs) == [{"a": 1}, {"a": 2, "b": 3}]
    assert checked("data_source one", both := {"method": "strict", "a": 2}) == [both] * 2
    assert checked("data_source free", {"anything": 1}) == [{"anything": 1}] * 2
    of_name = {"data_source": {"method": "flexible"}, "mine.few": {"b": 1}}
    assert checked("data_source few", of_name) == [*of_name.values()]
    for names, wrong, message in (
        ("data_source", {"metod": 1}, "no scorer declares metod; the scorers take method"),
        ("data_source one", {"metod": 1}, "no scorer declares metod; the scorers take a, method"),
        ("one two", {"mine.three": {}}, "no scorer is called mine.three; the scorers are mine.one, mine.two"),
        ("one two", {"mine.one": {"b": 1}}, "--reward-kwargs mine.one: no scorer declares b; the scorers take a"),
        ("one", {"mine.one": 3}, '--reward-kwargs mine.one: give a JSON object, such as {"mine.one": {"coef": 1}}'),
        ("few", {"mine.few": {"c": 1}}, "it cannot be called as few(data_source=, solution_str=, ground_truth=, "),
    ):
        with one_line(re.escape(message)):
            checked(names, wrong)


# ---- arguments by name, groups ---------------------------------------------------------------------
NAMED = """
def one(data_source, solution_str, ground_truth, extra_info=None, *, num_tokens, finish_reason, prompt, images, step,
        response_length, max_response_length, time_limit_s=9.0, **kwargs):
    seen = f"{finish_reason} {prompt} {images} {step}"
    others = {"length": response_length, "limit": max_response_length, "others": len(kwargs)}
    return {"score": num_tokens, "seen": seen, "seconds": time_limit_s, **others}

def many(data_sources, solution_strs, ground_truths, extra_infos, num_tokens, finish_reason, prompt, images, step):
    seen = [f"{f} {p} {i} {step}" for f, p, i in zip(finish_reason, prompt, images)]
    return [{"score": n, "seen": text} for n, text in zip(num_tokens, seen)]

def read(data_source, solution_str, ground_truth, extra_info=None, *, full_prompt):
    return {"score": 1.0, "read": full_prompt}

def read_group(data_source, solution_strs, ground_truth, extra_info, full_prompt):
    return [{"score": 1.0, "read": full_prompt}] * len(solution_strs)

def group(data_source, solution_strs, ground_truth, extra_info, num_tokens, finish_reason, prompt, images, step,
          response_length, max_response_length):
    rows = zip(num_tokens, finish_reason, response_length)
    same = {"limit": max_response_length}
    return [{"score": n, "seen": f"{f} {prompt} {images} {step}", "length": length, **same} for n, f, length in rows]

def own_step(data_source, solution_str, ground_truth, extra_info=None, step=None, **kwargs):
    return {"score": step, "others": len(kwargs)}

def place(data_source, solution_strs, ground_truth, extra_info=None):
    if "bad" in data_source:
        raise ValueError("a bad group")
    ordered = sorted(solution_strs)
    return [{"score": ordered.index(text), "size": len(solution_strs)} for text in solution_strs]
"""


def groups_of(texts: list[str | None], uids: str, data_sources=None) -> DataProto:
    batch = batch_of(texts, data_sources)
    columns = {
        "uid": list(uids),
        "finish_reason": [f"f{i}" for i in range(len(texts))],
        "max_response_length": [9] * len(texts),
        "raw_prompt": [f"p{uid}" for uid in uids],
        "multi_modal_data": [{"image": [uid]} if uid == "a" else {} for uid in uids],
    }
    batch.non_tensor_batch |= {name: np.array([*values, None], dtype=object)[:-1] for name, values in columns.items()}
    return batch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_scorer_gets_what_its_parameters_name(manager_of, workers):
    batch = groups_of(["1", "2=2", None, "12345"], "aabb")
    batch.batch["response_mask"][3, 1] = 0  # given by a tool
    manager = manager_of(NAMED, "one", "many", "group", workers=workers)
    _, extras, metrics = manager.submit(batch, 7).get()
    tokens = batch.batch["response_mask"].sum(1).tolist()
    assert metrics == counts() and tokens[2] == 0 and len(set(tokens)) == 4
    seconds = 30.0 if workers else 9.0  # without workers nothing stops it
    assert extras["mine.one/seconds"] == [seconds, seconds, None, seconds]
    assert extras["mine.one/others"] == [0, 0, None, 0]
    seen = ["f0 pa ['a'] 7", "f1 pa ['a'] 7", None, "f3 pb [] 7"]
    for name in ("one", "many", "group"):
        assert extras[f"mine.{name}/seen"] == seen and extras[f"mine.{name}"] == [tokens[0], tokens[1], None, tokens[3]]
    for name in ("one", "group"):
        assert extras[f"mine.{name}/length"] == [tokens[0], tokens[1], None, tokens[3] + 1]
        assert extras[f"mine.{name}/limit"] == [9, 9, None, 9]
    settings = {"scorer_kwargs": {"step": 3}, "workers": workers}
    scores, extras, _ = manager_of(NAMED, "own_step", **settings).submit(batch, 7).get()
    assert extras["others"] == [0, 0, None, 0]  # and the user's own step is the one in effect
    assert scores.sum(1).tolist() == [3, 3, 0, 3]


def test_a_scorer_gets_the_prompt_as_the_model_read_it_and_only_if_it_asks(manager_of, one_rank, monkeypatch):
    """Also a shadow scorer. A prompt is decoded once for its group, and not at all for others' scorers."""
    decoded, decode = [], TOKENIZER.decode

    def count(token_ids, **how):
        decoded.append(token_ids)
        return decode(token_ids, **how)

    monkeypatch.setattr(TOKENIZER, "decode", count)
    chat = [{"role": "user", "content": "1+1"}]
    ids = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    batch = groups_of(["1", "2=2", None, "3"], "aabb")
    batch.non_tensor_batch["raw_prompt_ids"] = np.array([ids, ids, ids[:-1], ids[:-1], None], dtype=object)[:-1]
    manager = manager_of(NAMED, "read", "read_group", workers=0)
    shadow = manager_of(NAMED, "read_group", workers=0)
    manager_of(NAMED, "place", workers=0).submit(batch).get()
    extras, _ = Rewards(manager, shadow=shadow).submit(batch, 1).add_to(batch)
    assert [prompt for prompt in decoded if prompt in (ids, ids[:-1])] == [ids, ids[:-1]] * 2
    whole = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    cut = decode(ids[:-1])
    assert whole != cut and whole.startswith(cut)
    for name in ("read", "read_group"):
        assert extras[f"mine.{name}/read"] == [whole, whole, None, cut]
    assert extras["shadow/mine.read_group"] == [1, 1, None, 1]


def test_a_group_that_is_on_two_ranks_is_not_scored_by_halves(manager_of):
    rewards = Rewards(manager_of(NAMED, "group", workers=0))
    said = "group scores whole groups, and group b has rows on two"

    def split_group(world):
        with pytest.raises(InputError, match=said):
            rewards.submit(groups_of(["1", "2"], ["ab", "cb"][world.rank]), 1)

    run_ranks(2, split_group)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_group_scorer_sees_a_prompts_responses_and_no_others(manager_of, workers):
    batch = groups_of(["3", "9", "1", None, "2", "5", "4"], "abacbaa")  # c has only an aborted response
    scores, extras, metrics = manager_of(NAMED, "place", workers=workers).submit(batch).get()
    assert scores.sum(1).tolist() == [1, 1, 0, 0, 0, 3, 2] and metrics == counts()
    assert extras == {"size": [4, 2, 4, None, 2, 4, 4]}
    moved = [4, 3, 6, 0, 5, 2, 1]  # another order of the rows: the same scores
    assert manager_of(NAMED, "place").submit(batch[moved]).get()[1]["size"] == [2, None, 4, 4, 4, 4, 2]


def test_a_group_that_fails_costs_its_own_responses(manager_of, capsys):
    batch = groups_of(["1", "2", "1", "2", "3"], "aabba", ["calm", "calm", "bad", "bad", "calm"])
    scores, extras, metrics = manager_of(NAMED, "place", failure_score=-1.0, workers=1).submit(batch).get()
    assert scores.sum(1).tolist() == [0, 1, -1, -1, 2] and metrics == counts(error=2)
    assert extras == {"size": [3, 3, None, None, 3]}
    assert "ValueError: a bad group" in capsys.readouterr().out


SHADOWS = """
import math

def score(solution_str, **kwargs):
    return {"score": int(solution_str), "pred": solution_str}

def doubled(data_source, solution_str, **kwargs):
    return {"score": 9 - 2 * int(solution_str), "acc": 1.0, "pred": "another"}

def fails(data_source, solution_str, ground_truth, extra_info):
    return {"score": math.nan if data_source == "bad" else int(solution_str) ** 2}

def constant(solution_str, **kwargs):
    return 1.0

def greedy(solution_str, **kwargs):
    return {"score": 0.0, "shadow/mine.doubled": 1.0}
"""


@pytest.mark.parametrize("names", [("fails",), ("doubled", "fails", "constant")])
def test_a_shadow_scorer_is_logged_and_changes_no_reward(manager_of, one_rank, names):
    def rewarded(shadow):
        batch = batch_of(["1", "2", "3", None], ["calm", "calm", "bad", "calm"])
        extras, metrics = Rewards(manager_of(SHADOWS), shadow=shadow).submit(batch, 1).add_to(batch)
        return batch, extras, metrics

    batch, extras, metrics = rewarded(None)
    # its failures have no score to fall back to: the mean is of scores alone
    shadowed, of_shadow, logged = rewarded(manager_of(SHADOWS, *names, failure_score=None))
    assert set(batch.batch.keys()) == set(shadowed.batch.keys())
    assert all(torch.equal(batch.batch[key], shadowed.batch[key]) for key in set(batch.batch.keys()))
    assert {key: of_shadow[key] for key in extras} == extras
    assert all(logged[key] == metric for key, metric in metrics.items() if not key.startswith("perf/"))
    expected = {"doubled": [7, 5, 3, None], "fails": [1, 4, None, None], "constant": [1, 1, 1, None]}
    assert {k: v for k, v in of_shadow.items() if k not in extras} == {f"shadow/mine.{k}": expected[k] for k in names}
    numbers = reduce_metrics(logged | extra_metrics(of_shadow))
    assert numbers["shadow/mine.fails/mean"] == 2.5 and numbers["shadow/error_count"] == 1
    assert numbers["shadow/mine.fails/correlation"] == pytest.approx(1)
    assert numbers.get("shadow/mine.doubled/correlation") == (pytest.approx(-1) if len(names) > 1 else None)
    assert "shadow/mine.constant/correlation" not in numbers and numbers["reward/error_count"] == 0
    timed = {f"perf/scorer_seconds/{name}" for name in ("mine.score", *(f"shadow/mine.{name}" for name in names))}
    assert {key for key in numbers if key.startswith("perf/")} == {f"{n}/{of}" for n in timed for of in ("mean", "max")}


def test_nothing_trains_on_a_shadow_scorer(manager_of, one_rank, capsys):
    batch = batch_of(["1", "2"])
    rewards = Rewards(manager_of(SHADOWS), shadow=manager_of(SHADOWS, "constant"))
    with pytest.raises(InputError, match=r"reward_keys=shadow/mine\.constant: the scorers return no such number"):
        rewards.submit(batch, 1).add_to(batch, ["shadow/mine.constant"])
    _, extras, metrics = manager_of(SHADOWS, "greedy").submit(batch).get()
    assert extras == {} and metrics == counts(dropped_key=2)
    assert "'shadow/mine.doubled': 1.0 has the name of another score" in capsys.readouterr().out


def test_a_correlation_is_that_of_all_ranks():
    x, y = [[1.0, None, 2.0, math.nan], [4.0]], [[1.0, 9.0, 3.0, 5.0], [2.0]]
    [one, other] = run_ranks(2, lambda world: correlation(x[world.rank], y[world.rank]))
    assert one == other == (pytest.approx(np.corrcoef([1, 2, 4], [1, 3, 2])[0, 1], rel=1e-12), 1)  # float64


def text_of(responses: list[list[int]], mask: list[list[int]], tokenizer) -> list[str]:
    return RewardManager([], tokenizer, workers=0)._texts(torch.tensor(responses), torch.tensor(mask))


def test_a_scorer_gets_the_special_tokens_that_a_response_consists_of():
    kept = ["<think>", "</think>", "[THINK]", "<tool_call>", "<answer>"]
    kept += ["<|tool_call_begin|>", "<|python_tag|>", "<|channel|>"]
    left_out = ["</s>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|user|>"]
    left_out += ["<|image_pad|>", "<|call|>"]
    tokenizer = load_tokenizer(TOY_MODEL)
    tokenizer.add_special_tokens({"extra_special_tokens": kept + left_out})
    for mark in [*kept, *left_out, tokenizer.eos_token, tokenizer.pad_token]:
        ids = [*tokenizer.encode("1"), tokenizer.convert_tokens_to_ids(mark), *tokenizer.encode("=4")]
        ids.append(tokenizer.eos_token_id)
        text = f"1{mark}=4" if mark in kept else "1=4"
        assert text_of([ids], [[1] * len(ids)], tokenizer) == [text], mark


def test_what_is_sampled_before_and_behind_another_text_is_on_two_lines():
    four, other, more = (TOKENIZER.encode(text) for text in ("=4", "1+1", "25"))
    end = [TOKENIZER.eos_token_id]
    ids = [*four, *end, *other, *more, *end]
    mask = [1] * (len(four) + 1) + [0] * len(other) + [1] * (len(more) + 1)
    only_end = [*four, *other, *end, *more]  # a turn that says nothing
    of_it = [1] * len(four) + [0] * len(other) + [1] + [0] * len(more)
    pad = [0] * (len(ids) - len(only_end))
    rows, masks = [ids, ids, only_end + pad], [mask, [1] * len(ids), of_it + pad]
    assert text_of(rows, masks, TOKENIZER) == ["=4\n25", "=41+125", "=4"]
