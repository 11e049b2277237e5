#!/usr/bin/env bash
# One node: launch/one_node.sh grpo.py [flags]
#
# GPUS (8) may be set. It is torchrun without its port: torchrun's own store listens on all interfaces and unpickles what
# it is sent. Here torchrun meets itself in a file, and the ranks' store is in rank 0, on loopback. torchrun reads its
# other options from PET_*, such as PET_MAX_RESTARTS=3, with --resume auto.
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nproc-per-node "${GPUS:-8}" --rdzv-backend c10d --rdzv-conf store_type=file "$@"
