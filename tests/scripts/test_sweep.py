"""tools/launch/sweep.py: the runs of a file, and what is left of them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import yaml

import grpo
from lib import InputError
from lib.run.lock import take_lock
from tests.common import ROOT, one_line, parse_flags, wait_until
from tools.launch.sweep import Args, main, read_sweep

SCRIPT = """
import os, sys, time
name = sys.argv[sys.argv.index("--run-name") + 1]
if "lr=bad" in name and not os.path.exists("mended"):
    print("it went wrong")
    sys.exit(3)
if "lr=slow" in name:
    open("slow", "w").close()
    time.sleep(600)
with open("seen", "a") as file:
    print(name, os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES"), file=file)
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Writes sweep.yaml into the working directory, which has script.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)

    def write(**given):
        (tmp_path / "sweep.yaml").write_text(yaml.dump({"script": "script.py"} | given, sort_keys=False))
        return Args(tmp_path / "sweep.yaml", output_dir=tmp_path / "runs", jobs=2)

    return write


def seen(folder) -> list[str]:
    return sorted((folder / "seen").read_text().splitlines())


def test_the_words_of_a_run_are_flags_of_the_script(sweep):
    args = sweep(
        script="grpo.py",
        flags={"total-steps": 3, "val_before_train": False, "multi-turn.tool-rewards": True, "track": ["wandb"]},
        grid={"lr": ["1e-6", "3e-6"], "loss": ["vanilla", "gspo"]},
        seeds=[1, 2],
    )
    runs = read_sweep(args.file, args.output_dir)
    assert [run.name for run in runs][:3] == [
        "lr=1e-6,loss=vanilla,seed=1",
        "lr=1e-6,loss=vanilla,seed=2",
        "lr=1e-6,loss=gspo,seed=1",
    ]
    assert len(runs) == 8 and runs[-1].command[0] == "grpo.py"
    words = [word for word in runs[-1].command[1:] if "multi-turn" not in word]
    parsed = parse_flags(grpo.Args, words)
    assert (parsed.optimizer.lr, parsed.loss, parsed.run.seed, parsed.run.total_steps) == (3e-6, "gspo", 2, 3)
    assert parsed.run.run_name == "lr=3e-6,loss=gspo,seed=2" and parsed.run.resume == "auto"
    assert not parsed.validation.val_before_train and parsed.run.track == ("wandb",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("flags: {lr: 1}", "must have `script`"),
        ("script: a\ngrid: {lr: [1]}\nsettings: [{}]", "give one of them"),
        ("script: a\ngrid: {lr: []}", "grid: lr: give a list"),
        ("script: a\nsettings: {lr: 1}", "settings: give a list"),
        ("script: a\nsettings: [1]", "give {flag: value}"),
        ("script: a\nseeds: [one]", "seeds: give a list of integers"),
        ("script: a\nseeds: [1, 1]", "2 runs would be named seed=1"),
        ("script: a\nflags: {run_name: x}", "run-name: a sweep sets it itself"),
        ("script: [", "line 1: expected the node content"),
        ("script: a\nflags: {agent: env X_API_KEY=abc1 a.py}", ": flags: --agent: X_API_KEY gets a key or password"),
        ("script: a\nflags: {lr: 1, --lr: 2}", "flags: a flag is there twice: lr, --lr"),
        ("script: a\nflags: {<<: {lr: 1}}", "'<<' is no flag"),
        ("script: a\nflags: {x: [[1]]}", "flags: x: give a list of plain values"),
        ("script: a\ngrid: {" + ", ".join(f"{x}: [0,1,2,3,4,5,6,7,8,9]" for x in "abcdefghi") + "}", "1,000,000,000"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, given, message):
    """What YAML and words refuse besides: tests/cli/."""
    (tmp_path / "sweep.yaml").write_text(given)
    with one_line(re.escape(message)):
        read_sweep(tmp_path / "sweep.yaml", tmp_path)


def test_values_are_as_typed(tmp_path):
    """As in --config: YAML 1.1 itself makes 8 of 010, 90 of 1:30, False of no, and a date of 2026-01-02."""
    typed = ["010", "1:30", "1_000", "0x10", "1e-6", "1.50", "no", "on", "yes", "2026-01-02", "None", ".inf", "="]
    text = f"script: a\nflags:\n  x: [{', '.join(typed)}]\n  y: null\n  a.b: false\n  c: True\n  d: 'true'\n"
    (tmp_path / "sweep.yaml").write_text(f"{text}  kwargs: '{{\"enable_thinking\": false}}'\n")
    [run] = read_sweep(tmp_path / "sweep.yaml", tmp_path)
    expected = ["a", "--x", *typed, "--y", "None", "--a.no-b", "--c", "--d", "true"]
    expected += ["--kwargs", '{"enable_thinking": false}']
    assert run.command[: run.command.index("--seed")] == expected


@pytest.mark.parametrize("text", ["é", "-"])
def test_a_long_setting_has_a_short_name(tmp_path, text):
    (tmp_path / "sweep.yaml").write_text(f"script: a\ngrid: {{x: ['x{text * 150}', 'y{text * 150}']}}", "utf-8")
    for run in read_sweep(tmp_path / "sweep.yaml", tmp_path):
        parse_flags(grpo.Args, ["--run-name", run.name])  # which takes the name
        assert run.name[0] not in "-." and run.name.endswith("seed=1")


def test_a_run_that_cannot_start_gives_its_place_to_the_next(sweep, tmp_path, capsys):
    """There are more words than a command can have."""
    args = sweep(grid={"lr": ["x" * 2**18, 1]}, seeds=[1, 2])
    args.jobs = 1
    assert main(args) == 1
    said = capsys.readouterr().out
    assert said.count("not run, or not noted in sweep.jsonl: [Errno 7]") == 2 and "2 of 4 failed" in said
    assert seen(tmp_path) == ["lr=1,seed=1 1 None", "lr=1,seed=2 1 None"]


@pytest.mark.parametrize("row", ["x", "[5]", '{"name": [], "command": [], "exit_code": 0}'])
def test_a_damaged_record_is_one_line(sweep, tmp_path, row):
    args = sweep(seeds=[1])
    assert main(args) == 0
    with (tmp_path / "runs/sweep/sweep.jsonl").open("a") as record:
        record.write(f"{row}\n")
    with one_line("sweep.jsonl line 2: no row of a sweep: fix or delete it"):
        main(args)


def test_a_sweep_goes_on_where_it_stopped(sweep, tmp_path, capsys):
    args = sweep(grid={"lr": [1, "bad"]}, seeds=[1, 2])
    assert main(args) == 1
    assert seen(tmp_path) == ["lr=1,seed=1 1 None", "lr=1,seed=2 1 None"]
    out = capsys.readouterr().out
    assert "lr=bad,seed=1: ended with exit code 3" in out and "2 of 4 failed" in out
    assert (tmp_path / "runs/sweep/lr=bad,seed=1.log").read_text() == "it went wrong\n"
    (tmp_path / "mended").touch()
    assert main(args) == 0
    assert "2 of 4 runs" in capsys.readouterr().out and len(seen(tmp_path)) == 4
    assert main(args) == 0 and len(seen(tmp_path)) == 4
    main(sweep(grid={"lr": [1, "bad", 2]}, seeds=[1, 2]))  # more settings
    assert len(seen(tmp_path)) == 6
    with pytest.raises(InputError, match=r"lr=1,seed=1 was run as script\.py --lr 1 .*another file's name"):
        main(sweep(flags={"other": 1}, grid={"lr": [1]}))


def test_each_run_has_gpus_of_its_own_and_several_are_one_job_of_the_launch_script(sweep, tmp_path, capsys):
    args = sweep(seeds=[1, 2, 3, 4])
    args.jobs, args.gpus, args.gpus_per_run, args.dry_run = 0, ("3", "5"), 2, True
    assert main(args) == 0
    assert shlex.split(capsys.readouterr().out)[:2] == [str(ROOT / "tools/launch/one_node.sh"), "script.py"]
    args.gpus_per_run, args.dry_run = 1, False
    assert main(args) == 0
    assert {line.split()[-1] for line in seen(tmp_path)} == {"3", "5"}


def test_two_programs_do_not_run_one_sweep(sweep, tmp_path):
    code = f"from tools.launch.sweep import *; main(Args(Path({str(sweep().file)!r})))"
    with take_lock(tmp_path / "runs/sweep"):
        how = {"env": {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, "-c", code], **how)
    assert "InputError" in done.stderr and not (tmp_path / "seen").exists()


def test_ctrl_c_ends_it(sweep, tmp_path):
    sweep(grid={"lr": ["slow"]}, seeds=[1, 2, 3])
    command = [sys.executable, "-m", "tools.launch.sweep", "sweep.yaml", "--jobs", "1"]
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as it is where a shell's & started the tests
    job = subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, start_new_session=True, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, ignored)
    wait_until((tmp_path / "slow").exists, 300)
    os.killpg(job.pid, signal.SIGINT)
    job.communicate(timeout=300)
    assert job.returncode and not (tmp_path / "seen").exists()
    [row] = map(json.loads, (tmp_path / "runs/sweep/sweep.jsonl").read_text().splitlines())
    assert row["name"] == "lr=slow,seed=1" and row["exit_code"]
