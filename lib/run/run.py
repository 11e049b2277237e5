"""A run: one folder with one writer, one script and one set of flags. Finds the checkpoint to resume from.

    config.json    script, flags, digests of their files, and a history: each start, its checkpoint, what had changed
    .lock          held by rank 0's process as long as it lives
    starts/1/      for each start, the code, what in it changed, git commit and diff, packages, command line, machine
    checkpoints/   step_000020, ...: the state of the run. Each holds the config.json of its time
    rollouts/      training samples (lib/log/rollouts.py)
    images/        small copies of the images in prompts (lib/log/prompt_images.py)
    abandoned/1/   what a rewind or a restart took out: later checkpoints, rows and samples of later steps
    val_only/1/    what --val-only writes
    profile/       what --profile-steps writes
    waits.txt      which rank waited for which (lib/distributed/watchdog.py), if one had to for long
    (--record DIR  what each step took from outside: lib/rollout/replay.py)

A kill at any moment leaves the run at one of its checkpoints. For this, a rewind takes out nothing before its
checkpoint is loaded, then later checkpoints first, from the highest down, and every start cuts off rows after the
checkpoint.
"""

import fcntl
import json
import math
import os
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psutil
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lib import InputError, distributed
from lib.args import RunArgs, ScriptArgs, ValidationArgs, check_model_path
from lib.cli.flags import Names, as_flag, changed_flags, marked
from lib.cli.secrets import private
from lib.data import local_copy
from lib.data_proto import DataProto
from lib.distributed import Metric, World
from lib.log.alerts import DROPPED
from lib.log.disk import writes_to
from lib.log.metrics import merge_metrics
from lib.log.profiling import Profiler
from lib.log.rollouts import kept_rows, rollout_file, rollout_files, taken_out, write_rollouts
from lib.log.throughput import peak_tflops, throughput_metrics
from lib.log.tracking import Tracker, read_rows
from lib.model import TrainedModel
from lib.rollout import NoRecorder, Recorder, Replayer, check_mismatch, check_recorded, forget_after
from lib.run import checkpoint as checkpoints
from lib.run import run_config
from lib.run.goals import Goals
from lib.run.provenance import write_start
from lib.run.run_config import read_json

PATIENCE_S = 5  # how long to wait for the lock of a process on this host that is about to end
LEASE_S = 120  # the same for another host: a file server gives up a dead client's locks after 90 s
LOCK = ".lock"
MOST_LINES = 40  # of the code's changes, on the screen
RECORDED_BY = "recorded_by"  # the key in a recording's config.json of the folder of its run

Models = Mapping[str, TrainedModel]
Batches = dict[str, DataProto]


@dataclass
class Run:
    """A run that this process has opened (see open_run)."""

    name: str
    folder: Path
    args: RunArgs
    validation: ValidationArgs
    world: World
    tracker: Tracker
    max_mismatch: float = math.inf  # nats of k3
    checkpoint: Path | None = None  # the one that is resumed from
    step: int = 0  # of the checkpoint
    own: bool = False  # whether the checkpoint is this run's, not another's (only on rank 0)
    new_data: bool = False  # whether --resume-override allowed other training data than the checkpoint's
    config: dict[str, Any] = field(default_factory=dict)  # what config.json holds (only on rank 0)
    locks: ExitStack = field(default_factory=ExitStack)  # of the folders that this run writes to (only on rank 0)
    recorder: NoRecorder = field(default_factory=NoRecorder)  # of what steps take from outside
    last_step: int = field(init=False)  # --total-steps, or the step in which --stop-when held
    best: dict[str, Any] | None = None  # of --keep-best: metric, step, value, lower_bound
    _saving: Future | None = None
    _writing: Future | None = None
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rollouts"))
    _profiler: Profiler = field(init=False)
    _peak_tflops: float | None = field(init=False)

    def __post_init__(self):
        self.last_step, self._goals = self.args.total_steps, Goals(self.args)
        self._profiler = Profiler(self.folder / "profile", self.args.profile_steps, self.world)
        self._peak_tflops = peak_tflops(self.world.device)

    def load(self, models: Models, stateful: Mapping[str, Any]) -> Batches:
        """Loads the checkpoint, if there is one, into models and stateful objects. Returns its `batches`. Then sets
        aside what the run does again: a checkpoint that cannot be loaded leaves all as it is. A collective.

        stateful: objects with state_dict() and load_state_dict(), of plain numbers and DataProtos equal on all ranks.
        """
        batches: Batches = {}
        state: dict[str, Any] = {}
        if self.checkpoint is not None:
            state = checkpoints.load_checkpoint(self.checkpoint, **_of_checkpoint(models))
            batches = checkpoints.load_batches(self.checkpoint)
            for place in [place for place in batches if "." in place]:
                name, _, key = place.partition(".")
                state[name][key] = batches.pop(place)
            if self.new_data:
                started = {key: value for key, value in state["loader"].items() if key == "last_started"}
                state["loader"] = started | {"position": 0}
            for name, part in _with_loss_scales(stateful, models).items():
                part.load_state_dict(state[name])
        self.best = distributed.on_first_rank(lambda: self._begin(state.get("best")))
        return batches

    def _begin(self, best: dict[str, Any] | None) -> dict[str, Any] | None:
        """Rank 0's part of load: nothing can be refused any more. best: the checkpoint's; returned if it is here."""
        with writes_to(self.folder, "the run was not opened"):
            if not self.validation.val_only:
                set_aside(self.folder, self.step if self.own else 0)
            _write_json(self.tracker.run_dir / "config.json", self.config)
            if self.args.record:
                recording = Path(self.args.record)
                forget_after(recording, self.step)
                _write_json(recording / "config.json", self.config | {RECORDED_BY: str(self.folder.resolve())})
            self.tracker.reread(self.step)
        if best is None or best["metric"] != self.args.keep_best:
            return None
        if not self.own or checkpoints.why_torn(self._best_folder(best)):
            print(f"--keep-best: step {best['step']}, the best so far, is not in this run: it begins anew", flush=True)
            return None
        return best

    def steps(self) -> Iterator[int]:
        """The steps that are left; the first of a run is 1."""
        if self.validation.val_only:
            return
        step = self.step
        self._stop_if_reached(step)  # by the start model, or by the run that is resumed
        distributed.on_first_rank(lambda: self._goals.better(self.best, step, self._metrics_of(step)))  # a wrong name?
        while step < self.last_step:
            step += 1
            distributed.start_step(step)
            self.recorder.begin(step)
            self._profiler.start(step)
            yield step

    def record(self, batch: DataProto) -> None:
        """With --record, keeps the batch as it is before the update."""
        self.recorder.end(batch)

    def log(self, step: int, metrics: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
        """Reduces a step's metrics over the ranks, adds its times, writes and returns them. A collective. Raises
        InputError for a name that two of the dicts have."""
        timing = distributed.step_timing()
        if self._profiler.stop():
            timing["perf/profiled"] = 1.0
        reduced = distributed.reduce_metrics(merge_metrics([*metrics, timing]))
        ways = ("training/rows_trained", "training/rows_left_over")
        gone = sum(rows for name, rows in reduced.items() if name in ways or name.startswith(DROPPED))
        assert reduced["training/rows_in"] == gone, "rows were lost on the way"
        reduced = merge_metrics([reduced, throughput_metrics(reduced, self.world.size, self._peak_tflops)])
        self.tracker.log(reduced, step)
        if "rollout/k3" in reduced:
            mismatch = reduced["rollout/k3"], self.max_mismatch, f"in step {step}"
            distributed.on_first_rank(lambda: check_mismatch(*mismatch))
        self._stop_if_reached(step)
        return reduced

    def validates(self, step: int) -> bool:
        """True if validation is due after this step, or before the first one."""
        if not self.validation.enabled:
            return False
        if step == self.step:
            return self.validation.val_only or (self.validation.val_before_train and step == 0)
        return self._is_due(self.validation.val_every, step)

    def save(self, step: int, models: Models, stateful: Mapping[str, Any], batches: Batches | None = None) -> None:
        """Saves a checkpoint if one is due, or if this is the best of --keep-best. Training goes on while it is
        written; the next save raises what went wrong. The samples of its steps are on the disk before it is. A
        collective. In the first step and at each save, it raises InputError for state that a resume would not get back.

        batches: rows that the next step needs, the same on all ranks."""
        self._stop_if_reached(step)
        is_due = self._is_better(step) or self._is_due(self.args.save_every, step)
        if not is_due and step != self.step + 1:
            return
        batches, found = dict(batches or {}), _states(_with_loss_scales(stateful, models), batches or ())
        checkpoints.check_state(found, batches)
        if not is_due:
            return
        self._wait_for_writers()
        states: dict[str, Any] = {"step": step, "best": self.best}
        for name, state in found.items():
            rows = {key: value for key, value in state.items() if isinstance(value, DataProto)}
            batches |= {f"{name}.{key}": value for key, value in rows.items()}
            states[name] = {key: value for key, value in state.items() if key not in rows}
        self._saving = checkpoints.save_checkpoint(
            self.folder / "checkpoints",
            step,
            trainer_state=states,
            batches=batches,
            keep=self.args.keep_checkpoints,
            best=self.best["step"] if self.best else None,
            config=self.config,
            **_of_checkpoint(models),
        )

    def save_rollouts(self, step: int, batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> None:
        """Keeps --save-rollouts groups of the step that was trained. Training goes on while they are written; the next
        call raises what went wrong."""
        if self._writing is not None:
            self._writing.result()
        if rows := kept_rows(batch.non_tensor_batch["uid"], self.args.save_rollouts, self.world):
            file, kept = rollout_file(self.folder, step, self.world.rank), taken_out(batch, rows)
            self.tracker.training_samples(kept, tokenizer, step)
            self._writing = self._writer.submit(write_rollouts, file, step, kept, tokenizer)

    def export(self, actor: TrainedModel, processor: PreTrainedTokenizerBase | ProcessorMixin) -> None:
        """With --export-model, writes the policy in Hugging Face form to the run's folder. A collective."""
        if self.args.export_model and not self.validation.val_only:
            self._wait_for_writers()  # the last checkpoint is on the disk, whatever happens to the export
            checkpoints.export_hf(actor.module, processor, self.folder / "model", actor.forward.compute_dtype)

    def close(self) -> None:
        """Ends the run: waits for what is being written, closes the logs, unlocks the folder."""
        self._wait_for_writers()
        self.tracker.report(of_training=not self.validation.val_only)
        if self.best and self.world.rank == 0:
            bound = "{metric} {value:.3f}, lower bound {lower_bound:.3f}".format(**self.best)
            print(f"best checkpoint: {self._best_folder(self.best)} ({bound})", flush=True)
        if self.world.rank == 0 and not self.validation.val_only:
            self._print_next_commands()
        self.tracker.close()
        distributed.on_early_end(None)
        self.locks.close()

    def _print_next_commands(self) -> None:
        if saved := checkpoints.step_folders(self.folder / "checkpoints"):
            step = int(saved[-1].name.removeprefix("step_"))
            print(
                f"a checkpoint as a model: python -m tools.export {shlex.quote(str(self.folder))} --step {step}",
                flush=True,
            )
            if self.config.get("lr_schedule") == "constant":  # another would have ended with the last step
                print(f"more steps: {typed_command(self.name, 2 * self.last_step)[0]}", flush=True)

    def _wait_for_writers(self) -> None:
        for writing in (self._saving, self._writing):
            if writing is not None:
                writing.result()

    def _is_due(self, every: int, step: int) -> bool:
        return every > 0 and (step == self.last_step or step % every == 0)

    def _stop_if_reached(self, step: int) -> None:
        """Makes this step the last if --stop-when holds for its metrics. A collective."""
        if not self.args.stop_when or step == self.last_step:
            return
        value = distributed.on_first_rank(lambda: self._goals.reached(self._metrics_of(step)))
        if value is not None:
            self.last_step = step
            if self.world.rank == 0:
                print(f"--stop-when {self.args.stop_when!r}: it is {value:g} after step {step}, the last", flush=True)

    def _is_better(self, step: int) -> bool:
        """Whether the step's validation is the best of --keep-best so far, which it then becomes. A collective."""
        if not self.args.keep_best:
            return False
        better = distributed.on_first_rank(lambda: self._goals.better(self.best, step, self._metrics_of(step)))
        self.best = better or self.best
        return better is not None

    def _metrics_of(self, step: int) -> dict[str, float]:
        """What rank 0 has logged for the step."""
        logged, metrics = self.tracker.latest
        return metrics if logged == step else {}

    def _best_folder(self, best: dict[str, Any]) -> Path:
        return self.folder / "checkpoints" / f"step_{best['step']:06d}"

    def _end_early(self, interrupted: bool) -> None:
        with suppress(OSError):  # a full disk may have ended the run
            self._profiler.stop()
        if self._writing is not None:
            wait([self._writing], PATIENCE_S)  # the step that someone will ask about
        if self.world.rank > 0:
            return
        for end in (self.tracker.notes, self.tracker.close):
            with suppress(OSError, InputError):  # a full disk, again; or rows that no run has written end this one
                end()
        if not interrupted:
            return
        where, resume = "", None
        if not self.validation.val_only:
            newest, resume = checkpoints.newest_complete(self.folder / "checkpoints"), self.name
            where = f" after {newest.name}" if newest else " before the first checkpoint"
        command, launcher = typed_command(resume)
        distributed.print_last(f"interrupted{where}; to go on: {command}", launcher)


def _with_loss_scales(stateful: Mapping[str, Any], models: Models) -> dict[str, Any]:
    scales = {f"{name}_loss_scale": model.loss_scale for name, model in models.items()}
    return dict(stateful) | {name: scale for name, scale in scales.items() if scale is not None}


def _states(stateful: Mapping[str, Any], batches: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The state of each object. Raises InputError for what is no such object, and for a name that cannot be saved."""
    for name in (*stateful, *batches):
        if "." in name or name in ("step", "best"):
            raise InputError(f"run.save: {name!r} cannot be the name of a state: give another, without a dot")
    states = {}
    for name, part in stateful.items():
        if missing := [method for method in ("state_dict", "load_state_dict") if not hasattr(part, method)]:
            raise InputError(f"stateful[{name!r}], a {type(part).__name__}, has no {missing[0]}()")
        states[name] = part.state_dict()
        if not isinstance(states[name], dict) or not all(isinstance(key, str) for key in states[name]):
            raise InputError(f"stateful[{name!r}]: state_dict() must return a dict with text as keys")
    return states


def _of_checkpoint(models: Models) -> dict[str, Any]:
    return {
        "models": {name: (model.module, model.optimizer) for name, model in models.items()},
        "schedulers": {name: model.scheduler for name, model in models.items()},
    }


def open_run(args: ScriptArgs, world: World, script: str, effective: Mapping[str, Any] | None = None) -> Run:
    """Locks the run's folder, finds the checkpoint to resume from, opens its logs; before a model loads. A collective.

    `args` are the script's flags; `script` is its `__file__`. With val_only the run itself is not changed.
    effective: the values of flags that were left to the run (setup.effective_settings), for config.json.

    Raises InputError (on every rank) if another process has the folder, the folder holds steps that would be
    overwritten, there is no such checkpoint, it had other flags, or a tracker is missing or not logged in.
    """
    models = {"--model": args.model.model, "--critic-model": args.critic_model}
    for flag, path in (models | {"--reward-model": args.reward.reward_model}).items():
        if path:  # a URL is compared by what is there
            check_model_path(local_copy(path), flag)
    name = distributed.broadcast(args.run.run_name or default_name(script, args.run.seed))
    folder = Path(args.run.output_dir) / name
    tracker = Tracker(folder, {}, total_steps=0, enabled=False)
    run = Run(name, folder, args.run, args.validation, world, tracker, args.rollout.mismatch_limit)
    if world.rank == 0 or args.run.profile_steps:
        distributed.on_early_end(run._end_early)

    def open_here() -> tuple[Path | None, int, bool]:
        with writes_to(folder, "the run was not opened"), ExitStack() as locks:  # a refused start releases its locks
            _hold(folder, locks)  # before anything is looked at, which another start may change
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
    if world.rank == 0 and world.device.type != "cpu" and run._peak_tflops is None:
        print(f"no MFU: lib/log/throughput.py has no peak of {distributed.device_name(world.device)}", flush=True)
    distributed.note_waits_in(folder / "waits.txt")
    return run


def default_name(script: str, seed: int) -> str:
    """A name that no other run has: a sweep starts several in the same second, on several hosts that share a disk."""
    return f"{Path(script).stem}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _open(run: Run, args: ScriptArgs, script: Path, effective: Mapping[str, Any]) -> tuple[Path | None, int, bool]:
    """Rank 0's part of open_run: (checkpoint, its step, whether the training data have changed)."""
    run.config, code = run_config.describe_run(args, script), run_config.code_files(args, script)
    run.config |= {"effective": dict(effective), "no_effect": list(args.no_effect)}
    overrides = run_config.checked_overrides(args.run.resume_override, run.config)
    checkpoint = find_checkpoint(args.run.resume, run.folder)
    step, changes, changed = 0, "", {}
    if checkpoint is not None:
        step, changes = checkpoints.saved_step(checkpoint), run_config.code_changes(checkpoint, code)
        if changes:
            print(f"the code has changed since {checkpoint}:\n{_beginning(changes)}", flush=True)
        changed = run_config.compare(checkpoint, run.config, args, overrides)
    if args.run.replay:
        run_config.compare_recording(Path(args.run.replay), run.config, args)
        check_recorded(Path(args.run.replay), range(step + 1, args.run.total_steps + 1), run.world.size)

    came_from, new_data = None, bool(changed.keys() & marked(args, Names.ROWS))
    if checkpoint is not None:
        run.own = _own_path(checkpoint, run.folder) is not None
        came_from = checkpoint.name if run.own else str(checkpoint.resolve())
        print(f"resumed from {came_from}" + (", with training data from the first row" * new_data), flush=True)
        if step >= args.run.total_steps and not run.validation.val_only:
            print(f"{came_from}: step {step} of {args.run.total_steps}, nothing is left to train", flush=True)
    elif args.run.resume == "auto":
        print("no checkpoint yet, starting from scratch", flush=True)

    logs, title, history = run.folder, run.name, []
    if run.validation.val_only:
        logs = _next_number(run.folder / "val_only")
        logs.mkdir(parents=True)
        title = f"{run.name}-val_only-{logs.name}"
    elif run.own:
        history = (read_json(run.folder / "config.json") or {}).get("history", [])
    start = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), "from": came_from, "changed": changed}
    starts = _next_number(logs / "starts")
    run.config |= {"history": [*history, start], "start": int(starts.name)}
    if effective:
        print(f"in effect: {', '.join(f'{as_flag(name)} {value}' for name, value in effective.items())}", flush=True)
    run.tracker = Tracker(
        logs,
        run.config,
        name=title,
        trackers=args.run.track,
        total_steps=step if run.validation.val_only else args.run.total_steps,
        resume_step=step,
        on_gpu=run.world.device.type != "cpu",
    )
    write_start(starts, code, typed_command()[0], changed_flags(args), changes)
    if not _has_steps(logs):  # else the config of these steps stays until `load` has set aside the later ones
        _write_json(logs / "config.json", run.config)
    return checkpoint, step, new_data


def _beginning(text: str) -> str:
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} lines more"]
    return "\n".join(lines)


def _claim_recording(recording: Path, folder: Path, resume: str, locks: ExitStack) -> None:
    """Raises InputError unless the folder is new or empty, or the run that it was recorded by is resumed."""
    if recording.resolve() == folder.resolve():
        raise InputError(f"--record {recording}: the folder contains other files: give a new one")
    _hold(recording, locks, "--record")
    by = (read_json(recording / "config.json") or {}).get(RECORDED_BY)
    if by is None and not _is_empty(recording):
        raise InputError(f"--record {recording}: the folder contains other files: give a new one")
    if by is not None and (by != str(folder.resolve()) or resume == "never"):
        raise InputError(f"--record {recording}: it contains the recording of {by}: give a new folder")


# ---- one writer ----------------------------------------------------------------------------------


def _hold(folder: Path, locks: ExitStack, flag: str = "--run-name") -> None:
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    locks.callback(_give_back, take_lock(folder, flag), new)


def _give_back(lock: TextIO, new: list[Path]) -> None:
    """Unlocks the folder. If the start was refused, removes the folders that it had made (`new`) and left empty."""
    lock.truncate(0)
    with suppress(OSError):  # someone has moved the folder, a file server keeps a file that is open
        if new and _is_empty(new[0]):
            Path(lock.name).unlink()
            for path in new:
                path.rmdir()
    lock.close()


def _is_empty(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= {LOCK}


def take_lock(folder: Path, flag: str = "--run-name") -> TextIO:
    """Makes the folder if it is missing and locks it. The lock is the open file that it returns.

    It is an fcntl lock: the kernel frees it however the process ends, children do not inherit it, and file servers
    (NFS, Lustre, GPFS) show it to other hosts. Raises InputError (with `flag`, which names the folder) if another
    process has it.
    """
    lock = _lock_file(folder)
    host, started, said, opened = socket.gethostname(), time.monotonic(), False, 1
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_in_place(lock) and opened < 9:  # on some FUSE disks a file's number changes
                lock.close()
                lock, opened = _lock_file(folder), opened + 1
                continue
        except (BlockingIOError, PermissionError) as error:  # another process has the lock
            holder = _holder(lock)
            elsewhere = holder.get("host", host) != host
            if elsewhere and not said:
                print(f"waiting up to {LEASE_S} s for {_who(holder)}, which has {folder}", flush=True)
                said = True
            if time.monotonic() - started < (LEASE_S if elsewhere else PATIENCE_S):
                time.sleep(0.1)
                continue
            raise InputError(
                f"{folder} is in use by {_who(holder)}: end that run first, or give another {flag} "
                f"(if its host is gone for good, delete {lock.name})"
            ) from error
        except OSError as error:
            print(f"{folder}: no file locks here ({error.strerror}), so a second run is not prevented", flush=True)
        break
    left = _holder(lock)
    if left.get("host", host) != host:
        print(f"{folder} was left open by {_who(left)}: make sure that it has ended", flush=True)
    lock.truncate(0)
    json.dump({"pid": os.getpid(), "host": host, "since": time.strftime("%Y-%m-%d %H:%M:%S")}, lock)
    lock.flush()
    os.fsync(lock.fileno())  # for readers on other hosts
    return lock


def _lock_file(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK).open("a+")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); give another folder") from error


def _is_in_place(lock: TextIO) -> bool:
    """False if a start that was refused has removed the folder since the file was opened."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), Path(lock.name).stat())
    return False


def _holder(lock: TextIO) -> dict[str, Any]:
    """Who has the lock, or had it; {} after it was given back."""
    lock.seek(0)
    with suppress(ValueError):  # the file is being written
        return json.load(lock)
    return {}


def _who(holder: dict[str, Any]) -> str:
    return "pid {pid} on {host} since {since}".format(**holder) if holder else "another process"


# ---- where it goes on ----------------------------------------------------------------------------


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """What `--resume` asks for: None ("never"), the newest complete checkpoint ("auto"), or a folder.

    If a run started from another run's checkpoint and has no checkpoint of its own yet, that is the other run's again.

    Raises InputError if there is no such checkpoint, or if the folder has steps and the checkpoint is not its own.
    """
    if resume == "auto":
        newest = checkpoints.newest_complete(folder / "checkpoints")
        if newest is None and (there := checkpoints.step_folders(folder / "checkpoints")):
            raise InputError(
                f"--resume auto: none of the checkpoints in {there[0].parent} can be loaded; give --resume another "
                "one, or another --run-name to start from scratch"
            )
        return newest or _origin(folder)
    checkpoint = None if resume == "never" else Path(resume)
    if checkpoint is not None:
        if why := checkpoints.why_torn(checkpoint):
            example = "RUN/checkpoints/step_000020"
            raise InputError(f"--resume {resume}: no complete checkpoint ({why}); give one like {example}")
        if own := _own_path(checkpoint, folder):
            return own
    if _has_steps(folder):
        raise InputError(
            f"{folder} already contains a run: --resume auto continues it, --resume {folder}/checkpoints/step_... "
            "rewinds it, another --run-name starts a new one"
        )
    return checkpoint


def set_aside(folder: Path, step: int) -> None:
    """Moves everything later than `step` to abandoned/1, abandoned/2, ...; with step 0, everything.

    Later checkpoints go first, from the highest down. So a kill at any moment leaves a run that goes on from one of its
    checkpoints. Rows after the checkpoint do no harm, since every start cuts them off.
    """
    saved = checkpoints.step_folders(folder / "checkpoints")
    later = [path for path in saved if int(path.name.removeprefix("step_")) > step]
    logs = {}  # for each row, whether it is of a later step, or a torn last line
    for name in ("metrics.jsonl", "samples.jsonl"):
        logs[name] = [not step or of is None or of > step for of in _steps(folder / name)]
    for unfinished in (folder / "rollouts").glob("*.tmp"):
        unfinished.unlink()
    rollouts = rollout_files(folder, after=step)
    if not later and not rollouts and not any(map(any, logs.values())):
        return
    aside = _next_number(folder / "abandoned")
    aside.mkdir(parents=True)
    if (folder / "config.json").exists():
        shutil.copy(folder / "config.json", aside)
    taken = []
    for path in [folder / "model", *reversed(later)]:
        if path.exists() and not path.is_symlink():
            path.rename(aside / path.name)
        elif path.is_symlink():  # which may be relative
            (aside / path.name).symlink_to(os.path.realpath(path))
            path.unlink()
        else:
            continue
        taken.append(path.name)
    for name, late in logs.items():
        if any(late):
            _cut(folder / name, late, aside / name)
            taken.append(f"{sum(late)} rows of {name}")
    if rollouts:
        (aside / "rollouts").mkdir()
        for file in rollouts:
            file.rename(aside / "rollouts" / file.name)
        taken.append(f"{len(rollouts)} files of rollouts")
    print(f"set aside in {aside}: {', '.join(taken)}", flush=True)


def _steps(file: Path) -> list[int | None]:
    """The step of each row; None for a torn last line. Raises InputError for a row that no run has written."""
    return [row["step"] if row else None for row in read_rows(file)]


def _cut(file: Path, late: list[bool], aside: Path) -> None:
    """Moves the late rows to `aside`. Only after they are there, a rename replaces the file."""
    kept = file.with_suffix(".tmp")
    with file.open("rb") as rows, kept.open("wb") as stays, aside.open("wb") as goes:
        shutil.copymode(file, kept)
        shutil.copymode(file, aside)
        for row, is_late in zip(rows, late):
            (goes if is_late else stays).write(row)
    kept.replace(file)


def _origin(folder: Path) -> Path | None:
    """The other run's checkpoint from which this run started, if any."""
    history = (read_json(folder / "config.json") or {}).get("history", [])
    origin = next((Path(start["from"]) for start in reversed(history) if start["from"] and "/" in start["from"]), None)
    if origin is not None and (why := checkpoints.why_torn(origin)):
        raise InputError(f"{folder} continues from {origin}, which is no longer a complete checkpoint ({why})")
    return origin


def _has_steps(folder: Path) -> bool:
    return bool(checkpoints.step_folders(folder / "checkpoints")) or any(_steps(folder / "metrics.jsonl"))


def _own_path(checkpoint: Path, folder: Path) -> Path | None:
    """Where the run has this checkpoint, which may be a link to another disk; None if it is another run's."""
    there, target = folder / "checkpoints", os.path.realpath(checkpoint)
    inside = os.path.realpath(checkpoint.parent) == os.path.realpath(there)
    linked = (own for own in checkpoints.step_folders(there) if os.path.realpath(own) == target)
    return next(linked, there / checkpoint.name if inside else None)


def _next_number(folder: Path) -> Path:
    numbers = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    return folder / str(max(numbers, default=0) + 1)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    aside = private(file.with_suffix(".tmp"))
    aside.write_text(json.dumps(value, indent=1) + "\n")
    aside.replace(file)


def typed_command(resume: str | None = None, total_steps: int | None = None) -> tuple[str, int | None]:
    """(the command that was typed to start this process, perhaps with torchrun or accelerate; that launcher's pid).
    resume: a run's name; the command then resumes that run. total_steps: until this step, whatever it says now."""
    launcher: int | None = os.getppid()
    try:
        line = psutil.Process(launcher).cmdline()
    except psutil.Error:
        line = []
    if line[-len(sys.argv) :] != sys.argv:
        line, launcher = sys.orig_argv, None
    start, script, flags = line[: -len(sys.argv)], sys.argv[:1], sys.argv[1:]
    if start[-1:] == ["-m"]:
        script = line[len(start) :][:1]  # the module, of which argv has the file
    if len(start) > 1 and Path(start[1]).name in ("torchrun", "accelerate"):  # [0] is the interpreter of its first line
        start = [Path(start[1]).name, *start[2:]]
    if resume is not None:
        flags = [*_without(flags, {"--run-name", "--resume"}), "--run-name", resume, "--resume", "auto"]
    if total_steps is not None:
        flags = [*_without(flags, {"--total-steps", "--stop-when"}), "--total-steps", str(total_steps)]
    typed = os.environ.get("PLAINRL_LAUNCHER", shlex.join(start))  # launch/one_node.sh executes torchrun
    return f"{typed} {shlex.join([*script, *flags])}", launcher


def _without(flags: list[str], names: set[str]) -> list[str]:
    kept, words = [], iter(flags)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") not in names:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept
