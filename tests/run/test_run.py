"""What a run is: its folder, lock, flags and history; where a resume, a rewind or a fork goes on; how it ends."""

import contextlib
import fcntl
import functools
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

import grpo
import lib.run.lock as lock_module
import lib.run.opening as opening_module
import lib.run.run as run_module
from lib import InputError, setup
from lib.args import DataArgs, RunArgs, ValidationArgs
from lib.cli.flags import OnResume, changed_flags, marked
from lib.distributed import World
from lib.run import Run, open_run
from lib.run.checkpoint import newest_complete
from lib.run.lock import take_lock
from lib.run.opening import default_name, typed_command, write_start
from lib.run.resume import cut_logs, find_checkpoint
from lib.run.run_config import code_changes, code_files, compare, describe_run, read_json
from tests.common import (
    ACCELERATE,
    ONE_NODE,
    PYTHON,
    ROOT,
    SMALL,
    TORCHRUN,
    TOY_MODEL,
    command,
    environment,
    fork,
    full_disk,
    launch,
    metrics,
    one_line,
    ran,
    rollouts,
    wait_until,
    with_slow,
)

FORK, WORLD = multiprocessing.get_context("fork"), World(0, 1, torch.device("cpu"))


def few_rows(folder: Path) -> str:
    (folder / "few.jsonl").write_text("".join((ROOT / "data/toy/val.jsonl").open().readlines()[:16]))
    return str(folder / "few.jsonl")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(folder, flags) of `run`: 4 steps with a checkpoint each, validated in every second."""
    folder = tmp_path_factory.mktemp("source")
    args = [*SMALL, "--val-every", "2", "--val-files", few_rows(folder)]
    args += ["--save-every", "1", "--keep-checkpoints", "0"]
    done = ran(fork("grpo", folder, *args, "--run-name", "run", "--total-steps", "4", "--export-model"))
    (folder / "printed.txt").write_text(done.stdout + done.stderr)
    return folder, args


@pytest.fixture
def copied(source, tmp_path):
    shutil.copytree(source[0] / "run", tmp_path / "run")
    return tmp_path, source[1]


def error_of(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    return line


def steps_of(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted((run / "checkpoints").iterdir())]


def times(folder: Path) -> dict[Path, int]:
    """Of all files but the lock, which every start opens."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def history(run: Path) -> list[dict]:
    return json.loads((run / "config.json").read_text())["history"]


# ---- on in a run, on from a checkpoint of its own or another's -------------------------------------
def test_a_run_goes_on_from_its_newest_checkpoint_only(source, copied):
    """From an earlier one a new run does. The logs of steps that run again are removed."""
    (folder, args), run = copied, copied[0] / "run"
    before, target = times(folder), str(run / "checkpoints/step_000002")
    refused = error_of(fork("grpo", folder, *args, "--run-name", "run", "--resume", target))
    assert f"{run} has gone on to step_000004: --resume auto continues from there, another --run-name" in refused
    assert times(folder) == before

    shutil.rmtree(run / "checkpoints/step_000004")  # as if the run had been killed in step 4
    done = ran(fork("grpo", folder, *args, "--run-name", "run", "--resume", "auto", "--total-steps", "4"))
    said, cut = done.stdout.index("resumed from step_000003\n"), done.stdout.index("removed what came after step 3: ")
    assert said < cut and "step 3: 2 rows of metrics.jsonl, 16 rows of samples.jsonl, 1 file of rollouts" in done.stdout
    whole = metrics(source[0] / "run")
    assert [row["step"] for row in whole] == [row["step"] for row in metrics(run)] == [1, 2, 2, 3, 4, 4]
    assert metrics(run)[:5] == whole[:5] and steps_of(run) == [1, 2, 3, 4]
    assert {step for step, *_ in rollouts(run)} == {1, 2, 3, 4}
    assert [start["from"] for start in history(run)] == [None, "step_000003"]


def _killed_in_cut_logs(run: Path, moment: int) -> None:
    """At the n-th of the operations that others can see, with kill -9."""
    left = iter(range(moment))

    def counted(operation):
        return lambda *args: operation(*args) if next(left, None) is not None else os.kill(os.getpid(), signal.SIGKILL)

    Path.unlink, Path.replace = counted(Path.unlink), counted(Path.replace)
    cut_logs(run, 1)


def test_a_cut_that_is_killed_is_finished_by_the_next_start(source, tmp_path, capsys):
    """And with it goes the line in which the run was killed. It unlinks or replaces five files."""
    for moment in range(6):
        run = tmp_path / str(moment)
        shutil.copytree(source[0] / "run", run)
        for name in ("metrics.jsonl", "samples.jsonl"):
            with (run / name).open("a") as file:
                file.write('{"step": 3, "x": 0.')
        process = FORK.Process(target=_killed_in_cut_logs, args=(run, moment))
        process.start()
        process.join()
        assert process.exitcode == (-signal.SIGKILL if moment < 5 else 0)
        assert steps_of(run) == [1, 2, 3, 4]
        cut_logs(run, 1)
        assert metrics(run) == metrics(source[0] / "run")[:1] and not (run / "samples.jsonl").read_text()
        assert (run / "samples.jsonl").stat().st_mode & 0o077 == 0
        assert {step for step, *_ in rollouts(run)} == {1}
        capsys.readouterr()
        cut_logs(run, 1)
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_config_that_no_run_has_written_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with one_line(r"config\.json: not a JSON object"):
        read_json(tmp_path / "config.json")


def test_another_runs_checkpoint_starts_a_new_run_and_overwrites_none(source, copied):
    folder, args = copied
    origin = source[0] / "run/checkpoints/step_000002"
    before = times(folder)
    refused = error_of(fork("grpo", folder, *args, "--run-name", "run", "--resume", str(origin)))
    assert f"{folder}/run already contains a run: --resume auto continues it" in refused and times(folder) == before

    args = [*args, "--run-name", "fork", "--total-steps", "3"]
    done = ran(fork("grpo", folder, *args, "--resume", str(origin), "--save-every", "0"))
    assert f"resumed from {origin}\n" in done.stdout
    [row] = [row for row in metrics(folder / "fork") if "reward/mean" in row]
    assert row == metrics(source[0] / "run")[3]
    assert [start["from"] for start in history(folder / "fork")] == [str(origin)]
    # without a checkpoint of its own it goes on from there again, not from the start model
    done = ran(fork("grpo", folder, *args, "--resume", "auto"))
    assert f"resumed from {origin}\n" in done.stdout and "2 rows of metrics.jsonl" in done.stdout
    assert [row] == [row for row in metrics(folder / "fork") if "reward/mean" in row]
    assert steps_of(folder / "fork") == [3]


# ---- checkpoints that were moved or renamed ------------------------------------------------------


def test_a_checkpoint_that_is_a_link_to_another_disk_is_the_runs_own(source, copied):
    folder, args = copied
    link, disk = folder / "run/checkpoints/step_000004", folder / "disk/kept"
    disk.parent.mkdir()
    link.rename(disk)
    link.symlink_to("../../disk/kept")
    for resume in ("auto", str(link), str(disk)):
        assert find_checkpoint(resume, folder / "run") == link
    (folder / "run/checkpoints/step_000005").symlink_to("disk_that_is_gone")
    assert find_checkpoint("auto", folder / "run") == link
    done = ran(fork("grpo", folder, *args, "--run-name", "run", "--resume", "auto", "--total-steps", "5"))
    assert "resumed from step_000004\n" in done.stdout and "removed" not in done.stdout
    whole = metrics(source[0] / "run")
    assert metrics(folder / "run")[: len(whole)] == whole and steps_of(folder / "run") == [1, 2, 3, 4, 5]


def test_a_checkpoint_that_cannot_be_loaded_is_refused_before_anything_is_removed(copied):
    """By its name, before the model loads; by what it holds, where only the script knows."""
    folder, args = copied
    run, args = folder / "run", [*args, "--run-name", "run", "--total-steps", "5"]

    def state() -> dict:
        """Less the record of each start and the lock."""
        return {path: path.read_bytes() for path in times(run) if "starts" not in path.parts}

    shutil.move(run / "checkpoints/step_000004", folder / "kept")
    before = state()
    consent = ["script", "num_mini_batches", "kl_coef", "kl_estimator", "kl_placement"]
    refused = error_of(fork("ppo", folder, *args, "--resume", "auto", "--resume-override", *consent))
    assert "step_000003: holds {'models': ['actor']" in refused and state() == before

    shutil.move(folder / "kept", run / "checkpoints/step_000099")
    before = state()
    for resume in ("auto", str(run / "checkpoints/step_000099")):
        refused = error_of(fork("grpo", folder, *args, "--resume", resume))
        assert "step_000099 holds step 4: rename it to step_000004, or move it out of the run" in refused
    assert state() == before


# ---- flags ---------------------------------------------------------------------------------------
def test_what_does_not_change_results_may_change(source, copied):
    """Memory and speed; the model and the data at another place. 1e-3: sums in another order."""
    folder, args = copied
    (folder / "run/checkpoints/step_000004").rename(folder / "step_000004")
    shutil.copytree(TOY_MODEL, folder / "moved")
    shutil.copy(ROOT / "data/toy/val.jsonl", folder / "moved.jsonl")
    changed = ["--micro-batch-tokens", "100", "--gradient-checkpointing", "--reduce-each-micro-batch", "--cpu-offload"]
    changed += ["actor", "activations", "--no-share-prompts", "--model", str(folder / "moved")]
    changed += ["--train-files", str(folder / "moved.jsonl"), "--loader-workers", "1", "--stage-timeout", "600"]
    done = ran(fork("grpo", folder, *args, *changed, "--run-name", "run", "--resume", "auto", "--total-steps", "4"))
    assert "resumed from step_000003\n" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("changed: ")]
    assert "--micro-batch-tokens was 16384, is 100" in line and "--model" not in line and "--train-files" not in line
    ours, theirs = (metrics(run)[4] for run in (folder / "run", source[0] / "run"))
    for key in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "training/epoch"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
    assert history(folder / "run")[-1]["changed"]["micro_batch_tokens"] == [16384, 100]


def test_what_changes_results_needs_consent_which_is_recorded(copied):
    folder, args = copied
    args = [*args, "--run-name", "run", "--resume", "auto", "--total-steps", "5"]
    other = ["--lr", "1e-5", "--kl-coef", "0.1", "--seed", "3", "--max-train-samples", "200"]
    shutil.copytree(TOY_MODEL, folder / "other")
    with (folder / "other/chat_template.jinja").open("a") as template:
        template.write(" ")
    before = times(folder)
    refused = error_of(fork("grpo", folder, *args, *other))
    assert "--lr was 0.0003, is 1e-05" in refused and "--resume-override seed max_train_samples lr kl_coef" in refused
    for flags, message in {
        ("--resume-override", "lrr"): "--resume-override lrr: no flag of grpo.py",
        ("--lora-rank", "4", "--resume-override", "lora_rank"): "--lora-rank was 0, is 4: the checkpoint holds other",
        ("--model", str(folder / "other")): "--model was",
    }.items():
        assert message in error_of(fork("grpo", folder, *args, *flags)), flags
    assert times(folder) == before

    consent = ["--resume-override", "lr", "kl-coef", "seed", "max-train-samples"]
    done = ran(fork("grpo", folder, *args, *other, *consent))
    assert "resumed from step_000004, with training data from the first row\n" in done.stdout
    [row] = [row for row in metrics(folder / "run") if row["step"] == 5 and "reward/mean" in row]
    assert row["actor/lr"] == 1e-5 and row["training/epoch"] == 8 / 200
    changed = history(folder / "run")[-1]["changed"]
    assert [changed[flag] for flag in ("seed", "lr", "kl_coef")] == [[1, 3], [0.0003, 1e-5], [0.0, 0.1]]
    # a checkpoint knows the flags of its time: consent is not asked for again, but for an older one
    ran(fork("grpo", folder, *args, *other))
    older = ["--run-name", "fork", "--resume", str(folder / "run/checkpoints/step_000004")]
    again = fork("grpo", folder, *args, *other, *older)
    assert "--lr was 0.0003, is 1e-05" in error_of(again)


def test_another_script_needs_consent_and_flags_that_come_or_go_are_reported(copied):
    folder, args = copied
    text = (ROOT / "grpo.py").read_text()
    (folder / "mine.py").write_text(text.replace("kl_horizon", "parts"))
    args = [*args, "--run-name", "run", "--resume", "auto", "--total-steps", "5", "--model", TOY_MODEL]
    mine = str(folder / "mine")
    assert "script was grpo.py, is mine.py" in error_of(fork(mine, folder, *args))
    done = ran(fork(mine, folder, *args, "--resume-override", "script"))
    said = "changed: script was grpo.py, is mine.py", "not known to the checkpoint: --parts 10000"
    for line in (*said, "not known to mine.py: --kl-horizon 10000"):
        assert f"\n{line}" in done.stdout
    assert json.loads((folder / "run/config.json").read_text())["script"] == "mine.py"
    changes = (folder / "run/starts/2/changes.patch").read_text()
    assert changes.startswith("--- a/mine.py\n+++ b/mine.py\n@@") and "\n-    kl_horizon: Annotated" in changes
    assert f"{folder}/run/checkpoints/step_000004:\n{changes[:200]}" in done.stdout


FLAG_OF = {"mine": "script", "reward": "reward", "rows": "dataset_class"}
FLAG_OF |= dict.fromkeys(("tool", "user", "documents"), "multi_turn")


@pytest.mark.parametrize("changed", FLAG_OF)
def test_code_that_changed_in_its_place_needs_consent(tmp_path, changed, monkeypatch):
    """The script, and what flags name: the diff is known, without secrets."""
    monkeypatch.setenv("MY_API_KEY", "correct-horse")
    files = {name: tmp_path / f"{name}.py" for name in FLAG_OF}
    for name, file in files.items():
        file.write_text(f"{name} = 1\n")
    args = grpo.Args(data=DataArgs(dataset_class=f"{files['rows']}:Rows"))
    args.reward.reward = (f"{files['reward']}:one", f"{files['reward']}:two")
    args.multi_turn.tools = ("calculator", f"{files['tool']}:add", f"search:{files['documents']}")
    args.multi_turn.interaction = f"gym:{files['user']}:User"
    checkpoint = tmp_path / "run/checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    before, code = describe_run(args, files["mine"]) | {"start": 1}, code_files(args, files["mine"])
    (checkpoint / "config.json").write_text(json.dumps(before))
    write_start(tmp_path / "run/starts/1", code, "", {})
    assert code_changes(checkpoint, code) == "" and compare(checkpoint, before, args, set()) == {}

    files[changed].write_text(f"{changed} = 2  # correct-horse\n")
    now, diff = describe_run(args, files["mine"]), code_changes(checkpoint, code)
    assert f"\n-{changed} = 1\n+{changed} = 2  # ***\n" in diff and diff.count("@@") == 2
    flag = FLAG_OF[changed]
    with pytest.raises(InputError, match=f"holds (other|something else).*--resume-override {flag}"):
        compare(checkpoint, now, args, set())
    assert list(compare(checkpoint, now, args, {flag})) == [flag]


def test_a_resume_compares_the_engines_that_auto_has_become(tmp_path):
    """Of the checkpoint, too, and one of a time before auto has none in `effective`."""

    def config(engine: str, became: str = "", **effective) -> dict:
        args.rollout.rollout_engine, args.rollout.auto_engine = engine, became
        effective = {"rollout_engine": args.rollout.engine} | effective
        return describe_run(args, Path(grpo.__file__)) | {"effective": effective}

    def compared(before: dict, now: dict, *overrides: str) -> dict:
        (tmp_path / "config.json").write_text(json.dumps(before))
        return compare(tmp_path, now, args, set(overrides))

    args = grpo.Args()
    on_vllm, on_hf = config("auto", "vllm"), [config("auto", "hf"), config("hf")]
    assert on_vllm["rollout_engine"] == "auto"
    for now in on_vllm, config("vllm"), config("http://a:8000"):
        assert compared(on_vllm, now) == {}
    before_auto = config("hf") | {"effective": {}}
    for now in on_hf:
        assert compared(before_auto, now) == {}
        with one_line("--rollout-engine was vllm, is hf. Undo it"):
            compared(on_vllm, now)
        assert compared(on_vllm, now, "rollout_engine") == {"rollout_engine": ["vllm", "hf"]}
    with one_line("--rollout-engine was hf, is vllm. Undo it"):
        compared(before_auto, on_vllm)
    on_cpu, on_gpu = (config("hf", micro_batch_tokens=n) for n in (16384, 32768))  # which may change
    assert compared(on_cpu, on_cpu) == {} and compared(on_cpu, on_gpu) == {"micro_batch_tokens": [16384, 32768]}


@pytest.mark.parametrize("script", ["grpo", "ppo", "remax", "dapo"])
def test_the_table_of_what_may_change_is_that_of_the_code(script):
    """docs/checkpoints.md."""
    text = (ROOT / "docs/checkpoints.md").read_text().split("## Resume")[1].split("\n## ")[0]
    row = next(line for line in text.splitlines() if line.startswith("| may change"))
    flags = {word.strip("`-,").replace("-", "_") for word in row.split("|")[2].split()}
    assert flags == marked(importlib.import_module(script).Args(), OnResume.MAY_CHANGE)


# ---- what ran ------------------------------------------------------------------------------------
def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=me", "-c", "user.email=me@example.com", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def script(tmp_path) -> dict[str, Path]:
    """{name: path} of a script in a repository, whose starts git ignores."""
    (tmp_path / "mine.py").write_text("first = 1\n")
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text() + "starts\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(tmp_path, *words)
    return {"mine.py": tmp_path / "mine.py"}


def test_each_start_keeps_what_ran(script, tmp_path, monkeypatch):
    """Of a checkout of git also what differs from its commit; a key of the environment is redacted."""
    monkeypatch.setenv("MY_API_KEY", "correct-horse")
    flags = {"lr": [1.0, 1e-6], "x": ["correct-horse", ""]}
    write_start(tmp_path / "starts/1", script, "python mine.py --lr 1", flags)
    script["mine.py"].write_text("first = 2  # correct-horse\n")
    for number in range(3000):
        (tmp_path / f"{number:0100}").touch()
    (tmp_path / ".venv-trl").mkdir()
    (tmp_path / ".venv-trl/new").touch()
    (tmp_path / ".venv").symlink_to(".venv-trl")
    write_start(tmp_path / "starts/2", script, "python mine.py", {})
    first, second = (json.loads((tmp_path / f"starts/{n}/start.json").read_text()) for n in (1, 2))
    assert (tmp_path / "starts/1/mine.py").read_text() == "first = 1\n"
    assert first["command"] == "python mine.py --lr 1" and first["untracked"] == []
    assert first["flags"]["lr"] == [1.0, 1e-6] and "correct-horse" not in str(first)
    assert "CPU cores" in first["machine"]
    found = reversed([*importlib.metadata.distributions()])  # the first on the path counts
    installed = {package.metadata["Name"]: package.version for package in found}
    assert first["packages"] == installed and "torch" in installed
    assert second["commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert second["untracked"] == [f"{number:0100}" for number in range(50)]
    diff = tmp_path / "starts/2/diff.patch"
    assert "-first = 1" in diff.read_text() and "correct-horse" not in diff.read_text()
    assert diff.stat().st_mode & 0o077 == 0 and not (tmp_path / "starts/1/diff.patch").exists()


def test_a_start_without_git_and_one_whose_git_hangs(script, tmp_path, monkeypatch):
    shutil.rmtree(tmp_path / ".git")
    write_start(tmp_path / "starts/1", script, "", {})
    assert json.loads((tmp_path / "starts/1/start.json").read_text())["commit"] is None
    monkeypatch.setattr(opening_module, "GIT_S", 0.01)
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(opening_module, "_commit", lambda folder: "abc")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_start(tmp_path / "starts/2", script, "", {})
    assert "took longer" in (tmp_path / "starts/2/diff.patch").read_text()


def test_config_json_says_what_takes_effect(tmp_path, one_rank, capsys):
    """Of flags that are left to the run: here the correction of --async-level, which no flag names."""
    args = grpo.Args(run=RunArgs(run_name="run", output_dir=str(tmp_path), export_model=False))
    expected = {"rollout_engine": "hf", "compute_dtype": "float32", "attn_implementation": "packed_sdpa"}
    expected |= {"old_log_probs": "not needed", "sharding": "zero1", "rollout_correction": "none"}
    assert setup.check(args, WORLD.device).effective == expected
    args.rollout.async_level = 1
    ahead = setup.check(args, WORLD.device).effective
    correction = {"level": "token", "bounds": (0, 2)}
    assert ahead == expected | {"old_log_probs": "recompute", "rollout_correction": correction}
    open_run(args, one_rank, grpo.__file__, ahead).locks.close()
    saved = json.loads((tmp_path / "run/config.json").read_text())["effective"]
    assert saved["rollout_correction"] == {"level": "token", "bounds": [0, 2]} and saved["old_log_probs"] == "recompute"
    printed = capsys.readouterr().out
    assert "--old-log-probs recompute" in printed and "'level': 'token', 'bounds': (0, 2)}" in printed
    args.loss_agg_mode = "seq-mean-token-sum-norm"
    assert setup.check(args, WORLD.device).effective["loss_scale_factor"] == args.rollout.max_response_length


def test_flags_that_differ_from_their_defaults():
    """A script of one's own may have flags without a default."""

    @dataclass
    class Args(grpo.Args):
        teacher: str = field(kw_only=True)

    args = Args(teacher="t", clip_ratio_low=0.3)
    args.optimizer.lr, args.multi_turn.max_turns = 0.5, 2
    lr = Args(teacher="").optimizer.lr
    expected = {"teacher": ["t", ""], "lr": [0.5, lr], "clip_ratio_low": [0.3, 0.2], "multi_turn.max_turns": [2, 8]}
    assert changed_flags(args) == expected and changed_flags(args, lr=1e-6) == expected | {"lr": [0.5, 1e-6]}
    assert "lr" not in changed_flags(args, lr=0.5)


# ---- one writer ----------------------------------------------------------------------------------
def test_names_that_were_not_given_are_each_runs_own(monkeypatch):
    """A sweep starts several runs in the same second, on several hosts, all with the same seed."""
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-120000")
    names = {(random.seed(1), default_name("somewhere/grpo.py", 1))[1] for _ in range(100)}
    assert len(names) == 100 and all(name.startswith("grpo-s1-20260101-120000-") for name in names)


def in_fork(function, *args) -> multiprocessing.Process:
    process = FORK.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def _second_start(folder: Path) -> None:
    lock_module.PATIENCE_S = 0
    with contextlib.suppress(InputError):
        take_lock(folder)
        os._exit(3)


def test_a_second_start_at_the_same_moment_gets_neither_the_folder_nor_the_recording(tmp_path, one_rank, monkeypatch):
    """It comes while the first still looks at what there is."""
    run = RunArgs(output_dir=str(tmp_path), run_name="run", record=str(tmp_path / "kept"))
    find, seconds = opening_module.find_checkpoint, []

    def find_slowly(*given):
        seconds.extend(in_fork(_second_start, tmp_path / name) for name in ("run", "kept"))
        for second in seconds:
            second.join()
        return find(*given)

    monkeypatch.setattr(opening_module, "find_checkpoint", find_slowly)
    open_run(grpo.Args(run=run), one_rank, grpo.__file__).locks.close()
    assert [second.exitcode for second in seconds] == [0, 0]


def _hold(folder: Path, ready) -> None:
    with take_lock(folder):
        ready.set()
        time.sleep(1000)


def test_one_process_has_the_folder_until_it_ends_also_by_kill_9(tmp_path, monkeypatch):
    """A new start waits a while for the old process to end."""
    ready, folder = FORK.Event(), tmp_path / "run"
    holder = in_fork(_hold, folder, ready)
    ready.wait()
    with (
        monkeypatch.context() as patch,
        one_line(rf"in use by pid {holder.pid} on .* since 20.*: end that run first.*delete {folder}/.lock\)"),
    ):
        patch.setattr(lock_module, "PATIENCE_S", 0)
        take_lock(folder)
    threading.Timer(0.5, holder.kill).start()
    take_lock(folder).close()


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(95, "Operation not supported")))
    take_lock(tmp_path).close()
    assert "no file locks here (Operation not supported)" in capsys.readouterr().out


# ---- starts that fail, validation alone ----------------------------------------------------------
BREAKS = """
import os
from lib.data import RLHFDataset
class Breaks(RLHFDataset):
    taken = 0
    def __getitem__(self, i):
        Breaks.taken += 1
        if len(self) > 16 and Breaks.taken > {rows} and os.environ["RANK"] == "{rank}":
            raise RuntimeError("the data break off")
        return super().__getitem__(i)
"""


def breaks(folder: Path, rows: int, rank: int = 0) -> list[str]:
    """A data set that fails on a rank after so many rows; validation (16 rows) goes on."""
    (folder / "breaks.py").write_text(BREAKS.format(rows=rows, rank=rank))
    return ["--dataset-class", f"{folder / 'breaks.py'}:Breaks"]


def test_a_start_that_fails_leaves_the_name_free(source, tmp_path):
    """A crash before step 1, after step 0 was validated; a tracker without a login, before the model loads."""
    args = [*source[1], "--run-name", "run", "--total-steps", "1", "--save-every", "0"]
    done = fork("grpo", tmp_path, *args, *breaks(tmp_path, rows=0), "--val-before-train")
    assert done.returncode == 1 and "the data break off" in done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0]

    shutil.copytree(TOY_MODEL, tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"no weights")
    env = {"WANDB_MODE": "online", "WANDB_SILENT": "true", "HOME": str(tmp_path), "NETRC": "/dev/null"}
    run_grpo = f"runpy.run_path({str(ROOT / 'grpo.py')!r}, run_name='__main__')"
    (tmp_path / "online.py").write_text(f"import os, runpy\nos.environ |= {env}\n{run_grpo}\n")
    done = fork(str(tmp_path / "online"), tmp_path, *args, "--track", "wandb", "--model", str(tmp_path / "model"))
    assert "--track wandb: No API key configured" in error_of(done)

    done = ran(fork("grpo", tmp_path, *args))
    assert "1 row of metrics.jsonl" in done.stdout and [row["step"] for row in metrics(tmp_path / "run")] == [1, 1]
    assert "already contains a run" in error_of(fork("grpo", tmp_path, *args))


def test_a_disk_that_is_full_at_the_start_is_one_line(tmp_path, one_rank):
    args = grpo.Args(run=RunArgs(run_name="run", output_dir=str(tmp_path), resume="auto"))
    said = rf"^{tmp_path}/run: the run was not opened: .* File too large.* \(.* GiB were free\);"
    with full_disk(), one_line(said):
        open_run(args, one_rank, grpo.__file__)
    open_run(args, one_rank, grpo.__file__).locks.close()
    assert [*(tmp_path / "run/starts").iterdir()]


def test_the_last_checkpoint_is_written_before_the_export(tmp_path, monkeypatch):
    """A full disk may end the run there, at once."""
    run = Run("run", tmp_path, RunArgs(), ValidationArgs(), WORLD, None)
    run._saving = ThreadPoolExecutor(1).submit(time.sleep, 0.2)
    monkeypatch.setattr(run_module, "export_hf", lambda *_: [] if run._saving.done() else pytest.fail("too early"))
    run.export(SimpleNamespace(forward=SimpleNamespace(compute_dtype=torch.float32), module=None), None)


def test_validation_alone_needs_no_training_data_and_overwrites_nothing(copied):
    folder, args = copied
    before = times(folder)
    args = [*args, "--train-files", "absent.jsonl", "--prompts-per-step", "8", "--num-mini-batches", "3"]
    args += ["--total-steps", "1epochs", "--val-only", "--val-samples", "2", "--val-temperature", "1", "--run-name"]
    for number, resume in (("1", "auto"), ("2", str(folder / "run/checkpoints/step_000002"))):
        consent = ["--resume", resume, "--resume-override", "num_mini_batches"]
        done = ran(fork("grpo", folder, *args, "run", *consent))
        assert "validation prompts: 16 (prompt_too_long 0) from " in done.stdout
        assert "16 x 2 = 32 responses on 1 rank(s)" in done.stdout
        assert "training prompts" not in done.stdout and " epochs" not in done.stdout
        [row] = metrics(folder / f"run/val_only/{number}")
        assert row["step"] == (4 if resume == "auto" else 2)
        made = {path.name for path in (folder / f"run/val_only/{number}").iterdir()}
        assert made == {"config.json", "metrics.jsonl", "samples.jsonl", "starts"}
    ran(fork("grpo", folder, *args, "start"))
    assert [row["step"] for row in metrics(folder / "start/val_only/1")] == [0]
    after = times(folder)
    assert {path: after[path] for path in before} == before


# ---- an end before the time ----------------------------------------------------------------------
@pytest.mark.parametrize("ranks", with_slow([1, 2], 2))
def test_a_crash_leaves_a_curve_and_says_what_was_wrong_before(source, tmp_path, ranks):
    """On one rank; on another rank than that which draws."""
    (tmp_path / "same.py").write_text("def score(**kwargs):\n    return 1.0\n")
    scorer = ["--reward", f"{tmp_path / 'same.py'}:score", "--run-name", "run", "--total-steps", "9"]
    start = fork if ranks == 1 else functools.partial(launch, launcher=TORCHRUN)
    done = start("grpo", tmp_path, *source[1], *breaks(tmp_path, rows=24 // ranks, rank=ranks - 1), *scorer)
    assert done.returncode == 1 and "the data break off" in done.stderr
    assert (tmp_path / "run/curve.png").read_bytes().startswith(b"\x89PNG")
    assert "note: equal scores in more than 90 % of the groups in " in done.stdout


def test_a_run_begins_with_a_header_and_ends_with_the_next_commands(source):
    """And what is no terminal gets no control characters."""
    folder, text = source[0], (source[0] / "printed.txt").read_text()
    assert all(c.isprintable() or c == "\n" for c in text)
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1/4 | reward"))
    header = ["training prompts: ", "validation prompts: ", "8 prompts x 4 = 32 responses a step", "run folder: "]
    assert all(any(line.startswith(start) for line in lines[:first]) for start in header)
    validated = [line for line in lines if line.startswith("step ") and "val/toy/arithmetic/mean@1" in line]
    assert [line.split("/")[0] for line in validated] == ["step 2", "step 4"]
    page, export, more = lines[-3:]
    assert page == f"page of curves and samples: python -m tools.page {folder}/run"
    assert export == f"a checkpoint as a model: python -m tools.export {folder}/run --step 4"
    words = shlex.split(more)
    assert words[:2] == ["more", "steps:"] and " ".join(words[-6:]) == "--run-name run --resume auto --total-steps 8"
    assert words.count("--run-name") == words.count("--total-steps") == 1


def test_more_steps_are_not_suggested_where_the_schedule_has_ended(tmp_path, capsys):
    run = Run("run", tmp_path, RunArgs(), ValidationArgs(), WORLD, None)
    run._print_next_commands()
    assert capsys.readouterr().out == ""  # no checkpoint
    run.checkpoint, run.own = tmp_path / "checkpoints/step_000007", True
    run.config = {"lr_schedule": "cosine"}
    run._print_next_commands()
    assert capsys.readouterr().out == f"a checkpoint as a model: python -m tools.export {tmp_path} --step 7\n"


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_the_command_that_goes_on_has_the_launcher_that_was_typed(launcher, monkeypatch):
    typed = [sys.executable, *launcher, "grpo.py", "--lr", "1"]
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: typed)
    monkeypatch.delenv("PLAINRL_LAUNCHER", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert typed_command() == shlex.join(typed)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-u", "-m", "mine", "--lr", "1"])
    monkeypatch.setenv("PLAINRL_LAUNCHER", "GPUS=2 tools/launch/one_node.sh")
    assert typed_command() == "GPUS=2 tools/launch/one_node.sh -m mine --lr 1"
    monkeypatch.delenv("PLAINRL_LAUNCHER")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert typed_command() == shlex.join(sys.orig_argv)


@pytest.mark.parametrize("launcher", with_slow([PYTHON, ONE_NODE], ONE_NODE), ids=["python", "one_node"])
def test_ctrl_c_ends_in_a_line_with_the_command_that_goes_on(source, tmp_path, launcher):
    """And while the run lives, nobody else gets its folder. A launcher ends in a traceback of its own."""
    args = [*source[1], "--val-every", "0", "--run-name", "run", "--total-steps"]
    arguments = command("grpo", tmp_path, *args, "1000", launcher=launcher)
    log = tmp_path / "log"
    how = {"env": environment(), "stdout": log.open("w"), "stderr": subprocess.STDOUT, "start_new_session": True}
    # a background shell ignores it
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    job = subprocess.Popen(arguments, **how)
    try:
        wait_until((tmp_path / "run/checkpoints/step_000002").exists, 300)
        if launcher == PYTHON:
            os.killpg(job.pid, signal.SIGSTOP)  # it has its lock and takes no time
            for more in (["--resume", "auto"], ["--val-only", "--resume", "auto"]):
                second = error_of(fork("grpo", tmp_path, *args, "1000", *more))
                assert f"{tmp_path}/run is in use by pid {job.pid} on " in second
            os.killpg(job.pid, signal.SIGCONT)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(300) == (130 if launcher == PYTHON else 1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    wait_until(lambda: "interrupted" in log.read_text())
    *others, last = log.read_text().splitlines()
    newest = newest_complete(tmp_path / "run/checkpoints").name
    start, typed = last.split(": ", 1)
    assert start == f"interrupted after {newest}; to go on" and "interrupted" not in "".join(others)
    assert not [line for line in others if line.startswith(("[rank", "KeyboardInterrupt"))]
    if launcher == PYTHON:
        assert "Traceback" not in log.read_text()
    assert (tmp_path / "run/curve.png").exists()

    words = shlex.split(typed)
    if launcher == ONE_NODE:
        assert typed.startswith(f"GPUS=2 {ROOT}/tools/launch/one_node.sh ")
        words = ["env", *words]
    assert words[-4:] == ["--run-name", "run", "--resume", "auto"]
    assert words[:-4] == [word for word in arguments if word not in ("--run-name", "run")]
    if launcher == PYTHON:
        total = str(int(newest[5:]) + 1)
        done = ran(fork("grpo", tmp_path, *words[2:], "--total-steps", total))
        assert f"resumed from {newest}\n" in done.stdout and f"step {total}/{total}" in done.stdout
