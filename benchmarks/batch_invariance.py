"""What keeps trainer and engine from equal log-probs to the bit on this machine: each operation alone, and a rollout.

    OMP_NUM_THREADS=1 python -m benchmarks.batch_invariance

A row of a linear layer among many rows against among few, one query of attention with a cache against all queries at
once, and log-softmax by two formulas; then the share of the tokens of a rollout of the toy model whose log-probs are
the same bits in the engine and in the forward of the update.
"""

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lib.model import log_probs_of
from tools import mismatch
from tools.oracle import ROOT

ROWS, WIDTH, HIDDEN, VOCABULARY = 256, 128, 512, 104  # the toy's sizes
FEW = (1, 2, 3, 4, 8, 64)
HEADS, HEAD, TOKENS = 4, 32, 28


def equal_share(a: Tensor, b: Tensor) -> float:
    return float((a == b).double().mean())


def linear(dtype: torch.dtype) -> dict[str, float]:
    """Of the first n rows, computed without the others."""
    x, weight = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(HIDDEN, WIDTH, dtype=dtype)
    among_all = F.linear(x, weight)
    return {f"linear layer, {n} of {ROWS} rows": equal_share(F.linear(x[:n], weight), among_all[:n]) for n in FEW}


def attention(dtype: torch.dtype) -> dict[str, float]:
    """A query alone, as with a cache, against all of a sequence at once."""
    q, k, v = (torch.randn(8, HEADS, TOKENS, HEAD, dtype=dtype) for _ in range(3))
    at_once = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    alone = [
        F.scaled_dot_product_attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in range(TOKENS)
    ]
    return {"attention, one query of a sequence": equal_share(torch.cat(alone, 2), at_once)}


def log_softmax() -> dict[str, float]:
    logits = 5 * torch.randn(ROWS, VOCABULARY)
    y = torch.arange(ROWS) % VOCABULARY
    return {
        "log_softmax against z - logsumexp": equal_share(
            logits.log_softmax(-1)[torch.arange(ROWS), y], log_probs_of(logits, y)
        )
    }


@contextmanager
def attention_in_float64() -> Iterator[None]:
    """Of engine and trainer, rounded once: the order of the sums then shows in one result of many millions."""
    attend = ALL_ATTENTION_FUNCTIONS["packed_sdpa"]

    def exact(module, query, key, value, *more, **named):
        output, weights = attend(module, query.double(), key.double(), value.double(), *more, **named)
        return output.to(query.dtype), weights

    ALL_ATTENTION_FUNCTIONS.register("packed_sdpa", exact)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register("packed_sdpa", attend)


def rollout(dtype: str, engine: str, exact_attention: bool = False) -> float:
    """The share of the tokens of a batch of 64 responses."""
    if exact_attention:
        with attention_in_float64():
            return rollout(dtype, engine)
    found = []

    def compare(batch: mismatch.Batch, step: int) -> mismatch.Report:
        of_engine = batch.batch.batch["rollout_log_probs"].double()
        found.append(equal_share(batch.log_probs(batch.trainer)[batch.mask], of_engine[batch.mask]))
        gap = mismatch.Gap(0, 0, 0)
        return mismatch.Report(step, 0, gap, [], gap, 0.0)

    toy = ROOT / "data/toy"
    flags = {"script": "grpo.py", "model": str(toy / "model"), "train_files": [str(toy / "train.jsonl")]}
    flags |= {"max_prompt_length": 32, "max_response_length": 16, "compute_dtype": dtype, "rollout_engine": engine}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(mismatch, "split", compare):
        config = Path(folder, "config.json")
        config.write_text(json.dumps(flags))
        mismatch.measure(mismatch.Args(str(config), rows=64))
    return found[0]


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for name, share in (linear(dtype) | attention(dtype)).items():
            print(f"{name}, {dtype}: {share:.1%} of the elements are equal", flush=True)
    for name, share in log_softmax().items():
        print(f"{name}: {share:.1%} equal")
    for engine in ("hf", "vllm") if mismatch.has_vllm() else ("hf",):
        for name in ("float32", "bfloat16"):
            with ProcessPoolExecutor(1, get_context("spawn")) as process:  # vLLM runs once in a process
                share = process.submit(rollout, name, engine).result()
            print(f"rollout by {engine}, {name}: {share:.1%} of the tokens are equal", flush=True)
    share = rollout("float32", "hf", exact_attention=True)
    print(f"rollout by hf, float32 with attention in float64: {share:.1%} of the tokens are equal")


if __name__ == "__main__":
    main()
