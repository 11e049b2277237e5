"""--rollout-engine auto, and an engine of the user's own, path/to/file.py:Class: it trains, mistakes are one line."""

import json
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from types import ModuleType
from unittest.mock import Mock

import pyarrow.parquet
import pytest
import torch
from torch._inductor import config as inductor
from transformers import LlamaConfig, PreTrainedConfig

import grpo
from lib import InputError, setup
from lib.cli.flags import check_flags, parse_flags
from lib.model import config_of
from lib.rollout import check_capabilities, engine_class, vllm_refuses
from lib.rollout.hf_engine import HFEngine
from lib.rollout.vllm_engine import VLLMEngine
from planner.estimate import memory_of
from servers.engine import ServerEngine
from tests.common import ROOT, SMALL, TOY_MODEL, environment, fork, metrics, ran, skip_without_vllm

TABLE = '''
"""Answers from a table."""

import math

from lib.rollout import Generated, RolloutEngine, add_responses

ANSWERS = {"12": 0.75, "7": 0.25}


class Table(RolloutEngine):
    takes_weights = False

    def __init__(self, model, tokenizer, **settings):
        self.pad_token_id, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        encode = lambda text: [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        self.answers = [(encode(text), math.log(p)) for text, p in ANSWERS.items()]

    def generate(self, prompts, sampling, seeds):
        rows = []
        for seed in seeds:
            ids, log_p = self.answers[seed % 4 == 0]
            rows.append(Generated(ids, [log_p, *[0.0] * (len(ids) - 1)], "stop"))
        return add_responses(prompts, rows, self.pad_token_id)


def likes_12(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == "12")
'''


@pytest.fixture
def table(tmp_path):
    (tmp_path / "table.py").write_text(TABLE)
    return f"{tmp_path}/table.py:Table"


def test_an_engine_in_a_file_of_its_own_trains(table, tmp_path):
    """A table of answers: what is trained and saved are its tokens, with the log-probs that it gives."""
    flags = ["--rollout-engine", table, "--reward", f"{tmp_path}/table.py:likes_12", "--save-rollouts", "all"]
    ran(fork("grpo", tmp_path, *flags, "--total-steps", "1", "--run-name", "run", *SMALL))
    [file] = (tmp_path / "run/rollouts").glob("*.parquet")
    rows = pyarrow.parquet.read_table(file, columns=["response", "rollout_log_probs"]).to_pylist()
    found = {(row["response"], round(math.exp(sum(row["rollout_log_probs"])), 6)) for row in rows}
    assert found == {("12<|im_end|>", 0.75), ("7<|im_end|>", 0.25)}
    [step] = metrics(tmp_path / "run")
    assert step["actor/grad_norm"] > 0 and "rollout/canary_logp_diff" not in step


ROUNDED = '''
"""The hf engine with a copy of the weights, rounded as FP8 rounds them."""

import torch

from lib.model import load_model
from lib.rollout import HFEngine
from lib.rollout.weight_sync import CheckedStream


class Rounded(HFEngine):
    shares_weights = False

    def __init__(self, model, tokenizer, *, dtype, **settings):
        super().__init__(load_model(model.name_or_path, dtype=dtype), tokenizer)
        self.dtype = dtype

    def load_weights(self, model, version):
        stream = CheckedStream(model, self.dtype)
        rounded = {name: w.to(torch.float8_e4m3fn).to(w) for name, w in stream}
        self.model.load_state_dict(rounded, strict=False)
        self.version, self.checksum = version, stream.checksum
'''


@pytest.mark.parametrize(
    ("engine", "limit", "where"),
    [("table.py:Table", "0.01", "in step 1"), ("rounded.py:Rounded", "1e-6", "on the probe after step 0")],
)
def test_max_mismatch_stops_a_run_whose_engine_differs(table, tmp_path, engine, limit, where):
    """The table has no probabilities of the policy; the other's weights are rounded. Both by one line, and nothing of
    the step is saved."""
    (tmp_path / "rounded.py").write_text(ROUNDED)
    flags = ["--rollout-engine", f"{tmp_path}/{engine}", "--max-mismatch", limit, "--save-every", "1"]
    done = fork("grpo", tmp_path, *flags, "--total-steps", "2", "--run-name", "run", *SMALL)
    [line] = [line for line in done.stderr.splitlines() if "--max-mismatch" in line]
    assert done.returncode and "Traceback" not in done.stderr
    said = rf"--max-mismatch {float(limit):g}: engine and trainer differ by k3 = \S+ nats {where}: "
    assert re.match(rf"(error: )?{said}", line)
    assert len(metrics(tmp_path / "run")) == (where == "in step 1") and not (tmp_path / "run/checkpoints").exists()


FP8 = [  # quantization, flags, what is said
    ("awq", "", "vLLM quantizes the weights of each sync itself only as FP8"),
    ("fp8", "", "on a CPU vLLM has kernels for fp8_per_channel only"),
    ("fp8_per_channel", "", "vLLM quantizes 16-bit weights: set --compute-dtype bfloat16"),
    ("fp8_per_channel", "--compute-dtype bfloat16", "set --rollout-correction.level token"),
    ("fp8_per_channel", "--compute-dtype bfloat16 --rollout-correction.level token", ""),
    ("fp8_per_channel", "--compute-dtype bfloat16 --old-log-probs rollout", ""),
]


@pytest.mark.parametrize(("quantization", "flags", "why"), FP8)
def test_fp8_rollouts_need_a_correction(quantization, flags, why):
    skip_without_vllm()
    kwargs = f'{{"quantization": "{quantization}"}}'
    args = parse_flags(grpo.Args, ["--rollout-engine", "vllm", "--vllm-kwargs", kwargs, *flags.split()])
    assert args.rollout.mismatch_limit == 0.1
    said = re.escape(f"--vllm-kwargs {kwargs}: ") + ".*" + re.escape(why)
    with pytest.raises(InputError, match=said) if why else nullcontext():
        setup.check(args, torch.device("cpu"))


def test_batch_invariance_acts_on_gpus_and_is_refused_on_cpus(monkeypatch):
    """vLLM 0.32 reads the variable in its GPU worker and in layers for GPUs only."""
    rollout = parse_flags(grpo.Args, ["--rollout-engine", "vllm", "--vllm-kwargs", '{"batch_invariant": true}']).rollout
    assert rollout.batch_invariant and rollout.engine_args == {}
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with pytest.raises(InputError, match=r"--vllm-kwargs batch_invariant: vLLM has .* for GPUs from"):
        setup.use_batch_invariant_kernels(torch.device("cpu"))
    assert "VLLM_BATCH_INVARIANT" not in os.environ
    monkeypatch.setattr(setup.ranks, "has_flash_attention", lambda device, dtype: True)
    monkeypatch.setattr(setup.needs, "has_flash_attention", lambda device, dtype: True)
    with inductor.patch(batch_invariant=False):  # monkeypatch would hide the setting from later tests
        setup.use_batch_invariant_kernels(torch.device("meta"))
        assert os.environ.pop("VLLM_BATCH_INVARIANT") == "1" and inductor.batch_invariant


ASYNC = "--rollout-engine http://127.0.0.1:1 --async-level 1"
LORA = "--rollout-engine vllm --lora-rank 4 --compute-dtype"
BY_TOKEN = {"level": "token", "bounds": (0, 2)}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{LORA} bfloat16", BY_TOKEN),
        (f"{LORA} float32", {}),
        (f"{LORA} bfloat16 --loss decoupled", {}),  # this loss has the weight already
        (ASYNC, BY_TOKEN),
        (f"{ASYNC} --loss decoupled", {}),
        (f"{ASYNC} --rollout-correction.level measure", {"level": None}),
        (f"{ASYNC} --rollout-correction.level measure --loss decoupled", {"level": None}),
    ],
)
def test_the_importance_weight_is_in_the_gradient_once(flags, expected):
    if "vllm" in flags:
        skip_without_vllm()
    assert setup.check(parse_flags(grpo.Args, flags.split()), torch.device("cpu")).correction == expected


NO_ENGINE = {  # why: the file
    "must be a class that inherits lib.rollout.RolloutEngine": "def Table(): ...",
    "the class has no method load_weights": TABLE.replace("takes_weights = False", ""),
    "no method session": TABLE.replace("takes_weights = False", "takes_weights = False; in_process = True"),
    "the class has no method generate": TABLE.replace("def generate", "def generates"),
    "has no 'Table'": TABLE.replace("class Table", "class Other"),
    "cannot be imported: ModuleNotFoundError": "import absent_package",
}


def test_an_engine_that_cannot_work_is_named_before_a_model_loads(tmp_path):
    for number, (why, text) in enumerate(NO_ENGINE.items()):
        (tmp_path / f"table{number}.py").write_text(text)
        wrong = f"{tmp_path}/table{number}.py:Table"
        with pytest.raises(InputError, match=re.escape("--rollout-engine " + wrong) + ".*" + re.escape(why)):
            engine_class(wrong)
    with pytest.raises(InputError, match="give an existing file"):
        engine_class(f"{tmp_path}/absent.py:Table")


def test_a_run_asks_for_what_the_engine_can_do(table):
    check_capabilities(table, images=False, episodes=False)
    wanted = {(True, False, False): "it takes no images", (False, True, False): "--multi-turn and --agent need"}
    wanted[False, False, True] = "it does not return the experts"
    for what, why in wanted.items():
        with pytest.raises(InputError, match=why):
            check_capabilities(table, *what)
        for name in ("hf", "vllm", "http://127.0.0.1:1,http://127.0.0.1:2"):
            check_capabilities(name, *what)
    assert [engine_class(name) for name in ("hf", "vllm", "http://x")] == [HFEngine, VLLMEngine, ServerEngine]


# ---- auto ----------------------------------------------------------------------------------------
CONFIGS = [
    (config_of(TOY_MODEL, "--model", False), "cpu", ""),
    (LlamaConfig(), "cpu", ""),  # as of a .gguf file: it names no architecture
    (PreTrainedConfig(), "cpu", "vLLM does not know PreTrainedConfig"),
    (LlamaConfig(architectures=["NewForCausalLM"]), "cpu", "vLLM does not know NewForCausalLM"),
    (LlamaConfig(quantization_config={"quant_method": "awq"}), "cpu", "the model's weights are quantized, "),
    (LlamaConfig(), "cuda", "the installed vLLM is for cpu, not for cuda"),
]


def test_what_vllm_cannot_sample_is_known_before_a_model_loads():
    """On the device of the vLLM that is installed here."""
    skip_without_vllm()
    for config, device, why in CONFIGS:
        found = vllm_refuses(config, device)
        assert found.startswith(why) and bool(found) == bool(why), (config, found)


@pytest.mark.parametrize("missing", [True, False], ids=["not installed", "of another CUDA"])
def test_auto_says_why_vllm_cannot_be_imported(missing, monkeypatch):
    module = ModuleType("vllm")
    module.__getattr__ = Mock(side_effect=OSError("libcudart.so.13: cannot open shared object file"))
    monkeypatch.setitem(sys.modules, "vllm", None if missing else module)
    args = parse_flags(grpo.Args, [])
    why = setup.choose_engine(args, torch.device("cuda"))
    assert args.rollout.engine == "hf" and why.startswith("because vLLM cannot be imported (")
    assert ("libcudart.so.13" in why) != missing


def chosen(flags, device="cuda", refused=""):
    """(args, why) after the choice. refused: what vLLM says of the model."""
    args = parse_flags(grpo.Args, flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.ranks, "vllm_refuses", lambda config, device: refused)
        why = setup.choose_engine(args, torch.device(device))
    check_flags(args)
    return args, why


def test_on_a_gpu_auto_is_vllm_with_its_share_of_the_memory():
    args, why = chosen(["--gpu-memory-utilization", "0.5", "--lora-rank", "4"])
    assert (args.rollout.rollout_engine, args.rollout.engine, why) == ("auto", "vllm", "which knows the model")
    assert args.rollout.starts_vllm and args.no_effect == ()
    assert memory_of(args, 1, 2**36)["rollout"]["vLLM"] == 2**35
    effective = setup.check(args, torch.device("cpu")).effective
    assert (effective["rollout_engine"], effective["gpu_memory_utilization"]) == ("vllm", 0.5)
    args, why = chosen([], refused="vLLM does not know NewForCausalLM")
    assert (args.rollout.engine, why) == ("hf", "because vLLM does not know NewForCausalLM")
    assert "vLLM" not in memory_of(args, 1, 2**36)["rollout"]


OF_VLLM = {
    '--vllm-kwargs {"seed":1}': "--vllm-kwargs has no effect without --rollout-engine vllm: drop it",
    "--rollout-tensor-parallel-size 2": "splits a vLLM engine: it needs --rollout-engine vllm",
    "--tensor-parallel-size 2": "--tensor-parallel-size 2 does not work with --rollout-engine hf",
}


@pytest.mark.parametrize("flags", OF_VLLM)
def test_flags_of_vllm_are_refused_where_auto_is_hf(flags, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    chosen(flags.split())  # where it is vllm, they are taken
    with pytest.raises(InputError, match=re.escape(OF_VLLM[flags])):
        chosen(flags.split(), "cpu")


def test_without_a_gpu_auto_is_hf_unless_a_dry_run_is_about_gpus():
    for flags, engine, why in (
        ([], "hf", "because this machine has no GPU"),
        (["--rollout-gpus", "2", "--dry-run", "4"], "vllm", "which --rollout-gpus needs"),
        (["--dry-run", "8"], "vllm", "if the GPUs have it and it knows the model"),
    ):
        args, said = chosen(flags, "cpu")
        assert (args.rollout.engine, said) == (engine, why)


@pytest.mark.parametrize(("recorded", "engine"), [("vllm", "vllm"), ("http://a:1", "hf"), (None, "hf")])
def test_a_replay_has_the_engine_of_the_recorded_run(recorded, engine, tmp_path):
    """It decides whether LoRA in 16 bits has a correction: without one, metrics would not be those of the run."""
    effective = {"effective": {"rollout_engine": recorded}} if recorded else {}
    (tmp_path / "config.json").write_text(json.dumps(effective))
    flags = ["--replay", str(tmp_path), "--lora-rank", "4", "--compute-dtype", "bfloat16"]
    for device in ("cpu", "cuda"):
        args, why = chosen(flags, device, refused="nobody asks")
        assert (args.rollout.engine, why) == (engine, "as recorded")
        assert bool(setup.check(args, torch.device("cpu")).correction) == (engine == "vllm")


IMPORTS = """
import sys
import grpo
from lib import setup
from lib.cli.flags import parse_flags
setup.start(parse_flags(grpo.Args, sys.argv[1:]))
print("vllm" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "said"), [("", "hf, because "), ("--dry-run 2", "vllm, if ")])
def test_auto_imports_no_vllm_on_a_cpu(flags, said):
    command = [sys.executable, "-c", IMPORTS, *flags.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith(f"--rollout-engine auto: {said}") and done.stdout.endswith("\nFalse\n"), done.stderr
    assert ("vLLM   " in done.stdout) == ("--dry-run" in flags)
