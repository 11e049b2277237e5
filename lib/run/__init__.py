"""A run: its folder, flags, checkpoints, logs and numbers."""

from lib.run.metrics import data_metrics, extra_metrics, mismatch_metrics, row_metrics, rows_dropped
from lib.run.run import Run, open_run
from lib.run.validation import Validation

__all__ = [
    "Run",
    "Validation",
    "data_metrics",
    "extra_metrics",
    "mismatch_metrics",
    "open_run",
    "row_metrics",
    "rows_dropped",
]
