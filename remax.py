"""ReMax for language models (https://arxiv.org/abs/2310.10505): REINFORCE with the greedy response as the baseline.

For each prompt x take the reward of one greedy response as the baseline of all that are sampled:

    b = R(x, greedy response);  A_t = sum over k >= t of r_k - b                    without critic, group or deviation
    L = mean over tokens of max(-A_t rho_t, -A_t clip(rho_t, 1 - eps_low, 1 + eps_high))           as in grpo.py

Where this departs from the paper, by default: the loss is a mean over all tokens of the mini-batch, not a sum over each
response (--loss-agg-mode seq-mean-token-sum is the paper's); there is no KL (--kl-coef 0.05 --kl-placement reward
--kl-estimator k1 is the paper's). With one update a step the clip does nothing: rho is 1.
This file is grpo.py with another baseline: make diff A=grpo B=remax.

    python remax.py                              one process; a tiny model and task, on any machine
    GPUS=8 launch/one_node.sh remax.py ...       one node; by torchrun or accelerate themselves: docs/scaling.md
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 remax.py ...     two nodes

Every rank runs this file from top to bottom. Details, metrics and results: docs/remax.md.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from lib.args import PolicyLoss, Sizes, check_common_flags, parse_json, read_flags, step_sizes

HERE = Path(__file__).parent


@dataclass
class Args:
    # ---- run
    run_name: str = ""
    """name of the run, which writes to output_dir/run_name; empty: <script>-s<seed>-<date and time>"""
    output_dir: str = "runs"
    """folder of all runs"""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 1
    """seed of sampling and data order; a run repeats itself"""
    total_steps: Annotated[int, Ge(1)] = 60
    """number of steps, each of prompts_per_step x group_size responses"""
    total_epochs: Annotated[int | None, Ge(1)] = None
    """if given, it sets total_steps: the steps that this many passes over the training prompts take, rounded up"""
    dry_run: Annotated[int, Ge(0)] = 0
    """print the sizes of a step and the memory that each of this many GPUs needs, and stop before a model loads"""
    resume: str = "never"
    """"never", "auto" (from the newest complete checkpoint of run_name, else from the start) or a checkpoint folder:
    run_name's own takes it back there, another run's starts run_name from there"""
    resume_override: tuple[str, ...] = ()
    """flags, or `script`, that change results and may be others than at the checkpoint; config.json records them"""
    stage_timeout: Annotated[float, Ge(0)] = 1800.0
    """seconds that a stage (start, rollout, update, save, ...) may take before it ends the job with the reason; after a
    30th of that it is printed where the ranks are; 0: no limit. The loading of models has none"""

    # ---- model
    model: str = str(HERE / "data/toy/model")
    """Hugging Face id, folder or .gguf file of the policy to start from"""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of forward and backward; weights and optimizer are fp32. auto: bfloat16 on a GPU, float32 on a CPU"""
    attn_implementation: str = "packed_sdpa"
    """packed_sdpa (lib/model.py) runs everywhere; flash_attention_2 needs its package; any other has padded rows"""
    padding_free: bool = True
    """lay the rows of a micro-batch end to end, without padding, where the model allows it (docs/models.md)"""
    share_prompts: bool = True
    """compute a prompt once for all its responses, where rows are packed and attention is packed_sdpa"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time in the update"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    lora_rank: Annotated[int, Ge(0)] = 0
    """train LoRA adapters of this rank (the reference is then the model without them); 0: train all weights. A vLLM
    engine or server samples from W + dW; as bfloat16 it loses small updates: rollout_correction then has a default"""
    lora_alpha: Annotated[float, Gt(0)] = 32.0
    """the adapters' update is multiplied by lora_alpha / lora_rank"""
    lora_target_modules: str = "all-linear"
    """linear layers that get adapters: all-linear, or a regular expression of names such as .*[qkvo]_proj"""
    freeze: str = ""
    """regular expression of parameter names that are not trained, such as "model.embed_tokens.*"; empty: none"""

    # ---- sharding
    reduce_each_micro_batch: bool = False
    """reduce gradients over ranks after each micro-batch: 4 bytes x parameters / ranks instead of 4 bytes x parameters
    of memory on each rank, for more communication"""
    replicas: Annotated[int, Ge(1)] = 1
    """copies of the model (HSDP), each split over ranks / replicas; 1: one copy split over all ranks"""
    sequence_parallel: Annotated[int, Ge(1)] = 1
    """neighbouring ranks that compute their rows together, each a share of the tokens, for rows that are too long for
    one (Ulysses); it divides the attention heads; needs --padding-free and packed_sdpa"""
    tensor_parallel: Annotated[int, Ge(1)] = 1
    """neighbouring ranks that compute their rows together, each with a share of every layer's weights, by transformers'
    plan for the model; it divides the key and value heads; needs a vLLM engine or server"""
    cpu_offload: tuple[Literal["actor", "critic", "ref", "reward_model", "activations"], ...] = ()
    """models whose weights, gradients and optimizer state stay in CPU memory; activations: what the update's forward
    keeps waits there for the backward, best with --gradient-checkpointing, which leaves a tensor a layer; slower"""

    # ---- data
    train_files: tuple[str, ...] = (str(HERE / "data/toy/train.jsonl"),)
    """parquet or json(l) files, or a data set on the hub; rows in verl's form"""
    val_files: tuple[str, ...] = (str(HERE / "data/toy/val.jsonl"),)
    """the same, for validation"""
    dataset_class: str = ""
    """path/to/file.py:ClassName of your own dataset class; empty: lib/dataset.py's RLHFDataset"""
    max_prompt_length: Annotated[int, Ge(1)] = 32
    """tokens of a prompt, template included"""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """what happens to a longer prompt that was not filtered out"""
    filter_overlong_prompts: bool = True
    """drop training and validation prompts that are longer; how many is printed"""
    chat_template_kwargs: str = "{}"
    """JSON of keywords for the chat template, such as {"enable_thinking": false}"""
    allow_special_tokens: bool = False
    """text in a message that spells a special token, such as <|im_end|>, is that token; otherwise it stays text, broken
    up by a space"""
    shuffle: bool = True
    """a new order of the training prompts in each epoch"""
    loader_workers: Annotated[int, Ge(0)] = 0
    """processes that tokenize ahead"""

    # ---- rollout
    rollout_engine: str = "hf"
    """hf samples with the trainer's own model; vllm runs a vLLM engine in each process; http://host:port is a vLLM
    server that runs already (several: commas between)"""
    engine_ranks: Annotated[int, Ge(1)] = 1
    """neighbouring ranks that share one vLLM engine, split over them (tensor parallel): for models that one GPU cannot
    hold beside training"""
    async_level: Annotated[int, Ge(0)] = 0
    """steps that rollouts may run ahead of training, on an engine of its own (http://...): their tokens are then of up
    to that many weights before. Above 0 rollout_correction has a default"""
    prompts_per_step: Annotated[int, Ge(1)] = 256
    """prompts of one step, over all ranks"""
    group_size: Annotated[int, Ge(1)] = 1
    """responses per prompt"""
    max_response_length: Annotated[int, Ge(1)] = 16
    """tokens of a response at most"""
    temperature: Annotated[float, Gt(0)] = 1.0
    """sampling temperature; the loss uses log-probs at this temperature, top_p and top_k"""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """nucleus sampling: among the fewest likeliest tokens of this probability together; 1: among all"""
    top_k: Annotated[int, Ge(-1)] = -1
    """sample among the k likeliest tokens; -1: among all"""
    multi_turn: str = "{}"
    """JSON of an episode's tools and limits, such as {"tools": ["calculator"], "max_turns": 4}: see MultiTurn in
    lib/agent_loop.py; max_response_length is then that of the whole episode"""
    gpu_memory: Annotated[float, Interval(gt=0, lt=1)] = 0.4
    """share of a GPU's memory that vLLM may take (on a CPU it takes 1 GiB for its KV cache)"""

    # ---- reward
    reward: tuple[str, ...] = ("data_source",)
    """scorers, whose scores are added: data_source (each row's, from rewards/), path/to/file.py:function (your own)"""
    reward_weights: Annotated[tuple[float, ...], Interval(ge=-1e4, le=1e4)] = ()
    """a weight for each of them; empty: 1"""
    reward_kwargs: str = "{}"
    """JSON of keywords for every scorer"""
    reward_workers: Annotated[int, Ge(0)] = 2
    """processes of each rank that score; 0: score in the training process, for breakpoint()"""
    reward_timeout: Annotated[float, Gt(0)] = 30.0
    """seconds that a scorer has for a response"""
    reward_memory: Annotated[int, Ge(1)] = 2048
    """MiB that a scorer may take beyond what its imports took"""
    sandbox_level: Literal["namespaces", "landlock", "rlimits", "none"] = "namespaces"
    """the weakest walls that are accepted around what a model wrote: docs/rewards.md has what each lets through"""
    reward_failure_score: Annotated[float | None, Interval(ge=-1e12, le=1e12)] = None
    """score of a response whose scorer hangs, crashes or raises; empty: it is in no group and trains nothing"""
    reward_model: str = ""
    """Hugging Face id or folder of a sequence classifier with one output, whose score is added to the scorer's"""
    reward_model_coef: Annotated[float, Interval(ge=-1e4, le=1e4)] = 1.0
    """weight of the reward model's score"""

    # ---- algorithm
    loss: PolicyLoss = "vanilla"
    """policy loss in lib/policy_losses.py"""
    loss_kwargs: str = "{}"
    """JSON of its hyper-parameters, such as {"cliprange_high": 4.0}; vanilla takes the three flags below"""
    clip_ratio_low: Annotated[float, Ge(0)] = 0.2
    """the ratio is clipped below 1 - clip_ratio_low where the advantage is negative"""
    clip_ratio_high: Annotated[float, Ge(0)] = 0.2
    """the ratio is clipped above 1 + clip_ratio_high where the advantage is positive"""
    clip_ratio_c: Annotated[float, Gt(1)] = 3.0
    """dual clip: bound of the ratio where the advantage is negative"""
    token_masks: str = "{}"
    """JSON of token selections and their hyper-parameters: top_entropy, m2po, off_policy_sequence keep their tokens in
    the loss, such as {"top_entropy": {"fraction": 0.2}}; clip_cov and kl_cov select for the loss of that name"""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """how token losses become one loss: see agg_loss in lib/core_algos.py"""
    loss_scale_factor: Annotated[float | None, Gt(0)] = None
    """constant divisor of seq-mean-token-sum-norm; empty: max_response_length"""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """beta, weight of the KL to the start model; at 0 no reference model is loaded"""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k1_unbiased", "k2_unbiased", "k3_unbiased"] = "k3+"
    """estimator of that KL; in the loss, + and _unbiased have the gradient of the KL; in the reward, k1 is usual"""
    kl_placement: Literal["loss", "reward"] = "loss"
    """add the KL to the loss, or subtract it from the reward of each token"""
    kl_target: Annotated[float | None, Gt(0)] = None
    """with --kl-placement reward: beta adapts to hold the KL at this; empty: beta is fixed"""
    kl_horizon: Annotated[int, Ge(1)] = 10000
    """responses over which beta adapts"""
    entropy_coef: Annotated[float, Interval(ge=-1, le=1)] = 0.0
    """weight of the entropy bonus"""
    entropy_target: Annotated[float | None, Ge(0)] = None
    """nats: entropy_coef moves by 0.005 a step to hold the entropy here, and is 0 above it; empty: it is fixed"""
    old_log_probs: Literal["auto", "recompute", "rollout"] = "auto"
    """pi_old: the trainer's own log-probs (auto: not computed where nothing needs them; with one update a step the
    ratio is 1), or the rollout engine's"""
    rollout_correction: str = "{}"
    """JSON: how r = pi_old / pi_rollout corrects the loss, such as {"level": "token", "bounds": [0, 2]}, the default of
    --async-level above 0 and of LoRA in bfloat16 with vLLM, {"level": null}, which only measures, or {"level": null,
    "reject": {"seq_mean_k1": [0.99, 1.01]}}: see lib/rollout_correction.py"""

    # ---- update
    num_mini_batches: Annotated[int, Ge(1)] = 1
    """optimizer updates per pass over a step's responses"""
    update_epochs: Annotated[int, Ge(1)] = 1
    """passes over a step's responses"""
    micro_batch_tokens: Annotated[int, Ge(1)] = 16384
    """tokens of one forward and backward on one rank"""
    lr: Annotated[float, Ge(0)] = 1e-4
    """learning rate (for a model of billions of parameters: 1e-6)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """course of the learning rate after the warm-up"""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """steps in which the learning rate rises from 0"""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """of AdamW"""
    adam_betas: Annotated[tuple[float, float], Interval(ge=0, lt=1)] = (0.9, 0.999)
    """of AdamW"""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """the gradient's norm is clipped to this"""

    # ---- validation
    val_before_train: bool = True
    """validate the start model"""
    val_every: Annotated[int, Ge(0)] = 5
    """validate every n steps and after the last; 0: never"""
    val_only: bool = False
    """validate (with resume: that checkpoint) and stop, without training data; writes to <run>/val_only/1, 2, ..."""
    val_reward: tuple[str, ...] = ()
    """scorers of validation, as --reward; empty: those of training"""
    val_samples: Annotated[int, Ge(1)] = 1
    """responses per validation prompt: n in mean@n, pass@k, maj@k"""
    val_temperature: Annotated[float, Ge(0)] = 0.0
    """sampling temperature in validation; 0: greedy"""
    val_top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """nucleus sampling in validation"""

    # ---- checkpoints and logs
    save_every: Annotated[int, Ge(0)] = 50
    """save a checkpoint every n steps and after the last; 0: never"""
    keep_checkpoints: Annotated[int, Ge(0)] = 2
    """keep the newest n checkpoints; 0: all"""
    export_model: bool = True
    """after the last step save the policy in Hugging Face form to <run>/model"""
    track: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """log there too; metrics.jsonl is always written"""
    show_samples: Annotated[int, Ge(0)] = 3
    """responses shown after each validation (samples.jsonl holds them all)"""


def check_flags(args: Args) -> None:
    """Raises InputError for values and combinations that make no sense."""
    check_common_flags(args)
    # REMAX: no flags of its own


if __name__ == "__main__":  # before the slow imports: --help, a misspelt flag and a bad value answer at once
    given = read_flags(Args, check_flags)

import numpy as np
import torch

from lib.advantages import (
    ADV_TENSORS,
    AdaptiveEntropyController,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_adv_estimator_fn,
)
from lib.agent import agent_metrics, generate_multi_turn, load_multi_turn
from lib.batching import balance_groups, exchange_groups, prepare_dynamic_batch
from lib.core_algos import agg_loss, at_last_token, kl_penalty
from lib.data_proto import DataProto
from lib.dataset import RLHFDataset, collate_fn, load_dataset_class, make_loader
from lib.distributed import (
    all_gather_lists,
    all_reduce_sum,
    clip_grad_norm,
    enter_stage,
    init_distributed,
    make_mesh,
    make_row_group,
    run,
    set_gradient_sync,
    shard_model,
    trainable_parameters,
)
from lib.memory import GIB, estimate_memory, memory_table
from lib.model import (
    add_lora,
    batched_log_probs,
    check_rows,
    check_sequence_parallel,
    check_tensor_parallel,
    freeze,
    load_model,
    load_reward_model,
    load_tokenizer,
    response_log_probs,
    reward_model_scores,
    without_adapters,
)
from lib.packing import layout
from lib.policy_losses import LOSS_TENSORS, TOKEN_MASKS, check_token_masks, compute_token_masks, get_policy_loss_fn
from lib.reward import RewardManager, load_scorers
from lib.reward.sandbox import accept as accept_sandbox
from lib.rollout import (
    Sampling,
    check_engine_import,
    make_engine,
    request_seeds,
    rollouts_ahead,
    staleness_metrics,
    sync_weights,
)
from lib.rollout_correction import get_rollout_correction_fn
from lib.run import (
    Timer,
    Tracker,
    data_metrics,
    export_hf,
    extra_metrics,
    mismatch_metrics,
    open_run,
    rows_dropped,
    sample_rows,
    throughput_metrics,
    validated_rows,
    validation_metrics,
)
from lib.run.metrics import Mean, Sum, add_metrics, reduce_metrics, token_means

GATHERED = (  # over ranks, for the advantages
    *("token_level_scores", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob", "entropys"),
    *("reward_baselines",),  # REMAX: instead of what group estimators need
)


def load_datasets(args: Args, tokenizer, chat_template_kwargs: dict):
    """(train, val) data sets; None is what the run does not need."""
    dataset_class = load_dataset_class(args.dataset_class) if args.dataset_class else RLHFDataset
    settings = {
        "max_prompt_length": args.max_prompt_length,
        "truncation": args.truncation,
        "filter_overlong_prompts": args.filter_overlong_prompts,
        "chat_template_kwargs": chat_template_kwargs,
        "allow_special_tokens": args.allow_special_tokens,
    }
    train = None if args.val_only else dataset_class(list(args.train_files), tokenizer, **settings)
    wanted = args.val_before_train or args.val_every or args.val_only
    return train, dataset_class(list(args.val_files), tokenizer, **settings) if wanted else None


def validate(args: Args, generate, dataset, tokenizer, score, world, sizes: Sizes, tracker: Tracker, step: int):
    """The metrics of lib/metrics.py's validation_metrics, over all validation prompts. A collective."""
    sampling = Sampling(args.max_response_length, args.val_temperature, args.val_top_p)
    per_rank = math.ceil(len(dataset) / world.size)
    per_call = max(1, sizes.local_rows // args.val_samples)
    results, shown = [], []
    for start in range(0, per_rank, per_call):
        enter_stage(f"validation at step {step}")
        # the same number on every rank: what is beyond the data set's end keeps the others company
        rows = [world.rank + world.size * i for i in range(start, min(start + per_call, per_rank))]
        prompts = DataProto.from_single_dict(collate_fn([dataset[min(i, len(dataset) - 1)] for i in rows]))
        batch = prompts.to(world.device).repeat(args.val_samples, interleave=True)
        numbers = [row * args.val_samples + n for row in rows for n in range(args.val_samples)]
        batch = generate(batch, sampling, request_seeds(args.seed, -1, numbers))
        batch.batch["token_level_scores"], extras, _ = score(batch)
        batch = batch[: sum(row < len(dataset) for row in rows) * args.val_samples]
        results += validated_rows(batch, extras, [n // args.val_samples for n in numbers])
        shown += sample_rows(batch, tokenizer)
    results = sorted(all_gather_lists(results), key=lambda row: row.prompt)  # in one order, for any number of ranks
    tracker.samples(all_gather_lists(shown), step, show=args.show_samples)
    return validation_metrics(results)


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
        counts = dict(getattr(dataset, "dropped", {}))
        if defused := getattr(dataset, "defused", 0):
            counts["special_tokens_as_text"] = defused
        return f"{len(dataset)} ({', '.join(f'{name} {n}' for name, n in counts.items())})"

    if args.val_only:
        return (
            f"validation prompts: {size_of(val_data)} x {args.val_samples} = {len(val_data) * args.val_samples} "
            f"responses on {args.dry_run or world.size} rank(s) of {world.device.type}"
        )
    responses = args.prompts_per_step * args.group_size
    return (
        f"{args.prompts_per_step} prompts x {args.group_size} = {responses} responses a step"
        f" on {args.dry_run or world.size} rank(s) of {world.device.type}, {sizes.updates_per_step} update(s) of "
        f"{responses // args.num_mini_batches} rows; training prompts: {size_of(train_data)}, "
        f"validation prompts: {size_of(val_data) if val_data else 'none'}; {args.total_steps} steps = "
        f"{args.total_steps * args.prompts_per_step / len(train_data):.2f} epochs"
    )


def describe_memory(args: Args, sizes: Sizes, critic_model: str = "") -> str:
    """A table of what each of --dry-run GPUs holds in each moment of a step, against this one's memory or 80 GB."""
    gpu = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * GIB
    dtype = torch.bfloat16 if args.compute_dtype == "auto" else getattr(torch, args.compute_dtype)
    moments = estimate_memory(
        args.model,
        ranks=args.dry_run // args.replicas,
        compute_dtype=dtype,
        frozen_dtype=dtype,
        micro_batch_tokens=args.micro_batch_tokens,
        rows=sizes.local_rows,
        max_prompt_length=args.max_prompt_length,
        max_response_length=args.max_response_length,
        accumulation="sharded" if args.reduce_each_micro_batch else "whole",
        gradient_checkpointing=args.gradient_checkpointing,
        lora_rank=args.lora_rank,
        lora_target_modules=args.lora_target_modules,
        reference=args.kl_coef > 0 and not args.lora_rank,
        critic_model=critic_model,
        reward_model=args.reward_model,
        cpu_offload="actor" in args.cpu_offload,
        offload_activations="activations" in args.cpu_offload,
        engine_bytes=int(args.gpu_memory * gpu) if args.rollout_engine == "vllm" else 0,
        engine_ranks=args.engine_ranks,
        trust_remote_code=args.trust_remote_code,
    )
    return memory_table(moments, gpu)


def main(args: Args) -> None:
    # ---- sizes and inputs: everything that can be wrong is found before a model loads or a file is written
    world = init_distributed(args.stage_timeout, args.rollout_engine)
    sizes = step_sizes(args, args.dry_run or world.size)
    check_engine_import(args.rollout_engine)
    check_sequence_parallel(args.model, args.sequence_parallel, trust_remote_code=args.trust_remote_code)
    check_tensor_parallel(args.model, args.tensor_parallel, trust_remote_code=args.trust_remote_code)
    # REMAX: the one estimator that needs a greedy response
    estimate_advantages = get_adv_estimator_fn("remax")
    adv_tensors = ADV_TENSORS["remax"]
    loss_settings = parse_json(args, "loss_kwargs")
    if args.loss == "vanilla":
        loss_settings |= {"cliprange_low": args.clip_ratio_low, "cliprange_high": args.clip_ratio_high}
        loss_settings["clip_ratio_c"] = args.clip_ratio_c
    policy_loss = get_policy_loss_fn(args.loss, loss_settings)
    token_masks = parse_json(args, "token_masks")
    if args.loss in TOKEN_MASKS:
        token_masks.setdefault(args.loss, {})
    check_token_masks(token_masks)
    compute_dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    if args.compute_dtype != "auto":
        compute_dtype = getattr(torch, args.compute_dtype)
    merged = args.lora_rank > 0 and args.rollout_engine != "hf"  # W + dW, which bfloat16 may round to W
    correction = parse_json(args, "rollout_correction")
    if (args.async_level or (merged and compute_dtype == torch.bfloat16)) and args.old_log_probs != "rollout":
        correction = correction or {"level": "token", "bounds": [0, 2]}
    correct_rollout = get_rollout_correction_fn(correction) if correction else None
    kl_in_reward = args.kl_coef > 0 and args.kl_placement == "reward"
    needs_old_log_probs = (
        sizes.updates_per_step > 1
        or args.old_log_probs == "recompute"
        or bool(correction or token_masks or kl_in_reward)
        or args.loss in LOSS_TENSORS
        or "old_log_probs" in adv_tensors
    )
    accept_sandbox(args.sandbox_level)
    tokenizer = load_tokenizer(args.model, trust_remote_code=args.trust_remote_code)
    chat_template_kwargs = parse_json(args, "chat_template_kwargs")
    multi_turn = load_multi_turn(
        parse_json(args, "multi_turn"), tokenizer, chat_template_kwargs, args.max_prompt_length
    )
    if multi_turn is not None:
        chat_template_kwargs = chat_template_kwargs | {"tools": multi_turn.schemas or None}
    train_data, val_data = load_datasets(args, tokenizer, chat_template_kwargs)
    trained, validated = ([data] if data is not None else [] for data in (train_data, val_data))
    reward_kwargs = parse_json(args, "reward_kwargs")
    scored = trained if args.val_reward else [*trained, *validated]
    scorers = load_scorers(args.reward, scored, reward_kwargs, args.reward_weights)
    val_scorers = load_scorers(args.val_reward, validated, reward_kwargs)
    kl_control = FixedKLController(args.kl_coef)
    if args.kl_target is not None:
        kl_control = AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
    entropy_control = AdaptiveEntropyController(args.entropy_coef, args.entropy_target)
    if args.total_epochs is not None and not args.val_only:
        args.total_steps = math.ceil(args.total_epochs * len(train_data) / args.prompts_per_step)
    if world.rank == 0:
        print(describe(args, sizes, world, train_data, val_data), flush=True)
    if args.dry_run:
        print(describe_memory(args, sizes))
        return
    run = open_run(args, world, __file__)

    # ---- models and optimizer
    torch.manual_seed(args.seed + world.rank)
    mesh = make_mesh(world, args.replicas, args.tensor_parallel)
    row_group = make_row_group(world, mesh, args.sequence_parallel)

    def adapt(model: torch.nn.Module) -> torch.nn.Module:
        """What of a model trains."""
        if args.lora_rank:
            lora = {"rank": args.lora_rank, "alpha": args.lora_alpha, "target_modules": args.lora_target_modules}
            return add_lora(model, **lora, seed=args.seed)
        return freeze(model, args.freeze) if args.freeze else model

    def load_policy(trainable: bool) -> torch.nn.Module:
        model = load_model(
            args.model,
            dtype=torch.float32 if trainable and not args.lora_rank else compute_dtype,  # masters where W trains
            attn_implementation=args.attn_implementation,
            padding_free=args.padding_free,
            share_prompts=args.share_prompts,
            gradient_checkpointing=args.gradient_checkpointing and trainable,
            offload_activations="activations" in args.cpu_offload,
            trust_remote_code=args.trust_remote_code,
            on_meta=True,
        )
        model = adapt(model) if trainable else model.requires_grad_(False)
        offload = ("actor" if trainable else "ref") in args.cpu_offload
        return shard_model(model, mesh, compute_dtype, cpu_offload=offload)

    actor = load_policy(trainable=True)
    ref = None
    if args.kl_coef:
        ref = actor if args.lora_rank else load_policy(trainable=False)
    reward_model = None
    if args.reward_model:
        reward_model, reward_tokenizer = load_reward_model(
            args.reward_model, dtype=compute_dtype, trust_remote_code=args.trust_remote_code, on_meta=True
        )
        own_mesh = make_mesh(world, args.replicas)  # each rank runs its own rows
        offload = "reward_model" in args.cpu_offload
        reward_model = shard_model(reward_model, own_mesh, compute_dtype, cpu_offload=offload)
    parameters = trainable_parameters(actor)
    optimizer = torch.optim.AdamW(
        parameters, lr=args.lr, betas=args.adam_betas, weight_decay=args.weight_decay, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(lr_factor, args, sizes))
    models, schedulers = {"actor": (actor, optimizer)}, {"actor": scheduler}

    # ---- rollout engine, resume
    engine = make_engine(
        args.rollout_engine,
        actor,
        tokenizer,
        folder=run.folder / "engine",
        max_length=args.max_prompt_length + args.max_response_length,
        dtype=compute_dtype,
        gpu_memory=args.gpu_memory,
        ranks=args.engine_ranks,
    )
    generate = engine.generate if multi_turn is None else partial(generate_multi_turn, engine, settings=multi_turn)
    sampling = Sampling(args.max_response_length, args.temperature, args.top_p, args.top_k)
    greedy_sampling = Sampling(args.max_response_length, temperature=0.0)  # REMAX:
    sync_tolerance = 1e-3 if compute_dtype == torch.float32 else 0.25  # nats; bf16 engines differ by 0.03
    make_reward_manager = partial(
        RewardManager,
        tokenizer=tokenizer,
        workers=args.reward_workers,
        timeout_s=args.reward_timeout,
        memory_mb=args.reward_memory,
        failure_score=args.reward_failure_score,
    )
    reward_manager = make_reward_manager(scorers)
    val_reward_manager = make_reward_manager(val_scorers) if val_scorers else reward_manager
    state = run.load(models=models, schedulers=schedulers)
    if state is not None:
        kl_control.load_state_dict(state["kl_control"])
        entropy_control.load_state_dict(state["entropy_control"])

    def collect_scores(pending, batch: DataProto) -> tuple[torch.Tensor, dict[str, list], dict[str, Sum]]:
        """Scores (B, T) on each row's last token, what else is known of each row, failures. A collective."""
        scores, extras, failures = pending.get()
        unscored = scores.isnan().any(1)
        batch.batch["response_mask"][unscored] = 0
        scores[unscored] = 0
        if multi_turn is not None:
            scores = scores + multi_turn.reward_coef * batch.batch["turn_rewards"]
        if reward_model is not None:
            judged = reward_model_scores(reward_model, reward_tokenizer, batch, tokenizer, args.micro_batch_tokens)
            scores = scores + args.reward_model_coef * at_last_token(judged, batch.batch["response_mask"])
            extras["reward_model"] = judged.tolist()
        return scores, extras, failures

    def score(batch: DataProto) -> tuple[torch.Tensor, dict[str, list], dict[str, Sum]]:
        return collect_scores(val_reward_manager.submit(batch), batch)

    def evaluate(step: int) -> dict[str, float]:
        sync = sync_weights(engine, actor, step, tolerance=sync_tolerance)
        return sync | validate(args, generate, val_data, tokenizer, score, world, sizes, run.tracker, step)

    if args.val_only or (args.val_before_train and run.step == 0):
        run.tracker.log(evaluate(run.step), run.step)
    if args.val_only:
        run.close()
        reward_manager.close()
        val_reward_manager.close()
        engine.close()
        return

    # ---- data
    loader = make_loader(
        train_data,
        args.prompts_per_step,
        rank=world.rank,
        world_size=world.size,
        seed=args.seed,
        shuffle=args.shuffle,
        num_workers=args.loader_workers,
    )
    if state is not None:
        loader.load_state_dict(state["loader"])

    def requests_of_steps():
        """(prompts, each group_size times; seeds; where the loader then stands) of step after step."""
        for step, prompts in zip(range(run.step + 1, args.total_steps + 1), loader):
            prompts = DataProto.from_single_dict(prompts).to(world.device)
            numbers = [world.rank + world.size * i for i in range(sizes.local_prompts)]  # in the global batch
            prompts.non_tensor_batch["uid"] = np.array([f"{step}-{n}" for n in numbers], dtype=object)
            rows = [n * args.group_size + sample for n in numbers for sample in range(args.group_size)]
            batch = prompts.repeat(args.group_size, interleave=True)
            # REMAX: and the prompts once
            yield batch, request_seeds(args.seed, step, rows), (prompts, numbers, loader.state_dict())

    rollouts = rollouts_ahead(engine, generate, requests_of_steps(), sampling, args.async_level)

    for step in range(run.step + 1, args.total_steps + 1):
        timer = Timer(step)
        with timer("step"):
            # ---- 1 rollout
            with timer("weight_sync"):
                metrics = sync_weights(engine, actor, step - 1, tolerance=sync_tolerance)
            with timer("rollout"):
                batch, (prompts, numbers, loader_state) = next(rollouts)  # REMAX:
                # REMAX: one greedy response a prompt
                greedy = generate(prompts, greedy_sampling, request_seeds(args.seed, step, numbers))
                engine.sleep()
                plan, imbalance = balance_groups(
                    batch, actor, args.group_size, args.num_mini_batches, share_prompts=actor.share_prompts
                )
                batch = exchange_groups(batch, plan)
                greedy = exchange_groups(greedy, plan)  # REMAX:
                metrics |= imbalance

            # ---- 2 reward
            with timer("reward"):
                pending_greedy = reward_manager.submit(greedy)  # REMAX:
                pending = reward_manager.submit(batch)  # scored in other processes while this one computes log-probs

            # ---- 3 log-probs
            with timer("log_probs"):
                if step == run.step + 1:
                    check_rows(actor, batch, args.temperature, args.micro_batch_tokens, compute_dtype, row_group)
                forward = partial(
                    batched_log_probs,
                    batch=batch,
                    temperature=args.temperature,
                    micro_batch_tokens=args.micro_batch_tokens,
                    row_group=row_group,
                )
                if args.old_log_probs == "rollout":
                    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
                elif needs_old_log_probs:
                    outputs = forward(
                        actor, top_p=args.top_p, top_k=args.top_k, sum_pi_squared="sum_pi_squared" in adv_tensors
                    )
                    batch.batch.update(dict(zip(("old_log_probs", "entropys", "sum_pi_squared"), outputs)))
                if ref is not None:
                    with without_adapters(ref):
                        batch.batch["ref_log_prob"], _ = forward(ref)

            with timer("reward"):
                # REMAX: the greedy response's reward is the baseline (B,) of all responses to the prompt
                greedy_scores, _, greedy_failures = collect_scores(pending_greedy, greedy)
                baselines = greedy_scores.sum(1)
                batch.batch["reward_baselines"] = baselines.repeat_interleave(args.group_size)
                scores, extras, failures = collect_scores(pending, batch)  # (B, T)
                # REMAX: a prompt without a baseline trains nothing
                has_baseline = greedy.batch["response_mask"].any(1)
                batch.batch["response_mask"] *= has_baseline.repeat_interleave(args.group_size)[:, None]
                add_metrics(failures, greedy_failures)
                # REMAX: no reward_keys, which only group estimators weigh
                batch.batch["token_level_scores"] = scores

            # ---- 4 advantages: of the batch of all ranks, for what compares rows or tokens
            with timer("advantages"):
                whole = batch.select([key for key in GATHERED if key in batch.batch], ["uid"]).all_gather()
                tensors, uid = dict(whole.batch.items()), whole.non_tensor_batch["uid"]
                mask = tensors["response_mask"].bool()  # (B, T)
                keep = counted = mask  # tokens that the loss sums, and those that its means count
                stages = {"dead": mask}  # of keep: who loses which rows
                if correct_rollout is not None:
                    weights, keep, correction_metrics = correct_rollout(
                        tensors["old_log_probs"], tensors["rollout_log_probs"], keep
                    )
                    stages["rollout_correction"] = keep
                    metrics |= correction_metrics
                    if weights is not None:
                        tensors["rollout_is_weights"] = weights
                live = mask & keep.any(1, keepdim=True)  # a rejected row is in no group
                rewards = tensors["token_level_scores"]
                if kl_in_reward:
                    kl = kl_penalty(tensors["old_log_probs"], tensors["ref_log_prob"], args.kl_estimator, live)
                    rewards, mean_kl = apply_kl_penalty(rewards, kl, live, kl_control.value)
                    metrics |= {"actor/reward_kl": mean_kl, "actor/kl_coef": kl_control.value}
                    kl_control.update(mean_kl, len(whole))
                tensors["token_level_rewards"] = rewards
                tensors["advantages"], tensors["returns"] = estimate_advantages(
                    rewards, live, uid, **{key: tensors[key] for key in adv_tensors if key in tensors}
                )
                # REMAX: equal scores in a group are as good a signal as others
                if token_masks:
                    tensors |= compute_token_masks(
                        token_masks, tensors | {"response_mask": keep}, seed=args.seed * 2**20 + step
                    )
                    stages["token_masks"] = keep = keep & tensors.get("loss_mask", keep)
                tensors |= {"loss_mask": keep, "counted_mask": counted, "live_mask": live}
                mine = slice(world.rank * len(batch), (world.rank + 1) * len(batch))
                batch.batch.update({key: tensor[mine] for key, tensor in tensors.items()})

            # ---- 5 update
            with timer("update"):
                local = data_metrics(batch)
                first_update, skipped_updates = True, 0
                for _ in range(args.update_epochs):
                    for mini_batch in batch.split(sizes.local_mini_batch_rows):
                        counted = mini_batch.batch["counted_mask"]
                        counts = [int(counted.sum()), int(counted.any(1).sum())]
                        global_tokens, global_rows = all_reduce_sum(counts, world.device)
                        micro_batches, _ = prepare_dynamic_batch(
                            mini_batch, args.micro_batch_tokens, **layout(actor), row_group=row_group
                        )
                        for i, micro in enumerate(micro_batches):
                            reduce_now = args.reduce_each_micro_batch or i == len(micro_batches) - 1
                            set_gradient_sync(actor, reduce_now)
                            tensors = micro.batch
                            mask = tensors["response_mask"]  # (b, T)
                            log_probs, entropy, *outside = response_log_probs(
                                actor,
                                micro,
                                args.temperature,
                                top_p=args.top_p,
                                top_k=args.top_k,
                                row_group=row_group,
                            )
                            old_log_probs = tensors.get("old_log_probs", log_probs.detach())
                            losses, token_metrics = policy_loss(
                                old_log_probs,
                                log_probs,
                                tensors["advantages"],
                                mask,
                                **{key: tensors[key] for key in LOSS_TENSORS.get(args.loss, ())},
                            )
                            token_metrics |= {"actor/pg_loss": losses.detach(), "actor/entropy": entropy.detach()}
                            if "rollout_is_weights" in tensors:
                                losses = losses * tensors["rollout_is_weights"]
                            losses = losses - entropy_control.value * entropy
                            if ref is not None and not kl_in_reward:
                                kl = kl_penalty(
                                    log_probs, tensors["ref_log_prob"], args.kl_estimator, mask, old_log_probs
                                )
                                losses = losses + args.kl_coef * kl
                                token_metrics["actor/ref_kl"] = kl.detach()
                            loss = agg_loss(
                                losses * tensors["loss_mask"],
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
                                sampled = tensors["rollout_log_probs"]
                                add_metrics(local, mismatch_metrics(log_probs, sampled, mask, *outside))
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
        local |= timer.metrics() | extra_metrics(extras) | agent_metrics(batch) | failures
        if args.async_level:
            local |= staleness_metrics(batch.batch["weight_versions"], step - 1, args.async_level)
        local |= {
            "training/epoch": loader_state["position"] / len(train_data),
            "training/skipped_updates": skipped_updates,
            "training/rows_in": Sum(len(batch)),
            "training/rows_trained": Sum(batch.batch["loss_mask"].any(1).sum().item()),
            "training/trained_share": Mean(
                batch.batch["loss_mask"].sum().item(), batch.batch["response_mask"].sum().item()
            ),
            # REMAX: the greedy responses are paid for too
            "training/tokens": Sum((batch.batch["attention_mask"].sum() + greedy.batch["attention_mask"].sum()).item()),
            "reward/baseline": Mean(baselines[has_baseline].sum().item(), int(has_baseline.sum())),
            "response_length/baseline": Mean(greedy.batch["response_mask"].sum().item(), int(has_baseline.sum())),
        }
        metrics |= reduce_metrics(local | rows_dropped(stages))
        metrics["actor/entropy_coef"] = entropy_control.value
        if "actor/entropy" in metrics:  # not where no row has a token to train on
            entropy_control.update(metrics["actor/entropy"])
        dropped = sum(rows for name, rows in metrics.items() if name.startswith("training/rows_dropped/"))
        assert metrics["training/rows_in"] == metrics["training/rows_trained"] + dropped, "rows were lost on the way"
        metrics |= throughput_metrics(metrics, metrics["training/tokens"], world.size)
        run.tracker.log(metrics, step)

        # ---- 7 validate and save
        last = step == args.total_steps
        if args.val_every and (last or step % args.val_every == 0):
            run.tracker.log(evaluate(step), step)
        if args.save_every and (last or step % args.save_every == 0):
            run.save(  # written while training goes on
                step,
                models=models,
                schedulers=schedulers,
                trainer_state={
                    "step": step,
                    "loader": loader_state,
                    "kl_control": kl_control.state_dict(),
                    "entropy_control": entropy_control.state_dict(),
                },
            )

    if args.export_model:
        export_hf(actor, tokenizer, run.folder / "model")
    run.close()
    reward_manager.close()
    val_reward_manager.close()
    engine.close()


if __name__ == "__main__":
    run(main, given)
