"""Keeps keys and passwords out of logs. A run takes them from the environment, and flags, which config.json and logs
repeat, may not hold one. They are struck out of what a run prints and what a tool answers. Files that may still hold
one can be read by their owner only.

A secret is recognised by its name (api_key, Authorization, a variable X_TOKEN), by its form (sk-..., user:password@ in
a URL), or because the environment holds it under such a name. Other secrets are not found.
"""

import json
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

NAME = re.compile(
    r"(?:^|[_.-])(?:(?:api|access|auth|secret|private)[_-]?key|(?:api|access|auth|bearer|refresh|hf)[_-]?token|secret"
    r"|password|passwd|passphrase|authorization|credentials?)$|^token$",
    re.IGNORECASE,
)
NAME_OF_VARIABLE = re.compile(
    r"(?:^|[_-]|api|pg)(?:key|token|secret|password|passwd|passphrase|authorization|credentials?)$", re.IGNORECASE
)
FORMS = {
    "user:password@ in a URL": r"://[^/?#\s@]+@",
    "a key in a URL's query": r"(?i:[?&](?:api_?key|key|(?:access_)?token|sig(?:nature)?|secret|password)=)",
    "it looks like a key": r"(?<![\w-])(?:[spr]k-[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.eyJ[\w-]+)",
}
PASSWORD_IN_URL = re.compile(r"://[^/?#\s:@]*:([^/?#\s@]+)@")
SHORTEST = 8  # shorter values are not struck out, because they occur in other words
_named: set[str] = set()  # variables that hold a key, as flags say


def secret_in(value: Any, flag: str, *path: str) -> str | None:
    """Where and why the value of a flag holds a key or password: "flag path: why", without the secret; else None.

    value: of any type; a text may be JSON. path: the keys in the flag's JSON that lead to the value.
    """
    if isinstance(value, dict):
        return _first(secret_in(inner, flag, *path, str(key)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return _first(secret_in(inner, flag, *path) for inner in value)
    if not isinstance(value, str) or not value:
        return None
    where, key = " ".join([flag, *path]), path[-1] if path else ""
    if key.endswith("_env"):
        _named.add(value)
        return None if re.fullmatch(r"[A-Za-z_]\w*", value) else f"{where}: it is not the name of a variable"
    if NAME.search(key):
        return f"{where}: it is a key or password by its name"
    if value.lstrip().startswith("{"):
        try:
            return secret_in(json.loads(value), flag, *path)
        except (ValueError, RecursionError):  # parse_json reports it
            return _first(f"{where}: {word}" for word in re.findall(r"[\w-]+", value) if NAME.search(word))
    if value.startswith("mcp:") and (name := _key_of_command(value.removeprefix("mcp:"))):
        return f"{where}: {name} gets a key or password"
    for why, form in FORMS.items():
        if re.search(form, value):
            return f"{where}: {why}"
    return _first(f"{where}: it holds the value of {name}" for name, secret in _in_environment() if secret in value)


def _first(found) -> str | None:
    return next(filter(None, found), None)


def _key_of_command(command: str) -> str | None:
    """The name in the command's first NAME=secret or option with a secret; None without any. $VARIABLE is no secret."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    for word, following in pairwise([*words, ""]):
        name, given, text = word.partition("=")
        is_option = name.startswith("-")
        is_key = NAME.search(name.lstrip("-")) if is_option else given and NAME_OF_VARIABLE.search(name)
        if is_key and (text if given else following) and not text.startswith("$"):
            return name
    return None


def _in_environment() -> list[tuple[str, str]]:
    """(name, secret) of the environment variables that hold one."""
    secrets = []
    for name, value in os.environ.items():
        if NAME_OF_VARIABLE.search(name) or name in _named:
            secrets.append((name, value))
        elif password := PASSWORD_IN_URL.search(value):
            secrets.append((name, password[1]))
    return [(name, secret) for name, secret in secrets if len(secret) >= SHORTEST]


def struck(text: str) -> str:
    """The text, with *** in place of the environment's keys and passwords."""
    for secret in sorted({secret for _, secret in _in_environment()}, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def from_environment(text: str) -> str | None:
    """The text itself, but for "$NAME" the value of that environment variable, or None if it is not set.

    The variable counts as a key from then on.
    """
    named = re.fullmatch(r"\$(\w+)", text)
    if named is None:
        return text
    _named.add(named[1])
    return os.environ.get(named[1])


def private(path: Path) -> Path:
    """Lets only the owner read and write the file, whatever the umask, and creates it if missing. Returns the path."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    return path


def private_folder(path: Path) -> None:
    """Lets only the owner look into the folder, whatever the umask, and creates it if missing."""
    path.mkdir(exist_ok=True)
    path.chmod(0o700)
