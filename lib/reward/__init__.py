"""From responses to scores: the manager, its pool of workers, and sandboxes for what a model wrote.

Others use RewardManager and load_scorers, and of the files LARGEST_SCORE (reward_pool.py) and sandbox.py.
"""


def __getattr__(name: str):
    """Imported late: a worker starts from this room, and without torch."""
    if name in ("RewardManager", "load_scorers"):
        from lib.reward import reward

        return getattr(reward, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
