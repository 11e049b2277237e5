"""Multi-turn episodes: each is a coroutine of its own, and tools run while other episodes generate.

One episode is one row: B rows in, B rows out, in order. `prompts` is the first prompt, `responses` all that comes after
it: sampled turns, and between them the tools' or the user's messages as the chat template writes them. response_mask is
1 on sampled tokens only (a turn's end token is sampled too), attention_mask 1 on all of it.

Tokens in, tokens out: a sampled token is never decoded and encoded again. After each turn the whole conversation is
rendered. While that is the text so far and then the turn (whitespace apart: templates trim, and write JSON their own
way), only what follows is encoded and goes behind the sampled tokens. It begins with the template's end token, which is
dropped where the policy sampled one; the newline that templates write behind it stays. Where it is another text (a
template that drops the thinking of earlier turns, say), the next turn starts a new segment of the row: all of that text
as its prompt, position_ids from 0 again, and lib/model.py takes it as a sequence of its own.

The seed of a turn comes from its row's seed and its number: neither time nor other episodes change what is sampled.
"""

import asyncio
import copy
import itertools
import math
import os
import time
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache, cached_property, partial
from typing import Any, Literal

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

from lib import InputError
from lib.agent.tools import (
    ERROR_KINDS,
    BaseInteraction,
    BaseTool,
    ToolCall,
    ToolResult,
    attempt,
    get_tool_parser,
    load_interaction,
    load_tools,
    run_tool_call,
)
from lib.data_proto import DataProto
from lib.reward.reward_pool import LARGEST_SCORE
from lib.rollout import Generated, Sampling, add_responses, turn_seed
from lib.run.metrics import Mean, Metric, Sum
from lib.special_tokens import Defuse

REPORT_S = 60.0  # a rollout says every so often what it waits for
PATIENCE_S = 0.005  # for the next request to come before a long step
LOOP_TURNS = 10  # of the event loop between two steps: about what a tool call takes
NUMBERS = itertools.count()  # of the episodes of this process
INPUT_COLUMNS = ("raw_prompt", "raw_prompt_ids", "tools_kwargs", "interaction_kwargs")
OUTPUT_COLUMNS = ("messages", "num_turns", "segments", "weight_version")
SHOWN: set[str] = set()  # tracebacks of failed episodes, without the message
REFUSALS = (jinja2.TemplateError, TypeError)  # what a chat template raises for messages that it does not take


class RequestState(Enum):
    PENDING = "pending"
    RUNNING = "running"  # in the engine, or waiting for it
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    COMPLETED = "completed"
    FAILED = "failed"


class FinishReason(Enum):
    """What ended an episode; the last two leave no trained token."""

    STOP = "stop"  # a turn that calls nothing, or the interaction was over
    LENGTH = "length"  # the row is full, or max_turn_tokens cut a turn that nobody answers
    TOOL_CALL = "tool_call"  # the last turn allowed calls a tool, which was not run
    MAX_TURNS = "max_turns"  # the interaction would have gone on after the last turn allowed
    ABORTED = "abort"  # episode_timeout, or the engine gave up
    ERROR = "error"  # an exception


@dataclass(frozen=True)
class MultiTurn:
    """What an episode may do. A turn that calls tools is answered by these, any other by the interaction, if any.

    Raises InputError for impossible limits and for a chat template that cannot show a tool's output.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: dict[str, BaseTool] = field(default_factory=dict)
    parse: Callable[[str], list[ToolCall]] = lambda text: []  # get_tool_parser's
    interaction: type[BaseInteraction] | None = None
    max_turns: int = 8  # of the policy
    max_tool_calls: int = 4  # of a turn; those beyond are answered with an error. They run one after the other
    max_turn_tokens: int | None = None  # None: what is left of the row
    max_tool_output: int = 2000  # characters
    truncate: Literal["left", "middle", "right"] = "middle"  # where a longer output is cut
    tool_timeout: float = 30.0  # seconds, of every call of a tool or an interaction
    episode_timeout: float | None = None  # seconds; an episode that takes longer is not trained on
    reward_coef: float = 1.0  # weight of the rewards that tools and interaction give, beside the scorer's
    chat_template_kwargs: dict = field(default_factory=dict)  # the data set's
    max_prompt_length: int | None = None  # the data set's, which may cut longer prompts; None: it cuts none

    def __post_init__(self):
        for name in ("max_turns", "max_tool_calls", "max_turn_tokens", "max_tool_output", "tool_timeout"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InputError(f"--multi-turn {name} {value}: must be above 0")
        if not abs(self.reward_coef) <= 1e4:
            raise InputError(f"--multi-turn reward_coef {self.reward_coef}: must be at least -10000 and at most 10000")
        if self.truncate not in ("left", "middle", "right"):
            raise InputError(f"--multi-turn truncate {self.truncate}: choose left, middle or right")
        check_template(self)

    @cached_property
    def schemas(self) -> list[dict]:
        return [tool.get_openai_tool_schema() for tool in self.tools.values()]

    @cached_property
    def special_ids(self) -> set[int]:
        return {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def render(self, messages: list[dict]) -> str:
        kwargs = self.chat_template_kwargs | {"add_generation_prompt": True, "tokenize": False}
        return self.tokenizer.apply_chat_template(messages, tools=self.schemas or None, **kwargs)

    def encode(self, text: str) -> list[int]:
        """The template writes the special tokens, so none are added."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def defuse(self) -> Defuse:
        return Defuse(self.tokenizer)

    def defused(self, text: str) -> str:
        """What a tool or a user says, without the power to end its message."""
        return self.defuse(text).encode("utf-8", "replace").decode()  # lone surrogates, which no tokenizer takes


def load_multi_turn(
    settings: dict, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict, max_prompt_length: int
) -> MultiTurn | None:
    """--multi-turn's JSON; None if it is empty. "tools": names for load_tools; "parser": a name for get_tool_parser, or
    auto; "interaction": a name for load_interaction; all other keys are fields of MultiTurn.

    Raises InputError: an unknown key, or what these raise.
    """
    if not settings:
        return None
    ours = {"tokenizer", "parse", "chat_template_kwargs", "max_prompt_length"}
    known = {"tools", "parser", "interaction"} | {field.name for field in fields(MultiTurn)} - ours
    if unknown := settings.keys() - known:
        raise InputError(f"--multi-turn: unknown {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    limits = {name: value for name, value in settings.items() if name not in ("tools", "parser", "interaction")}
    tools, interaction = load_tools(tuple(settings.get("tools", ()))), settings.get("interaction")
    if not (tools or interaction):
        raise InputError("--multi-turn without tools and without an interaction: name one, or drop the flag")
    if tools:
        limits["parse"] = get_tool_parser(settings.get("parser", "auto"), tokenizer, tools)
    if interaction:
        limits["interaction"] = load_interaction(interaction)
    limits |= {"chat_template_kwargs": chat_template_kwargs, "max_prompt_length": max_prompt_length}
    return MultiTurn(tokenizer, tools, **limits)


@dataclass
class AsyncRolloutRequest:
    """An episode: where it stands, as messages, as the template renders them, and as tokens."""

    request_id: str
    messages: list[dict]
    rendered: str
    prompt_ids: list[int]
    tool_schemas: list[dict]
    tools_kwargs: dict
    interaction_kwargs: dict
    seed: int
    weight_version: int | None
    max_response_length: int
    state: RequestState = RequestState.PENDING
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)  # of the response, as the next three
    loss_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])  # of the segments; the first includes the prompt
    num_turns: int = 0
    turn_rewards: list[float] = field(default_factory=list)
    rewarded: list[int] = field(default_factory=list)  # where each of them stands: the last token before it was given
    metrics: Counter = field(default_factory=Counter)

    @property
    def context(self) -> list[int]:
        """What the next turn is sampled from."""
        return ([] if self.starts[-1] else self.prompt_ids) + self.token_ids[self.starts[-1] :]

    @property
    def room(self) -> int:
        return self.max_response_length - len(self.token_ids)

    @property
    def segments(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, [*self.starts[1:], len(self.token_ids)]))

    def append(self, token_ids: list[int], log_probs: list[float] | None = None) -> None:
        """Tokens that the policy sampled, or without log_probs those that it was given."""
        position = len(self.context)
        self.position_ids += range(position, position + len(token_ids))
        self.token_ids += token_ids
        self.loss_mask += [int(log_probs is not None)] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids) if log_probs is None else log_probs

    def reward(self, value: float) -> None:
        if not abs(value) <= LARGEST_SCORE:
            raise ValueError(f"a reward of {value}; numbers up to {LARGEST_SCORE:g} are taken")
        self.turn_rewards.append(float(value))
        self.rewarded.append(len(self.token_ids) - 1)


# ---- messages to tokens --------------------------------------------------------------------------


def glue(settings: MultiTurn, before: str, turn: str, after: str) -> list[int] | None:
    """The tokens of `after` from the end token of the turn on, if `after` is `before`, then the turn, and so on."""
    if not after.startswith(before):
        return None
    end = len(before)
    for character in turn:
        if not character.isspace():
            while after[end : end + 1].isspace():
                end += 1
            if after[end : end + 1] != character:
                return None
            end += 1
    ids = settings.encode(after[end:].lstrip())
    return ids if ids and ids[0] in settings.special_ids else None


def add_messages(request: AsyncRolloutRequest, settings: MultiTurn, turn: str, ended: bool, versions: list) -> bool:
    """Adds the turn and its answers to the messages and the answers' tokens to the row; False where it has no room.

    versions: the same messages in several forms. The first that keeps the sampled text is taken, or else the first that
    the template takes. ended: whether the policy sampled an end token.
    """
    rewritten = refusal = None
    for new in versions:
        messages = request.messages + new
        try:
            after = settings.render(messages)
        except REFUSALS as error:
            refusal = error
            continue
        ids = glue(settings, request.rendered, turn, after)
        if ids is not None:
            break
        rewritten = rewritten or (messages, after)
    else:
        if rewritten is None:
            raise refusal
        messages, after = rewritten
    request.messages, request.rendered = messages, after
    new_ids = settings.encode(after) if ids is None else ids[1:] if ended else ids
    if len(new_ids) >= request.room:
        return False
    if ids is None:
        request.starts.append(len(request.token_ids))
    request.append(new_ids)
    return True


def assistant_message(turn: str, calls: list[ToolCall], parse: Callable, first_id: int) -> dict:
    """The turn as templates want it: content and tool_calls. A turn with a malformed call is content only."""
    if not calls or any(call.error is not None for call in calls):
        return {"role": "assistant", "content": turn}
    # the content is what can be left out without a change of the calls
    start = bisect_left(range(1, len(turn)), True, key=lambda i: parse(turn[i:]) != calls)
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    tool_calls = [
        {"id": call_id(first_id + i), "type": "function", "function": function} for i, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": turn[:start].rstrip(), "tool_calls": tool_calls}


def call_id(number: int) -> str:
    return f"{number:09d}"  # Mistral's template wants nine characters


def check_template(settings: MultiTurn) -> None:
    """Raises InputError unless the template shows the answers to a turn, and its text can be encoded piece by piece."""
    name, end = getattr(settings.tokenizer, "name_or_path", ""), None
    question = {"role": "user", "content": "6*7?"}
    pairs = [({"role": "assistant", "content": "6*7=42"}, {"role": "user", "content": "4 or 2?"})]
    for tool in list(settings.tools)[:1]:
        call = {"id": call_id(0), "type": "function", "function": {"name": tool, "arguments": {}}}
        answer = {"role": "tool", "name": tool, "tool_call_id": call_id(0), "content": "4 or 2?"}
        pairs.append(({"role": "assistant", "content": "", "tool_calls": [call]}, answer))
    for turn, answer in pairs:
        try:
            before, after = settings.render([question]), settings.render([question, turn, answer])
        except REFUSALS as error:
            raise InputError(
                f"tokenizer {name}: its chat template takes no {answer['role']} message: {error}"
            ) from error
        if answer["content"] not in after:
            raise InputError(f"tokenizer {name}: its chat template leaves out a {answer['role']} message after a turn")
        text = turn["content"] if end is None else after[len(before) :].partition(end)[0]
        ids = glue(settings, before, text, after)
        if ids is None:  # it rewrites history: every turn is a segment, and encoded whole
            return
        if settings.encode(before) + settings.encode(text) + ids != settings.encode(after):
            raise InputError(f"tokenizer {name}: a conversation encoded turn by turn is not the tokens of the whole")
        end = settings.tokenizer.decode(ids[:1])


# ---- one episode ---------------------------------------------------------------------------------


class Episode:
    """One request on its way from the prompt to a finish_reason."""

    def __init__(self, request: AsyncRolloutRequest, engine: "EngineRequests", sampling: Sampling, settings: MultiTurn):
        self.request, self.engine, self.sampling, self.settings = request, engine, sampling, settings
        self.interaction: BaseInteraction | None = None
        self.created: list[str] = []  # tools
        self.not_created: dict[str, ToolResult] = {}  # what a call of these is answered

    async def run(self) -> None:
        """Raises what the parser, the template and the interaction raise."""
        request = self.request
        try:
            async with asyncio.timeout(self.settings.episode_timeout) as limit:
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
            done = request.finish_reason not in (None, FinishReason.ABORTED)
            request.state = RequestState.COMPLETED if done else RequestState.FAILED
            for name in self.created:
                await self._tool(name, "release")
            if self.interaction:
                await attempt(self.interaction.stop, timeout_s=self.settings.tool_timeout)

    async def _start(self) -> None:
        for name in self.settings.tools:
            _, kind, what = await self._tool(name, "create")
            if kind is None:
                self.created.append(name)
            else:
                self.not_created[name] = ToolResult(f"Error: {name} did not start: {what}", error_kind=kind)
        if self.settings.interaction:
            self.interaction = self.settings.interaction()
            await self._interact("start", self.request.request_id, **self.request.interaction_kwargs)

    async def _converse(self) -> FinishReason:
        request, settings = self.request, self.settings
        while True:
            turn, reason = await self._sample_turn()
            if reason == "abort":
                return FinishReason.ABORTED
            ended, last = reason == "stop", request.num_turns == settings.max_turns
            calls = settings.parse(turn)
            message = assistant_message(turn, calls, settings.parse, request.metrics["tool_calls"])
            said, finish = [*request.messages, message], None
            if calls and request.room == 0 and not ended:
                finish = FinishReason.LENGTH
            elif calls and last:
                finish = FinishReason.TOOL_CALL
            elif calls:
                answers = await self._call_tools(calls)
            elif self.interaction:
                over, answers = await self._respond(said)
                finish = FinishReason.STOP if over else FinishReason.MAX_TURNS if last else None
            else:
                finish = FinishReason.STOP if ended else FinishReason.LENGTH
            if finish is not None:
                request.messages = said
                return finish
            plain = {"role": "assistant", "content": turn}
            try:
                fits = add_messages(request, settings, turn, ended, [[message, *answers], [plain, *answers]])
            except REFUSALS:  # an answer to a malformed call, in a template that wants a call before it
                answers = [{"role": "user", "content": answer["content"]} for answer in answers]
                fits = add_messages(request, settings, turn, ended, [[plain, *answers]])
            if not fits:
                return FinishReason.LENGTH

    async def _sample_turn(self) -> tuple[str, str]:
        """(text without the end token, the engine's finish_reason)."""
        request, settings = self.request, self.settings
        request.state = RequestState.RUNNING
        limit = min(request.room, settings.max_turn_tokens or request.room)
        sampling = replace(self.sampling, max_response_length=limit)
        seed = turn_seed(request.seed, request.num_turns)
        name = f"{request.request_id}-{request.num_turns}"
        sampled = await self.engine.generate(name, request.context, sampling, seed)
        request.append(sampled.token_ids, sampled.log_probs)
        request.num_turns += 1
        ids = sampled.token_ids[:-1] if sampled.finish_reason == "stop" else sampled.token_ids
        text = settings.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text, sampled.finish_reason

    async def _call_tools(self, calls: list[ToolCall]) -> list[dict]:
        """Their messages. One after the other, since a later call may build on an earlier one's effects."""
        request, settings = self.request, self.settings
        request.state = RequestState.TOOL_CALLING
        instance_ids = dict.fromkeys(settings.tools, request.request_id)
        answers = []
        for i, call in enumerate(calls):
            start = time.monotonic()
            if i >= settings.max_tool_calls:
                result = ToolResult(f"Error: only the first {settings.max_tool_calls} calls of a turn are run")
                request.metrics["too_many"] += 1
            elif call.name in self.not_created:
                result = self.not_created[call.name]
            else:
                result = await run_tool_call(
                    settings.tools,
                    call,
                    instance_ids,
                    settings.tool_timeout,
                    settings.max_tool_output,
                    settings.truncate,
                    request.tools_kwargs,
                )
            answer = {"role": "tool", "name": call.name, "tool_call_id": call_id(request.metrics["tool_calls"])}
            answers.append(answer | {"content": settings.defused(result.text)})
            request.reward(result.reward)
            request.metrics.update({"tool_calls": 1, "tool_seconds": time.monotonic() - start})  # adds, as a Counter
            request.metrics.update({f"tool/{key}": value for key, value in result.metrics.items()})
            if result.error_kind is not None:
                request.metrics[result.error_kind] += 1
        return answers

    async def _respond(self, messages: list[dict]) -> tuple[bool, list[dict]]:
        """(whether the episode is over, the user's message)."""
        self.request.state = RequestState.INTERACTING
        over, text, reward, metrics = await self._interact("respond", copy.deepcopy(messages))
        self.request.reward(reward)
        for key, value in metrics.items():
            self.request.metrics[f"interaction/{key}"] = value
        return over, [{"role": "user", "content": self.settings.defused(text)}]

    async def _final_reward(self) -> float:
        """calc_reward of the tools and score of the interaction, added up."""
        total = 0.0
        for name in self.created:
            reward, kind, _ = await self._tool(name, "calc_reward")
            if isinstance(reward, int | float) and math.isfinite(reward):
                total += reward
            elif kind is None:
                self.request.metrics["exception"] += 1
        return total + (await self._interact("score") if self.interaction else 0.0)

    async def _tool(self, name: str, method: str) -> tuple[Any, str | None, str]:
        """`attempt` of create, calc_reward or release, with the row's kwargs for it; failures are counted."""
        function = getattr(self.settings.tools[name], method)
        kwargs = (self.request.tools_kwargs.get(name) or {}).get(f"{method}_kwargs") or {}
        request_id, timeout_s = self.request.request_id, self.settings.tool_timeout
        value, kind, what = await attempt(partial(function, request_id, **kwargs), timeout_s=timeout_s)
        if kind is not None:
            self.request.metrics[kind] += 1
        return value, kind, what

    async def _interact(self, method: str, *args, **kwargs) -> Any:
        """What the interaction's method returns, or raises: with a traceback, which `attempt` drops."""
        raised = []

        async def call():
            try:
                return await getattr(self.interaction, method)(*args, **kwargs)
            except Exception as error:
                raised.append(error)
                raise

        value, kind, what = await attempt(call, timeout_s=self.settings.tool_timeout)
        if kind is not None:
            raise raised[0] if raised else RuntimeError(f"the interaction's {method}: {kind}: {what}")
        return value


# ---- all episodes of a batch ---------------------------------------------------------------------


class EngineRequests:
    """The requests of all episodes to one engine. Its steps run in the event loop, between those of the tools: a thread
    costs vLLM 0.5 ms a step, and it counts OpenMP's threads anew there. But a long step goes to a thread, so that the
    clocks of the tools go on; what is asked of the engine meanwhile waits in `todo`."""

    def __init__(self, engine):
        self.engine = engine
        self.todo: list[Callable[[], None]] = []
        self.futures: dict[str, asyncio.Future[Generated]] = {}
        self.running: set[str] = set()
        self.wake = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling, seed: int) -> Generated:
        self.futures[request_id] = asyncio.get_running_loop().create_future()
        self._later(self._submit, request_id, prompt_ids, sampling, seed)
        try:
            return await self.futures[request_id]
        except asyncio.CancelledError:
            self._later(self._abort, request_id)
            raise
        finally:
            del self.futures[request_id]

    async def serve(self, episodes: list[asyncio.Task]) -> None:
        """Until all episodes are done. Raises what the engine raises."""
        everyone = asyncio.gather(*episodes, return_exceptions=True)
        everyone.add_done_callback(lambda _: self.wake.set())
        while True:
            self.wake.clear()
            if everyone.done():
                return
            await self._let_others_run()
            todo, self.todo = self.todo, []
            for do in todo:
                do()
            if not self.running and not self.engine.shared:
                await self.wake.wait()
                continue
            if not self.running:
                await asyncio.sleep(PATIENCE_S)
            finished = await asyncio.to_thread(self.engine.step) if self.engine.long_steps else self.engine.step()
            self.running -= finished.keys()
            for request_id, generated in finished.items():
                future = self.futures.get(request_id)
                if future is not None and not future.done():
                    future.set_result(generated)

    async def _let_others_run(self) -> None:
        """Before a long step, for as long as more requests come."""
        seen = -1
        while self.engine.long_steps and seen != len(self.todo):
            seen = len(self.todo)
            await asyncio.sleep(PATIENCE_S)
        for _ in range(LOOP_TURNS):
            await asyncio.sleep(0)

    def _later(self, function: Callable, *args) -> None:
        self.todo.append(partial(function, *args))
        self.wake.set()

    def _submit(self, request_id: str, *args) -> None:
        if (future := self.futures.get(request_id)) is None:
            return  # cancelled meanwhile
        try:
            self.engine.submit(request_id, *args)
        except ValueError as error:
            future.set_exception(error)
        else:
            self.running.add(request_id)

    def _abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.engine.abort(request_id)
            self.running.remove(request_id)


def generate_multi_turn(
    engine, prompts: DataProto, sampling: Sampling, seeds: list[int], settings: MultiTurn
) -> DataProto:
    """One episode per row of `prompts`, as engine.generate for single turns; row i is sampled with seeds[i].

    A row's raw_prompt_ids must be what the template makes of raw_prompt and settings.schemas; it may have tools_kwargs
    and interaction_kwargs. sampling.max_response_length is that of the whole episode. Beside what a single turn gives,
    a row gets finish_reason (a FinishReason's value), messages, num_turns, segments (their starts and ends in the
    response), weight_version, agent_metrics, and turn_rewards (B, T): of the calls and of the interaction's answers on
    the last token of the turn that they answer; on the last of all, the tools' calc_reward and the interaction's score.

    Raises:
        InputError: the prompts were made without the tools; all episodes failed.
    """
    rows, requests = prompts.non_tensor_batch, []
    for i, seed in enumerate(seeds):
        row = {name: copy.deepcopy(column[i]) for name, column in rows.items() if name in INPUT_COLUMNS}
        requests.append(
            AsyncRolloutRequest(
                request_id=f"episode-{next(NUMBERS)}",
                messages=row["raw_prompt"],
                rendered=settings.render(row["raw_prompt"]),
                prompt_ids=list(row["raw_prompt_ids"]),
                tool_schemas=settings.schemas,
                tools_kwargs=row.get("tools_kwargs") or {},
                interaction_kwargs=row.get("interaction_kwargs") or {},
                seed=seed,
                weight_version=engine.version,
                max_response_length=sampling.max_response_length,
            )
        )
    ids = settings.encode(requests[0].rendered)
    if ids != requests[0].prompt_ids and len(ids) <= (settings.max_prompt_length or len(ids)):  # a longer one was cut
        raise InputError(
            "multi-turn: raw_prompt_ids are not what the chat template makes of raw_prompt and the tools; the data set "
            "must be given the same tools and chat_template_kwargs"
        )
    with engine.session():
        errors = _runner(os.getpid()).run(_run_episodes(engine, requests, sampling, settings))
    if all(error is not None for error in errors):
        text = "".join(traceback.format_exception(errors[0]))
        raise InputError(f"multi-turn: all {len(requests)} episodes failed, the first with\n{text}")
    for request, error in zip(requests, errors):
        if error is not None:
            request.finish_reason = FinishReason.ERROR
            *place, message = traceback.format_exception(error)
            if (text := "".join(place)) not in SHOWN:
                print(f"rollout: an episode failed; more like it are only counted\n{text}{message}", flush=True)
            SHOWN.add(text)
    batch = add_responses(
        prompts,
        [Generated(request.token_ids, request.log_probs, request.finish_reason.value) for request in requests],
        engine.pad_token_id,
        [request.loss_mask for request in requests],
        [request.position_ids for request in requests],
    )
    given = torch.zeros_like(batch.batch["rollout_log_probs"])  # (B, T)
    for i, request in enumerate(requests):
        for place, reward in zip(request.rewarded, request.turn_rewards):
            given[i, place] += reward
    batch.batch["turn_rewards"] = given * batch.batch["response_mask"].any(1, keepdim=True)
    columns = {name: [getattr(request, name) for request in requests] for name in OUTPUT_COLUMNS}
    columns["agent_metrics"] = [dict(request.metrics) for request in requests]
    batch.non_tensor_batch |= DataProto.from_dict(non_tensors=columns).non_tensor_batch
    return batch


def agent_metrics(batch: DataProto) -> dict[str, Metric]:
    """Local metrics of a batch of episodes, for `reduce_metrics`; none if it is one of single turns.

    - agent/turns_mean, tool_calls_mean, segments_mean: of an episode
    - timing_s/tool_call: seconds of a call
    - agent/tool_errors/<kind>: calls answered with an error, and failures of create, calc_reward and release; kinds are
      lib.agent.tools.ERROR_KINDS and too_many
    - agent/finish/<reason>: the fraction of episodes
    - agent/failed, agent/aborted: episodes that are not trained on
    - agent/tool/<key>, agent/interaction/<key>: what these report, the mean over the episodes that have it; of a tool
      added up over its calls, of an interaction that of the last turn
    """
    rows, B = batch.non_tensor_batch, len(batch)
    if "agent_metrics" not in rows:
        return {}
    reasons, totals, counts = Counter(rows["finish_reason"]), Counter(), Counter()
    for own in rows["agent_metrics"]:
        totals.update(own)
        counts.update(own.keys())
    calls = totals["tool_calls"]
    return {
        "agent/turns_mean": Mean(sum(rows["num_turns"]), B),
        "agent/segments_mean": Mean(sum(map(len, rows["segments"])), B),
        "agent/tool_calls_mean": Mean(calls, B),
        "timing_s/tool_call": Mean(totals["tool_seconds"], calls),
        **{f"agent/tool_errors/{kind}": Sum(totals[kind]) for kind in (*ERROR_KINDS, "too_many")},
        **{f"agent/finish/{reason.value}": Mean(reasons[reason.value], B) for reason in FinishReason},
        "agent/failed": Sum(reasons["error"]),
        "agent/aborted": Sum(reasons["abort"]),
        **{f"agent/{key}": Mean(totals[key], counts[key]) for key in totals if "/" in key},
    }


@cache
def _runner(pid: int) -> asyncio.Runner:
    """The event loop of this process; one for all rollouts, since clients that tools keep belong to theirs."""
    return asyncio.Runner()


async def _run_episodes(
    engine, requests: list[AsyncRolloutRequest], sampling: Sampling, settings: MultiTurn
) -> list[BaseException | None]:
    """What each of them raised."""
    shared = EngineRequests(engine)
    tasks = [asyncio.create_task(Episode(request, shared, sampling, settings).run()) for request in requests]
    report = asyncio.create_task(_report(requests))
    try:
        await shared.serve(tasks)
    finally:
        for task in (report, *tasks):
            task.cancel()
        errors = await asyncio.gather(*tasks, report, return_exceptions=True)
    return errors[:-1]


async def _report(requests: list[AsyncRolloutRequest]) -> None:
    start = time.monotonic()
    while True:
        await asyncio.sleep(REPORT_S)
        states = Counter(request.state.value for request in requests)
        waits = ", ".join(f"{count} {state}" for state, count in states.items())
        print(f"rollout: {time.monotonic() - start:.0f} s, episodes: {waits}", flush=True)
