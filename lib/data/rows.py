"""Files, folders and hub data sets -> rows in verl's form.

A row is {"prompt": [{"role": ..., "content": ...}, ...], "data_source": ..., "reward_model": {"ground_truth": ...},
"extra_info": {"index": ..., "tools_kwargs": ..., "interaction_kwargs": ...}} (extra_info and its keys may be absent).

In a struct column Arrow gives every row the fields of all rows: a null field of parquet means an absent one, and is
removed; JSON's stay. Columns of several files are not merged: ground_truth may be text in one and a number in another.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np

from lib import InputError
from lib.args.checks import HUB_ID, check_hub, check_source

if TYPE_CHECKING:
    import datasets  # its import takes a second, which rows of JSON do not need

MEDIA_COLUMNS = ("images", "videos")
OF_VERL = ("data_source", "reward_model", "extra_info", *MEDIA_COLUMNS)


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


def _plain(value, nulls: bool):
    """The value with numpy's arrays and scalars as Python's. nulls: whether None fields stay."""
    if isinstance(value, dict):
        return {key: _plain(item, nulls) for key, item in value.items() if nulls or item is not None}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return [_plain(item, nulls) for item in value] if isinstance(value, list | tuple) else value


def _shown(value) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- rows in other forms than verl's: text prompts, TRL's columns, questions and answers ---------


def template_fields(template: str) -> list[str]:
    """The columns that a --prompt-template names. Raises InputError for anything but text and {column}."""
    form = f"--prompt-template {template!r}"
    try:
        parts = [*Formatter().parse(template)]
    except ValueError as error:
        raise InputError(f"{form}: {error}; write {{{{ and }}}} for braces that stay") from error
    fields = [(name, conversion, spec) for _, name, spec, conversion in parts if name is not None]
    for name, conversion, spec in fields:
        if not name.isidentifier() or conversion or spec:
            raise InputError(f"{form}: {{{name}}} must be the name of a column, nothing more")
    if not fields:
        raise InputError(f"{form}: names no column, so that all prompts would be the same; write {{question}}, say")
    return [name for name, _, _ in fields]


@dataclass(frozen=True)
class RowForm:
    """Which columns of a row are what (--columns, --prompt-template, --system-prompt)."""

    columns: Mapping[str, str] = field(default_factory=dict)
    prompt_template: str = ""
    system_prompt: str = ""

    def required(self) -> list[str]:
        """The columns without which there is no prompt or no answer."""
        prompt = template_fields(self.prompt_template) if self.prompt_template else [self.column("prompt")]
        return [*prompt, *filter(None, [self.columns.get("answer")])]

    def column(self, name: str) -> str:
        """The rows' name of verl's column."""
        return self.columns.get(name, name)

    def read(self, columns: Iterable[str]) -> list[str]:
        wanted = {*self.required(), *self.columns, *map(self.column, OF_VERL)}
        return [column for column in columns if column in wanted]

    def in_verls_form(self, row: dict, source: str) -> dict:
        """The row with verl's columns. Its answer becomes the ground truth, `source` its data_source if it has none.
        extra_info gets the columns that are not verl's, if the row has none or --columns took their names. Raises
        InputError, without the row's number, if the answer or a column of the template is missing."""
        prompt = self._filled(row) if self.prompt_template else row.get(self.column("prompt"))
        given = {name: row[self.column(name)] for name in OF_VERL if row.get(self.column(name)) is not None}
        if answer := self.columns.get("answer"):
            if row.get(answer) is None:
                raise InputError(f"no answer in column {answer!r}")
            given["reward_model"] = {"ground_truth": row[answer]}
        read = {self.column(name) for name in ("prompt", *OF_VERL)}
        more = {name: value for name, value in row.items() if name not in read}
        if isinstance(own := given.get("extra_info"), dict):
            given["extra_info"] = {name: more[name] for name in self.columns if name in more} | own
        defaults = {"data_source": source or None, "reward_model": {}, "extra_info": more}
        return defaults | given | {"prompt": self.prompt(prompt)}

    def _filled(self, row: dict) -> str:
        columns = {}
        for name in template_fields(self.prompt_template):
            value = row.get(name)
            if name == self.column("prompt") and (alone := only_text(value)) is not None:
                value = alone
            if not isinstance(value, str | int | float):
                raise InputError(f"--prompt-template needs text in column {name!r}, which is {_kind(value)}")
            columns[name] = value
        return self.prompt_template.format_map(columns)

    def prompt(self, prompt: Any) -> Any:
        """The messages, with the system prompt if they have none. A text is one message of the user."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not self.system_prompt or not isinstance(messages, list):
            return messages
        first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
        has_one = first.get("role") in ("system", "developer")
        return messages if has_one else [{"role": "system", "content": self.system_prompt}, *messages]


def without_nulls(value: Any) -> Any:
    """Messages without null fields, which templates would take for given. A call's arguments stay as they are."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None}
        return {key: item if key == "arguments" else without_nulls(item) for key, item in kept.items()}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def arguments_of(value: Any) -> dict:
    """A tool call's arguments, perhaps as JSON text (OpenAI's form); none, "" and null are {}. Raises ValueError."""
    found = value
    with suppress(ValueError, RecursionError):
        found = json.loads(value) if isinstance(value, str) and value else value
    if found is None or found == "":
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"its arguments must be an object or the JSON text of one, not {str(value)[:60]!r}")
    return found


def only_text(messages: Any) -> str | None:
    """The content of a single message."""
    if isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0], Mapping):
        content = messages[0].get("content")
        return content if isinstance(content, str) else None
    return None


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
