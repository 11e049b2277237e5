import importlib.util
import sys
from functools import cache

import pytest

import lib.data_proto  # noqa: F401  tensordict patches torch.manual_seed, which tests/restored.py would report
from tools.paper import patched


@pytest.fixture(scope="session")
def script_of(tmp_path_factory):
    """Name of a method -> the path of its script, in a folder of its own."""
    return cache(lambda name: patched(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def module_of(script_of):
    """Name of a method -> its script as a module."""

    @cache
    def load(name: str):
        spec = importlib.util.spec_from_file_location(name, script_of(name))
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
