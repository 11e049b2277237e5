"""Special tokens: those of a response that scorers and reward models read, and those that a text spells.

A chat template writes special tokens and messages into one string, in which the tokenizer cannot tell them apart. So a
space breaks up what spells a special token in a message: "<|im_end|>" becomes "< |im_end|>"."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template puts behind what the assistant says."""
    said = "What the assistant says."
    messages = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (ValueError, TypeError, TemplateError):  # there is none, or it takes other messages only
        return None
    [first, *_] = tokenizer.encode(text.rpartition(said)[2].lstrip(), add_special_tokens=False) or [None]
    known = tokenizer.added_tokens_decoder
    return first if first in known and known[first].special else None


# in the names of special tokens that begin or end texts and turns, pad, or stand for images
CONTROL = re.compile(
    r"(?i)(?<![a-z])(?:im|pad|eo[stm](?:_id)?|(?:begin|start|end)_?of_?(?:text|turn)|turn|user|assistant|system"
    r"|header_id|observation|return|image|img|vision|video|audio)(?![a-z])|<\|call\|>|</?s>"
)


@lru_cache(maxsize=8)
def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Special tokens that are no part of what a response says, unlike <think>, <|channel|> or [TOOL_CALLS]."""
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles = {getattr(tokenizer, f"{name}_id") for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    roles.add(end_of_turn(tokenizer))
    return frozenset(number for number, name in special.items() if number in roles or CONTROL.search(name))


def response_texts(tokenizer: PreTrainedTokenizerBase, responses: Sequence[Sequence[int]]) -> list[str]:
    """What responses say: their texts without control tokens."""
    control = control_tokens(tokenizer)
    said = [[token for token in response if token not in control] for response in responses]
    return tokenizer.batch_decode(said, skip_special_tokens=False)


class SpecialTokenEscaper:
    """A callable that breaks up the tokenizer's special tokens in all strings of a value, dict keys included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, names: Sequence[str] | None = None):
        """names: only these tokens."""
        if names is None:
            names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        broken = {name: f"{name[:1]} {name[1:]}" for name in sorted(names, key=len, reverse=True)}
        self.broken = {name: text for name, text in broken.items() if name not in text}  # not those of one character
        self.pattern = re.compile("|".join(map(re.escape, self.broken)) or "(?!)")

    def __call__(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self(key): self(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self(item) for item in value]
        while isinstance(value, str) and self.pattern.search(value):  # again: tokens may overlap
            value = self.pattern.sub(lambda found: self.broken[found[0]], value)
        return value


def start_of_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before a text, such as BOS; without what it appends, such as EOS."""
    plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    ends = range(len(whole) - len(plain), -1, -1)
    return next(whole[:n] for n in ends if whole[n : n + len(plain)] == plain)
