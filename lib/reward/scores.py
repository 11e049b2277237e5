"""Adds up a response's scores: of scorers, a reward model, tools and interactions."""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lib import InputError
from lib.core_algos import ROUNDING, at_last_token
from lib.data_proto import DataProto
from lib.distributed import Max, Mean, Metric, add_metrics, all_gather_lists, reduce_metrics, timed
from lib.model import reward_model_scores
from lib.reward.manager import SHADOW, PendingScores, RewardManager, scorer_seconds


@dataclass
class RewardModel:
    module: PreTrainedModel | None  # None in a replay, where the scores are recorded
    tokenizer: PreTrainedTokenizerBase | None
    coef: float
    micro_batch_tokens: int

    def scores(self, batch: DataProto, policy_tokenizer: PreTrainedTokenizerBase) -> DataProto:
        """`scores` (B,) of the conversations. A collective."""
        found = reward_model_scores(self.module, self.tokenizer, batch, policy_tokenizer, self.micro_batch_tokens)
        return DataProto.from_dict({"scores": found})


@dataclass
class Rewards:
    manager: RewardManager
    reward_model: RewardModel | None = None
    turn_coef: float = 1.0  # weight of the rewards that tools and interactions gave
    shadow: RewardManager | None = None  # of scorers that are logged and never trained on

    @timed("reward")
    def submit(self, batch: DataProto, step: int) -> "PendingRewards":
        """Starts the scorers, in other processes, on the responses of `batch`. A collective. Raises
        InputError if a scorer gets groups and one is not whole on a rank."""
        scorers = [*self.manager.scorers, *(self.shadow.scorers if self.shadow is not None else ())]
        if of_groups := [scorer.name for scorer in scorers if scorer.form == "group"]:
            uids_of_ranks = all_gather_lists([{*batch.non_tensor_batch["uid"]}])
            ranks_of_uid = Counter(uid for uids in uids_of_ranks for uid in uids)
            if split := sorted(str(uid) for uid, ranks in ranks_of_uid.items() if ranks > 1):
                why = f"{of_groups[0]} scores whole groups, and group {split[0]} has rows on two ranks"
                raise InputError(f"scorer {why}: keep the rows of a uid on one rank until submit(batch)")
        shadow = self.shadow.submit(batch, step) if self.shadow is not None else None
        scores = self.manager.submit(batch, step)
        return PendingRewards(self, scores, batch.batch["responses"], shadow)

    def close(self) -> None:
        self.manager.close()
        if self.shadow is not None:
            self.shadow.close()


@dataclass
class PendingRewards:
    rewards: Rewards
    scores: PendingScores
    responses: torch.Tensor  # (B, T), as submitted
    shadow: PendingScores | None

    @timed("reward")
    def add_to(self, batch: DataProto, reward_keys: Sequence[str] = ()) -> tuple[dict[str, list], dict[str, Metric]]:
        """Waits for the scores and adds token_level_scores (B, T), on each row's last token;
        reward_extra_info, a dict of the scorers' other values for each row; and with reward_keys,
        reward_components (B, K). A row without a score is masked out. Returns (other values by key,
        metrics). A collective. Raises InputError if these are not the submitted rows in their order."""
        if not torch.equal(batch.batch["responses"], self.responses):
            how = "sort or filter a batch before submit(batch)"
            raise InputError(f"these are not the rows that were submitted: {how}")
        manager = self.rewards.manager
        scores, extras, failures = self.scores.get()
        failures |= self.scores.time_metrics()
        unscored = scores.isnan().any(1)
        batch.batch["response_mask"][unscored] = 0
        scores[unscored] = 0
        if "turn_rewards" in batch.batch:
            scores = scores + self.rewards.turn_coef * batch.batch["turn_rewards"]
        if (model := self.rewards.reward_model) is not None:
            compute, start = partial(model.scores, batch, manager.tokenizer), perf_counter()
            values = manager.recorder.record("reward_model", compute).batch["scores"]
            scores = scores + model.coef * at_last_token(values, batch.batch["response_mask"])
            extras["reward_model"] = values.tolist()
            if not manager.recorder.replaying:
                failures |= scorer_seconds("reward_model", perf_counter() - start, len(batch))
        batch.batch["token_level_scores"] = scores
        if reward_keys:
            batch.batch["reward_components"] = reward_components(extras, reward_keys, scores)
        if self.shadow is not None:  # from here on nothing is trained on
            shadow_scores, shadow_metrics = self.shadow.get_by_name()
            rewards = scores.sum(1).tolist()
            rewards = [None if dead else value for dead, value in zip(unscored.tolist(), rewards)]
            for name, values in shadow_scores.items():
                shadow_metrics[f"{name}/correlation"] = correlation(values, rewards)
            extras |= shadow_scores
            add_metrics(failures, shadow_metrics | self.shadow.time_metrics(SHADOW))
        rows = ({key: x[i] for key, x in extras.items() if x[i] is not None} for i in range(len(batch)))
        batch.non_tensor_batch["reward_extra_info"] = np.array([*rows], dtype=object)
        return extras, failures


def reward_components(extras: Mapping[str, list], keys: Sequence[str], scores: torch.Tensor) -> torch.Tensor:
    """(B, K): the K rewards that a scorer gave each row besides its score; NaN where it gave none.
    A collective. Raises InputError on all ranks for a key without any numbers."""
    # if all values are None, extras has the key because an earlier step had numbers
    known = {key: any(value is None or is_number(value) for value in extras.get(key, ())) for key in keys}
    for key, anywhere in reduce_metrics({key: Max(float(here)) for key, here in known.items()}).items():
        if not anywhere:
            found = ", ".join(extras)
            raise InputError(f"--adv-kwargs reward_keys={key}: the scorers return no such number, only {found}")
    columns = [extras.get(key, [None] * len(scores)) for key in keys]
    values = [[float(x) if is_number(x) else math.nan for x in column] for column in columns]
    return torch.tensor(values, device=scores.device).T


def correlation(x: list, y: list) -> Metric:
    """Pearson's, over the responses of all ranks with numbers in both; without data where one does not
    vary. A collective."""
    pairs = all_gather_lists([pair for pair in zip(x, y) if all(map(is_number, pair))])
    columns = np.array(pairs, dtype=float).reshape(-1, 2).T  # (2, N)
    if not pairs or (np.ptp(columns, 1) <= ROUNDING * abs(columns).max(1)).any():
        return Mean(0.0, 0)
    return Mean(float(np.corrcoef(columns)[0, 1]), 1)


def is_number(value) -> bool:
    """True for a finite number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
