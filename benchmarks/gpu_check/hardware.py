"""Part `hardware`: versions, the driver, and what the GPU and its link to the host do at best."""

import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from benchmarks.gpu_check.measure import peak_flops, seconds_of
from benchmarks.gpu_check.rows import Options, attempt, claim, row, skipped

PACKAGES = [
    "torch",
    "transformers",
    "accelerate",
    "tensordict",
    "vllm",
    "flash-attn",
    "liger-kernel",
    "nvidia-cudnn-cu13",
]


def check(options: Options, device: torch.device) -> Iterator[dict]:
    versions = {"Python": platform.python_version(), "CUDA": torch.version.cuda}
    versions |= {name: version_of(name) for name in PACKAGES}
    said = ", ".join(f"{name} {number or '-'}" for name, number in versions.items())
    yield row("versions", None, "", why=said, versions=versions, summary={"software": said})
    yield row("GPUs", len(gpus := gpus_of(device)), "", gpus=gpus, summary={"hardware": in_words(gpus)})
    yield from attempt("driver", lambda: driver(device))
    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield row("CPU cores that this process may use", cores, "", summary={"hardware": f"{cores} CPU cores"})
    yield row("memory of the host", memory, "GiB", summary={"hardware": f"{memory:.0f} GiB of memory"})
    yield from attempt("matrix product", lambda: matrix_product(options, device))
    yield from attempt("copy to the host", lambda: copies(options, device))
    yield from attempt("optimizer on the CPU", lambda: cpu_optimizer(options, device))


def gpus_of(device: torch.device) -> list[str]:
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    return [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in found]


def in_words(gpus: list[str]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in Counter(gpus).items()) or "no GPU"


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver(device: torch.device) -> Iterator[dict]:
    if device.type == "cpu" or not shutil.which("nvidia-smi"):
        yield skipped("driver", "no nvidia-smi here")
        return
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    number = lines[0].split(",")[0].strip()
    torch.zeros(1, device=device)  # CUDA starts
    new, cuda = int(number.split(".")[0]) >= 580, torch.version.cuda
    claims = claim(device, "G7", new, f"driver {number} runs CUDA {cuda}") if cuda.startswith("13") else ()
    summary = {"hardware": f"driver {number}"}
    yield row("driver", float(".".join(number.split(".")[:2])), "", None, claims, nvidia_smi=lines, summary=summary)
    if find_spec("flash_attn") is None:
        yield skipped("attention flash_attention_2", "its package flash-attn is not installed")


def matrix_product(options: Options, device: torch.device) -> Iterator[dict]:
    """What a matrix product of 8192 x 8192 gives: the ceiling of every MFU below."""
    n = 64 if options.tiny else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate, peak = 2 * n**3 / seconds_of(lambda: a @ b, 10) / 1e12, peak_flops(device)
    said = f"{rate:.4g} {f'of {peak / 1e12:.0f} ' if peak else ''}TFLOP/s in bf16"
    yield row("bf16 matrix product", rate, "TFLOP/s", size=n, summary={"hardware": said})


def copies(options: Options, device: torch.device) -> Iterator[dict]:
    """From the GPU to memory that is pinned, and to memory that is not, as a checkpoint's staging does (G15)."""
    numel = 2**10 if options.tiny else 2**29
    source, rates = torch.zeros(numel, device=device), {}
    for name, pinned in {"pageable": False, "pinned": True}.items():
        if pinned and device.type == "cpu":
            yield skipped("copy to pinned memory", "needs a GPU")
            return
        to = torch.empty(numel, pin_memory=pinned)
        rates[name] = source.nbytes / seconds_of(lambda to=to: to.copy_(source), 2) / 1e9
        said = f"{rates[name] / rates['pageable']:.1f} times as fast as to pageable memory"
        claims = claim(device, "G15", rates[name] > 1.5 * rates["pageable"], f"a copy to pinned memory is {said}")
        yield row(f"copy to {name} memory", rates[name], "GB/s", claims=claims if pinned else ())


def cpu_optimizer(options: Options, device: torch.device) -> Iterator[dict]:
    """AdamW on the CPU, as with --cpu-offload actor, with one thread and with all (G14)."""
    threads, seconds = torch.get_num_threads(), {}
    cores = len(os.sched_getaffinity(0)) if device.type == "cuda" else 1
    numel = 2**12 if options.tiny else 2**27
    parameters = [torch.zeros(numel // 8, requires_grad=True) for _ in range(8)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    try:
        for n in sorted({1, cores}):
            torch.set_num_threads(n)
            seconds[n] = seconds_of(optimizer.step, 1)
    finally:
        torch.set_num_threads(threads)
    gain = seconds[1] / seconds[cores]
    said = f"AdamW on the CPU is {gain:.1f} times as fast with {cores} threads as with 1"
    for n, s in seconds.items():
        claims = claim(device, "G14", gain > 1.5, said) if n == cores else ()
        yield row(f"AdamW on the CPU, a billion parameters, {n} threads", 1e9 / numel * s, "s", None, claims)
