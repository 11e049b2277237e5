"""The code of a run on an accelerator that keeps a GPU's rules (strict.py): the same numbers as on the CPU, no tensors
of two devices in one operation, and the host waits only where docs/gpu.md says so.

Both compute with the CPU's kernels. Where they differ is attention, for which SDPA has fused kernels on a CPU only: in
fp32 that rounds log-probs of up to 10 differently by 1e-6, and a gradient of many terms by 1e-5 of its size."""

import importlib
import re
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from lib import setup
from lib.args import step_sizes
from lib.cli.flags import parse_flags
from lib.distributed import World, reduce_metrics, shard_model
from lib.model import load_tokenizer
from lib.rollout.server_weights import _buckets
from lib.rollout.weight_sync import CheckedStream, weight_checksum
from lib.run.checkpoint import export_hf, load_checkpoint, save_checkpoint
from tests.common import TOY_MODEL, rollout_batch
from tests.gpu import strict
from tests.gpu.strict import Events, events, on_gpu
from tests.model.test_varlen import cpu_kernels

CPU = torch.device("cpu")
LIMITS = ["--max-prompt-length", "8", "--max-response-length", "8", "--compute-dtype", "float32"]
LIMITS += ["--micro-batch-tokens", "24"]
COUNTS, LARGEST = "lib/distributed/collectives.py global_counts", "lib/distributed/collectives.py all_reduce_max"
ROWS, NORM = "lib/data/micro_batches.py on_host", "lib/distributed/sharding.py clip_grad_norm"
WEIGHTS, CHECKSUMS = "lib/model/trained.py _check_weights", "lib/rollout/weight_sync.py _checksums"
KEPT = "lib/model/log_probs.py least_kept"
MODEL = "lib/model/log_probs.py token_log_probs"
MINI_BATCH = {COUNTS: 1, ROWS: 4, LARGEST: 1, NORM: 1}  # what the host waits for; 4 columns
LORA = ["--lora-rank", "4"]


def rows(device):
    """Eight rows as they come to `update`, two for each prompt; one has no token that is trained on."""
    batch = rollout_batch([3, 3, 7, 7, 5, 5, 2, 2], [4, 1, 8, 6, 6, 8, 3, 5])
    t, g = batch.batch, torch.Generator().manual_seed(1)
    t["input_ids"] %= 20  # the toy's vocabulary
    t["input_ids"][1::2, :7] = t["input_ids"][::2, :7]
    t["responses"] = t["input_ids"][:, -t["responses"].shape[1] :]
    mask = t["response_mask"]
    mask[3] = 0
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages", "values", "returns"):
        t[name] = torch.randn(mask.shape, generator=g) * mask
    t.update({name: mask.bool() for name in ("loss_mask", "denominator_mask", "valid_mask")})
    t["is_fresh"] = torch.ones(len(mask), dtype=torch.bool)
    return batch.to(device)


def placed(module, mesh, *args, **options):
    return shard_model(strict.to_gpu(module) if mesh.device_type == "gpu" else module, mesh, *args, **options)


def set_up(name, device, *flags):
    """(script, args, sizes, models)"""
    script = importlib.import_module(name)
    args = parse_flags(script.Args, [*LIMITS, *flags])
    args.prompts_per_step, args.group_size, args.num_mini_batches = 4, 2, 2
    sizes = step_sizes(args, 1)
    factory = setup.make_model_factory(args, World(0, 1, device), sizes)
    make_optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    with patch.object(setup, "shard_model", placed):
        models = [setup.load_policy(factory, "actor", args.model.model, make_optimizer, 10)]
        if name == "ppo":
            models.append(setup.load_value_model(factory, "critic", args.model.model, make_optimizer, 10))
    return script, args, sizes, models


def updated(name, device, *flags):
    """(metrics, log-probs of the rows, events) of an update of two mini-batches."""
    script, args, sizes, models = set_up(name, device, *flags)
    batch = rows(device)
    models[0].check_rows(batch)
    events.clear()
    metrics = script.update(args, *models, batch, sizes, 0.01, *[False] * (name == "ppo"))
    noted = Events(events)
    return reduce_metrics(metrics), batch.batch["log_probs"].cpu(), noted


@on_gpu
@pytest.mark.parametrize(
    ("name", "flags", "more_waits"),
    [
        ("grpo", ["--kl-coef", "0.1"], {}),
        ("remax", [], {}),
        ("ppo", [], {COUNTS: 1, NORM: 1}),
        ("dapo", [], {}),
        ("grpo", ["--no-share-prompts"], {}),
        ("grpo", ["--no-padding-free"], {MODEL: 3}),  # of three micro-batches
        ("grpo", ["--reduce-each-micro-batch", "--gradient-checkpointing"], {}),
        ("grpo", LORA, {}),
        ("grpo", ["--attn-implementation", "varlen"], {}),
        ("grpo", ["--top-p", "0.9"], {KEPT: 2}),
        ("grpo", ["--cpu-offload", "actor"], {NORM: -1}),  # the gradient is on the CPU
        ("grpo", ["--cpu-offload", "activations"], {}),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x) if isinstance(x, list) else "",
)
def test_update(name, flags, more_waits):
    """Two mini-batches of two micro-batches: the host waits once a mini-batch."""
    with ExitStack() as changes:
        changes.enter_context(patch("lib.model.log_probs.CANDIDATES", 8))
        if "varlen" in flags:
            changes.enter_context(cpu_kernels())
            changes.enter_context(patch("lib.setup.get_attention", lambda *_, **__: "varlen"))
        on_cpu, expected, _ = updated(name, CPU, *flags)
        metrics, log_probs, noted = updated(name, strict.GPU, *flags)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == on_cpu.keys()
    for key, value in on_cpu.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    waits = {place: MINI_BATCH.get(place, 0) + more_waits.get(place, 0) for place in MINI_BATCH | more_waits}
    assert noted.places("wait") == {place: 2 * n for place, n in waits.items() if n}
    if "actor" not in flags:  # else weights come for each forward
        sources = [x for *_, x in noted.copies("in") if x.numel()]
        assert len({(x.untyped_storage().data_ptr(), x.storage_offset()) for x in sources}) == len(sources) > 0


def prepared(device, *flags):
    """PPO's models and a reference: (actor, critic, reference)."""
    factories, make = [], setup.make_model_factory
    with patch.object(setup, "make_model_factory", lambda *args: factories.append(make(*args)) or factories[0]):
        *_, (actor, critic) = set_up("ppo", device, *flags)
    with patch.object(setup, "shard_model", placed):
        return actor, critic, setup.load_reference(factories[0], actor)


@on_gpu
@pytest.mark.parametrize("flags", [[], LORA], ids=" ".join)
def test_forward_passes(flags):
    """Log-probs, entropies, squared scores, a reference's log-probs and values, of a whole batch."""
    results = []
    for device in (CPU, strict.GPU):
        actor, critic, ref = prepared(device, *flags)
        batch = rows(device)
        events.clear()
        columns = actor.batched_log_probs(batch, ("squared_score",))
        columns |= {"ref": ref.batched_log_probs(batch), "values": critic.batched_values(batch)}
        waits = events.places("wait")
        assert {x.device.type for x in columns.values()} == {device.type}
        results.append({name: x.cpu() for name, x in columns.items()})
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert waits == {ROWS: 3 * 4, LARGEST: 4, WEIGHTS: 1}


@on_gpu
@pytest.mark.parametrize("flags", [[], LORA], ids=" ".join)
def test_weight_sync(flags):
    """The gathered weights, their buckets for servers, and the checksums, which are read once."""
    seen = []
    for device in (CPU, strict.GPU):
        *_, [actor] = set_up("grpo", device, *flags)
        with torch.no_grad():
            for name, p in actor.module.named_parameters():
                p.add_(0.1 * ("lora_B" in name))
        events.clear()
        stream = CheckedStream(actor.module, torch.bfloat16)
        buckets = [(names, torch.cat([tensor.flatten() for tensor in tensors])) for names, tensors in _buckets(stream)]
        seen.append([(names, bucket.cpu()) for names, bucket in buckets])
        seen[-1].append((checksum := stream.checksum, torch.zeros(1)))
        assert checksum == weight_checksum(actor.module, torch.bfloat16)
    for (names, bucket), (expected, values) in zip(*seen, strict=True):
        assert names == expected and torch.equal(bucket, values)
    waits = Events(events).places("wait")
    waits.pop("outside")  # of this test
    assert waits == {CHECKSUMS: 2}


@on_gpu
def test_checkpoint_and_export(tmp_path):
    """A checkpoint from an accelerator goes on on a CPU, and the other way round; the exported models are equal."""
    exported = []
    for device, other in ((CPU, strict.GPU), (strict.GPU, CPU)):
        folder = tmp_path / device.type
        script, args, sizes, [actor] = set_up("grpo", device)
        script.update(args, actor, rows(device), sizes, 0.0)
        parts = {"actor": (actor.module, actor.optimizer)}
        saved = save_checkpoint(
            folder, 1, models=parts, schedulers={"actor": actor.scheduler}, trainer_state={}, keep=0
        )
        script, args, sizes, [actor] = set_up("grpo", other)
        parts = {"actor": (actor.module, actor.optimizer)}
        load_checkpoint(saved.result(), models=parts, schedulers={"actor": actor.scheduler})
        script.update(args, actor, rows(other), sizes, 0.0)
        export_hf(actor.module, load_tokenizer(TOY_MODEL), folder / "model", torch.float32)
        exported.append(load_file(folder / "model/model.safetensors"))
    # Adam divides by the root of a gradient's square: where that is rounding only, a step of 1e-3 has another sign
    torch.testing.assert_close(exported[1], exported[0], rtol=1e-4, atol=1e-5)


def test_the_documentation_lists_the_places():
    text = (strict.ROOT / "docs/gpu.md").read_text().partition("## Host syncs")[2].partition("\n## ")[0]
    places = {f"{file} {name}" for name, file in re.findall(r"\| \[`def (\w+)\(`\]\(\.\./(\S+)\)", text)}
    assert places == {*MINI_BATCH, KEPT, MODEL, WEIGHTS, CHECKSUMS}
