"""The rooms of lib/: imports go one way, without circles, also inside functions; what starts with _ is a room's own.
What stands above lib is not imported."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.common import ROOT

ORDER = ["report", "estimate", "plan", "traced_step", "setup", "run", "agent", "reward", "sandbox", "rollout", "model"]
ORDER += ["data", "distributed", "core_algos", "data_proto", "columns", "args", "sampling", "cli", "manifest", "seeds"]
"""a room imports those behind it"""
PLANNER = ("estimate", "plan", "traced_step", "memory", "trace", "roofline", "step_flops", "fake_gpu")
PRIVATE = {
    "torch.testing._internal.distributed.fake_pg": "distributed/device.py",
    "torch.distributed._functional_collectives.all_to_all_single_autograd": "distributed/collectives.py",
    "torch._inductor.config": "setup.py",
}
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


def test_private_modules_of_torch_are_imported_where_a_flag_asks_for_them():
    """A release of torch may rename one: then only this flag, and the planner, stop. fake_pg: see the function."""
    found = {}
    for file, room in FILES.items():
        if room not in PLANNER and file.stem not in PLANNER:
            tree = ast.parse(file.read_text())
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            inside = {id(node) for function in functions for node in ast.walk(function)}
            for node in ast.walk(tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                modules = [f"{node.module}.{name}" for name in names] if isinstance(node, ast.ImportFrom) else names
                for module in modules:
                    if module.startswith("torch.") and "._" in module:
                        assert id(node) in inside, f"{file}: {module}"
                        found[module] = file.relative_to(ROOT / "lib").as_posix()
    assert found == PRIVATE


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
