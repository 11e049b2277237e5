"""DAPO for language models (https://arxiv.org/abs/2503.14476): GRPO with decoupled clip and dynamic sampling.

GRPO's advantages and four changes, each a flag:

    clip-higher        max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high)), eps_high 0.28 > eps_low 0.2: unlikely
                       tokens can gain more probability                                    --clip-ratio-high
    dynamic sampling   groups with equal scores have no gradient: sample prompts until prompts_per_step groups have
                       unequal scores; extra groups wait for the next step                 --zero-variance refill
    token mean         the loss is averaged over all tokens of the mini-batch               --loss-agg-mode token-mean
    overlong penalty   a response that ends within the last L_buf of L_max tokens loses
                       (length - (L_max - L_buf)) / L_buf * factor             --overlong-buffer, --overlong-factor

and no KL. The paper's alternative to the penalty is --overlong-filtering: truncated responses are out of the loss.
Differences from the paper: extra groups are kept, with the log-probs of their sampler as pi_old; dual clip.

grpo.py, ppo.py, remax.py and dapo.py differ only by their papers: make diff A=grpo B=dapo prints the difference.

Every rank runs this file from top to bottom. How to launch it: README.md, and docs/scaling.md for several nodes.
Formula, details, metrics and results: the page of the same name in docs/.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from lib import InputError  # not found by a copy elsewhere? export PYTHONPATH=/path/to/plainrl
from lib import args as shared
from lib.cli.flags import Ge, Gt, Interval, read_flags


@dataclass
class Args(shared.ScriptArgs, script="dapo"):
    """DAPO: GRPO with clip-higher and dynamic sampling."""

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
    prompts_per_step: Annotated[int, Ge(1)] = 128
    """prompts of one step, over all ranks"""
    group_size: Annotated[int, Ge(1)] = 16
    """responses per prompt"""
    num_mini_batches: Annotated[int, Ge(1)] = 4
    """optimizer updates per pass over a step's responses"""
    update_epochs: Annotated[int, Ge(1)] = 1
    """passes over a step's responses"""

    # ---- advantages
    adv_estimator: shared.AdvEstimator = "grpo"
    """grpo: grpo_advantages in this script; the others are in lib/core_algos/papers (docs/algorithms.md)"""
    adv_kwargs: tuple[str, ...] = ()
    """hyper-parameters of --adv-estimator, NAME=VALUE, such as epsilon=1e-4 (docs/defaults.md has the names).
    singleton=zero: a response alone in its group has advantage 0 instead of its reward"""
    zero_variance: Literal["keep", "mask", "drop_from_denominator", "refill"] = "refill"
    """groups with equal scores: keep; mask: exclude from the loss; drop_from_denominator: also from its denominator;
    refill: replace them by groups of other prompts"""
    max_gen_batches: Annotated[int, Ge(1)] = 10
    """refill: maximum number of batches of prompts_per_step prompts in a step; then groups with equal scores fill the
    step, excluded from the loss and its denominator"""
    overlong_buffer: Annotated[int, Ge(0)] = 512
    """number of tokens before max_response_length in which a response loses reward (paper: 4096 of 20480); 0: off"""
    overlong_factor: Annotated[float, Ge(0)] = 1.0
    """reward that a response of max_response_length loses"""
    overlong_filtering: bool = False
    """exclude truncated responses from the loss and from the statistics of their group"""

    # ---- loss
    loss: shared.PolicyLoss = "vanilla"
    """vanilla: PPO's clipped loss, policy_loss in this script; the others are in lib/core_algos/papers"""
    loss_kwargs: tuple[str, ...] = ()
    """hyper-parameters of --loss, NAME=VALUE, such as cliprange_low=3e-4 (docs/defaults.md has the names)"""
    clip_ratio_low: Annotated[float, Ge(0)] = 0.2
    """the ratio is clipped below 1 - clip_ratio_low where the advantage is negative"""
    clip_ratio_high: Annotated[float, Ge(0)] = 0.28
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
        # DAPO: its own flags
        if self.zero_variance == "refill" and self.rollout.async_order == "finished":
            raise InputError(
                "--async-order finished: with --zero-variance refill a step takes batches until it has its groups, and "
                "slow groups would grow too old; use prompts"
            )
        if self.zero_variance == "refill" and self.group_size < 2:
            raise InputError("--zero-variance refill compares the scores of a group: --group-size 1 is too small")
        if self.overlong_buffer > self.rollout.max_response_length:
            raise InputError(
                f"--overlong-buffer {self.overlong_buffer}: must be at most {self.rollout.max_response_length}"
            )


if __name__ == "__main__":  # before the slow imports, so that --help and errors in flags answer at once
    given_args = read_flags(Args)

import torch

from lib import core_algos, setup
from lib.data import gather_rows, scatter_rows, split_mini_batches
from lib.data_proto import DataProto
from lib.distributed import Metric, Sum, add_metrics, global_counts, timed, token_means
from lib.distributed import run as launch
from lib.log import data_metrics, extra_metrics, mismatch_metrics, row_metrics
from lib.model import Policy, micro_batches
from lib.reward.scores import Rewards
from lib.rollout import Rollouts, concat_rows, truncated_rows
from lib.run import open_run


def grpo_advantages(args: Args, rewards: torch.Tensor, valid_mask: torch.Tensor, t) -> tuple:
    """(advantages, returns) (B, T): for an outcome reward, the same tensor. t["group"] (B,): the group of each row."""
    settings = args.adv_settings  # {name: value} of --adv-kwargs
    if args.adv_estimator != "grpo":
        return core_algos.estimate_advantages(args.adv_estimator, settings, rewards, valid_mask, t)
    singleton = settings.get("singleton", "raw")  # of a group of one the advantage is its reward; zero: it is 0
    scores = core_algos.masked_sum(rewards.double(), valid_mask, dim=1)  # (B,) R_i
    mean = core_algos.group_mean(scores, valid_mask, t["group"], singleton)  # (B,) over valid rows
    std = core_algos.group_std(scores, valid_mask, t["group"], singleton)
    advantages = (scores - mean) / (std + settings.get("epsilon", 1e-6))
    advantages = torch.where(valid_mask, advantages[:, None], 0).to(rewards)  # (B, T) the same for every token
    return advantages, advantages


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


def split_by_signal(args: Args, batch: DataProto) -> tuple[DataProto, DataProto]:
    """(groups with a signal, groups without: equal scores, or no row to train on). Rows of a group are adjacent."""
    if args.zero_variance != "refill":
        return batch, DataProto()
    valid_mask = batch.batch["response_mask"].bool()
    if args.overlong_filtering:
        valid_mask = valid_mask & ~batch.batch["truncated"][:, None]
    t, uid = batch.batch, batch.non_tensor_batch["uid"]
    equal = core_algos.zero_variance_rows(t["token_level_scores"], valid_mask, uid, t.get("reward_components"))
    uninformative = (equal | ~valid_mask.any(1)).view(-1, args.group_size).all(1).repeat_interleave(args.group_size)
    return batch[~uninformative], batch[uninformative]


def sample_groups(
    args: Args, rollouts: Rollouts, rewards: Rewards, pool: DataProto, step: int
) -> tuple[DataProto, DataProto, dict[str, Metric]]:
    """Samples until prompts_per_step groups have a signal, including those of `pool`; at most max_gen_batches times.

    Returns this rank's rows, the rows left for the next step (the same on all ranks), and metrics of all sampled rows.
    """
    needed, old_rows = args.prompts_per_step * args.group_size, len(pool)
    metrics: dict[str, Metric] = {}
    rejected, gen_batches, uninformative_rows = DataProto(), 0, 0
    while len(pool) < needed and gen_batches < args.max_gen_batches:
        batch = rollouts.generate(rollouts.prompts(), n=args.group_size)
        extras, failures = rewards.submit(batch, step).add_to(batch, args.reward_keys)
        rollouts.record_scores(batch)
        batch.batch["truncated"] = truncated_rows(batch)
        add_metrics(metrics, data_metrics(batch) | extra_metrics(extras) | failures | rollouts.batch_metrics(batch))
        add_metrics(metrics, {"training/tokens": Sum(batch.batch["attention_mask"].sum().item())})
        batch, uninformative = split_by_signal(args, rollouts.all_gather(batch))
        pool = concat_rows([pool, batch])
        rejected = concat_rows([rejected, uninformative])[:needed]  # as many as could be needed
        gen_batches, uninformative_rows = gen_batches + 1, uninformative_rows + len(uninformative)
    filled = max(needed - len(pool), 0)
    pool = concat_rows([pool, rejected[:filled]])
    # leftovers, new groups and fillers are dealt out to the mini-batches, the last group, a new one, to the first
    deal = torch.arange(needed).view(-1, args.num_mini_batches, args.group_size).flip(1).transpose(0, 1).flatten()
    metrics |= {
        "training/rows_in": gen_batches * needed + old_rows,
        "training/rows_dropped/refilled": uninformative_rows - filled,
        "training/rows_left_over": len(pool) - needed,
        "training/gen_batches": gen_batches,
    }
    return rollouts.own_rows(concat_rows([pool[deal]])), pool[needed:], metrics  # as wide as its longest row


@timed("advantages")
def add_advantages(
    args: Args, batch: DataProto, needs: setup.Needs, kl_control: core_algos.AdaptiveKLController, step: int
) -> dict[str, Metric]:
    """Adds advantages and loss masks (B, T), which depend on the rows of all ranks."""
    rows = gather_rows(batch, needs.columns)
    metrics: dict[str, Metric] = {}
    masks = core_algos.LossMasks(rows["response_mask"])  # .loss_mask, .denominator_mask and .valid_mask (B, T)
    if args.overlong_filtering:  # DAPO:
        masks.drop(rows["truncated"], "overlong", uncount=True, out_of_group=True)
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
    if args.overlong_buffer:  # DAPO: overlong penalty
        limits = args.rollout.max_response_length, args.overlong_buffer, args.overlong_factor
        rewards = rewards + core_algos.compute_overlong_penalty(valid_mask, *limits)
    rows["token_level_rewards"] = rewards
    rows["advantages"], rows["returns"] = grpo_advantages(args, rewards, valid_mask, rows)
    if args.zero_variance != "keep":
        scores = rows["token_level_scores"], valid_mask, rows["group"], rows.get("reward_components")
        no_signal = core_algos.zero_variance_rows(*scores)  # (B,)
        uncount = args.zero_variance in ("drop_from_denominator", "refill")  # DAPO: groups that filled the step
        masks.drop(no_signal, "zero_variance", uncount=uncount)
    if token_masks := args.mask_settings:
        seed = args.run.seed * 2**20 + step
        rows |= core_algos.compute_token_masks(token_masks, rows | {"response_mask": masks.loss_mask}, seed=seed)
        masks.drop(~rows.pop("token_mask", masks.loss_mask), "token_masks")
    scatter_rows(batch, rows | masks.columns())
    return metrics | masks.dropped


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
    pool = run.load(models, stateful).get("pool", DataProto()).to(world.device)  # DAPO: groups for the next step
    run.validate(validation, actor, run.step)

    for step in run.steps():
        # ---- 1 rollout, 2 reward
        metrics, old_rows = [rollouts.sync(actor, step - 1)], len(pool)
        batch, pool, sampled = sample_groups(args, rollouts, rewards, pool, step)
        rollouts.sleep()  # frees the engine's memory
        batch, imbalance = rollouts.balanced(actor, batch)

        # ---- 3 log-probs
        actor.check_rows(batch)
        if args.old_log_probs == "rollout":
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        elif needs.log_probs or old_rows:  # DAPO: leftovers were sampled by older weights
            batch.batch.update(actor.batched_log_probs(batch, needs.log_probs))
            is_fresh = batch.batch["is_fresh"][:, None]
            of_samplers = batch.batch["old_log_probs"].where(is_fresh, batch.batch["rollout_log_probs"])
            batch.batch["old_log_probs"] = of_samplers
        if ref is not None:
            batch.batch["ref_log_prob"] = ref.batched_log_probs(batch)

        # ---- 4 advantages
        metrics += [imbalance, add_advantages(args, batch, needs, kl_control, step)]
        run.record(batch)

        # ---- 5 update
        updated, outputs = update(args, actor, batch, needs, entropy_control.value)

        # ---- 6 log
        metrics += [updated, row_metrics(batch) | sampled]  # DAPO: of all sampled rows
        metrics += [rollouts.metrics(batch, step), {"actor/entropy_coef": entropy_control.value}]
        logged = run.log(step, metrics)
        if "actor/entropy" in logged:  # missing in a step without a trained token
            entropy_control.update(logged["actor/entropy"])

        # ---- 7 validate and save
        run.save_rollouts(step, batch, outputs, inputs.tokenizer)
        run.validate(validation, actor, step)
        run.save(step, models, stateful, batches={"pool": pool} if len(pool) else None)  # DAPO:

    run.export(actor, inputs.processor)
    for part in (run, rewards, validation, rollouts):
        part.close()


if __name__ == "__main__":
    launch(main, given_args)
