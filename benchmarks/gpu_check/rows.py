"""The flags of the check, and the rows of its table. No import of lib: a machine without its packages gets its rows."""

import gc
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).parent.parent.parent
Part = Literal[
    *("hardware", "numerics", "update", "fused", "memory", "scripts", "stages"),
    *("vllm_engine", "attention", "log_probs", "ranks", "saves", "vllm_scripts", "batch_invariance", "several"),
]


@dataclass
class Options:
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: to try the script itself"""
    tiny: bool = False
    """the embedded model for all parts, two steps of the scripts"""
    parts: tuple[Part, ...] = ()
    """which parts to run; empty: all, with --ranks hardware, ranks and several"""
    output: Path = ROOT / "benchmarks/results/gpu_check.json"
    """where the results go"""
    ranks: int = 0
    """how runs on several GPUs do: an even number of ranks of this node, in 20 minutes"""


# ---- rows of the table ---------------------------------------------------------------------------


def row(
    check: str, value: float | None, unit: str, ok: bool | None = None, claims: tuple[str, ...] = (), **more
) -> dict:
    """One line of the table. ok is None for what is only recorded. claims: what `claim` makes. In `more`: summary, a
    line of the summary and what the row adds to it; why and error, which the table prints. A value that is NaN or
    infinite fails."""
    if value is not None and not math.isfinite(value):
        value, ok, claims, more = None, False, (), {**more, "why": f"the value is {value}"}
    return {"check": check, "value": value, "unit": unit, "ok": ok, "claims": list(claims), **more}


def skipped(check: str, why: str) -> dict:
    """A check that cannot run here."""
    return row(check, None, "", why=why, skipped=True)


def claim(device: torch.device, name: str, holds: bool, said: str) -> tuple[str, ...]:
    """What a row says about one of CLAIMS, such as "G8"; nothing on a CPU, for they are about GPUs."""
    return (f"{name} {'confirmed' if holds else 'refuted'}: {said}",) if device.type == "cuda" else ()


def attempt(check: str, rows: Callable[[], Iterable[dict]]) -> Iterator[dict]:
    """The rows of one check of several in a part. If it raises, a row says why and the part goes on."""
    try:
        yield from rows()
    except Exception as error:  # noqa: BLE001  whatever it is, it is the result of this check
        yield row(f"{check} failed", None, "", False, error=traceback.format_exc()[-3000:])
        error.__traceback__ = None  # its frames hold tensors
    if torch.cuda.is_initialized():
        gc.collect()  # a model may be in a cycle
        torch.cuda.empty_cache()
