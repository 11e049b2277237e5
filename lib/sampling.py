"""What is drawn: the sampling parameters of a run, which go from the flags to the engines and to the
log-probs of the loss, and random numbers that depend on what they are for, and not on when or where
they are drawn. No torch is imported, since scorers' processes use this."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # like all constants here, wrapped to a signed integer, as int64 arithmetic does


class Truncation(NamedTuple):
    """Which tokens can be sampled. min_p is applied first, then top_k, then top_p to what these two keep: vLLM's order.
    These defaults keep all tokens."""

    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """How to sample. temperature 0 is greedy.

    repetition_penalty: before the temperature, positive logits of tokens of the prompt or the response are divided by
    it, negative ones multiplied.
    stop: a response ends with the token that completes one of these strings.
    """

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    @property
    def truncation(self) -> Truncation | None:
        """None: all tokens can be sampled."""
        cut = Truncation(self.top_p, self.top_k if self.top_k > 0 else -1, self.min_p)
        return None if cut == Truncation() else cut

    @property
    def greedy(self) -> "Sampling":
        return replace(self, temperature=0.0, **Truncation()._asdict())


# ---- random numbers ------------------------------------------------------------------------------
def set_seed(seed: int) -> None:
    """Seeds Python's and numpy's global generators; torch's is left alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(key: str) -> Iterator[None]:
    """Inside, the global generators (Python's, numpy's, torch's on the CPU where it is imported) begin with a hash of
    the key. Afterwards they go on as before.

    So what is drawn depends on neither the process nor what was drawn before: it is the same after a resume, and for
    any number of ranks and workers.
    """
    python, numpy, torch = random.getstate(), np.random.get_state(), sys.modules.get("torch")
    cpu = torch.get_rng_state() if torch else None
    random.seed(key)
    np.random.seed(random.getrandbits(32))
    if torch:
        torch.default_generator.manual_seed(random.getrandbits(32))
    random.seed(key)  # again, as a scorer's process may have no torch
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch:
            torch.set_rng_state(cpu)


def mix64(x: "Tensor") -> "Tensor":
    """splitmix64's output function: a bijection of int64 whose bits look random (Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # >> copies the sign bit: cut it off
    return x


def splitmix64(x: "Tensor") -> "Tensor":
    """A hash of each int64, which separates neighbouring numbers too."""
    return mix64(x.long() * GOLDEN)
