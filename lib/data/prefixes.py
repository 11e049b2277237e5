"""The prefixes that sequences share: the prompt of a group, and contexts that an agent's turns repeat. A node of the
tree is a run of tokens that is computed once for all sequences on whose path it is."""

import itertools
from typing import NamedTuple

import numpy as np
import torch

from lib.data.vision import text_positions
from lib.data_proto import DataProto

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
