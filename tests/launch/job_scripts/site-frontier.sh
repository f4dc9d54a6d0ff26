#!/bin/bash
#SBATCH --job-name=hvdtrain
#SBATCH --account=lab1
#SBATCH --partition=batch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --requeue

# For frontier, by copies of these pages, read on 2026-11-30:
#   https://github.com/olcf/olcf-user-docs/blob/0457735bc474a7064afa8b607837bb3461a77923/software/analytics/pytorch_frontier.rst
# A rank sees one GPU, number 0, the closest to its cores.
# Unproven: nobody has run this there yet.
module load PrgEnv-gnu/8.6.0
module load rocm/6.2.4
module load craype-accel-amd-gfx90a
export FI_MR_CACHE_MONITOR=kdreg2
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=2048
export FI_CXI_RX_MATCH_MODE=hybrid
export NCCL_NET_GDR_LEVEL=3
export NCCL_CROSS_NIC=1
export NCCL_SOCKET_IFNAME=hsn0
export MIOPEN_USER_DB_PATH=/tmp/$USER-miopen-cache
export MIOPEN_CUSTOM_CACHE_DIR=/tmp/$USER-miopen-cache
ulimit -c 0
export OMP_NUM_THREADS=7
export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}  # of PMIx: with others, Open MPI may crash at the start
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

trap 'kill -USR1 "$pid"' USR1
srun --kill-on-bad-exit=1 --cpus-per-task=7 --gpus-per-task=1 --gpu-bind=closest python -m hvdtrain script train.py --lr 0.1 'it'"'"'s' &
pid=$!
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
wait "$pid"
code=$?

if [[ -e $OUT/requeue ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
