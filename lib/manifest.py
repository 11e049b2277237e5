"""manifest.json: the size and the hash of each file in a folder. It shows whether the folder holds what was written."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

MANIFEST = "manifest.json"


def file_hash(file: Path) -> str:
    threads = os.cpu_count() or 1  # AUTO's threads are global; a forked child would wait for them for ever
    return blake3(max_threads=threads).update_mmap(file).hexdigest()


def entry(file: Path, known_hash: str | None = None) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "blake3": known_hash or file_hash(file)}


def write_manifest(folder: Path, files: dict[str, dict[str, Any]], **about: Any) -> None:
    """files: by name, the `entry` of each. A kill leaves no half of a manifest."""
    aside = folder / "manifest.tmp"
    aside.write_text(json.dumps(about | {"files": files}, indent=1))
    aside.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text())


def why_incomplete(folder: Path, needed: Iterable[str] = (), **about: Any) -> str | None:
    """Why the folder's files are not those of its manifest by their names and sizes, or the manifest is not `about`
    this; None if all is well. needed: files without which a folder is not complete."""
    try:
        manifest = read_manifest(folder)
        sizes = {name: file["bytes"] for name, file in manifest["files"].items()}
        found = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    except OSError:
        return f"no {MANIFEST}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"{MANIFEST} is damaged"
    for key, value in about.items():
        if manifest.get(key) != value:
            return f"it is of {manifest.get(key)}"
    for name, size in sizes.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes, not {size}"
    visible = {name for name in found if not name.startswith(".")}  # .nfs0001 is an NFS client's
    if unlisted := sorted({*needed, *visible} - {MANIFEST} - sizes.keys()):
        return f"{unlisted[0]} is not in {MANIFEST}"
    return None


def why_altered(folder: Path, but: Iterable[str] = ()) -> str | None:
    """Names a file, other than those of `but`, whose hash is not the manifest's; None if there is none."""
    for name, file in read_manifest(folder)["files"].items():
        if name not in but and file_hash(folder / name) != file.get("blake3"):
            return f"{name} is not as it was saved"
    return None
