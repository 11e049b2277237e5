"""From flags to what a run needs, by stage. A script's set-up calls these; only this package knows the
wings (agent/, planner/), and imports them inside the function that a flag asks for."""
# ruff: noqa: F401

from lib.setup.algorithm import (
    ON_CPU,
    ONLINE_FP8,
    advantage_columns,
    check_algorithm,
    check_quantization,
    effective_settings,
    get_attention,
    get_compute_dtype,
    make_kl_control,
    needed_log_probs,
)
from lib.setup.factory import (
    SMALLEST,
    USUAL_LR,
    MakeOptimizer,
    ModelFactory,
    load_frozen,
    load_policy,
    load_reference,
    load_value_model,
    lr_factor,
    lr_note,
    make_model_factory,
    use_cores,
)
from lib.setup.inputs import Inputs, check_template, load_inputs, load_vision
from lib.setup.report import check_memory, describe
from lib.setup.rollouts import make_rewards_and_validation, make_rollouts
from lib.setup.start import choose_engine, join, use_batch_invariant_kernels
