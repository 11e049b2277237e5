"""lib/ and its wings: imports go one way, without circles, also inside functions; what starts with _ is a room's own.
What stands above lib is not imported; a wing (agent/, servers/, planner/) is imported by lib/setup alone, inside a
function; agent names types of servers."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.common import ROOT

ORDER = "setup run log reward sandbox rollout model data distributed core_algos data_proto batch_values args declared"
ORDER = [*ORDER.split(), "columns", "sampling", "cli", "manifest"]
"""a room imports those behind it"""
WINGS = ("agent", "servers", "planner")
ABOVE = ("rewards", "tools", "data", "benchmarks", "tests")  # lib names scorers as text: lib/reward/scorer.py
PRIVATE = {
    "torch.testing._internal.distributed.fake_pg": "lib/distributed/device.py",
    "torch.distributed._functional_collectives.all_to_all_single_autograd": "lib/distributed/collectives.py",
    "torch._inductor.config": "lib/setup/ranks.py",
}


@cache
def imports(file: Path) -> list[tuple[str, str, bool]]:
    """(module, name, inside a function) of every import in the file."""
    tree = ast.parse(file.read_text())
    apart = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    apart += [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    inside, found = {id(node) for part in apart for node in ast.walk(part)}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "", id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name, id(node) in inside) for alias in node.names]
    return found


def room_of(module: str, name: str = "") -> str:
    parts = [*module.split("."), name]
    return parts[0] if parts[0] in WINGS else parts[1] if parts[0] == "lib" and parts[1] in ORDER else ""


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


FILES = {file: room_of(module_of(file)) for folder in ("lib", *WINGS) for file in (ROOT / folder).rglob("*.py")}


def test_every_file_is_in_a_room_that_the_order_knows_and_imports_go_one_way():
    assert {file.name for file, room in FILES.items() if not room} == {"__init__.py"}
    assert set(FILES.values()) - {""} == {*ORDER, *WINGS}
    for file, room in FILES.items():
        for module, name, inside in imports(file):
            top, target = module.split(".")[0], room_of(module, name)
            assert top not in ABOVE, f"{file}: {module} is above lib"
            if target in WINGS and room != target:
                may = room == "setup" or (room, target) == ("agent", "servers")
                assert may and inside, f"{file}: {module} is a wing"
            elif room in ORDER and target in ORDER:
                assert ORDER.index(target) >= ORDER.index(room), f"{file}: {module} is above {room}"
            assert not (target and name.startswith("_") and target != room), f"{file}: {module}.{name}"


def test_private_modules_of_torch_are_imported_where_a_flag_asks_for_them():
    """A release of torch may rename one: then only this flag, and the planner, stop. fake_pg: see the function."""
    found = {}
    for file, room in FILES.items():
        for module, name, inside in imports(file) if room != "planner" else ():
            full = f"{module}.{name}" if name else module
            if full.startswith("torch.") and "._" in full:
                assert inside, f"{file}: {full}"
                found[full] = file.relative_to(ROOT).as_posix()
    assert found == PRIVATE


def test_only_the_package_that_knows_devices_names_one():
    """What works on one accelerator works on another: lib/distributed/device.py."""
    files = [file for file, room in FILES.items() if room != "distributed" and file.name != "fake_gpu.py"]
    assert [file for file in files if "cuda" in file.read_text().lower()] == []


def test_no_two_files_import_each_other():
    """Nor in a longer circle; imports in functions count, but for those of the wings in lib/setup."""
    graph: dict[str, set[str]] = {}
    modules = {module_of(file): file for file in FILES if file.name != "__init__.py"}
    for module, file in modules.items():
        named = {name for name, _, inside in imports(file) if room_of(name) not in WINGS or FILES[file] in WINGS}
        graph[module] = {name for name in named if name in modules}
    assert list(TopologicalSorter(graph).static_order())
