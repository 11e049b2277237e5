"""Distributes rows over ranks by cost, so that no rank waits long for another."""

import heapq
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel

from lib import InputError
from lib.columns import COLUMNS
from lib.data_proto import DataProto
from lib.distributed import all_gather_lists, all_reduce_max, all_to_all_objects


class Group(NamedTuple):
    """The rows of a uid, on this rank or on all of them."""

    uid: str
    home: int  # the first rank that has rows of it
    place: int  # among the groups of that rank
    rows: int
    cost: float


Plan = list[dict[str, int]]
"""For each rank {uid: number of the mini-batch}, in the order of its rows"""


def balance_groups(
    batch: DataProto, model: PreTrainedModel, num_mini_batches: int, *, share_prompts: bool = False
) -> tuple[Plan, dict[str, float]]:
    """Plans which rank trains on which groups, so that all ranks have about the same cost. A collective.

    A group, the rows of one uid, stays whole, and comes together if several ranks have rows of it. A mini-batch, the
    union of all ranks' m-th parts, gets the groups that come m-th on their ranks: as many as any other, or one more.
    If all groups have equally many rows, ranks get equally many groups of each mini-batch, or one more. Otherwise the
    cost alone decides, and a rank may get no row of a mini-batch.

    Returns (plan, metrics), for `exchange_groups`. perf/imbalance_sampled (before the exchange) and perf/imbalance
    (after it) are the sum over mini-batches of the costliest rank's cost, over the mean cost of a rank."""
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), dict[str, Group]()
    rows, costs = rows_by_uid(batch), group_costs(batch, model, share_prompts)
    here = [Group(uid, rank, k, len(rows[uid]), cost) for k, (uid, cost) in enumerate(zip(rows, costs))]
    for group in all_gather_lists(here):
        known = found.setdefault(group.uid, group)
        if known is not group:
            found[group.uid] = known._replace(rows=known.rows + group.rows, cost=known.cost + group.cost)
    groups = [*found.values()]
    one_size = len({group.rows for group in groups}) == 1
    by_place = sorted(range(len(groups)), key=lambda g: (groups[g].place, groups[g].home))
    plan: Plan = [{} for _ in range(ranks)]
    as_sampled = by_plan = 0.0

    def slowest(parts: list[list[int]]) -> float:
        return max(sum(groups[g].cost for g in part) for part in parts)

    for m, numbers in enumerate(np.array_split(by_place, num_mini_batches)):
        own = sorted(numbers.tolist())
        sampled = [[g for g in own if groups[g].home == rank] for rank in range(ranks)]
        most = None if one_size else len(own)
        moved = [[own[i] for i in part] for part in longest_first([groups[g].cost for g in own], ranks, most)]
        parts = min(sampled, moved, key=slowest)
        for of_rank, part in zip(plan, parts):
            of_rank |= {groups[g].uid: m for g in sorted(part)}
        as_sampled, by_plan = as_sampled + slowest(sampled), by_plan + slowest(parts)
    mean = sum(group.cost for group in groups) / ranks or 1.0
    return plan, {"perf/imbalance_sampled": as_sampled / mean, "perf/imbalance": by_plan / mean}


def rows_by_uid(batch: DataProto) -> dict[str, list[int]]:
    """The rows of each uid, which need not be adjacent."""
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"] if len(batch) else ()):
        rows.setdefault(uid, []).append(row)
    return rows


def pad_rows(batch: DataProto, P: int, T: int) -> DataProto:
    """Pads in place to prompts of P tokens and responses of T; smaller cuts off. lib/columns.py says how; columns of a
    copy that are as wide as the responses are padded with 0."""
    shape = batch.batch["response_mask"].shape
    left, right = P - batch.batch["prompts"].shape[1], T - shape[1]
    pads = {"P": (left, 0), "L": (left, right), "T": (0, right)}
    for name, x in list(batch.batch.items()) if left or right else ():
        width, fill, more = ("T" if x.shape[:2] == shape else "", 0, x.ndim - 2)
        if (column := COLUMNS.get(name)) is not None:
            width, fill, more = column.width, column.fill, column.shape.endswith("T, K")
        if width in pads:
            batch.batch[name] = F.pad(x, (0, 0) * more + pads[width], value=fill)
    return batch


def equal_widths(batch: DataProto) -> DataProto:
    """The batch, padded in place to the widest prompts and responses of all ranks. A collective."""
    tensors = batch.batch["prompts"], batch.batch["response_mask"]
    return pad_rows(batch, *(all_reduce_max(x.shape[1], x.device) for x in tensors))


def gather_groups(batch: DataProto) -> DataProto:
    """The groups of all ranks, each rank's first one, then each rank's second, and so on: for the prompts of a step,
    the order of their numbers. A collective."""
    groups = [*rows_by_uid(batch).values()]
    sizes = all_gather_lists([[len(rows) for rows in groups]])
    firsts = itertools.accumulate((sum(own) for own in sizes), initial=0)
    places = [(place, first) for first, own in zip(firsts, sizes) for place, n in enumerate(own) for _ in range(n)]
    in_groups = batch[[row for rows in groups for row in rows]]
    return in_groups.all_gather()[sorted(range(len(places)), key=places.__getitem__)]


def own_groups(whole: DataProto) -> list[list[int]]:
    """The rows of this rank's groups, among those that gather_groups returns."""
    return [*rows_by_uid(whole).values()][dist.get_rank() :: dist.get_world_size()]


def exchange_groups(batch: DataProto, plan: Plan) -> DataProto:
    """The groups that the plan of `balance_groups` gives this rank, in its order, with the column mini_batch (B,). Each
    rank keeps its meta_info. Batches may have any number of rows per group, and any widths. A collective. Raises
    InputError for a uid that the plan does not have."""
    rank_of = {uid: rank for rank, own in enumerate(plan) for uid in own}
    rows = rows_by_uid(batch)
    if strange := rows.keys() - rank_of.keys():
        raise InputError(f"rollouts.balanced: rows of uid {min(strange)}, of which the first batch has none")
    own = plan[dist.get_rank()]
    if len(plan) > 1:
        batch = equal_widths(batch)
        columns, device, meta_info = _without_derived(batch), batch.batch["input_ids"].device, batch.meta_info
        to_rank = np.array([rank_of[uid] for uid in batch.non_tensor_batch["uid"]])
        parts = all_to_all_objects([columns[to_rank == rank] for rank in range(len(plan))])
        batch = DataProto.concat([_with_derived(part.to(device)) for part in parts])
        batch.meta_info, rows = dict(meta_info), rows_by_uid(batch)
    order = [row for uid in own for row in rows.get(uid, ())]
    if order != [*range(len(batch))]:
        batch = batch[order]
    numbers = [own[uid] for uid in batch.non_tensor_batch["uid"]]
    batch.batch["mini_batch"] = torch.tensor(numbers, dtype=torch.long, device=batch.batch["input_ids"].device)
    return batch


def split_mini_batches(batch: DataProto, count: int) -> list[DataProto]:
    """This rank's parts of the mini-batches, as views: by the column mini_batch, or equally many rows without it."""
    if "mini_batch" not in batch.batch:
        return batch.chunk(count)
    sizes = batch.batch["mini_batch"].bincount(minlength=count).tolist()
    ends = [0, *itertools.accumulate(sizes)]
    return [batch[i:j] for i, j in itertools.pairwise(ends)]


def _without_derived(batch: DataProto) -> DataProto:
    """What of a batch has to be sent: integers in 32 bits where they fit, without the columns of `_derived`. Where it
    differs, as masks of tool outputs do, a column is sent."""
    tensors, P = dict(batch.batch.items()), batch.batch["prompts"].shape[1]
    attended = tensors["attention_mask"]
    lengths = torch.stack([attended[:, :P].sum(1), attended[:, P:].sum(1)], 1)  # (B, 2)
    derived, sent = _derived(tensors["input_ids"], lengths, P), {"_lengths": lengths}
    for name, x in tensors.items():
        if name not in derived or not torch.equal(derived[name], x):
            sent[name] = x.int() if x.dtype == torch.int64 and (x.int() == x).all() else x
    dtypes = {name: x.dtype for name, x in tensors.items()}
    return DataProto.from_dict(sent, batch.non_tensor_batch, {"dtypes": dtypes, "P": P})


def _with_derived(sent: DataProto) -> DataProto:
    """The batch that `_without_derived` was given."""
    ids, lengths = sent.batch["input_ids"].long(), sent.batch["_lengths"].long()
    derived = _derived(ids, lengths, sent.meta_info["P"])
    columns = derived | dict(sent.batch.items())
    tensors = {name: columns[name].to(dtype) for name, dtype in sent.meta_info["dtypes"].items()}
    return DataProto.from_dict(tensors, sent.non_tensor_batch)


def _derived(ids: torch.Tensor, lengths: torch.Tensor, P: int) -> dict[str, torch.Tensor]:
    """The columns of text that the policy sampled in one turn, from tokens (B, L) and (B, 2) lengths of the prompt and
    of the response."""
    column, begin, end = torch.arange(ids.shape[1], device=ids.device), P - lengths[:, :1], P + lengths[:, 1:]
    attended = ((begin <= column) & (column < end)).long()
    positions = (column - begin).clamp(min=0)
    columns = {"prompts": ids[:, :P], "responses": ids[:, P:], "attention_mask": attended, "position_ids": positions}
    return columns | {"response_mask": attended[:, P:]}


def group_costs(batch: DataProto, model: PreTrainedModel, share_prompts: bool) -> list[float]:
    """FLOPs of each group's forward pass, in units of a token's FLOPs in the linear layers, 2 N for N weights (without
    a mixture's experts). With L attention layers and D = heads x head size, a token takes 4 L D for each token before
    it. So s tokens cost s + s^2 L D / N, and p patches of images p M / N, with M weights in the vision tower. With
    `share_prompts` a prompt counts once."""
    groups = [*rows_by_uid(batch).values()]
    if not groups:
        return []
    linear = {layer: layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear)}
    weights, of_tower, patches = sum(linear.values()), 0, torch.zeros(len(batch))
    if hasattr(model.config, "vision_config"):
        own = {*model.get_decoder().modules(), model.get_output_embeddings()}
        of_tower = sum(n for layer, n in linear.items() if layer not in own)
        weights -= of_tower
        patches = count_patches(batch, model.config.vision_config.patch_size)
    quadratic = attention_width(model) / weights
    attention = batch.batch["attention_mask"].double()
    tokens = attention.sum(1)  # (B,)
    prompt = attention[:, : -batch.batch["response_mask"].shape[1]].sum(1)
    seen = patches.to(attention) * of_tower / weights
    whole, shared = (s + quadratic * s**2 + seen for s in (tokens, prompt))
    sizes = torch.tensor([len(rows) for rows in groups])
    index = torch.tensor([rows + [-1] * (int(sizes.max()) - len(rows)) for rows in groups])
    index, sizes = index.to(whole.device), sizes.to(whole.device)
    of_rows = torch.cat([whole, whole.new_zeros(1)])[index]  # (groups, rows of the largest), 0 where one has fewer
    return (of_rows.sum(1) - share_prompts * (sizes - 1) * shared[index[:, 0]]).tolist()


def count_patches(batch: DataProto, size: int) -> torch.Tensor:
    """(B,) float64, on the CPU: the patches of size x size pixels of each row's images and videos."""
    counts = torch.zeros(len(batch), dtype=torch.float64)
    for i, inputs in enumerate(batch.non_tensor_batch.get("multi_modal_inputs", ())):
        for name in inputs.keys() & {"pixel_values", "pixel_values_videos"}:
            pixels = inputs[name]  # (patches, pixels of one), or (..., 3, height, width)
            counts[i] += len(pixels) if pixels.ndim == 2 else pixels[..., 0, ::size, ::size].numel()
    return counts


def attention_width(model: PreTrainedModel) -> float:
    """Layers x heads x head size, of the layers that attend. A head's size is the mean of keys' and values', which
    differ in latent attention."""
    config, width = model.config.get_text_config(), 0.0
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    heads_of = getattr(config, "num_attention_heads_per_layer", None)
    for i, kind in enumerate(kinds or ["full_attention"] * config.num_hidden_layers):
        if kind not in ("linear_attention", "conv", "recurrent"):
            own = config.per_layer_config[i] if getattr(config, "per_layer_attributes", None) else config
            heads = heads_of[i] if heads_of else getattr(own, "num_attention_heads", None) or 0
            keys = getattr(own, "head_dim", None) or own.hidden_size // max(heads, 1)
            if latent := getattr(own, "qk_nope_head_dim", None):
                keys = latent + own.qk_rope_head_dim  # head_dim is the rotary part
            width += heads * (keys + (getattr(own, "v_head_dim", None) or keys)) / 2
    return width


def longest_first(costs: list[float], parts: int, most: int | None = None) -> list[list[int]]:
    """Splits the indices of `costs` into `parts` lists of similar sums: each cost, from the largest down, goes to the
    list of smallest sum that has room (LPT scheduling). most: what a list may hold; None: lists of equal length."""
    most = -(-len(costs) // parts) if most is None else most
    lists: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, part) for part in range(parts)]  # (sum, list) of those with room
    for n in sorted(range(len(costs)), key=lambda i: -costs[i]):
        total, part = heapq.heappop(heap)
        lists[part].append(n)
        if len(lists[part]) < most:
            heapq.heappush(heap, (total + costs[n], part))
    return lists


def gather_rows(batch: DataProto, names: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """The rows of all ranks: the named columns, those that lib/columns.py always gathers, and two numbers (B,) int64:
    `row`, of the row, and `group`, of its uid. response_mask is bool. The batch gets the widths of all ranks. A
    collective."""
    equal_widths(batch)
    always = [name for name, column in COLUMNS.items() if column.gathered == "always" and name in batch.batch]
    own = batch.select([*dict.fromkeys([*always, *names])], ["uid"])
    own.batch["response_mask"] = own.batch["response_mask"].bool()
    whole = own.all_gather()
    _, group = np.unique(whole.non_tensor_batch["uid"].astype(str), return_inverse=True)
    device = whole.batch["response_mask"].device
    numbers = {"row": torch.arange(len(whole), device=device), "group": torch.from_numpy(group).to(device)}
    return {**whole.batch, **numbers}


def scatter_rows(batch: DataProto, rows: Mapping[str, torch.Tensor]) -> None:
    """Adds this rank's rows of `rows`, columns of the rows of all ranks as gather_rows returns them, to the batch. A
    collective."""
    first = sum(all_gather_lists([len(batch)])[: dist.get_rank()])
    own = slice(first, first + len(batch))
    # copies: views would keep the rows of all ranks in memory
    batch.batch.update({name: column[own].clone() for name, column in rows.items()})
    batch.batch["response_mask"] = batch.batch["response_mask"].long()
