"""What the scripts of this folder share: the form of a row (verl's), its file, and how a script ends."""

import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import tyro

from lib import InputError


def make_row(data_source: str, prompt: str, truth: str, extra_info: dict) -> dict:
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
