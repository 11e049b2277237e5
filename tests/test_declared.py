"""What losses, estimators and token masks declare is what their functions take. A new one is one function. Wrong
settings: tests/cli/test_args.py."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from typing import get_type_hints

import pytest

import grpo
from lib.columns import COLUMNS
from lib.declared import ADV_ESTIMATORS, POLICY_LOSSES, REQUIRED, TOKEN_MASKS, parsed
from tests.common import ROOT, SMALL, TOY_MODEL, environment, ran

ALL = [*POLICY_LOSSES.values(), *ADV_ESTIMATORS.values(), *TOKEN_MASKS.values()]


@pytest.mark.parametrize("declared", ALL, ids=lambda declared: declared.choice)
def test_a_declaration_is_the_signature(declared):
    function = getattr(import_module(declared.module), declared.function)
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters
    for name, setting in declared.settings.items():
        assert parameters[name].kind == inspect.Parameter.KEYWORD_ONLY and hints[name] == setting.type
        default = parameters[name].default
        assert setting.default == (REQUIRED if default is inspect.Parameter.empty else default)
        if setting.default not in (REQUIRED, ()):
            default = re.sub(r"[() ]", "", str(setting.default))
            assert parsed("", {name: default}, {name: setting}) == {name: setting.default}  # is in its own range
    assert {*declared.columns} <= {*COLUMNS} & {*parameters} and declared.summary


def test_settings_are_the_numbers_that_are_typed():
    values = grpo.Args(loss="decoupled", loss_kwargs=("cliprange_low=3e-4", "cliprange_high=1")).loss_settings
    assert values == {"cliprange_low": 3e-4, "cliprange_high": 1} and type(values["cliprange_high"]) is float
    words = ("reward_keys=a.f,b.g", "reward_weights=1,-0.5", "singleton=zero")
    args = grpo.Args(adv_estimator="gdpo", adv_kwargs=words)
    assert args.reward_keys == ("a.f", "b.g")
    assert args.adv_settings == {"reward_keys": ("a.f", "b.g"), "reward_weights": (1.0, -0.5), "singleton": "zero"}
    words = ("cov_bounds=1,5", "cliprange_low=0.1", "cov_ratio=0.5")
    args = grpo.Args(loss="clip_cov", loss_kwargs=words, token_masks=("m2po=0.04",))
    assert args.loss_settings == {"cliprange_low": 0.1}
    masks = {"m2po": {"threshold": 0.04}, "cov_keep": {"cov_bounds": (1.0, 5.0), "cov_ratio": 0.5}}
    assert args.mask_settings == masks


SCALED = '''

def scaled(old_log_prob, log_prob, advantages, response_mask, *, factor: Positive = 1.0) -> Loss:
    """L = -factor A log_prob."""
    log_prob, log_ratio, advantages = _prepare(old_log_prob, log_prob, advantages, response_mask)
    return -factor * advantages * log_prob, _metrics(log_ratio)
'''


def test_a_new_loss_is_one_function(tmp_path):
    """In a copy of the code: its name and its hyper-parameter are values of flags, checked before torch is imported."""
    for folder in ("lib", "data", "rewards"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "grpo.py", tmp_path)
    with (tmp_path / "lib/core_algos/papers/losses.py").open("a") as file:
        file.write(SCALED)
    how = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 300}
    command = [sys.executable, "grpo.py", "--model", TOY_MODEL, *SMALL, "--loss", "scaled"]
    command += ["--total-steps", "1", "--run-name", "run"]
    ran(subprocess.run([*command, "--loss-kwargs", "factor=2"], **how))
    config = json.loads((tmp_path / "runs/run/config.json").read_text())
    assert config["loss"] == "scaled" and config["loss_kwargs"] == ["factor=2"]
    said = subprocess.run([*command, "--loss-kwargs", "factor=0"], **how).stderr
    assert "error: --loss scaled: factor=0: Input should be greater than 0" in said
