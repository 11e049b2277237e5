"""How weights come into vLLM's workers: backends of its weight transfer, and an extension of the workers of a server.

"direct": the engine takes the trainer's tensors by reference, in one process. "broadcast": the workers of a server
join a process group with the trainer's first rank and receive buckets of tensors. vLLM's own backends need CUDA.
    python -m vllm.entrypoints.openai.api_server --host 127.0.0.1 \\
        --worker-extension-cls lib.rollout.vllm_weights.WorkerExtension \\
        --weight-transfer-config '{"backend": "broadcast"}' ...
On a CPU two of vLLM's caches outlive a reload, silently: the packed copy of a tied output head, and the packed experts
of a mixture of experts; both are made again here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lib.distributed import address_towards, join_group


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Before a reload."""
    for layer in model.modules():
        if getattr(layer, "moe_kernel", None) is not None:
            layer.moe_kernel = None  # experts are packed only where there is no kernel yet


def pack_linear_layers(model: torch.nn.Module) -> None:
    """After a reload."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.dim() == 2 and weight.numel():
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)


@dataclass
class DirectInitInfo(WeightTransferInitInfo):
    pass


@dataclass
class DirectUpdateInfo(WeightTransferUpdateInfo):
    weights: Any = None  # a re-iterable of (checkpoint name, tensor)


class DirectEngine(WeightTransferEngine):
    init_info_cls = DirectInitInfo
    update_info_cls = DirectUpdateInfo

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        if self.device.type == "cpu":
            forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        self.model.load_weights(iter(update_info.weights))

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)
        pack_linear_layers(self.model)

    def shutdown(self):
        pass


@dataclass
class BroadcastInitInfo(WeightTransferInitInfo):
    host: str  # of the trainer's first rank, as the server sees it
    port: int
    device: str  # cpu or cuda: of the trainer, and so of the server
    first_rank: int  # of this server's workers
    size: int
    timeout_s: float


@dataclass
class BroadcastUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    shapes: list[list[int]]
    dtype: str


class BroadcastEngine(DirectEngine):
    init_info_cls = BroadcastInitInfo
    update_info_cls = BroadcastUpdateInfo
    group: Any = None  # of join_group

    def init_transfer_engine(self, init_info):
        if init_info.device != self.device.type:
            raise ValueError(f"the trainer is on {init_info.device}, the server on {self.device.type}")
        self.shutdown()  # the group of a run before
        parallel = self.parallel_config
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(init_info.host, init_info.port, is_master=False)
        address = address_towards(init_info.host, init_info.port)
        self.group = join_group(store, rank, init_info.size, self.device, init_info.timeout_s, address)

    def receive_weights(self, update_info):
        """One bucket: tensors of one dtype, end to end."""
        numels = [torch.Size(shape).numel() for shape in update_info.shapes]
        bucket = torch.empty(sum(numels), dtype=getattr(torch, update_info.dtype), device=self.device)
        self.group.broadcast(bucket, 0).wait()
        tensors = [part.view(shape) for part, shape in zip(bucket.split(numels), update_info.shapes)]
        self.model.load_weights(zip(update_info.names, tensors))

    def shutdown(self):
        if self.group is not None:
            self.group.shutdown()
            self.group = None


class WorkerExtension:
    """Methods of every worker of a server. Naming it imports this module there, which makes the backends known."""

    # of the worker, whose base class vLLM makes this
    vllm_config: Any
    device: torch.device
    model_runner: Any
    reload_weights: Callable[..., None]

    def weight_transfer_backend(self) -> str | None:
        config = self.vllm_config.weight_transfer_config
        return config and config.backend

    def reload_from(self, weights_path: str) -> None:
        """reload_weights, that is right on a CPU, too."""
        if self.device.type == "cpu":
            forget_packed_experts(self.model_runner.get_model())
        self.reload_weights(weights_path=weights_path)
        pack_linear_layers(self.model_runner.get_model())


for name, engine in {"direct": DirectEngine, "broadcast": BroadcastEngine}.items():
    WeightTransferEngineFactory.register_engine(name, engine)
