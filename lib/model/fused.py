"""Fused kernels for a layer's small operations on a GPU: liger-kernel's (arXiv 2410.10989) norms and gated MLPs, and
rotary.py's rotary embedding; and one product for layers of one input. What they fit is read from transformers' own
code, the same text in all models of a kind: what computes otherwise stays as it is."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction, LigerRMSNormFunction, LigerSiLUMulFunction
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama

from lib.model.rotary import rotate


def fuse(model: PreTrainedModel) -> None:
    """In place, after `shard_model`. FSDP2 places weights itself, so that it has a product for each layer."""
    joins = not any(isinstance(p, DTensor) for p in model.parameters())
    layers = [module for module in model.modules() if _same(type(module).forward, llama.LlamaDecoderLayer.forward)]
    before = {norm for layer in layers for norm in layer.children()}  # before products
    for module in [*model.modules()]:
        forward = type(module).forward
        if _same(forward, llama.LlamaRMSNorm.forward):
            module.forward = partial(_rms_norm, module, module in before)
        elif _same(forward, llama.LlamaMLP.forward) and isinstance(module.act_fn, SiLUActivation):
            joined = _join([module.gate_proj, module.up_proj]) if joins else None
            module.forward = partial(_joined_mlp, module, joined) if joined else partial(_gated_mlp, module)
        elif hasattr(module, "q_proj") and hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            _fuse_rotary(module)
            projections = module.q_proj, module.k_proj, module.v_proj
            adapted = [getattr(layer, "base_layer", layer) for layer in projections]  # by LoRA
            if joins and (joined := _join(adapted)):
                for number, layer in enumerate(adapted):
                    layer.forward = partial(joined.part, number)


def _same(fn, other: Callable) -> bool:
    return inspect.isfunction(fn) and inspect.getsource(fn) == inspect.getsource(other)


def _fuse_rotary(attention: Any) -> None:
    """Its forward finds our rotary embedding by the name of transformers'. On a CPU it computes as before."""
    forward = inspect.unwrap(type(attention).forward)
    names = forward.__globals__
    if all(_same(names.get(name), getattr(llama, name)) for name in ("apply_rotary_pos_emb", "rotate_half")):
        names = names | {"apply_rotary_pos_emb": partial(rotate, names["apply_rotary_pos_emb"])}
        own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        attention.forward = MethodType(own, attention)


def _rms_norm(norm, in_place: bool, x: torch.Tensor) -> torch.Tensor:
    """in_place: the gradient takes the memory of its input, which after a product nothing else reads."""
    return LigerRMSNormFunction.apply(x, norm.weight, norm.variance_epsilon, 0.0, "llama", in_place)


def _gated_mlp(mlp, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(LigerSiLUMulFunction.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def _joined_mlp(mlp, joined: "JoinedLinear", x: torch.Tensor) -> torch.Tensor:
    gate_and_up = joined(x.flatten(0, -2))
    return mlp.down_proj(LigerFusedGateUpSiLUMulFunction.apply(gate_and_up, True)).view_as(x)  # the gradient in place


# ---- one product for layers of one input ---------------------------------------------------------
def _join(layers: Sequence[Any]) -> "JoinedLinear | None":
    plain = {type(layer) for layer in layers} == {torch.nn.Linear}
    return JoinedLinear(layers) if plain and len({layer.bias is None for layer in layers}) == 1 else None


class JoinedLinear:
    """Linear layers of one input. Their weights become rows of one buffer, and keep their names and gradients."""

    def __init__(self, layers: Sequence[torch.nn.Linear]):
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.weight = _in_one_buffer([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else _in_one_buffer([layer.bias for layer in layers])
        self.x: torch.Tensor | None = None  # the input of `outputs`
        self.outputs: list = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., sum of the layers' outputs)"""
        own = [layer.weight for layer in self.layers]
        own += [layer.bias for layer in self.layers if self.bias is not None]
        storages = {w.untyped_storage()._cdata for w in (own[0], self.weight)}
        assert len(storages) == 1, "the layers' weights are no longer rows of this buffer"
        return _Product.apply(self.weight, self.bias, x, self.sizes, *own)

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """What one layer gives. The first computes all, and the others of the same input take theirs."""
        layer = self.layers[number]
        if number == 0:
            self.x, self.outputs = x, [*self(x).split(self.sizes, -1)]
        elif x is not self.x:
            return F.linear(x, layer.weight, layer.bias)
        output, self.outputs[number] = self.outputs[number], None
        if number < len(self.layers) - 1:
            return output
        self.x = None
        return output.contiguous()  # attention keeps the values: a view would keep queries and keys, too


def _in_one_buffer(own: list[torch.Tensor]) -> torch.Tensor:
    whole = torch.cat([p.data for p in own])
    for p, rows in zip(own, whole.split([len(p) for p in own])):
        p.data = rows
    return whole


class _Product(torch.autograd.Function):
    """x (..., I) times weight (O, I), plus bias (O,). own: the layers' weights, then their biases."""

    @staticmethod
    def forward(ctx, weight, bias, x, sizes, *own):
        ctx.save_for_backward(x)
        ctx.weight, ctx.sizes = weight, sizes
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        [x], needs = ctx.saved_tensors, ctx.needs_input_grad
        rows, own = dy.flatten(0, -2), [None] * len(needs[4:])
        if any(needs[4:]):
            own = [*(rows.T @ x.flatten(0, -2)).split(ctx.sizes)]
            own += rows.sum(0).split(ctx.sizes) if len(needs[4:]) > len(own) else ()
        dx = dy @ ctx.weight if needs[2] else None
        return None, None, dx, None, *(gradient if need else None for gradient, need in zip(own, needs[4:]))
