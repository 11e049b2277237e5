"""The mathematics of a step: advantages, policy losses, loss aggregation, KL, entropy.

Pure functions on tensors and numbers, never `args`. One function per paper. Two calling conventions; lib/declared.py
reads names, columns and hyper-parameters from the signatures:

    estimator(token_level_rewards, response_mask, index, *, ...)         -> advantages (B, T), returns (B, T)
    policy_loss(old_log_prob, log_prob, advantages, response_mask, *, ...) -> losses (B, T), {metric: (B, T)}

Values stay per token until `agg_loss` (or a masked mean) divides by *global* counts, so that a loss does not depend on
the micro-batch split or the number of ranks. Masked positions (which may hold NaN, inf, 1e9) are set to 0 in the
inputs, not in the results, because 0 · NaN is NaN in the backward pass too. A row without a valid token is dead: it
counts in no group and in no denominator. A mask is 0/1 of any dtype and has exactly the shape of what it masks.
"""

from lib.core_algos.advantages import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_overlong_penalty,
    compute_remax_outcome_advantage,
    compute_value_loss,
    estimate_advantages,
    explained_variance,
    get_adv_estimator_fn,
    length_adaptive_lam,
)
from lib.core_algos.kl import (
    KL_PENALTIES,
    AdaptiveEntropyController,
    AdaptiveKLController,
    apply_kl_penalty,
    kl_penalty,
)
from lib.core_algos.policy_losses import (
    compute_policy_loss,
    get_policy_loss_fn,
    named_policy_loss,
)
from lib.core_algos.reductions import (
    LOSS_AGG_MODES,
    ROUNDING,
    LossMasks,
    agg_loss,
    at_last_token,
    group_mean,
    group_std,
    masked_mean,
    masked_sum,
    masked_whiten,
    zero_variance_rows,
)
from lib.core_algos.rollout_correction import compute_rollout_correction
from lib.core_algos.token_masks import compute_token_masks
from lib.core_algos.vocabulary import at_ids, forward_kl, reverse_kl, top_k
