"""Images for the rows of a traced step."""

import math

import torch
from transformers import PreTrainedModel

from lib.model.vision import dummy_image, family_of, media_of_model, patches_per_feature


def images_that_fill(model: PreTrainedModel, tokens: int, max_pixels: int) -> tuple[dict[str, torch.Tensor], int]:
    """(multi_modal_inputs of the fewest images, of at most `max_pixels` or of the model's fixed size, that nearly fill
    a prompt of so many tokens; how many tokens these have). ({}, 0) if none fits."""
    if tokens < 1:
        return {}, 0
    kind, config = media_of_model(model)["image"], model.config.vision_config
    family = family_of(model.config)
    assert family is not None
    inputs, join = dummy_image(model, kind), family.join
    values, *more = kind.inputs
    if not (more and more[0].endswith("_grid_thw")):
        of_each = (config.image_size // config.patch_size) ** 2 // patches_per_feature(model.config)
        n = tokens // of_each
        return ({name: torch.cat([x] * n, join) for name, x in inputs.items()}, n * of_each) if n else ({}, 0)
    size = config.spatial_merge_size
    n = -(-tokens // max(max_pixels // (size * config.patch_size) ** 2, 1))
    side = math.isqrt(tokens // n)
    height = max(range(side // 2 + 1, side + 1), key=lambda h: tokens // n // h * h)
    grid = torch.tensor([[1, size * height, size * (tokens // n // height)]] * n)
    patches = int(grid.prod(1).sum())
    return {values: inputs[values][:1].repeat(patches, 1), more[0]: grid}, patches // patches_per_feature(model.config)
