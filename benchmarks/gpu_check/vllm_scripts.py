"""Part `vllm_scripts`: grpo.py learns the embedded task with vLLM; two steps with LoRA, batch-invariant kernels, the
embedded mixture of experts with each `--routing-replay`, and a small gpt-oss."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from benchmarks.gpu_check.common import TOY_MODEL
from benchmarks.gpu_check.rows import ROOT, Options, attempt, claim, row, skipped
from benchmarks.gpu_check.scripts import TINY, run_script
from lib.model import load_tokenizer

GPT_OSS = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64}
GPT_OSS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
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
    "gpt-oss": f"{EAGER} --config {ROOT}/data/toy/preset.yaml --model GPT_OSS",  # a folder
}
ON_A_GPU = ("batch-invariant", "MoE, --routing-replay R3", "gpt-oss")  # only there vLLM has them, or they take long
CLAIMS = {"MoE, --routing-replay R3": "P7", "gpt-oss": "P8"}


def check(options: Options, device: torch.device) -> Iterator[dict]:
    if not find_spec("vllm"):
        yield skipped("grpo.py with vLLM", "vLLM is not installed")
        return
    names = [name for name in RUNS if device.type != "cpu" or name not in ON_A_GPU]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1 if options.tiny else None) as threads:
        if "gpt-oss" in names:
            tokenizer = load_tokenizer(TOY_MODEL)
            model = GptOssForCausalLM(GptOssConfig(**GPT_OSS, vocab_size=len(tokenizer))).to(torch.bfloat16)
            for part in (model, tokenizer):
                part.save_pretrained(f"{folder}/GPT_OSS")
        runs = [attempt(f"vLLM, {name}", partial(run, options, device, folder, name)) for name in names]
        for rows in threads.map(list, runs):
            yield from rows


def run(options: Options, device: torch.device, folder: str, name: str) -> Iterator[dict]:
    small = (*TINY, "--total-steps", "2") if options.tiny else ()
    flags = ["--rollout-engine", "vllm", "--save-every", "0", *RUNS[name].split(), *small]
    flags = [word.replace("GPT_OSS", f"{folder}/GPT_OSS") for word in flags]
    metrics = run_script(options, "grpo", folder, f"run_{[*RUNS].index(name)}", *flags)
    steps = [r for r in metrics if "rollout/k3" in r]
    k3, largest = (max(r[f"rollout/{key}"] for r in steps) for key in ("k3", "logp_diff_max"))
    router = {key: value for key, value in steps[-1].items() if key.startswith("router/")}
    claims = claim(device, CLAIMS[name], k3 < 0.01 and len(steps) > 1, f"k3 {k3:.2g}") if name in CLAIMS else ()
    yield row(f"vLLM, {name}: mismatch k3", k3, "nats", k3 < 0.01, claims, steps=len(steps), largest=largest, **router)
    accuracy = [r["val/toy/arithmetic/mean@1"] for r in metrics if "val/toy/arithmetic/mean@1" in r]
    if name == "16 steps" and accuracy:
        yield row(f"vLLM, {name}: accuracy after", accuracy[-1], "", accuracy[-1] > 0.8, before=accuracy[0])
