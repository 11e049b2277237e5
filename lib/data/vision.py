"""Images and videos of prompts: from a row's files to what the model and the engines take. Both get the same picture,
made here: turned as its EXIF says, without alpha, of an allowed size. Each processor then resizes by its own rules. A
template may leave an image out: its placeholders are counted."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import math
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from lib import InputError
from lib.data.rows import _shown
from lib.data_proto import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

MARKER = re.compile("<(image|video)>")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")  # others may start programs (EPS)
LONGEST_PATH = 4096  # characters: longer text is base64
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
Image.MAX_IMAGE_PIXELS = 25_000_000  # Pillow refuses twice as many
TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}  # of a processor's output


class Encoded(NamedTuple):
    raw_ids: list[int]  # one placeholder for each image: what vLLM takes
    ids: list[int]  # with the placeholders expanded: what is trained on
    inputs: dict[str, torch.Tensor]  # the processor's tensors (multi_modal_inputs); {} without images


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

    def entries(self, messages: list[dict], images: list, videos: list) -> tuple[list, list]:
        """(images, videos) in the order of their places: a content part's own, else the column's next one."""

        def ordered(kind: str, column: list) -> list:
            rest = list(column)
            places = [part for part in _parts(messages) if part.get("type") == kind]
            return [part[kind] if kind in part else rest.pop(0) for part in places if kind in part or rest] + rest

        return ordered("image", images), ordered("video", videos)

    def media(self, images: list, videos: list, where: str, folder: Path) -> dict:
        """multi_modal_data: {"image": [PIL], "video": [(frames (F, H, W, 3) uint8, metadata)]}, without empty lists.
        folder: where relative paths begin. Raises InputError."""
        data: dict = {"image": [self._image(x, f"{where}: image {i}", folder) for i, x in enumerate(images)]}
        data["video"] = [self._video(x, f"{where}: video {i}", folder) for i, x in enumerate(videos)]
        return {kind: found for kind, found in data.items() if found}

    def fitted(self, images: list[Image.Image]) -> list[Image.Image]:
        """A tool's images in the size of the run. Raises InputError, also where the processor would refuse them."""
        data = self.media(images, [], "the tool's result", Path())
        self.encode(self.processor.image_token * len(images), data)
        return data["image"]

    def messages(self, messages: list[dict], data: dict, where: str) -> list[dict]:
        """The messages as content parts, of which <image> and <video> in a text are some. In a list of parts, text is
        text. Raises InputError unless data has as many images and videos."""
        for kind in ("image", "video"):
            places, there = sum(part.get("type") == kind for part in _parts(messages)), len(data.get(kind, ()))
            if (places or there) and kind == "video" and getattr(self.config, "video_token_id", None) is None:
                raise InputError(f"{where}: has videos; models of type {self.config.model_type} take none")
            if places != there:
                advice = "write one for each (text that is to stay text: in a list of content parts)"
                found = f"{places} <{kind}> in the messages, but {there} {kind}s in the row"
                raise InputError(f"{where}: {found}; {advice}")
        contents = [{"content": [_bare(part) for part in _parts([m])]} if m.get("content") else {} for m in messages]
        return [message | content for message, content in zip(messages, contents)]

    def encode(self, text: str, data: dict) -> Encoded:
        """A templated text with placeholders for the images and videos in `data`. Raises InputError."""
        raw_ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        for kind in ("image", "video"):
            shown = text.count(token) if (token := getattr(self.processor, f"{kind}_token", None)) else 0
            if shown != (given := len(data.get(kind, ()))):
                found = f"the templated prompt has {shown} {kind} placeholders ({token}) for {given} {kind}s"
                advice = f"does the chat template show {kind}s, or does a message spell this token?"
                raise InputError(f"{found}; {advice}")
        if not data:
            return Encoded(raw_ids, raw_ids, {})
        kwargs: dict[str, Any] = {"images": data.get("image")}
        if "video" in data:
            frames, metadata = map(list, zip(*copy.deepcopy(data["video"])))  # Qwen3-VL's appends to frames_indices
            kwargs |= {"videos": frames, "video_metadata": metadata, "do_sample_frames": False}
        try:
            out = self.processor(text=[text], return_tensors="pt", add_special_tokens=False, **kwargs)
        except Exception as error:  # a processor's code may raise anything
            raise InputError(f"the model's processor refuses these images: {_reason(error)}") from error
        inputs = {name: torch.as_tensor(x) for name, x in out.items() if name not in TEXT_INPUTS}
        return Encoded(raw_ids, out["input_ids"][0].tolist(), inputs)

    def positions(self, ids: list[int], inputs: dict) -> torch.Tensor:
        """(L,), or with mrope (4, L): text, temporal, height, width, by the model's own get_rope_index. ids: expanded;
        each placeholder must belong to an image or video of `inputs`."""
        text = torch.arange(len(ids))
        if not (self.mrope and inputs):
            return text.repeat(4, 1) if self.mrope else text
        row = torch.tensor([ids])
        kinds = media_kinds(self.config, row)
        rope, _ = self._without_layers.get_rope_index(row, mm_token_type_ids=kinds, **inputs)
        rope = rope[:, 0].to(text.dtype)  # (3, L)
        # what follows a video begins after its largest position; in Qwen2(.5)-VL transformers 5.19 ignores the temporal
        for start in (kinds[0].diff().nonzero()[:, 0] + 1).tolist():
            rope[:, start:] += rope[:, :start].max() + 1 - rope[0, start]
        return torch.cat([text[None], rope])

    def joined(self, first: dict, more: dict) -> dict:
        """The inputs of one row whose later turn has more images."""
        dim = int("pixel_attention_mask" in first | more)  # SmolVLM's, Idefics 3's, whose tensors are (1, images, ...)
        return first | more | {name: torch.cat([first[name], more[name]], dim) for name in first.keys() & more.keys()}

    @property
    def placeholders(self) -> list[str]:
        """The tokens that stand for an image or a video; with GLM-4V also the one that begins a video's frames."""
        names = [getattr(self.processor, f"{kind}_token", None) for kind in ("image", "video")]
        if (start := getattr(self.config, "video_start_token_id", None)) is not None:
            names.append(self.processor.tokenizer.convert_ids_to_tokens(start))
        return list(filter(None, names))

    @property
    def takes_later_images(self) -> bool:
        """Whether images may follow sampled tokens: not in Gemma 3, where an image's tokens see each other."""
        return self.config.model_type != "gemma3"

    @property
    def mrope(self) -> bool:
        """Whether a token has three rotary positions."""
        rope = getattr(self.config.get_text_config(), "rope_parameters", None)
        return "mrope_section" in (rope or {})

    @cached_property
    def _without_layers(self) -> Any:
        """The model, without layers and weights, for its get_rope_index."""
        from transformers import AutoModel

        config = copy.deepcopy(self.config)
        config.text_config.num_hidden_layers = config.vision_config.depth = 0
        if getattr(config.text_config, "layer_types", None):
            config.text_config.layer_types = []
        with torch.device("meta"):
            return AutoModel.from_config(config)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_without_layers"}

    def _image(self, entry: Any, where: str, folder: Path) -> Image.Image:
        """RGB, with its pixels in memory, of a size that the limits allow."""
        source = _bytes_or_image(entry, where, folder)
        try:
            image = Image.open(io.BytesIO(source), formats=FORMATS) if isinstance(source, bytes) else source
            if image.mode in ("I", "F"):
                kind = "integers" if image.mode == "I" else "floats"
                raise InputError(f"{where}: its pixels are 32-bit {kind}, of no known range; save it with 8 or 16 bits")
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I;16"):  # convert("RGB") would make all above 255 white
                image = image.convert("I").point(lambda x: x / 257).convert("L")
            if image.has_transparency_data:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))
            return self._sized(image.convert("RGB"))
        except InputError:
            raise
        except Exception as error:  # Pillow's decoders may raise anything
            raise InputError(f"{where}: not a readable image ({_reason(error)})") from error

    def _sized(self, image: Image.Image) -> Image.Image:
        """At most max_pixels, at least min_pixels, of the same aspect ratio."""
        pixels = image.width * image.height
        if self.min_pixels <= pixels <= self.max_pixels:
            return image
        scale = math.sqrt(min(max(pixels, self.min_pixels), self.max_pixels) / pixels)
        around = math.floor if scale < 1 else math.ceil
        width, height = (min(max(1, around(side * scale)), self.max_pixels) for side in image.size)
        return image.resize((width, height), Image.Resampling.BICUBIC)

    def _video(self, entry: Any, where: str, folder: Path) -> tuple[np.ndarray, dict]:
        """(frames (F, H, W, 3) uint8, metadata as transformers' VideoMetadata): at most max_frames, evenly, of a list
        of frames, or of a file at video_fps."""
        fps = self.video_fps
        if isinstance(entry, dict):
            fps = entry.get("fps", fps)
            entry = next((entry[name] for name in ("frames", "video", "path") if name in entry), None)
        if not (isinstance(fps, int | float) and 0 < fps < math.inf):
            raise InputError(f"{where}: its fps is {_shown(fps)}; it must be a positive number")
        if isinstance(entry, list) and entry:
            taken = _evenly(len(entry), self.max_frames)
            images = [self._image(entry[i], f"{where}: frame {i}", folder) for i in taken]
            total, backend = len(entry), "frames"
        elif isinstance(entry, str | Path):
            images, total, fps, taken = self._read_video(str(entry), where, folder)
            backend = "opencv"
        else:
            raise InputError(f"{where}: {_shown(entry)}; it must be a path, or a list of frames")
        if len({image.size for image in images}) > 1:
            raise InputError(f"{where}: its frames have several sizes: {sorted({image.size for image in images})}")
        metadata = {"total_num_frames": total, "fps": fps, "frames_indices": taken, "duration": total / fps}
        metadata |= {"width": images[0].width, "height": images[0].height, "video_backend": backend}
        return np.stack([np.asarray(image) for image in images]), metadata

    def _read_video(self, name: str, where: str, folder: Path) -> tuple[list[Image.Image], int, float, list[int]]:
        """(frames, the number of frames of the file, its frames per second, the numbers of those taken)."""
        if not find_spec("cv2"):
            raise InputError(f"{where}: reading video files needs a package: pip install opencv-python-headless")
        from transformers.video_utils import load_video

        if (path := _file(name, where, folder)) is None:
            raise InputError(f"{where}: {_shown(name)} is no file in {folder}")

        def chosen(metadata: Any, **_) -> list[int]:
            return _evenly(metadata.total_num_frames, round(min(self.max_frames, metadata.duration * self.video_fps)))

        try:
            frames, metadata = load_video(str(path), sample_indices_fn=chosen, backend="opencv")
        except Exception as error:  # OpenCV's, or what follows from a file without frames
            raise InputError(f"{where}: {path}: not a readable video ({_reason(error)})") from error
        taken = list(metadata.frames_indices)
        if len(frames) != len(taken):
            raise InputError(f"{where}: {path}: only {len(frames)} of {len(taken)} frames can be read; is it whole?")
        images = [self._sized(Image.fromarray(frame)) for frame in frames]
        return images, metadata.total_num_frames, metadata.fps or self.video_fps, taken


def _parts(messages: list[dict]) -> list[dict]:
    """The content parts of all messages; text is cut at its markers."""
    parts: list[dict] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            pieces = enumerate(MARKER.split(content))  # text, kind, text, kind, ..., text
            content = [{"type": x} if i % 2 else {"type": "text", "text": x} for i, x in pieces if x]
        parts += content or []
    return parts


def _bare(part: dict) -> dict:
    """Without the image or video itself."""
    return {key: value for key, value in part.items() if key != part.get("type") or key == "text"}


def _evenly(total: int, most: int) -> list[int]:
    """The numbers of at most `most` of `total` frames, at least 1."""
    return np.linspace(0, total - 1, max(1, min(total, most))).round().astype(int).tolist()


def _bytes_or_image(entry: Any, where: str, folder: Path) -> bytes | Image.Image:
    if isinstance(entry, dict):  # {"bytes": ..., "path": ...} of the datasets library, {"image": ...} of verl
        entry = next((entry[name] for name in ("bytes", "image", "path") if name in entry), entry)
    if isinstance(entry, bytes | Image.Image):
        return entry
    if not isinstance(entry, str):
        raise InputError(f"{where}: {_shown(entry)}; it must be a path, bytes, base64 text or a PIL image")
    path = _file(entry, where, folder)
    if path is None:
        try:
            return base64.b64decode(entry.partition(",")[2] if entry.startswith("data:") else entry, validate=True)
        except ValueError as error:
            raise InputError(f"{where}: {_shown(entry)} is no file in {folder}, and no base64") from error
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{where}: {entry}: cannot be read ({error.strerror})") from error


def _file(name: str, where: str, folder: Path) -> Path | None:
    """None if there is none. Raises InputError for a URL."""
    if name.startswith(("http://", "https://")):
        raise InputError(f"{where}: {_shown(name)}: images and videos are read from disk, not from the network")
    path = folder / name[:LONGEST_PATH].removeprefix("file://")
    with suppress(OSError, ValueError):  # a part of it may be too long for a name
        return path if len(name) <= LONGEST_PATH and path.is_file() else None
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"none of the formats {', '.join(FORMATS)}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@dataclass(frozen=True)
class Media:
    """What a prompt's images are to an engine."""

    data: dict
    inputs: dict[str, torch.Tensor]
    ids: list[int]  # expanded
    positions: torch.Tensor  # (len(ids),), or with mrope (4, len(ids))
    hash: int
    sampled: list[int] | None = None  # 1: the policy sampled it, in an episode; a placeholder among these is text


def media_of(prompts: DataProto) -> list[Media | None]:
    """The media of each row of a batch of prompts; None for rows without."""
    t, objects = prompts.batch, prompts.non_tensor_batch
    rows: list[Media | None] = [None] * len(prompts)
    for i, inputs in enumerate(objects.get("multi_modal_inputs", ())):
        if inputs:
            attended = t["attention_mask"][i].bool()
            ids, positions = t["input_ids"][i][attended].tolist(), t["position_ids"][i][..., attended]
            rows[i] = Media(objects["multi_modal_data"][i], inputs, ids, positions, int(t["multi_modal_hash"][i]))
    return rows


def media_kinds(config: PreTrainedConfig, ids: torch.Tensor) -> torch.Tensor:
    """For each token (..., L): 0 text, 1 a placeholder of an image, 2 one of a video."""
    kinds = (ids == config.image_token_id).long()
    if hasattr(config, "video_start_token_id"):  # GLM-4V: frames of a video have the placeholders of images
        starts, ends = ((ids == getattr(config, f"video_{mark}_token_id")).cumsum(-1) for mark in ("start", "end"))
        return kinds * (1 + (starts > ends).long())
    video = getattr(config, "video_token_id", None)
    return kinds if video is None else kinds + 2 * (ids == video)


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
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
