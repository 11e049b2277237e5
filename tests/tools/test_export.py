"""tools/export.py: checkpoints of runs as models, compared with what the runs exported themselves."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lib import InputError
from lib.run.checkpoint import save_checkpoint
from lib.run.export import write_model
from tests.common import SMALL, TOY_MODEL, fork, full_disk, one_line, ran, save_tiny
from tests.run.test_checkpoint import HostBytes
from tools.export import Args, main, start_model, weights

FLAGS = [*SMALL, "--val-files", "none", "--save-every", "1", "--total-steps", "2", "--export-model", "--lr", "1e-3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of two runs of two steps: `full`, saved by one rank, and `lora`, by two, in bfloat16."""
    folder = tmp_path_factory.mktemp("runs")
    lora = ["--lora-rank", "4", "--lora-target-modules", ".*[qv]_proj", "--compute-dtype", "bfloat16"]
    start = shutil.copytree(TOY_MODEL, folder / "start")
    ran(fork("grpo", folder, *FLAGS, "--model", str(start), "--run-name", "full"))
    template = AutoTokenizer.from_pretrained(TOY_MODEL).chat_template
    (folder / "template.jinja").write_text("{# ours #}" + template)
    lora += ["--chat-template", str(folder / "template.jinja")]
    ran(fork("grpo", folder, *FLAGS, "--run-name", "lora", *lora, ranks=2))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_files_are_those_of_the_runs_own_export(runs, tmp_path, name):
    """Weights, configs and tokenizer, byte for byte; and another step has other weights. Other folders stay."""
    others = ("newest.tmp", ".newest.tmp", "newest.replaced.tmp")
    for other in others:
        (tmp_path / other / "mine").mkdir(parents=True)
    main(Args(runs / name, output=tmp_path / "newest"))
    own = contents(runs / name / "model")
    assert contents(tmp_path / "newest") == own and "model.safetensors" in own
    main(Args(runs / name, step=1, output=tmp_path / "first"))
    first = contents(tmp_path / "first")
    assert first.keys() == own.keys() and {file for file in own if first[file] != own[file]} == {"model.safetensors"}
    assert ("{# ours #}" in AutoTokenizer.from_pretrained(tmp_path / "first").chat_template) == (name == "lora")
    assert {path.name for path in tmp_path.iterdir()} == {"newest", "first", *others}
    assert len([*tmp_path.glob("*/mine")]) == 3


@pytest.mark.parametrize("how", [{}, {"adapter": True}])
def test_the_dtype_is_the_one_asked_for(runs, tmp_path, how):
    run, file = runs / ("lora" if how else "full"), "adapter_model.safetensors" if how else "model.safetensors"
    main(Args(run, dtype="bfloat16", output=tmp_path / "half", **how))
    half, whole = load_file(tmp_path / "half" / file), load_file(run / ("model/adapter" if how else "model") / file)
    assert half.keys() == whole.keys() and {w.dtype for w in whole.values()} == {torch.float32}
    assert all(torch.equal(half[name], weight.bfloat16()) for name, weight in whole.items())


def test_an_adapter_is_that_of_the_runs_own_export(runs, capsys):
    main(Args(runs / "lora", adapter=True))
    folder = runs / "lora/export/step_000002-adapter"
    assert str(folder) in capsys.readouterr().out
    own = contents(runs / "lora/model/adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= own.keys()
    assert own.items() <= contents(folder).items()


def test_memory_is_one_file_and_one_layer(tmp_path, one_rank):
    """A layer is held up to four times: as it is read, as it is exported, the layer before, and what is written."""
    path = save_tiny(tmp_path / "start", hidden_size=128, intermediate_size=256, num_hidden_layers=16)
    file_bytes = 2**19
    config = {"model": path, "trust_remote_code": False, "lora_rank": 0, "effective": {"compute_dtype": "float32"}}
    model = AutoModelForCausalLM.from_pretrained(path)
    models = {"actor": (model, torch.optim.AdamW(model.parameters()))}
    save_checkpoint(tmp_path, 1, models=models, schedulers={}, trainer_state={}, keep=0).result()
    parameters, layer = model.num_parameters(), sum(p.numel() for p in model.model.layers[0].parameters())
    source, peaks = tmp_path / "step_000001", []
    model = start_model(config, source)
    for most in (10**12, file_bytes):
        with HostBytes(model) as held:
            write_model(tmp_path / "model", model, weights(model, source, torch.float32), max_bytes=most)
        peaks.append(held.peak)
    assert peaks[0] >= 4 * parameters  # it is counted
    assert peaks[1] < file_bytes + 4 * 4 * layer < 2 * parameters
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    start = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(start[name], w) for name, w in exported.state_dict().items())


def test_errors_are_one_line_and_leave_no_files(runs, tmp_path):
    def refused(match: str, run: Path = runs / "full", **more) -> None:
        with one_line(match):
            main(Args(run, output=tmp_path / "out", **more))
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.tmp").exists()

    refused("no run with checkpoints; give a folder such as runs/NAME", runs / "none")
    refused("--step 7: .*full has checkpoints of the steps 1, 2", step=7)
    refused("--adapter: .*full trained without --lora-rank", adapter=True)
    for name, run, flag in (("start", "full", "--model"), ("template.jinja", "lora", "--chat-template")):
        file = (runs / name).rename(runs / "aside")
        refused(f"{flag} .*{name}: not there, or changed since the run: put back", runs / run)
        file.rename(runs / name)
    template = (runs / "template.jinja").read_text()
    (runs / "template.jinja").write_text(template + "{# edited #}")
    refused("--chat-template .*template.jinja: not there, or changed since the run", runs / "lora")
    (runs / "template.jinja").write_text(template)
    with full_disk(4000):
        refused(r"out: not exported: .*GiB were free.*; give another --output")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nothing")
    for name in ("there", "link"):
        with pytest.raises(InputError, match=f"{name} exists: delete it, or give another --output"):
            main(Args(runs / "full", output=tmp_path / name))
    assert (tmp_path / "link").is_symlink() and not [path for path in tmp_path.iterdir() if path.name[0] == "."]

    broken = tmp_path / "broken"
    shutil.copytree(runs / "full/checkpoints/step_000001", broken / "checkpoints/step_000001")
    [shard] = (broken / "checkpoints/step_000001").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    refused(f"step_000001: not a complete checkpoint .*{shard.name} is not as it was saved", broken, step=1)
    refused("broken: none of its checkpoints is complete", broken)
