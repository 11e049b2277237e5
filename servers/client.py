"""vLLM servers over HTTP. Requests run on an event loop in a thread. aiohttp, because httpx looks at all
open connections for each request: with hundreds at a time that costs more CPU than the sampling."""

import asyncio
import base64
import io
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn
from uuid import uuid4

import aiohttp
import numpy as np
import torch

from lib import InputError
from lib.model.routing import ROUTES
from lib.rollout.engine import Generated

PATH = "/plainrl/generate"  # the route of batches.py
MOMENT_S = 0.001  # in which requests gather that travel together
END_S = 10.0  # for what still runs when a run ends
HEALTH_S = 120.0  # for the process of a server's API to answer
ANSWER_S = 600.0  # for the engine behind it, whose step on a CPU takes minutes; samples have no limit
DEAD = (500, 502, 503)  # how a server answers whose engine has ended


class ServerLost(InputError):
    """No server answers there, or one without an engine."""


def server_error(url: str, text: str) -> InputError:
    return InputError(f"--rollout-engine {url}: {text}")


@dataclass
class Batch:
    """Requests, with a future for the answer to each, and the ids of earlier requests to abort."""

    begin: list[tuple[dict, asyncio.Future]] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)


def unpack_routes(text: str) -> torch.Tensor:
    """(tokens, all layers, k) int16, from the .npy file in base64 that vLLM's servers send."""
    return torch.from_numpy(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False).astype(np.int16))


def answered(found: dict) -> Generated:
    """Of a line that batches.py writes, or of a choice that a server answers."""
    routes = found.get(ROUTES)
    return Generated(**found | {ROUTES: None if routes is None else unpack_routes(routes)})


class Servers:
    """The servers at `urls`. Errors are InputErrors that name the server. key: of each request."""

    def __init__(self, urls: list[str], key: str | None = None):
        self.urls = [url.rstrip("/") for url in urls]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="servers", daemon=True).start()
        self._client = self.begin(self._connect(key)).result()
        self._name, self._numbers = uuid4().hex, count()
        self._waiting: dict[str, Batch] = {}
        self._posts: set[asyncio.Task] = set()

    async def _connect(self, key: str | None) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)  # below vLLM's 5 s
        headers = {"Authorization": f"Bearer {key}"} if key else None
        no_limit = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(connector=connector, timeout=no_limit, headers=headers)

    def begin(self, coroutine: Coroutine) -> Future:
        """Runs it on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def ask(self, url: str, method: str, path: str, limit_s: float = ANSWER_S, **kwargs) -> dict:
        limit = aiohttp.ClientTimeout(limit_s)
        return self.begin(self.request(url, method, path, timeout=limit, **kwargs)).result()

    def post(self, url: str, path: str, **kwargs) -> Future:
        return self.begin(self.request(url, "POST", path, **kwargs))

    def order(self, path: str, **kwargs) -> list[Future]:
        """Posts the same to all servers, and waits for none."""
        limit = aiohttp.ClientTimeout(ANSWER_S)
        return [self.post(url, path, timeout=limit, **kwargs) for url in self.urls]

    def order_all(self, path: str, **kwargs) -> None:
        """Posts the same to all servers, and waits for all."""
        for reply in self.order(path, **kwargs):
            reply.result()

    def on_workers(self, url: str, method: str, **kwargs) -> Future:
        """Calls a method of its workers. The server closes the connection if the method fails."""
        order = {"method": method, "kwargs": kwargs}
        return self.post(url, "/collective_rpc", json=order, headers={"Connection": "close"})

    async def request(self, url: str, method: str, path: str, **kwargs) -> dict:
        """Raises ServerLost, and InputError for what the server refuses."""
        async with self._response(url, method, path, **kwargs) as response:
            body = await response.read()
        content: dict[str, Any] = json.loads(body) if body else {}
        return content

    @asynccontextmanager
    async def _response(self, url: str, method: str, path: str, **kwargs) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._client.request(method, url + path, **kwargs) as response:
                if response.status >= 400:
                    await self._refused(url, path, response.status, await response.read())
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            what = f"no vLLM server answers there ({type(error).__name__}: {error})"
            how = "start it, or see its log for why it ended"
            raise ServerLost(f"--rollout-engine {url}: {what}; {how}") from error

    async def _refused(self, url: str, path: str, status: int, body: bytes) -> NoReturn:
        if status in DEAD and path != "/health":
            await self.request(url, "GET", "/health")
        said = " ".join(body.decode(errors="replace").split())[:500]
        what = f"{path} failed with {status}: {said}"
        if status == 404 and not path.startswith("/v1"):
            what = f"the server has no {path}: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        if status == 401:
            what = "the server wants a key: start the run with VLLM_API_KEY in its environment"
        kind = ServerLost if path == "/health" and status not in (401, 404) else InputError
        raise kind(f"--rollout-engine {url}: {what}")

    async def generate(self, url: str, prompt_ids: list[int], settings: dict) -> Generated:
        """Samples by the route of batches.py. Requests of one moment go together."""
        name, answer = f"{self._name} {next(self._numbers)}", self.loop.create_future()
        request = {"id": name, "prompt_token_ids": prompt_ids, "settings": settings}
        self._next_batch(url).begin.append((request, answer))
        try:
            found = await answer
        except asyncio.CancelledError:
            self._next_batch(url).abort.append(name)
            raise
        if "error" in found:
            await self.request(url, "GET", "/health")
            raise server_error(url, found["error"])
        return answered(found)

    def _next_batch(self, url: str) -> Batch:
        if url not in self._waiting:
            self._waiting[url] = Batch()
            self.loop.call_later(MOMENT_S, self._post, url)
        return self._waiting[url]

    def _post(self, url: str) -> None:
        batch = self._waiting.pop(url)
        if not self._client.closed:
            post = self.loop.create_task(self._answer(url, batch))
            self._posts.add(post)
            post.add_done_callback(self._posts.discard)

    async def _answer(self, url: str, batch: Batch) -> None:
        """Gives each request its answer, or all that have none the reason."""
        begin = [(request, answer) for request, answer in batch.begin if not answer.cancelled()]
        waiting = {request["id"]: answer for request, answer in begin}
        order = {"begin": [request for request, _ in begin], "abort": batch.abort}
        try:
            async with self._response(url, "POST", PATH, json=order) as response:
                rest = b""
                async for part in response.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for name, found in map(json.loads, lines):
                        answer = waiting.pop(name)
                        if not answer.done():
                            answer.set_result(found)
            if waiting:
                what = f"the server left {len(waiting)} of {len(begin)} requests without an answer"
                raise ServerLost(f"--rollout-engine {url}: {what}")
        except InputError as error:
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(error)

    def close(self) -> None:
        self.begin(self._end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def _end(self) -> None:
        """Ends what runs on the loop: a tool may have something to release."""
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=END_S)
        await self._client.close()
