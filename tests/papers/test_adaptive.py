"""Adaptive sampling: which responses are kept, and their advantages by loops in float64."""

import random

import torch

from tests.reference_formulas import mean, stdev


def test_as_many_above_the_mean_as_below_are_kept_where_there_are_enough(module_of):
    keep, draw = module_of("adaptive").keep_balanced, random.Random(0)
    for _ in range(200):
        n, size = draw.randint(1, 12), draw.randint(1, 6)
        scores = [float(draw.random() < 0.3) for _ in range(max(n, size))]
        kept = keep(scores, size)
        assert kept == sorted({*kept}) and len(kept) == size
        right, wrong = sum(scores), len(scores) - sum(scores)
        found = sum(scores[i] for i in kept)
        if right and wrong and size > 1:
            assert found == min(right, max(size // 2, size - wrong)) > 0
            assert found < size


def test_advantages_are_of_all_samples_of_a_prompt(module_of):
    """Of two prompts with 8 and 4 samples, of which 4 each are kept."""
    module, samples = module_of("adaptive"), {0: [0, 0, 0, 0, 0, 1, 0, 1], 1: [1, 0.5, 0, 0]}
    group, rewards, statistics, expected = [], [], [], []
    for number, scores in samples.items():
        for i in module.keep_balanced(scores, 4):
            group.append(number)
            rewards.append([0.0, scores[i], 0.0])
            statistics.append([mean(scores), stdev(scores)])
            expected.append([(scores[i] - mean(scores)) / (stdev(scores) + 1e-6)] * 2 + [0.0])
    mask = torch.tensor([[True, True, False]] * 8)
    t = {"group": torch.tensor(group), "statistics": torch.tensor(statistics, dtype=torch.float64)}
    ours, _ = module.grpo_advantages(module.Args(), torch.tensor(rewards, dtype=torch.float64), mask, t)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
