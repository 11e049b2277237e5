"""Parses the command line into a script's Args, before torch is imported, which takes seconds.

Args nests groups, whose flags have no prefix (--lr), and settings, whose flags have one (--multi-turn.tools).
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import inspect
import io
import json
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, astuple, dataclass, fields, is_dataclass
from enum import Enum
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import tyro
from annotated_types import Ge, Gt, Interval, Le, Lt
from tyro.conf import OmitArgPrefixes, Suppress, arg, configure

from lib import InputError, is_first_on_node, report_mistake
from lib.cli.process import end_at_ctrl_c, guard_output
from lib.cli.secrets import secret_in
from lib.cli.yaml_files import read_yaml, words_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
OTHER_NAMES = Path(__file__).with_name("other_names.yaml")  # {page of docs/: {name there: flag here}}
# keys of a run's config.json that --config does not read
OF_ONE_START = {"run_name", "resume", "resume_override", "val_only", "dry_run", "plan", "config", "script", "contents"}
OF_ONE_START |= {"history", "start", "effective", "no_effect", "profile_steps", "record", "replay", "recorded_by"}
LARGEST_INT = 2**31 - 1  # of a flag without an upper bound of its own
OF_SCRIPTS = "scripts"  # in a preset: flags of one script each
LONGEST = 100  # characters of a name that a message repeats
BOX_LINE = re.compile("[─-]{9}|[╰+]|Got errors")  # of tyro's messages
RANGES: dict[type, tuple[Callable, str]] = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


@dataclass
class Group:
    """Flags without a prefix. `check` raises InputError for values that make no sense."""

    def __init_subclass__(cls):
        configure(OmitArgPrefixes)(cls)

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class Preset:
    """The --config of a command line that gives, also in another --config, none of the flags `unless`."""

    file: Path
    folder: Path
    """paths in it are relative to this one"""
    unless: tuple[str, ...]
    what: str
    script: str
    """which of its `scripts` counts"""

    @property
    def note(self) -> str:
        return f"no {' and no '.join(self.unless)}: {self.what} ({self.file.relative_to(self.folder)})"


class OnResume(Enum):
    """What a resume does with a new value. Without a mark a flag changes results, and needs --resume-override."""

    MAY_CHANGE = "results stay the same but for the rounding of sums"
    NOT_COMPARED = "it is about this start"


SWITCH = "auto, on or off; the flag alone is on, with no- it is off"  # a field's mark


class OnReplay(Enum):
    """What a replay does with a new value. Without a mark it takes it."""

    AS_RECORDED = "it decides what a recording holds"


class Names(Enum):
    """What a flag's value names. A resume compares the contents of FILES; other ROWS start the data stream anew."""

    FILES = "files that results depend on"
    ROWS = "the training rows or their order"


def read_flags(args_class: type[T]) -> T:
    """The Args of the command line, checked. A mistake is printed and ends the process with exit code 2. Python's
    garbage collector is off afterwards, for the imports that follow; `lib.distributed.run` switches it on."""
    guard_output()
    end_at_ctrl_c()
    try:
        args = parse_flags(args_class, sys.argv[1:])
        threads_of_environment()  # torch's import would print a line of its own
    except InputError as error:
        report_mistake(f"error: {error}")
        sys.exit(2)
    if (note := vars(args)["preset_note"]) and os.environ.get("RANK", "0") == "0":
        print(note, flush=True)
    gc.disable()  # until lib.distributed.run: a sixth of the imports' time is its looking for garbage that is not there
    return args


def threads_of_environment() -> int:
    """OMP_NUM_THREADS, or 1. Raises InputError if it is no number of threads."""
    text = os.environ.get("OMP_NUM_THREADS", "1")
    if not re.fullmatch("[1-9][0-9]{0,2}", text):  # torch crashes where the system has no more threads
        raise InputError(f"OMP_NUM_THREADS={text[:20]}: give a process's number of threads, such as 1, or unset it")
    return int(text)


def parse_flags(args_class: type[T], words: list[str]) -> T:
    """The Args of these words of a command line, checked. Their `given` has the names of the flags that were typed, and
    of those that a config changes: one with its default asks for nothing, nor does the preset. Raises InputError, and
    SystemExit for --help."""
    if not {"--help", "-h"}.isdisjoint(words):
        print_help(args_class, words)
    note, preset, own = _with_configs(args_class, words)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            # of a flag that is there twice, the last one counts
            args = tyro.cli(args_class, args=switched(args_class, preset + own))
    except SystemExit as stop:
        if stop.code:
            raise InputError(_mistake(said.getvalue(), _defaults(args_class))) from None
        raise
    typed, of_preset = _names(words), _names(preset) - _names(own)
    named = {name for name, *_ in walk(args) if as_flag(name) in typed}
    changed = {name for name in changed_flags(args) if as_flag(name) not in of_preset}
    vars(args).update(given=changed | named, preset_note=note)
    check_flags(args)
    return args


def switched(args_class: type[DataclassInstance], words: list[str]) -> list[str]:
    """The words, with on or off where a switch that may also be auto has no value, or a config's bool."""
    switches = {as_flag(name) for name, _, marks in walk(_default(args_class)) if SWITCH in marks}
    done: list[str] = []
    for word, following in pairwise([*words, "--"]):
        name = word.replace("_", "-")
        if name in switches and following.startswith("-"):
            done += [name, "on"]
        elif name.startswith("--no-") and (flag := f"--{name[5:]}") in switches:
            done += [flag, "off"]
        elif done and done[-1] in switches:
            done.append({"True": "on", "False": "off"}.get(word, word))
        else:
            done.append(name if name in switches else word)
    return done


def _names(words: list[str]) -> set[str]:
    return {word.partition("=")[0].replace("_", "-") for word in words}


def _mistake(box: str, flags: Collection[str]) -> str:
    """What tyro's box says, in one line; of an unknown flag the one that was meant."""
    lines = [line.strip("│| ") for line in box.strip().splitlines()[1:]]  # without the title
    lines = [*dropwhile(BOX_LINE.match, lines)]
    text = " ".join(takewhile(lambda line: not BOX_LINE.match(line), lines)).strip()
    if unknown := re.match(r"Unrecognized options: ([^\s,=]+)", text):
        return no_flag(unknown[1], flags)
    return (text or " ".join(box.split()))[: 8 * LONGEST]  # it repeats the value


def no_flag(name: str, flags: Collection[str]) -> str:
    """That there is no such flag, and which one may be meant."""
    meant, page = _meant(name, flags)
    hint = f"did you mean {', '.join(meant)}?{page}" if meant else "--help all has the names"
    return f"there is no flag {name[:LONGEST]}; {hint}"


def _meant(name: str, flags: Collection[str]) -> tuple[list[str], str]:
    """The flags that an unknown name may mean: TRL's, verl's or a former name, whose page is named, a setting,
    or a similar one."""
    key = re.sub("^[-+~]+", "", name).replace("-", "_")
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]  # a.b.c, b.c, c
    for page, names in read_yaml(OTHER_NAMES, str(OTHER_NAMES)).items():
        if flag := next((as_flag(names[end]) for end in ends if as_flag(names.get(end, "")) in flags), None):
            return [flag], f" docs/{page} has the names"
    if same := [as_flag(end) for end in ends[1:] if as_flag(end) in flags]:  # verl's data.train_files
        return same, ""
    if (whole := as_flag(".".join(parts[:-1]))) in flags:  # a word NAME=VALUE, typed as a flag of its own
        return [whole], ""
    settings = [flag for flag in flags if flag.startswith(f"{as_flag(key)}.")][:3]
    return settings or difflib.get_close_matches(as_flag(key), flags, 1), ""


def _with_configs(args_class: type[DataclassInstance], typed: list[str]) -> tuple[str, list[str], list[str]]:
    """(what a run says that has the preset unasked, the preset's flags, those of other configs and the typed ones)."""
    preset: Preset | None = getattr(args_class, "preset", None)
    of_preset: list[str] = []
    own: list[str] = []
    for word, following in pairwise([*typed, ""]):
        name, equals, value = word.partition("=")
        if name == "--config":
            words, is_preset = _of_config(args_class, value if equals else following, preset)
            (of_preset if is_preset else own).extend(words)
    own += typed
    if preset and not of_preset and _names(own).isdisjoint(preset.unless):
        return preset.note, _of_config(args_class, str(preset.file), preset)[0], own
    return "", of_preset, own


def _of_config(args_class: type[DataclassInstance], path: str, preset: Preset | None) -> tuple[list[str], bool]:
    """The flags in a run's config.json or a YAML file, without those that are about one start of a run; and whether it
    is the preset."""
    where = f"--config {path}"
    values = read_yaml(path, where)
    if not isinstance(values, dict):
        raise InputError(f"{where}: give a run's config.json, or YAML lines such as lr: 1e-5")
    found = preset if preset and Path(path).expanduser().resolve() == preset.file.resolve() else None
    if found:
        values |= values.pop(OF_SCRIPTS).get(found.script, {})
    values = {key: value for key, value in values.items() if key not in OF_ONE_START}
    words = [*_words(values, _defaults(args_class), where)]
    return [str(found.folder / word) if found and word.startswith("data/") else word for word in words], bool(found)


def _words(values: dict[Any, Any], flags: dict[str, Any], where: str, prefix: str = "") -> Iterator[str]:
    """The words of a command line for the values of a config. flags: {flag: default}."""
    for key, value in values.items():
        flag = as_flag(f"{prefix}{key}")
        if flag in flags:
            yield from words_of(flag, value, f"{where}: {prefix}{key}", isinstance(flags[flag], bool))
        elif isinstance(value, dict) and any(name.startswith(f"{flag}.") for name in flags):
            yield from _words(value, flags, where, f"{prefix}{key}.")
        else:
            raise InputError(f"{where}: {no_flag(f'{prefix}{key}', flags)}")


def _defaults(args_class: type[DataclassInstance]) -> dict[str, Any]:
    """{flag: default}; "" for a flag of a script of one's own that has none."""
    return {as_flag(name): value for name, value, _ in walk(_default(args_class))}


def _default(args_class: type[T]) -> T:
    required = {f.name: "" for f in fields(args_class) if f.default is MISSING and f.default_factory is MISSING}
    return args_class(**required)


def as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def walk(args: DataclassInstance, prefix: str = "") -> Iterator[tuple[str, Any, tuple]]:
    """(name, value, annotations of the field) of every flag; the name of a setting is like multi_turn.tools."""
    hints = get_type_hints(type(args), include_extras=True)
    for field in fields(args):
        value = getattr(args, field.name)
        if isinstance(value, Group):
            yield from walk(value)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from walk(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value, getattr(hints[field.name], "__metadata__", ())


def flag_values(args: DataclassInstance) -> dict[str, Any]:
    """{name: value} of all flags, with settings nested, as in config.json."""
    values: dict[str, Any] = {}
    for name, value, _ in walk(args):
        *parents, last = name.split(".")
        inner = values
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return values


def marked(args: DataclassInstance, mark: Enum) -> set[str]:
    """The names of the flags with this mark. Settings are compared as one, so theirs is the prefix (multi_turn)."""
    return {name.partition(".")[0] for name, _, marks in walk(args) if mark in marks}


def changed_flags(args: DataclassInstance, **computed: Any) -> dict[str, list]:
    """{name: [value, default]} of the flags that differ from their default, which is "" for those that have none. The
    name of a setting has dots. computed: defaults that depend on other flags."""
    defaults = {name: value for name, value, _ in walk(_default(type(args)))} | computed
    return {name: [value, defaults[name]] for name, value, _ in walk(args) if value != defaults[name]}


def check_flags(args: Any) -> None:
    """Raises InputError for values out of their range, and for what groups and script refuse. It fills in values."""
    for name, value, marks in walk(args):
        if found := secret_in(value, as_flag(name)):  # the message does not repeat the value
            advice = "put it in the environment, which commands and your code see (docs/security.md)"
            raise InputError(f"{found}; flags stand in config.json and logs: {advice}")
        check_range(name, value, marks)
    try:
        for value in vars(args).values():
            if isinstance(value, Group):
                value.check()
        args.check()
    except OSError as error:
        raise InputError(f"{str(error.filename)[:LONGEST]}, which a flag names: {error.strerror}") from error


def check_range(name: str, value: Any, marks: tuple) -> None:
    """Raises InputError for a number, alone or in a tuple, that is not finite or not in its field's range."""
    bounds: list[Any] = [bound for mark in marks for bound in (mark if isinstance(mark, Interval) else [mark])]
    bounds = [bound for bound in bounds if type(bound) in RANGES]
    for number in value if isinstance(value, tuple) else [value]:
        if not isinstance(number, int | float):
            continue
        if not math.isfinite(number):
            raise InputError(f"{as_flag(name)} {number}: must be a finite number")
        is_bounded = isinstance(number, float) or any(type(bound) in (Le, Lt) for bound in bounds)
        limits = bounds if is_bounded else [*bounds, Le(LARGEST_INT)]
        if not all(RANGES[type(bound)][0](number, *astuple(bound)) for bound in limits):
            must = " and ".join(f"{RANGES[type(bound)][1]} {astuple(bound)[0]}" for bound in limits)
            raise InputError(f"{as_flag(name)} {number}: must be {must}")


def with_line_breaks(text: str) -> str:
    """The text of a flag with a line break for each backslash n, which a shell leaves as it is; a doubled backslash is
    one backslash before an n."""
    return re.sub(r"(\\\\|\\)n", lambda found: "\n" if len(found[1]) == 1 else "\\n", text)


def parse_json(name: str, text: str) -> dict:
    """The JSON object in `text`, the value of the field `name`. Raises InputError, also for NaN and infinity."""
    flag = as_flag(name)
    try:
        settings = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise InputError(f"{flag} {text}: not JSON ({error})") from error
    if isinstance(settings, dict):
        return settings
    raise InputError(f'{flag} {text}: give a JSON object, such as {{"name": 1}}')


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


# ---- --help -------------------------------------------------------------------------------------

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
    more = f"--help all shows all flags, --help GROUP one group: {', '.join(groups)}."
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


@contextlib.contextmanager
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
