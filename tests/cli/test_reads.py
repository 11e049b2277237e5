"""The table of what a run reads: it names every flag, choice and column; the mathematics of a step reads what it says
and nothing else; what is given and not read is reported."""

import copy
import importlib
import re
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

import dapo
from docs.dev.flags import page
from lib import InputError, setup
from lib.args import AggMode, Reads
from lib.args.reads import FACTS, NEVER_IDLE, NOTED, TABLE, rows_with
from lib.cli.flags import walk
from lib.columns import COLUMNS
from lib.core_algos import AdaptiveKLController, agg_loss, kl_penalty
from lib.data_proto import DataProto
from lib.declared import ADV_ESTIMATORS, POLICY_LOSSES
from tests.common import ROOT, parse_flags, with_slow

SCRIPTS = [importlib.import_module(name) for name in ("grpo", "ppo", "remax", "dapo")]
FLAGS = {name: value for script in SCRIPTS for name, value, _ in walk(script.Args())}


def terms() -> set[tuple[str, tuple[str, ...]]]:
    """(name, values) of all choices in the table."""
    found = {term for row in TABLE for terms in row.when.split(" or ") for term in terms.split(" and ") if term}
    split = [term.removeprefix("no ").partition(" ") for term in found]
    return {(name, tuple(values.split("|")) if values else ()) for name, _, values in split}


def test_the_table_names_all_flags_and_choices_and_only_what_there_is():
    assert [name for name in FLAGS if not rows_with(name)] == []
    for row in TABLE:
        assert [p for p in row.flags.split() if not any(fnmatchcase(name, p) for name in FLAGS)] == []
        assert {*f"{row.columns} {row.update}".split()} <= {*COLUMNS}
    assert {name for name, _ in terms()} <= {*FLAGS, *FACTS}
    assert {*NOTED, *NEVER_IDLE} <= {*FLAGS, *FACTS}
    for name, values in terms():
        for hints in (get_type_hints(dapo.Args), get_type_hints(type(dapo.Args().data))):
            if choices := [c for c in get_args(hints.get(name)) if isinstance(c, str)]:
                assert all(any(fnmatchcase(choice, value) for choice in choices) for value in values), name
    for flag, names in (("adv_estimator", ADV_ESTIMATORS), ("loss", POLICY_LOSSES)):
        assert {value for name, values in terms() if name == flag for value in values} == {*names}


def test_the_end_of_the_page_is_the_table():
    assert (ROOT / "docs/defaults.md").read_text().endswith(f"\n\n{page()}"), "run python -m docs.dev.flags"


# ---- perturbed flags -----------------------------------------------------------------------------
@cache
def step_tensors() -> tuple[dict[str, torch.Tensor], np.ndarray, torch.Tensor]:
    """24 rows of up to 8 tokens, and log-probs of the update. Groups of four, two, one, equal and dead rows."""
    torch.manual_seed(3)
    B, T = 24, 8
    lengths = torch.randint(1, T + 1, (B,))
    lengths[5] = 0
    mask = (torch.arange(T) < lengths[:, None]).long()
    mask[lengths > 6, 4] = 0  # a tool's answer
    log_probs = lambda: -torch.rand(B, T) * 2  # noqa: E731
    groups = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 2 + [6, 7]
    scores = torch.rand(B) + torch.arange(B) % 2
    scores[8:12] = 1.0  # a group without a signal
    rewards = torch.zeros(B, T).scatter(1, (lengths - 1).clamp(min=0)[:, None], scores[:, None]) * mask
    t = {
        "response_mask": mask,
        "attention_mask": mask,
        "prompts": torch.ones(B, 1).long(),
        "token_level_scores": rewards + 0.1 * torch.rand(B, T) * mask * (torch.arange(B) // 4 != 2)[:, None],
        "reward_components": torch.rand(B, 2),
        "truncated": lengths == T,
        **{name: log_probs() for name in ("old_log_probs", "rollout_log_probs", "ref_log_prob")},
        "entropys": torch.rand(B, T),
        "squared_score": torch.rand(B, T),
        "turn_numbers": mask * (1 + (torch.arange(T) > 4)),
        "anchor_states": torch.arange(B)[:, None].expand(B, T) % 2,
    }
    return t, np.array([f"1-{g}" for g in groups], dtype=object), log_probs()


def outcome(args: dapo.Args) -> tuple[torch.Tensor, ...] | None:
    """The advantages, masks and loss of a step; None if the mathematics has no such setting."""
    tensors, uid, log_probs = step_tensors()
    batch = DataProto.from_dict(dict(tensors), {"uid": uid})
    try:
        control = AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
        correction = args.rollout_correction.settings()
        needs = SimpleNamespace(correction=correction, columns=setup.read_columns(args, correction, 1)[0])
        dapo.add_advantages(args, batch, needs, control, 1)
        beta, t = control.value, batch.batch  # after the controller's step
        several = args.num_mini_batches * args.update_epochs > 1
        log_probs = log_probs.clone().requires_grad_()
        losses, _ = dapo.policy_loss(args, log_probs, t["old_log_probs"] if several else log_probs.detach(), t)
    except InputError as error:
        assert " takes no " in str(error), error
        return None
    losses = losses * t.get("rollout_is_weights", 1)
    if args.kl_coef > 0 and args.kl_placement == "loss":
        kl = kl_penalty(log_probs, t["ref_log_prob"], args.kl_estimator or "k3+", t["response_mask"])
        losses = losses + args.kl_coef * kl
    total = {"global_tokens": t["denominator_mask"].sum(), "global_rows": t["denominator_mask"].any(1).sum()}
    scale = args.loss_scale_factor or args.rollout.max_response_length
    masked, mask = losses * t["loss_mask"], t["response_mask"]
    loss = agg_loss(masked, mask, args.loss_agg_mode, **total, loss_scale_factor=scale)
    loss.backward()
    return t["advantages"], t["loss_mask"], losses, loss, log_probs.grad, torch.tensor(beta)


# what flags are changed to, where they are no choice among two
OF_ADVANTAGE = {"epsilon": 0.5, "norm_adv_by_std_in_grpo": "False", "gamma": 0.5, "turn_coef": 0.5, "f_norm": 3.0}
OF_ADVANTAGE |= {"reward_weights": "1,3", "singleton": "zero"}
OF_ADVANTAGE = {f"adv_kwargs.{name}": value for name, value in OF_ADVANTAGE.items()}
OF_LOSS = {"cliprange_low": 0.05, "cliprange_high": 0.05, "ratio_high": 1.1, "tau_pos": 2.0, "tau_neg": 2.0}
OF_LOSS |= {"delta_low": 0.01, "delta_high": 0.01, "dro_beta": 2.0, "delta": 1.3, "cap": 1.1, "kl_coef": 3.0}
OF_LOSS |= {"cov_ratio": 0.5, "cov_bounds": "-1,1"}
OF_LOSS = {f"loss_kwargs.{name}": value for name, value in OF_LOSS.items()}
OF_LOSS |= {"clip_ratio_low": 0.01, "clip_ratio_high": 0.01, "clip_ratio_c": 1.01}
OF_CORRECTION = {"action": "mask", "bounds": (0.5, 1.5), "batch_normalize": True}
OF_CORRECTION = {f"rollout_correction.{name}": value for name, value in OF_CORRECTION.items()}
OF_KL = {"kl_estimator": "abs", "kl_placement": "reward", "kl_target": 0.01, "kl_horizon": 5000}
VALUES = OF_ADVANTAGE | OF_LOSS | OF_CORRECTION | OF_KL | {"loss_scale_factor": 3.0, "overlong_factor": 3.0}
LEVELS = ("token", "sequence", "geometric", "measure")
IN_REWARD = "--adv-estimator rloo --kl-coef 0.1 --kl-placement reward"
REWARDING = "--multi-turn.tools benchmarks/turn_credit.py:calculator"
DRO = "--loss dro --loss-kwargs dro_beta=1"
OF_LOSSES = {name: DRO if name == "dro" else f"--loss {name}" for name in POLICY_LOSSES}
CASES = {  # flags, and those that are then changed
    **{name: (f"--adv-estimator {name}", OF_ADVANTAGE) for name in ADV_ESTIMATORS},
    "gdpo": ("--adv-estimator gdpo --adv-kwargs reward_keys=a,b --overlong-buffer 0", OF_ADVANTAGE),
    "maxrl": ("--adv-estimator maxrl --overlong-buffer 0", OF_ADVANTAGE),
    **{name: (f"--adv-estimator {name} {REWARDING}", OF_ADVANTAGE) for name in ("gigpo", "mt_grpo")},
    "grpo_passk, not divided": (
        "--adv-estimator grpo_passk --adv-kwargs norm_adv_by_std_in_grpo=False",
        OF_ADVANTAGE.keys() - {"adv_kwargs.norm_adv_by_std_in_grpo"},
    ),
    **{name: (words, OF_LOSS) for name, words in OF_LOSSES.items()},
    **{f"{name}, one update": (f"{words} --num-mini-batches 1", OF_LOSS) for name, words in OF_LOSSES.items()},
    **{mode: (f"--loss-agg-mode {mode}", ["loss_scale_factor"]) for mode in get_args(AggMode)},
    **{f"correction, {level}": (f"--rollout-correction.level {level}", OF_CORRECTION) for level in LEVELS},
    "overlong penalty": ("--overlong-buffer 4 --max-response-length 8", ["overlong_factor"]),
    "no overlong penalty": ("--overlong-buffer 0", ["overlong_factor"]),
    "no KL": ("", OF_KL),
    "KL in the loss": ("--kl-coef 0.1", OF_KL),
    "KL in the reward": (IN_REWARD, OF_KL.keys() - {"kl_placement"}),
    "KL with a target": (f"{IN_REWARD} --kl-target 0.1", ["kl_horizon"]),
}


def same(ours: tuple, theirs: tuple) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs))


def has_effect(args: dapo.Args, flag: str, name: str) -> bool:
    """By the checks at the start, which report what has none."""
    args.given = {flag}
    try:
        args.check()
    except InputError:
        return False
    return not any(re.search(rf" {name}\b", line) for line in args.no_effect)


OTHERS = {f"{name}, one update" for name in POLICY_LOSSES} - {"gspo, one update", "dppo_tv, one update"}


@pytest.mark.parametrize("case", with_slow(CASES, *OTHERS))
def test_a_flag_changes_the_step_where_the_table_says_so_and_nowhere_else(case, one_rank):
    words, flags = CASES[case]
    args = parse_flags(dapo.Args, ["--zero-variance", "keep", *words.split()])
    before, reads = outcome(args), Reads(args)
    assert before is not None
    for name in flags:
        owner, _, field = name.rpartition(".")
        if owner in ("adv_kwargs", "loss_kwargs"):
            changed, is_read = copy.deepcopy(args), None
            others = [word for word in getattr(args, owner) if word.partition("=")[0] != field]
            setattr(changed, owner, (*others, f"{field}={VALUES[name]}"))
        else:
            changed, is_read = copy.deepcopy(args), reads.reads(name)
            setattr(attrgetter(owner)(changed) if owner else changed, field, VALUES[name])
        after = outcome(changed)
        is_read = has_effect(changed, owner, field) if is_read is None else is_read
        assert (after is not None and not same(before, after)) == is_read, name


@pytest.mark.parametrize(("placement", "estimator", "other"), [("loss", "k3+", "k1"), ("reward", "k1", "k3+")])
def test_the_default_kl_estimator_has_a_gradient_at_its_placement(one_rank, placement, estimator, other):
    """Near the reference k3 in the reward has almost none, and k1 in the loss has none on average."""
    words = f"--kl-coef 0.1 --adv-estimator rloo --zero-variance keep --kl-placement {placement}".split()
    ways = [], ["--kl-estimator", estimator], ["--kl-estimator", other]
    default, same_one, another = (outcome(parse_flags(dapo.Args, [*words, *more])) for more in ways)
    assert same(default, same_one) and not same(default, another)
