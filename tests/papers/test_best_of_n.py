"""Best-of-n: which row trains."""

import torch

from tests.common import SMALL, fork, metrics, ran


def test_the_best_is_the_first_of_equals_and_above_0(module_of):
    module = module_of("best_of_n")
    rows = {  # group: advantages of its rows, None for a dead one; the best one's place
        "first of equals": ([-1.0, 0.1, 0.1], 1),
        "equal scores": ([0.0, 0.0, 0.0], None),
        "the best is dead": ([None, -0.5, 0.5], 2),
        "alone and right": ([1.0, None, None], 0),
        "alone and wrong": ([None, 0.0, None], None),
        "all dead": ([None, None, None], None),
    }
    uid, values, best = [], [], []
    for place in range(3):  # the rows of a group do not lie together
        for name, (advantages, first) in rows.items():
            uid.append(name)
            values.append(advantages[place])
            best.append([place == first])
    live = torch.tensor([[v is not None] * (3 + i % 5) + [False] * (4 - i % 5) for i, v in enumerate(values)])
    advantages = torch.where(live, torch.tensor([[v or 0.0] for v in values]), 9.0)  # of 3 to 7 tokens, then padding
    group = torch.tensor([list(rows).index(name) for name in uid])
    assert module.best_of_groups(advantages, live, group).tolist() == best


def test_one_row_of_each_group_with_a_signal_trains(script_of, tmp_path):
    script = str(script_of("best_of_n").with_suffix(""))
    ran(fork(script, tmp_path, *SMALL, "--total-steps", "2", "--run-name", "run"))
    for row in metrics(tmp_path / "run"):
        with_signal = round(8 * (1 - row["reward/zero_variance"]))
        assert row["training/rows_trained"] == with_signal == 32 - row["training/rows_dropped/best_of_n"] > 0
