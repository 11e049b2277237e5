"""Every loss by every aggregation mode: value and gradient are those of the whole mini-batch in one piece, however it
is cut, padded, ordered or packed, over however many ranks, whatever stands at masked positions. And every estimator,
which sees the whole batch, for padding, row order and dead rows.

Float64 and rtol 1e-8: sums in another order differ by some 1e-15, the smallest of the errors looked for (a mean over a
micro-batch, a token too many) by 1e-3. That the numbers are the papers', the loops in test_core_algos.py,
test_policy_losses.py and test_advantages.py say.
"""

import math
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

import remax
from lib.core_algos import (
    KL_PENALTIES,
    LOSS_AGG_MODES,
    agg_loss,
    compute_gae_advantage_return,
    compute_token_masks,
    compute_value_loss,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
)
from lib.data import prepare_dynamic_batch
from lib.data_proto import DataProto
from lib.declared import ADV_ESTIMATORS, POLICY_LOSSES
from lib.distributed import full_tensor, make_mesh, set_gradient_sync, shard_model, trainable_parameters
from lib.model import batched_log_probs, load_critic, load_model, response_log_probs, response_values
from tests.common import float64_norms, rollout_batch, run_ranks, save_tiny
from tests.core_algos.test_core_algos import SCALE, bits_equal, counts, poison, random_batch

SETTINGS = {"dro": {"dro_beta": 0.3}, "gspo": {"cliprange_low": 0.2, "cliprange_high": 0.28}}
MASKS = {"cov_keep": {"cov_ratio": 0.2, "cov_bounds": (-0.5, 1.0)}, "cov_pick": {"cov_ratio": 0.2}}
MASKS["top_entropy"] = {"fraction": 0.7}
ROWS = 12


def policy_losses(name, b, leaf):
    loss = get_policy_loss_fn(name, SETTINGS.get(name, {}))
    tensors = {key: b[key] for key in POLICY_LOSSES[name].columns}
    losses, _ = loss(b["old_log_probs"], leaf, b["advantages"], b["response_mask"], **tensors)
    return torch.where(b["token_mask"], losses, 0)


def kl_losses(name, b, leaf):
    return kl_penalty(leaf, b["ref_log_prob"], name, b["response_mask"], b["old_log_probs"])


def value_losses(b, leaf):
    return compute_value_loss(leaf, b["returns"], b["values"], b["response_mask"])[0]


# name: batch, log-probs or values (B, T) -> losses (B, T)
LOSSES = {name: partial(policy_losses, name) for name in POLICY_LOSSES}
LOSSES |= {f"kl {k}{form}": partial(kl_losses, k + form) for k in KL_PENALTIES for form in ("", "+", "_unbiased")}
LOSSES["value"] = value_losses


def with_masks(b, seed=3):
    return b | compute_token_masks(MASKS, b | {"group": torch.arange(len(b["response_mask"]))}, seed)


def mini_batch(seed, dead_rows=()):
    """The batch keys of a step, (B, T) each, before the masks over the whole step; and the leaf, the new log-probs."""
    old, new, advantages, mask = random_batch(seed, rows=ROWS, width=7)
    mask[list(dead_rows)] = 0
    g = torch.Generator().manual_seed(seed)
    randn = lambda: torch.randn(mask.shape, generator=g, dtype=torch.float64)  # noqa: E731
    b = {"old_log_probs": old, "advantages": advantages, "response_mask": mask, "attention_mask": mask}
    b |= {"rollout_log_probs": old + 0.4 * randn(), "ref_log_prob": old + 0.5 * randn(), "entropys": randn().abs()}
    b |= {"values": new + 0.5 * randn(), "returns": randn()}
    return b, new


def share(name, mode, b, leaf, total):
    """The micro-batch's share of the loss; `total` are the counts of the mini-batch."""
    return agg_loss(LOSSES[name](b, leaf), b["response_mask"], mode, loss_scale_factor=SCALE, **total)


def in_parts(name, mode, parts, leaf, total):
    """-> loss, d loss / d leaf; parts: (micro-batch, its rows in the leaf)."""
    leaf = leaf.detach().clone().requires_grad_()
    loss = leaf.new_zeros(())
    for part, rows in parts:
        here = leaf[rows]
        loss = loss + share(name, mode, part, pad(here, (0, part["response_mask"].shape[1] - here.shape[1])), total)
    loss.backward()
    return loss.detach(), leaf.grad


def all_equal(results, expected, where):
    for got, wanted in zip(results, expected):
        # atol: a gradient may be the 0 between two numbers of size 1
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-13, msg=lambda m: f"{where}: {m}")


def rows_of(b, rows, extra_columns=0):
    return {key: pad(x[rows], (0, extra_columns)) for key, x in b.items()}


def poisoned(b, seed):
    """NaN, infinities and ±1e9 at every masked position of all but the masks."""
    return {
        key: poison(x, b["response_mask"], seed + k) if x.is_floating_point() else x
        for k, (key, x) in enumerate(b.items())
    }


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_depends_on_the_layout_of_its_mini_batch(name, one_rank):
    order = random.Random(1).sample(range(ROWS), ROWS)
    splits = {
        "permuted": [order],
        "two": [order[:6], order[6:]],
        "uneven": [order[:1], order[1:4], order[4:]],
        "single rows": [[row] for row in order],
    }
    b, new = mini_batch(0)
    b = with_masks(b)
    dirty, total = poisoned(b, 0), counts(b["response_mask"])
    new_dirty = poison(new, b["response_mask"], 0)
    dynamic, rows = prepare_dynamic_batch(DataProto.from_dict(tensors=dirty), 10)
    assert len(dynamic) > 2
    for mode in LOSS_AGG_MODES:
        expected = in_parts(name, mode, [(b, list(range(ROWS)))], new, total)
        assert expected[1].any() and (expected[1][b["response_mask"] == 0] == 0).all()
        parts = [(dict(micro.batch.items()), r) for micro, r in zip(dynamic, rows)]
        all_equal(in_parts(name, mode, parts, new_dirty, total), expected, (mode, "dynamic"))
        for layout, split in splits.items():
            parts = [(rows_of(dirty, r, extra_columns=k), r) for k, r in enumerate(split)]
            all_equal(in_parts(name, mode, parts, new_dirty, total), expected, (mode, layout))


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_at_masked_positions_changes_no_bit(name):
    b, new = mini_batch(5)
    b = with_masks(b)
    mask, total = b["response_mask"], counts(b["response_mask"])
    for mode in LOSS_AGG_MODES:
        expected = in_parts(name, mode, [(b, list(range(ROWS)))], new, total)
        for junk in (math.nan, 1e9, -math.inf):
            dirty = {key: x.masked_fill(mask == 0, junk) if x.is_floating_point() else x for key, x in b.items()}
            got = in_parts(name, mode, [(dirty, list(range(ROWS)))], new.masked_fill(mask == 0, junk), total)
            assert all(bits_equal(x, y) for x, y in zip(got, expected)), (mode, junk)


# ----------------------------------------------------------------------------------------- two ranks


BATCHES = ({"seed": 1}, {"seed": 2, "dead_rows": tuple(range(6, ROWS))})  # the last: rank 1 has nothing


def losses_over_ranks(world):
    """{(batch, name, mode): (loss, gradient)}, summed over the ranks, each with its half of the rows."""
    results = {}
    for n, arguments in enumerate(BATCHES):
        b, new = mini_batch(**arguments)
        half = slice(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size)
        dirty, new = rows_of(poisoned(b, n), half), poison(new, b["response_mask"], n)
        whole = with_masks(dict(DataProto.from_dict(tensors=dirty).all_gather().batch.items()))
        mine = DataProto.from_dict(tensors=rows_of(whole, half))
        total = torch.tensor(list(counts(mine.batch["response_mask"]).values()))
        dist.all_reduce(total)
        total = dict(zip(("global_tokens", "global_rows"), total.tolist()))
        micro_batches, rows = prepare_dynamic_batch(mine, 10)
        parts = [(dict(m.batch.items()), [half.start + row for row in r]) for m, r in zip(micro_batches, rows)]
        for name in LOSSES:
            for mode in LOSS_AGG_MODES:
                results[n, name, mode] = in_parts(name, mode, parts, new, total)
    for pair in results.values():
        for x in pair:
            dist.all_reduce(x)
    return results


def test_no_loss_depends_on_the_number_of_ranks():
    """Two gloo ranks, token-budget micro-batches, masks drawn from the gathered batch; against one piece, no ranks."""
    ranks = run_ranks(2, losses_over_ranks)
    for n, arguments in enumerate(BATCHES):
        b, new = mini_batch(**arguments)
        b = with_masks(b)
        for name in LOSSES:
            for mode in LOSS_AGG_MODES:
                total = counts(b["response_mask"])
                expected = in_parts(name, mode, [(b, list(range(ROWS)))], new, total)
                for results in ranks:
                    all_equal(results[n, name, mode], expected, (n, name, mode))


# --------------------------------------------------------------------- padded or packed, through a model


def wider(batch, left, right):
    """More padding on both sides, with other tokens in it."""
    b, P = dict(batch.batch.items()), batch.batch["prompts"].shape[1]
    wide = {key: pad(b[key], (left, right)) for key in ("input_ids", "attention_mask", "position_ids")}
    wide["input_ids"] = torch.where(wide["attention_mask"].bool(), wide["input_ids"], 77)
    wide |= {"prompts": wide["input_ids"][:, : left + P], "responses": wide["input_ids"][:, left + P :]}
    others = {key: pad(x, (0, right)) for key, x in b.items() if key not in wide}
    return DataProto.from_dict(tensors=wide | others)


def test_no_loss_depends_on_padding_or_packing_of_the_model(tmp_path, one_rank):
    """The gradient of every parameter, with the entropy bonus."""
    model = float64_norms(load_model(save_tiny(tmp_path), dtype=torch.float64))
    parameters = [p for p in model.parameters() if p.requires_grad]
    batch = rollout_batch([5, 2, 3, 4, 2, 6], [6, 2, 7, 5, 1, 4])
    mask = batch.batch["response_mask"]
    mask[0, 2:4] = mask[3, 1] = 0  # tool output
    mask[4] = 0
    total, g = counts(mask), torch.Generator().manual_seed(0)
    randn = lambda: torch.randn(mask.shape, generator=g, dtype=torch.float64)  # noqa: E731
    with torch.no_grad():
        old, entropys = response_log_probs(model, batch, 0.8)[:2]
    b = {"old_log_probs": old + 0.3 * randn(), "advantages": randn(), "response_mask": mask, "entropys": entropys}
    b |= {"rollout_log_probs": old + 0.4 * randn(), "ref_log_prob": old + 0.5 * randn()}
    batch.batch.update(poisoned(with_masks(b | {"values": old, "returns": randn()}), 0))
    dynamic, _ = prepare_dynamic_batch(batch, 30)
    assert len(dynamic) == 2
    layouts = {
        "packed": ([batch], True),
        "padded": ([batch], False),
        "dynamic, wider, packed": ([wider(part, 2, 3) for part in dynamic], True),
        "uneven, wider, padded": ([wider(batch[[5, 0, 2, 4]], 2, 3), batch[[1, 3]]], False),
    }

    def results(micro_batches, padding_free):
        sums = {}
        for part in micro_batches:
            log_probs, entropy = response_log_probs(model, part, 0.8, padding_free=padding_free)[:2]
            tensors = dict(part.batch.items())
            for name in POLICY_LOSSES:  # the others are functions of the same log-probs, token by token
                for mode in LOSS_AGG_MODES:
                    loss = share(name, mode, tensors, log_probs, total)
                    loss = loss - 0.01 * agg_loss(entropy, tensors["response_mask"], "token-mean", **total)
                    gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
                    new = torch.cat([loss.detach()[None], *(x.flatten() for x in gradients)])
                    sums[name, mode] = sums.get((name, mode), 0) + new
        return sums

    expected = results(*layouts.pop("packed"))
    for layout, arguments in layouts.items():
        for key, got in results(*arguments).items():
            assert abs(got[0] / expected[key][0] - 1) < 1e-8, (layout, key)
            assert (got - expected[key])[1:].norm() < 1e-8 * expected[key][1:].norm(), (layout, key)


# ------------------------------------------------------------------- shared prompts, through a model


def groups_batch(groups, order=None, seed=0):
    """Rows of the groups (prompt length, response lengths), in this order; a group's rows have one prompt."""
    batch = rollout_batch([p for p, rs in groups for _ in rs], [r for _, rs in groups for r in rs], seed)
    P, first = batch.batch["prompts"].shape[1], 0
    for _, responses in groups:
        rows = slice(first, first + len(responses))
        batch.batch["input_ids"][rows, :P] = batch.batch["input_ids"][first, :P].clone()
        first = rows.stop
    return batch if order is None else batch[order]


def tokens_of(model, call):
    """What `call` returns, and the number of tokens that went through the model's layers."""
    numbers = []
    hook = lambda module, args, kwargs: numbers.append(kwargs["input_ids"].numel())  # noqa: E731
    handle = model.base_model.register_forward_pre_hook(hook, with_kwargs=True)
    result = call()
    handle.remove()
    return result, sum(numbers)


def needed_tokens(batch, share):
    """Row by row: the prompt, unless a row before had it, and the response up to the last token but one of the
    trained."""
    total, seen = 0, set()
    ids, attention, trained = (batch.batch[key].tolist() for key in ("input_ids", "attention_mask", "response_mask"))
    for row, mask, sampled in zip(ids, attention, trained):
        P = len(row) - len(sampled)
        if any(sampled):
            prompt = tuple(token for token, m in zip(row[:P], mask) if m)
            total += 0 if share and prompt in seen else len(prompt)
            total += max(t for t, m in enumerate(sampled) if m)
            seen.add(prompt)
    return total


def outputs_and_gradients(model, forward, weights):
    """The outputs (B, T) and the gradient of their sum with these weights, which are not zero at masked places."""
    model.zero_grad()
    outputs = forward()
    sum((w * x).sum() for w, x in zip(weights, outputs)).backward()
    return [*(x.detach() for x in outputs), torch.cat([p.grad.flatten() for p in model.parameters()])]


def assert_sharing_is_exact(model, batch, tolerance=1e-9, **options):
    weights = torch.randn(3, *batch.batch["responses"].shape, dtype=torch.float64)
    weights[2] = 0  # sum_pi_squared has no gradient
    forward = partial(response_log_probs, model, batch, 0.8, sum_pi_squared=True)
    expected = outputs_and_gradients(model, partial(forward, padding_free=False), weights)
    for share in (False, True):
        got, tokens = tokens_of(
            model, lambda share=share: outputs_and_gradients(model, partial(forward, share_prompts=share), weights)
        )
        for x, wanted in zip(got, expected, strict=True):
            assert (x - wanted).norm() <= tolerance * wanted.norm(), share
        assert tokens == needed_tokens(batch, share)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Two heads of queries, one of keys."""
    return float64_norms(load_model(save_tiny(tmp_path_factory.mktemp("tiny")), dtype=torch.float64))


RAGGED = [(5, [4, 1, 9, 6]), (7, [3]), (2, [8, 8, 2]), (11, [20, 1]), (5, [17, 16, 33])]


@settings(max_examples=20)
@given(data=st.data())
def test_a_shared_prompt_changes_no_log_prob_entropy_or_gradient(tiny_model, data):
    """Any groups, of one row too, in any order, with tool outputs and rows without a trained token among them."""
    lengths = st.tuples(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=4))
    groups = data.draw(st.lists(lengths, min_size=1, max_size=4))
    batch = groups_batch(groups, data.draw(st.permutations(range(sum(len(rs) for _, rs in groups)))))
    mask = batch.batch["response_mask"]
    for row in range(len(mask)):
        start, end = sorted(data.draw(st.tuples(st.integers(0, 20), st.integers(0, 20))))
        mask[row, start : data.draw(st.sampled_from([start, start, end]))] = 0
    mask[data.draw(st.integers(0, len(mask) - 1)), 0] = 1
    assert_sharing_is_exact(tiny_model, batch)


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        ({}, 1e-9),  # with gradient checkpointing
        # windows shorter and longer than the prompts
        ({"cls": Gemma3ForCausalLM, "config": Gemma3TextConfig, "sliding_window": 4}, 1e-9),
        ({"cls": Gemma3ForCausalLM, "config": Gemma3TextConfig, "sliding_window": 9}, 1e-9),
        # the router's softmax is computed in float32
        ({"cls": Qwen3MoeForCausalLM, "config": Qwen3MoeConfig, "num_experts": 4, "num_experts_per_tok": 2}, 1e-6),
    ],
)
def test_shared_prompts_in_other_architectures_and_with_checkpointing(tmp_path, monkeypatch, more, tolerance):
    if "sliding_window" in more:
        more = {**more, "head_dim": 32, "sliding_window_pattern": 2}
        norm = lambda self, x: x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)  # noqa: E731
        monkeypatch.setattr(Gemma3RMSNorm, "forward", norm)
    path = save_tiny(tmp_path, **more)
    model = load_model(path, dtype=torch.float64, gradient_checkpointing=not more)
    model.config._experts_implementation = "eager"  # the other ones know no float64
    if "sliding_window" not in more:
        float64_norms(model)
    batch = groups_batch(RAGGED, random.Random(0).sample(range(13), 13))
    batch.batch["response_mask"][2, 1:3] = 0
    assert_sharing_is_exact(model, batch, tolerance)


def test_a_shared_prompt_changes_no_value_of_the_critic(tmp_path):
    path = save_tiny(tmp_path, cls=Qwen2ForTokenClassification, num_labels=1)
    critic, batch = float64_norms(load_critic(path, dtype=torch.float64)), groups_batch(RAGGED)
    weights = torch.randn(1, *batch.batch["responses"].shape, dtype=torch.float64)
    padded, shared = [
        outputs_and_gradients(critic, lambda options=options: [response_values(critic, batch, **options)], weights)
        for options in ({"padding_free": False}, {"share_prompts": True})
    ]
    for got, wanted in zip(shared, padded, strict=True):
        assert (got - wanted).norm() <= 1e-9 * wanted.norm()
    _, tokens = tokens_of(critic, lambda: response_values(critic, batch))
    assert tokens == needed_tokens(batch, share=True) < needed_tokens(batch, share=False)


def test_prompts_that_differ_in_one_token_or_in_padding_are_not_shared(tiny_model):
    batch = groups_batch([(5, [4, 4, 4]), (3, [4])])
    ids, P = batch.batch["input_ids"], 5
    ids[1, 2] += 1
    ids[3, :P] = ids[0, :P]  # its first two places are padding
    _, tokens = tokens_of(tiny_model, lambda: response_log_probs(tiny_model, batch, 1.0))
    assert tokens == 5 + 3 + 3 + 5 + 3 + 3 + 3
    assert_sharing_is_exact(tiny_model, batch)


@pytest.mark.parametrize(("start", "tokens"), [(8, 6 + 8 + 7 + 11 + 6 + 6), (0, 6 + 8 + 19 + 6 + 6)])
def test_a_row_of_two_sequences_shares_its_first_prompt_and_nothing_else(tiny_model, start, tokens):
    """Rows 0 and 1 have one prompt. In row 1 another sequence starts, with a prompt of its own of 5 tokens: after 8
    tokens of the response, or in place of it."""
    batch = groups_batch([(6, [9, 20]), (6, [7])])
    together = response_log_probs(tiny_model, batch, 1.0)[0]
    batch.batch["position_ids"][1, 6 + start :] = torch.arange(20 - start)
    batch.batch["response_mask"][1, start : start + 5] = 0
    apart, computed = tokens_of(tiny_model, lambda: response_log_probs(tiny_model, batch, 1.0)[0])
    assert computed == tokens
    for row in range(3):
        alone = response_log_probs(tiny_model, batch[[row]], 1.0)[0][0]
        torch.testing.assert_close(apart[row], alone, rtol=1e-9, atol=1e-12)
    # it does not see the first sequence
    assert (apart[1, start + 5 :] - together[1, start + 5 :]).abs().min() > 1e-3


def test_a_micro_batch_without_a_trained_token_runs_and_has_no_gradient(tiny_model):
    """FSDP's collectives need its forward and backward."""
    batch = groups_batch([(5, [4, 4])])
    batch.batch["response_mask"][:] = 0
    tiny_model.zero_grad()
    (log_probs, _), tokens = tokens_of(tiny_model, lambda: response_log_probs(tiny_model, batch, 1.0))
    log_probs.sum().backward()
    assert tokens > 0 and not any(p.grad.any() for p in tiny_model.parameters())


def share_over_ranks(world, path, share, padding_free):
    """Old log-probs of this rank's rows, and loss and gradient of a mini-batch as the scripts make them."""
    model = float64_norms(load_model(path, dtype=torch.float64))
    model = shard_model(model, make_mesh(world), torch.float64)
    parameters = trainable_parameters(model)
    batch = groups_batch([(5, [4, 1, 9, 6]), (7, [3, 3, 19, 2]), (2, [8, 8, 2, 1]), (11, [20, 1, 30, 7])])
    batch = batch[list(range(16))[world.rank * 16 // world.size : (world.rank + 1) * 16 // world.size]]
    options = {"padding_free": padding_free, "share_prompts": share}
    old = batched_log_probs(model, batch, 0.8, 50, **options)[0]
    micro_batches, _ = prepare_dynamic_batch(batch, 50, share_prompts=share)
    total = torch.zeros((), dtype=torch.float64)
    for i, micro in enumerate(micro_batches):
        set_gradient_sync(model, i == len(micro_batches) - 1)
        log_probs, entropy = response_log_probs(model, micro, 0.8, **options)
        loss = (log_probs * torch.arange(1, log_probs.shape[1] + 1) - 0.1 * entropy).sum()
        (loss * world.size).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return old, total, torch.cat([full_tensor(p.grad).flatten() for p in parameters]), len(micro_batches)


def test_sharing_is_exact_over_ranks_and_micro_batches(tmp_path):
    path = save_tiny(tmp_path)
    [(old, loss, gradient, unshared)] = run_ranks(1, share_over_ranks, path, False, False)
    for size in (1, 2):
        ranks = run_ranks(size, share_over_ranks, path, True, True)
        torch.testing.assert_close(torch.cat([r[0] for r in ranks]), old, rtol=1e-9, atol=1e-12)
        for _, other_loss, other_gradient, n in ranks:
            assert 1 < n < unshared
            torch.testing.assert_close(other_loss, loss, rtol=1e-9, atol=0)
            assert (other_gradient - gradient).norm() < 1e-9 * gradient.norm()


# --------------------------------------------------------------------------------------- estimators


OF_OTHER_SCRIPTS = {
    "gae": (lambda r, mask, _, values: compute_gae_advantage_return(r, values, mask, 1.0, 1.0), ("values",)),
    "remax": (
        lambda r, mask, _, reward_baselines: remax.remax_advantages(r, reward_baselines, mask.bool()),
        ("reward_baselines",),
    ),
}
"""{name: (estimator, the tensors that it takes by keyword)}"""


@pytest.mark.parametrize("name", [*ADV_ESTIMATORS, *OF_OTHER_SCRIPTS])
def test_no_row_of_an_estimator_depends_on_dead_rows_row_order_or_padding(name):
    """Dead rows and row order change no bit. Padding may change the order in which a row is summed: rtol 1e-12."""
    estimate, tensors = OF_OTHER_SCRIPTS.get(name) or (
        get_adv_estimator_fn(name, {"singleton": "zero"} if "singleton" in ADV_ESTIMATORS[name].settings else {}),
        ADV_ESTIMATORS[name].columns,
    )
    for seed in range(10):
        b, _ = mini_batch(seed)
        g = torch.Generator().manual_seed(seed)
        b |= {"token_level_rewards": b["returns"].round().abs(), "squared_score": b["entropys"] / 9}
        b |= {"reward_baselines": torch.randn(ROWS, generator=g).double()}
        b |= {"rollout_is_weights": 2 * torch.rand(b["returns"].shape, generator=g).double()}
        b |= {"reward_components": torch.randn(ROWS, 2, generator=g).round().double()}
        b |= {"anchor_states": torch.randint(0, 2, b["returns"].shape, generator=g)}
        b |= {"turn_numbers": torch.randint(0, 2, b["returns"].shape, generator=g).cumsum(1) + 1}
        index = torch.randint(0, 5, (ROWS,), generator=g)  # groups of one too

        def call(rows, dead=0, columns=0, b=b, index=index, seed=seed):
            keys = ("token_level_rewards", "response_mask", *tensors)
            x = {key: b[key][rows + rows[:dead]] for key in keys}
            x = {key: pad(v, (0, columns)) if v.shape[1:] == (7,) else v for key, v in x.items()}
            x["response_mask"][ROWS:] = 0
            mask = x["response_mask"]
            for k, (key, v) in enumerate(x.items()):
                if key != "response_mask":
                    live = mask if v.shape == mask.shape else mask.any(1).view(-1, *[1] * (v.dim() - 1)).expand(v.shape)
                    x[key] = poison(v, live, seed + k)
            ids = index[rows + rows[:dead]].numpy()
            return estimate(x.pop("token_level_rewards"), x.pop("response_mask"), ids, **x)

        order = random.Random(seed).sample(range(ROWS), ROWS)
        back = torch.tensor(order).argsort()
        for got, expected in zip(call(order, dead=4), call(list(range(ROWS)))):
            assert bits_equal(got[:ROWS][back], expected) and (got[ROWS:] == 0).all()
        for got, expected in zip(call(order, dead=4, columns=3), call(list(range(ROWS)))):
            torch.testing.assert_close(got[:ROWS][back], pad(expected, (0, 3)), rtol=1e-12, atol=1e-12)
