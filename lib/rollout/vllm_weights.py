"""How weights get into vLLM's workers: two backends of its weight transfer, and a worker extension.

"direct": engine and trainer are one process, and the engine takes the trainer's tensors by reference.
"broadcast": a server's workers join a process group with the trainer's first rank and receive buckets
of tensors. Both also work on a CPU, where two of vLLM's caches survive a reload and are rebuilt here:
the packed copy of a tied output head, and the packed experts of a mixture."""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from lib.distributed import address_towards, in_thread, join_group

# vLLM says it at each sync, of layers without weights of their own: a tied head, rotary embeddings. The
# sync's probe would find missing weights
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: "Failed to load weights" not in record.getMessage()
)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Call it before a reload."""
    for layer in model.modules():
        if getattr(layer, "moe_kernel", None) is not None:
            layer.moe_kernel = None  # experts are packed only where there is no kernel yet


def pack_linear_layers(model: torch.nn.Module) -> None:
    """Call it after a reload."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        is_matrix = weight is not None and weight.dim() == 2 and weight.numel()
        if hasattr(layer, "cpu_linear") and is_matrix:
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)


def is_gpt_oss(model: torch.nn.Module) -> bool:
    return type(model).__name__ == "GptOssForCausalLM"


def split_experts(
    weights: Iterable[tuple[str, torch.Tensor]], sinks: list[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a gpt-oss as vLLM takes them in a reload: experts one by one. It copies sinks
    (and fused experts) into parameters that the reload replaces, so `sinks` are loaded after it."""
    for name, tensor in weights:
        layer, experts, param = name.partition(".mlp.experts.")
        if experts:
            yield from ((f"{layer}{experts}{i}.{param}", expert) for i, expert in enumerate(tensor))
        elif name.endswith(".sinks"):
            sinks.append((name, tensor.clone()))
        else:
            yield name, tensor


@dataclass
class DirectUpdateInfo(WeightTransferUpdateInfo):
    weights: Any = None  # yields (checkpoint name, tensor), and can be iterated again


class DirectEngine(WeightTransferEngine):
    init_info_cls = WeightTransferInitInfo
    update_info_cls = DirectUpdateInfo
    sinks: list[tuple[str, torch.Tensor]]

    def init_transfer_engine(self, init_info): ...

    def start_weight_update(self):
        if self.device.type == "cpu":
            forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
        self.sinks = []

    def receive_weights(self, update_info):
        self.load(update_info.weights)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if is_gpt_oss(self.model):
            weights = split_experts(weights, self.sinks)
        self.model.load_weights(iter(weights))

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)
        pack_linear_layers(self.model)
        if self.sinks:
            self.model.load_weights(iter(self.sinks))

    def shutdown(self): ...


def load_adapter(worker: Any, tensors: dict[str, torch.Tensor], rank: int, alpha: float, number: int) -> None:
    """Gives a worker the LoRA adapter `number` in place of the one before. tensors: by peft's names.
    Raises ValueError for layers to which vLLM would silently add nothing."""
    manager = worker.model_runner.lora_manager
    adapters, model = manager._adapter_manager, worker.model_runner.get_model()
    helper: Any = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[])
    mapper, dtype = getattr(model, "hf_to_vllm_mapper", None), manager.lora_config.lora_dtype
    # copies, since vLLM multiplies B by alpha / rank in place
    own = {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}
    settings = {"device": str(worker.device), "dtype": dtype}
    settings["weights_mapper"] = mapper and mapper.get_rename_mapper()
    lora = LoRAModel.from_lora_tensors(number, own, helper, **settings)
    adapters.remove_all_adapters()
    adapters.add_adapter(lora)  # packs q, k, v into qkv
    if unknown := sorted(lora.loras.keys() - adapters.modules.keys()):
        raise ValueError(f"vLLM adapts no {unknown[0]} ({len(unknown)} of {len(lora.loras)} layers)")
    adapters.activate_adapter(number)


@dataclass
class BroadcastInitInfo(WeightTransferInitInfo):
    host: str  # address of the trainer's first rank, as the server sees it
    port: int  # of the store where all meet
    file: str  # where they meet instead, if it is not empty; only this user can open it
    device: str  # the trainer's type of device; the server must have the same
    first_rank: int  # the rank of this server's first worker in the group
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
    group: Any = None  # what join_group returns

    def init_transfer_engine(self, init_info):
        if init_info.device != self.device.type:
            raise ValueError(f"the trainer is on {init_info.device}, the server on {self.device.type}")
        self.shutdown()  # leaves the group of an earlier run
        parallel = self.parallel_config
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store: dist.Store
        if init_info.file:
            store, address = dist.FileStore(init_info.file, init_info.size), init_info.host
        else:
            store = dist.TCPStore(init_info.host, init_info.port, is_master=False)
            address = address_towards(init_info.host, init_info.port)
        limit_s = init_info.timeout_s
        size, device = init_info.size, self.device
        joining = in_thread(lambda: join_group(store, rank, size, device, limit_s, address))
        self.group = joining.result(limit_s)  # NCCL would wait for ever for a trainer that is gone

    def receive_weights(self, update_info):
        """Receives one bucket: tensors of one dtype, end to end."""
        numels = [torch.Size(shape).numel() for shape in update_info.shapes]
        dtype = getattr(torch, update_info.dtype)
        bucket = torch.empty(sum(numels), dtype=dtype, device=self.device)
        self.group.broadcast(bucket, 0).wait()
        parts = zip(bucket.split(numels), update_info.shapes)
        self.load(zip(update_info.names, [part.view(shape) for part, shape in parts]))

    def shutdown(self):
        if self.group is not None:
            self.group.abort()  # NCCL's shutdown waits for all ranks, and the trainer may be gone
            self.group = None


class WorkerExtension:
    """Methods for every worker of a server. The server's flag imports this module, with its backends."""

    # attributes of the worker; vLLM makes this class a base of the worker's
    vllm_config: Any
    device: torch.device
    model_runner: Any

    def weight_transfer_backend(self) -> str | None:
        config = self.vllm_config.weight_transfer_config
        return config and config.backend

    def take_lease(self, ours: dict, seconds: float, over: dict | None = None) -> dict | None:
        """Lends the server to the run `ours`, also if `over` has it. Returns None, or the run that has it."""
        holder, until = getattr(self, "_lease", (ours, 0.0))
        if holder["run"] != ours["run"] and holder != over and time.monotonic() < until:
            return holder
        self._lease = ours, time.monotonic() + seconds
        return None

    def reload_from(self, weights_path: str) -> None:
        """vLLM's reload_weights would leave stale caches on a CPU and lose weights of gpt-oss."""
        engine = DirectEngine(None, self.vllm_config, self.device, self.model_runner.get_model())
        files = sorted(str(file) for file in Path(weights_path).glob("*.safetensors"))
        engine.start_weight_update()
        engine.load(safetensors_weights_iterator(files, False))
        engine.finish_weight_update()
        self.model_runner.reset_encoder_cache()


for name, engine in {"direct": DirectEngine, "broadcast": BroadcastEngine}.items():
    WeightTransferEngineFactory.register_engine(name, engine)
