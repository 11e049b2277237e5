"""Part `scripts`: grpo.py learns the embedded task and resumes bit for bit; two steps of ppo.py, dapo.py, remax.py."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_check.rows import ROOT, Options, attempt, claim, row

TINY = (
    *("--config", str(ROOT / "data/toy/preset.yaml")),
    *("--prompts-per-step", "8", "--group-size", "4", "--train-files", str(ROOT / "data/toy/val.jsonl")),
    *("--no-val-before-train", "--val-every", "0", "--reward-workers", "0"),
)


def environment_of(options: Options) -> dict[str, str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"ACCELERATE_USE_CPU": "true"} if options.device == "cpu" else {})
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))}


def command_of(script: str, folder: str, name: str, *flags: str, run: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *run, f"{script}.py", "--output-dir", folder, "--run-name", name, *flags]


def run_script(
    options: Options, script: str, folder: str, name: str, *flags: str, run: tuple[str, ...] = ()
) -> list[dict]:
    """The rows of its metrics.jsonl. run: what Python is to run it with."""
    command = command_of(script, folder, name, *flags, run=run)
    done = subprocess.run(command, cwd=ROOT, env=environment_of(options), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in Path(folder, name, "metrics.jsonl").read_text().splitlines()]


def check(options: Options, device: torch.device) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        yield from attempt("grpo.py", lambda: grpo(options, device, folder))
        others = () if options.tiny else ("ppo", "dapo", "remax")
        with ThreadPoolExecutor() as threads:  # they only have to run: together they take the time of one
            for rows in threads.map(lambda script: list(two_steps(options, folder, script)), others):
                yield from rows


def grpo(options: Options, device: torch.device, folder: str) -> Iterator[dict]:
    start = time.perf_counter()
    steps, small = ("2", TINY) if options.tiny else ("16", ())
    save = ("--save-every", "1" if options.tiny else "8", "--keep-checkpoints", "0")
    whole = run_script(options, "grpo", folder, "whole", "--total-steps", steps, *save, *small)
    yield row("grpo.py, whole run", time.perf_counter() - start, "s", steps=int(steps))
    yield row("grpo.py, seconds of steps", sum(r.get("timing_s/step", 0) for r in whole), "s")
    accuracy = [r["val/toy/arithmetic/mean@1"] for r in whole if "val/toy/arithmetic/mean@1" in r]
    if accuracy:
        yield row("grpo.py, accuracy before", accuracy[0], "")
        yield row("grpo.py, accuracy after", accuracy[-1], "", accuracy[-1] > 0.8)

    middle = Path(folder, "whole/checkpoints", f"step_{int(steps) // 2:06}")
    more = ("--resume", str(middle), "--total-steps", steps, *save, *small)
    last = run_script(options, "grpo", folder, "resumed", *more)[-1]
    same = [key for key in whole[-1] if not key.startswith(("timing_", "perf/"))]
    different = [key for key in same if last[key] != whole[-1][key]]
    weights = [Path(folder, run, "model/model.safetensors").read_bytes() for run in ("whole", "resumed")]
    yield row("resumed run, metrics that differ", len(different), "", not different, names=different)
    equal = weights[0] == weights[1]
    claims = claim(device, "P9", equal and not different, f"weights {equal}, metrics that differ {different}")
    yield row("resumed run, weights equal", equal, "", equal, claims)


def two_steps(options: Options, folder: str, script: str) -> Iterator[dict]:
    yield from attempt(f"{script}.py", lambda: finite(options, folder, script))


def finite(options: Options, folder: str, script: str) -> Iterator[dict]:
    metrics = run_script(options, script, folder, script, "--total-steps", "2", "--save-every", "0")
    share = float(np.isfinite([v for r in metrics for v in r.values() if isinstance(v, float)]).mean())
    yield row(f"{script}.py, two steps, share of finite metrics", share, "", share == 1)
