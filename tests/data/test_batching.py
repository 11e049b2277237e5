"""lib/data/: rows over ranks, and micro-batches of rows that share prompts. Of rows that do not:
tests/scripts/test_flag_pairs.py."""

import itertools
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib import InputError
from lib.data import (
    balance_groups,
    exchange_groups,
    gather_rows,
    prepare_dynamic_batch,
    restore_dynamic_batch,
    scatter_rows,
    split_mini_batches,
)
from lib.data.balance import group_costs, pad_rows
from lib.data.micro_batches import prompt_groups
from lib.data_proto import DataProto
from lib.distributed import full_tensor, make_mesh, shard_model, trainable_parameters
from lib.model import load_model, response_log_probs
from lib.model.packing import in_micro_batches
from lib.rollout import Rollouts
from tests.common import TOY_MODEL, VisionRow, rollout_batch, run_ranks, save_tiny, tiny_vision, vision_batch
from tests.scripts.test_invariance import float64_norms, groups_batch

one_rank = pytest.mark.usefixtures("one_rank")
EXAMPLES = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def prompt_of(batch, row):
    P = batch.batch["prompts"].shape[1]
    ids, mask = batch.batch["input_ids"][row].tolist(), batch.batch["attention_mask"][row].tolist()
    return tuple(token for token, m in zip(ids[:P], mask) if m)


def tokens(batch, rows):
    """Tokens of these rows, each prompt counted once."""
    responses = sum(int(batch.batch["response_mask"][row].sum()) for row in rows)
    return responses + sum(len(prompt) for prompt in {prompt_of(batch, row) for row in rows})


GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1)


@one_rank
@EXAMPLES
@given(GROUPS, st.integers(10, 120), st.randoms(use_true_random=False))
def test_rows_of_one_prompt_stay_together_and_count_it_once(groups, max_tokens, random):
    n = sum(len(responses) for _, responses in groups)
    batch = groups_batch(groups, random.sample(range(n), n))
    numbers = prompt_groups(batch).tolist()
    prompts = [prompt_of(batch, row) for row in range(n)]
    assert len({*zip(numbers, prompts)}) == len({*numbers}) == len({*prompts})

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


@one_rank
@EXAMPLES
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(30, 120))
def test_a_padded_row_counts_as_many_tokens_as_the_longest_of_its_micro_batch(lengths, max_tokens):
    batch = groups_batch([(1, [n]) for n in lengths])
    _, rows = prepare_dynamic_batch(batch, max_tokens, padding_free=False)
    assert sorted(r for part in rows for r in part) == list(range(len(lengths)))
    sizes = [len(part) * (1 + max(lengths[row] for row in part)) for part in rows]
    assert all(size <= max_tokens or len(part) == 1 for size, part in zip(sizes, rows))
    assert sizes == sorted(sizes, reverse=True)


# ---- rows over ranks -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def toy():
    return load_model(TOY_MODEL)


def test_costs_are_the_flops_of_linear_layers_and_attention(toy):
    """By hand, from the toy model's sizes: s + s^2 L D / N a row, a shared prompt once."""
    c = toy.config
    D, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = c.hidden_size * (2 * D + 2 * kv) + 3 * c.hidden_size * c.intermediate_size
    N = c.num_hidden_layers * layer + c.vocab_size * c.hidden_size

    def cost(s):
        return s + s * s * c.num_hidden_layers * D / N

    batch = groups_batch([(5, [4, 9]), (11, [1, 2])])
    whole = [cost(9) + cost(14), cost(12) + cost(13)]
    assert group_costs(batch, toy, False) == pytest.approx(whole, rel=1e-12)
    assert group_costs(batch, toy, True) == pytest.approx([whole[0] - cost(5), whole[1] - cost(11)], rel=1e-12)


def test_a_groups_images_cost_what_the_tower_takes_for_their_patches(tmp_path):
    tiny_vision("idefics3", tmp_path)
    model, batch = load_model(str(tmp_path)), vision_batch("idefics3", (VisionRow(2, 1, 2), VisionRow(0, 0, 2)))
    batch.non_tensor_batch["uid"] = np.array([*"0011"], dtype=object)
    tower = sum(p.numel() for name, p in model.named_parameters() if re.search("vision_model.encoder.*weight", name))
    tower -= 2 * 2 * 32  # norms
    tower += model.model.connector.modality_projection.proj.weight.numel()
    layers = model.model.text_model.layers
    N = sum(m.weight.numel() for m in [*layers.modules(), model.lm_head] if isinstance(m, torch.nn.Linear))
    for shared, times in ((False, 2), (True, 1)):
        costs = group_costs(batch, model, shared)
        batch_of_text = batch.select(non_tensor_batch_keys=["uid"])
        text = group_costs(batch_of_text, model, shared)
        assert costs[1] == text[1]
        assert costs[0] - text[0] == pytest.approx(times * 2 * 16 * tower / N, rel=1e-12)  # images x patches


def test_of_two_ranks_the_longest_do_not_meet():
    """Costs 8, 7 on rank 0 and 1, 2 on rank 1 become 8 + 1 and 7 + 2; with one mini-batch a row nothing can move."""

    def check(world):
        batch = groups_batch([(1, [n - 1]) for n in ((80, 70), (10, 20))[world.rank]], seed=world.rank)
        batch.non_tensor_batch["uid"] = np.array([["0", "1"], ["2", "3"]][world.rank], dtype=object)
        model = torch.nn.Linear(1000, 100_000, bias=False, device="meta")  # attention costs nothing beside it
        model.config = load_model(TOY_MODEL).config
        (plan, metrics), (fixed, _) = (balance_groups(batch, model, n) for n in (1, 2))
        assert sorted(map(list, plan)) == [["0", "2"], ["1", "3"]] and fixed == [{"0": 0, "1": 1}, {"2": 0, "3": 1}]
        assert metrics == pytest.approx({"perf/imbalance_sampled": 150 / 90, "perf/imbalance": 1}, rel=1e-3)

    run_ranks(2, check)


# ---- batches of any widths and sizes of groups ---------------------------------------------------
ANY = {  # rank: the uid of each of its rows. Groups of 1 to 5 rows, not adjacent, of two ranks, and a rank without
    2: ["a a a b c c c d a b d e", "e"],
    3: ["a a a b c c c d a b d e", "e", ""],
}


def rows_of_any(size: int) -> tuple[DataProto, list[list[int]]]:
    """(the rows of all ranks, their numbers on each rank). The rows of a uid have one prompt."""
    uids = [own.split() for own in ANY[size]]
    named = [uid for own in uids for uid in own]
    rng = np.random.default_rng(0)
    batch = rollout_batch(["abcde".index(uid) + 2 for uid in named], rng.integers(1, 9, len(named)).tolist())
    P = batch.batch["prompts"].shape[1]
    for i, uid in enumerate(named):
        batch.batch["input_ids"][i, :P] = batch.batch["input_ids"][named.index(uid), :P].clone()
    batch.batch["prompts"] = batch.batch["input_ids"][:, :P]
    batch.non_tensor_batch["uid"] = np.array(named, dtype=object)
    batch.batch["number"] = torch.arange(len(named))
    attended = batch.batch["attention_mask"][:, P:]
    batch.batch["weight"] = torch.from_numpy(rng.random(attended.shape)) * attended  # a copy's own column
    # what does not follow from tokens and lengths; the masks on the rank of row 0 alone
    batch.batch["response_mask"][0, 1] = 0
    batch.batch["anchor_states"] = (batch.batch["number"][:, None] * 2**40 + batch.batch["responses"]) * attended
    batch.batch["values"] = -batch.batch["anchor_states"].float()
    batch.batch["teacher_ids"] = batch.batch["responses"][..., None] * torch.arange(1, 4)
    messages = [[{"content": f"\u00e9{i}"}] * (i % 3) for i in range(len(named))]
    batch.non_tensor_batch["messages"] = np.fromiter(messages, object, count=len(named))
    ends = [0, *itertools.accumulate(map(len, uids))]
    return batch, [list(range(i, j)) for i, j in itertools.pairwise(ends)]


def rows_of_rank(size: int, rank: int) -> DataProto:
    """As wide as its own prompts and responses."""
    whole, numbers = rows_of_any(size)
    batch, P = whole[numbers[rank]], whole.batch["prompts"].shape[1]
    attended = batch.batch["attention_mask"]
    longest = (int(mask.sum(1).max()) if len(batch) else 1 for mask in (attended[:, :P], attended[:, P:]))
    return pad_rows(batch, *longest)


def updates(model, batch, mini_batches, world) -> list:
    """(loss, gradient) of each mini-batch, of token losses that depend on the row; in micro-batches of few tokens."""
    found, parameters = [], trainable_parameters(model)
    for mini_batch in split_mini_batches(batch, mini_batches):
        total = torch.zeros((), dtype=torch.float64)
        micros, _ = prepare_dynamic_batch(mini_batch, 20, share_prompts=True)
        for micro in micros:
            log_probs, entropy = response_log_probs(model, micro, 0.8, share_prompts=True)
            loss = ((-micro.batch["weight"] * log_probs - entropy) * micro.batch["response_mask"]).sum()
            (loss * world.size).backward()
            total += loss.detach()
        dist.all_reduce(total)
        found.append((total, [full_tensor(p.grad).clone() for p in parameters]))
        for p in parameters:
            p.grad = None
    return found


def any_rows(world, path: str, mini_batches: int, size: int) -> dict:
    whole, _ = rows_of_any(size)
    model = shard_model(float64_norms(load_model(path, dtype=torch.float64)), make_mesh(world), torch.float64)
    batch = whole.select() if world.size == 1 else rows_of_rank(size, world.rank)
    batch.meta_info = {"rank": world.rank}
    gathered = gather_rows(batch.select(), ["weight"])
    assert all(gathered[name].equal(whole.batch[name]) for name in ("weight", "values"))
    plan, metrics = balance_groups(batch, model, mini_batches)
    moved, first = exchange_groups(batch, plan), exchange_groups(batch[[0] if len(batch) else []], plan)
    assert set(first.non_tensor_batch["uid"]) <= {*plan[world.rank]}
    assert moved.meta_info == {"rank": world.rank} and [*moved.batch.keys()] == [*batch.batch.keys(), "mini_batch"]
    for name, column in whole.batch.items():  # what belongs to a row stays with it
        ours, theirs = moved.batch[name], column[moved.batch["number"]]
        if name == "position_ids":  # those of padding are any
            ours, theirs = (x * moved.batch["attention_mask"] for x in (ours, theirs))
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, name
    for name, column in whole.non_tensor_batch.items():
        assert [*moved.non_tensor_batch[name]] == [*column[moved.batch["number"]]], name
    parts = split_mini_batches(moved, mini_batches)
    costs = [sum(group_costs(part, model, False)) if len(part) else 0.0 for part in parts]
    scored = moved.select()
    t = gather_rows(scored, ["number", "weight"])
    scatter_rows(scored, {"own": t["number"], "response_mask": t["response_mask"]})
    assert scored.batch["own"].equal(moved.batch["number"])
    [log_probs, _] = in_micro_batches(model, moved, partial(model.token_log_probs, temperature=1.0), 20)
    alone = [t["number"].tolist(), t["group"].tolist()]
    columns = moved.batch["number"].tolist(), moved.batch["mini_batch"].tolist(), log_probs.sum(1).tolist()
    found = {"rows": [*zip(*columns)], "metrics": metrics, "all": alone, "costs": costs}
    return found | {"updates": updates(model, moved, mini_batches, world)}


@pytest.mark.parametrize("size, mini_batches", [(2, 3), (3, 4)])
def test_rows_of_any_number_train_as_on_one_rank(size, mini_batches, tmp_path):
    """Ranks may have batches of their own widths. Groups come together whole, in mini-batches of as many groups, but
    for one. Loss and gradient of each are those of one rank that has these rows, though a rank has micro-batches or
    whole mini-batches without a row."""
    path = save_tiny(tmp_path)
    found = run_ranks(size, any_rows, path, mini_batches, size)
    uids = " ".join(ANY[size]).split()
    rows = [row for of_rank in found for row in of_rank["rows"]]
    assert sorted(number for number, _, _ in rows) == list(range(len(uids)))
    for uid in set(uids):
        homes = {(rank, m) for rank, own in enumerate(found) for n, m, _ in own["rows"] if uids[n] == uid}
        assert len(homes) == 1
    groups = [len({uids[n] for n, m, _ in rows if m == number}) for number in range(mini_batches)]
    assert max(groups) - min(groups) <= 1 and sum(groups) == 5
    numbers, group = found[0]["all"]
    assert numbers == [n for n, _, _ in rows]
    assert len({*zip(group, (uids[n] for n in numbers))}) == len({*group}) == len({*uids})
    costs = np.array([of_rank["costs"] for of_rank in found])
    assert found[0]["metrics"]["perf/imbalance"] == pytest.approx(costs.max(0).sum() / (costs.sum() / size), rel=1e-9)
    assert found[0]["metrics"]["perf/imbalance"] <= found[0]["metrics"]["perf/imbalance_sampled"]
    assert all(of_rank["metrics"] == found[0]["metrics"] for of_rank in found)
    if mini_batches > 1:
        assert {m for _, m, _ in found[-1]["rows"]} != {*range(mini_batches)}  # else no test

    [alone] = run_ranks(1, any_rows, path, 1, size)
    log_probs = {n: x for n, _, x in alone["rows"]}
    assert all(x == pytest.approx(log_probs[n], rel=1e-9) for n, _, x in rows)
    for (loss, gradient), (other, of_other) in zip(found[0]["updates"], found[1]["updates"]):
        assert loss == other and all(map(torch.equal, gradient, of_other))
    losses, gradients = zip(*found[0]["updates"])
    [(expected, of_one)] = alone["updates"]
    torch.testing.assert_close(sum(losses), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close([sum(parts) for parts in zip(*gradients)], of_one, rtol=1e-7, atol=1e-9)


@one_rank
def test_rows_of_a_uid_that_the_first_batch_lacks_are_one_line(toy):
    batch = groups_batch([(2, [3, 3]), (2, [1, 1])])
    plan, _ = balance_groups(batch[:2], toy, 1)
    with pytest.raises(InputError, match="rows of uid 1, of which the first batch has none"):
        exchange_groups(batch, plan)


def test_given_tokens_that_train_are_refused_where_the_loss_reads_the_engines_log_probs():
    def check(world):
        batch = rollout_batch([2, 2], [3, 3])
        batch.batch["given_mask"] = batch.batch["response_mask"] * (world.rank == 1)
        reads = SimpleNamespace(reads_log_probs=True, world=world)
        with pytest.raises(InputError, match="given tokens that are trained have no log-probs of an engine"):
            Rollouts.balanced(reads, SimpleNamespace(module=None), batch)

    run_ranks(2, check)


def test_the_groups_of_all_ranks_are_in_the_order_of_their_numbers():
    """Group k of each rank before any group k + 1; the union of own_rows is the whole."""

    def gathered(world) -> list:
        stub = SimpleNamespace()
        everything = Rollouts.all_gather(stub, rows_of_rank(3, world.rank))
        own = Rollouts.own_rows(stub, everything)
        return [everything.batch["number"].tolist(), own.non_tensor_batch["uid"].tolist()]

    found = run_ranks(3, gathered)
    assert found[0][0] == [0, 1, 2, 8, 12, 3, 9, 4, 5, 6, 7, 10, 11] and found[0][0] == found[1][0] == found[2][0]
    assert [own for _, own in found] == [["a"] * 4 + ["c"] * 3, ["e"] * 2 + ["d"] * 2, ["b"] * 2]


@pytest.mark.parametrize(
    ("asked", "uid"),
    [({"n": 8}, "a"), ({"n": 4, "limits": [3] * 4}, "a"), ({"n": 4, "prefixes": [[1]] * 4}, "a"), ({"n": 4}, "b")],
)
def test_groups_in_flight_stay_as_they_began(asked, uid):
    begun, prompts = rollout_batch([2], [1]), rollout_batch([2], [1])
    begun.non_tensor_batch["uid"], prompts.non_tensor_batch["uid"] = np.array(["a"]), np.array([uid])
    with pytest.raises(InputError, match="--async-level: groups in flight get no other prompts"):
        Rollouts.generate(SimpleNamespace(_begun=(begun, 4, DataProto)), prompts, **asked)
