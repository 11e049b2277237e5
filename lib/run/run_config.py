"""How a run was started, as config.json holds it: the script's name, its flags, digests of the files that flags name.

A resume compares this with the checkpoint's. A change that alters results needs --resume-override, and is recorded.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from lib import InputError
from lib.cli.flags import Names, OnReplay, OnResume, as_flag, flag_values, marked, walk
from lib.cli.secrets import struck_values

NO_FLAGS = {"contents", "history"}  # keys of config.json that are not flags; "script" is compared like a flag


def describe_run(args: Any, script: str) -> dict[str, Any]:
    """The run as config.json holds it, without its history."""
    flags = struck_values(flag_values(args))
    of_files = marked(args, Names.FILES) - ({"train_files"} if flags["val_only"] else set())  # val_only reads none
    contents = {flag: _digest(flags[flag]) for flag in sorted(of_files)}
    return {"script": script, **flags, "contents": contents}


def not_default(args: Any) -> dict[str, list]:
    """{name: [value, default]} of the flags that differ from their default, {name: [value]} of those that have none.
    The name of a setting has dots."""
    required = {field.name: getattr(args, field.name) for field in fields(args) if _has_no_default(field)}
    defaults = {name: value for name, value, _ in walk(type(args)(**required)) if name not in required}
    return {
        name: [value, defaults[name]] if name in defaults else [value]
        for name, value, _ in walk(args)
        if name not in defaults or value != defaults[name]
    }


def _has_no_default(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in the file; None if there is no file. Raises InputError if the file holds no object."""
    if not file.exists():
        return None
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise InputError(f"{file}: not a JSON object ({error}): mend it; without it flags are not compared") from error


def compare(checkpoint: Path, now: dict[str, Any], args: Any, overrides: set[str]) -> dict[str, list]:
    """{flag: [was, is]} for each flag that has changed since the checkpoint. Prints these, and flags that are new or
    gone.

    now: describe_run of `args`. The marks on the fields of `args` say what a resume may change.

    Raises InputError for a change that alters results and is not in `overrides`, or cannot be overridden.
    """
    files = (checkpoint / "config.json", checkpoint.parent.parent / "config.json")
    before = next(filter(None, map(read_json, files)), None)
    if before is None:
        print(f"{checkpoint} has no config.json: its flags are not compared", flush=True)
        return {}
    not_compared = NO_FLAGS | marked(args, OnResume.NOT_COMPARED) | ({"train_files"} if now["val_only"] else set())
    ours, theirs = (config.keys() - not_compared for config in (now, before))
    changed = {flag: [before[flag], now[flag]] for flag in now if flag in ours & theirs and _differs(flag, before, now)}
    may_change = marked(args, OnResume.MAY_CHANGE) | overrides
    if now["lr_schedule"] != "constant":  # the schedule ends with the last step
        may_change -= {"total_steps"} - overrides
    refused = [flag for flag in changed if flag not in may_change]
    if refused:
        raise InputError(
            f"{checkpoint} is of another run: {_changes(refused, changed)}. Put that back, give another --run-name "
            f"without --resume, or consent with --resume-override {' '.join(refused)}"
        )
    for flag in changed:
        if why := _never(flag, now):
            raise InputError(f"{_changes([flag], changed)}: {why}, so it needs a new run")
    for title, lines in {
        "changed": _changes(changed, changed),
        "not known to the checkpoint": ", ".join(
            f"{_flag(flag)} {now[flag]!r}" for flag in now if flag in ours - theirs
        ),
        f"not known to {now['script']}": ", ".join(f"{_flag(flag)} {before[flag]!r}" for flag in sorted(theirs - ours)),
    }.items():
        if lines:
            print(f"{title}: {lines}", flush=True)
    return changed


def compare_recording(recording: Path, now: dict[str, Any], args: Any) -> None:
    """Prints what has changed since the recording. Raises InputError for flags that it was sampled or scored with."""
    before = read_json(recording / "config.json")
    skipped = NO_FLAGS | {"replay"} | marked(args, OnResume.NOT_COMPARED)
    changed = {
        flag: [before[flag], now[flag]]
        for flag in now
        if flag in before.keys() - skipped and _differs(flag, before, now)
    }
    if refused := sorted(changed.keys() & marked(args, OnReplay.AS_RECORDED)):
        raise InputError(
            f"--replay {recording}: {_changes(refused, changed)}. What was sampled and scored stays as it is: put that "
            f"back (--config {recording}/config.json reads all flags), or sample anew without --replay"
        )
    print(
        f"replay of {recording}: steps need no engine and no scorer; validation samples with hf"
        + (f"; changed: {_changes(changed, changed)}" if changed else ", no flag has changed"),
        flush=True,
    )


def checked_overrides(overrides: Sequence[str], now: dict[str, Any]) -> set[str]:
    names = {name.lstrip("-").replace("-", "_") for name in overrides}
    if unknown := names - (now.keys() - NO_FLAGS):
        raise InputError(f"--resume-override {' '.join(sorted(unknown))}: no flag of {now['script']}")
    return names


def _never(flag: str, now: dict[str, Any]) -> str | None:
    """Why --resume-override cannot allow a change of the flag; None if it can."""
    if flag in ("lora_rank", "lora_target_modules", "freeze"):
        return "the checkpoint holds other weights"
    if flag in ("num_mini_batches", "update_epochs") and (now["lr_schedule"] != "constant" or now["warmup_steps"]):
        return "the schedule of the learning rate counts updates"
    return None


def _differs(flag: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    was, is_now = ((config.get("contents") or {}).get(flag) for config in (before, now))
    if was and is_now:
        return was != is_now
    if flag == "rollout_engine":  # vLLM draws the same samples here and on any server
        return (before[flag] == "hf") != (now[flag] == "hf")
    return before[flag] != now[flag]


def _changes(flags: Iterable[str], changed: dict[str, list]) -> str:
    texts = []
    for flag, was, is_now in _leaves(flags, changed):
        texts.append(
            f"{_flag(flag)} was {was}, is {is_now}" if was != is_now else f"{_flag(flag)} {was} holds other data"
        )
    return ", ".join(texts)


def _leaves(flags: Iterable[str], changed: dict[str, list]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (flag, was, is now). Of a flag with several settings only those that differ."""
    for flag in flags:
        was, is_now = changed[flag]
        if isinstance(was, dict) and isinstance(is_now, dict):
            inner = {name: [was.get(name), is_now.get(name)] for name in was | is_now}
            differ = [name for name, (before, now) in inner.items() if before != now]
            yield from ((f"{flag}.{name}", *rest) for name, *rest in _leaves(differ, inner))
        else:
            yield flag, was, is_now


def _flag(name: str) -> str:
    return name if name == "script" else as_flag(name)


def _digest(value: str | list[str]) -> str:
    """A digest of what the paths in a flag's value hold, wherever they lie. If it is no path, of the value itself."""
    digest = hashlib.sha256()
    for text in [value] if isinstance(value, str) else value:
        path, function = text.rsplit(":", 1) if ".py:" in text else (text, "")
        files = _files_of(path)
        digest.update(json.dumps([function, [file.name for file in files] if len(files) > 1 else []]).encode())
        for file in files:
            _add_file(digest, file)
        if not files:
            digest.update(path.encode())
    return digest.hexdigest()[:16]


def _files_of(name: str) -> list[Path]:
    """The file itself; for a folder, the files of a model; [] if it is no path."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        suffixes = {".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".txt", ".py"}
        return sorted(file for file in path.iterdir() if file.suffix in suffixes)
    return [path] if path.is_file() else []


def _add_file(digest: Any, file: Path) -> None:
    """Adds the file's size and content. Above 64 MiB it adds only 64 blocks: other weights differ everywhere."""
    size, block = file.stat().st_size, 2**16
    digest.update(str(size).encode())
    with file.open("rb") as data:
        for start in range(0, size, block if size <= 2**26 else size // 64):
            data.seek(start)
            digest.update(data.read(block))
