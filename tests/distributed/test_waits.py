"""No silent wait: it is said who is waited for, a stage that does not end ends the job with the reason, and so does a
rank that dies. With real processes, stopped and killed. A new start of the job: tests/scripts/test_launch_files.py."""

import errno
import gc
import multiprocessing
import os
import pdb  # noqa: T100
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

import lib.distributed
from lib.distributed import enter_stage, init_distributed, make_mesh, run, start_step, timed
from lib.model import load_model
from tests.common import ONE_NODE, ROOT, SMALL, environment, fork, free_port, save_tiny, wait_until

WAIT_S = 60  # for what has to come in that time at the latest
BEGIN_S = 20  # for a fork, which takes milliseconds


# ---- ranks that are forked from this process, which has the job's store as a launcher has it ------
@pytest.fixture
def store():
    """In a list, from which a test may take it."""
    return [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]


@pytest.fixture
def start_ranks(tmp_path, store):
    """start_ranks(size, main, args): the processes; what a rank writes to stderr is in tmp_path/<rank>."""
    started = []

    def on_rank(begun, rank: int, size: int, port: int, main, args) -> None:
        begun.set()
        os.dup2(os.open(tmp_path / str(rank), os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in job.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
        run(main, args)

    def forked(*args) -> multiprocessing.Process:
        context = multiprocessing.get_context("fork")
        while True:
            begun = context.Event()
            started.append(rank := context.Process(target=on_rank, args=(begun, *args)))
            rank.start()
            if begun.wait(BEGIN_S):
                return rank
            rank.kill()  # it has inherited a lock that another thread of this process held

    def start(size: int, main, args=None) -> list[multiprocessing.Process]:
        gc.freeze()  # as in run_ranks
        return [forked(rank, size, store[0].port, main, args) for rank in range(size)]

    yield start
    for rank in started:
        rank.kill()
        rank.join()


def exit_code(rank: multiprocessing.Process) -> int | None:
    rank.join(WAIT_S)
    return rank.exitcode


def rank_1_is_missing(args):
    """It never comes to the collective that the others wait in."""
    timeout, what_it_does, *folder = args
    world = init_distributed(timeout)
    if folder:
        lib.distributed.note_waits_in(folder[0] / f"waits_of_{world.rank}")
    start_step(7)
    with timed("rollout"):
        if world.rank == 1:
            what_it_does()
        time.sleep(0.3)
    with timed("reward"):
        dist.barrier()


def hang():
    time.sleep(1000)


def test_who_is_waited_for_is_named_and_ends_at_the_deadline_with_its_stack(tmp_path, start_ranks):
    first, slow, last = start_ranks(3, rank_1_is_missing, (4, hang, tmp_path))
    assert exit_code(slow) == 124 and exit_code(first) and exit_code(last)
    where = r"rank 1: step 7 rollout \(test_waits.py:\d+\) for \d+ s; rank 0, 2: step 7 reward \(test_waits.py:\d+\)"
    waiting = re.findall(rf"^waiting: {where}", (tmp_path / "0").read_text(), re.MULTILINE)
    assert 2 <= len(waiting) <= 5  # after 4/30 s, 8/30 s, ..., 64/30 s
    noted = (tmp_path / "waits_of_0").read_text()
    assert re.findall(rf"^\d{{4}}-.*:\d\d waiting: {where}", noted, re.MULTILINE) and noted.count("\n") >= len(waiting)
    stacks, reason = (tmp_path / "1").read_text().rsplit("StageTimeout: ", 1)
    assert re.match(rf"rank 1 ends after 4 s in step 7 rollout; {where}", reason)
    assert re.search(r"test_waits.py\", line \d+ in hang", stacks)


def stop():
    time.sleep(0.1)  # by then its watcher has said that it is in this stage
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_process_is_named(tmp_path, start_ranks, monkeypatch):
    """Also in the file from which a launcher repeats the reason."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "report.json"))
    waiting, _ = start_ranks(2, rank_1_is_missing, (2, stop))
    assert exit_code(waiting) == 124
    reason = (tmp_path / "0").read_text().rsplit("StageTimeout: rank 0 ends after 2 s in step 7 reward; ", 1)[1]
    assert re.match(r"rank 1: step 7 rollout .* silent for \d+ s; rank 0: step 7 reward", reason)
    assert "StageTimeout: rank 0 ends after 2 s in step 7 reward; rank 1: " in (tmp_path / "report.json").read_text()


def test_loading_a_model_may_take_longer_than_a_stage(tmp_path, start_ranks, monkeypatch):
    """As a download on one node does, while the others wait for it; it is said where they are."""
    path = save_tiny(tmp_path / "model")
    load = AutoConfig.from_pretrained

    def slowly(*args, **kwargs):
        time.sleep(3 * int(os.environ["RANK"]))
        return load(*args, **kwargs)

    def load_and_train(_):
        world = init_distributed(1)
        model = lib.distributed.shard_model(load_model(path, on_meta=True), make_mesh(world), torch.float32)
        assert lib.distributed.reduced._stage[0] == "start"
        assert len(list(model.parameters())) > 0

    monkeypatch.setattr(AutoConfig, "from_pretrained", slowly)
    assert [exit_code(rank) for rank in start_ranks(2, load_and_train)] == [0, 0]
    waiting = re.findall(rf"^waiting: .*rank 1: loading --model {path}", (tmp_path / "0").read_text(), re.MULTILINE)
    assert 2 <= len(waiting) <= 12  # after 1/30, 2/30, 4/30, ... of 3 s, on a slow machine too


def test_the_time_limit_holds_in_every_group(start_ranks):
    """Of a mesh, its rows, the background: torch gives a new group a limit of its own. Rank 0 waits alone."""

    def in_every_group(_):
        world = init_distributed()
        lib.distributed.collectives._timeout = timedelta(seconds=2)  # groups must connect within it, too
        replicas, tensor = make_mesh(world, replicas=2), make_mesh(world, tensor_parallel=2)
        groups = [replicas.get_group("replicate"), replicas.get_group("shard"), tensor.get_group("tensor")]
        groups += [lib.distributed.new_cpu_group(), lib.distributed.new_cpu_subgroup(2)]
        groups += [lib.distributed.make_row_group(world, replicas, 2).ranks]
        if world.rank == 0:
            start = time.monotonic()
            for work in [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups]:
                with pytest.raises(RuntimeError):
                    work.wait()
            assert time.monotonic() - start < WAIT_S
        lib.distributed.wait_for_all()

    assert [exit_code(rank) for rank in start_ranks(4, in_every_group)] == [0] * 4


def test_a_rank_that_does_not_start_is_named(tmp_path, start_ranks):
    """Rank 1 of 2 is not there, and rank 0 waits for it while it joins."""
    alone, _ = start_ranks(2, lambda _: os.environ["RANK"] == "0" and init_distributed(2))
    assert exit_code(alone) == 124
    reason = (tmp_path / "0").read_text().rsplit("StageTimeout: rank 0 ends after 2 s in start; ", 1)[1]
    assert re.search(r"rank 1: not started for \d+ s, silent for \d+ s", reason)


def test_a_rank_0_that_never_opens_its_store_is_named(tmp_path, start_ranks):
    """Without a launcher's store, as where srun starts the ranks: rank 0 has ended before rank 1 comes."""

    def join(_):
        if os.environ["RANK"] == "1":
            os.environ.update(MASTER_PORT=str(free_port()), LOCAL_WORLD_SIZE="2")
            del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
            init_distributed(2)

    _, rank = start_ranks(2, join)
    assert exit_code(rank) == 1
    said = (tmp_path / "1").read_text()
    assert re.search(r"error: rank 1 in .+: nobody answers at 127.0.0.1:\d+: rank 0 has not started", said)
    assert "Traceback" not in said


def test_the_end_of_the_store_ends_the_job_at_once(tmp_path, store, start_ranks):
    """With the launcher of the first node; long before the deadline, also where nobody is in a collective."""

    def compute(_):
        init_distributed(10 * WAIT_S)
        enter_stage("step 7 update")
        (tmp_path / f"computes{os.environ['RANK']}").touch()
        hang()

    ranks = start_ranks(2, compute)
    wait_until(lambda: len(list(tmp_path.glob("computes*"))) == 2, WAIT_S)
    store.clear()
    assert [exit_code(rank) for rank in ranks] == [124, 124]
    for rank in ("0", "1"):
        *_, last = (tmp_path / rank).read_text().splitlines()
        assert re.match(
            rf"StoreLost: rank {rank} in step 7 update \(test_waits.py:\d+\): the job's store, which is", last
        )


def test_a_new_start_finds_no_ranks_of_the_last_in_the_store(start_ranks):
    """Rank 0 is there before rank 1, of which the store has an address from before."""

    def join(wait_s):
        time.sleep(wait_s * int(os.environ["RANK"]))
        init_distributed(5)
        dist.barrier()

    assert [exit_code(rank) for rank in start_ranks(2, join, 0)] == [0, 0]
    assert [exit_code(rank) for rank in start_ranks(2, join, 0.5)] == [0, 0]


# ---- the end of one rank -------------------------------------------------------------------------
def test_a_rank_that_is_killed_is_the_last_line_of_the_others(tmp_path, start_ranks):
    def main(_):
        world = init_distributed(WAIT_S)
        enter_stage("step 7 reward")
        dist.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    assert [exit_code(rank) for rank in start_ranks(2, main)] == [1, -signal.SIGKILL]
    *_, last = (tmp_path / "0").read_text().splitlines()
    why = r"its own message says why, or it has none and was killed \(kill -9, out of memory: see dmesg\)"
    assert re.match(rf"error: rank 0 in step 7 reward: another rank has ended: {why} \(.*\)$", last)


def test_no_line_about_waiting_follows_the_reason(tmp_path, start_ranks, monkeypatch):
    """The watcher would print one after 0.2 s."""
    say = lib.distributed.launch.report_mistake
    monkeypatch.setattr(lib.distributed.launch, "report_mistake", lambda line: (say(line), time.sleep(1)))

    def main(_):
        init_distributed(6)
        enter_stage("step 7 reward")
        os._exit(3)

    [rank] = start_ranks(1, main)
    assert exit_code(rank) == 3
    [line] = (tmp_path / "0").read_text().splitlines()
    assert line.startswith("error: rank 0 in step 7 reward")


def in_a_child(function, *args):
    """As processes of a loader or of an environment end."""
    child = multiprocessing.get_context("fork").Process(target=function, args=args)
    child.start()
    child.join()
    assert child.exitcode == 0


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/file")


def interrupt(_=None):
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_a_destructor():
    type("Interrupted", (), {"__del__": interrupt})()
    time.sleep(WAIT_S)


IN_STEP_7 = "error: rank 0 in step 7 rollout: "
ENDED, HERE = rf"{IN_STEP_7}the run was ended by ", r"in .*/test_waits.py:\d+"
ENDS = {  # what happens in user code; the rank's exit code; what the run says, if anything
    "os._exit(0)": (lambda: os._exit(0), 1, rf"{ENDED}os\._exit\(0\) {HERE}"),
    "in a thread": (lambda: ThreadPoolExecutor(1).submit(os._exit, 0).result(), 1, rf"{ENDED}os\._exit\(0\) in .*"),
    "os._exit(256)": (lambda: os._exit(256), 1, rf"{ENDED}os\._exit\(256\) {HERE}"),
    "os._exit(3)": (lambda: os._exit(3), 3, rf"{ENDED}os\._exit\(3\) {HERE}"),
    "sys.exit()": (lambda: sys.exit(), 1, rf"{ENDED}sys\.exit\(\) {HERE}"),
    "sys.exit(text)": (lambda: sys.exit("out"), 1, rf"{ENDED}sys\.exit\('out'\) {HERE}"),
    "sys.exit(3)": (lambda: sys.exit(3), 3, rf"{ENDED}sys\.exit\(3\) {HERE}"),
    "a child": (lambda: in_a_child(os._exit, 0), 0, None),
    "a full disk": (full, 1, rf"{IN_STEP_7}\[Errno 28\] No space left on .*: 'runs/x/file'; make room, .*"),
    "Ctrl-C": (interrupt, 130, "interrupted"),
    "Ctrl-C in a destructor": (interrupt_a_destructor, 130, "interrupted"),
    "a closed terminal": (lambda: os.kill(os.getpid(), signal.SIGHUP), 0, None),
    "the end": (lambda: None, 0, None),
}


def end_in(way):
    init_distributed()
    enter_stage("step 7 rollout")
    ENDS[way][0]()


@pytest.mark.parametrize("way", ENDS)
def test_an_early_end_is_one_line_and_never_has_exit_code_0(tmp_path, start_ranks, way):
    _, code, said = ENDS[way]
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as it is where a shell's & started the tests
    [rank] = start_ranks(1, end_in, way)
    signal.signal(signal.SIGINT, ignored)
    assert exit_code(rank) == code
    lines = (tmp_path / "0").read_text().splitlines()
    assert len(lines) == (said is not None)
    assert said is None or re.fullmatch(said, lines[0])


def test_stages_that_end_may_take_longer_together(start_ranks):
    def steps(_):
        init_distributed(8)
        for step in range(12):
            start_step(step)
            with timed("rollout"):
                assert lib.distributed.reduced._stage[0] == f"step {step} rollout"
                time.sleep(0.7)
                dist.barrier()
            assert lib.distributed.reduced._stage[0] == f"step {step} after rollout"

    assert [exit_code(rank) for rank in start_ranks(2, steps)] == [0, 0]


def test_a_debuggers_prompt_may_stay(tmp_path, start_ranks):
    def debug(_):
        init_distributed(1)
        keyboard, fingers = os.pipe()
        threading.Timer(2, os.write, (fingers, b"continue\n")).start()
        pdb.Pdb(stdin=os.fdopen(keyboard), stdout=sys.stderr).set_trace()

    assert exit_code(*start_ranks(1, debug)) == 0


def test_without_a_time_limit_nobody_watches(start_ranks):
    def count_threads(_):
        init_distributed()
        assert threading.active_count() == 1

    assert exit_code(*start_ranks(1, count_threads)) == 0


# ---- a launcher ----------------------------------------------------------------------------------
PROBE = """
import os, signal, sys, time
import torch.distributed as dist
from lib.distributed import enter_stage, init_distributed, run
def main(pids):
    world = init_distributed(8)
    open(f"{pids}{world.rank}", "w").write(str(os.getpid()))
    enter_stage("step 3 rollout")
    dist.barrier()
    if world.rank == 1:
        os.kill(os.getppid(), signal.SIGHUP)  # the terminal was closed: it goes on
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    enter_stage("step 3 reward")
    dist.barrier()
run(main, sys.argv[1])
"""


def test_the_end_of_the_launcher_ends_its_ranks_at_once(tmp_path):
    """Also where the store is not the launcher's. Rank 0 waits in a collective, until its watcher sees it."""
    (tmp_path / "probe.py").write_text(PROBE)
    arguments = [*ONE_NODE, str(tmp_path / "probe.py"), str(tmp_path / "pid")]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(arguments, env=environment() | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log)
    assert job.wait(WAIT_S) == -signal.SIGKILL
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), WAIT_S)
    said = (tmp_path / "log").read_text()
    # in probe.py, or in run() with what the collective raised when rank 1 was gone before
    assert re.search(r"LauncherLost: rank 0 in step 3 reward \((probe|launch)\.py:", said)
    assert "StageTimeout" not in said
    assert "LauncherLost: rank 1" in said or "StoreLost: rank 1" in said  # whichever it sees first


def test_a_scorer_that_hangs_in_the_training_process_ends_the_run(tmp_path):
    (tmp_path / "hangs.py").write_text("import time\ndef score(**kwargs):\n    time.sleep(1000)\n")
    args = [*SMALL, "--reward", f"{tmp_path / 'hangs.py'}:score", "--reward-workers", "0", "--run-name", "run"]
    done = fork("grpo", tmp_path, *args, "--stage-timeout", "8")
    assert done.returncode == 124
    assert re.search(r"^StageTimeout: rank 0 ends after 8 s in step 1 reward; .*\(hangs.py:3\)", done.stderr, re.M)
