"""tools/capsule.py: a step of a run packed, opened elsewhere and replayed; what is redacted, and hostile files."""

import json
import platform
import shlex
import shutil
import stat
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

import grpo
from lib import InputError
from lib.cli.flags import parse_flags
from lib.data_proto import DataProto
from tests.common import ROOT, SMALL, TOY_MODEL, fork, one_line, ran
from tools.capsule import PATH_IN_CODE, Args, clean, main

SCORER = '''
import pathlib
DATA = pathlib.Path(__file__).with_name("data.txt").read_text()  # which is not where the capsule is opened
KEY = "sk-abcdefghijklmnopqrstuvwx"
FILE = "/home/jane/clients/acme/answers.json"
BUILD = "cc -I/home/jane/include see:\\n/home/jane/notes.txt file:///home/jane/clients/x.json"
def ratio(n, m, d):
    return n /m/ d, "/v1/chat/completions"
pathlib.Path(__file__).with_name("ran").touch()
def score(data_source, solution_str, ground_truth, extra_info, weight: float = float("1")):
    """Also answers with a text."""
    return {"score": float(len(solution_str) % 3 == 0), "pred": "seen " + solution_str, "half": 0.5}
'''
AGENT = """
import json, urllib.request
def solve(base_url, api_key, row):
    body = json.dumps({"model": "policy", "messages": row["prompt"]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    answer = urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers))
    return {"reward": len(json.load(answer)["choices"][0]["message"]["content"]) % 3}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two steps, recorded, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine.py").write_text(SCORER)
    (folder / "data.txt").touch()
    args = [*SMALL, "--total-steps", "2", "--save-every", "1", "--reward", f"{folder / 'mine.py'}:score"]
    args += ["--record", str(folder / "kept"), "--lr-schedule", "linear", "--warmup-steps", "2"]
    ran(fork("grpo", folder, *args, "--run-name", "live"))
    (folder / "ran").unlink()
    return folder / "live"


@pytest.fixture(scope="module")
def capsule(run, tmp_path_factory) -> Path:
    """Of step 2, with text and tiny weights."""
    file = tmp_path_factory.mktemp("capsule") / "bug.capsule.zip"
    main(Args(run, step=2, output=file))
    return file


def replay(folder: Path) -> None:
    recording = folder / "recording"
    words = ["--config", str(recording / "config.json"), "--replay", str(recording), "--run-name", "replay"]
    ran(fork("grpo", folder, *words, preset=[]))


def said_by(capsys, *args, **how) -> str:
    capsys.readouterr()
    main(Args(*args, **how))
    return capsys.readouterr().out


def contents(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as capsule:
        return {name: capsule.read(name) for name in capsule.namelist()}


def altered(file: Path, to: Path, **members: bytes | str | None) -> Path:
    """A copy with these members, by name without directories, changed or left out."""
    with zipfile.ZipFile(to, "w") as copy:
        for name, content in contents(file).items():
            content = members.get(Path(name).stem, content)
            if content is not None:
                copy.writestr(name, content)
    return to


def with_about(file: Path, to: Path, **changes) -> Path:
    """A copy with these flags, or other keys of capsule.json."""
    about = json.loads(contents(file)["capsule.json"])
    for name, value in changes.items():
        (about["flags"] if name in about["flags"] else about)[name] = value
    return altered(file, to, capsule=json.dumps(about))


# ---- packed, opened and replayed -----------------------------------------------------------------
def test_a_step_without_its_text_replays_with_tiny_weights(run, tmp_path, capsys):
    """Nothing of the run's folder is needed, and no code of the capsule runs. A changed metric is named."""
    file, folder = tmp_path / "bug.capsule.zip", tmp_path / "opened"
    assert "random token ids" in said_by(capsys, run, step=2, redact_text=True, output=file)
    said = said_by(capsys, file, output=folder)
    assert f"replay it:  python grpo.py --config {folder}/recording/config.json" in said and "note:" not in said
    replay(folder)
    said = said_by(capsys, folder)
    assert "compared metrics of step 2 are as recorded; " in said and "depend on the weights" in said
    assert not [*run.parent.glob("ran"), *folder.rglob("ran")]

    about = json.loads((folder / "capsule.json").read_text())
    about["metrics"]["advantages/max"] += 1
    about["metrics"]["response_length/mean"] *= 1.001
    (folder / "capsule.json").write_text(json.dumps(about))
    assert said_by(capsys, folder).startswith("response_length/mean is the first of ")


def test_the_weights_of_the_step_repeat_all_metrics(run, tmp_path, capsys):
    """Those of the checkpoint before it, at the learning rate that the warm-up had reached."""
    file, folder = tmp_path / "bug.capsule.zip", tmp_path / "opened"
    main(Args(run, step=2, weights="step", output=file))
    main(Args(file, output=folder))
    replay(folder)
    said = said_by(capsys, folder)
    assert said.startswith("all ") and "are as recorded" in said and "random" not in said
    assert int(said.split()[1]) > 40


@pytest.mark.slow
def test_a_step_of_an_agent_without_a_scorer_replays(tmp_path, capsys):
    """A replay has no agent, and the rewards of turns in their weight. The data source is a file's path."""
    (tmp_path / "solve.py").write_text(AGENT)
    rows = [json.loads(line) for line in (ROOT / "data/toy/val.jsonl").read_text().splitlines()[:8]]
    rows = [row | {"data_source": "/home/jane/clients/acme.jsonl"} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [*SMALL, "--train-files", str(tmp_path / "rows.jsonl"), "--total-steps", "1", "--adv-estimator", "mt_grpo"]
    args += ["--reward", "--agent", f"{tmp_path / 'solve.py'}:solve", "--multi-turn.reward-coef", "2"]
    ran(fork("grpo", tmp_path, *args, "--record", str(tmp_path / "kept"), "--run-name", "live"))
    main(Args(tmp_path / "live", step=1, output=tmp_path / "bug.zip"))
    everything = b"\n".join(contents(tmp_path / "bug.zip").values())
    assert b"jane" not in everything and b"source/.../acme.jsonl/reward" in everything
    main(Args(tmp_path / "bug.zip", output=tmp_path / "opened"))
    replay(tmp_path / "opened")
    assert "compared metrics of step 1 are as recorded" in said_by(capsys, tmp_path / "opened")


# ---- what a capsule holds ------------------------------------------------------------------------
def test_keys_folders_and_the_machine_are_not_in_it(run, capsule):
    everything = b"\n".join(contents(capsule).values()).decode(errors="replace")
    for secret in ("sk-abcdef", "jane", "acme", str(run.parent), f"{platform.node()}: "):
        assert secret not in everything
    assert "answers.json" in everything and "seen " in everything  # names of files, and texts, stay
    assert 'return n /m/ d, "/v1/chat/completions"' in everything and "cc -I.../include see:\\n.../notes" in everything


@pytest.mark.parametrize(
    ("text", "cleaned", "in_code"),
    [  # None: as it is
        ("https://x.org/a/b lib/args/flags.py a/b --- /dev/null 1/2/3", None, None),
        ("x = a[i]/home/b + f(y)/data/z half = n /m/ d http://data/home/x", None, None),
        ("a</b><br/> ../home/jane/x f'{root}/a/b/c'", None, None),
        ("half = n /m/d", "half = n .../d", None),  # in a flag it is a path, such as the argument of a program
        ("/a/b/c.py:f ~jane/x", ".../c.py:f .../x", None),
        ("~/x/y $HOME/a/b", ".../y .../b", ".../y .../b"),
        ("/home/jane '/Users/jane'", ".../ '.../'", ".../ '.../'"),
        ("/data/x.jsonl //mnt/a/y", ".../x.jsonl .../y", ".../x.jsonl .../y"),
        ("file:///home/jane/a/x.json", "file://.../x.json", "file://.../x.json"),
        ("-isystem/home/jane/x P=/opt/a/bin:/home/b", "-isystem.../x P=.../bin:.../", "-isystem.../x P=.../bin:.../"),
        ("http://me:pass@host/x?token=abcd&n=1", "http***host/x***&n=1", "http***host/x***&n=1"),
    ],
)
def test_folders_and_passwords_are_redacted_and_nothing_else(text, cleaned, in_code):
    assert (clean(text), clean(text, PATH_IN_CODE)) == (cleaned or text, in_code or text)
    assert clean(["/a/b/c.py:f", {"~/x/y": "search:/d/e"}]) == [".../c.py:f", {".../y": "search:.../e"}]


def test_redacted_text_is_random_and_what_is_not_text_stays(run, tmp_path):
    drawn = []
    for number in range(2):
        main(Args(run, step=2, redact_text=True, output=tmp_path / f"{number}.zip"))
        members = contents(tmp_path / f"{number}.zip")
        everything = b"\n".join(content for name, content in members.items() if not name.startswith("script/"))
        assert b"seen " not in everything and b'"role"' not in everything
        file = tmp_path / f"rollout_{number}"  # a file each: loaded tensors are mapped
        file.write_bytes(members["recording/step_000001/rank_0_of_1/rollout_0.safetensors"])
        drawn.append(DataProto.load_from_disk(file))
    [recorded] = [DataProto.load_from_disk(path) for path in run.parent.glob("kept/step_000002/*/rollout_0.*")]
    first, second = drawn
    for name in ("response_mask", "rollout_log_probs", "attention_mask", "position_ids"):
        assert torch.equal(first.batch[name], recorded.batch[name])
    sampled = recorded.batch["response_mask"].bool()
    for one, other in ((first, second), (first, recorded)):
        equal = (one.batch["responses"] == other.batch["responses"])[sampled].double().mean()
        assert equal < 0.6  # the EOS of each row stays, others agree by chance
    assert torch.equal(first.batch["input_ids"], torch.cat([first.batch["prompts"], first.batch["responses"]], 1))
    groups = [tuple(ids) for ids in first.non_tensor_batch["raw_prompt_ids"]]
    assert len({*groups}) == 8 and groups[0] == groups[3]


# ---- bad input -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [  # paths in the test's folder
        ({"source": "kept"}, "no config.json there"),
        ({"source": "unrecorded"}, "ran without --record"),
        ({"step": 3}, "--step 3 was not recorded; .* has the steps 1 to 2"),
        ({"recording": "other"}, "no recording there"),
        ({"output": "kept"}, "exists: delete it"),
        ({"recording": "kept"}, r"was cut off: it has 1 rank\(s\)"),
        ({"redact_text": True, "weights": "step"}, "--redact-text with --weights step"),
    ],
)
def test_what_cannot_be_packed_is_one_line(run, tmp_path, change, message):
    (tmp_path / "kept/step_000002/rank_0_of_2").mkdir(parents=True)
    (tmp_path / "unrecorded").mkdir()
    flags = json.loads((run / "config.json").read_text()) | {"record": ""}
    (tmp_path / "unrecorded/config.json").write_text(json.dumps(flags))
    paths = {name: tmp_path / value for name, value in change.items() if name in ("source", "recording", "output")}
    with one_line(message):
        main(Args(**{"source": run, "step": 2, "output": tmp_path / "out.zip"} | change | paths))
    assert not (tmp_path / "out.zip").exists()


@pytest.mark.parametrize("saved, resumed", [([], None), ([1, 2, 10], 2), ([3, 5], None)])
def test_a_step_that_was_not_recorded_is_repeated_by_a_command(saved, resumed, tmp_path):
    """From the last checkpoint before it, by a new run that ends with it."""
    run = tmp_path / "a run"
    for step in saved:
        (run / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    run.mkdir(exist_ok=True)
    flags = {"lr": 3e-4, "total_steps": 90, "run_name": "a run", "resume": "auto", "model": TOY_MODEL}
    flags |= {"train_files": [str(ROOT / "data/toy/train.jsonl")]}
    (run / "config.json").write_text(json.dumps(flags | {"script": "grpo.py", "lr_schedule": "constant"}))
    with pytest.raises(InputError, match=r"it ran without --record, so .* repeat the step with: python g") as error:
        main(Args(run, step=3))
    args = parse_flags(grpo.Args, shlex.split(str(error.value).partition("grpo.py ")[2]))
    assert args.run.resume == ("never" if resumed is None else str(run / f"checkpoints/step_{resumed:06d}"))
    assert (args.run.total_steps, args.lr) == (3, 3e-4)
    assert args.run.run_name == "a run-recorded" and args.run.record == "a run-recorded-steps"


def test_members_that_are_no_part_of_a_capsule_are_rejected(capsule, tmp_path):
    """Paths that lead out, links, doubles and bombs."""
    link = zipfile.ZipInfo("script/link.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    names = "/tmp/evil.py", "script/../../evil.py", "script/code/1-a.py\n", "evil.sh"
    members = [(name, b"x", "is no file of a capsule") for name in names]
    members += [(link, b"/etc/passwd", ""), ("capsule.json", b"0", ""), ("script/big.py", b"0" * (2**26 + 1), "")]
    for member, content, message in members:
        file = altered(capsule, tmp_path / "hostile.zip")
        with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as hostile, warnings.catch_warnings(action="ignore"):
            hostile.writestr(member, content)
        with pytest.raises(InputError, match=message or None):
            main(Args(file, output=tmp_path / "opened"))
    with pytest.raises(InputError, match="more than --max-gb"):
        main(Args(capsule, output=tmp_path / "opened", max_gb=1e-6))
    assert {path.name for path in tmp_path.iterdir()} == {"hostile.zip"}


def test_nothing_else_is_overwritten_or_deleted(capsule, tmp_path, monkeypatch):
    for name in ("bug.tmp", ".bug.tmp", "bug.replaced.tmp"):
        (tmp_path / name / "mine").mkdir(parents=True)
    file = shutil.copy(capsule, tmp_path / "bug.capsule.zip")
    monkeypatch.chdir(tmp_path)
    main(Args(file))
    assert (tmp_path / "bug/capsule.json").exists() and len([*tmp_path.glob("*/mine")]) == 3
    (tmp_path / "link").symlink_to("nothing")
    for output in ("bug", "link", "bug.tmp"):
        with pytest.raises(InputError, match=f"{output} exists: delete it, or give another --output"):
            main(Args(file, output=Path(output)))
    for name in (".zip", "-rf.zip", "..capsule.zip", "\x1b[2J.zip"):
        with pytest.raises(InputError, match="no name for a folder: give --output") as error:
            main(Args(shutil.copy(capsule, tmp_path / name)))
        assert str(error.value).isprintable()
    assert len([*tmp_path.glob("*/mine")]) == 3


def test_a_damaged_file_is_one_line(capsule, tmp_path):
    raw = capsule.read_bytes()
    for content in (raw[: len(raw) // 2], raw[:100] + bytes(40) + raw[140:]):
        (tmp_path / "damaged").write_bytes(content)
        with one_line():
            main(Args(tmp_path / "damaged", output=tmp_path / "opened"))
    assert not (tmp_path / "opened").exists()


def test_settings_that_would_run_or_hang_something_are_rejected(capsule, tmp_path):
    config = json.loads(contents(capsule)["model/config.json"])
    deep = {"num_hidden_layers": 4096, "layer_types": ["full_attention"] * 4096, "max_window_layers": 4096}
    table = {"model_type": "gpt_neo", "max_position_embeddings": 2**20, "hidden_size": 64, "num_layers": 2}
    table |= {"num_heads": 4, "attention_types": [[["global", "local"], 1]]}  # a buffer of positions x positions
    configs = ({"rope_parameters": {"auto_map": {}}}, {"num_hidden_layers": 10**7}, {"model_type": "evil\x1b[2J"})
    configs += (deep, table, {"model_type": "reformer"})  # an assertion of transformers
    abouts = (
        *({"ranks": 2}, {"versions": "evil"}, {"format": "1\nreplay it:  rm"}, {"metrics": {"a": 10**400}}),
        *({"reward": ["x/mine.py:os.system"]}, {"reward": ["../../evil.py:f\n"]}, {"script": "../grpo.py"}),
        *({"ranks": "1; rm"}, {"flags": []}, {"metrics": {"a": "b"}}),
        {"tokens": {"vocab": 10**9, "special": [], "eos": 0, "pad": 0}},
    )
    scorer = next(Path(name).stem for name in contents(capsule) if "mine" in name)
    codes = b"def score(", b"-" * 200_000, b"(" * 50_000, b"\xff", b"#" * 2**21
    hostile = [(altered, {"config": json.dumps(config | change)}, "not as it should be") for change in configs]
    hostile += [(with_about, change, "") for change in abouts] + [(altered, {scorer: code}, "") for code in codes]
    hostile += [(altered, {left_out: None}, "no capsule") for left_out in ("capsule", "config")]
    for change, members, message in hostile:
        file = change(capsule, tmp_path / "hostile.zip", **members)
        with pytest.raises(InputError, match=message or None) as error:
            main(Args(file, output=tmp_path / "opened"))
        assert str(error.value).isprintable()
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("weights", ["tiny", "step"])
def test_a_config_names_no_kernels_code_or_files(run, tmp_path, weights):
    """transformers would fetch them, some from the hub."""
    main(Args(run, step=1, weights=weights, output=tmp_path / "bug.zip"))
    config = json.loads(contents(tmp_path / "bug.zip")["model/config.json"])
    evil = dict.fromkeys(("_attn_implementation", "experts_implementation", "transformers_weights"), "evil")
    evil |= {"quantization_config": {"quant_method": "evil"}, "anything": "evil/kernels"}
    evil |= {"attn_implementation": {"text_config": "evil"}, "anything_else": ["evil/kernels"]}
    hostile = config | evil | {"rope_parameters": config["rope_parameters"] | evil}
    file = altered(tmp_path / "bug.zip", tmp_path / "hostile.zip", config=json.dumps(hostile))
    main(Args(file, output=tmp_path / "opened"))
    opened = (tmp_path / "opened/model/config.json").read_text()
    assert "evil" not in opened and json.loads(opened)["hidden_size"] == config["hidden_size"]


def test_what_is_printed_is_checked_or_escaped(capsule, tmp_path, capsys):
    """A sender cannot add lines to what is printed, or send commands to the terminal."""
    evil = "0\x1b[2J\nreplay it:  rm"
    metrics = json.loads(contents(capsule)["capsule.json"])["metrics"]
    changes = {"versions": {"commit": evil}, "metrics": {f"reward/{evil}": 1.0} | metrics}
    said = said_by(capsys, with_about(capsule, tmp_path / "a.zip", **changes), output=tmp_path / "a b")
    assert "commit unknown" in said and said.count("replay it:") == 1 and f"--replay '{tmp_path}/a b/recording'" in said
    (tmp_path / "a b/replay").mkdir()
    (tmp_path / "a b/replay/metrics.jsonl").write_text(json.dumps(metrics | {"step": 1}) + "\n")
    said += said_by(capsys, tmp_path / "a b")
    assert r"reward/0\x1b[2J\nreplay it:  rm is the first of" in said
    assert all(line.isprintable() for line in said.splitlines())


def test_flags_of_a_capsule_name_no_file_or_command_of_its_own(capsule, tmp_path):
    """An agent is a command, an engine and a data set class are files: a replay has none of them. The small model is
    without the layers that --freeze names."""
    evil = {"agent": "touch /tmp/x", "rollout_engine": "/tmp/e.py:E", "dataset_class": "/tmp/d.py:D"}
    evil |= {"trust_remote_code": True, "shadow_reward": ["/tmp/s.py:f"], "val_reward": ["/tmp/s.py:f"]}
    file = with_about(capsule, tmp_path / "a.zip", **evil, reward_model=".../judge", freeze=r"layers\.30\.")
    main(Args(file, output=tmp_path / "opened"))
    flags = json.loads((tmp_path / "opened/recording/config.json").read_text())
    assert not evil.keys() & flags.keys() and not flags["freeze"]
    own = [flags["model"], flags["reward_model"], *flags["train_files"], *flags["reward"], flags["output_dir"]]
    assert all(path.startswith(str(tmp_path / "opened")) for path in own)
