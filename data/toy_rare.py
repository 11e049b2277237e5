"""The embedded task that tells algorithms apart: the sums of data/toy.py, and a start that hardly ever works them out.

    python data/toy_rare.py       rewrites data/toy_rare/: model/ and few.jsonl (two minutes on one core)

The rows are those of data/toy/; few.jsonl has the first 256 of its train.jsonl, to come round often. The model first
imitates the pupils of data/toy.py, so it knows how a working goes, then others, of whom 3 in 100 show one and slip in
one column of five. Where a sum has a carry, one sample in a hundred is right: most groups of 8 have nothing to learn
from. So how long it takes until reward rises depends on what an algorithm makes of a rare success, and on the luck of
the seed: benchmarks/comparison.py runs five.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import json
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from data.toy import SHARE_WORKED, demonstration, make_rows, make_tokenizer, save_model, warm_up

FOLDER = Path(__file__).parent / "toy_rare"
SHARE_RARE = 0.03  # of the later demonstrations that are worked
SHARE_SLIPS = 0.2  # of the columns of a working
FIRST, THEN, BATCH = 600, 100, 64  # batches of both kinds of pupils


def pupils() -> Callable[[int, int, random.Random], str]:
    """Demonstrations in the order of the warm-up."""
    numbers = count()

    def demonstrate(a: int, b: int, rng: random.Random) -> str:
        share_worked = SHARE_WORKED if next(numbers) < FIRST * BATCH else SHARE_RARE
        return demonstration(a, b, rng, share_worked, SHARE_SLIPS)

    return demonstrate


def main() -> None:
    torch.set_num_threads(1)  # the sums inside a matrix product depend on the number of threads
    tokenizer, (train, val) = make_tokenizer(), make_rows()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train[:256]))
    held_out = {row["prompt"][0]["content"] for row in val}
    model, losses = warm_up(tokenizer, held_out, steps=FIRST + THEN, batch_size=BATCH, demonstrate=pupils())
    save_model(model, tokenizer, FOLDER / "model")
    print(f"warm-up loss {losses[0]:.3f} -> {losses[-1]:.3f}; wrote {FOLDER}")


if __name__ == "__main__":
    main()
