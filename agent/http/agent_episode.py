"""One episode of --agent: a program asks the policy through an endpoint, and its answers become a row."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count

from agent.episode import EngineFailed
from agent.http.conversation import Context, Conversations
from agent.http.endpoint import Api, Endpoint
from agent.http.program import Agent, AgentFailed, reward_of
from agent.http.requests import LARGEST_N, BadRequest, Choice, Options, Rules
from agent.http.token_tree import Answer, Request, RowFull, TokenTree
from agent.metrics import OF_AGENTS, OF_COMPACTION, FinishReason
from agent.multi_turn import LONG_TEXT, REFUSALS, MultiTurn
from agent.request import AsyncRolloutRequest, RequestState
from agent.tools.base import BaseTool, in_thread
from agent.tools.parsers import call_beginning, get_tool_parser
from lib import InputError
from lib.data import response_texts
from lib.rollout import Generated, Sampling, turn_seed

CANCEL_S = 2.0  # how long an async agent may take to end when it is cancelled
OF_SUMMARY = Options()
GIVEN_SEEDS = 1 << 30  # the seeds that requests name become these turns, which no episode reaches


class AgentEpisode:
    """Plays one request: `run` starts the agent, which calls `chat` through the endpoint."""

    def __init__(
        self, request: AsyncRolloutRequest, generate: Callable[..., Awaitable], sampling: Sampling, settings: MultiTurn
    ):
        """As agent/episode.py's."""
        assert settings.agent is not None
        self.request, self.generate, self.sampling, self.settings = request, generate, sampling, settings
        self.agent: Agent = settings.agent
        self.tree = TokenTree(request.prompt_ids, request.max_response_length, request.window)
        self.conversations = Conversations(settings, self.tree)
        self.rules = Rules(self.agent.sampling, self.agent.ignore)
        self.answers: dict[str, Generated] = {}  # by the ids that the agent got
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
        rewards: dict[str, float] = {}
        endpoint = await Endpoint.of_this_loop()
        key = endpoint.open(self.chat)
        try:
            async with asyncio.timeout(self.agent.timeout_s) as limit:
                reward, rewards, metrics = reward_of(await self._play(endpoint.url, key), self.answers)
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
            self._fill_row(rewards)
            request.end()
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
            if playing.cancelled():  # its own doing: an episode that ends by this error would end a run on servers
                raise AgentFailed("exception", "the agent cancelled itself")
            return playing.result()
        finally:
            playing.cancel()
            await asyncio.wait([playing], timeout=CANCEL_S)
            if playing.done() and not playing.cancelled():
                playing.exception()  # else asyncio would say that nobody asked for it

    def _fill_row(self, rewards: dict[str, float]) -> None:
        """The tree's segments, one after the other; the first continues the prompt, if an answer does. rewards: of
        answers, each on its last token."""
        request, first = self.request, self.tree.segments[0]
        of_answers = {id(self.answers[name]): reward for name, reward in rewards.items()}
        if len(first.parts) == 1:
            request.starts = []
        for segment in self.tree.segments:
            if segment is not first:
                request.begin_segment()
            for ids, sampled in segment.parts[segment is first :]:
                request.append(list(ids), sampled)
                if id(sampled) in of_answers:
                    request.reward(of_answers[id(sampled)])
            request.add_routes(segment.routes)
        self.counts["ignored"] = self.rules.ignored
        request.metrics.update({name: self.counts[name] for name in (*OF_AGENTS, *OF_COMPACTION)})

    async def chat(self, api: Api, body, size: int) -> dict | Iterator[dict]:
        """The answer to a request of `size` bytes, or its events. Raises BadRequest."""
        messages, tools, options = api.read_request(body, self.rules)
        self.counts["requests"] += 1
        name = f"{api.ID}{self.request.request_id}-{self.counts['requests']}"
        contexts, limit = await self._contexts(messages, tools, options, size), self.settings.limits.compact_at
        if limit and contexts[0].length > limit and await self._summarize(messages, tools, size):
            self.counts["tokens_before"] += contexts[0].length
            contexts = await self._contexts(messages, tools, options, size)
            self.counts["tokens_after"] += contexts[0].length
        parse = self._parser(contexts[0].tools_key, tools) if tools and options.calls_tools else lambda text: []
        contexts = [context for context in contexts for _ in range(options.n)]
        choices, tokenizer = [], self.settings.tokenizer
        for i, (context, (answer, sampled)) in enumerate(zip(contexts, await self._sample(contexts, options))):
            stop = (*self.sampling.stop, *options.stop)
            said = self.conversations.add(context, answer, sampled, stop, parse)
            self.answers[name if len(contexts) == 1 else f"{name}-{i}"] = sampled
            self.request.answer = context.prefill + response_texts(tokenizer, [sampled.token_ids])[0]
            self.request.messages = [*context.messages, said.message]
            tokens = [tokenizer.decode([token]) for token in sampled.token_ids] if options.logprobs else []
            reason = "tool_calls" if said.message.get("tool_calls") else sampled.finish_reason
            own = said.text[len(context.prefill) :]
            ended_by = min(filter(own.__contains__, options.stop), key=own.find, default=None)
            before = answer.ids[: len(answer.ids) - len(sampled.token_ids)]
            choices.append(Choice(said.shown, before, sampled, tokens, reason, ended_by))
        write = api.chunks if options.stream else api.completion
        return write(name, choices, options)

    async def _contexts(self, messages: list[dict], tools: list[dict], options: Options, size: int) -> list[Context]:
        """That of the messages, or of each raw prompt. Raises BadRequest."""
        find = partial(self._find_contexts, messages, tools, options)
        return await in_thread(find) if size > LONG_TEXT else find()  # other episodes go on meanwhile

    def _find_contexts(self, messages: list[dict], tools: list[dict], options: Options) -> list[Context]:
        tokenizer, size = self.settings.tokenizer, len(self.settings.tokenizer)
        for prompt in options.prompts:
            if isinstance(prompt, list) and not 0 <= min(prompt) <= max(prompt) < size:
                raise BadRequest(f"prompt: give token ids from 0 to {size - 1}", "prompt")
        if options.prompts:
            contexts = [self.conversations.raw_context(prompt) for prompt in options.prompts]
            if not all(context.length for context in contexts):
                raise BadRequest("prompt: the tokenizer makes no tokens of it", "prompt")
            return contexts
        try:
            forced = map(self.settings.escaped, options.forced)
            prefill = call_beginning(self.agent.parser, tokenizer, (*forced,)) if options.forced else ""
            return [self.conversations.context(messages, tools, prefill)]
        except InputError as error:
            raise BadRequest(f"tool_choice: {error}", "tool_choice", "unsupported_value") from error
        except (*REFUSALS, RecursionError) as error:  # JSON may be deeper than a template can write
            raise BadRequest(f"messages: the chat template refuses them: {error}", "messages") from error

    async def _summarize(self, messages: list[dict], tools: list[dict], size: int) -> bool:
        """Lets the policy summarize the conversation up to its last answer; False if there is nothing to summarize."""
        asked = self.conversations.request_for_summary(messages, tools)
        if asked:
            [(_, sampled)] = await self._sample(await self._contexts(asked, tools, OF_SUMMARY, size), OF_SUMMARY)
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

    async def _sample(self, contexts: list[Context], options: Options) -> list[tuple[Answer, Generated]]:
        """An answer to each. Raises BadRequest if the row has no room."""
        places = [(context.before, context.new) for context in contexts]
        limits = self.settings.limits
        max_tokens = options.max_tokens or limits.max_turn_tokens
        if limits.compact_at and max_tokens and limits.max_turn_tokens:  # a longer answer leaves a summary no room
            max_tokens = min(max_tokens, limits.max_turn_tokens)
        try:
            while (requests := self.tree.begin(places, max_tokens)) is None:
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
