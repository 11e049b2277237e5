"""Engine, rollouts, rewards and validation."""

import math
from functools import partial
from typing import Any

import torch

from lib.args import PromptSampling, ScriptArgs, engine_rows
from lib.data import make_loader
from lib.model import Policy
from lib.reward.scorer import Scorer
from lib.reward.scores import RewardManager, RewardModel, Rewards
from lib.rollout import Rollouts, make_engine
from lib.run import Run, Validation
from lib.setup.inputs import Inputs
from lib.setup.models import ModelFactory, use_cores
from lib.setup.needs import Needs


def make_rollouts(args: ScriptArgs, actor: Policy, inputs: Inputs, needs: Needs, run: Run) -> Rollouts:
    """Makes the engine, and the run's rollouts from its next step on. The validation of a replay has hf."""
    rollout, data, world, dtype = args.rollout, args.data, actor.world, actor.forward.compute_dtype
    limits = [val_set.max_response_length or 0 for val_set in args.validation.sets()]
    longest = max(rollout.max_response_length, *limits) if args.validation.enabled else rollout.max_response_length
    row = data.max_prompt_length + longest
    name, own = "hf" if run.recorder.replays else rollout.engine, {}
    if rollout.rollout_gpus and not run.recorder.replays:
        from servers.managed import ManagedServers

        servers = rollout.rollout_gpus // rollout.rollout_tensor_parallel_size
        limit_s = 0.9 * args.run.stage_timeout  # before this rank's own limit
        name, own = "own://", {"own": ManagedServers(servers, start_s=limit_s)}
    vllm_kwargs = rollout.engine_args
    if args.model.routing_replay == "R3" and rollout.starts_vllm:
        vllm_kwargs["enable_return_routed_experts"] = True
    engine = make_engine(
        name,
        actor.module,
        inputs.tokenizer,
        processor=inputs.vision and inputs.vision.processor,
        max_images=data.vision_limits.max_images,
        folder=run.folder / "engine",
        max_length=min(args.multi_turn.context_window or row, row),
        dtype=dtype,
        gpu_memory=rollout.gpu_share,
        ranks=rollout.rollout_tensor_parallel_size,
        rows=engine_rows(args, world.size),
        more=vllm_kwargs,
        returns_routes=args.model.routing_replay == "R3",
        **own,
    )
    use_cores(args.shard, world.device)
    sampler = engine
    if inputs.multi_turn is not None:
        from agent import make_episodes

        sampler = make_episodes(engine, inputs.multi_turn)
    loader = None
    if inputs.train_data is not None:
        rule, skip_after, share = PromptSampling.parse(data.prompt_sampling)
        loader = make_loader(
            inputs.train_data,
            args.prompts_per_step,
            rank=world.rank,
            world_size=world.size,
            seed=args.run.seed,
            shuffle=data.shuffle,
            num_workers=data.loader_workers,
            sampling=rule,
            skip_after=skip_after,
            share=share,
            weights=data.train_weights,
        )
    level, order, replays = rollout.async_level, rollout.async_order, run.recorder.replays
    any_order = order == "finished" or (loader is not None and loader.needs_scores)
    rollouts = Rollouts(
        engine,
        sampler,
        loader,
        actor.forward.sampling,
        world=world,
        sizes=needs.sizes,
        seed=args.run.seed,
        async_level=level,
        # nats; bf16 engines differ by 0.03. For a quantized one the limit is that of the mismatch
        sync_tolerance=math.inf if rollout.quantization else 1e-3 if dtype == torch.float32 else 0.25,
        max_mismatch=rollout.mismatch_limit,
        reads_log_probs=needs.reads_log_probs,
        recorder=run.recorder,
        replays_any_order=level > 0 and replays and any_order,
    )
    if level and not replays:
        from servers.async_rollouts import AsyncRollouts

        assert engine.asynchronous
        settings: dict[str, Any] = {"engine": engine, "sampler": sampler, "begin": rollouts.begin_groups}
        settings |= {"sampling": rollouts.sampling, "level": level, "order": order}
        settings |= {"groups": needs.sizes.local_prompts, "group_size": args.group_size, "last_started": run.step}
        settings["last"] = None if args.max_gen_batches else args.run.total_steps  # a step may take several batches
        rollouts.async_rollouts = AsyncRollouts(**settings)
    return rollouts


def make_rewards_and_validation(
    args: ScriptArgs, factory: ModelFactory, inputs: Inputs, rollouts: Rollouts, run: Run
) -> tuple[Rewards, Validation]:
    """The rewards of training, and the validation, which uses the same scorers unless --val-reward names others."""
    reward, reward_model = args.reward, None
    if reward.reward_model:
        reward_model = RewardModel(None, None, reward.reward_model_coef, args.optimizer.micro_batch_limit)
    if reward_model is not None and (args.validation.enabled or not run.recorder.replays):
        reward_model.module, reward_model.tokenizer = factory.reward_model(reward.reward_model)

    make_manager = partial(
        RewardManager,
        tokenizer=inputs.tokenizer,
        workers=reward.reward_workers,
        timeout_s=reward.reward_timeout,
        memory_mb=reward.reward_memory,
        seed=args.run.seed,
        log=run.tracker.run_dir / f"scorers-{run.world.rank}.log",
    )
    # without the recorder: in a replay, shadow scorers score the recorded responses anew
    shadow = make_manager(inputs.shadow_scorers) if inputs.shadow_scorers else None

    def scored_by(scorers: list[Scorer]) -> Rewards:
        manager = make_manager(scorers, failure_score=reward.reward_failure_score, recorder=run.recorder)
        return Rewards(manager, reward_model, args.multi_turn.reward_coef, shadow)

    rewards = scored_by(inputs.scorers)
    val_rewards = scored_by(inputs.val_scorers) if inputs.val_scorers else rewards
    sets = list(zip(args.validation.sets(), inputs.val_data))
    return rewards, Validation(args.validation, sets, rollouts, val_rewards, rollouts.sizes, run.tracker)
