"""Where an update reads a number of a tensor, a GPU would be waited for. On a CPU the reads are counted."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from lib import setup
from lib.args import step_sizes
from lib.cli.flags import parse_flags
from lib.distributed import init_distributed
from lib.model import packing, trained
from tests.common import rollout_batch

LIMITS = ["--max-prompt-length", "8", "--max-response-length", "8"]
READS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "bincount", "equal"}


class Reads(TorchDispatchMode):
    """Counts operators and methods that give the host a number, or a shape that depends on numbers."""

    count, paused = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, given = func.overloadpacket.__name__, args[1] if len(args) > 1 else None
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in given)
        self.add(name in READS or by_mask)
        return func(*args, **(kwargs or {}))

    def add(self, more: int) -> None:
        self.count += more and not self.paused

    def without(self, fn, *args, **kwargs):
        """fn's own reads do not count."""
        self.paused = True
        try:
            return fn(*args, **kwargs)
        finally:
            self.paused = False


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield init_distributed()
    dist.destroy_process_group()


def reads_of_an_update(world, micro_batch_tokens: int, monkeypatch) -> tuple[int, int]:
    """(reads, micro-batches), without those that lay out rows: they are on the CPU, and wait once a micro-batch."""
    args = parse_flags(grpo.Args, ["--micro-batch-tokens", str(micro_batch_tokens), "--kl-coef", "0.1", *LIMITS])
    sizes = step_sizes(args, 1)
    factory = setup.make_model_factory(args, world, sizes)
    make_optimizer = partial(torch.optim.AdamW, lr=args.optimizer.lr, fused=True)
    actor = setup.load_policy(factory, "actor", args.model.model, make_optimizer, 10)
    batch = rollout_batch([4, 5, 6, 7] * 2, [5, 6, 7, 8] * 2)
    batch.batch["input_ids"] %= 20  # the toy's vocabulary
    t = batch.batch
    t["responses"] = t["input_ids"][:, -t["responses"].shape[1] :]
    floats = torch.randn(t["response_mask"].shape, generator=torch.Generator().manual_seed(0))
    t.update(dict.fromkeys(("rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages"), floats))
    t.update({name: t["response_mask"].bool() for name in ("loss_mask", "denominator_mask", "valid_mask")})
    micro_batches = 0
    with Reads() as reads, monkeypatch.context() as patch:

        def counted(fn, *args, **kwargs):
            nonlocal micro_batches
            micro_batches += 1
            return reads.without(fn, *args, **kwargs)

        patch.setattr(packing, "_response_inputs", partial(counted, packing._response_inputs))
        # once a mini-batch
        patch.setattr(trained, "prepare_dynamic_batch", partial(reads.without, trained.prepare_dynamic_batch))
        for name in ("tolist", "numpy", "cpu"):
            method = getattr(torch.Tensor, name)
            patch.setattr(torch.Tensor, name, lambda x, *a, method=method, **k: (reads.add(1), method(x, *a, **k))[1])
        grpo.update(args, actor, batch, step_sizes(args, 1), 0.01)
    return reads.count, micro_batches


def test_a_micro_batch_is_not_waited_for(world, monkeypatch):
    """An update of many micro-batches reads as often as one of a single one: the loss's counts and the gradient's
    norm. Metrics stay on the device until the step's end."""
    few, one = reads_of_an_update(world, 1000, monkeypatch)
    many, several = reads_of_an_update(world, 20, monkeypatch)
    assert one == 1 < 4 < several and many == few <= 6
