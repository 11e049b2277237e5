"""A task of reasoning-gym (about a hundred generators of puzzles with a scorer each) -> train.parquet and test.parquet.

    python data/reasoning_gym.py --task chain_sum --size 2000 --seed 1 --out data/chain_sum
    python data/reasoning_gym.py --task leg_counting --task-kwargs '{"max_animals": 5}' --out data/legs

Works offline. The first `size` entries are train, the next `test_size` are test; a test entry whose question is also in
train (easy tasks have few) is left out and counted. Rows are scored by rewards/reasoning_gym.py (data_source
"reasoning_gym/<task>"). To mix tasks, write one folder for each and give the trainer all the files (the task
"composite" is not needed and not supported). Look at a task's score_answer before a long run: some give partial credit
for trying.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py and reasoning_gym.py, which would hide the real ones
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import json
from pathlib import Path
from typing import Literal

import reasoning_gym
from reasoning_gym.factory import DATASETS

from data.rows import make_row, run_script, write_rows
from lib import InputError
from rewards.reasoning_gym import dump_entry

GroundTruth = Literal["entry", "answer"]
INSTRUCTION = "Think step by step, and give only the final answer within <answer> and </answer>."


def to_row(
    task: str, task_kwargs: dict, entry: dict, split: str, index: int, instruction: str, ground_truth: GroundTruth
) -> dict:
    prompt = f"{entry['question']}\n\n{instruction}".rstrip()
    truth = json.dumps({"task": task, "task_kwargs": task_kwargs, "entry": dump_entry(entry)})
    info = {"split": split, "index": index, "question": entry["question"]}
    info["interaction_kwargs"] = {"ground_truth": truth}  # for --multi-turn.interaction reasoning_gym
    return make_row(f"reasoning_gym/{task}", prompt, truth if ground_truth == "entry" else entry["answer"], info)


def main(
    task: str,
    out: Path,
    size: int = 2000,
    test_size: int = 200,
    seed: int = 1,
    task_kwargs: str = "{}",
    instruction: str = INSTRUCTION,
    ground_truth: GroundTruth = "entry",
) -> None:
    """Write train.parquet and test.parquet.

    Args:
        task: name of the task.
        out: folder to write to.
        size: number of training rows.
        test_size: number of test rows; 0 writes no test.parquet.
        seed: seed of the task's generator.
        task_kwargs: JSON object of the task's own settings.
        instruction: what follows each question. Without <answer>...</answer> the last line of a response is its answer.
        ground_truth: answer: only the task's answer, for another scorer than rewards/reasoning_gym.py.
    """
    if task not in DATASETS or task == "composite":
        raise InputError(f"--task {task}: no such task; there are {', '.join(sorted(DATASETS.keys() - {'composite'}))}")
    if size < 1 or test_size < 0:
        raise InputError(f"--size {size} --test-size {test_size}: at least 1, and not negative")
    try:
        kwargs = json.loads(task_kwargs)
    except json.JSONDecodeError as error:
        raise InputError(f"--task-kwargs {task_kwargs}: not valid JSON ({error.msg})") from error
    if not isinstance(kwargs, dict) or kwargs.keys() & {"seed", "size"}:
        raise InputError(f"--task-kwargs {task_kwargs}: give a JSON object without seed and size (they are flags)")
    try:
        source = reasoning_gym.create_dataset(task, seed=seed, size=size + test_size, **kwargs)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"--task {task} --task-kwargs {task_kwargs}: the task refuses them: {error}") from error
    out.mkdir(parents=True, exist_ok=True)
    train = [source[i] for i in range(size)]
    seen = {entry["question"] for entry in train}
    test = [entry for i in range(size, size + test_size) if (entry := source[i])["question"] not in seen]
    for split, entries in {"train": train, "test": test}.items():
        if entries:
            rows = [to_row(task, kwargs, entry, split, i, instruction, ground_truth) for i, entry in enumerate(entries)]
            write_rows(rows, out / f"{split}.parquet")
        else:
            (out / f"{split}.parquet").unlink(missing_ok=True)  # an earlier run's would not fit this train
            print(f"{out / split}.parquet: no rows, not written")
    if len(test) < test_size:
        print(f"{test_size - len(test)} of {test_size} test entries left out: their questions are in train")


if __name__ == "__main__":
    run_script(main)
