"""A run: its folder, flags, checkpoints, logs and numbers."""

from lib.run.checkpoint import export_hf, load_batches
from lib.run.metrics import (
    Timer,
    data_metrics,
    explained_variance,
    extra_metrics,
    mismatch_metrics,
    reward_components,
    rows_dropped,
    throughput_metrics,
)
from lib.run.run import Run, open_run
from lib.run.tracking import Tracker, sample_rows
from lib.run.validation import validated_rows, validation_metrics

__all__ = [
    "Run",
    "Timer",
    "Tracker",
    "data_metrics",
    "explained_variance",
    "export_hf",
    "extra_metrics",
    "load_batches",
    "mismatch_metrics",
    "open_run",
    "reward_components",
    "rows_dropped",
    "sample_rows",
    "throughput_metrics",
    "validated_rows",
    "validation_metrics",
]
