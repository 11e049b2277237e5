"""The engine of a URL: vLLM servers that already run."""

import asyncio
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PreTrainedModel

from lib import InputError
from lib.data_proto import DataProto
from lib.distributed import address_towards, broadcast, compute_device, join_group, listening_store
from lib.rollout.engine import Generated, RolloutEngine, Sampling, add_responses, stop_token_ids, turn_seed
from lib.rollout.vllm_engine import as_finish_reason, vllm_settings
from lib.rollout.weight_sync import CheckedStream, WeightSyncError

STEP_S = 0.005  # how long a step waits for a response; meanwhile lib/agent's event loop stands still
BUCKET_BYTES = 256 << 20  # of one broadcast; a larger tensor goes alone. Three buckets are in memory at a time
SYNC_TIMEOUT_S = 300.0  # how long all servers may take to join the group, or to take a bucket
HEALTH_S = 2.0  # time between two checks that the servers are alive
NEUTRAL = {  # what a request leaves out, vLLM's server takes from the model's generation_config.json or from its flags
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "watermarking": False,
}
STOP_S = 0.5  # longest gap between the answers of requests that a pause has stopped; later ones are sampled again


class ServedEngine(RolloutEngine):
    """vLLM servers that the user started, over their OpenAI-compatible API. Rank r uses URL r modulo their number.

    If the servers were started with vllm_weights.py's backend "broadcast", the first rank broadcasts the weights to all
    workers of all servers, bucket by bucket. Otherwise the first rank writes them to a file in `folder`, and the
    servers read it; servers on other machines need a shared disk. The folder that a server was started with stays as it
    is.

    A server must run with VLLM_SERVER_DEV_MODE=1 in its environment (it then obeys anyone who can reach it) and with
    --logprobs-mode processed_logprobs. It must serve this run only.

    A response that is being sampled when new weights come keeps its tokens and goes on with the new weights: see start
    and collect.

    Raises:
        InputError: a server cannot be reached, was started differently, or refuses a request or the weights.
    """

    long_steps = False  # requests come and go at each step
    shared = False

    def __init__(self, urls: str, model, tokenizer, *, folder: Path, max_length: int, dtype: torch.dtype):
        self.servers = [url.rstrip("/") for url in urls.split(",")]
        self.url = self.servers[dist.get_rank() % len(self.servers)]
        self.first_of_server = dist.get_rank() < len(self.servers)
        self.folder, self.dtype, self.pad_token_id = folder.resolve(), dtype, tokenizer.pad_token_id
        self.stop_ids = stop_token_ids(model, tokenizer)
        self._running: dict[str, Future[Generated]] = {}
        self._posted: set[asyncio.Task] = set()
        self._open = asyncio.Event()  # set, except while weights come
        self._open.set()
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(keepalive_expiry=1.0))  # below vLLM's 5 s
        self._loop = asyncio.new_event_loop()  # its own, since lib/agent's stands still during a step
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.version: int | None = None
        self.checksum: int | None = None
        self.proved: dict[str, float] = {}
        served = self._ask("GET", "/v1/models")["data"][0]
        self.served_model, self.max_length = served["id"], served["max_model_len"]
        if self.max_length < max_length:
            raise InputError(
                f"--rollout-engine {self.url}: the server's max_model_len is {self.max_length}, prompt and response "
                f"need {max_length}: start it with --max-model-len {max_length}"
            )
        self._reset_prefix_cache()  # fails without the dev mode, before anything is trained
        self._ask("POST", "/resume")  # an earlier run may have ended while the server was paused
        only_choice = self._wait(self._sample([0], Sampling(1, top_k=1), seed=0))
        if only_choice.log_probs[0] < -1e-3:
            raise InputError(
                f"--rollout-engine {self.url}: the server's log-probs are not those of the distribution that it "
                "samples from: start it with --logprobs-mode processed_logprobs"
            )
        self.weights_by = broadcast(self._weights_by() if dist.get_rank() == 0 else None)
        self._group: Any = None  # what join_group returns

    def _weights_by(self) -> str:
        """What all servers can do: "broadcast", "reload_from" (only the worker extension) or "reload_weights"."""
        backends = set()
        for url in self.servers:
            try:
                backends |= set(self._on_workers(url, "weight_transfer_backend")["results"])
            except InputError:  # the server has no such method
                return "reload_weights"
        return "broadcast" if backends == {"broadcast"} else "reload_from"

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """Gives the servers the trainer's weights. Responses in progress go on with them. A collective."""
        stream = CheckedStream(model, self.dtype)
        self._loop.call_soon_threadsafe(self._open.clear)
        self.version = None  # until the sync has succeeded
        dist.barrier()
        if self.first_of_server:
            self._ask("POST", "/pause", params={"mode": "abort"})  # ends each request with the tokens that it has
        dist.barrier()
        self._wait(self._drain())
        try:
            if self.weights_by == "broadcast":
                self._broadcast(stream)
            else:
                self._write_and_reload(stream, self.folder / f"version_{version}")
        except InputError as error:  # a server may now hold some old and some new weights
            needs = "" if self.weights_by == "broadcast" else f" and see {self.folder}"
            raise InputError(f"{error}; it must serve the model that is trained{needs}: start it again") from error
        dist.barrier()
        if self.first_of_server:
            self._reset_prefix_cache()  # cached prefixes hold keys and values of the old weights
            self._ask("POST", "/resume")
        dist.barrier()
        self.version, self.checksum = version, stream.checksum
        self._loop.call_soon_threadsafe(self._open.set)

    async def _drain(self) -> None:
        """Waits until no request is at the server: one that arrived after the pause would wait for the new weights."""
        running = set(self._posted)
        while running:
            done, running = await asyncio.wait(running, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                for request in running:
                    request.cancel()

    def _broadcast(self, stream: CheckedStream) -> None:
        """Gathers the next bucket while one is sent. All ranks gather; only the first rank sends."""
        if dist.get_rank() > 0:
            for _ in stream:
                pass
            return
        if self._group is None:
            self._group = self._connect(compute_device(stream.model))
        self._finish(self._order("/start_weight_update"))
        sending: tuple[list[Future], dist.Work | None] = ([], None)
        for names, tensors in _buckets(stream):
            shapes = [list(tensor.shape) for tensor in tensors]
            bucket = torch.cat([tensor.flatten() for tensor in tensors])
            self._finish(*sending)
            update = {"names": names, "shapes": shapes, "dtype": str(self.dtype).removeprefix("torch.")}
            replies = self._order("/update_weights", json={"update_info": update})
            sending = replies, self._group.broadcast(bucket, 0)
        self._finish(*sending)
        self._finish(self._order("/finish_weight_update"))

    def _connect(self, device: torch.device) -> Any:
        """The process group of the trainer's first rank (its rank 0) and all workers, server after server."""
        sizes = [self._ask("GET", "/get_world_size", url=url)["world_size"] for url in self.servers]
        host = _address_towards(self.servers)
        store = listening_store(host, 0, timedelta(seconds=SYNC_TIMEOUT_S))
        info: dict[str, Any] = {"host": host, "port": store.port, "device": device.type}
        info |= {"size": 1 + sum(sizes), "timeout_s": SYNC_TIMEOUT_S}
        replies = []
        for url, first_rank in zip(self.servers, accumulate([1, *sizes])):
            own = {"init_info": info | {"first_rank": first_rank}}
            replies.append(self._begin("POST", "/init_weight_transfer_engine", url=url, json=own))
        joined: Future = Future()

        def join() -> None:
            try:
                joined.set_result(join_group(store, 0, info["size"], device, SYNC_TIMEOUT_S, host))
            except RuntimeError as error:
                joined.set_exception(error)

        threading.Thread(target=join, daemon=True).start()  # NCCL may wait for ever for a worker that is gone
        self._finish([*replies, joined])
        return joined.result()

    def _order(self, path: str, **kwargs) -> list[Future]:
        return [self._begin("POST", path, url=url, **kwargs) for url in self.servers]

    def _finish(self, replies: list[Future], work: dist.Work | None = None) -> None:
        """Waits for the replies and the work. One may hang if the other failed; both, if a server lost its worker."""
        start = asked = time.monotonic()
        while True:
            try:
                for reply in replies:
                    if reply.done():
                        reply.result()
                if work is not None and work.is_completed():
                    work.wait()
                    work = None
            except RuntimeError as error:
                raise self._broken_off(error) from error
            if work is None and all(reply.done() for reply in replies):
                return
            if time.monotonic() > start + SYNC_TIMEOUT_S:
                raise self._broken_off(f"no answer for {SYNC_TIMEOUT_S:g} s")
            if time.monotonic() > asked + HEALTH_S:
                for url in self.servers:
                    self._ask("GET", "/health", url=url, timeout=SYNC_TIMEOUT_S)
                asked = time.monotonic()
            time.sleep(0.001)

    def _broken_off(self, why) -> InputError:
        reason = str(why).partition("\n")[0]
        return InputError(f"--rollout-engine {','.join(self.servers)}: the broadcast of weights broke off ({reason})")

    def _write_and_reload(self, stream: CheckedStream, folder: Path) -> None:
        """folder: a new one at each sync, since a network disk may show the old file of a known path."""
        first = dist.get_rank() == 0
        weights = {name: tensor.cpu().contiguous() for name, tensor in stream if first}
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()
        if self.first_of_server:
            self._on_workers(self.url, self.weights_by, weights_path=str(folder))
        dist.barrier()
        if first:
            shutil.rmtree(folder)

    def probe_log_probs(self, ids: list[int]) -> torch.Tensor:
        choice = self._wait(self._complete(ids, max_tokens=1, temperature=1.0, prompt_logprobs=0))
        return torch.tensor([lp[str(token)]["logprob"] for token, lp in zip(ids[1:], choice["prompt_logprobs"][1:])])

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        if self._group is not None:
            wait(self._order("/shutdown_weight_transfer_engine"), SYNC_TIMEOUT_S)  # a server that ended needs none
            self._group.shutdown()
        self._wait(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Inside it submit, step and abort may be called."""
        if self.version is None:
            raise WeightSyncError("the vLLM server has no weights of this run: call sync_weights before generate")
        try:
            yield
        finally:
            for request_id in list(self._running):
                self.abort(request_id)

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling, seed: int) -> None:
        """Raises ValueError when the prompt is too long for the server."""
        if len(prompt_ids) >= self.max_length:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens; the server's max_model_len is {self.max_length}")
        self._running[request_id] = asyncio.run_coroutine_threadsafe(
            self._sample(prompt_ids, sampling, seed), self._loop
        )

    def abort(self, request_id: str) -> None:
        """Closes the connection; the server then ends the request."""
        self._running.pop(request_id).cancel()

    def step(self) -> dict[str, Generated]:
        """Returns the requests that ended, after a short wait; possibly none."""
        done = wait(self._running.values(), STEP_S, FIRST_COMPLETED).done
        ended = [request_id for request_id, future in self._running.items() if future in done]
        return {request_id: self._running.pop(request_id).result() for request_id in ended}

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        """One response per row of `prompts`; row i is sampled with seeds[i]."""
        return self.collect(prompts, sampling, self.start(prompts, sampling, seeds))

    def start(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> list[Future]:
        """The first half of generate; collect is the second. Weights may be synced between the two."""
        prompt_ids = prompts.non_tensor_batch["raw_prompt_ids"]
        with self.session():
            return [
                asyncio.run_coroutine_threadsafe(self._sample(ids, sampling, seed), self._loop)
                for ids, seed in zip(prompt_ids, seeds)
            ]

    def collect(self, prompts: DataProto, sampling: Sampling, started: list[Future]) -> DataProto:
        """What generate returns, and weight_versions (B, T): each token's, -1 where none was sampled."""
        rows: list[Generated] = [row.result() for row in started]
        batch = add_responses(prompts, rows, self.pad_token_id)
        versions = torch.full_like(batch.batch["responses"], -1)
        for i, row in enumerate(rows):
            versions[i, : len(row.weight_versions)] = torch.tensor(row.weight_versions)
        batch.batch["weight_versions"] = versions
        return batch

    async def _sample(self, prompt_ids: list[int], sampling: Sampling, seed: int) -> Generated:
        """If a sync of weights stops the request, another one goes on from the tokens sampled so far."""
        row, stops = Generated([], [], "abort"), 0
        while True:
            await self._open.wait()
            version = self.version
            left = replace(sampling, max_response_length=sampling.max_response_length - len(row.token_ids))
            settings = vllm_settings(left, turn_seed(seed, -stops))
            request = asyncio.create_task(self._complete([*prompt_ids, *row.token_ids], **settings))
            self._posted.add(request)
            try:
                await asyncio.wait([request])
            finally:
                request.cancel()
                self._posted.discard(request)
            if not request.cancelled():
                choice = request.result()
                self._check_length(choice, settings["max_tokens"], len(prompt_ids) + len(row.token_ids))
                if choice["token_ids"]:
                    row.token_ids += choice["token_ids"]
                    row.log_probs += choice["logprobs"]["token_logprobs"]
                    row.weight_versions += [version] * len(choice["token_ids"])
                row.finish_reason = as_finish_reason(choice["finish_reason"])
                if self._open.is_set() or row.finish_reason != "abort":
                    return row
            stops += 1

    def _check_length(self, choice: dict, asked: int, before: int) -> None:
        asked = min(asked, self.max_length - before)
        if choice["finish_reason"] == "length" and len(choice["token_ids"]) < asked:
            raise InputError(
                f"--rollout-engine {self.url}: the server ended a response after {len(choice['token_ids'])} of {asked} "
                "tokens: start it with --generation-config vllm and without --override-generation-config"
            )

    async def _complete(self, prompt_ids: list[int], **settings) -> dict:
        settings |= {"stop_token_ids": self.stop_ids, "skip_special_tokens": False, "return_token_ids": True}
        settings = NEUTRAL | settings
        body = {"model": self.served_model, "prompt": list(map(int, prompt_ids)), **settings}
        return (await self._request("POST", "/v1/completions", json=body))["choices"][0]

    async def _request(self, method: str, path: str, url: str | None = None, **kwargs) -> dict:
        url = url or self.url
        try:
            response = await self._client.request(method, url + path, **kwargs)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise InputError(
                f"--rollout-engine {url}: no vLLM server answers there ({type(error).__name__}: {error}); start "
                "it, or see its log for why it ended"
            ) from error
        if response.status_code == 404 and not path.startswith("/v1"):
            raise InputError(
                f"--rollout-engine {url}: the server has no {path}: start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment"
            )
        if response.is_error:
            what = " ".join(response.text.split())[:500]
            raise InputError(f"--rollout-engine {url}: {path} failed with {response.status_code}: {what}")
        return response.json() if response.content else {}

    def _wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _begin(self, method: str, path: str, **kwargs) -> Future:
        return asyncio.run_coroutine_threadsafe(self._request(method, path, **kwargs), self._loop)

    def _ask(self, method: str, path: str, **kwargs) -> dict:
        return self._begin(method, path, **kwargs).result()

    def _on_workers(self, url: str, method: str, **kwargs) -> dict:
        """Uses a connection of its own: if the method fails, the server silently closes the connection."""
        order = {"method": method, "kwargs": kwargs}
        return self._ask("POST", "/collective_rpc", url=url, json=order, headers={"Connection": "close"})

    def _reset_prefix_cache(self) -> None:
        """Clears the cache, also for requests that are still being aborted."""
        if not self._ask("POST", "/reset_prefix_cache", params={"reset_running_requests": True})["success"]:
            raise WeightSyncError(f"the vLLM server {self.url} kept its prefix cache")


def _buckets(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
    """Successive tensors, in buckets of at most BUCKET_BYTES; a larger tensor is alone in its bucket."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    size = 0
    for name, tensor in stream:
        if names and size + tensor.nbytes > BUCKET_BYTES:
            yield names, tensors
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
    yield names, tensors


def _address_towards(urls: list[str]) -> str:
    """This machine's address on the network that leads to the servers; loopback if all of them are on this machine."""
    addresses = []
    for url in map(httpx.URL, urls):
        addresses.append(address_towards(url.host, url.port or {"http": 80, "https": 443}[url.scheme]))
    return next((address for address in addresses if not ip_address(address).is_loopback), addresses[0])
