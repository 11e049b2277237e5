"""Rollout engines behind one small interface (engine.py), and a weight sync that checks itself (weight_sync.py).

A run imports only the engine that it uses: see ENGINES in stream.py."""

from lib.rollout.engine import (
    Generated,
    RolloutEngine,
    SteppedEngine,
    add_responses,
    concat_rows,
    end_of_turn,
    fit_columns,
    request_seeds,
    truncated_rows,
    turn_seed,
)
from lib.rollout.hf_engine import HFEngine
from lib.rollout.replay import NoRecorder, Recorder, Replayer, check_recorded, forget_after
from lib.rollout.stream import Rollouts, check_capabilities, check_engine_import, engine_class, make_engine
from lib.rollout.weight_sync import WeightSyncError, sync_weights, weight_checksum
from lib.sampling import Sampling

__all__ = [
    "Generated",
    "HFEngine",
    "NoRecorder",
    "Recorder",
    "Replayer",
    "RolloutEngine",
    "Rollouts",
    "Sampling",
    "SteppedEngine",
    "WeightSyncError",
    "add_responses",
    "check_capabilities",
    "check_engine_import",
    "check_recorded",
    "concat_rows",
    "end_of_turn",
    "engine_class",
    "fit_columns",
    "forget_after",
    "make_engine",
    "request_seeds",
    "sync_weights",
    "truncated_rows",
    "turn_seed",
    "weight_checksum",
]
