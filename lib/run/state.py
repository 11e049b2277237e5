"""What a script keeps between steps, besides models: a resume gives back what it saved, or it is refused."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lib import InputError
from lib.data_proto import DataProto
from lib.distributed import all_gather_lists
from lib.model import TrainedModel


def with_loss_scales(stateful: Mapping[str, Any], models: Mapping[str, TrainedModel]) -> dict[str, Any]:
    scales = {f"{name}_loss_scale": model.loss_scale for name, model in models.items()}
    return dict(stateful) | {name: scale for name, scale in scales.items() if scale is not None}


def states_of(stateful: Mapping[str, Any], batches: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The state of each object. Raises InputError for an object without one, or a name that cannot be saved."""
    for name in (*stateful, *batches):
        if "." in name or name in ("step", "best"):
            raise InputError(f"run.save: {name!r} cannot be the name of a state: give another, without a dot")
    states = {}
    for name, part in stateful.items():
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(part, method):
                raise InputError(f"stateful[{name!r}], a {type(part).__name__}, has no {method}()")
        states[name] = part.state_dict()
        if not isinstance(states[name], dict) or not all(isinstance(key, str) for key in states[name]):
            raise InputError(f"stateful[{name!r}]: state_dict() must return a dict with text as keys")
    return states


def check_state(states: Mapping[str, Mapping[str, Any]], batches: Mapping[str, DataProto]) -> None:
    """Raises InputError, on all ranks, for state that a script would not get back: values that JSON changes,
    and values that differ between ranks, since rank 0's are saved. A collective.

    states: by name, each from a state_dict()."""
    kept: dict[str, Any] = {f"batches[{name!r}]": rows for name, rows in batches.items()}
    for name, state in states.items():
        kept |= {f"stateful[{name!r}]: {key}": value for key, value in state.items()}
    found = {what: inexact(value, what) or _digest(value) for what, value in kept.items()}
    ranks = all_gather_lists([found])
    for what in dict.fromkeys(what for of_rank in ranks for what in of_rank):
        of_ranks = [of_rank.get(what) for of_rank in ranks]
        if why := next((text for text in of_ranks if text and text.startswith(what)), None):
            raise InputError(why)
        if other := [str(rank) for rank, digest in enumerate(of_ranks) if digest != of_ranks[0]]:
            raise InputError(
                f"{what} is another on rank {', '.join(other)} than on rank 0, whose state is saved: "
                "keep the same on all ranks (sum or gather over ranks)"
            )


def inexact(value: Any, where: str) -> str | None:
    """Why the value at `where` would come back from JSON as something else; None if it would not."""
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        if kinds := sorted({type(key).__name__ for key in value if not isinstance(key, str)}):
            return f"{where} has {kinds[0]} keys; JSON needs text"
        inner = ((f"{where}.{key}", part) for key, part in value.items())
    elif isinstance(value, list):
        inner = ((f"{where}[{i}]", part) for i, part in enumerate(value))
    elif not isinstance(value, str | int | float | None | DataProto):
        return f"{where} is a {type(value).__name__}; JSON needs numbers, text, lists and dicts"
    elif value != value:
        return f"{where} is nan, which equals nothing after a resume"
    return next(filter(None, (inexact(part, there) for there, part in inner)), None)


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(value, DataProto):
        for name, rows in sorted(value.batch.items() if value.batch is not None else ()):
            digest.update(f"{name} {rows.dtype} {[*rows.shape]}".encode())
            digest.update(rows.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        columns = value.non_tensor_batch.items()
        value = {name: [x for x in rows if isinstance(x, str | int)] for name, rows in columns}
    digest.update(json.dumps(value, sort_keys=True).encode())
    return digest.hexdigest()
