"""lib/distributed/ and micro-batches of lib/data/: launchers, FSDP2 at 1 and 2 ranks.

Traps are numbered as in docs/dev/LOG.md.
"""

import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import write_basic_config
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import grpo
import lib.distributed
import lib.distributed.launch as launch_module
import lib.model.load
from lib import InputError
from lib.core_algos import agg_loss
from lib.data import prepare_dynamic_batch
from lib.distributed import (
    World,
    clip_grad_norm,
    full_tensor,
    iter_full_params,
    make_mesh,
    on_first_rank,
    set_gradient_sync,
    shard_model,
    trainable_parameters,
    unsharded,
)
from lib.model import add_lora, batched_log_probs, load_model, response_log_probs
from lib.rollout import weight_checksum
from lib.run import run_config
from tests.common import (
    ROOT,
    SMALL,
    command,
    fork_each,
    parse_flags,
    randomize_lora_b,
    rollout_batch,
    run_ranks,
    save_tiny,
    with_slow,
)

BIN = Path(sys.executable).parent
PROMPTS, RESPONSES = [9, 2, 3, 7, 5, 2, 4, 3], [17, 12, 1, 2, 16, 3, 2, 5]  # skewed on purpose


# ---- launchers -----------------------------------------------------------------------------------

# what every launcher must give: two ranks, sharded parameters, the checkpoint's weights on both
PROBE = """
import sys
import torch.distributed as dist
from lib.distributed import init_distributed, make_mesh, shard_model, full_tensor, run
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
def main(path):
    import torch
    world = init_distributed(300)
    from lib.model import load_model
    model = load_model(path)
    total = sum(p.abs().sum().item() for p in model.parameters())
    shard_model(model, make_mesh(world), torch.float32)
    kinds = {type(p) for p in model.parameters()} == {DTensor} and isinstance(model, FSDPModule)
    print(f"rank {world.rank} of {world.size} sharded {kinds} weights {total:.3f}", flush=True)
run(main, sys.argv[1])
"""

ACCELERATE = [str(BIN / "accelerate"), "launch", "--num_processes", "2", "--main_process_port", "0"]
FSDP_PLUGIN = ["--config_file", str(ROOT / "tools/launch/accelerate_8.yaml"), "--use_fsdp", "--fsdp_version", "2"]


def launch(launcher: list[str], script: Path, *args: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, str(script), *args], env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_accelerate_gives_all_ranks_sharding_and_weights(tmp_path):
    """Traps 2 to 4: separate runs instead of ranks, DDP instead of FSDP2, weights of zero off rank 0. With our
    file and accelerate's own FSDP, whose variables reach the ranks. torchrun: test_waits.py; python: tests/scripts/."""
    (tmp_path / "probe.py").write_text(PROBE)
    path = save_tiny(tmp_path / "model")
    total = sum(p.abs().sum().item() for p in AutoModelForCausalLM.from_pretrained(path).parameters())
    done = launch([*ACCELERATE, *FSDP_PLUGIN], tmp_path / "probe.py", path)
    lines = sorted(re.findall(r"rank \d of \d sharded \w+ weights \d+\.\d{3}", done.stdout))  # ranks may share a line
    expected = [f"rank {r} of 2 sharded True weights {total:.3f}" for r in (0, 1)]
    assert lines == expected, done.stdout + done.stderr
    assert "warning: the launcher's store listens on all network interfaces" in done.stderr
    assert done.stdout.count(f"{UNUSED}: use_fsdp true ({FSDP2})\n") == 1 == done.stdout.count(UNUSED)


FSDP2 = "models are always sharded by torch's FSDP2"
UNUSED = "accelerate starts the processes only, its other settings are not used"
SETTINGS = {  # the arguments of `accelerate launch`: what is said of them
    "": "",
    "mixed_precision bf16, dynamo_backend inductor": (
        "mixed_precision bf16 (give --compute-dtype bfloat16), dynamo_backend INDUCTOR (give --compile)"
    ),
    "mixed_precision fp16, num_processes 2, use_fsdp, fsdp_version 2, fsdp_offload_params true, "
    "fsdp_activation_checkpointing true, use_parallelism_config, parallelism_config_tp_size 2": (
        f"mixed_precision fp16 (give --compute-dtype float16), use_fsdp true ({FSDP2}), fsdp_offload_params true "
        "(give --cpu-offload actor), fsdp_activation_checkpointing true (give --gradient-checkpointing), "
        "parallelism_config_tp_size 2 (give --tensor-parallel-size)"
    ),
    "num_processes 2, use_megatron_lm": "use_megatron_lm true (give --tensor-parallel-size)",
    "use_deepspeed, zero_stage 3, gradient_accumulation_steps 4, gradient_clipping 0.5, "
    "offload_param_device none, offload_optimizer_device cpu": (
        f"use_deepspeed true ({FSDP2}), deepspeed_offload_optimizer_device cpu (give --cpu-offload actor), "
        "gradient_accumulation_steps 4 (give --micro-batch-tokens), gradient_clipping 0.5 (give --max-grad-norm)"
    ),
}


@pytest.mark.parametrize("arguments", SETTINGS)
def test_settings_of_accelerate_that_nothing_reads_are_named_with_our_flags(arguments, monkeypatch, tmp_path):
    """In the environments that `accelerate launch` makes of these arguments and of its own default config. Without
    DeepSpeed installed its launcher ends in an ImportError: grpo.py does not start."""
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    write_basic_config(save_location=str(tmp_path / "default_config.yaml"))
    options = f"--{arguments}".replace(", ", " --").split() if arguments else []
    words = ["--config_file", str(tmp_path / "default_config.yaml"), *options, "grpo.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    args.deepspeed_fields_from_accelerate_config = ""  # as its deepspeed_launcher does
    if args.use_deepspeed:
        _, env = prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.use_megatron_lm:
        env = prepare_multi_gpu_env(args)
    else:
        _, env = prepare_simple_launcher_cmd_env(args)
    assert env["ACCELERATE_MIXED_PRECISION"] and launch_module.unused_settings(env) == SETTINGS[arguments]


def test_accelerate_cpu_launch_that_starts_one_process_is_refused_with_the_mend(monkeypatch):
    """Trap 1. In the environment that it gives its process."""
    monkeypatch.delenv("RANK", raising=False)
    words = ["--cpu", "--num_processes", "2", "grpo.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    _, env = prepare_simple_launcher_cmd_env(args)
    mend = "starts one process, not N: use `accelerate launch --multi_gpu --num_processes N`"
    with pytest.raises(InputError, match=mend):
        launch_module._check_launcher(env)


# ---- ranks that were started differently ---------------------------------------------------------

SECOND_START = {  # what rank 1 has otherwise, and what is said of it
    "--lr 1e-3": "--lr is 0.001 on rank 1, 0.0003 on rank 0",
    "--multi-turn.tools calculator": "--multi-turn.tools is calculator on rank 1, '' on rank 0",
    "--output-dir {tmp}/elsewhere": "--output-dir is {tmp}/elsewhere on rank 1, {tmp} on rank 0",
    "--reward {tmp}/copy/reward.py:score": "",
    "--train-files {tmp}/copy/rows.jsonl --run-name other --model {tmp}/copy/model": "",
    "--train-files {tmp}/copy/swapped.jsonl": "--train-files is {tmp}/copy/swapped.jsonl on rank 1, {tmp}/rows",
    "script": "the script grpo.py holds something else, or is missing, on rank 1",
    "weights": "--model {tmp}/model holds something else, or is missing, on rank 1",
    "what a scorer imports": "the module helper_of_reward holds something else, or is missing, on rank 1",
    "program of an agent": "--agent 'python {tmp}/reward.py' holds something else, or is missing, on rank 1",
    "package": "numpy is 0.1 on rank 1, ",
}


@pytest.mark.parametrize("other", SECOND_START)
def test_what_differs_between_the_starts_of_two_ranks_is_named(tmp_path, monkeypatch, other):
    """Paths may differ, contents may not; the name of the run is rank 0's."""
    for folder in (tmp_path, tmp_path / "copy"):
        (folder / "model").mkdir(parents=True)
        (folder / "rows.jsonl").write_text("{1}\n{2}\n")
        (folder / "swapped.jsonl").write_text("{2}\n{1}\n")
        (folder / "model/config.json").write_text("{}")
        (folder / "model/model.safetensors").write_text("weights")
        (folder / "reward.py").write_text("def score(data_source, solution_str, ground_truth): return 0.0")
    monkeypatch.setattr(run_config, "ROOT", tmp_path)
    script, code, helper = tmp_path / "grpo.py", tmp_path / "lib/sampling.py", tmp_path / "helper_of_reward.py"
    code.parent.mkdir()
    for file in (script, code, helper):
        file.write_text("seed = 1")
    module = types.ModuleType("helper_of_reward")
    module.__file__ = str(helper)
    monkeypatch.setitem(sys.modules, "helper_of_reward", module)
    words = [*SMALL, "--output-dir", "{tmp}", "--model", "{tmp}/model", "--train-files", "{tmp}/rows.jsonl"]
    words += ["--val-files", "{tmp}/rows.jsonl", "--reward", "{tmp}/reward.py:score"]
    if other == "program of an agent":
        words += ["--agent", "python {tmp}/reward.py"]

    def start(*more: str, trains: bool = True) -> dict:
        given = [word.format(tmp=tmp_path) for word in (*words, *more)]
        return json.loads(json.dumps(run_config.describe_start(parse_flags(grpo.Args, given), script, trains)))

    first = start()
    if not other.startswith("--"):
        names = {"script": script, "weights": tmp_path / "model/model.safetensors"}
        names |= {"what a scorer imports": helper, "package": tmp_path / "other"}
        names.get(other, tmp_path / "reward.py").write_text("def score(data_source, solution_str, ground_truth): ...")
    if other == "package":
        monkeypatch.setattr(run_config, "version", lambda _: "0.1")
    second = start(*other.split() if other.startswith("--") else ())
    found = launch_module._different_starts([first, second])
    assert SECOND_START[other].format(tmp=tmp_path) in found and bool(found) == bool(SECOND_START[other])
    assert other in ("package", "program of an agent") or ";" not in found  # nothing else differs
    if other == "weights":
        on_servers = launch_module._different_starts([first, start(trains=False)])  # which need no files
        assert "--reward" not in on_servers and "--model" not in on_servers


def test_ranks_that_auto_gives_different_engines_are_refused(tmp_path):
    """vLLM may be missing, or of another kind, on a second node."""

    def start(engine: str) -> dict:
        args = parse_flags(grpo.Args, ["--output-dir", str(tmp_path)])
        args.rollout.auto_engine = engine
        return json.loads(json.dumps(run_config.describe_start(args, Path(grpo.__file__), True)))

    found = launch_module._different_starts([start("vllm"), start("hf"), start("vllm")])
    assert found == "--rollout-engine is hf on rank 1, vllm on rank 0"


def test_of_many_differences_and_ranks_the_first_are_named():
    starts = [{what: ["", "1"] for what in "abcdef"}] + [{what: ["", "2"] for what in "abcdef"}] * 6
    line = launch_module._different_starts(starts)
    assert line.startswith("a holds something else, or is missing, on rank 1, 2, 3, 4 and more; b ")
    assert line.endswith("; and 2 more")


@pytest.mark.parametrize("other", ["--total-steps 3", "--rollout-gpus 1"])
def test_ranks_that_would_wait_for_one_another_for_ever_end_with_one_line(tmp_path, other):
    """The second trains on fewer ranks than the first, or has a step more."""
    start = command("grpo", tmp_path, *SMALL, "--total-steps", "1", launcher=[])
    done = fork_each(start, [*start, *other.split()])
    flag, value = other.split()
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: the ranks were started differently: {flag} is {value} on rank 1, {int(value) // 3} on rank 0: "
        "start all ranks with the same flags, code and files (docs/scaling.md)"
    ]


# ---- one mini-batch, any number of ranks ---------------------------------------------------------


def mini_batch_gradient(
    world, path, agg_mode, micro_batch_tokens, dtype, no_grad_pass=False, replicas=1, cpu_offload=False
):
    """Loss, clipped-gradient norm and gradients of one mini-batch, spread over the ranks as the scripts spread it."""
    model = shard_model(load_model(path, dtype=dtype), make_mesh(world, replicas), dtype, cpu_offload=cpu_offload)
    parameters = trainable_parameters(model)
    batch = rollout_batch(PROMPTS, RESPONSES)[list(range(world.rank, len(PROMPTS), world.size))]
    mask = batch.batch["response_mask"]
    counts = torch.tensor([mask.sum(), mask.any(1).sum()])
    dist.all_reduce(counts)
    micro_batches, _ = prepare_dynamic_batch(batch, micro_batch_tokens)
    total = torch.zeros((), dtype=dtype)
    for i, micro in enumerate(micro_batches):
        set_gradient_sync(model, i == len(micro_batches) - 1)
        log_probs, entropy = response_log_probs(model, micro, 0.8)
        loss = agg_loss(
            -log_probs * torch.arange(1, log_probs.shape[1] + 1) - 0.1 * entropy,
            micro.batch["response_mask"],
            agg_mode,
            global_tokens=int(counts[0]),
            global_rows=int(counts[1]),
            loss_scale_factor=17,
        )
        (loss * world.size).backward()
        total += loss.detach()
    if no_grad_pass:
        batched_log_probs(model, batch, 0.8, micro_batch_tokens)
    dist.all_reduce(total)
    gradients = [full_tensor(p.grad).clone() for p in parameters]
    return total, clip_grad_norm(parameters, 1e9), gradients, len(micro_batches)


AGG_MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("agg_mode", with_slow(AGG_MODES, "token-mean", "seq-mean-token-sum-norm"))
def test_loss_and_gradient_do_not_depend_on_ranks_or_micro_batches(tmp_path, agg_mode):
    """Traps 6 and 7: means over a rank or a micro-batch, and FSDP's division by the number of ranks.

    rtol 1e-9 of the gradient's norm in fp64 is 5 orders below the smallest of those errors (0.4).
    """
    path = save_tiny(tmp_path)
    loss, norm, gradients, _ = run_ranks(1, mini_batch_gradient, path, agg_mode, 10**6, torch.float64)[0]
    for size, tokens in ((1, 30), (2, 10**6), (2, 30)):
        for other_loss, other_norm, other_gradients, n in run_ranks(
            size, mini_batch_gradient, path, agg_mode, tokens, torch.float64
        ):
            assert (n > 1) == (tokens == 30)
            torch.testing.assert_close(other_loss, loss, rtol=1e-9, atol=0)
            assert abs(other_norm / norm - 1) < 1e-9
            error = sum((a - b).square().sum() for a, b in zip(gradients, other_gradients)).sqrt()
            assert error < 1e-9 * norm


def test_loss_and_gradient_of_two_replicas_of_two_shards_are_those_of_one_rank(tmp_path):
    """rtol as above: gradients of one replica only would be off by the other's share."""
    path = save_tiny(tmp_path)
    loss, norm, gradients, _ = run_ranks(1, mini_batch_gradient, path, "token-mean", 10**6, torch.float64)[0]
    for other_loss, other_norm, other_gradients, n in run_ranks(
        4, mini_batch_gradient, path, "token-mean", 30, torch.float64, True, 2
    ):
        assert n > 1
        torch.testing.assert_close(other_loss, loss, rtol=1e-9, atol=0)
        assert abs(other_norm / norm - 1) < 1e-9
        assert sum((a - b).square().sum() for a, b in zip(gradients, other_gradients)).sqrt() < 1e-9 * norm


def replica_layout(world, path):
    model = shard_model(load_model(path), make_mesh(world, 2), torch.float32)
    p = trainable_parameters(model)[0]
    return p.to_local().clone(), dict(iter_full_params(model))


def test_replicas_hold_equal_shards_and_give_whole_parameters(tmp_path):
    path = save_tiny(tmp_path)
    expected = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    a, b, c, d = run_ranks(4, replica_layout, path)
    assert torch.equal(a[0], c[0]) and torch.equal(b[0], d[0]) and not torch.equal(a[0], b[0])
    for _, params in (a, b, c, d):
        assert params.keys() == expected.keys() and all(torch.equal(params[k], expected[k]) for k in params)


class BytesGathered(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in str(func):
            self.total += out.nbytes
        return out


def gathered_in_bfloat16(world, path):
    model = shard_model(load_model(path), make_mesh(world), torch.float32)
    with BytesGathered() as gathered:
        weights = dict(iter_full_params(model, torch.bfloat16))
    return gathered.total, weights


def test_a_weight_is_cast_before_it_is_gathered(tmp_path):
    """2 bytes a weight go over the network, not 4 (a weight whose rows two ranks cannot halve: one more row), and the
    bits are those of a cast afterwards."""
    path = save_tiny(tmp_path)
    expected = {name: p.bfloat16() for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()}
    by_formula = sum(2 * math.ceil(len(p) / 2) * p[0].numel() * 2 for p in expected.values())
    for total, weights in run_ranks(2, gathered_in_bfloat16, path):
        assert total == by_formula
        assert weights.keys() == expected.keys() and all(torch.equal(weights[k], expected[k]) for k in expected)


def test_unequal_replicas_are_refused():
    with pytest.raises(InputError, match="--dp-replicate-size 3: the number of ranks, 4"):
        make_mesh(World(0, 4, torch.device("cpu")), 3)


@pytest.mark.parametrize("size", with_slow([1, 2], 1))
def test_offloading_to_cpu_memory_changes_no_number(tmp_path, size, monkeypatch):
    """On a CPU memory is all the same; the path through FSDP is the offloading one."""
    policies, shard = set(), lib.distributed.sharding.fully_shard

    def spy(module, *, offload_policy, **options):
        policies.add(type(offload_policy))
        return shard(module, offload_policy=offload_policy, **options)

    path, args = save_tiny(tmp_path), ("token-mean", 30, torch.float64, True, 1)
    monkeypatch.setattr(lib.distributed.sharding, "fully_shard", spy)
    results = []
    for offload, policy in ((True, CPUOffloadPolicy), (False, OffloadPolicy)):
        ran = run_ranks(size, lambda *a: (mini_batch_gradient(*a), policies), path, *args, offload)[0]
        assert ran[1] == {policy}
        results.append(ran[0])
    (loss, norm, gradients, _), (plain_loss, plain_norm, plain_gradients, _) = results
    assert torch.equal(loss, plain_loss) and norm == plain_norm
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain_gradients, strict=True))


def test_gradient_norm_is_whole_after_a_forward_without_backward(tmp_path):
    """Trap 8: such a forward leaves the root's parameters unsharded, and model.parameters() then has no gradients."""
    path = save_tiny(tmp_path)
    norms = [
        run_ranks(2, mini_batch_gradient, path, "token-mean", 30, torch.float32, no_grad_pass)[0][1]
        for no_grad_pass in (False, True)
    ]
    assert norms[0] == norms[1]


def bf16_compute(world, path):
    model = shard_model(load_model(path), make_mesh(world), torch.bfloat16)
    log_probs, _ = response_log_probs(model, rollout_batch(PROMPTS, RESPONSES), 1.0)
    log_probs.sum().backward()
    dtypes = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in trainable_parameters(model)}
    return dtypes, log_probs.detach()


def test_bf16_compute_keeps_fp32_masters_gradients_and_log_probs(tmp_path):
    path = save_tiny(tmp_path)
    dtypes, log_probs = run_ranks(2, bf16_compute, path)[0]
    exact, _ = response_log_probs(load_model(path), rollout_batch(PROMPTS, RESPONSES), 1.0)
    assert dtypes == {torch.float32} and log_probs.dtype == torch.float32
    assert 0 < (log_probs - exact).abs().max() < 0.2  # bf16 it was: 8 bits of mantissa on logits of size 5


# ---- tied weights, LoRA, whole parameters --------------------------------------------------------


def sharded_parameters(world, path, lora):
    model = load_model(path)
    if lora:
        torch.manual_seed(world.rank)
        add_lora(model, rank=4, alpha=8, seed=3, target_modules=".*(q_proj|v_proj)")
        randomize_lora_b(model)
    model = shard_model(model, make_mesh(world), torch.float32)
    ids = torch.randint(4, 100, (4, 9), generator=torch.Generator().manual_seed(1))[world.rank :: world.size]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    params = trainable_parameters(model)
    gradients = [full_tensor(p.grad) for p in params]
    return tied, all(isinstance(p, DTensor) for p in params), gradients, dict(iter_full_params(model))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied_and_whole_parameters_come_back(tmp_path, tied):
    """Trap 10: a tied embedding in a group of its own comes untied."""
    path = save_tiny(tmp_path, tied=tied)
    expected = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    for is_tied, _, _, params in run_ranks(2, sharded_parameters, path, False):
        assert is_tied == tied
        assert params.keys() == expected.keys() and all(torch.equal(params[k], expected[k]) for k in params)


def unequal_forwards(world, path):
    model = shard_model(load_model(path), make_mesh(world), torch.float32)
    ids = torch.arange(4, 12)[None]
    with torch.no_grad(), unsharded(model):
        outputs = [model(input_ids=ids).logits for _ in range(1 + 2 * world.rank)]
    assert all(isinstance(p, DTensor) for p in model.parameters()) and isinstance(model, FSDPModule)
    model(input_ids=ids, labels=ids).loss.backward()
    return outputs[0], clip_grad_norm(trainable_parameters(model), 1e9)


def test_unsharded_ranks_may_run_different_numbers_of_forwards(tmp_path):
    (a, norm_a), (b, norm_b) = run_ranks(2, unequal_forwards, save_tiny(tmp_path))
    assert torch.equal(a, b) and norm_a == norm_b


def unsharded_and_again(world, path, dtype):
    model, ids = shard_model(load_model(path), make_mesh(world), dtype), torch.arange(4, 12)[None]
    whole = model(input_ids=ids).logits
    with torch.no_grad(), unsharded(model):
        same = torch.equal(model(input_ids=ids).logits, whole)
    with pytest.raises(KeyboardInterrupt), unsharded(model):
        raise KeyboardInterrupt
    return same, all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_model_gives_the_same_logits_and_is_sharded_again_also_after_an_interrupt(tmp_path, dtype):
    assert run_ranks(1, unsharded_and_again, save_tiny(tmp_path), dtype) == [(True, True)]


def checksums(world, path):
    model = shard_model(load_model(path), make_mesh(world), torch.float32)
    sums = [weight_checksum(model, dtype) for dtype in (torch.float32, torch.bfloat16)]
    p = trainable_parameters(model)[0]
    with torch.no_grad():
        p.to_local()[..., :1].mul_(1 + 2**-22)
    return sums, weight_checksum(model, torch.float32)


def test_checksum_is_the_same_for_any_sharding_and_feels_the_last_bit(tmp_path):
    path = save_tiny(tmp_path)
    (one, one_changed), (two, _), (other, two_changed) = run_ranks(1, checksums, path) + run_ranks(2, checksums, path)
    assert one == two == other and one[0] != one[1]
    assert one_changed != one[0] and two_changed != two[0]


# ---- micro-batches -------------------------------------------------------------------------------


def said_by_first_rank(world):
    def refuse():
        raise InputError(f"refused by rank {world.rank}")

    answer = on_first_rank(lambda: (world.rank, Path("runs")))
    with pytest.raises(InputError, match="refused by rank 0"):
        on_first_rank(refuse)
    return answer


def test_what_the_first_rank_does_or_refuses_all_ranks_learn():
    assert run_ranks(2, said_by_first_rank) == [(0, Path("runs"))] * 2
