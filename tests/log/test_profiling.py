"""--profile-steps: traces that viewers read, with the stages in them; the speed of a GPU on the console."""

import gzip
import json
from itertools import pairwise

import pytest
import torch

from lib.args import RunArgs, ValidationArgs
from lib.distributed import Sum, World, start_step, timed
from lib.log.profiling import Profiler, largest_operations
from lib.log.tracking import Tracker
from lib.run.run import Run
from tests.common import SMALL, fork, metrics, ran

STAGES = {"weight_sync", "rollout", "reward", "log_probs", "advantages", "update"}


def trace_of(file) -> list[dict]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def names_of(events: list[dict], category: str) -> set[str]:
    return {event["name"] for event in events if event.get("cat") == category}


def test_a_profiled_step_has_a_trace_a_table_and_a_mark(tmp_path):
    done = ran(fork("grpo", tmp_path, *SMALL, "--total-steps", "2", "--profile-steps", "2", "--run-name", "run"))
    [file] = (tmp_path / "run/profile").iterdir()
    assert file.name == "step_000002-rank_0.json.gz"
    events = trace_of(file)
    assert names_of(events, "user_annotation") >= STAGES and "aten::mm" in names_of(events, "cpu_op")
    lines = done.stdout.splitlines()
    [start] = [i for i, line in enumerate(lines) if line == f"profiled: {file}"]
    assert lines[start + 1].split() == ["self", "CPU,", "ms", "share", "calls", "operation"]
    assert lines[start + 22].startswith("step 2/2 | ")  # twenty operations later
    assert [row.get("perf/profiled") for row in metrics(tmp_path / "run", timings=True)] == [None, 1.0]


@pytest.mark.slow
def test_a_run_that_ends_in_a_profiled_step_writes_what_it_has(tmp_path):
    (tmp_path / "ends.py").write_text(
        "import lib.model.trained as trained\n"
        "from lib.data import RLHFDataset as Rows\n"
        "def step(self):\n"
        "    raise MemoryError('no room')\n"
        "trained.TrainedModel.step = step\n"
    )
    ends = ["--dataset-class", f"{tmp_path / 'ends.py'}:Rows", "--profile-steps", "1"]
    done = fork("grpo", tmp_path, *SMALL, *ends, "--run-name", "run")
    assert done.returncode == 1 and "no room" in done.stderr
    events = trace_of(tmp_path / "run/profile/step_000001-rank_0.json.gz")
    assert names_of(events, "user_annotation") >= STAGES
    memory = [event["args"]["MiB"] for event in events if event["name"] == "memory, CPU"]
    assert 1 < max(memory) < 1000


def test_a_step_that_the_epochs_do_not_reach_is_refused_before_a_model_loads(tmp_path):
    done = fork("grpo", tmp_path, *SMALL, "--total-steps", "1epochs", "--profile-steps", "3", "33")
    assert done.returncode == 2 and "error: --profile-steps 33: the run has 32 steps (--total-steps)" in done.stderr


def test_each_rank_writes_its_own_and_the_memory_in_use(tmp_path, capsys):
    profiler = Profiler(tmp_path / "profile", (3,), World(1, 2, torch.device("cpu")))
    for step in (2, 3):
        start_step(step)
        profiler.start(step)
        with timed("update"):
            held = torch.zeros(2**24)  # 64 MiB
        assert profiler.stop() == (step == 3)
        del held
    assert not profiler.stop() and capsys.readouterr().out == ""
    [file] = (tmp_path / "profile").iterdir()
    assert file.name == "step_000003-rank_1.json.gz"
    points = [event["args"]["MiB"] for event in trace_of(file) if event.get("ph") == "C"]
    # the sums also have what other threads allocate and release: some hundred KiB
    assert any(abs(after - before - 64) < 1 for before, after in pairwise([0.0, *points]))


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def test_the_table_counts_the_time_of_an_operation_without_what_it_calls():
    def rows_of(*more: dict) -> list[list[str]]:
        return [line.split() for line in largest_operations([*events, *more]).splitlines()]

    events = [
        event("user_annotation", "update", 0, 9000),
        event("cpu_op", "linear", 0, 3000),
        event("cpu_op", "mm", 500, 2000),
        event("cpu_op", "mm", 3000, 4000),  # begins where linear ends
        event("cpu_op", "mm", 0, 1000, tid=2),
    ]
    assert rows_of()[1:] == [["7.0", "87.5%", "3", "mm"], ["1.0", "12.5%", "1", "linear"]]
    rows = rows_of(event("kernel", "gemm", 0, 500, tid=7), event("gpu_memcpy", "Memcpy HtoD", 500, 1500, tid=7))
    assert rows[0][:2] == ["self", "GPU,"]
    assert rows[1:] == [["1.5", "75.0%", "1", "Memcpy", "HtoD"], ["0.5", "25.0%", "1", "gemm"]]


def test_on_a_gpu_the_console_shows_its_speed_and_mfu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    tracker = Tracker(tmp_path, {}, total_steps=1, on_gpu=True)
    run = Run("run", tmp_path, RunArgs(), ValidationArgs(), World(0, 1, torch.device("cuda")), tracker)
    monkeypatch.setattr("lib.distributed.step_timing", lambda: {"timing_s/step": 10.0, "timing_s/update": 4.0})
    counts = {"training/rows_in": 1, "training/rows_trained": 1, "training/tokens": 50_000, "perf/update_tflops": 1600}
    logged = run.log(1, [{name: Sum(value) for name, value in counts.items()}])
    tracker.close()
    assert logged["perf/mfu"] == 1600 / 4 / 989
    assert capsys.readouterr().out.startswith("step 1/1 | 5,000 tok/s/GPU | MFU 40% | eta ")
