"""The chat template of a run, and what it reads."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lib import InputError

MARK = "Zq7"  # changes a text, also where a template trims it
LONG = 16  # characters: the template itself may hold a shorter text
GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # of transformers


def _parsed(text: str) -> nodes.Template:
    """Raises TemplateError."""
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
    """The numbers of the messages that the chat template leaves out of `text`, its output: adding to their beginning or
    end changes nothing. Of the question, both ends and the middle must have an effect. render raises InputError for
    messages that the template refuses."""

    def has_effect(i: int, change: Callable[[str], str]) -> bool:
        message = messages[i] | {"content": _changed(messages[i]["content"], change)}
        try:
            return render([*messages[:i], message, *messages[i + 1 :]]) != text
        except InputError:  # it read the message
            return True

    found = []
    for i, message in enumerate(messages):
        is_question = i == question_of(messages)
        if not all((len(p) >= LONG or not is_question) and p.strip() in text for p in _texts(message.get("content"))):
            ends = [has_effect(i, change) for change in (lambda own: f"{MARK} {own}", lambda own: f"{own} {MARK}")]
            if not (all(ends) and has_effect(i, _with_other_middle) if is_question else any(ends)):
                found.append(i)
    return found


def _with_other_middle(text: str) -> str:
    half = len(text) // 2
    return text[:half] + MARK + text[half + len(MARK) :]


def _texts(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [{"text": content}]
    return [part["text"] for part in parts if isinstance(part.get("text"), str)]


def _changed(content: Any, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    return [part | {"text": change(part["text"])} if isinstance(part.get("text"), str) else part for part in content]


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
