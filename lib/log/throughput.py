"""How fast a step was: tokens a second, what ranks waited for, and model FLOPs utilisation (MFU)."""

import re
from collections.abc import Mapping

import torch

from lib.distributed import device_name

PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "H200 NVL": 835,
    "H200": 989,
    "H20": 148,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090$": 165,
}
"""TFLOP/s of dense bf16 matrix products with sums in fp32, by NVIDIA's data sheets (half of what they give "with
sparsity"), for words in the device's name; the first that is found counts."""


def peak_tflops(device: torch.device) -> float | None:
    """Of a GPU; None for a CPU, and for a GPU that is not in the table."""
    if device.type == "cpu":
        return None
    name = device_name(device)
    return next((peak for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}(?!\w)", name)), None)


def throughput_metrics(metrics: Mapping[str, float], n_devices: int, peak: float | None = None) -> dict[str, float]:
    """Throughput, from a step's times, tokens and FLOPs over all ranks.

    - perf/idle: the share of the step in which ranks wait: for scores, for asynchronous rollouts, and in the update for
      the rank with most to compute (perf/imbalance)
    - perf/mfu: the update's model FLOPs (lib/model/flops.py) over its time, as a share of `peak` (TFLOP/s of a device)
    - timing_per_token_ms/<stage>: per token of the trained rows; for the rollout, per token of the responses
    """
    seconds, tokens = metrics["timing_s/step"], metrics["training/tokens"]
    update = metrics.get("timing_s/update", 0.0)
    waits = metrics.get("timing_s/reward", 0.0)
    if "perf/requests_resampled" in metrics:  # servers sample
        waits += metrics.get("timing_s/rollout", 0.0)
    waits += update * (1 - 1 / metrics.get("perf/imbalance", 1.0))
    speed = {
        "perf/idle": waits / seconds,
        "perf/time_per_step": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/tokens_per_s_per_device": tokens / seconds / n_devices,
    }
    responses, prompts = (metrics.get(f"training/{part}_tokens", 0.0) for part in ("response", "prompt"))
    for stage in ("rollout", "log_probs", "advantages", "update"):
        if responses and (spent := metrics.get(f"timing_s/{stage}")) is not None:
            own = responses + (stage != "rollout") * prompts
            speed[f"timing_per_token_ms/{stage}"] = 1000 * spent / own
    if peak and update and "perf/update_tflops" in metrics:
        speed["perf/mfu"] = metrics["perf/update_tflops"] / update / n_devices / peak
    return speed
