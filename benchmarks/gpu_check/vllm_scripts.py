"""Part `vllm_scripts`: grpo.py learns the embedded task with vLLM; two steps with LoRA, batch-invariant kernels, and
the embedded mixture of experts with each `--routing-replay`."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec

import torch

from benchmarks.gpu_check.rows import ROOT, Options, attempt, row, skipped
from benchmarks.gpu_check.scripts import TINY, run_script

MOE = f"--config {ROOT}/data/toy/preset.yaml --model {ROOT}/data/toy_moe/model --routing-replay"
CACHE = '"kv_cache_memory_bytes":1073741824'  # of each: several run at a time
KWARGS = f'--total-steps 2 --vllm-kwargs {{"enforce_eager":true,{CACHE}'
EAGER = f"{KWARGS}}}"
RUNS = {
    "16 steps": f"--total-steps 16 --vllm-kwargs {{{CACHE}}}",
    "LoRA, adapters": f'{KWARGS},"enable_lora":true}} --lora-rank 8',
    "batch-invariant": f'{KWARGS},"batch_invariant":true}}',
    "MoE, --routing-replay none": f"{EAGER} {MOE} none",
    "MoE, --routing-replay R2": f"{EAGER} {MOE} R2",
    "MoE, --routing-replay R3": f"{EAGER} {MOE} R3",
}
ON_A_GPU = ("batch-invariant", "MoE, --routing-replay R3")  # only there vLLM has them


def check(options: Options, device: torch.device) -> Iterator[dict]:
    if not find_spec("vllm"):
        yield skipped("grpo.py with vLLM", "vLLM is not installed")
        return
    names = [name for name in RUNS if device.type != "cpu" or name not in ON_A_GPU]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1 if options.tiny else None) as threads:
        runs = [attempt(f"vLLM, {name}", partial(run, options, folder, name)) for name in names]
        for rows in threads.map(list, runs):
            yield from rows


def run(options: Options, folder: str, name: str) -> Iterator[dict]:
    small = (*TINY, "--total-steps", "2") if options.tiny else ()
    flags = ["--rollout-engine", "vllm", "--save-every", "0", *RUNS[name].split(), *small]
    metrics = run_script(options, "grpo", folder, f"run_{[*RUNS].index(name)}", *flags)
    steps = [r for r in metrics if "rollout/k3" in r]
    k3, largest = (max(r[f"rollout/{key}"] for r in steps) for key in ("k3", "logp_diff_max"))
    router = {key: value for key, value in steps[-1].items() if key.startswith("router/")}
    yield row(f"vLLM, {name}: mismatch k3", k3, "nats", k3 < 0.01, steps=len(steps), largest=largest, **router)
    accuracy = [r["val/toy/arithmetic/mean@1"] for r in metrics if "val/toy/arithmetic/mean@1" in r]
    if name == "16 steps" and accuracy:
        yield row(f"vLLM, {name}: accuracy after", accuracy[-1], "", accuracy[-1] > 0.8, before=accuracy[0])
