"""Natural Questions and HotpotQA, for a model with a search tool (Search-R1, arXiv:2503.09516) -> two .parquet files.

    python data/search_qa.py --out data/search_qa                    # RUC-NLPIR/FlashRAG_datasets from the hub
    python data/search_qa.py --out data/search_qa --local-dir COPY   # COPY/nq/train*, COPY/nq/test*,
                                                                     # COPY/hotpotqa/train* and COPY/hotpotqa/dev*

train.parquet has both training sets: the questions that Search-R1 trained on. test.parquet has the first `test_size` of
NQ's test and of HotpotQA's dev split (its test answers are not public). Rows are scored by rewards/search_qa.py
(data_source "nq" or "hotpotqa"): exact match, or F1. A row without an answer is left out and counted. The search tool's
description is in the prompt by the chat template: --multi-turn.tools search:...
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120

from itertools import islice
from pathlib import Path

from data.rows import make_row, read_split, run_script, write_rows
from lib import InputError

HUB_ID = "RUC-NLPIR/FlashRAG_datasets"
SPLITS = {"train": {"nq": "train", "hotpotqa": "train"}, "test": {"nq": "test", "hotpotqa": "dev"}}
COLUMNS = {"question": str, "golden_answers": list}
INSTRUCTION = (
    "Think step by step, and search for what you do not know. Give only the answer, a few words, within <answer> and "
    "</answer>."
)


def main(out: Path, local_dir: Path | None = None, test_size: int = 500) -> None:
    """Write train.parquet and test.parquet.

    Args:
        out: folder to write to.
        local_dir: folder with a folder nq and a folder hotpotqa; without it, the hub.
        test_size: test rows of each set, at most.
    """
    if test_size < 1:
        raise InputError(f"--test-size {test_size}: at least 1")
    out.mkdir(parents=True, exist_ok=True)
    for split, sources in SPLITS.items():
        rows: list[dict] = []
        n_without = 0
        for name, source_split in sources.items():
            folder = local_dir and local_dir / name
            source = read_split(HUB_ID, source_split, COLUMNS, config=name, local_dir=folder)
            for _, row in islice(source, test_size if split == "test" else None):
                answers = [answer for answer in map(str, row["golden_answers"]) if answer.strip()]
                if not answers:
                    n_without += 1
                    continue
                question = row["question"].strip().removesuffix("?").strip() + "?"  # NQ's have none
                info = {"split": split, "index": len(rows), "id": str(row.get("id", "")), "question": question}
                rows.append(make_row(name, f"{question}\n\n{INSTRUCTION}", answers, info))
        write_rows(rows, out / f"{split}.parquet", f", {n_without} left out (no answer)")


if __name__ == "__main__":
    run_script(main)
