"""--help: the flags that are used often, --help GROUP: those of one group, --help all: all flags. tyro prints them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, get_type_hints

import tyro
from tyro.conf import Suppress, arg

from lib import InputError, is_first_on_node
from lib.cli.group import Group

ALGORITHM = "algorithm"  # the group of a script's own flags
OFTEN = {
    *("run_name", "output_dir", "config", "total_steps", "resume", "save_every", "track", "dry_run"),
    *("model", "lora_rank", "gradient_checkpointing", "train_files", "max_prompt_length", "val_files", "val_every"),
    *("rollout_engine", "rollout_gpus", "max_response_length", "multi_turn.tools", "agent", "reward"),
    *("lr", "micro_batch_tokens", "prompts_per_step", "group_size", "num_mini_batches", "kl_coef", "critic_lr"),
}


def print_help(args_class: type, words: list[str]) -> None:
    """Prints what --help or -h in these words of a command line asks for, and ends the process. Raises InputError for
    a group that does not exist."""
    place = next(i for i, word in enumerate(words) if word in ("--help", "-h"))
    asked = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith("-") else ""
    groups = list(dict.fromkeys(group for group, _, _ in _classes(args_class)))
    if asked.replace("_", "-") not in ("", "all", *groups):
        raise InputError(f"--help {asked[:100]}: give one of {', '.join(groups)} or all")
    if not is_first_on_node():
        sys.exit(0)
    script = Path(inspect.getfile(args_class)).name
    example = f"python {script} --model Qwen/Qwen2.5-0.5B-Instruct --train-files train.parquet"
    more = f"--help all shows all flags, --help GROUP those of a group: {', '.join(groups)}."
    lines = [example, inspect.getdoc(args_class) or "", more]
    with _only(args_class, asked.replace("_", "-")):
        tyro.cli(args_class, args=["--help"], description="\n\n".join(lines))


def _classes(cls: type, group: str = "", prefix: str = "") -> Iterator[tuple[str, str, type]]:
    """(group, prefix of the flags' names, class) of the Args and of the dataclasses in it."""
    for name, kind in get_type_hints(cls).items():
        if isinstance(kind, type) and is_dataclass(kind):
            own_prefix = "" if issubclass(kind, Group) else f"{prefix}{name}."
            yield from _classes(kind, group or name.replace("_", "-"), own_prefix)
    yield group or ALGORITHM, prefix, cls


@contextmanager
def _only(args_class: type, asked: str) -> Iterator[None]:
    """In this block tyro sees the flags that are asked for alone, and no default that is empty."""
    classes = list(_classes(args_class))
    before = [inspect.get_annotations(cls) for _, _, cls in classes]
    default = arg(help_behavior_hint=lambda value: "" if value in ("", "''", "None") else f"(default: {value})")
    for group, prefix, cls in classes:
        kinds = get_type_hints(cls, include_extras=True)
        for name in (field.name for field in fields(cls) if not is_dataclass(kinds[field.name])):
            is_shown = f"{prefix}{name}" in OFTEN if not asked else asked in ("all", group)
            kinds[name] = Annotated[kinds[name], default if is_shown else Suppress]
        cls.__annotations__ = kinds
    try:
        yield
    finally:
        for (_, _, cls), annotations in zip(classes, before):
            cls.__annotations__ = annotations
