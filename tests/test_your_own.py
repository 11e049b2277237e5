"""docs/your_own.md: its diffs make of grpo.py scripts that differ from it in a few lines, learn, and resume exactly.

Where grpo.py has changed under the diffs:

    python -m tests.test_your_own               applies them to the present grpo.py as patch can, and writes them back
    python -m tests.test_your_own distill.py    writes one back as the difference of grpo.py and a copy mended by hand
"""

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import toy
from tests.common import ROOT, SMALL, checkpoint_state, fork, metrics, ran

DOC = ROOT / "docs/your_own.md"
BLOCK = re.compile(r"```diff\n--- (\w+)\.py\n(.*?)```", re.S)
METHODS = {"distill": 40, "best_of_n": 40, "self_distill": 50, "chord": 60}  # most lines that go and come
TOGETHER = ("advantage", "loss", "temperature", "token_reward", "metric", "optimizer")  # they change different lines
EDITS = (*TOGETHER, "length", "second_policy")
ACCURACY = "val/toy/arithmetic/mean@1"
TEN_STEPS = ["--total-steps", "10", "--val-every", "10", "--save-every", "0"]


def patched(folder: Path, fuzz: int = 0) -> dict[str, Path]:
    """The scripts, in the folder. Raises RuntimeError with what patch says where a diff does not apply."""
    scripts = {name: Path(shutil.copy(ROOT / "grpo.py", folder / f"{name}.py")) for name in (*METHODS, *EDITS)}
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


def changed_lines(script: Path) -> tuple[int, int]:
    """(lines that go, lines that come)"""
    lines = difference(script, 0).splitlines()[2:]
    return sum(line[0] == "-" for line in lines), sum(line[0] == "+" for line in lines)


@pytest.mark.parametrize("name", (*METHODS, *EDITS))
def test_a_diff_is_short_and_leaves_nothing_unused(scripts, name):
    if name in METHODS:
        assert sum(changed_lines(scripts[name])) <= METHODS[name]
    else:
        assert f"| `{name}.py`: {max(changed_lines(scripts[name]))} |" in DOC.read_text()
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_copy_that_trains_rows_of_older_weights_again(tmp_path, ranks):
    """Half of each step are the rows of the step before. On two ranks they are of other widths than the other rank's.
    What compares engine and trainer looks at the new ones only, and accuses nobody."""
    text = (ROOT / "grpo.py").read_text()
    for line, more in {
        "    for step in run.steps():\n": "    old = DataProto()\n    for step in run.steps():\n",
        "        batch = rollouts.generate(prompts, n=args.group_size)  # (B, P + T)\n"
        "": "        new = rollouts.generate(prompts, n=2)\n"
        "        batch, old = concat_rows([old, new]), new.select()\n",
        "from lib.model import Policy": "from lib.rollout import concat_rows\nfrom lib.model import Policy",
    }.items():
        assert text.count(line) == 1
        text = text.replace(line, more)
    (tmp_path / "replay.py").write_text(text)
    flags = [*SMALL, "--lr", "3e-3", "--total-steps", "3", "--run-name", "run"]
    ran(fork(str(tmp_path / "replay"), tmp_path, *flags, ranks=ranks))
    logged = metrics(tmp_path / "run")
    assert [row["training/rows_in"] for row in logged] == [16, 32, 32]
    for row in logged:
        assert row["rollout/logp_diff_max"] < 1e-4 and not [name for name in row if name.startswith("faults/")]


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_copy_with_groups_of_any_size(tmp_path, ranks):
    """All faults, alarms and counts hold, and the record replays to the bit."""
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
    done = fork(script, tmp_path, *flags, "--run-name", "no", "--old-log-probs", "rollout", ranks=ranks)
    assert done.returncode == 2 and "given tokens that are trained have no log-probs of an engine" in done.stderr


def test_an_edited_advantage_and_an_edited_loss(scripts):
    """Against loops in float64."""
    module, generator = imported(scripts["advantage"]), torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    mask, group = torch.tensor([[True]] * 5 + [[False]]), torch.tensor([0, 1, 0, 1, 0, 1])
    ours, _ = module.grpo_advantages(module.Args(), rewards, mask, {"group": group})
    members = [[i for i in range(5) if group[i] == g] for g in (0, 1)]
    centred = [rewards[i] - sum(rewards[j] for j in members[group[i]]) / len(members[group[i]]) for i in range(5)]
    std = (sum((c - sum(centred) / 5) ** 2 for c in centred) / 4) ** 0.5
    torch.testing.assert_close(ours[:5], torch.stack(centred) / (std + 1e-6))
    assert ours[5] == 0

    module = imported(scripts["loss"])
    new, old, advantages = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64)
    new.requires_grad_()
    losses, _ = module.policy_loss(module.Args(), new, old, {"advantages": advantages})
    [gradient] = torch.autograd.grad(losses.sum(), new)
    for i in range(2):
        for j in range(5):
            weight = min(math.exp((new[i, j] - old[i, j]).item()), 1.2)
            assert gradient[i, j].item() == pytest.approx(-advantages[i, j].item() * weight)


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
    (tmp_path / "opponent.py").write_text(re.search(r"```python\n(.*?)```", DOC.read_text(), re.S)[1])
    rows = [json.loads(line) for line in (toy.FOLDER / "val.jsonl").read_text().splitlines()[:16]]
    for row in rows:
        row["extra_info"]["interaction_kwargs"] = {"model": str(toy.FOLDER / "model")}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [*SMALL, "--train-files", str(tmp_path / "rows.jsonl"), "--max-response-length", "64"]
    args += ["--multi-turn.interaction", f"{tmp_path / 'opponent.py'}:Opponent", "--prompts-per-step", "4"]
    ran(fork("grpo", tmp_path, *args, "--total-steps", "1", "--run-name", "run"))
    [row] = metrics(tmp_path / "run")
    assert row["agent/turns_mean"] > 1.5 and row["agent/finish/error"] == 0


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


@pytest.mark.slow
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


def test_distillation_resumes_bit_for_bit(scripts, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(toy.FOLDER / "model")
    for p in model.parameters():
        p.data *= 1.1
    other = shutil.copytree(toy.FOLDER / "model", tmp_path / "teacher")
    model.save_pretrained(other)
    args = [*SMALL, "--teacher", str(other), "--save-every", "1", "--keep-checkpoints", "0", "--total-steps", "3"]
    script = scripts["distill"]
    ran(start(script, tmp_path, *args, "--run-name", "whole"))
    first = str(tmp_path / "whole/checkpoints/step_000001")
    ran(start(script, tmp_path, *args, "--run-name", "rest", "--resume", first))
    whole, rest = (metrics(tmp_path / name) for name in ("whole", "rest"))
    assert whole[1:] == rest and [row["step"] for row in whole] == [1, 2, 3] and rest[-1]["actor/teacher_kl"] > 0.001
    ours, theirs = (checkpoint_state(tmp_path / name / "checkpoints/step_000003") for name in ("whole", "rest"))
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
    assert (
        module.best_of_groups(advantages, live, torch.tensor([list(rows).index(name) for name in uid])).tolist() == best
    )


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


# ---- self-distillation -----------------------------------------------------------------------------


def test_the_teacher_scores_the_same_tokens_after_the_answer(scripts):
    """Against each row alone, in float64."""
    module = imported(scripts["self_distill"])
    model = AutoModelForCausalLM.from_pretrained(toy.FOLDER / "model", dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(toy.FOLDER / "model")
    responses = [tokenizer.encode(text) for text in ("=12", "7,12,4=427", "=")]
    T = max(map(len, responses))
    mask = torch.tensor([[1] * len(ids) + [0] * (T - len(ids)) for ids in responses])
    padded = torch.tensor([ids + [0] * (T - len(ids)) for ids in responses])
    questions, answers = ["137+285", "1+2", "20+30"], ["422", "3", "50"]
    tensors = {"responses": padded, "response_mask": mask, "attention_mask": torch.cat([mask[:, :1], mask], 1)}
    objects = {
        "raw_prompt": [[{"role": "user", "content": question}] for question in questions],
        "reward_model": [{"ground_truth": answer} for answer in answers],
    }
    data = SimpleNamespace(tokenizer=tokenizer, chat_template_kwargs={"add_generation_prompt": True})
    t = module.with_answer(module.DataProto.from_dict(tensors, objects), data).batch
    with torch.no_grad():
        logits = model(**{name: t[name] for name in ("input_ids", "attention_mask", "position_ids")}).logits
    ours = logits[:, -T - 1 : -1].log_softmax(-1).gather(2, padded[:, :, None])[:, :, 0]  # (B, T)
    for i, ids in enumerate(responses):
        text = f"<|im_start|>user\n{questions[i]}\nAnswer: {answers[i]}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(text)
        with torch.no_grad():
            alone = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert ours[i, : len(ids)].tolist() == pytest.approx([alone[j, token].item() for j, token in enumerate(ids)])


def test_self_distillation_trains_on_the_kl_to_the_teacher(scripts, tmp_path):
    """With one update a step the ratio is 1, so the loss is the mean log ratio. Rewards count for nothing."""
    ran(start(scripts["self_distill"], tmp_path, *SMALL, "--total-steps", "2", "--run-name", "run"))
    first, second = metrics(tmp_path / "run")
    for row in (first, second):
        assert row["actor/pg_loss"] == pytest.approx(row["actor/teacher_kl"], rel=1e-5)
        assert row["actor/teacher_kl"] > 1 and row["actor/grad_norm"] > 0  # the toy model has never seen an answer
    assert first["actor/teacher_kl"] != second["actor/teacher_kl"]


# ---- SFT mixed with RL -----------------------------------------------------------------------------


@pytest.mark.parametrize("phi", [False, True])
def test_the_gradient_of_demonstrations(scripts, monkeypatch, phi):
    """Of two micro-batches, against a loop in float64."""
    chord, generator = imported(scripts["chord"]), torch.Generator().manual_seed(0)
    log_probs = (-torch.rand(4, 3, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]])
    demos = chord.DataProto.from_dict({"response_mask": mask, "row": torch.arange(4)})
    actor = SimpleNamespace(
        log_probs=lambda micro: (log_probs[micro.batch["row"]], None), backward=torch.Tensor.backward
    )
    monkeypatch.setattr(chord, "micro_batches", lambda batch, _: [batch[:2], batch[2:]])
    monkeypatch.setattr(chord, "global_counts", lambda mask: (6, 3))
    chord.imitate(chord.Args(phi=phi), actor, demos, 0.25)
    for i in range(4):
        for j in range(3):
            p = math.exp(log_probs[i, j].item())
            weight = p * (1 - p) if phi else 1
            assert log_probs.grad[i, j].item() == pytest.approx(-0.25 * weight * mask[i, j].item() / 6)


def test_chord_learns_the_demonstrations(scripts, tmp_path):
    """Every second row has one. The loss falls with mu 1, where rewards count for nothing."""
    rows = [json.loads(line) for line in (toy.FOLDER / "val.jsonl").read_text().splitlines()]
    for row in rows[::2]:
        row["extra_info"]["answer"] = toy.worked_response(*map(int, row["prompt"][0]["content"].split("+")))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [*SMALL, "--train-files", str(tmp_path / "rows.jsonl"), "--mu", "1", "--mu-end", "1"]
    ran(start(scripts["chord"], tmp_path, *args, "--total-steps", "4", "--run-name", "run"))
    logged = metrics(tmp_path / "run")
    assert logged[-1]["actor/sft_nll"] < 0.9 * logged[0]["actor/sft_nll"]
    assert [row["actor/loss"] for row in logged] == [0] * 4


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            for path in map(Path, sys.argv[1:]) if sys.argv[1:] else patched(Path(folder), fuzz=3).values():
                rewrite(path)
        except RuntimeError as error:
            sys.exit(f"{error}\nmend copies of grpo.py by hand, then: python -m tests.test_your_own NAME.py ...")
