"""Splits the log-prob gap between rollout engine and trainer into its causes.

    python -m tools.mismatch --config runs/NAME/config.json                       samples a batch with the run's flags
    python -m tools.mismatch --config runs/NAME/config.json --replay kept         takes a recorded one (--record kept)

The engine's log-probs of a batch are computed again, by the engine itself with the recorded tokens forced on it. Then
one cause at a time is removed: dtype, kernels, batch composition, routing, staleness, sampling filters, tokenization,
LoRA rounding, KV-cache dtype, quantization. A cause accounts for what the gap loses without it. If the flags do not
reproduce the engine's log-probs, settings that a bug may have put in their place are tried. What no setting reproduces
is unexplained. See docs/diagnostics.md.
"""

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lib import InputError, setup
from lib.cli.flags import parse_flags
from lib.cli.process import command_line
from lib.data_proto import DataProto
from lib.distributed import full_tensor, iter_full_params, master_of
from lib.model import NEVER, add_lora, least_kept, load_model, load_tokenizer, log_probs_of
from lib.model.log_probs import batched_log_probs
from lib.rollout import Rollouts
from lib.rollout.group_cache import GroupLayer
from lib.rollout.hf_engine import HFEngine
from lib.rollout.replay import recorded_steps
from lib.run.run_config import read_json
from lib.sampling import Sampling
from tools.oracle import ROOT, load_script, run_quietly

VERSIONS = 4  # of the weights that are kept: those of the step and of three updates before
REPRODUCED = 0.1  # of the gap: if the engine's log-probs are found up to this, no other setting is tried
BETTER = 0.7  # another setting must lower what is not reproduced to this; by chance it would be 1.4
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass
class Args:
    """Flags of the command."""

    config: str
    """config.json of the run"""
    replay: str = ""
    """folder that --record wrote; empty: a batch is sampled with the run's engine"""
    step: int = 0
    """recorded step; the steps before it are replayed, so that its weights are those of the run; 0: the last one of the
    first three"""
    rows: int = 256
    """most responses to sample; a recorded step is taken whole"""
    flags: str = ""
    """further flags of the script, as --flags="--model runs/NAME/model" """
    script: str = ""
    """the script, or a copy of it; empty: the one of the config"""
    output: str = ""
    """folder for mismatch.json, mismatch.md and mismatch.png"""


@dataclass(frozen=True)
class Setting:
    """How the log-probs of the batch's tokens are computed: each field is a cause."""

    dtype: str
    kernels: str  # "trainer", or the engine: "hf", "vllm"
    batch: Literal["together", "alone"]  # the rows
    routing: Literal["own", "recorded"]
    weights: int | None  # version; None: of each token, as the batch says
    sampling: Sampling
    tokens: Literal["sampled", "re-encoded", "no special tokens"]
    lora: Literal["apart", "merged"]
    kv_cache: str
    quantization: str | None


CAUSES = {
    "dtype": "dtype",
    "kernels": "kernels",
    "batch": "batch composition",
    "routing": "routing",
    "weights": "staleness",
    "sampling": "sampling filters",
    "tokens": "tokenization",
    "lora": "LoRA rounding",
    "kv_cache": "KV-cache dtype",
    "quantization": "quantization",
}


@dataclass
class Gap:
    """|log π_train - log π_rollout| over the tokens of the batch, in nats; k3 = mean of r - 1 - log r."""

    mean: float
    k3: float
    max: float

    @classmethod
    def of(cls, difference: Tensor) -> "Gap":
        """difference (n,): log r, r = π_train / π_rollout."""
        x = difference.clamp(-20, 20)
        return cls(float(x.abs().mean()), float((torch.expm1(x) - x).mean()), float(difference.abs().max()))


@dataclass
class Row:
    cause: str
    engine: str
    trainer: str
    without: Gap | None = None  # None: not toggled
    share: float | None = None  # of the mean gap that goes away with the cause
    note: str = ""


@dataclass
class Report:
    step: int
    tokens: int
    gap: Gap
    rows: list[Row]
    unexplained: Gap
    share: float  # unexplained, of the mean gap
    notes: list[str] = field(default_factory=list)


class Batch:
    """A step's batch, and log-probs of its tokens under any Setting.

    version: of the trainer's weights. versions: {version: {name: weight}}, as it holds them. folder: for vLLM."""

    def __init__(self, args: Any, batch: DataProto, version: int, versions: dict[int, dict[str, Tensor]], folder: Path):
        self.args, self.batch, self.version, self.versions, self.folder = args, batch, version, versions, folder
        self.mask = batch.batch["response_mask"].bool()
        P = batch.batch["prompts"].shape[1]
        attended = batch.batch["attention_mask"].bool()
        rows = zip(batch.batch["input_ids"], attended)
        self.prompts = [ids[:P][own[:P]].tolist() for ids, own in rows]
        lengths = attended[:, P:].sum(1).tolist()
        self.responses = [ids[:n].tolist() for ids, n in zip(batch.batch["responses"], lengths)]
        self.tokenizer = load_tokenizer(args.model.model, trust_remote_code=args.model.trust_remote_code)
        self._kept: dict[Setting, Tensor] = {}
        self._engines: dict[Any, Any] = {}  # of vLLM, by what they were started with

    @cached_property
    def model(self) -> Any:
        """On which the weights of a setting are put. With LoRA they are apart."""
        own, compute = self.args.model, self.trainer.dtype
        trust = {"trust_remote_code": own.trust_remote_code}
        attention = setup.get_attention(own.attn_implementation, FLOATS[compute], self.device, own.model, **trust)
        model = load_model(
            own.model,
            attn_implementation=attention,
            share_prompts=own.share_prompts,
            **trust,
        )
        if own.lora_rank:
            more: dict[str, Any] = {"target_modules": own.lora_target_modules, "seed": self.args.run.seed}
            model = add_lora(model, rank=own.lora_rank, alpha=own.lora_alpha, **more)
        return model.to(self.device)  # requires_grad as in training: torch.matmul chooses kernels by it, too

    @property
    def device(self) -> torch.device:
        return self.batch.batch["responses"].device

    @cached_property
    def trainer(self) -> Setting:
        """By the flags."""
        dtype = setup.get_compute_dtype(self.args.model.compute_dtype, self.device)
        return Setting(
            dtype=str(dtype).removeprefix("torch."),
            kernels="trainer",
            batch="together",
            routing="recorded" if self.args.model.routing_replay == "R3" else "own",
            weights=self.version,
            sampling=self.args.rollout.sampling(),
            tokens="sampled",
            lora="apart",
            kv_cache="auto",
            quantization=None,
        )

    @cached_property
    def engine(self) -> Setting:
        """By the flags."""
        own = self.args.rollout
        kernels = "vllm" if (own.starts_vllm or own.on_servers) and has_vllm() else "hf"
        adapts = own.starts_vllm and own.engine_args.get("enable_lora", self.trainer.dtype != "float32")
        merged = self.args.model.lora_rank and (own.starts_vllm or own.on_servers) and not adapts
        return replace(
            self.trainer,
            kernels=kernels,
            weights=None if "weight_versions" in self.batch.batch else self.version,
            lora="merged" if merged else "apart",
            kv_cache=str(own.engine_args.get("kv_cache_dtype", "auto")),
            quantization=own.quantization,
        )

    def log_probs(self, setting: Setting) -> Tensor:
        """(B, T) in float64, meaningless where the mask is 0."""
        if setting not in self._kept:
            self._kept[setting] = self._log_probs(setting).double()
        return self._kept[setting]

    @torch.no_grad()
    def _log_probs(self, setting: Setting) -> Tensor:
        if setting.weights is None:
            of_token, found = self.batch.batch["weight_versions"], torch.zeros(self.mask.shape, dtype=torch.float64)
            for version in of_token[self.mask].unique().tolist():
                if version not in self.versions:
                    raise InputError(f"a token's weights are version {version}, which the replay does not reach")
                found = torch.where(of_token == version, self.log_probs(replace(setting, weights=version)), found)
            return found
        prompts, responses = self._tokens(setting.tokens)
        rows = [[i] for i in range(len(prompts))] if setting.batch == "alone" else [[*range(len(prompts))]]
        if setting.kernels == "vllm":
            of_rows = self._by_vllm(setting, prompts, responses, rows)
        else:
            self._set_weights(setting)
            run = self._by_trainer if setting.kernels == "trainer" else self._by_hf
            with rounded_cache(self.model, FP8.get(setting.kv_cache)):
                of_rows = [x for own in rows for x in run(setting, prompts, responses, own)]
        T = self.mask.shape[1]
        return torch.stack([F.pad(x.float(), (0, T - len(x))) for x in of_rows])

    def _tokens(self, kind: str) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and responses. A response stays as it is if its text has another number of tokens."""
        if kind == "sampled":
            return self.prompts, self.responses
        skip = kind == "no special tokens"
        prompts = [self.tokenizer.encode(self.tokenizer.decode(ids, skip_special_tokens=skip)) for ids in self.prompts]
        again = [self.tokenizer.encode(self.tokenizer.decode(ids), add_special_tokens=False) for ids in self.responses]
        return prompts, [new if len(new) == len(ids) else ids for new, ids in zip(again, self.responses)]

    def re_encoded(self) -> int:
        """Responses whose text has other tokens than were sampled."""
        texts = (self.tokenizer.decode(ids) for ids in self.responses)
        return sum(
            self.tokenizer.encode(text, add_special_tokens=False) != ids for text, ids in zip(texts, self.responses)
        )

    def _set_weights(self, setting: Setting, master: bool = False) -> None:
        """master: as the trainer holds them."""
        state, dtype = self.versions[setting.weights or 0], FLOATS[setting.dtype]
        parameters = dict(self.model.named_parameters())
        for name, p in parameters.items():
            p.data = state[name].to(self.device, copy=True)
        if master:
            return
        if setting.lora == "merged":
            merged = dict(iter_full_params(self.model, dtype, "merged"))
            for name, p in parameters.items():
                if ".lora_" not in name:
                    p.data = merged[name.replace(".base_layer.", ".")]
                elif ".lora_B." in name:
                    p.data = torch.zeros_like(p)
        for p in parameters.values():
            p.data = p.data.to(dtype)

    def _by_trainer(self, setting: Setting, prompts, responses, rows: list[int]) -> list[Tensor]:
        """The forward of the update, in its micro-batches."""
        batch = self.batch[rows] if setting.tokens == "sampled" else as_batch(prompts, responses, self.mask, rows)
        if setting.routing == "own":
            kept = [name for name in batch.non_tensor_batch if name != "routed_experts"]
            batch = batch.select(None, kept)
        s, limit = setting.sampling, self.args.optimizer.micro_batch_limit
        found = batched_log_probs(self.model, batch.to(self.device), s.temperature, limit, truncation=s.truncation)
        return list(found[0].cpu())

    def _by_hf(self, setting: Setting, prompts, responses, rows: list[int]) -> list[Tensor]:
        """The engine hf, which gets the tokens in place of those that it would sample."""
        make: Any = HFEngine
        engine = make(self.model, self.tokenizer)
        engine.stop_ids = engine.stop_ids[:0]
        limits = [len(responses[i]) for i in rows]
        forced = torch.zeros(len(prompts), max(1, *map(len, responses)), dtype=torch.long, device=self.device)
        for i in rows:
            forced[i, : len(responses[i])] = torch.tensor(responses[i])

        def take(logits, sampling, seeds, t):
            """sample_tokens, with the number of the row as its seed."""
            token = forced[seeds, t]
            z = logits.float() * (1 / sampling.temperature)
            z_y = z.gather(-1, token[:, None])
            if sampling.truncation is not None:  # what rounding leaves out of the set is in it, as in training
                z = z.masked_fill(z < torch.minimum(least_kept(z, *sampling.truncation), z_y), NEVER)
            return token, log_probs_of(z, token)

        with engine.session(), mock.patch("lib.rollout.hf_engine.sample_tokens", take):
            own = [prompts[i] for i in rows]
            found = engine._sample(own, [None] * len(rows), replace(setting.sampling, stop=()), rows, limits)
        return [torch.tensor(row.log_probs) for row in found]

    def _by_vllm(self, setting: Setting, prompts, responses, rows: list[list[int]]) -> list[Tensor]:
        """vLLM in this process: its kernels and its sampler, whose tokens are replaced."""
        from vllm.v1.sample.sampler import Sampler

        from lib.rollout.vllm_engine import generated, own_generators, request_params, vllm_settings

        engine, counts = self._vllm_engine(setting), [0] * len(prompts)
        self._set_weights(setting, master=True)
        engine.load_weights(self.model, setting.weights)
        sample = Sampler.sample

        def take(self, logits, metadata, *more, **named):
            sampled, log_probs = sample(self, logits, metadata, *more, **named)
            for place, generator in metadata.generators.items():
                row = generator.initial_seed()
                sampled[place] = responses[row][counts[row]]
                counts[row] += 1
            return sampled, log_probs

        found: list[Tensor] = []
        for own in rows:
            sampling = replace(setting.sampling, stop=())
            limits = [replace(sampling, max_response_length=len(responses[i])) for i in own]
            params = [request_params(ignore_eos=True, **vllm_settings(one, i)) for one, i in zip(limits, own)]
            given = [{"prompt_token_ids": prompts[i]} for i in own]
            with mock.patch.object(Sampler, "sample", take), own_generators(self.device):
                outputs = engine.llm.generate(given, params, use_tqdm=False, lora_request=engine._lora)
            found += [torch.tensor(generated(output).log_probs) for output in outputs]
        return found

    def _vllm_engine(self, setting: Setting) -> Any:
        """On a GPU the others sleep."""
        from lib.rollout.vllm_engine import VLLMEngine

        wanted = of_vllm(setting)
        for engine in self._engines.values():
            engine.sleep()
        if wanted not in self._engines:
            more = self.args.rollout.engine_args | {
                "kv_cache_dtype": setting.kv_cache,
                "quantization": setting.quantization,
                "enable_lora": setting.lora != "merged",
            }
            self._engines[wanted] = VLLMEngine(
                self.model,
                self.tokenizer,
                folder=self.folder / f"vllm_{len(self._engines)}",
                dtype=FLOATS[setting.dtype],
                more={name: value for name, value in more.items() if value not in ("auto", None)},
                max_length=max(len(p) + len(r) for p, r in zip(self.prompts, self.responses)) + 8,
                gpu_memory=self.args.rollout.gpu_share,
                rows=max(256, len(self.prompts)),
            )
        return self._engines[wanted]

    def take_over(self, engine: Any) -> None:
        """The engine of the run, if it is vLLM in this process."""
        if self.engine.kernels == "vllm" and hasattr(engine, "llm"):
            self._engines[of_vllm(self.engine)] = engine

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def of_vllm(setting: Setting) -> tuple:
    """What an engine of vLLM is started with."""
    return setting.dtype, setting.kv_cache, setting.quantization, setting.lora


def has_vllm() -> bool:
    try:
        import vllm  # noqa: F401
    except ImportError:
        return False
    return True


def as_batch(prompts: list[list[int]], responses: list[list[int]], mask: Tensor, rows: list[int]) -> DataProto:
    """These rows as a batch: prompts padded on the left, responses on the right."""
    P, T = max(len(prompts[i]) for i in rows), mask.shape[1]
    ids = [F.pad(torch.tensor(prompts[i] + responses[i]), (P - len(prompts[i]), T - len(responses[i]))) for i in rows]
    column = torch.arange(P + T)
    first = P - torch.tensor([len(prompts[i]) for i in rows])[:, None]
    end = P + torch.tensor([len(responses[i]) for i in rows])[:, None]
    tensors = {"input_ids": torch.stack(ids), "position_ids": (column - first).clamp(min=0)}
    tensors |= {"attention_mask": ((column >= first) & (column < end)).long(), "responses": tensors["input_ids"][:, P:]}
    return DataProto.from_dict(tensors | {"response_mask": mask[rows].long().cpu()})


@contextlib.contextmanager
def rounded_cache(model: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """In it, keys and values are rounded to `dtype` as a KV cache of this dtype would, with a scale of 1: the cached
    ones of an engine, and all that a forward without a cache attends to."""
    if dtype is None:
        yield
        return

    def rounded(x: Tensor) -> Tensor:
        largest = torch.finfo(dtype).max
        return x.clamp(-largest, largest).to(dtype).to(x.dtype)

    def on_write(update: Callable) -> Callable:
        return lambda self, keys, values, *more, **named: update(self, rounded(keys), rounded(values), *more, **named)

    name = model.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def on_read(module, query, key, value, *more, **named):
        cached = named.get("group_cache") is not None or query.shape[2] != key.shape[2]
        return attend(module, query, *((key, value) if cached else (rounded(key), rounded(value))), *more, **named)

    with contextlib.ExitStack() as stack:
        for layer in (DynamicLayer, DynamicSlidingWindowLayer, GroupLayer):
            stack.enter_context(mock.patch.object(layer, "update", on_write(layer.update)))
        ALL_ATTENTION_FUNCTIONS.register(name, on_read)
        stack.callback(ALL_ATTENTION_FUNCTIONS.register, name, attend)
        yield


# ---------------------------------------------------------------------------------------- the split


def split(batch: Batch, step: int) -> Report:
    """Measures the gap, and removes one cause at a time."""
    recorded, trained = batch.batch.batch["rollout_log_probs"].double().cpu(), batch.log_probs(batch.trainer)
    mask, notes = batch.mask.cpu(), list[str]()
    gap = Gap.of((trained - recorded)[mask])
    engine = identify(batch, recorded, gap, notes)
    left = batch.log_probs(engine) - recorded  # what the setting does not reproduce
    finite = mask & left.isfinite()
    unexplained = Gap.of(left[finite])
    rows = []
    for name, cause in CAUSES.items():
        row = Row(cause, shown(getattr(engine, name), engine), shown(getattr(batch.trainer, name), batch.trainer))
        rows.append(row)
        pair = agreeing(name, engine, batch.trainer)
        row.note = why_not(name, batch, engine) or ("" if pair else "the same on both sides")
        if pair is None or row.note:
            continue
        try:
            other, own = (batch.log_probs(setting) for setting in pair)
        except InputError as error:
            row.note = str(error)
            continue
        difference = (own - other) + left
        finite = mask & difference.isfinite()
        row.without = Gap.of(difference[finite])
        row.share = share_of(gap.mean - row.without.mean, gap.mean)
        if dropped := int((mask & ~finite).sum()):
            row.note = f"without {dropped} tokens that the engine would not have sampled"
    if changed := batch.re_encoded():
        notes.append(f"{changed} of {len(mask)} responses would have other tokens if their text was encoded again")
    share = share_of(unexplained.mean, gap.mean)
    return Report(step, int(mask.sum()), gap, rows, unexplained, share, notes)


def share_of(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def agreeing(name: str, engine: Setting, trainer: Setting) -> tuple[Setting, Setting] | None:
    """(engine, trainer) that agree on this cause; None if they do already, and removing it needs both to change."""
    if name == "batch" and engine.batch == trainer.batch:
        return replace(engine, batch="alone"), replace(trainer, batch="alone")
    if name == "dtype" and not engine.dtype == trainer.dtype == "float32":
        return replace(engine, dtype="float32"), replace(trainer, dtype="float32")
    if name == "routing" and trainer.routing == "own":
        return engine, replace(trainer, routing="recorded")  # which are the engine's
    if getattr(engine, name) == getattr(trainer, name):
        return None
    return replace(engine, **{name: getattr(trainer, name)}), trainer


def why_not(name: str, batch: Batch, engine: Setting) -> str:
    """Why the cause cannot be toggled, or ""."""
    own = batch.args
    if name == "routing":
        config = batch.model.config.get_text_config()
        if not any(getattr(config, key, None) for key in EXPERTS):
            return "the model has no experts"
        if "routed_experts" not in batch.batch.non_tensor_batch:
            return "not toggled: the batch has no routes of the engine"
    if name == "dtype" and engine.kernels == "vllm" and engine.quantization:
        return "not toggled: vLLM quantizes no float32"  # and without quantization, this would remove two causes
    if name == "lora" and not own.model.lora_rank:
        return "the run has no adapters"
    if name == "weights" and len(batch.versions) == 1:
        return "the weights of no earlier step are known" if engine.weights is None else "the same on both sides"
    return ""


def shown(value: Any, setting: Setting) -> str:
    if isinstance(value, Sampling):
        parts = {"temperature": value.temperature, "top_p": value.top_p, "top_k": value.top_k, "min_p": value.min_p}
        plain = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
        return ", ".join(f"{name} {v:g}" for name, v in parts.items() if v != plain.get(name))
    if value is None:
        return "none" if setting.weights is not None else "of each token"
    return f"version {value}" if isinstance(value, int) else str(value)


def identify(batch: Batch, recorded: Tensor, gap: Gap, notes: list[str]) -> Setting:
    """The engine's setting: that of the flags, or one that reproduces the recorded log-probs better."""

    def left(setting: Setting) -> float:
        difference = (batch.log_probs(setting) - recorded)[batch.mask.cpu()]
        return float(difference.nan_to_num(nan=20.0).clamp(-20, 20).abs().mean())

    engine = batch.engine
    own = batch.args.rollout
    if engine.kernels == "hf" and own.engine != "hf":
        notes.append(f"--rollout-engine {own.engine} cannot run here: its kernels are those of hf instead")
    if own.on_servers and engine.kernels == "vllm":
        notes.append("the servers are not asked: vLLM in this process computes in their place")
    now = left(engine)
    while now > REPRODUCED * gap.mean:
        found = {setting: left(setting) for setting in alternatives(batch, engine)}
        best = min(found, key=found.__getitem__)
        if found[best] > BETTER * now:
            break
        for name, cause in CAUSES.items():
            if getattr(best, name) != getattr(engine, name):
                was, is_now = shown(getattr(engine, name), engine), shown(getattr(best, name), best)
                notes.append(f"{cause}: the engine's log-probs are those of {is_now}; by the flags it is {was}")
        engine, now = best, found[best]
    return engine


def alternatives(batch: Batch, engine: Setting) -> list[Setting]:
    """Settings with one field that differs. In vLLM a dtype is what it was started with."""
    s, found = engine.sampling, []
    plain: dict[str, Any] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    found += [replace(engine, weights=version) for version in batch.versions]
    found += [replace(engine, batch=kind) for kind in ("together", "alone")]
    filters: tuple[dict[str, Any], ...] = (plain, {"temperature": 1.0}, plain | {"temperature": 1.0})
    found += [replace(engine, sampling=replace(s, **other)) for other in filters]
    found += [replace(engine, tokens=kind) for kind in ("re-encoded", "no special tokens")]
    if batch.args.model.lora_rank and engine.kernels == "hf":
        found += [replace(engine, lora=kind) for kind in ("apart", "merged")]
    if engine.kernels == "hf":
        found += [replace(engine, dtype=name) for name in ("float32", "bfloat16", "float16")]
        found += [replace(engine, kv_cache=name) for name in ("auto", "fp8_e4m3", "fp8_e5m2")]
    return [setting for setting in dict.fromkeys(found) if setting != engine]


# ---------------------------------------------------------------------------------------- the batch


class _Taken(Exception):
    """The batch has been looked at."""


def measure(args: Args) -> Report:
    """Runs the script up to the step's log-probs. Raises InputError."""
    config = read_json(Path(args.config))
    if config is None:
        raise InputError(f"--config {args.config}: no such file: give config.json in the folder of a run")
    if not isinstance(config.get("script"), str):
        raise InputError(f"--config {args.config}: it names no script: give config.json in the folder of a run")
    script = load_script(args.script or str(ROOT / Path(config["script"]).name))
    step, more = args.step or 1, ["--record", "", "--resume", "never"]
    if args.replay:
        check_recording(Path(args.replay), config)
        steps = recorded_steps(Path(args.replay))
        step = args.step or max([s for s in steps if s <= 3], default=1)
        more += ["--replay", args.replay]
    else:
        more += ["--replay", "", "--num-mini-batches", "1"]
        more += ["--prompts-per-step", str(max(1, args.rows // max(1, int(config.get("group_size", 1)))))]
    if engine := config.get("effective", {}).get("rollout_engine"):
        more += ["--rollout-engine", engine]  # auto was chosen on the run's machine
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--output-dir", folder, "--run-name", "mismatch", "--val-files", "none", "--save-every", "0"]
        quiet += ["--no-export-model", "--save-rollouts", "0", "--stage-timeout", "0", "--val-every", "0", "--track"]
        quiet += ["--total-steps", str(step), "--keep-best", "", "--stop-when", "", "--reward-workers", "0"]
        own = parse_flags(script.Args, ["--config", args.config, *more, *quiet, *shlex.split(args.flags)])
        return _look(script, own, step, bool(args.replay), Path(folder))


def _look(script: Any, args: Any, step: int, replayed: bool, folder: Path) -> Report:
    versions: dict[int, dict[str, Tensor]] = {}
    reports: list[Report] = []
    sync, balanced, engines = Rollouts.sync, Rollouts.balanced, list[Any]()

    def keep(self, actor, version):
        metrics = sync(self, actor, version)
        engines[:] = [self.engine]
        masters = [(name, master_of(actor.module, p)) for name, p in actor.module.named_parameters()]
        weights = {name: full_tensor(p.detach()).to("cpu", copy=True) for name, p in masters}
        versions[version] = weights
        for old in sorted(versions)[:-VERSIONS]:
            del versions[old]
        return metrics

    def look(self, actor, batch, *others):
        """In place of Rollouts.balanced: the rows are still in the engine's order."""
        version = max(versions)
        if replayed and version + 1 < step:
            return balanced(self, actor, batch, *others)
        if "multi_modal_inputs" in batch.non_tensor_batch:
            raise InputError("batches with images are not supported: take rows of text")
        if any(len(own) > 1 for own in batch.non_tensor_batch.get("segments", ())):
            raise InputError("responses with several contexts (--multi-turn.compact-at) are not supported")
        of_batch = Batch(args, batch, version, versions, folder)
        of_batch.take_over(engines[0])
        try:
            reports.append(split(of_batch, version + 1))
        finally:
            of_batch.close()
        raise _Taken

    with mock.patch.object(Rollouts, "sync", keep), mock.patch.object(Rollouts, "balanced", look):
        run_quietly(script, args, _Taken)
    if not reports:
        raise InputError("the script ended before its first log-probs: is it a training run?")
    return reports[0]


def check_recording(folder: Path, config: dict[str, Any]) -> None:
    """Raises InputError unless it is one of the same model."""
    recorded = read_json(folder / "config.json")
    if recorded is None:
        raise InputError(f"--replay {folder}: no config.json there; give the folder of a run with --record")
    for name in ("model", "script"):
        if recorded.get(name) != config.get(name):
            what = f"was recorded with {name} {recorded.get(name)!r}, the config has {config.get(name)!r}"
            raise InputError(f"--replay {folder}: {what}: give --config {folder}/config.json")


# ---------------------------------------------------------------------------------------- what is shown


def markdown(report: Report) -> str:
    """The table."""
    text = f"Step {report.step}, {report.tokens} tokens: log π_train - log π_rollout, in nats\n\n"
    text += _cells("", "engine", "trainer", "mean abs", "k3", "max abs", "share of the gap")
    text += "|---" * 7 + "|\n" + _cells("measured", "", "", *_numbers(report.gap), "")
    for row in report.rows:
        last = row.note if row.share is None else f"{row.share:.0%}" + (f" ({row.note})" if row.note else "")
        numbers = _numbers(row.without) if row.without else ("", "", "")
        text += _cells(f"without {row.cause}", row.engine, row.trainer, *numbers, last)
    text += _cells("unexplained", "", "", *_numbers(report.unexplained), f"{report.share:.0%}")
    return text + "".join(f"\n- {note}" for note in report.notes) + "\n" * bool(report.notes)


def _numbers(gap: Gap) -> tuple[str, str, str]:
    return f"{gap.mean:.3g}", f"{gap.k3:.3g}", f"{gap.max:.3g}"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def draw(report: Report, file: Path) -> None:
    """The share of each cause that was toggled."""
    from matplotlib.figure import Figure  # slow to import

    shares = {row.cause: row.share for row in report.rows if row.share is not None} | {"unexplained": report.share}
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(shares)), dpi=80, layout="constrained")
    axes = figure.subplots()
    colors = ["tab:blue"] * (len(shares) - 1) + ["tab:gray"]
    bars = axes.barh([*shares], [100 * max(share, -0.5) for share in shares.values()], color=colors)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares.values()], padding=3)
    left = -70 if min(shares.values()) < 0 else 0  # with room for the label
    axes.set(xlabel="% of the mean gap that goes away without the cause", xlim=(left, 115))
    axes.set_title(f"mean |log-prob difference| {report.gap.mean:.3g} nats, k3 {report.gap.k3:.3g}")
    axes.invert_yaxis()
    figure.savefig(file)


def write(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT, capture_output=True)
    record: dict[str, Any] = {"command": shlex.join(["python", "-m", "tools.mismatch", *sys.argv[1:]])}
    record |= {"commit": commit.stdout.decode().strip(), **asdict(report)}
    (folder / "mismatch.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "mismatch.md").write_text(markdown(report))
    draw(report, folder / "mismatch.png")


def main(args: Args) -> None:
    if args.step < 0 or args.rows < 1:
        raise InputError("--step must be at least 0, and --rows at least 1")
    report = measure(args)
    print(markdown(report))
    if args.output:
        write(report, Path(args.output))


if __name__ == "__main__":
    with command_line():
        main(tyro.cli(Args, prog="python -m tools.mismatch", description=__doc__))
