"""--cpu-offload optimizer: the optimizer's state is in CPU memory, and on the device for its own step only, so that it
takes no memory from samples and activations (as in ZeRO-Offload, arXiv 2101.06840, but the device updates)."""

from itertools import accumulate, groupby

import torch
from torch import Tensor

from lib.distributed.collectives import BUCKET_BYTES
from lib.distributed.device import synchronize


class HostState:
    """The state of an optimizer whose update of a parameter reads no other parameter's state, as that of AdamW."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device):
        self.optimizer, self.device = optimizer, device
        self._host: dict[tuple[Tensor, str], Tensor] = {}  # pinned, for all steps

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self) -> None:
        """The same update as optimizer.step(), of about BUCKET_BYTES of parameters at a time."""
        gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        ends = accumulate(p.nbytes for p in gradients)
        self.optimizer.zero_grad()
        for _, bucket in groupby(zip(gradients, ends), lambda item: item[1] // BUCKET_BYTES):
            parameters = [p for p, _ in bucket]
            for p in parameters:
                p.grad, state = gradients[p], self.optimizer.state.get(p, {})
                state.update({name: x.to(self.device, non_blocking=True) for name, x in state.items()})
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._offload(parameters)
        synchronize()
        for p, gradient in gradients.items():
            p.grad = gradient

    def offload(self) -> None:
        """Moves the whole state to CPU memory: a checkpoint was loaded to the device."""
        self._offload(self._parameters)
        synchronize()

    def _offload(self, parameters: list[Tensor]) -> None:
        """Begins to."""
        for p in parameters:
            state = self.optimizer.state.get(p, {})
            for name, x in state.items():
                if x.numel() > 1:  # the number of updates stays
                    if (p, name) not in self._host:
                        pinned = self.device.type != "cpu"
                        self._host[p, name] = torch.empty_like(x, device="cpu", pin_memory=pinned)
                    state[name] = self._host[p, name].copy_(x, non_blocking=True)
