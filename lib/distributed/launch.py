"""The start and the end of a job: launchers, the store, the process group, Ctrl-C and mistakes."""

import atexit
import errno
import gc
import itertools
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from os import _exit as end_process  # run() replaces os._exit
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lib import InputError, is_first_on_node, report_mistake
from lib.cli.flags import threads_of_environment
from lib.cli.process import end_interrupted
from lib.distributed.collectives import collective_timeout, limit_collectives
from lib.distributed.device import accelerator, collective_backend, single_rank_backend
from lib.distributed.reduced import current_stage, enter_stage
from lib.distributed.watchdog import start_watching, stop_watching

T = TypeVar("T")
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # EFBIG: a limit on the size of files
MOST_NAMED = 4  # ranks, and differences between their starts, in one line
SHARDS = "models are always sharded by torch's FSDP2"
OF_ACCELERATE = {  # a variable of `accelerate launch`: (its value where nothing is asked for, what does it here)
    "ACCELERATE_MIXED_PRECISION": ("no", "give --compute-dtype {dtype}"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "give --compile"),
    "ACCELERATE_USE_FSDP": ("false", SHARDS),
    "FSDP_OFFLOAD_PARAMS": ("false", "give --cpu-offload actor"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "give --gradient-checkpointing"),
    "ACCELERATE_USE_DEEPSPEED": ("false", SHARDS),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("none", "give --cpu-offload actor"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("none", "give --cpu-offload actor"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "give --micro-batch-tokens"),
    "ACCELERATE_GRADIENT_CLIPPING": ("none", "give --max-grad-norm"),
    "ACCELERATE_USE_MEGATRON_LM": ("false", "give --tensor-parallel-size"),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": ("1", "give --dp-replicate-size"),
    "PARALLELISM_CONFIG_TP_SIZE": ("1", "give --tensor-parallel-size"),
    "PARALLELISM_CONFIG_CP_SIZE": ("1", "give --sequence-parallel-size"),
    "PARALLELISM_CONFIG_SP_SIZE": ("1", "give --sequence-parallel-size"),
}
OVER = "over"  # the key in the job's store that tells engine ranks that no training rank needs them any more


class _Job(NamedTuple):
    store: dist.Store  # with the keys of this start of the job
    rank: int
    trainers: int  # ranks that train; not from the process group, which vLLM destroys
    size: int  # all ranks


_job: _Job | None = None
_meetings = itertools.count()


class World(NamedTuple):
    """Where this process stands among the ranks that train. Engine ranks have rank >= size."""

    rank: int
    size: int
    device: torch.device


class JobOver(Exception):
    """Ends an engine rank cleanly once the training ranks have finished."""


def init_distributed(
    stage_timeout: float = 0,
    rollout_engine: str = "",
    engine_ranks: int = 0,
    describe: Callable[[bool], Mapping[str, Sequence[str]]] | None = None,
) -> World:
    """Joins the process group that the launcher describes (or a group of one) and picks this rank's device.

    stage_timeout: seconds that a stage may take (watchdog.py); 0: no watcher.
    rollout_engine: the flag's value. NCCL is kept on loopback unless it names servers, which may be elsewhere.
    engine_ranks: the job's last ranks do not train. They share the store, but not the process group.
    describe: what `check_equal_starts` compares, given whether this rank trains.

    Raises InputError under `accelerate launch --cpu`, which starts one process, and on all ranks if they were started
    differently. docs/security.md says what listens where."""
    global _job
    env = os.environ
    _check_launcher(env)
    if "RANK" not in env:  # plain `python script.py`
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    trainers = int(env["WORLD_SIZE"]) - engine_ranks
    trains = int(env["RANK"]) < trainers
    device = _pick_device(int(env["LOCAL_RANK"]), trains)
    if stage_timeout:
        limit_collectives(1.1 * stage_timeout)  # the watcher can say more, so it comes first
    if is_on_one_node():
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")  # lo0 on a Mac
        env.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if not rollout_engine.startswith("http"):
            env.setdefault("NCCL_SOCKET_IFNAME", loopback)
    store, rank, size = _meet(timeout := collective_timeout())
    if stage_timeout:
        enter_stage("start")
        # a clone, as the main thread may be waiting in the store
        start_watching(store.clone(), rank, size, stage_timeout)  # type: ignore[attr-defined]  # not in the stubs
    store = dist.PrefixStore(_name_of_attempt(store, rank, size), store)
    _job = _Job(store, rank, trainers, size)
    if describe and size > 1:
        start = {**describe(trains), "the device": (device.type, device.type)}
        check_equal_starts(store, rank, size, start)  # first: a collective needs the same number of trainers everywhere
    if trains:
        backend = single_rank_backend() if trainers == 1 else collective_backend(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=trainers, timeout=timeout)
    return World(rank, trainers, device)


def _pick_device(local_rank: int, trains: bool) -> torch.device:
    """This rank's device. An engine rank leaves its GPU alone."""
    if (found := accelerator()) is None:
        torch.set_num_threads(threads_of_environment())
        return torch.device("cpu")
    device = torch.device(found.type, local_rank)
    if trains:
        torch.get_device_module(device).set_device(device)
        # it plans each new shape for up to a second, and nearly every packed row has new shapes
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def _check_launcher(env: MutableMapping[str, str]) -> None:
    """Says which settings of accelerate nothing reads."""
    if env.get("RANK", "0") == "0" and (unused := unused_settings(env)):
        print(f"accelerate starts the processes only, its other settings are not used: {unused}", flush=True)
    # under accelerate's FSDP, transformers would leave the weights of local rank != 0 at zero; we shard ourselves
    env["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if "RANK" not in env and "ACCELERATE_MIXED_PRECISION" in env and "MASTER_ADDR" in env:
        raise InputError(
            "`accelerate launch --cpu --num_processes N` starts one process, not N: use `accelerate launch "
            "--multi_gpu --num_processes N` (it works without a GPU) or `torchrun --nproc-per-node N`"
        )


def unused_settings(env: Mapping[str, str]) -> str:
    """The settings of `accelerate launch` in this environment that nothing reads, each with our flag."""
    dtype = "float16" if env.get("ACCELERATE_MIXED_PRECISION") == "fp16" else "bfloat16"
    given = {name: env[name] for name, (off, _) in OF_ACCELERATE.items() if env.get(name, off).lower() != off}
    ours = {name: OF_ACCELERATE[name][1].format(dtype=dtype) for name in given}
    return ", ".join(f"{name.removeprefix('ACCELERATE_').lower()} {given[name]} ({ours[name]})" for name in given)


def job_store() -> dist.Store:
    """An exclusive client of the job's store, with a key prefix for this start of the job."""
    return _job.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs


def is_on_one_node() -> bool:
    """True if all ranks of the job are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """(store, rank, ranks). The store is the launcher's if it has one, else rank 0's: on loopback if all ranks are on
    one node, else on all interfaces."""
    env = os.environ
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    from_launcher = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if from_launcher:
        if rank == 0 and is_on_one_node():
            what = f"the launcher's store listens on all network interfaces (port {env['MASTER_PORT']})"
            print(f"warning: {what}; tools/launch/one_node.sh opens none to the network", file=sys.stderr, flush=True)
    elif size == 1:
        return dist.HashStore(), rank, size
    address = "127.0.0.1", int(env["MASTER_PORT"])
    try:
        if from_launcher or not is_on_one_node():
            return next(dist.rendezvous("env://", timeout=timeout))
        if rank == 0:
            return listening_store(*address, timeout), rank, size
        return dist.TCPStore(*address, is_master=False, timeout=timeout), rank, size
    except dist.DistNetworkError:
        where = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
        why = "rank 0 has not started or has ended, or this is not its address"
        _end_with(f"nobody answers at {where}: {why}")


def listening_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens on one address only; port 0: any free port. Raises OSError if it cannot listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    listening: dict[str, Any] = {"master_listen_fd": listener.detach(), "wait_for_workers": False}
    return dist.TCPStore(address, port, is_master=True, timeout=timeout, **listening)


def _name_of_attempt(store: dist.Store, rank: int, size: int) -> str:
    """A key prefix that all ranks of this start of the job agree on, and that no earlier start had. torchrun's store
    outlives a restart, and a rank that finds an old rank's address there waits for it forever (pytorch issue 135712).
    Each node's launcher counts restarts on its own, so that count would not do."""
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    if rank > 0:
        attempt = store.get(f"welcome/{mine}").decode()
        store.set(f"{attempt}/{rank}", "here")
        return attempt
    while size > 1 and not store.check([f"{mine}/{r}" for r in range(1, size)]):
        for hello in [f"hello/{r}" for r in range(1, size)]:
            if store.check([hello]):  # from this start or an earlier one
                store.set(f"welcome/{store.get(hello).decode()}", mine)
        time.sleep(0.02)
    return mine


def check_equal_starts(store: dist.Store, rank: int, size: int, start: Mapping[str, Sequence[str]]) -> None:
    """Raises InputError on every rank if one was started with other flags, code or files than rank 0.

    start: {what: (text to show, what must be equal)}. What only one of two ranks has is not compared."""
    store.set(f"start/{rank}", json.dumps(start))
    if rank > 0:
        verdict = store.get("start/verdict").decode()
        store.set(f"start/{rank}/read", "")
    else:
        verdict = _different_starts([json.loads(store.get(f"start/{r}")) for r in range(size)])
        store.set("start/verdict", verdict)
        with suppress(dist.DistStoreError):  # the store may be in this process, which may be about to end
            store.wait([f"start/{r}/read" for r in range(1, size)], timedelta(seconds=10))
    if verdict:
        advice = "start all ranks with the same flags, code and files (docs/scaling.md)"
        raise InputError(f"the ranks were started differently: {verdict}: {advice}")


def _different_starts(starts: list[dict[str, list[str]]]) -> str:
    """What differs from the first rank's start, and on which ranks; "" if nothing does."""
    found = []
    for what, (shown, same) in starts[0].items():
        others = defaultdict(list)
        for rank, start in enumerate(starts):
            if what in start and start[what][1] != same:
                others[start[what][0]].append(str(rank))
        for other, ranks in others.items():
            where = f"rank {', '.join(ranks[:MOST_NAMED])}" + " and more" * (len(ranks) > MOST_NAMED)
            known = f"{what} {shown}".strip()
            is_other = f"{what} is {other} on {where}, {shown} on rank 0"
            found.append(is_other if other != shown else f"{known} holds something else, or is missing, on {where}")
    more = len(found) - MOST_NAMED
    return "; ".join(found[:MOST_NAMED]) + f"; and {more} more" * (more > 0)


def run(main: Callable[[T], None], args: T) -> None:
    """Runs `main(args)`. An InputError is one line (once a node), without a traceback; the exit code is 2.

    Ctrl-C ends it with exit code 130, a full disk with 1, both without a traceback. Another exception is raised, and
    recorded for the launcher's report. All of them first call the function given to `on_early_end`. User code that ends
    the process is reported: a run whose exit code is 0 has done its last step. A closed terminal (SIGHUP) does not end
    a run that no launcher started."""
    gc.freeze()  # a collection need not look through what the imports made
    atexit.register(gc.unfreeze)  # extensions report what is never freed
    gc.enable()
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, end_interrupted):  # not if it is ignored
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _interrupt_again
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # a launcher passes on the SIGHUP that it gets
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os._exit = partial(_exit_of_user_code, os.getpid())
    try:
        _run(main, args)
    except KeyboardInterrupt:
        os._exit = end_process
        if _at_early_end is None:
            end_interrupted()
        _end_early(interrupted=True)
        sys.stdout.flush()
        end_process(130)  # at once: a checkpoint's writer may wait for a peer
    finally:
        os._exit = end_process


def _run(main: Callable[[T], None], args: T) -> None:
    try:
        with suppress(JobOver):
            main(args)
        if dist.is_initialized():
            enter_stage("end")
            dist.destroy_process_group()  # NCCL's waits for all ranks: the watcher still watches
        _leave()
    except SystemExit as stop:
        if stop.code != 128 + signal.SIGTERM:  # of an engine rank
            _end_early(interrupted=False)
            last = traceback.extract_tb(stop.__traceback__)[-1]
            code = "" if stop.code is None else repr(stop.code)
            _end_with(f"the run was ended by sys.exit({code}) in {last.filename}:{last.lineno}", stop.code)
        raise
    except Exception as error:
        _end_early(interrupted=False)
        _end_in_one_line(error)
        get_error_handler().record_exception(error)
        raise
    finally:
        stop_watching()


def _end_in_one_line(error: Exception) -> None:
    """Ends the process, unless a traceback says more about the error."""
    if isinstance(error, InputError):
        stop_watching(1)
        report_mistake(f"error: {error}")
        sys.stdout.flush()
        end_process(2)  # at once: a peer that waits in a collective must not hold this rank back
    if isinstance(error, torch.OutOfMemoryError):
        traceback.print_exc()
        advice = f"; {_advice(current_stage())}" if _advice else ""
        _end_with(f"{str(error).partition('. GPU')[0]}{advice}")  # what follows is the allocator's state
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        _end_with(f"{error}; make room, and go on with --resume auto")
    if _job is not None and _job.size > 1:
        time.sleep(2)  # launchers blame the first to end: not a rank that fails because another is gone
        if isinstance(error, dist.DistError) or "by peer" in str(error):  # the latter is Gloo's RuntimeError
            traceback.print_exc()
            why = "its own message says why, or it has none and was killed (kill -9, out of memory: see dmesg)"
            _end_with(f"another rank has ended: {why} ({str(error).partition('. ')[0]})")


def _end_with(what: str, code: Any = 1) -> NoReturn:
    """Ends the process at once, with one line from the rank where it happened."""
    stop_watching(1)  # no line of the watcher may follow this one
    line = f"error: rank {os.environ.get('RANK', 0)} in {current_stage()}: {what}"
    report_mistake(line)
    if not is_first_on_node():
        print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    end_process(code if isinstance(code, int) and code & 255 else 1)


def _exit_of_user_code(pid: int, status: int) -> NoReturn:
    """os._exit during `run`. Processes forked from this one end as they like. Native code's _exit is not seen."""
    if os.getpid() != pid:
        end_process(status)
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    _end_with(f"the run was ended by os._exit({status}) in {where}", status)


def _leave() -> None:
    """Training ranks leave before engine ranks, and rank 0 leaves last, because the store may be in it."""
    if _job is None:
        return
    store, rank, trainers, size = _job
    if rank > 0:
        stop_watching()  # it uses the store
        store.set(f"left/{rank}", "")
        return
    store.wait([f"left/{r}" for r in range(1, trainers)])
    store.set(OVER, "")
    store.wait([f"left/{r}" for r in range(trainers, size)])


def wait_for_all() -> None:
    """Waits for all training ranks without a collective's time limit: for the end of an unlimited stage."""
    if _job is None:
        return
    store, rank, size, _ = _job
    place = f"meeting {next(_meetings)}"
    store.set(f"{place}/{rank}", "")
    while not store.check([f"{place}/{r}" for r in range(size)]):
        time.sleep(0.05)


# ---- an early end --------------------------------------------------------------------------------
_advice: Callable[[str], str] | None = None
_at_early_end: Callable[[bool], None] | None = None
_interrupted_at = -math.inf


def on_early_end(act: Callable[[bool], None] | None) -> None:
    """Registers `act(interrupted)`, called when Ctrl-C or an exception ends the run; None unregisters it."""
    global _at_early_end
    _at_early_end = act


def advise_out_of_memory(advice: Callable[[str], str]) -> None:
    """Registers `advice(stage)`, the end of the out-of-memory line."""
    global _advice
    _advice = advice


def _end_early(interrupted: bool) -> None:
    if _at_early_end is None:
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # a launcher sends them to the remaining ranks
        signal.signal(number, signal.SIG_IGN)
    _at_early_end(interrupted)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _interrupt(*_) -> None:
    """A second SIGINT within a second is ignored: the terminal sends one to all, then torchrun to the ranks."""
    global _interrupted_at
    again_s, _interrupted_at = time.monotonic() - _interrupted_at, time.monotonic()
    if again_s > 1:
        raise KeyboardInterrupt


def _interrupt_again(dropped: Any) -> None:
    """Python drops what a signal handler raises during a destructor or a collector's callback: here it comes again."""
    global _interrupted_at
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)
        return
    _interrupted_at = -math.inf
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()


def print_last(line: str, launcher: int | None) -> None:
    """Prints on stderr: below what a launcher (its pid), if there is one, prints when it ends."""
    if launcher is None:
        print(line, file=sys.stderr, flush=True)
        return
    its_end = f"for i in $(seq 600); do kill -0 {launcher} 2>/dev/null || break; sleep 0.1; done"
    command = ["sh", "-c", f"{its_end}; echo {shlex.quote(line)} >&2"]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
