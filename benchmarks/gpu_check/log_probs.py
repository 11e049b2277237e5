"""Part `log_probs`: LinearLogProbs by its chunk of tokens, and liger-kernel's fused loss beside it."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from transformers import AutoConfig

from benchmarks.gpu_check.common import Options, attempt, claim, peak_bytes, peak_flops, row, seconds_of, shape, skipped
from lib.model import LinearLogProbs
from lib.model.log_probs import GPU_CHUNK

PARAMETERS = {"qwen2.5-0.5b": 0.49e9, "qwen2.5-7b": 7.6e9}
CHUNKS = (256, 1024, 2048, 4096)


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
            ours = partial(run, LinearLogProbs.apply, h, weight, y, chunk, entropy)
            label = f"chunks of {chunk}{', with the gradient of the entropy' * entropy}"
            seconds[chunk, entropy], r = measured(label, ours)
            yield r
    ratio = seconds[256, False] / seconds[GPU_CHUNK, False]
    said = f"chunks of 256 take {ratio:.2f} times as long as those of {GPU_CHUNK}, {name}"
    yield row(f"{name}: chunks of 256 / {GPU_CHUNK}", ratio, "", None, claim(device, "G10", ratio > 1.2, said))
    ratio = seconds[GPU_CHUNK, True] / seconds[GPU_CHUNK, False]
    yield row(f"{name}: with / without the entropy's gradient", ratio, "")

    for who, r in exactness(options, device, config.hidden_size, config.vocab_size).items():
        for quantity, x in r.items():
            ok = x < 0.05 if who == "ours" else None
            yield row(f"{name}: {who}, {quantity}, against fp32", x, "", ok)
    if not find_spec("liger_kernel"):
        yield skipped(f"{name}: liger-kernel", "it is not installed")
    elif device.type == "cpu":
        yield skipped(f"{name}: liger-kernel", "its kernels need a GPU")
    else:
        once, r = measured("liger-kernel's fused cross entropy", lambda: (-liger(h, weight, y).sum()).backward())
        yield r | {"ours_ms": 1e3 * seconds[GPU_CHUNK, False], "ours_over_liger": seconds[GPU_CHUNK, False] / once}


def inputs(tokens: int, width: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Hidden states of norm sqrt(width) and a head of std 0.02, as at the start of training."""
    torch.manual_seed(0)
    h = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).to(torch.bfloat16).requires_grad_()
    return h, weight, torch.randint(0, vocabulary, (tokens,), device=device)


def run(apply: Callable, h: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, chunk: int, entropy: bool) -> None:
    log_probs, entropies = apply(h, weight, y, 1.0, chunk)
    (log_probs.sum() + 0.1 * entropies.sum() if entropy else log_probs.sum()).backward()


def liger(h: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Log-probs of y (N,): a loss that is not reduced is -log p of each token. It has no temperature, no entropy."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    try:
        loss = LigerFusedLinearCrossEntropyLoss(reduction="none", accum_dtype=torch.float32)
    except TypeError:  # before its 0.6 it adds up the head's gradient in the head's dtype
        loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return -loss(weight, h, y)


def exactness(options: Options, device: torch.device, width: int, vocabulary: int) -> dict[str, dict[str, float]]:
    """Errors of log-probs (mean, nats) and gradients (relative), of bf16 inputs, against full logits in fp32. Each
    token has a weight of its own, as its advantage: a fused loss that scales a summed gradient would show."""
    tokens = 64 if options.tiny else 512
    h, weight, y = inputs(tokens, width, vocabulary, device)
    factor = torch.linspace(-1, 1, tokens, device=device)

    def results(log_probs: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
        return [log_probs.detach(), *torch.autograd.grad((log_probs.float() * factor).sum(), leaves)]

    fp32 = [x.detach().float().requires_grad_() for x in (h, weight)]
    exact = results((fp32[0] @ fp32[1].T).log_softmax(-1).gather(-1, y[:, None])[:, 0], *fp32)
    sides = {"ours": lambda: results(LinearLogProbs.apply(h, weight, y, 1.0, GPU_CHUNK)[0], h, weight)}
    if find_spec("liger_kernel") and device.type == "cuda":
        sides["liger-kernel"] = lambda: results(liger(h, weight, y), h, weight)
    errors = {}
    for who, side in sides.items():
        log_probs, *gradients = (x.float() for x in side())
        errors[who] = {"log-probs, mean error in nats": (log_probs - exact[0]).abs().mean().item()}
        for what, a, b in zip(("hidden states", "head"), gradients, exact[1:]):
            errors[who][f"gradient of the {what}, relative"] = ((a - b).norm() / b.norm()).item()
    return errors
