"""tools/check_versions.py: what the installed packages lack is named, with its line."""

import subprocess
import sys

import pytest

from tests.common import ROOT, environment
from tools.check_versions import missing

USES = '''"""Torch's torch.distributed._gone is named here."""
import logging
import not_installed.part
import torch.distributed._gone
from __future__ import annotations
from torch.distributed import _functional_collectives, _gone_too
from torch.distributed.tensor import _redistribute, DTensor
from lib.other import _anything
import os, torch.distributed as dist

logging.getLogger("torch.distributed.tensor._gone")
logging.getLogger("torch.distributed.tensor._redistribute")
dist.ProcessGroupGloo._Gone, dist.ProcessGroupGloo._Options


class Own:
    def _method(self):
        self._field = torch._foreach_copy_, os._exit, value._replace

    def public(self, other):
        return other._method, other._field, other._no_such_attribute
'''


def test_each_missing_name_is_a_line(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/uses.py").write_text(USES)
    found = [line.removeprefix("lib/uses.py:").partition(": ") for line in missing(tmp_path)]
    assert [(line, rest.partition(":")[0]) for line, _, rest in found] == [
        ("4", "torch.distributed._gone"),
        ("6", "torch.distributed._gone_too"),
        ("11", "torch.distributed.tensor._gone"),
        ("13", "dist.ProcessGroupGloo._Gone"),
        ("21", "other._no_such_attribute"),
    ]
    assert "ModuleNotFoundError: No module named 'torch.distributed._gone'" in found[0][2]


@pytest.mark.slow  # it imports all that the code imports
def test_the_installed_versions_have_all_of_it():
    command = [sys.executable, "-m", "tools.check_versions"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "0 missing\n"), done.stdout + done.stderr
