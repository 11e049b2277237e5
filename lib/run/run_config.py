"""How a run was started, as config.json holds it: the script, its flags, digests of the files that they name.
A resume compares this with the checkpoint's; a change that alters results needs --resume-override."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import re
import shlex
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib import InputError
from lib.cli.flags import Names, OnReplay, OnResume, as_flag, flag_values, marked, walk
from lib.cli.secrets import redact, redact_values

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# keys of config.json that are not flags; "script" is compared like a flag
NO_FLAGS = {"contents", "history", "start", "effective", "no_effect"}
CHOSEN = {"rollout_engine", "micro_batch_tokens", "gradient_checkpointing", "sharding"}  # flags that may be auto
RANK_0_COUNTS = {"run_name", "config"}  # flags that may differ between ranks
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "vllm", "math-verify")
ROOT, STANDARD_LIBRARY = Path(__file__).parents[2], sysconfig.get_path("stdlib")


def describe_run(args: DataclassInstance, script: Path) -> dict[str, Any]:
    """The run as config.json holds it, without its history."""
    flags = redact_values(flag_values(args))
    named = {"script": str(script)} | _named_files(args)
    if flags["val_only"]:
        del named["train_files"]  # it reads none
    contents = {name: digest_of(redact_values(value)) for name, value in sorted(named.items())}
    return {"script": script.name, **flags, "contents": contents}


def describe_start(args: DataclassInstance, script: Path, trains: bool) -> dict[str, tuple[str, str]]:
    """{what: (text to show, what must be equal on all ranks)}: flags, code, packages, contents of files.

    A rank that does not train (`trains`) needs no files. Raises InputError for a file that cannot be read."""
    start = {"the script": (script.name, digest_of(str(script)))}
    files = _named_files(args)
    try:
        for name, value, _ in _chosen(args):
            value = redact_values(value)
            shown = shlex.join(map(str, value if isinstance(value, list) else [value])) or "''"
            if name not in RANK_0_COUNTS and (trains or name not in files):
                start[as_flag(name)] = (shown, digest_of(value) if name in files else shown)
        for name, file in _loaded_code():
            start[name] = ("", digest_of(str(file)))
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return start | {name: (number, number) for name, number in versions.items()}


def _loaded_code() -> Iterator[tuple[str, Path]]:
    """(name, file) of plainrl's code, and of imported modules that are neither packages nor Python's."""
    folders = [ROOT / name for name in ("lib", "agent", "servers", "planner", "rewards")]
    code = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    yield from ((str(file.relative_to(ROOT)), file) for file in code)
    for name, module in sorted(sys.modules.items()):
        file = Path(getattr(module, "__dict__", {}).get("__file__") or "")
        installed = {"site-packages", "dist-packages"} & {*file.parts}
        known = installed or file.is_relative_to(STANDARD_LIBRARY) or file in code or name == "__main__"
        if not known and file.suffix == ".py" and file.is_file():
            yield f"the module {name}", file


def code_files(args: DataclassInstance, script: Path) -> dict[str, Path]:
    """{name in starts/n: path} of the script and of the Python files that flags name."""
    named = [path for value in _named_files(args).values() for path, _ in _paths(value)]
    paths = dict.fromkeys(Path(path).expanduser() for path in named if path.endswith(".py"))
    code = enumerate(filter(Path.is_file, paths), 1)
    return {script.name: script} | {f"code/{number}-{path.name}": path for number, path in code}


def code_changes(checkpoint: Path, code: dict[str, Path]) -> str:
    """A unified diff, without secrets, from the code that wrote the checkpoint to `code` (code_files)."""
    before = read_json(checkpoint / "config.json") or {}
    renamed = {next(iter(code)): before.get("script")}
    lines: list[str] = []
    for name, path in code.items():
        kept = checkpoint.parent.parent / f"starts/{before.get('start')}/{renamed.get(name, name)}"
        if kept.is_file():
            was, is_now = (file.read_text(errors="replace").splitlines() for file in (kept, path))
            lines += difflib.unified_diff(was, is_now, f"a/{name}", f"b/{name}", lineterm="")
    return redact("".join(f"{line}\n" for line in lines))


def _named_files(args: DataclassInstance) -> dict[str, Any]:
    return {name: value for name, value, marks in _chosen(args) if Names.FILES in marks}


def _chosen(args: Any) -> Iterator[tuple[str, Any, tuple]]:
    """What `walk` yields, with the engine that --rollout-engine auto has become."""
    for name, value, marks in walk(args):
        yield name, args.rollout.engine if name == "rollout_engine" else value, marks


def _with_chosen(config: dict[str, Any]) -> dict[str, Any]:
    """A run's config with what auto was for it, as that differs between machines."""
    return config | {name: value for name, value in config.get("effective", {}).items() if name in CHOSEN}


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in the file; None if there is no file. Raises InputError if it holds no object."""
    if not file.exists():
        return None
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        advice = "fix it; without it flags are not compared"
        raise InputError(f"{file}: not a JSON object ({error}): {advice}") from error


def compare(checkpoint: Path, now: dict[str, Any], args: DataclassInstance, overrides: set[str]) -> dict[str, list]:
    """{flag: [was, is]} of what changed since the checkpoint. Prints it, and flags that are new or gone.

    now: describe_run of `args`. Raises InputError for a change that alters results and is not in `overrides`, or
    that cannot be overridden."""
    before = read_json(checkpoint / "config.json")
    if before is None:
        print(f"{checkpoint} has no config.json: its flags are not compared", flush=True)
        return {}
    before, now = _with_chosen(before), _with_chosen(now)
    not_compared = NO_FLAGS | marked(args, OnResume.NOT_COMPARED)
    if now["val_only"]:
        not_compared |= {"train_files"}
    ours, theirs = (config.keys() - not_compared for config in (now, before))
    changed = _changed(before, now, ours & theirs)
    may_change = marked(args, OnResume.MAY_CHANGE) | overrides
    if now["lr_schedule"] != "constant":  # the schedule ends with the last step
        may_change -= {"total_steps"} - overrides
    refused = [flag for flag in changed if flag not in may_change]
    if refused:
        raise InputError(
            f"{checkpoint} belongs to another run: {_joined(changed, refused)}. Undo it, set another --run-name "
            f"without --resume, or allow it with --resume-override {' '.join(refused)}"
        )
    for flag in changed:
        if why := _never(flag, now):
            raise InputError(f"{_joined(changed, [flag])}: {why}, so it needs a new run")
    new = ", ".join(f"{_flag(flag)} {now[flag]!r}" for flag in now if flag in ours - theirs)
    gone = ", ".join(f"{_flag(flag)} {before[flag]!r}" for flag in sorted(theirs - ours))
    notes = {"changed": _joined(changed, changed), "not known to the checkpoint": new}
    notes[f"not known to {now['script']}"] = gone
    for title, text in notes.items():
        if text:
            print(f"{title}: {text}", flush=True)
    return {flag: [before[flag], now[flag]] for flag in changed}


def compare_recording(recording: Path, now: dict[str, Any], args: DataclassInstance) -> None:
    """Prints what changed since the recording. Raises InputError for flags that its samples depend on."""
    before, now = _with_chosen(read_json(recording / "config.json") or {}), _with_chosen(now)
    compared = before.keys() - NO_FLAGS - {"replay"} - marked(args, OnResume.NOT_COMPARED)
    changed = _changed(before, now, compared)
    if refused := sorted(changed.keys() & marked(args, OnReplay.AS_RECORDED)):
        raise InputError(
            f"--replay {recording}: {_joined(changed, refused)}. The recorded samples and scores depend on it: "
            f"undo it (--config {recording}/config.json reads all flags), or sample again without --replay"
        )
    note = f"; changed: {_joined(changed, changed)}" if changed else ", no flag has changed"
    needs = "steps need no engine and no scorer; validation samples with hf"
    print(f"replay of {recording}: {needs}{note}", flush=True)


def checked_overrides(overrides: Sequence[str], now: dict[str, Any]) -> set[str]:
    names = {name.lstrip("-").replace("-", "_") for name in overrides}
    if unknown := names - (now.keys() - NO_FLAGS):
        raise InputError(f"--resume-override {' '.join(sorted(unknown))}: no flag of {now['script']}")
    return names


def _never(flag: str, now: dict[str, Any]) -> str | None:
    """Why --resume-override cannot allow a change of the flag; None if it can."""
    if flag in ("lora_rank", "lora_target_modules", "freeze"):
        return "the checkpoint holds other weights"
    rate_changes = now["lr_schedule"] != "constant" or now["warmup_steps"]
    if flag in ("num_mini_batches", "update_epochs") and rate_changes:
        return "the schedule of the learning rate counts updates"
    return None


def _changed(before: dict[str, Any], now: dict[str, Any], flags: Collection[str]) -> dict[str, list[str]]:
    """{flag: how it, or what its files hold, differs, for each of its settings}, of the flags that do."""
    changed: dict[str, list[str]] = {}
    was, is_now = _flat(before), _flat(now)
    for name in (name for name in is_now | was if name.partition(".")[0] in flags):
        values: Any = was.get(name), is_now.get(name)
        digests = [(config.get("contents") or {}).get(name) for config in (before, now)]
        if name == "rollout_engine" and all(re.fullmatch("vllm|.*://.*", engine) for engine in values):
            continue  # vLLM draws the same samples here and on any server
        if all(digests) and digests[0] == digests[1]:
            continue  # the same files, perhaps at another place
        if values[0] != values[1]:
            text = f"{_flag(name)} was {values[0]}, is {values[1]}"
        elif all(digests):
            text = f"{_flag(name)} {values[1]} holds other {'code' if name == 'script' else 'data'}"
        else:
            continue
        changed.setdefault(name.partition(".")[0], []).append(text)
    return changed


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their whole names, such as multi_turn.tools."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        name = prefix + name
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def _joined(changed: dict[str, list[str]], flags: Iterable[str]) -> str:
    return ", ".join(text for flag in flags for text in changed[flag])


def _flag(name: str) -> str:
    return name if name == "script" else as_flag(name)


def digest_of(value: str | list[str]) -> str:
    """A digest of what the paths in a flag's value hold, wherever they lie; of other values, of the text.

    Of a file above 64 MiB it takes the size and only 64 blocks: other weights differ everywhere."""
    digest = hashlib.sha256()
    for path, function in _paths(value):
        files = _files_of(path)
        names = [file.name for file in files] if len(files) > 1 else []
        digest.update(json.dumps([function, names]).encode())
        for file in files:
            size, block = file.stat().st_size, 2**16
            digest.update(str(size).encode())
            with file.open("rb") as data:
                for start in range(0, size, block if size <= 2**26 else size // 64):
                    data.seek(start)
                    digest.update(data.read(block))
        if not files:
            digest.update(path.encode())
    return digest.hexdigest()[:16]


def _paths(value: str | list[str]) -> Iterator[tuple[str, str]]:
    """(path, function) of what a flag's value names: a path, search:FILE, path/to/file.py:function, the words of
    a command or of "bash:FOLDER path/to/file.py:name"."""
    for text in [value] if isinstance(value, str) else value:
        is_path = os.path.exists(text)  # noqa: PTH110  Path.exists raises OSError for a long text
        for word in [text] if is_path else text.split(" "):
            path, function = word.rsplit(":", 1) if ".py:" in word else (word, "")
            yield re.sub("^(search|gym|bash):", "", path), function


def _files_of(name: str) -> list[Path]:
    """The file itself; for a folder, the files of a model, or of its tasks; [] if it is no path."""
    from lib.data.remote import copies  # imports torch, which the run page does without

    path = Path(copies.get((name, True), name)).expanduser()
    if name and any(path.glob("*/tests/test.sh")):
        return sorted(file for file in path.rglob("*") if file.is_file())
    if name and path.is_dir():
        suffixes = {".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".txt", ".py"}
        return sorted(file for file in path.iterdir() if file.suffix in suffixes)
    return [path] if path.is_file() else []
