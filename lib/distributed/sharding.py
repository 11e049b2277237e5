"""Device mesh, FSDP2 and tensor parallelism: sharding a model, reducing gradients, and gathering whole weights."""

import copy
import fnmatch
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from lib import InputError
from lib.distributed.collectives import collective_timeout
from lib.distributed.compute_copy import ComputeCopy, copy_of, master_of, place_masters
from lib.distributed.launch import World, wait_for_all
from lib.distributed.reduced import enter_stage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Part = Literal["merged", "base", "adapter"]  # of a model with LoRA adapters: see weight_shards

# torch warns on every rank that weights split over two mesh dimensions take two collectives to gather
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
# torch.distributed.checkpoint says so of a single process: in torch 2.11 its group has an empty gather
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def make_mesh(world: World, replicas: int = 1, tensor_parallel: int = 1) -> DeviceMesh:
    """The mesh, whose dimension "shard" splits parameters, gradients and optimizer state, by default over all ranks.
    replicas (HSDP): each is split over size / replicas consecutive ranks; only gradients cross replicas.
    tensor_parallel: so many neighbours form the dimension "tensor", along which `shard_model` splits layers; there is
    one replica then. Raises InputError for unequal replicas."""
    if tensor_parallel > 1:
        return _mesh(world, shard=world.size // tensor_parallel, tensor=tensor_parallel)
    if world.size % replicas:
        raise InputError(f"--dp-replicate-size {replicas}: the number of ranks, {world.size}, must be a multiple of it")
    if replicas == 1:
        return _mesh(world, shard=world.size)
    return _mesh(world, replicate=replicas, shard=world.size // replicas)


def _mesh(world: World, **sizes: int) -> DeviceMesh:
    """Its groups get the job's time limit for a collective, not torch's 10 or 30 minutes."""
    mesh = init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes if world.size > 1 else ():
        dist.distributed_c10d._set_pg_timeout(collective_timeout(), mesh.get_group(name))
    return mesh


class RowGroup(NamedTuple):
    """Neighbouring ranks that run their rows together."""

    ranks: dist.ProcessGroup
    split: Literal["tokens", "weights"]  # what each rank has a share of: sequence parallel, tensor parallel


def make_row_group(world: World, mesh: DeviceMesh, sequence_parallel: int = 1) -> RowGroup | None:
    """This rank's group: the dimension "tensor", or `sequence_parallel` ranks; None if each rank runs alone."""
    if "tensor" in mesh.mesh_dim_names:
        return RowGroup(mesh.get_group("tensor"), "weights")
    if sequence_parallel == 1:
        return None
    mesh = _mesh(world, data=world.size // sequence_parallel, sequence=sequence_parallel)
    return RowGroup(mesh.get_group("sequence"), "tokens")


class ExpertParallel(ParallelStyle):
    """Splits the experts of a mixture's layer over the mesh, which must divide their number. All ranks hold all tokens
    and the router. Each applies its own experts, and the layer's output is the sum over ranks."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        for name, param in list(module.named_parameters()):  # (experts, ...)
            shard = distribute_tensor(param, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, torch.nn.Parameter(shard, param.requires_grad))
        module.forward = partial(_sum_over_experts, module, device_mesh)
        return module


def _sum_over_experts(
    experts: Any, mesh: DeviceMesh, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """(N, H), of hidden_states (N, H), the experts of each token and their weights (N, k). A collective."""
    own = copy.copy(experts)
    own._parameters = {name: param.to_local() for name, param in experts._parameters.items()}
    own.num_experts = n = experts.num_experts // mesh.size()
    own._is_expert_parallel = True  # transformers then skips expert n, which does not exist
    place = top_k_index - n * mesh.get_local_rank()
    place = place.where((place >= 0) & (place < n), n)
    # a rank's gradients come from its own experts: they are summed over ranks
    hidden_states, top_k_weights = (
        DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        for x in (hidden_states, top_k_weights)
    )
    output = type(experts).forward(own, hidden_states, place, top_k_weights)
    if not output.requires_grad:  # "eager" without a token for these experts: the backward is still a collective
        output = output + sum(x[:0].sum() for x in (hidden_states, top_k_weights, *own._parameters.values()))
    return DTensor.from_local(output, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


# The styles of transformers' tensor parallel plans, as torch's classes. replicated_with_grad_allreduce: norms of
# attention heads. Each rank has a share of the heads, so the weight's gradient is a sum over ranks.
TENSOR_PARALLEL_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "experts": ExpertParallel,
}


def layer_plan(config: "PreTrainedConfig") -> dict[str, str]:
    """{pattern of module names: style} for a text model's layers, from transformers' plans for tensor and expert
    parallelism. Empty without the first. Embedding and head stay whole."""
    plan = {name: style for name, style in (config.base_model_tp_plan or {}).items() if "layers." in name}
    if not plan:
        return {}
    split = (config.base_model_ep_plan or {}).items()
    experts = {name.rpartition(".")[0] for name, style in split if style == "grouped_gemm"}
    plan = {name: style for name, style in plan.items() if not {name, name.rpartition(".")[0]} & experts}
    if plan.get("layers.*.self_attn.q_proj") == "colwise":  # some plans leave out the norms of heads
        norms = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
        plan = dict.fromkeys(norms, "replicated_with_grad_allreduce") | plan
    return plan | dict.fromkeys(experts, "experts")


def parallel_styles(model: "PreTrainedModel") -> dict[str, ParallelStyle]:
    """{module name: style} by the model's plan. Raises InputError for a parameter between split layers that the plan
    leaves out: each rank would train it on its own share of the features."""
    names = [name for name, _ in model.named_modules()]
    patterns = layer_plan(model.config).items()
    plan = {name: style for pattern, style in patterns for name in fnmatch.filter(names, f"*{pattern}")}
    split = tuple({name.rpartition(".")[0] + "." for name, style in plan.items() if style == "colwise"})
    for name, _ in model.named_parameters():
        if name.startswith(split) and name.rpartition(".")[0] not in plan:
            raise InputError(f"--tensor-parallel-size: the plan of {type(model).__name__} has no {name}: drop the flag")
    return {name: TENSOR_PARALLEL_STYLES[style]() for name, style in plan.items()}


def shard_model(
    model: "PreTrainedModel",
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    cpu_offload: bool = False,
    zero1: bool = False,
) -> "PreTrainedModel":
    """Splits a transformers model over the ranks, in place. Of parameters on the meta device (`on_meta` of load_model)
    each rank reads what it holds.

    Trained parameters keep their dtype (fp32 masters); forward and backward run in `compute_dtype`, and gradients are
    averaged in the masters' dtype.
    zero1: see lib/distributed/compute_copy.py. Otherwise FSDP2, which also knows
    - a mesh with the dimension "tensor", which splits the layers' projections, by transformers' plan;
    - cpu_offload: parameters, gradients and optimizer state stay in CPU memory, where the optimizer steps.
      `model.device` is then the CPU: see `compute_device`."""
    wait_for_all()  # other ranks may still be loading it
    on_meta = any(p.is_meta for p in model.parameters())
    if zero1:
        place_masters(model, mesh, compute_dtype)
    else:
        _fully_shard(model, mesh, compute_dtype, cpu_offload)
    if on_meta:
        device = "cpu" if cpu_offload else mesh.device_type
        if not zero1:
            model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        reader = dcp.HuggingFaceStorageReader(model.weights_folder)
        files = reader.read_metadata().state_dict_metadata
        weights = {name.replace(".base_layer.", "."): weight for name, weight in model.state_dict().items()}
        weights = {name: weight for name, weight in weights.items() if name in files}
        dcp.load(weights, storage_reader=reader, no_dist=dist.get_world_size() == 1)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if zero1 and trained and (mesh.size() > 1 or trained != {compute_dtype}):
        model.compute_copy = ComputeCopy(model, mesh, compute_dtype)
    enter_stage("start")
    return model


def _fully_shard(model: "PreTrainedModel", mesh: DeviceMesh, compute_dtype: torch.dtype, cpu_offload: bool) -> None:
    """FSDP2: one group for each decoder layer, each layer of a vision tower and an untied embedding; the root group
    has the rest."""
    on_gpu = mesh.device_type != "cpu"
    if "tensor" in mesh.mesh_dim_names:
        dist.tensor.parallel.parallelize_module(model, mesh["tensor"], parallel_styles(model), src_data_rank=None)
        mesh = mesh["shard"]
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy()
    if any(p.dtype != compute_dtype for p in model.parameters()):
        master_dtype = next((p.dtype for p in model.parameters() if p.requires_grad), compute_dtype)
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master_dtype)
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "mp_policy": precision}
    layer_classes = getattr(model, "fsdp_layer_classes", set(model._no_split_modules))
    for module in [m for m in model.modules() if type(m).__name__ in layer_classes]:
        fully_shard(module, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if not tied:  # tied weights must stay in one group, the root: torch 2.11 silently unties them otherwise
        fully_shard(embedding, **options)
    fully_shard(model, **options)
    assert head is None or (head.weight is embedding.weight) == tied
    for name in getattr(model, "fsdp_forward_methods", ()):
        dist.fsdp.register_fsdp_forward_method(model, name)


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def compute_device(model: torch.nn.Module) -> torch.device:
    """The device on which the model computes. With `cpu_offload` its parameters are elsewhere."""
    param = next(model.parameters())
    return torch.device(param.device_mesh.device_type) if isinstance(param, DTensor) else param.device


def trainable_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Those that the optimizer updates. Call it once, before any forward: with FSDP2 a forward without backward leaves
    the root's parameters unsharded, and what `model.parameters()` returns then has no gradients."""
    return [master_of(model, p) for p in model.parameters() if p.requires_grad]


def set_gradient_sync(model: torch.nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over ranks (the last micro-batch) or only accumulates them here."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)
    elif copy := copy_of(model):
        copy.sync = sync


def clip_grad_norm(parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """Clips the global gradient to `max_norm` (2-norm over all ranks) and returns the norm before clipping."""
    by_mesh: dict[Any, list[torch.nn.Parameter]] = {}  # tensor parallel splits some over another dimension
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
def weight_shards(
    model: "PreTrainedModel", dtype: torch.dtype | None = None, part: Part = "merged"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, this rank's shard as a DTensor, or what it holds whole, as `dtype`). A collective. part:

    merged: each weight, by its name before `add_lora`, with its LoRA update: W + alpha / rank x B A. Rows of W and B
    are split alike, and A is gathered. At the end come the saved buffers, whole and in their own dtype.
    base: the same without the update. adapter: each A and B, by the names in peft's files."""
    device = compute_device(model)
    for module in fsdp_modules(model):
        module.reshard()
    for name, param in model.named_parameters():
        if (".lora_" in name) != (part == "adapter"):
            continue
        value = (param if param.dtype == dtype else master_of(model, param)).detach().to(device)
        if part != "merged":
            name = name.replace(".base_layer.", ".").replace(".default.", ".")
        elif ".base_layer." in name:
            name, value = merged_weight(model, name, value)
        yield name, value if dtype is None else value.to(dtype)
    if part != "adapter":
        yield from ((name, value.to(device)) for name, value in saved_buffers(model).items())


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers in a model's files, such as the routers' `e_score_correction_bias` (DeepSeek-V3)."""
    buffers = dict(model.named_buffers())
    return {name: value for name, value in model.state_dict().items() if name in buffers}


@torch.no_grad()
def merged_weight(model: "PreTrainedModel", name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """(the parameter's name before `add_lora`, its value `weight` with the adapters' update added). A collective if
    the adapters are sharded."""
    path, adapted, leaf = name.rpartition(".base_layer.")
    if adapted and leaf == "weight":
        layer = model.get_submodule(path)
        loras = (layer.lora_A["default"], layer.lora_B["default"])
        A, B = (master_of(model, lora.weight).to(weight.device) for lora in loras)
        if not isinstance(weight, DTensor):
            A, B = full_tensor(A), full_tensor(B)
        elif isinstance(A, DTensor):
            A = A.redistribute(placements=[Replicate()] * A.device_mesh.ndim)
        weight = (weight + layer.scaling["default"] * (B @ A)).to(weight.dtype)
    return f"{path}.{leaf}" if adapted else name, weight


def iter_full_params(
    model: torch.nn.Module, dtype: torch.dtype | None = None, part: Part = "merged"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole tensor) of the weights of `weight_shards`, one at a time. A collective: every rank must run
    through all of it. Extra memory: twice the largest parameter. Tied weights come once, by the embedding's name."""
    for name, shard in weight_shards(model, dtype, part):
        yield name, full_tensor(shard)


@contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """In the block all parameters are whole: forward passes are no collectives, so that ranks may run different
    numbers of them (generation). Run no backward in it."""
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
