#!/bin/bash
#SBATCH --job-name=hvdtrain
#SBATCH --account=lab1
#SBATCH --partition=normal
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --requeue

# For alps, by copies of these pages, read on 2026-11-30:
#   https://github.com/eth-cscs/cscs-docs/blob/1e11d7881261db2a44efc8c43ec151ea3acdba9d/docs/running/slurm.md
#   https://github.com/eth-cscs/cscs-docs/blob/1660b1eeba742f3ae4ac9f9ffd53ad73f12522d0/docs/software/communication/nccl_env_vars
# NCCL_NET needs aws-ofi-nccl, as in the uenv prgenv-gnu. GPU N is that of local rank N.
# Unproven: nobody has run this there yet.
export NCCL_NET='AWS Libfabric'
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_PROTO='^LL128'
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=32768
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_RX_MATCH_MODE=software
export FI_MR_CACHE_MONITOR=userfaultfd
export MPICH_GPU_SUPPORT_ENABLED=0
ulimit -c 0
export OMP_NUM_THREADS=72
export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}  # of PMIx: with others, Open MPI may crash at the start
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

trap 'kill -USR1 "$pid"' USR1
srun --kill-on-bad-exit=1 --cpus-per-task=72 --gpu-bind=none python -m hvdtrain script train.py --lr 0.1 'it'"'"'s' &
pid=$!
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
wait "$pid"
code=$?

if [[ -e $OUT/requeue ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
