"""Expert prefixes: the loss of the expert's tokens, and which prompts get which prefixes."""

from types import SimpleNamespace

import numpy as np
import torch

from tests.common import rollout_batch
from tests.reference_formulas import ppo_clip


def test_the_experts_tokens_have_the_shaped_loss_and_the_others_that_of_grpo(module_of, assert_losses):
    """Losses and gradients by loops; beyond every bound of the clip."""
    module, generator = module_of("prefix"), torch.Generator().manual_seed(0)
    new, old, advantages = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64) - 1
    new.requires_grad_()
    given = torch.tensor([[0] * 6, [1] * 3 + [0] * 3, [1] * 6, [1] + [0] * 5])
    losses, _ = module.policy_loss(module.Args(), new, old, {"advantages": advantages, "given_mask": given})

    def of_token(i, j):
        p = new[i, j].exp()
        if given[i, j]:
            return -advantages[i, j] * p / (p + 0.1)
        return ppo_clip(advantages[i, j], (new[i, j] - old[i, j]).exp(), 0.2, 0.2, 3)[0]

    assert_losses(losses, new, of_token)


def test_prompts_without_a_correct_response_get_growing_prefixes(module_of):
    """Of four prompts, b has a correct response and c no expert. a's expert is as long as a response may be."""
    rows = rollout_batch([3] * 8, [4] * 8)
    rows.non_tensor_batch["uid"][:] = [*"abcdabcd"]
    infos = [{"answer": "01234567"}, {"answer": "01"}, {}, {"answer": "012"}] * 2
    rows.non_tensor_batch["extra_info"] = np.array(infos, dtype=object)
    rows.batch["token_level_scores"] = torch.zeros(8, 4)
    rows.batch["token_level_scores"][5, -1] = 1
    asked = []

    def generate(prompts, prefixes):
        asked.extend(zip(prompts.non_tensor_batch["uid"], prefixes))
        begun = prompts.select()
        begun.batch["response_mask"] = torch.tensor([[0, 0, 0, 1]]).repeat(len(begun), 1)
        begun.batch["given_mask"] = 1 - begun.batch["response_mask"]
        return begun

    def add_to(begun, reward_keys):
        assert begun.batch["response_mask"].all()  # the scorer sees the whole text
        begun.batch["token_level_scores"] = torch.full((len(begun), 4), 0.25)
        return {}, {}

    rollouts = SimpleNamespace(generate=generate, sampling=SimpleNamespace(max_response_length=8))
    rewards = SimpleNamespace(submit=lambda batch, step: SimpleNamespace(add_to=add_to))
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [int(c) for c in text])
    args = SimpleNamespace(expert_rows=4, reward_keys=())
    batch, metrics = module_of("prefix").sample_with_expert(args, rollouts, rewards, rows, tokenizer, 1)
    expected = [("a", [*range(n)]) for n in (2, 4, 6, 7)] + [("d", [*range(n)]) for n in (0, 1, 2, 3)]
    assert asked == expected
    assert batch.non_tensor_batch["uid"].tolist() == [*"abcdabcdaaaadddd"]
    assert batch.batch["given_mask"].sum(1).tolist() == [0] * 8 + [3] * 8
    assert metrics["training/expert_rows"] == (8,) and metrics["reward/expert"] == (8, 8)
