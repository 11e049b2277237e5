"""OpenAI's completions: what a request may ask, and how an answer is written."""

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from agent.http.openai_api import IGNORED, refusal, sampling_options, usage
from agent.http.requests import LARGEST_N, MODEL, BadRequest, Choice, Options, Parameters, Rules

__all__ = ["ID", "chunks", "completion", "read_request", "refusal"]
ID = "cmpl-"
READ = {"prompt", "n", "stop", "seed", "max_tokens", "stream", "temperature", "top_p", "return_token_ids"}
FIXED: dict[str, tuple] = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "logprobs": (0,)}
FIXED |= {"best_of": (1,), "echo": (False,), "suffix": ("",)}


def read_request(body: Any, rules: Rules) -> tuple[list[dict], list[dict], Options]:
    """As agent/http/openai_api.py's, with options.prompts in place of messages. Raises BadRequest."""
    given = Parameters(body, READ, IGNORED, FIXED, rules)
    options = Options(
        max_tokens=given.max_tokens(),
        logprobs="logprobs" in given,
        prompts=read_prompts(given.get("prompt")),
        token_ids=given.switch("return_token_ids"),
        **sampling_options(given),
    )
    if len(options.prompts) * options.n > LARGEST_N:
        raise BadRequest(f"n: at most {LARGEST_N} answers to all prompts together", "n")
    return [], [], options


def read_prompts(prompt: Any) -> tuple[str | list[int], ...]:
    """Texts, or lists of token ids. Raises BadRequest."""
    prompts = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not prompts or not (all(isinstance(own, str) and own for own in prompts) or all(map(_is_ids, prompts))):
        raise BadRequest("prompt: give a text, a list of texts, token ids, or a list of these; none empty", "prompt")
    return tuple(prompts)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(token) is int for token in value)


def _choice(i: int, choice: Choice, options: Options) -> dict:
    log_probs = None
    if options.logprobs:
        tokens = choice.tokens
        offsets = [*accumulate(map(len, tokens), initial=0)][:-1]
        log_probs = {"tokens": tokens, "token_logprobs": choice.sampled.log_probs, "text_offset": offsets}
        log_probs["top_logprobs"] = None
    ids = {"token_ids": choice.sampled.token_ids, "prompt_token_ids": choice.context} if options.token_ids else {}
    text, reason = choice.message["content"], choice.finish_reason
    return {"index": i, "text": text, "logprobs": log_probs, "finish_reason": reason} | ids


def completion(name: str, choices: list[Choice], options: Options) -> dict:
    """The answer to a request that does not stream: n choices for the first prompt, then those for the next."""
    head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": MODEL}
    answers = [_choice(i, choice, options) for i, choice in enumerate(choices)]
    return head | {"choices": answers, "usage": usage(choices, options.n)}


def chunks(name: str, choices: list[Choice], options: Options) -> Iterator[dict]:
    """The same as events of a stream: each choice in one."""
    whole = completion(name, choices, options)
    usage = {"usage": whole.pop("usage")}
    for choice in whole["choices"]:
        yield whole | {"choices": [choice]}
    if options.stream_usage:
        yield whole | {"choices": []} | usage
