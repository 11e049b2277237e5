"""The sampling parameters of a run. They go from the flags to the engines, and to the log-probs of the loss."""

from dataclasses import dataclass, replace
from typing import NamedTuple


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
