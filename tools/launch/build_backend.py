"""Builds the wheel for pip and uv (PEP 517): `pip wheel --no-deps .`, `uv sync --extra gpu`. This needs no packages.

The wheel has the files that git tracks, as they are now: other files in the checkout may be private. They are one
folder plainrl/ in it, because other packages, too, may be called `lib` or `tools`. plainrl.pth puts that folder at the
end of sys.path, so that a copy of a script finds lib, rewards and tools. The wheel requires what the scripts need
without vLLM; its extras are the locked requirement files. Its command is `plainrl`.
"""

import base64
import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

ROOT = Path(__file__).parents[2]
FOLDERS = ("lib", "agent", "servers", "planner", "rewards", "tools", "data", "papers")
FILES = (
    "grpo.py",
    "ppo.py",
    "remax.py",
    "dapo.py",
    "tools/launch/requirements-cpu.txt",
    "tools/launch/requirements-gpu.txt",
    "LICENSE",
)
COMMAND = "[console_scripts]\nplainrl = tools.paper:plainrl\n"


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    """Returns the file's name."""
    tracked = [name for name in _git("ls-files", "-z", "--", *FOLDERS, *FILES).split("\0") if name]
    if missing := {*FILES} - {*tracked}:
        sys.exit(f"{ROOT}: git does not track {min(missing)}, and a wheel has git's files: build it in a clone")
    for name in tracked:
        if not (ROOT / name).is_file() or (ROOT / name).resolve() != ROOT.resolve() / name:
            sys.exit(f"{ROOT / name}: deleted, or a link, which a wheel cannot hold: restore it, or remove it from git")
    commit = _git("describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*").strip()
    contents = {f"plainrl/{name}": ROOT / name for name in tracked}
    return _write(Path(wheel_directory), contents, {"plainrl/COMMIT": commit, "plainrl.pth": "plainrl\n"})


def build_editable(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    """As `build_wheel`, with the checkout's path in place of its files."""
    return _write(Path(wheel_directory), {}, {"plainrl.pth": f"{ROOT}\n"})


def _requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text().partition("# tests and lint")[0].splitlines()
    return [line.partition(" #")[0] for line in lines if line and not line.startswith("#")]


def _required() -> list[str]:
    return [line for line in _requirements("requirements.txt") if not line.startswith(("vllm==", "cuda-python=="))]


def _extras() -> dict[str, list[str]]:
    gpu, cpu = _requirements("tools/launch/requirements-gpu.txt"), _requirements("tools/launch/requirements-cpu.txt")
    return {"gpu": gpu, "cpu": [*cpu, *(line for line in gpu if line.startswith("torch=="))]}


def _git(*words: str) -> str:
    """What git prints about this checkout. Ends the build if there is no git, or no checkout."""
    command = ["git", f"--git-dir={ROOT}/.git", f"--work-tree={ROOT}", *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # those of a hook
    try:
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        sys.exit(f"{ROOT}: a wheel has git's files: install git, or put this folder on PYTHONPATH")
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().partition("\n")[0]
        sys.exit(f"{ROOT}: a wheel has git's files ({why}): build it in a clone, or put this folder on PYTHONPATH")


def _write(folder: Path, contents: dict[str, Path], texts: dict[str, str]) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = f"plainrl-{project['version']}"
    metadata = [("Metadata-Version", "2.4"), ("Name", "plainrl"), ("Version", project["version"])]
    metadata += [("Summary", project["description"]), ("Requires-Python", project["requires-python"])]
    metadata += [("License-Expression", project["license"])]
    metadata += [("Requires-Dist", requirement) for requirement in _required()]
    for extra, requirements in _extras().items():
        metadata += [("Provides-Extra", extra), *(("Requires-Dist", f"{r}; extra == '{extra}'") for r in requirements)]
    wheel = [("Wheel-Version", "1.0"), ("Generator", "plainrl"), ("Root-Is-Purelib", "true"), ("Tag", "py3-none-any")]
    for file, fields in (("METADATA", metadata), ("WHEEL", wheel)):
        texts[f"{name}.dist-info/{file}"] = "".join(f"{key}: {value}\n" for key, value in fields)
    texts[f"{name}.dist-info/entry_points.txt"] = COMMAND
    record = ""
    with ZipFile(folder / f"{name}-py3-none-any.whl", "w", ZIP_DEFLATED) as archive:
        for target, path in contents.items():
            archive.write(path, target)  # with its permissions
            record += _line(target, path.read_bytes())
        for target, text in texts.items():
            archive.writestr(target, text)
            record += _line(target, text.encode())
        archive.writestr(f"{name}.dist-info/RECORD", f"{record}{name}.dist-info/RECORD,,\n")
    return f"{name}-py3-none-any.whl"


def _line(target: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{target},sha256={digest},{len(content)}\n"
