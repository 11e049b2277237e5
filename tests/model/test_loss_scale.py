"""The loss scale of --compute-dtype float16."""

from functools import partial

import torch

import grpo
from lib import setup
from lib.distributed import full_tensor
from lib.model.trained import LossScale
from tests.common import parse_flags, rollout_batch


def policy(world, dtype: str):
    args = parse_flags(grpo.Args, ["--compute-dtype", dtype, "--lr", "0.01"])
    factory = setup.ModelFactory(args, setup.check(args, world.device), world)
    make_optimizer = partial(torch.optim.AdamW, lr=args.optimizer.lr, fused=True)
    return factory.policy("actor", args.model.model, make_optimizer, lambda update: 1.0)


def train(actor, factor: float = 1.0) -> tuple[dict, torch.Tensor]:
    """(metrics, weights) after an update."""
    batch = rollout_batch([4, 5, 6], [5, 6, 7])
    batch.batch["input_ids"] %= 20  # the toy's vocabulary
    batch.batch["responses"] = batch.batch["input_ids"][:, -7:]
    actor.backward(actor.log_probs(batch)[0].mean() * factor)
    metrics = actor.step()
    return metrics, torch.cat([full_tensor(p.detach()).flatten() for p in actor.parameters])


def test_the_scale_changes_no_number_that_float32_holds(world):
    """It is a power of two, so that to multiply and to divide by it is exact."""
    plain, scaled = policy(world, "float32"), policy(world, "float32")
    assert plain.loss_scale is None
    scaled.loss_scale = LossScale()
    (expected, weights), (metrics, same) = train(plain), train(scaled)
    assert torch.equal(weights, same)
    assert metrics.pop("actor/loss_scale").total == 2**16 and metrics == expected


def test_float16_trains_and_halves_its_scale_where_it_overflows(world):
    """The first gradient overflows float16: that update is skipped, and the next ones are not."""
    actor = policy(world, "float16")
    start = torch.cat([full_tensor(p.detach()).flatten() for p in actor.parameters])
    metrics, weights = train(actor, factor=1e6)
    assert metrics["training/skipped_updates"].value == 1 and torch.equal(weights, start)
    assert actor.loss_scale.value == 2**15
    metrics, weights = train(actor)
    assert metrics["training/skipped_updates"].value == 0 and not torch.equal(weights, start)


def test_the_scale_grows_after_a_while_and_is_in_a_checkpoint():
    scale = LossScale(8.0, interval=3)
    for finite, expected in zip([1, 1, 1, 1, 0, 1, 1, 1], [8, 8, 16, 16, 8, 8, 8, 16], strict=True):
        resumed = LossScale(interval=3)
        resumed.load_state_dict(scale.state_dict())
        scale = resumed
        scale.update(bool(finite))
        assert scale.value == expected
