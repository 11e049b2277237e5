r"""MATH-500, AIME 2024 and AIME 2025, for validation -> math500.parquet, aime24.parquet and aime25.parquet.

    python data/math_val.py --out data/math_val                     # from the hub
    python data/math_val.py --out data/math_val --local-dir COPY    # from COPY/math500/test*, COPY/aime24/train* and
                                                                    # COPY/aime25/test*, .parquet or .jsonl
    python data/math_val.py --out data/math_val --form answer --sets aime24 aime25

A model is to be asked as it was in training. --form boxed is the prompt of data/math.py, scored by rewards/math.py.
--form answer is the prompt of DAPO-Math-17k, scored by rewards/math_dapo.py: 1 for a right answer, -1 for a wrong one,
so look at "acc". That scorer compares text: for MATH-500, whose answers are LaTeX, prefer boxed.

AIME has 30 problems a year: take several samples of each (--val-samples 32 --val-temperature 1).
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

from pathlib import Path
from typing import Literal

from data.math import INSTRUCTION
from data.rows import make_row, read_split, run_script, write_rows

SETS = {  # name -> hub id, split
    "math500": ("HuggingFaceH4/MATH-500", "test"),
    "aime24": ("HuggingFaceH4/aime_2024", "train"),
    "aime25": ("math-ai/aime25", "test"),
}
FORMS = {
    "boxed": "{problem}\n\n" + INSTRUCTION.replace("{}", "{{}}"),
    "answer": (  # the words of DAPO-Math-17k's rows
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
}


def main(
    out: Path,
    local_dir: Path | None = None,
    sets: tuple[Literal["math500", "aime24", "aime25"], ...] = ("math500", "aime24", "aime25"),
    form: Literal["boxed", "answer"] = "boxed",
) -> None:
    """Write a .parquet file for each set.

    Args:
        out: folder to write to.
        local_dir: folder with a folder for each set; without it, the hub.
        sets: which sets.
        form: what the prompt asks for: \\boxed{...}, or a last line "Answer: ...".
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in sets:
        hub_id, split = SETS[name]
        folder = local_dir and local_dir / name
        source = read_split(hub_id, split, {"problem": str, "answer": str | int}, local_dir=folder)
        rows = []
        for i, (_, row) in enumerate(source):
            prompt = FORMS[form].format(problem=row["problem"])
            info = {"split": "test", "index": i, "question": row["problem"]}
            rows.append(make_row(hub_id if form == "boxed" else f"math_dapo/{name}", prompt, str(row["answer"]), info))
        write_rows(rows, out / f"{name}.parquet")


if __name__ == "__main__":
    run_script(main)
