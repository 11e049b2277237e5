"""A KV cache that stores each prompt once for its group of responses, for the engine `hf`."""

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lib import InputError
from lib.model import PACKED

NOT_GROUPED = "rollouts cannot share its prompts; set --attn-implementation sdpa"
ROOM = 64  # tokens by which the buffers of a response's keys and values grow


class GroupCache(Cache):
    """The keys and values of each prompt, stored once for all rows that answer it, and those of each row's response.
    prompts: the cache that the prefill of the n prompts left; hidden (n, P): their padding; prompt_of_row (R,)."""

    def __init__(self, prompts: DynamicCache, hidden: torch.Tensor, prompt_of_row: torch.Tensor):
        super().__init__(layers=[GroupLayer(layer) for layer in prompts.layers])
        self.hidden = hidden if hidden.any() else None
        # transformers passes a 4-D mask on as it is; without a mask it would build one
        self.inputs = {"attention_mask": torch.empty(1, 1, 1, 1, device=hidden.device), "group_cache": self}
        self._group(prompt_of_row)

    def reorder_cache(self, indices: torch.Tensor) -> None:
        super().reorder_cache(indices)
        left, prompt_of_row = self.prompt_of_row[indices].unique(return_inverse=True)
        if len(left) < self.prompts:
            self.hidden = None if self.hidden is None else self.hidden[left]
            for layer in self.layers:
                layer.prompt_keys, layer.prompt_values = layer.prompt_keys[left], layer.prompt_values[left]
        self._group(prompt_of_row)

    def _group(self, prompt_of_row: torch.Tensor) -> None:
        """Gives each row a slot in an (n, G) grid, a line per prompt. G: size of the largest group."""
        sizes = prompt_of_row.bincount()
        order = prompt_of_row.argsort(stable=True)
        within = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[prompt_of_row[order]]
        self.prompt_of_row, self.prompts, self.largest = prompt_of_row, len(sizes), int(sizes.max())
        self.slot = prompt_of_row * self.largest + torch.empty_like(order).index_copy(0, order, within)  # (R,)

    def attend(self, module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None):
        """Attention of each row's new token to its prompt and response so far, for packed_attention.
        query (R, H, 1, D); key, value (R, H_kv, t, D) of the responses. Returns (R, 1, H, D)."""
        layer = self.layers[module.layer_idx]
        layer.attended = True
        if key.data_ptr() != layer.keys.data_ptr() or value.data_ptr() != layer.values.data_ptr():
            why = f"{type(module).__name__} attends to other keys than it caches"
            raise InputError(f"--rollout-engine hf: {why}: {NOT_GROUPED}")
        _, H_kv, t, _ = key.shape
        q = query.float().reshape(len(query), H_kv, -1, query.shape[-1])
        q = q * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        out, lse = _attend(q, key[:, :, -layer.window :], value[:, :, -layer.window :])  # (R, H_kv, H / H_kv, D)
        seen = min(layer.prompt_keys.shape[2], layer.window - t)  # prompt tokens inside the window
        if seen > 0:
            hidden = None if self.hidden is None else self.hidden[:, None, None, -seen:]
            groups = q.new_zeros(self.prompts * self.largest, *q.shape[1:]).index_copy_(0, self.slot, q)
            groups = groups.unflatten(0, (self.prompts, -1)).transpose(1, 2).flatten(2, 3)  # (n, H_kv, rows, D)
            of_prompt = _attend(groups, layer.prompt_keys[:, :, -seen:], layer.prompt_values[:, :, -seen:], hidden)
            by_slot = (x.unflatten(2, (self.largest, -1)).transpose(1, 2).flatten(0, 1) for x in of_prompt)
            prompt_out, prompt_lse = (x.index_select(0, self.slot) for x in by_slot)
            out = torch.lerp(out, prompt_out, (prompt_lse - lse).sigmoid())
        return out.flatten(1, 2)[:, None].to(query.dtype)


class GroupLayer(DynamicLayer):
    """A layer of GroupCache. The responses' keys and values (R, H_kv, t, D) are the filled part of buffers. These grow
    by ROOM tokens at a time, so that not every new token copies them all."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, prompts: DynamicLayer):
        super().__init__()
        self.prompt_keys, self.prompt_values = prompts.keys, prompts.values  # (n, H_kv, P, D)
        self.window = getattr(prompts, "sliding_window", 1 << 30)  # tokens
        self.attended = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.attended:
            raise InputError(f"--rollout-engine hf: the model's attention takes no keyword arguments: {NOT_GROUPED}")
        self.attended = False
        t, new = self.get_seq_length(), (key_states, value_states)
        if t % ROOM == 0:
            room = [own.new_empty(*own.shape[:2], ROOM, own.shape[3]) for own in new]
            self._buffers = [torch.cat(pair, 2) for pair in zip((self.keys, self.values), room)] if t else room
            self.is_initialized = True
        for buffer, own in zip(self._buffers, new):
            buffer[:, :, t : t + 1] = own
        self.keys, self.values = (buffer[:, :, : t + 1] for buffer in self._buffers)
        return self.keys, self.values

    def reorder_cache(self, indices: torch.Tensor) -> None:
        if t := self.get_seq_length():
            self._buffers = [buffer[indices] for buffer in self._buffers]
            self.keys, self.values = (buffer[:, :, :t] for buffer in self._buffers)


def can_group(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether GroupCache can replace `cache`: packed_attention, and every layer is full or sliding-window attention."""
    config = model.config.get_text_config()
    if config.model_type in ("diffllama", "hrm_text", "jetmoe"):  # their attention changes cached keys
        return False
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    special = ("attention_chunk_size", "num_kv_shared_layers", "attn_logit_softcapping", "kv_lora_rank")
    unknown = any(getattr(config, name, None) for name in special)
    return plain and not unknown and model.config._attn_implementation in PACKED


def _attend(q, k, v, hidden=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (..., m, D) to keys not hidden, and the log-sum-exp (..., m, 1) of scores; fp32."""
    scores = q @ k.mT.float()
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse).exp_() @ v.float(), lse
