"""Micro-batches by token budget. Every rank makes the same number of them, because FSDP's collectives must match.

The prefixes that sequences share: the prompt of a group, and contexts that an agent's turns repeat. A node of the tree
is a run of tokens that is computed once for all sequences on whose path it is."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lib.data.vision import text_positions
from lib.data_proto import DataProto
from lib.distributed import RowGroup, all_gather_lists, all_reduce_max

LAYOUT = ("input_ids", "attention_mask", "position_ids", "response_mask")  # what decides where tokens stand
_ON_HOST = WeakTensorKeyDictionary()  # {a column of a micro-batch on a GPU: (its version, a copy on the CPU)}


def on_host(batch: DataProto) -> DataProto:
    """LAYOUT and multi_modal_hash on the CPU. The host waits for a GPU here, but not for unchanged columns of
    `prepare_dynamic_batch`, which has copied them with the whole mini-batch."""
    names = [name for name in (*LAYOUT, "multi_modal_hash") if name in batch.batch]
    kept = {name: _ON_HOST.get(batch.batch[name], (-1, None)) for name in names}
    if all(version == batch.batch[name]._version for name, (version, _) in kept.items()):
        return DataProto.from_dict({name: copy for name, (_, copy) in kept.items()}, meta_info=batch.meta_info)
    return DataProto.from_dict({name: batch.batch[name].cpu() for name in names}, meta_info=batch.meta_info)


class _Row(NamedTuple):
    prompt: Any  # equal for rows of one prompt
    length: int  # tokens
    nodes: dict[Any, int]  # tokens of each node of the prefix tree on the row's paths


def prepare_dynamic_batch(
    batch: DataProto, max_tokens: int, *, share_prompts=False, padding_free=True, row_group: RowGroup | None = None
) -> tuple[list[DataProto], list[list[int]]]:
    """Splits rows into micro-batches of at most `max_tokens` tokens, equally many on every rank. A collective.
    Returns (micro_batches, the row numbers of each for `restore_dynamic_batch`).

    Rows are placed first-fit decreasing; a row longer than `max_tokens` is alone. Ranks with fewer micro-batches split
    those of most rows, down to micro-batches without a row. Each rank runs its longest ones first, so that ranks wait
    little for each other. Without `padding_free` a row counts as many tokens as the longest row of its micro-batch.
    With `share_prompts` rows of equal prompts stay together as far as `max_tokens` allows, and count the tokens of
    their `prefix_tree` in the batch: beside a begun response rows of its prompt share more.

    A `row_group` of n ranks makes its micro-batches together. Each rank gets its own rows of every micro-batch, perhaps
    none. If the group splits tokens, a micro-batch holds n x max_tokens tokens."""
    host, device = on_host(batch), batch.batch["attention_mask"].device
    rows, first = _rows_of(host, share_prompts), 0  # first: the number of this rank's first row
    if row_group is not None:
        rank, ranks = row_group.ranks.rank(), row_group.ranks
        first = sum(all_gather_lists([len(batch)], ranks)[:rank])
        max_tokens *= ranks.size() if row_group.split == "tokens" else 1
        named = [_Row((rank, r.prompt), r.length, {(rank, node): n for node, n in r.nodes.items()}) for r in rows]
        rows = all_gather_lists(named, ranks)

    def tokens(numbers: list[int]) -> int:
        if not padding_free:
            return len(numbers) * max((rows[r].length for r in numbers), default=0)
        return sum({node: n for r in numbers for node, n in rows[r].nodes.items()}.values())

    parts: list[list[int]] = []  # the rows of one prompt, or as many of them as fit
    for row in sorted(range(len(rows)), key=lambda r: (rows[r].prompt, -rows[r].length)):
        if parts and rows[parts[-1][0]].prompt == rows[row].prompt and tokens([*parts[-1], row]) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    bins = _first_fit(parts, tokens, max_tokens, padding_free)
    bins = _split(bins, all_reduce_max(len(bins), device))
    bins = sorted(map(sorted, bins), key=lambda numbers: (-tokens(numbers), numbers))
    bins = [[row - first for row in numbers if first <= row < first + len(batch)] for numbers in bins]
    micro_batches = [batch[numbers] for numbers in bins]
    kinds = _run_tower(batch) if "multi_modal_inputs" in batch.non_tensor_batch else None
    for micro, numbers in zip(micro_batches, bins):
        if kinds is not None:
            micro.meta_info["run_tower"] = kinds
        if device.type != "cpu":
            kept = dict(host[numbers].batch.items())
            _ON_HOST.update({micro.batch[name]: (micro.batch[name]._version, kept[name]) for name in kept})
    return micro_batches, bins


def _rows_of(host: DataProto, share_prompts: bool) -> list[_Row]:
    lengths = host.batch["attention_mask"].sum(1).tolist()
    if not share_prompts:
        return [_Row(row, n, {row: n}) for row, n in enumerate(lengths)]
    tree, nodes = prefix_tree(host, whole=True), [dict[Any, int]() for _ in lengths]
    for node, (n, rows) in enumerate(zip(tree.lengths, tree.rows)):
        for row in rows:
            nodes[row][node] = n
    return [*map(_Row, prompt_groups(host).tolist(), lengths, nodes)]


def _first_fit(parts: list[list[int]], tokens: Callable, max_tokens: int, padding_free: bool) -> list[list[int]]:
    """Puts each part, from the largest down, into the first bin that has room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    longest: list[int] = []  # tokens of each bin's longest row, its first
    for part in sorted(parts, key=lambda rows: -tokens(rows)):
        size = tokens(part)
        taken = itertools.repeat(size) if padding_free else longest
        place = next((i for i, (free, takes) in enumerate(zip(room, taken)) if free >= takes), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
            longest.append(size)
        bins[place] += part
        room[place] -= size if padding_free else longest[place]
    return bins


def _split(bins: list[list[int]], wanted: int) -> list[list[int]]:
    """Halves the bins of most rows until there are `wanted`."""
    heap = [(-len(rows), rows) for rows in bins or [[]]]
    heapq.heapify(heap)
    while len(heap) < wanted:
        _, rows = heapq.heappop(heap)
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            heapq.heappush(heap, (-len(half), half))
    return [rows for _, rows in heap]


def _run_tower(batch: DataProto) -> tuple[str, ...]:
    """Which of images and videos any rank has. All ranks then run the tower, whose weights are sharded, in every
    micro-batch, if necessary for a dummy. A collective."""
    inputs, device = batch.non_tensor_batch["multi_modal_inputs"], batch.batch["input_ids"].device
    names = {"image": "pixel_values", "video": "pixel_values_videos"}
    here = {kind: any(name in row for row in inputs) for kind, name in names.items()}
    return tuple(kind for kind, has in here.items() if all_reduce_max(int(has), device))


def restore_dynamic_batch(tensor: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    """Puts the concatenated results of the micro-batches back into the batch's row order."""
    order = torch.tensor([r for part in rows for r in part], dtype=torch.long).argsort()
    return tensor[order.to(tensor.device, non_blocking=True)]


# ---- shared prefixes ----------------------------------------------------------------------------

MIN_SHARED = 16  # tokens of a shared run that is not a whole prompt: each node is one more piece for attention


class PrefixTree(NamedTuple):
    """Nodes with N tokens in all, sorted by `kind`. A path leads from a root to a node and ends with it."""

    lengths: list[int]  # tokens of each node
    paths: list[list[int]]  # for each node, the nodes of its path
    above: list[int]  # for each node, the tokens of its path before its own
    rows: list[list[int]]  # for each node, the row of each sequence on whose path it is
    token: torch.Tensor  # (N,), node by node: indices into the flattened input_ids
    place: torch.Tensor  # (B * L,): indices into these N; tokens that rows share have the same one; -1: left out

    def kind(self, node: int) -> tuple[int, int]:
        """Attention takes nodes of one kind together: roots of equal length, or nodes with equally many tokens above
        them and of about equal length."""
        return _kind(self.above[node], self.lengths[node])

    @property
    def separate_tokens(self) -> int:
        """Tokens of all sequences if none shares any."""
        return sum(n * len(rows) for n, rows in zip(self.lengths, self.rows))


class _Node(NamedTuple):
    start: int  # in its sequences
    end: int
    sequences: list[int]
    path: list[int]


def prompt_groups(batch: DataProto) -> torch.Tensor:
    """(B,) numbers, equal for rows of equal prompts: the attended tokens before the response, and the images."""
    T = batch.batch["response_mask"].shape[1]
    prompts = batch.batch["input_ids"][:, :-T].where(batch.batch["attention_mask"][:, :-T].bool(), -1)
    if "multi_modal_hash" in batch.batch:
        prompts = torch.cat([prompts, batch.batch["multi_modal_hash"][:, None]], 1)
    return prompts.unique(dim=0, return_inverse=True)[1]


def prefix_tree(batch: DataProto, *, share: bool = True, whole: bool = False) -> PrefixTree:
    """The tree of a batch's sequences, from its LAYOUT and multi_modal_hash on the CPU. A row may hold several
    consecutive sequences (agent): one begins wherever position_ids is 0. share: False makes each sequence a node.
    whole: also what follows the last position of a sequence that predicts a trained token; no result depends on it.
    A batch without trained tokens is always whole.

    Rows of equal prompts share them. If such a row has several sequences, they share their whole common beginning. A
    row of one sequence shares no more than its prompt, unless the response of a row with this prompt begins with given
    tokens, which do not train. Rows with images never share more."""
    ids, positions = batch.batch["input_ids"], text_positions(batch.batch["position_ids"])
    attention, trained = batch.batch["attention_mask"].bool().numpy(), batch.batch["response_mask"].bool().numpy()
    (B, L), T = ids.shape, trained.shape[1]
    prompt = attention[:, : L - T].sum(1)  # (B,)
    token = attention.ravel().nonzero()[0]
    position = positions.flatten().long().numpy()[token]
    begin = (position == 0).nonzero()[0]  # (S,): of each sequence in `token`
    end = np.append(begin[1:], len(token))
    row = token[begin] // L  # (S,)
    groups = prompt_groups(batch).numpy() if share else np.arange(B)
    is_begun = attention[:, L - T] & (positions[:, L - T].numpy() > 0)  # by a prefix
    is_begun &= ~trained[:, 0] & trained.any(1)
    alone = (np.bincount(row, minlength=B) == 1) & ~np.isin(groups, groups[is_begun])  # (B,)
    alone |= "multi_modal_hash" in batch.batch
    keys = (position << 32) + ids.flatten().numpy()[token]  # equal for tokens that may be shared
    of_row = np.repeat(np.arange(B), attention.sum(1))  # of each token
    keys = np.where(alone[of_row] & (token >= of_row * L + L - T), -1 - token, keys)
    if trained.any() and not whole:
        predicts = np.pad(trained, ((0, 0), (L - T - 1, 1))).ravel()[token]  # one place before
        end = np.maximum.reduceat(np.where(predicts, np.arange(1, len(token) + 1), 0), begin)
        begin, end, row = (x[end > 0] for x in (begin, end, row))

    group = groups[row] if share else np.arange(len(row))
    sequences = [keys[i:j] for i, j in zip(begin, end)]
    nodes = _nodes(sequences, group.tolist(), prompt[row].tolist())
    lengths = [node.end - node.start for node in nodes]
    above = [sum(lengths[i] for i in node.path[:-1]) for node in nodes]
    at = [int(begin[node.sequences[0]]) + node.start for node in nodes]  # where its first sequence has it in `token`
    order = sorted(range(len(nodes)), key=lambda i: (_kind(above[i], lengths[i]), at[i]))
    place, N = np.full(B * L, -1), 0
    for i in order:
        for s in nodes[i].sequences:
            place[token[begin[s] + nodes[i].start :][: lengths[i]]] = np.arange(N, N + lengths[i])
        N += lengths[i]
    number = {i: new for new, i in enumerate(order)}
    return PrefixTree(
        [lengths[i] for i in order],
        [[number[j] for j in nodes[i].path] for i in order],
        [above[i] for i in order],
        [row[nodes[i].sequences].tolist() for i in order],
        torch.from_numpy(np.concatenate([token[:0], *(token[at[i] :][: lengths[i]] for i in order)])),
        torch.from_numpy(place),
    )


def _kind(above: int, length: int) -> tuple[int, int]:
    return (above, -(-length // 16)) if above else (0, length)


def _nodes(sequences: list[np.ndarray], group: list[int], prompt: list[int]) -> list[_Node]:
    """The nodes of sequences, given by their tokens' keys. prompt: the number of each one's prompt tokens. In sorted
    order, sequences that begin alike are neighbours."""
    named = [(number, keys.astype(">i8").tobytes()) for number, keys in zip(group, sequences)]
    order = sorted(range(len(named)), key=named.__getitem__)
    common = [0]  # the tokens that each one has in common with the one before it
    for before, after in itertools.pairwise(order):
        n = min(len(sequences[before]), len(sequences[after])) if group[before] == group[after] else 0
        differ = (sequences[before][:n] != sequences[after][:n]).nonzero()[0]
        common.append(int(differ[0]) if len(differ) else n)
    nodes: list[_Node] = []
    # parts order[low:high], the tokens before `start` of which are in the nodes of `path`
    todo: list[tuple[int, int, int, list[int]]] = [(0, len(order), 0, [])] if order else []
    while todo:
        low, high, start, path = todo.pop()
        end = min(common[low + 1 : high], default=len(sequences[order[low]]))
        are_equal, is_prompt = end == len(sequences[order[high - 1]]), end == prompt[order[low]]
        if end > start and (are_equal or is_prompt or end - start >= MIN_SHARED):
            path = [*path, len(nodes)]
            nodes.append(_Node(start, end, sorted(order[low:high]), path))
            start = end
        if not are_equal:
            cuts = [low, *(i for i in range(low + 1, high) if common[i] == end), high]
            todo += [(*part, start, path) for part in itertools.pairwise(cuts)]
    return nodes
