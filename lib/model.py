"""Policy, reference, critic and reward model: load, and forward to log-probs and entropies, values, or scores.

Two things keep the forward cheap. Padding never enters it: the rows of a micro-batch are laid end to end (packed) and
attention runs inside each row. Full fp32 logits never exist: the vocabulary projection is done in chunks of tokens, and
its backward recomputes them. Both are exact. Log-probs are those at the sampling temperature; dropout is off.
"""

import logging
import types
from pathlib import Path
from typing import Any

import jinja2
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from lib import InputError
from lib.batching import prepare_dynamic_batch, restore_dynamic_batch
from lib.data_proto import DataProto

disable_progress_bar()  # of loading: one bar a rank
# a table of weights that are missing or too many, on each rank: `_from_pretrained` says in one line what is wrong
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())

# ---- loading -------------------------------------------------------------------------------------


def split_gguf(path: str) -> tuple[str, dict[str, str]]:
    """transformers reads `folder/model.gguf` as the folder plus the keyword `gguf_file`."""
    if path.endswith(".gguf"):
        return str(Path(path).parent), {"gguf_file": Path(path).name}
    return path, {}


def check_model_path(path: str, flag: str = "--model") -> None:
    """Raises InputError for a folder that cannot hold a model, before anything is loaded or written."""
    local = Path(path)
    if path.endswith(".gguf"):
        if not local.is_file():
            raise InputError(f"{flag} {path}: no such file")
    elif local.is_dir():
        if not (local / "config.json").is_file():
            raise InputError(f"{flag} {path}: the folder has no config.json; give a folder saved by save_pretrained")
        if not (any(local.glob("*.safetensors")) or any(local.glob("pytorch_model*.bin"))):
            raise InputError(f"{flag} {path}: the folder has no weights (*.safetensors); is the download complete?")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise InputError(f"{flag} {path}: no such folder")


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
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM from a Hugging Face id, a folder or a .gguf file, with weights in `dtype` and without dropout.

    `dtype` is explicit because transformers otherwise takes the checkpoint's, and AdamW on bf16 weights loses small
    updates. The model gets the method `token_log_probs`, which FSDP treats as a forward.
    """
    options = {"dtype": dtype, "attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    model, missing = _from_pretrained(AutoModelForCausalLM, path, "--model", {}, **options)
    _refuse_missing(missing, model, path, "--model")
    return _prepare(model, token_log_probs, gradient_checkpointing)


def load_critic(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "packed_sdpa",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A token classifier of one label, the value, from what `load_model` takes, or from a critic or a reward model.

    Where there is no value head (a causal LM) it starts at zero, so that the first values are 0 on every rank: a random
    head would differ from rank to rank. The model gets the method `token_values`.

    Raises:
        InputError: the architecture has no token classification, or the head has another number of outputs.
    """
    options = {"dtype": dtype, "attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    # without classifier_dropout, transformers drops 10 % of what the head sees
    settings = {"num_labels": 1, "classifier_dropout": 0.0}
    model, missing = _from_pretrained(AutoModelForTokenClassification, path, "--critic_model", settings, **options)
    new = {name for name in missing if model.get_submodule(name.rpartition(".")[0]) is value_head(model)}
    for name in new:
        torch.nn.init.zeros_(model.get_parameter(name))
    _refuse_missing(missing - new, model, path, "--critic_model")
    return _prepare(model, token_values, gradient_checkpointing)


def load_reward_model(
    path: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence classifier with one output, frozen, and its own tokenizer. The model gets the method `token_values`.

    Raises:
        InputError: it has another number of outputs (or no head, being a causal LM), or no chat template.
    """
    flag = "--reward_model"
    options = {"dtype": dtype, "attn_implementation": "packed_sdpa", "trust_remote_code": trust_remote_code}
    model, missing = _from_pretrained(AutoModelForSequenceClassification, path, flag, {}, **options)
    _refuse_missing(missing, model, path, flag)
    if model.config.num_labels != 1:
        raise InputError(f"{flag} {path}: it has {model.config.num_labels} outputs; give a model with one, the score")
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # packing knows no soft-capped attention
    model = _prepare(model, token_values, gradient_checkpointing=False).requires_grad_(False).eval()
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
) -> tuple[PreTrainedModel, set[str]]:
    """The model, its config changed by `settings`, and the names of the parameters that `path` did not hold."""
    check_model_path(path, flag)
    folder, gguf = split_gguf(path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **gguf)
        for name, value in vars(config).items():  # log-probs of sampling and training must be the same function
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        for name, value in settings.items():
            setattr(config, name, value)
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
    model = model.to(dtype)
    if gguf:  # its weights are plain now; vLLM and an export must not take them for quantized
        vars(model.config).pop("quantization_config", None)
        for name in ("hf_quantizer", "quantization_method"):
            vars(model).pop(name, None)
    return model, set(info["missing_keys"])


def _refuse_missing(names: set[str], model: PreTrainedModel, path: str, flag: str) -> None:
    if names:
        raise InputError(f"{flag} {path}: not a {type(model).__name__}: no {min(names)} in it ({len(names)} missing)")


def _prepare(model: PreTrainedModel, forward, gradient_checkpointing: bool) -> PreTrainedModel:
    """In train mode, because gradient checkpointing works there only, with `forward` as a method that FSDP knows."""
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    setattr(model, forward.__name__, types.MethodType(forward, model))
    model.fsdp_forward_methods = (forward.__name__,)
    return model


# ---- attention over packed rows ------------------------------------------------------------------


def packed_sdpa(module, query, key, value, attention_mask, packed_runs=None, scaling=None, **kwargs):
    """Attention for transformers models. query (1, H, N, D), key and value (1, H_kv, N, D) for packed rows.

    `packed_runs` is [(length, count), ...]: the rows stand end to end in order of length, so that rows of equal length
    form one batched SDPA call and cost is O(sum of length^2). Without it this is transformers' own SDPA attention.
    """
    if packed_runs is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise InputError(f"{type(module).__name__}: packing knows no soft-capped or sink attention: --no-padding-free")
    window = kwargs.get("sliding_window")
    outputs, start = [], 0
    for length, count in packed_runs:
        rows = slice(start, start + length * count)
        # (1, H, count * length, D) -> (count, H, length, D)
        q, k, v = (x[0, :, rows].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value))
        mask = None
        if window is not None and length > window:
            position = torch.arange(length, device=query.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < window)
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, is_causal=mask is None, enable_gqa=gqa)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # (count * length, H, D)
        start = rows.stop
    return torch.cat(outputs)[None], None  # (1, N, H, D)


ALL_ATTENTION_FUNCTIONS.register("packed_sdpa", packed_sdpa)
ALL_MASK_ATTENTION_FUNCTIONS.register("packed_sdpa", sdpa_mask)


# ---- log-probs without full logits ---------------------------------------------------------------


class LinearLogProbs(torch.autograd.Function):
    """Log-prob of y and entropy under p = softmax(h W^T / temperature), a chunk of tokens at a time; sum_v p_v^2 too,
    without gradient, if asked for.

    Forward keeps log-sum-exp and entropy per token; backward recomputes each chunk's logits. With z = h W^T / T:
    d logp / dz = onehot(y) - p and d H / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx, h, weight, y, inv_temperature, chunk, sum_pi_squared=False):
        # h (N, D), weight (V, D), y (N,)
        dtype = torch.promote_types(h.dtype, torch.float32)
        logp, entropy, lse = (torch.empty(len(h), dtype=dtype, device=h.device) for _ in range(3))
        squares = torch.empty_like(lse) if sum_pi_squared else None
        for i in range(0, len(h), chunk):
            s = slice(i, i + chunk)
            z = torch.mm(h[s], weight.T).to(dtype).mul_(inv_temperature)  # (chunk, V)
            lse[s] = torch.logsumexp(z, -1)
            logp[s] = z.gather(-1, y[s, None])[:, 0] - lse[s]
            p = z.sub(lse[s, None]).exp_()
            entropy[s] = lse[s] - torch.einsum("nv,nv->n", p, z)
            if sum_pi_squared:
                squares[s] = torch.einsum("nv,nv->n", p, p)
        ctx.save_for_backward(h, weight, y, lse, entropy)
        ctx.inv_temperature, ctx.chunk = inv_temperature, chunk
        if not sum_pi_squared:
            return logp, entropy
        ctx.mark_non_differentiable(squares)
        return logp, entropy, squares

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy, *_):
        h, weight, y, lse, entropy = ctx.saved_tensors
        dh = torch.empty_like(h)
        dw = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        for i in range(0, len(h), ctx.chunk):
            s = slice(i, i + ctx.chunk)
            log_p = torch.mm(h[s], weight.T).to(lse.dtype).mul_(ctx.inv_temperature).sub_(lse[s, None])
            dz = log_p.add(entropy[s, None]).mul_(-grad_entropy[s, None]).sub_(grad_logp[s, None]).mul_(log_p.exp_())
            dz.scatter_add_(1, y[s, None], grad_logp[s, None]).mul_(ctx.inv_temperature)
            dz = dz.to(h.dtype)
            torch.mm(dz, weight, out=dh[s])
            if dw is not None:
                dw += dz.T @ h[s]
        return dh, None if dw is None else dw.to(weight.dtype), None, None, None, None


def logits_are_a_plain_product(model: PreTrainedModel) -> bool:
    """False where the head adds a bias or the model caps or scales its logits: these go through its own forward."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    changes = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    return head.bias is None and all(getattr(config, name, None) in (None, 1.0) for name in changes)


def token_log_probs(
    self: PreTrainedModel,
    inputs: dict,
    select: torch.Tensor,
    y: torch.Tensor,
    temperature: float,
    sum_pi_squared: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Bound to a model by `load_model`: log-prob of token y[i] (n,) after the i-th selected position, entropy (n,), and
    if asked for the sum of the squared probabilities (n,), which has no gradient.

    inputs: what the decoder takes, over (b, l) positions; select (b, l) bool with n true places.
    """
    if logits_are_a_plain_product(self):
        h = self.get_decoder()(**inputs, use_cache=False).last_hidden_state[select]  # (n, D)
        weight = self.get_output_embeddings().weight
        return LinearLogProbs.apply(h, weight, y, 1 / temperature, 256, sum_pi_squared)
    log_p = self(**inputs, use_cache=False).logits[select].float().div(temperature).log_softmax(-1)  # (n, V)
    p = log_p.exp()
    results = (log_p.gather(-1, y[:, None])[:, 0], -(p * log_p).sum(-1))
    return (*results, p.detach().square().sum(-1)) if sum_pi_squared else results


def response_log_probs(
    model: PreTrainedModel,
    batch: DataProto,
    temperature: float,
    *,
    padding_free: bool = True,
    sum_pi_squared: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropies of the policy's own tokens at the sampling temperature.

    Args:
        batch: `input_ids`, `attention_mask`, `position_ids` (B, L), `responses`, `response_mask` (B, T).
        padding_free: pack the rows; otherwise run them padded (for models whose attention cannot be packed).
        sum_pi_squared: also the sum over the vocabulary of the squared probabilities, without gradient, for the
            optimal token baseline (arXiv 2602.07078).

    Returns:
        (log_probs, entropy) or (log_probs, entropy, sum_pi_squared), each (B, T), zero where response_mask is.
    """
    inputs, select, target = _response_inputs(model, batch, padding_free)
    responses = batch.batch["responses"]
    results = model.token_log_probs(inputs, select, responses.flatten()[target], temperature, sum_pi_squared)
    return tuple(_to_rows(x, target, responses) for x in results)


@torch.no_grad()
def batched_log_probs(
    model: PreTrainedModel,
    batch: DataProto,
    temperature: float,
    micro_batch_tokens: int,
    *,
    padding_free: bool = True,
    sum_pi_squared: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`response_log_probs` of a whole batch without gradients, in micro-batches. A collective."""
    micro_batches, rows = prepare_dynamic_batch(batch, micro_batch_tokens)
    options = {"padding_free": padding_free, "sum_pi_squared": sum_pi_squared}
    parts = [response_log_probs(model, micro, temperature, **options) for micro in micro_batches]
    return tuple(restore_dynamic_batch(torch.cat(tensors), rows) for tensors in zip(*parts))


# ---- values and scores ---------------------------------------------------------------------------


def value_head(model: PreTrainedModel) -> torch.nn.Module:
    """The last layer of a token or sequence classifier: `score`, which a few older architectures call `classifier`."""
    return model.score if hasattr(model, "score") else model.classifier


def token_values(self: PreTrainedModel, inputs: dict, select: torch.Tensor) -> torch.Tensor:
    """Bound to a model by `load_critic` and `load_reward_model`: the head's output (n,) at the selected positions.

    inputs: what the decoder takes, over (b, l) positions; select (b, l) bool with n true places.
    """
    h = self.base_model(**inputs, use_cache=False).last_hidden_state[select]  # (n, D)
    values = value_head(self)(h).sum(1)  # one output; [:, 0] would be a view, which FSDP's hooks warn of
    return values.to(torch.promote_types(values.dtype, torch.float32))


def response_values(model: PreTrainedModel, batch: DataProto, *, padding_free: bool = True) -> torch.Tensor:
    """The critic's values (B, T), zero where response_mask is; batch and `padding_free` as in `response_log_probs`.

    V_t is read where token t of the response is predicted: it is the value of the state before that token.
    """
    inputs, select, target = _response_inputs(model, batch, padding_free)
    return _to_rows(model.token_values(inputs, select), target, batch.batch["responses"])


@torch.no_grad()
def batched_values(
    model: PreTrainedModel, batch: DataProto, micro_batch_tokens: int, *, padding_free: bool = True
) -> torch.Tensor:
    """`response_values` of a whole batch without gradients, in micro-batches. A collective."""
    micro_batches, rows = prepare_dynamic_batch(batch, micro_batch_tokens)
    parts = [response_values(model, micro, padding_free=padding_free) for micro in micro_batches]
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
    and tokenizer. A row without a trained token scores 0. A collective; all ranks have the same number of rows.
    """
    responses, trained = batch.batch["responses"], batch.batch["response_mask"].any(1)
    attended = batch.batch["attention_mask"][:, -responses.shape[1] :].bool()
    conversations = []
    for i, prompt in enumerate(batch.non_tensor_batch["raw_prompt"]):
        text = policy_tokenizer.decode(responses[i][attended[i]], skip_special_tokens=True)
        messages = [*prompt, {"role": "assistant", "content": text}]
        try:
            text = rm_tokenizer.apply_chat_template(messages, tokenize=False)
        except (jinja2.TemplateError, TypeError) as error:
            raise InputError(f"--reward_model: its chat template refuses {prompt!r:.200}: {error}") from error
        conversations.append(rm_tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = _conversation_batch(conversations, responses.device)
    packed = model.config._attn_implementation == "packed_sdpa"
    values = batched_values(model, rows, micro_batch_tokens, padding_free=packed)  # (B, 1)
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


def _response_inputs(
    model: PreTrainedModel, batch: DataProto, padding_free: bool
) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """(inputs, select, target): what the decoder takes; the positions, in its layout, that predict the trained tokens;
    for each of these the place (n,) of its token in the flattened response_mask.

    A row may hold several sequences end to end (lib/agent_loop.py): one begins wherever position_ids is 0.
    """
    fields = ("input_ids", "attention_mask", "position_ids", "response_mask")
    ids, attention, positions, trained = (batch.batch[name] for name in fields)
    attention, trained = attention.bool(), trained.bool()
    L, T = ids.shape[1], trained.shape[1]
    # token t of the response is predicted one place to its left
    select = torch.zeros_like(attention)
    select[:, L - T - 1 : L - 1] = trained
    first = attention & (positions == 0)
    if not padding_free:
        if (first.sum(1) > 1).any():
            raise InputError("an episode whose history was rewritten is several sequences: drop --no-padding-free")
        inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": positions}
        return inputs, select, trained.flatten().nonzero()[:, 0]

    sequence = first[attention].cumsum(0) - 1  # (N,)
    lengths = sequence.bincount()  # (S,)
    by_length = lengths.argsort(stable=True)  # sequences of equal length stand side by side
    place = attention.flatten().nonzero()[:, 0][by_length.argsort()[sequence].argsort(stable=True)]  # (N,)
    inputs = {"input_ids": ids.flatten()[place][None], "position_ids": positions.flatten()[place][None]}  # (1, N)
    lengths = lengths[by_length]
    if model.config._attn_implementation == "packed_sdpa":
        inputs["packed_runs"] = [
            (int(n), int(count)) for n, count in zip(*lengths.unique_consecutive(return_counts=True))
        ]
        # transformers passes a 4-D mask on untouched; without one it would build a dense (N, N) mask
        inputs["attention_mask"] = torch.empty(1, 1, 1, 1, device=ids.device)
    else:  # flash attention
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
        inputs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        inputs |= {"max_length_q": int(lengths[-1]), "max_length_k": int(lengths[-1])}
    select = select.flatten()[place]  # (N,)
    place = place[select]
    return inputs, select[None], place // L * T + place % L - (L - T - 1)


def _to_rows(x: torch.Tensor, target: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, T), shaped as `like`, from the values at the trained tokens (n,); zero elsewhere."""
    return x.new_zeros(like.numel()).index_copy(0, target, x).view_as(like)
