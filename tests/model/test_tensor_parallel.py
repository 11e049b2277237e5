"""Tensor parallel: ranks that share the weights of each layer, and run their rows together, get what one rank gets.

Float64, to 1e-9 of the norm, as in test_sequence_parallel.py.
"""

import pytest
import torch
import transformers

import grpo
from lib import InputError
from lib.distributed import (
    clip_grad_norm,
    full_tensor,
    iter_full_params,
    make_mesh,
    make_row_group,
    shard_model,
    trainable_parameters,
)
from lib.distributed.sharding import parallel_styles
from lib.model import (
    check_tensor_parallel,
    load_critic,
    load_model,
    load_tokenizer,
    response_log_probs,
    response_values,
)
from lib.rollout import weight_checksum
from lib.run.checkpoint import load_checkpoint, save_checkpoint
from lib.run.export import export_hf
from tests.common import TOY_MODEL, parse_flags, run_ranks, save_tiny, with_slow
from tests.model.test_sequence_parallel import CRITIC, WINDOWS, assert_exact
from tests.scripts.test_invariance import groups_batch

TWO_KEY_HEADS = {"num_key_value_heads": 2}
QWEN3 = {"cls": transformers.Qwen3ForCausalLM, "head_dim": 32, **TWO_KEY_HEADS}
EXPERTS = {"cls": transformers.Qwen3MoeForCausalLM, "num_experts": 6, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "mlp_only_layers": [0], "head_dim": 32, **TWO_KEY_HEADS}
CASES = {  # the model, what is computed, ranks
    "biases, prompts not shared, checkpointing": (TWO_KEY_HEADS, {"share": False, "gradient_checkpointing": True}, 2),
    "windows": (WINDOWS | TWO_KEY_HEADS, {}, 2),
    "critic": (CRITIC | TWO_KEY_HEADS, {"critic": True}, 2),
    "untied, norms of heads, weights in CPU memory": (QWEN3 | {"tied": False}, {"offload": True}, 4),
}


@pytest.mark.parametrize("case", with_slow(CASES, "windows"))
def test_outputs_and_gradients_are_those_of_one_rank(tmp_path, case):
    model, options, ranks = CASES[case]
    assert_exact(save_tiny(tmp_path, **model), ranks, {"tensor": 2}, **options)


# ---- weights and optimizer -----------------------------------------------------------------------
def trained(world, path, folder, load, tensor, resume=None):
    """A step by AdamW on a clipped gradient, after loading a checkpoint if asked for, and what is left of it."""
    mesh = make_mesh(world, tensor_parallel=tensor)
    model = shard_model(load(path, on_meta=True), mesh, torch.float32)
    parameters, group = trainable_parameters(model), make_row_group(world, mesh)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    states = {"models": {"actor": (model, optimizer)}, "schedulers": {"actor": scheduler}}
    if resume is not None:
        load_checkpoint(resume, **states)
    rows = 8 // world.size
    batch = groups_batch([(5, [4, 1, 9, 6]), (7, [3, 3, 19, 2])])[[*range(world.rank * rows, (world.rank + 1) * rows)]]
    if load is load_model:
        outputs, _ = response_log_probs(model, batch, 0.8, row_group=group)
    else:
        outputs = response_values(model, batch, row_group=group)
    ((outputs - 1).square().sum() * world.size).backward()  # the first values are 0
    norm = clip_grad_norm(parameters, 0.1)
    clipped = torch.stack([full_tensor(p.grad).norm() for p in parameters]).norm()
    optimizer.step()
    checkpoint = save_checkpoint(folder / "checkpoints", 1, **states, trainer_state={}, keep=0).result()
    export_hf(model, load_tokenizer(TOY_MODEL), folder / "model", max_shard_bytes=50_000)
    return norm, clipped, dict(iter_full_params(model)), weight_checksum(model, torch.float32), checkpoint


TRAINED = {  # the model, what loads it, (ranks, tensor ranks), how far the first step moves its weights at least
    "dense": (QWEN3, load_model, (4, 2), 1),
    "experts": (EXPERTS, load_model, (4, 2), 1),
    "critic": ({}, load_critic, (2, 1), 0.05),  # the head alone, whose one row one of two ranks has
}


@pytest.mark.parametrize("case", with_slow(TRAINED, "dense"))
def test_a_step_a_checkpoint_and_an_export_are_those_of_one_rank(tmp_path, case):
    """Written by several ranks and by one, each is resumed by the other. Of six experts a tensor rank has three, which
    FSDP2 splits into two and one. fp32 sums in another order differ by 1e-6; Adam makes the most of it where a gradient
    is almost 0, 1e-4 of the step's norm."""
    model, load, several, least = TRAINED[case]
    path, one, results = save_tiny(tmp_path / "start", **model), (1, 1), {}
    for ranks, tensor in (one, several):
        results[ranks] = run_ranks(ranks, trained, path, tmp_path / f"first{ranks}", load, tensor)
    for (ranks, tensor), (resume, _) in ((one, several), (several, one)):
        how = load, tensor, results[resume][0][4]
        results[ranks, resume] = run_ranks(ranks, trained, path, tmp_path / f"then{ranks}", *how)
    many = several[0]
    start = dict(load(path).named_parameters())
    flat = lambda weights: torch.cat([weights[name].flatten() for name in start])  # noqa: E731
    for expected, other in ((1, many), ((1, many), (many, 1))):
        norm, clipped, weights, *_ = results[expected][0]
        moved = (flat(weights) - flat(start)).norm()
        assert norm > 1 and abs(clipped - 0.1) < 1e-6 and moved > least
        for other_norm, other_clipped, other_weights, *_ in results[other]:
            assert abs(other_norm / norm - 1) < 1e-5 and abs(other_clipped - 0.1) < 1e-6
            assert other_weights.keys() == start.keys() and (flat(other_weights) - flat(weights)).norm() < 1e-3 * moved
    for folder, name in ((f"first{many}", many), (f"then{many}", (many, 1))):
        exported = load(str(tmp_path / folder / "model"))
        assert all(torch.equal(results[name][0][2][key], weight) for key, weight in exported.named_parameters())
        [expected] = run_ranks(1, lambda world, model=exported: weight_checksum(model, torch.float32))
        assert {checksum for *_, checksum, _ in results[name]} == {expected}


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-parallel-size 3", "--tensor-parallel-size 3: must divide the number of ranks, 4"),
        ("--lora-rank 4", "--lora-rank"),
        ("--dp-replicate-size 2", "--dp-replicate-size"),
        ("--dry-run 4", "--dry-run"),
        ("--attn-implementation eager", "--tensor-parallel-size 2: needs .*packed_sdpa"),
    ],
)
def test_what_does_not_work_is_refused(flags, message, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = f"--tensor-parallel-size 2 --rollout-engine vllm {flags}".split()
    with pytest.raises(InputError, match=message):
        parse_flags(grpo.Args, words)


def test_models_that_cannot_be_split_are_refused(tmp_path):
    for name, model in (("a", QWEN3), ("b", EXPERTS)):
        check_tensor_parallel(save_tiny(tmp_path / name, **model), 2)
    latent = {"cls": transformers.DeepseekV2ForCausalLM, "n_routed_experts": 4}
    for message, model in {
        "must divide the 1 key and value heads of --critic-model": {"num_key_value_heads": 1},
        "must divide the 3 experts of --critic-model": EXPERTS | {"num_experts": 3},
        "has mla_kv_a_proj layers in its plan: drop the flag": latent,
        "soft caps; drop --tensor-parallel-size": {"cls": transformers.Gemma2ForCausalLM},
    }.items():
        with pytest.raises(InputError, match=message):
            check_tensor_parallel(save_tiny(tmp_path / message, **TWO_KEY_HEADS | model), 2, flag="--critic-model")
    learned = load_model(save_tiny(tmp_path / "g", cls=transformers.ApertusForCausalLM, **TWO_KEY_HEADS))
    with pytest.raises(InputError, match=r"ApertusForCausalLM has no model\.layers\.0\.mlp\.act_fn\.alpha_p: drop"):
        parallel_styles(learned)
