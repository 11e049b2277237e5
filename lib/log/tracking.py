"""The logs of a run, which rank 0 writes: always metrics.jsonl, samples.jsonl, a console line per step and curve.png;
on request wandb, tensorboard, trackio, swanlab and mlflow, of which all but mlflow also get a few samples.

metrics.jsonl is the record: floats are exact, and each line is written at once. NaN is not valid JSON, so it becomes
null, and "nonfinite" has its key and value. wandb drops rows whose step goes back, so the step is a logged value there.
accelerate.tracking has all of these, but it needs a PartialState, which picks devices and process groups of its own.
"""

import atexit
import json
import math
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from lib import InputError
from lib.cli.secrets import private, private_folder
from lib.data_proto import DataProto
from lib.distributed import check_number
from lib.log.alerts import alerts_of_run, alerts_of_step
from lib.log.disk import writes_to
from lib.log.metrics import merge_metrics
from lib.log.prompt_images import keep_images, row_hashes

# what a step's console line shows
NUMBERS = {"reward/mean": "reward {:.3f}", "response_length/mean": "length {:.0f}"}
SPEED = {"perf/tokens_per_s": "{:,.0f} tok/s"}
SPEED_OF_GPUS = {"perf/tokens_per_s_per_device": "{:,.0f} tok/s/GPU", "perf/mfu": "MFU {:.0%}"}
TABLE_ROWS, TABLE_TEXT = 8, 4000  # rows of a tracker's table of samples, characters of a text there
SHOWN_LINES = 3  # names of images, and errors, of a sample in the console
PROJECT = "plainrl"  # of a tracker whose own variable does not name one
PROJECTS = {"wandb": "WANDB_PROJECT", "trackio": "TRACKIO_PROJECT"}
PROJECTS |= {"mlflow": "MLFLOW_EXPERIMENT_NAME", "swanlab": "SWANLAB_PROJ_NAME"}
OFFLINE = {"wandb": " (or WANDB_MODE=offline, and `wandb sync` later)"}
OFFLINE |= {"swanlab": " (or SWANLAB_MODE=offline, and `swanlab sync` later)"}
MLFLOW_WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}  # else it takes 20 minutes
OF_SOME = ("images", "tool_errors", "tool_rewards")  # lists that not every sample has


class Tracker:
    """The run's logs. With enabled=False (all ranks but the first) every method does nothing.

    The curve is drawn at each validation and at the end, also if an exception or Ctrl-C ends the run.

    Args:
        run_dir: made if missing. Lines are added to its metrics.jsonl and samples.jsonl.
        name: the run's name in the trackers and over the curve; None: run_dir's name.
        trackers: any of OPENERS. They read their usual environment (WANDB_PROJECT, WANDB_MODE, TRACKIO_DIR,
            TRACKIO_SPACE_ID, MLFLOW_TRACKING_URI, SWANLAB_MODE). One that fails after the start gets nothing more; a
            line says so, then and at the end.
        resume_step: the step of the loaded checkpoint. Trackers continue their run; with 0, they start one.
        on_gpu: the console shows the speed of a GPU and its MFU, not the speed of all ranks.

    Raises InputError if a tracker is unknown or not installed, or has no login or no network.
    """

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
        if unknown := set(trackers) - OPENERS.keys():
            raise InputError(f"--track {' '.join(sorted(unknown))}: unknown; choose from {', '.join(OPENERS)}")
        self.run_dir, self.total_steps, self.resume_step = Path(run_dir), total_steps, resume_step
        self.latest: tuple[int, dict[str, float]] = (resume_step, {})  # a step, its metrics; on rank 0
        if not enabled:
            return
        self.name = name or self.run_dir.resolve().name
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.numbers = NUMBERS | (SPEED_OF_GPUS if on_gpu else SPEED)
        self.undrawn = False
        self.last_samples: tuple[list[Mapping[str, Any]], int] = ([], 0)
        self.trackers = {tracker: self._open(tracker, dict(config)) for tracker in dict.fromkeys(trackers)}
        self.failed: list[str] = []  # what is said of trackers that were given up
        (self.run_dir / "metrics.jsonl").touch()
        private(self.run_dir / "samples.jsonl")  # tools may have shown secrets
        self.started = time.monotonic()
        on_terminal = sys.stdout.isatty()
        self.console = Console(force_terminal=on_terminal, width=None if on_terminal else 120, highlight=False)
        self.progress = None
        if on_terminal:
            text = TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True), markup=False)
            columns, stderr = (MofNCompleteColumn(), BarColumn(20), text), sys.stderr.isatty()
            # a thread that refreshes it would disturb a debugger's prompt
            self.progress = Progress(*columns, console=self.console, auto_refresh=False, redirect_stderr=stderr)
            self.task = self.progress.add_task("", total=total_steps, completed=resume_step, numbers="")
            self.progress.start()
        atexit.register(self.close)  # an exception must not leave the terminal without a cursor

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes one line of metrics.jsonl. A step may have several (training, then validation)."""
        if not self.enabled:
            return
        for key, value in metrics.items():
            check_number(key, value)
        values = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
        nonfinite = {key: str(value) for key, value in values.items() if not math.isfinite(value)}
        self.latest = step, (self.latest[1] if step == self.latest[0] else {}) | values
        finite = {key: None if key in nonfinite else value for key, value in values.items()}
        parts: list[dict[str, Any]] = [{"step": step}, finite, {"nonfinite": nonfinite} if nonfinite else {}]
        row = merge_metrics(parts)
        path = self.run_dir / "metrics.jsonl"
        with writes_to(path, f"the row of step {step} was not written"), path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self._to_trackers(lambda tracker, run: _send(tracker, run, values, step), f"step {step}")
        self._show(values, nonfinite, step)
        self.undrawn |= "reward/mean" in values
        if self.undrawn and _validated(values):
            self.curve()

    def reread(self, step: int) -> None:
        """Makes `latest` what metrics.jsonl has of the step."""
        rows = (row for row in _rows(self.run_dir / "metrics.jsonl") if row.pop("step") == step)
        self.latest = step, {key: value for row in rows for key, value in row.items() if key != "nonfinite"}

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int, show: int = 3) -> None:
        """Appends rows (prompt, response, score, ...) to samples.jsonl; `report` prints the first few of the last."""
        if not self.enabled:
            return
        path, message = self.run_dir / "samples.jsonl", f"the samples of step {step} were not written"
        lines = [json.dumps({"step": step} | dict(row), ensure_ascii=False, default=str) + "\n" for row in rows]
        with writes_to(path, message), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
        self._table("samples/validation", rows, step)
        self.last_samples = [*rows[:show]], step

    def training_samples(self, batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> None:
        """Shows the first rows of a scored batch in the trackers."""
        if self.enabled and self.trackers.keys() - {"mlflow"}:
            self._table("samples/training", sample_rows(batch[:TABLE_ROWS], tokenizer, self.run_dir), step)

    def _table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        names = ["step", "score", "prompt", "response", "ground_truth"]
        names += [key for key in OF_SOME if any(row.get(key) for row in rows[:TABLE_ROWS])]
        table = [[_cell(({"step": step} | dict(row)).get(key)) for key in names] for row in rows[:TABLE_ROWS]]
        text = "\n\n".join(_markdown(dict(zip(names, row))) for row in table)

        def show(tracker: str, run: Any) -> None:
            match tracker:
                case "wandb":
                    run.log({name: self._wandb_table(names, table, rows), "step": step})
                case "tensorboard":
                    run.add_text(name, text, step)
                case "trackio":
                    run.log({name: run.Table(names, table)}, step)
                case "swanlab":
                    run.log({name: run.Text(text)}, step)

        self._to_trackers(show, f"{name} of step {step}")

    def _to_trackers(self, act: Callable[[str, Any], None], what: str) -> None:
        """Calls act(name, run) for each tracker. metrics.jsonl has everything, so the run goes on without one that
        raises."""
        for tracker, run in [*self.trackers.items()]:
            try:
                act(tracker, run)
            except Exception as error:  # noqa: BLE001  each has exceptions of its own
                del self.trackers[tracker]
                why = f"{_one_line(error)}; it gets nothing more, metrics.jsonl has every step"
                self.failed.append(f"--track {tracker}: {what} was not logged: {why}")
                print(f"note: {self.failed[-1]}", flush=True)

    def _wandb_table(self, names: list[str], table: list[list], rows: Sequence[Mapping[str, Any]]) -> Any:
        """With the images themselves, which wandb uploads with the table."""
        wandb = import_module("wandb")
        if "images" in names:
            at, folder = names.index("images"), self.run_dir / "images"
            pictures = [[wandb.Image(str(folder / name)) for name in row.get("images") or ()] for row in rows]
            table = [[*cells[:at], own or None, *cells[at + 1 :]] for cells, own in zip(table, pictures)]
        return wandb.Table(names, table)

    def curve(self) -> None:
        """Draws metrics.jsonl to curve.png."""
        if self.enabled:
            path = self.run_dir / "curve.png"
            with writes_to(path, "the curve was not drawn"):
                plot_curve(self.run_dir / "metrics.jsonl", path, self.name)
            self.undrawn = False

    def notes(self) -> None:
        """Prints what went wrong in how many steps."""
        if self.enabled:
            for text in [*self.failed, *(alert.text for alert in alerts_of_run(_rows(self.run_dir / "metrics.jsonl")))]:
                self._say(f"note: {text}")

    def report(self, of_training: bool = True) -> None:
        """Prints samples of the last validation, and how to see them all. of_training: also `notes`, the validation
        scores of the start model and the last one, and where the files are."""
        if not self.enabled:
            return
        self._show_samples(*self.last_samples)
        if of_training:
            self.notes()
            rows = _rows(self.run_dir / "metrics.jsonl")
            for key in dict.fromkeys(key for row in rows for key in _validated(row)):
                values = {row["step"]: row[key] for row in rows if row.get(key) is not None}
                before = [f"{values.pop(0):.3f} before training"] if 0 in values else []
                after = [f"{values[step]:.3f} after step {step}" for step in [*values][-1:]]
                self._say(f"{key}: {', '.join(before + after)}")
            self._say(f"curve: {self.run_dir / 'curve.png'}, everything else: {self.run_dir}/")
        self._say(f"page of curves and samples: python -m tools.page {shlex.quote(str(self.run_dir))}")

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    def _show_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if not rows:
            return
        table = Table(title=f"samples of step {step}", title_justify="left")
        for name in ("score", "prompt", "response"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        fifth = (self.console.width - 20) // 5  # borders and score take 20
        for row in rows:
            prompt, response = self._one_line(row["prompt"], 2 * fifth), self._one_line(row["response"], 3 * fifth)
            score = "none" if row["score"] is None else f"{row['score']:.3g}"
            table.add_row(*map(Text, (score, prompt, response)))
        self.console.print(table)
        for number, row in enumerate(rows, 1):
            if images := row.get("images"):
                self._say(f"images of sample {number}: {self.run_dir / 'images'}/{', '.join(images[:SHOWN_LINES])}")
            for error in (row.get("tool_errors") or [])[:SHOWN_LINES]:
                self._say(self._one_line(f"tool error of sample {number}: {error}", self.console.width))

    def close(self) -> None:
        if not self.enabled:
            return
        atexit.unregister(self.close)
        if self.progress is not None:
            self.progress.stop()
        if self.undrawn:
            self.curve()
        self.enabled = False
        self._to_trackers(lambda tracker, run: getattr(run, CLOSES.get(tracker, "finish"))(), "the end")

    def _show(self, values: Mapping[str, float], nonfinite: Mapping[str, str], step: int) -> None:
        parts = [shape.format(values[key]) for key, shape in self.numbers.items() if key in values]
        done = step - self.resume_step
        if parts and done > 0:
            seconds = (time.monotonic() - self.started) / done * (self.total_steps - step)
            parts.append(f"eta {timedelta(seconds=round(seconds))}")
        validation = [f"{key} {values[key]:.3f}" for key in _validated(values)]
        nonfinite_notes, alerts = [f"{key} is {value}" for key, value in nonfinite.items()], alerts_of_step(values)
        if self.progress is None:
            line = [f"step {step}/{self.total_steps}", *parts, *validation, *nonfinite_notes, *alerts]
            print(" | ".join(line), flush=True)
            return
        if validation or nonfinite_notes or (alerts and not parts):  # these lines stay on the screen, above the bar
            line = [f"step {step}", *validation, *nonfinite_notes, *alerts]
            self.console.print(Text(" | ".join(line), style="red" if nonfinite_notes else "bold"))
        if parts:
            self.progress.update(self.task, completed=step, numbers=" | ".join([*alerts, *parts]))
        self.progress.refresh()

    def _one_line(self, text: str, width: int) -> str:
        """The head and tail of `text`, without line breaks and control characters, in the console's encoding."""
        text = "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))
        if len(text) > width:
            text = f"{text[: width // 2 - 2]} … {text[-(width // 2 - 1) :]}"
        return text.encode(self.console.encoding, "replace").decode(self.console.encoding)

    def _open(self, tracker: str, config: dict[str, Any]) -> Any:
        """The tracker's run. Raises InputError."""
        package, project = _module(*OPENERS[tracker]), os.environ.get(PROJECTS.get(tracker, ""), PROJECT)
        try:
            return getattr(self, f"_open_{tracker}")(package, project, config)
        except Exception as error:  # no login, no network, no disk: each tracker has exceptions of its own
            raise InputError(f"--track {tracker}: {_one_line(error)}{OFFLINE.get(tracker, '')}") from error

    def _run_id(self, tracker: str) -> str:
        file = self.run_dir / f"{tracker}_id.txt"
        if not (self.resume_step and file.exists()):
            file.write_text(secrets.token_hex(4))
        return file.read_text()

    def _open_wandb(self, wandb: Any, project: str, config: dict[str, Any]) -> Any:
        private_folder(self.run_dir / "wandb")  # wandb also stores there what was printed
        settings = {"project": project, "name": self.name, "id": self._run_id("wandb"), "config": config}
        run = wandb.init(dir=self.run_dir, resume="allow", **settings)
        run.define_metric("*", step_metric="step")
        return run

    def _open_swanlab(self, swanlab: Any, project: str, config: dict[str, Any]) -> Any:
        private_folder(self.run_dir / "swanlab")
        settings = {"project": project, "name": self.name, "id": self._run_id("swanlab"), "config": config}
        swanlab.init(log_dir=self.run_dir / "swanlab", resume="allow", **settings)
        return swanlab

    def _open_trackio(self, trackio: Any, project: str, config: dict[str, Any]) -> Any:
        resume = "allow" if self.resume_step else "never"
        trackio.init(project, self.name, config=config, resume=resume, embed=False)
        return trackio

    def _open_mlflow(self, mlflow: Any, project: str, config: dict[str, Any]) -> Any:
        os.environ.update(MLFLOW_WAITS | os.environ)
        mlflow.set_experiment(project)
        file = self.run_dir / "mlflow_id.txt"
        if self.resume_step and file.exists():
            mlflow.start_run(run_id=file.read_text())  # whose parameters cannot change
        else:
            file.write_text(mlflow.start_run(run_name=self.name).info.run_id)
            mlflow.log_params({key: _cell(value) for key, value in config.items()})
        return mlflow

    def _open_tensorboard(self, writers: Any, _project: str, _config: dict[str, Any]) -> Any:
        private_folder(self.run_dir / "tensorboard")
        hide_from = self.resume_step + 1 if self.resume_step else 0
        return writers.SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=hide_from)


OPENERS = {name: (name, name) for name in ("wandb", "tensorboard", "trackio", "mlflow", "swanlab")}
OPENERS["tensorboard"] = "tensorboard", "torch.utils.tensorboard"
CLOSES = {"tensorboard": "close", "mlflow": "end_run"}


def _module(package: str, name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(f"--track {package}: not installed; run `pip install {package}`") from error


def _one_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _send(tracker: str, run: Any, values: Mapping[str, float], step: int) -> None:
    match tracker:
        case "wandb":
            run.log({**values, "step": step})
        case "tensorboard":
            for key, value in values.items():
                run.add_scalar(key, value, step)
        case "mlflow":
            run.log_metrics({mlflow_name(key): value for key, value in values.items()}, step)
        case _:
            run.log({**values}, step)


def mlflow_name(metric: str) -> str:
    """A name that mlflow takes: of @ it becomes _at_, as in verl, and _ of what else is refused."""
    parts = re.sub(r"[^/\w.\- :]", "_", metric.replace("@", "_at_")).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)[:250].rstrip("/")


def sample_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase, run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a scored batch for `Tracker.samples`: prompts and responses with their special tokens.
    A row with images has their names in run_dir/images, where they are written. A multi-turn episode also has how it
    ended, its turns (`turns_of`) and the errors of its tools."""
    tensors = {name: tensor.cpu() for name, tensor in batch.batch.items()}
    scores, responses = tensors["token_level_scores"].sum(1).tolist(), tensors["responses"]
    scored = tensors["response_mask"].any(1).tolist()
    attended = tensors["attention_mask"][:, -responses.shape[1] :].bool()
    rows, hashes, images, prompts = [], row_hashes(batch), keep_images(run_dir, batch), prompt_texts(batch, tokenizer)
    for i, own in enumerate(attended):
        row = {name: column[i] for name, column in batch.non_tensor_batch.items()}
        shown = {
            "index": row.get("index"),
            "data_source": row["data_source"],
            "row_hash": hashes[i],
            "prompt": prompts[i],
            "response": tokenizer.decode(responses[i][own]),
            "score": scores[i] if scored[i] else None,
            "ground_truth": row["reward_model"]["ground_truth"],
        }
        if "turn_rewards" in tensors:
            sampled, rewards = tensors["response_mask"][i][own], tensors["turn_rewards"][i][own]
            turns = turns_of(responses[i][own], sampled, rewards, tokenizer)
            shown |= {"finish_reason": row["finish_reason"], "turns": turns}
        lists = images[i], row.get("tool_errors"), row.get("tool_rewards")
        shown |= {key: value for key, value in zip(OF_SOME, lists) if value}
        rows.append(shown)
    return rows


def _cell(value: Any) -> str | float | None:
    """A number as it is; anything else as text, cut in the middle if it is long."""
    if value is None or isinstance(value, int | float):
        return value
    text = str(value).encode("utf-8", "backslashreplace").decode()
    half = TABLE_TEXT // 2
    return text if len(text) <= TABLE_TEXT else f"{text[:half]} … {text[-half:]}"


def _markdown(row: Mapping[str, Any]) -> str:
    """Each text as a block of code, so that it stays as it is."""
    indented = {key: str(value).replace("\n", "\n    ") for key, value in row.items()}
    return "\n\n".join(f"{key}\n\n    {text}" for key, text in indented.items())


def prompt_texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the model read before each response, with special tokens; an image is one placeholder."""
    prompts, columns = batch.batch["prompts"], batch.non_tensor_batch
    attended = batch.batch["attention_mask"][:, : prompts.shape[1]].bool()
    media = columns.get("multi_modal_data", [None] * len(prompts))
    with_media = "raw_prompt_ids" in columns  # these have one placeholder for each image
    ids = [
        columns["raw_prompt_ids"][i] if media[i] and with_media else row[attended[i]] for i, row in enumerate(prompts)
    ]
    return [tokenizer.decode(own) for own in ids]


def turns_of(response, sampled, rewards, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Splits one row's response, without padding, into the parts that the policy wrote (`sampled` is 1) and those that
    it was given. reward: what the turn got besides the score."""
    lengths = sampled.unique_consecutive(return_counts=True)[1].tolist()
    turns = []
    for ids, mask, given in zip(*(column.split(lengths) for column in (response, sampled, rewards))):
        by, text = "policy" if mask[0] else "environment", tokenizer.decode(ids)
        turns.append({"by": by, "text": text, "tokens": len(ids), "reward": float(given.sum())})
    return turns


def _validated(metrics: Mapping[str, Any]) -> list[str]:
    """For each data source the key that has a confidence interval: of its accuracy or, without one, its mean score."""
    return [key for key in metrics if key.startswith("val/") and f"{key}/ci_low" in metrics]


def read_rows(file: Path) -> Iterator[dict[str, Any] | None]:
    """The rows of metrics.jsonl or samples.jsonl; None for a torn last line. Raises InputError for a row that no run
    has written."""
    with file.open("rb") if file.exists() else nullcontext(()) as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _row(line, is_metrics=file.name == "metrics.jsonl") if line.endswith(b"\n") else None
            except (ValueError, OverflowError, RecursionError) as error:
                raise InputError(f"{file}, line {number}: not a row of a run: fix or delete it") from error


def _row(line: bytes, is_metrics: bool) -> dict[str, Any]:
    """Raises ValueError, OverflowError or RecursionError."""
    row = json.loads(line)
    values = row.items() if isinstance(row, dict) and is_metrics else ()
    numbers = [value for key, value in values if key != "nonfinite" and value is not None]
    if not (isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0):
        raise ValueError("no step")
    if not (
        all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
        and isinstance(row.get("nonfinite", {}), dict)
    ):
        raise ValueError("not a number")
    return row


def _rows(metrics_file: Path) -> list[dict[str, Any]]:
    return list(filter(None, read_rows(metrics_file)))


def plot_curve(metrics_file: Path, path: str | Path, title: str) -> None:
    """Plots over steps the train reward (raw and smoothed), validation with its interval, and mean response length."""
    from matplotlib.figure import Figure  # its import takes a second, which the start of a run can do without

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
    for key, color in zip(keys, ("tab:orange", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:gray")):
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
