"""Every loss by every aggregation mode: value and gradient are those of the whole mini-batch in one piece, however it
is cut, padded or ordered, whatever stands at masked positions. Log-probs do not change when rows are packed and share
prompts. Ranks: test_flag_pairs.py, tests/distributed/test_distributed.py; estimators: tests/core_algos/.

Float64 and rtol 1e-8: sums in another order differ by some 1e-15, the smallest of the errors looked for (a mean over a
micro-batch, a token too many) by 1e-3.
"""

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from lib.core_algos import (
    KL_PENALTIES,
    LOSS_AGG_MODES,
    agg_loss,
    compute_token_masks,
    compute_value_loss,
    get_policy_loss_fn,
    kl_penalty,
)
from lib.data import prepare_dynamic_batch
from lib.data_proto import DataProto
from lib.declared import POLICY_LOSSES
from lib.model import load_model, response_log_probs
from tests.common import float64_norms, rollout_batch, save_tiny
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


def mini_batch(seed):
    """The batch keys of a step, (B, T) each, and the leaf, the new log-probs."""
    old, new, advantages, mask = random_batch(seed, rows=ROWS, width=7)
    g = torch.Generator().manual_seed(seed)
    randn = lambda: torch.randn(mask.shape, generator=g, dtype=torch.float64)  # noqa: E731
    b = {"old_log_probs": old, "advantages": advantages, "response_mask": mask, "attention_mask": mask}
    b |= {"rollout_log_probs": old + 0.4 * randn(), "ref_log_prob": old + 0.5 * randn(), "entropys": randn().abs()}
    b |= {"values": new + 0.5 * randn(), "returns": randn()}
    return b | compute_token_masks(MASKS, b | {"group": torch.arange(ROWS)}, seed), new


def in_parts(name, mode, parts, leaf, total):
    """-> loss, d loss / d leaf. parts: (micro-batch, its rows in the leaf); total: the counts of the mini-batch."""
    leaf = leaf.detach().clone().requires_grad_()
    loss = leaf.new_zeros(())
    for part, rows in parts:
        mask = part["response_mask"]
        losses = LOSSES[name](part, pad(leaf[rows], (0, mask.shape[1] - leaf.shape[1])))
        loss = loss + agg_loss(losses, mask, mode, loss_scale_factor=SCALE, **total)
    loss.backward()
    return loss.detach(), leaf.grad


def all_equal(results, expected, where):
    for got, wanted in zip(results, expected):
        # atol: a gradient may be the 0 between two numbers of size 1
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-13, msg=lambda m: f"{where}: {m}")


def rows_of(b, rows, extra_columns=0):
    return {key: pad(x[rows], (0, extra_columns)) for key, x in b.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_depends_on_the_layout_of_its_mini_batch_or_on_masked_positions(name, one_rank):
    """NaN, infinities and ±1e9 at masked positions change no bit of the whole. A part may have no rows."""
    order = random.Random(1).sample(range(ROWS), ROWS)
    splits = {
        "permuted": [order],
        "two": [order[:6], order[6:]],
        "uneven": [order[:1], order[1:4], order[4:]],
        "single rows": [[], *([row] for row in order)],
    }
    (b, new), whole = mini_batch(0), list(range(ROWS))
    mask, total = b["response_mask"], counts(b["response_mask"])
    dirty = {key: poison(x, mask, k) if x.is_floating_point() else x for k, (key, x) in enumerate(b.items())}
    new_dirty = poison(new, mask, 0)
    dynamic, rows = prepare_dynamic_batch(DataProto.from_dict(tensors=dirty), 10)
    assert len(dynamic) > 2
    for mode in LOSS_AGG_MODES:
        expected = in_parts(name, mode, [(b, whole)], new, total)
        assert expected[1].any() and (expected[1][mask == 0] == 0).all()
        for got, wanted in zip(in_parts(name, mode, [(dirty, whole)], new_dirty, total), expected):
            assert bits_equal(got, wanted), mode
        parts = [(dict(micro.batch.items()), r) for micro, r in zip(dynamic, rows)]
        all_equal(in_parts(name, mode, parts, new_dirty, total), expected, (mode, "dynamic"))
        for layout, split in splits.items():
            parts = [(rows_of(dirty, r, extra_columns=k), r) for k, r in enumerate(split)]
            all_equal(in_parts(name, mode, parts, new_dirty, total), expected, (mode, layout))


# ---- shared prompts, through a model -------------------------------------------------------------
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


def assert_sharing_is_exact(model, batch):
    weights = torch.randn(3, *batch.batch["responses"].shape, dtype=torch.float64)
    weights[2] = 0  # sum_pi_squared has no gradient
    forward = partial(response_log_probs, model, batch, 0.8, sum_pi_squared=True)
    expected = outputs_and_gradients(model, partial(forward, padding_free=False), weights)
    for share in (False, True):
        shared = partial(forward, share_prompts=share)
        got, tokens = tokens_of(model, partial(outputs_and_gradients, model, shared, weights))
        for x, wanted in zip(got, expected, strict=True):
            assert (x - wanted).norm() <= 1e-9 * wanted.norm(), share
        assert tokens == needed_tokens(batch, share)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Two heads of queries, one of keys."""
    return float64_norms(load_model(save_tiny(tmp_path_factory.mktemp("tiny")), dtype=torch.float64))


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


def test_prompts_that_differ_in_one_token_or_in_padding_are_not_shared(tiny_model):
    batch = groups_batch([(5, [4, 4, 4]), (3, [4])])
    ids, P = batch.batch["input_ids"], 5
    ids[1, 2] += 1
    ids[3, :P] = ids[0, :P]  # its first two places are padding
    _, tokens = tokens_of(tiny_model, lambda: response_log_probs(tiny_model, batch, 1.0))
    assert tokens == 5 + 3 + 3 + 5 + 3 + 3 + 3
    assert_sharing_is_exact(tiny_model, batch)


def test_a_micro_batch_without_a_trained_token_runs_and_has_no_gradient(tiny_model):
    """FSDP's collectives need its forward and backward."""
    batch = groups_batch([(5, [4, 4])])
    batch.batch["response_mask"][:] = 0
    tiny_model.zero_grad()
    (log_probs, _), tokens = tokens_of(tiny_model, lambda: response_log_probs(tiny_model, batch, 1.0))
    log_probs.sum().backward()
    assert tokens > 0 and not any(p.grad.any() for p in tiny_model.parameters())
