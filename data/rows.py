"""What the scripts of this folder share: what they read, the form of a row (verl's), its file, how a script ends."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType

import datasets
import tyro

from lib import InputError
from lib.data import load_split


def read_split(
    hub_id: str,
    split: str,
    columns: Mapping[str, type | UnionType],
    *,
    config: str | None = None,
    local_dir: Path | None = None,
) -> Iterator[tuple[str, dict]]:
    """(where it is, for a message; the row) of each row of load_split. `columns` are those it must have, by type.

    Raises InputError, with the place, for a row without one (a null counts as none), or where it has another type.
    """
    for i, row in enumerate(load_split(hub_id, split, config=config, local_dir=local_dir)):
        place = f"{local_dir or hub_id} {split} row {i}"
        for column, kind in columns.items():
            value = row.get(column)
            if value is None:
                there = ", ".join(name for name, other in row.items() if other is not None)
                raise InputError(f"{place}: no column {column!r}; it has {there}")
            if not isinstance(value, kind):
                name = getattr(kind, "__name__", kind)
                raise InputError(f"{place}: its {column!r} is {str(value)[:60]!r}, which is no {name}")
        yield place, row


def make_row(data_source: str, prompt: str, truth: str | list[str], extra_info: dict) -> dict:
    """A row that lib/data/dataset.py reads: one user message, scored by the scorer of `data_source` against `truth`."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def write_rows(rows: list[dict], path: Path, note: str = "") -> None:
    datasets.Dataset.from_list(rows).to_parquet(path)
    print(f"{path}: {len(rows)} rows{note}")


def run_script(main: Callable[..., None]) -> None:
    """`main` with the flags of the command line; a user's mistake is one line and exit code 2, not a traceback."""
    try:
        tyro.cli(main)
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
