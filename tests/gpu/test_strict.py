"""The code of a run on an accelerator that keeps a GPU's rules (strict.py): the same numbers as on the CPU, no tensors
of two devices in one operation, and the host waits only at the places below.

Both compute with the CPU's kernels. Where they differ is attention, for which SDPA has fused kernels on a CPU only: in
fp32 that rounds log-probs of up to 10 differently by 1e-6, and a gradient of many terms by 1e-5 of its size."""

import importlib
import json
from collections import Counter
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from lib import setup
from lib.args import step_sizes
from lib.data import on_host, prepare_dynamic_batch
from lib.distributed import host_state, reduce_metrics, shard_model
from lib.distributed.sharding import full_tensor
from lib.log.rollouts import add_outputs
from lib.model import load_tokenizer, micro_batches
from lib.model.log_probs import ROW_TOLERANCE
from lib.rollout.hf_engine import HFEngine
from lib.rollout.weight_sync import CheckedStream, weight_checksum
from lib.run.checkpoint import load_checkpoint, save_checkpoint
from lib.run.export import export_hf
from servers.weights import _buckets
from tests.common import MROPE, ROOT, TOY_MODEL, parse_flags, rollout_batch, tiny_vision, vision_batch, with_slow
from tests.gpu import strict
from tests.gpu.strict import events, on_gpu, waits
from tests.model.test_varlen import CALLS, cpu_kernels

LIMITS = ["--max-prompt-length", "8", "--max-response-length", "8", "--compute-dtype", "float32"]
LIMITS += ["--micro-batch-tokens", "24"]
COUNTS, LARGEST = "lib/distributed/collectives.py global_counts", "lib/distributed/collectives.py all_reduce_max"
ROWS, NORM = "lib/data/micro_batches.py on_host", "lib/distributed/sharding.py clip_grad_norm"
WEIGHTS, CHECKSUMS = "lib/model/trained.py _check_weights", "lib/rollout/weight_sync.py _checksums"
TOWER = "lib/model/vision.py with_images"
KEPT = "lib/model/log_probs.py least_kept"
MODEL = "lib/model/log_probs.py token_hidden_states"
MINI_BATCH = {COUNTS: 1, ROWS: 4, LARGEST: 1, NORM: 1}  # what the host waits for; 4 columns
LORA = ["--lora-rank", "4"]


def rows(world):
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
    t["policy_version"] = torch.zeros(len(mask), dtype=torch.long)
    t["is_fresh"] = t["policy_version"] == 0
    t["row"] = torch.arange(len(mask))
    return batch.to(world.device)


@on_gpu
def test_the_rules_of_the_accelerator(world):
    x = torch.ones(3, device=world.device)
    for wrong in (lambda: x + torch.ones(3), lambda: torch.cat([x, torch.ones(3)]), lambda: x.add_(torch.ones(3))):
        with pytest.raises(RuntimeError, match="tensors of the CPU"):
            wrong()
    assert (x + torch.ones(())).device == world.device and not events
    wait = [lambda: x[[0, 1]], lambda: x[x > 0], lambda: x.sum().item(), lambda: bool(x.any()), x.tolist, x.cpu]
    wait += [lambda: torch.ones(2).to(world.device), lambda: torch.tensor([1], device=world.device), x.nonzero]
    for act in wait:
        events.clear()
        act()
        assert waits() == {"outside": 1}
    events.clear()
    x[torch.ones(1).long().to(world.device, non_blocking=True)] = 2.0
    x[x > 1] = 0.0
    assert [event.kind for event in events] == ["in"] and x.tolist() == [1.0, 0.0, 1.0]


def on_cpu(world):
    return world._replace(device=torch.device("cpu"))


def placed(module, mesh, *args, **options):
    """shard_model of a module whose buffers, and weights unless they are on the meta device, are on the accelerator.
    FSDP2 would set their `data`, which a subclass of Tensor does not allow."""
    moved: dict[int, torch.nn.Parameter] = {}  # ties stay
    for part in module.modules() if mesh.device_type == "gpu" else ():
        for name, p in part._parameters.items():
            if p is not None and not p.is_meta:
                there = torch.nn.Parameter(strict.Strict(p.detach().clone()), p.requires_grad)
                part._parameters[name] = moved.setdefault(id(p), there)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else strict.Strict(buffer.clone())
    return shard_model(module, mesh, *args, **options)


@cache
def parsed(script, world_size, *flags):
    args = parse_flags(script.Args, [*LIMITS, *flags])
    args.prompts_per_step, args.group_size, args.num_mini_batches = 4 * world_size, 2, 2
    return args


def set_up(name, world, *flags):
    """(script, args, needs, models)"""
    script = importlib.import_module(name)
    args = parsed(script, world.size, *flags)
    needs = setup.check(args, world.device, step_sizes(args, world.size))
    factory = setup.ModelFactory(args, needs, world)
    optimizing = partial(torch.optim.AdamW, lr=1e-3, fused=True), lambda update: 1.0
    with patch.object(setup.models, "shard_model", placed):
        models = [factory.policy("actor", args.model.model, *optimizing)]
        if name == "ppo":
            models.append(factory.critic("critic", args.model.model, *optimizing))
    return script, args, needs, models


def updated(name, world, *flags):
    """(metrics, log-probs of the rows) of an update of two mini-batches. Then `events` has its events."""
    script, args, needs, models = set_up(name, world, *flags)
    batch = rows(world)
    models[0].checks.on_policy = True  # as after check_rows
    events.clear()
    metrics, outputs = script.update(args, *models, batch, needs, 0.01, *[False] * (name == "ppo"))
    noted = list(events)
    add_outputs(batch, outputs)
    results = reduce_metrics(metrics), batch.batch["log_probs"].cpu()
    events[:] = noted
    return results


def compare(world, name, flags, more_waits):
    """The update of two mini-batches on the CPU and on the accelerator; more_waits: of a mini-batch."""
    theirs, expected = updated(name, on_cpu(world), *flags)
    metrics, log_probs = updated(name, world, *flags)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == theirs.keys()
    for key, value in theirs.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    expected = {place: MINI_BATCH.get(place, 0) + more_waits.get(place, 0) for place in MINI_BATCH | more_waits}
    assert waits() == {place: 2 * n for place, n in expected.items() if n}


SLOW_UPDATES = [
    ("remax", "", {}),
    ("grpo", "--no-share-prompts", {}),
    ("grpo", "--attn-implementation sdpa", {MODEL: 3}),  # of three micro-batches
    ("grpo", "--reduce-each-micro-batch --gradient-checkpointing", {}),
    ("grpo", "--lora-rank 4", {}),
    ("grpo", "--cpu-offload activations", {}),
]
UPDATES = [("grpo", "--kl-coef 0.1", {}), ("ppo", "", {COUNTS: 1, NORM: 1}), ("grpo", "--top-p 0.9", {KEPT: 2})]
UPDATES += [("grpo", "--cpu-offload actor", {NORM: -1})]  # the gradient is on the CPU


@on_gpu
@pytest.mark.parametrize(("name", "flags", "more_waits"), with_slow([*UPDATES, *SLOW_UPDATES], *SLOW_UPDATES))
def test_update(world, name, flags, more_waits):
    """Two mini-batches of two micro-batches: the host waits once a mini-batch."""
    with patch("lib.model.log_probs.CANDIDATES", 8):
        compare(world, name, flags.split(), more_waits)
    if "actor" not in flags:  # else weights come for each forward
        sources = [x for kind, *_, x in events if kind == "in" and x.numel()]
        assert len({(x.untyped_storage().data_ptr(), x.storage_offset()) for x in sources}) == len(sources) > 0


def held_by(actor) -> list:
    return [*actor.parameters, *(x for p in actor.parameters for x in actor.optimizer.state[p].values())]


def trained(world, folder, *flags):
    """A policy after four updates and a checkpoint, and what it holds: weights and Adam's state, by their places."""
    script, args, needs, [actor] = set_up("grpo", world, *flags)
    for _ in range(2):
        script.update(args, actor, rows(world), needs, 0.0)
    models = {"actor": (actor.module, actor.optimizer)}
    saved = save_checkpoint(folder, 1, models=models, schedulers={}, trainer_state={}, keep=1).result()
    return actor, saved, held_by(actor)


def assert_equal(these, those):
    assert all(torch.equal(full_tensor(a).cpu(), full_tensor(b).cpu()) for a, b in zip(these, those, strict=True))


@pytest.mark.slow
@on_gpu(ranks=2)
def test_an_optimizer_in_cpu_memory_makes_the_same_bits(world, tmp_path):
    """Its moments cross once each way an update, without a wait but the last; a checkpoint brings them back there."""
    plain, saved, expected = trained(world, tmp_path / "plain")
    with patch.object(host_state, "BUCKET_BYTES", 4096):
        actor, offloaded, held = trained(world, tmp_path / "offloaded", "--cpu-offload", "optimizer")
        crossed = Counter(event.kind for event in events if event.place.startswith("lib/distributed/host_state.py"))
    moments = [x for p in actor.parameters for x in actor.optimizer.state[p].values() if x.numel() > 1]
    assert {x.device.type for x in moments} == {"cpu"} and len(moments) == 2 * len(actor.parameters)
    assert crossed == {"in": 3 * len(moments), "out": 4 * len(moments)}  # in the first update they are new
    assert_equal(held, expected)
    for path in (offloaded, saved):
        load_checkpoint(path, models={"actor": (plain.module, plain.optimizer)}, schedulers={})
        assert_equal(held_by(plain), held)


SEQUENCE = ["--sequence-parallel-size", "2"]
TENSOR = ["--tensor-parallel-size", "2", "--rollout-engine", "vllm"]


@on_gpu
def test_update_with_the_settings_of_a_gpu(world):
    """auto is bfloat16 and varlen there. log_probs.ROW_TOLERANCE says what bfloat16 may change."""
    with cpu_kernels():
        _, expected = updated("grpo", on_cpu(world), "--compute-dtype", "bfloat16")
        assert not CALLS
        _, log_probs = updated("grpo", world, "--compute-dtype", "auto")
    assert CALLS and waits() == {place: 2 * n for place, n in MINI_BATCH.items()}
    trained = expected != 0
    assert (log_probs - expected)[trained].abs().mean() < ROW_TOLERANCE[torch.bfloat16][1]


@on_gpu(ranks=2)
@pytest.mark.parametrize("flags", with_slow([[], SEQUENCE, TENSOR], [], TENSOR), ids=" ".join)
def test_update_of_two_ranks(world, flags):
    """Weights and gradients sharded; then also a row's tokens, or the layers' weights, split over both."""
    compare(world, "grpo", flags, {})


@on_gpu(ranks=2)
def test_activations_on_the_cpu_are_no_weights(world):
    """FSDP frees a layer's weights after its forward, and gathers them again for its backward."""
    sizes = []
    for flags in ([], ["--gradient-checkpointing"]):
        flags = ["--cpu-offload", "activations", *flags]
        compare(world, "grpo", flags, {})
        copied = [source for kind, *_, source in events if kind == "out"]
        _, _, _, [policy, *_] = set_up("grpo", on_cpu(world), *flags)
        weights = {shape for p in policy.module.parameters() for shape in (p.shape, p.shape[::-1])}
        assert len(weights) > 3 and not weights & {x.squeeze(0).shape for x in copied}
        sizes.append(sum(x.numel() for x in copied))
    assert 0 < sizes[1] < sizes[0] / 2  # a checkpointed layer keeps what goes into it


@on_gpu
def test_a_column_that_has_changed_is_read_again(world):
    """A script may give a micro-batch another mask: copies of the old one must not lay out its rows."""
    for change in (lambda t: t["response_mask"].zero_(), lambda t: t.update({"response_mask": 0 * t["response_mask"]})):
        [micro, *_], _ = prepare_dynamic_batch(rows(world), 24)
        events.clear()
        assert on_host(micro).batch["response_mask"].any() and not events
        change(micro.batch)
        assert not on_host(micro).batch["response_mask"].any() and waits() == {ROWS: 4}


@on_gpu
@pytest.mark.parametrize("kind", with_slow([*MROPE, "gemma3", "smolvlm"], "qwen2_vl", "qwen2_5_vl", "glm4v", "smolvlm"))
def test_images(here, kind, tmp_path):
    """Log-probs of rows with images, and an update of decoder and tower."""
    results = []
    tiny_vision(kind, tmp_path)
    for world in (on_cpu(here), here):
        *_, [actor] = set_up("grpo", world, "--model", str(tmp_path), "--micro-batch-tokens", "200")
        batch = vision_batch(kind).to(world.device)
        events.clear()
        for micro in micro_batches(batch, actor):
            log_probs, entropy = actor.log_probs(micro)
            actor.backward((log_probs - 0.1 * entropy).mean())
        metrics = actor.step()
        waited = waits()
        results.append((log_probs.detach().cpu(), torch.tensor(metrics["actor/grad_norm"].total)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    in_backward = {"outside"} if kind in MROPE else set()  # where transformers has indexed by a mask, or a CPU's
    assert waited.keys() <= {ROWS, LARGEST, NORM, TOWER, MODEL} | in_backward and waited[ROWS] == 5


@on_gpu
@pytest.mark.parametrize("flags", with_slow([[], LORA], []), ids=" ".join)
def test_forward_passes(here, flags):
    """The check of the first batch; log-probs, entropies, squared scores, a reference's log-probs and values."""
    results = []
    for world in (on_cpu(here), here):
        _, args, needs, (actor, critic) = set_up("ppo", world, *flags)
        with patch.object(setup.models, "shard_model", placed):
            ref = setup.ModelFactory(args, needs, world).reference(actor)
        batch = rows(world)
        actor.check_rows(batch)
        events.clear()
        with patch("lib.model.log_probs.GPU_CHUNK", 4):  # the logits of 4 tokens at a time
            columns = actor.batched_log_probs(batch, ("squared_score",))
        columns |= {"ref": ref.batched_log_probs(batch), "values": critic.batched_values(batch)}
        waited = waits()
        assert {x.device.type for x in columns.values()} == {world.device.type}
        results.append({name: x.cpu() for name, x in columns.items()})
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert waited == {ROWS: 3 * 4, LARGEST: 4, WEIGHTS: 1}


@on_gpu
@pytest.mark.parametrize("flags", with_slow([[], LORA], []), ids=" ".join)
def test_weight_sync(here, flags):
    """The gathered weights, their buckets for servers, and the checksums, which are read once."""
    seen = []
    for world in (on_cpu(here), here):
        *_, [actor] = set_up("grpo", world, *flags)
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
    waited = waits()
    waited.pop("outside")  # of this test
    assert waited == {CHECKSUMS: 2}


@on_gpu
def test_checkpoint_and_export(here, tmp_path):
    """A checkpoint from an accelerator goes on on a CPU, and the other way round; the exported models are equal."""
    exported = []
    of_actor = lambda x: {"models": {"actor": (x.module, x.optimizer)}, "schedulers": {"actor": x.scheduler}}  # noqa: E731
    for world, other in ((on_cpu(here), here), (here, on_cpu(here))):
        folder = tmp_path / world.device.type
        script, args, needs, [actor] = set_up("grpo", world)
        script.update(args, actor, rows(world), needs, 0.0)
        saved = save_checkpoint(folder, 1, **of_actor(actor), trainer_state={}, keep=0)
        script, args, needs, [actor] = set_up("grpo", other)
        load_checkpoint(saved.result(), **of_actor(actor))
        script.update(args, actor, rows(other), needs, 0.0)
        export_hf(actor.module, load_tokenizer(TOY_MODEL), folder / "model", torch.float32)
        exported.append(load_file(folder / "model/model.safetensors"))
    # Adam divides by the root of a gradient's square: where that is rounding only, a step of 1e-3 has another sign
    torch.testing.assert_close(exported[1], exported[0], rtol=1e-4, atol=1e-5)


MANY = ["--lora-rank", "4", "--kl-coef", "0.1", "--kl-placement", "reward", "--adv-estimator", "rloo"]
MANY += ["--rollout-correction.level", "token", "--token-masks", "top_entropy=0.5", "--num-mini-batches", "2"]
MANY += ["--entropy-coef", "0.01", "--record", "{}/kept"]
AGENT = ["--agent", "{}/agent.py:solve"]
ASKS = """
from openai import OpenAI

def solve(base_url, api_key, row):
    client = OpenAI(base_url=base_url, api_key=api_key)
    answer = client.chat.completions.create(model="policy", messages=row["prompt"], max_tokens=4)
    return len(answer.choices[0].message.content) % 2
"""


RUNS = {"many flags": ("grpo", MANY), "agent": ("grpo", AGENT)}
RUNS |= {name: (name, []) for name in ("grpo", "ppo", "remax", "dapo")}


@on_gpu
@pytest.mark.parametrize("case", with_slow(RUNS, *RUNS.keys() - {"many flags"}))
def test_a_whole_run(world, case, tmp_path):
    """From the set-up to the export, in bfloat16 with varlen as by default on a GPU: no operation has tensors of two
    devices. The second run goes on from the first one's checkpoint."""
    (tmp_path / "agent.py").write_text(ASKS)
    name, more = RUNS[case]
    script = importlib.import_module(name)
    flags = ["--output-dir", str(tmp_path), "--run-name", "run", "--save-every", "1", "--val-every", "2"]
    flags += ["--no-val-before-train", "--reward-workers", "0", "--max-response-length", "4", "--resume", "auto"]
    rows = (ROOT / "data/toy/val.jsonl").read_text().splitlines(keepends=True)[:8]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    flags += ["--prompts-per-step", "4", "--train-files", str(tmp_path / "rows.jsonl"), "--val-files"]
    flags += [str(tmp_path / "rows.jsonl"), "--config", str(ROOT / "data/toy/preset.yaml")]
    flags += [word.format(tmp_path) for word in more]
    sample = HFEngine._sample

    def in_any_thread(*args):
        with strict.Factories():
            return sample(*args)

    with (
        patch.object(setup.ranks, "join", lambda args: world),
        patch.object(setup.models, "shard_model", placed),
        patch.object(HFEngine, "_sample", in_any_thread),
        cpu_kernels(),
    ):
        for steps in ("1", "2"):
            script.main(parse_flags(script.Args, [*flags, "--total-steps", steps]))
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert CALLS and [row["step"] for row in logged if "actor/loss" in row] == [1, 2]
    assert (tmp_path / "run/model/model.safetensors").exists()
