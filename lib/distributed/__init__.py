"""Launch, waits, device mesh, FSDP2 and collectives: the same code for 1 process or many, CPU (gloo) or GPU (nccl).

Every rank runs the same script, started by `python`, `torchrun` or `accelerate launch`. accelerate only launches: on a
CPU it would silently replace FSDP2 by DDP. Models are split by ZeRO-1 (compute_copy.py) or FSDP2 (sharding.py). Both
average gradients over ranks, so multiply a loss that is normalised by *global* counts by `world_size`."""

# ruff: noqa: F401, I001  these names are what the package offers

from lib.distributed.collectives import BUCKET_BYTES, all_gather_lists, all_to_all, all_to_all_objects, take_own
from lib.distributed.collectives import all_reduce_max, broadcast, global_counts, on_first_rank
from lib.distributed.collectives import in_thread, new_cpu_group, new_cpu_subgroup
from lib.distributed.compute_copy import master_of, masters_in_place, reduce_gradients, refresh_weights
from lib.distributed.device import COMPILED, ESTIMATED, accelerator, device_name, device_names, device_setter
from lib.distributed.device import device_rng_state, dump_memory, has_flash_attention, own_devices, profiler_activities
from lib.distributed.device import record_memory, set_device_rng_state, synchronize, to_device, total_memory
from lib.distributed.launch import NO_ROOM, OVER, JobOver, World, init_distributed, is_on_one_node, run, wait_for_all
from lib.distributed.launch import advise_out_of_memory, job_store, listening_store, on_early_end, print_last
from lib.distributed.reduced import Max, Mean, Metric, Min, Std, Sum, add_metrics, check_number, faults
from lib.distributed.reduced import current_stage, enter_stage, reduce_metrics, start_step, step_timing, timed
from lib.distributed.reduced import token_means
from lib.distributed.sharding import TENSOR_PARALLEL_STYLES, RowGroup, layer_plan, make_mesh, make_row_group
from lib.distributed.sharding import clip_grad_norm, compute_device, fsdp_modules, shard_model, trainable_parameters
from lib.distributed.sharding import Part, full_tensor, iter_full_params, merged_weight, saved_buffers, weight_shards
from lib.distributed.sharding import set_gradient_sync, unsharded
from lib.distributed.watchdog import StoreLost, note_waits_in
