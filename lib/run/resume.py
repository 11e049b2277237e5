"""Where a run goes on: the checkpoint of --resume; what the logs have of later steps is removed."""

import shutil
from pathlib import Path

from lib import InputError
from lib.log.rollouts import rollout_files
from lib.log.tracking import read_rows
from lib.run.checkpoint import newest_complete, step_folders, why_torn
from lib.run.run_config import read_json


def find_checkpoint(resume: str, folder: Path, val_only: bool = False) -> Path | None:
    """The checkpoint of `--resume`: none ("never"), the newest complete one ("auto"), or a folder.

    A run that started from another run's checkpoint has that one until it has its own. Raises InputError if there
    is none, or if steps would be overwritten: a run goes on from its newest checkpoint only."""
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
        advice = "--resume auto continues it, another --run-name starts a new one"
        raise InputError(f"{folder} already contains a run: {advice}")
    return checkpoint


def _newest(folder: Path) -> Path | None:
    checkpoints = folder / "checkpoints"
    newest = newest_complete(checkpoints)
    if newest is None and step_folders(checkpoints):
        advice = "give --resume another one, or another --run-name to start from scratch"
        raise InputError(f"--resume auto: none of the checkpoints in {checkpoints} can be loaded; {advice}")
    return newest or _origin(folder)


def _origin(folder: Path) -> Path | None:
    """The other run's checkpoint from which this run started, if any."""
    history = (read_json(folder / "config.json") or {}).get("history", [])
    others = [Path(start["from"]) for start in history if start["from"] and "/" in start["from"]]
    if not others:
        return None
    if why := why_torn(others[-1]):
        what = f"{others[-1]}, which is no longer a complete checkpoint ({why})"
        raise InputError(f"{folder} continues from {what}")
    return others[-1]


def own_path(checkpoint: Path, folder: Path) -> Path | None:
    """Where the run has this checkpoint, perhaps as a link to another disk; None if it is another run's."""
    own = (path for path in step_folders(folder / "checkpoints") if path.exists())
    return next((path for path in own if path.samefile(checkpoint)), None)


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
            gone.append(f"{number} row{'s' * (number > 1)} of {name}")
    if samples := rollout_files(folder, after=step):
        gone.append(f"{len(samples)} file{'s' * (len(samples) > 1)} of rollouts")
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
