"""The logs of a run, which rank 0 writes: metrics.jsonl, samples.jsonl, a console line per step, curve.png, and
the trackers of --track.

metrics.jsonl is the record: floats are exact, and each line is written at once. NaN is not valid JSON: it becomes
null, and "nonfinite" has its key and value."""

import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lib import InputError
from lib.cli.secrets import private
from lib.data_proto import DataProto
from lib.distributed import check_number
from lib.log.alerts import alerts_of_run, alerts_of_step
from lib.log.disk import writes_to
from lib.log.metrics import merge_metrics
from lib.log.rollouts import OF_SOME, sample_rows
from lib.log.trackers import first_line, open_tracker

# what a step's console line shows
NUMBERS = {"reward/mean": "reward {:.3f}", "response_length/mean": "length {:.0f}"}
SPEED = {"perf/tokens_per_s": "{:,.0f} tok/s"}
SPEED_OF_GPUS = {"perf/tokens_per_s_per_device": "{:,.0f} tok/s/GPU", "perf/mfu": "MFU {:.0%}"}
TABLE_ROWS = 8  # of a tracker's table of samples
VALIDATION_COLORS = [f"tab:{name}" for name in ("orange", "red", "purple", "brown", "pink", "gray")]
SPECIAL = re.compile(r"<\|[^|>\s]*\|>")  # the marks of most chat templates
PROMPT, RESPONSE, ERROR = 40, 60, 80  # characters of a sample's texts in the console
SHOWN_LINES = 3  # names of images, and errors, of a sample in the console


class Tracker:
    """The run's logs. With enabled=False (all ranks but the first) every method does nothing.

    Args:
        run_dir: made if missing. Lines are added to its metrics.jsonl and samples.jsonl.
        name: the run's name in the trackers and over the curve; None: run_dir's name.
        trackers: names of --track. One that fails later gets nothing more; a line says so, then and at the end.
        resume_step: the step of the loaded checkpoint; 0: trackers start a new run.
        on_gpu: the console shows the speed of a GPU and its MFU, not the speed of all ranks.

    Raises InputError if a tracker is not installed, or has no login or no network."""

    def __init__(
        self,
        run_dir: str | Path,
        config: Mapping[str, Any],
        *,
        name: str | None = None,
        trackers: Sequence[str] = (),
        total_steps: int,
        resume_step: int = 0,
        on_gpu: bool = False,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.run_dir, self.total_steps, self.resume_step = Path(run_dir), total_steps, resume_step
        self.latest: tuple[int, dict[str, float]] = (resume_step, {})  # a step, its metrics; on rank 0
        if not enabled:
            return
        self.name = name or self.run_dir.resolve().name
        self.run_dir.mkdir(parents=True, exist_ok=True)
        about = self.run_dir, self.name, dict(config), resume_step
        self.trackers = {tracker: open_tracker(tracker, *about) for tracker in trackers}
        self.failed: list[str] = []  # what is said of trackers that were given up
        (self.run_dir / "metrics.jsonl").touch()
        private(self.run_dir / "samples.jsonl")  # tools may have shown secrets
        self.numbers = NUMBERS | (SPEED_OF_GPUS if on_gpu else SPEED)
        self.undrawn = False
        self.last_samples: tuple[list[Mapping[str, Any]], int] = ([], 0)
        self.started = time.monotonic()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes one line of metrics.jsonl. A step may have several (training, then validation)."""
        if not self.enabled:
            return
        values: dict[str, float] = {}
        for key, value in metrics.items():
            check_number(key, value)
            values[key] = value.item() if hasattr(value, "item") else value
        nonfinite = {key: str(value) for key, value in values.items() if not math.isfinite(value)}
        logged, latest = self.latest
        self.latest = step, (latest if step == logged else {}) | values
        row: dict[str, Any] = {key: None if key in nonfinite else value for key, value in values.items()}
        row = merge_metrics([{"step": step}, row, {"nonfinite": nonfinite} if nonfinite else {}])
        path = self.run_dir / "metrics.jsonl"
        with writes_to(path, f"the row of step {step} was not written"), path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self._to_trackers(lambda tracker: tracker.log(values, step), f"step {step}")
        self._print_line(values, nonfinite, step)
        self.undrawn |= "reward/mean" in values
        if self.undrawn and _validated(values):
            self.curve()

    def _print_line(self, values: dict[str, float], nonfinite: dict[str, str], step: int) -> None:
        line = [f"step {step}/{self.total_steps}"]
        line += [shape.format(values[key]) for key, shape in self.numbers.items() if key in values]
        done = step - self.resume_step
        if len(line) > 1 and done > 0:
            seconds = (time.monotonic() - self.started) / done * (self.total_steps - step)
            line.append(f"eta {timedelta(seconds=round(seconds))}")
        line += [f"{key} {values[key]:.3f}" for key in _validated(values)]
        line += [f"{key} is {value}" for key, value in nonfinite.items()]
        print(" | ".join(line + alerts_of_step(values)), flush=True)

    def reread(self, step: int) -> None:
        """Makes `latest` what metrics.jsonl has of the step."""
        self.latest = step, {}
        for row in _rows(self.run_dir / "metrics.jsonl"):
            if row.pop("step") == step:
                row.pop("nonfinite", None)
                self.latest[1].update(row)

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int, show: int = 3) -> None:
        """Appends rows (prompt, response, score, ...) to samples.jsonl. `report` prints the first of the last."""
        if not self.enabled:
            return
        path = self.run_dir / "samples.jsonl"
        lines = [json.dumps({"step": step, **row}, ensure_ascii=False, default=str) for row in rows]
        text = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
        with writes_to(path, f"the samples of step {step} were not written"), path.open("ab") as file:
            file.write(text)
        self._show("samples/validation", rows, step)
        self.last_samples = [*rows[:show]], step

    def training_samples(self, batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> None:
        """Shows the first rows of a scored batch in the trackers."""
        if self.enabled and self.trackers:
            rows = sample_rows(batch[:TABLE_ROWS], tokenizer, self.run_dir)
            self._show("samples/training", rows, step)

    def _show(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        rows = rows[:TABLE_ROWS]
        columns = ["score", "prompt", "response", "ground_truth"]
        columns += [key for key in OF_SOME if any(row.get(key) for row in rows)]
        table = [{"step": step} | {key: row.get(key) for key in columns} for row in rows]
        self._to_trackers(lambda tracker: tracker.show(name, table, step), f"{name} of step {step}")

    def _to_trackers(self, act: Callable[[Any], None], what: str) -> None:
        """Calls act for each tracker. One that raises is left out; metrics.jsonl has everything."""
        for name, tracker in [*self.trackers.items()]:
            try:
                act(tracker)
            except Exception as error:  # noqa: BLE001  each has exceptions of its own
                del self.trackers[name]
                why = f"{first_line(error)}; it gets nothing more, metrics.jsonl has every step"
                self.failed.append(f"--track {name}: {what} was not logged: {why}")
                print(f"note: {self.failed[-1]}", flush=True)

    def curve(self) -> None:
        if self.enabled:
            path = self.run_dir / "curve.png"
            with writes_to(path, "the curve was not drawn"):
                plot_curve(self.run_dir / "metrics.jsonl", path, self.name)
            self.undrawn = False

    def notes(self) -> None:
        if self.enabled:
            alerts = alerts_of_run(_rows(self.run_dir / "metrics.jsonl"))
            for text in (*self.failed, *(alert.text for alert in alerts)):
                print(f"note: {text}", flush=True)

    def report(self, of_training: bool = True) -> None:
        """Prints samples of the last validation, and the command of the page. of_training: also `notes`, the
        validation scores of the start model and the last one, and where the files are."""
        if not self.enabled:
            return
        self._print_samples(*self.last_samples)
        if of_training:
            self.notes()
            rows = _rows(self.run_dir / "metrics.jsonl")
            for key in dict.fromkeys(key for row in rows for key in _validated(row)):
                values = {row["step"]: row[key] for row in rows if row.get(key) is not None}
                before = [f"{values.pop(0):.3f} before training"] if 0 in values else []
                after = [f"{values[step]:.3f} after step {step}" for step in [*values][-1:]]
                print(f"{key}: {', '.join(before + after)}", flush=True)
            print(f"curve: {self.run_dir / 'curve.png'}, everything else: {self.run_dir}/", flush=True)
        command = f"python -m tools.page {shlex.quote(str(self.run_dir))}"
        print(f"page of curves and samples: {command}", flush=True)

    def _print_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if rows:
            print(f"samples of step {step} (score, prompt, response):")
        for number, row in enumerate(rows, 1):
            score = "none" if row["score"] is None else f"{row['score']:.3g}"
            prompt = _short(SPECIAL.sub(" ", row["prompt"]), PROMPT)
            response = _short(row["response"], RESPONSE)
            print(f"{score:>6}  {prompt:{PROMPT}}  {response}")
            if images := ", ".join((row.get("images") or [])[:SHOWN_LINES]):
                print(f"images of sample {number}: {self.run_dir / 'images'}/{images}")
            for error in (row.get("tool_errors") or [])[:SHOWN_LINES]:
                print(f"tool error of sample {number}: {_short(error, ERROR)}")

    def close(self) -> None:
        if not self.enabled:
            return
        if self.undrawn:
            self.curve()
        self.enabled = False
        self._to_trackers(lambda tracker: tracker.close(), "the end")


def _short(text: str, width: int) -> str:
    """The head and tail of `text`, without control characters, in the console's encoding."""
    text = "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))
    if len(text) > width:
        text = f"{text[: width // 2 - 2]} … {text[-(width // 2 - 1) :]}"
    encoding = sys.stdout.encoding
    return text.encode(encoding, "replace").decode(encoding)


def _validated(metrics: Mapping[str, Any]) -> list[str]:
    """The key of each data source that has a confidence interval: its accuracy, or else its mean score."""
    return [key for key in metrics if key.startswith("val/") and f"{key}/ci_low" in metrics]


def read_rows(file: Path) -> Iterator[dict[str, Any] | None]:
    """The rows of metrics.jsonl or samples.jsonl; None for a torn last line. Raises InputError for a line that is
    no JSON object with a step."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                yield None
                return
            try:
                row = json.loads(line)
                is_row = isinstance(row, dict) and type(row.get("step")) is int
            except (ValueError, RecursionError):
                is_row = False
            if not is_row:
                raise InputError(f"{file}, line {number}: not a row of a run: fix or delete it")
            yield row


def _rows(metrics_file: Path) -> list[dict[str, Any]]:
    return list(filter(None, read_rows(metrics_file)))


def plot_curve(metrics_file: Path, path: str | Path, title: str) -> None:
    """Plots train reward (raw and smoothed), validation with its interval, and mean response length."""
    from matplotlib.figure import Figure  # not at the start of a run: it takes a second

    rows = _rows(metrics_file)

    def series(key: str) -> np.ndarray:  # steps, values
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        return np.array(points, dtype=float).reshape(-1, 2).T

    figure = Figure(figsize=(10, 3.8), dpi=150)
    figure.suptitle(title, fontweight="bold")
    # a layout engine would draw everything twice
    margins = {"left": 0.065, "right": 0.985, "bottom": 0.13, "top": 0.89, "wspace": 0.17}
    left, right = figure.subplots(1, 2, gridspec_kw=margins)
    for axes, key, label, color in (
        (left, "reward/mean", "train reward", "tab:blue"),
        (right, "response_length/mean", "mean response length", "tab:green"),
    ):
        steps, values = series(key)
        if len(steps):
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, _smooth(values), color=color, linewidth=2, label=label)
    keys = dict.fromkeys(key for row in rows for key in _validated(row))
    for key, color in zip(keys, VALIDATION_COLORS):
        left.plot(*series(key), color=color, marker="o", markersize=4, linewidth=1.5, label=key)
        (steps, low), (_, high) = series(f"{key}/ci_low"), series(f"{key}/ci_high")
        left.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    left.set_ylabel("reward, validation")
    right.set_ylabel("tokens")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False)
    aside = Path(f"{path}.tmp")
    figure.savefig(aside, format="png")
    aside.replace(path)


def _smooth(values: np.ndarray) -> np.ndarray:
    """The mean over a centred window of a tenth of the run, which does not lag behind a trend."""
    window = np.ones(len(values) // 20 * 2 + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
