"""Names to sort over several turns (after prime-rl's alphabet-sort) -> train.parquet and test.parquet.

    python data/alphabet_sort.py --turns 3 --names 1 4 --out data/alphabet
    python grpo.py --train-files data/alphabet/train.parquet --val-files data/alphabet/test.parquet --reward \\
        --multi-turn.interaction data/alphabet_sort.py:AlphabetSort --multi-turn.max-turns 3 [flags]

The first turn has names to sort by first or last name. Each further turn adds names: the model writes the whole list
again and marks the new names. A turn's reward is the similarity of its list to the right one, to the power of 4, over
the number of turns.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own; the modules are in the parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import json
import random
from pathlib import Path

from agent import BaseInteraction
from data.rows import make_row, run_script, write_rows
from lib import InputError
from rewards.answers import answer_text, last_tagged
from rewards.similarity import similarity

PEOPLE = """Ada Adams, Boris Brown, Clara Costa, Deniz Dubois, Elena Evans, Felix Fischer, Grace Garcia, Hugo Hansen,
Ines Ito, Jonas Jensen, Kira Kim, Leo Lopez, Maya Moreau, Nils Novak, Olga Okafor, Pablo Patel, Quinn Quist, Rosa Rossi,
Samir Silva, Tara Tanaka, Umar Ueda, Vera Vogel, Wanda Wang, Xenia Xu, Yusuf Yilmaz, Zoe Zhang"""
FIRST, LAST = zip(*(name.split() for name in PEOPLE.split(",")))
NEW = " // new name!"


class AlphabetSort(BaseInteraction):
    """interaction_kwargs: lists, the right list of each turn, and more, the user's text before each turn but the first,
    both as JSON; power."""

    async def start(self, instance_id: str, *, lists: str, more: str, power=4, **kwargs):  # type: ignore[override]
        self.lists, self.more, self.power, self.turn = json.loads(lists), json.loads(more), power, 0

    async def respond(self, messages: list[dict]) -> tuple[bool, str, float, dict]:
        written = last_tagged(answer_text(messages[-1]["content"] or "")) or ""
        lines = "\n".join(line.strip() for line in written.splitlines())
        score = similarity(lines, "\n".join(self.lists[self.turn]))
        self.turn += 1
        done = self.turn == len(self.lists)
        return done, "" if done else self.more[self.turn - 1], score**self.power / len(self.lists), {}


def episode(rng: random.Random, counts: list[int]) -> tuple[str, list[list[str]], list[str]]:
    """(the first prompt, the right list of each turn, the user's further texts) for so many names in each turn."""
    by_last = rng.random() < 0.5
    drawn = list(zip(rng.sample(FIRST, sum(counts)), rng.sample(LAST, sum(counts))))  # no name is twice
    texts, lists, so_far = [], [], []
    for turn, count in enumerate(counts):
        new = drawn[len(so_far) : len(so_far) + count]
        so_far += new
        in_order = sorted(so_far, key=lambda name: name[by_last])
        lists.append([" ".join(name) + NEW * (turn > 0 and name in new) for name in in_order])
        listed = ", ".join(map(" ".join, new))
        kind = "last" if by_last else "first"
        if turn == 0:
            texts.append(
                f"Sort these names alphabetically by {kind} name: {listed}\n\n"
                "Write one name a line, within <answer> and </answer>."
            )
        else:
            texts.append(
                f"Add these names: {listed}\n\nWrite the whole list again, sorted by {kind} name, within <answer> and "
                f"</answer>. Write `{NEW.strip()}` after each name that you add."
            )
    return texts[0], lists, texts[1:]


def main(
    out: Path,
    turns: int = 3,
    names: tuple[int, int] = (1, 4),
    size: int = 2000,
    test_size: int = 200,
    seed: int = 1,
) -> None:
    """Write train.parquet and test.parquet.

    Args:
        out: folder to write to.
        turns: turns of an episode.
        names: new names in a turn, at least and at most.
        size: number of training rows.
        test_size: number of test rows.
        seed: seed of the names.
    """
    if size < 1 or test_size < 1 or turns < 1:
        raise InputError(f"--size {size} --test-size {test_size} --turns {turns}: each at least 1")
    if not 1 <= names[0] <= names[1] or turns * names[1] > len(FIRST):
        raise InputError(f"--turns {turns} --names {names[0]} {names[1]}: at most {len(FIRST)} names in an episode")
    rng, seen = random.Random(seed), set[str]()
    out.mkdir(parents=True, exist_ok=True)
    for split, number in {"test": test_size, "train": size}.items():
        rows = []
        while len(rows) < number:
            prompt, lists, more = episode(rng, [rng.randint(*names) for _ in range(turns)])
            if prompt not in seen:
                kwargs = {"lists": json.dumps(lists), "more": json.dumps(more)}
                first = "\n".join(["<answer>", *lists[0], "</answer>"])
                info = {"split": split, "index": len(rows), "interaction_kwargs": kwargs, "answer": first}
                rows.append(make_row("alphabet_sort", prompt, "\n".join(lists[-1]), info))
            seen.add(prompt)
        write_rows(rows, out / f"{split}.parquet")


if __name__ == "__main__":
    run_script(main)
