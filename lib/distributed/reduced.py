"""Metrics over micro-batches and ranks: each rank reports totals and counts, which `reduce_metrics` combines.

A mean of the ranks' means would be wrong where they hold different counts. A metric without data is left out, not 0.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Mean(NamedTuple):
    """total / count over all ranks; left out where the count is 0."""

    total: float
    count: float  # type: ignore[assignment]  # tuple has a method of this name


class Sum(NamedTuple):
    value: float


class Max(NamedTuple):
    value: float


class Min(NamedTuple):
    value: float


Metric = Mean | Sum | Max | Min | float


def reduce_metrics(local: Mapping[str, Metric], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """The metrics of all ranks as plain floats, equal on every rank. A collective; without a process group: local only.

    A rank may lack keys. A plain number, such as a learning rate, is the same on all ranks: the lowest rank's is taken.
    """
    ranks = [dict(local)]
    if dist.is_initialized():
        ranks = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(ranks, dict(local), group=group)
    reduced = {}
    for key in dict.fromkeys(key for metrics in ranks for key in metrics):
        parts: list[Any] = [metrics[key] for metrics in ranks if key in metrics]
        match parts[0]:
            case Mean():
                count = sum(part.count for part in parts)
                if count > 0:
                    reduced[key] = float(sum(part.total for part in parts) / count)
            case Sum():
                reduced[key] = float(sum(part.value for part in parts))
            case Max():
                reduced[key] = float(max(part.value for part in parts))
            case Min():
                reduced[key] = float(min(part.value for part in parts))
            case plain:
                reduced[key] = float(plain)
    return reduced


def add_metrics(total: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Adds the metrics of one more micro-batch to those of this rank, in place."""
    new: Any  # the same kind of metric as in `total`
    for key, new in more.items():
        match total.get(key):
            case None:
                total[key] = new
            case Mean(value, count):
                total[key] = Mean(value + new.total, count + new.count)
            case Sum(value):
                total[key] = Sum(value + new.value)
            case Max(value):
                total[key] = Max(max(value, new.value))
            case Min(value):
                total[key] = Min(min(value, new.value))


def token_means(values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Metric]:
    """The mean of each (B, T) tensor over the tokens of the mask, over all micro-batches and ranks."""
    mask = mask.bool()
    return {name: Mean(value[mask].double().sum().item(), int(mask.sum())) for name, value in values.items()}
