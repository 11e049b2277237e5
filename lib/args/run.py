"""The group of flags about the run."""

import math
import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Interval
from tyro.constructors import PrimitiveConstructorSpec

from lib import InputError
from lib.cli.flags import Group, Names, OnResume

MAY_CHANGE, NOT_COMPARED = OnResume.MAY_CHANGE, OnResume.NOT_COMPARED


class Epochs(int):
    """A --total-steps that counts epochs, until lib.setup.inputs knows how many steps these are."""


def steps_or_epochs(text: str) -> int:
    """--total-steps as typed: 500, or 3epochs."""
    number, is_epochs, _ = text.partition("epoch")
    return Epochs(number) if is_epochs else int(number)


STEPS = PrimitiveConstructorSpec(
    nargs=1,
    metavar="INT|{3epochs}",
    instance_from_str=lambda words: steps_or_epochs(words[0]),
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [str(value)],
)


class StopWhen(NamedTuple):
    """--stop-when: compares a metric with a number."""

    metric: str
    compare: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "StopWhen":
        """Raises InputError for a text that is not one comparison."""
        found = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", text)
        if found is None or math.isinf(float(found[3])):  # 1e999
            how = '"val/x/mean@1 >= 0.9": a metric, one of >=, <=, > and <, and a number'
            raise InputError(f"--stop-when {text!r}: give one comparison such as {how}")
        return cls(found[1], found[2], float(found[3]))

    def holds(self, value: float) -> bool:
        compare = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}[self.compare]
        return compare(value, self.value)


@dataclass
class RunArgs(Group):
    """The run: its folder, length, checkpoints and logs."""

    run_name: Annotated[str, NOT_COMPARED] = ""
    """name of the run's folder in output_dir; empty: script, seed, date and time"""
    output_dir: Annotated[str, NOT_COMPARED] = "runs"
    """folder of all runs"""
    config: Annotated[str, NOT_COMPARED] = ""
    """config.json of a run, or a YAML file of flags; flags on the command line override it"""
    seed: Annotated[int, Interval(ge=0, lt=2**32), Names.ROWS] = 1
    """seed of sampling and data order; the same seed gives the same run"""
    total_steps: Annotated[int, STEPS, Ge(1), MAY_CHANGE] = 500
    """steps of prompts_per_step x group_size responses; 3epochs: passes over the prompts"""
    dry_run: Annotated[int, Ge(0), NOT_COMPARED] = 0
    """print sizes, FLOPs and memory of a step on this many GPUs, and stop"""
    plan: Annotated[str, NOT_COMPARED] = ""
    """with --dry-run: predict seconds of a step; response lengths: auto or a run's (docs/scaling.md)"""
    memory_check: Annotated[bool, NOT_COMPARED] = True
    """on a GPU, estimate the memory at the start and reject flags that do not fit"""
    resume: Annotated[str, NOT_COMPARED] = "never"
    """never, auto (the newest checkpoint of run_name, else from the start) or a checkpoint folder"""
    resume_override: Annotated[tuple[str, ...], NOT_COMPARED] = ()
    """flags that change results, or script, that may differ from the checkpoint's"""
    record: Annotated[str, NOT_COMPARED] = ""
    """folder, seen by all nodes, that keeps each step's batch for --replay (docs/diagnostics.md)"""
    replay: str = ""
    """folder of a --record: train on its samples and scores, with as many ranks"""
    stage_timeout: Annotated[float, Ge(0), MAY_CHANGE] = 1800.0
    """timeout of a stage in seconds, after which the job ends with an error; 0: no limit"""
    save_every: Annotated[int, Ge(0), MAY_CHANGE] = 50
    """save a checkpoint every n steps and after the last; 0: never"""
    keep_checkpoints: Annotated[int, Ge(0), MAY_CHANGE] = 2
    """keep the newest n checkpoints; 0: all"""
    keep_best: Annotated[str, MAY_CHANGE] = ""
    """metric val/.../mean@n: also keep the checkpoint with its best lower confidence bound"""
    stop_when: Annotated[str, MAY_CHANGE] = ""
    """end the run after the step in which this holds, such as "val/x/mean@1 >= 0.9\""""
    max_seconds: Annotated[float, Ge(0), NOT_COMPARED] = 0.0
    """end the run, with its last validation, save and export, within this many seconds; 0: no limit"""
    save_rollouts: Annotated[int | Literal["all"], Ge(0), MAY_CHANGE] = 1
    """groups of each step's training samples to keep in <run>/rollouts, or all"""
    export_model: Annotated[bool, MAY_CHANGE] = True
    """after the last step, export the policy in Hugging Face format to <run>/model"""
    track: Annotated[tuple[Literal["wandb", "tensorboard", "trackio", "mlflow", "swanlab"], ...], MAY_CHANGE] = ()
    """trackers besides metrics.jsonl; their own variables name the project (docs/reading_a_run.ipynb)"""
    profile_steps: Annotated[tuple[int, ...], Ge(1), NOT_COMPARED] = ()
    """steps to profile: torch.profiler traces and memory in <run>/profile (docs/performance.md)"""

    def check(self) -> None:
        if "/" in self.run_name or self.run_name in (".", ".."):
            why = "must be one folder's name; --output-dir says where that folder lies"
            raise InputError(f"--run-name {self.run_name!r}: {why}")
        if self.plan and not self.dry_run:
            raise InputError(f"--plan {self.plan[:100]!r}: needs --dry-run N, the number of GPUs to predict for")
        if self.record and self.replay:
            raise InputError("--record with --replay: a replay repeats recorded samples and scores; drop one")
        if self.replay and not Path(self.replay, "config.json").is_file():
            raise InputError(f"--replay {self.replay}: no config.json there; give the folder of a run with --record")
        if self.keep_best and not re.fullmatch(r"val/.+/mean@\d+", self.keep_best):
            raise InputError(f"--keep-best {self.keep_best}: give a mean of validation, such as val/x/mean@1")
        if self.stop_when:
            StopWhen.parse(self.stop_when)
        if self.resume == "auto" and not self.run_name:
            raise InputError("--resume auto needs the --run-name of the run to resume")
        self.check_profile_steps()

    def check_profile_steps(self) -> None:
        if isinstance(self.total_steps, Epochs):
            return  # lib.setup.inputs knows the number of steps
        if late := [step for step in self.profile_steps if step > self.total_steps]:
            raise InputError(f"--profile-steps {late[0]}: the run has {self.total_steps} steps (--total-steps)")
