"""Which prompts are worth sampling. A group of equal scores has no advantage, whether the prompt is solved or hopeless:
a prompt is as useful as its last scores vary."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from lib.core_algos import ROUNDING
from lib.distributed import all_gather_lists


class Difficulty:
    """The history of each row of a data set, the same on all ranks. skip_after: a row is skipped after so many
    consecutive groups of equal scores. share: the probability that a skipped row is sampled anyway; in `draw`, the
    share of the probability that is uniform over all rows."""

    def __init__(self, num_rows: int, skip_after: int, share: float):
        self.skip_after, self.share = skip_after, share
        self.variance = np.full(num_rows, np.nan)  # of the last group's scores; nan: not seen
        self.alike = np.zeros(num_rows, dtype=int)  # groups in a row whose scores were equal

    def record_scores(self, rows: Iterable[int], scores: Iterable[list[float]]) -> None:
        """rows, scores: of each response of this rank; several scores (of gdpo) are compared one by one.
        A row with one response tells nothing. A collective."""
        of_row: dict[int, list[list[float]]] = defaultdict(list)
        for row, score in all_gather_lists(list(zip(rows, scores, strict=True))):
            of_row[row].append(score)
        for row, own in of_row.items():
            if len(own) > 1:
                # sorted: the same sum on any number of ranks; NaN: a reward that the scorer did not give
                columns = [ordered for column in zip(*own) if (ordered := sorted(x for x in column if x == x))]
                self.variance[row] = sum(float(np.var(ordered)) for ordered in columns)
                alike = all(x[-1] - x[0] <= ROUNDING * max(abs(x[0]), abs(x[-1])) for x in columns)
                self.alike[row] = self.alike[row] + 1 if alike else 0

    def skips(self, row: int, rng: np.random.Generator) -> bool:
        return self.alike[row] >= self.skip_after and rng.random() >= self.share

    def draw(self, n: int, rng: np.random.Generator, rows: range) -> list[int]:
        """n of the rows, in proportion to the variance of their last scores; of an unseen row the largest one seen."""
        variance, N = self.variance[rows.start : rows.stop], len(rows)
        seen = ~np.isnan(variance)
        weights = np.where(seen, variance, variance[seen].max(initial=0.0))
        if not weights.any():
            weights = np.ones(N)
        p = (1 - self.share) * weights / weights.sum() + self.share / N
        return (rows.start + rng.choice(N, n, replace=n > N, p=p / p.sum())).tolist()

    def metrics(self) -> dict[str, float]:
        shares = {"prompts/seen": ~np.isnan(self.variance), "prompts/skipped": self.alike >= self.skip_after}
        return {name: float(rows.mean()) for name, rows in shares.items()}

    def state_dict(self) -> dict[str, list]:
        rows = np.flatnonzero(~np.isnan(self.variance))
        own = {"rows": rows, "variance": self.variance[rows], "alike": self.alike[rows]}
        return {name: values.tolist() for name, values in own.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.variance[state["rows"]], self.alike[state["rows"]] = state["variance"], state["alike"]
