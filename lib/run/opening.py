"""The start of a run: locks its folder, finds its checkpoint, compares the flags, opens the logs, records what runs."""

import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil

from lib import InputError, distributed, launched_ranks
from lib.args import ScriptArgs, check_model_path
from lib.cli.flags import Names, as_flag, changed_flags, marked
from lib.cli.secrets import private, redact, redact_values
from lib.data import local_copy
from lib.distributed import World, device_names
from lib.log.disk import writes_to
from lib.log.tracking import Tracker
from lib.rollout import Recorder, Replayer, check_recorded
from lib.run import run_config
from lib.run.checkpoint import saved_step
from lib.run.lock import LOCK, take_lock
from lib.run.resume import find_checkpoint, has_steps, own_path
from lib.run.run import RECORDED_BY, Run, write_json
from lib.run.run_config import read_json

MOST_LINES = 40  # of the code's changes, on the screen
MOST_UNTRACKED = 50  # names of files
GIT_S = 30.0


def open_run(args: ScriptArgs, world: World, script: str, effective: Mapping[str, Any] | None = None) -> Run:
    """Opens the run of these flags before a model loads. With val_only it is not changed. A collective.

    script: the script's `__file__`. effective: values of flags that were left to the run, for config.json.

    Raises InputError, on every rank, if another process has the folder, steps would be overwritten, there is no
    such checkpoint, it had other flags, or a tracker is missing or not logged in."""
    models = {"--model": args.model.model, "--critic-model": args.critic_model}
    for flag, path in (models | {"--reward-model": args.reward.reward_model}).items():
        if path:  # a URL is compared by what is there
            check_model_path(local_copy(path), flag)
    name = distributed.broadcast(args.run.run_name or default_name(script, args.run.seed))
    folder = Path(args.run.output_dir) / name
    tracker = Tracker(folder, {}, total_steps=0, enabled=False)
    run = Run(name, folder, args.run, args.validation, world, tracker, args.rollout.mismatch_limit)
    if world.rank == 0 or args.run.profile_steps:
        distributed.on_early_end(run.end_early)

    def open_here() -> tuple[Path | None, int, bool]:
        with writes_to(folder, "the run was not opened"), ExitStack() as locks:  # released if it is refused
            _lock(folder, "--run-name", locks)  # first: another start may change what is there
            if args.run.record:
                _claim_recording(Path(args.run.record), folder, args.run.resume, locks)
            opened = _open(run, args, Path(script), effective or {})
            run.locks = locks.pop_all()
            return opened

    run.checkpoint, run.step, run.new_data = distributed.on_first_rank(open_here)
    if world.rank == 0:
        print(f"run folder: {folder}", flush=True)
    if args.run.record:
        run.recorder = Recorder(Path(args.run.record), world)
    elif args.run.replay:
        run.recorder = Replayer(Path(args.run.replay), world)
    if world.rank == 0 and world.device.type != "cpu" and run.peak_tflops is None:
        device = distributed.device_name(world.device)
        print(f"no MFU: lib/log/metrics.py has no peak of {device}", flush=True)
    distributed.note_waits_in(folder / "waits.txt")
    return run


def default_name(script: str, seed: int) -> str:
    """A name that no other run has: a sweep starts several in the same second, on hosts that share a disk."""
    now = time.strftime("%Y%m%d-%H%M%S")
    return f"{Path(script).stem}-s{seed}-{now}-{secrets.token_hex(4)}"


def _lock(folder: Path, flag: str, locks: ExitStack) -> None:
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = locks.enter_context(take_lock(folder, flag))
    locks.callback(lock.truncate, 0)  # before it is closed
    locks.callback(_remove_unused, made)


def _remove_unused(made: list[Path]) -> None:
    """Removes the folders that a refused start has made: nothing but the lock is in them."""
    if made and [path.name for path in made[0].iterdir()] == [LOCK]:
        (made[0] / LOCK).unlink()
        with suppress(OSError):  # another run has begun beside it
            for path in made:
                path.rmdir()


def _claim_recording(recording: Path, folder: Path, resume: str, locks: ExitStack) -> None:
    """Raises InputError unless the folder is new or empty, or its own run is resumed."""
    others = InputError(f"--record {recording}: the folder contains other files: give a new one")
    if recording.resolve() == folder.resolve():
        raise others
    _lock(recording, "--record", locks)
    by = (read_json(recording / "config.json") or {}).get(RECORDED_BY)
    if by is None and {path.name for path in recording.iterdir()} != {LOCK}:
        raise others
    if by is not None and (by != str(folder.resolve()) or resume == "never"):
        raise InputError(f"--record {recording}: it contains the recording of {by}: give a new folder")


def _open(run: Run, args: ScriptArgs, script: Path, effective: Mapping[str, Any]) -> tuple[Path | None, int, bool]:
    """Rank 0's part of open_run: (checkpoint, its step, whether the training data have changed)."""
    code, val_only = run_config.code_files(args, script), args.validation.val_only
    run.command = typed_command()
    run.config = run_config.describe_run(args, script)
    run.config |= {"effective": dict(effective), "no_effect": list(args.no_effect)}
    overrides = run_config.checked_overrides(args.run.resume_override, run.config)
    checkpoint = find_checkpoint(args.run.resume, run.folder, val_only)
    step, changes, changed = 0, "", {}
    if checkpoint is not None:
        step, changes = saved_step(checkpoint), run_config.code_changes(checkpoint, code)
        if changes:
            first = "\n".join(changes.splitlines()[:MOST_LINES])
            print(f"the code has changed since {checkpoint}:\n{first}", flush=True)
        changed = run_config.compare(checkpoint, run.config, args, overrides)
    if args.run.replay:
        run_config.compare_recording(Path(args.run.replay), run.config, args)
        steps = range(step + 1, args.run.total_steps + 1)
        check_recorded(Path(args.run.replay), steps, run.world.size)

    came_from, new_data = None, bool(changed.keys() & marked(args, Names.ROWS))
    if checkpoint is not None:
        run.own = own_path(checkpoint, run.folder) is not None
        came_from = checkpoint.name if run.own else str(checkpoint.resolve())
        how = ", with training data from the first row" if new_data else ""
        print(f"resumed from {came_from}{how}", flush=True)
        if step >= args.run.total_steps and not val_only:
            left = f"step {step} of {args.run.total_steps}, nothing is left to train"
            print(f"{came_from}: {left}", flush=True)
    elif args.run.resume == "auto":
        print("no checkpoint yet, starting from scratch", flush=True)
    if effective:
        values = [f"{as_flag(name)} {value}" for name, value in effective.items()]
        print(f"in effect: {', '.join(values)}", flush=True)

    logs, title, history = run.folder, run.name, []
    if val_only:
        logs = _next_number(run.folder / "val_only")
        title = f"{run.name}-val_only-{logs.name}"
    elif run.own:
        history = (read_json(run.folder / "config.json") or {}).get("history", [])
    start = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), "from": came_from, "changed": changed}
    starts = _next_number(logs / "starts")
    run.config |= {"history": [*history, start], "start": int(starts.name)}
    run.tracker = Tracker(
        logs,
        run.config,
        name=title,
        trackers=args.run.track,
        total_steps=step if val_only else args.run.total_steps,
        resume_step=step,
        on_gpu=run.world.device.type != "cpu",
    )
    write_start(starts, code, run.command, changed_flags(args, lr=args.default_lr), changes)
    if not has_steps(logs):  # else their config stays until the checkpoint is loaded
        write_json(logs / "config.json", run.config)
    return checkpoint, step, new_data


def _next_number(folder: Path) -> Path:
    numbers = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    return folder / str(max(numbers, default=0) + 1)


def typed_command() -> str:
    if launcher := os.environ.get("PLAINRL_LAUNCHER"):  # tools/launch/one_node.sh, whose torchrun starts `python -u`
        return f"{launcher} {shlex.join(sys.orig_argv[2:])}"
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, or accelerate's launcher
        return shlex.join(psutil.Process(os.getppid()).cmdline())
    return shlex.join(sys.orig_argv)


# ---- what ran -----------------------------------------------------------------------------------


def write_start(
    folder: Path, code: Mapping[str, Path], command: str, flags: Mapping[str, list], changes: str = ""
) -> None:
    """Makes the folder with the code (`code_files`), start.json, diff.patch (the checkout against its commit) and
    changes.patch (`code_changes`). flags: `changed_flags`."""
    folder.mkdir(parents=True)
    for name, path in code.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / name)
    if changes:
        private(folder / "changes.patch").write_text(changes)
    checkout = next(iter(code.values())).parent  # of the script
    commit = _commit(checkout)
    untracked = _git(checkout, "ls-files", "-z", "--others", "--exclude-standard", ":/") if commit else ""
    start = {
        "command": redact(command),
        "flags": redact_values(flags),
        "machine": _machine(),
        "commit": commit,
        "lib_commit": _lib_commit(),  # a copy of a script may be in another repository
        "untracked": (untracked or "").split("\0")[:-1][:MOST_UNTRACKED],
        "python": platform.python_version(),
        # the first on the path is what is imported
        "packages": {package.name: package.version for package in reversed([*distributions()])},
    }
    (folder / "start.json").write_text(json.dumps(start, indent=1, sort_keys=True) + "\n")
    diff = _git(checkout, "diff", "--no-ext-diff", "--binary", "HEAD") if commit else ""
    if diff != "":
        text = f"git diff failed, or took longer than {GIT_S:.0f} s\n" if diff is None else redact(diff)
        private(folder / "diff.patch").write_text(text, errors="surrogateescape")


def _machine() -> str:
    gpus = Counter(device_names())
    parts = [f"{os.cpu_count()} CPU cores", *(f"{number} x {name}" for name, number in gpus.items())]
    if (ranks := launched_ranks()) > 1:
        parts.append(f"{ranks} ranks")
    return f"{platform.node()}: {', '.join(parts)}"


def _commit(folder: Path) -> str | None:
    """None: no git, or not a checkout."""
    found = _git(folder, "rev-parse", "HEAD")
    return found.strip() if found else None


def _lib_commit() -> str | None:
    """The commit of lib/. A wheel has it in a file: its folder may be in another project's checkout."""
    file = Path(__file__).parents[2] / "COMMIT"
    return file.read_text() or None if file.exists() else _commit(file.parent)


def _git(folder: Path, *words: str) -> str | None:
    """What git prints; None if there is no git, it fails, or it takes too long."""
    command = ["git", "-C", str(folder), "-c", "core.quotePath=false", *words]
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape")
