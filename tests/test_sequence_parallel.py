"""Sequence parallel (DeepSpeed-Ulysses): ranks that run their rows together get what each row alone on one rank gives.

Float64, to 1e-9 of the norm: sums in another order differ by some 1e-15.
"""

import pytest
import torch
import torch.distributed as dist
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from lib import InputError
from lib.batching import prepare_dynamic_batch, restore_dynamic_batch
from lib.distributed import (
    full_tensor,
    make_mesh,
    make_sequence_group,
    set_gradient_sync,
    shard_model,
    trainable_parameters,
)
from lib.model import (
    add_lora,
    batched_log_probs,
    batched_values,
    check_sequence_parallel,
    load_critic,
    load_model,
    response_log_probs,
    response_values,
)
from tests.common import ACCELERATE, SEVERAL_UPDATES, SMALL, TORCHRUN, launch, metrics, ran, randomize_lora_b
from tests.common import rollout_batch, run_ranks, save_tiny
from tests.test_invariance import float64_norms, groups_batch

GROUPS = [(5, [4, 1, 9, 6]), (7, [3, 3, 40, 2]), (2, [8, 8, 2, 1]), (11, [20, 1, 30, 7])]
MICRO = 30  # tokens on a rank; a row has up to 47, so on one rank it is alone and too long


def batch_of_step():
    """16 rows, one with tool output, one without a trained token, one of two sequences."""
    batch = groups_batch(GROUPS)
    batch.batch["response_mask"][2, 3:6] = 0
    batch.batch["response_mask"][5] = 0
    P = batch.batch["prompts"].shape[1]
    batch.batch["position_ids"][12, P + 8 :] = torch.arange(batch.batch["responses"].shape[1] - 8)
    return batch


def update(model, parameters, batch, world, forward, group, share):
    """Loss of a mini-batch and its gradient, as the scripts make them; how many micro-batches, how many without a row
    of this rank."""
    micro_batches, _ = prepare_dynamic_batch(batch, MICRO, share_prompts=share, sequence_group=group)
    total = torch.zeros((), dtype=torch.float64)
    for i, micro in enumerate(micro_batches):
        set_gradient_sync(model, i == len(micro_batches) - 1)
        outputs = forward(micro)
        loss = sum(((k + 1) * x * torch.arange(1, x.shape[1] + 1)).sum() for k, x in enumerate(outputs))
        (loss * world.size).backward()
        total += loss.detach()
    dist.all_reduce(total)
    gradient = torch.cat([full_tensor(p.grad).flatten() for p in parameters])
    return total, gradient, len(micro_batches), sum(len(micro) == 0 for micro in micro_batches)


def step(world, path, size, critic=False, share=True, checkpointing=False, lora=False, replicas=1):
    """What a step computes, with groups of `size` ranks: outputs of this rank's rows without gradients, and `update`'s."""
    load = load_critic if critic else load_model
    model = float64_norms(load(path, dtype=torch.float64, gradient_checkpointing=checkpointing))
    model.config._experts_implementation = "eager"  # the other ones know no float64
    if lora:
        add_lora(model, rank=4, alpha=8, seed=0)
        randomize_lora_b(model)
        model.to(torch.float64)
    model = shard_model(model, make_mesh(world, replicas), torch.float64)
    parameters, group = trainable_parameters(model), make_sequence_group(world, size)
    batch, n = batch_of_step(), 16 // world.size
    batch = batch[list(range(world.rank * n, (world.rank + 1) * n))]
    options = {"share_prompts": share, "sequence_group": group}
    if critic:
        outputs = (batched_values(model, batch, MICRO, **options),)
        forward = lambda micro: (response_values(model, micro, **options),)  # noqa: E731
    else:
        outputs = batched_log_probs(model, batch, 0.8, MICRO, sum_pi_squared=True, **options)
        forward = lambda micro: response_log_probs(model, micro, 0.8, **options)  # noqa: E731
    return outputs, *update(model, parameters, batch, world, forward, group, share)


def assert_exact(path, layouts, tolerance=1e-9, **options):
    """layouts: (ranks, sequence_parallel, replicas). -> for each layout the ranks' (micro-batches, those without rows)"""
    [(outputs, loss, gradient, *_)] = run_ranks(1, lambda world: step(world, path, 1, **options))
    numbers = []
    for ranks, size, replicas in layouts:
        results = run_ranks(ranks, lambda world, n=size, r=replicas: step(world, path, n, **options, replicas=r))
        for expected, *parts in zip(outputs, *(result[0] for result in results)):
            assert (torch.cat(parts) - expected).norm() <= tolerance * expected.norm()
        for _, other_loss, other_gradient, *_ in results:
            assert abs(other_loss / loss - 1) < tolerance
            assert (other_gradient - gradient).norm() < tolerance * gradient.norm()
        numbers.append([result[3:] for result in results])
    return numbers


LAYOUTS = [(2, 2, 1), (4, 2, 1)]
CASES = {
    "untied, a key head for two ranks": ({"tied": False}, {}, LAYOUTS),
    "tied, prompts not shared": ({}, {"share": False}, [(2, 2, 1)]),
    "checkpointing, four heads, two key heads": (
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"checkpointing": True},
        [(4, 4, 1)],
    ),
    "LoRA, replicas": ({}, {"lora": True}, [(4, 2, 2)]),
    "critic": ({"cls": Qwen2ForTokenClassification, "num_labels": 1}, {"critic": True}, LAYOUTS[:1]),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_one_rank(tmp_path, case):
    """With rows longer than what a rank may run, and micro-batches without a row of some rank."""
    model, options, layouts = CASES[case]
    for ranks in assert_exact(save_tiny(tmp_path, **model), layouts, **options):
        assert len({n for n, _ in ranks}) == 1 and sum(empty for _, empty in ranks) > 0
