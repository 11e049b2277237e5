"""How weights get into a vLLM server: the backend "broadcast" of its weight transfer, and an extension of its workers,
which join a process group with the trainer's first rank and receive buckets of tensors."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from lib.distributed import in_thread
from lib.rollout.vllm_weights import DirectEngine
from servers.group import address_towards, join_group


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
    """Methods for every worker of a server. The server's flag imports this module, with its backend."""

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


WeightTransferEngineFactory.register_engine("broadcast", BroadcastEngine)
