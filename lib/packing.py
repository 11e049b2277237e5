"""Which models take packed rows, and how layers that carry a state from token to token take them.

Attention runs inside each row (packed_sdpa in lib/model.py). A recurrent or convolutional layer would carry its state
over from one packed row to the next, so it gets its tokens as rows, and gives them back packed: the same on any device
and with any kernel. transformers can also pass such layers `cu_seq_lens_q` or `seq_idx`, which only some kernels look
at: without those packages, and on a CPU, rows leak into each other without a word.
"""

import math
import types
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from lib import InputError, is_first_on_node

STATE_LAYERS = {  # of a model_type: the class of its layers that carry a state; tests/test_models.py has each
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba2": "Mamba2Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "zamba2": "Zamba2MambaMixer",
}

SAMPLED_BY_HF = STATE_LAYERS.keys() - {"nemotron_h", "zamba2"}  # with a cache, these two clamp their steps otherwise

UNPACKABLE = {  # of a model_type: what no flag of transformers shows
    "doge": "its attention has a mask of its own",
    "nemotron": "its layers give their attention no keywords",
    "stablelm": "its layers give their attention no keywords",
}


def attention_and_packing(config: PreTrainedConfig, attn_implementation: str) -> tuple[str, str | None]:
    """(the attention implementation to load with, why rows cannot be packed): None where they can be.

    packed_sdpa gives way to transformers' own sdpa or eager for a model that it does not know.

    Raises:
        InputError: for `sdpa`, where it would leave out soft caps without a word.
    """
    text, cls = config.get_text_config(), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # None: code of its own
    others = other_layers(config)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    if capped and attn_implementation == "sdpa":
        raise InputError("--attn-implementation sdpa leaves out the soft caps of its attention: take eager")
    packed = attn_implementation == "packed_sdpa"
    no_sdpa = packed and (capped or (cls is not None and not cls._supports_sdpa))
    reason = UNPACKABLE.get(text.model_type)
    if not packed and not attn_implementation.startswith("flash"):
        reason = f"{attn_implementation} attention takes no packed rows"
    elif text.model_type not in STATE_LAYERS and (others or (cls is not None and cls._is_stateful)):
        reason = f"packing knows no {min(others, default='recurrent')} layers"
    elif no_sdpa and text.model_type != "mamba2":  # which has no attention at all
        reason = "its attention has " + ("soft caps" if capped else "sinks, position biases or the like")
    elif packed and cls is not None and not cls._can_set_attn_implementation():
        reason = "its attention cannot be exchanged"
    if packed and (reason or no_sdpa):
        attn_implementation = "eager" if no_sdpa else "sdpa"
    return attn_implementation, reason


def other_layers(config: PreTrainedConfig) -> set[str]:
    """The kinds of layers that do not mix tokens by full or sliding-window attention alone."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}


def carries_state(model: PreTrainedModel) -> bool:
    """Whether layers other than attention carry a state from token to token."""
    return model._is_stateful or not other_layers(model.config).isdisjoint(
        {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
    )


class SequenceRows(NamedTuple):
    """The sequences of a packed row as right-padded rows, which causal layers compute as if each were alone."""

    places: list[torch.Tensor]
    """each (count, length), of rows of about equal length: the token's place in the packed row. A response to a shared
    prompt has that prompt before it. Padding repeats the row's last token"""
    back: torch.Tensor
    """(N,) of each token of the packed row: its place in the rows laid end to end"""


def sequence_rows(
    order: list[int], lengths: list[int], prompt: list[int | None], device: torch.device, *, one_size: bool = False
) -> SequenceRows:
    """The rows of sequences that stand in `order` in the packed row. prompt[i] is the number of the shared prompt that
    sequence i answers, if any. one_size: all rows have the length of the longest."""
    begin, N = {}, 0  # of each sequence: its first token's place
    for i in order:
        begin[i], N = N, N + lengths[i]
    length = {i: lengths[i] + (0 if prompt[i] is None else lengths[prompt[i]]) for i in order}
    shared = set(prompt)
    rows = sorted((i for i in order if i not in shared), key=lambda i: length[i])
    sizes = [math.inf if one_size else int(4 * math.log2(length[i])) for i in rows]  # padding: a fifth at most
    places, back, offset, placed = [], torch.empty(N, dtype=torch.long), 0, set()
    for size in sorted(set(sizes)):
        members = [i for i, own in zip(rows, sizes) if own == size]
        P = torch.tensor([length[i] - lengths[i] for i in members])[:, None]
        n = torch.tensor([length[i] for i in members])[:, None]
        first = torch.tensor([[begin[i if prompt[i] is None else prompt[i]], begin[i]] for i in members])
        column = torch.arange(int(n.max())).minimum(n - 1)  # (count, length)
        place = torch.where(column < P, first[:, :1] + column, first[:, 1:] + column - P)
        new = torch.tensor([prompt[i] not in placed and not placed.add(prompt[i]) for i in members])  # shared prompts
        taken = (torch.arange(column.shape[1]) < n) & (new[:, None] | (column >= P))
        back[place[taken]] = offset + taken.flatten().nonzero()[:, 0]
        places.append(place.to(device))
        offset += place.numel()
    return SequenceRows(places, back.to(device))


def lay_out(
    model: PreTrainedModel,
    name: str,
    attn_implementation: str = "packed_sdpa",
    padding_free: bool = True,
    share_prompts: bool = True,
) -> None:
    """Settles how rows go through the model, in its attributes padding_free and share_prompts, and says why if not as
    asked. Layers that carry a state will take the `sequence_rows` of a packed row.

    Such a layer gets them from its parent, because not every parent passes its keywords on; and it does at each
    forward of the parent, also where gradient checkpointing repeats it.

    Raises:
        InputError: a token of the model depends on later ones, or on chance.
    """
    if any(getattr(module, "is_causal", True) is False for module in model.get_decoder().modules()):
        raise InputError(f"{name}: its attention sees later tokens; give a decoder")
    if model.config.get_text_config().model_type == "phimoe":
        raise InputError(f"{name}: PhiMoE draws its experts at random while it trains")
    reason = attention_and_packing(model.config, attn_implementation)[1]
    kind = STATE_LAYERS.get(model.config.get_text_config().model_type)
    pairs = [(p, layer) for p in model.modules() for layer in p.children() if type(layer).__name__ == kind]
    if reason is None and other_layers(model.config) and not pairs:
        reason = f"it has no layers of {kind}"
    for parent, layer in pairs:
        layer.rows, layer.forward = None, types.MethodType(_by_rows, layer)
        parent.register_forward_pre_hook(partial(_hand_down, layer), with_kwargs=True)
    if reason and padding_free:
        _say(f"{name}: rows are padded and prompts not shared, because {reason}")
    model.takes_rows = bool(pairs)
    model.padding_free = padding_free and reason is None
    model.share_prompts = share_prompts and model.padding_free and not attn_implementation.startswith("flash")


def layout(*models: PreTrainedModel) -> dict[str, bool]:
    """How all of the models take rows: for `prepare_dynamic_batch`."""
    return {name: all(getattr(model, name) for model in models) for name in ("padding_free", "share_prompts")}


@cache
def _say(line: str) -> None:
    if is_first_on_node():
        print(line, flush=True)


def _hand_down(layer: torch.nn.Module, parent: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    layer.rows = kwargs.get("sequence_rows")


def _by_rows(layer: torch.nn.Module, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """The forward of a layer whose input (1, N, D) may be packed."""
    rows, layer.rows = layer.rows, None
    forward = partial(type(layer).forward, layer)
    if rows is None:
        return forward(hidden_states, *args, **kwargs)
    outputs = [forward(F.embedding(places, hidden_states[0])).flatten(0, 1) for places in rows.places]
    return F.embedding(rows.back, torch.cat(outputs))[None]
