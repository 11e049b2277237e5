"""What the parts of the check share: random models and batches."""

from functools import cache

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.gpu_check.rows import ROOT, Options
from lib.data_proto import DataProto
from lib.distributed import World, init_distributed, make_mesh, reduce_gradients, shard_model
from lib.model import response_log_probs
from lib.model.load import LoadOptions, _prepare
from lib.model.log_probs import token_log_probs

TOY_MODEL = str(ROOT / "data/toy/model")


# ---- models and batches --------------------------------------------------------------------------


def shape(options: Options, name: str) -> str:
    return f"{TOY_MODEL}/config.json" if options.tiny else str(ROOT / f"benchmarks/shapes/{name}.json")


def random_model(
    config: str | PreTrainedConfig, device: torch.device, gradient_checkpointing: bool = False, **changes
) -> PreTrainedModel:
    """As `load_model` gives it, with random fp32 weights made on the device. config: its file or itself."""
    torch.manual_seed(0)
    if isinstance(config, str):
        config = AutoConfig.from_pretrained(config, **changes)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="packed_sdpa")
    config.architectures = [type(model).__name__]
    model._weight_conversions = []  # as after loading: otherwise transformers looks them up for each tensor of a sync
    how = LoadOptions(gradient_checkpointing=gradient_checkpointing)
    return _prepare(model, set(), config.model_type, token_log_probs, how)


def sharded(model: PreTrainedModel, zero1: bool = False) -> PreTrainedModel:
    """On one rank, computing in bf16."""
    return shard_model(model, make_mesh(the_world()), torch.bfloat16, zero1=zero1)


@cache
def the_world() -> World:
    return init_distributed()


def random_batch(
    prompts: list[int], responses: list[int], vocabulary: int, device: torch.device, groups: int = 0
) -> DataProto:
    """Rows of these lengths, as a rollout engine returns them. groups: so many rows in a row share a prompt, which is
    as long as that of the first of them."""
    rng = np.random.default_rng(0)
    if groups:
        prompts = [prompts[i - i % groups] for i in range(len(prompts))]
    P, T = max(prompts), max(responses)
    column = torch.arange(P + T)[None]
    first, end = P - torch.tensor(prompts)[:, None], P + torch.tensor(responses)[:, None]
    mask = ((column >= first) & (column < end)).long()
    ids = torch.from_numpy(rng.integers(4, vocabulary, mask.shape)) * mask
    for i in range(len(ids) if groups else 0):
        ids[i, :P] = ids[i - i % groups, :P]
    tensors = {
        "prompts": ids[:, :P],
        "responses": ids[:, P:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (column - first).clamp(min=0),
        "response_mask": mask[:, P:],
    }
    return DataProto.from_dict(tensors=tensors).to(device)


def equal_rows(tokens: int, count: int, model: PreTrainedModel, device: torch.device) -> DataProto:
    """`count` rows of `tokens` in all, a quarter of each its prompt, which no other row has."""
    n = tokens // count
    return random_batch([n // 4] * count, [n - n // 4] * count, model.config.vocab_size, device)


def backward(model: PreTrainedModel, batch: DataProto, **options) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, entropy = response_log_probs(model, batch, 1.0, **options)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    reduce_gradients(model)
    return log_probs.detach(), entropy.detach()
