"""Recording and replaying the inputs of a step. --record writes them; --replay reads them, without
an engine or scorers, and computes the rest anew, to the same bits. Files of DataProto.save_to_disk:

    DIR/config.json                    the flags of the run that recorded
    DIR/step_000003/rank_0_of_2/       step 3, as rank 0 of 2 saw it
        sync_0.safetensors             the metrics of the weight sync
        rollout_0.safetensors          what the engine returned; _1, ... if a step samples again
        scores_0.safetensors           what the scorers answered, for each of these
        reward_model_0.safetensors     the scores of a reward model
        batch.safetensors              the batch just before the update, which no replay reads
        manifest.json                  size and hash of each file; written last
"""

import shutil
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError

from lib import InputError
from lib.data_proto import DataProto
from lib.distributed import World, timed
from lib.manifest import MANIFEST, entry, why_altered, why_incomplete, write_manifest
from lib.rollout.engine import NoRecorder

BATCH = "batch.safetensors"


class _RecordOnDisk(NoRecorder):
    at: Path | None = None  # the folder of this rank's step; None between steps

    def __init__(self, folder: Path, world: World):
        self.folder, self.world = folder, world

    def begin(self, step: int) -> None:
        rank = f"rank_{self.world.rank}_of_{self.world.size}"
        self.step, self.at = step, _step_folder(self.folder, step) / rank
        self.taken: Counter[str] = Counter()

    def next_file(self, name: str) -> Path:
        self.taken[name] += 1
        return self.at / f"{name}_{self.taken[name] - 1}.safetensors"


class Recorder(_RecordOnDisk):
    """Of --record. Writes at once, so that what a step took is on the disk before it trains."""

    def record(self, name: str, produce: Callable[[], DataProto]) -> DataProto:
        taken = produce()
        if self.at is not None:
            self._write(taken, self.next_file(name))
        return taken

    @timed("record")
    def end(self, batch: DataProto) -> None:
        self._write(batch, self.at / BATCH)
        self.at = None

    def _write(self, data: DataProto, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            data.save_to_disk(file)
            if file.name == BATCH:
                written = {path.name: entry(path) for path in file.parent.glob("*.safetensors")}
                write_manifest(file.parent, written, of=_place(file.parent))
        except (OSError, SafetensorError, InputError) as error:  # the last: a column that is no plain data
            what = f"{file.name} of step {self.step} not written"
            raise InputError(f"--record {self.folder}: {what}: {error}") from error


class Replayer(_RecordOnDisk):
    """Of --replay."""

    replays = True

    def begin(self, step: int) -> None:
        """Raises InputError if the step's files are not as they were recorded."""
        super().begin(step)
        self.replaying = True
        if why := why_incomplete(self.at, of=_place(self.at)) or why_altered(self.at, but=[BATCH]):
            raise _damaged(self.folder, step, why)

    def record(self, name: str, produce: Callable[[], DataProto]) -> DataProto:
        if not self.replaying:
            return produce()
        file = self.next_file(name)
        if not file.exists():
            number = self.taken[name]
            why = f"asks for {name} number {number}, and {number - 1} were recorded"
            raise self._other_flags(f"step {self.step} {why}")
        return DataProto.load_from_disk(file).to(self.world.device)

    def rollout(self, prompts: DataProto, produce: Callable[[], DataProto], any_order: bool = False) -> DataProto:
        """Raises InputError for other prompts than recorded, or with any_order other group sizes."""
        batch = super().rollout(prompts, produce)
        asked = _group_sizes if any_order else _asked
        if asked(prompts) != asked(batch):
            raise self._other_flags(f"the prompts of step {self.step} are not those recorded")
        return batch

    def end(self, batch: DataProto) -> None:
        """Raises InputError if the recorded step sampled more: the next would get other prompts."""
        recorded, used = len(list(self.at.glob("rollout_*"))), self.taken["rollout"]
        if used < recorded:
            raise self._other_flags(f"step {self.step} took {used} of its {recorded} rollouts")
        self.at, self.replaying = None, False

    def _other_flags(self, why: str) -> InputError:
        needed = "script, model's tokenizer, data files, --seed, --prompts-per-step, --group-size"
        what = f"what decides which prompts a step samples must be as recorded ({needed})"
        how = f"--config {self.folder}/config.json reads all flags"
        return InputError(f"--replay {self.folder}: {why}: {what}; {how}")


def _asked(rows: DataProto) -> list[tuple[list[int], int]]:
    """Of each prompt its tokens, and a hash of its images."""
    raw_ids = rows.non_tensor_batch["raw_prompt_ids"]
    hashes = rows.batch.get("multi_modal_hash", torch.zeros(len(rows), dtype=torch.long))
    return [(list(ids), own) for ids, own in zip(raw_ids, hashes.tolist())]


def _group_sizes(rows: DataProto) -> list[int]:
    return [len([*group]) for _, group in groupby(rows.non_tensor_batch["uid"])]


def forget_after(folder: Path, step: int) -> None:
    """Deletes what was recorded after `step`, since these steps are done again. Says so."""
    late = [later for later in recorded_steps(folder) if later > step]
    if late:
        what = f"{len(late)} step(s) after step {step} are deleted, to be recorded again"
        print(f"{folder}: {what}", flush=True)
    for later in late:
        shutil.rmtree(_step_folder(folder, later))


def recorded_steps(folder: Path) -> list[int]:
    """The steps of which a rank recorded something. Folders of checkpoints do not count."""
    found = {path.parent for path in folder.glob("step_*/rank_*_of_*")}
    return sorted(int(path.name[5:]) for path in found if path.name[5:].isdecimal())


def check_recorded(folder: Path, steps: range, ranks: int) -> None:
    """Raises InputError unless all of `steps` were recorded on this number of ranks, in files of the right
    sizes."""
    for step in steps:
        of_step = _step_folder(folder, step)
        on = _complete_on(of_step)
        if not on:
            way_out = "start at one that was"
            if step > steps.start:
                way_out = f"--total-steps {step - 1} ends before it"
            raise InputError(f"--replay {folder}: step {step} was not recorded: {way_out}")
        if ranks not in on:
            there = f"was recorded on {on[0]} rank(s), this run has {ranks}"
            raise InputError(f"--replay {folder}: step {step} {there}: start it on {on[0]}")
        for of_rank in sorted(of_step.glob(f"rank_*_of_{ranks}")):
            if why := why_incomplete(of_rank, of=_place(of_rank)):
                raise _damaged(folder, step, f"{of_rank.name}: {why}")


def _damaged(folder: Path, step: int, why: str) -> InputError:
    what = f"step {step} is not as it was recorded ({why})"
    return InputError(f"--replay {folder}: {what}: restore its files, or record it anew")


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def _place(of_rank: Path) -> str:
    """What the manifest of this folder is of: step_000003/rank_0_of_2."""
    return f"{of_rank.parent.name}/{of_rank.name}"


def _complete_on(path: Path) -> list[int]:
    """The numbers of ranks, usually one, of which each has ended the step."""
    folders = [file.parent for file in path.glob(f"rank_*_of_*/{MANIFEST}")]
    ended = Counter(int(folder.name.rpartition("_")[2]) for folder in folders)
    return [size for size, written in sorted(ended.items()) if written == size]
