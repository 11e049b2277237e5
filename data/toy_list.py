"""The embedded task for context compaction: a list that is longer than the context window, of which one item counts.

    python data/toy_list.py     rewrites data/toy_list/: train.jsonl, val.jsonl and model/ (two minutes on one core)

    user        remember
    assistant   ok
    user        4093g718        one item of the list is a letter, in one of its first six messages
    assistant   ok
    ...                         eight messages, 176 tokens in all
    user        ?
    assistant   =g              a reward of 1

With --multi-turn.compact-at the policy is asked for a summary whenever its context is long:

    user        summary
    assistant   g               and goes on from "remember", "g" and the next message

The start is data/toy.py's Llama, a quarter of its size, after it has imitated pupils who answer with the letter
that they see, but whose summaries leave it out mostly ("-"). So its greedy summaries say nothing, and a few of its
samples do. RL has to find out that a summary with the letter pays, which is rewarded many turns later.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py, which would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import json
import random
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agent import BaseInteraction
from data import toy

FOLDER = Path(__file__).parent / "toy_list"
PROMPT, ASK, QUESTION, ACKNOWLEDGED, NOTHING = "remember", "summary", "?", "ok", "-"
LETTERS = "abcdefghij"
MESSAGES, EARLY, ITEMS = 8, 6, 8  # of a list: messages, those of which one has the letter, items of each
SHARE_SUMMARIES = 0.15  # of the demonstrations' summaries, those that keep the letter
SHARE_ACKNOWLEDGED = 0.3  # of the demonstrations' short answers, those that are trained on


class List(BaseInteraction):
    """--multi-turn.interaction data/toy_list.py:List: shows the list, whatever the policy says, then asks."""

    async def start(self, instance_id: str, *, messages: list[str], answer: str, **kwargs):  # type: ignore[override]
        self.left, self.answer, self.reward = [*messages, QUESTION], answer, 0.0

    async def respond(self, messages: list[dict]) -> tuple[bool, str, float, dict]:
        if self.left:
            return False, self.left.pop(0), 0.0, {"right": 0.0}
        self.reward = float(messages[-1]["content"] == f"={self.answer}")
        return True, "", 0.0, {"right": self.reward}

    async def score(self) -> float:
        return self.reward


def make_tokenizer() -> PreTrainedTokenizerFast:
    """data/toy.py's, with a token for each of the three words."""
    return toy.make_tokenizer([*toy.ROLES, PROMPT, ASK, ACKNOWLEDGED])


def items(rng: random.Random, letter: str = "") -> str:
    """A message of the list, with the letter at a random place, if there is one."""
    text = [str(rng.randrange(10)) for _ in range(ITEMS)]
    if letter:
        text[rng.randrange(ITEMS)] = letter
    return "".join(text)


def make_rows(n_train: int = 1024, n_val: int = 128, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Lists as rows of verl's form, (train, val)."""
    rng = random.Random(seed)

    def row(split: str, index: int) -> dict:
        letter, at = rng.choice(LETTERS), rng.randrange(EARLY)
        messages = [items(rng, letter if i == at else "") for i in range(MESSAGES)]
        return {
            "data_source": "toy/list",
            "prompt": [{"role": "user", "content": PROMPT}],
            "reward_model": {"style": "rule", "ground_truth": letter},
            "extra_info": {
                "split": split,
                "index": index,
                "interaction_kwargs": {"messages": messages, "answer": letter},
            },
        }

    return [row("train", i) for i in range(n_train)], [row("val", i) for i in range(n_val)]


def demonstration(rng: random.Random) -> list[tuple[str, str, bool]]:
    """A segment of an episode: (role, content, whether the model is to write it)."""
    letter, rounds = rng.choice(LETTERS), rng.randint(1, 4)
    at = rng.randint(
        -2, rounds
    )  # the message with the letter; -1: an earlier summary has it; -2, rounds: it is not seen
    begins = letter if at == -1 else rng.choice([ACKNOWLEDGED, NOTHING])
    turns = [("user", PROMPT, False), ("assistant", begins, begins == ACKNOWLEDGED)]
    for i in range(rounds):
        turns += [("user", items(rng, letter if i == at else ""), False)]
        turns += [("assistant", ACKNOWLEDGED, rng.random() < SHARE_ACKNOWLEDGED)]
    seen = -1 <= at < rounds
    if rng.random() < 0.5:
        keeps = seen and rng.random() < SHARE_SUMMARIES
        return [*turns, ("user", ASK, False), ("assistant", letter if keeps else NOTHING, True)]
    answer = letter if seen else rng.choice(LETTERS)
    return [*turns, ("user", QUESTION, False), ("assistant", f"={answer}", True)]


def draw(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int], dict]:
    """As `toy.imitate` wants it."""
    ids: list[int] = []
    mask: list[int] = []
    for role, content, written in demonstration(rng):
        for text, is_turn in ((f"<|im_start|>{role}\n", False), (f"{content}<|im_end|>", written), ("\n", False)):
            new = tokenizer.encode(text)
            ids, mask = ids + new, mask + [int(is_turn)] * len(new)
    return ids, mask, {}


def warm_up(tokenizer: PreTrainedTokenizerFast, *, steps: int = 400, **settings) -> tuple[PreTrainedModel, list[float]]:
    return toy.imitate(tokenizer, partial(draw, tokenizer), steps=steps, hidden_size=64, **settings)


def main() -> None:
    torch.set_num_threads(1)  # the sums inside a matrix product depend on the number of threads
    FOLDER.mkdir(exist_ok=True)
    tokenizer = make_tokenizer()
    for name, rows in zip(("train", "val"), make_rows()):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, losses = warm_up(tokenizer)
    toy.save_model(model, tokenizer, FOLDER / "model")
    print(f"warm-up loss {losses[0]:.3f} -> {losses[-1]:.3f}; wrote {FOLDER}")


if __name__ == "__main__":
    main()
