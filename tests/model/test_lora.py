"""What of a model trains: LoRA of actor and critic on 1 and 2 ranks, against peft's own PeftModel in one process, in
fp64; frozen parts."""

import re
from itertools import combinations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from lib import InputError
from lib.distributed import full_tensor, iter_full_params, make_mesh, shard_model, trainable_parameters
from lib.model import (
    add_lora,
    freeze,
    load_critic,
    load_model,
    load_tokenizer,
    response_log_probs,
    response_values,
    without_adapters,
)
from lib.rollout import weight_checksum
from lib.run.export import export_hf
from tests.common import TOY_MODEL, one_line, randomize_lora_b, rollout_batch, run_ranks, save_tiny, with_slow

PROMPTS, RESPONSES = [3, 7, 5, 5, 2, 7], [4, 1, 9, 6, 6, 8]
LORA = {"rank": 4, "alpha": 8, "seed": 3}
MOE = {"cls": Qwen3MoeForCausalLM, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def log_probs_and_gradients(world, path, target_modules, checkpointing):
    torch.manual_seed(100 + world.rank)  # the adapters must not depend on it
    model = load_model(path, dtype=torch.float64, gradient_checkpointing=checkpointing)
    randomize_lora_b(add_lora(model, **LORA, target_modules=target_modules))
    model = shard_model(model, make_mesh(world), torch.float64)
    weights = {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad}
    batch = rollout_batch(PROMPTS, RESPONSES)
    mine = list(range(world.rank, len(batch), world.size))
    log_probs, entropy = response_log_probs(model, batch[mine], 0.8)
    ((log_probs.sum() - 0.1 * entropy.sum()) * world.size).backward()
    gradients = {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad(), without_adapters(model):
        base = response_log_probs(model, batch[mine], 0.8)[0]
    with torch.no_grad():
        again = response_log_probs(model, batch[mine], 0.8)[0]
        loaded = response_log_probs(load_model(path, dtype=torch.float64), batch[mine], 0.8)[0]
    assert torch.equal(base, loaded) and torch.equal(again, log_probs) and (base - again).abs().max() > 0.1
    return weights, log_probs.detach(), gradients


@pytest.mark.parametrize(("size", "target_modules"), [(2, "all-linear"), (1, r".*\.(q|down)_proj")])
def test_log_probs_and_gradients_are_those_of_peft_and_of_the_base_when_off(tmp_path, size, target_modules):
    """Every adapter has a gradient and nothing else has; switched off, the model is the one that was loaded, bit for
    bit, and switched on again it is what it was. 1e-9: fp64 sums in another order. On one rank with checkpointing."""
    path = save_tiny(tmp_path)
    batch = rollout_batch(PROMPTS, RESPONSES)
    start = dict(
        add_lora(load_model(path, dtype=torch.float64), **LORA, target_modules=target_modules).named_parameters()
    )
    config = LoraConfig(r=4, lora_alpha=8, target_modules=target_modules)
    peft = get_peft_model(load_model(path, dtype=torch.float64), config)
    results = run_ranks(size, log_probs_and_gradients, path, target_modules, size == 1)
    for rank, (weights, log_probs, gradients) in enumerate(results):
        assert all(torch.equal(w, start[name]) for name, w in weights.items() if ".lora_A." in name)
        names = {"base_model.model." + name: w for name, w in weights.items()}
        assert names.keys() == {name for name, p in peft.named_parameters() if p.requires_grad}
        assert len(names) == (28 if size == 2 else 8)  # A and B of 7 or 2 in 2 layers
        peft.load_state_dict(names, strict=False)
        peft.zero_grad()
        expected, entropy = response_log_probs(peft.get_base_model(), batch, 0.8)
        (expected.sum() - 0.1 * entropy.sum()).backward()
        torch.testing.assert_close(log_probs, expected[rank::size].detach(), rtol=1e-9, atol=1e-10)
        assert {"base_model.model." + name for name in gradients} == names.keys()
        for name, p in peft.named_parameters():
            if p.requires_grad:
                ours = gradients[name.removeprefix("base_model.model.")]
                torch.testing.assert_close(ours, p.grad, rtol=1e-8, atol=1e-9)
                assert ours.count_nonzero() > 0


def test_adapters_start_differently_and_change_nothing(tmp_path):
    path, batch = save_tiny(tmp_path), rollout_batch(PROMPTS, RESPONSES)
    model, base = add_lora(load_model(path), **LORA), load_model(path)
    with torch.no_grad():
        assert torch.equal(response_log_probs(model, batch, 1.0)[0], response_log_probs(base, batch, 1.0)[0])
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all((p.count_nonzero() > 0) == (".lora_A." in name) for name, p in adapters.items())
    drawn = [p for name, p in adapters.items() if ".lora_A." in name]
    assert not any(torch.equal(a, b) for a, b in combinations(drawn, 2))


# ---- precision -----------------------------------------------------------------------------------
def bf16_base(world, path):
    """The gradients of adapters on bf16 weights, without and with a forward of the reference before."""
    found = []
    for reference_first in (False, True):
        model = load_model(path, dtype=torch.bfloat16)
        randomize_lora_b(add_lora(model, **LORA))
        model, batch = shard_model(model, make_mesh(world), torch.bfloat16), rollout_batch(PROMPTS, RESPONSES)
        if reference_first:
            with torch.no_grad(), without_adapters(model):
                response_log_probs(model, batch, 1.0)
        response_log_probs(model, batch, 1.0)[0].sum().backward()
        parameters = trainable_parameters(model)
        assert {p.dtype for p in parameters} == {p.grad.dtype for p in parameters} == {torch.float32}
        assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
        found.append([full_tensor(p.grad) for p in parameters])
    return found


def test_adapters_and_their_gradients_are_fp32_on_frozen_bf16_weights(tmp_path):
    """Also where the first forward is the reference's: FSDP settles then in which dtype it adds up gradients."""
    plain, with_reference = run_ranks(2, bf16_base, save_tiny(tmp_path))[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, with_reference, strict=True))


# ---- frozen parts --------------------------------------------------------------------------------
# whose gradients: tests/planner/test_memory.py, test_vision.py, and tests/distributed/test_compute_copy.py
@pytest.mark.parametrize(("pattern", "which"), [("embed_tokens", "none"), (".*", "all")])
def test_a_pattern_that_freezes_nothing_or_everything_is_refused(tmp_path, pattern, which):
    with pytest.raises(InputError, match=f"matches {which} of the model's parameters"):
        freeze(load_model(save_tiny(tmp_path)), pattern)


# ---- resume, export ------------------------------------------------------------------------------
def export(world, path, folder, dtype):
    adapted = "all-linear" if dtype == torch.float64 else ".*[qkvo]_proj"  # experts have none
    model = add_lora(load_model(path, dtype=dtype), **LORA, target_modules=adapted)
    randomize_lora_b(model)
    model = shard_model(model, make_mesh(world), dtype)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(4, 20)[None]).logits  # leaves the root's parameters whole
    model.generation_config.temperature = 0.6  # without do_sample: transformers loads it and does not save it
    export_hf(model, load_tokenizer(TOY_MODEL), f"{folder}/exported", max_shard_bytes=50_000)
    return logits, [name for name, p in iter_full_params(model)]


@pytest.mark.parametrize(("more", "dtype"), [({"tied": True}, torch.float64), (MOE, torch.float32)])
def test_export_is_the_merged_model_and_the_adapter_for_peft(tmp_path, more, dtype):
    """rtol 1e-9: merged, W x + s B (A x) is (W + s B A) x. Experts have no fp64 product: fp32 and 1e-4 there."""
    path = save_tiny(tmp_path / "model", **more)
    near = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    ids = torch.arange(4, 20)[None]
    for logits, names in run_ranks(2, export, path, str(tmp_path), dtype):
        assert names == [name for name, _ in load_model(path).named_parameters()]  # of merged weights
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=dtype)
        assert not getattr(model, "peft_config", None) and model.config.architectures == [type(model).__name__]
        base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        adapted = PeftModel.from_pretrained(base, tmp_path / "exported/adapter")
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, logits, **near)
            torch.testing.assert_close(adapted(input_ids=ids).logits, logits, **near)
    assert adapted.peft_config["default"].base_model_name_or_path == path


def test_of_a_copy_in_bf16_the_masters_are_exported(tmp_path, one_rank):
    """--sharding zero1: what computes is in bfloat16, and Adam's weights in fp32."""
    model = add_lora(load_model(save_tiny(tmp_path / "model"), dtype=torch.bfloat16), **LORA)
    randomize_lora_b(model)
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_B." in name}
    model = shard_model(model, make_mesh(one_rank), torch.bfloat16, zero1=True)
    export_hf(model, load_tokenizer(TOY_MODEL), f"{tmp_path}/exported")
    adapter = load_file(tmp_path / "exported/adapter/adapter_model.safetensors")
    for name, master in masters.items():
        own = adapter[f"base_model.model.{name.replace('.default', '')}"]
        assert torch.equal(own, master) and not torch.equal(own, own.bfloat16().float())


@pytest.mark.parametrize(
    ("target_modules", "more", "message"),
    [
        ("no_such_layer", {}, "not found"),
        (".*embed_tokens", {"tied": False}, "embed_tokens is not a linear layer"),
        (".*(lm_head|q_proj)", {}, "lm_head is the head, whose adapter would not be trained"),
        ("all-linear", MOE, "experts is not a linear layer"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused(tmp_path, target_modules, more, message):
    with one_line(f"--lora-target-modules {re.escape(target_modules)}: .*{message}"):
        add_lora(load_model(save_tiny(tmp_path, **more)), **LORA, target_modules=target_modules)


def test_a_critic_s_head_is_trained_as_a_whole_whatever_the_pattern_says(tmp_path):
    """So that a policy and its critic can have one pattern; and all that may train gets a gradient."""
    critic = add_lora(load_critic(save_tiny(tmp_path)), **LORA, target_modules=".*(score|q_proj)")
    randomize_lora_b(critic)
    batch = rollout_batch([3, 4], [4, 5])
    batched = response_values(critic, batch)
    batched.sum().backward()
    trained = {name for name, p in critic.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"score.weight", "score.bias"}
    assert all(p.grad is not None for name, p in critic.named_parameters() if name in trained)


def checksums(world, path, replicas):
    """Of the shards, and of a model that holds the whole merged weights, as an engine does."""
    model = load_model(path, dtype=torch.float64)
    add_lora(model, **LORA)
    randomize_lora_b(model)
    model = shard_model(model, make_mesh(world, replicas), torch.float64)
    engine = load_model(path, dtype=torch.float64)
    engine.load_state_dict(dict(iter_full_params(model)), strict=False)
    engine = shard_model(engine, make_mesh(world, replicas), torch.float64)
    return [[weight_checksum(m, t) for t in (torch.float64, torch.bfloat16)] for m in (model, engine)]


@pytest.mark.parametrize(("size", "replicas"), with_slow([(2, 1), (2, 2)], (2, 2)))
def test_the_checksum_of_adapted_shards_is_that_of_the_whole_merged_weights(tmp_path, size, replicas):
    path = save_tiny(tmp_path)
    [base] = run_ranks(1, lambda world: weight_checksum(load_model(path, dtype=torch.float64), torch.float64))
    for adapted, whole in run_ranks(size, checksums, path, replicas):
        assert adapted == whole and adapted[0] != base
