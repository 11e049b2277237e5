"""Tests take whatever sandbox the machine has; those of test_code.py skip a level that it has not."""

import gc
import os

os.environ["PLAINRL_SANDBOX_LEVEL"] = "none"
gc.disable()  # imports make a million objects that stay: the collector takes a quarter of their time


def pytest_collection_finish():
    gc.enable()
