"""One episode of --agent: a program asks the policy through an endpoint, and its answers become a row."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count

from lib import InputError
from lib.agent.conversation import Context, Conversations
from lib.agent.endpoint import Api, Endpoint
from lib.agent.episode import EngineFailed
from lib.agent.metrics import OF_AGENTS, OF_COMPACTION, FinishReason
from lib.agent.multi_turn import LONG_TEXT, REFUSALS, AsyncRolloutRequest, MultiTurn, RequestState
from lib.agent.openai_api import LARGEST_N, BadRequest, Choice, Options
from lib.agent.parsers import get_tool_parser
from lib.agent.program import Agent, AgentFailed, reward_of
from lib.agent.token_tree import Answer, Request, RowFull, TokenTree
from lib.agent.tools import BaseTool, in_thread
from lib.rollout import Generated, Sampling, turn_seed

CANCEL_S = 2.0  # how long an async agent may take to end when it is cancelled
OF_SUMMARY = Options(None, n=1, stop=(), seed=None, logprobs=False, calls_tools=False, stream=False, stream_usage=False)
GIVEN_SEEDS = 1 << 30  # the seeds that requests name become these turns, which no episode reaches


class AgentEpisode:
    """Plays one request: `run` starts the agent, which calls `chat` through the endpoint."""

    def __init__(
        self, request: AsyncRolloutRequest, generate: Callable[..., Awaitable], sampling: Sampling, settings: MultiTurn
    ):
        """As lib/agent/episode.py's."""
        assert settings.agent is not None
        self.request, self.generate, self.sampling, self.settings = request, generate, sampling, settings
        self.agent: Agent = settings.agent
        self.tree = TokenTree(request.prompt_ids, request.max_response_length, request.window)
        self.conversations = Conversations(settings)
        self.parsers: dict[str, Callable] = {}
        self.counts = self.conversations.metrics
        self.freed = asyncio.Event()  # a request has ended, and left its room
        self.is_full = False
        self.numbers = count()  # of the answers that were begun
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # of the engine

    async def run(self) -> None:
        """Raises AgentFailed, and what the engine raises."""
        request = self.request
        request.state = RequestState.RUNNING
        endpoint = await Endpoint.of_this_loop()
        key = endpoint.open(self.chat)
        try:
            async with asyncio.timeout(self.agent.timeout_s) as limit:
                reward, metrics = reward_of(await self._play(endpoint.url, key))
            if request.answer is None:
                raise AgentFailed("no_request", "the agent ended without an answer of the model")
            request.finish_reason = FinishReason.LENGTH if self.is_full else FinishReason.STOP
            request.metrics.update({f"program/{name}": value for name, value in metrics.items()})
        except TimeoutError:
            if not limit.expired():
                raise
            request.finish_reason, reward = FinishReason.ABORTED, None
            request.metrics["failed_timeout"] += 1
        except AgentFailed as error:
            request.metrics[f"failed_{error.kind}"] += 1
            if not self.is_full:
                own = error.__cause__ or error  # the first is what the agent raised
                raise own from own.__cause__
            request.finish_reason, reward = FinishReason.LENGTH, None  # a program may fail where its model fails
        finally:
            await endpoint.close(key)
            self._fill_row()
            done = request.finish_reason not in (None, FinishReason.ABORTED)
            request.state = RequestState.COMPLETED if done else RequestState.FAILED
        if reward is not None:
            request.reward(reward)
            request.answer = None  # no scorer judges it

    async def _play(self, url: str, key: str):
        """What the agent returns. Raises the engine's failure as soon as there is one."""
        playing = asyncio.ensure_future(self.agent.play(url, key, self.request.row))
        try:
            await asyncio.wait([playing, self.failure], return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                self.failure.result()
            return await playing
        finally:
            playing.cancel()
            await asyncio.wait([playing], timeout=CANCEL_S)
            if playing.done() and not playing.cancelled():
                playing.exception()  # else asyncio would say that nobody asked for it

    def _fill_row(self) -> None:
        """The tree's segments, one after the other; the first continues the prompt, if an answer does."""
        request, first = self.request, self.tree.segments[0]
        if len(first.parts) == 1:
            request.starts = []
        for segment in self.tree.segments:
            if segment is not first:
                request.begin_segment()
            for ids, sampled in segment.parts[segment is first :]:
                request.append(list(ids), sampled)
        request.metrics.update({name: self.counts[name] for name in (*OF_AGENTS, *OF_COMPACTION)})

    async def chat(self, api: Api, body) -> dict | Iterator[dict]:
        """The answer to a request, or its events. Raises BadRequest."""
        messages, tools, options = api.read_request(body, self.agent.sampling)
        if options.stop and not self.agent.takes_stop:
            raise BadRequest("stop: not supported with --async-level", "stop", "unsupported_parameter")
        self.counts["requests"] += 1
        context = await self._context(messages, tools)
        limit = self.settings.limits.compact_at
        if limit and context.length > limit and await self._summarize(messages, tools):
            self.counts["tokens_before"] += context.length
            context = await self._context(messages, tools)
            self.counts["tokens_after"] += context.length
        parse = self._parser(context.tools_key, tools) if tools and options.calls_tools else lambda text: []
        sampled = await self._sample(context, options)
        choices, tokenizer = [], self.settings.tokenizer
        for answer, generated in sampled:
            stop = (*self.sampling.stop, *options.stop)
            said = self.conversations.add(context, answer, generated, stop, parse)
            self.request.answer = tokenizer.decode(generated.token_ids, skip_special_tokens=True)
            self.request.messages = [*context.messages, said.message]
            tokens = [tokenizer.decode([token]) for token in generated.token_ids] if options.logprobs else []
            reason = "tool_calls" if said.message.get("tool_calls") else generated.finish_reason
            ended_by = min(filter(said.text.__contains__, options.stop), key=said.text.find, default=None)
            choices.append(Choice(said.shown, generated, tokens, reason, ended_by))
        name = f"{self.request.request_id}-{self.counts['requests']}"
        write = api.chunks if options.stream else api.completion
        return write(name, len(sampled[0][0].ids) - len(sampled[0][1].token_ids), choices, options)

    async def _context(self, messages: list[dict], tools: list[dict]) -> Context:
        """Raises BadRequest."""
        find = partial(self.conversations.context, messages, tools)
        takes_long = sum(len(message["content"]) for message in messages) > LONG_TEXT
        try:
            return await in_thread(find) if takes_long else find()  # other episodes go on meanwhile
        except (*REFUSALS, RecursionError) as error:  # JSON may be deeper than a template can write
            raise BadRequest(f"messages: the chat template refuses them: {error}", "messages") from error

    async def _summarize(self, messages: list[dict], tools: list[dict]) -> bool:
        """Lets the policy summarize the conversation up to its last answer; False if there is nothing to summarize."""
        asked = self.conversations.request_for_summary(messages, tools)
        if asked:
            [(_, sampled)] = await self._sample(await self._context(asked, tools), OF_SUMMARY)
            summary, _ = self.settings.turn_of(sampled, self.sampling.stop)
            self.conversations.summarize(messages, tools, summary)
            self.counts["compactions"] += 1
        return bool(asked)

    def _parser(self, key: str, tools: list[dict]) -> Callable:
        """Raises BadRequest if the chat template shows no known format of tool calls."""
        if key not in self.parsers:
            known = {}
            for tool in tools:
                known[tool["function"]["name"]] = own = BaseTool()
                own.schema = tool
            try:
                self.parsers[key] = get_tool_parser(self.agent.parser, self.settings.tokenizer, known)
            except InputError as error:
                raise BadRequest(f"tools: {error}", "tools", "unsupported_parameter") from error
        return self.parsers[key]

    async def _sample(self, context: Context, options: Options) -> list[tuple[Answer, Generated]]:
        """n answers. Raises BadRequest if the row has no room."""
        limits = self.settings.limits
        max_tokens = options.max_tokens or limits.max_turn_tokens
        if limits.compact_at and max_tokens and limits.max_turn_tokens:  # a longer answer leaves a summary no room
            max_tokens = min(max_tokens, limits.max_turn_tokens)
        try:
            while (requests := self.tree.begin(context.before, context.new, max_tokens, options.n)) is None:
                self.freed.clear()
                await self.freed.wait()
        except RowFull as error:
            self.is_full = True
            raise BadRequest(f"{error}", "messages", "context_length_exceeded") from error
        self.counts["forks"] += sum(request.is_fork for request in requests)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate(request, options, i)) for i, request in enumerate(requests)]
            return [task.result() for task in tasks]
        except BaseExceptionGroup as errors:
            [first, *_] = errors.exceptions
            raise first from first.__cause__
        finally:
            self.counts["cancelled"] += self.tree.cancel(requests)
            self.freed.set()

    async def _generate(self, request: Request, options: Options, i: int) -> tuple[Answer, Generated]:
        number = next(self.numbers)
        turn = number if options.seed is None else GIVEN_SEEDS + (options.seed * LARGEST_N + i) % GIVEN_SEEDS
        stop = (*self.sampling.stop, *options.stop)
        sampling = replace(self.sampling, max_response_length=request.limit, stop=stop)
        name, seed = f"{self.request.request_id}-{number}", turn_seed(self.request.seed, turn)
        try:
            sampled = await self.generate(name, request.context, sampling, seed)
        except EngineFailed as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise
        if sampled.finish_reason == "abort":
            raise BadRequest("the engine gave the request up", status=500)
        self.request.num_turns += 1
        return self.tree.end(request, sampled), sampled
