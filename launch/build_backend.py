"""Builds the wheel for pip and uv (PEP 517): `pip wheel --no-deps .`, `uv sync --extra gpu`. It needs no packages.

The checkout is one folder plainrl/ in it, because other packages, too, may be called `lib` or `tools`. plainrl.pth puts
that folder at the end of sys.path, so that a copy of a script finds lib, rewards and tools. The extras are the
requirement files.
"""

import base64
import hashlib
import subprocess
import tomllib
from contextlib import suppress
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

ROOT = Path(__file__).parents[1]
FOLDERS = ("lib", "rewards", "tools", "launch", "data")
FILES = ("grpo.py", "ppo.py", "remax.py", "dapo.py", "requirements-cpu.txt", "requirements-gpu.txt", "LICENSE")


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    """Returns the file's name."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths = sorted(path for path in inside if "__pycache__" not in path.parts)
    contents = {f"plainrl/{path.relative_to(ROOT)}": path for path in [*paths, *(ROOT / name for name in FILES)]}
    return _write(Path(wheel_directory), contents, {"plainrl/COMMIT": _commit(), "plainrl.pth": "plainrl\n"})


def build_editable(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    """As `build_wheel`, with the checkout's path in place of its files."""
    return _write(Path(wheel_directory), {}, {"plainrl.pth": f"{ROOT}\n"})


def _requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [line.partition(" #")[0] for line in lines if line and not line.startswith("#")]


def _extras() -> dict[str, list[str]]:
    gpu, cpu = _requirements("requirements-gpu.txt"), _requirements("requirements-cpu.txt")
    return {"gpu": gpu, "cpu": [*cpu, *(line for line in gpu if line.startswith("torch=="))]}


def _commit() -> str:
    """With -dirty if files are changed; "" if this is no checkout or there is no git."""
    command = ["git", f"--git-dir={ROOT}/.git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*"]
    with suppress(FileNotFoundError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return ""


def _write(folder: Path, contents: dict[str, Path], texts: dict[str, str]) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = f"plainrl-{project['version']}"
    metadata = [("Metadata-Version", "2.4"), ("Name", "plainrl"), ("Version", project["version"])]
    metadata += [("Summary", project["description"]), ("Requires-Python", project["requires-python"])]
    metadata += [("License-Expression", project["license"])]
    for extra, requirements in _extras().items():
        metadata += [("Provides-Extra", extra), *(("Requires-Dist", f"{r}; extra == '{extra}'") for r in requirements)]
    wheel = [("Wheel-Version", "1.0"), ("Generator", "plainrl"), ("Root-Is-Purelib", "true"), ("Tag", "py3-none-any")]
    for file, fields in (("METADATA", metadata), ("WHEEL", wheel)):
        texts[f"{name}.dist-info/{file}"] = "".join(f"{key}: {value}\n" for key, value in fields)
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
