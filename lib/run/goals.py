"""--stop-when and --keep-best: what a step's metrics say about the end of a run and its best checkpoint."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lib import InputError
from lib.args import RunArgs, StopWhen


@dataclass
class Goals:
    args: RunArgs
    _seen: set[str] = field(default_factory=set)  # metrics that have been found: later they may be missing

    def reached(self, metrics: Mapping[str, float]) -> float | None:
        """The metric of --stop-when, if the condition holds for these metrics of a step. Raises InputError."""
        if not self.args.stop_when:
            return None
        condition = StopWhen.parse(self.args.stop_when)
        value = self._find(f"--stop-when {self.args.stop_when!r}", condition.metric, metrics)
        return value if value is not None and condition.holds(value) else None

    def better(self, best: dict[str, Any] | None, step: int, metrics: Mapping[str, float]) -> dict[str, Any] | None:
        """The new best of --keep-best, {metric, step, value, lower_bound}, if the step's validation has a better bound
        than `best`. A tie keeps the older. Raises InputError."""
        if not (name := self.args.keep_best):
            return None
        bound = self._find(f"--keep-best {name}", f"{name}/lower_bound", metrics)
        if bound is None or not bound > (best["lower_bound"] if best else -math.inf):
            return None
        return {"metric": name, "step": step, "value": metrics[name], "lower_bound": bound}

    def _find(self, flag: str, name: str, metrics: Mapping[str, float]) -> float | None:
        """Raises InputError if there are metrics of the kind, of training or validation, and never one of the name."""
        of_validation = name.startswith("val/")
        known = [other for other in metrics if other.startswith("val/") == of_validation]
        logged = bool(known) if of_validation else "training/rows_in" in metrics
        if name not in metrics and logged and name not in self._seen:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
            near = list(dict.fromkeys(other.removesuffix("/lower_bound") for other in near))
            what = "validation" if of_validation else "training"
            raise InputError(f"{flag}: no such metric of {what}; near: {', '.join(near) or 'none'}")
        if name in metrics:
            self._seen.add(name)
        return metrics.get(name)
