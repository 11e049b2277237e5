"""Policy, reference, critic and reward model: load, and forward to log-probs and entropies, values, or scores. Two
things keep the forward cheap, and both are exact. Padding never enters it (packing.py, attention.py), and full fp32
logits never exist (log_probs.py)."""

# ruff: noqa: F401, I001  these names are what the package offers

from lib.model.attention import PACKED, SAMPLED_BY_HF, carries_state
from lib.model.load import add_lora, compile_layers, freeze, fuse_layers, without_adapters
from lib.model.load import check_routing_replay, check_sequence_parallel, check_tensor_parallel
from lib.model.load import load_critic, load_model, load_processor, load_reward_model, load_tokenizer, takes_varlen
from lib.model.load import config_of
from lib.model.log_probs import NEVER, LinearLogProbs, check_rows, least_kept, log_probs_of
from lib.model.log_probs import batched_log_probs, response_log_probs
from lib.model.trained import Critic, ForwardConfig, Policy, Reference, TrainedModel, micro_batches
from lib.model.update_checks import APART, LossFlags, UpdateChecks
from lib.model.values import batched_values, response_values, reward_model_scores
