"""CPU seconds and memory of 512 concurrent episodes: --agent with several clients, against --multi-turn.tools.

    python -m benchmarks.agents_cost            all, each in a process of its own (ten minutes of one core)
    python -m benchmarks.agents_cost fake raw   one: engine and client

An episode has 6 answers of at most 32 tokens, and short messages between them. The engines are vLLM, with a random
model of 0.54 M parameters, and one that answers at once, which shows the cost of an episode without sampling. CPU
seconds are those of the training process: an agent in the same process counts, one in another process does not. The
record goes to benchmarks/results/agents_cost.json.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

EPISODES, TURNS, TURN_TOKENS, REPEATS = 512, 6, 32, 3
RECORD = Path(__file__).parent / "results/agents_cost.json"
NOTHING = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "slow", "description": "", "parameters": NOTHING}}
ENGINES = ("vllm", "fake")
ARMS = {
    "in process": "--multi-turn.tools",
    "elsewhere": "--agent, in another process (plain HTTP)",
    "raw": "--agent, an async function with plain HTTP (aiohttp)",
    "sdk": "--agent, an async function with the openai SDK, one client for all",
    "threads": "--agent, a function in threads with the openai SDK, one client for all",
}


# ---- the agents --------------------------------------------------------------------------------


def ask_for(messages: list) -> dict:
    return {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": TURN_TOKENS}


async def raw(base_url: str, api_key: str, row: dict) -> float:
    import aiohttp

    messages = row["prompt"]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        for _ in range(TURNS):
            async with session.post(f"{base_url}/chat/completions", json=ask_for(messages)) as answer:
                found = await answer.json()
            messages += [found["choices"][0]["message"], {"role": "user", "content": "done"}]
    return 0.0


async def sdk(base_url: str, api_key: str, row: dict) -> float:
    messages, client = row["prompt"], sdk_client(base_url, "AsyncOpenAI").with_options(api_key=api_key)
    for _ in range(TURNS):
        found = await client.chat.completions.create(**ask_for(messages))
        messages += [found.choices[0].message, {"role": "user", "content": "done"}]
    return 0.0


def threads(base_url: str, api_key: str, row: dict) -> float:
    messages, client = row["prompt"], sdk_client(base_url, "OpenAI").with_options(api_key=api_key)
    for _ in range(TURNS):
        found = client.chat.completions.create(**ask_for(messages))
        messages += [found.choices[0].message, {"role": "user", "content": "done"}]
    return 0.0


@cache
def sdk_client(base_url: str, kind: str):
    import openai

    return getattr(openai, kind)(base_url=base_url, api_key="of each episode")


class Elsewhere:
    """Has `raw` play the episodes in another process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.agents_cost", "play"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.ends: dict[bytes, asyncio.Future] = {}
        self.rest = b""

    async def __call__(self, base_url: str, api_key: str, row: dict) -> float:
        loop = asyncio.get_running_loop()
        if not self.ends:
            loop.add_reader(self.process.stdout, self.ended)
        end = self.ends[api_key.encode()] = loop.create_future()
        self.process.stdin.write(json.dumps([base_url, api_key, row]).encode() + b"\n")
        self.process.stdin.flush()
        return await end

    def ended(self) -> None:
        *keys, self.rest = (self.rest + os.read(self.process.stdout.fileno(), 1 << 16)).split(b"\n")
        for key in keys:
            self.ends[key].set_result(0.0)


async def play_what_comes() -> None:
    async def play_one(line: str) -> None:
        base_url, api_key, row = json.loads(line)
        await raw(base_url, api_key, row)
        print(api_key, flush=True)

    reader, tasks = asyncio.StreamReader(), set()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        tasks.add(asyncio.create_task(play_one(line.decode())))


# ---- the rollout -------------------------------------------------------------------------------


class FakeEngine:
    """Answers at once, with tokens that depend on the seed."""

    version, pad_token_id, long_steps, shared, in_process = 0, 0, False, False, True
    no_routes = None

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}

    @contextmanager
    def session(self):
        yield

    def submit(self, request_id, prompt_ids, sampling, seed) -> None:
        self.waiting[request_id] = seed

    def step(self) -> dict:
        from lib.rollout import Generated

        waiting, self.waiting = self.waiting, {}
        sampled = {name: [20 + (seed + i * i) % 60 for i in range(TURN_TOKENS)] for name, seed in waiting.items()}
        return {name: Generated(ids, [-1.0] * TURN_TOKENS, "length") for name, ids in sampled.items()}


def make_real_engine(folder: str):
    import torch

    from benchmarks.agent_loop import MODEL
    from lib.distributed import init_distributed, make_mesh, shard_model
    from lib.model import load_model, load_tokenizer
    from lib.rollout import make_engine, sync_weights

    model = shard_model(load_model(MODEL), make_mesh(init_distributed()), torch.float32)
    model.config.max_position_embeddings = 1024
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    own = {"folder": Path(folder), "max_length": 1024, "dtype": torch.float32, "gpu_memory": 0.1, "rows": EPISODES}
    engine = make_engine("vllm", model, load_tokenizer(MODEL), **own)
    sync_weights(engine, model, 0, tolerance=1e-3)
    return engine


def play(engine, arm: str, agent, episodes: int):
    """(CPU seconds, the rows)"""
    import torch

    from agent import FunctionTool, MultiTurn, ToolCall, make_episodes
    from agent.http.program import Agent, call_function
    from lib.args import MultiTurnArgs
    from lib.data_proto import DataProto
    from lib.model import load_tokenizer
    from lib.rollout import Sampling, request_seeds

    def slow() -> str:
        """Nothing."""
        return "done"

    async def at_once() -> str:
        return "done"

    tool = FunctionTool(slow)
    tool.execute = lambda *args, **kwargs: at_once()  # in the event loop: a thread would be the tool's own cost
    limits = MultiTurnArgs(max_turns=TURNS, max_turn_tokens=TURN_TOKENS)
    tokenizer = load_tokenizer("data/toy_tools/model")
    settings = MultiTurn(tokenizer, {"slow": tool}, lambda text: [ToolCall("slow", {})], limits=limits)
    if agent:
        settings = replace(
            settings, tools={}, agent=Agent(partial(call_function, agent), 600.0, "auto", Sampling(1024))
        )
    messages = [[{"role": "user", "content": f"{row}+{row}"}] for row in range(episodes)]
    ids = [settings.encode(settings.render(own)) for own in messages]
    P = max(map(len, ids))
    mask = torch.tensor([[0] * (P - len(own)) + [1] * len(own) for own in ids])
    tensors = {
        "input_ids": torch.tensor([[0] * (P - len(own)) + own for own in ids]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    prompts = DataProto.from_dict(tensors, {"raw_prompt": messages, "raw_prompt_ids": ids})
    start = time.process_time()
    batch = make_episodes(engine, settings).generate(prompts, Sampling(800), request_seeds(1, 1, range(episodes)))
    return time.process_time() - start, batch


def measure(engine: str, arm: str) -> dict:
    """One engine and arm, in this process."""
    agents = {"in process": lambda: None, "elsewhere": Elsewhere}
    agent = agents.get(arm, lambda: globals()[arm])()
    with tempfile.TemporaryDirectory() as folder:
        own = FakeEngine() if engine == "fake" else make_real_engine(folder)
        play(own, arm, agent, 8)  # warms up
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        runs = [play(own, arm, agent, EPISODES) for _ in range(REPEATS if engine == "fake" else 2)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if engine != "fake":
            own.close()
    batch = runs[-1][1]
    assert (batch.non_tensor_batch["num_turns"] == TURNS).all()
    sampled, metrics = int(batch.batch["response_mask"].sum()), batch.non_tensor_batch["agent_metrics"]
    return {
        "cpu_seconds": [round(seconds, 2) for seconds, _ in runs],
        "grown_mib": round((peak - before) / 1024, 1),
        "tokens_sampled": sampled,
        "lost_prefixes": sum(row.get("lost_prefixes", 0) for row in metrics),
    }


def main() -> None:
    from benchmarks.curves import ROOT, provenance

    record = {"command": "python -m benchmarks.agents_cost", **provenance(1), "episodes": EPISODES, "turns": TURNS}
    found: dict[str, dict] = {}
    for engine in ENGINES:
        for arm in ARMS:
            command = [sys.executable, "-m", "benchmarks.agents_cost", engine, arm]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
            found.setdefault(engine, {})[arm] = json.loads(ran.stdout.splitlines()[-1])
            print(engine, arm, found[engine][arm], flush=True)
            RECORD.write_text(json.dumps(record | found, indent=1) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            main()
        case ["play"]:
            asyncio.run(play_what_comes())
        case [engine, arm]:
            print(json.dumps(measure(engine, arm)))
