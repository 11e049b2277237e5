"""What several test files need: ranks, tiny models, batches."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

from lib.data_proto import DataProto
from lib.distributed import World

ROOT = Path(__file__).parent.parent
TOY_MODEL = str(ROOT / "data/toy/model")
VOCAB = 104


def _on_rank(rank: int, fn: Callable, size: int, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.save(fn(World(rank, size, torch.device("cpu")), *args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(size: int, fn: Callable, *args) -> list:
    """The results of `fn(world, *args)` in `size` forked ranks of one gloo group; a rank's exception is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_on_rank, (fn, size, folder, args), nprocs=size, start_method="fork")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def save_tiny(
    folder: Path, *, tied: bool = True, seed: int = 0, cls=Qwen2ForCausalLM, config=Qwen2Config, **more
) -> str:
    """A random two-layer decoder, saved; its path. vLLM on a CPU wants heads of 32 at least."""
    torch.manual_seed(seed)
    model = cls(
        config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            **more,
        )
    )
    for p in model.parameters():  # livelier than the default start, so that errors show
        p.data.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return str(folder)


def rollout_batch(prompt_lengths, response_lengths, seed: int = 0) -> DataProto:
    """Random prompts (left-padded) and responses (right-padded) as an engine returns them."""
    g = torch.Generator().manual_seed(seed)
    B, P, T = len(prompt_lengths), max(prompt_lengths), max(response_lengths)
    ids = torch.randint(4, VOCAB, (B, P + T), generator=g)
    column = torch.arange(P + T)[None]
    first = P - torch.tensor(prompt_lengths)[:, None]
    end = P + torch.tensor(response_lengths)[:, None]
    mask = ((column >= first) & (column < end)).long()
    ids = ids * mask
    tensors = {
        "prompts": ids[:, :P],
        "responses": ids[:, P:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (column - first).clamp(min=0),
        "response_mask": mask[:, P:].clone(),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array([str(i // 2) for i in range(B)], object)})
