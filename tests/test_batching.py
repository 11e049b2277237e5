"""lib/batching.py: micro-batches of rows that share prompts. Of rows that do not: tests/test_distributed.py."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.batching import prepare_dynamic_batch, prompt_groups, restore_dynamic_batch
from tests.common import run_ranks
from tests.test_invariance import groups_batch


@contextmanager
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def prompt_of(batch, row):
    P = batch.batch["prompts"].shape[1]
    ids, mask = batch.batch["input_ids"][row].tolist(), batch.batch["attention_mask"][row].tolist()
    return tuple(token for token, m in zip(ids[:P], mask) if m)


def tokens(batch, rows):
    """Tokens of these rows, each prompt counted once."""
    responses = sum(int(batch.batch["response_mask"][row].sum()) for row in rows)
    return responses + sum(len(prompt) for prompt in {prompt_of(batch, row) for row in rows})


GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(10, 120), st.randoms(use_true_random=False))
def test_rows_of_one_prompt_stay_together_and_count_it_once(groups, max_tokens, random):
    n = sum(len(responses) for _, responses in groups)
    batch = groups_batch(groups, random.sample(range(n), n))
    numbers = prompt_groups(batch).tolist()
    prompts = [prompt_of(batch, row) for row in range(n)]
    assert all((numbers[i] == numbers[j]) == (prompts[i] == prompts[j]) for i in range(n) for j in range(n))

    with one_rank():
        micro_batches, rows = prepare_dynamic_batch(batch, max_tokens, share_prompts=True)
    assert sorted(r for part in rows for r in part) == list(range(n))
    assert all(tokens(batch, part) <= max_tokens or len(part) == 1 for part in rows)
    for number in set(numbers):
        members = [row for row in range(n) if numbers[row] == number]
        if tokens(batch, members) <= max_tokens:
            assert sum(not set(members).isdisjoint(part) for part in rows) == 1
    sizes = [tokens(batch, part) for part in rows]
    assert sizes == sorted(sizes, reverse=True)
    restored = restore_dynamic_batch(torch.cat([micro.batch["input_ids"] for micro in micro_batches]), rows)
    assert torch.equal(restored, batch.batch["input_ids"])


def test_two_groups_fit_where_their_rows_alone_would_not():
    """2 x (20 + 4 x 5) = 80 tokens, and 2 x 4 x (20 + 5) = 200 without sharing."""
    batch = groups_batch([(20, [5] * 4), (20, [5] * 4)])
    with one_rank():
        assert [len(prepare_dynamic_batch(batch, 80, share_prompts=share)[1]) for share in (True, False)] == [1, 3]


def split(world):
    """Rank 0: one group of 40 tokens; rank 1: 8 prompts of their own."""
    batch = groups_batch([(8, [4] * 8)] if world.rank == 0 else [(8, [4])] * 8, seed=world.rank)
    _, rows = prepare_dynamic_batch(batch, 40, share_prompts=True)
    return rows, [tokens(batch, part) for part in rows]


def test_ranks_whose_prompts_are_shared_make_as_many_micro_batches_as_the_others():
    (shared, sizes), (others, other_sizes) = run_ranks(2, split)
    assert len(shared) == len(others) == 3 and max(sizes + other_sizes) <= 40
    assert all(sorted(r for part in rows for r in part) == list(range(8)) for rows in (shared, others))
