"""The groups of flags that all scripts share: model, ranks, rollouts, rewards, optimizer. Each group checks itself, and
a function of lib takes those it needs. data.py and run.py have the others. Settings are flags with a prefix, such as
--multi-turn.tools calculator."""

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from lib import InputError
from lib.cli.flags import SWITCH, Group, Names, OnReplay, OnResume, parse_json, with_line_breaks
from lib.cli.user_code import load_object
from lib.declared import ADV_ESTIMATORS, CRITERIA, POLICY_LOSSES, Bounds, from_words, parsed, read_words
from lib.sampling import Sampling, Truncation

MAY_CHANGE, AS_RECORDED, FILES = OnResume.MAY_CHANGE, OnReplay.AS_RECORDED, Names.FILES
PACKED = ("auto", "packed_sdpa", "varlen")  # attention that packs rows and shares prompts
Offloaded = Literal["actor", "critic", "ref", "reward_model", "optimizer", "activations"]
if TYPE_CHECKING:
    AdvEstimator = str
    PolicyLoss = str
else:
    AdvEstimator = Literal[*ADV_ESTIMATORS]
    PolicyLoss = Literal[*POLICY_LOSSES]
AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k1_unbiased", "k2_unbiased", "k3_unbiased"]


@dataclass
class ModelArgs(Group):
    """The policy's model, and which of its weights train."""

    model: Annotated[str, FILES, Names.ROWS] = ""
    """Hugging Face id, folder, .gguf file or URL of the policy; empty: the embedded task"""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of forward and backward (weights are fp32); auto: bfloat16 on a GPU, else float32"""
    attn_implementation: Annotated[str, MAY_CHANGE] = "auto"
    """packed_sdpa, varlen (GPU, 16 bits), flash_attention_2; eager, sdpa: pad rows (docs/models.md)"""
    compile: Annotated[bool, MAY_CHANGE] = False
    """torch.compile the layers, for packed rows: the first steps take a minute longer"""
    use_liger_kernel: Annotated[bool, MAY_CHANGE] = True
    """on a GPU, fused norms, gated MLPs and rotary embedding, unless --compile fuses them"""
    share_prompts: Annotated[bool, MAY_CHANGE] = True
    """compute a prompt once for its group; needs packed_sdpa or varlen (docs/performance.md)"""
    routing_replay: Literal["none", "R2", "R3"] = "none"
    """MoE experts in the update: the router's, old_log_probs' (R2) or the engine's (R3)"""
    gradient_checkpointing: Annotated[Literal["auto", "on", "off"], SWITCH, MAY_CHANGE] = "auto"
    """recompute layers in the backward pass to save memory; auto: on a GPU as few as needed"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    lora_rank: Annotated[int, Ge(0)] = 0
    """train LoRA adapters of this rank; 0: train all weights (docs/recipes.md)"""
    lora_alpha: Annotated[float, Gt(0)] = 32.0
    """LoRA scale: the update of the adapters is multiplied by lora_alpha / lora_rank"""
    lora_target_modules: str = "all-linear"
    """layers that get adapters: all-linear, or a regular expression such as .*[qkvo]_proj"""
    freeze: str = ""
    """parameters not to train: vision, tower, projector or a regular expression of whole names"""

    auto_recomputed = 0.0  # no flag: what auto is here; lib.setup.choose_by_memory sets it

    @property
    def recomputed(self) -> float:
        """The share of the layers that the backward pass recomputes."""
        return {"on": 1.0, "off": 0.0}.get(self.gradient_checkpointing, self.auto_recomputed)

    @property
    def shares_prompts(self) -> bool:
        """Whether a model that supports it computes a prompt once for its group."""
        return self.share_prompts and self.attn_implementation in PACKED

    @property
    def fuses_layers(self) -> bool:
        """Whether a GPU gets fused kernels."""
        return self.use_liger_kernel and not self.compile

    def check(self) -> None:
        for flag, pattern in {"--freeze": self.freeze, "--lora-target-modules": self.lora_target_modules}.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise InputError(f"{flag} {pattern}: not a regular expression: {error}") from error


@dataclass
class ShardArgs(Group):
    """How models are split over ranks (docs/scaling.md)."""

    sharding: Annotated[Literal["auto", "fsdp2", "zero1"], MAY_CHANGE] = "auto"
    """zero1: split optimizer and fp32 weights; fsdp2: all of a model; auto: zero1 where it fits"""
    dp_replicate_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """copies of the model (HSDP), each split over its share of the ranks; 1: one over all ranks"""
    sequence_parallel_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """split each row's tokens over this many neighbouring ranks (Ulysses); needs packed_sdpa"""
    tensor_parallel_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """split each layer's weights over this many neighbouring ranks; needs vLLM"""
    reduce_each_micro_batch: Annotated[bool, MAY_CHANGE] = False
    """reduce gradients after each micro-batch: 1 / ranks of their memory, more communication"""
    cpu_offload: Annotated[tuple[Offloaded, ...], MAY_CHANGE] = ()
    """models kept in CPU memory, with AdamW; optimizer: Adam's moments; activations: the update's"""

    auto_sharding = ""  # no flag: what auto is here; lib.setup.check sets it

    @property
    def chosen(self) -> str:
        """zero1 or fsdp2; "" before it is chosen."""
        return self.auto_sharding if self.sharding == "auto" else self.sharding

    def needs_fsdp2(self) -> list[str]:
        """The flags given that only FSDP2 knows."""
        given = {
            "--dp-replicate-size": self.dp_replicate_size > 1,
            "--tensor-parallel-size": self.tensor_parallel_size > 1,
            "--reduce-each-micro-batch": self.reduce_each_micro_batch,
            "--cpu-offload of a model": bool({*self.cpu_offload} - {"activations", "optimizer"}),
        }
        return [flag for flag, is_given in given.items() if is_given]

    def check(self) -> None:
        if self.sharding == "zero1" and (flags := self.needs_fsdp2()):
            raise InputError(f"--sharding zero1 does not work with {flags[0]}: drop one of them")

    def parallel_sizes(self) -> dict[str, int]:
        """{flag: how many ranks compute the same rows together}."""
        return {name: getattr(self, name) for name in ("sequence_parallel_size", "tensor_parallel_size")}


@dataclass(frozen=True)
class AgentLimits:
    """The words of --agent-kwargs."""

    timeout: Annotated[float, Gt(0)] = 600.0
    memory: Annotated[int | None, Ge(1)] = None  # no limit
    ignore: tuple[str, ...] = ()


@dataclass
class RolloutArgs(Group):
    """How responses are sampled."""

    rollout_engine: Annotated[str, FILES] = "auto"
    """hf, vllm, a vLLM server's URL (several: a,b), your path/to/file.py:Class; auto: vllm on a GPU"""
    rollout_gpus: Annotated[int, Ge(0), MAY_CHANGE] = 0
    """reserve the last n ranks for vLLM servers"""
    rollout_tensor_parallel_size: Annotated[int, Ge(1), MAY_CHANGE] = 1
    """split a vLLM engine or server over this many ranks"""
    gpu_memory_utilization: Annotated[float | None, Interval(gt=0, lt=1), MAY_CHANGE] = None
    """share of a GPU's memory for vLLM; empty: 0.4, with --rollout-gpus 0.9"""
    vllm_kwargs: Annotated[str, MAY_CHANGE] = "{}"
    """JSON of more EngineArgs of vLLM, such as {"kv_cache_dtype": "fp8"} (docs/rollout_engines.md)"""
    max_mismatch: Annotated[float | None, Gt(0), MAY_CHANGE] = None
    """stop if k3 between engine and trainer exceeds this; empty: no limit, 0.1 if quantized"""
    agent: Annotated[str, AS_RECORDED, FILES] = ""
    """your agent, which speaks OpenAI's or Anthropic's API: path/to/file.py:function or a command"""
    agent_kwargs: tuple[str, ...] = ()
    """limits of an agent: timeout=600 (s) memory=2048 (MiB) ignore=temperature,top_p (docs/agents.md)"""
    async_level: Annotated[int, Ge(0)] = 0
    """on servers: how many steps old the weights of a rollout may be (docs/rollout_engines.md)"""
    async_order: Literal["prompts", "finished"] = "prompts"
    """train on the groups that started first, or that finished first (--async-level 2)"""
    max_response_length: Annotated[int, Ge(1), AS_RECORDED] = 2048
    """maximum number of response tokens; with --multi-turn or --agent, of a whole episode"""
    temperature: Annotated[float, Gt(0), AS_RECORDED] = 1.0
    """sampling temperature; the loss uses log-probs at this temperature, top_p, top_k and min_p"""
    top_p: Annotated[float, Interval(gt=0, le=1), AS_RECORDED] = 1.0
    """nucleus sampling: sample from the smallest set of tokens with this probability; 1: all"""
    top_k: Annotated[int, Ge(-1), AS_RECORDED] = -1
    """top-k sampling: sample from the k most likely tokens; -1: all tokens"""
    min_p: Annotated[float, Interval(ge=0, le=1), AS_RECORDED] = 0.0
    """sample from tokens with at least this share of the likeliest's probability; 0: all"""
    stop: Annotated[tuple[str, ...], AS_RECORDED] = ()
    r"""strings that end a response (\n is a line break); their tokens are trained like the others"""

    def check(self) -> None:
        if self.rollout_gpus and self.rollout_engine not in ("auto", "vllm"):
            ours, other = f"--rollout-gpus {self.rollout_gpus}", f"--rollout-engine {self.rollout_engine}"
            raise InputError(f"{ours} runs vLLM servers of this job's own, {other} is another engine: drop one")
        check_engine(self.allowed_engine, self.rollout_tensor_parallel_size)
        if "" in self.stop:
            raise InputError("--stop '': an empty string would end every response; give a text, or drop --stop")
        parse_json("vllm_kwargs", self.vllm_kwargs)
        if self.async_level and not self.on_servers:
            raise InputError(
                f"--async-level {self.async_level} needs --rollout-gpus or --rollout-engine http://host:port"
            )
        if self.async_order == "finished" and self.async_level < 2:
            raise InputError("--async-order finished: needs --async-level 2 or more: slow groups wait a step")

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
        stop = tuple(map(with_line_breaks, self.stop))
        tokens = Truncation(self.top_p, self.top_k, self.min_p)
        return Sampling(self.max_response_length, self.temperature, *tokens, stop=stop)

    @property
    def agent_limits(self) -> AgentLimits:
        return from_words("--agent-kwargs", self.agent_kwargs, AgentLimits)

    @property
    def engine_args(self) -> dict[str, Any]:
        settings = parse_json("vllm_kwargs", self.vllm_kwargs)
        return {name: value for name, value in settings.items() if name != "batch_invariant"}

    @property
    def batch_invariant(self) -> bool:
        """Whether --vllm-kwargs asks for vLLM's batch-invariant kernels."""
        return bool(parse_json("vllm_kwargs", self.vllm_kwargs).get("batch_invariant"))

    @property
    def quantization(self) -> str | None:
        return self.engine_args.get("quantization")

    @property
    def mismatch_limit(self) -> float:
        return self.max_mismatch or (0.1 if self.quantization else math.inf)

    @property
    def gpu_share(self) -> float:
        return self.gpu_memory_utilization or (0.9 if self.rollout_gpus else 0.4)


@dataclass
class RewardArgs(Group):
    """Scorers of responses and their limits."""

    reward: Annotated[tuple[str, ...], FILES, AS_RECORDED] = ("data_source",)
    """scorers, summed: data_source (by the row, in rewards/) or path/to/file.py:function"""
    reward_weights: Annotated[tuple[float, ...], Interval(ge=-1e4, le=1e4)] = ()
    """a weight for each scorer of --reward; empty: 1 each"""
    reward_kwargs: Annotated[str, AS_RECORDED] = "{}"
    """JSON of keyword arguments for every scorer, or {"file.function": {...}} for one"""
    shadow_reward: Annotated[tuple[str, ...], FILES, MAY_CHANGE] = ()
    """scorers as in --reward that are only logged, as shadow/<name>/..."""
    reward_workers: Annotated[int, Interval(ge=0, le=1024), MAY_CHANGE] = 2
    """worker processes per rank; 0: score in the training process, for breakpoint()"""
    reward_timeout: Annotated[float, Gt(0), MAY_CHANGE] = 30.0
    """timeout of a scorer for one response, in seconds"""
    reward_memory: Annotated[int, Ge(1), MAY_CHANGE] = 2048
    """memory limit of a scorer in MiB, beyond the memory of its imports"""
    sandbox_level: Annotated[Literal["namespaces", "landlock", "rlimits", "none"], MAY_CHANGE] = "namespaces"
    """weakest sandbox accepted for code that a model wrote (docs/security.md)"""
    reward_failure_score: Annotated[float | None, Interval(ge=-1e12, le=1e12)] = None
    """score if a scorer hangs, crashes or raises; empty: exclude the response"""
    reward_model: Annotated[str, FILES, AS_RECORDED] = ""
    """Hugging Face id or folder of a sequence classifier; its score is added to --reward's"""
    reward_model_coef: Annotated[float, Interval(ge=-1e4, le=1e4)] = 1.0
    """weight of the reward model's score"""

    def check(self) -> None:
        parse_json("reward_kwargs", self.reward_kwargs)
        check_scorers("--reward", self.reward)
        check_scorers("--shadow-reward", self.shadow_reward)
        if len(self.reward_weights) not in (0, len(self.reward)):
            sizes = f"{len(self.reward_weights)} numbers for the {len(self.reward)} scorers"
            raise InputError(f"--reward-weights has {sizes} of --reward")


@dataclass
class OptimizerArgs(Group):
    """Micro-batches and AdamW."""

    micro_batch_tokens: Annotated[int | Literal["auto"], Ge(1), MAY_CHANGE] = "auto"
    """maximum tokens of a rank's forward and backward pass; auto: 16384, more if a GPU has room"""
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

    auto_tokens = 16384  # no flag: what --micro-batch-tokens auto is here; lib.setup.choose_by_memory sets it

    @property
    def micro_batch_limit(self) -> int:
        """micro_batch_tokens, or what auto stands for."""
        return self.auto_tokens if self.micro_batch_tokens == "auto" else self.micro_batch_tokens


# ---- settings ----------------------------------------------------------------------------------


@dataclass
class MultiTurnArgs:
    """Episodes of several turns; they need tools or an interaction (docs/multi_turn.md)."""

    tools: Annotated[tuple[str, ...], AS_RECORDED, FILES] = ()
    """calculator, python, zoom, bash:FOLDER, search:FILE, mcp:COMMAND, path/to/file.py:name or YAML"""
    interaction: Annotated[str, FILES] = ""
    """reasoning_gym, openenv:URL, gym:path/to/file.py:Class, verifiers:NAME or path/to/file.py:Class"""
    parser: str = "auto"
    """tool-call format: auto (by the chat template), hermes, llama3_json, qwen3_coder, vllm:NAME"""
    max_turns: Annotated[int, Gt(0)] = 8
    """maximum number of policy turns in an episode"""
    max_tool_calls: Annotated[int, Gt(0)] = 4
    """maximum number of concurrent tool calls in a turn; further calls get an error"""
    max_turn_tokens: Annotated[int | None, Gt(0)] = None
    """maximum number of tokens of a turn; empty: the rest of the row"""
    context_window: Annotated[int | None, Gt(0)] = None
    """maximum number of tokens of a context and its turn; empty: as many as a row's"""
    compact_at: Annotated[int | None, Gt(0)] = None
    """before a turn whose context has more tokens, the policy writes a summary; empty: never"""
    compact_prompt: str = (
        "Summarize the conversation so far. You will go on from the first message, your summary and the next message: "
        "keep all that you need of the rest."
    )
    """the message that asks for the summary"""
    max_tool_output: Annotated[int, Gt(0)] = 2000
    """maximum number of characters in an answer of a tool or interaction"""
    truncate: Literal["left", "middle", "right"] = "middle"
    """where longer answers are truncated"""
    tool_timeout: Annotated[float, Gt(0)] = 30.0
    """timeout of a tool or interaction call, in seconds"""
    episode_timeout: Annotated[float | None, Gt(0)] = None
    """timeout of an episode in seconds; a longer one is not trained on"""
    reward_coef: Annotated[float, Interval(ge=-1e4, le=1e4)] = 1.0
    """weight of the rewards of tools and the interaction, added to the scorers'"""

    @property
    def enabled(self) -> bool:
        return bool(self.tools or self.interaction)


@dataclass
class RolloutCorrectionArgs:
    """How r = pi_old / pi_rollout corrects the loss (lib/core_algos/rollout_correction.py). Without any of these flags
    there is no correction, except with --async-level above 0 or LoRA in bfloat16 with vLLM: level token, bounds 0 2."""

    level: Literal["token", "sequence", "geometric", "measure"] | None = None
    """level of the importance weights; measure: metrics only. Default if another of these flags is given: token"""
    action: Literal["truncate", "mask"] | None = None
    """r outside the bounds: truncate to the bound (TIS), or mask with weight 0 (IcePop); truncate by default"""
    bounds: Bounds | None = None
    """bounds of the weights; 0 2 by default"""
    batch_normalize: bool | None = None
    """divide the weights by their mean"""
    reject: tuple[str, ...] = ()
    """criteria NAME=LIMIT, such as seq_mean_k1=0.99,1.01 token_k2=0.1: a token (token_...) or row (seq_...) that fails
    one is left out. k1: bounds on r; k2, k3: largest value; seq_sum, seq_mean, seq_max (docs/algorithms.md)"""

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of compute_rollout_correction; {} if none of these flags is given."""
        settings = {name: value for name, value in vars(self).items() if value not in (None, ())}
        if self.reject:
            flag = "--rollout-correction.reject"
            settings["reject"] = parsed(flag, read_words(flag, self.reject), CRITERIA)
        return settings | {"level": None} if self.level == "measure" else settings


def check_engine(name: str, ranks: int) -> None:
    """Raises InputError if there is no such engine or it cannot run here."""
    if ranks > 1 and name != "vllm":
        needs = "it needs --rollout-engine vllm (a server has its own --tensor-parallel-size)"
        raise InputError(f"--rollout-tensor-parallel-size {ranks} splits a vLLM engine: {needs}")
    urls = all(url.startswith(("http://", "https://")) for url in name.split(","))
    if not (name in ("hf", "vllm") or urls or ".py:" in name):
        known = "auto, hf, vllm, the URL of a vLLM server (http://host:port) or path/to/file.py:Class, your own engine"
        raise InputError(f"--rollout-engine {name}: must be {known}")


def check_scorers(flag: str, specs: tuple[str, ...]) -> None:
    """Raises InputError for a scorer of your own that cannot be loaded."""
    for spec in specs:
        if spec != "data_source":
            load_object(flag, spec)
