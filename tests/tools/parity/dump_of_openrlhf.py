"""Writes openrlhf.safetensors for tools/parity.py, from OpenRLHF 0.11: import this file before the training.

For the advantages add rewards and group. Settings that are translated: advantage_estimator (group_norm, dr_grpo, rloo),
eps_clip_low, eps_clip_high, dual_clip, policy_loss_type, token_level_loss."""

import torch
from openrlhf.models.loss import PolicyLoss
from safetensors.torch import save_file

real = PolicyLoss.forward


def forward(self, log_probs, old_log_probs, advantages, action_mask=None, *args, **kwargs):
    results = real(self, log_probs, old_log_probs, advantages, action_mask, *args, **kwargs)
    [gradient] = torch.autograd.grad(results[0], log_probs, retain_graph=True)
    dump = {"action_log_probs": log_probs, "old_action_log_probs": old_log_probs, "advantages": advantages}
    dump |= {"action_mask": action_mask, "loss": results[0], "gradient": gradient, "ppo_kl": results[2]}
    save_file({k: x.detach().cpu().contiguous().clone() for k, x in dump.items()}, "openrlhf.safetensors")
    return results


PolicyLoss.forward = forward
