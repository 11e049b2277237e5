"""Requests in batches: a route for vLLM's API server (--middleware servers.batches.Batches),
whose own routes take a millisecond of CPU for each request.

POST PATH with {"begin": [{"id", "prompt_token_ids", "settings"}, ...], "abort": [earlier ids]};
settings by the names of SamplingParams. As soon as a request ends there is a line of JSON: [its id,
the fields of Generated, or {"error": why}]. A closed connection aborts its requests. With
VLLM_API_KEY in the server's environment every route needs the key, also those that vLLM leaves open:
they pause the server and load weights."""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from vllm.utils.serial_utils import numpy2base64

from lib.rollout.vllm_engine import generated, request_params
from servers.client import PATH


class Batches:
    """ASGI middleware, since vLLM takes no further routes."""

    def __init__(self, app):
        self.app, self.key = app, os.environ.get("VLLM_API_KEY")

    async def __call__(self, scope, receive, send):
        answer = self.app
        if scope["type"] != "lifespan" and not self._may(scope):
            answer = JSONResponse({"error": "Unauthorized"}, 401)
        elif scope["type"] == "http" and scope["path"] == PATH:
            order, engine = await Request(scope, receive).json(), scope["app"].state.engine_client
            await engine.abort(order["abort"])
            answer = StreamingResponse(_answers(engine, order["begin"]))
        await answer(scope, receive, send)

    def _may(self, scope) -> bool:
        given = Headers(scope=scope).get("Authorization", "")
        return not self.key or secrets.compare_digest(given.encode(), f"Bearer {self.key}".encode())


async def _answers(engine: Any, requests: list[dict]) -> AsyncIterator[bytes]:
    running = [asyncio.create_task(_sample(engine, request)) for request in requests]
    try:
        for ended in asyncio.as_completed(running):
            yield json.dumps(await ended).encode() + b"\n"
    finally:
        for task in running:
            task.cancel()


async def _sample(engine: Any, request: dict) -> tuple[str, dict]:
    prompt = {"type": "token", "prompt_token_ids": request["prompt_token_ids"]}
    try:
        outputs = engine.generate(prompt, request_params(**request["settings"]), request["id"])
        output = [output async for output in outputs][-1]
        routes = output.outputs[0].routed_experts
        answer = vars(generated(output)) | {"routed_experts": None if routes is None else numpy2base64(routes)}
    except Exception as error:  # noqa: BLE001  the trainer is told, and asks for the server's health
        answer = {"error": f"{type(error).__name__}: {error}"}
    return request["id"], answer
