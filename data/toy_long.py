"""The embedded task with long responses and several data sources: running totals of a list, step by step.

    python data/toy_long.py       rewrites data/toy_long/: train.jsonl, val.jsonl and model/ (3 minutes on one core)

A list has 8 to 12 digits, each with a letter. A response repeats letter and digit, writes the total so far, and ends
with "=" and the last total, in 36 to 52 tokens. Totals have two digits (they are modulo 100). There are three kinds:

    +a4b8c9  ->  a404b812c921=21     toy/add: 0+4=04, 04+8=12, 12+9=21
    -a4b8c9  ->  a496b888c979=79     toy/subtract: 00-4=96, 96-8=88, 88-9=79
    *a4b8c9  ->  a404b816c941=41     toy/double: 2*00+4=04, 2*04+8=16, 2*16+9=41

Only the last total is scored. The start is data/toy.py's Llama, a quarter of its size, after it has imitated pupils
who forget most carries (`SHARE_FORGOTTEN`) and go on from the wrong total. So its greedy answers to the first two kinds
are all wrong, and a sample is right only if it remembers every carry of its list: 1 in 20 when adding, 1 in 50 when
subtracting. When doubling, mistakes may cancel: 1 in 8 is right. RL has to make the rarer of two choices the usual one,
at places that the reward does not point out.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import random
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from data import toy

FOLDER = Path(__file__).parent / "toy_long"
KINDS = {"+": "toy/add", "-": "toy/subtract", "*": "toy/double"}
LENGTHS = range(8, 13)  # digits of a list
SHARE_FORGOTTEN = 0.55  # of the carries in the demonstrations


def draw_list(rng: random.Random) -> list[int]:
    return [rng.randrange(10) for _ in range(rng.choice(LENGTHS))]


def question(kind: str, digits: list[int]) -> str:
    return kind + "".join(f"{letter}{digit}" for letter, digit in zip(ascii_lowercase, digits))


def response(kind: str, digits: list[int], forgets: Callable[[], bool] = lambda: False) -> str:
    """forgets(): asked at each step with a carry, whether the carry is left out."""
    text, tens, units = "", 0, 0
    for letter, digit in zip(ascii_lowercase, digits):
        factor, sign = 1 + (kind == "*"), -1 if kind == "-" else 1
        carry, units = divmod(factor * units + sign * digit, 10)
        tens = (factor * tens + (0 if carry and forgets() else carry)) % 10
        text += f"{letter}{digit}{tens}{units}"
    return f"{text}={tens}{units}"


def make_rows(n_train: int = 512, n_val: int = 64, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Rows of verl's form, (train, val), so many of each kind; no list occurs twice."""
    rng, rows, seen = random.Random(seed), [], set()
    while len(rows) < len(KINDS) * (n_train + n_val):
        digits = draw_list(rng)
        if (*digits,) in seen:
            continue
        seen.add((*digits,))
        kind = [*KINDS][len(rows) % len(KINDS)]
        rows.append(
            {
                "data_source": KINDS[kind],
                "prompt": [{"role": "user", "content": question(kind, digits)}],
                "reward_model": {"style": "rule", "ground_truth": response(kind, digits).rpartition("=")[2]},
            }
        )
    n = len(KINDS) * n_val
    return rows[n:], rows[:n]


def warm_up(
    tokenizer: PreTrainedTokenizerFast, held_out: set[str], *, steps: int = 900, **settings
) -> tuple[PreTrainedModel, list[float]]:
    """`toy.imitate` with demonstrations of lists; questions in `held_out` are skipped."""

    def draw(rng: random.Random) -> tuple[list[int], list[int], dict]:
        while (asked := question(kind := rng.choice([*KINDS]), digits := draw_list(rng))) in held_out:
            pass
        shown = response(kind, digits, lambda: rng.random() < SHARE_FORGOTTEN)
        return toy.encode_demonstration(tokenizer, asked, shown)

    return toy.imitate(tokenizer, draw, steps=steps, hidden_size=64, **settings)


if __name__ == "__main__":
    toy.write_task(FOLDER, toy.make_tokenizer(), make_rows(), warm_up)
