"""YAML files of flags (--config, sweeps); JSON is YAML, too."""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from lib import InputError


class FlagLoader(yaml.SafeLoader):
    """Values are texts, as on a command line, but for true, false and null: YAML itself reads 010 as 8."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


FlagLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|True|false|False)$"), [*"tTfF"])
FlagLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(null|~|)$"), ["n", "~", ""])


def read_yaml(path: str | Path, where: str) -> Any:
    """What the file holds; None if it is empty. Raises InputError, which begins with `where`."""
    try:
        return yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), Loader=FlagLoader)
    except yaml.MarkedYAMLError as error:
        raise InputError(f"{where} line {error.problem_mark.line + 1}: {error.problem}") from error
    except (OSError, RuntimeError, ValueError, OverflowError, yaml.YAMLError) as error:  # RuntimeError: ~nobody, depth
        raise InputError(f"{where}: cannot be read: {str(error).splitlines()[0]}") from error


def words_of(flag: str, value: Any, where: str, is_switch: bool) -> list[str]:
    """The words of a command line that give the flag this value. Raises InputError for a value that it cannot have."""
    if is_switch:
        if not isinstance(value, bool):
            raise InputError(f"{where}: give true or false")
        head, dot, last = flag.removeprefix("--").rpartition(".")
        return [f"--{head}{dot}{'' if value else 'no-'}{last}"]
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict) for item in items):
        raise InputError(f"{where} takes no mapping; if it takes JSON, write that as one text in quotes")
    if not all(isinstance(item, str | int | float | None) for item in items):
        raise InputError(f"{where}: give a list of plain values")
    texts = list(map(str, items))
    if wrong := [text for text in texts if text.startswith("--")]:
        raise InputError(f"{where} {wrong[0][:100]}: a value does not begin with --")
    return [flag, *texts]
