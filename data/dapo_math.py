"""DAPO-Math-17k (competition problems whose answer is an integer, arXiv:2503.14476) -> train.parquet.

    python data/dapo_math.py --out data/dapo_math                    # BytedTsinghua-SIA/DAPO-Math-17k from the hub
    python data/dapo_math.py --out data/dapo_math --local-dir COPY   # a copy of it: dapo-math-17k* .parquet or .jsonl

The file on the hub repeats about 17 thousand problems a hundred times, by accident. Here each is written once, and one
with two different answers is left out and counted. The prompts are the set's own: they ask for a last line
"Answer: ...", which rewards/math_dapo.py reads (data_source "math_dapo": 1 for a right answer, -1 for a wrong one). To
validate with the same prompt: data/math_val.py --form answer.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

from pathlib import Path

from data.rows import make_row, read_split, run_script, write_rows
from lib import InputError

HUB_ID = "BytedTsinghua-SIA/DAPO-Math-17k"
COLUMNS = {"prompt": list, "reward_model": dict, "extra_info": dict}


def main(out: Path, local_dir: Path | None = None) -> None:
    """Write train.parquet.

    Args:
        out: folder to write to.
        local_dir: folder with a copy of the set; without it, the hub.
    """
    out.mkdir(parents=True, exist_ok=True)
    answers: dict[str, dict[str, str]] = {}  # prompt -> its answers -> the set's name for the problem
    n_read = 0
    for place, row in read_split(HUB_ID, "dapo-math-17k" if local_dir else "train", COLUMNS, local_dir=local_dir):
        n_read += 1
        try:
            [message] = row["prompt"]
            prompt, answer = message["content"], str(row["reward_model"]["ground_truth"]).strip()
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{place}: not one message and a ground truth; is this DAPO-Math-17k?") from error
        answers.setdefault(prompt, {}).setdefault(answer, str(row["extra_info"].get("index", "")))
    rows: list[dict] = []
    for prompt, names in answers.items():
        if len(names) == 1:
            [(answer, name)] = names.items()
            rows.append(make_row("math_dapo", prompt, answer, {"split": "train", "index": len(rows), "id": name}))
    if not rows:
        raise InputError(f"{local_dir or HUB_ID}: no problem with one answer in {n_read} rows; is this DAPO-Math-17k?")
    note = f", from {n_read}; {len(answers) - len(rows)} problems left out (different answers)"
    write_rows(rows, out / "train.parquet", note)


if __name__ == "__main__":
    run_script(main)
