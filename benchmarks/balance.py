"""What a step's slowest rank has to compute, rows as they were sampled and rows balanced by lib/data/balance.py.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 -m benchmarks.balance [--prompts 16] [--repeats 5]

Every rank makes `prompts` groups of 8 rows and runs forward and backward of its rows on a model of its own, the one of
benchmarks/update.py; a rank's time is the median of its CPU seconds, so that ranks may share cores. rows: prompts of 64
tokens, responses of 1 to 512, log-normal, each row for itself; prompts: a prompt's rows are all alike in length, as of
hard and easy questions; equal: all responses are of 128 tokens.

slowest: CPU seconds of the slowest rank, which all others wait for; idle: the share of all ranks' time that is such
waiting; model: the same two by the cost model; exchange: CPU seconds of plan and exchange, the slowest rank's, and the
bytes that a rank sends in it.
"""

import argparse
import pickle
import statistics
import tempfile
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.update import GROUP, update
from lib.data import balance_groups, exchange_groups
from lib.data_proto import DataProto
from lib.distributed import all_gather_lists, init_distributed, run
from lib.model import load_model

P, T = 64, 512


def rollout(setting: str, prompts: int, seed: int) -> DataProto:
    g = torch.Generator().manual_seed(seed)
    rows = prompts * GROUP
    noise = torch.empty(rows).normal_(generator=g)
    if setting == "prompts":
        noise = 0.9 * noise[:prompts].repeat_interleave(GROUP) + 0.1 * noise
    lengths = (4.5 + 0.9 * noise).exp().long().clamp(1, T)
    if setting == "equal":
        lengths = torch.full((rows,), 128)
    ids = torch.randint(4, 1000, (prompts, P), generator=g).repeat_interleave(GROUP, 0)
    mask = (torch.arange(T) < lengths[:, None]).long()
    responses = torch.randint(4, 1000, (rows, T), generator=g) * mask
    tensors = {
        "prompts": ids,
        "input_ids": torch.cat([ids, responses], 1),
        "attention_mask": torch.cat([torch.ones_like(ids), mask], 1),
        "position_ids": torch.arange(P + T).repeat(rows, 1),
        "responses": responses,
        "response_mask": mask,
        "advantages": torch.randn(rows, 1, generator=g) * mask,
    }
    uids = [f"{seed}-{i // GROUP}" for i in range(rows)]
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


def cpu_seconds(model, batch: DataProto, max_tokens: int, repeats: int) -> list[float]:
    """Of each rank."""
    times = []
    for _ in range(repeats + 1):  # the first is not counted
        start = time.process_time()
        update(model, batch, max_tokens, padding_free=True, share_prompts=True)
        times.append(time.process_time() - start)
    return all_gather_lists([statistics.median(times[1:])])


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen2Config(vocab_size=1024, tie_word_embeddings=True, **sizes, **heads)
        Qwen2ForCausalLM(config).save_pretrained(folder)  # before there are ranks, of which one would save
        model = load_model(folder)
    world = init_distributed()
    for setting in ("rows", "prompts", "equal"):
        sampled = rollout(setting, args.prompts, seed=world.rank)
        start = time.process_time()
        plan, by_model = balance_groups(sampled, model, 1, share_prompts=True)
        balanced = exchange_groups(sampled, plan)
        exchange = max(all_gather_lists([time.process_time() - start]))
        moved = len(plan[world.rank].keys() - {*sampled.non_tensor_batch["uid"]}) * GROUP
        sent = max(all_gather_lists([moved * len(pickle.dumps(sampled)) // len(sampled)]))
        for name, batch, cost in (
            ("sampled", sampled, by_model["perf/imbalance_sampled"]),
            ("balanced", balanced, by_model["perf/imbalance"]),
        ):
            times = cpu_seconds(model, batch, args.micro_batch_tokens, args.repeats)
            idle, by_cost = 1 - statistics.mean(times) / max(times), abs(1 - 1 / cost)
            if world.rank == 0:
                print(
                    f"{setting:8} {name:9} slowest {max(times):6.2f} s, idle {idle:5.1%}, by the model {by_cost:5.1%}"
                )
        if world.rank == 0:
            print(f"{setting:8} exchange  {exchange:.3f} s, {sent / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    run(main, parser.parse_args())
