"""MBPP (short Python functions with three asserts each, arXiv:2108.07732) -> train.parquet and test.parquet.

    python data/mbpp.py --out data/mbpp                    # google-research-datasets/mbpp from the hub, "full"
    python data/mbpp.py --out data/mbpp --local-dir COPY   # a copy of it: train* and test* .parquet or .jsonl

The prompt shows the first assert, which names the function; the paper's shows all three, which a program could answer
from a table. Rows are scored by rewards/code.py (data_source "google-research-datasets/mbpp") against all of them.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import json
from pathlib import Path

from data.rows import make_row, read_split, run_script, write_rows
from lib import InputError

HUB_ID = "google-research-datasets/mbpp"
INSTRUCTION = "Think step by step, and end with the whole program in one ```python block."


def main(out: Path, local_dir: Path | None = None) -> None:
    """Write train.parquet and test.parquet.

    Args:
        out: folder to write to.
        local_dir: folder with a copy of google-research-datasets/mbpp; without it, the hub.
    """
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = []
        columns = {"text": str, "test_list": list}
        for i, (place, row) in enumerate(read_split(HUB_ID, split, columns, config="full", local_dir=local_dir)):
            if not row["test_list"]:
                raise InputError(f"{place}: its test_list is empty; is this MBPP?")
            tests = {"test_list": row["test_list"], "test_setup_code": row.get("test_setup_code") or ""}
            prompt = f"{row['text']}\nA test of it: {row['test_list'][0]}\n\n{INSTRUCTION}"
            info = {"split": split, "index": i, "id": str(row.get("task_id", ""))}
            rows.append(make_row(HUB_ID, prompt, json.dumps(tests), info))
        write_rows(rows, out / f"{split}.parquet")


if __name__ == "__main__":
    run_script(main)
