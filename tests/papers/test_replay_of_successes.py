"""Replay of successes: the loss of old rows, and what the memory keeps."""

import torch

from lib.data_proto import DataProto
from tests.common import rollout_batch
from tests.reference_formulas import ppo_clip


def test_old_rows_have_the_shaped_ratio_and_new_ones_the_loss_of_grpo(module_of, assert_losses):
    """Losses and gradients by loops; beyond every bound of the clip."""
    module, generator = module_of("replay"), torch.Generator().manual_seed(0)
    new, old, advantages = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    new.requires_grad_()
    is_fresh = torch.tensor([True, False, True, False])
    losses, _ = module.policy_loss(module.Args(), new, old, {"advantages": advantages, "is_fresh": is_fresh})

    def of_token(i, j):
        A, ratio = advantages[i, j], (new[i, j] - old[i, j]).exp()
        return ppo_clip(A, ratio, 0.2, 0.2, 3)[0] if is_fresh[i] else -A * ratio / (ratio + 0.1)

    assert_losses(losses, new, of_token)


def rows(uids: str, log_prob: list[float]) -> DataProto:
    batch = rollout_batch([3] * len(uids), [2] * len(uids))
    batch.batch["rollout_log_probs"] = torch.tensor(log_prob)[:, None] * batch.batch["response_mask"]
    batch.non_tensor_batch["uid"][:] = [*uids]
    batch.non_tensor_batch["raw_prompt_ids"] = torch.tensor([[ord(uid)] for uid in uids]).numpy().astype(object)
    return batch


def test_the_memory_keeps_the_likeliest_success_of_prompts_that_are_sometimes_right(module_of):
    remember = module_of("replay").remember
    memory = remember(DataProto(), rows("aaabbcc", [-1, -3, -2, -1, -1, -1, -1]), torch.tensor([0, 1, 1, 0, 0, 1.0, 1]))
    assert memory.non_tensor_batch["uid"].tolist() == ["a"]  # b is never right, c always
    assert memory.batch["rollout_log_probs"].tolist() == [[-2, -2]]
    memory = remember(memory, rows("bba", [-1, -4, -1]), torch.tensor([0, 1.0, 0]))
    assert memory.batch["rollout_log_probs"][:, 0].tolist() == [-2, -4]
    memory = remember(memory, rows("aab", [-1, -1, -1]), torch.tensor([1.0, 1, 0]))  # a is always right now
    assert memory.non_tensor_batch["uid"].tolist() == ["b"]
