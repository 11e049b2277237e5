"""Forward and backward of one update: rows padded, packed, and packed with shared prefixes, alternating in one run.

    python -m benchmarks.update [--rows 128] [--repeats 7] [--output benchmarks/results/update.json]

The work between the banners "5 update" and the optimizer in grpo.py: micro-batches by tokens, log-probs and entropy of
a Qwen2 of 1.1 M parameters (4 layers, 4 heads, 2 of keys), a loss, its gradient; one thread. Groups of 8 responses.
short: prompts of 15 tokens, responses of 16; skewed: prompts of 64, responses of 1 to 128, log-normal with a mean of
30; long_prompt: prompts of 512, responses of 256; agent: prompts of 256, four parallel calls in the prompt's context,
with 8 tokens of their own and answers of 32, and a call whose context is the prompt and 96 tokens of rewritten history,
with an answer of 64: five segments of a row, each of which repeats the prompt. That the three gradients are equal is
checked first, in float64.

seconds and cpu_seconds are medians. tokens: those that the model computes; padding: the share of them that is padding;
attention_padding: the same of the queries of the attention, in which what follows a shared prefix is padded to about
equal length. peak_memory: MiB beyond what was there before, of one micro-batch after the other.
"""

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from lib.data import prepare_dynamic_batch
from lib.data_proto import DataProto
from lib.model import load_model, response_log_probs

GROUP = 8
VARIANTS = {
    "padded": {"padding_free": False, "share_prompts": False},
    "packed": {"padding_free": True, "share_prompts": False},
    "packed_shared": {"padding_free": True, "share_prompts": True},
}


def rollout(setting: str, rows: int) -> DataProto:
    """Prompts of one length, each `GROUP` times, and responses, of random tokens."""
    g = torch.Generator().manual_seed(0)
    P, T = {"short": (15, 16), "skewed": (64, 128), "long_prompt": (512, 256)}[setting]
    lengths = torch.full((rows,), T)
    if setting == "skewed":
        lengths = torch.empty(rows).log_normal_(3.0, 0.9, generator=g).long().clamp(1, T)
    prompts = torch.randint(4, 1000, (rows // GROUP, P), generator=g).repeat_interleave(GROUP, 0)
    responses = torch.randint(4, 1000, (rows, T), generator=g)
    mask = (torch.arange(T) < lengths[:, None]).long()
    tensors = {
        "input_ids": torch.cat([prompts, responses * mask], 1),
        "attention_mask": torch.cat([torch.ones_like(prompts), mask], 1),
        "position_ids": torch.arange(P + T).repeat(rows, 1),
        "responses": responses * mask,
        "response_mask": mask,
        "advantages": torch.randn(rows, 1, generator=g) * mask,
    }
    return DataProto.from_dict(tensors=tensors)


def agents_rollout(rows: int) -> DataProto:
    g = torch.Generator().manual_seed(0)
    P, calls = 256, [(8, 32)] * 4 + [(96, 64)]  # of each call: tokens of text behind the prompt, and of its answer
    prompts = torch.randint(4, 1000, (rows // GROUP, P), generator=g).repeat_interleave(GROUP, 0)
    parts, positions, mask = [prompts], [torch.arange(P)], [torch.zeros(P)]
    for i, (text, answer) in enumerate(calls):
        repeated = prompts[:, : P if i else 0]
        parts += [repeated, torch.randint(4, 1000, (rows, text + answer), generator=g)]
        positions.append(torch.arange(0 if i else P, P + text + answer))
        mask += [torch.zeros(repeated.shape[1] + text), torch.ones(answer)]
    ids, mask = torch.cat(parts, 1), torch.cat(mask).long().repeat(rows, 1)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, P:]}
    tensors |= {"position_ids": torch.cat(positions).repeat(rows, 1), "response_mask": mask[:, P:]}
    tensors["advantages"] = torch.randn(rows, 1, generator=g) * mask[:, P:]
    return DataProto.from_dict(tensors=tensors)


def update(model, batch: DataProto, max_tokens: int, padding_free: bool, share_prompts: bool) -> None:
    micro_batches, _ = prepare_dynamic_batch(batch, max_tokens, share_prompts=share_prompts)
    for micro in micro_batches:
        log_probs, entropy = response_log_probs(
            model, micro, 1.0, padding_free=padding_free, share_prompts=share_prompts
        )
        ratio = (log_probs - log_probs.detach()).exp()
        (-(ratio * micro.batch["advantages"]).sum() - 0.01 * entropy.sum()).backward()


def gradient(model, *arguments, **options) -> torch.Tensor:
    model.zero_grad()
    update(model, *arguments, **options)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def computed_tokens(model, batch: DataProto, max_tokens: int, options: dict) -> dict[str, float]:
    """Tokens through the model's layers, and the padding among them and among the queries of its attention."""
    tokens = queries = needed = 0

    def count(module, args, kwargs):
        nonlocal tokens, queries
        runs, n = kwargs.get("packed_runs"), kwargs["input_ids"].numel()
        tokens += n
        queries += n if runs is None else sum(run.count * run.length for run in runs.runs)

    handle = model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    with torch.no_grad():
        update_options = {key: options[key] for key in ("padding_free", "share_prompts")}
        for micro in prepare_dynamic_batch(batch, max_tokens, share_prompts=options["share_prompts"])[0]:
            before = tokens
            response_log_probs(model, micro, 1.0, **update_options)
            needed += tokens - before if options["padding_free"] else int(micro.batch["attention_mask"].sum())
    handle.remove()
    return {"tokens": tokens, "padding": 1 - needed / tokens, "attention_padding": 1 - needed / queries}


def memory(name: str) -> float:
    """VmRSS or VmHWM of this process, MiB."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def peak_memory(run: Callable[[], object]) -> float:
    """MiB that `run` takes at most beyond what is there before."""
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps would be taken again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    run()
    return memory("VmHWM") - before


def measure(model, batch: DataProto, max_tokens: int, repeats: int) -> dict[str, dict]:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for _ in range(repeats + 1):  # the first is not counted
        for name, options in VARIANTS.items():
            start = time.perf_counter(), time.process_time()
            update(model, batch, max_tokens, **options)
            times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    results = {}
    for name, options in VARIANTS.items():
        seconds, cpu_seconds = (statistics.median(column) for column in zip(*times[name][1:]))
        results[name] = {"seconds": seconds, "cpu_seconds": cpu_seconds}
        results[name] |= computed_tokens(model, batch, max_tokens, options)
        model.zero_grad()
        results[name]["peak_memory"] = peak_memory(partial(update, model, batch, max_tokens, **options))
    return results


def environment() -> dict:
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    describe = ["git", "describe", "--always", "--dirty"]
    return {
        "machine": {"cpu": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(), "threads": 1},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "commit": subprocess.run(describe, capture_output=True, text=True).stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--settings", nargs="+", default=["short", "skewed", "long_prompt", "agent"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        model, exact = load_model(folder), load_model(folder, dtype=torch.float64)
    results = environment() | {"parameters": sum(p.numel() for p in model.parameters()), "settings": {}}
    results |= {"group_size": GROUP, "micro_batch_tokens": args.micro_batch_tokens}
    print(f"{'setting':12} {'variant':14} {'s':>8} {'cpu s':>8} {'ratio':>6} {'tokens':>7} {'padding':>8} {'MiB':>7}")
    for setting in args.settings:
        rows = args.rows // 4 if setting in ("long_prompt", "agent") else args.rows
        batch = agents_rollout(rows) if setting == "agent" else rollout(setting, rows)
        first, *others = [gradient(exact, batch[: 2 * GROUP], 4096, **options) for options in VARIANTS.values()]
        # transformers' norms compute in float32, whose rounding is what is left
        assert all((first - other).norm() < 1e-6 * first.norm() for other in others), setting
        results["settings"][setting] = {"rows": rows} | measure(model, batch, args.micro_batch_tokens, args.repeats)
        padded = results["settings"][setting]["padded"]["cpu_seconds"]
        for name in VARIANTS:
            r = results["settings"][setting][name]
            print(
                f"{setting:12} {name:14} {r['seconds']:8.3f} {r['cpu_seconds']:8.3f} {padded / r['cpu_seconds']:6.2f} "
                f"{r['tokens']:7} {r['padding']:8.1%} {r['peak_memory']:7.0f}",
                flush=True,
            )
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
