from functools import cache

import pytest
import torch

from tests.common import imported
from tools.paper import patched


@pytest.fixture(scope="session")
def script_of(tmp_path_factory):
    """Name of a method -> the path of its script, in a folder of its own."""
    return cache(lambda name: patched(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def module_of(script_of):
    """Name of a method -> its script as a module."""
    return cache(lambda name: imported(script_of(name)))


@pytest.fixture(scope="session")
def assert_losses():
    """assert_losses(losses (B, T), new, of_token): they and their gradient are those of of_token(i, j)."""

    def check(losses, new, of_token) -> None:
        B, T = new.shape
        expected = torch.stack([torch.as_tensor(of_token(i, j)) for i in range(B) for j in range(T)]).view(B, T)
        torch.testing.assert_close(losses, expected)
        ours, theirs = (torch.autograd.grad(x.sum(), new, retain_graph=True)[0] for x in (losses, expected))
        torch.testing.assert_close(ours, theirs)

    return check
