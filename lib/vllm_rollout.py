"""The two vLLM engines of lib/rollout.py: in this process, and servers that run already."""

import asyncio
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PreTrainedModel

from lib import InputError, is_first_on_node
from lib.data_proto import DataProto
from lib.distributed import address_towards, broadcast, compute_device, join_group, listening_store, new_cpu_subgroup
from lib.rollout import CheckedStream, Generated, Sampling, WeightSyncError, add_responses, stop_token_ids, turn_seed

# ---- vLLM ----------------------------------------------------------------------------------------


class VLLMEngine:
    """A vLLM engine inside this process, on CPU or GPU; weights go over in memory.

    The engine starts with dummy weights from a folder that holds only config and tokenizer: the trainer is the one
    source of weights, and a generate before the first load_weights is refused.

    `ranks` that follow each other are one engine, split by tensor parallelism. Each has its own requests; generate,
    step and the end of a session are then collectives of these ranks, for vLLM wants of each the same requests in the
    same order.

    Raises:
        InputError: the model's attention heads cannot be split over the ranks.
    """

    long_steps = False  # a step is a token; requests come and go at each

    def __init__(
        self,
        model,
        tokenizer,
        *,
        folder: Path,
        max_length: int,
        dtype: torch.dtype,
        gpu_memory: float,
        ranks: int = 1,
    ):
        heads = model.config.get_text_config().num_attention_heads
        if heads % ranks:
            raise InputError(f"--engine-ranks {ranks}: the model's {heads} attention heads must be a multiple of it")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and trainer share tensors by reference
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        on_gpu = compute_device(model).type == "cuda"
        if not on_gpu:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        import vllm

        from lib import vllm_weights  # noqa: F401  its import makes the backend known

        if not on_gpu:  # spares a C++ compilation of many seconds at the first generate, for the rank of a token
            import vllm.v1.sample.sampler as sampler

            counter = sampler.batched_count_greater_than
            sampler.batched_count_greater_than = getattr(counter, "_torchdynamo_orig_callable", counter)
            # vLLM looks for its kernels in vars() of all that is imported; the library under numba (and so under bm25s)
            # makes a C function of every name that it is asked for, of __dict__ too, and vLLM dies of it
            if llvm := sys.modules.get("llvmlite.binding.ffi"):
                llvm.lib._fntab["__dict__"] = {}
        if is_first_on_node():  # nodes may not share the disk
            model.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        dist.barrier()
        settings = {"enable_sleep_mode": True, "gpu_memory_utilization": gpu_memory}
        if not on_gpu:  # seeded requests and chunked prefill crash on a CPU
            settings = {"kv_cache_memory_bytes": 1 << 30, "enable_chunked_prefill": False, "enforce_eager": True}
            # instead of 256: a step of a tiny model costs what the scheduler takes, not what its rows do
            settings["max_num_seqs"] = 512
        if dist.get_world_size() > 1:
            settings["distributed_executor_backend"] = "external_launcher"
        with torch.random.fork_rng(), _groups_of_one():  # vLLM seeds the global generators
            self.llm = vllm.LLM(
                str(folder),
                load_format="dummy",
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max(max_length, 33),  # the probe of sync_weights is 32 tokens, and samples one
                seed=0,
                generation_config="vllm",  # the model's own would add to what a request says
                logprobs_mode="processed_logprobs",  # at the sampling temperature, after top-p and top-k
                weight_transfer_config={"backend": "direct"},
                tensor_parallel_size=ranks,
                **settings,
            )
        self.llm.init_weight_transfer_engine({"init_info": {}})
        self.dtype, self.pad_token_id, self.can_sleep = dtype, tokenizer.pad_token_id, on_gpu
        self.stop_ids, self.max_length = stop_token_ids(model, tokenizer), max_length
        self.shared = ranks > 1
        self._ranks = new_cpu_subgroup(ranks) if self.shared else None
        self._place = dist.get_rank() % ranks
        self._submitted: dict[str, tuple] = {}  # (prompt_ids, sampling, seed) of what begins with the next step
        self._aborted: list[str] = []
        self._running: set[str] = set()
        self.version: int | None = None
        self.checksum: int | None = None
        self.sleep()

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """Streams the trainer's weights into the engine, one whole tensor at a time. A collective."""
        if self.can_sleep:
            self.llm.wake_up(["weights"])  # weights first, KV cache after: the two and the update never add up
        stream = CheckedStream(model, self.dtype)
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"weights": stream}})
        self.llm.finish_weight_update(weight_version=str(version))
        if not self.llm.reset_prefix_cache():  # cached prefixes hold keys and values of the old weights
            raise WeightSyncError(f"version {version}: vLLM kept its prefix cache because requests are in flight")
        self.version, self.checksum = version, stream.checksum
        self.wake()

    def probe_log_probs(self, ids: list[int]) -> torch.Tensor:
        out = self._run([ids], [self._params(1, temperature=1.0, prompt_logprobs=0)])[0]
        return torch.tensor([lp[token].logprob for token, lp in zip(ids[1:], out.prompt_logprobs[1:])])

    def sleep(self) -> None:
        """On a GPU, frees weights and KV cache; the weights must be loaded again before the next generate."""
        if self.can_sleep:
            self.llm.sleep(level=2)
            self.version = self.checksum = None

    def wake(self) -> None:
        if self.can_sleep:
            self.llm.wake_up(["kv_cache"])

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Between its ends are submit, step and abort."""
        self._check_weights()
        with torch.random.fork_rng():  # vLLM advances torch's global generator
            try:
                yield
            finally:
                self._submitted.clear()
                self._aborted += self._running
                while not self._step(leaving=True)[1]:  # the others of this engine may not be done
                    pass

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling, seed: int) -> None:
        """Raises ValueError when the prompt is too long for the engine."""
        if len(prompt_ids) >= self.max_length:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens; the engine's longest row is {self.max_length}")
        self._submitted[request_id] = (list(prompt_ids), sampling, seed)

    def abort(self, request_id: str) -> None:
        if self._submitted.pop(request_id, None) is None:
            self._aborted.append(request_id)

    def step(self) -> dict[str, Generated]:
        """One token, or the prefill, of what runs; those that ended."""
        return self._step(leaving=False)[0]

    def _step(self, leaving: bool) -> tuple[dict[str, Generated], bool]:
        """(what ended of this rank's requests, whether every rank of the engine leaves its session)."""
        engine = self.llm.llm_engine
        everyones = self._exchange((self._submitted, self._aborted, leaving))
        self._running = (self._running | self._submitted.keys()) - set(self._aborted)
        self._submitted, self._aborted = {}, []
        for place, (submitted, aborted, _) in enumerate(everyones):
            engine.abort_request([f"{place} {request_id}" for request_id in aborted])
            for request_id, (prompt_ids, sampling, seed) in submitted.items():
                params = self._params(**_vllm_settings(sampling, seed))
                engine.add_request(f"{place} {request_id}", {"prompt_token_ids": prompt_ids}, params)
        ended = {out.request_id: out for out in engine.step() if out.finished}
        done = {name: _generated(ended[full]) for name in self._running if (full := f"{self._place} {name}") in ended}
        self._running -= done.keys()
        return done, all(leaves for *_, leaves in everyones)

    def _exchange(self, mine) -> list:
        """What each rank of this engine gives, in their order."""
        if not self.shared:
            return [mine]
        everyones = [None] * dist.get_world_size(self._ranks)
        dist.all_gather_object(everyones, mine, group=self._ranks)
        return everyones

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        """One response per row of `prompts`; row i is sampled with seeds[i]."""
        everyones = self._exchange((list(prompts.non_tensor_batch["raw_prompt_ids"]), seeds))
        params = [self._params(**_vllm_settings(sampling, seed)) for _, seeds in everyones for seed in seeds]
        outputs = self._run([prompt_ids for prompts, _ in everyones for prompt_ids in prompts], params)
        before = sum(len(seeds) for _, seeds in everyones[: self._place])
        rows = [_generated(out) for out in outputs[before : before + len(prompts)]]
        return add_responses(prompts, rows, self.pad_token_id)

    def _params(self, max_tokens: int, **kwargs):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=self.stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # one request's own
            **kwargs,
        )

    def _check_weights(self) -> None:
        if self.version is None:  # vLLM would spin for ever while asleep
            raise WeightSyncError("the vLLM engine has no weights: call sync_weights before generate")

    def _run(self, prompt_ids, params: list) -> list:
        self._check_weights()
        with torch.random.fork_rng():  # vLLM advances torch's global generator
            return self.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompt_ids], params, use_tqdm=False)


@contextmanager
def _groups_of_one() -> Iterator[None]:
    """Of a single process vLLM makes a dozen gloo groups, each with a port: here they are as the default group."""
    new_group = dist.new_group
    if dist.get_world_size() == 1:
        dist.new_group = lambda ranks=None, **kwargs: new_group(ranks, **kwargs | {"backend": dist.get_backend()})
    try:
        yield
    finally:
        dist.new_group = new_group


def _generated(output) -> Generated:
    out = output.outputs[0]
    log_probs = [lp[token].logprob for token, lp in zip(out.token_ids, out.logprobs)]
    return Generated(list(out.token_ids), log_probs, _finish_reason(out.finish_reason))


def _vllm_settings(sampling: Sampling, seed: int) -> dict:
    """A request's, as SamplingParams and a server's API name them."""
    return {
        "max_tokens": sampling.max_response_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs": 0,
        "seed": seed,
    }


def _finish_reason(reason: str | None) -> str:
    return reason if reason in ("stop", "length") else "abort"


# ---- a vLLM server -------------------------------------------------------------------------------

STEP_S = 0.005  # how long a step waits for a response: the event loop of lib/agent_loop.py stands still meanwhile
BUCKET_BYTES = 256 << 20  # of one broadcast, or one tensor; three buckets are in memory at a time
SYNC_TIMEOUT_S = 300.0  # for all servers to join the group, or to take a bucket
HEALTH_S = 2.0  # between two questions whether they are alive
NEUTRAL = {  # vLLM's server takes what a request leaves out from the model's generation_config.json, or from its flags
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "watermarking": False,
}
STOP_S = 0.5  # between the answers of requests that a pause has stopped; what does not come is sampled again


class ServedEngine:
    """vLLM servers that the user started, over their OpenAI-compatible API; rank r uses URL r modulo their number.

    Weights are broadcast from the first rank to all workers of all servers, bucket by bucket, if the servers were
    started with lib/vllm_weights.py's backend "broadcast"; else they go by way of a file in `folder`, which the first
    rank writes and the servers read: on another machine, from a shared disk. The folder that a server was started with
    is not touched. A server must run with VLLM_SERVER_DEV_MODE=1 in its environment (it then takes orders from whoever
    reaches it) and with --logprobs-mode processed_logprobs; beside the requests of this run it must have none.

    What is being sampled when weights come goes on under them, from the tokens that there are: see start and collect.

    Raises:
        InputError: a server cannot be reached, was started otherwise, or refuses a request or the weights.
    """

    long_steps = False  # requests come and go at each
    shared = False

    def __init__(self, urls: str, model, tokenizer, *, folder: Path, max_length: int, dtype: torch.dtype):
        self.servers = [url.rstrip("/") for url in urls.split(",")]
        self.url = self.servers[dist.get_rank() % len(self.servers)]
        self.first_of_server = dist.get_rank() < len(self.servers)
        self.folder, self.dtype, self.pad_token_id = folder.resolve(), dtype, tokenizer.pad_token_id
        self.stop_ids = stop_token_ids(model, tokenizer)
        self._running: dict[str, Future[Generated]] = {}
        self._posted: set[asyncio.Task] = set()
        self._open = asyncio.Event()  # not while weights come
        self._open.set()
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(keepalive_expiry=1.0))  # vLLM: 5 s
        self._loop = asyncio.new_event_loop()  # lib/agent_loop.py's stands still during a step
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.version: int | None = None
        self.checksum: int | None = None
        served = self._ask("GET", "/v1/models")["data"][0]
        self.served_model, self.max_length = served["id"], served["max_model_len"]
        if self.max_length < max_length:
            raise InputError(
                f"--rollout-engine {self.url}: the server's max_model_len is {self.max_length}, prompt and response "
                f"need {max_length}: start it with --max-model-len {max_length}"
            )
        self._reset_prefix_cache()  # asks for the dev mode before anything is trained
        self._ask("POST", "/resume")  # a run before may have ended while it was paused
        only_choice = self._wait(self._sample([0], Sampling(1, top_k=1), seed=0))
        if only_choice.log_probs[0] < -1e-3:
            raise InputError(
                f"--rollout-engine {self.url}: the server's log-probs are not those of the distribution that it "
                "samples from: start it with --logprobs-mode processed_logprobs"
            )
        self.weights_by = broadcast(self._weights_by() if dist.get_rank() == 0 else None)
        self._group: dist.Backend | None = None

    def _weights_by(self) -> str:
        """What all servers can do: "broadcast", "reload_from" (the worker extension only) or "reload_weights"."""
        backends = set()
        for url in self.servers:
            try:
                backends |= set(self._on_workers(url, "weight_transfer_backend")["results"])
            except InputError:  # no such method
                return "reload_weights"
        return "broadcast" if backends == {"broadcast"} else "reload_from"

    def load_weights(self, model: PreTrainedModel, version: int) -> None:
        """Gives the servers the trainer's weights. What is sampled meanwhile goes on with them. A collective."""
        stream = CheckedStream(model, self.dtype)
        self._loop.call_soon_threadsafe(self._open.clear)
        self.version = None  # until all has gone well
        dist.barrier()
        if self.first_of_server:
            self._ask("POST", "/pause", params={"mode": "abort"})  # which answers with the tokens that there are
        dist.barrier()
        self._wait(self._drain())
        try:
            if self.weights_by == "broadcast":
                self._broadcast(stream)
            else:
                self._write_and_reload(stream, self.folder / f"version_{version}")
        except InputError as error:  # and what a server holds now is neither the old nor the new
            needs = "" if self.weights_by == "broadcast" else f" and see {self.folder}"
            raise InputError(f"{error}; it must serve the model that is trained{needs}: start it again") from error
        dist.barrier()
        if self.first_of_server:
            self._reset_prefix_cache()  # cached prefixes hold keys and values of the old weights
            self._ask("POST", "/resume")
        dist.barrier()
        self.version, self.checksum = version, stream.checksum
        self._loop.call_soon_threadsafe(self._open.set)

    async def _drain(self) -> None:
        """After it no request is at the server: one that came behind the pause would wait there for the new weights."""
        running = set(self._posted)
        while running:
            done, running = await asyncio.wait(running, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                for request in running:
                    request.cancel()

    def _broadcast(self, stream: CheckedStream) -> None:
        """Gathers the next bucket while one is sent. Only the first rank sends; all gather."""
        if dist.get_rank() > 0:
            for _ in stream:
                pass
            return
        if self._group is None:
            self._group = self._connect(compute_device(stream.model))
        self._finish(self._order("/start_weight_update"))
        sending: tuple[list[Future], dist.Work | None] = ([], None)
        for names, tensors in _buckets(stream):
            shapes = [list(tensor.shape) for tensor in tensors]
            bucket = torch.cat([tensor.flatten() for tensor in tensors])
            self._finish(*sending)
            update = {"names": names, "shapes": shapes, "dtype": str(self.dtype).removeprefix("torch.")}
            replies = self._order("/update_weights", json={"update_info": update})
            sending = replies, self._group.broadcast(bucket, 0)
        self._finish(*sending)
        self._finish(self._order("/finish_weight_update"))

    def _connect(self, device: torch.device) -> dist.Backend:
        """The group of the first rank, 0 there, and of all workers, server after server."""
        sizes = [self._ask("GET", "/get_world_size", url=url)["world_size"] for url in self.servers]
        host = _address_towards(self.servers)
        store = listening_store(host, 0, timedelta(seconds=SYNC_TIMEOUT_S))
        info = {"host": host, "port": store.port, "device": device.type}
        info |= {"size": 1 + sum(sizes), "timeout_s": SYNC_TIMEOUT_S}
        replies = []
        for url, first_rank in zip(self.servers, accumulate([1, *sizes])):
            own = {"init_info": info | {"first_rank": first_rank}}
            replies.append(self._begin("POST", "/init_weight_transfer_engine", url=url, json=own))
        joined: Future[dist.Backend] = Future()

        def join() -> None:
            try:
                joined.set_result(join_group(store, 0, info["size"], device, SYNC_TIMEOUT_S, host))
            except RuntimeError as error:
                joined.set_exception(error)

        threading.Thread(target=join, daemon=True).start()  # NCCL may wait in there for a worker that is gone
        self._finish([*replies, joined])
        return joined.result()

    def _order(self, path: str, **kwargs) -> list[Future]:
        return [self._begin("POST", path, url=url, **kwargs) for url in self.servers]

    def _finish(self, replies: list[Future], work: dist.Work | None = None) -> None:
        """Waits for both. Either may hang where the other failed, and both where a server lost its worker."""
        start = asked = time.monotonic()
        while True:
            try:
                for reply in replies:
                    if reply.done():
                        reply.result()
                if work is not None and work.is_completed():
                    work.wait()
                    work = None
            except RuntimeError as error:
                raise self._broken_off(error) from error
            if work is None and all(reply.done() for reply in replies):
                return
            if time.monotonic() > start + SYNC_TIMEOUT_S:
                raise self._broken_off(f"no answer for {SYNC_TIMEOUT_S:g} s")
            if time.monotonic() > asked + HEALTH_S:
                for url in self.servers:
                    self._ask("GET", "/health", url=url, timeout=SYNC_TIMEOUT_S)
                asked = time.monotonic()
            time.sleep(0.001)

    def _broken_off(self, why) -> InputError:
        reason = str(why).partition("\n")[0]
        return InputError(f"--rollout-engine {','.join(self.servers)}: the broadcast of weights broke off ({reason})")

    def _write_and_reload(self, stream: CheckedStream, folder: Path) -> None:
        """folder: a new one, since a network disk may show the old file of a known path."""
        first = dist.get_rank() == 0
        weights = {name: tensor.cpu().contiguous() for name, tensor in stream if first}
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()
        if self.first_of_server:
            self._on_workers(self.url, self.weights_by, weights_path=str(folder))
        dist.barrier()
        if first:
            shutil.rmtree(folder)

    def probe_log_probs(self, ids: list[int]) -> torch.Tensor:
        choice = self._wait(self._complete(ids, max_tokens=1, temperature=1.0, prompt_logprobs=0))
        return torch.tensor([lp[str(token)]["logprob"] for token, lp in zip(ids[1:], choice["prompt_logprobs"][1:])])

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        if self._group is not None:
            wait(self._order("/shutdown_weight_transfer_engine"), SYNC_TIMEOUT_S)  # a server that ended needs none
            self._group.shutdown()
        self._wait(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Between its ends are submit, step and abort."""
        if self.version is None:
            raise WeightSyncError("the vLLM server has no weights of this run: call sync_weights before generate")
        try:
            yield
        finally:
            for request_id in list(self._running):
                self.abort(request_id)

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling, seed: int) -> None:
        """Raises ValueError when the prompt is too long for the server."""
        if len(prompt_ids) >= self.max_length:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens; the server's max_model_len is {self.max_length}")
        self._running[request_id] = asyncio.run_coroutine_threadsafe(
            self._sample(prompt_ids, sampling, seed), self._loop
        )

    def abort(self, request_id: str) -> None:
        """Closes the connection, at which the server ends the request."""
        self._running.pop(request_id).cancel()

    def step(self) -> dict[str, Generated]:
        """Those that ended, after a short wait; possibly none."""
        done = wait(self._running.values(), STEP_S, FIRST_COMPLETED).done
        ended = [request_id for request_id, future in self._running.items() if future in done]
        return {request_id: self._running.pop(request_id).result() for request_id in ended}

    def generate(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> DataProto:
        """One response per row of `prompts`; row i is sampled with seeds[i]."""
        return self.collect(prompts, sampling, self.start(prompts, sampling, seeds))

    def start(self, prompts: DataProto, sampling: Sampling, seeds: list[int]) -> list[Future]:
        """generate, of which collect is the end: between the two may be syncs of weights."""
        prompt_ids = prompts.non_tensor_batch["raw_prompt_ids"]
        with self.session():
            return [
                asyncio.run_coroutine_threadsafe(self._sample(ids, sampling, seed), self._loop)
                for ids, seed in zip(prompt_ids, seeds)
            ]

    def collect(self, prompts: DataProto, sampling: Sampling, rows: list[Future]) -> DataProto:
        """As generate, and weight_versions (B, T): of each token, -1 where none was sampled."""
        rows = [row.result() for row in rows]
        batch = add_responses(prompts, rows, self.pad_token_id)
        versions = torch.full_like(batch.batch["responses"], -1)
        for i, row in enumerate(rows):
            versions[i, : len(row.weight_versions)] = torch.tensor(row.weight_versions)
        batch.batch["weight_versions"] = versions
        return batch

    async def _sample(self, prompt_ids: list[int], sampling: Sampling, seed: int) -> Generated:
        """A sync of weights in its midst stops it; it goes on from the tokens that it has."""
        row, stops = Generated([], [], "abort"), 0
        while True:
            await self._open.wait()
            version = self.version
            left = replace(sampling, max_response_length=sampling.max_response_length - len(row.token_ids))
            settings = _vllm_settings(left, turn_seed(seed, -stops))
            request = asyncio.create_task(self._complete([*prompt_ids, *row.token_ids], **settings))
            self._posted.add(request)
            try:
                await asyncio.wait([request])
            finally:
                request.cancel()
                self._posted.discard(request)
            if not request.cancelled():
                choice = request.result()
                self._check_length(choice, settings["max_tokens"], len(prompt_ids) + len(row.token_ids))
                if choice["token_ids"]:
                    row.token_ids += choice["token_ids"]
                    row.log_probs += choice["logprobs"]["token_logprobs"]
                    row.weight_versions += [version] * len(choice["token_ids"])
                row.finish_reason = _finish_reason(choice["finish_reason"])
                if self._open.is_set() or row.finish_reason != "abort":
                    return row
            stops += 1

    def _check_length(self, choice: dict, asked: int, before: int) -> None:
        asked = min(asked, self.max_length - before)
        if choice["finish_reason"] == "length" and len(choice["token_ids"]) < asked:
            raise InputError(
                f"--rollout-engine {self.url}: the server ended a response after {len(choice['token_ids'])} of {asked} "
                "tokens: start it with --generation-config vllm and without --override-generation-config"
            )

    async def _complete(self, prompt_ids: list[int], **settings) -> dict:
        settings |= {"stop_token_ids": self.stop_ids, "skip_special_tokens": False, "return_token_ids": True}
        settings = NEUTRAL | settings
        body = {"model": self.served_model, "prompt": list(map(int, prompt_ids)), **settings}
        return (await self._request("POST", "/v1/completions", json=body))["choices"][0]

    async def _request(self, method: str, path: str, url: str | None = None, **kwargs) -> dict:
        url = url or self.url
        try:
            response = await self._client.request(method, url + path, **kwargs)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise InputError(
                f"--rollout-engine {url}: no vLLM server answers there ({type(error).__name__}: {error}); start "
                "it, or see its log for why it ended"
            ) from error
        if response.status_code == 404 and not path.startswith("/v1"):
            raise InputError(
                f"--rollout-engine {url}: the server has no {path}: start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment"
            )
        if response.is_error:
            what = " ".join(response.text.split())[:500]
            raise InputError(f"--rollout-engine {url}: {path} failed with {response.status_code}: {what}")
        return response.json() if response.content else {}

    def _wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _begin(self, method: str, path: str, **kwargs) -> Future:
        return asyncio.run_coroutine_threadsafe(self._request(method, path, **kwargs), self._loop)

    def _ask(self, method: str, path: str, **kwargs) -> dict:
        return self._begin(method, path, **kwargs).result()

    def _on_workers(self, url: str, method: str, **kwargs) -> dict:
        """On a connection of its own: where it fails, the server closes that without a word."""
        order = {"method": method, "kwargs": kwargs}
        return self._ask("POST", "/collective_rpc", url=url, json=order, headers={"Connection": "close"})

    def _reset_prefix_cache(self) -> None:
        """Also of requests that are being aborted still."""
        if not self._ask("POST", "/reset_prefix_cache", params={"reset_running_requests": True})["success"]:
            raise WeightSyncError(f"the vLLM server {self.url} kept its prefix cache")


def _buckets(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
    """Runs of tensors of BUCKET_BYTES at most together; a larger one is alone."""
    names, tensors, size = [], [], 0
    for name, tensor in stream:
        if names and size + tensor.nbytes > BUCKET_BYTES:
            yield names, tensors
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
    yield names, tensors


def _address_towards(urls: list[str]) -> str:
    """This machine's, on the network by which it reaches the servers; loopback if all of them are on it."""
    addresses = []
    for url in map(httpx.URL, urls):
        addresses.append(address_towards(url.host, url.port or {"http": 80, "https": 443}[url.scheme]))
    return next((address for address in addresses if not ip_address(address).is_loopback), addresses[0])
