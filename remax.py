"""ReMax for language models (https://arxiv.org/abs/2310.10505): REINFORCE with the greedy response as the baseline.

For each prompt x, the baseline of all sampled responses is the reward of one greedy response:

    b = R(x, greedy response);  A_t = sum over k >= t of r_k - b                    no critic, group or deviation
    L = mean over tokens of max(-A_t rho_t, -A_t clip(rho_t, 1 - eps_low, 1 + eps_high))           as in grpo.py

Defaults that differ from the paper: the loss is a mean over all tokens of the mini-batch, not a sum over each response
(the paper: --loss-agg-mode seq-mean-token-sum); there is no KL (the paper: --kl-coef 0.05 --kl-placement reward
--kl-estimator k1). With one update a step rho is 1, so the clip has no effect.

grpo.py, ppo.py, remax.py and dapo.py differ only by their papers: make diff A=grpo B=dapo prints the difference.

Every rank runs this file from top to bottom. How to launch it: README.md, and docs/scaling.md for several nodes.
Formula, details, metrics and results: the page of the same name in docs/.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from lib import args as shared  # not found by a copy elsewhere? export PYTHONPATH=/path/to/plainrl
from lib.cli.flags import Ge, Gt, Interval, read_flags


@dataclass
class Args(shared.ScriptArgs, script="remax"):
    """ReMax: the baseline is the reward of a greedy response."""

    run: shared.RunArgs = field(default_factory=shared.RunArgs)
    model: shared.ModelArgs = field(default_factory=shared.ModelArgs)
    shard: shared.ShardArgs = field(default_factory=shared.ShardArgs)
    data: shared.DataArgs = field(default_factory=shared.DataArgs)
    rollout: shared.RolloutArgs = field(default_factory=shared.RolloutArgs)
    multi_turn: shared.MultiTurnArgs = field(default_factory=shared.MultiTurnArgs)
    reward: shared.RewardArgs = field(default_factory=shared.RewardArgs)
    optimizer: shared.OptimizerArgs = field(default_factory=shared.OptimizerArgs)
    validation: shared.ValidationArgs = field(default_factory=shared.ValidationArgs)

    # ---- sizes of a step
    prompts_per_step: Annotated[int, Ge(1)] = 1024
    """prompts of one step, over all ranks"""
    group_size: Annotated[int, Ge(1)] = 1
    """responses per prompt"""
    num_mini_batches: Annotated[int, Ge(1)] = 1
    """optimizer updates per pass over a step's responses"""
    update_epochs: Annotated[int, Ge(1)] = 1
    """passes over a step's responses"""

    # ---- loss
    loss: shared.PolicyLoss = "vanilla"
    """vanilla: PPO's clipped loss, policy_loss in this script; the others are in lib/core_algos/papers"""
    loss_kwargs: tuple[str, ...] = ()
    """hyper-parameters of --loss, NAME=VALUE, such as cliprange_low=3e-4 (docs/defaults.md has the names)"""
    clip_ratio_low: Annotated[float, Ge(0)] = 0.2
    """the ratio is clipped below 1 - clip_ratio_low where the advantage is negative"""
    clip_ratio_high: Annotated[float, Ge(0)] = 0.2
    """the ratio is clipped above 1 + clip_ratio_high where the advantage is positive"""
    clip_ratio_c: Annotated[float, Gt(1)] = 3.0
    """dual clip: upper bound of the ratio where the advantage is negative"""
    loss_agg_mode: shared.AggMode = "token-mean"
    """how token losses are averaged: agg_loss in lib/core_algos/reductions.py"""
    loss_scale_factor: Annotated[float | None, Gt(0)] = None
    """constant divisor of seq-mean-token-sum-norm; empty: max_response_length"""
    token_masks: tuple[str, ...] = ()
    """which tokens stay in the loss: top_entropy=SHARE, m2po=LIMIT, off_policy_sequence=LIMIT (docs/algorithms.md)"""
    entropy_coef: Annotated[float, Interval(ge=-1, le=1)] = 0.0
    """weight of the entropy bonus"""
    entropy_target: Annotated[float | None, Ge(0)] = None
    """target entropy in nats: entropy_coef changes by 0.005 a step to reach it, and is 0 above it; empty: fixed"""
    old_log_probs: Literal["auto", "recompute", "rollout"] = "auto"
    """pi_old: recompute with the trainer; auto: only if something needs it (with one update a step the ratio is 1);
    rollout: use the rollout engine's log-probs"""
    rollout_correction: shared.RolloutCorrectionArgs = field(default_factory=shared.RolloutCorrectionArgs)

    # ---- KL to the start model
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """beta, weight of the KL to the start model; at 0 no reference model is loaded"""
    kl_estimator: shared.KLEstimator | None = None
    """KL estimator (docs/algorithms.md); empty: k3+ in the loss (the gradient of the KL), k1 in the reward"""
    kl_placement: Literal["loss", "reward"] = "loss"
    """add the KL to the loss, or subtract it from the reward of each token"""
    kl_target: Annotated[float | None, Gt(0)] = None
    """target KL for --kl-placement reward: beta adapts to reach it; empty: beta is fixed"""
    kl_horizon: Annotated[int, Ge(1)] = 10000
    """number of responses over which beta adapts to --kl-target"""

    def check(self) -> None:
        """Raises InputError for combinations that make no sense."""
        shared.check_common_flags(self)


if __name__ == "__main__":  # before the slow imports, so that --help and errors in flags answer at once
    given_args = read_flags(Args)

import torch

from lib import core_algos, setup
from lib.data import gather_rows, scatter_rows, split_mini_batches
from lib.data_proto import DataProto
from lib.distributed import Mean, Metric, Sum, add_metrics, global_counts, timed, token_means
from lib.distributed import run as launch
from lib.log import data_metrics, extra_metrics, mismatch_metrics, row_metrics
from lib.model import Policy, micro_batches
from lib.run import open_run


def remax_advantages(rewards: torch.Tensor, greedy_scores: torch.Tensor, valid_mask: torch.Tensor) -> tuple:
    """(advantages, returns) (B, T) of token rewards (B, T) and the scores of the greedy responses (B,)."""
    rewards_to_go = torch.where(valid_mask, rewards.double(), 0).flip(1).cumsum(1).flip(1)  # (B, T) sum over t' >= t
    advantages = rewards_to_go - greedy_scores[:, None]
    return torch.where(valid_mask, advantages, 0).to(rewards), torch.where(valid_mask, rewards_to_go, 0).to(rewards)


def policy_loss(args: Args, log_probs: torch.Tensor, old_log_probs: torch.Tensor, t) -> tuple[torch.Tensor, dict]:
    """Token losses (b, T), before they are averaged, and metrics (b, T). To try another loss, change this."""
    if args.loss != "vanilla":
        return core_algos.named_policy_loss(args.loss, args.loss_settings, old_log_probs, log_probs, t)
    advantages, log_ratio = t["advantages"], (log_probs - old_log_probs).clamp(-20, 20)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - args.clip_ratio_low, 1 + args.clip_ratio_high)
    losses = torch.maximum(unclipped, clipped)
    dual_clip = torch.where(advantages < 0, -advantages * args.clip_ratio_c, torch.inf)
    metrics = {
        "actor/pg_clipfrac": (clipped > unclipped).float(),
        "actor/pg_clipfrac_lower": (losses > dual_clip).float(),
        "actor/ppo_kl": -log_ratio.detach(),
    }
    return torch.minimum(losses, dual_clip), metrics


@timed("advantages")
def add_advantages(
    args: Args, batch: DataProto, needs: setup.Needs, kl_control: core_algos.AdaptiveKLController, step: int
) -> dict[str, Metric]:
    """Adds advantages and loss masks (B, T), which depend on the rows of all ranks."""
    rows = gather_rows(batch, needs.columns)
    metrics: dict[str, Metric] = {}
    masks = core_algos.LossMasks(rows["response_mask"])  # .loss_mask, .denominator_mask and .valid_mask (B, T)
    if needs.correction:
        weights, accepted, metrics = core_algos.compute_rollout_correction(
            rows["old_log_probs"], rows["rollout_log_probs"], masks.loss_mask, **needs.correction
        )
        masks.drop(~accepted, "rollout_correction", out_of_group=True)
        if weights is not None:
            rows["rollout_is_weights"] = weights
    rewards, valid_mask = rows["token_level_scores"], masks.valid_mask
    if args.kl_coef > 0 and args.kl_placement == "reward":
        estimator = args.kl_estimator or "k1"
        kl = core_algos.kl_penalty(rows["old_log_probs"], rows["ref_log_prob"], estimator, valid_mask)
        rewards, mean_kl = core_algos.apply_kl_penalty(rewards, kl, valid_mask, kl_control.value)
        metrics |= {"actor/reward_kl": mean_kl, "actor/kl_coef": kl_control.value}
        kl_control.update(mean_kl, len(valid_mask))
    rows["token_level_rewards"] = rewards
    rows["advantages"], rows["returns"] = remax_advantages(rewards, rows["reward_baselines"], valid_mask)
    if token_masks := args.mask_settings:
        seed = args.run.seed * 2**20 + step
        rows |= core_algos.compute_token_masks(token_masks, rows | {"response_mask": masks.loss_mask}, seed=seed)
        masks.drop(~rows.pop("token_mask", masks.loss_mask), "token_masks")
    scatter_rows(batch, rows | masks.columns())
    return metrics | data_metrics(batch) | masks.dropped


@timed("update")
def update(args: Args, actor: Policy, batch: DataProto, needs: setup.Needs, entropy_coef: float) -> tuple[dict, list]:
    """update_epochs x num_mini_batches optimizer steps. Returns (metrics, outputs)."""
    metrics: dict[str, Metric] = {}
    outputs = []  # (rows, log_probs, entropy) of each micro-batch, for run.save_rollouts
    mini_batches = split_mini_batches(batch, needs.sizes.num_mini_batches)
    for number, mini_batch in enumerate(mini_batches * args.update_epochs):
        tokens, rows = global_counts(mini_batch.batch["denominator_mask"])
        denominators = {"global_tokens": tokens, "global_rows": rows, "loss_scale_factor": needs.loss_scale_factor}
        for micro in micro_batches(mini_batch, actor):
            t, mask = micro.batch, micro.batch["response_mask"]  # (b, T)
            log_probs, entropy, *outside_top_p = actor.log_probs(micro)
            outputs.append((t["row"], log_probs.detach(), entropy.detach()))
            old_log_probs = t.get("old_log_probs", log_probs.detach())  # on policy the ratio is 1
            losses, token_metrics = policy_loss(args, log_probs, old_log_probs, t)
            token_metrics |= {"actor/pg_loss": losses.detach(), "actor/entropy": entropy.detach()}
            if "rollout_is_weights" in t:
                losses = losses * t["rollout_is_weights"]
            if entropy_coef:
                losses = losses - entropy_coef * entropy
            if args.kl_coef > 0 and args.kl_placement == "loss":
                estimator = args.kl_estimator or "k3+"
                kl = core_algos.kl_penalty(log_probs, t["ref_log_prob"], estimator, mask, old_log_probs)
                losses = losses + args.kl_coef * kl
                token_metrics["actor/ref_kl"] = kl.detach()
            loss = core_algos.agg_loss(losses * t["loss_mask"], mask, args.loss_agg_mode, **denominators)
            actor.backward(loss)
            add_metrics(metrics, token_means(token_metrics, mask))
            add_metrics(metrics, {"actor/loss": Sum(loss.detach().double() / needs.sizes.updates_per_step)})
            if number == 0:  # the weights are still those that sampled
                fresh = mask * t["is_fresh"][:, None]
                add_metrics(metrics, mismatch_metrics(log_probs, t["rollout_log_probs"], fresh, *outside_top_p))
        add_metrics(metrics, actor.step())
    return metrics, outputs


def main(args: Args) -> None:
    # ---- set-up: errors in flags and data are found before a model loads or a file is written
    world, needs, inputs = setup.start(args)  # checks flags and data; returns on ranks that train
    kl_control = core_algos.AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
    entropy_control = core_algos.AdaptiveEntropyController(args.entropy_coef, args.entropy_target)
    if args.run.dry_run:
        return
    run = open_run(args, world, __file__, needs.effective)  # its folder, logs, checkpoint

    factory = setup.ModelFactory(args, needs, world)
    o = args.optimizer
    make_optimizer = partial(torch.optim.AdamW, lr=args.lr, betas=o.adam_betas, weight_decay=o.weight_decay, fused=True)
    lr_schedule = partial(setup.lr_factor, o, needs.sizes.updates_per_step, total_steps=args.run.total_steps)
    actor = factory.policy("actor", args.model.model, make_optimizer, lr_schedule)
    ref = factory.reference(actor) if args.kl_coef else None
    rollouts = setup.make_rollouts(args, actor, inputs, needs, run)
    rewards, validation = setup.make_rewards_and_validation(args, factory, inputs, rollouts, run)
    models = {"actor": actor}
    stateful = {"loader": rollouts, "kl_control": kl_control, "entropy_control": entropy_control}
    run.load(models, stateful)
    run.validate(validation, actor, run.step)

    for step in run.steps():
        # ---- 1 rollout
        metrics = [rollouts.sync(actor, step - 1)]
        prompts = rollouts.prompts()  # this rank's
        batch = rollouts.generate(prompts, n=args.group_size)  # (B, P + T)
        greedy = rollouts.generate(prompts, sampling=rollouts.sampling.greedy)  # REMAX: one response to each
        rollouts.sleep()  # frees the engine's memory
        batch, greedy, imbalance = rollouts.balanced(actor, batch, greedy)

        # ---- 2 reward
        pending = rewards.submit(batch, step)  # in other processes, during the log-probs
        pending_greedy = rewards.submit(greedy, step)

        # ---- 3 log-probs
        actor.check_rows(batch)
        if args.old_log_probs == "rollout":
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        elif needs.log_probs:
            batch.batch.update(actor.batched_log_probs(batch, needs.log_probs))
        if ref is not None:
            batch.batch["ref_log_prob"] = ref.batched_log_probs(batch)
        extras, failures = pending.add_to(batch)  # token_level_scores (B, T)
        rollouts.record_scores(batch)
        # REMAX: the greedy response's reward is the baseline (B,) of all responses to its prompt
        greedy_failures = pending_greedy.add_to(greedy)[1]
        baselines = greedy.batch["token_level_scores"].sum(1)
        has_baseline = greedy.batch["response_mask"].any(1)  # without one a prompt trains nothing
        batch.batch["reward_baselines"] = baselines.repeat_interleave(args.group_size)
        batch.batch["response_mask"] *= has_baseline.repeat_interleave(args.group_size)[:, None]
        add_metrics(failures, greedy_failures)

        # ---- 4 advantages
        metrics += [imbalance, add_advantages(args, batch, needs, kl_control, step)]
        run.record(batch)

        # ---- 5 update
        updated, outputs = update(args, actor, batch, needs, entropy_control.value)

        # ---- 6 log
        metrics += [updated, row_metrics(batch, greedy), extra_metrics(extras), failures]
        rows_with_baseline = int(has_baseline.sum())  # REMAX:
        baseline = {
            "reward/baseline": Mean(baselines[has_baseline].sum().item(), rows_with_baseline),
            "response_length/baseline": Mean(greedy.batch["response_mask"].sum().item(), rows_with_baseline),
        }
        metrics += [baseline, rollouts.metrics(batch, step), {"actor/entropy_coef": entropy_control.value}]
        logged = run.log(step, metrics)
        if "actor/entropy" in logged:  # missing in a step without a trained token
            entropy_control.update(logged["actor/entropy"])

        # ---- 7 validate and save
        run.save_rollouts(step, batch, outputs, inputs.tokenizer)
        run.validate(validation, actor, step)
        run.save(step, models, stateful)

    run.export(actor, inputs.processor)
    for part in (run, rewards, validation, rollouts):
        part.close()


if __name__ == "__main__":
    launch(main, given_args)
