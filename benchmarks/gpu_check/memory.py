"""Part `memory`: the peak of a step against planner/memory.py."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_check.common import backward, equal_rows, random_model, shape, sharded
from benchmarks.gpu_check.measure import peak_bytes
from benchmarks.gpu_check.rows import Options, attempt, claim, row
from lib.distributed import trainable_parameters
from lib.model import add_lora, batched_log_probs
from planner.memory import GIB, StepSettings, estimate_memory


def check(options: Options, device: torch.device) -> Iterator[dict]:
    """Within 25 % of the estimate, for a step of one micro-batch on one rank in bf16."""
    for name in ("qwen2.5-0.5b",) if options.tiny else ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"):
        for checkpointing, lora_rank in ((False, 0), (True, 0), (True, 32)):
            label = f"{name}{', checkpointing' * checkpointing}{f', LoRA {lora_rank}' if lora_rank else ''}"
            yield from attempt(label, partial(one_model, options, device, name, label, checkpointing, lora_rank))
    if not options.tiny:
        yield from attempt("the default flags at 7B", lambda: of_7b(options, device))


def one_model(
    options: Options, device: torch.device, name: str, label: str, checkpointing: bool, lora_rank: int
) -> Iterator[dict]:
    if device.type == "cuda":
        left = torch.cuda.memory_allocated() / GIB
        yield row(f"{label}: memory of earlier rows", left, "GiB", left < 0.1)
    tokens, count = (256, 4) if options.tiny else (4096, 8)
    path, length = shape(options, name), tokens // count
    model = random_model(path, device, checkpointing)
    if lora_rank:
        add_lora(model, rank=lora_rank, alpha=32, seed=0)
        model.to(device)
    model = sharded(model)
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-6, fused=True)
    batch = equal_rows(tokens, count, model, device)

    def step() -> None:
        batched_log_probs(model, batch, 1.0, tokens)
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    step()  # Adam's moments are there from the second on
    measured = peak_bytes(step, device)
    moments = estimate_memory(
        StepSettings(
            path,
            ranks=1,
            compute_dtype=torch.bfloat16,
            micro_batch_tokens=tokens,
            rows=count,
            max_prompt_length=length // 4,
            max_response_length=length - length // 4,
            accumulation="none",
            recomputed=checkpointing,
            lora_rank=lora_rank,
        )
    )
    held = 0 if device.type == "cuda" else moments["loss"]["weights"] + moments["loss"]["Adam"]
    measured_moments = ("log-probs", "loss", "backward", "last layer", "optimizer")
    estimate = max(sum(moments[moment].values()) for moment in measured_moments) - held
    ratio = estimate / measured
    ok = abs(ratio - 1) <= 0.25 if device.type == "cuda" else None  # a CPU's allocator counts otherwise
    summary = {"memory": f"{label}: {measured / GIB:.2f} GiB, estimate {estimate / GIB:.2f}"}
    yield row(f"{label}: estimate / peak", ratio, "", ok, measured=measured, estimate=estimate, summary=summary)


def of_7b(options: Options, device: torch.device) -> Iterator[dict]:
    """What the estimate that was just checked says of the scripts' default flags at 7B on 8 GPUs (G2)."""
    moments = estimate_memory(
        StepSettings(
            shape(options, "qwen2.5-7b"),
            ranks=8,
            compute_dtype=torch.bfloat16,
            micro_batch_tokens=16384,
            rows=128,
            max_prompt_length=1024,
            max_response_length=4096,
        )
    )
    peak = max(sum(parts.values()) for moment, parts in moments.items() if moment != "host") / GIB
    said = f"by an estimate that the rows above compare with the peak, 7B on 8 GPUs needs {peak:.0f} GiB a GPU"
    yield row("7B on 8 GPUs, default flags: estimate", peak, "GiB", None, claim(device, "G2", peak > 72, said))
