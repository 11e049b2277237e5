"""Rollout engines behind one small interface (engine.py), and a weight sync that checks itself (weight_sync.py). A run
imports only the engine that it uses: see ENGINES in stream.py."""

# ruff: noqa: F401, I001  these names are what the package offers

from lib.rollout.engine import Generated, NoRecorder, RolloutEngine, SteppedEngine, request_seeds, turn_seed
from lib.rollout.engine import add_responses, concat_rows, fit_columns, truncated_rows
from lib.rollout.hf_engine import HFEngine
from lib.rollout.replay import Recorder, Replayer, check_recorded, forget_after
from lib.rollout.stream import Rollouts, check_capabilities, check_engine_import, engine_class, make_engine
from lib.rollout.stream import vllm_refuses
from lib.rollout.weight_sync import WeightSyncError, check_mismatch, sync_weights, weight_checksum
from lib.sampling import Sampling
