"""lib/distributed/: launchers, ranks that differ, FSDP2 at 1 and 2 ranks. Traps are numbered as in docs/dev/LOG.md.

Loss and gradient on any number of ranks: tests/scripts/test_flag_pairs.py, tests/scripts/test_invariance.py."""

import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import write_basic_config
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import grpo
import lib.distributed
import lib.distributed.launch as launch_module
import lib.model.load
from lib import InputError
from lib.distributed import World, iter_full_params, make_mesh, shard_model, trainable_parameters
from lib.model import batched_log_probs, load_model
from lib.rollout import weight_checksum
from lib.run import run_config
from tests.common import (
    BIN,
    ROOT,
    SMALL,
    command,
    environment,
    fork_each,
    parse_flags,
    rollout_batch,
    run_ranks,
    save_tiny,
)

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


@pytest.mark.slow
def test_accelerate_gives_all_ranks_sharding_and_weights(tmp_path):
    """Traps 2 to 4: separate runs instead of ranks, DDP instead of FSDP2, weights of zero off rank 0."""
    (tmp_path / "probe.py").write_text(PROBE)
    path = save_tiny(tmp_path / "model")
    total = sum(p.abs().sum().item() for p in AutoModelForCausalLM.from_pretrained(path).parameters())
    start = [*ACCELERATE, *FSDP_PLUGIN, str(tmp_path / "probe.py"), path]
    env = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(start, env=env, capture_output=True, text=True, timeout=600)
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
    "engine": "--rollout-engine is hf on rank 1, vllm on rank 0",  # by auto: vLLM may be missing on a second node
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

    def start(*more: str, trains: bool = True, engine: str = "vllm") -> dict:
        args = parse_flags(grpo.Args, [word.format(tmp=tmp_path) for word in (*words, *more)])
        args.rollout.auto_engine = engine
        return json.loads(json.dumps(run_config.describe_start(args, script, trains)))

    first = start()
    if not other.startswith(("--", "engine")):
        names = {"script": script, "weights": tmp_path / "model/model.safetensors"}
        names |= {"what a scorer imports": helper, "package": tmp_path / "other"}
        names.get(other, tmp_path / "reward.py").write_text("def score(data_source, solution_str, ground_truth): ...")
    if other == "package":
        monkeypatch.setattr(run_config, "version", lambda _: "0.1")
    second = start(*other.split() if other.startswith("--") else (), engine="hf" if other == "engine" else "vllm")
    found = launch_module._different_starts([first, second])
    assert SECOND_START[other].format(tmp=tmp_path) in found and bool(found) == bool(SECOND_START[other])
    assert other in ("package", "program of an agent") or ";" not in found  # nothing else differs
    if other == "weights":
        on_servers = launch_module._different_starts([first, start(trains=False)])  # which need no files
        assert "--reward" not in on_servers and "--model" not in on_servers


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


# ---- shards ----------------------------------------------------------------------------------------
def test_replicas_hold_equal_shards_and_give_whole_parameters(tmp_path):
    path = save_tiny(tmp_path)

    def replica_layout(world):
        model = shard_model(load_model(path), make_mesh(world, 2), torch.float32)
        return trainable_parameters(model)[0].to_local().clone(), dict(iter_full_params(model))

    expected = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    a, b, c, d = run_ranks(4, replica_layout)
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


def test_a_weight_is_cast_before_it_is_gathered(tmp_path):
    """2 bytes a weight go over the network, not 4 (a weight whose rows two ranks cannot halve: one more row), and the
    bits are those of a cast afterwards."""
    path = save_tiny(tmp_path)

    def gathered_in_bfloat16(world):
        model = shard_model(load_model(path), make_mesh(world), torch.float32)
        with BytesGathered() as gathered:
            weights = dict(iter_full_params(model, torch.bfloat16))
        return gathered.total, weights

    expected = {name: p.bfloat16() for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()}
    by_formula = sum(2 * math.ceil(len(p) / 2) * p[0].numel() * 2 for p in expected.values())
    for total, weights in run_ranks(2, gathered_in_bfloat16):
        assert total == by_formula
        assert weights.keys() == expected.keys() and all(torch.equal(weights[k], expected[k]) for k in expected)


def test_unequal_replicas_are_refused():
    with pytest.raises(InputError, match="--dp-replicate-size 3: the number of ranks, 4"):
        make_mesh(World(0, 4, torch.device("cpu")), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unsharded_ranks_may_run_different_numbers_of_forwards(tmp_path, dtype):
    """The model computes what it does in shards, and is sharded again, also after an interrupt. And after a forward
    without a backward, where FSDP2 keeps the root whole: of a reference, a GiB at 7B during the update."""
    (a, norm_a), (b, norm_b) = run_ranks(2, unsharded_and_again, save_tiny(tmp_path), dtype)
    assert torch.equal(a, b) and norm_a == norm_b


def unsharded_and_again(world, path, dtype):
    model, ids = shard_model(load_model(path), make_mesh(world), dtype), torch.arange(4, 12)[None]
    whole = model(input_ids=ids).logits
    with torch.no_grad(), lib.distributed.unsharded(model):
        outputs = [model(input_ids=ids).logits for _ in range(1 + 2 * world.rank)]
    with pytest.raises(KeyboardInterrupt), lib.distributed.unsharded(model):
        raise KeyboardInterrupt
    assert all(isinstance(p, DTensor) for p in model.parameters()) and isinstance(model, FSDPModule)
    assert all(torch.equal(output, whole) for output in outputs)
    batched_log_probs(model, rollout_batch([4, 3], [5, 6]), 1.0, 64)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(input_ids=ids, labels=ids).loss.backward()
    return whole.detach(), lib.distributed.clip_grad_norm(trainable_parameters(model), 1e9)


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


def test_what_the_first_rank_does_or_refuses_all_ranks_learn():
    def ask(world):
        def refuse():
            raise InputError(f"refused by rank {world.rank}")

        with pytest.raises(InputError, match="refused by rank 0"):
            lib.distributed.on_first_rank(refuse)
        return lib.distributed.on_first_rank(lambda: (world.rank, Path("runs")))

    assert run_ranks(2, ask) == [(0, Path("runs"))] * 2
