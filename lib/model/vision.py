"""Vision-language models: image features replace the embeddings of their placeholders before the decoder, so that rows
are packed and prompts shared as in a text model. A processor has expanded each image's placeholder to as many tokens as
the image has features. A sampled token of that id is text."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch.export import register_dataclass
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lib import InputError
from lib.data.vision import media_kinds
from lib.distributed import to_device


# ---- families ------------------------------------------------------------------------------------
class Family(NamedTuple):
    tower: str  # path of the module that encodes images
    projector: tuple[str, ...]  # paths of what makes its outputs as wide as the embeddings; perhaps within the tower
    join: int = 0  # the dimension along which images lie in the processor's tensors
    bidirectional: bool = False  # the tokens of an image see each other in the decoder


PROJECTOR = ("model.multi_modal_projector",)
QWEN = Family("model.visual", ("model.visual.merger",))
IDEFICS = Family("model.vision_model", ("model.connector",), join=1)
FAMILIES = {  # by model_type
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": Family("model.visual", ("model.visual.merger", "model.visual.deepstack_merger_list")),
    "glm4v": Family("model.visual", ("model.visual.downsample", "model.visual.merger")),
    "gemma3": Family("model.vision_tower", PROJECTOR, bidirectional=True),
    "smolvlm": IDEFICS,
    "idefics3": IDEFICS,
    "llava": Family("model.vision_tower", PROJECTOR),
}


def family_of(config: PreTrainedConfig) -> Family | None:
    """None for a text model and for an unknown vision model, which supports no images."""
    towers = ("clip_vision_model", "siglip_vision_model")
    if config.model_type == "llava" and config.vision_config.model_type not in towers:
        return None  # Pixtral's images, of any size, have tokens that end their rows
    return FAMILIES.get(config.model_type)


def vision_names(model: PreTrainedModel, part: str) -> list[str]:
    """The parameters of the "tower", the "projector", or both: "vision"."""
    family = family_of(model.config)
    if family is None:
        return []
    names = [name for name, _ in model.named_parameters()]
    projector = [name for name in names if name.startswith(tuple(f"{path}." for path in family.projector))]
    tower = [name for name in names if name.startswith(f"{family.tower}.") and name not in projector]
    return {"tower": tower, "projector": projector, "vision": tower + projector}[part]


def tower_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """[] for a text model."""
    family = family_of(model.config)
    modules = [] if family is None else model.get_submodule(family.tower).modules()
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def patches_per_feature(config: PreTrainedConfig) -> int:
    """Patches of the tower that become one token of the decoder."""
    tower = config.vision_config
    if config.model_type == "gemma3":
        return (tower.image_size // tower.patch_size) ** 2 // config.mm_tokens_per_image
    return getattr(tower, "spatial_merge_size", getattr(config, "scale_factor", 1)) ** 2


# ---- which images a forward needs, and where their features go -----------------------------------
@dataclass
class Images:
    """The images of a forward, as a part of its `inputs`."""

    inputs: dict[str, dict[str, torch.Tensor]]
    """"image", "video": what get_image_features, get_video_features take; rows concatenated"""
    places: dict[str, torch.Tensor]  # (n,), indices of the placeholders in the flattened layout of the decoder
    takes: dict[str, torch.Tensor]  # (n,), which feature each of them gets
    blocks: torch.Tensor | None
    """of the layout's shape: the number of a token's image, -1 for text; None where images are seen causally"""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """placeholders of each row in `inputs`, to be compared with its features; {}: nothing is compared"""


register_dataclass(Images)


def images_of(
    model: PreTrainedModel, rows, ids, trained, attended, place, shape: Sequence[int], run_tower: Sequence[str] = ()
) -> Images | None:
    """The images that a forward over this layout needs; None if it needs none. Images without a token in the layout are
    not encoded: the images of a prompt that rows share are encoded once.

    rows: the multi_modal_inputs of each row, {} without images. ids: input_ids (B, L). trained (B, T): which of the
    last T are sampled, and so no placeholders. attended (B, L): the tokens in the layout; place (B * L,): where each of
    them is in it; shape: the layout's. run_tower: what any rank encodes. Without any here, a dummy is encoded, as the
    towers' collectives must match. Raises InputError: placeholders without an image, or a model that takes none."""
    family = family_of(model.config)
    if family is None:
        raise InputError(f"model type {model.config.model_type} supports no images; supported: {', '.join(FAMILIES)}")
    images = Images({}, {}, {}, torch.full(tuple(shape), -1) if family.bidirectional else None)
    kinds = media_kinds(model.config, ids.masked_fill(F.pad(trained, (ids.shape[1] - trained.shape[1], 0)), -1))
    for kind, own in media_of_model(model).items():
        is_place = kinds == own.number
        seen = is_place & attended
        needed = seen.any(1).nonzero()[:, 0]
        at = seen.flatten().nonzero()[:, 0]
        inputs = [{name: rows[r][name] for name in own.inputs if name in rows[r]} for r in needed.tolist()]
        counts = is_place.sum(1)
        number = is_place.cumsum(1) - 1  # (B, L), of each placeholder in its row
        without = any(own.inputs[0] in row and n == 0 for row, n in zip(rows, counts.tolist()))
        if without or not all(inputs):
            has, lacks = (f"{kind}s", "placeholders") if without else ("placeholders", f"{kind}s")
            token = f"{model.config.model_type}'s placeholder is token {getattr(model.config, f'{kind}_token_id')}"
            raise InputError(f"a prompt has {has} and no {lacks}: {token}")
        if not inputs and kind not in run_tower:
            continue
        # a row whose later turn has an image of its own needs not that of the prompt that it shares
        unseen = torch.where(seen, number, ids.shape[1]).amin(1)[needed].tolist()
        for i, (r, n) in enumerate(zip(needed.tolist(), unseen)):
            inputs[i], n = _without_first(model, inputs[i], own, family.join, int(counts[r]), n)
            counts[r] -= n
            number[r] -= n
        first = torch.zeros(len(ids), dtype=torch.long)  # the first feature of each row
        first[needed] = counts[needed].cumsum(0) - counts[needed]
        images.places[kind] = place[at]
        images.takes[kind] = (first[:, None] + number).flatten()[at]
        if inputs:
            images.inputs[kind] = {name: torch.cat([row[name] for row in inputs], family.join) for name in inputs[0]}
            images.counts[kind] = counts[needed].tolist()
        else:
            images.inputs[kind] = dummy_image(model, own)
        if images.blocks is not None:
            begins = is_place & ~F.pad(is_place, (1, 0))[:, :-1]
            images.blocks.flatten()[place[at]] = begins.cumsum(1).flatten()[at]
    return images if images.inputs else None


def images_of_prompts(
    model: PreTrainedModel, ids: torch.Tensor, rows: list[dict], sampled: torch.Tensor | None = None
) -> Images | None:
    """For the prefill of the hf engine. ids (n, P), left-padded; rows: the multi_modal_inputs of each, {} without;
    sampled (n, P) bool: what the policy has sampled of an episode so far."""
    if not any(rows):
        return None
    on_cpu, place = ids.cpu(), torch.arange(ids.numel())
    has_images = torch.tensor([bool(row) for row in rows])[:, None].expand_as(on_cpu)
    sampled = torch.zeros(len(ids), 0, dtype=torch.bool) if sampled is None else sampled
    images = images_of(model, rows, on_cpu, sampled, has_images, place, ids.shape)
    return to_device(images, ids.device)


class _Kind(NamedTuple):
    """Images, or videos, of a model."""

    number: int  # of media_kinds
    inputs: tuple[str, ...]  # what get_image_features or get_video_features takes; a processor may give more


@cache
def _inputs_of(features: Any) -> tuple[str, ...]:
    return tuple(n for n in inspect.signature(features).parameters if n.startswith("pixel_") or n.endswith("_grid_thw"))


def media_of_model(model: PreTrainedModel) -> dict[str, _Kind]:
    of_kind = {kind: getattr(type(model.base_model), f"get_{kind}_features", None) for kind in ("image", "video")}
    return {kind: _Kind(n, _inputs_of(of)) for n, (kind, of) in enumerate(of_kind.items(), 1) if of}


def _without_first(model, inputs: dict, kind: _Kind, dim: int, tokens: int, unseen: int) -> tuple[dict, int]:
    """(a row's inputs without the images that have all their tokens among the first `unseen`; how many tokens these
    images have). tokens: of all its images."""
    if unseen == 0:
        return inputs, 0
    values = kind.inputs[0]
    grids = next((x for name, x in inputs.items() if name.endswith("_grid_thw")), None)
    if grids is None:
        n = inputs[values].shape[dim]
        of_each, sizes = torch.full((n,), tokens // n), torch.ones(n, dtype=torch.long)
    else:
        sizes = grids.prod(1)
        of_each = sizes // patches_per_feature(model.config)
    drop = int((of_each.cumsum(0) <= unseen).sum())
    cuts = {name: int(sizes[:drop].sum()) if name == values else drop for name in inputs}
    cut = {name: x.narrow(dim, cuts[name], x.shape[dim] - cuts[name]) for name, x in inputs.items()}
    return cut, int(of_each[:drop].sum())


def dummy_image(model: PreTrainedModel, kind: _Kind) -> dict[str, torch.Tensor]:
    """The smallest image. Not of zeros, which Idefics takes for padding."""
    config, values, *more = model.config.vision_config, *kind.inputs
    if more and more[0].endswith("_grid_thw"):  # (patches, channels * times * height * width)
        size = config.spatial_merge_size
        patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return {values: torch.ones(size * size, patch), more[0]: torch.tensor([[1, size, size]])}
    size = config.image_size
    image = torch.ones(*[1] * family_of(model.config).join, 1, config.num_channels, size, size)
    return {values: image, **{name: torch.ones(*image.shape[:-3], size, size, dtype=torch.long) for name in more}}


# ---- the forward ---------------------------------------------------------------------------------
def with_images(model: PreTrainedModel, images: Images, **rest) -> dict:
    """The decoder's inputs: `rest`, with the images laid over its embeddings. Raises InputError: an image has another
    number of features than its row has placeholders."""
    embeds = model.get_input_embeddings()(rest.pop("input_ids"))
    flat, deep = embeds.flatten(0, 1), []
    for kind, own in images.inputs.items():
        own = {name: x.to(flat.dtype) if x.is_floating_point() else x for name, x in own.items()}
        out = getattr(model.base_model, f"get_{kind}_features")(**own, return_dict=True)
        parts = out.pooler_output
        if any(x.dim() == 5 for x in own.values()):  # Idefics3, which from transformers 5.23 on joins all images
            parts = torch.cat(list(parts)).unflatten(0, (len(out.last_hidden_state), -1))
        ends, counts = set(accumulate(len(part) for part in parts)), images.counts.get(kind)
        if counts and (max(ends) != sum(counts) or not ends.issuperset(accumulate(counts))):
            have = f"have {max(ends)} features, their prompts {sum(counts)} placeholder tokens"
            why = "the processor is not this model's, or a prompt was cut"
            raise InputError(f"the {kind}s of {len(counts)} prompts {have}: {why}")
        features, *levels = (torch.cat(list(x)) for x in (parts, *getattr(out, "deepstack_features", ())))
        # no token takes a dummy's features, but they are in the graph, and get gradients of zero
        taken = [F.embedding(images.takes[kind], x).to(flat.dtype) for x in (features, *levels)]
        flat = flat.index_copy(0, images.places[kind], taken[0])
        deep.append(taken[1:])
    rest["inputs_embeds"] = flat.view_as(embeds)
    if deep[0]:  # Qwen3-VL adds features of the tower's lower layers to those of the decoder's, in the order of tokens
        places = torch.cat(list(images.places.values()))
        order, mask = places.argsort(), places.new_zeros(len(flat), dtype=torch.bool)
        mask[places] = True
        rest["visual_pos_masks"] = mask.view(embeds.shape[:2])
        rest["deepstack_visual_embeds"] = [F.embedding(order, torch.cat(level)) for level in zip(*deep)]
    if images.blocks is not None and "packed_runs" not in rest:
        from transformers.models.gemma3 import modeling_gemma3  # slow, and Gemma alone needs it

        of_cache = rest.get("attention_mask"), rest.get(cache_keyword(model))
        text = model.config.get_text_config()
        rest["attention_mask"] = modeling_gemma3.create_masks_for_vision_model(
            text, embeds, *of_cache, None, images.blocks
        )
    return rest


def cache_keyword(model: PreTrainedModel) -> str:
    """The keyword for the model's cache (`cache` since transformers 5.24); "" if it takes none."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in takes), "")


def prompt_logits(self: PreTrainedModel, inputs: dict, select: torch.Tensor) -> torch.Tensor:
    """Logits (n, V) after the positions select (n,), indices into the (b, l) of the inputs: for sampling from prompts
    with images. A method that `load_model` binds to vision models."""
    use_cache = cache_keyword(self) in inputs
    inputs = with_images(self, **inputs) if "images" in inputs else inputs
    h = self.get_decoder()(**inputs, use_cache=use_cache).last_hidden_state
    h = F.embedding(select, h.flatten(0, 1))
    return self.get_output_embeddings()(h)


# ---- the critic ----------------------------------------------------------------------------------
@cache
def value_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The model with one output, `score`, in place of its head: transformers has no such token classifiers."""

    class WithValue(cls):
        _tied_weights_keys: ClassVar[dict] = {}

        def __init__(self, config: PreTrainedConfig):
            super().__init__(config)
            del self.lm_head
            self.score = torch.nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)

        def get_output_embeddings(self) -> None:
            return None

    # by name and module transformers finds how to convert the weights of a class
    WithValue.__name__, WithValue.__qualname__, WithValue.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return WithValue
