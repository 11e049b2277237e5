"""docs/your_own.md: its small edits of grpo.py apply, and do what the page says. Whole methods: tests/papers/.

Where grpo.py has changed under the diffs:

    python -m tests.test_your_own                 applies them to the present grpo.py as patch can, and writes them back
    python -m tests.test_your_own advantage.py    writes one back as the difference of grpo.py and a copy mended by hand
"""

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from data import toy
from tests.common import ROOT, SMALL, checkpoint_state, fork, imported, metrics, ran
from tests.reference_formulas import mean, stdev
from tools.paper import changed_lines

DOC = ROOT / "docs/your_own.md"
BLOCK = re.compile(r"```diff\n--- (\w+)\.py\n(.*?)```", re.S)
TOGETHER = ("advantage", "loss", "temperature", "token_reward", "metric", "optimizer")  # they change different lines
EDITS = (*TOGETHER, "length", "second_policy")


def patched(folder: Path, fuzz: int = 0) -> dict[str, Path]:
    """The scripts, in the folder. Raises RuntimeError with what patch says where a diff does not apply."""
    scripts = {name: Path(shutil.copy(ROOT / "grpo.py", folder / f"{name}.py")) for name in EDITS}
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


def start(script: Path, folder: Path, *args: str) -> subprocess.CompletedProcess:
    return fork(str(script.with_suffix("")), folder, *args)


@pytest.mark.parametrize("name", EDITS)
def test_a_diff_is_short_and_leaves_nothing_unused(scripts, name):
    assert f"| `{name}.py`: {changed_lines(difference(scripts[name], 0))} |" in DOC.read_text()
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(ROOT / "grpo.py"), "-"]
        done = subprocess.run(ruff, input=scripts[name].read_text(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- edits ---------------------------------------------------------------------------------------
def test_six_edits_run_together(scripts, tmp_path):
    """One run shows all of them."""
    script = Path(shutil.copy(ROOT / "grpo.py", tmp_path / "edited.py"))
    for name in TOGETHER:
        patch = ["patch", "-F", "0", str(script)]
        subprocess.run(patch, input=difference(scripts[name], 1), text=True, check=True, capture_output=True)
    ran(start(script, tmp_path, *SMALL, "--total-steps", "2", "--save-every", "2", "--run-name", "run"))
    logged = metrics(tmp_path / "run")
    assert [row["rollout/temperature"] for row in logged] == pytest.approx([1.0, 0.8])
    for row in logged:
        assert row["rollout/logp_diff_max"] < 1e-4  # the log-probs have the temperature, too
        assert row["reward/min"] < 0 and 0 < row["actor/unlikely"] < 0.2
    state = checkpoint_state(tmp_path / "run/checkpoints/step_000002")["actor"]["optim"]
    assert any("momentum_buffer" in name for name in str(state).split("'"))


ANY_ROWS = {  # groups of two to six rows, on one rank more than on the other; two roles; demonstrations; old rows
    "        batch = rollouts.generate(prompts, n=args.group_size)  # (B, P + T)\n": """\
        first = rollouts.generate(prompts, n=2)
        more = rollouts.generate(prompts[: 1 - world.rank], n=4)
        words = inputs.tokenizer.batch_decode(first.batch["responses"][::2, :3], skip_special_tokens=True)
        asked = [[{"role": "user", "content": f"{word}+1="}] for word in words]
        solved = rollouts.generate(rollouts.new_prompts(first[::2], asked, role="solver"), n=2)
        answers = [inputs.tokenizer.encode(own["ground_truth"]) for own in prompts.non_tensor_batch["reward_model"]]
        batch = concat_rows([first, more, solved, rollouts.given(prompts, answers), old])
        old = concat_rows([first[:2]])
""",
    "    for step in run.steps():\n": "    old = DataProto()\n    for step in run.steps():\n",
    "from lib.model import Policy": "from lib.rollout import concat_rows\nfrom lib.model import Policy",
}


def test_a_copy_with_groups_of_any_size(tmp_path, ranks=2):
    """All faults, alarms and counts hold, and the record replays to the bit. What compares engine and trainer looks at
    new rows only, and accuses nobody."""
    text = (ROOT / "grpo.py").read_text()
    for line, more in ANY_ROWS.items():
        assert text.count(line) == 1
        text = text.replace(line, more)
    (tmp_path / "any_rows.py").write_text(text)
    flags = [*SMALL, "--num-mini-batches", "3", "--prompts-per-step", "6", "--lr", "3e-3", "--total-steps", "2"]
    flags += ["--micro-batch-tokens", "200"]
    script, record = str(tmp_path / "any_rows"), str(tmp_path / "record")
    ran(fork(script, tmp_path, *flags, "--run-name", "run", "--record", record, ranks=ranks))
    ran(fork(script, tmp_path, *flags, "--run-name", "again", "--replay", record, ranks=ranks))
    logged, replayed = metrics(tmp_path / "run"), metrics(tmp_path / "again")
    assert logged == replayed
    assert [row["training/rows_in"] for row in logged] == [6 * 2 + 4 + 6 * 2 + 6, 6 * 2 + 4 + 6 * 2 + 6 + 2 * ranks]
    for row in logged:
        assert row["rollout/logp_diff_max"] < 1e-4 and not [name for name in row if name.startswith("faults/")]
        assert row["training/skipped_updates"] == 0 and "training/empty_updates" not in row


def test_an_edited_advantage_and_an_edited_loss(scripts):
    """Against loops in float64."""
    module, generator = imported(scripts["advantage"]), torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    mask, group = torch.tensor([[True]] * 5 + [[False]]), torch.tensor([0, 1, 0, 1, 0, 1])
    ours, _ = module.grpo_advantages(module.Args(), rewards, mask, {"group": group})
    R = rewards[:5, 0].tolist()
    centred = [R[i] - mean(R[i % 2 :: 2]) for i in range(5)]
    assert ours[:, 0].tolist() == pytest.approx([c / (stdev(centred) + 1e-6) for c in centred] + [0])

    module = imported(scripts["loss"])
    new, old, advantages = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64)
    new.requires_grad_()
    losses, _ = module.policy_loss(module.Args(), new, old, {"advantages": advantages})
    [gradient] = torch.autograd.grad(losses.sum(), new)
    for ours, p, q, advantage in zip(*(x.flatten().tolist() for x in (gradient, new, old, advantages))):
        assert ours == pytest.approx(-advantage * min(math.exp(p - q), 1.2))


def test_a_schedule_of_the_response_length_resumes_exactly(scripts, tmp_path):
    """The limit of each step bounds its responses, and is the one by which the scorer finds them overlong."""
    args = [*SMALL, "--max-response-length", "10", "--total-steps", "4", "--save-every", "2", "--keep-checkpoints", "0"]
    args += ["--reward", f"{ROOT}/rewards/overlong.py:compute_score", "--reward-kwargs", '{"overlong_buffer": 2}']
    ran(start(scripts["length"], tmp_path, *args, "--run-name", "whole"))
    first = str(tmp_path / "whole/checkpoints/step_000002")
    ran(start(scripts["length"], tmp_path, *args, "--run-name", "rest", "--resume", first))
    whole, rest = (metrics(tmp_path / name) for name in ("whole", "rest"))
    assert [row["rollout/max_response_length"] for row in whole] == [2, 5, 7, 10]
    assert [row["response_length/max"] for row in whole] == [2, 5, 7, 10]
    for row in whole:
        # a response that the limit cut has -1, one that ends at the limit or a token before it -1 or -0.5
        assert row["response_length/clip_ratio"] > 0
        assert -row["reward/overlong_penalty/mean"] >= row["response_length/clip_ratio"]
    assert whole[2:] == rest and len(rest) == 2


def test_a_second_policy_trains_on_the_same_batch(scripts, tmp_path):
    args = [*SMALL, "--old-log-probs", "rollout", "--total-steps", "2", "--save-every", "2", "--run-name", "run"]
    ran(start(scripts["second_policy"], tmp_path, *args))
    first, second = metrics(tmp_path / "run")
    assert first["twin/lr"] == first["actor/lr"] / 10
    assert first["twin/pg_loss"] == first["actor/pg_loss"]  # the same weights, the same responses
    assert second["twin/ppo_kl"] != second["actor/ppo_kl"] == pytest.approx(0, abs=1e-5)
    state = checkpoint_state(tmp_path / "run/checkpoints/step_000002")
    weights, others = state["actor"]["model"], state["twin"]["model"]
    assert weights.keys() == others.keys() and not any(weights[name].equal(others[name]) for name in weights)


def test_self_play_against_a_frozen_model(tmp_path):
    rows = [json.loads(line) for line in (toy.FOLDER / "val.jsonl").read_text().splitlines()[:16]]
    for row in rows:
        row["extra_info"]["interaction_kwargs"] = {"model": str(toy.FOLDER / "model")}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [*SMALL, "--train-files", str(tmp_path / "rows.jsonl"), "--max-response-length", "64"]
    args += ["--multi-turn.interaction", f"{ROOT / 'tests/agent/opponent.py'}:Opponent", "--prompts-per-step", "4"]
    ran(fork("grpo", tmp_path, *args, "--total-steps", "1", "--run-name", "run"))
    [row] = metrics(tmp_path / "run")
    assert row["agent/turns_mean"] > 1.5 and row["agent/finish/error"] == 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            for path in map(Path, sys.argv[1:]) if sys.argv[1:] else patched(Path(folder), fuzz=3).values():
                rewrite(path)
        except RuntimeError as error:
            sys.exit(f"{error}\nmend copies of grpo.py by hand, then: python -m tests.test_your_own NAME.py ...")
