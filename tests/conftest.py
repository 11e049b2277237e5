"""Tests take whatever sandbox the machine has; those of test_code.py skip a level that it has not."""

import gc
import importlib.metadata
import os
import random
import sys
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

from tests.one_server import share_fork_server
from tests.parsers import keep_parsers
from tests.restored import all_restored

os.environ["PLAINRL_SANDBOX_LEVEL"] = "none"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of a hundred processes would compile lib/ again
gc.disable()  # imports make a million objects that stay: the collector takes a quarter of their time
keep_parsers()
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)  # vLLM reads those of all packages an engine
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


# folders whose tests start servers and jobs
FIRST = ("servers", "rollout", "scripts", "distributed", "model", "tests", "planner", "run", "log")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also the tests that are marked as slow")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="the tests of a file, and the files, in another order")


@pytest.hookimpl(tryfirst=True)  # before pytest puts the tests with one value of a fixture side by side
def pytest_collection_modifyitems(config, items):
    """The longest files first: processes take whole files, and would wait for the one that has the last."""
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: make test-slow"))

    def rank(item):
        folder = item.path.parent.name
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    order = {item: n for n, item in enumerate(items, start=1)}
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)
    files = list(dict.fromkeys(item.path for item in items))

    def place(item):
        has_group = seed is not None and "world" in item.fixturenames  # behind the tests that fork ranks
        return rank(item), files.index(item.path), has_group, order[item] if item.get_closest_marker("in_order") else 0

    items.sort(key=place)


MANY = 500  # modules
frozen = 0


def pytest_collection_finish():
    """Later collections need not look through what there is now: imports make millions of objects that stay."""
    global frozen
    gc.freeze()
    frozen = len(sys.modules)


def pytest_unconfigure():
    gc.unfreeze()  # extensions report what is never freed


def pytest_runtest_setup():
    gc.enable()  # read_flags leaves it off, and a thousand tests without it fill the memory
    if len(sys.modules) > frozen + MANY:  # vLLM, which collects explicitly with each engine
        pytest_collection_finish()


@pytest.fixture(scope="session", autouse=True)
def _one_fork_server(request, tmp_path_factory):
    if hasattr(request.config, "workerinput"):
        share_fork_server(tmp_path_factory.getbasetemp().parent)


@pytest.fixture(scope="module", autouse=True)
def _restored_by_file(request):
    """Fixtures of a file may patch something until its end."""
    gc.collect()  # else what is garbage now stays for ever
    pytest_collection_finish()
    with all_restored(f"a fixture of {request.node.name}"):
        yield


@pytest.fixture(autouse=True)
def _restored_by_test(request, _restored_by_file):
    with all_restored(request.node.name):
        yield


@pytest.fixture(scope="module")
def world():
    """A process group of one."""
    import torch.distributed as dist  # not by the tests that need none

    from lib.distributed import init_distributed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())  # processes that tests start do not get the launch variables
        yield init_distributed()
        dist.destroy_process_group()


@pytest.fixture
def one_rank():
    """The same for a single test, without the variables of a launcher."""
    import torch
    import torch.distributed as dist

    from lib.distributed import World

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"))
    dist.destroy_process_group()
