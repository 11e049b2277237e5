"""Estimates the memory of one GPU from a model's config.json, without a script, weights or a network.

    python -m tools.memory --model benchmarks/shapes/qwen2.5-7b.json --ranks 8 --gradient-checkpointing

planner/memory.py says what it counts.
"""

import sys
from typing import Literal

import torch
import tyro

from lib import InputError, report_mistake
from planner.memory import GIB, StepSettings, estimate_memory, memory_table


def main(
    model: str,
    ranks: int = 8,
    device_gib: float = 80,
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16",
    frozen_dtype: Literal["float32", "bfloat16"] = "float32",
    micro_batch_tokens: int = 16384,
    rows: int = 128,
    max_prompt_length: int = 1024,
    max_response_length: int = 4096,
    accumulation: Literal["none", "whole", "sharded"] = "whole",
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    reference: bool = False,
    critic_model: str = "",
    reward_model: str = "",
    cpu_offload: bool = False,
    offload_activations: bool = False,
    rollout_engine: Literal["hf", "vllm"] = "vllm",
    gpu_memory_utilization: float = 0.4,
    rollout_tensor_parallel_size: int = 1,
) -> None:
    """Estimates the memory of one GPU from a config.json."""
    step = StepSettings(
        model,
        ranks=ranks,
        compute_dtype=getattr(torch, compute_dtype),
        frozen_dtype=getattr(torch, frozen_dtype),
        micro_batch_tokens=micro_batch_tokens,
        rows=rows,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        accumulation=accumulation,
        recomputed=gradient_checkpointing,
        lora_rank=lora_rank,
        reference=reference,
        critic_model=critic_model,
        reward_model=reward_model,
        cpu_offload=cpu_offload,
        offload_activations=offload_activations,
        engine_bytes=int(gpu_memory_utilization * device_gib * GIB) if rollout_engine == "vllm" else 0,
        engine_ranks=rollout_tensor_parallel_size,
    )
    print(memory_table(estimate_memory(step), int(device_gib * GIB)))


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m tools.memory")
    except InputError as error:
        report_mistake(f"error: {error}")
        sys.exit(2)
