"""One episode: the turns of the policy, and what tools or a user answer."""

import asyncio
import copy
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from PIL.Image import Image

from agent.interactions import BaseInteraction
from agent.metrics import FinishReason
from agent.multi_turn import (
    REFUSALS,
    Added,
    MultiTurn,
    add_messages,
    assistant_message,
    call_id,
    content_of,
    encode_messages,
)
from agent.request import AsyncRolloutRequest, RequestState, without_calls
from agent.tools.base import BaseTool, ToolCall, ToolResult, attempt, check_metrics, in_thread, run_tool_call
from lib.rollout import Sampling, turn_seed


def observation(answers: list[dict], images: list[Image]) -> int:
    """The hash of what tools or a user answered: the state in which the next turn begins, for GiGPO. A signed 64-bit
    number."""
    shown = hashlib.blake2b(json.dumps([answer["content"] for answer in answers]).encode(), digest_size=8)
    for image in images:
        shown.update(f"{image.size}".encode() + image.tobytes())
    return int.from_bytes(shown.digest(), signed=True)


class EngineFailed(Exception):
    """The engine failed, not a single episode. __cause__ says how."""


class Episode:
    """Runs one request from its prompt to a finish_reason."""

    def __init__(
        self, request: AsyncRolloutRequest, generate: Callable[..., Awaitable], sampling: Sampling, settings: MultiTurn
    ):
        """generate(name, prompt ids, sampling, seed, Media if there are images) gives a Generated."""
        self.request, self.generate, self.sampling, self.settings = request, generate, sampling, settings
        self.prompt = [*request.messages]
        self.interaction: BaseInteraction | None = None
        self.created: list[str] = []  # names of tools
        self.not_created: dict[str, ToolResult] = {}  # tools whose create failed: the answer to every call

    async def run(self) -> None:
        """Raises what the parser, the template and the interaction raise."""
        request = self.request
        try:
            async with asyncio.timeout(self.settings.limits.episode_timeout) as limit:
                await self._start()
                reason = await self._converse()
                if reason != FinishReason.ABORTED:
                    request.reward(await self._final_reward())
                request.finish_reason = reason
        except TimeoutError:
            if not limit.expired():
                raise
            request.finish_reason = FinishReason.ABORTED
        finally:
            request.end()
            for name in self.created:
                await self._tool(name, "release")
            if self.interaction:
                await attempt(self.interaction.stop, timeout_s=self.settings.limits.tool_timeout)

    async def _start(self) -> None:
        for name in self.request.tools:
            _, kind, what = await self._tool(name, "create")
            if kind is None:
                self.created.append(name)
            else:
                text = self.settings.answer(f"Error: {name} did not start: {what}")
                self.not_created[name] = ToolResult(text, error_kind=kind)
        if self.settings.interaction:
            self.interaction = self.settings.interaction()
            await self._interact("start", self.request.request_id, **self.request.interaction_kwargs)

    async def _converse(self) -> FinishReason:
        request, settings = self.request, self.settings
        while True:
            turn, reason, has_end_token = await self._sample_turn()
            if reason == "abort":
                return FinishReason.ABORTED
            ended = reason == "stop"
            last = request.num_turns - request.metrics["compactions"] == settings.limits.max_turns
            calls = settings.parse(turn)
            message = assistant_message(turn, calls, settings.parse, request.metrics["tool_calls"])
            message = settings.without_placeholders(message)
            said, finish = [*request.messages, message], None
            images: list[Image] = []
            if calls and request.room == 0 and not ended:
                finish = FinishReason.LENGTH
            elif calls and last:
                finish = FinishReason.TOOL_CALL
            elif calls:
                answers, images = await self._call_tools(calls)
            elif self.interaction:
                over, answers = await self._respond(said)
                finish = FinishReason.STOP if over else FinishReason.MAX_TURNS if last else None
            else:
                finish = FinishReason.STOP if ended else FinishReason.LENGTH
            if finish is not None:
                request.messages = said
                return finish
            plain = settings.without_placeholders({"role": "assistant", "content": turn})
            try:
                versions = [[message, *answers], [plain, *answers]]
                added = await encode_messages(request, settings, turn, has_end_token, versions, images)
            except REFUSALS:  # the template wants a call before each answer, and a malformed call is none
                answers = without_calls(answers)
                versions = [[plain, *answers]]
                added = await encode_messages(request, settings, turn, has_end_token, versions, images)
            if settings.limits.compact_at and added.length > settings.limits.compact_at:
                finish = await self._compact(turn, has_end_token, [message, plain], answers, added.length)
                if finish is not None:
                    return finish
            elif not add_messages(request, settings, added):
                return FinishReason.LENGTH
            request.observation = observation(answers, images)

    async def _compact(
        self, turn: str, ended: bool, forms: list[dict], answers: list[dict], length: int
    ) -> FinishReason | None:
        """Asks for a summary of what was said up to the turn, and goes on from the prompt, the summary and the answers.
        ended, forms: of the turn, whether it has an end token, and its message. length: tokens of the context without a
        summary. Returns what ends the episode, if anything does."""
        request, settings = self.request, self.settings
        said, asks = [*request.messages, forms[0]], [{"role": "user", "content": settings.limits.compact_prompt}]
        versions = [[form, *asks] for form in forms]
        if not add_messages(request, settings, await encode_messages(request, settings, turn, ended, versions, [])):
            return FinishReason.LENGTH
        request.observation = observation(asks, [])
        summary, reason, _ = await self._sample_turn()
        if reason == "abort":
            return FinishReason.ABORTED
        request.summary = [*self.prompt, {"role": "assistant", "content": settings.escaped(summary)}]
        request.summarized, request.messages = len(said), said + answers
        rendered = settings.render(request.shown, request.schemas)
        encoded = await in_thread(partial(settings.encode_with, rendered, {}))
        request.metrics.update({"compactions": 1, "tokens_before": length, "tokens_after": len(encoded.ids)})
        added = Added(request.messages, rendered, encoded, 0, {})
        return None if add_messages(request, settings, added) else FinishReason.LENGTH

    async def _sample_turn(self) -> tuple[str, str, bool]:
        """(text without the end token, the engine's finish_reason, whether there is an end token)."""
        request, settings = self.request, self.settings
        request.state = RequestState.RUNNING
        limit = min(request.room, settings.limits.max_turn_tokens or request.room)
        sampling = replace(self.sampling, max_response_length=limit)
        seed = turn_seed(request.seed, request.num_turns)
        name = f"{request.request_id}-{request.num_turns}"
        media = [request.media] if request.media else []
        sampled = await self.generate(name, [*request.raw_context], sampling, seed, *media)
        request.append(sampled.token_ids, sampled)
        request.add_routes(sampled.routed_experts)
        request.num_turns += 1
        text, has_end_token = settings.turn_of(sampled, sampling.stop)
        return text, sampled.finish_reason, has_end_token

    async def _call_tools(self, calls: list[ToolCall]) -> tuple[list[dict], list[Image]]:
        """Runs the calls, at most max_tool_calls of them at the same time, but those of tools with `in_order` one after
        the other. Returns their messages and images, in the order of the calls."""
        request, settings, limit = self.request, self.settings, self.settings.limits.max_tool_calls
        request.state = RequestState.TOOL_CALLING
        answers: list[dict] = []
        images: list[Image] = []
        lock = asyncio.Lock()  # first come, first served
        results = await asyncio.gather(*(self._run_call(call, lock) for call in calls[:limit]))
        too_many = ToolResult(f"Error: only the first {limit} calls of a turn are run", error_kind="too_many")
        results += [(too_many, 0.0)] * (len(calls) - len(results))
        for call, (result, seconds) in zip(calls, results):
            answer = {"role": "tool", "name": call.name, "tool_call_id": call_id(request.metrics["tool_calls"])}
            if result.images:
                await self._fit_images(result, len(images))
            answers.append(answer | {"content": content_of(settings.escaped(result.text), result.images)})
            images += result.images
            request.reward(result.reward)
            request.metrics.update({"tool_calls": 1, "tool_seconds": seconds})  # adds, as a Counter
            request.metrics.update({f"tool/{call.name}/{key}": value for key, value in result.metrics.items()})
            if call.name in request.tools:  # else the policy made the name up
                own = {"turn": request.num_turns, "tool": call.name, "reward": result.reward}
                request.tool_rewards.append(own)
            if result.error_kind is not None:
                request.add_error(call.name or "a call", result.error_kind, result.text.removeprefix("Error: "))
        return answers, images

    async def _run_call(self, call: ToolCall, lock: asyncio.Lock) -> tuple[ToolResult, float]:
        """(the result of a call, its seconds). lock: of the turn's calls of tools with `in_order`."""
        request, tool = self.request, self.request.tools.get(call.name)
        async with lock if tool and tool.in_order else nullcontext():
            start = time.monotonic()
            if call.name in self.not_created:
                result = self.not_created[call.name]
            else:
                how = self.settings.limits, request.tools_kwargs
                result = await run_tool_call(request.tools, call, request.request_id, *how)
            return result, time.monotonic() - start

    async def _fit_images(self, result: ToolResult, before: int) -> None:
        """Gives the result's images the size of the run, or makes it an error if they cannot be shown. before: number
        of images that the turn's earlier calls returned."""
        request, vision = self.request, self.settings.vision
        images, result.images = result.images, []
        names = ("image_token_id", "video_token_id", "video_start_token_id")  # GLM-4V: a start makes images to frames
        placeholders = {getattr(vision.config, name, None) for name in names}
        sampled = {token for token, mine in zip(request.context, request.sampled) if mine}
        if len(request.data.get("image", ())) + before + len(images) > vision.max_images:
            result.text, result.error_kind = f"Error: only {vision.max_images} images may be shown", "too_many"
        elif placeholders & sampled:  # an engine would take it for the place of the image
            result.text, result.error_kind = "Error: no image can be shown after a placeholder token", "exception"
        else:
            fitted, kind, what = await attempt(vision.fitted, images, timeout_s=self.settings.limits.tool_timeout)
            if kind is None:
                result.images = fitted
            else:
                result.text, result.error_kind = self.settings.answer(f"Error: {what}"), kind

    async def _respond(self, messages: list[dict]) -> tuple[bool, list[dict]]:
        """(whether the episode is over, the user's message)."""
        self.request.state = RequestState.INTERACTING
        over, text, reward, metrics = await self._interact("respond", copy.deepcopy(messages))
        self.request.reward(reward)
        check_metrics(metrics, "the interaction")
        dict.update(self.request.metrics, {f"interaction/{key}": value for key, value in metrics.items()})
        return over, [{"role": "user", "content": self.settings.answer(self.settings.escaped(text))}]

    async def _final_reward(self) -> float:
        """The sum of the tools' calc_reward and the interaction's score."""
        total = 0.0
        for name in self.created:
            reward, kind, _ = await self._tool(name, "calc_reward")
            if isinstance(reward, int | float) and math.isfinite(reward):
                total += reward
                if type(self.request.tools[name]).calc_reward is not BaseTool.calc_reward:
                    dict.update(self.request.metrics, {f"tool/{name}/calc_reward": reward})
            elif kind is None:
                self.request.add_error(f"{name}.calc_reward", "exception", f"returned {reward!r}, which is no number")
        return total + (await self._interact("score") if self.interaction else 0.0)

    async def _tool(self, name: str, method: str) -> tuple[Any, str | None, str]:
        """Calls `attempt` on the tool's create, calc_reward or release, with the row's kwargs, and counts failures."""
        tool = self.request.tools[name]
        function = getattr(tool, method)
        kwargs = (self.request.tools_kwargs.get(name) or {}).get(f"{method}_kwargs") or {}
        if method == "create" and tool.returns_images:
            kwargs = kwargs | {"images": list(self.request.data.get("image", ()))}
        request_id, timeout_s = self.request.request_id, self.settings.limits.tool_timeout
        value, kind, what = await attempt(partial(function, request_id, **kwargs), timeout_s=timeout_s)
        if kind is not None:
            self.request.add_error(f"{name}.{method}", kind, what)
        return value, kind, what

    async def _interact(self, method: str, *args, **kwargs) -> Any:
        """Calls the interaction's method. What it raises keeps its traceback, which `attempt` would drop."""
        raised = []

        async def call():
            try:
                return await getattr(self.interaction, method)(*args, **kwargs)
            except Exception as error:
                raised.append(error)
                raise

        value, kind, what = await attempt(call, timeout_s=self.settings.limits.tool_timeout)
        if kind is not None:
            raise raised[0] if raised else RuntimeError(f"the interaction's {method}: {kind}: {what}")
        return value
