"""Where a run goes on: the checkpoint that --resume asks for, and the logs after it, which are cut off."""

import shutil
from pathlib import Path

from lib import InputError
from lib.log.rollouts import rollout_files
from lib.log.tracking import read_rows
from lib.run.checkpoint import newest_complete, step_folders, why_torn
from lib.run.run_config import read_json


def find_checkpoint(resume: str, folder: Path, val_only: bool = False) -> Path | None:
    """What `--resume` asks for: None ("never"), the newest complete checkpoint ("auto"), or a folder.

    If a run started from another run's checkpoint and has no checkpoint of its own yet, that is the other run's again.

    Raises InputError if there is no such checkpoint, or if steps of the run would be overwritten: training goes on from
    its newest checkpoint only."""
    if resume == "auto":
        return _newest(folder)
    checkpoint = None if resume == "never" else Path(resume)
    if checkpoint is not None:
        if why := why_torn(checkpoint):
            example = "RUN/checkpoints/step_000020"
            raise InputError(f"--resume {resume}: no complete checkpoint ({why}); give one like {example}")
        if own := own_path(checkpoint, folder):
            newest = newest_complete(folder / "checkpoints")
            if newest in (own, None) or val_only:
                return own
            raise InputError(
                f"{folder} has gone on to {newest.name}: --resume auto continues from there, another --run-name "
                f"starts a new run from {own.name}"
            )
    if has_steps(folder):
        raise InputError(f"{folder} already contains a run: --resume auto continues it, another --run-name starts one")
    return checkpoint


def _newest(folder: Path) -> Path | None:
    checkpoints = folder / "checkpoints"
    newest = newest_complete(checkpoints)
    if newest is None and step_folders(checkpoints):
        raise InputError(
            f"--resume auto: none of the checkpoints in {checkpoints} can be loaded; give --resume another "
            "one, or another --run-name to start from scratch"
        )
    return newest or _origin(folder)


def _origin(folder: Path) -> Path | None:
    """The other run's checkpoint from which this run started, if any."""
    history = (read_json(folder / "config.json") or {}).get("history", [])
    others = [Path(start["from"]) for start in history if start["from"] and "/" in start["from"]]
    if not others:
        return None
    if why := why_torn(others[-1]):
        raise InputError(f"{folder} continues from {others[-1]}, which is no longer a complete checkpoint ({why})")
    return others[-1]


def own_path(checkpoint: Path, folder: Path) -> Path | None:
    """Where the run has this checkpoint, which may be a link to another disk; None if it is another run's."""
    own = (path for path in step_folders(folder / "checkpoints") if path.exists() and path.samefile(checkpoint))
    return next(own, None)


def has_steps(folder: Path) -> bool:
    """Whether a run has made a step here; validation before the first is none."""
    rows = read_rows(folder / "metrics.jsonl")
    return bool(step_folders(folder / "checkpoints")) or any(row and row["step"] for row in rows)


def cut_logs(folder: Path, step: int) -> None:
    """Removes what the logs have of steps after `step`, which run again; with step 0, everything.

    A kill in between leaves rows of some later steps, which the next start removes."""
    gone = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        if number := _cut(folder / name, step):
            gone.append(f"{number} rows of {name}")
    if samples := rollout_files(folder, after=step):
        gone.append(f"{len(samples)} files of rollouts")
    for file in samples:
        file.unlink()
    if gone:
        print(f"removed what came after step {step}: {', '.join(gone)}", flush=True)


def _cut(file: Path, step: int) -> int:
    """Removes the rows of later steps and a torn last line. Returns how many."""
    late = [not step or row is None or row["step"] > step for row in read_rows(file)]
    if any(late):
        kept = file.with_suffix(".tmp")
        with file.open("rb") as rows, kept.open("wb") as stays:
            shutil.copymode(file, kept)
            stays.writelines(row for row, is_late in zip(rows, late) if not is_late)
        kept.replace(file)
    return sum(late)
