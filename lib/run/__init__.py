"""A run: its folder, flags, checkpoints, logs and numbers."""

from lib.run.metrics import (
    data_metrics,
    explained_variance,
    extra_metrics,
    mismatch_metrics,
    reward_components,
    row_metrics,
    rows_dropped,
    truncated_rows,
)
from lib.run.run import Run, open_run
from lib.run.validation import Validation

__all__ = [
    "Run",
    "Validation",
    "data_metrics",
    "explained_variance",
    "extra_metrics",
    "mismatch_metrics",
    "open_run",
    "reward_components",
    "row_metrics",
    "rows_dropped",
    "truncated_rows",
]
