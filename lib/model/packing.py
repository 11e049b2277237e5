"""From a batch to a forward over packed rows, and back. Padding never enters the model: the sequences of a micro-batch
are packed into one row, in which a prompt that several rows share occurs once. attention.py keeps them apart."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import register_dataclass, tree_map_only
from transformers import PreTrainedModel

from lib.data import LAYOUT, on_host, prepare_dynamic_batch, prompt_groups, restore_dynamic_batch
from lib.data.vision import text_positions
from lib.data_proto import DataProto
from lib.distributed import RowGroup, TakeOwn, all_to_all, fsdp_modules
from lib.model.vision import images_of


class PackedRun(NamedTuple):
    """Consecutive sequences of the packed row that go into one batched SDPA call."""

    tokens: int
    count: int  # type: ignore[assignment]  # tuple has a method of this name
    length: int  # tokens of each sequence; if `places` is given, of the longest
    prompt_run: int | None = None  # for responses to shared prompts, the number of the run that holds these prompts
    places: torch.Tensor | None = None
    """(count, P + length), each prompt and response, padded at the end: indices into the prompts' run and then this"""
    real: torch.Tensor | None = None  # (tokens,), the indices of real tokens among the count * length with padding
    blocks: torch.Tensor | None = None
    """(count, length), numbers of the images whose tokens see each other, -1 for text; None if there are none"""


@dataclass
class PackedRuns:
    """A dataclass, because torch.compile specialises on lists and would recompile the layers for each layout."""

    runs: list[PackedRun]


@dataclass
class PackedSequences:
    """The S sequences of the packed row, for one call of varlen attention."""

    keys: torch.Tensor | None
    """(M,), the tokens that sequences attend to, as indices into the packed row; None: each token once, in order"""
    cu_seq_q: torch.Tensor  # (S + 1,) int32: where each sequence's queries begin, and N
    cu_seq_k: torch.Tensor  # (S + 1,) int32: where each sequence's keys begin, and M
    max_q: int
    max_k: int


register_dataclass(PackedRuns)
register_dataclass(PackedSequences)


class SequenceRows(NamedTuple):
    """How to take a packed row apart into right-padded rows, which causal layers compute as if each were alone."""

    places: list[torch.Tensor]
    """one tensor (count, length) for each set of rows of about equal length: the token's index in the packed row. A
    response to a shared prompt has that prompt before it. Padding repeats the row's last token"""
    back: torch.Tensor  # (N,), for each token of the packed row: its index in these rows, concatenated


Forward = Callable[[dict, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def of_responses(
    model: PreTrainedModel, batch: DataProto, forward: Forward, *, padding_free=True, share_prompts=True, row_group=None
) -> tuple[torch.Tensor, ...]:
    """Runs `forward(inputs, select, y)` on the trained tokens y (n,). Its results (n,) come back as rows (B, T), which
    are zero where response_mask is.
    batch: `input_ids`, `attention_mask`, `position_ids` (B, L), `responses`, `response_mask` (B, T). padding_free,
    share_prompts: False switches them off here; True is what `load_model` has decided. row_group: ranks that run their
    batches as one (packed_sdpa only), in collectives. A rank's batch may be empty, but not those of all ranks."""
    responses = batch.batch["responses"]
    if row_group is None:
        inputs, select, target = _response_inputs(model, batch, padding_free, share_prompts)
        results = forward(inputs, select, responses.flatten()[target])
    else:
        results, target = _of_group(model, batch, forward, share_prompts, row_group)
    return tuple(x.new_zeros(responses.numel()).index_copy(0, target, x).view_as(responses) for x in results)


@torch.no_grad()
def in_micro_batches(
    model: PreTrainedModel, batch: DataProto, forward: Forward, micro_batch_tokens: int, **layout: Any
) -> list[torch.Tensor]:
    """`of_responses` of a whole batch without gradients. layout: its options. A collective."""
    packing = layout.get("padding_free", True) and model.padding_free
    sharing = layout.get("share_prompts", True) and packing and model.share_prompts
    layout |= {"padding_free": packing, "share_prompts": sharing}
    micro_batches, rows = prepare_dynamic_batch(batch, micro_batch_tokens, **layout)
    parts = [of_responses(model, micro, forward, **layout) for micro in micro_batches]
    for module in fsdp_modules(
        model
    ):  # without a backward FSDP2 keeps the root whole: a reference's in the update, too
        module.reshard()
    return [restore_dynamic_batch(torch.cat(tensors), rows) for tensors in zip(*parts)]


def _of_group(
    model: PreTrainedModel, batch: DataProto, forward: Forward, share_prompts: bool, row_group: RowGroup
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(results, target) for this rank's trained tokens. All rows of the group make one packed row. In sequence
    parallelism each rank runs a share of the tokens, and sends a token's results to the rank that owns its row. In
    tensor parallelism each rank runs all tokens with a share of the weights, and keeps its own rows' results."""
    group, rank = row_group.ranks, row_group.ranks.rank()
    rows = batch.select([*LAYOUT, "responses"], [])
    rows.batch["rank"] = torch.full((len(rows),), rank, device=batch.batch["responses"].device)
    rows = rows.all_gather(group)
    inputs, select, target = _response_inputs(model, rows, True, share_prompts)
    y, T = rows.batch["responses"].flatten()[target], rows.batch["responses"].shape[1]
    owner = rows.batch["rank"][target // T]  # (n,)
    own, before = owner == rank, (rows.batch["rank"] < rank).sum() * T  # before: tokens in the rows of lower ranks
    if row_group.split == "weights":
        results = torch.stack(forward(inputs, select, y), 1)
        return TakeOwn.apply(results, own.nonzero()[:, 0], group).unbind(1), target[own] - before

    inputs, tokens = _share_of_tokens(inputs, group)
    here = select // tokens == rank  # (n,): whether this rank runs the token
    results = torch.stack(forward(inputs, select[here] - rank * tokens, y[here]), 1)
    runner = select[own] // tokens
    send, receive = (ranks.bincount(minlength=group.size()).tolist() for ranks in (owner[here], runner))
    results = all_to_all(results, group, send, receive)
    return results.unbind(1), target[own][runner.argsort(stable=True)] - before


def _share_of_tokens(inputs: dict, group: dist.ProcessGroup) -> tuple[dict, int]:
    """(this rank's share of the inputs, its number of tokens). All shares are equal: the last ends with padding."""
    n, N = group.size(), inputs["input_ids"].shape[1]
    padding = -N % n
    tensors = {name: F.pad(inputs[name], (0, padding)) for name in ("input_ids", "position_ids")}
    tensors = {name: x.chunk(n, 1)[group.rank()] for name, x in tensors.items()}
    inputs = inputs | tensors | {"sequence_group": group}
    if padding and "packed_runs" in inputs:
        runs = inputs["packed_runs"].runs
        inputs["packed_runs"] = PackedRuns([*runs, PackedRun(padding, 1, padding)])
    elif padding:
        inputs["packed_sequences"] = _with_padding(inputs["packed_sequences"], padding)
    return inputs, (N + padding) // n


def _with_padding(packed: PackedSequences, padding: int) -> PackedSequences:
    """One more sequence, of `padding` tokens that attend to themselves."""
    N, keys = int(packed.cu_seq_q[-1]), packed.keys
    if keys is not None:
        keys = torch.cat([keys, torch.arange(N, N + padding, device=keys.device)])
    cu_seq_q, cu_seq_k = (torch.cat([x, x[-1:] + padding]) for x in (packed.cu_seq_q, packed.cu_seq_k))
    return PackedSequences(keys, cu_seq_q, cu_seq_k, max(packed.max_q, padding), max(packed.max_k, padding))


def _response_inputs(
    model: PreTrainedModel, batch: DataProto, padding_free: bool, share_prompts: bool
) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """(inputs, select, target). inputs: what the decoder takes. select (n,): for each trained token, the index in the
    decoder's layout of the position that predicts it. target (n,): its own index in the flattened response_mask. A row
    may hold several consecutive sequences (lib/agent): one begins wherever position_ids is 0."""
    padding_free = padding_free and model.padding_free
    device, media = batch.batch["input_ids"].device, batch.non_tensor_batch.get("multi_modal_inputs")
    batch = on_host(batch)
    ids, attention, positions, trained = (batch.batch[name] for name in LAYOUT)
    rope = positions[:, None] if positions.ndim == 2 else positions[:, 1:]  # (B, 1, L), with mrope (B, 3, L)
    attention, positions, trained = attention.bool(), text_positions(positions), trained.bool()
    L, T = ids.shape[1], trained.shape[1]
    target = trained.flatten().nonzero()[:, 0]  # (n,)
    row, column = target // T, L - T - 1 + target % T  # token t of the response is predicted one place to its left
    if len(target):  # no result depends on what comes after the last position of a row that predicts a trained token
        predicts = torch.zeros_like(attention)
        predicts[row, column] = True
        attention = attention & (predicts.flip(1).cumsum(1).flip(1) > 0)
    owner = own = torch.arange(len(ids))  # (B,): the row whose prompt stands for this row's
    if share_prompts and padding_free and model.share_prompts:
        owner = _prompt_owners(prompt_groups(batch), attention.any(1) & (positions[:, L - T] > 0))
    shared = owner.bincount(minlength=len(ids))[owner] > 1  # (B,)
    attention[:, : L - T] &= (owner == own)[:, None]
    first = attention & (positions == 0)
    first[:, L - T] |= attention[:, L - T] & shared  # a response to a shared prompt is a sequence of its own

    token = attention.flatten().nonzero()[:, 0]  # (N,)
    sequence = first.flatten()[token].cumsum(0) - 1  # (N,)
    lengths = sequence.bincount().tolist()  # (S,)
    prompt = _prompts_of_sequences(first.nonzero().tolist(), owner.tolist(), shared.tolist(), L - T)  # (S,)
    # a run holds whole sequences of equal length, or responses of about equal length to prompts of equal length
    kinds = [(0, n) if p is None else (lengths[p], -(-n // 16)) for n, p in zip(lengths, prompt)]
    order = sorted(range(len(kinds)), key=lambda i: kinds[i])
    rank = torch.tensor(order).argsort()
    token = token[rank[sequence].argsort(stable=True)]
    rope = rope.transpose(0, 1).flatten(1)[:, token]  # (1, N), with mrope (3, N)
    inputs = {"input_ids": ids.flatten()[token][None], "position_ids": rope if len(rope) == 1 else rope[:, None]}
    place = torch.zeros_like(ids).flatten()  # (B * L,)
    place[token] = torch.arange(len(token))
    row = torch.where(column < L - T, owner[row], row)
    select = place[row * L + column]
    if not padding_free:
        [places], back = sequence_rows(order, lengths, prompt, one_size=True)
        positions = rope[:, places]
        if len(rope) == 1:
            positions = rope[0, places[:, :1]] + torch.arange(places.shape[1])  # they count on in padding
        inputs = {"input_ids": inputs["input_ids"][0, places], "position_ids": positions}
        place, select = back[place], back[select]
    tower = batch.meta_info.get("run_tower", ())
    # where no row is trained on, no result needs an image, and nothing says which placeholders were sampled
    seen, shape = attention & bool(len(target)), inputs["input_ids"].shape
    images = images_of(model, media, ids, trained, seen, place, shape, tower)
    if images is not None:
        inputs["images"] = images
    if not padding_free:
        return _to(device, (inputs, select, target))
    if model.takes_rows:
        inputs["sequence_rows"] = sequence_rows(order, lengths, prompt)
    if model.config._attn_implementation.startswith("flash"):
        cu_seqlens = F.pad(torch.tensor([lengths[i] for i in order]).cumsum(0), (1, 0)).int()
        inputs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        inputs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    else:
        if model.config._attn_implementation == "varlen":
            inputs["packed_sequences"] = _packed_sequences(order, lengths, prompt)
        else:
            blocks = None if images is None else images.blocks
            inputs["packed_runs"] = PackedRuns(_packed_runs(order, kinds, lengths, prompt, blocks))
        # transformers passes a 4-D mask on as it is; without a mask it would build a dense (N, N) one
        inputs["attention_mask"] = torch.empty(1, 1, 1, 1, device=device)
    return _to(device, (inputs, select, target))


def _to(device: torch.device, tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=True), tree)


def _prompt_owners(group: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """(B,): for each row that answers its prompt, the first such row of its group; for the others, the row itself."""
    first_of: dict[int, int] = {}
    rows = enumerate(zip(group.tolist(), answers.tolist()))
    return torch.tensor([first_of.setdefault(number, row) if answer else row for row, (number, answer) in rows])


def _prompts_of_sequences(starts: list[list[int]], owner: list[int], shared: list[bool], column: int) -> list:
    """The shared prompt that each sequence answers, or None. starts: [row, column] of its first token. column: where
    responses begin."""
    prompt_of = {row: i for i, (row, start) in enumerate(starts) if start < column}
    return [prompt_of[owner[row]] if start == column and shared[row] else None for row, start in starts]


def _packed_runs(
    order: list[int], kinds: list[tuple], lengths: list[int], prompt: list[int | None], blocks: torch.Tensor | None
) -> list[PackedRun]:
    """The runs of the packed row, in `order`: each has sequences of one kind, (tokens of the shared prompt, length).
    blocks (1, N): the image of each token, which whole sequences see together; responses to shared prompts are text."""
    runs: list[PackedRun] = []
    run_of: dict[int, int] = {}  # for each sequence, the number of its run
    begin: dict[int, int] = {}  # for each sequence, where it begins in its run
    for (P, _), group in itertools.groupby(order, key=lambda i: kinds[i]):
        members = list(group)
        sizes = [lengths[i] for i in members]
        begin |= dict(zip(members, itertools.accumulate(sizes, initial=0)))
        run_of |= dict.fromkeys(members, len(runs))
        prompt_run = places = real = own = None
        if blocks is not None and not P:
            begun = sum(run.tokens for run in runs)
            own = blocks[0, begun : begun + sum(sizes)].view(len(members), -1)
            own = own if (own >= 0).any() else None
        if P:
            prompt_run = run_of[prompt[members[0]]]
            column, size = torch.arange(max(sizes)), torch.tensor(sizes)[:, None]
            first = torch.tensor([[begin[prompt[i]], runs[prompt_run].tokens + begin[i]] for i in members])
            places = torch.cat([first[:, :1] + torch.arange(P), first[:, 1:] + column.minimum(size - 1)], 1)
            real = (column < size).flatten().nonzero()[:, 0]
        runs.append(PackedRun(sum(sizes), len(members), max(sizes), prompt_run, places, real, own))
    return runs


def _packed_sequences(order: list[int], lengths: list[int], prompt: list[int | None]) -> PackedSequences:
    """The sequences, in `order`; the keys of one that answers a shared prompt are that prompt's and its own."""
    sizes = [lengths[i] for i in order]
    begin = dict(zip(order, itertools.accumulate(sizes, initial=0)))
    keys = [[*([] if (p := prompt[i]) is None else [p]), i] for i in order]  # the sequences whose tokens each one sees
    totals = [sum(lengths[j] for j in seen) for seen in keys]
    places = None
    if any(p is not None for p in prompt):
        places = torch.cat([torch.arange(begin[j], begin[j] + lengths[j]) for seen in keys for j in seen])
    cu_seq_q, cu_seq_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (sizes, totals))
    return PackedSequences(places, cu_seq_q, cu_seq_k, max(sizes), max(totals))


def sequence_rows(order: list[int], lengths: list[int], prompt: list, *, one_size: bool = False) -> SequenceRows:
    """SequenceRows of the sequences that stand in `order` in the packed row. prompt[i] is the number of the shared
    prompt that sequence i answers, or None. one_size: all rows get the length of the longest."""
    begin, N = {}, 0  # begin: for each sequence, the index of its first token
    for i in order:
        begin[i], N = N, N + lengths[i]
    length = {i: lengths[i] + (0 if prompt[i] is None else lengths[prompt[i]]) for i in order}
    shared = set(prompt)
    rows = sorted((i for i in order if i not in shared), key=lambda i: length[i])
    sizes = [math.inf if one_size else int(4 * math.log2(length[i])) for i in rows]  # at most a fifth is padding
    places, back, offset, placed = [], torch.empty(N, dtype=torch.long), 0, set[int | None]()
    for size in sorted(set(sizes)):
        members = [i for i, own in zip(rows, sizes) if own == size]
        P = torch.tensor([length[i] - lengths[i] for i in members])[:, None]
        n = torch.tensor([length[i] for i in members])[:, None]
        first = torch.tensor([[begin[i if prompt[i] is None else prompt[i]], begin[i]] for i in members])
        column = torch.arange(int(n.max())).minimum(n - 1)  # (count, length)
        place = torch.where(column < P, first[:, :1] + column, first[:, 1:] + column - P)
        new = []  # whether the shared prompt has no place yet
        for i in members:
            new.append([prompt[i] not in placed])
            placed.add(prompt[i])
        taken = (torch.arange(column.shape[1]) < n) & (torch.tensor(new) | (column >= P))
        back[place[taken]] = offset + taken.flatten().nonzero()[:, 0]
        places.append(place)
        offset += place.numel()
    return SequenceRows(places, back)
