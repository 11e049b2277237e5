"""Models, their optimizers and schedules."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lib import model as models
from lib.args import ModelArgs, OptimizerArgs, ScriptArgs, ShardArgs, Sizes
from lib.distributed import (
    World,
    make_mesh,
    make_row_group,
    shard_model,
    trainable_parameters,
)
from lib.model import APART, Critic, ForwardConfig, LossFlags, Policy, Reference, UpdateChecks
from lib.seeds import set_seed
from lib.setup.algorithm import get_attention, get_compute_dtype

USUAL_LR = {"full fine-tuning": (1e-7, 3e-5), "LoRA": (2e-6, 1e-3)}  # of AdamW in RL (docs/defaults.md)
SMALLEST = 10**8  # parameters of a model for which these are usual

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass
class ModelFactory:
    """How the models of a run are loaded, split over ranks and run. `make_model_factory` is a collective."""

    model: ModelArgs
    shard: ShardArgs
    optimizer: OptimizerArgs
    world: World
    mesh: DeviceMesh
    forward: ForwardConfig
    updates_per_step: int
    seed: int
    loss: LossFlags

    def place(self, module: PreTrainedModel, name: str) -> PreTrainedModel:
        if self.model.compile:
            models.compile_layers(module)
        if self.model.use_liger_kernel:
            models.use_liger_kernel(module, self.world.device)
        self.forward.modules.append(module)
        return shard_model(module, self.mesh, self.forward.compute_dtype, cpu_offload=name in self.shard.cpu_offload)

    def trains(self, module: PreTrainedModel) -> PreTrainedModel:
        """The model with only these weights trainable: LoRA adapters, all, or all but those of --freeze."""
        if self.model.lora_rank:
            settings: dict[str, Any] = {"rank": self.model.lora_rank, "alpha": self.model.lora_alpha}
            return models.add_lora(module, **settings, target_modules=self.model.lora_target_modules, seed=self.seed)
        return models.freeze(module, self.model.freeze) if self.model.freeze else module

    def trained(
        self, module: PreTrainedModel, name: str, make_optimizer: MakeOptimizer, total_steps: int
    ) -> dict[str, Any]:
        """The fields of a TrainedModel but for its name."""
        module = self.place(self.trains(module), name)
        optimizer = make_optimizer(trainable_parameters(module))
        parameters = sum(p.numel() for p in module.parameters())  # of all ranks
        note = lr_note(name, optimizer, "LoRA" if self.model.lora_rank else "full fine-tuning", parameters)
        if note and self.world.rank == 0:
            print(note, flush=True)
        factor = partial(lr_factor, self.optimizer, self.updates_per_step, total_steps)
        return {
            "module": module,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
            "world": self.world,
            "forward": self.forward,
            "max_grad_norm": self.optimizer.max_grad_norm,
            "reduce_each_micro_batch": self.shard.reduce_each_micro_batch,
        }

    def options(self, path: str, trainable: bool = True) -> dict[str, Any]:
        dtype, attention = self.forward.compute_dtype, self.model.attn_implementation
        trust = {"trust_remote_code": self.model.trust_remote_code}
        return {
            "dtype": torch.float32 if trainable and not self.model.lora_rank else dtype,  # fp32 master weights
            "attn_implementation": get_attention(attention, dtype, self.world.device, path, **trust),
            "share_prompts": self.model.share_prompts,
            "gradient_checkpointing": self.model.gradient_checkpointing and trainable,
            "offload_activations": "activations" in self.shard.cpu_offload,
            "on_meta": True,
            **trust,
        }


def make_model_factory(args: ScriptArgs, world: World, sizes: Sizes) -> ModelFactory:
    model, shard, rollout, seed = args.model, args.shard, args.rollout, args.run.seed
    torch.manual_seed(seed + world.rank)
    set_seed(seed + world.rank)
    use_cores(shard, world.device)
    mesh = make_mesh(world, shard.dp_replicate_size, shard.tensor_parallel_size)
    row_group = make_row_group(world, mesh, shard.sequence_parallel_size)
    dtype = get_compute_dtype(model.compute_dtype, world.device)
    sampling = rollout.sampling()
    forward = ForwardConfig(args.optimizer.micro_batch_tokens, sampling, row_group, dtype, model.routing_replay)
    plain = args.loss == "vanilla" and not (
        args.kl_coef and (args.kl_estimator or "").endswith("_unbiased")
    )  # no ratio x KL
    clip = (args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c) if plain else None
    apart = math.inf if args.run.replay else APART.get(dtype, math.inf)  # a replay may train other weights
    loss = LossFlags(args.loss_agg_mode, args.loss_scale_factor or rollout.max_response_length, clip, apart)
    return ModelFactory(model, shard, args.optimizer, world, mesh, forward, sizes.updates_per_step, seed, loss)


def use_cores(shard: ShardArgs, device: torch.device) -> None:
    """With --cpu-offload, AdamW runs on this rank's share of the cores; torchrun and vLLM leave it one thread."""
    if device.type != "cpu" and {"actor", "critic"} & set(shard.cpu_offload):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))


def load_policy(factory: ModelFactory, name: str, path: str, make_optimizer: MakeOptimizer, total_steps: int) -> Policy:
    """A model that samples and trains. name: the prefix of its metrics. total_steps: of the learning rate schedule."""
    module = models.load_model(path, **factory.options(path))
    trained = factory.trained(module, name, make_optimizer, total_steps)
    return Policy(name, **trained, checks=UpdateChecks(factory.loss))


def load_value_model(factory: ModelFactory, name: str, path: str, optimizer: MakeOptimizer, total_steps: int) -> Critic:
    """PPO's critic: the model at `path` with its value head, or a new one. The rest as in `load_policy`."""
    module = models.load_critic(path, **factory.options(path))
    return Critic(name, **factory.trained(module, name, optimizer, total_steps))


def load_reference(factory: ModelFactory, actor: Policy) -> Reference:
    """The start model, as the reference of the KL."""
    if factory.model.lora_rank:
        return Reference(actor.module, factory.forward)
    return load_frozen(factory, factory.model.model, "--model")


def load_frozen(factory: ModelFactory, path: str, flag: str) -> Reference:
    """A model that only computes log-probs, such as a reference or a teacher; --cpu-offload ref offloads all of these.
    flag: the flag that gave the path, for messages. Raises InputError."""
    trust = {"trust_remote_code": factory.model.trust_remote_code}
    models.check_sequence_parallel(path, factory.shard.sequence_parallel_size, flag=flag, **trust)
    models.check_tensor_parallel(path, factory.shard.tensor_parallel_size, flag=flag, **trust)
    module = models.load_model(path, flag=flag, **factory.options(path, trainable=False)).requires_grad_(False)
    return Reference(factory.place(module, "ref"), factory.forward)


def lr_note(name: str, optimizer: torch.optim.Optimizer, kind: str, parameters: int) -> str:
    """What to say of a learning rate that is unusual for this kind of training and a model of this size, or ""."""
    lr, (low, high) = optimizer.param_groups[0]["lr"], USUAL_LR[kind]
    if not isinstance(optimizer, torch.optim.AdamW) or parameters < SMALLEST or lr == 0 or low <= lr <= high:
        return ""
    usual = f"usual in {kind} of {parameters / 1e9:.2g} B parameters are {low:g} to {high:g} (docs/defaults.md)"
    return f"note: {name}: learning rate {lr:g}: {usual}"


def lr_factor(args: OptimizerArgs, updates_per_step: int, total_steps: int, update: int) -> float:
    """The factor of the learning rate at this optimizer update, counted from 0."""
    warmup, total = (steps * updates_per_step for steps in (args.warmup_steps, total_steps))
    if update < warmup:
        return (update + 1) / warmup
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[args.lr_schedule]
