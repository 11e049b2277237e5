"""What a GPU is to confirm, in less than 8 minutes, without network, vLLM or a checkpoint: started by gpu_check.sh.

    numerics    packed log-probs, entropies and gradients against the padded eager model, in fp32 and bf16
    scripts     grpo.py learns the embedded task and resumes bit for bit; two steps of ppo.py, dapo.py and remax.py
    memory      the peak of a step against lib/model/memory.py, for models of 0.5, 1.5 and 3 B random parameters
    throughput  MFU of an update (forward, backward, AdamW), tokens per second of hf rollouts

Each part is a process of its own: one that fails is reported, and the others go on. Writes a JSON file and prints its
table; exit code 1 if a check fails. --device cpu --tiny runs all of it small, which proves that the parts run.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lib.data_proto import DataProto
from lib.distributed import init_distributed, make_mesh, shard_model, trainable_parameters
from lib.model import add_lora, batched_log_probs, load_tokenizer, response_log_probs
from lib.model.attention import lay_out
from lib.model.load import _prepare
from lib.model.log_probs import token_log_probs
from lib.model.memory import estimate_memory, shard_numel
from lib.rollout import HFEngine, Sampling

ROOT = Path(__file__).parent.parent
TOY_MODEL = str(ROOT / "data/toy/model")
DENSE_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # of the vendor's data sheets
DEADLINE_S = 450


@dataclass
class Options:
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: to try the script itself"""
    tiny: bool = False
    """the embedded model for all parts, two steps of the scripts"""
    parts: tuple[str, ...] = ("numerics", "scripts", "memory", "throughput")
    """which parts to run"""
    output: Path = ROOT / "benchmarks/results/gpu_check.json"
    """where the results go"""


def row(check: str, value: float, unit: str, ok: bool | None = None, **more) -> dict:
    """One line of the table; ok is None for what is only recorded."""
    return {"check": check, "value": value, "unit": unit, "ok": ok, **more}


# ---- models and batches --------------------------------------------------------------------------


def shape(options: Options, name: str) -> str:
    return f"{TOY_MODEL}/config.json" if options.tiny else str(ROOT / f"benchmarks/shapes/{name}.json")


def random_model(path: str, device: torch.device, gradient_checkpointing: bool = False, **config) -> PreTrainedModel:
    """As `load_model` gives it, with random fp32 weights made on the device."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path, **config), dtype=torch.float32, attn_implementation="packed_sdpa"
        )
    lay_out(model, path)
    return _prepare(model, token_log_probs, gradient_checkpointing)


def random_batch(prompts: list[int], responses: list[int], vocabulary: int, device: torch.device) -> DataProto:
    """Rows of these lengths, as a rollout engine returns them."""
    rng = np.random.default_rng(0)
    P, T = max(prompts), max(responses)
    column = torch.arange(P + T)[None]
    first, end = P - torch.tensor(prompts)[:, None], P + torch.tensor(responses)[:, None]
    mask = ((column >= first) & (column < end)).long()
    ids = torch.from_numpy(rng.integers(4, vocabulary, mask.shape)) * mask
    tensors = {
        "prompts": ids[:, :P],
        "responses": ids[:, P:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (column - first).clamp(min=0),
        "response_mask": mask[:, P:],
    }
    return DataProto.from_dict(tensors=tensors).to(device)


def backward(model: PreTrainedModel, batch: DataProto, **options) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, entropy = response_log_probs(model, batch, 1.0, **options)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    return log_probs.detach(), entropy.detach()


# ---- numerics ------------------------------------------------------------------------------------


def numerics(options: Options, device: torch.device) -> list[dict]:
    """bf16 is judged against the fp32 eager model: packed may be off by twice what eager bf16 is."""
    path = shape(options, "qwen2.5-0.5b")
    model = random_model(path, device, num_hidden_layers=2 if options.tiny else 6)
    scale = 1 if options.tiny else 10
    prompts, responses = [9, 2, 3, 7, 5, 2, 4, 3], [17, 12, 1, 2, 16, 3, 2, 5]
    batch = random_batch([n * scale for n in prompts], [n * scale for n in responses], model.config.vocab_size, device)

    def outputs(attention: str, dtype: torch.dtype) -> list[torch.Tensor]:
        model.set_attn_implementation(attention)
        model.zero_grad()
        for p in model.parameters():  # rotary tables stay fp32, as under FSDP
            p.data = p.data.to(dtype)
        packed = attention == "packed_sdpa"
        log_probs, entropy = backward(model, batch, padding_free=packed)
        return [log_probs, entropy, torch.cat([p.grad.flatten().float() for p in model.parameters()])]

    def errors(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[float]:
        log_probs, entropy = ((a - b).abs().max().item() for a, b in zip(ours[:2], theirs[:2]))
        return [log_probs, entropy, ((ours[2] - theirs[2]).norm() / theirs[2].norm()).item()]

    exact = outputs("eager", torch.float32)
    packed = errors(outputs("packed_sdpa", torch.float32), exact)
    packed_bf16 = errors(outputs("packed_sdpa", torch.bfloat16), exact)
    eager_bf16 = errors(outputs("eager", torch.bfloat16), exact)
    names = {"log-probs, largest difference": "nats", "entropy, largest difference": "nats", "gradient, relative": ""}
    rows = [row(f"packed fp32: {name}", x, unit, x < 1e-4) for (name, unit), x in zip(names.items(), packed)]
    for (name, unit), x, limit in zip(names.items(), packed_bf16, eager_bf16):
        rows.append(row(f"packed bf16: {name}", x, unit, x <= 2 * limit, eager_bf16=limit))
    return rows


# ---- scripts -------------------------------------------------------------------------------------


def run_script(options: Options, script: str, folder: str, name: str, *flags: str) -> list[dict]:
    """The rows of its metrics.jsonl."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"ACCELERATE_USE_CPU": "true"} if options.device == "cpu" else {})
    command = [sys.executable, f"{script}.py", "--output-dir", folder, "--run-name", name, *flags]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in Path(folder, name, "metrics.jsonl").read_text().splitlines()]


def scripts(options: Options, device: torch.device) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        steps, small = ("2", ("--no-val-before-train", "--val-every", "0")) if options.tiny else ("30", ())
        save = ("--save-every", "1" if options.tiny else "15", "--keep-checkpoints", "0")
        whole = run_script(options, "grpo", folder, "whole", "--total-steps", steps, *save, *small)
        seconds = time.perf_counter() - start
        accuracy = [r["val/toy/arithmetic/mean@1"] for r in whole if "val/toy/arithmetic/mean@1" in r]
        rows = [row("grpo.py, whole run", seconds, "s", steps=int(steps))]
        rows.append(row("grpo.py, seconds of steps", sum(r.get("timing_s/step", 0) for r in whole), "s"))
        if accuracy:
            rows.append(row("grpo.py, accuracy before", accuracy[0], ""))
            rows.append(row("grpo.py, accuracy after", accuracy[-1], "", accuracy[-1] > 0.8))

        middle = Path(folder, "whole/checkpoints", f"step_{int(steps) // 2:06}")
        last = run_script(
            options, "grpo", folder, "resumed", "--resume", str(middle), "--total-steps", steps, *save, *small
        )[-1]
        same = [key for key in whole[-1] if not key.startswith(("timing_s/", "perf/"))]
        different = [key for key in same if last[key] != whole[-1][key]]
        weights = [Path(folder, run, "model/model.safetensors").read_bytes() for run in ("whole", "resumed")]
        rows.append(row("resumed run, metrics that differ", len(different), "", not different, names=different))
        rows.append(row("resumed run, weights equal", weights[0] == weights[1], "", weights[0] == weights[1]))

        for script in () if options.tiny else ("ppo", "dapo", "remax"):
            start = time.perf_counter()
            try:
                metrics = run_script(options, script, folder, script, "--total-steps", "2", "--save-every", "0")
                ok = all(np.isfinite(v) for r in metrics for v in r.values() if isinstance(v, float))
                rows.append(row(f"{script}.py, two steps", time.perf_counter() - start, "s", ok))
            except RuntimeError as error:
                rows.append(row(f"{script}.py, two steps", time.perf_counter() - start, "s", False, error=str(error)))
        return rows


# ---- memory --------------------------------------------------------------------------------------


def peak_bytes(fn: Callable[[], None], device: torch.device) -> int:
    """What the allocator held at most while `fn` ran; on a CPU, beyond what there was."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        fn()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        fn()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max())


def memory(options: Options, device: torch.device) -> list[dict]:
    """Within 25 % of the estimate, for a step of one micro-batch on one rank in bf16."""
    rows = []
    tokens, count = (256, 4) if options.tiny else (4096, 8)
    for name in ("qwen2.5-0.5b",) if options.tiny else ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"):
        for checkpointing, lora_rank in ((False, 0), (True, 0), (True, 32)):
            path = shape(options, name)
            label = f"{name}{', checkpointing' * checkpointing}{f', LoRA {lora_rank}' if lora_rank else ''}"
            model = random_model(path, device, checkpointing)
            if lora_rank:
                add_lora(model, rank=lora_rank, alpha=32, seed=0)
                model.to(device)
            model = shard_model(model, make_mesh(init_distributed_once()), torch.bfloat16)
            parameters = trainable_parameters(model)
            optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
            length = tokens // count
            batch = random_batch([length // 4] * count, [length - length // 4] * count, model.config.vocab_size, device)

            def step(model=model, batch=batch, optimizer=optimizer):
                batched_log_probs(model, batch, 1.0, tokens)
                backward(model, batch)
                optimizer.step()
                optimizer.zero_grad()

            step()  # Adam's moments are there from the second on
            measured = peak_bytes(step, device)
            moments = estimate_memory(
                path,
                ranks=1,
                compute_dtype=torch.bfloat16,
                micro_batch_tokens=tokens,
                rows=count,
                max_prompt_length=length // 4,
                max_response_length=length - length // 4,
                accumulation="none",
                gradient_checkpointing=checkpointing,
                lora_rank=lora_rank,
            )
            measured_moments = ("log-probs", "loss", "backward", "last layer", "optimizer")
            held = 0 if device.type == "cuda" else moments["loss"]["weights"] + moments["loss"]["Adam"]
            estimate = max(sum(moments[moment].values()) for moment in measured_moments) - held
            ratio = estimate / measured
            # a CPU has no foreach: its optimizer needs less
            ok = abs(ratio - 1) <= 0.25 if device.type == "cuda" else None
            rows.append(row(f"{label}: estimate / peak", ratio, "", ok, measured=measured, estimate=estimate))
            del model, optimizer, parameters, step
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


# ---- throughput ----------------------------------------------------------------------------------


def seconds_of(fn: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Of one call, after one that is not counted."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    fn()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        fn()
    synchronize()
    return (time.perf_counter() - start) / repeats


def update_flops(model: PreTrainedModel, numel: int, lengths: list[int]) -> float:
    """6 per weight and token (the embedding does no arithmetic, the head does), and of attention 6 per pair of
    tokens that see each other and unit of width, for scores and for values each. Recomputation is not counted."""
    config = model.config
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    width = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads) * config.num_attention_heads
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return 6 * (numel - embedding) * sum(lengths) + 12 * config.num_hidden_layers * width * pairs


def throughput(options: Options, device: torch.device) -> list[dict]:
    rows = []
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = next((flops for key, flops in DENSE_BF16_FLOPS.items() if key in name), None)
    tokens, count, repeats = (256, 4, 1) if options.tiny else (16384, 16, 5)
    for shape_name, checkpointing in (("qwen2.5-0.5b", False), ("qwen2.5-1.5b", True), ("qwen2.5-3b", True)):
        if options.tiny and checkpointing:
            continue
        model = random_model(shape(options, shape_name), device, checkpointing)
        numel = shard_numel(list(model.parameters()), 1)
        model = shard_model(model, make_mesh(init_distributed_once()), torch.bfloat16)
        optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-6, fused=True)
        length = tokens // count
        batch = random_batch([length // 4] * count, [length - length // 4] * count, model.config.vocab_size, device)

        def update(model=model, batch=batch, optimizer=optimizer):
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()

        label = f"{shape_name}{', checkpointing' * checkpointing}"
        seconds = seconds_of(update, device, repeats)
        flops = update_flops(model, numel, [length] * count) / seconds
        rows.append(row(f"{label}: update", tokens / seconds, "tokens/s", tokens=tokens, seconds=seconds))
        rows.append(row(f"{label}: update", flops / 1e12, "TFLOP/s"))
        if peak:
            rows.append(row(f"{label}: MFU of the update", flops / peak, "", peak_flops=peak))
        if not checkpointing:
            optimizer = update = None
            rows.append(rollout_speed(options, model, shape_name, device))
        del model, optimizer, update
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def rollout_speed(options: Options, model: PreTrainedModel, name: str, device: torch.device) -> dict:
    count, T = (4, 4) if options.tiny else (256, 128)
    prompts = random_batch([32] * count, [1] * count, model.config.vocab_size, device)
    for key in ("input_ids", "attention_mask", "position_ids"):
        prompts.batch[key] = prompts.batch[key][:, :32]
    prompts.non_tensor_batch["raw_prompt_ids"] = np.array([ids.tolist() for ids in prompts.batch["input_ids"]], object)
    engine = HFEngine(model, load_tokenizer(TOY_MODEL))
    engine.stop_ids = torch.tensor([-1])  # no row ends early
    seconds = seconds_of(lambda: engine.generate(prompts, Sampling(T), list(range(count))), device, 1)
    return row(f"{name}: hf rollout of {count} rows", count * T / seconds, "tokens/s", seconds=seconds)


# ---- parts in processes --------------------------------------------------------------------------

PARTS = {"numerics": numerics, "scripts": scripts, "memory": memory, "throughput": throughput}
WORLD = None


def init_distributed_once():
    global WORLD
    WORLD = WORLD or init_distributed()
    return WORLD


def run_part(name: str, options: Options, results: Connection) -> None:
    try:
        results.send(PARTS[name](options, torch.device(options.device)))
    except Exception:  # noqa: BLE001
        # whatever it is, it is the result of this part
        results.send([row(f"{name} failed", 0, "", False, error=traceback.format_exc()[-3000:])])


def part_in_a_process(name: str, options: Options, seconds: float) -> list[dict]:
    # a CUDA context does not survive a fork
    context = multiprocessing.get_context("spawn" if options.device == "cuda" else "fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_part, args=(name, options, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return [row(f"{name} did not end in {seconds:.0f} s", seconds, "s", False)]
        return ours.recv()
    except EOFError:
        process.join()
        return [row(f"{name} died with exit code {process.exitcode}", 0, "", False)]
    finally:
        process.kill()
        process.join()


def table(results: dict[str, list[dict]]) -> str:
    lines = []
    for part, rows in results.items():
        lines.append(part)
        for r in rows:
            verdict = {None: "", True: "ok", False: "FAILED"}[r["ok"]]
            lines.append(f"  {r['check']:<58}{float(r['value']):>12.4g} {r['unit']:<10}{verdict}")
            if "error" in r:
                lines.append(f"    {r['error'].strip().splitlines()[-1]}")
    return "\n".join(lines)


def main(options: Options) -> int:
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here that torch can use: --device cpu --tiny tries the script itself", file=sys.stderr)
        return 1
    if options.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        torch.set_num_threads(1)
    start, results = time.perf_counter(), {}
    for part in options.parts:
        left = max(1.0, DEADLINE_S - (time.perf_counter() - start))
        results[part] = part_in_a_process(part, options, left)
        print(table({part: results[part]}), flush=True)
    record = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "tensordict")},
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "tiny": options.tiny,
        "seconds": round(time.perf_counter() - start, 1),
        "results": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    failed = sum(r["ok"] is False for rows in results.values() for r in rows)
    print(f"{record['device']}: {failed} checks failed, {record['seconds']} s, {options.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
