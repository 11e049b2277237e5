"""The engine `vllm`: vLLM inside this process."""

import copy
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from difflib import get_close_matches
from hashlib import sha256
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any, get_args
from uuid import uuid4

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, ProcessorMixin

from lib import InputError, is_first_on_node
from lib.data.vision import Media, media_of
from lib.data_proto import DataProto
from lib.distributed import all_gather_lists, broadcast, compute_device, new_cpu_subgroup
from lib.model.vision import family_of
from lib.rollout.engine import Generated, SteppedEngine, add_responses, check_expanded, stop_token_ids
from lib.rollout.weight_sync import CheckedStream, UnsupportedAdapter, WeightSyncError
from lib.sampling import Sampling
from lib.seeds import seeded

# settings of vLLM: the flag that sets each
BY_FLAG = {"model": "--model", "tokenizer": "--model", "dtype": "--compute-dtype", "seed": "--seed"}
BY_FLAG |= {"max_model_len": "--max-prompt-length, --max-response-length and --multi-turn.context-window"}
BY_FLAG |= {"limit_mm_per_prompt": "--vision-kwargs max_images"}
BY_FLAG |= {"max_lora_rank": "--lora-rank"}
BY_FLAG["enable_return_routed_experts"] = "--routing-replay"
BY_FLAG["gpu_memory_utilization"] = "--gpu-memory-utilization"
BY_FLAG["tensor_parallel_size"] = "--rollout-tensor-parallel-size"
FIXED = ["load_format", "generation_config", "override_generation_config", "logprobs_mode", "weight_transfer_config"]
FIXED += ["worker_extension_cls", "distributed_executor_backend", "enable_sleep_mode", "data_parallel_size"]
FIXED += ["pipeline_parallel_size", "max_loras"]
TAKE_MERGED = 'take --vllm-kwargs {"enable_lora": false}'
CACHED_S = 30 * 86400.0  # how long files of an engine stay in the cache after their last use


def check_vllm_kwargs(settings: Mapping[str, Any], known: list[str]) -> None:
    """known: the names that vLLM's EngineArgs have. Raises InputError for others, and for what is set here."""
    for name in settings:
        if name not in known:
            near = "".join(f"; {near}?" for near in get_close_matches(name, known, 1))
            raise InputError(f"--vllm-kwargs {name}: vLLM has no such setting{near}")
        if name in BY_FLAG:
            raise InputError(f"--vllm-kwargs {name}: set it by {BY_FLAG[name]}")
        if name in FIXED:
            raise InputError(f"--vllm-kwargs {name}: training depends on the value that it has here")


def save_files(folder: Path, model: PreTrainedModel, tokenizer, processor: ProcessorMixin | None) -> None:
    """The folder from which a vLLM engine starts: all but weights."""
    config = copy.deepcopy(model.config)
    # vLLM asks the language part, transformers the whole. A head that is not tied there has weights that no sync gives
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings
    config.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def cached(folder: Path) -> Path:
    """A folder with the same files, whose path depends on nothing but them: vLLM looks up what it has compiled by the
    model's path, and compiles for 20 to 60 s where that is new. It is in the user's cache, for CACHED_S after its last
    use; `folder` itself where the cache cannot be written. The files are no weights, so they are copied."""
    name = _content_hash(folder)
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "plainrl", "engines")
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if cache.stat().st_uid != os.getuid():
            raise PermissionError(f"{cache} belongs to another user")  # who could exchange what is in it
        if not (cache / name).exists():
            with TemporaryDirectory(dir=cache) as aside:
                made = shutil.copytree(folder, Path(aside, name))
                with suppress(OSError):  # another process was first
                    made.rename(cache / name)
        if _content_hash(cache / name) != name:
            raise FileNotFoundError(f"{cache / name} is damaged: delete it")
        os.utime(cache / name)
        for other in cache.iterdir():
            with suppress(FileNotFoundError):  # another process deletes, too
                if other.stat().st_mtime < time.time() - CACHED_S:
                    shutil.rmtree(other, ignore_errors=True)
    except (OSError, RuntimeError) as error:  # the latter: there is no home
        if is_first_on_node():
            why = shorten(str(error), 200, placeholder=" ...")
            print(f"note: vLLM compiles anew, because the model's files are not in a cache: {why}", flush=True)
        return folder
    return cache / name


def _content_hash(folder: Path) -> str:
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    hashes = {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    return sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]


def engine_settings(
    model, *, max_length: int, dtype: torch.dtype, gpu_memory: float, ranks=1, rows=256, processor=None, max_images=0
) -> dict[str, Any]:
    """What every vLLM engine of a run is started with, by the names of EngineArgs. For the parameters see make_engine.
    Raises InputError if the model cannot be split over the ranks, or if vLLM would compute prompts with images
    otherwise than training."""
    on_gpu = compute_device(model).type != "cpu"
    heads = model.config.get_text_config().num_attention_heads
    if heads % ranks:
        why = f"the model's {heads} attention heads must be a multiple of it"
        raise InputError(f"--rollout-tensor-parallel-size {ranks}: {why}")
    if processor is not None and family_of(model.config).bidirectional and not on_gpu:
        why = "the tokens of an image see each other in this model, in vLLM on a CPU only those before"
        raise InputError(f"--rollout-engine vllm: {why}: take hf")
    settings: dict[str, Any] = {"load_format": "dummy", "seed": 0, "tensor_parallel_size": ranks}
    settings["dtype"] = str(dtype).removeprefix("torch.")
    settings["max_model_len"] = max(max_length, 33)  # the probe of sync_weights has 32 tokens and samples one
    settings["generation_config"] = "vllm"  # the model's own would change requests
    settings["logprobs_mode"] = "processed_logprobs"  # at the sampling temperature, after top-p, top-k and min-p
    if max_images:
        settings["limit_mm_per_prompt"] = {"image": max_images, "video": max_images}
        settings["mm_device_do_normalize"] = False  # its buffers are among the weights that "dummy" makes random
    if on_gpu:
        return settings | {"gpu_memory_utilization": gpu_memory, "max_num_seqs": rows}
    settings["max_num_seqs"] = 512  # a step of a tiny model costs the scheduler's time, not that of its rows
    # seeded requests and chunked prefill crash on a CPU
    return settings | {"kv_cache_memory_bytes": 1 << 30, "enable_chunked_prefill": False, "enforce_eager": True}


def adapter_settings(model: PreTrainedModel) -> dict[str, Any]:
    """With which vLLM samples with the model's LoRA adapter. Raises UnsupportedAdapter if it cannot."""
    from vllm.config.lora import MaxLoRARanks
    from vllm.model_executor.models import ModelRegistry, supports_lora

    rank, ranks = model.peft_config["default"].r, get_args(MaxLoRARanks)
    if rank > max(ranks):
        raise UnsupportedAdapter(f"--lora-rank {rank}: vLLM takes adapters up to {max(ranks)}: {TAKE_MERGED}")
    known = ModelRegistry.models.get(name := model.config.architectures[0])
    if known is None or not supports_lora(known.load_model_cls()):
        raise UnsupportedAdapter(f"vLLM has no LoRA for {name}: {TAKE_MERGED}")
    return {"enable_lora": True, "max_lora_rank": min(r for r in ranks if r >= rank), "max_loras": 1}


class VLLMEngine(SteppedEngine):
    """A vLLM engine inside this process, on CPU or GPU, which takes weights in memory. It starts with dummy weights,
    from a folder that holds only config and tokenizer. A generate before the first load_weights is refused.

    `ranks` neighbouring ranks share one engine, split by tensor parallelism. Each has its own requests, but vLLM needs
    the same requests in the same order on all of them: generate, step and the end of a session are their collectives.

    more: further settings of vLLM, which check_vllm_kwargs has seen. lora_sync: auto, adapter or merged. start: of
    engine_settings. Raises InputError as engine_settings, or if vLLM refuses a setting; UnsupportedAdapter if lora_sync
    is "adapter"."""

    takes_images = takes_adapters = gives_routes = True
    long_steps = False  # a step is one token; requests come and go at each step

    def __init__(
        self, model, tokenizer, *, folder: Path, dtype, ranks=1, processor=None, more=None, lora_sync="merged", **start
    ):
        self._device = compute_device(model)
        on_gpu = self._device.type != "cpu"
        settings = engine_settings(model, dtype=dtype, ranks=ranks, processor=processor, **start)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and trainer share tensors by reference
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if not on_gpu:
            _prepare_for_cpu(name := broadcast(f"plainrl-{uuid4().hex}"))
        import vllm

        from lib.rollout import vllm_weights  # noqa: F401  the import registers the backend

        if is_first_on_node():  # nodes may not share the disk
            save_files(folder, model, tokenizer, processor)
        dist.barrier()
        settings |= {"enable_sleep_mode": on_gpu, "weight_transfer_config": {"backend": "direct"}}
        if several := dist.get_world_size() > 1:
            settings["distributed_executor_backend"] = "external_launcher"
        settings |= (more or {}) | self._lora_settings(model, lora_sync)
        try:
            with own_generators(self._device), seeded("vllm"), _groups_of_one():  # vLLM seeds the global ones
                self.llm = vllm.LLM(str(folder if settings.get("enforce_eager") else cached(folder)), **settings)
        except (ValueError, TypeError) as error:
            if not more:
                raise
            raise InputError(f"--vllm-kwargs {json.dumps(dict(more))}: vLLM refuses them: {error}") from error
        self.llm.init_weight_transfer_engine({"init_info": {}})
        if several and not on_gpu:
            dist.barrier()  # all ranks have it open: whatever ends the run leaves none behind
            for file in Path("/dev/shm").glob(f"{name}-*"):
                file.unlink(missing_ok=True)
        self.dtype, self.pad_token_id, self.can_sleep = dtype, tokenizer.pad_token_id, on_gpu
        self.stop_ids, self.max_length = stop_token_ids(model, tokenizer), start["max_length"]
        self.shared = ranks > 1
        self._ranks = new_cpu_subgroup(ranks) if self.shared else None
        self._place = dist.get_rank() % ranks
        self._submitted: dict[str, tuple] = {}  # (prompt, sampling, seed) of requests that begin at the next step
        self._aborted: list[str] = []
        self._running: dict[str, Media | None] = {}
        self._base: int | None = None  # the checksum of the weights below an adapter
        self._adapters = count(1)
        self._lora: Any = None  # the LoRARequest of each request
        self.sleep()

    def _lora_settings(self, model: PreTrainedModel, lora_sync: str) -> dict[str, Any]:
        if getattr(model, "peft_config", None) is None or lora_sync == "merged":
            return {}
        try:
            settings, self.lora_sync = adapter_settings(model), lora_sync
        except UnsupportedAdapter as error:
            if lora_sync == "adapter":
                raise
            if is_first_on_node():
                print(f"LoRA: vLLM gets merged weights: {error}", flush=True)
            return {}
        return settings

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """Streams the trainer's weights into the engine, one whole tensor at a time; those below an adapter once. A
        collective. Raises UnsupportedAdapter."""
        self._finish_steps()
        if self.can_sleep:
            self.llm.wake_up(["weights"])  # the KV cache wakes later: it and the update's memory never add up
        merged = self.lora_sync == "merged"
        if merged or self._base is None:
            stream = CheckedStream(model, self.dtype, "merged" if merged else "base")
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"weights": stream}})
            self.llm.finish_weight_update(weight_version=str(version))
            self._base, self._lora, checksum = None if merged else stream.checksum, None, stream.checksum
        if not merged:
            checksum = (self._base + self._load_adapter(model)) % (1 << 64)
        if not self.llm.reset_prefix_cache():  # cached prefixes hold keys and values of the old weights
            raise WeightSyncError(f"version {version}: vLLM kept its prefix cache because requests are in flight")
        self.llm.llm_engine.reset_encoder_cache()  # features of images, by the old weights
        self.version, self.checksum = version, checksum
        if self.can_sleep:
            self.llm.wake_up(["kv_cache"])

    def _load_adapter(self, model: PreTrainedModel) -> int:
        """Gives vLLM the adapter as a new one. Returns its checksum."""
        from vllm.lora.request import LoRARequest

        from lib.rollout.vllm_weights import load_adapter

        stream = CheckedStream(model, self.dtype, "adapter")
        config, number = model.peft_config["default"], next(self._adapters)
        try:
            self.llm.collective_rpc(load_adapter, args=(dict(stream), config.r, config.lora_alpha, number))
        except ValueError as error:
            raise UnsupportedAdapter(f"{error}: {TAKE_MERGED}") from error
        self._lora = LoRARequest(f"adapter-{number}", number, "in memory")
        return stream.checksum

    def probe_log_probs(self, ids: list[int], media: Media | None = None) -> torch.Tensor:
        [out] = self._run([_prompt(ids, media)], [self._params(1, temperature=1.0, prompt_logprobs=0)])
        out = _checked(out, media)
        return torch.tensor([lp[token].logprob for token, lp in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:])])

    def sleep(self) -> None:
        """On a GPU, frees weights and KV cache. Weights below an adapter stay in CPU memory."""
        if self.can_sleep:
            self._finish_steps()
            self.llm.sleep(level=2 if self._base is None else 1)
            self.version = self.checksum = None

    def _finish_steps(self) -> None:
        """On a GPU vLLM starts a step before it has read the one before. So one more is running when the last request
        has ended: with weights and memory that go away, and with experts that vLLM would keep for the next requests."""
        core: Any = self.llm.llm_engine.engine_core
        while core.engine_core.batch_queue:
            self.llm.llm_engine.step()

    def close(self) -> None:
        if self.can_sleep and self.version is None:
            self.llm.wake_up()  # vLLM would free again what it has freed to sleep, an error on NVIDIA GPUs
        self.llm.llm_engine.engine_core.shutdown()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Inside it submit, step and abort may be called."""
        self._check_weights()
        with own_generators(self._device):
            try:
                yield
            finally:
                for request_id in [*self._running]:
                    self.abort(request_id)
                while not self._step(leaving=True)[1]:  # other ranks of this engine may still have requests
                    pass

    def submit(self, request_id: str, prompt_ids, sampling: Sampling, seed: int, media: Media | None = None) -> None:
        """Raises ValueError when the prompt is too long for the engine."""
        length = len(media.ids if media else prompt_ids)
        if length >= self.max_length:
            raise ValueError(f"a prompt of {length} tokens; the engine's longest row is {self.max_length}")
        self._submitted[request_id] = (_prompt(prompt_ids, media), sampling, seed)
        self._running[request_id] = media

    def abort(self, request_id: str) -> None:
        if self._submitted.pop(request_id, None) is None:
            self._aborted.append(request_id)
        else:
            del self._running[request_id]

    def step(self) -> dict[str, Generated]:
        """Runs one token, or the prefill, of the running requests. Returns those that ended."""
        return self._step(leaving=False)[0]

    def _step(self, leaving: bool) -> tuple[dict[str, Generated], bool]:
        """(this rank's requests that ended, whether every rank of the engine is leaving its session)."""
        engine = self.llm.llm_engine
        everyones = self._exchange((self._submitted, self._aborted, leaving))
        for request_id in self._aborted:
            self._running.pop(request_id, None)
        self._submitted, self._aborted = {}, []
        for place, (submitted, aborted, _) in enumerate(everyones):
            engine.abort_request([f"{place} {request_id}" for request_id in aborted])
            for request_id, (prompt, sampling, seed) in submitted.items():
                params = self._params(**vllm_settings(sampling, seed))
                engine.add_request(f"{place} {request_id}", prompt, params, lora_request=self._lora)
        ended = {out.request_id: out for out in engine.step() if out.finished}
        mine = {name: ended[full] for name in self._running if (full := f"{self._place} {name}") in ended}
        done = {name: self._generated(out, self._running.pop(name)) for name, out in mine.items()}
        return done, all(leaves for *_, leaves in everyones)

    def _exchange(self, mine) -> list:
        """Gathers `mine` from the ranks of this engine, in their order."""
        return all_gather_lists([mine], self._ranks) if self.shared else [mine]

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        media = media_of(prompts)
        mine = [_prompt(ids, own) for ids, own in zip(prompts.non_tensor_batch["raw_prompt_ids"], media)]
        everyones = self._exchange((mine, seeds))
        params = [self._params(**vllm_settings(sampling, seed)) for _, seeds in everyones for seed in seeds]
        outputs = self._run([prompt for prompts, _ in everyones for prompt in prompts], params)
        before = sum(len(seeds) for _, seeds in everyones[: self._place])
        rows = [self._generated(out, own) for out, own in zip(outputs[before:], media)]
        return add_responses(prompts, rows, self.pad_token_id)

    def _generated(self, output, media: Media | None) -> Generated:
        """Its prompt has the same tokens as in training."""
        row = generated(_checked(output, media))
        if self.route_layers:
            row.routed_experts = torch.from_numpy(output.outputs[0].routed_experts.astype("int16"))
            row.routed_experts = row.routed_experts[:, self.route_layers]
        return row

    def _params(self, max_tokens: int, **settings):
        return request_params(max_tokens=max_tokens, stop_token_ids=self.stop_ids, **settings)

    def _check_weights(self) -> None:
        if self.version is None:  # asleep, vLLM would spin for ever
            raise WeightSyncError("the vLLM engine has no weights: call sync_weights before generate")

    def _run(self, prompts: list[dict], params: list) -> list:
        self._check_weights()
        with own_generators(self._device):
            return self.llm.generate(prompts, params, use_tqdm=False, lora_request=self._lora)


def own_generators(device: torch.device) -> AbstractContextManager[None]:
    """In it vLLM may advance torch's global generators, of the CPU and this device. By itself fork_rng takes those of
    all GPUs, and warns."""
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices, device_type=device.type)


def _prepare_for_cpu(name: str) -> None:
    """name: of the engine's shared memory."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm.v1.sample.sampler as sampler

    counter = sampler.batched_count_greater_than  # uncompiled: saves a C++ compilation of many seconds
    sampler.batched_count_greater_than = getattr(counter, "_torchdynamo_orig_callable", counter)
    _rotate_heads_on_cpu()
    _name_shared_memory(name)
    # vLLM calls vars() on all imported modules, to look for its kernels. llvmlite, which numba and so bm25s import,
    # makes a C function for any attribute that is asked for, also for __dict__, and vLLM crashes
    if llvm := sys.modules.get("llvmlite.binding.ffi"):
        llvm.lib._fntab["__dict__"] = {}


def _name_shared_memory(name: str) -> None:
    """Under a launcher vLLM for CPUs gives the shared memory of an engine of several ranks the same name in each job: a
    second job would meet the first one's, or what a killed one has left behind."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory

    def own_name(group: Any) -> str:
        return f"{name}-{group.unique_name}-{'-'.join(map(str, group.ranks))}"

    SharedMemory.make_group_name = staticmethod(own_name)


def _rotate_heads_on_cpu() -> None:
    """vLLM's rotary kernel for CPUs takes the wrong elements of a query (tokens, heads, size), which DeepSeek has."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu
    if kernel.__name__ != "forward_cpu":  # done by an earlier engine
        return

    def rotate(rotary, positions, query, key=None):
        if query.dim() == 2:
            return kernel(rotary, positions, query, key)
        return rotary.forward_native(positions, query, key)

    RotaryEmbedding.forward_cpu = rotate


@contextmanager
def _groups_of_one() -> Iterator[None]:
    """For a single process vLLM makes a dozen gloo groups, each with a port. Here it gets the default group instead."""
    new_group = dist.new_group
    if dist.get_world_size() == 1:
        dist.new_group = lambda ranks=None, **kwargs: new_group(ranks, **kwargs | {"backend": dist.get_backend()})
    try:
        yield
    finally:
        dist.new_group = new_group


def _prompt(ids, media: Media | None) -> dict:
    """By the names of vLLM's TokensPrompt."""
    data = dict(media.data) if media else {}
    if "video" in data:
        data["video"] = [(frames, of | {"do_sample_frames": False}) for frames, of in data["video"]]
    return {"prompt_token_ids": list(ids)} | ({"multi_modal_data": data} if data else {})


def _checked(output, media: Media | None):
    """The output, whose prompt has the same tokens as in training."""
    if media:
        check_expanded("vllm", media.ids, output.prompt_token_ids)
    return output


def request_params(**settings):
    """vLLM's SamplingParams with these settings, for a request whose answer is read by `generated`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # flat_logprobs: lists of numbers, not two objects a token; skip_clone: no other request uses this object
    fixed = {"output_kind": RequestOutputKind.FINAL_ONLY, "skip_clone": True, "flat_logprobs": True}
    return SamplingParams(detokenize="stop" in settings, **fixed, **settings)


def generated(output) -> Generated:
    out = output.outputs[0]
    log_probs = [out.logprobs.logprobs[i] for i in out.logprobs.start_indices]  # of the sampled token
    return Generated(list(out.token_ids), log_probs, as_finish_reason(out.finish_reason))


def vllm_settings(sampling: Sampling, seed: int) -> dict:
    """The settings of a request, by the names of SamplingParams and of a server's API."""
    same = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    settings: dict[str, Any] = {name: getattr(sampling, name) for name in same}
    settings |= {"max_tokens": sampling.max_response_length, "logprobs": 0, "seed": seed}
    if sampling.stop:
        settings |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return settings


def as_finish_reason(reason: str | None) -> str:
    return reason if reason in ("stop", "length") else "abort"
