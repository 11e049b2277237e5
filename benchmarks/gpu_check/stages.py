"""Part `stages`: seconds of each stage of grpo.py's second step, with random weights of 0.5 B parameters. The engine is
vLLM where it is installed, or else hf."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu_check.common import TOY_MODEL, random_model, shape, the_world
from benchmarks.gpu_check.rows import ROOT, Options, attempt, row
from benchmarks.gpu_check.scripts import run_script
from lib.model import load_tokenizer
from lib.run.checkpoint import export_hf

SIZES = "--prompts-per-step 32 --group-size 8 --max-response-length 256"


def check(options: Options, device: torch.device) -> Iterator[dict]:
    engine = "vllm" if find_spec("vllm") and not options.tiny else "hf"
    yield from attempt(f"stages with {engine}", lambda: stages(options, device, engine))


def stages(options: Options, device: torch.device, engine: str) -> Iterator[dict]:
    name = "toy" if options.tiny else "qwen2.5-0.5b"
    the_world()  # which an export takes part in
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(shape(options, name), device)
        export_hf(model, load_tokenizer(TOY_MODEL), Path(folder, "model"), torch.bfloat16)
        del model
        torch.cuda.empty_cache()
        flags = ("--prompts-per-step 4 --group-size 2" if options.tiny else SIZES).split()
        flags += ["--model", f"{folder}/model", "--rollout-engine", engine, "--total-steps", "2", "--save-every", "0"]
        flags += ["--no-export-model", "--val-every", "0", "--no-val-before-train", "--reward-workers", "0"]
        flags += ["--train-files", str(ROOT / "data/toy/val.jsonl")]
        last = run_script(options, "grpo", folder, "stages", *flags)[-1]
    for key, seconds in last.items():
        if key.startswith("timing_s/"):
            stage = key.removeprefix("timing_s/")
            yield row(
                f"grpo.py, {name}, {engine}: {stage}", seconds, "s", summary={"stages": f"{stage} {seconds:.3g} s"}
            )
    tokens, rate = last["training/tokens"], last["perf/tokens_per_s"]
    summary = {"stages": f"{rate:,.0f} tokens/s of grpo.py, {name}, {engine}"}
    yield row(f"grpo.py, {name}, {engine}: tokens per second", rate, "tokens/s", tokens=tokens, summary=summary)
    if "perf/mfu" in last:
        summary = {"stages": f"MFU {last['perf/mfu']:.2f}"}
        yield row(f"grpo.py, {name}, {engine}: MFU of the update", last["perf/mfu"], "", summary=summary)
