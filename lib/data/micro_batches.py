"""Micro-batches by token budget. Every rank makes the same number of them, because FSDP's collectives must match."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lib.data.prefixes import prefix_tree, prompt_groups
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
    their `prefix_tree`.

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
