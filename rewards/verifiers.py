"""Scorer for environments of the package verifiers with a single turn: the environment's own rubric.

    --reward rewards/verifiers.py:compute_score --reward-kwargs '{"env": "ENVIRONMENT"}'

ENVIRONMENT is what verifiers' load_environment takes, or path/to/file.py:load_environment; behind a space a JSON object
of its arguments. The ground truth is a row of the environment's data set, as JSON (rows of data/environments.py).
Environments of several turns: --multi-turn.interaction verifiers:ENVIRONMENT.

The environment runs its own rollout, with its own stop conditions. Its client, which would ask a model, waits here for
the policy's text.
"""

import asyncio
import json
import signal
import threading
from functools import cache, partial

from lib import InputError
from lib.cli.user_code import load_object

INSTALL = "pip install 'verifiers>=0.1.14,<0.4'"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@cache
def load_environment(spec: str):
    """Raises InputError: it cannot be loaded, or it needs what there is not (tools, scores of whole groups)."""
    try:
        from verifiers import load_environment as load_by_name  # 0.4 has none
    except ImportError as error:
        raise InputError(f"verifiers:{spec}: {INSTALL} ({error})") from error
    name, _, args = spec.partition(" ")
    load = load_object("verifiers:", name) if ".py:" in name else partial(load_by_name, name)
    try:
        kwargs = json.loads(args or "{}")
    except ValueError as error:
        raise InputError(f"verifiers:{spec}: {args} is no JSON object ({error})") from error
    main = threading.current_thread() is threading.main_thread()
    handlers = [signal.getsignal(number) for number in SIGNALS]
    try:
        env = load(**kwargs)
    except Exception as error:  # an environment's own code may raise anything
        raise InputError(f"verifiers:{spec}: it cannot be loaded: {error}") from error
    finally:
        for number, handler in zip(SIGNALS, handlers):  # an environment sets its own, which would exit with code 143
            if main and handler is not None:
                signal.signal(number, handler)
    refuse(env, spec)
    return env


def refuse(env, spec: str) -> None:
    """Raises InputError for an environment that needs what there is not."""
    why = {
        "its tools are called through the API": env.tool_defs,
        "its rubric scores groups of responses": env.rubric.has_group_rewards,
        "its prompts are no conversations": env.message_type != "chat",
    }
    if reasons := [reason for reason, holds in why.items() if holds]:
        raise InputError(f"verifiers:{spec} is not supported: {', '.join(reasons)}")


class Rollout:
    """One rollout of an environment, whose model is whoever calls `turn`."""

    def __init__(self, env):
        self.env = env
        self.prompts: asyncio.Queue = asyncio.Queue()  # of the environment; None: the rollout is over
        self.turns: asyncio.Queue[str | None] = asyncio.Queue()  # of the policy; None: there will be no more
        self.seen: list[dict] = []
        self.task: asyncio.Task | None = None
        self.state = None

    async def begin(self, row: dict) -> None:
        """Raises InputError if the environment begins with another prompt than the row's."""
        self.task = asyncio.create_task(self._run(row))
        self.seen = await self._next_prompt() or []
        if self.seen != [plain(message) for message in row["prompt"]]:
            raise InputError("verifiers: the environment begins with another prompt than its row's: not supported")

    async def turn(self, text: str) -> str | None:
        """What the environment answers, or None if the rollout is over.

        Raises what the environment raises, and InputError if it does anything but add a user's messages.
        """
        self.turns.put_nowait(text)
        prompt = await self._next_prompt()
        if prompt is None:
            return None
        said = [*self.seen, {"role": "assistant", "content": text}]
        new = prompt[len(said) :]
        if prompt[: len(said)] != said or not new or any(message["role"] != "user" for message in new):
            raise InputError("verifiers: the environment rewrites earlier messages, or adds others than a user's")
        self.seen = prompt
        return "\n\n".join(message["content"] for message in new)

    async def scores(self) -> dict:
        """{"reward", "metrics"} of the rubric. A rollout that is not over ends here: its prompt has become too long."""
        if self.state is None:
            self.turns.put_nowait(None)
            state = await self.task
            if state.get("error"):
                raise state["error"]
            await self.env.rubric.score_rollout(state)
            await self.env.rubric.cleanup(state)
            self.state = state
        return {"reward": self.state["reward"], "metrics": self.state["metrics"]}

    async def close(self) -> None:
        if self.task:
            self.task.cancel()
            await asyncio.wait({self.task})

    async def _run(self, row: dict):
        try:
            return await self.env.rollout(row, make_client(self), "policy", {})
        finally:
            self.prompts.put_nowait(None)

    async def _next_prompt(self) -> list[dict] | None:
        prompt = await self.prompts.get()
        if prompt is None:
            await self.task  # raises what it raised
        return prompt and [plain(message) for message in prompt]


def plain(message) -> dict:
    """verifiers' messages have types of their own, from which dicts differ."""
    return {"role": message["role"], "content": message["content"]}


def make_client(rollout: Rollout):
    """The client of verifiers that gives prompts to the rollout, and returns its turns."""
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage

    class Policy(Client):
        def setup_client(self, config):
            pass

        async def to_native_tool(self, tool):
            return tool

        async def to_native_prompt(self, messages):
            return messages, {}

        async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            rollout.prompts.put_nowait(prompt)
            if (text := await rollout.turns.get()) is None:
                raise OverlongPromptError
            return text

        async def raise_from_native_response(self, response):
            pass

        async def from_native_response(self, response):
            message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
            return Response(id="", created=0, model="policy", message=message)

        async def close(self):
            pass

    return Policy(None)


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, env: str) -> dict:
    """Returns {"score": the rubric's reward, and each of its functions by name}."""
    rollout = Rollout(load_environment(env))
    try:
        await rollout.begin(json.loads(ground_truth))
        if await rollout.turn(solution_str) is not None:
            raise InputError(f"verifiers:{env} has several turns: use --multi-turn.interaction 'verifiers:{env}'")
        scores = await rollout.scores()
    finally:
        await rollout.close()
    return scores["metrics"] | {"score": scores["reward"]}
