"""A process group of one."""

import os

import pytest
import torch.distributed as dist

from lib.distributed import init_distributed


@pytest.fixture(scope="module")
def world():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())  # the launch variables are for this file only
        yield init_distributed()
        dist.destroy_process_group()
