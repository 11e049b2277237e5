"""Checks of a step's batch after the update: what holds for the rows of every healthy step.

What is violated is a metric faults/<name>, as in lib/model/update_checks.py."""

import numpy as np
import torch

from lib.core_algos import masked_mean, masked_sum
from lib.data_proto import DataProto
from lib.distributed import Metric, faults

CLOSE = 1e-3  # relative: float32 sums of a row differ by some 1e-6


def batch_faults(batch: DataProto) -> dict[str, Metric]:
    """Of this rank's rows, among them all rows of each uid. Reads most columns of lib/columns.py."""
    t = batch.batch
    sampled, loss_mask, valid = (t[name].bool() for name in ("response_mask", "loss_mask", "valid_mask"))
    T = sampled.shape[1]
    attended = t["attention_mask"].bool()
    given = attended[:, -T:]
    reasons = batch.non_tensor_batch["finish_reason"]
    stopped = torch.tensor([reason == "stop" for reason in reasons], device=given.device) & sampled.any(1)
    found = {
        "mask_outside_response": (sampled & ~given).sum() + (loss_mask & ~sampled).sum(),
        "end_not_trained": (stopped & ~sampled.gather(1, given.sum(1, keepdim=True).clamp(min=1) - 1)[:, 0]).sum(),
    }
    if (places := t["position_ids"]).ndim == 2:  # not mrope
        jumps = (places.diff(dim=1) != 1) & (places[:, 1:] != 0)  # a segment of several turns begins at 0
        found["positions"] = (jumps & attended[:, 1:] & attended[:, :-1]).sum()

    _, first, number = np.unique(batch.non_tensor_batch["uid"].astype(str), return_index=True, return_inverse=True)
    lead = torch.from_numpy(first[number]).to(given.device)  # (B,) the first row of the row's group
    group = torch.from_numpy(number).to(given.device)
    found["group_of_two_prompts"] = (t["prompts"] != t["prompts"][lead]).any(1).sum()
    ids = t["group"]
    found["group_ids"] = (ids != ids[lead]).sum() + (len(ids.unique()) != len(first))

    advantage, alive = masked_mean(t["advantages"], valid, dim=1), valid.any(1)  # (B,)
    totals = torch.zeros(len(first), dtype=torch.float64, device=given.device)
    of_rows = advantage, advantage.abs(), torch.ones_like(alive), alive
    total, sizes, rows, live = (totals.index_add(0, group, x.double()) for x in of_rows)
    # Estimators whose advantages add up to 0 in whole groups can tell. Two groups, for one may do so by chance; and the
    # same for all tokens of a row, for credit for turns may be 0 in groups of single turns.
    large, whole = total.abs() > CLOSE * advantage.abs().max(), (live == rows) & (sizes > 0)
    tells = (whole.sum() > 1) & ~(large & whole).any()
    tells &= ((t["advantages"] - advantage[:, None]).abs().where(valid, 0) <= CLOSE * advantage.abs().max()).all()
    found["dead_rows_count"] = (tells & large & (live > 1)).sum() + (~alive & (t["advantages"] != 0).any(1)).sum()

    if "values" in t:  # whatever gamma and lambda are, the return of the last token is its reward
        last = (valid * torch.arange(T, device=valid.device)).argmax(1, keepdim=True)
        off = (t["returns"] - t["token_level_rewards"]).abs().where(valid, 0).gather(1, last)[:, 0]
        found["returns_without_reward"] = (stopped & alive & (off > CLOSE * (1 + t["values"].abs().amax(1)))).sum()
    if "ref_log_prob" in t and "old_log_probs" in t:
        penalty, far = t["token_level_scores"] - t["token_level_rewards"], t["old_log_probs"] - t["ref_log_prob"]
        paid = -penalty * far  # k1: never above 0; of k2 and k3, whose far may be below 0, the penalty never is
        found["kl_is_paid"] = (masked_sum(paid, valid) > 0) & (masked_sum(penalty, valid) < 0)
        found["kl_is_paid"] &= masked_mean(far.abs(), valid) > CLOSE**2
    return faults(found)
