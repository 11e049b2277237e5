"""docs/your_own.md: its diffs make of grpo.py scripts that differ from it in a few lines, learn, and resume exactly.

Where grpo.py has changed under the diffs:

    python -m tests.test_your_own               applies them to the present grpo.py as patch can, and writes them back
    python -m tests.test_your_own distill.py    writes one back as the difference of grpo.py and a copy mended by hand
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from data import toy
from tests.common import ROOT, SMALL, checkpoint_state, fork, metrics, ran

DOC = ROOT / "docs/your_own.md"
BLOCK = re.compile(r"```diff\n--- (\w+)\.py\n(.*?)```", re.S)
NAMES = ("distill", "best_of_n")
CHANGED = 40  # lines of a diff to grpo.py, those that go and those that come
ACCURACY = "val/toy/arithmetic/mean@1"
TEN_STEPS = ["--total-steps", "10", "--val-every", "10", "--save-every", "0", "--show-samples", "0"]


def patched(folder: Path, fuzz: int = 0) -> dict[str, Path]:
    """The scripts, in the folder. Raises RuntimeError with what patch says where a diff does not apply."""
    scripts = {name: Path(shutil.copy(ROOT / "grpo.py", folder / f"{name}.py")) for name in NAMES}
    command = ["patch", "-F", str(fuzz), "--directory", str(folder), "--input", str(DOC)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr + "".join(file.read_text() for file in folder.glob("*.rej")))
    return scripts


def difference(script: Path, context: int) -> str:
    labels = [f"--label={script.name}"] * 2
    command = ["diff", f"-U{context}", *labels, str(ROOT / "grpo.py"), str(script)]
    return subprocess.run(command, capture_output=True, text=True).stdout


def rewrite(script: Path) -> None:
    """Puts the difference of grpo.py and the script into the document, for the one there of that name."""

    def block(found: re.Match) -> str:
        return f"```diff\n{difference(script, 2)}```" if found[1] == script.stem else found[0]

    DOC.write_text(BLOCK.sub(block, DOC.read_text()))


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    if shutil.which("patch") is None:
        pytest.skip("the program `patch` is not installed: it applies the diffs of docs/your_own.md")
    try:
        return patched(tmp_path_factory.mktemp("your_own"))
    except RuntimeError as error:
        problem = error
    pytest.fail(
        f"grpo.py has changed under a diff in docs/your_own.md: run `python -m tests.test_your_own`, which applies "
        f"them with fuzz and writes them back, and read what it wrote\n{problem}",
        pytrace=False,
    )


def imported(script: Path):
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = sys.modules[script.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(script: Path, folder: Path, *args: str) -> subprocess.CompletedProcess:
    return fork(str(script.with_suffix("")), folder, *args)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The toy model after 10 steps of grpo.py: an accuracy of 0.99."""
    folder = tmp_path_factory.mktemp("teacher")
    ran(fork("grpo", folder, *TEN_STEPS, "--val-every", "0", "--no-val-before-train", "--run-name", "run"))
    return str(folder / "run/model")


@pytest.mark.parametrize("name", NAMES)
def test_a_diff_is_short_and_leaves_nothing_unused(scripts, name):
    lines = difference(scripts[name], 0).splitlines()[2:]
    assert sum(line[:1] in "+-" for line in lines) <= CHANGED
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(ROOT / "grpo.py"), "-"]
        done = subprocess.run(ruff, input=scripts[name].read_text(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- on-policy distillation ----------------------------------------------------------------------


def test_the_expected_gradient_is_that_of_the_reverse_kl(scripts):
    """Every token of the vocabulary once, weighed by its probability, beside autograd's gradient of the KL."""
    distill, generator = imported(scripts["distill"]), torch.Generator().manual_seed(0)
    logits, of_teacher = torch.randn(2, 1, 50, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_probs, teacher = logits.log_softmax(-1), of_teacher.log_softmax(-1)
    advantages = (teacher - log_probs).detach()
    args = distill.Args(teacher="", clip_ratio_c=1e9)
    losses, _ = distill.policy_loss(args, log_probs, log_probs.detach(), {"advantages": advantages})
    ours = torch.autograd.grad((log_probs.detach().exp() * losses).sum(), logits, retain_graph=True)[0]
    exact = torch.autograd.grad((log_probs.exp() * (log_probs - teacher)).sum(), logits)[0]
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-14)


def test_distillation_learns_without_a_reward(scripts, teacher, tmp_path):
    """10 steps take greedy accuracy from 0.31 to 0.99, and the KL from 0.17 to 0.01 nats, where they were measured; the
    bounds leave room for other roundings. No training row has an answer."""
    rows = [json.loads(line) for line in (toy.FOLDER / "train.jsonl").read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"reward_model": {}}) + "\n" for row in rows))
    (tmp_path / "none.py").write_text("def score(data_source, solution_str, extra_info, ground_truth=None): return 0\n")
    args = ["--teacher", teacher, "--train-files", str(tmp_path / "rows.jsonl"), "--no-export-model"]
    args += ["--val-files", str(toy.FOLDER / "val.jsonl")]
    args += ["--reward", f"{tmp_path / 'none.py'}:score", "--val-reward", "data_source", "--run-name", "run"]
    ran(start(scripts["distill"], tmp_path, *TEN_STEPS, *args))
    logged = metrics(tmp_path / "run")
    accuracy = [row[ACCURACY] for row in logged if ACCURACY in row]
    assert accuracy[0] < 0.4 and accuracy[-1] > 0.7
    kl = [row["actor/teacher_kl"] for row in logged if "actor/teacher_kl" in row]
    assert max(kl[-3:]) < min(kl[:2]) / 2
    assert {row["reward/max"] for row in logged if "reward/max" in row} == {0}


def test_a_teacher_of_other_tokens_is_refused(scripts, tmp_path):
    model = Path(shutil.copytree(toy.FOLDER / "model", tmp_path / "model"))
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text.replace('"<pad>"', '"<padding>"'))
    done = start(scripts["distill"], tmp_path, "--teacher", str(model))
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: --teacher {model}: its tokens are not those of")


def test_distillation_resumes_bit_for_bit(scripts, teacher, tmp_path):
    args = [*SMALL, "--teacher", teacher, "--save-every", "2"]
    script = scripts["distill"]
    ran(start(script, tmp_path, *args, "--run-name", "whole", "--total-steps", "4"))
    ran(start(script, tmp_path, *args, "--run-name", "halves", "--total-steps", "2"))
    ran(start(script, tmp_path, *args, "--run-name", "halves", "--total-steps", "4", "--resume", "auto"))
    whole, halves = (metrics(tmp_path / name) for name in ("whole", "halves"))
    assert whole == halves and [row["step"] for row in whole] == [1, 2, 3, 4]
    ours, theirs = (checkpoint_state(tmp_path / name / "checkpoints/step_000004") for name in ("whole", "halves"))
    weights, others = ours["actor"]["model"], theirs["actor"]["model"]
    assert weights.keys() == others.keys() and all(weights[name].equal(others[name]) for name in weights)


# ---- best of n -----------------------------------------------------------------------------------


def test_the_best_is_the_first_of_equals_and_above_0(scripts):
    module = imported(scripts["best_of_n"])
    rows = {  # group: advantages of its rows, None for a dead one; the best one's place
        "first of equals": ([-1.0, 0.1, 0.1], 1),
        "equal scores": ([0.0, 0.0, 0.0], None),
        "the best is dead": ([None, -0.5, 0.5], 2),
        "alone and right": ([1.0, None, None], 0),
        "alone and wrong": ([None, 0.0, None], None),
        "all dead": ([None, None, None], None),
    }
    uid, values, best = [], [], []
    for place in range(3):  # the rows of a group do not lie together
        for name, (advantages, first) in rows.items():
            uid.append(name)
            values.append(advantages[place])
            best.append([place == first])
    live = torch.tensor([[v is not None] * (3 + i % 5) + [False] * (4 - i % 5) for i, v in enumerate(values)])
    advantages = torch.where(live, torch.tensor([[v or 0.0] for v in values]), 9.0)  # of 3 to 7 tokens, then padding
    assert module.best_of_groups(advantages, live, torch.tensor([list(rows).index(name) for name in uid])).tolist() == best


def test_best_of_n_learns(scripts, tmp_path):
    """From 0.31 to 0.99 where it was measured."""
    ran(start(scripts["best_of_n"], tmp_path, *TEN_STEPS, "--no-export-model", "--run-name", "run"))
    logged = metrics(tmp_path / "run")
    accuracy = [row[ACCURACY] for row in logged if ACCURACY in row]
    assert accuracy[0] < 0.4 and accuracy[-1] > 0.7
    for row in logged:
        if "training/rows_in" in row:
            with_signal = round(32 * (1 - row["reward/zero_variance"]))  # groups, of which one row each trains
            assert row["training/rows_trained"] == with_signal == 256 - row["training/rows_dropped/best_of_n"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            for path in map(Path, sys.argv[1:]) if sys.argv[1:] else patched(Path(folder), fuzz=3).values():
                rewrite(path)
        except RuntimeError as error:
            sys.exit(f"{error}\nmend copies of grpo.py by hand, then: python -m tests.test_your_own NAME.py ...")
