"""The batch sizes of a step, and the ranks that train."""

from dataclasses import dataclass

from lib import InputError, launched_ranks
from lib.args.script import ScriptArgs
from lib.cli.flags import as_flag


@dataclass
class Sizes:
    """The batch sizes of a step. Those named local_ are per rank."""

    group_size: int
    num_mini_batches: int
    update_epochs: int
    local_prompts: int
    local_rows: int
    local_mini_batch_rows: int

    @property
    def updates_per_step(self) -> int:
        return self.num_mini_batches * self.update_epochs


def training_ranks(args: ScriptArgs) -> int:
    """The ranks that train, of this job or of the one that --dry-run asks about. Raises InputError if there is none."""
    ranks, engines = args.run.dry_run or launched_ranks(), args.rollout.rollout_gpus
    if engines and ranks == 1 and not args.run.dry_run:
        raise InputError(
            f"--rollout-gpus {engines}: this is one process, and it trains: start several by torchrun (docs/scaling.md)"
        )
    if engines >= ranks:
        raise InputError(f"--rollout-gpus {engines}: of {ranks} ranks at least one must train: at most {ranks - 1}")
    return ranks - engines


def step_sizes(args: ScriptArgs, world_size: int) -> Sizes:
    """The batch sizes of a step. Raises InputError, with the formula and its numbers, where they do not fit."""
    if not args.validation.val_only and args.prompts_per_step % (world_size * args.num_mini_batches):
        raise InputError(
            "prompts_per_step / (ranks x num_mini_batches) must be a whole number: "
            f"{args.prompts_per_step} / ({world_size} x {args.num_mini_batches}) = "
            f"{args.prompts_per_step / (world_size * args.num_mini_batches):g}"
        )
    for name, size in args.shard.parallel_sizes().items():
        if world_size % size:
            raise InputError(f"{as_flag(name)} {size}: must divide the number of ranks, {world_size}")
    lengths = args.data.max_prompt_length, args.rollout.max_response_length
    sequence_parallel_size, micro_batch_tokens = args.shard.sequence_parallel_size, args.optimizer.micro_batch_tokens
    if sequence_parallel_size * micro_batch_tokens < sum(lengths):
        raise InputError(
            "sequence_parallel_size x micro_batch_tokens must hold one row, max_prompt_length + max_response_length: "
            f"{sequence_parallel_size} x {micro_batch_tokens} < {lengths[0]} + {lengths[1]}"
        )
    local_prompts = args.prompts_per_step // world_size
    local_rows = local_prompts * args.group_size
    return Sizes(
        args.group_size,
        args.num_mini_batches,
        args.update_epochs,
        local_prompts,
        local_rows,
        local_rows // args.num_mini_batches,
    )
