"""A run: its folder, flags, checkpoints, validation."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lib.run.opening import open_run
    from lib.run.run import Run
    from lib.run.validation import Validation

__all__ = ["Run", "Validation", "open_run"]


def __getattr__(name: str):
    """Imports a name on use: tools/page imports this package, and must start without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"Run": "run", "open_run": "opening", "Validation": "validation"}[name]
    return getattr(import_module(f"lib.run.{module}"), name)
