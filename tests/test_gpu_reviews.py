"""Findings of the reviews for GPUs that no other file tests (benchmarks/gpu_check/claims.py)."""

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check.attention import rows_of
from lib.core_algos.advantages import _gae
from lib.distributed import init_distributed, launch
from planner.fake_gpu import register_fake_gpu
from tests.distributed.test_waits import exit_code, start_ranks, store  # noqa: F401  two fixtures


class OnDevice(TorchDispatchMode):
    """Counts operations whose result is on the accelerator."""

    launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.launches += isinstance(result, torch.Tensor) and result.device.type == "gpu"
        return result


def launches_of_gae(T: int) -> int:
    device = register_fake_gpu()
    with FakeTensorMode(), OnDevice() as counted:
        rewards, values, mask = (torch.ones(4, T, device=device) for _ in range(3))
        _gae(rewards, values, mask, 1.0, 0.95)
    return counted.launches


def test_no_cudnn_attention_and_no_kernel_per_column(start_ranks):  # noqa: F811
    """G8: cuDNN's attention plans each new shape for up to a second. G13: eight kernels for each token of the longest
    response took 5 s at 64k tokens."""

    def attention(_):
        launch.accelerator = lambda: torch.device("cuda")
        torch.cuda.set_device = lambda device: None
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert init_distributed().device.type == "cuda"
        assert not torch.backends.cuda.cudnn_sdp_enabled()

    def gae(_):
        assert launches_of_gae(64) == launches_of_gae(8) < 40

    for main in (attention, gae):  # in a process of its own, as torch cannot unregister the accelerator
        assert [exit_code(rank) for rank in start_ranks(1, main)] == [0], main


def test_gpu_check_compares_attentions_on_prompts_of_many_lengths():
    """N6: packed_sdpa runs sequences of one shape together, so prompts of one length would flatter it."""
    batch = rows_of(16384, "many short responses", 100, torch.device("cpu"))
    width = batch.batch["responses"].shape[1]
    lengths = batch.batch["attention_mask"][:, :-width].sum(1)[::8]  # a group has one prompt
    assert len(lengths) > 20 and len(lengths.unique()) > len(lengths) / 2
