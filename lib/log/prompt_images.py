"""Small copies of the images of prompts: images/<row's hash>-<number>.jpg in the run's folder, each written once.
Prompts of equal text may differ in their images and in the right answer, so the hash is over all of a row."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from lib.cli.secrets import private_folder, write_private
from lib.data_proto import DataProto
from lib.log.disk import writes_to

SIDE = 320  # pixels; the run page shows at most 512 (tools/page/samples.py)


def row_hashes(batch: DataProto) -> list[str]:
    """For each row the digest of its data source, messages, images and ground truth."""
    rows, hashes = batch.non_tensor_batch, batch.batch.get("multi_modal_hash", None)
    of_images = [0] * len(batch) if hashes is None else hashes.tolist()
    parts = zip(rows["data_source"], rows["raw_prompt"], rows["reward_model"], of_images)
    return [hashlib.sha256(json.dumps(row, default=str).encode()).hexdigest()[:16] for row in parts]


def keep_images(run_folder: Path, batch: DataProto) -> list[list[str] | None]:
    """Writes the images of the rows' prompts, not those of tools. Returns their names in images/; None for a row
    without. Raises InputError if an image cannot be written."""
    rows = batch.non_tensor_batch
    if "multi_modal_data" not in rows:
        return [None] * len(batch)
    names = []
    for row_hash, messages, media in zip(row_hashes(batch), rows["raw_prompt"], rows["multi_modal_data"]):
        in_prompt = sum(part.get("type") == "image" for part in _parts(messages))
        images = media.get("image", [])[:in_prompt]
        names.append([f"{row_hash}-{i}.jpg" for i in range(len(images))] or None)
        for name, image in zip(names[-1] or (), images):
            _keep(run_folder / "images" / name, image)
    return names


def _keep(file: Path, image: Image.Image) -> None:
    if file.exists():
        return
    small, jpeg = image.convert("RGB"), io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(jpeg, "JPEG", quality=85)
    with writes_to(file, "a prompt's image was not written"):
        file.parent.parent.mkdir(parents=True, exist_ok=True)  # a disk of this node alone does, too
        private_folder(file.parent)
        write_private(file, jpeg.getvalue())


def _parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    contents = [message.get("content") for message in messages]
    return [part for content in contents if isinstance(content, list) for part in content]
