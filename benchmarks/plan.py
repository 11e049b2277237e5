"""planner/plan.py's simulation against benchmarks/async_rollouts.py's runs: predicted and measured seconds of a step.

    python -m benchmarks.plan            seconds
    python -m benchmarks.plan updates    two minutes: what traces predict of updates on H100s, by default (UPDATES)

Rates come from stages of the way "together" alone, in which two processes each sample and train half of the rows:

    engine      fixed and row: the seconds of "rollout" of both settings (two equations); its prefill is in them
    training    seconds of a step without "weight_sync" and "rollout", linear in tokens: of both settings
    sync        "weight_sync"
    request     CPU seconds of a request to a server beyond one in the process: benchmarks/results/server_rollout.json,
                in the levels above 0, where trainer and engine keep both cores busy; below, the seconds that it takes

The ways "apart" are predicted with them. Record: benchmarks/results/plan.json.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import grpo
from benchmarks.async_rollouts import RECORD, WARM_UP, WORK
from benchmarks.curves import ROOT, provenance
from benchmarks.vs_trl import GROUP, Setting
from lib.cli.flags import parse_flags
from planner.estimate import Gpu
from planner.plan import Engine, EngineRates, Row, simulate
from planner.roofline import HOST_LAYER_S, Peaks
from planner.splits import MEMORY_TBPS, ROW_S, VLLM_ROW_S, DecoderCosts, engine_rates
from planner.traced_step import Traced
from tools.trace import traced

RESULT = ROOT / "benchmarks/results/plan.json"
SERVERS = ROOT / "benchmarks/results/server_rollout.json"
REQUESTS = 512  # of benchmarks/server_rollout.py
SLOTS = 512  # of an engine on a CPU: lib/rollout/vllm_start.py
UPDATES = [("qwen2.5-0.5b", 1, 16384), ("qwen2.5-1.5b", 1, 8192), ("qwen2.5-1.5b", 1, 16384), ("qwen2.5-7b", 8, 16384)]
ROWS = "--max-prompt-length 256 --max-response-length 768 --group-size 1 --adv-estimator rloo"
H200, PROMPT = Gpu("H200", 141 * 10**9, 989.0), 64
LEVELS = {"apart, level 0": 0, "apart, level 1": 1, "apart, level 2": 2}


def dealer(setting: Setting, engines: int) -> Callable[[int], list[list[Row]]]:
    """Every batch has the prompts of the setting, in their order."""

    def batch(number: int) -> list[list[Row]]:
        lengths = [*enumerate(setting.response_lengths)]
        return [
            [Row(number, number * len(lengths) + g, n) for g, n in lengths[e::engines] for _ in range(GROUP)]
            for e in range(engines)
        ]

    return batch


def of_one(setting: Setting, engines: int) -> tuple[int, int, int]:
    """(steps, sampled tokens, trained tokens) of one of the processes that share the rows."""
    own = setting.response_lengths
    sampled = sum(own) * GROUP // engines
    return max(own), sampled, sampled + len(own) * setting.prompt_length // engines


def calibrated(record: dict) -> tuple[EngineRates, np.ndarray]:
    """(rates without requests, [seconds, seconds a token] of training), from the stages of "together"."""
    stages = [record[name]["together"] for name in WORK]
    counts = [of_one(setting, 2) for setting in WORK.values()]
    fixed, row = np.linalg.solve([own[:2] for own in counts], [own["rollout"] for own in stages])
    rest = [own["step"] - own["weight_sync"] - own["rollout"] for own in stages]
    return EngineRates(fixed, row, slots=SLOTS), np.linalg.solve([[1, own[2]] for own in counts], rest)


def predictions(record: dict, requests: dict) -> dict:
    """The rates, and of each setting and way the predicted and measured median and mean of a step's seconds."""
    rates, training = calibrated(record)
    taken = {clock: requests["in batches"][clock] - requests["in process"][clock] for clock in requests["in process"]}
    results: dict = {"rates": {"fixed": rates.fixed, "row": rates.row, "training": training.tolist(), "request": taken}}
    for name, setting in WORK.items():
        results[name] = {}
        times = {"sync": record[name]["together"]["weight_sync"], "train": float(training @ [1, of_one(setting, 1)[2]])}
        for way, level in LEVELS.items():
            own = rates._replace(request=taken["cpu_seconds" if level else "seconds"] / REQUESTS)
            engines = [Engine(own, prompt=setting.prompt_length, group_size=GROUP)]
            steps = simulate(engines, dealer(setting, 1), level=level, steps=WARM_UP + record[name]["steps"], **times)
            seconds = [step.seconds for step in steps[WARM_UP:]]
            found = {"step": np.median(seconds), "mean_step": np.mean(seconds)}
            measured = record[name][way]
            results[name][way] = {
                key: {"predicted": round(float(n), 4), "measured": measured[key]} for key, n in found.items()
            }
    return results


def trace(*words: str) -> Traced:
    with traced("grpo.py", *words) as (_, step):
        return step


def updates() -> dict:
    """Of full micro-batches of rows of 1024 tokens that share no prompt: launches a layer, milliseconds of kernels and
    of the host, and MFU, by how the model is split."""
    context, found = multiprocessing.get_context("spawn"), {}
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        for name, gpus, tokens in UPDATES:
            for fused in ("--no-use-liger-kernel", "--use-liger-kernel"):
                flags = f"{ROWS} --dry-run {gpus} --micro-batch-tokens {tokens} {fused}".split()
                flags += ["--prompts-per-step", str(gpus * tokens // 1024)]
                step = processes.submit(trace, f"benchmarks/shapes/{name}.json", *flags).result()
                speeds = {sharding: step.speed(gpus, sharding) for sharding in HOST_LAYER_S}
                [speed, *_] = speeds.values()
                found[f"{name}, {gpus} x H100, {tokens} tokens, {fused}"] = {
                    "launches": round(speed.launches),
                    "kernels_ms": round(1e3 * speed.kernels, 1),
                    "host_ms": {sharding: round(1e3 * own.host, 1) for sharding, own in speeds.items()},
                    "mfu": {sharding: round(own.mfu, 3) for sharding, own in speeds.items()},
                }
                print(f"{[*found][-1]}: {found[[*found][-1]]}", flush=True)
                if (name, tokens, fused) == ("qwen2.5-1.5b", 16384, "--use-liger-kernel"):
                    found["a step of 256 responses of 1024 tokens, 1.5B, one H200, seconds"] = step_of_h200(step)
    return found


def step_of_h200(step: Traced) -> dict:
    """Seconds of the step that took 19.7 s (docs/gpu.md), and milliseconds of a step of vLLM with 256 rows of 0.5B."""
    found, rates = {}, {}
    for shape in (f"benchmarks/shapes/qwen2.5-{size}.json" for size in ("0.5b", "1.5b")):
        words = f"--dry-run 1 --rollout-engine vllm --model {shape} --train-files {shape}".split()
        args = parse_flags(grpo.Args, words)
        rates[shape] = engine_rates(args, DecoderCosts.of(args), H200)
    for who, row in {"vLLM's scheduler": VLLM_ROW_S, "ours": ROW_S}.items():
        small, large = (own._replace(row=row) for own in rates.values())
        found[f"{who}: ms of 256 rows of 0.5B"] = 1e3 * small.decode(256, 256 * 200, 1)
        found[f"{who}: rollout"] = large.decode(256, 256 * PROMPT, 1024)
    speed = step.speed(1, "zero1", Peaks(memory=1e12 * MEMORY_TBPS["H200"]))
    return found | {"update": 256 * (1024 + PROMPT / GROUP) * speed.update + speed.optimizer}


def main() -> None:
    if sys.argv[1:] == ["updates"]:
        results = json.loads(RESULT.read_text()) | {"updates": updates() | {"provenance": provenance(jobs=1)}}
        RESULT.write_text(json.dumps(results, indent=1) + "\n")
        return
    record = json.loads(RECORD.read_text())
    results = predictions(record, json.loads(SERVERS.read_text()))
    for name in WORK:
        for way, pairs in results[name].items():
            shown = [f"{own['predicted']:.3f} s, measured {own['measured']:.3f} s" for own in pairs.values()]
            errors = [f"{own['predicted'] / own['measured'] - 1:+.0%}" for own in pairs.values()]
            print(f"{name:8} {way:16} {', '.join(f'{key} {s} ({e})' for key, s, e in zip(pairs, shown, errors))}")
    results["provenance"] = provenance(jobs=1) | {"of the runs": {name: record[name]["commit"] for name in WORK}}
    results |= {"updates": json.loads(RESULT.read_text()).get("updates")}
    RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
