"""The flags that all scripts share, and the batch sizes of a step. No torch here: --help stays fast.

A script's Args nests the groups (--lr) and the settings (--multi-turn.tools).
"""

from lib.args.checks import Sizes, check_common_flags, check_model_path, engine_rows, step_sizes, training_ranks
from lib.args.data import FILES, DataArgs, PromptSampling, ValidationArgs, ValidationSet
from lib.args.groups import (
    AdvEstimator,
    AggMode,
    KLEstimator,
    ModelArgs,
    MultiTurnArgs,
    OptimizerArgs,
    PolicyLoss,
    RewardArgs,
    RolloutArgs,
    RolloutCorrectionArgs,
    ShardArgs,
)
from lib.args.reads import Reads, check_read
from lib.args.run import RunArgs, StopWhen
from lib.args.script import ROOT, ScriptArgs
