"""Parses the command line into a script's Args, before torch is imported, which takes seconds.

Args nests groups, whose flags have no prefix (--lr), and settings, whose flags have one (--multi-turn.tools).
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import io
import json
import math
import operator
import os
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import MISSING, astuple, dataclass, fields, is_dataclass
from enum import Enum
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import tyro
import yaml
from annotated_types import Ge, Gt, Interval, Le, Lt
from tyro.conf import OmitArgPrefixes, configure

from lib import InputError, is_first_on_node, report_mistake
from lib.cli.process import end_at_ctrl_c, guard_output
from lib.cli.secrets import secret_in

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
# keys of a run's config.json that --config does not read
OF_ONE_START = {"run_name", "resume", "resume_override", "val_only", "dry_run", "plan", "config", "script", "contents"}
OF_ONE_START |= {"history", "start", "effective", "no_effect", "profile_steps", "profile_memory", "record", "replay"}
OF_ONE_START |= {"recorded_by"}
AS_PYTHON = {"null": "None", "~": "None", "": "None", "true": "True", "false": "False"}
DEEPEST = 16  # levels of a YAML file: flags have three, a tool's schema may have more than ten
OF_SCRIPTS = "scripts"  # in a preset: flags of one script each
NO_MAPPING = "takes no mapping; if it takes JSON, write that as one text in quotes"
LONGEST = 100  # characters of a name that a message repeats, and digits of a number
BOX_LINE = re.compile("[─-]{9}|╰|Got errors")  # of tyro's messages
RENAMED = {  # keys of older configs whose new name is not the most similar one
    "engine_ranks": "rollout_tensor_parallel_size",
    "gpu_memory": "gpu_memory_utilization",
    "replicas": "dp_replicate_size",
    "lam": "gae_lambda",
    "answer_key": "columns",
    "singleton": "adv_kwargs",
    "reward_keys": "adv_kwargs",
}
OF_PEERS = {  # page of docs/: {name there: flag here that says it, or begins to}
    "coming_from_trl.md": {
        "num_generations": "group_size", "generation_batch_size": "prompts_per_step", "num_iterations": "update_epochs",
        "per_device_train_batch_size": "micro_batch_tokens", "gradient_accumulation_steps": "num_mini_batches",
        "steps_per_generation": "num_mini_batches", "max_completion_length": "max_response_length",
        "learning_rate": "lr", "lr_scheduler_type": "lr_schedule", "adam_beta2": "adam_betas", "beta": "kl_coef",
        "epsilon": "clip_ratio_low", "epsilon_high": "clip_ratio_high", "delta": "loss_kwargs",
        "loss_type": "loss_agg_mode", "scale_rewards": "adv_estimator", "importance_sampling_level": "loss",
        "top_entropy_quantile": "token_masks", "mask_truncated_completions": "overlong_filtering",
        "off_policy_mask_threshold": "token_masks", "reward_funcs": "reward",
        "use_vllm": "rollout_engine", "vllm_mode": "rollout_engine", "vllm_server_base_url": "rollout_engine",
        "vllm_gpu_memory_utilization": "gpu_memory_utilization", "environment_factory": "multi_turn.interaction",
        "vllm_tensor_parallel_size": "rollout_tensor_parallel_size", "bf16": "compute_dtype",
        "max_tool_calling_iterations": "multi_turn.max_turns", "max_steps": "total_steps",
        "num_train_epochs": "total_epochs", "eval_dataset": "val_files", "eval_steps": "val_every",
        "eval_strategy": "val_every", "num_generations_eval": "val_samples", "metric_for_best_model": "keep_best",
        "load_best_model_at_end": "keep_best", "save_steps": "save_every", "save_total_limit": "keep_checkpoints",
        "resume_from_checkpoint": "resume", "report_to": "track", "log_completions": "save_rollouts",
        "shuffle_dataset": "shuffle", "model_name_or_path": "model", "dataset_name": "train_files",
    },
    "coming_from_verl.md": {
        "rollout.n": "group_size", "train_batch_size": "prompts_per_step", "ppo_mini_batch_size": "num_mini_batches",
        "ppo_epochs": "update_epochs", "ppo_max_token_len_per_gpu": "micro_batch_tokens",
        "ppo_micro_batch_size_per_gpu": "micro_batch_tokens", "loss_mode": "loss", "kl_loss_coef": "kl_coef",
        "use_kl_loss": "kl_coef", "kl_loss_type": "kl_estimator", "use_kl_in_reward": "kl_placement",
        "target_kl": "kl_target", "horizon": "kl_horizon", "entropy_coeff": "entropy_coef",
        "norm_adv_by_std_in_grpo": "adv_estimator", "filter_groups.enable": "zero_variance",
        "max_num_gen_batches": "max_gen_batches", "overlong_buffer_cfg.len": "overlong_buffer",
        "optim.lr": "lr", "lr_warmup_steps": "warmup_steps", "grad_clip": "max_grad_norm",
        "critic_warmup": "critic_warmup_steps", "rollout.name": "rollout_engine", "val_kwargs.n": "val_samples",
        "val_kwargs.temperature": "val_temperature", "tensor_model_parallel_size": "rollout_tensor_parallel_size",
        "bypass_mode": "old_log_probs", "engine_kwargs.vllm": "vllm_kwargs", "trainer_mode": "rollout_gpus",
        "tool_config_path": "multi_turn.tools", "max_assistant_turns": "multi_turn.max_turns",
        "max_parallel_calls": "multi_turn.max_tool_calls", "max_tool_response_length": "multi_turn.max_tool_output",
        "multi_turn.format": "multi_turn.parser", "enable_gradient_checkpointing": "gradient_checkpointing",
        "use_remove_padding": "padding_free", "use_prefix_grouper": "share_prompts", "param_offload": "cpu_offload",
        "ulysses_sequence_parallel_size": "sequence_parallel_size", "optimizer_offload": "cpu_offload",
        "total_training_steps": "total_steps", "test_freq": "val_every", "save_freq": "save_every",
        "max_actor_ckpt_to_keep": "keep_checkpoints", "resume_mode": "resume", "trainer.logger": "track",
        "experiment_name": "run_name", "rollout_data_dir": "save_rollouts", "model.path": "model",
        "train_max_samples": "max_train_samples", "val_max_samples": "max_val_samples", "prompt_key": "columns",
        "image_key": "columns", "video_key": "columns", "reward_fn_key": "columns",
    },
}  # fmt: skip
HOLDS = {Ge: operator.ge, Gt: operator.gt, Le: operator.le, Lt: operator.lt}
LARGEST_INT = 2**31 - 1  # of a flag without an upper bound of its own
WORDS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}


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
    shown = _Held()  # the --help
    try:
        with contextlib.redirect_stdout(shown):
            args = parse_flags(args_class, sys.argv[1:])
        threads_of_environment()  # torch's import would print a line of its own
        if (note := vars(args)["preset_note"]) and os.environ.get("RANK", "0") == "0":
            print(note, flush=True)
    except InputError as error:
        report_mistake(f"error: {error}")
        sys.exit(2)
    except SystemExit:
        if is_first_on_node():
            print(_algorithm_last(shown.getvalue()))
        raise
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
    note, preset, own = _words(args_class, words)
    said = _Held()
    try:
        with contextlib.redirect_stderr(said):
            args = tyro.cli(args_class, args=preset + own)  # of a flag that is there twice, the last one counts
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


class _Held(io.StringIO):
    encoding = getattr(sys.stdout, "encoding", "")  # tyro draws boxes if it is UTF-8


def _mistake(box: str, flags: Collection[str]) -> str:
    """What tyro's box says, in one line; of an unknown flag the one that was meant."""
    lines = [line.strip("│ ") for line in box.strip().splitlines()[1:]]  # without the title
    lines = [*dropwhile(BOX_LINE.match, lines)]
    text = " ".join(takewhile(lambda line: not BOX_LINE.match(line), lines)).strip()
    if unknown := re.match(r"Unrecognized options: ([^\s,=]+)", text):
        meant, page = _meant(unknown[1], flags)
        hint = f"did you mean {', '.join(meant)}?{page}" if meant else "--help has the names"
        return f"there is no flag {unknown[1][:LONGEST]}; {hint}"
    return (text or " ".join(box.split()))[: 8 * LONGEST]  # it repeats the value


def _meant(name: str, flags: Collection[str]) -> tuple[list[str], str]:
    """The flags that an unknown name may mean: a former name, one of TRL's or verl's (with the page that has these), a
    setting, or a similar one."""
    key = re.sub("^[-+~]+", "", name).replace("-", "_")
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]  # a.b.c, b.c, c
    for page, names in OF_PEERS.items():
        if flag := next((as_flag(names[end]) for end in ends if as_flag(names.get(end, "")) in flags), None):
            return [flag], f" docs/{page} has the names"
    if same := [as_flag(end) for end in ends[1:] if as_flag(end) in flags]:  # verl's data.train_files
        return same, ""
    if (whole := as_flag(".".join(parts[:-1]))) in flags:  # a word NAME=VALUE, typed as a flag of its own
        return [whole], ""
    wanted = as_flag(RENAMED.get(key, key))
    settings = [flag for flag in flags if flag.startswith(f"{wanted}.")]
    return settings or difflib.get_close_matches(wanted, flags, 1), ""


def _algorithm_last(help_text: str) -> str:
    """The --help text with the box of the script's own flags moved to the end, which stays on the screen."""
    usage, *boxes = re.split(r"^(?=╭)", help_text.rstrip(), flags=re.M)
    return "\n".join([usage.rstrip(), *(box.rstrip() for box in [*boxes[1:], *boxes[:1]])])


def _names(words: list[str]) -> set[str]:
    return {word.partition("=")[0].replace("_", "-") for word in words}


def _words(args_class: type[DataclassInstance], typed: list[str]) -> tuple[str, list[str], list[str]]:
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
    if preset and not of_preset and _names(own).isdisjoint({*preset.unless, "--help", "-h"}):
        return preset.note, _of_config(args_class, str(preset.file), preset)[0], own
    return "", of_preset, own


def _defaults(args_class: type[DataclassInstance]) -> dict[str, Any]:
    """{flag: default}; "" for a flag of a script of one's own that has none."""
    required = {f.name: "" for f in fields(args_class) if f.default is MISSING and f.default_factory is MISSING}
    return {as_flag(name): value for name, value, _ in walk(args_class(**required))}


def _flags_of(args_class: type[DataclassInstance], values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    switches = {flag for flag, default in _defaults(args_class).items() if isinstance(default, bool)}
    for name, value in values.items():
        name = f"{prefix}{name.replace('_', '-')}"
        if isinstance(value, dict):
            yield from _flags_of(args_class, value, f"{name}.")
        elif isinstance(value, bool) and f"--{name}" in switches:
            head, _, last = name.rpartition(".")
            yield f"--{head}{'.' * bool(head)}{'' if value else 'no-'}{last}"
        else:
            yield f"--{name}"
            yield from map(str, value if isinstance(value, list) else [value])


def _of_config(args_class: type[DataclassInstance], path: str, preset: Preset | None) -> tuple[list[str], bool]:
    """The flags in a run's config.json or a YAML file, without those that are about one start of a run; and whether it
    is the preset."""
    check_text("config", path)
    tree = read_yaml(path, f"--config {path}")
    if not isinstance(tree, yaml.MappingNode):
        raise InputError(f"--config {path}: give a run's config.json, or YAML lines such as lr: 1e-5")
    found = preset if preset and Path(path).expanduser().resolve() == preset.file.resolve() else None
    if found:
        tree.value = list(_of_script(tree, found.script))
    tree.value = [(key, value) for key, value in tree.value if str(key.value) not in OF_ONE_START]
    words = list(_flags_of(args_class, _values(tree, f"--config {path}", _defaults(args_class))))
    return [str(found.folder / word) if found and word.startswith("data/") else word for word in words], bool(found)


def _of_script(tree: yaml.MappingNode, script: str) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """A preset's flags for all scripts, and those for this one."""
    for key, value in tree.value:
        if key.value != OF_SCRIPTS:
            yield key, value
        else:
            yield from next((flags.value for name, flags in value.value if name.value == script), [])


def read_yaml(path: str, where: str) -> yaml.Node | None:
    """The values in a YAML or JSON file as texts; None if it is empty. Raises InputError, which begins with `where`."""
    try:
        return yaml.compose(Path(path).expanduser().read_text(encoding="utf-8"), Loader=_FlatLoader)  # JSON is YAML
    except yaml.MarkedYAMLError as error:
        raise InputError(f"{where} line {error.problem_mark.line + 1}: {error.problem}") from error
    except (OSError, RuntimeError, ValueError, OverflowError, yaml.YAMLError) as error:  # RuntimeError: ~name of nobody
        raise InputError(
            f"{where}: cannot be read: {str(error).splitlines()[0]}"
        ) from error  # ValueError: "\Uffffffff"


class _FlatLoader(yaml.SafeLoader):
    """Flags are nested by a few levels; what nests deeper, or repeats itself by an alias, may have no end."""

    depth = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="an alias (*); write the value out", problem_mark=event.start_mark)
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
        if getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(problem="a tag (!); write the value alone", problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _values(node: yaml.Node, file: str, flags: dict[str, Any], prefix: str = "--") -> Any:
    """The values of a config as texts, as one would type them: YAML itself takes 010 for 8.

    flags: {flag: default}. Raises InputError for a name that is no flag, stands there twice, or has no such value.
    """
    if not isinstance(node, yaml.MappingNode):
        return _value(node, f"{file} line {node.start_mark.line + 1}: {prefix[2:]}", flags[prefix])
    values: dict[str, Any] = {}
    for where, key, inner in entries(node, file):
        name, flag = key.replace("-", "_"), f"{prefix}{key}".replace("_", "-")
        is_mapping = isinstance(inner, yaml.MappingNode)
        if is_mapping and flag in flags:
            raise InputError(f"{where}: {key} {NO_MAPPING}")
        if flag in flags or (is_mapping and any(other.startswith(f"{flag}.") for other in flags)):
            values[name] = _values(inner, file, flags, flag if flag in flags else f"{flag}.")
        else:
            meant, page = _meant(flag, flags)
            hint = f"is it {meant[0][2:].replace('-', '_')}?{page}" if meant else "--help has the names"
            raise InputError(f"{where}: there is no flag {key[:LONGEST]}; {hint}")
    return values


def entries(node: yaml.MappingNode, file: str) -> Iterator[tuple[str, str, yaml.Node]]:
    """(file and line, key, value). Raises InputError for a key that is no text, or that is there twice."""
    seen = set()
    for key, value in node.value:
        where = f"{file} line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"{where}: a key that is no name")
        if (name := key.value.lstrip("-").replace("-", "_")) in seen:
            raise InputError(f"{where}: {key.value[:LONGEST]} is there twice")
        seen.add(name)
        yield where, key.value, value


def _value(node: yaml.Node, where: str, default: Any) -> Any:
    found = texts(node, where)
    if isinstance(default, bool):
        if found not in (["True"], ["False"]):
            raise InputError(f"{where}: give true or false")
        return found == ["True"]
    return found if isinstance(node, yaml.SequenceNode) else found[0]


def texts(node: yaml.Node, where: str) -> list[str]:
    """The words of a command line for a value or a list of values. Raises InputError for what is none."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for item in nodes:
        if isinstance(item, yaml.MappingNode):
            raise InputError(f"{where} {NO_MAPPING}")
        if not isinstance(item, yaml.ScalarNode):
            raise InputError(f"{where}: give a list of plain values")
        if item.value.startswith("--"):
            raise InputError(f"{where} {item.value[:LONGEST]}: a value does not begin with --")
        if re.fullmatch(rf"[+-]?\d{{{LONGEST},}}", item.value):
            raise InputError(f"{where}: a number of {len(item.value)} digits")
        if re.search("[\0\ud800-\udfff]", item.value):
            raise InputError(f"{where}: a character that no command line can hold")
    return [item.value if item.style else AS_PYTHON.get(item.value, item.value) for item in nodes]


def as_flag(name: str) -> str:
    """The flag of a field of Args."""
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


def changed_flags(args: DataclassInstance) -> dict[str, list]:
    """{name: [value, default]} of the flags that differ from their default, {name: [value]} of those that have none.
    The name of a setting has dots."""
    own = fields(args)
    required = {f.name: getattr(args, f.name) for f in own if f.default is MISSING and f.default_factory is MISSING}
    defaults = {name: value for name, value, _ in walk(type(args)(**required)) if name not in required}
    changed = {name: value for name, value, _ in walk(args) if name not in defaults or value != defaults[name]}
    return {name: [value, defaults[name]] if name in defaults else [value] for name, value in changed.items()}


def check_flags(args: Any) -> None:
    """Raises InputError for values out of their range, and for what groups and script refuse. It fills in values."""
    for name, value, marks in walk(args):
        check_text(name, value)
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


def check_text(name: str, value: Any) -> None:
    """Raises InputError for a text, alone or in a tuple, that no file and no tokenizer takes."""
    for text in value if isinstance(value, tuple) else [value]:
        if isinstance(text, str) and re.search("[\0\ud800-\udfff]", text):  # half a pair stands for invalid UTF-8
            raise InputError(f"{as_flag(name)} {text[:LONGEST]!r}: must be UTF-8 text without a NUL character")


def check_range(name: str, value: Any, marks: tuple) -> None:
    """Raises InputError for a number, alone or in a tuple, that is not finite or not in its field's range."""
    bounds: list[Any] = []
    for mark in marks:
        bounds += mark if isinstance(mark, Interval) else [mark] if type(mark) in HOLDS else []
    if not any(type(bound) in (Le, Lt) for bound in bounds):
        whole = [number for number in (value if isinstance(value, tuple) else [value]) if type(number) is int]
        bounds += [Le(LARGEST_INT)] * bool(whole)
    for number in value if isinstance(value, tuple) else [value]:
        if not isinstance(number, int | float):
            continue
        if isinstance(number, float) and not math.isfinite(number):
            raise InputError(f"{as_flag(name)} {number}: must be a finite number")
        if not all(HOLDS[type(bound)](number, *astuple(bound)) for bound in bounds):
            must = " and ".join(f"{WORDS[type(bound)]} {astuple(bound)[0]}" for bound in bounds)
            raise InputError(f"{as_flag(name)} {str(number)[:LONGEST]}: must be {must}")


def with_line_breaks(text: str) -> str:
    """The text of a flag with a line break for each backslash n, which a shell leaves as it is; a doubled backslash is
    one backslash before an n."""
    return re.sub(r"(\\\\|\\)n", lambda found: "\n" if len(found[1]) == 1 else "\\n", text)


def parse_json(name: str, text: str) -> dict:
    """The JSON object in `text`, the value of the field `name`. Raises InputError, also for NaN and infinity."""
    flag = as_flag(name)
    try:
        settings = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise InputError(f"{flag}: nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{flag} {text}: not JSON ({error})") from error
    if isinstance(settings, dict):
        return settings
    raise InputError(f'{flag} {text}: give a JSON object, such as {{"name": 1}}')


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number
