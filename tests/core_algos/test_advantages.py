"""Every estimator against a loop in Python floats, written from the formula; then what all of them must obey."""

import math
import random
import statistics
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from lib import InputError
from lib.core_algos import (
    AdaptiveEntropyController,
    AdaptiveKLController,
    apply_kl_penalty,
    compute_gae_advantage_return,
    compute_value_loss,
    explained_variance,
    get_adv_estimator_fn,
    length_adaptive_lam,
)
from lib.core_algos.papers.outcomes import gdpo, grpo_leave_one_out
from lib.declared import ADV_ESTIMATORS
from remax import remax_advantages
from tests.core_algos import test_core_algos as of_core
from tests.core_algos.test_core_algos import bits_equal, garbage, seeds
from tests.reference_formulas import grpo_advantages, ppo_advantages, rewards_to_go

GAMMA, LAM, ALPHA, WEIGHTS = 0.97, 0.9, 0.3, (0.5, 2.0)
for_all = partial(of_core.for_all, 12)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def random_batch(seed, dtype=torch.float64, size=1):
    """Tensors (B, T) and (B, ...) by name: tool spans and padding, dead rows, groups of 1 to 5, rewards often equal."""
    g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    index = [n for n in range(size * rng.randint(1, 4)) for _ in range(rng.randint(1, 5))]
    rng.shuffle(index)
    rows, width = len(index), size * rng.randint(1, 7)
    mask = (torch.rand(rows, width, generator=g) < 0.7).long()
    mask[torch.rand(rows, generator=g) < 0.15] = 0
    randn = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)  # noqa: E731
    rewards = randn(rows, width)
    if rng.random() < 0.5:  # outcomes 0, 0.3, 1 on one token
        rewards = torch.zeros(rows, width, dtype=dtype)
        for i in range(rows):
            if mask[i].any():
                rewards[i, rng.choice(mask[i].nonzero()[:, 0].tolist())] = rng.choice([0, 0.3, 1])
    components = torch.stack([rewards.sum(1), randn(rows).round()], 1)
    components[torch.rand(rows, 2, generator=g) < 0.2] = math.nan  # the scorer gave none
    return {
        "rewards": rewards,
        "mask": mask,
        "index": np.array(index),
        "values": randn(rows, width),
        "log_probs": -randn(rows, width).abs(),
        "squared_score": torch.rand(rows, width, generator=g, dtype=dtype),
        "is_weights": torch.rand(rows, width, generator=g, dtype=dtype) * 2,
        "baselines": randn(rows),
        "anchor_states": torch.randint(0, 2, (rows, width), generator=g),
        "components": components,
    }


# ------------------------------------------------------------------- the formulas, as loops, on a batch
def valid_tokens(b, i):
    return b["mask"][i].nonzero()[:, 0].tolist()


def at_tokens(b, name):
    return {(i, t): b[name][i, t].item() for i in range(len(b["mask"])) for t in valid_tokens(b, i)}


def live_rows(b):
    return {i: valid_tokens(b, i) for i in range(len(b["mask"])) if b["mask"][i].any()}


def as_tensor(b, numbers):
    tokens = torch.zeros(b["mask"].shape, dtype=torch.float64)
    for (i, t), x in numbers.items():
        tokens[i, t] = x
    return tokens


def slow(name, **kwargs):
    """The loop of --adv-estimator, on a batch and a singleton rule -> advantages, returns."""

    def estimate(b, singleton):
        keys = range(b["components"].shape[1])
        settings = kwargs | {"singleton": singleton}
        args = SimpleNamespace(adv_estimator=name, adv_settings=settings, reward_keys=keys)
        each = zip(b["index"], b["components"].tolist(), b["anchor_states"].tolist())
        rows = [SimpleNamespace(uid=u, components=x, anchor_states=states) for u, x, states in each]
        tensors = (at_tokens(b, key) for key in ("rewards", "squared_score", "is_weights"))
        return [as_tensor(b, numbers) for numbers in grpo_advantages(args, rows, live_rows(b), *tensors)]

    return estimate


def slow_remax(b, singleton):
    returns = as_tensor(b, rewards_to_go(live_rows(b), at_tokens(b, "rewards")))
    return torch.where(b["mask"].bool(), returns - b["baselines"][:, None], 0), returns


def slow_gae(lam, lam_policy=None, alpha=None):
    args = SimpleNamespace(gamma=GAMMA, gae_lambda=lam, gae_lambda_policy=lam_policy, length_adaptive_alpha=alpha)

    def estimate(b, singleton):
        numbers = ppo_advantages(args, live_rows(b), at_tokens(b, "rewards"), at_tokens(b, "values"))
        return [as_tensor(b, x) for x in numbers]

    return estimate


def gae(b, lam, lam_policy=None):
    return compute_gae_advantage_return(b["rewards"], b["values"], b["mask"], GAMMA, lam, lam_policy)


COLUMNS = {"squared_score": "squared_score", "rollout_is_weights": "is_weights", "anchor_states": "anchor_states"}
COLUMNS["reward_components"] = "components"


def of_groups(name, **settings):
    estimator, function = ADV_ESTIMATORS[name], get_adv_estimator_fn(name)

    def fast(b, singleton):
        columns = {column: b[COLUMNS[column]] for column in estimator.columns if column in COLUMNS}
        rule = {"singleton": singleton} if "singleton" in estimator.settings else {}
        return function(b["rewards"], b["mask"], b["index"], **columns, **settings, **rule)

    return fast, slow(name, **settings)


SETTINGS = {"reinforce_plus_plus": {"gamma": GAMMA}, "gdpo": {"reward_weights": WEIGHTS}}
SETTINGS |= {"gigpo": {"gamma": GAMMA, "turn_coef": 0.7}, "mt_grpo": {"turn_coef": 0.7}}
# name: (the estimator on a batch and a singleton rule, the loop); both -> advantages, returns
ESTIMATORS = {name: of_groups(name, **SETTINGS.get(name, {})) for name in ADV_ESTIMATORS}
TURNS = {f"{name}, not divided": {"norm_adv_by_std_in_grpo": False} | SETTINGS[name] for name in ("gigpo", "mt_grpo")}
ESTIMATORS |= {key: of_groups(key.partition(",")[0], **settings) for key, settings in TURNS.items()}
ESTIMATORS |= {
    "maxrl": tuple(lambda b, s, f=f: f(b | {"rewards": b["rewards"].abs()}, s) for f in of_groups("maxrl")),
    "remax": (lambda b, s: remax_advantages(b["rewards"] * 1.0, b["baselines"], b["mask"].bool()), slow_remax),
    "gae": (lambda b, s: gae(b, LAM), slow_gae(LAM)),
    "vapo": (lambda b, s: gae(b, 1.0, length_adaptive_lam(b["mask"], ALPHA)), slow_gae(1.0, alpha=ALPHA)),
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def poisoned(b, seed):
    """Garbage wherever the mask is 0; in a dead row also in what it has one of."""
    dead = b["mask"].sum(1) == 0
    out = dict(b)
    for k, (name, value) in enumerate(b.items()):
        if name not in ("mask", "index"):
            hit = b["mask"] == 0 if value.shape == b["mask"].shape and name != "components" else dead
            hit = hit if hit.shape == value.shape else dead.view(-1, *[1] * (value.dim() - 1)).expand(value.shape)
            out[name] = torch.where(hit, garbage(value.shape, seed + k).to(value.dtype), value)
    return out


def rearranged(b, rows):
    return {name: value[rows.numpy() if name == "index" else rows] for name, value in b.items()}


# ------------------------------------------------------------------------- what all estimators must obey
@every_estimator
@for_all(seed=seeds)
def test_equals_the_loop(name, seed):
    """With garbage in the masked positions, in 64 and 32 bits."""
    fast, slow = ESTIMATORS[name]
    b = random_batch(seed)
    for singleton in ("raw", "zero"):
        expected = slow(b, singleton)
        for result, wanted in zip(fast(poisoned(b, seed), singleton), expected):
            close(result, wanted)
            assert (result[b["mask"] == 0] == 0).all()
    single = {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in b.items()}
    exact = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in single.items()}
    for result, wanted in zip(fast(single, "zero"), fast(exact, "zero")):
        assert result.dtype == torch.float32 and not result.requires_grad
        torch.testing.assert_close(result.double(), wanted, rtol=1e-4, atol=1e-5)


@every_estimator
@for_all(seed=seeds)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 8), (torch.float64, 1)])
def test_dead_rows_row_order_and_garbage_change_no_bit(name, dtype, size, seed):
    """size 8: sums are vectorised, and so added in another order."""
    fast, _ = ESTIMATORS[name]
    b, rng = random_batch(seed, dtype, size), random.Random(seed)
    rows, dead = len(b["index"]), rng.randint(1, 4)
    more = rearranged(b, torch.tensor([*range(rows), *(rng.randrange(rows) for _ in range(dead))]))
    more["mask"][rows:] = 0
    order = torch.tensor(rng.sample(range(rows + dead), rows + dead))
    more = poisoned(rearranged(more, order), seed)
    for singleton in ("raw", "zero"):
        for result, expected in zip(fast(more, singleton), fast(b, singleton)):
            back = result[order.argsort()]
            assert bits_equal(back[:rows], expected)
            assert (back[rows:] == 0).all()


@every_estimator
def test_nothing_or_one_token_lives(name):
    fast, slow = ESTIMATORS[name]
    b = random_batch(3)
    b["mask"][:] = 0
    for result in fast(poisoned(b, 0), "zero"):
        assert (result == 0).all()
    b["mask"][0, 0] = 1
    for singleton in ("raw", "zero"):  # a whitening of one token would raise
        for result, expected in zip(fast(b, singleton), slow(b, singleton)):
            close(result, expected)
    empty = {k: v[:0] for k, v in b.items()}
    assert fast(empty, "zero")[0].shape == (0, b["mask"].shape[1])


def test_maxrl_takes_no_reward_below_0():
    args = torch.ones(3, 1), ["a", "a", "b"]
    maxrl = get_adv_estimator_fn("maxrl")
    close(maxrl(torch.tensor([[1.0], [0.0], [0.0]]), *args)[0], torch.tensor([[1.0], [-1.0], [0.0]]))
    maxrl(torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([[1], [1], [0]]), ["a", "a", "b"])
    with pytest.raises(InputError, match="needs rewards of 0 or more; a response has the reward -1: "):
        maxrl(torch.tensor([[1.0], [-1.0], [0.0]]), *args)


# ----------------------------------------------------------------------------- what single ones must obey
@pytest.mark.parametrize("odd", [0.9, 0.35 + 1e-12])
def test_leave_one_out_of_equal_others_is_not_divided(odd):
    """0.35 seven times: the std of seven equal rewards is not 0 after rounding (NeMo-RL PR #4158)."""
    rewards = torch.tensor([[odd]] + [[0.35]] * 7, dtype=torch.float64)
    divided = (odd - 0.35 - 1e-3 / 7) / (1e-3 / math.sqrt(7) + 1e-6)  # by the true std, and epsilon
    # 1e-9: the rounding of a float32
    for more, expected, exact in ((0, odd - 0.35, 1e-12), (1e-9, odd - 0.35, 1e-9), (1e-3, divided, 1e-12)):
        rewards[1] += more
        advantages, _ = grpo_leave_one_out(rewards, torch.ones(8, 1), ["u"] * 8)
        assert advantages[0].item() == pytest.approx(expected, rel=1e-3, abs=exact)


# A group of four. Rows 0 and 1 call, get the same answer, and one of the two copies it well. Row 2 gets another answer,
# row 3 answers at once, and wrongly. Of the calls only the first two are rewarded.
EPISODES = {
    "token_level_rewards": torch.tensor([[0, 0.2, 0, 1.0], [0, 0.2, 0, 0], [0] * 4, [0] * 4], dtype=torch.float64),
    "response_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 0, 1], [1, 0, 0, 0]]),
    "index": ["u"] * 4,
    "anchor_states": torch.tensor([[0, 0, 0, 7], [0, 0, 0, 7], [0, 0, 0, 9], [0, 0, 0, 0]]),
}


@pytest.mark.parametrize("name", ["gigpo", "mt_grpo"])
def test_turns_that_follow_each_other_without_a_token_between(name):
    """An agent that samples in pieces: the same turns as with a tool's answer between them, in other columns."""
    apart = EPISODES | {"turn_numbers": torch.tensor([[1, 1, 0, 2]] * 3 + [[1, 0, 0, 0]])}
    together = {k: x[:, [0, 1, 3]] if isinstance(x, torch.Tensor) else x for k, x in apart.items()}
    columns = [{k: x for k, x in b.items() if name == "gigpo" or k != "anchor_states"} for b in (apart, together)]
    (expected, _), (found, _) = (get_adv_estimator_fn(name)(**b) for b in columns)
    close(found, expected[:, [0, 1, 3]])
    close(expected, get_adv_estimator_fn(name)(**{k: x for k, x in columns[0].items() if k != "turn_numbers"})[0])


@for_all(seed=seeds)
def test_what_the_ids_of_states_are_does_not_matter(seed):
    b = random_batch(seed)
    columns = [b[k] for k in ("rewards", "mask", "index")]
    found, _ = get_adv_estimator_fn("gigpo")(*columns, anchor_states=b["anchor_states"])
    apart = b["anchor_states"] * 2**61 - torch.tensor(b["index"])[:, None]
    assert bits_equal(get_adv_estimator_fn("gigpo")(*columns, anchor_states=apart)[0], found)


def test_value_loss_inputs():
    one = torch.ones(1, 1, requires_grad=True)
    losses, metrics = compute_value_loss(one, 3 * one, 0 * one, torch.ones(1, 1))  # 0.5·(0.5 − 3)²
    losses.sum().backward()
    assert losses.item() == 3.125 and one.grad.item() == 0 and not metrics["critic/vf_clipfrac"].requires_grad
    with pytest.raises(InputError, match="cliprange_value"):
        compute_value_loss(one, one, one, one, 0.0)


def test_explained_variance():
    """Of other values: tests/scripts/test_flag_pairs.py."""
    values, mask = torch.randn(4, 5, dtype=torch.float64), torch.ones(4, 5)
    equal = (0.7 - values) + values  # as the critic's returns are, all equal but for rounding
    assert len(equal.unique()) > 1 and explained_variance(values, equal, mask) == 0
    assert explained_variance(values, values, mask) == 1 and explained_variance(values, values + 1, 0 * mask) == 0


@for_all(seed=seeds, beta=st.floats(0, 2))
def test_kl_penalty_in_the_reward(seed, beta):
    b = random_batch(seed)
    dirty, kl = poisoned(b, seed), b["values"]
    rewards, mean = apply_kl_penalty(dirty["rewards"], dirty["values"], b["mask"], beta)
    close(rewards, torch.where(b["mask"].bool(), b["rewards"] - beta * kl, 0))
    rows = [kl[i, steps].mean().item() for i, steps in live_rows(b).items()]
    assert type(mean) is float and mean == pytest.approx(statistics.mean(rows) if rows else 0, abs=1e-12)


def test_adaptive_kl_controller_by_hand():
    controller = AdaptiveKLController(init_kl_coef=0.001, target_kl=0.1, horizon=10000)
    for kl, rows, factor in (
        (0.11, 500, 1 + 0.1 * 0.05),
        (5.0, 500, 1 + 0.2 * 0.05),  # the error is clipped at 0.2
        (0.0, 1000, 1 - 0.2 * 0.1),
        (math.inf, 500, 1 + 0.2 * 0.05),
        (0.1, 500, 1.0),
    ):
        before = controller.value
        controller.update(current_kl=kl, n_steps=rows)
        assert controller.value == pytest.approx(before * factor, rel=1e-12)
    for target, horizon in ((0.0, 10), (0.1, 0)):
        with pytest.raises(InputError, match="target_kl > 0"):
            AdaptiveKLController(0.1, target, horizon)


def test_adaptive_entropy_controller_by_hand():
    """Of an entropy above the target none is paid for, but the coefficient goes on from where it is."""
    controller = AdaptiveEntropyController(0.008, 0.2, 0.005, 0.015)
    for entropy, value in (
        (0.1, 0.013),
        (0.1, 0.015),
        (0.2, 0.01),
        (0.3, 0.0),
        (0.1, 0.01),
        (0.3, 0),
        (0.2, 0),
        (0.2, 0),
    ):
        controller.update(entropy)
        assert controller.value == pytest.approx(value, abs=1e-12)
    for arguments in ((2.0, 0.2), (-0.1, 0.2), (0.1, 0.2, 0.0)):
        with pytest.raises(InputError, match="adaptive entropy"):
            AdaptiveEntropyController(*arguments)


def test_a_controller_without_a_target_is_constant_and_none_takes_nan():
    fixed = AdaptiveKLController(0.25), AdaptiveEntropyController(-0.1, None)
    fixed[0].update(9.0, 333)
    fixed[1].update(9.0)
    assert [controller.value for controller in fixed] == [0.25, -0.1]
    for update in (partial(fixed[0].update, n_steps=1), fixed[1].update):
        with pytest.raises(ValueError, match="NaN"):
            update(math.nan)


def test_a_controller_that_starts_elsewhere_now_leaves_the_checkpoints_value():
    """Of a resume that goes on: tests/scripts/test_scripts.py."""
    for before, now in (
        (AdaptiveKLController(0.001, 0.1, 10000), AdaptiveKLController(0.002, 0.1, 10000)),
        (AdaptiveKLController(0.25), AdaptiveKLController(1)),
        (AdaptiveEntropyController(0.01, 0.2), AdaptiveEntropyController(0.02, 0.2)),
    ):
        start = now.value
        now.load_state_dict(before.state_dict())
        assert now.value == start


def test_what_cannot_be_estimated_is_refused():
    two = torch.ones(2, 1)
    with pytest.raises(InputError, match="3 weights for 2 rewards"):
        gdpo(two, two, [0, 0], reward_components=torch.ones(2, 2), reward_weights=[1, 2, 3])
    with pytest.raises(InputError, match=r"'drgrpo': choose one of grpo, dr_grpo, .*rloo.*opo"):
        get_adv_estimator_fn("drgrpo")
