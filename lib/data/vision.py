"""Images and videos of prompts: from a row's files to what the model and the engines take."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lib.data_proto import DataProto

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedConfig, ProcessorMixin


class Encoded(NamedTuple):
    raw_ids: list[int]
    """one placeholder for each image: what vLLM takes"""
    ids: list[int]
    """with the placeholders expanded: what is trained on"""
    inputs: dict[str, torch.Tensor]
    """the processor's tensors (multi_modal_inputs); {} without images"""


@dataclass(frozen=True)
class Vision:
    """How the prompts of a vision model are made. Picklable, for the processes of a loader."""

    processor: ProcessorMixin
    config: PreTrainedConfig
    max_pixels: int = 1003520
    min_pixels: int = 3136
    max_images: int = 8
    video_fps: float = 2.0
    max_frames: int = 32

    def media(self, images: list, videos: list, where: str, folder: Path) -> dict:
        """multi_modal_data: {"image": [PIL], "video": [(frames (F, H, W, 3) uint8, metadata)]}. Raises InputError."""
        raise NotImplementedError

    def messages(self, messages: list[dict], data: dict, where: str) -> list[dict]:
        """The messages with <image> and <video> as content parts, as many as data has. Raises InputError."""
        raise NotImplementedError

    def encode(self, text: str, data: dict) -> Encoded:
        raise NotImplementedError

    def positions(self, ids: list[int], inputs: dict) -> torch.Tensor:
        """(L,), or with mrope (4, L): text, temporal, height, width."""
        raise NotImplementedError

    def joined(self, first: dict, more: dict) -> dict:
        """The inputs of one row whose later turn has more images."""
        raise NotImplementedError


@dataclass(frozen=True)
class Media:
    """What a prompt's images are to an engine."""

    data: dict
    inputs: dict[str, torch.Tensor]
    ids: list[int]
    """expanded"""
    positions: torch.Tensor
    """(len(ids),), or with mrope (4, len(ids))"""
    hash: int


def media_of(prompts: DataProto) -> list[Media | None]:
    """The media of each row of a batch of prompts; None for rows without."""
    if "multi_modal_inputs" not in prompts.non_tensor_batch:
        return [None] * len(prompts)
    t, objects, rows = prompts.batch, prompts.non_tensor_batch, []
    for i, inputs in enumerate(objects["multi_modal_inputs"]):
        attended = t["attention_mask"][i].bool()
        own = [t["input_ids"][i][attended].tolist(), t["position_ids"][i][..., attended]]
        rows.append(
            Media(objects["multi_modal_data"][i], inputs, *own, int(t["multi_modal_hash"][i])) if inputs else None
        )
    return rows


def media_hash(inputs: dict[str, torch.Tensor]) -> int:
    """int64 of all pixels; 0 without images. Prompts of equal ids may have other images."""
    if not inputs:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(inputs):
        digest.update(f"{name}{tuple(inputs[name].shape)}".encode())
        digest.update(np.ascontiguousarray(inputs[name].numpy()).data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """(B, L), of (B, L) or with mrope (B, 4, L)."""
    return position_ids if position_ids.ndim == 2 else position_ids[:, 0]


def to_png(image: Image.Image) -> bytes:
    raise NotImplementedError
