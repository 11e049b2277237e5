"""From a batch to a forward over packed rows, and back. Padding never enters the model: the nodes of a micro-batch's
prefix tree are packed into one row, in which a shared prefix occurs once. attention.py keeps sequences apart."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.export import register_dataclass
from transformers import PreTrainedModel

from lib.data import LAYOUT, PrefixTree, on_host, prefix_tree, prepare_dynamic_batch, restore_dynamic_batch
from lib.data_proto import DataProto
from lib.distributed import RowGroup, all_to_all, fsdp_modules, take_own, to_device
from lib.model.routing import ROUTES, chosen_experts, routes_of_tokens, rows_of_routes
from lib.model.vision import images_of


class PackedRun(NamedTuple):
    """Consecutive nodes of the packed row that go into one batched SDPA call."""

    tokens: int
    count: int  # type: ignore[assignment]  # tuple has a method of this name
    length: int  # tokens of each node; if `places` is given, of the longest
    runs_above: tuple[int, ...] = ()  # the numbers of the runs that hold the nodes above these
    places: torch.Tensor | None = None
    """(count, P + length), each node's path, padded at the end: indices into the runs above, concatenated with this
    one; None for roots"""
    real: torch.Tensor | None = None  # (tokens,): the indices of real tokens among the count * length with padding
    blocks: torch.Tensor | None = None
    """(count, length): the image of each token, if an image's tokens see each other; -1 for text; None without any"""


@dataclass
class PackedRuns:
    """A dataclass, because torch.compile specialises on lists and would recompile the layers for each layout."""

    runs: list[PackedRun]


@dataclass
class PackedSequences:
    """The S nodes of the packed row, for one call of varlen attention."""

    keys: torch.Tensor | None  # (M,): each node's path, as indices into the packed row; None: each token once, in order
    cu_seq_q: torch.Tensor  # (S + 1,) int32: where each node's queries begin, and N
    cu_seq_k: torch.Tensor  # (S + 1,) int32: where each node's keys begin, and M
    max_q: int
    max_k: int


register_dataclass(PackedRuns)
register_dataclass(PackedSequences)


class SequenceRows(NamedTuple):
    """How to take a packed row apart into right-padded rows, one for each path to a leaf, and back."""

    places: list[torch.Tensor]
    """(count, length) for each set of rows of about equal length: indices into the packed row. Padding repeats a row's
    last token"""
    back: torch.Tensor  # (N,), for each token of the packed row: its index in these rows, concatenated


Forward = Callable[..., tuple[torch.Tensor, ...]]


def of_responses(
    model: PreTrainedModel,
    batch: DataProto,
    forward: Forward,
    *,
    padding_free=True,
    share_prompts=True,
    row_group=None,
    routes: list[torch.Tensor] | None = None,
    columns: Sequence[str] = (),
) -> tuple[torch.Tensor, ...]:
    """Runs `forward(inputs, select, y, *of_tokens)` on the trained tokens y (n,). Its results (n, ...) come back as
    rows (B, T, ...), zero where response_mask is.

    batch: `input_ids`, `attention_mask`, `position_ids` (B, L), `responses`, `response_mask` (B, T).
    padding_free, share_prompts: False switches them off here; True is what `load_model` has decided.
    row_group: ranks that run their batches as one (packed_sdpa only), in collectives; some may be empty.
    routes: gets the experts of each row's tokens, as in the column `routed_experts`.
    columns: (B, T, ...) of the batch; of_tokens are theirs (n, ...)."""
    responses = batch.batch["responses"]
    if row_group is None:
        inputs, select, target, place = _response_inputs(model, batch, padding_free, share_prompts)
        of_tokens = (batch.batch[name].flatten(0, 1)[target] for name in columns)
        results = forward(inputs, select, responses.flatten()[target], *of_tokens)
        if routes is not None:
            routes += rows_of_routes(chosen_experts(model).cpu(), on_host(batch).batch["attention_mask"], place)
    else:
        results, target = _of_group(model, batch, forward, share_prompts, row_group, routes, columns)
    size = responses.numel()
    rows = (x.new_zeros(size, *x.shape[1:]).index_copy(0, target, x) for x in results)
    return tuple(x.view(*responses.shape, *x.shape[1:]) for x in rows)


@torch.no_grad()
def in_micro_batches(
    model: PreTrainedModel, batch: DataProto, forward: Forward, micro_batch_tokens: int, routes=None, **layout: Any
) -> list[torch.Tensor]:
    """`of_responses` of a whole batch without gradients. layout: its options, and routes. A collective."""
    columns = layout.pop("columns", ())
    packing = layout.get("padding_free", True) and model.padding_free
    sharing = layout.get("share_prompts", True) and packing and model.share_prompts
    layout |= {"padding_free": packing, "share_prompts": sharing}
    micro_batches, rows = prepare_dynamic_batch(batch, micro_batch_tokens, **layout)
    found: list[torch.Tensor] | None = None if routes is None else []
    parts = [of_responses(model, micro, forward, routes=found, columns=columns, **layout) for micro in micro_batches]
    if found:
        routes += [found[i] for i in np.argsort([row for own in rows for row in own])]
    for module in fsdp_modules(model):  # without a backward FSDP2 would keep the root whole
        module.reshard()
    return [restore_dynamic_batch(torch.cat(tensors), rows) for tensors in zip(*parts)]


def _of_group(
    model: PreTrainedModel,
    batch: DataProto,
    forward: Forward,
    share_prompts: bool,
    row_group: RowGroup,
    routes: list[torch.Tensor] | None,
    columns: Sequence[str],
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(results, target) for this rank's trained tokens. All rows of the group make one packed row, gathered on the CPU
    so that the host does not wait for a GPU. In sequence parallelism each rank runs a share of the tokens, and sends
    their results to the ranks that own the rows. In tensor parallelism each rank runs all tokens with a share of the
    weights, and keeps its own rows' results."""
    group, rank, device = row_group.ranks, row_group.ranks.rank(), batch.batch["input_ids"].device
    rows = on_host(batch)
    rows.batch["rank"] = torch.full((len(rows),), rank)
    rows.batch.update({name: batch.batch[name].cpu() for name in columns})
    if ROUTES in batch.non_tensor_batch:
        rows.non_tensor_batch[ROUTES] = batch.non_tensor_batch[ROUTES]
    rows = rows.all_gather(group)
    inputs, select, target, place = _response_inputs(model, rows, True, share_prompts)
    T = rows.batch["response_mask"].shape[1]
    of_tokens = [rows.batch[name].flatten(0, 1)[target] for name in columns]
    of_tokens.insert(0, rows.batch["input_ids"][:, -T:].flatten()[target])
    owner = rows.batch["rank"][target // T]  # (n,)
    own, before = owner == rank, (rows.batch["rank"] < rank).sum() * T  # before: tokens in the rows of lower ranks
    own_target = target[own] - before

    def record(chosen: torch.Tensor) -> None:
        found = rows_of_routes(chosen.cpu(), rows.batch["attention_mask"], place)
        routes.extend(itertools.compress(found, (rows.batch["rank"] == rank).tolist()))

    if row_group.split == "weights":
        on_cpu = (inputs, select, of_tokens, own.nonzero()[:, 0], own_target)
        inputs, select, of_tokens, own, own_target = to_device(on_cpu, device)
        results = forward(inputs, select, *of_tokens)
        if routes is not None:
            record(chosen_experts(model))
        return _parted(take_own(_joined(results), own, group), results), own_target

    whole = inputs["input_ids"].shape[1]
    inputs, tokens = _share_of_tokens(inputs, group)
    model.real_tokens = slice(max(whole - rank * tokens, 0))  # the padding is at the end
    here = select // tokens == rank  # (n,): whether this rank runs the token
    runner = select[own] // tokens
    send, receive = (ranks.bincount(minlength=group.size()).tolist() for ranks in (owner[here], runner))
    own_target = own_target[runner.argsort(stable=True)]
    own_share = (inputs, select[here] - rank * tokens, [x[here] for x in of_tokens], own_target)
    inputs, select, of_tokens, own_target = to_device(own_share, device)
    results = forward(inputs, select, *of_tokens)
    if routes is not None:
        record(DataProto.from_dict({ROUTES: chosen_experts(model)}).all_gather(group).batch[ROUTES])
    return _parted(all_to_all(_joined(results), group, send, receive), results), own_target


def _joined(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """(n, ...) each, as (n, sum of sizes) for one collective. Token ids become floats, exact below 2^24."""
    return torch.cat([x[:, None].flatten(1) for x in results], 1)


def _parted(joined: torch.Tensor, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The rows of `_joined` in the shapes and dtypes of these results."""
    parts = joined.split([x.shape[1:].numel() for x in results], 1)
    return tuple(part.view(len(part), *x.shape[1:]).to(x.dtype) for part, x in zip(parts, results))


def _share_of_tokens(inputs: dict, group: dist.ProcessGroup) -> tuple[dict, int]:
    """(this rank's share of the inputs, its number of tokens). Shares are equal: the last one ends with padding."""
    n, N = group.size(), inputs["input_ids"].shape[1]
    padding = -N % n
    tensors = {name: F.pad(inputs[name], (0, padding)) for name in ("input_ids", "position_ids")}
    tensors = {name: x.chunk(n, 1)[group.rank()] for name, x in tensors.items()}
    inputs = inputs | tensors | {"sequence_group": group}
    if ROUTES in inputs:
        routes = F.pad(inputs[ROUTES], (0, 0, 0, 0, 0, padding), value=-1)
        inputs[ROUTES] = routes.chunk(n)[group.rank()]
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
) -> tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(inputs, select, target, place). inputs: what the decoder takes. select (n,): the position in its layout that
    predicts each trained token. target (n,): the token's index in the flattened response_mask.
    place (B * L,), on the CPU: where each token is in the layout, -1 if it is left out."""
    padding_free = padding_free and model.padding_free
    device, media = batch.batch["input_ids"].device, batch.non_tensor_batch.get("multi_modal_inputs", ())
    recorded = batch.non_tensor_batch.get(ROUTES, ())
    batch = on_host(batch)
    is_empty = len(batch) == 0  # collectives of other ranks' rows wait for this one's: it runs one token
    if is_empty:
        batch = DataProto.from_dict({name: x.new_zeros(1, *x.shape[1:]) for name, x in batch.batch.items()})
        batch.batch["attention_mask"][:, 0] = 1
    ids, attention, positions, trained = (batch.batch[name] for name in LAYOUT)
    trained = trained.bool()
    L, T = ids.shape[1], trained.shape[1]
    target = trained.flatten().nonzero()[:, 0]  # (n,)
    tree = prefix_tree(batch, share=share_prompts and padding_free and model.share_prompts)
    token, place = tree.token, tree.place  # (N,), (B * L,)
    rope = positions[:, None] if positions.ndim == 2 else positions[:, 1:]  # (B, 1, L), with mrope (B, 3, L)
    rope = rope.transpose(0, 1).flatten(1)[:, token]  # (1, N), with mrope (3, N)
    inputs = {"input_ids": ids.flatten()[token][None], "position_ids": rope if len(rope) == 1 else rope[:, None]}
    # a token is predicted one place to its left; the step's checks find a mask that includes padding
    select = place[target // T * L + L - T - 1 + target % T].clamp(min=0)
    model.tree = None if is_empty else tree
    model.real_tokens, padding = slice(0 if is_empty else None), None
    if not padding_free:
        [places], back = sequence_rows(tree, one_size=True)  # (S, l), (N,)
        positions = rope[:, places]
        if len(rope) == 1:
            positions = rope[0, places[:, :1]] + torch.arange(places.shape[1])  # they count on in padding
        inputs = {"input_ids": inputs["input_ids"][0, places], "position_ids": positions}
        place, select, token = torch.where(place < 0, -1, back[place]), back[select], token[places].flatten()
        padding = F.pad(places[:, 1:] == places[:, :-1], (1, 0)).flatten()
        model.real_tokens = to_device((~padding).nonzero()[:, 0], device)
    if len(recorded):
        inputs[ROUTES] = routes_of_tokens(list(recorded), attention, token)
        if padding is not None:  # whose experts do not matter
            inputs[ROUTES][padding] = -1
    images, tower = None, batch.meta_info.get("run_tower", ())
    if tower or any(media):
        # where no row is trained on, no result needs an image, and nothing says which placeholders were sampled
        seen, shape = torch.zeros_like(ids, dtype=torch.bool), inputs["input_ids"].shape
        seen.view(-1)[token] = len(target) > 0
        if images := images_of(model, media, ids, trained, seen, place, shape, tower):
            inputs["images"] = images
    if padding_free:
        inputs |= _sequence_bounds(model, tree, None if images is None else images.blocks)
    return *to_device((inputs, select, target), device), place[:0] if is_empty else place


def _sequence_bounds(model: PreTrainedModel, tree: PrefixTree, blocks: torch.Tensor | None) -> dict[str, Any]:
    """Tells the layers where the sequences of the packed row are."""
    bounds: dict[str, Any] = {"sequence_rows": sequence_rows(tree)} if model.takes_rows else {}
    attention = model.config._attn_implementation
    if attention.startswith("flash"):
        starts, longest = _cumulative(tree.lengths), max(tree.lengths)
        bounds |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        return bounds | {"max_length_q": longest, "max_length_k": longest}
    if attention == "varlen":
        bounds["packed_sequences"] = _packed_sequences(tree)
    else:
        bounds["packed_runs"] = PackedRuns(_packed_runs(tree, blocks))
    # transformers passes a 4-D mask on as it is; without a mask it would build a dense (N, N) one
    return bounds | {"attention_mask": torch.empty(1, 1, 1, 1)}


def _packed_runs(tree: PrefixTree, blocks: torch.Tensor | None) -> list[PackedRun]:
    """The runs of the packed row, each with nodes of one kind. blocks (1, N): each token's image, of models in which
    its tokens see each other; nodes below others are text."""
    runs: list[PackedRun] = []
    run_of: list[int] = []  # for each node, the number of its run
    begin: list[int] = []  # for each node, where it begins in its run
    begun = 0  # tokens of the runs so far
    for (P, _), group in itertools.groupby(range(len(tree.lengths)), key=tree.kind):
        members = list(group)
        sizes = [tree.lengths[i] for i in members]
        begin += [*itertools.accumulate(sizes, initial=0)][:-1]
        run_of += [len(runs)] * len(members)
        run = PackedRun(sum(sizes), len(members), max(sizes))
        if P:
            above = sorted({run_of[i] for node in members for i in tree.paths[node][:-1]})
            offsets = [0, *itertools.accumulate(runs[r].tokens for r in above)]
            offset = dict(zip([*above, len(runs)], offsets))  # of each run in what `places` count
            starts = {i: offset[run_of[i]] + begin[i] for node in members for i in tree.paths[node]}
            real = (torch.arange(run.length) < torch.tensor(sizes)[:, None]).flatten().nonzero()[:, 0]
            places = _padded([_path_places(tree, node, starts) for node in members])
            run = run._replace(runs_above=tuple(above), places=places, real=real)
        elif blocks is not None:
            own = blocks[0, begun : begun + run.tokens].view(run.count, -1)
            run = run._replace(blocks=own if (own >= 0).any() else None)
        runs.append(run)
        begun += run.tokens
    return runs


def _packed_sequences(tree: PrefixTree) -> PackedSequences:
    starts, nodes = _starts(tree), range(len(tree.lengths))
    keys = torch.from_numpy(np.concatenate([_path_places(tree, i, starts) for i in nodes])) if any(tree.above) else None
    totals = [above + n for above, n in zip(tree.above, tree.lengths)]
    return PackedSequences(keys, _cumulative(tree.lengths), _cumulative(totals), max(tree.lengths), max(totals))


def sequence_rows(tree: PrefixTree, *, one_size: bool = False) -> SequenceRows:
    """one_size: all rows get the length of the longest."""
    inner = {i for path in tree.paths for i in path[:-1]}
    starts = _starts(tree)
    rows = [_path_places(tree, i, starts) for i in range(len(tree.lengths)) if i not in inner]
    rows.sort(key=len)
    size = (lambda row: 0) if one_size else (lambda row: int(4 * math.log2(len(row))))  # at most a fifth is padding
    sets = [_padded(list(group)) for _, group in itertools.groupby(rows, key=size)]
    back = np.empty(sum(tree.lengths), dtype=np.int64)
    begin = itertools.accumulate((places.shape[1] for places in sets for _ in places), initial=0)
    for row, first in reversed(list(zip(rows, begin))):  # where rows share a token, the first gives it
        back[row] = np.arange(first, first + len(row))
    return SequenceRows(sets, torch.from_numpy(back))


def _starts(tree: PrefixTree) -> list[int]:
    """The index of each node's first token in the packed row."""
    return [0, *itertools.accumulate(tree.lengths)]


def _path_places(tree: PrefixTree, node: int, starts) -> np.ndarray:
    """The tokens of the node's path. starts: for each node of it, the place of the first."""
    return np.concatenate([np.arange(starts[i], starts[i] + tree.lengths[i]) for i in tree.paths[node]])


def _padded(rows: list[np.ndarray]) -> torch.Tensor:
    """(rows, length of the longest), with each row's last number as padding."""
    n = torch.tensor([len(row) for row in rows])[:, None]
    column = torch.arange(int(n.max())).minimum(n - 1)
    return torch.from_numpy(np.concatenate(rows))[n.cumsum(0) - n + column]


def _cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
