"""Natural Questions and HotpotQA, for a model with a search tool (Search-R1, arXiv:2503.09516) -> rows, and a corpus.

    python data/search_qa.py --out data/search_qa                    # RUC-NLPIR/FlashRAG_datasets from the hub
    python data/search_qa.py --out data/search_qa --local-dir COPY   # COPY/nq/train*, COPY/nq/test*,
                                                                     # COPY/hotpotqa/train* and COPY/hotpotqa/dev*
    python data/search_qa.py --out data/search_qa --sets hotpotqa    # with a corpus that holds the answers

train.parquet has both training sets: the questions that Search-R1 trained on. test.parquet has the first `test_size` of
NQ's test and of HotpotQA's dev split (its test answers are not public). Rows are scored by rewards/search_qa.py
(data_source "nq" or "hotpotqa"): exact match, or F1. A row without an answer is left out and counted. The search tool's
description is in the prompt by the chat template: --multi-turn.tools search:...

corpus.jsonl is for that tool: the paragraphs of Wikipedia that come with HotpotQA's questions, ten each, of which two
hold the answer, each once. NQ's questions have none: they want all of Wikipedia, behind a server.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import json
from itertools import islice
from pathlib import Path
from typing import Literal

from data.rows import make_row, read_split, run_script, write_rows
from lib import InputError

HUB_ID = "RUC-NLPIR/FlashRAG_datasets"
SPLITS = {"train": {"nq": "train", "hotpotqa": "train"}, "test": {"nq": "test", "hotpotqa": "dev"}}
COLUMNS = {"question": str, "golden_answers": list}
INSTRUCTION = (
    "Think step by step, and search for what you do not know. Give only the answer, a few words, within <answer> and "
    "</answer>."
)


def main(
    out: Path,
    local_dir: Path | None = None,
    sets: tuple[Literal["nq", "hotpotqa"], ...] = ("nq", "hotpotqa"),
    test_size: int = 500,
) -> None:
    """Write train.parquet and test.parquet, and corpus.jsonl if the rows come with paragraphs.

    Args:
        out: folder to write to.
        local_dir: folder with a folder for each set; without it, the hub.
        sets: which sets.
        test_size: test rows of each set, at most.
    """
    if test_size < 1:
        raise InputError(f"--test-size {test_size}: at least 1")
    out.mkdir(parents=True, exist_ok=True)
    passages: dict[str, str] = {}  # title -> text
    for split, sources in SPLITS.items():
        rows: list[dict] = []
        n_without = 0
        for name in sets:
            folder = local_dir and local_dir / name
            source = read_split(HUB_ID, sources[name], COLUMNS, config=name, local_dir=folder)
            for _, row in islice(source, test_size if split == "test" else None):
                answers = [answer for answer in map(str, row["golden_answers"]) if answer.strip()]
                if not answers:
                    n_without += 1
                    continue
                question = row["question"].strip().removesuffix("?").strip() + "?"  # NQ's have none
                info = {"split": split, "index": len(rows), "id": str(row.get("id", "")), "question": question}
                rows.append(make_row(name, f"{question}\n\n{INSTRUCTION}", answers, info))
                context = (row.get("metadata") or {}).get("context") or {"title": (), "sentences": ()}
                for title, sentences in zip(context["title"], context["sentences"]):
                    passages.setdefault(title, " ".join(sentence.strip() for sentence in sentences))
        write_rows(rows, out / f"{split}.parquet", f", {n_without} left out (no answer)")
    if passages:
        lines = [json.dumps({"title": title, "text": text}) + "\n" for title, text in passages.items()]
        (out / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{out / 'corpus.jsonl'}: {len(passages)} passages")


if __name__ == "__main__":
    run_script(main)
