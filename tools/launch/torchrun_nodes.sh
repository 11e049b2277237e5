#!/usr/bin/env bash
# Several nodes without a scheduler: the same line on each, HEAD being the first node's name or address as all see it.
#
#     HEAD=node-0 tools/launch/torchrun_nodes.sh grpo.py --run-name r1 --resume auto --model ...
#
# With --rollout-gpus 8 the last node samples for the others.
#
# NODES (2), GPUS a node (8) and PORT (29500) may be set too. torchrun reads its own options from PET_*:
# PET_LOCAL_ADDR=10.0.0.1, this node's address, where its name does not resolve; PET_RDZV_CONF=is_host=1 on the first
# node and is_host=0 on the others where HEAD is an address that the first does not know as its own;
# PET_MAX_RESTARTS=3, with --resume auto. NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the network interface where
# the default is not the one between the nodes.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"  # a copy of a script may be in another repository
trap '' HUP && export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT  # a closed terminal does not end the run
command -v torchrun > /dev/null || PATH="$root/.venv/bin:$PATH"
command -v torchrun > /dev/null || { echo "error: no torchrun here: run \`make setup\`, or activate your environment" >&2; exit 1; }
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-8}" --rdzv-backend c10d --rdzv-id plainrl \
    --rdzv-endpoint "${HEAD:?the name of the first node}:${PORT:-29500}" "$@"
