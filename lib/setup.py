"""Makes what a run needs (data, models, engine, rewards) from groups of flags. A script's set-up calls these."""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lib import InputError, core_algos, is_first_on_node
from lib import model as models
from lib.args import DataArgs, ModelArgs, OptimizerArgs, Reads, ScriptArgs, ShardArgs, Sizes, check_read, engine_rows
from lib.args.groups import columns_of
from lib.cli.flags import check_flags, non_default, parse_json, with_line_breaks
from lib.columns import COLUMNS
from lib.data import (
    PromptDataset,
    RLHFDataset,
    check_template_kwargs,
    end_of_turn,
    load_dataset_class,
    local_copy,
    make_loader,
    set_chat_template,
    shown_tools,
)
from lib.data.vision import Vision
from lib.distributed import (
    World,
    accelerator,
    has_flash_attention,
    init_distributed,
    make_mesh,
    make_row_group,
    shard_model,
    trainable_parameters,
)
from lib.model import APART, Critic, ForwardConfig, LossFlags, Policy, Reference, UpdateChecks
from lib.reward import RewardManager, load_scorers
from lib.reward.scorers import Scorer, check_keywords
from lib.reward.scores import RewardModel, Rewards
from lib.rollout import (
    Rollouts,
    check_capabilities,
    check_engine_import,
    engine_class,
    make_engine,
    vllm_refuses,
)
from lib.run import Run, Validation
from lib.run.goals import check_names
from lib.run.run_config import describe_start, read_json
from lib.sandbox import accept as accept_sandbox
from lib.seeds import set_seed

if TYPE_CHECKING:
    from lib.agent.multi_turn import MultiTurn

ON_CPU = "fp8_per_channel"
ONLINE_FP8 = ("fp8", "fp8_per_tensor", ON_CPU, "fp8_per_block")  # vLLM quantizes the 16-bit weights that it loads

# ---- before a model loads ------------------------------------------------------------------------


def join(args: ScriptArgs) -> World:
    """Joins the job (init_distributed), whose ranks must have the same flags, code and files. An engine rank of
    --rollout-gpus does not come back: it runs its vLLM server until the job is over."""
    set_seed(args.run.seed)  # the same on all ranks: a dataset class may draw which rows it keeps
    rollout, device = args.rollout, accelerator() or torch.device("cpu")
    if rollout.batch_invariant and not args.run.dry_run:
        use_batch_invariant_kernels(device)
    why = choose_engine(args, device) if rollout.rollout_engine == "auto" else ""
    engine_ranks = 0 if args.run.dry_run else rollout.rollout_gpus
    describe = partial(describe_start, args, Path(sys.argv[0]))
    world = init_distributed(args.run.stage_timeout, rollout.rollout_engine, engine_ranks, describe)
    if why:
        if world.rank == 0:
            print(f"--rollout-engine auto: {rollout.engine}, {why}", flush=True)
        check_flags(args)  # with this engine
    if world.rank >= world.size:
        from lib.rollout.managed_servers import serve

        serve(world, rollout.rollout_tensor_parallel_size)
    return world


def choose_engine(args: ScriptArgs, device: torch.device) -> str:
    """Sets what --rollout-engine auto is here. Returns why. A replay has the engine of the recorded run, which decides
    whether there is a rollout correction. Without a GPU, --dry-run assumes one."""
    model, run, rollout = args.model, args.run, args.rollout
    if rollout.rollout_gpus:
        rollout.auto_engine, why = "vllm", "which --rollout-gpus needs"
    elif run.replay:
        recorded = (read_json(Path(run.replay, "config.json")) or {}).get("effective", {}).get("rollout_engine")
        rollout.auto_engine, why = recorded if recorded == "vllm" else "hf", "as recorded"
    elif device.type == "cpu":
        assumed = "if the GPUs have it and it knows the model"
        rollout.auto_engine, why = ("vllm", assumed) if run.dry_run else ("hf", "because this machine has no GPU")
    else:
        refused = vllm_refuses(models.config_of(model.model, "--model", model.trust_remote_code), device.type)
        rollout.auto_engine, why = ("hf", f"because {refused}") if refused else ("vllm", "which knows the model")
    return why


def use_batch_invariant_kernels(device: torch.device) -> None:
    """For vLLM in this process and in those that it starts, and for what torch compiles. Call it before vLLM is
    imported. Raises InputError if vLLM has none for the device."""
    if not has_flash_attention(device, torch.bfloat16):  # they need the same GPUs
        why = "vLLM has batch-invariant kernels for GPUs from compute capability 8.0 on, and ignores it on a CPU"
        raise InputError(f"--batch-invariant: {why}: drop the flag (docs/mismatch.md has what holds on a CPU)")
    from torch._inductor import config as inductor

    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if hasattr(inductor, "batch_invariant"):  # torch 2.11 has none
        inductor.batch_invariant = True


def get_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def get_attention(name: str, dtype: torch.dtype, device: torch.device, path: str, **trust: bool) -> str:
    """auto: varlen where GPU, dtype and the model at `path` allow it, else packed_sdpa. Raises InputError if varlen has
    no kernel here, or flash_attention_2 no package."""
    if name == "flash_attention_2" and not find_spec("flash_attn"):
        raise InputError("--attn-implementation flash_attention_2: its package flash-attn is not installed; take auto")
    if name == "varlen" and (device.type == "cpu" or dtype == torch.float32):
        raise InputError(
            "--attn-implementation varlen is FlashAttention, for a GPU and 16 bits (--compute-dtype); here they are "
            f"{device.type} and {str(dtype).removeprefix('torch.')}; take auto"
        )
    if name != "auto":
        return name
    runs = has_flash_attention(device, dtype) and models.takes_varlen(path, **trust)
    return "varlen" if runs else "packed_sdpa"


def check_algorithm(args: ScriptArgs, device: torch.device) -> dict:
    """Checks names and hyper-parameters of the estimator, loss, masks and correction. Raises InputError. Returns the
    settings of the rollout correction, which may be its default; {} means no correction."""
    if args.adv_estimator:
        settings = {"singleton": args.singleton} | non_default(args.adv_kwargs)
        core_algos.get_adv_estimator_fn(args.adv_estimator, settings)
    core_algos.get_policy_loss_fn(args.loss, non_default(args.loss_kwargs))
    core_algos.check_token_masks(args.token_masks.settings(args.loss))
    correction = args.rollout_correction.settings()
    merged = args.model.lora_rank > 0 and not engine_class(args.rollout.engine).shares_weights
    merged &= args.rollout.lora_sync != "adapter"
    # the engine gets W + dW, which 16 bits may round to W
    rounded = merged and get_compute_dtype(args.model.compute_dtype, device) != torch.float32
    loss_corrects = args.old_log_probs == "rollout" or "rollout_log_probs" in Reads(args).columns()[1]
    if (args.rollout.async_level or rounded) and not loss_corrects:
        correction = correction or {"level": "token", "bounds": (0, 2)}
    if correction:
        core_algos.get_rollout_correction_fn(correction)
    if args.rollout.quantization:
        corrected = bool(correction) or loss_corrects or args.validation.val_only
        dtype = get_compute_dtype(args.model.compute_dtype, device)
        check_quantization(args.rollout.quantization, dtype, device, corrected)
    if args.model.routing_replay == "R3" and args.rollout.starts_vllm and device.type == "cpu" and not args.run.dry_run:
        why = "on a CPU vLLM does not return the experts"
        raise InputError(f"--routing-replay R3 with --rollout-engine vllm: {why}: take --rollout-engine hf, or R2")
    return correction


def check_quantization(name: str, dtype: torch.dtype, device: torch.device, corrected: bool) -> None:
    """Raises InputError for a quantization of vLLM's weights that no sync of weights reaches, or that nothing corrects.
    corrected: whether the loss accounts for the difference between engine and trainer."""
    flag = f'--vllm-kwargs {{"quantization": "{name}"}}'
    if name not in ONLINE_FP8:
        others = f"others need weights in their own format: take one of {', '.join(ONLINE_FP8)}"
        raise InputError(f"{flag}: vLLM quantizes the weights of each sync itself only as FP8; {others}")
    if device.type == "cpu" and name != ON_CPU:
        raise InputError(f"{flag}: on a CPU vLLM has kernels for {ON_CPU} only: take that")
    if dtype == torch.float32:
        raise InputError(f"{flag}: vLLM quantizes 16-bit weights: set --compute-dtype bfloat16")
    if not corrected:
        fix = "set --rollout-correction.level token (docs/algorithms.md)"
        raise InputError(f"{flag}: the engine samples from other probabilities than the loss assumes: {fix}")


def needed_log_probs(args: ScriptArgs, sizes: Sizes, correction: dict) -> tuple[str, ...]:
    """What must be computed with the policy before the update: old_log_probs and entropys, and for some estimators
    squared_score. Nothing, where nothing reads it: with one update a step the ratio is 1."""
    read = set.union(*Reads(args, correction=correction).columns())
    if "squared_score" in read:
        return "old_log_probs", "entropys", "squared_score"
    needed = sizes.updates_per_step > 1 or args.old_log_probs == "recompute" or {"old_log_probs", "entropys"} & read
    return ("old_log_probs", "entropys") if needed else ()


def advantage_columns(args: ScriptArgs, correction: dict) -> list[str]:
    """Columns of the rows of all ranks that this run's estimator, correction, token masks and KL read, besides those
    that are always gathered."""
    read, _ = Reads(args, correction=correction).columns()
    return [name for name, column in COLUMNS.items() if name in read and column.gathered == "if read"]


def effective_settings(
    args: ScriptArgs, device: torch.device, correction: dict, needed: tuple[str, ...]
) -> dict[str, Any]:
    """{flag: value} for flags that are left to the run (auto, None), for config.json. correction: of `check_algorithm`;
    needed: of `needed_log_probs`."""
    dtype, model = get_compute_dtype(args.model.compute_dtype, device), args.model
    trust = {"trust_remote_code": model.trust_remote_code}
    name = str(dtype).removeprefix("torch.")
    settings: dict[str, Any] = {
        "rollout_engine": args.rollout.engine,
        "compute_dtype": name,
        "attn_implementation": get_attention(model.attn_implementation, dtype, device, model.model, **trust),
        "old_log_probs": "rollout" if args.old_log_probs == "rollout" else "recompute" if needed else "not needed",
        "rollout_correction": correction or "none",
    }
    if args.loss_agg_mode == "seq-mean-token-sum-norm":
        settings["loss_scale_factor"] = args.loss_scale_factor or args.rollout.max_response_length
    if args.run.export_model:
        settings["export_dtype"] = name if args.run.export_dtype == "auto" else args.run.export_dtype
    if args.rollout.starts_vllm:
        settings["gpu_memory_utilization"] = args.rollout.gpu_share
    return settings


def make_kl_control(args: ScriptArgs) -> core_algos.AdaptiveKLController:
    """The controller of the KL coefficient beta: fixed or adaptive."""
    if args.kl_target is None:
        return core_algos.FixedKLController(args.kl_coef)
    return core_algos.AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)


@dataclass
class Inputs:
    """What is loaded before the models. train_data is None, and val_data empty, if the run does not need it."""

    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # None: a text model
    multi_turn: "MultiTurn | None"
    train_data: PromptDataset | None
    val_data: list[PromptDataset]  # one for each of ValidationArgs.sets
    scorers: list[Scorer]
    val_scorers: list[Scorer]  # empty: those of training
    shadow_scorers: list[Scorer]

    @property
    def processor(self) -> PreTrainedTokenizerBase | ProcessorMixin:
        """What is saved beside the model: its processor, of a text model the tokenizer."""
        return self.tokenizer if self.vision is None else self.vision.processor


def load_inputs(args: ScriptArgs) -> Inputs:
    """Loads tokenizer, tools, data and scorers, and checks them against each other. Sets total_steps from total_epochs,
    if that is given. Raises InputError."""
    model, data, reward, validation = args.model, args.data, args.reward, args.validation
    trust: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    vllm_kwargs = parse_json("vllm_kwargs", args.rollout.vllm_kwargs)
    engine = args.rollout.engine
    known = args.rollout.auto_engine or args.rollout.rollout_gpus  # that it imports; only engine ranks need vLLM
    if not args.run.replay and (vllm_kwargs or not known):
        check_engine_import(engine, vllm_kwargs)
    for path in (model.model, args.critic_model, reward.reward_model):
        local_copy(path or "", weights=False)  # here, as one rank alone estimates the memory of a step
    for flag, path in {"--model": model.model, "--critic-model": args.critic_model}.items():
        if path:
            models.check_sequence_parallel(path, args.shard.sequence_parallel_size, flag=flag, **trust)
            models.check_tensor_parallel(path, args.shard.tensor_parallel_size, flag=flag, **trust)
    if model.routing_replay != "none":
        models.check_routing_replay(model.model, **trust)
    accept_sandbox(reward.sandbox_level)
    tokenizer = models.load_tokenizer(model.model, **trust)
    set_chat_template(tokenizer, data.chat_template)
    vision = load_vision(model, data)
    check_read(args, vision=vision is not None)
    episodes = args.multi_turn.enabled or bool(args.rollout.agent)
    if not args.run.replay:
        check_capabilities(engine, vision is not None, episodes, model.routing_replay == "R3")
    template, multi_turn = parse_json("chat_template_kwargs", data.chat_template_kwargs), None
    if args.rollout.agent and vision is not None:
        raise InputError(f"--agent takes text only, and --model {model.model} reads images: take a text model")
    if not data.dataset_class:  # your own class may read others
        check_template_kwargs(tokenizer, template)
    if not tokenizer.chat_template and (episodes or vision is not None):
        what = "turns" if episodes else "images"
        raise InputError(f"--model {model.model}: {what} need a chat template; give one with --chat-template FILE")
    if episodes:
        from lib.agent import load_agent, load_multi_turn  # 0.1 s, which other runs do not need

        agent = load_agent(args.rollout, args.multi_turn.parser) if args.rollout.agent else None
        multi_turn = load_multi_turn(args.multi_turn, tokenizer, template, data.max_prompt_length, vision, agent)
        template = template | {"tools": multi_turn.schemas or None}
    load = partial(
        load_dataset_class(data.dataset_class) if data.dataset_class else RLHFDataset,
        tokenizer=tokenizer,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        chat_template_kwargs=template,
        allow_special_tokens=data.allow_special_tokens,
    )
    form = {"columns": columns_of(data.columns), "prompt_template": with_line_breaks(data.prompt_template)}
    form["system_prompt"] = data.system_prompt
    load = partial(load, **{name: value for name, value in form.items() if name in args.given})
    if vision is not None:  # your own class need not know of what a run does not use
        load = partial(load, vision=vision)
    limits = (data.max_train_samples, validation.max_val_samples)
    load_train, load_val = (partial(load, max_samples=n) if n else load for n in limits)
    train_data = None if validation.val_only else load_train(list(data.train_files))
    val_data = [load_val(list(val_set.files)) for val_set in validation.sets()] if validation.enabled else []
    trained, validated = [train_data] if train_data is not None else [], val_data
    if args.run.keep_best or args.run.stop_when:  # a data set of your own need not know its data sources
        sets = zip(validation.sets(), val_data)
        check_names(args.run, {source: n.samples for n, rows in sets for source in getattr(rows, "data_sources", ())})
    seen = next(filter(None, (getattr(rows, "with_images", None) for rows in [*trained, *validated])), None)
    if reward.reward_model and seen:
        raise InputError(f"{seen} has images: --reward-model reads text only")
    kwargs = parse_json("reward_kwargs", reward.reward_kwargs)
    scored = trained if validation.val_reward else [*trained, *validated]
    scorers = load_scorers(reward.reward, scored, kwargs, reward.reward_weights)
    val_scorers = load_scorers(validation.val_reward, validated, kwargs)
    shadow_scorers = load_scorers(reward.shadow_reward, [*trained, *validated], kwargs)
    check_keywords([*scorers, *val_scorers, *shadow_scorers], kwargs)
    if args.run.total_epochs is not None and train_data is not None:
        if data.train_weights:
            raise InputError(
                "--total-epochs with --train-weights: each source has epochs of its own: use --total-steps"
            )
        args.run.total_steps = math.ceil(args.run.total_epochs * len(train_data) / args.prompts_per_step)
        args.run.check_profile_steps()
    exact = vision is None and not data.dataset_class and data.filter_overlong_prompts
    if exact and tokenizer.chat_template:
        check_template(tokenizer, template, trained + validated)
    return Inputs(tokenizer, vision, multi_turn, train_data, val_data, scorers, val_scorers, shadow_scorers)


def check_template(tokenizer: PreTrainedTokenizerBase, kwargs: dict, data: list[PromptDataset]) -> None:
    """Raises InputError if the first prompt's tokens are not the chat template's: two BOS tokens, no generation prompt.
    Says so if no special token ends the assistant's turn in it."""
    kwargs, tools = {"add_generation_prompt": True} | kwargs, kwargs.get("tools") or []
    for row in (rows[0] for rows in data):
        kwargs |= {"tools": shown_tools(tools, row["extra_info"]) or None}
        wanted = tokenizer.apply_chat_template(row["raw_prompt"], **kwargs, return_dict=True)["input_ids"]
        if row["raw_prompt_ids"] != wanted:
            got = tokenizer.decode(row["raw_prompt_ids"])
            raise InputError(f"the prompt {got!r} is not what its chat template gives: {tokenizer.decode(wanted)!r}")
    if end_of_turn(tokenizer) is None and is_first_on_node():
        name = tokenizer.name_or_path
        print(f"note: {name}: no special token ends a turn in its chat template: is it this model's?", flush=True)


def load_vision(model: ModelArgs, data: DataArgs) -> Vision | None:
    """How the images of prompts become inputs of --model; None for a text model. Raises InputError."""
    trust = model.trust_remote_code
    if (processor := models.load_processor(model.model, trust_remote_code=trust)) is None:
        return None
    set_chat_template(processor, data.chat_template)  # it is saved with the model
    return Vision(
        processor,
        AutoConfig.from_pretrained(local_copy(model.model, weights=False), trust_remote_code=trust),
        max_pixels=data.max_pixels,
        min_pixels=data.min_pixels,
        max_images=data.max_images,
        video_fps=data.video_fps,
        max_frames=data.max_frames,
    )


# ---- models --------------------------------------------------------------------------------------

USUAL_LR = {"full fine-tuning": (1e-7, 3e-5), "LoRA": (2e-6, 1e-3)}  # of AdamW in RL (docs/defaults.md)
SMALLEST = 10**8  # parameters of a model for which these are usual

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass
class ModelFactory:
    """How the models of a run are loaded, split over ranks and run. `make_model_factory` is a collective."""

    model: ModelArgs
    shard: ShardArgs
    optimizer: OptimizerArgs
    world: World
    mesh: DeviceMesh
    forward: ForwardConfig
    updates_per_step: int
    seed: int
    loss: LossFlags

    def place(self, module: PreTrainedModel, name: str) -> PreTrainedModel:
        if self.model.compile:
            models.compile_layers(module)
        if self.model.use_liger_kernel:
            models.use_liger_kernel(module, self.world.device)
        self.forward.modules.append(module)
        return shard_model(module, self.mesh, self.forward.compute_dtype, cpu_offload=name in self.shard.cpu_offload)

    def trains(self, module: PreTrainedModel) -> PreTrainedModel:
        """The model with only these weights trainable: LoRA adapters, all, or all but those of --freeze."""
        if self.model.lora_rank:
            settings: dict[str, Any] = {"rank": self.model.lora_rank, "alpha": self.model.lora_alpha}
            return models.add_lora(module, **settings, target_modules=self.model.lora_target_modules, seed=self.seed)
        return models.freeze(module, self.model.freeze) if self.model.freeze else module

    def trained(
        self, module: PreTrainedModel, name: str, make_optimizer: MakeOptimizer, total_steps: int
    ) -> dict[str, Any]:
        """The fields of a TrainedModel but for its name."""
        module = self.place(self.trains(module), name)
        optimizer = make_optimizer(trainable_parameters(module))
        parameters = sum(p.numel() for p in module.parameters())  # of all ranks
        note = lr_note(name, optimizer, "LoRA" if self.model.lora_rank else "full fine-tuning", parameters)
        if note and self.world.rank == 0:
            print(note, flush=True)
        factor = partial(lr_factor, self.optimizer, self.updates_per_step, total_steps)
        return {
            "module": module,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
            "world": self.world,
            "forward": self.forward,
            "max_grad_norm": self.optimizer.max_grad_norm,
            "reduce_each_micro_batch": self.shard.reduce_each_micro_batch,
        }

    def options(self, path: str, trainable: bool = True) -> dict[str, Any]:
        dtype, attention = self.forward.compute_dtype, self.model.attn_implementation
        trust = {"trust_remote_code": self.model.trust_remote_code}
        return {
            "dtype": torch.float32 if trainable and not self.model.lora_rank else dtype,  # fp32 master weights
            "attn_implementation": get_attention(attention, dtype, self.world.device, path, **trust),
            "padding_free": self.model.padding_free,
            "share_prompts": self.model.share_prompts,
            "gradient_checkpointing": self.model.gradient_checkpointing and trainable,
            "offload_activations": "activations" in self.shard.cpu_offload,
            "on_meta": True,
            **trust,
        }


def make_model_factory(args: ScriptArgs, world: World, sizes: Sizes) -> ModelFactory:
    model, shard, rollout, seed = args.model, args.shard, args.rollout, args.run.seed
    torch.manual_seed(seed + world.rank)
    set_seed(seed + world.rank)
    use_cores(shard, world.device)
    mesh = make_mesh(world, shard.dp_replicate_size, shard.tensor_parallel_size)
    row_group = make_row_group(world, mesh, shard.sequence_parallel_size)
    dtype = get_compute_dtype(model.compute_dtype, world.device)
    sampling = rollout.sampling()
    if not args.validation.val_only:
        models.check_sampling(sampling)
    forward = ForwardConfig(args.optimizer.micro_batch_tokens, sampling, row_group, dtype, model.routing_replay)
    plain = args.loss == "vanilla" and not (
        args.kl_coef and (args.kl_estimator or "").endswith("_unbiased")
    )  # no ratio x KL
    clip = (args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c) if plain else None
    apart = math.inf if args.run.replay else APART.get(dtype, math.inf)  # a replay may train other weights
    loss = LossFlags(args.loss_agg_mode, args.loss_scale_factor or rollout.max_response_length, clip, apart)
    return ModelFactory(model, shard, args.optimizer, world, mesh, forward, sizes.updates_per_step, seed, loss)


def use_cores(shard: ShardArgs, device: torch.device) -> None:
    """With --cpu-offload, AdamW runs on this rank's share of the cores; torchrun and vLLM leave it one thread."""
    if device.type != "cpu" and {"actor", "critic"} & set(shard.cpu_offload):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))


def load_policy(factory: ModelFactory, name: str, path: str, make_optimizer: MakeOptimizer, total_steps: int) -> Policy:
    """A model that samples and trains. name: the prefix of its metrics. total_steps: of the learning rate schedule."""
    module = models.load_model(path, **factory.options(path))
    trained = factory.trained(module, name, make_optimizer, total_steps)
    return Policy(name, **trained, checks=UpdateChecks(factory.loss))


def load_value_model(factory: ModelFactory, name: str, path: str, optimizer: MakeOptimizer, total_steps: int) -> Critic:
    """PPO's critic: the model at `path` with its value head, or a new one. The rest as in `load_policy`."""
    module = models.load_critic(path, **factory.options(path))
    return Critic(name, **factory.trained(module, name, optimizer, total_steps))


def load_reference(factory: ModelFactory, actor: Policy) -> Reference:
    """The start model, as the reference of the KL."""
    if factory.model.lora_rank:
        return Reference(actor.module, factory.forward)
    return load_frozen(factory, factory.model.model, "--model")


def load_frozen(factory: ModelFactory, path: str, flag: str) -> Reference:
    """A model that only computes log-probs, such as a reference or a teacher; --cpu-offload ref offloads all of these.
    flag: the flag that gave the path, for messages. Raises InputError."""
    trust = {"trust_remote_code": factory.model.trust_remote_code}
    models.check_sequence_parallel(path, factory.shard.sequence_parallel_size, flag=flag, **trust)
    models.check_tensor_parallel(path, factory.shard.tensor_parallel_size, flag=flag, **trust)
    module = models.load_model(path, flag=flag, **factory.options(path, trainable=False)).requires_grad_(False)
    return Reference(factory.place(module, "ref"), factory.forward)


def lr_note(name: str, optimizer: torch.optim.Optimizer, kind: str, parameters: int) -> str:
    """What to say of a learning rate that is unusual for this kind of training and a model of this size, or ""."""
    lr, (low, high) = optimizer.param_groups[0]["lr"], USUAL_LR[kind]
    if not isinstance(optimizer, torch.optim.AdamW) or parameters < SMALLEST or lr == 0 or low <= lr <= high:
        return ""
    usual = f"usual in {kind} of {parameters / 1e9:.2g} B parameters are {low:g} to {high:g} (docs/defaults.md)"
    return f"note: {name}: learning rate {lr:g}: {usual}"


def lr_factor(args: OptimizerArgs, updates_per_step: int, total_steps: int, update: int) -> float:
    """The factor of the learning rate at this optimizer update, counted from 0."""
    warmup, total = (steps * updates_per_step for steps in (args.warmup_steps, total_steps))
    if update < warmup:
        return (update + 1) / warmup
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[args.lr_schedule]


# ---- rollouts, rewards, validation ---------------------------------------------------------------


def make_rollouts(args: ScriptArgs, actor: Policy, inputs: Inputs, sizes: Sizes, run: Run) -> Rollouts:
    """Makes the engine, and the run's rollouts from its next step on. The validation of a replay has hf."""
    rollout, data, world, dtype = args.rollout, args.data, actor.world, actor.forward.compute_dtype
    own, limits = None, [val_set.max_response_length or 0 for val_set in args.validation.sets()]
    longest = max(rollout.max_response_length, *limits) if args.validation.enabled else rollout.max_response_length
    row = data.max_prompt_length + longest
    if rollout.rollout_gpus and not run.recorder.replays:
        from lib.rollout.managed_servers import ManagedServers

        servers = rollout.rollout_gpus // rollout.rollout_tensor_parallel_size
        own = ManagedServers(servers, start_s=0.9 * args.run.stage_timeout)  # before this rank's own limit
    vllm_kwargs = parse_json("vllm_kwargs", rollout.vllm_kwargs)
    if args.model.routing_replay == "R3" and rollout.starts_vllm:
        vllm_kwargs["enable_return_routed_experts"] = True
    engine = make_engine(
        "hf" if run.recorder.replays else rollout.engine,
        actor.module,
        inputs.tokenizer,
        processor=inputs.vision and inputs.vision.processor,
        max_images=data.max_images,
        folder=run.folder / "engine",
        max_length=min(args.multi_turn.context_window or row, row),
        dtype=dtype,
        gpu_memory=rollout.gpu_share,
        ranks=rollout.rollout_tensor_parallel_size,
        rows=engine_rows(args, world.size),
        vllm_kwargs=vllm_kwargs,
        returns_routes=args.model.routing_replay == "R3",
        lora_sync=rollout.lora_sync,
        own=own,
    )
    use_cores(args.shard, world.device)
    sampler = engine
    if inputs.multi_turn is not None:
        from lib.agent import make_episodes

        sampler = make_episodes(engine, inputs.multi_turn)
    loader = None
    if inputs.train_data is not None:
        loader = make_loader(
            inputs.train_data,
            args.prompts_per_step,
            rank=world.rank,
            world_size=world.size,
            seed=args.run.seed,
            shuffle=data.shuffle,
            num_workers=data.loader_workers,
            sampling=data.prompt_sampling,
            skip_after=data.prompt_skip_after,
            share=data.prompt_share,
            weights=data.train_weights,
        )
    return Rollouts(
        engine,
        sampler,
        loader,
        actor.forward.sampling,
        world=world,
        sizes=sizes,
        seed=args.run.seed,
        steps=range(run.step + 1, args.run.total_steps + 1),
        async_level=rollout.async_level,
        async_order=rollout.async_order,
        # nats; bf16 engines differ by 0.03. For a quantized one the limit is that of the mismatch
        sync_tolerance=math.inf if rollout.quantization else 1e-3 if dtype == torch.float32 else 0.25,
        max_mismatch=rollout.mismatch_limit,
        recorder=run.recorder,
    )


def make_rewards_and_validation(
    args: ScriptArgs, factory: ModelFactory, inputs: Inputs, rollouts: Rollouts, run: Run
) -> tuple[Rewards, Validation]:
    """The rewards of training, and the validation, which uses the same scorers unless --val-reward names others."""
    reward, reward_model = args.reward, None
    if reward.reward_model:
        reward_model = RewardModel(None, None, reward.reward_model_coef, args.optimizer.micro_batch_tokens)
    if reward_model is not None and (args.validation.enabled or not run.recorder.replays):
        dtype, trust = factory.forward.compute_dtype, {"trust_remote_code": factory.model.trust_remote_code}
        module, tokenizer = models.load_reward_model(reward.reward_model, dtype=dtype, on_meta=True, **trust)
        mesh = make_mesh(factory.world, factory.shard.dp_replicate_size)  # each rank runs its own rows
        offload = "reward_model" in factory.shard.cpu_offload
        reward_model.module, reward_model.tokenizer = shard_model(module, mesh, dtype, cpu_offload=offload), tokenizer

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
