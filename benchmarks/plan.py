"""planner/plan.py's simulation against benchmarks/async_rollouts.py's runs: predicted and measured seconds of a step.

    python -m benchmarks.plan        a second

Rates come from stages of the way "together" alone, in which two processes each sample and train half of the rows:

    engine      fixed and row: the seconds of "rollout" of both settings (two equations); its prefill is in them
    training    seconds of a step without "weight_sync" and "rollout", linear in tokens: of both settings
    sync        "weight_sync"
    request     CPU seconds of a request to a server beyond one in the process: benchmarks/results/server_rollout.json,
                in the levels above 0, where trainer and engine keep both cores busy; below, the seconds that it takes

The ways "apart" are predicted with them. Record: benchmarks/results/plan.json.
"""

import json
from collections.abc import Callable

import numpy as np

from benchmarks.async_rollouts import RECORD, WARM_UP, WORK
from benchmarks.curves import ROOT, provenance
from benchmarks.vs_trl import GROUP, Setting
from planner.plan import Engine, EngineRates, Row, simulate

RESULT = ROOT / "benchmarks/results/plan.json"
SERVERS = ROOT / "benchmarks/results/server_rollout.json"
REQUESTS = 512  # of benchmarks/server_rollout.py
SLOTS = 512  # of an engine on a CPU: lib/rollout/vllm_start.py
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


def main() -> None:
    record = json.loads(RECORD.read_text())
    results = predictions(record, json.loads(SERVERS.read_text()))
    for name in WORK:
        for way, pairs in results[name].items():
            shown = [f"{own['predicted']:.3f} s, measured {own['measured']:.3f} s" for own in pairs.values()]
            errors = [f"{own['predicted'] / own['measured'] - 1:+.0%}" for own in pairs.values()]
            print(f"{name:8} {way:16} {', '.join(f'{key} {s} ({e})' for key, s, e in zip(pairs, shown, errors))}")
    results["provenance"] = provenance(jobs=1) | {"of the runs": {name: record[name]["commit"] for name in WORK}}
    RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
