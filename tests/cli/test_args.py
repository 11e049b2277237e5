"""Bad flags: one line each, before torch is imported, and last where a launcher prints a report of its own."""

import importlib
import importlib.util
import json
import math
import re
import shlex
import subprocess

import pytest
from annotated_types import Gt, Interval, Le
from hypothesis import given
from hypothesis import strategies as st

import dapo
import grpo
from lib import InputError
from lib.args import check_model_path, check_read
from lib.args.groups import check_engine
from lib.cli.flags import (
    OFTEN,
    OTHER_NAMES,
    Names,
    OnReplay,
    OnResume,
    as_flag,
    check_range,
    parse_flags,
    threads_of_environment,
    walk,
)
from lib.cli.yaml_files import read_yaml
from tests.common import PYTHON, ROOT, SMALL, TORCHRUN, TOY_MODEL, environment, fork, launch, one_line, ran, with_slow

# of a script and lists of flags: [exit code, stderr, whether torch was imported] of each
DRIVER = """
import contextlib, io, json, runpy, sys
from tests.parsers import keep_parsers
keep_parsers(lambda args_class: args_class.__qualname__)  # the script has a new class of the same flags each time
script, cases = sys.argv[1], json.loads(sys.argv[2])
answers = []
for flags in cases:
    sys.argv, said = [script, *flags], io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        answers.append([stop.code, said.getvalue(), "torch" in sys.modules])
print(json.dumps(answers))
"""
COMPACT = "--agent true --multi-turn.compact-at 99"
BAD_FLAGS = {  # what the message says, by flags
    "invalid choice": "--loss-agg-mode mean",
    "--max-grad-norm": "--max-grad-nom 1",
    "--group-size 0: must be at least 1": "--group-size 0",
    "10 / (1 x 4) = 2.5": "--prompts-per-step 10 --num-mini-batches 4",
    "30 < 32 + 16": "--micro-batch-tokens 30",
    "--reward-kwargs {x: not JSON": "--reward-kwargs '{x'",
    "--reward-kwargs [1]: give a JSON object": "--reward-kwargs '[1]'",
    "--gpu-memory-utilization": "--gpu-memory 0.5",
    "--multi-turn.interaction": "--multi-turn x",  # the flags with this prefix are named
    "--config absent.json: cannot be read": "--config absent.json",
    "--config ~nobody-here/x.yaml: cannot be read": "--config ~nobody-here/x.yaml",
    "--lr nan: must be a finite number": "--lr nan",
    "--top-p 0.0: must be above 0 and at most 1": "--top-p 0",
    "--seed -1: must be at least 0 and below 4294967296": "--seed -1",
    "--adam-betas 1.0: must be at least 0 and below 1": "--adam-betas 0.9 1",
    "--vision-kwargs min_pixels=9: more than max_pixels=8": "--vision-kwargs min_pixels=9 max_pixels=8",
    "--reward-weights 1e+38": "--reward-weights 1e38",
    "--loss-kwargs: cap: give NAME=VALUE": "--loss decoupled --loss-kwargs cap",
    "--loss dro needs dro_beta": "--loss dro",
    "--loss gspo takes no clip, only cliprange_low, cliprange_high": "--loss gspo --loss-kwargs clip=1",
    "--loss gpg takes no clip": "--loss gpg --loss-kwargs clip=1",
    "--loss sapo: tau_pos=0: Input should be greater than 0": "--loss sapo --loss-kwargs tau_pos=0",
    "--loss sapo: tau_pos=inf: Input should be a finite number": "--loss sapo --loss-kwargs tau_pos=inf",
    "--loss-kwargs: tau_pos is there twice": "--loss sapo --loss-kwargs tau_pos=1 tau_pos=2",
    "cov_bounds=5,1: give LOW,HIGH, LOW below HIGH": "--loss clip_cov --loss-kwargs cov_bounds=5,1",
    "--loss clip_cov takes no seed": "--loss clip_cov --loss-kwargs seed=1",
    "--loss cispo takes no cap": "--val-only --loss cispo --loss-kwargs cap=2",
    "seq_mean_k1=0.99: give LOW,HIGH": "--rollout-correction.reject seq_mean_k1=0.99",
    "there is no flag --loss-kwargs.cap; did you mean --loss-kwargs?": "--loss-kwargs.cap 2",
    "NaN is no finite number": "--reward-kwargs '{\"x\": NaN}'",
    "1e999 is no finite number": "--reward-kwargs '{\"x\": 1e999}'",
    "--freeze model.(: not a regular expression": "--freeze 'model.('",
    "--vllm-kwargs has no effect without --rollout-engine vllm": "--rollout-engine hf --vllm-kwargs '{\"seed\": 1}'",
    "--model ./absent: no such folder": "--model ./absent",
    "absent.jsonl: no such file": "--model data/toy/model --train-files absent.jsonl",
    "--reward absent.py:score: give an existing file": "--reward absent.py:score",
    "--val-reward README.md: give an existing file": "--val-reward README.md",
    "1 numbers for the 2 scorers": "--reward data_source data_source --reward-weights 1",
    "--reward without a scorer": "--reward",
    "--loss-scale-factor has no effect without --loss-agg-mode seq-mean-token-sum-norm": "--loss-scale-factor 9",
    "--token-masks takes no cov_keep, only top_entropy, m2po": "--token-masks cov_keep=0.1",
    "--token-masks takes no entropy, only top_entropy": "--token-masks entropy=1",
    "off_policy_sequence=-5: Input should be greater than or equal to 0": "--token-masks off_policy_sequence=-5",
    "--freeze has no effect with --lora-rank": "--lora-rank 4 --freeze 'model.embed_tokens.*'",
    "that --loss decoupled needs": "--old-log-probs rollout --loss decoupled",
    "would apply its weight pi_old": "--loss decoupled --rollout-correction.reject token_k2=0.1",
    "--kl-target has no effect without": "--kl-target 0.1 --kl-coef 0",
    "--kl-horizon 1": "--kl-target 0.1 --kl-placement reward --kl-coef 0.1 --kl-horizon 1",
    "that a rollout correction needs": "--old-log-probs rollout --rollout-correction.level token",
    "no estimate for .gguf": "--dry-run 1 --model s3://bucket/model.gguf",
    "--rollout-tensor-parallel-size 2 splits a": "--rollout-engine hf --rollout-tensor-parallel-size 2 --dry-run 2",
    "--rollout-tensor-parallel-size 2: the number": "--rollout-engine vllm --rollout-tensor-parallel-size 2",
    "--stop '': an empty string": "--stop end ''",
    "--rollout-gpus 1: this is one process": "--rollout-gpus 1",
    "--rollout-gpus 1 runs vLLM servers": "--rollout-gpus 1 --rollout-engine http://127.0.0.1:1",
    "that --token-masks top_entropy needs": "--old-log-probs rollout --token-masks top_entropy=0.2",
    "--resume auto needs the --run-name": "--resume auto",
    "--run-name '../x': must be one folder's name": "--run-name ../x",
    "--run-name '..': must be one folder's name": "--run-name ..",
    "--agent with --multi-turn.tools: an agent has": "--agent true --multi-turn.tools calculator",
    "--val-kwargs: top_p=2: Input should be less than or equal to 1": "--val-kwargs top_p=2",
    "--val-kwargs top_k has 2 values for 1 --val-files": "--val-kwargs top_k=1,2",
    "--prompt-sampling easy: give uniform, skip:3:0.1 or variance:0.1": "--prompt-sampling easy",
    "--prompt-sampling skip:0: skip_after=0: Input should be greater": "--prompt-sampling skip:0",
    "--total-steps 0: must be at least 1": "--total-steps 0epochs",
    "--multi-turn.context-window 32: must be above --max-prompt": "--agent true --multi-turn.context-window 32",
    "--multi-turn.compact-at 99 needs --multi-turn.max-turn-tokens": COMPACT,
    "99: must be above the tokens of the prompt and a summary": f"{COMPACT} --multi-turn.max-turn-tokens 67",
    "--record with --replay": "--record a --replay b",
    "--replay ./absent: no config.json": "--replay ./absent",
    "--loader-workers read ahead": "--prompt-sampling skip --loader-workers 1",
    "it needs --group-size 2": "--prompt-sampling variance --group-size 1",
    "--record is about training steps": "--record a --val-only",
    "--profile-steps 61: the run has 60 steps": "--profile-steps 3 61",
    "parsing --total-steps: invalid literal for int() with base 10: '1e20'": "--total-steps 1e20",
    "00: must be at least 1 and at most 2147483647": "--group-size 100000000000000000000",
    "parsing --lr: no type matching {None}|FLOAT could be instantiated from ['x']": "--lr x",
    "xxx, which a flag names: File name too long": "--replay " + "x" * 5000,
    "there is no flag --num-generations; did you mean --group-size? docs/coming_from_trl": "--num-generations 8",
    "no flag actor_rollout_ref.rollout.n; did you mean --group-size? docs/": "actor_rollout_ref.rollout.n=8",
    "there is no flag +data.val_files; did you mean --val-files?": "+data.val_files=x",
    "there is no flag 5; --help all has the names": "--lr 1 5",
}
SERVER = "--rollout-engine http://127.0.0.1:1 --async-order finished"
GDPO = "--adv-estimator gdpo --adv-kwargs reward_keys=x"
GIGPO = "--adv-estimator gigpo --multi-turn.tools calculator"
PASS_K = "--adv-estimator grpo_passk"
IN_REWARD = "--kl-coef 0.1 --kl-placement reward"
MT_GRPO = "--adv-estimator mt_grpo --multi-turn.tools"
REWARDED = f"{MT_GRPO} benchmarks/turn_credit.py:calculator"
OWN_BAD_FLAGS = {
    "grpo": {
        "invalid choice 'gae'": "--adv-estimator gae",
        "singleton=one: Input should be 'raw' or 'zero'": "--adv-estimator rloo --adv-kwargs singleton=one",
        "--adv-estimator rloo takes no epsilon, only": "--adv-estimator rloo --adv-kwargs epsilon=1",
        "gdpo weighs several rewards: name them, --adv-kwargs reward_keys=a,b": "--adv-estimator gdpo",
        "reward_keys names right twice": "--adv-estimator gdpo --adv-kwargs reward_keys=right,a,right",
        "gigpo credits the turns of an episode: it needs --multi-turn": "--adv-estimator gigpo",
        "gigpo with --multi-turn.max-turns 1: an episode has one": f"{GIGPO} --multi-turn.max-turns 1",
        "gigpo with --loss geo_mean: its gradient uses the row's mean": f"{GIGPO} --loss geo_mean",
        "rewards of turns, and --multi-turn.tools python search:c.jsonl give none": f"{MT_GRPO} python search:c.jsonl",
        "mt_grpo compares the rewards of turns: --multi-turn.reward-coef 0": f"{REWARDED} --multi-turn.reward-coef 0",
        "99 with --adv-estimator mt_grpo": f"{REWARDED} --multi-turn.compact-at 99 --multi-turn.max-turn-tokens 4",
        "--kl-placement loss": f"{GDPO} --kl-placement reward --kl-coef 0.1",
        "--kl-placement reward with --adv-estimator grpo": f"{IN_REWARD} --adv-estimator grpo",
        "--kl-placement reward with --adv-estimator maxrl": f"{IN_REWARD} --adv-estimator maxrl",
        "reward_keys=...,reward_model": f"{GDPO} --reward-model {TOY_MODEL}",
        "--multi-turn.reward-coef 0": f"{GDPO} --multi-turn.tools calculator",
        "drop it from reward_keys": f"{GDPO} reward_weights=0",
        "maxrl with --group-size 1: every advantage is 0": "--adv-estimator maxrl --group-size 1",
        "zero with --group-size 1: every advantage is 0": "--adv-kwargs singleton=zero --group-size 1",
        "--loss-agg-mode token-sum has none": "--zero-variance drop_from_denominator --loss-agg-mode token-sum",
        "--old-log-probs has no effect with --loss gpg": "--loss gpg --old-log-probs rollout",
        "epsilon has no effect": f"{PASS_K} --adv-kwargs epsilon=1 norm_adv_by_std_in_grpo=False",
        "there is no flag --singleton; did you mean --adv-kwargs?": "--singleton zero",
        "--async-level 1 needs --rollout-gpus or": "--async-level 1",
        "--async-order finished: needs --async-level 2": f"{SERVER} --async-level 1",
    },
    "ppo": {
        "--critic-model ./absent: no such folder": "--critic-model ./absent",
        "drop one": "--gae-lambda-policy 1 --length-adaptive-alpha 1",
    },
    "remax": {},
    "dapo": {
        "--adv-estimator grpo takes no reward_keys": "--adv-kwargs reward_keys=right",
        "ignores all other rewards: --overlong-buffer 0": GDPO,
        "--zero-variance refill compares": "--group-size 1",
        "--overlong-buffer 17: must be at most 16": "--overlong-buffer 17",
        "slow groups would grow too old": f"{SERVER} --async-level 2",
    },
}


@pytest.mark.parametrize("script", OWN_BAD_FLAGS)
def test_a_bad_flag_is_one_line_and_there_is_help_before_torch_is_imported(script):
    """The flags of all scripts are one code: grpo.py has all cases, the others every eighth."""
    shared = BAD_FLAGS if script == "grpo" else dict([*BAD_FLAGS.items()][::8])
    cases = shared | OWN_BAD_FLAGS[script]
    each = json.dumps([*map(shlex.split, cases.values()), ["--help"]])
    command = [*PYTHON, "-c", DRIVER, str(ROOT / f"{script}.py"), each]
    env = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *answers, (ended, shown, for_help) = json.loads(done.stdout)
    assert ended == 0 and "--group-size" in shown and not for_help
    for message, (code, said, torch_imported) in zip(cases, answers, strict=True):
        assert code == 2 and message in said and not torch_imported, (message, said)
        assert said.splitlines() == [said.strip()]


FIELDS = [field for script in OWN_BAD_FLAGS for field in walk(importlib.import_module(script).Args())]


def test_every_number_has_its_range_at_the_field():
    for name, value, marks in FIELDS:
        check_range(name, value, marks)
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert [mark for mark in marks if not isinstance(mark, Names | OnReplay | OnResume)], name


def test_other_names_of_flags_are_on_their_page():
    """With the flag that --help has: a row of a table that names ours, if that row has flags, has this one."""
    flags = {name for name, *_ in FIELDS}
    for page, names in read_yaml(OTHER_NAMES, "").items():
        rows = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("|")]
        for name, flag in names.items():
            assert flag in flags, (name, flag)
            last = name.rpartition(".")[2]
            there = [row for row in rows if re.search(rf"\b({re.escape(last)}|{last.replace('_', '-')})\b", row)]
            assert any(as_flag(flag) in row for row in there), (page, name, flag, there)


@given(st.floats(), st.floats(), st.floats())
def test_a_number_is_taken_where_its_bounds_hold(value, low, high):
    check_range("number", None, (Gt(low), Le(high)))
    for number, marks, holds in (
        (value, (OnResume.MAY_CHANGE, Gt(low), Le(high)), low < value <= high),
        ((value, value), (Interval(ge=low, lt=high),), low <= value < high),
    ):
        if holds and math.isfinite(value):
            check_range("a_number", number, marks)
        else:
            with pytest.raises(InputError, match=r"^--a-number "):
                check_range("a_number", number, marks)


def flags_in(shown: str) -> set[str]:
    return set(re.findall(r"^(?:│|\|)? *(--[a-z][\w.-]+)", shown, re.M)) - {"--help"}


@pytest.mark.parametrize("encoding", with_slow(["utf-8", "ascii"], "utf-8"))
def test_the_help_is_two_screens_or_a_group(encoding):
    def shown(*words):
        env = environment() | {"PYTHONIOENCODING": encoding, "COLUMNS": "80"}
        done = subprocess.run([*PYTHON, "grpo.py", *words], cwd=ROOT, env=env, capture_output=True, text=True)
        return ran(done).stdout

    often, group, everything = shown("--help"), shown("--lr", "1", "--help", "multi_turn"), shown("-h", "all")
    assert len(often.splitlines()) <= 120 and flags_in(often) <= {as_flag(name) for name in OFTEN}
    assert often.index("python grpo.py --model") < often.index("--help GROUP") < often.index("--group-size INT")
    assert flags_in(group) == {as_flag(name) for name, *_ in walk(grpo.Args()) if name.startswith("multi_turn")}
    assert flags_in(everything) == {as_flag(name) for name, *_ in walk(grpo.Args())} and "None)" not in everything
    assert {name for name, *_ in FIELDS} >= OFTEN
    with pytest.raises(InputError, match=r"^--help x: give one of run, model, .*, multi-turn, .*, algorithm or all$"):
        parse_flags(grpo.Args, ["--help", "x"])


NO_SECOND = "{} (without a second update a step)"
NO_EFFECT = {  # what is noted, by flags
    "--lr 1e-4": (),
    "--keep-checkpoints 1 --save-every 0 --share-prompts --attn-implementation sdpa": (
        "--keep-checkpoints (without --save-every or --keep-best)",
        "--share-prompts (without --attn-implementation auto, packed_sdpa or varlen)",
    ),
    "--clip-ratio-high 0.3": (NO_SECOND.format("--clip-ratio-high"),),
    "--clip-ratio-high 0.3 --update-epochs 2": (),
    "--loss decoupled --loss-kwargs cliprange_high=0.3 cap=2": (NO_SECOND.format("--loss-kwargs cliprange_high"),),
    "--val-only --loss cispo --loss-kwargs cliprange_high=3 --temperature 0.5 --val-temperature 0.5 --lora-rank 2": (
        "--temperature, --loss, --loss-kwargs (with --val-only)",
    ),
    "--replay . --rollout-engine vllm --gpu-memory-utilization 0.5": (
        "--rollout-engine, --gpu-memory-utilization (with --replay)",
    ),
}


def test_flags_that_change_no_result_are_noted(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for words, notes in NO_EFFECT.items():
        assert parse_flags(grpo.Args, words.split()).no_effect == notes


def test_rollout_gpus_make_the_engine_vllm_and_flags_of_images_are_for_models_that_read_them(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = ["--rollout-gpus", "2", "--rollout-engine"]
    assert parse_flags(grpo.Args, [*words, "auto"]).rollout.engine == "vllm"
    parse_flags(grpo.Args, [*words, "vllm"])
    with pytest.raises(InputError, match=r"--rollout-gpus 2 runs vLLM .*, --rollout-engine hf is another engine: drop"):
        parse_flags(grpo.Args, [*words, "hf"])

    args = parse_flags(grpo.Args, ["--vision-kwargs", "max_pixels=5000"])
    check_read(args, vision=True)
    with pytest.raises(InputError, match="--vision-kwargs has no effect without a --model that reads images"):
        check_read(args, vision=False)


def test_config_gives_flags_that_the_command_line_overrides(tmp_path):
    """A run's config.json: of its flags, settings among them, all but those of its start; also YAML."""
    unread = ["--clip-ratio-high", "0.5", "--keep-checkpoints", "3"]
    first = ran(fork("grpo", tmp_path, "--total-steps", "1", *SMALL, "--no-shuffle", *unread))
    config = next(tmp_path.glob("*/config.json"))
    dumped = json.loads(config.read_text())
    assert (dumped["clip_ratio_high"], dumped["shuffle"]) == (0.5, False), first.stdout
    notes = ["--keep-checkpoints (without --save-every or --keep-best)", NO_SECOND.format("--clip-ratio-high")]
    assert dumped["no_effect"] == notes and f"no effect here: {'; '.join(notes)}\n" in first.stdout
    again = tmp_path / "again"
    ran(fork("grpo", again, "--config", str(config), "--clip-ratio-low", "0.1", "--run-name", "run"))
    now = json.loads((again / "run/config.json").read_text())
    differ = {name for name in now if now[name] != dumped[name]} - {"history"}  # it has the second of the start
    assert differ == {"output_dir", "run_name", "config", "clip_ratio_low", "no_effect"}
    (tmp_path / "flags.yaml").write_text("prompts_per_step: 10\nmulti_turn:\n  max_turns: 0\n")
    with pytest.raises(InputError, match=r"--multi-turn\.max-turns 0: must be above 0"):
        parse_flags(grpo.Args, ["--config", str(tmp_path / "flags.yaml")])
    of_none = "rollout_correction:\n  batch_normalize: true\nadv_kwargs: [norm_adv_by_std_in_grpo=false]\n"
    (tmp_path / "flags.yaml").write_text(of_none + "compile: false\nkl_target: null\n")
    parse_flags(dapo.Args, ["--adv-estimator", "grpo_passk", "--config", str(tmp_path / "flags.yaml")])
    (tmp_path / "flags.yaml").write_text("clip_ratio_low: 0.2\nkl_horizon: 10000\n")  # defaults ask for nothing
    parse_flags(grpo.Args, ["--loss", "gspo", "--config", str(tmp_path / "flags.yaml")])
    (tmp_path / "flags.yaml").write_text("clip_ratio_low: 0.3\n")
    with pytest.raises(InputError, match="--clip-ratio-low has no effect"):
        parse_flags(grpo.Args, ["--loss", "gspo", "--config", str(tmp_path / "flags.yaml")])


CONFIGS = {  # what the message says, by the file's text
    "there is no flag prompts_per_steps; did you mean --prompts-per-step?": "prompts_per_steps: 10",
    "there is no flag multi_turn; did you mean --multi-turn.tools": "lr: 1\nmulti_turn: [calculator]",
    "there is no flag multi_turn.max_turn; did you mean --multi-turn.max-turns?": "lr: 1\nmulti_turn:\n  max_turn: 3",
    "there is no flag engine_ranks; did you mean --rollout-tensor-parallel-size?": "engine_ranks: 8",
    "there is no flag 1; --help all has the names": "1: 2",
    "cannot be read: maximum recursion depth": "[" * 100_000,
    "Exceeds the limit": f"seed: {'9' * 5000}",
    "track --lr: a value does not begin with --": 'track: [wandb, "--lr", "1"]',
    "track: give a list of plain values": "track: [[wandb]]",
    "shuffle: give true or false": "shuffle: maybe",
    "reward_kwargs takes no mapping": "reward_kwargs: {x: 1}",
    "line 1: found unhashable key": "? [a]\n: 1",
    "line 2: could not find expected ':'": "lr: 1\nseed",
    "cannot be read: unacceptable character": "lr: \0",
    "line 2: could not determine a constructor for the tag": "lr: 1\nmodel: !!python/name:os.system x",
    "give a run's config.json": "lr",
}


SWITCHES = {
    "": "auto",
    "--gradient-checkpointing auto": "auto",
    "--gradient-checkpointing": "on",
    "--gradient-checkpointing=off --lr 1": "off",
    "--gradient-checkpointing on --no-gradient-checkpointing": "off",
}


def test_a_switch_that_may_be_auto(tmp_path):
    """Typed as a switch, or with a value; in a config also as true or false."""
    config = tmp_path / "flags.yaml"
    for words, value in SWITCHES.items():
        args = parse_flags(grpo.Args, words.split())
        assert args.model.gradient_checkpointing == value and args.lr == (1 if "--lr" in words else 1e-4)
        config.write_text(f"gradient_checkpointing: {({'on': 'true', 'off': 'false'}).get(value, value)}")
        assert parse_flags(grpo.Args, ["--config", str(config)]).model.gradient_checkpointing == value


@pytest.mark.parametrize("message", CONFIGS)
def test_a_bad_config_is_one_line_with_its_place(tmp_path, message):
    file = tmp_path / "flags.yaml"
    file.write_text(CONFIGS[message])
    with pytest.raises(InputError) as error:
        parse_flags(grpo.Args, ["--config", str(file)])
    said = str(error.value)
    assert said.startswith(f"--config {file}") or "Exceeds" in message  # which tyro reads
    assert message in said and "\n" not in said and len(said) < 400


def test_values_of_a_config_are_as_typed(tmp_path, monkeypatch):
    """YAML itself reads 010 as 8 and no as false."""
    file = tmp_path / "flags.yaml"
    file.write_text("group_size: 010\nmodel: no\nlr: 1e-5\nshuffle: false\nkl_target: null\ntrain_files: [train.jsonl]")
    (tmp_path / "no").symlink_to(TOY_MODEL)
    (tmp_path / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    args = parse_flags(grpo.Args, ["--config", str(file)])
    assert (args.group_size, args.model.model, args.optimizer.lr) == (10, "no", 1e-5)
    assert (args.data.shuffle, args.kl_target) == (False, None)


@pytest.mark.parametrize(
    ("launcher", "flags", "message"),
    [
        (TORCHRUN, ["--group-size", "0"], "--group-size 0: must be at least 1"),
        pytest.param([*TORCHRUN[:-1], "1"], ["--loss", "dro"], "dro_beta", marks=pytest.mark.slow),  # by torch's side
    ],
    ids=["value", "with torch"],
)
def test_a_launchers_report_ends_with_the_reason(tmp_path, launcher, flags, message):
    done = launch("grpo", tmp_path, *flags, launcher=launcher)
    assert done.returncode != 0
    assert message in done.stderr[done.stderr.rindex("traceback : ") :]
    assert "To enable traceback see" not in done.stderr and "new message format" not in done.stderr


def test_paths_threads_and_engines_are_checked(tmp_path, monkeypatch):
    paths = {"absent": "no such folder", "absent.gguf": "no such file", "": "no config.json", "empty": "no weights"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text("{}")
    for path, message in paths.items():
        with one_line(f"--model .*{message}"):
            check_model_path(str(tmp_path / path))
    for threads in ("x", "0", "-1", "1.5", "4,2", "9" * 5000, ""):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with one_line("^OMP_NUM_THREADS="):
            threads_of_environment()
    for name in ("hf", "vllm" if importlib.util.find_spec("vllm") else "hf", "http://a:1", "http://a:1,https://b:2"):
        check_engine(name, 1)
    for name, ranks, message in (
        ("sglang", 1, "http://host:port"),
        ("", 1, "http://host:port"),
        ("http://a:1,b:2", 1, "http://host:port"),
        ("hf", 2, "splits a vLLM engine"),
    ):
        with one_line(message):
            check_engine(name, ranks)
