"""Syncs the trainer's weights to the engine. A checksum over all bits and the log-probs of a probe check the sync."""

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lib import InputError
from lib.data.vision import Media, Vision, media_hash
from lib.data_proto import DataProto
from lib.distributed import all_gather_lists, compute_device, iter_full_params, merged_shards
from lib.model import response_log_probs
from lib.rollout.engine import ImageProbe, RolloutEngine

PROBE_TOKENS = 24  # after the image of a probe


class WeightSyncError(RuntimeError):
    """The rollout engine does not hold the trainer's weights."""


def sync_weights(engine: RolloutEngine, model, version: int, *, tolerance: float) -> Mapping[str, float]:
    """Gives the engine the trainer's weights as `version`, unless it already has it, and checks them. A collective.

    A checksum over the bits of all weights finds a skipped or cut-off sync. The log-probs of a fixed probe text, for a
    vision model also of one after an image, find weights that are not used (a stale tied head, kept image features).

    Raises InputError if a weight of the trainer, or a log-prob, is not finite; WeightSyncError if a check failed. The
    mean |log-prob difference| on the probe may be at most `tolerance`."""
    if engine.version == version:
        return engine.verified  # a resumed run syncs again and has these metrics, so this step must have them, too
    since = f"after step {version}: lower --lr or --max-grad-norm, and resume from an earlier checkpoint"
    since = since if version else "at the start: see --model"
    _check_finite(model, since)
    if not engine.takes_weights:
        engine.version = version
        return engine.verified
    engine.load_weights(model, version)
    expected = weight_checksum(model, engine.dtype or next(model.parameters()).dtype)
    if (engine.version, engine.checksum) != (version, expected):
        held = f"the engine holds version {engine.version} with checksum {engine.checksum}"
        raise WeightSyncError(f"weight sync to version {version} failed: {held}, the trainer has {expected}")
    differences = {"on the probe": _probe_difference(engine, model, None)}
    if engine.image_probe is not None:
        differences["on the probe with an image"] = _probe_difference(engine, model, engine.image_probe)
    for where, (difference, finite) in differences.items():
        if not finite:
            raise InputError(f"the policy's log-probs are not finite {since}")
        if not difference <= tolerance:
            what = f"engine and trainer differ by {difference:.3g} nats {where} (allowed: {tolerance:g})"
            why = "the engine got the weights and does not compute with them"
            raise WeightSyncError(f"weight sync to version {version} failed: {what}; {why}")
    engine.verified = {"rollout/canary_logp_diff": max(difference for difference, _ in differences.values())}
    return engine.verified


@torch.no_grad()
def _probe_difference(engine: RolloutEngine, model: PreTrainedModel, probe: ImageProbe | None) -> tuple[float, bool]:
    """(mean |log-prob difference| over the text of the probe, of the server that differs most; whether the trainer's
    log-probs are finite). probe: None for a text of random tokens."""
    if probe is None:
        ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, size=32).tolist()
        tensors = {"input_ids": torch.tensor([ids]), "position_ids": torch.arange(len(ids))[None]}
        of_engine, n, objects = engine.probe_log_probs(ids), len(ids) - 1, {}
    else:
        media = probe.media
        tensors = {"input_ids": torch.tensor([media.ids]), "position_ids": media.positions[None]}
        tensors["multi_modal_hash"] = torch.tensor([media.hash])
        of_engine, n = engine.probe_log_probs(probe.raw_ids, media), probe.text
        objects = {"multi_modal_inputs": [media.inputs]}
    answer = tensors["input_ids"][:, -n:]
    tensors |= {"attention_mask": torch.ones_like(tensors["input_ids"]), "responses": answer}
    row = DataProto.from_dict(tensors=tensors | {"response_mask": torch.ones_like(answer)}, non_tensors=objects)
    own = response_log_probs(model, row.to(compute_device(model)), 1.0)[0][0].float().cpu()
    return float((of_engine[..., -n:] - own).abs().mean(-1).max()), bool(own.isfinite().all())


def image_probe(processor: ProcessorMixin, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> ImageProbe:
    """An image of noise in a user's message, and ordinary tokens."""
    vision, rng = Vision(processor, model.config), np.random.default_rng(0)
    data = {"image": [Image.fromarray(rng.integers(0, 256, (256, 256, 3), dtype=np.uint8))]}
    text = tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], tokenize=False)
    raw_ids, ids, inputs = vision.encode(text, data)
    special = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
    ordinary = [i for i in range(model.config.get_text_config().vocab_size) if i not in special]
    after = rng.choice(ordinary, PROBE_TOKENS).tolist()
    positions = vision.positions(ids + after, inputs)
    return ImageProbe(raw_ids + after, Media(data, inputs, ids + after, positions, media_hash(inputs)), len(after))


def _check_finite(model: PreTrainedModel, since: str) -> None:
    shards = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    finite = torch.stack([shard.isfinite().all() for shard in shards.values()]).tolist()
    if bad := sorted(set(all_gather_lists([name for name, fine in zip(shards, finite) if not fine]))):
        raise InputError(f"the policy's weights are not finite, {bad[0]} and {len(bad) - 1} others, {since}")


class CheckedStream:
    """Iterates over (name, whole tensor) of the trainer's model, and keeps the checksum of what the engine took."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self._sums: dict[str, torch.Tensor] = {}

    def __iter__(self):
        self._sums = {}
        for name, tensor in iter_full_params(self.model, self.dtype):
            self._sums[name] = _sum_of_bits(tensor)
            yield name, tensor

    @property
    def checksum(self) -> int:
        """Of the tensors so far."""
        return sum(_checksums(self._sums).values()) % (1 << 64)


def weight_checksum(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """An exact checksum of all weights as `dtype`, in any order. Each rank reads its own shards. A collective."""
    sums, pieces, ranks = {}, {}, dist.get_world_size()
    for name, shard in merged_shards(model):
        pieces[name] = 1  # each piece is on ranks / pieces ranks
        if isinstance(shard, DTensor):
            sizes = zip(shard.device_mesh.shape, shard.placements)
            pieces[name] = math.prod(size for size, placement in sizes if not placement.is_replicate())
            shard = shard.to_local()
        sums[name] = _sum_of_bits(shard.to(dtype))
    total = sum(pieces[name] * checksum for name, checksum in _checksums(sums).items())
    return sum(all_gather_lists([total])) // ranks % (1 << 64)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of the elements. The sums of shards add up to that of the whole tensor."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer).sum(dtype=torch.int64)


def _checksums(sums: dict[str, torch.Tensor]) -> dict[str, int]:
    """The sums of bits, weighted by their names. They are read together: the host waits for a GPU once."""
    numbers = torch.stack([*sums.values()]).tolist() if sums else []
    return {name: zlib.crc32(name.encode()) * number % (1 << 64) for name, number in zip(sums, numbers)}
