"""Group Relative Policy Optimization for language models (DeepSeekMath, https://arxiv.org/abs/2402.03300).

For each prompt sample a group of G responses, score them R_1 ... R_G, and take the group as its own baseline:

    A_i = (R_i - mean(R)) / (std(R) + 1e-6)                         the same for every token t of response i
    rho_it = pi(o_it | ...) / pi_old(o_it | ...)
    L = mean over tokens of max(-A_i rho_it, -A_i clip(rho_it, 1 - eps_low, 1 + eps_high)) + beta KL(pi || pi_ref)

Where this departs from the paper, by default: the loss is averaged over all tokens of the mini-batch, not first within
each response (--loss_agg_mode seq-mean-token-mean is the paper's); there is no KL term, and then no reference model is
loaded (--kl_coef 0.04 is the paper's); a ratio above clip_ratio_c is cut where the advantage is negative (dual clip).
--adv_estimator dr_grpo with --loss_agg_mode seq-mean-token-sum-norm is Dr. GRPO (2503.20783).

    python grpo.py                                                  one process; a tiny model and task, on any machine
    accelerate launch --multi_gpu --num_processes 8 grpo.py ...     one node; or torchrun --nproc-per-node 8 grpo.py ...
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 grpo.py ...     two nodes

Every rank runs this file from top to bottom. Details, metrics and results: docs/grpo.md.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

from lib import InputError
from lib.advantages import get_adv_estimator_fn
from lib.batching import prepare_dynamic_batch
from lib.checkpoint import export_hf, find_checkpoint, load_checkpoint, save_checkpoint
from lib.core_algos import agg_loss, kl_penalty
from lib.data_proto import DataProto
from lib.dataset import RLHFDataset, collate_fn, load_dataset_class, make_loader
from lib.distributed import (
    all_gather_lists,
    all_reduce_sum,
    broadcast,
    clip_grad_norm,
    init_distributed,
    is_first_on_node,
    make_mesh,
    run,
    set_gradient_sync,
    shard_model,
    trainable_parameters,
)
from lib.metrics import (
    Mean,
    Sum,
    Timer,
    add_metrics,
    data_metrics,
    extra_metrics,
    mismatch_metrics,
    reduce_metrics,
    throughput_metrics,
    token_means,
    validation_metrics,
)
from lib.model import batched_log_probs, check_model_path, load_model, load_tokenizer, response_log_probs
from lib.policy_losses import get_policy_loss_fn
from lib.reward import load_reward, score_responses
from lib.rollout import Sampling, check_engine, make_engine, request_seeds, sync_weights
from lib.tracking import Tracker, sample_rows

HERE = Path(__file__).parent


@dataclass
class Args:
    # ---- run
    run_name: str = ""
    """name of the run, which writes to output_dir/run_name; empty: grpo-s<seed>-<date and time>"""
    output_dir: str = "runs"
    """folder of all runs"""
    seed: int = 1
    """seed of sampling and data order; a run repeats itself"""
    total_steps: int = 60
    """number of steps, each of prompts_per_step x group_size responses"""
    total_epochs: int | None = None
    """if given, it sets total_steps: the steps that this many passes over the training prompts take, rounded up"""
    resume: str = "never"
    """"never", "auto" (from the newest complete checkpoint of run_name, else from the start) or a checkpoint folder"""

    # ---- model
    model: str = str(HERE / "data/toy/model")
    """Hugging Face id, folder or .gguf file of the policy to start from"""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of forward and backward; weights and optimizer are fp32. auto: bfloat16 on a GPU, float32 on a CPU"""
    attn_implementation: str = "packed_sdpa"
    """packed_sdpa (lib/model.py) runs everywhere; flash_attention_2 needs its package; any other: --no-padding-free"""
    padding_free: bool = True
    """lay the rows of a micro-batch end to end, without padding"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time in the update"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""

    # ---- data
    train_files: tuple[str, ...] = (str(HERE / "data/toy/train.jsonl"),)
    """parquet or json(l) files, or a data set on the hub; rows in verl's form"""
    val_files: tuple[str, ...] = (str(HERE / "data/toy/val.jsonl"),)
    """the same, for validation"""
    dataset_class: str = ""
    """path/to/file.py:ClassName of your own dataset class; empty: lib/dataset.py's RLHFDataset"""
    max_prompt_length: int = 32
    """tokens of a prompt, template included"""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """what happens to a longer prompt that was not filtered out"""
    filter_overlong_prompts: bool = True
    """drop training and validation prompts that are longer; how many is printed"""
    chat_template_kwargs: str = "{}"
    """JSON of keywords for the chat template, such as {"enable_thinking": false}"""
    shuffle: bool = True
    """a new order of the training prompts in each epoch"""
    loader_workers: int = 0
    """processes that tokenize ahead"""

    # ---- rollout
    rollout_engine: Literal["hf", "vllm"] = "hf"
    """hf samples with the trainer's own model; vllm runs a vLLM engine in each process"""
    prompts_per_step: int = 32
    """prompts of one step, over all ranks"""
    group_size: int = 8
    """responses per prompt"""
    max_response_length: int = 16
    """tokens of a response at most"""
    temperature: float = 1.0
    """sampling temperature; the loss uses log-probs at this temperature"""
    top_p: float = 1.0
    """nucleus sampling; below 1 the trainer's log-probs are not those of the sampler, see rollout/ metrics"""
    top_k: int = -1
    """sample among the k most likely tokens; -1: among all"""
    gpu_memory: float = 0.4
    """share of a GPU's memory that vLLM may take (on a CPU it takes 1 GiB for its KV cache)"""

    # ---- reward
    reward: str = ""
    """path/to/file.py:function of your own scorer; empty: by each row's data_source, see rewards/"""

    # ---- algorithm
    adv_estimator: str = "grpo"
    """advantage estimator in lib/advantages.py: grpo, dr_grpo (not divided by the standard deviation), rloo, opo, gpg,
    maxrl, grpo_passk, grpo_leave_one_out, grpo_batch_std, reinforce_plus_plus, reinforce_plus_plus_baseline"""
    singleton: Literal["raw", "zero"] = "raw"
    """advantage of a group with one live row: its reward, as in verl, or 0"""
    loss: str = "vanilla"
    """policy loss in lib/policy_losses.py: vanilla, gspo, cispo, geo_mean, sapo, gpg, reinforce, dppo_tv, dppo_kl, dro,
    two_sided"""
    loss_kwargs: str = "{}"
    """JSON of its hyper-parameters, such as {"cliprange_high": 4.0}; vanilla takes the three flags below"""
    clip_ratio_low: float = 0.2
    """the ratio is clipped below 1 - clip_ratio_low where the advantage is negative"""
    clip_ratio_high: float = 0.2
    """the ratio is clipped above 1 + clip_ratio_high where the advantage is positive"""
    clip_ratio_c: float = 3.0
    """dual clip: bound of the ratio where the advantage is negative"""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """how token losses become one loss: see agg_loss in lib/core_algos.py"""
    loss_scale_factor: float | None = None
    """constant divisor of seq-mean-token-sum-norm; empty: max_response_length"""
    kl_coef: float = 0.0
    """beta, weight of the KL to the start model in the loss; at 0 no reference model is loaded"""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3+"
    """estimator of that KL; a + gives it the gradient of k2, which is that of the KL"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    old_log_probs: Literal["auto", "recompute", "rollout"] = "auto"
    """pi_old: the trainer's own log-probs (auto: not computed where each step has one update, there the ratio is 1), or
    the rollout engine's"""

    # ---- update
    num_mini_batches: int = 1
    """optimizer updates per pass over a step's responses"""
    update_epochs: int = 1
    """passes over a step's responses"""
    micro_batch_tokens: int = 16384
    """tokens of one forward and backward on one rank"""
    lr: float = 1e-4
    """learning rate (for a model of billions of parameters: 1e-6)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """course of the learning rate after the warm-up"""
    warmup_steps: int = 0
    """steps in which the learning rate rises from 0"""
    weight_decay: float = 0.0
    """of AdamW"""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """of AdamW"""
    max_grad_norm: float = 1.0
    """the gradient's norm is clipped to this"""

    # ---- validation
    val_before_train: bool = True
    """validate the start model"""
    val_every: int = 5
    """validate every n steps and after the last; 0: never"""
    val_only: bool = False
    """validate (with resume: that checkpoint) and stop; writes to <run>/val_only"""
    val_samples: int = 1
    """responses per validation prompt: n in mean@n, pass@k, maj@k"""
    val_temperature: float = 0.0
    """sampling temperature in validation; 0: greedy"""
    val_top_p: float = 1.0
    """nucleus sampling in validation"""

    # ---- checkpoints and logs
    save_every: int = 50
    """save a checkpoint every n steps and after the last; 0: never"""
    keep_checkpoints: int = 2
    """keep the newest n checkpoints; 0: all"""
    export_model: bool = True
    """after the last step save the policy in Hugging Face form to <run>/model"""
    track: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """log there too; metrics.jsonl is always written"""
    show_samples: int = 3
    """responses shown after each validation (samples.jsonl holds them all)"""


MAY_CHANGE_ON_RESUME = {
    *("run_name", "output_dir", "resume", "total_steps", "total_epochs", "loader_workers", "gpu_memory"),
    *("val_before_train", "val_every", "val_only", "val_samples", "val_temperature", "val_top_p", "val_files"),
    *("save_every", "keep_checkpoints", "export_model", "track", "show_samples"),
}


@dataclass
class Sizes:
    """The arithmetic of a step. No prefix: over all ranks; local: on one rank."""

    local_prompts: int
    local_rows: int
    local_mini_batch_rows: int
    updates_per_step: int


def step_sizes(args: Args, world_size: int) -> Sizes:
    """Checks the batch arithmetic. Raises InputError with the formula and its numbers."""
    for name in ("prompts_per_step", "group_size", "num_mini_batches", "update_epochs", "max_response_length"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.prompts_per_step % (world_size * args.num_mini_batches):
        raise InputError(
            "prompts_per_step / (ranks x num_mini_batches) must be a whole number: "
            f"{args.prompts_per_step} / ({world_size} x {args.num_mini_batches}) = "
            f"{args.prompts_per_step / (world_size * args.num_mini_batches):g}"
        )
    if args.micro_batch_tokens < args.max_prompt_length + args.max_response_length:
        raise InputError(
            "micro_batch_tokens must hold one row, max_prompt_length + max_response_length: "
            f"{args.micro_batch_tokens} < {args.max_prompt_length} + {args.max_response_length}"
        )
    if args.temperature <= 0:
        raise InputError(f"--temperature {args.temperature}: training samples need a temperature above 0")
    if args.val_samples > 1 and args.val_temperature == 0:
        raise InputError(f"--val_samples {args.val_samples} are all the same at --val_temperature 0: raise it")
    local_prompts = args.prompts_per_step // world_size
    local_rows = local_prompts * args.group_size
    return Sizes(
        local_prompts, local_rows, local_rows // args.num_mini_batches, args.num_mini_batches * args.update_epochs
    )


def parse_json(text: str, flag: str) -> dict:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"--{flag} {text}: not JSON ({error})") from error


def load_datasets(args: Args, tokenizer):
    """(train, val) data sets; val is None where no validation is asked for."""
    dataset_class = load_dataset_class(args.dataset_class) if args.dataset_class else RLHFDataset
    settings = {
        "max_prompt_length": args.max_prompt_length,
        "truncation": args.truncation,
        "filter_overlong_prompts": args.filter_overlong_prompts,
        "chat_template_kwargs": parse_json(args.chat_template_kwargs, "chat_template_kwargs"),
    }
    train = dataset_class(list(args.train_files), tokenizer, **settings)
    wanted = args.val_before_train or args.val_every or args.val_only
    return train, dataset_class(list(args.val_files), tokenizer, **settings) if wanted else None


def validate(args: Args, engine, dataset, tokenizer, compute_score, world, sizes: Sizes, tracker: Tracker, step: int):
    """mean@n, pass@k and maj@k over all validation prompts, by data_source. A collective."""
    sampling = Sampling(args.max_response_length, args.val_temperature, args.val_top_p)
    mine = list(range(world.rank, len(dataset), world.size))
    per_call = max(1, sizes.local_rows // args.val_samples)
    results, shown = [], []
    for call in range(math.ceil(math.ceil(len(dataset) / world.size) / per_call)):  # as many calls on every rank
        rows = mine[call * per_call : (call + 1) * per_call]
        prompts = DataProto.from_single_dict(collate_fn([dataset[i] for i in rows or [0]])).to(world.device)
        batch = prompts.repeat(args.val_samples, interleave=True)
        numbers = [row * args.val_samples + n for row in rows or [0] for n in range(args.val_samples)]
        batch = engine.generate(batch, sampling, request_seeds(args.seed, -1, numbers))
        if not rows:  # this rank only kept the others company
            continue
        scores, extras = score_responses(batch, tokenizer, compute_score)
        batch.batch["token_level_scores"] = scores
        sources = batch.non_tensor_batch["data_source"]
        preds = extras.get("pred", [None] * len(batch))
        results += list(zip(sources, [n // args.val_samples for n in numbers], scores.sum(1).tolist(), preds))
        shown += sample_rows(batch, tokenizer)
    results = sorted(all_gather_lists(results), key=lambda result: result[1])  # by prompt, for any number of ranks
    tracker.samples(all_gather_lists(shown), step, show=args.show_samples)
    return validation_metrics(*(list(column) for column in zip(*results)))


def lr_factor(args: Args, sizes: Sizes, update: int) -> float:
    """What the learning rate is multiplied with at an optimizer update, counted from 0."""
    warmup, total = (steps * sizes.updates_per_step for steps in (args.warmup_steps, args.total_steps))
    if update < warmup:
        return (update + 1) / warmup
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[args.lr_schedule]


def describe(args: Args, sizes: Sizes, world, train_data, val_data) -> str:
    """What the run will do, in its own arithmetic."""

    def size_of(dataset) -> str:
        dropped = getattr(dataset, "dropped", {})
        return f"{len(dataset)} ({', '.join(f'{name} {n}' for name, n in dropped.items())})"

    responses = args.prompts_per_step * args.group_size
    return (
        f"{args.prompts_per_step} prompts x {args.group_size} = {responses} responses a step"
        f" on {world.size} rank(s) of {world.device.type}, {sizes.updates_per_step} update(s) of "
        f"{sizes.local_mini_batch_rows * world.size} rows; training prompts: {size_of(train_data)}, "
        f"validation prompts: {size_of(val_data) if val_data else 'none'}; {args.total_steps} steps = "
        f"{args.total_steps * args.prompts_per_step / len(train_data):.2f} epochs"
    )


def main(args: Args) -> None:
    # ---- sizes and inputs: everything that can be wrong is found before a model loads or a file is written
    world = init_distributed()
    sizes = step_sizes(args, world.size)
    check_engine(args.rollout_engine)
    check_model_path(args.model)
    estimate_advantages = get_adv_estimator_fn(args.adv_estimator)
    loss_settings = parse_json(args.loss_kwargs, "loss_kwargs")
    if args.loss == "vanilla":
        loss_settings |= {"cliprange_low": args.clip_ratio_low, "cliprange_high": args.clip_ratio_high}
        loss_settings["clip_ratio_c"] = args.clip_ratio_c
    policy_loss = get_policy_loss_fn(args.loss, loss_settings)
    tokenizer = load_tokenizer(args.model, trust_remote_code=args.trust_remote_code)
    train_data, val_data = load_datasets(args, tokenizer)
    compute_score = load_reward(args.reward, [data for data in (train_data, val_data) if data is not None])
    if args.total_epochs is not None:
        args.total_steps = math.ceil(args.total_epochs * len(train_data) / args.prompts_per_step)
    if args.resume == "auto" and not args.run_name:
        raise InputError("--resume auto needs the --run_name of the run to resume")
    run_name = broadcast(args.run_name or f"grpo-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}")
    run_dir = Path(args.output_dir) / run_name
    checkpoint = find_checkpoint(args.resume, run_dir, asdict(args), MAY_CHANGE_ON_RESUME)
    if world.rank == 0:
        print(describe(args, sizes, world, train_data, val_data), flush=True)

    # ---- models and optimizer
    torch.manual_seed(args.seed + world.rank)
    compute_dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    if args.compute_dtype != "auto":
        compute_dtype = getattr(torch, args.compute_dtype)
    mesh = make_mesh(world)

    def load_policy(trainable: bool) -> torch.nn.Module:
        model = load_model(
            args.model,
            attn_implementation=args.attn_implementation,
            gradient_checkpointing=args.gradient_checkpointing and trainable,
            trust_remote_code=args.trust_remote_code,
        )
        return shard_model(model.to(world.device).requires_grad_(trainable), mesh, compute_dtype)

    actor = load_policy(trainable=True)
    ref = load_policy(trainable=False) if args.kl_coef else None
    parameters = trainable_parameters(actor)
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=args.adam_betas, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(lr_factor, args, sizes))
    models, schedulers = {"actor": (actor, optimizer)}, {"actor": scheduler}

    # ---- rollout engine, data, resume
    run_dir.mkdir(parents=True, exist_ok=True)
    engine = make_engine(
        args.rollout_engine,
        actor,
        tokenizer,
        folder=run_dir / "engine",
        max_length=args.max_prompt_length + args.max_response_length,
        dtype=compute_dtype,
        gpu_memory=args.gpu_memory,
    )
    sampling = Sampling(args.max_response_length, args.temperature, args.top_p, args.top_k)
    sync_tolerance = 1e-3 if compute_dtype == torch.float32 else 0.25  # nats; bf16 engines differ by 0.03
    loader = make_loader(
        train_data,
        args.prompts_per_step,
        rank=world.rank,
        world_size=world.size,
        seed=args.seed,
        shuffle=args.shuffle,
        num_workers=args.loader_workers,
    )
    start_step = 0
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, models=models, schedulers=schedulers)
        start_step = state["step"]
        if start_step >= args.total_steps and world.rank == 0:
            print(f"{checkpoint}: step {start_step} of {args.total_steps}, nothing is left to train", flush=True)
        loader.load_state_dict(state["loader"])
    tracker = Tracker(
        run_dir / "val_only" if args.val_only else run_dir,
        asdict(args),
        trackers=args.track,
        total_steps=args.total_steps,
        resume_step=start_step,
        enabled=world.rank == 0,
    )
    prompts_of_steps = iter(loader)

    def evaluate(step: int) -> dict[str, float]:
        sync = sync_weights(engine, actor, step, tolerance=sync_tolerance)
        return sync | validate(args, engine, val_data, tokenizer, compute_score, world, sizes, tracker, step)

    if args.val_only or (args.val_before_train and start_step == 0):
        tracker.log(evaluate(start_step), start_step)
    if args.val_only:
        tracker.close()
        return

    for step in range(start_step + 1, args.total_steps + 1):
        timer = Timer()
        with timer("step"):
            # ---- 1 rollout
            with timer("weight_sync"):
                metrics = sync_weights(engine, actor, step - 1, tolerance=sync_tolerance)
            with timer("rollout"):
                prompts = DataProto.from_single_dict(next(prompts_of_steps)).to(world.device)
                numbers = [world.rank + world.size * i for i in range(sizes.local_prompts)]  # in the global batch
                prompts.non_tensor_batch["uid"] = np.array([f"{step}-{n}" for n in numbers], dtype=object)
                rows = [n * args.group_size + sample for n in numbers for sample in range(args.group_size)]
                batch = prompts.repeat(args.group_size, interleave=True)
                batch = engine.generate(batch, sampling, request_seeds(args.seed, step, rows))
                engine.sleep()

            # ---- 2 reward
            with timer("reward"):
                scores, extras = score_responses(batch, tokenizer, compute_score)  # (B, T)
                batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = scores

            # ---- 3 log-probs
            with timer("log_probs"):
                settings = (args.temperature, args.micro_batch_tokens)
                if args.old_log_probs == "rollout":
                    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
                elif args.old_log_probs == "recompute" or sizes.updates_per_step > 1:
                    old, _ = batched_log_probs(actor, batch, *settings, padding_free=args.padding_free)
                    batch.batch["old_log_probs"] = old
                if ref is not None:
                    ref_log_prob, _ = batched_log_probs(ref, batch, *settings, padding_free=args.padding_free)
                    batch.batch["ref_log_prob"] = ref_log_prob

            # ---- 4 advantages
            with timer("advantages"):
                # of the batch of all ranks: some estimators whiten it, or use its standard deviation
                whole = batch.select(["token_level_rewards", "response_mask"], ["uid"]).all_gather()
                advantages, returns = estimate_advantages(
                    whole.batch["token_level_rewards"],
                    whole.batch["response_mask"],
                    index=whole.non_tensor_batch["uid"],
                    singleton=args.singleton,
                )
                mine = slice(world.rank * sizes.local_rows, (world.rank + 1) * sizes.local_rows)
                batch.batch["advantages"], batch.batch["returns"] = advantages[mine], returns[mine]

            # ---- 5 update
            with timer("update"):
                local = data_metrics(batch)
                first_update, skipped_updates = True, 0
                for _ in range(args.update_epochs):
                    for mini_batch in batch.split(sizes.local_mini_batch_rows):
                        mask = mini_batch.batch["response_mask"]
                        counts = [int(mask.sum()), int(mask.any(1).sum())]
                        global_tokens, global_rows = all_reduce_sum(counts, world.device)
                        micro_batches, _ = prepare_dynamic_batch(mini_batch, args.micro_batch_tokens)
                        for i, micro in enumerate(micro_batches):
                            set_gradient_sync(actor, i == len(micro_batches) - 1)
                            mask = micro.batch["response_mask"]  # (b, T)
                            log_probs, entropy = response_log_probs(
                                actor, micro, args.temperature, padding_free=args.padding_free
                            )
                            losses, token_metrics = policy_loss(
                                micro.batch.get("old_log_probs", log_probs.detach()),
                                log_probs,
                                micro.batch["advantages"],
                                mask,
                            )
                            token_metrics |= {"actor/pg_loss": losses.detach(), "actor/entropy": entropy.detach()}
                            losses = losses - args.entropy_coef * entropy
                            if ref is not None:
                                kl = kl_penalty(log_probs, micro.batch["ref_log_prob"], args.kl_estimator, mask)
                                losses = losses + args.kl_coef * kl
                                token_metrics["actor/ref_kl"] = kl.detach()
                            loss = agg_loss(
                                losses,
                                mask,
                                args.loss_agg_mode,
                                global_tokens=global_tokens,
                                global_rows=global_rows,
                                loss_scale_factor=args.loss_scale_factor or args.max_response_length,
                            )
                            (loss * world.size).backward()  # FSDP averages over ranks what is to be added

                            add_metrics(local, token_means(token_metrics, mask))
                            add_metrics(local, {"actor/loss": Sum(loss.item() / sizes.updates_per_step)})
                            if first_update:  # the weights are still those that sampled
                                add_metrics(local, mismatch_metrics(log_probs, micro.batch["rollout_log_probs"], mask))
                        grad_norm = clip_grad_norm(parameters, args.max_grad_norm)
                        if math.isfinite(grad_norm):
                            optimizer.step()
                        else:
                            skipped_updates += 1
                        add_metrics(
                            local,
                            {"actor/grad_norm": Mean(grad_norm, 1), "actor/lr": Mean(scheduler.get_last_lr()[0], 1)},
                        )
                        scheduler.step()
                        optimizer.zero_grad()
                        first_update = False

        # ---- 6 log
        aborted = (batch.batch["response_mask"].sum(1) == 0).sum().item()
        local |= timer.metrics() | extra_metrics(extras)
        local |= {
            "training/epoch": loader.position / len(train_data),
            "training/skipped_updates": skipped_updates,
            "training/rows_in": Sum(len(batch)),
            "training/rows_trained": Sum(len(batch) - aborted),
            "training/rows_dropped/aborted": Sum(aborted),
            "training/tokens": Sum(batch.batch["attention_mask"].sum().item()),
        }
        metrics |= reduce_metrics(local)
        assert metrics["training/rows_in"] == args.prompts_per_step * args.group_size, "rows were lost on the way"
        metrics |= throughput_metrics(metrics, metrics["training/tokens"], world.size)
        tracker.log(metrics, step)

        # ---- 7 validate and save
        last = step == args.total_steps
        if args.val_every and (last or step % args.val_every == 0):
            tracker.log(evaluate(step), step)
        if args.save_every and (last or step % args.save_every == 0):
            save_checkpoint(
                run_dir / "checkpoints",
                step,
                models=models,
                schedulers=schedulers,
                trainer_state={"step": step, "loader": loader.state_dict()},
                keep=args.keep_checkpoints,
            )

    if args.export_model:
        export_hf(actor, tokenizer, run_dir / "model")
    tracker.report()
    tracker.close()
    engine.close()


if __name__ == "__main__":
    run(main, tyro.cli(Args, console_outputs=is_first_on_node()))
