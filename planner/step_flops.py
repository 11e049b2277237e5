"""Model FLOPs of a whole step at its limits, before a model loads (lib/model/flops.py says what counts)."""

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from lib.args import ScriptArgs, step_sizes, training_ranks
from lib.data import prefix_tree
from lib.data_proto import DataProto
from lib.distributed import ESTIMATED
from lib.model.flops import Flops, flops_of, update_flops
from lib.setup import get_compute_dtype, read_columns, rollout_correction
from planner.meta import meta_model


class StepFlops(NamedTuple):
    """FLOPs of a step over all ranks, without the rollout."""

    update: float
    log_probs: float  # forward passes before the update: old log-probs, the reference's, the critic's values
    recomputed: float  # what gradient checkpointing computes twice


def flops_of_step(args: ScriptArgs, response_length: int | None = None) -> StepFlops:
    """Of a step on GPUs in which each prompt (without images) is as long as it may be, and each response has
    response_length tokens; None: as many as it may have."""
    P, G, model = args.data.max_prompt_length, args.group_size, args.model
    mask = torch.ones(G, P + (response_length or args.rollout.max_response_length), dtype=torch.long)
    tensors = {"input_ids": mask, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
    group = DataProto.from_dict(tensors | {"response_mask": mask[:, P:]})
    tree = prefix_tree(group, share=model.shares_prompts)

    def of_step(flops: Flops) -> float:
        return args.prompts_per_step * update_flops(flops, group, tree)

    update = log_probs = recomputed = 0.0
    options = models_of(args)
    policy = AutoModelForCausalLM, options.pop("model"), "--model", log_prob_passes(args)
    critic = AutoModelForTokenClassification, options.pop("critic_model"), "--critic-model", 1
    for auto_class, path, flag, passes in (policy, critic):
        if path:
            network = meta_model(auto_class, path, flag, torch.bfloat16, **options)
            trained, frozen = flops_of(network), flops_of(network.requires_grad_(False))
            forward = Flops(frozen.token / 2, frozen.prediction / 2, frozen.pair / 3)
            update += of_step(trained) * args.update_epochs
            log_probs += of_step(forward) * passes
            recomputed += model.recomputed * of_step(forward._replace(prediction=0.0)) * args.update_epochs
    return StepFlops(update, log_probs, recomputed)


def log_prob_passes(args: ScriptArgs) -> int:
    """Forward passes with the policy or its reference before the update, on GPUs."""
    correction = rollout_correction(args, get_compute_dtype(args.model.compute_dtype, ESTIMATED))
    updates = step_sizes(args, training_ranks(args)).updates_per_step
    _, needed = read_columns(args, correction, updates)
    return bool(needed) + (args.kl_coef > 0)


def models_of(args: ScriptArgs) -> dict[str, Any]:
    """The policy, the critic, and what of them trains."""
    model = args.model
    return {
        "model": model.model,
        "critic_model": "" if args.critic_model is None else args.critic_model or model.model,
        "lora_rank": model.lora_rank,
        "lora_target_modules": model.lora_target_modules,
        "freeze_pattern": model.freeze,
        "trust_remote_code": model.trust_remote_code,
    }
