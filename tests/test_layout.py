"""The rooms of lib/: imports go one way, without circles, also inside functions; what starts with _ is a room's own.
What stands above lib is not imported."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.common import ROOT

ORDER = ["estimate", "plan", "traced_step", "setup", "run", "agent", "reward", "sandbox", "rollout", "model", "data"]
ORDER += ["distributed", "core_algos", "data_proto", "columns", "args", "sampling", "cli", "manifest", "seeds"]
"""a room imports those behind it"""
ABOVE = ("rewards", "tools", "data", "benchmarks", "tests")  # lib names scorers as text: lib/reward/scorers.py


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of our own code in the file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] in ("lib", *ABOVE))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("lib", *ABOVE):
            yield from ((node.module, alias.name) for alias in node.names)


def room_of(module: str, name: str = "") -> str:
    parts = [*module.split("."), name]
    return parts[1] if parts[0] == "lib" and parts[1] in ORDER else ""  # "": lib itself


FILES = {
    file: room_of("lib." + file.relative_to(ROOT / "lib").parts[0].removesuffix(".py"))
    for file in (ROOT / "lib").rglob("*.py")
}


def test_every_file_is_in_a_room_that_the_order_knows():
    assert {file.name for file, room in FILES.items() if not room} == {"__init__.py"}
    assert set(FILES.values()) - {""} == set(ORDER)


def test_imports_go_one_way():
    for file, room in FILES.items():
        for module, name in imports(file):
            assert module.split(".")[0] == "lib", f"{file}: {module} is above lib"
            target = room_of(module, name)
            if room and target:
                assert ORDER.index(target) >= ORDER.index(room), f"{file}: {module} is above {room}"
            assert not (name.startswith("_") and target != room), f"{file}: {module}.{name}"


def test_only_the_package_that_knows_devices_names_one():
    """What works on one accelerator works on another: lib/distributed/device.py."""
    named = [file for file, room in FILES.items() if room != "distributed" and "cuda" in file.read_text().lower()]
    assert not named


def test_no_two_files_import_each_other():
    """Nor in a longer circle; imports in functions count."""
    graph: dict[str, set[str]] = {}
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in FILES if file.name != "__init__.py"
    }
    for module, file in modules.items():
        named = {name for name, _ in imports(file)}
        graph[module] = {name for name in named if name in modules}
    assert list(TopologicalSorter(graph).static_order())
