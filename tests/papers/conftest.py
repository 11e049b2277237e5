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


@pytest.fixture(scope="session")
def assert_losses():
    """assert_losses(losses (B, T), new, of_token): they and their gradient are those of of_token(i, j)."""
    import torch

    def check(losses, new, of_token) -> None:
        B, T = new.shape
        expected = torch.stack([torch.as_tensor(of_token(i, j)) for i in range(B) for j in range(T)]).view(B, T)
        torch.testing.assert_close(losses, expected)
        ours, theirs = (torch.autograd.grad(x.sum(), new, retain_graph=True)[0] for x in (losses, expected))
        torch.testing.assert_close(ours, theirs)

    return check
