"""The rollouts of a run, step by step: takes prompts from the loader, samples, and spreads rows over the ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lib import InputError
from lib.args import Sizes
from lib.data import PromptLoader, balance_groups, exchange_groups
from lib.data_proto import DataProto
from lib.distributed import Metric, World, timed
from lib.model import Policy
from lib.rollout.engine import RolloutEngine, Sampling, request_seeds, rollouts_ahead, staleness_metrics
from lib.rollout.hf_engine import HFEngine
from lib.rollout.own_servers import OwnServers, order_servers
from lib.rollout.replay import Tape
from lib.rollout.served_engine import ServedEngine
from lib.rollout.vllm_engine import VLLMEngine, check_vllm_kwargs
from lib.rollout.weight_sync import sync_weights


def make_engine(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: Path,
    max_length: int,
    dtype: torch.dtype,
    gpu_memory: float,
    ranks: int = 1,
    vllm_kwargs: Mapping[str, Any] | None = None,
    own: OwnServers | None = None,
) -> RolloutEngine:
    """The engine called `name`: "hf", "vllm", the URL of a server, or several URLs with commas between. ranks: how many
    neighbouring ranks share one vLLM engine. vllm_kwargs: its further settings. own: what "vllm" means if given."""
    if name == "hf":
        return HFEngine(model, tokenizer)
    settings: dict[str, Any] = {"folder": folder, "max_length": max_length, "dtype": dtype}
    if own is not None:
        order_servers(own, model, tokenizer, **settings, gpu_memory=gpu_memory, ranks=ranks, more=vllm_kwargs or {})
        return ServedEngine(",".join(own.urls()), model, tokenizer, **settings)
    if name != "vllm":
        return ServedEngine(name, model, tokenizer, **settings)
    return VLLMEngine(model, tokenizer, **settings, gpu_memory=gpu_memory, ranks=ranks, more=vllm_kwargs or {})


def check_engine_import(name: str, vllm_kwargs: Mapping[str, Any] | None = None) -> None:
    """Raises InputError if the engine's package cannot be imported, or takes no such settings. Call it before a model
    loads."""
    if name == "vllm":
        try:
            from vllm import EngineArgs
        except ImportError as error:
            raise InputError(
                f"--rollout-engine vllm: vLLM cannot be imported ({error}); use --rollout-engine hf"
            ) from error
        check_vllm_kwargs(vllm_kwargs or {}, [field.name for field in fields(EngineArgs)])


class Rollouts:
    """Samples with `generate(prompts, sampling, seeds)`: the engine's, or generate_multi_turn. Seeds and uids count
    prompts over all ranks, so that a run samples the same on any number of ranks.

    steps: those still to come. sync_tolerance: in nats, see sync_weights.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        generate: Callable,
        loader: PromptLoader | None,
        sampling: Sampling,
        *,
        world: World,
        sizes: Sizes,
        seed: int,
        steps: range,
        async_level: int,
        sync_tolerance: float,
        tape: Tape,
    ):
        self.engine, self._generate, self.loader, self.sampling = engine, generate, loader, sampling
        self.world, self.sizes, self.seed, self.async_level = world, sizes, seed, async_level
        self.sync_tolerance, self.steps, self.tape = sync_tolerance, steps, tape
        self._prompts: Iterator | None = None
        level = 0 if tape.replays else async_level
        self._ahead = rollouts_ahead(engine, generate, self._requests(), sampling, level, tape)
        self._state = {} if loader is None else loader.state_dict()

    @timed("weight_sync")
    def sync(self, actor: Policy, version: int) -> dict[str, Any]:
        """Gives the engine the policy's weights after `version` steps, and checks that it has them."""

        def proved() -> DataProto:
            metrics = sync_weights(self.engine, actor.module, version, tolerance=self.sync_tolerance)
            return DataProto(meta_info=dict(metrics))

        return self.tape.take("sync", proved).meta_info

    @timed("rollout")
    def next(self) -> tuple[DataProto, DataProto]:
        """(responses of the next step (B,), group_size for each prompt; its prompts). Both are this rank's."""
        batch, (prompts, self._state) = next(self._ahead)
        return batch, prompts

    @timed("rollout")
    def sample(self, step: int, number: int) -> DataProto:
        """The responses of batch `number` of a step that samples several."""
        _, batch, seeds = self._batch_of(step, number * self.sizes.local_prompts * self.world.size)
        self._state = self.loader.state_dict()
        return self._sampled(batch, self.sampling, seeds)

    def generate(
        self, prompts: DataProto, sampling: Sampling, step: int, numbers: list[int] | None = None
    ) -> DataProto:
        """One response to each prompt. step: -1 for validation. numbers: the prompts' numbers, counted over all ranks;
        None: those of a training step."""
        return self._sampled(prompts, sampling, request_seeds(self.seed, step, numbers or self._numbers(0)))

    @timed("rollout")
    def balanced(self, actor: Policy, batch: DataProto, *others: DataProto) -> tuple:
        """(batch, *others, metrics), after ranks have exchanged groups so that all have about as much to compute. Frees
        the engine's memory. others: batches with one row per group, or group_size rows."""
        self.engine.sleep()
        plan, metrics = balance_groups(
            batch,
            actor.module,
            self.sizes.group_size,
            self.sizes.num_mini_batches,
            share_prompts=actor.module.share_prompts,
        )
        return *(exchange_groups(part, plan) for part in (batch, *others)), metrics

    def all_gather(self, batch: DataProto) -> DataProto:
        """The rows of all ranks, in the order of their prompts' numbers: the same on any number of ranks."""
        size, group_size = self.world.size, self.sizes.group_size
        by_number = np.arange(len(batch) * size).reshape(size, -1, group_size).swapaxes(0, 1).ravel()
        return batch.all_gather()[by_number]

    def own_rows(self, whole: DataProto) -> DataProto:
        """This rank's groups, out of the rows of all ranks."""
        groups = np.arange(len(whole)).reshape(-1, self.sizes.group_size)
        return whole[groups[self.world.rank :: self.world.size].ravel()]

    def metrics(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """Epochs done and, for rollouts sampled ahead, how many weight versions old the tokens are."""
        metrics: dict[str, Metric] = {"training/epoch": self._state["position"] / len(self.loader.dataset)}
        if self.async_level:
            metrics |= staleness_metrics(batch.batch["weight_versions"], step - 1, self.async_level)
        return metrics

    def close(self) -> None:
        self.engine.close()

    def state_dict(self) -> dict:
        return self._state

    def load_state_dict(self, state: dict) -> None:
        if self.loader is not None:  # there is none with --val-only
            self.loader.load_state_dict(state)
            self._state = self.loader.state_dict()

    def _sampled(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        return self.tape.rollout(prompts, partial(self._generate, prompts, sampling, seeds))

    def _requests(self) -> Iterator[tuple]:
        for step in self.steps:
            prompts, batch, seeds = self._batch_of(step, 0)
            yield batch, seeds, (prompts, self.loader.state_dict())

    def _batch_of(self, step: int, first: int) -> tuple[DataProto, DataProto, list[int]]:
        """(prompts, the prompts repeated group_size times, seeds). first: the number of the batch's first prompt."""
        self._prompts = self._prompts or iter(self.loader)
        prompts = DataProto.from_single_dict(next(self._prompts)).to(self.world.device)
        numbers = self._numbers(first)
        prompts.non_tensor_batch["uid"] = np.array([f"{step}-{n}" for n in numbers], dtype=object)
        group_size = self.sizes.group_size
        rows = [n * group_size + sample for n in numbers for sample in range(group_size)]
        return prompts, prompts.repeat(group_size, interleave=True), request_seeds(self.seed, step, rows)

    def _numbers(self, first: int) -> list[int]:
        return [first + self.world.rank + self.world.size * i for i in range(self.sizes.local_prompts)]
