"""The chat template of a run, and what it reads."""

import inspect
import re
from pathlib import Path

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lib import InputError

GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # of transformers


def _parsed(text: str) -> nodes.Template:
    """Raises TemplateError."""
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAG.sub("", text))


def set_chat_template(tokenizer: PreTrainedTokenizerBase | ProcessorMixin, path: str) -> None:
    """Gives a tokenizer or processor the chat template of --chat-template: "" leaves its own, "none" takes it away.
    Raises InputError for a file that cannot be read or is no template."""
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
    tokenizer.chat_template = text


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
        raise InputError(
            f"--chat-template-kwargs: the model's template does not read {unknown.pop()}; it reads {known}"
        )
