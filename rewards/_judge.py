"""Requests to an LLM that judges: OpenAI- and Anthropic-compatible endpoints, retries, and a cache on disk.

The other side may hang, fail or send anything. So a request has a deadline, an answer a largest size, a redirect is an
error (it would send prompts elsewhere), and no error's text holds the key.
"""

import asyncio
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from lib import InputError
from lib.cli.secrets import redact

PATHS = {"openai": "chat/completions", "anthropic": "messages"}  # by api
KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}  # variables that hold the key
USAGE = {"openai": ("prompt_tokens", "completion_tokens"), "anthropic": ("input_tokens", "output_tokens")}
BUSY = {408, 409, 429}  # asked again, as is 5xx
LARGEST_ANSWER = 2**22  # bytes
SHORTEST_PAUSE_S = 0.05  # doubled with each request, also if the server names a shorter one
LONGEST_PAUSE_S = 8.0  # between two requests, unless the server names another


class Answer(NamedTuple):
    value: Any  # what the prompt's function made of the text
    seconds: float = 0.0  # from the first request to the answer
    requests: int = 0  # with those that failed
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False


class Cache:
    """Texts in files of one folder, for any number of processes: a file is replaced as a whole, and one that is damaged
    or gone is asked for again. In each of 256 subfolders the oldest files beyond entries / 256 are deleted."""

    def __init__(self, folder: str, entries: int):
        self.folder, self.per_shard = Path(folder).expanduser(), max(1, entries // 256)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"rewards/judge.py: cache {folder}: {error.strerror}; name a folder") from None

    def get(self, key: str) -> str | None:
        with suppress(OSError, ValueError):
            return (self.folder / key[:2] / key).read_text()
        return None

    def put(self, key: str, text: str) -> None:
        shard = self.folder / key[:2]
        with suppress(OSError, UnicodeError):  # a full disk, or half of a character, costs requests, not scores
            shard.mkdir(exist_ok=True)
            part = shard / f"{key}.{os.getpid()}"
            part.write_text(text)
            part.replace(shard / key)
            files = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(shard)]
            for _, path in sorted(files)[: -self.per_shard]:
                Path(path).unlink(missing_ok=True)


async def ask(
    prompts: Mapping[str, Callable[[str], Any]],
    base_url: str,
    model: str,
    responses: int = 1,
    *,
    api="openai",
    api_key_env=None,
    time_limit_s=30.0,
    max_tokens=1024,
    temperature=0.0,
    concurrency=16,
    cache=None,
    cache_entries=100_000,
    **kwargs,
) -> dict[str, Answer | Exception]:
    """By prompt, what its function makes of the judge's reply, or what went wrong: TimeoutError (no reply in time),
    RuntimeError (the server refuses), ValueError (its answer or the reply has not the form).

    responses: that are scored by the prompts. concurrency: requests at once. The pool gives time_limit_s for each, and
    a request gets 0.8 of it, or less where requests take turns. cache: a folder that keeps replies with the form.
    Raises InputError for an unknown api, a base_url that is no URL, and a variable without a usable key.
    """
    if api not in PATHS:
        raise InputError(f"rewards/judge.py: api {api!r}: must be one of {', '.join(PATHS)}")
    if not (isinstance(concurrency, int) and concurrency > 0):
        raise InputError(f"rewards/judge.py: concurrency {concurrency!r}: must be a number above 0")
    if not str(base_url).startswith(("http://", "https://")):
        raise InputError(f"rewards/judge.py: base_url {base_url!r}: must begin with http:// or https://")
    if api_key_env and api_key_env not in os.environ:
        raise InputError(f"rewards/judge.py: api_key_env {api_key_env}: there is no such variable in the environment")
    variable = api_key_env or KEYS[api]
    key = os.environ.get(variable, "none").strip()  # a local server needs no key
    if not (key.isascii() and key.isprintable()):  # httpx would repeat it in its error
        raise InputError(f"rewards/judge.py: the key in {variable} has characters that no header can hold")
    headers = {"Authorization": f"Bearer {key}"} if api == "openai" else {"x-api-key": key}
    headers |= {"anthropic-version": "2023-06-01"} if api == "anthropic" else {}
    settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    kept = Cache(cache, cache_entries) if cache else None
    rounds = math.ceil(len(prompts) / concurrency)
    limit_s = 0.8 * time_limit_s * min(1.0, responses / max(rounds, 1))
    url, turns = f"{base_url.rstrip('/')}/{PATHS[api]}", asyncio.Semaphore(concurrency)

    async def one(client: httpx.AsyncClient, prompt: str) -> Answer:
        name = hashlib.sha256(json.dumps([url, settings, prompt]).encode()).hexdigest()
        if kept and (text := kept.get(name)) is not None:
            with suppress(ValueError):
                return Answer(prompts[prompt](text), cached=True)
        body = settings | {"messages": [{"role": "user", "content": prompt}]}
        async with turns:
            start, sent = time.monotonic(), count(1)
            try:
                async with asyncio.timeout(limit_s):
                    number, answer = await _send(client, url, body, sent, start + limit_s)
            except TimeoutError as error:
                why = f"{model} at {base_url} gave no reply in {limit_s:g} s"
                raise TimeoutError(f"rewards/judge.py: {why}{f': {error}' if str(error) else ''}") from None
        seconds = time.monotonic() - start
        text, *tokens = _read(api, answer)
        value = prompts[prompt](text)
        if kept:
            kept.put(name, text)
        return Answer(value, seconds, number, tokens[0], tokens[1])

    async def one_without_key(client: httpx.AsyncClient, prompt: str) -> Answer | Exception:
        try:
            return await one(client, prompt)
        except (TimeoutError, RuntimeError, ValueError, httpx.HTTPError) as error:
            known = (TimeoutError, RuntimeError, ValueError)
            kind = next((kind for kind in known if isinstance(error, kind)), RuntimeError)
            return kind(redact(str(error)).replace(key, "***") if key != "none" else redact(str(error)))

    headers |= {"Accept-Encoding": "identity"}  # a small answer cannot unpack to a large one
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(headers=headers, timeout=limit_s, limits=limits, follow_redirects=False) as client:
        found = await asyncio.gather(*(one_without_key(client, prompt) for prompt in prompts))
    return dict(zip(prompts, found))


async def _send(client: httpx.AsyncClient, url: str, body: dict, sent: count, deadline: float) -> tuple[int, bytes]:
    """(number of requests, the answer), after any number of attempts while the server is busy. Raises TimeoutError if
    the server wants a pause beyond the deadline, RuntimeError if it refuses."""
    for number in sent:
        try:
            status, headers, answer = await _post(client, url, body)
        except httpx.TransportError as error:
            status, headers, answer = 503, httpx.Headers(), f"{type(error).__name__}: {error}".encode()
        said = f"{status} {answer[:200].decode(errors='replace')!r}"
        if status == 200:
            return number, answer
        if 300 <= status < 400:
            where = headers.get("location", "")[:200]
            raise RuntimeError(f"rewards/judge.py: {url} redirects to {where!r}: give that address as base_url")
        if status < 500 and status not in BUSY:
            raise RuntimeError(f"rewards/judge.py: {url} refuses: {said}")
        asked = retry_after(headers)
        first = 0.5 if asked is None else SHORTEST_PAUSE_S
        pause = min(LONGEST_PAUSE_S, first * 2 ** min(number - 1, 10)) * random.uniform(0.5, 1)
        pause = max(pause, asked or 0.0)
        if time.monotonic() + pause > deadline:
            raise TimeoutError(f"the last answer was {said}")
        await asyncio.sleep(pause)
    raise AssertionError("count() has no end")


def retry_after(headers) -> float | None:
    """Seconds that a busy server asks to wait; None if it names no number of them."""
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        with suppress(ValueError, KeyError):
            if 0 <= (seconds := float(headers[name]) / unit) < math.inf:
                return seconds
    return None


async def _post(client: httpx.AsyncClient, url: str, body: dict) -> tuple[int, httpx.Headers, bytes]:
    async with client.stream("POST", url, json=body) as response:
        answer = bytearray()
        async for part in response.aiter_raw():
            answer += part
            if len(answer) > LARGEST_ANSWER:
                raise ValueError(f"the judge's answer is longer than {LARGEST_ANSWER} bytes")
        return response.status_code, response.headers, bytes(answer)


def _read(api: str, answer: bytes) -> tuple[str, int, int]:
    """(text, prompt tokens, completion tokens); 0 tokens where the server counts none."""
    try:
        said = json.loads(answer)
        if api == "openai":
            text = said["choices"][0]["message"]["content"] or ""
        else:
            text = "".join(part["text"] for part in said["content"] if part["type"] == "text")
        usage = said.get("usage") or {}
        tokens = [usage.get(name) for name in USAGE[api]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f"the judge's answer is not that of an {api} endpoint: {answer[:200]!r}")
    counted = [number if isinstance(number, int) and 0 <= number < 10**9 else 0 for number in tokens]
    return text, counted[0], counted[1]
