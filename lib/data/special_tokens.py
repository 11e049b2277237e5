"""Text from data, tools, users and models stays text, also if it spells a special token. A chat template writes special
tokens and messages into one string, in which the tokenizer cannot tell them apart. So a space breaks up a special token
in a message: "<|im_end|>" becomes "< |im_end|>"."""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


class SpecialTokenEscaper:
    """A callable that breaks up the tokenizer's special tokens in all strings of a value, also in lists and in dicts
    with their keys, which a template may write."""

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
