"""From responses to scores: scorers, the processes that run them, and sandboxes (sandbox.py) for a model's code."""

from lib.reward.scorers import LARGEST_SCORE, load_scorers

__all__ = ["LARGEST_SCORE", "RewardManager", "load_scorers"]


def __getattr__(name: str):
    """Imports RewardManager only on use: scorers' processes import this package, and must start without torch."""
    if name == "RewardManager":
        from lib.reward.manager import RewardManager

        return RewardManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
