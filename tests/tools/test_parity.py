"""tools/parity.py on dumps of verl 0.9.1, TRL 1.16 and OpenRLHF 0.11 (tests/tools/parity/make.py wrote them)."""

import importlib.util
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lib import InputError
from tests.tools.parity import make
from tools.parity import FRAMEWORKS, Args, main

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


def test_other_forms_of_a_dump_are_read_alike(tmp_path, capsys):
    tensors, said = load_file(make.FOLDER / "verl.safetensors"), set()
    np.savez(tmp_path / "dump.npz", **{name: x.numpy() for name, x in tensors.items()})
    (tmp_path / "dump.json").write_text(json.dumps({name: x.tolist() for name, x in tensors.items()}))
    for suffix in ("npz", "json"):
        assert main(Args(tmp_path / f"dump.{suffix}", make.FOLDER / "verl.json", "verl")) == 0
        said.add(capsys.readouterr().out)
    assert len(said) == 1


# ---- bad input -----------------------------------------------------------------------------------


def broken(folder: Path, what: str) -> Path:
    tensors = load_file(make.FOLDER / "verl.safetensors")
    file = folder / "dump.safetensors"
    if what == "pickle":
        torch.save(tensors, folder / "dump.pt")
        return folder / "dump.pt"
    if what == "objects":
        np.savez(folder / "dump.npz", loss=np.array([{}], dtype=object))
        return folder / "dump.npz"
    if what == "bomb":
        with zipfile.ZipFile(folder / "dump.npz", "w") as bomb:
            bomb.writestr("loss.npy", b"")
            bomb.filelist[0].file_size = 2**40
        return folder / "dump.npz"
    if what in ("no JSON", "deep", "ragged"):
        text = {"no JSON": "{", "deep": '{"loss": ' + "[" * 10**5, "ragged": '{"loss": [[1, 2], [3]]}'}[what]
        (folder / "dump.json").write_text(text)
        return folder / "dump.json"
    if what == "missing":
        return file
    if what == "cut":
        file.write_bytes((make.FOLDER / "verl.safetensors").read_bytes()[:-9])
        return file
    del tensors["response_mask" if what == "no mask" else "ppo_kl"]
    if what == "shape":
        tensors["advantages"] = torch.zeros(3, 4)
    if what == "name":
        tensors["logits"] = torch.zeros(3)
    if what == "nothing":
        tensors = {"response_mask": tensors["response_mask"]}
    save_file(tensors, file)
    return file


REASONS = {"pickle": "a pickle may run code", "bomb": "bytes, more than", "no mask": "no mask", "nothing": "nothing to"}
REASONS |= {"shape": "advantages has shape", "name": "logits: no name of"}
REASONS |= dict.fromkeys(("objects", "cut", "no JSON", "deep", "ragged", "missing"), "not readable")


@pytest.mark.parametrize("what", REASONS)
def test_a_dump_that_is_none_is_one_line(what, tmp_path):
    (tmp_path / "verl.json").write_text("{}")
    with pytest.raises(InputError, match=REASONS[what]) as error:
        main(Args(broken(tmp_path, what), tmp_path / "verl.json", "verl"))
    assert "\n" not in str(error.value)


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
        main(Args(make.FOLDER / "verl.safetensors", tmp_path / "verl.json", "verl"))
    assert reason in str(error.value) + capsys.readouterr().err


@pytest.mark.parametrize("figure", ["none/parity.png", "parity.txt"])
def test_a_figure_that_cannot_be_written_is_one_line(figure, tmp_path):
    with pytest.raises(InputError, match="--figure") as error:
        compare(make.FOLDER, "trl", figure=tmp_path / figure)
    assert "\n" not in str(error.value)


def test_a_value_that_is_not_finite_differs(tmp_path):
    tensors = load_file(make.FOLDER / "verl.safetensors")
    tensors["gradient"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "verl.safetensors")
    (tmp_path / "verl.json").write_bytes((make.FOLDER / "verl.json").read_bytes())
    assert compare(tmp_path, "verl") == 1


# ---- the packages themselves, where they are installed -------------------------------------------

VERL = [
    {"loss_mode": mode, "adv_estimator": estimator, "loss_agg_mode": agg}
    for mode, estimator, agg in (
        *(("vanilla", "grpo", "token-mean"), ("gspo", "rloo", "seq-mean-token-mean")),
        *(("cispo", "opo", "seq-mean-token-sum"), ("gpg", "grpo", "seq-mean-token-sum-norm")),
    )
]
TRL = [
    *({"loss_type": kind} for kind in ("grpo", "dapo", "bnpo", "sapo")),
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    *({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "grpo", "delta": 4.0, "scale_rewards": "batch"}),
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
]


@pytest.mark.parametrize(
    "name, settings",
    [*(("verl", settings) for settings in VERL), *(("trl", settings) for settings in TRL)],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_the_real_package_agrees(name, settings, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: tests/tools/parity/make.py says how")
    assert settings.keys() <= FRAMEWORKS[name].settings.keys()
    make.write(tmp_path, name, settings)
    assert compare(tmp_path, name) == 0
