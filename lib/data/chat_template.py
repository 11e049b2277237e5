"""The chat template of a run, and what it reads. Special tokens: those of a response that scorers and reward models
read, and those that a text spells.

A chat template writes special tokens and messages into one string, in which the tokenizer cannot tell them apart. So a
space breaks up what spells a special token in a message: "<|im_end|>" becomes "< |im_end|>"."""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lib import InputError

MARK = " Zq7"  # changes a text, also where a template trims it
GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # of transformers


def _parsed(text: str) -> nodes.Template:
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAG.sub("", text))


def set_chat_template(tokenizer: PreTrainedTokenizerBase | ProcessorMixin, path: str) -> None:
    """Sets the template of --chat-template: "" leaves the tokenizer's or processor's own, "none" removes it. Raises
    InputError for a file that cannot be read or is no template."""
    if not path:
        return
    if path == "none":
        tokenizer.chat_template = None
        return
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        _parsed(text)
    except OSError as error:
        raise InputError(f"--chat-template {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--chat-template {path}: not UTF-8 text ({error})") from error
    except TemplateSyntaxError as error:
        raise InputError(f"--chat-template {path} line {error.lineno}: {error.message}") from error
    if not text.strip():
        raise InputError(f"--chat-template {path}: the file is empty; none takes the model's template away")
    tokenizer.chat_template = text


def question_of(messages: list[dict]) -> int:
    """The number of the user's last message; without any, of the last one."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)


def left_out(messages: list[dict], text: str, render: Callable[[list[dict]], str]) -> list[int]:
    """The numbers of the messages that the chat template leaves out of `text`, its output: they are not in it, and
    adding to them changes nothing. render raises InputError for messages that the template refuses."""

    def has_effect(i: int) -> bool:
        message = messages[i] | {"content": _marked(messages[i]["content"])}
        try:
            return render([*messages[:i], message, *messages[i + 1 :]]) != text
        except InputError:  # it read the message
            return True

    texts = [_texts(message.get("content")) for message in messages]
    return [i for i, own in enumerate(texts) if not (all(part.strip() in text for part in own) or has_effect(i))]


def _texts(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [{"text": content}]
    return [part["text"] for part in parts if isinstance(part.get("text"), str)]


def _marked(content: Any) -> Any:
    if isinstance(content, str):
        return content + MARK
    return [part | {"text": part["text"] + MARK} if isinstance(part.get("text"), str) else part for part in content]


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: dict) -> None:
    """Raises InputError for a keyword that the chat template does not read."""
    template = kwargs.get("chat_template") or tokenizer.chat_template or ""
    text = template if isinstance(template, str) else "".join(template.values())
    try:
        reads = meta.find_undeclared_variables(_parsed(text))
    except TemplateError:  # the first row will say why
        return
    arguments = {*inspect.signature(tokenizer.apply_chat_template).parameters} - {"kwargs"}
    if unknown := kwargs.keys() - reads - arguments:
        known = ", ".join(sorted(reads - arguments - {"messages"})) or "none"
        what = f"the model's template does not read {unknown.pop()}; it reads {known}"
        raise InputError(f"--chat-template-kwargs: {what}")


# ---- special tokens -----------------------------------------------------------------------------


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
