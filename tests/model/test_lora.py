"""What of a model trains: LoRA of actor and critic on 1 and 2 ranks, against peft's own PeftModel in one process, in
fp64; frozen parts."""

import re

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

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
from lib.run.checkpoint import load_checkpoint, save_checkpoint
from lib.run.export import export_hf
from tests.common import TOY_MODEL, checkpoint_state, randomize_lora_b, rollout_batch, run_ranks, save_tiny, with_slow

PROMPTS, RESPONSES = [3, 7, 5, 5, 2, 7], [4, 1, 9, 6, 6, 8]
LORA = {"rank": 4, "alpha": 8, "seed": 3}
MOE = {"cls": Qwen3MoeForCausalLM, "config": Qwen3MoeConfig}
MOE |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def lora_model(world, path, *, random_b=True, shard=True, target_modules="all-linear", **options):
    torch.manual_seed(100 + world.rank)  # the adapters must not depend on it
    model = load_model(path, dtype=torch.float64, **options)
    add_lora(model, **LORA, target_modules=target_modules)
    if random_b:
        randomize_lora_b(model)
    return shard_model(model, make_mesh(world), torch.float64) if shard else model


def adapters(model):
    return {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad}


def log_probs_and_gradients(world, path, options):
    model = lora_model(world, path, **options)
    weights = adapters(model)
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


@pytest.mark.parametrize(
    ("size", "options"), [(2, {}), (1, {"gradient_checkpointing": True, "target_modules": r".*\.(q|down)_proj"})]
)
def test_log_probs_and_gradients_are_those_of_peft_and_of_the_base_when_off(tmp_path, size, options):
    """Every adapter has a gradient and nothing else has; switched off, the model is the one that was loaded, bit for
    bit, and switched on again it is what it was. 1e-9: fp64 sums in another order."""
    path = save_tiny(tmp_path)
    batch = rollout_batch(PROMPTS, RESPONSES)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=options.get("target_modules", "all-linear"))
    peft = get_peft_model(load_model(path, dtype=torch.float64), config)
    for rank, (weights, log_probs, gradients) in enumerate(run_ranks(size, log_probs_and_gradients, path, options)):
        names = {"base_model.model." + name: w for name, w in weights.items()}
        assert names.keys() == {name for name, p in peft.named_parameters() if p.requires_grad}
        assert len(names) == (28 if "target_modules" not in options else 8)  # A and B of 7 or 2 in 2 layers
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


def start(world, path):
    model = lora_model(world, path, random_b=False)
    weights = adapters(model)
    with torch.no_grad():
        return weights, response_log_probs(model, rollout_batch(PROMPTS, RESPONSES), 1.0)[0]


def test_adapters_start_alike_on_every_rank_and_change_nothing(tmp_path):
    path = save_tiny(tmp_path)
    with torch.no_grad():
        base = response_log_probs(load_model(path, dtype=torch.float64), rollout_batch(PROMPTS, RESPONSES), 1.0)[0]
    (one, a), (two, b), (other, _) = run_ranks(1, start, path) + run_ranks(2, start, path)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) and torch.equal(one[k], other[k]) for k in one)
    assert all((w.count_nonzero() > 0) == (".lora_A." in name) for name, w in one.items())
    assert torch.equal(a, base) and torch.equal(b, base)
    draws = [torch.equal(one[a], one[b]) for a in one for b in one if a < b and ".lora_A." in a and ".lora_A." in b]
    assert not any(draws)


# ---- merged weights ------------------------------------------------------------------------------


def merged(world, path):
    model = lora_model(world, path)
    before = adapters(model)
    weights = dict(iter_full_params(model))
    assert all(torch.equal(before[name], w) for name, w in adapters(model).items())
    assert all("lora" in name or not p.requires_grad for name, p in model.named_parameters())
    return before, weights


@pytest.mark.parametrize(("size", "tied"), [(2, True), (1, False)])
def test_merged_weights_have_the_names_and_values_of_pefts_merge(tmp_path, size, tied):
    """rtol 1e-12: one product of rank 4 in fp64. The biases of q, k, v in Qwen2 are adapted layers' too."""
    path = save_tiny(tmp_path, tied=tied)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    peft = get_peft_model(load_model(path, dtype=torch.float64), config)
    (before, one), *others = run_ranks(size, merged, path)
    peft.load_state_dict({"base_model.model." + name: w for name, w in before.items()}, strict=False)
    expected = dict(peft.merge_and_unload().named_parameters())
    base = dict(load_model(path, dtype=torch.float64).named_parameters())
    assert base.keys() == expected.keys()
    changed = {name for name in base if not torch.equal(base[name], one[name])}
    assert changed == {name for name in base if name.endswith("proj.weight")}
    for weights in (one, *(weights for _, weights in others)):
        assert list(weights) == list(expected)
        for name, w in weights.items():
            torch.testing.assert_close(w, expected[name].detach(), rtol=1e-12, atol=1e-14)


# ---- precision -----------------------------------------------------------------------------------


def bf16_base(world, path, reference_first):
    model = load_model(path, dtype=torch.bfloat16)
    add_lora(model, **LORA)
    randomize_lora_b(model)
    model = shard_model(model, make_mesh(world), torch.bfloat16)
    batch = rollout_batch(PROMPTS, RESPONSES)
    if reference_first:
        with torch.no_grad(), without_adapters(model):
            response_log_probs(model, batch, 1.0)
    parameters = trainable_parameters(model)
    log_probs = response_log_probs(model, batch, 1.0)[0]
    log_probs.sum().backward()
    kinds = {p.dtype for p in parameters}, {p.grad.dtype for p in parameters}
    return kinds, {p.dtype for p in model.parameters()}, [full_tensor(p.grad) for p in parameters]


def test_adapters_and_their_gradients_are_fp32_on_frozen_bf16_weights(tmp_path):
    """Also where the first forward is the reference's: FSDP settles then in which dtype it adds up gradients."""
    path = save_tiny(tmp_path)
    results = [run_ranks(2, bf16_base, path, first)[0] for first in (False, True)]
    for kinds, dtypes, _ in results:
        assert kinds == ({torch.float32}, {torch.float32}) and dtypes == {torch.float32, torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2], strict=True))


def frozen(world, path, dtype):
    model = shard_model(load_model(path, dtype=dtype).requires_grad_(False), make_mesh(world), torch.bfloat16)
    with torch.no_grad():
        return response_log_probs(model, rollout_batch(PROMPTS, RESPONSES), 1.0)[0]


def test_frozen_weights_may_be_stored_in_the_compute_dtype(tmp_path):
    """FSDP casts fp32 weights to the compute dtype before each use; rotary tables are fp32 either way."""
    path = save_tiny(tmp_path)
    stored, cast = (run_ranks(1, frozen, path, dtype)[0] for dtype in (torch.bfloat16, torch.float32))
    assert torch.equal(stored, cast)


# ---- critic --------------------------------------------------------------------------------------


def train_critic(world, path):
    model = load_critic(path, dtype=torch.float64)
    add_lora(model, **LORA)
    model = shard_model(model, make_mesh(world), torch.float64)
    parameters = trainable_parameters(model)
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    batch = rollout_batch(PROMPTS, RESPONSES)[list(range(world.rank, len(PROMPTS), world.size))]
    for _ in range(2):  # the head starts at zero: adapters have a gradient from the second step on
        optimizer.zero_grad()
        values = response_values(model, batch)
        ((values - 1).mul(batch.batch["response_mask"]).square().sum() * world.size).backward()
        optimizer.step()
    gradients = {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    return gradients, response_values(model, batch).detach()


def test_a_critics_head_trains_as_a_whole_beside_its_adapters(tmp_path):
    """1e-9: fp64 sums in another order."""
    path = save_tiny(tmp_path)
    one, values = run_ranks(1, train_critic, path)[0]
    assert {name for name in one if ".lora_" not in name} == {"score.weight", "score.bias"} and len(one) == 30
    assert all(g.count_nonzero() > 0 for name, g in one.items() if ".lora_A." not in name)
    for rank, (two, other_values) in enumerate(run_ranks(2, train_critic, path)):
        torch.testing.assert_close(other_values, values[rank::2], rtol=1e-9, atol=1e-10)
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=1e-8, atol=1e-9)


# ---- frozen parts --------------------------------------------------------------------------------


def train_parts(world, path, pattern):
    model = load_model(path, dtype=torch.float64)
    if pattern:
        freeze(model, pattern)
    model = shard_model(model, make_mesh(world), torch.float64)
    response_log_probs(model, rollout_batch(PROMPTS, RESPONSES), 1.0)[0].sum().backward()
    return {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def test_frozen_parts_have_no_gradient_and_change_no_other(tmp_path):
    """1e-9: fp64 sums in another order."""
    path = save_tiny(tmp_path, tied=False)
    patterns = [r"model\.embed_tokens\.weight", r"model\.layers\.0\..*|model\.norm\.weight"]
    whole, *parts = run_ranks(2, lambda world: [train_parts(world, path, part) for part in ("", *patterns)])[0]
    for pattern, part in zip(patterns, parts, strict=True):
        assert part.keys() == {name for name in whole if not re.fullmatch(pattern, name)} and len(part) < len(whole)
        for name in part:
            torch.testing.assert_close(part[name], whole[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("pattern", "which"), [("embed_tokens", "none"), (".*", "all")])
def test_a_pattern_that_freezes_nothing_or_everything_is_refused(tmp_path, pattern, which):
    with pytest.raises(InputError, match=f"matches {which} of the model's parameters"):
        freeze(load_model(save_tiny(tmp_path)), pattern)


# ---- resume, export ------------------------------------------------------------------------------


def resume(world, path, folder):
    """Four steps; and two, a save, a load into another model, two more."""

    def make(seed):
        actor = load_model(path, dtype=torch.float64)
        critic = load_critic(path, dtype=torch.float64)
        models = {}
        for name, model in (("actor", actor), ("critic", critic)):
            add_lora(model, rank=4, alpha=8, seed=seed)
            model = shard_model(model, make_mesh(world), torch.float64)
            models[name] = model, torch.optim.AdamW(trainable_parameters(model), lr=1e-2)
        return models

    def steps(models, first, last):
        for step in range(first, last):
            batch = rollout_batch(PROMPTS, RESPONSES, seed=step)[list(range(world.rank, len(PROMPTS), world.size))]
            for name, (model, optimizer) in models.items():
                x = response_log_probs(model, batch, 1.0)[0] if name == "actor" else response_values(model, batch) - 1
                (x.square().sum() * world.size).backward()
                optimizer.step()
                optimizer.zero_grad()

    models, other = make(3), make(4)
    steps(models, 0, 2)
    step = save_checkpoint(folder, 2, models=models, schedulers={}, trainer_state={}, keep=0).result()
    steps(models, 2, 4)
    steps(other, 7, 8)
    load_checkpoint(step, models=other, schedulers={})
    steps(other, 2, 4)
    return [{name: adapters(model) for name, (model, _) in part.items()} for part in (models, other)]


@pytest.mark.parametrize(("size", "tied"), with_slow([(1, False), (2, True)], (1, False)))
def test_resume_is_exact_and_a_checkpoint_holds_what_trains(tmp_path, size, tied):
    path = save_tiny(tmp_path / "model", tied=tied)
    for straight, resumed in run_ranks(size, resume, path, str(tmp_path)):
        for name in straight:
            assert all(torch.equal(w, resumed[name][key]) for key, w in straight[name].items())
    for name, state in checkpoint_state(tmp_path / "step_000002").items():
        assert state["model"].keys() == straight[name].keys() == state["optim"]["state"].keys()


def export(world, path, folder):
    model = lora_model(world, path)
    with torch.no_grad():
        model(input_ids=torch.arange(4, 9)[None])  # leaves the root's parameters whole
    model.generation_config.temperature = 0.6  # without do_sample: transformers loads it and does not save it
    export_hf(model, load_tokenizer(TOY_MODEL), f"{folder}/exported", max_shard_bytes=50_000)
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 20)[None]).logits


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (2, {"tied": True}),
        pytest.param(1, {"cls": LlamaForCausalLM, "config": LlamaConfig, "tied": False}, marks=pytest.mark.slow),
        (2, MOE),
    ],
)
def test_export_is_the_merged_model_and_the_adapter_for_peft(tmp_path, size, more):
    """rtol 1e-9: merged, W x + s B (A x) is (W + s B A) x. Experts have no fp64 product: fp32 and 1e-4 there."""
    path = save_tiny(tmp_path / "model", **more)
    moe = "num_experts" in more
    ids = torch.arange(4, 20)[None]
    for logits in run_ranks(size, export_moe if moe else export, path, str(tmp_path)):
        dtype = torch.float32 if moe else torch.float64
        near = {"rtol": 1e-4, "atol": 1e-4} if moe else {"rtol": 1e-9, "atol": 1e-10}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=dtype)
        assert not getattr(model, "peft_config", None) and model.config.architectures == [type(model).__name__]
        base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        adapted = PeftModel.from_pretrained(base, tmp_path / "exported/adapter")
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, logits, **near)
            torch.testing.assert_close(adapted(input_ids=ids).logits, logits, **near)
    assert adapted.peft_config["default"].base_model_name_or_path == path


def export_moe(world, path, folder):
    model = load_model(path)
    add_lora(model, **LORA, target_modules=".*[qkvo]_proj")
    randomize_lora_b(model)
    model = shard_model(model, make_mesh(world), torch.float32)
    export_hf(model, load_tokenizer(TOY_MODEL), f"{folder}/exported", max_shard_bytes=50_000)
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 20)[None]).logits


def export_of_a_copy(world, path, folder):
    model = add_lora(load_model(path, dtype=torch.bfloat16), **LORA)
    randomize_lora_b(model)
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_B." in name}
    model = shard_model(model, make_mesh(world), torch.bfloat16, zero1=True)
    export_hf(model, load_tokenizer(TOY_MODEL), f"{folder}/exported")
    return masters


def test_of_a_copy_in_bf16_the_masters_are_exported(tmp_path):
    """--sharding zero1: what computes is in bfloat16, and Adam's weights in fp32."""
    [masters] = run_ranks(1, export_of_a_copy, save_tiny(tmp_path / "model"), str(tmp_path))
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
    with pytest.raises(InputError, match=f"--lora-target-modules {re.escape(target_modules)}: .*{message}") as error:
        add_lora(load_model(save_tiny(tmp_path, **more)), **LORA, target_modules=target_modules)
    assert "\n" not in str(error.value)


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
    [(base, _)] = run_ranks(
        1, lambda world, path: (weight_checksum(load_model(path, dtype=torch.float64), torch.float64), 0), path
    )
    for adapted, whole in run_ranks(size, checksums, path, replicas):
        assert adapted == whole and adapted[0] != base
