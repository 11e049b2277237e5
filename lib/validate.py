"""Validation: the responses to all validation prompts, their scores, and the metrics of those."""

import math
from dataclasses import dataclass

from torch.utils.data import Dataset

from lib.args import Sizes, ValidationArgs
from lib.data import collate_fn
from lib.data_proto import DataProto
from lib.distributed import all_gather_lists, enter_stage, timed
from lib.metrics import validated_rows, validation_metrics
from lib.model import Policy
from lib.rollout import Rollouts, Sampling
from lib.scores import Rewards
from lib.tracking import Tracker, sample_rows


@dataclass
class Validation:
    args: ValidationArgs
    dataset: Dataset | None
    rollouts: Rollouts
    rewards: Rewards
    sizes: Sizes
    tracker: Tracker

    @timed("validation")
    def __call__(self, actor: Policy, step: int) -> dict[str, float]:
        """validation_metrics of the policy after `step` steps. Writes samples.jsonl. A collective."""
        metrics = self.rollouts.sync(actor, step)
        args, world = self.args, self.rollouts.world
        sampling = Sampling(self.rollouts.sampling.max_response_length, args.val_temperature, args.val_top_p)
        per_rank = math.ceil(len(self.dataset) / world.size)
        per_call = max(1, self.sizes.local_rows // args.val_samples)
        results, shown = [], []
        for start in range(0, per_rank, per_call):
            enter_stage(f"validation at step {step}")
            # the same number on every rank: what is beyond the data set's end keeps the others company
            rows = [world.rank + world.size * i for i in range(start, min(start + per_call, per_rank))]
            items = [self.dataset[min(i, len(self.dataset) - 1)] for i in rows]
            prompts = DataProto.from_single_dict(collate_fn(items)).to(world.device)
            batch = prompts.repeat(args.val_samples, interleave=True)
            numbers = [row * args.val_samples + n for row in rows for n in range(args.val_samples)]
            batch = self.rollouts.generate(batch, sampling, step=-1, numbers=numbers)
            extras, _ = self.rewards.submit(batch).add_to(batch)
            batch = batch[: sum(row < len(self.dataset) for row in rows) * args.val_samples]
            results += validated_rows(batch, extras, [n // args.val_samples for n in numbers])
            shown += sample_rows(batch, self.rewards.manager.tokenizer)
        results = sorted(all_gather_lists(results), key=lambda row: row.prompt)  # in one order, for any number of ranks
        self.tracker.samples(all_gather_lists(shown), step, show=args.show_samples)
        return metrics | validation_metrics(results)

    def close(self) -> None:
        self.rewards.close()
