"""Self-play: the game's rules, and advantages of each role by loops in float64."""

import math
import random

import pytest
import torch

from lib import InputError
from lib.cli.flags import parse_flags


def test_the_last_three_digits_of_a_response_are_the_second_number(module_of):
    pose = module_of("selfplay").pose
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
        for i in range(9):
            wanted = scores[i] - expected[poser[i]] if alive[i] else 0
            assert ours[i].tolist() == pytest.approx([wanted, wanted, 0], rel=1e-12)
        assert baselines == pytest.approx({"poser": expected[True], "solver": expected[False]}, rel=1e-12)


def test_asynchronous_rollouts_are_refused(module_of):
    """They begin the loader's prompts in earlier steps."""
    with pytest.raises(InputError, match="--async-level: a solver's prompts are written in the step"):
        parse_flags(module_of("selfplay").Args, ["--rollout-engine", "http://127.0.0.1:1", "--async-level", "1"])
