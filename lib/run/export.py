"""Writes a policy in Hugging Face form: whole weights, or LoRA adapters."""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lib.distributed import full_tensor, iter_full_params, master_of
from lib.log.disk import writes_to
from lib.run.checkpoint import publish

MAX_SHARD_BYTES = 5 * 10**9  # of a file of an exported model


def export_hf(
    model: PreTrainedModel,
    processor: PreTrainedTokenizerBase | ProcessorMixin,
    out_dir: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder for `from_pretrained`: weights in `dtype` (None: the parameters'), configs, processor.

    LoRA adapters are merged into the weights, and written to `out_dir`/adapter for peft. Rank 0 holds the weights
    of one file at a time. A collective. Raises InputError (on rank 0) if it cannot be written."""
    out_dir = Path(out_dir)
    tmp = out_dir.with_name(out_dir.name + ".tmp")
    with writes_to(out_dir, "the model was not exported, checkpoints are as they were"):
        try:
            _export_to(tmp, model, processor, dtype, max_shard_bytes)
        except (OSError, SafetensorError):
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        if dist.get_rank() == 0:
            publish(tmp, out_dir)
    dist.barrier()


def _export_to(tmp: Path, model, processor, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    first, weights = dist.get_rank() == 0, iter_full_params(model, dtype)
    if first:
        write_model(tmp, model, weights, max_shard_bytes)
    else:
        for _ in weights:
            pass
    adapters = [(name, p) for name, p in model.named_parameters() if ".lora_" in name]
    adapter = {name: full_tensor(master_of(model, p).detach()).cpu() for name, p in adapters}
    if first:
        if adapter:
            write_adapter(tmp / "adapter", model, adapter)
        if (own := getattr(model, "generation_config", None)) is not None:
            own.to_json_file(tmp / "generation_config.json")  # save_pretrained may refuse it
        processor.save_pretrained(tmp)


def layers(weights: Iterable[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Groups (name, ...) of neighbouring weights by decoder layer: transformers may convert experts together."""
    # the path of the decoder layer that the weight is in, or else of its module
    for _, layer in groupby(weights, lambda weight: re.match(r".*?\.\d+\.|.*\.|", weight[0])[0]):  # type: ignore[index]
        yield list(layer)


def _shards(weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yields weights by name, some layers at a time, in CPU memory. A dict is emptied when the next is asked for."""
    shard: dict[str, torch.Tensor] = {}
    for layer in layers((name, weight.cpu()) for name, weight in weights):
        size = sum(weight.nbytes for weight in shard.values()) + sum(weight.nbytes for _, weight in layer)
        if shard and size > max_bytes:
            yield shard
            shard.clear()
        shard |= layer
    yield shard


def write_model(
    folder: Path, model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """As save_pretrained of `model` with these weights, but with the weights of one file in memory."""
    shutil.rmtree(folder, ignore_errors=True)
    with torch.device("meta"):  # a model without adapters: its save_pretrained writes all weights
        model = type(model)(deepcopy(model.config))
    files, total_size = list[Path](), 0
    for shard in _shards(weights, max_bytes):
        total_size += sum(weight.nbytes for weight in shard.values())
        if not files:
            model.to(next(iter(shard.values())).dtype)  # goes to the config
        model.save_pretrained(folder, state_dict=shard, max_shard_size=sys.maxsize)
        files.append((folder / "model.safetensors").rename(folder / f"shard_{len(files)}"))
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, file in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file.rename(folder / name), "pt") as written:
            weight_map |= dict.fromkeys(written.keys(), name)
    metadata = {"total_parameters": model.num_parameters(), "total_size": total_size}
    index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(index + "\n")


def write_adapter(folder: Path, model: PreTrainedModel, adapter: dict[str, torch.Tensor]) -> None:
    """Writes the LoRA adapters of `model` in peft's form. adapter: by the names of its parameters."""
    own, model.generation_config = model.generation_config, GenerationConfig()  # it may be refused
    model.save_pretrained(folder, state_dict=adapter)
    model.generation_config = own
