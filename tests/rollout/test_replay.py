"""--record and --replay: the same metrics to the bit, without an engine and scorers; and what a replay refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lib import InputError
from lib.data_proto import DataProto
from lib.distributed import World
from lib.manifest import write_manifest
from lib.rollout import Recorder, Replayer, check_recorded, forget_after
from tests.common import ROOT, SMALL, TOY_MODEL, fork, metrics, ran, with_slow

TOOLS = [
    *("--model", str(ROOT / "data/toy_tools/model"), "--train-files", str(ROOT / "data/toy_tools/val.jsonl")),
    *("--max-response-length", "48", "--multi-turn.tools", "calculator", "--multi-turn.max-turns", "3"),
]
NOTHING_SAMPLES_OR_SCORES = """
import sys
sys.modules["vllm"] = None
import lib.reward.scores as manager
import lib.rollout.hf_engine as hf_engine
def refuse(*args, **kwargs):
    raise AssertionError("a replay samples or scores")
manager.Pool = manager.load_scorer = hf_engine.HFEngine.generate = hf_engine.HFEngine.session = refuse
def score(**kwargs):
    raise AssertionError
"""
BY_CHANCE = """
import random
def score(**kwargs):
    assert random.random() > 0.1
    return {"score": random.random(), "draw": random.random()}
"""

READS = """
def score(full_prompt, prompt, *, a, **kwargs):
    assert "calculator" in full_prompt and prompt[-1]["content"] in full_prompt and full_prompt[-10:].strip()
    return a * len(full_prompt)
"""


WORLD = World(0, 1, torch.device("cpu"))


def error_of(done) -> str:
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-3000:]
    [error] = {line for line in done.stderr.splitlines() if line.startswith("error:")}
    return error


# ---- runs ----------------------------------------------------------------------------------------
REPLAYED = ["grpo 1", "grpo 2", "ppo 1", "remax 1", "dapo 2"]  # script, ranks


@pytest.mark.parametrize("case", with_slow(REPLAYED, "grpo 1", "grpo 2", "remax 1", "dapo 2"))
def test_a_replay_repeats_the_metrics_to_the_bit_and_neither_samples_nor_scores(tmp_path, case):
    """Scores are drawn by chance, so none of the two runs could find the other's again. The engine of the flags is not
    installed where it is replayed."""
    script, ranks = case.split()[0], int(case.split()[1])
    (tmp_path / "chance.py").write_text(BY_CHANCE)
    (tmp_path / "refuse.py").write_text(NOTHING_SAMPLES_OR_SCORES)
    args = [*SMALL, "--total-steps", "2", "--update-epochs", "2", "--reward", f"{tmp_path / 'chance.py'}:score"]
    ran(fork(script, tmp_path, *args, "--run-name", "live", "--record", str(tmp_path / "kept"), ranks=ranks))
    args += ["--val-reward", f"{tmp_path / 'refuse.py'}:score", "--rollout-engine", "vllm"]
    done = ran(fork(script, tmp_path, *args, "--run-name", "again", "--replay", str(tmp_path / "kept"), ranks=ranks))
    live, again = (metrics(tmp_path / name) for name in ("live", "again"))
    assert live == again and [row["step"] for row in live] == [1, 2]
    assert sum(row["reward/error_count"] for row in live) > 0
    assert "; changed: " in done.stdout and "--rollout-engine was hf, is vllm" in done.stdout

    [batch] = [DataProto.load_from_disk(path) for path in tmp_path.glob(f"kept/step_000002/rank_0_of_{ranks}/batch.*")]
    assert len(batch) == 32 // ranks and {"advantages", "loss_mask", "rollout_log_probs"} <= {*batch.batch.keys()}
    timing = json.loads((tmp_path / "live/metrics.jsonl").read_text().splitlines()[0])
    assert timing["timing_s/record"] > 0


def test_several_turns_and_a_reward_model(tmp_path):
    """With validation, which is sampled, scored and judged anew, and an estimator that compares turns."""
    judge = tmp_path / "judge"
    AutoModelForSequenceClassification.from_pretrained(TOY_MODEL, num_labels=1).save_pretrained(judge)
    AutoTokenizer.from_pretrained(TOY_MODEL).save_pretrained(judge)
    rows = Path(ROOT, "data/toy_tools/val.jsonl").read_text().splitlines()[:4]
    (tmp_path / "val.jsonl").write_text("\n".join(rows))
    (tmp_path / "read.py").write_text(READS)
    args = [*SMALL, *TOOLS, "--total-steps", "2", "--reward-model", str(judge)]
    args += ["--shadow-reward", f"{tmp_path / 'read.py'}:score", "--reward-kwargs", '{"read.score": {"a": 2.0}}']
    args += ["--adv-estimator", "gigpo"]
    args += ["--val-files", str(tmp_path / "val.jsonl"), "--val-every", "2", "--val-before-train"]
    ran(fork("grpo", tmp_path, *args, "--run-name", "live", "--record", str(tmp_path / "kept")))
    ran(fork("grpo", tmp_path, *args, "--run-name", "again", "--replay", str(tmp_path / "kept")))
    live, again = (metrics(tmp_path / name) for name in ("live", "again"))
    assert live == again and [row["step"] for row in live] == [0, 1, 2, 2]
    assert {"agent/turns_mean", "reward/reward_model/mean"} <= live[1].keys()
    clock = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[1]) for name in ("live", "again")]
    assert clock[0]["timing_s/tool_call"] == clock[1]["timing_s/tool_call"] > 0  # of the episodes, which are recorded
    assert live[1]["shadow/read.score/mean"] > 100 and live[1]["shadow/error_count"] == 0
    timed = [{key.split("/", 2)[2] for key in row if key.startswith("perf/scorer_seconds/")} for row in clock]
    assert timed[1] == {"shadow/read.score/mean", "shadow/read.score/max"}  # the others are recorded
    assert timed[0] - timed[1] == {f"{name}/{of}" for name in ("data_source", "reward_model") for of in ("mean", "max")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of three steps with a checkpoint after each, and its recording in `kept`."""
    folder = tmp_path_factory.mktemp("recorded")
    args = [*SMALL, "--total-steps", "3", "--save-every", "1", "--keep-checkpoints", "0"]
    args += ["--record", str(folder / "kept")]
    ran(fork("grpo", folder, *args, "--run-name", "run"))
    return folder, args


def test_other_losses_and_weights_of_the_scores_see_the_same_rollouts(recorded, tmp_path):
    """--config gives the flags. Only in the first step is the policy the one that sampled."""
    folder, _ = recorded
    args = ["--config", str(folder / "kept/config.json"), "--replay", str(folder / "kept"), "--lr", "3e-3"]
    args += ["--loss", "gspo", "--num-mini-batches", "2", "--reward-weights", "2", "--old-log-probs", "rollout"]
    ran(fork("grpo", tmp_path, *args, "--run-name", "other"))
    live, other = metrics(folder / "run"), metrics(tmp_path / "other")
    for before, now in zip(live, other, strict=True):
        for key in ("mean", "max", "min"):
            assert now[f"reward/{key}"] == 2 * before[f"reward/{key}"]
            assert now[f"response_length/{key}"] == before[f"response_length/{key}"]
        assert now["rollout/canary_logp_diff"] == before["rollout/canary_logp_diff"]
    drift = [row["rollout/k3"] for row in other]
    assert drift[0] < 1e-6 < 1e-4 < drift[1]


def test_a_replay_goes_on_from_a_checkpoint_of_the_recorded_run(recorded, tmp_path):
    folder, _ = recorded
    args = [*SMALL, "--total-steps", "3", "--save-every", "1", "--replay", str(folder / "kept"), "--run-name", "later"]
    args += ["--resume", str(folder / "run/checkpoints/step_000001"), "--resume-override", "replay"]
    ran(fork("grpo", tmp_path, *args))
    assert metrics(tmp_path / "later") == metrics(folder / "run")[1:]


def test_a_resumed_run_records_its_steps_again(recorded, tmp_path):
    """Those after the checkpoint, of which one was cut off. A second run does not write there."""
    folder = tmp_path / "moved"
    shutil.copytree(recorded[0], folder)
    config = json.loads((folder / "kept/config.json").read_text())
    (folder / "kept/config.json").write_text(json.dumps(config | {"recorded_by": str(folder / "run")}))

    def files() -> dict:
        """Less the scores, whose order is that in which workers answered, and the manifest with their hash."""
        return {path.relative_to(folder): path.read_bytes() for path in folder.glob("kept/step_*/*/[!sm]*")}

    before = files()
    (folder / "kept/step_000003/rank_0_of_1/manifest.json").unlink()
    shutil.copytree(folder / "kept/step_000003", folder / "kept/step_000009")
    for step in (2, 3):
        shutil.rmtree(folder / f"run/checkpoints/step_{step:06d}")
    args = [*SMALL, "--total-steps", "3", "--save-every", "1", "--keep-checkpoints", "0"]
    args += ["--record", str(folder / "kept"), "--run-name", "run", "--resume", "auto"]
    done = ran(fork("grpo", folder, *args))
    assert "kept: 3 step(s) after step 1 are deleted, to be recorded again" in done.stdout
    assert before == files() and len(before) == 6 and not (folder / "kept/step_000009").exists()


# ---- what is refused -----------------------------------------------------------------------------
REFUSED = {  # what the message says, by flags. Other prompts and rollouts: below
    "--temperature was 1.0, is 0.7. The recorded samples": ["--temperature", "0.7"],
    "--multi-turn.tools was [], is ['calculator']": TOOLS,
    "step 4 was not recorded: --total-steps 3 ends before it": ["--total-steps", "5"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_replay_refuses_is_one_line(recorded, tmp_path, message):
    args = [*SMALL, "--total-steps", "3", "--replay", str(recorded[0] / "kept"), *REFUSED[message]]
    done = fork("grpo", tmp_path, *args, "--run-name", "run")
    assert message in error_of(done) and "Traceback" not in done.stderr


def test_a_recording_is_never_written_over(recorded, tmp_path):
    folder, args = recorded
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("")
    cases = {
        f"it contains the recording of {folder / 'run'}: give a new folder": [],
        "the folder contains other files: give a new one": ["--record", str(tmp_path / "full")],
        f"{tmp_path / 'run'}: the folder contains other files": ["--record", str(tmp_path / "run")],
    }
    for message, more in cases.items():
        done = fork("grpo", tmp_path, *args, *more, "--run-name", "run")
        assert message in error_of(done)
        assert not (tmp_path / "run").exists() and len([*folder.glob("kept/step_*")]) == 3


# ---- a recorder --------------------------------------------------------------------------------------
def rollout(*prompts: int) -> DataProto:
    ids = np.fromiter(([prompt] for prompt in prompts), object, len(prompts))
    columns = {"raw_prompt_ids": ids, "uid": [f"1-{prompt}" for prompt in prompts]}
    responses = torch.tensor(prompts)[:, None] * 10
    return DataProto.from_dict({"responses": responses, "rollout_log_probs": -responses / 100}, columns)


def record_steps(folder: Path, steps: int, of: World = WORLD) -> Recorder:
    recorder = Recorder(folder, of)
    for step in range(1, steps + 1):
        recorder.begin(step)
        recorder.rollout(rollout(step), lambda step=step: rollout(step))
        items = [(0, [["ok", {"score": float(step)}]])]
        recorder.record("scores", lambda items=items: DataProto(meta_info={"items": items}))
        recorder.end(rollout(step))
    return recorder


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


STEP_2 = "step_000002/rank_0_of_1"


DAMAGES = {  # to the folder of step 2, by what the message says
    "scores_0.safetensors is not as it was saved": lambda kept: flip_a_bit(kept / "scores_0.safetensors"),
    "rollout_0.safetensors has 4 bytes": lambda kept: (kept / "rollout_0.safetensors").write_bytes(b"torn"),
    "scores_0.safetensors is missing": lambda kept: (kept / "scores_0.safetensors").unlink(),
    "it is of step_000001/rank_0_of_1": lambda kept: shutil.copytree(
        kept.parents[1] / "step_000001/rank_0_of_1", kept, dirs_exist_ok=True
    ),
    "batch.safetensors is not in manifest.json": lambda kept: write_manifest(kept, {}, of=STEP_2),
    "manifest.json is damaged": lambda kept: (kept / "manifest.json").write_text("[" * 100_000),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_step_that_is_not_as_it_was_recorded_is_named(tmp_path, message):
    record_steps(tmp_path, 2)
    DAMAGES[message](tmp_path / STEP_2)
    with pytest.raises(InputError) as error:
        check_recorded(tmp_path, range(1, 3), 1)  # sees sizes before the run starts
        replay = Replayer(tmp_path, WORLD)
        for step in (1, 2):
            replay.begin(step)
    text = str(error.value)
    assert f"--replay {tmp_path}: step 2 is not as it was recorded (" in text and message in text and "\n" not in text


def test_a_step_that_takes_other_rollouts_than_were_recorded_is_refused(tmp_path):
    """More, less, and groups of other sizes."""
    recorder = Recorder(tmp_path, WORLD)
    recorder.begin(1)
    for _ in range(2):
        recorder.rollout(rollout(1), lambda: rollout(1))
    recorder.end(rollout(1))
    replay = Replayer(tmp_path, WORLD)
    replay.begin(1)
    with pytest.raises(InputError, match="prompts of step 1 are not those recorded"):
        replay.rollout(rollout(5, 5), None, any_order=True)
    replay.begin(1)
    assert len(replay.rollout(rollout(5), None, any_order=True)) == 1
    with pytest.raises(InputError, match="step 1 took 1 of its 2 rollouts"):
        replay.end(rollout(1))
    replay.rollout(rollout(1), None)
    with pytest.raises(InputError, match="asks for rollout number 3, and 2 were recorded"):
        replay.rollout(rollout(1), None)


def test_steps_are_checked_by_number_and_by_ranks(tmp_path):
    record_steps(tmp_path, 3)
    check_recorded(tmp_path, range(1, 4), 1)
    with pytest.raises(InputError, match=r"recorded on 1 rank\(s\), this run has 2: start it on 1"):
        check_recorded(tmp_path, range(1, 4), 2)
    with pytest.raises(InputError, match="step 4 was not recorded: --total-steps 3"):
        check_recorded(tmp_path, range(1, 6), 1)
    for name in ("step_000009", "step_best", "step_000009/other"):  # such as those of a run's checkpoints
        (tmp_path / name).mkdir()
    forget_after(tmp_path, 1)
    assert (tmp_path / "step_000009/other").exists()
    with pytest.raises(InputError, match="step 2 was not recorded: start at one that was"):
        check_recorded(tmp_path, range(2, 3), 1)
    record_steps(tmp_path / "two", 1, WORLD._replace(size=2))  # the other rank was killed before its batch
    with pytest.raises(InputError, match="step 1 was not recorded"):
        check_recorded(tmp_path / "two", range(1, 2), 2)


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "step_000001").write_text("in the way of the folder")
    recorder = Recorder(tmp_path, WORLD)
    recorder.begin(1)
    with pytest.raises(InputError, match=f"--record {tmp_path}: rollout_0.safetensors of step 1 not written"):
        recorder.rollout(rollout(1), lambda: rollout(1))
    recorder.begin(2)
    image = DataProto.from_dict(non_tensors={"image": [b"pixels", object()]})
    with pytest.raises(InputError, match=r"step 2 not written: non_tensor_batch\['image'\] row 1: a value of type"):
        recorder.end(image)
