"""Saves and loads checkpoints. A resumed run computes what an uninterrupted one does, bit for bit.

A save copies the state to CPU memory and writes it while training goes on. Weights and optimizer states
go through torch.distributed.checkpoint (DCP), so another number of ranks can load them.

- A save writes a folder with a temporary name, adds a manifest and renames it: DCP, killed while it
  writes into an existing folder, would leave a mix of old and new that loads.
- A DCP key holds one value, not one per rank, so random states are a file per rank.
- After a forward without backward FSDP's root parameters are whole, and the optimizer's state dict
  misses them. The model's state dict reshards them, so it is taken first.
- A save has a process group of its own: its collectives could mix with those of training.
- A checkpoint loads only if its files are those of the manifest, by their hashes. No file can run code:
  DCP's `.metadata` is a pickle, but only DCP's own classes are unpickled.
"""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from safetensors import SafetensorError
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lib import InputError
from lib.cli.secrets import private
from lib.data_proto import DataProto
from lib.distributed import (
    broadcast,
    device_rng_state,
    device_setter,
    enter_stage,
    masters_in_place,
    new_cpu_group,
    refresh_weights,
    set_device_rng_state,
)
from lib.log.disk import free_space
from lib.manifest import MANIFEST, entry, file_hash, why_altered, why_incomplete, write_manifest

Models = dict[str, tuple[Module, Optimizer | None]]
Schedulers = dict[str, LambdaLR]
T = TypeVar("T")
NEEDED = ("trainer.json", ".metadata")  # files of a complete checkpoint


def save_checkpoint(
    checkpoint_dir: str | Path,
    step: int,
    *,
    models: Models,
    schedulers: Schedulers,
    trainer_state: dict,
    keep: int,
    best: int | None = None,
    batches: dict[str, DataProto] | None = None,
    config: dict[str, Any] | None = None,
) -> Future[Path]:
    """Writes `checkpoint_dir/step_000020/`. Then deletes all but the `keep` newest complete checkpoints
    (0: all) and the one of step `best`.

    Returns once the state is copied to CPU memory. The future's result is the complete folder: wait for it
    before the next save and at the end of the run. A kill at any moment leaves earlier checkpoints as they
    were, and at most a `.tmp` folder, which the next save removes.

    Args (rank 0's trainer_state, batches and config are written):
        models: by name ("actor", "critic"), each with its optimizer or None.
        trainer_state: values that JSON holds exactly (lib/run/run.py).
        batches: by name, rows that the next step needs, the same on all ranks.
        config: what a resume compares with its own (lib/run/run_config.py).

    Raises InputError (from the future, on every rank) if a rank could not write or the ranks do not see the
    same folder; the unfinished folder is removed.
    """
    enter_stage(f"step {step} save")
    final = Path(checkpoint_dir) / f"step_{step:06d}"
    tmp = final.with_name(final.name + ".tmp")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    trainer = {
        "step": step,
        "world_size": world_size,
        "names": _names(models, schedulers),
        "schedulers": {name: scheduler.state_dict() for name, scheduler in schedulers.items()},
        "trainer_state": trainer_state,
    }
    trainer_json, config_json = (json.dumps(value, indent=1) for value in (trainer, config))
    group = _background_group(dist.group.WORLD)
    state, rng_state = _copy_to_cpu(models), _rng_state()
    batches = (batches or {}) if rank == 0 else {}
    copies = {name: batch[np.arange(len(batch))] for name, batch in batches.items()}

    def make_folder() -> None:
        if rank == 0:
            final.parent.mkdir(parents=True, exist_ok=True)
            for leftover in final.parent.glob("step_*.tmp"):
                _remove(leftover)
            tmp.mkdir()

    def write_own() -> None:
        tmp.mkdir(parents=True, exist_ok=True)  # on a disk that is not shared; `seal` reports it
        torch.save(rng_state, tmp / f"rng_{rank:05d}.pt")
        _fsync(tmp / f"rng_{rank:05d}.pt")

    def write_shards() -> dict[str, str]:  # a collective, which no rank may miss
        dcp.save(state, checkpoint_id=tmp, process_group=group, no_dist=world_size == 1)
        return {file.name: file_hash(file) for file in tmp.glob(f"__{rank}_*")}

    def seal() -> None:
        if rank == 0:
            if unseen := [r for r in range(world_size) if not (tmp / f"rng_{r:05d}.pt").exists()]:
                raise InputError(f"rank 0 does not see files of ranks {unseen}; use a shared folder")
            for name, batch in copies.items():
                batch.save_to_disk(tmp / f"batch_{name}.safetensors")
            (tmp / "trainer.json").write_text(trainer_json)
            if config:
                private(tmp / "config.json").write_text(config_json + "\n")
            files = sorted(tmp.iterdir())
            write_manifest(tmp, {file.name: entry(file, hashes.get(file.name)) for file in files})
            publish(tmp, final)
            _rotate(final, keep, best)

    hashes: dict[str, str] = {}  # of the shards' files, each by the rank that wrote it

    def write() -> Path:
        try:
            _on_all_ranks(make_folder, group)
            _on_all_ranks(write_own, group)
            for of_rank in _on_all_ranks(write_shards, group):
                hashes.update(of_rank)
            _on_all_ranks(seal, group)
        except InputError as error:
            if rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            intact = "not saved, earlier checkpoints are intact"
            raise InputError(f"{final}: {intact}: {error} ({free_space(final)})") from error
        return final

    writer = ThreadPoolExecutor(1, "checkpoint", initializer=device_setter())
    saving = writer.submit(write)
    writer.shutdown(wait=False)
    return saving


def _copy_to_cpu(models: Models) -> Any:
    """Copies from a GPU go into pinned memory, which is several times faster."""
    on_gpu = any(next(module.parameters()).device.type != "cpu" for module, _ in models.values())
    stager = _kept_stager() if on_gpu and torch.__version__ >= "2.13" else _stager(pinned=on_gpu)
    return stager.stage(_state_to_save(models))


def _stager(pinned: bool) -> DefaultStager:
    synchronous = {"use_shared_memory": False, "use_async_staging": False}
    return DefaultStager(StagingOptions(use_pinned_memory=pinned, use_non_blocking_copy=pinned, **synchronous))


@cache
def _kept_stager() -> DefaultStager:
    """Pinning takes longer than the copy, so the memory is kept. In torch 2.11 a stager copies once."""
    return _stager(pinned=True)


def newest_complete(checkpoint_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step, if any. Prints why it passes over a torn one."""
    for folder in reversed(step_folders(checkpoint_dir)):
        if not (torn := why_torn(folder)):
            return folder
        print(f"checkpoint: {folder} is torn ({torn}), looking for an older one", flush=True)
    return None


def load_checkpoint(path: str | Path, *, models: Models, schedulers: Schedulers) -> dict[str, Any]:
    """Loads weights, optimizers, schedules and this rank's random states. Returns `trainer_state`.

    The optimizers' settings (learning rates, betas, weight decays) and the schedules' base rates stay the
    caller's. If the number of ranks has changed, random states are not restored, and rank 0 says so.

    Raises InputError if the checkpoint is torn or altered, or holds other models or schedules.
    """
    path, rank, world_size = Path(path), dist.get_rank(), dist.get_world_size()
    if torn := broadcast(why_torn(path) if rank == 0 else None):
        raise InputError(f"{path}: not a complete checkpoint ({torn}); give another one")
    trainer = json.loads((path / "trainer.json").read_text())
    ours, theirs = _names(models, schedulers), trainer["names"]
    if ours != theirs:
        advice = "resume with the script and flags that saved it"
        raise InputError(f"{path}: holds {theirs}, this run {ours}; {advice}")

    state: dict[str, Any] = {}
    reader = CheckpointReader(path)
    saved_keys = reader.read_metadata().state_dict_metadata.keys()
    in_place = ExitStack()
    for name, (module, optimizer) in models.items():
        in_place.enter_context(masters_in_place(module))
        state[name] = {"model": _model_state(module)}
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()  # then DCP makes the full state to load into
            template: dict[str, Any] = dcp_state.get_optimizer_state_dict(module, optimizer)
            template["state"] = {  # without the parameters that had no gradient before the save
                param: values
                for param, values in template["state"].items()
                if any(f"{name}.optim.state.{param}.{key}" in saved_keys for key in values)
            }
            state[name]["optim"] = template
    dcp.load(state, storage_reader=reader, no_dist=world_size == 1)
    may_lack = dcp_state.StateDictOptions(strict=False)  # frozen weights, states without gradient
    for name, (module, optimizer) in models.items():
        dcp_state.set_model_state_dict(module, state[name]["model"], options=may_lack)
        if optimizer is not None:
            groups = optimizer.param_groups
            settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            saved = state[name]["optim"]
            dcp_state.set_optimizer_state_dict(module, optimizer, saved, options=may_lack)
            for group, own in zip(optimizer.param_groups, settings):
                group.update(own)
    in_place.close()
    for module, _ in models.values():
        refresh_weights(module)
    for name, scheduler in schedulers.items():
        scheduler.load_state_dict(trainer["schedulers"][name] | {"base_lrs": scheduler.base_lrs})
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        scheduler._last_lr = [base * factor for base, factor in zip(scheduler.base_lrs, factors)]
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr()):
            group["lr"] = rate
    if trainer["world_size"] == world_size:
        _set_rng_state(torch.load(path / f"rng_{rank:05d}.pt", weights_only=True))
    elif rank == 0:
        print(
            f"checkpoint: {path} was saved by {trainer['world_size']} rank(s), this run has {world_size}: "
            "weights and optimizer states are resharded, random states stay as seeded",
            flush=True,
        )
    return trainer["trainer_state"]


def load_batches(path: str | Path) -> dict[str, DataProto]:
    """The `batches` of save_checkpoint, on the CPU. Call load_checkpoint first, which refuses a torn one."""
    files = Path(path).glob("batch_*.safetensors")
    return {file.stem.removeprefix("batch_"): DataProto.load_from_disk(file) for file in files}


@cache
def _background_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group for saves, made once for each default group (`world`)."""
    return new_cpu_group()


def _on_all_ranks(stage: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """The result of `stage` on each rank. Raises InputError on all ranks if it failed on one."""
    result, failure = None, None
    try:
        result = stage()
    except dcp.api.CheckpointException as error:  # a BaseException; raised on all ranks, about all
        rank, (cause, _) = min(error.failures.items())
        failure = f"rank {rank}: {str(cause).splitlines()[0]}"
    except (OSError, RuntimeError, SafetensorError, InputError) as error:  # RuntimeError: torch.save
        failure = f"rank {dist.get_rank()}: {str(error).splitlines()[0]}"
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (result, failure), group=group)
    if failures := [failure for _, failure in of_ranks if failure]:
        raise InputError(failures[0])
    return [result for result, _ in of_ranks]


# ---- state ---------------------------------------------------------------------------------------


def _names(models: Models, schedulers: Schedulers) -> dict[str, list[str]]:
    optimizers = [name for name, (_, optimizer) in models.items() if optimizer is not None]
    return {"models": sorted(models), "optimizers": sorted(optimizers), "schedules": sorted(schedulers)}


def _model_state(module: Module) -> dict[str, Any]:
    """The weights that train: a resumed run reads frozen ones (LoRA) from the start model again."""
    state = dcp_state.get_model_state_dict(module)
    named = module.named_parameters(remove_duplicate=False)  # tied weights under both names
    frozen = {name for name, param in named if not param.requires_grad}
    return {name: value for name, value in state.items() if name not in frozen}


def _state_to_save(models: Models) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, (module, optimizer) in models.items():
        with masters_in_place(module):
            state[name] = {"model": _model_state(module)}
            if optimizer is not None:
                stepped = bool(optimizer.state)
                state[name]["optim"] = dcp_state.get_optimizer_state_dict(module, optimizer)
                if not stepped:  # DCP has just stepped with learning rate 0: undo Adam's step count
                    optimizer.state.clear()
                    state[name]["optim"]["state"] = {}
    return state


def _rng_state() -> dict[str, Any]:
    """This rank's random states, as tensors and numbers, which load with weights_only=True."""
    version, words, gauss = random.getstate()
    _, keys, *position = np.random.get_state()
    return {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (torch.from_numpy(np.asarray(keys, np.int64)), *position),
        "torch": torch.get_rng_state(),
        "device": device_rng_state(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, *position = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(state["torch"])
    set_device_rng_state(state.get("device"))


class CheckpointReader(dcp.FileSystemReader):
    """DCP's own reader, but for the metadata, from which that one would unpickle anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.metadata.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata


DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _MetadataUnpickler(pickle.Unpickler):
    CLASSES: ClassVar = {
        "torch.distributed.checkpoint.metadata": {
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", *DTYPES},
        "pathlib": {"PosixPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.CLASSES.get(module, ()):
            what = f"{module}.{name}, no class of DCP"
            raise InputError(f"the checkpoint's .metadata names {what}: it is not loaded")
        return super().find_class(module, name)


# ---- folders -------------------------------------------------------------------------------------


def step_folders(checkpoint_dir: Path) -> list[Path]:
    """step_000010, step_000020, ..., in the order of steps, without .tmp folders."""
    steps = {p: p.name.removeprefix("step_") for p in checkpoint_dir.glob("step_*")}
    return sorted((p for p in steps if steps[p].isdecimal()), key=lambda p: int(steps[p]))


def why_torn(folder: Path) -> str | None:
    """Why the checkpoint's files are not those of its manifest. Reads them all, once in a process."""
    return why_incomplete(folder, NEEDED) or _why_altered(folder, (folder / MANIFEST).stat().st_mtime_ns)


@cache
def _why_altered(folder: Path, saved: int) -> str | None:
    return why_altered(folder)


def saved_step(checkpoint: Path) -> int:
    """The step of a complete checkpoint. Raises InputError if the folder's name says another."""
    step = json.loads((checkpoint / "trainer.json").read_text())["step"]
    named = checkpoint.name.removeprefix("step_")
    if named.isdecimal() and int(named) != step:
        raise InputError(f"{checkpoint} holds step {step}: rename it to step_{step:06d}, or move it out of the run")
    return step


def publish(tmp: Path, final: Path) -> None:
    """Renames the finished folder `tmp` to `final` once its bytes are on the disk."""
    for file in [*tmp.rglob("*"), tmp]:
        _fsync(file)
    replaced = final.with_name(final.name + ".replaced.tmp") if os.path.lexists(final) else None
    if replaced:
        _remove(replaced)
        final.rename(replaced)
    tmp.rename(final)
    _fsync(final.parent)
    if replaced:
        _remove(replaced)


def _rotate(newest: Path, keep: int, best: int | None) -> None:
    """Deletes checkpoints, torn ones too, older than the `keep` newest complete ones up to `newest`, but
    not the one of step `best`."""
    if keep <= 0:
        return
    folders = step_folders(newest.parent)
    older = folders[: folders.index(newest)]
    kept = [folder for folder in reversed(older) if why_incomplete(folder, NEEDED) is None][: keep - 1]
    kept += [folder for folder in older if int(folder.name.removeprefix("step_")) == best]
    for folder in older:
        if folder not in kept:  # renamed first: a kill must not leave half a checkpoint
            _remove(folder.rename(folder.with_name(folder.name + ".tmp")))


def _remove(folder: Path) -> None:
    """Deletes the folder, if it is there; of a link to a folder on another disk only the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
