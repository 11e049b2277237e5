"""tools/compare.py: its interval against simulated runs, its verdicts, and the folders it reads."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.common import one_line
from tools.compare import Args, main, paired_difference


# ---- statistics ----------------------------------------------------------------------------------
def simulated(rng, seeds, prompts, mean, of_seeds, of_prompts, of_rest):
    noise = of_seeds * rng.normal(size=(seeds, 1)) + of_prompts * rng.normal(size=(1, prompts))
    return mean + noise + of_rest * rng.normal(size=(seeds, prompts))


def test_with_one_score_a_seed_it_is_the_paired_t_test():
    """Student's ten patients of 1908, the additional sleep with one drug over the other: mean 1.58, s = 1.230."""
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    found = paired_difference(np.array(hours)[:, None])
    assert found[:3] == pytest.approx((1.58, 0.7001, 2.4599), abs=1e-3) and found.verdict == "more"


@pytest.mark.parametrize(
    "seeds, prompts, of_seeds, of_prompts, of_rest",
    [
        (3, 64, 0.02, 0.2, 0.5),
        (5, 1, 0.05, 0.0, 0.05),
        (5, 100, 0.0, 0.0, 0.5),  # nothing but the noise of samples
        (8, 20, 0.0, 0.4, 0.2),  # prompts outweigh seeds
        # and the other way around, where few seeds have few degrees of freedom, however many those of the prompts are
        *((seeds, 50, *noise) for seeds in (2, 3, 5) for noise in ((0.1, 0.5, 0.5), (1.0, 0.0, 0.1), (0.05, 1.0, 0.1))),
    ],
)
def test_the_interval_covers_the_true_difference(seeds, prompts, of_seeds, of_prompts, of_rest):
    rng, true, draws = np.random.default_rng(5), 0.05, 2000
    found = [
        paired_difference(simulated(rng, seeds, prompts, true, of_seeds, of_prompts, of_rest)) for _ in range(draws)
    ]
    covered = np.mean([low <= true <= high for _, low, high, _ in found])
    for mean, low, high, verdict in found:  # so that one in twenty is wrong where there is no difference
        assert low < mean < high and (verdict == "more", verdict == "less") == (low > 0, high < 0)
    assert 0.935 <= covered <= (0.99 if prompts != 50 else 1)  # 0.95, three standard errors of the draws


def test_the_seeds_it_asks_for_show_the_difference_in_four_of_five_cases():
    """Of a difference as large as its estimate: seeds whose mean is exactly 0.05 and deviation exactly 0.1."""
    few = np.array([-1.0, 0.0, 1.0])[:, None]
    verdict = paired_difference(0.05 + 0.1 * few).verdict
    needed = 3 + int(verdict.split()[0])
    rng = np.random.default_rng(3)
    shown = [paired_difference(simulated(rng, needed, 1, 0.05, 0.1, 0, 0)).verdict == "more" for _ in range(400)]
    assert verdict.endswith("more seeds needed") and 0.72 <= np.mean(shown) <= 0.88  # 0.8, four standard errors


def test_what_no_number_of_seeds_shows():
    rng = np.random.default_rng(4)
    prompts = rng.normal(size=(1, 8)) * 0.5  # the same difference with every seed: only other prompts would tell
    found = paired_difference(np.repeat(prompts, 3, 0) + 0.001 * rng.normal(size=(3, 8)))
    assert found.low < 0 < found.high and found.verdict == "more than 1000 more seeds needed"
    assert paired_difference(np.zeros((3, 8))).verdict == "more than 1000 more seeds needed"
    one = paired_difference(np.full((1, 8), 0.5))
    assert math.isnan(one.low) and one.verdict == "at least 1 more seed needed"
    low, high = (paired_difference(np.array([[0.1], [0.2], [0.15]]), confidence) for confidence in (0.9, 0.999))
    assert low.verdict == "more" and high.verdict.endswith("needed")
    assert high.high - high.low > low.high - low.low


# ---- runs ----------------------------------------------------------------------------------------
STEPS, PROMPTS = (0, 10, 20), 40


def write(folder: Path, seed: int, lr: float, gain: float = 0.01, source: str = "made/up") -> Path:
    """A run whose accuracy rises by `gain` a step; what its files have of it, in the form of the scripts'."""
    folder.mkdir()
    config = {"script": "grpo.py", "run_name": folder.name, "seed": seed, "lr": lr, "output_dir": str(folder.parent)}
    (folder / "config.json").write_text(json.dumps(config))
    rng, rows = np.random.default_rng(seed), []
    for step in STEPS:
        right = rng.random((PROMPTS, 2)) < 0.3 + gain * step
        of_all = {"step": step, "data_source": source, "prompt": "", "response": ""}
        rows += [of_all | {"row_hash": f"row{i}", "score": float(x)} for i in range(PROMPTS) for x in right[i]]
    rng.shuffle(rows)  # ranks write in any order; the steps' order follows from them
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    high = [write(tmp_path / f"a{seed}", seed, 3e-4, 0.03) for seed in (1, 2, 3)]
    return high + [write(tmp_path / f"b{seed}", seed, 1e-4, 0.005) for seed in (3, 2, 1)]


def scores(folder: Path, step: int) -> np.ndarray:
    """(prompts,), from the file."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    of = [[row["score"] for row in rows if (row["step"], row["row_hash"]) == (step, f"row{i}")] for i in range(PROMPTS)]
    return np.array(of).mean(1)


def test_the_command_pairs_seeds_and_prompts(runs, tmp_path, capsys):
    main(Args(tuple(runs), output=tmp_path / "found"))
    table = (tmp_path / "found/compare.md").read_text()
    assert capsys.readouterr().out == table
    high, low = (np.stack([scores(tmp_path / f"{name}{seed}", 20) for seed in (1, 2, 3)]) for name in "ab")
    expected = paired_difference(high - low)
    [row] = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert row[:3] == ["made/up", "40", "3"] and row[-1] == expected.verdict == "more"
    assert row[3:6] == [f"{high.mean():.3f}", f"{low.mean():.3f}", f"{expected.mean:+.3f}"]
    assert row[6] == f"{expected.low:+.3f} to {expected.high:+.3f}"
    assert "| --lr 3e-4 | --lr 1e-4 |" in table.splitlines()[0]
    found = json.loads((tmp_path / "found/compare.json").read_text())
    assert found["rows"][0]["by_seed"]["2"] == pytest.approx((high - low)[1].mean())
    assert (tmp_path / "found/compare.png").read_bytes().startswith(b"\x89PNG")


def test_other_validations_than_the_last_and_the_order_of_the_runs(runs, capsys):
    main(Args(tuple(runs[::-1])))
    assert capsys.readouterr().out.rstrip().endswith("| less |")
    for step, chosen in ((0, [0]), (10, [10]), ("mean", [0, 10, 20])):
        main(Args(tuple(runs), step=step))
        expected = np.mean([scores(run, at) for run in runs[:3] for at in chosen])
        assert f"| {expected:.3f} |" in capsys.readouterr().out


def test_each_data_source_has_a_row_and_all_of_them(tmp_path, capsys):
    for name, lr, gain in (("a", 3e-4, 0.03), ("b", 1e-4, 0.005)):
        for seed in (1, 2):
            folder = write(tmp_path / f"{name}{seed}", seed, lr, gain)
            other = write(tmp_path / "other", seed + 10, lr, gain, source="other")
            with (folder / "samples.jsonl").open("a") as file:
                file.write((other / "samples.jsonl").read_text())
            shutil.rmtree(other)
    main(Args(tuple(sorted(tmp_path.iterdir()))))
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1:3] for row in rows] == [[" made/up ", " 40 "], [" other ", " 40 "], [" all ", " 80 "]]


def edit(file: str, old: str, new: str):
    def change(runs: list[Path]) -> list[Path]:
        (runs[0] / file).write_text((runs[0] / file).read_text().replace(old, new))
        return runs

    return change


BAD_RUNS = {  # what the message says: the runs
    "has neither config.json nor metrics.jsonl": lambda runs: [runs[0].parent],
    "these have 1": lambda runs: runs[:3],
    "the same flags and the same seed": lambda runs: [*runs, shutil.copytree(runs[0], runs[0].parent / "again")],
    "only one of --lr 3e-4 and --lr 1e-4 has seed 1": lambda runs: runs[1:],
    "a1 has no scored validation samples": lambda runs: (runs[0] / "samples.jsonl").unlink() or runs,
    "samples without row_hash": edit("samples.jsonl", '"row_hash"', '"hash"'),
    "only 0 of 80 are in all": edit("samples.jsonl", ': "row', ': "line'),
    "has no seed": edit("config.json", '"seed"', '"seeds"'),
}


@pytest.mark.parametrize("error", BAD_RUNS)
def test_bad_runs_are_one_line(error, runs):
    with one_line(re.escape(error)):
        main(Args(tuple(BAD_RUNS[error](runs))))


def test_flags_out_of_range_are_one_line(runs):
    for flags, error in (({"step": 5}, "validated at 0, 10, 20"), ({"confidence": 95}, "give at least")):
        with one_line(error):
            main(Args(tuple(runs), **flags))
