"""Part `attention`: the speed of a forward and backward with each attention, and of cuDNN's SDPA over new shapes.

Ratios are of one run: the attentions take turns on the same model and rows. That they compute the same is part
`numerics`.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, MistralConfig, PreTrainedModel

from benchmarks.gpu_check.common import backward, random_batch, random_model, shape, sharded
from benchmarks.gpu_check.measure import seconds_of, timed
from benchmarks.gpu_check.rows import Options, attempt, claim, row, skipped
from lib.data_proto import DataProto


def check(options: Options, device: torch.device) -> Iterator[dict]:
    yield from attempt("speed of attentions", lambda: speeds(options, device))
    yield from attempt("windows", lambda: windows(options, device))
    yield from attempt("cuDNN's SDPA", lambda: cudnn(options, device))


def rows_of(tokens: int, kind: str, vocabulary: int, device: torch.device) -> DataProto:
    """About `tokens` tokens in groups of 8 that share a prompt: many responses of about 32, or few of about 1000."""
    mean, prompt = (32, 128) if kind == "many short responses" else (1000, 512)
    if tokens < 1000:
        mean, prompt = mean // 8, 8
    count, rng = max(1, tokens // (8 * mean + prompt)) * 8, np.random.default_rng(1)
    lengths = rng.lognormal(np.log(mean), 0.5, count).clip(1, 4 * mean).astype(int).tolist()
    prompts = rng.integers(prompt // 2, prompt * 3 // 2, count).tolist()  # rows of one prompt length would merge
    return random_batch(prompts, lengths, vocabulary, device, groups=8)


def take_turns(model: PreTrainedModel, batch: DataProto, names: list[str], repeats: int) -> dict[str, float]:
    """Seconds of a forward and backward with each attention, the least of `repeats`."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats + 1):  # the first is not counted
        for name in names:
            model.config._attn_implementation = name  # set_attn_implementation does not know FSDP's classes
            seconds[name].append(timed(lambda: backward(model, batch)))
            model.zero_grad()
    return {name: min(s[1:]) for name, s in seconds.items()}


def speeds(options: Options, device: torch.device) -> Iterator[dict]:
    names = ["packed_sdpa", *(["varlen"] if device.type == "cuda" else [])]
    tokens, repeats = (256, 1) if options.tiny else (16384, 3)
    model = sharded(random_model(shape(options, "qwen2.5-1.5b"), device, gradient_checkpointing=not options.tiny))
    for kind in ("many short responses", "few long responses"):
        batch = rows_of(tokens, kind, model.config.vocab_size, device)
        seconds = take_turns(model, batch, names, repeats)
        computed = int(batch.batch["response_mask"].sum())
        for name, s in seconds.items():
            yield row(f"{kind}: {name}", 1e3 * s, "ms", rows=len(batch), response_tokens=computed)
        if "varlen" not in seconds:
            yield skipped(f"{kind}: varlen", "FlashAttention needs a GPU")
            continue
        ratio = seconds["packed_sdpa"] / seconds["varlen"]
        said = f"packed_sdpa takes {ratio:.2f} times as long as varlen, {kind}, 1.5B"
        yield row(f"{kind}: packed_sdpa / varlen", ratio, "", None, claim(device, "G9", ratio > 1.1, said))


def windows(options: Options, device: torch.device) -> Iterator[dict]:
    """A model with grouped heads, with and without windows (G6)."""
    sizes = {"vocab_size": 104, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    if not options.tiny:
        sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8}
    heads = sizes["hidden_size"] // 64 if not options.tiny else 2
    tokens, window, repeats = (256, 8, 1) if options.tiny else (8192, 256, 3)
    seconds = {}
    for kind, size in {"without windows": None, "with windows": window}.items():
        config = MistralConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads // 2, sliding_window=size)
        model = sharded(random_model(config, device))
        names = ["packed_sdpa", *(["varlen"] if device.type == "cuda" else [])]
        batch = rows_of(tokens, "few long responses", config.vocab_size, device)
        for name, s in take_turns(model, batch, names, repeats).items():
            seconds[kind, name] = s
            yield row(f"{kind}: {name}", 1e3 * s, "ms")
    ratio = seconds["with windows", "packed_sdpa"] / seconds["without windows", "packed_sdpa"]
    said = f"with windows packed_sdpa takes {ratio:.2f} times as long"
    yield row("packed_sdpa, with / without windows", ratio, "", None, claim(device, "G6", ratio > 1.3, said))


def cudnn(options: Options, device: torch.device) -> Iterator[dict]:
    """Forward and backward of SDPA over shapes that are new to it, as nearly every run of a packed row is, with
    cuDNN's SDPA off, as in training, and on, as torch has it (G8)."""
    if device.type == "cpu":
        yield skipped("cuDNN's SDPA over new shapes", "needs a GPU")
        return
    config = AutoConfig.from_pretrained(shape(options, "qwen2.5-1.5b"))
    heads, lengths = config.num_attention_heads, range(200, 328, 2)
    ratios, was_on = {}, torch.backends.cuda.cudnn_sdp_enabled()

    def attend(length: int, kv_heads: int) -> None:
        q, k, v = (
            torch.randn(4, h, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
            for h in (heads, kv_heads, kv_heads)
        )
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads).sum().backward()

    try:
        for kind, kv_heads in {"": heads, ", grouped heads": config.num_key_value_heads}.items():
            seconds = {}
            for on in (False, True):
                torch.backends.cuda.enable_cudnn_sdp(on)
                attend(199, kv_heads)
                seconds[on] = timed(lambda: [attend(n, kv_heads) for n in lengths]) / len(lengths)  # noqa: B023
                again = seconds_of(lambda: attend(200, kv_heads), 10)  # noqa: B023
                label = f"SDPA{kind}, a new shape, cuDNN {'on' if on else 'off'}"
                yield row(label, 1e3 * seconds[on], "ms", again_ms=1e3 * again)
            ratios[kind] = seconds[True] / seconds[False]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
    most = max(ratios.values())
    said = f"cuDNN takes {most:.1f} times as long over {len(lengths)} new shapes"
    yield row("SDPA over new shapes, cuDNN on / off", most, "", None, claim(device, "G8", most > 1.5, said), of=ratios)
