r"""Geometry3K (problems of plane geometry, each with its figure) -> train.parquet and test.parquet.

    python data/geometry3k.py --out data/geometry3k                    # hiyouga/geometry3k from the hub
    python data/geometry3k.py --out data/geometry3k --local-dir COPY   # a copy of it: train* and test* .parquet

For models that see. Rows are scored by rewards/geometry3k.py (data_source "hiyouga/geometry3k"), which also gives a
tenth for the form: <think>...</think>, then \boxed{}.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import copy
from pathlib import Path

from data.rows import make_row, read_split, run_script, write_rows

HUB_ID = "hiyouga/geometry3k"
INSTRUCTION = (
    "First think about the problem between <think> and </think>. After that, give the final answer inside \\boxed{}."
)


def main(out: Path, local_dir: Path | None = None) -> None:
    """Write train.parquet and test.parquet.

    Args:
        out: folder to write to.
        local_dir: folder with a copy of hiyouga/geometry3k; without it, the hub.
    """
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = []
        source = read_split(HUB_ID, split, {"images": list, "problem": str, "answer": str}, local_dir=local_dir)
        for i, (_, row) in enumerate(source):
            info = {"split": split, "index": i, "question": row["problem"], "answer": row["answer"]}
            made = make_row(HUB_ID, f"{row['problem']}\n\n{INSTRUCTION}", row["answer"], info)
            # a copy of a picture does not know its file's format, so that it is written as PNG, without loss
            rows.append(made | {"images": [copy.copy(image) for image in row["images"]]})
        write_rows(rows, out / f"{split}.parquet")


if __name__ == "__main__":
    run_script(main)
