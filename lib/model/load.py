"""Loads policy, reference, critic and reward model. Also what happens to a model before `shard_model`: freeze, LoRA.
Dropout is off everywhere, so that sampling and training compute the same function."""

import logging
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from lib import InputError, is_first_on_node
from lib.args import check_model_path
from lib.data import local_copy
from lib.distributed import TENSOR_PARALLEL_STYLES, enter_stage, fsdp_modules, layer_plan
from lib.model.activations import keeping_activations_on_cpu, recompute_layers
from lib.model.attention import attention_and_packing, lay_out, other_layers
from lib.model.log_probs import logits_are_a_plain_product, token_hidden_states, token_log_probs
from lib.model.routing import ROUTERS, hook_routers
from lib.model.values import token_values, value_head
from lib.model.vision import family_of, prompt_logits, tower_layers, value_class, vision_names

COMPILER = "inductor"  # of torch.compile; tests take one that is sooner done

disable_progress_bar()  # transformers would show one loading bar per rank
# each rank would print a table of missing and unexpected weights; `_from_pretrained` says it in one line
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())


def split_gguf(path: str, *, weights: bool = False) -> tuple[str, dict[str, str]]:
    """transformers reads `folder/model.gguf` as the folder plus the keyword `gguf_file`. A URL's copy is local."""
    path = local_copy(path, weights=weights)
    if path.endswith(".gguf"):
        return str(Path(path).parent), {"gguf_file": Path(path).name}
    return path, {}


def check_sequence_parallel(path: str, size: int, *, flag: str = "--model", trust_remote_code: bool = False) -> None:
    """Raises InputError if `size` ranks cannot split the heads, or if not only attention mixes tokens."""
    if size > 1:
        split, name = f"--sequence-parallel-size {size}", f"{flag} {path}"
        config = _config_to_split(split, name, config_of(path, flag, trust_remote_code), states=False)
        _check_divides(split, size, f"attention heads of {name}", getattr(config, "num_attention_heads", 0))


def check_tensor_parallel(path: str, size: int, *, flag: str = "--model", trust_remote_code: bool = False) -> None:
    """Raises InputError if `size` ranks cannot split the heads or experts, or if transformers has no tensor-parallel
    plan for the model, or one with styles that `shard_model` does not know."""
    if size == 1:
        return
    split, name = f"--tensor-parallel-size {size}", f"{flag} {path}"
    config = _config_to_split(split, name, config_of(path, flag, trust_remote_code), states=True)
    styles = set(layer_plan(config).values()) or {"no"}
    if unknown := styles - TENSOR_PARALLEL_STYLES.keys():
        raise InputError(f"{split}: {name} has {min(unknown)} layers in its plan: drop the flag")
    heads = [config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads]
    _check_divides(split, size, f"key and value heads of {name}", *sorted(heads))
    if "experts" in styles:
        experts = [getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
        _check_divides(split, size, f"experts of {name}", *filter(None, experts))


def check_routing_replay(path: str, *, trust_remote_code: bool = False) -> None:
    """Raises InputError for a model whose experts cannot be replayed."""
    kind = config_of(path, "--model", trust_remote_code).get_text_config().model_type
    if kind not in ROUTERS:
        known = ", ".join(sorted(name.removesuffix("_text") for name in ROUTERS))
        raise InputError(f"--routing-replay: --model {path} is of type {kind}, it knows those of {known}: drop it")


def takes_varlen(path: str, *, trust_remote_code: bool = False) -> bool:
    """Whether FlashAttention has kernels for the model's heads, and no token sees later ones, as some images' do."""
    config = config_of(path, "--model", trust_remote_code)
    text, family = config.get_text_config(), family_of(config)
    size = getattr(text, "head_dim", None) or text.hidden_size // getattr(text, "num_attention_heads", 1)
    return size % 8 == 0 and size <= 256 and not (family and family.bidirectional)


def _config_to_split(split: str, name: str, config: PreTrainedConfig, *, states: bool) -> PreTrainedConfig:
    """The text model's config. Raises InputError unless its rows can be packed, and for layers that carry a state
    unless `states`."""
    flag = split.partition(" ")[0]
    if family_of(config):
        raise InputError(f"{split}: {name} takes images, which are not split over ranks; drop {flag}")
    reason = attention_and_packing(config, "packed_sdpa")[1]
    if reason is None and other_layers(config) and not states:
        reason = "it has layers that carry a state from token to token"
    if reason:
        raise InputError(f"{split}: {name} cannot be split: {reason}; drop {flag}")
    return config.get_text_config()


def _check_divides(split: str, size: int, what: str, *numbers: int) -> None:
    if any(n == 0 or n % size for n in numbers):
        raise InputError(f"{split}: must divide the {numbers[0]} {what}")


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """An error of the block, such as a network's or that of an unknown architecture, becomes an InputError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"{what}: {str(error).splitlines()[0]}") from error


def config_of(path: str, flag: str, trust_remote_code: bool) -> PreTrainedConfig:
    folder, gguf = split_gguf(path)
    with _one_line(f"{flag} {path}: cannot load its config"):
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **gguf)


def load_processor(path: str, *, trust_remote_code: bool = False) -> transformers.ProcessorMixin | None:
    """The processor of `path`, which makes tokens and tensors of images. None for a text model, and for a model without
    one, such as a .gguf file: it then runs on text alone."""
    if family_of(config_of(path, "--model", trust_remote_code)) is None:
        return None
    folder, files = local_copy(path, weights=False), ("processor_config.json", "preprocessor_config.json")
    with _one_line(f"--model {path}: cannot load its processor"):
        if not any(cached_file(folder, name, _raise_exceptions_for_missing_entries=False) for name in files):
            return None
        try:
            processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except ImportError as error:
            raise ValueError("it needs torchvision: install it") from error
    processor.tokenizer.init_kwargs.pop("local_files_only", None)  # as load_tokenizer
    return processor


def load_tokenizer(path: str, *, trust_remote_code: bool = False, flag: str = "--model") -> PreTrainedTokenizerBase:
    """The tokenizer of `path`; a missing pad token becomes the eos token. Raises InputError."""
    folder, gguf = split_gguf(path)
    with _one_line(f"{flag} {path}: cannot load its tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **gguf)
    tokenizer.init_kwargs.pop("local_files_only", None)  # exports would differ by whether there was a network
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@dataclass(frozen=True)
class LoadOptions:
    """What the load functions take by name."""

    dtype: torch.dtype = torch.float32  # of the weights: AdamW on a checkpoint's bf16 weights would lose updates
    attn_implementation: str = "packed_sdpa"
    share_prompts: bool = True  # where the model allows it: its own attribute may be False
    gradient_checkpointing: float = 0  # the share of the layers that the backward pass recomputes; True: all
    offload_activations: bool = False  # what autograd keeps for the backward pass waits in CPU memory
    trust_remote_code: bool = False
    on_meta: bool = False
    """read no weights yet: `shard_model` reads only what its rank holds, so that no process holds the whole model. If
    transformers has to convert the weights, they are all read now"""


def load_model(path: str, *, flag: str = "--model", **options: Any) -> PreTrainedModel:
    """A causal LM from a Hugging Face id, a folder or a .gguf file. options: those of `LoadOptions`. FSDP treats its
    methods `token_log_probs`, `token_hidden_states` and, of a vision model, `prompt_logits` as forwards."""
    how = LoadOptions(**options)
    model, missing = _from_pretrained(AutoModelForCausalLM, path, flag, how)
    model = _prepare(model, missing, f"{flag} {path}", token_log_probs, how)
    model.token_hidden_states = types.MethodType(token_hidden_states, model)
    model.fsdp_forward_methods += ("token_hidden_states",)
    if family_of(model.config) is not None:
        if not logits_are_a_plain_product(model):
            raise InputError(f"{flag} {path}: vision models with capped or scaled logits are not supported")
        model.prompt_logits = types.MethodType(prompt_logits, model)
        model.fsdp_forward_methods += ("prompt_logits",)
    return model


def load_critic(path: str, **options: Any) -> PreTrainedModel:
    """A token classifier with one output, the value, and the method `token_values`. `path` may also be a critic, a
    reward model, or a causal LM: its value head starts at zero, as a random one would differ from rank to rank.
    Raises InputError: the architecture has no token classification, or the head has another number of outputs."""
    flag, how = "--critic-model", LoadOptions(**options)
    # classifier_dropout must be set: transformers' default drops 10 % of the head's input
    settings = {"num_labels": 1, "classifier_dropout": 0.0}
    model, missing = _from_pretrained(transformers.AutoModelForTokenClassification, path, flag, how, **settings)
    head = value_head(model)
    new = {name for name in missing if model.get_submodule(name.rpartition(".")[0]) is head}
    for name in new:  # also if the rest is on the meta device
        zeros = torch.zeros(model.get_parameter(name).shape, dtype=how.dtype)
        setattr(head, name.rpartition(".")[2], torch.nn.Parameter(zeros))
    return _prepare(model, missing - new, f"{flag} {path}", token_values, how)


def load_reward_model(path: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A frozen sequence classifier with one output and the method `token_values`, and its own tokenizer. Raises
    InputError: the model has no head (a causal LM), a head with more than one output, or no chat template."""
    flag, how = "--reward-model", LoadOptions(**options)
    model, missing = _from_pretrained(transformers.AutoModelForSequenceClassification, path, flag, how)
    model = _prepare(model, missing, f"{flag} {path}", token_values, how).requires_grad_(False).eval()
    if model.config.num_labels != 1:
        raise InputError(f"{flag} {path}: it has {model.config.num_labels} outputs; give a model with one, the score")
    tokenizer = load_tokenizer(path, trust_remote_code=how.trust_remote_code, flag=flag)
    if not tokenizer.chat_template:
        raise InputError(f"{flag} {path}: its tokenizer has no chat template to read a conversation by")
    return model, tokenizer


def _from_pretrained(auto_class, path: str, flag: str, how: LoadOptions, **settings) -> tuple[PreTrainedModel, set]:
    """(the model, with its config changed by `settings`; the names of the parameters that `path` did not hold)."""
    check_model_path(path, flag)
    folder, gguf = split_gguf(path, weights=True)
    enter_stage(f"loading {flag} {path}", limited=False)  # perhaps a download; `shard_model` ends this stage
    with _one_line(f"{flag} {path}: cannot load it"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=how.trust_remote_code, **gguf)
        auto_class = class_of(auto_class, config)
        parts = (config, config.get_text_config(), *([config.vision_config] if family_of(config) else []))
        for part in parts:  # sampling and training must compute the same log-probs
            for name, value in vars(part).items():
                if ("dropout" in name or "jitter" in name or name.endswith("pdrop")) and isinstance(value, float):
                    setattr(part, name, 0.0)
        for name, value in settings.items():
            setattr(config, name, value)
        options: dict[str, Any] = {"dtype": how.dtype, "trust_remote_code": how.trust_remote_code}
        options["attn_implementation"], _ = attention_and_packing(config, how.attn_implementation)
        if how.on_meta and not gguf:
            model, missing = _meta_model(auto_class, folder, config, **options)
            if model is not None:
                return model, missing
            if is_first_on_node():
                print(f"{flag} {path}: its weights have to be converted: every process reads all of them", flush=True)
        # mismatched sizes are refused below, in one line
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = auto_class.from_pretrained(folder, config=config, **options, **gguf)
    for name, theirs, ours in info["mismatched_keys"]:
        raise InputError(f"{flag} {path}: its {name} is of shape {tuple(theirs)}, the model needs {tuple(ours)}")
    for param in model.parameters():  # not buffers: rotary tables stay fp32
        param.data = param.data.to(how.dtype)
    if gguf:  # loading has dequantized the weights; vLLM and an export must not take them for quantized
        vars(model.config).pop("quantization_config", None)
        for name in ("hf_quantizer", "quantization_method"):
            vars(model).pop(name, None)
    return model, set(info["missing_keys"])


def class_of(auto_class: Any, config: PreTrainedConfig) -> Any:
    """The auto class that makes this kind of model, of a text or a vision model."""
    if family_of(config) is None:
        return auto_class
    if auto_class is AutoModelForCausalLM:
        return transformers.AutoModelForImageTextToText
    if auto_class is transformers.AutoModelForTokenClassification:
        cls = value_class(transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])
        auto_class.register(type(config), cls, exist_ok=True)
    return auto_class


def _meta_model(auto_class, path: str, config: PreTrainedConfig, **options) -> tuple[PreTrainedModel | None, set[str]]:
    """(the model with its parameters on the meta device, the names of those that the files of `path` do not hold). The
    model is None if transformers would do more than read each weight by its name."""
    folder = path if Path(path).is_dir() else snapshot_download(path, allow_patterns=["model*.safetensors", "*.json"])
    if not any(Path(folder).glob("*.safetensors")) or hasattr(config, "quantization_config"):
        return None, set()
    with init_empty_weights(include_buffers=False):  # buffers, such as rotary tables, are computed, not read
        model = auto_class.from_config(config, **options)
    model.tie_weights()
    files: dict[str, Any] = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    tied, changes = model.all_tied_weights_keys, get_model_conversion_mapping(model)
    shapes = {name: weight.shape for name, weight in model.state_dict().items() if name not in tied}
    missing = shapes.keys() - files.keys()
    held = shapes.keys() - missing
    if (
        any(name.startswith(f"{model.base_model_prefix}.") for name in missing)
        or any(files[name].size != shapes[name] or len(files[name].chunks) > 1 for name in held)  # or in two files
        or any(name in files for name in tied)  # the file may hold another value than the weight it is tied to
        or any(change.rename_source_key(name)[1] for change in changes for name in files)
    ):
        return None, set()
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.weights_folder = folder
    return model, missing


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    decoder = model if family_of(model.config) is None else model.get_decoder()
    return [module for module in decoder.modules() if type(module).__name__ in set(model._no_split_modules)]


def fsdp_layer_classes(model: PreTrainedModel) -> set[str]:
    """The classes of FSDP's groups. A vision model's _no_split_modules has odd parts of towers."""
    if family_of(model.config) is None:
        return set(model._no_split_modules)
    return {type(layer).__name__ for layer in (*decoder_layers(model), *tower_layers(model))}


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles each layer but its attention, for packed rows: once for any number of tokens and any layout. Rows that
    are not packed, such as in hf rollouts, run as before."""
    for layer in decoder_layers(model):
        compiled = torch.compile(layer.forward, dynamic=True, backend=COMPILER)
        layer.forward = partial(_compiled_if_packed, layer.forward, compiled)


def fuse_layers(model: PreTrainedModel) -> None:
    """Fused kernels for a GPU (fused.py), in place, after `shard_model`. Without liger-kernel it only says so."""
    try:
        from lib.model.fused import fuse  # imports triton
    except ImportError as error:
        if is_first_on_node():
            print(f"note: layers are not fused: {error}", flush=True)
        return
    fuse(model)


def _compiled_if_packed(plain: Callable, compiled: Callable, *args, **kwargs):
    packed = not kwargs.keys().isdisjoint({"packed_runs", "packed_sequences", "cu_seq_lens_q"})
    return (compiled if packed else plain)(*args, **kwargs)


def freeze(model: PreTrainedModel, pattern: str) -> PreTrainedModel:
    """Freezes in place the parameters whose whole name the regular expression matches; of a vision model also "tower",
    "projector", or "vision" (both). Call it before `shard_model`."""
    parts = vision_names(model, pattern) if pattern in ("tower", "projector", "vision") else []
    frozen = [p for name, p in model.named_parameters() if name in parts or re.fullmatch(pattern, name)]
    for p in frozen:
        p.requires_grad_(False)
    if not (frozen and any(p.requires_grad for p in model.parameters())):
        raise InputError(f"--freeze {pattern}: matches {'all' if frozen else 'none'} of the model's parameters")
    return model


def _prepare(model: PreTrainedModel, missing: set, name: str, forward: Callable, how: LoadOptions) -> PreTrainedModel:
    """Puts the model in train mode, without which there is no gradient checkpointing, and binds `forward` as a method
    that FSDP treats as a forward. Raises InputError if a weight is missing."""
    if missing:
        raise InputError(f"{name}: not a {type(model).__name__}: no {min(missing)} in it ({len(missing)} missing)")
    lay_out(model, name, how.attn_implementation, how.share_prompts)
    hook_routers(model)
    recompute_layers(model, decoder_layers(model), how.gradient_checkpointing)
    model.train()
    model.fsdp_layer_classes = fsdp_layer_classes(model)
    method = keeping_activations_on_cpu(forward) if how.offload_activations else forward
    setattr(model, forward.__name__, types.MethodType(method, model))
    model.fsdp_forward_methods = (forward.__name__,)
    return model


# ---- LoRA ----------------------------------------------------------------------------------------
def add_lora(
    model: PreTrainedModel, *, rank: int, alpha: float, seed: int, target_modules: str = "all-linear"
) -> PreTrainedModel:
    """Freezes the model and adds peft's LoRA adapters, in place: W x becomes W x + alpha / rank x B A x (arXiv
    2106.09685). Call it before `shard_model`. B starts at 0, and A is the same on every rank. Both are at least fp32,
    even if W is bfloat16. A critic's value head is trained as a whole, without adapters.

    target_modules: "all-linear" (the decoder's linear layers but the head), or a regular expression that matches whole
    names of linear layers. Raises InputError if none matches, or the head does, or another kind of layer."""
    from peft import LoraConfig  # its import takes seconds
    from peft.tuners.lora import LoraLayer

    head = None if hasattr(model, "token_log_probs") else value_head(model)
    output = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head]
    model.requires_grad_(False)
    targets: str | list[str] = target_modules
    if family_of(model.config) and target_modules == "all-linear":
        layers = {module for module in model.get_decoder().modules() if isinstance(module, torch.nn.Linear)}
        targets = [name for name, module in model.named_modules() if module in layers]
    on_meta = any(p.is_meta for p in model.parameters())  # then without values that are thrown away
    try:
        with torch.device("meta") if on_meta else nullcontext():
            model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, exclude_modules=heads))
    except ValueError as error:
        raise InputError(f"--lora-target-modules {target_modules}: {str(error).splitlines()[0]}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                adapted, what = layer.get_base_layer(), ""
                if adapted is output:  # LinearLogProbs reads its weight alone
                    what = "the head, whose adapter would not be trained"
                elif not isinstance(adapted, torch.nn.Linear):
                    what = "not a linear layer"
                if what:
                    fix = "name other layers, such as '.*[qkvo]_proj'"
                    raise InputError(f"--lora-target-modules {target_modules}: {name} is {what}; {fix}")
                for adapter in (layer.lora_A, layer.lora_B):  # on the meta device peft takes torch's default dtype
                    adapter.to(adapted.weight.dtype).to_empty(device="cpu")
                layer.reset_lora_parameters("default", init_lora_weights=True)
    if head is not None:
        head.requires_grad_(True)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(torch.promote_types(param.dtype, torch.float32))
    return model


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Switches the adapters of `add_lora` off in the block. A model without adapters stays as it is."""
    if not getattr(model, "peft_config", None):
        yield
        return
    for module in fsdp_modules(model):
        module.reshard()
    trained = [p for p in model.parameters() if p.requires_grad]
    model.disable_adapters()
    for param in trained:  # peft has frozen them, and FSDP's first forward reads requires_grad
        param.requires_grad_(True)
    try:
        yield
    finally:
        model.enable_adapters()
