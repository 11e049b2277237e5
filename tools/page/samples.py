"""Packs a run's samples for the page: a small index of all responses, and their texts and numbers in chunks, one a file
of training samples and one a validation, which the browser unpacks when it shows them.

A chunk is gzip of: the length of its JSON (4 bytes, little-endian), the JSON, then the numbers of its tokens in
bfloat16, the high bytes first, then the low ones, which gzip likes better.
"""

import gzip
import hashlib
import io
import json
import math
import struct
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from lib.columns import COLUMNS as OF_BATCH
from tools.page.files import check, open_inside, parse, reason
from tools.page.read import could_not_read, read_lines

T = TypeVar("T")
FIELDS = ("logp", "mismatch", "log_ratio", "advantage", "entropy", "ref", "value")
"""numbers of a token: log-prob after the update if there is one, else before, else the engine's; before the update (or
after) minus the engine's; log of the ratio; ...; logp minus the reference's; ..."""
DIGITS = {"logp": 6}
"""binary digits after the point: log-probs, of which probabilities are made, are within 0.8 %; all others have 5
digits, within 1.6 %"""
ROWS_A_STEP = 256  # at most, of a validation or a file of training samples


LARGEST_IMAGE = 512  # pixels of a side
MOST_IMAGE_BYTES = 200_000
JPEG = b"\xff\xd8\xff"  # how each begins
FLOATS, WHOLE = pa.list_(pa.float32()), pa.list_(pa.int64())
COLUMNS = (
    dict.fromkeys(("step", "sample"), pa.int64())
    | dict.fromkeys(("group", "prompt", "data_source", "finish_reason", "ground_truth", "rewards"), pa.string())
    | dict.fromkeys(("row_hash",), pa.string())
    | dict.fromkeys(("images", "tool_errors", "tokens"), pa.list_(pa.string()))
    | {"score": pa.float64(), "ratio": FLOATS}
    | {
        c.copied[0]: FLOATS if c.copied[1] == "float" else WHOLE
        for c in OF_BATCH.values()
        if c.copied[1] and c.width == "T"
    }
    | {
        "turns": pa.list_(
            pa.struct({"by": pa.string(), "text": pa.string(), "tokens": pa.int32(), "reward": pa.float64()})
        )
    }
)
"""what is read of a file of training samples"""
NEEDED = ("step", "group", "sample", "prompt", "response_ids", "tokens")
TURN = {"by": "unknown", "text": "", "tokens": 0, "reward": 0.0}
TURNS = [{"by": str, "text": str, "tokens": int, "reward": float}]
VALIDATED = (
    {"step": int, "score": float, "turns": TURNS, "images": [str], "tool_errors": [str]}
    | dict.fromkeys(("prompt", "response", "data_source", "finish_reason", "row_hash"), str)
)  # fmt: skip


class Chunk(NamedTuple):
    key: str
    """names the content"""
    packed: bytes
    rows: list[dict[str, Any]]
    """in the chunk's order: step, group, sample, source, finish, prompt (a digest), score, length"""
    scales: dict[str, float]
    """for each field what 99 % of the absolute values are below"""
    images: dict[str, bytes]
    """JPEGs by the names that the packed rows have for them"""
    broken: list[str]
    """rows that could not be read"""


def pack_samples(folder: Path, most_bytes: float) -> tuple[dict[str, Any], dict[str, bytes], list[str]]:
    """(index, {key: chunk or image}, notes) of a run. Where these would be larger than `most_bytes`, steps are left out
    evenly, and index["kept"] is larger than index["shown"]."""
    notes: list[str] = []
    names = [f"rollouts/{file.name}" for file in sorted((folder / "rollouts").glob("step_*.parquet"))]
    rows = sorted(read_lines(folder, "samples.jsonl", VALIDATED, notes), key=lambda row: row["step"])
    validations = [[*of_step] for _, of_step in groupby(rows, lambda row: row["step"])]
    train = [("train", name, partial(_of_file, folder, name)) for name in spread_out(names)]
    val = [("val", "samples.jsonl", partial(_of_validation, folder, of_step)) for of_step in spread_out(validations)]
    found: list[tuple[str, Chunk]] = []
    packed, size, too_large = dict[str, bytes](), 0, 0
    for kind, name, pack in in_turn(train, val):
        try:
            chunk = pack()
        except (pa.ArrowException, OSError, ValueError) as error:
            notes.append(could_not_read(name, [f"the file ({reason(error)})"]))
            continue
        if chunk.broken:
            notes.append(could_not_read(name, chunk.broken))
        new = {key: value for key, value in {chunk.key: chunk.packed, **chunk.images}.items() if key not in packed}
        if size + sum(map(len, new.values())) > most_bytes:
            too_large += 1
            if too_large == 4:  # a smaller step may still fit
                break
            continue
        found.append((kind, chunk))
        packed |= new
        size += sum(map(len, new.values()))
    index = _joined(found)
    index["kept"] = sum(_rows_in(folder, name) for name in names) + len(rows)
    index["shown"] = len(index["step"])
    index["has_training"] = bool(names)
    return index, packed, notes


def spread_out(items: Sequence[T]) -> Iterator[T]:
    """The last, the first, then one in the middle of each gap, and so on: any beginning of it is spread over all."""
    yield from [*items[-1:], *items[:1]][: len(items)]
    gaps = deque([(0, len(items) - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield items[middle]
            gaps += [(low, middle), (middle, high)]


def in_turn(one: Iterable[T], other: Iterable[T]) -> Iterator[T]:
    """Items of both by turns; the rest of the longer one at the end."""
    for pair in zip_longest(one, other):
        yield from (item for item in pair if item is not None)


def _rows_in(folder: Path, name: str) -> int:
    """0 if the file cannot be read."""
    try:
        with open_inside(folder, name) as file:
            return pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError):
        return 0


def _joined(chunks: list[tuple[str, Chunk]]) -> dict[str, Any]:
    """One list a column for all rows. Texts stand once, in "texts", and the columns hold their numbers."""
    rows = [
        {"kind": kind, "chunk": chunk.key, "at": at, **row}
        for kind, chunk in chunks
        for at, row in enumerate(chunk.rows)
    ]
    rows.sort(key=lambda row: (row["step"], row["kind"], row["chunk"], row["at"]))
    texts: dict[str | None, int] = {}
    names = ("kind", "chunk", "at", "step", "group", "sample", "source", "finish", "prompt", "score", "length")
    coded = {"kind", "chunk", "group", "source", "finish", "prompt"}
    columns = {
        name: [texts.setdefault(row[name], len(texts)) if name in coded else row[name] for row in rows]
        for name in names
    }
    scales = {
        field: max(found) for field in FIELDS if (found := [c.scales[field] for _, c in chunks if field in c.scales])
    }
    return {**columns, "texts": [*texts], "scales": scales}


# ---- training samples ----------------------------------------------------------------------------


def _of_file(folder: Path, name: str) -> Chunk:
    stat = (folder / name).stat()
    return _of_version(folder, name, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1000)  # for --serve: a file is packed once
def _of_version(folder: Path, name: str, *version: int) -> Chunk:
    table = _read_table(folder, name)
    lists = {name: _arrays(table, name) for name, kind in COLUMNS.items() if kind in (FLOATS, WHOLE)}
    plain = table.drop_columns([*lists]).to_pylist()
    images = Images(folder)
    index, rows, broken = [], [], []
    numbers: list[tuple[str, np.ndarray]] = []
    for i, row in enumerate(plain):
        arrays = {name: column[i] for name, column in lists.items()}
        try:
            rewards = _checked(row, arrays)
        except ValueError as error:
            broken.append(f"row {i + 1} ({reason(error)})")
            continue
        length = len(row["tokens"])
        fields = _fields(arrays)
        index.append(
            {"step": row["step"], "group": _digest(row["group"]), "sample": row["sample"]}
            | {"source": _short(row["data_source"]), "finish": _short(row["finish_reason"])}
            | {"prompt": _digest(row["row_hash"] or row["prompt"]), "score": _finite(row["score"]), "length": length}
        )
        rows.append(
            {name: row[name] for name in ("prompt", "ground_truth", "tokens")}
            | {"turns": _turns(row["turns"]), "rewards": rewards, "images": images.keys(row["images"])}
            | {"tool_errors": row["tool_errors"]}
            | {name: _runs(arrays[name]) for name in ("response_mask", "loss_mask", "weight_versions")}
            | {"fields": [*fields], "length": length}
        )
        numbers += fields.items()
    return _chunk(index, rows, numbers, images, broken)


def _read_table(folder: Path, name: str) -> pa.Table:
    """The first whole groups of a file of training samples, with the columns and types of COLUMNS."""
    with open_inside(folder, name) as file:
        table = pq.read_table(file)
    if missing := [column for column in NEEDED if column not in table.column_names]:
        raise ValueError(f"no column {', '.join(missing)}")
    columns = {}
    for column, kind in COLUMNS.items():
        try:
            there = column in table.column_names
            columns[column] = table[column].cast(kind) if there else pa.nulls(len(table), kind)
        except pa.ArrowException as error:
            raise ValueError(f"column {column}: {error}") from error
    return pa.table(columns).slice(0, _whole_groups(columns["group"].to_pylist()))


def _checked(row: dict[str, Any], arrays: dict[str, np.ndarray | None]) -> dict[str, Any]:
    """The rewards of a row of training samples. Raises ValueError if something is wrong with the row."""
    if missing := [name for name in NEEDED if row.get(name, arrays.get(name)) is None]:
        raise ValueError(f"no {', '.join(missing)}")
    shape = {"step": int, "sample": int, "turns": TURNS}
    check(row, shape | {"tokens": [str], "images": [str], "tool_errors": [str]})
    lengths = {name: len(values) for name, values in arrays.items() if values is not None}
    if wrong := [name for name, length in lengths.items() if length != len(row["tokens"])]:
        raise ValueError(f"{len(row['tokens'])} tokens, but {lengths[wrong[0]]} {wrong[0]}")
    if [name for name, values in arrays.items() if values is not None and values.dtype == object]:
        raise ValueError("a list of whole numbers with null in it")
    return parse(row["rewards"] or "{}", {}) or {}


def _arrays(table: pa.Table, name: str) -> list[np.ndarray | None]:
    def plain(values: pa.Array) -> np.ndarray:
        if values.null_count and pa.types.is_integer(values.type):
            return np.array(values.to_pylist(), object)
        return values.to_numpy(zero_copy_only=False)

    return [plain(row.values) if row.is_valid else None for row in table[name].combine_chunks()]


def _fields(row: dict[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """The numbers of FIELDS, (T,) each, that the row has."""

    def first(*names: str) -> np.ndarray | None:
        return next((row[name] for name in names if row.get(name) is not None), None)

    logp, before = first("log_probs", "old_log_probs", "rollout_log_probs"), first("old_log_probs", "log_probs")
    rollout, ref, ratio = first("rollout_log_probs"), first("ref_log_probs"), first("ratio")
    with np.errstate(all="ignore"):
        fields = {
            "logp": logp,
            "mismatch": None if before is None or rollout is None else before - rollout,
            "log_ratio": None if ratio is None else np.log(ratio),
            "advantage": first("advantages"),
            "entropy": first("entropy"),
            "ref": None if ref is None or logp is None else logp - ref,
            "value": first("values"),
        }
    return {name: values for name, values in fields.items() if values is not None}


def _runs(values: np.ndarray | None) -> list[list[int]] | None:
    """[[value, how often], ...] of neighbours that are equal."""
    return None if values is None else [[int(value), len([*same])] for value, same in groupby(values.tolist())]


def _whole_groups(groups: list[str]) -> int:
    """How many rows to take: at most ROWS_A_STEP, and no part of a group but of the first."""
    if len(groups) <= ROWS_A_STEP:
        return len(groups)
    cut = ROWS_A_STEP
    while cut > 1 and groups[cut - 1] == groups[cut]:
        cut -= 1
    return cut if cut > 1 else ROWS_A_STEP


# ---- validation samples --------------------------------------------------------------------------


def _of_validation(folder: Path, rows: list[dict[str, Any]]) -> Chunk:
    """The chunk of one step's rows of samples.jsonl. Responses to one row of the data set are a group; in older files,
    which do not name it, those to one prompt text."""
    index, shown, images = [], [], Images(folder)
    seen: dict[str, int] = {}
    for row in rows[:ROWS_A_STEP]:
        prompt, response, row_hash = row.get("prompt") or "", row.get("response") or "", row.get("row_hash")
        group = _digest(json.dumps([row_hash, row.get("index"), row.get("data_source")] if row_hash else prompt))
        seen[group] = seen.get(group, -1) + 1
        index.append(
            {"step": row["step"], "group": group, "sample": seen[group], "source": _short(row.get("data_source"))}
            | {"finish": _short(row.get("finish_reason")), "prompt": _digest(row_hash or prompt)}
            | {"length": len(response), "score": _finite(row.get("score"))}
        )
        truth = row.get("ground_truth")
        shown.append(
            {"prompt": prompt, "response": response, "turns": _turns(row.get("turns")), "fields": []}
            | {"images": images.keys(row.get("images")), "tool_errors": row.get("tool_errors")}
            | {"ground_truth": truth if truth is None or isinstance(truth, str) else json.dumps(truth)}
        )
    return _chunk(index, shown, [], images, [])


# ---- images --------------------------------------------------------------------------------------


class Images:
    """The images that the rows of a chunk name, from the run's images/."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key_of: dict[str, str | None] = {}
        self.jpegs: dict[str, bytes] = {}
        self.broken: list[str] = []

    def keys(self, names: list[str] | None) -> list[str]:
        """Of the images of a row; without those that cannot be shown, which are in `broken`."""
        for name in names or ():
            if name not in self.key_of:
                try:
                    jpeg = self._read(name)
                    self.key_of[name] = key = hashlib.sha256(jpeg).hexdigest()[:16]
                    self.jpegs[key] = jpeg
                except (OSError, ValueError, Image.DecompressionBombError) as error:
                    self.key_of[name] = None
                    self.broken.append(f"{name[:60]} ({reason(error)})")
        return [shown for name in names or () if (shown := self.key_of[name])]

    def _read(self, name: str) -> bytes:
        with open_inside(self.folder, f"images/{name}") as file:
            jpeg = file.read(MOST_IMAGE_BYTES + 1)
        if len(jpeg) > MOST_IMAGE_BYTES:
            raise ValueError(f"it is larger than {MOST_IMAGE_BYTES / 1e3:g} kB")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            size = Image.open(io.BytesIO(jpeg), formats=["JPEG"]).size  # reads the header alone
        if max(size) > LARGEST_IMAGE:
            raise ValueError(f"it has {size[0]} x {size[1]} pixels; at most {LARGEST_IMAGE} are shown")
        return jpeg


# ---- packing -------------------------------------------------------------------------------------


def _chunk(
    index: list[dict], rows: list[dict], numbers: list[tuple[str, np.ndarray]], images: Images, broken: list[str]
) -> Chunk:
    """rows: what the browser gets of each; numbers: their fields one after the other, in the order of row["fields"]."""
    prompts: dict[str, int] = {}
    for row in rows:
        row["prompt"] = prompts.setdefault(row["prompt"], len(prompts))  # gzip does not look back as far as a response
    text = json.dumps({"prompts": [*prompts], "rows": _finite_or_text(rows)}, separators=(",", ":")).encode()
    halves = np.concatenate([np.zeros(0, "<u2"), *(bfloat16(values, DIGITS.get(name, 5)) for name, values in numbers)])
    planes = (halves >> 8).astype(np.uint8).tobytes() + (halves & 255).astype(np.uint8).tobytes()
    packed = gzip.compress(struct.pack("<I", len(text)) + text + planes, compresslevel=6, mtime=0)
    scales = {}
    for field in FIELDS:
        of_field = [values[np.isfinite(values)] for name, values in numbers if name == field]
        if sum(map(len, of_field)):
            scales[field] = float(f"{np.percentile(np.abs(np.concatenate(of_field)), 99):.3g}")
    key = hashlib.sha256(packed).hexdigest()[:16]
    return Chunk(key, packed, index, scales, images.jpegs, broken + images.broken)


def bfloat16(values: np.ndarray, digits: int) -> np.ndarray:
    """The upper halves of float32s, rounded to `digits` binary digits after the point, at most 7, of which the relative
    error is at most 2 ** -(digits + 1). What is not finite stays what it is."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    dropped = 23 - digits
    rounded = (bits + (1 << (dropped - 1))) >> dropped << (dropped - 16)
    whole = (bits >> 16) | np.where(np.isnan(values), 0x40, 0).astype("<u4")
    return np.where(np.isfinite(values), rounded, whole).astype("<u2")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _turns(turns: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """With all that the browser asks of them."""
    return turns and [{name: turn.get(name) or usual for name, usual in TURN.items()} for turn in turns]


def _short(text: str | None) -> str | None:
    """For the index, which holds it for all rows."""
    return text if text is None else text[:100]


def _finite_or_text(value: Any) -> Any:
    """The same, with numbers that JSON does not have as text."""
    if isinstance(value, dict):
        return {name: _finite_or_text(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite_or_text(inner) for inner in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
