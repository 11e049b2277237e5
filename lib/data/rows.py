"""Files, folders and hub data sets -> rows in verl's form.

A row is {"prompt": [{"role": ..., "content": ...}, ...], "data_source": ..., "reward_model": {"ground_truth": ...},
"extra_info": {"index": ..., "tools_kwargs": ..., "interaction_kwargs": ...}} (extra_info and its keys may be absent).

In a struct column Arrow gives every row the fields of all rows: a null field of parquet means an absent one, and is
removed; JSON's stay. Columns of several files are not merged: ground_truth may be text in one and a number in another.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lib import InputError
from lib.args import HUB_ID, check_hub, check_source

if TYPE_CHECKING:
    import datasets  # its import takes a second, which rows of JSON do not need

DEEPEST = 100  # levels of lists and dicts in a row


def _read_json(path: Path) -> list[dict]:
    """The rows of a .jsonl file, or of a .json file that is either one array or one object a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if text.lstrip().startswith("["):
        place, rows = "row", list(enumerate(_parsed(text, path)))
    else:
        lines = enumerate(text.split("\n"), start=1)  # not splitlines(): U+2028 may stand in a string
        place, rows = "line", [(number, _parsed(line, path, number)) for number, line in lines if line.strip()]
    for number, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{path} {place} {number}: a {type(row).__name__}, but a row must be an object {{...}}")
    return [row for _, row in rows]


def _parsed(text: str, path: Path, number: int | None = None):
    """number: if `text` is one line of the file."""
    advice = "correct or remove the line" if number else "correct the file"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} line {number or error.lineno}: not valid JSON ({error.msg}); {advice}") from error
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise InputError(f"{path}{f' line {number}' if number else ''}: not readable ({why}); {advice}") from error


def read_rows(source: "str | Path | datasets.Dataset") -> Sequence[dict]:
    """The rows of one source: a .parquet / .json / .jsonl file, a folder written by Dataset.save_to_disk, a
    datasets.Dataset, or a hub id "owner/name", "owner/name:split" or "owner/name:config:split". Raises InputError."""
    if not isinstance(source, str | Path):
        if isinstance(source, _datasets().Dataset):
            return source
        raise InputError(f"data files: got a {type(source).__name__}; give paths, a hub id or a datasets.Dataset")
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "state.json").is_file():
            files = sorted(p.name for p in path.iterdir())[:8]
            raise InputError(f"{path}: a folder that holds no saved Dataset; name the files in it: {', '.join(files)}")
        return _datasets().load_from_disk(str(path))
    if path.is_file():
        if path.suffix in (".json", ".jsonl"):
            return _read_json(path)
        if path.suffix != ".parquet":
            raise InputError(f"{path}: unsupported extension {path.suffix!r}; use .parquet, .jsonl or .json")
        try:
            return _datasets().Dataset.from_parquet(str(path))
        except (OSError, ValueError, _datasets().exceptions.DatasetGenerationError) as error:
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise InputError(f"{path}: not readable as parquet ({reason}); write the file again") from error
    check_source(str(source))
    hub = HUB_ID.fullmatch(str(source))
    assert hub is not None  # else check_source raises
    return load_split(hub["id"], hub["split"] or "train", config=hub["config"])


def load_split(hub_id: str, split: str, *, config: str | None = None, local_dir: Path | None = None) -> Sequence[dict]:
    """A split of a data set on the hub, or of a copy: the .parquet / .jsonl / .json files under local_dir (or its
    folder `config`) whose names begin with `split`. Raises InputError if there is none."""
    if local_dir is None:
        check_hub(hub_id)
        try:
            return _datasets().load_dataset(hub_id, config, split=split)
        except Exception as error:  # the hub client's errors have no common class
            reason = str(error).partition("\n")[0]
            what = f"{hub_id}: not a file here, and split {split!r} cannot be had from the hub ({reason})"
            raise InputError(f"{what}; check the name and the network, or use a local copy") from error
    folder = local_dir / config if config and (local_dir / config).is_dir() else local_dir
    files = sorted(path for path in folder.rglob(f"{split}*") if path.suffix in (".parquet", ".jsonl", ".json"))
    if not files:
        raise InputError(f"{folder}: no {split}*.parquet, {split}*.jsonl or {split}*.json in it; check --local-dir")
    parts = [read_rows(path) for path in files]
    return parts[0] if len(parts) == 1 else [row for rows in parts for row in rows]  # one alone stays in its file


def _datasets() -> Any:
    """The library, imported only where it is needed, without its progress bars, which each rank would show."""
    import datasets

    datasets.disable_progress_bars()
    return datasets


def _plain(value, nulls: bool, depth: int = 0):
    """The value with numpy's arrays and scalars as Python's. nulls: whether None fields stay. Raises RecursionError if
    it is nested deeper than DEEPEST, so that templates, say, can recurse."""
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, dict):
        return {key: _plain(item, nulls, depth + 1) for key, item in value.items() if nulls or item is not None}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return [_plain(item, nulls, depth + 1) for item in value] if isinstance(value, list | tuple) else value


def _shown(value) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
