"""The flags that all scripts share, in groups, and the batch sizes of a step. No torch here: --help stays fast.

A script's Args nests these groups. Each group checks itself, and a function of lib takes the group that it needs.
"""

import importlib.util
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval
from tyro.conf import OmitArgPrefixes, configure

from lib import InputError, is_first_on_node, launched_ranks, node_begins
from lib.cli.flags import Group, Names, OnReplay, OnResume, ReadIf, as_flag, non_default, parse_json
from lib.cli.user_code import load_object
from lib.sampling import Sampling

MAY_CHANGE, NOT_COMPARED = OnResume.MAY_CHANGE, OnResume.NOT_COMPARED
FILES, ROWS = Names.FILES, Names.ROWS
AS_RECORDED = OnReplay.AS_RECORDED
ROOT = Path(__file__).parent.parent
TOY = ROOT / "data/toy"
TOY_TRAIN, TOY_VAL = (str(TOY / "train.jsonl"),), (str(TOY / "val.jsonl"),)
NO_FILES = ("none",)
HUB_ANSWER_S = 5.0
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<split>\w+))?")
LONGEST_RUN_NAME = 128  # bytes: wandb takes 128 characters, a file system 255 bytes
RENAMED = {
    "--engine-ranks": "--rollout-tensor-parallel-size",
    "--gpu-memory": "--gpu-memory-utilization",
    "--replicas": "--dp-replicate-size",
    "--sequence-parallel": "--sequence-parallel-size",
    "--tensor-parallel": "--tensor-parallel-size",
    "--lam": "--gae-lambda",
    "--lam-policy": "--gae-lambda-policy",
}
"""old flag: new flag"""
AdvEstimator = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "maxrl",
    "grpo_passk",
    "grpo_leave_one_out",
    "grpo_batch_std",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]
"""names in lib/core_algos/advantages.py, except those of ppo.py (gae) and remax.py (remax)"""
PolicyLoss = Literal[
    "vanilla",
    "gspo",
    "cispo",
    "geo_mean",
    "sapo",
    "gpg",
    "reinforce",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "two_sided",
    "decoupled",
    "clip_cov",
    "kl_cov",
]
"""names in lib/core_algos/policy_losses.py"""
AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
PromptSampling = Literal["uniform", "skip", "variance"]
PASS_READ_BY = {"optimal_token_baseline", "tir_optimal_token_baseline", "top_entropy"}  # entropies, or sums of pi^2
PASS_READ_BY |= {"decoupled", "m2po", "off_policy_sequence"}  # pi_old / pi_rollout, which would be 1
"""estimators, losses and token masks that need the trainer's own pass over the responses before the update"""
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k1_unbiased", "k2_unbiased", "k3_unbiased"]


@configure(OmitArgPrefixes)
@dataclass
class ModelArgs(Group):
    """The policy's model, and which of its weights train."""

    model: Annotated[str, FILES, ROWS] = str(ROOT / "data/toy/model")
    """Hugging Face id, folder or .gguf file of the policy to start from"""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of forward and backward; weights and optimizer are fp32. auto: bfloat16 on a GPU, float32 on a CPU.
    float16, with a loss scale, is closer to the engine's log-probs (rollout/k3), for models whose values fit it"""
    attn_implementation: Annotated[str, MAY_CHANGE] = "auto"
    """packed_sdpa (lib/model/attention.py) runs everywhere; varlen, one FlashAttention call a layer, needs a GPU and
    bfloat16; flash_attention_2 needs its package; with any other, rows are padded. auto: packed_sdpa (docs/gpu.md)"""
    compile: Annotated[bool, MAY_CHANGE] = False
    """torch.compile the layers, for packed rows: the first steps take a minute longer"""
    padding_free: Annotated[bool, MAY_CHANGE] = True
    """pack the rows of a micro-batch end to end, without padding, where the model allows it (docs/models.md)"""
    share_prompts: Annotated[bool, MAY_CHANGE] = True
    """compute each prompt once for all its responses, where rows are packed and attention is packed_sdpa or varlen"""
    gradient_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """recompute activations in the backward pass: less memory, about a third more time in the update"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    lora_rank: Annotated[int, Ge(0)] = 0
    """train LoRA adapters of this rank (the reference is then the model without them); 0: train all weights. vLLM
    samples from W + dW; in bfloat16 this rounds small updates away, so --rollout-correction then has a default"""
    lora_alpha: Annotated[float, Gt(0)] = 32.0
    """the adapters' update is multiplied by lora_alpha / lora_rank"""
    lora_target_modules: str = "all-linear"
    """linear layers that get adapters: all-linear (of the language part), or a regular expression of names such as
    .*[qkvo]_proj"""
    freeze: str = ""
    """what is not trained: vision, tower or projector (of a model that sees; vision is both), or a regular expression
    of parameter names, such as "model.embed_tokens.*"; empty: all is"""

    def check(self) -> None:
        for name in ("freeze", "lora_target_modules"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise InputError(f"{as_flag(name)} {getattr(self, name)}: not a regular expression: {error}") from error


@configure(OmitArgPrefixes)
@dataclass
class ShardArgs(Group):
    """How models are split over ranks (docs/scaling.md)."""

    dp_replicate_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """copies of the model (HSDP), each split over its share of the ranks; 1: one copy, split over all ranks"""
    sequence_parallel_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """this many neighbouring ranks compute their rows together, each a share of the tokens (Ulysses), for rows that are
    too long for one rank; must divide the number of attention heads; needs --padding-free and packed_sdpa"""
    tensor_parallel_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """this many neighbouring ranks compute their rows together, each with a share of every layer's weights, split by
    transformers' plan for the model; must divide the number of key and value heads; needs a vLLM engine or server"""
    reduce_each_micro_batch: Annotated[bool, MAY_CHANGE] = False
    """reduce gradients over ranks after each micro-batch, not once an update: gradients then take 4 bytes x parameters
    / ranks of memory on each rank instead of 4 bytes x parameters, for more communication"""
    cpu_offload: Annotated[
        tuple[Literal["actor", "critic", "ref", "reward_model", "activations"], ...], MAY_CHANGE
    ] = ()
    """models whose weights, gradients and optimizer state stay in CPU memory; activations: the update's saved
    activations, best with --gradient-checkpointing, which saves only one tensor a layer; slower"""


@configure(OmitArgPrefixes)
@dataclass
class DataArgs(Group):
    """Data files in verl's format, and how their rows become prompts."""

    train_files: Annotated[tuple[str, ...], FILES, ROWS] = TOY_TRAIN
    """parquet or json(l) files, or a data set on the hub"""
    dataset_class: Annotated[str, FILES, ROWS] = ""
    """path/to/file.py:ClassName of your own dataset class; empty: lib/data's RLHFDataset"""
    max_prompt_length: Annotated[int, Ge(1), ROWS] = 32
    """most tokens of a prompt, chat template included"""
    truncation: Annotated[Literal["error", "left", "right", "middle"], ROWS] = "error"
    """which part of a longer prompt is cut, if it was not filtered out; error: the run stops"""
    filter_overlong_prompts: Annotated[bool, ROWS] = True
    """drop longer training and validation prompts; their number is printed"""
    chat_template_kwargs: Annotated[str, ROWS] = "{}"
    """JSON of keyword arguments for the chat template, such as {"enable_thinking": false}"""
    max_pixels: Annotated[int, Ge(1), ROWS] = 1003520
    """a larger image, and each frame of a video, is made smaller, to about this many pixels (1280 x 28 x 28)"""
    min_pixels: Annotated[int, Ge(1), ROWS] = 3136
    """a smaller one is made larger, to about this many; the model's processor then resizes by its own rules"""
    max_images: Annotated[int, Ge(1), ROWS] = 8
    """most images of a prompt, and most videos; rows with more are dropped, and their number is printed"""
    video_fps: Annotated[float, Gt(0), ROWS] = 2.0
    """frames that are taken of each second of a video file"""
    max_frames: Annotated[int, Ge(1), ROWS] = 32
    """most frames of a video; of a longer one they are taken evenly"""
    allow_special_tokens: bool = False
    """text in a message that spells a special token, such as <|im_end|>, becomes that token; otherwise a space breaks
    it up, so that it stays text"""
    shuffle: Annotated[bool, ROWS] = True
    """shuffle the training prompts anew in each epoch"""
    loader_workers: Annotated[int, Ge(0), MAY_CHANGE] = 0
    """processes that tokenize prompts ahead of time; 0: the training process does it"""
    prompt_sampling: Annotated[PromptSampling, ROWS] = "uniform"
    """which prompts come: uniform: each once an epoch; skip: those whose groups scored alike --prompt-skip-after times
    in a row (all right or all wrong) are left out; variance: prompts are drawn in proportion to the variance of their
    last group's scores"""
    prompt_skip_after: Annotated[int, Ge(1), ROWS] = 3
    """groups in a row of equal scores, after which --prompt-sampling skip leaves a prompt out"""
    prompt_share: Annotated[float, Interval(gt=0, le=1), ROWS] = 0.1
    """share of left out prompts that come nevertheless, as they may have become useful; with variance, of the draws
    that are uniform"""

    def check(self) -> None:
        parse_json("chat_template_kwargs", self.chat_template_kwargs)
        if self.min_pixels > self.max_pixels:
            raise InputError(f"--min-pixels {self.min_pixels}: more than --max-pixels {self.max_pixels}")
        if self.prompt_sampling != "uniform" and self.loader_workers:
            raise InputError(
                f"--prompt-sampling {self.prompt_sampling} chooses prompts by the scores of the step before, and "
                "--loader-workers take them ahead of that: drop one"
            )


@configure(OmitArgPrefixes)
@dataclass
class RolloutArgs(Group):
    """How responses are sampled."""

    rollout_engine: Annotated[str, FILES] = "hf"
    """hf samples with the trainer's own model; vllm runs a vLLM engine in each process; http://host:port is a vLLM
    server that already runs (several: separate them by commas); path/to/file.py:Class is your own engine"""
    rollout_gpus: Annotated[int, Ge(0), MAY_CHANGE] = 0
    """this many of the launcher's processes, the last, do not train: each runs a vLLM server on its GPU (on a CPU: as a
    process) for the others; --rollout-engine is then vllm"""
    rollout_tensor_parallel_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """this many neighbouring ranks share one vLLM engine, or with --rollout-gpus one server, which is split over them:
    for models that one GPU cannot hold"""
    gpu_memory_utilization: Annotated[float | None, Interval(gt=0, lt=1), MAY_CHANGE] = None
    """share of a GPU's memory that vLLM may take (on a CPU it takes 1 GiB for its KV cache); empty: 0.4, and 0.9 of a
    GPU of its own (--rollout-gpus)"""
    vllm_kwargs: Annotated[str, MAY_CHANGE] = "{}"
    """JSON object of further settings of the vLLM engine, by the names of its EngineArgs, such as {"kv_cache_dtype":
    "fp8"}, {"max_num_seqs": 512} or a "speculative_config"; a server gets its own on its command line"""
    async_level: Annotated[int, Ge(0)] = 0
    """steps by which rollouts may be off-policy, on servers (--rollout-gpus or http://...); their weights are then
    up to this many steps old. Above 0, --rollout-correction has a default"""
    async_order: Literal["prompts", "finished"] = "prompts"
    """with --async-level: a step trains on the groups that began first, or (from level 2 on) on those that are finished
    first, which waits less and prefers short responses"""
    max_response_length: Annotated[int, Ge(1), AS_RECORDED] = 16
    """most tokens of a response; with --multi-turn, of a whole episode"""
    temperature: Annotated[float, Gt(0), AS_RECORDED] = 1.0
    """sampling temperature; the loss uses log-probs at this temperature, top_p, top_k and min_p"""
    top_p: Annotated[float, Interval(gt=0, le=1), AS_RECORDED] = 1.0
    """nucleus sampling: from the fewest likeliest tokens whose probabilities add up to this; 1: from all tokens"""
    top_k: Annotated[int, Ge(-1), AS_RECORDED] = -1
    """sample from the k likeliest tokens; -1: from all"""
    min_p: Annotated[float, Interval(ge=0, le=1), AS_RECORDED] = 0.0
    """sample from the tokens that are at least this many times as likely as the likeliest; 0: from all"""
    repetition_penalty: Annotated[float, Gt(0), AS_RECORDED] = 1.0
    """divides the logits of tokens that came before; 1: off. Only with --val-only: the loss cannot account for it"""
    stop: Annotated[tuple[str, ...], AS_RECORDED] = ()
    """strings that end a response; the tokens that complete one are trained like the others"""

    def check(self) -> None:
        if self.rollout_gpus and self.rollout_engine not in ("hf", "vllm"):
            raise InputError(
                f"--rollout-gpus {self.rollout_gpus} runs vLLM servers of this job's own, --rollout-engine "
                f"{self.rollout_engine} names others: drop one"
            )
        if self.rollout_gpus:
            self.rollout_engine = "vllm"
        check_engine(self.rollout_engine, self.rollout_tensor_parallel_size)
        if "" in self.stop:
            raise InputError("--stop '': an empty string would end every response; give a text, or drop --stop")
        if self.stop and self.async_level:
            raise InputError(
                f"--stop with --async-level {self.async_level}: a server misses a stop string that a weight sync cuts "
                "in two: drop one"
            )
        if parse_json("vllm_kwargs", self.vllm_kwargs) and not self.starts_vllm:
            raise InputError(f"--vllm-kwargs {self.vllm_kwargs}: needs --rollout-engine vllm")
        if self.async_level and not self.on_servers:
            raise InputError(
                f"--async-level {self.async_level} needs --rollout-gpus or --rollout-engine http://host:port, not a "
                "shared device"
            )
        if self.async_order == "finished" and self.async_level < 2:
            raise InputError("--async-order finished: needs --async-level 2 or more, of which slow groups get one")

    @property
    def on_servers(self) -> bool:
        """Whether responses are sampled outside of the processes that train."""
        return self.rollout_gpus > 0 or "://" in self.rollout_engine

    @property
    def starts_vllm(self) -> bool:
        """Whether this job starts vLLM, in the processes that train or with --rollout-gpus."""
        return self.rollout_engine == "vllm"

    def sampling(self) -> Sampling:
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)})

    @property
    def gpu_share(self) -> float:
        """gpu_memory_utilization, or its default."""
        return self.gpu_memory_utilization or (0.9 if self.rollout_gpus else 0.4)


@configure(OmitArgPrefixes)
@dataclass
class RewardArgs(Group):
    """Who scores responses, and under what limits."""

    reward: Annotated[tuple[str, ...], FILES, AS_RECORDED] = ("data_source",)
    """scorers, whose scores are added up: data_source (the one in rewards/ for each row's data_source) or
    path/to/file.py:function (your own)"""
    reward_weights: Annotated[tuple[float, ...], Interval(ge=-1e4, le=1e4)] = ()
    """a weight for each scorer of --reward; empty: 1 each"""
    reward_kwargs: Annotated[str, AS_RECORDED] = "{}"
    """JSON of keyword arguments for every scorer"""
    reward_workers: Annotated[int, Ge(0), MAY_CHANGE] = 2
    """scoring processes of each rank; 0: score in the training process, where breakpoint() works"""
    reward_timeout: Annotated[float, Gt(0), MAY_CHANGE] = 30.0
    """seconds that a scorer has for a response"""
    reward_memory: Annotated[int, Ge(1), MAY_CHANGE] = 2048
    """MiB that a scorer may use beyond what its imports use"""
    sandbox_level: Annotated[Literal["namespaces", "landlock", "rlimits", "none"], MAY_CHANGE] = "namespaces"
    """the weakest sandbox that is accepted for what a model wrote; docs/rewards.md says what each lets through"""
    reward_failure_score: Annotated[float | None, Interval(ge=-1e12, le=1e12)] = None
    """score of a response whose scorer hangs, crashes or raises; empty: it is in no group and is not trained on"""
    reward_model: Annotated[str, FILES, AS_RECORDED] = ""
    """Hugging Face id or folder of a sequence classifier with one output, which is added to the scorers' score"""
    reward_model_coef: Annotated[float, Interval(ge=-1e4, le=1e4)] = 1.0
    """weight of the reward model's score"""

    def check(self) -> None:
        parse_json("reward_kwargs", self.reward_kwargs)
        check_scorers("reward", self.reward)
        if len(self.reward_weights) not in (0, len(self.reward)):
            raise InputError(
                f"--reward-weights has {len(self.reward_weights)} numbers for the {len(self.reward)} scorers of "
                "--reward"
            )


@configure(OmitArgPrefixes)
@dataclass
class OptimizerArgs(Group):
    """Micro-batches and AdamW."""

    micro_batch_tokens: Annotated[int, Ge(1), MAY_CHANGE] = 16384
    """most tokens of one forward and backward pass on one rank"""
    lr: Annotated[float, Ge(0)] = 1e-4
    """learning rate (for a model of billions of parameters: 1e-6)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """course of the learning rate after the warm-up"""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """steps in which the learning rate rises from 0"""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """AdamW's weight decay"""
    adam_betas: Annotated[tuple[float, float], Interval(ge=0, lt=1)] = (0.9, 0.999)
    """AdamW's betas"""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """the gradient's norm is clipped to this"""


@configure(OmitArgPrefixes)
@dataclass
class ValidationArgs(Group):
    """Validation during training."""

    val_files: Annotated[tuple[str, ...], MAY_CHANGE] = ()
    """parquet or json(l) files, or a data set on the hub; none: no validation; empty: those of the toy, if it is
    trained on or --val-only validates it"""
    val_before_train: Annotated[bool, MAY_CHANGE] = True
    """validate before the first step"""
    val_every: Annotated[int, Ge(0), MAY_CHANGE] = 5
    """validate every n steps and after the last; 0: never"""
    val_only: Annotated[bool, NOT_COMPARED] = False
    """validate (with --resume: that checkpoint) and stop; reads no training data; writes to <run>/val_only/1, 2, ..."""
    val_reward: Annotated[tuple[str, ...], MAY_CHANGE, FILES] = ()
    """scorers of validation, as --reward; empty: those of training"""
    val_samples: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """responses per validation prompt: n in mean@n, pass@k, maj@k"""
    val_temperature: Annotated[float, Ge(0), MAY_CHANGE] = 0.0
    """sampling temperature in validation; 0: greedy"""
    val_top_p: Annotated[float, Interval(gt=0, le=1), MAY_CHANGE] = 1.0
    """nucleus sampling in validation"""
    show_samples: Annotated[int, Ge(0), MAY_CHANGE] = 3
    """responses of the last validation that the end of a run shows (samples.jsonl holds all)"""

    def check(self) -> None:
        check_scorers("val_reward", self.val_reward)
        if self.val_only and not self.enabled:
            raise InputError("--val-only needs --val-files: name the files to validate on")
        if self.val_samples > 1 and self.val_temperature == 0:
            raise InputError(f"--val-samples {self.val_samples} are all the same at --val-temperature 0: raise it")

    @property
    def enabled(self) -> bool:
        return self.val_files != NO_FILES and (self.val_only or self.val_before_train or self.val_every > 0)


@configure(OmitArgPrefixes)
@dataclass
class RunArgs(Group):
    """The run: its folder, length, checkpoints and logs."""

    run_name: Annotated[str, NOT_COMPARED] = ""
    """name of the run, which writes to output_dir/run_name; empty: <script>-s<seed>-<date and time>-<random>"""
    output_dir: Annotated[str, NOT_COMPARED] = "runs"
    """folder of all runs"""
    config: Annotated[str, NOT_COMPARED] = ""
    """a run's config.json or a YAML file, from which flags are read; those of the command line override them"""
    seed: Annotated[int, Interval(ge=0, lt=2**32), ROWS] = 1
    """seed of sampling and data order; with the same seed a run repeats itself"""
    total_steps: Annotated[int, Ge(1), MAY_CHANGE] = 60
    """number of steps, each of prompts_per_step x group_size responses"""
    total_epochs: Annotated[int | None, Ge(1), MAY_CHANGE] = None
    """if given, sets total_steps to the steps that this many passes over the training prompts take, rounded up"""
    dry_run: Annotated[int, Ge(0), NOT_COMPARED] = 0
    """print the sizes of a step, its FLOPs and the memory that each of this many GPUs needs (those that train;
    --rollout-gpus of them do not), and stop before a model loads"""
    memory_check: Annotated[bool, NOT_COMPARED] = True
    """on a GPU, estimate the memory at the start, and refuse flags that do not fit"""
    resume: Annotated[str, NOT_COMPARED] = "never"
    """"never", "auto" (from the newest complete checkpoint of run_name, else from the start) or a checkpoint folder:
    one of run_name takes that run back to it, one of another run starts run_name from it"""
    resume_override: Annotated[tuple[str, ...], NOT_COMPARED] = ()
    """flags that change results (or `script`) and may differ from the checkpoint's; config.json records them"""
    record: Annotated[str, NOT_COMPARED] = ""
    """folder, seen by all nodes, that keeps what each step samples and its scores for --replay, and its whole batch for
    a debugger (docs/replay.md)"""
    replay: str = ""
    """folder of a --record: train on what was sampled and scored there, without engine and scorers, on as many ranks"""
    stage_timeout: Annotated[float, Ge(0), MAY_CHANGE] = 1800.0
    """seconds that a stage (start, rollout, update, save, ...) may take before the job ends and says why; after a 30th
    of that, a line says where the ranks are; 0: no limit. Loading models has no limit"""
    save_every: Annotated[int, Ge(0), MAY_CHANGE] = 50
    """save a checkpoint every n steps and after the last; 0: never"""
    keep_checkpoints: Annotated[int, Ge(0), MAY_CHANGE] = 2
    """keep the newest n checkpoints; 0: all"""
    save_rollouts: Annotated[int | Literal["all"], Ge(0), MAY_CHANGE] = 1
    """keep this many groups of each step's training samples, with all that is known of each token, in <run>/rollouts;
    0: none"""
    export_model: Annotated[bool, MAY_CHANGE] = True
    """after the last step save the policy in Hugging Face form to <run>/model"""
    export_dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], MAY_CHANGE] = "auto"
    """of that model's weights; auto: --compute-dtype's, in which rollouts were sampled"""
    track: Annotated[tuple[Literal["wandb", "tensorboard", "trackio"], ...], MAY_CHANGE] = ()
    """log to these too; metrics.jsonl is always written. trackio is a package that you install"""
    profile_steps: Annotated[tuple[int, ...], Ge(1), NOT_COMPARED] = ()
    """steps of which each rank writes a torch.profiler trace, to <run>/profile"""
    profile_memory: Annotated[bool, NOT_COMPARED] = False
    """traces show the memory in use; on a GPU each also has a snapshot with every allocation's stack"""

    def check(self) -> None:
        check_run_name(self.run_name)
        if not self.dry_run:
            check_output_dir(self.output_dir)
        if self.record and self.replay:
            raise InputError("--record with --replay: what a replay samples and scores is recorded already; drop one")
        if self.record and not self.dry_run:
            check_output_dir(self.record, "--record")
        if self.replay and not Path(self.replay, "config.json").is_file():
            raise InputError(f"--replay {self.replay}: no config.json there; give the folder of a run with --record")
        if self.resume == "auto" and not self.run_name:
            raise InputError("--resume auto needs the --run-name of the run to resume")
        if self.profile_memory and not self.profile_steps:
            raise InputError("--profile-memory needs --profile-steps, the steps to profile")
        if self.total_epochs is None:
            self.check_profile_steps()

    def check_profile_steps(self) -> None:
        """To be called when total_steps is known."""
        if late := [step for step in self.profile_steps if step > self.total_steps]:
            raise InputError(f"--profile-steps {late[0]}: the run has {self.total_steps} steps (--total-steps)")


# ---- settings: flags with a prefix, such as --multi-turn.tools calculator ---------------------------


@dataclass
class MultiTurnArgs:
    """Episodes of several turns; they need tools or an interaction (docs/multi_turn.md)."""

    tools: Annotated[tuple[str, ...], AS_RECORDED, FILES] = ()
    """tools of the episodes: calculator, python, zoom, search:FILE, mcp:COMMAND, path/to/file.py:function or class"""
    interaction: Annotated[str, FILES] = ""
    """what answers a turn without a tool call: reasoning_gym, openenv:http://host:port, gym:path/to/file.py:Class,
    verifiers:NAME or path/to/file.py:Class; empty: the episode ends"""
    parser: str = "auto"
    """how tool calls are parsed: auto (by the chat template), hermes, llama3_json, qwen3_coder, or one of vLLM's"""
    max_turns: Annotated[int, Gt(0)] = 8
    """most turns of the policy in an episode"""
    max_tool_calls: Annotated[int, Gt(0)] = 4
    """most tool calls of a turn, which run one after the other; further calls are answered with an error"""
    max_turn_tokens: Annotated[int | None, Gt(0)] = None
    """most tokens of a turn; None: what is left of the row"""
    max_tool_output: Annotated[int, Gt(0)] = 2000
    """most characters of an answer of a tool or of the interaction"""
    truncate: Literal["left", "middle", "right"] = "middle"
    """where a longer answer is cut"""
    tool_timeout: Annotated[float, Gt(0)] = 30.0
    """seconds that each call of a tool or an interaction may take"""
    episode_timeout: Annotated[float | None, Gt(0)] = None
    """seconds that an episode may take; a longer one is not trained on"""
    reward_coef: Annotated[float, Interval(ge=-1e4, le=1e4)] = 1.0
    """weight of the rewards that tools and the interaction give, beside the scorers'"""

    @property
    def enabled(self) -> bool:
        return bool(self.tools or self.interaction)

    def check(self) -> None:
        if self != MultiTurnArgs() and not self.enabled:
            raise InputError("--multi-turn without tools and without an interaction: name one, or drop its flags")


Bounds = tuple[float, float] | None


@dataclass
class RejectArgs:
    """A token (token_...) or row (seq_...) that fails a criterion is left out of the loss. k1: bounds on r. k2, k3:
    upper limits of (log r)^2 / 2 and r - 1 - log r. seq_sum: r of the row, and sums of k2, k3. seq_mean: the geometric
    mean of r, and means of k2, k3. seq_max: every token of the row must pass.
    """

    token_k1: Bounds = None
    token_k2: float | None = None
    token_k3: float | None = None
    seq_sum_k1: Bounds = None
    seq_sum_k2: float | None = None
    seq_sum_k3: float | None = None
    seq_mean_k1: Bounds = None
    """such as 0.99 1.01"""
    seq_mean_k2: float | None = None
    seq_mean_k3: float | None = None
    seq_max_k1: Bounds = None
    """such as 1e-4 100: a veto of outliers"""
    seq_max_k2: float | None = None
    seq_max_k3: float | None = None


@dataclass
class RolloutCorrectionArgs:
    """How r = pi_old / pi_rollout corrects the loss (lib/core_algos/rollout_correction.py). Without any of these flags
    there is no correction, except with --async-level above 0 or LoRA in bfloat16 with vLLM: level token, bounds 0 2."""

    level: Literal["token", "sequence", "geometric", "measure"] | None = None
    """whose r the weights are; measure: metrics only, no weights. If another of these flags is given: token"""
    action: Literal["truncate", "mask"] | None = None
    """an r outside the bounds becomes the bound (truncated importance sampling), or 0 (IcePop); truncate by default"""
    bounds: Bounds = None
    """bounds of the weights; 0 2 by default"""
    batch_normalize: bool | None = None
    """divide the weights by their mean"""
    reject: RejectArgs = field(default_factory=RejectArgs)

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of compute_rollout_correction; {} if none of these flags is given."""
        settings = non_default(self)
        return settings | {"level": None} if self.level == "measure" else settings


@dataclass
class TokenMaskArgs:
    """Which tokens stay in the loss (lib/core_algos/policy_losses.py). The last three flags are for --loss clip_cov and
    kl_cov."""

    top_entropy: Annotated[float | None, Interval(gt=0, le=1)] = None
    """keep only this fraction of the tokens, those of the highest entropy, such as 0.2 (2506.01939)"""
    m2po: Annotated[float | None, Gt(0)] = None
    """drop tokens of largest log(pi_old / pi_rollout)^2 until the mean of the rest is below this, such as 0.04
    (2510.01161)"""
    off_policy_sequence: Annotated[float | None, Ge(0)] = None
    """drop tokens with A < 0 in rows whose mean of log(pi_rollout / pi_old) is above this (2512.02556)"""
    clip_cov_ratio: Annotated[float | None, Interval(gt=0, le=1)] = None
    """share of the tokens that clip_cov leaves out; 2e-4 by default (2505.22617)"""
    clip_cov_bounds: Bounds = None
    """clip_cov draws among tokens whose covariance is between these; 1 5 by default"""
    kl_cov_ratio: Annotated[float | None, Interval(gt=0, le=1)] = None
    """share of the tokens that kl_cov penalises; 2e-4 by default"""

    def settings(self, loss: str) -> dict[str, dict]:
        """{mask: its keyword arguments}, as compute_token_masks takes them, for this policy loss."""
        of_names = {"top_entropy": "fraction", "m2po": "threshold", "off_policy_sequence": "delta"}
        masks = {
            name: {keyword: value} for name, keyword in of_names.items() if (value := getattr(self, name)) is not None
        }
        covs: dict[str, dict] = {
            "clip_cov": {"ratio": self.clip_cov_ratio, "cov": self.clip_cov_bounds},
            "kl_cov": {"ratio": self.kl_cov_ratio},
        }
        if loss in covs:
            masks[loss] = {keyword: value for keyword, value in covs[loss].items() if value is not None}
        return masks


@dataclass
class LossKwargs:
    """Hyper-parameters of --loss, each for the losses in brackets; lib/core_algos/policy_losses.py has the defaults."""

    cliprange_low: Annotated[float | None, Ge(0)] = None
    """lower clip [cispo, gspo, geo_mean, two_sided, decoupled, clip_cov]"""
    cliprange_high: Annotated[float | None, Ge(0)] = None
    """upper clip [the same]"""
    ratio_high: Annotated[float | None, Gt(0)] = None
    """largest importance weight [reinforce, dppo_tv, dppo_kl]"""
    tau_pos: Annotated[float | None, Gt(0)] = None
    """steepness of the gate where A > 0 [sapo]"""
    tau_neg: Annotated[float | None, Gt(0)] = None
    """the same where A < 0 [sapo]"""
    delta_low: Annotated[float | None, Gt(0)] = None
    """how far pi may have moved from pi_old at a token where A < 0 [dppo_tv, dppo_kl]"""
    delta_high: Annotated[float | None, Gt(0)] = None
    """the same where A > 0 [dppo_tv, dppo_kl]"""
    dro_beta: Annotated[float | None, Ge(0)] = None
    """weight of the squared log ratio [dro, which needs it]"""
    delta: Annotated[float | None, Gt(0)] = None
    """largest ratio where A < 0 [two_sided]"""
    cap: Annotated[float | None, Gt(0)] = None
    """largest weight pi_old / pi_rollout [decoupled]"""
    kl_coef: Annotated[float | None, Ge(0)] = None
    """weight of |log ratio| at the tokens chosen [kl_cov]"""


@dataclass
class AdvKwargs:
    """Hyper-parameters of --adv-estimator, each for the estimators in brackets; lib/core_algos/advantages.py has the
    defaults."""

    epsilon: Annotated[float | None, Gt(0)] = None
    """added to the standard deviation [grpo, grpo_passk, grpo_leave_one_out, grpo_batch_std]"""
    norm_adv_by_std_in_grpo: bool | None = None
    """divide by the group's standard deviation [grpo_passk]"""
    gamma: Annotated[float | None, Interval(ge=0, le=1)] = None
    """discount [reinforce_plus_plus]"""
    f_norm: Annotated[float | None, Gt(0)] = None
    """divisor of the advantages [gpg]"""
    reward_weights: Annotated[tuple[float, ...] | None, Interval(ge=-1e4, le=1e4)] = None
    """a weight for each of --reward-keys [gdpo]"""


# ---- which flags depend on others ------------------------------------------------------------------


def _is_gdpo(args: Any) -> bool:
    return getattr(args, "adv_estimator", "") == "gdpo"


# Not here: flags of what a run shows, saves and validates, whose switch is off on purpose. --loss-kwargs and
# --adv-kwargs are checked against the parameters of the loss and the estimator (lib/core_algos/settings.py).
CONDITIONS = (
    ReadIf(("lora_alpha", "lora_target_modules"), lambda a: a.model.lora_rank, "without --lora-rank"),
    ReadIf(("freeze",), lambda a: not a.model.lora_rank, "with --lora-rank, which trains the adapters only"),
    ReadIf(
        ("truncation",),
        lambda a: not a.data.filter_overlong_prompts or a.data.dataset_class,
        "without --no-filter-overlong-prompts, as longer prompts are dropped",
    ),
    ReadIf(("prompt_skip_after",), lambda a: a.data.prompt_sampling == "skip", "without --prompt-sampling skip"),
    ReadIf(("prompt_share",), lambda a: a.data.prompt_sampling != "uniform", "with --prompt-sampling uniform"),
    ReadIf(("shuffle",), lambda a: a.data.prompt_sampling != "variance", "with --prompt-sampling variance"),
    ReadIf(
        ("gpu_memory_utilization",),
        lambda a: a.rollout.starts_vllm,
        "without --rollout-engine vllm (a server gets it on its own command line)",
    ),
    ReadIf(
        ("reward_weights",),
        lambda a: not _is_gdpo(a),
        "with --adv-estimator gdpo, which weighs --reward-keys by --adv-kwargs.reward-weights",
    ),
    ReadIf(
        ("reward_model_coef",),
        lambda a: a.reward.reward_model and not _is_gdpo(a),
        "without --reward-model, and with --adv-estimator gdpo",
    ),
    ReadIf(("reward_timeout", "reward_memory"), lambda a: a.reward.reward_workers, "with --reward-workers 0"),
    ReadIf(
        ("singleton",),
        lambda a: a.adv_estimator not in ("maxrl", "reinforce_plus_plus"),
        "with --adv-estimator maxrl (always 0) and reinforce_plus_plus (no groups)",
    ),
    ReadIf(("adv_kwargs.norm_adv_by_std_in_grpo",), lambda a: a.adv_estimator != "dr_grpo", "with dr_grpo: it is off"),
    ReadIf(
        ("adv_kwargs.epsilon",),
        lambda a: a.adv_estimator != "dr_grpo" and a.adv_kwargs.norm_adv_by_std_in_grpo is not False,
        "without a division by the standard deviation",
    ),
    ReadIf(("zero_variance",), lambda a: a.group_size > 1 or a.zero_variance == "keep", "with --group-size 1"),
    ReadIf(("max_gen_batches",), lambda a: a.zero_variance == "refill", "without --zero-variance refill"),
    ReadIf(("overlong_factor",), lambda a: a.overlong_buffer, "with --overlong-buffer 0"),
    ReadIf(
        ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
        lambda a: a.loss == "vanilla",
        "without --loss vanilla (the other losses have --loss-kwargs)",
    ),
    ReadIf(
        ("loss_scale_factor",),
        lambda a: a.loss_agg_mode == "seq-mean-token-sum-norm",
        "without --loss-agg-mode seq-mean-token-sum-norm",
    ),
    ReadIf(
        ("token_masks.clip_cov_ratio", "token_masks.clip_cov_bounds"),
        lambda a: a.loss == "clip_cov",
        "without --loss clip_cov",
    ),
    ReadIf(("token_masks.kl_cov_ratio",), lambda a: a.loss == "kl_cov", "without --loss kl_cov"),
    ReadIf(
        tuple(f"rollout_correction.{name}" for name in ("action", "bounds", "batch_normalize")),
        lambda a: a.rollout_correction.level != "measure",
        "with --rollout-correction.level measure, which has no weights",
    ),
    ReadIf(("kl_estimator", "kl_placement"), lambda a: a.kl_coef, "without --kl-coef"),
    ReadIf(("kl_horizon",), lambda a: a.kl_target is not None, "without --kl-target"),
)


# ---- the arithmetic of a step ----------------------------------------------------------------------


@dataclass
class Sizes:
    """The batch sizes of a step. Those named local_ are per rank."""

    group_size: int
    num_mini_batches: int
    update_epochs: int
    local_prompts: int
    local_rows: int
    local_mini_batch_rows: int

    @property
    def updates_per_step(self) -> int:
        return self.num_mini_batches * self.update_epochs


def training_ranks(args: Any) -> int:
    """The ranks that train, of this job or of the one that --dry-run asks about. Raises InputError if there is none."""
    ranks, engines = args.run.dry_run or launched_ranks(), args.rollout.rollout_gpus
    if engines and ranks == 1 and not args.run.dry_run:
        raise InputError(
            f"--rollout-gpus {engines}: this is one process, and it trains: start several by torchrun (docs/scaling.md)"
        )
    if engines >= ranks:
        raise InputError(f"--rollout-gpus {engines}: of {ranks} ranks at least one must train: at most {ranks - 1}")
    return ranks - engines


def step_sizes(args: Any, world_size: int) -> Sizes:
    """The batch sizes of a step. Raises InputError, with the formula and its numbers, where they do not fit."""
    if not args.validation.val_only and args.prompts_per_step % (world_size * args.num_mini_batches):
        raise InputError(
            "prompts_per_step / (ranks x num_mini_batches) must be a whole number: "
            f"{args.prompts_per_step} / ({world_size} x {args.num_mini_batches}) = "
            f"{args.prompts_per_step / (world_size * args.num_mini_batches):g}"
        )
    for name in ("sequence_parallel_size", "tensor_parallel_size"):
        if world_size % (size := getattr(args.shard, name)):
            raise InputError(f"{as_flag(name)} {size}: must divide the number of ranks, {world_size}")
    lengths = args.data.max_prompt_length, args.rollout.max_response_length
    sequence_parallel_size, micro_batch_tokens = args.shard.sequence_parallel_size, args.optimizer.micro_batch_tokens
    if sequence_parallel_size * micro_batch_tokens < sum(lengths):
        raise InputError(
            "sequence_parallel_size x micro_batch_tokens must hold one row, max_prompt_length + max_response_length: "
            f"{sequence_parallel_size} x {micro_batch_tokens} < {lengths[0]} + {lengths[1]}"
        )
    local_prompts = args.prompts_per_step // world_size
    local_rows = local_prompts * args.group_size
    return Sizes(
        args.group_size,
        args.num_mini_batches,
        args.update_epochs,
        local_prompts,
        local_rows,
        local_rows // args.num_mini_batches,
    )


# ---- checks ----------------------------------------------------------------------------------------


def check_common_flags(args: Any) -> None:
    """Raises InputError for combinations of flags that make no sense in any script."""
    world_size = training_ranks(args)
    step_sizes(args, world_size)
    _check_engine_ranks(args, world_size)
    args.multi_turn.check()
    _check_models_and_files(args)
    _set_val_files(args)
    _check_sampling(args)
    _check_groups(args)
    _check_replay(args)
    _check_kl(args)
    _check_parallel(args)
    if not (args.reward.reward or args.reward.reward_model or args.multi_turn.interaction):
        raise InputError("--reward without a scorer: name one, or a --reward-model")


def _check_engine_ranks(args: Any, world_size: int) -> None:
    """world_size: the ranks that train."""
    ranks, gpus = args.rollout.rollout_tensor_parallel_size, args.rollout.rollout_gpus
    if (gpus or world_size) % ranks:
        what = f"--rollout-gpus {gpus}" if gpus else f"the number of ranks, {world_size},"
        raise InputError(f"--rollout-tensor-parallel-size {ranks}: {what} must be a multiple of it")
    if gpus and not args.run.dry_run and (cut := node_begins() - world_size) > 0 and cut % ranks:
        raise InputError(
            f"--rollout-tensor-parallel-size {ranks}: a server would be on two nodes, as {cut} of the --rollout-gpus "
            f"{gpus} are on the nodes before this one: that must be a multiple of {ranks}"
        )


def check_engine(name: str, ranks: int) -> None:
    """Raises InputError if there is no such engine or it cannot run here."""
    if ranks > 1 and name != "vllm":
        raise InputError(
            f"--rollout-tensor-parallel-size {ranks} splits a vLLM engine: it needs --rollout-engine vllm (a server is "
            "split by its own --tensor-parallel-size)"
        )
    urls = all(url.startswith(("http://", "https://")) for url in name.split(","))
    if not (name in ("hf", "vllm") or urls or ".py:" in name):
        raise InputError(
            f"--rollout-engine {name}: must be hf, vllm, the URL of a vLLM server (http://host:port) or "
            "path/to/file.py:Class, your own engine"
        )


def check_model_path(path: str, flag: str = "--model") -> None:
    """Raises InputError for a folder that cannot hold a model."""
    local = Path(path)
    if path.endswith(".gguf"):
        if not local.is_file():
            raise InputError(f"{flag} {path}: no such file")
    elif local.is_dir():
        if not (local / "config.json").is_file():
            raise InputError(f"{flag} {path}: the folder has no config.json; give a folder saved by save_pretrained")
        if not (any(local.glob("*.safetensors")) or any(local.glob("pytorch_model*.bin"))):
            raise InputError(f"{flag} {path}: the folder has no weights (*.safetensors); is the download complete?")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise InputError(f"{flag} {path}: no such folder")
    else:
        check_hub(path)


def check_source(source: str) -> None:
    """Raises InputError unless `source` is a file, a folder, or could be the id of a data set on the hub."""
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix in (".parquet", ".json", ".jsonl") or not HUB_ID.fullmatch(source)):
        raise InputError(f"{path}: no such file; check the path, or write it with one of the scripts in data/")
    if not path.exists():
        check_hub(source)


@cache
def check_hub(name: str) -> None:
    """If the hub does not answer, lets its libraries read their cache only, also in processes that the run starts. They
    would try for 25 s or more for each file."""
    import httpx

    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        return
    try:
        httpx.head(hub, timeout=HUB_ANSWER_S, verify=False)  # whoever answers
    except (httpx.TransportError, httpx.InvalidURL) as error:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are still to be imported
        if imported := sys.modules.get("huggingface_hub.constants"):
            vars(imported)["HF_HUB_OFFLINE"] = True
        if is_first_on_node():
            why = f"{name}: no such path here, and {hub} cannot be reached ({error})"
            print(f"{why}: looking for it in the hub's cache only", file=sys.stderr, flush=True)


def check_scorers(name: str, specs: tuple[str, ...]) -> None:
    """Raises InputError for a scorer of your own that cannot be loaded."""
    for spec in specs:
        if spec != "data_source":
            load_object(as_flag(name), spec)


def check_run_name(name: str) -> None:
    """Raises InputError for a name that is not that of one folder, or that a tracker refuses."""
    if "/" in name or name in (".", ".."):
        raise InputError(f"--run-name {name!r}: must be one folder's name; --output-dir says where that folder lies")
    if not name.isprintable():  # nor is half a surrogate pair, which Python makes of invalid UTF-8
        raise InputError(f"--run-name {name!r}: must be printable UTF-8 on one line")
    if len(name.encode()) > LONGEST_RUN_NAME:
        raise InputError(f"--run-name {name[:40]}...: {len(name.encode())} bytes, at most {LONGEST_RUN_NAME} are taken")


def check_output_dir(folder: str, flag: str = "--output-dir") -> None:
    """Raises InputError for a folder that cannot be made or written to."""
    if not folder.isprintable():
        raise InputError(f"{flag} {folder!r}: must be printable UTF-8 on one line")
    try:
        there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    except OSError as error:
        raise InputError(f"{flag} {folder[:40]}...: {error.strerror}") from error
    if not there.is_dir():
        raise InputError(f"{flag} {folder}: {there} is not a folder")
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        raise InputError(f"{flag} {folder}: {there} cannot be written: {error.strerror}") from error


def _set_val_files(args: Any) -> None:
    """The toy's prompts validate a model that is trained on the toy, or on nothing. Raises InputError for others."""
    validation = args.validation
    if validation.val_files or not validation.enabled:
        return
    own = [file for file in args.data.train_files if not Path(file).expanduser().resolve().is_relative_to(TOY)]
    if own and not validation.val_only:
        raise InputError(
            f"--train-files {own[0]} without --val-files: name the files to validate on, or give --val-files none"
        )
    validation.val_files = TOY_VAL


def _check_models_and_files(args: Any) -> None:
    if args.run.dry_run:
        if not Path(args.model.model).exists():
            check_hub(args.model.model)
    else:
        check_model_path(args.model.model)
        if args.reward.reward_model:
            check_model_path(args.reward.reward_model, "--reward-model")
    if not args.data.dataset_class:  # your own class may take other sources
        train_files = () if args.validation.val_only else args.data.train_files
        for source in (*train_files, *(args.validation.val_files if args.validation.enabled else ())):
            check_source(source)


def _check_sampling(args: Any) -> None:
    if args.data.prompt_sampling != "uniform" and args.group_size == 1:
        raise InputError(
            f"--prompt-sampling {args.data.prompt_sampling} compares the responses to a prompt: it needs --group-size 2"
        )
    if args.rollout.starts_vllm and not args.run.replay and importlib.util.find_spec("vllm") is None:
        raise InputError("--rollout-engine vllm: vLLM is not installed; use --rollout-engine hf")
    if args.old_log_probs == "rollout" and args.rollout_correction.settings():
        raise InputError("--old-log-probs rollout is the correction itself: drop it or --rollout-correction")
    names = {args.loss, getattr(args, "adv_estimator", None), *args.token_masks.settings(args.loss)}
    if args.old_log_probs == "rollout" and (reading := PASS_READ_BY & names):
        raise InputError(f"--old-log-probs rollout spares the forward pass that {reading.pop()} needs: drop one")
    weighs = args.rollout_correction.settings() and args.rollout_correction.level != "measure"
    if args.loss == "decoupled" and weighs:
        raise InputError(
            "--loss decoupled has the importance weight pi_old / pi_rollout already, and a rollout correction would "
            "apply it twice: drop it, or set --rollout-correction.level measure, which may still reject"
        )


def _check_groups(args: Any) -> None:
    """Of the scripts that have group estimators."""
    estimator, turns = getattr(args, "adv_estimator", ""), args.multi_turn
    if args.group_size == 1 and (estimator == "maxrl" or getattr(args, "singleton", "raw") == "zero"):
        flag = "--adv-estimator maxrl" if estimator == "maxrl" else "--singleton zero"
        raise InputError(f"{flag} with --group-size 1: every advantage is 0, and nothing trains; raise --group-size")
    if (estimator == "gdpo") != bool(getattr(args, "reward_keys", ())):
        raise InputError("--adv-estimator gdpo and --reward-keys, the rewards that it weighs, go together")
    if estimator != "gdpo":
        return
    ignored = {
        "--kl-placement loss": args.kl_coef > 0 and args.kl_placement == "reward",
        "--overlong-buffer 0": getattr(args, "overlong_buffer", 0) > 0,
        "--multi-turn.reward-coef 0": turns.enabled and turns.reward_coef,
        "--reward-keys ... reward_model": args.reward.reward_model and "reward_model" not in args.reward_keys,
    }
    if needed := [flag for flag, is_ignored in ignored.items() if is_ignored]:
        raise InputError(f"--adv-estimator gdpo weighs --reward-keys and ignores all other rewards: {needed[0]}")
    if 0 in (args.adv_kwargs.reward_weights or ()):
        raise InputError("--adv-kwargs.reward-weights 0: this reward trains nothing: drop it from --reward-keys")


def _check_replay(args: Any) -> None:
    for name in ("record", "replay"):
        if getattr(args.run, name) and args.validation.val_only:
            raise InputError(f"--{name} is about training steps, and --val-only has none: drop one")


def _check_kl(args: Any) -> None:
    if args.kl_target is not None and not (args.kl_coef and args.kl_placement == "reward"):
        raise InputError("--kl-target steers the KL in the reward: it needs --kl-placement reward and a --kl-coef")
    if args.kl_target is not None and args.kl_horizon <= 0.2 * args.prompts_per_step * args.group_size:
        raise InputError(f"--kl-horizon {args.kl_horizon}: must be above 0.2 x the responses of a step, or beta dies")


def _check_parallel(args: Any) -> None:
    sizes = {name: getattr(args.shard, name) for name in ("sequence_parallel_size", "tensor_parallel_size")}
    for name, size in sizes.items():
        packed = args.model.padding_free and args.model.attn_implementation in ("auto", "packed_sdpa", "varlen")
        if size > 1 and not packed:
            raise InputError(f"{as_flag(name)} {size}: needs --padding-free, and packed_sdpa or varlen attention")
    without_tensor_parallel = {
        "--rollout-engine hf": args.rollout.rollout_engine == "hf",
        "--lora-rank": args.model.lora_rank > 0,
        "--dp-replicate-size": args.shard.dp_replicate_size > 1,
        "--sequence-parallel-size": args.shard.sequence_parallel_size > 1,
        "--dry-run": args.run.dry_run > 0,
        "--compile": args.model.compile,
        "the validation of --replay (--val-every 0 --no-val-before-train)": args.run.replay and args.validation.enabled,
    }
    for name, is_given in without_tensor_parallel.items():
        if args.shard.tensor_parallel_size > 1 and is_given:
            raise InputError(f"--tensor-parallel-size {args.shard.tensor_parallel_size} does not work with {name}")
