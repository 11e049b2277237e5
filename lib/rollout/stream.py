"""The rollouts of a run, step by step: takes prompts from the loader, samples, and spreads rows over the ranks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import compress
from pkgutil import resolve_name
from textwrap import shorten
from typing import Any
from zlib import crc32

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
from lib.data import (
    ROW,
    balance_groups,
    collate_fn,
    equal_widths,
    exchange_groups,
    gather_groups,
    own_groups,
    rows_by_uid,
)
from lib.data_proto import DataProto
from lib.distributed import Max, Mean, Metric, World, all_reduce_max, timed
from lib.model import Policy
from lib.model.routing import ROUTES
from lib.rollout.engine import (
    Generated,
    NoRecorder,
    RolloutEngine,
    SteppedEngine,
    add_responses,
    add_weight_versions,
    join_prefixes,
    prompts_of,
    request_seeds,
)
from lib.rollout.weight_sync import image_probe, sync_weights
from lib.sampling import Sampling

ENGINES: dict[str, str] = {"hf": "lib.rollout.hf_engine:HFEngine", "vllm": "lib.rollout.vllm_engine:VLLMEngine"}
ENGINES["://"] = "servers.engine:ServerEngine"  # for any URL
Prefixes = Sequence[Sequence[int]] | None
AGAIN = 40  # bits: a response that a step asks for again has the seed of a step 2**16 later
OTHER = 24  # bits: responses to prompts with a uid of the script's have those of steps that no run reaches
GIVEN = -1  # policy_version of rows that no policy sampled


def make_engine(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    processor: ProcessorMixin | None = None,
    returns_routes: bool = False,
    **settings: Any,
) -> RolloutEngine:
    """The engine called `name` (engine_class; several URLs have commas between). max_length: tokens of prompt and
    response. processor: of a vision model. returns_routes: whether rollouts have the column routed_experts.

    settings: for the engine. folder: of its files; it need not exist. dtype: that the trainer computes in. gpu_memory:
    share of the GPU for the engine. ranks: how many neighbouring ranks share one. rows: that a vLLM engine samples at a
    time. max_images: of a prompt. more: --vllm-kwargs. own: the job's servers, in place of those at a URL."""
    probe = None if processor is None else image_probe(processor, tokenizer, model)
    if probe is not None:
        max_length = max(max_length, len(probe.media.ids) + 1)  # it also samples a token
    if "://" in name:
        settings["urls"] = name
    engine = engine_class(name)(model, tokenizer, max_length=max_length, processor=processor, **settings)
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
    needed = ["generate", *(["load_weights"] if engine.takes_weights and not engine.shares_weights else [])]
    needed += ["probe_log_probs"] if engine.takes_weights else []
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
        from lib.rollout.vllm_start import check_vllm_kwargs

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


def add_origin(batch: DataProto, version: int, level: int) -> DataProto:
    """The batch, with the version of the weights that its responses were sampled with: those after `version` steps, or
    of the oldest token, at most `level` steps before."""
    present = torch.full_like(batch.batch["response_mask"], version)
    versions = batch.batch.get("weight_versions", present)  # (B, T), -1 where no token was sampled
    batch.batch["policy_version"] = oldest = versions.where(versions >= 0, present).amin(1)
    assert (oldest >= version - level).all(), f"a token is of weights more than {level} steps ago (--async-level)"
    return batch


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
    async_level: int
    sync_tolerance: float  # nats, see sync_weights
    max_mismatch: float  # nats of k3
    reads_log_probs: bool  # whether the loss reads rollout_log_probs
    recorder: NoRecorder
    replays_any_order: bool = False  # whether the prompts of a step are known from its record alone
    async_rollouts: Any = None  # the servers.AsyncRollouts of such a run, which get their groups from begin_groups
    version: int = 0  # of the engine's weights: the steps that had trained them
    _prompts: Iterator | None = None
    _taken: int = 0  # prompts of this step, on all ranks
    _asked: Counter = field(default_factory=Counter)  # {(uid, sampling): how often the step has asked for it}
    _begun: tuple[DataProto, int, Callable] | None = None  # the last prompts(), their group size and their responses

    @timed("weight_sync")
    def sync(self, actor: Policy, version: int) -> dict[str, Any]:
        """Gives the engine the policy's weights after `version` steps, and checks that it has them."""
        self.version, actor.sampled_since = version, max(0, version - self.async_level)
        self._taken = 0
        self._asked.clear()

        def verified() -> DataProto:
            limits = {"tolerance": self.sync_tolerance, "max_mismatch": self.max_mismatch}
            metrics = sync_weights(self.engine, actor.module, version, **limits)
            return DataProto(meta_info=dict(metrics))

        actor.checks.version = version
        return self.recorder.record("sync", verified).meta_info

    @timed("rollout")
    def prompts(self) -> DataProto:
        """This rank's next prompts; a step may take several times. An asynchronous run waits for their groups here."""
        assert self._begun is None, "rollouts.generate takes the prompts before others are taken"
        if self.async_rollouts is not None:
            rows, responses = self.async_rollouts.take()
            collect = partial(self.sampler.collect, rows, self.sampling, responses)
            size, prompts = self.async_rollouts.group_size, rows[:: self.async_rollouts.group_size]
            self._begun = prompts, size, partial(self.recorder.rollout, rows, collect)
            return prompts
        prompts = self._next_prompts(self.version + 1, self._taken)
        self._taken += self.sizes.local_prompts * self.world.size
        if self.replays_any_order:
            size = self.sizes.group_size
            batch = self.recorder.rollout(prompts.repeat(size, interleave=True), DataProto, any_order=True)
            prompts = batch[::size]
            self._begun = prompts, size, lambda: batch
        return prompts

    @timed("rollout")
    def generate(
        self,
        prompts: DataProto,
        n: int = 1,
        *,
        sampling: Sampling | None = None,
        limits: Sequence[int] | None = None,
        prefixes: Prefixes = None,
        seeds: list[int] | None = None,
    ) -> DataProto:
        """(B, P + T): n responses to each prompt, next to each other. A collective; a rank may have no prompt.

        prompts: of prompts() or new_prompts(), or rows, for more responses to their prompts. sampling: None: the run's.
        limits: the most tokens of each response (B,). prefixes: tokens with which each response (B,) begins. They count
        for its limit; given_mask (B, T) is 1 there, response_mask and rollout_log_probs are 0. To train on them, set
        their response_mask to 1 before balanced(). seeds: None: each response of a step has its own, also if a prompt
        is asked again.

        With --async-level the groups of prompts() have begun already: raises InputError for other than theirs."""
        if self._begun is not None and sampling is None:
            (begun, size, collected), self._begun = self._begun, None
            others = prompts.non_tensor_batch["uid"].tolist() != begun.non_tensor_batch["uid"].tolist()
            if others or n != size or limits is not None or prefixes is not None:
                raise InputError("--async-level: groups in flight get no other prompts, sizes, limits or prefixes")
            return self._checked(collected(), [self.sampling.max_response_length] * (n * len(prompts)))
        sampling, prompts = sampling or self.sampling, prompts_of(prompts)
        rows = prompts.repeat(n, interleave=True)
        limits = [sampling.max_response_length] * len(rows) if limits is None else list(limits)
        seeds = seeds or self._seeds(self.version + 1, prompts, n, sampling)
        produce = partial(self._sample, rows, sampling, limits, prefixes, seeds)
        return self._checked(self.recorder.rollout(rows, produce), limits)

    @timed("rollout")
    def given(self, prompts: DataProto, responses: Prefixes, masks: Sequence[Sequence[int]] | None = None) -> DataProto:
        """(B, P + T): rows of given responses (B,), token ids, in the form of generate's. An empty one is a row without
        a trained token. A collective. Raises InputError for one that is longer than the run's limit.

        prompts: as in generate(). masks: response_mask of each response; None: 1. given_mask is 1, finish_reason
        "given". rollout_log_probs are 0, for no engine has any, and policy_version is -1: is_fresh is False, so that
        mismatch metrics and checks of the engine leave these rows out."""
        limit, longest = self.sampling.max_response_length, max(map(len, responses), default=0)
        if longest > limit:
            raise InputError(f"rollouts.given: a response of {longest} tokens; --max-response-length is {limit}")
        routes = self.engine.no_routes if self.engine.route_layers else None
        rows = [Generated([*ids], [0.0] * len(ids), "given", routed_experts=routes) for ids in responses]
        batch = add_responses(prompts_of(prompts), rows, self.engine.pad_token_id, masks)
        t = batch.batch
        t["given_mask"] = t["attention_mask"][:, -t["responses"].shape[1] :].clone()
        t["policy_version"] = torch.full_like(t["responses"][:, 0], GIVEN)
        if self.async_level:
            add_weight_versions(batch, [[]] * len(rows))
        batch.non_tensor_batch["max_response_length"] = np.array([limit] * len(rows), dtype=object)
        return batch

    def new_prompts(self, rows: DataProto, messages: Sequence[list[dict]], role: str = "") -> DataProto:
        """Prompts (B, P) of text with these messages (B,), by the data set's template, in the form of prompts(). What
        the rows, prompts or responses, have besides (data_source, reward_model, extra_info, ...) goes with them.

        role: a name for prompts whose responses are groups of their own: a uid becomes uid-role-number, with the number
        of the row among those of its uid. "": uids stay."""
        objects, dataset = dict(prompts_of(rows).non_tensor_batch), self.loader.dataset.dataset
        make = getattr(dataset, "prompt_columns", None)
        if make is None:
            raise InputError(f"rollouts.new_prompts: {type(dataset).__name__} has no prompt_columns (RLHFDataset has)")
        items = [make(own, info) for own, info in zip(messages, objects["extra_info"], strict=True)]
        if not items:
            return prompts_of(rows)
        if role:
            numbers = {row: k for own in rows_by_uid(rows).values() for k, row in enumerate(own)}
            uids = [f"{uid}-{role}-{numbers[row]}" for row, uid in enumerate(objects["uid"])]
            objects["uid"] = np.array(uids, dtype=object)
            if ROW in objects:  # their scores are not those of the data set's row
                objects[ROW] = np.full(len(uids), None)
        return DataProto.from_single_dict(objects | collate_fn(items)).to(self.world.device)

    @timed("rollout")
    def sleep(self) -> None:
        """Frees the engine's memory until the next sync of weights. A server is left alone."""
        self.engine.sleep()

    @timed("rollout")
    def balanced(self, actor: Policy, batch: DataProto, *others: DataProto) -> tuple:
        """(batch, *others, metrics), after ranks have exchanged groups so that all have about as much to compute.
        Groups, the rows of a uid, may be of any size. others: rows of these uids, which go with them. Batches of any
        widths; ranks get equal ones. A collective."""
        model, given = actor.module, batch.batch.get("given_mask")
        trained = self.reads_log_probs and given is not None and (given * batch.batch["response_mask"]).any()
        if self.reads_log_probs and all_reduce_max(int(trained), self.world.device):
            why = "given tokens that are trained have no log-probs of an engine, which this run's loss reads"
            raise InputError(f"rollouts.balanced: {why}: set --old-log-probs recompute, and no --rollout-correction")
        plan, metrics = balance_groups(batch, model, self.sizes.num_mini_batches, share_prompts=model.share_prompts)
        return *(exchange_groups(part, plan) for part in (batch, *others)), metrics

    def all_gather(self, batch: DataProto) -> DataProto:
        """The rows of all ranks, before balanced() in an order that is the same on any number of ranks."""
        return gather_groups(equal_widths(batch))

    def own_rows(self, whole: DataProto) -> DataProto:
        """This rank's groups, out of the rows of all ranks."""
        return whole[[row for rows in own_groups(whole) for row in rows]]

    def record_scores(self, batch: DataProto) -> None:
        """Records how responses to the loader's prompts scored, for --prompt-sampling, without rows of older steps and
        given ones. A collective."""
        if self.loader is not None and self.loader.needs_scores:
            scored = batch.batch["response_mask"].any(1) & self._of_step(batch)
            total = batch.batch["token_level_scores"].sum(1, keepdim=True)
            scores = batch.batch.get("reward_components", total).tolist()
            rows = zip(batch.non_tensor_batch[ROW], scores)
            known = [(row, score) for row, score in compress(rows, scored.tolist()) if row is not None]
            self.loader.record_scores(*zip(*known, strict=True) if known else ((), ()))

    def metrics(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """The sampler's of the batch, epochs done, and the staleness of an asynchronous run's tokens. A collective."""
        position = 0 if self.loader is None else self.loader.position
        if self.async_rollouts is not None:
            position -= len(self.async_rollouts.in_flight) * self.world.size
        metrics: dict[str, Metric] = self.sampler.batch_metrics(batch)
        metrics |= {"training/epoch": position / len(self.loader.dataset), **self.loader.metrics()}
        metrics |= self.engine.metrics()
        if self.async_level:
            metrics |= staleness_metrics(batch.batch["weight_versions"][self._of_step(batch)], step - 1)
        return metrics

    def _of_step(self, batch: DataProto) -> torch.Tensor:
        """(B,) bool: rows that were sampled for this step."""
        return batch.batch["policy_version"] >= max(0, self.version - self.async_level)

    def batch_metrics(self, batch: DataProto) -> dict[str, Metric]:
        """The sampler's, of a batch that loses their column: rows that a run keeps must not depend on clocks. A
        collective."""
        metrics = self.sampler.batch_metrics(batch)
        batch.non_tensor_batch.pop("agent_metrics", None)
        return metrics

    def close(self) -> None:
        self.engine.close()

    def state_dict(self) -> dict[str, Any]:
        """A collective if rollouts are asynchronous."""
        state = {} if self.loader is None else self.loader.state_dict()
        return state if self.async_rollouts is None else state | self.async_rollouts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.recorder.replays and "in_flight" in state:  # the record has them, from the next step on
            state["position"] -= len(state["in_flight"]) // self.sizes.group_size
        if self.loader is not None:  # there is none with --val-only
            self.loader.load_state_dict(state)
        if self.async_rollouts is not None:
            self.async_rollouts.load_state_dict(state)
        elif "in_flight" in state and not self.recorder.replays:
            what = f"the checkpoint has {len(state['in_flight'])} in-flight responses"
            raise InputError(f"resume: {what}, which would be lost without --async-level: set it as before")

    def _sample(
        self, rows: DataProto, sampling: Sampling, limits: list[int], prefixes: Prefixes, seeds: list[int]
    ) -> DataProto:
        asked, single_turn = rows.select(), self.sampler is self.engine
        if prefixes is not None:
            if not single_turn or any(map(bool, rows.non_tensor_batch.get("multi_modal_inputs", ()))):
                why = "prefixes are for single turns of text, without images, tools or --agent"
                raise InputError(f"rollouts.generate: {why}")
            if len(prefixes) != len(rows) or any(len(own) >= n for own, n in zip(prefixes, limits)):
                raise InputError("rollouts.generate: each response needs a prefix, shorter than its limit")
            begins = ([*ids, *prefix] for ids, prefix in zip(rows.non_tensor_batch["raw_prompt_ids"], prefixes))
            asked.non_tensor_batch["raw_prompt_ids"] = np.fromiter(begins, dtype=object, count=len(rows))
            limits = [limit - len(prefix) for limit, prefix in zip(limits, prefixes)]
        asked.non_tensor_batch["max_response_length"] = np.array(limits, dtype=object)
        batch = self.sampler.generate(asked, sampling, seeds)
        if single_turn:
            check_lengths(batch, limits, type(self.engine).__name__)
        return batch if prefixes is None else join_prefixes(rows, prefixes, batch, self.engine.pad_token_id)

    def _checked(self, batch: DataProto, limits: list[int]) -> DataProto:
        T = batch.batch["responses"].shape[1]
        known = any(map(len, batch.non_tensor_batch.get(ROUTES, ())))
        # no engine has answered an episode that was out of time before its first turn
        if self.engine.route_layers and not known and batch.batch["attention_mask"][:, -T:].any():
            how = "record them with R3; a server needs --enable-return-routed-experts"
            raise InputError(f"--routing-replay R3: the rollouts come without their experts: {how}")
        batch.non_tensor_batch["max_response_length"] = np.array(limits, dtype=object)
        return add_origin(batch, self.version, self.async_level)

    def _next_prompts(self, step: int, first: int) -> DataProto:
        """This rank's next prompts. first: the number of the first one, over all ranks."""
        self._prompts = self._prompts or iter(self.loader)
        prompts = DataProto.from_single_dict(next(self._prompts)).to(self.world.device)
        numbers = [first + self.world.rank + self.world.size * i for i in range(self.sizes.local_prompts)]
        prompts.non_tensor_batch["uid"] = np.array([f"{step}-{n}" for n in numbers], dtype=object)
        return prompts

    def begin_groups(self, number: int) -> tuple[DataProto, list[int]]:
        """(rows, seeds) of the groups of batch `number`, for AsyncRollouts."""
        prompts, n = self._next_prompts(number, 0), self.sizes.group_size
        return prompts.repeat(n, interleave=True), self._seeds(number, prompts, n, self.sampling)

    def _seeds(self, step: int, prompts: DataProto, n: int, sampling: Sampling) -> list[int]:
        """Of n responses to each prompt. If the step asks for a prompt again, they are others."""
        rows = []
        for uid in prompts.non_tensor_batch["uid"]:
            of_step, _, number = uid.rpartition("-")  # number: of the prompt in its step, over all ranks
            of_loader = of_step == str(step) and number.isdecimal()
            first = int(number) * n if of_loader else crc32(uid.encode()) << OTHER
            first += self._asked[uid, sampling] << AGAIN
            self._asked[uid, sampling] += 1
            rows += [first + sample for sample in range(n)]
        return request_seeds(self.seed, step, rows)


def staleness_metrics(weight_versions: torch.Tensor, version: int) -> dict[str, Metric]:
    """weight_versions (B, T): of ServerEngine.collect, -1 where no token was sampled. version: that of the weights at
    the start of the step."""
    sampled = weight_versions >= 0
    stale = (version - weight_versions) * sampled
    oldest = int(stale.max()) if len(stale) else 0
    return {"async/staleness_mean": Mean(stale.sum().item(), int(sampled.sum())), "async/staleness_max": Max(oldest)}


def check_lengths(batch: DataProto, limits: list[int], engine: str) -> None:
    """An engine of the user may not know of row_limits."""
    lengths = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].sum(1).tolist()
    if any(length > limit for length, limit in zip(lengths, limits)):
        why = "a response is longer than its limit: generate must keep row_limits(prompts, sampling)"
        raise InputError(f"--rollout-engine {engine}: {why} (lib/rollout/engine.py)")
