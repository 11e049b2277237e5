"""What torch.compile makes of our code for an H100, down to PTX and machine code, without a GPU: by ptx.py."""

import itertools
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lib.model.load
from lib.model import LinearLogProbs, compile_layers, log_probs, response_log_probs
from tests.common import save_tiny
from tests.model.test_models import batch_of_groups, load, with_gradient

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

TOOLS = Path(find_spec("triton").origin).parent / "backends/nvidia/bin"
pytestmark = pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="needs triton's ptxas")


def assert_for_an_h100_without_spills(kernels) -> None:
    for kernel in itertools.chain(*kernels):
        assert re.search(r"^\.target sm_90a?$", kernel.ptx, re.MULTILINE) and ".visible .entry" in kernel.ptx
        assert kernel.resources["STACK"] == kernel.resources["LOCAL"] == 0  # where ptxas puts what it spills
        assert 0 < kernel.resources["REG"] <= 255


@pytest.fixture
def graphs(monkeypatch):
    from tests.model.ptx import Graphs  # imports inductor

    torch._dynamo.reset()
    graphs = Graphs()
    monkeypatch.setattr(log_probs, "COMPILE", {"cpu": {"backend": graphs.backend}})
    monkeypatch.setattr(lib.model.load, "COMPILER", graphs.backend)
    log_probs._compiled.cache_clear()
    yield graphs
    log_probs._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.slow
def test_log_probs_are_three_kernels(graphs, tmp_path):
    """One of two loops forward; backward one over all logits and one for the sampled tokens."""
    h, weight = (torch.randn(n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (4, 151_936))  # Qwen's words
    log_probs_, entropy = LinearLogProbs.apply(h, weight, torch.tensor([0, 1, 2, 3]), 1 / 0.7, 4, False, None)
    (log_probs_.sum() + entropy.sum()).backward()
    kernels = graphs.kernels(tmp_path, log_probs.OPTIONS)
    assert [[kernel.loops for kernel in own] for own in kernels] == [[2], [0, 0]]
    assert_for_an_h100_without_spills(kernels)


@pytest.mark.slow
def test_a_compiled_layer_is_eight_kernels_forward_and_six_backward(graphs, monkeypatch, tmp_path):
    """Around its attention and its matrix products, which are calls of libraries. torch's own operators are some 25."""
    path = save_tiny(tmp_path / "model", cls=LlamaForCausalLM, config=LlamaConfig, num_hidden_layers=1)
    model = load(path).to(torch.bfloat16)
    compile_layers(model)
    monkeypatch.setattr(log_probs, "COMPILE", {})
    with_gradient(model, partial(response_log_probs, model, batch_of_groups(), 0.7))
    kernels = graphs.kernels(tmp_path, {})
    assert [len(own) for own in kernels] == [1, 2, 2, 3, *(0, 0, 3, 3)]  # the backward of a graph is another one
    assert_for_an_h100_without_spills(kernels)


@pytest.mark.parametrize(("dtype", "backward"), [("bf16", False), ("fp32", True)])
def test_the_rotary_kernel_rounds_each_product(tmp_path, dtype, backward):
    """To the tensors' dtype, as separate operations do: none is fused with the sum."""
    import lib.model.rotary
    from tests.model.ptx import compiled_for_an_h100

    constants = {"Q_HEADS": 64, "K_HEADS": 8, "HALF": 64, "BACKWARD": backward}  # the heads of a model of 70B
    tensors = dict.fromkeys(("q", "k", "q_out", "k_out", "cos", "sin"), f"*{dtype}")
    kernel = compiled_for_an_h100(lib.model.rotary._kernel, tensors, constants, tmp_path)
    assert_for_an_h100_without_spills([[kernel]])
    arithmetic = set(re.findall(r"\b(?:fma|mul|add|sub)\.[\w.]*f\d+", kernel.ptx))
    assert arithmetic == {f"{name}.rn.{dtype.replace('fp', 'f')}" for name in ("mul", "add", "sub")}
