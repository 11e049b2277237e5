"""What must not change when a whole step is changed in a way that its algorithm does not see, for settings that
hypothesis draws: no reference is needed. Each step is a script's own main function on a model of two matrices
(one_step.py), in float64; sums in another order differ by some 1e-15, divisions by small deviations make it 1e-12.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import dapo
import grpo
import ppo
import remax
from tests.reference_step import Row
from tests.scripts import one_step
from tests.scripts.one_step import T, module, run_script
from tests.scripts.test_flag_pairs import OTHERS, PROMPTS, flags_of, parsed, quick_checks, rows_of  # noqa: F401

ESTIMATORS = flags_of(grpo)["--adv-estimator"]  # "-": grpo
# Estimators that do not see a constant that is added to all rewards of a prompt. The others: gpg counts scores of 0;
# maxrl divides by the mean; reinforce_plus_plus has one baseline for all prompts; the token baselines have none where
# only the longest response reaches; gigpo discounts the outcome by the turns before it.
NO_SHIFT = {x for x in ESTIMATORS if "token_baseline" not in x} - {"gpg", "maxrl", "reinforce_plus_plus", "gigpo"}
# Those whose advantages grow with the rewards, and those that normalise them. grpo_leave_one_out does both: it does not
# divide where all others of the group are equal.
LINEAR = {"dr_grpo", "rloo", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline"}
NORMALISED = {*ESTIMATORS} - LINEAR - {"grpo_leave_one_out"}
EPSILON = 1e-4  # share that the epsilon beside a standard deviation moves; 1e-4 / 0.5 of grpo_batch_std is the largest
BY_BATCH = {"grpo_batch_std", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}  # deviations with n - 1
AGG_MODES = ["-", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]  # means
LOSSES = [loss for loss in flags_of(grpo)["--loss"] if not loss.endswith("_cov")]  # which draw tokens by their place
ONE_UPDATE = {"--group-size": "3", "--num-mini-batches": "1"}
ALIKE = {"rtol": 1e-9, "atol": 1e-11}
seeds = st.integers(0, 99)


def for_all(**strategies):
    """hypothesis' given, the same on every run, without a search for the smallest failure."""
    quick = settings(max_examples=12, derandomize=True, phases=[Phase.generate])
    return lambda test: quick(given(**strategies)(test))


def choices(estimators=ESTIMATORS, losses=LOSSES) -> st.SearchStrategy[dict[str, str]]:
    """Flags of grpo.py that go together."""

    def complete(case: dict[str, str]) -> dict[str, str]:
        case |= {"--adv-kwargs:reward_keys": "a,b"} if case["--adv-estimator"] == "gdpo" else {}
        case |= {"--multi-turn.tools": "REWARDING"} if case["--adv-estimator"] in ("gigpo", "mt_grpo") else {}
        return case | ({"--loss-kwargs:dro_beta": "0.5"} if case["--loss"] == "dro" else {})

    names = {"--adv-estimator": sorted(estimators), "--loss": losses, "--loss-agg-mode": AGG_MODES}
    names |= {"--kl-coef": ["-", "0.1"], "--entropy-coef": ["-", "0.05"], "--rollout-correction.level": ["-", "token"]}
    cases = st.fixed_dictionaries({flag: st.sampled_from(values) for flag, values in names.items()}).map(complete)
    cases = cases.filter(lambda case: (case["--loss"], case["--rollout-correction.level"]) != ("decoupled", "token"))
    return cases.filter(lambda case: not (case["--loss"] == "geo_mean" and "--multi-turn.tools" in case))


def step(script, world, case: dict[str, str], rows: list[Row], prompts: int = PROMPTS, temperature: float = 1.0):
    """(metrics, gradients of the updates) of one step on these rows. Gradients are not clipped."""
    own = {"--zero-variance": "keep"} if script is dapo else {}  # one batch is enough
    args = parsed(script, ONE_UPDATE | own | case)
    args.prompts_per_step, args.rollout.temperature, args.optimizer.max_grad_norm = prompts, temperature, math.inf
    [metrics], gradients = run_script(script, args, [[rows]], world)
    return {name: x for name, x in metrics.items() if not name.startswith(OTHERS)}, gradients


def rows_for(seed: int, case: dict[str, str]) -> list[Row]:
    return rows_of(seed, 3, parsed(grpo, ONE_UPDATE | case).rollout.sampling())


def in_groups(rows: list[Row]) -> list[list[Row]]:
    return [rows[i : i + 3] for i in range(0, len(rows), 3)]


def assert_same_gradients(ours, theirs, scale: float = 1.0, **tolerance) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert any(gradient.any() for gradient in other.values())
        expected = {name: scale * gradient for name, gradient in other.items()}
        torch.testing.assert_close(mine, expected, **(tolerance or ALIKE))


def assert_same(ours, theirs, but: tuple[str, ...] = ()) -> None:
    assert_same_gradients(ours[1], theirs[1])
    assert ours[0].keys() == theirs[0].keys()
    for name in ours[0].keys() - {*but}:
        assert math.isclose(ours[0][name], theirs[0][name], rel_tol=1e-9, abs_tol=1e-11), name


def counts_of_rows(result) -> tuple[str, ...]:
    """The metrics that a step with other rows cannot share."""
    return tuple(name for name in result[0] if name.startswith("training/rows_"))


def with_rewards(change: Callable[[float], float]) -> Callable[[Row], Row]:
    def changed(row: Row) -> Row:
        score = None if row.score is None else change(row.score)
        greedy = None if row.greedy_score is None else change(row.greedy_score)
        components = {key: change(x) for key, x in row.components.items()}
        turns = [change(x) - change(0.0) for x in row.turn_rewards]  # a constant is added to the outcome only
        return replace(row, score=score, greedy_score=greedy, components=components, turn_rewards=turns)

    return changed


def in_full_groups(rows: list[Row]) -> list[Row]:
    """Every row has a score: one alone in its group has its reward as advantage."""
    return [replace(row, score=1.5 if row.score is None else row.score) for row in rows]


# ---- rewards -------------------------------------------------------------------------------------


@for_all(seed=seeds, case=choices(NO_SHIFT), by=st.sampled_from([-3.0, 0.25, 10.0]))
def test_a_constant_added_to_the_rewards_changes_nothing(world, seed, case, by):
    rows = in_full_groups(rows_for(seed, case))
    shifted = [with_rewards(lambda r: r + by)(row) for row in rows]
    assert_same_gradients(step(grpo, world, case, shifted)[1], step(grpo, world, case, rows)[1])


@for_all(seed=seeds, case=choices(NORMALISED), by=st.sampled_from([0.5, 4.0]))
def test_normalised_rewards_have_no_unit(world, seed, case, by):
    rows = in_full_groups(rows_for(seed, case))
    scaled = [with_rewards(lambda r: r * by)(row) for row in rows]
    ours, theirs = (step(grpo, world, case, x)[1] for x in (scaled, rows))
    assert_same_gradients(ours, theirs, rtol=EPSILON, atol=EPSILON)


@for_all(seed=seeds, case=choices(LINEAR, ["-"]), by=st.sampled_from([0.5, 4.0]))
def test_other_advantages_grow_with_the_rewards(world, seed, case, by):
    """Nothing is clipped before the first update, where the gradient is linear in the advantages."""
    case |= {"--kl-coef": "-", "--entropy-coef": "-"}
    rows = in_full_groups(rows_for(seed, case))
    scaled = [with_rewards(lambda r: r * by)(row) for row in rows]
    ours, theirs = (step(grpo, world, case, x)[1] for x in (scaled, rows))
    assert_same_gradients(ours, theirs, by)


@for_all(seed=seeds, by=st.sampled_from([-3.0, 0.25]))
def test_remax_compares_with_the_greedy_response(world, seed, by):
    rows = rows_for(seed, {})
    shifted = [with_rewards(lambda r: r + by)(row) for row in rows]
    assert_same_gradients(step(remax, world, {}, shifted)[1], step(remax, world, {}, rows)[1])


# ---- rows ----------------------------------------------------------------------------------------

SCRIPTS = st.sampled_from([grpo, dapo, ppo, remax])


@for_all(seed=seeds, case=choices(), order=st.permutations(range(PROMPTS)), inside=st.permutations(range(3)))
def test_the_order_of_groups_and_rows_does_not_matter(world, seed, case, order, inside):
    rows = rows_for(seed, case)
    groups = in_groups(rows)
    permuted = [groups[g][i] for g in order for i in inside]
    assert_same(step(grpo, world, case, permuted), step(grpo, world, case, rows))


@for_all(seed=seeds, script=SCRIPTS, order=st.permutations(range(PROMPTS)))
def test_the_order_of_groups_matters_to_no_script(world, seed, script, order):
    rows = rows_for(seed, {})
    permuted = [row for g in order for row in in_groups(rows)[g]]
    assert_same(step(script, world, {}, permuted), step(script, world, {}, rows))


@for_all(seed=seeds, case=choices({*ESTIMATORS} - BY_BATCH))
def test_a_step_twice_is_a_step(world, seed, case):
    """The same groups again, under other ids: all means stay."""
    rows = rows_for(seed, case)
    twice = rows + [replace(row, uid=f"{row.uid}, again") for row in rows]
    ours = step(grpo, world, case, twice, prompts=2 * PROMPTS)
    theirs = step(grpo, world, case, rows)
    for metrics, _ in (ours, theirs):
        metrics.pop("faults/dead_rows_count", None)  # which goes by two groups, where one may be so by chance
        metrics.pop("training/rollout_probs_diff_std", None)  # a sample's: divided by N - 1
    assert_same(ours, theirs, counts_of_rows(ours))


@for_all(seed=seeds, case=choices(), script=SCRIPTS)
def test_rows_without_a_score_change_nothing(world, seed, case, script):
    rows = rows_for(seed, case)
    dead = [replace(row, uid="dead", score=None, rollout_log_probs=[-9.0] * len(row.response)) for row in rows[:3]]
    case = case if script is grpo else {}
    ours = step(script, world, case, dead + rows, prompts=PROMPTS + 1)
    theirs = step(script, world, case, rows)
    assert_same(ours, theirs, counts_of_rows(ours))


# ---- weights -------------------------------------------------------------------------------------


@for_all(seed=seeds, case=choices(), script=SCRIPTS)
def test_without_a_learning_rate_every_epoch_is_the_first(world, seed, case, script):
    rows = rows_for(seed, case)
    case = case if script is grpo else {}
    with patch.object(one_step, "LR", 0.0):
        metrics, gradients = step(script, world, case | {"--update-epochs": "2"}, rows)
        _, once = step(script, world, case, rows)
    assert_same_gradients(gradients, once * 2)
    assert metrics.get("actor/ppo_kl", 0) == 0


@contextmanager
def scaled_head(by: float):
    """The models' logits are `by` times as large."""
    for name in ("actor", "reference"):
        module(name)[1]["lm_head.weight"].mul_(by)
    yield
    for name in ("actor", "reference"):
        module(name)[1]["lm_head.weight"].div_(by)


@for_all(seed=seeds, case=choices())
def test_logits_and_temperature_grow_together(world, seed, case):
    """Twice as large, which is exact: the head's gradient is half as large, and the others stay."""
    rows = rows_for(seed, case)
    metrics, [theirs] = step(grpo, world, case, rows)
    with scaled_head(2.0):
        scaled, [ours] = step(grpo, world, case, rows, temperature=2.0)
    theirs["lm_head.weight"] = theirs["lm_head.weight"] / 2
    assert_same((scaled, [ours]), (metrics, [theirs]), ("actor/grad_norm",))


@for_all(seed=seeds, case=choices())
def test_mini_batches_of_equal_size_are_parts_of_the_whole(world, seed, case):
    """Without a learning rate, and with rows of one length: the mean of their gradients is that of the whole."""
    same = {"sampled": [True] * T, "rollout_log_probs": [-1.0] * T, "turn_rewards": [0.0] * T}
    rows = [replace(row, response=(row.response * T)[:T], **same) for row in in_full_groups(rows_for(seed, case))]
    with patch.object(one_step, "LR", 0.0):
        _, [whole] = step(grpo, world, case, rows)
        _, parts = step(grpo, world, case | {"--num-mini-batches": "2"}, rows)
    assert len(parts) == 2
    assert_same_gradients([{name: (parts[0][name] + parts[1][name]) / 2 for name in whole}], [whole])
