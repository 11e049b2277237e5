"""How weights get into vLLM: the backend "direct" of its weight transfer. Engine and trainer are one process, and the
engine takes the trainer's tensors by reference.

It also works on a CPU, where two of vLLM's caches survive a reload and are rebuilt here: the packed copy of a tied
output head, and the packed experts of a mixture."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

# vLLM says it at each sync, of layers without weights of their own: a tied head, rotary embeddings. The
# sync's probe would find missing weights
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: "Failed to load weights" not in record.getMessage()
)


Weights = Iterable[tuple[str, torch.Tensor]]  # by the names of a checkpoint


@dataclass
class DirectUpdateInfo(WeightTransferUpdateInfo):
    weights: Any = None  # Weights that can be iterated again


class DirectEngine(WeightTransferEngine):
    init_info_cls = WeightTransferInitInfo
    update_info_cls = DirectUpdateInfo
    sinks: list[tuple[str, torch.Tensor]]

    def init_transfer_engine(self, init_info): ...

    def start_weight_update(self):
        for layer in self.model.modules() if self.device.type == "cpu" else ():
            if getattr(layer, "moe_kernel", None) is not None:
                layer.moe_kernel = None  # experts are packed only where there is no kernel yet
        initialize_layerwise_reload(self.model)
        self.sinks = []

    def receive_weights(self, update_info):
        self.load(update_info.weights)

    def load(self, weights: Weights) -> None:
        if type(self.model).__name__ == "GptOssForCausalLM":
            weights = self.split_experts(weights)
        self.model.load_weights(iter(weights))

    def split_experts(self, weights: Weights) -> Weights:
        """The weights of a gpt-oss as vLLM takes them in a reload: experts one by one. It copies sinks
        (and fused experts) into parameters that the reload replaces, so sinks are loaded after it."""
        for name, tensor in weights:
            layer, experts, param = name.partition(".mlp.experts.")
            if experts:
                yield from ((f"{layer}{experts}{i}.{param}", expert) for i, expert in enumerate(tensor))
            elif name.endswith(".sinks"):
                self.sinks.append((name, tensor.clone()))
            else:
                yield name, tensor

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():  # on a CPU linear layers are packed
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and weight is not None and weight.dim() == 2 and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
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


WeightTransferEngineFactory.register_engine("direct", DirectEngine)
