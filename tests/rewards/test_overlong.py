"""rewards/overlong.py: DAPO's overlong penalty as a scorer, for all scripts."""

import pytest
import torch

from lib.core_algos import compute_overlong_penalty
from lib.data_proto import DataProto
from lib.model import load_tokenizer
from lib.reward.scorer import load_scorers
from lib.reward.scores import RewardManager
from rewards.overlong import compute_score
from tests.common import ROOT, TOY_MODEL

SPEC = f"{ROOT}/rewards/overlong.py:compute_score"


def test_the_overlong_scorer_is_dapos_penalty():
    """For each row of a batch with tool output and an aborted response, to the last bit in float64. Right is "=7"."""
    tokenizer, generator = load_tokenizer(TOY_MODEL), torch.Generator().manual_seed(0)
    limit, right = 12, tokenizer.encode("=7")
    lengths = torch.randint(2, limit + 1, (40,), generator=generator)
    mask = (torch.arange(limit) < lengths[:, None]).long()
    mask[:20, 1:4] = 0  # given by a tool; it counts if the policy goes on
    mask[7] = 0
    responses = torch.full((40, limit), tokenizer.encode("1")[0])
    responses[::2, :2] = torch.tensor(right)
    rows = {"data_source": ["toy/arithmetic"] * 40, "reward_model": [{"ground_truth": "7"}] * 40}
    rows |= {"extra_info": [{}] * 40, "max_response_length": [limit] * 40}
    batch = DataProto.from_dict({"responses": responses, "response_mask": mask}, rows)
    penalties, scores = {}, {}
    for buffer, factor in ((3, 1.0), (5, 0.7), (limit, 2.0)):
        kwargs = {"overlong_buffer": buffer, "overlong_factor": factor}
        _, extras, _ = RewardManager(load_scorers([SPEC], [], kwargs), tokenizer, workers=0).submit(batch).get()
        torch.set_default_dtype(torch.float64)
        try:
            expected = compute_overlong_penalty(mask, limit, buffer, factor).sum(1).tolist()
        finally:
            torch.set_default_dtype(torch.float32)
        penalties[buffer] = [0.0 if value is None else value for value in extras["overlong_penalty"]]
        scores[buffer] = extras["acc"]
        assert penalties[buffer] == expected and min(expected) == -factor and max(expected) == 0
    assert scores[3] == scores[5] == scores[limit] and {*scores[3]} == {0, 1, None}  # the score without the penalty
    assert len({*penalties[5]}) == 6 and penalties[5][7] == 0


def test_the_overlong_scorer_takes_any_other_scorer(tmp_path):
    (tmp_path / "mine.py").write_text(
        "async def score(solution_str, worth=1, **kwargs):\n    return {'score': worth * len(solution_str), 'acc': 1}\n"
    )
    of_response = {"response_length": 9, "max_response_length": 10, "overlong_buffer": 4}
    kwargs = {"scorer": f"{tmp_path / 'mine.py'}:score", "scorer_kwargs": {"worth": 2}, "overlong_factor": 2}
    assert compute_score("any", "abc", **of_response, **kwargs) == {"score": 4.5, "acc": 1, "overlong_penalty": -1.5}
    for buffer in (0, 11):
        with pytest.raises(ValueError, match=rf"overlong_buffer {buffer}: must be in 1..10, the limit of tokens"):
            compute_score("any", "abc", "7", response_length=9, max_response_length=10, overlong_buffer=buffer)
