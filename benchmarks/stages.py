"""Parts of a step beside the plain way to do them, in turns in one run.

    python -m benchmarks.stages [--parts kernels log_probs hf vllm host scheduler] [--repeats 7] [--output FILE.json]

kernels: advantages and policy losses with their backward, beside verl's functions of the same name, on 512 rows of 1024
tokens; log_probs: log-prob and entropy, forward and backward, of 2048 tokens and a vocabulary of 32,000, beside full
logits; hf: HFEngine beside transformers' generate, 32 prompts of 15 tokens with 8 responses of 16; vllm: VLLMEngine
beside its own LLM.generate with the same requests; scheduler: VLLMEngine with our scheduler and with vLLM's, 256 to
4096 rows of 32 tokens; host: what a step does outside the model, for --rows responses of 8 to 256 tokens to prompts of
64, eight each, spread over the ranks of torchrun. That both sides give the same is checked first, but for hf, whose
generate draws otherwise. Medians of CPU seconds of this process, which is rank 0, of scheduler the least; peak: MiB
beyond what was there before.

verl is optional: `pip install --no-deps --target DIR verl==0.9.1 ray omegaconf antlr4-python3-runtime==4.9.3 hydra-core
codetiming orjson`, then PYTHONPATH=DIR. Without it the kernels are timed alone.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import GenerationConfig

from benchmarks.update import environment, peak_memory
from grpo import add_advantages
from lib.core_algos import agg_loss, compute_gae_advantage_return, get_adv_estimator_fn, get_policy_loss_fn
from lib.data import exchange_groups, prefix_tree, prepare_dynamic_batch
from lib.data_proto import DataProto
from lib.distributed import init_distributed, make_mesh, shard_model, unsharded
from lib.log import row_metrics
from lib.log.rollouts import taken_out, write_rollouts
from lib.model import LinearLogProbs, load_model, load_tokenizer
from lib.rollout import Generated, HFEngine, Sampling, add_responses, make_engine, sync_weights
from tests.common import TOY_MODEL, rollout_batch

Sides = dict[str, Callable[[], object]]


def in_turns(sides: Sides, repeats: int) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):  # the first is not counted
        for name, run in sides.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {
        name: {"cpu_s": statistics.median(seconds[name][1:]), "peak": peak_memory(run)} for name, run in sides.items()
    }


def same(sides: Sides, mask: torch.Tensor | float = 1.0) -> Sides:
    """Checked: the sides, whose tensors agree where the mask is."""
    first, *others = ([x * mask for x in run()] for run in sides.values())
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-4)
    return sides


def verls(config: dict) -> dict[str, Callable] | None:
    """verl's kernels by our names, on our arguments."""
    if importlib.util.find_spec("verl") is None:
        return None
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    settings = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, **config)
    return {
        "grpo": core_algos.compute_grpo_outcome_advantage,
        "gae": core_algos.compute_gae_advantage_return,
        "vanilla": lambda *args: core_algos.compute_policy_loss_vanilla(*args, "token-mean", settings)[0],
        "gspo": lambda *args: core_algos.compute_policy_loss_gspo(*args, "seq-mean-token-mean", settings)[0],
    }


def kernels() -> Iterator[tuple[str, Sides]]:
    B, T, G = 512, 1024, 8
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(B, T, generator=g)
    new = (old + 0.1 * torch.randn(B, T, generator=g)).requires_grad_()
    mask = (torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=g)).long()
    rewards = torch.zeros(B, T).scatter(1, mask.sum(1, keepdim=True) - 1, torch.randn(B, 1, generator=g))
    values = torch.randn(B, T, generator=g) * mask
    index = np.repeat(np.arange(B // G).astype(str), G).astype(object)
    advantages = torch.randn(B, 1, generator=g) * mask
    theirs = verls({"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0})

    def gradient(loss: Callable) -> Callable:
        return lambda: torch.autograd.grad(loss(old, new, advantages, mask), new)

    def sides(name: str, ours: Callable, wrap: Callable) -> tuple[str, Sides]:
        both = {"plainrl": ours} | ({"verl": theirs[name]} if theirs else {})
        return name, same({side: wrap(function) for side, function in both.items()}, mask)

    yield sides("grpo", get_adv_estimator_fn("grpo"), lambda f: lambda: f(rewards, mask, index))
    yield sides("gae", compute_gae_advantage_return, lambda f: lambda: f(rewards, values, mask, 1.0, 0.95))
    for name, mode in (("vanilla", "token-mean"), ("gspo", "seq-mean-token-mean")):
        settings = {"cliprange_low": 0.2, "cliprange_high": 0.2} | ({"clip_ratio_c": 3.0} if name == "vanilla" else {})
        loss = get_policy_loss_fn(name, settings)
        yield sides(name, lambda *args, loss=loss, mode=mode: agg_loss(loss(*args)[0], args[3], mode), gradient)


def log_probs() -> Iterator[tuple[str, Sides]]:
    N, D, V = 2048, 256, 32_000
    g = torch.Generator().manual_seed(0)
    h, weight = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((N, D), (V, D)))
    y = torch.randint(V, (N,), generator=g)

    def plain(h, weight):
        log_p = torch.log_softmax(h @ weight.T / 16, -1)
        return log_p.gather(-1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def gradient(function):
        return lambda: torch.autograd.grad(sum(x.sum() for x in function(h, weight)), (h, weight))

    chunked = gradient(lambda h, weight: LinearLogProbs.apply(h, weight, y, 1 / 16, 256))
    yield "log_probs", same({"plainrl": chunked, "full logits": gradient(plain)})


def prompts_and_model(world):
    model = shard_model(load_model(TOY_MODEL), make_mesh(world), torch.float32)
    prompts = DataProto.concat([rollout_batch([15] * 32, [1] * 32)] * 8)
    for name in ("input_ids", "attention_mask", "position_ids"):
        prompts.batch[name] = prompts.batch[name][:, :15]
    ids = np.empty(len(prompts), object)
    ids[:] = prompts.batch["input_ids"].tolist()
    prompts.non_tensor_batch["raw_prompt_ids"] = ids
    return prompts, model, load_tokenizer(TOY_MODEL)


def hf(world) -> Iterator[tuple[str, Sides]]:
    prompts, model, tokenizer = prompts_and_model(world)
    engine = HFEngine(model, tokenizer)
    engine.stop_ids = torch.tensor([-1])  # no row ends early, on either side
    how = GenerationConfig(do_sample=True, max_new_tokens=16, min_new_tokens=16, pad_token_id=0, top_k=0)
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]

    @torch.no_grad()
    def bare():
        with unsharded(model):
            return model.generate(ids, attention_mask=mask, generation_config=how)

    yield "hf", {"plainrl": lambda: engine.generate(prompts, Sampling(16), list(range(256))), "generate": bare}


def vllm(world) -> Iterator[tuple[str, Sides]]:
    from vllm import SamplingParams

    prompts, model, tokenizer = prompts_and_model(world)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": Path(folder), "max_length": 64, "dtype": torch.float32, "gpu_memory": 0.3}
        engine = make_engine("vllm", model, tokenizer, **settings)
        sync_weights(engine, model, 0, tolerance=1e-3)
        ids = [{"prompt_token_ids": row} for row in prompts.non_tensor_batch["raw_prompt_ids"]]
        sampling = {"max_tokens": 16, "detokenize": False, "logprobs": 0, "stop_token_ids": engine.stop_ids}

        def bare():
            params = [SamplingParams(seed=seed, **sampling) for seed in range(256)]
            return engine.llm.generate(ids, params, use_tqdm=False)

        ours = engine.generate(prompts, Sampling(16), list(range(256))).batch["responses"].tolist()
        theirs = [list(out.outputs[0].token_ids) for out in bare()]
        assert all(row[: len(tokens)] == tokens for row, tokens in zip(ours, theirs))
        yield "vllm", {"plainrl": lambda: engine.generate(prompts, Sampling(16), list(range(256))), "generate": bare}
        engine.close()


def scheduler(world, repeats: int) -> dict[str, dict]:
    """Least CPU seconds of a rollout, and of its parts in microseconds a row and step, by rows and scheduler."""
    prompts, model, tokenizer = prompts_and_model(world)
    T, found = 32, {}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": Path(folder), "max_length": 64, "dtype": torch.float32, "gpu_memory": 0.3}
        engine = make_engine("vllm", model, tokenizer, more={"max_num_seqs": 1024}, **settings)
        sync_weights(engine, model, 0, tolerance=1e-3)
        engine.stop_ids = []  # no row ends early
        llm, core = engine.llm.llm_engine, engine.llm.llm_engine.engine_core.engine_core
        parts = {"schedule": (core.scheduler, "schedule"), "update": (core.scheduler, "update_from_output")}
        parts |= {
            "outputs": (llm.output_processor, "process_outputs"),
            "runner": (core.model_executor, "execute_model"),
        }
        parts["sampler"] = core.model_executor, "sample_tokens"
        seconds: dict[str, float] = {}

        def clock(name: str, function: Callable) -> Callable:
            def run(*args, **kwargs):
                start = time.process_time()
                result = function(*args, **kwargs)
                seconds[name] += time.process_time() - start
                return result

            return run

        for name, (owner, method) in parts.items():
            setattr(owner, method, clock(name, getattr(owner, method)))
        for rows in (256, 1024, 4096):
            many, results, digests = DataProto.concat([prompts] * (rows // 256)), {}, set()
            for turn in range(repeats + 1):  # the first is not counted
                for name, own in (("plainrl", True), ("vLLM's", False)):
                    core.scheduler.handles_rows, seconds = own, dict.fromkeys(parts, 0.0)
                    start = time.process_time()
                    batch = engine.generate(many, Sampling(T), list(range(rows))).batch
                    whole = time.process_time() - start
                    digests.add((batch["responses"].sum().item(), batch["rollout_log_probs"].double().sum().item()))
                    us = {part: 1e6 * spent / rows / T for part, spent in seconds.items()}
                    if turn and whole < results.get(name, {"cpu_s": whole + 1})["cpu_s"]:
                        results[name] = {"cpu_s": whole, "us_a_row_and_step": us}
            assert len(digests) == 1
            found[f"scheduler {rows}"] = results
        engine.close()
    return found


def host(world, total: int) -> Iterator[tuple[str, Sides]]:
    P, T, G, B = 64, 256, 8, total // world.size
    g = torch.Generator().manual_seed(world.rank)
    lengths = (4.6 + 0.6 * torch.randn(B, generator=g)).exp().long().clamp(8, T).tolist()
    tokens = torch.randint(3, 40, (B, P + T), generator=g)
    tokens[:, :P] = tokens[::G, :P].repeat_interleave(G, 0)
    prompt = {"input_ids": tokens[:, :P], "attention_mask": torch.ones(B, P).long(), "position_ids": torch.arange(P)}
    columns = {
        "uid": [f"1-{i // G + world.rank * B}" for i in range(B)],
        "raw_prompt": [[{"role": "user", "content": "x"}]] * B,
        "reward_model": [{"ground_truth": "7"}] * B,
        "data_source": ["toy"] * B,
        "reward_extra_info": [{"acc": 1.0}] * B,
    }
    prompts = DataProto.from_dict(prompt | {"position_ids": torch.arange(P).repeat(B, 1)}, columns)
    rows = [Generated(ids[P : P + n], [-0.5] * n, "stop") for ids, n in zip(tokens.tolist(), lengths)]
    batch = add_responses(prompts, rows, 0)
    yield f"add_responses {total}", {"plainrl": lambda: add_responses(prompts, rows, 0)}
    uids = [f"1-{k + rank * B}" for rank in range(world.size) for k in range(B // G)]
    plan = [dict.fromkeys(uids[rank :: world.size], 0) for rank in range(world.size)]
    yield f"exchange_groups {total}", {"plainrl": lambda: exchange_groups(batch, plan)}
    t = batch.batch
    last = torch.tensor(lengths)[:, None] - 1
    t["token_level_scores"] = torch.zeros(B, T).scatter(1, last, torch.rand(B, 1, generator=g)) * t["response_mask"]
    args = SimpleNamespace(adv_settings={}, adv_estimator="grpo", kl_coef=0.0, zero_variance="keep", mask_settings={})
    needs = SimpleNamespace(columns=(), correction={})
    add_advantages(args, batch, needs, None, 1)
    yield f"advantages {total}", {"plainrl": lambda: add_advantages(args, batch, needs, None, 1)}
    yield (
        f"prepare_dynamic_batch {total}",
        {"plainrl": lambda: prepare_dynamic_batch(batch, 16_384, share_prompts=True)},
    )
    micros, _ = prepare_dynamic_batch(batch, 16_384, share_prompts=True)
    yield f"prefix_tree {total}", {"plainrl": lambda: [prefix_tree(micro) for micro in micros]}
    t["log_probs"], t["entropy"] = t["rollout_log_probs"].clone(), t["rollout_log_probs"].clone()
    yield f"row_metrics {total}", {"plainrl": lambda: row_metrics(batch)}
    yield f"taken_out {total}", {"plainrl": lambda: taken_out(batch, list(range(B)))}
    kept, tokenizer = taken_out(batch, list(range(B))), load_tokenizer(TOY_MODEL)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rollouts", f"{world.rank}.parquet")
        yield f"write_rollouts {total}", {"plainrl": lambda: write_rollouts(file, 1, kept, tokenizer)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["kernels", "log_probs", "hf", "vllm", "scheduler"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 8192, 65_536])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    world = init_distributed()
    of_world = {"hf": [partial(hf, world)], "vllm": [partial(vllm, world)]}
    parts = {"kernels": [kernels], "log_probs": [log_probs], "host": [partial(host, world, n) for n in args.rows]}
    results = environment() | {"ranks": world.size, "repeats": args.repeats, "stages": {}}
    for part in itertools.chain(*((parts | of_world)[name] for name in args.parts if name != "scheduler")):
        for name, sides in part():
            found = results["stages"][name] = in_turns(sides, args.repeats)
            for side, r in found.items():
                ratio = r["cpu_s"] / found["plainrl"]["cpu_s"]
                said = f"{name:28} {side:12} {r['cpu_s']:8.4f} CPU s  {ratio:5.2f}  {r['peak']:6.0f} MiB"
                if world.rank == 0:
                    print(said, flush=True)
    if "scheduler" in args.parts:
        results["stages"] |= (of_scheduler := scheduler(world, args.repeats))
        print(json.dumps(of_scheduler, indent=1))
    if args.output and world.rank == 0:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
