"""The values of a DataProto: its file, and how values are merged, compared and described. The file is
safetensors, with what is no tensor as JSON in a tensor of bytes. Loading executes no code."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lib import InputError

DOCUMENT = "document"  # the tensor that holds the JSON
# what `load`, and taking what it returns, may raise for another file
NOT_A_BATCH = (SafetensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError)


def save(path: Path, batch: dict[str, torch.Tensor] | None, rows: int, arrays: dict, meta_info: dict) -> None:
    """Writes the file whole or not at all. Raises InputError for a value of another type than DataProto takes."""
    tensors = {f"batch/{key}": x for key, x in (batch or {}).items()}
    encode = _Encoder(tensors)
    document = {
        "batch": None if batch is None else [*batch],
        "rows": rows,
        "non_tensor_batch": {key: encode(x, f"non_tensor_batch[{key!r}]") for key, x in arrays.items()},
        "meta_info": encode(meta_info, "meta_info"),
    }
    tensors[DOCUMENT] = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    storages = set()
    for key, x in tensors.items():
        x = x.detach().cpu().contiguous()
        storage = x.untyped_storage().data_ptr()
        tensors[key] = x.clone() if storage in storages else x  # safetensors refuses shared storage
        storages.add(storage)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


def load(path: Path) -> tuple[dict[str, torch.Tensor] | None, int, dict, dict]:
    """(batch, rows, arrays, meta_info), as given to `save`. Raises one of NOT_A_BATCH for any other file."""
    tensors = load_file(path)
    document = json.loads(tensors.pop(DOCUMENT).numpy().tobytes())
    keys = document["batch"]
    batch = None if keys is None else {key: tensors[f"batch/{key}"] for key in keys}
    arrays = {key: _decode(x, tensors) for key, x in document["non_tensor_batch"].items()}
    return batch, document["rows"], arrays, _decode(document["meta_info"], tensors)


class _Encoder:
    """encode(value, where): JSON, with {"!tag": ...} for types that JSON lacks. Tensors and pixels go to `tensors`."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors
        self.names: dict[int, str] = {}  # by id

    def __call__(self, x: Any, where: str) -> Any:
        kind = type(x)
        if kind in (str, int, float, bool, type(None)):
            return x
        if kind in (list, tuple):
            values = [self(v, where) for v in x]
            return values if kind is list else {"!tuple": values}
        if kind is dict:
            items = {key: self(v, f"{where}[{key!r}]") for key, v in x.items()}
            if all(type(key) is str and not key.startswith("!") for key in x):
                return items
            return {"!dict": [[self(key, where), v] for key, v in items.items()]}
        if kind is bytes:
            return {"!bytes": base64.b64encode(x).decode()}
        if isinstance(x, torch.Tensor) and not x.is_sparse:
            return {"!tensor": self._named(x, lambda: x)}
        if isinstance(x, Image.Image) and x.mode in ("L", "RGB", "RGBA"):
            return {"!image": self._named(x, lambda: torch.from_numpy(np.array(x)))}
        if kind is np.ndarray and x.dtype == np.uint8:
            return {"!uint8": self._named(x, lambda: torch.from_numpy(np.require(x, requirements=["C", "W"])))}
        if kind is np.ndarray and x.dtype == object:
            rows = [self(v, f"{where} row {i}" if x.ndim == 1 else where) for i, v in enumerate(x.flat)]
            return {"!objects": [list(x.shape), rows]}
        if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "biufcSUMm":
            tag = "!scalar" if isinstance(x, np.generic) else "!array"
            return {tag: [x.dtype.str, list(x.shape), base64.b64encode(x.tobytes()).decode()]}
        raise InputError(f"{where}: a value of type {kind.__name__} cannot be saved; drop it or make it plain data")

    def _named(self, x: Any, as_tensor: Callable[[], torch.Tensor]) -> str:
        """The name of x in `tensors`. Rows may share an object, which is written once."""
        if id(x) not in self.names:
            self.names[id(x)] = f"value/{len(self.tensors)}"
            self.tensors[self.names[id(x)]] = as_tensor()
        return self.names[id(x)]


def _decode(x: Any, tensors: dict) -> Any:
    if isinstance(x, list):
        return [_decode(v, tensors) for v in x]
    if not isinstance(x, dict):
        return x
    tag = next(iter(x), "")
    if not tag.startswith("!"):
        return {key: _decode(v, tensors) for key, v in x.items()}
    body = _decode(x[tag], tensors)
    match tag:
        case "!tuple":
            return tuple(body)
        case "!dict":
            return dict(body)
        case "!bytes":
            return base64.b64decode(body)
        case "!tensor":
            return tensors[body]
        case "!uint8":
            return tensors[body].numpy()
        case "!image":
            if isinstance(tensors[body], torch.Tensor):  # the first row that has it
                tensors[body] = Image.fromarray(tensors[body].numpy())
            return tensors[body]
        case "!objects":
            shape, rows = body
            return np.fromiter(rows, dtype=object, count=len(rows)).reshape(shape)
        case "!array" | "!scalar":
            dtype, shape, data = body
            array = np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
            return array if tag == "!array" else array[()]
    raise ValueError(f"unknown tag {tag}")


# ---- merged, compared, described -----------------------------------------------------------------
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
