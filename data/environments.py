"""An environment that --multi-turn.interaction takes -> train.parquet and test.parquet (docs/environments.md).

    python data/environments.py --env openenv:http://localhost:8000 --system 'Guess the word.' --out data/wordle
    python data/environments.py --env gym:path/to/file.py:make --size 512 --out data/game
    python data/environments.py --env verifiers:path/to/file.py:load_environment --out data/own

OpenEnv and gym: row i is the environment after reset(seed + i); its prompt is what reset shows. The test rows have the
seeds behind those of train. verifiers: the rows are those of the environment's data set and of its eval_dataset.
"""

import os
import sys

if __name__ == "__main__":  # this folder holds math.py and reasoning_gym.py, which would hide the real ones
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import lib  # noqa: F401  outside the environment it says what to do

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from agent.environments import SeededEnvironment, load_gym, load_openenv
from data.rows import make_row, run_script, write_rows
from lib import InputError
from rewards.verifiers import load_environment, plain


def seeded_rows(spec: str, make: Callable[[], SeededEnvironment], seeds: range, split: str) -> list[dict]:
    """Raises InputError for an environment that does not keep to its seed."""
    shown = asyncio.run(starts(make, [*seeds, *seeds[:1]]))
    if seeds and shown[0] != shown[-1]:
        raise InputError(
            f"--env {spec}: after two resets with seed {seeds[0]} it shows {shown[0][:80]!r} and {shown[-1][:80]!r}; "
            "the responses to a prompt must begin alike"
        )
    return [
        row_of("environment", text, "", {"reset": {"seed": seed}, "first": text}, split, i)
        for i, (seed, text) in enumerate(zip(seeds, shown))
    ]


async def starts(make: Callable[[], SeededEnvironment], seeds: list[int]) -> list[str]:
    """What the environment shows after reset with each seed."""
    shown = []
    for seed in seeds:
        env = make()
        try:
            await env.start("rows", reset={"seed": seed})
            shown.append(env.first)
        finally:
            await env.stop()
    return shown


def verifiers_rows(dataset, split: str) -> list[dict]:
    rows = []
    for i, entry in enumerate(dataset):
        prompt = [plain(message) for message in entry["prompt"]]
        truth = json.dumps(entry | {"prompt": prompt}, ensure_ascii=False)
        rows.append(row_of("verifiers", prompt, truth, {"row": truth}, split, i))
    return rows


def row_of(source: str, prompt: str | list[dict], truth: str, kwargs: dict, split: str, index: int) -> dict:
    row = make_row(source, "", truth, {"split": split, "index": index, "interaction_kwargs": kwargs})
    row["prompt"] = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return row


def main(env: str, out: Path, size: int = 1000, test_size: int = 100, seed: int = 0, system: str = "") -> None:
    """Write train.parquet and test.parquet.

    Args:
        env: what --multi-turn.interaction gets: openenv:..., gym:... or verifiers:...
        out: folder to write to.
        size: most training rows.
        test_size: most test rows; 0 writes no test.parquet.
        seed: the first row's; for verifiers the order's.
        system: a system message before each prompt.
    """
    kind = env.partition(":")[0]
    if kind not in ("openenv", "gym", "verifiers"):
        raise InputError(f"--env {env}: give openenv:..., gym:... or verifiers:...")
    if size < 1 or test_size < 0:
        raise InputError(f"--size {size} --test-size {test_size}: at least 1, and not negative")
    if kind == "verifiers":
        if system:
            raise InputError("--system: an environment of verifiers has its own; give it as an argument of ENVIRONMENT")
        loaded = load_environment(env.removeprefix("verifiers:"))
        train = verifiers_rows(loaded.get_dataset(size, seed), "train")
        test = verifiers_rows(loaded.get_eval_dataset(test_size, seed), "test") if test_size else []
    else:
        make = load_openenv(env) if kind == "openenv" else load_gym(env)
        train = seeded_rows(env, make, range(seed, seed + size), "train")
        test = seeded_rows(env, make, range(seed + size, seed + size + test_size), "test")
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in {"train": train, "test": test}.items():
        for row in rows:
            row["prompt"] = [{"role": "system", "content": system}] * bool(system) + row["prompt"]
        if rows:
            write_rows(
                rows, out / f"{split}.parquet", f", {len({str(row['prompt']) for row in rows})} different prompts"
            )


if __name__ == "__main__":
    run_script(main)
