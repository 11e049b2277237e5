"""Values of a critic and scores of a reward model. Both are classifiers with one output per token."""

from functools import partial
from typing import Any

import jinja2
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from lib import InputError
from lib.data import SpecialTokenEscaper, response_texts
from lib.data_proto import DataProto
from lib.model.packing import in_micro_batches, of_responses
from lib.model.vision import family_of, with_images


def value_head(model: PreTrainedModel) -> torch.nn.Module:
    """The last layer of a token or sequence classifier: `score`, which a few older architectures call `classifier`."""
    return model.score if hasattr(model, "score") else model.classifier


def token_values(self: PreTrainedModel, inputs: dict, select: torch.Tensor) -> torch.Tensor:
    """The head's output (n,) at the selected positions; as `token_log_probs`. A method that `load_critic` and
    `load_reward_model` bind."""
    decoder = self.base_model if family_of(self.config) is None else self.get_decoder()
    inputs = with_images(self, **inputs) if "images" in inputs else inputs
    h = decoder(**inputs, use_cache=False).last_hidden_state
    h = F.embedding(select, h.flatten(0, 1))  # (n, D)
    values = value_head(self)(h).sum(1)  # there is one output; [:, 0] would be a view, of which FSDP's hooks warn
    return values.to(torch.promote_types(values.dtype, torch.float32))


def response_values(model: PreTrainedModel, batch: DataProto, **layout: Any) -> torch.Tensor:
    """The critic's values (B, T), zero where response_mask is; batch and layout as in `of_responses`. V_t, the value of
    the state before token t, is read where that token is predicted."""
    return of_responses(model, batch, partial(_values, model), **layout)[0]


def batched_values(model: PreTrainedModel, batch: DataProto, micro_batch_tokens: int, **layout: Any) -> torch.Tensor:
    """`response_values` of a whole batch without gradients, in micro-batches. A collective."""
    return in_micro_batches(model, batch, partial(_values, model), micro_batch_tokens, **layout)[0]


def _values(model: PreTrainedModel, inputs: dict, select: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    return (model.token_values(inputs, select),)


def reward_model_scores(
    model: PreTrainedModel, rm_tokenizer, batch: DataProto, policy_tokenizer, micro_batch_tokens: int
) -> torch.Tensor:
    """The reward model's score (B,) float32 of each conversation: `raw_prompt`, then the response, decoded by the
    policy's tokenizer, as a message. Text that spells special tokens stays text. A row without a trained token scores
    0. A collective of equal row counts."""
    responses, trained = batch.batch["responses"], batch.batch["response_mask"].any(1)
    attended = batch.batch["attention_mask"][:, -responses.shape[1] :].bool()
    conversations, escape_special_tokens = [], SpecialTokenEscaper(rm_tokenizer)
    for i, prompt in enumerate(batch.non_tensor_batch["raw_prompt"]):
        text = response_texts(policy_tokenizer, [responses[i][attended[i]].tolist()])[0]
        messages = escape_special_tokens([*prompt, {"role": "assistant", "content": text}])
        try:
            text = rm_tokenizer.apply_chat_template(messages, tokenize=False)
        except (jinja2.TemplateError, TypeError) as error:
            raise InputError(f"--reward-model: its chat template rejects {prompt!r:.200}: {error}") from error
        conversations.append(rm_tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = _conversation_batch(conversations, responses.device)
    values = batched_values(model, rows, micro_batch_tokens)  # (B, 1)
    return values[:, 0].float().masked_fill(~trained, 0)


def _conversation_batch(conversations: list[list[int]], device: torch.device) -> DataProto:
    """Left-padded rows, each with one dummy response token, whose value is the row's score. transformers' own pooling
    reads the last token that is not the pad token: the wrong one if the pad token also ends a message."""
    L = max(len(ids) for ids in conversations)
    ids = torch.tensor([[0] * (L - len(row)) + row + [0] for row in conversations], device=device)  # (B, L + 1)
    first = L - torch.tensor([len(row) for row in conversations], device=device)[:, None]
    column = torch.arange(L + 1, device=device)
    tensors = {"input_ids": ids, "attention_mask": ((column >= first) & (column < L)).long()}
    tensors |= {"position_ids": (column - first).clamp(min=0)}
    return DataProto.from_dict(tensors | {"responses": ids[:, L:], "response_mask": torch.ones_like(ids[:, L:])})
