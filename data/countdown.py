"""Countdown (reach a number by + - * / from three or four others) -> train.parquet and test.parquet.

    python data/countdown.py --out data/countdown                    # Jiayi-Pan/Countdown-Tasks-3to4 from the hub
    python data/countdown.py --out data/countdown --local-dir COPY   # a copy of it: train* .parquet or .jsonl

The set has one split. Its first `test_size` puzzles are test and the next `size` train, each puzzle once: the same
numbers in another order, with the same target, are the same puzzle. Rows are scored by
rewards/countdown.py (data_source "countdown"), which wants every number exactly once, as the prompt does; TinyZero's
prompt says "only once".
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

HUB_ID = "Jiayi-Pan/Countdown-Tasks-3to4"
INSTRUCTION = (
    "Think step by step, and give only the expression within <answer> and </answer>, such as "
    "<answer>(8 - 3) * 4</answer>."
)


def main(out: Path, local_dir: Path | None = None, size: int = 327_680, test_size: int = 1024) -> None:
    """Write train.parquet and test.parquet.

    Args:
        out: folder to write to.
        local_dir: folder with a copy of the set; without it, the hub.
        size: number of training rows, at most.
        test_size: number of test rows.
    """
    if size < 1 or test_size < 1:
        raise InputError(f"--size {size} --test-size {test_size}: each at least 1")
    puzzles: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for _, row in read_split(HUB_ID, "train", {"target": int, "nums": list}, local_dir=local_dir):
        puzzles.setdefault((row["target"], *sorted(row["nums"])), (row["target"], row["nums"]))
        if len(puzzles) == test_size + size:
            break
    if len(puzzles) <= test_size:
        raise InputError(f"{local_dir or HUB_ID}: {len(puzzles)} puzzles, none left for train; lower --test-size")
    out.mkdir(parents=True, exist_ok=True)
    every = list(puzzles.values())
    for split, part in {"train": every[test_size:], "test": every[:test_size]}.items():
        rows = []
        for i, (target, numbers) in enumerate(part):
            listed = ", ".join(map(str, numbers))
            task = f"Use each of the numbers {listed} exactly once, with +, -, *, / and parentheses, to make {target}."
            truth = json.dumps({"target": target, "numbers": numbers})
            prompt = f"{task}\n\n{INSTRUCTION}"
            rows.append(make_row("countdown", prompt, truth, {"split": split, "index": i}))
        write_rows(rows, out / f"{split}.parquet")


if __name__ == "__main__":
    run_script(main)
