"""Texts to write backward, letter by letter -> train.parquet and test.parquet.

    python data/reverse_text.py --length 20 60 --out data/reverse           parts of sentences
    python data/reverse_text.py --length 2 5 --spelled --out data/spelled   words as s u n, for small models

Works offline: the texts are neighbouring words of a story that comes with reasoning-gym. Each text is once in the
files, and none of test is in train. Rows are scored by rewards/similarity.py (data_source "reverse_text"). A row's
`extra_info["answer"]` is the right answer, as papers/sft_rl.md wants it.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import random
import re
from pathlib import Path

from reasoning_gym.data import read_data_file

from data.rows import make_row, run_script, write_rows
from lib import InputError

INSTRUCTION = "Write this text backward, letter by letter. For example, sun becomes nus."
SPELLED = "Write these letters in reverse order, separated by spaces, and nothing else."


def texts(shortest: int, longest: int) -> list[str]:
    """All runs of neighbouring words, in lower case, that have so many characters, each once."""
    story = read_data_file("in_the_year_2889.txt").split("***")[2]  # between the marks of its start and end
    words, found = re.findall("[a-z]+", story.lower()), dict[str, None]()
    for first in range(len(words)):
        text = ""
        for word in words[first:]:
            text = f"{text} {word}".strip()
            if len(text) > longest:
                break
            if len(text) >= shortest:
                found[text] = None
    return [*found]


def main(
    out: Path,
    length: tuple[int, int] = (20, 60),
    spelled: bool = False,
    size: int = 2000,
    test_size: int = 200,
    seed: int = 1,
) -> None:
    """Write train.parquet and test.parquet.

    Args:
        out: folder to write to.
        length: characters of a text, at least and at most.
        spelled: single words, with a space between two letters: each letter is a token.
        size: number of training rows, at most.
        test_size: number of test rows.
        seed: seed of the order of the texts.
    """
    if size < 1 or test_size < 1:
        raise InputError(f"--size {size} --test-size {test_size}: each at least 1")
    every = texts(*length)
    if spelled:
        every = [" ".join(text) for text in every if " " not in text]
    if len(every) <= test_size:
        raise InputError(f"--length {length[0]} {length[1]}: {len(every)} texts, none left for train")
    random.Random(seed).shuffle(every)
    out.mkdir(parents=True, exist_ok=True)
    for split, part in {"train": every[test_size:][:size], "test": every[:test_size]}.items():
        rows = []
        for i, text in enumerate(part):
            answer = text[::-1]
            info = {"split": split, "index": i, "answer": answer}
            rows.append(make_row("reverse_text", f"{SPELLED if spelled else INSTRUCTION}\n\n{text}", answer, info))
        write_rows(rows, out / f"{split}.parquet")


if __name__ == "__main__":
    run_script(main)
