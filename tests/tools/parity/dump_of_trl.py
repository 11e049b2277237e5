"""Writes trl.safetensors for tools/parity.py, from TRL 1.16: train with this class in place of GRPOTrainer.

Use one process and gradient_accumulation_steps=1. Settings that are translated: loss_type (all but vespo),
scale_rewards, epsilon, epsilon_high, delta, importance_sampling_level, beta, use_bias_correction_kl,
sapo_temperature_pos, sapo_temperature_neg, max_completion_length, eos_token_id."""

import torch
from safetensors.torch import save_file
from trl import GRPOTrainer

NAMES = {"completion_ids", "completion_mask", "advantages", "old_per_token_logps", "ref_per_token_logps"}
NAMES |= {"num_items_in_batch", "rewards", "group"}


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
        dump = {name: x for name, x in inputs.items() if name in NAMES and x is not None}
        dump |= {"per_token_logps": logps, "loss": loss, "gradient": gradient}
        dump = {name: torch.as_tensor(x).detach().cpu().contiguous().clone() for name, x in dump.items()}
        save_file(dump, "trl.safetensors")
        return loss
