"""--compile and the compiled log-probs, with a compiler that is soon done: what it traces is what inductor gets."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM

import lib.model.load
from lib.distributed import make_mesh, shard_model
from lib.model import LinearLogProbs, compile_layers, log_probs, response_log_probs
from lib.sampling import Truncation
from tests.common import rollout_batch, run_ranks, save_tiny, with_slow
from tests.model.test_models import batch_of_groups, load, save, with_gradient


@pytest.fixture(autouse=True)
def fast_compiler(monkeypatch):
    monkeypatch.setattr(lib.model.load, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    counters.clear()


def layouts():
    """Batches of other numbers of rows, lengths and runs, with shared prompts and without."""
    yield batch_of_groups()
    for n in (2, 5):
        yield rollout_batch([3 + n * k % 5 for k in range(n)], [2 + (n + k) % 7 for k in range(n)], seed=n)


@pytest.mark.parametrize("family", with_slow(["llama", "gemma3_text"], "gemma3_text"))
def test_compiled_layers_compute_the_same_and_are_compiled_once(tmp_path, family):
    """Gemma has layers of two kinds, with windows and without. fp64; norms and rotary tables are in fp32."""
    path = save(family, tmp_path, num_hidden_layers=2)
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


@pytest.mark.slow
def test_compiled_layers_are_sharded_and_checkpointed(tmp_path):
    # of one layer, for FSDP has each traced anew
    path = save_tiny(tmp_path, cls=LlamaForCausalLM, num_hidden_layers=1)
    [((plain, ours), graphs)] = run_ranks(1, sharded, path)  # FSDP's hooks, which are compiled, are those of any size
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    assert graphs > 0


# ---- log-probs -----------------------------------------------------------------------------------
@pytest.fixture
def compile_on_a_cpu(monkeypatch):
    """Gives a function: compile there, too, by this backend."""

    def by(backend) -> None:
        monkeypatch.setattr(log_probs, "COMPILE", {"cpu": {"backend": backend}})
        log_probs._compiled.cache_clear()

    yield by
    log_probs._compiled.cache_clear()


def linear_log_probs(n, v=23, entropy=True, sum_pi_squared=False, top_p=1.0):
    """Results and gradients of n tokens in chunks of 4, in float64."""
    g = torch.Generator().manual_seed(n)
    h, w = (torch.randn(k, 5, dtype=torch.float64, generator=g, requires_grad=True) for k in (n, v))
    coefficients = torch.randn(2, n, dtype=torch.float64, generator=g)
    y = torch.randint(v, (n,), generator=g)
    results = LinearLogProbs.apply(h, w, y, 1 / 0.7, 4, sum_pi_squared, Truncation(top_p) if top_p < 1 else None)
    loss = sum((c * x).sum() for c, x in zip(coefficients, results[: 1 + entropy]))
    return *(x.detach() for x in results), *torch.autograd.grad(loss, (h, w))


LOSSES = [{}, {"entropy": False}, {"sum_pi_squared": True}, {"top_p": 0.8}, {"top_p": 0.8, "sum_pi_squared": True}]


@pytest.mark.parametrize("loss", with_slow(LOSSES, *LOSSES[:4]), ids=str)
def test_compiled_log_probs_are_the_same_and_compiled_once(compile_on_a_cpu, capsys, loss):
    """Chunks of 4, 3 and 2 tokens, and other vocabularies, take the graphs of the first; one of a single token, which
    torch.compile always sets apart, has its own. top-p looks at its candidates between graphs."""
    sizes = [(4, 23), (7, 23), (10, 23), (6, 31), (9, 23), (5, 31)]
    expected, graphs = [linear_log_probs(n, v, **loss) for n, v in sizes], []
    assert counters["stats"]["unique_graphs"] == 0  # a CPU does not compile by itself
    compile_on_a_cpu("aot_eager")
    for (n, v), plain in zip(sizes, expected):
        for a, b in zip(linear_log_probs(n, v, **loss), plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)  # the same sums, perhaps in another order
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[3] and graphs[4] == graphs[5] <= 2 * graphs[0]
    assert graphs[0] == (3 if "top_p" in loss else 2)
    assert log_probs.COMPILE and not capsys.readouterr().out


def never(graph, inputs):
    raise RuntimeError("no compiler here\nand much more")


def runs_half(graph, inputs):
    """What it returns overwrites the logits and then fails, as a kernel that does not load."""

    def fail(*inputs):
        for x in inputs:
            if isinstance(x, torch.Tensor) and x.ndim == 2 and x.shape[1] > 1:
                x.zero_()
        raise RuntimeError("no compiler here\nand much more")

    return fail


def fails_backward(graph, inputs):
    """Only where there is an addcmul, that is in the gradient of the entropy."""
    return never(graph, inputs) if any("addcmul" in str(node.target) for node in graph.graph.nodes) else graph


@pytest.mark.parametrize("backend", [runs_half, fails_backward, "no such backend"])
def test_without_a_compiler_log_probs_run_on_and_one_line_says_so(compile_on_a_cpu, capsys, backend):
    expected = linear_log_probs(10)
    compile_on_a_cpu(backend)
    for _ in range(2):
        for a, b in zip(linear_log_probs(10), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    printed = capsys.readouterr()
    [line] = (printed.out + printed.err).splitlines()
    assert line.startswith("log-probs run uncompiled, which gives the same numbers more slowly: ")
    assert ("no such backend" if isinstance(backend, str) else "no compiler here") in line


def test_a_compiled_chunk_that_runs_out_of_memory_says_so(compile_on_a_cpu):
    def out_of_memory(*inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    compile_on_a_cpu(lambda graph, inputs: out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        linear_log_probs(10)
    assert log_probs.COMPILE
