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

ROOT = Path(__file__).parents[1]
FOLDERS = ("lib", "agent", "servers", "planner", "rewards", "tools")
PRIVATE = re.compile(r"\b_[A-Za-z]\w*")


def is_foreign(module: str, root: Path) -> bool:
    top = module.partition(".")[0]
    ours = (root / top).is_dir() or (root / f"{top}.py").is_file()
    return not (ours or top in sys.stdlib_module_names or top.startswith("_"))


def imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, module, name or ""). A string such as "torch.distributed._tools" counts, as for a logger."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[A-Za-z]\w*(\.\w+)+", str(node.value)):
            yield node.lineno, node.value if "._" in node.value else node.value.partition(".")[0], ""


def attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of the private ones."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return ((node.lineno, node.attr) for node in found if PRIVATE.fullmatch(node.attr))


def own_names(tree: ast.Module) -> set[str]:
    """Private names that the file defines."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            found.add(node.attr)
    return found


def failure(module: str, name: str) -> str:
    """Why the import fails; "" if it does not."""
    try:
        found = import_module(module)
        if name and not hasattr(found, name):
            import_module(f"{module}.{name}")
    except Exception as error:  # noqa: BLE001  another version may raise anything
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


@cache
def private_words(package: str) -> set[str]:
    """In the sources of a package."""
    spec, words = find_spec(package), set()
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in Path(folder).rglob("*.py*"):
            if file.suffix in (".py", ".pyi"):
                words |= {*PRIVATE.findall(file.read_text(errors="replace"))}
    return words


def missing(root: Path = ROOT) -> Iterator[str]:
    """One line for each."""
    trees = {file: ast.parse(file.read_text()) for folder in FOLDERS for file in sorted(root.glob(f"{folder}/**/*.py"))}
    ours = {"_replace", "_asdict", *dir(os), *dir(sys), *dir(threading)}.union(*map(own_names, trees.values()))
    for file, tree in trees.items():
        packages = {"torch"}
        for line, module, name in imports(tree):
            package = module.partition(".")[0]
            if is_foreign(module, root) and find_spec(package):  # others are optional
                packages.add(package)
                if why := failure(module, name):
                    yield f"{file.relative_to(root)}:{line}: {module}{name and '.'}{name}: {why}"
        for line, name in attributes(tree):
            if name not in ours and not any(name in private_words(package) for package in packages):
                yield f"{file.relative_to(root)}:{line}: {name}: not in {', '.join(sorted(packages))}"


if __name__ == "__main__":
    lines = [*missing()]
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(lines)} missing")
    sys.exit(bool(lines))
