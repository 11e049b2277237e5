"""What a run says: metrics, samples, trackers, alerts, profiles. Names are imported on use: tools/page imports
this package, and must start without torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lib.log.metrics import data_metrics, extra_metrics, mismatch_metrics, row_metrics

__all__ = ["data_metrics", "extra_metrics", "mismatch_metrics", "row_metrics"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lib.log.metrics"), name)
