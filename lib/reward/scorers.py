"""Finds and checks the scorers of a run before it starts."""

import difflib
import importlib
import inspect
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lib import InputError
from lib.cli.user_code import load_object
from lib.reward.scorer import ARGUMENTS, BY_DATA_SOURCE, ON_REQUEST, plural

GIVEN = {*ARGUMENTS, *(plural("batch", key) for key in ARGUMENTS), *ON_REQUEST, "time_limit_s"}  # by this package
SANDBOXED = {"rewards.code", "rewards.math", "rewards.geometry3k"}


@dataclass
class Scorer:
    name: str  # its name in metrics, if there are several scorers
    spec: str  # path:function, or "data_source"
    modules: list[str]  # of rewards/, for the data sources at hand
    kwargs: dict
    weight: float
    form: Literal["response", "batch", "group"]  # of one call
    requested: tuple[str, ...]  # arguments of ON_REQUEST that it takes
    takes_truth: bool  # whether ground_truth(s) is a parameter without a default


def load_scorers(specs: Sequence[str], datasets: list, kwargs=None, weights: Sequence[float] = ()) -> list[Scorer]:
    """The scorers of --reward, checked before anything else is loaded.

    A spec is "path/to/file.py:function", or "data_source", which picks a scorer from rewards/ by each
    row's data_source. A function's parameters say how it is called (docs/rewards.md): solution_str,
    for one response; solution_strs, for many; solution_strs with a singular data_source, ground_truth
    or extra_info, for a prompt's responses. A row's score is the sum of weight x score. Raises
    InputError for a scorer that cannot run here."""
    kwargs, weights = kwargs or {}, weights or [1.0] * len(specs)
    if len(weights) != len(specs):
        raise InputError(f"--reward-weights has {len(weights)} numbers for the {len(specs)} scorers of --reward")
    scorers = []
    for spec, weight in zip(specs, weights):
        if spec == BY_DATA_SOURCE:
            modules, own = _modules_for(datasets), _kwargs_of(spec, kwargs)
            if SANDBOXED.intersection(modules) and "sandbox_url" not in own:
                from lib.sandbox import sandbox_level  # it tries what works here

                sandbox_level()
            scorers.append(Scorer(spec, spec, modules, own, weight, "response", requested=(), takes_truth=True))
        else:
            scorers.append(_from_file(spec, kwargs, weight))
        row = next(filter(None, (getattr(dataset, "without_ground_truth", None) for dataset in datasets)), None)
        if row and scorers[-1].takes_truth:
            why = f"'reward_model' has no 'ground_truth', which scorer {spec} needs"
            advice = "add it, or name its column with --columns answer=COLUMN"
            advice += " (or, if the scorer works without, give the parameter a default: ground_truth=None)"
            raise InputError(f"{row}: {why}; {advice}")
    for name, count in Counter(scorer.name for scorer in scorers).items():
        if count > 1:
            raise InputError(f"--reward: {count} scorers are called {name}; rename a file or a function")
    return scorers


def check_keywords(scorers: Sequence[Scorer], kwargs: dict) -> None:
    """Raises InputError for a keyword that none of a run's scorers declares, those of --val-reward among them, unless
    one of your own declares **kwargs alone. Under the name of a scorer, that one must declare it."""
    _check_declared("--reward-kwargs", scorers, {key: kwargs[key] for key in kwargs if not _is_name(key)})
    for name in filter(_is_name, kwargs):
        if not (of_name := [scorer for scorer in scorers if scorer.name == name]):
            names = ", ".join(sorted({scorer.name for scorer in scorers}))
            raise InputError(f"--reward-kwargs: no scorer is called {name}; the scorers are {names}")
        _check_declared(f"--reward-kwargs {name}", of_name, kwargs[name])


def _check_declared(where: str, scorers: Sequence[Scorer], kwargs: dict) -> None:
    declared = {"time_limit_s"}
    for scorer in scorers if kwargs else ():
        by_source = scorer.spec == BY_DATA_SOURCE
        if by_source:
            functions = [importlib.import_module(module).compute_score for module in scorer.modules]
        else:
            functions = [load_object("--reward", scorer.spec)]
        for function in functions:
            parameters = inspect.signature(function).parameters
            own = {key for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
            own -= GIVEN - kwargs.keys()
            if not (own or by_source):
                return
            declared |= own
    if unknown := kwargs.keys() - declared:
        known = ", ".join(sorted(declared - {"time_limit_s"})) or "none"
        raise InputError(f"{where}: no scorer declares {', '.join(sorted(unknown))}; the scorers take {known}")


def _is_name(key: str) -> bool:
    """Whether --reward-kwargs has a scorer's name there, and no keyword."""
    return key == BY_DATA_SOURCE or "." in key


def _kwargs_of(name: str, kwargs: dict) -> dict:
    own = kwargs.get(name, {})
    if not isinstance(own, dict):
        raise InputError(f'--reward-kwargs {name}: give a JSON object, such as {{"{name}": {{"coef": 1}}}}')
    return {key: value for key, value in kwargs.items() if not _is_name(key)} | own


def _modules_for(datasets: list) -> list[str]:
    modules, table = set(), importlib.import_module("rewards")  # by name: rewards/ imports lib
    for data_source in sorted(set().union(*(dataset.data_sources for dataset in datasets))):  # reads every row
        module = table.scorer_module(data_source)
        if module is None:
            known = {name.lower(): name for name in table.SCORERS}
            near = difflib.get_close_matches(data_source.lower(), known, 3, cutoff=0.4)
            advice = "give --reward path/to/file.py:function, or add the name to SCORERS in rewards/__init__.py"
            advice += f" (near: {', '.join(known[name] for name in near)})" if near else ""
            raise InputError(f"no scorer for data_source {data_source!r}: {advice}")
        modules.add(f"rewards.{module}")
    return sorted(modules)


def _from_file(spec: str, kwargs: dict, weight: float) -> Scorer:
    function = load_object("--reward", spec)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # a compiled function may have none
        raise InputError(f"--reward {spec}: it is not a function of Python") from error
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    kwargs = _kwargs_of(f"{path.stem}.{name}", kwargs)
    form = _form(signature.parameters)
    if "completions" in signature.parameters and plural(form, "solution_str") not in signature.parameters:
        how = "three lines turn it into a scorer (docs/coming_from_trl.md#reward-functions)"
        raise InputError(f"--reward {spec}: {name}(completions, ...) has TRL's form: {how}")
    requested = tuple(key for key in ON_REQUEST if key in signature.parameters and key not in kwargs)
    arguments = [*(plural(form, key) for key in ARGUMENTS), *requested]
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        called = ", ".join(f"{key}=" for key in [*arguments, *kwargs])
        raise InputError(f"--reward {spec}: it cannot be called as {name}({called}): {error}") from error
    truth = signature.parameters.get(plural(form, "ground_truth"))
    takes_truth = truth is not None and truth.default is truth.empty
    return Scorer(f"{path.stem}.{name}", f"{path}:{name}", [], kwargs, weight, form, requested, takes_truth)


def _form(parameters: Collection[str]) -> Literal["response", "batch", "group"]:
    if "solution_strs" not in parameters:
        return "response"
    return "group" if set(ARGUMENTS).intersection(parameters) else "batch"
