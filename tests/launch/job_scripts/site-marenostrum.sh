#!/bin/bash
#SBATCH --job-name=hvdtrain
#SBATCH --account=lab1
#SBATCH --partition=acc
#SBATCH --qos=acc_ehpc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=20
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --requeue

# For marenostrum, by copies of these pages, read on 2026-11-30:
#   https://github.com/bsc-wdc/compss/blob/b1a4b9addd0e9f7830d466627d97c629524069d5/compss/runtime/scripts/queues/supercomputers/mn5_acc.cfg
#   https://github.com/TRUBA-HPC/Belgeler (a translation of https://www.bsc.es/supportkc/docs/MareNostrum5, June 2025)
# MareNostrum 5 ACC. The queue acc_ehpc is for EuroHPC's projects: bsc_queues lists yours.
# Modules and network variables were not found.
# Unproven: nobody has run this there yet.
ulimit -c 0
export OMP_NUM_THREADS=20
export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}  # of PMIx: with others, Open MPI may crash at the start
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

trap 'kill -USR1 "$pid"' USR1
srun --kill-on-bad-exit=1 --cpus-per-task=20 --gpu-bind=none python -m hvdtrain script train.py --lr 0.1 'it'"'"'s' &
pid=$!
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
wait "$pid"
code=$?

if [[ -e $OUT/requeue ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
