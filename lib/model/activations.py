"""What a forward pass keeps for its backward pass: all, the inputs of layers that are recomputed, or in CPU memory."""

from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel, layers: list[Any], share: float) -> None:
    """Gradient checkpointing for this share of the decoder's layers and, if it is not 0, for a vision tower. It takes
    the first layers: the backward pass comes to them last, when it has freed the activations of the others."""
    if count := round(share * len(layers)):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers[count:]:
            layer.gradient_checkpointing = False


def keeping_activations_on_cpu(forward):
    """torch's save_on_cpu, but not for weights, which FSDP frees in between and gathers again, and without the host
    waiting for each tensor: both copies are queued on one stream."""

    def pack(tensor: torch.Tensor):
        of = tensor._base if tensor._is_view() else tensor
        if tensor.device.type == "cpu" or isinstance(of, torch.nn.Parameter):
            return tensor
        host = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else packed[1].to(packed[0], non_blocking=True)

    @wraps(forward)
    def method(*args, **kwargs):
        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return method
