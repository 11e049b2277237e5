"""Servers of a job's own (--rollout-gpus). No process of a job outlives it, however it ends, and a server that dies
comes back: with real processes and launchers, and a stand-in for vLLM's server. vLLM itself runs once."""

import json
import os
import re
import signal
import subprocess
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import torch.distributed as dist

import grpo
from lib import InputError
from lib.distributed import World, init_distributed
from servers import managed as managed_servers
from servers.managed import ManagedServers, serve
from tests.common import (
    ONE_NODE,
    ROOT,
    SMALL,
    START_S,
    command,
    environment,
    fork,
    free_port,
    is_alive,
    metrics,
    one_line,
    parse_flags,
    ran,
    rollouts,
    skip_without_vllm,
    wait_until,
)
from tests.distributed.test_ports import NO_NAMESPACES, listened
from tests.distributed.test_waits import exit_code, start_ranks, store  # noqa: F401  two fixtures
from tests.scripts.test_launch_files import LAUNCH, two_nodes  # noqa: F401  a fixture
from tests.scripts.test_scripts import saved

WAIT_S = 60  # for what has to come in that time at the latest
MARK = "PLAINRL_TEST_JOB"
STAND_IN = """
import http.server, json, os, signal, subprocess, sys, yaml
config = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
if "fails" in config:
    print("(EngineCore pid=1) ERROR 11-22 10:00:00 [core.py:1] ValueError: out of luck")
    sys.exit("RuntimeError: see the root cause above")
subprocess.Popen(["sleep", "1000"])  # as an engine's process, which a kill leaves behind
if "stubborn" in config:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "sick" in config else 200)
        self.end_headers()
        self.wfile.write(json.dumps([os.getpid(), dict(os.environ)]).encode())
    def log_message(self, *_):
        pass
http.server.HTTPServer((config["host"], config["port"]), Health).serve_forever()
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """(folder with the stand-in, the job's mark in the environment of what its processes start)."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    yield tmp_path, mark
    assert_none_left(mark)


def processes_of(mark: str) -> list[psutil.Process]:
    """Those that were started with this mark and live."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def assert_none_left(mark: str) -> None:
    wait_until(lambda: not processes_of(mark), WAIT_S)


def asked(url: str) -> tuple[int, dict]:
    """The process and the environment of a stand-in."""
    return httpx.get(url, timeout=WAIT_S).json()


def servers_of(engine_ranks: int, folder: Path, settings: dict, start_s: float = WAIT_S):
    """On a training rank; an engine rank does not come back."""
    managed_servers.PROGRAM = [str(folder / "stand_in.py")]
    world = init_distributed(WAIT_S / 2, engine_ranks=engine_ranks)
    if world.rank >= world.size:
        serve(world, settings.get("tensor_parallel_size", 1))
    own = ManagedServers(engine_ranks // settings.get("tensor_parallel_size", 1), start_s)
    own.order(folder, {"enforce_eager": True} | settings)  # no cache of what vLLM has compiled
    return own, world


# ---- ranks that are forked from this process, which has the job's store as a launcher has it ------
@pytest.fixture
def start_on_one_node(start_ranks, monkeypatch):  # noqa: F811
    def start(ranks: int, *main):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        return start_ranks(ranks, *main)

    return start


def train(args) -> None:
    how, folder, settings = args
    own, world = servers_of(1, folder, settings)
    [url] = own.urls()
    assert url.startswith("http://127.0.0.1:") and own.starts() == [1]
    asked(url)
    dist.barrier()
    (folder / "runs").touch()
    if how == "mistake" and world.rank == 1:
        raise InputError("found late")
    if how != "end":
        signal.pause()


@pytest.mark.parametrize("how", ["end", "mistake", "interrupt", "kill rank 0", "kill the engine rank"])
def test_no_server_outlives_its_job(job, start_on_one_node, monkeypatch, how):
    """Of two ranks that train and one with a server, which also has a process of its own."""
    folder, mark = job
    monkeypatch.setattr(managed_servers, "GRACE_S", 1)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as it is where a shell's & started the tests
    ranks = start_on_one_node(3, train, (how, folder, {"stubborn": "engine" in how}))
    signal.signal(signal.SIGINT, ignored)
    wait_until((folder / "runs").exists, START_S)
    assert how == "end" or len(processes_of(mark)) == 3  # server, its child, guard; the kernel knows no mark of a fork
    if how == "interrupt":
        for rank in ranks:
            os.kill(rank.pid, signal.SIGINT)
    if how in ("mistake", "kill rank 0"):
        if how == "mistake":
            assert exit_code(ranks[1]) == 2
        else:
            ranks[0].kill()
        for rank in ranks:  # as the launcher does then
            rank.terminate()
    if how == "kill the engine rank":
        ranks[2].kill()
    expected = {"end": [0, 0, 0], "interrupt": [130, 130, 130]}
    if how in expected:
        assert [exit_code(rank) for rank in ranks] == expected[how]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fails", "ended with exit code 1 before it could serve: ValueError: out of luck"),
        ("sick", "did not answer in time before it could serve: no word"),
    ],
)
def test_a_server_that_does_not_start_is_one_line(job, start_on_one_node, monkeypatch, what, message):
    folder, _ = job
    monkeypatch.setattr(managed_servers, "LAST_WORDS_S", 0.5)

    def main(_):
        servers_of(1, folder, {what: True}, start_s=2 if what == "sick" else WAIT_S)[0].urls()

    ranks = start_on_one_node(2, main)
    assert [exit_code(rank) for rank in ranks] == [2, 2]
    *_, line = (folder / "0").read_text().splitlines()
    assert line.startswith("error: vLLM server 0 (http://127.0.0.1:") and message in line
    assert line.endswith(f"; its log: {folder / 'server_0.log'}")


def test_a_killed_server_starts_again_at_another_port_and_not_for_ever(job, start_on_one_node, monkeypatch):
    """As one that hangs. Its children go with it. What was healthy for long begins a new row of restarts."""
    folder, _ = job
    monkeypatch.setattr(managed_servers, "ANSWERS", {"/is_sleeping": 5})
    monkeypatch.setattr(managed_servers, "LOOK_S", 0.1)
    monkeypatch.setattr(managed_servers, "GRACE_S", 1)  # a stopped process does not end by itself

    def kill(own, by=signal.SIGKILL) -> int:
        [before], [url] = own.starts(), own.urls()
        pid, _ = asked(url)
        child = psutil.Process(pid).children()[0]
        os.kill(pid, by)
        wait_until(lambda: own.starts() != [before], START_S)
        wait_until(lambda: not is_alive(child.pid), WAIT_S)  # the kernel takes its time to end it
        assert own.urls() != [url]  # who asks for the one before must not reach this one
        return own.starts()[0]

    def main(steady):
        managed_servers.STEADY_S = 0 if steady else WAIT_S
        own, _ = servers_of(1, folder, {})
        by = [signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL]
        assert [kill(own, by[i] if steady else signal.SIGKILL) for i in range(4)] == [2, 3, 4, 5]

    ranks = start_on_one_node(2, main, True)
    assert [exit_code(rank) for rank in ranks] == [0, 0]
    said = [line for line in (folder / "1").read_text().splitlines() if line.startswith("vLLM server 0")]
    killed = "was killed by signal 9; "
    ends = ["did not answer /is_sleeping for 5 s; ", "was killed by signal 15; ", killed, killed]
    assert len(said) == 4 and all(end in line and "(1 of 3)" in line for end, line in zip(ends, said))
    waits = f"waiting for 1 of 1 vLLM server(s) to start; logs: {folder / 'server_0.log'}\n"
    assert waits in (folder / "0").read_text()
    monkeypatch.setattr(managed_servers, "LAST_WORDS_S", 0.5)
    ranks = start_on_one_node(2, main, False)
    assert [exit_code(rank) for rank in ranks] == [2, 2]
    assert f"{killed}it was started 3 times in a row before; its log" in (folder / "0").read_text()


@pytest.mark.parametrize("ranks_of_a_server", [1, 2])
def test_two_engine_ranks_are_two_servers_or_one(job, start_on_one_node, ranks_of_a_server):
    """Nothing in a server's environment makes it a rank of the job."""
    folder, _ = job

    def main(_):
        own, _ = servers_of(2, folder, {"tensor_parallel_size": ranks_of_a_server})
        urls = own.urls()
        assert len(set(urls)) == len(own.starts()) == 2 // ranks_of_a_server and set(own.starts()) == {1}
        for _, env in map(asked, urls):
            words = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "ACCELERATE_")
            assert not [name for name in env for word in words if word in name]
            assert env["VLLM_API_KEY"] == own.key and env["VLLM_SERVER_DEV_MODE"] == "1"
            assert env["PYTHONPATH"].startswith(str(ROOT))

    ranks = start_on_one_node(3, main)
    assert [exit_code(rank) for rank in ranks] == [0] * 3


def test_a_server_has_the_gpus_of_its_ranks(monkeypatch):
    world = World(6, 4, torch.device("cuda", 2))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a,GPU-b")
    assert managed_servers._environment(world, 2, "key")["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert managed_servers._environment(world, 1, "key")["CUDA_VISIBLE_DEVICES"] == "2"


def test_the_model_reaches_nodes_that_do_not_see_the_folder(tmp_path, monkeypatch):
    """A tokenizer may be larger than what the store takes in one value. On one node the key is not in the store."""
    box = dist.HashStore()
    monkeypatch.setattr(managed_servers, "broadcast", lambda key: key)
    monkeypatch.setattr(managed_servers, "is_on_one_node", lambda: one_node)
    monkeypatch.setattr(managed_servers, "job_store", lambda: box)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    model, here = tmp_path / "model", tmp_path.rename(tmp_path.with_name("here"))
    contents = {"config.json": b"{}", "tokenizer.json": os.urandom(managed_servers.PIECE + 1), "more/empty": b""}
    for name, content in contents.items():
        (here / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "model" / name).write_bytes(content)
    one_node, own = True, ManagedServers(1, 0)
    own.order(here, {})
    assert "key" not in json.loads(box.get("order"))["files"] and (here / "key").stat().st_mode & 0o077 == 0
    one_node = False
    own.order(here, {})
    order = json.loads(box.get("order")) | {"folder": str(tmp_path)}
    managed_servers._write_files(order, box)
    assert (tmp_path / "key").read_text() == own.key and (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert {name: (model / name).read_bytes() for name in contents} == contents
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == len(contents) + 1


# ---- launchers -----------------------------------------------------------------------------------
PROBE = """
import os, pathlib, sys
import httpx
from lib.distributed import init_distributed, run
from servers import managed as managed_servers
from servers.managed import ManagedServers, serve
def main(folder):
    managed_servers.PROGRAM = [str(folder / "stand_in.py")]
    world = init_distributed(300, engine_ranks=1)
    if world.rank == world.size:
        serve(world, 1)
    own = ManagedServers(1, 300)
    own.order(folder, {"enforce_eager": True})
    [url] = own.urls()
    assert httpx.get(url).is_success
    (folder / "runs").write_text(f"{url} node {os.environ['GROUP_RANK']}")
run(main, pathlib.Path(sys.argv[1]))
"""


# ---- two nodes -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_last_node_is_the_engine(job, two_nodes):  # noqa: F811
    """Its server listens on the address between the nodes, and nowhere else."""
    if "unshare" not in two_nodes:
        pytest.skip("needs network namespaces: a second node is not reached on loopback")
    folder, _ = job
    (folder / "probe.py").write_text(PROBE)
    more = {"GPUS": "1", "PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    arguments = [*two_nodes, str(LAUNCH / "torchrun_nodes.sh"), str(folder / "probe.py"), str(folder)]
    ran(subprocess.run(arguments, env=environment() | more, capture_output=True, text=True, timeout=600))
    assert re.fullmatch(r"http://10\.77\.0\.2:\d+ node 0", (folder / "runs").read_text())


# ---- flags ---------------------------------------------------------------------------------------
SECOND_NODE = {"WORLD_SIZE": "6", "RANK": "4", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ("2", {"WORLD_SIZE": "2"}, "--rollout-gpus 2: of 2 ranks at least one must train: at most 1"),
        ("8 --dry-run 8", {}, "--rollout-gpus 8: of 8 ranks at least one must train: at most 7"),
        ("3 --rollout-tensor-parallel-size 2", {"WORLD_SIZE": "7"}, "--rollout-gpus 3 must be a multiple of it"),
        # training ranks 0, 1; servers on 2, 3 and 4, 5; nodes of three ranks
        ("4 --rollout-tensor-parallel-size 2", SECOND_NODE, "a server would be on two nodes, as 1 of the"),
        ("3 --prompts-per-step 9", {"WORLD_SIZE": "5"}, "9 / (2 x 1) = 4.5"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(monkeypatch, flags, environ, message):
    """For those of a single process see BAD_FLAGS of tests/cli/test_args.py."""
    for name, value in ({"RANK": "0"} | environ if environ else {}).items():
        monkeypatch.setenv(name, value)
    with one_line(re.escape(message)):
        parse_flags(grpo.Args, ["--rollout-gpus", *flags.split()])


def test_servers_have_the_whole_gpu(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    flags = ["--rollout-gpus", "4"], ["--rollout-engine", "vllm"]
    assert [parse_flags(grpo.Args, [*own]).rollout.gpu_share for own in flags] == [0.9, 0.4]


def test_a_dry_run_counts_the_gpus_that_train(tmp_path):
    said = ran(fork("grpo", tmp_path, "--dry-run", "8", "--rollout-gpus", "4")).stdout
    assert "256 responses a step on 4 rank(s) of cpu (and 4 vLLM server(s) on 4 more)" in said
    assert re.search(r"\d s on 4 x .+ of the peak, without the rollout", said)


# ---- vLLM ----------------------------------------------------------------------------------------
# the engine's process of a server is a fork, as on a GPU; vLLM on a CPU would start one that imports everything again
ENGINE_IS_A_FORK = """
import multiprocessing, sys
if "vllm.entrypoints.openai.api_server" in sys.orig_argv:
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)
"""


def kill_the_server(run: Path, mark: str) -> None:
    """After the first step."""
    wait_until(lambda: (run / "metrics.jsonl").exists() and metrics(run), START_S)
    [server] = [p for p in processes_of(mark) if p.cmdline()[1:3] == managed_servers.PROGRAM]
    server.kill()


@pytest.mark.slow
def test_a_job_with_its_own_server_trains_as_with_an_engine_in_process(tmp_path):
    """At level 0, two ranks and a server: bit for bit the same tokens, log-probs, rewards, metrics and weights. Also
    where the server is killed in the midst: what it had not answered is sampled again with the same seeds. The job
    leaves no process, and listens on loopback only."""
    skip_without_vllm()
    own, inside = tmp_path / "own", tmp_path / "inside"
    mark, args = uuid.uuid4().hex, [*SMALL, "--total-steps", "5", "--save-every", "5", "--save-rollouts", "all"]
    args += ["--reward-workers", "0"]
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(ENGINE_IS_A_FORK)
    launcher = ["env", "GPUS=3", f"{MARK}={mark}", f"PYTHONPATH={tmp_path / 'site'}", *ONE_NODE[2:]]
    arguments = command("grpo", tmp_path, *args, "--run-name", "own", "--rollout-gpus", "1", launcher=launcher)
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_the_server, own, mark)
        if NO_NAMESPACES:
            ran(subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=400))
        else:
            assert listened(arguments, tmp_path) == {"127.0.0.1"}
        killed.result()
    assert_none_left(mark)
    key, log = (own / "engine/key").read_bytes(), (own / "engine/server_0.log").read_text()
    assert [file.name for file in own.rglob("*") if file.is_file() and key in file.read_bytes()] == ["key"]
    assert "Failed to load weights" not in log and "WARNING" in log
    assert metrics(own, timings=True)[-1]["perf/server_restarts"] == 1
    ran(fork("grpo", tmp_path, *args, "--run-name", "inside", "--rollout-engine", "vllm", ranks=2))
    assert metrics(own) == metrics(inside)
    assert all(row["rollout/logp_diff_max"] < 1e-3 for row in metrics(inside))  # of an engine on each of two ranks
    ours, theirs = rollouts(own), rollouts(inside)
    assert ours.keys() == theirs.keys() and len(ours) == 5 * 32
    for key, row in ours.items():
        del row["weight_versions"]
        assert {name for name in row if row[name] != theirs[key][name]} == set()
    ours, theirs = (saved(run / "checkpoints/step_000005") for run in (own, inside))
    assert ours == theirs
