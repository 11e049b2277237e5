"""tools/parity.py on dumps of verl 0.9.1, TRL 1.16 and OpenRLHF 0.11 (tests/tools/parity/make.py wrote them)."""

import json
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lib import InputError
from tests.common import one_line
from tests.tools.parity import make
from tools.parity import Args, main

NAMES = {  # of what a framework's dump calls the five quantities
    "verl": {"mask": "response_mask", "advantages": "advantages", "ratio": "ppo_kl", "loss": "loss"},
    "trl": {"advantages": "advantages", "loss": "loss", "gradient": "gradient"},
    "openrlhf": {"advantages": "advantages", "ratio": "ppo_kl", "loss": "loss", "gradient": "gradient"},
}


def compare(folder: Path, name: str, **more) -> int:
    return main(Args(folder / f"{name}.safetensors", folder / f"{name}.json", name, **more))


@pytest.mark.parametrize("name", ["verl", "trl", "openrlhf"])
def test_the_recorded_batches_agree(name, capsys):
    assert compare(make.FOLDER, name) == 0
    said = capsys.readouterr().out
    compared = {line.split()[0] for line in said.splitlines() if " equal " in line}
    assert compared == NAMES[name].keys() | {"gradient"} and "DIFFERS" not in said


@pytest.mark.parametrize("name, quantity", [(name, quantity) for name in NAMES for quantity in NAMES[name]])
def test_the_first_quantity_that_differs_is_named_with_both_formulas(name, quantity, tmp_path, capsys):
    tensors = load_file(make.FOLDER / f"{name}.safetensors")
    changed = tensors[NAMES[name][quantity]].clone()
    if quantity == "mask":
        changed[1, 2] = 0  # as if the EOS did not count
    else:
        changed = changed * 1.001
    save_file(tensors | {NAMES[name][quantity]: changed}, tmp_path / f"{name}.safetensors")
    (tmp_path / f"{name}.json").write_bytes((make.FOLDER / f"{name}.json").read_bytes())
    assert compare(tmp_path, name) == 1
    said = capsys.readouterr().out
    first, theirs, ours = said.splitlines()[-3:]
    assert first.startswith(f"{quantity} is the first that differs")
    assert theirs.split()[0] == f"{name}:" and ours.split()[0] == "grpo.py:"
    if quantity == "mask":
        assert "row 1, token 2" in first


def test_the_flags_of_a_run_in_place_of_the_translation(tmp_path, capsys):
    """TRL adds 1e-4 to the deviation, grpo.py 1e-6 unless told otherwise; verl has a dual clip, TRL has none."""
    (tmp_path / "config.json").write_text(json.dumps({"clip_ratio_high": 0.28, "clip_ratio_c": 3.0}))
    assert compare(make.FOLDER, "trl", ours=tmp_path / "config.json", figure=tmp_path / "parity.png") == 1
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "advantages is the first that differs" in said
    assert "(std(R) + 1e-4)" in said and "(std(R) + 1e-06)" in said


VERL, SETTINGS = make.FOLDER / "verl.safetensors", make.FOLDER / "verl.json"


def test_other_forms_of_a_dump_are_read_alike(tmp_path, capsys):
    tensors = load_file(VERL)
    np.savez(tmp_path / "dump.npz", **{name: x.numpy() for name, x in tensors.items()})
    (tmp_path / "dump.json").write_text(json.dumps({name: x.tolist() for name, x in tensors.items()}))
    assert [main(Args(dump, SETTINGS, "verl")) for dump in (VERL, *tmp_path.iterdir())] == [0, 0, 0]
    said = capsys.readouterr().out
    assert said == 3 * said[: len(said) // 3]


# ---- bad input -----------------------------------------------------------------------------------
DEEP, RAGGED = '{"loss": ' + "[" * 10**5, '{"loss": [[1, 2], [3]]}'


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("loss.npy", b"")
        file.filelist[0].file_size = 2**40


def verl_with(**changes):
    """Writes verl's dump without what is None, and with other tensors."""
    tensors = load_file(VERL) | changes
    return partial(save_file, {name: tensor for name, tensor in tensors.items() if tensor is not None})


@pytest.mark.parametrize(
    ("suffix", "write", "message"),
    [
        ("pt", partial(torch.save, {}), "a pickle may run code"),
        ("npz", partial(np.savez, loss=np.array([{}], dtype=object)), "not readable"),
        ("npz", bomb, "bytes, more than"),
        *(("json", lambda path, text=text: path.write_text(text), "not readable") for text in ("{", DEEP, RAGGED)),
        ("safetensors", lambda path: path.write_bytes(VERL.read_bytes()[:-9]), "not readable"),
        ("safetensors", lambda path: None, "not readable"),
        ("safetensors", verl_with(response_mask=None), "no mask"),
        ("safetensors", verl_with(advantages=torch.zeros(3, 4)), "advantages has shape"),
        ("safetensors", verl_with(logits=torch.zeros(3)), "logits: no name of"),
        ("safetensors", partial(save_file, {"response_mask": load_file(VERL)["response_mask"]}), "nothing to"),
    ],
)
def test_a_dump_that_is_none_is_one_line(suffix, write, message, tmp_path):
    write(tmp_path / f"dump.{suffix}")
    with one_line(message):
        main(Args(tmp_path / f"dump.{suffix}", SETTINGS, "verl"))


@pytest.mark.parametrize(
    "settings, reason",
    [
        ("[", "not a JSON object"),
        ('{"clip": 1}', "clip is not compared"),
        ('{"loss_mode": "dppo_tv"}', "loss_mode 'dppo_tv' is not compared"),
        ('{"clip_ratio_c": [3]}', "give a plain value"),
        ('{"clip_ratio_c": 0.5}', "clip"),
    ],
)
def test_settings_that_are_not_known_are_one_line(settings, reason, tmp_path, capsys):
    (tmp_path / "verl.json").write_text(settings)
    with pytest.raises((InputError, SystemExit)) as error:
        main(Args(VERL, tmp_path / "verl.json", "verl"))
    assert reason in str(error.value) + capsys.readouterr().err


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path):
    for figure in ("none/parity.png", "parity.txt"):
        with one_line("--figure"):
            compare(make.FOLDER, "trl", figure=tmp_path / figure)


def test_a_value_that_is_not_finite_differs(tmp_path):
    tensors = load_file(VERL)
    tensors["gradient"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "verl.safetensors")
    assert main(Args(tmp_path / "verl.safetensors", SETTINGS, "verl")) == 1
