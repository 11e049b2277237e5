"""Estimates the memory that one GPU needs, from a model's config alone: no weights, no network.

    python -m tools.memory --model benchmarks/shapes/qwen2.5-7b.json --ranks 8 --gradient-checkpointing

A step passes through moments (prefill, forward, backward and so on). Each moment needs its own parts, and the peak is
the sum of the worst moment. There are N ranks and P parameters: P_l in the largest layer, P_r in FSDP's root group
(head and final norm, or the tied embedding). The compute dtype has c bytes (2 for bfloat16):

    weights           4 P / N: fp32 masters, which FSDP2 splits along each tensor's first dimension, rounded up
    Adam              8 P / N: two fp32 moments of what is trained
    gradients         4 P / N: fp32, from the backward pass to the optimizer's step. If only the last of several
                      micro-batches reduces them (set_gradient_sync), they are whole until then: 4 P
    gathered weights  forward c (P_r + 2 P_l): the root stays whole, and so do a layer and the buffer of the all-gather
                      before or after it; c 2 (P_r + embedding) at its start, c (P_r + P_l) in the head, also backward.
                      backward c (P_r + 2 P_l) + 4 P_l: a layer's parameters, the next one's all-gather buffer, and the
                      fp32 buffer that reduces the gradients of the one before (none where whole ones add up). At the
                      last layer the next one is the embedding, if it is not tied.
                      rollout (hf engine) c P. One rank needs no buffers
    activations       what autograd keeps of one micro-batch; of layers with gradient checkpointing, their inputs
    images            of a vision model: what autograd keeps of the tower, if it trains, for as many image tokens as
                      prompts have at most: a block of the tower is measured, the projector is a formula
    work              what operators need besides. log-probs: a layer's forward. loss: chunks of logits, and the
                      head's gradient in fp32. backward: a layer, recomputed if it is checkpointed, and its gradients.
                      rollout: four copies of (rows, vocabulary). optimizer: none, AdamW is fused. vision: a layer of
                      the tower and its gradients
    KV cache          rows x (prompt + response) x what a token keeps
    columns           of the batch (lib/columns.py), of the rows of all ranks, while advantages are computed
    vLLM              its share of the GPU, or what the weights and the KV cache of one row take, if that is more

Weights, Adam and gradients are exact. Activations and work are measured (planner/meta.py). HEADROOM is left for the
GPU's context, NCCL's buffers and memory that the allocator cannot use again. With LoRA only adapters have gradients and
Adam. What is offloaded counts in the moment "host", which is the host's memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from lib.distributed import BUCKET_BYTES, trainable_parameters
from lib.distributed.compute_copy import COLLECTIVE_BYTES
from lib.model.load import decoder_layers, fsdp_layer_classes
from planner.meta import TowerCosts, forward_peak, known_model, kv_bytes_per_token, update_costs

GIB = 2**30
HEADROOM = 0.1  # of the device
Parts = dict[str, int]  # part -> bytes on one rank
Moments = dict[str, Parts]
Models = dict[str, PreTrainedModel]


@dataclass(frozen=True)
class StepSettings:
    """What the memory of a step depends on. Models: Hugging Face ids, folders or config.json files."""

    model: str
    ranks: int  # that share the weights
    compute_dtype: torch.dtype
    micro_batch_tokens: int  # of one forward and backward; all count as response tokens
    rows: int  # responses that one rank samples at once
    max_prompt_length: int
    max_response_length: int
    mini_batch_rows: int = 0  # those of an update; 0: all
    rows_a_prompt: int = 1  # responses to a prompt that is computed once
    zero1: bool = False  # --sharding
    accumulation: Literal["none", "whole", "sharded"] = "whole"  # one micro-batch, or gradients of several
    entropy_in_loss: bool = True  # the loss has a gradient by the entropies
    recomputed: float = 0  # the share of the layers that the backward pass recomputes, the first ones
    lora_rank: int = 0
    lora_target_modules: str = "all-linear"
    freeze_pattern: str = ""
    use_liger_kernel: bool = False
    frozen_dtype: torch.dtype = torch.float32  # of LoRA's base, reference and reward model; what else is frozen is fp32
    reference: bool = False  # a frozen copy of the policy; with LoRA the base is the reference
    critic_model: str = ""
    reward_model: str = ""
    cpu_offload: bool = False  # weights, gradients and Adam, by FSDP2's CPUOffloadPolicy
    offload_optimizer: bool = False  # Adam, but for the parameters that it updates at a time
    offload_activations: bool = False  # those of an update, except one layer's
    on_servers: bool = False  # which sample in place of the ranks
    engine_bytes: int = 0  # of a vLLM engine that is awake; 0: the hf engine
    engine_ranks: int = 1  # over which vLLM splits the model
    scores_awake: bool = False  # the reward model runs while vLLM is awake
    gathered_bytes: int = 0  # of the columns of all ranks' rows
    trust_remote_code: bool = False

    @property
    def gathered_itemsize(self) -> int:
        """Bytes of a weight that FSDP2 gathers."""
        return 0 if self.zero1 else self.compute_dtype.itemsize

    @property
    def gradient_ranks(self) -> int:
        """Ranks that share the gradients of a backward pass before it ends."""
        return 1 if self.zero1 else self.ranks

    @property
    def prompt_share(self) -> float:
        """The tokens of a prompt for each of its responses."""
        return self.max_prompt_length / self.rows_a_prompt

    def micro_batch(self, rows: int, row_tokens: float) -> int:
        """Tokens of the largest micro-batch of so many rows."""
        return min(self.micro_batch_tokens, math.ceil(rows * row_tokens))

    @property
    def pass_tokens(self) -> int:
        return self.micro_batch(self.rows, self.prompt_share + self.max_response_length)

    @property
    def update_tokens(self) -> int:
        return self.micro_batch(self.mini_batch_rows or self.rows, self.prompt_share + self.max_response_length)

    @property
    def image_tokens(self) -> int:
        return self.micro_batch(self.rows, self.prompt_share)


def estimate_memory(step: StepSettings) -> Moments:
    """Bytes on each rank in each moment of a step. Raises InputError: there is no such config, or it is of another kind
    of model."""
    trained, frozen = models_of(step)
    actor, critic, scorer = trained[""], trained.get("critic "), frozen.get("reward model")
    held = _held_parts(step, trained, frozen)
    gradients, accumulated = _gradient_parts(step, trained)
    moments = _sampling(step, actor) | {"log-probs": _pass(step, actor)}
    if scorer is not None:
        moments["reward model"] = _pass(step, scorer)
        if step.scores_awake and "vLLM" in moments.get("rollout", {}):
            moments["reward model"]["vLLM"] = moments["rollout"]["vLLM"]
    if step.gathered_bytes:
        moments["advantages"] = {"columns": step.gathered_bytes}
    update, host = _update(step, actor, accumulated)
    moments |= update
    if critic is not None:
        moments["critic"], kept = _critic_update(step, critic, accumulated)
        if step.offload_activations:
            host["activations"] = max(host["activations"], kept)
    if step.cpu_offload:
        host |= held | gradients
        if step.accumulation != "whole":  # whole gradients add up on the device
            for parts in moments.values():
                for name in gradients:
                    parts.pop(name, None)
    else:
        moments["optimizer"] = dict(gradients)
        largest = max(p.numel() for model in trained.values() for p in model.parameters())
        if step.zero1 and step.ranks > 1:
            moments["optimizer"]["gathered weights"] = step.compute_dtype.itemsize * largest
            moments["reduction"] = _gradient_parts(replace(step, accumulation="whole"), trained)[1]
        if step.offload_optimizer:
            adam = {name: held.pop(name) for name in [*held] if name.endswith("Adam")}
            host |= adam
            moments["optimizer"]["Adam"] = 2 * (BUCKET_BYTES + 4 * largest // step.ranks)
            moments["resume"] = gradients | adam  # a checkpoint is loaded to the device first
        moments = {moment: held | parts for moment, parts in moments.items()}
    return moments | {"host": host} if host else moments


def models_of(step: StepSettings) -> tuple[Models, Models]:
    """The models that train, by what their parts' names begin with, and those that do not, by name."""
    build = partial(known_model, dtype=step.compute_dtype, trust_remote_code=step.trust_remote_code)
    train = partial(
        build,
        lora_rank=step.lora_rank,
        lora_target_modules=step.lora_target_modules,
        freeze_pattern=step.freeze_pattern,
        use_liger_kernel=step.use_liger_kernel,
    )
    trained: Models = {"": train(AutoModelForCausalLM, step.model, "--model")}
    if step.critic_model:
        trained["critic "] = train(AutoModelForTokenClassification, step.critic_model, "--critic-model")
    frozen: Models = {}
    if step.reference and not step.lora_rank:
        frozen["reference"] = trained[""]
    if step.reward_model:
        frozen["reward model"] = build(AutoModelForSequenceClassification, step.reward_model, "--reward-model")
    return trained, frozen


def _held_parts(step: StepSettings, trained: Models, frozen: Models) -> Parts:
    """From the first step to the last."""
    held: Parts = {}
    frozen_bytes, share_frozen = step.frozen_dtype.itemsize, 1 if step.zero1 else step.ranks
    is_copy = step.zero1 and (step.ranks > 1 or step.compute_dtype.itemsize != 4)
    for prefix, model in trained.items():
        parameters = trainable_parameters(model)
        trains = shard_numel(parameters, step.ranks)
        stays = shard_numel([p for p in model.parameters() if not p.requires_grad], share_frozen)
        held[f"{prefix}weights"] = 4 * trains + (frozen_bytes if step.lora_rank or step.zero1 else 4) * stays
        if is_copy:
            held[f"{prefix}copy"] = step.compute_dtype.itemsize * shard_numel(parameters, 1)
        held[f"{prefix}Adam"] = 8 * trains
    for name, model in frozen.items():
        held[name] = frozen_bytes * shard_numel(list(model.parameters()), share_frozen)
    return held


def _gradient_parts(step: StepSettings, trained: Models) -> tuple[Parts, Parts]:
    """(gradients when the optimizer steps, those that add up before the last micro-batch)."""
    parameters = {f"{prefix}gradients": trainable_parameters(model) for prefix, model in trained.items()}
    reduced = {name: 4 * shard_numel(own, step.ranks) for name, own in parameters.items()}
    whole = {name: 4 * shard_numel(own, 1) for name, own in parameters.items()}
    return reduced, {"none": {}, "whole": whole, "sharded": dict(reduced)}[step.accumulation]


def _sampling(step: StepSettings, actor: PreTrainedModel) -> Moments:
    c, cached = step.compute_dtype.itemsize, kv_bytes_per_token(actor)
    row_length = step.max_prompt_length + step.max_response_length
    weights = c * sum(p.numel() for p in actor.parameters())
    largest = max(p.numel() for p in actor.parameters())
    sync = (4 + c) * largest
    if step.on_servers:
        return {"weight sync": {"buckets": 3 * max(BUCKET_BYTES, c * largest), "weight sync": sync}}
    if step.engine_bytes:
        needed = (weights + row_length * cached) // step.engine_ranks
        return {"rollout": {"vLLM": max(step.engine_bytes, needed), "weight sync": sync}}
    prompts = step.rows * step.max_prompt_length  # tokens; in validation all prompts differ
    prefill = max(forward_peak(actor, prompts, with_head=False), TowerCosts.of(actor, prompts).work)
    vocabulary = actor.config.get_text_config().vocab_size
    sampling = step.rows * vocabulary * (c + 12)  # logits; in fp32: logits / temperature, their CDF and log-softmax
    caches = prompts * cached, step.rows * row_length * cached
    gathered = step.gathered_itemsize * sum(p.numel() for p in actor.parameters())
    return {
        "prefill": {"gathered weights": gathered, "KV cache": caches[0], "work": prefill},
        "rollout": {"gathered weights": gathered, "KV cache": caches[1], "work": sampling},
    }


def _pass(step: StepSettings, model: PreTrainedModel) -> Parts:
    """Of a forward pass without gradients: its worst moment."""
    c, ranks, tokens = step.gathered_itemsize, step.ranks, step.pass_tokens
    groups, tower = FSDPGroups.of(model), TowerCosts.of(model, step.image_tokens)
    layer = max(forward_peak(model, tokens, with_head=False), tower.work)
    at_start = {"gathered weights": groups.whole_at_start(c, ranks), "work": 0}
    in_layers = {"gathered weights": groups.whole_in_forward(c, ranks), "work": layer}
    in_head = {"gathered weights": groups.whole_in_head(c, ranks), "work": forward_peak(model, tokens)}
    return max(at_start, in_layers, in_head, key=lambda parts: sum(parts.values()))


def _update(step: StepSettings, actor: PreTrainedModel, accumulated: Parts) -> tuple[Moments, Parts]:
    """(moments of the policy's update, what is in the host's memory)."""
    c, groups, tokens = step.gathered_itemsize, FSDPGroups.of(actor), step.update_tokens
    costs = update_costs(actor, tokens, step.recomputed, step.entropy_in_loss)
    tower = TowerCosts.of(actor, step.image_tokens, step.recomputed > 0)
    of_a_layer, host = costs.of_a_layer, {}
    if step.offload_activations:
        host["activations"] = costs.kept + tower.kept
    elif tower.kept:
        accumulated = accumulated | {"images": tower.kept}
    begun = {"activations": of_a_layer if step.offload_activations else costs.kept} | accumulated
    # at the last layer: the other layers' activations are gone, and their gradients exist; the root's come last
    of_layers = [p for layer in decoder_layers(actor) for p in trainable_parameters(layer)]
    done = {"activations": of_a_layer, "work": costs.last_layer - of_a_layer}
    done |= {"gradients": 4 * shard_numel(of_layers, step.gradient_ranks)} | accumulated
    reduces = step.accumulation != "whole" and not step.zero1
    in_head = groups.whole_in_head(c, step.ranks)
    in_layers, in_last = (groups.whole_in_backward(c, step.ranks, reduces, last_layer=last) for last in (False, True))
    moments = {
        "loss": {"gathered weights": in_head, "work": costs.loss} | begun,
        "backward": {"gathered weights": in_layers, "work": costs.backward} | begun,
        "last layer": {"gathered weights": in_last} | done,
    }
    if step.zero1 and step.compute_dtype.itemsize < 4:  # in 16 bits and in 32, before they are added up
        new = step.compute_dtype.itemsize * sum(p.numel() for p in trainable_parameters(actor))
        for name in ("backward", "last layer"):
            moments[name]["new gradients"] = 3 * min(COLLECTIVE_BYTES, new)
    if tower.kept:  # the tower comes last
        moments["vision"] = moments["last layer"] | {"activations": 0, "work": tower.work}
    return moments, host


def _critic_update(step: StepSettings, critic: PreTrainedModel, accumulated: Parts) -> tuple[Parts, int]:
    """(its moment, its activations)."""
    groups, costs = FSDPGroups.of(critic), update_costs(critic, step.update_tokens, step.recomputed)
    tower = TowerCosts.of(critic, step.image_tokens, step.recomputed > 0)
    kept, reduces = costs.kept + tower.kept, step.accumulation != "whole" and not step.zero1
    parts = {
        "gathered weights": groups.whole_in_backward(step.gathered_itemsize, step.ranks, reduces),
        "work": max(costs.loss, costs.backward, costs.last_layer - costs.kept, tower.work),
        "activations": costs.of_a_layer if step.offload_activations else kept,
        "critic gradients": 4 * shard_numel(trainable_parameters(critic), step.gradient_ranks),
    }
    return parts | accumulated, kept


# ---- exact sizes: what is stored -----------------------------------------------------------------
def shard_numel(parameters: Sequence[torch.Tensor], ranks: int) -> int:
    """Elements on the first rank, which has the most: FSDP2 splits the first dimension into chunks of equal size."""
    return sum(-(-p.shape[0] // ranks) * p[0].numel() for p in parameters)


class FSDPGroups(NamedTuple):
    """The parameter counts of the FSDP groups that `shard_model` makes."""

    layer: int
    trained_layer: int
    root: int
    embedding: int  # 0 if tied: then it is in the root

    @classmethod
    def of(cls, model: PreTrainedModel) -> "FSDPGroups":
        classes = fsdp_layer_classes(model)
        layers = [list(layer.parameters()) for layer in model.modules() if type(layer).__name__ in classes]
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        own_embedding = 0 if head is not None and head.weight is embedding.weight else embedding.weight.numel()
        sizes = [sum(p.numel() for p in layer) for layer in layers]
        trained = [sum(p.numel() for p in layer if p.requires_grad) for layer in layers]
        root = sum(p.numel() for p in model.parameters()) - sum(sizes) - own_embedding
        return cls(max(sizes), max(trained), root, own_embedding)

    def whole_in_forward(self, c: int, ranks: int) -> int:
        return c * (self.root + (1 if ranks == 1 else 2) * self.layer)

    def whole_at_start(self, c: int, ranks: int) -> int:
        """The root and the embedding, and their all-gather buffers."""
        return c * (1 if ranks == 1 else 2) * (self.root + self.embedding)

    def whole_in_head(self, c: int, ranks: int) -> int:
        """The last layer's all-gather buffer lives on, and its next one comes with the head's backward."""
        return c * (self.root + (self.layer if ranks > 1 else 0))

    def whole_in_backward(self, c: int, ranks: int, reduces: bool, last_layer: bool = False) -> int:
        """reduces: whether this micro-batch's gradients are reduced at once, not added up whole."""
        gathered_next = self.embedding if last_layer else self.layer
        buffers = 0 if ranks == 1 else c * gathered_next + (4 * self.trained_layer if reduces else 0)
        return c * (self.root + self.layer) + buffers


# ---- what fits -----------------------------------------------------------------------------------
def worst_moment(moments: Moments) -> tuple[str, int]:
    """(name, bytes) of the moment that needs most of the GPU."""
    sums = {name: sum(parts.values()) for name, parts in moments.items() if name != "host"}
    return max(sums.items(), key=lambda item: item[1])


def fits(moments: Moments, device_bytes: int) -> bool:
    """True if the worst moment leaves HEADROOM of the device free."""
    return worst_moment(moments)[1] <= (1 - HEADROOM) * device_bytes


def table_line(name: str, sizes: Sequence[int | None]) -> str:
    return name.ljust(18) + "".join(f"{'-' if n is None else f'{n / GIB:.2f}':>12}" for n in sizes)


def memory_table(moments: Moments, device_bytes: int) -> str:
    """A table of GiB per part and moment, the sum of each moment, and whether the worst one fits the device."""
    names = dict.fromkeys(part for parts in moments.values() for part in parts)
    lines = ["GiB a GPU".ljust(18) + "".join(f"{name:>12}" for name in moments)]
    lines += [table_line(name, [parts.get(name) for parts in moments.values()]) for name in names]
    lines += [table_line("sum", [sum(parts.values()) for parts in moments.values()])]
    worst, size = worst_moment(moments)
    biggest = max(moments[worst], key=lambda part: moments[worst][part])
    verdict = "fits" if fits(moments, device_bytes) else "DOES NOT FIT"
    used = f"{size / GIB:.1f} of {device_bytes / GIB:.0f} GiB in stage {worst}, largest part {biggest}"
    lines += [f"{verdict}: {used}; {HEADROOM:.0%} must stay free"]
    return "\n".join(lines)
