"""Bad flags: one line each, before torch is imported, and last where a launcher prints a report of its own."""

import importlib.util
import json
import subprocess

import pytest

from lib import InputError
from lib.args import check_engine, check_model_path
from tests.common import ACCELERATE, PYTHON, ROOT, TORCHRUN, environment, launch

# of a script and lists of flags: [exit code, stderr, whether torch was imported] of each
DRIVER = """
import contextlib, io, json, runpy, sys
script, cases = sys.argv[1], json.loads(sys.argv[2])
answers = []
for flags in cases:
    sys.argv, said = [script, *flags], io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        answers.append([stop.code, said.getvalue(), "torch" in sys.modules])
print(json.dumps(answers))
"""
BAD_FLAGS = {  # what the message says, by flags
    "invalid choice": ["--loss-agg-mode", "mean"],
    "--max-grad-norm": ["--max-grad-nom", "1"],
    "--group-size 0: must be at least 1": ["--group-size", "0"],
    "10 / (1 x 4) = 2.5": ["--prompts-per-step", "10", "--num-mini-batches", "4"],
    "30 < 32 + 16": ["--micro-batch-tokens", "30"],
    "--loss-kwargs {x: not JSON": ["--loss-kwargs", "{x"],
    "--multi-turn [1]: give a JSON object": ["--multi-turn", "[1]"],
    "--temperature 0.0": ["--temperature", "0"],
    "at --val-temperature 0": ["--val-samples", "4"],
    "--seed -1: must be in 0..4294967295": ["--seed", "-1"],
    "--seed 4294967296: must be in 0..4294967295": ["--seed", "4294967296"],
    "must be hf, vllm or the URL": ["--rollout-engine", "sglang"],
    "--model ./absent: no such folder": ["--model", "./absent"],
    "--reward-model ./absent: no such folder": ["--reward-model", "./absent"],
    "absent.jsonl: no such file": ["--train-files", "absent.jsonl"],
    "--reward absent.py:score: give an existing file": ["--reward", "absent.py:score"],
    "--val-reward README.md: give an existing file": ["--val-reward", "README.md"],
    "--dataset-class absent.py:Mine: give an existing file": ["--dataset-class", "absent.py:Mine"],
    "1 numbers for the 2 scorers": ["--reward", "data_source", "data_source", "--reward-weights", "1"],
    "--reward without a scorer": ["--reward"],
    "--kl-target steers": ["--kl-target", "0.1", "--kl-coef", "0"],
    "--kl-horizon 1": ["--kl-target", "0.1", "--kl-placement", "reward", "--kl-coef", "0.1", "--kl-horizon", "1"],
    "drop it or --rollout-correction": ["--old-log-probs", "rollout", "--rollout-correction", '{"level": "token"}'],
    "--engine-ranks 2 splits a vLLM": ["--engine-ranks", "2", "--dry-run", "2"],
    "--engine-ranks 2: the number": ["--rollout-engine", "vllm", "--engine-ranks", "2"],
    "--async-level -1: must be at least 0": ["--async-level", "-1"],
    "top_entropy": ["--old-log-probs", "rollout", "--token-masks", '{"top_entropy": {}}'],
    "--tensor-parallel 2: must divide": ["--tensor-parallel", "2"],
    "--resume auto needs the --run-name": ["--resume", "auto"],
}
AHEAD = ["--async-level", "1", "--rollout-engine", "http://127.0.0.1:1"]
OWN_BAD_FLAGS = {
    "grpo": {
        "invalid choice 'gae'": ["--adv-estimator", "gae"],
        "invalid choice 'remax'": ["--adv-estimator", "remax"],
        "go together": ["--adv-estimator", "gdpo"],
        "--kl-placement loss": ["--adv-estimator", "gdpo", "--reward-keys", "x", "--kl-placement", "reward"],
        "--async-level 1 needs --rollout-engine http": ["--async-level", "1"],
        "do not run ahead": [*AHEAD, "--multi-turn", '{"max_turns": 2}'],
    },
    "ppo": {
        "--critic-model ./absent: no such folder": ["--critic-model", "./absent"],
        "drop one": ["--lam-policy", "1", "--length-adaptive-alpha", "1"],
    },
    "remax": {},
    "dapo": {
        "go together": ["--reward-keys", "right"],
        "--zero-variance refill compares": ["--group-size", "1"],
        "--max-gen-batches 0": ["--max-gen-batches", "0"],
        "--overlong-buffer 17: must be in 0..16": ["--overlong-buffer", "17"],
        "cannot run ahead": AHEAD,
    },
}


@pytest.mark.parametrize("script", OWN_BAD_FLAGS)
def test_a_bad_flag_is_one_line_before_torch_is_imported(script):
    cases = BAD_FLAGS | OWN_BAD_FLAGS[script]
    command = [*PYTHON, "-c", DRIVER, str(ROOT / f"{script}.py"), json.dumps(list(cases.values()))]
    done = subprocess.run(command, env=environment() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for message, (code, said, torch_imported) in zip(cases, json.loads(done.stdout)):
        assert code == 2 and message in said and not torch_imported, (message, said)
        assert "argument" in said.lower() or "option" in said or said.splitlines() == [said.strip()]


def test_the_help_needs_no_torch():
    command = [*PYTHON, "-c", DRIVER, str(ROOT / "grpo.py"), json.dumps([["--help"]])]
    done = subprocess.run(command, env=environment() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    [[code, said, torch_imported]] = json.loads(done.stdout)
    assert code == 0 and "--max-grad-norm" in said and not torch_imported


@pytest.mark.parametrize(
    ("launcher", "flags", "message"),
    [
        (TORCHRUN, ["--group-size", "0"], "--group-size 0: must be at least 1"),
        (TORCHRUN, ["--max-grad-nom", "1"], "--max-grad-norm"),
        (ACCELERATE, ["--adv-kwargs", '{"gama": 1}'], "gama"),  # found by torch's side
    ],
    ids=["value", "typo", "accelerate"],
)
def test_a_launchers_report_ends_with_the_reason(tmp_path, launcher, flags, message):
    done = launch("grpo", tmp_path, *flags, launcher=launcher)
    assert done.returncode != 0
    at_once, report = done.stderr.split("Traceback", 1)  # the launcher's
    assert message in at_once
    assert message in report[report.rindex("traceback : ") :]
    assert "To enable traceback see" not in done.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "absent", "no such folder"),
        (lambda p: p / "absent.gguf", "no such file"),
        (lambda p: p, "no config.json"),
        (lambda p: (p / "config.json").write_text("{}") and p, "no weights"),
    ],
)
def test_a_path_without_a_model_is_one_clear_line(tmp_path, make, message):
    with pytest.raises(InputError, match=message) as error:
        check_model_path(str(make(tmp_path)))
    assert "--model" in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_engine():
    for name in ("hf", "vllm" if importlib.util.find_spec("vllm") else "hf", "http://a:1", "http://a:1,https://b:2"):
        check_engine(name, 1, 2)
    for name in ("sglang", "", "http://a:1,b:2"):
        with pytest.raises(InputError, match="http://host:port"):
            check_engine(name, 1, 2)
    for name, ranks, message in (("vllm", 3, "must be a multiple"), ("hf", 2, "splits a vLLM engine")):
        with pytest.raises(InputError, match=message):
            check_engine(name, ranks, 4)
