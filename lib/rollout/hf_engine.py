"""The engine `hf`: samples with the trainer's own model, through transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lib import InputError
from lib.core_algos import splitmix64
from lib.data.vision import Media, media_of
from lib.data_proto import DataProto
from lib.distributed import compute_device, device_setter, unsharded
from lib.model import NEVER, PACKED, SAMPLED_BY_HF, carries_state, least_kept, log_probs_of
from lib.model.routing import chosen_experts
from lib.model.vision import cache_keyword, images_of_prompts
from lib.rollout.engine import Generated, SteppedEngine, add_responses, stop_token_ids
from lib.rollout.weight_sync import weight_checksum
from lib.sampling import Sampling

LONG_PROMPT = 128  # tokens; to copy a shorter prompt's cache to each row costs less than GroupCache
NOT_GROUPED = "rollouts cannot share its prompts; set --attn-implementation sdpa"
ROOM = 64  # tokens by which the buffers of a response's keys and values grow


class HFEngine(SteppedEngine):
    """Samples with the trainer's own model: no second copy of the weights and nothing to sync. Each distinct prompt is
    prefilled once, and its group shares its keys and values (LONG_PROMPT, can_group). Finished rows leave the batch."""

    takes_images = shares_weights = gives_routes = True
    long_steps = True  # a step runs its requests to their end
    shared = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **_: Any):
        self.model, self.tokenizer, self.pad_token_id = model, tokenizer, tokenizer.pad_token_id
        self._use_device = device_setter()
        self._cache_keyword = known_cache(model)
        self.stop_ids = torch.tensor(stop_token_ids(model, tokenizer))
        self._waiting: dict[str, tuple[list[int], Sampling, int, Media | None]] = {}

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """Copies nothing, since the weights are shared; sets version and checksum."""
        self.version, self.checksum = version, weight_checksum(model, next(model.parameters()).dtype)

    def probe_log_probs(self, ids: list[int], media: Media | None = None) -> torch.Tensor:
        ids = media.ids if media else ids
        row = torch.tensor([ids], device=compute_device(self.model))
        with torch.no_grad(), unsharded(self.model):
            if media:
                places = torch.arange(len(ids), device=row.device)
                logits = self._logits_with_images(row, torch.ones_like(row), [media], places)[0]
            else:
                logits = self.model(input_ids=row, use_cache=False).logits[0]
        return logits.float().log_softmax(-1)[:-1].gather(-1, row[0, 1:, None])[:, 0].cpu()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Inside it each rank may call submit, step and abort as often as it likes. Start and end are collectives."""
        was_training = self.model.training
        self.model.eval()  # gradient checkpointing switches the KV cache off in train mode
        try:
            with unsharded(self.model):
                yield
        finally:
            self.model.train(was_training)
            self._waiting.clear()

    def submit(self, request_id: str, prompt_ids, sampling: Sampling, seed: int, media: Media | None = None) -> None:
        self._waiting[request_id] = (prompt_ids, sampling, seed, media)

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def step(self) -> dict[str, Generated]:
        """Samples the waiting requests as one batch, to their end. Those with other sampling wait for the next step."""
        self._use_device()  # each thread has its own current device
        settings = [replace(sampling, max_response_length=0) for _, sampling, *_ in self._waiting.values()]
        ids = [request_id for request_id, own in zip(self._waiting, settings) if own == settings[0]]
        prompt_ids, samplings, seeds, media = zip(*(self._waiting.pop(request_id) for request_id in ids))
        limits = [sampling.max_response_length for sampling in samplings]
        return dict(zip(ids, self._sample(prompt_ids, media, samplings[0], seeds, limits)))

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        with self.session():
            limits = [sampling.max_response_length] * len(seeds)
            raw_ids = prompts.non_tensor_batch["raw_prompt_ids"]
            rows = self._sample(raw_ids, media_of(prompts), sampling, seeds, limits)
        return add_responses(prompts, rows, self.pad_token_id)

    @torch.no_grad()
    def _sample(self, prompt_ids, media, sampling: Sampling, row_seeds, row_limits: list[int]) -> list[Generated]:
        """Row i gets at most row_limits[i] tokens, whatever sampling.max_response_length says."""
        device = compute_device(self.model)
        stop_ids = self.stop_ids.to(device)
        seeds, limits = torch.tensor(row_seeds, device=device), torch.tensor(row_limits, device=device)
        # equal ids may stand for other images
        keys = [(tuple(own.ids), own.hash) if own else (tuple(ids), 0) for ids, own in zip(prompt_ids, media)]
        distinct = dict(zip(keys, media))
        number = {key: i for i, key in enumerate(distinct)}
        prompt_of_row = torch.tensor([number[key] for key in keys], device=device)
        texts = [list(ids) for ids, _ in distinct]
        width = max(map(len, texts))
        ids = torch.tensor([[self.pad_token_id] * (width - len(text)) + text for text in texts], device=device)
        first = width - torch.tensor([len(text) for text in texts], device=device)
        mask = (torch.arange(width, device=device) >= first[:, None]).long()  # (n, P)

        cache = DynamicCache(config=self.model.config)
        if any(distinct.values()):
            last = torch.arange(1, len(ids) + 1, device=device) * width - 1
            logits, positions = self._logits_with_images(ids, mask, list(distinct.values()), last, cache)
        else:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            inputs = {"attention_mask": mask if first.any() else None, self._cache_keyword: cache}
            logits = self.model(input_ids=ids, position_ids=positions, logits_to_keep=1, **inputs).logits[:, -1]
        routes = [chosen_experts(self.model).unflatten(0, ids.shape)] if self.route_layers else []  # (n, P, layers, k)
        grouped = width >= LONG_PROMPT and can_group(self.model, cache)
        if grouped:
            cache = GroupCache(cache, mask == 0, prompt_of_row)
        else:
            cache.reorder_cache(prompt_of_row)
        position = positions.amax(1, keepdim=True)
        seen = None
        if sampling.repetition_penalty != 1:  # (R, V): the tokens that each row has
            seen = torch.zeros_like(logits, dtype=torch.long).scatter_add_(1, ids, mask)[prompt_of_row] > 0
        logits, mask, position = logits[prompt_of_row], mask[prompt_of_row], position[prompt_of_row]

        tokens, log_probs = [], []  # (R,) at each t
        lengths, stopped = torch.zeros_like(limits), torch.zeros_like(limits, dtype=torch.bool)
        rows = torch.arange(len(keys), device=device)  # the rows that still run
        for t in range(int(limits.max())):
            if seen is not None:
                logits = penalise(logits, seen, sampling.repetition_penalty)
            token, log_prob = sample_tokens(logits, sampling, seeds[rows], t)
            tokens.append(torch.full_like(lengths, self.pad_token_id).index_copy(0, rows, token))
            log_probs.append(log_prob.new_zeros(len(keys)).index_copy(0, rows, log_prob))
            stops = torch.isin(token, stop_ids) | self._stop_strings(sampling.stop, tokens, rows)
            stopped[rows], lengths[rows] = stops, t + 1
            running = ~stops & (limits[rows] > t + 1)
            if not running.any():
                break
            if not running.all():
                keep = running.nonzero()[:, 0]
                rows, token, mask, position = rows[keep], token[keep], mask[keep], position[keep]
                seen = None if seen is None else seen[keep]
                cache.reorder_cache(keep)
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
            mask, position = torch.cat([mask, mask.new_ones(len(rows), 1)], 1), position + 1
            inputs = cache.inputs if grouped else {"attention_mask": mask}
            inputs = inputs | {self._cache_keyword: cache}
            logits = self.model(input_ids=token[:, None], position_ids=position, **inputs).logits[:, -1]
            if routes:
                new = chosen_experts(self.model)
                routes.append(new.new_full((len(keys), *new.shape[1:]), -1).index_copy(0, rows, new))
        columns = (torch.stack(tokens, 1), torch.stack(log_probs, 1), lengths, stopped)  # (R, t), t of the longest
        found = zip(*(column.tolist() for column in columns))
        generated = [Generated(ids[:n], lps[:n], "stop" if stop else "length") for ids, lps, n, stop in found]
        if routes:
            of_prompts, of_tokens = routes[0].cpu(), torch.stack([routes[0][prompt_of_row, 0], *routes[1:]])[1:].cpu()
            for i, (row, prompt) in enumerate(zip(generated, prompt_of_row.tolist())):
                parts = of_prompts[prompt, first[prompt] :], of_tokens[: len(row.token_ids) - 1, i]
                row.routed_experts = torch.cat(parts)  # the last token was not yet given to the model
        return generated

    def _stop_strings(self, stop: tuple[str, ...], tokens: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """(len(rows),) bool: the rows whose last token completes a stop string. tokens: (R,) at each t."""
        if not stop:
            return torch.zeros_like(rows, dtype=torch.bool)
        longest = max(len(text.encode()) for text in stop) + 1  # a token has at least one byte; the first loses a space
        tails = torch.stack(tokens[-longest:], 1)[rows]
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return torch.tensor([any(string in text for string in stop) for text in texts], device=rows.device)

    def _logits_with_images(
        self, ids: torch.Tensor, mask: torch.Tensor, media: list[Media | None], select: torch.Tensor, cache=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits (m, V) after `select`, which indexes the n x P tokens; positions (n, P), with mrope the largest of
        the three). ids, mask (n, P), left-padded; fills the cache."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        shown = [(i, own) for i, own in enumerate(media) if own is not None]
        if any(own.positions.ndim == 2 for _, own in shown):
            positions = positions.repeat(3, 1, 1)  # (3, n, P)
            for i, own in shown:
                positions[:, i, -len(own.ids) :] = own.positions[1:]
        sampled = torch.zeros(ids.shape, dtype=torch.bool)  # (n, P)
        for i, own in shown:
            if own.sampled is not None:
                sampled[i, -len(own.ids) :] = torch.tensor(own.sampled)
        images = images_of_prompts(self.model, ids, [own.inputs if own else {} for own in media], sampled)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "images": images}
        if cache is not None:
            inputs[self._cache_keyword] = cache
        logits = self.model.prompt_logits(inputs, select)
        return logits, positions if positions.ndim == 2 else positions.amax(0)


def known_cache(model: PreTrainedModel) -> str:
    """The keyword by which the model takes a cache. Raises InputError if this engine would sample from another policy
    than training computes: the model has its own kind of cache, or its layers carry a state through padding."""
    name, model_type = cache_keyword(model), model.config.get_text_config().model_type
    if not name or (carries_state(model) and model_type not in SAMPLED_BY_HF):
        kind = type(model).__name__.removeprefix("FSDP")
        raise InputError(f"--rollout-engine hf does not know how {kind} keeps its state: take vllm")
    return name


class GroupCache(Cache):
    """The keys and values of each prompt, stored once for all rows that answer it, and those of each row's response.
    prompts: the cache that the prefill of the n prompts left; hidden (n, P): their padding; prompt_of_row (R,)."""

    def __init__(self, prompts: DynamicCache, hidden: torch.Tensor, prompt_of_row: torch.Tensor):
        super().__init__(layers=[GroupLayer(layer) for layer in prompts.layers])
        self.hidden = hidden if hidden.any() else None
        # transformers passes a 4-D mask on as it is; without a mask it would build one
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
        """Gives each row a slot in an (n, G) grid with one line per prompt. G is the size of the largest group."""
        sizes = prompt_of_row.bincount()
        order = prompt_of_row.argsort(stable=True)
        within = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[prompt_of_row[order]]
        self.prompt_of_row, self.prompts, self.largest = prompt_of_row, len(sizes), int(sizes.max())
        self.slot = prompt_of_row * self.largest + torch.empty_like(order).index_copy(0, order, within)  # (R,)

    def attend(self, module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None):
        """Attention of each row's one new token to its prompt and its response so far, called by packed_attention.
        query (R, H, 1, D); key, value (R, H_kv, t, D) of the responses. Returns (R, 1, H, D)."""
        layer = self.layers[module.layer_idx]
        layer.attended = True
        if key.data_ptr() != layer.keys.data_ptr() or value.data_ptr() != layer.values.data_ptr():
            why = f"{type(module).__name__} attends to other keys than it caches"
            raise InputError(f"--rollout-engine hf: {why}: {NOT_GROUPED}")
        _, H_kv, t, _ = key.shape
        q = rearrange(query.float(), "r (k g) 1 d -> r k g d", k=H_kv)
        q = q * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        out, lse = _attend(q, key[:, :, -layer.window :], value[:, :, -layer.window :])  # (R, H_kv, H / H_kv, D)
        seen = min(layer.prompt_keys.shape[2], layer.window - t)  # tokens of a prompt that are inside the window
        if seen > 0:
            hidden = None if self.hidden is None else self.hidden[:, None, None, -seen:]
            groups = q.new_zeros(self.prompts * self.largest, *q.shape[1:]).index_copy(0, self.slot, q)
            groups = rearrange(groups, "(n rows) k g d -> n k (rows g) d", n=self.prompts)
            of_prompt = _attend(groups, layer.prompt_keys[:, :, -seen:], layer.prompt_values[:, :, -seen:], hidden)
            by_row = (rearrange(x, "n k (rows g) d -> (n rows) k g d", rows=self.largest) for x in of_prompt)
            prompt_out, prompt_lse = (x[self.slot] for x in by_row)
            out = torch.lerp(out, prompt_out, (prompt_lse - lse).sigmoid())
        return rearrange(out, "r k g d -> r 1 (k g) d").to(query.dtype)


class GroupLayer(DynamicLayer):
    """A layer of GroupCache. The responses' keys and values (R, H_kv, t, D) are the filled part of buffers. These grow
    by ROOM tokens at a time, so that not every new token copies them all."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, prompts: DynamicLayer):
        super().__init__()
        self.prompt_keys, self.prompt_values = prompts.keys, prompts.values  # (n, H_kv, P, D)
        self.window = getattr(prompts, "sliding_window", 1 << 30)  # tokens
        self.attended = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.attended:
            raise InputError(f"--rollout-engine hf: the model's attention takes no keyword arguments: {NOT_GROUPED}")
        self.attended = False
        t, new = self.get_seq_length(), (key_states, value_states)
        if t % ROOM == 0:
            room = [own.new_empty(*own.shape[:2], ROOM, own.shape[3]) for own in new]
            self._buffers = [torch.cat(pair, 2) for pair in zip((self.keys, self.values), room)] if t else room
            self.is_initialized = True
        for buffer, own in zip(self._buffers, new):
            buffer[:, :, t : t + 1] = own
        self.keys, self.values = (buffer[:, :, : t + 1] for buffer in self._buffers)
        return self.keys, self.values

    def reorder_cache(self, indices: torch.Tensor) -> None:
        if t := self.get_seq_length():
            self._buffers = [buffer[indices] for buffer in self._buffers]
            self.keys, self.values = (buffer[:, :, :t] for buffer in self._buffers)


def can_group(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether GroupCache can replace `cache`: packed_attention, and every layer is full or sliding-window attention."""
    config = model.config.get_text_config()
    if config.model_type in ("diffllama", "hrm_text", "jetmoe"):  # their attention changes cached keys
        return False
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    special = ("attention_chunk_size", "num_kv_shared_layers", "attn_logit_softcapping", "kv_lora_rank")
    unknown = any(getattr(config, name, None) for name in special)
    return plain and not unknown and model.config._attn_implementation in PACKED


def _attend(q, k, v, hidden=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (..., m, D) and the log-sum-exp (..., m, 1) of its scores, in fp32. Leaves out the hidden keys."""
    scores = q @ k.mT.float()
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse).exp_() @ v.float(), lse


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits (B, V) with the repetition penalty of CTRL (arXiv 1909.05858) on the tokens seen (B, V)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def sample_tokens(logits, sampling: Sampling, seeds: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling of one token per row. logits (B, V), seeds (B,); returns (token, log_prob), both (B,). The
    noise of a row depends only on its seed and on the position t."""
    logits = logits.float()
    if sampling.temperature == 0:
        token = logits.argmax(-1)
    else:
        logits = logits * (1 / sampling.temperature)
        if sampling.truncation is not None:
            logits = logits.masked_fill(logits < least_kept(logits, *sampling.truncation), NEVER)
        cdf = logits.softmax(-1).cumsum(-1)  # (B, V)
        uniform = (splitmix64(seeds + (t << 32)) & 0xFFFFFF).float() / 2**24  # [0, 1)
        token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0].clamp(max=cdf.shape[1] - 1)
    return token, log_probs_of(logits, token)
