"""ZeRO-1 (arXiv 1910.02054): ranks compute with whole weights, and each has its shard of master weights and optimizer.

The module holds leaves in the compute dtype and runs without FSDP2's hooks, which double the time that Python needs for
a layer. Gradients add up in the masters' dtype and are averaged over ranks; the leaves are copied from the masters
after each update. At one rank, where the compute dtype is the masters', the leaves are the masters: no copy."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Module, Parameter
from torch.nn.functional import pad

# their names from torch 2.13 on
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
COLLECTIVE_BYTES = 64 << 20  # of masters or gradients in a collective; a larger tensor goes alone


def replace_parameters(model: Module, new: Callable[[Parameter], Parameter]) -> None:
    """Sets each parameter to new(parameter), in all modules that share it."""
    replaced: dict[Parameter, Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if param not in replaced:
                    replaced[param] = new(param)
                module._parameters[name] = replaced[param]


def place_masters(model: Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Moves the model to the mesh's device: of trained parameters this rank's rows, frozen ones whole in the compute
    dtype. Parameters on the meta device become empty."""
    device = mesh.device_type

    def place(param: Parameter) -> Parameter:
        tensor = param.detach()
        if not param.requires_grad:
            tensor = tensor.to(compute_dtype)
        elif mesh.size() > 1:
            tensor = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None).clone()
        tensor = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        return Parameter(tensor, param.requires_grad)

    replace_parameters(model, place)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


class ComputeCopy:
    """The leaves and masters of a model's trained parameters: model.compute_copy, where they differ."""

    def __init__(self, model: Module, mesh: DeviceMesh, compute_dtype: torch.dtype):
        self.mesh, self.ranks = mesh, mesh.size()
        self.sync = True  # whether the next backward pass averages the gradients over ranks
        self.masters: dict[Parameter, Any] = {}  # {leaf: parameter}, DTensors at several ranks
        self._new: dict[Parameter, torch.Tensor] = {}  # gradients, whole, in the compute dtype
        self._sums: dict[Parameter, torch.Tensor] = {}  # those before, in the masters' dtype

        def leaf_of(master: Parameter) -> Parameter:
            if not master.requires_grad:
                return master
            leaf = Parameter(torch.empty(master.shape, dtype=compute_dtype, device=mesh.device_type))
            leaf.register_post_accumulate_grad_hook(self._add)
            self.masters[leaf] = master
            return leaf

        replace_parameters(model, leaf_of)
        self.refresh()

    def _add(self, leaf: Parameter) -> None:
        """Some gradients at a time: a kernel for each would take the host longer than the GPU."""
        assert leaf.grad is not None
        if leaf in self._new:
            self._add_up()
        self._new[leaf], leaf.grad = leaf.grad, None
        if sum(gradient.nbytes for gradient in self._new.values()) > COLLECTIVE_BYTES:
            self._add_up()

    def _add_up(self) -> None:
        if not self._new:
            return
        new = {leaf: torch.empty_like(leaf, dtype=self.masters[leaf].dtype) for leaf in self._new}
        torch._foreach_copy_([*new.values()], [*self._new.values()])
        if again := [leaf for leaf in new if leaf in self._sums]:
            torch._foreach_add_([self._sums[leaf] for leaf in again], [new[leaf] for leaf in again])
        self._sums, self._new = new | self._sums, {}

    def reduce_gradients(self) -> None:
        """After a backward pass: adds the gradients, averaged over ranks, to those of the masters. A collective."""
        self._add_up()
        if not self.sync:
            return
        leaves = self._leaves_with_gradients()
        for bucket in self._buckets(leaves) if self.ranks > 1 else ():
            parts = [self._by_rank(self._sums.pop(leaf)) for leaf in bucket]
            rows = torch.cat(parts, 1) if len(parts) > 1 else parts[0]  # (ranks, n)
            del parts
            own = rows.new_empty(rows.shape[1])
            reduce_scatter(own, rows.flatten(), dist.ReduceOp.AVG, self.mesh.get_group())
            for leaf, shard in zip(bucket, own.split([self._padded(leaf) for leaf in bucket])):
                self._sums[leaf] = self._shard(leaf, shard)
        for leaf in leaves:
            master, gradient = self.masters[leaf], self._sums.pop(leaf)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def _leaves_with_gradients(self) -> list[Parameter]:
        """Of any rank, in the same order on all: an expert without tokens has none here, and gets 0."""
        if self.ranks == 1:
            return [leaf for leaf in self.masters if leaf in self._sums]
        has = torch.tensor([leaf in self._sums for leaf in self.masters]).int()  # on the CPU: no GPU waits
        dist.all_reduce(has, dist.ReduceOp.MAX, self.mesh.get_group())
        leaves = [leaf for leaf, any_rank in zip(self.masters, has.tolist()) if any_rank]
        for leaf in leaves:
            if leaf not in self._sums:
                self._sums[leaf] = torch.zeros_like(leaf, dtype=self.masters[leaf].dtype)
        return leaves

    @torch.no_grad()
    def refresh(self) -> None:
        """After an update of the masters: copies them to the leaves. A collective."""
        if self.ranks == 1:
            torch._foreach_copy_([*self.masters], [*self.masters.values()])
            return
        for bucket in self._buckets([*self.masters]):
            sizes = [self._padded(leaf) for leaf in bucket]
            shards = [self.masters[leaf].to_local().to(leaf.dtype).flatten() for leaf in bucket]
            own = torch.cat([pad(x, (0, size - len(x))) for x, size in zip(shards, sizes)])
            rows = own.new_empty(self.ranks * len(own))
            all_gather(rows, own, self.mesh.get_group())
            for leaf, whole in zip(bucket, rows.view(self.ranks, -1).split(sizes, 1)):
                leaf.copy_(whole.reshape(-1)[: leaf.numel()].view_as(leaf))

    def _buckets(self, leaves: list[Parameter]) -> Iterator[list[Parameter]]:
        """Successive leaves of at most COLLECTIVE_BYTES of masters; a larger one goes alone."""
        bucket: list[Parameter] = []
        size = 0
        for leaf in leaves:
            size += leaf.numel() * self.masters[leaf].itemsize
            if bucket and size > COLLECTIVE_BYTES:
                yield bucket
                bucket, size = [], leaf.numel() * self.masters[leaf].itemsize
            bucket.append(leaf)
        if bucket:
            yield bucket

    def _padded(self, leaf: torch.Tensor) -> int:
        """Elements of a rank's rows: as many on each, as of Shard(0) on the first."""
        return math.ceil(leaf.shape[0] / self.ranks) * math.prod(leaf.shape[1:])

    def _by_rank(self, gradient: torch.Tensor) -> torch.Tensor:
        """(ranks, padded)"""
        flat, size = gradient.flatten(), self._padded(gradient) * self.ranks
        return pad(flat, (0, size - len(flat))).view(self.ranks, -1)

    def _shard(self, leaf: Parameter, padded: torch.Tensor) -> DTensor:
        local = self.masters[leaf].to_local()
        rows = padded[: local.numel()].view_as(local)
        return DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False, shape=leaf.shape, stride=leaf.stride())


def copy_of(model: Module) -> ComputeCopy | None:
    return getattr(model, "compute_copy", None)


def master_of(model: Module, param: Parameter) -> Parameter:
    """What the optimizer updates: the parameter, or its master."""
    copy = copy_of(model)
    return copy.masters.get(param, param) if copy else param


def reduce_gradients(model: Module) -> None:
    """After each backward pass. With FSDP2 the pass has done it. A collective."""
    if copy := copy_of(model):
        copy.reduce_gradients()


def pending_gradients(model: Module) -> list[torch.Tensor]:
    """Those that wait for a backward pass that reduces them."""
    return [*copy._sums.values(), *copy._new.values()] if (copy := copy_of(model)) else []


def refresh_weights(model: Module) -> None:
    """After each update: the module computes with the new weights. A collective."""
    if copy := copy_of(model):
        copy.refresh()


@contextmanager
def masters_in_place(model: Module) -> Iterator[None]:
    """In the block the module's parameters are the masters, as with FSDP2. Run no forward pass in it."""
    masters: Mapping[Parameter, Parameter] = copy.masters if (copy := copy_of(model)) else {}
    leaves = {master: leaf for leaf, master in masters.items()}
    replace_parameters(model, lambda param: masters.get(param, param))
    try:
        yield
    finally:
        replace_parameters(model, lambda param: leaves.get(param, param))
