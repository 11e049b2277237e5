"""The engine of a URL: vLLM servers that already run."""

import asyncio
import base64
import copy
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar

import psutil
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lib import InputError
from lib.data.vision import Media, media_of, to_png
from lib.data_proto import DataProto
from lib.distributed import Max, Metric, Sum, all_reduce_max, compute_device, is_on_one_node, on_first_rank
from lib.model.routing import ROUTES, extended_routes
from lib.rollout import Generated, RolloutEngine, add_responses, turn_seed
from lib.rollout.engine import (
    REPORT_S,
    Response,
    add_weight_versions,
    check_expanded,
    report_states,
    row_limits,
    stop_token_ids,
)
from lib.rollout.vllm_engine import as_finish_reason, vllm_settings
from lib.rollout.weight_sync import CheckedStream, WeightSyncError
from lib.sampling import Sampling
from servers.client import HEALTH_S, PATH, ServerLost, Servers, answered, server_error
from servers.managed import ManagedServers, order_servers
from servers.weights import ServerWeights

# without them vLLM's server takes the model's generation_config.json, or its own flags
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "watermarking": False}
NEUTRAL |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
GENERATE = "/inference/v1/generate"
# vLLM sends an image to its engine once. If a pause ends that request, those after it fail once
PICTURE_ATTEMPTS = 3
LEASE_S = 900.0  # from a sync on; a longer step may lose the servers to another run, and says so
STOP_S = 0.5  # longest gap between answers after a pause; requests without one are sampled again
T = TypeVar("T")
ATTEMPTS = 3  # to give the managed servers weights
BREATH_S = 0.001  # so that a rank looks once for several responses that end together
ROUND_S = 1.0  # how long ranks wait for responses before they tell each other how they stand


class Pictures(NamedTuple):
    """A prompt's images, as a server takes them."""

    ids: list[int]  # the prompt, expanded
    parts: list[dict]


def is_over(pid: int) -> bool:
    """Whether the process is gone, or is this one, which begins another run."""
    return pid == os.getpid() or not psutil.pid_exists(pid)


class ServerEngine(RolloutEngine):
    """vLLM servers over HTTP. Each rank spreads its groups of responses over all of them.

    Servers with batches.py's route get requests in batches, others one by one: the samples are
    the same. A server must serve this run only, with VLLM_SERVER_DEV_MODE=1 in its environment (it
    then obeys anyone who can reach it) and --logprobs-mode processed_logprobs; for a vision model
    also with --enable-scale-out. For its weights see ServerWeights.

    A response in flight when new weights come keeps its tokens and goes on with the new weights. If
    one of the job's `own` servers ends, its requests are sampled again elsewhere, or there when it
    is back, from the tokens of the last sync, with the same seeds. Raises InputError if a server
    cannot be reached, was started differently, or refuses a request or the weights."""

    takes_images = asynchronous = gives_routes = True

    def __init__(self, model, tokenizer, *, folder, max_length, dtype, processor=None, urls="", own=None, **start):
        self.own: ManagedServers | None = own
        key = os.environ.get("VLLM_API_KEY")
        if own is not None:
            order_servers(own, model, tokenizer, folder, processor, max_length=max_length, dtype=dtype, **start)
            urls, key = ",".join(own.urls()), own.key
        self.servers = Servers(urls.split(","), key)
        self._starts = own.starts() if own else []
        self._lost: set[str] = set()
        self._resampled = 0
        self.dtype, self._device = dtype, compute_device(model)
        self.pad_token_id, self.stop_ids = tokenizer.pad_token_id, stop_token_ids(model, tokenizer)
        self.tokenizer = copy.deepcopy(tokenizer)  # for the thread of the requests
        self._turns = count(dist.get_rank())
        self._posted: set[asyncio.Task] = set()
        self._running: dict[Future, Callable[[], str]] = {}
        self._open = asyncio.Event()  # set, except while weights come
        self._open.set()
        self._ended = threading.Event()  # a response has
        self._given: tuple[PreTrainedModel, int]
        here, folder = own is not None and is_on_one_node(), folder.resolve()
        self.weights = ServerWeights(self.servers, folder, dtype, here=here)
        self._lease = {"run": str(folder.parent), "host": socket.gethostname(), "pid": os.getpid()}
        on_first_rank(lambda: self._take_lease(LEASE_S))  # before anything disturbs another run
        for url in self.servers.urls:
            self._check_server(url, max_length)
            if processor is not None:
                self._check_takes_images(url)
        self.batches = own is not None or all(map(self._takes_batches, self.servers.urls))

    def _take_lease(self, seconds: float) -> None:
        """Takes or renews the lease on servers that others started, if they have worker.py's
        extension: a second run would change their weights. A resumed run gets it at once, as does
        one that follows an ended run on this host. Raises InputError."""
        if self.own is not None or self.weights.way == "reload_weights":
            return
        for url in self.servers.urls:
            take = partial(self.servers.on_workers, url, "take_lease", ours=self._lease, seconds=seconds)
            [holder, *_] = take().result()["results"]
            if holder and holder["host"] == self._lease["host"] and is_over(holder["pid"]):
                [holder, *_] = take(over=holder).result()["results"]
            if holder:
                who = f"the run {holder['run']} (pid {holder['pid']} on {holder['host']}) uses this server"
                how = f"end that run, or start another server; a run that was killed has it for {LEASE_S:.0f} s"
                raise server_error(url, f"{who}: {how}")

    def _check_server(self, url: str, max_length: int) -> None:
        served = self.servers.ask(url, "GET", "/v1/models")["data"][0]
        self.served_model, self.max_length = served["id"], served["max_model_len"]
        if self.max_length < max_length:
            why = f"the server's max_model_len is {self.max_length}, prompt and response need {max_length}"
            raise server_error(url, f"{why}: start it with --max-model-len {max_length}")
        self.servers.ask(url, "POST", "/resume")  # an earlier run may have left it paused
        certain = self._complete(url, [0], max_tokens=1, logprobs=0, allowed_token_ids=[0])
        if self.servers.begin(certain).result()["logprobs"]["token_logprobs"][0] < -1e-3:
            why = "the server's log-probs are not those of the distribution that it samples from"
            raise server_error(url, f"{why}: start it with --logprobs-mode processed_logprobs")

    def _check_takes_images(self, url: str) -> None:
        try:
            self.servers.begin(self._complete(url, [0], Pictures([0], []), max_tokens=1)).result()
        except InputError as error:
            advice = f"images go by {GENERATE}: start the server with --enable-scale-out"
            raise server_error(url, f"{advice}; {error}") from error

    def _takes_batches(self, url: str) -> bool:
        try:
            self.servers.ask(url, "POST", PATH, json={"begin": [], "abort": []})
        except InputError:  # it has no such route
            return False
        return True

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """Gives the servers the trainer's weights. Responses in flight go on with them. A collective."""
        on_first_rank(lambda: self._take_lease(LEASE_S))
        stream = CheckedStream(model, self.dtype)
        self._on_loop(self._open.clear)
        self.version = None  # until the sync has succeeded
        dist.barrier()
        attempts = 1
        while (failure := self._pause() or self.weights.give(stream, version)) is not None:
            if self.own is None:  # a server may now hold some old and some new weights
                raise InputError(f"{failure}; it must serve the model that is trained: start it again")
            if attempts == ATTEMPTS:
                raise InputError(f"{failure}; {ATTEMPTS} starts of the servers did not help")
            attempts += 1
            if dist.get_rank() == 0:
                print(f"{failure}; all servers are started anew", file=sys.stderr, flush=True)
            self.own.start_anew(self._starts)
        self._given = model, version
        self.version, self.checksum = version, stream.checksum
        self._lost.clear()
        self._on_loop(self._open.set)

    def _pause(self) -> str | None:
        """Ends each request with the tokens that it has: none is left at a server, and caches are
        empty. Returns, on all ranks, why it failed."""
        if self.own is not None:
            urls, starts = map(list, zip(*on_first_rank(self.own.states)))
            if starts != self._starts:
                self.weights.leave()
                self._starts, self.servers.urls = starts, urls
        failure = None
        try:
            on_first_rank(lambda: self.servers.order_all("/pause", params={"mode": "abort"}))
        except InputError as error:
            failure = str(error)
        self.servers.begin(self._drain()).result()
        return failure

    async def _drain(self) -> None:
        """Waits until no request is at a server: a late one would wait for the new weights."""
        running, first = set(self._posted), asyncio.FIRST_COMPLETED
        while running:
            done, running = await asyncio.wait(running, timeout=STOP_S, return_when=first)
            if not done:
                for request in running:
                    request.cancel()

    def probe_log_probs(self, ids: list[int], media: Media | None = None) -> torch.Tensor:
        """(servers, len(ids) - 1), of this rank's share of the servers, at least one."""
        pictures = self.pictures(media)
        tokens = pictures.ids if pictures else ids
        rank, size, urls = dist.get_rank(), dist.get_world_size(), self.servers.urls
        found = []
        for url in urls[rank::size] or [urls[rank % len(urls)]]:
            request = self._complete(url, ids, pictures, max_tokens=1, prompt_logprobs=0)
            log_probs = self.servers.begin(request).result()["prompt_logprobs"]
            found.append([of[str(token)]["logprob"] for token, of in zip(tokens[1:], log_probs[1:])])
        return torch.tensor(found)

    def close(self) -> None:
        self.weights.leave()
        if dist.get_rank() == 0:
            with suppress(InputError):  # a server that is gone has none
                self._take_lease(seconds=0.0)
        self.servers.close()

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        return self.collect(prompts, sampling, self.start(prompts, sampling, seeds))

    def start(self, prompts: DataProto, sampling: Sampling, seeds: list[int], partial=None) -> list[Response]:
        """The first half of generate; collect is the second. Weights may be synced in between.
        partial: for each response a Generated with its tokens so far, or None."""
        self.check_weights()
        raw_ids, responses = prompts.non_tensor_batch["raw_prompt_ids"], []
        places, limits = self.turns_and_pictures(raw_ids, media_of(prompts)), row_limits(prompts, sampling)
        for i, (ids, seed, (turn, pictures)) in enumerate(zip(raw_ids, seeds, places)):
            row = partial[i] if partial else Generated([], [], "abort")
            own = replace(sampling, max_response_length=limits[i])
            sampled = self.sample(list(map(int, ids)), own, seed, turn, row, pictures)
            responses.append(Response(seed, row, self.begin(sampled)))
        return responses

    def collect(self, prompts: DataProto, sampling: Sampling, responses: list[Response]) -> DataProto:
        """What generate returns, with weight_versions (B, T). A collective."""
        self.wait_until(lambda: all(response.future.done() for response in responses))
        rows: list[Generated] = [response.future.result() for response in responses]
        batch = add_responses(prompts, rows, self.pad_token_id)
        add_weight_versions(batch, [row.weight_versions for row in rows])
        return batch

    def turns_and_pictures(self, prompts: Iterable, media: Sequence) -> list[tuple[int, Pictures | None]]:
        """The turn and the pictures of each prompt. Equal prompts are encoded once."""
        keys = [(tuple(map(int, ids)), own.hash if own else 0) for ids, own in zip(prompts, media)]
        with_images = {key: own for key, own in zip(keys, media) if own}
        with ThreadPoolExecutor() as pool:  # of as many threads as there is to encode
            pictures = dict(zip(with_images, pool.map(self.pictures, with_images.values())))
        return [(turn, pictures.get(key)) for turn, key in zip(self.turns(keys), keys)]

    def turns(self, prompts: list) -> list[int]:
        """A turn for each prompt. Equal neighbours share a server, and so a cached prefix."""
        found: list[int] = []
        for i, prompt in enumerate(prompts):
            found.append(found[-1] if i and prompt == prompts[i - 1] else next(self._turns))
        return found

    def pictures(self, media: Media | None, known: Sequence[dict] = ()) -> Pictures | None:
        """known: the parts of its first images. Raises InputError if there is a video."""
        if media is None:
            return None
        if media.data.get("video"):
            raise server_error(self.servers.urls[0], "a server gets no videos: take vllm, or hf")
        new = media.data["image"][len(known) :]
        urls = [f"data:image/png;base64,{base64.b64encode(to_png(x)).decode()}" for x in new]
        return Pictures(media.ids, [*known, *({"type": "image_url", "url": url} for url in urls)])

    def begin(self, coroutine, state: Callable[[], str] = lambda: "running") -> Future:
        """Runs it on the requests' event loop. Its end wakes wait_until. state: what it does now."""
        future = self.servers.begin(coroutine)
        self._running[future] = state
        future.add_done_callback(self._end)
        return future

    def _end(self, future: Future) -> None:
        del self._running[future]
        self._ended.set()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Waits until `done()` on every rank; what ends it was started with `begin`. If a rank loses all
        servers meanwhile, they get the weights of the last sync again. A collective."""
        start = reported = time.monotonic()
        while True:
            deadline = time.monotonic() + ROUND_S
            while not done() and self._open.is_set() and (left_s := deadline - time.monotonic()) > 0:
                self._ended.wait(left_s)
                self._ended.clear()
                time.sleep(BREATH_S)
            state = 0 if done() else 1 if self._open.is_set() else 2
            if (worst := all_reduce_max(state, self._device)) == 0:
                return
            if worst == 2:
                self.load_weights(*self._given)
            if (now := time.monotonic()) - reported >= REPORT_S:
                report_states(now - start, [state() for state in list(self._running.values())])
                if self.own is None:  # engine ranks look after the job's own
                    for url in self.servers.urls:
                        self.servers.ask(url, "GET", "/health", limit_s=HEALTH_S)
                reported = now

    def so_far(self, responses: list[Response]) -> list[Generated]:
        """Copies of the responses as they were at the last sync, and of complete ones."""
        # on the loop no row grows meanwhile
        return self._on_loop(lambda: [copy.deepcopy(response.row) for response in responses])

    def _on_loop(self, act: Callable[[], T]) -> T:
        """What `act()` returns when the event loop calls it."""

        async def call() -> T:
            return act()

        return self.servers.begin(call()).result()

    def check_weights(self) -> None:
        if self.version is None:
            raise WeightSyncError("the vLLM servers have no weights of this run: call sync_weights before generate")

    async def sample(
        self, prompt_ids: list[int], sampling: Sampling, seed: int, turn: int, row=None, pictures=None
    ) -> Generated:
        """One response, from server number `turn`. row: a Generated with its tokens so far, which gets
        the others. A request that a sync stops is followed by another, from the tokens so far, with
        a seed of its own. Raises ValueError if the prompt is too long."""
        length = len(pictures.ids if pictures else prompt_ids)
        if length >= self.max_length:
            raise ValueError(f"a prompt of {length} tokens; the server's max_model_len is {self.max_length}")
        row = row or Generated([], [], "abort")
        while row.finish_reason == "abort":
            await self._open.wait()
            here = [url for url in self.servers.urls if url not in self._lost]
            url, version, n = here[turn % len(here)], self.version, len(row.token_ids)
            left = replace(sampling, max_response_length=sampling.max_response_length - n)
            settings = vllm_settings(left, turn_seed(seed, -n))
            shown = pictures and pictures._replace(ids=[*pictures.ids, *row.token_ids])
            found = await self._attempt(url, [*prompt_ids, *row.token_ids], settings, shown)
            if found is None:
                continue
            self._check_length(url, found, settings["max_tokens"], length + n)
            row.token_ids += found.token_ids
            row.log_probs += found.log_probs
            row.weight_versions += [version] * len(found.token_ids)
            row.finish_reason = found.finish_reason
            self._end_at_seam(row, n, sampling.stop)
            if self.route_layers and found.routed_experts is not None:
                routes = found.routed_experts[: length + len(row.token_ids), self.route_layers]  # (tokens, layers, k)
                row.routed_experts = extended_routes(row.routed_experts, routes)
            if self._open.is_set():
                break
        return row

    async def _attempt(self, url: str, *request) -> Generated | None:
        """None: a pause has cancelled the request, or the job has lost the server."""
        task = asyncio.create_task(self._request(url, *request))
        self._posted.add(task)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._posted.discard(task)
        if task.cancelled():
            return None
        if self.own is not None and isinstance(task.exception(), ServerLost):
            self._lose(url)
            return None
        return task.result()

    def _end_at_seam(self, row: Generated, n: int, stop: tuple[str, ...]) -> None:
        """Ends the row at a stop string that began in its first n tokens."""
        longest = max((len(text.encode()) for text in stop), default=0) + 1  # in tokens, as in hf_engine.py
        start, last = max(0, n - longest), min(n + longest, len(row.token_ids))

        def is_over(end: int) -> bool:
            ids = row.token_ids[start:end]
            text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            return any(string in text for string in stop)

        if n and stop and is_over(last):
            end = next(filter(is_over, range(n + 1, last)), last)
            for tokens in (row.token_ids, row.log_probs, row.weight_versions):
                del tokens[end:]
            row.finish_reason = "stop"

    def _lose(self, url: str) -> None:
        """Its requests go to the others; without others they wait for weights."""
        self._resampled += 1
        self._lost.add(url)
        if len(self._lost) == len(self.servers.urls):
            self._open.clear()
        self._ended.set()

    def metrics(self) -> dict[str, Metric]:
        """Requests sampled again since the last call, and restarts of managed servers."""
        resampled, self._resampled = self._resampled, 0
        again = sum(self._starts) - len(self._starts)
        return {"perf/requests_resampled": Sum(resampled), "perf/server_restarts": Max(again)}

    def _check_length(self, url: str, found: Generated, asked: int, before: int) -> None:
        asked = min(asked, self.max_length - before)
        if found.finish_reason == "length" and len(found.token_ids) < asked:
            why = f"the server ended a response after {len(found.token_ids)} of {asked} tokens"
            advice = "start it with --generation-config vllm and without --override-generation-config"
            raise server_error(url, f"{why}: {advice}")

    async def _request(self, url: str, prompt_ids: list[int], settings: dict, pictures: Pictures | None) -> Generated:
        """What there is of the response when it ends, or when a pause ends it."""
        if self.batches and pictures is None:
            return await self.servers.generate(url, prompt_ids, self._whole(settings))
        choice = await self._complete(url, prompt_ids, pictures, **settings)
        log_probs = choice["logprobs"]["token_logprobs"] if choice["token_ids"] else []
        found = {"token_ids": choice["token_ids"] or [], "log_probs": log_probs, ROUTES: choice.get(ROUTES)}
        return answered(found | {"finish_reason": as_finish_reason(choice["finish_reason"])})

    async def _complete(self, url: str, prompt_ids: list[int], pictures: Pictures | None = None, **settings) -> dict:
        if pictures is not None:
            return await self._complete_pictures(url, prompt_ids, pictures, **settings)
        body = {"model": self.served_model, "prompt": prompt_ids, **self._whole(settings)}
        body |= {"skip_special_tokens": False, "return_token_ids": True}
        return (await self.servers.request(url, "POST", "/v1/completions", json=body))["choices"][0]

    async def _complete_pictures(self, url: str, prompt_ids: list[int], pictures: Pictures, **settings) -> dict:
        """What _complete returns. /v1/completions would ignore the images without a word."""
        sampling = self._whole(settings) | {"detokenize": "stop" in settings}
        body = {"token_ids": prompt_ids, "content_parts": pictures.parts, "sampling_params": sampling}
        body["return_token_ids"] = True
        for attempt in range(1, PICTURE_ATTEMPTS + 1):
            try:
                reply = await self.servers.request(url, "POST", GENERATE, json=body)
                break
            except InputError as error:
                if isinstance(error, ServerLost) or attempt == PICTURE_ATTEMPTS:
                    raise
        check_expanded(url, pictures.ids, reply["prompt_token_ids"])
        [choice] = reply["choices"]
        log_probs = [token["logprob"] for token in (choice["logprobs"] or {}).get("content") or []]
        choice["logprobs"] = {"token_logprobs": log_probs}
        return choice | {"prompt_logprobs": reply["prompt_logprobs"]}

    def _whole(self, settings: dict) -> dict:
        return {**NEUTRAL, "stop_token_ids": self.stop_ids, **settings}
