"""Sandboxes for programs that a model wrote. Sandboxes import this package, so it imports no torch and no numpy."""
# ruff: noqa: F401  these names are what the package offers

from lib.sandbox.client import GRACE, accept, connect, evaluate, hang_up, make_spec, outermost, sandbox_level
from lib.sandbox.values import receive, send
