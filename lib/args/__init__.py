"""The flags that all scripts share, and the batch sizes of a step. No torch here: --help stays fast.

A script's Args nests the groups (--lr) and the settings (--multi-turn.tools).
"""

from lib.args.checks import HUB_ID, URL, check_common_flags, check_hub, check_model_path, check_source
from lib.args.data import FILES, DataArgs, PromptSampling, ValidationArgs, ValidationSet
from lib.args.groups import ModelArgs, OptimizerArgs, RewardArgs, RolloutArgs, ShardArgs, check_engine
from lib.args.reads import Reads, check_read
from lib.args.run import RunArgs, StopWhen, check_output_dir
from lib.args.script import ROOT, ScriptArgs
from lib.args.settings import (
    AdvEstimator,
    AggMode,
    KLEstimator,
    MultiTurnArgs,
    PolicyLoss,
    RolloutCorrectionArgs,
)
from lib.args.sizes import Sizes, engine_rows, least_micro_batch, step_sizes, training_ranks
