"""batch_faults in lib/log/metrics.py. What it finds in runs with planted bugs: tests/mutants."""

import pytest
import torch

from lib.data_proto import DataProto
from lib.distributed import reduce_metrics
from lib.log.metrics import batch_faults
from lib.model.update_checks import LossFlags, UpdateChecks


def batch(advantages: list[list[float]], alive: list[bool]) -> DataProto:
    """Pairs of episodes of two tokens with these advantages; the tokens of a row that is not alive are not trained."""
    B = len(alive)
    ones, valid = torch.ones(B, 2).long(), torch.tensor(alive)[:, None].expand(B, 2)
    tensors = {"response_mask": ones, "loss_mask": valid, "valid_mask": valid, "prompts": torch.ones(B, 1).long()}
    tensors |= {"attention_mask": torch.ones(B, 3).long(), "position_ids": torch.arange(3).expand(B, 3)}
    tensors |= {"advantages": torch.tensor(advantages), "group": torch.arange(B) // 3}
    return DataProto.from_dict(tensors, {"uid": [str(i // 3) for i in range(B)], "finish_reason": ["stop"] * B})


@pytest.mark.parametrize(("second_turns", "found"), [(0.0, 1), (0.3, 0)])
def test_the_mean_over_dead_rows_is_found_where_advantages_are_those_of_rows(second_turns, found):
    """Two whole groups add up to 0, one with a dead row does not. With credit for turns that is right."""
    whole = [[1.0, 1.0], [-0.5, -0.5], [-0.5, -0.5]]
    one_is_dead = [[0.7, 0.7 + second_turns], [-0.2, -0.2], [0.0, 0.0]]
    faults = reduce_metrics(batch_faults(batch([*whole, *whole, *one_is_dead], [True] * 8 + [False])))
    assert faults.get("faults/dead_rows_count", 0) == found


@pytest.mark.parametrize(("versions", "apart"), [([2, 2], 0.25), ([1, 2], None), ([2, 1], 0.5), ([1, 1], None)])
def test_tokens_that_servers_sampled_with_the_current_weights_are_compared(world, versions, apart):
    """The engine's log-probs of the first row are off; older weights may give others."""
    checks = UpdateChecks(LossFlags("token-mean", 1.0, None, apart=1e-3), on_policy=True, version=2)
    log_probs, ones = torch.full((2, 3), -1.0, requires_grad=True), torch.ones(2, 3)
    tensors = {name: ones.bool() for name in ("response_mask", "loss_mask", "denominator_mask")}
    tensors |= {"advantages": ones, "rollout_log_probs": -ones + torch.tensor([[0.5], [0.0]])}
    tensors |= {"weight_versions": torch.tensor(versions)[:, None] * ones.long(), "is_fresh": torch.ones(2).bool()}
    checks.begin(2, [], 0.0, world.device)
    checks.watch(DataProto.from_dict(tensors), log_probs, ones)
    (-log_probs.sum() / 6).backward()
    checks.after_backward(1.0)
    assert reduce_metrics(checks.end()) == ({} if apart is None else {"faults/engine_apart": pytest.approx(apart)})
