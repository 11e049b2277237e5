"""tools/lens.py: the gradients of other flags on a recorded run, and what it refuses."""

import json
import shutil

import pytest
import torch

from lib import InputError
from lib.data_proto import DataProto
from tests.common import one_line
from tests.mutants.planting import run
from tools import lens
from tools.page.lens import read_lens

SIZES = ["--num-mini-batches", "2", "--total-steps", "2", "--lr", "1e-4"]  # so that ratios leave 1
SIZES += ["--prompts-per-step", "24"]
CHOICES = ("--clip-ratio-low 0.2", "--loss-agg-mode token-sum", "--loss gspo", "--old-log-probs rollout")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(the recording, the run's metrics by step)."""
    folder = tmp_path_factory.mktemp("lens")
    return folder / "kept", run("grpo", folder, *SIZES, "--record", str(folder / "kept"), stop=False).rows


@pytest.fixture(scope="module")
def updates(recorded):
    return lens.replay(lens.Args(str(recorded[0]), loss_agg_modes=("seq-mean-token-mean",), choices=CHOICES, tokens=3))


def test_the_replay_takes_the_updates_of_the_run(recorded, updates):
    """Looking at gradients changes none: those of the second step are at the run's weights, too."""
    assert [(u["step"], u["update"]) for u in updates] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for row in recorded[1]:
        norms = [u["choices"]["as recorded"]["norm"] for u in updates if u["step"] == row["step"]]
        assert sum(norms) / 2 == pytest.approx(row["actor/grad_norm"], rel=1e-5)  # float32


def test_choices_that_change_nothing_or_the_scale_have_the_cosine_1(recorded, updates):
    batch = DataProto.load_from_disk(recorded[0] / "step_000001/rank_0_of_1/batch.safetensors")
    tokens = [int(half.batch["denominator_mask"].sum()) for half in batch.split(len(batch) // 2)]
    for update in updates:
        same, summed = (update["choices"][name] for name in CHOICES[:2])
        assert (same["cosine"], same["ratio"], same["tokens"]) == (pytest.approx(1), 1, [])
        assert summed["cosine"] == pytest.approx(1, abs=1e-6) and not summed["tokens"]  # rounding of float32
    ratios = [update["choices"]["--loss-agg-mode token-sum"]["ratio"] for update in updates[:2]]
    assert ratios == pytest.approx(tokens, rel=1e-5)


def test_choices_differ_where_their_formulas_do(updates):
    """The weights of an update's first mini-batch have sampled it: there all ratios are 1, and losses agree."""
    names = "--loss gspo", "--loss-agg-mode seq-mean-token-mean"
    gspo, by_row = ([u["choices"][name] for u in updates] for name in names)
    assert gspo[0]["cosine"] == pytest.approx(1, abs=1e-5) and gspo[1]["ratio"] < 0.9
    assert max(choice["cosine"] for choice in by_row) < 0.9999
    for token in by_row[0]["tokens"]:
        assert token["difference"] == pytest.approx(abs(token["coefficient"] - token["recorded"]))
    assert by_row[0]["tokens"][0]["difference"] >= by_row[0]["tokens"][-1]["difference"] > 0


def test_the_coefficient_of_a_token_is_the_derivative_by_its_log_prob(recorded, updates):
    """Of the first mini-batch: -advantage / tokens, scaled to norm 1."""
    batch = DataProto.load_from_disk(recorded[0] / "step_000001/rank_0_of_1/batch.safetensors")
    batch = batch.split(len(batch) // 2)[0]
    expected = -batch.batch["advantages"].double()
    expected = expected / expected.norm()
    tokens = updates[0]["choices"]["--loss-agg-mode seq-mean-token-mean"]["tokens"]
    assert len(tokens) == 3
    for token in tokens:
        assert token["recorded"] == pytest.approx(float(expected[token["row"], token["position"]]), rel=1e-4)


def test_the_command_writes_table_and_figure(recorded, updates, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lens, "replay", lambda args: updates)
    lens.main(lens.Args(str(recorded[0]), losses=("gspo",), output=str(tmp_path / "out")))
    table = (tmp_path / "out/lens.md").read_text()
    assert table in capsys.readouterr().out and "| as recorded | 1.0000 | 1.0000 | 1.000 |" in table
    assert table.count("\n| 1, ") + table.count("\n| 2, ") == table.count("** |")  # a row a token
    assert json.loads((tmp_path / "out/lens.json").read_text()) == updates
    curves, tokens = read_lens(tmp_path / "out", notes := [])  # as the run page does
    gspo = [u["choices"]["--loss gspo"]["norm"] for u in updates if u["step"] == 2]
    assert not notes and curves[1]["lens/--loss gspo/norm"] == pytest.approx(sum(gspo) / 2)
    assert {"--loss gspo"} < {row[0] for row in tokens} and len({*map(len, tokens)}) == 1
    assert (tmp_path / "out/lens.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "args, error",
    [
        ({}, "nothing to compare"),
        ({"losses": ("gsop",)}, "gsop"),
        ({"losses": ("gspo",), "script": "README.md"}, "--script README.md"),
        ({"choices": ("--kl-coef 0.1",)}, "the replay has no reference model"),
        ({"losses": ("gspo",), "flags": "--total-steps 3"}, "step 3 was not recorded"),
        ({"losses": ("gspo",), "steps": 0}, "--steps must be at least 1"),
    ],
)
def test_bad_input_is_one_line(recorded, args, error):
    with one_line(error):
        lens.main(lens.Args(str(recorded[0]), **args))


@pytest.mark.parametrize("config", ["{", "[]", '{"script": 3}'])
def test_a_folder_that_is_no_recording_is_one_line(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with one_line():
        lens.main(lens.Args(str(tmp_path), losses=("gspo",)))


def test_a_damaged_recording_is_one_line(recorded, tmp_path):
    shutil.copytree(recorded[0], tmp_path / "kept")
    file = tmp_path / "kept/step_000001/rank_0_of_1/rollout_0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"step 1 is not as it was recorded"):
        lens.replay(lens.Args(str(tmp_path / "kept"), losses=("gspo",)))
    assert not torch.distributed.is_initialized()
