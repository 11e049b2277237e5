"""The four scripts on the embedded task with images. Its rows and its start: test_toy.py."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from data import toy_vision
from tests.common import TOY_MODEL, fork, metrics, ran, unexplained_metrics, with_slow
from tests.scripts.test_scripts import assert_trained_alike

MODEL = toy_vision.FOLDER / "model"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """flags(blank=False, count=32): those of a small run, on held-out rows with their images or with white ones. Each
    row is read, with its image, when a run starts."""

    @functools.cache
    def flags(blank: bool = False, count: int = 32) -> list[str]:
        file = tmp_path_factory.mktemp("rows") / "val.jsonl"
        _, rows = toy_vision.make_rows(0, count, blank=blank)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = ["--train-files", str(file), "--val-files", str(file)]
        sizes = ["--prompts-per-step", "8", "--group-size", "4", "--micro-batch-tokens", "400"]
        return ["--model", str(MODEL), *files, *sizes, "--val-every", "0", "--no-val-before-train", "--save-every", "0"]

    return flags


@pytest.mark.parametrize("script", with_slow(["grpo", "ppo", "remax", "dapo"], "grpo", "remax", "dapo"))
def test_every_script_trains_the_whole_model_and_exports_it(tmp_path, flags, script):
    ran(fork(script, tmp_path, *flags(), "--run-name", "run", "--total-steps", "2", "--kl-coef", "0.01"))
    rows = [row for row in metrics(tmp_path / "run") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["rollout/logp_diff_max"] < 1e-4  # it trains on what the engine saw
    assert unexplained_metrics(tmp_path / "run", "metrics.md") == []
    start, model = (AutoModelForImageTextToText.from_pretrained(path) for path in (MODEL, tmp_path / "run/model"))
    for name, p in start.named_parameters():
        assert not torch.equal(p, model.get_parameter(name)), name
    exported, ours = (AutoProcessor.from_pretrained(path) for path in (tmp_path / "run/model", MODEL))
    assert exported.to_dict() == ours.to_dict()
    assert exported.chat_template == exported.tokenizer.chat_template == toy_vision.CHAT_TEMPLATE


@pytest.mark.slow
def test_the_image_decides_what_is_learnt(tmp_path, flags):
    """The same steps with white images gain nothing: 0.20 is what one answer to all questions earns."""
    accuracy = {}
    for blank in (False, True):
        sizes = ["--prompts-per-step", "32", "--group-size", "8", "--lr", "5e-4", "--micro-batch-tokens", "16384"]
        args = [*flags(blank, 256), *sizes, "--total-steps", "6", "--val-every", "6", "--val-before-train"]
        done = ran(fork("grpo", tmp_path, *args, "--no-export-model", "--run-name", str(blank)))
        shown = re.findall(r"^images of sample \d: (.*)", done.stdout, re.M)
        assert len(shown) == 3 and all(Path(file).is_file() for file in shown)
        rows = metrics(tmp_path / str(blank))
        accuracy[blank] = [row["val/toy/vision/mean@1"] for row in rows if "val/toy/vision/mean@1" in row]
    assert accuracy[False][0] < 0.4 and accuracy[False][-1] > 0.8
    assert max(accuracy[True]) < 0.3


def test_two_ranks_train_as_one(tmp_path, flags):
    """Two updates of two micro-batches and more. A scorer prints the prompt, in which an image is one placeholder, to a
    log of each rank; the console shows the first rank's."""
    (tmp_path / "read.py").write_text("def score(full_prompt, **_):\n    print(repr(full_prompt))\n    return 0\n")
    args = [*flags(), "--total-steps", "1", "--num-mini-batches", "2", "--no-export-model", "--save-rollouts", "all"]
    args += ["--shadow-reward", f"{tmp_path / 'read.py'}:score"]
    read = r"'<\|im_start\|>user\\n<image>(red|green|blue)<\|im_end\|>\\n<\|im_start\|>assistant\\n'"
    for ranks in (1, 2):
        done = ran(fork("grpo", tmp_path, *args, "--run-name", str(ranks), ranks=ranks))
        assert 1 <= len(re.findall(f"^scorer read.score: {read}$", done.stdout, re.M)) <= 3
        for rank in range(ranks):
            lines = (tmp_path / f"{ranks}/scorers-{rank}.log").read_text().splitlines()
            assert lines and all(re.fullmatch(f"step 1 read.score: {read}", line) for line in lines)
    assert_trained_alike(tmp_path / "2", tmp_path / "1")


def test_a_reward_model_is_refused(tmp_path, flags):
    done = fork("grpo", tmp_path, *flags(), "--reward-model", TOY_MODEL)
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and "val.jsonl row 0 has images: --reward-model reads text only" in error
