"""What a GPU machine with torch and transformers lacks, as wheels: `benchmarks/gpu_check.sh --wheels FOLDER`.

What the scripts and the parts of the check import is read from processes that run them small on a CPU.
"""

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
SMALL = "--total-steps 1 --prompts-per-step 8 --val-every 0 --no-val-before-train"


def imported() -> set[str]:
    """The top-level modules of a step of each script."""
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "names")
        for script in ("grpo", "ppo", "remax", "dapo"):
            words = [f"{script}.py", *SMALL.split(), "--output-dir", folder]
            subprocess.run([sys.executable, "-c", RUN, *words, str(names)], cwd=ROOT, check=True, capture_output=True)
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


def missing() -> list[str]:
    """name==version of each package that the machine lacks, at the version that is installed here."""
    owners = packages_distributions()
    needed = {canonicalize_name(owners[name][0]) for name in imported() if name in owners}
    return [f"{name}=={version(name)}" for name in sorted(needed - with_requirements({*THERE}))]


def download(folder: str, python: str = "3.12") -> None:
    """Wheels for Linux on x86-64 and this Python."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
    subprocess.run([*command, "--python-version", python, *platforms, *missing()], check=True)


if __name__ == "__main__":
    download(*sys.argv[1:])
