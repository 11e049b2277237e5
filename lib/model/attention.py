"""Keeps the sequences of a packed row apart in every layer that mixes tokens, and says which models allow that.

Attention runs inside each sequence: packed_sdpa on any device, varlen on a GPU. A recurrent or convolutional layer gets
the sequences as rows, and its output is packed again. transformers can also pass `cu_seq_lens_q` or `seq_idx` to such
layers, but only some kernels read them: with others, as on a CPU, sequences silently leak into each other."""

import inspect
import math
import types
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange, repeat
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from lib import InputError, is_first_on_node
from lib.distributed import all_to_all
from lib.model.vision import family_of

# ---- attention over packed rows ------------------------------------------------------------------
PACKED = ("packed_sdpa", "varlen")  # the names of packed_attention
TELL_OF_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 takes grouped heads untold


@torch.compiler.disable  # its layouts change with each micro-batch
def packed_attention(
    module, query, key, value, attention_mask, packed_runs=None, packed_sequences=None, scaling=None, **kwargs
):
    """Attention for transformers models. query (1, H, N, D), key and value (1, H_kv, N, D) of a packed row.

    A token attends to the earlier ones of its path in the prefix tree, by packing.py's `packed_runs` (packed_sdpa) or
    `packed_sequences` (varlen). A `group_cache` (group_cache.py) attends itself. With none this is transformers' SDPA.

    In a `sequence_group` of n ranks each rank has N / n tokens of the packed row, and attends with H / n heads to all N
    tokens: an all-to-all before and one after (DeepSpeed-Ulysses, arXiv 2309.14509)."""
    sequence_group, window = kwargs.pop("sequence_group", None), kwargs.get("sliding_window")
    if (group_cache := kwargs.pop("group_cache", None)) is not None:
        return group_cache.attend(module, query, key, value, scaling), None
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise InputError(f"{type(module).__name__} has soft caps or sinks: set --attn-implementation eager")
    if packed_runs is None and packed_sequences is None:
        if attention_mask is not None and attention_mask.shape[3] < key.shape[2]:
            why = "gets no keyword arguments from its layer: set --attn-implementation eager"
            raise InputError(f"{type(module).__name__} {why}")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if sequence_group is not None:
        query, key, value = (_all_tokens(x, sequence_group) for x in (query, key, value))
    query, key, value = (rearrange(x, "1 h n d -> n h d") for x in (query, key, value))
    if packed_sequences is None:
        output = _attend_by_runs(query, key, value, packed_runs.runs, window, scaling)
    else:
        output = _attend_by_sequences(query, key, value, packed_sequences, window, scaling)
    if sequence_group is not None:
        output = _all_heads(output, sequence_group)
    return output[None], None


def _attend_by_runs(query, key, value, packed_runs, window: int | None, scaling: float | None) -> torch.Tensor:
    """One SDPA call for each run of nodes. (N, H, D). Only nodes below others are padded."""
    # split, because its backward is one cat; the backward of a slice fills a whole row with zeros
    sizes = [run.tokens for run in packed_runs]
    queries, keys, values = (x.split(sizes) for x in (query, key, value))
    outputs = []
    for i, run in enumerate(packed_runs):
        if run.places is None:
            q, k, v = (rearrange(x[i], "(s l) h d -> s l h d", s=run.count) for x in (queries, keys, values))
        else:
            k, v = (_take(torch.cat([x[j] for j in (*run.runs_above, i)]), run.places) for x in (keys, values))
            q = _take(queries[i], run.places[:, -run.length :] - sum(sizes[j] for j in run.runs_above))
        q, k, v = (rearrange(x, "s l h d -> s h l d") for x in (q, k, v))  # for k and v, l is P + length
        mask: Any = None
        if run.blocks is not None or (window is not None and k.shape[2] > window):
            mask = _mask_of_run(run, k.shape[2], window, q.device)
        elif run.places is not None:
            mask = causal_lower_right(run.length, k.shape[2])
        gqa = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, is_causal=mask is None, enable_gqa=gqa)
        out = rearrange(out, "s h l d -> (s l) h d")
        outputs.append(out if run.real is None else _take(out, run.real))
    return torch.cat(outputs)


def _mask_of_run(run, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(length, keys), for images (count, 1, length, keys): what each query of the run sees."""
    position = torch.arange(keys, device=device)
    distance = position[-run.length :, None] - position[None, :]
    mask = distance >= 0
    if run.blocks is not None:
        same = run.blocks[:, None, :, None] == run.blocks[:, None, None, :]  # (count, 1, length, length)
        mask = mask | (same & (run.blocks >= 0)[:, None, None, :])
    return mask if window is None else mask & (distance < window)


def _attend_by_sequences(query, key, value, packed, window: int | None, scaling: float | None) -> torch.Tensor:
    """One FlashAttention call for all nodes. (N, H, D). The queries are the last tokens of a node's path."""
    if packed.keys is not None:
        key, value = (_take(x, packed.keys) for x in (key, value))
    grouped: dict[str, Any] = {"enable_gqa": True} if TELL_OF_GROUPS and query.shape[1] != key.shape[1] else {}
    q, k, v = (x.contiguous() for x in (query, key, value))
    lengths = packed.cu_seq_q, packed.cu_seq_k, packed.max_q, packed.max_k
    window_size = (-1 if window is None else window - 1, 0)
    output: Any = varlen_attn(q, k, v, *lengths, scale=scaling, window_size=window_size, **grouped)
    return output


def _all_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From this rank's tokens (1, H, N / n, D) to its heads (1, H / n, N, D), repeated where n does not divide H."""
    n, H = group.size(), x.shape[1]
    x = repeat(x, "1 h t d -> (h copies) t d", copies=n // math.gcd(n, H))
    x = all_to_all(rearrange(x, "(n h) t d -> n h t d", n=n), group)
    return rearrange(x, "n h t d -> 1 h (n t) d")


def _all_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From this rank's heads (N, H / n, D) to this rank's tokens (N / n, H, D)."""
    x = all_to_all(rearrange(x, "(n t) h d -> n t h d", n=group.size()), group)
    return rearrange(x, "n t h d -> t (n h) d")


def _take(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x[places] for x (n, H, D). An embedding's gradient adds up in fp32 and in one order, index_select's by atomic
    additions; on a CPU it is twice as fast as that of an index."""
    return rearrange(F.embedding(places, rearrange(x, "n h d -> n (h d)")), "... (h d) -> ... h d", h=x.shape[1])


for name in PACKED:
    ALL_ATTENTION_FUNCTIONS.register(name, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)


# ---- which models can be packed, and their layers that carry a state -----------------------------
# model_type: class of its layers that carry a state; tests/model/test_models.py tests each
STATE_LAYERS = {"bamba": "BambaMixer", "falcon_h1": "FalconH1Mixer", "granitemoehybrid": "GraniteMoeHybridMambaLayer"}
STATE_LAYERS |= {"jamba": "JambaMambaMixer", "mamba2": "Mamba2Mixer", "nemotron_h": "NemotronHMamba2Mixer"}
STATE_LAYERS |= {"zamba2": "Zamba2MambaMixer", "lfm2": "Lfm2ShortConv", "lfm2_moe": "Lfm2MoeShortConv"}
STATE_LAYERS |= {"kimi_linear": "KimiLinearDeltaAttention", "olmo_hybrid": "OlmoHybridGatedDeltaNet"}
STATE_LAYERS |= {"qwen3_5_text": "Qwen3_5GatedDeltaNet", "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet"}
STATE_LAYERS["qwen3_next"] = "Qwen3NextGatedDeltaNet"

SAMPLED_BY_HF = STATE_LAYERS.keys() - {"nemotron_h", "zamba2"}  # with a cache, these two clamp time steps differently

# model_type: why it cannot be packed, where no flag of transformers shows it
UNPACKABLE = dict.fromkeys(("nemotron", "stablelm"), "its layers give their attention no keywords")
UNPACKABLE["doge"] = "its attention has a mask of its own"


def use_packed_sdpa(model: PreTrainedModel) -> None:
    """In place of varlen; the tower of a vision-language model keeps its own."""
    model.config.get_text_config()._attn_implementation = "packed_sdpa"
    model.config._attn_implementation_internal = "packed_sdpa"


def attention_and_packing(config: PreTrainedConfig, attn_implementation: str) -> tuple[str, str | None]:
    """(the attention implementation to load with, why rows cannot be packed or None). Models that packed_attention
    cannot handle take transformers' sdpa or eager. Raises InputError if `sdpa` would silently ignore soft caps."""
    text, family = config.get_text_config(), family_of(config)
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if family is None else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    cls = mapping.get(type(config), None)  # None: remote code
    if family is not None and family.bidirectional and attn_implementation.startswith(("varlen", "flash")):
        return "sdpa", f"the tokens of an image see each other, which {attn_implementation} cannot do"
    others = other_layers(config)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    if capped and attn_implementation == "sdpa":
        raise InputError("--attn-implementation sdpa ignores the soft caps of its attention: use eager")
    packed = attn_implementation in PACKED
    no_sdpa = packed and (capped or (cls is not None and not cls._supports_sdpa))
    reason = UNPACKABLE.get(text.model_type)
    if not packed and not attn_implementation.startswith("flash"):
        reason = f"{attn_implementation} attention takes no packed rows"
    elif text.model_type not in STATE_LAYERS and (others or (cls is not None and cls._is_stateful)):
        reason = f"packing knows no {min(others, default='recurrent')} layers"
    elif no_sdpa and text.model_type != "mamba2":  # mamba2 has no attention at all
        reason = "its attention has " + ("soft caps" if capped else "sinks, position biases or the like")
    elif packed and cls is not None and not cls._can_set_attn_implementation():
        reason = "its attention cannot be exchanged"
    if packed and (reason or no_sdpa):
        attn_implementation = "eager" if no_sdpa else "sdpa"
    return attn_implementation, reason


def other_layers(config: PreTrainedConfig) -> set[str]:
    """The kinds of layers other than full and sliding-window attention."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}


def carries_state(model: PreTrainedModel) -> bool:
    """True if layers other than attention carry a state from token to token."""
    stateful = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
    return model._is_stateful or not other_layers(model.config).isdisjoint(stateful)


def lay_out(model: PreTrainedModel, name: str, attention: str, share_prompts: bool) -> None:
    """Decides how rows go through the model, sets its attributes padding_free, share_prompts and takes_rows, and prints
    why rows are padded. Layers that carry a state take the `sequence_rows` of a packed row from their parent, as not
    every parent passes its keywords on. Raises InputError if a token's output depends on later tokens, or on chance."""
    if any(getattr(module, "is_causal", True) is False for module in model.get_decoder().modules()):
        raise InputError(f"{name}: its attention is not causal; use a decoder")
    if model.config.get_text_config().model_type == "phimoe":
        raise InputError(f"{name}: PhiMoE draws its experts at random in training")
    reason = attention_and_packing(model.config, attention)[1]
    kind = STATE_LAYERS.get(model.config.get_text_config().model_type)
    pairs = [(p, layer) for p in model.modules() for layer in p.children() if type(layer).__name__ == kind]
    if reason is None and other_layers(model.config) and not pairs:
        reason = f"it has no layers of {kind}"
    for parent, layer in pairs:
        layer.rows, layer.forward = None, types.MethodType(_by_rows, layer)
        before_forward(parent, _give_rows)
    if reason:
        _say(f"{name}: rows are padded and prompts not shared, because {reason}")
    model.takes_rows = bool(pairs)
    model.padding_free = reason is None
    model.share_prompts = share_prompts and model.padding_free and not attention.startswith("flash")


def layout(*models: PreTrainedModel) -> dict[str, bool]:
    """The row layout that all of the models allow, for `prepare_dynamic_batch`."""
    return {name: all(getattr(model, name) for model in models) for name in ("padding_free", "share_prompts")}


@cache
def _say(line: str) -> None:
    if is_first_on_node():
        print(line, flush=True)


def before_forward(module: torch.nn.Module, act: Callable[[Any, dict], None]) -> None:
    """The module's `forward` first calls act(module, its keywords). A hook would not do: gradient checkpointing repeats
    only `forward` (transformers 5.23; 5.19 repeats hooks too)."""
    module.__class__ = _class_that_acts(type(module), act)  # type: ignore[arg-type]  # a class is hashable


@cache
def _class_that_acts(cls: Any, act: Callable[[Any, dict], None]) -> Any:
    def forward(self, *args, **kwargs):
        act(self, kwargs)
        return cls.forward(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _give_rows(parent: torch.nn.Module, kwargs: dict) -> None:
    for layer in parent.children():
        if hasattr(layer, "rows"):
            layer.rows = kwargs.get("sequence_rows")


def _by_rows(layer: torch.nn.Module, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """The forward of a layer whose input (1, N, D) may be packed."""
    rows: Any = layer.rows  # SequenceRows | None
    layer.rows = None
    forward = partial(type(layer).forward, layer)
    if rows is None:
        return forward(hidden_states, *args, **kwargs)
    outputs = [rearrange(forward(F.embedding(places, hidden_states[0])), "s l d -> (s l) d") for places in rows.places]
    return F.embedding(rows.back, torch.cat(outputs))[None]
