"""From responses to scores: the scorers of a run, reward models, and their scores."""

from lib.reward.manager import RewardManager
from lib.reward.scorers import load_scorers

__all__ = ["RewardManager", "load_scorers"]
