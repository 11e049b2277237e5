"""ZeRO-1 (lib/distributed/compute_copy.py) computes what FSDP2 does, to the last bit. tests/scripts/test_scripts.py
compares whole runs, and resumes checkpoints of the other."""

import copy
from unittest.mock import patch

import pytest
import torch

import grpo
import lib.distributed.compute_copy
from lib import InputError
from lib import model as models
from lib.distributed import full_tensor, iter_full_params, make_mesh, reduce_metrics, shard_model, trainable_parameters
from lib.distributed.compute_copy import copy_of
from lib.model import Critic, ForwardConfig, Policy, micro_batches
from lib.rollout.weight_sync import weight_checksum
from lib.run.checkpoint import load_checkpoint, save_checkpoint
from lib.sampling import Sampling
from lib.setup import needs
from planner.estimate import memory_savers
from tests.common import parse_flags, randomize_lora_b, rollout_batch, run_ranks, save_tiny, with_slow

UPDATES, ROWS = 2, 12  # of each update


def loaded(kind: str, path: str, dtype: torch.dtype):
    if kind == "critic":
        model = models.load_critic(path, on_meta=True)
        torch.nn.init.normal_(models.values.value_head(model).weight, generator=torch.Generator().manual_seed(0))
        return model
    if kind == "lora":
        model = models.add_lora(models.load_model(path, dtype=dtype, on_meta=True), rank=4, alpha=8, seed=3)
        randomize_lora_b(model)
        return model
    model = models.load_model(path, on_meta=True)
    return models.freeze(model, ".*embed_tokens.*") if kind == "frozen" else model


def trained(world, kind: str, path: str, dtype: torch.dtype, zero1: bool):
    """The model, sharded."""
    mesh, forward = make_mesh(world), ForwardConfig(40, Sampling(max_response_length=9), None, dtype)
    module = shard_model(loaded(kind, path, dtype), mesh, dtype, zero1=zero1)
    optimizer = torch.optim.AdamW(trainable_parameters(module), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    cls = Critic if kind == "critic" else Policy
    return cls("actor", module, optimizer, scheduler, world, forward, max_grad_norm=1.0, reduce_each_micro_batch=False)


def update(actor, number: int) -> list:
    """Of several micro-batches. What each computes, and the gradient's norm."""
    world, found = actor.world, []
    batch = rollout_batch([3, 5, 4, 6] * 3, [9, 4, 7, 5] * 3, seed=number)[list(range(world.rank, ROWS, world.size))]
    for micro in micro_batches(batch, actor):
        outputs = actor.values(micro) if isinstance(actor, Critic) else actor.log_probs(micro)[0]
        found.append(outputs.detach())
        actor.backward((outputs * micro.batch["response_mask"]).square().sum() * 1e-4)
    assert len(found) > 1
    return [*found, reduce_metrics(actor.step())["actor/grad_norm"]]


def state_of(actor) -> list:
    """Masters and Adam's moments, whole; weights as an engine and an export get them; their checksum."""
    dtype, optimizer = actor.forward.compute_dtype, actor.optimizer
    moments = [optimizer.state[p][key] for p in actor.parameters for key in ("exp_avg", "exp_avg_sq")]
    weights = [w.clone() for _, w in iter_full_params(actor.module, dtype)]
    whole = [full_tensor(x.detach()).clone() for x in (*actor.parameters, *moments)]
    return [*whole, *weights, weight_checksum(actor.module, dtype)]


def equal(ours: list, theirs: list) -> bool:
    is_equal = [torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(ours, theirs, strict=True)]
    return all(is_equal)


def of_checkpoint(actor) -> dict:
    return {"models": {"actor": (actor.module, actor.optimizer)}, "schedulers": {"actor": actor.scheduler}}


def both_ways(world, kind: str, path: str, dtype: torch.dtype, folder: str):
    """Two updates with each, and a third that starts from the other's checkpoint."""
    results, actors = [], [trained(world, kind, path, dtype, zero1) for zero1 in (False, True)]
    for actor in actors:
        results.append([x for number in range(UPDATES) for x in update(actor, number)] + state_of(actor))
        save_checkpoint(f"{folder}/{len(results)}", 2, **of_checkpoint(actor), trainer_state={}, keep=0).result()
    resumed = []
    for other, zero1 in ((2, False), (1, True)):
        actor = trained(world, kind, path, dtype, zero1)
        load_checkpoint(f"{folder}/{other}/step_000002", **of_checkpoint(actor))
        actor.loss_scale = copy.copy(actors[1].loss_scale)
        resumed.append(update(actor, UPDATES) + state_of(actor))
    expected = update(actors[1], UPDATES) + state_of(actors[1])
    has_copy = copy_of(actors[1].module) is not None
    return equal(*results), [equal(own, expected) for own in resumed], has_copy, actors[1].loss_scale


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [(1, "lora", BF16), (1, "frozen", BF16), (1, "critic", FP16), (3, "untied", BF16)]
SIBLINGS = [(1, "tied", BF16), (1, "untied", FP16), (2, "critic", FP16), (1, "tied", FP32), (2, "tied", FP32)]
SIBLINGS += [(2, "lora", BF16)]


@pytest.mark.parametrize("size, kind, dtype", with_slow([*CASES, *SIBLINGS], *SIBLINGS))
def test_updates_and_resumes_are_fsdp2s_bit_for_bit(tmp_path, size, kind, dtype):
    """With clipping, several micro-batches, rows that 3 ranks do not divide, and several buckets."""
    path = save_tiny(tmp_path / "model", tied=kind == "tied")
    with patch.object(lib.distributed.compute_copy, "COLLECTIVE_BYTES", 20_000):
        found = run_ranks(size, both_ways, kind, path, dtype, str(tmp_path))
    for same, resumed, has_copy, scale in found:
        assert same and resumed == [True, True]
        assert has_copy == ((size, dtype) != (1, FP32)) and (scale is not None) == (dtype == FP16)


CUDA = torch.device("cuda")


def test_auto_takes_zero1_where_flags_and_memory_allow_it(monkeypatch):
    monkeypatch.setattr(needs, "on_first_rank", lambda act: act())
    plain = parse_flags(grpo.Args, [])
    for memory, sharding in ((80 << 30, "zero1"), (1 << 20, "fsdp2")):
        monkeypatch.setattr(needs, "least_memory", lambda *_, memory=memory: memory)
        assert needs.choose_sharding(plain, CUDA) == sharding
    assert needs.choose_sharding(plain, torch.device("cpu")) == "zero1"
    for flags in (["--reduce-each-micro-batch"], ["--cpu-offload", "ref"], ["--dp-replicate-size", "2"]):
        args = parse_flags(grpo.Args, flags)
        assert needs.choose_sharding(args, CUDA) == needs.choose_sharding(args, torch.device("cpu")) == "fsdp2"
        with pytest.raises(InputError, match=f"--sharding zero1 does not work with {flags[0]}"):
            parse_flags(grpo.Args, [*flags, "--sharding", "zero1"])
    forced = parse_flags(grpo.Args, ["--sharding", "zero1"])
    assert memory_savers(forced, 8)[0].flag == "--sharding fsdp2"
    assert "--sharding" not in memory_savers(plain, 8)[0].flag
