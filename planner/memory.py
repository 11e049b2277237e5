"""Estimates the memory that one GPU needs, from a model's config alone: no weights, no network.

    python -m tools.memory --model benchmarks/shapes/qwen2.5-7b.json --ranks 8 --gradient-checkpointing

A step passes through moments (prefill, forward, backward and so on). Each moment needs its own parts, and the peak is
the sum of the worst moment. There are N ranks and P parameters: P_l in the largest layer, P_r in FSDP's root group
(head and final norm, or the tied embedding). The compute dtype has c bytes (2 for bfloat16):

    weights           4 P / N: fp32 masters, which FSDP2 splits along each tensor's first dimension, rounded up
    Adam              8 P / N: two fp32 moments of what is trained
    gradients         4 P / N: fp32, from the backward pass to the optimizer's step. If only the last of several
                      micro-batches reduces them (set_gradient_sync), they are whole until then: 4 P
    gathered weights  forward c (P_r + 2 P_l): the root stays whole, and so do a layer and the buffer of the all-gather
                      before or after it; c 2 (P_r + embedding) at its start, c (P_r + P_l) in the head, also backward.
                      backward c (P_r + 2 P_l) + 4 P_l: a layer's parameters, the next one's all-gather buffer, and the
                      fp32 buffer that reduces the gradients of the one before (none where whole ones add up). At the
                      last layer the next one is the embedding, if it is not tied.
                      rollout (hf engine) c P. One rank needs no buffers
    activations       what autograd keeps of one micro-batch; with gradient checkpointing, the inputs of the layers
    images            of a vision model: what autograd keeps of the tower, if it trains, for as many image tokens as
                      prompts have at most: a block of the tower is measured, the projector is a formula
    work              what operators need besides. log-probs: a layer's forward. loss: chunks of logits, and the
                      head's gradient in fp32. backward: a layer, recomputed if it is checkpointed, and its gradients.
                      rollout: four copies of (rows, vocabulary). optimizer: none, AdamW is fused. vision: a layer of
                      the tower and its gradients
    KV cache          rows x (prompt + response) x what a token keeps
    columns           of the batch (lib/columns.py), of the rows of all ranks, while advantages are computed
    vLLM              its share of the GPU, or what the weights and the KV cache of one row take, if that is more

Weights, Adam and gradients are exact. Activations and work are measured: the model runs forward and backward on the
meta device, where attention keeps what a flash kernel keeps. HEADROOM is left for the GPU's context, NCCL's buffers and
memory that the allocator cannot use again. With LoRA only adapters have gradients and Adam. What is offloaded counts in
the moment "host", which is the host's memory."""

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from types import NoneType
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lib import InputError
from lib.data import local_copy
from lib.distributed import BUCKET_BYTES, ESTIMATED, trainable_parameters
from lib.model import load, log_probs
from lib.model.load import add_lora, class_of, decoder_layers, freeze, fsdp_layer_classes
from lib.model.values import token_values
from lib.model.vision import cache_keyword, family_of, patches_per_feature, tower_layers, vision_names
from planner.trace import replaced

GIB = 2**30
HEADROOM = 0.1  # of the device
Moments = dict[str, dict[str, int]]  # moment -> part -> bytes on one rank


def estimate_memory(
    model: str,
    *,
    ranks: int,
    compute_dtype: torch.dtype,
    micro_batch_tokens: int,
    rows: int,
    max_prompt_length: int,
    max_response_length: int,
    mini_batch_rows: int = 0,
    rows_a_prompt: int = 1,
    accumulation: Literal["none", "whole", "sharded"] = "whole",
    entropy_in_loss: bool = True,
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    frozen_dtype: torch.dtype = torch.float32,
    reference: bool = False,
    critic_model: str = "",
    reward_model: str = "",
    cpu_offload: bool = False,
    offload_activations: bool = False,
    engine_bytes: int | None = 0,
    engine_ranks: int = 1,
    scores_awake: bool = False,
    gathered_bytes: int = 0,
    trust_remote_code: bool = False,
    **of_trained: Any,
) -> Moments:
    """Bytes on each of `ranks` ranks in each moment of a step. Models: Hugging Face ids, folders or config.json files.

    micro_batch_tokens: tokens of one forward and backward, all taken for response tokens. rows: responses that one rank
    samples at once. mini_batch_rows: of them, those of an update; 0: all. rows_a_prompt: responses to a prompt that is
    computed once. accumulation: when gradients are reduced: "none": there is one micro-batch; "whole": after the last
    one; "sharded": after each. entropy_in_loss: whether the loss has a gradient by the entropies. frozen_dtype: of
    LoRA's base, reference and reward model. reference: a frozen copy of the policy; with LoRA the base is the reference
    and there is no copy. cpu_offload: weights, gradients and Adam in the host's memory (FSDP2's CPUOffloadPolicy).
    offload_activations: those of an update wait in the host's memory, except one layer's. engine_bytes: of a vLLM
    engine while it is awake; 0: the hf engine; None: servers sample. engine_ranks: over which vLLM splits the model
    (tensor parallel). scores_awake: the reward model runs while vLLM is awake. gathered_bytes: columns of the rows of
    all ranks, which each rank holds while it computes advantages. of_trained: `lora_target_modules`, `freeze_pattern`
    and `use_liger_kernel` of `meta_model`. What is frozen stays fp32.

    Raises InputError: there is no such config, or it is of another kind of model."""
    c, longest = compute_dtype.itemsize, max_prompt_length + max_response_length
    trained_rows, shared = mini_batch_rows or rows, max_prompt_length / rows_a_prompt
    tokens, in_update, of_images = (
        min(micro_batch_tokens, math.ceil(n))
        for n in (rows * (shared + max_response_length), trained_rows * (shared + max_response_length), rows * shared)
    )
    build = partial(_known_model, dtype=compute_dtype, trust_remote_code=trust_remote_code)
    train = partial(build, lora_rank=lora_rank, **of_trained)
    actor = train(AutoModelForCausalLM, model, "--model")
    token_model = transformers.AutoModelForTokenClassification
    row_model = transformers.AutoModelForSequenceClassification
    critic = train(token_model, critic_model, "--critic-model") if critic_model else None
    scorer = build(row_model, reward_model, "--reward-model") if reward_model else None

    # ---- what is held from the first step to the last
    held, gradients, accumulated = {}, {}, {}
    of_frozen = frozen_dtype.itemsize if lora_rank else 4
    for name, network in {"": actor, "critic ": critic}.items():
        if network is not None:
            trained = trainable_parameters(network)
            shard = shard_numel(trained, ranks)
            frozen = shard_numel([p for p in network.parameters() if not p.requires_grad], ranks)
            held[f"{name}weights"] = 4 * shard + of_frozen * frozen
            held[f"{name}Adam"] = 8 * shard
            gradients[f"{name}gradients"] = 4 * shard
            if accumulation != "none":
                accumulated[f"{name}gradients"] = 4 * shard_numel(trained, 1 if accumulation == "whole" else ranks)
    for name, network in {"reference": actor if reference and not lora_rank else None, "reward model": scorer}.items():
        if network is not None:
            held[name] = frozen_dtype.itemsize * shard_numel(list(network.parameters()), ranks)

    # ---- sampling, and forward passes without gradients
    moments: Moments = {}
    numel, kv = sum(p.numel() for p in actor.parameters()), kv_bytes_per_token(actor)
    largest = max(p.numel() for p in actor.parameters())
    if engine_bytes is None:
        moments["weight sync"] = {"buckets": 3 * max(BUCKET_BYTES, c * largest), "weight sync": (4 + c) * largest}
    elif engine_bytes:
        engine_needs = (c * numel + longest * kv) // engine_ranks
        moments["rollout"] = {"vLLM": max(engine_bytes, engine_needs), "weight sync": (4 + c) * largest}
    else:
        vocabulary = actor.config.get_text_config().vocab_size
        prompts = rows * max_prompt_length  # tokens; in validation all prompts differ
        work = max(forward_peak(actor, prompts, with_head=False), TowerCosts.of(actor, prompts).work)
        moments["prefill"] = {"gathered weights": c * numel, "KV cache": prompts * kv, "work": work}
        work = rows * vocabulary * (c + 12)  # logits; in fp32: logits / temperature, their CDF and log-softmax
        moments["rollout"] = {"gathered weights": c * numel, "KV cache": rows * longest * kv, "work": work}
    for name, network in {"log-probs": actor, "reward model": scorer}.items():
        if network is not None:
            groups, tower = FSDPGroups.of(network), TowerCosts.of(network, of_images)
            in_layers = {"gathered weights": groups.whole_in_forward(c, ranks)}
            in_layers["work"] = max(forward_peak(network, tokens, with_head=False), tower.work)
            in_head = {"gathered weights": groups.whole_in_head(c, ranks), "work": forward_peak(network, tokens)}
            at_start = {"gathered weights": groups.whole_at_start(c, ranks), "work": 0}
            moments[name] = max(at_start, in_layers, in_head, key=lambda parts: sum(parts.values()))
    if engine_bytes and scorer is not None and scores_awake:
        moments["reward model"]["vLLM"] = moments["rollout"]["vLLM"]
    if gathered_bytes:
        moments["advantages"] = {"columns": gathered_bytes}

    # ---- update
    groups, costs = FSDPGroups.of(actor), update_costs(actor, in_update, gradient_checkpointing, entropy_in_loss)
    reduces = accumulation != "whole"
    in_backward, in_last = (
        {"gathered weights": groups.whole_in_backward(c, ranks, reduces, last)} for last in (False, True)
    )
    tower = TowerCosts.of(actor, of_images, gradient_checkpointing)
    of_a_layer, host = costs.kept // groups.layers, {}
    if offload_activations:
        host["activations"] = costs.kept + tower.kept
    elif tower.kept:
        accumulated["images"] = tower.kept
    begun = {"activations": of_a_layer if offload_activations else costs.kept, **accumulated}
    # at the last layer: the other layers' activations are gone, and their gradients exist; the root's come last
    of_layers = [p for layer in decoder_layers(actor) for p in trainable_parameters(layer)]
    done = {"activations": of_a_layer, "work": costs.last_layer - of_a_layer}
    done |= {"gradients": 4 * shard_numel(of_layers, ranks), **accumulated}
    moments["loss"] = {"gathered weights": groups.whole_in_head(c, ranks), "work": costs.loss, **begun}
    moments["backward"] = in_backward | {"work": costs.backward, **begun}
    moments["last layer"] = in_last | done
    if tower.kept:  # the tower comes last
        moments["vision"] = in_last | done | {"activations": 0, "work": tower.work}
    if critic is not None:
        groups, costs = FSDPGroups.of(critic), update_costs(critic, in_update, gradient_checkpointing)
        tower = TowerCosts.of(critic, of_images, gradient_checkpointing)
        kept = costs.kept + tower.kept
        moments["critic"] = {
            "gathered weights": groups.whole_in_backward(c, ranks, reduces),
            "work": max(costs.loss, costs.backward, costs.last_layer - costs.kept, tower.work),
            "activations": costs.kept // groups.layers if offload_activations else kept,
            "critic gradients": gradients["critic gradients"],
            **{name: size for name, size in accumulated.items() if name in gradients},
        }
        if offload_activations:
            host["activations"] = max(host["activations"], kept)
    moments["optimizer"] = dict(gradients)
    if cpu_offload:
        del moments["optimizer"]
        if accumulation != "whole":  # whole gradients add up on the device
            for parts in moments.values():
                for name in gradients:
                    parts.pop(name, None)
        host |= held | gradients
    else:
        moments = {moment: held | parts for moment, parts in moments.items()}
    return moments | {"host": host} if host else moments


# ---- exact sizes: what is stored -----------------------------------------------------------------
def shard_numel(parameters: Sequence[torch.Tensor], ranks: int) -> int:
    """Elements on the first rank, which has the most: FSDP2 splits the first dimension into chunks of equal size."""
    return sum(-(-p.shape[0] // ranks) * p[0].numel() for p in parameters)


class FSDPGroups(NamedTuple):
    """The parameter counts of the FSDP groups that `shard_model` makes."""

    layer: int
    trained_layer: int
    root: int
    embedding: int  # 0 if tied: then it is in the root
    layers: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "FSDPGroups":
        classes = fsdp_layer_classes(model)
        layers = [list(layer.parameters()) for layer in model.modules() if type(layer).__name__ in classes]
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        own_embedding = 0 if head is not None and head.weight is embedding.weight else embedding.weight.numel()
        sizes = [sum(p.numel() for p in layer) for layer in layers]
        trained = [sum(p.numel() for p in layer if p.requires_grad) for layer in layers]
        root = sum(p.numel() for p in model.parameters()) - sum(sizes) - own_embedding
        return cls(max(sizes), max(trained), root, own_embedding, len(decoder_layers(model)))

    def whole_in_forward(self, c: int, ranks: int) -> int:
        return c * (self.root + (1 if ranks == 1 else 2) * self.layer)

    def whole_at_start(self, c: int, ranks: int) -> int:
        """The root and the embedding, and their all-gather buffers."""
        return c * (1 if ranks == 1 else 2) * (self.root + self.embedding)

    def whole_in_head(self, c: int, ranks: int) -> int:
        """The last layer's all-gather buffer lives on, and its next one comes with the head's backward."""
        return c * (self.root + (self.layer if ranks > 1 else 0))

    def whole_in_backward(self, c: int, ranks: int, reduces: bool, last_layer: bool = False) -> int:
        """reduces: whether this micro-batch's gradients are reduced at once, not added up whole."""
        gathered_next = self.embedding if last_layer else self.layer
        buffers = 0 if ranks == 1 else c * gathered_next + (4 * self.trained_layer if reduces else 0)
        return c * (self.root + self.layer) + buffers


# ---- measured sizes: passes on the meta device ---------------------------------------------------
def attention_on_meta(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Stands for packed_sdpa. Autograd keeps its inputs, its output and a number per row. query (1, H, N, D)."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[0]
    return torch.cat([out.transpose(1, 2)]), None  # packed_sdpa puts the runs together in a copy


ALL_ATTENTION_FUNCTIONS.register("attention_on_meta", attention_on_meta)


def meta_model(
    auto_class: Any,
    path: str,
    flag: str,
    dtype: torch.dtype,
    *,
    lora_rank: int = 0,
    lora_target_modules: str = "all-linear",
    freeze_pattern: str = "",
    use_liger_kernel: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a config, on the meta device: with adapters if there is a rank, frozen where a pattern says it."""
    try:
        config = AutoConfig.from_pretrained(local_copy(path, weights=False), trust_remote_code=trust_remote_code)
        if auto_class is not AutoModelForCausalLM:
            config.num_labels = 1
        options = {"dtype": dtype, "attn_implementation": "attention_on_meta", "trust_remote_code": trust_remote_code}
        with torch.device("meta"):
            model = class_of(auto_class, config).from_config(config, **options)
    except (OSError, ValueError) as error:
        raise InputError(f"{flag} {path}: no model by its config: {str(error).splitlines()[0]}") from error
    if auto_class is AutoModelForCausalLM:
        model.token_log_probs = None  # by this attribute add_lora knows a policy
    if lora_rank:
        add_lora(model, rank=lora_rank, alpha=1, seed=0, target_modules=lora_target_modules)
        model.to("meta", dtype)  # FSDP casts the fp32 adapters for the forward
    elif freeze_pattern:
        freeze(model, freeze_pattern)
    if use_liger_kernel:
        names = vars(sys.modules[type(model).__module__])  # which liger-kernel changes for all models
        before = dict(names)
        load.use_liger_kernel(model, ESTIMATED)
        names.update(before)
    return model


_known_model = lru_cache(8)(meta_model)  # by the same arguments the same model, so that it is measured once


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make in the block, while these are referenced: `now` and `peak`."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.now = self.peak = 0
        self.known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._add, outputs)
        return outputs

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _decoder(model: PreTrainedModel) -> PreTrainedModel:
    return model.base_model if family_of(model.config) is None else model.get_decoder()


def kernels_of_a_gpu() -> AbstractContextManager:
    """In it log-probs allocate what they do where they are compiled: logits and results. No Triton function runs."""

    def with_logits(fn: Callable, h: torch.Tensor, weight: torch.Tensor, *args):
        logits = torch.mm(h, weight.T)
        with _disable_current_modes():
            results = fn(logits, *args)
        return tree_map_only(torch.Tensor, torch.clone, results)

    changes: list[tuple[Any, str, Any]] = [(log_probs, "with_logits", with_logits)]
    if "liger_kernel" in sys.modules:
        from triton.runtime.jit import JITFunction

        changes.append((JITFunction, "run", lambda *_, **__: None))
    return replaced(*changes)


def _forward(model: PreTrainedModel, tokens: int, entropy_in_loss: bool = True) -> torch.Tensor:
    """Runs one row of `tokens` through the model, as a micro-batch runs. Returns a scalar to differentiate."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": torch.empty(1, 1, 1, 1)}
    select = torch.arange(tokens)
    if hasattr(model, "token_log_probs"):
        logp, entropy = log_probs.token_log_probs(model, inputs, select, ids[0], temperature=1.0)
        return (logp + entropy if entropy_in_loss else logp).sum()
    return token_values(model, inputs, select).sum()


def _of_all_layers(model: PreTrainedModel, measure: Callable[[], Sequence[int]]) -> list[int]:
    """The sizes that `measure` finds. Where all layers are alike, each adds the same to a size: three and four of them
    are measured in place of, say, eighty."""
    decoder, layers = _decoder(model), decoder_layers(model)
    if len(layers) < 5 or [*getattr(decoder, "layers", ())] != layers or len(set(map(_kind, layers))) > 1:
        return [*measure()]
    whole, measured = decoder.layers, []
    try:
        for n in (3, 4):
            decoder.layers = whole[:n]
            measured.append(measure())
    finally:
        decoder.layers = whole
    return [three + (len(layers) - 3) * (four - three) for three, four in zip(*measured)]


def _kind(layer: torch.nn.Module) -> tuple:
    """What tells the layer from one that computes otherwise: its weights and its settings, less its number."""
    weights = ((name, p.shape, p.requires_grad) for name, p in layer.named_parameters())
    settings = ((name, *item) for name, module in layer.named_modules() for item in vars(module).items())
    plain = (bool, int, float, str, NoneType)
    return *weights, *(item for item in settings if isinstance(item[2], plain) and item[1] != "layer_idx")


@lru_cache(16)
@torch.no_grad()
def forward_peak(model: PreTrainedModel, tokens: int, with_head: bool = True) -> int:
    """Peak bytes of a forward pass without gradients, without the weights."""

    def measure() -> tuple[int]:
        with torch.device("meta"), kernels_of_a_gpu(), LiveBytes(model) as live:
            if with_head:
                _forward(model, tokens)
            else:
                _decoder(model)(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        return (live.peak,)

    return _of_all_layers(model, measure)[0]


class UpdateCosts(NamedTuple):
    """Bytes of a forward and backward pass, without weights and without FSDP's buffers."""

    kept: int  # activations, at the end of the forward pass
    loss: int  # besides them, until the gradient has come through the head
    backward: int  # besides them, from then on
    last_layer: int  # when the gradient comes to the first layer and to what is before it, with what is left of them


@lru_cache(16)
def update_costs(
    model: PreTrainedModel, tokens: int, gradient_checkpointing: bool, entropy_in_loss: bool = True
) -> UpdateCosts:
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    measure = partial(_update_peaks, model, tokens, entropy_in_loss)
    kept, loss, in_layers, in_last = _of_all_layers(model, measure)
    model.zero_grad()
    model.gradient_checkpointing_disable()
    return UpdateCosts(kept, loss - kept, max(in_layers - kept, 0), in_last)


def _update_peaks(model: PreTrainedModel, tokens: int, entropy_in_loss: bool) -> tuple[int, int, int, int]:
    """(activations, the peaks until the gradient has come through the head, to the first layer, and to the end)."""
    peaks, live = [], LiveBytes(model)

    def next_moment(*_) -> None:
        peaks.append(live.peak)
        live.peak = live.now

    def end_of_decoder(module, args, output) -> None:
        next_moment()
        output.last_hidden_state.register_hook(next_moment)

    def begin_of_layer(layer, args) -> None:
        def gradient_comes(_) -> None:
            layer.zero_grad()  # FSDP takes those of the layer away
            if layer in layers[1:2]:
                next_moment()

        if args[0].requires_grad:
            args[0].register_hook(gradient_comes)

    layers = decoder_layers(model)
    hooks = [_decoder(model).register_forward_hook(end_of_decoder)]
    hooks += [layer.register_forward_pre_hook(begin_of_layer) for layer in layers]
    with torch.device("meta"), kernels_of_a_gpu(), live:
        output = _forward(model, tokens, entropy_in_loss)
        kept = live.now
        output.backward()
        next_moment()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    _, loss, *in_layers, in_last = peaks  # nothing tells them apart where no gradient comes to the first layer
    return kept, loss, max(in_layers, default=in_last), in_last


class TowerCosts(NamedTuple):
    """Bytes of a vision model's tower, without weights. 0 for a text model."""

    kept: int  # activations, at the end of its forward pass
    work: int  # besides them, in one of its layers

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: int, gradient_checkpointing: bool = False) -> "TowerCosts":
        """tokens: of images. A block is measured; the projector keeps what its linear layers take and give."""
        family = family_of(model.config)
        if family is None:
            return cls(0, 0)
        patches, size = tokens * patches_per_feature(model.config), model.dtype.itemsize
        blocks = tower_layers(model)
        of_block, peak = _block_costs(model, blocks[0], patches)
        checkpoint = size * patches * _width(blocks[0])
        kept = len(blocks) * (checkpoint if gradient_checkpointing else of_block)
        projectors = [model.get_submodule(path) for path in family.projector]
        layers = [layer for projector in projectors for layer in projector.modules()]
        linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
        kept += size * tokens * sum(layer.in_features + layer.out_features for layer in linear)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        trains = trained.intersection(vision_names(model, "tower"))
        return cls(kept if trains else 0, peak if gradient_checkpointing else peak - of_block)


def _width(block: torch.nn.Module) -> int:
    """Of what a block of a tower takes. In Qwen2-VL's config, hidden_size is the decoder's."""
    return next(block.parameters()).shape[-1]


@lru_cache(16)
def _block_costs(model: PreTrainedModel, block: torch.nn.Module, patches: int) -> tuple[int, int]:
    """Bytes of a block of the tower: (what autograd keeps, the peak until the end of the backward pass)."""
    width, takes = _width(block), inspect.signature(block.forward).parameters
    with torch.device("meta"), kernels_of_a_gpu(), LiveBytes(model) as live:
        if "cu_seqlens" in takes:  # Qwen, GLM: the images in one row
            heads = torch.empty(patches, width // model.config.vision_config.num_heads)
            one_image = torch.tensor([0, patches], dtype=torch.int32, device="cpu")
            given: dict[str, Any] = {"cu_seqlens": one_image, "position_embeddings": (heads, heads)}
            x = torch.empty(patches, width, dtype=model.dtype, requires_grad=True)
        else:
            given = {"attention_mask": None}
            x = torch.empty(1, patches, width, dtype=model.dtype, requires_grad=True)
        before = live.now
        out = block(x, **given)
        kept = live.now - before
        out.sum().backward()
    model.zero_grad()
    return kept, live.peak - before


@lru_cache(16)
def kv_bytes_per_token(model: PreTrainedModel) -> int:
    cache, decoder = DynamicCache(config=model.config), _decoder(model.eval())
    with torch.device("meta"), kernels_of_a_gpu(), torch.no_grad():
        decoder(torch.zeros(1, 1, dtype=torch.long), use_cache=True, **{cache_keyword(decoder): cache})
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]  # a state does not grow
    return sum(t.numel() * t.itemsize for layer in layers for t in (layer.keys, layer.values))


# ---- what fits -----------------------------------------------------------------------------------
def worst_moment(moments: Moments) -> tuple[str, int]:
    """(name, bytes) of the moment that needs most of the GPU."""
    sums = {name: sum(sizes.values()) for name, sizes in moments.items() if name != "host"}
    return max(sums.items(), key=lambda item: item[1])


def fits(moments: Moments, device_bytes: int) -> bool:
    """True if the worst moment leaves HEADROOM of the device free."""
    return worst_moment(moments)[1] <= (1 - HEADROOM) * device_bytes


def memory_table(moments: Moments, device_bytes: int) -> str:
    """A table of GiB per part and moment, the sum of each moment, and whether the worst one fits the device."""
    parts = list(dict.fromkeys(part for sizes in moments.values() for part in sizes))
    sums = {name: sum(sizes.values()) for name, sizes in moments.items()}
    rows = [(part, [sizes.get(part) for sizes in moments.values()]) for part in parts] + [("sum", list(sums.values()))]
    lines = ["GiB a GPU".ljust(18) + "".join(f"{name:>12}" for name in moments)]
    for part, sizes in rows:
        lines.append(part.ljust(18) + "".join(f"{'-' if n is None else f'{n / GIB:.2f}':>12}" for n in sizes))
    worst, _ = worst_moment(moments)
    biggest = max(moments[worst], key=moments[worst].get)
    verdict = "fits" if fits(moments, device_bytes) else "DOES NOT FIT"
    room = f"{device_bytes / GIB:.0f}, of which {HEADROOM:.0%} are left free"
    lines.append(f"{verdict}: {sums[worst] / GIB:.1f} GiB ({worst}) of {room}; its largest part: {biggest}")
    return "\n".join(lines)
