"""Writes verl.safetensors for tools/parity.py, from verl 0.9.1: load this file with
actor_rollout_ref.model.external_lib, and set actor.policy_loss.loss_mode=dump.

For the advantages, dump responses, response_mask, token_level_rewards and advantages of the DataProto after
compute_advantage, and group by uid. Settings that are translated: adv_estimator (grpo, rloo, opo),
norm_adv_by_std_in_grpo, loss_mode (vanilla, gspo, cispo, gpg), clip_ratio, clip_ratio_low, clip_ratio_high,
clip_ratio_c, loss_agg_mode, loss_scale_factor, use_kl_loss, kl_loss_coef, kl_loss_type, eos_token_id."""

import torch
from safetensors.torch import save_file
from verl.trainer.ppo import core_algos


@core_algos.register_policy_loss("dump")
def dump(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    inputs = {"old_log_prob": old_log_prob, "log_prob": log_prob}
    inputs |= {"advantages": advantages, "response_mask": response_mask}
    loss, metrics = core_algos.get_policy_loss_fn("vanilla")(**inputs, loss_agg_mode=loss_agg_mode, config=config)
    [gradient] = torch.autograd.grad(loss, log_prob, retain_graph=True)
    results = {"loss": loss, "gradient": gradient, "ppo_kl": torch.tensor(metrics["actor/ppo_kl"])}
    inputs["old_log_probs"] = inputs.pop("old_log_prob")
    save_file({k: x.detach().cpu().contiguous().clone() for k, x in (inputs | results).items()}, "verl.safetensors")
    return loss, metrics
