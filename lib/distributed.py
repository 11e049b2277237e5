"""Launch, waits, device mesh, FSDP2 and collectives: the same lines for 1 process or many, CPU (gloo) or GPU (nccl).

Every rank runs the same script, started by `python`, `torchrun` or `accelerate launch`; accelerate launches and does
not wrap (on a CPU it silently trades FSDP2 for DDP). Sharding is `fully_shard` itself, at every world size, so that one
process and eight run one code path. FSDP averages gradients over ranks: multiply a loss that is normalised by *global*
counts by `world_size`.
"""

import ctypes
import faulthandler
import itertools
import json
import logging
import math
import os
import pickle
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.testing._internal.distributed.fake_pg
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lib import InputError, report_mistake

# of every rank, at each gathering of weights that two mesh dimensions split: that it takes two collectives
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class World(NamedTuple):
    """Where this process stands among all processes of the job."""

    rank: int
    size: int
    device: torch.device


def init_distributed(stage_timeout: float = 0, rollout_engine: str = "") -> World:
    """Joins the process group that the launcher describes (or a group of one) and picks this rank's device.

    stage_timeout: seconds that a stage may take, see "waits" below; 0: nobody watches. rollout_engine: as the flag;
    with servers, which may be elsewhere, NCCL is not kept on loopback. What listens where: docs/security.md.

    On a CPU a process computes with one thread unless OMP_NUM_THREADS says otherwise: two threads of a tiny model spend
    their time waiting for each other.

    Raises:
        InputError: `accelerate launch --cpu --num_processes N`, which starts one process without a word.
    """
    global _job, _timeout, _watcher
    env = os.environ
    # accelerate's FSDP launcher makes transformers leave the weights of local rank != 0 at zero; we shard ourselves
    env["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if "RANK" not in env and "ACCELERATE_MIXED_PRECISION" in env and "MASTER_ADDR" in env:
        raise InputError(
            "`accelerate launch --cpu --num_processes N` starts one process, not N: use `accelerate launch --multi_gpu "
            "--num_processes N` (it works without a GPU) or `torchrun --nproc-per-node N`"
        )
    if "RANK" not in env:  # plain `python script.py`
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        env["MASTER_PORT"] = "0"
    on_gpu = torch.cuda.is_available() and env.get("ACCELERATE_USE_CPU", "false").lower() not in ("true", "1")
    device = torch.device("cuda", int(env["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
        _keep_freed_memory()
    if stage_timeout:
        _timeout = timedelta(seconds=1.1 * stage_timeout)  # the watcher knows more and comes first
    if _on_one_node():
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")  # lo0 on a Mac
        env.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if not rollout_engine.startswith("http"):
            env.setdefault("NCCL_SOCKET_IFNAME", loopback)
    store, rank, size = _meet(_timeout)
    if stage_timeout:
        enter_stage("start")
        watched = (store.clone(), rank, size, stage_timeout)  # a clone: the main thread may be waiting in the store
        _watcher = threading.Thread(target=_watch, args=watched, name="watcher", daemon=True)
        _watcher.start()
    # "fake" copies a rank's own values: of a single rank that is each collective, and it opens no port
    backend = "fake" if size == 1 else "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    store = dist.PrefixStore(_name_of_attempt(store, rank, size), store)
    _job = store, rank, size
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_timeout)
    return World(rank, size, device)


def _on_one_node() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The job's store, this rank and the number of ranks.

    The store is the launcher's where that has one. Else a single process has it to itself, ranks of one node have it in
    rank 0 on loopback, and only those of several nodes have it on all interfaces there.
    """
    env = os.environ
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if rank == 0 and _on_one_node():
            print(
                f"warning: the launcher's store listens on all network interfaces (port {env['MASTER_PORT']}); "
                "launch/one_node.sh opens none to the network",
                file=sys.stderr,
                flush=True,
            )
        return next(dist.rendezvous("env://", timeout=timeout))
    if size == 1:
        return dist.HashStore(), rank, size
    if not _on_one_node():
        return next(dist.rendezvous("env://", timeout=timeout))
    address = "127.0.0.1", int(env["MASTER_PORT"])
    if rank == 0:
        return listening_store(*address, timeout), rank, size
    return dist.TCPStore(*address, is_master=False, timeout=timeout), rank, size


def listening_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens on one address only; port 0: any that is free. Raises OSError where it cannot."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _keep_freed_memory() -> None:
    """glibc gives large tensors back to the system as they are freed; 3 to 5 % of a step are then page faults."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # not on a Mac
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def _name_of_attempt(store: dist.Store, rank: int, size: int) -> str:
    """A name that all ranks agree on and no earlier start of the job had, to set their keys in the store apart.

    torchrun's store outlives a restart: a rank that finds the address of one that is gone waits for it for ever
    (pytorch issue 135712). The count of restarts is not it: the launchers of several nodes count their own.
    """
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    if rank > 0:
        attempt = store.get(f"welcome/{mine}").decode()
        store.set(f"{attempt}/{rank}", "here")
        return attempt
    while size > 1 and not store.check([f"{mine}/{r}" for r in range(1, size)]):
        for hello in [f"hello/{r}" for r in range(1, size)]:
            if store.check([hello]):  # of this start or an earlier one
                store.set(f"welcome/{store.get(hello).decode()}", mine)
        time.sleep(0.02)
    return mine


def run(main: Callable[[Any], None], args: Any) -> None:
    """`main(args)`, with a user's mistake shown as one line (once a node) and exit code 2 instead of a traceback.

    Ctrl-C ends it without a traceback, exit code 130. An exception of another kind goes on as usual, and into the
    report of torchrun and accelerate. Before each of them comes what `on_early_end` was given.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell made us deaf to it
        signal.signal(signal.SIGINT, _interrupt)
    try:
        _run(main, args)
    except KeyboardInterrupt:
        _end_early(interrupted=True)
        sys.stdout.flush()
        os._exit(130)  # at once, as below; a checkpoint's writer may wait for a peer


def _run(main: Callable[[Any], None], args: Any) -> None:
    try:
        main(args)
        _leave()
    except InputError as error:
        _end_early(interrupted=False)
        report_mistake(f"error: {error}")
        sys.stdout.flush()
        os._exit(2)  # at once: a peer that waits in a collective must not hold this rank back
    except Exception as error:
        _end_early(interrupted=False)
        if dist.is_initialized() and dist.get_world_size() > 1:
            time.sleep(2)  # launchers name the first to end, which is not one that fails because another is gone
        get_error_handler().record_exception(error)
        raise
    finally:
        _stop_watching()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave() -> None:
    """The store may be in rank 0, which therefore goes last."""
    if _job is None:
        return
    store, rank, size = _job
    if rank == 0:
        store.wait([f"left/{r}" for r in range(1, size)])
    else:
        _stop_watching()  # it uses the store
        store.set(f"left/{rank}", "")


# ---- an early end --------------------------------------------------------------------------------

_at_early_end: Callable[[bool], None] | None = None
_interrupted_at = -math.inf


def on_early_end(act: Callable[[bool], None] | None) -> None:
    """`act(interrupted)` is called when the run ends before its time, by Ctrl-C or by an exception. None: no more."""
    global _at_early_end
    _at_early_end = act


def _end_early(interrupted: bool) -> None:
    if _at_early_end is None:
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # a launcher sends them to the ranks that are left
        signal.signal(number, signal.SIG_IGN)
    _at_early_end(interrupted)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _interrupt(*_) -> None:
    """The terminal sends SIGINT to all processes of the job, and torchrun then its own to the ranks."""
    global _interrupted_at
    again_s, _interrupted_at = time.monotonic() - _interrupted_at, time.monotonic()
    if again_s > 1:
        raise KeyboardInterrupt


def print_last(line: str, launcher: int | None) -> None:
    """Prints on stderr; where a launcher (its pid) started this process, below what that prints when it ends."""
    if launcher is None:
        print(line, file=sys.stderr, flush=True)
        return
    its_end = f"for i in $(seq 600); do kill -0 {launcher} 2>/dev/null || break; sleep 0.1; done"
    subprocess.Popen(
        ["sh", "-c", f"{its_end}; echo {shlex.quote(line)} >&2"], stdin=subprocess.DEVNULL, start_new_session=True
    )


# ---- waits ---------------------------------------------------------------------------------------

# A thread of each rank, its watcher, tells the others through the job's store where the rank is. When a stage has taken
# a 30th of the time that it may take, and whenever that has doubled, it prints where all of them are; when the time is
# over it ends the process. The launcher then ends the other ranks or, with --max-restarts, starts all of them anew.

_stage = ("start", time.monotonic(), True)  # of this rank, since when, and whether its time is limited
_job: tuple[dist.Store, int, int] | None = None  # its store, this rank, how many ranks; vLLM destroys the process group
_timeout = timedelta(days=7)  # of a collective in any group, and of the store
_meetings = itertools.count()
_watcher: threading.Thread | None = None
_finished = threading.Event()


class StageTimeout(RuntimeError):
    """A stage takes longer than it may."""


class StoreLost(RuntimeError):
    """The job's store does not answer: it was in the launcher on the first node, or in rank 0."""


class LauncherLost(RuntimeError):
    """torchrun or accelerate, which would end or restart the other ranks, is gone."""


def enter_stage(name: str, limited: bool = True) -> None:
    """From now on this rank is in the stage `name`, such as "step 12 rollout"; its time starts anew. Not `limited`: it
    may take as long as it likes, such as a download."""
    global _stage
    _stage = (name, time.monotonic(), limited)


def wait_for_all() -> None:
    """Until every rank of the job is here: for an end of a stage without limit, since a collective has one."""
    if _job is None:
        return
    store, rank, size = _job
    place = f"meeting {next(_meetings)}"
    store.set(f"{place}/{rank}", "")
    while not store.check([f"{place}/{r}" for r in range(size)]):
        time.sleep(0.05)


def _stop_watching() -> None:
    if _watcher is not None:
        _finished.set()
        _watcher.join()


def _watch(*args) -> None:
    try:
        _watch_stages(*args)
    except (StageTimeout, StoreLost, LauncherLost) as error:
        faulthandler.dump_traceback()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        get_error_handler().record_exception(error)  # for the launcher's report
        os._exit(124)  # as timeout(1); the main thread may be anywhere


def _watch_stages(store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
    beat_s, first_line_s, silent_s = timeout_s / 360, timeout_s / 30, max(1, timeout_s / 90)
    store.set_timeout(timedelta(seconds=first_line_s))
    started_at, watched = time.time(), None
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    while not _finished.wait(beat_s):
        line = _line_of_main_thread()
        if line == "debugger":  # a prompt may stay as long as it likes
            enter_stage(_stage[0], _stage[2])
        if watched is not _stage:
            watched, next_line_s = _stage, first_line_s
        (name, since, limited), now = watched, time.monotonic()
        seconds, limit_s = now - since, timeout_s if limited else math.inf
        if launcher not in (None, os.getppid()):
            raise LauncherLost(f"rank {rank} in {name} ({line}): its launcher, process {launcher}, is gone")
        try:
            store.set(f"rank {rank}", json.dumps([f"{name} ({line})", seconds, time.time()]))
            store.get(f"rank {rank}")  # which fails, other than set, when nobody is there
            if seconds < min(next_line_s, limit_s):
                continue
            states = {}  # of each rank: where, for how long, and for how long it has said nothing
            for r in range(size):
                told = store.get(f"rank {r}") if store.check([f"rank {r}"]) else None
                where, stayed, told_at = json.loads(told) if told else ("not started", 0, started_at)
                silence = time.time() - told_at
                states[r] = (where, stayed + silence, silence if silence > silent_s else 0)
        except dist.DistError as error:
            raise StoreLost(f"rank {rank} in {name} ({line}): {error}") from error
        if seconds >= limit_s:
            raise StageTimeout(f"rank {rank} ends after {timeout_s:g} s in {name}; {_describe(states)}")
        if not any(stayed >= first_line_s and not silence for _, stayed, silence in list(states.values())[:rank]):
            print(f"waiting: {_describe(states)}", file=sys.stderr, flush=True)  # one line for all ranks
        next_line_s *= 2


def _line_of_main_thread() -> str:
    """file:line of the innermost function, packages aside, in which the main thread is."""
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
    """Who is where; first those that have been there longest, for whom the others may be waiting."""
    groups = defaultdict(list)
    for rank, (where, seconds, silence) in states.items():
        groups[where, silence > 0].append((seconds, silence, rank))
    texts = []
    for (where, _), members in sorted(groups.items(), key=lambda group: -max(group[1])[0]):
        seconds, silence, _ = max(members)
        text = f"rank {', '.join(str(rank) for *_, rank in members)}: {where} for {seconds:.0f} s"
        texts.append(text + (f", silent for {silence:.0f} s" if silence else ""))
    return "; ".join(texts)


# ---- sharding ------------------------------------------------------------------------------------


def make_mesh(world: World, replicas: int = 1, tensor_parallel: int = 1) -> DeviceMesh:
    """Parameters, gradients and optimizer state are split over the dimension "shard", which is all ranks.

    More replicas (HSDP): each is split over size / replicas ranks that follow each other (a node, say), so that weights
    are gathered within a replica and only gradients are added up between them. Raises InputError for unequal replicas.

    tensor_parallel: so many neighbouring ranks are the dimension "tensor", along which `shard_model` splits layers. It
    divides the number of ranks; there is one replica then.
    """
    if tensor_parallel > 1:
        return _mesh(world, shard=world.size // tensor_parallel, tensor=tensor_parallel)
    if world.size % replicas:
        raise InputError(f"--replicas {replicas}: the number of ranks, {world.size}, must be a multiple of it")
    if replicas == 1:
        return _mesh(world, shard=world.size)
    return _mesh(world, replicate=replicas, shard=world.size // replicas)


def _mesh(world: World, **sizes: int) -> DeviceMesh:
    """Its groups have torch's time limit for a collective, 10 or 30 minutes, until they are given the job's."""
    mesh = init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes if world.size > 1 else ():
        dist.distributed_c10d._set_pg_timeout(_timeout, mesh.get_group(name))
    return mesh


class RowGroup(NamedTuple):
    """Neighbouring ranks that run their rows together. It is passed to the functions of lib/model and
    lib/batching.py, and is no state of a model, because the same model also samples, each rank alone."""

    ranks: dist.ProcessGroup
    split: Literal["tokens", "weights"]
    """what each rank has a share of: sequence parallel, tensor parallel"""


def make_row_group(world: World, mesh: DeviceMesh, sequence_parallel: int = 1) -> RowGroup | None:
    """This rank's group: that of the mesh's dimension "tensor", or `sequence_parallel` ranks; None for a rank alone."""
    if "tensor" in mesh.mesh_dim_names:
        return RowGroup(mesh.get_group("tensor"), "weights")
    if sequence_parallel == 1:
        return None
    mesh = _mesh(world, data=world.size // sequence_parallel, sequence=sequence_parallel)
    return RowGroup(mesh.get_group("sequence"), "tokens")


# of transformers' tensor parallel plans, in torch's terms. The last is of norms of heads, of which each rank has a
# share: the weight's gradient is a sum over ranks
TENSOR_PARALLEL_STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def _split_layers(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Splits what the model's tensor parallel plan names in its layers, in place; embedding and head stay whole."""
    styles = {name: style for name, style in model.tp_plan.items() if "layers." in name}
    plan = {name: TENSOR_PARALLEL_STYLES[style]() for name, style in styles.items()}
    parallelize_module(model, mesh, plan, src_data_rank=None)


def shard_model(
    model: torch.nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, *, cpu_offload: bool = False
) -> torch.nn.Module:
    """FSDP2 of a transformers model, in place: one group a decoder layer, the rest in the root group.

    Parameters keep their dtype (fp32 masters) and are cast to `compute_dtype` for the forward and backward pass;
    gradients are reduced in the trained parameters' dtype. The model may be on any device; what it left on the meta
    device (`on_meta` in lib/model) is read from its files, by each rank its own shards. A mesh with the dimension
    "tensor" also splits the layers' projections, by transformers' plan for the model.

    cpu_offload: parameters, gradients and optimizer state stay in CPU memory, where the optimizer steps; a layer comes
    to the device when it computes. `model.device` is then the CPU: see `compute_device`.
    """
    wait_for_all()  # who may be loading it still
    on_gpu = mesh.device_type != "cpu"
    if "tensor" in mesh.mesh_dim_names:
        _split_layers(model, mesh["tensor"])
        mesh = mesh["shard"]
    options = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy()}
    master_dtype = next((p.dtype for p in model.parameters() if p.requires_grad), compute_dtype)
    options["mp_policy"] = MixedPrecisionPolicy()
    if any(p.dtype != compute_dtype for p in model.parameters()):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master_dtype)
    layer_classes = set(model._no_split_modules)
    for module in [m for m in model.modules() if type(m).__name__ in layer_classes]:
        fully_shard(module, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if not tied:  # tied weights must stay in one group, the root: torch 2.11 silently unties them otherwise
        fully_shard(embedding, **options)
    fully_shard(model, **options)
    assert head is None or (head.weight is embedding.weight) == tied
    for name in getattr(model, "fsdp_forward_methods", ()):
        register_fsdp_forward_method(model, name)
    if any(p.is_meta for p in model.parameters()):
        device = "cpu" if cpu_offload else mesh.device_type
        model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        reader = dcp.HuggingFaceStorageReader(model.weights_folder)
        files = reader.read_metadata().state_dict_metadata
        weights = {name.replace(".base_layer.", "."): weight for name, weight in model.state_dict().items()}
        dcp.load({name: weight for name, weight in weights.items() if name in files}, storage_reader=reader)
    enter_stage("start")
    return model


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def compute_device(model: torch.nn.Module) -> torch.device:
    """Where the model computes, which with `cpu_offload` is not where its parameters are."""
    param = next(model.parameters())
    return torch.device(param.device_mesh.device_type) if isinstance(param, DTensor) else param.device


def trainable_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Call once, before any forward: a forward without backward leaves the root's parameters unsharded, and
    `model.parameters()` read then has no gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def set_gradient_sync(model: torch.nn.Module, sync: bool) -> None:
    """Reduce gradients over ranks in the coming backward (the last micro-batch), or only add them up locally."""
    model.set_requires_gradient_sync(sync)


def clip_grad_norm(parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """Clips the global gradient to `max_norm` (2-norm over all ranks) and returns the norm before clipping."""
    by_mesh: dict[Any, list[torch.nn.Parameter]] = {}  # tensor parallel splits some over one dimension more
    for p in parameters:
        by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None]) for ps in by_mesh.values()]
    norm = torch.nn.utils.get_total_norm([full_tensor(n) for n in norms])
    for ps in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(ps, max_norm, norm)
    return float(norm)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def merged_shards(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, this rank's shard as a DTensor) of each weight of the model as it was before `add_lora`, with its LoRA
    update added: W + alpha / rank x B A. The model stays as it is. A collective.

    Rows of W and of B are split alike, so a rank merges its own rows with the whole A.
    """
    device = compute_device(model)
    for module in fsdp_modules(model):
        module.reshard()
    for name, param in model.named_parameters():
        path, adapted, leaf = name.rpartition(".base_layer.")
        if ".lora_" in name:
            continue
        weight = param.detach().to(device)
        if adapted and leaf == "weight":
            layer = model.get_submodule(path)
            A, B = layer.lora_A["default"].weight.to(device), layer.lora_B["default"].weight.to(device)
            if isinstance(A, DTensor):
                A = A.redistribute(placements=[Replicate()] * A.device_mesh.ndim)
            weight = (weight + layer.scaling["default"] * (B @ A)).to(weight.dtype)
        yield f"{path}.{leaf}" if adapted else name, weight


def iter_full_params(model: torch.nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of `merged_shards` one at a time, on every rank: a collective, so every rank must run
    through all of it.

    Extra memory: twice the largest parameter. Tied weights come once, under the name of the embedding.
    """
    for name, shard in merged_shards(model):
        tensor = full_tensor(shard)
        yield name, tensor if dtype is None else tensor.to(dtype)


@contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """All parameters whole for the time of the block: forward passes in it need no collective, so ranks may run
    different numbers of them (generation). There is no backward in it."""
    modules = fsdp_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        with _without_fsdp_hooks(modules):
            yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not model, recurse=False)
            module.reshard()


@contextmanager
def _without_fsdp_hooks(modules: list[FSDPModule]) -> Iterator[None]:
    """Spares what FSDP does around each forward, a fifth of a decoding step of a tiny model, and unsharded modules do
    not need. Where parameters are cast, the hooks cast a layer's inputs too: there they stay."""
    removed = []
    for module in modules:
        state = module._get_fsdp_state()
        if state._mp_policy.param_dtype is None:
            for hooks, handle in (
                (module._forward_pre_hooks, state._pre_forward_hook_handle),
                (module._forward_hooks, state._post_forward_hook_handle),
            ):
                removed.append((hooks, hooks.copy()))
                del hooks[handle.id]
    try:
        yield
    finally:
        for hooks, before in removed:
            hooks.clear()
            hooks.update(before)


# ---- collectives ---------------------------------------------------------------------------------


def address_towards(host: str, port: int) -> str:
    """This machine's, on the network by which it reaches the other. Raises OSError."""
    with socket.create_connection((host, port)) as s:
        return s.getsockname()[0]


def join_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, address: str
) -> dist.Backend:
    """A process group beside the trainer's own, with processes that are no ranks of it; gloo on a CPU, which listens on
    `address`, else NCCL.

    Blocks until all have joined. Raises RuntimeError (also its operations) after `timeout_s` without an answer.
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(hostname=address)], timeout
        group = dist.ProcessGroupGloo(store, rank, size, options)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    hello = torch.zeros(1, device=device)
    group.broadcast(hello, 0).wait()
    hello.item()  # NCCL connects in its first collective, which ends here
    return group


def new_cpu_group() -> dist.ProcessGroup:
    """All ranks again, whose collectives of CPU tensors and objects cannot get between those of the default group."""
    return dist.new_group(backend="gloo" if dist.get_world_size() > 1 else "fake", timeout=_timeout)


def new_cpu_subgroup(ranks: int) -> dist.ProcessGroup:
    """The group of this rank and its neighbours, `ranks` of them, over gloo."""
    return dist.new_subgroups(ranks, timeout=_timeout, backend="gloo")[0]


def all_reduce_sum(values: list[float], device: torch.device) -> list[float]:
    """Element-wise sum over ranks, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def all_reduce_max(value: int, device: torch.device) -> int:
    """The largest of the ranks' values; without a process group this one."""
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def all_gather_lists(values: list, group: dist.ProcessGroup | None = None) -> list:
    """The concatenation of every rank's list, in the order of ranks."""
    gathered: list[list] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, values, group)
    return [value for part in gathered for value in part]


def all_to_all_objects(values: list) -> list:
    """values[r] goes to rank r; returns what every rank sent here, in the order of ranks."""
    sent = [torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) for value in values]
    sizes = torch.tensor([len(part) for part in sent])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes)
    received = torch.empty(int(coming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(sent), coming.tolist(), sizes.tolist())
    return [pickle.loads(part.numpy()) for part in received.split(coming.tolist())]  # noqa: S301 (of our own ranks)


def all_to_all(
    x: torch.Tensor, group: dist.ProcessGroup, send: list[int] | None = None, receive: list[int] | None = None
) -> torch.Tensor:
    """What the ranks of the group send to this one, along the first dimension in their order: rank i gets the i-th of
    x's parts, which are equal or of the lengths `send`. Has a gradient, which goes the way back."""
    return all_to_all_single_autograd(x.contiguous(), receive, send, group)


class TakeOwn(torch.autograd.Function):
    """x[own], of an x that all ranks of the group computed alike. The gradient is the mean over the group of what the
    ranks' losses, each of its own part, have: as FSDP's over the other dimension of the mesh, a mean over ranks."""

    @staticmethod
    def forward(ctx, x, own, group):
        ctx.save_for_backward(own)
        ctx.shape, ctx.group = x.shape, group
        return x[own]

    @staticmethod
    def backward(ctx, gradient):
        [own] = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.shape).index_copy(0, own, gradient)
        dist.all_reduce(whole, group=ctx.group)
        return whole / ctx.group.size(), None, None


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_first_rank(act: Callable[[], Any]) -> Any:
    """What `act()` gives on rank 0, which alone calls it; an InputError that it raises is raised on every rank."""
    outcome = None
    if dist.get_rank() == 0:
        try:
            outcome = act()
        except InputError as error:
            outcome = error
    outcome = broadcast(outcome)
    if isinstance(outcome, InputError):
        raise outcome
    return outcome
