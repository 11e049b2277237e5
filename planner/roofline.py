"""Predicts seconds from a trace: each kernel takes the longest of its launch, its memory traffic and its FLOPs.

The shares of an accelerator's peaks that kernels reach are assumptions (EFFICIENCY), and so is the time of a launch.
Collectives run beside the kernels and count where they take longer than all of these. So does the host: a micro-batch
takes its kernels' time, or the time in which Python launches them, if that is longer (HOST_LAYER_S)."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

LAUNCH_S = 4e-6
EFFICIENCY = {"products": 0.7, "attention": 0.35, "attention backward": 0.28, "memory": 0.85, "link": 0.75}
"""Assumed shares of the peaks: matrix products in bfloat16, attention by FlashAttention 2 on Hopper"""
HOST_LAYER_S = {"fsdp2": 8.6e-3, "zero1": 4.3e-3}
"""Seconds of the host for a layer, forward and backward, for any number of tokens and of launches. fsdp2: measured on
an H200's host (docs/gpu.md: 28 layers of 1.5B take 240 ms, 275 with --compile, 256 with --use-liger-kernel). zero1:
predicted from 201 Python calls a layer instead of 1,594, with which 28 tiny layers take 36.5 ms on a CPU, not 73.1"""
PASS_SHARE = 1 / 3  # of the host's time that a pass without gradients takes: an assumption
UPDATE = ("forward", "loss", "backward", "last layer", "critic")  # moments of a micro-batch


class Peaks(NamedTuple):
    """Of one accelerator."""

    flops: float = 989e12  # a second, of dense matrix products in bfloat16
    memory: float = 3.35e12  # bytes a second
    link: float = 450e9  # bytes a second and direction, to the others of its node
    network: float = 50e9  # bytes a second, to other nodes
    per_node: int = 8


H100 = Peaks()


class Kernel(NamedTuple):
    """An operation that a trace saw."""

    moment: str  # log-probs, forward, ..., optimizer
    forward: bool  # before the backward pass
    in_layer: bool
    compiled: bool  # on a GPU
    name: str
    kind: str  # products, attention, attention backward, memory, link
    bytes: int
    flops: float
    reads: tuple[tuple[int, int], ...] = ()  # (number of a storage, bytes)
    writes: tuple[tuple[int, int], ...] = ()


# ---- what an operation is ------------------------------------------------------------------------
NOTHING = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "lift_fresh", "record_stream", "resize_")
PICKS = ("embedding", "index_select", "index", "gather")  # they read as much as they write
WRITES = ("copy_", "zero_", "fill_")  # they do not read what they write


def kernel(func: Any, args: tuple, kwargs: dict, inputs: list, out: Any, value: Callable) -> tuple | None:
    """(name, kind, bytes, FLOPs) of an operation; None if it launches nothing. value: of a tensor."""
    name, outputs = func._opname, [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    if name.startswith(NOTHING) or func.namespace in ("prim", "profiler") or _is_view(func):
        return None
    if func.namespace in ("c10d", "_c10d_functional"):
        return name, "link", max(map(_bytes, [*inputs, *outputs]), default=0), 0.0
    read = [] if name in PICKS else inputs[1:] if name in WRITES else inputs
    size = sum(map(_bytes, read)) + sum(map(_bytes, outputs)) * (2 if name in PICKS else 1)
    if "attention" in name or "attn" in name:
        backward = "backward" in name
        q = inputs[1 if backward else 0]
        flops = (
            (10.0 if backward else 4.0) * _pairs(name, inputs, value) * q.shape[1] * q.shape[-1]
        )  # heads x head size
        return name, "attention backward" if backward else "attention", size, flops
    if (formula := flop_registry.get(func._overloadpacket)) is not None:
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        return name, "products", size, float(formula(*args, **kwargs, out_val=out))
    return name, "memory", size, 0.0


def _pairs(name: str, inputs: list, value: Callable) -> float:
    """Pairs of a query and a key that it sees, if attention is causal and queries are a sequence's last tokens."""
    if "varlen" in name:
        cu_q, cu_k = (value(x) for x in inputs if x.dtype == torch.int32 and x.dim() == 1)
        queries, keys = cu_q.diff().double(), cu_k.diff().double()
        return float((queries * (keys - queries) + queries * (queries + 1) / 2).sum())
    q, k, *_ = inputs[1:] if "backward" in name else inputs
    rows, L, S = q.shape[0], q.shape[2], k.shape[2]
    causal = "flash" in name
    return rows * (L * (S - L) + L * (L + 1) / 2 if causal and S >= L else L * S)


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _bytes(x: torch.Tensor) -> int:
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())


# ---- seconds -------------------------------------------------------------------------------------
def seconds_of(k: Kernel, ranks: int, peaks: Peaks = H100) -> float:
    if k.kind == "link":
        bandwidth = peaks.link if ranks <= peaks.per_node else peaks.network
        return k.bytes * (ranks - 1) / ranks / (bandwidth * EFFICIENCY["link"])
    moving = k.bytes / (peaks.memory * EFFICIENCY["memory"])
    return max(LAUNCH_S, moving, k.flops / (peaks.flops * EFFICIENCY[k.kind]))


def seconds(kernels: Iterable[Kernel], ranks: int, peaks: Peaks = H100) -> float:
    """Of the kernels, one after another, or of their collectives if these take longer."""
    sums = {True: 0.0, False: 0.0}
    for k in kernels:
        sums[k.kind == "link"] += seconds_of(k, ranks, peaks)
    return max(sums.values())


def seconds_by_kind(kernels: Iterable[Kernel], ranks: int, peaks: Peaks = H100) -> dict[str, float]:
    """Of forward and backward passes with gradients: where the time goes. launches: kernels that are over sooner."""
    sums = dict.fromkeys([*EFFICIENCY, "launches"], 0.0)
    for k in kernels:
        if k.moment in UPDATE:
            time = seconds_of(k, ranks, peaks)
            sums["launches" if k.kind != "link" and time == LAUNCH_S else k.kind] += time
    return sums


ALONE = (*PICKS, "index_add", "new_zeros", "zeros")  # around attention, which is not compiled


def fuse(kernels: list[Kernel], layers: bool) -> list[Kernel]:
    """As torch.compile fuses: neighbours that only move memory become one kernel, which reads what none of them wrote,
    and writes what others read. This is so in what follows the head's matrix product, which is always compiled on a
    GPU, and with `layers` in the layers. Inductor may also compute values again, which is not counted."""
    last_read = {number: i for i, k in enumerate(kernels) for number, _ in k.reads}
    fused: list[Kernel] = []
    run: list[Kernel] = []

    def end_run(at: int) -> None:
        if run:
            written = {number: size for k in run for number, size in k.writes}
            read = {number: size for k in run for number, size in k.reads if number not in written}
            size = sum(read.values()) + sum(n for number, n in written.items() if last_read.get(number, -1) >= at)
            fused.append(run[0]._replace(name="fused", bytes=size))
            run.clear()

    for i, k in enumerate(kernels):
        if not ((k.compiled or (layers and k.in_layer)) and k.kind == "memory" and k.name not in ALONE):
            end_run(i)
            fused.append(k)
        else:
            run.append(k)
    end_run(len(kernels))
    return fused


class Speed(NamedTuple):
    """What a trace predicts of one rank."""

    kernels: float  # seconds of a micro-batch on the GPU, forward and backward
    host: float  # seconds of a micro-batch on the host
    update: float  # seconds a token of forward and backward, in full micro-batches; PPO's critic with it
    log_probs: float  # seconds a token of a pass without gradients
    optimizer: float  # seconds an update
    mfu: float  # of forward and backward
    launches: float  # a layer, forward and backward, FSDP's own not counted
    tokens: int  # of a full micro-batch


def predict(
    kernels: list[Kernel],
    tokens: list[int],
    layers: int,
    flops: float,
    ranks: int,
    host_layer: float,
    peaks: Peaks = H100,
) -> Speed:
    """The speed of a rank on so many ranks. tokens: of the traced micro-batches; layers, flops: of the models."""
    of_update = [k for k in kernels if k.moment in UPDATE]
    of_pass = [k for k in of_update if k.forward and k.moment != "critic"]
    launches = sum(k.in_layer and k.moment != "critic" for k in of_update) / len(tokens) / layers
    on_gpu, of_forward = (seconds(part, ranks, peaks) for part in (of_update, of_pass))
    host = host_layer * layers * len(tokens) * (1 + any(k.moment == "critic" for k in kernels))
    update, log_probs = max(on_gpu, host), max(of_forward, PASS_SHARE * host)
    optimizer = seconds([k for k in kernels if k.moment == "optimizer"], ranks, peaks)
    each, per_token = (on_gpu / len(tokens), host / len(tokens)), (update / sum(tokens), log_probs / sum(tokens))
    return Speed(*each, *per_token, optimizer, flops / update / peaks.flops, launches, max(tokens))
