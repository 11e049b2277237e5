"""Scores of responses from all who give them: scorers in other processes, a reward model, tools and interactions."""

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lib.core_algos import at_last_token
from lib.data_proto import DataProto
from lib.distributed import Metric, timed
from lib.model import reward_model_scores
from lib.reward.manager import PendingScores, RewardManager


@dataclass
class RewardModel:
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    coef: float
    micro_batch_tokens: int


@dataclass
class Rewards:
    """turn_coef: weight of what tools and interactions gave."""

    manager: RewardManager
    reward_model: RewardModel | None = None
    turn_coef: float = 1.0

    @timed("reward")
    def submit(self, batch: DataProto) -> "PendingRewards":
        """Starts the scorers, in other processes, on the responses of `batch`."""
        return PendingRewards(self, self.manager.submit(batch))

    def close(self) -> None:
        self.manager.close()


@dataclass
class PendingRewards:
    rewards: Rewards
    scores: PendingScores

    @timed("reward")
    def add_to(self, batch: DataProto) -> tuple[dict[str, list], dict[str, Metric]]:
        """Waits; adds token_level_scores (B, T), on each row's last token. A row without a score is dead from here on.

        Returns what else the scorers gave of each row, and how many failed. A collective.
        """
        scores, extras, failures = self.scores.get()
        unscored = scores.isnan().any(1)
        batch.batch["response_mask"][unscored] = 0
        scores[unscored] = 0
        if "turn_rewards" in batch.batch:
            scores = scores + self.rewards.turn_coef * batch.batch["turn_rewards"]
        if (judge := self.rewards.reward_model) is not None:
            tokenizer, size = self.rewards.manager.tokenizer, judge.micro_batch_tokens
            judged = reward_model_scores(judge.module, judge.tokenizer, batch, tokenizer, size)
            scores = scores + judge.coef * at_last_token(judged, batch.batch["response_mask"])
            extras["reward_model"] = judged.tolist()
        batch.batch["token_level_scores"] = scores
        return extras, failures
