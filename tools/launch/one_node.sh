#!/usr/bin/env bash
# One node: tools/launch/one_node.sh grpo.py [flags]
#
# torchrun by itself listens on all interfaces and unpickles what it is sent there. Here it meets itself in a file, which
# nobody else can open, and the ranks' store is in rank 0, on loopback. GPUS (8) may be set; torchrun reads its other
# options from PET_*, such as PET_MAX_RESTARTS=3, with --resume auto. With --rollout-gpus 4 half of the GPUs sample.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"  # a copy of a script may be in another repository
command -v torchrun > /dev/null || PATH="$root/.venv/bin:$PATH"
command -v torchrun > /dev/null || { echo "error: no torchrun here: run \`make setup\`, or activate your environment" >&2; exit 1; }
file=$(mktemp)
exec 9<> "$file"
rm "$file"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export PLAINRL_LAUNCHER="GPUS=${GPUS:-8} $0"  # for the line that says how to go on
trap '' HUP && export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT  # a closed terminal does not end the run
exec torchrun --nproc-per-node "${GPUS:-8}" --rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint /dev/fd/9 "$@"
