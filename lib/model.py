"""Policy, reference, critic and reward model: load, and forward to log-probs and entropies, values, or scores.

Two things keep the forward cheap. Padding never enters it: the rows of a micro-batch are laid end to end (packed) and
attention runs inside each row. Full fp32 logits never exist: the vocabulary projection is done in chunks of tokens, and
its backward recomputes them. Both are exact. Log-probs are those at the sampling temperature; dropout is off.
"""

import itertools
import logging
import math
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.nn.attention.bias import causal_lower_right
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from lib import InputError, is_first_on_node
from lib.args import check_model_path
from lib.data import prepare_dynamic_batch, prompt_groups, restore_dynamic_batch
from lib.data_proto import DataProto
from lib.distributed import (
    TENSOR_PARALLEL_STYLES,
    RowGroup,
    TakeOwn,
    all_gather_lists,
    all_to_all,
    enter_stage,
    fsdp_modules,
    trainable_parameters,
)
from lib.packing import attention_and_packing, lay_out, layout, other_layers, sequence_rows
from lib.special_tokens import Defuse

disable_progress_bar()  # of loading: one bar a rank
# a table of weights that are missing or too many, on each rank: `_from_pretrained` says in one line what is wrong
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())

# ---- loading -------------------------------------------------------------------------------------


def split_gguf(path: str) -> tuple[str, dict[str, str]]:
    """transformers reads `folder/model.gguf` as the folder plus the keyword `gguf_file`."""
    if path.endswith(".gguf"):
        return str(Path(path).parent), {"gguf_file": Path(path).name}
    return path, {}


def check_sequence_parallel(path: str, size: int, *, flag: str = "--model", trust_remote_code: bool = False) -> None:
    """Raises InputError for a model whose attention heads cannot be split over `size` ranks, or that mixes tokens in
    other ways than attention, too."""
    if size == 1:
        return
    config = _packed_config(path, "--sequence-parallel", size, flag, trust_remote_code)
    heads = getattr(config, "num_attention_heads", 0)
    if heads == 0 or heads % size:
        raise InputError(f"--sequence-parallel {size}: must divide the {heads} attention heads of {flag} {path}")


def check_tensor_parallel(path: str, size: int, *, flag: str = "--model", trust_remote_code: bool = False) -> None:
    """Raises InputError for a model without a plan that `shard_model` knows, or whose heads cannot be split over `size`
    ranks."""
    if size == 1:
        return
    config = _packed_config(path, "--tensor-parallel", size, flag, trust_remote_code)
    plan = getattr(config, "base_model_tp_plan", None) or {"layers.": "no"}
    others = {style for name, style in plan.items() if "layers." in name} - TENSOR_PARALLEL_STYLES.keys()
    if others:
        raise InputError(f"--tensor-parallel {size}: {flag} {path} has {min(others)} layers in its plan: drop the flag")
    heads = {config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads}
    if any(n % size for n in heads):
        raise InputError(f"--tensor-parallel {size}: must divide the {min(heads)} key and value heads of {flag} {path}")


def _packed_config(path: str, split: str, size: int, flag: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a model whose layers are all attention over packed rows. Raises InputError for any other."""
    folder, gguf = split_gguf(path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **gguf)
    except (OSError, ValueError) as error:
        raise InputError(f"{flag} {path}: cannot load its config: {str(error).splitlines()[0]}") from error
    reason = attention_and_packing(config, "packed_sdpa")[1]
    if reason is None and other_layers(config):
        reason = "it has layers that carry a state from token to token"
    if reason:
        raise InputError(f"{split} {size}: {flag} {path} cannot be split: {reason}; drop {split}")
    return config.get_text_config()


def load_tokenizer(path: str, *, trust_remote_code: bool = False, flag: str = "--model") -> PreTrainedTokenizerBase:
    """The tokenizer of `path`, which must have a chat template; a missing pad token becomes the eos token."""
    folder, gguf = split_gguf(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **gguf)
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot load its tokenizer: {str(error).splitlines()[0]}") from error
    if tokenizer.chat_template is None:
        raise InputError(
            f"{flag} {path}: its tokenizer has no chat template; use an instruct model, or set one and save"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "packed_sdpa",
    padding_free: bool = True,
    share_prompts: bool = True,
    gradient_checkpointing: bool = False,
    offload_activations: bool = False,
    trust_remote_code: bool = False,
    on_meta: bool = False,
) -> PreTrainedModel:
    """A causal LM from a Hugging Face id, a folder or a .gguf file, with weights in `dtype` and without dropout.

    `dtype` is explicit because transformers otherwise takes the checkpoint's, and AdamW on bf16 weights loses small
    updates. The model gets the method `token_log_probs`, which FSDP treats as a forward.

    padding_free, share_prompts: how `response_log_probs` lays out its rows, where the model allows it: the model's
    attributes of these names. If it has to be padded rows, one line says why.
    offload_activations: what autograd keeps of `token_log_probs` waits in CPU memory for the backward pass.
    on_meta: read no weights yet; `shard_model` reads of the safetensors files what its rank holds, so that no process
    ever holds the whole model. Where transformers has to convert the weights, they are all read now, as without it.
    """
    options = {"dtype": dtype, "attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    model, missing = _from_pretrained(AutoModelForCausalLM, path, "--model", {}, on_meta=on_meta, **options)
    _refuse_missing(missing, model, path, "--model")
    lay_out(model, f"--model {path}", attn_implementation, padding_free, share_prompts)
    return _prepare(model, token_log_probs, gradient_checkpointing, offload_activations)


def load_critic(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "packed_sdpa",
    padding_free: bool = True,
    share_prompts: bool = True,
    gradient_checkpointing: bool = False,
    offload_activations: bool = False,
    trust_remote_code: bool = False,
    on_meta: bool = False,
) -> PreTrainedModel:
    """A token classifier of one label, the value, from what `load_model` takes, or from a critic or a reward model.

    Where there is no value head (a causal LM) it starts at zero, so that the first values are 0 on every rank: a random
    head would differ from rank to rank. The model gets the method `token_values`. Options: as in `load_model`.

    Raises:
        InputError: the architecture has no token classification, or the head has another number of outputs.
    """
    options = {"dtype": dtype, "attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    # without classifier_dropout, transformers drops 10 % of what the head sees
    settings = {"num_labels": 1, "classifier_dropout": 0.0}
    model, missing = _from_pretrained(
        AutoModelForTokenClassification, path, "--critic-model", settings, on_meta=on_meta, **options
    )
    head = value_head(model)
    new = {name for name in missing if model.get_submodule(name.rpartition(".")[0]) is head}
    for name in new:
        zeros = torch.zeros(model.get_parameter(name).shape, dtype=dtype)  # also where the rest is on the meta device
        setattr(head, name.rpartition(".")[2], torch.nn.Parameter(zeros))
    _refuse_missing(missing - new, model, path, "--critic-model")
    lay_out(model, f"--critic-model {path}", attn_implementation, padding_free, share_prompts)
    return _prepare(model, token_values, gradient_checkpointing, offload_activations)


def load_reward_model(
    path: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False, on_meta: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence classifier with one output, frozen, and its own tokenizer. The model gets the method `token_values`.
    on_meta: as in `load_model`.

    Raises:
        InputError: it has another number of outputs (or no head, being a causal LM), or no chat template.
    """
    flag = "--reward-model"
    options = {"dtype": dtype, "attn_implementation": "packed_sdpa", "trust_remote_code": trust_remote_code}
    model, missing = _from_pretrained(AutoModelForSequenceClassification, path, flag, {}, on_meta=on_meta, **options)
    _refuse_missing(missing, model, path, flag)
    if model.config.num_labels != 1:
        raise InputError(f"{flag} {path}: it has {model.config.num_labels} outputs; give a model with one, the score")
    lay_out(model, f"{flag} {path}")
    model = _prepare(model, token_values).requires_grad_(False).eval()
    return model, load_tokenizer(path, trust_remote_code=trust_remote_code, flag=flag)


def _from_pretrained(
    auto_class: Any,
    path: str,
    flag: str,
    settings: dict[str, Any],
    *,
    dtype: torch.dtype,
    attn_implementation: str,
    trust_remote_code: bool,
    on_meta: bool,
) -> tuple[PreTrainedModel, set[str]]:
    """The model, its config changed by `settings`, and the names of the parameters that `path` did not hold."""
    check_model_path(path, flag)
    enter_stage(f"loading {flag} {path}", limited=False)  # perhaps a download; `shard_model` ends it
    folder, gguf = split_gguf(path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **gguf)
        attn_implementation, _ = attention_and_packing(config, attn_implementation)
        for part in (config, config.get_text_config()):  # log-probs of sampling and training must be the same function
            for name, value in vars(part).items():
                if ("dropout" in name or "jitter" in name or name.endswith("pdrop")) and isinstance(value, float):
                    setattr(part, name, 0.0)
        for name, value in settings.items():
            setattr(config, name, value)
        if on_meta and not gguf:
            options = {"dtype": dtype, "attn_implementation": attn_implementation}
            model, missing = _meta_model(auto_class, folder, config, trust_remote_code=trust_remote_code, **options)
            if model is not None:
                return model, missing
            if is_first_on_node():
                print(f"{flag} {path}: its weights have to be converted: every process reads all of them", flush=True)
        model, info = auto_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, in one line
            **gguf,
        )
    except (OSError, ValueError) as error:  # ValueError: an architecture that is unknown, or not for this task
        raise InputError(f"{flag} {path}: cannot load it: {str(error).splitlines()[0]}") from error
    for name, theirs, ours in info["mismatched_keys"]:
        raise InputError(f"{flag} {path}: its {name} is of shape {tuple(theirs)}, the model needs {tuple(ours)}")
    for param in model.parameters():  # not buffers: rotary tables stay fp32
        param.data = param.data.to(dtype)
    if gguf:  # its weights are plain now; vLLM and an export must not take them for quantized
        vars(model.config).pop("quantization_config", None)
        for name in ("hf_quantizer", "quantization_method"):
            vars(model).pop(name, None)
    return model, set(info["missing_keys"])


def _meta_model(
    auto_class: Any, path: str, config: PreTrainedConfig, **options: Any
) -> tuple[PreTrainedModel | None, set[str]]:
    """The model with its parameters on the meta device, and the names of those that the files of `path` do not hold; no
    model where transformers would do more than to read each weight by its name."""
    folder = path if Path(path).is_dir() else snapshot_download(path, allow_patterns=["model*.safetensors", "*.json"])
    if not any(Path(folder).glob("*.safetensors")) or hasattr(config, "quantization_config"):
        return None, set()
    with init_empty_weights(include_buffers=False):  # buffers, such as rotary tables, are computed and not read
        model = auto_class.from_config(config, **options)
    model.tie_weights()
    files = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    tied, changes = model.all_tied_weights_keys, get_model_conversion_mapping(model)
    shapes = {name: weight.shape for name, weight in model.state_dict().items() if name not in tied}
    missing = shapes.keys() - files.keys()
    held = shapes.keys() - missing
    if (
        any(name.startswith(f"{model.base_model_prefix}.") for name in missing)
        or any(files[name].size != shapes[name] or len(files[name].chunks) > 1 for name in held)  # or in two files
        or any(name in files for name in tied)  # which may differ from what they are tied to
        or any(change.rename_source_key(name)[1] for change in changes for name in files)
    ):
        return None, set()
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.weights_folder = folder
    return model, missing


def freeze(model: PreTrainedModel, pattern: str) -> PreTrainedModel:
    """Freezes the parameters whose whole names the regular expression matches, in place. Before `shard_model`."""
    frozen = [p.requires_grad_(False) for name, p in model.named_parameters() if re.fullmatch(pattern, name)]
    if not (frozen and any(p.requires_grad for p in model.parameters())):
        raise InputError(f"--freeze {pattern}: matches {'all' if frozen else 'none'} of the model's parameters")
    return model


def _refuse_missing(names: set[str], model: PreTrainedModel, path: str, flag: str) -> None:
    if names:
        raise InputError(f"{flag} {path}: not a {type(model).__name__}: no {min(names)} in it ({len(names)} missing)")


def _prepare(
    model: PreTrainedModel, forward, gradient_checkpointing: bool = False, offload_activations: bool = False
) -> PreTrainedModel:
    """In train mode, because gradient checkpointing works there only, with `forward` as a method that FSDP knows."""
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    method = _keeping_activations_on_cpu(forward) if offload_activations else forward
    setattr(model, forward.__name__, types.MethodType(method, model))
    model.fsdp_forward_methods = (forward.__name__,)
    return model


def _keeping_activations_on_cpu(forward):
    """torch's save_on_cpu, weights apart: FSDP gathers these again, and has their memory back in between."""
    host = save_on_cpu(pin_memory=torch.cuda.is_available())

    def pack(tensor: torch.Tensor):
        of = tensor._base if tensor._is_view() else tensor
        return tensor if isinstance(of, torch.nn.Parameter) else host.pack_hook(tensor)

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else host.unpack_hook(packed)

    @wraps(forward)
    def method(*args, **kwargs):
        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return method


# ---- LoRA ----------------------------------------------------------------------------------------


def add_lora(
    model: PreTrainedModel, *, rank: int, alpha: float, seed: int, target_modules: str = "all-linear"
) -> PreTrainedModel:
    """Freezes the model and adds LoRA adapters by peft, in place: W x becomes W x + alpha / rank x B A x
    (arXiv 2106.09685). Before `shard_model`.

    They start at B = 0 and an A that is the same on every rank. They are fp32 at least, though W may be bfloat16. A
    critic's value head is trained as a whole. Dropout is off, as everywhere.

    Args:
        target_modules: "all-linear" (of the decoder, without the head), or a regular expression that names of linear
            layers match as a whole.

    Raises:
        InputError: no layer matches, or one that is not linear (peft counts the experts of a mixture of experts in).
    """
    from peft import LoraConfig  # seconds of import
    from peft.tuners.lora import LoraLayer

    head = None if hasattr(model, "token_log_probs") else value_head(model)
    heads = [name for name, module in model.named_modules() if module is head]
    model.requires_grad_(False)
    try:
        model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_modules, exclude_modules=heads))
    except ValueError as error:
        raise InputError(f"--lora-target-modules {target_modules}: {str(error).splitlines()[0]}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                if not isinstance(layer.get_base_layer(), torch.nn.Linear):
                    raise InputError(
                        f"--lora-target-modules {target_modules}: {name} is not a linear layer; name some that are, "
                        "such as '.*[qkvo]_proj'"
                    )
                layer.lora_A.to_empty(device="cpu")  # from the meta device, where the layer's weight may be
                layer.lora_B.to_empty(device="cpu")
                layer.reset_lora_parameters("default", init_lora_weights=True)
    if head is not None:
        head.requires_grad_(True)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(torch.promote_types(param.dtype, torch.float32))
    return model


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """In the block the model is what it was before `add_lora`; a model without adapters is what it is."""
    if not getattr(model, "peft_config", None):
        yield
        return
    for module in fsdp_modules(model):
        module.reshard()
    trained = trainable_parameters(model)
    model.disable_adapters()
    for param in trained:  # peft has frozen them, and FSDP's first forward settles by that the dtype of gradients
        param.requires_grad_(True)
    try:
        yield
    finally:
        model.enable_adapters()


# ---- attention over packed rows ------------------------------------------------------------------


class PackedRun(NamedTuple):
    """Sequences that stand end to end in the packed row and are one batched SDPA call."""

    tokens: int
    count: int
    length: int
    """of each sequence; where `places` is given, of the longest"""
    prompt_run: int | None
    """the number of the run that holds their prompts, where they are responses to shared prompts"""
    places: torch.Tensor | None
    """each prompt and response (count, P + length), padded at the end: places in the prompts' run and then this one"""
    real: torch.Tensor | None
    """the tokens (tokens,) among the count * length with padding"""


def packed_sdpa(
    module,
    query,
    key,
    value,
    attention_mask,
    packed_runs=None,
    sequence_group=None,
    group_cache=None,
    scaling=None,
    **kwargs,
):
    """Attention for transformers models. query (1, H, N, D), key and value (1, H_kv, N, D) for packed sequences.

    `packed_runs` is a list of `PackedRun`. A whole sequence, or a prompt that rows share, attends to its own earlier
    tokens; a response to a shared prompt attends to the prompt and to its own earlier tokens. Only such responses are
    padded, and in the attention only. With a `group_cache` (lib/rollout.py) it attends itself. Without either this is
    transformers' own SDPA attention.

    With a `sequence_group` of n ranks each has N / n tokens of the packed row, and attends with H / n heads to all N:
    an all-to-all before and one behind change from the one to the other (DeepSpeed-Ulysses, arXiv 2309.14509).
    """
    if group_cache is not None:
        return group_cache.attend(module, query, key, value, scaling), None
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise InputError(f"{type(module).__name__} has soft caps or sinks: --attn-implementation eager")
    if packed_runs is None:
        if attention_mask is not None and attention_mask.shape[3] < key.shape[2]:
            raise InputError(f"{type(module).__name__} gets no keywords from its layer: --no-padding-free")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if sequence_group is not None:
        query, key, value = (_all_tokens(x, sequence_group) for x in (query, key, value))
    window, gqa = kwargs.get("sliding_window"), query.shape[1] != key.shape[1]
    # split, whose backward is one cat; that of a slice fills a whole row with zeros
    queries, keys, values = (
        x[0].transpose(0, 1).split([run.tokens for run in packed_runs]) for x in (query, key, value)
    )
    outputs = []
    for i, run in enumerate(packed_runs):
        if run.prompt_run is None:
            q, k, v = (x[i].unflatten(0, (run.count, run.length)) for x in (queries, keys, values))
        else:
            k, v = (_take(torch.cat([x[run.prompt_run], x[i]]), run.places) for x in (keys, values))
            q = _take(queries[i], run.places[:, -run.length :] - len(queries[run.prompt_run]))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (count, H, length, D); keys (count, H_kv, P + length, D)
        mask = None
        if window is not None and k.shape[2] > window:
            position = torch.arange(k.shape[2], device=q.device)
            distance = position[-run.length :, None] - position[None, :]
            mask = (distance >= 0) & (distance < window)
        elif run.prompt_run is not None:
            mask = causal_lower_right(run.length, k.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, is_causal=mask is None, enable_gqa=gqa)
        out = out.transpose(1, 2).flatten(0, 1)  # (count * length, H, D)
        outputs.append(out if run.real is None else _take(out, run.real))
    output = torch.cat(outputs)  # (N, H, D)
    return (output if sequence_group is None else _all_heads(output, sequence_group))[None], None


def _all_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(1, H / n, N, D), this rank's heads, from (1, H, N / n, D), its tokens. Fewer heads than n, of keys and values,
    are repeated; so are those whose number n does not divide."""
    n, H = group.size(), x.shape[1]
    x = x[0].repeat_interleave(n // math.gcd(n, H), 0)
    return all_to_all(x.unflatten(0, (n, -1)), group).transpose(0, 1).flatten(1, 2)[None]


def _all_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(N / n, H, D), this rank's tokens, from (N, H / n, D), its heads."""
    return all_to_all(x.unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)


def _take(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x[places] for x (n, H, D); the backward of an embedding is twice as fast on a CPU as that of an index."""
    return F.embedding(places, x.flatten(1)).unflatten(-1, x.shape[1:])


ALL_ATTENTION_FUNCTIONS.register("packed_sdpa", packed_sdpa)
ALL_MASK_ATTENTION_FUNCTIONS.register("packed_sdpa", sdpa_mask)


# ---- log-probs without full logits ---------------------------------------------------------------


NEVER = -1e30  # logit of a token that is not sampled: its probability is 0, and 0 x -1e30 is 0, where 0 x -inf is NaN
CANDIDATES = 1024  # a nucleus is looked for among so many likeliest tokens first: to sort all takes ten times as long


@torch.no_grad()
def least_kept(z: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """The least of the logits z (N, V) that sampling keeps, (N, 1): of the top_k likeliest tokens (below 1: of all) the
    fewest likeliest that have top_p of their probability. Engines choose so, in this order, after the temperature. All
    tokens that tie with the last one are kept here; an engine may drop some of them."""
    V, least = z.shape[-1], z.new_full((len(z), 1), -torch.inf)
    if 0 < top_k < V:
        least = z.topk(top_k).values[:, -1:]
    if top_p < 1:
        z = z.masked_fill(z < least, NEVER)
        total, ranked = z.logsumexp(-1, keepdim=True), z.topk(min(CANDIDATES, V)).values
        while ranked.shape[-1] < V and ((ranked - total).exp().sum(-1) < top_p).any():
            ranked = z.topk(min(8 * ranked.shape[-1], V)).values
        before_last = ((ranked - total).exp().cumsum(-1) < top_p).sum(-1, keepdim=True)
        least = torch.maximum(least, ranked.gather(-1, before_last.clamp(max=ranked.shape[-1] - 1)))
    return least


class LinearLogProbs(torch.autograd.Function):
    """Log-prob of y and entropy under p = softmax(h W^T / temperature), a chunk of tokens at a time; sum_v p_v^2 too,
    without gradient, if asked for.

    Forward keeps log-sum-exp and entropy per token; backward recomputes each chunk's logits. With z = h W^T / T:
    d logp / dz = onehot(y) - p and d H / dz = -p (log p + H).

    With top_p or top_k p is renormalised over the tokens that `least_kept` leaves; the gradient takes them as fixed.
    The sampler kept y, and so all that is likelier: where y is not among these tokens, by rounding or after an update,
    all down to y are taken. The last result is 1 there, else 0.
    """

    @staticmethod
    def forward(ctx, h, weight, y, inv_temperature, chunk, sum_pi_squared=False, top_p=1.0, top_k=-1):
        # h (N, D), weight (V, D), y (N,)
        dtype = torch.promote_types(h.dtype, torch.float32)
        logp, entropy, lse = (torch.empty(len(h), dtype=dtype, device=h.device) for _ in range(3))
        squares = torch.empty_like(lse) if sum_pi_squared else None
        least, outside = (torch.empty_like(lse) if top_p < 1 or top_k > 0 else None for _ in range(2))
        for i in range(0, len(h), chunk):
            s = slice(i, i + chunk)
            z = torch.mm(h[s], weight.T).to(dtype).mul_(inv_temperature)  # (chunk, V)
            z_y = z.gather(-1, y[s, None])
            if least is not None:
                kept = least_kept(z, top_p, top_k)
                outside[s], least[s] = (z_y < kept)[:, 0], torch.minimum(z_y, kept)[:, 0]
                z.masked_fill_(z < least[s, None], NEVER)
            lse[s] = torch.logsumexp(z, -1)
            logp[s] = z_y[:, 0] - lse[s]
            p = z.sub(lse[s, None]).exp_()
            entropy[s] = lse[s] - torch.einsum("nv,nv->n", p, z)
            if sum_pi_squared:
                squares[s] = torch.einsum("nv,nv->n", p, p)
        ctx.save_for_backward(h, weight, y, lse, entropy, least)
        ctx.inv_temperature, ctx.chunk = inv_temperature, chunk
        constants = [x for x in (squares, outside) if x is not None]
        ctx.mark_non_differentiable(*constants)
        return logp, entropy, *constants

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy, *_):
        h, weight, y, lse, entropy, least = ctx.saved_tensors
        dh = torch.empty_like(h)
        dw = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        for i in range(0, len(h), ctx.chunk):
            s = slice(i, i + ctx.chunk)
            z = torch.mm(h[s], weight.T).to(lse.dtype).mul_(ctx.inv_temperature)
            if least is not None:
                z.masked_fill_(z < least[s, None], NEVER)
            log_p = z.sub_(lse[s, None])
            dz = log_p.add(entropy[s, None]).mul_(-grad_entropy[s, None]).sub_(grad_logp[s, None]).mul_(log_p.exp_())
            dz.scatter_add_(1, y[s, None], grad_logp[s, None]).mul_(ctx.inv_temperature)
            dz = dz.to(h.dtype)
            torch.mm(dz, weight, out=dh[s])
            if dw is not None:
                dw += dz.T @ h[s]
        return dh, None if dw is None else dw.to(weight.dtype), *[None] * 6


def logits_are_a_plain_product(model: PreTrainedModel) -> bool:
    """False where the head adds a bias or the model caps or scales its logits: these go through its own forward."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    changes = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "unpadded_vocab_size")
    changes += ("logit_scale", "logits_scaling", "logits_mup_width_multiplier", "lm_head_multiplier")
    return head.bias is None and all(getattr(config, name, None) in (None, 1.0) for name in changes)


def token_log_probs(
    self: PreTrainedModel,
    inputs: dict,
    select: torch.Tensor,
    y: torch.Tensor,
    temperature: float,
    sum_pi_squared: bool = False,
    top_p: float = 1.0,
    top_k: int = -1,
) -> tuple[torch.Tensor, ...]:
    """Bound to a model by `load_model`: what `LinearLogProbs` gives for token y[i] after position select[i], each (n,).

    inputs: what the decoder takes, over (b, l) positions; select (n,): places among the b * l, some of them repeatedly.
    """
    if logits_are_a_plain_product(self) and self.get_decoder() is not self:
        h = self.get_decoder()(**inputs, use_cache=False).last_hidden_state
        h = F.embedding(select, h.flatten(0, 1))  # (n, D); its backward is twice as fast on a CPU as that of an index
        weight = self.get_output_embeddings().weight
        h = h.to(weight.dtype)  # Mamba-2 keeps it in fp32
        return LinearLogProbs.apply(h, weight, y, 1 / temperature, 256, sum_pi_squared, top_p, top_k)
    logits = self(**inputs, use_cache=False).logits.flatten(0, 1)[select]  # (n, V)
    z, constants = logits.to(torch.promote_types(logits.dtype, torch.float32)).div(temperature), []
    if top_p < 1 or top_k > 0:
        kept, z_y = least_kept(z, top_p, top_k), z.detach().gather(-1, y[:, None])
        constants = [(z_y < kept)[:, 0].to(z.dtype)]
        z = z.masked_fill(z < torch.minimum(z_y, kept), NEVER)
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    if sum_pi_squared:
        constants.insert(0, p.detach().square().sum(-1))
    return log_p.gather(-1, y[:, None])[:, 0], -(p * log_p).sum(-1), *constants


def response_log_probs(
    model: PreTrainedModel,
    batch: DataProto,
    temperature: float,
    *,
    padding_free: bool = True,
    share_prompts: bool = True,
    sum_pi_squared: bool = False,
    top_p: float = 1.0,
    top_k: int = -1,
    row_group: RowGroup | None = None,
) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropies of the policy's own tokens, under the distribution that they were sampled from.

    Args:
        batch: `input_ids`, `attention_mask`, `position_ids` (B, L), `responses`, `response_mask` (B, T).
        padding_free, share_prompts: as `load_model` says, if also asked for here.
        sum_pi_squared: also the sum over the vocabulary of the squared probabilities, without gradient, for the
            optimal token baseline (arXiv 2602.07078).
        top_p, top_k: what sampling kept, as in `LinearLogProbs`. Not for a reference, whose log-prob of a token that it
            would not keep is -inf: KL(policy as sampled || whole reference) is finite and has the same gradient.
        row_group: ranks that run their batches as one (packed_sdpa only): a collective, forward and backward. A rank's
            batch may be empty, but not all of them.

    Returns:
        (log_probs, entropy), then sum_pi_squared if asked for, then, with top_p or top_k, 1 at the tokens that these
        would not have kept; each (B, T), zero where response_mask is.
    """

    def forward(inputs: dict, select: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return model.token_log_probs(inputs, select, y, temperature, sum_pi_squared, top_p, top_k)

    return _of_responses(model, batch, forward, padding_free, share_prompts, row_group)


@torch.no_grad()
def batched_log_probs(
    model: PreTrainedModel,
    batch: DataProto,
    temperature: float,
    micro_batch_tokens: int,
    *,
    padding_free: bool = True,
    share_prompts: bool = True,
    sum_pi_squared: bool = False,
    top_p: float = 1.0,
    top_k: int = -1,
    row_group: RowGroup | None = None,
) -> tuple[torch.Tensor, ...]:
    """(log_probs, entropy) or (log_probs, entropy, sum_pi_squared) of `response_log_probs` of a whole batch, without
    gradients, in micro-batches. A collective."""
    share_prompts = share_prompts and padding_free and model.share_prompts
    padding_free = padding_free and model.padding_free
    options = {"padding_free": padding_free, "share_prompts": share_prompts, "row_group": row_group}
    micro_batches, rows = prepare_dynamic_batch(batch, micro_batch_tokens, **options)
    options |= {"sum_pi_squared": sum_pi_squared, "top_p": top_p, "top_k": top_k}
    parts = [response_log_probs(model, micro, temperature, **options)[: 2 + sum_pi_squared] for micro in micro_batches]
    return tuple(restore_dynamic_batch(torch.cat(tensors), rows) for tensors in zip(*parts))


ROW_TOLERANCE = {  # nats, mean over tokens: where the rows beside a row change; and against the row alone
    torch.float32: (1e-4, 1e-3),  # another order of sums is 1e-7 of them, and a leak 1e-3 to 1 (docs/models.md)
    torch.bfloat16: (0.02, 0.25),  # shapes are the same, or other ones: 0.04 in SmolLM2-135M; 0.25 is sync_weights' too
}


@torch.no_grad()
def check_rows(
    model: PreTrainedModel,
    batch: DataProto,
    temperature: float,
    micro_batch_tokens: int,
    compute_dtype: torch.dtype,
    row_group: RowGroup | None = None,
) -> None:
    """Measures on the first micro-batch that the log-probs of a row are its own. A collective, of 6 forwards or so.

    Every other row gets another response, in tensors of the same shapes, which must not change the rows between; and
    four rows are computed alone and not packed, by transformers' own attention.

    Raises:
        InputError: they are not, by more than ROW_TOLERANCE on some rank.
    """
    [micro, *_], _ = prepare_dynamic_batch(batch, micro_batch_tokens, **layout(model), row_group=row_group)
    forward = partial(response_log_probs, model, temperature=temperature, row_group=row_group)
    trained = micro.batch["response_mask"].bool()
    T = trained.shape[1]
    ids = micro.batch["input_ids"].clone()
    ids[1::2, -T:] = ids[1::2, -T:].flip(1)
    together = forward(micro)[0]
    beside = forward(DataProto.from_dict(tensors={**micro.batch, "input_ids": ids}))[0] - together
    trained[1::2] = False
    differences = [beside[trained]]

    counts, own = [len(micro)], 0  # rows of each rank of the group, where a rank may have none of a micro-batch
    if row_group is not None:
        counts, own = all_gather_lists(counts, row_group.ranks), row_group.ranks.rank()
    alone = []
    for i, owner in itertools.product(range(4), range(len(counts))):  # as many forwards on each rank
        owner = owner if counts[owner] else counts.index(max(counts))
        rows = [i * len(micro) // 4] if owner == own else []
        row = forward(micro[rows], padding_free=row_group is not None)[0] - together[rows]
        alone.append(row[micro.batch["response_mask"][rows].bool()])
    differences.append(torch.cat(alone))
    means = all_gather_lists([[float(x.abs().mean()) if len(x) else 0.0 for x in differences]])
    whats = ("change with the rows beside it", "are not those of the row alone")
    for mean, allowed, what in zip(torch.tensor(means).amax(0).tolist(), ROW_TOLERANCE[compute_dtype], whats):
        if not mean <= allowed:
            mend = "set --no-padding-free" if model.padding_free else "this model cannot be trained here"
            by = f"by {mean:.2g} nats (allowed: {allowed:g})"
            kind = type(model).__name__.removeprefix("FSDP")
            raise InputError(f"{kind}: the log-probs of a row {what}, {by}; {mend}")


# ---- values and scores ---------------------------------------------------------------------------


def value_head(model: PreTrainedModel) -> torch.nn.Module:
    """The last layer of a token or sequence classifier: `score`, which a few older architectures call `classifier`."""
    return model.score if hasattr(model, "score") else model.classifier


def token_values(self: PreTrainedModel, inputs: dict, select: torch.Tensor) -> torch.Tensor:
    """Bound to a model by `load_critic` and `load_reward_model`: the head's output (n,) at the selected positions.

    inputs: what the decoder takes, over (b, l) positions; select (n,): places among the b * l, some of them repeatedly.
    """
    h = self.base_model(**inputs, use_cache=False).last_hidden_state
    h = F.embedding(select, h.flatten(0, 1))  # (n, D)
    values = value_head(self)(h).sum(1)  # one output; [:, 0] would be a view, which FSDP's hooks warn of
    return values.to(torch.promote_types(values.dtype, torch.float32))


def response_values(
    model: PreTrainedModel,
    batch: DataProto,
    *,
    padding_free: bool = True,
    share_prompts: bool = True,
    row_group: RowGroup | None = None,
) -> torch.Tensor:
    """The critic's values (B, T), zero where response_mask is; batch and options as in `response_log_probs`.

    V_t is read where token t of the response is predicted: it is the value of the state before that token.
    """

    def forward(inputs: dict, select: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (model.token_values(inputs, select),)

    return _of_responses(model, batch, forward, padding_free, share_prompts, row_group)[0]


@torch.no_grad()
def batched_values(
    model: PreTrainedModel,
    batch: DataProto,
    micro_batch_tokens: int,
    *,
    padding_free: bool = True,
    share_prompts: bool = True,
    row_group: RowGroup | None = None,
) -> torch.Tensor:
    """`response_values` of a whole batch without gradients, in micro-batches. A collective."""
    share_prompts = share_prompts and padding_free and model.share_prompts
    padding_free = padding_free and model.padding_free
    options = {"padding_free": padding_free, "share_prompts": share_prompts, "row_group": row_group}
    micro_batches, rows = prepare_dynamic_batch(batch, micro_batch_tokens, **options)
    parts = [response_values(model, micro, **options) for micro in micro_batches]
    return restore_dynamic_batch(torch.cat(parts), rows)


def reward_model_scores(
    model: PreTrainedModel,
    rm_tokenizer: PreTrainedTokenizerBase,
    batch: DataProto,
    policy_tokenizer: PreTrainedTokenizerBase,
    micro_batch_tokens: int,
) -> torch.Tensor:
    """The reward model's score (B,) float32 of each conversation: `raw_prompt` and then the response as a message.

    The response is decoded by the policy's tokenizer, and the whole goes through the reward model's own chat template
    and tokenizer; text that spells one of its special tokens stays text. A row without a trained token scores 0. A
    collective; all ranks have the same number of rows.
    """
    responses, trained = batch.batch["responses"], batch.batch["response_mask"].any(1)
    attended = batch.batch["attention_mask"][:, -responses.shape[1] :].bool()
    conversations, defuse = [], Defuse(rm_tokenizer)
    for i, prompt in enumerate(batch.non_tensor_batch["raw_prompt"]):
        text = policy_tokenizer.decode(responses[i][attended[i]], skip_special_tokens=True)
        messages = defuse([*prompt, {"role": "assistant", "content": text}])
        try:
            text = rm_tokenizer.apply_chat_template(messages, tokenize=False)
        except (jinja2.TemplateError, TypeError) as error:
            raise InputError(f"--reward-model: its chat template refuses {prompt!r:.200}: {error}") from error
        conversations.append(rm_tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = _conversation_batch(conversations, responses.device)
    values = batched_values(model, rows, micro_batch_tokens)  # (B, 1)
    return values[:, 0].float().masked_fill(~trained, 0)


def _conversation_batch(conversations: list[list[int]], device: torch.device) -> DataProto:
    """Left-padded rows, each before one response token that is not attended to: its value is that of the whole row.

    transformers' own pooling is not used: it reads the last token that differs from the pad token, which is the wrong
    one where the pad token is also the end of a message.
    """
    L = max(len(ids) for ids in conversations)
    ids = torch.tensor([[0] * (L - len(row)) + row + [0] for row in conversations], device=device)  # (B, L + 1)
    first = L - torch.tensor([len(row) for row in conversations], device=device)[:, None]
    column = torch.arange(L + 1, device=device)
    tensors = {
        "input_ids": ids,
        "attention_mask": ((column >= first) & (column < L)).long(),
        "position_ids": (column - first).clamp(min=0),
        "responses": ids[:, L:],
        "response_mask": torch.ones_like(ids[:, L:]),
    }
    return DataProto.from_dict(tensors=tensors)


# ---- from a batch to a forward and back ----------------------------------------------------------


def _of_responses(
    model: PreTrainedModel,
    batch: DataProto,
    forward: Callable[[dict, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    padding_free: bool,
    share_prompts: bool,
    row_group: RowGroup | None,
) -> tuple[torch.Tensor, ...]:
    """The results of `forward(inputs, select, y)`, each (n,) for the trained tokens y (n,), as rows (B, T)."""
    responses = batch.batch["responses"]
    if row_group is None:
        inputs, select, target = _response_inputs(model, batch, padding_free, share_prompts)
        results = forward(inputs, select, responses.flatten()[target])
    else:
        results, target = _of_group(model, batch, forward, share_prompts, row_group)
    return tuple(_to_rows(x, target, responses) for x in results)


def _of_group(
    model: PreTrainedModel, batch: DataProto, forward: Callable, share_prompts: bool, row_group: RowGroup
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(results, target) for this rank's trained tokens. All rows of the group are one packed row.

    Either each rank runs a share of its tokens, and a result then goes from the rank that ran the token to the one that
    owns the row; or each runs all of them with a share of the weights, and takes the results of its own rows.
    """
    group, rank = row_group.ranks, row_group.ranks.rank()
    fields = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
    rows = batch.select(fields, [])
    rows.batch["rank"] = torch.full((len(rows),), rank, device=batch.batch["responses"].device)
    rows = rows.all_gather(group)
    inputs, select, target = _response_inputs(model, rows, True, share_prompts)
    y, T = rows.batch["responses"].flatten()[target], rows.batch["responses"].shape[1]
    owner = rows.batch["rank"][target // T]  # (n,)
    own, before = owner == rank, (rows.batch["rank"] < rank).sum() * T  # before: places of other ranks' rows
    if row_group.split == "weights":
        results = torch.stack(forward(inputs, select, y), 1)
        return TakeOwn.apply(results, own.nonzero()[:, 0], group).unbind(1), target[own] - before

    inputs, tokens = _share_of_tokens(inputs, group)
    here = select // tokens == rank  # (n,): this rank runs it
    results = torch.stack(forward(inputs, select[here] - rank * tokens, y[here]), 1)
    runner = select[own] // tokens
    send, receive = (ranks.bincount(minlength=group.size()).tolist() for ranks in (owner[here], runner))
    results = all_to_all(results, group, send, receive)
    return results.unbind(1), target[own][runner.argsort(stable=True)] - before


def _share_of_tokens(inputs: dict, group: dist.ProcessGroup) -> tuple[dict, int]:
    """The inputs of this rank, of equally many tokens on each, and how many; the last rank's end with padding."""
    n, N = group.size(), inputs["input_ids"].shape[1]
    padding = -N % n
    tensors = {name: F.pad(inputs[name], (0, padding)) for name in ("input_ids", "position_ids")}
    tensors = {name: x.chunk(n, 1)[group.rank()] for name, x in tensors.items()}
    runs = inputs["packed_runs"] + [PackedRun(padding, 1, padding, None, None, None)] * (padding > 0)
    return inputs | tensors | {"packed_runs": runs, "sequence_group": group}, (N + padding) // n


def _response_inputs(
    model: PreTrainedModel, batch: DataProto, padding_free: bool, share_prompts: bool
) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """(inputs, select, target): what the decoder takes; for each trained token the place (n,), in the decoder's layout,
    that predicts it; and its own place (n,) in the flattened response_mask.

    A row may hold several sequences end to end (lib/agent_loop.py): one begins wherever position_ids is 0.
    """
    padding_free = padding_free and model.padding_free
    fields = ("input_ids", "attention_mask", "position_ids", "response_mask")
    ids, attention, positions, trained = (batch.batch[name] for name in fields)
    attention, trained = attention.bool(), trained.bool()
    L, T = ids.shape[1], trained.shape[1]
    target = trained.flatten().nonzero()[:, 0]  # (n,)
    row, column = target // T, L - T - 1 + target % T  # token t of the response is predicted one place to its left
    if len(target):  # nothing depends on what stands behind the last token of a row that predicts
        predicts = torch.zeros_like(attention)
        predicts[row, column] = True
        attention = attention & (predicts.flip(1).cumsum(1).flip(1) > 0)
    owner = own = torch.arange(len(ids), device=ids.device)  # (B,) the row whose prompt stands for this row's
    if share_prompts and padding_free and model.share_prompts:
        owner = _prompt_owners(prompt_groups(batch), attention.any(1) & (positions[:, L - T] > 0))
    shared = owner.bincount(minlength=len(ids))[owner] > 1  # (B,)
    attention[:, : L - T] &= (owner == own)[:, None]
    first = attention & (positions == 0)
    first[:, L - T] |= attention[:, L - T] & shared  # a response to a shared prompt is a sequence of its own

    token = attention.flatten().nonzero()[:, 0]  # (N,)
    sequence = first.flatten()[token].cumsum(0) - 1  # (N,)
    lengths = sequence.bincount().tolist()  # (S,)
    prompt = _prompts_of_sequences(first.nonzero().tolist(), owner.tolist(), shared.tolist(), L - T)  # (S,)
    # in one run: whole sequences of equal length; responses of about equal length to prompts of equal length
    kinds = [(0, n) if p is None else (lengths[p], -(-n // 16)) for n, p in zip(lengths, prompt)]
    order = sorted(range(len(kinds)), key=lambda i: kinds[i])
    rank = torch.tensor(order, device=ids.device).argsort()
    token = token[rank[sequence].argsort(stable=True)]
    inputs = {"input_ids": ids.flatten()[token][None], "position_ids": positions.flatten()[token][None]}  # (1, N)
    place = torch.zeros_like(ids).flatten()  # (B * L,)
    place[token] = torch.arange(len(token), device=ids.device)
    row = torch.where(column < L - T, owner[row], row)
    select = place[row * L + column]
    if not padding_free:
        [places], back = sequence_rows(order, lengths, prompt, ids.device, one_size=True)
        start = inputs["position_ids"][0, places[:, :1]]
        positions = start + torch.arange(places.shape[1], device=ids.device)  # go on where there is padding
        return {"input_ids": inputs["input_ids"][0, places], "position_ids": positions}, back[select], target
    if model.takes_rows:
        inputs["sequence_rows"] = sequence_rows(order, lengths, prompt, ids.device)
    if model.config._attn_implementation.startswith("flash"):
        cu_seqlens = F.pad(torch.tensor([lengths[i] for i in order], device=ids.device).cumsum(0), (1, 0)).int()
        inputs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        inputs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    else:
        inputs["packed_runs"] = _packed_runs(order, kinds, lengths, prompt, ids.device)
        # transformers passes a 4-D mask on untouched; without one it would build a dense (N, N) mask
        inputs["attention_mask"] = torch.empty(1, 1, 1, 1, device=ids.device)
    return inputs, select, target


def _prompt_owners(group: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """(B,): for each row that answers its prompt the first such row of its group; for the others the row itself."""
    owner, first_of = list(range(len(group))), {}
    for row, (number, answer) in enumerate(zip(group.tolist(), answers.tolist())):
        if answer:
            owner[row] = first_of.setdefault(number, row)
    return torch.tensor(owner, device=group.device)


def _prompts_of_sequences(
    starts: list[list[int]], owner: list[int], shared: list[bool], column: int
) -> list[int | None]:
    """For each sequence, given as [row, column] of its first token, the number of the shared prompt it answers, if any;
    `column` is where responses begin."""
    prompt_of = {row: i for i, (row, start) in enumerate(starts) if start < column}
    return [prompt_of[owner[row]] if start == column and shared[row] else None for row, start in starts]


def _packed_runs(
    order: list[int],
    kinds: list[tuple[int, int]],
    lengths: list[int],
    prompt: list[int | None],
    device: torch.device,
) -> list[PackedRun]:
    """The runs of sequences of one kind, which stand in this order; a kind is (tokens of the shared prompt, length)."""
    runs, run_of, begin = [], {}, {}  # of each sequence: the number of its run, the place in its run
    for (P, _), group in itertools.groupby(order, key=lambda i: kinds[i]):
        members = list(group)
        sizes = [lengths[i] for i in members]
        begin |= dict(zip(members, itertools.accumulate(sizes, initial=0)))
        run_of |= dict.fromkeys(members, len(runs))
        prompt_run = places = real = None
        if P:
            prompt_run = run_of[prompt[members[0]]]
            column, size = torch.arange(max(sizes)), torch.tensor(sizes)[:, None]
            first = torch.tensor([[begin[prompt[i]], runs[prompt_run].tokens + begin[i]] for i in members])
            places = torch.cat([first[:, :1] + torch.arange(P), first[:, 1:] + column.minimum(size - 1)], 1).to(device)
            real = (column < size).flatten().nonzero()[:, 0].to(device)
        runs.append(PackedRun(sum(sizes), len(members), max(sizes), prompt_run, places, real))
    return runs


def _to_rows(x: torch.Tensor, target: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, T), shaped as `like`, from the values at the trained tokens (n,); zero elsewhere."""
    return x.new_zeros(like.numel()).index_copy(0, target, x).view_as(like)
