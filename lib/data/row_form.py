"""Rows in other forms than verl's: text prompts, TRL's columns, a data set of questions and answers."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from lib import InputError

MEDIA_COLUMNS = ("images", "videos")
OF_VERL = ("data_source", "reward_model", "extra_info", *MEDIA_COLUMNS)


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
