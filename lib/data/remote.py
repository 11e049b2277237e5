"""Files and folders at URLs (s3://bucket/model, hf://datasets/owner/name/train.parquet, https://...): fsspec copies
them to a cache on each node."""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from lib import InputError, is_first_on_node
from lib.args.checks import URL
from lib.distributed import NO_ROOM, current_stage, enter_stage, wait_for_all

STALL_S = 180.0  # without a byte over HTTP
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
NO_VERSION = {"name", "type", "size", "url", "mimetype", "partial"}  # the rest of fsspec's info changes with the file
copies: dict[tuple[str, bool], str] = {}  # {(URL, with weights): path} of this process


def local_copy(name: str, *, weights: bool = True) -> str:
    """A path as it is; for a URL the path of its copy on this node, which the node's first rank makes. A file that has
    changed is copied again. weights: False leaves out a model's weights.

    For a URL a collective. Raises InputError: no such file, no permission, no answer, no room, no package for it."""
    if not URL.match(name):
        return name
    if found := copies.get((name, True)) or copies.get((name, weights)):
        return found
    stage = current_stage()
    enter_stage(f"copying {name}", limited=False)
    for copies_now in (True, False):
        if is_first_on_node() == copies_now:
            copies[name, weights] = str(_copied(name, weights))
        wait_for_all()
    enter_stage(stage)
    return copies[name, weights]


def _copied(url: str, weights: bool) -> Path:
    """The copy's path. Its folder is named after the URL and its files' versions, and appears by a rename."""
    with _named_errors(url):
        fs, files = _files_at(url, weights)
    versions = {name: {k: v for k, v in info.items() if v and k not in NO_VERSION} for name, info in files.items()}
    if not all(versions.values()):
        raise InputError(f"{url}: no ETag and no date by which a change would be noticed: give the path of a copy")
    key = hashlib.sha256(json.dumps([url, versions], sort_keys=True, default=str).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface", "plainrl").expanduser()
    folder, part = cache / key, cache / f"{key}.{platform.node()}.part"
    inside = Path(*[name for name in url.partition("://")[2].partition("?")[0].split("/") if name.strip(".")][-2:])
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another job may be copying it
            if not folder.exists():
                shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
                (part / inside).parent.mkdir(parents=True)
                _get(url, fs, {part / inside / name: info for name, info in files.items()})
                part.rename(folder)
    except OSError as error:
        raise InputError(f"{url}: cannot be copied to {cache}: {error}; make room, or set HF_HOME") from error
    return folder / inside


def _get(url: str, fs: Any, files: dict[Path, dict[str, Any]]) -> None:
    """Copies each file to its path."""
    print(f"copying {url} ({sum(info['size'] or 0 for info in files.values()) / 2**20:,.2f} MiB)", flush=True)
    for path in files:
        path.parent.mkdir(exist_ok=True)
    with _named_errors(url):
        fs.get([info["name"] for info in files.values()], [str(path) for path in files])
    for path, info in files.items():
        if info["size"] not in (None, size := path.stat().st_size):
            raise InputError(f"{url}: {size} of the {info['size']} bytes of {path.name} came: start again")


def _files_at(url: str, weights: bool) -> tuple[Any, dict[str, dict[str, Any]]]:
    """(fsspec's file system, its info of each file by name); the name of a single file is ""."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {}
    protocol = url.partition("://")[0]
    if protocol in ("http", "https"):  # aiohttp's own limit is 5 minutes for a file, and it ignores proxies
        from aiohttp import ClientTimeout

        own = {"timeout": ClientTimeout(total=None, sock_connect=30, sock_read=STALL_S), "trust_env": True}
        options["client_kwargs"] = own | conf.get(protocol, {}).get("client_kwargs", {})
    fs, path = url_to_fs(url, **options)
    info = fs.info(path)
    if info["type"] != "directory":
        return fs, {"": info}
    files = {PurePosixPath(file["name"]).name: file for file in fs.ls(path, detail=True) if file["type"] == "file"}
    files = {name: file for name, file in files.items() if weights or not name.endswith(WEIGHTS)}
    if not files:
        raise FileNotFoundError(f"no file in the folder {path}")
    return fs, files


@contextmanager
def _named_errors(url: str) -> Iterator[None]:
    """Raises InputError for what a file system raises, but for a full disk."""
    try:
        yield
    except Exception as error:  # each file system has its own
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise
        lacks = isinstance(error, ImportError) or "load lib" in str(error)  # fsspec's text names the package
        cause = error if lacks else error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        reason = re.sub(r"\?[^\s'\")]*", "?...", reason)  # a redirection's URL may be signed
        advice = "check the URL, the network and the credentials"
        if lacks:
            advice = "install Java and Hadoop's libhdfs" if url.startswith("hdfs:") else "install that package"
        raise InputError(f"{url}: {reason}; {advice} (docs/data.md)") from error
