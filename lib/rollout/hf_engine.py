"""The engine `hf`: samples with the trainer's own model, through transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from lib import InputError
from lib.data.vision import Media, media_of
from lib.data_proto import DataProto
from lib.distributed import compute_device, device_setter, unsharded
from lib.model import NEVER, SAMPLED_BY_HF, carries_state, least_kept, log_probs_of
from lib.model.routing import chosen_experts
from lib.model.vision import cache_keyword, images_of_prompts
from lib.rollout.engine import Generated, SteppedEngine, add_responses, row_limits, stop_token_ids
from lib.rollout.group_cache import GroupCache, can_group
from lib.sampling import Sampling, splitmix64

LONG_PROMPT = 128  # tokens; to copy a shorter prompt's cache to each row costs less than GroupCache


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
        prompt_ids, samplings, seeds, media = zip(*map(self._waiting.pop, ids))
        limits = [sampling.max_response_length for sampling in samplings]
        return dict(zip(ids, self._sample(prompt_ids, media, samplings[0], seeds, limits)))

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        with self.session():
            raw_ids = prompts.non_tensor_batch["raw_prompt_ids"]
            limits = row_limits(prompts, sampling)
            rows = self._sample(raw_ids, media_of(prompts), sampling, seeds, limits) if limits else []
        return add_responses(prompts, rows, self.pad_token_id)

    @torch.no_grad()
    def _sample(self, prompt_ids, media, sampling: Sampling, row_seeds, row_limits: list[int]) -> list[Generated]:
        """Row i gets at most row_limits[i] tokens, whatever sampling.max_response_length says."""
        device = compute_device(self.model)
        stop_ids = self.stop_ids.to(device)
        seeds, limits = torch.tensor(row_seeds, device=device), torch.tensor(row_limits, device=device)  # (R,)

        prompts, numbers = distinct_prompts(prompt_ids, media)
        prompt_of_row = torch.tensor(numbers, device=device)  # (R,)
        texts = [torch.tensor(own) for own, _ in prompts]
        ids = pad_sequence(texts, True, self.pad_token_id, "left").to(device)  # (n, P)
        mask = pad_sequence([torch.ones_like(own) for own in texts], True, 0, "left").to(device)
        cache = DynamicCache(config=self.model.config)
        logits, positions = self._prefill(ids, mask, [own for _, own in prompts], cache)
        routes = []  # of the prompts (n, P, layers, k), then of each token (R, layers, k)
        if self.route_layers:
            routes.append(chosen_experts(self.model).unflatten(0, ids.shape))
        grouped = ids.shape[1] >= LONG_PROMPT and can_group(self.model, cache)
        if grouped:
            cache = GroupCache(cache, mask == 0, prompt_of_row)
        else:
            cache.reorder_cache(prompt_of_row)
        seen = None
        if sampling.repetition_penalty != 1:  # (R, V): the tokens that each row has
            seen = torch.zeros_like(logits, dtype=torch.long).scatter_add_(1, ids, mask)[prompt_of_row] > 0
        attended = None if grouped or mask.all() else mask[prompt_of_row]  # (R, P + t), of rows with padding
        logits = logits[prompt_of_row]
        position = positions.amax(1, keepdim=True)[prompt_of_row]

        tokens, log_probs = [], []  # (R,) at each t
        lengths, stopped = torch.zeros_like(limits), torch.zeros_like(limits, dtype=torch.bool)
        rows = torch.arange(len(seeds), device=device)  # the rows that still run
        for t in range(int(limits.max())):
            if seen is not None:
                logits = penalise(logits, seen, sampling.repetition_penalty)
            token, log_prob = sample_tokens(logits, sampling, seeds, t)
            tokens.append(torch.full_like(lengths, self.pad_token_id).index_copy_(0, rows, token))
            log_probs.append(log_prob.new_zeros(len(lengths)).index_copy_(0, rows, log_prob))
            stops = torch.isin(token, stop_ids)
            if sampling.stop:
                stops |= self._stop_strings(sampling.stop, tokens, rows)

            running = ~stops & (limits > t + 1)
            if not running.all():
                stopped[rows], lengths[rows] = stops, t + 1  # final in the rows that end
                keep = running.nonzero()[:, 0]
                if not len(keep):
                    break
                rows, seeds, limits, token, position = (x[keep] for x in (rows, seeds, limits, token, position))
                attended, seen = (None if x is None else x[keep] for x in (attended, seen))
                cache.reorder_cache(keep)

            position = position + 1
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
            if attended is not None:
                attended = F.pad(attended, (0, 1), value=1)
            inputs = cache.inputs if grouped else {"attention_mask": attended}
            inputs = inputs | {self._cache_keyword: cache}
            logits = self.model(input_ids=token[:, None], position_ids=position, **inputs).logits[:, -1]
            if routes:
                new = chosen_experts(self.model)
                routes.append(new.new_full((len(lengths), *new.shape[1:]), -1).index_copy(0, rows, new))

        columns = (torch.stack(tokens, 1), torch.stack(log_probs, 1), lengths, stopped)  # (R, t), t of the longest
        found = zip(*(column.tolist() for column in columns))
        generated = [Generated(ids[:n], lps[:n], "stop" if stop else "length") for ids, lps, n, stop in found]
        if routes:
            add_routes(generated, routes, [len(own) for own, _ in prompts], prompt_of_row)
        return generated

    def _prefill(
        self, ids: torch.Tensor, mask: torch.Tensor, media: list[Media | None], cache: DynamicCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits (n, V) after each prompt, positions (n, P)). ids, mask: left-padded. Fills the cache."""
        n, P = ids.shape
        if any(media):
            last = torch.arange(1, n + 1, device=ids.device) * P - 1
            return self._logits_with_images(ids, mask, media, last, cache)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = {"attention_mask": None if mask.all() else mask, self._cache_keyword: cache}
        return self.model(input_ids=ids, position_ids=positions, logits_to_keep=1, **inputs).logits[:, -1], positions

    def _stop_strings(self, stop: tuple[str, ...], tokens: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """(len(rows),) bool: whose last token completes a stop string. tokens: (R,) at each t."""
        # in tokens: each has at least one byte, and the first loses a space
        longest = max(len(text.encode()) for text in stop) + 1
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
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        if images is not None:
            inputs["images"] = images
        if cache is not None:
            inputs[self._cache_keyword] = cache
        logits = self.model.prompt_logits(inputs, select)
        return logits, positions if positions.ndim == 2 else positions.amax(0)


def distinct_prompts(prompt_ids, media) -> tuple[list[tuple[list[int], Media | None]], list[int]]:
    """(the distinct prompts: token ids and images, the number of each row's prompt). Equal ids may stand for other
    images."""
    keys = [(tuple(own.ids), own.hash) if own else (tuple(ids), 0) for ids, own in zip(prompt_ids, media)]
    distinct = dict(zip(keys, media))
    number = {key: i for i, key in enumerate(distinct)}
    return [(list(ids), own) for (ids, _), own in distinct.items()], [number[key] for key in keys]


def add_routes(generated: list[Generated], routes: list[torch.Tensor], lengths, prompt_of_row: torch.Tensor) -> None:
    """routes: see _sample. lengths: tokens of each prompt. No row has routes of its last token, which the model did not
    compute."""
    of_prompts = routes[0].cpu()
    of_tokens = torch.stack([routes[0][prompt_of_row, 0], *routes[1:]])[1:].cpu()
    for i, (row, prompt) in enumerate(zip(generated, prompt_of_row.tolist())):
        before = of_prompts[prompt, of_prompts.shape[1] - lengths[prompt] :]
        row.routed_experts = torch.cat([before, of_tokens[: len(row.token_ids) - 1, i]])


def known_cache(model: PreTrainedModel) -> str:
    """The keyword by which the model takes a cache. Raises InputError if this engine would sample from another policy
    than training computes: the model has its own kind of cache, or its layers carry a state through padding."""
    name, model_type = cache_keyword(model), model.config.get_text_config().model_type
    if not name or (carries_state(model) and model_type not in SAMPLED_BY_HF):
        kind = type(model).__name__.removeprefix("FSDP")
        raise InputError(f"--rollout-engine hf does not know how {kind} keeps its state: take vllm")
    return name


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits (B, V) with CTRL's repetition penalty (arXiv 1909.05858) on the tokens seen (B, V)."""
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
        token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
        token = token.clamp(max=cdf.shape[1] - 1)
    return token, log_probs_of(logits, token)
