"""Writes a run's checkpoint as a Hugging Face model, for from_pretrained, vLLM and peft. It needs no GPU and no ranks.

    python -m tools.export runs/NAME --step 40

Checkpoint and start model are read a layer at a time, whatever number of ranks saved the checkpoint. Memory: the
weights of one file (5 GB) and of one layer. Files are those that the run itself would have exported after that step.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed.checkpoint as dcp
import tyro
from safetensors import SafetensorError
from transformers import PreTrainedModel

from lib import InputError
from lib.cli.flags import as_flag
from lib.cli.process import command_line
from lib.data.chat_template import set_chat_template
from lib.distributed import merged_weight, saved_buffers
from lib.log.disk import free_space
from lib.model import add_lora, load_model, load_processor, load_tokenizer
from lib.run import checkpoint as checkpoints
from lib.run.export import layers, write_adapter, write_model
from lib.run.run_config import digest_of, read_json

ACTOR = "actor.model."  # what the names of the policy's weights begin with in a checkpoint
ONE_OF = tyro.conf.create_mutex_group(required=False)


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]
    """folder of the run, such as runs/NAME"""
    step: int | Literal["newest", "best"] = "newest"
    """step of the checkpoint; best: that of --keep-best"""
    merged: Annotated[bool, ONE_OF, tyro.conf.FlagCreatePairsOff] = False
    """of a run with LoRA: the whole model, with the adapters merged into its weights (the default)"""
    adapter: Annotated[bool, ONE_OF, tyro.conf.FlagCreatePairsOff] = False
    """of a run with LoRA: only the adapter, in peft's format"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of the weights; auto: that of the run's own export, and of an adapter as it was trained"""
    output: Path | None = None
    """folder to write, which must not exist; by default RUN/export/step_000040, or step_000040-adapter"""


def main(args: Args) -> None:
    source = find_checkpoint(args.run, args.step)
    config = read_json(source / "config.json")
    if config is None:
        raise InputError(f"{source} has no config.json, so its --model is not known")
    models = json.loads((source / "trainer.json").read_text())["names"]["models"]
    if "actor" not in models:
        raise InputError(f"{source} holds the models {', '.join(models)}, and no actor to export")
    if args.adapter and not config["lora_rank"]:
        raise InputError(f"--adapter: {args.run} trained without --lora-rank, so there is no adapter; drop it")
    for name in config["contents"].keys() & {"model", "chat_template"}:
        if digest_of(config[name]) != config["contents"][name]:
            advice = "put back what the run was started with, and start in the same folder if the path is relative"
            raise InputError(f"{as_flag(name)} {config[name]}: not there, or changed since the run: {advice}")
    output = args.output or args.run / "export" / (source.name + "-adapter" * args.adapter)
    try:
        with new_folder(output) as folder:
            model, dtype = start_model(config, source), export_dtype(args.dtype, config)
            if args.adapter:
                adapter = {name: p.detach() for name, p in model.named_parameters() if ".lora_" in name}
                if args.dtype != "auto":
                    adapter = {name: p.to(dtype) for name, p in adapter.items()}
                write_adapter(folder, model, adapter)
            else:
                write_model(folder, model, weights(model, source, dtype))
                model.generation_config.to_json_file(folder / "generation_config.json")
            trust = {"trust_remote_code": config["trust_remote_code"]}
            processor = load_processor(config["model"], **trust) or load_tokenizer(config["model"], **trust)
            set_chat_template(processor, config.get("chat_template", ""))
            processor.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        reason = f"{error} ({free_space(output)})"
        raise InputError(f"{output}: not exported: {reason}; give another --output") from error
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    print(f"{output}: step {checkpoints.saved_step(source)} of {args.run}, {size / 1e9:.2f} GB", flush=True)


def refuse_existing(output: Path) -> None:
    if os.path.lexists(output):  # a link to nothing, too
        raise InputError(f"{output} exists: delete it, or give another --output")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `output` if the block ends well. Nothing else is overwritten or deleted."""
    refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as aside:
        folder = Path(aside, output.name)
        folder.mkdir()
        yield folder
        refuse_existing(output)
        checkpoints.publish(folder, output)


def find_checkpoint(run: Path, step: int | str) -> Path:
    """The checkpoint's folder. Raises InputError if there is no such checkpoint, or it is not as it was saved."""
    folders = checkpoints.step_folders(run / "checkpoints")
    if not folders:
        raise InputError(f"{run}: no run with checkpoints; give a folder such as runs/NAME")
    found = {int(folder.name.removeprefix("step_")): folder for folder in folders}
    if step in ("newest", "best"):
        source = checkpoints.newest_complete(run / "checkpoints")
        if source is None:
            raise InputError(f"{run}: none of its checkpoints is complete")
        if step == "newest":
            return source
        best = json.loads((source / "trainer.json").read_text())["trainer_state"].get("best")
        if best is None:
            raise InputError(f"--step best: {run} has no best checkpoint: it ran without --keep-best")
        step = best["step"]
    source = found.get(int(step))
    if source is None:
        raise InputError(f"--step {step}: {run} has checkpoints of the steps {', '.join(map(str, found))}")
    if torn := checkpoints.why_torn(source):
        raise InputError(f"{source}: not a complete checkpoint ({torn}); give another --step")
    return source


def export_dtype(name: str, config: dict[str, Any]) -> torch.dtype:
    """auto: the run's --compute-dtype."""
    return getattr(torch, config["effective"]["compute_dtype"] if name == "auto" else name)


def start_model(config: dict[str, Any], source: Path) -> PreTrainedModel:
    """The run's model, with its weights on the meta device, and with the checkpoint's adapters."""
    lora = config["lora_rank"]
    name = config["effective"]["compute_dtype"] if lora else "float32"  # as in ModelFactory.options
    trust = config["trust_remote_code"]
    model = load_model(config["model"], dtype=getattr(torch, name), on_meta=True, trust_remote_code=trust)
    if lora:
        settings = {"alpha": config["lora_alpha"], "target_modules": config["lora_target_modules"]}
        add_lora(model, rank=lora, seed=config["seed"], **settings)
        load_trained(source, {name: p.data for name, p in model.named_parameters() if ".lora_" in name})
    return model


@torch.no_grad()
def weights(model: PreTrainedModel, source: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each weight of the exported model. Those that did not train are read from the start model's files, or are
    in `model`, if these had to be converted."""
    saved = {*checkpoints.CheckpointReader(source).read_metadata().state_dict_metadata}
    folder, start = getattr(model, "weights_folder", ""), dict[str, Any]()
    if folder:
        start = dcp.HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    buffers = saved_buffers(model)
    parameters = [(name, p) for name, p in model.named_parameters() if ".lora_" not in name]
    for layer in layers([*parameters, *buffers.items()]):
        values = {name: torch.empty_like(p, device="cpu") if p.is_meta else p.detach() for name, p in layer}
        load_trained(source, {name: value for name, value in values.items() if f"{ACTOR}{name}" in saved})
        untrained = {n.replace(".base_layer.", "."): v for n, v in values.items() if f"{ACTOR}{n}" not in saved}
        if untrained := {name: value for name, value in untrained.items() if name in start}:
            dcp.load(untrained, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
        for name in values:
            whole, value = merged_weight(model, name, values[name])
            yield whole, value if name in buffers else value.to(dtype)


def load_trained(source: Path, values: dict[str, torch.Tensor]) -> None:
    """Reads the actor's weights from the checkpoint into these tensors."""
    state: dict[str, Any] = {f"{ACTOR}{name}": value for name, value in values.items()}
    if state:
        dcp.load(state, storage_reader=checkpoints.CheckpointReader(source), no_dist=True)


if __name__ == "__main__":
    with command_line():
        main(tyro.cli(Args, prog="python -m tools.export", description=__doc__))
