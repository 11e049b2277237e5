"""Whether an engine gets LoRA's adapters by themselves, or merged into the weights."""

import time

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lib import is_first_on_node
from lib.distributed import all_gather_lists, compute_device, fsdp_modules, full_tensor
from lib.rollout.engine import RolloutEngine
from lib.rollout.weight_sync import UnsupportedAdapter

GETS = {"adapter": "the adapter", "merged": "merged weights"}
MOST_LOST = 0.01  # share of an update that merged weights may lose


def choose_lora_sync(engine: RolloutEngine, model: PreTrainedModel, version: int, lr: float) -> None:
    """Sets engine.lora_sync: "adapter" where merged weights would lose more than MOST_LOST of an update, and the engine
    takes the adapter; else "merged", whose samples cost nothing more. Not the faster one: then the same seed would not
    give the same run. Prints what it measured of both. lr: the size of an update of B. A collective."""
    lost = rounding_loss(model, engine.dtype or next(model.parameters()).dtype, lr)
    choice, other = ("adapter", "merged") if lost > MOST_LOST else ("merged", "adapter")
    seconds, why_not = {}, ""
    for way in (other, choice):  # the one that stays is the last
        engine.lora_sync = way
        try:
            for _ in range(2):  # the first brings the weights below the adapter
                start = time.perf_counter()
                engine.load_weights(model, version)
                synced = time.perf_counter()
            engine.probe_log_probs([*range(32)])
            seconds[way] = f"{way} {synced - start:.3g} s, and {time.perf_counter() - synced:.3g} s for 32 tokens"
        except UnsupportedAdapter as error:
            choice, why_not = "merged", f"; not adapter: {error}"
    engine.lora_sync = choice
    if is_first_on_node():
        what = f"in {engine.dtype}, merged weights lose {lost:.2g} of an update of {lr:g} (--lr)"
        times = "; a sync takes: " + "; ".join(seconds.values())
        print(f"LoRA: vLLM gets {GETS[choice]}: {what.replace('torch.', '')}{times}{why_not}", flush=True)


@torch.no_grad()
def rounding_loss(model: PreTrainedModel, dtype: torch.dtype, size: float) -> float:
    """The share of LoRA's dW that is lost in W + dW as `dtype`: 1 - <what comes, dW> / <dW, dW> over all layers. dW is
    that of Adam's first step, where each number of B is +size or -size. A collective."""
    from peft.tuners.lora import LoraLayer  # its import takes seconds

    for module in fsdp_modules(model):
        module.reshard()
    device, generator = compute_device(model), torch.Generator().manual_seed(0)
    came = whole = 0.0
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            W, B = layer.get_base_layer().weight, layer.lora_B["default"].weight  # rows are split alike
            W, B = (w.to_local() if isinstance(w, DTensor) else w for w in (W, B))
            signs = torch.randint(0, 2, B.shape, generator=generator) * 2 - 1
            A, W = full_tensor(layer.lora_A["default"].weight).to(device), W.to(device, dtype).float()
            dW = layer.scaling["default"] * size * (signs.to(A) @ A).float()
            came += float((((W + dW).to(dtype).float() - W) * dW).sum(dtype=torch.float64))
            whole += float(dW.square().sum(dtype=torch.float64))
    came, whole = map(sum, zip(*all_gather_lists([(came, whole)])))
    return max(0.0, 1 - came / whole) if whole else 0.0  # below 0: came is longer than dW
