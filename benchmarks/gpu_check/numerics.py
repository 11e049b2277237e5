"""Part `numerics`: packed log-probs, entropies and gradients against the padded eager model in fp32.

bf16 is judged by the eager model, too: packed rows may be off by at most twice what eager bf16 is.
"""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial

import torch
from transformers import MistralConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.gpu_check.common import backward, random_batch, random_model, shape
from benchmarks.gpu_check.rows import Options, attempt, claim, row, skipped
from lib.data_proto import DataProto
from lib.model import PACKED, add_lora, response_log_probs
from lib.model.load import without_adapters

QUANTITIES = {"log-probs, largest difference": "nats", "entropy, largest difference": "nats", "gradient, relative": ""}


def check(options: Options, device: torch.device) -> Iterator[dict]:
    for name, config in models(options).items():
        yield from attempt(name, partial(one_model, options, device, name, config))
    yield from attempt("LoRA", lambda: lora(options, device))


def models(options: Options) -> dict[str, str | PreTrainedConfig]:
    """Qwen2.5's has 7 query heads to one of keys; of Mistral's shape, every layer has a window."""
    window, width = (8, 64) if options.tiny else (128, 1024)
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64, "sliding_window": window}
    config = MistralConfig(
        vocab_size=104 if options.tiny else 32000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2 if options.tiny else 6,
        **heads,
    )
    return {"qwen2.5-0.5b": shape(options, "qwen2.5-0.5b"), f"windows of {window}": config}


def one_model(options: Options, device: torch.device, name: str, config: str | PreTrainedConfig) -> Iterator[dict]:
    changes = {"num_hidden_layers": 2 if options.tiny else 6} if isinstance(config, str) else {}
    model = random_model(config, device, **changes)
    scale = 1 if options.tiny else 10
    prompts, responses = [9, 2, 3, 7, 5, 2, 4, 3], [17, 12, 1, 2, 16, 3, 2, 5]
    sizes = [n * scale for n in prompts], [n * scale for n in responses]
    batches = {
        kind: random_batch(*sizes, model.config.vocab_size, device, groups)
        for kind, groups in {"": 0, ", shared prompts": 4}.items()
    }
    for kind, batch in batches.items():
        exact = outputs(model, batch, "eager", torch.float32)
        eager = errors(outputs(model, batch, "eager", torch.bfloat16), exact)
        for attention in PACKED:
            label = f"{name}{kind}, {attention}"
            if attention == "varlen" and device.type == "cpu":
                yield skipped(f"{label} bf16", "needs a GPU; tests/model/test_varlen.py runs our side of it")
                continue
            if attention == "packed_sdpa":
                ours = errors(outputs(model, batch, attention, torch.float32), exact)
                for (quantity, unit), x in zip(QUANTITIES.items(), ours):
                    yield row(f"{label} fp32: {quantity}", x, unit, x < 1e-4)
            yield from attempt(label, partial(in_bf16, model, batch, attention, label, exact, eager))


def in_bf16(
    model: PreTrainedModel, batch: DataProto, attention: str, label: str, exact: list[torch.Tensor], eager: list[float]
) -> Iterator[dict]:
    ours = errors(outputs(model, batch, attention, torch.bfloat16), exact)
    for (quantity, unit), x, limit in zip(QUANTITIES.items(), ours, eager):
        yield row(f"{label} bf16: {quantity}", x, unit, x <= 2 * limit, eager_bf16=limit)


def outputs(model: PreTrainedModel, batch: DataProto, attention: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """[log-probs, entropy, gradient], of the same weights whatever the order of the calls: those of bf16."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    for p in model.parameters():  # rotary tables stay fp32, as under FSDP
        p.data = p.data.to(torch.bfloat16).to(dtype)
    log_probs, entropy = backward(model, batch, padding_free=attention in PACKED)
    return [log_probs, entropy, torch.cat([p.grad.flatten().float() for p in model.parameters()])]


def errors(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[float]:
    log_probs, entropy = ((a.float() - b.float()).abs().max().item() for a, b in zip(ours[:2], theirs[:2]))
    return [log_probs, entropy, ((ours[2] - theirs[2]).norm() / theirs[2].norm()).item()]


def lora(options: Options, device: torch.device) -> Iterator[dict]:
    """An engine gets bf16(W + s B A); the trainer computes W x + s B A x. How much of what the adapters change is lost
    on the way (G3)? B as small as after some steps of a learning rate of 1e-5."""
    model = random_model(shape(options, "qwen2.5-0.5b"), device, num_hidden_layers=2 if options.tiny else 6)
    add_lora(model, rank=16, alpha=16, seed=0)
    for name, p in model.named_parameters():
        p.data = p.data.to(device)
        if ".lora_B." in name:
            p.data.normal_(std=1e-4)
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)
    batch = random_batch([8] * 4, [16] * 4, model.config.vocab_size, device)
    with torch.no_grad():
        adapters = response_log_probs(model, batch, 1.0)[0]
        with without_adapters(model):
            base = response_log_probs(model, batch, 1.0)[0]
            merged_model, lost = deepcopy(model), []
            for module, merged in zip(model.modules(), merged_model.modules()):
                if hasattr(module, "lora_A"):
                    update = module.lora_B["default"].weight.float() @ module.lora_A["default"].weight.float()
                    update *= module.scaling["default"]
                    whole = module.base_layer.weight.float() + update
                    merged.base_layer.weight.data = whole.to(torch.bfloat16)
                    kept = merged.base_layer.weight.float() - module.base_layer.weight.float()
                    lost.append(((kept - update).norm() / update.norm()).item())
            merged = response_log_probs(merged_model, batch, 1.0)[0]
    share = sum(lost) / len(lost)
    said = f"bf16(W + B A) is off by {share:.2f} of the update's norm"
    yield row(
        "LoRA merged in bf16: error of the update, relative", share, "", None, claim(device, "G3", share > 0.1, said)
    )
    yield row("LoRA: adapters against merged weights, mean", (adapters - merged).abs().mean().item(), "nats")
    yield row("LoRA: adapters against the base, mean", (adapters - base).abs().mean().item(), "nats")
