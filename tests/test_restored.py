"""tests/restored.py: what a test leaves patched is named, and restored for the next one."""

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface

import lib.columns
from tests.restored import all_restored


def test_what_a_test_leaves_patched_is_named_and_restored():
    zeros, sdpa, columns = torch.zeros, AttentionInterface._global_mapping["sdpa"], lib.columns.COLUMNS
    with pytest.raises(pytest.fail.Exception) as failed, all_restored("test_x"):
        torch.zeros, lib.columns.COLUMNS = None, {}
        torch.set_default_dtype(torch.float64)
        AttentionInterface.register("mine", test_what_a_test_leaves_patched_is_named_and_restored)
        AttentionInterface.register("sdpa", zeros)
    said = str(failed.value)
    for name in ("torch.zeros", "lib.columns.COLUMNS", "torch.set_default_dtype", "'mine' in", "'sdpa' in"):
        assert name in said
    assert said.startswith("test_x leaves patched: ") and said.count(", ") == 4
    assert torch.zeros is zeros and lib.columns.COLUMNS is columns and torch.get_default_dtype() == torch.float32
    assert AttentionInterface._global_mapping["sdpa"] is sdpa and "mine" not in AttentionInterface._global_mapping


def test_what_a_program_sets_for_its_process_is_restored_without_a_word(tmp_path):
    folder, path = Path.cwd(), [*sys.path]
    with all_restored("test_x"):
        os.environ["RANK"] = "7"
        os.chdir(tmp_path)
        sys.path.insert(0, str(tmp_path))
        sys.modules["lib.columns"] = None
    assert "RANK" not in os.environ and Path.cwd() == folder and sys.path == path
    assert sys.modules["lib.columns"] is lib.columns
