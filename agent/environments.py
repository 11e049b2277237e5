"""External environments as interactions: OpenEnv, gymnasium, verifiers (docs/environments.md). The policy's turn is the
action, and the observation is the next user message. A row is one initial state: its prompt holds the first
observation, its interaction_kwargs reproduce it, so that responses to one prompt start alike."""

import asyncio
import importlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
import jsonschema

from agent.interactions import BaseInteraction
from agent.tools.base import in_thread, say
from lib import InputError
from lib.cli.user_code import load_object

CONNECT_S = 10.0
LONGEST_MESSAGE = 2**24  # bytes of an observation, and of a schema
ACTION = {"type": "object", "properties": {"properties": {"type": "object"}}}
SCHEMAS = {"type": "object", "required": ["action"], "properties": {"action": ACTION}}  # what /schema answers
OBSERVED = {"observation": {"type": "object"}, "reward": {"type": ["number", "boolean", "null"]}}
WRONG_FIELD = {"type": "object", "required": ["loc", "msg"], "properties": {"loc": {"type": "array"}}}
REFUSED = {"type": "object", "properties": {"errors": {"type": ["array", "null"], "items": WRONG_FIELD}}}
REPLY = {  # what /ws answers
    "type": "object",
    "required": ["type", "data"],
    "if": {"properties": {"type": {"const": "error"}}},
    "then": {"properties": {"data": REFUSED}},
    "else": {"properties": {"data": {"type": "object", "required": ["observation"], "properties": OBSERVED}}},
}


class SeededEnvironment(BaseInteraction):
    """An environment with reset and step. Subclasses say what these are. interaction_kwargs: reset, the arguments of
    reset, such as {"seed": 3}; first, what reset must then show."""

    async def start(self, instance_id: str, *, reset: dict | None = None, first: str | None = None, **kwargs) -> None:
        """kwargs: options of `configure`. Raises InputError if the environment begins otherwise than the row says."""
        self.configure(**given(kwargs))
        self.first = await self.reset(given(reset or {}))
        if first is not None and self.first != first:
            differ = f"reset({reset}) shows {self.first[:80]!r}, but the row has {first[:80]!r}"
            why = "to train on groups, an environment must start alike with the same seed"
            raise InputError(f"--multi-turn.interaction: {differ}: regenerate the rows; {why}")

    async def respond(self, messages: list[dict]) -> tuple[bool, str, float, dict]:
        """The action is the turn's text without its thinking."""
        return await self.step(messages[-1]["content"].rpartition("</think>")[2].strip())

    def configure(self) -> None: ...

    async def reset(self, options: dict) -> str:
        raise NotImplementedError

    async def step(self, text: str) -> tuple[bool, str, float, dict]:
        raise NotImplementedError


def given(kwargs: dict) -> dict:
    """Without the None that parquet writes for a key that only other rows have."""
    return {key: value for key, value in kwargs.items() if value is not None}


class Refused(Exception):
    """The environment does not take what it was sent."""


class OpenEnv(SeededEnvironment):
    """A session of an OpenEnv server, over its WebSocket /ws. A step's reward is the turn's. action: the field that the
    text becomes; or the whole action, in which "{text}" stands for the text; or "{json}": the text is the action, as
    JSON. observation: the field that the policy is shown; None: all but metadata, as JSON. interaction_kwargs may have
    both. A refused action is answered with "Error: ...", and counted as `errors`."""

    def __init__(self, url: str, action: str | dict | None = None, observation: str | None = None):
        self.url, self.action, self.observation = url, action, observation
        self.session: aiohttp.ClientSession | None = None
        self.socket: aiohttp.ClientWebSocketResponse | None = None
        self.message: asyncio.Task | None = None  # the server's next; aiohttp answers pings only while it waits for one
        self.errors = 0

    def configure(self, action: str | dict | None = None, observation: str | None = None) -> None:
        self.action, self.observation = action or self.action, observation or self.observation
        if self.action is None:
            where = "as action=FIELD before the URL or in the row's interaction_kwargs"
            raise InputError(f"openenv:{self.url}: its action has several fields: name the one for the text, {where}")

    async def reset(self, options: dict) -> str:
        self.session = aiohttp.ClientSession()
        timeout = aiohttp.ClientWSTimeout(ws_close=CONNECT_S)
        self.socket = await self.session.ws_connect(f"{self.url}/ws", max_msg_size=LONGEST_MESSAGE, timeout=timeout)
        self.message = asyncio.create_task(self.socket.receive())
        return self._shown((await self._ask("reset", options))["observation"])

    async def step(self, text: str) -> tuple[bool, str, float, dict]:
        try:
            reply = await self._ask("step", as_action(self.action, text))
        except Refused as why:
            self.errors += 1
            return False, f"Error: {why}", 0.0, {"errors": self.errors}
        reward = float(reply.get("reward") or 0.0)
        return bool(reply.get("done")), self._shown(reply["observation"]), reward, {"errors": self.errors}

    async def stop(self) -> None:
        """Waits until the server has freed the place."""
        try:
            if self.socket and self.message and not self.message.done():
                await self.socket.send_json({"type": "close"})
                await asyncio.wait({self.message}, timeout=CONNECT_S)
        finally:
            if self.message:
                self.message.cancel()
            if self.session:
                await self.session.close()

    async def _ask(self, kind: str, data: dict) -> dict:
        """{"observation", "reward", "done"}. Raises Refused and ConnectionError."""
        with suppress(ConnectionError):  # what the server said before it closed the session is read below
            await self.socket.send_json({"type": kind, "data": data})
        message = await asyncio.shield(self.message)
        if message.type != aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"openenv:{self.url}: the server closed the session")
        self.message = asyncio.create_task(self.socket.receive())
        reply = parsed(message.data, REPLY, f"openenv:{self.url}: its answer to {kind}")
        data = reply["data"]
        if reply["type"] != "error":
            return data
        if data.get("code") == "CAPACITY_REACHED":
            advice = "start the server with as many sessions (max_concurrent_envs) as there are responses in a step"
            raise ConnectionError(f"openenv:{self.url}: {data.get('message')}: {advice}")
        if data.get("code") not in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
            raise RuntimeError(f"openenv:{self.url}: {data.get('code')}: {data.get('message')}")
        wrong = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in data.get("errors") or []]
        raise Refused("; ".join(wrong) or data.get("message") or data["code"])

    def _shown(self, observation: dict) -> str:
        if self.observation and self.observation not in observation:
            fields = ", ".join(observation)
            raise InputError(f"openenv:{self.url}: no {self.observation!r} in its observation, but {fields}")
        every = {name: value for name, value in observation.items() if name != "metadata"}
        shown = observation[self.observation] if self.observation else every
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def parsed(text: str | bytes, schema: dict, what: str) -> dict:
    """JSON from a server. Raises InputError if it has another form."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is no JSON ({error})") from error
    if wrong := jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value)):
        raise InputError(f"{what} has another form than OpenEnv's: {wrong.json_path}: {wrong.message[-200:]}")
    return value


def as_action(action: Any, text: str) -> dict:
    """Raises Refused if the text should be a JSON object and is none."""
    if action == "{json}":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the action is no JSON ({error})") from error
        if not isinstance(value, dict):
            raise Refused("the action is no JSON object")
        return value
    if isinstance(action, str):
        return {action: text}
    return json.loads(json.dumps(action).replace("{text}", json.dumps(text)[1:-1]))


def load_openenv(spec: str) -> Callable[[], OpenEnv]:
    """openenv:[action=... ][observation=FIELD ]http://host:port. Without action: the only field that an action has.
    Raises InputError: another form, no server there, or an action without such a field."""
    flag = f"--multi-turn.interaction {spec}"
    *words, url = spec.removeprefix("openenv:").split() or [""]
    options = dict(word.partition("=")[::2] for word in words)
    if options.keys() - {"action", "observation"} or not url.startswith(("http://", "https://")):
        raise InputError(f"{flag}: give 'openenv:action=FIELD observation=FIELD http://host:port'")
    url = url.rstrip("/")
    try:
        text = asyncio.run(_get(f"{url}/schema"))
    except (OSError, ValueError, aiohttp.ClientError) as error:
        raise InputError(f"{flag}: no OpenEnv server answers at {url}/schema ({say(error)})") from error
    schema = parsed(text, SCHEMAS, f"{flag}: what {url}/schema answers")["action"]
    action: Any = options.get("action")
    fields = [name for name in schema.get("properties", {}) if name != "metadata"]
    if action is None:
        action = fields[0] if len(fields) == 1 else None
    elif action != "{json}":
        try:
            action = json.loads(action) if action.startswith("{") else action
        except ValueError as error:
            raise InputError(f"{flag}: {action} is not valid JSON ({error})") from error
        named = action if isinstance(action, dict) else {action}
        if unknown := [name for name in named if name not in fields]:
            raise InputError(f"{flag}: an action has no {unknown[0]!r}, but {', '.join(fields) or 'no field'}")
    return partial(OpenEnv, url, action, options.get("observation"))


async def _get(url: str) -> bytes:
    """Raises what aiohttp raises; ValueError for a long answer."""
    answer, timeout = b"", aiohttp.ClientTimeout(total=CONNECT_S)  # in all: urllib would wait as long for each byte
    async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session, session.get(url) as response:
        async for piece in response.content.iter_any():
            answer += piece
            if len(answer) > LONGEST_MESSAGE:
                raise ValueError(f"more than {LONGEST_MESSAGE} bytes")
    return answer


class Gym(SeededEnvironment):
    """An object with gymnasium's reset(seed=, options=), step(action) and close(), whose observations are texts. It
    gets the text as its action. A step's reward is the turn's. Its methods run in threads."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.env: Any = None

    async def reset(self, options: dict) -> str:
        self.env = await in_thread(self.make)
        observation, _ = await in_thread(self.env.reset, **{"seed": 0} | options)  # None: from the clock
        return self._shown(observation)

    async def step(self, text: str) -> tuple[bool, str, float, dict]:
        observation, reward, terminated, truncated, _ = await in_thread(self.env.step, text)
        return bool(terminated or truncated), self._shown(observation), float(reward), {}

    async def stop(self) -> None:
        if self.env is not None:
            await in_thread(self.env.close)

    def _shown(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        what = f"the observation is a {type(observation).__name__}; wrap the environment so that it uses text"
        raise InputError(f"gym: {what}")


def load_gym(spec: str) -> Callable[[], Gym]:
    """gym:ID of gymnasium, or gym:path/to/file.py:name, what makes an environment. Raises InputError."""
    name = spec.removeprefix("gym:")
    if ".py:" in name:
        if not callable(make := load_object("--multi-turn.interaction", name)):
            raise InputError(f"--multi-turn.interaction {spec}: not a class or function that returns an environment")
        return partial(Gym, make)
    try:
        import gymnasium

        gymnasium.spec(name)
    except ImportError as error:
        raise InputError(f"--multi-turn.interaction {spec}: pip install gymnasium ({error})") from error
    except gymnasium.error.Error as error:
        raise InputError(f"--multi-turn.interaction {spec}: {error}") from error
    return partial(Gym, partial(gymnasium.make, name))


class Verifiers(BaseInteraction):
    """A rollout of an environment of the package verifiers. The score is its rubric's, which is asked at the end.
    interaction_kwargs: row, the row of the environment's data set, as JSON."""

    def __init__(self, rollout: Callable):
        self.rollout = rollout()

    async def start(self, instance_id: str, *, row: str, **kwargs) -> None:  # type: ignore[override]
        await self.rollout.begin(json.loads(row))

    async def respond(self, messages: list[dict]) -> tuple[bool, str, float, dict]:
        answer = await self.rollout.turn(messages[-1]["content"])
        if answer is not None:
            return False, answer, 0.0, {}
        return True, "", 0.0, (await self.rollout.scores())["metrics"]

    async def score(self) -> float:
        return (await self.rollout.scores())["reward"]

    async def stop(self) -> None:
        await self.rollout.close()


def load_verifiers(spec: str) -> Callable[[], Verifiers]:
    """verifiers:ENVIRONMENT, as rewards/verifiers.py takes it. Raises InputError."""
    scorer = importlib.import_module("rewards.verifiers")  # by name: rewards/ imports lib
    return partial(Verifiers, partial(scorer.Rollout, scorer.load_environment(spec.removeprefix("verifiers:"))))
