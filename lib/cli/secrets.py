"""Keeps keys and passwords out of logs. A run takes them from the environment. Flags may not hold one: config.json and
logs repeat them. What a run prints and what a tool answers is redacted; files that may still hold one are private.

A secret is recognised by its name (api_key, X_TOKEN=), by its form (sk-..., user:password@ in a URL), or because the
environment holds it under such a name. Other secrets are not found."""

import json
import os
import re
import tempfile
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

NAME = re.compile(  # in lower case, with _ between words
    r"(?:^|_)(?:(?:api|access|auth|secret|private|signing|encryption|license|subscription|openai|anthropic)_?keys?"
    r"|(?:api|access|auth|bearer|refresh|session|bot|hf)_?tokens?|secrets?|passw(?:or)?ds?|passphrase|pwd"
    r"|authorization|bearer|cookies?|credentials?|(?:basic|http)_auth)$|^(?:token|pat)$"
)
NAME_OF_VARIABLE = re.compile(
    r"(?:^|[_-]|api|pg)(?:key|token|secret|password|passwd|passphrase|authorization|credentials?)$"
    r"|[_-](?:pass|pwd|pat)$",
    re.IGNORECASE,
)
TOKEN_OF_TEXT = re.compile(
    r"(?:[beu]os|pad|unk|sep|cls|mask|stop|start|end|begin|special|image|video|audio|think(?:ing)?|next|new)_token$"
)
NO_SECRET = re.compile(  # a reference, or what stands where no key is needed
    r"(?i)[\W_]*|(?:(?:bearer|basic|token)\s+)?(?:\$\w+|\$?\{\w+\}|<[^<>]*>|\$\(.*|os\.(?:environ|getenv).*)[\])}]*"
    r"|empty|none|null|dummy|true|false"
)
RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9+/=]{20,}")
VALUE = r"""["'\\]*(?P<value>(?:(?:[Bb]earer|[Bb]asic|[Tt]oken)\s+)?[^\s"'\\,;&|]{0,200})"""
NAMED = re.compile(  # NAME=value, "name": "value", Header: value; and an option with its value
    rf"""(?<![\w.-])(?P<name>[\w.-]+)["'\\]*\s*[:=]\s*(?={VALUE})"""
    r"""|(?<![\w.-])(?P<option>--?[A-Za-z][\w.-]*)["'\\]*[\s,][\s,\\]*(?!["'\\]*--)"""
    rf"""(?={VALUE.replace("value", "word", 1)})"""
)
PROSE = re.compile(r"(?:^|[_.-])(?:prompt|template|rubric|stop|stop-when)$")  # flags and keys whose text is for a model
FORMS = {
    "user:password@ in a URL": r"(?<!hdfs)(?<!abfs)(?<!abfss)://[^/?#\s@]+@|://[^/?#\s@:]*:[^/?#\s@]+@",
    "a key in a URL's query": r"(?i:[?&](?:(?:x-)?api[_-]?key|(?:access_?)?key|(?:access_|auth_)?token|auth"
    r"|(?:x-\w+-)?sig(?:nature)?|(?:client_)?secret|password|pwd)=)",
    "it looks like a key": r"(?<![\w-])(?:[spr]k-(?:\w{16,}|(?=[\w-]*\d)[\w-]{16,})"
    r"|(?:hf|gh[pousr]|gsk|npm|r8)_[A-Za-z0-9]{20,}|github_pat_\w{20,}|(?:glpat|nvapi|xai)-[\w-]{16,}|xox[abprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]+|[Bb]earer\s+(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,})|-----BEGIN [A-Z ]*PRIVATE KEY",
    "a user's password for curl": r"\bcurl\s(?:.{0,200}\s)?--?u(?:ser)?[\s=]*[\"']?[^\s:\"'$]{1,200}:[^\s\"'$]+",
}
PASSWORD_IN_URL = re.compile(r"://[^/?#\s:@]*:([^/?#\s@]+)@")
SHORTEST = 8  # shorter values are not redacted, because they occur in other words
SHORTEST_LINE = 16  # of a secret of several lines, each of which may be printed alone
_named: set[str] = set()  # variables that hold a key, as flags say


def secret_in(value: Any, flag: str, *path: str) -> str | None:
    """Where and why a flag's value holds a key or password: "flag path: why", without the secret; else None.

    value: of any type; a text may be a command, or hold JSON. path: the keys in the JSON that lead to it."""
    where, key = " ".join([flag, *path]), path[-1] if path else ""
    if isinstance(value, dict):
        return _first(
            _of_form(str(name), where) or secret_in(inner, flag, *path, str(name)) for name, inner in value.items()
        )
    if isinstance(value, list | tuple):
        is_command = len(value) > 1 and all(isinstance(word, str) for word in value)
        command = [" ".join(value)] if is_command else []
        return _first(secret_in(inner, flag, *path) for inner in (*value, *command))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    text = str(value)
    if key.endswith("_env") and NAME.search(_snake(key.removesuffix("_env"))):
        _named.add(text)
        is_name = re.fullmatch(r"[A-Za-z_]\w*", text)
        return None if is_name else f"{where}: it is not the name of a variable"
    if any(_is_secret(name, text) for name in path):
        return f"{where}: it is a key or password by its name"
    outside = text  # of a JSON object in it
    with suppress(ValueError, RecursionError):  # parse_json reports it
        inner, end = json.JSONDecoder().raw_decode(text, start := text.index("{"))
        outside = f"{text[:start]} {text[end:]}"
        if found := secret_in(inner, flag, *path):
            return found
    if found := _of_form(text, where):
        return found
    is_of_flag = flag.startswith("--")  # and not a file
    if (is_of_flag or path) and not PROSE.search(key or flag) and (name := _named_secret(outside)):
        return f"{where}: {name} gets a key or password"
    held = (name for name, secret in _in_environment() if any(form in text for form in _forms(secret)))
    return _first(f"{where}: it holds the value of {name}" for name in held)


def _first(found) -> str | None:
    return next(filter(None, found), None)


def _of_form(text: str, where: str) -> str | None:
    return _first(f"{where}: {why}" for why, form in FORMS.items() if re.search(form, text))


def _snake(name: str) -> str:
    return re.sub(r"[.\s-]|(?<=[a-z\d])(?=[A-Z])", "_", name.strip("-").removeprefix("D")).lower()


def _is_secret(name: str, value: str) -> bool:
    """Whether what has this name and value is a key or password."""
    snake = _snake(name)
    if NO_SECRET.fullmatch(value) or (snake.endswith("token") and re.match(r"\d{1,5}(?!\w)", value)):
        return False
    if NAME.search(snake):
        return True
    if TOKEN_OF_TEXT.search(snake):
        return False
    if name.isupper():
        return bool(NAME_OF_VARIABLE.search(name))
    is_token = snake.endswith("_token") and re.fullmatch(r"[\w+/=.~-]{6,}", value)
    is_pass = re.search(r"(?:^|_)(?:pass|pw)$", snake) and re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])\S{6,}", value)
    return bool(is_token or is_pass or (snake.endswith(("key", "token")) and RANDOM.fullmatch(value)))


def _named_secret(text: str) -> str | None:
    """The name of the first secret in a command, a header or the like; None without any."""
    for found in NAMED.finditer(text):
        name = found["name"] or found["option"]
        if _is_secret(name, found["value"] if found["name"] else found["word"]):
            return name
    return None


def _in_environment() -> list[tuple[str, str]]:
    """(name, secret) of the environment variables that hold one."""
    return _held_by(tuple(os.environ.items()), frozenset(_named))


@lru_cache(1)  # a run redacts thousands of texts
def _held_by(variables: tuple[tuple[str, str], ...], named: frozenset[str]) -> list[tuple[str, str]]:
    secrets = {name: value for name, value in variables if NAME_OF_VARIABLE.search(name) or name in named}
    in_urls = {name: PASSWORD_IN_URL.search(value) for name, value in variables if name not in secrets}
    secrets |= {name: found[1] for name, found in in_urls.items() if found}
    return [(name, secret) for name, secret in secrets.items() if len(secret) >= SHORTEST]


def redact(text: str) -> str:
    """The text, with *** in place of the environment's keys and passwords, also as JSON, repr or a URL has them."""
    forms = {form for _, secret in _in_environment() for form in _forms(secret)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text


def redact_values(value: Any) -> Any:
    """The value as JSON holds it, with all texts in it redacted."""
    if isinstance(value, dict):
        return {redact(str(name)): redact_values(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(inner) for inner in value]
    return value if value is None or isinstance(value, int | float) else redact(str(value))


@cache
def _forms(secret: str) -> set[str]:
    """What a text is searched for: the secret, and each of its long lines, in the usual ways to write them."""
    lines = [line for line in re.split(r"\\n|\n", secret) if len(line) >= SHORTEST_LINE]
    return {
        form
        for text in (secret, *lines)
        for form in (text, json.dumps(text)[1:-1], repr(text)[1:-1], quote(text, safe=""), quote_plus(text))
    }


def from_environment(text: str) -> str | None:
    """The text itself, but for "$NAME" the value of that environment variable, or None if it is not set.

    The variable counts as a key from then on.
    """
    if not (named := re.fullmatch(r"\$(\w+)", text)):
        return text
    _named.add(named[1])
    return os.environ.get(named[1])


def private(path: Path) -> Path:
    """Creates the file if it is missing, and lets only its owner read and write it. Returns the path."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    return path


def write_private(path: Path, content: bytes) -> None:
    """Writes the file whole or not at all, for its owner alone. A link in its place is replaced."""
    number, aside = tempfile.mkstemp(dir=path.parent, prefix=".")  # mode 0600
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        Path(aside).replace(path)
    except OSError:
        Path(aside).unlink(missing_ok=True)
        raise


def private_folder(path: Path) -> Path:
    """Creates the folder if it is missing, and lets only its owner look into it. Returns the path."""
    path.mkdir(exist_ok=True)
    path.chmod(0o700)
    return path
