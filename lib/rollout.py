"""Rollout engines behind one small interface, and the weight sync that is checked.

An engine has: generate(prompts, sampling, seeds) -> DataProto, load_weights(model, version), version, checksum,
probe_log_probs(ids), sleep(), wake(), close(); and `proved`, the metrics of its last sync, which sync_weights keeps
there. `hf` samples with the live model; `vllm` is an engine in this process; `http://host:port` is a vLLM server that
runs already. The last two are in lib/vllm_rollout.py.
For requests that come and go one by one (lib/agent_loop.py) it has, inside `with engine.session():`, submit(request_id,
prompt_ids, sampling, seed), step() -> {request_id: Generated} of those that ended, and abort(request_id).

Tokens in, tokens out: prompts are `raw_prompt_ids`, responses are never decoded on their way to the loss. A response
has its own seed, so a sample depends on neither its batch nor its rank, and a run repeats itself. rollout_log_probs are
those of the distribution that was sampled from (temperature, top-p and top-k applied).
"""

import inspect
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lib import InputError
from lib.data_proto import DataProto
from lib.distributed import all_gather_lists, all_reduce_max, compute_device, iter_full_params, merged_shards, unsharded
from lib.model import NEVER, least_kept, response_log_probs
from lib.packing import SAMPLED_BY_HF, carries_state
from lib.run.metrics import Max, Mean, Metric


@dataclass(frozen=True)
class Sampling:
    """How to sample. temperature 0 is greedy; top_p 1 and top_k -1 switch those filters off."""

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass
class Generated:
    """What was sampled for one request."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" (the end token is the last), "length" or "abort"
    weight_versions: list[int | None] = field(default_factory=list)  # of each token, where the engine keeps them


class WeightSyncError(RuntimeError):
    """The rollout engine does not hold the trainer's weights."""


def make_engine(
    name: str,
    model,
    tokenizer,
    *,
    folder: Path,
    max_length: int,
    dtype: torch.dtype,
    gpu_memory: float,
    ranks: int = 1,
):
    """The engine called `name`: "hf", "vllm" or the URL of a server, or several with commas between. ranks: of a vLLM
    engine that neighbouring ranks share."""
    if name == "hf":
        return HFEngine(model, tokenizer)
    from lib.vllm_rollout import ServedEngine, VLLMEngine  # it imports from here

    settings = {"folder": folder, "max_length": max_length, "dtype": dtype}
    if name != "vllm":
        return ServedEngine(name, model, tokenizer, **settings)
    return VLLMEngine(model, tokenizer, **settings, gpu_memory=gpu_memory, ranks=ranks)


def check_engine_import(name: str) -> None:
    """Raises InputError where the engine's package cannot be imported, before a model loads."""
    if name == "vllm":
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise InputError(
                f"--rollout-engine vllm: vLLM cannot be imported ({error}); use --rollout-engine hf"
            ) from error


def request_seeds(seed: int, step: int, rows: list[int]) -> list[int]:
    """A seed for each response from (run seed, step, row of the global batch): the same for any number of ranks."""
    high, low = divmod(seed, 1 << 15)  # low << 48 still fits in an int64
    mixed = _splitmix64(torch.tensor(rows) + (step << 24) + (low << 48))
    if high:
        mixed = _splitmix64(mixed + high)
    return [int(s) for s in mixed & 0x7FFFFFFF]


def turn_seed(seed: int, turn: int) -> int:
    """The seed of an episode's turn, counted from 0: the first has the row's own seed, as if it were the only one."""
    if turn == 0:
        return seed
    return int(_splitmix64(torch.tensor(-seed - (turn << 32)))) & 0x7FFFFFFF  # a sampled token's noise is of > 0


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every end token that the tokenizer or the model's generation config names (chat models often have two)."""
    eos = model.generation_config.eos_token_id
    ids = set(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)


def add_responses(
    prompts: DataProto,
    rows: list[Generated],
    pad_token_id: int,
    masks: list[list[int]] | None = None,
    position_ids: list[list[int]] | None = None,
) -> DataProto:
    """The prompts with their responses: what every engine returns. A collective.

    P and T are the longest prompt and response of all ranks, whatever the prompts' padding and the limits: what comes
    after it costs as much as there are tokens. Prompts are left-padded, responses right-padded.

    A row's finish_reason may also be one of lib/agent_loop.py; "abort" and "error" leave no trained token. masks: which
    tokens were sampled, if not all. position_ids: if a response is not simply what follows its prompt.
    """
    B, device = len(rows), prompts.batch["input_ids"].device
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    longest_prompt = int(prompts.batch["attention_mask"].sum(1).max())
    P, T = (all_reduce_max(longest, device) for longest in (longest_prompt, max(1, int(lengths.max()))))
    responses = torch.full((B, T), pad_token_id)
    rollout_log_probs = torch.zeros(B, T)
    response_mask = torch.zeros(B, T, dtype=torch.long)
    for i, row in enumerate(rows):
        n = len(row.token_ids)
        responses[i, :n] = torch.tensor(row.token_ids)
        rollout_log_probs[i, :n] = torch.tensor(row.log_probs)
        if row.finish_reason not in ("abort", "error"):
            response_mask[i, :n] = 1 if masks is None else torch.tensor(masks[i])
    attended = (torch.arange(T) < lengths[:, None]).long().to(device)
    ids, mask, before = (prompts.batch[name] for name in ("input_ids", "attention_mask", "position_ids"))
    left = (P - ids.shape[1], 0)  # below 0: columns that no rank needs
    ids, mask, before = F.pad(ids, left, value=pad_token_id), F.pad(mask, left), F.pad(before, left)  # (B, P)
    positions = before[:, -1:] + torch.arange(1, T + 1, device=device)  # (B, T)
    for position, own in zip(positions, position_ids or []):
        position[: len(own)] = torch.tensor(own)
    tensors = {
        "prompts": ids,
        "responses": responses.to(device),
        "input_ids": torch.cat([ids, responses.to(device)], 1),  # (B, L)
        "attention_mask": torch.cat([mask, attended], 1),
        "position_ids": torch.cat([before, positions], 1),
        "response_mask": response_mask.to(device),
        "rollout_log_probs": rollout_log_probs.to(device),
    }
    objects = {**prompts.non_tensor_batch, "finish_reason": np.array([row.finish_reason for row in rows], dtype=object)}
    return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info=prompts.meta_info)


def fit_columns(batches: list[DataProto]) -> list[DataProto]:
    """The same rows, in all batches with P and T columns of the longest prompt and response among them."""
    masks = [(batch.batch["attention_mask"], batch.batch["responses"].shape[1]) for batch in batches]
    P = max(int(mask[:, :-width].sum(1).max()) for mask, width in masks)
    T = max(1, *(int(mask[:, -width:].sum(1).max()) for mask, width in masks))
    fitted = []
    for batch in batches:
        left, right = P - batch.batch["prompts"].shape[1], T - batch.batch["responses"].shape[1]
        pads = {"prompts": (left, 0)}
        pads |= dict.fromkeys(("input_ids", "attention_mask", "position_ids"), (left, right))
        of_responses = ("responses", "response_mask", "rollout_log_probs", "turn_rewards", "token_level_scores")
        pads |= dict.fromkeys(of_responses, (0, right))
        batch = batch.select()
        batch.batch.update({key: F.pad(batch.batch[key], pad) for key, pad in pads.items() if key in batch.batch})
        fitted.append(batch)
    return fitted


# ---- transformers --------------------------------------------------------------------------------


LONG_PROMPT = 128  # tokens; of shorter ones a copy a row costs less than to attend in two parts
NOT_GROUPED = "rollouts cannot share its prompts; set --attn-implementation sdpa --no-padding-free"
ROOM = 64  # tokens by which the buffers of a response's keys and values grow


class HFEngine:
    """Samples with the trainer's own model: no second copy of the weights and nothing to sync.

    Each distinct prompt is prefilled once and its keys and values kept once for its group (LONG_PROMPT, can_group);
    finished rows leave the batch.
    """

    long_steps = True  # a step goes to the end of its requests
    shared = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model, self.pad_token_id = model, tokenizer.pad_token_id
        self.gpu = torch.cuda.current_device() if compute_device(model).type == "cuda" else None
        self._cache_keyword = cache_keyword(model)
        self.stop_ids = torch.tensor(stop_token_ids(model, tokenizer))
        self._waiting: dict[str, tuple[list[int], Sampling, int]] = {}
        self.version: int | None = None
        self.checksum: int | None = None

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """The weights are shared; the checksum says of which ones."""
        self.version, self.checksum = version, weight_checksum(model, next(model.parameters()).dtype)

    def probe_log_probs(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad(), unsharded(self.model):
            log_p = (
                self.model(input_ids=torch.tensor([ids], device=compute_device(self.model)))
                .logits[0]
                .float()
                .log_softmax(-1)
            )
        return log_p[:-1].gather(-1, torch.tensor(ids[1:], device=log_p.device)[:, None])[:, 0].cpu()

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

    @contextmanager
    def session(self) -> Iterator[None]:
        """Between its ends are submit, step and abort, on each rank as many as it likes. A collective."""
        was_training = self.model.training
        self.model.eval()  # gradient checkpointing switches the KV cache off in train mode
        try:
            with unsharded(self.model):
                yield
        finally:
            self.model.train(was_training)
            self._waiting.clear()

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling, seed: int) -> None:
        self._waiting[request_id] = (prompt_ids, sampling, seed)

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def step(self) -> dict[str, Generated]:
        """Samples what waits, as one batch and to its end (what differs in more than the length, at the next step)."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)  # which is a thread's own
        settings = [(s.temperature, s.top_p, s.top_k) for _, s, _ in self._waiting.values()]
        ids = [request_id for request_id, own in zip(self._waiting, settings) if own == settings[0]]
        prompt_ids, samplings, seeds = zip(*(self._waiting.pop(request_id) for request_id in ids))
        limits = [sampling.max_response_length for sampling in samplings]
        return dict(zip(ids, self._sample(prompt_ids, samplings[0], seeds, limits)))

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        """One response per row of `prompts`; row i is sampled with seeds[i]."""
        with self.session():
            limits = [sampling.max_response_length] * len(seeds)
            rows = self._sample(prompts.non_tensor_batch["raw_prompt_ids"], sampling, seeds, limits)
        return add_responses(prompts, rows, self.pad_token_id)

    @torch.no_grad()
    def _sample(self, prompt_ids, sampling: Sampling, seeds, limits: list[int]) -> list[Generated]:
        """Row i has limits[i] tokens at most, which stands above sampling.max_response_length."""
        device = compute_device(self.model)
        stop_ids = self.stop_ids.to(device)
        seeds, limits = torch.tensor(seeds, device=device), torch.tensor(limits, device=device)
        keys = [tuple(ids) for ids in prompt_ids]
        distinct = list(dict.fromkeys(keys))
        number = {key: i for i, key in enumerate(distinct)}
        prompt_of_row = torch.tensor([number[key] for key in keys], device=device)
        width = max(map(len, distinct))
        ids = torch.tensor([[self.pad_token_id] * (width - len(key)) + list(key) for key in distinct], device=device)
        first = width - torch.tensor([len(key) for key in distinct], device=device)
        mask = (torch.arange(width, device=device) >= first[:, None]).long()  # (n, P)

        cache = DynamicCache(config=self.model.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self.model(
            input_ids=ids,
            attention_mask=mask if first.any() else None,
            position_ids=positions,
            logits_to_keep=1,
            **{self._cache_keyword: cache},
        ).logits[:, -1]
        grouped = width >= LONG_PROMPT and can_group(self.model, cache)
        if grouped:
            cache = GroupCache(cache, mask == 0, prompt_of_row)
        else:
            cache.reorder_cache(prompt_of_row)
        logits, mask, position = logits[prompt_of_row], mask[prompt_of_row], positions[prompt_of_row, -1:]

        tokens, log_probs = [], []  # (R,) at each t
        lengths = torch.zeros_like(limits)
        rows = torch.arange(len(keys), device=device)  # rows of the batch that still run
        for t in range(int(limits.max())):
            token, log_prob = sample_tokens(logits, sampling, seeds[rows], t)
            tokens.append(torch.full_like(lengths, self.pad_token_id).index_copy(0, rows, token))
            log_probs.append(log_prob.new_zeros(len(keys)).index_copy(0, rows, log_prob))
            running = ~torch.isin(token, stop_ids) & (limits[rows] > t + 1)
            lengths[rows] = t + 1
            if not running.any():
                break
            if not running.all():
                keep = running.nonzero()[:, 0]
                rows, token, mask, position = rows[keep], token[keep], mask[keep], position[keep]
                cache.reorder_cache(keep)
            mask, position = torch.cat([mask, mask.new_ones(len(rows), 1)], 1), position + 1
            inputs = cache.inputs if grouped else {"attention_mask": mask}
            inputs = inputs | {self._cache_keyword: cache}
            logits = self.model(input_ids=token[:, None], position_ids=position, **inputs).logits[:, -1]
        tokens, log_probs = torch.stack(tokens, 1), torch.stack(log_probs, 1)  # (R, t), of the longest
        stopped = torch.isin(tokens.gather(1, lengths[:, None] - 1)[:, 0], stop_ids)
        return [
            Generated(row[:n], lps[:n], "stop" if stop else "length")
            for row, lps, n, stop in zip(tokens.tolist(), log_probs.tolist(), lengths.tolist(), stopped.tolist())
        ]


def cache_keyword(model: PreTrainedModel) -> str:
    """The name by which the model takes a cache. Raises InputError where this engine would sample from another policy:
    a cache of the model's own kind, or a state that its layers carry over padding, or otherwise than in training."""
    text, takes = model.config.get_text_config(), inspect.signature(model.forward).parameters
    names = [name for name in ("past_key_values", "cache_params") if name in takes]
    if not names or (carries_state(model) and text.model_type not in SAMPLED_BY_HF):
        kind = type(model).__name__.removeprefix("FSDP")
        raise InputError(f"--rollout-engine hf does not know how {kind} keeps its state: take vllm")
    return names[0]


class GroupCache(Cache):
    """Keys and values of each prompt once, whatever the number of rows that answer it, and of each row's response.

    prompts: what the prefill of the n prompts left; hidden (n, P): their padding; prompt_of_row (R,).
    """

    def __init__(self, prompts: DynamicCache, hidden: torch.Tensor, prompt_of_row: torch.Tensor):
        super().__init__(layers=[GroupLayer(layer) for layer in prompts.layers])
        self.hidden = hidden if hidden.any() else None
        # transformers passes a 4-D mask on untouched; without one it would build one
        self.inputs = {"attention_mask": torch.empty(1, 1, 1, 1, device=hidden.device), "group_cache": self}
        self._group(prompt_of_row)

    def reorder_cache(self, indices: torch.Tensor) -> None:
        super().reorder_cache(indices)
        left, prompt_of_row = self.prompt_of_row[indices].unique(return_inverse=True)
        if len(left) < self.prompts:
            self.hidden = None if self.hidden is None else self.hidden[left]
            for layer in self.layers:
                layer.prompt_keys, layer.prompt_values = layer.prompt_keys[left], layer.prompt_values[left]
        self._group(prompt_of_row)

    def _group(self, prompt_of_row: torch.Tensor) -> None:
        """Gives each row a slot among (n, G), where the rows of a prompt are together."""
        sizes = prompt_of_row.bincount()
        order = prompt_of_row.argsort(stable=True)
        within = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[prompt_of_row[order]]
        self.prompt_of_row, self.prompts, self.largest = prompt_of_row, len(sizes), int(sizes.max())
        self.slot = prompt_of_row * self.largest + torch.empty_like(order).index_copy(0, order, within)  # (R,)

    def attend(self, module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None):
        """Attention of one new token a row to its prompt and to its response; packed_sdpa comes here.

        query (R, H, 1, D); key, value (R, H_kv, t, D): the response's. Returns (R, 1, H, D).
        """
        layer = self.layers[module.layer_idx]
        layer.attended = True
        if key.data_ptr() != layer.keys.data_ptr() or value.data_ptr() != layer.values.data_ptr():
            raise InputError(
                f"--rollout-engine hf: {type(module).__name__} attends to other keys than it caches: {NOT_GROUPED}"
            )
        R, H_kv, t, _ = key.shape
        q = query.float().view(R, H_kv, -1, query.shape[-1])
        q = q * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        out, lse = _attend(q, key[:, :, -layer.window :], value[:, :, -layer.window :])  # (R, H_kv, H / H_kv, D)
        seen = min(layer.prompt_keys.shape[2], layer.window - t)  # of a prompt
        if seen > 0:
            hidden = None if self.hidden is None else self.hidden[:, None, None, -seen:]
            groups = q.new_zeros(self.prompts * self.largest, *q.shape[1:]).index_copy(0, self.slot, q)
            groups = groups.unflatten(0, (self.prompts, -1)).transpose(1, 2).flatten(2, 3)  # (n, H_kv, G x H / H_kv, D)
            of_prompt = _attend(groups, layer.prompt_keys[:, :, -seen:], layer.prompt_values[:, :, -seen:], hidden)
            prompt_out, prompt_lse = (
                x.unflatten(2, (self.largest, -1)).transpose(1, 2).flatten(0, 1)[self.slot] for x in of_prompt
            )
            out = torch.lerp(out, prompt_out, (prompt_lse - lse).sigmoid())
        return out.reshape(R, 1, query.shape[1], -1).to(query.dtype)


class GroupLayer(DynamicLayer):
    """A layer of GroupCache. The responses' keys and values (R, H_kv, t, D) are the filled part of buffers that grow by
    ROOM tokens, so that a token does not copy them all."""

    def __init__(self, prompts: DynamicLayer):
        super().__init__()
        self.prompt_keys, self.prompt_values = prompts.keys, prompts.values  # (n, H_kv, P, D)
        self.window = getattr(prompts, "sliding_window", 1 << 30)  # tokens
        self.attended = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.attended:
            raise InputError(f"--rollout-engine hf: the model's attention takes no keyword arguments: {NOT_GROUPED}")
        self.attended = False
        t = self.get_seq_length()
        if t % ROOM == 0:
            self._key_buffer, self._value_buffer = (
                _with_room(self.keys, key_states),
                _with_room(self.values, value_states),
            )
            self.is_initialized = True
        self._key_buffer[:, :, t : t + 1], self._value_buffer[:, :, t : t + 1] = key_states, value_states
        self._fill(t + 1)
        return self.keys, self.values

    def reorder_cache(self, indices: torch.Tensor) -> None:
        if t := self.get_seq_length():
            self._key_buffer, self._value_buffer = self._key_buffer[indices], self._value_buffer[indices]
            self._fill(t)

    def _fill(self, t: int) -> None:
        self.keys, self.values = self._key_buffer[:, :, :t], self._value_buffer[:, :, :t]


def _with_room(filled: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    room = new.new_empty(*new.shape[:2], ROOM, new.shape[3])
    return room if filled is None else torch.cat([filled, room], 2)


def can_group(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether GroupCache can stand for `cache`: packed_sdpa, and all layers with full or sliding attention."""
    config = model.config.get_text_config()
    plain = config.model_type not in (
        "diffllama",
        "hrm_text",
        "jetmoe",
    )  # whose attention takes no cached keys as they are
    plain &= all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    special = ("attention_chunk_size", "num_kv_shared_layers", "attn_logit_softcapping", "kv_lora_rank")
    unknown = any(getattr(config, name, None) for name in special)
    return plain and not unknown and model.config._attn_implementation == "packed_sdpa"


def _attend(q, k, v, hidden=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (..., m, D) and the log-sum-exp (..., m, 1) of its scores, in fp32, without what is hidden."""
    scores = q @ k.mT.float()
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse).exp_() @ v.float(), lse


def sample_tokens(
    logits: torch.Tensor, sampling: Sampling, seeds: torch.Tensor, t: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling of one token a row. logits (B, V), seeds (B,); returns (token, log_prob), both (B,).

    The noise of a row depends on its seed and on the position t only.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        token = logits.argmax(-1)
    else:
        logits = logits / sampling.temperature
        if sampling.top_p < 1 or sampling.top_k > 0:
            logits = logits.masked_fill(logits < least_kept(logits, sampling.top_p, sampling.top_k), NEVER)
        cdf = logits.softmax(-1).cumsum(-1)  # (B, V)
        uniform = (_splitmix64(seeds + (t << 32)) & 0xFFFFFF).float() / 2**24  # [0, 1)
        token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0].clamp(max=cdf.shape[1] - 1)
    return token, logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """A well mixed 64-bit hash of each int64 (Steele et al. 2014); int64 arithmetic wraps, shifts are made logical."""

    def shift(v: torch.Tensor, n: int) -> torch.Tensor:
        return (v >> n) & ((1 << (64 - n)) - 1)

    x = x.long() * -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ shift(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ shift(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ shift(x, 31)


# ---- ahead of training ---------------------------------------------------------------------------


def rollouts_ahead(
    engine, generate: Callable, requests: Iterator[tuple[DataProto, list[int], dict]], sampling: Sampling, level: int
) -> Iterator[tuple[DataProto, dict]]:
    """The rollout of each of `requests`, (prompts, seeds, what belongs to them), and what belongs to it.

    level 0: sampled when it is asked for. Else `level` further ones are sampled meanwhile, by a ServedEngine: tokens of
    a rollout are then of up to `level` weight versions before that of its own step.
    """
    if level == 0:
        for prompts, seeds, state in requests:
            yield generate(prompts, sampling, seeds), state
        return
    started: deque[tuple] = deque()
    for prompts, seeds, state in requests:
        started.append((prompts, engine.start(prompts, sampling, seeds), state))
        if len(started) > level:
            prompts, rows, state = started.popleft()
            yield engine.collect(prompts, sampling, rows), state
    for prompts, rows, state in started:
        yield engine.collect(prompts, sampling, rows), state


def staleness_metrics(weight_versions: torch.Tensor, version: int, level: int) -> dict[str, Metric]:
    """weight_versions (B, T) of collect; version: of the weights at the start of the step."""
    stale = version - weight_versions[weight_versions >= 0]
    oldest = int(stale.max()) if len(stale) else 0
    assert oldest <= level, f"a token of {oldest} weight versions ago, at --async-level {level}"
    return {"async/staleness_mean": Mean(stale.sum().item(), len(stale)), "async/staleness_max": Max(oldest)}


# ---- weight sync, checked ------------------------------------------------------------------------


def sync_weights(engine, model: PreTrainedModel, version: int, *, tolerance: float) -> dict[str, float]:
    """Gives the engine the trainer's weights as `version`, unless it has them, and proves that it has. A collective.

    Two canaries: a checksum over the bits of all weights, which a skipped or cut-short sync cannot match, and the
    log-probs of a fixed probe, which weights that arrived and are not used (a stale tied head) do not match.

    Raises:
        InputError: a weight of the trainer is not finite.
        WeightSyncError: a canary failed. Mean |log-prob difference| on the probe may be `tolerance` at most.
    """
    if engine.version == version:
        return engine.proved  # again, so that a step's metrics do not depend on who synced first: a resume has no one
    _check_finite(model, version)
    engine.load_weights(model, version)
    expected = weight_checksum(model, getattr(engine, "dtype", next(model.parameters()).dtype))
    if (engine.version, engine.checksum) != (version, expected):
        raise WeightSyncError(
            f"weight sync to version {version} failed: the engine holds version {engine.version} with checksum "
            f"{engine.checksum}, the trainer has {expected}"
        )
    ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, size=32).tolist()
    difference = float((engine.probe_log_probs(ids) - _trainer_probe(model, ids)).abs().mean())
    if not difference <= tolerance:
        raise WeightSyncError(
            f"weight sync to version {version} failed: engine and trainer differ by {difference:.3g} nats on the probe "
            f"(allowed: {tolerance:g}); the engine got the weights and does not compute with them"
        )
    engine.proved = {"rollout/canary_logp_diff": difference}
    return engine.proved


def _check_finite(model: PreTrainedModel, version: int) -> None:
    shards = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    finite = torch.stack([shard.isfinite().all() for shard in shards.values()]).tolist()
    if bad := sorted(set(all_gather_lists([name for name, fine in zip(shards, finite) if not fine]))):
        since = f"after step {version}: lower --lr or --max-grad-norm, and resume from an earlier checkpoint"
        raise InputError(
            f"the policy's weights are not finite, {bad[0]} and {len(bad) - 1} others, "
            + (since if version else "at the start: see --model")
        )


class CheckedStream:
    """Iterates (name, whole tensor) of the trainer's model and keeps the checksum of what the engine took."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        self.model, self.dtype, self.checksum = model, dtype, 0

    def __iter__(self):
        self.checksum = 0
        for name, tensor in iter_full_params(self.model, self.dtype):
            self.checksum = (self.checksum + _tensor_checksum(name, tensor)) % (1 << 64)
            yield name, tensor


def weight_checksum(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """An exact, order-independent checksum of all weights as `dtype`, from each rank's own shards. A collective."""
    total, ranks = 0, dist.get_world_size()
    for name, shard in merged_shards(model):
        pieces = 1  # of which each is on ranks / pieces ranks
        if isinstance(shard, DTensor):
            sizes = zip(shard.device_mesh.shape, shard.placements)
            pieces = math.prod(size for size, placement in sizes if not placement.is_replicate())
            shard = shard.to_local()
        total += pieces * _tensor_checksum(name, shard.to(dtype))
    parts: list[int] = [0] * ranks
    dist.all_gather_object(parts, total)
    return sum(parts) // ranks % (1 << 64)


def _tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """Sum of the elements' bits, weighted by the name: sums over shards add up to that of the whole tensor."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return zlib.crc32(name.encode()) * int(tensor.contiguous().view(integer).sum(dtype=torch.int64)) % (1 << 64)


@torch.no_grad()
def _trainer_probe(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probs of ids[1:] by the trainer's own forward."""
    row = torch.tensor([ids], device=compute_device(model))
    tensors = {
        "input_ids": row,
        "attention_mask": torch.ones_like(row),
        "position_ids": torch.arange(len(ids), device=row.device)[None],
        "responses": row[:, 1:],
        "response_mask": torch.ones_like(row[:, 1:]),
    }
    return response_log_probs(model, DataProto.from_dict(tensors=tensors), 1.0)[0][0].float().cpu()
