"""The groups of flags that all scripts share. Each group checks itself, and a function of lib takes those it needs."""

import math
import operator
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Gt, Interval

from lib import InputError
from lib.args.settings import LONGEST_WAIT, SECONDS
from lib.cli.flags import Group, Names, OnReplay, OnResume, as_flag, parse_json, with_line_breaks
from lib.cli.user_code import load_object
from lib.sampling import Sampling

MAY_CHANGE, NOT_COMPARED = OnResume.MAY_CHANGE, OnResume.NOT_COMPARED
FILES, ROWS = Names.FILES, Names.ROWS
AS_RECORDED = OnReplay.AS_RECORDED
ROOT = Path(__file__).parent.parent.parent
NO_FILES = ("none",)
COLUMN_NAMES = ("prompt", "answer", "data_source", "extra_info", "images", "videos")  # of --columns
LONGEST_RUN_NAME = 128  # bytes: wandb takes 128 characters, a file system 255 bytes
PromptSampling = Literal["uniform", "skip", "variance"]
Offloaded = Literal["actor", "critic", "ref", "reward_model", "activations"]


@dataclass
class ModelArgs(Group):
    """The policy's model, and which of its weights train."""

    model: Annotated[str, FILES, ROWS] = ""
    """Hugging Face id, folder, .gguf file or URL (docs/data.md) of the policy to start from; without it and
    --train-files, a run trains the embedded arithmetic task, with data/toy/preset.yaml's flags (docs/defaults.md)"""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of forward and backward; weights and optimizer are fp32. auto: bfloat16 on a GPU, float32 on a CPU;
    float16 has a loss scale, and is closer to the engine's log-probs where the model's values fit it"""
    attn_implementation: Annotated[str, MAY_CHANGE] = "auto"
    """packed_sdpa runs everywhere; varlen, one FlashAttention call a layer, on GPUs with 16 bits (auto, if it runs);
    flash_attention_2 needs its package; with any other, rows are padded (docs/gpu.md)"""
    compile: Annotated[bool, MAY_CHANGE] = False
    """torch.compile the layers, for packed rows: the first steps take a minute longer"""
    use_liger_kernel: Annotated[bool, MAY_CHANGE] = False
    """liger-kernel's fused norms, rotary embedding and gated MLP: fewer launches and activations (docs/gpu.md)"""
    padding_free: Annotated[bool, MAY_CHANGE] = True
    """pack the sequences of a micro-batch without padding, if the model supports it (docs/models.md)"""
    share_prompts: Annotated[bool, MAY_CHANGE] = True
    """shared-prefix training: compute a prompt once for its group, and what segments of episodes begin with in common
    (docs/agents.md); needs packing and packed_sdpa or varlen"""
    routing_replay: Literal["none", "R2", "R3"] = "none"
    """experts of a mixture in the update (docs/moe.md): the router's (none), those of the pass that computes
    old_log_probs (R2), or the rollout engine's (R3)"""
    gradient_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """recompute activations in the backward pass: less memory, about a third more time in the update"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    lora_rank: Annotated[int, Ge(0)] = 0
    """train LoRA adapters of this rank (the reference is then the model without them); 0: train all weights. With vLLM
    in bfloat16, which rounds W + dW, --rollout-correction has a default"""
    lora_alpha: Annotated[float, Gt(0)] = 32.0
    """LoRA scale: the update of the adapters is multiplied by lora_alpha / lora_rank"""
    lora_target_modules: str = "all-linear"
    """layers that get adapters: all-linear (of the language part), or a regular expression like .*[qkvo]_proj"""
    freeze: str = ""
    """what is not trained: vision (tower and projector), tower, projector, or a regular expression of parameters"""

    def check(self) -> None:
        for flag, pattern in {"--freeze": self.freeze, "--lora-target-modules": self.lora_target_modules}.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise InputError(f"{flag} {pattern}: not a regular expression: {error}") from error
        if self.compile and self.use_liger_kernel:
            raise InputError("--compile and --use-liger-kernel fuse the same operations: drop one of them")


@dataclass
class ShardArgs(Group):
    """How models are split over ranks (docs/scaling.md)."""

    dp_replicate_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """copies of the model (HSDP), each split over its share of the ranks; 1: one copy, split over all ranks"""
    sequence_parallel_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """split each row's tokens over this many neighbouring ranks (Ulysses), for long rows; must divide the number of
    attention heads; needs --padding-free and packed_sdpa"""
    tensor_parallel_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """split every layer's weights over this many neighbouring ranks, by transformers' plan for the model; must divide
    the number of key and value heads, and of experts; needs a vLLM engine or server"""
    reduce_each_micro_batch: Annotated[bool, MAY_CHANGE] = False
    """reduce gradients over ranks after each micro-batch, not once an update: they then take 1 / ranks of the memory
    (4 bytes x parameters), for more communication"""
    cpu_offload: Annotated[tuple[Offloaded, ...], MAY_CHANGE] = ()
    """models whose weights, gradients and optimizer state stay in CPU memory; activations: what the update saves, best
    with --gradient-checkpointing; slower"""

    def parallel_sizes(self) -> dict[str, int]:
        """{flag: how many ranks compute the same rows together}."""
        return {name: getattr(self, name) for name in ("sequence_parallel_size", "tensor_parallel_size")}


@dataclass
class DataArgs(Group):
    """Data files in verl's format, and how their rows become prompts."""

    train_files: Annotated[tuple[str, ...], FILES, ROWS] = ()
    """parquet or json(l) files, also at URLs such as s3://bucket/train.parquet, or a data set on the hub"""
    train_weights: Annotated[tuple[float, ...], Gt(0), ROWS] = ()
    """share of each file of --train-files among the prompts, such as 0.7 0.3, whatever the files' sizes; empty: all
    rows are one data set"""
    dataset_class: Annotated[str, FILES, ROWS] = ""
    """path/to/file.py:ClassName of your own dataset class; empty: lib/data's RLHFDataset"""
    max_prompt_length: Annotated[int, Ge(1), ROWS] = 1024
    """maximum number of prompt tokens, including the chat template"""
    truncation: Annotated[Literal["error", "left", "right", "middle"], ROWS] = "error"
    """side on which prompts that are too long are truncated, if they are not filtered; error: stop the run"""
    filter_overlong_prompts: Annotated[bool, ROWS] = True
    """drop training and validation prompts that are too long, and print their number"""
    max_train_samples: Annotated[int | None, Ge(1), ROWS] = None
    """use at most this many rows of --train-files: drawn once from all files together, before overlong prompts are
    dropped, and the same for every --seed; empty: all"""
    columns: Annotated[tuple[str, ...], ROWS] = ()
    """columns of the rows with other names than verl's, NAME=COLUMN, such as prompt=question answer=solution. Names:
    prompt (text or messages), answer (the scorers' ground_truth), data_source, extra_info, images, videos"""
    prompt_template: Annotated[str, ROWS] = ""
    r"""text of the prompt with names of columns in braces, such as "Question: {question}\nAnswer:", where \n
    is a line break; empty: the prompt as it is"""
    system_prompt: Annotated[str, ROWS] = ""
    """system message of prompts that have none"""
    chat_template: Annotated[str, FILES, ROWS] = ""
    """Jinja file in place of the tokenizer's chat template; none: text prompts are tokenized as they are, as for a base
    model; empty: the tokenizer's"""
    chat_template_kwargs: Annotated[str, ROWS] = "{}"
    """JSON of keyword arguments for the chat template, such as {"enable_thinking": false}"""
    max_pixels: Annotated[int, Ge(1), ROWS] = 1003520
    """maximum number of pixels of an image or video frame; larger ones are scaled down (1280 x 28 x 28)"""
    min_pixels: Annotated[int, Ge(1), ROWS] = 3136
    """a smaller one is made larger, to about this many; the model's processor then resizes by its own rules"""
    max_images: Annotated[int, Ge(1), ROWS] = 8
    """maximum number of images, and of videos, in a prompt; rows with more are dropped and counted"""
    video_fps: Annotated[float, Gt(0), ROWS] = 2.0
    """frames sampled per second of a video file"""
    max_frames: Annotated[int, Ge(1), ROWS] = 32
    """maximum number of frames of a video; frames of longer videos are sampled evenly"""
    allow_special_tokens: bool = False
    """text that spells a special token, such as <|im_end|>, becomes that token; otherwise a space breaks it up"""
    shuffle: Annotated[bool, ROWS] = True
    """shuffle the training prompts anew in each epoch"""
    loader_workers: Annotated[int, Interval(ge=0, le=1024), MAY_CHANGE] = 0
    """processes that tokenize prompts ahead of time; 0: the training process does it"""
    prompt_sampling: Annotated[PromptSampling, ROWS] = "uniform"
    """which prompts come: uniform: each once an epoch; skip: not those whose groups scored alike --prompt-skip-after
    times in a row (all right or all wrong); variance: in proportion to the variance of their last group's scores"""
    prompt_skip_after: Annotated[int, Ge(1), ROWS] = 3
    """consecutive groups with equal scores after which --prompt-sampling skip skips a prompt"""
    prompt_share: Annotated[float, Interval(gt=0, le=1), ROWS] = 0.1
    """share of left out prompts that come nevertheless; with variance, of the draws that are uniform"""

    def check(self) -> None:
        parse_json("chat_template_kwargs", self.chat_template_kwargs)
        columns_of(self.columns)
        if self.system_prompt and self.chat_template == "none":
            raise InputError("--system-prompt with --chat-template none: a prompt is then one text; write it into that")
        if len(self.train_weights) not in (0, len(self.train_files)):
            sizes = f"{len(self.train_weights)} numbers for the {len(self.train_files)} files"
            raise InputError(f"--train-weights has {sizes} of --train-files")
        if self.min_pixels > self.max_pixels:
            raise InputError(f"--min-pixels {self.min_pixels}: more than --max-pixels {self.max_pixels}")
        if self.prompt_sampling != "uniform" and self.loader_workers:
            flag = f"--prompt-sampling {self.prompt_sampling}"
            raise InputError(f"{flag} needs the step before, and --loader-workers take them ahead of that: drop one")


@dataclass
class RolloutArgs(Group):
    """How responses are sampled."""

    rollout_engine: Annotated[str, FILES] = "auto"
    """hf: the trainer's own model; vllm: a vLLM engine in each process; auto: vllm on a GPU where it can sample the
    model, else hf; http://host:port: a vLLM server that already runs (several: separate them by commas);
    path/to/file.py:Class: your own engine"""
    rollout_gpus: Annotated[int, Ge(0), MAY_CHANGE] = 0
    """the last so many of the launcher's processes run vLLM servers for the others, and do not train"""
    rollout_tensor_parallel_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """split a vLLM engine, or with --rollout-gpus a server, over this many ranks, for models larger than a GPU"""
    gpu_memory_utilization: Annotated[float | None, Interval(gt=0, lt=1), MAY_CHANGE] = None
    """share of a GPU's memory for vLLM (on a CPU its KV cache has 1 GiB); empty: 0.4, with --rollout-gpus 0.9"""
    vllm_kwargs: Annotated[str, MAY_CHANGE] = "{}"
    """JSON of more EngineArgs of the vLLM engine, such as {"kv_cache_dtype": "fp8"}, or {"quantization": "fp8"} with a
    --rollout-correction"""
    batch_invariant: Annotated[bool, MAY_CHANGE] = False
    """vLLM's batch-invariant kernels, on GPUs: a token's log-prob does not depend on what else is in the batch; slower
    (docs/mismatch.md)"""
    max_mismatch: Annotated[float | None, Gt(0), MAY_CHANGE] = None
    """largest k3 in nats between engine and trainer, at the probe of a sync and in each step; above it the run stops.
    Empty: no limit, with a quantized engine 0.1"""
    agent: Annotated[str, AS_RECORDED, FILES] = ""
    """your agent, which asks the policy through OpenAI's API (chat completions, responses, completions) or Anthropic's:
    path/to/file.py:function or a command (docs/agents.md)"""
    agent_timeout: Annotated[float, SECONDS] = 600.0
    """timeout of an agent's episode in seconds; a longer one is not trained on"""
    agent_memory: Annotated[int | None, Ge(1), MAY_CHANGE] = None
    """address space of each process of an agent that is a command, in MiB; empty: no limit"""
    agent_ignore: tuple[str, ...] = ()
    """parameters of an agent's requests that are accepted and have no effect, such as temperature top_p"""
    async_level: Annotated[int, Ge(0)] = 0
    """on servers (--rollout-gpus or http://...): how many steps old the weights of a rollout may be; above 0,
    --rollout-correction has a default"""
    async_order: Literal["prompts", "finished"] = "prompts"
    """a step trains on the groups that began first, or (from --async-level 2 on) that are finished first: it waits
    less and prefers short responses"""
    max_response_length: Annotated[int, Ge(1), AS_RECORDED] = 2048
    """maximum number of response tokens; with --multi-turn or --agent, of a whole episode"""
    temperature: Annotated[float, Gt(0), AS_RECORDED] = 1.0
    """sampling temperature; the loss uses log-probs at this temperature, top_p, top_k and min_p"""
    top_p: Annotated[float, Interval(gt=0, le=1), AS_RECORDED] = 1.0
    """nucleus sampling: sample from the smallest set of tokens with this total probability; 1: all tokens"""
    top_k: Annotated[int, Ge(-1), AS_RECORDED] = -1
    """top-k sampling: sample from the k most likely tokens; -1: all tokens"""
    min_p: Annotated[float, Interval(ge=0, le=1), AS_RECORDED] = 0.0
    """sample from the tokens that are at least this many times as likely as the likeliest; 0: from all"""
    repetition_penalty: Annotated[float, Gt(0), AS_RECORDED] = 1.0
    """divides the logits of tokens that came before; 1: off. Only with --val-only: the loss cannot account for it"""
    stop: Annotated[tuple[str, ...], AS_RECORDED] = ()
    r"""strings that end a response (\n is a line break); the tokens that complete one are trained like the others"""

    def check(self) -> None:
        if self.rollout_gpus and self.rollout_engine not in ("auto", "vllm"):
            ours, other = f"--rollout-gpus {self.rollout_gpus}", f"--rollout-engine {self.rollout_engine}"
            raise InputError(f"{ours} runs vLLM servers of this job's own, {other} is another engine: drop one")
        check_engine(self.allowed_engine, self.rollout_tensor_parallel_size)
        if "" in self.stop:
            raise InputError("--stop '': an empty string would end every response; give a text, or drop --stop")
        parse_json("vllm_kwargs", self.vllm_kwargs)
        if self.batch_invariant and self.allowed_engine != "vllm":
            other = "a server is started with VLLM_BATCH_INVARIANT=1" if self.on_servers else "the kernels are vLLM's"
            raise InputError(f"--batch-invariant with --rollout-engine {self.engine}: {other}: drop the flag")
        if self.async_level and not self.on_servers:
            raise InputError(
                f"--async-level {self.async_level} needs --rollout-gpus or --rollout-engine http://host:port"
            )
        if self.async_order == "finished" and self.async_level < 2:
            raise InputError("--async-order finished: needs --async-level 2 or more, of which slow groups get one")

    auto_engine = ""  # no flag: what auto is here; lib.setup.ranks.join chooses it

    @property
    def engine(self) -> str:
        """rollout_engine, or what auto stands for: hf until lib.setup.ranks.join has chosen."""
        if self.rollout_engine != "auto":
            return self.rollout_engine
        return "vllm" if self.rollout_gpus else self.auto_engine or "hf"

    @property
    def allowed_engine(self) -> str:
        """The engine that flags are checked against: vllm, which takes the most, while auto is not chosen yet."""
        return "vllm" if self.rollout_engine == "auto" and not self.auto_engine else self.engine

    @property
    def on_servers(self) -> bool:
        """Whether responses are sampled outside of the processes that train."""
        return self.rollout_gpus > 0 or "://" in self.rollout_engine

    @property
    def starts_vllm(self) -> bool:
        """Whether this job starts vLLM, in the processes that train or with --rollout-gpus."""
        return self.engine == "vllm"

    def sampling(self) -> Sampling:
        given = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        return Sampling(**given | {"stop": tuple(map(with_line_breaks, self.stop))})

    @property
    def quantization(self) -> str | None:
        """What --vllm-kwargs says about it."""
        return parse_json("vllm_kwargs", self.vllm_kwargs).get("quantization")

    @property
    def mismatch_limit(self) -> float:
        """max_mismatch, or its default."""
        return self.max_mismatch or (0.1 if self.quantization else math.inf)

    @property
    def gpu_share(self) -> float:
        """gpu_memory_utilization, or its default."""
        return self.gpu_memory_utilization or (0.9 if self.rollout_gpus else 0.4)


@dataclass
class RewardArgs(Group):
    """Who scores responses, and under what limits."""

    reward: Annotated[tuple[str, ...], FILES, AS_RECORDED] = ("data_source",)
    """scorers, whose scores are added up: data_source (each row's, in rewards/) or path/to/file.py:function"""
    reward_weights: Annotated[tuple[float, ...], Interval(ge=-1e4, le=1e4)] = ()
    """a weight for each scorer of --reward; empty: 1 each"""
    reward_kwargs: Annotated[str, AS_RECORDED] = "{}"
    """JSON of keyword arguments for every scorer, or {"file.function": {...}} for the one of this name"""
    shadow_reward: Annotated[tuple[str, ...], FILES, MAY_CHANGE] = ()
    """scorers, as --reward, that are logged beside the reward (shadow/<name>/...) and never trained on"""
    reward_workers: Annotated[int, Interval(ge=0, le=1024), MAY_CHANGE] = 2
    """worker processes per rank; 0: score in the training process, for breakpoint()"""
    reward_timeout: Annotated[float, SECONDS, MAY_CHANGE] = 30.0
    """timeout of a scorer for one response, in seconds"""
    reward_memory: Annotated[int, Ge(1), MAY_CHANGE] = 2048
    """memory limit of a scorer in MiB, beyond the memory of its imports"""
    sandbox_level: Annotated[Literal["namespaces", "landlock", "rlimits", "none"], MAY_CHANGE] = "namespaces"
    """weakest sandbox accepted for code that a model wrote; docs/rewards.md describes each"""
    reward_failure_score: Annotated[float | None, Interval(ge=-1e12, le=1e12)] = None
    """score of a response whose scorer hangs, crashes or raises; empty: exclude the response from training"""
    reward_model: Annotated[str, FILES, AS_RECORDED] = ""
    """Hugging Face id or folder of a sequence classifier with one output, which is added to the scorers' score"""
    reward_model_coef: Annotated[float, Interval(ge=-1e4, le=1e4)] = 1.0
    """weight of the reward model's score"""

    def check(self) -> None:
        parse_json("reward_kwargs", self.reward_kwargs)
        check_scorers("reward", self.reward)
        check_scorers("shadow_reward", self.shadow_reward)
        if len(self.reward_weights) not in (0, len(self.reward)):
            sizes = f"{len(self.reward_weights)} numbers for the {len(self.reward)} scorers"
            raise InputError(f"--reward-weights has {sizes} of --reward")


@dataclass
class OptimizerArgs(Group):
    """Micro-batches and AdamW."""

    micro_batch_tokens: Annotated[int, Ge(1), MAY_CHANGE] = 16384
    """maximum number of tokens of one forward and backward pass on one rank"""
    lr: Annotated[float | None, Ge(0)] = None
    """learning rate; empty: 1e-6, with --lora-rank 1e-5"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning-rate schedule after the warm-up"""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """number of warm-up steps of the learning rate"""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """AdamW's weight decay"""
    adam_betas: Annotated[tuple[float, float], Interval(ge=0, lt=1)] = (0.9, 0.999)
    """AdamW's betas"""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """maximum gradient norm (clipping)"""


class ValidationSet(NamedTuple):
    """Files that are validated on, and how."""

    files: tuple[str, ...]
    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_response_length: int | None  # None: as in training

    def sampling(self, training: Sampling) -> Sampling:
        length = self.max_response_length or training.max_response_length
        own = replace(training, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=0.0)
        return replace(own, max_response_length=length)


@dataclass
class ValidationArgs(Group):
    """Validation during training."""

    val_files: Annotated[tuple[str, ...], MAY_CHANGE, FILES] = ()
    """as --train-files; empty, or none: no validation"""
    max_val_samples: Annotated[int | None, Ge(1), MAY_CHANGE] = None
    """as --max-train-samples, of --val-files together, or of each file if a flag has a value for each; empty: all"""
    val_before_train: Annotated[bool, MAY_CHANGE] = True
    """validate before the first step"""
    val_every: Annotated[int, Ge(0), MAY_CHANGE] = 5
    """validate every n steps and after the last; 0: never"""
    val_only: Annotated[bool, NOT_COMPARED] = False
    """validate (with --resume: that checkpoint) and stop; reads no training data; writes to <run>/val_only/1, 2, ..."""
    val_reward: Annotated[tuple[str, ...], MAY_CHANGE, FILES] = ()
    """scorers of validation, as --reward; empty: those of training"""
    val_samples: Annotated[tuple[int, ...], Interval(ge=1, le=2**16), MAY_CHANGE] = (1,)
    """responses per validation prompt: n in mean@n, pass@k, maj@k. This and the next four: one value, or one for each
    file of --val-files, such as --val-samples 32 1"""
    val_temperature: Annotated[tuple[float, ...], Ge(0), MAY_CHANGE] = (0.0,)
    """sampling temperature in validation; 0: greedy"""
    val_top_p: Annotated[tuple[float, ...], Interval(gt=0, le=1), MAY_CHANGE] = (1.0,)
    """nucleus sampling in validation"""
    val_top_k: Annotated[tuple[int, ...], Ge(-1), MAY_CHANGE] = (-1,)
    """top-k sampling in validation; -1: all tokens"""
    val_max_response_length: Annotated[tuple[int, ...], Ge(1), MAY_CHANGE] = ()
    """maximum number of response tokens in validation; empty: --max-response-length"""
    show_samples: Annotated[int, Ge(0), MAY_CHANGE] = 3
    """number of validation samples printed at the end of the run (samples.jsonl has all)"""

    def check(self) -> None:
        check_scorers("val_reward", self.val_reward)
        if self.val_only and not self.enabled:
            raise InputError("--val-only needs --val-files: name the files to validate on")
        for val_set in self.sets():
            if val_set.samples > 1 and val_set.temperature == 0:
                raise InputError(f"--val-samples {val_set.samples} are all the same at --val-temperature 0: raise it")

    def sets(self) -> list[ValidationSet]:
        """The files with their sampling: all together if no flag has several values. Raises InputError."""
        names, files = ValidationSet._fields[1:], self.val_files
        values: dict[str, tuple] = {name: getattr(self, f"val_{name}") or (None,) for name in names}
        for name, given in values.items():
            if len(given) not in (1, len(files)):
                counts = f"{len(given)} values for {len(files)} --val-files"
                raise InputError(f"{as_flag(f'val_{name}')} has {counts}: give one for all, or one for each")
        if all(len(given) == 1 for given in values.values()):
            return [ValidationSet(files, **{name: given[0] for name, given in values.items()})]
        own = [{name: given[i % len(given)] for name, given in values.items()} for i in range(len(files))]
        return [ValidationSet((file,), **settings) for file, settings in zip(files, own)]

    @property
    def enabled(self) -> bool:
        return self.val_files not in ((), NO_FILES) and (self.val_only or self.val_before_train or self.val_every > 0)


class StopWhen(NamedTuple):
    """--stop-when: compares a metric with a number."""

    metric: str
    compare: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "StopWhen":
        """Raises InputError for a text that is not one comparison."""
        found = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", text)
        if found is None or math.isinf(float(found[3])):  # 1e999
            how = '"val/x/mean@1 >= 0.9": a metric, one of >=, <=, > and <, and a number'
            raise InputError(f"--stop-when {text!r}: give one comparison such as {how}")
        return cls(found[1], found[2], float(found[3]))

    def holds(self, value: float) -> bool:
        compare = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}[self.compare]
        return compare(value, self.value)


@dataclass
class RunArgs(Group):
    """The run: its folder, length, checkpoints and logs."""

    run_name: Annotated[str, NOT_COMPARED] = ""
    """name of the run; its folder is output_dir/run_name; empty: <script>-s<seed>-<date and time>-<random>"""
    output_dir: Annotated[str, NOT_COMPARED] = "runs"
    """folder of all runs"""
    config: Annotated[str, NOT_COMPARED] = ""
    """config.json of a run, or a YAML file, with flags; flags on the command line override it"""
    seed: Annotated[int, Interval(ge=0, lt=2**32), ROWS] = 1
    """seed of sampling and data order; the same seed gives the same run"""
    total_steps: Annotated[int, Ge(1), MAY_CHANGE] = 500
    """number of steps, each of prompts_per_step x group_size responses"""
    total_epochs: Annotated[int | None, Ge(1), MAY_CHANGE] = None
    """number of passes over the training prompts; overrides total_steps, rounded up; empty: total_steps"""
    dry_run: Annotated[int, Ge(0), NOT_COMPARED] = 0
    """print a step's sizes and FLOPs, and the memory that each of this many GPUs needs; stop before a model loads"""
    plan: Annotated[str, NOT_COMPARED] = ""
    """with --dry-run: predict the seconds of a step for each number of --rollout-gpus and --async-level, for responses
    as long as in a run (its folder), lognormal:mean,sigma, uniform:lo,hi, constant:n or auto (docs/scaling.md)"""
    trace: Annotated[bool, NOT_COMPARED] = False
    """with --dry-run: also run a step of this script without values, and print the memory that it takes and a predicted
    speed, which --plan then takes"""
    memory_check: Annotated[bool, NOT_COMPARED] = True
    """on a GPU, estimate the memory at the start and reject flags that do not fit"""
    resume: Annotated[str, NOT_COMPARED] = "never"
    """"never", "auto" (from the newest complete checkpoint of run_name, else from the start) or a checkpoint folder:
    run_name goes back to it, or starts from it if it is another run's"""
    resume_override: Annotated[tuple[str, ...], NOT_COMPARED] = ()
    """flags that change results (or `script`) and may differ from the checkpoint; recorded in config.json"""
    record: Annotated[str, NOT_COMPARED] = ""
    """folder, seen by all nodes, that keeps each step's batch for --replay and a debugger (docs/replay.md)"""
    replay: str = ""
    """folder of a --record: train on what was sampled and scored there, without engine and scorers, on as many ranks"""
    stage_timeout: Annotated[float, Interval(ge=0, le=LONGEST_WAIT), MAY_CHANGE] = 1800.0
    """seconds that a stage (start, rollout, update, save, ...; not loading models) may take before the job ends and
    says why; after a 30th of that, a line says where the ranks are; 0: no limit"""
    save_every: Annotated[int, Ge(0), MAY_CHANGE] = 50
    """save a checkpoint every n steps and after the last; 0: never"""
    keep_checkpoints: Annotated[int, Ge(0), MAY_CHANGE] = 2
    """keep the newest n checkpoints; 0: all"""
    keep_best: Annotated[str, MAY_CHANGE] = ""
    """metric val/.../mean@n: also save and keep the checkpoint whose validation has its best lower confidence bound"""
    stop_when: Annotated[str, MAY_CHANGE] = ""
    """end the run after the step in which this holds, such as "val/x/mean@1 >= 0.9": a metric, >=, <=, > or <, and a
    number"""
    save_rollouts: Annotated[int | Literal["all"], Ge(0), MAY_CHANGE] = 1
    """groups of each step's training samples to keep in <run>/rollouts, with all that is known of each token"""
    export_model: Annotated[bool, MAY_CHANGE] = True
    """after the last step, export the policy in Hugging Face format to <run>/model"""
    export_dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], MAY_CHANGE] = "auto"
    """dtype of the exported weights; auto: --compute-dtype, as in the rollouts"""
    track: Annotated[tuple[Literal["wandb", "tensorboard", "trackio", "mlflow", "swanlab"], ...], MAY_CHANGE] = ()
    """trackers in addition to metrics.jsonl; the last three must be installed separately. A tracker's own variable
    names the project, such as WANDB_PROJECT (docs/index.md); default: plainrl"""
    profile_steps: Annotated[tuple[int, ...], Ge(1), NOT_COMPARED] = ()
    """steps to profile: each rank writes a torch.profiler trace to <run>/profile"""
    profile_memory: Annotated[bool, NOT_COMPARED] = False
    """traces show the memory in use; on a GPU each also has a snapshot with every allocation's stack"""

    def check(self) -> None:
        if "/" in self.run_name or self.run_name in (".", ".."):
            why = "must be one folder's name; --output-dir says where that folder lies"
            raise InputError(f"--run-name {self.run_name!r}: {why}")
        if not self.run_name.isprintable():  # nor is half a surrogate pair, which Python makes of invalid UTF-8
            raise InputError(f"--run-name {self.run_name!r}: must be printable UTF-8 on one line")
        if (size := len(self.run_name.encode())) > LONGEST_RUN_NAME:
            raise InputError(f"--run-name {self.run_name[:40]}...: {size} bytes, at most {LONGEST_RUN_NAME} are taken")
        if self.plan and not self.dry_run:
            raise InputError(f"--plan {self.plan[:100]!r}: needs --dry-run N, the number of GPUs that it predicts for")
        if not self.dry_run:
            check_output_dir(self.output_dir)
        if self.record and self.replay:
            raise InputError("--record with --replay: what a replay samples and scores is recorded already; drop one")
        if self.record and not self.dry_run:
            check_output_dir(self.record, "--record")
        if self.replay and not Path(self.replay, "config.json").is_file():
            raise InputError(f"--replay {self.replay}: no config.json there; give the folder of a run with --record")
        if self.keep_best and not re.fullmatch(r"val/.+/mean@\d+", self.keep_best):
            raise InputError(f"--keep-best {self.keep_best}: give a mean of validation, such as val/x/mean@1")
        if self.stop_when:
            StopWhen.parse(self.stop_when)
        if self.resume == "auto" and not self.run_name:
            raise InputError("--resume auto needs the --run-name of the run to resume")
        if self.total_epochs is None:
            self.check_profile_steps()

    def check_profile_steps(self) -> None:
        """To be called when total_steps is known."""
        if late := [step for step in self.profile_steps if step > self.total_steps]:
            raise InputError(f"--profile-steps {late[0]}: the run has {self.total_steps} steps (--total-steps)")


def columns_of(words: Iterable[str]) -> dict[str, str]:
    """{name: the rows' column} of --columns. Raises InputError."""
    found: dict[str, str] = {}
    for name, _, column in (word.partition("=") for word in words):
        if name not in COLUMN_NAMES or not column:
            wanted = f"NAME=COLUMN, where NAME is one of {', '.join(COLUMN_NAMES)}"
            raise InputError(f"--columns {name}{f'={column}' * bool(column)}: give {wanted}")
        if name in found:
            raise InputError(f"--columns: {name} has two columns, {found[name]} and {column}: drop one")
        found[name] = column
    return found


def check_engine(name: str, ranks: int) -> None:
    """Raises InputError if there is no such engine or it cannot run here."""
    if ranks > 1 and name != "vllm":
        needs = "it needs --rollout-engine vllm (a server has its own --tensor-parallel-size)"
        raise InputError(f"--rollout-tensor-parallel-size {ranks} splits a vLLM engine: {needs}")
    urls = all(url.startswith(("http://", "https://")) for url in name.split(","))
    if not (name in ("hf", "vllm") or urls or ".py:" in name):
        known = "auto, hf, vllm, the URL of a vLLM server (http://host:port) or path/to/file.py:Class, your own engine"
        raise InputError(f"--rollout-engine {name}: must be {known}")


def check_scorers(name: str, specs: tuple[str, ...]) -> None:
    """Raises InputError for a scorer of your own that cannot be loaded."""
    for spec in specs:
        if spec != "data_source":
            load_object(as_flag(name), spec)


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
