"""The vision half of a model: features of images over the embeddings of their placeholders, then the decoder."""

from dataclasses import dataclass

import torch
from torch.utils._pytree import register_dataclass
from transformers import PreTrainedModel


@dataclass
class Images:
    """The images of a forward, as a part of its `inputs`."""

    inputs: dict[str, dict[str, torch.Tensor]]
    """"image", "video": what get_image_features, get_video_features take; rows end to end"""
    places: dict[str, torch.Tensor]
    """(n,), indices of the placeholders in the flattened layout of the decoder"""
    takes: dict[str, torch.Tensor]
    """(n,), which feature each of them gets"""
    blocks: torch.Tensor | None
    """of the layout's shape: the number of a token's image, -1 for text; None where images are seen causally"""


register_dataclass(Images)


def images_of_prompts(model: PreTrainedModel, ids: torch.Tensor, rows: list[dict]) -> Images | None:
    """For the prefill of the hf engine. ids (n, P), left-padded; rows: the multi_modal_inputs of each, {} without."""
    raise NotImplementedError


def with_images(model: PreTrainedModel, inputs: dict) -> dict:
    """The decoder's inputs, with `images` laid over the embeddings."""
    raise NotImplementedError


def prompt_logits(self: PreTrainedModel, inputs: dict, select: torch.Tensor) -> torch.Tensor:
    """(n, V). A method that `load_model` binds to vision models."""
    raise NotImplementedError
