"""Writes trl.safetensors for tools/parity.py, from TRL 1.16: train with this class in place of GRPOTrainer.

Use one process and gradient_accumulation_steps=1. Settings that are translated: loss_type (all but vespo),
scale_rewards, epsilon, epsilon_high, delta, importance_sampling_level, beta, use_bias_correction_kl,
sapo_temperature_pos, sapo_temperature_neg, max_completion_length, eos_token_id."""

import torch
from safetensors.torch import save_file
from trl import GRPOTrainer


class Dumping(GRPOTrainer):
    def _calculate_rewards(self, *args):
        self.rewards = super()._calculate_rewards(*args)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)  # TRL then shuffles all its columns alike
        group = torch.arange(len(self.rewards), device=self.rewards.device) // self.num_generations
        return batch | {"rewards": (self.rewards * self.reward_weights.to(self.rewards)).nansum(1), "group": group}

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.result

    def _compute_loss(self, model, inputs):
        loss, logps = super()._compute_loss(model, inputs), self.result[0]
        [gradient] = torch.autograd.grad(loss, logps, retain_graph=True)
        names = (
            "completion_mask",
            "advantages",
            "old_per_token_logps",
            "ref_per_token_logps",
            "num_items_in_batch",
            "rewards",
            "group",
        )
        dump = {name: inputs[name] for name in names if inputs.get(name) is not None}
        dump |= {"per_token_logps": logps, "loss": loss, "gradient": gradient}
        save_file(
            {k: torch.as_tensor(x).detach().cpu().contiguous().clone() for k, x in dump.items()}, "trl.safetensors"
        )
        return loss
