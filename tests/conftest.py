"""Tests take whatever sandbox the machine has; those of test_code.py skip a level that it has not."""

import os

os.environ["PLAINRL_SANDBOX_LEVEL"] = "none"
