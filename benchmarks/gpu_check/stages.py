"""Part `stages`: seconds and peak memory of each stage of grpo.py's second step, with random weights of 0.5 B
parameters and no flag for memory; the estimate's peak and the trace's of `python -m planner grpo.py --gpus 1 --trace`.
The engine is vLLM where it is installed, or else hf."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu_check.common import TOY_MODEL, random_model, shape, the_world
from benchmarks.gpu_check.rows import ROOT, Options, attempt, claim, row, skipped
from benchmarks.gpu_check.scripts import run_script
from lib.distributed import total_memory
from lib.model import load_tokenizer
from lib.run.export import export_hf

SIZES = "--prompts-per-step 32 --group-size 8 --max-prompt-length 64 --max-response-length 256"
TINY = "--prompts-per-step 4 --group-size 2"
REST = "--total-steps 2 --save-every 0 --no-export-model --val-every 0 --no-val-before-train --reward-workers 0"
PEAK = "perf/memory_peak_gib/"


def check(options: Options, device: torch.device) -> Iterator[dict]:
    engine = "vllm" if find_spec("vllm") and not options.tiny else "hf"
    name = "toy" if options.tiny else "qwen2.5-0.5b"
    with tempfile.TemporaryDirectory() as folder:
        flags = [*(TINY if options.tiny else SIZES).split(), *REST.split(), "--rollout-engine", engine]
        flags += ["--config", str(ROOT / "data/toy/preset.yaml")]
        flags += ["--model", f"{folder}/model", "--train-files", str(ROOT / "data/toy/val.jsonl")]
        save_model(shape(options, name), device, Path(folder, "model"))
        yield from attempt("stages", lambda: stages(options, device, folder, f"grpo.py, {name}, {engine}", flags))
        if device.type == "cpu" or engine == "vllm":
            yield skipped("peak of grpo.py", "needs a GPU" if device.type == "cpu" else "vLLM's memory counts in it")
        else:
            yield from attempt("peak of grpo.py", lambda: peaks(folder, f"grpo.py, {name}, {engine}", flags))


def save_model(config: str, device: torch.device, folder: Path) -> None:
    the_world()  # an export is a collective
    export_hf(random_model(config, device), load_tokenizer(TOY_MODEL), folder, torch.bfloat16)


def stages(options: Options, device: torch.device, folder: str, label: str, flags: list[str]) -> Iterator[dict]:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the model that was saved
    last = run_script(options, "grpo", folder, "stages", *flags)[-1]
    for key, seconds in last.items():
        if key.startswith("timing_s/"):
            stage = key.removeprefix("timing_s/")
            peak = {"peak_gib": last.get(f"{PEAK}{stage}")}
            yield row(f"{label}: {stage}", seconds, "s", summary={"stages": f"{stage} {seconds:.3g} s"}, **peak)
    chosen, most = chosen_in(folder), last.get(f"{PEAK}update", 0.0)
    if device.type != "cpu":
        said = f"{chosen}: the update's peak is {most:.1f} GiB"
        claims = claim(device, "P5", most < 0.95 * total_memory(device) / 2**30, said)
        yield row(f"{label}: micro-batch tokens by auto", chosen["micro_batch_tokens"], "", None, claims)
    tokens, rate = last["training/tokens"], last["perf/tokens_per_s"]
    summary = {"stages": f"{rate:,.0f} tokens/s of {label}"}
    yield row(f"{label}: tokens per second", rate, "tokens/s", tokens=tokens, summary=summary)
    if mfu := last.get("perf/mfu"):
        yield row(f"{label}: MFU of the update", mfu, "", summary={"stages": f"MFU {mfu:.2f}"})


def peaks(folder: str, label: str, flags: list[str]) -> Iterator[dict]:
    """The run's peak, the estimate's and that of a trace of the same flags."""
    rows = [json.loads(line) for line in Path(folder, "stages/metrics.jsonl").read_text().splitlines()]
    measured = max(value for r in rows for key, value in r.items() if key.startswith(PEAK))
    tokens = chosen_in(folder)["micro_batch_tokens"]
    flags = [*flags, "--micro-batch-tokens", str(tokens)]  # a dry run assumes an H100
    tables = {"estimate": dry_run(flags), "trace": dry_run([*flags, "--trace"], "GiB, traced")}
    found = {name: max(sums(text)) for name, text in tables.items()}
    said = ", ".join(f"{name} {gib:.2f}" for name, gib in found.items())
    summary = {"memory": f"{label}: {measured:.2f} GiB, {said}"}
    yield row(f"{label}: peak", measured, "GiB", **found, summary=summary)
    for name, gib in found.items():
        yield row(f"{label}: {name} / peak", gib / measured, "", abs(gib / measured - 1) <= 0.25)


def chosen_in(folder: str) -> dict:
    """What the run had in effect."""
    effective = json.loads(Path(folder, "stages/config.json").read_text())["effective"]
    return {name: effective[name] for name in ("micro_batch_tokens", "gradient_checkpointing")}


def dry_run(flags: list[str], table: str = "GiB a GPU") -> str:
    """The table of memory that grpo.py prints for one GPU, where this word begins it, in a process without GPUs."""
    command = [sys.executable, "-m", "planner", "grpo.py", *flags, "--gpus", "1"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode or table not in done.stdout:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout[done.stdout.index(table) :]


def sums(table: str) -> list[float]:
    """GiB of each moment."""
    line = next(line for line in table.splitlines() if line.startswith("sum "))
    return [float(word) for word in line.split()[1:] if word != "-"]
