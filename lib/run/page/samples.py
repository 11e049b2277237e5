"""Packs a run's samples for the page: a small index of all responses, and their texts and numbers in chunks, one a file
of training samples and one a validation, which the browser unpacks when it shows them.

A chunk is gzip of: the length of its JSON (4 bytes, little-endian), the JSON, then the numbers of its tokens in
bfloat16, the high bytes first, then the low ones, which gzip likes better.
"""

import gzip
import hashlib
import json
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lib.run.page.read import read_lines

T = TypeVar("T")
FIELDS = ("logp", "mismatch", "log_ratio", "advantage", "entropy", "ref", "value")
"""numbers of a token: log-prob after the update if there is one, else before, else the engine's; before the update (or
after) minus the engine's; log of the ratio; ...; logp minus the reference's; ..."""
DIGITS = {"logp": 6}
"""binary digits after the point: log-probs, of which probabilities are made, are within 0.8 %; all others have 5
digits, within 1.6 %"""
ROWS_A_STEP = 256  # at most, of a validation or a file of training samples


class Chunk(NamedTuple):
    key: str
    """names the content"""
    packed: bytes
    rows: list[dict[str, Any]]
    """in the chunk's order: step, group, sample, source, finish, prompt (a digest), score, length"""
    scales: dict[str, float]
    """for each field what 99 % of the absolute values are below"""


def pack_samples(folder: Path, most_bytes: float) -> tuple[dict[str, Any], dict[str, bytes], list[str]]:
    """(index, {key: chunk}, notes) of a run. Where the chunks would be larger than `most_bytes`, steps are left out
    evenly, and index["kept"] is larger than index["shown"]."""
    files = sorted((folder / "rollouts").glob("step_*.parquet"))
    rows, notes = read_lines(folder / "samples.jsonl")
    rows.sort(key=lambda row: row["step"])
    validations = [[*of_step] for _, of_step in groupby(rows, lambda row: row["step"])]
    train = [("train", f"rollouts/{file.name}", partial(_of_file, file)) for file in spread_out(files)]
    val = [("val", "samples.jsonl", partial(_of_validation, of_step)) for of_step in spread_out(validations)]
    found, size = [], 0
    for kind, name, pack in in_turn(train, val):
        if size > most_bytes:
            break
        try:
            chunk = pack()
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            notes.append(f"{name}: left out ({str(error).splitlines()[0]})")
            continue
        found.append((kind, chunk))
        size += len(chunk.packed)
    index = _joined(found)
    index["kept"] = sum(pq.read_metadata(file).num_rows for file in files if _is_whole(file)) + len(rows)
    index["shown"] = len(index["step"])
    index["has_training"] = bool(files)
    return index, {chunk.key: chunk.packed for _, chunk in found}, notes


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


def _is_whole(file: Path) -> bool:
    try:
        pq.read_metadata(file)
    except (pa.ArrowException, OSError):
        return False
    return True


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


def _of_file(file: Path) -> Chunk:
    stat = file.stat()
    return _of_version(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1000)  # for --serve: a file is packed once
def _of_version(file: Path, *version: int) -> Chunk:
    table = pq.read_table(file)
    table = table.slice(0, _whole_groups(table["group"].to_pylist()))
    lists = {
        name: _arrays(table, name) for name in table.column_names if pa.types.is_list(table.schema.field(name).type)
    }
    plain = table.drop_columns([name for name in lists if name not in ("tokens", "turns")]).to_pylist()
    index, rows = [], []
    numbers: list[tuple[str, np.ndarray]] = []
    for i, row in enumerate(plain):
        arrays = {name: column[i] for name, column in lists.items() if name not in ("tokens", "turns")}
        length = len(arrays["response_ids"])
        fields = _fields(arrays)
        index.append(
            {name: row[name] for name in ("step", "group", "sample")}
            | {"source": row["data_source"], "finish": row["finish_reason"], "prompt": _digest(row["prompt"])}
            | {"score": _finite(row["score"]), "length": length}
        )
        rows.append(
            {name: row.get(name) for name in ("prompt", "ground_truth", "turns", "tokens")}
            | {"rewards": json.loads(row["rewards"] or "{}")}
            | {name: _runs(arrays.get(name)) for name in ("response_mask", "loss_mask", "weight_versions")}
            | {"fields": [*fields], "length": length}
        )
        numbers += fields.items()
    return _chunk(index, rows, numbers)


def _arrays(table: pa.Table, name: str) -> list[np.ndarray | None]:
    return [row.values.to_numpy(zero_copy_only=False) if row.is_valid else None for row in table[name].combine_chunks()]


def _fields(row: dict[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """The numbers of FIELDS, (T,) each, that the row has."""

    def first(*names: str) -> np.ndarray | None:
        return next((row[name] for name in names if row.get(name) is not None), None)

    logp, before = first("log_probs", "old_log_probs", "rollout_log_probs"), first("old_log_probs", "log_probs")
    rollout, ref, ratio = first("rollout_log_probs"), first("ref_log_probs"), first("ratio")
    with np.errstate(divide="ignore", invalid="ignore"):
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


def _of_validation(rows: list[dict[str, Any]]) -> Chunk:
    """The chunk of one step's rows of samples.jsonl. Rows of one prompt are a group."""
    index, shown = [], []
    seen: dict[str, int] = {}
    for row in rows[:ROWS_A_STEP]:
        prompt, response, score = str(row.get("prompt", "")), str(row.get("response", "")), row.get("score")
        digest = _digest(prompt)
        seen[digest] = seen.get(digest, -1) + 1
        index.append(
            {"step": row["step"], "group": digest, "sample": seen[digest], "source": row.get("data_source")}
            | {"finish": row.get("finish_reason"), "prompt": digest, "length": len(response)}
            | {"score": _finite(score) if isinstance(score, int | float) else None}
        )
        truth = row.get("ground_truth")
        shown.append(
            {"prompt": prompt, "response": response, "turns": row.get("turns"), "fields": []}
            | {"ground_truth": truth if truth is None or isinstance(truth, str) else json.dumps(truth)}
        )
    return _chunk(index, shown, [])


# ---- packing -------------------------------------------------------------------------------------


def _chunk(index: list[dict], rows: list[dict], numbers: list[tuple[str, np.ndarray]]) -> Chunk:
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
    return Chunk(hashlib.sha256(packed).hexdigest()[:16], packed, index, scales)


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


def _finite_or_text(value: Any) -> Any:
    """The same, with numbers that JSON does not have as text."""
    if isinstance(value, dict):
        return {name: _finite_or_text(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite_or_text(inner) for inner in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _finite(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.6g}")
