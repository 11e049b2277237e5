"""Shared prefixes change no result: rows of several sequences against each sequence alone in float64, on every path of
attention. The trees come from few tokens, so that random sequences begin alike in every way. Over ranks:
test_sequence_parallel.py and test_tensor_parallel.py."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lib.data import prefix_tree, prepare_dynamic_batch
from lib.data.micro_batches import prompt_groups
from lib.data_proto import DataProto
from lib.distributed import Mean
from lib.model import load_model, response_log_probs
from lib.model.flops import UpdateFlops
from tests.common import float64_norms, save_tiny
from tests.model.test_models import alone, load, save, sequences_of, with_gradient
from tests.model.test_varlen import cpu_kernels

Row = tuple[list[int], list[list[int]], list[int]]  # prompt, segments (the first goes on from the prompt), masks


def batch_of(rows: list[Row]) -> DataProto:
    """The masks are those of the segments' tokens, one after the other."""
    P, T = max(len(row[0]) for row in rows), max(sum(map(len, row[1])) for row in rows)
    names = ("input_ids", "attention_mask", "position_ids", "response_mask")
    tensors = {name: torch.zeros(len(rows), P + T, dtype=torch.long) for name in names}
    for i, (prompt, segments, trained) in enumerate(rows):
        start, end = P - len(prompt), P + sum(map(len, segments))
        lengths = [len(prompt) + len(segments[0]), *map(len, segments[1:])]
        tensors["input_ids"][i, start:end] = torch.tensor([*prompt, *(x for segment in segments for x in segment)])
        tensors["attention_mask"][i, start:end] = 1
        tensors["position_ids"][i, start:end] = torch.cat([torch.arange(n) for n in lengths])
        tensors["response_mask"][i, P:end] = torch.tensor(trained)
        for begin in [*accumulate(map(len, segments))][:-1]:
            tensors["response_mask"][i, P + begin] = 0  # nothing predicts a sequence's first token
    tensors["response_mask"] = tensors["response_mask"][:, P:]
    return DataProto.from_dict(
        tensors | {"prompts": tensors["input_ids"][:, :P], "responses": tensors["input_ids"][:, P:]}
    )


def assert_equal(got, expected, tolerance=1e-9):
    for x, wanted in zip(got, expected, strict=True):
        assert (x - wanted).norm() <= tolerance * wanted.norm()


def needed_prefixes(batch: DataProto) -> set[tuple]:
    """Of the trie: one for each token that some trained token of its sequence needs."""
    groups, found = prompt_groups(batch).tolist(), set()
    mask = batch.batch["response_mask"].bool()
    is_begun = mask.any(1) & ~mask[:, 0] & (batch.batch["position_ids"][:, -mask.shape[1]] > 0)  # by given tokens
    begun = {g for g, is_given in zip(groups, is_begun) if is_given}
    sequences = list(sequences_of(batch))
    rows = [row for row, *_ in sequences]
    for row, _, ids, trained in sequences:
        if any(trained):
            first = len(ids) - len(trained)
            n = first + max(t for t, is_trained in enumerate(trained) if is_trained)
            alone = rows.count(row) == 1 and groups[row] not in begun  # shares only its prompt
            found |= {(groups[row], (alone and k >= first and row + 1, *ids[: k + 1])) for k in range(n)}
    return found


tokens = partial(st.lists, st.integers(1, 2))


@st.composite
def episodes(draw) -> list[Row]:
    """Rows of one to three groups, in any order: segments that begin alike, are equal, or prefixes of others."""
    rows = []
    for prompt in draw(st.lists(tokens(min_size=1, max_size=4), min_size=1, max_size=3)):
        for _ in range(draw(st.integers(1, 3))):
            first = draw(tokens(max_size=8))
            others = draw(st.lists(tokens(min_size=2, max_size=9), max_size=3, min_size=0 if first else 1))
            others = [prompt + other if draw(st.booleans()) else other for other in others]
            n = len(first) + sum(map(len, others))
            rows.append((prompt, [first, *others], draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))))
    return draw(st.permutations(rows))


def row(prompt: list[int], *segments: list[tuple[list[int], int]]) -> Row:
    """segments: pieces, and whether they are trained."""
    ids = [[token for piece, _ in segment for token in piece] for segment in segments]
    return prompt, ids, [trained for segment in segments for piece, trained in segment for _ in piece]


g = torch.Generator().manual_seed(1)
PROMPT, ASKED, A, B, C, D, OWN = (torch.randint(1, 90, (n,), generator=g).tolist() for n in (20, 17, 19, 5, 9, 3, 23))
FORKS = [  # forks behind the prompt and behind answers, two equal answers, contexts of an agent's own
    row(PROMPT, [(A, 1), (ASKED, 0), (B, 1)], [(PROMPT + A + ASKED, 0), (C, 1)], [(PROMPT, 0), (D, 1)]),
    row(PROMPT, [(D[:2], 1), (D[2:], 0)]),
    row(PROMPT, [], [(OWN, 0), (A, 1)], [(OWN, 0), (C, 1)], [(OWN + A, 0), (B, 1)]),
    row(PROMPT, [(A + B, 1)], [(PROMPT, 0), (A + B, 1)]),
    row(OWN, [(A, 1)]),
]
NEEDED = 20 + (19 + 17 + 4 + 8 + 2) + 1 + (23 + 19 + 4 + 8) + 4 + (23 + 18)  # tokens: the prompt, then row by row


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return float64_norms(load_model(save_tiny(tmp_path_factory.mktemp("tiny")), dtype=torch.float64))


@settings(max_examples=10)
@given(episodes(), st.sampled_from([1, 1, 2, 4]))
def test_any_tree_gives_what_each_sequence_gives_alone(model, rows, min_shared):
    """And computes each token of the trie once, if it shares runs of any length."""
    batch = batch_of(rows)
    assume(batch.batch["response_mask"].any())
    expected = with_gradient(model, partial(alone, model, batch))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lib.data.micro_batches.MIN_SHARED", min_shared)
        tree, needed = prefix_tree(batch), len(needed_prefixes(batch))
        assert sum(tree.lengths) == needed if min_shared == 1 else sum(tree.lengths) >= needed
        assert tree.separate_tokens == sum(prefix_tree(batch, share=False).lengths)
        for options in ({}, {"share_prompts": False}, {"padding_free": False}):
            forward = partial(response_log_probs, model, batch, 1.0, **options)
            assert_equal(with_gradient(model, forward), expected)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("mistral", "packed_sdpa"),  # windows of 4 tokens, shorter than the prefixes
        ("gemma3_text", "varlen"),  # in some layers
        pytest.param("qwen3_moe", "packed_sdpa", marks=pytest.mark.slow),
        ("qwen3_5_text", "packed_sdpa"),  # layers with a state
        pytest.param("lfm2", "varlen", marks=pytest.mark.slow),  # convolutions
    ],
)
def test_every_kind_of_layer_takes_the_tree(tmp_path, family, attention):
    """Norms, rotary tables and states are in float32 in transformers; a leak changes results by 0.1 to 10."""
    model, batch = load(save(family, tmp_path), attn_implementation=attention), batch_of(FORKS)
    assert sum(prefix_tree(batch).lengths) == len(needed_prefixes(batch)) == NEEDED
    with cpu_kernels():
        shared = with_gradient(model, partial(response_log_probs, model, batch, 1.0))
    model.set_attn_implementation("sdpa")
    assert_equal(shared, with_gradient(model, partial(alone, model, batch)), 1e-5)


@settings(max_examples=20)
@given(episodes(), st.integers(5, 60))
def test_a_micro_batch_counts_the_tokens_of_its_tree(world, rows, max_tokens):
    batch = batch_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lib.data.micro_batches.MIN_SHARED", 1)
        micro_batches, numbers = prepare_dynamic_batch(batch, max_tokens, share_prompts=True)
        assert sorted(row for part in numbers for row in part) == list(range(len(batch)))
        sizes = [sum(prefix_tree(micro, whole=True).lengths) for micro in micro_batches]
    begun = any(any(trained) and not trained[0] for *_, trained in rows)  # then rows without this one share less
    assert begun or all(size <= max_tokens or len(micro) == 1 for size, micro in zip(sizes, micro_batches))


def test_a_step_reports_the_tokens_that_it_saves(tmp_path):
    module, batch = load_model(save_tiny(tmp_path)), batch_of(FORKS)
    computed, parts = UpdateFlops(module), [batch[[0]], batch[[1, 2, 3, 4]]]
    for micro in parts:
        response_log_probs(module, micro, 1.0)
        computed.count(micro, None)
    tokens = sum(len(needed_prefixes(micro)) for micro in parts)
    whole = sum(prefix_tree(batch, share=False).lengths)
    name = "perf/shared_prefix_tokens_share"
    assert computed.end()[name] == Mean(whole - tokens, whole) and computed.end()[name] == Mean(0, 0)
