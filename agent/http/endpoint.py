"""The HTTP endpoint of --agent: OpenAI's and Anthropic's APIs on this machine's loopback, one key for each episode."""

import asyncio
import hmac
import itertools
import json
import logging
import resource
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from aiohttp import web

from agent.http import anthropic_api, completions_api, openai_api, responses_api
from agent.http.requests import BadRequest, Choice, Options, Rules
from agent.tools.base import say, show_once

LARGEST_BODY = 1 << 24  # bytes
BODY_S = 60.0  # how long a client may take to send its request
BACKLOG = 4096  # connections that wait to be accepted: all agents of a batch connect at once
OPEN_FILES = 1 << 16  # an episode with a command holds eight, and many systems begin with 1024


class Api(Protocol):
    """A format of requests and answers: a module."""

    ID: str  # begins the ids of its answers

    def read_request(self, body: Any, rules: Rules, /) -> tuple[list[dict], list[dict], Options]:
        """(messages and tools as templates want them, options). Raises BadRequest."""

    def completion(self, name: str, choices: list[Choice], options: Options, /) -> dict:
        """The answer to a request that does not stream, with the id `name`."""

    def chunks(self, name: str, choices: list[Choice], options: Options, /) -> Iterator[dict]:
        """The same as events of a stream."""

    def refusal(self, error: BadRequest, /) -> dict: ...


APIS: dict[str, Api] = {"/v1/chat/completions": openai_api, "/v1/responses": responses_api}
APIS["/v1/messages"] = anthropic_api
APIS["/v1/completions"] = completions_api
NO_LOG = logging.Logger(__name__, logging.CRITICAL)
NOT_SUPPORTED = ("/v1/embeddings", "/v1/audio/speech", "/v1/images/generations")
# from a request and the bytes of its body to its answer, or its events
Chat = Callable[[Api, Any, int], Awaitable[dict | Iterator[dict]]]
_of_loop: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Endpoint]]" = WeakKeyDictionary()


class Endpoint:
    """The server of one event loop. It answers only requests with the key of an episode that runs."""

    url = ""

    def __init__(self) -> None:
        self.episodes: dict[str, tuple[str, Chat]] = {}  # key and episode, by the key's public part
        self.handlers: dict[str, set[asyncio.Task]] = {}
        self.numbers = itertools.count()

    @staticmethod
    async def of_this_loop() -> "Endpoint":
        """Starts it at the first call."""
        loop = asyncio.get_running_loop()
        if loop not in _of_loop:
            _of_loop[loop] = loop.create_task(Endpoint()._start())
        return await asyncio.shield(_of_loop[loop])

    async def _start(self) -> "Endpoint":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # a client that leaves ends its request; what strangers send that is no HTTP is in no log
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, logger=NO_LOG)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG)
        await site.start()
        host, port = runner.addresses[0]
        self.url = f"http://{host}:{port}/v1"
        return self

    def open(self, chat: Chat) -> str:
        """A key. `chat` answers the requests that have it."""
        name = f"sk-episode-{next(self.numbers)}"  # lib/cli/secrets.py redacts keys of this form
        key = f"{name}-{secrets.token_hex(32)}"
        self.episodes[name], self.handlers[name] = (key, chat), set()
        return key

    async def close(self, key: str) -> None:
        """Ends the requests with this key, and refuses it from now on."""
        name = key.rpartition("-")[0]
        del self.episodes[name]
        handlers = self.handlers.pop(name)
        for handler in handlers:
            handler.cancel()
        if handlers:
            await asyncio.wait(handlers)

    def _named(self, request: web.Request) -> tuple[str, Chat]:
        """Raises BadRequest unless the request has the key of an episode."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        name = key.rpartition("-")[0]
        own, chat = self.episodes.get(name, ("", None))
        if chat is None or not hmac.compare_digest(own.encode(), key.encode("utf-8", "replace")):
            raise BadRequest("no episode that runs has this API key", code="invalid_api_key", status=401)
        return name, chat

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            name, chat = self._named(request)
        except BadRequest as error:
            return _refusal(request, error)
        task = asyncio.current_task()
        assert task is not None
        self.handlers[name].add(task)
        try:
            return await _answer(request, chat)
        except BadRequest as error:
            return _refusal(request, error)
        except ConnectionError:  # the client left while it got its answer
            raise
        except Exception as error:  # noqa: BLE001 an agent must not end the run, or wait for an answer
            show_once("a request of an agent", error)
            return _refusal(request, BadRequest(say(error), status=500))
        finally:
            if name in self.handlers:
                self.handlers[name].discard(task)


async def _answer(request: web.Request, chat: Chat) -> web.StreamResponse:
    """Raises BadRequest."""
    path = request.path.rstrip("/")
    if (request.method, path) == ("GET", "/v1/models"):
        return web.json_response(openai_api.models())
    if request.method == "POST" and path in APIS:
        reply = await chat(APIS[path], *await _body(request))
        return web.json_response(reply) if isinstance(reply, dict) else await _stream(request, reply)
    if path in NOT_SUPPORTED:
        raise BadRequest(f"{path} is not supported: use {', '.join(APIS)}", status=501)
    raise BadRequest(f"there is no {request.method} {request.path[:100]}", status=404)


async def _body(request: web.Request) -> tuple[Any, int]:
    """(the JSON, its bytes). Raises BadRequest."""
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
        return json.loads(body), len(body)
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be decoded: {say(error)}") from None
    except web.HTTPRequestEntityTooLarge:
        raise BadRequest(f"the body has more than {LARGEST_BODY} bytes", status=413) from None
    except TimeoutError:
        raise BadRequest(f"the body did not arrive within {BODY_S:g} s", status=408) from None
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON") from None


async def _stream(request: web.Request, events: Iterator[dict]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    kind = None  # the events of chat completions have none
    for event in events:
        kind = event.get("type")
        name = f"event: {kind}\n" if kind else ""
        await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    if kind is None:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _refusal(request: web.Request, error: BadRequest) -> web.Response:
    api: Api = anthropic_api if request.path.startswith("/v1/messages") else openai_api
    return web.json_response(api.refusal(error), status=error.status)
