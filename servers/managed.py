"""vLLM servers that the job runs on its last ranks, the engine ranks (--rollout-gpus).

Training ranks and engine ranks talk through the job's store:
    order          rank 0: what to start
    started i      the engine rank of server i: the number of its latest start
    server i       its URL and the number of this start, while it is healthy
    failed i       a message, if it does not start or ends too often
    bad start i    rank 0: stop server i if the number of its start is at most this
    OVER           ends all

Every request to a server needs the run's key. Any local user can read the store of a job on one
node, so rank 0 writes the key to a file; only a store of several nodes has it.

No server outlives its engine rank: a guard, a shell in the server's session, reads a pipe whose
only writer is the engine rank. When the pipe breaks, the guard ends the session."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

import httpx
import torch.distributed as dist
import yaml

from lib import InputError, how_it_ended, is_first_on_node
from lib.cli.secrets import private
from lib.distributed import (
    OVER,
    JobOver,
    StoreLost,
    World,
    broadcast,
    current_stage,
    enter_stage,
    is_on_one_node,
    job_store,
    own_devices,
)
from lib.rollout.vllm_start import cached, engine_settings, save_files
from servers.client import ANSWER_S, HEALTH_S
from servers.group import address_towards

PROGRAM = ["-m", "vllm.entrypoints.openai.api_server"]  # for the Python of the engine rank
ROOT = Path(__file__).parent.parent
POLL_S = 0.2
GRACE_S = 10  # for a server to end by itself before it is killed
RESTARTS = 3  # in a row; a server that was healthy for STEADY_S begins a new row
STEADY_S = 600.0
LOOK_S = 10.0  # time between two checks that a server answers
ANSWERS = {"/health": HEALTH_S, "/is_sleeping": ANSWER_S}  # by its API, by its engine
LAST_WORDS_S = 10.0  # for the training ranks to end the job with a server's failure
END = 500  # lines of a log: the traceback of each of its processes, and little more
PIECE = 4 << 20  # bytes of a value in the store, which takes 8 MiB at most
OF_THE_LAUNCHER = re.compile(r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|PET|ACCELERATE)_.*")
# in vLLM's log
ERROR = re.compile(r"(?:\(.+? pid=\d+\) )?(?:ERROR \S+ \S+ \[\S+\] )?([\w.]+(?:Error|Exception): .+)")
GUARD = """
exec 3<&0
(
    ( read -r _
      kill -TERM $$
      for _ in $(seq $((10 * $0))); do kill -0 $$ || break; sleep 0.1; done
      kill -KILL -$$ ) <&3 3<&- > /dev/null 2>&1 &
)
exec "$@" < /dev/null 3<&-
"""  # $0: GRACE_S. $$: the process that becomes the server. The guard is nobody's child


class ManagedServers:
    """The `number` vLLM servers of the job, as its training ranks see them. start_s: how long one may take
    to start; 0: no limit. Making it is a collective."""

    def __init__(self, number: int, start_s: float):
        self._store, self.number, self.start_s = job_store(), number, start_s
        self.key: str = broadcast(secrets.token_urlsafe(32))

    def order(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Rank 0 tells the engine ranks what to start. folder: for logs and settings; engine ranks that do
        not see it write its model/, with config and tokenizer. settings: names of vLLM's EngineArgs."""
        if dist.get_rank() > 0:
            return
        self._folder = folder = folder.resolve()
        private(folder / "key").write_text(self.key)
        files = [file for file in sorted((folder / "model").rglob("*")) if file.is_file()]
        if not is_on_one_node():
            files.append(folder / "key")
        pieces: dict[str, list[str]] = {}  # the keys of each file's parts
        for number, file in enumerate(files):
            content: Any = file.read_bytes()  # torch's stubs know str only
            keys = pieces[str(file.relative_to(folder))] = []
            for part in range(0, len(content), PIECE):
                keys.append(f"file {number} {part}")
                self._store.set(keys[-1], content[part : part + PIECE])
        order: dict[str, Any] = {"folder": str(folder), "files": pieces, "settings": dict(settings)}
        order |= {"start_s": self.start_s, "program": PROGRAM}
        self._store.set("order", json.dumps(order))

    def states(self) -> list[tuple[str, int]]:
        """(URL, starts) of each server, in one order. starts: how often it has become healthy, each time
        without weights. Waits until all are healthy. Raises InputError if one does not start."""
        stage, states = current_stage(), self._states()
        if None in states:
            enter_stage(f"{stage}: start of vLLM servers")
            if dist.get_rank() == 0:
                starting = [i for i, state in enumerate(states) if state is None]
                logs = " ".join(str(self._folder / f"server_{i}.log") for i in starting)
                what = f"waiting for {len(starting)} of {self.number} vLLM server(s) to start; logs: {logs}"
                print(what, file=sys.stderr, flush=True)
            while None in (states := self._states()):
                self._wait()
            enter_stage(stage)
        return states

    def _states(self) -> list[tuple[str, int] | None]:
        """None for a server that is not healthy."""
        return [_told(self._store, f"server {i}") for i in range(self.number)]

    def urls(self) -> list[str]:
        return [url for url, _ in self.states()]

    def starts(self) -> list[int]:
        return [starts for _, starts in self.states()]

    def start_anew(self, starts: list[int]) -> None:
        """Ends the servers of these starts. They come back without weights. A collective."""
        if dist.get_rank() == 0:
            for i, number in enumerate(starts):
                self._store.set(f"bad start {i}", str(number))
            for i, number in enumerate(starts):
                while _told(self._store, f"started {i}", 0) <= number:
                    self._wait()
        dist.barrier()

    def _wait(self) -> None:
        """A moment. Raises InputError if a server has failed."""
        for i in range(self.number):
            if self._store.check([f"failed {i}"]):
                raise InputError(self._store.get(f"failed {i}").decode())
        time.sleep(POLL_S)


def order_servers(
    own: ManagedServers, model, tokenizer, folder: Path, processor=None, *, more: Mapping[str, Any], **start: Any
) -> None:
    """Orders servers started as VLLMEngine starts its engine, which take weights by broadcast. Raises InputError if
    vLLM cannot serve the model so."""
    settings = engine_settings(model, processor=processor, **start)
    if dist.get_rank() == 0:
        save_files(folder / "model", model, tokenizer, processor)
    settings["worker_extension_cls"] = "servers.worker.WorkerExtension"
    settings["weight_transfer_config"] = {"backend": "broadcast"}
    settings["middleware"] = "servers.batches.Batches"
    settings["uvicorn_log_level"] = "warning"
    settings["disable_log_stats"] = True  # as in process; they are a fifth of the API server's work
    if processor is not None:
        settings["enable_scale_out"] = True  # for the route that takes images
    own.order(folder, settings | dict(more))


# ---- engine ranks --------------------------------------------------------------------------------
def serve(world: World, tensor_parallel_size: int) -> NoReturn:
    """What an engine rank does: the first of each `tensor_parallel_size` runs a vLLM server over their GPUs.
    Raises JobOver at the end, InputError if the server does not start or ends too often, StoreLost."""
    number, place = divmod(world.rank - world.size, tensor_parallel_size)
    store = job_store()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server ends first
    try:
        while place > 0 or not store.check(["order"]):
            _serving(store, "waiting for the training ranks")
        order = json.loads(store.get("order"))
        try:
            _write_files(order, store)
        except OSError as error:
            what = f"{order['folder']} cannot be written on {socket.gethostname()}: {error.strerror}"
            raise InputError(f"--rollout-gpus: {what}; give an --output-dir that all nodes have") from error
        key = (Path(order["folder"]) / "key").read_text()
        server = Server(number, order, _environment(world, tensor_parallel_size, key), _own_address())
        try:
            keep_running(server, store, order["start_s"])
        finally:
            server.stop()
    except InputError as error:
        store.set(f"failed {number}", str(error))
        _last_words(str(error), store)
        raise
    except dist.DistError as error:
        raise StoreLost(f"engine rank {world.rank}: {error}") from error


def keep_running(server: "Server", store: dist.Store, start_s: float) -> NoReturn:
    """Starts the server, again when it ends. Raises JobOver; InputError as `serve`."""
    starts = failures = 0
    while True:
        store.set(f"started {server.number}", str(starts + 1))
        if healthy := server.start(store, start_s):
            starts += 1
            store.set(f"server {server.number}", json.dumps([server.url, starts]))
            since = time.monotonic()
            while not server.is_lost() and _told(store, f"bad start {server.number}", 0) < starts:
                _serving(store, f"serving {server.url}")
            store.set(f"server {server.number}", "null")  # a get must read JSON
            if not server.is_lost():
                why = "is started again, as weights did not reach it"
                print(f"{server} {why}; its log: {server.log}", file=sys.stderr)
                server.stop()
                continue
            failures = 0 if time.monotonic() - since > STEADY_S else failures
        what = f"{server} {server.why_it_ended(healthy)}"
        server.stop()
        failures += 1
        if not starts or failures > RESTARTS:
            before = f"; it was started {RESTARTS} times in a row before" if starts else ""
            raise InputError(f"{what}{before}; its log: {server.log}")
        again = f"it is started again ({failures} of {RESTARTS}) and gets the weights anew"
        print(f"{what}; {again}; its log: {server.log}", file=sys.stderr, flush=True)


class Server:
    """A vLLM server: a process in a session of its own, with a guard that ends it when this process ends.
    Each start has a new port: a request to the one before must not reach a server without weights."""

    process: subprocess.Popen
    url = ""

    def __init__(self, number: int, order: Mapping[str, Any], env: Mapping[str, str], host: str):
        folder = Path(order["folder"])
        self.number, self.env, self.host = number, env, host
        self.log, self.config = folder / f"server_{number}.log", folder / f"server_{number}.yaml"
        self.model, self.settings = folder / "model", {"host": host, **order["settings"]}
        self.command = [sys.executable, *order["program"], "--config", str(self.config)]
        self._headers = {"Authorization": f"Bearer {env['VLLM_API_KEY']}"}
        self._guard = -1

    def __str__(self) -> str:
        return f"vLLM server {self.number} ({self.url})"

    def start(self, store: dist.Store, start_s: float) -> bool:
        """Whether it is healthy. Else it ended, or took longer than start_s (0: no limit)."""
        self._take_port()
        self._silent = ""
        enter_stage(f"starting {self}", limited=False)
        read, self._guard = os.pipe()
        with self.log.open("a") as log:
            self._log_begins = log.tell()
            self.process = subprocess.Popen(
                ["sh", "-c", GUARD, str(GRACE_S), *self.command],
                stdin=read,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                umask=0o077,  # of sockets between its processes, which obey whoever can connect
                start_new_session=True,
            )
        os.close(read)
        begin = time.monotonic()
        while self.process.poll() is None and (not start_s or time.monotonic() < begin + start_s):
            if self._answers("/health", POLL_S * 10):
                threading.Thread(target=self._watch, args=(self.process,), daemon=True).start()
                return True
            _wait_unless_over(store)
        return False

    def _take_port(self) -> None:
        before, is_v6 = self.url, ":" in self.host
        host = f"[{self.host}]" if is_v6 else self.host
        while self.url == before:
            family = socket.AF_INET6 if is_v6 else socket.AF_INET
            with socket.create_server((self.host, 0), family=family) as free:
                port = free.getsockname()[1]
            self.url = f"http://{host}:{port}"
        model = self.model if self.settings.get("enforce_eager") else cached(self.model)
        settings = {"model": str(model)} | self.settings | {"port": port}
        settings = {name.replace("_", "-"): value for name, value in settings.items()}
        self.config.write_text(yaml.safe_dump(settings))

    def stop(self) -> None:
        """Ends what there is of it."""
        if self._guard < 0:
            return
        os.close(self._guard)
        self._guard = -1
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the guard keeps its number taken
        self.process.wait()

    def is_lost(self) -> bool:
        """Whether it has ended or hangs."""
        return self.process.poll() is not None or bool(self._silent)

    def _watch(self, process: subprocess.Popen) -> None:
        """In a thread, as answers may take long: notes if the process, or its engine, hangs."""
        while process.poll() is None:
            for path, limit in ANSWERS.items():
                begin = time.monotonic()
                hangs = not self._answers(path, limit) and time.monotonic() - begin >= limit
                if hangs and process is self.process:
                    self._silent = f"did not answer {path} for {limit:g} s"
                    return
            time.sleep(LOOK_S)

    def why_it_ended(self, was_healthy: bool) -> str:
        """With the first error at the log's end, which caused the others, or else its last line."""
        code = self.process.poll()
        if self._silent:
            return self._silent
        ended = "did not answer in time" if code is None else how_it_ended(code)
        ended += "" if was_healthy else " before it could serve"
        if code in (-signal.SIGKILL, -signal.SIGTERM):  # from outside: the log does not know why
            return ended
        with self.log.open(errors="replace") as log:
            log.seek(self._log_begins)
            lines = [line for line in map(str.strip, log) if line][-END:]
        errors = (found[1] for line in lines if (found := ERROR.match(line)))
        return f"{ended}: {next(errors, (lines or ['no word'])[-1])}"

    def _answers(self, path: str, timeout_s: float) -> bool:
        with suppress(httpx.TransportError):
            options: Any = {"headers": self._headers, "timeout": timeout_s, "trust_env": False}
            return httpx.get(self.url + path, **options).is_success
        return False


def _serving(store: dist.Store, stage: str) -> None:
    enter_stage(stage, limited=False)  # anew, so that no rank is told to wait for this one
    _wait_unless_over(store)


def _told(store: dist.Store, key: str, default: Any = None) -> Any:
    """The JSON value of a key, which nobody deletes; the default until it is set."""
    return json.loads(store.get(key)) if store.check([key]) else default


def _wait_unless_over(store: dist.Store) -> None:
    if store.check([OVER]):
        raise JobOver
    time.sleep(POLL_S)


def _last_words(message: str, store: dist.Store) -> None:
    """Leaves it to the training ranks to end the job with this message, which rank 0 prints. If they do not
    ask for their servers soon, it is printed here."""
    until = time.monotonic() + LAST_WORDS_S
    with suppress(dist.DistError):
        while time.monotonic() < until:
            _wait_unless_over(store)
        if not is_first_on_node():
            print(f"error: {message}", file=sys.stderr, flush=True)


def _write_files(order: Mapping[str, Any], store: dist.Store) -> None:
    folder = Path(order["folder"])
    for name, pieces in order["files"].items():
        file, content = folder / name, b"".join(store.get(piece) for piece in pieces)
        if not (file.is_file() and file.read_bytes() == content):
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f"{file.name}.{os.getpid()}")  # another engine rank may write it
            private(new).write_bytes(content)
            new.replace(file)


def _environment(world: World, tensor_parallel_size: int, key: str) -> dict[str, str]:
    """This process's, less the launcher's variables; with the GPUs of the server."""
    env = {name: value for name, value in os.environ.items() if not OF_THE_LAUNCHER.fullmatch(name)}
    own = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *own])  # for the worker extension
    env["VLLM_SERVER_DEV_MODE"] = "1"  # takes weights
    env["VLLM_API_KEY"] = key  # not in the settings, which vLLM logs
    if world.device.type != "cpu":
        return own_devices(env, int(os.environ["LOCAL_RANK"]), tensor_parallel_size)
    env["TORCH_COMPILE_DISABLE"] = "1"  # it would compile C++ for many seconds at the first request
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a process less
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | env


def _own_address() -> str:
    """Where this node's servers listen: loopback on one node, else the address towards rank 0."""
    if is_on_one_node():
        return "127.0.0.1"
    host = os.environ["MASTER_ADDR"]
    address = address_towards(host, int(os.environ["MASTER_PORT"]))
    if ip_address(address).is_loopback:
        where = f"{host}, rank 0's address, is loopback on {socket.gethostname()}"
        why = "other nodes would not reach a server there"
        way_out = "set PET_LOCAL_ADDR for torchrun on the first node (tools/launch/torchrun_nodes.sh)"
        raise InputError(f"--rollout-gpus: {where}: {why}; {way_out}")
    return address
