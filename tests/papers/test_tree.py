"""Tree rollouts: advantages by segment against a tree that is built token by token, and where responses branch off."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from tests.common import rollout_batch


def slow_advantages(texts: list[list[int]], scores: list[float]) -> list[list[float]]:
    """Of one prompt, in float64. A node is the responses through it; its parent is the last other node before it."""
    root, found = math.fsum(scores) / len(scores), []
    for text in texts:
        own, parent, value, members = [], root, root, {*range(len(texts))}
        for t in range(len(text)):
            through = {j for j, other in enumerate(texts) if other[: t + 1] == text[: t + 1]}
            if through != members:
                parent, members = value, through
                value = math.fsum(scores[j] for j in through) / len(through)
            own.append((value - root + value - parent) / math.sqrt(len(through)))
        found.append(own)
    return found


def test_advantages_are_those_of_the_tree(module_of):
    """Random trees of two prompts, whose rows do not lie together; a row of each is dead."""
    module, draw = module_of("tree"), random.Random(0)
    for _ in range(20):
        texts = [[draw.randint(5, 6) for _ in range(draw.randint(1, 7))] for _ in range(14)]
        scores, dead, T = [draw.random() for _ in texts], {3, 8}, max(map(len, texts))
        mask = torch.tensor([[t < len(text) and i not in dead for t in range(T)] for i, text in enumerate(texts)])
        rewards = torch.zeros(14, T, dtype=torch.float64)
        for i, text in enumerate(texts):
            rewards[i, len(text) - 1] = scores[i]
        ids = torch.tensor([text + [0] * (T - len(text)) for text in texts])
        t = {"responses": ids, "group": torch.arange(14) % 2}
        ours, _ = module.grpo_advantages(module.Args(), rewards, mask, t)
        expected = torch.zeros(14, T, dtype=torch.float64)
        for group in (0, 1):
            rows = [i for i in range(group, 14, 2) if i not in dead]
            for i, own in zip(rows, slow_advantages([texts[i] for i in rows], [scores[i] for i in rows])):
                expected[i, : len(own)] = torch.tensor(own, dtype=torch.float64)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_responses_branch_off_at_the_least_likely_tokens(module_of):
    """The second response has one token, so one fork."""
    first = rollout_batch([3, 3], [4, 1])
    first.batch["rollout_log_probs"] = torch.tensor([[-1.0, -0.1, -3, -2], [-9, 0, 0, 0]])
    asked = []

    def generate(rows, n=1, prefixes=None):
        if prefixes is None:
            return first
        asked.extend(zip(rows.non_tensor_batch["uid"], prefixes))
        begun = rows.select()
        lengths = torch.tensor([len(prefix) for prefix in prefixes])[:, None]
        begun.batch["given_mask"] = (torch.arange(4) < lengths).long()
        begun.batch["response_mask"] = 1 - begun.batch["given_mask"]
        return begun

    first.non_tensor_batch["uid"][:] = ["a", "b"]
    args = SimpleNamespace(group_size=1, forks=2, branches=2)
    batch = module_of("tree").grow(args, SimpleNamespace(generate=generate), None)
    ids = first.batch["responses"][0].tolist()
    assert asked == [("a", ids[:2])] * 2 + [("a", ids[:3])] * 2 + [("b", [])] * 2
    assert len(batch) == 8 and batch.batch["response_mask"][2:].all()
    assert batch.batch["given_mask"].sum(1).tolist() == pytest.approx([0, 0, 2, 2, 3, 3, 0, 0])
