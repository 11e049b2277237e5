"""From flags to what a run needs, by stage. A script's set-up calls these; only this package knows the
wings (agent/, servers/, planner/), and imports them inside the function that a flag asks for."""
# ruff: noqa: F401

from lib.setup.inputs import Inputs, load_inputs, load_vision
from lib.setup.models import USUAL_LR, ModelFactory, lr_factor, lr_note, use_cores
from lib.setup.needs import (
    Needs,
    check,
    check_engine,
    get_attention,
    get_compute_dtype,
    read_columns,
    rollout_correction,
)
from lib.setup.ranks import (
    check_memory,
    choose_by_memory,
    choose_engine,
    describe,
    join,
    start,
    use_batch_invariant_kernels,
)
from lib.setup.rollouts import make_rewards_and_validation, make_rollouts
