"""Fused layers (lib/model/fused.py) on a CPU, by Triton's interpreter, against the model's own operations."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import pytest
import torch
import triton.language as tl
from transformers import AutoConfig, AutoModelForCausalLM

from lib.model import add_lora, fuse_layers, load_model, response_log_probs
from tests.common import rollout_batch, save_tiny, with_slow

SHAPES = {"qwen2": {}, "qwen3": {"head_dim": 16}, "gemma3_text": {"head_dim": 16}}
FUSED = {"qwen2": (5, 2, 2), "qwen3": (9, 2, 2), "gemma3_text": (0, 0, 2)}  # norms, MLPs, joined queries


def interpreted() -> None:
    """Gives Triton's interpreter what it lacks: scalars that are floats, and a function of libdevice."""
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter, jit

    def convert(x, rest=interpreter._implicit_cvt):
        is_float = isinstance(x, float)
        return tl.tensor(interpreter.TensorHandle(np.float32([x]), tl.float32), tl.float32) if is_float else rest(x)

    interpreter._implicit_cvt = convert
    rms_norm.rsqrt = jit.jit(reciprocal_root)


def reciprocal_root(x):
    return 1 / tl.sqrt(x)


@pytest.fixture(scope="module")
def process():
    with ProcessPoolExecutor(1, get_context("spawn"), interpreted) as executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")  # before Triton is imported
            executor.submit(int)
        yield executor


def saved(folder, kind: str) -> str:
    config = type(AutoConfig.for_model(kind))
    return save_tiny(folder, cls=AutoModelForCausalLM.from_config, config=config, **SHAPES[kind])


def with_gradients(path: str, dtype: torch.dtype, fused: bool, lora: bool) -> tuple[dict[str, torch.Tensor], tuple]:
    """Log-probs of packed rows with a shared prompt, and gradients by name; how many modules are fused."""
    model = load_model(path)
    if lora:
        add_lora(model, rank=2, alpha=4, seed=0)
    model.to(dtype)
    if fused:
        fuse_layers(model)
    [log_probs, _] = response_log_probs(model, rollout_batch([3, 5], [4, 7]), 0.7)
    (log_probs * torch.arange(log_probs.shape[1])).sum().backward()
    forwards = [getattr(getattr(module, "forward", None), "func", None) for module in model.modules()]
    found = [getattr(forward, "__name__", "") for forward in forwards]
    counts = found.count("_rms_norm"), found.count("_joined_mlp") + found.count("_gated_mlp"), found.count("part") // 3
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"log-probs": log_probs.detach(), **gradients}, counts


CASES = [*((kind, False) for kind in SHAPES), ("qwen2", True)]


@pytest.mark.parametrize(("kind", "lora"), with_slow(CASES, ("qwen2", False), ("gemma3_text", False)))
def test_log_probs_and_gradients_are_those_of_the_model(process, tmp_path, kind, lora):
    """1e-5 of the size: what sums of some hundred terms in another order give in fp32."""
    run = partial(process.submit, with_gradients, saved(tmp_path, kind), torch.float32)
    (plain, none), (fused, counts) = (run(fused, lora).result() for fused in (False, True))
    assert fused.keys() == plain.keys() and len(plain) > 8
    for name, theirs in plain.items():
        assert (fused[name] - theirs).norm() <= 1e-5 * theirs.norm(), name
    assert not torch.equal(fused["log-probs"], plain["log-probs"]) or kind == "gemma3_text"
    assert counts == FUSED[kind] and none == (0, 0, 0)


def test_in_16_bits_gradients_are_as_near_to_float64_as_the_models_own(process, tmp_path):
    """float16, for the interpreter's bfloat16 is not rounded: 4e-3 of the size, and at most 1.3 times the model's."""
    run = partial(process.submit, with_gradients, saved(tmp_path, "qwen2"))
    exact, _ = run(torch.float64, False, False).result()
    plain, fused = (run(torch.float16, fused, False).result()[0] for fused in (False, True))
    for name, gradient in exact.items():
        of_plain, of_fused = ((x[name].double() - gradient).norm() / gradient.norm() for x in (plain, fused))
        assert 0 < of_fused <= min(4e-3, 1.3 * of_plain), (name, of_plain, of_fused)


def rotated(fused: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """(queries, keys, their gradients), where batch, heads and tokens differ in size, and 48 is no power of 2."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from lib.model.rotary import rotate

    random = torch.Generator().manual_seed(0)
    table = [torch.randn(1, 5, 48, generator=random).to(dtype) for _ in range(2)]
    q, k, dq, dk = (torch.randn(2, 5, h * 48, generator=random).to(dtype) for h in (3, 2, 3, 2))
    leaves = q.requires_grad_(), k.requires_grad_()
    q, k, dq, dk = (x.view(2, 5, -1, 48).transpose(1, 2) for x in (q, k, dq, dk))
    outputs = (partial(rotate, None) if fused else apply_rotary_pos_emb)(q, k, *table)
    gradients = torch.autograd.grad(outputs, leaves, (dq, dk))
    return [x.detach() for x in (*outputs, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_rotary_embedding_has_the_bits_of_transformers(process, dtype):
    theirs, ours = (process.submit(rotated, fused, dtype).result() for fused in (False, True))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(theirs, ours, strict=True))


def test_on_a_cpu_transformers_rotates():
    from lib.model.rotary import rotate

    tensors = [torch.ones(1, 1, 1, 2)] * 4
    assert rotate(lambda *args: args, *tensors) == (*tensors, 1)
