"""Measures models on the meta device: what passes allocate and autograd keeps, from a config alone.

Attention keeps what a flash kernel keeps. Log-probs allocate what they do where they are compiled."""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lib import InputError
from lib.data import local_copy
from lib.model import load, log_probs
from lib.model.activations import recompute_layers
from lib.model.load import add_lora, class_of, decoder_layers, freeze
from lib.model.values import token_values
from lib.model.vision import cache_keyword, family_of, patches_per_feature, tower_layers, vision_names


def attention_on_meta(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Stands for packed_sdpa. Autograd keeps its inputs, its output and a number per row. query (1, H, N, D)."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[0]
    return torch.cat([out.transpose(1, 2)]), None  # packed_sdpa puts the runs together in a copy


ALL_ATTENTION_FUNCTIONS.register("attention_on_meta", attention_on_meta)


def meta_model(
    auto_class: Any,
    path: str,
    flag: str,
    dtype: torch.dtype,
    *,
    lora_rank: int = 0,
    lora_target_modules: str = "all-linear",
    freeze_pattern: str = "",
    use_liger_kernel: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a config, on the meta device: with adapters if there is a rank, frozen where a pattern says it."""
    try:
        config = AutoConfig.from_pretrained(local_copy(path, weights=False), trust_remote_code=trust_remote_code)
        if auto_class is not AutoModelForCausalLM:
            config.num_labels = 1
        options = {"dtype": dtype, "attn_implementation": "attention_on_meta", "trust_remote_code": trust_remote_code}
        with torch.device("meta"):
            model = class_of(auto_class, config).from_config(config, **options)
    except (OSError, ValueError) as error:
        raise InputError(f"{flag} {path}: no model by its config: {str(error).splitlines()[0]}") from error
    if auto_class is AutoModelForCausalLM:
        model.token_log_probs = None  # by this attribute add_lora knows a policy
    if lora_rank:
        add_lora(model, rank=lora_rank, alpha=1, seed=0, target_modules=lora_target_modules)
        model.to("meta", dtype)  # FSDP casts the fp32 adapters for the forward
    elif freeze_pattern:
        freeze(model, freeze_pattern)
    if use_liger_kernel:
        load.fuse_layers(model)
    return model


known_model = lru_cache(8)(meta_model)  # by the same arguments the same model, so that it is measured once


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """In the block, attributes (owner, name) have other values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make in the block, while these are referenced: `now` and `peak`."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.now = self.peak = 0
        self.known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._add, outputs)
        return outputs

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _decoder(model: PreTrainedModel) -> PreTrainedModel:
    return model.base_model if family_of(model.config) is None else model.get_decoder()


def kernels_of_a_gpu() -> AbstractContextManager:
    """In it log-probs allocate what they do where they are compiled: logits and results. No Triton function runs."""

    def with_logits(fn: Callable, h: torch.Tensor, weight: torch.Tensor, *args):
        logits = torch.mm(h, weight.T)
        with _disable_current_modes():
            results = fn(logits, *args)
        return tree_map_only(torch.Tensor, torch.clone, results)

    changes: list[tuple[Any, str, Any]] = [(log_probs, "with_logits", with_logits)]
    if "liger_kernel" in sys.modules:
        from triton.runtime.jit import JITFunction

        changes.append((JITFunction, "run", lambda *_, **__: None))
    return replaced(*changes)


def _forward(model: PreTrainedModel, tokens: int, entropy_in_loss: bool = True) -> torch.Tensor:
    """Runs one row of `tokens` through the model, as a micro-batch runs. Returns a scalar to differentiate."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": torch.empty(1, 1, 1, 1)}
    select = torch.arange(tokens)
    if hasattr(model, "token_log_probs"):
        logp, entropy = log_probs.token_log_probs(model, inputs, select, ids[0], temperature=1.0)
        return (logp + entropy if entropy_in_loss else logp).sum()
    return token_values(model, inputs, select).sum()


def _of_all_layers(model: PreTrainedModel, measure: Callable[[], Sequence[int]]) -> list[int]:
    """The sizes that `measure` finds. Where all layers are alike, each adds the same to a size: three and four of them
    are measured in place of, say, eighty."""
    decoder, layers = _decoder(model), decoder_layers(model)
    if len(layers) < 5 or [*getattr(decoder, "layers", ())] != layers or len(set(map(_kind, layers))) > 1:
        return [*measure()]
    whole, measured = decoder.layers, []
    try:
        for n in (3, 4):
            decoder.layers = whole[:n]
            measured.append(measure())
    finally:
        decoder.layers = whole
    return [three + (len(layers) - 3) * (four - three) for three, four in zip(*measured)]


def _kind(layer: torch.nn.Module) -> tuple:
    """What tells the layer from one that computes otherwise: its weights and its settings, less its number."""
    weights = ((name, p.shape, p.requires_grad) for name, p in layer.named_parameters())
    settings = ((name, *item) for name, module in layer.named_modules() for item in vars(module).items())
    plain = (bool, int, float, str, NoneType)
    return *weights, *(item for item in settings if isinstance(item[2], plain) and item[1] != "layer_idx")


@lru_cache(16)
@torch.no_grad()
def forward_peak(model: PreTrainedModel, tokens: int, with_head: bool = True) -> int:
    """Peak bytes of a forward pass without gradients, without the weights."""

    def measure() -> tuple[int]:
        with torch.device("meta"), kernels_of_a_gpu(), LiveBytes(model) as live:
            if with_head:
                _forward(model, tokens)
            else:
                _decoder(model)(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        return (live.peak,)

    return _of_all_layers(model, measure)[0]


class UpdateCosts(NamedTuple):
    """Bytes of a forward and backward pass, without weights and without FSDP's buffers."""

    kept: int  # activations, at the end of the forward pass
    of_a_layer: int  # those of one layer that is not recomputed, if there is one
    loss: int  # besides them, until the gradient has come through the head
    backward: int  # besides them, from then on
    last_layer: int  # when the gradient comes to the first layer and to what is before it, with what is left of them


@lru_cache(32)
def update_costs(model: PreTrainedModel, tokens: int, recomputed: float, entropy_in_loss: bool = True) -> UpdateCosts:
    """recomputed: the share of the layers, the first ones. The costs of none and of all are measured."""
    if 0 < recomputed < 1:
        none, every = (update_costs(model, tokens, share, entropy_in_loss) for share in (0, 1))
        kept = round(none.kept + recomputed * (every.kept - none.kept))
        later = every.backward - (kept - every.kept)  # when what the layers behind them kept is gone
        return UpdateCosts(kept, none.of_a_layer, none.loss, max(none.backward, later), every.last_layer)
    recompute_layers(model, decoder_layers(model), recomputed)
    model.train()
    measure = partial(_update_peaks, model, tokens, entropy_in_loss)
    kept, loss, in_layers, in_last = _of_all_layers(model, measure)
    model.zero_grad()
    model.gradient_checkpointing_disable()
    of_a_layer = kept // len(decoder_layers(model))
    return UpdateCosts(kept, of_a_layer, loss - kept, max(in_layers - kept, 0), in_last)


def _update_peaks(model: PreTrainedModel, tokens: int, entropy_in_loss: bool) -> tuple[int, int, int, int]:
    """(activations, the peaks until the gradient has come through the head, to the first layer, and to the end)."""
    peaks, live = [], LiveBytes(model)

    def next_moment(*_) -> None:
        peaks.append(live.peak)
        live.peak = live.now

    def end_of_decoder(module, args, output) -> None:
        next_moment()
        output.last_hidden_state.register_hook(next_moment)

    def begin_of_layer(layer, args) -> None:
        def gradient_comes(_) -> None:
            layer.zero_grad()  # FSDP takes those of the layer away
            if layer in layers[1:2]:
                next_moment()

        if args[0].requires_grad:
            args[0].register_hook(gradient_comes)

    layers = decoder_layers(model)
    hooks = [_decoder(model).register_forward_hook(end_of_decoder)]
    hooks += [layer.register_forward_pre_hook(begin_of_layer) for layer in layers]
    with torch.device("meta"), kernels_of_a_gpu(), live:
        output = _forward(model, tokens, entropy_in_loss)
        kept = live.now
        output.backward()
        next_moment()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    _, loss, *in_layers, in_last = peaks  # nothing tells them apart where no gradient comes to the first layer
    return kept, loss, max(in_layers, default=in_last), in_last


class TowerCosts(NamedTuple):
    """Bytes of a vision model's tower, without weights. 0 for a text model."""

    kept: int  # activations, at the end of its forward pass
    work: int  # besides them, in one of its layers

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: int, gradient_checkpointing: bool = False) -> "TowerCosts":
        """tokens: of images. A block is measured; the projector keeps what its linear layers take and give."""
        family = family_of(model.config)
        if family is None:
            return cls(0, 0)
        patches, size = tokens * patches_per_feature(model.config), model.dtype.itemsize
        blocks = tower_layers(model)
        of_block, peak = _block_costs(model, blocks[0], patches)
        checkpoint = size * patches * _width(blocks[0])
        kept = len(blocks) * (checkpoint if gradient_checkpointing else of_block)
        projectors = [model.get_submodule(path) for path in family.projector]
        layers = [layer for projector in projectors for layer in projector.modules()]
        linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
        kept += size * tokens * sum(layer.in_features + layer.out_features for layer in linear)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        trains = trained.intersection(vision_names(model, "tower"))
        return cls(kept if trains else 0, peak if gradient_checkpointing else peak - of_block)


def _width(block: torch.nn.Module) -> int:
    """Of what a block of a tower takes. In Qwen2-VL's config, hidden_size is the decoder's."""
    return next(block.parameters()).shape[-1]


@lru_cache(16)
def _block_costs(model: PreTrainedModel, block: torch.nn.Module, patches: int) -> tuple[int, int]:
    """Bytes of a block of the tower: (what autograd keeps, the peak until the end of the backward pass)."""
    width, takes = _width(block), inspect.signature(block.forward).parameters
    with torch.device("meta"), kernels_of_a_gpu(), LiveBytes(model) as live:
        if "cu_seqlens" in takes:  # Qwen, GLM: the images in one row
            heads = torch.empty(patches, width // model.config.vision_config.num_heads)
            one_image = torch.tensor([0, patches], dtype=torch.int32, device="cpu")
            given: dict[str, Any] = {"cu_seqlens": one_image, "position_embeddings": (heads, heads)}
            x = torch.empty(patches, width, dtype=model.dtype, requires_grad=True)
        else:
            given = {"attention_mask": None}
            x = torch.empty(1, patches, width, dtype=model.dtype, requires_grad=True)
        before = live.now
        out = block(x, **given)
        kept = live.now - before
        out.sum().backward()
    model.zero_grad()
    return kept, live.peak - before


@lru_cache(16)
def kv_bytes_per_token(model: PreTrainedModel) -> int:
    cache, decoder = DynamicCache(config=model.config), _decoder(model.eval())
    with torch.device("meta"), kernels_of_a_gpu(), torch.no_grad():
        decoder(torch.zeros(1, 1, dtype=torch.long), use_cache=True, **{cache_keyword(decoder): cache})
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]  # a state does not grow
    return sum(t.numel() * t.itemsize for layer in layers for t in (layer.keys, layer.values))
