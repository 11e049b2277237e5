"""The models of a run: policy and PPO's critic, each with its optimizer and schedule, and the frozen reference."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lib import InputError, is_first_on_node
from lib.data import prepare_dynamic_batch
from lib.data_proto import DataProto
from lib.distributed import Mean, Metric, RowGroup, Sum, World, all_reduce_max, fsdp_modules, global_counts, timed
from lib.distributed.compute_copy import pending_gradients, reduce_gradients, refresh_weights
from lib.distributed.host_state import HostState
from lib.distributed.sharding import (
    clip_grad_norm,
    compute_device,
    full_tensor,
    set_gradient_sync,
    trainable_parameters,
)
from lib.model.attention import layout, use_packed_sdpa
from lib.model.flops import UpdateFlops
from lib.model.load import without_adapters
from lib.model.log_probs import Signal, batched_log_probs, check_rows, logits_are_a_plain_product, response_log_probs
from lib.model.packing import of_responses
from lib.model.routing import ROUTES, RoutingMetrics, routes_column
from lib.model.update_checks import UpdateChecks
from lib.model.values import batched_values, response_values
from lib.sampling import Sampling


@dataclass
class ForwardConfig:
    """How rows go through a model."""

    micro_batch_tokens: int
    sampling: Sampling  # the engine's: the loss takes the distribution that was sampled from
    row_group: RowGroup | None  # ranks that run their rows together
    compute_dtype: torch.dtype
    routing_replay: Literal["none", "R2", "R3"] = "none"
    modules: list[PreTrainedModel] = field(default_factory=list)
    """all that go this way: they change their attention together"""


@dataclass
class LossScale:
    """The loss scale of float16, in which small gradients would be 0 (arXiv 1710.03740, 3.2). It halves at a gradient
    that is not finite, and doubles after `interval` updates without one. torch.amp.GradScaler would decide by its own
    rank's shards; all ranks must agree."""

    value: float = 2.0**16
    interval: int = 2000
    updates: int = 0  # since it changed

    def update(self, finite: bool) -> None:
        self.updates += 1
        if not finite or self.updates == self.interval:
            self.value, self.updates = self.value * (2 if finite else 0.5), 0

    def state_dict(self) -> dict:
        return {"value": self.value, "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.value, self.updates = state["value"], state["updates"]


@dataclass
class TrainedModel:
    """A model, its optimizer and its schedule. Policy and Critic below add their forwards."""

    name: str
    module: PreTrainedModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    world: World
    forward: ForwardConfig
    max_grad_norm: float
    reduce_each_micro_batch: bool
    offload_optimizer: bool = False  # its state is in CPU memory, but for its step
    checks: UpdateChecks = field(default_factory=UpdateChecks)
    trained_mask: ClassVar[str] = "loss_mask"  # the column of the tokens that its loss sums

    def __post_init__(self):
        self.parameters = trainable_parameters(self.module)
        self.loss_scale = LossScale() if self.forward.compute_dtype == torch.float16 else None
        self._masks: list[torch.Tensor] = []  # of the mini-batch; none: a script with its own loop
        self.computed = UpdateFlops(self.module)
        self.routing = RoutingMetrics() if getattr(self.module, "routers", ()) else None
        self.host_state = None
        if self.offload_optimizer:
            self.host_state = HostState(self.optimizer, compute_device(self.module))

    @property
    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def backward(self, loss: torch.Tensor) -> None:
        """loss: this rank's share of the sum over ranks. The factor undoes the average over ranks."""
        factor = self.world.size * (self.loss_scale.value if self.loss_scale else 1)
        (loss * factor).backward()
        reduce_gradients(self.module)
        self.checks.after_backward(factor)

    def begin_update(self, mini_batch: DataProto) -> None:
        """Before the first micro-batch."""
        if self.trained_mask in mini_batch.batch:
            self._masks.append(mini_batch.batch[self.trained_mask])
        done = next((state.get("step", 0) for state in self.optimizer.state.values()), 0)
        gradients = self._gradients + pending_gradients(self.module)
        self.checks.begin(len(mini_batch), gradients, done - self.scheduler.last_epoch, self.world.device)

    def step(self) -> dict[str, Metric]:
        """Clips the gradient and updates the weights, unless the gradient is not finite or no token was trained on:
        momentum and weight decay would move them. A collective."""
        metrics: dict[str, Metric] = {}
        if self.loss_scale:
            torch._foreach_div_(self._gradients, self.loss_scale.value)
            metrics[f"{self.name}/loss_scale"] = Mean(self.loss_scale.value, 1)
        grad_norm = clip_grad_norm(self.parameters, self.max_grad_norm)
        skipped = not math.isfinite(grad_norm)
        if self.loss_scale:
            self.loss_scale.update(not skipped)
        # counted at a gradient of 0 only: to read a number waits for the GPU
        if grad_norm == 0 and self._masks and not any(global_counts(mask)[0] for mask in self._masks):
            metrics["training/empty_updates"] = Sum(self.world.rank == 0)
        elif not skipped:
            (self.host_state or self.optimizer).step()
            refresh_weights(self.module)
        self._masks.clear()
        [lr, *_] = self.scheduler.get_last_lr()
        metrics |= self.checks.end() | self.computed.end()
        if self.routing:
            metrics |= self.routing.end()
        self.scheduler.step()
        self.optimizer.zero_grad()
        metrics |= {f"{self.name}/grad_norm": Mean(grad_norm, 1), f"{self.name}/lr": Mean(float(lr), 1)}
        metrics["training/skipped_updates"] = Sum(skipped and self.world.rank == 0)  # all ranks skip the same
        return metrics


class LanguageModel:
    """What policy and reference share."""

    module: PreTrainedModel
    forward: ForwardConfig
    checked = False

    @timed("log_probs")
    def check_rows(self, batch: DataProto) -> None:
        """Checks once, on the first batch, that a row's log-probs do not depend on its neighbours. Raises InputError if
        they do. If varlen is to blame, all models take packed_sdpa from here on."""
        if self.checked:
            return
        f, temperature = self.forward, self.forward.sampling.temperature
        check = partial(check_rows, self.module, batch, temperature, f.micro_batch_tokens, f.compute_dtype, f.row_group)
        try:
            check()
        except InputError as error:
            if self.module.config._attn_implementation != "varlen":
                raise
            for module in f.modules:
                use_packed_sdpa(module)
            check()
            if is_first_on_node():
                print(f"attention: packed_sdpa from here on, for with varlen {error}", flush=True)
        self.checked = True

    @timed("log_probs")
    def batched_signal(self, batch: DataProto, signal: Signal | None, *columns: str) -> list[torch.Tensor]:
        """log_probs, entropy and the signal's results, as in `response_log_probs`, of the distribution that is not
        truncated, without gradients. A collective."""
        f = self.forward
        options: dict[str, Any] = {"row_group": f.row_group, "signal": signal, "columns": columns}
        return batched_log_probs(self.module, batch, f.sampling.temperature, f.micro_batch_tokens, **options)


class Policy(LanguageModel, TrainedModel):
    sampled_since = 0  # version of the oldest weights that this step's samples may be of: rollouts.sync sets it

    def check_rows(self, batch: DataProto) -> None:
        """Also adds is_fresh (B,): rows not sampled by older weights, and without a given token that is trained. Their
        log-probs must agree with the engine's."""
        super().check_rows(without_routes(batch))
        t = batch.batch
        t["is_fresh"] = t["policy_version"] >= self.sampled_since
        if "given_mask" in t:
            t["is_fresh"] &= ~(t["given_mask"] * t["response_mask"]).any(1)
        self.checks.on_policy = True

    def log_probs(self, micro: DataProto, signal: Signal | None = None, *columns: str) -> tuple[torch.Tensor, ...]:
        """(log_probs, entropy), each (b, T), of the sampled tokens, with gradients. With a truncation (top_p, top_k
        or min_p) also which tokens it would not have kept. Then the signal's results, as in `response_log_probs`."""
        f, s = self.forward, self.forward.sampling
        options: dict[str, Any] = {"row_group": f.row_group, "signal": signal, "columns": columns}
        outputs = response_log_probs(self.module, micro, s.temperature, truncation=s.truncation, **options)
        self.computed.count(micro, self.forward.row_group)
        self.checks.watch(micro, *outputs[:2])
        if self.routing:
            self.routing.watch(self.module)
        return outputs

    @timed("log_probs")
    def batched_log_probs(self, batch: DataProto, names: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
        """old_log_probs, entropys and, if in `names`, squared_score, each (B, T), without gradients. With R2 the batch
        gets its column routed_experts. A collective."""
        f, s, squares = self.forward, self.forward.sampling, "squared_score" in names
        options: dict[str, Any] = {"sum_pi_squared": squares, "truncation": s.truncation, "row_group": f.row_group}
        routes: list[torch.Tensor] | None = [] if f.routing_replay == "R2" else None
        own = batch if routes is None else without_routes(batch)
        outputs = batched_log_probs(self.module, own, s.temperature, f.micro_batch_tokens, routes=routes, **options)
        if routes is not None:
            batch.non_tensor_batch[ROUTES] = routes_column(routes)
        columns = dict(zip(("old_log_probs", "entropys", "squared_score"), outputs))
        if squares:  # of log p, by the logits: |onehot - p|^2, 0 outside the response
            sums = columns["squared_score"]
            score = (1 - 2 * columns["old_log_probs"].double().exp() + sums).to(sums)
            columns["squared_score"] = score.where(batch.batch["response_mask"].bool(), 0)
        return columns


class Critic(TrainedModel):
    trained_mask = "valid_mask"

    def values(self, micro: DataProto) -> torch.Tensor:
        """Values (b, T), with gradients."""
        values = response_values(self.module, without_routes(micro), row_group=self.forward.row_group)
        self.computed.count(micro, self.forward.row_group)
        self.checks.watch(micro, values)
        return values

    @timed("log_probs")
    def batched_values(self, batch: DataProto) -> torch.Tensor:
        """Values (B, T), without gradients. A collective."""
        f = self.forward
        return batched_values(self.module, without_routes(batch), f.micro_batch_tokens, row_group=f.row_group)


SUMMED = 8  # weights that are looked at, or fewer


@dataclass
class Reference(LanguageModel):
    """A frozen model, or the policy without its LoRA adapters. Its distribution is not truncated."""

    module: PreTrainedModel
    forward: ForwardConfig
    _sums: torch.Tensor | None = None

    def batched_log_probs(self, batch: DataProto) -> torch.Tensor:
        """Log-probs (B, T), without gradients. A collective. Raises InputError if the weights have changed."""
        return self.batched_signal(batch, None)[0]

    @timed("log_probs")
    def batched_signal(self, batch: DataProto, signal: Signal | None, *columns: str) -> list[torch.Tensor]:
        self._check_weights()
        with without_adapters(self.module):
            return super().batched_signal(without_routes(batch), signal, *columns)

    @torch.no_grad()
    def hidden_states(self, micro: DataProto) -> torch.Tensor:
        """What this model's head multiplies, (b, T, D), of a micro-batch. A collective."""
        forward = lambda inputs, select, _: (self.module.token_hidden_states(inputs, select),)  # noqa: E731
        with without_adapters(self.module):
            [hidden] = of_responses(self.module, without_routes(micro), forward, row_group=self.forward.row_group)
        for module in fsdp_modules(self.module):
            module.reshard()
        return hidden

    @torch.no_grad()
    def compared(self, divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Signal:
        """The signal divergence(log_p, log_q) over the whole vocabulary, with this model's log_q (n, V), such as
        `forward_kl`. Its column is `hidden_states`. It holds a copy of the head, (V, D). A collective."""
        if not logits_are_a_plain_product(self.module):
            raise InputError(f"{type(self.module).__name__} changes its logits: take its top-k")
        head = full_tensor(self.module.get_output_embeddings().weight).to(compute_device(self.module), copy=True)
        temperature = self.forward.sampling.temperature

        def signal(log_p: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.mm(hidden, head.to(hidden).T).to(log_p)
            if logits.shape != log_p.shape:
                sizes = f"{logits.shape[1]} tokens, the policy's {log_p.shape[1]}"
                raise InputError(f"the teacher's head has {sizes}: take its top-k below the tokenizer's size")
            return divergence(log_p, logits.div_(temperature).log_softmax(-1))

        return signal

    @torch.no_grad()
    def _check_weights(self) -> None:
        """By the sums of this rank's shards of some weights."""
        weights = [w for name, w in self.module.state_dict().items() if ".lora_" not in name]
        shards = [w.to_local() if isinstance(w, DTensor) else w for w in weights[:: len(weights) // SUMMED + 1]]
        sums = torch.stack([shard.double().sum() for shard in shards])
        if self._sums is None:
            self._sums = sums
        if all_reduce_max(int(not sums.equal(self._sums)), sums.device):
            raise InputError("the reference's weights have changed: it must be a model that no optimizer trains")


def without_routes(batch: DataProto) -> DataProto:
    """For a model that chooses its experts itself."""
    if ROUTES not in batch.non_tensor_batch:
        return batch
    return batch.select(non_tensor_batch_keys=[name for name in batch.non_tensor_batch if name != ROUTES])


def micro_batches(mini_batch: DataProto, *models: TrainedModel) -> Iterator[DataProto]:
    """Micro-batches, equally many on every rank. Their gradients add up, and are reduced over ranks after the last one
    (with reduce_each_micro_batch, after each)."""
    for model in models:
        model.begin_update(mini_batch)
    first, modules = models[0], [model.module for model in models]
    f = first.forward
    micros, _ = prepare_dynamic_batch(mini_batch, f.micro_batch_tokens, row_group=f.row_group, **layout(*modules))
    for i, micro in enumerate(micros):
        for module in modules:
            set_gradient_sync(module, first.reduce_each_micro_batch or i == len(micros) - 1)
        yield micro
