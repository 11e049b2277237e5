"""benchmarks/gpu_check.sh: its parts run, and it reports whatever happens to them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import grpo
from benchmarks.gpu_check import claims, report, rows, run, several, wheels
from benchmarks.gpu_check.common import TOY_MODEL
from lib.cli.flags import parse_flags
from tests.common import ROOT, environment, fork_module, is_alive, ran

SCRIPT = str(ROOT / "benchmarks/gpu_check.sh")


@pytest.mark.slow
def test_the_parts_run(tmp_path):
    """Small and on the CPU. What needs a GPU is a row that says so."""
    output = tmp_path / "check.json"
    flags = ["--device", "cpu", "--tiny", "--output", str(output)]
    env = environment() | {"PYTHON": "echo"}
    script = ran(subprocess.run([SCRIPT, *flags], env=env, capture_output=True, text=True))
    assert script.stdout.split() == ["-m", "benchmarks.gpu_check", *flags]
    printed = ran(fork_module("benchmarks.gpu_check", *flags)).stdout.splitlines()
    record = json.loads(output.read_text(), parse_constant=pytest.fail)
    assert [*record["results"]] == [*run.PARTS] and [*record["claims"]] == [*claims.CLAIMS]
    assert all(said.startswith("not seen here") for [said] in record["claims"].values())
    found = {row["check"]: row for part in record["results"].values() for row in part}
    assert not [check for check, row in found.items() if row["ok"] is False]
    assert all(row["value"] is not None or row["why"] for row in found.values())
    assert {check for check, row in found.items() if row["ok"]} >= {
        "windows of 8, shared prompts, packed_sdpa bf16: gradient, relative",
        "gloo on the CPU: an update, two ranks against one, gradient",
        "load: weights and moments are those of the save",
        "resumed run, weights equal",
        "vLLM: k3 of the first rollout under the second weights",
    }
    assert found["windows of 8, varlen bf16"]["why"].startswith("needs a GPU")
    assert printed[:10] == record["summary"] and printed[10] == "hardware" and "0 checks FAILED" in printed[0]
    texts = {"hardware": "CPU cores", "software": f"torch {torch.__version__}", "update": "tokens/s"}
    texts |= {"memory": "GiB, estimate", "rollout": "hf, qwen2.5-0.5b, 4 rows: ", "stages": ", update ", "parts": ""}
    for (name, text), line in zip((texts | {"failed": "none", "claims": ""}).items(), printed[1:10], strict=True):
        assert line.split()[0] == name and text in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (rows.Options(), "no GPU here that torch can use (Torch not compiled with CUDA enabled)"),
        (rows.Options("cpu", ranks=3), "--ranks 3: give an even number"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_run_is_one_line(capfd, options, message):
    assert run.main(options) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Runs the check with stand-ins for parts; returns (exit code, what it printed, its record)."""

    def run_it(parts: dict, *more: str):
        for name, part in parts.items():
            monkeypatch.setattr(f"benchmarks.gpu_check.{name}.check", part)
        code = run.main(rows.Options("cpu", True, (*parts, *more), tmp_path / "check.json"))
        printed = capsys.readouterr().out
        assert printed.startswith("gpu_check at commit ")
        return code, printed, json.loads((tmp_path / "check.json").read_text(), parse_constant=pytest.fail)

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # which main sets
    monkeypatch.setattr(run, "import_parts", lambda parts: None)  # the stand-ins of this process are the forks' own
    return run_it


def fine(options, device):
    yield rows.row("fine", 1, "", True)


def test_a_part_that_fails_is_reported_and_the_others_go_on(check, monkeypatch):
    def breaks(options, device):
        yield rows.row("before", 1, "")
        raise RuntimeError("broken kernel")

    def crashes(options, device):
        subprocess.Popen(["sleep", "1000"], close_fds=False)  # it has this part's end of the pipe, too
        os.write(2, b"CUDA error: an illegal memory access was encountered\n")
        os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(options, device):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        yield rows.row("before", subprocess.Popen(["sleep", "1000"]).pid, "")
        time.sleep(1000)

    def partly(options, device):
        yield from rows.attempt("first", lambda: breaks(options, device))
        yield rows.row("second", 1, "", True, rows.claim(torch.device("cuda"), "G8", True, "slow"))

    def no_number(options, device):
        said = rows.claim(torch.device("cuda"), "G9", False, "nan times")
        yield rows.row("loss", float("nan"), "", None, said, of={"a": [float("inf")]})

    monkeypatch.setitem(run.LIMITS_S, "ranks", 0.25)  # 1 s with --tiny
    monkeypatch.setitem(sys.modules, "benchmarks.gpu_check.saves", None)  # its import fails, as without a package
    parts = {"numerics": breaks, "scripts": crashes, "ranks": hangs, "memory": partly, "update": no_number}
    code, printed, record = check(parts, "saves")
    said = ["broken kernel", "scripts died with SIGSEGV", "ranks did not end in 1 s", "G8   confirmed: slow"]
    assert code == 1 and all(text in printed for text in said)
    results = record["results"]
    verdicts = [[row["ok"] for row in part] for part in results.values()]
    assert verdicts == [[None, False], [False], [None, False], [None, False, True], [False], [False]]
    assert "ModuleNotFoundError" in results["saves"][0]["error"]
    assert "illegal memory access" in results["scripts"][0]["error"]
    [loss] = results["update"]
    assert (loss["value"], loss["why"], loss["of"]) == (None, "the value is nan", {"a": ["inf"]})
    assert record["claims"]["G9"] == ["not seen here: this was a CPU"]
    assert not is_alive(results["ranks"][0]["value"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_reports_what_ran(check, number):
    def interrupts(options, device):
        yield rows.row("before", 1, "")
        os.kill(os.getppid(), number)
        time.sleep(1000)

    before = signal.getsignal(signal.SIGINT)
    code, printed, record = check({"numerics": fine, "update": interrupts, "memory": fine})
    assert code == 130
    assert f"INTERRUPTED by {number.name}" in printed.splitlines()[0]
    assert re.search("update: [01] rows, interrupted", printed) and "1 ok" in printed
    assert [*record["results"]] == ["numerics", "update"]
    assert signal.getsignal(signal.SIGINT) is before


def test_parts_run_outside_of_a_job_and_not_when_the_time_is_over(check, monkeypatch):
    """Within a job of eight ranks a part would wait for seven others."""

    def ranks(options, device):
        yield rows.row("ranks", int(os.environ.get("WORLD_SIZE", 1)), "")

    monkeypatch.setenv("WORLD_SIZE", "8")
    assert check({"numerics": ranks})[2]["results"]["numerics"][0]["value"] == 1
    monkeypatch.setattr(run, "DEADLINE_S", 0)
    code, printed, _ = check({"numerics": fine})
    assert code == 0 and "not run: the 0 s of the whole check are over" in printed


def test_a_disk_that_is_full_costs_the_file_only(check, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    (tmp_path / "check.json").write_text("{}")
    code, printed, record = check({"numerics": fine, "memory": fine})
    assert code == 0 and "2 ok" in printed and record == {}
    assert printed.splitlines()[-1] == "not written: [Errno 28] No space left on device"
    assert [*tmp_path.iterdir()] == [tmp_path / "check.json", tmp_path / "check.log"]


def test_what_fails_at_the_start_is_replaced(tmp_path, monkeypatch):
    """A folder that cannot be written; a fork whose imports crash: a spawned part imports in its own process."""
    (tmp_path / "file").touch()
    written = report.Report(rows.Options("cpu", output=tmp_path / "file/check.json"))
    assert written.output == Path("/tmp/check.json")
    written.log.unlink()
    monkeypatch.setattr(run, "import_parts", lambda parts: os.abort())
    assert run.start_method(rows.Options("cpu"), ("numerics",)) == ("spawn", "")


def test_every_line_of_the_summary_is_filled_and_short(tmp_path):
    of_all = report.Report(rows.Options("cuda", output=tmp_path / "check.json"))
    texts = {name: f"{name} " * 200 for name in report.FROM_ROWS}
    of_all.results = {"hardware": [rows.row("x" * 500, 1, "", False, ("G8 confirmed: 2.0",), summary=texts)]}
    lines = of_all.summary()
    assert len(lines) == 10 and all(len(line) <= 420 for line in lines)
    assert "1 confirmed (G8)" in lines[-1] and f"{len(claims.CLAIMS) - 1} not seen here (G1 G2" in lines[-1]
    assert set(re.findall(r"[GMP]\d+", lines[-1])) == claims.CLAIMS.keys()


# ---- several GPUs --------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, 8])
def test_what_several_gpus_run_are_flags_of_grpo(ranks, monkeypatch):
    """With one run's metrics in the place of all, and a job that is not started."""
    started = []

    def run_script(options, script, folder, name, *flags, run):
        size = run[-1] if run else "1"
        for variable, value in {"RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}.items():
            monkeypatch.setenv(variable, value)
        parse_flags(grpo.Args, [*flags])
        started.append((name, " ".join(flags), int(size)))
        metrics = dict.fromkeys([*several.COMPARED, "rollout/k3", "perf/tokens_per_s"], 0.0)
        return [metrics | {f"timing_s/{stage}": 1.0 for stage in ("update", "step", "weight_sync")}]

    monkeypatch.setattr(several, "find_spec", lambda name: True)
    monkeypatch.setattr(several, "run_script", run_script)
    monkeypatch.setattr(several, "save_model", lambda config, device, folder: shutil.copytree(TOY_MODEL, folder))
    monkeypatch.setattr(several, "killed", lambda *_: ())
    found = [*several.check(rows.Options(ranks=ranks), torch.device("cuda"))]
    assert not [row["error"] for row in found if row["ok"] is False]
    assert {text.split()[0] for row in found for text in row["claims"]} == {f"M{n}" for n in range(1, 11)} - {"M9"}
    by_name = {name: (flags, size) for name, flags, size in started}
    assert by_name["ZeRO-1"][1] == ranks and "--sharding zero1" in by_name["ZeRO-1"][0]
    assert f"--rollout-gpus {ranks // 2}" in by_name["servers_M7"][0] and by_name["resumed"][1] == ranks // 2
    assert ("7b" if ranks == 8 else "1.5b") in by_name["speed_fsdp2"][0]


@pytest.mark.slow
def test_several_ranks_run_on_a_cpu(tmp_path):
    flags = f"--device cpu --tiny --ranks 2 --parts several --output {tmp_path}/check.json"
    ran(fork_module("benchmarks.gpu_check", *flags.split()))
    found = json.loads((tmp_path / "check.json").read_text())["results"]["several"]
    assert len(found) >= 9 and all(row["ok"] is not False for row in found)


# ---- a GPU machine that has torch and transformers -----------------------------------------------
def test_wheels_are_what_the_scripts_import_and_what_that_requires(monkeypatch):
    monkeypatch.setattr(wheels, "imported", lambda: {"numpy", "tensordict", "PIL", "json", "yaml"})
    names = [line.partition("==")[0] for line in wheels.missing()]
    assert names == ["cloudpickle", "pyvers", "tensordict"]  # numpy is there, nothing of ours asks for PIL
    assert wheels.missing(("tensordict",)) == []


@pytest.mark.skipif("GPU_MACHINE" not in os.environ, reason="GPU_MACHINE=1 builds environments of 5 GB, in minutes")
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_all_parts_run_with_torch_transformers_and_our_wheels(tmp_path, python):
    """torch 2.11 and transformers 5.17. The environment is kept; without network and without it the test is skipped."""
    found = shutil.which(f"python{python}")  # it may be a shim of a version that is not there
    if not found or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no python{python} here")
    venv, folder = ROOT / f".venv-gpu-machine-{python}", ROOT / f".venv-gpu-machine-{python}/wheels"
    its, has = str(venv / "bin/python"), ["torch==2.11.0", "transformers==5.17.0", "accelerate", "numpy"]
    has += ["safetensors", "tokenizers"]
    if not folder.exists():
        for command in (
            [f"python{python}", "-m", "venv", str(venv)],
            [its, "-m", "pip", "install", "-q", *has],
            [SCRIPT, "--wheels", tmp_path / "wheels", python],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if "No matching distribution" in done.stderr:
                pytest.skip("no network")
            ran(done)
        shutil.move(tmp_path / "wheels", folder)
    output = tmp_path / "check.json"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": its, "WHEELS": str(folder)}
    done = subprocess.run([SCRIPT, "--device", "cpu", "--tiny", "--output", str(output)], env=env, capture_output=True)
    record = json.loads(output.read_text())
    assert done.returncode == 0, "\n".join(record["summary"])
    assert f"Python {python}." in record["summary"][2] and "torch 2.11.0" in record["summary"][2]
    assert [*record["results"]] == [*run.PARTS]
