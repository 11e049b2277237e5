"""What a GPU machine with torch and transformers lacks, as wheels: `benchmarks/gpu_check.sh --wheels FOLDER`.

Which of requirements.txt the scripts and the parts of the check import is read from processes that run them small on a
CPU. With them comes what they require.
"""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
THERE = ("torch", "triton", "transformers", "accelerate", "numpy", "safetensors", "tokenizers")
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17, 5)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
RUN = """
import atexit, runpy, sys
names = sys.argv.pop()
atexit.register(lambda: open(names, "a").write("\\n".join(sys.modules) + "\\n"))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PARTS = "from benchmarks.gpu_check.run import PARTS, import_parts; import_parts(PARTS)"
SMALL = "--total-steps 1 --prompts-per-step 8 --val-every 0 --no-val-before-train"


def imported() -> set[str]:
    """The top-level modules of a step of each script, one with LoRA, and of the parts of the check."""
    with tempfile.TemporaryDirectory() as folder:
        names, parts = Path(folder, "names"), Path(folder, "parts.py")
        parts.write_text(PARTS)
        for words in ("grpo.py --lora-rank 4", "ppo.py", "remax.py", "dapo.py", str(parts)):
            command = [sys.executable, "-c", RUN, *words.split(), *SMALL.split(), "--output-dir", folder, str(names)]
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"error: {words} failed, so what it imports is not known:\n{done.stderr[-2000:]}")
        return {name.partition(".")[0] for name in names.read_text().split()}


def with_requirements(packages: set[str]) -> set[str]:
    """The packages, and what they require here without extras."""
    found: set[str] = set()
    queue = [*packages]
    while queue:
        if (name := canonicalize_name(queue.pop())) not in found:
            found.add(name)
            needed = map(Requirement, requires(name) or ())
            queue += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def missing(there: tuple[str, ...] = ()) -> list[str]:
    """name==version of each package that the machine lacks, at the version that is installed here. there: packages that
    it has besides THERE."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    asked = {canonicalize_name(Requirement(line).name) for line in lines if line}
    owners = packages_distributions()
    used = {canonicalize_name(owner) for name in imported() for owner in owners.get(name, ())} & asked
    return [
        f"{name}=={version(name)}" for name in sorted(with_requirements(used) - with_requirements({*THERE, *there}))
    ]


def download(folder: str, python: str = "3.12", *there: str) -> None:
    """Wheels for Linux on x86-64 and this Python."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
    subprocess.run([*command, "--python-version", python, *platforms, *missing(there)], check=True)


if __name__ == "__main__":
    download(*sys.argv[1:])
