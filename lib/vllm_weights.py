"""vLLM's weight-transfer backend "direct": the engine takes the trainer's tensors by reference, in one process.

vLLM's own backends need CUDA. On a CPU two of its caches outlive a reload, silently: the packed copy of a tied output
head, and the packed experts of a mixture of experts; both are made again here.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


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
            for layer in self.model.modules():
                if getattr(layer, "moe_kernel", None) is not None:
                    layer.moe_kernel = None  # experts are packed only where there is no kernel yet
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        self.model.load_weights(iter(update_info.weights))

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and weight is not None and weight.dim() == 2 and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self):
        pass


def register() -> None:
    if "direct" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("direct", DirectEngine)
