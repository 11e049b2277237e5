"""Micro-batches by token budget. Every rank makes the same number, because FSDP's collectives must meet."""

import heapq

import torch

from lib.data_proto import DataProto
from lib.distributed import all_reduce_max


def prepare_dynamic_batch(batch: DataProto, max_tokens: int) -> tuple[list[DataProto], list[list[int]]]:
    """Splits rows into micro-batches of at most `max_tokens` tokens (padding not counted), equally many on every rank.

    First-fit decreasing; then the ranks that need fewer split their fullest micro-batch until all have as many. A row
    longer than `max_tokens` is alone. A collective: every rank calls it, with the same number of rows.

    Returns:
        (micro_batches, rows): rows[i] are the row numbers in micro_batches[i], for `restore_dynamic_batch`.
    """
    lengths = batch.batch["attention_mask"].sum(1).tolist()
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        place = next((i for i, free in enumerate(room) if free >= lengths[row]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[place].append(row)
        room[place] -= lengths[row]
    wanted = all_reduce_max(len(bins), batch.batch["attention_mask"].device)
    heap = [(-len(rows), rows) for rows in bins]
    heapq.heapify(heap)
    while len(heap) < wanted:
        _, rows = heapq.heappop(heap)
        for half in (rows[::2], rows[1::2]):
            heapq.heappush(heap, (-len(half), half))
    bins = sorted(sorted(rows) for _, rows in heap)
    return [batch[rows] for rows in bins], bins


def restore_dynamic_batch(tensor: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    """Puts the concatenated results of the micro-batches back into the batch's row order."""
    return tensor[torch.tensor([r for part in rows for r in part], device=tensor.device).argsort()]
