"""--compile, with a compiler that is soon done: what it traces is what inductor gets."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

import lib.model.load
from lib.distributed import make_mesh, shard_model
from lib.model import compile_layers, response_log_probs
from tests.common import rollout_batch, run_ranks
from tests.model.test_models import batch_of_groups, load, save, with_gradient


@pytest.fixture(autouse=True)
def fast_compiler(monkeypatch):
    monkeypatch.setattr(lib.model.load, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    counters.clear()


def layouts():
    """Batches of other numbers of rows, lengths and runs, with shared prompts and without."""
    yield batch_of_groups()
    for n in range(2, 6):
        yield rollout_batch([3 + n * k % 5 for k in range(n)], [2 + (n + k) % 7 for k in range(n)], seed=n)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_compiled_layers_compute_the_same_and_are_compiled_once(tmp_path, family):
    """Gemma has layers of two kinds, with windows and without. fp64; norms and rotary tables are in fp32."""
    path = save(family, tmp_path)
    plain, ours = load(path), load(path)
    compile_layers(ours)
    graphs = []
    for batch in layouts():
        (results, gradient), (expected, expected_gradient) = (
            with_gradient(model, partial(response_log_probs, model, batch, 0.7)) for model in (ours, plain)
        )
        torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-6)
        assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm()
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]
    with torch.no_grad():
        ours(torch.arange(5)[None])  # as in a rollout of the hf engine
    assert counters["stats"]["unique_graphs"] == graphs[-1]


def sharded(world, path):
    lib.model.load.COMPILER = "aot_eager"
    batch, results = batch_of_groups()[list(range(world.rank, 6, 2))], []
    for compiled in (False, True):
        model = load(path, gradient_checkpointing=True)
        if compiled:
            compile_layers(model)
        model = shard_model(model, make_mesh(world), torch.float64)
        [log_probs, _] = response_log_probs(model, batch, 0.7)
        log_probs.square().sum().backward()
        results.append((log_probs.detach(), [p.grad.full_tensor() for p in model.parameters()]))
    return results, counters["stats"]["unique_graphs"]


def test_compiled_layers_are_sharded_and_checkpointed(tmp_path):
    for (plain, ours), graphs in run_ranks(2, sharded, save("llama", tmp_path)):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
        assert graphs > 0
