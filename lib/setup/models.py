"""Models, their optimizers and learning-rate schedules."""

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lib import model as models
from lib.args import OptimizerArgs, ScriptArgs, ShardArgs
from lib.distributed import COMPILED, World, make_mesh, make_row_group, shard_model, trainable_parameters
from lib.model import APART, Critic, ForwardConfig, LossFlags, Policy, Reference, UpdateChecks
from lib.sampling import set_seed
from lib.setup.needs import Needs, get_attention

USUAL_LR = {"full fine-tuning": (1e-7, 3e-5), "LoRA": (2e-6, 1e-3)}  # of AdamW in RL (docs/defaults.md)
SMALLEST = 10**8  # parameters of a model for which these are usual

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
T = TypeVar("T", Policy, Critic)
Schedule = Callable[[int], float]  # the factor of the learning rate at an optimizer update, counted from 0


class ModelFactory:
    """Loads the models of a run and splits them over the ranks. To make one is a collective; from then on the random
    numbers of each rank are its own."""

    def __init__(self, args: ScriptArgs, needs: Needs, world: World):
        self.world, self.seed = world, args.run.seed
        self.model, self.shard, self.max_grad_norm = args.model, args.shard, args.optimizer.max_grad_norm
        self.trust = {"trust_remote_code": args.model.trust_remote_code}
        torch.manual_seed(self.seed + world.rank)
        set_seed(self.seed + world.rank)
        use_cores(self.shard, world.device)
        self.mesh = make_mesh(world, self.shard.dp_replicate_size, self.shard.tensor_parallel_size)
        row_group = make_row_group(world, self.mesh, self.shard.sequence_parallel_size)
        sampling, tokens = args.rollout.sampling(), args.optimizer.micro_batch_limit
        self.forward = ForwardConfig(tokens, sampling, row_group, needs.dtype, self.model.routing_replay)
        kl_of_ratio = args.kl_coef and (args.kl_estimator or "").endswith("_unbiased")
        plain = args.loss == "vanilla" and not kl_of_ratio
        clip = (args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c) if plain else None
        apart = math.inf if args.run.replay else APART.get(needs.dtype, math.inf)  # a replay may train other weights
        self.loss = LossFlags(args.loss_agg_mode, needs.loss_scale_factor, clip, apart)
        self.zero1 = self.shard.chosen == "zero1"

    def policy(self, name: str, path: str, make_optimizer: MakeOptimizer, lr_schedule: Schedule) -> Policy:
        """A model that samples and trains. name: the prefix of its metrics."""
        module = models.load_model(path, **self._options(path))
        policy = self._trained(Policy, name, module, make_optimizer, lr_schedule)
        policy.checks = UpdateChecks(self.loss)
        return policy

    def critic(self, name: str, path: str, make_optimizer: MakeOptimizer, lr_schedule: Schedule) -> Critic:
        """PPO's critic: the model at `path` with its value head, or a new one. The rest as in `policy`."""
        module = models.load_critic(path, **self._options(path))
        return self._trained(Critic, name, module, make_optimizer, lr_schedule)

    def reference(self, actor: Policy) -> Reference:
        """The start model, as the reference of the KL."""
        if self.model.lora_rank:
            return Reference(actor.module, self.forward)
        return self.frozen(self.model.model, "--model")

    def frozen(self, path: str, flag: str) -> Reference:
        """A model that only computes log-probs, such as a reference or a teacher; --cpu-offload ref offloads all of
        these. flag: the flag that gave the path, for messages. Raises InputError."""
        models.check_sequence_parallel(path, self.shard.sequence_parallel_size, flag=flag, **self.trust)
        models.check_tensor_parallel(path, self.shard.tensor_parallel_size, flag=flag, **self.trust)
        module = models.load_model(path, flag=flag, **self._options(path, trainable=False)).requires_grad_(False)
        return Reference(self._placed(module, "ref"), self.forward)

    def reward_model(self, path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """(--reward-model, its tokenizer). Each rank runs its own rows."""
        dtype, offload = self.forward.compute_dtype, "reward_model" in self.shard.cpu_offload
        module, tokenizer = models.load_reward_model(path, dtype=dtype, on_meta=True, **self.trust)
        mesh = make_mesh(self.world, self.shard.dp_replicate_size)
        return shard_model(module, mesh, dtype, cpu_offload=offload, zero1=self.zero1), tokenizer

    def _options(self, path: str, trainable: bool = True) -> dict[str, Any]:
        """The keywords by which a model is loaded."""
        dtype, attention = self.forward.compute_dtype, self.model.attn_implementation
        return {
            "dtype": torch.float32 if trainable and not self.model.lora_rank else dtype,  # fp32 master weights
            "attn_implementation": get_attention(attention, dtype, self.world.device, path, **self.trust),
            "share_prompts": self.model.share_prompts,
            "gradient_checkpointing": self.model.recomputed if trainable else 0,
            "offload_activations": "activations" in self.shard.cpu_offload,
            "on_meta": True,
            **self.trust,
        }

    def _trained(
        self, kind: type[T], name: str, module: PreTrainedModel, make_optimizer: MakeOptimizer, lr_schedule: Schedule
    ) -> T:
        """Trains LoRA adapters, or all weights but --freeze's."""
        if self.model.lora_rank:
            settings: dict[str, Any] = {"rank": self.model.lora_rank, "alpha": self.model.lora_alpha}
            settings |= {"target_modules": self.model.lora_target_modules, "seed": self.seed}
            module = models.add_lora(module, **settings)
        elif self.model.freeze:
            module = models.freeze(module, self.model.freeze)
        module = self._placed(module, name)
        optimizer = make_optimizer(trainable_parameters(module))
        parameters = sum(p.numel() for p in module.parameters())  # of all ranks
        note = lr_note(name, optimizer, "LoRA" if self.model.lora_rank else "full fine-tuning", parameters)
        if note and self.world.rank == 0:
            print(note, flush=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_schedule)
        offloaded = "optimizer" in self.shard.cpu_offload and name not in self.shard.cpu_offload
        update = self.max_grad_norm, self.shard.reduce_each_micro_batch, offloaded
        return kind(name, module, optimizer, scheduler, self.world, self.forward, *update)

    def _placed(self, module: PreTrainedModel, name: str) -> PreTrainedModel:
        """The model with fast kernels, split over the ranks."""
        if self.model.compile:
            models.compile_layers(module)
        self.forward.modules.append(module)
        how = {"cpu_offload": name in self.shard.cpu_offload, "zero1": self.zero1}
        shard_model(module, self.mesh, self.forward.compute_dtype, **how)
        fused = self.model.fuses_layers and self.shard.tensor_parallel_size == 1
        if fused and self.world.device.type in COMPILED:
            models.fuse_layers(module)
        return module


def use_cores(shard: ShardArgs, device: torch.device) -> None:
    """With --cpu-offload, AdamW runs on this rank's share of the cores; torchrun and vLLM leave it one thread."""
    if device.type != "cpu" and {"actor", "critic"} & set(shard.cpu_offload):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))


def lr_note(name: str, optimizer: torch.optim.Optimizer, kind: str, parameters: int) -> str:
    """What to say of a learning rate that is unusual for this kind of training and a model of this size, or ""."""
    lr, (low, high) = optimizer.param_groups[0]["lr"], USUAL_LR[kind]
    if not isinstance(optimizer, torch.optim.AdamW) or parameters < SMALLEST or lr == 0 or low <= lr <= high:
        return ""
    usual = f"usual in {kind} of {parameters / 1e9:.2g} B parameters are {low:g} to {high:g} (docs/defaults.md)"
    return f"note: {name}: learning rate {lr:g}: {usual}"


def lr_factor(args: OptimizerArgs, updates_per_step: int, update: int, *, total_steps: int) -> float:
    """The factor of the learning rate at this optimizer update, counted from 0."""
    warmup, total = (steps * updates_per_step for steps in (args.warmup_steps, total_steps))
    if update < warmup:
        return (update + 1) / warmup
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[args.lr_schedule]
