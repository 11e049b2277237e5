"""Size and speed of the run page: 200 steps of 8 responses of 1000 tokens, made up, in headless Chromium.

    python -m benchmarks.run_page --steps 200 --responses 8 --tokens 1000

Prints one line of JSON: seconds to write the page, its size, seconds until it is drawn, until the first responses are,
and until a search through all texts has its result. `write_run` is also what tests look at.
"""

import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro

FLOATS = pa.list_(pa.float32())
SCHEMA = pa.schema(
    {"step": pa.int32(), "group": pa.string(), "sample": pa.int32()}
    | dict.fromkeys(("data_source", "prompt", "response", "ground_truth"), pa.string())
    | {"prompt_ids": pa.list_(pa.int32()), "response_ids": pa.list_(pa.int32()), "tokens": pa.list_(pa.string())}
    | dict.fromkeys(("response_mask", "loss_mask"), pa.list_(pa.bool_()))
    | dict.fromkeys(("rollout_log_probs", "log_probs", "old_log_probs", "ref_log_probs"), FLOATS)
    | dict.fromkeys(("entropy", "ratio", "advantages", "values"), FLOATS)
    | {"weight_versions": pa.list_(pa.int32()), "finish_reason": pa.string(), "score": pa.float64()}
    | {"rewards": pa.string()}
    | {
        "turns": pa.list_(
            pa.struct({"by": pa.string(), "text": pa.string(), "tokens": pa.int32(), "reward": pa.float64()})
        )
    }
)


def response_row(step: int, sample: int, tokens: list[str], rng: np.random.Generator, **more: Any) -> dict[str, Any]:
    """A row of a file of training samples; `more` replaces what is made up."""
    n = len(tokens)
    sure = -rng.exponential(0.4, n) * (rng.random(n) < 0.6)
    old, new = sure + rng.normal(0, 0.01, n), sure + rng.normal(0, 0.03, n)
    score = float(rng.random() < 0.3 + 0.6 * min(step, 100) / 100)
    return {
        "step": step,
        "group": f"group-{step}",
        "sample": sample,
        "data_source": "made/up",
        "prompt": f"What is {step * 7} + {step + 3}?",
        "response": "".join(tokens),
        "ground_truth": str(step * 8 + 3),
        "prompt_ids": [1, 2, 3],
        "response_ids": [*range(n)],
        "tokens": tokens,
        "response_mask": [True] * n,
        "loss_mask": [True] * n,
        "rollout_log_probs": sure,
        "log_probs": new,
        "old_log_probs": old,
        "ref_log_probs": old + rng.normal(0, 0.1, n),
        "entropy": rng.exponential(0.5, n),
        "ratio": np.exp(new - old),
        "advantages": np.full(n, score - 0.5),
        "values": None,
        "weight_versions": [step - 1] * n,
        "finish_reason": "stop",
        "score": score,
        "rewards": json.dumps({"score": score, "acc": score}),
        "turns": None,
    } | more


def write_rollouts(folder: Path, step: int, rows: list[Mapping[str, Any]]) -> None:
    (folder / "rollouts").mkdir(exist_ok=True)
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)
    pq.write_table(table, folder / f"rollouts/step_{step:06}-rank_0.parquet", compression="zstd")


def write_run(folder: Path, steps: int, responses: int, tokens: int, seed: int = 1, **flags: Any) -> Path:
    """A run's folder with everything that the page reads; curves and texts are made up. responses: of a step, one
    group. flags: of config.json."""
    rng = np.random.default_rng(seed)
    (folder / "starts/1").mkdir(parents=True)
    config = {"script": "grpo.py", "run_name": folder.name, "seed": seed, "total_steps": steps, "lr": 1e-6} | flags
    history = [{"started": "2026-01-01 12:00:00", "from": None, "changed": {}}]
    (folder / "config.json").write_text(json.dumps(config | {"history": history}))
    start = {"command": "python grpo.py --lr 1e-6", "commit": "0123456789abcdef", "untracked": [], "python": "3.11.0"}
    start |= {"packages": {"torch": "2.13.0"}, "machine": "host: 2 CPU cores", "flags": {"lr": [1e-6, 1e-5]}}
    (folder / "starts/1/start.json").write_text(json.dumps(start))
    (folder / ".lock").touch()
    words = np.array([" " + "".join(rng.choice([*"aeiounrstlmdkgp"], rng.integers(1, 8))) for _ in range(8000)])
    frequent = 1 / np.arange(1, len(words) + 1)
    frequent /= frequent.sum()
    metrics, samples = [], []
    for step in range(steps + 1):
        if step:
            rise = 1 - math.exp(-step / 40)
            row = {f"actor/metric_{i}": rng.normal() for i in range(60)} | {"training/tokens": 8.0 * tokens}
            row |= {"reward/mean": 0.3 + 0.6 * rise + rng.normal(0, 0.05), "response_length/mean": tokens * (1 + rise)}
            row |= {"timing_s/rollout": 3 + rng.random(), "timing_s/update": 2 + rng.random(), "timing_s/step": 6.5}
            metrics.append({"step": step} | row)
        if step % 20 == 0:
            acc, key = 0.3 + 0.6 * (1 - math.exp(-step / 40)), "val/made/up/mean@1"
            metrics.append({"step": step, key: acc, f"{key}/ci_low": acc - 0.05, f"{key}/ci_high": acc + 0.05})
            samples += [
                {"step": step, "prompt": f"validation {i}", "response": "".join(rng.choice(words, 20, p=frequent))}
                | {"score": float(rng.random() < acc), "ground_truth": str(i)}
                for i in range(32)
            ]
        if step:
            drawn = rng.choice(words, (responses, tokens), p=frequent).tolist()
            write_rollouts(folder, step, [response_row(step, i, text, rng) for i, text in enumerate(drawn)])
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@dataclass
class Args:
    steps: int = 200
    responses: int = 8
    tokens: int = 1000
    folder: Path | None = None
    """an existing run's folder, instead of one that is made up"""


def measure(args: Args) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    from tests.tools.browser import launch_options
    from tools.page.__main__ import Args as PageArgs
    from tools.page.__main__ import main as write_page

    with tempfile.TemporaryDirectory() as aside, sync_playwright() as playwright:
        folder = args.folder or write_run(Path(aside, "run"), args.steps, args.responses, args.tokens)
        start = time.perf_counter()
        write_page(PageArgs((folder,), output=Path(aside, "page.html")))
        figures = {"write_s": time.perf_counter() - start, "mb": Path(aside, "page.html").stat().st_size / 1e6}
        browser = playwright.chromium.launch(**launch_options())
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        start = time.perf_counter()
        page.goto(f"file://{aside}/page.html")
        page.wait_for_selector("#first canvas")
        figures["open_s"] = time.perf_counter() - start
        start = time.perf_counter()
        page.locator("#samples").scroll_into_view_if_needed()
        page.wait_for_selector("#cards .t")
        figures["first_responses_s"] = time.perf_counter() - start
        start = time.perf_counter()
        page.fill("#f-text", "no such text")
        page.locator("#count", has_text="0 responses").wait_for()
        figures["search_s"] = time.perf_counter() - start
        data = page.evaluate("JSON.parse(document.getElementById('data').textContent).runs[0].samples")
        figures |= {"responses": data["shown"], "of": data["kept"]}
        browser.close()
    return {name: round(value, 2) for name, value in figures.items()}


if __name__ == "__main__":
    print(json.dumps(measure(tyro.cli(Args, description=__doc__))))
