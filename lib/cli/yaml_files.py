"""YAML files of flags (--config, sweeps) and of tools; JSON is YAML, too."""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from lib import InputError

LARGEST = 2**20  # characters of a file


class SafeLoader(yaml.SafeLoader):
    """Refuses tags, as PyYAML's, aliases, which may stand for billions of values, and keys that are there twice."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="an alias (*); write the value out", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        values = super().construct_mapping(node, deep)
        if len(values) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key is there twice", problem_mark=node.start_mark)
        return values


class FlagLoader(SafeLoader):
    """Values are texts, as on a command line, but for true, false and null: YAML itself reads 010 as 8."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


FlagLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|True|false|False)$"), [*"tTfF"])
FlagLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(null|~|)$"), ["n", "~", ""])


def read_yaml(path: str | Path, where: str, loader: type[SafeLoader] = FlagLoader) -> Any:
    """What the file holds; None if it is empty. Raises InputError, which begins with `where`."""
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
        values = yaml.load(text[:LARGEST], Loader=loader)
    except yaml.MarkedYAMLError as error:
        raise InputError(f"{where} line {error.problem_mark.line + 1}: {error.problem}") from error
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply") from error
    except (OSError, RuntimeError, ValueError, OverflowError, yaml.YAMLError) as error:  # RuntimeError: ~name of nobody
        raise InputError(f"{where}: cannot be read: {str(error).splitlines()[0]}") from error
    if len(text) > LARGEST:
        raise InputError(f"{where}: larger than {LARGEST} characters")
    return values


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
    if re.search("[\0\ud800-\udfff]", "".join(texts)):
        raise InputError(f"{where}: a character that no command line can hold")
    return [flag, *texts]
