"""--use-liger-kernel: liger-kernel's Triton kernels on a CPU, by Triton's interpreter, against the model's own."""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from transformers import AutoConfig, AutoModelForCausalLM

from lib import InputError
from lib.cli.flags import parse_flags
from lib.model import load_model, response_log_probs, use_liger_kernel
from tests.common import rollout_batch, save_tiny

CPU = torch.device("cpu")
SHAPES = {"qwen2": {}, "qwen3": {"head_dim": 16}, "gemma3_text": {"head_dim": 16}}


def interpreted() -> None:
    """Gives Triton's interpreter what it lacks: scalars that are floats, and functions of libdevice."""
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter, jit

    def convert(x, rest=interpreter._implicit_cvt):
        is_float = isinstance(x, float)
        return tl.tensor(interpreter.TensorHandle(np.float32([x]), tl.float32), tl.float32) if is_float else rest(x)

    interpreter._implicit_cvt = convert
    rms_norm.rsqrt, geglu.tanh = jit.jit(reciprocal_root), jit.jit(hyperbolic_tangent)


def reciprocal_root(x):
    return 1 / tl.sqrt(x)


def hyperbolic_tangent(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


def with_gradients(path: str, fused: bool) -> tuple[list[torch.Tensor], set[str]]:
    """Log-probs of packed rows with a shared prompt, and gradients; the modules whose functions computed them."""
    model = load_model(path)
    if fused:
        use_liger_kernel(model, CPU)
    [log_probs, _] = response_log_probs(model, rollout_batch([3, 5], [4, 7]), 0.7)
    (log_probs * torch.arange(log_probs.shape[1])).sum().backward()
    layer = model.model.layers[0]
    parts = layer.input_layernorm, layer.mlp
    modules = {type(part).forward.__module__ if not fused else part.forward.__func__.__module__ for part in parts}
    modules.add(sys.modules[type(model).__module__].apply_rotary_pos_emb.__module__)
    return [log_probs.detach(), *(p.grad for p in model.parameters())], modules


@pytest.fixture(scope="module")
def process():
    with ProcessPoolExecutor(1, get_context("spawn"), interpreted) as executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")  # before Triton is imported
            executor.submit(int)
        yield executor


@pytest.mark.parametrize("kind", SHAPES)
def test_log_probs_and_gradients_are_those_of_the_model(process, tmp_path, kind):
    """1e-5 of the size: what sums of some hundred terms in another order give in fp32."""
    config = type(AutoConfig.for_model(kind))
    path = save_tiny(tmp_path, cls=AutoModelForCausalLM.from_config, config=config, **SHAPES[kind])
    plain, fused = (process.submit(with_gradients, path, fused).result() for fused in (False, True))
    for ours, theirs in zip(fused[0], plain[0], strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert not torch.equal(fused[0][0], plain[0][0])
    assert all("liger_kernel" in module for module in fused[1])
    assert not any("liger_kernel" in module for module in plain[1])


def test_where_it_cannot_be_used_one_line_says_so(monkeypatch):
    model = SimpleNamespace(config=SimpleNamespace(model_type="mamba"))
    with pytest.raises(InputError, match=r"^--use-liger-kernel: its Triton kernels need a GPU; drop the flag$"):
        use_liger_kernel(model, CPU)
    with pytest.raises(InputError, match=r"liger-kernel: it has no kernels for a model of type mamba; drop the flag$"):
        use_liger_kernel(model, torch.device("cuda"))
    import grpo

    with pytest.raises(InputError, match=r"^--compile and --use-liger-kernel fuse the same operations"):
        parse_flags(grpo.Args, ["--compile", "--use-liger-kernel"])
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(InputError, match="liger-kernel is not installed"):
        use_liger_kernel(model, CPU)
