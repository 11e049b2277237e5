"""Syncs the trainer's weights to the engine. A checksum over all bits and the log-probs of a probe check the sync."""

import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from lib import InputError
from lib.data.vision import Media, Vision, media_hash
from lib.data_proto import DataProto
from lib.distributed import Part, all_gather_lists, compute_device, fsdp_modules, iter_full_params, weight_shards
from lib.model import response_log_probs
from lib.rollout.engine import ImageProbe, RolloutEngine

PROBE_TOKENS = 24  # after the image of a probe


class WeightSyncError(InputError):
    """The rollout engine does not hold the trainer's weights: shown as one line."""


class UnsupportedAdapter(InputError):
    """The rollout engine cannot sample with this LoRA adapter."""


def sync_weights(
    engine: RolloutEngine, model, version: int, *, tolerance: float, max_mismatch: float = math.inf
) -> Mapping[str, float]:
    """Gives the engine the trainer's weights as `version`, unless it has it, and checks them. A collective.

    Where the engine has weights of its own, a checksum over the bits of all finds a skipped or cut-off
    sync. The log-probs of a probe (random tokens; of a vision model also a text after an image) find
    weights that are not used: a stale tied head, kept image features. Raises InputError if weights or
    log-probs of the trainer are not finite, or k3 of a probe exceeds `max_mismatch`; WeightSyncError if
    the checksum differs, or a probe's mean |log-prob difference| exceeds `tolerance`."""
    if engine.version == version:
        return engine.verified  # a resumed run syncs again and has these metrics, so this step must have them, too
    since = "at the start: see --model"
    if version:
        since = f"after step {version}: lower --lr or --max-grad-norm, and resume from an earlier checkpoint"
    _check_finite(model, since)
    failed = f"weight sync to version {version} failed"
    if engine.takes_weights and not engine.shares_weights:
        engine.load_weights(model, version)
        parts: tuple[Part, ...] = ("base", "adapter") if engine.lora_sync == "adapter" else ("merged",)
        expected = weight_checksum(model, engine.dtype or next(model.parameters()).dtype, parts)
        if (engine.version, engine.checksum) != (version, expected):
            held = f"the engine holds version {engine.version} with checksum {engine.checksum}"
            raise WeightSyncError(f"{failed}: {held}, the trainer has {expected}")
    engine.version = version
    if not engine.takes_weights:
        return engine.verified
    probes: dict[str, ImageProbe | None] = {"on the probe": None}
    if engine.image_probe is not None:
        probes["on the probe with an image"] = engine.image_probe
    means = []
    for where, probe in probes.items():
        mean, k3, finite = _probe_difference(engine, model, probe)
        if not finite:
            raise InputError(f"the policy's log-probs are not finite {since}")
        check_mismatch(k3, max_mismatch, f"{where} after step {version}")
        if not mean <= tolerance:
            what = f"engine and trainer differ by {mean:.3g} nats {where} (allowed: {tolerance:g})"
            why = "the engine got the weights and does not compute with them (a server must serve one run only)"
            raise WeightSyncError(f"{failed}: {what}; {why}")
        means.append(mean)
    engine.verified = {"rollout/canary_logp_diff": max(means)}
    return engine.verified


def check_mismatch(k3: float, limit: float, where: str) -> None:
    """Raises InputError if k3, between engine and trainer, is more than --max-mismatch."""
    if not k3 <= limit:
        what = f"engine and trainer differ by k3 = {k3:.3g} nats {where}"
        raise InputError(
            f"--max-mismatch {limit:g}: {what}: take a more exact engine (docs/algorithms.md), or raise it"
        )


@torch.no_grad()
def _probe_difference(engine: RolloutEngine, model: PreTrainedModel, probe: ImageProbe | None) -> tuple:
    """(mean |log-prob difference| in nats, k3, whether the trainer's log-probs are finite) over the text of the probe,
    of the server that differs most, the same on all ranks. probe: None for random tokens."""
    if probe is None:
        vocab_size = model.config.get_text_config().vocab_size
        ids = np.random.default_rng(0).integers(0, vocab_size, size=32).tolist()
        of_engine = engine.probe_log_probs(ids)
        row = _probe_row(ids, torch.arange(len(ids)), len(ids) - 1)
    else:
        media = probe.media
        of_engine = engine.probe_log_probs(probe.raw_ids, media)
        row = _probe_row(media.ids, media.positions, probe.text)
        row.batch["multi_modal_hash"] = torch.tensor([media.hash])
        row.non_tensor_batch["multi_modal_inputs"] = np.array([media.inputs], dtype=object)
    own = response_log_probs(model, row.to(compute_device(model)), 1.0)[0][0].float().cpu()  # (n,)
    log_ratio = own - of_engine[..., -len(own) :]  # log r = log π_train / π_rollout, (n,) or (servers, n)
    k3 = torch.expm1(log_ratio.clamp(-20, 20)) - log_ratio.clamp(-20, 20)
    is_infinite = not own.isfinite().all()
    largest = [float(log_ratio.abs().mean(-1).max()), float(k3.mean(-1).max()), float(is_infinite)]
    mean, k3, infinite = torch.tensor(all_gather_lists([largest])).amax(0).tolist()  # nan if there is one
    return mean, k3, not infinite


def _probe_row(ids: list[int], positions: torch.Tensor, n: int) -> DataProto:
    """A batch of one row, whose response are the last n tokens."""
    tensors = {"input_ids": torch.tensor([ids]), "position_ids": positions[None]}
    tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    tensors["responses"] = tensors["input_ids"][:, -n:]
    tensors["response_mask"] = torch.ones_like(tensors["responses"])
    return DataProto.from_dict(tensors=tensors)


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
    media = Media(data, inputs, ids + after, positions, media_hash(inputs))
    return ImageProbe(raw_ids + after, media, len(after))


def _check_finite(model: PreTrainedModel, since: str) -> None:
    for module in fsdp_modules(model):  # a forward without backward leaves the root's weights as copies
        module.reshard()
    shards = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    finite = torch.stack([shard.isfinite().all() for shard in shards.values()]).tolist()
    own = [name for name, is_finite in zip(shards, finite) if not is_finite]
    if bad := sorted(set(all_gather_lists(own))):
        raise InputError(f"the policy's weights are not finite, {bad[0]} and {len(bad) - 1} others, {since}")


class CheckedStream:
    """Iterates over (name, whole tensor) of the trainer's model, by the names of the model's files,
    and keeps the checksum of what the engine took."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, part: Part = "merged"):
        self.model, self.dtype, self.part = model, dtype, part
        self._sums: dict[str, torch.Tensor] = {}
        changes = get_model_conversion_mapping(model, add_legacy=False)
        # tensors come one by one: not renamed if a file's tensor is several of them, or of an adapter
        one_by_one = all(len(change.target_patterns) == 1 for change in changes)
        self._is_renamed = one_by_one and part != "adapter"

    def __iter__(self):
        self._sums = {}
        for name, tensor in iter_full_params(self.model, self.dtype, self.part):
            self._sums[name] = _sum_of_bits(tensor)
            if self._is_renamed:
                yield from revert_weight_conversion(self.model, {name: tensor}).items()
            else:
                yield name, tensor

    @property
    def checksum(self) -> int:
        """Of the tensors so far."""
        return sum(_checksums(self._sums).values()) % (1 << 64)


def weight_checksum(model: PreTrainedModel, dtype: torch.dtype, parts: Sequence[Part] = ("merged",)) -> int:
    """An exact checksum of all weights as `dtype`, in any order. Each rank reads its own shards. A collective."""
    sums, pieces, ranks = {}, {}, dist.get_world_size()
    for name, shard in chain.from_iterable(weight_shards(model, dtype, part) for part in parts):
        pieces[name] = 1  # each piece is on ranks / pieces ranks
        if isinstance(shard, DTensor):
            sizes = zip(shard.device_mesh.shape, shard.placements)
            pieces[name] = math.prod(size for size, placement in sizes if not placement.is_replicate())
            shard = shard.to_local()
        sums[name] = _sum_of_bits(shard)
    total = sum(pieces[name] * checksum for name, checksum in _checksums(sums).items())
    return sum(all_gather_lists([total])) // ranks % (1 << 64)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of the elements. The sums of shards add up to that of the whole tensor."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer).sum(dtype=torch.int64)


def _checksums(sums: dict[str, torch.Tensor]) -> dict[str, int]:
    """The sums of bits, weighted by their names. They are read together: the host waits for a GPU once."""
    numbers = torch.stack([*sums.values()]).tolist() if sums else []
    return {name: zlib.crc32(name.encode()) * number % (1 << 64) for name, number in zip(sums, numbers)}
