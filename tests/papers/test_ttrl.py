"""Majority vote: the labels of groups, which no ground truth of the data reaches."""

import random
from types import SimpleNamespace

import numpy as np

from rewards.arithmetic import compute_score
from tests.common import rollout_batch


def test_labels_are_the_most_frequent_answers(module_of):
    """Groups of any size, whose rows do not lie together, by counting. Scorers see no ground truth of the data."""
    draw = random.Random(0)
    for _ in range(50):
        n = draw.randint(1, 20)
        groups, answers = [draw.choice("abc") for _ in range(n)], [draw.choice([None, "1", "2", "3"]) for _ in range(n)]
        batch, seen = rollout_batch([3] * n, [2] * n), []
        batch.non_tensor_batch["uid"][:] = groups
        batch.non_tensor_batch["reward_model"] = np.array([{"ground_truth": "secret"}] * n, dtype=object)

        def submit(batch, step, answers=answers, seen=seen):
            seen.extend(row["ground_truth"] for row in batch.non_tensor_batch["reward_model"])
            texts = [f"={answer}" if answer else "" for answer in answers]
            preds = [compute_score("toy/arithmetic", text, "0")["pred"] for text in texts]
            return SimpleNamespace(add_to=lambda batch: ({"pred": preds}, {"failures": 0}))

        found = module_of("ttrl").vote(SimpleNamespace(any_truth="0"), SimpleNamespace(submit=submit), batch, 1)
        for group in {*groups}:
            own = [answer for g, answer in zip(groups, answers) if g == group and answer]
            label, most = "0", 0
            for answer in own:
                if own.count(answer) > most:
                    label, most = answer, own.count(answer)
            labels = batch.non_tensor_batch["reward_model"][[g == group for g in groups]]
            assert [row["ground_truth"] for row in labels] == [label] * groups.count(group)
        assert found == {"failures": 0} and {*seen} == {"0"}
