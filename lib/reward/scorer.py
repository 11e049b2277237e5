"""A scorer where it runs: loaded, called, its result checked. Standard library only, for workers that start fast."""

import functools
import importlib
import inspect
import json
import zlib
from collections.abc import Callable

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
