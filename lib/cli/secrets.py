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
SHORTEST_LINE = 16  # of a secret of several lines, which may be printed with something before each line
SOFT = """ \a\b\t\n\v\f\r'"+"""  # what quoting adds, escapes and wraps; + is a URL's space
BACKSLASHES = r"(?:\\|%(?:25)*5[cC])++"  # one more for each level of quoting
ENCODED = re.compile(
    rf"(?P<bytes>(?:(?:{BACKSLASHES}x|%(?!(?:25)*5[cC])(?:25)*)[0-9a-fA-F]{{2}})+)"
    rf"|(?P<utf_16_be>(?:{BACKSLASHES}u[0-9a-fA-F]{{4}})+)|(?P<utf_32_be>{BACKSLASHES}U[0-9a-fA-F]{{8}})"
    rf"|{BACKSLASHES}[abfnrtv]?|[{re.escape(SOFT)}]+"
)
DIGITS = re.compile(rf"(?:{BACKSLASHES}[xuU]|%(?:25)*)((?:[0-9a-fA-F]{{2}})+)")
LATIN_1 = {0xDC00 + byte: byte for byte in range(0x80, 0x100)}  # bytes that are no UTF-8
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
    held = (name for name, secret in _in_environment() if _holds(text, secret))
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
    """The text, with *** in place of the environment's keys and passwords, also where they are quoted or escaped
    (JSON, repr, a shell, a URL), wrapped, or printed line by line."""
    secrets = sorted({secret for _, secret in _in_environment()}, key=len, reverse=True)
    for secret in secrets:
        text = text.replace(secret, "***")
    cores = sorted({core for secret in secrets for core in _cores(secret)}, key=len, reverse=True)
    core_of_text = _core(text) if cores else ""
    if not any(core in core_of_text for core in cores):
        return text
    spans = []  # of each character of core_of_text, where the text has it
    for part in re.finditer(f"{ENCODED.pattern}|.", text, re.DOTALL):
        spans += [part.span()] * len(_core(part[0]))
    kept, end = [], 0
    for found in re.finditer("|".join(map(re.escape, cores)), core_of_text):
        kept.append(text[end : spans[found.start()][0]])
        end = spans[found.end() - 1][1]
    return "***".join([*kept, text[end:]])


def redact_values(value: Any) -> Any:
    """The value as JSON holds it, with all texts in it redacted."""
    if isinstance(value, dict):
        return {redact(str(name)): redact_values(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(inner) for inner in value]
    return value if value is None or isinstance(value, int | float) else redact(str(value))


def _holds(text: str, secret: str) -> bool:
    return secret in text or any(core in _core(text) for core in _cores(secret))


@cache
def _cores(secret: str) -> list[str]:
    """What a text is searched for besides the secret itself."""
    lines = [line for line in map(_core, re.split(r"\\n|\n", secret)) if len(line) >= SHORTEST_LINE]
    return [core for core in {_core(secret), *lines} if len(core) >= SHORTEST]


def _core(text: str) -> str:
    """The text without quotes, backslashes and whitespace, and with escaped characters decoded: a secret has one
    core however it is written."""
    return ENCODED.sub(_decoded, text)


def _decoded(part: re.Match) -> str:
    if part.lastgroup is None:
        return ""
    encoded = bytes.fromhex("".join(DIGITS.findall(part[0])))
    if part["bytes"]:
        text = encoded.decode(errors="surrogateescape").translate(LATIN_1)
    else:
        text = encoded.decode(part.lastgroup, errors="replace")
    return "".join(c for c in text if c not in SOFT and c != "\\")


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
