"""Model FLOPs of an update's forward and backward: the numerator of MFU.

With N weights in matrix products, a token takes 2 N FLOPs forward and 4 N backward (Kaplan et al., 2001.08361). A
frozen weight takes 4 in all, a frozen tower, which has no backward, 2. Attention takes 12 D for each token and each
token that it sees, D = layers x heads x head size (`attention_width`): PaLM's 12 L H Q T a token (2204.02311, appendix
B), whose T also counts the masked tokens.

A shared prefix counts once, the output head at trained tokens only, of a mixture the experts that a token goes to. Not
counted: recomputation, padding, norms, softmax, and what follows a sequence's last position that predicts a trained
token. Too much is counted for sliding windows, too little for layers that carry a state and for a vision tower (their
weights only)."""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lib.data import PrefixTree, attention_width, count_patches, on_host
from lib.data_proto import DataProto
from lib.distributed import Mean, Metric, RowGroup, Sum
from lib.model.vision import patches_per_feature, vision_names


class Flops(NamedTuple):
    """FLOPs of a model, forward and backward."""

    token: float  # of a token, without head and attention
    prediction: float  # of the output head, for one trained token
    pair: float  # of attention, for one token and one that it sees
    patch: float = 0.0  # of a vision model's tower and projector, for one patch of an image
    patch_size: int = 0


def flops_of(model: PreTrainedModel) -> Flops:
    """The FLOPs of a model, whole even if its weights are sharded."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
    token, vision = 0.0, {name: part for part in ("tower", "projector") for name in vision_names(model, part)}
    seeing: dict[str, list[torch.Tensor]] = {"tower": [], "projector": []}
    for name, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding):
            continue
        for leaf, weight in module.named_parameters(recurse=False):
            if part := vision.get(f"{name}.{leaf}"):
                seeing[part] += [weight] if weight.ndim > 1 else []
            elif weight.ndim == 2 and not leaf.endswith("bias"):  # gpt-oss has (experts, out)
                token += _products(weight)
            elif weight.ndim == 3 and chosen and not isinstance(module, nn.Conv1d):  # (experts, out, in)
                token += _products(weight) * chosen / len(weight)
    of_text = Flops(token, 0.0 if head is None else _products(head.weight), 12.0 * attention_width(model))
    if not vision:
        return of_text
    patch, trains = 0.0, False  # what is below the lowest trained weight has no backward
    for part, patches in (("tower", 1), ("projector", patches_per_feature(model.config))):
        trains = trains or any(weight.requires_grad for weight in seeing[part])
        patch += sum(_products(w) if trains else 2.0 * w.numel() for w in seeing[part]) / patches
    return of_text._replace(patch=patch, patch_size=model.config.vision_config.patch_size)


def update_flops(flops: Flops, micro: DataProto, tree: PrefixTree, ranks: int = 1) -> float:
    """FLOPs of forward and backward over this rank's rows of a micro-batch: its share of the prefix
    tree, which is of the rows of so many ranks that run them together."""
    pairs = sum(n * above + n * (n + 1) // 2 for n, above in zip(tree.lengths, tree.above))
    trained = int(on_host(micro).batch["response_mask"].sum())
    of_text = (sum(tree.lengths) * flops.token + pairs * flops.pair) / ranks + trained * flops.prediction
    if not flops.patch:
        return of_text
    encoded = {rows[0] for rows, above in zip(tree.rows, tree.above) if not above}  # the others share their prompts
    return of_text + float(count_patches(micro, flops.patch_size)[sorted(encoded)].sum()) * flops.patch


class UpdateFlops:
    """What a model's updates compute: FLOPs, tokens, and how many tokens they would be if none was shared."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.flops = model, flops_of(model)
        self.total, self.tokens, self.separate = 0.0, 0, 0

    def count(self, micro: DataProto, row_group: RowGroup | None) -> None:
        """After the forward of a micro-batch, whose rows these ranks have run together."""
        if (tree := self.model.tree) is not None:
            ranks = row_group.ranks.size() if row_group else 1
            self.total += update_flops(self.flops, micro, tree, ranks)
            self.tokens += sum(tree.lengths)
            self.separate += tree.separate_tokens

    def end(self) -> dict[str, Metric]:
        """Since the last call."""
        metrics: dict[str, Metric] = {"perf/update_tflops": Sum(self.total / 1e12)}
        metrics["perf/shared_prefix_tokens_share"] = Mean(self.separate - self.tokens, self.separate)
        self.total, self.tokens, self.separate = 0.0, 0, 0
        return metrics


def _products(weight: torch.Tensor) -> float:
    """FLOPs of one token: forward, the input's gradient, and the weight's own if it trains."""
    return weight.numel() * (6.0 if weight.requires_grad else 4.0)
