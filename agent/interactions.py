"""Simulated users and environments of multi-turn episodes."""

import importlib
import inspect
import json
from collections.abc import Callable

from agent.tools.base import in_thread
from lib import InputError
from lib.cli.user_code import load_object


class BaseInteraction:
    """A simulated user or environment. Each episode has its own object. All methods are async."""

    async def start(self, instance_id: str, **kwargs) -> None:
        """kwargs: the row's interaction_kwargs."""

    async def respond(self, messages: list[dict]) -> tuple[bool, str, float, dict]:
        """(whether the episode is over, the user's next message, this turn's reward, metrics)."""
        raise NotImplementedError

    async def score(self) -> float:
        return 0.0

    async def stop(self) -> None: ...


class ReasoningGym(BaseInteraction):
    """Tells the model that its answer to a reasoning-gym question is wrong, until it is right or no tries are left.
    interaction_kwargs: ground_truth, as in rows of data/reasoning_gym.py; max_tries. A turn's reward is 0. The score is
    the task's score of the last answer."""

    async def start(self, instance_id: str, *, ground_truth: str, max_tries=3, **kwargs):  # type: ignore[override]
        self.scorer = importlib.import_module("rewards.reasoning_gym")  # by name: rewards/ imports lib
        if (task := json.loads(ground_truth)["task"]) in self.scorer.UNBOUNDED:
            why = f"scoring {task} has no time bound and needs a scorer process"
            raise InputError(f"--multi-turn.interaction reasoning_gym: {why}")
        self.ground_truth, self.max_tries, self.tries, self.last = ground_truth, max_tries, 0, 0.0

    async def respond(self, messages: list[dict]) -> tuple[bool, str, float, dict]:
        answer = next(message["content"] for message in reversed(messages) if message["role"] == "assistant")
        result = await in_thread(self.scorer.compute_score, "reasoning_gym", answer or "", self.ground_truth)
        self.tries, self.last = self.tries + 1, result["score"]
        done = self.last >= 1 or self.tries >= self.max_tries
        feedback = f"{result['pred']!r} is not right. Try again, and give your answer within <answer> and </answer>."
        return done, "" if done else feedback, 0.0, {"tries": self.tries}

    async def score(self) -> float:
        return self.last


def load_interaction(spec: str) -> Callable[[], BaseInteraction]:
    """Makes the interaction of an episode. A spec is reasoning_gym, path/to/file.py:Class, or one that is described in
    agent/environments.py: openenv:http://host:port, gym:ID, verifiers:ENVIRONMENT. Raises InputError."""
    if spec == "reasoning_gym":
        return ReasoningGym
    kind, colon, _ = spec.partition(":")
    if colon and kind in ("openenv", "gym", "verifiers"):
        return getattr(importlib.import_module("agent.environments"), f"load_{kind}")(spec)
    found = load_object("--multi-turn.interaction", spec)
    if not (inspect.isclass(found) and issubclass(found, BaseInteraction)):
        raise InputError(f"--multi-turn.interaction {spec}: not a subclass of agent.BaseInteraction")
    return found
