"""The policy and the reference: load, and forward to the log-probs and entropies of the response tokens.

Two things keep the forward cheap. Padding never enters it: the rows of a micro-batch are laid end to end (packed) and
attention runs inside each row. Full fp32 logits never exist: the vocabulary projection is done in chunks of tokens, and
its backward recomputes them. Both are exact. Log-probs are those at the sampling temperature; dropout is off.
"""

import types
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from lib import InputError
from lib.batching import prepare_dynamic_batch, restore_dynamic_batch
from lib.data_proto import DataProto

disable_progress_bar()  # of loading: one bar a rank

# ---- loading -------------------------------------------------------------------------------------


def split_gguf(path: str) -> tuple[str, dict[str, str]]:
    """transformers reads `folder/model.gguf` as the folder plus the keyword `gguf_file`."""
    if path.endswith(".gguf"):
        return str(Path(path).parent), {"gguf_file": Path(path).name}
    return path, {}


def check_model_path(path: str) -> None:
    """Raises InputError for a folder that cannot hold a model, before anything is loaded or written."""
    local = Path(path)
    if path.endswith(".gguf"):
        if not local.is_file():
            raise InputError(f"--model {path}: no such file")
    elif local.is_dir():
        if not (local / "config.json").is_file():
            raise InputError(f"--model {path}: the folder has no config.json; give a folder saved by save_pretrained")
        if not (any(local.glob("*.safetensors")) or any(local.glob("pytorch_model*.bin"))):
            raise InputError(f"--model {path}: the folder has no weights (*.safetensors); is the download complete?")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise InputError(f"--model {path}: no such folder")


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of `path`, which must have a chat template; a missing pad token becomes the eos token."""
    folder, gguf = split_gguf(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **gguf)
    except OSError as error:
        raise InputError(f"--model {path}: cannot load its tokenizer: {str(error).splitlines()[0]}") from error
    if tokenizer.chat_template is None:
        raise InputError(
            f"--model {path}: its tokenizer has no chat template; use an instruct model, or set one and save"
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
    check_model_path(path)
    folder, gguf = split_gguf(path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **gguf)
        for name, value in vars(config).items():  # log-probs of sampling and training must be the same function
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **gguf,
        )
    except OSError as error:
        raise InputError(f"--model {path}: cannot load it: {str(error).splitlines()[0]}") from error
    model = model.to(dtype)
    if gguf:  # its weights are plain now; vLLM and an export must not take them for quantized
        vars(model.config).pop("quantization_config", None)
        for name in ("hf_quantizer", "quantization_method"):
            vars(model).pop(name, None)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()  # gradient checkpointing works in train mode only
    model.token_log_probs = types.MethodType(token_log_probs, model)
    model.fsdp_forward_methods = ("token_log_probs",)
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
    """Log-prob of y and entropy under softmax(h W^T / temperature), a chunk of tokens at a time.

    Forward keeps log-sum-exp and entropy per token; backward recomputes each chunk's logits. With z = h W^T / T
    and p = softmax(z): d logp / dz = onehot(y) - p and d H / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx, h, weight, y, inv_temperature, chunk):
        # h (N, D), weight (V, D), y (N,)
        dtype = torch.promote_types(h.dtype, torch.float32)
        logp, entropy, lse = (torch.empty(len(h), dtype=dtype, device=h.device) for _ in range(3))
        for i in range(0, len(h), chunk):
            s = slice(i, i + chunk)
            z = torch.mm(h[s], weight.T).to(dtype).mul_(inv_temperature)  # (chunk, V)
            lse[s] = torch.logsumexp(z, -1)
            logp[s] = z.gather(-1, y[s, None])[:, 0] - lse[s]
            p = z.sub(lse[s, None]).exp_()
            entropy[s] = lse[s] - torch.einsum("nv,nv->n", p, z)
        ctx.save_for_backward(h, weight, y, lse, entropy)
        ctx.inv_temperature, ctx.chunk = inv_temperature, chunk
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
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
        return dh, None if dw is None else dw.to(weight.dtype), None, None, None


def logits_are_a_plain_product(model: PreTrainedModel) -> bool:
    """False where the head adds a bias or the model caps or scales its logits: these go through its own forward."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    changes = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    return head.bias is None and all(getattr(config, name, None) in (None, 1.0) for name in changes)


def token_log_probs(self: PreTrainedModel, inputs: dict, select: torch.Tensor, y: torch.Tensor, temperature: float):
    """Bound to a model by `load_model`: log-prob of token y[i] (n,) after the i-th selected position, and entropy (n,).

    inputs: what the decoder takes, over (b, l) positions; select (b, l) bool with n true places.
    """
    if logits_are_a_plain_product(self):
        h = self.get_decoder()(**inputs, use_cache=False).last_hidden_state[select]  # (n, D)
        weight = self.get_output_embeddings().weight
        return LinearLogProbs.apply(h, weight, y, 1 / temperature, 256)
    log_p = self(**inputs, use_cache=False).logits[select].float().div(temperature).log_softmax(-1)  # (n, V)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, y[:, None])[:, 0], entropy


def response_log_probs(
    model: PreTrainedModel, batch: DataProto, temperature: float, *, padding_free: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the policy's own tokens at the sampling temperature.

    Args:
        batch: `input_ids`, `attention_mask`, `position_ids` (B, L), `responses`, `response_mask` (B, T).
        padding_free: pack the rows; otherwise run them padded (for models whose attention cannot be packed).

    Returns:
        (log_probs, entropy), both (B, T), zero where response_mask is.
    """
    order = batch.batch["attention_mask"].sum(1).argsort(stable=True)  # equal lengths side by side
    fields = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
    ids, attention, positions, responses, trained = (batch.batch[name][order] for name in fields)
    attention, trained = attention.bool(), trained.bool()
    B, L = ids.shape
    T = responses.shape[1]
    # token t of the response is predicted one place to its left
    select = torch.zeros_like(attention)
    select[:, L - T - 1 : L - 1] = trained

    if padding_free:
        inputs = {"input_ids": ids[attention][None], "position_ids": positions[attention][None]}  # (1, N)
        lengths, counts = attention.sum(1).unique_consecutive(return_counts=True)
        if model.config._attn_implementation == "packed_sdpa":
            inputs["packed_runs"] = list(zip(lengths.tolist(), counts.tolist()))
            # transformers passes a 4-D mask on untouched; without one it would build a dense (N, N) mask
            inputs["attention_mask"] = torch.empty(1, 1, 1, 1, device=ids.device)
        else:  # flash attention
            cu_seqlens = F.pad(attention.sum(1).cumsum(0), (1, 0)).int()
            inputs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            inputs |= {"max_length_q": int(lengths[-1]), "max_length_k": int(lengths[-1])}
        select = select[attention][None]
    else:
        inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": positions}

    log_probs, entropy = model.token_log_probs(inputs, select, responses[trained], temperature)
    inverse = order.argsort()
    return tuple(x.new_zeros(B, T).masked_scatter(trained, x)[inverse] for x in (log_probs, entropy))


@torch.no_grad()
def batched_log_probs(
    model: PreTrainedModel, batch: DataProto, temperature: float, micro_batch_tokens: int, *, padding_free: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`response_log_probs` of a whole batch without gradients, in micro-batches. A collective."""
    micro_batches, rows = prepare_dynamic_batch(batch, micro_batch_tokens)
    parts = [response_log_probs(model, micro, temperature, padding_free=padding_free) for micro in micro_batches]
    log_probs, entropy = (restore_dynamic_batch(torch.cat(tensors), rows) for tensors in zip(*parts))
    return log_probs, entropy
