"""docs/your_own.md: its diff makes of grpo.py a script that learns and whose own state survives a resume exactly.

Where grpo.py has changed under the diff:

    python -m tests.test_your_own            applies it to the present grpo.py as patch can, and writes it back
    python -m tests.test_your_own rae.py     writes it back as the difference of grpo.py and rae.py, mended by hand
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.common import ROOT, SMALL, checkpoint_state, fork, metrics, ran
from tests.test_siblings import differences

DOC = ROOT / "docs/your_own.md"
BLOCK = re.compile(r"```diff\n(.*?)```", re.S)
OWN_ARGS = {
    "new": {"baseline_decay"},
    "missing": {"adv_estimator", "adv_kwargs", "reward_keys", "singleton", "zero_variance"},
    "different": {"prompts_per_step", "group_size"},
}
SOURCES = ("toy/left", "toy/right")


def patched(folder: Path, fuzz: int = 0) -> Path:
    """rae.py in the folder. Raises RuntimeError with what patch says where the diff does not apply."""
    script = Path(shutil.copy(ROOT / "grpo.py", folder / "rae.py"))
    done = subprocess.run(["patch", "-F", str(fuzz), str(script), str(DOC)], capture_output=True, text=True)
    if done.returncode:
        rejects = script.with_name("rae.py.rej")
        raise RuntimeError(done.stdout + done.stderr + (rejects.read_text() if rejects.exists() else ""))
    return script


def rewrite(script: Path) -> None:
    """Puts the difference of grpo.py and the script into the document."""
    command = ["diff", "-U2", "--label", "grpo.py", "--label", "rae.py", str(ROOT / "grpo.py"), str(script)]
    diff = subprocess.run(command, capture_output=True, text=True).stdout
    DOC.write_text(BLOCK.sub(lambda _: f"```diff\n{diff}```", DOC.read_text(), count=1))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script without .py, as tests.common takes it."""
    if shutil.which("patch") is None:
        pytest.skip("the program `patch` is not installed: it applies the diff of docs/your_own.md")
    folder = tmp_path_factory.mktemp("your_own")
    (folder / "data").symlink_to(ROOT / "data")  # the default model and rows lie beside the script
    try:
        return patched(folder).with_suffix("")
    except RuntimeError as error:
        problem = error
    pytest.fail(
        f"grpo.py has changed under the diff in docs/your_own.md: run `python -m tests.test_your_own`, which applies "
        f"it with fuzz and writes it back, and read what it wrote\n{problem}",
        pytrace=False,
    )


def test_the_diff_keeps_the_rules_of_a_sibling(script):
    sources = [path.read_text() for path in (ROOT / "grpo.py", script.with_suffix(".py"))]
    assert differences(*sources, "rae", OWN_ARGS) == []


def test_advantages_are_the_formula(script):
    """Two steps beside loops. A dead row changes nothing, a source that a step lacks keeps its baseline."""
    spec = importlib.util.spec_from_file_location("rae", script.with_suffix(".py"))
    rae = sys.modules["rae"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rae)
    generator, decay, baselines, expected = torch.Generator().manual_seed(0), 0.9, {}, {}
    for step, names in enumerate(["aabab", "aaaca"]):
        rewards = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        live = torch.rand(5, 4, generator=generator) < 0.6
        live[:, 1], live[step] = True, False
        got = rae.rae_advantages(rewards, live, np.array(list(names), dtype=object), baselines, decay)
        scores = {i: sum(rewards[i, t].item() for t in range(4) if live[i, t]) for i in range(5) if i != step}
        for i in range(5):
            for t in range(4):
                wanted = scores[i] - expected.get(names[i], 0.0) if live[i, t] else 0.0
                assert got[i, t].item() == pytest.approx(wanted, abs=1e-12)  # sums in another order
        for name in {names[i] for i in scores}:
            mean = np.mean([scores[i] for i in scores if names[i] == name])
            expected[name] = decay * expected.get(name, 0.0) + (1 - decay) * mean
        assert baselines == pytest.approx(expected, abs=1e-12)


def test_it_learns_and_its_baseline_follows_the_reward(script, tmp_path):
    """10 steps take greedy accuracy from 0.31 to 0.99 where it was measured; 0.7 leaves room for other roundings."""
    ran(fork(str(script), tmp_path, "--run-name", "run", "--total-steps", "10", "--save-every", "0"))
    rows = metrics(tmp_path / "run")
    accuracy = [row["val/toy/arithmetic/mean@1"] for row in rows if "val/toy/arithmetic/mean@1" in row]
    assert accuracy[0] < 0.4 and accuracy[-1] > 0.7
    steps, baseline = [row for row in rows if "reward/mean" in row], 0.0
    for row in steps:
        assert row.get("reward/baseline/toy/arithmetic", 0.0) == pytest.approx(baseline, abs=1e-6)  # fp32 rewards
        baseline = 0.95 * baseline + 0.05 * row["reward/mean"]


def test_resumed_equals_never_interrupted_bit_for_bit(script, tmp_path):
    lines = (ROOT / "data/toy/train.jsonl").read_text().splitlines()[:20]
    rows = [json.loads(line) | {"data_source": SOURCES[i % 2]} for i, line in enumerate(lines)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [*SMALL, "--group-size", "1", "--train-files", str(tmp_path / "rows.jsonl"), "--save-every", "2"]
    ran(fork(str(script), tmp_path, *args, "--run-name", "whole", "--total-steps", "4"))
    ran(fork(str(script), tmp_path, *args, "--run-name", "halves", "--total-steps", "2"))
    ran(fork(str(script), tmp_path, *args, "--run-name", "halves", "--total-steps", "4", "--resume", "auto"))

    whole, halves = (metrics(tmp_path / name) for name in ("whole", "halves"))
    assert whole == halves and [row["step"] for row in whole] == [1, 2, 3, 4]
    assert {f"reward/baseline/{source}" for source in SOURCES} <= whole[-1].keys()
    ours, theirs = (checkpoint_state(tmp_path / name / "checkpoints/step_000004") for name in ("whole", "halves"))
    weights, others = ours["actor"]["model"], theirs["actor"]["model"]
    assert weights.keys() == others.keys() and all(weights[name].equal(others[name]) for name in weights)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            rewrite(Path(sys.argv[1]) if len(sys.argv) > 1 else patched(Path(folder), fuzz=3))
        except RuntimeError as error:
            sys.exit(f"{error}\nmend a copy of grpo.py as rae.py by hand, then: python -m tests.test_your_own rae.py")
