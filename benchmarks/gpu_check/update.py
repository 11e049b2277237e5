"""Part `update`: model FLOPs utilisation, host syncs of a micro-batch, GAE, and the steps of hf rollouts."""

import warnings
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from benchmarks.gpu_check.common import (
    TOY_MODEL,
    backward,
    equal_rows,
    random_batch,
    random_model,
    shape,
    sharded,
    the_world,
)
from benchmarks.gpu_check.measure import peak_flops, seconds_of, timed
from benchmarks.gpu_check.rows import Options, attempt, claim, row
from lib.core_algos import compute_gae_advantage_return
from lib.distributed import trainable_parameters
from lib.model import ForwardConfig, Policy, load_tokenizer
from lib.rollout import HFEngine, Sampling
from planner.memory import shard_numel


def check(options: Options, device: torch.device) -> Iterator[dict]:
    for name, checkpointing in (("qwen2.5-0.5b", False), ("qwen2.5-1.5b", True), ("qwen2.5-3b", True)):
        if not (options.tiny and checkpointing):
            yield from attempt(f"update of {name}", partial(one_model, options, device, name, checkpointing))
    yield from attempt("host syncs", lambda: host_syncs(options, device))
    yield from attempt("GAE", lambda: gae(options, device))


# ---- model FLOPs utilisation ---------------------------------------------------------------------


def update_flops(model: PreTrainedModel, numel: int, lengths: list[int]) -> float:
    """6 per weight and token (the embedding does no arithmetic, the head does), and of attention 6 per pair of
    tokens that see each other and unit of width, for scores and for values each. Recomputation is not counted."""
    config = model.config
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    width = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads) * config.num_attention_heads
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return 6 * (numel - embedding) * sum(lengths) + 12 * config.num_hidden_layers * width * pairs


def one_model(options: Options, device: torch.device, name: str, checkpointing: bool) -> Iterator[dict]:
    """Forward, backward and AdamW of 16 rows of 1024 tokens, with each attention; hf rollouts of the same model."""
    tokens, count, repeats = (256, 4, 1) if options.tiny else (16384, 16, 5)
    model = random_model(shape(options, name), device, checkpointing)
    numel = shard_numel(list(model.parameters()), 1)
    model = sharded(model)
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-6, fused=True)
    batch = equal_rows(tokens, count, model, device)

    def update() -> None:
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    for attention in ("packed_sdpa", *(["varlen"] if device.type == "cuda" else [])):
        model.config._attn_implementation = attention
        label = f"{name}{', checkpointing' * checkpointing}, {attention}"
        seconds = seconds_of(update, repeats)
        flops = update_flops(model, numel, [tokens // count] * count) / seconds
        peak = peak_flops(device)
        said = f"{label}: {tokens / seconds:,.0f} tokens/s{f', MFU {flops / peak:.2f}' if peak else ''}"
        summary = {"update": said}
        yield row(f"{label}: update", tokens / seconds, "tokens/s", tokens=tokens, seconds=seconds, summary=summary)
        yield row(f"{label}: update", flops / 1e12, "TFLOP/s")
        if peak:
            yield row(f"{label}: MFU of the update", flops / peak, "", peak_flops=peak)
    model.config._attn_implementation = "packed_sdpa"
    if name != "qwen2.5-3b":
        del optimizer
        yield from rollout_speed(options, model, name, device)


def rollout_speed(options: Options, model: PreTrainedModel, name: str, device: torch.device) -> Iterator[dict]:
    count, T = (4, 4) if options.tiny else (256, 64)
    prompts = random_batch([32] * count, [1] * count, model.config.vocab_size, device)
    for key in ("input_ids", "attention_mask", "position_ids"):
        prompts.batch[key] = prompts.batch[key][:, :32]
    prompts.non_tensor_batch["raw_prompt_ids"] = np.array([ids.tolist() for ids in prompts.batch["input_ids"]], object)
    engine = HFEngine(model, load_tokenizer(TOY_MODEL))
    engine.stop_ids = torch.tensor([-1])  # no row ends early
    engine.generate(prompts, Sampling(2), list(range(count)))
    seconds = timed(lambda: engine.generate(prompts, Sampling(T), list(range(count))))
    said = f"{1e3 * seconds / T:.0f} ms a token of {name} with the hf engine"
    claims = claim(device, "G17", seconds / T > 0.015, said) if name == "qwen2.5-1.5b" else ()
    yield row(f"{name}: hf rollout of {count} rows, a token", 1e3 * seconds / T, "ms", None, claims)
    rate, summary = count * T / seconds, {"rollout": f"hf, {name}, {count} rows: {count * T / seconds:,.0f} tokens/s"}
    yield row(f"{name}: hf rollout of {count} rows", rate, "tokens/s", seconds=seconds, summary=summary)


# ---- host syncs of a micro-batch -----------------------------------------------------------------


class CountReads(TorchDispatchMode):
    """On a CPU, in place of torch's sync debug mode: counts operators that would make a GPU's host wait. `tolist` and
    copies to the host are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select")
        self.count += func.name() in names
        return func(*args, **(kwargs or {}))


def host_syncs(options: Options, device: torch.device) -> Iterator[dict]:
    """Those of grpo.py's own update, per micro-batch: the difference of an update in 8 micro-batches and one in 2."""
    import grpo
    from lib import setup
    from lib.args import Sizes

    model = sharded(random_model(shape(options, "qwen2.5-0.5b"), device, num_hidden_layers=2))
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    batch = random_batch([8] * 16, [24] * 16, model.config.vocab_size, device)
    mask = batch.batch["response_mask"].float()
    same = dict.fromkeys(("loss_mask", "denominator_mask", "valid_mask"), batch.batch["response_mask"].bool())
    numbers = torch.arange(len(mask), device=device)
    batch.batch.update(same | {"rollout_log_probs": -mask, "advantages": mask, "is_fresh": mask.any(1), "row": numbers})
    needs, counts = setup.check(grpo.Args(), torch.device("cpu"), Sizes(1, 1, 1, 16)), {}
    for parts in (2, 8):
        forward = ForwardConfig(32 * 16 // parts, Sampling(16), None, torch.bfloat16)
        actor = Policy("actor", model, optimizer, schedule, the_world(), forward, 1.0, False)
        update = partial(grpo.update, grpo.Args(), actor, batch, needs, 0.0)
        update()
        counts[parts] = syncs_of(update, device)
    each = (counts[8] - counts[2]) / 6
    said = f"{each:.0f} host syncs a micro-batch"
    claims = claim(device, "G11", each > 20, said)
    yield row("host syncs of a micro-batch of grpo.py", each, "", None, claims, of_an_update=counts)


def syncs_of(fn, device: torch.device) -> int:
    if device.type == "cpu":
        with CountReads() as reads:
            fn()
        return reads.count
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            fn()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


# ---- GAE -----------------------------------------------------------------------------------------


def gae_column_by_column(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """GAE at gamma 1 and lambda 0.95 where the tensors are: some eight kernels a column of tokens."""
    advantages = torch.zeros_like(rewards)
    last = next_value = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + next_value - values[:, t]
        last = torch.where(mask[:, t], delta + 0.95 * last, last)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = last
    return advantages


def gae(options: Options, device: torch.device) -> Iterator[dict]:
    """Ours computes on the CPU, wherever the tensors are (G13)."""
    for T in (64,) if options.tiny else (4096, 16384):
        torch.manual_seed(0)
        rewards, values = (torch.randn(32, T, device=device, dtype=torch.float64) for _ in range(2))
        mask = torch.ones(32, T, device=device, dtype=torch.bool)
        ours = lambda: compute_gae_advantage_return(rewards, values, mask, 1.0, 0.95)  # noqa: B023, E731
        there = lambda: gae_column_by_column(rewards, values, mask)  # noqa: B023, E731
        seconds = {"on the CPU": seconds_of(ours, 1), "on the device": seconds_of(there, 1)}
        ratio = seconds["on the device"] / seconds["on the CPU"]
        said = f"{seconds['on the device']:.2f} s on the GPU, {seconds['on the CPU']:.2f} s on the CPU, {T} tokens"
        for where, s in seconds.items():
            yield row(f"GAE of 32 x {T} tokens, {where}", 1e3 * s, "ms")
        yield row(f"GAE of {T} tokens, device / CPU", ratio, "", None, claim(device, "G13", ratio > 1.5, said))
