"""Launch, device mesh, FSDP2 and collectives: the same lines for 1 process or many, CPU (gloo) or GPU (nccl).

Every rank runs the same script, started by `python`, `torchrun` or `accelerate launch`; accelerate launches and does
not wrap (on a CPU it silently trades FSDP2 for DDP). Sharding is `fully_shard` itself, at every world size, so that one
process and eight run one code path. FSDP averages gradients over ranks: multiply a loss that is normalised by *global*
counts by `world_size`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate

from lib import InputError


class World(NamedTuple):
    """Where this process stands among all processes of the job."""

    rank: int
    size: int
    device: torch.device


def init_distributed(timeout_s: float = 1800) -> World:
    """Joins the process group that the launcher describes (or a group of one) and picks this rank's device.

    On a CPU a process computes with one thread unless OMP_NUM_THREADS says otherwise: two threads of a tiny model spend
    their time waiting for each other.

    Raises:
        InputError: `accelerate launch --cpu --num_processes N`, which starts one process without a word.
    """
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
        env["MASTER_PORT"] = "0"  # any free port
    on_gpu = torch.cuda.is_available() and env.get("ACCELERATE_USE_CPU", "false").lower() not in ("true", "1")
    device = torch.device("cuda", int(env["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    return World(dist.get_rank(), dist.get_world_size(), device)


def run(main: Callable[[Any], None], args: Any) -> None:
    """`main(args)`, with a user's mistake shown as one line (once a node) and exit code 2 instead of a traceback."""
    try:
        main(args)
    except InputError as error:
        if is_first_on_node():
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2)  # at once: a peer that waits in a collective must not hold this rank back
    if dist.is_initialized():
        dist.destroy_process_group()


def is_first_on_node() -> bool:
    """True on one rank of each node, also before the process group exists."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


# ---- sharding ------------------------------------------------------------------------------------


def make_mesh(world: World, replicas: int = 1) -> DeviceMesh:
    """Parameters, gradients and optimizer state are split over the dimension "shard", which is all ranks.

    More replicas (HSDP): each is split over size / replicas ranks that follow each other (a node, say), so that weights
    are gathered within a replica and only gradients are added up between them. Raises InputError for unequal replicas.
    """
    if world.size % replicas:
        raise InputError(f"--replicas {replicas}: the number of ranks, {world.size}, must be a multiple of it")
    if replicas == 1:
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    shape = (replicas, world.size // replicas)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard_model(
    model: torch.nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, *, cpu_offload: bool = False
) -> torch.nn.Module:
    """FSDP2 of a transformers model, in place: one group a decoder layer, the rest in the root group.

    Parameters keep their dtype (fp32 masters) and are cast to `compute_dtype` for the forward and backward pass;
    gradients are reduced in the trained parameters' dtype. The model may be on any device; what it left on the meta
    device (`on_meta` in lib/model.py) is read from its files, by each rank its own shards.

    cpu_offload: parameters, gradients and optimizer state stay in CPU memory, where the optimizer steps; a layer comes
    to the device when it computes. `model.device` is then the CPU: see `compute_device`.
    """
    on_gpu = mesh.device_type != "cpu"
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
    return float(full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))


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
    different numbers of them (generation)."""
    modules = fsdp_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not model, recurse=False)
            module.reshard()


# ---- collectives ---------------------------------------------------------------------------------


def join_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> dist.Backend:
    """A process group beside the trainer's own, with processes that are no ranks of it; gloo on a CPU, else NCCL.

    Blocks until all have joined. Raises RuntimeError (also its operations) after `timeout_s` without an answer.
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def all_reduce_sum(values: list[float], device: torch.device) -> list[float]:
    """Element-wise sum over ranks, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def all_reduce_max(value: int, device: torch.device) -> int:
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def all_gather_lists(values: list) -> list:
    """The concatenation of every rank's list, in the order of ranks."""
    gathered: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values)
    return [value for part in gathered for value in part]


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
