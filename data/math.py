r"""MATH (competition problems with LaTeX answers) -> train.parquet and test.parquet.

    python data/math.py --out data/math                       # from the hub: train of MATH-lighteval, test MATH-500
    python data/math.py --out data/math --local-dir COPY      # from a folder with train* and test* .parquet or .jsonl

MATH-500 is part of MATH's test split, so no test problem is in train. Rows are scored by rewards/math.py. The ground
truth is the row's "answer" where it has one, else the last \boxed{...} of its "solution"; a row with neither is left
out and counted.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

from pathlib import Path

from data.rows import make_row, read_split, run_script, write_rows
from lib import InputError
from rewards.math import last_boxed

HUB_IDS = {"train": "DigitalLearningGmbH/MATH-lighteval", "test": "HuggingFaceH4/MATH-500"}
INSTRUCTION = "Think step by step, and put the final answer within \\boxed{}."


def main(out: Path, local_dir: Path | None = None) -> None:
    """Write train.parquet and test.parquet.

    Args:
        out: folder to write to.
        local_dir: folder with copies of the two sets; without it, the hub.
    """
    out.mkdir(parents=True, exist_ok=True)
    for split, hub_id in HUB_IDS.items():
        rows, n_read = [], 0
        for i, (_, row) in enumerate(read_split(hub_id, split, {"problem": str}, local_dir=local_dir)):
            n_read += 1
            answer = row.get("answer") or last_boxed(row.get("solution") or "")
            if not answer:
                continue
            subject = row.get("subject") or row.get("type") or ""
            info = {"split": split, "index": i, "level": str(row.get("level", "")), "subject": subject}
            info["question"] = row["problem"]
            rows.append(make_row(hub_id, f"{row['problem']}\n\n{INSTRUCTION}", answer, info))
        if not rows:
            raise InputError(f"{local_dir or hub_id} {split}: none of {n_read} rows has an answer; is this MATH?")
        write_rows(rows, out / f"{split}.parquet", f", {n_read - len(rows)} left out (no answer)")


if __name__ == "__main__":
    run_script(main)
