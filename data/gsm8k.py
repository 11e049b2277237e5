"""GSM8K (grade-school word problems whose answer is one number) -> train.parquet and test.parquet.

    python data/gsm8k.py --out data/gsm8k                    # openai/gsm8k from the hub
    python data/gsm8k.py --out data/gsm8k --local-dir COPY   # a copy of it: train* and test* .parquet or .jsonl

Rows are scored by rewards/gsm8k.py (data_source "openai/gsm8k").
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

from pathlib import Path

from data.rows import make_row, read_split, run_script, write_rows
from lib import InputError

HUB_ID = "openai/gsm8k"
INSTRUCTION = 'Think step by step, and end with the final answer, a number, after "####".'


def main(out: Path, local_dir: Path | None = None) -> None:
    """Write train.parquet and test.parquet.

    Args:
        out: folder to write to.
        local_dir: folder with a copy of openai/gsm8k; without it, the hub.
    """
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = []
        source = read_split(HUB_ID, split, {"question": str, "answer": str}, config="main", local_dir=local_dir)
        for i, (place, row) in enumerate(source):
            _, mark, answer = row["answer"].rpartition("####")
            if not mark:
                raise InputError(f"{place}: its answer has no '####'; is this GSM8K?")
            prompt, truth = f"{row['question']}\n\n{INSTRUCTION}", answer.strip().replace(",", "")
            info = {"split": split, "index": i, "question": row["question"], "answer": row["answer"]}
            rows.append(make_row(HUB_ID, prompt, truth, info))
        write_rows(rows, out / f"{split}.parquet")


if __name__ == "__main__":
    run_script(main)
