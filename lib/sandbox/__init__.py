"""Processes for code that the trainer does not trust: scorers in workers (pool.py), a model's programs in sandboxes.
Workers and sandboxes import this package, so it imports no torch and no numpy, nor pool.py, which needs numpy."""
# ruff: noqa: F401, I001  these names are what the package offers

from lib.sandbox.client import GRACE, Shell, accept, connect, evaluate, hang_up, make_spec, sandbox_level
from lib.sandbox.scorer import ARGUMENTS, BY_DATA_SOURCE, LARGEST_SCORE, OF, ON_REQUEST
from lib.sandbox.scorer import call, checked, load_scorer, plural, text_hash
from lib.sandbox.zygote import receive, send
