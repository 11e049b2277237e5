"""vLLM servers over HTTP. Requests run on an event loop in a thread of their own.

aiohttp, because httpx looks at all open connections for each request: with hundreds at a time that costs more CPU than
the sampling.
"""

import asyncio
import json
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import aiohttp

from lib import InputError

END_S = 10.0  # for what still runs when a run ends
DEAD = (500, 502, 503)  # how a server answers whose engine has ended


class ServerLost(InputError):
    """No server answers there, or one without an engine."""


class Servers:
    """The servers at `urls`. Errors name the server, and are InputErrors: the user started it, or gave its URL."""

    def __init__(self, urls: list[str]):
        self.urls = [url.rstrip("/") for url in urls]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="servers", daemon=True).start()
        self._client = self.begin(self._connect()).result()

    async def _connect(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)  # below vLLM's 5 s
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    def begin(self, coroutine: Coroutine) -> Future:
        """Runs it on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def ask(self, url: str, method: str, path: str, **kwargs) -> dict:
        return self.begin(self.request(url, method, path, **kwargs)).result()

    def order(self, path: str, **kwargs) -> list[Future]:
        """Posts the same to all servers, and waits for none."""
        return [self.begin(self.request(url, "POST", path, **kwargs)) for url in self.urls]

    def on_workers(self, url: str, method: str, **kwargs) -> Future:
        """Calls a method of the server's workers, on a connection of its own: if the method fails, the server silently
        closes the connection."""
        order = {"method": method, "kwargs": kwargs}
        return self.begin(self.request(url, "POST", "/collective_rpc", json=order, headers={"Connection": "close"}))

    async def request(self, url: str, method: str, path: str, **kwargs) -> dict:
        """Raises ServerLost, and InputError for what the server refuses."""
        try:
            async with self._client.request(method, url + path, **kwargs) as response:
                status, body = response.status, await response.read()
            if status in DEAD and path != "/health":
                await self.request(url, "GET", "/health")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerLost(
                f"--rollout-engine {url}: no vLLM server answers there ({type(error).__name__}: {error}); start "
                "it, or see its log for why it ended"
            ) from error
        if status == 404 and not path.startswith("/v1"):
            raise InputError(
                f"--rollout-engine {url}: the server has no {path}: start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment"
            )
        if status >= 400:
            what = " ".join(body.decode(errors="replace").split())[:500]
            kind = ServerLost if path == "/health" else InputError
            raise kind(f"--rollout-engine {url}: {path} failed with {status}: {what}")
        content: dict[str, Any] = json.loads(body) if body else {}
        return content

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
