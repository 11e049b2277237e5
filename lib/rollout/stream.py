"""The rollouts of a run, step by step: takes prompts from the loader, samples, and spreads rows over the ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import compress
from pathlib import Path
from pkgutil import resolve_name
from textwrap import shorten
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from lib import InputError
from lib.args import Sizes
from lib.cli.user_code import load_object
from lib.data import ROW, balance_groups, equal_widths, exchange_groups
from lib.data_proto import DataProto
from lib.distributed import Metric, World, timed
from lib.model import Policy
from lib.model.routing import ROUTES
from lib.rollout.async_rollouts import AsyncRollouts, Order, gather_groups, own_groups, staleness_metrics
from lib.rollout.engine import RolloutEngine, SteppedEngine, request_seeds
from lib.rollout.lora_sync import choose_lora_sync
from lib.rollout.replay import NoRecorder
from lib.rollout.weight_sync import image_probe, sync_weights
from lib.sampling import Sampling

if TYPE_CHECKING:
    from lib.rollout.managed_servers import ManagedServers
    from lib.rollout.server_engine import ServerEngine

ENGINES: dict[str, str] = {"hf": "lib.rollout.hf_engine:HFEngine", "vllm": "lib.rollout.vllm_engine:VLLMEngine"}
ENGINES["://"] = "lib.rollout.server_engine:ServerEngine"  # for any URL


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
    rows: int = 256,
    processor: ProcessorMixin | None = None,
    max_images: int = 0,
    vllm_kwargs: Mapping[str, Any] | None = None,
    lora_sync: str = "merged",
    returns_routes: bool = False,
    own: "ManagedServers | None" = None,
) -> RolloutEngine:
    """The engine called `name` (engine_class; several URLs have commas between). folder: of its files; it need not
    exist. max_length: tokens of prompt and response. dtype: that the trainer computes in. gpu_memory: share of the GPU
    for the engine. ranks: how many neighbouring ranks share one. rows: that a vLLM engine samples at a time.
    processor: of a vision model. max_images: of a prompt. vllm_kwargs: settings, `more` for the engine. lora_sync: for
    "vllm". returns_routes: whether rollouts have the column routed_experts. own: what "vllm" means."""
    probe = None if processor is None else image_probe(processor, tokenizer, model)
    if probe is not None:
        max_length = max(max_length, len(probe.media.ids) + 1)  # it also samples a token
    settings: dict[str, Any] = {"folder": folder, "max_length": max_length, "dtype": dtype, "gpu_memory": gpu_memory}
    settings |= {"ranks": ranks, "rows": rows, "more": vllm_kwargs or {}}
    settings |= {"processor": processor, "max_images": max_images}
    if own is not None:
        from lib.rollout.managed_servers import order_servers

        order_servers(own, model, tokenizer, **settings)
        name = ",".join(own.urls())
    make = engine_class(name)
    of_url = "://" in name
    if make.takes_adapters:
        settings["lora_sync"] = lora_sync
    engine = make(name, model, tokenizer, **settings, own=own) if of_url else make(model, tokenizer, **settings)
    engine.image_probe = probe
    if returns_routes:
        engine.route_layers = model.route_layers
        engine.no_routes = torch.empty(0, len(model.routers), model.routers[0].top_k, dtype=torch.int16)
    return engine


def engine_class(name: str) -> Any:
    """The class of --rollout-engine: one of ENGINES, or a class in path/to/file.py:Class. Raises InputError if there is
    none, or if a class of the user lacks a method."""
    kind = "://" if "://" in name else name
    if kind in ENGINES:
        return resolve_name(ENGINES[kind])
    engine: Any = load_object("--rollout-engine", name)
    if RolloutEngine not in getattr(engine, "__mro__", ()):
        raise InputError(f"--rollout-engine {name}: must be a class that inherits lib.rollout.RolloutEngine")
    needed = ["generate", *(["load_weights", "probe_log_probs"] if engine.takes_weights else [])]
    needed += ["session", "submit", "step", "abort"] if engine.in_process else []
    own = {method for cls in engine.__mro__ if cls not in (RolloutEngine, SteppedEngine) for method in vars(cls)}
    if missing := [method for method in needed if method not in own]:
        raise InputError(f"--rollout-engine {name}: the class has no method {missing[0]} (lib/rollout/engine.py)")
    return engine


def check_capabilities(name: str, images: bool, episodes: bool, routes: bool = False) -> None:
    """Raises InputError if the engine cannot sample what the run needs. Call it before a model loads."""
    engine = engine_class(name)
    if routes and not engine.gives_routes:
        raise InputError(f"--rollout-engine {name}: it does not return the experts for --routing-replay R3: take R2")
    if images and not engine.takes_images:
        raise InputError(f"--rollout-engine {name}: it takes no images, and --model reads them: take hf or vllm")
    if episodes and not (engine.in_process or engine.asynchronous):
        raise InputError(f"--rollout-engine {name}: --multi-turn and --agent need a SteppedEngine: take hf or vllm")


def check_engine_import(name: str, vllm_kwargs: Mapping[str, Any] | None = None) -> None:
    """Raises InputError if the engine's package is missing or takes no such settings. Call it before a model loads."""
    if name == "vllm":
        try:
            from vllm import EngineArgs
        except ImportError as error:
            why = f"vLLM cannot be imported ({error})"
            raise InputError(f"--rollout-engine vllm: {why}; use --rollout-engine hf") from error
        from lib.rollout.vllm_engine import check_vllm_kwargs

        check_vllm_kwargs(vllm_kwargs or {}, [setting.name for setting in fields(EngineArgs)])


def vllm_refuses(config: PreTrainedConfig, device: str) -> str:
    """Why vLLM cannot sample the model on such a device, or "". It imports vLLM."""
    try:
        from vllm import ModelRegistry
        from vllm.platforms import current_platform
    except (ImportError, OSError, RuntimeError) as error:  # a library of another driver or torch
        return f"vLLM cannot be imported ({shorten(str(error), 200, placeholder=' ...')})"
    if current_platform.device_type != device:
        return f"the installed vLLM is for {current_platform.device_type or 'no device'}, not for {device}"
    if hasattr(config, "quantization_config"):
        return "the model's weights are quantized, and no sync reaches those of vLLM"
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), type(config))  # a .gguf file names no architecture
    names = config.architectures or [cls.__name__]
    unknown = [name for name in names if name not in ModelRegistry.get_supported_archs()]
    return f"vLLM does not know {unknown[0]}" if unknown else ""


def add_origin(batch: DataProto, sampling: Sampling, version: int, level: int) -> DataProto:
    """The batch, with the limit and the weights that its responses were sampled with: those after `version` steps, or
    of the oldest token, at most `level` steps before."""
    batch.non_tensor_batch["max_response_length"] = np.full(len(batch), sampling.max_response_length, dtype=object)
    present = torch.full_like(batch.batch["response_mask"], version)
    versions = batch.batch.get("weight_versions", present)  # (B, T), -1 where no token was sampled
    batch.batch["policy_version"] = oldest = versions.where(versions >= 0, present).amin(1)
    assert (oldest >= version - level).all(), f"a token is of weights more than {level} steps ago (--async-level)"
    return batch


def group_size_of(batch: DataProto) -> int:
    """Rows of each uid. Raises InputError unless they are adjacent, and equally many."""
    uids = batch.non_tensor_batch["uid"]
    size, rest = divmod(len(uids), len({*uids}))
    if rest or (uids.reshape(-1, size) != uids.reshape(-1, size)[:, :1]).any():
        why = "the rows of a uid must be adjacent, and as many as those of any other"
        raise InputError(f"a batch of {len(uids)} rows with {len({*uids})} uids cannot move between ranks: {why}")
    return size


@dataclass(eq=False)
class Rollouts:
    """Samples with `sampler`, which is the engine or agent's episodes. Seeds and uids count prompts over all ranks:
    a run samples the same on any number of ranks."""

    engine: RolloutEngine
    sampler: Any
    loader: Any  # a PromptLoader, or None with --val-only
    sampling: Sampling
    world: World
    sizes: Sizes
    seed: int
    steps: range  # still to come
    async_level: int
    async_order: Order
    sync_tolerance: float  # nats, see sync_weights
    max_mismatch: float  # nats of k3
    recorder: NoRecorder
    prompts: DataProto = field(default_factory=DataProto)  # of the last batch, this rank's
    version: int = 0  # of the engine's weights: the steps that had trained them
    _prompts: Iterator | None = None
    _async: AsyncRollouts | None = None

    def __post_init__(self):
        self._steps = iter(self.steps)
        self._measures_lora_sync = self.engine.lora_sync == "auto"
        if self.async_level and not self.recorder.replays:
            assert self.engine.asynchronous
            engine, sizes = cast("ServerEngine", self.engine), self.sizes
            shape: dict[str, Any] = {"groups": sizes.local_prompts, "group_size": sizes.group_size}
            shape |= {"level": self.async_level, "order": self.async_order, "last_started": self.steps.start - 1}
            shape["begin"] = lambda number: self._batch_of(number, 0, sizes.group_size)[1:]
            self._async = AsyncRollouts(engine, self.sampler, sampling=self.sampling, **shape)
        # the prompts of such a step are known from the record alone
        any_order = self.async_order == "finished" or (self.loader is not None and self.loader.needs_scores)
        self._replays_any_order = bool(self.async_level) and self.recorder.replays and any_order

    @timed("weight_sync")
    def sync(self, actor: Policy, version: int) -> dict[str, Any]:
        """Gives the engine the policy's weights after `version` steps, and checks that it has them."""
        self.version, actor.sampled_since = version, version - self.async_level

        def verified() -> DataProto:
            if self.engine.lora_sync == "auto":
                choose_lora_sync(self.engine, actor.module, version, float(actor.scheduler.base_lrs[0]))
            limits = {"tolerance": self.sync_tolerance, "max_mismatch": self.max_mismatch}
            metrics = sync_weights(self.engine, actor.module, version, **limits)
            return DataProto(meta_info=dict(metrics))

        actor.checks.version = version
        return self.recorder.record("sync", verified).meta_info

    @timed("rollout")
    def next(self, group_size: int | None = None) -> DataProto:
        """This rank's responses of the next step, group_size (None: the run's) for each of its `prompts`. Raises
        InputError for another size with --async-level, which has begun the groups in earlier steps."""
        return self._take(next(self._steps), 0, self.steps.stop - 1, group_size)

    @timed("rollout")
    def next_greedy(self, step: int) -> DataProto:
        """One greedy response to each of the step's `prompts`."""
        return self.generate(self.prompts, self.sampling.greedy, step)

    @timed("rollout")
    def sample(self, step: int, number: int, group_size: int | None = None) -> DataProto:
        """The responses of batch `number` of a step that samples several. The rest as in `next`."""
        return self._take(step, number * self.sizes.local_prompts * self.world.size, None, group_size)

    def _take(self, step: int, first: int, last: int | None, group_size: int | None) -> DataProto:
        """first: the number of the batch's first prompt. last: the batch after which no batch is started."""
        size = group_size or self.sizes.group_size
        if self._async is not None:
            if size != (begun := self._async.group_size):
                raise InputError(f"--async-level: groups of {begun} are in flight, and this step asks for {size}")
            rows, responses = self._async.take(last)
            self.prompts = rows[::size]
            batch = self.recorder.rollout(rows, partial(self.sampler.collect, rows, self.sampling, responses))
            return self._checked(batch, self.sampling)
        self.prompts, rows, seeds = self._batch_of(step, first, size)
        if self._replays_any_order:
            batch = self.recorder.rollout(rows, DataProto, any_order=True)
            self.prompts = batch[::size]
            return self._checked(batch, self.sampling)
        return self._sampled(rows, self.sampling, seeds)

    def generate(self, prompts: DataProto, sampling: Sampling, step: int, numbers=None) -> DataProto:
        """One response to each prompt. step: -1 for validation. numbers: of the prompts; None: those of the step."""
        return self._sampled(prompts, sampling, request_seeds(self.seed, step, numbers or self._numbers(0)))

    @timed("rollout")
    def sleep(self) -> None:
        """Frees the engine's memory until the next sync of weights. A server is left alone."""
        self.engine.sleep()

    @timed("rollout")
    def balanced(self, actor: Policy, batch: DataProto, *others: DataProto) -> tuple:
        """(batch, *others, metrics), after ranks have exchanged groups so that all have about as much to compute.
        others: batches with equally many rows per group. Batches of any widths; ranks get equal ones."""
        model, mini_batches = actor.module, self.sizes.num_mini_batches
        plan, metrics = balance_groups(
            batch, model, group_size_of(batch), mini_batches, share_prompts=model.share_prompts
        )
        return *(exchange_groups(part, plan) for part in (batch, *others)), metrics

    def all_gather(self, batch: DataProto) -> DataProto:
        """The rows of all ranks, in the order of their prompts' numbers: the same on any number of ranks."""
        return gather_groups(equal_widths(batch), group_size_of(batch))

    def own_rows(self, whole: DataProto) -> DataProto:
        """This rank's groups, out of the rows of all ranks."""
        return whole[own_groups(whole, group_size_of(whole)).ravel()]

    def record_scores(self, batch: DataProto) -> None:
        """Records how responses to the loader's prompts scored, for --prompt-sampling. A collective."""
        if self.loader is not None and self.loader.needs_scores:
            scored = batch.batch["response_mask"].any(1).tolist()
            total = batch.batch["token_level_scores"].sum(1, keepdim=True)
            scores = batch.batch.get("reward_components", total).tolist()
            known = list(compress(zip(batch.non_tensor_batch[ROW], scores), scored))
            self.loader.record_scores(*zip(*known, strict=True) if known else ((), ()))

    def metrics(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """The sampler's of the batch, epochs done, and the staleness of an asynchronous run's tokens. A collective."""
        position = 0 if self.loader is None else self.loader.position
        if self._async is not None:
            position -= len(self._async.in_flight) * self.world.size
        metrics: dict[str, Metric] = self.sampler.batch_metrics(batch)
        metrics |= {"training/epoch": position / len(self.loader.dataset), **self.loader.metrics()}
        metrics |= self.engine.metrics()
        if self.async_level:
            metrics |= staleness_metrics(batch.batch["weight_versions"], step - 1)
        return metrics

    def close(self) -> None:
        self.engine.close()

    def state_dict(self) -> dict[str, Any]:
        """A collective if rollouts are asynchronous."""
        state = {} if self.loader is None else self.loader.state_dict()
        if self._measures_lora_sync:
            state["lora_sync"] = self.engine.lora_sync
        return state if self._async is None else state | self._async.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._measures_lora_sync:
            self.engine.lora_sync = state.get("lora_sync", "auto")  # a run goes on as it began
        if self.recorder.replays and "in_flight" in state:  # the record has them, from the next step on
            state["position"] -= len(state["in_flight"]) // self.sizes.group_size
        if self.loader is not None:  # there is none with --val-only
            self.loader.load_state_dict(state)
        if self._async is not None:
            self._async.load_state_dict(state)
        elif "in_flight" in state and not self.recorder.replays:
            what = f"the checkpoint has {len(state['in_flight'])} in-flight responses"
            raise InputError(f"resume: {what}, which would be lost without --async-level: set it as before")

    def _sampled(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        batch = self.recorder.rollout(prompts, partial(self.sampler.generate, prompts, sampling, seeds))
        return self._checked(batch, sampling)

    def _checked(self, batch: DataProto, sampling: Sampling) -> DataProto:
        T = batch.batch["responses"].shape[1]
        known = any(map(len, batch.non_tensor_batch.get(ROUTES, ())))
        # no engine has answered an episode that was out of time before its first turn
        if self.engine.route_layers and not known and batch.batch["attention_mask"][:, -T:].any():
            how = "record them with R3; a server needs --enable-return-routed-experts"
            raise InputError(f"--routing-replay R3: the rollouts come without their experts: {how}")
        return add_origin(batch, sampling, self.version, self.async_level)

    def _batch_of(self, step: int, first: int, group_size: int) -> tuple[DataProto, DataProto, list[int]]:
        """(prompts, the prompts repeated group_size times, seeds). first: the number of the batch's first prompt."""
        self._prompts = self._prompts or iter(self.loader)
        prompts = DataProto.from_single_dict(next(self._prompts)).to(self.world.device)
        numbers = self._numbers(first)
        prompts.non_tensor_batch["uid"] = np.array([f"{step}-{n}" for n in numbers], dtype=object)
        rows = [n * group_size + sample for n in numbers for sample in range(group_size)]
        return prompts, prompts.repeat(group_size, interleave=True), request_seeds(self.seed, step, rows)

    def _numbers(self, first: int) -> list[int]:
        return [first + self.world.rank + self.world.size * i for i in range(self.sizes.local_prompts)]
