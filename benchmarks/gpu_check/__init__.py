"""What a GPU is to confirm, in less than 10 minutes, without network or a checkpoint: started by gpu_check.sh.

    hardware     versions, the driver, the ceilings of the GPU and its host
    numerics     packed_sdpa and varlen against the padded eager model: log-probs, entropies, gradients; LoRA in bf16
    attention    the speed of varlen, packed_sdpa, windows, cuDNN's SDPA
    log_probs    LinearLogProbs by its chunk; uncompiled, compiled, and liger-kernel beside it
    update       MFU of an update (forward, backward, AdamW), host syncs, GAE, hf rollouts
    vllm_engine  where vLLM is installed: two syncs, sleep and wake, log-probs, tokens per second
    scripts      grpo.py learns the embedded task and resumes bit for bit; two steps of ppo.py, dapo.py and remax.py
    ranks        two ranks against one, what a weight sync gathers, time limits
    memory       the peak of a step against lib/model/memory.py, for models of 0.5, 1.5 and 3 B random parameters
    saves        a save, a load, an export

Each part is a process of its own and gives its rows one by one: what fails or hangs is reported, and the others go on.
Writes a JSON file and prints its table, which ends with what the rows say of G1 to G17 (claims.py). Exit code 1 if a
check fails. --device cpu --tiny runs all of it small, which proves that the parts run.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu_check.claims import verdicts
from benchmarks.gpu_check.rows import Options, row

PARTS = "hardware numerics attention log_probs update vllm_engine scripts ranks memory saves".split()  # noqa: SIM905
DEADLINE_S = 560
LIMITS_S = {"vllm_engine": 150, "scripts": 150}
LIMIT_S = 90  # of the other parts


# ---- parts in processes --------------------------------------------------------------------------


def run_part(name: str, options: Options, results: Connection) -> None:
    os.setpgid(0, 0)  # so that what it starts ends with it
    try:
        for r in import_module(f"benchmarks.gpu_check.{name}").check(options, torch.device(options.device)):
            results.send(r)
    except Exception:  # noqa: BLE001
        # whatever it is, it is the result of this part
        results.send(row(f"{name} failed", None, "", False, error=traceback.format_exc()[-3000:]))
    results.send(None)


def part_in_a_process(name: str, options: Options, seconds: float, start_method: str) -> Iterator[dict]:
    context = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_part, args=(name, options, theirs))
    deadline = time.monotonic() + seconds
    process.start()
    theirs.close()
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            if (r := ours.recv()) is None:
                return
            yield r
        yield row(f"{name} did not end in {seconds:.0f} s", None, "", False)
    except EOFError:
        process.join()
        yield row(f"{name} died with exit code {process.exitcode}", None, "", False)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has ended, or has no group of its own yet
            process.kill()
        process.join()


def start_method(options: Options) -> str | None:
    """How to start parts. A fork saves the imports. But it cannot use CUDA if an import here has asked for GPUs; then
    each part is spawned. None: no GPU."""
    if options.device == "cpu":
        return "fork"
    probe = multiprocessing.get_context("fork").Process(target=use_the_gpu)
    probe.start()
    probe.join(60)
    if probe.exitcode == 0:
        return "fork"
    probe.kill()
    return "spawn" if torch.cuda.is_available() else None


def use_the_gpu() -> None:
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError):  # AssertionError: torch is built without CUDA
        os._exit(1)


# ---- the table -----------------------------------------------------------------------------------


def lines_of(r: dict) -> Iterator[str]:
    value = "-" if r["value"] is None else f"{float(r['value']):.4g}"
    verdict = {None: "", True: "ok", False: "FAILED"}[r["ok"]]
    yield f"  {r['check']:<80}{value:>11} {r['unit']:<10}{verdict}".rstrip()
    for text in (r.get("why"), r.get("error", "").strip().rpartition("\n")[2], *r["claims"]):
        if text:
            yield f"      {text}"


def main(options: Options) -> int:
    if (method := start_method(options)) is None:
        print("no GPU here that torch can use: --device cpu --tiny tries the script itself", file=sys.stderr)
        return 1
    if options.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        torch.set_num_threads(1)
    start, seconds = time.monotonic(), {}
    for part in options.parts or PARTS:  # once for all forks; what cannot be imported is a row of its part
        with suppress(Exception):
            import_module(f"benchmarks.gpu_check.{part}")
    results: dict[str, list[dict]] = {}
    for part in options.parts or PARTS:
        began = time.monotonic()
        left = max(1.0, min(LIMITS_S.get(part, LIMIT_S), DEADLINE_S - (began - start)))
        results[part] = []
        print(part, flush=True)
        for r in part_in_a_process(part, options, left, method):
            results[part].append(r)
            print("\n".join(lines_of(r)), flush=True)
        seconds[part] = round(time.monotonic() - began, 1)
        write(options, results, seconds)  # what there is, if the next part takes the machine with it
    found = verdicts(results, options.device == "cuda")
    print("claims")
    for name, said in found.items():
        print("\n".join(f"  {name:<5}{text}" for text in said))
    failed = sum(r["ok"] is False for rows in results.values() for r in rows)
    print(f"{options.device}: {failed} checks failed, {sum(seconds.values()):.0f} s, {options.output}")
    return 1 if failed else 0


def versions(*packages: str) -> Iterator[tuple[str, str]]:
    for name in packages:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def write(options: Options, results: dict[str, list[dict]], seconds: dict[str, float]) -> None:
    on_gpu = options.device == "cuda"
    record = {
        "device": options.device,
        "versions": dict(versions("torch", "transformers", "accelerate", "tensordict", "vllm")),
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "tiny": options.tiny,
        "seconds": seconds,
        "claims": verdicts(results, on_gpu),
        "results": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
