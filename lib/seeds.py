"""Seeds what user code draws: dataset classes, scorers. No torch is imported, since scorers' processes use this."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


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
