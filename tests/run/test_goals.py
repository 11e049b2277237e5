"""--keep-best, --stop-when and --max-seconds."""

import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grpo
from lib import InputError
from lib.args import RunArgs, StopWhen, ValidationArgs
from lib.run import open_run
from lib.run.goals import Goals, check_names
from lib.run.validation import confidence_interval
from tests.common import ROOT, SMALL, TOY_MODEL, fork, metrics, one_line, ran, run_ranks
from tools.export import find_checkpoint

MEAN = "val/toy/arithmetic/mean@1"


# ---- the bound -----------------------------------------------------------------------------------
@pytest.mark.parametrize("right, n", [(0, 1), (1, 1), (7, 30), (299, 1000)])
def test_the_bound_of_zeros_and_ones_is_wilsons(right, n):
    """The roots pi of (p - pi)^2 = z^2 pi (1 - pi) / n. rtol 1e-9: numpy finds roots as eigenvalues."""
    z, p = 1.96, right / n
    expected = np.sort(np.roots([1 + z * z / n, -(2 * p + z * z / n), p * p]))
    low, high = confidence_interval([[1.0]] * right + [[0.0]] * (n - right))
    assert [low, high] == pytest.approx(expected, rel=1e-9, abs=1e-12) and 0 <= low <= p <= high <= 1
    if right < n:
        scores = confidence_interval([[1.0]] * right + [[-1.0]] * (n - right))  # math_dapo's
        assert scores == pytest.approx((2 * low - 1, 2 * high - 1), abs=1e-12)


def test_the_bound_of_other_scores_is_by_standard_error():
    prompts = np.random.default_rng(0).normal(size=(40, 3)).tolist()
    means = [statistics.fmean(prompt) for prompt in prompts]
    mean, half = statistics.fmean(means), 1.96 * statistics.stdev(means) / 40**0.5
    assert confidence_interval(prompts) == pytest.approx((mean - half, mean + half), rel=1e-12)
    assert confidence_interval([[0.5, 0.7]]) is None  # a single prompt has no spread
    scores = [[1.0], [0.0], [1.0], [1.0]]  # n copies of each score would narrow the interval
    assert confidence_interval([4 * prompt for prompt in scores]) == confidence_interval(scores)


# ---- flags ---------------------------------------------------------------------------------------


def test_an_expression_is_one_comparison():
    for compare, holding in ((">=", [1, 2]), ("<=", [0, 1]), (">", [2]), ("<", [0])):
        condition = StopWhen.parse(f"reward/mean{compare}1e0")
        assert condition == ("reward/mean", compare, 1.0) and [x for x in range(3) if condition.holds(x)] == holding
        assert not condition.holds(float("nan"))
    for text in "val/x/mean@1", "a >= 1 and b >= 2", "a == 1", "a > 1e", "a >= inf", "val/x >= ", ">= 0.9":
        with one_line("give one comparison such as"):
            RunArgs(stop_when=text).check()


WITHOUT = {  # what is said, by the run's flags
    "--keep-best reward/mean: give a mean of validation, such as val/x/mean@1": {"keep_best": "reward/mean"},
    "--keep-best val/x/mean@1 needs validations during training": {"keep_best": "val/x/mean@1"},
    "--stop-when 'val/x/mean@1 > 0' needs validation": {"stop_when": "val/x/mean@1 > 0"},
}


@pytest.mark.parametrize("message", WITHOUT)
@pytest.mark.parametrize("validation", [{}, {"val_files": ("x",), "val_every": 0, "val_before_train": False}])
def test_a_run_without_validation_has_neither(message, validation):
    args = grpo.Args(run=RunArgs(**WITHOUT[message]), validation=ValidationArgs(**validation))
    args.model.model, args.data.train_files = TOY_MODEL, (str(ROOT / "data/toy/val.jsonl"),)
    with one_line(message):
        args.run.check()
        args.check()


def test_a_metric_that_never_appears_is_named_with_those_near_it():
    goals = Goals(RunArgs(stop_when="val/toy/mean@4 > 0", keep_best="val/toy/mean@4"))
    assert goals.reached({"reward/mean": 1.0, "training/rows_in": 8}) is None  # no validation yet
    with one_line("--keep-best val/toy/mean@4: no such metric of validation; near: val/toy/mean@1, "):
        goals.better(None, 1, {"val/toy/mean@1": 0.5, "val/toy/mean@1/lower_bound": 0.4, "val/unscored": 0})


@pytest.mark.parametrize("name", ["reward/mena", "agent/failures/timeout", "val/toy/tool_bonus/mean@1"])
def test_a_run_goes_on_without_a_metric_that_only_some_steps_have(name, capsys):
    """Whether it is one, or a wrong name, nobody knows before: a note says so once, also after a resume."""
    training, rows = {"reward/mean": 1.0, "training/rows_in": 8}, {"val/toy/mean@1": 0.5, "val/unscored": 0}
    for _ in range(2):
        goals = Goals(RunArgs(stop_when=f"{name} > 0"))
        assert [goals.reached(metrics) for metrics in (training, rows, training, rows)] == [None] * 4
        said = capsys.readouterr().out
        assert said.startswith(f"note: --stop-when '{name} > 0': no such metric of ") and len(said.splitlines()) == 1
        assert "near: reward/mean;" in said or name != "reward/mena"
        assert goals.reached(training | rows | {name: 0.25}) == 0.25 and goals.reached(training | rows) is None


def test_a_mean_that_no_validation_has_is_refused_before_a_model_loads():
    samples = {"toy": 1, "other/data": 4}
    for name in "val/toi/mean@1", "val/toy/mean@2", "val/toy/acc/mean@4", "val/toy/pass@4":
        for flag in {"keep_best": name}, {"stop_when": f"{name}<1"}:
            with one_line(f"{name}.*: no such metric of validation; near: .*val/toy/mean@1"):
                check_names(RunArgs(**flag), samples)
    for name in "val/toy/mean@1", "val/toy/acc/mean@1", "val/other/data/mean@4", "val/other/data/pass@2":
        check_names(RunArgs(keep_best=name, stop_when=f"{name}/ci_low > 0.5"), samples)
    check_names(RunArgs(stop_when="val/unscored > 0"), samples)


# ---- the best checkpoint -------------------------------------------------------------------------
def part_of_run(world, folder: Path, bounds: dict[int, float | None], flags: dict) -> list[list]:
    """Steps whose validations have these bounds (None: not validated): [checkpoints, best] after each."""
    how = {"keep_best": MEAN, "keep_checkpoints": 2, "save_every": 2, "export_model": False, "stage_timeout": 0}
    how |= {"output_dir": str(folder), "total_steps": max(bounds)} | flags
    run, seen = open_run(grpo.Args(run=RunArgs(**how)), world, grpo.__file__), []
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    how = {"scheduler": scheduler, "loss_scale": None, "host_state": None}
    models = {"m": SimpleNamespace(module=module, optimizer=optimizer, **how)}
    run.load(models, {})
    for step in run.steps():
        run.tracker.log({"reward/mean": 0.0, "training/rows_in": 1}, step)
        if (bound := bounds[step]) is not None:
            run.tracker.log({MEAN: bound + 0.1, f"{MEAN}/lower_bound": bound}, step)
        run.save(step, models, {})
        run._wait_for_writers()
        saved = sorted(int(path.name[5:]) for path in (run.folder / "checkpoints").glob("step_*"))
        seen.append([saved, run.best and run.best["step"]])
    run.close()
    return seen


def steps(folder: Path, bounds: dict, resume: str = "never", name: str = "run", **flags) -> list[list]:
    [seen] = run_ranks(1, part_of_run, folder, bounds, {"resume": resume, "run_name": name} | flags)
    return seen


def test_the_best_stays_besides_the_newest(tmp_path, capfd):
    """--save-every 2 --keep-checkpoints 2. Step 3 is better than 1 and 5 only equal to it; 4 is not validated."""
    bounds = {1: 0.2, 2: 0.1, 3: 0.5, 4: None, 5: 0.5, 6: 0.4, 7: 0.1, 8: 0.3}
    first = steps(tmp_path, {step: bounds[step] for step in range(1, 7)})
    assert first == [[[1], 1], [[1, 2], 1], [[2, 3], 3], [[3, 4], 3], [[3, 4], 3], [[3, 4, 6], 3]]
    assert f"best checkpoint: {tmp_path}/run/checkpoints/step_000003 ({MEAN} 0.600, " in capfd.readouterr().out
    assert find_checkpoint(tmp_path / "run", "best").name == "step_000003"
    shutil.copytree(tmp_path / "run", tmp_path / "copy")

    assert steps(tmp_path, bounds, "auto") == [[[3, 4, 6], 3], [[3, 6, 8], 3]]  # as if it had not been interrupted
    # another run starts with no best of its own, and leaves that of the first
    branch = steps(tmp_path, {7: 0.1, 8: 0.05}, str(tmp_path / "copy/checkpoints/step_000006"), "branch")
    assert branch == [[[7], 7], [[7, 8], 7]]
    assert "step 3, the best so far, is not in this run: it begins anew" in capfd.readouterr().out
    # of another metric the bound says nothing
    assert steps(tmp_path, {7: 0.1}, "auto", "copy", keep_best="", save_every=1) == [[[6, 7], None]]
    with pytest.raises(InputError, match=r"--step best: .*copy has no best checkpoint: it ran without --keep-best"):
        find_checkpoint(tmp_path / "copy", "best")


# ---- early stopping ------------------------------------------------------------------------------
def test_a_run_ends_after_the_step_in_which_the_condition_holds(tmp_path):
    """As after its last: with a validation, a checkpoint, the export and the last lines. A resume trains no further."""
    rows = (ROOT / "data/toy/val.jsonl").open().readlines()[:8]
    (tmp_path / "few.jsonl").write_text("".join(rows))
    flags = [*SMALL, "--val-every", "50", "--val-files", str(tmp_path / "few.jsonl"), "--save-every", "50"]
    flags += ["--warmup-steps", "4", "--lr", "4e-4", "--export-model", "--run-name", "run", "--total-steps", "9"]
    done = ran(fork("grpo", tmp_path, *flags, "--stop-when", "actor/lr >= 2e-4"))
    assert "--stop-when 'actor/lr >= 2e-4': it is 0.0002 after step 2, the last" in done.stdout
    run = tmp_path / "run"
    assert [row["step"] for row in metrics(run) if "reward/mean" in row] == [1, 2]
    assert [row["step"] for row in metrics(run) if MEAN in row] == [2]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    assert (run / "model/model.safetensors").exists() and "everything else: " in done.stdout

    done = ran(fork("grpo", tmp_path, *flags, "--stop-when", f"{MEAN} >= 0", "--resume", "auto"))
    assert "after step 2, the last" in done.stdout and metrics(run)[-1]["step"] == 2  # whose validation has that too
    done = ran(fork("grpo", tmp_path, *flags, "--resume", "auto", "--max-seconds", "1"))
    assert "--max-seconds 1: step 3 is the last" in done.stdout  # the least that a run trains
    assert metrics(run)[-1]["step"] == 3 and MEAN in metrics(run)[-1]
    assert max(path.name for path in (run / "checkpoints").iterdir()) == "step_000003"


def test_what_follows_the_last_step_fits_in_the_time():
    """Beside these seconds the age of this process is nothing."""
    goals = Goals(RunArgs(max_seconds=100e3))
    goals.took("step", 20e3)
    assert not goals.out_of_time(validates=True)  # 20 of the next step, and as much for validation, save and export
    goals.took("validation", 45e3)
    assert goals.out_of_time(validates=True) and not goals.out_of_time(validates=False)
    goals.took("save", 45e3)
    assert goals.out_of_time(validates=False)
