"""The interface of a rollout engine, and what engines share: seeds, and the batch that they return.

`hf` samples with the trainer's own model, `vllm` is an engine in this process: both are a
SteppedEngine. `http://host:port` is a vLLM server (servers/engine.py). A user's class inherits
RolloutEngine. The rest of lib/ asks an engine what it can do, not which one it is.

Tokens in, tokens out: prompts are `raw_prompt_ids`, with one placeholder for each image, and
responses stay tokens up to the loss. A response depends on its own seed, not on its batch or rank.
rollout_log_probs are of the distribution sampled from (temperature, top-p, top-k, min-p)."""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lib import InputError
from lib.columns import COLUMNS, OF_PROMPTS
from lib.data import pad_rows
from lib.data.chat_template import end_of_turn
from lib.data.vision import Media
from lib.data_proto import DataProto
from lib.distributed import Metric, all_reduce_max
from lib.model.routing import ROUTES, routes_column
from lib.sampling import Sampling, splitmix64

REPORT_S = 60.0  # how often a rollout says what it waits for


@dataclass
class Generated:
    """What was sampled for one request."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" (after an end token or a stop string), "length" or "abort"
    weight_versions: list[int] = field(default_factory=list)  # one per token, if recorded
    routed_experts: torch.Tensor | None = None  # of prompt and response, if the engine returns them


@dataclass(eq=False)
class Response:
    """A response in flight (servers/engine.py)."""

    seed: int
    row: Generated  # what has been sampled of it before the last sync of weights
    future: Future  # gives the whole Generated


class ImageProbe(NamedTuple):
    """A prompt with an image, and a text of random tokens after it."""

    raw_ids: list[int]  # with one placeholder for the image
    media: Media
    text: int  # tokens after the image


class RolloutEngine(Protocol):
    """What every engine has. If the model is split over ranks, the calls are collectives.
    make_engine constructs it as Class(model, tokenizer, **settings); see there for the settings."""

    in_process: bool = False  # whether it is a SteppedEngine
    asynchronous: bool = False  # whether it samples while ranks train
    shares_weights: bool = False  # whether it samples with the trainer's own tensors, and needs no load_weights
    takes_weights: bool = True  # False: it does not sample from the policy, and gets no weights
    takes_images: bool = False
    gives_routes: bool = False  # whether it returns routed_experts if `route_layers` is set

    version: int | None = None  # of the weights that it holds; None before the first load_weights
    checksum: int | None = None  # weight_checksum of the weights that load_weights gave it
    dtype: torch.dtype | None = None  # of its weights; None: the trainer's
    lora_sync: str = "merged"  # or "adapter": LoRA's adapters come by themselves
    verified: Mapping[str, float] = MappingProxyType({})  # metrics of its last sync
    pad_token_id: int
    route_layers: Sequence[int] = ()  # the numbers of the layers whose experts it returns
    no_routes: torch.Tensor | None = None  # (0, layers, k) of these layers
    image_probe: ImageProbe | None = None  # what sync_weights also probes a vision model with

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        """One response per row of `prompts`; row i is sampled with seeds[i], and has at most row_limits[i] tokens."""
        ...

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """Copies the trainer's weights, and sets version and checksum."""
        raise NotImplementedError

    def probe_log_probs(self, ids: list[int], media: Media | None = None) -> torch.Tensor:
        """Log-probs of ids[1:] (with images: of media.ids[1:]) at temperature 1: (n,), or (servers, n)."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Frees the engine's memory for the update. load_weights wakes it."""

    def close(self) -> None: ...

    def metrics(self) -> dict[str, Metric]:
        """Of the step, besides those of its responses."""
        return {}

    def batch_metrics(self, batch: DataProto) -> dict[str, Metric]:
        """Of responses that it sampled. A collective."""
        return {}


class SteppedEngine(RolloutEngine, Protocol):
    """An engine in this process, which agent steps. Requests are made in `with engine.session():`."""

    in_process: bool = True
    long_steps: bool  # whether one step() runs its requests to their end
    shared: bool  # whether other ranks hold a part of it, and step together with this one

    def session(self) -> AbstractContextManager[None]: ...

    def submit(self, request_id: str, prompt_ids, sampling: Sampling, seed: int, media: Media | None = None) -> None:
        """prompt_ids: with a placeholder for each image. Raises ValueError for a too long prompt."""

    def step(self) -> dict[str, Generated]:
        """Returns the requests that ended, by request_id."""
        ...

    def abort(self, request_id: str) -> None: ...


class NoRecorder:
    """Computes everything, as Recorder and Replayer do in validation, between `end` and `begin`."""

    replays = False  # whether steps get what was recorded
    replaying = False  # whether the present step does: not between steps

    def begin(self, step: int) -> None: ...

    def record(self, name: str, produce: Callable[[], DataProto]) -> DataProto:
        """The step's next input of this name: computed, or as it was recorded."""
        return produce()

    def rollout(self, prompts: DataProto, produce: Callable[[], DataProto], any_order: bool = False) -> DataProto:
        """The responses to `prompts`, row by row; any_order: to as many groups of other prompts."""
        return self.record("rollout", produce)

    def end(self, batch: DataProto) -> None:
        """The step takes no more. batch: that of the update."""


def row_limits(prompts: DataProto, sampling: Sampling) -> list[int]:
    """The most tokens of each response: the column max_response_length, or the same for all."""
    limits = prompts.non_tensor_batch.get("max_response_length")
    return [sampling.max_response_length] * len(prompts) if limits is None else limits.tolist()


def report_states(seconds: float, states: list[str]) -> None:
    """Says what a rollout waits for. states: one for each response."""
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states).items())
    print(f"rollout: {seconds:.0f} s, responses: {counts}", flush=True)


def request_seeds(seed: int, step: int, rows: list[int]) -> list[int]:
    """A seed for each response, from (run seed, step, row of the global batch): the same for any number of ranks."""
    high, low = divmod(seed, 1 << 15)  # low << 48 still fits in an int64
    mixed = splitmix64(torch.tensor(rows) + (step << 24) + (low << 48))
    if high:
        mixed = splitmix64(mixed + high)
    return (mixed & 0x7FFFFFFF).tolist()


def turn_seed(seed: int, turn: int) -> int:
    """The seed of an episode's turn. Turn 0 has the row's own seed, as a single turn has."""
    if turn == 0:
        return seed
    number = -seed - (turn << 32)  # < 0; a token's noise hashes a number > 0
    return int(splitmix64(torch.tensor(number))) & 0x7FFFFFFF


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All end tokens of the tokenizer, the model's generation config (chat models often have two), and the
    chat template (a base model's config often does not name it)."""
    eos = model.generation_config.eos_token_id
    ids = set(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    return sorted(i for i in ids if i is not None)


def check_expanded(engine: str, expected: list[int], got: Sequence[int]) -> None:
    """Raises InputError unless a prompt with images has the same tokens in the engine (`got`) as in
    training. The engine expands the placeholders itself, and does not report a missing image."""
    if expected != list(got):
        advice = "start the server with this run's --model" if "://" in engine else "see --vllm-kwargs"
        made = f"of a prompt with images the engine made {len(got)} tokens, training {len(expected)}, or other ones"
        why = "the engine's image processor is another"
        raise InputError(f"--rollout-engine {engine}: {made}: {why}; {advice}")


def add_responses(
    prompts: DataProto, rows: list[Generated], pad_token_id: int, masks: Sequence | None = None, position_ids=None
) -> DataProto:
    """The prompts with their responses: what every engine returns. A collective. P and T are the
    longest prompt (left-padded) and response (right-padded) over all ranks. Rows that ended by
    "abort" or "error" have no trained token. masks: which tokens were sampled, if not all.
    position_ids, (n,) or with mrope (4, n) each: if they do not simply follow the prompts'."""
    B, device = len(rows), prompts.batch["input_ids"].device
    lengths = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.long)
    P = all_reduce_max(max([1, *prompts.batch["attention_mask"].sum(1).tolist()]), device)
    T = all_reduce_max(max([1, *lengths.tolist()]), device)
    responses = torch.full((B, T), pad_token_id)
    rollout_log_probs = torch.zeros(B, T)
    response_mask = torch.zeros(B, T, dtype=torch.long)
    token_ids, log_probs, sampled = (x.numpy() for x in (responses, rollout_log_probs, response_mask))
    for i, row in enumerate(rows):  # by `array`: a tensor of each list takes seven times as long
        n = len(row.token_ids)
        token_ids[i, :n] = array("q", row.token_ids)
        log_probs[i, :n] = array("f", row.log_probs)
        if row.finish_reason not in ("abort", "error"):
            sampled[i, :n] = 1 if masks is None else array("q", masks[i])
    attended = (torch.arange(T) < lengths[:, None]).long().to(device)
    ids, mask, before = (prompts.batch[name] for name in ("input_ids", "attention_mask", "position_ids"))
    left = (P - ids.shape[1], 0)  # negative: drops columns that no rank needs
    ids, mask, before = F.pad(ids, left, value=pad_token_id), F.pad(mask, left), F.pad(before, left)  # (B, P)
    # (B, T), or with mrope (B, 4, T); an image's last token may not have the highest position
    positions = before.amax(-1, keepdim=True) + torch.arange(1, T + 1, device=device)
    for position, own in zip(positions, position_ids or []):
        own = torch.as_tensor(own)
        position[..., : own.shape[-1]] = own
    responses = responses.to(device)
    tensors = {
        "prompts": ids,
        "responses": responses,
        "input_ids": torch.cat([ids, responses], 1),  # (B, L)
        "attention_mask": torch.cat([mask, attended], 1),
        "position_ids": torch.cat([before, positions], -1),
        "response_mask": response_mask.to(device),
        "rollout_log_probs": rollout_log_probs.to(device),
    }
    if "multi_modal_hash" in prompts.batch:
        tensors["multi_modal_hash"] = prompts.batch["multi_modal_hash"]
    reasons = np.array([row.finish_reason for row in rows], dtype=object)
    objects = {**prompts.non_tensor_batch, "finish_reason": reasons}
    if any(row.routed_experts is not None for row in rows):
        objects[ROUTES] = routes_column([row.routed_experts for row in rows])
    return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info=prompts.meta_info)


def join_prefixes(rows: DataProto, prefixes: Sequence, batch: DataProto, pad_token_id: int) -> DataProto:
    """The rows with responses that begin with their prefixes. batch: what was sampled after these. A collective."""
    t, reasons = batch.batch, batch.non_tensor_batch["finish_reason"]
    lengths = t["attention_mask"][:, -t["responses"].shape[1] :].sum(1).tolist()
    routes = batch.non_tensor_batch.get(ROUTES, [None] * len(rows))
    joined, masks = [], []
    for i, (prefix, n) in enumerate(zip(prefixes, lengths)):
        ids = [*prefix, *t["responses"][i, :n].tolist()]
        log_probs = [0.0] * len(prefix) + t["rollout_log_probs"][i, :n].tolist()
        joined.append(Generated(ids, log_probs, reasons[i], routed_experts=routes[i]))
        masks.append([0] * len(prefix) + [1] * n)
    begun = add_responses(rows, joined, pad_token_id, masks)
    begun.batch["given_mask"] = given = torch.zeros_like(begun.batch["response_mask"])
    for row, prefix in zip(given, prefixes):
        row[: len(prefix)] = 1
    return begun


def add_weight_versions(batch: DataProto, rows: list[list[int]]) -> None:
    """Adds weight_versions (B, T), -1 where no token was sampled. rows: of each response."""
    versions = torch.full_like(batch.batch["responses"], -1)
    for row, own in zip(versions, rows):
        row[: len(own)] = torch.tensor(own)
    batch.batch["weight_versions"] = versions


def truncated_rows(batch: DataProto) -> torch.Tensor:
    """(B,) bool: responses that the limit cut off."""
    truncated = [reason == "length" for reason in batch.non_tensor_batch["finish_reason"]]
    return torch.tensor(truncated, device=batch.batch["response_mask"].device)


def prompts_of(rows: DataProto) -> DataProto:
    """The prompts of rows with responses, in the form of rollouts.prompts(); of prompts, these."""
    if "prompts" not in rows.batch:
        return rows
    P = rows.batch["prompts"].shape[1]
    tensors = {name: rows.batch[name][..., :P] for name in ("input_ids", "attention_mask", "position_ids")}
    if "multi_modal_hash" in rows.batch:
        tensors["multi_modal_hash"] = rows.batch["multi_modal_hash"]
    own = {name: x for name, x in rows.non_tensor_batch.items() if name in OF_PROMPTS or name not in COLUMNS}
    return DataProto.from_dict(tensors, own, rows.meta_info)


def concat_rows(batches: list[DataProto]) -> DataProto:
    """DataProto.concat of rollouts of any widths. If one has given tokens, given_mask of the others is 0."""
    if any(batch.batch is not None and "given_mask" in batch.batch for batch in batches):
        batches = [batch.select() for batch in batches if batch.batch is not None]
        for batch in batches:
            zeros = torch.zeros_like(batch.batch["response_mask"])
            batch.batch["given_mask"] = batch.batch.get("given_mask", zeros)
    full = [batch for batch in batches if len(batch)]
    if not full:  # perhaps with the keys of its columns
        return next((batch for batch in batches if batch.batch is not None), DataProto())
    return DataProto.concat(fit_columns(full))


def fit_columns(batches: list[DataProto]) -> list[DataProto]:
    """The same rows, with P and T columns, for the longest prompt and response of all batches."""
    masks = [(batch.batch["attention_mask"], batch.batch["responses"].shape[1]) for batch in batches]
    P = max(int(mask[:, :-width].sum(1).max()) for mask, width in masks)
    T = max(1, *(int(mask[:, -width:].sum(1).max()) for mask, width in masks))
    return [pad_rows(batch.select(), P, T) for batch in batches]
