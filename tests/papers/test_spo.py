"""Single stream with a tracker: values, drift and advantages by loops in float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lib.data_proto import DataProto
from tests.common import rollout_batch


def visit(module, args, tracker, prompts, scores, now):
    """A step in which the prompts are answered with these scores, and their last responses have log-probs `now` (B, T).
    Returns the batch, whose last row of prompt -1 has no score."""
    batch = rollout_batch([3] * len(prompts), [1 + i % 3 for i in range(len(prompts))], seed=len(tracker))
    mask = batch.batch["response_mask"]
    batch.non_tensor_batch["raw_prompt_ids"] = np.array(prompts, object)
    batch.batch["rollout_log_probs"] = -torch.rand(mask.shape, dtype=torch.float64) * mask
    batch.batch["token_level_scores"] = torch.zeros_like(now)
    batch.batch["token_level_scores"][:, 0] = torch.tensor(scores)
    mask[[x == -1 for x in prompts]] = 0

    def given(rows, responses):
        longest = now.shape[1]
        known = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in responses]
        return DataProto.from_dict({"response_mask": torch.tensor(known)})

    rollouts = SimpleNamespace(given=given, all_gather=lambda rows: rows, world=SimpleNamespace(device="cpu"))
    actor = SimpleNamespace(batched_log_probs=lambda rows: {"old_log_probs": now})
    module.track(args, actor, rollouts, batch, tracker)
    return batch


def test_a_value_is_the_mean_of_a_beta_posterior_that_forgets_by_the_drift(module_of):
    module, g = module_of("spo"), torch.Generator().manual_seed(0)
    args, tracker, expected, last = module.Args(), module.Tracker(), {}, {}
    visits = [([5, 7, 9], [1.0, 0, 1]), ([5, 8, -1], [1.0, 1, 1]), ([9, 5, 8], [0.0, 1, 0])]
    for prompts, scores in visits:
        now = -torch.rand(3, 3, generator=g, dtype=torch.float64) * 0.05
        begin = math.fsum(a / (a + b) for a, b in expected.values()) / len(expected) if expected else 0.5
        before = {x: expected.get(x, (8 * begin, 8 * (1 - begin))) for x in prompts}
        batch = visit(module, args, tracker, prompts, scores, now)
        for i, x in enumerate(prompts):
            alpha, beta = before[x]
            assert batch.batch["baselines"][i].item() == pytest.approx(alpha / (alpha + beta), rel=1e-12)
            moved = [abs(now[i, j].item() - p) for j, p in enumerate(last.get(x, []))]
            drift = math.fsum(moved) / len(moved) if moved else 0
            assert batch.batch["drift"][i].item() == pytest.approx(drift)
            rho = min(max(2 ** (-drift / 0.06), 0.875), 0.96)
            if x != -1:
                expected[x] = rho * alpha + scores[i], rho * beta + 1 - scores[i]
                mask = batch.batch["response_mask"][i].bool()
                last[x] = batch.batch["rollout_log_probs"][i][mask].tolist()
                assert tracker[str(x)][2:] == [batch.batch["responses"][i][mask].tolist(), last[x]]
    assert {*tracker} == {str(x) for x in expected}
    for x, (alpha, beta) in expected.items():
        assert tracker[str(x)][:2] == pytest.approx([alpha / (alpha + beta), alpha + beta], rel=1e-12)


def test_advantages_are_normalised_over_all_rows_with_a_token(module_of):
    module, g = module_of("spo"), torch.Generator().manual_seed(1)
    rewards, values = torch.rand(5, 3, generator=g).double(), torch.rand(5, generator=g).double()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0]]).bool()
    raw = {i: math.fsum(rewards[i][mask[i]].tolist()) - values[i].item() for i in (0, 1, 3, 4)} | {2: 0}
    mean = math.fsum(raw.values()) / 4
    std = math.sqrt(math.fsum((raw[i] - mean) ** 2 for i in (0, 1, 3, 4)) / 4)
    ours, _ = module.spo_advantages(module.Args(), rewards, mask, {"baselines": values})
    wanted = torch.tensor([[(raw[i] - mean) / (std + 1e-6)] for i in range(5)], dtype=torch.float64) * mask
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=0)
