"""The values in a DataProto's arrays and meta_info: merged, compared and described."""

from typing import Any

import numpy as np
import torch


def merged(parts: list[dict]) -> dict:
    """The meta_info of several DataProtos."""
    merged: dict = {}
    metrics: list[dict] = []
    for meta_info in parts:
        for key, x in meta_info.items():
            if key == "metrics":
                metrics += x if isinstance(x, list) else [] if x is None else [x]
            elif key in merged and not equal(merged[key], x):
                raise ValueError(f"concat: meta_info[{key!r}] differs between the parts: {merged[key]!r}, {x!r}")
            else:
                merged[key] = x
    if metrics:
        names = dict.fromkeys(name for m in metrics for name in m)
        merged["metrics"] = {name: [m[name] for m in metrics if name in m] for name in names}
    return merged


def equal(a: Any, b: Any) -> bool:
    """Deep equality in which NaN equals NaN; tensors and arrays must also agree in shape and dtype."""
    if a is b:
        return True
    arrays = (torch.Tensor, np.ndarray)
    if isinstance(a, arrays) or isinstance(b, arrays):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        if isinstance(a, torch.Tensor):
            if a.device != b.device:
                return False
            return torch.equal(a, b) or bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
        if a.dtype == object:
            return all(x is y or equal(x, y) for x, y in zip(a.flat, b.flat))
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(x, b[key]) for key, x in a.items())
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)


def type_info(x: Any) -> str:
    if not isinstance(x, (np.ndarray, list, tuple, dict)) or (isinstance(x, dict) and not x):
        return type(x).__name__
    if isinstance(x, np.ndarray):
        return f"ndarray{x.shape} ({x.dtype})"
    if isinstance(x, list):
        return f"list[{'|'.join(sorted({type_info(v) for v in x[:3]})) or '...'}]"
    if isinstance(x, tuple):
        return f"tuple({', '.join(map(type_info, x))})"
    key, value = next(iter(x.items()))
    return f"dict[{type_info(key)}: {type_info(value)}]"
