"""Random numbers that depend on what they are for, and not on when or where they are drawn."""

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # like all constants here, wrapped to a signed integer, as int64 arithmetic does


def mix64(x: Tensor) -> Tensor:
    """splitmix64's output function: a bijection of int64 whose bits look random (Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # >> copies the sign bit: cut it off
    return x


def splitmix64(x: Tensor) -> Tensor:
    """A hash of each int64, which separates neighbouring numbers too."""
    return mix64(x.long() * GOLDEN)
