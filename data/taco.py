"""TACO (programming contests, arXiv:2312.14852) -> train.parquet and test.parquet.

    python data/taco.py --out data/taco                    # likaixin/TACO-verified from the hub
    python data/taco.py --out data/taco --local-dir COPY   # a copy of it, or of BAAI/TACO: train* .parquet or .jsonl

TACO-verified is a part of BAAI/TACO, which is a loading script that `datasets` no longer runs. It has one split:
`test_size` problems of it, drawn at random but always the same, are test. A problem may have hundreds of tests; those
with the `max_tests` longest inputs are kept. Rows are scored by rewards/code.py (data_source "taco"). A problem whose
tests that cannot read, or that is there twice, is left out and counted.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import json
import random
from pathlib import Path

from data.mbpp import INSTRUCTION
from data.rows import make_row, read_split, run_script, write_rows
from lib import InputError
from rewards.code import parse_tests

HUB_ID = "likaixin/TACO-verified"
IN_AND_OUT = "The program reads standard input and writes to standard output."


def longest(tests: dict, max_tests: int) -> dict:
    """`tests` with the cases of the longest inputs only, in the same order."""
    by_length = sorted(range(len(tests["inputs"])), key=lambda i: len(str(tests["inputs"][i])), reverse=True)
    kept = sorted(by_length[:max_tests])
    return tests | {name: [tests[name][i] for i in kept] for name in ("inputs", "outputs")}


def main(out: Path, local_dir: Path | None = None, test_size: int = 500, max_tests: int = 16) -> None:
    """Write train.parquet and test.parquet.

    Args:
        out: folder to write to.
        local_dir: folder with a copy of the set; without it, the hub.
        test_size: number of test rows.
        max_tests: tests kept of each problem.
    """
    if test_size < 1 or max_tests < 1:
        raise InputError(f"--test-size {test_size} --max-tests {max_tests}: each at least 1")
    problems: dict[str, tuple[str, str]] = {}  # question -> what the program is to be, its tests
    n_read = 0
    for _, row in read_split(HUB_ID, "train", {"question": str, "input_output": str}, local_dir=local_dir):
        n_read += 1
        try:
            parse_tests(row["input_output"])
        except InputError:
            continue
        tests = json.loads(row["input_output"])
        task = IN_AND_OUT
        if name := tests.get("fn_name"):
            task = "The program begins like this:\n" + (row.get("starter_code") or f"def {name}(").strip()
        problems.setdefault(row["question"].strip(), (task, json.dumps(longest(tests, max_tests))))
    if len(problems) <= test_size:
        raise InputError(f"{local_dir or HUB_ID}: {len(problems)} problems of {n_read} rows, none left for train")
    out.mkdir(parents=True, exist_ok=True)
    questions = random.Random(0).sample(list(problems), len(problems))
    for split, part in {"train": questions[test_size:], "test": questions[:test_size]}.items():
        rows = []
        for i, question in enumerate(part):
            task, truth = problems[question]
            prompt = f"{question}\n\n{task}\n\n{INSTRUCTION}"
            rows.append(make_row("taco", prompt, truth, {"split": split, "index": i}))
        write_rows(rows, out / f"{split}.parquet")
    print(f"{n_read - len(problems)} of {n_read} problems left out: no tests that can be run, or there twice")


if __name__ == "__main__":
    run_script(main)
