"""Part `fused`: forward and backward at 1.5B as tools.trace predicts it: unfused, --compile, --use-liger-kernel."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from benchmarks.gpu_check.common import backward, equal_rows, random_model, shape, sharded
from benchmarks.gpu_check.measure import kernels_of, peak_bytes, peak_flops, seconds_of
from benchmarks.gpu_check.rows import Options, attempt, claim, row, skipped
from benchmarks.gpu_check.update import update_flops
from lib.data_proto import DataProto
from lib.distributed import trainable_parameters
from lib.model import compile_layers, fuse_layers
from planner.memory import GIB, shard_numel

MOST = 30  # kernels that are listed

DEFAULT = "varlen, --use-liger-kernel"  # of FLAGS, what a run on a GPU has without a flag
FLAGS: dict[str, Callable[[PreTrainedModel], None] | None] = {
    "varlen, --no-use-liger-kernel": None,
    "varlen, --compile": compile_layers,
    DEFAULT: fuse_layers,
    "varlen, --use-liger-kernel --sharding fsdp2": fuse_layers,
}


def check(options: Options, device: torch.device) -> Iterator[dict]:
    for flags, change in FLAGS.items():
        label = f"qwen2.5-1.5b, {flags}"
        if device.type == "cpu":
            yield skipped(label, "needs a GPU")
        elif change is fuse_layers and not find_spec("liger_kernel"):
            yield skipped(label, "liger-kernel is not installed")
        else:
            yield from attempt(label, partial(speed, shape(options, "qwen2.5-1.5b"), device, label, change))
            if "fsdp2" not in flags:  # counted without the sharding's own
                yield from attempt(label, partial(launches, shape(options, "qwen2.5-1.5b"), device, label, change))


def changed(path: str, device: torch.device, change: Callable | None, place: Callable, **config) -> PreTrainedModel:
    model = random_model(path, device, **config)
    model.config._attn_implementation = "varlen"
    if change is compile_layers:
        change(model)
    model = place(model)
    if change is fuse_layers:
        change(model)
    return model


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """Its weights, but not its rotary tables."""
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)
    return model


def step(model: PreTrainedModel, batch: DataProto) -> None:
    backward(model, batch)
    for p in trainable_parameters(model):
        p.grad = None


def speed(path: str, device: torch.device, label: str, change: Callable | None) -> Iterator[dict]:
    """Of 8 rows of 1024 tokens, without checkpointing."""
    model = changed(path, device, change, partial(sharded, zero1="fsdp2" not in label))
    numel = shard_numel(list(model.parameters()), 1)
    run = partial(step, model, equal_rows(8192, 8, model, device))
    seconds = seconds_of(run, 5)
    said = f"{label}: {8192 / seconds:,.0f} tokens/s forward and backward"
    if peak := peak_flops(device):
        mfu = update_flops(model, numel, [1024] * 8) / seconds / peak
        claims = claim(device, "P2", mfu >= 0.45, f"{label}: MFU {mfu:.2f}")
        yield row(f"{label}: MFU of forward and backward", mfu, "", claims=claims if label.endswith(DEFAULT) else ())
        said += f", MFU {mfu:.2f}"
    yield row(f"{label}: forward and backward", 1e3 * seconds, "ms", summary={"update": said})
    kernels = kernels_of(run)
    on_gpu = sum(ms for _, ms in kernels.values())
    yield row(f"{label}: its kernels", on_gpu, "ms", longest=longest(kernels))
    few = seconds_of(partial(step, model, equal_rows(128, 8, model, device)), 5)
    said = f"{label}: {1e3 * few:.0f} ms of host, {on_gpu:.0f} ms of kernels"
    claims = claim(device, "P3", 1e3 * few <= min(130, on_gpu), said) if label.endswith(DEFAULT) else ()
    label_few = f"{label}: the same launches for 128 tokens, which the host's time bounds"
    yield row(label_few, 1e3 * few, "ms", claims=claims)
    yield row(f"{label}: peak of forward and backward", peak_bytes(run, device) / GIB, "GiB")


def launches(path: str, device: torch.device, label: str, change: Callable | None) -> Iterator[dict]:
    """Of a layer: the difference of four layers and two, with weights in bf16 and without FSDP's own copies."""
    model = changed(path, device, change, in_bfloat16, num_hidden_layers=4)
    batch, kernels = equal_rows(8192, 8, model, device), {}
    for layers in (4, 2):
        model.config.num_hidden_layers = layers
        step(model, batch)
        kernels[layers] = kernels_of(partial(step, model, batch))
    counts = {layers: sum(count for count, _ in of.values()) for layers, of in kernels.items()}
    each = (counts[4] - counts[2]) / 2
    claims = claim(device, "P1", each <= 40, f"{label}: {each:.0f} launches") if label.endswith(DEFAULT) else ()
    yield row(f"{label}: launches of a layer", each, "", None, claims, of_all=counts)
    total = sum(ms for _, ms in kernels[4].values())
    label = f"{label}: kernels of four layers, the head and the log-probs"
    yield row(label, total, "ms", longest=longest(kernels[4]))


def longest(kernels: dict[str, tuple[int, float]]) -> dict[str, tuple[int, float]]:
    return dict(sorted(kernels.items(), key=lambda kernel: -kernel[1][1])[:MOST])
