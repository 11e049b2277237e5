"""--stop-when, --max-seconds and --keep-best: when a run ends, and which checkpoint is its best."""

import difflib
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from lib import InputError
from lib.args import RunArgs, StopWhen

Best = dict[str, Any]  # metric, step, value, lower_bound
STAGES = ("step", "save", "validation")


@dataclass
class Goals:
    args: RunArgs
    _seen: set[str] = field(default_factory=set)  # metrics that have been found, or were noted as missing
    _longest: dict[str, float] = field(default_factory=dict)  # seconds of a step, a validation, a save

    def reached(self, metrics: Mapping[str, float]) -> float | None:
        """The metric of --stop-when, if the condition holds for these metrics of a step. It notes once that there is no
        such metric: some come in a few steps only."""
        flag = self.args.stop_when
        condition = StopWhen.parse(flag)
        if missing := self._missing(condition.metric, metrics):
            print(f"note: --stop-when {flag!r}: {missing}; the run goes on until one holds", flush=True)
        value = metrics.get(condition.metric)
        return value if value is not None and condition.holds(value) else None

    def took(self, stage: str, seconds: float) -> None:
        self._longest[stage] = max(seconds, self._longest.get(stage, 0.0))

    def out_of_time(self, validates: bool) -> bool:
        """Whether --max-seconds leaves too little for another step and what follows the last one. An export takes as
        long as a save; what has not run yet, as long as a step."""
        [step, save, validation] = (self._longest.get(stage, self._longest["step"]) for stage in STAGES)
        writes = (self.args.save_every > 0) + self.args.export_model
        needed = step + writes * save + validates * validation
        return time.time() - psutil.Process().create_time() + needed > self.args.max_seconds

    def better(self, best: Best | None, step: int, metrics: Mapping[str, float]) -> Best | None:
        """The new best of --keep-best, if the step's bound is above the one of `best`. Raises InputError if there is no
        such metric."""
        name = self.args.keep_best
        if missing := self._missing(f"{name}/lower_bound", metrics):
            raise InputError(f"--keep-best {name}: {missing}")
        bound = metrics.get(f"{name}/lower_bound")
        if bound is None or not bound > (best["lower_bound"] if best else -math.inf):
            return None
        return {"metric": name, "step": step, "value": metrics[name], "lower_bound": bound}

    def _missing(self, name: str, metrics: Mapping[str, float]) -> str | None:
        """Says once that training, or validation, has metrics, but never one of the name."""
        of_validation = name.startswith("val/")
        known = [other for other in metrics if other.startswith("val/") == of_validation]
        logged = bool(known) if of_validation else "training/rows_in" in metrics
        if name in self._seen or not (logged or name in metrics):
            return None
        self._seen.add(name)
        what = "validation" if of_validation else "training"
        return None if name in metrics else f"no such metric of {what}; {_near(name, known)}"


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    names = dict.fromkeys(other.removesuffix("/lower_bound") for other in near)
    return f"near: {', '.join(names) or 'none'}"


def check_names(args: RunArgs, samples: Mapping[str, int]) -> None:
    """Raises InputError if --keep-best or --stop-when names a mean@n, pass@k, best@k or maj@k that no validation has.

    samples: number for a prompt, by data source; empty if unknown. What scorers give besides is known later."""
    stop = StopWhen.parse(args.stop_when).metric if args.stop_when else ""
    flags = {f"--keep-best {args.keep_best}": args.keep_best, f"--stop-when {args.stop_when!r}": stop}
    for flag, name in flags.items():
        parts = re.match(r"val/(.+/)(mean|pass|best|maj)@(\d+)", name)
        if parts is None or not samples:
            continue
        whose, kind, k = parts[1], parts[2], int(parts[3])
        of_source = [n for source, n in samples.items() if whose.startswith(f"{source}/")]
        if not any(k == n or (kind != "mean" and k < n and k.bit_count() == 1) for n in of_source):  # 1, 2, 4 ... n
            known = [f"val/{source}/mean@{n}" for source, n in samples.items()]
            raise InputError(f"{flag}: no such metric of validation; {_near(name, known)}")
