"""Trackers of --track, which read their usual environment.

accelerate.tracking has them all, but needs a PartialState, which picks devices and process groups itself."""

import os
import re
import secrets
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from lib import InputError
from lib.cli.secrets import private_folder

Table = list[dict[str, Any]]  # rows with the same keys
PROJECT = "plainrl"  # of a tracker whose own variable does not name one
TABLE_TEXT = 4000  # characters of a text in a table
# without these it waits 20 minutes for a server that does not answer
MLFLOW_WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


@dataclass
class External:
    """A tracker whose package has log and finish. resume_step: of the loaded checkpoint; 0: a new run."""

    package: Any
    run_dir: Path
    name: str
    config: dict[str, Any]
    resume_step: int
    module: ClassVar[str]
    project_variable: ClassVar[str] = ""
    offline: ClassVar[str] = ""

    def open(self) -> None:
        raise NotImplementedError

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.package.log({**values}, step)

    def show(self, name: str, table: Table, step: int) -> None:
        """Adds samples, if the tracker has tables or texts."""

    def close(self) -> None:
        self.package.finish()

    def settings(self) -> dict[str, Any]:
        """What wandb and swanlab call alike."""
        if not (self.resume_step and self.id_file.exists()):
            self.id_file.write_text(secrets.token_hex(4))
        settings = {"project": self.project, "name": self.name, "config": self.config}
        return settings | {"id": self.id_file.read_text(), "resume": "allow"}

    @property
    def project(self) -> str:
        return os.environ.get(self.project_variable, PROJECT)

    @property
    def id_file(self) -> Path:
        return self.run_dir / f"{self.module}_id.txt"

    @property
    def folder(self) -> Path:
        return private_folder(self.run_dir / self.module.rpartition(".")[2])  # it may hold what was printed


class Wandb(External):
    """It drops rows whose step goes back, so the step is a logged value."""

    module, project_variable = "wandb", "WANDB_PROJECT"
    offline = " (or WANDB_MODE=offline, and `wandb sync` later)"

    def open(self) -> None:
        private_folder(self.run_dir / "wandb")
        self.package.init(dir=self.run_dir, **self.settings())
        self.package.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.package.log({**values, "step": step})

    def show(self, name: str, table: Table, step: int) -> None:
        """With the images themselves, which are uploaded with the table."""
        columns, rows = [*table[0]], cells(table)
        if "images" in columns:
            for row, sample in zip(rows, table):
                files = [self.run_dir / "images" / name for name in sample["images"] or ()]
                row[columns.index("images")] = [self.package.Image(str(file)) for file in files] or None
        self.package.log({name: self.package.Table(columns, rows), "step": step})


class Swanlab(External):
    module, project_variable = "swanlab", "SWANLAB_PROJ_NAME"
    offline = " (or SWANLAB_MODE=offline, and `swanlab sync` later)"

    def open(self) -> None:
        self.package.init(log_dir=self.folder, **self.settings())

    def show(self, name: str, table: Table, step: int) -> None:
        self.package.log({name: self.package.Text(markdown(table))}, step)


class Trackio(External):
    module, project_variable = "trackio", "TRACKIO_PROJECT"

    def open(self) -> None:
        resume = "allow" if self.resume_step else "never"
        self.package.init(self.project, self.name, config=self.config, resume=resume, embed=False)

    def show(self, name: str, table: Table, step: int) -> None:
        self.package.log({name: self.package.Table([*table[0]], cells(table))}, step)


class Mlflow(External):
    module, project_variable = "mlflow", "MLFLOW_EXPERIMENT_NAME"

    def open(self) -> None:
        os.environ.update(MLFLOW_WAITS | os.environ)
        self.package.set_experiment(self.project)
        if self.resume_step and self.id_file.exists():
            self.package.start_run(run_id=self.id_file.read_text())  # whose parameters cannot change
        else:
            self.id_file.write_text(self.package.start_run(run_name=self.name).info.run_id)
            self.package.log_params({key: cell(value) for key, value in self.config.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.package.log_metrics({mlflow_name(key): value for key, value in values.items()}, step)

    def close(self) -> None:
        self.package.end_run()


class Tensorboard(External):
    module = "torch.utils.tensorboard"

    def open(self) -> None:
        hide_from = self.resume_step + 1 if self.resume_step else 0
        self.writer = self.package.SummaryWriter(str(self.folder), purge_step=hide_from)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def show(self, name: str, table: Table, step: int) -> None:
        self.writer.add_text(name, markdown(table), step)

    def close(self) -> None:
        self.writer.close()


KINDS = {kind.__name__.lower(): kind for kind in (Wandb, Tensorboard, Trackio, Mlflow, Swanlab)}


def open_tracker(name: str, run_dir: Path, title: str, config: dict[str, Any], resume_step: int) -> External:
    """Raises InputError for a tracker that is not installed, or has no login or no network."""
    try:
        package = import_module(KINDS[name].module)
    except ImportError as error:
        raise InputError(f"--track {name}: not installed; run `pip install {name}`") from error
    try:
        tracker = KINDS[name](package, run_dir, title, config, resume_step)
        tracker.open()
        return tracker
    except Exception as error:  # each tracker has exceptions of its own
        raise InputError(f"--track {name}: {first_line(error)}{KINDS[name].offline}") from error


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def mlflow_name(metric: str) -> str:
    """A name that mlflow takes: of @ it becomes _at_, as in verl, and _ of what else is refused."""
    parts = re.sub(r"[^/\w.\- :]", "_", metric.replace("@", "_at_")).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)[:250].rstrip("/")


def cells(table: Table) -> list[list]:
    return [[cell(value) for value in row.values()] for row in table]


def markdown(table: Table) -> str:
    """Each text as a block of code, so that it stays as it is."""
    texts = [(name, str(cell(value))) for row in table for name, value in row.items()]
    blocks = [f"{name}\n\n" + textwrap.indent(text, "    ", lambda _: True) for name, text in texts]
    return "\n\n".join(blocks)


def cell(value: Any) -> str | float | None:
    """A number as it is; anything else as text, cut in the middle if it is long."""
    if value is None or isinstance(value, int | float):
        return value
    text = str(value).encode("utf-8", "backslashreplace").decode()
    half = TABLE_TEXT // 2
    return text if len(text) <= TABLE_TEXT else f"{text[:half]} … {text[-half:]}"
