"""The run's logs: exact and valid JSON lines, resume, plain and terminal output, the trackers offline, the curve."""

import json
import math
import os
import posixpath
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lib import InputError
from lib.distributed import Max, Mean, reduce_metrics
from lib.log.rollouts import prompt_texts, sample_rows
from lib.log.trackers import mlflow_name
from lib.log.tracking import Tracker, plot_curve
from lib.model import load_tokenizer
from tests.common import TOY_MODEL, full_disk, rollout_batch

STEP = {"reward/mean": 0.5, "response_length/mean": 230.4, "perf/tokens_per_s": 12345.6, "actor/loss": -0.1}


def lines(file: Path, torn: bool = False) -> list[dict]:
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    rows = file.read_text().splitlines()[: -1 if torn else None]
    return [json.loads(row, parse_constant=no_constant) for row in rows]


def test_metrics_are_exact_flushed_and_valid_json(tmp_path, capsys):
    tracker = Tracker(tmp_path, {}, total_steps=2)
    third = 1 / 3
    tracker.log({"a": third, "b": np.float32(0.1), "c": torch.tensor(2.5), "n": 7, "inf": math.inf}, 1)
    tracker.log({"loss": float("nan")}, 2)
    first, second = lines(tmp_path / "metrics.jsonl")  # before close
    numbers = {"a": third, "b": float(np.float32(0.1)), "c": 2.5, "n": 7}
    assert first == numbers | {"step": 1, "inf": None, "nonfinite": {"inf": "inf"}}
    assert second == {"step": 2, "loss": None, "nonfinite": {"loss": "nan"}}
    assert "loss is nan" in capsys.readouterr().out
    tracker.close()
    tracker.log({"late": 1.0}, 3)
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("metrics", [{"step": 7.0}, {"nonfinite": 1.0, "loss": math.nan}])
def test_no_metric_stands_for_what_a_row_has_of_its_own(tmp_path, metrics):
    tracker = Tracker(tmp_path, {}, total_steps=2)
    with pytest.raises(InputError, match=f"are called '{next(iter(metrics))}'"):
        tracker.log(metrics, 1)
    tracker.close()
    assert lines(tmp_path / "metrics.jsonl") == []


def test_a_full_disk_ends_in_one_line_and_the_rows_before_stay(tmp_path):
    tracker = Tracker(tmp_path, {}, total_steps=2)
    tracker.log({"reward/mean": 0.25}, 1)
    with full_disk():
        with pytest.raises(InputError, match=r"metrics.jsonl: the row of step 2 was not written: .* too large .*GiB"):
            tracker.log({f"metric/{i}": 0.5 for i in range(9)}, 2)
        with pytest.raises(InputError, match=r"samples.jsonl: the samples of step 2 were not written: .* too large"):
            tracker.samples(SAMPLES, 2)
        with pytest.raises(InputError, match=r"curve.png: the curve was not drawn: .* File too large"):
            tracker.curve()
    tracker.notes()  # reads a file whose last line is torn
    assert lines(tmp_path / "metrics.jsonl", torn=True) == [{"step": 1, "reward/mean": 0.25}]
    tracker.undrawn = False
    tracker.close()


@pytest.mark.parametrize("value", [torch.ones(2), np.ones((2, 3)), [1.0], "x", None])
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    tracker = Tracker(tmp_path, {}, total_steps=2)
    with pytest.raises(InputError, match=r"^metric 'my/ratio' is a \w+( of shape .*)?: log a number"):
        tracker.log({"reward/mean": 1.0, "my/ratio": value}, 1)
    tracker.close()
    for metric in (value, Mean(value, 1), Max(value)):
        with pytest.raises(InputError, match=r"^metric 'my/ratio' is a \w+"):
            reduce_metrics({"reward/mean": torch.tensor(1.0), "my/ratio": metric})


def test_disabled_writes_nothing(tmp_path, capsys):
    tracker = Tracker(tmp_path / "run", {}, trackers=("wandb",), total_steps=2, enabled=False)
    tracker.log(STEP, 1)
    tracker.samples(SAMPLES, 1)
    tracker.curve()
    tracker.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_missing_tracker(tmp_path, monkeypatch):
    for name in ("wandb", "trackio", "mlflow", "swanlab"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(InputError, match=f"--track {name}: not installed; run `pip install {name}`"):
            Tracker(tmp_path, {}, trackers=(name,), total_steps=1)


# ---- console -------------------------------------------------------------------------------------
VALIDATED = {"val/toy/mean@1": 0.25, "val/toy/mean@1/ci_low": 0.1, "val/toy/mean@1/ci_high": 0.3}
VALIDATED |= {"val/toy/clip_ratio": 0, "val/unscored": 0}


def test_plain_output_is_one_line_a_step_with_its_alerts(tmp_path, capsys):
    tracker = Tracker(tmp_path, {}, total_steps=20)
    rows = (0, VALIDATED), (1, QUIET), (2, TROUBLED), (2, VALIDATED | {"val/unscored": 3.0}), (3, STEP), (20, STEP)
    for step, row in rows:
        tracker.log(row, step)
    tracker.close()
    zero, quiet, troubled, validation, plain, last = capsys.readouterr().out.splitlines()
    assert zero == "step 0/20 | val/toy/mean@1 0.250"
    assert quiet == "step 1/20"
    assert troubled == (
        "step 2/20 | gradient 0 | equal scores in every group | skipped updates (gradient not finite): 1 | "
        "scorer errors: 2 | rows without a score or a token: 2"
    )
    assert validation == "step 2/20 | val/toy/mean@1 0.250 | unscored in validation: 3"
    assert plain.startswith("step 3/20 | reward 0.500 | length 230 | 12,346 tok/s | eta ")
    assert last == "step 20/20 | reward 0.500 | length 230 | 12,346 tok/s | eta 0:00:00"


QUIET = {"actor/grad_norm": 0.5, "reward/zero_variance": 0.5, "reward/error_count": 0, "training/skipped_updates": 0}
QUIET |= {"training/rows_in": 8, "training/rows_trained": 8, "training/rows_dropped/dead": 0}
TROUBLED = {"actor/grad_norm": 0.0, "reward/zero_variance": 1.0, "reward/error_count": 2, "training/skipped_updates": 1}
TROUBLED |= {"training/rows_in": 8, "training/rows_trained": 6, "training/rows_dropped/dead": 2}


def test_the_report_sums_up_the_alerts_of_all_steps(tmp_path, capsys):
    """Also of the steps before a resume."""
    for resume_step, step in enumerate((QUIET, TROUBLED, TROUBLED | {"training/rows_dropped/token_masks": 4})):
        tracker = Tracker(tmp_path, {}, total_steps=4, resume_step=resume_step)
        tracker.log(step, resume_step + 1)
        if resume_step < 2:
            tracker.close()
    tracker.log({"actor/loss": math.nan, "val/unscored": 0.0}, 4)
    capsys.readouterr()
    tracker.report()
    tracker.close()
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("note:")] == [
        "note: gradient 0 in 2 of 3 steps",
        "note: equal scores in more than 90 % of the groups in 2 of 3 steps",
        "note: skipped updates (gradient not finite): 2, in 2 of 3 steps",
        "note: scorer errors: 4, in 2 of 3 steps",
        "note: rows without a score or a token: 4, in 2 of 3 steps",
        "note: rows dropped by token_masks: 4 of 24",
        "note: actor/loss not finite in 1 of 4 rows of metrics.jsonl",
    ]


def test_the_accuracy_is_shown_where_the_scorer_gives_one(tmp_path, capsys):
    """The number with an interval; other numbers of the scorer are for the logs."""
    validation = {"val/unscored": 3, "val/aime/mean@1": -0.5, "val/aime/acc/mean@1": 0.25, "val/aime/chars/mean@1": 7.0}
    tracker = Tracker(tmp_path, {}, total_steps=20)
    tracker.log(validation | {"val/aime/acc/mean@1/ci_low": 0.1, "val/aime/acc/mean@1/ci_high": 0.3}, 0)
    tracker.samples([{"prompt": "p", "response": "r", "score": None}], 0)
    tracker.report()
    tracker.close()
    line, *rest, last, _, _ = capsys.readouterr().out.splitlines()
    assert line == "step 0/20 | val/aime/acc/mean@1 0.250 | unscored in validation: 3"
    assert last == "val/aime/acc/mean@1: 0.250 before training"
    assert any("none" in row for row in rest) and lines(tmp_path / "samples.jsonl")[0]["score"] is None


def test_samples_are_stored_whole_and_those_of_the_last_validation_shown_short(tmp_path, capsys):
    """One line per validation; one line per sample and the command of the page at the end. Images, and errors of
    tools, are below the samples."""
    run = tmp_path / "a run"
    tracker = Tracker(run, {}, total_steps=20)
    hostile = "\x1b[2J[bold]red[/bold]\r\n\u202eend " + "long " * 200 + "#### 42"
    rows = [{"prompt": f"What is {i}?", "response": hostile, "score": i / 3, "pred": "42"} for i in range(5)]
    rows[1] |= {"images": ["a.jpg", "b.jpg"], "tool_errors": [f"turn 1, f, exception: {hostile}"] * 5}
    for step in (0, 7):
        tracker.samples(rows, step, show=2)
        tracker.log(VALIDATED, step)
    assert lines(run / "samples.jsonl") == [{"step": step} | row for step in (0, 7) for row in rows]
    assert len(capsys.readouterr().out.splitlines()) == 2
    for of_training in (True, False):
        tracker.report(of_training)
        shown = capsys.readouterr().out
        assert all(c.isprintable() or c == "\n" for c in shown)
        title, first, second, images, *errors = shown.splitlines()[:7]
        assert title == "samples of step 7 (score, prompt, response):"
        assert "What is 1?" in second and "0.333" in second and "What is 2?" not in shown
        for line in first, second:
            assert len(line) <= 120 and "[bold]red" in line and "#### 42" in line
        assert images == f"images of sample 2: {run / 'images'}/a.jpg, b.jpg"
        for line in errors:
            assert line.startswith("tool error of sample 2: turn 1, f, exception: ") and len(line) <= 120
        assert shown.count("tool error") == 3 and ("curve:" in shown) == of_training
        assert shown.splitlines()[-1] == f"page of curves and samples: python -m tools.page '{run}'"
    tracker.close()


# ---- wandb, tensorboard, curve -------------------------------------------------------------------
SAMPLES = [
    {"prompt": "a | b\n\n# 2*3", "response": "<script>alert(1)</script>\n6", "score": 0.5, "ground_truth": "6"},
    {"prompt": "\ud83d", "response": "x" * 9000, "score": None, "ground_truth": None},
] * 5


@pytest.fixture
def offline_wandb(tmp_path, monkeypatch):
    for name, value in {"MODE": "offline", "SILENT": "true", "DATA_DIR": str(tmp_path / "uploads")}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)


def test_wandb_offline_resumes_the_same_run(tmp_path, offline_wandb, monkeypatch):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 6), "red").save(tmp_path / "images/a.jpg")
    seen = {"images": ["a.jpg"], "tool_errors": ["turn 1, f, exception: ValueError: <b>"]}
    ids = []
    for resume_step, project in ((0, "plainrl"), (2, "plainrl"), (0, "mine")):
        if project == "mine":
            monkeypatch.setenv("WANDB_PROJECT", project)
        tracker = Tracker(tmp_path, {"lr": 0.1}, trackers=("wandb",), total_steps=4, resume_step=resume_step)
        run = tracker.trackers["wandb"].package.run
        assert run.config["lr"] == 0.1 and run.project == project
        tracker.log(STEP | {"bad": math.nan}, resume_step + 1)
        tracker.samples(SAMPLES, resume_step + 1)
        if resume_step == 2:
            tracker.samples([SAMPLES[0], SAMPLES[0] | seen], resume_step + 2)
        tracker.close()
        ids.append((tmp_path / "wandb_id.txt").read_text())
    assert ids[0] == ids[1] != ids[2]
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(runs) >= 2 and all(any(run.endswith(run_id) for run in runs) for run_id in ids)
    files = (tmp_path / "wandb").glob("offline-run-*/files/media/table/samples/validation_*.json")
    tables = sorted((json.loads(file.read_text()) for file in files), key=lambda table: len(table["columns"]))
    *plain, with_images = tables
    assert with_images["columns"][5:] == ["images", "tool_errors"] and with_images["data"][0][5:] == [None, None]
    assert with_images["data"][1][5:] == [["Image"], str(seen["tool_errors"])]
    uploads = [file.read_bytes() for file in (tmp_path / "uploads").rglob("*") if file.is_file()]
    assert (tmp_path / "images/a.jpg").read_bytes() in uploads
    assert sorted(row[0] for table in plain for row in table["data"]) == [1] * 16 + [3] * 8
    for table in plain:
        assert table["columns"] == ["step", "score", "prompt", "response", "ground_truth"]
        assert table["data"][0][1:4:2] == [0.5, SAMPLES[0]["response"]]
        assert table["data"][1][1:4] == [None, "\\ud83d", "x" * 2000 + " … " + "x" * 2000]


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(tmp_path, offline_wandb, capsys):
    tracker = Tracker(tmp_path, {}, trackers=("wandb", "tensorboard"), total_steps=3)
    tracker.log(STEP, 1)
    tracker.trackers["wandb"].close()  # its process ends
    tracker.log(STEP, 2)
    tracker.samples(SAMPLES, 3)
    tracker.log(STEP, 3)
    assert [*tracker.trackers] == ["tensorboard"] and len(lines(tmp_path / "metrics.jsonl")) == 3
    [said] = [line for line in capsys.readouterr().out.splitlines() if "--track" in line]
    assert re.match("note: --track wandb: step 2 was not logged: .+; it gets nothing more", said)
    tracker.report()
    tracker.close()
    assert said in capsys.readouterr().out.splitlines()  # again, at the end


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, value in ((0, 1.0), (2, 2.0)):
        tracker = Tracker(tmp_path, {}, trackers=("tensorboard",), total_steps=4, resume_step=resume_step)
        for step in range(resume_step + 1, 5):
            tracker.log({"val/toy/mean@1": value}, step)
        tracker.samples(SAMPLES, resume_step + 1)
        tracker.close()
    assert (tmp_path / "tensorboard").stat().st_mode & 0o777 == 0o700
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (tag,) = events.Tags()["scalars"]
    assert [(event.step, event.value) for event in events.Scalars(tag)] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    _, shown = events.Tensors("samples/validation/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    assert shown.step == 3 and text.count("    <script>alert(1)</script>\n    6") == 4 and "    # 2*3" in text


TRACKED = """
import json, sys
import psutil
from lib.log.tracking import Tracker
from tests.log.test_tracking import SAMPLES, STEP

for resume_step in (0, 2, 0):
    tracker = Tracker(sys.argv[1], {"lr": 0.1}, trackers=("trackio",), total_steps=4, resume_step=resume_step)
    tracker.log(STEP | {"bad": float("nan")}, resume_step + 1)
    tracker.samples(SAMPLES, resume_step + 1)
    ports = [c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    tracker.close()
from trackio.sqlite_storage import SQLiteStorage

runs = SQLiteStorage.get_run_records("mine")
print(json.dumps([ports, [SQLiteStorage.get_logs("mine", run["name"], run_id=run["id"]) for run in runs]]))
"""


def tracked(program: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    """In a process of its own: trackers read their environment when they are imported, and log in threads."""
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, str(folder / "run")]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_trackio_keeps_a_run_on_this_machine_and_resumes_the_same_one(tmp_path):
    pytest.importorskip("trackio", reason="not in the requirements: pip install trackio")
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKIO_PROJECT": "mine"}
    done = tracked(TRACKED, tmp_path, env)
    assert done.returncode == 0, done.stderr
    ports, runs = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    assert ports == [] and [[log["step"] for log in logs] for logs in runs] == [[1, 1, 3, 3], [1, 1]]
    assert runs[0][2].items() >= STEP.items() and math.isnan(runs[0][2]["bad"])
    table = runs[0][3]["samples/validation"]["_value"]
    assert len(table) == 8 and table[0] == {"step": 3, **SAMPLES[0]}


HOSTILE = ["val/x/mean@1", "a//../b|c", "/root", "n" * 400, "reward//mean", ".", "a\nb", "数学/é", "x/" * 200, "@"]
RESUMED = """
import json, sys
from lib import InputError
from lib.log.tracking import Tracker
from tests.log.test_tracking import HOSTILE, SAMPLES, STEP

try:
    for resume_step in (0, 2, 0):
        config = {f"flag_{i}": i for i in range(250)} | {"lr": 0.1 + resume_step, "empty": "", "files": ["a"] * 999}
        tracker = Tracker(sys.argv[1], config, trackers=("TRACKER",), total_steps=4, resume_step=resume_step)
        hostile = {name: 0.5 for name in HOSTILE if name != "."}
        tracker.log(STEP | hostile | {"bad": float("nan"), "inf": float("inf")}, resume_step + 1)
        tracker.samples(SAMPLES, resume_step + 1)
        assert tracker.failed == [], tracker.failed
        tracker.close()
except InputError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_mlflow_gets_names_that_it_takes(name):
    """Its rule: letters, digits, _-. :/, at most 250, and no path that is another's."""
    taken = mlflow_name(name)
    assert re.fullmatch(r"[/\w.\- :]{1,250}", taken) and posixpath.normpath(taken) == taken
    assert taken[0] != "/" and taken != "." and not taken.startswith("..")
    assert mlflow_name("val/openai/gsm8k/acc/mean@4") == "val/openai/gsm8k/acc/mean_at_4"
    assert mlflow_name("reward//mean") != mlflow_name("reward/mean") == "reward/mean"


def test_mlflow_resumes_the_same_run(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="not in the requirements: pip install mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    env = os.environ | {"MLFLOW_TRACKING_URI": uri, "MLFLOW_EXPERIMENT_NAME": "it's mine"}
    done = tracked(RESUMED.replace("TRACKER", "mlflow"), tmp_path, env)
    assert done.returncode == 0, done.stderr
    client = mlflow.MlflowClient(uri)
    [experiment] = client.search_experiments(filter_string="name LIKE '%mine'")
    runs = sorted(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.start_time)
    assert [run.info.run_name for run in runs] == ["run", "run"] and runs[1].info.status == "FINISHED"
    histories = [[(x.step, x.value) for x in client.get_metric_history(r.info.run_id, "reward/mean")] for r in runs]
    assert histories == [[(1, 0.5), (3, 0.5)], [(1, 0.5)]]
    found = runs[0].data.metrics
    assert math.isnan(found["bad"]) and found["inf"] > 1e300 and found["val/x/mean_at_1"] == 0.5
    assert len(found) == len(STEP) + len(HOSTILE) + 1
    assert runs[0].data.params["lr"] == "0.1" and len(runs[0].data.params) == 253


def test_a_server_of_mlflow_that_does_not_answer_is_one_line(tmp_path):
    pytest.importorskip("mlflow", reason="not in the requirements: pip install mlflow")
    env = os.environ | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = tracked(RESUMED.replace("TRACKER", "mlflow"), tmp_path, env)
    assert done.returncode == 1 and re.search("^refused: --track mlflow: .*(timed out|Max retries)", done.stderr, re.M)


def test_swanlab_resumes_the_same_run(tmp_path):
    pytest.importorskip("swanlab", reason="not in the requirements: pip install swanlab")
    env = os.environ | {"SWANLAB_MODE": "offline", "SWANLAB_SAVE_DIR": str(tmp_path)}
    done = tracked(RESUMED.replace("TRACKER", "swanlab"), tmp_path, env)
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "run/swanlab").glob("run-*"))
    ids = [run.name.rpartition("-")[2] for run in runs]
    assert ids[0] == ids[1] != ids[2] and (tmp_path / "run/swanlab").stat().st_mode & 0o777 == 0o700
    env |= {"SWANLAB_MODE": "online", "SWANLAB_API_KEY": ""}
    done = tracked(RESUMED.replace("TRACKER", "swanlab"), tmp_path, env)
    assert done.returncode == 1 and re.search("^refused: --track swanlab: .*SWANLAB_MODE=offline", done.stderr, re.M)


def test_a_sample_has_the_prompt_that_the_model_read():
    """As templated, without padding; an image is one placeholder."""
    batch, tokenizer = rollout_batch([5, 3], [4, 2]), load_tokenizer(TOY_MODEL)
    batch.batch["token_level_scores"] = torch.zeros(2, 4)
    messages = [{"role": "user", "content": "2*3"}]
    read = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"][-5:]
    batch.batch["prompts"][0] = torch.tensor(read)
    columns = {"raw_prompt": [messages] * 2, "reward_model": [{"ground_truth": "6"}] * 2, "data_source": ["toy"] * 2}
    media = {"multi_modal_data": [{}, {"image": ["one"]}], "raw_prompt_ids": [[], read[:4]]}
    batch.non_tensor_batch |= {key: np.fromiter(values, object, count=2) for key, values in (columns | media).items()}
    assert prompt_texts(batch, tokenizer) == [tokenizer.decode(read), tokenizer.decode(read[:4])]
    del batch.non_tensor_batch["multi_modal_data"]
    texts = [row["prompt"] for row in sample_rows(batch, tokenizer, Path("none"))]
    assert texts == [tokenizer.decode(read), tokenizer.decode(batch.batch["prompts"][1][-3:])]


def test_curve(tmp_path):
    tracker = Tracker(tmp_path, {}, total_steps=60)
    tracker.curve()  # nothing logged yet
    rng = np.random.default_rng(0)
    for step in range(1, 61):
        reward, length = 1 - math.exp(-step / 20), 30 + step + 4 * rng.normal()
        tracker.log({"reward/mean": reward + 0.1 * rng.normal(), "response_length/mean": length}, step)
        if step % 10 == 0:
            name = "val/toy/mean@4"
            tracker.log({name: reward, f"{name}/ci_low": reward - 0.05, f"{name}/ci_high": reward + 0.05}, step)
    tracker.log({"reward/mean": math.nan}, 60)
    tracker.close()
    drawn = np.asarray(Image.open(tmp_path / "curve.png").convert("RGB")).astype(int)
    validation, length = (
        (np.abs(drawn - color).sum(-1) < 30).nonzero()[1] for color in ((255, 127, 14), (44, 160, 44))
    )
    assert min(len(validation), len(length)) > 100
    assert validation.max() < drawn.shape[1] // 2 < length.min()  # on the left, on the right
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 61, "rew')  # the run is still writing, or was killed
    plot_curve(tmp_path / "metrics.jsonl", tmp_path / "other.png", "run")
    assert not list(tmp_path.glob("*.tmp"))
