"""What a vLLM engine starts with, in this process or as a server: files, settings, and fixes of vLLM for CPUs."""

import copy
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from transformers import PreTrainedModel, ProcessorMixin

from lib import InputError, is_first_on_node
from lib.distributed import compute_device
from lib.model.vision import family_of
from lib.rollout.weight_sync import UnsupportedAdapter

BY_FLAG = {  # settings of vLLM: the flag that sets each
    "model": "--model",
    "tokenizer": "--model",
    "dtype": "--compute-dtype",
    "seed": "--seed",
    "max_model_len": "--max-prompt-length, --max-response-length and --multi-turn.context-window",
    "limit_mm_per_prompt": "--vision-kwargs max_images",
    "max_lora_rank": "--lora-rank",
    "enable_return_routed_experts": "--routing-replay",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "tensor_parallel_size": "--rollout-tensor-parallel-size",
}
FIXED = ["load_format", "generation_config", "override_generation_config", "logprobs_mode", "weight_transfer_config"]
FIXED += ["worker_extension_cls", "distributed_executor_backend", "enable_sleep_mode", "data_parallel_size"]
FIXED += ["pipeline_parallel_size", "max_loras"]


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
    # vLLM asks the language part, transformers the whole model. An untied head would get no weights
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings
    config.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def cached(folder: Path) -> Path:
    """A copy of the folder in the user's cache, at a path that depends on the files alone; `folder` if the
    cache cannot be written. vLLM looks up what it has compiled by this path: a new one takes 20 to 60 s."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    contents = [f"{file.relative_to(folder)} {sha256(file.read_bytes()).hexdigest()}" for file in files]
    name = sha256("\n".join(contents).encode()).hexdigest()[:16]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "plainrl", "engines")
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (cache / name).exists():
            with TemporaryDirectory(dir=cache) as aside:
                made = shutil.copytree(folder, Path(aside, name))
                with suppress(OSError):  # another process was first
                    made.rename(cache / name)
    except (OSError, RuntimeError) as error:  # the latter: there is no home
        if is_first_on_node():
            print(f"note: vLLM compiles anew, because it has no cache: {str(error)[:200]}", flush=True)
        return folder
    return cache / name


def engine_settings(
    model, *, max_length: int, dtype: torch.dtype, gpu_memory: float, ranks=1, rows=256, processor=None, max_images=0
) -> dict[str, Any]:
    """Settings of every vLLM engine of a run, by the names of EngineArgs. For the parameters see
    make_engine. Raises InputError if vLLM cannot split the model, or its images differ from training."""
    on_gpu = compute_device(model).type != "cpu"
    heads = model.config.get_text_config().num_attention_heads
    if heads % ranks:
        why = f"the model's {heads} attention heads must be a multiple of it"
        raise InputError(f"--rollout-tensor-parallel-size {ranks}: {why}")
    if processor is not None and family_of(model.config).bidirectional and not on_gpu:
        why = "the tokens of an image see each other in this model, in vLLM on a CPU only those before"
        raise InputError(f"--rollout-engine vllm: {why}: take hf")
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "seed": 0,
        "tensor_parallel_size": ranks,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max(max_length, 33),  # the probe of sync_weights has 32 tokens and samples one
        "generation_config": "vllm",  # the model's own would change requests
        "logprobs_mode": "processed_logprobs",  # after temperature, top-p, top-k and min-p
    }
    if max_images:
        settings["limit_mm_per_prompt"] = {"image": max_images, "video": max_images}
        settings["mm_device_do_normalize"] = False  # "dummy" would make its buffers random
    if on_gpu:
        return settings | {"gpu_memory_utilization": gpu_memory, "max_num_seqs": rows}
    settings |= {"kv_cache_memory_bytes": 1 << 30, "enforce_eager": True}
    settings["enable_chunked_prefill"] = False  # with seeded requests it crashes on a CPU
    return settings | {"max_num_seqs": 512}  # a step of a tiny model costs the scheduler's time


def _is_no_warning_of_ours(record: logging.LogRecord) -> bool:
    return "Using custom scheduler class" not in record.getMessage()  # that it may change: the version is checked


def scheduler_settings() -> dict[str, Any]:
    """Our scheduler, for the version of vLLM that it was written for."""
    import vllm

    if vllm.__version__.split("+")[0] != "0.32.0":
        if is_first_on_node():
            what = "vLLM's own scheduler runs, which is slower: lib/rollout/rollout_scheduler.py knows vLLM 0.32"
            print(f"note: {what}, this is {vllm.__version__}", flush=True)
        return {}
    logging.getLogger("vllm.config.scheduler").addFilter(_is_no_warning_of_ours)
    return {"scheduler_cls": "lib.rollout.rollout_scheduler.make_scheduler"}


def adapter_settings(model: PreTrainedModel) -> dict[str, Any]:
    """For an engine that takes the model's LoRA adapter. Raises UnsupportedAdapter if vLLM cannot."""
    from vllm.config.lora import MaxLoRARanks
    from vllm.model_executor.models import ModelRegistry, supports_lora

    rank, ranks = model.peft_config["default"].r, get_args(MaxLoRARanks)
    if rank > max(ranks):
        raise UnsupportedAdapter(f"--lora-rank {rank}: vLLM takes adapters up to {max(ranks)}")
    known = ModelRegistry.models.get(name := model.config.architectures[0])
    if known is None or not supports_lora(known.load_model_cls()):
        raise UnsupportedAdapter(f"vLLM has no LoRA for {name}")
    largest = min(r for r in ranks if r >= rank)
    return {"enable_lora": True, "max_lora_rank": largest, "max_loras": 1}


def prepare_for_cpu(name: str) -> None:
    """name: of the engine's shared memory."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm.v1.sample.sampler as sampler
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory

    counter = sampler.batched_count_greater_than  # uncompiled: C++ takes many seconds to compile
    sampler.batched_count_greater_than = getattr(counter, "_torchdynamo_orig_callable", counter)
    _rotate_heads_on_cpu()
    # each job names it alike: a second one would meet the first one's, or what a killed one has left behind
    own_name = lambda group: f"{name}-{group.unique_name}-{'-'.join(map(str, group.ranks))}"  # noqa: E731
    SharedMemory.make_group_name = staticmethod(own_name)
    # vLLM calls vars() on all imported modules, to look for its kernels. llvmlite (of numba, of bm25s) makes a
    # C function for any attribute that is asked for, also for __dict__, and vLLM crashes
    if llvm := sys.modules.get("llvmlite.binding.ffi"):
        llvm.lib._fntab["__dict__"] = {}


def _rotate_heads_on_cpu() -> None:
    """vLLM's rotary kernel for CPUs reads a 3-D query wrongly, as DeepSeek has it."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu
    if kernel.__name__ != "forward_cpu":  # done by an earlier engine
        return

    def rotate(rotary, positions, query, key=None):
        if query.dim() == 2:
            return kernel(rotary, positions, query, key)
        return rotary.forward_native(positions, query, key)

    RotaryEmbedding.forward_cpu = rotate
