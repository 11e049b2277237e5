"""Which tokens of a step are trained on, counted, and in a group."""

from torch import Tensor


class LossMasks:
    """The masks (B, T) of all ranks' rows, narrowed by one rule after the other.

    loss_mask: tokens that are trained on. denominator_mask: tokens that are counted in the means of the loss.
    valid_mask: tokens of the rows that are in a group, and in the statistics of advantages. dropped: for each reason,
    the rows whose last token it took from the loss; `dead` is without a token or a score from the start."""

    def __init__(self, response_mask: Tensor):
        self.loss_mask = self.denominator_mask = self.valid_mask = mask = response_mask.bool()
        self.dropped = {"training/rows_dropped/dead": float((~mask.any(1)).sum())}

    def drop(self, what: Tensor, reason: str, *, uncount: bool = False, out_of_group: bool = False) -> None:
        """Takes tokens (B, T) or rows (B,) from the loss; with `uncount` also from its means. out_of_group: rows that
        are left without a token are in no group."""
        what, before = what if what.ndim == 2 else what[:, None], self.loss_mask.any(1)
        self.loss_mask = self.loss_mask & ~what
        after = self.loss_mask.any(1)
        if uncount:
            self.denominator_mask = self.denominator_mask & ~what
        if out_of_group:
            self.valid_mask = self.valid_mask & after[:, None]
        self.dropped[f"training/rows_dropped/{reason}"] = float((before & ~after).sum())

    def columns(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("loss_mask", "denominator_mask", "valid_mask")}
