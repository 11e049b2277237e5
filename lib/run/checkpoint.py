"""Save, resume, export. A resumed run computes what an uninterrupted one does, bit for bit.

A save copies the state to CPU memory and writes it while training goes on. Weights and optimizer states go through
torch.distributed.checkpoint (DCP), so another number of ranks can load them. Every rank makes the same calls.

- A save writes a new folder with a temporary name, adds a manifest and renames it: if DCP were killed while it writes
  into an existing folder, the folder would load as a mix of old and new.
- A DCP key holds one value, not one per rank, so random states are a file per rank.
- After a forward without backward FSDP's root parameters are whole, and the optimizer's state dict misses them. The
  model's state dict reshards them, so it is taken first.
- A save has a process group of its own, because its collectives could mix with those of training.
- A checkpoint is loaded only if the manifest lists each file and each has its hash. No file can run code: DCP's
  `.metadata` is a pickle, but only DCP's own classes are unpickled.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

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
    all_gather_lists,
    broadcast,
    device_rng_state,
    device_setter,
    enter_stage,
    new_cpu_group,
    set_device_rng_state,
)
from lib.log.disk import free_space
from lib.manifest import MANIFEST, entry, file_hash, why_altered, why_incomplete, write_manifest

Models = dict[str, tuple[Module, Optimizer | None]]
Schedulers = dict[str, LambdaLR]
MAX_SHARD_BYTES = 5 * 10**9  # of a file of an exported model


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
    """Writes `checkpoint_dir/step_000020/`. Then keeps the `keep` newest complete checkpoints (0: all) and that of step
    `best`, and deletes others.

    Returns as soon as the state is copied to CPU memory, and writes it in the background. The future's result is the
    complete folder. Wait for it before the next save and at the end of the run. A kill at any moment leaves the
    previous checkpoints as they were, and at most a `.tmp` folder, which the next save removes.

    Args (rank 0's trainer_state, batches and config are written):
        models: by name ("actor", "critic"), each with its optimizer or None. Save between optimizer steps.
        trainer_state: values that JSON holds exactly (the loader's position, the KL controller).
        batches: by name, rows that the next step needs, the same on all ranks.
        config: a resume compares its own config with this one (lib/run/run_config.py).

    Raises:
        InputError: a scheduler's state or `trainer_state` would come back from JSON as something else.
        InputError (from the future, on every rank): a rank could not write (the disk is full), the ranks do not see the
            same folder, or DataProto.save_to_disk cannot write a batch. The unfinished folder is removed.
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
    trainer_json = _exact_json(trainer)  # before anything is written
    group = _background_group(dist.group.WORLD)
    pinned = any(next(module.parameters()).device.type != "cpu" for module, _ in models.values())
    state = (_pinned_stager() if pinned else DefaultStager(NOT_PINNED)).stage(_state_to_save(models))  # a copy
    rng_state = _rng_state()
    hashes: dict[str, str] = {}  # of the shards' files
    batches = {name: batch[np.arange(len(batch))] for name, batch in (batches or {}).items() if rank == 0}

    def make_folder() -> None:
        if rank == 0:
            final.parent.mkdir(parents=True, exist_ok=True)
            for leftover in final.parent.glob("step_*.tmp"):
                _remove(leftover)
            tmp.mkdir()

    def write_own() -> None:
        tmp.mkdir(parents=True, exist_ok=True)  # if the disk is not shared; `seal` then reports that
        torch.save(rng_state, tmp / f"rng_{rank:05d}.pt")
        _fsync(tmp / f"rng_{rank:05d}.pt")

    def write_shards() -> None:
        dcp.save(state, checkpoint_id=tmp, process_group=group, no_dist=world_size == 1)
        hashes.update((file.name, file_hash(file)) for file in tmp.glob(f"__{rank}_*"))

    def seal() -> None:
        if rank == 0:
            if unseen := [r for r in range(world_size) if not (tmp / f"rng_{r:05d}.pt").exists()]:
                raise InputError(f"rank 0 does not see the files of ranks {unseen}; use a shared folder")
            for name, batch in batches.items():
                batch.save_to_disk(tmp / f"batch_{name}.safetensors")
            (tmp / "trainer.json").write_text(trainer_json)
            if config:
                private(tmp / "config.json").write_text(json.dumps(config, indent=1) + "\n")
            write_manifest(tmp, {file.name: entry(file, hashes.get(file.name)) for file in sorted(tmp.iterdir())})
            publish(tmp, final)
            _rotate(final, keep, best)

    def write() -> Path:
        for stage in (make_folder, write_own, write_shards, seal):
            if failure := _first_failure(stage, group):
                if rank == 0:
                    shutil.rmtree(tmp, ignore_errors=True)
                raise InputError(f"{final}: not saved, earlier checkpoints are intact: {failure} ({free_space(final)})")
            if stage is write_shards:  # each rank has hashed its own files
                for of_rank in _gathered(dict(hashes), group):
                    hashes.update(of_rank)
        return final

    writer = ThreadPoolExecutor(1, "checkpoint", initializer=device_setter())
    saving = writer.submit(write)
    writer.shutdown(wait=False)
    return saving


NOT_PINNED = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


def _pinned_stager() -> DefaultStager:
    """Copies from a GPU into pinned memory are several times faster."""
    return DefaultStager(replace(NOT_PINNED, use_pinned_memory=True, use_non_blocking_copy=True))


if torch.__version__ >= "2.13":  # in torch 2.11 a stager copies once
    _pinned_stager = cache(_pinned_stager)  # it is kept, since pinning takes longer than the copy


def newest_complete(checkpoint_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step; None if there is none. Prints why it passes over a torn one."""
    for folder in reversed(step_folders(checkpoint_dir)):
        if not (torn := why_torn(folder)):
            return folder
        print(f"checkpoint: {folder} is torn ({torn}), looking for an older one", flush=True)
    return None


def load_checkpoint(path: str | Path, *, models: Models, schedulers: Schedulers) -> dict[str, Any]:
    """Loads weights, optimizers and schedules in place, restores this rank's random states, returns `trainer_state`.

    The optimizers' settings (learning rates, betas, weight decays) and the schedules' base rates stay the caller's. If
    the number of ranks has changed since the save, random states are not restored, and rank 0 says so.

    Raises InputError if the checkpoint is torn or altered, or its models or schedules are not the caller's.
    """
    path, rank, world_size = Path(path), dist.get_rank(), dist.get_world_size()
    if torn := broadcast(why_torn(path) if rank == 0 else None):
        raise InputError(f"{path}: not a complete checkpoint ({torn}); give another one")
    trainer = json.loads((path / "trainer.json").read_text())
    ours, theirs = _names(models, schedulers), trainer["names"]
    if ours != theirs:
        raise InputError(f"{path}: holds {theirs}, this run {ours}; resume with the script and flags that saved it")

    state: dict[str, Any] = {}
    reader = CheckpointReader(path)
    saved_keys = reader.read_metadata().state_dict_metadata.keys()
    for name, (module, optimizer) in models.items():
        state[name] = {"model": _model_state(module)}
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()  # without gradients and state, DCP makes the full state to load into
            template: dict[str, Any] = dcp_state.get_optimizer_state_dict(module, optimizer)
            template["state"] = {  # without the parameters that had no gradient before the save
                param: values
                for param, values in template["state"].items()
                if any(f"{name}.optim.state.{param}.{key}" in saved_keys for key in values)
            }
            state[name]["optim"] = template
    dcp.load(state, storage_reader=reader, no_dist=world_size == 1)
    may_lack = dcp_state.StateDictOptions(strict=False)  # lacks frozen weights, states without gradient
    for name, (module, optimizer) in models.items():
        dcp_state.set_model_state_dict(module, state[name]["model"], options=may_lack)
        if optimizer is not None:
            settings = [{key: g[key] for key in g if key != "params"} for g in optimizer.param_groups]
            dcp_state.set_optimizer_state_dict(module, optimizer, state[name]["optim"], options=may_lack)
            for group, own in zip(optimizer.param_groups, settings):
                group.update(own)
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
    """The `batches` of save_checkpoint, on the CPU. Call it after load_checkpoint, which refuses a torn folder."""
    files = {file.stem.removeprefix("batch_"): file for file in Path(path).glob("batch_*.safetensors")}
    return {name: DataProto.load_from_disk(file) for name, file in files.items()}


@cache
def _background_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group for saves, made once for each default group (`world`)."""
    return new_cpu_group()


def _first_failure(stage: Callable[[], None], group: dist.ProcessGroup) -> str | None:
    """Runs `stage`. Returns on all ranks why it failed on the first rank where it did, or None. A collective."""
    own = None
    try:
        stage()
    except dcp.api.CheckpointException as error:  # a BaseException; raised on all ranks, about all
        rank, (cause, _) = min(error.failures.items())
        own = f"rank {rank}: {str(cause).splitlines()[0]}"
    except (OSError, RuntimeError, SafetensorError, InputError) as error:  # RuntimeError: torch.save, disk full
        own = f"rank {dist.get_rank()}: {str(error).splitlines()[0]}"
    return next(filter(None, _gathered(own, group)), None)


def _gathered(value: Any, group: dist.ProcessGroup) -> list:
    """The value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


# ---- state ---------------------------------------------------------------------------------------


def _names(models: Models, schedulers: Schedulers) -> dict[str, list[str]]:
    optimizers = [name for name, (_, optimizer) in models.items() if optimizer is not None]
    return {"models": sorted(models), "optimizers": sorted(optimizers), "schedules": sorted(schedulers)}


def _model_state(module: Module) -> dict[str, Any]:
    """The weights without frozen ones (LoRA): a resumed run reads those again from the start model."""
    state = dcp_state.get_model_state_dict(module)
    named = module.named_parameters(remove_duplicate=False)  # tied weights under both names
    frozen = {name for name, param in named if not param.requires_grad}
    return {name: value for name, value in state.items() if name not in frozen}


def _state_to_save(models: Models) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, (module, optimizer) in models.items():
        state[name] = {"model": _model_state(module)}
        if optimizer is not None:
            stepped = bool(optimizer.state)
            state[name]["optim"] = dcp_state.get_optimizer_state_dict(module, optimizer)
            if not stepped:  # DCP has just stepped with learning rate 0, and Adam's step count would stay 1 too high
                optimizer.state.clear()
                state[name]["optim"]["state"] = {}
    return state


def _rng_state() -> dict[str, Any]:
    """This rank's random states, as tensors and numbers: such a file loads with weights_only=True."""
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


def check_state(states: Mapping[str, Mapping[str, Any]], batches: Mapping[str, DataProto]) -> None:
    """Raises InputError, on all ranks, for what a script keeps and would not get back: values that JSON changes, and
    those that differ between ranks, because rank 0's are saved. states: by name, each from a state_dict(). A
    collective."""
    kept = {f"stateful[{name!r}]: {key}": value for name, state in states.items() for key, value in state.items()}
    kept |= {f"batches[{name!r}]": rows for name, rows in batches.items()}
    found = {what: inexact(value, what) or _digest(value) for what, value in kept.items()}
    ranks = all_gather_lists([found])
    for what in dict.fromkeys(what for of_rank in ranks for what in of_rank):
        of_ranks = [of_rank.get(what) for of_rank in ranks]
        if why := next((text for text in of_ranks if text and text.startswith(what)), None):
            raise InputError(why)
        if other := [str(rank) for rank, digest in enumerate(of_ranks) if digest != of_ranks[0]]:
            why = f"{what} is another on rank {', '.join(other)} than on rank 0, whose state is saved"
            raise InputError(f"{why}: keep the same on all ranks (sum or gather over ranks)")


def inexact(value: Any, where: str) -> str | None:
    """Why the value, which is at `where`, would come back from JSON as something else; None if it would not."""
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        if kinds := sorted({type(key).__name__ for key in value if not isinstance(key, str)}):
            return f"{where} has {kinds[0]} keys; JSON needs text"
        inner = ((f"{where}.{key}", part) for key, part in value.items())
    elif isinstance(value, list):
        inner = ((f"{where}[{i}]", part) for i, part in enumerate(value))
    elif not isinstance(value, str | int | float | None | DataProto):
        return f"{where} is a {type(value).__name__}; JSON needs numbers, text, lists and dicts"
    elif value != value:
        return f"{where} is nan, which equals nothing after a resume"
    return next(filter(None, (inexact(part, there) for there, part in inner)), None)


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(value, DataProto):
        for name, rows in sorted(value.batch.items() if value.batch is not None else ()):
            digest.update(f"{name} {rows.dtype} {[*rows.shape]}".encode())
            digest.update(rows.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        value = {name: [x for x in rows if isinstance(x, str | int)] for name, rows in value.non_tensor_batch.items()}
    digest.update(json.dumps(value, sort_keys=True).encode())
    return digest.hexdigest()


def _exact_json(trainer: dict[str, Any]) -> str:
    for part in ("schedulers", "trainer_state"):
        if why := inexact(trainer[part], part):
            raise InputError(f"checkpoint: {why}")
    return json.dumps(trainer, indent=1)


class CheckpointReader(dcp.FileSystemReader):
    """DCP's own reader, but for the metadata, from which that one would unpickle anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.metadata.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    CLASSES: ClassVar = {
        "torch.distributed.checkpoint.metadata": {
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
        "pathlib": {"PosixPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.CLASSES.get(module, ()):
            raise InputError(f"the checkpoint's .metadata names {module}.{name}, no class of DCP: it is not loaded")
        return super().find_class(module, name)


# ---- folders -------------------------------------------------------------------------------------


def step_folders(checkpoint_dir: Path) -> list[Path]:
    """step_000010, step_000020, ..., in the order of steps, without .tmp folders."""
    steps = {p: p.name.removeprefix("step_") for p in checkpoint_dir.glob("step_*")}
    return sorted((p for p in steps if steps[p].isdecimal()), key=lambda p: int(steps[p]))


def why_torn(folder: Path) -> str | None:
    """Why the checkpoint is not what was saved: no manifest, a file that it does not list, or a file is missing or has
    another size or hash. Reads all its files, but only once in a process."""
    return _why_incomplete(folder) or _why_altered(folder, (folder / MANIFEST).stat().st_mtime_ns)


def _why_incomplete(folder: Path) -> str | None:
    """The part of why_torn that does not read the files."""
    return why_incomplete(folder, needed=("trainer.json", ".metadata"))


@cache
def _why_altered(folder: Path, saved: int) -> str | None:
    return why_altered(folder)


def saved_step(checkpoint: Path) -> int:
    """The step of a complete checkpoint. Raises InputError if the folder's name says another one."""
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
    """Deletes all checkpoints, torn ones too, that are older than the `keep` newest complete ones up to `newest`, but
    that of step `best`."""
    if keep <= 0:
        return
    folders = step_folders(newest.parent)
    older = folders[: folders.index(newest)]
    kept = [folder for folder in reversed(older) if _why_incomplete(folder) is None][: keep - 1]
    kept += [folder for folder in older if int(folder.name.removeprefix("step_")) == best]
    for folder in older:
        if folder not in kept:  # renamed first, since a kill during rmtree must not leave half a checkpoint
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
