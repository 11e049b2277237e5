"""--attn-implementation varlen against packed_sdpa, on a CPU: a slow kernel stands for FlashAttention.

torch.nn.attention.varlen calls one operator forward and one backward; on a CPU neither has a kernel. Those registered
here follow the operators' documentation, so that every line of ours runs: which keys each query sees, windows, grouped
heads, gradients. What FlashAttention itself computes is for benchmarks/gpu_check.sh.
"""

import math
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from lib import InputError
from lib.model import PACKED, ForwardConfig, Reference, load_model, response_log_probs
from lib.model.attention import TELL_OF_GROUPS
from lib.sampling import Sampling
from lib.setup import get_attention
from tests.common import TOY_MODEL, tiny_vision, vision_batch, with_slow
from tests.model.test_models import batch_of_groups, load, save, with_gradient

CALLS = []


def heads(query, key, cu_seq_q, cu_seq_k, scale, window_size):
    """For each sequence and query head: (its place in the queries, its place in the keys, its scale, what each query
    gives each key). Query i of n sees key j of m if j is in the window around i + m - n."""
    (left, right), H, D = window_size, *query.shape[1:]
    scale = 1 / math.sqrt(D) if scale is None else scale
    for q0, q1, k0, k1 in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:]):
        n, m = int(q1 - q0), int(k1 - k0)
        distance = torch.arange(n)[:, None] + m - n - torch.arange(m)
        seen = ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))
        for head in range(H):
            q, k = (slice(q0, q1), head), (slice(k0, k1), head // (H // key.shape[1]))
            yield q, k, scale, (query[q] @ key[k].T * scale).masked_fill(~seen, -torch.inf).softmax(-1)


def forward(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window=None, gqa=False, *_):
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    assert cu_q.dtype == cu_k.dtype == torch.int32 and is_causal == (window == [-1, 0])
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert len(query) == cu_q[-1] and len(key) == cu_k[-1]
    assert gqa == (TELL_OF_GROUPS and query.shape[1] != key.shape[1])
    CALLS.append(window)
    out = torch.empty_like(query)
    for q, k, _, p in heads(query, key, cu_q, cu_k, scale, window):
        out[q] = p @ value[k]
    return out, query.new_zeros(query.shape[1], len(query)).float(), torch.zeros(2, dtype=torch.uint64)


def backward(grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng, scale=None, window=None):
    d_query, d_key, d_value = (torch.zeros_like(x) for x in (query, key, value))
    for q, k, factor, p in heads(query, key, cu_q, cu_k, scale, window):
        d_p = grad[q] @ value[k].T
        d_scores = p * (d_p - (d_p * p).sum(-1, keepdim=True)) * factor
        d_query[q] += d_scores @ key[k]
        d_key[k] += d_scores.T @ query[q]
        d_value[k] += p.T @ grad[q]
    return d_query, d_key, d_value


class OperationNames(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def cpu_kernels():
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", forward, "CPU")
        library.impl("_varlen_attn_backward", backward, "CPU")
        yield


@pytest.fixture(autouse=True, scope="module")
def kernels():
    with cpu_kernels():
        yield


FULL, WINDOW = [-1, 0], [3, 0]  # of 4 tokens, the query's own among them

LAYERS = {"llama": 4 * [FULL], "mistral": 4 * [WINDOW], "gemma3_text": 2 * [WINDOW, FULL]}
LAYERS |= {"qwen3_moe": 4 * [FULL], "qwen3_5_text": 2 * [FULL]}


@pytest.mark.parametrize("family", with_slow(LAYERS, "llama", "mistral", "qwen3_moe"))
def test_varlen_is_packed_sdpa(tmp_path, family):
    """Log-probs, entropies and gradients, with and without shared prompts; among the families are windows of 4, more
    query than key heads, experts, and layers with a state. fp64: the same sums in another order."""
    path, batch = save(family, tmp_path), batch_of_groups()
    packed, ours = load(path), load(path, attn_implementation="varlen")
    assert ours.padding_free and ours.share_prompts
    for share in (False, True):
        CALLS.clear()
        (results, gradient), (expected, expected_gradient) = (
            with_gradient(model, partial(response_log_probs, model, batch, 0.7, share_prompts=share))
            for model in (ours, packed)
        )
        torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-6)  # norms and rotary tables are in fp32
        assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm()
        assert LAYERS[family] == CALLS


def test_gradients_add_up_in_one_order(tmp_path):
    """Keys and values of a shared prompt, too: a CUDA kernel of index_add or scatter_add adds with atomics, in bf16."""
    model = load(save("llama", tmp_path), attn_implementation="varlen")
    with OperationNames() as names:
        with_gradient(model, partial(response_log_probs, model, batch_of_groups(), 0.7))
    assert "embedding_dense_backward" in names.seen
    assert not names.seen & {"index_add", "index_add_", "scatter_add", "scatter_add_", "index_reduce", "put_"}


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_an_attention_without_its_kernel_is_refused(device, dtype):
    with pytest.raises(InputError, match=f"here they are {device} and {str(dtype)[6:]}; take auto"):
        get_attention("varlen", dtype, torch.device(device), TOY_MODEL)
    if find_spec("flash_attn") is None:
        with pytest.raises(InputError, match="flash-attn is not installed; take auto"):
            get_attention("flash_attention_2", torch.bfloat16, torch.device("cuda"), TOY_MODEL)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "head_dim", "expected"),
    [
        ("cuda", torch.bfloat16, (9, 0), 128, "varlen"),
        ("cuda", torch.float16, (8, 0), None, "varlen"),  # 64 / 2
        ("cuda", torch.bfloat16, (7, 5), 128, "packed_sdpa"),
        ("cuda", torch.float32, (9, 0), 128, "packed_sdpa"),
        ("cuda", torch.bfloat16, (9, 0), 264, "packed_sdpa"),
        ("cuda", torch.bfloat16, (9, 0), 36, "packed_sdpa"),
        ("cpu", torch.bfloat16, None, 128, "packed_sdpa"),
    ],
)
def test_auto_is_varlen_where_it_has_kernels(tmp_path, monkeypatch, device, dtype, capability, head_dim, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=head_dim).save_pretrained(tmp_path)
    assert get_attention("auto", dtype, torch.device(device), str(tmp_path)) == expected


def test_auto_spares_images_whose_tokens_see_later_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for kind, expected in {"gemma3": "packed_sdpa", "qwen3_vl": "varlen"}.items():
        tiny_vision(kind, tmp_path / kind)
        assert get_attention("auto", torch.bfloat16, torch.device("cuda"), str(tmp_path / kind)) == expected


def as_one_sequence(query, key, cu_seq_q, cu_seq_k, *rest, whole=heads):
    """A kernel that does not look at where sequences begin."""
    yield from whole(query, key, cu_seq_q[[0, -1]], cu_seq_k[[0, -1]], *rest)


def test_a_wrong_kernel_is_found_in_the_first_batch_and_all_models_go_on_without_it(
    tmp_path, monkeypatch, capsys, world
):
    path, batch = save("llama", tmp_path), batch_of_groups()
    policy, critic, packed = (load(path, attn_implementation=name) for name in ("varlen", "varlen", "packed_sdpa"))
    forward_config = ForwardConfig(10_000, Sampling(8), None, torch.float32, modules=[policy, critic])
    monkeypatch.setitem(globals(), "heads", as_one_sequence)
    Reference(policy, forward_config).check_rows(batch)
    said = capsys.readouterr().out
    assert said.startswith("attention: packed_sdpa from here on, for with varlen") and said.count("\n") == 1
    for model in (policy, critic):
        for ours, expected in zip(response_log_probs(model, batch, 1.0), response_log_probs(packed, batch, 1.0)):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("kind", with_slow(["qwen3_vl", "glm4v", "gemma3", "idefics3"], "glm4v", "idefics3"))
def test_images_go_through_it_but_those_whose_tokens_see_each_other(tmp_path, kind):
    """The tower's own attention stays SDPA: images have no packed sequences. Gemma's rows are padded."""
    tiny_vision(kind, tmp_path)
    batch = vision_batch(kind)
    CALLS.clear()
    ours, theirs = (
        response_log_probs(load_model(str(tmp_path), dtype=torch.float64, attn_implementation=name), batch, 1.0)
        for name in PACKED[::-1]
    )
    assert len(CALLS) == (0 if kind == "gemma3" else 3)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
