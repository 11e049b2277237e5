"""Part `batch_invariance`: log-probs of a row alone and among others, with vLLM's batch-invariant kernels."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu_check.common import TOY_MODEL, random_model, shape, sharded
from benchmarks.gpu_check.rows import Options, attempt, row, skipped
from benchmarks.gpu_check.vllm_engine import TOLERANCE, alone, mismatch, prompts_of
from lib import InputError
from lib.model import load_tokenizer
from lib.rollout import Sampling, make_engine, sync_weights
from lib.setup import use_batch_invariant_kernels


def check(options: Options, device: torch.device) -> Iterator[dict]:
    if not find_spec("vllm"):
        yield skipped("batch-invariant kernels", "vLLM is not installed")
        return
    try:
        use_batch_invariant_kernels(device)
    except InputError as error:
        yield skipped("batch-invariant kernels", str(error))
        return
    yield from attempt("batch-invariant kernels", lambda: invariance(options, device))


def invariance(options: Options, device: torch.device) -> Iterator[dict]:
    tokenizer = load_tokenizer(TOY_MODEL)
    model = sharded(random_model(shape(options, "qwen2.5-0.5b"), device))
    with TemporaryDirectory() as folder:
        settings = {"max_length": 96, "dtype": torch.bfloat16, "gpu_memory": 0.3}
        settings["more"] = {"enforce_eager": True}  # no minute of compilation
        made = make_engine("vllm", model, tokenizer, folder=Path(folder, "engine"), **settings)
        made.stop_ids = []
        sync_weights(made, model, 0, tolerance=TOLERANCE)
        prompts = prompts_of(64, len(tokenizer), device)
        rollout = made.generate(prompts, Sampling(64), list(range(64)))
        yield from alone(made, prompts, rollout, "vLLM, batch-invariant", certain=True)
        k1, k3, largest = mismatch(model, rollout)
        yield row("vLLM, batch-invariant: mismatch k3", k3, "nats", k3 < 0.01, k1=k1, largest=largest)
        made.close()
