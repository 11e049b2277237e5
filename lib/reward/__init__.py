"""From responses to scores: scorers, their processes, and sandboxes (sandbox.py) for what a model wrote."""

from lib.reward.scorers import LARGEST_SCORE, load_scorers

__all__ = ["LARGEST_SCORE", "RewardManager", "load_scorers"]


def __getattr__(name: str):
    """RewardManager is imported late: scorers' processes start from this room, and without torch."""
    if name == "RewardManager":
        from lib.reward.manager import RewardManager

        return RewardManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
