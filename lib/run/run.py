"""A run: one folder with one writer, one script and one set of flags.

    config.json    script, flags, digests of their files, and a history: each start, its checkpoint, what had changed
    .lock          held by rank 0's process as long as it lives (lib/run/lock.py)
    starts/1/      for each start, the code, what in it changed, git commit and diff, packages, command line, machine
    checkpoints/   step_000020, ...: the state of the run. Each holds the config.json of its time
    rollouts/      training samples (lib/log/rollouts.py)
    images/        small copies of the images in prompts (lib/log/rollouts.py)
    val_only/1/    what --val-only writes
    profile/       what --profile-steps writes
    waits.txt      which rank waited for which (lib/distributed/watchdog.py), if one had to for long
    (--record DIR  what each step took from outside: lib/rollout/replay.py)

A kill at any moment leaves the run at its newest checkpoint: every start removes the rows of later steps.
"""

import hashlib
import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lib import InputError, distributed
from lib.args import RunArgs, ValidationArgs
from lib.cli.secrets import write_private
from lib.data_proto import DataProto
from lib.distributed import Metric, World, all_gather_lists
from lib.log.alerts import DROPPED
from lib.log.disk import writes_to
from lib.log.metrics import merge_metrics, peak_tflops, throughput_metrics
from lib.log.profiling import Profiler
from lib.log.rollouts import Outputs, add_outputs, kept_rows, rollout_file, taken_out, write_rollouts
from lib.log.tracking import Tracker
from lib.model import TrainedModel
from lib.rollout import NoRecorder, check_mismatch, forget_after
from lib.run import checkpoint as checkpoints
from lib.run.export import export_hf
from lib.run.goals import Goals
from lib.run.resume import cut_logs

WRITER_S = 5  # how long a run that fails waits for the samples of its last step
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
    new_data: bool = False  # whether --resume-override allowed other training data
    config: dict[str, Any] = field(default_factory=dict)  # what config.json holds (only on rank 0)
    command: str = ""  # that was typed (only on rank 0)
    locks: ExitStack = field(default_factory=ExitStack)  # of its folders (only on rank 0)
    recorder: NoRecorder = field(default_factory=NoRecorder)  # of what steps take from outside
    last_step: int = field(init=False)  # --total-steps, or that of --stop-when or --max-seconds
    best: dict[str, Any] | None = None  # of --keep-best: metric, step, value, lower_bound
    _saving: Future | None = None
    _writing: Future | None = None
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rollouts"))

    def __post_init__(self):
        self.last_step, self._goals = self.args.total_steps, Goals(self.args)
        self._profiler = Profiler(self.folder / "profile", self.args.profile_steps, self.world)
        self.peak_tflops = peak_tflops(self.world.device)

    def load(self, models: Models, stateful: Mapping[str, Any]) -> Batches:
        """Loads the checkpoint, if any, into models and stateful objects. Returns its `batches`. A collective.

        Then removes rows of later steps from the logs: a checkpoint that cannot be loaded leaves them.

        stateful: objects with state_dict() and load_state_dict(), of plain numbers and DataProtos, equal on
        all ranks."""
        batches: Batches = {}
        state: dict[str, Any] = {}
        if self.checkpoint is not None:
            state = checkpoints.load_checkpoint(self.checkpoint, **_of_checkpoint(models))
            for host_state in filter(None, [model.host_state for model in models.values()]):
                host_state.offload()
            for name, rows in checkpoints.load_batches(self.checkpoint).items():
                owner, dot, key = name.partition(".")
                (state[owner] if dot else batches)[key or name] = rows
            if self.new_data:
                started = {key: value for key, value in state["loader"].items() if key == "last_started"}
                state["loader"] = started | {"position": 0}
            for name, part in _with_loss_scales(stateful, models).items():
                part.load_state_dict(state[name])
        self.best = distributed.on_first_rank(lambda: self._begin(state.get("best")))
        return batches

    def _begin(self, best: dict[str, Any] | None) -> dict[str, Any] | None:
        """Rank 0's part of load, after which nothing is refused. Returns `best` if its checkpoint is here."""
        with writes_to(self.folder, "the run was not opened"):
            if not self.validation.val_only:
                cut_logs(self.folder, self.step if self.own else 0)
            write_json(self.tracker.run_dir / "config.json", self.config)
            if self.args.record:
                recording = Path(self.args.record)
                forget_after(recording, self.step)
                recorded_by = {RECORDED_BY: str(self.folder.resolve())}
                write_json(recording / "config.json", self.config | recorded_by)
            self.tracker.reread(self.step)
        if best is None or best["metric"] != self.args.keep_best:
            return None
        if not self.own or checkpoints.why_torn(self._best_folder(best)):
            what = f"step {best['step']}, the best so far, is not in this run"
            print(f"--keep-best: {what}: it begins anew", flush=True)
            return None
        return best

    def steps(self) -> Iterator[int]:
        """The steps that are left; the first of a run is 1."""
        if self.validation.val_only:
            return
        step = self.step
        self._stop_if_reached(step)  # by the start model, or by the run that is resumed
        if self.args.keep_best:
            self._new_best(step)  # raises InputError if it names no metric
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
        """Reduces a step's metrics over the ranks, adds its times, writes and returns them. A collective.

        Raises InputError for a name that two of the dicts have."""
        timing = distributed.step_timing()
        if self._profiler.stop():
            timing["perf/profiled"] = 1.0
        reduced = distributed.reduce_metrics(merge_metrics([*metrics, timing]))
        ends = ("training/rows_trained", "training/rows_left_over", DROPPED)
        rows_out = sum(rows for name, rows in reduced.items() if name.startswith(ends))
        assert reduced["training/rows_in"] == rows_out, "rows were lost on the way"
        throughput = throughput_metrics(reduced, self.world.size, self.peak_tflops)
        reduced = merge_metrics([reduced, throughput])
        self.tracker.log(reduced, step)
        if "rollout/k3" in reduced:
            mismatch = reduced["rollout/k3"], self.max_mismatch, f"in step {step}"
            distributed.on_first_rank(lambda: check_mismatch(*mismatch))
        self._stop_if_reached(step)
        self._stop_in_time(step, reduced["timing_s/step"])
        return reduced

    def validate(self, validation: Callable[[Any, int], dict[str, float]], actor: TrainedModel, step: int) -> None:
        """Validates and logs, if that is due after this step. A collective."""
        if self.validates(step):
            started = time.monotonic()
            self.tracker.log(validation(actor, step), step)
            self._goals.took("validation", time.monotonic() - started)

    def validates(self, step: int) -> bool:
        """True if validation is due after this step, or before the first one."""
        if not self.validation.enabled:
            return False
        if step == self.step:
            return self.validation.val_only or (self.validation.val_before_train and step == 0)
        return self._is_due(self.validation.val_every, step)

    def save(self, step: int, models: Models, stateful: Mapping[str, Any], batches: Batches | None = None) -> None:
        """Saves a checkpoint if one is due, or if this is the best of --keep-best. A collective.

        Training goes on while it is written; the next save raises what went wrong. The samples of its steps are
        written before. In the first step and at each save, state that a resume would not get back is an
        InputError. batches: rows that the next step needs, the same on all ranks."""
        self._stop_if_reached(step)
        is_due = self._is_better(step) or self._is_due(self.args.save_every, step)
        if not is_due and step != self.step + 1:
            return
        batches = dict(batches or {})
        found = states_of(_with_loss_scales(stateful, models), batches)
        check_state(found, batches)
        if not is_due:
            return
        self._wait_for_writers()
        states: dict[str, Any] = {"step": step, "best": self.best}
        for name, state in found.items():
            rows = {key: value for key, value in state.items() if isinstance(value, DataProto)}
            batches |= {f"{name}.{key}": value for key, value in rows.items()}
            states[name] = {key: value for key, value in state.items() if key not in rows}
        started = time.monotonic()
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
        self._saving.add_done_callback(lambda _: self._goals.took("save", time.monotonic() - started))

    def save_rollouts(self, step: int, batch: DataProto, outputs: Outputs, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes --save-rollouts groups while training goes on. The next call raises what went wrong."""
        if self._writing is not None:
            self._writing.result()
        if rows := kept_rows(batch.non_tensor_batch["uid"], self.args.save_rollouts, self.world):
            add_outputs(batch, outputs)
            file, kept = rollout_file(self.folder, step, self.world.rank), taken_out(batch, rows)
            self.tracker.training_samples(kept, tokenizer, step)
            self._writing = self._writer.submit(write_rollouts, file, step, kept, tokenizer)

    def export(self, actor: TrainedModel, processor: PreTrainedTokenizerBase | ProcessorMixin) -> None:
        """With --export-model, writes the policy in Hugging Face form. A collective."""
        if self.args.export_model and not self.validation.val_only:
            self._wait_for_writers()  # the last checkpoint is safe, whatever happens to the export
            export_hf(actor.module, processor, self.folder / "model", actor.forward.compute_dtype)

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
        saved = self._saving.result() if self._saving else self.checkpoint
        if saved is None or not (self._saving or self.own):
            return
        step = int(saved.name.removeprefix("step_"))
        export = f"python -m tools.export {shlex.quote(str(self.folder))} --step {step}"
        print(f"a checkpoint as a model: {export}", flush=True)
        if self.config.get("lr_schedule") == "constant" and not self.args.replay:  # others end here
            goal = " --stop-when ''" * bool(self.args.stop_when)
            more = f"{self._command_to_resume('|total-steps')} --total-steps {2 * self.last_step}{goal}"
            print(f"more steps: {more}", flush=True)

    def _command_to_resume(self, without: str = "") -> str:
        command = re.sub(rf" --(run-name|resume{without})[= ]('[^']*'|\S+)", "", self.command)
        return f"{command} --run-name {shlex.quote(self.name)} --resume auto"

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
                reached = f"it is {value:g} after step {step}, the last"
                print(f"--stop-when {self.args.stop_when!r}: {reached}", flush=True)

    def _stop_in_time(self, step: int, seconds: float) -> None:
        """Makes this step, which took so long, the last if --max-seconds has no room for another. A collective."""
        self._goals.took("step", seconds)
        if not self.args.max_seconds or step == self.last_step:
            return
        validates = self.validation.enabled and self.validation.val_every > 0
        if distributed.on_first_rank(lambda: self._goals.out_of_time(validates)):
            self.last_step = step
            if self.world.rank == 0:
                print(f"--max-seconds {self.args.max_seconds:g}: step {step} is the last", flush=True)

    def _is_better(self, step: int) -> bool:
        """Whether the step's validation is the best of --keep-best so far; it then is `best`. A collective."""
        if not self.args.keep_best:
            return False
        better = self._new_best(step)
        self.best = better or self.best
        return better is not None

    def _new_best(self, step: int) -> dict[str, Any] | None:
        return distributed.on_first_rank(lambda: self._goals.better(self.best, step, self._metrics_of(step)))

    def _metrics_of(self, step: int) -> dict[str, float]:
        logged, metrics = self.tracker.latest
        return metrics if logged == step else {}

    def _best_folder(self, best: dict[str, Any]) -> Path:
        return self.folder / "checkpoints" / f"step_{best['step']:06d}"

    def end_early(self, interrupted: bool) -> None:
        """Closes the logs of a run that fails or that Ctrl-C ends."""
        with suppress(OSError):  # a full disk may have ended the run
            self._profiler.stop()
        if self._writing is not None:
            wait([self._writing], WRITER_S)  # the step that someone will ask about
        if self.world.rank > 0:
            return
        for end in (self.tracker.notes, self.tracker.close):
            with suppress(OSError, InputError):  # a full disk, or the broken row that ends this run
                end()
        if not interrupted:
            return
        where, command = "", self.command
        if not self.validation.val_only:
            newest = checkpoints.newest_complete(self.folder / "checkpoints")
            command = self._command_to_resume()
            where = f" after {newest.name}" if newest else " before the first checkpoint"
        launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        distributed.print_last(f"interrupted{where}; to go on: {command}", launcher)


def _of_checkpoint(models: Models) -> dict[str, Any]:
    return {
        "models": {name: (model.module, model.optimizer) for name, model in models.items()},
        "schedulers": {name: model.scheduler for name, model in models.items()},
    }


def write_json(file: Path, value: dict[str, Any]) -> None:
    write_private(file, (json.dumps(value, indent=1) + "\n").encode())


# ---- what a script keeps between steps, besides models ------------------------------------------


def _with_loss_scales(stateful: Mapping[str, Any], models: Mapping[str, TrainedModel]) -> dict[str, Any]:
    scales = {f"{name}_loss_scale": model.loss_scale for name, model in models.items()}
    return dict(stateful) | {name: scale for name, scale in scales.items() if scale is not None}


def states_of(stateful: Mapping[str, Any], batches: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The state of each object. Raises InputError for an object without one, or a name that cannot be saved."""
    for name in (*stateful, *batches):
        if "." in name or name in ("step", "best"):
            raise InputError(f"run.save: {name!r} cannot be the name of a state: give another, without a dot")
    states = {}
    for name, part in stateful.items():
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(part, method):
                raise InputError(f"stateful[{name!r}], a {type(part).__name__}, has no {method}()")
        states[name] = part.state_dict()
        if not isinstance(states[name], dict) or not all(isinstance(key, str) for key in states[name]):
            raise InputError(f"stateful[{name!r}]: state_dict() must return a dict with text as keys")
    return states


def check_state(states: Mapping[str, Mapping[str, Any]], batches: Mapping[str, DataProto]) -> None:
    """Raises InputError, on all ranks, for state that a script would not get back: values that JSON changes,
    and values that differ between ranks, since rank 0's are saved. A collective.

    states: by name, each from a state_dict()."""
    kept: dict[str, Any] = {f"batches[{name!r}]": rows for name, rows in batches.items()}
    for name, state in states.items():
        kept |= {f"stateful[{name!r}]: {key}": value for key, value in state.items()}
    found = {what: inexact(value, what) or _digest(value) for what, value in kept.items()}
    ranks = all_gather_lists([found])
    for what in dict.fromkeys(what for of_rank in ranks for what in of_rank):
        of_ranks = [of_rank.get(what) for of_rank in ranks]
        if why := next((text for text in of_ranks if text and text.startswith(what)), None):
            raise InputError(why)
        if other := [str(rank) for rank, digest in enumerate(of_ranks) if digest != of_ranks[0]]:
            raise InputError(
                f"{what} is another on rank {', '.join(other)} than on rank 0, whose state is saved: "
                "keep the same on all ranks (sum or gather over ranks)"
            )


def inexact(value: Any, where: str) -> str | None:
    """Why the value at `where` would come back from JSON as something else; None if it would not."""
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
            digest.update(rows.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        columns = value.non_tensor_batch.items()
        value = {name: [x for x in rows if isinstance(x, str | int)] for name, rows in columns}
    digest.update(json.dumps(value, sort_keys=True).encode())
    return digest.hexdigest()
