"""Model FLOPs of a whole step at its limits, before a model loads (lib/model/flops.py says what counts)."""

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from lib.data import prefix_tree
from lib.data_proto import DataProto
from lib.model.flops import Flops, flops_of, update_flops
from planner.memory import meta_model


class StepFlops(NamedTuple):
    """FLOPs of a step over all ranks, without the rollout."""

    update: float
    log_probs: float  # forward passes before the update: old log-probs, the reference's, the critic's values
    recomputed: float  # what gradient checkpointing computes twice


def estimate_flops(
    model: str,
    *,
    prompts: int,
    group_size: int,
    max_prompt_length: int,
    max_response_length: int,
    update_epochs: int,
    log_prob_passes: int,
    share_prompts: bool = True,
    gradient_checkpointing: bool = False,
    critic_model: str = "",
    **of_model: Any,
) -> StepFlops:
    """Of a step in which each prompt (without images) and each response is as long as it may be. Models: as in
    `meta_model`, which also takes of_model, such as `lora_rank`. update_epochs: passes of the update over the step's
    rows. log_prob_passes: forward passes with the policy or its reference before the update."""
    mask = torch.ones(group_size, max_prompt_length + max_response_length, dtype=torch.long)
    responses = mask[:, max_prompt_length:]
    tensors = {"input_ids": mask, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
    group = DataProto.from_dict(tensors | {"response_mask": responses})
    tree = prefix_tree(group, share=share_prompts)

    def of_step(flops: Flops) -> float:
        return prompts * update_flops(flops, group, tree)

    update = log_probs = recomputed = 0.0
    policy = AutoModelForCausalLM, model, "--model", log_prob_passes
    critic = AutoModelForTokenClassification, critic_model, "--critic-model", 1
    for auto_class, path, flag, passes in (policy, critic):
        if path:
            network = meta_model(auto_class, path, flag, torch.bfloat16, **of_model)
            trained, frozen = flops_of(network), flops_of(network.requires_grad_(False))
            forward = Flops(frozen.token / 2, frozen.prediction / 2, frozen.pair / 3)
            update += of_step(trained) * update_epochs
            log_probs += of_step(forward) * passes
            if gradient_checkpointing:
                recomputed += of_step(forward._replace(prediction=0.0)) * update_epochs
    return StepFlops(update, log_probs, recomputed)
