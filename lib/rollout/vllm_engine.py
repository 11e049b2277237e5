"""The engine `vllm`: vLLM inside this process."""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lib import InputError, is_first_on_node
from lib.data.vision import Media, media_of
from lib.data_proto import DataProto
from lib.distributed import Mean, Metric, Part, all_gather_lists, broadcast, compute_device, new_cpu_subgroup
from lib.rollout.engine import Generated, SteppedEngine, add_responses, check_expanded, row_limits, stop_token_ids
from lib.rollout.vllm_start import (
    adapter_settings,
    cached,
    engine_settings,
    prepare_for_cpu,
    save_files,
    scheduler_settings,
)
from lib.rollout.weight_sync import CheckedStream, UnsupportedAdapter, WeightSyncError
from lib.sampling import Sampling, seeded


class VLLMEngine(SteppedEngine):
    """A vLLM engine inside this process, which takes weights in memory. It starts with dummy weights,
    from a folder with config and tokenizer, and does not sample before the first load_weights.

    `ranks` neighbouring ranks share one engine, split by tensor parallelism. vLLM needs the requests
    of all in the same order everywhere: generate, step and the end of a session are collectives.

    In 16 bits vLLM gets LoRA's adapters, if it takes them, since W + dW would lose small updates.
    Otherwise it gets merged weights, which cost nothing while sampling. `enable_lora` overrides it.

    more: of --vllm-kwargs. start: of engine_settings. Raises InputError if vLLM cannot start so,
    UnsupportedAdapter if it cannot take an adapter that was asked for."""

    takes_images = gives_routes = True
    long_steps = False  # a step is one token; requests come and go at each step

    def __init__(self, model, tokenizer, *, folder: Path, dtype, ranks=1, processor=None, more=None, **start):
        self._device, self.dtype = compute_device(model), dtype
        on_gpu = self._device.type != "cpu"
        settings = engine_settings(model, dtype=dtype, ranks=ranks, processor=processor, **start)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and trainer share tensors by reference
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if not on_gpu:
            prepare_for_cpu(name := broadcast(f"plainrl-{uuid4().hex}"))
        import vllm

        from lib.rollout import vllm_weights  # noqa: F401  the import registers the backend

        if is_first_on_node():  # nodes may not share the disk
            save_files(folder, model, tokenizer, processor)
        dist.barrier()
        settings |= {"enable_sleep_mode": on_gpu, "weight_transfer_config": {"backend": "direct"}}
        if several := dist.get_world_size() > 1:
            settings["distributed_executor_backend"] = "external_launcher"
        more = dict(more or {})
        settings |= {} if "scheduler_cls" in more else scheduler_settings()
        self._asks_for_lora: bool | None = more.pop("enable_lora", None)
        settings |= more | self._lora_settings(model)
        try:
            path = folder if settings.get("enforce_eager") else cached(folder)
            with own_generators(self._device), seeded("vllm"), _groups_of_one():
                self.llm = vllm.LLM(str(path), **settings)
        except (ValueError, TypeError) as error:
            if not more:
                raise
            raise InputError(f"--vllm-kwargs {json.dumps(more)}: vLLM refuses them: {error}") from error
        self.llm.init_weight_transfer_engine({"init_info": {}})
        if several and not on_gpu:
            dist.barrier()  # all ranks have it open: whatever ends the run leaves none behind
            for file in Path("/dev/shm").glob(f"{name}-*"):
                file.unlink(missing_ok=True)
        self.pad_token_id, self.can_sleep = tokenizer.pad_token_id, on_gpu
        self.stop_ids, self.max_length = stop_token_ids(model, tokenizer), start["max_length"]
        self.shared = ranks > 1
        self._ranks = new_cpu_subgroup(ranks) if self.shared else None
        self._place = dist.get_rank() % ranks
        self._submitted: dict[str, tuple] = {}  # (prompt, sampling, seed); they begin at the next step
        self._aborted: list[str] = []
        self._running: dict[str, Media | None] = {}
        self._base: int | None = None  # the checksum of the weights below an adapter
        self._adapters = count(1)
        self._lora: Any = None  # the LoRARequest of each request
        self._scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.sleep()

    def _lora_settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Sets lora_sync. Returns the settings for adapters, if there are to be any."""
        asked = self.dtype != torch.float32 if self._asks_for_lora is None else self._asks_for_lora
        if getattr(model, "peft_config", None) is None or not asked:
            return {}
        self.lora_sync = "adapter"
        try:
            return adapter_settings(model)
        except UnsupportedAdapter as error:
            self._merge_from_now_on(error)
            return {}

    def _merge_from_now_on(self, error: UnsupportedAdapter) -> None:
        """Raises the error if adapters were asked for."""
        if self._asks_for_lora:
            raise error
        self.lora_sync = "merged"
        if is_first_on_node():
            what = f"vLLM gets merged weights, which lose small updates in {self.dtype}"
            print(f"LoRA: {what}: {error}", flush=True)

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """Streams the trainer's weights into the engine, tensor by tensor; those below an adapter only once.
        A collective."""
        self._finish_steps()
        if self.can_sleep:
            self.llm.wake_up(["weights"])  # the KV cache wakes after the update, whose memory it needs
        if self.lora_sync == "adapter":
            try:
                self._base = self._load(model, version, "base") if self._base is None else self._base
                checksum = (self._base + self._load_adapter(model)) % (1 << 64)
            except UnsupportedAdapter as error:
                self._merge_from_now_on(error)
        if self.lora_sync == "merged":
            checksum, self._base = self._load(model, version, "merged"), None
        if not self.llm.reset_prefix_cache():  # it has keys and values of the old weights
            why = "vLLM kept its prefix cache because requests are in flight"
            raise WeightSyncError(f"version {version}: {why}")
        self.llm.llm_engine.reset_encoder_cache()  # features of images, by the old weights
        self.version, self.checksum = version, checksum
        if self.can_sleep:
            self.llm.wake_up(["kv_cache"])

    def _load(self, model: PreTrainedModel, version: int, part: Part) -> int:
        """Gives vLLM the model's weights without an adapter. Returns their checksum."""
        stream = CheckedStream(model, self.dtype, part)
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"weights": stream}})
        self.llm.finish_weight_update(weight_version=str(version))
        self._lora = None
        return stream.checksum

    def _load_adapter(self, model: PreTrainedModel) -> int:
        """Gives vLLM the adapter as a new one. Returns its checksum."""
        from vllm.lora.request import LoRARequest

        from lib.rollout.vllm_weights import load_adapter

        stream = CheckedStream(model, self.dtype, "adapter")
        config, number = model.peft_config["default"], next(self._adapters)
        try:
            adapter = dict(stream), config.r, config.lora_alpha, number
            self.llm.collective_rpc(load_adapter, args=adapter)
        except ValueError as error:
            raise UnsupportedAdapter(str(error)) from error
        self._lora = LoRARequest(f"adapter-{number}", number, "in memory")
        return stream.checksum

    def probe_log_probs(self, ids: list[int], media: Media | None = None) -> torch.Tensor:
        params = self._params(1, temperature=1.0, prompt_logprobs=0)
        [output] = self._run([_prompt(ids, media)], [params])
        _check_prompt(output, media)
        tokens, log_probs = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
        return torch.tensor([of[token].logprob for token, of in zip(tokens, log_probs)])

    def sleep(self) -> None:
        """On a GPU, frees weights and KV cache. Weights below an adapter stay in CPU memory."""
        if self.can_sleep:
            self._finish_steps()
            self.llm.sleep(level=2 if self._base is None else 1)
            self.version = self.checksum = None

    def _finish_steps(self) -> None:
        """On a GPU vLLM starts a step before it has read the one before. So one more runs when the last request
        has ended, with weights and memory that go away, and experts that vLLM would give the next requests."""
        core: Any = self.llm.llm_engine.engine_core
        while core.engine_core.batch_queue:
            self.llm.llm_engine.step()

    def close(self) -> None:
        if self.can_sleep and self.version is None:
            self.llm.wake_up()  # vLLM would free twice what it has freed to sleep, an error on NVIDIA GPUs
        self.llm.llm_engine.engine_core.shutdown()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Inside it submit, step and abort may be called."""
        with self._sampling():
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
            longest = f"the engine's longest row is {self.max_length}"
            raise ValueError(f"a prompt of {length} tokens; {longest}")
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
        ended = {output.request_id: output for output in engine.step() if output.finished}
        done = {}
        for request_id in [*self._running]:
            if output := ended.get(f"{self._place} {request_id}"):
                done[request_id] = self._generated(output, self._running.pop(request_id))
        return done, all(leaves for *_, leaves in everyones)

    def _exchange(self, mine) -> list:
        """Gathers `mine` from the ranks of this engine, in their order."""
        return all_gather_lists([mine], self._ranks) if self.shared else [mine]

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        media = media_of(prompts)
        mine = [_prompt(ids, own) for ids, own in zip(prompts.non_tensor_batch["raw_prompt_ids"], media)]
        samplings = [replace(sampling, max_response_length=limit) for limit in row_limits(prompts, sampling)]
        everyones = self._exchange(list(zip(mine, samplings, seeds, strict=True)))
        requests = [request for of_rank in everyones for request in of_rank]
        params = [self._params(**vllm_settings(own, seed)) for _, own, seed in requests]
        outputs = self._run([prompt for prompt, _, _ in requests], params)
        before = sum(map(len, everyones[: self._place]))
        rows = [self._generated(out, own) for out, own in zip(outputs[before:], media)]
        return add_responses(prompts, rows, self.pad_token_id)

    def _generated(self, output, media: Media | None) -> Generated:
        _check_prompt(output, media)
        row = generated(output)
        if self.route_layers:
            routes = torch.from_numpy(output.outputs[0].routed_experts.astype("int16"))
            row.routed_experts = routes[:, self.route_layers]
        return row

    def _params(self, max_tokens: int, **settings):
        return request_params(max_tokens=max_tokens, stop_token_ids=self.stop_ids, **settings)

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        if self.version is None:  # asleep, vLLM would spin for ever
            raise WeightSyncError("the vLLM engine has no weights: call sync_weights before generate")
        self._scheduler.steps = self._scheduler.fallback_steps = 0
        with own_generators(self._device):
            yield

    def metrics(self) -> dict[str, Metric]:
        """The share of the last rollout's steps that were not decodes alone (rollout_scheduler.py)."""
        scheduler = self._scheduler
        return {"perf/scheduler_fallback_steps": Mean(scheduler.fallback_steps, scheduler.steps)}

    def _run(self, prompts: list[dict], params: list) -> list:
        with self._sampling():
            return self.llm.generate(prompts, params, use_tqdm=False, lora_request=self._lora)


def own_generators(device: torch.device) -> AbstractContextManager[None]:
    """In it vLLM may seed and advance torch's global generators, of the CPU and this device. By itself
    fork_rng takes those of all GPUs, and warns."""
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices, device_type=device.type)


@contextmanager
def _groups_of_one() -> Iterator[None]:
    """For a single process vLLM makes a dozen gloo groups, each with a port. The default backend has none."""
    new_group, backend = dist.new_group, dist.get_backend()
    if dist.get_world_size() == 1:
        dist.new_group = lambda ranks=None, **kwargs: new_group(ranks, **kwargs | {"backend": backend})
    try:
        yield
    finally:
        dist.new_group = new_group


def _prompt(ids, media: Media | None) -> dict:
    """By the names of vLLM's TokensPrompt."""
    data = dict(media.data) if media else {}
    if "video" in data:
        no_sampling = {"do_sample_frames": False}
        data["video"] = [(frames, of | no_sampling) for frames, of in data["video"]]
    return {"prompt_token_ids": list(ids)} | ({"multi_modal_data": data} if data else {})


def _check_prompt(output, media: Media | None) -> None:
    """Raises InputError unless the prompt has the same tokens as in training."""
    if media:
        check_expanded("vllm", media.ids, output.prompt_token_ids)


def request_params(**settings):
    """vLLM's SamplingParams with these settings, for a request whose answer `generated` reads."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize="stop" in settings,
        flat_logprobs=True,  # lists of numbers, not two objects a token
        skip_clone=True,  # no other request uses this object
        **settings,
    )


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
        settings |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        settings["skip_special_tokens"] = False
    return settings


def as_finish_reason(reason: str | None) -> str:
    return reason if reason in ("stop", "length") else "abort"
