"""Launch, waits, device mesh, FSDP2 and collectives: the same code for 1 process or many, CPU (gloo) or GPU (nccl).

Every rank runs the same script, started by `python`, `torchrun` or `accelerate launch`. accelerate only launches; it
does not wrap the model (on a CPU it silently replaces FSDP2 by DDP). Sharding is `fully_shard` itself, at every world
size, so that one process and eight run the same code. FSDP averages gradients over ranks, so multiply a loss that is
normalised by *global* counts by `world_size`.
"""

from lib.distributed.clock import start_step, step_timing, timed
from lib.distributed.collectives import (
    TakeOwn,
    address_towards,
    all_gather_lists,
    all_reduce_max,
    all_reduce_sum,
    all_to_all,
    all_to_all_objects,
    broadcast,
    global_counts,
    join_group,
    new_cpu_group,
    new_cpu_subgroup,
    on_first_rank,
)
from lib.distributed.launch import (
    World,
    advise_out_of_memory,
    init_distributed,
    listening_store,
    on_early_end,
    print_last,
    run,
    wait_for_all,
)
from lib.distributed.reduced import Max, Mean, Metric, Min, Sum, add_metrics, reduce_metrics, token_means
from lib.distributed.sharding import (
    TENSOR_PARALLEL_STYLES,
    RowGroup,
    clip_grad_norm,
    compute_device,
    fsdp_modules,
    full_tensor,
    iter_full_params,
    make_mesh,
    make_row_group,
    merged_shards,
    set_gradient_sync,
    shard_model,
    trainable_parameters,
    unsharded,
)
from lib.distributed.watchdog import enter_stage, note_waits_in

__all__ = [
    "TENSOR_PARALLEL_STYLES",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "RowGroup",
    "Sum",
    "TakeOwn",
    "World",
    "add_metrics",
    "address_towards",
    "advise_out_of_memory",
    "all_gather_lists",
    "all_reduce_max",
    "all_reduce_sum",
    "all_to_all",
    "all_to_all_objects",
    "broadcast",
    "clip_grad_norm",
    "compute_device",
    "enter_stage",
    "fsdp_modules",
    "full_tensor",
    "global_counts",
    "init_distributed",
    "iter_full_params",
    "join_group",
    "listening_store",
    "make_mesh",
    "make_row_group",
    "merged_shards",
    "new_cpu_group",
    "new_cpu_subgroup",
    "note_waits_in",
    "on_early_end",
    "on_first_rank",
    "print_last",
    "reduce_metrics",
    "run",
    "set_gradient_sync",
    "shard_model",
    "start_step",
    "step_timing",
    "timed",
    "token_means",
    "trainable_parameters",
    "unsharded",
    "wait_for_all",
]
