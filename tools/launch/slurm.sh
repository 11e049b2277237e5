#!/usr/bin/env bash
# From the repository: sbatch tools/launch/slurm.sh grpo.py --model ...
# One torchrun a node; they meet on the first. After a crash or a requeue the run goes on from its newest complete
# checkpoint, on a disk that all nodes share.
#SBATCH --job-name=plainrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail
: "${SLURM_JOB_ID:?this is no Slurm job: sbatch tools/launch/slurm.sh grpo.py ...}"
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${HOSTS[0]}
export HEAD NODES="$SLURM_NNODES" PET_MAX_RESTARTS=3
# Slurm runs a copy of this file from a folder of its own
srun --kill-on-bad-exit=1 "$SLURM_SUBMIT_DIR/tools/launch/torchrun_nodes.sh" \
    "$@" --run-name "slurm-$SLURM_JOB_ID" --resume auto
