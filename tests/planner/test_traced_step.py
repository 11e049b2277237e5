"""The trace of a step without values: what it says of memory beside the estimate, of kernels, and of a user's script.

In a process of its own: torch counts accelerators at its first backward pass, and cannot unregister one."""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
import torch

import grpo
from lib import InputError
from lib.args import step_sizes
from lib.distributed import current_stage
from planner.images import images_that_fill
from planner.trace import Trace
from planner.traced_step import check_traceable, rows_of_trace
from tests.common import FORKSERVER, MROPE, ROOT, parse_flags, tiny_vision, with_slow
from tests.gpu import strict
from tests.gpu.test_strict import COUNTS, MINI_BATCH, NORM

# three layers of public models, with a vocabulary that does not outweigh them
SMALL = {"num_hidden_layers": 3, "vocab_size": 32768}
SMALL_VISION = {"depth": 3, "fullatt_block_indexes": [0, 1, 2]}  # a trace of windows takes long
IDS = {"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7}
# the estimate takes all tokens of a micro-batch for those of images, so prompts are nearly all of it
IMAGES = ("--max-prompt-length", "1984", "--max-response-length", "32", "--micro-batch-tokens", "2048")
IMAGES += ("--group-size", "2", "--vision-kwargs", "max_pixels=400000")
SIZES = ("--max-prompt-length", "256", "--max-response-length", "1024", "--micro-batch-tokens", "4096")
CASES = {  # script, shape, tied, ranks, flags
    "whole gradients": ("grpo", "qwen2.5-1.5b", True, 8, ()),
    "checkpointing": ("grpo", "qwen2.5-7b", False, 16, ("--gradient-checkpointing", "--reduce-each-micro-batch")),
    "LoRA": ("grpo", "qwen2.5-1.5b", False, 1, ("--lora-rank", "16", "--rollout-engine", "http://host:1")),
    "critic": ("ppo", "qwen2.5-1.5b", True, 8, ("--prompts-per-step", "512", "--sharding", "fsdp2")),
    "images": ("grpo", "qwen2.5-vl-3b", True, 8, IMAGES),
    "images, checkpointing": ("grpo", "qwen2.5-vl-3b", True, 8, (*IMAGES, "--gradient-checkpointing")),
}
RECOMPUTED = {"LoRA": 1 / 3, "critic": 2 / 3}  # the share of the layers
OWN_LOSS = ("losses = torch.maximum(unclipped, clipped)", "losses = torch.maximum(unclipped, clipped).tan()")


class WaitingTrace(Trace):
    """Notes where the host reads what is on the accelerator, from the update on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        device = (kwargs or {}).get("device")
        if func._opname == "_to_copy" and args[0].device.type == "gpu" and device is not None and device.type == "cpu":
            self.note(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _by_values(self, func, args, kwargs):
        self.note(func)
        return super()._by_values(func, args, kwargs)

    def note(self, func) -> None:
        if current_stage().endswith(" update"):
            strict.note("wait", func._opname)


def trace(script: str, config: dict, folder: str, *flags: str, recomputed: float = 0) -> dict:
    import torch.distributed as dist

    from lib import setup
    from lib.args import training_ranks
    from planner import estimate, traced_step
    from planner.traced_step import predict_update, trace_step

    Path(folder, "config.json").write_text(json.dumps(config))
    Path(folder, "model.safetensors").touch()
    sys.path.insert(0, folder)
    flags = ("--model", folder, "--compute-dtype", "bfloat16", "--attn-implementation", "packed_sdpa", *SIZES, *flags)
    args = parse_flags(import_module(script).Args, [*flags])
    args.model.auto_recomputed = recomputed
    if not dist.is_initialized():
        setup.join(args)
    sizes, ranks = step_sizes(args, training_ranks(args)), training_ranks(args)
    strict.events.clear()
    traced_step.Trace = WaitingTrace
    traced = trace_step(args)
    names = {k.name for k in traced.kernels if k.moment == "loss"}
    estimated = estimate.memory_of(args, ranks, 80 * 2**30)
    seconds = predict_update(args, sizes, traced, ranks)
    result = {"traced": traced.memory, "estimated": estimated, "speed": traced.speed(ranks), "names": names}
    return result | {"s": seconds, "waits": strict.waits()}


@pytest.fixture(scope="module")
def child():
    with ProcessPoolExecutor(1, FORKSERVER) as executor:
        yield executor


@pytest.mark.parametrize("case", with_slow(CASES, *CASES.keys() - {"critic", "images"}))
def test_the_estimate_agrees_with_the_trace(child, case, tmp_path):
    """Within 5 % at each moment, or 64 MiB: what single tensors take that the estimate leaves out."""
    script, shape, tied, ranks, flags = CASES[case]
    config = json.loads((ROOT / f"benchmarks/shapes/{shape}.json").read_text())
    images = "vision_config" in config
    config["tie_word_embeddings"] = tied
    config.get("text_config", config).update(SMALL)
    if images:
        config |= IDS
        config["vision_config"] |= SMALL_VISION
    flags, some = ("--dry-run", str(ranks), *flags), RECOMPUTED.get(case, 0)
    result = child.submit(trace, script, config, str(tmp_path), *flags, recomputed=some).result()
    moments = {"advantages", "loss", "backward", "last layer", "optimizer"}
    moments |= {"log-probs", "critic"} if script == "ppo" else set()
    if images:  # at the loss the estimate has logits of all tokens, the trace of 64
        moments = moments - {"loss"} | {"vision"}
    assert moments <= result["traced"].keys() & result["estimated"].keys()
    for moment in moments:
        traced, estimated = (sum(result[name][moment].values()) for name in ("traced", "estimated"))
        assert abs(estimated - traced) <= max(0.05 * traced, 64 << 20), (moment, traced, estimated, result)
    models = 2 if script == "ppo" else 1
    # the host waits once a mini-batch, as on the strict device; here both counts are reads of their own
    if images:  # transformers' tower reads the images' sizes on the host, and its kernels are short
        return
    assert result["waits"] == MINI_BATCH | {COUNTS: 2 * models, NORM: models}
    update, log_probs = result["s"]
    assert 0 < log_probs < update / 2 and 0 < result["speed"].mfu < 1


def test_fused_layers_have_fewer_launches(child, tmp_path):
    """A layer takes 132 launches without them."""
    config = json.loads((ROOT / "benchmarks/shapes/qwen2.5-1.5b.json").read_text()) | SMALL
    result = child.submit(trace, "grpo", config, str(tmp_path), "--dry-run", "1").result()
    assert 30 < result["speed"].launches < 58
    kept = {name: sum(result[name]["loss"].values()) for name in ("traced", "estimated")}
    assert abs(kept["estimated"] / kept["traced"] - 1) < 0.05  # norms and gated MLPs keep less for the backward pass


def test_a_copy_of_a_script_is_traced_with_its_own_loss(child, tmp_path):
    text = (ROOT / "grpo.py").read_text()
    assert OWN_LOSS[0] in text
    (tmp_path / "my_own.py").write_text(text.replace(*OWN_LOSS))
    config = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 128}
    result = child.submit(trace, "my_own", config, str(tmp_path), "--dry-run", "2").result()
    assert "tan" in result["names"]


def followed() -> dict:
    """What the trace says of a few operations."""
    from planner.fake_gpu import register_fake_gpu
    from planner.trace import Trace

    gpu, trace = register_fake_gpu(), Trace(lambda: "here")
    with trace:
        mask = torch.tensor([True, False, True]).to(gpu)
        x = torch.zeros(3, 4, device=gpu)
        w = torch.zeros(4, 4, device=gpu)
        trace.forget(x)
        kernels = len(trace.kernels)
        y = x.view(3, 4) @ w
        found = {"known": int(mask.sum()), "rows": x[mask].shape, "unknown": float(x.sum()), "all": x[x > 0].shape}
        del y
        z = torch.zeros(1024, device=gpu)
        trace.name("a kind", [z])
        z.untyped_storage().resize_(0)
    found["kernels"] = [(k.name, k.bytes, k.flops) for k in trace.kernels[kernels:]][:1]
    return found | {"peak": trace.peaks()["here"]}


def test_a_trace_knows_values_of_the_cpu_bytes_and_flops(child):
    found = child.submit(followed).result()
    assert (found["known"], found["rows"]) == (2, (2, 4))
    assert (found["unknown"], found["all"]) == (1.0, (12,))  # a value that nobody knows is 1, or True
    assert found["kernels"] == [("mm", 4 * (12 + 16 + 12), 2.0 * 3 * 4 * 4)]  # a view launches nothing
    assert found["peak"]["a kind"] == 4096 and found["peak"]["work"] < 1024


@pytest.mark.parametrize("flags", [("--tensor-parallel-size", "2"), ("--cpu-offload", "actor")])
def test_what_a_trace_does_not_follow_is_refused(flags, world):
    with pytest.raises(InputError, match=flags[0]):
        check_traceable(parse_flags(grpo.Args, ["--dry-run", "8", *flags]))


@pytest.mark.parametrize("kind", [*MROPE, "idefics3", "gemma3"])
def test_images_fill_a_prompt(kind):
    """Of 101 tokens. Those of MROPE have images of at most 27 tokens of 8 x 8 pixels, the others of 4 tokens."""
    with torch.device("meta"):
        model = tiny_vision(kind)
    inputs, count = images_that_fill(model, 101, 27 * 64)
    images = inputs["image_grid_thw"] if kind in MROPE else inputs["pixel_values"].flatten(0, -4)
    assert (len(images), count) == (4 if kind in MROPE else 25, 100)
    if kind in MROPE:
        assert images.prod(1).sum() == len(inputs["pixel_values"]) and images.prod(1).max() * 16 <= 27 * 64


@pytest.mark.parametrize(("tokens", "expected"), [(4096, (4, 3, 960)), (1300, (2, 3, 522)), (20000, (8, 9, 801))])
def test_the_rows_of_a_trace_fill_three_micro_batches(tokens, expected):
    """256 + 4 x 960, 256 + 2 x 522 and 3 x (256 + 8 x 801) tokens; a rank has 32 prompts with 8 responses of 1024."""
    args = parse_flags(grpo.Args, ["--dry-run", "8", *SIZES[:4], "--micro-batch-tokens", str(tokens)])
    args.prompts_per_step = 256
    small, own = rows_of_trace(args, 8)
    assert (small.group_size, small.prompts_per_step / 8, own) == expected
