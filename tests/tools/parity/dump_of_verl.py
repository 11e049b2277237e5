"""Writes verl.safetensors for tools/parity.py, from verl 0.9.1: load this file with
actor_rollout_ref.model.external_lib, and set actor.policy_loss.loss_mode=dump (docs/diagnostics.md)."""

import torch
from safetensors.torch import save_file
from verl.trainer.ppo import core_algos


@core_algos.register_policy_loss("dump")
def dump(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    inputs = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
    }
    loss, metrics = core_algos.get_policy_loss_fn("vanilla")(**inputs, loss_agg_mode=loss_agg_mode, config=config)
    [gradient] = torch.autograd.grad(loss, log_prob, retain_graph=True)
    results = {"loss": loss, "gradient": gradient, "ppo_kl": torch.tensor(metrics["actor/ppo_kl"])}
    inputs["old_log_probs"] = inputs.pop("old_log_prob")
    save_file({k: x.detach().cpu().contiguous().clone() for k, x in (inputs | results).items()}, "verl.safetensors")
    return loss, metrics
