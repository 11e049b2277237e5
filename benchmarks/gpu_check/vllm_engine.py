"""Part `vllm_engine`: vLLM in this process, with random weights: two syncs, sleep and wake, log-probs, speed."""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.gpu_check.common import TOY_MODEL, random_batch, random_model, shape, the_world
from benchmarks.gpu_check.measure import kernels_of, timed
from benchmarks.gpu_check.rows import Options, attempt, claim, row, skipped
from lib.data_proto import DataProto
from lib.distributed import make_mesh, refresh_weights, shard_model, trainable_parameters
from lib.model import batched_log_probs, load_tokenizer
from lib.rollout import Sampling, make_engine, sync_weights
from lib.rollout.vllm_engine import VLLMEngine, generated

TOLERANCE = 0.25  # nats on the probe of a sync, as in training in bf16


def check(options: Options, device: torch.device) -> Iterator[dict]:
    if not find_spec("vllm"):
        yield skipped("the engine vllm", "vLLM is not installed")
        return
    yield from attempt("the engine vllm", lambda: engine(options, device))


def engine(options: Options, device: torch.device) -> Iterator[dict]:
    T, count = (8, 8) if options.tiny else (128, 256)
    tokenizer, path = load_tokenizer(TOY_MODEL), shape(options, "qwen2.5-0.5b")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = shard_model(random_model(path, device), make_mesh(the_world()), dtype, zero1=True)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        settings = {"folder": Path(folder, "engine"), "max_length": 32 + T, "dtype": dtype, "gpu_memory": 0.3}
        made = make_engine("vllm", model, tokenizer, rows=4 * count, **settings)
        yield row("vLLM: start of the engine", time.perf_counter() - start, "s")
        made.stop_ids = []  # no row ends early
        prompts = prompts_of(count, len(tokenizer), device)
        numel = sum(p.numel() for p in model.parameters())
        rollouts, matched = [], []
        for version in range(2):
            seconds = timed(lambda version=version: sync_weights(made, model, version, tolerance=TOLERANCE))
            rate = numel * dtype.itemsize / seconds / 1e9
            claims = claim(device, "P6", 1 / rate <= 0.2, f"{1 / rate:.2f} s a GB") if version else ()
            size = numel * dtype.itemsize
            yield row(f"vLLM: sync {version}, checked", seconds, "s", None, claims, gb_per_s=rate, bytes=size)
            difference = made.verified["rollout/canary_logp_diff"]
            yield row(f"vLLM: sync {version}, difference on the probe", difference, "nats")
            made.generate(prompts, Sampling(2), list(range(count)))
            seconds = timed(lambda: rollouts.append(made.generate(prompts, Sampling(T), list(range(count)))))
            rate, label = count * T / seconds, f"rollout of {count} rows, weights {version}"
            summary = {"rollout": f"vLLM, qwen2.5-0.5b, {count} rows: {rate:,.0f} tokens/s"} if version else {}
            yield row(f"vLLM: {label}", rate, "tokens/s", summary=summary)
            k1, k3, largest = mismatch(model, rollouts[-1])
            yield row(f"vLLM: mismatch k3, weights {version}", k3, "nats", k3 < 0.01, k1=k1, largest=largest)
            matched.append(k3)
            if version:
                yield from steps(made, rollouts[-1], T, count, device)
                yield from alone(made, prompts, rollouts[-1], "vLLM")
                apart = mismatch(model, rollouts[0])[1]
                yield row(
                    "vLLM: k3 of the first rollout under the second weights", apart, "nats", apart > 10 * max(matched)
                )
            yield from sleep(made, device)
            change(model)
        made.close()


@torch.no_grad()
def change(model: PreTrainedModel) -> None:
    for p in trainable_parameters(model):
        p.mul_(1.5)
    refresh_weights(model)


def prompts_of(count: int, vocabulary: int, device: torch.device) -> DataProto:
    prompts = random_batch([32] * count, [1] * count, vocabulary, device)
    for key in ("input_ids", "attention_mask", "position_ids"):
        prompts.batch[key] = prompts.batch[key][:, :32]
    prompts.non_tensor_batch["raw_prompt_ids"] = np.array([ids.tolist() for ids in prompts.batch["input_ids"]], object)
    return prompts


def mismatch(model: PreTrainedModel, rollout: DataProto) -> tuple[float, float, float]:
    """(k1, k3, largest |difference|) of KL(rollout || trainer), over the sampled tokens."""
    trainer = batched_log_probs(model, rollout, 1.0, 16384)[0]
    mask = rollout.batch["response_mask"].bool()
    difference = (trainer - rollout.batch["rollout_log_probs"])[mask].double()
    k3 = (torch.expm1(difference) - difference).mean()
    return -difference.mean().item(), k3.item(), difference.abs().max().item()


def alone(made: VLLMEngine, prompts: DataProto, rollout: DataProto, label: str, certain=False) -> Iterator[dict]:
    """The first rows of `rollout` again, one by one. certain: whether tokens and log-probs have to be equal."""
    rows, T, equal = 8, rollout.batch["responses"].shape[1], 0
    for i in range(rows):
        again = made.generate(prompts[i : i + 1], Sampling(T), [i])
        tokens, log_probs = (again.batch[key][0] == rollout.batch[key][i] for key in ("responses", "rollout_log_probs"))
        equal += (tokens.cumprod(0).bool() & log_probs).sum().item()  # after another token everything differs
    ok = equal == rows * T if certain else None
    yield row(f"{label}: log-probs of a row among others that equal those of it alone", equal / (rows * T), "", ok)


def steps(made: VLLMEngine, rollout: DataProto, T: int, count: int, device: torch.device) -> Iterator[dict]:
    """The same requests by both schedulers, what the GPU computes in them, and log-probs as one object a token, where
    ours are flat lists (G16)."""
    prompts = [{"prompt_token_ids": list(ids)} for ids in rollout.non_tensor_batch["raw_prompt_ids"]]

    def run(rows: int = count, flat: bool = True) -> list:
        params = [made._params(T, temperature=1.0, logprobs=0, seed=i) for i in range(rows)]
        for p in params:
            p.flat_logprobs = flat
        return made._run([prompts[i % count] for i in range(rows)], params)

    for rows in sorted({max(1, count // 256), count // 4, count, 4 * count}):
        yield from schedulers(made, partial(run, rows), rows, T, device)
    if device.type == "cuda":
        kernels = sum(ms for _, ms in kernels_of(run).values())
        yield row(f"vLLM: what the GPU computes in a step of {count} rows", kernels / T, "ms")
    pairs = [(timed(run), timed(partial(run, flat=False))) for _ in range(3)]  # in turns, for a machine's speed varies
    ratio = min(objects for _, objects in pairs) / min(flat for flat, _ in pairs)
    said = f"one object a log-prob takes {ratio:.2f} times as long as flat lists"
    yield row("vLLM: log-probs as objects / flat", ratio, "", None, claim(device, "G16", ratio > 1.02, said))


def schedulers(made: VLLMEngine, run: Callable[[], list], rows: int, T: int, device: torch.device) -> Iterator[dict]:
    """A step by vLLM's scheduler and by the one for rollouts, in turns. Tokens, log-probs and reasons have to be equal,
    and a step of 256 rows of 0.5B to take 5 ms at most."""
    seconds, found = {True: 9e9, False: 9e9}, {}
    for ours in (False, True) * 3:
        made._scheduler.handles_rows = ours
        start = time.perf_counter()
        outputs = run()
        seconds[ours] = min(seconds[ours], time.perf_counter() - start)
        found[ours] = [generated(output) for output in outputs]
    vllms, own = 1e3 * seconds[False] / T, 1e3 * seconds[True] / T
    claims = claim(device, "P4", own <= 5, f"{own:.1f} ms") if rows == 256 else ()
    yield row(f"vLLM: a step of {rows} rows, by its own scheduler", vllms, "ms")
    yield row(f"vLLM: a step of {rows} rows", own, "ms", None, claims, tokens_per_s=rows * T / seconds[True])
    equal = sum(a == b for a, b in zip(found[True], found[False])) / rows
    yield row(f"vLLM: {rows} rows, equal by both schedulers", equal, "", equal == 1)


def sleep(made: VLLMEngine, device: torch.device) -> Iterator[dict]:
    if device.type == "cpu":
        yield skipped("vLLM: sleep", "on a CPU the engine does not sleep")
        return
    free = torch.cuda.mem_get_info()[0]
    seconds = timed(made.sleep)
    freed = (torch.cuda.mem_get_info()[0] - free) / 2**30
    yield row("vLLM: sleep", seconds, "s", freed > 1, freed_gib=freed)
