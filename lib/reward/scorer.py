"""Scorers: found and checked before a run starts; then, where they run, loaded and called, and their results checked.
Standard library only, for workers that start fast."""

import difflib
import functools
import importlib
import inspect
import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lib import InputError
from lib.cli.user_code import load_object

BY_DATA_SOURCE = "data_source"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # of every scorer
OF_RESPONSE = {"solution_str", "num_tokens", "response_length", "finish_reason"}
OF_PROMPT = ("max_response_length", "prompt", "full_prompt", "images", "step")
ON_REQUEST = ("num_tokens", "response_length", "finish_reason", *OF_PROMPT)  # by name of a parameter
LARGEST_SCORE = 1e12  # larger ones may overflow a gradient's norm in float32: no update
OF = " of"  # no scorer can return this key: `unfit` refuses it
LONGEST_RESULT = 2**20  # bytes, as JSON


def load_scorer(spec: str, modules: list[str], kwargs: dict, time_limit_s: float | None = None) -> Callable:
    """The function of a spec; for "data_source", rewards.compute_score, after import of `modules`.
    time_limit_s: for a response; a function with this parameter gets it, to end in time by itself."""
    for module in modules:
        importlib.import_module(module)
    by_source = spec == BY_DATA_SOURCE
    function = importlib.import_module("rewards").compute_score if by_source else load_object("--reward", spec)
    if time_limit_s is not None and (by_source or "time_limit_s" in inspect.signature(function).parameters):
        kwargs = kwargs | {"time_limit_s": time_limit_s}
    return functools.partial(function, **kwargs)


@functools.cache
def _event_loop():
    import asyncio  # takes as long as all other imports here, and few scorers need it

    return asyncio.new_event_loop()


def plural(form: str, name: str) -> str:
    """The name of one of ARGUMENTS in a scorer of this form; names of ON_REQUEST stay."""
    several = name in ARGUMENTS if form == "batch" else form == "group" and name == "solution_str"
    return f"{name}s" if several else name


def call(function: Callable, form: str, samples: list[dict]) -> list:
    """The scorer's results, one per sample. Awaits an async scorer. form: "response" (one sample), "batch" (lists), or
    "group" (all samples of a prompt; what is equal for all of them is given once)."""
    arguments: dict = {}
    for key, value in samples[0].items():
        once = form == "response" or key == "step" or (form == "group" and key not in OF_RESPONSE)
        arguments[plural(form, key)] = value if once else [sample[key] for sample in samples]
    results = function(**arguments)
    if hasattr(results, "__await__"):
        results = _event_loop().run_until_complete(results)
    results = [results] if form == "response" else list(results)
    if len(results) != len(samples):
        raise ValueError(f"the scorer returned {len(results)} results for {len(samples)} samples")
    return results


def text_hash(text: str) -> int:
    """Goes with a score, which can then not be taken for that of another response."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def checked(result, sample: dict) -> dict:
    """A scorer's result as {"score": a finite float, OF: hash of the response, other keys} of JSON's types. Raises
    TypeError, ValueError, and a result that is an exception."""
    if isinstance(result, Exception):  # of one response, among several
        raise result
    result = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in result:
        raise ValueError(f'the scorer returned a dict without "score": {list(result)}')
    score = result["score"]
    score = score.tolist() if hasattr(score, "tolist") else score  # numpy, torch
    if not isinstance(score, int | float):
        raise TypeError(f"the scorer returned a {type(score).__name__} as score, not a number")
    if not abs(score) <= LARGEST_SCORE:
        raise ValueError(f"the scorer returned {score}; use numbers up to {LARGEST_SCORE:g}")
    text = json.dumps(result | {"score": float(score)}, default=_plain)
    if len(text) > LONGEST_RESULT:
        raise ValueError(f"the scorer returned a result of {len(text)} bytes; the limit is {LONGEST_RESULT}")
    return json.loads(text) | {OF: text_hash(sample["solution_str"])}


def _plain(value):
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the scorer returned a {type(value).__name__} besides its score; use numbers, text and lists")


# ---- before a run -------------------------------------------------------------------------------

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
    scorers = []
    for spec, weight in zip(specs, weights, strict=True):
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
