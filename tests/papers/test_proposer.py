"""A proposer and a solver: rewards of proposers, and advantages of each role by loops in float64."""

import math

import pytest
import torch

from lib import InputError
from lib.cli.flags import parse_flags


def test_a_task_is_worth_most_where_solvers_are_unsure(module_of):
    rewards, p = module_of("proposer").proposer_rewards, [0, 1 / 8, 0.5, 7 / 8, 1]
    ours = rewards("learnability", torch.tensor(p, dtype=torch.float64)).tolist()
    assert ours == pytest.approx([0, 7 / 8, 0.5, 1 / 8, 0])
    ours = rewards("uncertainty", torch.tensor(p, dtype=torch.float64)).tolist()
    assert ours == pytest.approx([0, 0.25, 1, 0.25, 0])


def test_the_last_three_digits_of_a_response_are_the_second_number(module_of):
    propose = module_of("proposer").propose
    assert propose("585+445", "3,12=132") == (585, 132) and propose("585+445", "9 9x9") == (585, 999)
    assert propose("585+445", "=1030") is None and propose("585+445", "12") is None


def test_each_role_is_normalised_over_its_own_rows(module_of):
    module, g = module_of("proposer"), torch.Generator().manual_seed(0)
    rewards = torch.rand(9, 3, generator=g, dtype=torch.float64)
    mask = torch.tensor([[True, True, False]] * 9)
    mask[4] = False
    is_proposer = torch.tensor([i % 3 == 0 for i in range(9)])
    ours, _ = module.role_advantages(module.Args(), rewards, mask, {"is_proposer": is_proposer})
    for role in (True, False):
        own = {i: math.fsum(rewards[i, :2].tolist()) for i in range(9) if (i % 3 == 0) is role and i != 4}
        mean = math.fsum(own.values()) / len(own)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in own.values()) / len(own))
        for i, score in own.items():
            wanted = (score - mean) / (std + 1e-6)
            assert ours[i].tolist() == pytest.approx([wanted, wanted, 0], rel=1e-12)
    assert not ours[4].any()
    alone = module.role_advantages(module.Args(), rewards[:1], mask[:1], {"is_proposer": is_proposer[:1]})[0]
    assert not alone.any()  # nothing to compare with


def test_asynchronous_rollouts_are_refused(module_of):
    """They begin the loader's prompts in earlier steps."""
    with pytest.raises(InputError, match="--async-level: a solver's prompts are written in the step"):
        parse_flags(module_of("proposer").Args, ["--rollout-engine", "http://127.0.0.1:1", "--async-level", "1"])
