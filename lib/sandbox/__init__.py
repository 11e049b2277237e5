"""Processes for code that the trainer does not trust: scorers in workers (pool.py), a model's programs in sandboxes.

Workers and sandboxes import this package, so it imports no torch and no numpy, nor pool.py, which needs numpy.
"""

from lib.sandbox.client import GRACE, accept, connect, evaluate, hang_up, make_spec, sandbox_level
from lib.sandbox.scorer import BY_DATA_SOURCE, LARGEST_SCORE, call, checked, load_scorer
from lib.sandbox.zygote import receive, send

__all__ = [
    "BY_DATA_SOURCE",
    "GRACE",
    "LARGEST_SCORE",
    "accept",
    "call",
    "checked",
    "connect",
    "evaluate",
    "hang_up",
    "load_scorer",
    "make_spec",
    "receive",
    "sandbox_level",
    "send",
]
