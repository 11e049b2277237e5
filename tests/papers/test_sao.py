"""SAO: the mask on both sides of the ratio, by a loop in float64, and which weights of a critic are frozen."""

import re

import torch


def test_tokens_out_of_bounds_have_no_loss_and_no_gradient(module_of, assert_losses):
    module, g = module_of("sao"), torch.Generator().manual_seed(0)
    args = module.Args(clip_ratio_low=0.5, clip_ratio_high=1.5)
    new, old, advantages = torch.randn(3, 5, 8, generator=g, dtype=torch.float64)
    new.requires_grad_()
    losses, metrics = module.policy_loss(args, new, old, {"advantages": advantages})
    ratio = (new - old).exp()
    assert_losses(losses, new, lambda i, j: -advantages[i, j] * ratio[i, j] * (0.5 <= ratio[i, j] <= 2.5))
    masked = sum(not 0.5 <= x <= 2.5 for x in ratio.flatten().tolist())
    assert 5 < masked == metrics["actor/pg_clipfrac"].sum() < 35


def test_attention_is_frozen_and_nothing_else(module_of):
    frozen = ["model.layers.0.self_attn.q_proj.weight", "model.layers.11.self_attn.q_norm.weight"]
    frozen += ["model.layers.3.linear_attn.out_proj.weight", "transformer.h.0.attn.c_attn.weight"]
    frozen += ["transformer.h.0.self_attention.dense.weight"]
    trained = ["model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "score.weight"]
    trained += ["model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.experts.gate_up_proj"]
    pattern = module_of("sao").Args().critic_freeze
    assert [name for name in frozen + trained if re.fullmatch(pattern, name)] == frozen
