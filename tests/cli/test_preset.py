"""Without --model and --train-files a run trains the embedded task (data/toy/preset.yaml); with them its defaults are
those of docs/defaults.md."""

import json
import re
import shutil
from dataclasses import dataclass, field

import pytest
import torch

import dapo
import grpo
import ppo
import remax
from lib import setup
from lib.cli.flags import flag_values, parse_flags, walk
from tests.common import ROOT, SMALL, TOY_MODEL, fork, one_line, ran

SCRIPTS = {script.__name__: script for script in (grpo, ppo, remax, dapo)}
PRESET, ROWS = ROOT / "data/toy/preset.yaml", str(ROOT / "data/toy/val.jsonl")
TRAIN = (str(ROOT / "data/toy/train.jsonl"),)
NOTE = "no --model and no --train-files: the embedded arithmetic task (data/toy/preset.yaml)"
REAL = ["--model", TOY_MODEL, "--train-files", ROWS]


def values(args) -> dict:
    return {name: value for name, value, _ in walk(args)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_model_and_files_a_run_has_the_embedded_task(name, tmp_path, monkeypatch):
    """From any folder; its other values are on the page. The preset is no flag that somebody gave: with --val-only none
    of it is named as idle."""
    monkeypatch.chdir(tmp_path)
    args = parse_flags(SCRIPTS[name].Args, [])
    assert (args.model.model, args.data.train_files) == (TOY_MODEL, TRAIN)
    assert args.preset_note == NOTE and args.given == set()
    args = parse_flags(SCRIPTS[name].Args, ["--val-only"])
    assert args.preset_note == NOTE and args.no_effect == () and args.validation.sets()[0].files == (ROWS,)
    named = parse_flags(SCRIPTS[name].Args, ["--config", str(PRESET)])
    assert named.preset_note == "" and named.given == {"config"}
    assert values(named) == values(parse_flags(SCRIPTS[name].Args, [])) | {"config": str(PRESET)}


def test_flags_and_configs_override_the_preset(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("lr: 1e-3\nprompts_per_step: 64\n")
    for words in (["--config", str(config)], [f"--config={config}", "--config", str(PRESET)]):
        args = parse_flags(ppo.Args, [*words, "--prompts-per-step", "128"])
        assert (args.optimizer.lr, args.prompts_per_step, args.critic_lr) == (1e-3, 128, 3e-4)
        assert args.preset_note == ("" if len(words) > 2 else NOTE) and {"lr", "prompts_per_step"} <= args.given
    model = shutil.copytree(TOY_MODEL, tmp_path / "model")
    args = parse_flags(grpo.Args, ["--config", str(PRESET), f"--model={model}"])
    assert (args.model.model, args.data.train_files, args.optimizer.lr) == (str(model), TRAIN, 1e-4)
    link = tmp_path / "link.yaml"
    link.symlink_to(PRESET)
    assert parse_flags(dapo.Args, ["--config", str(link), "--model", str(model)]).overlong_buffer == 2


MISSING = {  # what is said: a flag, its value, further flags
    f"--model {TOY_MODEL} without --train-files: name the files to train on": ("--model", TOY_MODEL, []),
    f"--train-files {ROWS} without --model: name the model": ("--train-files", ROWS, ["--val-files", ROWS]),
    f"--train-files {ROWS} without --model: name": ("--train-files", ROWS, ["--val-only", "--val-files", ROWS]),
    "--val-only needs --val-files": ("--model", TOY_MODEL, ["--val-only"]),
}


@pytest.mark.parametrize("form", ["two words", "one word", "config"])
def test_one_without_the_other_is_one_line(form, tmp_path):
    config = tmp_path / "other.yaml"
    for message, (flag, value, more) in MISSING.items():
        config.write_text(json.dumps({flag[2:].replace("-", "_"): [value]}))
        words = {"two words": [flag, value], "one word": [f"{flag}={value}"], "config": ["--config", str(config)]}
        with one_line(re.escape(message)):
            parse_flags(grpo.Args, [*words[form], *more])
    args = parse_flags(grpo.Args, ["--model", TOY_MODEL, "--val-only", "--val-files", ROWS])
    assert args.preset_note == "" and args.validation.enabled and args.data.train_files == ()


@pytest.mark.parametrize("name", SCRIPTS)
def test_defaults_with_a_model_and_files(name):
    args = parse_flags(SCRIPTS[name].Args, REAL)
    assert args.preset_note == "" and not args.validation.enabled and args.given == {"model", "train_files"}
    [note] = parse_flags(SCRIPTS[name].Args, [*REAL, "--val-every", "3"]).no_effect
    assert note == "--val-every (without --val-files)"
    assert parse_flags(SCRIPTS[name].Args, [*REAL, "--val-files", ROWS]).validation.enabled


def test_the_config_of_an_older_run_keeps_its_values(tmp_path):
    """It has all of them, also those that were defaults, and the toy's files as paths."""
    old = flag_values(parse_flags(ppo.Args, ["--lora-rank", "8", "--lr", "1e-6"]))
    (tmp_path / "config.json").write_text(json.dumps(old | {"val_files": [], "script": "ppo.py", "history": []}))
    args = parse_flags(ppo.Args, ["--config", str(tmp_path / "config.json")])
    same = values(args) | {"config": "", "val_files": (ROWS,)}
    assert same == values(parse_flags(ppo.Args, ["--lora-rank", "8", "--lr", "1e-6"]))
    assert args.preset_note == "" and not args.validation.enabled


def test_a_script_of_ones_own_has_the_part_of_its_parent(tmp_path):
    """A flag of its own may have no default: it is typed, or in a config."""

    @dataclass
    class Args(ppo.Args):
        teacher: str = field(kw_only=True)

    (tmp_path / "own.yaml").write_text("teacher: t\nshuffle: false")
    for words in (["--teacher", "t"], ["--config", str(tmp_path / "own.yaml")]):
        args = parse_flags(Args, words)
        assert (args.teacher, args.critic_lr, args.data.shuffle) == ("t", 3e-4, len(words[1]) == 1)


RATES = [  # learning rate, kind, parameters, whether it is noted
    (1e-4, "full fine-tuning", 7.6e9, True),
    (1e-8, "full fine-tuning", 5e8, True),
    (1e-6, "LoRA", 7.6e9, True),
    (1e-5, "full fine-tuning", 5e8, False),  # the critic's
    (1e-4, "LoRA", 5e8, False),
    (1e-4, "full fine-tuning", 5e5, False),  # the embedded model
    (0.0, "LoRA", 7.6e9, False),  # has a note of its own
]


def test_an_unusual_learning_rate_is_noted():
    weights = [torch.nn.Parameter(torch.zeros(1))]
    for lr, kind, parameters, noted in RATES:
        note = setup.lr_note("actor", torch.optim.AdamW(weights, lr=lr), kind, int(parameters))
        start = f"note: actor: learning rate {lr:g}: usual in {kind} of {parameters / 1e9:.2g} B"
        assert "\n" not in note and (note.startswith(start) if noted else note == "")
        assert setup.lr_note("actor", torch.optim.SGD(weights, lr=lr), kind, int(parameters)) == ""


def test_a_run_says_what_it_trains_and_notes_its_learning_rates(tmp_path):
    patch = "import lib.setup\nfrom lib.data import RLHFDataset as Rows\nlib.setup.models.SMALLEST = 1\n"
    (tmp_path / "large.py").write_text(patch)
    small = SMALL[: SMALL.index("--train-files")]
    words = [*small, "--total-steps", "1", "--critic-lr", "1e-5", "--dataset-class", f"{tmp_path / 'large.py'}:Rows"]
    done = ran(fork("ppo", tmp_path, *words, "--run-name", "run", ranks=2, preset=[]))
    first, engine, *lines = done.stdout.splitlines()
    assert first == NOTE and lines[0] == "model: data/toy/model" and NOTE not in lines
    assert engine == "--rollout-engine auto: hf, because this machine has no GPU" and engine not in lines
    for start in ("training prompts: 4096 (", "validation prompts: none", "run folder: "):
        assert sum(line.startswith(start) for line in lines) == 1, start
    [note] = [line for line in lines if line.startswith("note: ") and "learning rate" in line]
    usual = "usual in full fine-tuning of 0.00054 B parameters are 1e-07 to 3e-05 (docs/defaults.md)"
    assert note == f"note: actor: learning rate 0.0003: {usual}"


def shown(value) -> str:
    if isinstance(value, tuple):
        return " ".join(map(shown, value)) or "none"
    return str(value).removeprefix(f"{ROOT}/")


def shown_values(args) -> dict[str, str]:
    return {name: shown(value) for name, value in values(args).items()}


def cell(flag: str, table: dict[str, dict[str, str]]) -> str:
    """grpo.py's value, and those of other scripts where they differ."""
    name = flag[2:].replace("-", "_")
    common = table["grpo"].get(name)
    own = [f"{script} {of[name]}" for script, of in table.items() if of.get(name, common) != common]
    return ", ".join(filter(None, [common, *own]))


def test_the_table_of_defaults_is_that_of_the_flags():
    text = (ROOT / "docs/defaults.md").read_text()
    rows = re.findall(r"^\| `(?:\w+\.py )?(--[\w-]+)` \| (.*?) \| (.*?) \| (.+) \|$", text, re.M)
    assert len(rows) > 20 and all(why for *_, why in rows)
    defaults = {name: shown_values(script.Args()) for name, script in SCRIPTS.items()}
    of_preset = {name: shown_values(parse_flags(script.Args, [])) for name, script in SCRIPTS.items()}
    for flag, default, embedded, _ in rows:
        if flag == "--lr":
            full, lora = (parse_flags(grpo.Args, [*REAL, *more]).lr for more in ([], ["--lora-rank", "8"]))
            assert default == f"{full}, LoRA {lora}"
        else:
            assert default == cell(flag, defaults), flag
        assert embedded == cell(flag, of_preset), flag
    in_preset = {f"--{name.replace('_', '-')}" for name in re.findall(r"^ *(\w+): \S", PRESET.read_text(), re.M)}
    assert in_preset - {flag for flag, *_ in rows} == {"--model", "--train-files"}
    assert f"```\n{NOTE}\n```" in text
    for kind, (low, high) in setup.USUAL_LR.items():
        assert f"| {kind} | {low} to {high} |" in text
