"""What the installed versions of other packages lack of what this code uses.

    python -m tools.check_versions

Imports each name that lib/, agent/, servers/, planner/, rewards/ and tools/ import from other packages. A private
attribute of their objects, such as `model._no_split_modules`, must occur in the source of a package that its file
imports. Prints one line for each that is missing, and exits with 1 if there is one.
"""

import ast
import os
import re
import sys
import threading
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("lib", "agent", "servers", "planner", "rewards", "tools")
PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
OF_PYTHON = {"_replace", "_asdict", *dir(os), *dir(sys), *dir(threading)}


def imports(tree: ast.Module) -> Iterator[tuple[int, str, str, str]]:
    """(line, module, name or "", its name in this file). A string such as "torch.distributed._tools" is one, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "", alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, node.module, alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[A-Za-z]\w*(\.\w+)+", text := str(node.value)):
            yield node.lineno, text if "._" in text else text.partition(".")[0], "", ""


def is_installed(package: str, root: Path) -> bool:
    """Packages that are not installed are optional. Ours and Python's are none."""
    ours = (root / package).is_dir() or (root / f"{package}.py").is_file()
    return not (ours or package in sys.stdlib_module_names) and find_spec(package) is not None


def load(module: str, name: str) -> Any:
    found = import_module(module)
    if not name:
        return found
    return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")


def has_path(found: Any, names: list[str]) -> bool:
    for name in names:
        found = getattr(found, name, None)
    return found is not None


def own_names(tree: ast.Module) -> set[str]:
    """Names of functions and variables of the file, and attributes of self and cls."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return found | {node.attr for node in attributes if ast.unparse(node.value) in ("self", "cls")}


@cache
def private_words(package: str) -> set[str]:
    """Of a package's sources."""
    spec, words = find_spec(package), set[str]()
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in Path(folder).rglob("*.py*"):
            if file.suffix in (".py", ".pyi"):
                words |= {*PRIVATE.findall(file.read_text(errors="replace"))}
    return words


def missing(root: Path = ROOT) -> Iterator[str]:
    """One line for each."""
    trees = {file: ast.parse(file.read_text()) for folder in FOLDERS for file in sorted(root.glob(f"{folder}/**/*.py"))}
    ours = OF_PYTHON.union(*map(own_names, trees.values()))
    for file, tree in trees.items():
        where, packages, objects = file.relative_to(root), {"torch"}, dict[str, Any]()
        for line, module, name, own_name in imports(tree):
            if is_installed(package := module.partition(".")[0], root):
                packages.add(package)
                try:
                    objects[own_name] = load(module, name)
                except Exception as error:  # noqa: BLE001  another version may raise anything
                    what = f"{module}.{name}" if name else module
                    yield f"{where}:{line}: {what}: {type(error).__name__}: {error}".partition("\n")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in ours:
                base, *names = ast.unparse(node).split(".")
                if not (has_path(objects.get(base), names) or any(node.attr in private_words(p) for p in packages)):
                    yield f"{where}:{node.lineno}: {ast.unparse(node)}: not in {', '.join(sorted(packages))}"


if __name__ == "__main__":
    lines = [*missing()]
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(lines)} missing")
    sys.exit(bool(lines))
