"""DataProto: the rows that flow between the stages of an RL step. Its interface is that of verl's protocol.py.

`batch` is a TensorDict of plain tensors, `non_tensor_batch` a dict of (object) ndarrays, `meta_info` a dict. Rows are
dim 0. Slices, int index, chunk, split, unpad_dataproto, make_iterator without shuffling, select, pop, rename and union
share the tensors' memory; everything else copies rows. Only select(deepcopy=True) copies objects.

Differences from verl:
- Misuse raises ValueError, KeyError or IndexError with the key's name, before anything changes.
- A list of equally long lists becomes a 1-D object array; np.array(..., dtype=object) would make it two-dimensional.
- union and concat count NaN as equal to NaN, and compare the values of tensors and arrays in meta_info.
- Each result has its own meta_info dict.
- to() leaves batch.device unset when no tensor has to move.
- chunk with auto-padding always gives `chunks` parts of ceil(n / chunks) rows, the last ones short or empty.
- padding takes "first" or "last" (default) and leaves meta_info alone.
- concat skips parts without rows; their `metrics` may have different keys.
- rename also reaches non_tensor_batch, and never overwrites a key.
- Files are safetensors (batch_values.py): loading executes no code. Loaded and unpickled tensors are on the CPU.
- all_gather returns a new DataProto and accepts different numbers of rows on the ranks.
- DataProtoFuture wraps concurrent.futures.Future; the parts of one chunk() call share one concatenation.
- Not here: nested tensors and TensorDicts, num_batch_dims, fold / unfold, an environment switch for auto-padding."""

import copy
import functools
import operator
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.utils.data import DataLoader

from lib import InputError, batch_values
from lib.batch_values import equal, merged, type_info


class DataProtoConfig:
    """Uneven chunks: `auto_padding = True` allows them for all DataProtos, the key in meta_info for one."""

    auto_padding = False
    auto_padding_key = "_verl_auto_padding"


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the batch dimension, the row's objects, and the meta_info of all rows."""

    batch: Any = None  # TensorDict, whose package has no types; None: there are no tensors
    non_tensor_batch: dict = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """Rows of tensors (`batch`), of objects (`non_tensor_batch`), and what holds for all of them (`meta_info`)."""

    batch: Any = None  # TensorDict, whose package has no types; None: there are no tensors
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)

    def __post_init__(self):
        self.non_tensor_batch, self.meta_info = self.non_tensor_batch or {}, self.meta_info or {}  # verl passes None
        self.check_consistency()

    def _derive(self, batch, non_tensor_batch, meta_info=None) -> "DataProto":
        """A new DataProto without the check, since its rows are consistent by construction."""
        new = object.__new__(type(self))
        new.batch, new.non_tensor_batch = batch, non_tensor_batch
        new.meta_info = dict(self.meta_info) if meta_info is None else meta_info
        return new

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.batch is None else dict(self.batch.items())

    @property
    def _parts(self) -> dict[str, dict]:
        return {"batch": self._tensors, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}

    def _map(self, on_tensor: Callable, on_array: Callable, *batch_size: int) -> "DataProto":
        arrays = {key: on_array(x) for key, x in self.non_tensor_batch.items()}
        if self.batch is None:
            return self._derive(None, arrays)
        tensors = {key: on_tensor(x) for key, x in self.batch.items()}
        return self._derive(TensorDict(tensors, batch_size=batch_size, device=self.batch.device), arrays)

    def check_consistency(self):
        """Raise ValueError unless there is one batch dimension, and all arrays are ndarrays of as many rows."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ValueError(f"batch must have one batch dimension, got batch_size {tuple(self.batch.batch_size)}")
        for key, x in self.non_tensor_batch.items():
            name = f"non_tensor_batch[{key!r}]"
            if not isinstance(x, np.ndarray) or x.ndim == 0:
                raise ValueError(f"{name} must be an ndarray with rows, got {type(x).__name__}")
            if len(x) != len(self):
                raise ValueError(f"{name} has {len(x)} rows, the other keys have {len(self)}")

    @classmethod
    def from_dict(cls, tensors=None, non_tensors=None, meta_info=None, auto_padding=False) -> "DataProto":
        """From tensors, and sequences that become 1-D object arrays unless they are ndarrays."""
        tensors = tensors or {}
        try:
            batch = TensorDict(tensors, batch_size=(next(iter(tensors.values())).shape[0],)) if tensors else None
        except (RuntimeError, IndexError) as e:
            shapes = {key: tuple(x.shape) for key, x in tensors.items()}
            raise ValueError(f"tensors must have the same number of rows (first dimension), got {shapes}") from e
        arrays = {
            key: x if isinstance(x, np.ndarray) else np.fromiter(x, dtype=object, count=len(x))
            for key, x in (non_tensors or {}).items()
        }
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[DataProtoConfig.auto_padding_key] = True
        return cls(batch, arrays, meta_info)

    @classmethod
    def from_single_dict(cls, data: dict, meta_info=None, auto_padding=False) -> "DataProto":
        """From one dict, such as a collate_fn's: tensors go to `batch`, ndarrays to `non_tensor_batch`."""
        tensors = {key: x for key, x in data.items() if isinstance(x, torch.Tensor)}
        arrays = {key: x for key, x in data.items() if isinstance(x, np.ndarray)}
        for key, x in data.items():
            if key not in tensors and key not in arrays:
                raise ValueError(f"data[{key!r}] must be a torch.Tensor or an ndarray, got {type(x).__name__}")
        return cls.from_dict(tensors, arrays, meta_info, auto_padding)

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __getitem__(self, item):
        """An int gives a DataProtoItem; a slice, list, ndarray, tensor or bool mask gives a DataProto."""
        part = operator.itemgetter(item)
        if isinstance(item, slice):
            if (item.step or 1) < 0:  # torch has no negative steps
                return self.select_idxs(np.arange(len(self))[item])
            return self._map(part, part, len(range(len(self))[item]))
        if isinstance(item, (int, np.integer)):
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} is out of range for {len(self)} rows")
            row = self._map(part, part)
            return DataProtoItem(row.batch, row.non_tensor_batch, self.meta_info)
        if isinstance(item, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(item)
        raise TypeError(f"a DataProto cannot be indexed with {type(item).__name__}")

    def slice(self, start=None, end=None, step=None) -> "DataProto":
        return self[slice(start, end, step)]

    def select_idxs(self, idxs) -> "DataProto":
        """Copies of the rows at these positions (negative and repeated ones too), or where a bool mask is true."""
        idxs = np.asarray(idxs.detach().cpu() if isinstance(idxs, torch.Tensor) else idxs)
        if idxs.ndim != 1:
            raise IndexError(f"rows are selected by a 1-D index, got shape {idxs.shape}")
        if idxs.size or idxs.dtype == bool:
            idxs = np.arange(len(self))[idxs]  # numpy checks the range or the mask's length
        idxs = idxs.astype(np.int64)
        on_device = functools.cache(functools.partial(torch.from_numpy(idxs).to, non_blocking=True))
        return self._map(lambda x: x.index_select(0, on_device(x.device)), lambda x: x[idxs], len(idxs))

    def reorder(self, indices):
        """Put the rows in the order of `indices`, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def to(self, device) -> "DataProto":
        """Move the tensors to `device`, in place; returns self."""
        device = torch.device(device)
        if self.batch is not None and any(x.device != device for x in self.batch.values()):
            self.batch = self.batch.to(device)
        return self

    def select(self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None, deepcopy=False) -> "DataProto":
        """The named keys (None: all) of the same rows. `deepcopy` copies objects and meta_info, not tensors."""
        batch = self.batch
        if batch is not None:
            batch = batch.copy() if batch_keys is None else batch.select(*batch_keys)
        elif batch_keys:
            raise KeyError(f"batch has no key {batch_keys[0]!r}; it has none at all")
        arrays = dict(self.non_tensor_batch)
        if non_tensor_batch_keys is not None:
            arrays = {key: x for key, x in arrays.items() if key in non_tensor_batch_keys}
        meta_info = dict(self.meta_info)
        if meta_info_keys is not None:
            meta_info = {key: x for key, x in meta_info.items() if key in meta_info_keys}
        if deepcopy:  # together: what they share stays shared
            arrays, meta_info = copy.deepcopy((arrays, meta_info))
        return self._derive(batch, arrays, meta_info)

    def pop(self, batch_keys=(), non_tensor_batch_keys=(), meta_info_keys=()) -> "DataProto":
        """Remove the named keys and return them as a DataProto. Raises KeyError before anything is removed."""
        rows, all_keys = len(self), (batch_keys, non_tensor_batch_keys, meta_info_keys)
        for (name, part), keys in zip(self._parts.items(), all_keys):
            if missing := {*(keys or ())} - part.keys():
                raise KeyError(f"{name} has no key {min(missing)!r}; it has {sorted(part)}")
        owners: tuple[Any, ...] = self.batch, self.non_tensor_batch, self.meta_info
        taken = ({key: part.pop(key) for key in dict.fromkeys(keys or ())} for part, keys in zip(owners, all_keys))
        tensors, arrays, meta_info = taken
        popped = TensorDict(tensors, batch_size=(rows,), device=self.batch.device) if tensors else None
        return self._derive(popped, arrays, meta_info)

    def rename(self, old_keys, new_keys) -> "DataProto":
        """Rename a key, or a list of keys, of batch or non_tensor_batch, in place; returns self."""
        if isinstance(old_keys, str):
            old_keys, new_keys = [old_keys], [new_keys]
        if isinstance(new_keys, str) or len(old_keys) != len(new_keys):
            raise ValueError(f"rename takes as many new keys as old ones, got {old_keys} and {new_keys}")
        batch = {} if self.batch is None else self.batch
        for old, new in zip(old_keys, new_keys):
            if new in self.non_tensor_batch or new in self._tensors:
                raise KeyError(f"rename: the key {new!r} is taken")
            part = self.non_tensor_batch if old in self.non_tensor_batch else batch
            part[new] = part.pop(old)
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the keys of `other`, in place; returns self. A key that both have must have equal values."""
        if len({len(d) for d in (self, other) if d.batch is not None or d.non_tensor_batch}) > 1:
            raise ValueError(f"union of {len(self)} and {len(other)} rows")
        for (name, ours), theirs in zip(self._parts.items(), other._parts.values()):
            for key in theirs:
                if key in ours and not equal(ours[key], theirs[key]):
                    raise ValueError(f"union: {name}[{key!r}] differs between the two")
        if self.batch is None:
            self.batch = None if other.batch is None else other.batch.copy()
        else:
            self.batch.update({key: x for key, x in other._tensors.items() if key not in self._tensors})
        self.non_tensor_batch.update(other.non_tensor_batch)
        self.meta_info.update(other.meta_info)
        return self

    def repeat(self, repeat_times=2, interleave=True) -> "DataProto":
        """Repeat each row `repeat_times` times: [a a b b] interleaved, [a b a b] otherwise."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times) -> "DataProto":
        """Repeat row i repeat_times[i] times, copies side by side. repeat_times (B,): a tensor or a sequence."""
        times = np.asarray(repeat_times.cpu() if isinstance(repeat_times, torch.Tensor) else repeat_times)
        if times.shape != (len(self),) or (times.size and (times.dtype.kind not in "iu" or times.min() < 0)):
            raise ValueError(f"repeat_times must be {len(self)} non-negative integers, got {times!r}")
        return self.select_idxs(np.repeat(np.arange(len(self)), times.astype(np.int64)))

    @staticmethod
    def concat(data: list["DataProto"]) -> "DataProto":
        """All rows, in order. meta_info is merged (ValueError on a conflict); `metrics` become one dict of lists."""
        if not data:
            return DataProto()
        meta_info = merged([d.meta_info for d in data])
        parts = [d for d in data if len(d)] or data[:1]
        first, rows = parts[0], sum(map(len, parts))
        keys: list[set] = [{*d._tensors, *d.non_tensor_batch} for d in parts]
        if odd := set.union(*keys) - set.intersection(*keys):
            raise ValueError(f"concat: the key {min(odd)!r} is not in every part")
        tensors = {}
        for key in first._tensors:
            xs = [d.batch[key] for d in parts]
            if len({(x.dtype, x.shape[1:]) for x in xs}) > 1:
                kinds = ", ".join(f"{x.dtype} {[*x.shape]}" for x in xs)
                raise ValueError(f"concat: batch[{key!r}] is of {kinds}")
            tensors[key] = torch.cat(xs)
        batch = None if first.batch is None else TensorDict(tensors, batch_size=(rows,), device=first.batch.device)
        arrays = {key: np.concatenate([d.non_tensor_batch[key] for d in parts]) for key in first.non_tensor_batch}
        return first._derive(batch, arrays, meta_info)

    def is_padding_enabled(self) -> bool:
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key) or DataProtoConfig.auto_padding)

    def padding(self, padding_size: int, padding_candidate="last"):
        """Append the "first" or the "last" row `padding_size` times, in place."""
        if padding_candidate not in ("first", "last"):
            raise ValueError(f'padding_candidate must be "first" or "last", got {padding_candidate!r}')
        if padding_size:
            row = 0 if padding_candidate == "first" else len(self) - 1
            self.reorder([*range(len(self)), *[row] * padding_size])

    def chunk(self, chunks: int) -> list["DataProto"]:
        """`chunks` parts of equal size, as views. Uneven parts need auto-padding, otherwise ValueError."""
        rows = len(self)
        if chunks < 1 or (rows % chunks and not self.is_padding_enabled()):
            raise ValueError(f"{rows} rows cannot be cut into {chunks} equal chunks ({rows} % {chunks} != 0)")
        size = -(-rows // chunks)
        parts = self.split(size) if rows else []
        return parts + [self[rows:] for _ in range(chunks - len(parts))]

    def split(self, split_size: int) -> list["DataProto"]:
        """Parts of `split_size` rows, the last one possibly shorter, as views."""
        starts = range(0, len(self), split_size)
        batches = [None] * len(starts) if self.batch is None or not starts else self.batch.split(split_size)
        arrays = self.non_tensor_batch.items()
        return [self._derive(b, {k: x[i : i + split_size] for k, x in arrays}) for i, b in zip(starts, batches)]

    def make_iterator(self, mini_batch_size: int, epochs: int, seed=None, dataloader_kwargs=None):
        """The mini-batches of `epochs` passes: views in the rows' order or, given `dataloader_kwargs`, those of torch's
        DataLoader ({"shuffle": True}, seeded by `seed`, gives verl's order)."""
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows cannot be cut into mini-batches of {mini_batch_size}")
        batches: Iterable[DataProto] = self.split(mini_batch_size)
        if options := {key: x for key, x in (dataloader_kwargs or {}).items() if x is not False}:
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            options |= {"batch_size": mini_batch_size, "collate_fn": self.select_idxs, "generator": generator}
            batches = DataLoader(range(len(self)), **options)  # type: ignore[arg-type]  # it takes any sequence
        return (mini_batch for _ in range(epochs) for mini_batch in batches)

    def get_data_info(self) -> str:
        """Keys with shapes, dtypes and types, one per line."""
        tensors = self._tensors.items()
        lines = ["batch", *(f"  {key}: {tuple(x.shape)} ({x.dtype}) {x.device}" for key, x in tensors)]
        for name, part in (("non_tensor_batch", self.non_tensor_batch), ("meta_info", self.meta_info)):
            lines += [name, *(f"  {key}: {type_info(x)}" for key, x in part.items())]
        return "\n".join(lines)

    def print_size(self, prefix=""):
        """Print the size in GiB; of object arrays only the pointers count."""
        tensors = sum(x.nbytes for x in self._tensors.values())
        arrays = sum(x.nbytes for x in self.non_tensor_batch.values())
        message = f"Size of tensordict: {tensors / 2**30} GB, size of non_tensor_batch: {arrays / 2**30} GB"
        print(f"{prefix}, {message}" if prefix else message)

    def __getstate__(self):
        # Only the bytes of these rows: of a view torch would pickle the whole storage.
        tensors = {
            key: (x.dtype, tuple(x.shape), _as_bytes(x.detach().cpu()).numpy()) for key, x in self._tensors.items()
        }
        size = None if self.batch is None else tuple(self.batch.batch_size)
        return size, tensors, self.non_tensor_batch, self.meta_info

    def __setstate__(self, state):
        size, packed, self.non_tensor_batch, self.meta_info = state
        tensors = {key: torch.from_numpy(x).view(dtype).view(shape) for key, (dtype, shape, x) in packed.items()}
        self.batch = None if size is None else TensorDict(tensors, batch_size=size)

    def save_to_disk(self, filepath):
        """Write a safetensors file. Values may be None, bool, int, float, str, bytes, tensors, ndarrays, numpy
        scalars, PIL images of 8 bits, and lists, tuples and dicts of them. A tensor, an image or an ndarray of uint8
        that rows share is written once, and shared by the loaded rows. Any other value raises InputError."""
        batch = None if self.batch is None else self._tensors
        batch_values.save(Path(filepath), batch, len(self), self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(filepath) -> "DataProto":
        """Read what save_to_disk wrote; executes no code of the file. Raises InputError for any other file."""
        try:
            tensors, rows, arrays, meta_info = batch_values.load(filepath)
            batch = None if tensors is None else TensorDict(tensors, batch_size=(rows,))
            return DataProto(batch, arrays, meta_info)
        except batch_values.NOT_A_BATCH as e:
            message = f"{filepath}: not a file of DataProto.save_to_disk, or damaged ({e}); write it anew"
            raise InputError(message) from e

    def all_gather(self, group=None) -> "DataProto":
        """The rows of all ranks of `group`, in the order of ranks. Ranks may have different numbers of rows; one
        without rows may lack the keys. Each rank keeps its own meta_info. A collective."""
        batch = self._tensors
        spec = {key: (x.dtype, tuple(x.shape[1:])) for key, x in batch.items()}
        parts: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, (len(self), spec, self.non_tensor_batch), group=group)
        keyed = [(rank, s, a) for rank, (_, s, a) in enumerate(parts) if s or a]
        if not keyed:
            return self._derive(self.batch, {})
        first, spec, arrays = keyed[0]
        for rank, s, a in keyed:
            if s != spec or a.keys() != arrays.keys():
                keys = f"{spec}, {[*arrays]}; {s}, {[*a]}"
                raise ValueError(f"all_gather: ranks {first} and {rank} differ: {keys}")
        lengths = [rows for rows, _, _ in parts]
        home = next((x.device for x in batch.values()), torch.device("cpu"))
        cpu_works = "cpu:" in dist.get_backend_config(group)
        device = home if home.type != "cpu" or cpu_works else torch.accelerator.current_accelerator()
        tensors = {}
        for key, (dtype, shape) in spec.items():
            mine = batch[key].detach() if key in batch else torch.empty((0, *shape), dtype=dtype)
            tensors[key] = _gather_rows(mine.to(device), lengths, group).to(home)
        arrays = {key: np.concatenate([a[key] for _, _, a in keyed]) for key in arrays}
        return self._derive(TensorDict(tensors, batch_size=(sum(lengths),)) if tensors else None, arrays)


@dataclass(eq=False)
class DataProtoFuture:
    """A DataProto that is still being computed, in parts. Only get() waits, and raises the exception of a part.
    `collect_fn` joins the results of the parts; `dispatch_fn`, if given, returns this future's share of them."""

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[Future]
    dispatch_fn: Callable[[], DataProto] | None = None

    @staticmethod
    def concat(data: list[Future]) -> "DataProtoFuture":
        return DataProtoFuture(DataProto.concat, list(data))

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        parts = functools.cache(lambda: self.get().chunk(chunks))  # joined once, by whoever asks first
        shares = [functools.partial(lambda i: parts()[i], i) for i in range(chunks)]
        return [DataProtoFuture(self.collect_fn, self.futures, share) for share in shares]

    def get(self) -> DataProto:
        if self.dispatch_fn is not None:
            return self.dispatch_fn()
        results = [future.result() for future in self.futures]
        for i, result in enumerate(results):
            if not isinstance(result, DataProto):
                raise TypeError(f"future {i} gave a {type(result).__name__}, not a DataProto")
        return self.collect_fn(results)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """(data with rows from the start appended until `size_divisor` divides the length, number of rows appended)."""
    pad_size = -len(data) % size_divisor
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)) if pad_size else data, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The rows without the last `pad_size`."""
    return data[:-pad_size] if pad_size else data


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The elements as a flat uint8 tensor; shares memory with a contiguous x."""
    return x.contiguous().view(-1).view(torch.uint8)


def _gather_rows(x: torch.Tensor, lengths: list[int], group) -> torch.Tensor:
    """The rows of all ranks, in order. They are sent as bytes, because not every backend knows every dtype."""
    longest = max(lengths)
    if len(x) < longest:
        x = torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])
    out = x.new_empty(len(lengths) * longest, *x.shape[1:])
    if not out.numel():
        return out.new_empty(sum(lengths), *x.shape[1:])
    pieces = out.split(longest)
    dist.all_gather([_as_bytes(piece) for piece in pieces], _as_bytes(x), group=group)
    return out if min(lengths) == longest else torch.cat([piece[:n] for piece, n in zip(pieces, lengths)])
