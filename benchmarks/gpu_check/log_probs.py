"""Part `log_probs`: LinearLogProbs by its chunk of tokens; uncompiled, compiled and liger-kernel's fused loss compared.

On a CPU, too, it compiles here, to show that it works: training does not.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import torch
from transformers import AutoConfig

from benchmarks.gpu_check.common import shape
from benchmarks.gpu_check.measure import peak_bytes, peak_flops, seconds_of
from benchmarks.gpu_check.rows import Options, attempt, claim, row, skipped
from lib.model import LinearLogProbs, log_probs
from lib.model.log_probs import GPU_CHUNK

PARAMETERS = {"qwen2.5-0.5b": 0.49e9, "qwen2.5-7b": 7.6e9}
CHUNKS = (256, 1024, 2048, 4096)
SIDES = {"uncompiled": {}, "compiled": log_probs.COMPILE["cuda"]}


def check(options: Options, device: torch.device) -> Iterator[dict]:
    for name in PARAMETERS:
        yield from attempt(f"head of {name}", partial(head, options, device, name))


def head(options: Options, device: torch.device, name: str) -> Iterator[dict]:
    config = AutoConfig.from_pretrained(shape(options, name))
    tokens, repeats = (64, 1) if options.tiny else (16384, 2)
    h, weight, y = inputs(tokens, config.hidden_size, config.vocab_size, device)
    # of one micro-batch's update, were it at 40 % of the GPU's peak
    update_s = 6 * PARAMETERS[name] * tokens / (0.4 * peak) if (peak := peak_flops(device)) else None
    seconds: dict[tuple[int, bool], float] = {}

    def measured(label: str, fn: Callable[[], object]) -> tuple[float, dict]:
        once = seconds_of(fn, repeats)
        h.grad = weight.grad = None
        share = {"share_of_update_at_40_percent_mfu": once / update_s} if update_s else {}
        if device.type == "cuda":
            share["peak_bytes"] = peak_bytes(fn, device)
        return once, row(f"{name}: {label}", 1e3 * once, "ms", **share)

    for entropy in (False, True):
        for chunk in CHUNKS:
            label = f"chunks of {chunk}{', with the gradient of the entropy' * entropy}"
            seconds[chunk, entropy], r = measured(label, partial(run, h, weight, y, chunk, entropy))
            yield r
    ratio = seconds[256, False] / seconds[GPU_CHUNK, False]
    said = f"chunks of 256 take {ratio:.2f} times as long as those of {GPU_CHUNK}, {name}"
    yield row(f"{name}: chunks of 256 / {GPU_CHUNK}", ratio, "", None, claim(device, "G10", ratio > 1.2, said))
    ratio = seconds[GPU_CHUNK, True] / seconds[GPU_CHUNK, False]
    yield row(f"{name}: with / without the entropy's gradient", ratio, "")

    once: dict[str, float] = {}
    results: dict[str, list[torch.Tensor]] = {}
    few = inputs(64 if options.tiny else 512, config.hidden_size, config.vocab_size, device)
    fp32 = [x.detach().float().requires_grad_() for x in few[:2]]
    exact = step(lambda h, w, y: (h @ w.T).log_softmax(-1).gather(-1, y[:, None])[:, 0], {}, *fp32, few[2])

    def measure(who: str, side: Callable) -> Iterator[dict]:
        once[who], r = measured(f"{who}, forward and backward", partial(side, h, weight, y))
        yield r
        yield row(f"{name}: {who}, memory", peak_bytes(partial(side, h, weight, y), device) / 2**20, "MiB")
        results[who] = side(*few)
        for quantity, x in errors(results[who], exact).items():
            ok = x < 0.05 if who in SIDES and "largest" not in quantity else None
            yield row(f"{name}: {who}, {quantity}, against fp32", x, "", ok)

    for who, compile in SIDES.items():
        side = partial(step, ours, compile and {device.type: compile})
        yield from attempt(f"{name}: {who}", partial(measure, who, side))
    if len(results) == 2:
        ratio = once["uncompiled"] / once["compiled"]
        said = f"uncompiled takes {ratio:.2f} times as long as compiled, {name}"
        yield row(f"{name}: uncompiled / compiled", ratio, "", None, claim(device, "G10", ratio > 1.05, said))
        # both take the same bf16 logits and compute in fp32, so only a gradient that is rounded to bf16 may come out
        # as its neighbour, 2^-8 away
        for quantity, x in errors(results["compiled"], results["uncompiled"]).items():
            ok = x < (1e-4 if "log-probs" in quantity else 2**-8)
            yield row(f"{name}: compiled, {quantity}, against uncompiled", x, "", ok)
    if not find_spec("liger_kernel"):
        yield skipped(f"{name}: liger-kernel", "it is not installed")
    elif device.type == "cpu":
        yield skipped(f"{name}: liger-kernel", "its kernels need a GPU")
    else:
        yield from attempt(f"{name}: liger-kernel", partial(measure, "liger-kernel", partial(step, liger, {})))
        if {"compiled", "liger-kernel"} <= once.keys():
            yield row(f"{name}: compiled / liger-kernel", once["compiled"] / once["liger-kernel"], "")


def inputs(tokens: int, width: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Hidden states of norm sqrt(width) and a head of std 0.02, as at the start of training."""
    torch.manual_seed(0)
    h = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).to(torch.bfloat16).requires_grad_()
    return h, weight, torch.randint(0, vocabulary, (tokens,), device=device)


def run(h: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, chunk: int, entropy: bool) -> None:
    chosen, entropies = LinearLogProbs.apply(h, weight, y, 1.0, chunk)
    (chosen.sum() + 0.1 * entropies.sum() if entropy else chosen.sum()).backward()


def step(
    log_probs_of: Callable, compile: dict, h: torch.Tensor, weight: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    """Log-probs of y (N,) and the gradients of h and weight. Each token has a weight of its own, as its advantage: a
    fused loss that scaled a summed gradient would show. compile is log_probs.COMPILE; RuntimeError if it fails."""
    with patch.object(log_probs, "COMPILE", left := dict(compile)):
        result = log_probs_of(h, weight, y)
        factor = torch.linspace(-1, 1, len(y), device=y.device)
        gradients = torch.autograd.grad((result.float() * factor).sum(), (h, weight))
    if left != compile:
        raise RuntimeError("torch.compile failed; the line above says why")
    return [result.detach(), *gradients]


def ours(h: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return LinearLogProbs.apply(h, weight, y, 1.0, GPU_CHUNK)[0]


def liger(h: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Log-probs of y (N,): a loss that is not reduced is -log p of each token. It has no temperature, no entropy."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    try:
        loss = LigerFusedLinearCrossEntropyLoss(reduction="none", accum_dtype=torch.float32)
    except TypeError:  # before its 0.6 it adds up the head's gradient in the head's dtype
        loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return -loss(weight, h, y)


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    """Of log-probs in nats, of gradients over their norm."""
    difference, *gradients = (a.float() - b.float() for a, b in zip(found, exact))
    said = {"log-probs, largest": difference.abs().max().item(), "log-probs, mean": difference.abs().mean().item()}
    for what, a, b in zip(("hidden states", "head"), gradients, exact[1:]):
        said[f"gradient of the {what}"] = (a.norm() / b.float().norm()).item()
    return said
