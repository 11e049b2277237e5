"""Words NAME=VALUE of flags, and what the losses, advantage estimators and token masks of
lib/core_algos declare, read without an import of torch.

Each of these is a public function that returns Loss, Advantages or Mask. Its name is the value of the
flag; compute_policy_loss is "vanilla". Its parameters with names of lib/columns.py are the columns that
it reads. Its keyword-only parameters with an annotation are its hyper-parameters: the annotation is
the range.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Gt, Interval

from lib import InputError
from lib.columns import COLUMNS

# ---- types of hyper-parameters
T = TypeVar("T")
OF_RATIO = "without effect while the ratio pi / pi_old is 1"
OfRatio = Annotated[T, OF_RATIO]
Positive = Annotated[float, Interval(gt=0, lt=inf)]
NonNegative = Annotated[float, Interval(ge=0, lt=inf)]
Clip = OfRatio[NonNegative]
Limit = OfRatio[Positive]
AboveOne = Annotated[float, Gt(1)]
Share = Annotated[float, Interval(gt=0, le=1)]
Discount = Annotated[float, Interval(ge=0, le=1)]
Bounds = tuple[float, float]
Weights = tuple[Annotated[float, Interval(ge=-1e4, le=1e4)], ...]
Names = tuple[str, ...]
Singleton = Literal["raw", "zero"]

REQUIRED = "required"  # as a default: there is none
KINDS = {  # by what a function returns: the flag that selects one, and the columns that all of them take
    "Loss": ("--loss", {"advantages", "response_mask"}),
    "Advantages": ("--adv-estimator", {"token_level_rewards", "response_mask", "index"}),
    "Mask": ("--token-masks", set[str]()),
}


class Setting(NamedTuple):
    """A hyper-parameter."""

    type: Any
    default: Any = None
    of_ratio: bool = False


class Declared(NamedTuple):
    """A loss, an advantage estimator or a token mask."""

    choice: str  # what selects it: --loss gspo
    module: str
    function: str
    columns: tuple[str, ...]
    settings: dict[str, Setting]
    summary: str  # the first paragraph of its docstring

    def load(self) -> Callable:
        return getattr(import_module(self.module), self.function)


def _functions() -> Iterator[tuple[str, str, Declared]]:
    """(kind, name, what it declares)"""
    folder = Path(__file__).with_name("core_algos")
    for file in (folder / "policy_losses.py", folder / "token_masks.py", *sorted(folder.glob("papers/*.py"))):
        module = ".".join(["lib", *file.relative_to(folder.parent).with_suffix("").parts])
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                kind = ast.unparse(node.returns) if node.returns else ""
                if kind in KINDS:
                    name = "vanilla" if node.name == "compute_policy_loss" else node.name
                    flag, of_all = KINDS[kind]
                    yield kind, name, _declared(f"{flag} {name}", module, node, of_all)


def _declared(choice: str, module: str, node: ast.FunctionDef, of_all: set[str]) -> Declared:
    parameters = [parameter.arg for parameter in (*node.args.args, *node.args.kwonlyargs)]
    columns = tuple(name for name in parameters if name in COLUMNS and name not in of_all)
    settings = {}
    for parameter, default in zip(node.args.kwonlyargs, node.args.kw_defaults):
        if parameter.annotation:
            type = eval(ast.unparse(parameter.annotation), globals())
            of_ratio = OF_RATIO in getattr(type, "__metadata__", ())
            settings[parameter.arg] = Setting(type, ast.literal_eval(default) if default else REQUIRED, of_ratio)
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return Declared(choice, module, node.name, columns, settings, paragraph.replace("\n", " "))


_FOUND = [*_functions()]
POLICY_LOSSES = {name: declared for kind, name, declared in _FOUND if kind == "Loss"}
ADV_ESTIMATORS = {name: declared for kind, name, declared in _FOUND if kind == "Advantages"}
TOKEN_MASKS = {name: declared for kind, name, declared in _FOUND if kind == "Mask"}
MASKS_OF = {  # the token masks that a loss reads as columns, such as cov_keep of clip_cov
    loss: {name: TOKEN_MASKS[name] for name in declared.columns if name in TOKEN_MASKS}
    for loss, declared in POLICY_LOSSES.items()
}
CRITERIA = {  # of --rollout-correction.reject
    f"{scope}_{k}": Setting(Bounds if k == "k1" else Positive)
    for scope in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in ("k1", "k2", "k3")
}


def named(choices: Mapping[str, Declared], name: str) -> Declared:
    """Raises InputError, with the names that there are, for another one."""
    if name not in choices:
        flag = next(iter(choices.values())).choice.partition(" ")[0]
        raise InputError(f"{flag} {name!r}: choose one of {', '.join(choices)}")
    return choices[name]


def settings_of_loss(loss: str) -> dict[str, Setting]:
    """What --loss-kwargs may give. vanilla is policy_loss of the script, with flags of its own (--clip-ratio-low)."""
    if loss == "vanilla":
        return {}
    settings = dict(POLICY_LOSSES[loss].settings)
    for mask in MASKS_OF[loss].values():
        settings |= mask.settings
    return settings


def read_masks(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{token mask: its only hyper-parameter} of words such as top_entropy=0.2. Masks of a loss are not among them."""
    masks = {name: mask.settings for name, mask in TOKEN_MASKS.items() if name not in COLUMNS}
    settings = {name: Setting(setting.type) for name, own in masks.items() for setting in own.values()}
    values = parsed("--token-masks", read_words("--token-masks", words), settings)
    return {name: dict.fromkeys(masks[name], value) for name, value in values.items()}


def read_words(flag: str, given: Iterable[str]) -> dict[str, str]:
    """{name: text} of words NAME=VALUE. Raises InputError for a word of another form, and for a name given twice."""
    found: dict[str, str] = {}
    for word in given:
        name, _, text = word.partition("=")
        if not (name and text):
            raise InputError(f"{flag}: {word[:100]}: give NAME=VALUE")
        if name in found:
            raise InputError(f"{flag}: {name} is there twice")
        found[name] = text
    return found


def words(flag: str, given: Iterable[str], types: Mapping[str, Any]) -> dict[str, Any]:
    """{name: value} of words NAME=VALUE. types: {name: type, with its range, such as Annotated[int, Ge(1)]}; a tuple's
    items are separated by commas. Raises InputError, which begins with the flag."""
    return parsed(flag, read_words(flag, given), {name: Setting(kind) for name, kind in types.items()})


def from_words(flag: str, given: Iterable[str], kind: type[T]) -> T:
    """A dataclass from words NAME=VALUE of its fields, as `words`."""
    return kind(**words(flag, given, get_type_hints(kind, include_extras=True)))


def parsed(what: str, texts: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The texts in the types of their settings. Raises InputError for a name that is not in `settings`, a missing one
    without default, and a value of another type or out of its range."""
    if missing := [name for name in settings if settings[name].default == REQUIRED and name not in texts]:
        raise InputError(f"{what} needs {missing[0]}")
    if unknown := [name for name in texts if name not in settings]:
        only = f", only {', '.join(settings)}" if settings else ""
        raise InputError(f"{what} takes no {unknown[0]}{only}")
    return {name: _value(f"{what}: {name}={text}", text, settings[name].type) for name, text in texts.items()}


@cache  # the loss asks in each micro-batch
def _value(where: str, text: str, type: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # a tenth of a second, which --help need not wait for

    if type == Bounds and text.count(",") != 1:
        raise InputError(f"{where}: give LOW,HIGH")
    is_tuple = any(get_origin(part) is tuple for part in (type, *get_args(type)))
    try:
        adapter: TypeAdapter = TypeAdapter(type, config=ConfigDict(allow_inf_nan=False))
        value = adapter.validate_python(tuple(text.split(",")) if is_tuple else text)
    except ValidationError as error:
        raise InputError(f"{where}: {error.errors()[0]['msg']}") from None
    if type == Bounds and not value[0] < value[1]:
        raise InputError(f"{where}: give LOW,HIGH, LOW below HIGH")
    return value
