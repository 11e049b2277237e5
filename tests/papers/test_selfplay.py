"""Self-play, and a proposer with a solver: rewards, and advantages of each role by loops in float64."""

import math
import random

import pytest
import torch

from lib import InputError
from lib.cli.flags import parse_flags
from tests.reference_formulas import mean, variance


def two_tokens(advantages: list[float]) -> torch.Tensor:
    """Of rows whose third token is padding."""
    return torch.tensor([[a, a, 0] for a in advantages], dtype=torch.float64)


def test_the_last_three_digits_of_a_response_are_the_second_number(module_of):
    for pose in (module_of("selfplay").pose, module_of("proposer").propose):
        assert pose("585+445", "3,12=132") == (585, 132) and pose("585+445", "9 9x9") == (585, 999)
        assert pose("585+445", "=1030") is None and pose("585+445", "12") is None and pose("585+445", "") is None


def test_each_role_has_the_mean_of_its_own_rewards_as_baseline(module_of):
    """Four steps, the last without a live poser."""
    module, draw = module_of("selfplay"), random.Random(0)
    args, baselines, expected = module.Args(), module.Baselines(poser=0.0, solver=0.0), {True: 0.0, False: 0.0}
    for step in range(4):
        poser = [i % 3 > 0 for i in range(9)]
        scores = [draw.choice([-1.0, 1.0]) for _ in poser]
        alive = [i != 4 and not (step == 3 and poser[i]) for i in range(9)]
        mask = torch.tensor([[True, True, False] if live else [False] * 3 for live in alive])
        rewards = torch.tensor([[0, score, 7] for score in scores], dtype=torch.float64)
        ours, _ = module.role_advantages(args, rewards, mask, {"is_poser": torch.tensor(poser)}, baselines)
        for role in (True, False):
            own = [scores[i] for i in range(9) if poser[i] is role and alive[i]]
            if own:
                expected[role] = 0.95 * expected[role] + 0.05 * math.fsum(own) / len(own)
        wanted = [scores[i] - expected[poser[i]] if alive[i] else 0 for i in range(9)]
        torch.testing.assert_close(ours, two_tokens(wanted), rtol=1e-12, atol=0)
        assert baselines == pytest.approx({"poser": expected[True], "solver": expected[False]}, rel=1e-12)


@pytest.mark.parametrize("name", ["selfplay", "proposer"])
def test_asynchronous_rollouts_are_refused(module_of, name):
    """They begin the loader's prompts in earlier steps."""
    with pytest.raises(InputError, match="--async-level: a solver's prompts are written in the step"):
        parse_flags(module_of(name).Args, ["--rollout-engine", "http://127.0.0.1:1", "--async-level", "1"])


# ---- a proposer and a solver ---------------------------------------------------------------------
def test_a_task_is_worth_most_where_solvers_are_unsure(module_of):
    rewards, p = module_of("proposer").proposer_rewards, [0, 1 / 8, 0.5, 7 / 8, 1]
    for name, expected in {"learnability": [0, 7 / 8, 0.5, 1 / 8, 0], "uncertainty": [0, 0.25, 1, 0.25, 0]}.items():
        assert rewards(name, torch.tensor(p, dtype=torch.float64)).tolist() == pytest.approx(expected)


def test_each_role_is_normalised_over_its_own_rows(module_of):
    module, g = module_of("proposer"), torch.Generator().manual_seed(0)
    rewards = torch.rand(9, 3, generator=g, dtype=torch.float64)
    mask = torch.tensor([[True, True, False]] * 9)
    mask[4] = False
    is_proposer = torch.tensor([i % 3 == 0 for i in range(9)])
    ours, _ = module.role_advantages(module.Args(), rewards, mask, {"is_proposer": is_proposer})
    wanted = [0.0] * 9
    for role in (True, False):
        own = {i: math.fsum(rewards[i, :2].tolist()) for i in range(9) if (i % 3 == 0) is role and i != 4}
        std = (variance(own.values()) * (len(own) - 1) / len(own)) ** 0.5  # with N
        for i, score in own.items():
            wanted[i] = (score - mean(own.values())) / (std + 1e-6)
    torch.testing.assert_close(ours, two_tokens(wanted), rtol=1e-12, atol=0)
    alone = module.role_advantages(module.Args(), rewards[:1], mask[:1], {"is_proposer": is_proposer[:1]})[0]
    assert not alone.any()  # nothing to compare with
