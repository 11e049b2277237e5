"""Multi-turn episodes: each is a coroutine of its own, and tools run while other episodes generate.

One episode is one row: B rows in, B rows out, in order. `prompts` is the first prompt, `responses` all that comes after
it: sampled turns, and between them the tools' or the user's messages as the chat template writes them. response_mask is
1 only on sampled tokens (a turn's end token is sampled too), attention_mask on all. A turn's seed comes from its row's
seed and the turn's number: neither timing nor other episodes change what is sampled."""

import asyncio
import copy
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from agent.episode import EngineFailed, Episode
from agent.http.agent_episode import AgentEpisode
from agent.metrics import FinishReason, agent_metrics
from agent.multi_turn import MultiTurn
from agent.request import ERROR_TEXT, AsyncRolloutRequest
from agent.tools.base import readable, say, show_once, story
from lib import InputError
from lib.data.vision import Media, media_of
from lib.data_proto import DataProto
from lib.distributed import Metric, all_gather_lists
from lib.rollout import Generated, RolloutEngine, Sampling, SteppedEngine, add_responses
from lib.rollout.engine import REPORT_S, Response, add_weight_versions, report_states, row_limits

if TYPE_CHECKING:
    from servers.engine import ServerEngine

PATIENCE_S = 0.005  # how long to wait for one more request before a long step
LOOP_TURNS = 10  # turns of the event loop between two steps: about what a tool call takes
NUMBERS = itertools.count()  # numbers the episodes of this process
AGENT_COLUMNS = {"raw_prompt": "prompt", "data_source": "data_source", "reward_model": "reward_model"}
AGENT_COLUMNS |= {"extra_info": "extra_info", "index": "index"}  # what an agent gets, by its names there
INPUT_COLUMNS = ("raw_prompt", "raw_prompt_ids", "tools_kwargs", "interaction_kwargs")
OUTPUT_COLUMNS = ("messages", "num_turns", "segments", "weight_version", "tool_errors", "tool_rewards")


class Episodes:
    """Samples episodes, with the interface by which an engine samples single turns."""

    def __init__(self, engine: RolloutEngine, settings: MultiTurn):
        self.engine, self.settings = engine, settings
        self.episode = AgentEpisode if settings.agent else Episode

    def batch_metrics(self, batch: DataProto) -> dict[str, Metric]:
        return agent_metrics(batch)

    def _make_requests(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> list[AsyncRolloutRequest]:
        """Raises InputError if the prompts were made with other tools than those of their rows."""
        rows, requests, media = prompts.non_tensor_batch, [], media_of(prompts)
        limits = row_limits(prompts, sampling)
        named = {column: name for column, name in AGENT_COLUMNS.items() if column in rows}
        for i, seed in enumerate(seeds):
            row = {name: copy.deepcopy(column[i]) for name, column in rows.items() if name in INPUT_COLUMNS}
            tools_kwargs = row.get("tools_kwargs") or {}
            of_row = (rows["extra_info"][i] if "extra_info" in rows else None) or {}
            tools, schemas = self.settings.tools_of({"tools_kwargs": tools_kwargs} | of_row)
            attended = prompts.batch["attention_mask"][i].bool()
            own, raw_ids = media[i], list(row["raw_prompt_ids"])
            images: dict[str, Any] = {}
            if own:
                images = {"data": own.data, "inputs": own.inputs, "row_inputs": own.inputs, "hash": own.hash}
            requests.append(
                AsyncRolloutRequest(
                    request_id=f"episode-{next(NUMBERS)}",
                    messages=row["raw_prompt"],
                    rendered=self.settings.render(row["raw_prompt"], schemas),
                    prompt_ids=own.ids if own else raw_ids,
                    raw_context=[*raw_ids],
                    positions=prompts.batch["position_ids"][i][..., attended].cpu(),
                    tools=tools,
                    schemas=schemas,
                    tools_kwargs=tools_kwargs,
                    interaction_kwargs=row.get("interaction_kwargs") or {},
                    seed=seed,
                    weight_version=self.engine.version,
                    max_response_length=limits[i],
                    window=self.settings.limits.context_window,
                    routed_experts=self.engine.no_routes,
                    row={name: copy.deepcopy(rows[column][i]) for column, name in named.items()},
                    **images,
                )
            )
        for request in {tuple(request.tools): request for request in reversed(requests)}.values():
            ids, longest = self.settings.encode(request.rendered), self.settings.max_prompt_length
            if ids != request.raw_context and len(ids) <= (longest or len(ids)):  # a longer prompt was cut
                advice = "give the data set the same tools and chat_template_kwargs"
                made = "raw_prompt_ids differ from the chat template's output for raw_prompt and the tools"
                raise InputError(f"multi-turn: {made}; {advice}")
        return requests

    def _as_batch(self, prompts: DataProto, requests: list[AsyncRolloutRequest], errors: list) -> DataProto:
        """The prompts with their episodes. errors: what each raised. Raises InputError if those of all ranks
        failed. A collective."""
        worked = all_gather_lists([error is None for error in errors])
        if not any(worked):
            [first, *_] = all_gather_lists([story(error) for error in errors[:1]])
            raise InputError(f"multi-turn: all {len(worked)} episodes failed, the first with{first}")
        for request, error in zip(requests, errors):
            if error is not None:
                request.finish_reason = FinishReason.ERROR
                line = f"the episode failed: {say(error).splitlines()[0]}"
                request.tool_errors.append(readable(line, ERROR_TEXT, "right"))
                show_once("an episode", error)
        rows = [Generated(r.token_ids, r.log_probs, r.finish_reason.value, [], r.routed_experts) for r in requests]
        masks, positions = [r.response_mask for r in requests], [r.position_ids for r in requests]
        batch = add_responses(prompts, rows, self.engine.pad_token_id, masks, positions)
        turn_rewards = torch.zeros_like(batch.batch["rollout_log_probs"])  # (B, T)
        states = torch.zeros_like(batch.batch["responses"])  # (B, T)
        numbers = torch.zeros_like(states)
        for i, request in enumerate(requests):
            for at, reward in request.rewards:
                turn_rewards[i, at] += reward
            n = len(request.token_ids)
            states[i, :n], numbers[i, :n] = torch.tensor([request.anchor_states, request.turn_numbers])
        turn_rewards *= batch.batch["response_mask"].any(1, keepdim=True)
        batch.batch.update({"turn_rewards": turn_rewards, "anchor_states": states, "turn_numbers": numbers})
        columns = {name: [getattr(request, name) for request in requests] for name in OUTPUT_COLUMNS}
        if "multi_modal_inputs" in prompts.non_tensor_batch:
            columns["multi_modal_data"] = [request.data for request in requests]
            columns["multi_modal_inputs"] = [request.row_inputs for request in requests]
        if self.settings.agent:
            columns["answer"] = [request.answer for request in requests]
        columns["agent_metrics"] = [dict(request.metrics) for request in requests]
        batch.non_tensor_batch |= DataProto.from_dict(non_tensors=columns).non_tensor_batch
        return batch


class EngineRequests:
    """The requests of all episodes to one engine. It steps in the event loop, as a thread would cost vLLM 0.5 ms a step
    and an OpenMP thread pool of its own. A long step runs in a thread, so that the tools' timeouts go on; requests that
    come meanwhile wait in `todo`."""

    def __init__(self, engine: SteppedEngine):
        self.engine = engine
        self.todo: list[Callable[[], None]] = []
        self.futures: dict[str, asyncio.Future[Generated]] = {}
        self.running: set[str] = set()
        self.wake = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids, sampling: Sampling, seed: int, *media: Media) -> Generated:
        self.futures[request_id] = asyncio.get_running_loop().create_future()
        self._later(self._submit, request_id, prompt_ids, sampling, seed, *media)
        try:
            return await self.futures[request_id]
        except asyncio.CancelledError:
            self._later(self._abort, request_id)
            raise
        finally:
            del self.futures[request_id]

    async def serve(self, episodes: list[asyncio.Task]) -> None:
        """Steps the engine until all episodes are done. Raises what the engine raises."""
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
        """Lets tools run between two steps. Before a long step it waits as long as more requests come."""
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
            return  # it was cancelled meanwhile
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


class LocalEpisodes(Episodes):
    """Episodes on an engine in this process."""

    engine: SteppedEngine

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        """One episode per row of `prompts`, as engine.generate does for single turns; row i is sampled with seeds[i].

        A row's raw_prompt_ids must be what the template makes of raw_prompt and settings.schemas. The row may have
        tools_kwargs and interaction_kwargs. sampling.max_response_length limits the whole episode.

        Adds finish_reason (a FinishReason's value), messages, num_turns, segments (their starts and ends in the
        response), weight_version, agent_metrics and turn_rewards (B, T). A reward of a tool call or of an answer stands
        on the last token of the turn that was answered; the tools' calc_reward and the interaction's score on the last
        token of all. Raises InputError: the prompts were made without the tools, or all episodes failed."""
        requests = self._make_requests(prompts, sampling, seeds)
        with self.engine.session():
            errors = _runner(os.getpid()).run(self._run(requests, sampling))
        return self._as_batch(prompts, requests, errors)

    async def _run(self, requests: list[AsyncRolloutRequest], sampling: Sampling) -> list[BaseException | None]:
        """The exception that each episode raised, or None."""
        shared = EngineRequests(self.engine)
        episodes = [self.episode(request, shared.generate, sampling, self.settings) for request in requests]
        tasks = [asyncio.create_task(episode.run()) for episode in episodes]
        report = asyncio.create_task(_report(requests))
        try:
            await shared.serve(tasks)
        finally:
            for task in (report, *tasks):
                task.cancel()
            errors = await asyncio.gather(*tasks, report, return_exceptions=True)
        return errors[:-1]


@cache
def _runner(pid: int) -> asyncio.Runner:
    """The event loop of this process. All rollouts share it, because a client that a tool keeps belongs to one loop."""
    return asyncio.Runner()


async def _report(requests: list[AsyncRolloutRequest]) -> None:
    start = time.monotonic()
    while True:
        await asyncio.sleep(REPORT_S)
        report_states(time.monotonic() - start, [request.state.value for request in requests])


@dataclass(eq=False)
class EpisodeResponse(Response):
    request: AsyncRolloutRequest  # also future's result


class ServerEpisodes(Episodes):
    """Episodes on vLLM servers. They run in the event loop of the engine's requests, also while this thread trains.
    When new weights come, a turn that is being sampled keeps its tokens, as a single turn does."""

    engine: "ServerEngine"

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        return self.collect(prompts, sampling, self.start(prompts, sampling, seeds))

    def start(self, prompts: DataProto, sampling: Sampling, seeds: list[int], partial=None) -> list[EpisodeResponse]:
        """The first half of generate; collect is the second. Weights may be synced between the two. partial: not used,
        as an episode restarts, because the state of its tools is lost."""
        self.engine.check_weights()
        requests = self._make_requests(prompts, sampling, seeds)
        contexts, media = zip(*((request.raw_context, request.media) for request in requests))
        places = self.engine.turns_and_pictures(contexts, media)
        return [self._start(request, sampling, *place) for request, place in zip(requests, places)]

    def _start(self, request: AsyncRolloutRequest, sampling: Sampling, server: int, pictures) -> EpisodeResponse:
        parts = list(pictures.parts) if pictures else []  # the PNGs so far

        async def generate(name: str, prompt_ids: list[int], limited: Sampling, seed: int, *media: Media) -> Generated:
            shown: dict[str, Any] = {}
            if media:
                shown["pictures"] = await asyncio.to_thread(self.engine.pictures, media[0], parts)
                parts[:] = shown["pictures"].parts
            try:
                return await self.engine.sample(prompt_ids, limited, seed, server, **shown)
            except InputError as error:
                raise EngineFailed from error

        async def run() -> AsyncRolloutRequest:
            await self.episode(request, generate, sampling, self.settings).run()
            return request

        future = self.engine.begin(run(), lambda: request.state.value)
        return EpisodeResponse(request.seed, Generated([], [], "abort"), future, request)

    def collect(self, prompts: DataProto, sampling: Sampling, responses: list[EpisodeResponse]) -> DataProto:
        """What LocalEpisodes.generate returns, and weight_versions (B, T), -1 where none was sampled. A collective."""
        self.engine.wait_until(lambda: all(response.future.done() for response in responses))
        errors = [response.future.exception() for response in responses]
        for error in errors:
            if isinstance(error, EngineFailed):
                raise error.__cause__
        requests = [response.request for response in responses]
        batch = self._as_batch(prompts, requests, errors)
        add_weight_versions(batch, [request.weight_versions for request in requests])
        return batch


def make_episodes(engine: RolloutEngine, settings: MultiTurn) -> LocalEpisodes | ServerEpisodes:
    return (LocalEpisodes if engine.in_process else ServerEpisodes)(engine, settings)
