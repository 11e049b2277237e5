"""The batch sizes of a step, and the ranks that train."""

from dataclasses import dataclass

from lib import InputError, launched_ranks
from lib.args.script import ScriptArgs
from lib.cli.flags import as_flag

MOST_ROWS = 2**24  # of a step, on all ranks


@dataclass
class Sizes:
    """The batch sizes of a step. Those named local_ are per rank."""

    group_size: int
    num_mini_batches: int
    update_epochs: int
    local_prompts: int

    @property
    def local_rows(self) -> int:
        return self.local_prompts * self.group_size

    @property
    def updates_per_step(self) -> int:
        return self.num_mini_batches * self.update_epochs


def training_ranks(args: ScriptArgs) -> int:
    """The ranks that train, of this job or of the one that --dry-run asks about. Raises InputError if there is none."""
    ranks, engines = args.run.dry_run or launched_ranks(), args.rollout.rollout_gpus
    if engines and ranks == 1 and not args.run.dry_run:
        why = "this is one process, and it trains: start several by accelerate launch (docs/scaling.md)"
        raise InputError(f"--rollout-gpus {engines}: {why}")
    if engines >= ranks:
        raise InputError(f"--rollout-gpus {engines}: of {ranks} ranks at least one must train: at most {ranks - 1}")
    return ranks - engines


def step_sizes(args: ScriptArgs, world_size: int) -> Sizes:
    """The batch sizes of a step. Raises InputError, with the formula and its numbers, where they do not fit."""
    prompts, parts = args.prompts_per_step, world_size * args.num_mini_batches
    if not args.validation.val_only and prompts % parts:
        raise InputError(
            "prompts_per_step / (ranks x num_mini_batches) must be a whole number: "
            f"{prompts} / ({world_size} x {args.num_mini_batches}) = {prompts / parts:g}"
        )
    if prompts * args.group_size > MOST_ROWS:
        raise InputError(
            f"--prompts-per-step {prompts} x --group-size {args.group_size}: at most {MOST_ROWS} responses"
        )
    for name, size in args.shard.parallel_sizes().items():
        if world_size % size:
            raise InputError(f"{as_flag(name)} {size}: must divide the number of ranks, {world_size}")
    P, T = args.data.max_prompt_length, args.rollout.max_response_length
    ranks, tokens = args.shard.sequence_parallel_size, args.optimizer.micro_batch_tokens
    if tokens != "auto" and ranks * tokens < P + T:
        raise InputError(
            "sequence_parallel_size x micro_batch_tokens must hold one row, max_prompt_length + max_response_length: "
            f"{ranks} x {tokens} < {P} + {T}"
        )
    return Sizes(args.group_size, args.num_mini_batches, args.update_epochs, prompts // world_size)


def least_micro_batch(args: ScriptArgs) -> int:
    """The tokens that --micro-batch-tokens auto is at least: it holds one row."""
    row = args.data.max_prompt_length + args.rollout.max_response_length
    return max(16384, -(-row // args.shard.sequence_parallel_size))


def engine_rows(args: ScriptArgs, ranks: int) -> int:
    """The rows that a vLLM engine samples at a time (max_num_seqs): what it has of a step, from 256 to 1024. Each takes
    counts of the whole vocabulary: 0.6 GiB for 1024 rows of 152k tokens. ranks: those that train."""
    rollout = args.rollout
    engines = max(1, (rollout.rollout_gpus or ranks) // rollout.rollout_tensor_parallel_size)
    rows = args.prompts_per_step * args.group_size * (1 + rollout.async_level) // engines
    return min(max(256, rows), 1024)
